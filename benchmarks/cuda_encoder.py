"""A ragged batch through BERT-large on a GPU: transformers' sdpa beside optimus, in bf16.

Lengths are those of real docstrings, in words and signs, cut at 512; weights and words are random.
The error is over the real tokens.

    python benchmarks/cuda_encoder.py [--batch 64] [--runs 20]
    python benchmarks/cuda_encoder.py --device cpu --tiny
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu

LONGEST, ASKED = 512, 2.0
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def ragged(rows: int, longest: int, device: str) -> dict[str, Any]:
    """Words and a mask, padded on the right."""
    import torch

    from optimus.measure.text import docstrings

    found = [len(re.findall(r"\w+|[^\w\s]", one)) for one in docstrings(rows)]
    lengths = torch.tensor([min(one, longest) for one in found])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(3, 30000, mask.shape, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}
    return {name: one.to(device) for name, one in given.items()}


def main() -> int:
    """Both in one process: stock, and the same model transformed."""
    import torch
    from transformers import BertConfig, BertModel

    import optimus

    parser = gpu.options(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    sizes, batch, longest = LARGE, given.batch, LONGEST
    if given.tiny:
        sizes, batch, longest = TINY, 4, 32
    torch.manual_seed(0)
    model = BertModel(BertConfig(**sizes), add_pooling_layer=False).to(torch.bfloat16)
    model = model.to(given.device).eval()
    inputs = ragged(batch, longest, given.device)
    real, least, answers = inputs["attention_mask"].bool(), {}, {}
    for side in ("sdpa", "optimus"):
        if side == "optimus":
            optimus.transform(model, "auto")
        with torch.inference_mode():
            answers[side] = model(**inputs).last_hidden_state[real].float()
            times = [gpu.seconds(lambda: model(**inputs), given.device) for _ in range(given.runs)]
        least[side] = min(times)
    error = (answers["optimus"] - answers["sdpa"]).norm() / answers["sdpa"].norm()
    row = {**{f"{side}_s": one for side, one in least.items()}, "error": float(error)}
    row |= {"batch": batch, "length": real.shape[1], "real": float(real.float().mean())}
    print(f"{batch} rows of {real.shape[1]}, {row['real']:.0%} real tokens, error {error:.1e}")
    ratio = least["sdpa"] / least["optimus"]
    print(
        f"sdpa {1000 * least['sdpa']:.2f} ms, optimus {1000 * least['optimus']:.2f} ms:"
        f" {ratio:.2f}x (asked: {ASKED}x)"
    )
    gpu.record("cuda_encoder", given.device, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
