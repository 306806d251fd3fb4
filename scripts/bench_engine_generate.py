"""The torch engine against transformers' `generate`: tokens per second on the same work.

    python scripts/bench_engine_generate.py MODEL 1 16 64       last line: {"1": {...}, "16": {...}, ...}
    python scripts/bench_engine_generate.py --make MODEL --like TOKENIZER

The work of a round: N prompts of PROMPT_TOKENS random ids, other ones each round, NEW_TOKENS sampled from
each at temperature 1, nothing filtered, no stop, and the logprob of every sampled token. Both sides run in
this process, in fp32 with one thread, in turn; a pair of rounds gives a ratio, and medians are reported.

Engine: slot_engine.Engine itself, from `submit` to the last `tokens` event. The socket and its messages are
not included. generate: a static batch without padding (its best case), `output_logits`, then the logprob of
what was sampled. `--make` writes a random 4-layer, 256-wide model instead, with TOKENIZER's vocabulary and
chat template. Run by scripts/bench_loop.ts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))
from slot_engine import Engine, load_model

PROMPT_TOKENS = 32
NEW_TOKENS = 64
WARM_UP = 2  # rounds that do not count
ENOUGH_S = 10.0  # of a concurrency, once it has MIN_ROUNDS
MIN_ROUNDS = 5
MAX_ROUNDS = 15
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_tokens": NEW_TOKENS,
    "stop": [],
    "stop_token_ids": [],
}
REQUEST: dict[str, Any] = {
    "rollout_id": "r",
    "attempt": 0,
    "turn": 0,
    "already": 0,
    "want_text": False,
    "heads": 0,
    "want_routes": False,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("concurrency", type=int, nargs="*")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--like", help="directory of the tokenizer, for --make")
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if args.make:
        make_model(args.model, args.like)
        return
    results = {str(n): compare(args.model, n) for n in args.concurrency}
    print(json.dumps(results))


def compare(path: str, n: int) -> dict[str, float]:
    engine = Engine(
        load_model(path, "float32", "cpu"),
        path,
        max_requests=n,
        max_len=PROMPT_TOKENS + NEW_TOKENS,
        prefill_tokens=4096,
    )
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # every row samples NEW_TOKENS
    pairs = []
    begun = time.perf_counter()
    for index in range(MAX_ROUNDS + WARM_UP):
        prompts = draw_prompts(engine.vocab_size, n, index)
        pairs.append((engine_round(engine, prompts), generate_round(reference, prompts, index)))
        if len(pairs) >= MIN_ROUNDS + WARM_UP and time.perf_counter() - begun > ENOUGH_S:
            break
    counted = pairs[WARM_UP:]
    tokens = n * NEW_TOKENS
    return {
        "ratio": statistics.median(theirs / ours for ours, theirs in counted),
        "engine_tokens_per_s": tokens / statistics.median(ours for ours, _ in counted),
        "generate_tokens_per_s": tokens / statistics.median(theirs for _, theirs in counted),
        "rounds": len(counted),
    }


def draw_prompts(vocab_size: int, n: int, index: int) -> np.ndarray:
    """(n, PROMPT_TOKENS), other ones each round: the engine would find those of the last one in its cache."""
    return np.random.default_rng(index).integers(0, vocab_size, (n, PROMPT_TOKENS), dtype=np.int32)


def engine_round(engine: Engine, prompts: np.ndarray) -> float:
    begun = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.submit(REQUEST | {"session_id": f"s{row}", "sampling": SAMPLING | {"seed": row}}, prompt)
    ids = logprobs = ended = 0
    while ended < len(prompts):
        event = engine.step()
        if event is not None:
            fields, frames = event
            ids, logprobs = ids + len(frames["ids"]), logprobs + len(frames["logprobs"])
            ended += len(fields["ended"])
    seconds = time.perf_counter() - begun
    if not ids == logprobs == prompts.shape[0] * NEW_TOKENS:
        sys.exit(f"The engine sampled {ids} tokens with {logprobs} logprobs, want {NEW_TOKENS} per prompt")
    return seconds


@torch.inference_mode()
def generate_round(model, prompts: np.ndarray, seed: int) -> float:
    torch.manual_seed(seed)
    begun = time.perf_counter()
    rows = torch.from_numpy(prompts.astype(np.int64))
    out = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sampled = out.sequences[:, PROMPT_TOKENS:]
    # Of the sampled tokens alone, which is the cheapest way.
    columns = [
        x.gather(1, i[:, None])[:, 0] - x.logsumexp(-1) for x, i in zip(out.logits, sampled.T, strict=True)
    ]
    logprobs = torch.stack(columns, 1)
    seconds = time.perf_counter() - begun
    if logprobs.shape != (len(rows), NEW_TOKENS):
        sys.exit(f"generate gave logprobs of shape {tuple(logprobs.shape)}")
    return seconds


def make_model(path: str, tokenizer_path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


if __name__ == "__main__":
    main()
