"""Mooncake Store: the memory of a fleet's machines as one pool.

A worked example of a store that its own package registers (`pyproject.toml`).
`pip install examples/mooncake` makes ``mooncake://MASTER:50051?segment=64GiB`` a store.
Options: segment, the bytes of this process's memory that the pool gets (default: 0);
protocol, ``tcp`` or ``rdma``; device; metadata; host, this machine's address.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import did_you_mean, one_line, parse_bytes, shown
from jaxkv.transfer.storage.buffers import Buffers
from jaxkv.transfer.storage.store import (
    Blob,
    ErrorKind,
    Lanes,
    Piece,
    StoreError,
    check_name,
    error_of,
)
from jaxkv.transfer.storage.store_url import StoreUrl
from jaxkv.transfer.storage.workers import start_thread

_OPTIONS = "segment", "protocol", "device", "metadata", "host"
_PORT = 50051
_NO_METADATA_SERVER = "P2PHANDSHAKE"  # Clients ask one another.
_CLIENT = "mooncake-transfer-engine-non-cuda>=0.3.13"
_INSTALL_LIBRARIES = "apt-get install libibverbs1 libnuma1 libcurl4"
_CONNECT_S = 5.0
_RETRY_S = 1.0  # Between two attempts to connect,
_HUNG_RETRY_S = 60.0  # and to start a client, which stops all threads meanwhile.
# A client would wait for a master for 30 s, and try to connect for 90 s.
_LIMITS: Mapping[str, str] = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
# These are read after a client has started, so they stay set. Without them it writes a
# dozen lines about each client, and waits 30 s for one that makes no progress.
_LASTING: Mapping[str, str] = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}

# Its codes: https://github.com/kvcache-ai/Mooncake, mooncake-store/include/types.h.
_FULL = -200
_DOES_NOT_FIT = -600
_NOT_READY = -703  # A writer has begun, or was killed.
_NOT_FOUND = -704
_TRANSFER_FAILED = -800  # Its owner is gone, or slow.
_LEASE_EXPIRED = -707
_ABSENT = (_NOT_READY, _NOT_FOUND)


def open_store(url: StoreUrl) -> MooncakeStore:
    """Open the pool of a master; ValueError if an option or the place is wrong."""
    if fault := _fault_of(url):
        raise ValueError(f"storage={shown(url.shown)}: {fault}.")
    return MooncakeStore(url)


def _fault_of(url: StoreUrl) -> str:
    """Return what is wrong with a URL."""
    if len(url.nodes) != 1 or url.path.strip("/"):
        return "it must be mooncake://HOST:PORT of the master"
    for name in url.options:
        if name not in _OPTIONS:
            return f"unknown option {shown(name)}: {did_you_mean(name, _OPTIONS)}"
    protocol, device = url.options.get("protocol", "tcp"), url.options.get("device")
    if protocol not in ("tcp", "rdma"):
        return f"protocol={shown(protocol)} must be tcp or rdma"
    if device and protocol != "rdma":
        return f"device={shown(device)} needs protocol=rdma"
    try:
        _segment_bytes(url)
    except ValueError as error:
        return f"segment={one_line(str(error))}, or 0"
    return ""


def _segment_bytes(url: StoreUrl) -> int:
    segment = url.options.get("segment", "0")
    return 0 if segment == "0" else parse_bytes(segment)


class _Client(NamedTuple):
    theirs: Any
    buffers: Buffers


class _RegisteredBuffers(Buffers):
    """Memory registered with a client, which moves bytes there without a copy.

    It keeps as much as was ever in use at once.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__(sys.maxsize)
        self._theirs = theirs

    def _make(self, num_bytes: int) -> NDArray[np.uint8]:
        whole = super()._make(num_bytes)
        code = self._theirs.register_buffer(whole.ctypes.data, num_bytes)
        if code < 0:
            raise _error(code, f"{num_bytes} bytes of memory cannot be registered")
        return whole

    def _drop(self, whole: NDArray[np.uint8]) -> None:
        self._theirs.unregister_buffer(whole.ctypes.data)


class MooncakeStore:
    """A store in the pool of a Mooncake master.

    Objects are read into registered memory, which the caller gets, and copied into such
    memory to be written. An existing object is not written again: its name identifies
    its content, and overwriting would take its memory twice for minutes. A reader may
    find the next object's bytes in the place of a deleted one; the seal shows that. The
    master evicts what was not used for long, and cannot list.

    The client is made when the master first answers, and finds a restarted master by
    itself. No call takes longer than some seconds. ImportError: Mooncake or a library
    that it needs is missing.
    """

    can_list = False
    # Waiting for a call keeps a core busy, so few large calls are the fastest.
    lanes = Lanes(readers=1, writers=1, call_bytes=16 << 20)

    def __init__(self, url: StoreUrl) -> None:
        self._store_url = url
        [(self._host, port)] = url.nodes
        self._port = port or _PORT
        self._mooncake = _import()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._client: _Client | None = None
        # The error of the last attempt to connect, which holds until `_retry_s`.
        self._error = StoreError("unreachable", "")
        self._retry_s = 0.0
        self._is_suspect = False  # The last call failed.
        self._num_open = 0  # Calls in progress
        self._is_closed = False
        # A client that starts stops all threads, for seconds if a master hangs: better
        # now than while an engine serves.
        with contextlib.suppress(StoreError):
            self._connected()

    @property
    def url(self) -> str:
        return self._store_url.shown

    def client(self) -> Any:
        """Return the Mooncake client, for benchmarks that call it directly."""
        return self._connected().theirs

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> Sequence[Piece | StoreError | None]:
        return self._ask(_get, [(check_name(name), max_bytes) for name in names])

    def put(self, items: Sequence[tuple[str, Blob]]) -> Sequence[StoreError | None]:
        """Write objects that do not exist yet; an empty one counts as absent."""
        return self._ask(_put, [(check_name(name), blob) for name, blob in items])

    def exists(self, names: Sequence[str]) -> Sequence[bool | StoreError]:
        return self._ask(_exists, list(map(check_name, names)))

    def delete(self, names: Sequence[str]) -> Sequence[StoreError | None]:
        """Delete objects, even while others read them."""
        return self._ask(_delete, list(map(check_name, names)))

    def _ask(
        self, call: Callable[[_Client, Sequence[Any]], Sequence[Any]], items: list[Any]
    ) -> Sequence[Any]:
        """Call the client, and keep it open meanwhile."""
        with self._lock:
            self._num_open += 1
        try:
            answers = call(self._connected(), items)
        except Exception as error:
            answers = [error_of(error)] * len(items)
        finally:
            with self._lock:
                self._num_open -= 1
            self._end_if_idle()
        self._is_suspect = any(
            isinstance(answer, StoreError) and answer.kind != "full"
            for answer in answers
        )
        return answers

    def list(self, folder: str) -> Iterator[list[str]]:
        """Refuse: a client cannot list."""
        check_name(folder)
        raise StoreError("other", "Mooncake cannot list objects; set storage_list_s=0")

    def close(self) -> None:
        """End the client, which takes back its segment, after the calls in progress."""
        with self._lock:
            self._is_closed = True
        self._end_if_idle()

    def _connected(self) -> _Client:
        """Return the client, made by the first call; retry a failure after a while."""
        with self._connecting:
            if self._client is None:
                if time.monotonic() < self._retry_s:
                    raise self._error
                try:
                    self._client = self._connect()
                except StoreError as error:
                    self._error = error
                    self._retry_s = max(self._retry_s, time.monotonic() + _RETRY_S)
                    raise
            elif self._is_suspect:
                self._reach()
            return self._client

    def _reach(self) -> str:
        """Connect to the master; return this machine's address on that connection.

        A client that starts without a master blocks every thread of the process until
        it times out; a client that has lost its master takes seconds for each call.
        """
        address = self._host, self._port
        try:
            with socket.create_connection(address, _CONNECT_S) as connection:
                return str(connection.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise StoreError(
                "unreachable",
                f"no Mooncake master answers at {self._host}:{self._port} "
                f"({one_line(str(error))}): start mooncake_master there, or name "
                "another by storage=mooncake://HOST:PORT",
            ) from error

    def _connect(self) -> _Client:
        host, options = self._reach(), self._store_url.options
        theirs = self._mooncake.MooncakeDistributedStore()
        with _environment(_LIMITS):
            code = theirs.setup(
                options.get("host", host),
                options.get("metadata", _NO_METADATA_SERVER),
                _segment_bytes(self._store_url),
                0,
                options.get("protocol", "tcp"),
                options.get("device", ""),
                f"{self._host}:{self._port}",
            )
        if code != 0:
            self._retry_s = time.monotonic() + _HUNG_RETRY_S
            raise StoreError(
                "unreachable",
                f"no Mooncake client could start for {self.url} (code {code}): is "
                f"{self._port} the port of mooncake_master, and are protocol, device, "
                "metadata and segment right for this machine? MC_LOG_LEVEL=INFO logs "
                "more",
            )
        return _Client(theirs, _RegisteredBuffers(theirs))

    def _end_if_idle(self) -> None:
        """End the client in a thread, as it takes a second, once no call is open."""
        with self._lock:
            if not self._is_closed or self._num_open or self._client is None:
                return
            theirs, self._client = self._client.theirs, None
        try:
            start_thread("jaxkv storage close", theirs.close)
        except StoreError:
            theirs.close()


def _get(
    client: _Client, items: Sequence[tuple[str, int]]
) -> list[Piece | StoreError | None]:
    views = [client.buffers.take(max_bytes) for _, max_bytes in items]
    names = [name for name, _ in items]
    sizes = list(map(len, views))
    codes = client.theirs.batch_get_into(names, list(map(_address, views)), sizes)
    return [
        _head(client, name, view) if code == _DOES_NOT_FIT else _read(view, code)
        for name, view, code in zip(names, views, codes, strict=True)
    ]


def _put(client: _Client, items: Sequence[tuple[str, Blob]]) -> list[StoreError | None]:
    # Mooncake refuses empty objects. Reading one looks like a missing object.
    full = [(name, blob) for name, blob in items if _num_bytes(blob)]
    views = [client.buffers.take(_num_bytes(blob)) for _, blob in full]
    for view, (_, blob) in zip(views, full, strict=True):
        _fill(view, blob)
    names, sizes = [name for name, _ in full], list(map(len, views))
    codes = iter(client.theirs.batch_put_from(names, list(map(_address, views)), sizes))
    return [_written(next(codes)) if _num_bytes(blob) else None for _, blob in items]


def _exists(client: _Client, names: Sequence[str]) -> list[bool | StoreError]:
    codes = client.theirs.batch_is_exist(names)
    return [_error(code, "") if code < 0 else bool(code) for code in codes]


def _delete(client: _Client, names: Sequence[str]) -> list[StoreError | None]:
    codes = client.theirs.batch_remove(names, True)
    return [
        None if code >= 0 or code == _NOT_FOUND else _error(code, "") for code in codes
    ]


def _num_bytes(blob: Blob) -> int:
    return sum(map(len, blob))


def _import() -> Any:
    for name, text in _LASTING.items():
        os.environ.setdefault(name, text)
    try:
        import mooncake.store
    except ModuleNotFoundError as error:
        raise ImportError(
            f'Storage in Mooncake needs its client: pip install "{_CLIENT}"'
        ) from error
    except ImportError as error:
        raise ImportError(
            "Storage in Mooncake: its client cannot be loaded "
            f"({one_line(str(error))}): {_INSTALL_LIBRARIES}"
        ) from error
    return mooncake.store


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set missing variables while a client reads them."""
    chosen = {name: text for name, text in defaults.items() if name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _fill(view: memoryview, blob: Blob) -> None:
    whole, end = np.frombuffer(view, np.uint8), 0
    for piece in blob:
        start, end = end, end + len(piece)
        # NumPy releases the GIL.
        np.copyto(whole[start:end], np.frombuffer(piece, np.uint8))


def _read(view: memoryview, code: int) -> Piece | StoreError | None:
    if code >= 0:
        return view[:code]
    return None if code in _ABSENT else _error(code, "")


def _head(client: _Client, name: str, view: memoryview) -> Piece | StoreError | None:
    """Read the first bytes of an object that is larger than it should be."""
    codes = client.theirs.get_into_ranges(
        [_address(view)], [[name]], [[[0]]], [[[0]]], [[[len(view)]]]
    )
    return _read(view, codes[0][0][0])


def _written(code: int) -> StoreError | None:
    if code == _FULL:
        return _error(code, "the pool has no room: let engines lend more by segment=")
    return None if code == 0 else _error(code, "")


def _error(code: int, text: str) -> StoreError:
    kind: ErrorKind = "other"
    if code == _FULL:
        kind = "full"
    elif code in (_TRANSFER_FAILED, _LEASE_EXPIRED):
        kind, text = "unreachable", text or "the process that has the object is gone"
    elif code <= -900 and code > -1000:
        kind, text = "unreachable", text or "the Mooncake master does not answer"
    return StoreError(kind, f"{text or 'Mooncake fails'} (code {code})")
