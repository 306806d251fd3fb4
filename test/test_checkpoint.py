"""Checkpoints: the step after a restore is bit for bit the one that would have come; exports load."""

import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import join_group_of_one, make_model, make_tokenizer
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
from checkpoint import CheckpointError
from model import ModelSettings, build, make_batch, policy_logprobs
from optim import Optimizer, OptimSettings

join_group_of_one()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, root / kind, seed=i) for i, kind in enumerate(["moe", "dense_tied"])}


def fresh(path: str, **settings):
    model = build(path, ModelSettings(**settings))
    return model, Optimizer(model, OptimSettings())


def train(model, optimizer: Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 264, (n,), generator=generator) for n in (9, 20)]
    batch = make_batch(rows, [torch.arange(len(row)) > 0 for row in rows], True)
    logprobs, _ = policy_logprobs(model, batch, 1.0, 100)
    (-logprobs.mean()).backward()
    return optimizer.step(lr=0.01).grad_norm


def bits(model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in checkpoint.trainer_state(model, optimizer).items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "new")
    model, optimizer = fresh(models["moe"])
    train(model, optimizer, 1)
    checkpoint.save(path, model, optimizer, step=1)
    return path


@pytest.mark.parametrize("kind", ["moe", "dense_tied"])
def test_the_step_after_a_restore_is_the_one_that_would_have_come(models, kind, tmp_path):
    model, optimizer = fresh(models[kind])
    train(model, optimizer, 1)
    train(model, optimizer, 2)
    at_save = bits(model, optimizer)
    checkpoint.save(str(tmp_path / "new"), model, optimizer, step=2)
    assert same(bits(model, optimizer), at_save)
    norm = train(model, optimizer, 3)
    after = bits(model, optimizer)

    other, its_optimizer = fresh(models[kind])
    train(other, its_optimizer, 77)  # moments and weights to be overwritten
    assert checkpoint.restore(str(tmp_path / "new"), other, its_optimizer) == 2
    assert same(bits(other, its_optimizer), at_save)
    assert train(other, its_optimizer, 3) == norm
    assert same(bits(other, its_optimizer), after)


def test_random_state_comes_back(models, saved, tmp_path):
    model, optimizer = fresh(models["moe"])
    torch.manual_seed(5)
    checkpoint.save(str(tmp_path / "new"), model, optimizer, step=0)
    drawn = torch.rand(3)
    checkpoint.restore(str(tmp_path / "new"), model, optimizer)
    assert torch.equal(torch.rand(3), drawn)


def test_nothing_is_written_over_a_checkpoint(models, saved):
    model, optimizer = fresh(models["moe"])
    before = {name: os.stat(os.path.join(saved, name)).st_mtime_ns for name in os.listdir(saved)}
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        checkpoint.save(saved, model, optimizer, step=2)
    assert {name: os.stat(os.path.join(saved, name)).st_mtime_ns for name in os.listdir(saved)} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.model.norm.weight"), "this model has no model.model.norm.weight"),
        (lambda state: state.update({"model.extra": torch.zeros(1)}), "it has no model.extra"),
        (
            lambda state: state.update({"optim.step.lm_head.weight": torch.zeros(3)}),
            r"lm_head.weight is \[\], want \[3\]",
        ),
    ],
)
def test_a_tensor_missing_extra_or_of_another_shape_is_an_error_and_changes_nothing(
    models, saved, monkeypatch, change, message
):
    """DCP itself skips, silently, what one of the two sides lacks."""
    model, optimizer = fresh(models["moe"])
    before = bits(model, optimizer)
    original = checkpoint.trainer_state

    def changed(*args):
        state = original(*args)
        change(state)
        return state

    monkeypatch.setattr(checkpoint, "trainer_state", changed)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(saved, model, optimizer)
    monkeypatch.undo()
    assert same(bits(model, optimizer), before)


def test_another_model_and_a_broken_directory_are_refused(models, saved, tmp_path):
    model, optimizer = fresh(models["dense_tied"])
    with pytest.raises(CheckpointError, match="Cannot restore"):
        checkpoint.restore(saved, model, optimizer)
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.restore(str(tmp_path), model, optimizer)


# ---- Export ----


@pytest.mark.parametrize("kind", ["moe", "dense_tied"])
def test_export_loads_in_stock_transformers_with_tokenizer_and_template(models, kind, tmp_path):
    model, optimizer = fresh(models[kind])
    train(model, optimizer, 1)
    path = str(tmp_path / "export")
    checkpoint.export(path, model, models[kind], "float32")
    ids = torch.arange(30)
    wanted = [torch.arange(30) > 0]
    logprobs, _ = policy_logprobs(model, make_batch([ids], wanted, True), 1.0, 100)
    both: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    loaded, report = both
    assert not report["missing_keys"] and not report["unexpected_keys"]
    every = loaded(ids[None]).logits[0].log_softmax(-1)
    assert (every[:-1].gather(1, ids[1:, None])[:, 0] - logprobs).abs().max() < 1e-5
    assert (
        load_file(f"{path}/model.safetensors").keys() == load_file(f"{models[kind]}/model.safetensors").keys()
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template == make_tokenizer().chat_template
    assert tokenizer("a<|im_end|>")["input_ids"] == make_tokenizer()("a<|im_end|>")["input_ids"]


def test_large_exports_are_cut_into_files_with_an_index(models, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    model, _ = fresh(models["moe"])
    path = str(tmp_path / "export")
    checkpoint.export(path, model, models["moe"], "float32")
    weights = [name for name in os.listdir(path) if name.endswith(".safetensors")]
    assert len(weights) > 3 and all(os.path.getsize(f"{path}/{name}") < 130_000 for name in weights)
    original = AutoModelForCausalLM.from_pretrained(models["moe"]).state_dict()
    assert same(dict(AutoModelForCausalLM.from_pretrained(path).state_dict()), dict(original))


def test_bf16_export_says_so_and_keeps_the_router_exact(models, tmp_path):
    model, _ = fresh(models["moe"], param_dtype="bfloat16")
    path = str(tmp_path / "export")
    checkpoint.export(path, model, models["moe"], "bfloat16")
    with open(f"{path}/config.json") as file:
        assert json.load(file)["dtype"] == "bfloat16"
    tensors, original = (load_file(f"{p}/model.safetensors") for p in (path, models["moe"]))
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(tensors[router], original[router])
    assert tensors["model.layers.1.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_nothing_is_exported_over_a_model(models):
    model, _ = fresh(models["moe"])
    with pytest.raises(CheckpointError, match="holds a model already"):
        checkpoint.export(models["moe"], model, models["moe"], "float32")
