"""Trainer: a rank's answers in this process, then real ranks over sockets: one against two, kill, restore."""

import contextlib
import inspect
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, join_group_of_one, make_model
from transformers import AutoModelForCausalLM
from transformers.distributed import mixin

import protocol
import trainer as module
from trainer import Trainer
from weights import load_into, verify_segment

ROOT = Path(__file__).resolve().parent.parent
WAIT_MS = 120_000


def test_the_private_hook_of_transformers_exists_with_its_signature():
    """Everything below stands on it: model.wrap replaces it while a model loads."""
    hook = mixin.apply_fully_sharded_data_parallelism
    assert list(inspect.signature(hook).parameters) == ["model", "mesh_manager"]
    assert "apply_fully_sharded_data_parallelism(model, mesh_manager)" in inspect.getsource(
        mixin.DistributedMixin.maybe_distribute_model
    )


join_group_of_one()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds = ["dense_tied", "moe", "dense_untied", "dense_tied_odd"]
    return {kind: make_model(kind, root / kind, seed=i) for i, kind in enumerate(kinds)}


def options(model_path: str, **changes) -> dict:
    optim = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "max_norm": 1.0}
    return {
        "model_path": model_path,
        "rank": 0,
        "world_size": 1,
        "rendezvous": "",
        "device": "cpu",
        "param_dtype": "float32",
        "attn_implementation": "sdpa",
        "gradient_checkpoint": False,
        "logprob_chunk": 32,
        "optim": optim,
        "seed": 0,
        "deterministic": True,
    } | changes


def draw_batch(lengths=(5, 17, 9, 33, 2, 12, 30, 8), seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Rows as the controller holds them."""
    g = np.random.default_rng(seed)
    rows = []
    for n in lengths:
        mask = (g.random(n) < 0.6) & (np.arange(n) > 0)
        rows.append(
            {
                "ids": g.integers(0, VOCAB_SIZE, n).astype(np.int32),
                "loss_mask": mask.astype(np.uint8),
                "rollout_logprobs": np.where(mask, g.normal(-4, 1, n), 0).astype(np.float32),
                "advantages": np.where(mask, g.normal(0, 1, n), 0).astype(np.float32),
            }
        )
    return rows


def frames_of(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = ["ids", "loss_mask", "rollout_logprobs", "advantages"] + (
        ["old_logprobs"] if "old_logprobs" in rows[0] else []
    )
    frames = {name: np.concatenate([row[name] for row in rows]) for name in names}
    return frames | {"lengths": np.array([len(row["ids"]) for row in rows], dtype=np.int32)}


def run_fields(step: int, micro_batches: list[list[int]], tokens: float, **changes) -> dict:
    loss = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "is_level": "token",
        "is_mode": "clip",
        "is_low": 0.5,
        "is_high": 2.0,
    }
    return {
        "step": step,
        "version": step,
        "micro_batches": micro_batches,
        "packed": True,
        "denominators": {"tokens": tokens},
        "lr": 1e-3,
        "temperature": 0.7,
        "loss": loss,
    } | changes


def tokens_of(rows) -> float:
    return float(sum(int(row["loss_mask"].sum()) for row in rows))


def give(rank: Trainer, step: int, rows, /, **changes) -> dict:
    """`rows` in one part, then `run`; changes are to the fields of `run`."""
    rank.answer("rows", {"step": step, "part": 0, "of": 1}, frames_of(rows))
    return rank.answer("run", run_fields(step, [list(range(len(rows)))], tokens_of(rows)) | changes, {})


# ---- One rank, in this process ----


@pytest.fixture(scope="module")
def rank(models) -> Trainer:
    return Trainer(options(models["dense_tied"]))


@pytest.mark.parametrize("kind", ["dense_tied", "moe"])
def test_report_does_not_depend_on_split_layout_or_dummies(models, kind):
    rows = draw_batch()
    splits = [
        [list(range(8))],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[i] for i in range(8)],
        [[7, 0, 3], [], [1, 2, 4, 5, 6]],
    ]
    reports = []
    for micro_batches in splits:
        for packed in (True, False):
            answer = give(Trainer(options(models[kind])), 0, rows, micro_batches=micro_batches, packed=packed)
            reports.append(answer["sums"] | {f"max_{k}": v for k, v in answer["maxima"].items()})
    for report in reports[1:]:
        assert report == pytest.approx(reports[0], rel=1e-5, abs=1e-6)
    assert reports[0]["tokens"] == tokens_of(rows) and reports[0]["max_skipped"] == 0
    assert reports[0]["max_grad_norm"] > 0 and reports[0]["entropy"] > 0


def test_logprobs_equal_a_plain_forward_and_first_tokens_are_zero(rank, models):
    rows = draw_batch(seed=3)
    _, frames = rank.answer(
        "logprobs",
        {"which": "policy", "temperature": 0.7},
        {k: frames_of(rows)[k] for k in ("ids", "lengths")},
    )
    plain = AutoModelForCausalLM.from_pretrained(models["dense_tied"])
    for row, got in zip(
        rows, np.split(frames["logprobs"], np.cumsum([len(r["ids"]) for r in rows])[:-1]), strict=True
    ):
        ids = torch.from_numpy(row["ids"]).long()
        every = (plain(ids[None]).logits[0] / 0.7).log_softmax(-1)
        want = torch.cat([torch.zeros(1), every[:-1].gather(1, ids[1:, None])[:, 0]])
        assert np.abs(got - want.detach().numpy()).max() < 1e-5


def test_logprobs_of_many_rows_are_computed_in_bounded_groups_and_come_back_in_order(rank, monkeypatch):
    frames = {k: frames_of(draw_batch(seed=3))[k] for k in ("ids", "lengths")}
    fields = {"which": "policy", "temperature": 1.0}
    whole = rank.answer("logprobs", fields, frames)[1]["logprobs"]
    monkeypatch.setattr(module, "FORWARD_TOKENS", 20)
    assert np.abs(rank.answer("logprobs", fields, frames)[1]["logprobs"] - whole).max() < 1e-5
    empty = {"ids": np.zeros(0, np.int32), "lengths": np.zeros(0, np.int32)}
    assert len(rank.answer("logprobs", fields, empty)[1]["logprobs"]) == 0


def test_logprobs_follow_every_step(models, tmp_path):
    """A forward without backward leaves weights gathered; the next must not see them stale."""
    rank = Trainer(options(models["dense_untied"]))
    frames = {k: frames_of(draw_batch(seed=3))[k] for k in ("ids", "lengths")}
    ids = torch.from_numpy(frames["ids"][:5]).long()
    for step in range(3):
        got = rank.answer("logprobs", {"which": "policy", "temperature": 1.0}, frames)[1]["logprobs"][:5]
        push = {"version": step, "transport": "file", "path": str(tmp_path / "segment")}
        table = rank.answer("push_weights", push, {})["tensors"]
        plain = AutoModelForCausalLM.from_pretrained(models["dense_untied"])
        load_into(plain, verify_segment(push["path"], table))
        every = plain(ids[None]).logits[0].log_softmax(-1)
        want = every[:-1].gather(1, ids[1:, None])[:, 0].detach().numpy()
        assert np.abs(got[1:] - want).max() < 1e-5
        give(rank, step, draw_batch(seed=step))


def test_mismatch_is_zero_when_rollout_logprobs_are_the_trainers_own(models):
    rank, rows = Trainer(options(models["moe"])), draw_batch()
    frames = {k: frames_of(rows)[k] for k in ("ids", "lengths")}
    own = rank.answer("logprobs", {"which": "policy", "temperature": 0.7}, frames)[1]["logprobs"]
    for row, logprobs in zip(rows, np.split(own, np.cumsum([len(r["ids"]) for r in rows])[:-1]), strict=True):
        row["rollout_logprobs"] = logprobs
    answer = give(rank, 0, rows)
    assert answer["maxima"]["mismatch_abs"] < 1e-5
    assert answer["sums"]["is_filtered"] == answer["sums"]["clipped"] == 0
    # another temperature is another distribution (trl #4159, prime-rl #697)
    assert give(Trainer(options(models["moe"])), 0, rows, temperature=1.0)["maxima"]["mismatch_abs"] > 0.1


def test_old_logprobs_make_a_ratio_that_can_be_clipped(models):
    rows = draw_batch()
    for row in rows:
        row["old_logprobs"] = row["rollout_logprobs"]
    answer = give(Trainer(options(models["dense_tied"])), 0, rows)
    assert answer["sums"]["clipped"] > 0 and answer["sums"]["kl_old"] != 0
    assert answer["sums"]["mismatch_abs"] == 0.0  # old is the trainer before the step


def test_values_at_untrained_tokens_do_not_matter_even_nan(models):
    rows, dirty = draw_batch(), draw_batch()
    for row in dirty:
        for name in ("rollout_logprobs", "advantages"):
            row[name][row["loss_mask"] == 0] = math.nan
    assert give(Trainer(options(models["moe"])), 0, dirty) == give(Trainer(options(models["moe"])), 0, rows)


def test_repeating_a_run_repeats_every_bit(models, tmp_path):
    tables = []
    for i in range(2):
        rank = Trainer(options(models["moe"]))
        for step in range(2):
            give(rank, step, draw_batch(seed=step))
        tables.append(
            rank.answer(
                "push_weights", {"version": 1, "transport": "file", "path": str(tmp_path / f"{i}")}, {}
            )
        )
    assert tables[0]["tensors"] == tables[1]["tensors"]  # checksums among them


def test_overflowing_step_is_skipped_and_reported_with_finite_numbers(models, tmp_path):
    rank = Trainer(options(models["dense_tied"]))
    push = {"version": 1, "transport": "file", "path": str(tmp_path / "segment")}
    before = rank.answer("push_weights", push, {})["tensors"]
    rows = draw_batch()
    for row in rows:
        row["advantages"] = np.where(row["loss_mask"], np.float32(3e38), np.float32(0))
    answer = give(rank, 0, rows)
    assert answer["maxima"]["skipped"] == 1.0
    assert all(math.isfinite(x) for part in ("sums", "maxima") for x in answer[part].values())
    assert "loss" not in answer["sums"] or "grad_norm" not in answer["maxima"]
    assert rank.answer("push_weights", push, {})["tensors"] == before
    assert give(rank, 1, draw_batch())["maxima"]["skipped"] == 0.0


def test_a_step_with_nothing_to_train_moves_nothing(models, tmp_path):
    rank = Trainer(options(models["dense_tied"]))
    push = {"version": 1, "transport": "file", "path": str(tmp_path / "segment")}
    before = rank.answer("push_weights", push, {})["tensors"]
    rows = draw_batch()
    for row in rows:
        row["loss_mask"][:] = 0
    answer = give(rank, 0, rows, denominators={"tokens": 0.0})
    assert answer["sums"]["loss"] == answer["sums"]["tokens"] == answer["maxima"]["grad_norm"] == 0
    assert rank.answer("push_weights", push, {})["tensors"] == before


def broken(**changes) -> list[dict[str, np.ndarray]]:
    rows = draw_batch()
    for name, (at, value) in changes.items():
        rows[1][name][at] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (broken(loss_mask=(0, 1)), "loss_mask"),
        (broken(ids=(3, VOCAB_SIZE)), "ids"),
        (broken(ids=(3, -1)), "ids"),
        (broken(loss_mask=(3, 1), advantages=(3, math.nan)), "advantages"),
        (broken(loss_mask=(3, 1), rollout_logprobs=(3, -math.inf)), "rollout_logprobs"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_by_field(rank, rows, field):
    with pytest.raises(module.WorkerError) as error:
        rank.answer("rows", {"step": 50, "part": 0, "of": 1}, frames_of(rows))
    assert (error.value.type, error.value.field) == ("bad_request", field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lengths": np.array([3], np.int32)}, "lengths"),
        ({"lengths": np.array([116, 0], np.int32)}, "lengths"),
        ({"advantages": np.zeros(3, np.float32)}, "advantages"),
    ],
)
def test_frames_that_do_not_fit_are_refused_by_name(rank, changes, field):
    with pytest.raises(module.WorkerError) as error:
        rank.answer("rows", {"step": 50, "part": 0, "of": 1}, frames_of(draw_batch()) | changes)
    assert (error.value.type, error.value.field) == ("bad_request", field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": 41}, "step"),
        ({"micro_batches": [[0, 1, 2, 3, 4, 5, 6]]}, "micro_batches"),
        ({"micro_batches": [[0, 1, 2, 3, 4, 5, 6, 7, 7]]}, "micro_batches"),
        ({"temperature": 0.0}, "temperature"),
        ({"lr": -1.0}, "lr"),
        ({"denominators": {"tokens": 0.0}}, "denominators.tokens"),
        ({"loss": run_fields(0, [], 0)["loss"] | {"is_mode": "drop"}}, "loss.is_mode"),
    ],
)
def test_a_run_that_does_not_fit_its_rows_is_refused_and_can_be_asked_again(models, changes, field):
    rank, rows = Trainer(options(models["dense_tied"])), draw_batch()
    with pytest.raises(module.WorkerError) as error:
        give(rank, 40, rows, **changes)
    assert (error.value.type, error.value.field) == ("bad_request", field)
    rank.answer("run", run_fields(40, [list(range(8))], tokens_of(rows)), {})
    with pytest.raises(module.WorkerError, match="no parts"):  # trained once
        rank.answer("run", run_fields(40, [list(range(8))], tokens_of(rows)), {})


def test_parts_must_come_in_order_and_all_of_them(models):
    rank, rows = Trainer(options(models["dense_tied"])), draw_batch()
    with pytest.raises(module.WorkerError, match="does not follow"):
        rank.answer("rows", {"step": 0, "part": 1, "of": 2}, frames_of(rows[:3]))
    rank.answer("rows", {"step": 0, "part": 0, "of": 2}, frames_of(rows[:3]))
    with pytest.raises(module.WorkerError, match="1 of 2 parts"):
        rank.answer("run", run_fields(0, [[0, 1, 2]], tokens_of(rows)), {})
    rank.answer("rows", {"step": 0, "part": 1, "of": 2}, frames_of(rows[3:]))
    fields = run_fields(0, [list(range(8))], tokens_of(rows))
    assert rank.answer("run", fields, {}) == give(Trainer(options(models["dense_tied"])), 0, rows)


def test_unknown_choices_are_unsupported(rank, tmp_path):
    frames = {k: frames_of(draw_batch())[k] for k in ("ids", "lengths")}
    for kind, fields, name in (
        ("logprobs", {"which": "reference", "temperature": 1.0}, "which"),
        ("push_weights", {"version": 1, "transport": "ipc", "path": str(tmp_path / "x")}, "transport"),
    ):
        with pytest.raises(module.WorkerError) as error:
            rank.answer(kind, fields, frames)
        assert (error.value.type, error.value.field) == ("unsupported", name)


# ---- Real ranks over real sockets ----


class Ranks:
    """The other end of the wire for a group of trainer processes."""

    def __init__(self, model_path: str, world_size: int, directory: Path):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.names = [f"trainer-{r}" for r in range(world_size)]
        self.peers: dict[str, bytes] = {}
        self.seq = dict.fromkeys(self.names, 0)
        self.asked: dict[str, dict[int, str]] = {name: {} for name in self.names}
        self.arrived: list[tuple[str, protocol.Message]] = []  # with a message that was taken
        self.logs = {name: directory / f"{name}-{os.urandom(4).hex()}.log" for name in self.names}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self.processes = {}
        for name in self.names:
            command = [
                sys.executable,
                str(ROOT / "workers" / "trainer.py"),
                "--endpoint",
                f"tcp://127.0.0.1:{port}",
            ]
            with open(self.logs[name], "wb") as log:
                self.processes[name] = subprocess.Popen(
                    [*command, "--worker-id", name],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment,
                )
            self.processes[name].stdin.write(b'{"secret": "s"}\n')
            self.processes[name].stdin.flush()
        rendezvous = f"file://{directory}/rendezvous-{os.urandom(4).hex()}"
        for _ in self.names:
            name, _ = self.receive("hello")
            rank = int(name.split("-")[1])
            told = options(model_path, rank=rank, world_size=world_size, rendezvous=rendezvous)
            self.send(name, "welcome", {"incarnation": 0, "options": told, "heartbeat_ms": 60_000})
        self.info = [self.receive("ready")[1].fields["info"] for _ in self.names]

    def send(self, name: str, kind: str, fields: dict, frames: dict | None = None, **rest) -> int:
        seq = self.seq[name]
        self.socket.send_multipart([self.peers[name], *protocol.encode(kind, seq, fields, frames, **rest)])
        self.seq[name] += 1
        return seq

    def receive(self, *kinds: str) -> tuple[str, protocol.Message]:
        while True:
            if not self.arrived and not self.socket.poll(WAIT_MS):
                logs = "\n".join(log.read_text() for log in self.logs.values())
                raise TimeoutError(f"no {' or '.join(kinds)} in time\n{logs}")
            if not self.arrived:
                peer, *parts = self.socket.recv_multipart()
                name = peer.decode().split(".")[0]
                self.peers.setdefault(name, peer)
                self.arrived += [(name, m) for m in protocol.decode_all(parts, self.asked[name].get)]
            name, message = self.arrived.pop(0)
            if message.kind in kinds:
                return name, message

    def ask(self, name: str, kind: str, fields: dict, frames: dict | None = None) -> None:
        self.asked[name][self.seq[name]] = kind
        self.send(name, kind, fields, frames, id=self.seq[name])

    def ask_one(self, kind: str, fields: dict, frames: dict | None = None) -> protocol.Message:
        self.ask(self.names[0], kind, fields, frames)
        return self.receive("ok", "error")[1]

    def ask_all(
        self, kind: str, fields: list[dict] | dict, frames: list[dict] | dict | None = None
    ) -> list[protocol.Message]:
        """One request to every rank, the same or one each; answers in rank order."""
        for r, name in enumerate(self.names):
            mine = frames[r] if isinstance(frames, list) else frames
            self.ask(name, kind, fields[r] if isinstance(fields, list) else fields, mine)
        answers = dict(self.receive("ok", "error") for _ in self.names)
        for name, answer in answers.items():
            assert answer.kind == "ok", f"{name}: {answer.fields}\n{self.logs[name].read_text()}"
        return [answers[name] for name in self.names]

    def step(self, step: int, rows: list, micro_batches: list[list[list[int]]]) -> tuple[dict, dict]:
        """Rank r trains rows r, r + world size, ...; returns merged (sums, maxima)."""
        n = len(self.names)
        shares = [rows[r::n] for r in range(n)]
        self.ask_all("rows", {"step": step, "part": 0, "of": 1}, [frames_of(share) for share in shares])
        answers = self.ask_all("run", [run_fields(step, m, tokens_of(rows)) for m in micro_batches])
        sums, maxima = {}, {}
        for answer in answers:
            for key, value in answer.fields["sums"].items():
                sums[key] = sums.get(key, 0.0) + value
            for key, value in answer.fields["maxima"].items():
                maxima[key] = max(maxima.get(key, value), value)
        assert len({a.fields["maxima"]["grad_norm"] for a in answers}) == 1  # all ranks agree
        return sums, maxima

    def stop(self) -> list[int]:
        for name in self.names:
            self.ask(name, "stop", {})
        return [self.processes[name].wait(timeout=WAIT_MS / 1000) for name in self.names]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
        self.context.destroy(0)


@pytest.fixture(scope="module")
def start(models, tmp_path_factory):
    """Starts groups of ranks and ends what is left of them with the module."""
    directory, started = tmp_path_factory.mktemp("ranks"), []

    def one(kind: str, world_size: int) -> Ranks:
        started.append(Ranks(models[kind], world_size, directory))
        return started[-1]

    yield one
    for ranks in started:
        ranks.close()


# Unequal shares, and rank 1 ends with a dummy.
TWO_RANKS = [[[0, 1], [2, 3]], [[0, 1, 2, 3], []]]


@pytest.fixture(scope="module")
def two_ranks(models, start, tmp_path_factory) -> dict:
    """One run of two ranks for the tests below: two steps, a save, a third step, killed, restored."""
    work, seen = tmp_path_factory.mktemp("two"), {}
    ranks = start("moe", 2)
    seen["info"] = ranks.info
    push = {"version": 0, "transport": "file", "path": str(work / "segment")}
    answers = ranks.ask_all("push_weights", push)
    seen["first_push"] = [a.fields["tensors"] for a in answers]
    seen["loaded"] = {
        k: v.clone() for k, v in verify_segment(push["path"], answers[0].fields["tensors"]).items()
    }
    rows = draw_batch(seed=9)
    frames = [frames_of(rows), frames_of(rows[:1])]  # as many micro-batches as the larger share needs
    logprobs = ranks.ask_all(
        "logprobs",
        {"which": "policy", "temperature": 1.0},
        [{k: f[k] for k in ("ids", "lengths")} for f in frames],
    )
    seen["logprobs"] = [a.frames["logprobs"].copy() for a in logprobs]
    seen["steps"] = [ranks.step(s, draw_batch(seed=s), TWO_RANKS) for s in range(2)]
    ranks.ask_all("save", {"step": 2, "path": str(work / "saved")})
    seen["saved"] = str(work / "saved")
    seen["third"] = ranks.step(2, draw_batch(seed=2), TWO_RANKS)
    seen["after_third"] = ranks.ask_all("push_weights", push)[0].fields["tensors"]
    ranks.ask_all("export", {"path": str(work / "export")})
    seen["export"] = str(work / "export")
    for process in ranks.processes.values():
        os.killpg(process.pid, signal.SIGKILL)

    again = start("moe", 2)
    seen["restored_step"] = [a.fields["step"] for a in again.ask_all("restore", {"path": seen["saved"]})]
    seen["third_again"] = again.step(2, draw_batch(seed=2), TWO_RANKS)
    seen["after_third_again"] = again.ask_all("push_weights", push)[0].fields["tensors"]
    seen["exit_codes"] = again.stop()
    return seen


def test_two_ranks_load_the_weights_of_the_files(two_ranks, models):
    files = load_file(f"{models['moe']}/model.safetensors")
    assert two_ranks["loaded"].keys() == files.keys()
    assert all(torch.equal(two_ranks["loaded"][name], files[name]) for name in files)
    assert two_ranks["first_push"][1] == []  # only rank 0 writes
    parameters = sum(t.numel() for t in files.values())
    assert [info["parameters"] for info in two_ranks["info"]] == [parameters, parameters]


def test_two_ranks_take_the_steps_of_one(two_ranks, models):
    rank = Trainer(options(models["moe"]))
    for step, (sums, maxima) in enumerate(two_ranks["steps"]):
        alone = give(rank, step, draw_batch(seed=step))
        limit = 1e-5 if step == 0 else 1e-3  # Adam's first step magnifies rounding of small gradients
        assert sums["loss"] == pytest.approx(alone["sums"]["loss"], rel=limit)
        assert maxima["grad_norm"] == pytest.approx(alone["maxima"]["grad_norm"], rel=limit)
        assert sums == pytest.approx(alone["sums"], rel=limit, abs=1e-4)


def test_two_ranks_give_the_logprobs_of_one(two_ranks, models):
    frames = {k: frames_of(draw_batch(seed=9))[k] for k in ("ids", "lengths")}
    alone = Trainer(options(models["moe"])).answer(
        "logprobs", {"which": "policy", "temperature": 1.0}, frames
    )[1]["logprobs"]
    both, first = two_ranks["logprobs"]
    assert np.abs(both - alone).max() < 1e-5
    assert np.abs(first - alone[: len(first)]).max() < 1e-5


def test_killed_ranks_go_on_from_the_checkpoint_bit_for_bit(two_ranks):
    assert two_ranks["restored_step"] == [2, 2]
    assert two_ranks["third_again"] == two_ranks["third"]
    assert two_ranks["after_third_again"] == two_ranks["after_third"]


def test_one_rank_goes_on_from_a_checkpoint_of_two(two_ranks, models):
    rank = Trainer(options(models["moe"]))
    assert rank.answer("restore", {"path": two_ranks["saved"]}, {}) == {"step": 2}
    alone = give(rank, 2, draw_batch(seed=2))
    assert alone["sums"]["loss"] == pytest.approx(two_ranks["third"][0]["loss"], rel=1e-5)
    assert alone["maxima"]["grad_norm"] == pytest.approx(two_ranks["third"][1]["grad_norm"], rel=1e-5)


def test_two_ranks_export_what_they_push(two_ranks, models):
    exported = load_file(f"{two_ranks['export']}/model.safetensors")
    assert sorted(exported) == sorted(e["name"] for e in two_ranks["after_third"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(two_ranks["export"], output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (
        json.loads(Path(two_ranks["export"], "config.json").read_text())["model_type"]
        == model.config.model_type
    )


def test_ranks_end_with_status_0_on_stop(two_ranks):
    assert two_ranks["exit_codes"] == [0, 0]


def test_a_rank_answers_over_the_wire_survives_bad_requests_and_dies_of_a_failure(start, models, tmp_path):
    ranks = start("dense_tied", 1)
    info = ranks.info[0]
    assert (info["model"], info["vocab_size"], info["dtype"]) == (models["dense_tied"], VOCAB_SIZE, "float32")
    rows = draw_batch()
    for answer, field in (
        (ranks.ask_one("run", run_fields(0, [[0]], 1.0)), "step"),
        (ranks.ask_one("restore", {"path": str(tmp_path / "nowhere")}), "path"),
        (ranks.ask_one("rows", {"step": 0, "part": 1, "of": 1}, frames_of(rows)), "part"),
    ):
        assert (answer.kind, answer.fields["type"], answer.fields["field"]) == ("error", "bad_request", field)
    sums, maxima = ranks.step(0, rows, [[[0, 1, 2, 3], [4, 5, 6, 7]]])
    alone = give(Trainer(options(models["dense_tied"])), 0, rows, micro_batches=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (sums, maxima) == (alone["sums"], alone["maxima"])  # float fields keep every bit
    answer = ranks.ask_one("push_weights", {"version": 1, "transport": "file", "path": "/nowhere/segment"})
    assert (answer.kind, answer.fields["type"]) == ("error", "fatal")
    assert ranks.processes["trainer-0"].wait(timeout=WAIT_MS / 1000) == 1
    assert "Traceback" in ranks.logs["trainer-0"].read_text()
    assert "No such file or directory" in answer.fields["traceback"]


@pytest.mark.parametrize("kind", ["dense_tied_odd", "moe"])
def test_two_ranks_push_the_weights_that_they_have_just_trained(kind, models, start, tmp_path):
    ranks = start(kind, 2)
    push = {"version": 0, "transport": "file", "path": str(tmp_path / "segment")}
    pushed = [ranks.ask_all("push_weights", push)[0].fields["tensors"]]  # also gathers before the first step
    for step in range(2):
        ranks.step(step, draw_batch(seed=step), TWO_RANKS)
        pushed.append(ranks.ask_all("push_weights", push)[0].fields["tensors"])
    # An engine with these weights must give the trainer's logprobs: no weight was left behind.
    segment = {k: v.clone() for k, v in verify_segment(push["path"], pushed[-1]).items()}
    rows = draw_batch(seed=9)
    frames = {k: v for k, v in frames_of(rows).items() if k in ("ids", "lengths")}
    answers = ranks.ask_all("logprobs", {"which": "policy", "temperature": 1.0}, [frames, frames])
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    load_into(model, segment)
    at = 0
    for length in frames["lengths"]:
        ids = torch.tensor(frames["ids"][at : at + length].astype("int64"))[None]
        with torch.no_grad():
            logprobs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        assert abs(answers[0].frames["logprobs"][at + 1 : at + length] - wanted).max() <= 1e-5
        at += length
    for before, after in itertools.pairwise(pushed):
        assert all(a["crc32"] != b["crc32"] for a, b in zip(before, after, strict=True))  # every tensor moved
