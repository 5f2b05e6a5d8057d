"""Generation through transformers' own ``generate``, on a cache that is not allocated anew."""
