/* One new token through a whole decoder layer, by the parts in the other files: a call of Python
   for each of them would take as long as the layer's weights take to read. */
#include "bf16.h"
#include "layer.h"
#include "quantized.h"

#ifdef OPTIMUS_HAS_LAYER

/* A linear layer: rounded (`codes`) or in bf16 (`panels`, as bf16.c has them), [n, k]. */
typedef struct {
    const optimus_weight *codes;
    const void *panels, *bias;
    int64_t n, k;
    int32_t bias_dtype, padding;
} optimus_product;

enum { QUERY, KEY, VALUE, OUT, GATE, UP, DOWN, PRODUCTS };
enum { BEFORE, AFTER, OF_QUERY, OF_KEY, NORMS };

/* input and output [step.batch, width]. The norms of queries and keys may be null. */
typedef struct {
    optimus_product products[PRODUCTS];
    const void *norms[NORMS];
    float eps[NORMS];
    const void *input;
    void *output;
    int64_t width;
    optimus_step step;
} optimus_layer;

typedef struct {
    const optimus_layer *layer;
    int threads, kernels;
} run_t;

/* Products of one input with neighbours among the layer's; 0, or -1 without memory. */
static int multiply(const run_t *run, int from, int count, const void *input, void **outputs)
{
    const optimus_product *products = run->layer->products + from;
    const int64_t rows = run->layer->step.batch;
    const int dtype = run->layer->step.dtype;
    const optimus_weight *weights[PRODUCTS];
    const void *biases[PRODUCTS];
    int dtypes[PRODUCTS];
    int rounded = 0;
    for (int i = 0; i < count; i++) {
        weights[i] = products[i].codes;
        biases[i] = products[i].bias;
        dtypes[i] = products[i].bias_dtype;
        rounded += weights[i] != 0;
    }
    if (rounded == count)
        return optimus_quantized_group(weights, count, input, rows, products->k, dtype, biases,
                                       dtypes, outputs, run->threads, run->kernels);
    for (int i = 0; i < count; i++)
        if (optimus_bf16_linear(products[i].panels, products[i].n, products[i].k, input, rows,
                                products[i].k, biases[i], dtypes[i], outputs[i], run->threads))
            return -1;
    return 0;
}

static int attention(const run_t *run, char *memory, int64_t itemsize, void *normed)
{
    const optimus_layer *layer = run->layer;
    const optimus_product *products = layer->products;
    const int64_t rows = layer->step.batch, dim = layer->step.dim;
    const int dtype = layer->step.dtype;
    void *parts[VALUE + 1], *attended = memory;
    memory += rows * products[QUERY].n * itemsize;
    for (int i = QUERY; i <= VALUE; memory += rows * products[i++].n * itemsize)
        parts[i] = memory;
    if (multiply(run, QUERY, VALUE + 1, normed, parts))
        return -1;
    for (int i = QUERY; i <= KEY; i++)
        if (layer->norms[OF_QUERY + i])
            optimus_rms_norm(parts[i], layer->norms[OF_QUERY + i], parts[i],
                             rows * products[i].n / dim, dim, dim, layer->eps[OF_QUERY + i], dtype, 1);
    optimus_step step = layer->step;
    step.query = parts[QUERY];
    step.key = parts[KEY];
    step.value = parts[VALUE];
    step.output = attended;
    return optimus_attend(&step, run->threads) || multiply(run, OUT, 1, attended, &normed) ? -1 : 0;
}

static int gated(const run_t *run, char *memory, int64_t itemsize, void *normed)
{
    const optimus_layer *layer = run->layer;
    const int64_t count = layer->step.batch * layer->products[GATE].n;
    void *parts[2] = {memory, memory + count * itemsize};
    if (multiply(run, GATE, 2, normed, parts))
        return -1;
    optimus_gate(parts[0], parts[1], count, layer->step.dtype, run->threads);
    return multiply(run, DOWN, 1, parts[0], &normed);
}

/* 0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_decode(const optimus_layer *layer, int threads, int kernels)
{
    const run_t run = {layer, threads, kernels};
    const optimus_product *products = layer->products;
    const int64_t rows = layer->step.batch, count = rows * layer->width;
    const int dtype = layer->step.dtype, itemsize = dtype == FLOAT32 ? 4 : 2;
    const int64_t heads = 2 * products[QUERY].n + products[KEY].n + products[VALUE].n;
    const int64_t inner = 2 * products[GATE].n, most = heads > inner ? heads : inner;
    char *normed = optimus_scratch(LAYER, (size_t)((count + rows * most) * itemsize));
    if (!normed)
        return -1;
    optimus_rms_norm(layer->input, layer->norms[BEFORE], normed, rows, layer->width, layer->width,
                     layer->eps[BEFORE], dtype, 1);
    if (attention(&run, normed + count * itemsize, itemsize, normed))
        return -1;
    optimus_add(layer->input, normed, layer->output, count, dtype);
    optimus_rms_norm(layer->output, layer->norms[AFTER], normed, rows, layer->width, layer->width,
                     layer->eps[AFTER], dtype, 1);
    if (gated(&run, normed + count * itemsize, itemsize, normed))
        return -1;
    optimus_add(layer->output, normed, layer->output, count, dtype);
    return 0;
}
#endif
