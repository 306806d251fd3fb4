"""
What an engine may be asked for: one set of checks of `generate` and `score`, so that all refuse the same.

Each raises WorkerError with the field that is wrong, its value and what is allowed. Called by slot_engine.py
and engine_vllm.py before a request gets its handle. The twin in TypeScript is workers/simulated_engine.ts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime import bad_request, unsupported

SEED_MASK = 2**64 - 1


def check_generate(
    fields: dict[str, Any], prompt: np.ndarray, *, vocab_size: int, max_len: int, routes: bool
) -> None:
    """`routes`: whether this engine can return expert routes."""
    s, n = fields["sampling"], len(prompt)
    if n == 0:
        raise bad_request("The prompt is empty", "prompt")
    check_ids(prompt, "prompt", vocab_size)
    if not 0 <= fields["already"] < n:
        raise bad_request(f"already must be 0 to {n - 1} for this prompt, got {fields['already']}", "already")
    if fields["heads"] != 0:
        raise unsupported("This engine returns no top-k heads", "heads")
    if fields["want_routes"] and not routes:
        raise unsupported("This engine returns no expert routes", "want_routes")
    if not s["temperature"] >= 0:
        raise bad_request(f"temperature must be at least 0, got {s['temperature']}", "sampling.temperature")
    if not 0 < s["top_p"] <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {s['top_p']}", "sampling.top_p")
    if s["top_k"] < 0:
        raise bad_request(f"top_k must be at least 0, got {s['top_k']}", "sampling.top_k")
    if s["max_tokens"] < 1:
        raise bad_request(f"max_tokens must be at least 1, got {s['max_tokens']}", "sampling.max_tokens")
    if n >= max_len:
        raise bad_request(f"A prompt of {n} tokens leaves no room in max_len {max_len}", "prompt")
    if n + s["max_tokens"] > max_len:
        raise bad_request(
            f"Prompt {n} + max_tokens {s['max_tokens']} is over max_len {max_len}", "sampling.max_tokens"
        )
    if "" in s["stop"]:
        raise bad_request("A stop string is empty", "sampling.stop")
    check_ids(np.array(s["stop_token_ids"], dtype=np.int64), "sampling.stop_token_ids", vocab_size)


def check_ids(ids: np.ndarray, name: str, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise bad_request(f"Token id {outside[0]} is outside the vocabulary of {vocab_size}", name)


def check_rows(ids: np.ndarray, lengths: np.ndarray, vocab_size: int) -> None:
    check_ids(ids, "ids", vocab_size)
    if (lengths < 0).any() or lengths.sum() != len(ids):
        raise bad_request(f"lengths add up to {lengths.sum()}, there are {len(ids)} ids", "lengths")


def check_transport(source: dict[str, Any], known: Sequence[str]) -> None:
    if source["transport"] not in known:
        text = f"Transport {source['transport']} is not known here, want {' or '.join(known)}"
        raise unsupported(text, "source.transport")
