"""Weights by their hub names: the trainer's sharded model to a file, and a file into an engine's live model.

transformers keeps some weights fused in memory (all experts of a layer in one `gate_up_proj`), files keep
them apart. Everything that leaves or enters a process here carries hub names, those of the model's
safetensors, so that any engine can read it. The bridge is a layout: for every in-memory tensor the hub
tensors inside it, each as (shape, stride, offset). It is found by sending element numbers through
transformers' own conversion, so no family needs code here, and writer and reader use the same table.

    trainer: hub_tensors(model) -> write_segment(path, ...) -> table      engine: verify_segment -> load_into

Invariants
  1. A reader checks the checksum of every tensor before it looks at names, and names and shapes of the
     whole model before it copies the first byte. An error names the first offending tensor.
  2. A tied lm_head is in no stream: it is the embedding.
  3. A tensor travels in the type the trainer computes with. The reader's own type decides what it becomes.
  4. Checksums prove bytes, not meaning: rows swapped before the checksum was taken pass here. `score`
     catches those.
  5. What was verified ahead (`Segment`) is loaded only while its file is the one that was verified. Nothing
     is copied to be sure of it: whoever writes moves the file's times, and `check` looks at them.

Segment file (`push_weights`, transport `file`): raw little-endian bytes back to back, each tensor at a
multiple of 64; the file is reused when its size is unchanged. Its table is the `tensors` field of the
message. It is written through a mapping: half the time of writing it, and the checksum is of what lies there.
Callers: trainer.py and checkpoint.py write; slot_engine.py reads. Elsewhere called weight sync.
"""

import contextlib
import itertools
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

try:
    from isal.isal_zlib import crc32  # the same sum at the speed of memory, five times that of zlib
except ImportError:
    from zlib import crc32

ALIGN_BYTES = 64
TICK_S = 0.01  # two writes closer than this may bear one time
DTYPES = {
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsError(Exception):
    """The file, its table and the model do not agree. Nothing was copied."""


# ---- Layout: where the hub tensors lie inside the model's own ----


@dataclass(frozen=True)
class Piece:
    """One hub tensor as a strided window of an in-memory tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def hub_layout(model) -> dict[str, list[Piece]]:
    """In-memory name -> its hub tensors, in the model's order, tied names left out. Found once per model."""
    cached = getattr(model, "_hub_layout", None)
    if cached is not None:
        return cached
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    layout: dict[str, list[Piece]] = {}
    # Layers repeat: what was found for one serves every layer with the same name pattern and shape.
    seen: dict[tuple[str, tuple[int, ...]], tuple[str, list[Piece]]] = {}
    for name, shape in shapes.items():
        key = (re.sub(r"\.\d+\.", ".*.", name, count=1), shape)
        if key not in seen:
            seen[key] = (layer_prefix(name), find_pieces(model, name, shape))
        prefix, pieces = seen[key]
        mine = layer_prefix(name)
        layout[name] = [replace(piece, name=mine + piece.name.removeprefix(prefix)) for piece in pieces]
    check_names(model, shapes, layout)
    model._hub_layout = layout
    return layout


def layer_prefix(name: str) -> str:
    """`model.layers.3.` of a name inside a layer, else nothing: the unit that is gathered at a time."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group(0) if found else ""


def find_pieces(model, name: str, shape: tuple[int, ...]) -> list[Piece]:
    blank = torch.empty(shape, device="meta")
    out = revert_weight_conversion(model, {name: blank})
    if len(out) == 1 and next(iter(out.values())) is blank:  # no more than another name
        return [Piece(next(iter(out)), shape, blank.stride(), 0)]
    # Eight bytes per element, so only for what is taken apart.
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = []
    for hub_name, part in revert_weight_conversion(model, {name: numbers}).items():
        offset = int(part.flatten()[0])
        # How far the element number moves along each axis; any number does for an axis of one.
        next_to = [int(part.select(d, min(1, n - 1)).flatten()[0]) for d, n in enumerate(part.shape)]
        stride = tuple(number - offset for number in next_to)
        piece = Piece(hub_name, tuple(part.shape), stride, offset)
        if not torch.equal(piece.of(numbers), part):
            raise WeightsError(f"Cannot name {hub_name}: it is not a regular window of {name}")
        pieces.append(piece)
    return pieces


def check_names(model, shapes: dict[str, tuple[int, ...]], layout: dict[str, list[Piece]]) -> None:
    """The pieces, found one tensor at a time, must be what the conversion gives for the whole model."""
    whole = revert_weight_conversion(model, {n: torch.empty(s, device="meta") for n, s in shapes.items()})
    found = {p.name: p.shape for pieces in layout.values() for p in pieces}
    wanted = {name: tuple(t.shape) for name, t in whole.items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            both = f"layout has {found.get(name)}, conversion gives {wanted.get(name)}"
            raise WeightsError(f"Cannot name {name}: {both}")


# ---- Writing ----


def hub_tensors(model) -> Iterator[tuple[str, torch.Tensor]]:
    """
    (hub name, tensor) of the whole sharded model, one decoder layer gathered at a time. Collective: every
    rank iterates to the end. A tensor is valid until the next is asked for, and may be a strided window.
    """
    groups: dict[str, list[str]] = {}
    layout = hub_layout(model)
    for name in layout:
        groups.setdefault(layer_prefix(name), []).append(name)
    for prefix, names in groups.items():
        with gathered(model, prefix) as live:
            for name in names:
                tensor = live[name]
                # Under tensor or expert parallelism an unsharded weight is still cut along that axis.
                if isinstance(tensor, DTensor):
                    whole = tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()
                else:
                    whole = tensor
                for piece in layout[name]:
                    yield piece.name, piece.of(whole)


@contextlib.contextmanager
def gathered(model, prefix: str) -> Iterator[dict[str, torch.Tensor]]:
    """Live tensors under `prefix` (of the root: those in no layer), whole and in the type they compute in."""
    part = model.get_submodule(prefix[:-1]) if prefix else model
    cut = [
        module
        for name, module in part.named_modules()
        if isinstance(module, FSDPModule)
        and (prefix or not layer_prefix(f"{name}."))
        # The shard of a single rank is all there is; a gather would copy it twice.
        and not model._is_whole
    ]
    for module in cut:
        module.unshard()
    try:
        named = itertools.chain(part.named_parameters(), part.named_buffers())
        yield {prefix + name: tensor.detach() for name, tensor in named}
    finally:
        for module in cut:
            module.reshard()


def write_segment(
    path: str, tensors: Iterable[tuple[str, torch.Tensor]], write: bool = True
) -> tuple[list[dict], int]:
    """
    Writes the tensors back to back; returns (table, bytes of the file). With write=False it only runs
    through them, as the ranks must that gather but do not write, and returns ([], 0).
    """
    if not write:
        for _ in tensors:
            pass
        return [], 0
    table: list[dict] = []
    end = 0
    # Pages of an existing file are written over: no page faults, and no truncation under a reader's mapping.
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        os.utime(file.fileno())  # a store through a mapping moves the times late or never
        target = Target(file.fileno(), path)
        for name, tensor in tensors:
            data = target.take(end, tensor.nbytes)
            copied = torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            entry = {"name": name, "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
            table.append(entry | {"offset": end, "bytes": tensor.nbytes, "crc32": crc32(data)})
            end += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
            del copied, data  # the mapping may move
        if os.fstat(file.fileno()).st_size != end:
            file.truncate(end)
    return table, end


class Target:
    """A file mapped for writing, as large as what is taken of it."""

    def __init__(self, file: int, path: str):
        self.file, self.path = file, path
        self.size = os.fstat(file).st_size
        self.mapped = mmap.mmap(file, self.size) if self.size else None

    def take(self, offset: int, count: int) -> memoryview:
        if offset + count > self.size or self.mapped is None:
            self.mapped = None
            self.size = self._grow(offset + count)
            self.mapped = mmap.mmap(self.file, self.size)
        return memoryview(self.mapped)[offset : offset + count]

    def _grow(self, least: int) -> int:
        """Room is taken now: a disk that is full would kill the process at a store."""
        twice = max(least, 2 * self.size)
        try:
            os.posix_fallocate(self.file, 0, twice)
            return twice
        except OSError:
            pass  # what is needed may fit all the same
        try:
            os.posix_fallocate(self.file, 0, least)
            return least
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None


# ---- Reading ----


@dataclass(frozen=True)
class Segment:
    """A file whose checksums held. Any process that maps it may rely on that while `check` passes."""

    path: str
    table: list[dict]
    stamp: tuple[int, ...]

    @classmethod
    def verify(cls, path: str, table: list[dict]) -> tuple["Segment", dict[str, torch.Tensor]]:
        """With its tensors, as those of verify_segment. Raises WeightsError."""
        time.sleep(max(0.0, min(TICK_S, os.stat(path).st_ctime + TICK_S - time.time())))
        segment = cls(path, table, stamp_of(path))
        tensors = verify_segment(path, table)
        segment.check()
        return segment, tensors

    def check(self) -> None:
        if stamp_of(self.path) != self.stamp:
            raise WeightsError(f"{self.path} was written after its checksums were verified")


def stamp_of(path: str) -> tuple[int, ...]:
    """Changes with every write, once the file is older than a tick of its clock (Segment.verify)."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise WeightsError(f"Cannot read {path}: {error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def verify_segment(path: str, table: list[dict], check_sums: bool = True) -> dict[str, torch.Tensor]:
    """
    Tensors of the file by hub name, mapped and not copied; all checksums hold, or did (`check_sums` false).
    Raises WeightsError.

    The tensors keep the mapping alive: drop them before the trainer may write the file again.
    """
    if not table:
        raise WeightsError(f"Cannot read {path}: its table is empty")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Private and writable, since torch warns about read-only memory. Nothing is written to it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightsError(f"Cannot map {path}: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    content = memoryview(mapped)
    for entry in table:
        name = entry["name"]
        dtype = check_entry(entry, size, tensors)
        data = content[entry["offset"] : entry["offset"] + entry["bytes"]]
        if check_sums:
            found = crc32(data)
            if found != entry["crc32"]:
                raise WeightsError(
                    f"Checksum of {name} is {found:08x}, the trainer sent {entry['crc32']:08x}"
                )
        tensors[name] = torch.frombuffer(data, dtype=dtype).view(entry["shape"])
    return tensors


def check_entry(entry: dict, size: int, seen: dict) -> torch.dtype:
    name, dtype = entry["name"], DTYPES.get(entry["dtype"])
    if name in seen:
        raise WeightsError(f"Tensor {name} is in the table twice")
    if dtype is None:
        raise WeightsError(f"Tensor {name} has unknown dtype {entry['dtype']!r}")
    wanted = torch.Size(entry["shape"]).numel() * dtype.itemsize
    if entry["bytes"] != wanted or wanted == 0:
        raise WeightsError(f"Tensor {name} has {entry['bytes']} bytes, shape {entry['shape']} needs {wanted}")
    offset = entry["offset"]
    if offset % ALIGN_BYTES or not 0 <= offset <= size - wanted:
        raise WeightsError(f"Tensor {name} at {offset} + {wanted} bytes does not fit a file of {size} bytes")
    return dtype


@torch.no_grad()
def load_into(model, tensors: dict[str, torch.Tensor]) -> int:
    """
    Copies hub tensors in place into a model that is not sharded; returns how many. All or nothing: raises
    WeightsError before the first copy unless names and shapes cover the whole model, each once.
    """
    windows = check_fit(model, tensors)
    for name, window in windows.items():
        window.copy_(tensors[name])
    return len(windows)


@torch.no_grad()
def check_fit(model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The windows that the tensors belong into, by hub name. Raises WeightsError."""
    live = model.state_dict()  # detached, same storage
    for name, tensor in live.items():
        if not tensor.is_contiguous():
            raise WeightsError(f"Cannot load into {name}: it does not lie in one piece of memory")
    windows = {p.name: p.of(live[name]) for name, pieces in hub_layout(model).items() for p in pieces}
    for name, window in windows.items():
        sent = tensors.get(name)
        if sent is None:
            raise WeightsError(f"Tensor {name} was not sent, {len(tensors)} of {len(windows)} were")
        if sent.shape != window.shape:
            raise WeightsError(f"Tensor {name} was sent as {list(sent.shape)}, want {list(window.shape)}")
        if sent.is_floating_point() != window.is_floating_point():
            raise WeightsError(f"Tensor {name} was sent as {sent.dtype}, want {window.dtype}")
    for name in tensors:
        if name not in windows:
            raise WeightsError(f"Tensor {name} was sent but the model has none of that name")
    return windows
