"""
What transformers alone says of tokens that several versions of a policy sampled.

    stdin   {model, segments: {version: {path, tensors}}, cases: [{prompt, ids, temperature, pieces}]}
    stdout  {logprobs: [[per id]], likeliest: [[per id]], decided: [[per id]], unchanged: [[per piece]]}

A piece {from, to, version, fresh} is a run of sampled ids of one version. `fresh`: all keys before it are
made by that version; else it goes on with the keys that the pieces before made, and only what follows is its
own. The last id before a piece never ran, so its key is of the piece. `likeliest` is the id that greedy
sampling takes there. An id is `decided` unless a router had, for a token that it depends on, an expert in
and an expert out so close that rounding says which: another program may rightly take the other. `unchanged`
is the logprob of the first id behind a piece had its version gone on (0 for the last one): where a boundary
is off by one, that shows.

No code of molt is used: an unmodified model, its own cache, one row at a time. Run by test/interleavings.ts.
"""

import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

KEYS = ("logprobs", "likeliest", "decided", "unchanged")
TIE = 2e-6  # router logits of that distance are a matter of rounding


class Versions:
    def __init__(self, model: str, segments: dict):
        self.model, self.segments = model, segments
        self.load = lru_cache(maxsize=8)(self._load)

    def _load(self, version: int):
        if version == 0:  # as it lies on the disk
            return read(self.model)
        segment = self.segments[str(version)]
        data = np.fromfile(segment["path"], dtype=np.uint8)
        tensors = {}
        for entry in segment["tensors"]:
            assert entry["dtype"] == "f32", entry
            raw = data[entry["offset"] : entry["offset"] + entry["bytes"]].view(np.float32)
            tensors[entry["name"]] = torch.from_numpy(raw.copy()).reshape(entry["shape"])
        with tempfile.TemporaryDirectory() as path:
            shutil.copy(Path(self.model) / "config.json", path)
            save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
            return read(path)


def read(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def judge(versions: Versions, case: dict) -> dict[str, list]:
    text = torch.tensor(case["prompt"] + case["ids"])
    n, out, likeliest, decided, unchanged = len(case["prompt"]), [], [], [], []
    cache, tied = DynamicCache(), len(text)  # the first token with a tie
    for piece in case["pieces"]:
        if piece["fresh"]:
            cache, tied = DynamicCache(), len(text)
        start, end = n + piece["from"], n + piece["to"]
        known = cache.get_seq_length()
        model = versions.load(piece["version"])
        with ties(model) as found:
            logits = model(text[None, known:end], past_key_values=cache).logits[0]
        logprobs = (logits / case["temperature"]).log_softmax(-1)
        at = torch.arange(start, end)
        out += logprobs[at - 1 - known, text[start:end]].tolist()
        likeliest += logits[at - 1 - known].argmax(-1).tolist()
        tied = min([tied, *(known + at for at in found if known + at < end - 1)])
        decided += (at <= tied).tolist()
        unchanged.append(float(logprobs[-1, text[end]]) if end < len(text) else 0.0)
        cache.crop(end - 1)  # the last id was only run for `unchanged`
    return dict(zip(KEYS, (out, likeliest, decided, unchanged), strict=True))


@contextmanager
def ties(model):
    """Tokens of the next forward for which an expert that was taken and one that was not are as good."""
    found: list[int] = []

    def look(router, _, out) -> None:
        logits = out[0].sort(-1, descending=True).values
        found.extend((logits[:, router.top_k - 1] - logits[:, router.top_k] < TIE).nonzero()[:, 0].tolist())

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(look) for router in routers]
    yield found
    for hook in hooks:
        hook.remove()


def main() -> None:
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    versions = Versions(request["model"], request["segments"])
    results = [judge(versions, case) for case in request["cases"]]
    json.dump({key: [result[key] for result in results] for key in KEYS}, sys.stdout)


if __name__ == "__main__":
    main()
