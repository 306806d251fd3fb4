"""vLLM without molt: one program that calls AsyncLLM.generate, the other side of scripts/bench_engine.ts.

    python scripts/bench_engine_direct.py OPTIONS            options of an engine worker, as JSON
    python scripts/bench_engine_direct.py --memcpy BYTES
    python scripts/bench_engine_direct.py --make MODEL --hidden 64 --layers 2 --vocab 512

The first two take commands on stdin: a line of JSON, its answer one, too. With OPTIONS {prompts, seeds,
max_tokens, kind} -> {seconds, tokens}, each prompt a request of its own, all at once; `kind` is vLLM's
output_kind, DELTA where each token is wanted as soon as it is there, FINAL_ONLY where only the end is. With
--memcpy anything -> {seconds} of one copy between two buffers that were written before. Engine arguments are
those of workers/engine_vllm.py, without what molt adds inside vLLM.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))

OURS = ("scheduler_cls", "worker_extension_cls", "weight_transfer_config")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("options", nargs="?")
    parser.add_argument("--make")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--memcpy", type=int)
    args = parser.parse_args()
    if args.make:
        make_model(args.make, args.hidden, args.layers, args.vocab)
    elif args.memcpy:
        memcpy(args.memcpy)
    else:
        options = json.loads(args.options)
        from engine_vllm import prepare_environment

        own = prepare_environment(options)
        try:
            asyncio.run(generate(options))
        finally:
            shutil.rmtree(own, ignore_errors=True)


def make_model(path: str, hidden: int, layers: int, vocab: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    head_dim = min(64, hidden // 2)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=hidden // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def memcpy(count: int) -> None:
    import torch

    torch.set_num_threads(1)
    source, target = torch.ones(count // 4), torch.zeros(count // 4)
    for _ in commands():
        begun = time.perf_counter()
        target.copy_(source)
        answer({"seconds": time.perf_counter() - begun})


async def generate(options: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_vllm import engine_args

    args = {key: value for key, value in engine_args(options).items() if key not in OURS}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    numbers = iter(range(2**62))

    async def one(prompt: list[int], seed: int, max_tokens: int, kind: str) -> int:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind[kind],
        )
        got: list[tuple[int, float]] = []
        async for output in llm.generate(tokens_input(prompt), params, str(next(numbers))):
            ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs or []
            got += [(id, (entry or {})[id].logprob) for id, entry in zip(ids, logprobs, strict=True)]
        return len(got)

    answer({"ready": True})
    lines = commands()
    while (command := await asyncio.to_thread(next, lines, None)) is not None:
        begun = time.perf_counter()
        pairs = zip(command["prompts"], command["seeds"], strict=True)
        counts = await asyncio.gather(
            *(one(prompt, seed, command["max_tokens"], command["kind"]) for prompt, seed in pairs)
        )
        answer({"seconds": time.perf_counter() - begun, "tokens": sum(counts)})
    llm.shutdown()


def commands():
    for line in sys.stdin:
        yield json.loads(line)


def answer(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
