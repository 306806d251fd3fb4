"""Model: logprobs against a plain transformers forward, both layouts, chunks, precision islands, refusals."""

import contextlib
import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, join_group_of_one, make_config, make_model
from transformers import AutoModelForCausalLM
from transformers.distributed import mixin

from losses import LossOptions, policy_loss
from model import (
    ModelError,
    ModelSettings,
    bucket_rows,
    build,
    check_hook,
    make_batch,
    policy_logprobs,
    rows_attention,
)

join_group_of_one()

LENGTHS = [5, 17, 1, 9, 33, 2, 12, 30]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, root / kind, seed=i) for i, kind in enumerate(KINDS)}


def draw_rows(lengths=LENGTHS, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator) for n in lengths]
    wanted = [(torch.arange(n) > 0) & (torch.rand(n, generator=generator) < 0.6) for n in lengths]
    return rows, wanted


def gradients(model) -> list[torch.Tensor]:
    out = []
    for p in model.parameters():
        assert p.grad is not None
        out.append((p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone())
        p.grad = None
    return out


def plain_forward(path: str, rows, wanted):
    """(logprobs, entropies) of the wanted tokens, row by row, and the gradient of their sum."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs, entropies = [], []
    for row, asked in zip(rows, wanted, strict=True):
        every = (model(row[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        at = asked.nonzero().squeeze(1)
        logprobs.append(every[at - 1, row[at]])
        entropies.append(-(every.exp() * every).sum(-1)[at - 1])
    torch.cat(logprobs).sum().backward()
    return torch.cat(logprobs).detach(), torch.cat(entropies).detach(), gradients(model)


def close(a: list[torch.Tensor], b: list[torch.Tensor], limit: float) -> None:
    largest = max(float(x.abs().max()) for x in b)
    worst = max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
    assert worst <= limit * max(1.0, largest), f"gradients differ by {worst}, the largest is {largest}"


# ---- Logprobs ----


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_entropies_and_gradients_equal_a_plain_forward(models, kind):
    rows, wanted = draw_rows()
    logprobs, entropies, grads = plain_forward(models[kind], rows, wanted)
    for checkpointed in (False, True):
        model = build(models[kind], ModelSettings(gradient_checkpoint=checkpointed))
        for packed in (True, False):
            for chunk in (7, 1000):  # 7: several chunks, the last one not full
                got, entropy = policy_logprobs(
                    model, make_batch(rows, wanted, packed), TEMPERATURE, chunk, True
                )
                got.sum().backward()
                assert (got.detach() - logprobs).abs().max() < 1e-5
                assert (entropy - entropies).abs().max() < 1e-5
                close(gradients(model), grads, 2e-6)


@pytest.mark.parametrize("kind", ["dense_tied", "moe"])
def test_gradient_is_the_same_for_any_split_and_layout(models, kind):
    """prime-rl #2562, verl #6957: normalised per micro-batch. 1x8, 2x4, 8x1, packed and padded."""
    model = build(models[kind], ModelSettings())
    rows, wanted = draw_rows()
    generator = torch.Generator().manual_seed(2)
    advantages = [torch.randn(len(row), generator=generator) for row in rows]
    rollout = [-3 + torch.randn(len(row), generator=generator) for row in rows]
    tokens = float(sum(int(w.sum()) for w in wanted))
    options = LossOptions(0.2, 0.28, "token", "clip", 0.5, 2.0)
    results = []
    for size, packed in [(8, True), (4, True), (1, True), (8, False), (4, False), (1, False)]:
        total = 0.0
        for i in range(0, len(rows), size):
            part = slice(i, i + size)
            batch = make_batch(rows[part], wanted[part], packed)
            logprobs, _ = policy_logprobs(model, batch, 1.0, 16)
            columns = [
                torch.cat([x[w] for x, w in zip(c[part], wanted[part], strict=True)])
                for c in (rollout, advantages)
            ]
            mask = torch.ones(len(logprobs), dtype=torch.bool)
            loss, _ = policy_loss(logprobs, None, columns[0], columns[1], mask, tokens, options)
            loss.backward()
            total += loss.item()
        results.append((total, gradients(model)))
    for total, grads in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-5)
        close(grads, results[0][1], 1e-6)


def test_lm_head_never_sees_more_than_a_chunk(models):
    model = build(models["dense_untied"], ModelSettings())
    rows, wanted = draw_rows()
    seen = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[0]))
    logprobs, _ = policy_logprobs(model, make_batch(rows, wanted, True), 1.0, 10)
    logprobs.sum().backward()
    count = len(logprobs)
    assert max(seen) == 10
    assert sum(seen) == 2 * count  # once forward, once again when the backward recomputes it


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["dense_untied", "moe"])
def test_dummy_reaches_every_weight_with_a_zero_gradient(models, kind, packed):
    model = build(models[kind], ModelSettings())
    logprobs, entropy = policy_logprobs(model, make_batch([], [], packed), 1.0, 10, True)
    assert len(logprobs) == len(entropy) == 0
    logprobs.sum().backward()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model))


def test_first_token_of_a_row_cannot_be_asked_for():
    with pytest.raises(ValueError, match="first token"):
        make_batch([torch.arange(3)], [torch.ones(3, dtype=torch.bool)], True)


# ---- Packed attention ----


def test_buckets_hold_every_token_once_and_no_row_beside_one_twice_its_length():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(
            1, 200, (int(torch.randint(1, 20, (1,), generator=generator)),), generator=generator
        )
        index = bucket_rows(lengths)
        line = torch.arange(int(lengths.sum()))
        padded = torch.cat([line[take].flatten() for take in index.takes])
        assert torch.equal(padded[index.put], line)
        assert sum(t.numel() for t in index.takes) < 2 * len(line) + len(lengths)


def test_packed_attention_equals_each_row_alone():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 40, 1, 7, 38])
    q, k, v = (torch.randn(1, heads, int(lengths.sum()), 8, generator=generator) for heads in (4, 2, 2))
    together, _ = rows_attention(None, q, k, v, None, row_index=bucket_rows(lengths))
    at = 0
    for n in lengths.tolist():
        one_q, one_k, one_v = (x[:, :, at : at + n] for x in (q, k, v))
        alone, _ = rows_attention(None, one_q, one_k, one_v, None)
        assert (together[:, at : at + n] - alone).abs().max() < 1e-6
        at += n


# ---- Precision ----


@pytest.mark.parametrize("kind", ["moe", "dense_tied"])
def test_bf16_computes_layers_in_bf16_and_router_norm_and_head_in_fp32(models, kind):
    rows, wanted = draw_rows()
    exact, _ = policy_logprobs(build(models[kind], ModelSettings()), make_batch(rows, wanted, True), 1.0, 100)
    model = build(models[kind], ModelSettings(param_dtype="bfloat16"))
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def look(name):
        def hook(module, args, _):
            seen[name] = (module.weight.dtype, args[0].dtype)

        return hook

    watched = ["model.layers.1.self_attn.q_proj", "model.norm", "lm_head", "model.embed_tokens"]
    watched += ["model.layers.1.mlp.gate"] if kind == "moe" else []
    for name in watched:
        model.get_submodule(name).register_forward_hook(look(name))
    logprobs, _ = policy_logprobs(model, make_batch(rows, wanted, True), 1.0, 100)
    logprobs.sum().backward()
    assert seen["model.layers.1.self_attn.q_proj"] == (torch.bfloat16, torch.bfloat16)
    assert seen["lm_head"] == (torch.float32, torch.float32)
    assert seen["model.norm"][0] == seen["model.embed_tokens"][0] == torch.float32
    if kind == "moe":
        assert seen["model.layers.1.mlp.gate"][0] == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert 1e-5 < (logprobs - exact).abs().mean() < 0.1


# ---- Building ----


def test_building_leaves_no_hook_behind(models):
    check_hook()
    before = mixin.apply_fully_sharded_data_parallelism
    build(models["llama"], ModelSettings())
    assert mixin.apply_fully_sharded_data_parallelism is before


def test_missing_hook_is_refused_by_name(models, monkeypatch):
    monkeypatch.setattr(mixin, "apply_fully_sharded_data_parallelism", lambda model, fsdp_mesh: model)
    with pytest.raises(ModelError, match="apply_fully_sharded_data_parallelism"):
        build(models["llama"], ModelSettings())


def test_attention_of_another_model_from_the_same_config_does_not_change(models):
    config = make_config("dense_tied")
    config._attn_implementation = "eager"
    other = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    build(models["dense_tied"], ModelSettings())
    assert other.config._attn_implementation == "eager"


@contextlib.contextmanager
def changed_config(path: str, tmp_path: Path, **changes):
    copied = tmp_path / "changed"
    shutil.copytree(path, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    yield str(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_attention"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing keys model.layers.2"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "unexpected keys model.layers.1"),
    ],
)
def test_models_that_would_train_wrongly_are_refused(models, tmp_path, changes, message):
    with (
        changed_config(models["dense_tied"], tmp_path, **changes) as path,
        pytest.raises(ModelError, match=message),
    ):
        build(path, ModelSettings())


def test_unknown_path_and_dtype_are_refused(models):
    with pytest.raises(ModelError, match="not a directory"):
        build("somewhere/else", ModelSettings())
    with pytest.raises(ModelError, match="float16"):
        build(models["llama"], ModelSettings(param_dtype="float16"))
