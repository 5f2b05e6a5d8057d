"""Headers, indices and configs of any content: clear errors, and nothing written outside OUT."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimus.core.errors import OptimusError
from optimus.export.convert import convert
from optimus.export.folder import read_checkpoint
from optimus.export.layout import DTYPES, read_header
from optimus.export.outline import match, skeleton

QUIET = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}
WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["a", "weight", "../a", "/etc/passwd", "ü", "模型", "\0", "__metadata__", "\n"]
    ),
)
NUMBERS = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, -(2**63)])
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
SHAPES = st.one_of(st.lists(st.integers(0, 4), max_size=3), st.lists(NUMBERS, max_size=4), ANYTHING)
OFFSETS = st.one_of(st.lists(st.integers(0, 40), min_size=2, max_size=2), ANYTHING)
ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {"dtype": st.sampled_from([*DTYPES, "F4", 7]), "shape": SHAPES, "data_offsets": OFFSETS}
    ),
    ANYTHING,
)


@pytest.fixture(scope="module")
def folder():
    """A place of its own, with nothing beside."""
    made = Path(tempfile.mkdtemp(prefix="optimus-fuzz-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def bert(folder, tiny_bert):
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_bert, folder / "bert"))


def good_or_clear(call) -> bool:
    """Whether it went well; any error but a clear one is a failure of the test."""
    said = ""
    try:
        call()
    except OptimusError as error:
        said = str(error) or "nothing\n"
    assert len(said) < 600
    assert "\n" not in said
    return not said


@settings(max_examples=1000, **QUIET)
@given(
    header=st.dictionaries(WORDS, ENTRIES, max_size=4),
    extra=st.integers(0, 40),
    lie=st.sampled_from([0, 0, 0, 1, -1, 2**40, 2**63]),
)
def test_headers(folder, header, extra, lie):
    """Whatever the header says, what is believed of it adds up."""
    text = json.dumps(header).encode()
    file = folder / "x.safetensors"
    length = max(0, len(text) + lie) % 2**64
    file.write_bytes(struct.pack("<Q", length) + text + bytes(extra))

    def read() -> None:
        held = read_header(file)
        assert sum(one.nbytes for one in held.values()) == extra

    good_or_clear(read)


@settings(max_examples=400, **QUIET)
@given(data=st.binary(max_size=64))
def test_bytes(folder, data):
    """Not even a header."""
    file = folder / "y.safetensors"
    file.write_bytes(data)
    good_or_clear(lambda: read_header(file))


@settings(max_examples=400, **QUIET)
@given(places=st.one_of(st.dictionaries(WORDS, st.one_of(WORDS, ANYTHING), max_size=3), ANYTHING))
def test_indices(bert, places):
    """An index may name anything, and only plain names in the folder are opened."""
    index = bert / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    try:
        good_or_clear(lambda: read_checkpoint(bert))
    finally:
        index.unlink()


KEYS = st.sampled_from(
    ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "model_type",
     "architectures", "hidden_act", "dtype", "num_labels", "id2label", "intermediate_size",
     "max_position_embeddings", "type_vocab_size", "quantization_config", "layer_norm_eps",
     "auto_map", "pad_token_id"]
)  # fmt: skip


@settings(max_examples=300, **QUIET)
@given(changes=st.dictionaries(st.one_of(KEYS, WORDS), ANYTHING, min_size=1, max_size=2))
def test_configs(bert, changes):
    """A config may ask for any model; one that the weights do not fit is refused."""
    file = bert / "config.json"
    before = file.read_bytes()
    file.write_text(json.dumps({**json.loads(before), **changes}))

    def read() -> None:
        source = read_checkpoint(bert)
        match(skeleton(source), source)

    try:
        good_or_clear(read)
    finally:
        file.write_bytes(before)


@settings(max_examples=60, **QUIET)
@given(at=st.integers(0, 3000), byte=st.integers(0, 255), cut=st.integers(0, 2000))
def test_whole_conversions(bert, folder, at, byte, cut):
    """One byte changed or some missing: OUT is there and whole, or nothing is."""
    file = bert / "model.safetensors"
    before = file.read_bytes()
    data = bytearray(before)
    data[at] = byte
    file.write_bytes(data[: len(data) - cut] if cut % 3 == 0 else data)
    names = sorted(p.name for p in folder.iterdir())
    try:
        done = good_or_clear(lambda: convert(str(bert), folder / "out"))
        if done:
            assert (folder / "out" / "optimus.json").is_file()
            shutil.rmtree(folder / "out")
        assert sorted(p.name for p in folder.iterdir()) == names
    finally:
        file.write_bytes(before)
