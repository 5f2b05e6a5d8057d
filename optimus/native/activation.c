/* Activation functions in one pass, in fp32 whatever the tensors are. */
#include "activation.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#include "vectors.h"
#include "curves.h"

/* Numbers that a thread takes at a time. */
enum { WIDTH = 16, PART = 8192 };

typedef struct {
    const void *input;
    void *output;
    int64_t count;
    int32_t kind, dtype;
    atomic_long next;
} work_t;

/* (1 + tanh(u)) / 2 is sigmoid(2u). */
INLINE __m512 gelu_tanh(__m512 x)
{
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.07135481283f),
                                   _mm512_set1_ps(1.59576912161f));
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, cubic)));
}

INLINE void activate(const int kind, const work_t *work, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += WIDTH) {
        const __mmask16 mask = first(to - i);
        __m512 x = load(work->input, i, work->dtype, mask);
        if (kind == GELU_TANH)
            x = gelu_tanh(x);
        else
            x = _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(1.702f))));
        store(work->output, i, work->dtype, mask, x);
    }
}

TARGET static void activate_parts(void *data)
{
    work_t *work = data;
    for (long part; (part = atomic_fetch_add(&work->next, 1)) * PART < work->count;) {
        const int64_t from = part * PART, to = smaller(from + PART, work->count);
        if (work->kind == GELU_TANH)
            activate(GELU_TANH, work, from, to);
        else
            activate(GELU_QUICK, work, from, to);
    }
}

EXPORT void optimus_activate(const void *input, void *output, int64_t count, int kind, int dtype,
                             int threads)
{
    work_t work = {.input = input, .output = output, .count = count, .kind = kind, .dtype = dtype};
    optimus_run(activate_parts, &work, count > 4 * PART ? threads : 1);
}
#endif
