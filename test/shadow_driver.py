"""
Refits a real vLLM model with and without a shadow, for test_vllm_shadow.py; all in this process:

    python test/shadow_driver.py MODELS OUT

MODELS holds v0 and v1, one shape with other weights. OUT gets JSON: logprobs of some prompts at each step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "workers")]

import torch  # noqa: E402 vLLM reads the environment when it is imported
from safetensors.torch import load_file  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402

import vllm_shadow  # noqa: E402
from vllm_extension import BACKEND  # noqa: E402
from weights import Segment, write_segment  # noqa: E402

PROMPTS: Any = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 for i in range(20)]} for j in range(3)]


class Driver:
    def __init__(self, models: Path):
        self.models = models
        self.llm = LLM(
            model=str(models / "v0"),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=2**26,
            worker_extension_cls="vllm_extension.WorkerExtension",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
        self.ask("molt_start")
        self.ask("init_weight_transfer_engine", {})

    def ask(self, method: str, *args):
        return self.llm.collective_rpc(method, args=args)[0]

    def scores(self) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        found = []
        for output in self.llm.generate(PROMPTS, params, use_tqdm=False):
            rows: Any = output.prompt_logprobs
            found += [next(iter(row.values())).logprob for row in rows[1:]]
        return found

    def segment(self, name: str, **other: torch.Tensor | None) -> Segment:
        weights = load_file(self.models / name / "model.safetensors") | other
        path = str(self.models / f"{name}{'-unsound' if other else ''}.bin")
        kept = ((key, tensor) for key, tensor in sorted(weights.items()) if tensor is not None)
        return Segment.verify(path, write_segment(path, kept)[0])[0]

    def build(self, segment: Segment) -> None:
        assert self.ask("molt_build", segment.path, segment.table, segment.stamp)
        while not self.ask("molt_is_built"):
            time.sleep(0.01)

    def load(self, segment: Segment) -> bool:
        """Whether it came from the shadow."""
        self.ask("molt_stage", segment.path, segment.table, True, segment.stamp)
        worker = self.llm.llm_engine.model_executor.driver_worker
        is_built = worker.weight_transfer_engine.is_built
        self.ask("start_weight_update")
        self.ask("update_weights", {})
        self.ask("finish_weight_update")
        return is_built

    def run(self) -> dict:
        first, second = self.segment("v0"), self.segment("v1")
        out: dict = {"start": self.scores()}
        self.build(second)
        out["built"] = self.scores()
        out["came from it"] = [self.load(second)]
        out["put in"] = self.scores()
        out["came from it"] += [self.load(first), self.load(second)]
        out["loaded"] = self.scores()
        self.build(first)
        self.build(second)  # what was built before counts no more
        out["came from it"] += [self.load(first)]
        out["another than was built"] = self.scores()
        norm = next(entry["name"] for entry in second.table if "layernorm" in entry["name"])
        self.build(self.segment("v1", **{norm: None}))
        self.build(self.segment("v1", **{norm: torch.ones(3)}))  # ends in the middle of a load
        out["a failed build"] = self.scores()
        self.build(second)
        out["came from it"] += [self.load(second)]
        out["after a failed build"] = self.scores()
        self.build(first)
        os.utime(first.path)  # written after it was verified
        try:
            self.load(first)
            out["moved file"] = "loaded"
        except Exception as error:  # noqa: BLE001 vLLM wraps it
            out["moved file"] = str(error)
        vllm_shadow.ROOM = 1e9
        out["without room"] = self.ask("molt_build", second.path, second.table, second.stamp)
        out["why not"] = vllm_shadow.why_not(Strange())
        return out


class Strange(torch.nn.Module):
    """Of a quantization that nobody here has read."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.inner.__dict__["quant_method"] = object()


if __name__ == "__main__":
    models, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(Driver(models).run()))
