"""Weights from the trainer's memory into that of engines, past files and routers.

    nccl   trainer rank 0 --broadcast, bucket by bucket--> every rank of the engines that stand still
    ipc    trainer rank 0 packs buckets into its GPU --handles, in a file--> engine ranks there map them

The segment of the same version was written before, while engines sampled (weights.py): its table says what is
in which bucket and what the checksums are, and the file is what a new engine joins by.

Invariants
  1. Both sides cut buckets from the table alone: tensors in its order, back to back at multiples of 64, as
     many as fit into `bucket` bytes, a larger tensor alone.
  2. The crc32 of the received bytes of each tensor is compared with the table before the tensor is handed on;
     on a GPU over a copy of the bucket to the host.
  3. A group serves one transfer and is the default group of nobody. Its rank 0 is the trainer, then come the
     ranks of each engine, engine after engine.
  4. The trainer never waits in a call that cannot end: it asks whether an operation is done, and lets the
     group go when its request is cancelled (an engine is gone, the deadline is over). Engines may wait: they
     are killed then, since their weights are half new.

The collectives are torch.distributed's, NCCL on GPUs and gloo on CPUs, by the same code. Members meet in a
TCP store of trainer rank 0, bound to the address by which the controller's host reaches it; neither the store
nor NCCL knows who asks, so the network between them must be trusted.
An address: tcp://HOST:PORT/NAME?size=RANKS&rank=FIRST&bucket=BYTES&timeout=SECONDS, `rank` is the first of
this engine. Addresses are made by molt/broadcast.ts.
Callers: trainer.py sends; slot_engine.py and vllm_extension.py receive.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weights import ALIGN_BYTES, WeightsError, check_entry

c10d: Any = distributed_c10d  # the backends are in no stub
BUCKET_BYTES = 256 * 1024 * 1024  # of ipc; of nccl the address says it
POLL_S = (0.0002, 0.005)  # first and longest wait between two looks
LINGER_S = 600  # NCCL's own watchdog ends the process; it must come after our deadline

ABANDONED: list[Group] = []


class TransferError(Exception):
    """The transfer did not end. The group is gone; the model that was sent is as it was."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    name: str
    size: int
    rank: int
    bucket: int
    timeout: float

    @classmethod
    def parse(cls, text: str) -> Address:
        try:
            url = urlsplit(text)
            query = {key: values[-1] for key, values in parse_qs(url.query, strict_parsing=True).items()}
            numbers = {key: int(query.pop(key)) for key in ("size", "rank", "bucket")}
            timeout = float(query.pop("timeout"))
            if url.scheme != "tcp" or not url.hostname or not url.port or query:
                raise ValueError("want tcp://host:port/name and four numbers")
            return cls(url.hostname, url.port, url.path, **numbers, timeout=timeout)
        except (KeyError, ValueError) as error:
            raise WeightsError(f"Cannot read the address {text}: {error}") from error


# ---- Buckets ----


@dataclass(frozen=True)
class Bucket:
    places: tuple[tuple[int, dict], ...]  # (first byte, entry of the table)
    bytes: int


def cut(table: Iterable[dict], limit: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    places: list[tuple[int, dict]] = []
    end = 0
    for entry in table:
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        if places and start + entry["bytes"] > limit:
            buckets.append(Bucket(tuple(places), end))
            places, start = [], 0
        places.append((start, entry))
        end = start + entry["bytes"]
    return [*buckets, Bucket(tuple(places), end)] if places else buckets


def fill(buffer: torch.Tensor, bucket: Bucket, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """The next tensors of `stream`, which are those of the bucket, to their places."""
    for start, entry in bucket.places:
        name, tensor = next(stream, ("nothing", torch.empty(0)))
        if name != entry["name"] or tensor.nbytes != entry["bytes"]:
            raise TransferError(f"Expected {entry['name']} of {entry['bytes']} bytes, the model has {name}")
        place = buffer[start : start + entry["bytes"]]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def take(buffer: torch.Tensor, bucket: Bucket, dtypes: dict[str, torch.dtype]):
    """(hub name, tensor) of what came, as windows of `buffer`. Raises WeightsError at a wrong checksum."""
    content = buffer.cpu().numpy().data
    for start, entry in bucket.places:
        crc32 = zlib.crc32(content[start : start + entry["bytes"]])
        if crc32 != entry["crc32"]:
            raise WeightsError(
                f"Checksum of {entry['name']} is {crc32:08x}, the trainer sent {entry['crc32']:08x}"
            )
    for start, entry in bucket.places:
        flat = buffer[start : start + entry["bytes"]].view(dtypes[entry["name"]])
        yield entry["name"], flat.view(entry["shape"])


def check_table(table: list[dict]) -> dict[str, torch.dtype]:
    """dtypes by name. Raises WeightsError."""
    if not table:
        raise WeightsError("Cannot receive weights: their table is empty")
    size = max(entry["offset"] + entry["bytes"] for entry in table)
    dtypes: dict[str, torch.dtype] = {}
    for entry in table:
        dtypes[entry["name"]] = check_entry(entry, size, dtypes)
    return dtypes


# ---- The group ----


def own_address(host: str, port: int) -> str:
    """Of this machine, as seen from there. Sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def open_store(host: str) -> dist.TCPStore:
    """The store of trainer rank 0, for all groups of its life. Listens on this address alone."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Group:
    """The trainer and the ranks of some engines, for one transfer."""

    def __init__(self, address: Address, rank: int, device: torch.device, is_over: Callable[[], bool]):
        self.is_over = is_over
        self.deadline = time.monotonic() + address.timeout
        self.timeout = address.timeout
        wait = timedelta(seconds=address.timeout)
        server = dist.TCPStore(
            address.host, address.port, is_master=False, wait_for_workers=False, timeout=wait
        )
        store = dist.PrefixStore(address.name, server)
        # All must be there before they connect, which cannot be withdrawn.
        store.set(f"here-{rank}", "")
        everyone = [f"here-{r}" for r in range(address.size)]
        self._until(lambda: store.check(everyone), "for all to come")
        if device.type == "cpu":
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = wait
            own = own_address(address.host, address.port)
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
            self.backend: Any = self._made(lambda: c10d.ProcessGroupGloo(store, rank, address.size, options))
        else:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = wait + timedelta(seconds=LINGER_S)
            self.backend = c10d.ProcessGroupNCCL(store, rank, address.size, options)

    def _made(self, make: Callable[[], Any]) -> Any:
        """In a thread of its own: it waits for all, and one that is lost now never comes."""
        made: Future[Any] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except RuntimeError as error:
                made.set_exception(TransferError(f"Not all could connect: {first_line(error)}"))

        threading.Thread(target=work, name="connect", daemon=True).start()
        self._until(made.done, "for all to connect")
        return made.result()

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """From rank 0. Returns at once; see `finish`."""
        try:
            return self.backend.broadcast(buffer, 0)
        except RuntimeError as error:
            raise TransferError(f"The broadcast failed: {first_line(error)}") from error

    def finish(self, work: Any) -> None:
        self._until(work.is_completed, "in the broadcast")
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"The broadcast failed: {first_line(error)}") from error

    def _until(self, is_done: Callable[[], bool], where: str) -> None:
        pause, longest = POLL_S
        while not is_done():
            if self.is_over():
                raise TransferError(f"The transfer was called off while it waited {where}")
            if time.monotonic() > self.deadline:
                raise TransferError(f"The transfer took longer than {self.timeout:g} s: it waited {where}")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def abandon(self) -> None:
        """Lets the others go. Not destroyed: that would wait for what is stuck, and hold the interpreter."""
        ABANDONED.append(self)
        self.backend.abort()


def first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


# ---- nccl ----


def send(
    address: str,
    table: list[dict],
    stream: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
    is_over: Callable[[], bool],
) -> None:
    """Every bucket to all of the group. Two buffers: one is filled while the other is on its way."""
    where = Address.parse(address)
    buckets = cut(table, where.bucket)
    group = Group(where, 0, device, is_over)
    try:
        size = max(bucket.bytes for bucket in buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in buckets[:2]]
        sent: list[Any] = []
        for i, bucket in enumerate(buckets):
            if i >= 2:
                group.finish(sent[i - 2])
            fill(buffers[i % 2], bucket, stream)
            sent.append(group.broadcast(buffers[i % 2][: bucket.bytes]))
        for work in sent[-2:]:
            group.finish(work)
    except BaseException:
        group.abandon()
        raise


def receive(
    address: str, table: list[dict], device: torch.device, rank: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    (hub name, tensor) of the table, in its order, each checked. `rank`: within this engine. A tensor stays
    as it is while it is referred to: no buffer is used twice. Raises WeightsError and TransferError.
    """
    where, dtypes = Address.parse(address), check_table(table)
    group = Group(where, where.rank + rank, device, lambda: False)

    def ask(bucket: Bucket) -> tuple[torch.Tensor, Any]:
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
        return buffer, group.broadcast(buffer)

    buckets = cut(table, where.bucket)
    coming = ask(buckets[0])
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        buffer, work = coming
        if following:
            coming = ask(following)  # comes in while the caller loads
        group.finish(work)
        yield from take(buffer, bucket, dtypes)


# ---- ipc ----


def share(path: str, table: list[dict], stream: Iterator[tuple[str, torch.Tensor]], device: torch.device):
    """
    Packs all buckets into the memory of this GPU and writes how to map them to `path`. Returns the buffers,
    to be kept until every engine has loaded: a second copy of the weights for as long.
    """
    buffers, handles = [], []
    for bucket in cut(table, BUCKET_BYTES):
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
        fill(buffer, bucket, stream)
        buffers.append(buffer)
        # What torch.multiprocessing would pickle: numbers and handles of the driver.
        parts = buffer.untyped_storage()._share_cuda_()[1:]
        handles.append([part.hex() if isinstance(part, bytes) else part for part in parts])
    torch.cuda.synchronize(device)
    aside = f"{path}.new"
    with open(aside, "w") as file:
        json.dump({"gpu": gpu_name(device), "buckets": handles}, file)
    os.replace(aside, path)
    return buffers


def map_shared(path: str, table: list[dict], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """As `receive`, out of the trainer's memory. Let go of the tensors before the request is answered."""
    dtypes = check_table(table)
    if device.type != "cuda":
        raise WeightsError(f"Transport ipc shares the memory of one GPU, this engine runs on {device.type}")
    with open(path) as file:
        shared = json.load(file)
    if shared["gpu"] != gpu_name(device):
        raise WeightsError(f"Transport ipc needs the trainer's GPU {shared['gpu']}, have {gpu_name(device)}")
    for bucket, parts in zip(cut(table, BUCKET_BYTES), shared["buckets"], strict=True):
        # (handle, bytes, offset, reference counter, its offset, event, whether to wait for it)
        handle, size, offset, counter, counter_offset, event, waits = parts
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(),
            *(bytes.fromhex(handle), size, offset),
            *(bytes.fromhex(counter), counter_offset, bytes.fromhex(event), waits),
        )
        buffer: Any = torch.empty(0, dtype=torch.uint8, device=device)
        buffer.set_(storage, 0, (bucket.bytes,))
        yield from take(buffer, bucket, dtypes)


def gpu_name(device: torch.device) -> str:
    """The same in every process, whatever CUDA_VISIBLE_DEVICES makes of the numbers."""
    return str(torch.cuda.get_device_properties(device).uuid)
