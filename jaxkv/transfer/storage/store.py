"""Where objects go: what every store can do, and what may go wrong there."""

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
_MOST_LETTERS = 240
_PAGE = 4096


class StoreError(Exception):
    """A call that a store could not answer.

    Attributes:
        kind: ``"full"`` if there is no room, ``"denied"`` if it may not be done,
            ``"unreachable"`` if the store does not answer, else ``"other"``.
    """

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class Lanes(NamedTuple):
    """How many threads call a store at once, and how much each call has.

    Attributes:
        readers: Threads that read, and as many that ask what is there.
        writers: Threads that write.
        call_bytes: Bytes of the objects of a call, at most, unless it has one object.
    """

    readers: int = 4
    writers: int = 4
    call_bytes: int = 1


class BlobStore(Protocol):
    """A place for objects, each of which appears whole or not at all.

    Names are in ASCII: letters, digits and ``._-``, in folders by ``/``, none of them
    beginning with a dot. Every call but `close` waits for the store, and any thread may
    make it. It returns an answer for each name in the order given, a `StoreError` where
    the store has failed. It may raise one if all have failed, and raises a ValueError
    for what is no name.

    Any number of threads, processes and machines may use one place at once. The last
    of two that put the same name wins; a mixture is never read.

    A store may have `lanes`; without them it is called as `Lanes()` says. One that
    cannot list has ``can_list = False``.
    """

    @property
    def url(self) -> str:
        """The place, without secrets, for messages."""
        ...

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> Sequence[Piece | StoreError | None]:
        """Read objects.

        Args:
            names: Their names.
            max_bytes: Bytes to read at most, from the first on: an object there may be
                planted, and of any size.

        Returns:
            The bytes, which the caller owns; None where there is no such object.
        """
        ...

    def put(self, items: Sequence[tuple[str, Blob]]) -> Sequence[StoreError | None]:
        """Write objects, over others of the same names."""
        ...

    def exists(self, names: Sequence[str]) -> Sequence[bool | StoreError]:
        """Tell which objects there are."""
        ...

    def delete(self, names: Sequence[str]) -> Sequence[StoreError | None]:
        """Delete objects; it is no error if there are none."""
        ...

    def list(self, folder: str) -> Iterator[list[str]]:
        """List the names of a folder and the folders in it, page by page.

        It is not in one moment: what is put or deleted meanwhile may be there or not,
        and what is there may come twice.

        Raises:
            StoreError: The store fails, or has no list (`can_list`).
        """
        ...

    def close(self) -> None:
        """Release what is held; waits for nothing."""
        ...


@runtime_checkable
class TimedStore(Protocol):
    """What a store can do in addition, if it knows when objects were last used."""

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Tell when objects were last written, or read if the store notes that.

        Returns:
            Microseconds since some moment, the same for all engines; 0 for an object
            that is not there. None if this store does not tell.

        Raises:
            StoreError: The store fails.
        """
        ...


def can_list(store: BlobStore) -> bool:
    """Whether a store lists its objects; else an engine has to ask for each."""
    return bool(getattr(store, "can_list", True))


def lanes_of(store: BlobStore) -> Lanes:
    """Return how many threads are to call a store."""
    lanes: Lanes = getattr(store, "lanes", Lanes())
    return lanes


def attempt(call: Callable[..., _T], *args: Any) -> _T | StoreError:
    """Return what a call returns, or its error as that of a store."""
    try:
        return call(*args)
    except Exception as error:
        return error_of(error)


def answers_of(answers: Iterable[_T | StoreError]) -> list[_T]:
    """Return the answers of a call, or raise the first error among them."""
    checked = []
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
        checked.append(answer)
    return checked


def check_name(name: str) -> str:
    """Return a name if objects and folders may have it.

    Raises:
        ValueError: It may not be one.

    >>> check_name("ab/abcdef.0")
    'ab/abcdef.0'
    """
    if not is_name(name):
        raise ValueError(f"name={name[:_MOST_LETTERS]!r} is no name of an object.")
    return name


def is_name(name: str) -> bool:
    """Whether objects and folders may have a name."""
    return len(name) <= _MOST_LETTERS and _NAME.fullmatch(name) is not None


def error_of(error: BaseException) -> StoreError:
    """Convert an error of the operating system, or any other, to a store's."""
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


class MemoryStore:
    """A store in the memory of this process, for tests and for trying things out.

    Args:
        url: What it is called in messages.

    Example:
        >>> with_memory = MemoryStore()
        >>> with_memory.put([("ab/1.0", [b"head", b"body"])])
        [None]
        >>> [bytes(found) for found in with_memory.get(["ab/1.0"], 100)]
        [b'headbody']
    """

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
            found = [self._blobs.get(check_name(name)) for name in names]
            self._times.update(dict.fromkeys(names, time.time_ns() // 1000))
        return [
            None if blob is None else memoryview(blob)[:max_bytes] for blob in found
        ]

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[None]:
        """Write objects."""
        blobs = {check_name(name): b"".join(blob) for name, blob in items}
        with self._lock:
            self._blobs.update(blobs)
            self._times.update(dict.fromkeys(blobs, time.time_ns() // 1000))
        return [None for _ in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Tell which objects there are."""
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
            found = sorted(name for name in self._blobs if name.startswith(start))
        for first in range(0, len(found), _PAGE):
            yield found[first : first + _PAGE]

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Tell when objects were last written or read."""
        with self._lock:
            return [self._times.get(name, 0) for name in names]

    def close(self) -> None:
        """Keep everything: the next to open the same place finds it."""


_memories: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()
_memories_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """Return the store in memory of a name, the same one for all who hold it."""
    url = f"memory://{name}"
    with _memories_lock:
        store = _memories.get(url)
        if store is None:
            store = _memories[url] = MemoryStore(url)
        return store
