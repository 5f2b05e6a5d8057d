/* Attention for the lengths that texts have: all scores of some rows of queries at once, since they
   fit the cache, in fp32. Sequences may lie end to end, so that padding costs nothing. */
#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#include "vectors.h"
#include "curves.h"

#include <math.h>

/* ROWS of queries at a time, MOST_ROWS in registers, and keys in panels that the first cache holds
   while those rows go by. */
enum { WIDTH = 16, WIDE = 4, SPAN = WIDE * WIDTH, MOST_ROWS = 6, ROWS = 24 };

typedef struct {
    const optimus_attention *call;
    int64_t parts;
    atomic_long next;
    atomic_int failed;
} work_t;

/* One head of keys and values of one sequence, as the products read them; where its tensors begin,
   and the first row of its output. */
typedef struct {
    int64_t sequence, rows, length, padded, query, key, value, output;
    float *keys, *values, *queries, *scores;
} head_t;

/* c [R][V tiles] = by * (a [R][k] @ b [k][V tiles]): every sum is a variable of its own, because
   gcc 12 leaves an array of them in memory. R and V are constants. */
#define EACH_TILE(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define EACH_SUM(DO)                                                                               \
    EACH_TILE(DO, 0) EACH_TILE(DO, 1) EACH_TILE(DO, 2) EACH_TILE(DO, 3) EACH_TILE(DO, 4)           \
    EACH_TILE(DO, 5)
#define START(r, v) __m512 sum##r##v = _mm512_setzero_ps();
#define READ(r, v) const __m512 b##v = _mm512_loadu_ps(b + (v < V ? v : 0) * WIDTH);
#define ADD(r, v)                                                                                  \
    if (v < V)                                                                                     \
        sum##r##v = _mm512_fmadd_ps(x, b##v, sum##r##v);
#define ADD_ROW(r)                                                                                 \
    if (r < R) {                                                                                   \
        const __m512 x = _mm512_set1_ps(a[r * a_row]);                                             \
        EACH_TILE(ADD, r)                                                                          \
    }
#define KEEP(r, v)                                                                                 \
    if (r < R && v < V)                                                                            \
        _mm512_storeu_ps(c + r * c_row + v * WIDTH,                                                \
                         _mm512_mul_ps(sum##r##v, _mm512_set1_ps(by[r * by_row])));

typedef struct {
    const float *a, *b, *by;
    float *c;
    int64_t a_row, b_row, by_row, c_row, k;
} product_t;

INLINE void product(const int R, const int V, const product_t *p)
{
    const float *a = p->a, *b = p->b, *by = p->by;
    const int64_t a_row = p->a_row, b_row = p->b_row, by_row = p->by_row, c_row = p->c_row;
    float *c = p->c;
    EACH_SUM(START)
    for (int64_t k = 0; k < p->k; k++, a++, b += b_row) {
        EACH_TILE(READ, 0)
        EACH_ROW(ADD_ROW)
    }
    EACH_SUM(KEEP)
}

#define PRODUCT(R, V)                                                                              \
    TARGET static void product_##R##_##V(const product_t *p) { product(R, V, p); }
#define NAME(R, V) product_##R##_##V,
#define EACH_COUNT(DO, V) DO(1, V) DO(2, V) DO(3, V) DO(4, V) DO(5, V) DO(6, V)
EACH_COUNT(PRODUCT, 1)
EACH_COUNT(PRODUCT, 2)
EACH_COUNT(PRODUCT, 3)
EACH_COUNT(PRODUCT, 4)

static void (*const products[WIDE][MOST_ROWS])(const product_t *) = {
    {EACH_COUNT(NAME, 1)}, {EACH_COUNT(NAME, 2)}, {EACH_COUNT(NAME, 3)}, {EACH_COUNT(NAME, 4)}};

/* As many rows at a time as registers hold, in even shares. */
static void multiply(product_t p, int64_t rows, int64_t tiles)
{
    for (int64_t left = rows, these; left; left -= these) {
        these = ceil_div(left, ceil_div(left, MOST_ROWS));
        products[tiles - 1][these - 1](&p);
        p.a += these * p.a_row;
        p.c += these * p.c_row;
        p.by += these * p.by_row;
    }
}

/* 16 rows of 16 numbers, turned: [i][j] to [j][i]. */
INLINE void transpose(__m512 *rows)
{
    __m512 a[WIDTH], b[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xEE);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xDD);
        a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xDD);
    }
}

/* Keys as [panel][dim][keys of the panel], with zeros behind the last. */
TARGET static void pack_keys(const optimus_attention *call, const head_t *head)
{
    const int64_t dim = call->dim, last = head->length - 1;
    for (int64_t panel = 0; panel < head->padded; panel += SPAN) {
        const int64_t wide = smaller(head->padded - panel, SPAN);
        for (int64_t i = 0; i < wide * dim; i += WIDTH * WIDTH) {
            const int64_t key = panel + i / (WIDTH * dim) * WIDTH, d = i / WIDTH % dim;
            float *to = head->keys + panel * dim + d * wide + key - panel;
            __m512 rows[WIDTH];
            for (int r = 0; r < WIDTH; r++)
                rows[r] = load(call->key, head->key + smaller(key + r, last) * call->key_token + d,
                               call->dtype, key + r <= last ? 0xFFFF : 0);
            transpose(rows);
            for (int r = 0; r < WIDTH; r++)
                _mm512_storeu_ps(to + r * wide, rows[r]);
        }
    }
}

/* `count` tokens of `dim` numbers, as fp32 and end to end. */
TARGET static void gather(const void *from, int64_t at, int64_t token, int dtype, int64_t count,
                          int64_t dim, float *to)
{
    for (int64_t i = 0; i < count; i++, at += token, to += dim)
        for (int64_t d = 0; d < dim; d += WIDTH)
            _mm512_storeu_ps(to + d, load(from, at + d, dtype, 0xFFFF));
}

TARGET static void limit(float cap, float *scores, int64_t seen)
{
    const __m512 by = _mm512_set1_ps(cap), inverse = _mm512_set1_ps(1.0f / cap);
    for (int64_t i = 0; i < seen; i += WIDTH) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse);
        _mm512_storeu_ps(scores + i, _mm512_mul_ps(hyperbolic_tangent(x), by));
    }
}

TARGET static void add_mask(const optimus_attention *call, int64_t at, float *scores, int64_t seen)
{
    const uint8_t *choice = call->mask;
    for (int64_t i = 0; i < seen; i += WIDTH) {
        const __mmask16 mask = first(seen - i);
        __m512 x = _mm512_loadu_ps(scores + i);
        if (call->mask_dtype == BOOL) {
            __m128i chosen = _mm_maskz_loadu_epi8(mask, choice + at + i);
            __mmask16 out = _mm_testn_epi8_mask(chosen, chosen);
            x = _mm512_mask_mov_ps(x, out, _mm512_set1_ps(-INFINITY));
        } else {
            x = _mm512_add_ps(x, load(call->mask, at + i, call->mask_dtype, mask));
        }
        _mm512_storeu_ps(scores + i, x);
    }
}

/* exp of the first `seen` scores less their largest, zeros behind them; returns 1 / their sum, and 0
   where all are minus infinity. */
TARGET static float soften(float *scores, int64_t seen, int64_t padded)
{
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < seen; i += WIDTH) {
        const __mmask16 mask = first(seen - i);
        most = _mm512_mask_max_ps(most, mask, most, _mm512_loadu_ps(scores + i));
    }
    const float top = _mm512_reduce_max_ps(most);
    const __m512 less = _mm512_set1_ps(top == -INFINITY ? 0.0f : top);
    for (int64_t i = 0; i < padded; i += WIDTH) {
        __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), less));
        e = _mm512_maskz_mov_ps(first(seen - i), e);
        sum = _mm512_add_ps(sum, e);
        _mm512_storeu_ps(scores + i, e);
    }
    const float total = _mm512_reduce_add_ps(sum);
    return total == 0.0f ? 0.0f : 1.0f / total;
}

/* Scores of the gathered queries with the keys up to `padded`, by the panels of these. */
static void score(const optimus_attention *call, const head_t *head, int64_t rows, int64_t padded)
{
    for (int64_t panel = 0; panel < padded; panel += SPAN) {
        product_t p = {.a = head->queries, .b = head->keys + panel * call->dim, .by = &call->scale,
                       .c = head->scores + panel, .a_row = call->dim, .c_row = head->padded,
                       .b_row = smaller(head->padded - panel, SPAN), .k = call->dim};
        multiply(p, rows, smaller(padded - panel, SPAN) / WIDTH);
    }
}

/* `rows` queries of head `number`, from `row` on. */
TARGET static void attend(const optimus_attention *call, const head_t *head, int64_t number,
                          int64_t row, int64_t rows)
{
    const int64_t dim = call->value_dim;
    const int64_t seen = call->causal ? smaller(row + rows, head->length) : head->length;
    const int64_t padded = ceil_div(seen, WIDTH) * WIDTH;
    float sums[ROWS];
    gather(call->query, head->query + number * call->query_head + row * call->query_token,
           call->query_token, call->dtype, rows, call->dim, head->queries);
    score(call, head, rows, padded);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t sees = call->causal ? smaller(row + r + 1, seen) : seen;
        float *scores = head->scores + r * head->padded;
        if (call->cap != 0.0f)
            limit(call->cap, scores, sees);
        if (call->mask)
            add_mask(call, head->sequence * call->mask_batch + number * call->mask_head +
                               (row + r) * call->mask_row, scores, sees);
        sums[r] = soften(scores, sees, padded);
    }
    for (int64_t d = 0; d < dim; d += SPAN) {
        product_t p = {.a = head->scores, .b = head->values + d, .by = sums,
                       .c = head->queries + d, .a_row = head->padded, .b_row = dim, .by_row = 1,
                       .c_row = dim, .k = seen};
        multiply(p, rows, smaller(dim - d, SPAN) / WIDTH);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d += WIDTH)
            store(call->output, ((head->output + row + r) * call->heads + number) * dim + d,
                  call->dtype, 0xFFFF, _mm512_loadu_ps(head->queries + r * dim + d));
}

/* Query heads `from` to `to`, which share the head of keys. */
static int attend_heads(const optimus_attention *call, head_t head, int64_t from, int64_t to)
{
    const int64_t dim = call->dim > call->value_dim ? call->dim : call->value_dim;
    head.padded = ceil_div(head.length, WIDTH) * WIDTH;
    const int64_t numbers = (head.padded + ROWS) * (dim + ROWS) + head.length * call->value_dim;
    head.keys = optimus_scratch(SUMS, (size_t)numbers * sizeof(float));
    if (!head.keys)
        return -1;
    head.values = head.keys + head.padded * call->dim;
    head.queries = head.values + head.length * call->value_dim;
    head.scores = head.queries + ROWS * dim;
    pack_keys(call, &head);
    gather(call->value, head.value, call->value_token, call->dtype, head.length, call->value_dim,
           head.values);
    for (int64_t number = from; number < to; number++)
        for (int64_t row = 0; row < head.rows; row += ROWS)
            attend(call, &head, number, row, smaller(head.rows - row, ROWS));
    return 0;
}

/* Where the keys of `group` of a sequence are; `start` tokens lie before it. */
static head_t found(const optimus_attention *call, int64_t sequence, int64_t start, int64_t group)
{
    head_t head = {.sequence = sequence, .rows = call->rows, .length = call->keys};
    if (call->lengths)
        head.rows = head.length = call->lengths[sequence];
    head.query = sequence * call->query_batch + start * call->query_token;
    head.key = sequence * call->key_batch + start * call->key_token + group * call->key_head;
    head.value = sequence * call->value_batch + start * call->value_token + group * call->value_head;
    head.output = call->lengths ? start : sequence * call->rows;
    return head;
}

/* A part is some of the query heads of one group of one sequence. */
static void attend_all(void *data)
{
    work_t *work = data;
    const optimus_attention *call = work->call;
    const int64_t share = call->heads / call->groups, parts = work->parts;
    int64_t start = 0, sequence = 0;
    for (long item; (item = atomic_fetch_add(&work->next, 1)) < call->count * call->groups * parts;) {
        const int64_t group = item / parts % call->groups, part = item % parts;
        for (; sequence < item / parts / call->groups; sequence++)
            start += call->lengths ? call->lengths[sequence] : 0;
        if (attend_heads(call, found(call, sequence, start, group),
                         group * share + part * share / parts,
                         group * share + (part + 1) * share / parts))
            atomic_store(&work->failed, 1);
    }
}

EXPORT int optimus_attention_of(const optimus_attention *call, int threads)
{
    const int64_t share = call->heads / call->groups;
    work_t work = {.call = call};
    work.parts = smaller(share, ceil_div(4 * threads, call->count * call->groups));
    optimus_run(attend_all, &work, threads);
    return atomic_load(&work.failed) ? -1 : 0;
}
#endif
