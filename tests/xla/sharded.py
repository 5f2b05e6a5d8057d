"""Run by ``test_sharding`` in a process of its own, on as many devices as CPU_NUM_DEVICES says."""

import copy
import json
import sys

import torch
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as runtime
from small import llama

runtime.use_spmd()

import optimus  # noqa: E402  SPMD is asked for before anything is on the device
from optimus.core.planner import JOURNAL  # noqa: E402
from optimus.generation import Buckets, warm_up  # noqa: E402
from optimus.ops.spmd import sharding  # noqa: E402

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
NEW, LENGTHS = 8, (27, 5, 50)


def tokens(model):
    """Greedy tokens of prompts of one section and of two."""
    found = []
    for length in LENGTHS:
        ids = torch.arange(3, 3 + length)[None]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found += model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, length:].tolist()
    return found


def split(model):
    """The names of what is sharded."""
    return sorted(name for name, one in model.named_parameters() if sharding(one))


def main():
    """Both recipes, and what there is to see of them."""
    stock, found = llama(**SIZES), {"devices": runtime.global_runtime_device_count()}
    found["stock"] = tokens(stock)
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    for recipe in ("auto", "int8"):
        model = optimus.transform(copy.deepcopy(stock).to("xla"), recipe)
        plan = vars(model)[JOURNAL].plan
        warm_up(model, Buckets(lengths=(32,), room=64))
        count = metrics.counter_value("UncachedCompile")
        mine = {"passes": plan.passes, "tokens": tokens(model)}
        mine["compiled"] = metrics.counter_value("UncachedCompile") - count
        codes = [m._packed.codes for m in model.modules() if getattr(m, "_packed", None)]
        mine["split"] = split(model) if recipe == "auto" else [c for c in map(sharding, codes) if c]
        optimus.reverse(model)
        mine["after"] = split(model)
        state = model.state_dict().items()
        mine["same"] = all(torch.equal(value.cpu(), before[name]) for name, value in state)
        found[recipe] = mine
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
