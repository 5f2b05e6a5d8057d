"""Rows that no tiny whole model reaches: the part of the model that they are for, and its inputs.

Images that the zoo does not give unasked, models without a forward, packages that are not here, and
classes that transformers has and does not use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from zoo.models import stir

LENGTHS = (9, 4, 6)
WIDTH = 64
FOLDING = SimpleNamespace(
    sequence_state_dim=WIDTH,
    sequence_head_width=16,
    pairwise_state_dim=32,
    pairwise_head_width=16,
    dropout=0.0,
)


@dataclass(frozen=True)
class Part:
    """A class of transformers, what it is made of, and what it is called with."""

    family: str
    name: str
    made: Callable[[type[nn.Module]], nn.Module]
    given: Callable[[Tensor], dict[str, Any]]

    def build(self) -> nn.Module:
        """The part alone, seeded, in eval mode."""
        module = importlib.import_module(f"transformers.models.{self.family}")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.made(getattr(module, self.name))
            stir(model)
        return model.eval()

    def inputs(self, batch: int, padding: str) -> dict[str, Any]:
        """Arguments for its forward."""
        return self.given(mask(batch, padding))


def mask(batch: int, padding: str) -> Tensor:
    """Ones where there is something."""
    lengths = torch.tensor(LENGTHS[:batch] if padding != "none" else LENGTHS[:1] * batch)
    gaps = 9 - lengths
    start = {"left": gaps, "ragged": gaps // 2}.get(padding, 0 * gaps)[:, None]
    place = torch.arange(9)
    return ((place >= start) & (place < start + lengths[:, None])).long()


def noise(*shape: int) -> Tensor:
    """Floats around zero, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _words(shown: Tensor) -> Tensor:
    return torch.arange(shown.numel()).view(shown.shape) % 24 + 8


def _boxes(shown: Tensor) -> Tensor:
    corner = torch.arange(18).view(9, 2) % 20
    return torch.cat([corner, corner + 5], -1).expand(len(shown), 9, 4)


def _images(shown: Tensor) -> dict[str, Any]:
    return {"pixel_values": noise(len(shown), 3, 64, 64)}


def _of(path: str, model_type: str) -> Callable[[type[nn.Module]], nn.Module]:
    """A class made from one config of the tiny config of a type."""

    def made(cls: type[nn.Module]) -> nn.Module:
        config = zoo.tiny(model_type)
        for name in path.split(".") if path else ():
            config = getattr(config, name)
        return cls(config)

    return made


PARTS = {
    "bark.attention.scores": Part(
        "bark.modeling_bark",
        "BarkSemanticModel",
        _of("semantic_config", "bark"),
        lambda shown: {"input_ids": _words(shown), "attention_mask": shown},
    ),
    "esm.attention.scores": Part(
        "esm.modeling_esmfold",
        "EsmFoldTriangularSelfAttentionBlock",
        lambda cls: cls(FOLDING),
        lambda shown: {
            "sequence_state": noise(*shown.shape, WIDTH),
            "pairwise_state": noise(len(shown), 9, 9, 32),
            "mask": shown.float(),
        },
    ),
    "evolla.attention.scores": Part(
        "evolla.modeling_evolla",
        "EvollaSequenceCompressorAttention",
        lambda cls: cls(WIDTH, 16, 4),
        lambda shown: {
            "x": noise(*shown.shape, WIDTH),
            "latents": noise(len(shown), 5, WIDTH),
            "mask": torch.cat([shown, shown.new_ones(len(shown), 5)], 1).bool(),
        },
    ),
    "idefics2.attention.scores": Part(
        "idefics2.modeling_idefics2",
        "Idefics2MultiheadAttentionPoolingHead",
        _of("vision_config", "idefics2"),
        lambda shown: {"hidden_state": noise(*shown.shape, WIDTH)},
    ),
    "layoutlmv2.attention.scores": Part(
        "layoutlmv2.modeling_layoutlmv2",
        "LayoutLMv2Encoder",
        _of("", "layoutlmv2"),
        lambda shown: {
            "hidden_states": noise(*shown.shape, WIDTH),
            "attention_mask": (1.0 - shown[:, None, None]) * torch.finfo(torch.float32).min,
            "bbox": _boxes(shown),
            "position_ids": torch.arange(9).expand(shown.shape),
        },
    ),
    "aria.attention.scores": Part(
        "aria.modeling_aria",
        "AriaCrossAttention",
        _of("", "aria"),
        lambda shown: {
            "key_value_states": noise(*shown.shape, WIDTH),
            "hidden_states": noise(len(shown), 5, WIDTH),
            "attn_mask": (shown == 0)[:, None, None].expand(-1, 4, 5, -1).flatten(0, 1),
        },
    ),
    "got_ocr2.attention.scores": Part(
        "got_ocr2.modeling_got_ocr2",
        "GotOcr2VisionEncoder",
        _of("vision_config", "got_ocr2"),
        _images,
    ),
    "phi4_multimodal.attention.scores": Part(
        "phi4_multimodal.modeling_phi4_multimodal",
        "Phi4MultimodalVisionModel",
        _of("vision_config", "phi4_multimodal"),
        _images,
    ),
}
