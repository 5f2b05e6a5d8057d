/* Included by each file of AVX-512 kernels, with TARGET as the attribute that its functions need:
   16 numbers of any dtype, as fp32. */
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE __m512 from_bf16(__m256i bits)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

INLINE __m512 load(const void *from, int64_t at, int dtype, __mmask16 mask)
{
    if (dtype == FLOAT32)
        return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at);
    return dtype == BFLOAT16 ? from_bf16(half) : _mm512_cvtph_ps(half);
}

INLINE void store(void *to, int64_t at, int dtype, __mmask16 mask, __m512 value)
{
    if (dtype == FLOAT32) {
        _mm512_mask_storeu_ps((float *)to + at, mask, value);
        return;
    }
    __m256i half;
    if (dtype == FLOAT16) {
        half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
        __m512i bits = _mm512_castps_si512(value);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        up = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7FC00000));
        half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
    }
    _mm256_mask_storeu_epi16((uint16_t *)to + at, mask, half);
}

INLINE __mmask16 first(int64_t count)
{
    return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}
