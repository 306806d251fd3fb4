"""
Sampling: logits to token ids and their logprobs, so that a seed gives the same tokens in any batch.

    u(seed, index) -> the first id whose cumulative probability exceeds u

Each draw is a function of (seed, token index) alone: no generator has a state, so it does not matter what
else is in the batch, when a request was resumed, or on which engine. Distributions are those of transformers'
warpers in the order temperature, top_k, top_p (ties at the k-th place stay in).

Invariants
  1. The logprob returned is that of the distribution the token was drawn from, in fp32. For greedy rows that
     is the softmax of the raw logits (temperature 1, nothing filtered).
  2. A token of probability 0 is never returned. A row that is not finite gives a logprob that is not finite,
     and the caller ends that request.
Called by slot_engine.py once per step. Elsewhere called sampler, logits processors.
"""

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64 (Steele, Lea, Flood 2014), as are the two below
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
SMALLEST = np.finfo(np.float32).tiny  # a temperature below it would be 0 in fp32


def uniforms(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """(n,) f32 in (0, 1) for (n,) u64 seeds and (n,) u64 token indexes."""
    x = mix(mix(seeds + GOLDEN) + indexes * GOLDEN)
    # 23 bits and a half: exact in fp32 and never 0 or 1.
    return ((x >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def mixed_seeds(seeds: list[int], indexes: list[int]) -> list[int]:
    """Seeds of 63 bits for generators that have their own state, unrelated for every (seed, index)."""
    of_seed = mix(np.array(seeds, dtype=np.uint64) + GOLDEN)
    return (mix(of_seed + np.array(indexes, dtype=np.uint64) * GOLDEN) >> np.uint64(1)).tolist()


def sample(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    ids (n,) i64 and logprobs (n,) f32 for logits (n, vocab).

    temperature 0 is greedy; top_k 0 and top_p 1 are off. `draws` are `uniforms` of the rows. Work that no row
    asks for is not done: a plain temperature-1 batch costs one softmax and one cumulative sum.
    """
    device = logits.device
    greedy = temperature == 0
    x = logits.float()
    if (temperature != 1).any():
        divisor = torch.from_numpy(
            np.where(greedy, 1, np.maximum(temperature, SMALLEST)).astype(np.float32)
        ).to(device)
        # From the maximum down, so that a very small temperature gives -inf and not NaN.
        x = (x - x.amax(-1, keepdim=True)) / divisor[:, None]
    limited = np.flatnonzero(((top_k > 0) | (top_p < 1)) & ~greedy)
    if limited.size:
        rows = torch.from_numpy(limited).to(device)
        x = x.index_copy(0, rows, restrict(x.index_select(0, rows), top_k[limited], top_p[limited]))
    probs = x.softmax(-1)
    if greedy.all():
        ids = probs.argmax(-1, keepdim=True)
    else:
        ids = draw(probs, torch.from_numpy(draws).to(device))
        if greedy.any():
            ids = torch.where(
                torch.from_numpy(greedy).to(device)[:, None], probs.argmax(-1, keepdim=True), ids
            )
    # The log of one entry, not of all: a drawn probability is never so small that fp32 would lose it.
    logprobs = probs.gather(1, ids).log_()
    return ids.view(-1).cpu().numpy(), logprobs.view(-1).cpu().numpy()


def draw(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """(n, 1) ids by inverse transform: the first whose cumulative probability exceeds u times the total."""
    cumulative = probs.cumsum(-1)
    ids = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    return ids.clamp_(max=probs.shape[1] - 1)


def restrict(x: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """Logits (n, vocab) with -inf where top_k, then top_p of what is left, removes an id."""
    vocab = x.shape[1]
    ordered, order = x.sort(-1)  # ascending
    place = np.where((top_k > 0) & (top_k < vocab), vocab - top_k, 0)
    least = ordered.gather(1, torch.from_numpy(place.astype(np.int64)).to(x.device)[:, None])
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    tail = np.where(top_p < 1, 1.0 - top_p, -1.0).astype(np.float32)  # -1 drops nothing
    dropped = ordered.softmax(-1).cumsum_(-1) <= torch.from_numpy(tail).to(x.device)[:, None]
    dropped[:, -1] = False  # the likeliest always stays
    ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(x).scatter_(1, order, ordered)
