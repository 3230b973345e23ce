"""A look at the store of the storage tier: objects go there and come back, timed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from jaxkv._util import one_line
from jaxkv._util.extras import missing_packages
from jaxkv.transfer.storage import (
    BlobStore,
    LocalStore,
    ObjectFormat,
    StorageIO,
    StoreError,
    open_store,
)
from jaxkv.transfer.storage.objects import ROOT
from jaxkv.transfer.storage.store import ERROR_KINDS, answers_of, listed_names
from jaxkv.transfer.storage.store_url import StoreUrl
from jaxkv.types import KEY_BYTES

DEADLINE_S = 20.0
SPEED_S = 4.0  # For writing the blocks, and for reading them, at most.
NUM_BLOCKS, BLOCK_BYTES = 16, 1 << 20
_COUNT_S = 5.0  # For adding up what a folder holds, or a late write, at most.
_NUM_BYTES = 4096
_MAX_LETTERS = 300
_ADVICE = {
    "full": "make room there",
    "denied": "let the user of the server read and write there, or name another place",
    "unreachable": "start the store, or correct its address",
}


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of a store."""

    path: str  # Where it is
    mode: int | None  # Its permissions; None if it was not there
    file_mode: int  # The permissions that the URL gives its files
    free_bytes: int  # What this user may still write on its file system
    held_bytes: int  # What blocks take there; counted as far as it matters


@dataclasses.dataclass(frozen=True)
class StoreSpeed:
    """10^6 bytes per second of `NUM_BLOCKS`, through the storage tier."""

    write_mb_per_s: float | None  # None if `SPEED_S` was not enough
    read_mb_per_s: float | None = None  # The same; None if they were not written


@dataclasses.dataclass(frozen=True)
class Store:
    """The result of examining a store."""

    url: str  # The place, without secrets
    num_bytes: int  # What it may hold
    is_sealed: bool  # Whether a secret seals its objects
    source: str = "--storage"  # Where the place was set, for messages
    num_bytes_source: str = "--storage-bytes"  # Where the size is set, for messages
    # The extra without which it does not open; None if it has it
    lacks_extra: str | None = None
    fault: str = ""  # Why it cannot be used; empty if it can
    advice: str = ""  # What to do about that; may be empty
    # The folder that it is; None if it is none, or cannot be used
    folder: Folder | None = None
    speed: StoreSpeed | None = None  # None if it cannot be used


def look_at(url: str, store: Store, *, deadline_s: float = DEADLINE_S) -> Store:
    """Open a store; write, read and delete a small object, then some blocks.

    Nothing stays there: neither objects nor new folders.
    """
    answer: Future[Store] = Future()
    until_s = time.monotonic() + deadline_s
    late = StoreError("unreachable", f"it did not answer within {deadline_s:g} s")

    def look() -> None:
        try:
            answer.set_result(_look_at(url, store, until_s))
        except ValueError as error:
            answer.set_exception(error)
        except Exception as error:
            answer.set_result(_failed(store, StoreError("other", f"{error!r}")))

    # A call to a dead file server may never return.
    threading.Thread(target=look, name="jaxkv doctor", daemon=True).start()
    try:
        return answer.result(deadline_s + 1)
    except TimeoutError:
        return _failed(store, late)


def _look_at(url: str, store: Store, until_s: float) -> Store:
    place = StoreUrl.parse(url)
    path, mode, made = os.path.abspath(place.path), None, []
    if place.is_folder:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(path).st_mode)
        made = _missing_folders(path)
    try:
        try:
            opened = open_store(url)
        except ImportError as error:
            if place.extra is None or not missing_packages(place.extra):
                return _failed(store, StoreError("other", str(error)))
            return dataclasses.replace(store, lacks_extra=place.extra)
        with contextlib.closing(opened):
            _try(opened)
            speed = _measure(opened, StorageIO(open_store(url), _format(store)))
            store = dataclasses.replace(store, speed=speed)
            if not isinstance(opened, LocalStore):
                return store
            free = opened.free_bytes
            held = _held_bytes(opened, store.num_bytes - free, until_s)
        folder = Folder(path, mode, place.mode, free, held)
        return dataclasses.replace(store, folder=folder)
    except StoreError as error:
        return _failed(store, error)
    finally:
        for created in made:
            with contextlib.suppress(OSError):
                os.rmdir(created)


def _try(store: BlobStore) -> None:
    name = f"jaxkv-doctor-{os.urandom(8).hex()}"
    data = os.urandom(_NUM_BYTES)
    try:
        answers_of(store.put([(name, [data])]))
        [payload] = answers_of(store.get([name], _NUM_BYTES))
        if payload is None or bytes(payload) != data:
            raise StoreError("other", "a written object does not read back")
    finally:
        deleted = store.delete([name])
    answers_of(deleted)


def _format(store: Store) -> ObjectFormat:
    secret = os.urandom(32).hex() if store.is_sealed else None
    return ObjectFormat(os.urandom(16), "jaxkv doctor", BLOCK_BYTES, secret=secret)


def _measure(store: BlobStore, storage: StorageIO) -> StoreSpeed:
    """Time blocks that the storage tier writes and reads; `store` deletes them."""
    keys = [os.urandom(KEY_BYTES) for _ in range(NUM_BLOCKS)]
    blocks = [(key, [memoryview(os.urandom(BLOCK_BYTES))]) for key in keys]

    def mb_per_s(submit: Callable[[], Sequence[int | None]]) -> float | None:
        start_s = time.monotonic()
        tickets = submit()
        ended = storage.wait(SPEED_S, NUM_BLOCKS)
        took_s = time.monotonic() - start_s
        storage.cancel(ticket for ticket in tickets if ticket is not None)
        for completion in ended:
            if completion.outcome != "done":
                text = storage.stats.last_error or "written blocks do not read back"
                kinds = (kind for kind in ERROR_KINDS if kind == completion.reason)
                raise StoreError(next(kinds, "other"), text)
        is_done = len(ended) == NUM_BLOCKS
        return NUM_BLOCKS * BLOCK_BYTES / 1e6 / took_s if is_done else None

    try:
        write = mb_per_s(lambda: storage.submit_writes(blocks))
        if write is None:
            return StoreSpeed(None)
        return StoreSpeed(write, mb_per_s(lambda: storage.submit_reads(keys, math.inf)))
    finally:
        # A write that is under way must not come after its delete.
        storage.close(_COUNT_S)
        names = [storage.objects.name(key) for key in keys]
        with contextlib.suppress(StoreError):
            store.delete(names)
        if isinstance(store, LocalStore):
            for name in names:
                _remove_empty_folders(store.path, name)


def _remove_empty_folders(root: str, name: str) -> None:
    with contextlib.suppress(OSError):
        while name := os.path.dirname(name):
            os.rmdir(f"{root}/{name}")


def _failed(store: Store, error: StoreError) -> Store:
    text = one_line(str(error))[:_MAX_LETTERS]
    return dataclasses.replace(store, fault=text, advice=_ADVICE.get(error.kind, ""))


def _missing_folders(path: str) -> list[str]:
    """Return the folders that opening makes, the innermost first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _held_bytes(store: LocalStore, enough: int, until_s: float) -> int:
    """Add up the files of blocks, until that is enough or takes too long."""
    until_s = min(until_s, time.monotonic() + _COUNT_S)
    held = 0
    with contextlib.suppress(StoreError):
        for names in listed_names(store, ROOT):
            if held >= enough or time.monotonic() > until_s:
                break
            held += sum(size or 0 for size in store.sizes(names))
    return held
