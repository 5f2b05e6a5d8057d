"""With the tools that people already use: adapters, trainers, pipelines, offloading, compilers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PLAIN, Case, batch, case, masks
from snapshots import distance, identical, snapshot, values
from torch import nn

import optimus
from optimus.core.errors import NothingToDoError, SurgeryError
from optimus.core.verify import CLOSE, LOSSY

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT asks transformers for a property that it is about to rename.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

BERT = case("bert", "AutoModelForSequenceClassification")
# Eager, so that there is something to do in training mode too.
LLAMA = case("llama", "AutoModelForCausalLM", attention="eager")
GPT2 = case("gpt2", "AutoModelForCausalLM", attention="eager")
FP32 = CLOSE[torch.float32]


def adapted(model: nn.Module, targets: list[str]) -> Any:
    """LoRA on the named linears, the same on every model."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return get_peft_model(model, config)


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of one backward in training mode, dropout and all."""
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    model.eval()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# PEFT warns of GPT-2's Conv1D, which it then handles.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("one", "targets"), [(LLAMA, ["q_proj", "down_proj"]), (GPT2, ["c_attn"])], ids=str
)
def test_lora(one, targets, mode, capable):
    """LoRA on a transformed model: same answers, same gradients; off again, then reverse."""
    stock, mine = one.build(), one.build()
    before = snapshot(mine)
    made = optimus.plan(mine, backend=capable, mode=mode)
    assert made.claims
    optimus.transform(mine, backend=capable, mode=mode)
    theirs, ours = adapted(stock, targets), adapted(mine, targets)
    inputs = batch(stock)
    expected, found = step(theirs, inputs), step(ours, inputs)
    assert list(found) == list(expected) != []
    assert max(distance(found[k], v, None) for k, v in expected.items()) < 1e-4
    with torch.no_grad():
        assert distance(ours(**inputs), theirs(**inputs), masks()["right"]) < FP32
    if mode == "inference":
        with pytest.raises(SurgeryError, match=rf"{targets[0]} is now .*unload adapters"):
            optimus.reverse(mine)
        assert optimus.is_transformed(mine)
    assert optimus.reverse(ours.unload()) is mine
    mine.requires_grad_()  # PEFT froze it, and leaves it so
    assert snapshot(mine) == before


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_merged_lora_is_not_lost(mode, capable):
    """merge_and_unload writes into the weights of a transformed model; the reverse keeps it."""
    stock, mine = LLAMA.build(), LLAMA.build()
    optimus.transform(mine, backend=capable, mode=mode)
    targets = ["q_proj", "up_proj"]
    theirs, ours = (adapted(m, targets).merge_and_unload() for m in (stock, mine))
    inputs = batch(stock)
    with torch.no_grad():
        assert distance(ours(**inputs), theirs(**inputs), masks()["right"]) < FP32
    assert values(ours.state_dict()) == values(theirs.state_dict())
    optimus.reverse(ours)
    assert values(ours.state_dict()) == values(theirs.state_dict())


def test_transform_under_an_adapter(capable):
    """An adapter's own layers and the linears inside them keep working if it was there first."""
    theirs, ours = (adapted(LLAMA.build(), ["q_proj"]) for _ in range(2))
    before = snapshot(ours)
    inputs = batch(theirs.get_base_model())
    optimus.transform(ours, backend=capable, sample=inputs)
    with torch.no_grad():
        assert distance(ours(**inputs), theirs(**inputs), masks()["right"]) < FP32
    optimus.reverse(ours)
    assert snapshot(ours) == before


def trained(model: nn.Module, folder: Path, rows: list[dict[str, Any]]) -> Any:
    """One step of transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "seed": 7, "learning_rate": 1e-3}
    arguments = TrainingArguments(output_dir=str(folder), **quiet, **options)
    return Trainer(model=model, args=arguments, train_dataset=rows).train()


@pytest.mark.parametrize("attention", ["default", "eager"])
def test_trainer(attention, tmp_path, capable):
    """One step in training mode, reverse, save: what the stock model trained alike would save."""
    from transformers import AutoModelForSequenceClassification

    one = Case(BERT.architecture, BERT.head, attention)
    ids = batch(one.build(), "ones")["input_ids"]
    rows = [{"input_ids": row, "labels": index % 2} for index, row in enumerate(ids)]
    stock, mine = one.build(), one.build()
    trained(stock, tmp_path, rows)
    optimus.transform(mine, backend=capable, mode="training")
    trained(mine, tmp_path, rows)
    optimus.reverse(mine)
    mine.save_pretrained(tmp_path / "mine")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "mine")
    assert values(again.state_dict()) == values(mine.state_dict())
    assert values(again.state_dict()) != values(one.build().state_dict())
    theirs = dict(stock.named_parameters())
    # Adam's first step is a sign: where a gradient is nearly 0, rounding decides which way.
    apart = [distance(p, theirs[name], None) for name, p in again.named_parameters()]
    assert max(apart) < 2e-3


def test_training_a_packed_model(tmp_path, capable):
    """A Trainer on a model transformed for inference is told so at once, and what to do."""
    model = optimus.transform(BERT.build(), backend=capable)
    rows = [{"input_ids": batch(model, "ones")["input_ids"][0], "labels": 1}]
    with pytest.raises(SurgeryError, match=r"optimus.reverse\(model\) to train"):
        trained(model, tmp_path, rows)


TEXTS = ["the value of the list", "return it", "if it is to be then it is to be the value of it"]


@pytest.mark.parametrize("recipe", ["auto", "bf16"])
@pytest.mark.parametrize(
    ("task", "head", "texts"),
    [
        ("feature-extraction", "AutoModel", TEXTS),
        ("text-classification", "AutoModelForSequenceClassification", TEXTS),
        ("fill-mask", "AutoModelForMaskedLM", [f"{text} [MASK]" for text in TEXTS]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pipeline(task, head, texts, recipe, tiny_bert, capable):
    """transformers' pipelines, batched and padded: what they say of every real token."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    one = case("bert", head)
    stock, mine = one.build(), optimus.transform(one.build(), recipe, backend=capable)
    said = [
        transformers.pipeline(task, model=model, tokenizer=tokenizer)(texts, batch_size=3)
        for model in (stock, mine)
    ]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    theirs, ours = (numbers(result, lengths) for result in said)
    assert distance(ours, theirs, None) < (FP32 if recipe == "auto" else LOSSY["bf16"])


def numbers(result: list[Any], lengths: list[int]) -> torch.Tensor:
    """A pipeline's scores, or its features at real tokens, in one row."""
    rows = []
    for one, length in zip(result, lengths, strict=True):
        if isinstance(one, dict):
            rows.append(torch.tensor([one["score"]]))
        elif isinstance(one[0], dict):
            rows.append(torch.tensor([guess["score"] for guess in one]))
        else:
            rows.append(torch.tensor(one[0][:length]).flatten())
    return torch.cat(rows)


def test_offloaded(capable):
    """Weights that accelerate brings in for each call: the model works, and goes back."""
    from accelerate import cpu_offload

    stock, mine = BERT.build(), BERT.build()
    cpu_offload(mine.bert.encoder, execution_device=torch.device("cpu"))
    before = snapshot(mine, without=("forward", "_old_forward", "_hf_hook"))
    made = optimus.plan(mine, backend=capable)
    optimus.transform(mine, backend=capable)
    for kind in ("right", "ones"):
        with torch.no_grad():
            answers = [model(**batch(model, kind)) for model in (mine, stock)]
        assert distance(*answers, masks()[kind]) < FP32
    offloaded = {claim.path for claim in made.claims if claim.path.startswith("bert.encoder.")}
    assert offloaded == set()
    optimus.reverse(mine)
    assert snapshot(mine, without=("forward", "_old_forward", "_hf_hook")) == before
    with pytest.raises(NothingToDoError, match="is offloaded; cast the model before"):
        optimus.transform(mine, "bf16", backend=capable)


def test_dispatched(capable):
    """dispatch_model before and after a transform, and its hooks off again."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    stock = BERT.build()
    with torch.no_grad():
        expected = stock(**batch(stock))
    for first in (True, False):
        model = BERT.build()
        if first:
            dispatch_model(model, {"": "cpu"}, force_hooks=True)
        optimus.transform(model, backend=capable)
        if not first:
            dispatch_model(model, {"": "cpu"}, force_hooks=True)
        with torch.no_grad():
            assert distance(model(**batch(model)), expected, masks()["right"]) < FP32
        optimus.reverse(model)
        with torch.no_grad():
            assert identical(model(**batch(model)), expected)
        remove_hook_from_submodules(model)
        assert values(model.state_dict()) == values(stock.state_dict())


def test_transform_of_a_compiled_model(capable):
    """A compiled model is transformed in place, recompiles, and recompiles again when reversed."""
    stock = BERT.build()
    compiled = torch.compile(BERT.build(), backend="eager")
    with torch.no_grad():
        expected = stock(**batch(stock))
        assert distance(compiled(**batch(stock)), expected, None) < FP32
        assert optimus.transform(compiled, backend=capable) is compiled
        assert optimus.is_transformed(compiled)
        assert distance(compiled(**batch(stock)), expected, None) < FP32
        optimus.reverse(compiled)
        assert distance(compiled(**batch(stock)), expected, None) < FP32
    assert type(compiled._orig_mod) is type(stock)


# Inductor imports parts of torch that are deprecated in torch itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic, capable):
    """Real code from inductor: the packed weights are called, and the numbers are right."""
    one = case(PLAIN)
    torch._dynamo.reset()
    stock, mine = one.build(), optimus.transform(one.build(), backend=capable, check=False)
    whole = torch.compile(mine, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for rows in (4, 7):
            inputs = torch.linspace(-1, 1, rows * 256).view(rows, 256)
            assert distance(whole(inputs), stock(inputs), None) < FP32
    optimus.reverse(mine)
    with torch.no_grad():
        assert distance(whole(inputs), stock(inputs), None) < FP32


def test_autocast(capable):
    """Under torch.autocast the stock path answers, so that its casts are the stock casts."""
    stock, mine = BERT.build(), optimus.transform(BERT.build(), backend=capable)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        answers = [model(**batch(model, "ones")) for model in (mine, stock)]
    assert identical(*answers)


def test_loading_another_dtype(capable):
    """A checkpoint assigned in a dtype that cannot be packed is computed with as it is."""
    stock, mine = BERT.build(), optimus.transform(BERT.build(), backend=capable)
    state = BERT.build(seed=1).double().state_dict()
    for model in (stock, mine):
        model.load_state_dict(state, assign=True)
    with torch.no_grad():
        answers = [model(**batch(model)) for model in (mine, stock)]
    assert distance(*answers, masks()["right"]) < CLOSE[torch.float64]
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())


def test_moved_and_recast(capable):
    """half(), double() and to() while transformed do what they do to a stock model."""
    stock, mine = BERT.build(), optimus.transform(BERT.build(), backend=capable)
    for move in (torch.float64, torch.bfloat16, torch.float32):
        for model in (stock, mine):
            model.to(move)
        assert {p.dtype for p in mine.parameters()} == {move}
        with torch.no_grad():
            answers = [model(**batch(model)) for model in (mine, stock)]
        assert distance(*answers, masks()["right"]) < CLOSE[torch.bfloat16]
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())


@pytest.mark.parametrize("model_type", ["albert", "bert", "modernbert"])
def test_signature(model_type, capable):
    """Trainer, pipelines and others read from the forward which arguments there are."""
    stock = case(model_type).build()
    mine = optimus.transform(case(model_type).build(), backend=capable, check=False)
    assert inspect.signature(mine.forward) == inspect.signature(stock.forward)
