"""Checkpoints of a trainer (to go on training) and exports (to use the policy elsewhere).

    save     path/  .metadata __<rank>_*.distcp   weights and both moments, every rank its shards (torch DCP)
                    rng-<rank>.safetensors        random state of each rank
                    trainer.json                  step, world size
    export   path/  model*.safetensors, config, tokenizer files and chat template: loads in stock transformers

Invariants
  1. A save goes into a directory that holds no checkpoint yet; every file is synced before the reply.
     Whether it is complete is said by the controller's manifest and its rename, never here.
  2. A restore finds exactly the tensors it needs, by name and shape, or changes nothing: DCP alone would
     leave what the files lack as it was, silently.
  3. Any number of ranks restores what any other number saved. Same number on a CPU: bit for bit.
Callers: trainer.py.
"""

import json
import os
import shutil

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from optim import Optimizer
from weights import hub_tensors

TRAINER_FILE = "trainer.json"
SHARD_BYTES = 4 * 1024**3
# Not copied into an export: the source's own weights in any of their formats.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".index.json")


class CheckpointError(Exception):
    """The directory cannot be written or read as asked. Nothing was changed."""


# ---- Save and restore ----


def save(path: str, model, optimizer: Optimizer, step: int) -> None:
    """Collective."""
    rank = dist.get_rank()
    os.makedirs(path, exist_ok=True)
    if os.path.exists(os.path.join(path, ".metadata")) or os.path.exists(os.path.join(path, TRAINER_FILE)):
        raise CheckpointError(f"Cannot save into {path}: it holds a checkpoint already")
    dist.barrier()  # everyone has looked before anyone writes
    writer = FileSystemWriter(path, sync_files=True, overwrite=False)
    state_dict_saver.save(trainer_state(model, optimizer), storage_writer=writer)
    save_file(random_state(), rng_file(path, rank))
    sync(rng_file(path, rank))
    if rank == 0:
        write_json(os.path.join(path, TRAINER_FILE), {"step": step, "world_size": dist.get_world_size()})
    sync(path)


def restore(path: str, model, optimizer: Optimizer) -> int:
    """The step that was saved. Collective. Raises CheckpointError on every rank alike."""
    try:
        with open(os.path.join(path, TRAINER_FILE)) as file:
            saved = json.load(file)
        reader = FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"Cannot restore {path}: {error}") from error
    same_ranks = saved["world_size"] == dist.get_world_size()
    if same_ranks and not os.path.exists(rng_file(path, dist.get_rank())):
        raise CheckpointError(f"Cannot restore {path}: it has no random state of rank {dist.get_rank()}")
    state = trainer_state(model, optimizer)
    for key in sorted(state.keys() | stored.keys()):
        if key not in stored:
            raise CheckpointError(f"Cannot restore {path}: it has no {key}")
        if key not in state:
            raise CheckpointError(f"Cannot restore {path}: this model has no {key}")
        size = tuple(getattr(stored[key], "size", ()))
        if size != tuple(state[key].shape):
            wanted = list(state[key].shape)
            raise CheckpointError(f"Cannot restore {path}: {key} is {list(size)}, want {wanted}")
    state_dict_loader.load(state, storage_reader=reader)  # in place
    if same_ranks:
        set_random_state(load_file(rng_file(path, dist.get_rank())))
    else:
        ranks = f"{saved['world_size']} ranks into {dist.get_world_size()}"
        print(f"Restored {path} of {ranks}: random states start anew", flush=True)
    return int(saved["step"])


def trainer_state(model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor that decides the next step, live and flat by name; a tied lm_head is its embedding."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, parameter in optimizer.parameters.items():
        for key, tensor in optimizer.adamw.state[parameter].items():
            state[f"optim.{key}.{name}"] = tensor
    return state


def rng_file(path: str, rank: int) -> str:
    return os.path.join(path, f"rng-{rank}.safetensors")


def random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ---- Export ----


def export(path: str, model, source: str, dtype: str) -> None:
    """
    A Hugging Face directory: weights of `model` under their hub names, everything else from `source`.
    Collective; rank 0 writes. `dtype` is what the config will say; tensors that the trainer keeps in fp32
    stay fp32 in the file.
    """
    os.makedirs(path, exist_ok=True)
    if os.path.exists(os.path.join(path, "config.json")):
        raise CheckpointError(f"Cannot export into {path}: it holds a model already")
    dist.barrier()
    if dist.get_rank() != 0:
        for _ in hub_tensors(model):
            pass
        return
    files = write_shards(path, hub_tensors(model))
    for name in sorted(os.listdir(source)):
        if os.path.isfile(os.path.join(source, name)) and not name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(os.path.join(source, name), os.path.join(path, name))
            files.append(name)
    with open(os.path.join(path, "config.json")) as file:
        config = json.load(file)
    config.pop("torch_dtype", None)  # the older spelling
    write_json(os.path.join(path, "config.json"), config | {"dtype": dtype})
    for name in files:
        sync(os.path.join(path, name))
    sync(path)


def write_shards(path: str, tensors) -> list[str]:
    """One file, or several with an index once they pass SHARD_BYTES. Returns their names."""
    shards: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(part, os.path.join(path, f"part-{len(shards)}.safetensors"), metadata={"format": "pt"})
        shards.append(list(part))
        part.clear()

    total = held = 0
    for name, tensor in tensors:
        if part and held + tensor.nbytes > SHARD_BYTES:
            flush()
            held = 0
        part[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        held += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        os.rename(os.path.join(path, f"part-{i}.safetensors"), os.path.join(path, name))
    if len(shards) == 1:
        return names
    index = "model.safetensors.index.json"
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    write_json(os.path.join(path, index), {"metadata": {"total_size": total}, "weight_map": where})
    return [*names, index]


# ---- Files ----


def write_json(path: str, value: dict) -> None:
    with open(path, "w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def sync(path: str) -> None:
    """Of a file its content, of a directory its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
