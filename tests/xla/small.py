"""A model of the size that a test compiles in a second."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(**sizes):
    """Two layers of llama, seeded."""
    usual = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{**usual, "num_key_value_heads": 2, "max_position_embeddings": 2048, **sizes},
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()
