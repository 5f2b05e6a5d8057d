"""Attention over windows and blocks, on the fused kernel: a forward for each way of cutting.

The models write scores for every window, or all of them, and put them together by strides and
scatters, so ``ops.scores`` cannot follow. Here each window is a call of the kernel. Inference on
CPUs: the log-sum-exps that join parts have no gradient, and what is random is drawn in training.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import SHORTEST, Architecture, Mixin, Replacement
from optimus.ops.capped import capped_windows
from optimus.ops.windows import (
    Part,
    attended,
    bias_dtype,
    biases,
    block_sparse,
    blocked,
    joined,
    sliding,
)
from optimus.replacements._families import targets
from optimus.replacements._scores import FusedScores, is_opened, is_wanted


class FusedWindows(FusedScores):
    """The stock path serves calls that train, trace, run under autocast or elsewhere than on the
    CPU, and those whose weights or parts somebody looks at. ``windowed`` is the forward of others.
    """

    num_heads: int
    head_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        if not self._is_stock(args, kwargs):
            out = self.windowed(*args, **kwargs)
            if out is not None:
                return out
        return super(FusedScores, self).forward(*args, **kwargs)

    def windowed(self, *args: Any, **kwargs: Any) -> Any:
        """The answer; None where the call does not fit."""
        raise NotImplementedError

    def extent(self, *args: Any, **kwargs: Any) -> int:
        """How many keys a query looks at, as the original's largest softmax has them."""
        raise NotImplementedError

    def _is_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        module: Any = self
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        learning = torch.is_grad_enabled() and any(
            one.requires_grad for one in (*given, *module.parameters())
        )
        if (
            learning
            or module.training
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or torch.is_autocast_enabled("cpu")
            or any(one.device.type != "cpu" or one.numel() == 0 for one in given)
        ):
            return True
        short = self.extent(*args, **kwargs) < vars(self).get(SHORTEST, 1)
        return short or is_wanted(module, args, kwargs) or is_opened(module)

    def _heads(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        projected: Tensor = layer(hidden)
        return projected.unflatten(-1, (self.num_heads, self.head_dim))


class LongformerWindows(FusedWindows):
    """A window around each token, and global tokens, which see and are seen by all."""

    one_sided_attn_window_size: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_global: nn.Module
    key_global: nn.Module
    value_global: nn.Module

    def extent(self, *args: Any, **kwargs: Any) -> int:
        """The window's."""
        return 2 * self.one_sided_attn_window_size + 1

    def windowed(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        """``[batch, length, width]``; the masks are ``[batch, length]``."""
        reach = self.one_sided_attn_window_size
        uneven = hidden_states.shape[1] % (2 * reach)
        if attention_mask is None or is_index_masked is None or uneven:
            return None
        query, key, value = (
            self._heads(layer, hidden_states) for layer in (self.query, self.key, self.value)
        )
        low = torch.finfo(query.dtype).min
        out, lse = sliding(query, key, value, biases(query, attention_mask != 0, low), reach)
        if is_global_attn:
            assert is_index_global_attn is not None
            places, real = _places(is_index_global_attn)
            seen = (_taken(one, places) for one in (key, value))
            fill = biases(query, ~real, low)[:, None, None]
            out = joined(Part(out, lse), attended(query, *seen, fill))
        out = out.masked_fill(is_index_masked[:, :, None, None], 0.0)
        if is_global_attn:
            fill = biases(query, is_index_masked, low)[:, None, None]
            out[is_index_global_attn] = self._of_global(hidden_states, places, fill)[real]
        return (out.flatten(2),)

    def _heads(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """``[batch, length, heads, dim]``; the layer sees the length first, as in the original."""
        projected: Tensor = layer(hidden.transpose(0, 1))
        return projected.transpose(0, 1).unflatten(-1, (self.num_heads, self.head_dim))

    def _of_global(self, hidden: Tensor, places: Tensor, bias: Tensor) -> Tensor:
        query = self._heads(self.query_global, _taken(hidden, places))
        key, value = (self._heads(layer, hidden) for layer in (self.key_global, self.value_global))
        return attended(query, key, value, bias).out


def _places(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of ``[batch, length]`` is true, first of all, and which of these are real:
    rows have different numbers of them."""
    counts = chosen.sum(1)
    most = int(counts.max())
    order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return order[:, :most], torch.arange(most, device=chosen.device) < counts[:, None]


def _taken(value: Tensor, places: Tensor) -> Tensor:
    return value[torch.arange(len(value), device=value.device)[:, None], places]


class PegasusBlocks(FusedWindows):
    """Blocks, and global tokens with states of their own, which see and are seen by all."""

    block_size: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def extent(
        self, token_hidden_states: Tensor, global_hidden_states: Tensor, *_: Any, **__: Any
    ) -> int:
        """The global ones and those of a block."""
        return global_hidden_states.shape[1] + self.block_size

    def windowed(
        self,
        token_hidden_states: Tensor,
        global_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """``[batch, length, width]`` and ``[batch, tokens, width]``; the mask is added by keys."""
        if attention_mask is None or token_hidden_states.shape[1] % self.block_size:
            return None
        local, known = (
            [self._heads(layer, hidden) for layer in (self.q_proj, self.k_proj, self.v_proj)]
            for hidden in (token_hidden_states, global_hidden_states)
        )
        bias = attention_mask.to(bias_dtype(local[0]))
        whole = joined(attended(*known), attended(known[0], *local[1:], bias[:, None, None]))
        near = joined(blocked(*local, bias, self.block_size), attended(local[0], *known[1:]))
        apart = self.out_proj(whole.flatten(2))
        return self.out_proj(near.flatten(2)), apart, {"global": None, "local": None}


class BigBirdBlocks(FusedWindows):
    """Blocks of which some are global, and the random ones, which are the first one in inference.

    A model that is called with a short text puts full attention in its place, for good.
    """

    successors: ClassVar[tuple[str, ...]] = ("BigBirdSelfAttention", "BigBirdPegasusSelfAttention")

    num_attention_heads: int
    attention_head_size: int
    num_random_blocks: int
    block_size: int
    query: nn.Module
    key: nn.Module
    value: nn.Module

    def extent(self, *args: Any, **kwargs: Any) -> int:
        """Three blocks around a query, the first, the last, and the random ones."""
        return (5 + self.num_random_blocks) * self.block_size

    def windowed(
        self,
        hidden_states: Tensor,
        band_mask: Tensor | None = None,
        from_mask: Tensor | None = None,
        to_mask: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        """``[batch, length, width]``; masks are ``[batch, 1, length, 1]``, ones for the real."""
        size, length = self.block_size, hidden_states.shape[1]
        if from_mask is None or to_mask is None or length % size or length < 5 * size:
            return None
        if not (_is_binary(from_mask) and _is_binary(to_mask)) or self._draws(length):
            return None
        heads = (self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            layer(hidden_states).unflatten(-1, heads)
            for layer in (self.query, self.key, self.value)
        )
        masked = to_mask[:, 0, 0] == 0
        out = block_sparse(query, key, value, masked, size, self.num_random_blocks)
        return (out * from_mask.transpose(1, 2)).flatten(2), None

    def _draws(self, length: int) -> bool:
        """Whether random blocks are others than the first."""
        drawn = self._bigbird_block_rand_mask(  # type: ignore[attr-defined]
            length, length, self.block_size, self.block_size, self.num_random_blocks
        )
        return bool(drawn.any())


def _is_binary(mask: Tensor) -> bool:
    return bool(((mask == 0) | (mask == 1)).all())


class GemmaAudio(FusedWindows):
    """A soft cap on scores with relative positions, by chunks with a context."""

    chunk_size: int
    context_size: int
    max_past_horizon: int
    max_future_horizon: int
    softcap: Tensor
    per_dim_scale: Tensor
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def extent(self, *args: Any, **kwargs: Any) -> int:
        """Those of a chunk and its context."""
        return self.context_size

    def _capped(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        masked: Tensor | None,
        fill: float,
    ) -> Tensor:
        """``[batch, length, heads, dim]``, without what fills the last chunk up."""
        parts = (
            self._convert_to_block(query),  # type: ignore[attr-defined]
            self._extract_block_context(key),  # type: ignore[attr-defined]
            self._extract_block_context(value),  # type: ignore[attr-defined]
        )
        blocks = (one.permute(0, 3, 1, 2, 4) for one in parts)
        out = capped_windows(*blocks, positions, masked, fill, float(self.softcap))
        return out.flatten(1, 2)[:, : query.shape[1]]


class Gemma3nAudio(GemmaAudio):
    """Where the positions are a module of their own, and the mask says what is padded."""

    q_scale: Tensor
    local_causal_valid_mask: Tensor
    relative_position_embedding: Any

    def windowed(self, hidden_states: Tensor, mask: Tensor) -> Any:
        """``[batch, length, width]`` to ``[batch, length, heads, dim]``."""
        query, key, value = (
            self._heads(layer, hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = query * self.q_scale * nn.functional.softplus(self.per_dim_scale)
        valid = self._extract_block_context(~mask)  # type: ignore[attr-defined]
        seen = valid[:, None, :, None] & self.local_causal_valid_mask
        low = torch.finfo(query.dtype).min
        return self._capped(query, key, value, self._positions(query), ~seen, low)

    def _positions(self, query: Tensor) -> Tensor:
        """``[heads, dim, distances]``."""
        table = self.relative_position_embedding
        steps = torch.arange(table.max_backward, -table.max_forward - 1, -1, device=query.device)
        signal = table._get_timing_signal_1d_pos(steps[None], dtype=query.dtype)
        return self._heads(table.pos_proj, signal)[0].permute(1, 2, 0)


class Gemma4Audio(GemmaAudio):
    """Where the positions come with the call, and the mask by chunks."""

    q_scale: float
    k_scale: float
    config: Any
    relative_k_proj: nn.Module
    post: nn.Module

    def windowed(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """``[batch, length, width]``; what is not zero in the mask is left out."""
        query, key, value = (
            self._heads(layer, hidden_states).float()
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = query * self.q_scale * nn.functional.softplus(self.per_dim_scale)
        positions = self._heads(self.relative_k_proj, position_embeddings)
        positions = positions.reshape(-1, *positions.shape[-2:]).permute(1, 2, 0).to(query.dtype)
        masked = None if attention_mask is None else attention_mask != 0
        low = self.config.attention_invalid_logits_value
        out = self._capped(query, key * self.k_scale, value, positions, masked, low)
        return self.post(out.flatten(2).to(hidden_states.dtype)), None


def windows(model_type: str, *classes: str, mixin: type[Mixin]) -> Architecture:
    """The row of an architecture: its attention classes, with ``module:`` where it is another."""
    row = Replacement(
        name=f"{model_type}.attention.windows",
        targets=targets(model_type, classes),
        mixin=mixin,
        modes=frozenset({Mode.INFERENCE}),
        backends=CPUS,
        gated=True,
    )
    return Architecture(model_type=model_type, replacements=(row,))
