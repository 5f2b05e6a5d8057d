"""The ragged BERT of ``bert`` at 8 bits: optimus's int8-dynamic beside OpenVINO's by NNCF.

BERT-base width, 6 layers, 16 real docstrings of up to 128 tokens. Needs the extra:
``pip install 'optimus[bench,peers]'``. NNCF calibrates on the batches that are timed, which
favours it.

    python benchmarks/encoder.py [--sides GLOBS] [--runs 9]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks import bert, peers
from optimus.measure import report
from optimus.measure.alternate import compare
from optimus.measure.side import STOCK, Runner, Task
from optimus.measure.text import Batch

PAIRS = (
    ("auto", "OpenVINO fp32", 1.25),
    ("bf16", "OpenVINO bf16", 1.25),
    ("int8-dynamic", "OpenVINO int8", 1.18),
)


def openvino_int8_side(task: Task, batches: list[Batch]) -> Runner:
    """OpenVINO on the CPU, its weights and activations rounded by NNCF's transformer preset."""
    import nncf
    import openvino as ov

    examples = [peers.example_of(batch) for batch in batches]
    converted = ov.convert_model(peers.Encoder(task).eval(), example_input=examples[0])
    calibration = [{name: value.numpy() for name, value in one.items()} for one in examples]
    rounded = nncf.quantize(
        converted,
        nncf.Dataset(calibration),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(calibration),
    )
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(rounded, "CPU", options)

    def forward(batch: Batch) -> Tensor:
        inputs = {name: value.numpy() for name, value in peers.example_of(batch).items()}
        return torch.from_numpy(np.array(compiled(inputs)[0]))

    return Runner(forward)


def tasks(model: str) -> dict[str, Task]:
    """Those of ``bert``, and the ones of 8 bits."""
    wanted = bert.tasks(model)
    stock = wanted[STOCK]
    int8 = dataclasses.replace(stock, side="benchmarks.encoder:openvino_int8_side")
    wanted["int8-dynamic"] = dataclasses.replace(stock, recipe="int8-dynamic")
    return {**wanted, "OpenVINO int8": int8}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sides", default="*", help="names of sides, as globs with commas")
    parser.add_argument("--runs", type=int, default=9)
    given = parser.parse_args()
    globs = given.sides.split(",")
    with tempfile.TemporaryDirectory() as folder:
        every = tasks(bert.make_model(Path(folder)))
        chosen = {
            name: task
            for name, task in every.items()
            if name == STOCK or any(fnmatchcase(name, glob) for glob in globs)
        }
        comparison = compare(chosen, runs=given.runs)
    Console().print(report.table(comparison))
    print(report.conditions(comparison))
    bert.print_ratios(comparison, PAIRS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
