"""What a graph computes: a section of a prompt, or one token more, from a slate into the slate."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Graph
from optimus.generation.slate import Slate, over


def compute(graph: Graph, model: nn.Module, slate: Slate) -> Tensor:
    """Run it. Logits of each row's next token, ``[batch, vocabulary]`` in fp32.

    The likeliest token is written into the slate as the next; who wants another puts it there.
    """
    if graph.kind == "prefill":
        return _prefill(graph, model, slate)
    return _decode(graph, model, slate)


def _prefill(graph: Graph, model: nn.Module, slate: Slate) -> Tensor:
    part = slate.parts[graph.length]
    columns = slate.slot + torch.arange(graph.length, device=slate.slot.device)
    slate.tokens.index_copy_(1, columns, part.ids)
    slate.live.index_copy_(1, columns, part.live)
    logits = _logits(graph, model, slate, columns, part.ids, part.positions)
    slate.slot.add_(slate.last + 1)
    slate.position.copy_(part.positions.index_select(1, slate.last) + 1)
    _choose(slate, logits)
    return logits


def _decode(graph: Graph, model: nn.Module, slate: Slate) -> Tensor:
    slate.finished.logical_or_(slate.ended())
    # A copy: the slot moves on while the cache still needs where it was.
    columns = slate.slot.clone()
    slate.live.index_copy_(1, columns, torch.ones_like(slate.token, dtype=torch.bool))
    logits = _logits(graph, model, slate, columns, slate.token, slate.position)
    slate.slot.add_(1)
    slate.position.add_(1)
    _choose(slate, logits)
    return logits


def _choose(slate: Slate, logits: Tensor) -> None:
    chosen = torch.where(slate.finished, slate.pad, logits.argmax(-1))[:, None]
    slate.token.copy_(chosen)
    slate.tokens.index_copy_(1, slate.slot, chosen)


def _logits(
    graph: Graph, model: nn.Module, slate: Slate, columns: Tensor, ids: Tensor, positions: Tensor
) -> Tensor:
    output = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_mask(graph, model, slate, columns),
        past_key_values=over(slate, columns, graph.window),
        use_cache=True,
        return_dict=True,
        logits_to_keep=slate.last if graph.kind == "prefill" else 1,
    )
    return cast(Tensor, output.logits[:, -1].to(torch.float32))


def _mask(graph: Graph, model: nn.Module, slate: Slate, columns: Tensor) -> Tensor:
    """By transformers' own function: in the form that the attention of the model wants."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    config: Any = model.config
    config = config.get_text_config(decoder=True)
    make = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]
    mask: Tensor = make(
        batch_size=graph.batch,
        q_length=graph.length,
        kv_length=graph.window,
        q_offset=columns[0],
        kv_offset=0,
        mask_function=causal_mask_function,
        attention_mask=slate.live[:, : graph.window],
        allow_is_causal_skip=False,
        dtype=slate.keys[0].dtype,
        config=config,
        use_vmap=False,
        device=columns.device,
    )
    return mask
