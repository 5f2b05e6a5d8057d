"""What a model can be exported to, and what has to be installed for it.

Every target goes through transformers' own exporters. ``aoti`` is added to them here, and complex
steps are taken out of every graph before it is converted: only torch itself runs those.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from optimus.core.errors import OptimusError
from optimus.ops.real import real


class ExportError(OptimusError, RuntimeError):
    """A model that cannot be exported, or an OUT that cannot be written."""


@dataclass(frozen=True, slots=True)
class Target:
    """A name of ours, transformers' name of the format, and the packages without which it is none.

    ``extra`` is the extra of optimus that installs them. ``packs``: it runs
    graphs with a size that only the run knows. ``texts`` and ``tokens`` are the most that a batch
    may have.
    """

    name: str
    format: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    packs: bool = False
    texts: int = 1024
    tokens: int = 1 << 17

    def demand(self) -> None:
        """``ExportError`` naming the extra, where a package is not installed."""
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            raise ExportError(
                f"--to {self.name} needs {', '.join(missing)}, which is not installed: "
                f"pip install 'optimus[{self.extra}]'."
            )
        if importlib.util.find_spec("transformers.exporters.runners") is None:
            raise ExportError("this transformers has no exporters with runners: upgrade it.")


TARGETS = {
    one.name: one
    for one in (
        Target("torch-export", "dynamo", packs=True),
        Target("aoti", "aoti", packs=True),
        Target("onnx", "onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx", packs=True),
        Target("openvino", "openvino", ("openvino",), "openvino", packs=True),
        # Its memory is laid out beforehand, for the largest batch.
        Target("executorch", "executorch", ("executorch",), "executorch", texts=8, tokens=512),
    )
}


def exporter(target: Target, *, stock: bool = False) -> Any:
    """An exporter of transformers for the target; ``stock`` leaves graphs as they are captured."""
    from transformers.exporters.auto import get_exporter_class
    from transformers.exporters.exporter_dynamo import DynamoExporter

    base = _aoti() if target.name == "aoti" else get_exporter_class(target.format)
    if stock:
        return base()
    first = () if base is DynamoExporter else (base,)
    return type(base.__name__, (*first, _real_exporter()), {})()


@functools.cache
def _real_exporter() -> Any:
    from transformers.exporters.exporter_dynamo import DynamoExporter

    class RealExporter(DynamoExporter):
        """Below a format's own exporter, which converts what this captures."""

        def export_program(self, model: Any, sample_inputs: Any, config: Any) -> Any:
            program, metadata = super().export_program(model, sample_inputs, config)
            return real(program), metadata

    return RealExporter


@functools.cache
def _aoti() -> Any:
    """The exporter of compiled packages, announced to transformers so that it loads them, too.

    Its registry has no way to unregister; nothing that transformers had is replaced.
    """
    from transformers.exporters.auto import register_backend
    from transformers.exporters.exporter_dynamo import DynamoExporter
    from transformers.exporters.runners.base import ModelRunner

    class AotiExporter(DynamoExporter):
        """A program that is compiled by inductor when it is written."""

        export_format: Any = "aoti"

        @classmethod
        def save_program(cls, program: Any, path: Any) -> None:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))

        @classmethod
        def load_program(cls, path: Any) -> Any:
            return torch._inductor.aoti_load_package(str(path))

    class AotiRunner(ModelRunner):
        """Runs a compiled package by torch's loader."""

        def __init__(self, program: Any, metadata: Any) -> None:
            super().__init__(metadata)
            self.program = program

        @property
        def device(self) -> torch.device:
            return torch.device(self.metadata.export_device or "cpu")

        @classmethod
        def from_program(cls, program: Any, metadata: Any, device: Any = None) -> Any:
            return cls(program, metadata)

        def __call__(self, *shares: bool, **given: Any) -> Any:
            # ``share_inputs`` and ``share_outputs`` come by name: torch copies neither.
            names = [name for name in self.metadata.kwargs if name in given]
            return self.program(**{name: given[name] for name in names})

    register_backend(AotiExporter, AotiRunner)
    return AotiExporter
