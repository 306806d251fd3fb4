"""The trainer worker: one rank of the sharded policy behind the wire (protocol.py, rows to export).

    rows*  -> kept until ->  run: forward and backward per micro-batch -> one gradient norm -> AdamW
    logprobs | push_weights | save | restore | export

Every rank gets every request but `rows`, which differ; each is a collective of all ranks, in the order of
arrival.

Invariants
  1. Ranks run the same collectives: as many micro-batches each (an empty one is a dummy of one token with
     loss 0), and a request is checked before its first collective, so a refused one changed nothing. One
     that is called off before it began is run as by the others.
  2. FSDP averages gradients over ranks; the loss of a micro-batch is its share of the global loss times the
     number of ranks. The gradient is that of the global loss whatever the split into micro-batches and
     ranks, and the layout.
  3. A row is trained once: micro-batches name each row of the step exactly once, then the rows are gone.
  4. What goes wrong inside a request ends this process (`fatal`, traceback first): ranks that part cannot
     meet again. The controller kills the whole group.

Options: {model_path, rank, world_size, rendezvous, device, param_dtype, attn_implementation,
gradient_checkpoint, logprob_chunk, optim {lr, betas, eps, weight_decay, max_norm}, seed, deterministic}.
Started by launch.ts, asked by trainer.ts and refit.ts. Elsewhere called actor, policy worker.
"""

import math
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime import Request, Runtime, WorkerError, bad_request, failed, fatal, unsupported

if __name__ == "__main__":
    # Before torch, which takes seconds: from here on the controller hears this process.
    RUNTIME = Runtime.connect("trainer", {"max_requests": 1, "transports": ["file", "nccl", "ipc"]})

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
import transport
from losses import LossOptions, policy_loss
from model import ModelError, ModelSettings, build, device_named, make_batch, policy_logprobs
from optim import Optimizer, OptimSettings
from weights import WeightsError, hub_tensors, write_segment

TRANSPORTS = ("file", "nccl", "ipc")
FORWARD_TOKENS = 8192  # of a forward without gradient, per micro-batch


@dataclass(frozen=True)
class Row:
    """One sample, (tokens,) each. `old` is None when the ratio starts at 1."""

    ids: torch.Tensor
    mask: torch.Tensor  # bool, never true at 0
    rollout: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor | None
    stale: torch.Tensor  # bool


@dataclass
class Waiting:
    """Rows of a step whose `run` has not come."""

    of: int
    parts: list[list[Row]] = field(default_factory=list)


class Trainer:
    """One rank. Needs its process group; lives as long as the process."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.device: str = options["device"]
        self.world_size: int = options["world_size"]
        self.chunk: int = options["logprob_chunk"]
        self.stats: dict[str, float] = {}
        self.table: list[dict] | None = None  # of the newest segment; ranks other than 0 have an empty one
        self.shared: list[torch.Tensor] = []  # what engines map (transport.share)
        self.is_cancelled: Callable[[], bool] = lambda: False  # of the request that runs
        torch.manual_seed(options["seed"])
        torch.use_deterministic_algorithms(options["deterministic"])
        settings = ModelSettings(
            device=self.device,
            param_dtype=options["param_dtype"],
            attn_implementation=options["attn_implementation"],
            gradient_checkpoint=options["gradient_checkpoint"],
            world_size=self.world_size,
        )
        self.model = build(options["model_path"], settings)
        optim: dict[str, Any] = options["optim"] | {"betas": tuple(options["optim"]["betas"])}
        self.optimizer = Optimizer(self.model, OptimSettings(**optim))
        self.vocab_size: int = self.model.config.vocab_size
        self.waiting: dict[int, Waiting] = {}  # by step

    def info(self) -> dict[str, Any]:
        return {
            "model": self.options["model_path"],
            "vocab_size": self.vocab_size,
            "dtype": self.options["param_dtype"],
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "gpus": [] if self.device == "cpu" else [transport.gpu_name(torch.device(self.device))],
        }

    def handlers(self) -> dict[str, Callable[[Request], Any]]:
        kinds = ("rows", "run", "logprobs", "push_weights", "save", "restore", "export")
        return dict.fromkeys(kinds, self.handle)

    def handle(self, request: Request) -> Any:
        self.is_cancelled = lambda: request.cancelled
        return self.answer(request.kind, request.fields, request.frames)

    def answer(self, kind: str, fields: dict[str, Any], frames: dict[str, np.ndarray]) -> Any:
        try:
            return getattr(self, kind)(fields, frames)
        except WorkerError:
            raise
        except checkpoint.CheckpointError as error:
            raise bad_request(str(error), "path") from error
        except Exception as error:
            raise fatal(f"{type(error).__name__}: {error}") from error

    # ---- Steps ----

    def rows(self, fields: dict[str, Any], frames: dict[str, np.ndarray]) -> dict:
        step, part, of = fields["step"], fields["part"], fields["of"]
        waiting = self.waiting.get(step) or Waiting(of)
        if part != len(waiting.parts) or of != waiting.of or part >= of:
            have = f"{len(waiting.parts)} parts of {waiting.of}"
            raise bad_request(f"Part {part} of {of} does not follow {have} for step {step}", "part")
        waiting.parts.append(read_rows(frames, self.vocab_size))
        self.waiting[step] = waiting
        return {}

    def run(self, fields: dict[str, Any], _: object) -> dict:
        rows = self.check_run(fields)
        options = loss_options(fields["loss"])
        del self.waiting[fields["step"]]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, torch.Tensor] = defaultdict(lambda: zero)
        maxima: dict[str, torch.Tensor] = defaultdict(lambda: zero)
        for micro_batch in fields["micro_batches"]:
            loss, numbers = self.forward([rows[i] for i in micro_batch], fields, options)
            (loss * self.world_size).backward()
            # On the device: a GPU need not wait for each number.
            for key, value in numbers.sums.items():
                sums[key] = sums[key] + value
            for key, value in numbers.maxima.items():
                maxima[key] = torch.maximum(maxima[key], value)
        report = self.optimizer.step(fields["lr"], loss_is_finite=math.isfinite(sums["loss"].item()))
        self.stats["step"] = float(fields["step"])
        step = {"grad_norm": report.grad_norm, "skipped": float(report.skipped)}
        return {"sums": only_finite(sums), "maxima": only_finite(maxima | step)}

    def check_run(self, fields: dict[str, Any]) -> list[Row]:
        step, waiting = fields["step"], self.waiting.get(fields["step"])
        if waiting is None or len(waiting.parts) != waiting.of:
            have = f"{len(waiting.parts)} of {waiting.of}" if waiting else "no"
            raise bad_request(f"Step {step} has {have} parts of its rows", "step")
        rows = [row for part in waiting.parts for row in part]
        named = sorted(i for micro_batch in fields["micro_batches"] for i in micro_batch)
        if named != list(range(len(rows))):
            text = f"Micro-batches must hold each of {len(rows)} rows once, got {named}"
            raise bad_request(text, "micro_batches")
        if not fields["micro_batches"]:
            raise bad_request("A step needs at least one micro-batch, if only a dummy", "micro_batches")
        if not fields["lr"] >= 0:
            raise bad_request(f"lr must be at least 0, got {fields['lr']}", "lr")
        tokens = fields["denominators"]["tokens"]
        if tokens < 1 and any(row.mask.any() for row in rows):
            raise bad_request(f"There are tokens to train, not {tokens}", "denominators.tokens")
        check_temperature(fields["temperature"])
        return rows

    def forward(self, rows: Sequence[Row], fields: dict[str, Any], options: LossOptions):
        """(This micro-batch's share of the global loss, numbers). Only trained tokens reach the lm_head."""
        ids, masks = [row.ids for row in rows], [row.mask for row in rows]
        batch = make_batch(ids, masks, fields["packed"], self.device)
        logprobs, entropy = policy_logprobs(self.model, batch, fields["temperature"], self.chunk, True)

        def trained(column: str) -> torch.Tensor:
            parts = [getattr(row, column)[row.mask] for row in rows]
            return torch.cat(parts).to(self.device) if parts else logprobs.new_zeros(0)

        loss, numbers = policy_loss(
            logprobs,
            None if any(row.old is None for row in rows) or not rows else trained("old"),
            trained("rollout"),
            trained("advantages"),
            torch.ones_like(logprobs, dtype=torch.bool),
            fields["denominators"]["tokens"],
            options,
            trained("stale").bool(),  # of a dummy: an empty row of floats
        )
        numbers.sums["entropy"] = entropy.sum()
        return loss, numbers

    @torch.no_grad()
    def logprobs(self, fields: dict[str, Any], frames: dict[str, np.ndarray]) -> tuple[dict, dict]:
        """Of every token but each row's first, which gets 0."""
        if fields["which"] != "policy":
            raise unsupported(f"This trainer has no {fields['which']} model", "which")
        check_temperature(fields["temperature"])
        ids = check_ids(frames["ids"], self.vocab_size)
        rows = torch.from_numpy(ids).split(cut(ids, frames["lengths"], "ids"))
        groups = group_rows([len(row) for row in rows], FORWARD_TOKENS)
        groups += [[]] * (all_ranks_max(len(groups), self.device) - len(groups))
        out: list[torch.Tensor] = [torch.zeros(len(row)) for row in rows]
        for group in groups:
            wanted = [torch.arange(len(rows[i])) > 0 for i in group]
            batch = make_batch([rows[i] for i in group], wanted, True, self.device)
            logprobs, _ = policy_logprobs(self.model, batch, fields["temperature"], self.chunk)
            for i, part in zip(group, logprobs.cpu().split([len(rows[i]) - 1 for i in group]), strict=True):
                out[i][1:] = part
        self.model.reshard()  # without a backward the root would stay gathered
        return {}, {"logprobs": torch.cat([torch.zeros(0), *out]).numpy()}

    # ---- Weights and checkpoints ----

    def push_weights(self, fields: dict[str, Any], _: object) -> dict:
        """
        `file` comes first in every refit. The others send the same weights once more, to engines that have
        its table: `nccl` to the group of this address, `ipc` by way of a file of handles; without a path it
        lets go.
        """
        kind, path = fields["transport"], fields["path"]
        if kind not in TRANSPORTS:
            raise unsupported(f"Transport {kind} is not known, want {', '.join(TRANSPORTS)}", "transport")
        if kind == "ipc" and self.device == "cpu":
            raise unsupported(
                "Transport ipc shares the memory of a GPU, this trainer runs on cpu", "transport"
            )
        if kind == "file":
            self.table, size = write_segment(path, hub_tensors(self.model), write=dist.get_rank() == 0)
            return {"tensors": self.table, "bytes": size}
        self.shared = []
        if self.device != "cpu":
            torch.cuda.ipc_collect()  # what engines have let go of
        if kind == "ipc" and not path:
            return {"tensors": [], "bytes": 0}
        if self.table is None:
            raise bad_request(f"No segment was written whose table an engine could have: {kind}", "transport")
        return self.send_weights(kind, path, self.table)

    def send_weights(self, kind: str, path: str, table: list[dict]) -> dict:
        stream, device = hub_tensors(self.model), torch.device(self.device)
        error = None
        if dist.get_rank() == 0:
            try:
                if kind == "ipc":
                    self.shared = transport.share(path, table, stream, device)
                else:
                    transport.send(path, table, stream, device, lambda: self.is_cancelled())
            except (transport.TransferError, WeightsError) as exc:
                error = exc
        for _ in stream:
            pass  # the other ranks gather to the end, and so must this one
        if error is not None:
            raise failed(str(error)) from error
        return {"tensors": [], "bytes": sum(entry["bytes"] for entry in table)}

    def save(self, fields: dict[str, Any], _: object) -> dict:
        checkpoint.save(fields["path"], self.model, self.optimizer, fields["step"])
        return {}

    def restore(self, fields: dict[str, Any], _: object) -> dict:
        step = checkpoint.restore(fields["path"], self.model, self.optimizer)
        self.waiting.clear()  # rows of the life before
        return {"step": step}

    def export(self, fields: dict[str, Any], _: object) -> dict:
        checkpoint.export(fields["path"], self.model, self.options["model_path"], self.options["param_dtype"])
        return {}


# ---- Reading requests ----


def read_rows(frames: dict[str, np.ndarray], vocab_size: int) -> list[Row]:
    """Rows of a message, checked so that nothing in them can stop the step later. Raises bad_request."""
    ids = check_ids(frames["ids"], vocab_size)
    sizes = cut(ids, frames["lengths"], "ids")

    def column(name: str, array: np.ndarray) -> list[torch.Tensor]:
        if len(array) != len(ids):
            raise bad_request(f"{name} has {len(array)} values for {len(ids)} ids", name)
        return list(torch.from_numpy(array).split(sizes))

    mask = column("loss_mask", frames["loss_mask"] != 0)
    stale = (
        column("stale", frames["stale"] != 0) if "stale" in frames else [torch.zeros_like(m) for m in mask]
    )
    numbers = {
        name: column(name, np.array(frames[name]))  # a copy: torch wants memory it may write
        for name in ("rollout_logprobs", "advantages", "old_logprobs")
        if name in frames
    }
    for i, trained in enumerate(mask):
        if trained[0]:
            raise bad_request(f"Row {i} trains its first token, which nothing predicts", "loss_mask")
        for name, values in numbers.items():
            if not torch.isfinite(values[i][trained]).all():
                raise bad_request(f"Row {i} has a non-finite value at a trained token", name)
    old = numbers.get("old_logprobs") or [None] * len(sizes)
    if not sizes:
        return []
    rollout, advantages = numbers["rollout_logprobs"], numbers["advantages"]
    columns = zip(torch.from_numpy(ids).split(sizes), mask, rollout, advantages, old, stale, strict=True)
    return [Row(*row) for row in columns]


def check_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise bad_request(f"ids must be from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}", "ids")
    return ids.astype(np.int64)


def cut(array: np.ndarray, lengths: np.ndarray, name: str) -> list[int]:
    """Row lengths, when they cut the array exactly."""
    if len(lengths) and lengths.min() < 1:
        raise bad_request(f"A row has {lengths.min()} tokens, want at least 1", "lengths")
    if lengths.sum() != len(array):
        raise bad_request(f"lengths add up to {lengths.sum()}, {name} has {len(array)}", "lengths")
    return [int(n) for n in lengths]


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise bad_request(f"temperature must be above 0, got {temperature}", "temperature")


def loss_options(fields: dict[str, Any]) -> LossOptions:
    try:
        return LossOptions(**fields)
    except ValueError as error:
        message, name = error.args
        raise bad_request(message, f"loss.{name}") from error


def group_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of similar length together, at most `budget` tokens each, or one row."""
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] > room:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= lengths[i]
    return groups


# ---- Numbers ----


def only_finite(numbers: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Numbers on the wire are finite: what a skipped step could not compute is left out, and counts 0."""
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}


def all_ranks_max(value: int, device: str) -> int:
    total = torch.tensor([value], device=device)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return int(total.item())


# ---- Process ----


def open_group(options: dict[str, Any]) -> None:
    """The process group of all ranks. On a CPU: gloo on loopback, one thread unless told otherwise."""
    rank, world_size = options["rank"], options["world_size"]
    if options["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers puts its mesh on any accelerator it sees
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        backend = "gloo"
    else:
        local = rank % torch.cuda.device_count()
        os.environ.setdefault("LOCAL_RANK", str(local))  # transformers reads it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
        torch.cuda.set_device(local)
        backend = "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, init_method=options["rendezvous"], rank=rank, world_size=world_size)


def main(runtime: Runtime) -> None:
    try:
        options = runtime.options | {"device": device_named(runtime.options["device"], "trainer.device")}
        open_group(options)
        trainer = Trainer(options)
    except (ModelError, OSError, ValueError) as error:
        runtime.refuse_input(error)
    trainer.stats = runtime.stats
    runtime.withdraws = False
    if options["rank"] == 0:
        store = transport.open_store(transport.own_address(*runtime.controller))
        runtime.ready(**trainer.info(), store=f"{store.host}:{store.port}")
    else:
        runtime.ready(**trainer.info())
    try:
        runtime.serve(trainer.handlers())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(RUNTIME)  # pyright: ignore[reportPossiblyUnboundVariable]
