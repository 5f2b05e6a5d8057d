"""What the transform itself costs: time against ``copy.deepcopy``, and peak extra memory.

A bf16 llama of 1.1 B parameters with random weights. The memory is the process's resident set,
sampled by a thread every 2 ms; the yardstick is twice the largest layer.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import optimus
from optimus.measure.machine import resident_bytes

MIB = 1 << 20


def make_model() -> nn.Module:
    """The llama shape of TinyLlama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def largest_layer(model: nn.Module) -> int:
    """Bytes of the largest decoder layer, embedding or head."""
    layers = [*model.model.layers, model.model.embed_tokens, model.lm_head]
    return max(sum(p.numel() * p.element_size() for p in one.parameters()) for one in layers)


@contextmanager
def peak(result: dict[str, int]) -> Iterator[None]:
    """The largest resident set in the block, above that at its start, as ``result["peak"]``."""
    gc.collect()
    before, done = resident_bytes(), threading.Event()
    result["peak"] = 0

    def watch() -> None:
        while not done.wait(0.002):
            result["peak"] = max(result["peak"], resident_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def timed(name: str, work: Callable[[], object], yardstick: float | None = None) -> float:
    """Run once, print seconds, ratio and peak; the seconds."""
    result: dict[str, int] = {}
    with peak(result):
        start = time.perf_counter()
        kept = work()
        seconds = time.perf_counter() - start
    del kept
    ratio = "" if yardstick is None else f"{seconds / yardstick:6.2f}x deepcopy"
    print(f"{name:<34} {seconds:7.2f} s {ratio:>18} {result['peak'] / MIB:9.0f} MiB peak extra")
    return seconds


def main() -> int:
    """Three rounds in turn; the first also pages everything in."""
    model = make_model()
    print(f"twice the largest layer: {2 * largest_layer(model) / MIB:.0f} MiB")
    for number in range(3):
        print(f"round {number + 1}")
        copied = timed("copy.deepcopy(model)", lambda: copy.deepcopy(model))
        timed("transform", lambda: optimus.transform(model), copied)
        timed("reverse", lambda: optimus.reverse(model), copied)
        timed("transform, check=False", lambda: optimus.transform(model, check=False), copied)
        timed("reverse", lambda: optimus.reverse(model), copied)
    return 0


if __name__ == "__main__":
    sys.exit(main())
