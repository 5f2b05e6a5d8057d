"""Peak memory and time of a training step: stock attention against fused, a process each.

Families that transformers trains with attention written by hand, two layers of 8 heads of 64,
batch 4, 1024 tokens, fp32, no dropout, one step of SGD after one to warm up. Peak: the largest
resident set in the step above that before it (on CUDA, the allocator's own peak).

    python benchmarks/training.py [--device cuda --dtype bfloat16] [--length 2048]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAMILIES = ("gpt_neo", "gptj", "codegen", "bloom", "mpt", "deberta-v2", "rembert", "xglm")
BATCH, STEPS = 4, 3
MIB = 1 << 20


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=("stock", "fused"), help=argparse.SUPPRESS)
    parser.add_argument("--family", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """A line a family."""
    given = options()
    if given.side:
        print(json.dumps(step(given)))
        return
    print("family        stock MiB  fused MiB   less  stock s  fused s  faster")
    for family in FAMILIES:
        stock, fused = (side(given, name, family) for name in ("stock", "fused"))
        less = 1 - fused["peak"] / stock["peak"]
        print(
            f"{family:12} {stock['peak'] / MIB:10.0f} {fused['peak'] / MIB:10.0f} {less:6.0%}"
            f" {stock['seconds']:8.2f} {fused['seconds']:8.2f}"
            f" {stock['seconds'] / fused['seconds']:6.2f}x"
            f"  loss {stock['loss']:.6f} {fused['loss']:.6f}",
            flush=True,
        )


def side(given: argparse.Namespace, name: str, family: str) -> dict[str, float]:
    """One process, one side."""
    sizes = {"ZOO_LENGTH": str(given.length), "ZOO_WIDTH": "512", "ZOO_HEADS": "8"}
    command = [sys.executable, __file__, "--side", name, "--family", family]
    for key in ("length", "dtype", "device", "threads"):
        command += [f"--{key}", str(getattr(given, key))]
    environment = {**os.environ, **sizes, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def step(given: argparse.Namespace) -> dict[str, float]:
    """Peak bytes, seconds and loss of a step."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    import zoo

    torch.set_num_threads(given.threads)
    config = zoo.quiet(zoo.tiny(given.family))
    model = zoo.build_from(config, zoo.heads(given.family)[0], None, getattr(torch, given.dtype), 0)
    model.to(given.device)
    inputs = zoo.inputs(model, batch=BATCH, padding="none")
    inputs = {k: v.to(given.device) for k, v in inputs.items()}
    if given.side == "fused":
        transform(model, given.family)
    model.train()
    teacher = torch.optim.SGD(model.parameters(), lr=1e-3)
    run(model, inputs, teacher)
    begin, result = time.perf_counter(), {}
    with peak(result, given.device):
        for _ in range(STEPS):
            loss = run(model, inputs, teacher)
    result["seconds"] = (time.perf_counter() - begin) / STEPS
    return {**result, "loss": loss}


def transform(model: Any, family: str) -> None:
    """Fused attention alone, whether or not it is known to pay."""
    import optimus
    from optimus.core.registry import Registry
    from optimus.core.replacement import Architecture

    rule = Registry.installed()[f"{family}.attention.scores"]
    free = dataclasses.replace(rule, gated=False)
    only = Registry([Architecture(model_type=family, replacements=(free,))])
    recipe = optimus.Recipe("fused", ((rule.name,),))
    optimus.transform(model, recipe, mode="training", check=False, registry=only)


def run(model: Any, inputs: dict[str, Any], teacher: Any) -> float:
    """One step; the loss is the mean square of the first output."""
    teacher.zero_grad()
    loss = model(**inputs)[0].float().square().mean()
    loss.backward()
    teacher.step()
    return float(loss)


class peak:  # noqa: N801  reads as the statement that it is
    """The most memory in use inside the block above that at its start, as ``result["peak"]``."""

    def __init__(self, result: dict[str, float], device: str) -> None:
        self.result, self.device = result, device

    def __enter__(self) -> None:
        import torch

        from optimus.measure.machine import resident_bytes

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.device == "cuda" else resident_bytes()
        self.most, self.done = self.before, threading.Event()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def watch(self) -> None:
        """Sample the resident set."""
        from optimus.measure.machine import resident_bytes

        while self.device == "cpu" and not self.done.wait(0.002):
            self.most = max(self.most, resident_bytes())

    def __exit__(self, *_: object) -> None:
        import torch

        self.done.set()
        self.watcher.join()
        if self.device == "cuda":
            self.most = torch.cuda.max_memory_allocated()
        self.result["peak"] = self.most - self.before


if __name__ == "__main__":
    main()
