/* Activation functions, a number at a time: see activation.c. */
#ifndef OPTIMUS_ACTIVATION_H
#define OPTIMUS_ACTIVATION_H

#include "threads.h"

/* x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))) / 2; x sigmoid(1.702 x). */
enum { GELU_TANH = 0, GELU_QUICK = 1 };

EXPORT void optimus_activate(const void *input, void *output, int64_t count, int kind, int dtype,
                             int threads);

#endif
