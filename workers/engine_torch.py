"""
The torch engine worker: the embedded slot engine behind the wire (protocol.py, generate to score).

    receive what waits -> one step -> send its tokens -> again; asleep when there is nothing to do

Requests are answered between steps, in order, so a step's tokens are wholly before or after any answer. A
pause that drains is answered when it has drained, while other requests go on being answered. Weights that
are staged are verified by a thread of their own (checksums leave the interpreter lock alone); a load waits
for it. `stop` lets what runs finish. Options: {model_path, device, dtype, max_requests, max_len,
prefill_tokens, seed}; sampling is seeded per request, so `seed` has no effect here. Heavy imports come after
`welcome`, so that heartbeats go out while they load. Started by launch.ts. The engine itself is
slot_engine.py; it knows nothing of processes and sockets.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from runtime import Request, Runtime, WorkerError, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from slot_engine import Engine

CAPABILITIES = {
    "max_requests": None,
    "transports": ["file", "nccl"],
    "logprobs": True,
    "heads": 0,
    "routes": False,
}


def answer(engine: Engine, request: Request) -> tuple[tuple | None, dict[str, Any], dict[str, Any] | None]:
    """(event to send first, reply fields, reply frames)."""
    fields, frames = request.fields, request.frames
    match request.kind:
        case "generate":
            return None, {"handle": engine.submit(fields, frames["prompt"])}, None
        case "abort":
            return engine.abort(fields["handles"]), {}, None
        case "load_weights":
            return None, engine.load_weights(fields), None
        case "resume":
            engine.resume(fields["epoch"])
            return None, {}, None
        case "score":
            logprobs = engine.score(frames["ids"], frames["lengths"])
            return None, {"version": engine.version}, {"logprobs": logprobs}
    raise unsupported(f"An engine does not answer {request.kind}", "kind")


class Loop:
    """One work thread: requests, then a step, for ever."""

    def __init__(self, runtime: Runtime, engine: Engine):
        self.runtime = runtime
        self.engine = engine
        self.pauses: list[Request] = []  # not answered yet: the engine drains
        self.staging = threading.Thread()  # the last one

    def run(self) -> None:
        self.runtime.stats = self.engine.stats
        while True:
            for request in self.receive():
                self.handle(request)
            self.send(self.engine.step())
            self.answer_pauses()

    def receive(self) -> list[Request]:
        try:
            return self.runtime.receive(0 if self.engine.busy else None)
        except SystemExit:
            if not self.engine.busy:  # told to stop, and all that ran has finished
                raise
            return []

    def handle(self, request: Request) -> None:
        try:
            if request.kind == "pause":
                self.pauses.append(request)
                fields = request.fields
                self.send(self.engine.pause(fields["epoch"], fields["mode"], fields["clear_cache"]))
                self.answer_pauses()
                return
            if request.kind in ("stage_weights", "load_weights") and self.staging.is_alive():
                self.staging.join()
            if request.kind == "stage_weights":
                verify = self.engine.stage_weights(request.fields)
                self.staging = threading.Thread(target=self.stage, args=(request, verify), name="stage")
                self.staging.start()
                return
            event, fields, frames = answer(self.engine, request)
            self.send(event)
            self.runtime.reply(request, fields, frames)
        except Exception as exc:  # noqa: BLE001 at this edge every failure is an answer
            self.pauses = [p for p in self.pauses if p is not request]
            self.runtime.reply_error(request, exc)

    def stage(self, request: Request, verify: Callable[[], dict[str, Any]]) -> None:
        try:
            self.runtime.reply(request, verify())
        except Exception as exc:  # noqa: BLE001 at this edge every failure is an answer
            self.runtime.reply_error(request, exc)

    def answer_pauses(self) -> None:
        if self.pauses and all(request.cancelled for request in self.pauses):
            self.engine.cancel_drain()
        done = self.engine.pause_answer
        for request in [p for p in self.pauses if p.cancelled or done is not None]:
            self.pauses.remove(request)
            if request.cancelled:
                self.runtime.reply_error(request, WorkerError("cancelled", "the pause was cancelled"))
            elif done is not None:
                self.runtime.reply(request, *done)

    def send(self, event: tuple | None) -> None:
        if event is not None:
            self.runtime.send("tokens", *event)


def main() -> None:
    runtime = Runtime.connect("engine", CAPABILITIES)
    options = runtime.options
    from transformers.utils.logging import disable_progress_bar

    from model import ModelError, device_named
    from slot_engine import Engine, load_model

    disable_progress_bar()  # it would fill the log
    try:
        device = device_named(options["device"], "engine.device")
        model = load_model(options["model_path"], options["dtype"], device)
    except (ModelError, OSError, ValueError) as error:
        runtime.refuse_input(error)
    sizes = {name: options[name] for name in ("max_requests", "max_len", "prefill_tokens")}
    engine = Engine(model, options["model_path"], **sizes)
    runtime.ready(
        model=options["model_path"],
        vocab_size=engine.vocab_size,
        dtype=options["dtype"],
        max_len=engine.max_len,
        max_requests=engine.max_requests,
    )
    Loop(runtime, engine).run()


if __name__ == "__main__":
    main()
