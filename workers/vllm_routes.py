"""
Expert routes: through which experts each token went, taken inside vLLM's worker and stored as a blob.

    router of each MoE layer -> rows of this step --by slot mapping--> rows of every KV slot
                                        |                                  | prefix hits
                                        +------> rows of a request <-------+  -> take -> blobs/<sha256>

A row belongs to one token: its k experts in every MoE layer, (layers, k), in the forward that ran it. The
last sampled token never ran, so n ids have n - 1 rows. The row of position p is of the forward that gave the
logprob of token p + 1. A blob is (tokens, MoE layers, k): u8 up to 256 experts, else i16.

Invariants
  1. Rows live with the KV slot that the same forward filled, so a prefix hit gives the rows of whoever filled
     the block, under the weights of then: attention reads the keys and values of that forward too. A block
     that is copied takes its rows along; one that is filled again has them overwritten.
  2. A row under which a token was sampled is never replaced. What is preempted, or cleared in a pause and
     prefilled again under new weights, keeps the rows of the policy that sampled; only a request that has
     sampled nothing starts over.
  3. A row is collected in the step that ran it, not when the request ends: the runner hears of an end with
     the next step, which an idle engine does not make, and by then the blocks may be somebody else's.
  4. What is written is checked: an expert out of range, one twice for a token, or a row never captured is an
     error.
  5. A blob is complete and synced before anyone is told its name.
RouteStore is the capture on CPU; the worker extension makes it, and collective_rpc calls it. On GPU vLLM
captures by itself and sends the rows with the final output, by the same rules. The engine's front end writes
the blobs, in a thread of its own. Elsewhere called R3, rollout routing replay.
What it does not do (refused): pipeline, data and context parallel engines, KV connectors, speculation,
compiled models.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# In `SamplingParams.extra_args`: routes of this request are wanted. Rows of the others are kept by slot only.
WANTED = "molt_routes"
FIRST_CAPACITY = 256  # rows of a request; a longer one doubles it
NEVER = -1  # no forward has filled this slot


class RoutesError(ValueError):
    """No routes can be had here, or those that came cannot be right."""


@dataclass(frozen=True)
class RouteShape:
    layers: Sequence[int]  # the MoE layers, as numbers among all layers
    experts: int
    k: int

    @property
    def row(self) -> tuple[int, int]:
        return (len(self.layers), self.k)


# ---- What the model has ----


def moe_layers(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """(number, what takes the callback) of each MoE layer. Raises where one cannot be captured."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    found: list[tuple[int, Any]] = []
    for module in model.modules():
        if isinstance(module, RoutedExpertsCaptureSource):
            found.append((module.layer_id, module))
        elif isinstance(module, MoERunner):
            if not isinstance(module.router, BaseRouter):
                router = type(module.router).__name__
                raise RoutesError(f"Layer {module.layer_id} routes by {router}, which shows no expert ids")
            found.append((module.layer_id, module.router))
    if not found:
        raise RoutesError("This model has no expert routes: none of its layers is a mixture of experts")
    return sorted(found, key=lambda layer: layer[0])


def route_shape(worker: Any) -> RouteShape:
    """What rows of this engine look like. Raises RoutesError with the reason where it can give none."""
    config = worker.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        raise RoutesError("No routes with pipeline parallel engines: a worker sees only its own layers")
    layers = moe_layers(worker.model_runner.model)
    shape = RouteShape(
        layers=[number for number, _ in layers],
        experts=config.model_config.get_num_experts(),
        k=config.model_config.get_num_experts_per_tok(),
    )
    if shape.experts > np.iinfo(np.int16).max:
        raise RoutesError(f"{shape.experts} experts do not fit i16")
    return shape


def refuse_capture(worker: Any) -> None:
    """What the capture below does not follow. Raises RoutesError with the reason."""
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    config = worker.vllm_config
    parallel = config.parallel_config
    model = worker.model_runner.model
    reasons = {
        "with data parallel engines": parallel.data_parallel_size > 1,
        "with context parallel engines": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "with KV connectors: blocks come without their rows": config.kv_transfer_config is not None,
        "with speculation": config.speculative_config is not None,
        "of a compiled model, whose routers call nobody (want enforce_eager)": (
            config.compilation_config.mode != CompilationMode.NONE
        ),
        "of a fused MoE kernel that routes by itself": any(
            module._quant_method.is_monolithic for module in model.modules() if isinstance(module, MoERunner)
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RoutesError(f"Cannot capture routes {reason}")


# ---- Checked blobs ----


def check_rows(rows: np.ndarray, shape: RouteShape) -> None:
    """(tokens, layers, k). Raises RoutesError when they cannot be the routes of any forward."""
    if rows.shape[1:] != shape.row:
        raise RoutesError(f"Rows of shape {rows.shape[1:]}, want {shape.row}")
    if not len(rows):
        return
    if shape.k > 1 and not rows.any():
        raise RoutesError(f"The routes of all {len(rows)} tokens are zero: the kernel reported none")
    bad = (rows < 0) | (rows >= shape.experts)
    if bad.any():
        token, layer, _ = (int(i) for i in np.argwhere(bad)[0])
        found = rows[token, layer].tolist()
        what = "were never captured" if NEVER in found else f"are {found} of {shape.experts} experts"
        raise RoutesError(f"Routes of token {token} in layer {shape.layers[layer]} {what}")
    ordered = np.sort(rows, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0])
        found = rows[token, layer].tolist()
        raise RoutesError(
            f"Routes of token {token} in layer {shape.layers[layer]} name one expert twice: {found}"
        )


def write_blob(directory: Path, rows: np.ndarray, shape: RouteShape) -> dict[str, Any]:
    """Checks rows and writes them to the file that their bytes name. {sha256, dtype, shape}."""
    check_rows(rows, shape)
    dtype = "u8" if shape.experts <= 256 else "i16"
    data = rows.astype("<u1" if dtype == "u8" else "<i2").tobytes()
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if not path.exists():  # else it is complete: a file gets its name after its bytes were synced
        part = path.with_name(f"{digest}.{os.getpid()}.{threading.get_ident()}.part")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    _sync(directory)
    return {"sha256": digest, "dtype": dtype, "shape": list(rows.shape)}


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rows_of_take(data: bytes, shape: RouteShape) -> np.ndarray:
    """What `RouteStore.take` gave for a request."""
    return np.frombuffer(data, "<i2").reshape(-1, *shape.row)


def rows_of_output(routed_experts: np.ndarray | None, rows: int, shape: RouteShape) -> np.ndarray:
    """
    What vLLM captured by itself (GPU, enable_return_routed_experts): `routed_experts` of the final
    CompletionOutput, (tokens, all layers, k), where dense layers are zero. It may hold more than the `rows`
    of the ids that are sent, when a stop string ended the request.
    """
    if routed_experts is None:
        raise RoutesError("vLLM returned no routes with the final output")
    if len(routed_experts) < rows:
        raise RoutesError(f"vLLM returned routes of {len(routed_experts)} tokens, want {rows}")
    if routed_experts.ndim != 3 or routed_experts.shape[1] <= max(shape.layers):
        raise RoutesError(f"vLLM returned routes of shape {routed_experts.shape}, layers are {shape.layers}")
    return routed_experts[:rows, list(shape.layers)]


# ---- Capture ----


class Collected:
    """Rows of one request, from its first token on."""

    def __init__(self, row: tuple[int, int]):
        self._rows = np.empty((FIRST_CAPACITY, *row), dtype=np.int16)
        self.length = 0

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self.length]

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    def append(self, rows: np.ndarray) -> None:
        end = self.length + len(rows)
        if end > len(self._rows):
            more = max(end - len(self._rows), len(self._rows))
            self._rows = np.concatenate((self._rows, np.empty((more, *rows.shape[1:]), dtype=np.int16)))
        self._rows[self.length : end] = rows
        self.length = end


class RouteStore:
    """
    In one worker process of an engine. `install` before the first request; then, for each request marked
    WANTED, exactly one of `take` and `drop` once it has ended.
    """

    def __init__(self, worker: Any):
        self._worker = worker
        self._runner = worker.model_runner
        self._collected: dict[str, Collected] = {}

    def install(self) -> dict[str, Any]:
        """The RouteShape, as a record. Raises RoutesError where there is none. One rank captures for all."""
        self._shape = shape = route_shape(self._worker)
        answer = asdict(shape)
        if self._worker.vllm_config.aux_output_config.enable_return_routed_experts:
            return answer  # vLLM captures by itself
        refuse_capture(self._worker)
        if not self._worker.is_driver_worker:
            return answer
        self._group = self._full_attention_group()
        block_size = self._runner.input_batch.block_table[self._group].block_size
        blocks = self._runner.kv_cache_config.num_blocks
        self._by_block = np.full((blocks, block_size, *shape.row), NEVER, dtype=np.int16)
        self._by_slot = self._by_block.reshape(-1, *shape.row)
        self._step = np.empty((self._runner.max_num_tokens, *shape.row), dtype=np.int16)
        for index, (_, layer) in enumerate(moe_layers(self._runner.model)):
            layer.capture_fn = partial(self._capture, index)
        self._run = self._runner.execute_model
        self._runner.execute_model = self._execute
        return answer

    def take(self, wanted: dict[str, int]) -> dict[str, bytes]:
        """
        Rows of requests that have ended, by internal request id, as i16 (`rows_of_take`). `wanted` says how
        many each has, one less than its ids: the engine may have run further, where a stop string or an abort
        ended it. The blob is written by who asks: a sync in this process would hold up every step.
        """
        if not self._worker.is_driver_worker:
            return {}
        taken = {request: self._collected.pop(request, None) for request in wanted}
        rows_of = {}
        for request, collected in taken.items():
            got = collected.length if collected else 0
            if not collected or got < wanted[request]:
                raise RoutesError(f"Request {request} has routes of {got} tokens, want {wanted[request]}")
            rows_of[request] = collected.rows[: wanted[request]].astype("<i2").tobytes()
        return rows_of

    def drop(self, requests: list[str]) -> None:
        """Nobody wants these. Unknown ones may never have been scheduled."""
        for request in requests:
            self._collected.pop(request, None)

    def _full_attention_group(self) -> int:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                return number
        raise RoutesError(
            "Cannot capture routes without a full attention layer: no KV block keeps all tokens"
        )

    # ---- A step ----

    def _capture(self, index: int, experts: torch.Tensor) -> None:
        self._step[: len(experts), index] = experts.numpy()

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for source, copy in scheduled.kv_cache_block_copies or ():
            self._by_block[copy] = self._by_block[source]
        tokens = scheduled.total_num_scheduled_tokens
        self._step[:tokens] = NEVER
        result = self._run(scheduled, *args, **kwargs)
        if tokens:
            self._keep(scheduled, self._step[:tokens])
        return result

    def _keep(self, scheduled: Any, step: np.ndarray) -> None:
        """The rows of a step, to the slots and to the requests that want them."""
        batch = self._runner.input_batch
        slots = batch.block_table[self._group].slot_mapping.np[: len(step)]
        self._by_slot[slots] = step
        placed = set(scheduled.scheduled_cached_reqs.resumed_req_ids)
        for new in scheduled.scheduled_new_reqs:
            placed.add(new.req_id)
            if (new.sampling_params.extra_args or {}).get(WANTED):
                self._collected[new.req_id] = Collected(self._shape.row)
        at = 0
        for request in batch.req_ids:
            count = scheduled.num_scheduled_tokens[request]
            if request in self._collected:
                self._collect(request, step[at : at + count], request in placed)
            at += count

    def _collect(self, request: str, rows: np.ndarray, is_placed: bool) -> None:
        """`is_placed`: its blocks were given to it in this step, perhaps some that others had filled."""
        state, collected = self._runner.requests[request], self._collected[request]
        first = state.num_computed_tokens  # position of rows[0]
        sampled = len(state.output_token_ids)
        if sampled:
            # Rows of this many positions gave the logprobs of what is sampled: invariant 2.
            collected.cut(state.num_prompt_tokens + sampled - 1)
        elif is_placed:
            collected.cut(0)
            collected.append(self._by_slot[self._slots(state, first)])
        else:
            collected.cut(first)
        have = collected.length
        if have < first:
            raise RuntimeError(f"Request {request} runs position {first} but has routes of {have} tokens")
        collected.append(rows[have - first :])

    def _slots(self, state: Any, tokens: int) -> np.ndarray:
        size = self._by_block.shape[1]
        blocks = np.asarray(state.block_ids[self._group], dtype=np.int64)[: -(-tokens // size)]
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:tokens]
