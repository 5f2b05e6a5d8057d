"""What every recipe costs in accuracy, on the language model that the tests train.

Perplexity on the held-out texts, and the mean divergence of the predicted distributions from the
unquantized model's, which tells two roundings apart where their perplexities differ by luck. Then
4 bits with searched scales against rounding to nearest, the same layers in both.

    python benchmarks/accuracy.py
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

from torch import Tensor, nn

import optimus
from optimus.core.errors import OptimusError
from optimus.measure.answers import divergence
from optimus.ops.quantized import QuantizedWeight, Scheme

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import language_model
import quality

GROUPS = (32, 64, 128)


class Judge:
    """Prints a line a model: its perplexity, the change, and its divergence."""

    def __init__(self) -> None:
        self.model, self.ids = quality.trained()
        self.perplexity = quality.surprise(self.model, self.ids)
        self.logits = quality.logits(self.model, self.ids)

    def line(self, name: str, model: nn.Module) -> float:
        """Print, and return the divergence."""
        found = quality.surprise(model, self.ids)
        far = divergence(quality.logits(model, self.ids), self.logits)
        change = found / self.perplexity - 1
        print(f"{name:<24} {found:10.3f} {change:+10.3%} {far:12.2e}", flush=True)
        return far

    def recipe(self, name: str) -> None:
        """The line of a recipe, or why there is none."""
        try:
            mine = optimus.transform(copy.deepcopy(self.model), name)
        except OptimusError as error:
            print(f"{name:<24} refused: {error}")
        else:
            self.line(name, mine)

    def search(self, group: int) -> None:
        """Searched scales against the nearest codes, in groups of ``group``."""
        nearest = quality.rounded(self.model, partial(quality.to_nearest, group=group))
        searched = quality.rounded(self.model, partial(_searched, group=group))
        least = self.line(f"int4 g{group}, to nearest", nearest)
        ours = self.line(f"int4 g{group}, searched", searched)
        print(f"{'':<24} searched scales diverge {1 - ours / least:.0%} less")


def _searched(weight: Tensor, group: int) -> Tensor:
    return QuantizedWeight(weight, Scheme(4, group)).dense()


def main() -> int:
    """Print both tables."""
    judge = Judge()
    print(f"{'':<24} {'perplexity':>10} {'change':>10} {'divergence':>12}")
    print(f"{'frequencies alone':<24} {language_model.unigram_perplexity():10.3f}")
    print(f"{'unquantized':<24} {judge.perplexity:10.3f}")
    for name in optimus.RECIPES:
        judge.recipe(name)
    for group in GROUPS:
        judge.search(group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
