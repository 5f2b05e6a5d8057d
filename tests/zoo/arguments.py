"""How every argument of a forward is made, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .configs import VOCABULARY, parts
from .sizes import FRAMES, LENGTH, SAMPLES

# Shares of the length, in ninths.
NINTHS = (9, 4, 6)
FIRST_WORD, LAST_WORD = 8, 40


@dataclass
class Request:
    """One model, and the kind of batch that is wanted for it."""

    model: nn.Module
    batch: int
    padding: str
    generator: torch.Generator
    made: dict[str, Tensor] = field(default_factory=dict)

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of these that any part of the config has."""
        for name in names:
            for part in parts(self.model.config):
                value = vars(part).get(name)
                if value is not None:
                    return value
        return default

    def words(self, *shape: int) -> Tensor:
        """Ids that are no special tokens."""
        known = self.model.config.get_text_config(decoder=False)
        size = getattr(known, "vocab_size", None) or LAST_WORD
        last = min(LAST_WORD, size)
        return torch.randint(min(FIRST_WORD, last - 1), last, shape, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        """Floats around zero."""
        return torch.randn(shape, generator=self.generator)

    def mask(self, length: int = LENGTH) -> Tensor:
        """Ones where there is something, for a batch of ``length`` positions."""
        lengths = torch.tensor([NINTHS[i % len(NINTHS)] for i in range(self.batch)])
        lengths = lengths * length // 9
        if self.padding == "none":
            lengths = torch.full_like(lengths, length)
        gaps = length - lengths
        starts = {"left": gaps, "ragged": gaps * (torch.arange(self.batch) % 3) // 2}
        start = starts.get(self.padding, torch.zeros_like(gaps))[:, None]
        position = torch.arange(length)
        return ((position >= start) & (position < start + lengths[:, None])).long()


def _input_ids(r: Request) -> Tensor:
    known = r.model.config.get_text_config(decoder=False)
    pad, size = (getattr(known, name, None) for name in ("pad_token_id", "vocab_size"))
    # Some configs keep a pad that their words do not have.
    pad = pad if pad is not None and 0 <= pad < (size or VOCABULARY) else 0
    ids = r.words(r.batch, LENGTH)
    return ids if r.padding == "none" else ids.masked_fill(r.mask() == 0, pad)


def _pictured_ids(r: Request) -> Tensor:
    """Words after as many places for the image as the model makes features of it."""
    known = inspect.signature(r.model.get_image_features).parameters
    made = {name: value for name, value in r.made.items() if name in known}
    with torch.no_grad():
        found = r.model.get_image_features(**made)
    features = found if isinstance(found, Tensor | list | tuple) else found.pooler_output
    features = features if isinstance(features, Tensor) else torch.cat(list(features))
    count = features.numel() // features.shape[-1] // r.batch
    place = r.find("image_token_id", "image_token_index", "video_token_index", default=0)
    images = torch.full((r.batch, count), place)
    return torch.cat([images, _input_ids(r)], 1)


def _attention_mask(r: Request) -> Tensor | None:
    if r.padding == "none":
        return None
    main = next((r.made[n] for n in ("input_ids", "input_values") if n in r.made), None)
    if main is None and "input_features" in r.made:
        return r.mask(FRAMES)
    if main is None or main.shape[1] == LENGTH:
        return r.mask()
    if main.ndim == 2 and not main.is_floating_point():
        images = torch.ones(r.batch, main.shape[1] - LENGTH, dtype=torch.long)
        return torch.cat([images, r.mask()], 1)
    return r.mask(main.shape[1])


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, dict):
        return int(value["height"]), int(value["width"])
    return tuple(value)[-2:] if isinstance(value, list | tuple) else (int(value), int(value))


def _image(r: Request) -> tuple[int, int, int]:
    height, width = _pair(
        r.find("image_size", "img_size", "input_size", "max_img_size", default=64)
    )
    channels = r.find("num_channels", "in_channels", "in_chans", default=3)
    return (channels if type(channels) is int else 3), height, width


def _frames(r: Request) -> int:
    return int(r.find("num_frames", "frames_per_clip", default=2))


def _side(r: Request) -> int:
    return _pair(r.find("patch_size", default=16))[0]


def _image_places(r: Request) -> Tensor:
    """The words that stand for an image, where the model has a mask for them."""
    last = r.find("latent_query_num", default=4)
    position = torch.arange(LENGTH)
    return ((position > 0) & (position <= last)).long().expand(r.batch, LENGTH)


def _upper_half(r: Request) -> Tensor:
    channels, height, width = _image(r)
    return r.noise(r.batch, channels, height // 2, width)


def _patches(r: Request) -> Tensor:
    """Patches of all images in one row, as many as ``_grid`` says."""
    side = _side(r)
    depth = _pair(r.find("temporal_patch_size", "patch_temporal", default=1))[0]
    return r.noise(r.batch * 16, _image(r)[0] * depth * side * side)


def _small_images(r: Request) -> Tensor:
    side = _side(r)
    return r.noise(r.batch * 16, _image(r)[0], side, side)


def _grid(r: Request) -> Tensor:
    return torch.tensor([[1, 4, 4]]).expand(r.batch, 3)


def _bins(r: Request) -> int:
    if stacked := getattr(r.model.config, "input_size", None):
        return int(stacked)
    names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "input_size")
    return int(r.find(*names, "feature_projection_input_dim", "input_feat_size", default=128))


def _hidden(r: Request) -> int:
    return int(r.find("hidden_size", "d_model", default=64))


def _bbox(r: Request) -> Tensor:
    corners = torch.randint(0, 30, (r.batch, LENGTH, 2), generator=r.generator)
    return torch.cat([corners, corners + 5], -1)


def _past_length(r: Request) -> int:
    length = r.find("context_length", default=16)
    return int(length) + max(r.find("lags_sequence", default=[0]))


def _time_features(length: Callable[[Request], int]) -> Callable[[Request], Tensor]:
    return lambda r: r.noise(r.batch, length(r), r.find("num_time_features", default=1))


def _past_values(r: Request) -> Tensor:
    channels = r.find("num_input_channels")
    shape = (r.batch, _past_length(r))
    return r.noise(*shape) if channels is None else r.noise(*shape, channels)


MAKERS: dict[str, Callable[[Request], Any]] = {
    "pixel_values": lambda r: r.noise(r.batch, *_image(r)),
    "pixel_values frames": lambda r: r.noise(r.batch, _frames(r), *_image(r)),
    "pixel_values pair": lambda r: r.noise(r.batch, 2, *_image(r)),
    "pixel_values patches": _patches,
    "pixel_values small": _small_images,
    "pixel_values wide": lambda r: r.noise(r.batch, _image(r)[0], 96, 320),
    "pixel_values large": lambda r: r.noise(r.batch, _image(r)[0], 256, 256),
    "pixel_values half": _upper_half,
    "pixel_values rows": lambda r: r.noise(r.batch, 16, _image(r)[0] * _side(r) ** 2),
    "pixel_values_videos": lambda r: r.noise(r.batch, _frames(r), *_image(r)),
    "input_features": lambda r: r.noise(r.batch, FRAMES, _bins(r)),
    "input_features bins": lambda r: r.noise(r.batch, _bins(r), FRAMES),
    "input_features stacked": lambda r: r.noise(r.batch, FRAMES, 4 * _bins(r)),
    "input_features few": lambda r: r.noise(r.batch, SAMPLES // 320, _bins(r)),
    "input_features whole": lambda r: r.noise(
        r.batch, _bins(r), 2 * r.find("max_source_positions", default=FRAMES)
    ),
    "input_features image": lambda r: r.noise(r.batch, 1, FRAMES, _bins(r)),
    "input_features_mask": lambda r: r.mask(FRAMES),
    "input_values": lambda r: r.noise(r.batch, SAMPLES),
    "input_values channel": lambda r: r.noise(r.batch, 1, SAMPLES),
    "input_values frames": lambda r: r.noise(
        r.batch, r.find("max_length", default=FRAMES), _bins(r)
    ),
    "inputs": lambda r: r.noise(r.batch, LENGTH, _hidden(r)),
    "inputs samples": lambda r: r.noise(r.batch, SAMPLES),
    "inputs_embeds": lambda r: r.noise(r.batch, LENGTH, _hidden(r)),
    "hidden_states": _patches,
    "hidden_states audio": lambda r: r.noise(r.batch, 1, SAMPLES),
    "hidden_states latents": lambda r: r.noise(r.batch, _hidden(r), 8),
    "latents": lambda r: r.noise(r.batch, _hidden(r), 8),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": lambda r: torch.ones(r.batch, dtype=torch.long),
    "query_embeds": lambda r: r.noise(r.batch, 8, _hidden(r)),
    "qformer_input_ids": lambda r: r.words(r.batch, LENGTH),
    "task_inputs": lambda r: r.words(r.batch, r.find("task_seq_len", default=LENGTH)),
    "visual_feats": lambda r: r.noise(r.batch, 5, r.find("visual_feat_dim", default=64)),
    "visual_pos": lambda r: r.noise(r.batch, 5, 4).sigmoid(),
    "flattened_patches": lambda r: r.noise(
        r.batch, 16, 2 + r.find("patch_embed_hidden_size", default=768)
    ).abs(),
    "bbox": _bbox,
    "past_values": _past_values,
    "past_values_padding": lambda r: torch.zeros(r.batch, _past_length(r)),
    "freq": lambda r: torch.zeros(r.batch, 1, dtype=torch.long),
    "past_observed_mask": lambda r: torch.ones(r.batch, _past_length(r)),
    "past_time_features": _time_features(_past_length),
    "future_time_features": _time_features(lambda r: r.find("prediction_length", default=4)),
    "future_values": lambda r: r.noise(r.batch, r.find("prediction_length", default=4)),
    "image_attention_mask": lambda r: torch.ones(r.batch, LENGTH, _frames(r), dtype=torch.long),
    "image_embeds_position_mask": _image_places,
    "target_sizes": lambda r: torch.tensor([[4, 4]]).expand(r.batch, 2),
    "spatial_shapes": lambda r: torch.tensor([[4, 4]]).expand(r.batch, 2),
    "pixel_attention_mask": lambda r: torch.ones(r.batch, 16, dtype=torch.long),
    "pixel_attention_mask cameras": lambda r: torch.ones(r.batch, 2, dtype=torch.long),
    "prompt_pixel_values": lambda r: r.noise(*r.made["pixel_values"].shape),
    "prompt_masks": lambda r: r.noise(*r.made["pixel_values"].shape),
    "encoder_hidden_states": lambda r: r.noise(
        r.batch, 5, r.find("encoder_hidden_size", default=_hidden(r))
    ),
    "states": lambda r: r.noise(r.batch, LENGTH, r.find("state_dim")),
    "actions": lambda r: r.noise(r.batch, LENGTH, r.find("act_dim", "max_action_dim")),
    "rewards": lambda r: r.noise(r.batch, LENGTH, 1),
    "returns_to_go": lambda r: r.noise(r.batch, LENGTH, 1),
    "timesteps": lambda r: torch.arange(LENGTH).expand(r.batch, LENGTH),
    "state": lambda r: r.noise(r.batch, r.find("max_state_dim")),
    "classes_input_ids": lambda r: r.words(2 * r.batch, LENGTH),
    "classes_attention_mask": lambda r: torch.ones(2 * r.batch, LENGTH, dtype=torch.long),
    "tasks_input_ids": lambda r: r.words(r.batch, LENGTH),
    "tasks_attention_mask": lambda r: torch.ones(r.batch, LENGTH, dtype=torch.long),
    "classes_structure": lambda r: torch.full((r.batch,), 2),
    "noise_embeds": lambda r: r.noise(r.batch, 4, _hidden(r)),
    "context_hidden_states": lambda r: r.noise(r.batch, LENGTH, _hidden(r)),
    "audio_mel": lambda r: r.noise(r.batch, FRAMES, _bins(r)),
    "audio_mel_mask": lambda r: r.mask(FRAMES) == 0,
    "pixel_position_ids": lambda r: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(
        r.batch, 16, 2
    ),
    "noise": lambda r: r.noise(r.batch, 16).sigmoid(),
    "noise actions": lambda r: r.noise(*r.made["actions"].shape),
    "timestep": lambda r: r.noise(r.batch).sigmoid(),
    "input_ids": _input_ids,
    "input_ids pictured": _pictured_ids,
    "input_ids codes": lambda r: r.words(r.batch, LENGTH, r.find("num_codebooks") + 1),
    "decoder_input_ids": lambda r: r.words(r.batch, 5),
    "decoder_input_ids codes": lambda r: r.words(
        r.batch, 5, r.find("num_channels", "num_codebooks")
    ),
    "decoder_input_ids rows": lambda r: r.words(r.batch * r.find("num_codebooks"), 5),
    "attention_mask": _attention_mask,
}
# Arguments that come in several shapes.
FORMS = {
    name: tuple(form for form in MAKERS if form.split()[0] == name)
    for name in dict.fromkeys(form.split()[0] for form in MAKERS)
}
MASKED = {"input_ids", "input_values", "input_features", "inputs_embeds", "inputs", "past_values"}
COMPANIONS = {
    "bbox",
    "visual_feats",
    "visual_pos",
    "past_time_features",
    "future_time_features",
    "image_embeds_position_mask",
    "states",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
}
