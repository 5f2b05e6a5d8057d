"""Reading a model, a configuration or a tokenizer from a folder or a hub id.

What transformers would warn about and go on with (weights missing, shapes that differ) is an error
here: a measurement of a half-random model is worse than none. Pickles are never opened and remote
code is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimus.core.errors import OptimusError


class LoadError(OptimusError, ValueError):
    """A MODEL argument that does not name a model which can be read safely and completely."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide load reports, retries and bars: what matters in them is raised as an error here."""
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars: Any = transformers_logging
    bars.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _is_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).exists()


def local_folder(source: str) -> Path | None:
    """The folder that ``source`` names, or None where it can only be a hub id."""
    if not _is_path(source):
        return None
    folder = Path(source).expanduser()
    if not folder.exists():
        raise LoadError(f"{source}: no such folder.")
    if not folder.is_dir():
        raise LoadError(f"{source} is a file; give the folder that holds config.json.")
    if not (folder / "config.json").exists():
        raise LoadError(f"{source} has no config.json, so it is not a transformers model folder.")
    return folder


def read_config(source: str) -> Any:
    """The ``PretrainedConfig`` of a folder or hub id."""
    from transformers import AutoConfig

    name = str(local_folder(source) or source)
    with _quiet():
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LoadError(f"{source}: cannot read its config: {_first_line(error)}") from error


def model_class(config: Any) -> Any:
    """The class that the configuration names, or ``AutoModel`` where it names none."""
    import transformers

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((cls for cls in named if cls is not None), transformers.AutoModel)


def skeleton(config: Any) -> nn.Module:
    """The model with every tensor on meta: its shape and classes, without its weights."""
    return build(config, device="meta")


def build(config: Any, *, device: str) -> nn.Module:
    """The model of a config, without any checkpoint: on a device other than meta, random."""
    import transformers

    cls = model_class(config)
    make = cls.from_config if cls is transformers.AutoModel else cls._from_config
    with _quiet(), torch.device(device):
        try:
            model: nn.Module = make(config)
        except (ValueError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:
            raise LoadError(f"cannot build this config: {_first_line(error)}") from error
    return model.eval()


def _check_format(source: str, folder: Path | None) -> None:
    if folder is None or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise LoadError(
            f"{source} has its weights only as a pickle ({pickles[0]}), and opening a pickle can "
            "run code. Save them as safetensors first."
        )
    raise LoadError(f"{source} has no weights: no *.safetensors file in the folder.")


def _check_complete(source: str, info: dict[str, Any]) -> None:
    if mismatched := sorted(info.get("mismatched_keys") or ()):
        key, stored, wanted = mismatched[0]
        raise LoadError(
            f"{source}: {key} is {tuple(stored)} in the weights and {tuple(wanted)} by the config "
            f"({len(mismatched)} such)."
        )
    if missing := sorted(info.get("missing_keys") or ()):
        raise LoadError(f"{source}: the weights lack {missing[0]} ({len(missing)} missing).")
    if errors := info.get("error_msgs"):
        raise LoadError(f"{source}: {str(errors[0]).splitlines()[0]}")


def _check_finite(source: str, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise LoadError(f"{source}: the weight {name} holds NaN or infinity.")


def load_model(source: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, complete, finite, in evaluation mode and in ``dtype``."""
    from safetensors import SafetensorError

    config = read_config(source)
    folder = local_folder(source)
    _check_format(source, folder)
    with _quiet():
        try:
            model, info = model_class(config).from_pretrained(
                str(folder or source),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that `info` names them, and we raise below
                output_loading_info=True,
            )
        except SafetensorError as error:
            reason = _first_line(error)
            raise LoadError(f"{source}: a weight file is damaged or cut short: {reason}") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"{source}: cannot load: {_first_line(error)}") from error
    _check_complete(source, info)
    _check_finite(source, model)
    loaded: nn.Module = model.eval()
    return loaded


def from_state(
    source: str, config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> nn.Module:
    """The model of ``config`` with the tensors of ``state``, complete, in evaluation mode."""
    with _quiet():
        try:
            model, info = model_class(config).from_pretrained(
                None, config=config, state_dict=state, dtype=dtype,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"{source}: cannot load: {_first_line(error)}") from error
    _check_complete(source, info)
    loaded: nn.Module = model.eval()
    return loaded


def load_tokenizer(source: str) -> Any:
    """The tokenizer; one without a padding token pads with its end-of-text token."""
    from transformers import AutoTokenizer

    name = str(local_folder(source) or source)
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exception for a damaged file
            raise LoadError(f"{source}: cannot read its tokenizer: {_first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes up an empty one where the folder holds none.
        raise LoadError(f"{source} has no tokenizer, so no text can be given to it.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
