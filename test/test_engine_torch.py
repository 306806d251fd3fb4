"""The torch engine: every logprob against a plain forward, seeds in any batch, refits, stops, the process.

The reference is the same checkpoint loaded again with transformers' own attention, one sequence at a time.
The engine is driven directly except at the end of the file, where the worker process answers over a socket.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq
from tiny_models import IM_END, KINDS, VOCAB_SIZE, draw_weights, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, TopKLogitsWarper, TopPLogitsWarper

import engine_torch
import protocol
import slot_attention
from model import ModelError
from runtime import Request, Runtime, WorkerError
from sampling import restrict, sample, uniforms
from slot_attention import split_runs
from slot_engine import Engine, load_model, prepare_model
from text_stream import TextStream
from weights import hub_tensors, write_segment

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8, "seed": 0}
PLAIN |= {"stop": [], "stop_token_ids": []}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    return {kind: make_model(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@functools.cache
def loaded(path: str):
    return load_model(path, "float32", "cpu")


@functools.cache
def plain(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def dense(paths) -> Driver:
    return Driver(paths["dense_tied"])


def reference(path: str) -> Any:
    return copy.deepcopy(plain(path))


class Turn:
    """One request and all that the engine said about it."""

    def __init__(self, prompt, temperature: float, session: str):
        self.prompt, self.temperature = [int(i) for i in prompt], temperature
        self.session = session
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.text = ""
        self.ended: dict | None = None

    @property
    def reason(self) -> str | None:
        return self.ended["reason"] if self.ended else None

    @property
    def cached(self) -> int:
        assert self.ended
        return self.ended["cached_tokens"]


class Driver:
    """An engine, driven step by step, and its turns by handle."""

    def __init__(self, path: str, max_requests=64, max_len=512, prefill_tokens=256, model=None):
        model = model or copy.deepcopy(loaded(path))
        self.path = path
        self.engine = Engine(
            model, path, max_requests=max_requests, max_len=max_len, prefill_tokens=prefill_tokens
        )
        self.turns: dict[int, Turn] = {}

    def start(
        self, prompt, session="s", already=0, want_text=False, heads=0, want_routes=False, **sampling
    ) -> Turn:
        fields = {"rollout_id": "r", "attempt": 0, "turn": 0, "session_id": session, "already": already}
        fields |= {"want_text": want_text, "heads": heads, "want_routes": want_routes}
        fields["sampling"] = PLAIN | sampling
        handle = self.engine.submit(fields, np.array(prompt, dtype=np.int32))
        turn = self.turns[handle] = Turn(prompt, (PLAIN | sampling)["temperature"], session)
        return turn

    def handle(self, turn: Turn) -> int:
        return next(handle for handle, other in self.turns.items() if other is turn)

    def take(self, event) -> None:
        if event is None:
            return
        fields, frames = event
        protocol.encode("tokens", 0, fields, frames)  # fits the wire
        at = 0
        for i, (handle, count) in enumerate(
            zip(frames["handles"].tolist(), frames["counts"].tolist(), strict=True)
        ):
            turn = self.turns[handle]
            assert turn.ended is None
            turn.ids += frames["ids"][at : at + count].tolist()
            turn.logprobs += frames["logprobs"][at : at + count].tolist()
            turn.versions += [fields["version"]] * count
            turn.text += fields["texts"][i] if fields["texts"] else ""
            at += count
        assert at == len(frames["ids"])
        for ended in fields["ended"]:
            assert self.turns[ended["handle"]].ended is None
            self.turns[ended["handle"]].ended = ended

    def step(self, count=1) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def generate(self, prompt, **more) -> Turn:
        turn = self.start(prompt, **more)
        self.run()
        return turn

    def abort(self, *turns: Turn) -> None:
        self.take(self.engine.abort([self.handle(turn) for turn in turns]))

    def pause(self, epoch: int, mode="keep", clear_cache=True) -> None:
        self.take(self.engine.pause(epoch, mode, clear_cache))

    def paused(self) -> tuple[dict, list[int]]:
        """Fields and totals of the reply to the last pause."""
        assert self.engine.pause_answer
        fields, frames = self.engine.pause_answer
        return fields, frames["totals"].tolist()

    def load(self, version: int, segment: str, table: list, last=True) -> dict:
        source = {"transport": "file", "path": segment}
        return self.engine.load_weights(
            {"version": version, "source": source, "tensors": table, "last": last}
        )

    def score(self, *rows: list[int]) -> np.ndarray:
        flat, lengths = [i for row in rows for i in row], [len(row) for row in rows]
        return self.engine.score(np.array(flat, dtype=np.int32), np.array(lengths, dtype=np.int32))


@torch.no_grad()
def plain_logprobs(model, ids, temperature=1.0) -> np.ndarray:
    """(n,) of every id after the first; entry 0 is 0."""
    logits = model(torch.tensor([list(ids)])).logits[0].float() / (temperature or 1.0)
    out = np.zeros(len(ids), dtype=np.float32)
    out[1:] = logits[:-1].log_softmax(-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].numpy()
    return out


def worst(model, *turns: Turn) -> float:
    """Largest |engine logprob - plain forward|."""
    gaps = [0.0]
    for turn in turns:
        wanted = plain_logprobs(model, turn.prompt + turn.ids, turn.temperature)[len(turn.prompt) :]
        gaps.append(gap(wanted, turn.logprobs))
    return max(gaps)


def gap(a, b) -> float:
    """Largest difference; two empty lists have none."""
    return float(np.abs(np.subtract(a, b)).max(initial=0))


def ids_of(text: str) -> list[int]:
    return make_tokenizer().encode(text)


def some_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def write_weights(path: str, segment: str, seed: int):
    """(model, table) of the same shape with other weights, as a trainer would push them."""
    model = reference(path)
    draw_weights(model, seed)
    model.tie_weights()
    return model, write_segment(segment, hub_tensors(model))[0]


# ---- Logprobs ----


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_ragged_arrivals_and_second_turns_equal_a_plain_forward(paths, kind):
    rng = random.Random(1)
    driver = Driver(paths[kind], max_requests=24, prefill_tokens=40)
    waiting = [(some_ids(rng, rng.choice([1, 2, 7, 30, 61, 130])), f"s{i}") for i in range(64)]
    second: set[str] = set()
    while waiting or driver.engine.busy:
        for _ in range(rng.randrange(4)):
            if waiting and (driver.engine.handle == 0).any():
                prompt, session = waiting.pop(0)
                sampling = {
                    "temperature": rng.choice([1.0, 0.6]),
                    "seed": rng.randrange(1000),
                    "max_tokens": rng.randrange(1, 25),
                }
                driver.start(prompt, session=session, **sampling)
        driver.step()
        for turn in [t for t in driver.turns.values() if t.ended and t.session not in second]:
            second.add(turn.session)
            if len(second) % 2:
                waiting.insert(0, (turn.prompt + turn.ids + some_ids(rng, 1 + len(second) % 9), turn.session))
    assert len(driver.turns) > 90
    assert sum(turn.cached > 0 for turn in driver.turns.values()) > 10
    assert {turn.reason for turn in driver.turns.values()} == {"length"}
    assert worst(reference(paths[kind]), *driver.turns.values()) <= TOLERANCE


@pytest.mark.parametrize("cost", [0, 10**9])
def test_rows_of_very_different_lengths_are_exact_however_they_share_calls(dense, monkeypatch, cost):
    monkeypatch.setitem(slot_attention.CALL_COST, "cpu", cost)
    rng = random.Random(2)
    turns = [
        dense.start(some_ids(rng, n), max_tokens=m, seed=n)
        for n, m in [(300, 9), (3, 30), (90, 4), (5, 30), (2, 2), (60, 20)]
    ]
    dense.run()  # rows 2 and 4 end first and leave holes
    assert worst(reference(dense.path), *turns) <= TOLERANCE


def test_runs_split_where_a_long_row_would_make_short_ones_expensive():
    def cut(slots, lengths, cost):
        return [(r.low, r.high, r.length) for r in split_runs(np.array(slots), np.array(lengths), cost)]

    assert cut([0, 1, 2], [10, 10, 10], 5) == [(0, 3, 10)]
    assert cut([0, 1, 2], [10, 900, 10], 50) == [(0, 1, 10), (1, 2, 900), (2, 3, 10)]
    assert cut([0, 1, 2], [10, 900, 10], 5000) == [(0, 3, 900)]
    assert cut([0, 4], [10, 10], 50) == [(0, 5, 10)]
    assert cut([0, 9], [10, 10], 50) == [(0, 1, 10), (9, 10, 10)]
    assert cut([], [], 50) == []


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_1(dense):
    model = reference(dense.path)
    turn = dense.generate(ids_of("hello"), temperature=0.0, top_k=3, top_p=0.5, max_tokens=12)
    assert worst(model, turn) <= TOLERANCE
    with torch.no_grad():
        logits = model(torch.tensor([turn.prompt + turn.ids])).logits[0]
    assert turn.ids == logits[len(turn.prompt) - 1 : -1].argmax(-1).tolist()


def warped(logits: Any, top_k: int, top_p: float) -> torch.Tensor:
    """What transformers samples from."""
    ids: Any = None  # neither looks at them
    logits = TopKLogitsWarper(top_k)(ids, logits) if top_k else logits
    return TopPLogitsWarper(top_p)(ids, logits) if top_p < 1 else logits


@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.8), (1, 1.0), (10_000, 0.01), (0, 1e-9)]
)
def test_top_k_and_top_p_keep_what_the_warpers_of_transformers_keep(top_k, top_p):
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = logits[:, 9]  # ties
    wanted = warped(logits, top_k, top_p)
    got = restrict(logits, np.full(40, top_k), np.full(40, top_p))
    assert torch.equal(torch.isinf(got), torch.isinf(wanted))
    kept = ~torch.isinf(got)
    assert torch.equal(got[kept], logits[kept])


@pytest.mark.parametrize("kind", ["dense_untied", "moe"])
def test_logprobs_with_top_k_and_top_p_are_those_of_the_distribution_drawn_from(paths, kind):
    driver, model = Driver(paths[kind]), reference(paths[kind])
    rng = random.Random(3)
    limits = [(50, 1.0), (0, 0.8), (20, 0.7), (0, 1.0)]
    turns = [
        driver.start(some_ids(rng, 20), temperature=0.9, top_k=k, top_p=p, seed=i)
        for i, (k, p) in enumerate(limits)
    ]
    driver.run()
    for turn, (top_k, top_p) in zip(turns, limits, strict=True):
        with torch.no_grad():
            x = model(torch.tensor([turn.prompt + turn.ids])).logits[0, len(turn.prompt) - 1 : -1] / 0.9
        wanted = warped(x, top_k, top_p).log_softmax(-1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
        assert (wanted - torch.tensor(turn.logprobs)).abs().max() <= TOLERANCE


def test_draws_follow_the_distribution_and_never_take_an_impossible_id():
    n = 40_000
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, 2.0, -torch.inf]]).expand(n, -1)
    draws = uniforms(np.full(n, 7, dtype=np.uint64), np.arange(n, dtype=np.uint64))
    ids, logprobs = sample(logits, np.ones(n), np.zeros(n, dtype=int), np.ones(n), draws)
    assert np.isfinite(logprobs).all()
    wanted = logits[0].softmax(-1).numpy()
    assert gap(np.bincount(ids, minlength=6) / n, wanted) < 0.01
    ends = np.array([0.5 * 2**-23, 1 - 2**-24], dtype=np.float32)
    assert sample(logits[:2], np.ones(2), np.zeros(2, dtype=int), np.ones(2), ends)[0].tolist() == [1, 4]


def test_uniforms_are_even_and_unrelated_between_neighbouring_seeds_and_indexes():
    seeds, indexes = (x.ravel().astype(np.uint64) for x in np.meshgrid(np.arange(300), np.arange(300)))
    u = uniforms(seeds, indexes).astype(np.float64).reshape(300, 300)
    assert u.min() > 0 and u.max() < 1
    assert gap(np.histogram(u, bins=10, range=(0, 1))[0] / 9000, 1) < 0.05
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_a_tiny_temperature_is_greedy_and_finite(dense):
    cold = dense.generate(ids_of("abc"), temperature=1e-300)
    assert cold.ids == dense.generate(ids_of("abc"), temperature=0.0).ids
    assert set(cold.logprobs) == {0.0}


# ---- Seeds ----


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(paths):
    rng = random.Random(4)
    requests = [
        (some_ids(rng, 1 + 13 * i % 90), {"seed": i, "max_tokens": 12, "temperature": 0.8}) for i in range(40)
    ]
    batch, narrow = Driver(paths["moe"]), Driver(paths["moe"], max_requests=2, prefill_tokens=7)
    together = [batch.start(prompt, **sampling) for prompt, sampling in requests]
    batch.run()
    for i in (0, 7, 39):
        alone = narrow.generate(requests[i][0], **requests[i][1])
        assert alone.ids == together[i].ids
        assert np.allclose(alone.logprobs, together[i].logprobs, atol=TOLERANCE)
    other = narrow.generate(requests[0][0], **(requests[0][1] | {"seed": -5}))
    assert other.ids != together[0].ids


def test_a_resumed_request_continues_as_if_never_interrupted(paths):
    whole = Driver(paths["llama"]).generate(ids_of("question"), seed=2**53 - 1, max_tokens=20)
    for already in (1, 13):
        driver = Driver(paths["llama"])
        rest = driver.generate(
            whole.prompt + whole.ids[:already], already=already, seed=2**53 - 1, max_tokens=20 - already
        )
        assert rest.ids == whole.ids[already:]


# ---- Prefixes ----


def test_a_second_turn_runs_only_what_is_new(dense):
    first = dense.generate(ids_of("a first question"), session="chat", max_tokens=10)
    before = dense.engine.stats["prefill_tokens"]
    second = dense.generate(first.prompt + first.ids + ids_of("more"), session="chat")
    assert second.cached == len(first.prompt) + 9  # the last sampled token never ran
    assert dense.engine.stats["prefill_tokens"] == before + 5
    assert dense.engine.cache.slots == slot_attention.FIRST_SLOTS and dense.engine.known[1] == 0
    assert worst(reference(dense.path), first, second) <= TOLERANCE


def test_a_group_shares_one_prefill_of_its_prompt(dense):
    rng = random.Random(5)
    prompts = [some_ids(rng, 40), some_ids(rng, 300)]  # the longer one takes several steps
    turns = [
        dense.start(prompt, session=f"{n}{i}", seed=i) for n, prompt in enumerate(prompts) for i in range(8)
    ]
    dense.run()
    assert [turn.cached for turn in turns] == [0] + 7 * [39] + [0] + 7 * [299]
    assert dense.engine.stats["prefill_tokens"] == 340
    assert worst(reference(dense.path), *turns) <= TOLERANCE


def test_members_that_said_the_same_share_the_prefill_of_their_next_turn(dense):
    rng = random.Random(8)
    prompt, more, other = some_ids(rng, 30), some_ids(rng, 9), some_ids(rng, 9)
    first = [dense.start(prompt, session=f"m{i}", seed=1 + (i == 3), max_tokens=6) for i in range(4)]
    dense.run()
    before = dense.engine.stats["prefill_tokens"]
    adds = [more, more, more, other]
    second = [
        dense.start(turn.prompt + turn.ids + add, session=f"m{i}", seed=i)
        for i, (turn, add) in enumerate(zip(first, adds, strict=True))
    ]
    dense.run()
    # 10 tokens for the first and for the one that said something else; the others copy 9 and run the last.
    assert dense.engine.stats["prefill_tokens"] == before + 20
    assert [turn.cached for turn in second] == [35, 44, 44, 35]
    assert worst(reference(dense.path), *first, *second) <= TOLERANCE


def test_too_little_to_share_is_not_waited_for(dense):
    prompt = ids_of("a prompt of its own")
    turns = [dense.start(prompt[:12], session=f"w{i}", seed=i) for i in range(2)]
    dense.step()
    assert [len(turn.ids) for turn in turns] == [1, 1]


def test_a_fork_of_a_conversation_copies_and_leaves_the_original_whole(dense):
    rng = random.Random(6)
    trunk = dense.generate(some_ids(rng, 50), session="a", max_tokens=20)
    history = trunk.prompt + trunk.ids
    forks = [
        dense.start(history[:cut] + some_ids(rng, 5), session=f"f{cut}", seed=cut) for cut in (30, 45, 60)
    ]
    dense.run()
    assert [turn.cached for turn in forks] == [30, 45, 60]
    again = dense.generate(history + some_ids(rng, 3), session="a")
    assert again.cached == 69
    assert worst(reference(dense.path), *forks, again) <= TOLERANCE


def test_a_repeated_prompt_still_runs_its_last_token(dense):
    first = dense.generate(ids_of("same"), seed=1)
    again = dense.generate(ids_of("same"), seed=1)
    assert again.cached == 3 and again.ids == first.ids
    assert dense.generate(ids_of("s")).cached == 0


def test_the_session_decides_between_equal_prefixes(dense):
    a, b = (
        dense.start(ids_of("same words"), session="a", seed=1),
        dense.start(ids_of("same words"), session="b", seed=2),
    )
    dense.run()
    slots = {session: int(np.flatnonzero(dense.engine.session == session)[0]) for session in ("a", "b")}
    assert a.ids != b.ids
    dense.start(ids_of("same words"), session="b")
    assert dense.engine.handle[slots["b"]] and not dense.engine.handle[slots["a"]]


def test_storage_grows_with_what_is_used(paths):
    driver = Driver(paths["dense_tied"], max_requests=256, max_len=2000)
    driver.generate(ids_of("short"))
    assert (driver.engine.cache.slots, driver.engine.cache.positions) == (8, 64)
    rng = random.Random(7)
    turns = [driver.start(some_ids(rng, 40), session=str(i), max_tokens=60) for i in range(20)]
    driver.run()
    assert (driver.engine.cache.slots, driver.engine.cache.positions) == (32, 128)
    turns.append(driver.generate(some_ids(rng, 1990), max_tokens=10))
    assert driver.engine.cache.positions <= 2000
    assert worst(reference(driver.path), *turns) <= TOLERANCE


# ---- Refits ----


@pytest.mark.parametrize("kind", ["dense_tied", "moe"])
def test_after_a_swap_with_clear_tokens_have_the_logprobs_of_the_new_weights(paths, tmp_path, kind):
    driver, old = Driver(paths[kind], prefill_tokens=30), reference(paths[kind])
    new, table = write_weights(paths[kind], str(tmp_path / "w"), seed=5)
    rng = random.Random(8)
    group = some_ids(rng, 25)
    turns = [
        driver.start(p, seed=i, max_tokens=20)
        for i, p in enumerate([group, group, some_ids(rng, 4), some_ids(rng, 90)])
    ]
    driver.step(8)
    counts = [len(turn.ids) for turn in turns]
    assert min(counts) > 0
    driver.pause(1)
    assert driver.paused() == ({"version": 0}, counts)
    assert driver.load(3, str(tmp_path / "w"), table)["loaded"] == len(table)
    driver.engine.resume(1)
    driver.run()
    for turn, count in zip(turns, counts, strict=True):
        assert turn.versions == [0] * count + [3] * (20 - count)
        sequence, at = turn.prompt + turn.ids, len(turn.prompt) + count
        assert gap(plain_logprobs(old, sequence)[len(turn.prompt) : at], turn.logprobs[:count]) <= TOLERANCE
        assert gap(plain_logprobs(new, sequence)[at:], turn.logprobs[count:]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["dense_untied", "moe"])
def test_after_a_swap_that_keeps_the_cache_old_keys_serve_new_weights_but_no_new_request(
    paths, tmp_path, kind
):
    driver, old = Driver(paths[kind]), reference(paths[kind])
    new, table = write_weights(paths[kind], str(tmp_path / "w"), seed=6)
    rng = random.Random(9)
    idle = [driver.generate(some_ids(rng, 30), session=session, max_tokens=2) for session in "bc"]
    turn = driver.start(some_ids(rng, 30), session="a", seed=1, max_tokens=20)
    driver.step(6)
    turn_before = len(turn.ids)
    driver.pause(1, clear_cache=False)
    # Both came before the new weights but have not begun: one found a prefix in its slot, one did not.
    queued = [driver.start(idle[0].prompt + [1], session="b"), driver.start(turn.prompt, session="d")]
    driver.load(1, str(tmp_path / "w"), table)
    driver.engine.resume(1)
    late = [driver.start(turn.prompt, session="e", seed=2), driver.start(idle[1].prompt + [2], session="c")]
    driver.run()

    sequence, at = turn.prompt + turn.ids, len(turn.prompt) + turn_before
    cache = DynamicCache()
    with torch.no_grad():
        # The newest token had not run when the weights changed, so its keys are new.
        old(torch.tensor([sequence[: at - 1]]), past_key_values=cache, use_cache=True)
        logits = new(torch.tensor([sequence[at - 1 :]]), past_key_values=cache, use_cache=True).logits[0, :-1]
    mixed = logits.log_softmax(-1).gather(1, torch.tensor(sequence[at:])[:, None])[:, 0].numpy()
    assert gap(mixed, turn.logprobs[turn_before:]) <= TOLERANCE
    assert gap(plain_logprobs(new, sequence)[at:], turn.logprobs[turn_before:]) > 100 * TOLERANCE
    again = driver.generate(turn.prompt + turn.ids, session="a")
    assert [queued[0].cached, late[1].cached, again.cached] == [0, 0, 30]  # 30: what others ran, not `turn`
    assert worst(new, *queued, *late, again) <= TOLERANCE


def test_a_corrupted_segment_is_fatal_and_leaves_the_model_untouched(dense, tmp_path):
    segment = str(tmp_path / "w")
    _, table = write_weights(dense.path, segment, seed=7)
    before = {name: tensor.clone() for name, tensor in dense.engine.model.state_dict().items()}
    dense.pause(1)

    def refused(table: list, **more) -> str:
        with pytest.raises(WorkerError) as caught:
            dense.load(1, segment, table, **more)
        assert caught.value.type == "fatal"
        assert all(
            torch.equal(before[name], tensor) for name, tensor in dense.engine.model.state_dict().items()
        )
        assert dense.engine.version == 0
        return str(caught.value)

    assert table[-1]["name"] in refused(table[:-1])
    wrong = [*table[:-1], table[-1] | {"name": "model.nothing.weight"}]
    assert table[-1]["name"] in refused(wrong)
    square = next(i for i, t in enumerate(table) if len(t["shape"]) == 2 and t["shape"][0] != t["shape"][1])
    turned = [t | {"shape": t["shape"][::-1]} if i == square else t for i, t in enumerate(table)]
    assert table[square]["name"] in refused(turned)
    with open(segment, "r+b") as file:
        file.seek(table[-1]["offset"])
        byte = file.read(1)
        file.seek(table[-1]["offset"])
        file.write(bytes([byte[0] ^ 1]))
    assert f"Checksum of {table[-1]['name']}" in refused(table)


def test_weights_sent_in_parts_count_with_the_last(dense, tmp_path):
    segment = str(tmp_path / "w")
    new, table = write_weights(dense.path, segment, seed=8)
    dense.pause(1)
    dense.load(1, segment, table[:3], last=False)
    assert dense.engine.version == 0
    with pytest.raises(WorkerError, match="the last one was not") as caught:
        dense.engine.resume(1)
    assert caught.value.type == "fatal"
    dense.load(1, segment, table[3:])
    dense.engine.resume(1)
    assert worst(new, dense.generate(ids_of("x"))) <= TOLERANCE


def test_weights_are_refused_unless_paused_and_from_an_unknown_transport(dense, tmp_path):
    with pytest.raises(WorkerError, match="not paused") as caught:
        dense.load(1, str(tmp_path / "w"), [])
    assert caught.value.type == "bad_request"
    dense.pause(1)
    with pytest.raises(WorkerError, match="nccl") as caught:
        dense.engine.load_weights(
            {"version": 1, "source": {"transport": "ipc", "path": ""}, "tensors": [], "last": True}
        )
    assert (caught.value.type, caught.value.field) == ("unsupported", "source.transport")


# ---- Pause, abort, score ----


def test_a_drain_takes_effect_when_what_came_before_has_ended_and_later_requests_wait(dense):
    early = dense.start(ids_of("one"), max_tokens=6)
    dense.step(2)
    dense.pause(1, "drain")
    late = dense.start(ids_of("two"), max_tokens=2)
    assert dense.engine.pause_answer is None and not dense.engine.paused
    with pytest.raises(WorkerError, match="still drains"):
        dense.engine.resume(1)
    dense.run()
    assert early.reason == "length" and late.ids == []
    assert dense.engine.paused and dense.paused() == ({"version": 0}, [0])
    dense.engine.resume(1)
    dense.run()
    assert late.reason == "length"


def test_a_drain_can_be_cut_short_by_abort_and_by_another_pause(dense):
    first, second = dense.start(ids_of("one"), max_tokens=100), dense.start(ids_of("two"), max_tokens=100)
    dense.step(3)
    dense.pause(1, "drain")
    dense.abort(first, second)
    assert dense.engine.pause_answer is not None
    dense.engine.resume(1)
    third = dense.start(ids_of("three"), max_tokens=100)
    dense.pause(2, "drain")
    dense.pause(3, "abort")
    assert third.reason == "abort" and dense.engine.pause_answer is not None


def test_a_cancelled_drain_goes_on(dense):
    turn = dense.start(ids_of("one"), max_tokens=5)
    dense.pause(1, "drain")
    dense.engine.cancel_drain()
    dense.run()
    assert turn.reason == "length" and not dense.engine.paused
    dense.pause(1)
    assert dense.engine.paused


def test_pause_is_idempotent_per_epoch_and_keeps_counts(dense):
    turn = dense.start(ids_of("one"), max_tokens=30)
    dense.step(4)
    dense.pause(1, clear_cache=False)
    answer = dense.engine.pause_answer
    dense.step(3)
    dense.pause(1, "abort")
    assert dense.engine.pause_answer is answer and turn.reason is None and len(turn.ids) == 4
    dense.engine.resume(1)
    dense.pause(1)
    assert not dense.engine.paused
    for call, field in (
        (lambda: dense.pause(0), "epoch"),
        (lambda: dense.pause(2, "stop"), "mode"),
        (lambda: dense.engine.resume(7), "epoch"),
    ):
        with pytest.raises(WorkerError) as caught:
            call()
        assert (caught.value.type, caught.value.field) == ("bad_request", field)
    dense.run()
    assert worst(reference(dense.path), turn) <= TOLERANCE


def test_abort_gives_the_partial_turn_and_leaves_the_others_alone(dense):
    gone, kept = dense.start(ids_of("one"), max_tokens=50), dense.start(ids_of("two"), max_tokens=9, seed=1)
    dense.step(5)
    dense.abort(gone)
    dense.abort(gone)  # already over: no error, and counted
    dense.run()
    assert (gone.reason, len(gone.ids), kept.reason) == ("abort", 5, "length")
    assert dense.engine.stats["late_aborts"] == 1
    assert worst(reference(dense.path), gone, kept) <= TOLERANCE


def test_score_equals_a_plain_forward_and_disturbs_nothing(paths):
    driver, model = Driver(paths["moe"], prefill_tokens=50), reference(paths["moe"])
    quiet = Driver(paths["moe"]).generate(ids_of("steady"), max_tokens=12)
    turn = driver.start(ids_of("steady"), max_tokens=12)
    driver.step(4)
    driver.pause(1)
    rng = random.Random(10)
    rows = [some_ids(rng, n) for n in (30, 1, 0, 12, 200, 2)]
    got = driver.score(*rows)
    wanted = np.concatenate([plain_logprobs(model, row) for row in rows if row])
    assert gap(got, wanted) <= TOLERANCE
    driver.engine.resume(1)
    driver.run()
    assert turn.ids == quiet.ids


def test_score_right_after_loading_sees_the_new_weights(dense, tmp_path):
    new, table = write_weights(dense.path, str(tmp_path / "w"), seed=9)
    dense.pause(1)
    dense.load(1, str(tmp_path / "w"), table)
    probe = ids_of("probe")
    assert gap(dense.score(probe), plain_logprobs(new, probe)) <= TOLERANCE


# ---- Refusals ----


@pytest.mark.parametrize(
    "field, more",
    [
        ("sampling.temperature", {"temperature": -1.0}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.top_p", {"top_p": 1.5}),
        ("sampling.top_k", {"top_k": -1}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("sampling.max_tokens", {"max_tokens": 512}),
        ("sampling.stop", {"stop": [""]}),
        ("sampling.stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [VOCAB_SIZE]}),
        ("prompt", {"prompt": [1] * 512}),
        ("already", {"already": 2}),
        ("already", {"already": -1}),
        ("heads", {"heads": 1}),
        ("want_routes", {"want_routes": True}),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(dense, field, more):
    with pytest.raises(WorkerError) as caught:
        dense.start(**({"prompt": [65]} | more))
    assert caught.value.field == field
    assert caught.value.type == ("unsupported" if field in ("heads", "want_routes") else "bad_request")
    assert not dense.engine.busy


def test_more_than_max_requests_are_overloaded_until_one_ends(paths):
    driver = Driver(paths["dense_tied"], max_requests=2)
    for text in ("a", "b"):
        driver.start(ids_of(text))
    with pytest.raises(WorkerError) as caught:
        driver.start(ids_of("c"))
    assert caught.value.type == "overloaded" and caught.value.retry_after_ms
    driver.run()
    assert driver.generate(ids_of("c")).reason == "length"


def test_a_request_whose_logits_are_not_finite_ends_with_an_error_and_spoils_no_other(paths):
    driver = Driver(paths["dense_untied"])
    weight = driver.engine.embedding.weight
    sound = [
        driver.start(ids_of("ok"), session=str(i), seed=i, max_tokens=30, stop_token_ids=ids_of("Z"))
        for i in range(3)
    ]
    before = weight.clone()
    weight[ids_of("Z")] = torch.nan
    broken = driver.start(ids_of("long text with a Z in it"), session="3")
    driver.run()
    assert (broken.reason, broken.ids) == ("error", [])
    weight.copy_(before)
    slot = int(np.flatnonzero(driver.engine.session == "3")[0])
    # Beside a longer row the slot is read beyond its own text, where the broken keys lay.
    later = [
        driver.start(ids_of("a much longer text than the broken one")),
        driver.start(ids_of("it"), session="3", seed=9),
    ]
    assert driver.engine.handle[slot] == driver.handle(later[1])
    driver.run()
    assert [turn.reason for turn in later] == ["length", "length"]
    assert worst(reference(paths["dense_untied"]), *sound, *later) <= TOLERANCE


@pytest.mark.parametrize("change", [{"model_type": "mamba"}, {"rope_parameters": {"rope_type": "dynamic"}}])
def test_a_model_that_cannot_be_served_exactly_is_refused(paths, change):
    model = reference(paths["llama"])
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=r"mamba|dynamic"):
        prepare_model(model, torch.float32, "cpu")


def test_an_unknown_dtype_is_refused(paths):
    with pytest.raises(ValueError, match="float8"):
        load_model(paths["llama"], "float8", "cpu")


# ---- Stops and text ----


def test_a_stop_id_ends_the_turn_and_is_its_last_id(dense):
    free = dense.generate(ids_of("go"), seed=3, max_tokens=40)
    stop = free.ids[10]
    turn = dense.generate(ids_of("go"), seed=3, max_tokens=40, stop_token_ids=[IM_END, stop, 1])
    assert turn.reason == "stop" and turn.ended["detail"] is None
    assert turn.ids == free.ids[: free.ids.index(stop) + 1]


def test_a_stop_id_at_the_limit_is_a_stop(dense):
    free = dense.generate(ids_of("go"), seed=3, max_tokens=1)
    assert dense.generate(ids_of("go"), seed=3, max_tokens=1, stop_token_ids=free.ids).reason == "stop"


def forced(driver: Driver, text: str) -> None:
    """Makes the policy say these ids: whatever it is asked, the id after each id is certain."""
    order = ids_of(text)
    assert len(set(order)) == len(order)
    table = torch.zeros(VOCAB_SIZE, dtype=torch.long)
    for now, following in itertools.pairwise(order):
        table[now] = following

    engine = driver.engine

    def certain(slots):
        last = torch.from_numpy(engine.ids[slots, engine.known[slots] - 1]).long()
        return 1000.0 * torch.nn.functional.one_hot(table[last], VOCAB_SIZE).float()

    original = engine._advance
    engine._advance = lambda slots, logits: original(slots, certain(slots))


def test_a_stop_string_over_several_tokens_ends_the_turn_with_all_of_its_ids(dense):
    forced(dense, "x andSTOP!")
    turn = dense.generate(ids_of("x"), max_tokens=10, stop=["never", "STOP"], want_text=True)
    assert (turn.reason, turn.ended["detail"], turn.text) == ("stop", "STOP", " andSTOP")
    assert turn.ids == ids_of(" andSTOP")


def test_a_stop_string_may_begin_in_what_was_sampled_before_but_not_end_there(dense):
    forced(dense, "abcdefgh")
    rest = dense.generate(ids_of("zabcd"), already=4, max_tokens=4, stop=["cde"])
    assert (rest.reason, rest.ids) == ("stop", ids_of("e"))
    whole_before = dense.generate(ids_of("zabcd"), already=4, max_tokens=4, stop=["bcd"])
    assert (whole_before.reason, whole_before.ids) == ("length", ids_of("efgh"))
    in_the_prompt = dense.generate(ids_of("zabcd"), already=0, max_tokens=4, stop=["cde"])
    assert (in_the_prompt.reason, in_the_prompt.ids) == ("length", ids_of("efgh"))


def test_a_stop_string_can_be_a_special_token(dense):
    forced(dense, "a</tool_call>b")
    turn = dense.generate(ids_of("a"), max_tokens=3, stop=["</tool_call>"], want_text=True)
    assert (turn.reason, turn.text) == ("stop", "</tool_call>")


def test_text_comes_in_pieces_that_join_to_the_decoded_turn(dense):
    wanting, silent = (
        dense.start(ids_of("q"), seed=1, max_tokens=60, want_text=True),
        dense.start(ids_of("r"), max_tokens=60),
    )
    dense.run()
    assert wanting.text == dense.engine._decode(wanting.ids)
    assert silent.text == ""


def test_an_unfinished_character_is_held_back_and_given_out_at_the_end(dense):
    forced(dense, "x猫")
    turn = dense.start(ids_of("x"), max_tokens=3, want_text=True)
    dense.step(2)
    assert (len(turn.ids), turn.text) == (2, "")
    dense.step()
    assert turn.text == "猫"
    cut = dense.start(ids_of("x"), max_tokens=9, want_text=True)
    dense.step(2)
    dense.abort(cut)
    assert (cut.reason, cut.text) == ("abort", "\ufffd")


def test_a_text_stream_joins_to_the_whole_for_any_bytes():
    tokenizer, rng = make_tokenizer(), random.Random(11)
    for _ in range(30):
        ids = (
            ids_of("ä猫🐈 plain ")[rng.randrange(5) :] + some_ids(rng, 60) + ids_of("🐈‍⬛ end<|im_end|>") * 3
        )
        already = rng.randrange(4)
        stream = TextStream(
            lambda ids: str(tokenizer.decode(list(ids))), ids_of("prompt") + ids[:already], already, []
        )
        pieces = [stream.push(token)[0] for token in ids[already:]] + [stream.end()]
        whole, before = str(tokenizer.decode(ids)), str(tokenizer.decode(ids[:already]))
        assert "".join(pieces) == whole[len(before) - before.endswith("\ufffd") :]


# ---- bf16 ----


@pytest.mark.parametrize("kind", ["dense_tied", "moe"])
def test_bf16_keeps_head_norm_embedding_and_routers_in_fp32(paths, kind):
    model = load_model(paths[kind], "bfloat16", "cpu")
    types = {name: p.dtype for name, p in model.named_parameters()}
    whole = {n for n, t in types.items() if t == torch.float32}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= whole
    assert all("layers" not in n or n.endswith("mlp.gate.weight") for n in whole)
    driver = Driver(paths[kind], model=model)
    rng = random.Random(12)
    turns = [driver.start(some_ids(rng, 10 + i), seed=i, max_tokens=20) for i in range(6)]
    driver.run()
    exact = reference(paths[kind])
    for turn in turns:
        sequence, n = turn.prompt + turn.ids, len(turn.prompt)
        for other in (plain_logprobs(exact, sequence), driver.score(sequence)):
            assert np.abs(other[n:] - turn.logprobs).mean() < 0.1  # the bound of the parity probe


# ---- The worker ----


class Script:
    """Stands for Runtime: hands out what the test queued, a list per look, and records what is said."""

    def __init__(self, *looks: list[Request]):
        self.looks = list(looks)
        self.said: list[tuple] = []
        self.stats: dict[str, float] = {}
        self.options: dict = {}

    def receive(self, timeout: float | None) -> list[Request]:
        if self.looks:
            return self.looks.pop(0)
        raise SystemExit(0)

    def reply(self, request, fields, frames=None) -> None:
        protocol.prepare("ok", fields or {}, frames, re=request.id, answers=request.kind)
        self.said.append((request.kind, fields))

    def reply_error(self, request, exc) -> None:
        self.said.append((request.kind, exc))

    def refuse_input(self, reason) -> None:
        raise SystemExit(str(reason))

    def send(self, kind, fields, frames) -> None:
        protocol.prepare(kind, fields, frames)
        self.said.append((kind, [ended["reason"] for ended in fields["ended"]]))


def ask(kind: str, **fields) -> Request:
    return Request(kind, 1, fields, {})


def ask_generate(**more) -> Request:
    fields = {"rollout_id": "r", "attempt": 0, "turn": 0, "session_id": "s", "already": 0, "want_text": False}
    fields |= {"heads": 0, "want_routes": False, "sampling": PLAIN | more}
    return Request("generate", 1, fields, {"prompt": np.array([65], dtype=np.int32)})


def played(driver: Driver, *looks: list[Request]) -> list[tuple]:
    script = Script(*looks)
    with pytest.raises(SystemExit):
        engine_torch.Loop(cast(Runtime, script), driver.engine).run()
    return script.said


def test_the_reply_to_generate_comes_before_its_tokens_and_stop_lets_what_runs_finish(dense):
    said = played(dense, [ask_generate(max_tokens=3)])
    assert [kind for kind, _ in said] == ["generate", "tokens", "tokens", "tokens"]
    assert said[-1][1] == ["length"]


def test_a_draining_pause_is_answered_last_while_others_are_answered(dense):
    pause = ask("pause", epoch=1, mode="drain", clear_cache=True)
    said = played(dense, [ask_generate(max_tokens=3), pause], [ask("abort", handles=[99])])
    assert [kind for kind, _ in said] == ["generate", "tokens", "abort", "tokens", "tokens", "pause"]


def test_endings_of_a_pause_that_aborts_come_before_its_reply(dense):
    pause = ask("pause", epoch=1, mode="abort", clear_cache=True)
    said = played(dense, [ask_generate(max_tokens=90)], [pause])
    assert said[-2:] == [("tokens", ["abort"]), ("pause", {"version": 0})]


def test_a_pause_cancelled_while_it_drains_is_answered_so_and_nothing_is_paused(dense):
    pause = ask("pause", epoch=1, mode="drain", clear_cache=True)
    pause.cancelled = True
    said = played(dense, [ask_generate(max_tokens=2), pause], [ask("resume", epoch=1)])
    assert [(kind, getattr(what, "type", None)) for kind, what in said if kind != "tokens"] == [
        ("generate", None),
        ("pause", "cancelled"),
        ("resume", "bad_request"),
    ]
    assert said[-1] == ("tokens", ["length"])


def test_a_refused_request_is_an_answer_and_the_engine_goes_on(dense):
    said = played(
        dense, [ask_generate(top_p=3.0), ask("pause", epoch=1, mode="now", clear_cache=True), ask("rows")]
    )
    assert [what.type for _, what in said] == ["bad_request", "bad_request", "unsupported"]


def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_cause(tmp_path, monkeypatch):
    script = Script()
    script.options = {"model_path": str(tmp_path), "dtype": "float32", "device": "cpu"}
    monkeypatch.setattr(engine_torch.Runtime, "connect", lambda *_: script)
    with pytest.raises(SystemExit, match=str(tmp_path)):
        engine_torch.main()


class Controller:
    """The other end of the wire, for one engine process."""

    def __init__(self, options: dict):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.process = subprocess.Popen(
            [
                sys.executable,
                ROOT / "workers" / "engine_torch.py",
                "--endpoint",
                f"tcp://127.0.0.1:{port}",
                "--worker-id",
                "engine-0",
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        assert self.process.stdin
        self.process.stdin.write(b'{"secret": "s"}\n')
        self.process.stdin.flush()
        self.seq, self.kinds = 0, {}
        self.events: list = []
        self.arrived: list[protocol.Message] = []  # with a message that was taken
        self.peer = b""
        self.hello = self.wait("hello")
        self.send("welcome", {"incarnation": 0, "options": options, "heartbeat_ms": 60_000})
        self.info = self.wait("ready").fields["info"]

    def send(self, kind, fields, frames=None, **rest) -> int:
        self.socket.send_multipart([self.peer, *protocol.encode(kind, self.seq, fields, frames, **rest)])
        self.seq += 1
        return self.seq - 1

    def ask(self, kind, fields, frames=None) -> int:
        self.kinds[self.seq] = kind
        return self.send(kind, fields, frames, id=self.seq)

    def wait(self, kind, re=None):
        """The next message of this kind; `tokens` that come before it are kept in `events`."""
        while True:
            if not self.arrived:
                assert self.socket.poll(60_000), f"no {kind} within 60 s"
                self.peer, *parts = self.socket.recv_multipart()
                self.arrived += protocol.decode_all(parts, self.kinds.get)
            message = self.arrived.pop(0)
            if message.kind == "tokens":
                self.events.append(message)
            if message.kind == kind and re in (None, message.re):
                return message

    def request(self, kind, fields, frames=None):
        return self.wait("ok", self.ask(kind, fields, frames))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stderr):
            assert stream
            stream.close()
        self.context.destroy(0)


@pytest.fixture
def worker(paths):
    sizes = {"max_requests": 8, "max_len": 128, "prefill_tokens": 64, "seed": 0}
    controller = Controller({"model_path": paths["dense_tied"], "device": "cpu", "dtype": "float32"} | sizes)
    yield controller
    controller.close()


def test_the_process_serves_a_whole_life_over_a_socket(worker, paths, tmp_path):
    assert worker.hello.fields["capabilities"]["transports"] == ["file", "nccl"]
    assert worker.info["vocab_size"] == VOCAB_SIZE and worker.info["max_len"] == 128
    new, table = write_weights(paths["dense_tied"], str(tmp_path / "w"), seed=3)

    request = ask_generate(max_tokens=100)
    generate = worker.ask("generate", request.fields, request.frames)
    pause = worker.ask("pause", {"epoch": 1, "mode": "keep", "clear_cache": True})
    handle = worker.wait("ok", generate).fields["handle"]
    paused = worker.wait("ok", pause)
    made = sum(len(event.frames["ids"]) for event in worker.events)
    assert paused.frames["handles"].tolist() == [handle] and paused.frames["totals"].tolist() == [made]
    source = {"transport": "file", "path": str(tmp_path / "w")}
    load = {"version": 1, "source": source, "tensors": table, "last": True}
    assert worker.request("load_weights", load).fields["loaded"] == len(table)
    probe = np.array(ids_of("probe"), dtype=np.int32)
    scored = worker.request("score", {}, {"ids": probe, "lengths": np.array([5], dtype=np.int32)})
    assert scored.fields["version"] == 1
    assert gap(scored.frames["logprobs"], plain_logprobs(new, probe.tolist())) <= TOLERANCE
    assert sum(len(event.frames["ids"]) for event in worker.events) == made
    worker.request("resume", {"epoch": 1})

    worker.request("stop", {})  # what runs finishes first
    while not any(event.fields["ended"] for event in worker.events):
        worker.wait("tokens")
    assert worker.process.wait(timeout=60) == 0
    ids = np.concatenate([event.frames["ids"] for event in worker.events]).tolist()
    versions = [event.fields["version"] for event in worker.events for _ in event.frames["ids"]]
    logprobs = np.concatenate([event.frames["logprobs"] for event in worker.events])
    assert versions == [0] * made + [1] * (100 - made)
    assert gap(plain_logprobs(new, [65, *ids])[1 + made :], logprobs[made:]) <= TOLERANCE
