"""What the ``cuda_*`` benchmarks share: Llama shapes, the clock, the bandwidth and the record.

Random weights: the time does not depend on them. On ``--device cpu --tiny`` everything runs at the
size of a test, by the CPU's own recipes, and says nothing about a GPU; only what a GPU measured is
written down, under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rounds import Side  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
# hidden, intermediate, layers, heads, key heads, vocabulary
SIZES = {
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "tiny": (256, 512, 2, 4, 2, 512),
}
FACTORY = "benchmarks.gpu:Llama"


def options(description: str | None) -> argparse.ArgumentParser:
    """What all are asked."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the size of a test")
    parser.add_argument("--sides", default="*", help="names of sides, as globs with semicolons")
    parser.add_argument("--sizes", default="1B,3B,8B", help="of Llama shapes, with commas")
    parser.add_argument("--runs", type=int, default=5)
    return parser


def synchronise(device: str) -> None:
    """Wait until the device is done."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of one call, until the device is done."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def bandwidth(device: str, *, tiny: bool) -> float:
    """Bytes a second that copying a large block reads and writes, the best of some tries."""
    import torch

    block = torch.ones(1 << (20 if tiny else 28), device=device)
    other = torch.empty_like(block)
    return 2 * block.nbytes / min(seconds(lambda: other.copy_(block), device) for _ in range(20))


def in_turn(side: Side, orders: dict[str, dict[str, Any]], runs: int) -> dict[str, Any]:
    """One side from its start to its end: the seconds of each order, and what it knows.

    The others are not there: several models of 8 B do not fit. ``refused``: why it could not run.
    """
    side.start(2)
    try:
        if side.ready is not True or (why := side.call("why")):
            return {"refused": why}
        for name, given in orders.items():
            side.call(name, **given)
            side.times[name] = [side.call(name, **given) for _ in range(runs)]
        return {"times": side.times, **side.call("facts")}
    finally:
        side.stop()


def record(name: str, device: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write the figures down, if a GPU gave them, with where and when."""
    import torch

    from optimus.measure import machine

    if device != "cuda":
        print(f"{device}: a run of the script, not a measurement; nothing is written down")
        return
    gpu = torch.cuda.get_device_name().replace(" ", "-")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    RESULTS.mkdir(exist_ok=True)
    found = {"date": today, "device": gpu, "cuda": torch.version.cuda, **more, "rows": rows}
    found["machine"] = machine.describe()
    file = RESULTS / f"{name}-{gpu}-{today}.json"
    file.write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(f"written to {file.relative_to(ROOT)}")


class Llama:
    """One side: the seeded model of a size, stock or by the stages of a recipe."""

    def __init__(
        self,
        size: str,
        device: str,
        stages: list[list[str]],
        cache: str | None = None,
        room: int = 256,
    ) -> None:
        import torch

        import optimus
        from optimus.core.errors import OptimusError
        from optimus.generation import Buckets, warm_up

        self.torch, self.device, self.cache = torch, device, cache
        self.refused = ""
        self.model = _llama(size, device)
        if not stages:
            return
        try:
            optimus.transform(self.model, recipe_of(stages), check=False)
        except OptimusError as error:
            self.refused = str(error)
            return
        if any(name.startswith("static.") for stage in stages for name in stage):
            warm_up(self.model, Buckets(lengths=(room // 2,), room=room))

    def why(self) -> str:
        """The side cannot run, or ""."""
        return self.refused

    def decode(self, tokens: int, new: int) -> float:
        """Seconds a token, of ``new`` greedy ones after the first."""
        first, last = (
            seconds(lambda count=count: self._generate(tokens, count), self.device)
            for count in (1, new + 1)
        )
        return (last - first) / new

    def prefill(self, tokens: int, rows: int) -> float:
        """Seconds for the logits after ``rows`` prompts."""
        ids = self._prompt(tokens).expand(rows, -1).contiguous()
        with self.torch.inference_mode():
            given = {"input_ids": ids, "logits_to_keep": 1, "use_cache": False}
            return seconds(lambda: self.model(**given), self.device)

    def _generate(self, tokens: int, new: int) -> Any:
        more = {} if self.cache is None else {"cache_implementation": self.cache}
        asked = {"max_new_tokens": new, "min_new_tokens": None, "do_sample": False, **more}
        return self.model.generate(self._prompt(tokens), **asked)

    def _prompt(self, tokens: int) -> Any:
        made = self.torch.Generator().manual_seed(tokens)
        words = self.model.config.vocab_size
        return self.torch.randint(3, words, (1, tokens), generator=made).to(self.device)

    def facts(self) -> dict[str, Any]:
        """The bytes of weights that a token reads, logits, and the most memory in use."""
        ids = self._prompt(64)
        with self.torch.inference_mode():
            logits = self.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        peak = self.torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        return {"read": _read(self.model), "logits": logits.tolist(), "peak": peak}


def recipe_of(stages: list[list[str]]) -> Any:
    """Those stages, with what the recipe of their bits says of heads; originals are not kept."""
    import optimus

    bits = [name[2:] for stage in stages for name in stage if name.startswith("*.")]
    heads = optimus.Recipe.named(bits[0]).overrides if bits else ()
    return optimus.Recipe("side", tuple(map(tuple, stages)), overrides=heads, keep="none")


def _llama(size: str, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads, groups, words = SIZES[size]
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=8192,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def _read(model: Any) -> int:
    """Bytes of weights that one token reads: of every product, as it is stored."""
    from torch import Tensor, nn

    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            state = vars(module).get("_weight_state")
            codes = None if state is None else state.packed
            held = [one for one in vars(codes).values() if isinstance(one, Tensor)] if codes else []
            weight = module._parameters["weight"]
            whole = weight.numel() * weight.element_size()
            total += getattr(codes, "nbytes", 0) or sum(one.nbytes for one in held) or whole
    return total


def distance(mine: list[float], stock: list[float]) -> float:
    """Relative error."""
    import torch

    one, other = torch.tensor(mine), torch.tensor(stock)
    return float((one - other).norm() / other.norm())
