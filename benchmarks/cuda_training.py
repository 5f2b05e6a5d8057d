"""Inference, training and peak memory of written-out attention on a GPU, in bf16: stock and fused.

Two layers of 16 heads of 64, batch 4; the training step is that of ``training``, and inference the
same forward without gradients. Each side in a process of its own.

    python benchmarks/cuda_training.py [--lengths 512,2048] [--families gptj,bloom]
    python benchmarks/cuda_training.py --device cpu --tiny
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu, training

FAMILIES = ("gpt_neo", "gptj", "codegen", "bloom", "mpt", "deberta-v2")
STEPS = 10


def measure(given: Any) -> dict[str, float]:
    """Seconds and peak bytes of a step and of a forward."""
    import torch

    sys.path.insert(0, str(gpu.ROOT / "tests"))
    import zoo

    config = zoo.quiet(zoo.tiny(given.family))
    head, dtype = zoo.heads(given.family)[0], torch.bfloat16
    model = zoo.build_from(config, head, None, dtype, 0).to(given.device)
    inputs = zoo.inputs(model, batch=4, padding="none")
    inputs = {name: one.to(given.device) for name, one in inputs.items()}
    if given.side == "fused":
        training.transform(model, given.family)
    found: dict[str, float] = {}
    teacher = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for name, call in (
        ("training", lambda: training.run(model, inputs, teacher)),
        ("inference", lambda: infer(model, inputs)),
    ):
        call()
        result: dict[str, float] = {}
        with training.peak(result, given.device):
            times = [gpu.seconds(call, given.device) for _ in range(1 if given.tiny else STEPS)]
        found |= {f"{name}_s": min(times), f"{name}_peak": result["peak"]}
    return found


def infer(model: Any, inputs: dict[str, Any]) -> None:
    """One forward."""
    import torch

    model.eval()
    with torch.inference_mode():
        model(**inputs)


def side(given: Any, family: str, length: int, name: str) -> dict[str, float]:
    """What the process of one side says."""
    width, heads = ("64", "4") if given.tiny else ("1024", "16")
    sizes = {"ZOO_LENGTH": str(length), "ZOO_WIDTH": width, "ZOO_HEADS": heads}
    command = [sys.executable, __file__, "--device", given.device, "--family", family]
    command += ["--side", name, *["--tiny"] * given.tiny]
    environment = {**os.environ, **sizes, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """A line a family, length and use."""
    parser = gpu.options(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="with commas")
    parser.add_argument("--lengths", default="512,2048", help="with commas")
    parser.add_argument("--side", help="stock or fused, for a process of one side")
    parser.add_argument("--family", help="of that side")
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given)))
        return 0
    rows = []
    for length in (32,) if given.tiny else map(int, given.lengths.split(",")):
        for family in given.families.split(","):
            stock, fused = (side(given, family, length, name) for name in ("stock", "fused"))
            rows.append({"family": family, "length": length, "stock": stock, "fused": fused})
            for use in ("inference", "training"):
                ratio = stock[f"{use}_s"] / fused[f"{use}_s"]
                peaks = [one[f"{use}_peak"] / training.MIB for one in (stock, fused)]
                print(
                    f"{family:11} {length:5} {use:9} {1000 * stock[f'{use}_s']:9.2f} ms"
                    f" {1000 * fused[f'{use}_s']:9.2f} ms {ratio:6.2f}x"
                    f"  peak {peaks[0]:8.0f} MiB {peaks[1]:8.0f} MiB",
                    flush=True,
                )
    gpu.record("cuda_training", given.device, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
