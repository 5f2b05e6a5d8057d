"""``generate`` in static shapes: what transformers prepares, run on graphs that are made ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.errors import BucketError, PlanError
from optimus.core.replacement import Mixin, reclassed
from optimus.core.surgery import Surgeon
from optimus.generation.buckets import Buckets
from optimus.generation.loop import Call, Prompt, Stop
from optimus.generation.runner import Runner
from optimus.generation.slate import MOST_ENDS
from optimus.generation.station import Station

STATION = "_optimus_station"
# What of a call's inputs is understood; anything else goes to the model as transformers does it.
KNOWN = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
)
# Settings that ask for something of transformers' own.
SETTINGS = (
    "return_dict_in_generate",
    "cache_implementation",
    "prefill_chunk_size",
    "is_assistant",
)


class StaticGeneration(Mixin):
    """A generating model that decodes on slates. What it does not do, stock ``generate`` does."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; ``BucketError`` for an empty prompt and what no bucket holds."""
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
        empty = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.shape[1]
        if empty and kwargs.get("inputs_embeds") is None:
            raise BucketError(
                f"the prompt is empty: input_ids is {list(ids.shape)}. Give generate a token at "
                "least, such as the one that begins a text."
            )
        if not isinstance(ids, Tensor) or not station_of(self).runner.lazy:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        named = {name: _on_cpu(one) for name, one in kwargs.items()}
        found = super().generate(*map(_on_cpu, args), **named)  # type: ignore[misc]
        return found.to(ids.device) if isinstance(found, Tensor) else found

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mode = generation_mode.value
        if mode not in ("greedy_search", "sample"):
            station_of(self).say(f"static shapes are not for {mode.replace('_', ' ')}")
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,  # noqa: FBT002  the host's signature
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        station = station_of(self)
        with torch.inference_mode(mode=False), torch.no_grad():
            why = "GPUs are kept in step" if synced_gpus else _unfit(self, *given, model_kwargs)
            if not why:
                return _run(self, station, *given, streamer, model_kwargs)
        station.say(why)
        return super()._sample(*given, synced_gpus, streamer, **model_kwargs)  # type: ignore[misc]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def station_of(model: Any) -> Station:
    """Where the model's graphs are; ``PlanError`` where it was not transformed for them."""
    station = vars(model).get(STATION)
    if not isinstance(station, Station):
        raise PlanError(
            f"this {type(model).__name__} does not generate in static shapes. Transform it with a "
            'recipe that says so first, such as "static".'
        )
    return station


def _run(
    model: Any,
    station: Station,
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Tensor:
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    prompt = _prompt(input_ids, model_kwargs, criteria, pad)
    ends = prompt.ends
    slate = station.take(model, _demand_batch(station.buckets, len(input_ids)))
    call = Call(model, station, prompt, slate)
    plain = not (len(processors) or config.do_sample or streamer is not None)
    if plain and len(ends) <= MOST_ENDS and all(_is_plain(one) for one in criteria):
        found = torch.cat([input_ids, call.greedy().to(input_ids.device)], -1)
    else:
        found = call.chosen(_choice(processors, config), Stop(input_ids, criteria, pad, streamer))
        if streamer is not None:
            streamer.end()
    # Not in a ``finally``: what an error left behind is for nobody.
    station.give(slate, call.window)
    return found


def _prompt(ids: Tensor, model_kwargs: dict[str, Any], criteria: Any, pad: int) -> Prompt:
    ids = ids.cpu()
    most = (_longest(criteria) or 0) - ids.shape[1]
    ends = tuple(int(end) for one in criteria if _is_plain(one) for end in _ends(one))
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs["position_ids"].cpu()
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()
    return Prompt(ids, positions.expand(ids.shape), live, most, ends, pad)


def _ends(criterion: Any) -> Any:
    return getattr(criterion, "eos_token_id", ())


def _is_plain(criterion: Any) -> bool:
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    return type(criterion) in (EosTokenCriteria, MaxLengthCriteria)


def _choice(processors: Any, config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """As transformers chooses a token of scores."""

    def choose(ids: Tensor, logits: Tensor) -> Tensor:
        scores = processors(ids, logits)
        if not config.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    return choose


def _demand_batch(buckets: Buckets, rows: int) -> int:
    batch = buckets.batch(rows)
    if batch is None:
        raise BucketError(
            f"generate was given {rows} rows, and the largest batch bucket is "
            f"{buckets.batches[-1]}. Give fewer, or warm_up(model, Buckets(batches=(..., {rows})))."
        )
    return batch


def _unfit(
    model: Any, ids: Tensor, processors: Any, criteria: Any, config: Any, model_kwargs: Any
) -> str:
    """Why the call is not one for static shapes, in words; ``BucketError`` where it is nobody's."""
    asked = [name for name in SETTINGS if getattr(config, name, None)]
    more = [name for name, one in model_kwargs.items() if one is not None and name not in KNOWN]
    cache = model_kwargs.get("past_key_values")
    if model.training:
        return "the model is in training mode"
    if asked or more:
        return f"{', '.join(asked + more)} was given"
    if config.use_cache is False or getattr(cache, "_is_user_defined", False):
        return "the cache is to be another, or none"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    return _unfit_tensors(ids, model_kwargs) or _too_long(model, ids.shape[1], _longest(criteria))


def _too_long(model: Any, prompt: int, longest: int | None) -> str:
    room = station_of(model).buckets.room
    if prompt > room:
        raise BucketError(
            f"the prompt has {prompt} tokens, and there is room for {room}: the model's positions, "
            "or what the buckets say. Shorten it, or warm_up(model, Buckets(room=...))."
        )
    # The last token that is written is not read any more.
    if longest is None or longest - 1 > room:
        return f"the prompt of {prompt} and what is to be written exceed the room of {room} tokens"
    return ""


def _longest(criteria: Any) -> int | None:
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    return min((o.max_length for o in criteria if type(o) is MaxLengthCriteria), default=None)


def _unfit_tensors(ids: Tensor, model_kwargs: dict[str, Any]) -> str:
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    fitting = [(rows, ids.shape[1]) for rows in (1, len(ids))]
    if positions is None or tuple(positions.shape) not in fitting:
        return "positions are not one a token"
    if mask is not None and mask.shape != ids.shape:
        return "the mask is not that of the prompt"
    return ""


def positions_of(model: Any) -> int | None:
    """How many positions the model knows; None where its config does not say."""
    config = model.config.get_text_config(decoder=True)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def make_static(model: nn.Module, make: Callable[[], Runner], surgeon: Surgeon) -> None:
    """Have the model generate in static shapes, on what ``make`` makes."""
    station = Station(make, Buckets().within(positions_of(model)))
    surgeon.set_attribute(model, STATION, station)
    surgeon.reclass(model, reclassed(StaticGeneration, type(model)))
