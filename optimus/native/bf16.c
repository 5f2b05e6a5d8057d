/* Linear layers in bf16 with AVX512-BF16: vdpbf16ps adds 16 sums of two products to fp32.

   The weight lies as it is read: panels of 64 of its rows (the last has what is left, in tiles of 16),
   in each [k/2][64][2]. One layout serves one row, which is as fast as the memory is, and many. The
   input is read where it lies. */
#include "bf16.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define OPTIMUS_HAS_BF16 1
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")))
#include "vectors.h"

enum { TILE = 16, WIDE = 4, PANEL_ROWS = 64, MOST_ROWS = 6, UNROLL = 4 };
/* How far ahead of the product of a few rows its weights are asked for, in bytes. */
#define AHEAD 4096
/* Of a second-level cache of 1 MB, what the weights of a block may take. */
#define BLOCK_BYTES (512 << 10)
/* Activations that are multiplied by all of the weight before the next are, in bytes. */
#define CHUNK_BYTES (4 << 20)
#define LEAST_CHUNK 96
/* Lines of the next block that are asked for with each pair of k. */
#define FETCH 1

/* weight: the panels; input [rows, k], its rows `stride` numbers apart; output [rows, n]. */
typedef struct {
    const uint16_t *weight, *input;
    const void *bias;
    uint16_t *output;
    int64_t n, k, kp, stride;
    int32_t bias_dtype;
} call_t;

/* Of a panel's k, the part that is multiplied now, and where its sums wait between two parts. */
typedef struct {
    int64_t from, to;
    float *sums;
} part_t;

INLINE int32_t pair(const uint16_t *x)
{
    int32_t both;
    memcpy(&both, x, sizeof both);
    return both;
}

/* Asks for a little of the next weights, so that they arrive while these are multiplied. */
INLINE void fetch(ahead_t *ahead)
{
    if (ahead->next >= ahead->end)
        return;
    for (int line = 0; line < FETCH * UNROLL; line++)
        _mm_prefetch((const char *)(ahead->next + line * 64), _MM_HINT_T1);
    ahead->next += FETCH * UNROLL * 64;
}

INLINE void finish(const call_t *call, int64_t row, int64_t column, __m512 sum)
{
    const __mmask16 mask = first(call->n - column);
    if (call->bias)
        sum = _mm512_add_ps(sum, load(call->bias, column, call->bias_dtype, mask));
    store(call->output, row * call->n + column, BFLOAT16, mask, sum);
}

/* Every sum is a variable of its own: gcc 12 leaves an array of them in memory. And the product is
   assembly, because it copies them around the intrinsic. */
#define EACH_TILE(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define EACH_SUM(DO)                                                                               \
    EACH_TILE(DO, 0) EACH_TILE(DO, 1) EACH_TILE(DO, 2) EACH_TILE(DO, 3) EACH_TILE(DO, 4)           \
    EACH_TILE(DO, 5)
#define AT(r, v) part.sums + (r * WIDE + v) * TILE
#define START(r, v)                                                                                \
    __m512 sum##r##v = r < R && v < V && part.from ? _mm512_loadu_ps(AT(r, v)) : _mm512_setzero_ps();
#define KEEP(r, v)                                                                                 \
    if (r < R && v < V)                                                                            \
        _mm512_storeu_ps(AT(r, v), sum##r##v);
#define FINISH(r, v)                                                                               \
    if (r < R && v < V)                                                                            \
        finish(call, row + r, column + v * TILE, sum##r##v);
#define WEIGHTS(r, v)                                                                              \
    __m512i w##v = v < V ? _mm512_loadu_si512(w + v * 2 * TILE) : _mm512_setzero_si512();          \
    if (streams && v < V)                                                                          \
        _mm_prefetch((const char *)(w + v * 2 * TILE) + AHEAD, _MM_HINT_NTA);
#define PRODUCT(r, v)                                                                              \
    if (v < V)                                                                                     \
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum##r##v) : "v"(w##v), "v"(two));
#define PRODUCTS(r)                                                                                \
    if (r < R) {                                                                                   \
        const __m512i two = _mm512_set1_epi32(READ(x + r * stride));                               \
        EACH_TILE(PRODUCT, r)                                                                      \
    }
#define STEP                                                                                       \
    {                                                                                              \
        EACH_TILE(WEIGHTS, 0)                                                                      \
        EACH_ROW(PRODUCTS)                                                                         \
        w += V * 2 * TILE;                                                                         \
        x += 2;                                                                                    \
    }

/* The products of R rows and V tiles, summed in registers. R, V and whether the weights stream past
   are constants. */
INLINE void block(const int R, const int V, const int streams, const call_t *call, part_t part,
                  int64_t column, int64_t row, ahead_t *ahead)
{
    const int64_t stride = call->stride, odd = call->k % 2 && part.to == call->kp;
    const uint16_t *w = call->weight + column * call->kp + part.from * V * TILE;
    const uint16_t *x = call->input + row * stride + part.from;
    int64_t pairs = (part.to - part.from) / 2 - odd;
    EACH_SUM(START)
#define READ(x) pair(x)
    for (; pairs >= UNROLL; pairs -= UNROLL) {
#pragma GCC unroll 8
        for (int u = 0; u < UNROLL; u++)
            STEP
        if (!streams)
            fetch(ahead);
    }
    for (; pairs; pairs--)
        STEP
#undef READ
#define READ(x) *(x)
    if (odd)
        STEP
    if (part.to == call->kp) {
        EACH_SUM(FINISH)
    } else {
        EACH_SUM(KEEP)
    }
}

typedef void (*block_t)(const call_t *, part_t, int64_t, int64_t, ahead_t *);

#define BLOCK(R, V, streams)                                                                       \
    TARGET static void block_##R##_##V##streams(const call_t *call, part_t part, int64_t column,   \
                                                int64_t row, ahead_t *ahead)                       \
    {                                                                                              \
        block(R, V, streams, call, part, column, row, ahead);                                      \
    }
#define NAME(R, V, streams) block_##R##_##V##streams,
#define ROWS(DO, V, streams)                                                                       \
    DO(1, V, streams)                                                                              \
    DO(2, V, streams)                                                                              \
    DO(3, V, streams)                                                                              \
    DO(4, V, streams)                                                                              \
    DO(5, V, streams)                                                                              \
    DO(6, V, streams)
#define TILES(DO, streams)                                                                         \
    ROWS(DO, 1, streams)                                                                           \
    ROWS(DO, 2, streams)                                                                           \
    ROWS(DO, 3, streams)                                                                           \
    ROWS(DO, 4, streams)
TILES(BLOCK, 0)
TILES(BLOCK, 1)

/* [streams][tiles - 1][rows - 1] */
static const block_t kernels[2][WIDE][MOST_ROWS] = {
    {{ROWS(NAME, 1, 0)}, {ROWS(NAME, 2, 0)}, {ROWS(NAME, 3, 0)}, {ROWS(NAME, 4, 0)}},
    {{ROWS(NAME, 1, 1)}, {ROWS(NAME, 2, 1)}, {ROWS(NAME, 3, 1)}, {ROWS(NAME, 4, 1)}},
};

typedef struct {
    const call_t *call;
    grid_t grid;
    int64_t part;
    atomic_int failed;
} work_t;

/* Tiles of a panel. */
static int64_t tiles_of(const call_t *call, int64_t panel)
{
    return smaller(ceil_div(call->n, TILE) - panel * WIDE, WIDE);
}

/* Where the part from `from` of an item's weights lies; behind the last, nothing. */
static ahead_t weights_of(const work_t *work, item_t item, int64_t from)
{
    const call_t *call = work->call;
    const uint16_t *start = call->weight + item.unit * PANEL_ROWS * call->kp;
    int64_t length = item.units * PANEL_ROWS * smaller(work->part, call->kp - from);
    start += from * TILE * tiles_of(call, item.unit);
    ahead_t ahead = {(const uint8_t *)start, (const uint8_t *)(start + length)};
    return ahead;
}

/* One part of the k of some panels, for some rows: as many at a time as registers hold, in even
   shares. */
static void multiply_part(const call_t *call, item_t item, part_t part, ahead_t *ahead)
{
    const int streams = item.rows <= MOST_ROWS;
    float *sums = part.sums;
    int64_t left = item.rows, these;
    for (; left; left -= these) {
        these = ceil_div(left, ceil_div(left, MOST_ROWS));
        for (int64_t panel = item.unit; panel < item.unit + item.units; panel++) {
            int64_t column = panel * PANEL_ROWS;
            int64_t tiles = tiles_of(call, panel);
            part.sums = sums + (item.rows - left) * PANEL_ROWS;
            kernels[streams][tiles - 1][these - 1](call, part, column, item.row + item.rows - left,
                                                   ahead);
        }
    }
}

/* One block, part by part. While one is multiplied, the next is fetched: of this block or another. */
static void multiply_block(const work_t *work, item_t item, item_t next, float *sums)
{
    const int64_t kp = work->call->kp;
    part_t part = {.sums = sums};
    for (; part.from < kp; part.from = part.to) {
        part.to = smaller(part.from + work->part, kp);
        ahead_t ahead = {0};
        if (part.to < kp)
            ahead = weights_of(work, item, part.to);
        else if (next.unit != item.unit || work->part < kp)
            ahead = weights_of(work, next, 0);
        multiply_part(work->call, item, part, &ahead);
    }
}

/* Each thread takes a block before it multiplies the one before, to know what to fetch. */
static void multiply_blocks(void *data)
{
    work_t *work = data;
    const int64_t rows = work->part < work->call->kp ? work->grid.rows_a_block : 0;
    float *sums = optimus_scratch(SUMS, (size_t)(rows * PANEL_ROWS) * sizeof *sums);
    if (rows && !sums) {
        atomic_store(&work->failed, 1);
        return;
    }
    for (item_t item = optimus_take(&work->grid), next; item.units; item = next) {
        next = optimus_take(&work->grid);
        multiply_block(work, item, next, sums);
    }
}
#endif

/* Whether this processor has the instructions. */
EXPORT int optimus_has_bf16(void)
{
#ifdef OPTIMUS_HAS_BF16
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

#ifdef OPTIMUS_HAS_BF16
static int multiply_rows(const call_t *call, int64_t rows, int threads)
{
    const int64_t bytes = call->kp * PANEL_ROWS * (int64_t)sizeof *call->weight;
    const int64_t panels = BLOCK_BYTES / bytes, parts = ceil_div(bytes, BLOCK_BYTES);
    const int streams = rows <= MOST_ROWS;
    work_t work = {.call = call, .grid = {.units = ceil_div(call->n, PANEL_ROWS), .rows = rows}};
    work.part = streams ? call->kp : ceil_div(ceil_div(call->kp, parts), 32) * 32;
    optimus_cut(&work.grid, streams ? 0 : panels + !panels, 1, MOST_ROWS, threads);
    optimus_run(multiply_blocks, &work, work.grid.blocks * work.grid.row_blocks > 1 ? threads : 1);
    return atomic_load(&work.failed) ? -1 : 0;
}
#endif

EXPORT int optimus_bf16_linear(const uint16_t *weight, int64_t n, int64_t k, const uint16_t *input,
                               int64_t rows, int64_t stride, const void *bias, int bias_dtype,
                               uint16_t *output, int threads)
{
#ifdef OPTIMUS_HAS_BF16
    call_t call = {weight, input, bias, output, n, k, k + k % 2, stride, bias_dtype};
    const int64_t chunk = ceil_div(CHUNK_BYTES, 2 * k * LEAST_CHUNK) * LEAST_CHUNK;
    for (int64_t row = 0; row < rows; row += chunk) {
        call.input = input + row * stride;
        call.output = output + row * n;
        if (multiply_rows(&call, smaller(rows - row, chunk), threads))
            return -1;
    }
    return 0;
#else
    return -1;
#endif
}
