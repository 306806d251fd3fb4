"""
What transformers alone says of tokens that several versions of a policy sampled.

    stdin   {model, segments: {version: {path, tensors}}, cases: [{prompt, ids, temperature, pieces}]}
    stdout  {logprobs: [[per id]], likeliest: [[per id]], unchanged: [[per piece]]}

A piece {from, to, version, fresh} is a run of sampled ids of one version. `fresh`: all keys before it are
made by that version; else it goes on with the keys that the pieces before made, and only what follows is its
own. The last id before a piece never ran, so its key is of the piece. `likeliest` is the id that greedy
sampling takes there. `unchanged` is the logprob of the first id behind a piece had its version gone on (0 for
the last one): where a boundary is off by one, that shows.

No code of molt is used: an unmodified model, its own cache, one row at a time. Run by test/interleavings.ts.
"""

import json
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache


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
    n, out, likeliest, unchanged = len(case["prompt"]), [], [], []
    cache = DynamicCache()
    for piece in case["pieces"]:
        if piece["fresh"]:
            cache = DynamicCache()
        start, end = n + piece["from"], n + piece["to"]
        known = cache.get_seq_length()
        model = versions.load(piece["version"])
        logits = model(text[None, known:end], past_key_values=cache).logits[0]
        logprobs = (logits / case["temperature"]).log_softmax(-1)
        at = torch.arange(start, end)
        out += logprobs[at - 1 - known, text[start:end]].tolist()
        likeliest += logits[at - 1 - known].argmax(-1).tolist()
        unchanged.append(float(logprobs[-1, text[end]]) if end < len(text) else 0.0)
        cache.crop(end - 1)  # the last id was only run for `unchanged`
    return {"logprobs": out, "likeliest": likeliest, "unchanged": unchanged}


def main() -> None:
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    versions = Versions(request["model"], request["segments"])
    results = [judge(versions, case) for case in request["cases"]]
    keys = ("logprobs", "likeliest", "unchanged")
    json.dump({key: [result[key] for result in results] for key in keys}, sys.stdout)


if __name__ == "__main__":
    main()
