"""ZeroMQ socket addresses, checked before use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket as unix
import stat
import sys
from collections.abc import Iterator

from jaxkv._util import check_whole, shown
from jaxkv._util.extras import pip_install

try:
    import zmq as zmq
except ImportError as error:
    raise ImportError(
        f"Events over the network need pyzmq: {pip_install('events')}"
    ) from error

_TCP = re.compile(r"(tcp://(?:\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+)):(\*|[0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


def offset_endpoint(name: str, endpoint: str, data_parallel_rank: int) -> str:
    """Return an engine's address, given the first engine's, as vLLM does.

    Port 0 or * is any free one. `name` is the argument's name, for messages. Raises
    ValueError if `endpoint` is malformed.

        >>> offset_endpoint("endpoint", "tcp://127.0.0.1:5557", 2)
        'tcp://127.0.0.1:5559'
        >>> offset_endpoint("endpoint", "ipc:///run/events", 2)
        'ipc:///run/events_dp2'
    """
    check_whole(0, data_parallel_rank=data_parallel_rank)
    if isinstance(endpoint, str):
        if _IPC.fullmatch(endpoint):
            rank = data_parallel_rank
            return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
        if match := _TCP.fullmatch(endpoint):
            host, port = match.groups()
            if port == "*" or int(port) == 0:
                return f"{host}:*"
            if int(port) + data_parallel_rank < 1 << 16:
                return f"{host}:{int(port) + data_parallel_rank}"
    added = f" (with {data_parallel_rank=} added)" if data_parallel_rank else ""
    raise ValueError(
        f"{name}={shown(endpoint)}{added} must be tcp://HOST:PORT, such as "
        "'tcp://127.0.0.1:5557', with a port below 65536, or ipc://PATH."
    )


def topic_bytes(topic: str) -> bytes:
    """Encode a topic; raise ValueError if it is not a text of valid Unicode."""
    try:
        return topic.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ValueError(
            f"topic={shown(topic)} must be a text of valid Unicode."
        ) from None


def bind(socket: zmq.Socket[bytes], name: str, endpoint: str) -> str:
    """Bind a socket to an address from `offset_endpoint`.

    Returns the bound address, with the port that was free. Raises OSError with the
    reason if it cannot be bound.
    """
    # Only if needed: a machine without IPv6 could bind nothing with it.
    socket.ipv6 = "[" in endpoint
    try:
        with _unused(endpoint):
            socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        reason = f"cannot be bound: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            reason = "is in use. Close its owner, or give another address"
        raise OSError(error.errno, f"{name}={shown(endpoint)} {reason}.") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


@contextlib.contextmanager
def _unused(endpoint: str) -> Iterator[None]:
    """Refuse an ipc address that a process listens on, until it is bound here.

    ZeroMQ removes whatever is at the path: the socket of a dead process, as it should,
    but also a live process's socket, or a file. Raises OSError if the path is taken.
    """
    path = endpoint.removeprefix("ipc://")
    # ZeroMQ binds these as asked: any free path, or a name without a file.
    if path == endpoint or path == "*" or path.startswith("@"):
        yield
        return
    path = os.path.realpath(path)
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as turn:
        if sys.platform == "linux":
            # Only one process at a time may look and bind. The kernel frees the name.
            digest = hashlib.sha256(os.fsencode(path)).hexdigest()
            turn.bind(f"\0jaxkv-{digest}")
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.EEXIST, "a file that is no socket is there")
            _check_dead(path)
        yield


def _check_dead(path: str) -> None:
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # Its queue is full.
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def connect(socket: zmq.Socket[bytes], name: str, endpoint: str) -> None:
    """Connect a socket; ZeroMQ connects in the background.

    Raises ValueError if it cannot be connected to, such as one for any port.
    """
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"{name}={shown(endpoint)} cannot be connected to: "
            f"{error.strerror}; give the address that the other side binds."
        ) from None
