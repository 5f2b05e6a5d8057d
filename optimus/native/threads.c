/* See threads.h. */
#include "threads.h"

#include <pthread.h>
#include <stdlib.h>

/* Rows below which a block of rows costs more than it saves. */
#define LEAST_ROWS 64

/* libgomp's and libomp's entry to a parallel region; torch's own copy of it, given by Python. */
typedef void (*parallel_t)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
static parallel_t parallel;

typedef struct {
    void *memory;
    size_t size;
} scratch_t;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void release(void *scratch)
{
    for (int kind = 0; kind < KINDS; kind++)
        free(((scratch_t *)scratch)[kind].memory);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&key, release); }

void *optimus_scratch(int kind, size_t size)
{
    pthread_once(&once, make_key);
    scratch_t *mine = pthread_getspecific(key);
    if (!mine) {
        mine = calloc(KINDS, sizeof *mine);
        if (!mine)
            return 0;
        pthread_setspecific(key, mine);
    }
    if (mine[kind].size < size) {
        free(mine[kind].memory);
        size = (size + 4095) & ~(size_t)4095;
        mine[kind].memory = aligned_alloc(64, size);
        mine[kind].size = mine[kind].memory ? size : 0;
    }
    return mine[kind].memory;
}

void optimus_cut(grid_t *grid, int64_t most, int64_t step, int64_t together, int threads)
{
    int64_t wanted = threads > 1 ? 4 * threads : 1;
    int64_t share = ceil_div(ceil_div(grid->units, wanted), step) * step;
    grid->units_a_block = most && most < share ? most : share;
    grid->blocks = ceil_div(grid->units, grid->units_a_block);
    grid->row_blocks = 1;
    if (grid->blocks < wanted) {
        int64_t split = ceil_div(wanted, grid->blocks), parts = ceil_div(grid->rows, LEAST_ROWS);
        grid->row_blocks = smaller(split, parts);
    }
    grid->rows_a_block = ceil_div(ceil_div(grid->rows, grid->row_blocks), together) * together;
    grid->row_blocks = ceil_div(grid->rows, grid->rows_a_block);
}

item_t optimus_take(grid_t *grid)
{
    long number = atomic_fetch_add(&grid->next, 1);
    item_t item = {0};
    if (number >= grid->blocks * grid->row_blocks)
        return item;
    item.unit = number / grid->row_blocks * grid->units_a_block;
    item.row = number % grid->row_blocks * grid->rows_a_block;
    item.units = smaller(grid->units - item.unit, grid->units_a_block);
    item.rows = smaller(grid->rows - item.row, grid->rows_a_block);
    return item;
}

void optimus_run(void (*body)(void *), void *data, int threads)
{
    if (parallel && threads > 1)
        parallel(body, data, (unsigned)threads, 0);
    else
        body(data);
}

EXPORT void optimus_set_parallel(parallel_t entry) { parallel = entry; }
