"""A checkpoint of 4 GB in 8 shards: memory, speed against copying, and 20 kills.

``python benchmarks/convert.py [--folder F] [--gigabytes N] [--kills K] [--recipe R]``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from optimus.export.folder import digest_of
from optimus.export.layout import Shape, make_header, read_header

# The kernel's own mark: ``ru_maxrss`` of a child begins with the memory of its parent.
CALL = """
import sys
from pathlib import Path
from optimus.cli import main
code = main(sys.argv[1:])
marks = Path("/proc/self/status").read_text().splitlines()
print("PEAK", next(line.split()[1] for line in marks if line.startswith("VmHWM")))
sys.exit(code)
"""
HIDDEN, INNER, VOCABULARY, SHARDS = 2048, 5504, 32000, 8


def config(layers: int) -> dict[str, object]:
    """A llama of that many layers."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    made = LlamaConfig(**sizes, **heads, num_hidden_layers=layers, dtype="float32")
    made.architectures = ["LlamaForCausalLM"]
    found: dict[str, object] = made.to_dict()
    return found


def source(folder: Path, gigabytes: float) -> None:
    """Random weights, written a tensor at a time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    a_layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    layers = max(1, round((gigabytes * 1e9 - 8 * HIDDEN * VOCABULARY) / a_layer))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    with torch.device("meta"):
        state = LlamaForCausalLM(LlamaConfig(**config(layers))).state_dict()
    shapes = [Shape(name, torch.float32, tuple(one.shape)) for name, one in state.items()]
    total, places, parts = sum(s.nbytes for s in shapes), {}, [[] for _ in range(SHARDS)]
    filled = 0
    for one in shapes:
        parts[min(SHARDS - 1, filled * SHARDS // total)].append(one)
        filled += one.nbytes
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        places.update(dict.fromkeys((one.name for one in part), name))
        write(folder / name, part)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(file: Path, shapes: list[Shape]) -> None:
    """One shard of random numbers."""
    header, places = make_header(shapes)
    generator = np.random.default_rng(len(file.name) + len(shapes))
    with file.open("wb") as out:
        out.write(header)
        for one in shapes:
            out.seek(places[one.name])
            numbers = generator.standard_normal(one.nbytes // 4, dtype=np.float32)
            out.write(memoryview(numbers * np.float32(0.02)))
        os.fsync(out.fileno())


def command(model: Path, out: Path, recipe: str) -> list[str]:
    """The command of a user."""
    return [sys.executable, "-c", CALL, "convert", str(model), str(out), "--recipe", recipe]


def copied(model: Path, out: Path) -> float:
    """Seconds of copying the files, with what convert does at the end of each: to the disk."""
    start = time.perf_counter()
    out.mkdir()
    for file in sorted(model.iterdir()):
        shutil.copyfile(file, out / file.name)
        with (out / file.name).open("rb") as data:
            os.fsync(data.fileno())
    return time.perf_counter() - start


def converted(model: Path, out: Path, recipe: str) -> tuple[float, float]:
    """Seconds of the whole command, and its peak of resident memory in GB."""
    start = time.perf_counter()
    done = subprocess.run(
        command(model, out, recipe), stdout=subprocess.PIPE, text=True, check=True
    )
    seconds = time.perf_counter() - start
    return seconds, int(done.stdout.split("PEAK")[1]) * 1024 / 1e9


def killed(model: Path, out: Path, recipe: str, lasts: float, moment: random.Random) -> bool:
    """Whether it was killed before it was done."""
    process = subprocess.Popen(
        command(model, out, recipe), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(moment.uniform(0, lasts))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if not out.exists():
        return True
    shutil.rmtree(out)
    return False


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same bytes."""
    names = sorted(p.name for p in one.iterdir())
    if names != sorted(p.name for p in other.iterdir()):
        return False
    weights = [name for name in names if name.endswith(".safetensors")]
    held = [
        [(k, digest_of(v)) for name in weights for k, v in read_header(folder / name).items()]
        for folder in (one, other)
    ]
    rest = [name for name in names if name not in weights]
    return held[0] == held[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in rest
    )


def main() -> None:
    """Make, copy, convert, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", default="int8")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=options.folder))
    try:
        measure(folder, options)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """All figures, printed as they come."""
    model = folder / "model"
    source(model, options.gigabytes)
    total = sum(p.stat().st_size for p in model.iterdir()) / 1e9
    copy = min(copied(model, folder / f"copy{n}") for n in (0, 1))
    shutil.rmtree(folder / "copy0")
    shutil.rmtree(folder / "copy1")
    for recipe in dict.fromkeys(("auto", "bf16", "int4", options.recipe)):
        shutil.rmtree(folder / "whole", ignore_errors=True)
        seconds, peak = converted(model, folder / "whole", recipe)
        print(f"{total:.2f} GB, {recipe}: {seconds:.1f} s, copying {copy:.1f} s,", end=" ")
        print(f"{copy / seconds:.2f} x its throughput, peak {peak:.2f} GB resident", flush=True)
    moment = random.Random(0)  # noqa: S311  the moments need not be secret
    counts = [
        killed(model, folder / "out", options.recipe, seconds, moment) for _ in range(options.kills)
    ]
    converted(model, folder / "out", options.recipe)
    verdict = "bitwise the same" if same(folder / "whole", folder / "out") else "DIFFERENT"
    print(f"{sum(counts)} of {options.kills} runs killed midway; then resumed: {verdict}")


if __name__ == "__main__":
    main()
