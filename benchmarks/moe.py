"""Decoding a small mixture of experts: stock and optimus's recipes in turn.

A Qwen3-MoE shape of 0.9 B parameters, of which a token reads a sixth: 12 layers of 1024, 32 experts
of 768 of which 4 are asked, random weights, batch 1, greedy. Times are as in ``decode``.

    python benchmarks/moe.py [--sides GLOBS] [--threads 2] [--new 64] [--folder KEPT]
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.decode import STOCK, compare, errors, models, options
from benchmarks.llama import VOCABULARY
from benchmarks.rounds import Side, alternate, figures

SIDES: dict[str, dict[str, str]] = {
    "stock fp32": {"dtype": "float32"},
    "stock bf16": {},
    "auto fp32": {"dtype": "float32", "recipe": "auto"},
    "auto bf16": {"recipe": "auto"},
    "int8": {"recipe": "int8"},
    "int8-dynamic": {"recipe": "int8-dynamic"},
    "int4": {"recipe": "int4"},
    "int8 fp32": {"dtype": "float32", "recipe": "int8"},
    "int4 fp32": {"dtype": "float32", "recipe": "int4"},
}
# Less than half of the time is twice as fast.
PAIRS = (("int4", "stock bf16", 0.5), ("int4 fp32", "stock bf16", 0.5), ("int4", "stock fp32", 0.5))


def write_checkpoint(folder: Path) -> Path:
    """The seeded model, saved in bf16 in ``folder`` unless it is there."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if not (folder / "model.safetensors").exists():
        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            moe_intermediate_size=768,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="8GB")
        torch.set_default_dtype(torch.float32)
    return folder


def main() -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    wanted = [n for n in SIDES if any(fnmatchcase(n, glob) for glob in given.sides.split(","))]
    with models(given.folder) as folder:
        checkpoint = {"folder": str(write_checkpoint(folder))}
        sides = [Side(name, STOCK, {**SIDES[name], **checkpoint}) for name in wanted]
        methods = {"decode": {"tokens": 64, "new": given.new}}
        facts = alternate(sides, methods, runs=given.runs, threads=given.threads)
    far = errors(sides, facts)
    print(f"MoE decode, prompt 64, {given.new} new, {given.threads} threads")
    print(f"{'side':16} {'min ms':>9} {'median ms':>9} {'spread':>8}  error     GB")
    for side in sides:
        print(f"{side.name:16} {figures(side.times['decode'])}  ", end="")
        print(f"{far[side.name]:.1e}  {facts[side.name]['resident'] / 1e9:.2f}")
    compare(sides, "decode", PAIRS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
