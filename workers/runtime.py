"""
The worker runtime: what every Python worker is made of, whatever it computes.

    I/O thread    owns the socket: hello, heartbeats, `ping` `stacks` `stats` `cancel` `stop`, parent death
    work thread   the main thread: receive() -> compute -> reply()

Invariants
  1. Exactly one thread touches the socket. Others append to a queue and wake it through a socket pair.
  2. Every request handed out gets exactly one reply; one cancelled or expired while queued is answered here
     and never seen by the work thread. Where `withdraws` is false it runs, and finds itself cancelled.
  3. `seq` is given in the order of sending, under one lock, and only to messages that could be packed.
  4. The process and its group end when the parent does (end-of-file on stdin) and when the link is lost:
     there is no reconnecting, a new process says hello.
  5. Nothing waits by polling: an idle worker sleeps in the kernel, both threads are woken by what they wait
     for.

Call Runtime.connect before heavy imports (torch, transformers): from then on the parent is watched and hears
heartbeats. Twin of WorkerLink in molt/bus.ts. Callers: engine_torch.py, trainer.py, tokenizer.py.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import faulthandler
import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import zmq
import zmq.utils.monitor as monitor

import protocol

ZMTP_HEARTBEAT_MS = 2_000
ZMTP_TIMEOUT_MS = 20_000
LINGER_MS = 1_500  # last words of a process that ends in order; why below the heartbeat: molt/bus.ts
RECEIVE_BURST = 64  # ZeroMQ messages taken from the socket before the other duties get their turn
TOGETHER_BYTES = 1024 * 1024  # of messages that leave in one ZeroMQ message
ACK_BYTES = (
    16 * 1024 * 1024
)  # a heartbeat goes out early after this much: the controller bounds what is unsent
SWITCH_S = (
    0.0005  # the I/O thread waits this long for a busy work thread's interpreter lock; Python's own: 0.005
)
LETTERS = {"engine": "E", "trainer": "T", "tokenizer": "K", "runner": "R"}
EXIT_REFUSED = 3
EXIT_BAD_INPUT = 4  # twin in molt/bus.ts

Handler = Callable[["Request"], "tuple[dict, dict] | dict | None"]


class WorkerError(Exception):
    """Becomes an `error` reply of this type (protocol.ERROR_TYPES)."""

    def __init__(self, type: str, message: str, field: str | None = None, retry_after_ms: int | None = None):
        super().__init__(message)
        self.type = type
        self.field = field
        self.retry_after_ms = retry_after_ms


def bad_request(message: str, field: str | None = None) -> WorkerError:
    return WorkerError("bad_request", message, field)


def unsupported(message: str, field: str | None = None) -> WorkerError:
    return WorkerError("unsupported", message, field)


def failed(message: str) -> WorkerError:
    return WorkerError("failed", message)


def fatal(message: str) -> WorkerError:
    """The worker's state is not to be trusted any more: the reply is sent, then the process exits 1."""
    return WorkerError("fatal", message)


@dataclass(eq=False)
class Request:
    """One request. `cancelled` turns true while it runs; a long computation looks at it and may end early."""

    kind: str
    id: int
    fields: dict[str, Any]
    frames: dict[str, np.ndarray]  # read-only, over the received bytes
    cancelled: bool = False
    expires: float = field(default=math.inf, repr=False)  # time.monotonic() seconds


class Runtime:
    """
    Made by `connect`. Methods are for the work thread, except `send`, `reply` and `reply_error`: any thread
    may call these, and one alone answers a request.
    """

    def __init__(
        self, endpoint: str, worker_id: str, secret: str, worker_kind: str, capabilities: dict[str, Any]
    ):
        self.worker_id = worker_id
        url = urlsplit(endpoint)
        self.controller = (url.hostname or "", url.port or 0)
        self.options: dict[str, Any] = {}
        self.incarnation = -1
        self.stats: dict[str, float] = {}  # the work thread publishes here; goes out with heartbeats
        self.withdraws = True  # false: what other processes run together with this one must run here, too
        # Called by the I/O thread when something came in, for a work thread that does not sleep in `receive`.
        self.notify: Callable[[], object] = lambda: None
        self._letter = LETTERS[worker_kind]
        self._heartbeat_s = math.inf
        self._counters = {"wire_repeated_seq": 0.0, "wire_unknown_reply": 0.0, "wire_stats_not_finite": 0.0}

        self._queue: collections.deque[Request] = collections.deque()  # waiting; guarded by _arrived
        self._arrived = threading.Condition()
        self._unanswered: dict[int, Request] = {}  # waiting or handed out
        self._stopping = False
        self._welcomed = threading.Event()
        self._refusal: str | None = None

        self._send_lock = threading.Lock()  # guards _seq together with the order of _outgoing
        self._seq = 0
        self._outgoing: collections.deque[list[bytes]] = collections.deque()
        self._expected_seq = 0
        self._unacknowledged = 0  # bytes received since the last heartbeat
        self._closing = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._woken = False

        self._io = threading.Thread(target=self._io_main, name="io", daemon=True)

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._configure(worker_id)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(endpoint)
        self.send(
            "hello",
            {
                "protocol_version": protocol.PROTOCOL_VERSION,
                "worker_kind": worker_kind,
                "worker_id": worker_id,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "secret": secret,
                "capabilities": capabilities,
            },
        )
        self._io.start()

    def _configure(self, worker_id: str) -> None:
        self._socket.setsockopt(zmq.ROUTING_ID, f"{worker_id}.{secrets.token_hex(16)}".encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the limits are those of the protocol, so a send never waits
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)

    @classmethod
    def connect(cls, worker_kind: str, capabilities: dict[str, Any]) -> Runtime:
        """Parse argv and stdin, say hello, wait for `welcome`. On refusal print the reason and exit 3."""
        args = _parse_args()
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # the rule of parent death kills the group: it must be ours
        sys.setswitchinterval(SWITCH_S)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        secret = json.loads(_read_line(0))["secret"]
        runtime = cls(args.endpoint, args.worker_id, secret, worker_kind, capabilities)
        sys.excepthook = runtime._uncaught
        atexit.register(runtime._close)
        runtime._welcomed.wait()
        if runtime._refusal is not None:
            print(f"{args.worker_id} refused: {runtime._refusal}", file=sys.stderr, flush=True)
            sys.exit(EXIT_REFUSED)
        return runtime

    # ---- For the work thread ----

    def refuse_input(self, reason: object) -> NoReturn:
        """
        What this worker was given (a model, an option) cannot be used: one line for the user, who mends it.
        Only before `ready`; a failure that is not the input's fault is an exception.
        """
        if isinstance(reason, BaseException) and reason.__cause__ is not None:
            traceback.print_exception(reason)  # into the log, for those who look closer
        print(" ".join(_text(str(reason)).split()), file=sys.stderr, flush=True)
        self.exit_now(EXIT_BAD_INPUT)

    def ready(self, **info: Any) -> None:
        self.send("ready", {"info": info})

    @property
    def stopping(self) -> bool:
        return self._stopping

    def receive(self, timeout: float | None) -> list[Request]:
        """
        All waiting requests in order of arrival; [] after `timeout` seconds (None waits for ever, 0 only
        looks). Raises SystemExit(0) once `stop` came and nothing waits. What was handed out can no longer be
        withdrawn by `cancel`: look at `cancelled`.
        """
        return self._take(timeout, limit=None)

    def reply(
        self, request: Request, fields: dict[str, Any] | None = None, frames: dict[str, Any] | None = None
    ) -> None:
        """Answer `ok`. Raises ProtocolError where it does not fit the table; the request then stays open."""
        message = protocol.prepare("ok", fields or {}, frames, re=request.id, answers=request.kind)
        self._answer(request, message)

    def reply_error(self, request: Request, exc: BaseException) -> None:
        """Answer `error`: a WorkerError as is, others as `failed` with the traceback. `fatal` exits 1."""
        error = exc if isinstance(exc, WorkerError) else None
        kind = error.type if error else "failed"
        trace = _text("".join(traceback.format_exception(exc))) if kind in ("failed", "fatal") else None
        if trace:
            print(trace, file=sys.stderr, flush=True)
        fields = {
            "type": kind,
            "message": _text(str(exc) if error else f"{type(exc).__name__}: {exc}"),
            "field": error.field if error else None,
            "traceback": trace,
            "retry_after_ms": error.retry_after_ms if error else None,
        }
        self._answer(request, protocol.prepare("error", fields, re=request.id))
        if kind == "fatal":
            self.exit_now(1)

    def send(self, kind: str, fields: dict[str, Any], frames: dict[str, Any] | None = None) -> None:
        """Send an event. Any thread may call it. Frames are copied before it returns."""
        self._post(protocol.prepare(kind, fields, frames))

    def serve(self, handlers: dict[str, Handler]) -> NoReturn:
        """Answer requests one by one, in order: for workers without an own loop. Ends by SystemExit."""
        while True:
            for request in self._take(None, limit=1):
                handler = handlers.get(request.kind)
                try:
                    if handler is None:
                        raise unsupported(f"{self.worker_id} does not answer {request.kind}", "kind")
                    result = handler(request)
                    fields, frames = result if isinstance(result, tuple) else (result, None)
                    self.reply(request, fields, frames)
                except Exception as exc:  # noqa: BLE001 at this edge every failure is an answer
                    self.reply_error(request, exc)

    def _take(self, timeout: float | None, limit: int | None) -> list[Request]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._arrived:
                if not self._queue and not self._stopping and timeout != 0:
                    left = None if until is None else max(0.0, until - time.monotonic())
                    self._arrived.wait_for(lambda: self._queue or self._stopping, left)
                count = len(self._queue) if limit is None else min(limit, len(self._queue))
                taken = [self._queue.popleft() for _ in range(count)]
            if not taken and self._stopping:
                raise SystemExit(0)
            live = [request for request in taken if not self._expired(request)]
            if live or (not taken and until is not None and time.monotonic() >= until):
                return live

    def _expired(self, request: Request) -> bool:
        if time.monotonic() < request.expires:
            return False
        self.reply_error(request, WorkerError("deadline", f"{request.kind} waited beyond its deadline"))
        return True

    # ---- Sending, from any thread ----

    def _answer(self, request: Request, message: protocol.Prepared) -> None:
        if request.id not in self._unanswered:
            raise RuntimeError(f"{request.kind} {request.id} was already answered")
        self._post(message)
        self._unanswered.pop(request.id, None)

    def _post(self, message: protocol.Prepared) -> None:
        with self._send_lock:
            parts = protocol.finish(message, self._seq)
            self._seq += 1
            self._outgoing.append(parts)
        self._wake()

    def _wake(self) -> None:
        # The I/O thread clears _woken before it looks at the queue, so an append is never missed. It needs no
        # waking for what it appends itself.
        if not self._woken and threading.current_thread() is not self._io:
            self._woken = True
            try:
                self._wake_write.send(b"\0")
            except BlockingIOError:
                pass  # the pair is full, so a wake-up is waiting already

    # ---- The I/O thread ----

    def _io_main(self) -> None:
        try:
            self._io_loop()
        except BaseException:  # noqa: BLE001 the edge of the thread: without it the process is deaf
            print(f"The I/O thread failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)

    def _io_loop(self) -> None:
        poller = zmq.Poller()
        stdin = 0
        for source in (self._socket, self._monitor, self._wake_read, stdin):
            poller.register(source, zmq.POLLIN)
        due = math.inf
        while True:
            wait = None if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))
            events = dict(poller.poll(wait))
            if self._wake_read.fileno() in events:
                self._wake_read.recv(4096)
            self._woken = False
            if stdin in events and not os.read(stdin, 4096):
                _kill_own_group("the parent is gone")
            if self._socket in events:
                self._receive_burst()
            if self._monitor in events:
                event = monitor.recv_monitor_message(self._monitor)
                if not self._closing:  # with the link the parent may be gone, too
                    _kill_own_group(f"the link to the controller is gone (event {int(event['event'])})")
            if due == math.inf and self._heartbeat_s != math.inf:
                due = time.monotonic()  # just welcomed
            if time.monotonic() >= due or (self._unacknowledged >= ACK_BYTES and due != math.inf):
                self.send("heartbeat", {"received": self._expected_seq - 1, "stats": self._snapshot()})
                self._unacknowledged = 0
                due = time.monotonic() + self._heartbeat_s
            closing = self._closing  # read before draining: what was posted before _close still goes out
            while self._outgoing:
                self._transmit(self._together())
            if closing:
                break
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()  # waits up to LINGER_MS

    def _transmit(self, parts: list[bytes]) -> None:
        """
        Never waits, since this thread also watches the parent. Nothing limits what may be queued, so a socket
        that takes nothing has nobody to send to: a plain send would wait for ever, and the process with it.
        """
        try:
            self._socket.send_multipart(parts, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            if not self._closing:
                _kill_own_group("the link to the controller is gone (nobody to send to)")

    def _together(self) -> list[bytes]:
        """What waits to be sent, as one ZeroMQ message unless it is much."""
        parts: list[bytes] = []
        size = 0
        while self._outgoing and size < TOGETHER_BYTES:
            message = self._outgoing.popleft()
            parts += message
            size += sum(len(part) for part in message)
        return parts

    def _receive_burst(self) -> None:
        for _ in range(RECEIVE_BURST):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unacknowledged += sum(len(part) for part in parts)
            try:
                for envelope in protocol.open_messages(parts):
                    self._on_message(envelope)
            except protocol.ProtocolError as error:
                if self._welcomed.is_set():
                    raise
                self._refuse(str(error))  # most likely the other version, which the message names

    def _on_message(self, envelope: protocol.Envelope) -> None:
        if envelope.seq < self._expected_seq:
            self._counters["wire_repeated_seq"] += 1
            return
        if envelope.seq > self._expected_seq:
            raise ConnectionError(
                f"expected message {self._expected_seq} of the controller, got {envelope.seq}"
            )
        self._expected_seq += 1
        if envelope.re is not None:
            self._counters["wire_unknown_reply"] += 1  # Python workers send no requests
            return
        try:
            message = protocol.decode_body(envelope)
        except protocol.ProtocolError as error:
            if envelope.id is None:
                raise
            self._refuse_request(envelope.id, "bad_request", str(error), error.field)
            return
        self._dispatch(message)

    def _dispatch(self, message: protocol.Message) -> None:
        entry = protocol.MESSAGES[message.kind]
        if "C" not in entry["from"] or not set(entry["to"]) & {"W", self._letter}:
            text = f"{message.kind} is not a message for {self.worker_id}"
            if message.id is None:
                raise protocol.ProtocolError(text, "kind")
            self._refuse_request(message.id, "unsupported", text, "kind")
        elif entry.get("io"):
            self._answer_lane(message)
        elif message.kind == "welcome":
            self.incarnation = message.fields["incarnation"]
            self.options = message.fields["options"]
            self._heartbeat_s = message.fields["heartbeat_ms"] / 1000
            self._welcomed.set()
        elif message.kind == "refused":
            self._refuse(message.fields["reason"])
        elif message.id is not None:
            request = Request(message.kind, message.id, message.fields, message.frames)
            if message.deadline_ms is not None:
                request.expires = time.monotonic() + message.deadline_ms / 1000
            with self._arrived:
                self._unanswered[request.id] = request
                self._queue.append(request)
                self._arrived.notify()
            self.notify()

    def _answer_lane(self, message: protocol.Message) -> None:
        fields: Mapping[str, Any] = {}
        if message.kind == "stacks":
            fields = {"text": _stacks()}
        elif message.kind == "stats":
            fields = {"stats": self._snapshot()}
        elif message.kind == "cancel":
            self._cancel(message.fields["request"])
        elif message.kind == "stop":
            with self._arrived:
                self._stopping = True
                self._arrived.notify()
            self.notify()
        self._post(protocol.prepare("ok", fields, re=message.id, answers=message.kind))

    def _cancel(self, request_id: int) -> None:
        with self._arrived:
            request = self._unanswered.get(request_id)
            queued = self.withdraws and request is not None and request in self._queue
            if request is not None and queued:
                self._queue.remove(request)
                del self._unanswered[request_id]
            elif request is not None:
                request.cancelled = True
                self.notify()
        if queued:
            self._refuse_request(request_id, "cancelled", "cancelled before it ran")

    def _refuse_request(self, request_id: int, kind: str, message: str, field: str | None = None) -> None:
        fields = {"type": kind, "message": message, "field": field, "traceback": None, "retry_after_ms": None}
        self._post(protocol.prepare("error", fields, re=request_id))

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._welcomed.set()

    def _snapshot(self) -> dict[str, float]:
        stats: dict[str, float] = {}
        for key, value in self.stats.copy().items():
            number = float(value)
            if math.isfinite(number):
                stats[key] = number
            else:
                self._counters["wire_stats_not_finite"] += 1
        return {**stats, **{key: count for key, count in self._counters.items() if count}}

    # ---- The end ----

    def _uncaught(self, kind: type[BaseException], exc: BaseException, trace: Any) -> None:
        """Whatever escapes the work thread: print it whole, answer what was handed out, exit 1."""
        text = _text("".join(traceback.format_exception(kind, exc, trace)))
        print(text, file=sys.stderr, flush=True)
        message = _text(f"{kind.__name__}: {exc}")
        fields = {"type": "fatal", "message": message, "field": None, "traceback": text}
        with self._arrived:
            open_requests = list(self._unanswered.values())
        for request in open_requests:
            self._answer(
                request, protocol.prepare("error", {**fields, "retry_after_ms": None}, re=request.id)
            )
        self.exit_now(1)

    def _close(self) -> None:
        """Send what is queued, then close the socket. Runs at exit; may be called twice."""
        self._closing = True
        self._woken = False
        self._wake()
        self._io.join(LINGER_MS / 1000 + 1)

    def exit_now(self, code: int) -> NoReturn:
        # os._exit: after a fatal error, destructors of collectives and devices may hang.
        self._close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(text: str) -> str:
    """Text that can travel: an exception may quote what is not Unicode."""
    return text.encode("utf-8", "replace").decode()


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, help="tcp://host:port of the controller")
    parser.add_argument("--worker-id", required=True)
    return parser.parse_args()


def _read_line(fd: int) -> bytes:
    """The first line, byte for byte: a buffered reader would swallow what follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            sys.exit("the parent closed stdin before it sent the secret")
        line += byte
    return line


def _kill_own_group(reason: str) -> NoReturn:
    print(f"ends: {reason}", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames: dict[int, FrameType] = sys._current_frames()
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
