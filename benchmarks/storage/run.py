"""Measures how fast blocks reach a store and come back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import Resource, size_text
from jaxkv.tools.console import OnProgress
from jaxkv.tools.speed import BytesDifferError, timed
from jaxkv.transfer.storage import (
    BlobStore,
    Completion,
    LocalStore,
    ObjectFormat,
    StorageIO,
    StoreError,
    open_store,
)
from jaxkv.transfer.storage.store import answers_of, can_list, lanes_of
from jaxkv.transfer.storage.store_url import StoreUrl
from jaxkv.types import KEY_BYTES

Way: TypeAlias = Literal["write", "read"]
WAYS: tuple[Way, ...] = get_args(Way)

JAXKV, ALONE = "jaxkv", "store alone"

_ANSWER_S = 120.0
_NO_ANSWER = f"the store has not answered for {_ANSWER_S:.0f} s"
_BLOCKS_PER_POLL = 4
_CLEAN_UP_S = 10.0


class StorageFailedError(Exception):
    """The store could not do what is measured."""


@dataclasses.dataclass(frozen=True)
class StorageConfig:
    """The requested measurement."""

    url: str = dataclasses.field(repr=False)  # It may have a password.
    block_sizes: tuple[int, ...] = (64 << 10, 512 << 10, 2 << 20, 8 << 20)
    num_bytes: int = 64 << 20  # written, and read, per round
    rounds: int = 9
    num_in_flight: int = 4  # blocks that are written, or read, at once
    is_sealed: bool = False


@dataclasses.dataclass(frozen=True)
class StorageResult:
    """The times of one size of blocks."""

    block_bytes: int
    num_blocks: int  # per round
    # By side and direction, one time per round.
    seconds: Mapping[str, Mapping[Way, list[float]]]

    @property
    def limits(self) -> list[str]:
        """The sides that jaxkv is compared with."""
        return [name for name in self.seconds if name != JAXKV]


@dataclasses.dataclass(frozen=True)
class StorageRecord:
    """The results of a measurement, smaller blocks first."""

    config: StorageConfig
    place: str  # the store's own URL, without secrets
    results: tuple[StorageResult, ...]


class Blocks:
    """The blocks of a round; each round has new ones, with new keys."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.shape = num_blocks, block_bytes
        self._random = np.random.default_rng(0)
        self.keys: list[bytes] = []
        self.payloads: list[NDArray[np.uint8]] = []

    def renew(self) -> None:
        num_blocks, block_bytes = self.shape
        raw = np.frombuffer(self._random.bytes(num_blocks * block_bytes), np.uint8)
        self.payloads = list(raw.reshape(self.shape))
        self.keys = [self._random.bytes(KEY_BYTES) for _ in range(num_blocks)]


class Side(Protocol):
    """One way to write the blocks of a round, and to read them again."""

    def prepare(self) -> None:
        """Get ready for a round, before the clock starts."""
        return  # Few need to.

    def write(self) -> None: ...

    def read(self) -> None: ...

    def check(self) -> None:
        """Compare the bytes read with the bytes written."""
        return

    def delete(self) -> None: ...


class StorageBench(Resource):
    """Writes to a store what no engine reads, and deletes it when it is closed.

    Raises ValueError for a malformed URL, ImportError for a missing extra, and
    StorageFailedError if the place cannot be used.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        had_folder = os.path.isdir(StoreUrl.parse(config.url).path)
        try:
            self.store = open_store(config.url)
        except StoreError as error:
            raise StorageFailedError(str(error)) from error
        self._made_folder = isinstance(self.store, LocalStore) and not had_folder
        self._namespace = os.urandom(16)
        self._secret = os.urandom(32) if config.is_sealed else None
        self._lock = threading.Lock()
        self._folders: list[str] = []
        self._open: list[StorageIO | StoreAlone] = []
        self.is_closed = False

    def run(self, on_progress: OnProgress) -> StorageRecord:
        """Measure everything; raise BytesDifferError if a block changes."""
        try:
            results = tuple(
                self._measure(size, on_progress)
                for size in sorted(set(self.config.block_sizes))
            )
        except (StoreError, OSError) as error:
            raise StorageFailedError(str(error)) from error
        return StorageRecord(self.config, self.store.url, results)

    def rivals(
        self, objects: ObjectFormat, blocks: Blocks, stack: contextlib.ExitStack
    ) -> dict[str, Side]:
        """Make the sides that jaxkv is compared with; `stack` ends what they hold."""
        del stack
        return {ALONE: StoreAlone(self.store, f"{objects.folder}/alone", blocks)}

    def close(self) -> None:
        """Delete what was written; any thread may call it, at any time."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            opened, folders = list(self._open), list(self._folders)
        for part in opened:
            part.close()
        # The store finishes its writes before it can delete their blocks.
        end_s = time.monotonic() + _CLEAN_UP_S
        queues = [part for part in opened if isinstance(part, StorageIO)]
        while time.monotonic() < end_s and any(
            queue.stats.queued_write_bytes for queue in queues
        ):
            time.sleep(0.01)
        with contextlib.suppress(StoreError):
            for folder in folders:
                self._delete(folder)
        if self._made_folder and isinstance(self.store, LocalStore):
            _remove_if_empty(self.store.path)
        self.store.close()

    def _measure(self, block_bytes: int, on_progress: OnProgress) -> StorageResult:
        num_blocks = max(1, self.config.num_bytes // block_bytes)
        label = f"{size_text(block_bytes)} blocks"
        objects = ObjectFormat(self._namespace, label, block_bytes, secret=self._secret)
        blocks = Blocks(num_blocks, block_bytes)
        with contextlib.ExitStack() as stack:
            storage = StorageIO(
                open_store(self.config.url),
                objects,
                write_bytes=2 * num_blocks * objects.object_bytes,
                read_bytes=2 * num_blocks * objects.object_bytes,
                num_in_flight=self.config.num_in_flight,
            )
            stack.callback(storage.close)
            self._folders.append(objects.folder)
            self._close_at_end(storage)
            sides: dict[str, Side] = {JAXKV: _Jaxkv(storage, blocks)}
            sides |= self.rivals(objects, blocks, stack)
            for side in sides.values():
                if isinstance(side, StoreAlone):
                    self._close_at_end(side)
            seconds = _time(sides, blocks, self.config.rounds, label, on_progress)
        self._delete(objects.folder)
        return StorageResult(block_bytes, num_blocks, seconds)

    def _close_at_end(self, part: StorageIO | StoreAlone) -> None:
        with self._lock:
            if self.is_closed:
                raise StorageFailedError("the benchmark was closed during the run")
            self._open.append(part)

    def _delete(self, folder: str) -> None:
        """Delete all of a folder, again while late writes add to it."""
        end_s = time.monotonic() + _CLEAN_UP_S
        # A store that cannot list has deleted each round's blocks.
        while can_list(self.store) and time.monotonic() < end_s:
            names = [name for page in self.store.list(folder) for name in page]
            if not names:
                break
            self.store.delete(names)
        if isinstance(self.store, LocalStore):
            root = self.store.path
            for path, *_ in os.walk(f"{root}/{folder}", topdown=False):
                _remove_if_empty(path)
            _remove_if_empty(os.path.dirname(f"{root}/{folder}"))


def _remove_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


class _Jaxkv(Side):
    """The storage tier's way: queue, format, store."""

    def __init__(self, storage: StorageIO, blocks: Blocks) -> None:
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
                raise StorageFailedError(_NO_ANSWER)
            time.sleep(0.001)

    def check(self) -> None:
        """Compare all bytes with those that were written."""
        expected = dict(zip(self._blocks.keys, self._blocks.payloads, strict=True))

        def compare(completion: Completion) -> None:
            assert completion.payload is not None
            payload = np.frombuffer(completion.payload, np.uint8)
            if not np.array_equal(payload, expected[completion.key]):
                raise BytesDifferError(f"block {completion.key.hex()} has changed")

        self._storage.submit_reads(self._blocks.keys, float("inf"))
        self._wait(compare)

    def _wait(self, receive: Callable[[Completion], None]) -> None:
        num_left = len(self._blocks.keys)
        while num_left:
            # A tier polls once a step, not for each block.
            done = self._storage.wait(_ANSWER_S, min(num_left, _BLOCKS_PER_POLL))
            if not done:
                raise StorageFailedError(_NO_ANSWER)
            for completion in done:
                if completion.outcome != "done":
                    stats = self._storage.stats
                    raise StorageFailedError(stats.last_error or completion.outcome)
                receive(completion)
            num_left -= len(done)


class StoreAlone(Side):
    """The store without queue and format."""

    def __init__(self, store: BlobStore, folder: str, blocks: Blocks) -> None:
        self._store = store
        self._folder = folder
        self._writing = threading.Lock()
        self._is_closed = False
        self.blocks = blocks

    def write(self) -> None:
        blobs = [[payload.data] for payload in self.blocks.payloads]
        items = list(zip(self.names(), blobs, strict=True))
        with self._writing:
            self._call(self._put, items, lanes_of(self._store).writers)

    def close(self) -> None:
        """Write no more, and wait for calls under way; any thread may call it."""
        self._is_closed = True
        if self._writing.acquire(timeout=_CLEAN_UP_S):
            self._writing.release()

    def _put(self, items: Sequence[Any]) -> Sequence[Any]:
        return [] if self._is_closed else self._store.put(items)

    def read(self) -> None:
        max_bytes = self.blocks.payloads[0].nbytes + 1
        get = functools.partial(self._store.get, max_bytes=max_bytes)
        self._call(get, self.names(), lanes_of(self._store).readers)

    def delete(self) -> None:
        self._store.delete(self.names())

    def _call(
        self,
        call: Callable[[Sequence[Any]], Sequence[Any]],
        items: Sequence[Any],
        num_threads: int,
    ) -> None:
        """Call the store with some items at a time, as the tier's threads do."""
        lanes, block_bytes = lanes_of(self._store), self.blocks.payloads[0].nbytes
        size = max(1, min(lanes.call_bytes // block_bytes, len(items) // num_threads))
        calls = [items[at : at + size] for at in range(0, len(items), size)]
        with ThreadPoolExecutor(num_threads) as threads:
            for answers in threads.map(call, calls):
                answers_of(answers)

    def names(self) -> list[str]:
        return [f"{self._folder}/{key.hex()}" for key in self.blocks.keys]


def _time(
    sides: Mapping[str, Side],
    blocks: Blocks,
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
            duration_s = timed(move)
            if number >= 0:
                seconds[name][way].append(duration_s)
        for side in sides.values():
            side.check()
        for side in sides.values():
            side.delete()
    on_progress(label, rounds, rounds)
    return seconds
