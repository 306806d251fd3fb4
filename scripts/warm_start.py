"""Make a small policy from demonstrations: tokenizer, chat template, model, supervised training.

    python scripts/warm_start.py DIRECTORY

DIRECTORY holds demonstrations.jsonl (a list of messages per line, in the order they are trained on) and
warm_start.json (the numbers; scripts/quickstart.ts explains them), and becomes a model directory as
`from_pretrained` reads it. One line of progress now and then on stdout.

Decisions
  1. The tokens are those of reinforcement learning: prompts and turns are encoded apart, at the places where
     sampling begins and ends (behind the assistant's header, behind the stop token).
  2. The loss is on the assistant's own tokens, its stop token among them.
  3. Digits are one token each, so that copying a number is copying its digits.
Run by scripts/quickstart.ts. `--end-with-stdin` ends the process when its parent is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))
from tokenizer import normalise, template_environment

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
# ChatML; tools are listed behind the system text, calls printed as Hermes does, without its newlines.
TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
{%- for tool in tools or [] %}
{%- set f = tool.function %} Tool: {{ f.name }}({{ f.parameters.properties | join(', ') }}).
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function -%}
<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}"""
TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
WARM_UP_STEPS = 20
REPORT_EVERY = 150


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--end-with-stdin", action="store_true")
    args = parser.parse_args()
    if args.end_with_stdin:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    settings = json.loads((args.directory / "warm_start.json").read_text())
    with (args.directory / "demonstrations.jsonl").open() as lines:
        demonstrations = [json.loads(line) for line in lines]

    torch.manual_seed(settings["seed"])
    template = template_environment().from_string(TEMPLATE)
    texts = [template.render(messages=normalise(m), tools=settings["tools"]) for m in demonstrations]
    tokenizer = make_tokenizer(texts, settings["vocab_size"])
    rows = [encode_with_mask(tokenizer, text) for text in texts]
    model = make_model(settings, tokenizer)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    tokens = sum(len(ids) for ids, _ in rows)
    print(f"{size:.2f} M parameters, vocabulary {len(tokenizer)}, {tokens} tokens", flush=True)
    train(model, rows, settings)
    tokenizer.save_pretrained(args.directory)
    model.save_pretrained(args.directory)


def end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode_with_mask(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and 1 where the assistant speaks."""
    ids: list[int] = []
    mask: list[int] = []
    for i, piece in enumerate(TURN.split(text)):  # every second piece is a turn of the assistant
        new = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [i % 2] * len(new)
    return ids, mask


def make_model(settings: dict, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    hidden, vocabulary = settings["hidden_size"], tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=settings["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
        initializer_range=settings["initializer_range"],
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]], settings: dict) -> None:
    """One pass over the demonstrations; short warm-up, then linear to 10 % of the learning rate."""
    steps, batch, peak = settings["steps"], settings["batch"], settings["lr"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / steps)
        chunk = rows[step * batch : (step + 1) * batch]
        ids, mask = pad([ids for ids, _ in chunk]), pad([mask for _, mask in chunk])
        # Right padding under a causal mask needs no attention mask.
        logits = model(ids, use_cache=False).logits[:, :-1].float()  # (rows, tokens - 1, vocabulary)
        own = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -torch.where(mask[:, 1:] > 0, own, 0).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1} of {steps}, loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


def pad(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


if __name__ == "__main__":
    main()
