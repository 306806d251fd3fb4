"""
New weights are built beside the live model while it samples: a pause of the CPU build only puts them in.

    live model   samples ----------------------| put: copies small tensors, takes over packed ones | samples
    shadow       load, pack: a thread ---------|

On a CPU nearly all of a load is packing: oneDNN lays every matrix out anew, which takes several copies' time.
The shadow is the module tree once more: each module a copy of the live one with tensors of its own, whose
code never runs. vLLM's own layerwise reload loads into it, so that what comes out is what a reload of the
live model would have made.

Invariants
  1. Until `put` nothing of the live model is written.
  2. `put` writes tensors in place, as vLLM's reload does: whatever holds a view of them sees the new ones.
  3. Two sets of weights exist from the beginning of a build to its `put` or `drop`, one at any other time.
  4. A model with a layer that might keep what it loaded elsewhere than in its own tensors and attributes has
     no shadow (`why_not`), and is loaded in the pause.

Called by vllm_extension.py in vLLM's workers. Not on GPUs: there a load is a copy, and memory scarce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

KNOWN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
OF_TORCH = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
ROOM = 2  # times the weights must be free: for the new ones, and for what is taken while they are packed


def why_not(model: torch.nn.Module) -> str | None:
    """The layer that rules a shadow out."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in KNOWN:
            return f"{name} is of {type(method).__name__}"
        if hasattr(module, "process_weights_after_loading") and type(module) not in (Attention, *KNOWN):
            return f"{name} is of {type(module).__name__}"
    return None


def why_no_room(count: int) -> str | None:
    """For weights of so many bytes."""
    free = psutil.virtual_memory().available
    return f"{free / 1e9:.1f} GB of {ROOM * count / 1e9:.1f} are free" if free < ROOM * count else None


@dataclass(frozen=True)
class Built:
    key: Any
    tensors: list[tuple[torch.Tensor, torch.Tensor]]  # live, new
    attributes: list[tuple[torch.nn.Module, str, Any]]  # live, name, new


class Shadow:
    """Of a model that was loaded and never reloaded. Takes no memory for weights before the first build."""

    def __init__(self, live: torch.nn.Module):
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._built: Built | None = None
        twins: dict[torch.nn.Module, torch.nn.Module] = {}
        for module in live.modules():
            twin = twins[module] = object.__new__(type(module))
            # Names and shapes before packing. A reload binds them to its layer: each has its own.
            known, info = get_layerwise_info(module), get_layerwise_info(twin)
            parameters, buffers = known.restore_metadata
            info.restore_metadata = copies(parameters, {}), copies(buffers, {})
            info.restore_device = known.restore_device
        self._twins = twins
        self._forget()
        self.model = twins[live]

    def build(self, key: Any, load: Callable[[torch.nn.Module], None]) -> None:
        """Begins to: `load(model)` in a thread. What was built before is dropped."""
        self.drop()
        self._thread = threading.Thread(target=self._run, args=(key, load), daemon=True)
        self._thread.start()

    def _run(self, key: Any, load: Callable[[torch.nn.Module], None]) -> None:
        try:
            with torch.no_grad():
                before = self._copy_live()
                load(self.model)
                self._built = Built(key, *self._changes(before))
        except BaseException as error:  # noqa: BLE001 goes to whoever asks
            self._error = error

    def _copy_live(self) -> dict[torch.nn.Module, dict[str, Any]]:
        """Tensors of its own for each twin, tied where they were. Returns the twins' attributes."""
        seen: dict[int, torch.Tensor] = {}
        before = {}
        for module, twin in self._twins.items():
            twin.__dict__["_parameters"] = copies(module._parameters, seen)
            twin.__dict__["_buffers"] = copies(module._buffers, seen)
            before[module] = dict(twin.__dict__) | {
                "_parameters": dict(twin._parameters),
                "_buffers": dict(twin._buffers),
            }
        return before

    def _changes(self, before: dict[torch.nn.Module, dict[str, Any]]) -> tuple[list, list]:
        tensors, attributes, seen = [], [], set()
        for module, twin in self._twins.items():
            for kind in ("_parameters", "_buffers"):
                was = before[module][kind]
                for name, new in twin.__dict__[kind].items():
                    if new is not was.get(name):
                        raise RuntimeError(f"{type(module).__name__}.{name} was replaced by the reload")
                    if new is None:
                        continue
                    live = module.__dict__[kind][name]
                    # A buffer that is a view of a parameter must not bring the old bytes back.
                    if id(live) not in seen and (kind == "_parameters" or not torch.equal(live, new)):
                        tensors.append((live, new))
                    seen.add(id(live))
            for name, new in twin.__dict__.items():
                if name not in OF_TORCH and new is not before[module].get(name):
                    attributes.append((module, name, new))
        return tensors, attributes

    def outcome(self) -> tuple[bool, str | None]:
        """(ended, why there is nothing to put in)."""
        if self._thread is not None and self._thread.is_alive():
            return False, None
        return True, f"{type(self._error).__name__}: {self._error}" if self._error else None

    def holds(self, key: Any) -> bool:
        self._join()
        return self._built is not None and self._built.key == key

    def put(self) -> None:
        """Into the live model, which stands still."""
        assert self._built is not None
        old = []  # let go of in a thread: giving back memory takes as long as copying it
        with torch.no_grad():
            for live, new in self._built.tensors:
                live.data.copy_(new)
            for module, name, new in self._built.attributes:
                old.append(module.__dict__.get(name))
                module.__dict__[name] = new
        old.append(self._built)
        self._forget()
        threading.Thread(target=old.clear, daemon=True).start()

    def drop(self) -> None:
        """Whatever was built or is being built."""
        self._join()
        self._forget()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _forget(self) -> None:
        self._thread, self._error, self._built = None, None, None
        for module, twin in self._twins.items():
            get_layerwise_info(twin).reset()  # of a load that failed half-way
            twin.__dict__.clear()
            twin.__dict__.update(module.__dict__)
            children = {name: child and self._twins[child] for name, child in module._modules.items()}
            twin.__dict__["_modules"] = children
            twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)


def copies(tensors: dict[str, Any], seen: dict[int, torch.Tensor]) -> dict[str, Any]:
    """By name, with class and attributes. Those in `seen`, by identity, were copied before."""
    out = {}
    for name, tensor in tensors.items():
        if tensor is not None and id(tensor) not in seen:
            new = tensor.data.clone()
            new.__class__ = tensor.__class__
            new.__dict__ = tensor.__dict__.copy()
            seen[id(tensor)] = new
        out[name] = None if tensor is None else seen[id(tensor)]
    return out
