"""What the tests of all rows and of all model types share: models, answers, and what ran."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import zoo
from parts import PARTS
from snapshots import defined, tensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from zoo.configs import parts as parts_of
from zoo.models import build_from

import optimus
from optimus.core import costs
from optimus.core.planner import JOURNAL, Recipe
from optimus.core.registry import Registry
from optimus.core.replacement import Replacement
from optimus.ops import capped
from optimus.replacements import biased, decoders, handwritten, hosted, islands, windows
from optimus.replacements import refused as refused_rows

CLOSE = 5e-6
PADDINGS = ("none", "right", "left", "ragged")
# By which file and which tuple of it a row stands.
GROUPS = {
    "A": (*hosted.GUARDED, *refused_rows.GIVEN),
    "B": handwritten.ARCHITECTURES,
    "C": biased.ARCHITECTURES,
    "D": hosted.SINKS,
    "E": (*hosted.CAPPED, *windows.ARCHITECTURES, *refused_rows.SPARSE),
    "F": refused_rows.OTHER,
    "MLA": decoders.LATENT,
    "GQA": decoders.GROUPED,
    "islands": islands.ARCHITECTURES,
}
# Types that are a part of another one, which is what can be built.
WITHIN = {
    "emu3_text_model": "emu3",
    "inkling": "inkling_text",
    "mllama_text_model": "mllama",
    "paddleocr_vl_text": "paddleocr_vl",
    "step3p5": "step3p7",
    "unlimited_ocr_text": "unlimited_ocr",
}
WRITING = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
)
# Settings under which training draws no random numbers.
STEADY = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0}
# What makes a tiny config one of the kind that the row is for.
CHANGES: dict[str, dict[str, Any]] = {
    "big_bird.attention.scores": {"attention_type": "original_full"},
    "bigbird_pegasus.attention.scores": {"attention_type": "original_full"},
    "hubert.attention.fused": {"mask_time_prob": 0.0},
    "informer.attention.fused": {"attention_type": "full"},
    "longt5.attention.fused": {"decoder_start_token_id": 1},
    "longt5.attention.scores": {"decoder_start_token_id": 1},
    "patchtsmixer.attention.fused": {"self_attn": True},
    "switch_transformers.attention.fused": {"decoder_start_token_id": 1},
    "t5.attention.fused": {"decoder_start_token_id": 1},
    "wav2vec2.attention.fused": {"mask_time_prob": 0.0},
    "zoedepth.attention.scores": {
        "num_patch_transformer_layers": 4,
        "patch_transformer_hidden_size": 128,
        "patch_transformer_intermediate_size": 96,
        "patch_transformer_num_attention_heads": 4,
        "bin_configurations": [
            {"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0, "name": "near"},
            {"n_bins": 8, "min_depth": 0.001, "max_depth": 80.0, "name": "far"},
        ],
    },
}
# Softmaxes over a last axis of three or more that are no attention over keys, by class.
_POINTS = "weighs a few sampled points, not keys"
NOT_SCORES = {
    "BltPatcher": "the entropy of the next byte",
    "DeepseekV4HyperConnection": "mixes copies of the residual stream",
    "Glm5NextTextHyperConnection": "mixes copies of the residual stream",
    "GraniteSpeech5Encoder": "guesses of letters in the middle of the encoder",
    "MgpstrA3Module": "pools tokens by convolution, without queries",
    "PatchTSMixerGatedAttention": "a gate over features",
    "SLANeXtSLAHead": "probabilities of cells",
    "SLANetSLAHead": "probabilities of cells",
    "Sam2MultiScaleAttention": "weights that it throws away, and then asks for SDPA",
    "SwitchTransformersTop1Router": "chooses an expert",
    "ZayaRouter": "chooses an expert",
} | dict.fromkeys(
    (
        "DFineMultiscaleDeformableAttention",
        "DeformableDetrMultiscaleDeformableAttention",
        "Deimv2MultiscaleDeformableAttention",
        "GroundingDinoMultiscaleDeformableAttention",
        "LwDetrMultiscaleDeformableAttention",
        "MMGroundingDinoMultiscaleDeformableAttention",
        "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "OmDetTurboMultiscaleDeformableAttention",
        "OneFormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "PPDocLayoutV2MultiscaleDeformableAttention",
        "PPDocLayoutV3MultiscaleDeformableAttention",
        "PPDocLayoutV4MultiscaleDeformableAttention",
        "RTDetrMultiscaleDeformableAttention",
        "RTDetrV2MultiscaleDeformableAttention",
        "RfDetrMultiscaleDeformableAttention",
    ),
    _POINTS,
)
# Rows with a soft cap on the scores, which have no backward pass.
CAPPED = frozenset(f"{a.model_type}.attention.fused" for a in hosted.CAPPED)
# Those that the host can run on SDPA by itself, for who has loaded them in eager.
ON_REQUEST = "on request"


@dataclass(frozen=True)
class Row:
    """One replacement of attention, the type that it is for, and its group."""

    model_type: str
    replacement: Replacement
    group: str

    def __str__(self) -> str:
        return self.name.replace(".attention", "")

    @property
    def name(self) -> str:
        """The replacement's name."""
        return self.replacement.name

    @property
    def moves(self) -> bool:
        """Whether attention that was written out is on a kernel afterwards, and was not before."""
        return self.group != "GQA"

    @property
    def gives_weights(self) -> bool:
        """Whether there is an ``output_attentions=True`` that gives some: sdpa gives none."""
        # MaskFormer's backbone fails at it.
        silent = self.name in PARTS or self.model_type == "maskformer-swin"
        return not silent and not self.name.endswith(".grouped")

    @property
    def generates(self) -> bool:
        """Whether its tiny model writes text."""
        whole = WITHIN.get(self.model_type, self.model_type)
        return self.name not in PARTS and zoo.heads(whole)[0] in WRITING

    def build(self, *, steady: bool = False) -> nn.Module:
        """A tiny model with sites for it: eager where the row is for who asks for eager.

        ``steady``: nothing is dropped or masked at random in training.
        """
        if self.name in PARTS:
            return PARTS[self.name].build()
        attention = "eager" if self.name.endswith(".fused") else None
        model_type = WITHIN.get(self.model_type, self.model_type)
        config = changed(zoo.tiny(model_type), CHANGES.get(self.name, {}))
        if self.group == "GQA":
            shared(config)
        if steady:
            changed(zoo.quiet(config), STEADY)
        return build_from(config, zoo.heads(model_type)[0], attention, torch.float32, 0)

    def inputs(self, model: nn.Module, batch: int, padding: str) -> dict[str, Any]:
        """Arguments for it."""
        if self.name in PARTS:
            return PARTS[self.name].inputs(batch, padding)
        return zoo.inputs(model, batch=batch, padding=padding)

    @property
    def recipe(self) -> Recipe:
        """This row alone, so that nothing else blurs what it does."""
        return Recipe("row", ((self.replacement.name,),))


@functools.cache
def group_of(name: str) -> str:
    """The group of a replacement, by name."""
    for group, architectures in GROUPS.items():
        if any(name == r.name for a in architectures for r in a.replacements):
            return group
    return ON_REQUEST


def rows() -> list[Row]:
    """Every registered replacement of attention."""
    return [
        Row(a.model_type, r, group_of(r.name))
        for a in Registry.installed().architectures
        for r in a.replacements
        if ".attention." in r.name and not r.because
    ]


def refused() -> list[Replacement]:
    """Every registered refusal of a kind of attention."""
    return [r for r in Registry.installed().replacements if r.because]


def changed(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """The config with changes wherever a part of it knows them."""
    for key, value in changes.items():
        for part in parts_of(config):
            if hasattr(part, key) or (part is config and key not in STEADY):
                setattr(part, key, value)
    return config


def shared(config: PreTrainedConfig) -> None:
    """Two heads of keys for the queries of each part that has as many of both."""
    for part in parts_of(config):
        known = vars(part)
        if known.get("num_key_value_heads") == known.get("num_attention_heads"):
            part.num_key_value_heads = 2


def claimed(model: nn.Module) -> set[str]:
    """The classes that the plan of a transformed model took."""
    return {claim.before for claim in vars(model)[JOURNAL].plan.claims}


def pays_everywhere() -> dict[str, Any]:
    """A table of costs in which every row pays at every length: tests are about answers."""
    kinds = ("float32", "bfloat16", "native-bfloat16", "float16")
    names = [r.replacement.name for r in rows() if r.replacement.gated]
    part = {"where": "no machine", "ratios": {name: {"1": 2.0} for name in names}}
    return {f"{backend}/{kind}": part for backend in ("x86", "arm") for kind in kinds}


@contextmanager
def measured_everywhere() -> Iterator[None]:
    """Plans by that table."""
    table, stock = pays_everywhere(), costs._table
    costs._table = lambda: table
    try:
        yield
    finally:
        costs._table = stock


@dataclass
class Seen:
    """Attention in one call: on a fused kernel, or written out, and then by which modules."""

    fused: int = 0
    written: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, other: Seen) -> None:
        """Count those of another call as well."""
        self.fused += other.fused
        self.written.update(other.written)

    def owners(self, known: frozenset[str] = frozenset()) -> set[str]:
        """Classes that write scores out, without the ``known`` ones."""
        return {path[0] for path in self.written if not known & set(path)}


class Watch(TorchDispatchMode):
    """Counts fused kernels, and softmaxes over the last axis of three or more.

    The plain kernel behind ``scaled_dot_product_attention`` takes a softmax of its own name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        softmax = name in ("_softmax", "_safe_softmax") and _is_of_scores(*args[:2])
        if name.startswith("_scaled_dot_product") or (softmax and _in_a_tile()):
            self.seen.fused += 1
        elif softmax:
            self.seen.written[_callers()] += 1
        return func(*args, **(kwargs or {}))


def _is_of_scores(scores: Tensor, axis: int) -> bool:
    return scores.ndim >= 3 and axis in (-1, scores.ndim - 1)


def _in_a_tile() -> bool:
    """Whether it is a tile of a soft-capped attention, whose scores are never written whole."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"] != capped.__name__:
        frame = frame.f_back
    return frame is not None


def _callers() -> tuple[str, ...]:
    """The classes of the modules that are being called, the innermost first, torch's left out.

    Hooks would tell as well, and would change what runs: scores are written for who watches.
    """
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            name = type(owner).__qualname__
            if not found or found[-1] != name:
                found.append(name)
        frame = frame.f_back
    return tuple(found) or ("nothing",)


def answer(model: nn.Module, given: dict[str, Any], **options: Any) -> Any:
    """What the model says, from one random state: some draw queries or mask patches."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return model(**given, **options)


def watched(model: nn.Module, given: dict[str, Any], **options: Any) -> tuple[Any, Seen]:
    """The answer, and what ran."""
    with Watch() as watch:
        out = answer(model, given, **options)
    return out, watch.seen


def mask_of(given: dict[str, Any]) -> Tensor | None:
    """Which positions have a defined answer."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def apart(mine: Any, stock: Any, mask: Tensor | None = None) -> float:
    """The larger of two relative errors, in norm and at the worst place; inf for another kind."""
    ours, theirs = dict(tensors(mine)), dict(tensors(stock))
    if type(mine) is not type(stock) or ours.keys() != theirs.keys():
        return float("inf")
    return max((_apart(ours[key], theirs[key], mask) for key in theirs), default=0.0)


def error(mine: Any, expected: Any, stock: nn.Module, given: dict[str, Any]) -> float:
    """How far ``mine`` is; 0 if not farther than the stock model's own rounding takes it."""
    far = apart(mine, expected, mask_of(given))
    return 0.0 if CLOSE < far <= drift(stock, given) else far


def drift(stock: nn.Module, given: dict[str, Any]) -> float:
    """How far the stock model is from itself in float64: what it computes may cancel out."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    exact = answer(copy.deepcopy(stock).double(), wide)
    ours = answer(stock, given)
    pairs = zip(tensors(ours), tensors(exact), strict=True)
    return max(_apart(a.double(), b, mask_of(given)) for (_, a), (_, b) in pairs)


def _apart(mine: Tensor, stock: Tensor, mask: Tensor | None) -> float:
    if mine.shape != stock.shape or mine.dtype != stock.dtype:
        return float("inf")
    a, b = (defined(t, mask).detach().double() for t in (mine, stock))
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return float("inf")
    a, b = a[finite], b[finite]
    if torch.equal(a, b):
        return 0.0
    away = a - b
    return max(float(away.norm() / b.norm()), float(away.abs().max() / b.abs().max()))


def warm(row: Row, *, steady: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """The stock model after a call, and a ragged batch.

    Some models change at their first call: they keep features of words, or turn sparse attention
    off for good.
    """
    stock = row.build(steady=steady)
    given = row.inputs(stock, 3, "right")
    answer(stock, given)
    return stock, given


def transformed(
    stock: nn.Module, recipe: Any, backend: optimus.Backend, **options: Any
) -> nn.Module:
    """A transformed copy."""
    mine = copy.deepcopy(stock)
    return optimus.transform(mine, recipe, backend=backend, check=False, **options)
