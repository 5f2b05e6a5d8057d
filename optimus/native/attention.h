/* Attention of many queries over no more keys than the cache holds: see attention.c. */
#ifndef OPTIMUS_ATTENTION_H
#define OPTIMUS_ATTENTION_H

#include "threads.h"

/* `count` sequences: all of `rows` queries and `keys` keys, or laid end to end with as many of both
   as `lengths` says. query is [count][heads][rows][dim], key [count][groups][keys][dim] and value
   the same of value_dim, by strides of their own, side by side within a token; both dims are
   multiples of 16. output is [count][rows][heads][value_dim]. The mask, if any, has strides that are
   0 where it is shared, and for its last axis 1; it is added, of a dtype, or bool. causal: query i
   sees keys up to i. A cap other than 0: the scores become cap * tanh(score / cap) before the mask. */
typedef struct {
    const void *query, *key, *value, *mask;
    void *output;
    const int64_t *lengths;
    int64_t count, rows, keys, heads, groups, dim, value_dim;
    int64_t query_batch, query_head, query_token, key_batch, key_head, key_token;
    int64_t value_batch, value_head, value_token, mask_batch, mask_head, mask_row;
    float scale, cap;
    int32_t dtype, mask_dtype, causal;
} optimus_attention;

/* softmax(query keyᵀ * scale + mask) value; a query that sees nothing gives zeros.
   0, or -1 when there is no memory for the scratch. */
EXPORT int optimus_attention_of(const optimus_attention *call, int threads);

#endif
