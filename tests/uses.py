"""What users do with models: round them, generate, write into them, train, watch and compile."""

from __future__ import annotations

from typing import Any

import torch
from models import LENGTH, batch, masks, pad_of, words
from snapshots import tensors
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import optimus


def rounded(model: nn.Module, backend: Any, recipe: Any = "int8", **options: Any) -> nn.Module:
    """Transformed and not checked."""
    return optimus.transform(model, recipe, backend=backend, check=False, **options)


def claims(model: nn.Module, backend: Any, recipe: Any) -> dict[str, str]:
    """What takes each site, by path: the last word of its name."""
    made = optimus.plan(model, recipe, backend=backend)
    return {claim.path: claim.replacement.rpartition(".")[2] for claim in made.claims}


def generated(model: nn.Module, **options: Any) -> Any:
    """Eight greedy tokens after a left-padded prompt."""
    mask = masks()["left"]
    ids = words(mask, pad_of(model))
    sizes = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    return model.generate(ids, attention_mask=mask, pad_token_id=pad_of(model), **sizes, **options)


def assert_same_tokens(mine: nn.Module, stock: nn.Module) -> None:
    """The same greedy tokens; from a tie on, to the last bit of the dtype, either may come."""
    asked = {"output_logits": True, "return_dict_in_generate": True}
    answers = [generated(model, **asked).logits for model in (mine, stock)]
    step = torch.finfo(next(stock.parameters()).dtype).eps
    same = torch.ones(len(answers[0][0]), dtype=torch.bool)
    for ours, theirs in zip(*answers, strict=True):
        best, other = theirs.max(-1), ours.argmax(-1, keepdim=True)
        gap = best.values - theirs.gather(-1, other).squeeze(-1)
        assert (~same | (gap <= step * best.values.abs())).all()
        same &= best.indices == other.squeeze(-1)


def bump(model: nn.Module) -> None:
    """Change every parameter in place, by way of the module that owns it."""
    seen: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for name in list(module._parameters):
                if (weight := getattr(module, name)) is not None and id(weight) not in seen:
                    seen.add(id(weight))
                    weight.mul_(1.05).add_(0.001)


def learn(model: nn.Module) -> None:
    """One step of SGD with dropout, from the same random state."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        output = model(**batch(model))
    real = slice(None) if not hasattr(model, "config") else masks()["right"].bool()
    given = [t for _, t in tensors(output) if t.requires_grad]
    given = [t[real] if t.shape[:2] == (3, LENGTH) else t for t in given]
    sum(t.float().pow(2).mean() for t in given).backward()
    optimizer.step()
    model.eval()


def watch(model: nn.Module) -> list[tuple[Any, ...]]:
    """Hooks before and after every module; they write down where, what and how large."""
    seen: list[tuple[Any, ...]] = []

    def note(path: str, *given: Any) -> None:
        # Only the first: fused attention answers None for weights that nobody asked for.
        seen.append((path, [next((tuple(t.shape) for _, t in tensors(g)), ()) for g in given]))

    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, *given, path=path: note(path, *given))
        module.register_forward_hook(lambda _, *given, path=path: note(path, *given))
    return seen


def compiled(model: nn.Module) -> tuple[int, Any]:
    """How many frames Dynamo made of it, with no break allowed, and its answer."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    whole = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        answer = whole(**batch(model))
    return counter.frame_count, answer
