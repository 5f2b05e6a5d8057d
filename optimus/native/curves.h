/* Functions of 16 numbers, in fp32: after vectors.h, where TARGET has AVX512-DQ. */

/* exp of what is not positive: 2^n p(r), within 2 units of the last place (Cephes' expf). */
INLINE __m512 exponential(__m512 x)
{
    /* The second operand is what comes out where one is NaN. */
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    const float terms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    __m512 p = _mm512_set1_ps(terms[0]);
    for (int i = 1; i < 6; i++)
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[i]));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* 1 / (1 + exp(-x)), from the exp of what is not positive on either side. */
INLINE __m512 sigmoid(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-0.0f);
    __m512 small = exponential(_mm512_or_ps(x, minus));
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 share = _mm512_mask_blend_ps(negative, one, small);
    return _mm512_div_ps(share, _mm512_add_ps(one, small));
}

INLINE __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

/* Near zero by Cephes' polynomial, elsewhere by the exp of what is not positive. */
INLINE __m512 hyperbolic_tangent(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    const __m512 size = _mm512_andnot_ps(sign, x), square = _mm512_mul_ps(x, x);
    const float terms[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                           1.33314422036e-1f, -3.33332819422e-1f};
    __m512 p = _mm512_set1_ps(terms[0]);
    for (int i = 1; i < 5; i++)
        p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(terms[i]));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
    __m512 e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
    __m512 far = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    far = _mm512_or_ps(far, _mm512_and_ps(sign, x));
    return _mm512_mask_mov_ps(far, _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ), p);
}
