/* The call: rounding, then blocks of the product. The arithmetic is in portable.c and vnni.c. */
#include "quantized.h"

/* Of a second-level cache of 1 MB, what the weights of a block may take. */
#define BLOCK_BYTES (320 << 10)
/* Rounded activations that are held at once, in bytes. */
#define CHUNK_BYTES (4 << 20)
/* Rows below which threads share no rounding: waking them takes longer. */
#define ROUND_ROWS 8

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

static int multiply_chunk(call_t *call, const kernels_t *kernels, int threads)
{
    size_t codes = (size_t)(call->rows * call->kp);
    size_t words = (size_t)(call->rows * call->groups) * 4;
    char *memory = optimus_scratch(ROUNDED, codes + 2 * words);
    if (!memory)
        return -1;
    call->codes = (int8_t *)memory;
    call->scale = (float *)(memory + codes);
    call->start = (int32_t *)(memory + codes + words);
    work_t work = {.call = call, .kernels = kernels,
                   .grid = {.units = ceil_div(call->weight->n, TILE), .rows = call->rows}};
    optimus_run(round_rows, &work, call->rows > ROUND_ROWS ? threads : 1);
    optimus_cut(&work.grid, most_tiles(call), 4, call->together, threads);
    optimus_run(multiply_blocks, &work, work.grid.blocks * work.grid.row_blocks > 1 ? threads : 1);
    return atomic_load(&work.failed) ? -1 : 0;
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
