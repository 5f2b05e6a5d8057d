"""The compiled kernels of ``optimus/native``, loaded at the first call.

They are plain C behind ctypes, so that one build serves every Python and torch. Their threads are
those of torch: the entry to a parallel region is looked up in the OpenMP runtime that torch itself
is linked to, and without one they run on one thread; a second pool would fight the first.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "native"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Others (nested, sharded, fake) have memory and products of their own.
PLAIN = (Tensor, torch.nn.Parameter)
# A mask's may also be bool.
MASKS = {**DTYPES, torch.bool: 3}
PORTABLE = 0


class Weight(ctypes.Structure):
    """``optimus_weight`` of ``native/quantized.h``. Holds addresses, and keeps nothing alive."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("minimum", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


class _Native:
    """The library: its functions with their signatures set, and what of it to use here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        entry = _parallel_entry()
        if entry is not None:
            library.optimus_set_parallel.argtypes = (ctypes.c_void_p,)
            library.optimus_set_parallel.restype = None
            library.optimus_set_parallel(entry)
        self.kernels: int = library.optimus_kernels()
        self.has_bf16 = bool(library.optimus_has_bf16())
        self.has_layer = bool(library.optimus_has_layer())
        self.quantized: Callable[..., int] = library.optimus_quantized_linear
        self.bf16: Callable[..., int] = library.optimus_bf16_linear
        pointer, wide, narrow = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.optimus_quantized_linear.argtypes = (
            *(pointer, pointer, wide, wide, narrow),
            *(pointer, narrow, pointer, narrow, narrow),
        )
        library.optimus_bf16_linear.argtypes = (
            *(pointer, wide, wide, pointer, wide, wide),
            *(pointer, narrow, pointer, narrow),
        )
        self.round: Callable[..., int] = library.optimus_round
        library.optimus_round.argtypes = (pointer, pointer, wide, wide, narrow, pointer, narrow)
        self.group: Callable[..., int] = library.optimus_quantized_group
        library.optimus_quantized_group.argtypes = (
            *(pointer, narrow, pointer, wide, wide, narrow),
            *(pointer, pointer, pointer, narrow, narrow),
        )
        if self.has_layer:
            self.norm, self.gate, self.attend = (
                getattr(library, f"optimus_{name}") for name in ("rms_norm", "gate", "attend")
            )
            self.norm.argtypes = (*(pointer,) * 3, *(wide,) * 3, ctypes.c_float, narrow, narrow)
            self.gate.argtypes = (pointer, pointer, wide, narrow, narrow)
            self.attend.argtypes = (pointer, narrow)
            self.decode: Callable[..., int] = library.optimus_decode
            self.decode.argtypes = (pointer, narrow, narrow)
            self.norm.restype = self.gate.restype = library.optimus_activate.restype = None
            self.attention: Callable[..., int] = library.optimus_attention_of
            self.attention.argtypes = (pointer, narrow)
            self.activate: Callable[..., None] = library.optimus_activate
            self.activate.argtypes = (pointer, pointer, wide, narrow, narrow, narrow)


@functools.cache
def _load() -> _Native | str:
    built = sorted(FOLDER.glob("_kernels*.so")) + sorted(FOLDER.glob("_kernels*.pyd"))
    if not built:
        return "not built: there was no C compiler when optimus was installed"
    try:
        return _Native(ctypes.CDLL(str(built[0])))
    except (OSError, AttributeError) as error:
        return f"not loaded: {error}"


def _parallel_entry() -> int | None:
    """Where ``GOMP_parallel`` is in torch's own runtime: libgomp, LLVM's or Intel's."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                # Already loaded: this only finds it, and what it depends on.
                entry = ctypes.CDLL(str(path)).GOMP_parallel
            except (OSError, AttributeError):
                return None
            return ctypes.cast(entry, ctypes.c_void_p).value
    return None


def available() -> str | None:
    """Why the compiled kernels cannot be used here; None where they can."""
    found = _load()
    return found if isinstance(found, str) else None


def steps() -> bool:
    """Whether ``ops.step`` can be used here: compiled, on a processor with AVX-512."""
    found = _load()
    return not isinstance(found, str) and found.has_layer


def unobserved() -> bool:
    """Whether nobody waits for the operators that a kernel stands for: no compiler, no tracer, no
    dispatch mode, no autocast."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.is_autocast_enabled("cpu")
    )


def library() -> Any:
    """The library's functions. ``available()`` must be None."""
    found = _load()
    assert not isinstance(found, str)
    return found


def multiplies_bf16() -> bool:
    """Whether ``linear_bf16`` can be used here: compiled, on a processor with AVX512-BF16."""
    found = _load()
    return not isinstance(found, str) and found.has_bf16


def weight(
    codes: Tensor, scale: Tensor, minimum: Tensor | None, shape: tuple[int, int], **how: int
) -> Any:
    """The reference to a packed weight that ``linear`` takes. The caller keeps the tensors."""
    return ctypes.byref(
        Weight(
            codes.data_ptr(),
            scale.data_ptr(),
            None if minimum is None else minimum.data_ptr(),
            *shape,
            **how,
        )
    )


def round_into(weight: Any, dense: Tensor, worth: Tensor) -> None:
    """Fill the zeros that ``weight`` refers to with codes and scales of ``dense [out, in]``.

    ``worth [in]`` fp32: how much the error of each input feature counts. ``available()`` must be
    None.
    """
    failed = library().round(
        weight,
        dense.data_ptr(),
        *dense.stride(),
        DTYPES[dense.dtype],
        worth.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for one group of a weight that is being rounded")


def linear(weight: Any, out_features: int, input: Tensor, bias: Tensor | None) -> Tensor:
    """``input [..., k] @ weightᵀ + bias`` in the input's dtype. ``available()`` must be None."""
    native = library()
    rows, stride = _rows(input)
    bias = _readable(bias, out_features)
    out = input.new_empty((*input.shape[:-1], out_features))
    failed = native.quantized(
        weight,
        rows.data_ptr(),
        rows.numel() // rows.shape[-1],
        stride,
        DTYPES[input.dtype],
        None if bias is None else bias.data_ptr(),
        0 if bias is None else DTYPES[bias.dtype],
        out.data_ptr(),
        torch.get_num_threads(),
        native.kernels,
    )
    if failed:
        raise MemoryError("no memory for the rounded activations of a quantized linear layer")
    return out


def linear_bf16(panels: Tensor, out_features: int, input: Tensor, bias: Tensor | None) -> Tensor:
    """``input [..., k] @ weightᵀ + bias`` in bf16, summed in fp32.

    ``panels`` is laid out as ``native/bf16.c`` says. ``multiplies_bf16()`` must be true.
    """
    native = library()
    rows, stride = _rows(input)
    bias = _readable(bias, out_features)
    out = input.new_empty((*input.shape[:-1], out_features))
    failed = native.bf16(
        panels.data_ptr(),
        out_features,
        rows.shape[-1],
        rows.data_ptr(),
        rows.numel() // rows.shape[-1],
        stride,
        None if bias is None else bias.data_ptr(),
        0 if bias is None else DTYPES[bias.dtype],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the sums of a linear layer in bf16")
    return out


def _rows(input: Tensor) -> tuple[Tensor, int]:
    """Rows at a constant distance, and that distance: a view where it can be, else a copy."""
    width = input.shape[-1]
    if input.is_contiguous():
        return input, width
    rows = input.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _readable(bias: Tensor | None, out_features: int) -> Tensor | None:
    """A bias as the kernels read it: one number an output, side by side, of a dtype they know."""
    if bias is None:
        return None
    if bias.shape != (out_features,):
        bias = bias.expand(out_features)
    known = bias.dtype in DTYPES and bias.is_contiguous()
    return bias if known else bias.contiguous().float()
