"""
What runs inside vLLM's own processes: weights for the model, scores while it stands still.

    front end (engine_vllm.py) --collective_rpc--> WorkerExtension, in every rank's worker process
                               --requests--------> Scheduler, in EngineCore

Named by `worker_extension_cls` and `scheduler_cls`, so vLLM imports this module in each of its processes; it
needs no packaging and changes no vLLM file.

Invariants
  1. Names are compared with the checkpoint before the model is touched. Bytes of a file are verified before,
     here or ahead by the front end (then the file is looked at once more after its last byte was read); what
     comes from the trainer's memory is verified before it is loaded, tensor by tensor. A later error leaves
     layers half restored, and the front end ends the engine.
  2. One layerwise reload per refit, however many parts the weights came in. On a CPU it is of a shadow, while
     the model samples (vllm_shadow.py).
  3. Every parameter of the model is written by every refit, or the refit fails and names those that were not.
  4. What guesses tokens shares the model's embedding and head (with pipeline_parallel_size 1), and so has the
     new ones after a refit; its own layers stay as they were at the start, which costs nothing but guesses.
  5. While paused nothing is scheduled but scores, and they leave kept requests and their keys as they were.

Two weight updates of vLLM's CPU build are wrong without an error, and mended here (`repack_heads`,
`prepack_experts`); MOLT_VLLM_UNMENDED=1 leaves them as they are, for the test that shows it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from sampling import mixed_seeds
from transport import check_table, gpu_name, map_shared, receive
from vllm_routes import RouteStore
from vllm_shadow import Shadow, why_no_room, why_not
from weights import Segment, WeightsError, verify_segment

BACKEND = "molt"
# It warns of layers without a tensor of their own in every refit. Which parameters got none is checked here.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
SCORE = "score-"  # ids of requests that run while the engine is paused
UNMENDED = os.environ.get("MOLT_VLLM_UNMENDED") == "1"


# ---- Scores while paused ----


def scores_while_paused(base: Any) -> type:
    """
    One of vLLM's schedulers that runs scores while it is paused. A refit asks for them between loading and
    resuming, when vLLM schedules nothing: for one step at a time the scores are alone in the scheduler, then
    what is kept comes back.
    """

    class EngineScheduler(base):
        def _scores(self) -> list:
            return [request for request in self.requests.values() if is_score(request)]

        def get_num_unfinished_requests(self) -> int:
            if self._pause_state == PauseState.PAUSED_ALL:
                return sum(not request.is_finished() for request in self._scores())
            return super().get_num_unfinished_requests()

        def schedule(self, *args: Any, **kwargs: Any):
            if self._pause_state != PauseState.PAUSED_ALL or not self._scores():
                return super().schedule(*args, **kwargs)
            kept = [request for request in self.running if not is_score(request)]
            self.running = [request for request in self.running if is_score(request)]
            waiting, self.waiting = self.waiting, create_request_queue(self.policy)
            scores = [request for request in waiting if is_score(request)]
            waiting.remove_requests(scores)
            for request in scores:
                self.waiting.add_request(request)
            self._pause_state = PauseState.UNPAUSED
            try:
                out = super().schedule(*args, **kwargs)
            finally:
                self._pause_state = PauseState.PAUSED_ALL
                self.running = kept + self.running
                left, self.waiting = list(self.waiting), waiting
                for request in left:
                    self.waiting.add_request(request)
            if left and kept and out.total_num_scheduled_tokens == 0:
                # Kept keys fill the cache: the last request gives up its own and computes them again.
                self.running.remove(kept[-1])
                self._preempt_request(kept[-1], time.monotonic())
            return out

    return EngineScheduler


def is_score(request: Any) -> bool:
    return request.request_id.startswith(SCORE)


EngineScheduler = scores_while_paused(Scheduler)
AsyncEngineScheduler = scores_while_paused(AsyncScheduler)


# ---- Weights ----


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what is loaded was staged before (WorkerExtension.molt_stage)."""


class MoltTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's worker drives it: start_weight_update, update_weights, finish_weight_update."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.staged: dict[str, torch.Tensor] = {}
        self.segment: Segment | None = None  # whose bytes the front end verified
        self.incoming: Iterable[tuple[str, torch.Tensor]] | None = None  # instead: received while loading
        self.shadow: Shadow | None = None
        self.is_built = False  # the shadow holds what was staged

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.is_built and self.shadow is not None:
            self.shadow.put()
        else:
            self.reload(self.model, by_layer(self.staged) if self.incoming is None else self.incoming)

    def reload(self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """
        Tensors of one layer come together, so that memory stays one layer deep: by sorted names, or in the
        order of the trainer, which gathers layer by layer.
        """
        uncovered = dict(model.named_parameters())  # a tied one once, under its first name
        initialize_layerwise_reload(model)
        for name in model.load_weights(tensors) or ():
            uncovered.pop(name, None)
        finalize_layerwise_reload(model, self.model_config)
        if uncovered:
            raise WeightsError(f"No tensor reached {', '.join(sorted(uncovered))}")
        if not UNMENDED:
            repack_heads(model)

    def finish_weight_update(self) -> None:
        self.staged, self.incoming, self.is_built = {}, None, False  # lets go of the mapped file, too
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once we have answered the trainer may write there
        if self.segment is not None:
            self.segment.check()

    def shutdown(self) -> None:
        pass


def by_layer(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return sorted(tensors.items(), key=lambda item: item[0])


def repack_heads(model: torch.nn.Module) -> None:
    """A tied lm_head gets no tensor of its own: its packed copy of the embedding would stay the old one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and method is not None:
            method.process_weights_after_loading(module)


def prepack_experts() -> None:
    """
    vLLM packs the experts of a CPU at the first load only; later the unpacked bytes land in the packed tensor
    (github.com/vllm-project/vllm/issues/42821).
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel

    def setup_kernel(self, layer, w13, w2):
        is_update = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


# ---- Seeds ----


class SeededGenerator(torch.Generator):
    """A CPU generator that has no offset to be set back: it is seeded anew before each draw."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def seed_by_position(runner: Any) -> None:
    """
    Every draw of a seeded request is a function of its seed and the token's position. As vLLM does it, a
    seeded prompt that is prefilled in chunks ends EngineCore on a CPU ("CPU Generator does not use offset"),
    and a request that is resumed elsewhere repeats the draws of its beginning.
    """
    update, draw = runner._update_states, runner._sample

    def update_states(*args: Any, **kwargs: Any):
        out = update(*args, **kwargs)
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, SeededGenerator):
                own = SeededGenerator(device=generator.device)
                batch.generators[row] = runner.requests[batch.req_ids[row]].generator = own
        return out

    def sample(*args: Any, **kwargs: Any):
        batch, generators = runner.input_batch, runner.input_batch.generators
        seeds = [runner.requests[batch.req_ids[row]].sampling_params.seed for row in generators]
        positions = batch.num_tokens_no_spec[list(generators)].tolist()
        for generator, seed in zip(generators.values(), mixed_seeds(seeds, positions), strict=True):
            generator.manual_seed(seed)
        return draw(*args, **kwargs)

    runner._update_states, runner._sample = update_states, sample


class WorkerExtension:
    """Mixed into vLLM's worker: `self` is the worker of one rank. Called through collective_rpc."""

    def molt_start(self: Any) -> dict[str, Any]:
        """What this process is. Once, after the model was loaded."""
        if self.device.type == "cpu":
            seed_by_position(self.model_runner)
            if not UNMENDED:
                prepack_experts()
            why = why_not(self.model_runner.model)
            if why is None:
                self.weight_transfer_engine.shadow = Shadow(self.model_runner.model)
            else:
                print(f"Refits load while the engine stands still: {why}", file=sys.stderr, flush=True)
        gpu = gpu_name(self.device) if self.device.type == "cuda" else None
        return {"pid": os.getpid(), "host": socket.gethostname(), "gpu": gpu}

    def molt_routes_install(self: Any) -> dict[str, Any]:
        """Before the first request. Raises RoutesError where this engine can give no routes."""
        self.molt_routes = RouteStore(self)
        return self.molt_routes.install()

    def molt_routes_take(self: Any, wanted: dict[str, int]) -> dict[str, bytes]:
        return self.molt_routes.take(wanted)

    def molt_routes_drop(self: Any, requests: list[str]) -> None:
        self.molt_routes.drop(requests)

    def molt_stage(self: Any, path: str, table: list[dict], last: bool, stamp: list[int] | None) -> float:
        """
        Verify the bytes of a segment and keep its tensors for the update. With the stamp of a file that the
        front end verified: see that it is this one. The file may be written again before the last part comes,
        so earlier parts are copied. Returns milliseconds. Raises WeightsError.
        """
        started = time.perf_counter()
        transfer: MoltTransfer = self.weight_transfer_engine
        transfer.segment = Segment(path, table, tuple(stamp)) if stamp else None
        if transfer.segment is not None:
            transfer.segment.check()
        transfer.is_built = bool(transfer.shadow and transfer.shadow.holds((path, table, stamp)))
        if transfer.is_built:
            return 1000 * (time.perf_counter() - started)
        if transfer.shadow is not None:
            transfer.shadow.drop()
        tensors = verify_segment(path, table, check_sums=transfer.segment is None)
        twice = sorted(tensors.keys() & transfer.staged.keys())
        if twice:
            raise WeightsError(f"Tensor {twice[0]} was sent twice")
        transfer.staged |= tensors if last else {name: tensor.clone() for name, tensor in tensors.items()}
        if last and transfer.segment is None:
            check_names(self.model_config.model, self.model_config.hf_config, transfer.staged)
        return 1000 * (time.perf_counter() - started)

    def molt_build(self: Any, path: str, table: list[dict], stamp: list[int]) -> bool:
        """Begin to build the weights of a verified segment beside the live ones. False where it cannot."""
        transfer: MoltTransfer = self.weight_transfer_engine
        if transfer.shadow is None:
            return False
        transfer.shadow.drop()
        why = why_no_room(sum(entry["bytes"] for entry in table))
        if why is not None:
            print(f"This refit loads while the engine stands still: {why}", file=sys.stderr, flush=True)
            return False
        segment = Segment(path, table, tuple(stamp))

        def load(model: torch.nn.Module) -> None:
            transfer.reload(model, by_layer(verify_segment(path, table, check_sums=False)))
            segment.check()

        transfer.shadow.build((path, table, stamp), load)
        return True

    def molt_is_built(self: Any) -> bool:
        """Whether no build runs. One that failed did no harm: the refit loads in the pause."""
        shadow = self.weight_transfer_engine.shadow
        has_ended, why = shadow.outcome() if shadow else (True, None)
        if why is not None:
            print(f"This refit loads while the engine stands still: {why}", file=sys.stderr, flush=True)
        return has_ended

    def molt_expect(self: Any, transport: str, path: str, table: list[dict]) -> float:
        """The update takes its tensors from there while it runs, each verified before it is loaded."""
        transfer: MoltTransfer = self.weight_transfer_engine
        if transfer.staged:
            raise WeightsError(f"Transport {transport} brings all weights at once, parts came before")
        transfer.segment, transfer.is_built = None, False
        dtypes = check_table(table)
        sent = {
            entry["name"]: torch.empty(entry["shape"], dtype=dtypes[entry["name"]], device="meta")
            for entry in table
        }
        check_names(self.model_config.model, self.model_config.hf_config, sent)
        if transport == "ipc":
            transfer.incoming = map_shared(path, table, self.device)
        else:
            config = self.parallel_config
            rank = config.data_parallel_index * config.world_size + config.rank
            transfer.incoming = receive(path, table, self.device, rank)
        return 0.0


def check_names(model_path: str, config: Any, staged: dict[str, torch.Tensor]) -> None:
    """What was sent must be what the checkpoint holds: each tensor, each shape."""
    wanted = checkpoint_shapes(model_path)
    text = config.get_text_config()
    for name in sorted(wanted):
        tensor = staged.get(name)
        if tensor is None:
            if is_untrained(name, text):
                continue
            raise WeightsError(f"Tensor {name} was not sent, {len(staged)} of {len(wanted)} were")
        if list(tensor.shape) != wanted[name]:
            raise WeightsError(f"Tensor {name} was sent as {list(tensor.shape)}, want {wanted[name]}")
    for name in staged:
        if name not in wanted:
            raise WeightsError(f"Tensor {name} was sent but the model has none of that name")


def is_untrained(name: str, config: Any) -> bool:
    """A tied lm_head, and the layers of multi-token prediction, which the trainer's model does not have."""
    if name == "lm_head.weight":
        return bool(config.tie_word_embeddings)
    parts = name.split(".")
    if any(part.startswith("mtp") for part in parts):
        return True
    return "layers" in parts and int(parts[parts.index("layers") + 1]) >= config.num_hidden_layers


def checkpoint_shapes(model_path: str) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(os.listdir(model_path)):
        if not file.endswith(".safetensors"):
            continue
        with open(os.path.join(model_path, file), "rb") as source:
            header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


try:
    WeightTransferEngineFactory.register_engine(BACKEND, MoltTransfer)
except ValueError:
    pass  # a spawned process ran this module under another name before
