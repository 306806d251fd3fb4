"""The policy: an unmodified transformers model, cut over the ranks by FSDP2, and its per-token logprobs.

    build(path, settings) -> model         every rank reads only its own shard
    policy_logprobs(model, batch, ...)     log softmax(logits / temperature)[token], entropy, per wanted token

This is the only file that knows transformers' distributed API. One private name joins the two worlds: while
a model loads, `transformers.distributed.mixin.apply_fully_sharded_data_parallelism` is our `wrap`, which
chooses groups and precision. Tensor, expert and context parallelism enter here (mesh sizes in `build`,
groups in `wrap`), nowhere else.

Invariants
  1. Master weights and gradients are fp32. With param_dtype bf16 the decoder layers compute in bf16; the
     router, the embedding, the last norm and the lm_head stay fp32 (their rounding decides experts and
     logprobs).
  2. World size 1 takes the same path on a mesh of one rank.
  3. Logits exist for at most `chunk` tokens at a time, forward and backward.
  4. Every forward runs the same collectives whatever the batch holds, so ranks may have different rows.
  5. One row = one sequence: rows of a micro-batch never attend to each other, packed or padded.

Two layouts of a micro-batch: packed = all rows in one line (1, T), positions restart at 0; padded = (rows,
longest), padding on the right, where a causal model needs no mask. transformers' own packing on `sdpa`
builds a T x T mask, 1.6 to 2.2 times slower on a CPU at 8 to 16 rows of 75 tokens than the padded layout:
so `sdpa` here means `rows_attention`, which lifts the queries and keys of a packed line into padded rows
for the attention alone. That is as fast as padding, and rows of different lengths cost what they hold.
Callers: trainer.py, checkpoint.py (through the model). Elsewhere called actor, policy worker.
"""

import contextlib
import copy
import inspect
import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

# Families whose attention is plain causal softmax, which is all that rows_attention computes.
FAMILIES = ("qwen3", "qwen3_moe", "llama")
# Rotary embeddings that depend on the longest row at hand: a row's logprobs would depend on its batch.
UNSTEADY_ROPE = ("dynamic", "longrope")
PARAM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HOOK = "apply_fully_sharded_data_parallelism"


class ModelError(Exception):
    """The model cannot be built as asked; the message names what is in the way."""


@dataclass(frozen=True)
class ModelSettings:
    device: str = "cpu"  # cpu, cuda
    param_dtype: str = "float32"
    attn_implementation: str = "sdpa"  # another name goes to transformers as it is
    gradient_checkpoint: bool = False
    world_size: int = 1


# ---- Building ----


def check_hook() -> None:
    """The pinned release has the private name we replace, and calls it as we answer."""
    hook = getattr(mixin, HOOK, None)
    found = list(inspect.signature(hook).parameters) if callable(hook) else None
    if found != ["model", "mesh_manager"]:
        raise ModelError(
            f"transformers {transformers.__version__} has no {HOOK}(model, mesh_manager), found {found}: "
            "use the release pinned in requirements.txt"
        )


def build(model_path: str, settings: ModelSettings):
    """A sharded model in train mode. The process group must exist. Raises ModelError."""
    check_hook()
    if not os.path.isdir(model_path):
        raise ModelError(f"Cannot load {model_path}: not a directory")
    if settings.param_dtype not in PARAM_DTYPES:
        raise ModelError(
            f"Unknown param_dtype {settings.param_dtype!r}, want one of {', '.join(PARAM_DTYPES)}"
        )
    own_attention = settings.attn_implementation == "sdpa"
    # The attention's name lives in the config: a copy, so that no other model of it changes with ours.
    with loading(model_path):
        config = copy.deepcopy(AutoConfig.from_pretrained(model_path))
    check_family(config)
    wrap_ours = partial(wrap, param_dtype=PARAM_DTYPES[settings.param_dtype])
    with loading(model_path), hooked(wrap_ours):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            config=config,
            dtype=torch.float32,
            attn_implementation="molt_rows" if own_attention else settings.attn_implementation,
            distributed_config=DistributedConfig(fsdp_size=settings.world_size),
            output_loading_info=True,
        )
    model, report = loaded
    check_loaded(model_path, report)
    if not getattr(model, "_is_fsdp_managed_module", False):
        # One rank: transformers makes no mesh and calls no hook.
        model.to(settings.device)
        wrap_ours(model, mesh_of_one(settings.device))
    if settings.gradient_checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.policy = types.MethodType(policy, model)
    # An inner module called by itself would meet sharded weights.
    register_fsdp_forward_method(model, "policy")
    return model.train()


def check_family(config) -> None:
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in FAMILIES:
        raise ModelError(f"Unknown model family {config.model_type!r}, want one of {', '.join(FAMILIES)}")
    if layers != {"full_attention"}:
        raise ModelError(f"Cannot train layers of type {', '.join(sorted(layers - {'full_attention'}))}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in UNSTEADY_ROPE:
        raise ModelError(f"Cannot train rotary embeddings of type {rope!r}: they depend on the batch")
    if getattr(config, "attention_dropout", 0.0):
        raise ModelError(
            f"Cannot train with attention_dropout {config.attention_dropout}: logprobs would be random"
        )


def check_loaded(model_path: str, report) -> None:
    """A weight that the files lack would be random, silently."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise ModelError(
                f"Cannot load {model_path}: {kind.replace('_', ' ')} {', '.join(names[:3])} ({len(names)})"
            )


@contextlib.contextmanager
def loading(path: str) -> Iterator[None]:
    """
    Whatever goes wrong while files are read is the files' fault, so that it is a ModelError of one line;
    memory that does not suffice is not.
    """
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "allocate memory" in text:  # of a CPU, where torch has no type for it
            raise
        raise ModelError(f"Cannot load {path}: {type(error).__name__}: {text[:400]}") from error


@contextlib.contextmanager
def hooked(replacement) -> Iterator[None]:
    original = getattr(mixin, HOOK)
    setattr(mixin, HOOK, replacement)
    try:
        yield
    finally:
        setattr(mixin, HOOK, original)


def device_named(name: str, option: str) -> str:
    """auto = cuda where there is one. Raises ModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--{option} cuda: torch {torch.__version__} sees no GPU here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def mesh_of_one(device: str) -> TransformersDeviceMesh:
    dense = init_device_mesh(device, (1, 1, 1), mesh_dim_names=("pp", "fsdp", "tp"))
    expert = init_device_mesh(device, (1, 1, 1), mesh_dim_names=("pp", "efsdp", "ep"))
    return TransformersDeviceMesh(dense, expert)


def wrap(model, mesh_manager, *, param_dtype: torch.dtype):
    """
    FSDP2 groups: every decoder layer, then the root (embedding, last norm, lm_head).

    The lm_head has no group of its own: it is called once per chunk, and a group would communicate once per
    call, a number that differs between ranks. A tied head is tied before: else FSDP takes it for a second
    weight and, where shards are unequal, gives it a storage of its own, of which the optimizer moves one.
    """
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    mesh = mesh_manager.get_mesh("fsdp")
    whole = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mixed = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        router = getattr(layer.mlp, "gate", None)
        if router is not None and param_dtype != torch.float32:
            fully_shard(router, mesh=mesh, mp_policy=whole)  # casts its input up: its matmul runs in fp32
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=whole)
    model._is_fsdp_managed_module = True  # transformers reads it
    model._mesh_manager = mesh_manager
    model._is_whole = mesh.size() == 1 and param_dtype == torch.float32  # weights.py reads it
    return model


# ---- Micro-batches ----


class RowIndex(NamedTuple):
    """Where the tokens of a packed line lie in padded rows, and back. Buckets hold rows of similar length."""

    # Per bucket (rows, longest): positions in the line; padding repeats the row's last token.
    takes: tuple[torch.Tensor, ...]
    put: torch.Tensor  # (T,) positions in the buckets' padded rows, flattened one after the other


@dataclass(frozen=True)
class Batch:
    """Rows laid out for one forward, and the tokens whose logprob is wanted (N of them, in row order)."""

    input_ids: torch.Tensor  # (1, T) or (rows, longest)
    position_ids: torch.Tensor
    index: RowIndex | None  # packed lines have one
    sources: torch.Tensor  # (N,) flat positions of the tokens before the wanted ones
    targets: torch.Tensor  # (N,) the wanted ids


def make_batch(
    rows: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], packed: bool, device: str = "cpu"
) -> Batch:
    """
    `wanted[i][k]` asks for the logprob of token k of row i; never for k = 0, which nothing predicts. No
    rows at all makes a dummy: one token, nothing wanted, the same work for the communication.
    """
    if not rows:
        rows, wanted = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.bool)]
    if any(bool(w[0]) for w in wanted):
        raise ValueError("The first token of a row has no logprob")
    line, asked = torch.cat(list(rows)).long(), torch.cat(list(wanted)).bool()
    lengths = torch.tensor([len(row) for row in rows])
    at = asked.nonzero().squeeze(1)  # positions in the line
    if packed:
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        batch = Batch(line[None], positions[None], bucket_rows(lengths), at - 1, line[at])
    else:
        take, real = pad_rows(lengths.cumsum(0) - lengths, lengths)
        put = real.flatten().nonzero().squeeze(1)
        positions = torch.arange(take.shape[1]).expand(take.shape)
        batch = Batch(line[take], positions, None, put[at] - 1, line[at])
    return batch if device == "cpu" else to_device(batch, device)


def pad_rows(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the line of padded rows' tokens, and which of them are real; both (rows, longest)."""
    column = torch.arange(int(lengths.max()))
    take = starts[:, None] + torch.minimum(column[None], lengths[:, None] - 1)
    return take, column[None] < lengths[:, None]


def bucket_rows(lengths: torch.Tensor) -> RowIndex:
    """No row shares a bucket with one over twice its length, so padding at most doubles the tokens."""
    starts = lengths.cumsum(0) - lengths
    order = lengths.argsort(descending=True, stable=True)
    put = torch.empty(int(lengths.sum()), dtype=torch.int64)
    takes: list[torch.Tensor] = []
    first = offset = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        last = first + int((lengths[order[first:]] * 2 > longest).sum())
        rows = order[first:last]
        take, real = pad_rows(starts[rows], lengths[rows])
        put[take[real]] = offset + real.flatten().nonzero().squeeze(1)
        takes.append(take)
        first, offset = last, offset + take.numel()
    return RowIndex(tuple(takes), put)


def to_device(batch: Batch, device: str) -> Batch:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    index = batch.index
    if index is not None:
        index = RowIndex(tuple(move(take) for take in index.takes), move(index.put))
    ids, positions = move(batch.input_ids), move(batch.position_ids)
    return Batch(ids, positions, index, move(batch.sources), move(batch.targets))


# ---- Forward ----


def rows_attention(
    module,
    query: torch.Tensor,  # (1 or rows, heads, tokens, head_dim)
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_index: RowIndex | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within rows. transformers hands on the keyword `row_index` from the model's call."""
    grouped = query.shape[1] != key.shape[1]  # fewer key heads than query heads

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Padding is at the end of a row, so causality hides it.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2)  # (rows, longest, heads, head_dim)

    if row_index is None:
        return attend(query, key, value), None
    lines = [x[0].transpose(0, 1) for x in (query, key, value)]  # (T, heads, head_dim)
    parts = [attend(*(x[take].transpose(1, 2) for x in lines)).flatten(0, 1) for take in row_index.takes]
    return torch.cat(parts)[row_index.put][None], None


AttentionInterface.register("molt_rows", rows_attention)


def policy(self, batch: Batch, temperature: float, chunk: int, want_entropy: bool):
    """Bound to the model by `build`, because only a registered method sees gathered weights."""
    call: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    if self.config._attn_implementation == "molt_rows":
        call["row_index"] = batch.index
    # Without use_cache=False transformers ignores that positions restart, and rows attend to each other.
    hidden = self.base_model(**call, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)[batch.sources]  # (N, hidden)
    count = len(batch.targets)
    one = partial(chunk_logprobs, self.get_output_embeddings(), temperature, want_entropy)
    if count <= chunk:  # also when N is 0: the lm_head must take part in every backward
        return one(hidden, batch.targets)
    forgetful = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
    parts = [forgetful(h, t) for h, t in zip(hidden.split(chunk), batch.targets.split(chunk), strict=True)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def chunk_logprobs(head, temperature: float, want_entropy: bool, hidden: torch.Tensor, targets: torch.Tensor):
    logits = head(hidden.float()).float() / temperature  # (chunk, vocab)
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        entropy = torch.zeros_like(logprobs)
        if want_entropy:
            every = logits.detach().log_softmax(-1)
            entropy = -(every.exp() * every).sum(-1)
    return logprobs, entropy


def policy_logprobs(model, batch: Batch, temperature: float, chunk: int, want_entropy: bool = False):
    """
    (logprobs, entropies), each (N,) fp32: of the wanted tokens under softmax(logits / temperature), and of
    that whole distribution at their position (no gradient; zeros unless asked for).
    """
    return model.policy(batch, temperature, chunk, want_entropy)
