"""What more than one test file needs."""

import os

import pytest
import torch

import optimus
from optimus.ops import native

# The XLA suite needs an environment of its own (`make test-xla`).
collect_ignore = ["xla"]
# Without AVX-512 its rows are refused, which test_generation sees to.
if not native.steps():
    collect_ignore.append("test_steps.py")


@pytest.fixture(scope="session")
def capable():
    """A processor that can do everything, so that plans are the same on every machine."""
    features = {"packed-linear", "packed-linear-bf16", "native-bf16", "int8-products"}
    return optimus.Backend("x86", "cpu", "AuthenticAMD", frozenset(features))


@pytest.fixture(autouse=True, scope="session")
def untuned(tmp_path_factory):
    """No table of ``optimus tune``: plans are the same for every user; commands inherit it."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(params=(1, 2))
def threads(request):
    """As many threads as torch is told to use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    """Tiny products are faster on one thread, and far faster on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """A folder with a two-layer BERT, seeded, and a tokenizer that spells words out."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["the", "value", "of", "list", "if", "is", "to", "be", "return", "then", "it"]
    vocabulary = [*special, *words, *letters, *(f"##{letter}" for letter in letters)]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=len(vocabulary), **sizes, **layers))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
