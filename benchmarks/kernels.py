"""The linear kernels against torch's own: rates, and the error beside each.

``python benchmarks/kernels.py [rows ...]``. Every kernel of a line is timed in turn, several rounds
in one process, and the fastest round is printed: GB/s of weights up to 8 rows, GFLOP/s above, and
‖out − ref‖ / ‖ref‖ against fp32. Each kernel has enough copies of its weight that none waits in a
cache between two calls, as in a model.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from optimus.ops import native
from optimus.ops.linear import Blocked, PackedWeight, Panels
from optimus.ops.quantized import INT4, INT8, INT8_DYNAMIC, QuantizedWeight, Scheme

SHAPES = ((2048, 2048), (2048, 11264), (5632, 2048))
ROWS = (1, 4, 16, 64, 256, 1024)
# Weights in rotation, bytes: more than the third-level cache.
ROTATION = 48 << 20
ROUNDS = 5
FEW = 8

Product = Callable[[Tensor], Tensor]


class Kernel(NamedTuple):
    """One way to multiply by one weight, the bytes that it reads of it, and what it multiplies."""

    product: Product
    nbytes: int
    dtype: torch.dtype = torch.float32


def ours(scheme: Scheme) -> Callable[[Tensor], Kernel]:
    """The kernel of this project for ``scheme``."""

    def make(weight: Tensor) -> Kernel:
        quantized = QuantizedWeight(weight, scheme)
        return Kernel(lambda x: quantized.matmul(x, None), quantized.nbytes)

    return make


def fp32(weight: Tensor) -> Kernel:
    """``torch.nn.functional.linear``."""
    own = weight.clone()
    return Kernel(lambda x: linear(x, own), own.nbytes)


def fp32_packed(weight: Tensor) -> Kernel:
    """oneDNN's blocked layout."""
    packed = PackedWeight(weight)
    return Kernel(lambda x: packed.matmul(x, None), weight.nbytes)


def bf16(layout: type[Blocked | Panels]) -> Callable[[Tensor], Kernel]:
    """bf16 in one of the layouts."""

    def make(weight: Tensor) -> Kernel:
        packed = layout(weight.bfloat16())
        return Kernel(lambda x: packed.matmul(x, None), weight.nbytes // 2, torch.bfloat16)

    return make


def bf16_stock(weight: Tensor) -> Kernel:
    """``torch.nn.functional.linear`` in bf16."""
    own = weight.bfloat16()
    return Kernel(lambda x: linear(x, own), own.nbytes, own.dtype)


def torch_int8(weight: Tensor) -> Kernel:
    """Weight-only, one scale a channel."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    half = scale.bfloat16()

    def product(x: Tensor) -> Tensor:
        # In bf16, the only dtype that it has fast code for.
        return torch._weight_int8pack_mm(x.bfloat16(), codes, half).float()

    return Kernel(product, codes.nbytes)


def torch_int4(weight: Tensor) -> Kernel:
    """Weight-only, groups of 32 with a zero point."""
    rows, width = weight.shape
    groups = weight.view(rows, -1, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().view(rows, width)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    line = torch.stack((scale, low + scale * 8), -1).transpose(0, 1).contiguous().bfloat16()

    def product(x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, 32, line).float()

    return Kernel(product, packed.nbytes + line.nbytes)


def onednn_int8(weight: Tensor) -> Kernel:
    """``onednn.qlinear_pointwise``; one scale for all the input, found by eager operators."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)

    def product(x: Tensor) -> Tensor:
        low, high = x.aminmax()
        step = torch.maximum(high, -low).item() / 127
        rounded = (x / step).round_().add_(128).clamp_(0, 255).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            *(rounded, step, 128, packed, scale, zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )

    return Kernel(product, codes.nbytes)


KERNELS: dict[str, Callable[[Tensor], Kernel]] = {
    "fp32": fp32,
    "fp32 packed": fp32_packed,
    "bf16 stock": bf16_stock,
    "bf16 packed oneDNN": bf16(Blocked),
    **({"bf16": bf16(Panels)} if native.multiplies_bf16() else {}),
    "int8": ours(INT8),
    "int8-dynamic": ours(INT8_DYNAMIC),
    "torch int8pack": torch_int8,
    "onednn qlinear": onednn_int8,
    "int4": ours(INT4),
    "int4 asymmetric": ours(Scheme(4, 32, symmetric=False)),
    "int4 128": ours(Scheme(4, 128)),
    "torch int4pack": torch_int4,
}


def read_rate() -> float:
    """GB/s of a plain sum over 256 MB: what one pass over weights could reach."""
    numbers = torch.ones(32 << 20, dtype=torch.int64)
    return numbers.nbytes / min(seconds(numbers.sum, 1) for _ in range(ROUNDS)) / 1e9


def seconds(call: Callable[[], object], times: int) -> float:
    """Of one call, over ``times``."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


class Ring(NamedTuple):
    """Copies of one kernel in turn, and the first of them."""

    products: Iterator[Product]
    kernel: Kernel


def rotated(make: Callable[[Tensor], Kernel], weight: Tensor) -> Ring:
    """As many copies as no cache can hold."""
    first = make(weight)
    copies = [make(weight) for _ in range(ROTATION // first.nbytes)]
    return Ring(itertools.cycle([kernel.product for kernel in (first, *copies)]), first)


def line(name: str, rows: int, best: float, error: float, flops: float, nbytes: int) -> str:
    """One row of the table."""
    rate = f"{nbytes / best / 1e9:6.1f} GB/s" if rows <= FEW else f"{flops / best / 1e9:6.0f} GF/s"
    return f"  {name:<18} {best * 1e6:9.1f} us {rate}   error {error:.1e}"


def compare(width: int, out: int, rows: int, rings: dict[str, Ring], weight: Tensor) -> None:
    """Time every kernel in turn and print its line."""
    x = torch.randn(rows, width)
    exact = linear(x, weight)
    inputs = {dtype: x.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    flops = 2.0 * rows * width * out
    times = max(1, int(5e8 // flops))
    best = dict.fromkeys(rings, float("inf"))
    for _ in range(ROUNDS):
        for name, (ring, kernel) in rings.items():
            own = inputs[kernel.dtype]
            taken = seconds(lambda ring=ring, own=own: next(ring)(own), times)
            best[name] = min(best[name], taken)
    print(f"{width} -> {out}, {rows} rows")
    for name, (ring, kernel) in rings.items():
        error = ((next(ring)(inputs[kernel.dtype]) - exact).norm() / exact.norm()).item()
        print(line(name, rows, best[name], error, flops, kernel.nbytes), flush=True)


def main(rows: list[int]) -> None:
    """Every shape with every number of rows."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"kernels: {native.available() or 'compiled'}, read {read_rate():.1f} GB/s")  # fmt: skip
    for width, out in SHAPES:
        weight = torch.randn(out, width) * 0.02
        rings = {name: rotated(make, weight) for name, make in KERNELS.items()}
        for count in rows:
            compare(width, out, count, rings, weight)


if __name__ == "__main__":
    with torch.inference_mode():
        main([int(argument) for argument in sys.argv[1:]] or list(ROWS))
