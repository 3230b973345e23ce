"""Measures how fast blocks reach a store and come back, beside plain files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import Resource, size_text
from jaxkv.tools.bench.storage.clients import Client, client_of
from jaxkv.tools.bench.transfer.records import BytesDifferError
from jaxkv.tools.console import OnProgress
from jaxkv.transfer.storage import (
    BlobStore,
    Completion,
    LocalStore,
    ObjectFormat,
    StorageIO,
    StoreError,
    open_store,
)
from jaxkv.transfer.storage.objects import HEADER_BYTES
from jaxkv.transfer.storage.store import answer_of, can_list, lanes_of
from jaxkv.transfer.storage.store_url import StoreUrl
from jaxkv.types import KEY_BYTES

Way: TypeAlias = Literal["write", "read"]
WAYS: tuple[Way, ...] = get_args(Way)

JAXKV, ALONE, CLIENT = "jaxkv", "store alone", "client alone"
FILES = "plain files"
FILES_REUSED, FILES_DROPPED = f"{FILES}, memory reused", f"{FILES}, dropped"

_ANSWER_S = 120.0
_TAKEN_AT_ONCE = 4
_CLEAN_UP_S = 10.0


class StorageFailedError(Exception):
    """The store could not do what is to be measured."""


@dataclasses.dataclass(frozen=True)
class StorageConfig:
    """What to measure.

    Attributes:
        url: The store.
        block_sizes: Bytes of a block, each in turn.
        num_bytes: Bytes that are written, and read, in a round.
        rounds: Number of timed rounds.
        num_in_flight: Blocks that are written, or read, at once.
        is_sealed: Whether blocks are sealed with a secret.
    """

    url: str = dataclasses.field(repr=False)  # It may have a password.
    block_sizes: tuple[int, ...] = (64 << 10, 512 << 10, 2 << 20, 8 << 20)
    num_bytes: int = 64 << 20
    rounds: int = 9
    num_in_flight: int = 4
    is_sealed: bool = False


@dataclasses.dataclass(frozen=True)
class StorageResult:
    """The times of one size of blocks.

    Attributes:
        block_bytes: Bytes of a block.
        num_blocks: Blocks of a round.
        seconds: By way of measuring and direction, one time per round.
    """

    block_bytes: int
    num_blocks: int
    seconds: Mapping[str, Mapping[Way, list[float]]]

    @property
    def limits(self) -> list[str]:
        """What jaxkv is compared with: plain files, or the store alone."""
        return [name for name in self.seconds if name != JAXKV]


@dataclasses.dataclass(frozen=True)
class StorageRecord:
    """The results of a measurement.

    Attributes:
        config: The requested measurement.
        place: The store's own URL, without secrets.
        results: A result for each size of blocks, smaller ones first.
    """

    config: StorageConfig
    place: str
    results: tuple[StorageResult, ...]


class StorageBench(Resource):
    """Writes to a store what no engine reads, and deletes it when it is closed.

    Args:
        config: What to measure.

    Raises:
        ValueError: The URL is malformed.
        ImportError: An extra is missing.
        StorageFailedError: The place cannot be used.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        had_folder = os.path.isdir(StoreUrl.parse(config.url).path)
        try:
            self._store = open_store(config.url)
        except StoreError as error:
            raise StorageFailedError(str(error)) from error
        self._made_folder = isinstance(self._store, LocalStore) and not had_folder
        self._namespace = os.urandom(16)
        self._secret = os.urandom(32) if config.is_sealed else None
        self._lock = threading.Lock()
        self._folders: list[str] = []
        self._open: list[StorageIO] = []
        self.is_closed = False

    def run(self, on_progress: OnProgress) -> StorageRecord:
        """Measure everything.

        Args:
            on_progress: Called with a label, the amount done and the total.

        Raises:
            StorageFailedError: The store failed.
            BytesDifferError: A block has changed on its way.
        """
        try:
            results = tuple(
                self._measure(size, on_progress)
                for size in sorted(set(self.config.block_sizes))
            )
        except (StoreError, OSError) as error:
            raise StorageFailedError(str(error)) from error
        return StorageRecord(self.config, self._store.url, results)

    def close(self) -> None:
        """Delete what was written; any thread may call it, at any time."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            storages, folders = list(self._open), list(self._folders)
        end_s = time.monotonic() + _CLEAN_UP_S
        for storage in storages:
            storage.close()
            # What the store is writing comes before what it is to delete.
            while storage.stats.queued_write_bytes and time.monotonic() < end_s:
                time.sleep(0.01)
        with contextlib.suppress(StoreError):
            for folder in folders:
                self._delete(folder)
        if self._made_folder and isinstance(self._store, LocalStore):
            _remove_if_empty(self._store.path)
        self._store.close()

    def _measure(self, block_bytes: int, on_progress: OnProgress) -> StorageResult:
        rounds, num_in_flight = self.config.rounds, self.config.num_in_flight
        num_blocks = max(1, self.config.num_bytes // block_bytes)
        label = f"{size_text(block_bytes)} blocks"
        objects = ObjectFormat(self._namespace, label, block_bytes, secret=self._secret)
        blocks = _Blocks(num_blocks, block_bytes)
        with contextlib.ExitStack() as stack:
            storage = StorageIO(
                open_store(self.config.url),
                objects,
                write_bytes=2 * num_blocks * objects.object_bytes,
                read_bytes=2 * num_blocks * objects.object_bytes,
                num_in_flight=num_in_flight,
            )
            stack.callback(storage.close)
            with self._lock:
                if self.is_closed:
                    raise StorageFailedError("it was closed meanwhile")
                self._folders.append(objects.folder)
                self._open.append(storage)
            sides: dict[str, _Side] = {JAXKV: _Jaxkv(storage, blocks)}
            if isinstance(self._store, LocalStore):
                root = self._store.path
                reads: dict[str, Callable[[str], Any]] = {
                    FILES: _read,
                    FILES_REUSED: _ReadAgain(block_bytes),
                    FILES_DROPPED: _read_and_drop,
                }
                for number, (name, read) in enumerate(reads.items()):
                    threads = ThreadPoolExecutor(num_in_flight)
                    stack.callback(threads.shutdown, cancel_futures=True)
                    folder = f"{objects.folder}/plain{number}"
                    sides[name] = _Files(
                        self, root, folder, objects, blocks, threads, read
                    )
            else:
                folder = f"{objects.folder}/alone"
                sides[ALONE] = _Alone(self._store, folder, blocks)
                client = client_of(
                    *(self._store, self.config.url),
                    *(num_blocks, block_bytes, num_in_flight),
                )
                if client is not None:
                    stack.callback(client.close)
                    folder = f"{objects.folder}/client"
                    sides[CLIENT] = _Client(self._store, folder, blocks, client)
            seconds = _time(sides, blocks, rounds, label, on_progress)
        self._delete(objects.folder)
        return StorageResult(block_bytes, num_blocks, seconds)

    def _delete(self, folder: str) -> None:
        """Delete all of a folder, again as long as a late write adds to it."""
        end_s = time.monotonic() + _CLEAN_UP_S
        # Without a list, each round has deleted its own.
        while can_list(self._store) and time.monotonic() < end_s:
            names = [name for page in self._store.list(folder) for name in page]
            if not names:
                break
            self._store.delete(names)
        if isinstance(self._store, LocalStore):
            root = self._store.path
            for path, *_ in os.walk(f"{root}/{folder}", topdown=False):
                _remove_if_empty(path)
            _remove_if_empty(os.path.dirname(f"{root}/{folder}"))


def _remove_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


class _Blocks:
    """The blocks of a round; each round has others, under other keys."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._shape = num_blocks, block_bytes
        self._random = np.random.default_rng(0)
        self.keys: list[bytes] = []
        self.payloads: list[NDArray[np.uint8]] = []

    def renew(self) -> None:
        num_blocks, block_bytes = self._shape
        raw = np.frombuffer(self._random.bytes(num_blocks * block_bytes), np.uint8)
        self.payloads = list(raw.reshape(self._shape))
        self.keys = [self._random.bytes(KEY_BYTES) for _ in range(num_blocks)]


class _Side(Protocol):
    """One way to write the blocks of a round, and to read them again."""

    def prepare(self) -> None:
        """Get ready for a round, before its time is taken."""
        return  # Most need not.

    def write(self) -> None: ...

    def read(self) -> None: ...

    def check(self) -> None: ...

    def delete(self) -> None: ...


class _Jaxkv(_Side):
    """As the storage tier does: queue, format, store."""

    def __init__(self, storage: StorageIO, blocks: _Blocks) -> None:
        self._storage = storage
        self._blocks = blocks

    def write(self) -> None:
        items = zip(self._blocks.keys, self._blocks.payloads, strict=True)
        self._storage.submit_writes((key, [payload]) for key, payload in items)
        self._wait(lambda _: None)

    def read(self) -> None:
        self._storage.submit_reads(self._blocks.keys, float("inf"))
        self._wait(lambda _: None)

    def delete(self) -> None:
        num_deleted = self._storage.stats.num_deleted + len(self._blocks.keys)
        self._storage.delete(self._blocks.keys)
        end_s = time.monotonic() + _ANSWER_S
        while self._storage.stats.num_deleted < num_deleted:
            if time.monotonic() > end_s:
                raise StorageFailedError(f"it has not deleted for {_ANSWER_S:.0f} s")
            time.sleep(0.001)

    def check(self) -> None:
        """Compare all bytes with those that were written."""
        expected = dict(zip(self._blocks.keys, self._blocks.payloads, strict=True))

        def compare(each: Completion) -> None:
            assert each.payload is not None
            found = np.frombuffer(each.payload, np.uint8)
            if not np.array_equal(found, expected[each.key]):
                raise BytesDifferError(f"block {each.key.hex()} is another one now")

        self._storage.submit_reads(self._blocks.keys, float("inf"))
        self._wait(compare)

    def _wait(self, take: Callable[[Completion], None]) -> None:
        left = len(self._blocks.keys)
        while left:
            # A tier looks once a step, and not at each block.
            done = self._storage.wait(_ANSWER_S, min(left, _TAKEN_AT_ONCE))
            if not done:
                raise StorageFailedError(f"it has not answered for {_ANSWER_S:.0f} s")
            for each in done:
                if each.outcome != "done":
                    stats = self._storage.stats
                    raise StorageFailedError(stats.last_error or each.outcome)
                take(each)
            left -= len(done)


class _Alone(_Side):
    """The store without queue and format."""

    def __init__(self, store: BlobStore, folder: str, blocks: _Blocks) -> None:
        self._store = store
        self._blocks = blocks
        self._folder = folder

    def write(self) -> None:
        blobs = [[payload.data] for payload in self._blocks.payloads]
        items = list(zip(self._names(), blobs, strict=True))
        self._in_lanes(self._store.put, items, lanes_of(self._store).writers)

    def read(self) -> None:
        most = self._blocks.payloads[0].nbytes + 1
        read = functools.partial(self._store.get, max_bytes=most)
        self._in_lanes(read, self._names(), lanes_of(self._store).readers)

    def check(self) -> None:
        pass

    def delete(self) -> None:
        self._store.delete(self._names())

    def _in_lanes(
        self,
        call: Callable[[Sequence[Any]], Sequence[Any]],
        items: Sequence[Any],
        num_threads: int,
    ) -> None:
        """Call the store with some items at a time, as the tier's threads do."""
        lanes, block_bytes = lanes_of(self._store), self._blocks.payloads[0].nbytes
        size = max(1, min(lanes.call_bytes // block_bytes, len(items) // num_threads))
        calls = [items[at : at + size] for at in range(0, len(items), size)]
        with ThreadPoolExecutor(num_threads) as threads:
            for answers in threads.map(call, calls):
                for answer in answers:
                    answer_of([answer])

    def _names(self) -> list[str]:
        return [f"{self._folder}/{key.hex()}" for key in self._blocks.keys]


class _Client(_Alone):
    """The store's client library, called as its users do."""

    def __init__(
        self, store: BlobStore, folder: str, blocks: _Blocks, client: Client
    ) -> None:
        super().__init__(store, folder, blocks)
        self._client = client

    def prepare(self) -> None:
        self._client.prepare(self._blocks.payloads)

    def write(self) -> None:
        self._client.write(self._names(), self._blocks.payloads)

    def read(self) -> None:
        self._client.read(self._names())


class _Files(_Side):
    """Plain files: opened, written or read whole, closed.

    It reads the files that the storage tier would read, and writes others beside them.
    """

    def __init__(
        self,
        bench: StorageBench,
        root: str,
        folder: str,
        objects: ObjectFormat,
        blocks: _Blocks,
        threads: ThreadPoolExecutor,
        read: Callable[[str], Any],
    ) -> None:
        self._bench = bench
        self._read = read
        self._root = root
        self._folder = f"{root}/{folder}"
        self._objects = objects
        self._blocks = blocks
        self._threads = threads

    def write(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        pairs = zip(self._own_paths(), self._blocks.payloads, strict=True)
        _wait_for([self._threads.submit(self._write, *pair) for pair in pairs])

    def read(self) -> None:
        paths = [f"{self._root}/{self._objects.name(key)}" for key in self._blocks.keys]
        _wait_for([self._threads.submit(self._read, path) for path in paths])

    def check(self) -> None:
        pass

    def delete(self) -> None:
        _wait_for([self._threads.submit(os.unlink, path) for path in self._own_paths()])

    def _own_paths(self) -> list[str]:
        return [f"{self._folder}/{key.hex()}" for key in self._blocks.keys]

    def _write(self, path: str, payload: NDArray[np.uint8]) -> None:
        if not self._bench.is_closed:
            with open(path, "wb", buffering=0) as file:
                file.write(payload.data)


def _read(path: str) -> bytes:
    """Read a file, and hand over what was read."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _read_and_drop(path: str) -> bytes:
    """Read a file into memory that stays in the caches of the CPU: the thread's own."""
    _read(path)
    return b""


class _ReadAgain:
    """Reads files, and hands over what was read in memory that comes back after use."""

    def __init__(self, block_bytes: int) -> None:
        self._most_bytes = HEADER_BYTES + block_bytes
        self._free: collections.deque[NDArray[np.uint8]] = collections.deque()

    def __call__(self, path: str) -> _Lent:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._most_bytes, np.uint8)
        with open(path, "rb", buffering=0) as file:
            file.readinto(memory.data)
        return _Lent(self._free, memory)


class _Lent:
    """Memory that goes back when its holder releases it."""

    def __init__(self, home: Any, memory: NDArray[np.uint8]) -> None:
        self._home = home
        self.memory = memory

    def __del__(self) -> None:
        self._home.append(self.memory)


def _wait_for(futures: Iterable[Future[Any]]) -> None:
    """Take what each future brings, and let go of it, as a tier does with blocks."""
    left = collections.deque(futures)
    while left:
        left.popleft().result(_ANSWER_S)


def _time(
    sides: Mapping[str, _Side],
    blocks: _Blocks,
    rounds: int,
    label: str,
    on_progress: OnProgress,
) -> dict[str, dict[Way, list[float]]]:
    """Time all sides in every round, in rotating order, after one round to warm up."""
    names = list(sides)
    seconds: dict[str, dict[Way, list[float]]] = {
        name: {way: [] for way in WAYS} for name in names
    }
    for number in range(-1, rounds):
        on_progress(label, max(number, 0), rounds)
        blocks.renew()
        for side in sides.values():
            side.prepare()
        for way, place in itertools.product(WAYS, range(len(names))):
            name = names[(number + place) % len(names)]
            move = sides[name].write if way == "write" else sides[name].read
            start_s = time.perf_counter()
            move()
            duration_s = time.perf_counter() - start_s
            if number >= 0:
                seconds[name][way].append(duration_s)
        for side in sides.values():
            side.check()
        for side in sides.values():
            side.delete()
    on_progress(label, rounds, rounds)
    return seconds
