"""What a user would pick instead, as sides of a comparison: the same model and batches.

Needs the extra: ``pip install 'optimus[bench]'``. Each runtime gets the stock model, two threads
as the others, and the padded batch, which is what it is made for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from optimus.measure import load
from optimus.measure.side import Runner, Task
from optimus.measure.text import Batch


class Encoder(nn.Module):
    """The encoder with a plain signature, for converters that trace."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = load.load_model(task.model, dtype=torch.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        output: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        return output


def example_of(batch: Batch) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}


def openvino_side(task: Task, batches: list[Batch]) -> Runner:
    """OpenVINO on the CPU; ``task.dtype`` is its inference precision."""
    import openvino as ov

    precision = {"float32": "f32", "bfloat16": "bf16"}[task.dtype]
    converted = ov.convert_model(Encoder(task).eval(), example_input=example_of(batches[0]))
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = ov.Core().compile_model(converted, "CPU", options)

    def forward(batch: Batch) -> Tensor:
        inputs = {name: value.numpy() for name, value in example_of(batch).items()}
        return torch.from_numpy(np.array(compiled(inputs)[0]))

    return Runner(forward)


def onnxruntime_side(task: Task, batches: list[Batch]) -> Runner:
    """ONNX Runtime on the CPU, fp32, all of its graph optimizations."""
    import onnxruntime

    example = example_of(batches[0])
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "model.onnx"
    torch.onnx.export(Encoder(task).eval(), tuple(example.values()), file, dynamo=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    folder.cleanup()
    names = [given.name for given in session.get_inputs()]

    def forward(batch: Batch) -> Tensor:
        values = (value.numpy() for value in example_of(batch).values())
        (output,) = session.run(None, dict(zip(names, values, strict=True)))
        return torch.from_numpy(output)

    return Runner(forward)
