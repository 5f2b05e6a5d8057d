/* Scratch, threads and the cutting of a product into blocks: what every kernel here is run by. */
#ifndef OPTIMUS_THREADS_H
#define OPTIMUS_THREADS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* BOOL is for masks alone. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BOOL = 3 };

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* What of the next block's weights is still to be fetched into the cache. */
typedef struct {
    const uint8_t *next, *end;
} ahead_t;

/* A product of some rows with some units of a weight, cut into blocks that threads take in turn. */
typedef struct {
    int64_t units, rows, units_a_block, rows_a_block, blocks, row_blocks;
    atomic_long next;
} grid_t;

typedef struct {
    int64_t unit, units, row, rows;
} item_t;

/* Blocks of at most `most` units, a multiple of `step`, and of rows in a multiple of `together`;
   enough of them for every thread to have several. 0 for `most` is no limit. */
void optimus_cut(grid_t *grid, int64_t most, int64_t step, int64_t together, int threads);
/* The next block that no thread has taken yet; without units when there is none left. */
item_t optimus_take(grid_t *grid);

enum { ROUNDED, PANEL, SUMS, LAYER, KINDS };
/* Memory of this thread's own, kept for its next call; null when there is none left. */
void *optimus_scratch(int kind, size_t size);

/* `body(data)` on as many of torch's threads. */
void optimus_run(void (*body)(void *), void *data, int threads);

#endif
