"""Weights past the file system: buckets, then broadcasts between real trainers and engines, over gloo."""

import importlib.util
import os
import signal
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from controller import Controller, Worker, engine_options, train_one, trainer_options
from tiny_models import make_model

from transport import Address, cut, fill, receive, take
from weights import DTYPE_NAMES, WeightsError

needs_vllm = pytest.mark.skipif(
    os.environ.get("MOLT_VLLM") != "all" or importlib.util.find_spec("vllm") is None,
    reason="takes a minute and vLLM: npm run prove vllm",
)
ROWS = [[5, 9, 40, 3, 77, 12, 8, 200, 30], [1, 2, 3], [70, 71, 72, 73, 74, 75]]


def tensors_and_table(shapes, dtype: torch.dtype = torch.float32):
    tensors, table, offset = [], [], 0
    for i, shape in enumerate(shapes):
        tensor = (torch.arange(torch.Size(shape).numel()) + 1000 * i).to(dtype).view(shape)
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        entry = {"name": f"t{i}", "dtype": DTYPE_NAMES[dtype], "shape": list(shape), "offset": offset}
        table.append(entry | {"bytes": len(data), "crc32": zlib.crc32(data)})
        tensors.append((f"t{i}", tensor))
        offset += -(-len(data) // 64) * 64
    return tensors, table


# ---- Buckets ----


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (1, [["t0"], ["t1"], ["t2"], ["t3"]]),
        (64 + 12, [["t0", "t1"], ["t2"], ["t3"]]),
        (64 + 11, [["t0"], ["t1"], ["t2"], ["t3"]]),
        (10**6, [["t0", "t1", "t2", "t3"]]),
    ],
)
def test_buckets_hold_what_fits_and_a_larger_tensor_alone(limit, names):
    _, table = tensors_and_table([(4,), (3,), (40, 2), (1,)])
    buckets = cut(table, limit)
    assert [[entry["name"] for _, entry in bucket.places] for bucket in buckets] == names
    for bucket in buckets:
        ends = [start + entry["bytes"] for start, entry in bucket.places]
        assert bucket.bytes == ends[-1] and all(start % 64 == 0 for start, _ in bucket.places)
        assert all(start >= end for (start, _), end in zip(bucket.places[1:], ends, strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_odd_sizes_travel_bit_for_bit_and_a_flipped_bit_is_refused_by_name(dtype):
    tensors, table = tensors_and_table([(3, 5), (7,), ()], dtype)
    window = torch.stack([tensors[0][1], tensors[0][1] + 1], dim=2)[
        :, :, 0
    ]  # not in one piece, as hub tensors may be
    (bucket,) = cut(table, 10**6)
    buffer = torch.zeros(bucket.bytes, dtype=torch.uint8)
    fill(buffer, bucket, iter([("t0", window), *tensors[1:]]))
    dtypes: dict[str, torch.dtype] = {name: dtype for name, _ in tensors}
    for (name, came), (wanted, tensor) in zip(take(buffer, bucket, dtypes), tensors, strict=True):
        assert name == wanted and torch.equal(came, tensor)
    buffer[bucket.places[1][0]] ^= 1
    with pytest.raises(WeightsError, match="Checksum of t1 "):
        list(take(buffer, bucket, dtypes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://host/x?size=2&rank=1&bucket=1&timeout=1",
        "tcp://host:1/x?size=2&rank=1&bucket=1",
        "tcp://host:1/x?size=two&rank=1&bucket=1&timeout=1",
        "tcp://host:1/x?size=2&rank=1&bucket=1&timeout=1&more=1",
    ],
)
def test_an_address_that_cannot_be_is_refused(text):
    with pytest.raises(WeightsError, match="Cannot read the address"):
        Address.parse(text)


# ---- Real processes ----


def address(trainer: Worker, version: int, size: int, rank: int, bucket: int, timeout: float) -> str:
    query = f"size={size}&rank={rank}&bucket={bucket}&timeout={timeout}"
    return f"tcp://{trainer.ready()['store']}/refit-{version}?{query}"


def broadcast(trainer: Worker, engines: list[Worker], version: int, table, bucket=65536, timeout=60, more=0):
    """Requests of one broadcast, to `more` ranks besides the engines: (the trainer's, the engines')."""
    paths = [
        address(trainer, version, len(engines) + more + 1, rank, bucket, timeout)
        for rank in range(len(engines) + 1)
    ]
    push = trainer.ask("push_weights", {"version": version, "transport": "nccl", "path": paths[0]})
    return push, [
        engine.ask_load(version, "nccl", path, table) for engine, path in zip(engines, paths[1:], strict=True)
    ]


def logprobs(trainer: Worker) -> np.ndarray:
    frames = {
        "ids": np.array([id for row in ROWS for id in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in ROWS], dtype=np.int32),
    }
    return trainer.request("logprobs", {"which": "policy", "temperature": 1.0}, frames).frames["logprobs"]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("engine_torch.py", "moe"),
        pytest.param("engine_vllm.py", "dense_tied", marks=needs_vllm),
        pytest.param("engine_vllm.py", "moe", marks=needs_vllm),
    ],
)
def test_three_refits_by_broadcast_give_two_engines_what_the_file_gives(file, kind, tmp_path):
    model = make_model(kind, tmp_path / "model", seed=1)
    with Controller(tmp_path) as controller:
        trainer = controller.start("trainer.py", "trainer-0", trainer_options(model, tmp_path))
        engines = [controller.start(file, f"engine-{i}", engine_options(model)) for i in range(2)]
        for worker in (trainer, *engines):
            worker.ready()
        _, before = engines[0].score(ROWS)
        for version in (1, 2, 3):
            train_one(trainer, version, ROWS)
            segment = str(tmp_path / "segment")
            push = {"version": version, "transport": "file", "path": segment}
            table = trainer.request("push_weights", push).fields["tensors"]
            for engine in engines:
                engine.pause(2 * version)
            sent, loads = broadcast(trainer, engines, version, table)
            for engine, load in zip(engines, loads, strict=True):
                assert engine.wait(load).fields["loaded"] == len(table)
            assert trainer.wait(sent).fields["bytes"] == sum(entry["bytes"] for entry in table)
            scores = [engine.score(ROWS) for engine in engines]
            assert [at for at, _ in scores] == [version, version]
            assert np.array_equal(scores[0][1], scores[1][1])
            assert np.abs(scores[0][1] - logprobs(trainer)).max() <= 1e-4
            assert np.abs(scores[0][1] - before).max() > 1e-2  # old weights would be seen
            engines[1].wait(engines[1].ask_load(version, "file", segment, table))
            assert np.array_equal(engines[1].score(ROWS)[1], scores[0][1])  # bit for bit
            before = scores[0][1]
            for engine in engines:
                engine.request("resume", {"epoch": 2 * version})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_broadcast_that_loses_an_engine_ends_and_the_trainer_goes_on(how, tmp_path):
    """SIGSTOP: nobody notices until the transfer is called off, as molt/broadcast.ts does at the deadline."""
    model = make_model("dense_tied", tmp_path / "model", seed=1)
    with Controller(tmp_path) as controller:
        trainer = controller.start("trainer.py", "trainer-0", trainer_options(model, tmp_path))
        engines = [
            controller.start("engine_torch.py", f"engine-{i}", engine_options(model)) for i in range(3)
        ]
        for worker in (trainer, *engines):
            worker.ready()
        push = {"version": 1, "transport": "file", "path": str(tmp_path / "segment")}
        table = trainer.request("push_weights", push).fields["tensors"]
        for engine in engines:
            engine.pause(1)
        lost, other, third = engines
        sent, loads = broadcast(trainer, [lost, other], 1, table, bucket=4096, timeout=20, more=1)
        # This process is the last rank and stops reading: the others are in the middle, and stay there.
        slow = receive(address(trainer, 1, 4, 3, 4096, 20), table, torch.device("cpu"))
        next(slow)
        os.killpg(lost.process.pid, how)
        if how == signal.SIGSTOP:
            with pytest.raises(AssertionError, match="does not answer push_weights"):
                trainer.wait(sent, 1)
            trainer.ask("cancel", {"request": sent})
        answer = trainer.wait(sent, 10)
        assert (answer.kind, answer.fields["type"]) == ("error", "failed")
        assert "broadcast" in answer.fields["message"]
        for load in loads:
            assert load not in lost.replies | other.replies  # neither has the new weights
        lost.kill()
        other.kill()
        sent, (load,) = broadcast(trainer, [third], 2, table)
        assert third.wait(load).fields["loaded"] == len(table)
        assert trainer.wait(sent).kind == "ok"
        assert np.abs(third.score(ROWS)[1] - logprobs(trainer)).max() <= 1e-4
        train_one(trainer, 1, ROWS)


def test_an_engine_lost_before_the_group_is_made_holds_the_trainer_only_until_it_is_called_off(tmp_path):
    model = make_model("dense_tied", tmp_path / "model", seed=1)
    with Controller(tmp_path) as controller:
        trainer = controller.start("trainer.py", "trainer-0", trainer_options(model, tmp_path))
        engine = controller.start("engine_torch.py", "engine-0", engine_options(model))
        for worker in (trainer, engine):
            worker.ready()
        push = {"version": 1, "transport": "file", "path": str(tmp_path / "segment")}
        table = trainer.request("push_weights", push).fields["tensors"]
        for version, timeout, is_cancelled in ((1, 30, True), (2, 2, False)):
            # This process says that it is there, and goes no further.
            where = Address.parse(address(trainer, version, 2, 1, 65536, timeout))
            server = dist.TCPStore(where.host, where.port, is_master=False, wait_for_workers=False)
            dist.PrefixStore(where.name, server).set("here-1", "")
            sent, _ = broadcast(trainer, [], version, table, timeout=timeout, more=1)
            if is_cancelled:
                with pytest.raises(AssertionError, match="does not answer push_weights"):
                    trainer.wait(sent, 1)
                trainer.ask("cancel", {"request": sent})
            answer = trainer.wait(sent, 10)
            assert (answer.kind, answer.fields["type"]) == ("error", "failed")
        engine.pause(3)
        sent, (load,) = broadcast(trainer, [engine], 3, table)
        assert engine.wait(load).fields["loaded"] == len(table)
        assert trainer.wait(sent).kind == "ok"
        assert np.abs(engine.score(ROWS)[1] - logprobs(trainer)).max() <= 1e-4


def test_an_engine_that_receives_other_bytes_than_the_table_says_ends(tmp_path):
    model = make_model("dense_tied", tmp_path / "model", seed=1)
    with Controller(tmp_path) as controller:
        trainer = controller.start("trainer.py", "trainer-0", trainer_options(model, tmp_path))
        engine = controller.start("engine_torch.py", "engine-0", engine_options(model))
        for worker in (trainer, engine):
            worker.ready()
        push = {"version": 1, "transport": "file", "path": str(tmp_path / "segment")}
        table = trainer.request("push_weights", push).fields["tensors"]
        train_one(trainer, 1, ROWS)  # the weights are no longer those of the table
        engine.pause(1)
        _, (load,) = broadcast(trainer, [engine], 1, table)
        answer = engine.wait(load)
        assert (answer.kind, answer.fields["type"]) == ("error", "fatal")
        assert f"Checksum of {table[0]['name']} is" in answer.fields["message"]
        assert engine.process.wait(20) == 1
