"""Tiny configs of any model type, from what its config class calls its sizes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, ResNetConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .overrides import DEFAULTS, SIZES
from .sizes import HEAD, HEADS, IMAGE, POSITIONS, SPAN, TINY_POSITIONS, WIDTH, WINDOW

VOCABULARY, LAYERS = 99, 2

# The first pattern that matches a field's whole name gives its tiny value.
NUMBERS: tuple[tuple[str, int], ...] = (
    (r"image_embedding_size", 4),
    (r"visual_prompt_size", 8),
    (r"post_conv_in_channels|adapter_input_size|hidden_size_global", WIDTH),
    (r"n_window", 4),
    (r"n_window_infer", 64),
    (r"base_channels", 32),
    (r"num_pos_feats", WIDTH // 2),
    (r"num_frames", 2),
    (r"model_in_dim|keypoint_decoder_dim|x4_feat_dim", 128),
    (r".*vocab_size.*|vocabulary_size|.*_vocab", VOCABULARY),
    (r".*(rope|nope|v|qk|index|swa|global|linear\w*|mamba|key|value)_head_dim|mamba_d_head", HEAD),
    (r".*head_dim|d_head|d_kv|dim_head|attention_head_size|mamba_headdim|rotary_dim", HEAD),
    (r".*(kv|q|o|index)_lora_rank", 32),
    (r".*(num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|experts_top_k|num_selects)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(\w*num_(local_|routed_|moe_)?experts|n_routed_experts|moe_num_experts)", 4),
    (r"mamba_(n|num)_heads", 2 * HEADS),
    (r".*(attention_heads|num_heads|n_heads?|_heads)", HEADS),
    (r"num_(kv_shared|nextn_predict|mtp)_layers", 0),
    (r"(max_window|num_feat_extract|first_k_dense|num_dense).*", 1),
    (r".*(num_hidden_layers|n_layers?|num_layers|_layers|_depth|num_blocks)|depth|layers", LAYERS),
    (r".*(intermediate|ffn|feed_?forward|mlp|d_ff|inner)_?(size|dim|hidden_size|channels)?", 96),
    (r".*(max_\w*position|n_positions|n_ctx|max_seq|source_length|max_pos_emb).*", POSITIONS),
    (r"sliding_window\w*|local_attention|attention_chunk_size", 4),
    (r"attention_window\w*", SPAN),
    (r"image_size|img_size|pretrain_image_size|\w*crop_size|input_size|max_img_size", IMAGE),
    (r"patch_size", 16),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|projection_dim|emb(edding)?_dim)", WIDTH),
    (r".*(embed(ding)?_size|proj_size|output_dim|dim|hidden_channels|project_dim)", WIDTH),
    (r"d_latents|upsample_groups|output_channels|vector_quantization_hidden_dimension", WIDTH),
    (r".*(num_queries|num_query_tokens|num_latents|num_detection_tokens|num_object_queries)", 8),
    (r"codebook_size|num_embeddings|num_negatives", 32),
    (r"window_size", WINDOW),
    (r"num_filters|num_groups|context_size", 4),
)
# What some models need although their configs leave it out.
ABSENT = {
    "prediction_length": 4,
    "vocab_size": 33,
    "head_dim": HEAD,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "num_key_value_heads": 2,
    "vocabulary_map": {"<image>": 98} | {f"IMGIMG{c}A": 50 + i for i, c in enumerate("ABCDEFGH")},
}
IDENTIFIERS = re.compile(r".*_(token_id|token_index|id)")


def tiny(model_type: str) -> PreTrainedConfig:
    """A config of that type whose model is built in well under a second."""
    return _shrunk(CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {})))


def quiet(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config without any dropout, in place, so that training can be compared."""
    for part in parts(config):
        for name, value in vars(part).items():
            if re.search("drop", name) and type(value) in (int, float):
                setattr(part, name, type(value)(0))
    return config


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and every config inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def _shrunk(default: PreTrainedConfig) -> PreTrainedConfig:
    return _rebuilt(default, _small_ids(default))


def _small_ids(config: PreTrainedConfig) -> dict[int, int]:
    """Special tokens that a tiny vocabulary lacks, and the ids that they get: from its end."""
    large = {
        value
        for part in parts(config)
        for name, value in vars(part).items()
        if IDENTIFIERS.fullmatch(name) and type(value) is int and value >= VOCABULARY
    }
    return {value: VOCABULARY - 1 - rank for rank, value in enumerate(sorted(large))}


def _rebuilt(
    default: PreTrainedConfig,
    ids: dict[int, int],
    given: Mapping[str, Any] = MappingProxyType({}),
    wanted: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedConfig:
    """The same class with smaller arguments, so that it derives again what it derives.

    ``given`` are the arguments with which the config around it made this one, and ``wanted``
    those that the table wants for it there.
    """
    if default.model_type == "timm_backbone":
        return _backbone(len(default.out_indices))
    overrides = SIZES.get(default.model_type, {}) | dict(wanted)
    declared = {field.name: field.default for field in dataclasses.fields(default)}
    known = {name: vars(default).get(name, declared[name]) for name in declared}
    sizes = {name: ABSENT[name] for name in known if known[name] is None and name in ABSENT}
    for name, value in known.items():
        first = declared[name]
        if isinstance(value, PreTrainedConfig):
            spec = type(default).sub_configs_defaults.get(name)
            inside = getattr(spec, "init_kwargs", {})
            sizes[name] = _rebuilt(value, ids, inside, overrides.pop(name, {}))
            continue
        spread = isinstance(value, list) and type(first) is int
        derived = (
            (first is None or (isinstance(first, str) and type(value) is int))
            and name not in given
            and not IDENTIFIERS.fullmatch(name)
        )
        if not derived and (small := _small(name, first if spread else value, ids)) != first:
            sizes[name] = small
    if "mrope_section" in getattr(default, "ignore_keys_at_rope_validation", None) or ():
        sizes["rope_parameters"] = _multimodal(known["rope_parameters"])
    sizes |= _grouped_heads(known) | _stages(default, known) | _kinds_of_layers(default, known)
    return type(default)(**(sizes | overrides))


def _backbone(levels: int) -> PreTrainedConfig:
    """A convolutional backbone of transformers' own in place of one of timm's."""
    stages = ["stage1", "stage2", "stage3", "stage4"]
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        out_features=stages[-levels:],
    )


def _grouped_heads(known: dict[str, Any]) -> dict[str, int]:
    """Two heads of keys where they are shared; as many as of queries where they are not."""
    heads, groups = known.get("num_attention_heads"), known.get("num_key_value_heads")
    if type(heads) is not int or type(groups) is not int:
        return {}
    return {"num_key_value_heads": HEADS if groups == heads else min(groups, 2)}


def _stages(default: PreTrainedConfig, known: dict[str, Any]) -> dict[str, Any]:
    """A backbone keeps giving out as many feature maps as it did."""
    given = vars(default).get("_out_features")
    if not given:
        return {}
    count = next((name for name in ("num_hidden_layers", "depth") if name in known), None)
    if "depths" in known or count is None:
        return {"out_features": list(given)}
    layers = max(LAYERS, len(given))
    return {count: layers, "out_indices": list(range(layers - len(given) + 1, layers + 1))}


def _multimodal(rope: dict[str, Any]) -> dict[str, Any]:
    """Three sections of a rotary embedding that fill the small head."""
    pairs = int(HEAD * rope.get("partial_rotary_factor", 1)) // 2
    third = (pairs + 1) // 3
    return rope | {"mrope_section": [pairs - 2 * third, third, third]}


def _small(name: str, value: Any, ids: dict[int, int]) -> Any:
    if type(value) is int and value > 0:
        return ids.get(value, value) if IDENTIFIERS.fullmatch(name) else _number(name, value)
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return _numbers(name, value)
    return value


def _number(name: str, value: int) -> int:
    small = _tiny_number(name)
    # A window of more than that is counted in pixels.
    in_pixels = name == "window_size" and value > 32
    if small == POSITIONS > TINY_POSITIONS:
        return small
    return value if small is None or in_pixels else min(small, value)


@functools.cache
def _tiny_number(name: str) -> int | None:
    return next((small for pattern, small in NUMBERS if re.fullmatch(pattern, name)), None)


def _numbers(name: str, value: Any) -> Any:
    """Sizes of stages: depths are capped, widths and heads keep their ratios."""
    if re.search("depths|layers|num_blocks|blocks_per_stage|block_repeats", name):
        return type(value)(min(v, LAYERS) for v in value)
    if re.search("heads", name):
        return type(value)(max(1, v // value[0]) for v in value)
    if re.search("image_size|crop_size", name):
        return type(value)(min(v, IMAGE) for v in value)
    if re.search("decoder_in_channels|vision_features_channels", name):
        return type(value)(WIDTH for _ in value)
    return value


def _kinds_of_layers(default: PreTrainedConfig, known: dict[str, Any]) -> dict[str, Any]:
    """One layer of every kind that the model has, at least two."""
    lists = {
        name: value
        for name, value in known.items()
        if isinstance(value, list | tuple)
        and re.fullmatch(r".*(layer_types|layers_block_type|layers_type|indexer_types)", name)
        and len(value) == getattr(default, "num_hidden_layers", None)
    }
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    kept = list(dict.fromkeys(rows))
    kept += rows[-1:] * (LAYERS - len(kept))
    small = {
        name: list(column) for name, column in zip(lists, zip(*kept, strict=True), strict=True)
    }
    return small | {"num_hidden_layers": len(kept)}
