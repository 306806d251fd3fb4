"""Tokenizer worker: chat template, encode, decode, and the reading of sampled turns.

    render   conversation -> ids                   the first prompt of a rollout
    suffix   sampled turn + new messages -> ids    what follows a turn, which itself is never rendered again
    parse    sampled ids -> content, reasoning, calls
    encode, decode

All calls are batched, and a bad item fails alone: its error stands at its place, its ids are empty. What a
batch asks more than once (members of a group have the same prompt, and often the same tool result) is worked
out once.

Decisions
  1. The template runs here and nowhere else, in an environment like transformers' own with two differences:
     raw argument text (below) and a clock that stands still from start-up, so that a date in a prompt does
     not change at midnight. A test compares it with `apply_chat_template`.
  2. Tool arguments are the text the model wrote. A template sees an object that is a `str` (printed as it
     is), passes as a mapping (templates that walk the keys get parsed values), and that `tojson` prints
     verbatim even deep inside another value: 1.0 stays 1.0, keys keep their order, integers their digits.
  3. `suffix` renders a stub (one user message, an assistant turn of nothing but a marker and the names of
     its calls) with the new messages behind it, and cuts behind the marker. So its cost does not grow with
     the conversation, and earlier turns, which templates like to rewrite, cannot matter. Closing markup the
     policy sampled is left out, closing markup it did not sample (ended by length) is put in.
  4. At start-up the suffix is compared with the full render, as text and as ids; `ready` reports the result.
  5. No special token is ever added by the tokenizer itself: the template writes them all, BOS included.
  6. Content parts are joined to text, null content is empty text: templates print other things for them.

Does not do: content parts other than text. Markup other than Hermes/Qwen `<tool_call>{json}</tool_call>` is
read by vLLM's parsers, where they are named (vllm_parsers.py).
Started by launch.ts; asked by the controller and, through it, by runner.ts (protocol.py: render to parse).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jinja2 import nodes

from runtime import Request, Runtime, bad_request
from vllm_parsers import AUTO, ParserError, VllmParsers

# Stands for text in a render that is cut away again. Unguessable, so no policy and no tool writes it.
MARK = "mark" + secrets.token_hex(8)


class TokenizerError(Exception):
    """The model directory cannot serve as a tokenizer. One line, for the terminal."""


class ItemError(Exception):
    """This item cannot be rendered; the others of its batch can."""


# ---- Raw arguments ----


class RawText(str):
    """Text that `tojson` prints as it is."""


class RawArguments(RawText):
    """Argument text that also answers as the mapping it spells: `is mapping`, `items`, `arguments[key]`."""

    values_: dict[str, Any]

    def keys(self):
        return self.values_.keys()

    def values(self):
        return self.values_.values()

    def items(self):
        return self.values_.items()

    def get(self, key, default=None):
        return self.values_.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __getitem__(self, key):
        return self.values_[key] if isinstance(key, str) else super().__getitem__(key)


Mapping.register(RawArguments)  # type: ignore[attr-defined]  jinja asks isinstance(x, Mapping)


def raw_arguments(text: str) -> RawText:
    """Never fails: text that is no JSON object is text and no mapping."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return RawText(text)
    raw = RawArguments(text)
    raw.values_ = values
    return raw


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """The filter of transformers' templates (no HTML escapes), except that raw text is printed verbatim."""
    raws: list[str] = []

    def hide(item):
        if isinstance(item, RawText):
            raws.append(str(item))
            return f"{MARK}-{len(raws) - 1}"
        if isinstance(item, dict):
            return {key: hide(member) for key, member in item.items()}
        if isinstance(item, (list, tuple)):
            return [hide(member) for member in item]
        return item

    text = json.dumps(
        hide(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for i, raw in enumerate(raws):
        text = text.replace(f'"{MARK}-{i}"', raw, 1)
    return text


# ---- Template ----


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for supervised masks; here it prints its body, nothing else."""

    tags = {"generation"}  # noqa: RUF012  as jinja declares it

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_environment() -> jinja2.Environment:
    """What templates on the hub are written for."""
    started = datetime.now()

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = started.strftime
    return environment


def flatten(content: Any) -> str:
    """Text of a content value: text, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ItemError(f"content must be text or a list of parts, got {type(content).__name__}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ItemError(f"content part {kind!r} is not text")
        parts.append(text)
    return "".join(parts)


def normalise_call(call: Any) -> dict:
    """`{name, arguments}` (or OpenAI's nesting of it) in the form templates read."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ItemError("a tool call needs a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = raw_arguments(arguments)
    rest = {key: value for key, value in call.items() if key not in ("name", "arguments", "function", "type")}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def normalise(messages: Any) -> list[dict]:
    """Messages as templates expect them. Raises ItemError with the place of the first bad one."""
    if not isinstance(messages, (list, tuple)):
        raise ItemError(f"messages must be a list, got {type(messages).__name__}")
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ItemError(f"message {i} has no role")
        try:
            clean = {**message, "content": flatten(message.get("content"))}
            calls = [normalise_call(call) for call in clean.pop("tool_calls", None) or ()]
        except ItemError as error:
            raise ItemError(f"message {i}: {error}") from None
        # Templates test `is defined`, so what is absent must not be there at all.
        if calls:
            clean["tool_calls"] = calls
        reasoning = clean.pop("reasoning", None)
        if clean.get("reasoning_content") is None:
            clean.pop("reasoning_content", None)
            if isinstance(reasoning, str):
                clean["reasoning_content"] = reasoning
        out.append(clean)
    return out


# ---- The tokenizer ----

USER_STUB = {"role": "user", "content": "x"}
ANSWER_STUB = {"role": "assistant", "content": MARK}


class ChatTokenizer:
    """One model's tokenizer and template. Pure after construction, apart from counters."""

    def __init__(self, model_path: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO):
        """Raises TokenizerError when files or the template are missing, ParserError for names of parsers."""
        self.model_path = model_path
        self.lone_surrogates = 0  # texts in which unpaired surrogates were replaced
        self._tokenizer = load_tokenizer(model_path)
        self._templates = compile_templates(model_path, self._tokenizer.chat_template)
        source = self._tokenizer.chat_template
        source = source if isinstance(source, str) else json.dumps(source, sort_keys=True)
        self.template_hash = hashlib.sha256(source.encode()).hexdigest()
        self._added = {i: token.content for i, token in self._tokenizer.added_tokens_decoder.items()}
        spellings = sorted(self._added.values(), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None
        # What closes a message in history, and what closes the assistant's last one (gpt-oss: another token).
        self._message_end = next(iter(self._tokens_behind([{**USER_STUB, "content": MARK}])), None)
        closing = self._tokens_behind([USER_STUB, ANSWER_STUB])
        self._closer = self._message_end if self._message_end in closing else next(iter(closing), None)
        self.stop_token_ids = self._stop_token_ids()
        self._stops = {
            self._added.get(i) or self._tokenizer.convert_ids_to_tokens(i) for i in self.stop_token_ids
        }
        self.suffix_exact, self.suffix_note = self._prove_suffix()
        self._parsers = None
        if (tool_parser, reasoning_parser) != (AUTO, AUTO):
            self._parsers = VllmParsers(self._tokenizer, tool_parser, reasoning_parser)

    def info(self) -> dict:
        return {
            "model_path": self.model_path,
            "vocab_size": len(self._tokenizer),
            "eos_token_id": self._tokenizer.eos_token_id,
            "stop_token_ids": self.stop_token_ids,
            "template_hash": self.template_hash,
            "suffix_exact": self.suffix_exact,
            "suffix_note": self.suffix_note,
        }

    # -- text to ids and back --

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; nothing is added. Unpaired surrogates, which no UTF-8 has, become U+FFFD."""
        if not texts:
            return []
        clean = [re.sub("[\ud800-\udfff]", "\ufffd", text) for text in texts]
        self.lone_surrogates += sum(a != b for a, b in zip(clean, texts, strict=True))
        return self._tokenizer(clean, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, rows: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """Text of each row. Ids past the vocabulary (padded embeddings have them) give nothing."""
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return [self._tokenizer.decode(list(row), **options) for row in rows]

    # -- render --

    def render(self, items: Sequence[dict]) -> tuple[list[list[int]], list[str | None]]:
        """items: {messages, tools, template_kwargs, add_generation_prompt}. Ids and error of each."""

        def text(item):
            messages = normalise(item["messages"])
            return self._text(messages, item["tools"], item["template_kwargs"], item["add_generation_prompt"])

        def answer(items):
            texts, errors = each(text, items)
            return self.encode(texts), errors

        return once_each(answer, items)

    def _text(self, messages: list[dict], tools, kwargs, generate: bool) -> str:
        """One conversation by the template. Whatever a template raises is the item's error."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        context = {
            "documents": None,
            **self._tokenizer.special_tokens_map,
            **(kwargs or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": generate,
        }
        return self._templates[name].render(context)

    # -- suffix --

    def suffix(self, items: Sequence[dict]) -> tuple[list[list[int]], list[str | None]]:
        """items: {stub, new_messages, tools, template_kwargs, last_ids}. Ids to append and error of each."""
        return once_each(self._suffix, items)

    def _suffix(self, items: Sequence[dict]) -> tuple[list[list[int]], list[str | None]]:
        cuts, errors = each(self._suffix_text, items)
        # A text behind a special token is tokenised differently from one that begins (prefix blanks, tokens
        # that swallow a newline), so the sampled stop token stands in front and its id is dropped again.
        rows = self.encode(["".join(cut) for cut in cuts])
        for i, (item, cut) in enumerate(zip(items, cuts, strict=True)):
            if cut and cut[0]:
                stands = rows[i][:1] == item["last_ids"][-1:]
                rows[i] = rows[i][1:] if stands else self.encode([cut[1]])[0]
        return rows, errors

    def _suffix_text(self, item: dict) -> tuple[str, str]:
        """(the sampled stop token's text or "", the text that follows it)."""
        stub, new = normalise([item["stub"]])[0], normalise(item["new_messages"])
        tools, kwargs = item["tools"], item["template_kwargs"]
        last_id = item["last_ids"][-1] if item["last_ids"] else None
        stop = self._spelling(last_id) if last_id in self.stop_token_ids else ""
        head = [USER_STUB, marked(stub, "")]
        text = self._text([*head, *new], tools, kwargs, True)
        if MARK not in text:  # no calls, or a template that does not print them
            head = [USER_STUB, marked(stub, MARK)]
            text = self._text([*head, *new], tools, kwargs, True)
        tail = behind_mark(text)
        ending = behind_mark(self._text(head, tools, kwargs, False))
        return stop, tail[self._turn_end(tail, ending, stop, "tool_calls" in stub, tools, kwargs) :]

    def _turn_end(self, tail: str, ending: str, stop: str, has_calls: bool, tools, kwargs) -> int:
        """Where the sampled turn ends in `tail`, the template's text behind the turn's last own word.

        `ending` is the same when no message follows. What both share is the closing of the turn:
            tail     }\n</tool_call><|im_end|>\n<|im_start|>user ...
            ending   }\n</tool_call><|im_end|>\n
        """
        pieces, ends = self._pieces(tail), self._pieces(ending)
        shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(pieces, ends))]  # noqa: B905
        closing = "".join(shared)
        following, last = "".join(pieces[len(shared) :][:1]), "".join(ends[len(shared) :][:1])
        if stop and stop in closing:
            return closing.index(stop) + len(stop)
        # The next turn's first token doubles as stop token (GLM), or the last turn ends otherwise than
        # history does (gpt-oss): either way the sampled token stands where the template has `following`.
        if stop and (following == stop or (last == stop and following == self._message_end)):
            return len(closing) + len(following)
        if not has_calls:
            return 0
        # A call counts as one only when its closing tag was sampled: what closes the turn begins behind it.
        at = [closing.index(token) for token in self._stops if token in closing]
        if at:
            return min(at)
        if following == self._message_end:
            return len(closing)
        plain = behind_mark(self._text([USER_STUB, ANSWER_STUB], tools, kwargs, False))
        return len(closing) - (len(plain) if closing.endswith(plain) else 0)

    def _pieces(self, text: str) -> list[str]:
        """Added tokens and the text between them."""
        return [piece for piece in self._split.split(text) if piece] if self._split else [text]

    def _spelling(self, token_id: int) -> str:
        return self._added.get(token_id) or self._tokenizer.decode([token_id])

    def _tokens_behind(self, messages: list[dict]) -> list[str]:
        """Added tokens behind the mark; none where the template does not render these messages."""
        try:
            tail = behind_mark(self._text(messages, None, None, False))
        except Exception:  # noqa: BLE001 any error of a template: it has no such turn
            return []
        return [piece for piece in self._pieces(tail) if piece in self._added.values()]

    def _stop_token_ids(self) -> list[int]:
        """The tokenizer's end of sequence, those of the generation config, the template's end of a turn."""
        ids = {self._tokenizer.eos_token_id, *generation_stop_ids(self.model_path)}
        if self._closer:
            ids.add(self._tokenizer.convert_tokens_to_ids(self._closer))
        return sorted(i for i in ids if i is not None)

    # -- proof --

    def _prove_suffix(self) -> tuple[bool, str]:
        """Compare suffix with the full render on a few conversations. (exact, one line about it)."""
        faults, refused, dropped, exact = [], [], [], 0
        for name, before, turn, after, tools in proof_conversations():
            try:
                full = self._text(normalise([*before, turn, *after]), tools, None, True)
            except Exception as error:  # noqa: BLE001 the template does not know such a conversation
                refused.append(f"{name} ({one_line(error)})")
                continue
            if any(message["content"].strip() not in full for message in after):
                dropped.append(name)
            fault = self._compare(full, turn, after, tools)
            if fault:
                faults.append(f"{name}: {fault}")
            else:
                exact += 1
        note = f"suffix equals the full render on {exact} conversations"
        if faults:
            note = f"suffix differs from the full render: {'; '.join(faults)}"
        if refused:
            note += f"; the template refuses: {', '.join(refused)}"
        if dropped:
            note += f"; the template prints no new message of: {', '.join(dropped)}"
        if self._closer and self._message_end and self._closer != self._message_end:
            swap = f"the last turn ends in {self._closer} where history has {self._message_end}"
            note += f"; {swap}: what was sampled stays"
        return not faults and exact > 0, note

    def _compare(self, full: str, turn: dict, after: list[dict], tools) -> str | None:
        """What is wrong with the suffix of this turn against the template's whole text; null = nothing."""
        closer, convert = self._closer, self._tokenizer.convert_tokens_to_ids
        stop_id = convert(closer) if closer else self._tokenizer.eos_token_id
        item = {"stub": turn, "new_messages": after, "tools": tools, "template_kwargs": None}
        for last_ids in ([stop_id], []):
            item["last_ids"] = [i for i in last_ids if i is not None]
            try:
                stop, text = self._suffix_text(item)
            except Exception as error:  # noqa: BLE001 a template may refuse the stub alone
                return one_line(error)
            if not text or not full.endswith(text):
                return f"expected ...{full[-len(text) - 20 :]!r}, got {text!r}"
            head = full.removesuffix(text)
            fault = self._head_fault(head, turn, stop)
            if fault:
                return fault
            ids = self.suffix([item])[0][0]
            if self.encode([full])[0][-len(ids) :] != ids:
                return f"same text {text[:40]!r}, other ids"
        return None

    def _head_fault(self, head: str, turn: dict, stop: str) -> str | None:
        """What precedes the suffix must be the turn's own words, closed once or (ended by length) not."""
        end = next((e for e in (stop, self._message_end) if stop and e and head.endswith(e)), "")
        head = head.removesuffix(end)
        called = "tool_calls" in turn
        own = turn["tool_calls"][-1]["arguments"] if called else turn["content"]
        rest = head
        if own in head:
            rest = head[head.rfind(own) + len(own) :]
        elif called:  # templates may print calls in a form of their own, or not at all
            rest = self._pieces(head)[-1]
        # Behind calls, and in some templates before a stop token, stands markup the policy writes itself.
        if any(token in rest for token in self._stops) or (rest and not called and not stop):
            return f"the turn ends in {head[-40:]!r}, expected {own!r}"
        return None

    # -- parse --

    def parse(self, rows: Sequence[Sequence[int]], tools: Sequence[Any]) -> list[dict]:
        """Sampled turns, read. An empty list of tools leaves call markup in the content; null means the
        prompt may offer tools in its own words, so calls are read."""
        bodies = [row[:-1] if len(row) and row[-1] in self.stop_token_ids else row for row in rows]
        texts = self.decode(bodies, False)
        turns = []
        for text, offered in zip(texts, tools, strict=True):
            by_name = self._parsers and parse_turn_by(self._parsers, text, offered)
            turns.append({"text": text, **(by_name or parse_turn(text, offered != []))})
        return turns


def each(function, items: Sequence) -> tuple[list, list[str | None]]:
    """Results and errors of a batch: exactly one of the two per item ("" stands for a result that failed)."""
    results, errors = [], []
    for item in items:
        try:
            results.append(function(item))
            errors.append(None)
        except Exception as error:  # noqa: BLE001 one bad item never fails the others
            results.append("")
            errors.append(one_line(error))
    return results, errors


def once_each(function, items: Sequence[dict]) -> tuple[list, list[str | None]]:
    """Results and errors of `function`, a function of such lists, which sees equal items once."""
    keys = [repr(item) for item in items]  # exact: 1 and 1.0 render differently
    distinct = dict(zip(keys, items, strict=True))
    results, errors = function(list(distinct.values()))
    at = {key: i for i, key in enumerate(distinct)}
    return [results[at[key]] for key in keys], [errors[at[key]] for key in keys]


def one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    known = isinstance(error, (ItemError, jinja2.TemplateError))
    return message if known and message else f"{type(error).__name__}: {message}"


def marked(stub: dict, content: str) -> dict:
    """The turn with a mark for arguments and this content: of what it said a template sees no word.

    Next to calls the content stays empty where it can: some templates print it behind the results.
    """
    out = {**stub, "content": content}
    out.pop("reasoning_content", None)
    if "tool_calls" in stub:
        arguments = raw_arguments(f'{{"{MARK}": "{MARK}"}}')
        calls = [
            {**call, "function": {**call["function"], "arguments": arguments}} for call in stub["tool_calls"]
        ]
        out["tool_calls"] = calls
    return out


def behind_mark(text: str) -> str:
    _, mark, tail = text.rpartition(MARK)
    if not mark:
        raise ItemError("the template does not print the assistant's turn")
    return tail


# ---- Loading ----


def load_tokenizer(model_path: str):
    from transformers import AutoTokenizer  # slow to import, and a test double needs none of it

    path = Path(model_path)
    if path.is_absolute() or path.exists():
        if not path.is_dir():
            raise TokenizerError(f"Cannot load tokenizer: no directory {model_path}")
        # Without these transformers makes a tokenizer of nothing, silently.
        if not any(
            (path / name).exists()
            for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
        ):
            raise TokenizerError(f"Cannot load tokenizer: {model_path} has no tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # whatever is wrong in there, the user needs one line
        raise TokenizerError(f"Cannot load tokenizer of {model_path}: {one_line(error)}") from error


def compile_templates(model_path: str, source: str | dict[str, str] | None) -> dict[str, jinja2.Template]:
    """By name; a model with one template has `default` only."""
    if not source:
        raise TokenizerError(f"Cannot use {model_path}: its tokenizer has no chat template")
    sources = {"default": source} if isinstance(source, str) else source
    if "default" not in sources:
        raise TokenizerError(f"Cannot use {model_path}: none of its chat templates is named default")
    environment = template_environment()
    try:
        return {name: environment.from_string(text) for name, text in sources.items()}
    except jinja2.TemplateError as error:
        raise TokenizerError(
            f"Cannot use {model_path}: its chat template is broken: {one_line(error)}"
        ) from error


def generation_stop_ids(model_path: str) -> list[int]:
    """eos_token_id of generation_config.json, or of config.json where there is none."""
    from transformers.utils.hub import cached_file

    for name in ("generation_config.json", "config.json"):
        try:
            path = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        except OSError:
            path = None
        if path:
            value = json.loads(Path(path).read_text()).get("eos_token_id")
            return [value] if isinstance(value, int) else list(value or ())
    return []


def proof_conversations() -> list[tuple[str, list[dict], dict, list[dict], list | None]]:
    """(name, messages before, the turn, messages after, tools)."""
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "What is in a and b?"}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "read", "arguments": '{"path": "a", "n": 1.0}'}],
    }
    both = {"role": "assistant", "content": "", "tool_calls": call["tool_calls"] * 2}
    results = [{"role": "tool", "name": "read", "content": text} for text in ("first", "second\n")]
    answer = {"role": "assistant", "content": "One and two."}
    follow_up = [{"role": "user", "content": "And in c?"}]
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tool = {"type": "function", "function": {"name": "read", "description": "Read", "parameters": schema}}
    return [
        ("user follow-up", [user], answer, follow_up, None),
        ("user follow-up after a system message", [system, user], answer, follow_up, None),
        ("tool result", [system, user], call, results[:1], [tool]),
        ("two tool results", [system, user], both, results, [tool]),
        ("user follow-up after tools", [system, user, call, results[0]], answer, follow_up, [tool]),
    ]


# ---- Reading a sampled turn ----

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
STRICT = json.JSONDecoder(parse_constant=lambda name: refuse(f"{name} is not JSON"))
BLANK = re.compile(r"[ \t\r\n]*")


def refuse(message: str):
    raise ValueError(message)


def parse_turn(text: str, read_calls: bool = True) -> dict:
    """{content, reasoning, tool_calls, error} of a turn's text."""
    reasoning, content = split_reasoning(text)
    calls: list[dict] = []
    error = None
    if read_calls and CALL in content:
        content, calls, error = split_calls(content)
    return {"content": content, "reasoning": reasoning, "tool_calls": calls, "error": error}


def parse_turn_by(parsers: VllmParsers, text: str, tools: Any) -> dict:
    """The same by vLLM's parsers. The part of the turn that none is named for is read as above."""
    if not parsers.reads_reasoning:
        reasoning, content = split_reasoning(text)
        return {**parsers.read(content, tools), "reasoning": reasoning}
    turn = parsers.read(text, tools)
    if not parsers.reads_calls and tools != [] and turn["error"] is None:
        turn["content"], turn["tool_calls"], turn["error"] = split_calls(turn["content"])
    return turn


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning, the rest). The opener may stand in the prompt, then only the closer is here; a thought
    without an end (the turn ended by length) is reasoning to its end."""
    opened = text.lstrip().startswith(THINK)
    body = text.lstrip()[len(THINK) :] if opened else text
    thought, closer, rest = body.partition(THINK_END)
    if not opened and not closer:
        return None, text
    return thought.strip("\n"), rest.lstrip("\n")


def split_calls(text: str) -> tuple[str, list[dict], str | None]:
    """(text outside of calls, calls, error). A malformed call stays in the text; the error is the first's."""
    outside, calls, error = [], [], None
    at = 0
    while True:
        start = text.find(CALL, at)
        if start < 0:
            outside.append(text[at:])
            break
        outside.append(text[at:start])
        try:
            call, at = scan_call(text, start + len(CALL))
            calls.append(call)
        except (ValueError, RecursionError) as fault:
            reason = "nested too deep" if isinstance(fault, RecursionError) else str(fault)
            error = error or f"Malformed tool call: {reason}"
            at = start + len(CALL)
            outside.append(CALL)
    content = "".join(outside)
    return (content.strip() if calls else content), calls, error


def scan_call(text: str, at: int) -> tuple[dict, int]:
    """The call whose JSON starts at `at`, arguments as the slice of text they are, and where it ends."""
    members, at = scan_object(text, skip_blank(text, at))
    at = skip_blank(text, at)
    if not text.startswith(CALL_END, at):
        raise ValueError(f"expected {CALL_END} after the object")
    name = json.loads(members.get("name", "null"))
    arguments = members.get("arguments", "")
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    if not arguments.startswith("{"):
        raise ValueError("its arguments are not an object")
    return {"name": name, "arguments": arguments}, at + len(CALL_END)


def scan_object(text: str, at: int) -> tuple[dict[str, str], int]:
    """Members of a JSON object as raw text by key, and the position behind it. Strict JSON."""
    members: dict[str, str] = {}
    if text[at : at + 1] != "{":
        raise ValueError("expected a JSON object")
    at = skip_blank(text, at + 1)
    while text[at : at + 1] != "}":
        if members:
            if text[at : at + 1] != ",":
                raise ValueError("expected , or } in the object")
            at = skip_blank(text, at + 1)
        if text[at : at + 1] != '"':
            raise ValueError("expected a key in quotes")
        key, at = STRICT.raw_decode(text, at)
        at = skip_blank(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"expected : after {key!r}")
        start = skip_blank(text, at + 1)
        _, at = STRICT.raw_decode(text, start)
        members[key] = text[start:at]
        at = skip_blank(text, at)
    return members, at + 1


def skip_blank(text: str, at: int) -> int:
    return BLANK.match(text, at).end()  # type: ignore[union-attr]  matches the empty text too


# ---- The worker ----


def rows_of(request: Request) -> list[list[int]]:
    """The rows of a message with frames ids and lengths."""
    ids, lengths = request.frames["ids"], request.frames["lengths"]
    if (lengths < 0).any() or int(lengths.sum()) != len(ids):
        raise bad_request(f"lengths sum to {int(lengths.sum())}, but there are {len(ids)} ids", "lengths")
    if (ids < 0).any():
        raise bad_request("ids must not be negative", "ids")
    ends = np.cumsum(lengths)
    return [ids[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


def ids_answer(rows: Sequence[Sequence[int]], errors: Sequence[str | None]) -> tuple[dict, dict]:
    """The reply of render, suffix and encode; rows of failed items are empty."""
    kept = [[] if error else row for row, error in zip(rows, errors, strict=True)]
    flat = np.array([i for row in kept for i in row], dtype=np.int32)
    return {"errors": list(errors)}, {
        "ids": flat,
        "lengths": np.array([len(row) for row in kept], dtype=np.int32),
    }


def main() -> None:
    runtime = Runtime.connect("tokenizer", {"max_requests": 1})
    parsers = [runtime.options.get(key, AUTO) for key in ("tool_parser", "reasoning_parser")]
    if parsers == [AUTO, AUTO]:
        # transformers imports torch when it can, which costs a core two seconds and is not needed for text.
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        tokenizer = ChatTokenizer(runtime.options["model_path"], *parsers)
    except (TokenizerError, ParserError) as error:
        runtime.refuse_input(error)

    def encode(request: Request):
        texts = request.fields["texts"]
        return ids_answer(tokenizer.encode(texts), [None] * len(texts))

    def parse(request: Request):
        rows, tools = rows_of(request), request.fields["tools"]
        if len(rows) != len(tools):
            raise bad_request(f"{len(tools)} tools for {len(rows)} rows", "tools")
        return {"items": tokenizer.parse(rows, tools)}

    def counted(handler):
        def handle(request: Request):
            answer = handler(request)
            runtime.stats["lone_surrogates"] = float(tokenizer.lone_surrogates)
            return answer

        return handle

    handlers = {
        "render": lambda request: ids_answer(*tokenizer.render(request.fields["items"])),
        "suffix": lambda request: ids_answer(*tokenizer.suffix(request.fields["items"])),
        "encode": encode,
        "decode": lambda request: {
            "texts": tokenizer.decode(rows_of(request), request.fields["skip_special"])
        },
        "parse": parse,
    }
    runtime.ready(**tokenizer.info())
    runtime.serve({kind: counted(handler) for kind, handler in handlers.items()})


if __name__ == "__main__":
    main()
