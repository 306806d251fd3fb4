"""
A controller of a few real workers, for Python tests: one socket, one thread, nothing of TypeScript.

    with Controller(directory) as controller:
        engine = controller.start("engine_vllm.py", "engine-0", options)
        engine.ready()
        engine.request("score", {}, {"ids": ..., "lengths": ...})        or: ask ... wait

Every wait has an end; what a worker printed is in `directory`/<id>.log. Used by test_transport.py,
test_vllm_routes.py and test_gpu.py.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import protocol

WORKERS = Path(protocol.__file__).parent
WAIT_S = 120
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Turn:
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    reason: str | None


class Worker:
    def __init__(
        self, controller: Controller, file: str, id: str, options: dict[str, Any], env: dict[str, str]
    ):
        self.controller, self.id, self.options = controller, id, options
        self.log = controller.directory / f"{id}.log"
        self.peer = b""
        self.info: dict[str, Any] | None = None
        self.events: list[protocol.Message] = []  # `tokens`
        self.replies: dict[int, protocol.Message] = {}
        self._kinds: dict[int, str] = {}
        self._seq = 0
        args = ["--endpoint", controller.endpoint, "--worker-id", id]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, WORKERS / file, *args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | ENVIRONMENT | env,
            )
        assert self.process.stdin
        self.process.stdin.write(b'{"secret": "s"}\n')
        self.process.stdin.flush()

    def ready(self) -> dict[str, Any]:
        self.controller.until(lambda: self.info is not None, f"{self.id} is not ready", self)
        assert self.info is not None
        return self.info

    def send(self, kind: str, fields: dict, frames: dict | None = None, **rest: Any) -> None:
        parts = protocol.encode(kind, self._seq, fields, frames, **rest)
        self._seq += 1
        self.controller.socket.send_multipart([self.peer, *parts])

    def ask(self, kind: str, fields: dict, frames: dict | None = None) -> int:
        id = self._seq
        self._kinds[id] = kind
        self.send(kind, fields, frames, id=id)
        return id

    def wait(self, id: int, wait_s: float = WAIT_S) -> protocol.Message:
        """The reply, `ok` or `error`."""
        what = f"{self.id} does not answer {self._kinds[id]}"
        self.controller.until(lambda: id in self.replies, what, self, wait_s)
        return self.replies.pop(id)

    def request(self, kind: str, fields: dict, frames: dict | None = None) -> protocol.Message:
        reply = self.wait(self.ask(kind, fields, frames))
        assert reply.kind == "ok", reply.fields
        return reply

    def take(self, parts: list[bytes]) -> None:
        for message in protocol.decode_all(parts, self._kinds.get):
            if message.kind == "hello":
                self.send("welcome", {"incarnation": 0, "options": self.options, "heartbeat_ms": 60_000})
            elif message.kind == "ready":
                self.info = message.fields["info"]
            elif message.kind == "tokens":
                self.events.append(message)
            elif message.re is not None:
                self.replies[message.re] = message

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        mine = f"molt-tmp-{self.process.pid}-*"  # removed as launch.ts does
        for path in glob.glob(f"{tempfile.gettempdir()}/{mine}"):
            shutil.rmtree(path)
        for path in glob.glob(f"/dev/shm/*{mine}"):
            os.unlink(path)

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    # ---- What engines are asked ----

    def score(self, rows: list[list[int]]) -> tuple[int, np.ndarray]:
        """(version, logprobs of all rows)."""
        frames = {
            "ids": np.array([id for row in rows for id in row], dtype=np.int32),
            "lengths": np.array([len(row) for row in rows], dtype=np.int32),
        }
        reply = self.request("score", {}, frames)
        return reply.fields["version"], reply.frames["logprobs"].copy()

    def start_turn(self, prompt: list[int], want_routes: bool = False, **sampling: Any) -> int:
        """The handle of a request at temperature 1, nothing filtered."""
        every = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 32, "seed": 7}
        every |= {"stop": [], "stop_token_ids": []}
        fields = {"rollout_id": "r", "attempt": 0, "turn": 0, "session_id": "s", "already": 0}
        fields |= {"want_text": False, "heads": 0, "want_routes": want_routes, "sampling": every | sampling}
        return self.request("generate", fields, {"prompt": np.array(prompt, np.int32)}).fields["handle"]

    def turn(self, handle: int, until_tokens: int | None = None) -> Turn:
        """What has come of a request once it has ended, or has that many tokens."""

        def is_there() -> bool:
            now = self._turn(handle)
            return now.reason is not None or (until_tokens is not None and len(now.ids) >= until_tokens)

        self.controller.until(is_there, f"{self.id} does not end {handle}", self)
        return self._turn(handle)

    def _turn(self, handle: int) -> Turn:
        turn = Turn([], [], [], None)
        for event in self.events:
            ends = np.cumsum(event.frames["counts"])
            for i, of in enumerate(event.frames["handles"]):
                if of == handle:
                    part = slice(ends[i] - event.frames["counts"][i], ends[i])
                    turn.ids += event.frames["ids"][part].tolist()
                    turn.logprobs += event.frames["logprobs"][part].tolist()
                    turn.versions += [event.fields["version"]] * int(event.frames["counts"][i])
            for ended in event.fields["ended"]:
                if ended["handle"] == handle:
                    turn.reason = ended["reason"]
        return turn

    def pause(self, epoch: int) -> protocol.Message:
        return self.request("pause", {"epoch": epoch, "mode": "keep", "clear_cache": True})

    def ask_load(self, version: int, transport: str, path: str, tensors: list[dict]) -> int:
        source = {"transport": transport, "path": path}
        return self.ask(
            "load_weights", {"version": version, "source": source, "tensors": tensors, "last": True}
        )


class Controller:
    def __init__(self, directory: Path):
        self.directory = directory
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.workers: dict[str, Worker] = {}

    def start(self, file: str, id: str, options: dict[str, Any], **env: str) -> Worker:
        self.workers[id] = Worker(self, file, id, options, env)
        return self.workers[id]

    def until(self, condition, what: str, worker: Worker, wait_s: float = WAIT_S) -> None:
        """Takes what comes until the condition holds. Fails with the worker's last words."""
        end = time.monotonic() + wait_s
        while not condition():
            if self.socket.poll(100):
                peer, *parts = self.socket.recv_multipart()
                of = self.workers[peer.decode().split(".")[0]]
                of.peer = peer
                of.take(parts)
            elif worker.process.poll() is not None:
                raise AssertionError(f"{what}: it exited with {worker.process.poll()}\n{worker.words()}")
            elif time.monotonic() > end:
                raise AssertionError(f"{what} within {wait_s} s\n{worker.words()}")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            assert worker.process.stdin
            worker.process.stdin.close()
        self.context.destroy(0)

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_program(program: Path, *args: Path, wait_s: float = 240) -> str:
    """What a Python program printed that ends well. In a session of its own, which no process outlives."""
    process = subprocess.Popen(
        [sys.executable, program, *args],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        log, _ = process.communicate(timeout=wait_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, log.decode()[-6000:]
    return log.decode()


# ---- What workers are started with ----


def trainer_options(model: str, directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_path": model,
        "rank": 0,
        "world_size": 1,
        "rendezvous": f"file://{directory / 'rendezvous'}",
        "device": "cpu",
        "param_dtype": "float32",
        "attn_implementation": "sdpa",
        "gradient_checkpoint": False,
        "logprob_chunk": 64,
        "optim": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.0, "max_norm": 1.0},
        "seed": 0,
        "deterministic": False,
    } | changes


def engine_options(model: str, **changes: Any) -> dict[str, Any]:
    sizes = {"max_requests": 16, "max_len": 256, "prefill_tokens": 128}
    base = {"model_path": model, "device": "cpu", "dtype": "float32", "seed": 0} | sizes
    vllm: dict[str, Any] = {
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "gpu_memory_utilization": 0.4,
        "kv_cache_gb": 0.25,
        "attention_backend": "",
        "moe_backend": "",
        "speculation": "off",
        "num_speculative_tokens": 1,
        "draft_model": "",
        "args": {"block_size": 32},
    }
    return base | {"vllm": vllm | changes.pop("vllm", {})} | changes


def train_one(trainer: Worker, step: int, rows: list[list[int]], lr: float = 0.01) -> None:
    """An optimizer step that moves every weight that the rows reach."""
    count = sum(len(row) for row in rows)
    mask = np.concatenate([np.arange(len(row)) > 0 for row in rows]).astype(np.uint8)
    frames = {
        "ids": np.array([id for row in rows for id in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in rows], dtype=np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.full(count, -3, dtype=np.float32) * mask,
        "advantages": np.linspace(-1, 1, count).astype(np.float32) * mask,
    }
    trainer.request("rows", {"step": step, "part": 0, "of": 1}, frames)
    loss = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "is_level": "off",
        "is_mode": "mask",
        "is_low": 0.5,
        "is_high": 5.0,
    }
    fields = {"step": step, "version": step, "micro_batches": [list(range(len(rows)))], "packed": True}
    fields |= {"denominators": {"tokens": float(mask.sum())}, "lr": lr, "temperature": 1.0, "loss": loss}
    reply = trainer.request("run", fields)
    assert reply.fields["maxima"]["skipped"] == 0
