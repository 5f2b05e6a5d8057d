/* The product in bf16: see bf16.c. */
#ifndef OPTIMUS_BF16_H
#define OPTIMUS_BF16_H

#include "threads.h"

/* output [rows, n] = input [rows, k] (rows `stride` numbers apart) @ weightᵀ + bias, in bf16.
   0, or -1 when there is no memory for the scratch, or no such instruction. */
EXPORT int optimus_bf16_linear(const uint16_t *weight, int64_t n, int64_t k, const uint16_t *input,
                               int64_t rows, int64_t stride, const void *bias, int bias_dtype,
                               uint16_t *output, int threads);

#endif
