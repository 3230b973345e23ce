"""The protocol of stores, their errors, and a store in memory."""

from __future__ import annotations

import errno
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    runtime_checkable,
)

_T = TypeVar("_T")

Piece: TypeAlias = bytes | memoryview
"""Contiguous bytes; a view counts them one by one (format ``"B"``)."""

Blob: TypeAlias = Sequence[Piece]
"""The bytes of an object in pieces, so that a store need not join them."""

ErrorKind: TypeAlias = Literal["full", "denied", "unreachable", "other"]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_MAX_LETTERS = 240
_PAGE = 4096
_MAX_NAMES = 1 << 23  # Of a listing, and of its pages without a name.


class StoreError(Exception):
    """A call that a store could not answer.

    The kind is ``"full"`` if there is no room, ``"denied"`` if permissions are missing,
    ``"unreachable"`` if the store does not answer, otherwise ``"other"``. `was_down`:
    nothing was called, because a node is known to be down; its objects are missing.
    """

    def __init__(
        self, kind: ErrorKind, message: str, *, was_down: bool = False
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.was_down = was_down


class Lanes(NamedTuple):
    """Threads that call a store, and the size of their calls."""

    readers: int = 4  # Threads that read, and as many that probe
    writers: int = 4
    # Bytes of the objects of a call, unless it has one object
    call_bytes: int = 1


class BlobStore(Protocol):
    """A place for objects, which appear whole or not at all.

    A name is ASCII letters, digits and ``._-``, in folders by ``/``; none of these
    parts begins with a dot. Every call except `close` waits for the store, and any
    thread may make it. It returns an answer for each name, in order, or a `StoreError`
    for one that failed. It may raise a StoreError if all failed, and raises a
    ValueError for an invalid name.

    Any number of threads, processes and machines may use one place at once. If two put
    the same name, the last one wins; no reader sees a mixture.

    A store may have `lanes`; without them it is called as `Lanes()` says. A store that
    cannot list has ``can_list = False``.
    """

    @property
    def url(self) -> str:
        """The place, without secrets, for messages."""
        ...

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> Sequence[Piece | StoreError | None]:
        """Read objects; None for a missing one. The caller owns the bytes.

        Only the first `max_bytes` are read: a planted object may have any size.
        """
        ...

    def put(self, items: Sequence[tuple[str, Blob]]) -> Sequence[StoreError | None]:
        """Write objects, over others of the same names."""
        ...

    def exists(self, names: Sequence[str]) -> Sequence[bool | StoreError]:
        """Return whether each object exists."""
        ...

    def delete(self, names: Sequence[str]) -> Sequence[StoreError | None]:
        """Delete objects, if they exist."""
        ...

    def list(self, folder: str) -> Iterator[list[str]]:
        """List the names of a folder and its subfolders, page by page.

        The listing is no snapshot: it may have or miss what is put or deleted
        meanwhile, and repeat names. StoreError: the store fails, or cannot list.
        """
        ...

    def close(self) -> None:
        """Release resources, without waiting."""
        ...


@runtime_checkable
class TimedStore(Protocol):
    """A store that knows when objects were last used."""

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Return when objects were last written, or read if the store records that.

        The unit is microseconds, from an origin that all engines share; 0 stands for a
        missing object. None: this store does not record times.
        """
        ...


@runtime_checkable
class SizedStore(Protocol):
    """A store that knows the sizes of objects, without using them."""

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the bytes that objects take; None for a missing one."""
        ...


def can_list(store: BlobStore) -> bool:
    """Whether a store lists its objects; otherwise an engine probes for each."""
    return bool(getattr(store, "can_list", True))


def listed_names(store: BlobStore, folder: str) -> Iterator[list[str]]:
    """List the valid names of a folder, but not for ever.

    StoreError: the listing has too many names or pages.
    """
    num = 0
    for names in store.list(folder):
        num += 1 + len(names)
        if num > _MAX_NAMES:
            raise StoreError("other", f"its listing has over {_MAX_NAMES:,} names")
        if valid := [name for name in names if is_name(name)]:
            yield valid


def lanes_of(store: BlobStore) -> Lanes:
    """Return the lanes of a store."""
    lanes: Lanes = getattr(store, "lanes", Lanes())
    return lanes


def answers_of(answers: Iterable[_T | StoreError]) -> list[_T]:
    """Return the answers of a call, or raise the first error among them."""
    checked = []
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
        checked.append(answer)
    return checked


def check_name(name: str) -> str:
    """Return a name if it is valid, else raise a ValueError."""
    if not is_name(name):
        raise ValueError(f"name={name[:_MAX_LETTERS]!r} is no name of an object.")
    return name


def is_name(name: str) -> bool:
    """Whether a name is valid for objects and folders."""
    return len(name) <= _MAX_LETTERS and _NAME.fullmatch(name) is not None


def error_of(error: BaseException) -> StoreError:
    """Convert any error to a StoreError."""
    if isinstance(error, StoreError):
        return error
    kind: ErrorKind = "other"
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = "full"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            kind = "denied"
        elif isinstance(error, ConnectionError | TimeoutError):
            kind = "unreachable"
    return StoreError(kind, f"{type(error).__name__}: {error}")


def attempt(
    call: Callable[..., _T],
    *args: Any,
    convert: Callable[[BaseException], StoreError] = error_of,
) -> _T | StoreError:
    """Return the result of a call, or its error, converted to a StoreError."""
    try:
        return call(*args)
    except Exception as error:
        return convert(error)


class MemoryStore:
    """A store in the memory of this process, for tests and for trying things out."""

    lanes = Lanes(2, 2, 1 << 20)

    def __init__(self, url: str = "memory://") -> None:
        self._url = url
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._times: dict[str, int] = {}

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._url

    def get(self, names: Sequence[str], max_bytes: int) -> list[Piece | None]:
        """Read objects."""
        with self._lock:
            blobs = [self._blobs.get(check_name(name)) for name in names]
            present = self._blobs.keys() & names
            self._times.update(dict.fromkeys(present, time.time_ns() // 1000))
        return [
            None if blob is None else memoryview(blob)[:max_bytes] for blob in blobs
        ]

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[None]:
        """Write objects."""
        blobs = {check_name(name): b"".join(blob) for name, blob in items}
        with self._lock:
            self._blobs.update(blobs)
            self._times.update(dict.fromkeys(blobs, time.time_ns() // 1000))
        return [None for _ in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return whether each object exists."""
        with self._lock:
            return [check_name(name) in self._blobs for name in names]

    def delete(self, names: Sequence[str]) -> list[None]:
        """Delete objects."""
        with self._lock:
            for name in names:
                self._blobs.pop(check_name(name), None)
                self._times.pop(name, None)
        return [None for _ in names]

    def list(self, folder: str) -> Iterator[list[str]]:
        """List the objects of a folder."""
        start = f"{check_name(folder)}/"
        with self._lock:
            names = sorted(name for name in self._blobs if name.startswith(start))
        for first in range(0, len(names), _PAGE):
            yield names[first : first + _PAGE]

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Return when objects were last written or read."""
        with self._lock:
            return [self._times.get(name, 0) for name in names]

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the bytes of objects."""
        with self._lock:
            blobs = [self._blobs.get(name) for name in names]
        return [None if blob is None else len(blob) for blob in blobs]

    def close(self) -> None:
        """Keep everything for other holders of the same name."""


_memories: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()
_memories_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """Return the store in memory of a name, which all its holders share."""
    url = f"memory://{name}"
    with _memories_lock:
        store = _memories.get(url)
        if store is None:
            store = _memories[url] = MemoryStore(url)
        return store
