"""
The vLLM engine worker: AsyncLLM behind the wire (protocol.py, generate to score).

    requests -> checks -> handle -> (held while paused) -> EngineCore --one message per step--> `tokens` event

AsyncLLM's own streams are left out: its output handler would make an object per token and merge what belongs
to different steps. EngineCore's messages are read here directly; each is one step, carries the version of the
weights that made it, and becomes at most one event.

Invariants
  1. The version of an event is the one EngineCore stamped on the step.
  2. Requests that come while the engine is paused, or while a pause drains, are held here and sent on resume.
  3. The reply to `pause` follows every token that EngineCore sampled before it: its messages arrive in order,
     so what waits in the queue when the answer has come is all there is.
  4. Keys of one load are nobody else's: its number is the cache salt of every request, since versions may
     repeat. A request that has sampled nothing when weights change starts over under the new salt.
  5. What EngineCore is told (add, abort, pause, load, resume) leaves in the order in which it was asked for.
  6. No process of vLLM outlives this one, and what a killed one leaves in /tmp and /dev/shm bears its name.
  7. Staged weights are verified here, in a thread, since EngineCore stands still in every call of a worker
     process; those map the file themselves, and find it in the pause where it is not what was verified. On a
     CPU they build the new weights beside the live ones meanwhile (vllm_shadow.py).
  8. When EngineCore or a worker process of vLLM is gone, or weights failed half-way, this process exits 1.

Options: {model_path, device, dtype, max_requests, max_len, prefill_tokens, seed, blob_dir?, vllm: {...}};
`vllm` as in `engine_args`. Where there is a blob_dir, requests may want expert routes (vllm_routes.py). On a
CPU a seed gives the same tokens in any batch and across `already`, on a GPU for a request that runs alone.
In vLLM's own processes runs vllm_extension.py. Started by launch.ts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import glob
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

from request_checks import SEED_MASK, check_generate, check_rows, check_transport
from runtime import Request, Runtime, WorkerError, bad_request, fatal, unsupported
from sampling import mixed_seeds
from text_stream import TextStream
from vllm_routes import WANTED, RoutesError, RouteShape, rows_of_output, rows_of_take, write_blob
from weights import Segment

ROOT = Path(__file__).resolve().parents[1]
TRANSPORTS = ["file", "nccl", "ipc"]
CAPABILITIES = {"max_requests": None, "transports": TRANSPORTS, "logprobs": True, "heads": 0, "routes": False}
MODES = ("keep", "drain", "abort")
STATS = ("running", "waiting", "tokens", "steps", "prefill_tokens", "cached_tokens", "late_aborts")
STATS += ("preemptions", "cache_use", "spec_drafted", "spec_accepted")
RETRY_AFTER_MS = 50
BUILD_POLL_S = 0.01
EVERY = 2**62  # a handle that none reaches
GIB = 2**30
CPU_CACHE_GIB = 1
# What vLLM samples at: above it raises, and below it samples at the least without a word.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2
PREFIX = (
    "molt-tmp-"  # of temporary files, followed by the process that leads the group; launch.ts removes them
)
PR_SET_PDEATHSIG = 1
LOG_BYTES = 256 * 1024  # of the end of the log, in which the cause of a failure is looked for
NAMED = {  # options by what vLLM quotes where it refuses their value
    "attention_backend": "{}",
    "moe_backend": "{}",
    "draft_model": "{}",
    "max_len": "max_model_len ({})",
}


@dataclass(eq=False)
class Live:
    """One request, from its handle to its ending."""

    handle: int
    fields: dict[str, Any]
    prompt: list[int]
    stream: TextStream | None
    id: str = ""  # EngineCore's; "" = held here
    ids: list[int] = field(default_factory=list)
    cached: int | None = None  # prompt tokens that did not run; None until it was scheduled
    routes: list[np.ndarray] = field(default_factory=list)  # as vLLM captured them: on GPUs


@dataclass
class Outbox:
    """One `tokens` event in the making."""

    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)


# ---- vLLM ----


def prepare_environment(options: dict[str, Any]) -> str:
    """
    Before vLLM is imported, here and in its children. Returns the directory of its temporary files, named by
    this process, so that the next engine can remove what one that was killed left behind.
    """
    vllm, cpu = options["vllm"], options["device"] == "cpu"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"  # in_child
    # Compiled kernels outlive this process: in its own directory each start would compile them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
    if cpu:
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # sampling has compiled parts, and goes without
        # Of vLLM's own processes: huge pages for what a refit allocates and packs anew.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        if vllm["tensor_parallel_size"] * vllm["pipeline_parallel_size"] == 1:
            # The worker inside EngineCore: two processes and not three, and half the start-up.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sweep()
    name = os.environ["MOLT_TMP"] = f"{PREFIX}{os.getpid()}-"
    own = tempfile.mkdtemp(prefix=name)
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = own
    tempfile.tempdir = None  # look at TMPDIR again
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{name}"  # of semaphores; children inherit it
    return own


def in_child() -> None:
    """In EngineCore and vLLM's workers, which are spawned and so run this file first."""
    memory: Any = shared_memory
    memory._SHM_NAME_PREFIX = "/" + os.environ["MOLT_TMP"]
    memory._SHM_SAFE_NAME_LENGTH = len(memory._SHM_NAME_PREFIX) + 8  # 14 is what some systems end at
    if sys.platform == "linux":  # they go on for ever otherwise (seen after 70 s)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1:
            os._exit(1)


def sweep() -> None:
    """Remove what engines left that are no more: nothing runs in a process that was killed."""
    for path in glob.glob(f"{tempfile.gettempdir()}/{PREFIX}*") + glob.glob(f"/dev/shm/*{PREFIX}*"):
        pid = os.path.basename(path).split(PREFIX, 1)[1].split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def engine_args(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of AsyncEngineArgs."""
    from vllm.config import WeightTransferConfig

    from vllm_extension import BACKEND

    vllm, cpu = options["vllm"], options["device"] == "cpu"
    speculation = speculative_config(vllm)
    is_async = not cpu and speculation is None
    args: dict[str, Any] = {
        "model": options["model_path"],
        "dtype": options["dtype"],
        "seed": options["seed"],
        "max_model_len": options["max_len"],
        "max_num_seqs": options["max_requests"],
        "max_num_batched_tokens": max(options["prefill_tokens"], options["max_requests"]),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": vllm["enable_prefix_caching"],
        "enforce_eager": cpu or vllm["enforce_eager"],
        "tensor_parallel_size": vllm["tensor_parallel_size"],
        "pipeline_parallel_size": vllm["pipeline_parallel_size"],
        "data_parallel_size": vllm["data_parallel_size"],
        "enable_expert_parallel": vllm["enable_expert_parallel"],
        "logprobs_mode": "processed_logprobs",  # those of the distribution that was drawn from
        "generation_config": "vllm",  # nothing from the model's directory changes how it samples
        "skip_tokenizer_init": True,
        "async_scheduling": is_async,
        "scheduler_cls": f"vllm_extension.{'Async' if is_async else ''}EngineScheduler",
        "worker_extension_cls": "vllm_extension.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "speculative_config": speculation,
        "enable_return_routed_experts": not cpu and options.get("blob_dir") is not None,
    }
    if vllm["kv_cache_gb"] > 0 or cpu:
        args["kv_cache_memory_bytes"] = int((vllm["kv_cache_gb"] or CPU_CACHE_GIB) * GIB)
    else:
        args["gpu_memory_utilization"] = vllm["gpu_memory_utilization"]
    for name in ("attention_backend", "moe_backend"):
        if vllm[name]:
            args[name] = vllm[name]
    return args | vllm["args"]


def speculative_config(vllm: dict[str, Any]) -> dict[str, Any] | None:
    method = vllm["speculation"]
    if method == "off":
        return None
    config = {"num_speculative_tokens": vllm["num_speculative_tokens"]}
    if method == "ngram":
        return config | {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    if method == "draft":
        return config | {"method": "draft_model", "model": vllm["draft_model"]}
    return config | {"method": "mtp"}


# ---- The engine ----


class RankLostError(Exception):
    """A worker process of vLLM is gone."""


class Engine:
    """Lives on one event loop. Coroutines raise WorkerError."""

    def __init__(self, runtime: Runtime, llm, options: dict[str, Any]):
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreEventType, FinishReason

        self.runtime = runtime
        self.llm, self.core = llm, llm.engine_core
        self.model_path = options["model_path"]
        self.max_requests, self.max_len = options["max_requests"], options["max_len"]
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self._captures = options["device"] == "cpu"  # vllm_routes.py; else vLLM does
        self._seeds_by_position = options["device"] == "cpu"  # vllm_extension.py
        self._tokens_input, self._params = tokens_input, SamplingParams
        self._preempted = EngineCoreEventType.PREEMPTED
        self._reasons = {
            FinishReason.STOP: "stop",
            FinishReason.LENGTH: "length",
            FinishReason.REPETITION: "length",  # cut short, as by a limit
            FinishReason.ABORT: "abort",
            FinishReason.ERROR: "error",
        }
        self._repetition = FinishReason.REPETITION
        self.version = 0
        self._loads = 0
        self.paused = False
        self.live: dict[int, Live] = {}  # by handle
        self._by_id: dict[str, Live] = {}  # those that EngineCore has
        self._held: deque[Live] = deque()
        self._scores: dict[str, asyncio.Future] = {}
        self._next_handle = self._next_id = 1
        self._epoch = -1
        self._before = EVERY  # only handles below run: a pause that drains
        self._is_pausing = False
        self._clear = False
        self._pauses: list[Request] = []  # not answered yet
        self._pause_answer: tuple[dict, dict] | None = None
        self._blob_dir: str | None = options.get("blob_dir")  # None: no routes
        self._route_shape: RouteShape | None = None
        self._unrouted: list[tuple[Live, dict[str, Any]]] = []  # endings that wait for their routes
        self._writing: set[asyncio.Task] = set()
        self._staged: tuple[dict[str, Any], Segment] | None = None  # fields of stage_weights, what they named
        self._staging = asyncio.Lock()
        self._ops: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._open_ops = 0  # queued or running
        self.stats: dict[str, float] = dict.fromkeys(STATS, 0.0)

    async def start(self) -> None:
        await self.core.set_weight_version_async("0")
        ranks = await self.llm.collective_rpc("molt_start")
        self.gpus = [rank["gpu"] for rank in ranks if rank["gpu"]]  # those that another process could share
        here = [rank["pid"] for rank in ranks if rank["host"] == socket.gethostname()]
        self._ranks = here if len(ranks) > 1 else []  # a single one is EngineCore
        if self._blob_dir is not None:
            os.makedirs(self._blob_dir, exist_ok=True)
            try:
                shapes = await self.llm.collective_rpc("molt_routes_install")
            except Exception as error:  # noqa: BLE001 vLLM hands on the message only
                self.runtime.refuse_input(cause(error))
            self._route_shape = RouteShape(**(shapes[0] | {"layers": tuple(shapes[0]["layers"])}))

    @cached_property
    def tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model_path)
        except (OSError, ValueError) as error:
            raise unsupported(
                f"Text and stop strings need a tokenizer in {self.model_path}: {error}", "want_text"
            ) from error

    def _decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    async def run_ops(self) -> None:
        """What goes to EngineCore, one after the other. Ends with the first error."""
        while True:
            await (await self._ops.get())()
            self._open_ops -= 1

    async def read_outputs(self) -> None:
        """EngineCore's messages, for ever. Raises EngineDeadError when it is gone."""
        while True:
            self._on_step(await self.core.get_output_async())

    async def watch_ranks(self) -> None:
        """
        For ever. Raises RankLostError when a worker process of vLLM on this machine is gone: EngineCore says
        so once it has ended the others, which wait for that one (12 s were seen).
        """
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        for pid in self._ranks if sys.platform == "linux" else []:
            try:
                loop.add_reader(os.pidfd_open(pid), gone.set)
            except ProcessLookupError:
                gone.set()
        await gone.wait()
        raise RankLostError

    def _do(self, op: Callable[[], Awaitable[None]]) -> None:
        self._open_ops += 1
        self._ops.put_nowait(op)

    # ---- Requests ----

    def submit(self, fields: dict[str, Any], prompt: np.ndarray) -> int:
        """A handle. The request waits while the engine is paused."""
        check_generate(
            fields,
            prompt,
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            routes=self._blob_dir is not None,
        )
        temperature = fields["sampling"]["temperature"]
        if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise bad_request(
                f"vLLM takes temperature 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {temperature}",
                "sampling.temperature",
            )
        if len(self.live) >= self.max_requests:
            raise WorkerError(
                "overloaded",
                f"Engine has {self.max_requests} requests, its limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        stream = None
        ids = prompt.tolist()
        if fields["want_text"] or fields["sampling"]["stop"]:
            stream = TextStream(self._decode, ids, fields["already"], fields["sampling"]["stop"])
        live = Live(self._next_handle, fields, ids, stream)
        self._next_handle += 1
        self.live[live.handle] = live
        self._admit(live)
        return live.handle

    def _admit(self, live: Live) -> None:
        if self.paused or self._is_pausing or live.handle >= self._before:
            self._held.append(live)
        else:
            self._do(lambda: self._add(live))

    async def _add(self, live: Live) -> None:
        if live.handle not in self.live:
            return  # aborted on the way
        s = live.fields["sampling"]
        already = live.fields["already"]
        params = self._params(
            temperature=s["temperature"],
            top_p=s["top_p"],
            top_k=s["top_k"],
            max_tokens=s["max_tokens"],
            seed=mixed_seeds([s["seed"] & SEED_MASK], [0 if self._seeds_by_position else already])[0],
            stop_token_ids=s["stop_token_ids"],
            ignore_eos=True,  # what ends a turn is said by stop_token_ids
            detokenize=False,
            logprobs=0,
            extra_args={WANTED: True} if live.fields["want_routes"] else None,
        )
        live.id = self._new_id("")
        request = self._request(live.id, live.prompt, params, f"load-{self._loads}")
        self._by_id[live.id] = live
        await self.core.add_request_async(request)

    def _request(self, id: str, prompt: list[int], params, salt: str):
        request = self.llm.input_processor.process_inputs(
            id, self._tokens_input(prompt, cache_salt=salt), params, ("generate",)
        )
        request.external_req_id = id
        return request

    def _new_id(self, prefix: str) -> str:
        self._next_id += 1
        return f"{prefix}{self._next_id}"

    def abort(self, handles: list[int]) -> None:
        """Handles that already ended are counted and passed over: their endings are on the way."""
        out = Outbox()
        for handle in handles:
            live = self.live.get(handle)
            if live is None:
                self.stats["late_aborts"] += 1
            else:
                self._end(live, "abort", None, out)
        self._send(out)
        self._settle()

    def _end(self, live: Live, reason: str, detail: str | None, out: Outbox, is_over: bool = False) -> None:
        """`is_over`: EngineCore has ended it, too."""
        del self.live[live.handle]
        if live.id:
            self._by_id.pop(live.id, None)
            if not is_over:
                self._do(lambda: self._abort_in_core(live))
        elif live in self._held:
            self._held.remove(live)
        cached = live.cached or 0
        self.stats["cached_tokens"] += cached
        if live.stream and live.fields["want_text"]:
            held = live.stream.end()
            if held:
                if live.handle not in out.handles:
                    out.handles.append(live.handle)
                    out.counts.append(0)
                    out.texts.append("")
                out.texts[out.handles.index(live.handle)] += held
        ending = {"handle": live.handle, "reason": reason, "detail": detail, "cached_tokens": cached}
        ending["routes"] = None
        if live.fields["want_routes"] and live.id and (live.ids or is_over):
            self._unrouted.append((live, ending))
            self._do(self._take_routes)
        else:
            out.ended.append(ending)

    async def _abort_in_core(self, live: Live) -> None:
        await self.core.abort_requests_async([live.id])
        if live.fields["want_routes"] and not live.ids:
            # There are no routes to take, and only now it cannot be scheduled for the first time any more.
            await self.llm.collective_rpc("molt_routes_drop", args=([live.id],))

    async def _take_routes(self) -> None:
        """Of requests that have ended. Their blobs are written beside the steps, then endings go out."""
        waiting, self._unrouted = self._unrouted, []
        if not waiting:
            return
        wanted = {live.id: len(live.prompt) + len(live.ids) - 1 for live, _ in waiting if live.ids}
        taken: dict[str, bytes] = {}
        why = None
        if self._captures:
            try:
                for of_rank in await self.llm.collective_rpc("molt_routes_take", args=(wanted,)):
                    taken |= of_rank
            except Exception as error:  # noqa: BLE001 vLLM hands on the message only; these requests have none
                why = cause(error)
            await self.llm.collective_rpc("molt_routes_drop", args=([live.id for live, _ in waiting],))
        task = asyncio.create_task(self._send_routed(waiting, wanted, taken, why))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _send_routed(
        self, waiting: list, wanted: dict[str, int], taken: dict[str, bytes], why: str | None
    ) -> None:
        for live, ending in waiting:
            try:
                if why is not None:
                    raise RoutesError(why)
                if live.id in wanted:
                    ending["routes"] = await asyncio.to_thread(
                        self._write_routes, live, wanted[live.id], taken.get(live.id)
                    )
            except Exception as error:  # noqa: BLE001 the ending goes out, whatever became of its routes
                ending["reason"], ending["detail"] = "error", f"Cannot return expert routes: {error}"
        self._send(Outbox(ended=[ending for _, ending in waiting]))

    def _write_routes(self, live: Live, rows: int, taken: bytes | None) -> dict[str, Any]:
        assert self._blob_dir is not None and self._route_shape is not None
        if taken is not None:
            found = rows_of_take(taken, self._route_shape)
        else:
            found = rows_of_output(
                np.concatenate(live.routes) if live.routes else None, rows, self._route_shape
            )
        return write_blob(Path(self._blob_dir), found, self._route_shape)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nobody waits for an answer. What a paused engine keeps does not run."""
        runs = bool(self.live) and not self.paused
        return not (runs or self._open_ops or self._unrouted or self._writing)

    # ---- Steps ----

    def _on_step(self, step) -> None:
        """One message of EngineCore: one event."""
        before = len(self.live)
        out = Outbox()
        for output in step.outputs:
            live = self._by_id.get(output.request_id)
            if live is not None:
                self._take(live, output, out)
            elif output.request_id in self._scores:
                self._take_score(output)
        if step.outputs:
            self.stats["steps"] += 1
        if step.scheduler_stats is not None:
            stats = step.scheduler_stats
            self.stats["running"], self.stats["waiting"] = stats.num_running_reqs, stats.num_waiting_reqs
            self.stats["cache_use"] = stats.kv_cache_usage
            if stats.spec_decoding_stats is not None:
                self.stats["spec_drafted"] += stats.spec_decoding_stats.num_draft_tokens
                self.stats["spec_accepted"] += stats.spec_decoding_stats.num_accepted_tokens
        self._send(out, int(step.weight_version) if step.weight_version else None)
        if len(self.live) < before:
            self._settle()

    def _take(self, live: Live, output, out: Outbox) -> None:
        for event in output.events or ():
            self.stats["preemptions"] += event.type == self._preempted
        if output.prefill_stats is not None:
            if live.cached is None:
                live.cached = output.prefill_stats.num_cached_tokens
            self.stats["prefill_tokens"] += output.prefill_stats.num_computed_tokens
        if output.routed_experts is not None:
            live.routes.append(output.routed_experts)
        ids = output.new_token_ids
        logprobs = output.new_logprobs.logprobs[:, 0].tolist() if ids else []
        sound = next((i for i, value in enumerate(logprobs) if not np.isfinite(value)), len(ids))
        kept, text, stop = self._read_text(live, ids[:sound])
        if kept:
            live.ids += ids[:kept]
            out.handles.append(live.handle)
            out.counts.append(kept)
            out.ids += ids[:kept]
            out.logprobs += logprobs[:kept]
            out.texts.append(text if live.fields["want_text"] else "")
            self.stats["tokens"] += kept
        is_over = output.finish_reason is not None
        if stop is not None:
            self._end(live, "stop", stop, out, is_over)
        elif sound < len(ids):
            self._end(live, "error", "the logits are not finite", out, is_over)
        elif is_over:
            self._end(live, *self._ending(output), out, True)

    def _ending(self, output) -> tuple[str, str | None]:
        """(reason, detail) of a request that EngineCore ended."""
        reason = self._reasons[output.finish_reason]
        if output.finish_reason == self._repetition:
            return reason, "repetition"
        return reason, "vLLM ended it with an error; its log says why" if reason == "error" else None

    def _read_text(self, live: Live, ids: list[int]) -> tuple[int, str, str | None]:
        """(tokens up to the one that completed a stop string, their text, the stop string)."""
        if live.stream is None:
            return len(ids), "", None
        texts = []
        for i, token in enumerate(ids):
            delta, stop = live.stream.push(token)
            texts.append(delta)
            if stop is not None:
                return i + 1, "".join(texts), stop
        return len(ids), "".join(texts), None

    def _send(self, out: Outbox, version: int | None = None) -> None:
        if not out.handles and not out.ended:
            return
        frames = {
            "handles": np.array(out.handles, dtype=np.int32),
            "counts": np.array(out.counts, dtype=np.int32),
            "ids": np.array(out.ids, dtype=np.int32),
            "logprobs": np.array(out.logprobs, dtype=np.float32),
        }
        texts = out.texts if any(out.texts) else []
        version = self.version if version is None else version
        self.runtime.send("tokens", {"version": version, "texts": texts, "ended": out.ended}, frames)

    # ---- Pause, load, resume ----

    def pause(self, request: Request) -> None:
        """Answered when it holds. Repeating an epoch changes nothing."""
        epoch, mode = request.fields["epoch"], request.fields["mode"]
        if mode not in MODES:
            raise bad_request(f"mode must be keep, drain or abort, got {mode}", "mode")
        if epoch < self._epoch:
            raise bad_request(f"Pause of epoch {epoch} comes after epoch {self._epoch}", "epoch")
        self._pauses.append(request)
        if epoch > self._epoch:
            self._epoch, self._pause_answer, self._clear = epoch, None, request.fields["clear_cache"]
            if mode == "drain" and not (self.paused or self._is_pausing):
                self._before = min(self._before, self._next_handle)
            else:
                self._before = 0  # nothing is waited for
            if mode == "abort":
                out = Outbox()
                for live in list(self.live.values()):
                    self._end(live, "abort", None, out)
                self._send(out)
            self._settle()
        self._answer_pauses()

    def look_at_cancelled(self) -> None:
        """Of pauses: whoever asked no longer wants it. One that does not hold yet is off when nobody does."""
        if self._pauses and self._pause_answer is None and all(r.cancelled for r in self._pauses):
            self._epoch, self._before = -1, EVERY
            if self._is_pausing and not self.paused:
                self._do(self._go_on_unless_paused)
            elif not self.paused:
                self._release()
        for request in [r for r in self._pauses if r.cancelled]:
            self._pauses.remove(request)
            self.runtime.reply_error(request, WorkerError("cancelled", "the pause was cancelled"))

    def _settle(self) -> None:
        """A pause takes effect once nothing that it waits for is left."""
        if self._before == EVERY or any(handle < self._before for handle in self.live):
            return
        self._before = EVERY
        self._is_pausing = True
        self._do(self._pause_now)

    async def _pause_now(self) -> None:
        await self.core.pause_scheduler_async(mode="keep", clear_cache=self._clear)
        while not self.core.outputs_queue.empty():
            self._on_step(await self.core.get_output_async())
        await self._take_routes()
        await asyncio.gather(*self._writing)
        self.paused, self._is_pausing = True, False
        handles = sorted(self.live)
        frames = {
            "handles": np.array(handles, dtype=np.int32),
            "totals": np.array([len(self.live[handle].ids) for handle in handles], dtype=np.int32),
        }
        self._pause_answer = {"version": self.version}, frames
        self._answer_pauses()

    def _answer_pauses(self) -> None:
        if self._pause_answer is None:
            return
        for request in self._pauses:
            self.runtime.reply(request, *self._pause_answer)
        self._pauses = []

    async def stage_weights(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The reply. Works at any time. Raises `fatal` on any mismatch."""
        check_transport(fields["source"], ("file",))
        started = time.perf_counter()
        async with self._staging:
            try:
                if self._staged is None or self._staged[0] != fields:
                    self._staged = fields, await asyncio.to_thread(self._verify, fields)
                    await self._build(self._staged[1])
                self._staged[1].check()
            except Exception as error:
                raise fatal(f"Cannot stage version {fields['version']}: {error}") from error
        return {"verify_ms": 1000 * (time.perf_counter() - started)}

    def _verify(self, fields: dict[str, Any]) -> Segment:
        from vllm_extension import check_names

        segment, tensors = Segment.verify(fields["source"]["path"], fields["tensors"])
        check_names(self.model_path, self.llm.model_config.hf_config, tensors)
        return segment

    async def _build(self, segment: Segment) -> None:
        """The new weights beside those that sample, where vLLM's processes can (vllm_shadow.py)."""
        args = (segment.path, segment.table, segment.stamp)
        if not any(await self.llm.collective_rpc("molt_build", args=args)):
            return
        while not all(await self.llm.collective_rpc("molt_is_built")):
            await asyncio.sleep(BUILD_POLL_S)

    async def load_weights(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The reply. Raises `fatal` on any mismatch: the engine is not to be used any more."""
        version, source = fields["version"], fields["source"]
        if not self.paused:
            raise bad_request(f"Cannot load version {version}: the engine is not paused", "version")
        kind, path, table = source["transport"], source["path"], fields["tensors"]
        check_transport(source, TRANSPORTS)
        if kind != "file" and not fields["last"]:
            raise bad_request(f"Transport {kind} brings all weights at once: last must be true", "last")
        started = time.perf_counter()
        try:
            async with self._staging:
                staged, self._staged = self._staged, None
            stamp = staged[1].stamp if staged and fields == staged[0] | {"last": True} else None
            if kind == "file":
                staging = self.llm.collective_rpc("molt_stage", args=(path, table, fields["last"], stamp))
            else:  # verified while it loads, and counted there
                staging = self.llm.collective_rpc("molt_expect", args=(kind, path, table))
            verify_ms = max(await staging)
            if fields["last"]:
                await self._apply(version)
        except Exception as error:
            raise fatal(f"Cannot load version {version}: {cause(error)}") from error
        self._has_parts = not fields["last"]
        total_ms = 1000 * (time.perf_counter() - started)
        return {"loaded": len(fields["tensors"]), "verify_ms": verify_ms, "load_ms": total_ms - verify_ms}

    async def _apply(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info={}))
        await self.llm.finish_weight_update(str(version))
        self.version = version
        self._loads += 1
        # They start over: the keys of their prompts are of the old weights, or named so. All are held before
        # EngineCore is told, for an abort may come meanwhile.
        restarted = [live for live in self._by_id.values() if not live.ids]
        ids = [live.id for live in restarted]
        routed = [live.id for live in restarted if live.fields["want_routes"]]
        for live in restarted:
            del self._by_id[live.id]
            live.id, live.cached, live.routes = "", None, []
            self._held.append(live)
        await self.core.abort_requests_async(ids)
        if routed:
            await self.llm.collective_rpc("molt_routes_drop", args=(routed,))

    _has_parts = False

    async def resume(self, request: Request) -> None:
        epoch = request.fields["epoch"]
        if epoch != self._epoch:
            raise bad_request(
                f"Cannot resume epoch {epoch}: the last pause was of epoch {self._epoch}", "epoch"
            )
        if self._pause_answer is None:
            raise bad_request(f"Cannot resume epoch {epoch}: its pause still drains", "epoch")
        if self._has_parts:
            raise fatal("Cannot resume: parts of the weights were sent, the last one was not")
        await self._go_on()

    async def _go_on(self) -> None:
        await self.core.resume_scheduler_async()
        self.paused = False
        self._release()

    async def _go_on_unless_paused(self) -> None:
        """After a pause that was withdrawn on its way to EngineCore."""
        if self._epoch == -1:
            await self._go_on()

    def _release(self) -> None:
        held, self._held = sorted(self._held, key=lambda live: live.handle), deque()
        for live in held:
            self._admit(live)

    # ---- Score ----

    async def score(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """(N,) logprobs at temperature 1, 0 for the first of a row. Works at any time (vllm_extension.py)."""
        from vllm_extension import SCORE

        check_rows(ids, lengths, self.vocab_size)
        if lengths.size and lengths.max() >= self.max_len:
            raise bad_request(
                f"A row of {lengths.max()} ids leaves no room in max_len {self.max_len}", "lengths"
            )
        out = np.zeros(len(ids), dtype=np.float32)
        params = self._params(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        waiting = []
        at = 0
        for n in lengths.tolist():
            if n > 1:
                id = self._new_id(SCORE)
                self._scores[id] = asyncio.get_running_loop().create_future()
                waiting.append((id, at, n))
                await self.core.add_request_async(self._request(id, ids[at : at + n].tolist(), params, id))
            at += n
        for id, at, n in waiting:
            out[at + 1 : at + n] = await self._scores[id]
            del self._scores[id]
        return out

    def _take_score(self, output) -> None:
        future = self._scores[output.request_id]
        if output.new_prompt_logprobs_tensors is not None and not future.done():
            future.set_result(output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy())
        elif output.finish_reason is not None and not future.done():
            future.set_exception(fatal("vLLM ended a score without logprobs"))


def cause(error: Exception) -> str:
    """vLLM wraps what failed in a worker into a bare Exception with the text."""
    text = str(error)
    return text.split("failed: ", 1)[1] if text.startswith("Call to collective_rpc method failed: ") else text


# ---- The worker ----


def root_cause() -> str | None:
    """The last error of EngineCore or of a worker of vLLM, from the log that they share with this process."""
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return None
    found = re.findall(
        r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] (\w[\w.]*(?:Error|Exception)\b.*)$", text, re.M
    )
    return found[-1] if found else None


class Server:
    def __init__(self, runtime: Runtime, engine: Engine):
        self.runtime, self.engine = runtime, engine
        self.arrived = asyncio.Event()
        self.stagings: set[asyncio.Task] = set()

    async def run(self) -> None:
        """Until `stop` came and nothing is left, or until vLLM fails."""
        loop = asyncio.get_running_loop()
        self.runtime.stats = self.engine.stats

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and a message came meanwhile
                loop.call_soon_threadsafe(self.arrived.set)

        self.runtime.notify = notify
        tasks = {
            asyncio.create_task(work)
            for work in (
                self.serve(),
                self.engine.read_outputs(),
                self.engine.run_ops(),
                self.engine.watch_ranks(),
            )
        }
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        for task in done:
            task.result()

    async def serve(self) -> None:
        while True:
            try:
                requests = self.runtime.receive(0)
            except SystemExit:
                if self.engine.is_idle and not self.stagings:
                    return
                requests = []
                await asyncio.sleep(0.05)  # what runs finishes first
            for request in requests:
                self.handle(request)
            self.engine.look_at_cancelled()
            if not requests and not self.runtime.stopping:
                await self.arrived.wait()
            self.arrived.clear()
            await asyncio.sleep(0)

    def handle(self, request: Request) -> None:
        engine, fields, frames = self.engine, request.fields, request.frames
        try:
            match request.kind:
                case "generate":
                    self.runtime.reply(request, {"handle": engine.submit(fields, frames["prompt"])})
                case "abort":
                    engine.abort(fields["handles"])
                    self.runtime.reply(request)
                case "pause":
                    engine.pause(request)
                case "stage_weights":
                    task = asyncio.create_task(self.answer(request, self.stage(fields)))
                    self.stagings.add(task)
                    task.add_done_callback(self.stagings.discard)
                case "load_weights":
                    engine._do(lambda: self.answer(request, self.load(fields)))
                case "resume":
                    engine._do(lambda: self.answer(request, self.resume(request)))
                case "score":
                    engine._do(lambda: self.answer(request, self.score(frames)))
                case _:
                    raise unsupported(f"An engine does not answer {request.kind}", "kind")
        except Exception as exc:  # noqa: BLE001 at this edge every failure is an answer
            engine._pauses = [r for r in engine._pauses if r is not request]
            self.runtime.reply_error(request, exc)

    async def answer(self, request: Request, work: Awaitable[tuple[dict, dict | None]]) -> None:
        try:
            self.runtime.reply(request, *await work)
        except Exception as exc:  # noqa: BLE001 at this edge every failure is an answer
            self.runtime.reply_error(request, exc)

    async def stage(self, fields: dict[str, Any]) -> tuple[dict, dict | None]:
        return await self.engine.stage_weights(fields), None

    async def load(self, fields: dict[str, Any]) -> tuple[dict, dict | None]:
        return await self.engine.load_weights(fields), None

    async def resume(self, request: Request) -> tuple[dict, dict | None]:
        await self.engine.resume(request)
        return {}, None

    async def score(self, frames: dict[str, np.ndarray]) -> tuple[dict, dict | None]:
        version = self.engine.version
        return {"version": version}, {"logprobs": await self.engine.score(frames["ids"], frames["lengths"])}


def of_args(vllm: dict[str, Any]) -> str:
    """What a refusal begins with that names no option: arguments of the user's own are the likely cause."""
    return f"--engine.vllm_args {json.dumps(vllm['args'])}: " if vllm["args"] else ""


async def serve(runtime: Runtime, options: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    vllm = options["vllm"]
    known = [each.name for each in fields(AsyncEngineArgs)]
    for name in vllm["args"].keys() - set(known):
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        runtime.refuse_input(f"--engine.vllm_args: AsyncEngineArgs has no field {name}{hint}")
    try:
        config = AsyncEngineArgs(**engine_args(options)).create_engine_config()
    except (OSError, ValueError, TypeError) as error:
        values = vllm | {"max_len": options["max_len"]}
        named = [key for key in NAMED if values[key] and NAMED[key].format(values[key]) in str(error)]
        option = f"--engine.{named[0]} {values[named[0]]}: " if named else of_args(vllm)
        runtime.refuse_input(f"{option}{error}" if option else error)
    try:
        llm = AsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,
            log_requests=False,
            start_engine_loop=False,
            stat_loggers=[],
        )
    except RuntimeError as error:
        found = root_cause()
        if found and found.startswith("ValueError: "):
            is_cache = re.search("KV cache|cache blocks|Available memory", found) is not None
            option = f"--engine.kv_cache_gb {vllm['kv_cache_gb']}: " if is_cache else ""
            runtime.refuse_input((option or of_args(vllm)) + found.removeprefix("ValueError: "))
        raise RuntimeError(f"vLLM cannot start: {found or error}") from None
    if llm.output_handler is not None:
        llm.output_handler.cancel()  # it would take every other step
    try:
        engine = Engine(runtime, llm, options)
        await engine.start()
        runtime.ready(
            model=options["model_path"],
            vocab_size=engine.vocab_size,
            dtype=options["dtype"],
            max_len=engine.max_len,
            max_requests=engine.max_requests,
            gpus=engine.gpus,
            ranks=config.parallel_config.world_size * config.parallel_config.data_parallel_size,
        )
        await Server(runtime, engine).run()
    except RankLostError:
        raise  # and no shutdown, which would wait: what is left dies with this process
    except BaseException:
        llm.shutdown()
        raise
    llm.shutdown()


def main() -> None:
    runtime = Runtime.connect("engine", CAPABILITIES)
    options = runtime.options
    if options["device"] == "auto":
        options["device"] = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
    own = prepare_environment(options)
    code = 0
    try:
        asyncio.run(serve(runtime, options))
    except Exception as error:  # noqa: BLE001 at this edge of the process
        # vLLM's own traceback stands above; ours would only say that the engine is dead.
        if isinstance(error, RankLostError) or type(error).__name__ == "EngineDeadError":
            print(
                f"vLLM's engine is gone: {root_cause() or 'its process was killed'}",
                file=sys.stderr,
                flush=True,
            )
        else:
            traceback.print_exception(error)
        code = 1
    finally:
        shutil.rmtree(own, ignore_errors=True)
    if code:
        runtime.exit_now(code)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    in_child()
