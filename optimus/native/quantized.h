/* Quantized linear layers: what the files here share. See optimus/ops/quantized.py for the maths. */
#ifndef OPTIMUS_QUANTIZED_H
#define OPTIMUS_QUANTIZED_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

/* Several versions of a function in plain C. By features: "arch=" asks for that very processor. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum { TILE = 16, STEP = 4, PAD = 32, MOST_ROWS = 12, FEW_ROWS = 6 };
enum { PORTABLE = 0, VNNI = 1 };

/* One weight. codes [n/16][kp/4][16][4] bytes (of 4 bits: two steps a byte, [n/16][kp/8][16][4]);
   scale and minimum [n/16][groups][16] bf16; minimum is null where codes are symmetric. */
typedef struct {
    uint8_t *codes;
    uint16_t *scale;
    uint16_t *minimum;
    int64_t n, k, group;
    int32_t bits, rows;
} optimus_weight;

/* One call. Rounded activations lie by up to `together` rows that are multiplied together, R, as
   they are read: codes [m/R][kp/4][R][4], scale and start [m/R][groups][R]. A start is what the sums begin
   with: -zero * (sum of codes), or as float scale * (sum of codes) beside minima. */
typedef struct {
    const optimus_weight *weight;
    const void *input;
    const void *bias;
    void *output;
    int64_t stride;
    int32_t dtype, bias_dtype;
    int64_t kp, groups, group;
    int64_t first_row, rows, together;
    int8_t *codes;
    float *scale;
    int32_t *start;
} call_t;

/* Rounds one row of the call's input into its scratch. */
typedef void (*round_row_t)(const call_t *call, int64_t row);
/* Products of `rows` rows from `row` with `tiles` tiles from `tile`; `codes` are those tiles', of
   `bits` bits (a weight of 4 may have been unpacked to 8). */
typedef void (*multiply_t)(const call_t *call, const uint8_t *codes, int bits, int64_t tile,
                           int64_t tiles, int64_t row, int64_t rows, ahead_t *ahead);
/* 4 bits to 8: `bytes` bytes in, twice as many out. */
typedef void (*unpack_t)(const uint8_t *packed, uint8_t *codes, int64_t bytes);

typedef struct {
    round_row_t round_row;
    multiply_t multiply;
    unpack_t unpack;
} kernels_t;

/* Bits of fp32 infinity; NaN and infinity are at or above. */
#define INFINITE 0x7F800000u

static inline float optimus_from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Between fp16 and fp32 by arithmetic on their bits: exact, subnormals, infinity and NaN too. */
static inline float optimus_from_fp16(uint16_t half)
{
    uint32_t rest = (uint32_t)(half & 0x7FFF) << 13, bits;
    float value;
    memcpy(&value, &rest, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    if (rest >= 0x7C00u << 13)
        bits |= INFINITE;
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t optimus_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float optimus_load(const void *from, int64_t at, int dtype)
{
    if (dtype == FLOAT32)
        return ((const float *)from)[at];
    uint16_t half = ((const uint16_t *)from)[at];
    return dtype == BFLOAT16 ? optimus_from_bf16(half) : optimus_from_fp16(half);
}

/* Scale of activations whose largest is `bits`: NaN for what is not finite, so that the row comes
   out as NaN, and 0 below what 127 can be divided by. */
static inline float optimus_activation_scale(uint32_t bits, float *inverse)
{
    float most;
    memcpy(&most, &bits, sizeof most);
    *inverse = 0;
    if (bits >= INFINITE)
        return NAN;
    if (most <= 127.0f / FLT_MAX)
        return 0;
    *inverse = 127.0f / most;
    return most / 127.0f;
}

/* Where the numbers of a row lie: the first of each kind, and how far apart they are. */
typedef struct {
    int32_t *codes, *start;
    float *scale;
    int64_t apart;
} place_t;

static inline place_t optimus_place(const call_t *call, int64_t row)
{
    int64_t before = row / call->together * call->together, left = call->rows - before;
    int64_t within = row - before, groups = before * call->groups;
    place_t place = {(int32_t *)(call->codes + before * call->kp) + within,
                     call->start + groups + within, call->scale + groups + within,
                     left < call->together ? left : call->together};
    return place;
}

static inline void optimus_set_start(const call_t *call, place_t place, int64_t g, float scale,
                                     int32_t sum)
{
    int64_t at = g * place.apart;
    place.scale[at] = scale;
    if (call->weight->minimum) {
        float share = scale * (float)sum;
        memcpy(place.start + at, &share, sizeof share);
    } else {
        place.start[at] = -sum * (1 << (call->weight->bits - 1));
    }
}

/* Up to 64 rows by up to 4 weights that round their input alike: it is rounded once. outputs[i]
   [rows, n of i]; a bias may be null. 0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_quantized_group(const optimus_weight *const *weights, int count,
                                   const void *input, int64_t rows, int64_t stride, int dtype,
                                   const void *const *biases, const int *bias_dtypes,
                                   void *const *outputs, int threads, int kernels);

extern const kernels_t optimus_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define OPTIMUS_HAS_VNNI 1
extern const kernels_t optimus_vnni;
#endif

#endif
