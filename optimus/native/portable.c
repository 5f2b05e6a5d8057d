/* The same in plain C, in loops that a compiler turns into the vectors of any processor. */
#include "quantized.h"

static uint16_t to_fp16(float value)
{
    uint32_t bits, sign;
    memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > INFINITE)
        return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000)
        return (uint16_t)(sign | 0x7C00);
    if (bits < 0x38800000) {
        float small;
        memcpy(&small, &bits, sizeof small);
        small += 0.5f;
        memcpy(&bits, &small, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3F000000));
    }
    return (uint16_t)(sign | ((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13));
}

static void store(void *to, int64_t at, int dtype, float value)
{
    if (dtype == FLOAT32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = dtype == BFLOAT16 ? optimus_to_bf16(value) : to_fp16(value);
}

static uint32_t largest(const call_t *call, int64_t at, int64_t valid)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < valid; i++) {
        float x = optimus_load(call->input, at + i, call->dtype);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    return most;
}

static int32_t encode(const call_t *call, int64_t at, int64_t length, int64_t valid, float inverse,
                      int32_t *to, int64_t apart)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < length; i += STEP, to += apart) {
        int8_t four[STEP] = {0};
        for (int64_t j = 0; j < STEP && i + j < valid && inverse != 0; j++) {
            float x = optimus_load(call->input, at + i + j, call->dtype);
            four[j] = (int8_t)nearbyintf(x * inverse);
            sum += four[j];
        }
        memcpy(to, four, sizeof four);
    }
    return sum;
}

#define TARGET
#include "round_row.h"

static void unpack(const uint8_t *packed, uint8_t *codes, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        for (int64_t j = 0; j < 64; j++) {
            codes[2 * i + j] = packed[i + j] & 15;
            codes[2 * i + 64 + j] = packed[i + j] >> 4;
        }
}

/* One step of k: four products into each of 16 sums. */
static inline void step(int32_t *sum, const uint8_t *w, const int8_t *x)
{
    for (int n = 0; n < TILE; n++)
        sum[n] += w[4 * n] * x[0] + w[4 * n + 1] * x[1] + w[4 * n + 2] * x[2] + w[4 * n + 3] * x[3];
}

/* One row times one tile. */
CLONES static void product(const call_t *call, const uint8_t *codes, int bits, int64_t tile,
                           place_t place, float *total)
{
    const optimus_weight *weight = call->weight;
    const int32_t *x = place.codes;
    for (int64_t g = 0; g < call->groups; g++) {
        const int64_t of = (tile * call->groups + g) * TILE;
        const float scale = place.scale[g * place.apart];
        int32_t sum[TILE], start = place.start[g * place.apart];
        float share;
        memcpy(&share, &start, sizeof share);
        for (int n = 0; n < TILE; n++)
            sum[n] = weight->minimum ? 0 : start;
        for (int64_t k = 0; k < call->group; k += 2 * STEP, x += 2 * place.apart) {
            uint8_t both[128];
            const uint8_t *steps = codes;
            if (bits == 4)
                unpack(codes, both, 64), steps = both;
            step(sum, steps, (const int8_t *)x);
            step(sum, steps + 64, (const int8_t *)(x + place.apart));
            codes += 2 * 64 * bits / 8;
        }
        for (int n = 0; n < TILE; n++) {
            total[n] += (float)sum[n] * (optimus_from_bf16(weight->scale[of + n]) * scale);
            if (weight->minimum)
                total[n] += optimus_from_bf16(weight->minimum[of + n]) * share;
        }
    }
}

static void multiply(const call_t *call, const uint8_t *codes, int bits, int64_t tile,
                     int64_t tiles, int64_t row, int64_t rows, ahead_t *ahead)
{
    (void)ahead;
    const int64_t stride = call->kp * TILE * bits / 8, n = call->weight->n;
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t r = row; r < row + rows; r++) {
            float total[TILE] = {0};
            product(call, codes + t * stride, bits, tile + t, optimus_place(call, r), total);
            for (int64_t i = 0, c = (tile + t) * TILE; i < TILE && c < n; i++, c++) {
                float bias = call->bias ? optimus_load(call->bias, c, call->bias_dtype) : 0;
                store(call->output, (call->first_row + r) * n + c, call->dtype, total[i] + bias);
            }
        }
}

const kernels_t optimus_portable = {round_row, multiply, unpack};
