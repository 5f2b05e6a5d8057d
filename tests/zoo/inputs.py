"""What a model's forward needs, deduced from its signature and its config."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .arguments import COMPANIONS, FORMS, MAKERS, MASKED, Request
from .configs import parts
from .overrides import ALONE

# Which set of arguments a class answered to, so that it is looked for once.
_chosen: dict[type[nn.Module], tuple[str, ...]] = {}


def inputs(
    model: nn.Module, *, batch: int = 3, padding: str = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Arguments that the forward answers to: the fewest that it does, images only if it must.

    ``padding`` is "right", "left", "ragged" (on either side or both) or "none".
    """
    batch = 1 if model.config.model_type in ALONE else batch
    known = _chosen.get(type(model))
    if known is not None:
        return _made(model, known, batch, padding, seed)
    failures = []
    for names in candidates(model):
        try:
            made = _made(model, names, batch, padding, seed)
            with torch.no_grad():
                model(**made)
        except Exception as error:  # noqa: BLE001 - any refusal means to try with more
            failures.append(f"{'+'.join(names)}: {type(error).__name__}: {error}")
        else:
            _chosen[type(model)] = names
            return made
    raise ValueError(f"{type(model).__name__} refused: " + " | ".join(failures))


def _made(
    model: nn.Module, names: tuple[str, ...], batch: int, padding: str, seed: int
) -> dict[str, Tensor]:
    request = Request(model, batch, padding, torch.Generator().manual_seed(seed))
    for name in names:
        value = MAKERS[name](request)
        if value is not None:
            value = value.to(model.dtype) if value.is_floating_point() else value
            request.made[name.split()[0]] = value
    return request.made


def candidates(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Sets of argument names to try, in order; a name may say which of its forms is meant."""
    known = inspect.signature(model.forward).parameters
    for extra in _extras(model):
        if not extra <= known.keys():
            continue
        wanted = (_core(model) | extra) & known.keys()
        masked = {"attention_mask"} & known.keys() if wanted & MASKED else set()
        for names in dict.fromkeys((frozenset(wanted | masked), frozenset(wanted))):
            forms = [FORMS[name] for name in FORMS if name in names]
            yield from itertools.product(*forms)


def _core(model: nn.Module) -> set[str]:
    """What cannot be left out."""
    known = inspect.signature(model.forward).parameters
    free = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {n for n, p in known.items() if p.default is p.empty and p.kind not in free}
    main = model.main_input_name
    core = required | set([main] if isinstance(main, str) else main) | COMPANIONS
    return core | ({"decoder_input_ids"} if model.config.is_encoder_decoder else set())


def _extras(model: nn.Module) -> Iterator[set[str]]:
    """What may have to be added, or may be as well: images that need no words in their place."""
    places = [
        name
        for part in parts(model.config)
        for name, value in vars(part).items()
        if re.fullmatch("image_token_(id|index)", name) and value is not None
    ]
    images = {"input_ids", "pixel_values"}
    yield {"noise"}
    if not places:
        yield images
    yield set()
    yield {"input_ids"}
    yield {"pixel_values"}
    yield images
    yield {"input_features"}
    yield {"input_ids", "input_features"}
    yield {"input_values"}
    yield {"input_features_mask"}
    yield {"target_sizes"}
    yield {"encoder_hidden_states"}
    yield images | {"spatial_shapes", "pixel_attention_mask"}
    yield images | {"image_attention_mask"}
    yield images | {"pixel_attention_mask"}
    yield images | {"pixel_attention_mask", "noise", "timestep", "actions"}
