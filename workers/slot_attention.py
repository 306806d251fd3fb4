"""
Slot attention: keys and values of many sequences and the attention over them, for unmodified models.

One step of the engine is one packed line of tokens (1, T): a token of every decoding sequence, then chunks of
prompts.

    q k v of the line -> write k, v at [slot, position] -> runs: one call for many decoding rows
                                                        -> chunks: one call per piece of a prompt

A sequence owns a slot. transformers builds no mask for an attention name it does not know, hands our `plan`
keyword down to the function, and leaves everything else to the model.

Invariants
  1. Storage is allocated for the slots and positions really used, doubling; its contents survive growth.
  2. Every position a query may see was written before. What lies beyond is masked, and finite.
  3. Index tensors and masks are made once per step, not per layer.
Queries of heads that share a key head are folded into the query length, so keys are never repeated.
Callers: slot_engine.py. Elsewhere called KV cache, paged attention (pages here are whole slots).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION = "molt_slots"
FIRST_SLOTS, FIRST_POSITIONS = 8, 64
# What one more call costs, in units of (row x position): on a CPU core 12 us against 0.05 us (measured), on a
# GPU about 30 us against 1.5 ns (estimated). Decides which rows share a call: short and long, or with a hole.
CALL_COST = {"cpu": 220, "cuda": 20_000}


class SlotCache:
    """Keys and values, per layer (slots, heads, positions, head_dim)."""

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.heads, self.head_dim = heads, head_dim
        self.slots = self.positions = 0
        self.keys = [torch.zeros(0, heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [k.clone() for k in self.keys]

    def ensure(self, slots: int, positions: int, max_slots: int, max_positions: int) -> None:
        """Room for that many; grows by doubling up to the maxima."""
        if slots <= self.slots and positions <= self.positions:
            return
        if slots > self.slots:
            self.slots = min(max_slots, max(slots, 2 * self.slots, FIRST_SLOTS))
        if positions > self.positions:
            self.positions = min(max_positions, max(positions, 2 * self.positions, FIRST_POSITIONS))
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(self.slots, self.heads, self.positions, self.head_dim)
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def copy(self, to: list[int], source: list[int], start: int, end: int) -> None:
        """Positions start..end of source[i] into to[i], whose own are not read."""
        device = self.keys[0].device
        rows, origin = torch.tensor(to, device=device), torch.tensor(source, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[rows, :, start:end] = tensor[origin, :, start:end]

    def wipe(self, slots: list[int]) -> None:
        """
        Zeros, where keys are not finite: a masked position weighs 0, but 0 times NaN is NaN, so that whoever
        takes the slot next would be spoilt by what lies beyond its own text.
        """
        rows = torch.tensor([slot for slot in slots if slot < self.slots], dtype=torch.long)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, rows.to(tensor.device), 0)

    def write(self, layer: int, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value (1, heads, T, head_dim) to `places` (T * heads,), flat rows of head_dim."""
        for tensor, new in ((self.keys[layer], key), (self.values[layer], value)):
            rows = new.transpose(1, 2).reshape(-1, self.head_dim)
            tensor.view(-1, self.head_dim).index_copy_(0, places, rows)


@dataclass
class Run:
    """Decoding rows first..last of the line, whose slots lie in low..high: one call over these slots."""

    first: int
    last: int
    low: int
    high: int
    length: int  # positions looked at
    inside: torch.Tensor | None = None  # slot of each row minus low, where the run has holes
    bias: torch.Tensor | None = None  # (high - low, 1, 1, length), 0 or -inf; None: all rows look everywhere


@dataclass
class Chunk:
    """Tokens first..last of the line are positions start.. of one sequence."""

    first: int
    last: int
    start: int = 0
    slot: int = -1  # -1: not stored; the sequence is wholly in the line
    bias: torch.Tensor | None = None  # (last - first, end) where earlier positions exist, else plain causal


@dataclass
class Plan:
    """What the attention function needs to know about the line."""

    cache: SlotCache | None
    places: torch.Tensor | None = None
    runs: list[Run] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


# ---- Planning a step ----


def split_runs(slots: np.ndarray, lengths: np.ndarray, call_cost: int) -> list[Run]:
    """
    Rows in slot order, cut into runs so that little is computed in vain: a run costs (high - low) * longest +
    call_cost. Greedy; exact enough, since neighbours of a group tend to be equally long.
    """
    runs: list[Run] = []
    if len(slots) == 0:
        return runs
    longest, low, high = int(lengths.max()), int(slots[0]), int(slots[-1]) + 1
    if (high - low) * longest <= int(lengths.sum()) + call_cost:
        return [Run(0, len(slots), low, high, longest)]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if runs:
            run = runs[-1]
            longest = max(run.length, length)
            if (slot + 1 - run.low) * longest <= (run.high - run.low) * run.length + length + call_cost:
                run.last, run.high, run.length = row + 1, slot + 1, longest
                continue
        runs.append(Run(row, row + 1, slot, slot + 1, length))
    return runs


def plan_step(
    cache: SlotCache,
    slots: np.ndarray,
    positions: np.ndarray,
    decoding: int,
    chunks: list[Chunk],
    dtype: torch.dtype,
) -> Plan:
    """Plan of a line whose first `decoding` tokens are decoding rows in slot order. slots, positions: (T,)"""
    device = cache.keys[0].device
    heads = np.arange(cache.heads)
    places = ((slots[:, None] * cache.heads + heads) * cache.positions + positions[:, None]).reshape(-1)
    runs = split_runs(slots[:decoding], positions[:decoding] + 1, CALL_COST[device.type])
    for run in runs:
        inside = slots[run.first : run.last] - run.low
        seen = positions[run.first : run.last]
        if len(inside) < run.high - run.low:
            run.inside = on_device(inside, device)
            # A hole may look at position 0: a row that sees nothing is not finite.
            seen = np.zeros(run.high - run.low, dtype=np.int64)
            seen[inside] = positions[run.first : run.last]
        if (seen != run.length - 1).any():
            run.bias = causal_bias(seen, run.length, dtype, device)[:, None, None]
    for chunk in chunks:
        if chunk.start:
            end = chunk.start + chunk.last - chunk.first
            chunk.bias = causal_bias(np.arange(chunk.start, end), end, dtype, device)
    return Plan(cache, on_device(places, device), runs, chunks)


def causal_bias(positions: np.ndarray, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(rows, length): 0 up to the row's position, -inf beyond."""
    hidden = torch.arange(length, device=device) > on_device(positions, device)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# ---- The attention function ----


def slot_attention(
    module,
    query: torch.Tensor,  # (1, heads, T, head_dim)
    key: torch.Tensor,  # (1, key heads, T, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    plan: Plan | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """(1, T, heads, head_dim)."""
    if plan is None:
        raise ValueError(f"Cannot attend: a model with attention {ATTENTION} must be called with plan=")
    layer, cache = module.layer_idx, plan.cache
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    if cache is not None and plan.places is not None:
        cache.write(layer, plan.places, key, value)
        for run in plan.runs:
            out[run.first : run.last] = attend_run(
                run, query, cache.keys[layer], cache.values[layer], scaling
            )
    for chunk in plan.chunks:
        if cache is None or chunk.start == 0:
            k, v = key[:, :, chunk.first : chunk.last], value[:, :, chunk.first : chunk.last]
        else:
            end = chunk.start + chunk.last - chunk.first
            k, v = (t[chunk.slot : chunk.slot + 1, :, :end] for t in (cache.keys[layer], cache.values[layer]))
        out[chunk.first : chunk.last] = attend_chunk(
            chunk, query[:, :, chunk.first : chunk.last], k, v, scaling
        )
    return out[None], None


def attend_run(
    run: Run, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
):
    """(rows, heads, head_dim): one query per row over the slots of the run, read in place."""
    rows = query[0, :, run.first : run.last].transpose(0, 1)  # (rows, heads, head_dim)
    count, heads, dim = rows.shape
    folded = rows.reshape(count, keys.shape[1], heads // keys.shape[1], dim)
    if run.inside is not None:
        folded = folded.new_zeros(run.high - run.low, *folded.shape[1:]).index_copy_(0, run.inside, folded)
    out = F.scaled_dot_product_attention(
        folded,
        keys[run.low : run.high, :, : run.length],
        values[run.low : run.high, :, : run.length],
        attn_mask=None if run.bias is None else run.bias.expand(-1, folded.shape[1], folded.shape[2], -1),
        scale=scaling,
    )
    if run.inside is not None:
        out = out.index_select(0, run.inside)
    return out.reshape(count, heads, dim)


def attend_chunk(
    chunk: Chunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
):
    """(tokens, heads, head_dim) of one sequence."""
    _, heads, tokens, dim = query.shape
    grouped = heads != key.shape[1]
    if chunk.bias is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    elif query.is_cuda and grouped:
        # Kernels that take both a mask and grouped heads are few on GPUs; folding the heads needs none of
        # them.
        folded = query.reshape(1, key.shape[1], -1, dim)
        bias = chunk.bias.repeat(heads // key.shape[1], 1)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
        out = out.reshape(1, heads, tokens, dim)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=chunk.bias, scale=scaling, enable_gqa=grouped
        )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION, slot_attention)
