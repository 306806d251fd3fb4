"""
Every message of molt, once (twin: molt/protocol.ts; a test compares this text and the table).

One controller ROUTER, one DEALER per worker. A message is a msgpack header map, then zero or more raw
little-endian tensor frames. The header is {v, kind, seq, id | re, deadline_ms?, frames: [{name, dtype,
shape}], ...fields}. `seq` counts from 0 per direction and process. A request carries `id` and gets exactly
one reply, `ok` or `error`, that carries it back as `re`; a message with neither is an event. Nothing is
pickled. Fields and frames are exactly those of the table: a missing, extra or mistyped one is an error
that names it. Integers stay within 2^53 (JavaScript sends those from 2^32 on as whole floats); floats are
finite and are coerced on receipt, since 1.0 travels as the integer 1; null means absent and is legal only
where the type ends in `?`. NaN and infinity travel only inside frames. A message is at most 64 MiB.
What is sent at about the same time travels as one ZeroMQ message, header and frames of each back to back.

Types: str int float bool json, `?` = may be null; {name: type} = record; {"*": type} = map;
{"?": type} = it or null; [type] = list.
Frames: the dtype of a one-dimensional tensor, `?` = may be left out. C controller, W any worker, E engine,
T trainer rank, K tokenizer, R runner.

  message         from -> to  reply                      when
  hello           W -> C      none (welcome or refused)  first message of a process
  welcome         C -> W      none (ready)               the worker is who it says it is; carries its options
  refused         C -> W      none                       protocol versions or secrets differ
  ready           W -> C      none                       model loaded, requests may come
  heartbeat       W -> C      none                       every heartbeat_ms from welcome on, with statistics
  ping            C -> W      {}                         answered by the I/O thread at any time
  stacks          C -> W      {text}                     all thread stacks; answered by the I/O thread
  stats           C -> W      {stats}                    what the work thread last published
  cancel          C -> W      {}                         ends the request with that id, as `cancelled`
  stop            C -> W      {}                         finish what runs, then exit 0
  generate        C -> E      {handle}                   sample a turn; the tokens come as `tokens`
  tokens          E -> C      none                       at most one per engine step, one policy version each
  abort           C -> E      {}                         ends handles with reason abort
  pause           C -> E      totals per live handle     its reply is the last message of the old version
  stage_weights   C -> E      {verify_ms}                at any time: a head start on load_weights
  load_weights    C -> E      {loaded, ...}              only while paused; all or nothing
  resume          C -> E      {}                         go on under the loaded version
  score           C -> E      logprobs                   temperature-1 logprobs of given ids
  rows            C -> T      {}                         part of a step's rows, kept until `run`
  run             C -> T      {sums, maxima}             one optimizer step over the rows
  logprobs        C -> T      logprobs                   forward only
  push_weights    C -> T      {tensors}                  write hub-named tensors where engines read them
  save            C -> T      {}                         every rank writes its share of a checkpoint
  restore         C -> T      {}                         the other way round
  export          C -> T      {}                         a Hugging Face directory
  render          C,R -> K    ids per item               whole conversation by the chat template
  suffix          C,R -> K    ids per item               what follows a sampled turn
  encode          C,R -> K    ids per item               text, no special tokens added
  decode          C,R -> K    {texts}                    ids to text
  parse           C,R -> K    {items}                    a sampled turn into content, reasoning, tool calls
  start           C -> R      {}                         begin a rollout
  turn            R -> C      tokens of the turn         sample for a rollout; answered when the turn ended
  abort_turn      R -> C      none                       the rollout no longer wants its running turn
  cancel_rollout  C -> R      none                       end a rollout with this reason
  rollout_done    R -> C      {}                         the whole rollout; sent again until answered
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Spec = Any  # a type name, [spec], or {name: spec}
Parts = list[bytes]

# ---- The table ----

NONE: dict[str, Any] = {"fields": {}, "frames": {}}
SAMPLING = {
    "temperature": "float",  # 0 = greedy
    "top_p": "float",  # 1 = off
    "top_k": "int",  # 0 = off
    "max_tokens": "int",
    "seed": "int",
    "stop": ["str"],
    "stop_token_ids": ["int"],
}
SPAN = {"version": "int", "from": "int", "to": "int"}  # offsets into the turn's sampled ids
BLOB = {"sha256": "str", "dtype": "str", "shape": ["int"]}  # file of that name among the run's blobs
# transport: file, nccl, ipc; path: of the segment, of a group (transport.py), of a file of handles
SOURCE = {"transport": "str", "path": "str"}
TENSORS = [{"name": "str", "dtype": "str", "shape": ["int"], "offset": "int", "bytes": "int", "crc32": "int"}]
ITEM_IDS = {  # errors[i] null = fine
    "fields": {"errors": ["str?"]},
    "frames": {"ids": "i32", "lengths": "i32"},
}

MESSAGES: dict[str, dict[str, Any]] = {
    "hello": {
        "from": "W",
        "to": "C",
        "fields": {
            "protocol_version": "int",
            "worker_kind": "str",
            "worker_id": "str",
            "pid": "int",
            "host": "str",
            "secret": "str",
            "capabilities": "json",
        },
        "frames": {},
    },
    "welcome": {
        "from": "C",
        "to": "W",
        "fields": {"incarnation": "int", "options": "json", "heartbeat_ms": "int"},
        "frames": {},
    },
    "refused": {"from": "C", "to": "W", "fields": {"reason": "str"}, "frames": {}},
    "ready": {"from": "W", "to": "C", "fields": {"info": "json"}, "frames": {}},
    "heartbeat": {
        "from": "W",
        "to": "C",
        # received: highest seq seen, -1 = none; beyond it is unsent
        "fields": {"received": "int", "stats": {"*": "float"}},
        "frames": {},
    },
    "ping": {"from": "C", "to": "W", "fields": {}, "frames": {}, "reply": NONE, "io": True},
    "stacks": {
        "from": "C",
        "to": "W",
        "fields": {},
        "frames": {},
        "reply": {"fields": {"text": "str"}, "frames": {}},
        "io": True,
    },
    "stats": {
        "from": "C",
        "to": "W",
        "fields": {},
        "frames": {},
        "reply": {"fields": {"stats": {"*": "float"}}, "frames": {}},
        "io": True,
    },
    "cancel": {"from": "C", "to": "W", "fields": {"request": "int"}, "frames": {}, "reply": NONE, "io": True},
    "stop": {"from": "C", "to": "W", "fields": {}, "frames": {}, "reply": NONE, "io": True},
    "generate": {
        "from": "C",
        "to": "E",
        "fields": {
            "rollout_id": "str",
            "attempt": "int",
            "turn": "int",
            "session_id": "str",  # requests of one conversation share it: a hint for prefix reuse
            "sampling": SAMPLING,
            # trailing prompt ids this request sampled earlier; max_tokens is what is still to come
            "already": "int",
            "want_text": "bool",
            "heads": "int",  # top-k heads per token; 0 = none
            "want_routes": "bool",
        },
        "frames": {"prompt": "i32"},
        "reply": {"fields": {"handle": "int"}, "frames": {}},
    },
    "tokens": {
        "from": "E",
        "to": "C",
        "fields": {
            "version": "int",  # sampled all of these
            "texts": ["str"],  # new text per handle; empty list when no request asked for text
            "ended": [
                {
                    "handle": "int",
                    "reason": "str",  # stop length abort error
                    "detail": "str?",
                    "cached_tokens": "int",
                    # expert ids (tokens, MoE layers, k) of all ids but the last; null = not wanted
                    "routes": {"?": BLOB},
                }
            ],
        },
        "frames": {"handles": "i32", "counts": "i32", "ids": "i32", "logprobs": "f32"},
    },
    "abort": {"from": "C", "to": "E", "fields": {"handles": ["int"]}, "frames": {}, "reply": NONE},
    "pause": {
        "from": "C",
        "to": "E",
        "fields": {"epoch": "int", "mode": "str", "clear_cache": "bool"},  # keep, drain, abort
        "frames": {},
        # totals: tokens sampled so far
        "reply": {"fields": {"version": "int"}, "frames": {"handles": "i32", "totals": "i32"}},
    },
    "stage_weights": {
        "from": "C",
        "to": "E",
        # the load_weights of all this then only swaps
        "fields": {"version": "int", "source": SOURCE, "tensors": TENSORS},
        "frames": {},
        "reply": {"fields": {"verify_ms": "float"}, "frames": {}},
    },
    "load_weights": {
        "from": "C",
        "to": "E",
        "fields": {"version": "int", "source": SOURCE, "tensors": TENSORS, "last": "bool"},
        "frames": {},
        "reply": {"fields": {"loaded": "int", "verify_ms": "float", "load_ms": "float"}, "frames": {}},
    },
    "resume": {"from": "C", "to": "E", "fields": {"epoch": "int"}, "frames": {}, "reply": NONE},
    "score": {
        "from": "C",
        "to": "E",
        "fields": {},
        "frames": {"ids": "i32", "lengths": "i32"},
        "reply": {"fields": {"version": "int"}, "frames": {"logprobs": "f32"}},  # first token of each row: 0
    },
    "rows": {
        "from": "C",
        "to": "T",
        "fields": {"step": "int", "part": "int", "of": "int"},
        "frames": {
            "ids": "i32",
            "lengths": "i32",
            "loss_mask": "u8",
            "stale": "u8?",  # 1 = not sampled by the version being trained; left out when no trained token is
            "rollout_logprobs": "f32",
            "old_logprobs": "f32?",  # left out when one optimizer step per batch makes the ratio 1
            "advantages": "f32",
        },
        "reply": NONE,
    },
    "run": {
        "from": "C",
        "to": "T",
        "fields": {
            "step": "int",
            "version": "int",
            "micro_batches": [["int"]],  # row numbers; [] = a dummy, so that every rank runs the same number
            "packed": "bool",  # one packed row per micro-batch, or padded rows
            "denominators": {"tokens": "float"},  # over the whole batch and all ranks
            "lr": "float",
            "temperature": "float",
            "loss": {
                "clip_low": "float",
                "clip_high": "float",
                "is_level": "str",  # off, token
                "is_mode": "str",  # mask, clip, trunc
                "is_low": "float",
                "is_high": "float",
            },
        },
        "frames": {},
        # of this rank; never means
        "reply": {"fields": {"sums": {"*": "float"}, "maxima": {"*": "float"}}, "frames": {}},
    },
    "logprobs": {
        "from": "C",
        "to": "T",
        "fields": {"which": "str", "temperature": "float"},  # which: policy
        "frames": {"ids": "i32", "lengths": "i32"},
        "reply": {"fields": {}, "frames": {"logprobs": "f32"}},  # first token of each row: 0
    },
    "push_weights": {
        "from": "C",
        "to": "T",
        # as in load_weights; only `file` answers tensors
        "fields": {"version": "int", "transport": "str", "path": "str"},
        "frames": {},
        # ranks other than 0 answer with an empty list
        "reply": {"fields": {"tensors": TENSORS, "bytes": "int"}, "frames": {}},
    },
    "save": {"from": "C", "to": "T", "fields": {"step": "int", "path": "str"}, "frames": {}, "reply": NONE},
    "restore": {
        "from": "C",
        "to": "T",
        "fields": {"path": "str"},
        "frames": {},
        "reply": {"fields": {"step": "int"}, "frames": {}},
    },
    "export": {"from": "C", "to": "T", "fields": {"path": "str"}, "frames": {}, "reply": NONE},
    "render": {
        "from": "CR",
        "to": "CK",
        "fields": {
            "items": [
                {
                    "messages": "json",
                    "tools": "json",
                    "template_kwargs": "json",
                    "add_generation_prompt": "bool",
                }
            ],
        },
        "frames": {},
        "reply": ITEM_IDS,
    },
    "suffix": {
        "from": "CR",
        "to": "CK",
        "fields": {
            "items": [
                {
                    "stub": "json",  # the assistant turn just sampled, as a message with its tool calls
                    "new_messages": "json",
                    "tools": "json",
                    "template_kwargs": "json",
                    # last ids of the sampled turn, the stop token among them when it was sampled
                    "last_ids": ["int"],
                }
            ],
        },
        "frames": {},
        "reply": ITEM_IDS,
    },
    "encode": {"from": "CR", "to": "CK", "fields": {"texts": ["str"]}, "frames": {}, "reply": ITEM_IDS},
    "decode": {
        "from": "CR",
        "to": "CK",
        "fields": {"skip_special": "bool"},
        "frames": {"ids": "i32", "lengths": "i32"},
        "reply": {"fields": {"texts": ["str"]}, "frames": {}},
    },
    "parse": {
        "from": "CR",
        "to": "CK",
        "fields": {"tools": ["json"]},  # per item; [] = calls are left in the content
        "frames": {"ids": "i32", "lengths": "i32"},
        "reply": {
            "fields": {
                "items": [
                    {
                        "text": "str",  # decoded, special tokens kept, the final stop token left out
                        "content": "str",
                        "reasoning": "str?",
                        "tool_calls": [{"name": "str", "arguments": "str"}],
                        # markup that looks like a call but is not one; then it stays in content
                        "error": "str?",
                    }
                ],
            },
            "frames": {},
        },
    },
    "start": {
        "from": "C",
        "to": "R",
        "fields": {
            "rollout_id": "str",
            "attempt": "int",
            "group_id": "str",
            "index": "int",
            "prompt": "json",
            "label": "json",
            "tools": "json",
            "seed": "int",
            # max_tokens: of a trajectory, prompt included
            "limits": {"max_turns": "int", "max_tokens": "int", "deadline_ms": "int"},
            "sampling": SAMPLING,
        },
        "frames": {},
        "reply": NONE,
    },
    "turn": {
        "from": "R",
        "to": "C",
        "fields": {
            "rollout_id": "str",
            "attempt": "int",
            "turn": "int",
            "session_id": "str",
            "sampling": SAMPLING,
        },
        "frames": {"prompt": "i32"},
        "reply": {
            "fields": {
                "reason": "str",
                "detail": "str?",
                "engine": "str",
                "cached_tokens": "int",
                "spans": [SPAN],
            },
            "frames": {"ids": "i32", "logprobs": "f32"},
        },
    },
    "abort_turn": {
        "from": "R",
        "to": "C",
        "fields": {"rollout_id": "str", "attempt": "int", "turn": "int"},
        "frames": {},
    },
    "cancel_rollout": {
        "from": "C",
        "to": "R",
        "fields": {"rollout_id": "str", "attempt": "int", "reason": "str"},
        "frames": {},
    },
    "rollout_done": {
        "from": "R",
        "to": "C",
        "fields": {
            "rollout_id": "str",
            "attempt": "int",
            "reason": "str",
            "detail": "str?",
            "reward": "float?",
            "score": "float?",
            "truncated": "bool",
            "info": {"*": "float"},
            "turns": "int",
            # per trajectory
            "spans": [[{"source": "str", "version": "int", "turn": "int", "from": "int", "to": "int"}]],
        },
        "frames": {
            "lengths": "i32",
            "ids": "i32",
            "loss_mask": "u8",
            "logprobs": "f32",
            "versions": "i32",
            "turns_of": "i32",
        },
        "reply": NONE,
    },
}

# Types of an `error` reply. Only channel.ts tries again: `failed` of pure kinds, and `overloaded`.
ERROR_TYPES = ("bad_request", "unsupported", "cancelled", "deadline", "overloaded", "failed", "fatal", "lost")
ERROR_PART = {
    "fields": {
        "type": "str",
        "message": "str",
        "field": "str?",
        "traceback": "str?",
        "retry_after_ms": "int?",
    },
    "frames": {},
}

RESERVED = ("v", "kind", "seq", "id", "re", "deadline_ms", "frames")
MAX_SAFE = 2**53 - 1
DTYPES = {  # bf16 travels as its raw bits
    "u8": np.dtype("<u1"),
    "i16": np.dtype("<i2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
    "bf16": np.dtype("<u2"),
}


class ProtocolError(Exception):
    """A message that does not fit the table. `field` is a path such as `generate.sampling.temperature`."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


# ---- Messages as programs see them ----


@dataclass
class Envelope:
    """What a header says besides its fields. `frame_table` and `frames` are still unchecked."""

    kind: str
    seq: int
    id: int | None  # set on requests
    re: int | None  # set on replies
    deadline_ms: int | None  # relative, since clocks differ
    raw_fields: dict[str, Any]
    frame_table: Any
    frame_bytes: Sequence[bytes]


@dataclass
class Message:
    """Decoded and checked against the table. Frames are read-only arrays over the received bytes."""

    kind: str
    seq: int
    id: int | None
    re: int | None
    deadline_ms: int | None
    fields: dict[str, Any]
    frames: dict[str, np.ndarray]


@dataclass
class Prepared:
    """A checked message that lacks only its `seq`, which the one who sends it gives."""

    name: str
    head: dict[str, Any]
    tail: dict[str, Any]
    frames: list[bytes]


def part_of(kind: str, answers: str | None) -> Mapping[str, Any]:
    """`ok` is checked against the reply of the request it answers, so its kind must be known."""
    if kind == "error":
        return ERROR_PART
    if kind == "ok":
        reply = MESSAGES[answers].get("reply") if answers in MESSAGES else None
        if reply is None:
            raise ProtocolError(
                f"Cannot use an ok reply to {answers or 'an unknown request'}: that kind has no reply"
            )
        return reply
    if kind not in MESSAGES:
        raise ProtocolError(f"Unknown message kind: {_show(kind)}", "kind")
    return MESSAGES[kind]


def prepare(
    kind: str,
    fields: Mapping[str, Any],
    frames: Mapping[str, np.ndarray | None] | None = None,
    *,
    id: int | None = None,
    re: int | None = None,
    deadline_ms: float | None = None,
    answers: str | None = None,
) -> Prepared:
    """Check a message against the table and copy its frames: the caller may go on writing into them."""
    part = part_of(kind, answers)
    name = f"ok({answers})" if kind == "ok" else kind
    checked = _check(dict(fields), part["fields"], name)
    table, payload = _encode_frames(frames or {}, part["frames"], name)
    head: dict[str, Any] = {"v": PROTOCOL_VERSION, "kind": kind}
    tail: dict[str, Any] = {}
    if id is not None:
        tail["id"] = id
    if re is not None:
        tail["re"] = re
    if deadline_ms is not None:
        tail["deadline_ms"] = max(0, math.ceil(deadline_ms))
    return Prepared(name, head, {**tail, "frames": table, **checked}, payload)


def finish(message: Prepared, seq: int) -> Parts:
    """Bytes of a prepared message."""
    try:
        header = msgpack.packb({**message.head, "seq": seq, **message.tail}, use_bin_type=True)
    except (ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"Cannot send {message.name}: {error}") from error
    parts = [header, *message.frames]
    size = sum(len(part) for part in parts)
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"Cannot send {message.name}: {size} bytes, at most {MAX_MESSAGE_BYTES}")
    return parts


def encode(
    kind: str, seq: int, fields: Mapping[str, Any], frames: Mapping[str, Any] | None = None, **rest: Any
) -> Parts:
    """Bytes of a message. Raises ProtocolError where it does not fit the table: a bug of the sender."""
    return finish(prepare(kind, fields, frames, **rest), seq)


def _encode_frames(
    frames: Mapping[str, Any], specs: Mapping[str, str], name: str
) -> tuple[list[dict[str, Any]], Parts]:
    table: list[dict[str, Any]] = []
    payload: Parts = []
    for key, spec in specs.items():
        dtype = spec.rstrip("?")
        array = frames.get(key)
        if array is None:
            if spec.endswith("?"):
                continue
            raise ProtocolError(f"Missing frame {name}.{key}", key)
        if not isinstance(array, np.ndarray) or array.dtype != DTYPES[dtype]:
            got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ProtocolError(f"Frame {name}.{key} must be {dtype}, got {got}", key)
        if array.ndim != 1:
            raise ProtocolError(
                f"Frame {name}.{key} must have one dimension, got shape {list(array.shape)}", key
            )
        table.append({"name": key, "dtype": dtype, "shape": [len(array)]})
        payload.append(array.tobytes())
    for key in frames:
        if key not in specs:
            raise ProtocolError(f"Unknown frame {name}.{key}", key)
    return table, payload


def open_messages(parts: Sequence[bytes]) -> Iterator[Envelope]:
    """The messages of one ZeroMQ message, one by one: handle each before the next is looked at."""
    at = 0
    while at < len(parts) or not at:
        header = _unpack(parts[at : at + 1])
        table = header.get("frames")
        end = at + 1 + (len(table) if isinstance(table, list) else len(parts))
        _check_size(parts[at:end])
        yield _open(header, parts[at + 1 : end])
        at = end


def open_message(parts: Sequence[bytes]) -> Envelope:
    """The envelope of a message: enough to check its `seq` and to find the request it answers."""
    _check_size(parts)
    return _open(_unpack(parts[:1]), parts[1:])


def _check_size(parts: Sequence[bytes]) -> None:
    size = sum(len(part) for part in parts)
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"Message of {size} bytes, at most {MAX_MESSAGE_BYTES}")


def _open(header: dict[str, Any], frame_bytes: Sequence[bytes]) -> Envelope:
    version = header.get("v")
    if _whole(version) != PROTOCOL_VERSION:
        raise ProtocolError(f"Protocol version {_show(version)}, this side speaks {PROTOCOL_VERSION}", "v")
    kind = header.get("kind")
    if not isinstance(kind, str):
        raise ProtocolError("Header has no kind", "kind")
    numbers: dict[str, int | None] = {}
    for key in ("seq", "id", "re", "deadline_ms"):
        value = header.get(key)
        numbers[key] = number = _whole(value)
        if (value is not None or key == "seq") and (number is None or number < 0):
            raise ProtocolError(f"{kind}.{key} must be a whole number, got {_show(value)}", key)
    if kind in ("ok", "error") and numbers["re"] is None:
        raise ProtocolError(f"{kind} has no re", "re")
    return Envelope(
        kind=kind,
        seq=numbers["seq"] or 0,
        id=numbers["id"],
        re=numbers["re"],
        deadline_ms=numbers["deadline_ms"],
        raw_fields={key: value for key, value in header.items() if key not in RESERVED},
        frame_table=header.get("frames"),
        frame_bytes=frame_bytes,
    )


def decode_body(envelope: Envelope, answers: str | None = None) -> Message:
    """Check fields and frames. `answers` is the kind of the request that an `ok` belongs to."""
    kind = envelope.kind
    part = part_of(kind, answers)
    name = f"ok({answers})" if kind == "ok" else kind
    if kind not in ("ok", "error") and ("reply" in part) != (envelope.id is not None):
        raise ProtocolError(f"{kind}.id must be {'present' if envelope.id is None else 'absent'}", "id")
    fields = _check(envelope.raw_fields, part["fields"], name)
    frames = _decode_frames(envelope.frame_table, envelope.frame_bytes, part["frames"], name)
    return Message(kind, envelope.seq, envelope.id, envelope.re, envelope.deadline_ms, fields, frames)


def decode(parts: Sequence[bytes], request_kind: Callable[[int], str | None] = lambda re: None) -> Message:
    """A checked message. `request_kind` tells which request an id belongs to, for `ok` replies."""
    return _decode(open_message(parts), request_kind)


def decode_all(parts: Sequence[bytes], request_kind: Callable[[int], str | None]) -> list[Message]:
    """As `decode`, of all that one ZeroMQ message holds."""
    return [_decode(envelope, request_kind) for envelope in open_messages(parts)]


def _decode(envelope: Envelope, request_kind: Callable[[int], str | None]) -> Message:
    answers = request_kind(envelope.re) if envelope.kind == "ok" and envelope.re is not None else None
    return decode_body(envelope, answers)


def _unpack(parts: Sequence[bytes]) -> dict[str, Any]:
    if not parts:
        raise ProtocolError("Empty message")

    def refuse(code: int, _: bytes) -> Any:
        raise ValueError(f"extension type {code}")

    try:
        value = msgpack.unpackb(parts[0], raw=False, strict_map_key=True, ext_hook=refuse)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"Header is not msgpack: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError("Header is not msgpack: not a map")
    return value


def _decode_frames(
    table: Any, parts: Sequence[bytes], specs: Mapping[str, str], name: str
) -> dict[str, np.ndarray]:
    if not isinstance(table, list):
        raise ProtocolError(f"{name}.frames must be a list", "frames")
    if len(table) != len(parts):
        raise ProtocolError(f"{name} names {len(table)} frames but carries {len(parts)}", "frames")
    out: dict[str, np.ndarray] = {}
    for entry, data in zip(table, parts, strict=True):
        frame = entry if isinstance(entry, dict) else {}
        key = str(frame.get("name"))
        if key not in specs or key in out:
            raise ProtocolError(f"{'Repeated' if key in specs else 'Unknown'} frame {name}.{key}", key)
        dtype = specs[key].rstrip("?")
        if frame.get("dtype") != dtype:
            raise ProtocolError(f"Frame {name}.{key} must be {dtype}, got {frame.get('dtype')}", key)
        shape = frame.get("shape")
        count = _whole(shape[0]) if isinstance(shape, list) and len(shape) == 1 else None
        if count is None or count < 0:
            raise ProtocolError(f"Frame {name}.{key} must have one dimension, got shape {_show(shape)}", key)
        size = count * DTYPES[dtype].itemsize
        if size != len(data):
            raise ProtocolError(f"Frame {name}.{key} has {len(data)} bytes, its shape needs {size}", key)
        array = np.frombuffer(data, DTYPES[dtype])
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        out[key] = array
    for key, spec in specs.items():
        if not spec.endswith("?") and key not in out:
            raise ProtocolError(f"Missing frame {name}.{key}", key)
    return out


# ---- Checking ----


def _check(value: Any, spec: Spec, path: str) -> Any:
    """The value with floats coerced. Raises ProtocolError that names the path of the first misfit."""
    if isinstance(spec, str):
        return _check_scalar(value, spec, path)
    if isinstance(spec, list):
        if not isinstance(value, list | tuple):
            raise _mistyped(path, "a list", value)
        return [_check(item, spec[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if "?" in spec:
        return None if value is None else _check(value, spec["?"], path)
    if not isinstance(value, dict):
        raise _mistyped(path, "a record", value)
    if "*" in spec:
        return {_key(key, path): _check(item, spec["*"], f"{path}.{key}") for key, item in value.items()}
    for key in value:
        if key not in spec:
            raise ProtocolError(f"Unknown field {path}.{key}", f"{path}.{key}")
    out = {}
    for key, inner in spec.items():
        if key not in value:
            raise ProtocolError(f"Missing field {path}.{key}", f"{path}.{key}")
        out[key] = _check(value[key], inner, f"{path}.{key}")
    return out


def _check_scalar(value: Any, spec: str, path: str) -> Any:
    if value is None and (spec.endswith("?") or spec == "json"):
        return None
    base = spec.rstrip("?")
    if base == "str":
        if not isinstance(value, str):
            raise _mistyped(path, "a string", value)
        return value
    if base == "bool":
        if not isinstance(value, bool):
            raise _mistyped(path, "true or false", value)
        return value
    if base == "int":
        number = _whole(value)
        if number is None:
            raise _mistyped(path, "an integer within 2^53", value)
        return number
    if base == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _mistyped(path, "a finite number", value)
        return float(value)
    return _check_json(value, path)


def _check_json(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        if isinstance(value, int) or float(value).is_integer():
            number = _whole(value)
            if number is not None:
                return number
        elif math.isfinite(value):
            return value
        raise _mistyped(path, "JSON", value)
    if isinstance(value, list | tuple):
        return [_check_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, path): _check_json(item, f"{path}.{key}") for key, item in value.items()}
    raise _mistyped(path, "JSON", value)


def _whole(value: Any) -> int | None:
    """An integer within 2^53, else None. Whole floats count: JavaScript makes them from 2^32 on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value) if abs(value) <= MAX_SAFE else None


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise _mistyped(f"{path}.{key}", "a string key", key)
    return key


def _mistyped(path: str, wanted: str, value: Any) -> ProtocolError:
    if isinstance(
        value, msgpack.Timestamp
    ):  # the one extension type that msgpack reads without asking the hook
        return ProtocolError("Header is not msgpack: extension type -1")
    return ProtocolError(f"Field {path} must be {wanted}, got {_show(value)[:80]}", path)


def _show(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
