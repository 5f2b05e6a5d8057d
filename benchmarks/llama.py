"""A Llama shape of 1.1 B parameters with random weights, and everyone who can run it.

One seeded checkpoint in bf16 is what all sides read: transformers loads it, and ``write_gguf``
writes the same numbers for llama.cpp, whose own quantizer makes Q8_0 and Q4_0 of them.
Needs the extra: ``pip install 'optimus[peers]'``; llama.cpp is built natively by
``CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python``.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

LAYERS, WIDTH, INNER, HEADS, GROUPS, VOCABULARY = 22, 2048, 5632, 32, 4, 32000
CONTEXT = 4096
THETA, EPSILON = 10000.0, 1e-5
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# llama.h: enum llama_ftype
Q8_0, Q4_0 = 7, 2


def write_checkpoint(folder: Path) -> Path:
    """The seeded model, saved in bf16 in ``folder`` unless it is there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "model.safetensors").exists():
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=EPSILON,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8GB")
        torch.set_default_dtype(torch.float32)
    return folder


def write_gguf(folder: Path, file: Path) -> Path:
    """The checkpoint as GGUF in bf16."""
    import gguf
    import torch
    from safetensors import safe_open

    writer = gguf.GGUFWriter(file, "llama")
    _write_head(writer)
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  not a dict
            tensor = weights.get_tensor(name)
            if tensor.ndim == 1:
                writer.add_tensor(_gguf_name(name), tensor.float().numpy())
                continue
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = _interleaved(tensor, HEADS if "q_proj" in name else GROUPS)
            data = tensor.contiguous().view(torch.uint8).numpy()
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_head(writer: Any) -> None:
    import gguf

    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    # Tokens without a text would be refused.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, _ = name.rpartition(".")
    if module in top:
        return f"{top[module]}.weight"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{PARTS[part]}.weight"


def _interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp turns neighbours where transformers turns halves."""
    rows, width = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, width)
    return halves.transpose(1, 2).reshape(rows, width)


def quantized(file: Path, target: Path, kind: int) -> Path:
    """``file`` by llama.cpp's own quantizer."""
    import llama_cpp

    if not target.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = kind
        failed = llama_cpp.llama_model_quantize(
            str(file).encode(), str(target).encode(), ctypes.byref(options)
        )
        assert not failed
    return target


def prompt(tokens: int) -> list[int]:
    """Seeded token ids."""
    import random

    generator = random.Random(tokens)  # noqa: S311  not a secret
    return [generator.randrange(3, VOCABULARY) for _ in range(tokens)]


class Stock:
    """transformers, as it is or transformed by a recipe."""

    def __init__(
        self,
        folder: str,
        dtype: str = "bfloat16",
        recipe: str | None = None,
        keep: str = "none",
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        if recipe is not None:
            import optimus

            optimus.transform(self.model, recipe, check=False, keep=keep)

    def prefill(self, tokens: int) -> float:
        """Seconds for the logits after a prompt."""
        ids = self.torch.tensor([prompt(tokens)])
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(input_ids=ids, logits_to_keep=1)
            return time.perf_counter() - start

    def ragged(self, lengths: list[int]) -> float:
        """Seconds for the logits after prompts of those lengths, padded on the left."""
        longest = max(lengths)
        rows = [[0] * (longest - length) + prompt(length) for length in lengths]
        mask = [[0] * (longest - length) + [1] * length for length in lengths]
        given = {"input_ids": self.torch.tensor(rows), "attention_mask": self.torch.tensor(mask)}
        places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(**given, position_ids=places, logits_to_keep=1)
            return time.perf_counter() - start

    def decode(self, tokens: int, new: int) -> float:
        """Seconds a token, of ``new`` greedy ones after the first."""
        ids = self.torch.tensor([prompt(tokens)])
        first, last = (self._seconds(ids, count) for count in (1, new + 1))
        return (last - first) / new

    def _seconds(self, ids: Any, new: int) -> float:
        start = time.perf_counter()
        # One prefill for both: what is measured is the tokens after it.
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        self.model.generate(ids, **options)
        return time.perf_counter() - start

    def logits(self, tokens: int) -> list[float]:
        """Of the last position of a prompt."""
        with self.torch.inference_mode():
            out = self.model(input_ids=self.torch.tensor([prompt(tokens)]), logits_to_keep=1)
        values: list[float] = out.logits[0, -1].float().tolist()
        return values

    def facts(self) -> dict[str, Any]:
        """Threads and memory."""
        import gc

        from optimus.core.memory import release
        from optimus.measure import machine

        gc.collect()
        release()
        return {"threads": self.torch.get_num_threads(), "resident": machine.resident_bytes()}


class LlamaCpp:
    """llama.cpp on a GGUF file."""

    def __init__(self, file: str) -> None:
        import llama_cpp

        threads = int(os.environ["OMP_NUM_THREADS"])
        self.model = llama_cpp.Llama(
            file,
            n_ctx=2048,
            n_batch=2048,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.threads = threads

    def prefill(self, tokens: int) -> float:
        """Seconds for the logits after a prompt."""
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(prompt(tokens))
        return time.perf_counter() - start

    def ragged(self, lengths: list[int]) -> float:
        """Seconds for the logits after prompts of those lengths, one after the other."""
        return sum(self.prefill(length) for length in lengths)

    def decode(self, tokens: int, new: int) -> float:
        """Seconds a token, of ``new`` greedy ones after the first."""
        self.model.reset()
        self.model.eval(prompt(tokens))
        start = time.perf_counter()
        for _ in range(new):
            self.model.eval([int(self._last().argmax())])
        return (time.perf_counter() - start) / new

    def _last(self) -> Any:
        import numpy as np
        from llama_cpp import llama_get_logits

        pointer = llama_get_logits(self.model.ctx)
        return np.ctypeslib.as_array(pointer, shape=(VOCABULARY,))

    def logits(self, tokens: int) -> list[float]:
        """Of the last position of a prompt."""
        self.prefill(tokens)
        values: list[float] = self._last().tolist()
        return values

    def facts(self) -> dict[str, Any]:
        """Threads and memory."""
        from optimus.measure import machine

        return {"threads": self.threads, "resident": machine.resident_bytes()}
