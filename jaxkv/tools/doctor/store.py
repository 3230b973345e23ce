"""A look at the store of the storage tier: an object goes there and comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import threading
import time
from concurrent.futures import Future

from jaxkv._util import one_line
from jaxkv._util.extras import missing_packages
from jaxkv.transfer.storage import BlobStore, LocalStore, StoreError, open_store
from jaxkv.transfer.storage.objects import ROOT
from jaxkv.transfer.storage.store import answers_of, listed_names
from jaxkv.transfer.storage.store_url import StoreUrl

DEADLINE_S = 15.0
_COUNT_S = 5.0  # For adding up what a folder holds, at most.
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


def look_at(url: str, store: Store, *, deadline_s: float = DEADLINE_S) -> Store:
    """Open a store; write, read and delete a small object.

    Nothing stays there: neither the object nor new folders.
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
