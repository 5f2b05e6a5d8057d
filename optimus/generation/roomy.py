"""``generate`` on a cache with room, for any model that generates; all else is transformers'."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from torch import nn

from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.generation.cache import furnish
from optimus.generation.pool import Pool

POOL = "_optimus_pool"
NAME = "past_key_values"

# The caches of the call that runs in this thread, with the layers to give back.
_made: ContextVar[list[tuple[Any, list[Any]]] | None] = ContextVar("made", default=None)


class RoomyGeneration(Mixin):
    """A generating model whose own caches have room. A cache of the user's is left as it is."""

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        surgeon.set_attribute(module, POOL, Pool())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and the memory of the cache is there for the next call."""
        made: list[tuple[Any, list[Any]]] = []
        token = _made.set(made)
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _made.reset(token)
            while made:
                cache, layers = made.pop()
                # Ours, and the argument's: a third reference is a user who was handed the cache.
                if sys.getrefcount(cache) <= 2:
                    for layer in layers:
                        layer.leave()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = model_kwargs.get(NAME)
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )
        cache, made = model_kwargs.get(NAME), _made.get()
        if made is not None and cache is not None and cache is not given:
            length = kwargs.get("max_cache_length", args[-1] if args else 0)
            layers = furnish(cache, vars(self)[POOL], int(length))
            made.append((cache, layers))
        return result
