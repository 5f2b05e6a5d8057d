"""What fused attention pays, site by site: the figures of ``optimus/costs.json``.

Every gated replacement, at the sizes of a base model (768 wide, 12 heads of 64), batch 4, and
lengths of 512, 128, 32 and 1024: the first attention module that it takes is called with what the
stock model called it with, stock and swapped in turn. A ratio is stock's time over ours, the median
of three runs, each the least of its rounds. The length is the number of keys that the call had.
``--shipped`` measures the swap as the table in the package limits it, instead of at every length,
and ``--packed`` with the linears packed, as ``transform`` leaves the block.

    python benchmarks/attention.py [--only GLOB] [--dtype float32] [--threads 2] [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "optimus" / "costs.json"
LENGTHS = (512, 128, 32, 1024)
BATCH, ROUNDS, RUNS, SECONDS = 4, 3, 3, 0.1
# From here up one run, of seconds, says enough.
LONG = 1000
FEWEST = 16
# Rows that all do the same: the host's own function in place of its eager one.
KIND = "attention.fused"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of replacements, as globs with commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", help="instead of 512, 128, 32 and 1024")
    parser.add_argument("--shipped", action="store_true", help="within the limits of the table")
    parser.add_argument("--packed", action="store_true", help="with the linears packed, too")
    parser.add_argument("--write", action="store_true", help="put the figures into the table")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """One process a length, since the sizes of the tiny models are read from the environment."""
    given = options()
    if given.length is not None:
        serve(given)
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for length in given.lengths or LENGTHS:
        for name, result in measure(given, length):
            if "keys" in result:
                found.setdefault(name, {})[str(result["keys"])] = result
            print(f"{name:44} {length:5} {describe(result)}", flush=True)
    ratios = {
        name: {
            keys: result["ratio"] for keys, result in sorted(by.items(), key=lambda i: int(i[0]))
        }
        for name, by in sorted(found.items())
    }
    if given.write:
        write(given, ratios)


def describe(result: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in result:
        return result["error"]
    return (
        f"{result['keys']:5} keys {result['stock_ms']:9.3f} ms {result['ratio']:6.2f}x"
        f"  runs {result['runs']}  error {result['distance']:.1e}"
    )


def measure(given: argparse.Namespace, length: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the process for one length reports, line by line."""
    sizes = {"ZOO_LENGTH": str(length), "ZOO_WIDTH": "768", "ZOO_HEADS": "12"}
    command = [sys.executable, __file__, "--length", str(length), "--only", given.only]
    command += ["--dtype", given.dtype, "--device", given.device, "--threads", str(given.threads)]
    command += ["--shipped"] * given.shipped + ["--packed"] * given.packed
    environment = {**os.environ, **sizes, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            name, _, result = line.partition("\t")
            yield name, json.loads(result)


def serve(given: argparse.Namespace) -> None:
    """Measure every replacement that is asked for, at the length of this process."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    import transformers
    import zoo

    from optimus.core.registry import Registry

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    registry = Registry.installed()
    for architecture in registry.architectures:
        for rule in architecture.replacements:
            if rule.gated and any(fnmatchcase(rule.name, p) for p in given.only.split(",")):
                try:
                    result = gain(zoo, architecture.model_type, rule, given)
                except Exception as error:  # noqa: BLE001  one family must not end the others
                    result = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
                print(f"{rule.name}\t{json.dumps(result)}", flush=True)


def gain(zoo: Any, model_type: str, rule: Any, given: argparse.Namespace) -> dict[str, Any]:
    """The ratio, the keys and the error of one replacement on one model."""
    import torch

    import optimus
    from optimus.core.registry import Registry
    from optimus.core.replacement import Architecture, Replacement
    from optimus.measure.tune import alternated

    attention = "eager" if rule.name.endswith(".attention.fused") else None
    dtype = getattr(torch, given.dtype)
    stock, mine = (
        zoo.build(model_type, attention=attention, dtype=dtype).to(given.device) for _ in range(2)
    )
    free = dataclasses.replace(rule, gated=given.shipped)
    rules = [one for one in Registry.installed().find("*.packed") if isinstance(one, Replacement)]
    only = Registry([Architecture(model_type=model_type, replacements=(free, *rules))])
    recipe = optimus.Recipe("one", ((rule.name, *["*.packed"] * given.packed),))
    optimus.transform(mine, recipe, check=False, registry=only)
    claims = vars(mine)["_optimus_journal"].plan.claims
    claim = next((one for one in claims if one.replacement == rule.name), None)
    if claim is None:
        return {"error": "not claimed"}
    inputs = {k: v.to(given.device) for k, v in zoo.inputs(stock, batch=BATCH).items()}
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    for model in (stock, mine):
        model.config.use_cache = False
    if "use_cache" in signature(stock):
        inputs["use_cache"] = False
    with torch.no_grad():
        keys, path = busiest(stock, claim.path, inputs)
        path = claim.path if attention is None else path
        calls = [captured(model, path, inputs) for model in (stock, mine)]
        distance = error(*(call() for call in calls))
        sides = [finished(call) for call in calls]
        runs = [
            alternated(*sides, seconds=SECONDS, rounds=ROUNDS)
            for _ in range(RUNS if keys < LONG else 1)
        ]
    if keys < max(FEWEST, claim.shortest or 0):
        return {"error": f"only {keys} keys: too small to say anything, or left to stock"}
    ratios = [round(stock_s / mine_s, 3) for stock_s, mine_s in runs]
    return {
        "keys": keys,
        "ratio": statistics.median(ratios),
        "runs": ratios,
        "stock_ms": 1000 * min(stock_s for stock_s, _ in runs),
        "distance": distance,
    }


def signature(model: Any) -> Any:
    """The arguments of the forward."""
    import inspect

    return inspect.signature(model.forward).parameters


def busiest(model: Any, within: str, inputs: dict[str, Any]) -> tuple[int, str]:
    """The number of keys of the largest softmax under the site, and the module that takes it."""
    import torch
    from torch.overrides import TorchFunctionMode

    running: list[str] = []
    found: list[tuple[int, int, str]] = []

    class Softmaxes(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if name == "softmax" and running and args[0].ndim > 2:
                found.append((args[0].shape[-1], args[0].numel(), running[-1]))
            if name == "multi_head_attention_forward" and running:
                found.append((args[1].shape[0], args[0].numel(), running[-1]))
            if name == "scaled_dot_product_attention" and running:
                found.append((args[1].shape[-2], 2 * args[0].numel(), running[-1]))
            return func(*args, **(kwargs or {}))

    handles = []
    for path, module in model.named_modules():
        inside = path == within or not within or path.startswith(within + ".")
        if inside and "Softmax" not in type(module).__name__ and any(module.children()):
            handles += [
                module.register_forward_pre_hook(lambda *_, path=path: running.append(path)),
                module.register_forward_hook(lambda *_: running.pop() and None),
            ]
    with Softmaxes():
        model(**inputs)
    for handle in handles:
        handle.remove()
    assert torch.is_grad_enabled() is False
    keys, _, path = max(found, key=lambda one: one[1])
    return keys, path


def captured(model: Any, path: str, inputs: dict[str, Any]) -> Callable[[], Any]:
    """A call of the module at ``path`` with what the model calls it with first."""
    module, seen = model.get_submodule(path), []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    model(**inputs)
    handle.remove()
    args, kwargs = seen[0]
    # A cache would grow with every call.
    kwargs = {name: None if "cache" in str(type(v)).lower() else v for name, v in kwargs.items()}
    return lambda: module(*args, **kwargs)


def error(stock: Any, mine: Any) -> float:
    """Relative error of the first tensor of the answer."""
    one, other = first(stock), first(mine)
    return float((one - other).norm() / one.norm())


def first(out: Any) -> Any:
    """The first tensor of an answer of any shape."""
    if isinstance(out, dict):
        return first(list(out.values()))
    return first(out[0]) if isinstance(out, (tuple, list)) else out


def finished(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, until the accelerator is done with it, too."""

    def waiting() -> None:
        call()
        synchronise()

    return waiting


def synchronise() -> None:
    """Wait for the accelerator, where there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def typical(ratios: dict[str, dict[str, float]]) -> dict[str, float]:
    """The median over the rows that differ in nothing but their model: for those that no tiny
    model can stand for at such lengths."""
    alike = [found for name, found in ratios.items() if name.endswith(KIND) and name[0] != "*"]
    by_length = {
        str(length): [found[str(length)] for found in alike if str(length) in found]
        for length in sorted(LENGTHS)
    }
    return {length: statistics.median(found) for length, found in by_length.items() if found}


def write(given: argparse.Namespace, ratios: dict[str, dict[str, float]]) -> None:
    """Merge the figures into the table, with where and when they were taken."""
    import torch

    from optimus.core.backend import Backend, Context, Mode, host
    from optimus.core.costs import key
    from optimus.measure import machine

    backend = host() if given.device == "cpu" else Backend(given.device, given.device)
    name = key(Context(backend, Mode.INFERENCE, getattr(torch, given.dtype)))
    table = json.loads(TABLE.read_text())
    part = table.setdefault(name, {"ratios": {}})
    part["where"] = (
        f"{machine.processor()}, {given.threads} threads, torch {torch.__version__},"
        f" batch {BATCH}, 12 heads of 64, {datetime.date.today()}"
    )
    for one, found in ratios.items():
        merged = part["ratios"].get(one, {}) | found
        part["ratios"][one] = dict(sorted(merged.items(), key=lambda item: int(item[0])))
    part["ratios"] |= {f"*.{KIND}": typical(part["ratios"])}
    part["ratios"] = dict(sorted(part["ratios"].items()))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
