/* What stands between the products of a decoder layer: see layer.c. */
#ifndef OPTIMUS_LAYER_H
#define OPTIMUS_LAYER_H

#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OPTIMUS_HAS_LAYER 1
#endif

/* One new token over a cache. query [batch][heads][dim], key and value [batch][groups][dim], as
   the products left them; cos and sin [dim], `turn` apart for each of the batch. The caches hold
   [batch][groups][room][dim] with `past` tokens; the new one is written behind them. The mask has
   one number a key, `mask_batch` and `mask_key` apart: of a dtype, to add, or bool. */
typedef struct {
    const void *query, *key, *value, *cos, *sin, *mask;
    void *keys, *values, *output;
    int64_t batch, heads, groups, dim, past, room, turn, mask_batch, mask_key;
    float scale;
    int32_t dtype, mask_dtype;
} optimus_step;

/* output [rows, width] = weight * input / sqrt(mean(input²) + eps); input rows `stride` apart. */
EXPORT void optimus_rms_norm(const void *input, const void *weight, void *output, int64_t rows,
                             int64_t width, int64_t stride, float eps, int dtype, int threads);
/* gate = silu(gate) * up, in place; `count` numbers each. */
EXPORT void optimus_gate(void *gate, const void *up, int64_t count, int dtype, int threads);
/* sum = one + other; the sum may be either. */
EXPORT void optimus_add(const void *one, const void *other, void *sum, int64_t count, int dtype);
/* 0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_attend(const optimus_step *step, int threads);

#endif
