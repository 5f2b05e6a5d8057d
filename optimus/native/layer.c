/* What stands between the products of a decoder layer, for a few rows: norms, gates, rotary
   positions and one query over the keys of a cache. fp32 inside, whatever the tensors are. */
#include "layer.h"

#ifdef OPTIMUS_HAS_LAYER
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#include "vectors.h"
#include "curves.h"

#include <math.h>

/* Numbers that one thread is quicker with than two are woken. */
#define ALONE (1 << 16)
enum { WIDTH = 16, CHUNK = 4, HEADS = 4 };

typedef struct {
    const void *input, *weight;
    void *output;
    int64_t rows, width, stride;
    float eps;
    int32_t dtype;
    atomic_long next;
} norm_t;

/* As the host does: the quotient is rounded to the dtype before the weight multiplies it. */
INLINE __m512 rounded(__m512 value, int dtype)
{
    uint16_t half[WIDTH];
    if (dtype == FLOAT32)
        return value;
    store(half, 0, dtype, 0xFFFF, value);
    return load(half, 0, dtype, 0xFFFF);
}

TARGET static void norm_row(const norm_t *norm, int64_t row)
{
    const int dtype = norm->dtype;
    const int64_t from = row * norm->stride, to = row * norm->width;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < norm->width; i += WIDTH) {
        __m512 x = load(norm->input, from + i, dtype, first(norm->width - i));
        sum = _mm512_fmadd_ps(x, x, sum);
    }
    const float mean = _mm512_reduce_add_ps(sum) / (float)norm->width;
    const __m512 by = _mm512_set1_ps(1.0f / sqrtf(mean + norm->eps));
    for (int64_t i = 0; i < norm->width; i += WIDTH) {
        __mmask16 mask = first(norm->width - i);
        __m512 x = rounded(_mm512_mul_ps(load(norm->input, from + i, dtype, mask), by), dtype);
        store(norm->output, to + i, dtype, mask,
              _mm512_mul_ps(x, load(norm->weight, i, dtype, mask)));
    }
}

static void norm_rows(void *data)
{
    norm_t *norm = data;
    for (long row; (row = atomic_fetch_add(&norm->next, 1)) < norm->rows;)
        norm_row(norm, row);
}

typedef struct {
    void *gate;
    const void *up;
    int64_t count;
    int32_t dtype;
    atomic_long next;
} gate_t;

#define GATES 4096

TARGET static void gate_part(const gate_t *gate, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += WIDTH) {
        __mmask16 mask = first(to - i);
        __m512 open = rounded(silu(load(gate->gate, i, gate->dtype, mask)), gate->dtype);
        store(gate->gate, i, gate->dtype, mask,
              _mm512_mul_ps(open, load(gate->up, i, gate->dtype, mask)));
    }
}

static void gate_parts(void *data)
{
    gate_t *gate = data;
    for (long part; (part = atomic_fetch_add(&gate->next, 1)) * GATES < gate->count;)
        gate_part(gate, part * GATES, smaller((part + 1) * GATES, gate->count));
}

typedef struct {
    const optimus_step *step;
    atomic_long next;
    atomic_int failed;
} steps_t;

/* A head turned by its position (the halves are a pair), rounded to the dtype. */
INLINE void turn(const optimus_step *step, const void *from, int64_t at, int64_t angle, void *to,
                 int64_t place)
{
    const int64_t half = step->dim / 2;
    const int dtype = step->dtype;
    for (int64_t i = 0; i < half; i += WIDTH) {
        __mmask16 mask = first(half - i);
        __m512 low = load(from, at + i, dtype, mask), high = load(from, at + half + i, dtype, mask);
        __m512 c = load(step->cos, angle + i, dtype, mask), s = load(step->sin, angle + i, dtype, mask);
        store(to, place + i, dtype, mask, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)));
        c = load(step->cos, angle + half + i, dtype, mask);
        s = load(step->sin, angle + half + i, dtype, mask);
        store(to, place + half + i, dtype, mask, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)));
    }
}

INLINE float masked(const optimus_step *step, int64_t batch, int64_t key)
{
    const int64_t at = batch * step->mask_batch + key * step->mask_key;
    if (step->mask_dtype == BOOL)
        return ((const uint8_t *)step->mask)[at] ? 0.0f : -INFINITY;
    return _mm512_cvtss_f32(load(step->mask, at, step->mask_dtype, 1));
}

/* Scores of H heads with every key: [H][keys]. */
INLINE void score(const int H, const optimus_step *step, const float *query, int64_t cache,
                  int64_t length, float *scores, int64_t apart)
{
    for (int64_t key = 0; key < length; key++) {
        __m512 sum[HEADS];
        for (int h = 0; h < H; h++)
            sum[h] = _mm512_setzero_ps();
        for (int64_t i = 0; i < step->dim; i += WIDTH) {
            __m512 k = load(step->keys, cache + key * step->dim + i, step->dtype, first(step->dim - i));
            for (int h = 0; h < H; h++)
                sum[h] = _mm512_fmadd_ps(k, _mm512_loadu_ps(query + h * apart + i), sum[h]);
        }
        for (int h = 0; h < H; h++)
            scores[h * length + key] = _mm512_reduce_add_ps(sum[h]) * step->scale;
    }
}

/* In place; the scores of a row of which nothing is seen become zeros, as SDPA has it. */
TARGET static void soften(float *scores, int64_t length)
{
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < length; i += WIDTH) {
        __mmask16 mask = first(length - i);
        most = _mm512_mask_max_ps(most, mask, most, _mm512_maskz_loadu_ps(mask, scores + i));
    }
    const float top = _mm512_reduce_max_ps(most);
    const int seen = top > -INFINITY;
    for (int64_t i = 0; i < length; i += WIDTH) {
        __mmask16 mask = first(length - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, scores + i);
        __m512 e = exponential(_mm512_sub_ps(x, _mm512_set1_ps(seen ? top : 0.0f)));
        e = seen ? _mm512_maskz_mov_ps(mask, e) : _mm512_setzero_ps();
        sum = _mm512_add_ps(sum, e);
        _mm512_mask_storeu_ps(scores + i, mask, e);
    }
    const float total = _mm512_reduce_add_ps(sum);
    const __m512 by = _mm512_set1_ps(seen ? 1.0f / total : 0.0f);
    for (int64_t i = 0; i < length; i += WIDTH) {
        __mmask16 mask = first(length - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, scores + i);
        _mm512_mask_storeu_ps(scores + i, mask, _mm512_mul_ps(x, by));
    }
}

/* Sums of the values of H heads by their weights, up to 64 numbers of a head at once. */
INLINE void weigh(const int H, const optimus_step *step, const float *weights, int64_t cache,
                  int64_t length, int64_t head)
{
    for (int64_t i = 0; i < step->dim; i += CHUNK * WIDTH) {
        __m512 sum[HEADS][CHUNK];
        for (int h = 0; h < H; h++)
            for (int c = 0; c < CHUNK; c++)
                sum[h][c] = _mm512_setzero_ps();
        for (int64_t key = 0; key < length; key++) {
            __m512 v[CHUNK];
            for (int c = 0; c < CHUNK; c++)
                v[c] = load(step->values, cache + key * step->dim + i + c * WIDTH, step->dtype,
                            first(step->dim - i - c * WIDTH));
            for (int h = 0; h < H; h++) {
                __m512 by = _mm512_set1_ps(weights[h * length + key]);
                for (int c = 0; c < CHUNK; c++)
                    sum[h][c] = _mm512_fmadd_ps(by, v[c], sum[h][c]);
            }
        }
        for (int h = 0; h < H; h++)
            for (int c = 0; c < CHUNK; c++)
                store(step->output, (head + h) * step->dim + i + c * WIDTH, step->dtype,
                      first(step->dim - i - c * WIDTH), sum[h][c]);
    }
}

#define ATTEND(H)                                                                                  \
    TARGET static void score_##H(const optimus_step *step, const float *query, int64_t cache,      \
                                 int64_t length, float *scores, int64_t apart)                     \
    {                                                                                              \
        score(H, step, query, cache, length, scores, apart);                                       \
    }                                                                                              \
    TARGET static void weigh_##H(const optimus_step *step, const float *weights, int64_t cache,    \
                                 int64_t length, int64_t head)                                     \
    {                                                                                              \
        weigh(H, step, weights, cache, length, head);                                              \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)

typedef void (*score_t)(const optimus_step *, const float *, int64_t, int64_t, float *, int64_t);
typedef void (*weigh_t)(const optimus_step *, const float *, int64_t, int64_t, int64_t);
static const score_t scorers[HEADS] = {score_1, score_2, score_3, score_4};
static const weigh_t weighers[HEADS] = {weigh_1, weigh_2, weigh_3, weigh_4};

/* The query heads of one key head of one sequence. */
TARGET static int attend(const optimus_step *step, int64_t batch, int64_t group)
{
    const int64_t length = step->past + 1, heads = step->heads / step->groups, dim = step->dim;
    const int64_t apart = ceil_div(dim, WIDTH) * WIDTH, angle = batch * step->turn;
    const int64_t place = batch * step->groups + group, cache = place * step->room * dim;
    const int64_t itemsize = step->dtype == FLOAT32 ? 4 : 2;
    float *query = optimus_scratch(SUMS, (size_t)(HEADS * (length + apart) + apart) * sizeof(float));
    if (!query)
        return -1;
    float *scores = query + HEADS * apart;
    void *turned = scores + HEADS * length;
    turn(step, step->key, place * dim, angle, step->keys, cache + step->past * dim);
    memcpy((char *)step->values + (cache + step->past * dim) * itemsize,
           (const char *)step->value + place * dim * itemsize, (size_t)(dim * itemsize));
    for (int64_t h = 0, these; h < heads; h += these) {
        these = smaller(heads - h, HEADS);
        const int64_t head = place * heads + h;
        for (int64_t one = 0; one < these; one++) {
            turn(step, step->query, (head + one) * dim, angle, turned, 0);
            for (int64_t i = 0; i < apart; i += WIDTH)
                _mm512_storeu_ps(query + one * apart + i, load(turned, i, step->dtype, first(dim - i)));
        }
        scorers[these - 1](step, query, cache, length, scores, apart);
        for (int64_t one = 0; one < these; one++) {
            for (int64_t key = 0; step->mask && key < length; key++)
                scores[one * length + key] += masked(step, batch, key);
            soften(scores + one * length, length);
        }
        weighers[these - 1](step, scores, cache, length, head);
    }
    return 0;
}

static void attend_all(void *data)
{
    steps_t *steps = data;
    const optimus_step *step = steps->step;
    for (long item; (item = atomic_fetch_add(&steps->next, 1)) < step->batch * step->groups;)
        if (attend(step, item / step->groups, item % step->groups))
            atomic_store(&steps->failed, 1);
}
#endif

/* Whether this processor has the instructions. */
EXPORT int optimus_has_layer(void)
{
#ifdef OPTIMUS_HAS_LAYER
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

#ifdef OPTIMUS_HAS_LAYER
EXPORT void optimus_rms_norm(const void *input, const void *weight, void *output, int64_t rows,
                             int64_t width, int64_t stride, float eps, int dtype, int threads)
{
    norm_t norm = {.input = input, .weight = weight, .output = output, .rows = rows, .width = width,
                   .stride = stride, .eps = eps, .dtype = dtype};
    optimus_run(norm_rows, &norm, rows * width > ALONE ? threads : 1);
}

EXPORT void optimus_gate(void *gate, const void *up, int64_t count, int dtype, int threads)
{
    gate_t all = {.gate = gate, .up = up, .count = count, .dtype = dtype};
    optimus_run(gate_parts, &all, count > ALONE ? threads : 1);
}

TARGET EXPORT void optimus_add(const void *one, const void *other, void *sum, int64_t count,
                               int dtype)
{
    for (int64_t i = 0; i < count; i += WIDTH) {
        __mmask16 mask = first(count - i);
        __m512 x = load(one, i, dtype, mask), y = load(other, i, dtype, mask);
        store(sum, i, dtype, mask, _mm512_add_ps(x, y));
    }
}

EXPORT int optimus_attend(const optimus_step *step, int threads)
{
    steps_t steps = {.step = step};
    const int64_t numbers = step->batch * step->groups * (step->past + 1) * step->dim;
    optimus_run(attend_all, &steps, numbers > ALONE / 2 ? threads : 1);
    return atomic_load(&steps.failed) ? -1 : 0;
}
#endif
