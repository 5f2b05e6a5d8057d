"""Generation through transformers' own ``generate``: caches with room, and static shapes."""

from optimus.generation.buckets import Buckets, Graph
from optimus.generation.lazy import xla_cache
from optimus.generation.warm import compilations, runs, warm_up

__all__ = ["Buckets", "Graph", "compilations", "runs", "warm_up", "xla_cache"]
