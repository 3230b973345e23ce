"""Plain files, and the client libraries of stores, called without jaxkv."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.storage.run import Blocks, Side, StorageBench, StoreAlone
from jaxkv.transfer.storage import BlobStore, LocalStore, ObjectFormat, StoreError
from jaxkv.transfer.storage.objects import HEADER_BYTES
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store_url import StoreUrl

CLIENT, FILES = "client alone", "plain files"
FILES_REUSED = f"{FILES}, memory reused"

Payloads = Sequence[NDArray[np.uint8]]


class Client(NamedTuple):
    """A store's client library, called as a program of a few lines would."""

    prepare: Callable[[Payloads], None]
    write: Callable[[Sequence[str], Payloads], None]
    read: Callable[[Sequence[str]], None]
    close: Callable[[], None]


class RivalBench(StorageBench):
    """Measures plain files, or the store's client."""

    def rivals(
        self, objects: ObjectFormat, blocks: Blocks, stack: contextlib.ExitStack
    ) -> dict[str, Side]:
        if isinstance(self.store, LocalStore):
            return self._files(self.store.path, objects, blocks, stack)
        sides = super().rivals(objects, blocks, stack)
        num_in_flight = self.config.num_in_flight
        client = make_client(self.store, self.config.url, blocks.shape, num_in_flight)
        if client is not None:
            stack.callback(client.close)
            folder = f"{objects.folder}/client"
            sides[CLIENT] = ClientAlone(self.store, folder, blocks, client)
        return sides

    def _files(
        self,
        root: str,
        objects: ObjectFormat,
        blocks: Blocks,
        stack: contextlib.ExitStack,
    ) -> dict[str, Side]:
        sides: dict[str, Side] = {}
        for name, read in (
            (FILES, _read),
            (FILES_REUSED, _ReuseMemory(blocks.shape[1])),
        ):
            threads = ThreadPoolExecutor(self.config.num_in_flight)
            stack.callback(threads.shutdown, cancel_futures=True)
            folder = f"{root}/{objects.folder}/plain{len(sides)}"
            paths = partial(_object_paths, root, objects, blocks)
            sides[name] = PlainFiles(self, folder, paths, blocks, threads, read)
        return sides


def make_client(
    store: BlobStore, url: str, shape: tuple[int, int], num_in_flight: int
) -> Client | None:
    """Make a client of a store's library; None for stores without a plain one."""
    if isinstance(store, RedisStore) and not StoreUrl.parse(url).is_cluster:
        return _redis(url)
    if StoreUrl.parse(url).scheme == "mooncake":
        return _mooncake(getattr(store, "client")(), shape, num_in_flight)  # noqa: B009
    return None


def _redis(url: str) -> Client:
    """One value per call, on one connection."""
    import redis

    client = redis.Redis.from_url(StoreUrl.parse(url).text)

    def write(names: Sequence[str], blocks: Payloads) -> None:
        for name, block in zip(names, blocks, strict=True):
            client.set(name, block.data)

    def read(names: Sequence[str]) -> None:
        for name in names:
            client.get(name)

    return Client(lambda blocks: None, write, read, client.close)


def _mooncake(client: Any, shape: tuple[int, int], num_in_flight: int) -> Client:
    """Several objects per call, from and into memory that the client knows."""
    num_blocks, block_bytes = shape
    memory = np.zeros(shape, np.uint8)
    addresses = [int(row.ctypes.data) for row in memory]
    _check(client.register_buffer(addresses[0], memory.nbytes))

    def prepare(blocks: Payloads) -> None:
        np.copyto(memory, blocks)

    def call(names: Sequence[str], move: Callable[..., list[int]]) -> None:
        for first in range(0, num_blocks, num_in_flight):
            part = slice(first, first + num_in_flight)
            sizes = [block_bytes] * len(names[part])
            for code in move(names[part], addresses[part], sizes):
                _check(code)

    return Client(
        prepare,
        lambda names, _: call(names, client.batch_put_from),
        lambda names: call(names, client.batch_get_into),
        lambda: client.unregister_buffer(addresses[0]),
    )


def _check(code: int) -> None:
    if code < 0:
        raise StoreError("other", f"Mooncake fails (code {code})")


class ClientAlone(StoreAlone):
    """The store's client library, without jaxkv."""

    def __init__(
        self, store: BlobStore, folder: str, blocks: Blocks, client: Client
    ) -> None:
        super().__init__(store, folder, blocks)
        self._client = client

    def prepare(self) -> None:
        self._client.prepare(self.blocks.payloads)

    def write(self) -> None:
        self._client.write(self.names(), self.blocks.payloads)

    def read(self) -> None:
        self._client.read(self.names())


@dataclasses.dataclass
class PlainFiles(Side):
    """Plain files: reads the storage tier's own, and writes others next to them."""

    _bench: StorageBench
    _folder: str
    _paths_to_read: Callable[[], list[str]]
    _blocks: Blocks
    _threads: ThreadPoolExecutor
    _read: Callable[[str], Any]

    def write(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._call(self._write, self._paths(), self._blocks.payloads)

    def read(self) -> None:
        self._call(self._read, self._paths_to_read())

    def delete(self) -> None:
        self._call(os.unlink, self._paths())

    def _call(self, call: Callable[..., Any], *arguments: Sequence[Any]) -> None:
        """Call the threads, and release each result, as a tier does with blocks."""
        collections.deque(self._threads.map(call, *arguments), maxlen=0)

    def _paths(self) -> list[str]:
        return [f"{self._folder}/{key.hex()}" for key in self._blocks.keys]

    def _write(self, path: str, payload: NDArray[np.uint8]) -> None:
        if not self._bench.is_closed:
            with open(path, "wb", buffering=0) as file:
                file.write(payload.data)


def _object_paths(root: str, objects: ObjectFormat, blocks: Blocks) -> list[str]:
    return [f"{root}/{objects.name(key)}" for key in blocks.keys]


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class _ReuseMemory:
    """Reads files into memory that returns to the pool after use."""

    def __init__(self, block_bytes: int) -> None:
        self._max_bytes = HEADER_BYTES + block_bytes
        self._free: collections.deque[NDArray[np.uint8]] = collections.deque()

    def __call__(self, path: str) -> _Lease:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._max_bytes, np.uint8)
        with open(path, "rb", buffering=0) as file:
            file.readinto(memory.data)
        return _Lease(self._free, memory)


class _Lease:
    """Memory that returns to its pool when its holder releases it."""

    def __init__(self, pool: Any, memory: NDArray[np.uint8]) -> None:
        self._pool = pool
        self.memory = memory

    def __del__(self) -> None:
        self._pool.append(self.memory)


NOTES = {
    FILES: "Plain files are opened, written or read whole, and closed. "
    "Reads go into new memory, or into reused memory as in jaxkv. No file is synced. "
    "Cached files are read from the page cache.",
    CLIENT: "The client alone calls the store's library without jaxkv: Redis one block "
    "at a time, Mooncake as many as are in flight, with memory registered.",
}
