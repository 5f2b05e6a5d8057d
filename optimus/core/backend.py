"""Which hardware a model sits on, and what that hardware can do.

Everything that a plan decides by hardware is asked here, once, and written into the plan as data.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import itertools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optimus.core.errors import BackendUnavailableError
from optimus.ops.varlen import packed_kernel

BACKENDS = ("x86", "arm", "cuda", "hpu", "xla")
CPUS = frozenset({"x86", "arm"})
ALIASES = {"tpu": "xla"}
# Device types that record calls, and compute when they are looked at.
LAZY = frozenset({"xla"})


class Mode(enum.Enum):
    """What the transformed model is for: to be run as it is, or to be handed to a compiler or an
    exporter.
    """

    INFERENCE = "inference"
    TRAINING = "training"
    COMPILE = "compile"
    EXPORT = "export"

    @classmethod
    def parse(cls, name: str | Mode) -> Mode:
        """The mode of that name; ``ValueError`` lists those there are."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(repr(m.value) for m in cls)
            raise ValueError(f"unknown mode {name!r}; known are {known}") from None


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of hardware: its name, torch's device type, its vendor and what it can do.

    ``features``: ``"packed-linear"``, ``"packed-linear-bf16"`` (oneDNN products), ``"native-bf16"``
    (bf16 arithmetic in hardware; emulated bf16 is many times slower than fp32), ``"int8-products"``
    (sums of four products of bytes in one instruction, which the rounded layers are built on). Of
    CUDA: ``"int8-weights"``, ``"int4-tiles"``, ``"fp8-rows"`` (which weights have products) and
    ``"packed-attention"`` (attention over sequences that lie end to end).
    """

    name: str
    device: str
    vendor: str = ""
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Context:
    """What a plan is made for.

    ``dtype`` is the one that the model will compute in; ``decodes`` says that it generates, and so
    spends its life on products of one row.
    """

    backend: Backend
    mode: Mode
    dtype: torch.dtype
    decodes: bool = False


def _cpuinfo(name: str) -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next((s.split(":")[1].strip() for s in lines if s.startswith(name)), "")
    except OSError:
        return ""


def processor() -> str:
    """The processor's own name, or the machine type where it tells none."""
    return _cpuinfo("model name") or platform.machine()


def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_native_bf16(name: str) -> bool:
    if name == "arm":
        return _has_onednn(torch.bfloat16)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def host() -> Backend:
    """The CPU of this machine."""
    name = "arm" if platform.machine().lower() in ("aarch64", "arm64") else "x86"
    features = {
        "packed-linear": _has_onednn(torch.float32),
        "packed-linear-bf16": _has_onednn(torch.bfloat16),
        "native-bf16": _has_native_bf16(name),
        "int8-products": name == "x86" and bool(torch.cpu._is_vnni_supported()),
    }
    return Backend(
        name, "cpu", _cpuinfo("vendor_id"), frozenset(f for f, has in features.items() if has)
    )


def detect(model: nn.Module) -> Backend:
    """The backend of the device that the model's first tensor is on; the host's for meta."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = "cpu" if tensor is None else tensor.device.type
    if tensor is not None and device == "cuda":
        return _cuda(tensor.device)
    if device == "xla":
        return Backend("xla", device, features=frozenset({"int8-weights"}))
    return host() if device in ("cpu", "meta") else Backend(ALIASES.get(device, device), device)


@functools.cache
def _cuda(device: torch.device) -> Backend:
    found = cuda_features(torch.cuda.get_device_capability(device), hip=torch.version.hip)
    return Backend("cuda", "cuda", torch.cuda.get_device_name(device), found)


def cuda_features(capability: tuple[int, int], *, hip: str | None = None) -> frozenset[str]:
    """What a GPU of that compute capability can do with this torch.

    ``"int4-tiles"``: m16n8k16 products of bf16, from 8.0. ``"fp8-rows"``: e4m3 products with a
    scale a row, from 8.9. AMD's layouts are others, and nothing of theirs is known here.
    """
    features = {
        "int8-weights": True,
        "int4-tiles": capability >= (8, 0) and hip is None,
        "fp8-rows": capability >= (8, 9) and hip is None,
        "packed-attention": capability >= (8, 0) and packed_kernel() is not None,
    }
    return frozenset(name for name, has in features.items() if has)


def is_available(name: str) -> bool:
    """Whether this machine has the backend's device."""
    if name in CPUS:
        return host().name == name
    if name == "xla":
        return importlib.util.find_spec("torch_xla") is not None
    module = getattr(torch, name, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def launch(device: torch.device) -> None:
    """Have a lazy device compute all that was asked of it so far, as one graph.

    XLA records calls, and compiles what is recorded whenever somebody looks at a number: looked
    at one by one, the outputs of one forward are as many graphs. On others nothing is waiting.
    """
    if device.type in LAZY:
        importlib.import_module("torch_xla").sync()


def resolve(backend: str | Backend | None, model: nn.Module) -> Backend:
    """The backend asked for, or the model's own.

    Raises ``ValueError`` for an unknown name and ``BackendUnavailableError`` where the machine
    lacks it or the model sits on another one.
    """
    found = detect(model)
    if backend is None or isinstance(backend, Backend):
        return backend or found
    name = ALIASES.get(backend, backend)
    name = host().name if name == "cpu" else name
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known are cpu, {', '.join(BACKENDS)}, tpu")
    if name == found.name:
        return found
    if not is_available(name):
        raise BackendUnavailableError(
            f"backend {backend!r} is not on this machine, which has {host().name}."
        )
    raise BackendUnavailableError(
        f"the model is on {found.name}, not on {backend!r}. Move it there first (model.to(...))."
    )
