"""
Text stream: the text of a turn as its tokens come, and the stop strings in it.

    push(id) -> the new text that is certain        end() -> what was held back

An unfinished UTF-8 character decodes to U+FFFD, so one at the very end is held back until a later token
finishes or breaks it: joined, the pieces are exactly the decoded turn. Works with any tokenizer that can
decode: what is decoded is a short window that begins a few tokens before the new ones, since some decoders
treat the first token differently.

A stop string may lie across tokens, and across the ids that the request sampled earlier (`already`); one that
lies wholly in those does not count. Special tokens are text too, so a stop string may contain them. Called by
slot_engine.py for requests that want text or have stop strings; the others never decode.
"""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 4
WINDOW_TOKENS = 24  # the window moves on when it is this long and no character is unfinished
UNFINISHED = "\ufffd"


class TextStream:
    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        already: int,
        stops: Sequence[str],
    ):
        """`prompt` ends with the `already` ids that were sampled earlier; their text was sent then."""
        self._decode = decode
        self._stops = stops
        self._tail_length = max(map(len, stops), default=0) - 1
        self._window = list(prompt[max(0, len(prompt) - already - CONTEXT_TOKENS) :])
        before = self._decode(self._window[: len(self._window) - already])
        text = self._decode(self._window)
        self._sent = certain(text)  # characters of the window's text that were given out
        self._tail = text[len(before) : self._sent]
        self._held = ""

    def push(self, token: int) -> tuple[str, str | None]:
        """New text, and the stop string that it completed."""
        self._window.append(token)
        text = self._decode(self._window)
        end = certain(text)
        delta = text[self._sent : end]
        self._sent = max(self._sent, end)
        self._held = text[self._sent :]
        if len(self._window) > WINDOW_TOKENS and not self._held:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = len(self._decode(self._window))
        return delta, self._completed(delta)

    def end(self) -> str:
        """What is held back, given out as it is."""
        held, self._held = self._held, ""
        return held

    def _completed(self, delta: str) -> str | None:
        if not self._stops or not delta:
            return None
        text = self._tail + delta
        found = [(text.find(stop, max(0, len(self._tail) - len(stop) + 1)), stop) for stop in self._stops]
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        return min((hit for hit in found if hit[0] >= 0), default=(0, None))[1]


def certain(text: str) -> int:
    """How much of a decoded text no later token can change."""
    return len(text) - 1 if text.endswith(UNFINISHED) else len(text)
