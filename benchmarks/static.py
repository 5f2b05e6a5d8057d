"""Decoding in static shapes, compiled, beside operator by operator: a llama of 100 M parameters.

Random weights, batch 1, greedy, each side alone in its process and in turn. A time is seconds a
token after the first, the least and the median of the runs; warm-up is what compiling took. The
tokens of every side are compared with those of stock.

    python benchmarks/static.py [--sides GLOBS] [--dtype float32] [--threads 2] [--new 64] [--tiny]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.llama import prompt  # noqa: E402
from benchmarks.rounds import Side, alternate, figures  # noqa: E402

FACTORY = "benchmarks.static:Runner"
STAGES: dict[str, list[list[str]]] = {
    "stock": [],
    "auto": [["*"]],
    "static.inductor": [["static.inductor"]],
    "static.inductor, auto": [["static.inductor"], ["*"]],
}
FULL = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
TINY = {**FULL, "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64}
TINY = {**TINY, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 256}


class Runner:
    """One side: the seeded model, by the stages of a recipe."""

    def __init__(self, stages: list[list[str]], dtype: str, tiny: bool, room: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        import optimus
        from optimus.generation import Buckets, warm_up

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.manual_seed(0)
        config = LlamaConfig(**(TINY if tiny else FULL), eos_token_id=None, pad_token_id=0)
        self.torch, self.warm = torch, 0.0
        self.model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        if stages:
            recipe = optimus.Recipe("side", tuple(tuple(stage) for stage in stages))
            optimus.transform(self.model, recipe, check=False)
        if any(name.startswith("static.") for stage in stages for name in stage):
            start = time.perf_counter()
            warm_up(self.model, Buckets(lengths=(room // 2,), room=room))
            self.warm = time.perf_counter() - start

    def decode(self, tokens: int, new: int) -> float:
        """Seconds a token, of ``new`` greedy ones after the first."""
        first, last = (self._seconds(tokens, count) for count in (1, new + 1))
        return (last - first) / new

    def _seconds(self, tokens: int, new: int) -> float:
        start = time.perf_counter()
        self._generate(tokens, new)
        return time.perf_counter() - start

    def _generate(self, tokens: int, new: int) -> Any:
        ids = self.torch.tensor([prompt(tokens)]) % self.model.config.vocab_size
        return self.model.generate(ids, max_new_tokens=new, do_sample=False)

    def logits(self, tokens: int) -> list[float]:
        """Of the last position of a prompt."""
        ids = self.torch.tensor([prompt(tokens)]) % self.model.config.vocab_size
        with self.torch.no_grad():
            out = self.model(input_ids=ids, logits_to_keep=1)
        values: list[float] = out.logits[0, -1].float().tolist()
        return values

    def facts(self) -> dict[str, Any]:
        """What was written, what compiling took, and how often it was needed afterwards."""
        from optimus.generation import compilations

        late = compilations(self.model) if self.warm else 0
        return {"tokens": self._generate(64, 33).tolist(), "warm": self.warm, "late": late}


def options() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sides", default="*", help="names of sides, as globs with semicolons")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--room", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="a model that takes a second")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    given = options()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    same = {"dtype": given.dtype, "tiny": given.tiny, "room": given.room}
    names = [n for n in STAGES if any(fnmatchcase(n, one) for one in given.sides.split(";"))]
    sides = [Side(name, FACTORY, {"stages": STAGES[name], **same}) for name in names]
    methods = {"decode": {"tokens": given.prompt, "new": given.new}}
    facts = alternate(sides, methods, runs=given.runs, threads=given.threads)
    print(f"{given.dtype}, prompt {given.prompt}, {given.new} new, {given.threads} threads")
    print(f"{'side':24} {'min ms':>9} {'median ms':>9} {'spread':>8}  tokens  late  warm-up s")
    for side in sides:
        found = facts[side.name]
        same_tokens = found["tokens"] == facts[names[0]]["tokens"]
        print(f"{side.name:24} {figures(side.times['decode'])}  ", end="")
        print(f"{'same' if same_tokens else 'other':6}  {found['late']:4}  {found['warm']:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
