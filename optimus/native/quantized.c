/* The call: rounding, then blocks of the product. The arithmetic is in portable.c and vnni.c. */
#include "quantized.h"

/* Of a second-level cache of 1 MB, what the weights of a block may take. */
#define BLOCK_BYTES (320 << 10)
/* Rounded activations that are held at once, in bytes. */
#define CHUNK_BYTES (4 << 20)
/* Rows below which threads share no rounding: waking them takes longer. */
#define ROUND_ROWS 8
/* Rows that are always rounded at once, however wide they are. */
#define LEAST_CHUNK 64
#define MOST_WEIGHTS 4

typedef struct {
    call_t *call;
    const kernels_t *kernels;
    grid_t grid;
    atomic_long rounded;
    atomic_int failed;
} work_t;

static void round_rows(void *data)
{
    work_t *work = data;
    long item;
    while ((item = atomic_fetch_add(&work->rounded, 1)) * ROUND_ROWS < work->call->rows) {
        int64_t row = item * ROUND_ROWS, end = row + ROUND_ROWS;
        for (; row < end && row < work->call->rows; row++)
            work->kernels->round_row(work->call, row);
    }
}

static const uint8_t *codes_of(const call_t *call, int64_t tile)
{
    return call->weight->codes + tile * call->kp * TILE * call->weight->bits / 8;
}

static void multiply_block(work_t *work, item_t item, ahead_t *ahead)
{
    int bits = work->call->weight->bits;
    const uint8_t *codes = codes_of(work->call, item.unit);
    if (bits == 4 && item.rows > FEW_ROWS) {
        int64_t bytes = codes_of(work->call, item.unit + item.units) - codes;
        uint8_t *panel = optimus_scratch(PANEL, (size_t)(2 * bytes));
        if (!panel) {
            atomic_store(&work->failed, 1);
            return;
        }
        work->kernels->unpack(codes, panel, bytes);
        codes = panel;
        bits = 8;
    }
    work->kernels->multiply(work->call, codes, bits, item.unit, item.units, item.row, item.rows,
                            ahead);
}

/* Each thread takes a block before it multiplies the one before, to know what to fetch. */
static void multiply_blocks(void *data)
{
    work_t *work = data;
    for (item_t item = optimus_take(&work->grid), next; item.units; item = next) {
        next = optimus_take(&work->grid);
        ahead_t ahead = {0};
        if (next.units && next.unit != item.unit) {
            ahead.next = codes_of(work->call, next.unit);
            ahead.end = codes_of(work->call, next.unit + next.units);
        }
        multiply_block(work, item, &ahead);
    }
}

/* Tiles of a block: what fits the cache, or all where a few rows read them only once. */
static int64_t most_tiles(const call_t *call)
{
    int64_t most = BLOCK_BYTES / (call->kp * TILE) & ~(int64_t)3;
    return call->rows <= FEW_ROWS ? 0 : most < 4 ? 4 : most;
}

/* Whether there is memory for the rounded rows. */
static int place_rounded(call_t *call)
{
    size_t codes = (size_t)(call->rows * call->kp);
    size_t words = (size_t)(call->rows * call->groups) * 4;
    char *memory = optimus_scratch(ROUNDED, codes + 2 * words);
    if (!memory)
        return 0;
    call->codes = (int8_t *)memory;
    call->scale = (float *)(memory + codes);
    call->start = (int32_t *)(memory + codes + words);
    return 1;
}

static work_t planned(call_t *call, const kernels_t *kernels, int threads)
{
    work_t work = {.call = call, .kernels = kernels,
                   .grid = {.units = ceil_div(call->weight->n, TILE), .rows = call->rows}};
    optimus_cut(&work.grid, most_tiles(call), 4, call->together, threads);
    return work;
}

typedef struct {
    work_t works[MOST_WEIGHTS];
    int count;
} group_t;

/* Threads go on to the next weight without waiting for each other. */
static void multiply_group(void *data)
{
    group_t *group = data;
    for (int i = 0; i < group->count; i++)
        multiply_blocks(&group->works[i]);
}

/* Calls with the same rows of one input, which is rounded for the first. */
static int multiply_calls(call_t *calls, int count, const kernels_t *kernels, int threads)
{
    group_t group = {.count = count};
    int64_t blocks = 0;
    int failed = 0;
    if (!place_rounded(calls))
        return -1;
    for (int i = 0; i < count; i++) {
        calls[i].codes = calls[0].codes;
        calls[i].scale = calls[0].scale;
        calls[i].start = calls[0].start;
        group.works[i] = planned(&calls[i], kernels, threads);
        blocks += group.works[i].grid.blocks * group.works[i].grid.row_blocks;
    }
    optimus_run(round_rows, &group.works[0], calls[0].rows > ROUND_ROWS ? threads : 1);
    optimus_run(multiply_group, &group, blocks > 1 ? threads : 1);
    for (int i = 0; i < count; i++)
        failed |= atomic_load(&group.works[i].failed);
    return failed ? -1 : 0;
}

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

static const kernels_t *chosen(int kernels)
{
#ifdef OPTIMUS_HAS_VNNI
    if (kernels == VNNI)
        return &optimus_vnni;
#endif
    return &optimus_portable;
}

static call_t prepared(const optimus_weight *weight, const void *input, int64_t stride, int dtype)
{
    call_t call = {.weight = weight, .input = input, .stride = stride, .dtype = dtype};
    call.kp = ceil_div(weight->k, PAD) * PAD;
    call.group = weight->group ? weight->group : call.kp;
    call.groups = call.kp / call.group;
    call.together = call.groups == 1 ? MOST_ROWS : FEW_ROWS;
    return call;
}

/* output [rows, n] = input [rows, k] (rows `stride` numbers apart) @ weightᵀ + bias.
   0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_quantized_linear(const optimus_weight *weight, const void *input, int64_t rows,
                                    int64_t stride, int dtype, const void *bias, int bias_dtype,
                                    void *output, int threads, int kernels)
{
    call_t call = prepared(weight, input, stride, dtype);
    call.bias = bias;
    call.bias_dtype = bias_dtype;
    call.output = output;
    int64_t chunk = CHUNK_BYTES / call.kp;
    chunk = chunk < LEAST_CHUNK ? LEAST_CHUNK : chunk;
    for (; call.first_row < rows; call.first_row += chunk) {
        call.rows = smaller(rows - call.first_row, chunk);
        if (multiply_calls(&call, 1, chosen(kernels), threads))
            return -1;
    }
    return 0;
}

EXPORT int optimus_quantized_group(const optimus_weight *const *weights, int count,
                                   const void *input, int64_t rows, int64_t stride, int dtype,
                                   const void *const *biases, const int *bias_dtypes,
                                   void *const *outputs, int threads, int kernels)
{
    call_t calls[MOST_WEIGHTS];
    for (int i = 0; i < count; i++) {
        calls[i] = prepared(weights[i], input, stride, dtype);
        calls[i].rows = rows;
        calls[i].bias = biases[i];
        calls[i].bias_dtype = bias_dtypes[i];
        calls[i].output = outputs[i];
    }
    return multiply_calls(calls, count, chosen(kernels), threads);
}
