/* The call: scratch, blocking, threads. The arithmetic is in portable.c and vnni.c. */
#include "quantized.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Of a second-level cache of 1 MB, what the weights of a block may take. */
#define BLOCK_BYTES (320 << 10)
/* Rounded activations that are held at once, in bytes. */
#define CHUNK_BYTES (4 << 20)
/* Rows below which threads share no rounding: waking them takes longer. */
#define ROUND_ROWS 8

/* libgomp's and libomp's entry to a parallel region; torch's own copy of it, given by Python. */
typedef void (*parallel_t)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
static parallel_t parallel;

typedef struct {
    call_t *call;
    const kernels_t *kernels;
    atomic_long next;
    atomic_int failed;
    int64_t tiles, tiles_a_block, rows_a_block, blocks, row_blocks;
} work_t;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    void *memory;
    size_t size;
} scratch_t;

enum { ROUNDED, PANEL, KINDS };
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void release(void *scratch)
{
    for (int kind = 0; kind < KINDS; kind++)
        free(((scratch_t *)scratch)[kind].memory);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&key, release); }

/* Memory of this thread's own, kept for its next call; null when there is none left. */
static void *scratch(int kind, size_t size)
{
    pthread_once(&once, make_key);
    scratch_t *mine = pthread_getspecific(key);
    if (!mine) {
        mine = calloc(KINDS, sizeof *mine);
        if (!mine)
            return 0;
        pthread_setspecific(key, mine);
    }
    if (mine[kind].size < size) {
        free(mine[kind].memory);
        size = (size + 4095) & ~(size_t)4095;
        mine[kind].memory = aligned_alloc(64, size);
        mine[kind].size = mine[kind].memory ? size : 0;
    }
    return mine[kind].memory;
}

static void round_rows(void *data)
{
    work_t *work = data;
    long item;
    while ((item = atomic_fetch_add(&work->next, 1)) * ROUND_ROWS < work->call->rows) {
        int64_t row = item * ROUND_ROWS, end = row + ROUND_ROWS;
        for (; row < end && row < work->call->rows; row++)
            work->kernels->round_row(work->call, row);
    }
}

typedef struct {
    int64_t tile, tiles, row, rows;
    const uint8_t *codes;
    int64_t bytes;
} item_t;

/* The next block that no thread has taken yet; without tiles when there is none left. */
static item_t take(work_t *work)
{
    const call_t *call = work->call;
    const int64_t stride = call->kp * TILE * call->weight->bits / 8;
    long number = atomic_fetch_add(&work->next, 1);
    item_t item = {0};
    if (number >= work->blocks * work->row_blocks)
        return item;
    item.tile = number / work->row_blocks * work->tiles_a_block;
    item.row = number % work->row_blocks * work->rows_a_block;
    item.tiles = smaller(work->tiles - item.tile, work->tiles_a_block);
    item.rows = smaller(call->rows - item.row, work->rows_a_block);
    item.codes = call->weight->codes + item.tile * stride;
    item.bytes = item.tiles * stride;
    return item;
}

static void multiply_block(work_t *work, item_t item, ahead_t *ahead)
{
    int bits = work->call->weight->bits;
    const uint8_t *codes = item.codes;
    if (bits == 4 && item.rows > FEW_ROWS) {
        uint8_t *panel = scratch(PANEL, (size_t)(2 * item.bytes));
        if (!panel) {
            atomic_store(&work->failed, 1);
            return;
        }
        work->kernels->unpack(codes, panel, item.bytes);
        codes = panel;
        bits = 8;
    }
    work->kernels->multiply(work->call, codes, bits, item.tile, item.tiles, item.row, item.rows,
                            ahead);
}

/* Each thread takes a block before it multiplies the one before, to know what to fetch. */
static void multiply_blocks(void *data)
{
    work_t *work = data;
    for (item_t item = take(work), next; item.tiles; item = next) {
        next = take(work);
        ahead_t ahead = {next.codes, next.codes};
        if (next.codes != item.codes)
            ahead.end += next.bytes;
        multiply_block(work, item, &ahead);
    }
}

/* Blocks that fit the cache, and enough of them for every thread to have several. */
static void plan(work_t *work, int threads)
{
    const call_t *call = work->call;
    int64_t wanted = threads > 1 ? 4 * threads : 1;
    int64_t most = BLOCK_BYTES / (call->kp * TILE) & ~(int64_t)3;
    int64_t share = ceil_div(ceil_div(work->tiles, wanted), 4) * 4;
    if (most < 4)
        most = 4;
    if (call->rows <= FEW_ROWS || share < most)
        most = share;
    work->tiles_a_block = most;
    work->blocks = ceil_div(work->tiles, most);
    work->row_blocks = 1;
    if (work->blocks < wanted) {
        int64_t split = ceil_div(wanted, work->blocks), parts = ceil_div(call->rows, 64);
        work->row_blocks = split < parts ? split : parts;
    }
    work->rows_a_block = ceil_div(ceil_div(call->rows, work->row_blocks), call->together);
    work->rows_a_block *= call->together;
    work->row_blocks = ceil_div(call->rows, work->rows_a_block);
}

void optimus_parallel(void (*body)(void *), void *data, int threads)
{
    if (parallel && threads > 1)
        parallel(body, data, (unsigned)threads, 0);
    else
        body(data);
}

static void run(work_t *work, void (*body)(void *), int threads)
{
    atomic_store(&work->next, 0);
    optimus_parallel(body, work, threads);
}

static int multiply_chunk(call_t *call, const kernels_t *kernels, int threads)
{
    size_t codes = (size_t)(call->rows * call->kp);
    size_t words = (size_t)(call->rows * call->groups) * 4;
    char *memory = scratch(ROUNDED, codes + 2 * words);
    if (!memory)
        return -1;
    call->codes = (int8_t *)memory;
    call->scale = (float *)(memory + codes);
    call->start = (int32_t *)(memory + codes + words);
    work_t work = {.call = call, .kernels = kernels, .tiles = ceil_div(call->weight->n, TILE)};
    run(&work, round_rows, call->rows > ROUND_ROWS ? threads : 1);
    plan(&work, threads);
    run(&work, multiply_blocks, work.blocks * work.row_blocks > 1 ? threads : 1);
    return atomic_load(&work.failed) ? -1 : 0;
}

EXPORT void optimus_set_parallel(parallel_t entry) { parallel = entry; }

/* The best kernels of this processor. */
EXPORT int optimus_kernels(void)
{
#ifdef OPTIMUS_HAS_VNNI
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return VNNI;
#endif
    return PORTABLE;
}

/* output [rows, n] = input [rows, k] (rows `stride` numbers apart) @ weightᵀ + bias.
   0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_quantized_linear(const optimus_weight *weight, const void *input, int64_t rows,
                                    int64_t stride, int dtype, const void *bias, int bias_dtype,
                                    void *output, int threads, int kernels)
{
    const kernels_t *chosen = &optimus_portable;
#ifdef OPTIMUS_HAS_VNNI
    if (kernels == VNNI)
        chosen = &optimus_vnni;
#endif
    call_t call = {.weight = weight, .input = input, .bias = bias, .output = output,
                   .stride = stride, .dtype = dtype, .bias_dtype = bias_dtype};
    call.kp = ceil_div(weight->k, PAD) * PAD;
    call.group = weight->group ? weight->group : call.kp;
    call.groups = call.kp / call.group;
    call.together = call.groups == 1 ? MOST_ROWS : FEW_ROWS;
    int64_t chunk = CHUNK_BYTES / call.kp;
    chunk = chunk < 64 ? 64 : chunk;
    for (; call.first_row < rows; call.first_row += chunk) {
        call.rows = smaller(rows - call.first_row, chunk);
        if (multiply_chunk(&call, chosen, threads))
            return -1;
    }
    return 0;
}
