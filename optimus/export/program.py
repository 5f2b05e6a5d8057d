"""A model captured for a target, written to a folder, and run from there by the target's runner."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimus.core.probe import Sample
from optimus.export.inputs import free
from optimus.export.targets import ExportError, Target, exporter

MANIFEST = "export.json"
NOISY = ("transformers", "torch.onnx", "torch.export", "torch._inductor", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what exporters tell of their versions and steps: what fails is raised."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        # torch.onnx prints its steps where a program may be reading our JSON.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def write(
    model: nn.Module,
    target: Target,
    sample: Sample,
    most: int,
    folder: Path,
    *,
    stock: bool = False,
) -> None:
    """One graph, its sizes free, in transformers' own layout; ``ExportError`` says why not.

    A decoder's graph takes no cache and gives none. ``stock``: as transformers alone would.
    """
    inputs: dict[str, Any] = dict(sample)
    if getattr(model.config, "use_cache", None):
        inputs["use_cache"] = False
    before = vars(model).get("forward")
    with quiet():
        try:
            one = exporter(target, stock=stock)
            config = one.config_class(
                dynamic_shapes=free(sample, target.texts, most),
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            one.export(model, inputs, config).save_pretrained(str(folder))
        except OSError:
            raise  # of the disk, which whoever made the folder explains
        except Exception as error:  # capturing runs any model's code, and converters raise anything
            name = type(model).__name__
            raise ExportError(f"cannot export {name} to {target.name}: {_why(error)}") from error
        finally:
            # The host puts the method back as an attribute of the instance, where it was none.
            if before is None:
                vars(model).pop("forward", None)


def _why(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Runner(nn.Module):
    """An export, loaded from its folder and called as the model was."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers.exporters.base import ExportedModel

        with quiet():
            self.exported: Any = ExportedModel.from_pretrained(
                str(folder), **_options(folder, torch.get_num_threads())
            )
            _ = self.exported.runners
        self.config: Any = self.exported.config

    def forward(self, **inputs: Any) -> Any:
        """What the exported model answers; sizes and dtypes as the model's own."""
        with quiet():
            return self.exported(**inputs)


def _options(folder: Path, threads: int) -> dict[str, Any]:
    """As many threads as torch has, and the precision that was exported: OpenVINO takes less."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["export_format"] == "openvino":
        names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
        found = {part["metadata"]["export_dtype"] for part in manifest["components"].values()}
        hint = names[found.pop()]
        return {"config": {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}}
    if manifest["export_format"] == "onnx":
        import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return {"session_options": options}
    return {}
