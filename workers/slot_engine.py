"""
The embedded engine: continuous batching over an unmodified transformers model, one slot per request.

    submit -> slot -> prefill, in chunks -> decode, a token per step -> ended; its text stays as a prefix

    step = choose rows -> one forward over one packed line -> sample -> one `tokens` event

State is one numpy array per property with an entry per slot, so that nothing in a decode step is done per
request. `ids[slot, :known]` is the text of a slot, `ids[slot, :done]` the part whose keys and values exist; a
request decodes when one token is missing, else its prompt is still being worked on.

Invariants
  1. A token is sampled by one version and carries it; events never span two, since weights change only while
     paused.
  2. A request reuses a prefix only where every key was made by the current weights. Idle prefixes are dropped
     when weights change; requests that go on with old keys (`keep`) are marked stale and are nobody's source.
  3. The last prompt token always runs: its logits are needed.
  4. What is sampled depends on the request, never on the batch (sampling.py).
  5. Loading is all or nothing: a mismatch is fatal before the first byte is copied. What was staged is looked
     at once more after the last: a file written meanwhile is fatal, too.

Prefix reuse compares ids, over all slots: in place where nothing another conversation needs is lost, else by
copying. A session id only breaks ties. A request whose prefix another one is just computing waits for it: a
group of rollouts costs one prefill, of the prompt and of every later turn in which it said the same, and
re-prefill after a refit shares in the same way. With bf16 the
decoder layers compute in bf16; embedding, routers, last norm and lm_head stay fp32, as in model.py.
Single-threaded, no socket, no waiting: engine_torch.py drives it. Elsewhere called scheduler, LLM engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import PARAM_DTYPES, check_family, check_loaded, loading
from request_checks import SEED_MASK, check_generate, check_rows, check_transport
from runtime import WorkerError, bad_request, fatal, unsupported
from sampling import sample, uniforms
from slot_attention import ATTENTION, Chunk, Plan, SlotCache, on_device, plan_step
from text_stream import TextStream
from transport import receive
from weights import Segment, WeightsError, check_fit, hub_layout, load_into, verify_segment

MIN_WAIT = 16  # tokens of prefill saved, by all that wait, that are worth one step of waiting
RETRY_AFTER_MS = 50
SCORE_LOGITS = 2**24  # fp32 logits that exist at a time while scoring
EVERY = np.iinfo(np.int64).max
MODES = ("keep", "drain", "abort")
STATS = ("running", "waiting", "tokens", "steps", "prefill_tokens", "cached_tokens", "late_aborts", "busy_s")

Event = tuple[dict[str, Any], dict[str, np.ndarray]]  # fields, frames of `tokens`


@dataclass
class Line:
    """The rows of one step."""

    ids: np.ndarray  # (T,)
    slots: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    decoding: int
    chunks: list[Chunk]
    sampled: np.ndarray  # slots that get a token
    at: np.ndarray  # where in the line their logits come from


@dataclass
class Outbox:
    """What the next `tokens` event carries besides freshly sampled tokens."""

    ended: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # handle -> text


@dataclass
class Staged:
    """Weights that were verified while the engine sampled."""

    fields: dict[str, Any]  # of stage_weights
    segment: Segment
    tensors: dict[str, torch.Tensor]


# ---- The model ----


def load_model(path: str, dtype: str, device: str):
    """Ready to be driven by Engine. Raises ModelError or ValueError with the cause."""
    if dtype not in PARAM_DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}, want one of {', '.join(PARAM_DTYPES)}")
    # bf16: as the files have it, since embedding and head stay fp32 and casting bf16 up loses nothing.
    files_type = torch.float32 if dtype == "float32" else "auto"
    with loading(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=files_type, attn_implementation=ATTENTION, output_loading_info=True
        )
    model, report = loaded
    check_loaded(path, report)
    return prepare_model(model, PARAM_DTYPES[dtype], device)


def prepare_model(model, dtype: torch.dtype, device: str):
    check_family(model.config)
    model.set_attn_implementation(ATTENTION)
    set_types(model, dtype)
    hub_layout(model)  # made now, since a refit should not wait for it
    return model.to(device).eval().requires_grad_(False)


def set_types(model, dtype: torch.dtype) -> None:
    """Decoder layers in `dtype`; embedding, routers, last norm, rotary frequencies and lm_head in fp32."""
    for module in (*model.base_model.children(), model.get_output_embeddings()):
        module.to(dtype if module is model.base_model.layers else torch.float32)
    routers = [layer.mlp.gate for layer in model.base_model.layers if hasattr(layer.mlp, "gate")]
    for router in routers if dtype != torch.float32 else ():
        router.float()
        router.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))


class Engine:
    """Driven by one thread: calls take effect between steps. Methods raise WorkerError."""

    def __init__(self, model, model_path: str, *, max_requests: int, max_len: int, prefill_tokens: int):
        config = model.config
        self.model = model
        self.model_path = model_path
        self.body = model.base_model
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.max_requests, self.max_len, self.prefill_tokens = max_requests, max_len, max(1, prefill_tokens)
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.base_model.layers[0].input_layernorm.weight.dtype
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = SlotCache(
            config.num_hidden_layers, config.num_key_value_heads, head_dim, self.dtype, self.device
        )
        self.version = 0
        self.paused = False
        self._epoch = -1
        self._before = EVERY  # only handles below run: a draining pause
        self._clear = False  # of the draining pause
        self._pause_answer: Event | None = None
        self._staged: Staged | None = None  # verified ahead of its load
        self._parts: dict[str, torch.Tensor] = {}  # loaded, the last one has not come
        self._next_handle = 1
        self._clock = 0
        self._unsound = False  # these weights gave something that is not finite, so other keys may be too
        self._outbox = Outbox()
        self.stats: dict[str, float] = dict.fromkeys(STATS, 0.0)
        self._make_slots(max_requests, max_len)

    def _make_slots(self, n: int, max_len: int) -> None:
        def zeros(dtype: type = np.int64) -> np.ndarray:
            return np.zeros(n, dtype=dtype)

        self.handle = zeros()  # of the request in the slot; 0 = idle
        self.session = np.full(n, None, dtype=object)
        self.slot_of: dict[str, int] = {}  # by session, of the texts in `session`
        self.ids = np.zeros((n, max_len), dtype=np.int32)
        self.known = zeros()  # tokens of text
        self.done = zeros()  # of them, tokens with keys and values
        self.made = zeros()  # tokens sampled by this request
        self.limit = zeros()  # max_tokens
        self.cached = zeros()  # prompt tokens that did not run
        self.fresh = zeros(bool)  # no prefix was looked for yet, beyond what the slot itself held
        self.stale = zeros(bool)  # some keys were made by older weights
        self.used = zeros()  # clock of the last use
        self.first = zeros()  # index within the turn of the first token made here: `already`
        self.seed = np.zeros(n, dtype=np.uint64)
        self.temperature = np.ones(n)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.top_p = np.ones(n)
        self.stop_ids = np.full((n, 1), -1, dtype=np.int64)  # padded with -1
        self.streams: dict[int, TextStream] = {}  # by slot
        self.wants_text: set[int] = set()  # slots

    @cached_property
    def tokenizer(self):
        """Loaded by the first request that needs text; most training runs have none."""
        try:
            return AutoTokenizer.from_pretrained(self.model_path)
        except (OSError, ValueError) as error:
            raise unsupported(
                f"Text and stop strings need a tokenizer in {self.model_path}: {error}", "want_text"
            ) from error

    def _decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def busy(self) -> bool:
        """A step would do something."""
        return not self.paused and bool(((self.handle > 0) & (self.handle < self._before)).any())

    # ---- Requests ----

    def submit(self, fields: dict[str, Any], prompt: np.ndarray) -> int:
        """A handle. The request waits while the engine is paused."""
        check_generate(fields, prompt, vocab_size=self.vocab_size, max_len=self.max_len, routes=False)
        if (self.handle > 0).all():
            raise WorkerError(
                "overloaded",
                f"Engine has {self.max_requests} requests, its limit",
                retry_after_ms=RETRY_AFTER_MS,
            )
        sampling = fields["sampling"]
        stream = None
        if fields["want_text"] or sampling["stop"]:
            stream = TextStream(self._decode, prompt.tolist(), fields["already"], sampling["stop"])
        slot = self._choose_slot(prompt, fields["session_id"])
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.handle[slot] = handle
        self.ids[slot, : len(prompt)] = prompt
        self.known[slot] = len(prompt)
        self.fresh[slot] = True
        self.cached[slot] = self.done[slot]
        self.made[slot] = 0
        self._name(slot, fields["session_id"])
        self._set_sampling(slot, sampling, fields["already"])
        if stream:
            self.streams[slot] = stream
        if fields["want_text"]:
            self.wants_text.add(slot)
        self._publish()
        return handle

    def _name(self, slot: int, session: str) -> None:
        before = self.session[slot]
        if self.slot_of.get(before) == slot:
            del self.slot_of[before]
        self.session[slot] = session
        self.slot_of[session] = slot

    def _set_sampling(self, slot: int, sampling: dict[str, Any], already: int) -> None:
        self.limit[slot] = sampling["max_tokens"]
        self.seed[slot] = np.uint64(sampling["seed"] & SEED_MASK)
        self.first[slot] = already
        self.temperature[slot] = sampling["temperature"]
        self.top_k[slot] = sampling["top_k"]
        self.top_p[slot] = sampling["top_p"]
        stops = sampling["stop_token_ids"]
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((len(self.stop_ids), len(stops) - self.stop_ids.shape[1]), -1, dtype=np.int64)
            self.stop_ids = np.concatenate((self.stop_ids, more), 1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops

    def abort(self, handles: list[int]) -> Event | None:
        """Handles that already ended are counted and passed over: their endings are on the way."""
        slots = np.flatnonzero(np.isin(self.handle, [h for h in handles if h > 0]))
        self.stats["late_aborts"] += len(set(handles)) - len(slots)
        for slot in slots.tolist():
            self._end(slot, "abort")
        self._settle()
        return self._event()

    def _end(self, slot: int, reason: str, detail: str | None = None) -> None:
        handle = int(self.handle[slot])
        cached = int(self.cached[slot])
        ending = {
            "handle": handle,
            "reason": reason,
            "detail": detail,
            "cached_tokens": cached,
            "routes": None,
        }
        self._outbox.ended.append(ending)
        self.stats["cached_tokens"] += cached
        stream = self.streams.pop(slot, None)
        if stream and slot in self.wants_text:
            held = stream.end()
            if held:
                self._outbox.texts[handle] = self._outbox.texts.get(handle, "") + held
        self.wants_text.discard(slot)
        self.handle[slot] = 0
        self.known[slot] = self.done[slot] = 0 if self.stale[slot] else self.done[slot]
        self.stale[slot] = False
        self.used[slot] = self._clock

    # ---- Prefixes ----

    def _common(self, text: np.ndarray, beyond: int = 0) -> np.ndarray:
        """(slots,) how many leading ids each slot's text has in common with this one; 0 where <= `beyond`."""
        n = len(text)
        common = np.zeros(len(self.known), dtype=np.int64)
        if n <= beyond:
            return common
        # One id apart rules most of them out.
        near = np.flatnonzero((self.known > beyond) & (self.ids[:, beyond] == text[beyond]))
        if near.size:
            differs = self.ids[near, :n] != text
            first = np.where(differs.any(1), differs.argmax(1), n)
            common[near] = np.minimum(first, self.known[near])
        return common

    def _choose_slot(self, prompt: np.ndarray, session: str) -> int:
        """An idle slot, cut to the prefix that it shares with the prompt."""
        own = self.slot_of.get(session)
        if own is not None and self.handle[own] == 0 and not self.stale[own]:
            n = int(self.done[own])
            if 0 < n < len(prompt) and np.array_equal(self.ids[own, :n], prompt[:n]):
                return own  # the next turn of a conversation: all of its text goes on
        idle = self.handle == 0
        common = np.where(self.stale, 0, np.minimum(self._common(prompt[:-1]), self.done))
        mine = self.session == session
        # In place where this is the longest prefix there is, and no other conversation wants the rest.
        spare = idle & (common > 0) & (common == common.max()) & (mine | (common == self.done))
        if spare.any():
            slot = int(np.flatnonzero(spare)[np.argmax(mine[spare])])
            self.done[slot] = common[slot]
            return slot
        # Empty ones first, the lowest of them, so that running slots lie side by side; then the oldest text.
        index = np.flatnonzero(idle)
        slot = int(index[np.lexsort((index, self.used[index], ~mine[index], self.done[index] > 0))[0]])
        self.done[slot] = 0
        return slot

    def _find_prefix(self, slot: int, done: np.ndarray, planned: np.ndarray) -> tuple[int, int, int]:
        """
        (source, length) of the longest prefix there is, the slot's own counted, and the length that there
        will be after this step, which computes those of `planned`. `done` is what existed before the step.
        """
        own = int(self.done[slot])
        common = self._common(self.ids[slot, : self.known[slot] - 1], own)
        common[self.stale] = 0
        common[slot] = own
        have = np.minimum(common, done)
        source = int(have.argmax()) if have.max() > own else slot
        return source, int(have[source]), max(int(have[source]), int(common[planned].max(initial=0)))

    # ---- A step ----

    @torch.inference_mode()
    def step(self) -> Event | None:
        """One forward. None where nothing was to be done or said."""
        started = time.perf_counter()
        line = self._choose_rows()
        if line is None:
            return None
        self._clock += 1
        self.cache.ensure(
            int(line.slots.max()) + 1, int(line.positions.max()) + 1, self.max_requests, self.max_len
        )
        plan = plan_step(self.cache, line.slots, line.positions, line.decoding, line.chunks, self.dtype)
        hidden = self._hidden(line.ids, line.positions, plan)
        if line.chunks:
            hidden = hidden.index_select(0, on_device(line.at, self.device))
        self._mark_done(line)
        event = self._advance(line.sampled, self._logits(hidden)) if line.sampled.size else None
        self.stats["steps"] += 1
        self.stats["prefill_tokens"] += len(line.ids) - line.decoding
        self.stats["busy_s"] += time.perf_counter() - started
        self._publish()
        return event

    def _choose_rows(self) -> Line | None:
        slots = np.flatnonzero((self.handle > 0) & (self.handle < self._before))
        if self.paused or slots.size == 0:
            return None
        behind = (self.known[slots] - self.done[slots] > 1) | self.fresh[slots]
        chunks: list[tuple[int, int, int]] = []  # slot, from, to
        if behind.any():
            chunks = self._choose_chunks(slots[behind])
            slots = slots[(self.known[slots] - self.done[slots] == 1) & ~self.fresh[slots]]
        positions = self.done[slots]
        ids = self.ids[slots, positions]
        line = Line(ids, slots, positions, len(slots), [], slots, np.arange(len(slots)))
        if chunks:
            self._append_chunks(line, chunks)
        return line

    def _choose_chunks(self, slots: np.ndarray) -> list[tuple[int, int, int]]:
        """Pieces of prompts within the budget, oldest request first; prefixes are found and copied here."""
        chunks: list[tuple[int, int, int]] = []
        copies: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (from, to) -> pairs (slot, source)
        waiting: list[tuple[int, int, int]] = []  # slot, source, length: may wait for a longer one
        done, planned = self.done.copy(), np.zeros(len(self.done), dtype=bool)
        budget, saved = self.prefill_tokens, 0
        for slot in slots[np.argsort(self.handle[slots])].tolist():
            if budget <= 0:
                break
            if self.fresh[slot]:
                source, length, soon = self._find_prefix(slot, done, planned)
                if soon > length:
                    waiting.append((slot, source, length))
                    saved += soon - length
                    continue
                self._take_prefix(slot, source, length, copies)
            budget -= self._plan_chunk(slot, budget, chunks)
            planned[slot] = True
        for slot, source, length in waiting if saved < MIN_WAIT else ():
            self._take_prefix(slot, source, length, copies)
            budget -= self._plan_chunk(slot, max(1, budget), chunks)
        for (start, end), pairs in copies.items():
            to, source = zip(*pairs, strict=True)
            self.cache.ensure(max(to) + 1, end, self.max_requests, self.max_len)
            self.cache.copy(list(to), list(source), start, end)
        return chunks

    def _take_prefix(
        self, slot: int, source: int, length: int, copies: dict[tuple[int, int], list[tuple[int, int]]]
    ) -> None:
        if source != slot:
            copies.setdefault((int(self.done[slot]), length), []).append((slot, source))
        self.fresh[slot] = False
        self.done[slot] = length
        if self.made[slot] == 0:
            self.cached[slot] = length

    def _plan_chunk(self, slot: int, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        """Tokens of it; none where only the last one is missing, which is a decoding row."""
        start, missing = int(self.done[slot]), int(self.known[slot] - self.done[slot])
        if missing == 1:
            return 0
        count = min(missing, budget)
        chunks.append((slot, start, start + count))
        return count

    def _append_chunks(self, line: Line, chunks: list[tuple[int, int, int]]) -> None:
        at = len(line.ids)
        ids, slots, positions, ready, ends = [line.ids], [line.slots], [line.positions], [], []
        for slot, start, end in chunks:
            line.chunks.append(Chunk(at, at + end - start, start, slot))
            ids.append(self.ids[slot, start:end])
            slots.append(np.full(end - start, slot))
            positions.append(np.arange(start, end))
            at += end - start
            if end == self.known[slot]:
                ready.append(slot)
                ends.append(at - 1)
        line.ids, line.slots, line.positions = (np.concatenate(x) for x in (ids, slots, positions))
        line.sampled = np.concatenate((line.sampled, np.array(ready, dtype=np.int64)))
        line.at = np.concatenate((line.at, np.array(ends, dtype=np.int64)))

    def _hidden(self, ids: np.ndarray, positions: np.ndarray, plan: Plan) -> torch.Tensor:
        """(T, hidden) after the last norm."""
        tokens = on_device(ids.astype(np.int64), self.device)[None]
        out = self.body(
            inputs_embeds=self.embedding(tokens).to(self.dtype),
            position_ids=on_device(positions, self.device)[None],
            use_cache=False,
            plan=plan,
        )
        return out.last_hidden_state[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden.to(self.head.weight.dtype))

    def _mark_done(self, line: Line) -> None:
        self.done[line.slots[: line.decoding]] += 1
        for chunk in line.chunks:
            self.done[chunk.slot] = chunk.start + chunk.last - chunk.first

    def _advance(self, slots: np.ndarray, logits: torch.Tensor) -> Event | None:
        """Samples a token for each of these slots, ends those that are finished."""
        indexes = (self.first[slots] + self.made[slots]).astype(np.uint64)
        draws = uniforms(self.seed[slots], indexes)
        tokens, logprobs = sample(
            logits, self.temperature[slots], self.top_k[slots], self.top_p[slots], draws
        )
        handles = self.handle[slots]
        sound = np.isfinite(logprobs)
        if not sound.all():
            for slot in slots[~sound].tolist():
                self._end(slot, "error", "the logits are not finite")
                self.known[slot] = self.done[slot] = 0
                self.cache.wipe([slot])
            self._unsound = True
            slots, tokens, logprobs, handles = slots[sound], tokens[sound], logprobs[sound], handles[sound]
        self.ids[slots, self.known[slots]] = tokens
        self.known[slots] += 1
        self.made[slots] += 1
        self.used[slots] = self._clock
        self.stats["tokens"] += len(slots)
        self._end_finished(slots, tokens)
        self._settle()
        return self._event(handles, tokens, logprobs)

    def _end_finished(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        stopped = (tokens[:, None] == self.stop_ids[slots]).any(1)
        finished = stopped | (self.made[slots] >= self.limit[slots])
        strings = self._read_text(slots, tokens) if self.streams else {}
        for row in np.flatnonzero(finished).tolist():
            slot = int(slots[row])
            if slot not in strings:
                self._end(slot, "stop" if stopped[row] else "length")
        for slot, string in strings.items():
            self._end(slot, "stop", string)

    def _read_text(self, slots: np.ndarray, tokens: np.ndarray) -> dict[int, str]:
        """Slots that completed a stop string, with the string."""
        found = {}
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            stream = self.streams.get(slot)
            if stream is None:
                continue
            delta, string = stream.push(token)
            if delta and slot in self.wants_text:
                self._outbox.texts[int(self.handle[slot])] = delta
            if string is not None:
                found[slot] = string
        return found

    def _event(
        self,
        handles: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
        logprobs: np.ndarray | None = None,
    ) -> Event | None:
        """The `tokens` event of what happened since the last one."""
        outbox, self._outbox = self._outbox, Outbox()
        none = np.zeros(0, dtype=np.int32)
        handles, tokens, logprobs = (none if x is None else x for x in (handles, tokens, logprobs))
        counts = np.ones(len(handles), dtype=np.int32)
        texts: list[str] = []
        if outbox.texts or self.wants_text:
            # Text that was held back until an abort comes without a token.
            late = [h for h in outbox.texts if h not in set(handles.tolist())]
            handles = np.concatenate((handles, np.array(late, dtype=handles.dtype)))
            counts = np.concatenate((counts, np.zeros(len(late), dtype=np.int32)))
            texts = [outbox.texts.get(h, "") for h in handles.tolist()]
        if not len(handles) and not outbox.ended:
            return None
        frames = {
            "handles": handles.astype(np.int32),
            "counts": counts,
            "ids": tokens.astype(np.int32),
            "logprobs": logprobs.astype(np.float32),
        }
        return {"version": self.version, "texts": texts, "ended": outbox.ended}, frames

    def _publish(self) -> None:
        live = int(np.count_nonzero(self.handle))
        running = 0 if self.paused else int(np.count_nonzero((self.handle > 0) & (self.done > 0)))
        self.stats["running"], self.stats["waiting"] = running, live - running

    # ---- Pause, load, resume ----

    def pause(self, epoch: int, mode: str, clear_cache: bool) -> Event | None:
        """Endings of mode abort. Repeating an epoch changes nothing. `pause_answer` tells when it holds."""
        if mode not in MODES:
            raise bad_request(f"mode must be keep, drain or abort, got {mode}", "mode")
        if epoch < self._epoch:
            raise bad_request(f"Pause of epoch {epoch} comes after epoch {self._epoch}", "epoch")
        if epoch == self._epoch:
            return None
        self._epoch, self._pause_answer, self._clear = epoch, None, clear_cache
        if mode == "drain" and not self.paused:
            self._before = min(self._before, self._next_handle)
        else:
            self._before = 0  # nothing is waited for
        if mode == "abort":
            for slot in np.flatnonzero(self.handle).tolist():
                self._end(slot, "abort")
        self._settle()
        return self._event()

    @property
    def pause_answer(self) -> Event | None:
        """Reply of the last pause; None while it drains."""
        return self._pause_answer

    def cancel_drain(self) -> None:
        """The pause that drains is no longer wanted."""
        if self._pause_answer is None:
            self._epoch, self._before = -1, EVERY

    def _settle(self) -> None:
        """A pause takes effect once nothing that it waits for is left."""
        if self._before == EVERY or ((self.handle > 0) & (self.handle < self._before)).any():
            return
        self.paused, self._before = True, EVERY
        if self._clear:
            self._forget(np.ones(len(self.handle), dtype=bool))
        live = np.flatnonzero(self.handle)
        live = live[np.argsort(self.handle[live])]
        frames = {"handles": self.handle[live].astype(np.int32), "totals": self.made[live].astype(np.int32)}
        self._pause_answer = {"version": self.version}, frames
        self._publish()

    def _forget(self, slots: np.ndarray) -> None:
        """Keys of these slots (a mask) are void: idle ones are empty, requests prefill again."""
        self.done[slots] = 0
        self.stale[slots] = False
        self.known[slots & (self.handle == 0)] = 0
        self.fresh[slots & (self.handle > 0)] = True

    def stage_weights(self, fields: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """What makes the reply, in a thread of its own while steps go on. Any mismatch is fatal."""
        check_transport(fields["source"], ("file",))

        def verify() -> dict[str, Any]:
            started = time.perf_counter()
            staged = self._staged
            try:
                if staged is None or staged.fields != fields:
                    staged = Staged(fields, *Segment.verify(fields["source"]["path"], fields["tensors"]))
                    check_fit(self.model, staged.tensors)
                staged.segment.check()
            except Exception as error:
                raise fatal(f"Cannot stage version {fields['version']}: {error}") from error
            self._staged = staged
            return {"verify_ms": 1000 * (time.perf_counter() - started)}

        return verify

    @torch.inference_mode()
    def load_weights(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The reply. Any mismatch is fatal, and then the model is as it was."""
        version = fields["version"]
        if not self.paused:
            raise bad_request(f"Cannot load version {version}: the engine is not paused", "version")
        check_transport(fields["source"], ("file", "nccl"))
        started = time.perf_counter()
        try:
            if fields["source"]["transport"] == "file":
                segment, tensors = self._verified(fields)
            else:
                segment = None
                tensors = dict(receive(fields["source"]["path"], fields["tensors"], self.model.device))
            twice = sorted(tensors.keys() & self._parts.keys())
            if twice:
                raise WeightsError(f"Tensor {twice[0]} was sent twice")
            verified = time.perf_counter()
            loaded = len(tensors)
            if fields["last"]:
                load_into(self.model, self._parts | tensors)
                if segment is not None:
                    segment.check()
                self._parts = {}
                self._changed(version)
            else:
                # The file may be written again before the last part comes.
                self._parts |= {name: tensor.clone() for name, tensor in tensors.items()}
        except Exception as error:
            raise fatal(f"Cannot load version {version}: {error}") from error
        ended = time.perf_counter()
        return {
            "loaded": loaded,
            "verify_ms": 1000 * (verified - started),
            "load_ms": 1000 * (ended - verified),
        }

    def _verified(self, fields: dict[str, Any]) -> tuple[Segment | None, dict[str, torch.Tensor]]:
        """What was staged, where it is all that is loaded; else the tensors are verified now."""
        staged, self._staged = self._staged, None
        if staged is None or fields != staged.fields | {"last": True}:
            return None, verify_segment(fields["source"]["path"], fields["tensors"])
        staged.segment.check()
        return staged.segment, staged.tensors

    def _changed(self, version: int) -> None:
        self.version = version
        # A request that has sampled nothing counts as new: it starts over with the new weights.
        self._forget((self.handle == 0) | (self.made == 0))
        self.stale |= self.done > 0
        if self._unsound:
            self.cache.wipe(np.flatnonzero(self.done == 0).tolist())
            self._unsound = False

    def resume(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise bad_request(
                f"Cannot resume epoch {epoch}: the last pause was of epoch {self._epoch}", "epoch"
            )
        if self._pause_answer is None:
            raise bad_request(f"Cannot resume epoch {epoch}: its pause still drains", "epoch")
        if self._parts:
            raise fatal(f"Cannot resume: {len(self._parts)} tensors were sent, the last one was not")
        self.paused = False
        self._publish()

    # ---- Score ----

    @torch.inference_mode()
    def score(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """(N,) logprobs at temperature 1, 0 for the first of a row. Touches no slot: it works at any time."""
        check_rows(ids, lengths, self.vocab_size)
        out = np.zeros(len(ids), dtype=np.float32)
        for first, last, rows in score_lines(lengths, self.prefill_tokens):
            out[first:last] = self._score_line(ids[first:last].astype(np.int64), rows)
        return out

    def _score_line(self, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
        ends = np.cumsum(lengths)
        chunks = [Chunk(int(end - n), int(end)) for end, n in zip(ends, lengths, strict=True)]
        positions = np.concatenate([np.arange(n) for n in lengths])
        hidden = self._hidden(ids, positions, Plan(None, chunks=chunks))
        wanted = np.flatnonzero(positions > 0)
        out = np.zeros(len(ids), dtype=np.float32)
        at_a_time = max(1, SCORE_LOGITS // self.vocab_size)
        for i in range(0, len(wanted), at_a_time):
            part = wanted[i : i + at_a_time]
            logits = self._logits(hidden.index_select(0, on_device(part - 1, self.device))).float()
            target = on_device(ids[part], self.device)[:, None]
            out[part] = logits.log_softmax(-1).gather(1, target)[:, 0].cpu().numpy()
        return out


def score_lines(lengths: np.ndarray, budget: int):
    """Yields (first, last, row lengths): rows packed into lines of up to `budget` tokens, or one long row."""
    first = last = 0
    rows: list[int] = []
    for n in lengths.tolist():
        if rows and last - first + n > budget:
            yield first, last, rows
            first, rows = last, []
        if n:
            rows.append(n)
            last += n
    if rows:
        yield first, last, rows
