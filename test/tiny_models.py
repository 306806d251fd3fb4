"""Tiny random checkpoints in Hugging Face format, for tests that need a real model and no download.

    make_model("moe", directory, seed=3)      kinds: dense_tied dense_untied moe llama mtp

Each directory holds config.json, model.safetensors, a byte-level tokenizer (ids 0..255 are the byte
alphabet, special tokens follow) and a ChatML template that knows tool calls and tool results. Two seeds
give two policies of one shape: "the trainer's next weights". Weights are sharp on purpose: with the usual
0.02 every distribution is nearly uniform and a scrambled expert or a wrong head would move a logprob by
less than a tolerance. `mtp` has a layer of multi-token prediction, which transformers does not load: it is
fed with the last token only, and the model hears mostly that one, so that many of its guesses are right.
Used by the tests of the trainer, the engine and the tokenizer; nothing in molt or workers reads it.
"""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# And dense_tied_odd, with a vocabulary of odd size.
KINDS = ("dense_tied", "dense_untied", "moe", "llama")  # that the trainer knows; mtp is for engines
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
VOCAB_SIZE = 264  # 256 bytes, 7 specials, one id that no text uses
IM_END = 256 + SPECIALS.index("<|im_end|>")

CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:\n"
    "{%- for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text has exactly one spelling."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(kind: str, **other: Any):
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE + (kind == "dense_tied_odd"),  # odd: two ranks have unequal shares
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3 if kind == "moe" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "eos_token_id": IM_END,
        "pad_token_id": 256,
        "bos_token_id": None,
        "tie_word_embeddings": kind in ("dense_tied", "dense_tied_odd"),
    } | other
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if kind == "moe":
        # The first layer stays dense, as in DeepSeek and some Qwen models.
        return Qwen3MoeConfig(**(shape | experts), norm_topk_prob=True, mlp_only_layers=[0])
    if kind == "mtp":
        experts = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_mtp_layers": 1,
        }
        return Glm4MoeConfig(**(shape | experts), use_qk_norm=True)
    if kind == "llama":
        return LlamaConfig(**shape)
    if kind in ("dense_tied", "dense_tied_odd", "dense_untied"):
        return Qwen3Config(**shape)
    raise ValueError(f"Unknown kind of tiny model: {kind!r}, want one of {', '.join(KINDS)}")


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_((0.25 if "lm_head" in name or "embed" in name else 0.12) * noise)


def make_model(kind: str, directory: str | os.PathLike, seed: int = 0, **other: Any) -> str:
    """Writes a checkpoint of `other` sizes into `directory`, made when absent; returns its path as text."""
    classes = {"moe": Qwen3MoeForCausalLM, "llama": LlamaForCausalLM, "mtp": Glm4MoeForCausalLM}
    model = classes.get(kind, Qwen3ForCausalLM)(make_config(kind, **other)).to(torch.float32)
    draw_weights(model, seed)
    if kind == "mtp":
        model.get_input_embeddings().weight.data *= 4  # the last token decides most
    model.save_pretrained(directory)
    if kind == "mtp":
        add_mtp_layer(os.path.join(directory, "model.safetensors"), model.config)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def add_mtp_layer(path: str, config: Any) -> None:
    """Writes layer N beside layers 0 to N - 1: the last of them again, fed with an embedding."""
    tensors = load_file(path)
    last, mtp = (f"model.layers.{config.num_hidden_layers - 1 + k}." for k in (0, 1))
    size = config.hidden_size
    added = {mtp + name.removeprefix(last): tensors[name] for name in tensors if name.startswith(last)} | {
        mtp + "eh_proj.weight": torch.eye(size, 2 * size),  # (embedding, hidden state) -> embedding
        mtp + "enorm.weight": torch.ones(size),
        mtp + "hnorm.weight": torch.ones(size),
        mtp + "shared_head.norm.weight": tensors["model.norm.weight"],
        mtp + "shared_head.head.weight": tensors["lm_head.weight"],
        mtp + "embed_tokens.weight": tensors["model.embed_tokens.weight"],
    }
    save_file(tensors | {name: tensor.clone() for name, tensor in added.items()}, path, {"format": "pt"})


def join_group_of_one() -> None:
    """This process as a world of one rank, once: what model.build needs."""
    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
