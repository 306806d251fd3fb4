"""The warm start: a model directory out of demonstrations, with the tokens that training will see."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from tokenizer import ChatTokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "warm_start.py"
RAW = '{"expr":  "12+34", "n": 1.0}'
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "calc", "arguments": RAW}]}
OPENING = [{"role": "system", "content": "Answer with a number."}, {"role": "user", "content": "12+34=?"}]
RESULT = {"role": "tool", "content": "46"}
ANSWER = {"role": "assistant", "content": "= 46"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"expr": {}, "n": {}}}}}
SETTINGS = {
    "seed": 0,
    "steps": 3,
    "batch": 2,
    "lr": 1e-3,
    "hidden_size": 32,
    "layers": 1,
    "initializer_range": 0.1,
    "vocab_size": 300,
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """What the script makes of six demonstrations in three steps."""
    path = tmp_path_factory.mktemp("policy")
    (path / "warm_start.json").write_text(json.dumps(SETTINGS))
    demonstrations = [[*OPENING, CALL, RESULT, ANSWER], [*OPENING, ANSWER]] * 3
    (path / "demonstrations.jsonl").write_text("".join(f"{json.dumps(m)}\n" for m in demonstrations))
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("step 3 of 3, loss ")
    return path


@pytest.fixture(scope="module")
def chat(directory) -> ChatTokenizer:
    return ChatTokenizer(str(directory))


def test_the_template_is_exact_under_suffix_and_prints_raw_arguments(chat):
    assert chat.suffix_exact and chat.suffix_note == "suffix equals the full render on 5 conversations"
    item = {
        "messages": [*OPENING, CALL],
        "tools": [TOOL],
        "template_kwargs": None,
        "add_generation_prompt": False,
    }
    (ids,), _ = chat.render([item])
    (text,) = chat.decode([ids], False)
    assert text == (
        "<|im_start|>system\nAnswer with a number. Tool: calc(expr, n).<|im_end|>\n"
        "<|im_start|>user\n12+34=?<|im_end|>\n"
        f'<|im_start|>assistant\n<tool_call>{{"name": "calc", "arguments": {RAW}}}</tool_call><|im_end|>\n'
    )


def test_demonstrations_have_the_tokens_of_prompt_turn_and_suffix_and_the_loss_on_turns(chat, directory):
    spec = importlib.util.spec_from_file_location("warm_start", SCRIPT)
    assert spec and spec.loader
    warm_start = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(warm_start)

    common = {"tools": [TOOL], "template_kwargs": None}
    (prompt, whole), _ = chat.render(
        [
            {"messages": OPENING, "add_generation_prompt": True, **common},
            {"messages": [*OPENING, CALL, RESULT, ANSWER], "add_generation_prompt": False, **common},
        ]
    )
    call_text = f'<tool_call>{{"name": "calc", "arguments": {RAW}}}</tool_call><|im_end|>'
    call, answer, end = chat.encode([call_text, "= 46<|im_end|>", "\n"])
    item = {"stub": CALL, "new_messages": [RESULT], "last_ids": call[-8:], **common}
    (added,), _ = chat.suffix([item])

    ids, mask = warm_start.encode_with_mask(chat._tokenizer, chat.decode([whole], False)[0])
    assert ids == prompt + call + added + answer + end
    assert mask == [0] * len(prompt) + [1] * len(call) + [0] * len(added) + [1] * len(answer) + [0] * len(end)


def test_the_model_loads_and_stops_where_the_tokenizer_says(chat, directory):
    model = Qwen3ForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == chat.info()["vocab_size"]
    assert [model.config.eos_token_id] == chat.stop_token_ids == chat.encode(["<|im_end|>"])[0]
    digits = chat.encode(["4042"])[0]
    assert len(digits) == 4  # one token a digit
