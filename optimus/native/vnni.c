/* AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned by 64 signed bytes into 16 sums. */
#include "quantized.h"

#ifdef OPTIMUS_HAS_VNNI
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#include "vectors.h"

/* How far ahead of the product of a few rows its weights are asked for, in bytes. With more rows the
   weights are in a cache, and asking costs 10 % of the rate. */
#define AHEAD 2048
enum { MOST_TILES = 4 };

/* As assembly, because gcc 12 copies each accumulator twice around the intrinsic: half the rate. */
INLINE void add_products(const int V, __m512i *sum, const __m512i *weights, const int8_t *four)
{
    int32_t word;
    memcpy(&word, four, sizeof word);
    __m512i inputs = _mm512_set1_epi32(word);
    for (int v = 0; v < V; v++)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[v]) : "v"(weights[v]), "v"(inputs));
}

/* The largest of `valid` numbers, as bits: NaN stands above infinity, and that above all numbers. */
INLINE uint32_t largest(const call_t *call, int64_t at, int64_t valid)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < valid; i += 16) {
        __m512 x = load(call->input, at + i, call->dtype, first(valid - i));
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(x), no_sign));
    }
    return _mm512_reduce_max_epu32(most);
}

/* Rounds `length` numbers (a multiple of 32; from `valid` on they are zeros), four at a time to
   every `apart`th word, and returns their sum. What is not finite becomes 0. */
INLINE int32_t encode(const call_t *call, int64_t at, int64_t length, int64_t valid, float inverse,
                      int32_t *to, int64_t apart)
{
    const __m512 by = _mm512_set1_ps(inverse);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < length; i += 16, to += 4 * apart) {
        __m512 x = load(call->input, at + i, call->dtype, first(valid - i));
        __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(x, by));
        __m128i codes = _mm512_cvtepi32_epi8(q);
        sum = _mm512_add_epi32(sum, q);
        to[0] = _mm_cvtsi128_si32(codes);
        to[apart] = _mm_extract_epi32(codes, 1);
        to[2 * apart] = _mm_extract_epi32(codes, 2);
        to[3 * apart] = _mm_extract_epi32(codes, 3);
    }
    return _mm512_reduce_add_epi32(sum);
}

#include "round_row.h"

TARGET static void unpack(const uint8_t *packed, uint8_t *codes, int64_t bytes)
{
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < bytes; i += 64) {
        __m512i both = _mm512_loadu_si512(packed + i);
        _mm512_storeu_si512(codes + 2 * i, _mm512_and_si512(both, low));
        both = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_storeu_si512(codes + 2 * i + 64, both);
    }
}

/* The codes of step `s` of a tile; of 4 bits, two steps share 64 bytes. What is `ahead` of them is
   asked for, and not to stay: it is read once a token, and would drive Python out of the caches. */
INLINE __m512i step_codes(const int bits, const int streams, const uint8_t *codes, int s,
                          int64_t ahead, __m512i low)
{
    if (streams && s % (8 / bits) == 0)
        _mm_prefetch((const char *)(codes + s * bits * 8 + ahead), _MM_HINT_NTA);
    if (bits == 8)
        return _mm512_loadu_si512(codes + s * 64);
    __m512i both = _mm512_loadu_si512(codes + s / 2 * 64);
    return _mm512_and_si512(s % 2 ? _mm512_srli_epi16(both, 4) : both, low);
}

/* Asks for a little of the next block, so that it arrives while this one is multiplied. */
INLINE void fetch(ahead_t *ahead)
{
    if (ahead->next >= ahead->end)
        return;
    for (int line = 0; line < 4; line++)
        _mm_prefetch((const char *)(ahead->next + line * 64), _MM_HINT_T1);
    ahead->next += 256;
}

/* The products of R rows and V tiles, in registers: the sums of a group in integers, the sum of the
   groups in fp32. R, V, bits, shifted (by minima) and whole (one group) are constants. */
INLINE void block(const int R, const int V, const int bits, const int shifted, const int whole,
                  const call_t *call, const uint8_t *codes, int64_t tile, int64_t row,
                  ahead_t *ahead)
{
    const optimus_weight *weight = call->weight;
    const int64_t kp = call->kp, groups = whole ? 1 : call->groups;
    const int64_t stride = kp * TILE * bits / 8, length = whole ? kp : call->group;
    const uint8_t *end = codes + stride;
    const int8_t *x = call->codes + row * kp;
    const float *scale = call->scale + row * groups;
    const int32_t *start = call->start + row * groups;
    const uint16_t *weight_scale = weight->scale + tile * groups * TILE;
    const uint16_t *minimum = shifted ? weight->minimum + tile * groups * TILE : 0;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[MOST_ROWS][MOST_TILES];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            total[r][v] = _mm512_setzero_ps();

    for (int64_t g = 0; g < groups; g++, scale += R, start += R) {
        __m512i sum[MOST_ROWS][MOST_TILES];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++)
                sum[r][v] = shifted ? _mm512_setzero_si512() : _mm512_set1_epi32(start[r]);
        for (int64_t k = 0; k < length; k += PAD) {
            /* Behind the end of a tile comes that of the next V. */
            const int64_t ask = end - codes > AHEAD ? AHEAD : AHEAD + (V - 1) * stride;
#pragma GCC unroll 8
            for (int s = 0; s < PAD / STEP; s++) {
                __m512i u[MOST_TILES];
                for (int v = 0; v < V; v++)
                    u[v] = step_codes(bits, R <= 4 || whole, codes + v * stride, s, ask, low);
                for (int r = 0; r < R; r++) {
                    const int8_t *four = x + (s * R + r) * STEP;
                    add_products(V, sum[r], u, four);
                }
            }
            codes += PAD * TILE * bits / 8;
            x += PAD * R;
            if (R > 4)
                fetch(ahead);
        }
        for (int v = 0; v < V; v++) {
            int64_t at = (v * groups + g) * TILE;
            __m512 ws = from_bf16(_mm256_loadu_si256((const __m256i *)(weight_scale + at)));
            __m512 wm = shifted ? from_bf16(_mm256_loadu_si256((const __m256i *)(minimum + at))) : ws;
            for (int r = 0; r < R; r++) {
                __m512 both = _mm512_mul_ps(ws, _mm512_set1_ps(scale[r]));
                total[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), both, total[r][v]);
                if (shifted) {
                    float share;
                    memcpy(&share, start + r, sizeof share);
                    total[r][v] = _mm512_fmadd_ps(wm, _mm512_set1_ps(share), total[r][v]);
                }
            }
        }
    }
    for (int v = 0; v < V; v++) {
        int64_t column = (tile + v) * TILE;
        __mmask16 mask = first(weight->n - column);
        __m512 bias = call->bias ? load(call->bias, column, call->bias_dtype, mask)
                                 : _mm512_setzero_ps();
        for (int r = 0; r < R; r++)
            store(call->output, (call->first_row + row + r) * weight->n + column, call->dtype, mask,
                  _mm512_add_ps(total[r][v], bias));
    }
}

typedef void (*block_t)(const call_t *, const uint8_t *, int64_t, int64_t, ahead_t *);

/* Few rows go with many tiles, and many rows with few, so that the sums fill the registers; with
   groups, half of these hold the sums of the groups. */
#define BLOCK(R, V, bits, shifted, whole)                                                          \
    TARGET static void block_##R##_##V##bits##shifted##whole(                                      \
        const call_t *call, const uint8_t *codes, int64_t tile, int64_t row, ahead_t *ahead)       \
    {                                                                                              \
        block(R, V, bits, shifted, whole, call, codes, tile, row, ahead);                          \
    }
#define NAME(R, V, bits, shifted, whole) block_##R##_##V##bits##shifted##whole,
#define FEW(DO, V, bits, shifted, whole)                                                           \
    DO(1, V, bits, shifted, whole)                                                                 \
    DO(2, V, bits, shifted, whole)                                                                 \
    DO(3, V, bits, shifted, whole)                                                                 \
    DO(4, V, bits, shifted, whole)                                                                 \
    DO(5, V, bits, shifted, whole)                                                                 \
    DO(6, V, bits, shifted, whole)
#define MANY(DO, V, shifted, whole)                                                                \
    DO(7, V, 8, shifted, whole)                                                                    \
    DO(8, V, 8, shifted, whole)                                                                    \
    DO(9, V, 8, shifted, whole)                                                                    \
    DO(10, V, 8, shifted, whole)                                                                   \
    DO(11, V, 8, shifted, whole)                                                                   \
    DO(12, V, 8, shifted, whole)
#define KERNELS(V, shifted, whole)                                                                 \
    FEW(BLOCK, V, 8, shifted, whole) FEW(BLOCK, V, 4, shifted, whole)
KERNELS(1, 0, 0)
KERNELS(2, 0, 0)
KERNELS(1, 1, 0)
KERNELS(2, 1, 0)
KERNELS(1, 0, 1)
KERNELS(4, 0, 1)
KERNELS(1, 1, 1)
KERNELS(4, 1, 1)
MANY(BLOCK, 1, 0, 1)
MANY(BLOCK, 2, 0, 1)
MANY(BLOCK, 1, 1, 1)
MANY(BLOCK, 2, 1, 1)

/* [whole][wide][shifted][4 bits][rows - 1]; more than 6 rows are multiplied unpacked. */
#define GROUPED(V, shifted)                                                                        \
    {                                                                                              \
        {FEW(NAME, V, 8, shifted, 0)}, {FEW(NAME, V, 4, shifted, 0)}                               \
    }
#define WHOLE(V, many, shifted)                                                                    \
    {                                                                                              \
        {FEW(NAME, V, 8, shifted, 1) MANY(NAME, many, shifted, 1)}, {FEW(NAME, V, 4, shifted, 1)}  \
    }
static const block_t blocks[2][2][2][2][MOST_ROWS] = {
    {{GROUPED(1, 0), GROUPED(1, 1)}, {GROUPED(2, 0), GROUPED(2, 1)}},
    {{WHOLE(1, 1, 0), WHOLE(1, 1, 1)}, {WHOLE(4, 2, 0), WHOLE(4, 2, 1)}},
};

TARGET static void multiply(const call_t *call, const uint8_t *codes, int bits, int64_t tile,
                            int64_t tiles, int64_t row, int64_t rows, ahead_t *ahead)
{
    const int whole = call->groups == 1;
    const int shifted = call->weight->minimum != 0, four = bits == 4;
    const int64_t stride = call->kp * TILE * bits / 8;
    for (int64_t r = 0; r < rows; r += call->together) {
        const int64_t these = rows - r < call->together ? rows - r : call->together;
        const int wide = whole && these <= FEW_ROWS ? 4 : 2;
        for (int64_t t = 0; t < tiles;) {
            const int fits = tiles - t >= wide;
            blocks[whole][fits][shifted][four][these - 1](call, codes + t * stride, tile + t,
                                                          row + r, ahead);
            t += fits ? wide : 1;
        }
    }
}

const kernels_t optimus_vnni = {round_row, multiply, unpack};
#endif
