/* Rounding a weight: the arithmetic of optimus/ops/rounding.py, each sum in the same order, so that
   both give the same bits. The 16 rows of a tile lie side by side, and are searched at once. */
#include "quantized.h"

#include <stdatomic.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))

enum { CHAINS = 8, SHARES = 9 };
static const double shares[SHARES] = {0.65, 0.72, 0.78, 0.84, 0.89, 0.93, 0.97, 1.0, 1.04};
/* Added and taken away again, it rounds what is far smaller than 2^22 to the nearest integer. */
#define ROUNDER 12582912.0f

typedef struct {
    const optimus_weight *to;
    const void *from;
    const float *worth;
    int64_t row_stride, column_stride, length, padded;
    int32_t dtype;
    atomic_long next;
    atomic_int failed;
} rounding_t;

typedef float lanes_t[TILE];

/* One group of 16 rows. Steps are codes less `zero`, the code of 0.0 where that is a fixed one. */
typedef struct {
    lanes_t *x;
    const float *worth;
    int64_t length;
    float least_step, most_step, zero;
    int symmetric;
    lanes_t least, most, mean, scale, minimum;
    float total;
} group_t;

INLINE float stored(float value) { return optimus_from_bf16(optimus_to_bf16(value)); }

/* To bf16, away from zero: what just fitted still fits. */
INLINE float raised(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xFFFF) & 0xFFFF0000u;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

/* 1 / scale, and 0 where that is nothing or beyond fp32. */
INLINE float inverted(float scale)
{
    float inverse = 1 / scale;
    return fabsf(inverse) <= FLT_MAX ? inverse : 0;
}

INLINE float nearest(float step, float least, float most)
{
    step = step > least ? step : least;
    step = step < most ? step : most;
    return (step + ROUNDER) - ROUNDER;
}

INLINE void find_extremes(group_t *group)
{
    const lanes_t *x = group->x;
    lanes_t least, most;
    memcpy(least, x[0], sizeof least);
    memcpy(most, x[0], sizeof most);
    for (int64_t k = 1; k < group->length; k++)
        for (int n = 0; n < TILE; n++) {
            least[n] = x[k][n] < least[n] ? x[k][n] : least[n];
            most[n] = x[k][n] > most[n] ? x[k][n] : most[n];
        }
    memcpy(group->least, least, sizeof least);
    memcpy(group->most, most, sizeof most);
}

/* The weighted mean, and the sum of the weights. */
INLINE void find_mean(group_t *group)
{
    lanes_t sum = {0};
    group->total = 0;
    for (int64_t chain = 0; chain < CHAINS; chain++) {
        float total = 0;
        lanes_t part = {0};
        for (int64_t k = chain; k < group->length; k += CHAINS) {
            total += group->worth[k];
            for (int n = 0; n < TILE; n++)
                part[n] += group->x[k][n] * group->worth[k];
        }
        group->total += total;
        for (int n = 0; n < TILE; n++)
            sum[n] += part[n];
    }
    for (int n = 0; n < TILE; n++)
        group->mean[n] = sum[n] / group->total;
}

/* How the steps of a candidate go with the weight. */
typedef struct {
    lanes_t step, cross, square;
} sums_t;

INLINE void add_up(const group_t *group, const float *start, const float *inverse, sums_t *sums)
{
    const lanes_t *restrict x = group->x;
    const float *restrict worth = group->worth;
    const float least = group->least_step, most = group->most_step;
    const int64_t length = group->length;
    memset(sums, 0, sizeof *sums);
    for (int64_t chain = 0; chain < CHAINS; chain++) {
        lanes_t all = {0}, cross = {0}, square = {0};
        for (int64_t k = chain; k < length; k += CHAINS)
            for (int n = 0; n < TILE; n++) {
                float step = nearest((x[k][n] - start[n]) * inverse[n], least, most);
                all[n] += step * worth[k];
                cross[n] += (x[k][n] - group->mean[n]) * worth[k] * step;
                square[n] += step * step * worth[k];
            }
        for (int n = 0; n < TILE; n++) {
            sums->step[n] += all[n];
            sums->cross[n] += cross[n];
            sums->square[n] += square[n];
        }
    }
}

/* The line of least squared error: for each candidate its steps, and then what fits them best. The
   one that reaches all stays where the squares are beyond fp32, or nothing. */
INLINE void search(group_t *group, const float *base, const float *middle)
{
    lanes_t best = {0};
    for (int i = 0; i < SHARES; i++) {
        const float factor = (float)(group->symmetric ? -shares[i] / group->zero : shares[i]);
        const float half = group->symmetric ? 0 : (float)(shares[i] * 7.5);
        lanes_t start, inverse;
        sums_t sums;
        for (int n = 0; n < TILE; n++) {
            inverse[n] = inverted(base[n] * factor);
            start[n] = middle[n] - base[n] * half;
        }
        add_up(group, start, inverse, &sums);
        for (int n = 0; n < TILE; n++) {
            float centre = group->symmetric ? 0 : sums.step[n] / group->total;
            float square = sums.square[n] - centre * centre * group->total;
            float slope = square > 0 ? sums.cross[n] / square : 0;
            float gain = sums.cross[n] * slope;
            int better = (gain > best[n]) & (gain <= FLT_MAX);
            best[n] = better ? gain : best[n];
            group->scale[n] = better ? slope : group->scale[n];
            group->minimum[n] = better ? group->mean[n] - slope * centre : group->minimum[n];
        }
    }
}

INLINE void fit_symmetric(group_t *group, int bits)
{
    lanes_t extreme;
    memset(group->mean, 0, sizeof group->mean);
    for (int n = 0; n < TILE; n++) {
        extreme[n] = group->most[n] > -group->least[n] ? group->most[n] : group->least[n];
        group->scale[n] = extreme[n] / -group->zero;
    }
    if (bits == 4)
        search(group, extreme, group->mean);
    for (int n = 0; n < TILE; n++) {
        group->scale[n] = bits == 4 ? stored(group->scale[n])
                                    : raised(fabsf(extreme[n]) / group->most_step);
        group->minimum[n] = 0;
    }
}

INLINE void fit_line(group_t *group, int bits)
{
    lanes_t base, middle;
    for (int n = 0; n < TILE; n++) {
        base[n] = group->scale[n] = (group->most[n] - group->least[n]) / group->most_step;
        group->minimum[n] = group->least[n];
        middle[n] = group->least[n] + base[n] * 7.5f;
    }
    if (bits == 4) {
        find_mean(group);
        search(group, base, middle);
    }
    for (int n = 0; n < TILE; n++) {
        group->minimum[n] = stored(group->minimum[n]);
        float reach = group->most[n] - group->minimum[n];
        group->scale[n] = bits == 4 ? stored(group->scale[n])
                                    : raised((reach > 0 ? reach : 0) / group->most_step);
    }
}

/* The codes [length][16] of a group whose scale was found. */
INLINE void encode(group_t *group, uint8_t *codes)
{
    lanes_t inverse;
    for (int n = 0; n < TILE; n++) {
        inverse[n] = inverted(group->scale[n]);
        group->scale[n] = fabsf(1 / group->scale[n]) <= FLT_MAX ? group->scale[n] : 0;
    }
    for (int64_t k = 0; k < group->length; k++)
        for (int n = 0; n < TILE; n++) {
            float step = (group->x[k][n] - group->minimum[n]) * inverse[n];
            step = nearest(step, group->least_step, group->most_step);
            codes[k * TILE + n] = (uint8_t)(int32_t)(step + group->zero);
        }
}

/* Codes [padded][16] into the layout of a weight; rows that are not there are zeros. */
INLINE void put(const uint8_t *codes, int64_t padded, int bits, int rows, uint8_t *to)
{
    for (int64_t k = 0; k < padded; k += STEP * 8 / bits, to += STEP * TILE) {
        const uint8_t *low = codes + k * TILE, *high = low + STEP * TILE;
        for (int n = 0; n < TILE; n++)
            for (int j = 0; j < STEP; j++) {
                uint8_t code = low[j * TILE + n];
                if (bits == 4)
                    code |= (uint8_t)(high[j * TILE + n] << 4);
                to[n * STEP + j] = n < rows ? code : 0;
            }
    }
}

INLINE void get(const rounding_t *rounding, int64_t row, int rows, int64_t column, lanes_t *x)
{
    for (int n = 0; n < TILE; n++) {
        int64_t at = (row + n) * rounding->row_stride + column * rounding->column_stride;
        for (int64_t k = 0; k < rounding->length; k++, at += rounding->column_stride)
            x[k][n] = n < rows ? optimus_load(rounding->from, at, rounding->dtype) : 0;
    }
}

CLONES static void round_tile(const rounding_t *rounding, int64_t tile, lanes_t *x, uint8_t *codes)
{
    const optimus_weight *to = rounding->to;
    const int64_t row = tile * TILE, groups = to->k / rounding->length;
    const int rows = to->n - row < TILE ? (int)(to->n - row) : TILE;
    const int zero = to->minimum ? 0 : 1 << (to->bits - 1), most = (1 << to->bits) - 1 - zero;
    group_t group = {.x = x, .length = rounding->length, .symmetric = !to->minimum,
                     .least_step = (float)-zero, .most_step = (float)most, .zero = (float)zero};
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (tile * groups + g) * TILE;
        group.worth = rounding->worth + g * group.length;
        get(rounding, row, rows, g * group.length, x);
        find_extremes(&group);
        if (group.symmetric)
            fit_symmetric(&group, to->bits);
        else
            fit_line(&group, to->bits);
        encode(&group, codes);
        put(codes, rounding->padded, to->bits, rows,
            to->codes + (tile * groups + g) * rounding->padded * TILE * to->bits / 8);
        for (int n = 0; n < rows; n++) {
            to->scale[at + n] = optimus_to_bf16(group.scale[n]);
            if (to->minimum)
                to->minimum[at + n] = optimus_to_bf16(group.minimum[n]);
        }
    }
}

static void round_tiles(void *data)
{
    rounding_t *rounding = data;
    lanes_t *x = malloc((size_t)rounding->length * sizeof *x);
    uint8_t *codes = calloc((size_t)rounding->padded, TILE);
    long tile;
    if (!x || !codes)
        atomic_store(&rounding->failed, 1);
    else
        while ((tile = atomic_fetch_add(&rounding->next, 1)) * TILE < rounding->to->n)
            round_tile(rounding, tile, x, codes);
    free(x);
    free(codes);
}

/* Fills the codes, scales and minima of `weight`, which are zeros, with those of `from` [n, k].
   worth [k]: how much the error of each number counts. 0, or -1 when there is no memory. */
EXPORT int optimus_round(const optimus_weight *weight, const void *from, int64_t row_stride,
                         int64_t column_stride, int dtype, const float *worth, int threads)
{
    rounding_t rounding = {.to = weight, .from = from, .worth = worth, .row_stride = row_stride,
                           .column_stride = column_stride, .dtype = dtype};
    rounding.length = weight->group ? weight->group : weight->k;
    rounding.padded = (rounding.length + PAD - 1) / PAD * PAD;
    optimus_run(round_tiles, &rounding, weight->n > TILE ? threads : 1);
    return atomic_load(&rounding.failed) ? -1 : 0;
}
