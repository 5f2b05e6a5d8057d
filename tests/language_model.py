"""A small language model with a perplexity to defend: a Llama trained on the standard library.

The text is every docstring of the standard library's top-level modules, a tenth of them held out.
Training takes a minute or two, once: the folder is kept, and it holds what any model folder
holds, and ``held_out.txt`` besides. ``python tests/language_model.py`` prints its path.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.measure import text

CACHE = Path(__file__).parents[1] / ".cache"
HELD_OUT = "held_out.txt"
# Fewer words than this are a label, and no sentence to learn from.
WORDS = 5
VOCABULARY, LENGTH, ROWS, STEPS = 1024, 128, 8, 600
RATE, WARM_UP = 4e-3, 30
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL = ("<pad>", "<text>", "<end>")


def folder() -> Path:
    """The folder of the trained model; trains it where there is none for this very recipe."""
    target = CACHE / f"language-model-{_recipe()}"
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
            made = Path(unfinished) / "model"
            _make(made)
            _publish(made, target)
    return target


def held_out() -> list[str]:
    """The texts that the model has not been trained on."""
    return text.read_texts(folder() / HELD_OUT)


def encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of whole texts, without a word about those that are longer than the model reads."""
    ids: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"]
    return ids


def unigram_perplexity() -> float:
    """What knowing nothing but how frequent a token is comes to on the held-out texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    train, rest = _texts()
    counts = Counter(token for ids in encoded(tokenizer, train) for token in ids[1:])
    total = sum(counts.values()) + VOCABULARY
    scored = [token for ids in encoded(tokenizer, rest) for token in ids[1:]]
    loss = -sum(math.log((counts[token] + 1) / total) for token in scored) / len(scored)
    return math.exp(loss)


def _recipe() -> str:
    """What decides the weights: this file, and the versions of the text and of torch."""
    parts = (Path(__file__).read_bytes(), sys.version.encode(), torch.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _publish(made: Path, target: Path) -> None:
    """All of it at once. Where another process was faster, its folder is as good."""
    try:
        made.replace(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(made)


def _texts() -> tuple[list[str], list[str]]:
    found = text.docstrings(sys.maxsize, words=WORDS)
    kept = len(found) * 9 // 10
    return found[:kept], found[kept:]


def _make(target: Path) -> None:
    train, rest = _texts()
    tokenizer = _tokenizer(train)
    ids = [token for row in encoded(tokenizer, train) for token in row]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _trained(torch.tensor(ids))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / HELD_OUT).write_text("\n".join(rest) + "\n", encoding="utf-8")


def _tokenizer(train: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(train, trainer)
    pad, begin, end = SPECIAL
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, SPECIAL.index(begin))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        model_max_length=SIZES["max_position_embeddings"],
    )


def _trained(ids: Tensor) -> Any:
    """A Llama after ``STEPS`` batches of ``[ROWS, LENGTH]``, drawn at random places of ``ids``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH, (ROWS, 1))
        batch = ids[starts + torch.arange(LENGTH)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def _rate(step: int) -> float:
    """Up over the first steps, then down along a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


if __name__ == "__main__":
    sys.stdout.write(f"{folder()}\n")
