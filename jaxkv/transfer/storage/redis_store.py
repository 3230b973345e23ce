"""Redis or Valkey: the memory of another process, or of another machine."""

from __future__ import annotations

import functools
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxkv._util import one_line, shown
from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage.store import (
    Blob,
    ErrorKind,
    Lanes,
    Piece,
    StoreError,
    check_name,
)
from jaxkv.transfer.storage.store_url import StoreUrl

_CLUSTER = "+cluster"
_PORT = 6379
_PAGE = 4096
_CONNECT_S = 5.0
_ANSWER_S = 30.0
_RECONNECT_S = 1.0  # Between two connections of a thread that a server refuses.


class RedisStore:
    """A store in Redis or Valkey, one server or a cluster: a value an object.

    A call goes in one pipeline, over a connection of its thread. In a cluster redis-py
    finds the node of each value, and follows values to other nodes.

    Args:
        url: As redis-py has it: ``redis://HOST:PORT/DB``, ``rediss://`` with TLS,
            ``unix:///PATH``; or ``redis+cluster://HOST:PORT``, ``rediss+cluster://``
            with some nodes of a cluster, one of which has to answer at first:
            ``HOST:PORT,HOST:PORT``.

    Raises:
        ImportError: redis-py is missing.
        ValueError: The URL is malformed.
    """

    lanes = Lanes(readers=4, writers=2, call_bytes=4 << 20)

    def __init__(self, url: str) -> None:
        self._redis = _import()
        place = self._place = StoreUrl.parse(url)
        self._is_cluster = place.scheme.endswith(_CLUSTER)
        # A connection may have been closed while it was not used, and a node of a
        # cluster may have handed on its values.
        tries = 3 if self._is_cluster else 1
        options: dict[str, Any] = {
            "socket_connect_timeout": _CONNECT_S,
            "socket_timeout": _ANSWER_S,
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), tries),
        }
        self._known_nodes: dict[tuple[str, int], None] = {}
        url = place.text
        if self._is_cluster:
            url = _first_node(url)
            self._known_nodes |= {
                (host, port or _PORT): None for host, port in place.places[1:]
            }
        fault = ""
        try:
            # It does not connect, but it looks at what the URL asks for.
            self._redis.ConnectionPool.from_url(url, **options).make_connection()
        except (ValueError, TypeError, self._redis.RedisError) as error:
            fault = place.hide(one_line(str(error))).rstrip(".")
        if fault:  # Without the error, which may have a part of the password.
            raise ValueError(f"storage={shown(place.shown)}: {fault}.")
        self._make_client = functools.partial(self._connect, url, options)
        self._of_thread = threading.local()
        # Those of threads that have ended are closed, as of one for each listing.
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """The place, without user and password."""
        return self._place.shown

    @property
    def is_cluster(self) -> bool:
        """Whether it is a cluster of servers."""
        return self._is_cluster

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> list[Piece | StoreError | None]:
        """Read values; an empty one is taken for none, as the server answers alike."""
        commands = [("GETRANGE", check_name(name), 0, max_bytes - 1) for name in names]
        return self._run(commands, lambda value: value or None)

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[StoreError | None]:
        """Write values."""
        # The packer is no option of a cluster's client.
        value_of = _joined if self._is_cluster else list
        commands = [("SET", check_name(name), value_of(blob)) for name, blob in items]
        return self._run(commands, lambda _: None)

    def exists(self, names: Sequence[str]) -> list[bool | StoreError]:
        """Tell which values there are."""
        return self._run([("EXISTS", check_name(name)) for name in names], bool)

    def delete(self, names: Sequence[str]) -> list[StoreError | None]:
        """Delete values; the server frees their memory in the background."""
        commands = [("UNLINK", check_name(name)) for name in names]
        return self._run(commands, lambda _: None)

    def _run(
        self, commands: Sequence[tuple[Any, ...]], convert: Callable[[Any], Any]
    ) -> list[Any]:
        """Run commands as one pipeline; an error of one is its answer."""
        failure = None
        try:
            pipeline = self._client().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            results = pipeline.execute(raise_on_error=False)
        except Exception as error:  # Of redis-py, of sockets, of names of hosts.
            failure = self._error_of(error)
        if failure is not None:
            raise failure  # Without the error, which may have the password.
        return [
            self._error_of(result) if isinstance(result, Exception) else convert(result)
            for result in results
        ]

    def _scan_all(self, match: str) -> Iterator[list[str]]:
        client = self._client()
        if not self._is_cluster:
            yield from _scan(functools.partial(client.scan, match=match))
            return
        for node in client.get_primaries():

            def scan(cursor: int, count: int, node: Any = node) -> Any:
                cursors, names = client.scan(
                    cursor, match=match, count=count, target_nodes=node
                )
                return cursors[node.name], names

            yield from _scan(scan)

    def list(self, folder: str) -> Iterator[list[str]]:
        """List values; of a cluster, of one node after the other."""
        match = f"{check_name(folder)}/*"  # A name has no characters that match others.
        try:
            yield from self._scan_all(match)
        except Exception as error:  # Of redis-py, of sockets, of names of hosts.
            failure = self._error_of(error)
        else:
            return
        raise failure  # Without the error, which may have the password.

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Tell when values were last used, to the second; a server by LFU does not."""
        try:
            pipeline = self._client().pipeline(transaction=False)
            for name in names:
                pipeline.execute_command("OBJECT", "IDLETIME", check_name(name))
            idle = pipeline.execute(raise_on_error=False)
        except Exception as error:
            raise self._error_of(error) from error
        if any(isinstance(each, Exception) for each in idle):
            return None
        now_s = int(time.time())
        return [0 if each is None else (now_s - each) * 1_000_000 for each in idle]

    def close(self) -> None:
        """Close all connections."""
        for client in list(self._clients):
            client.close()

    def _client(self) -> Any:
        """Give this thread's client; that of a cluster asks for its nodes at first.

        As it finds out about new nodes, it closes what other threads would be using.
        """
        if not hasattr(self._of_thread, "client"):
            client = self._of_thread.client = self._make_client()
            self._clients.add(client)
            if self._is_cluster:
                nodes = ((each.host, each.port) for each in client.get_nodes())
                self._known_nodes |= dict.fromkeys(nodes)
        return self._of_thread.client

    def _connect(self, url: str, options: dict[str, Any]) -> Any:
        """Make a client, of a cluster by any node that is known."""
        if not self._is_cluster:
            options = options | {"command_packer": _Packer()}
            return self._redis.Redis.from_url(url, **options)
        nodes = [self._redis.cluster.ClusterNode(*each) for each in self._known_nodes]
        return self._redis.RedisCluster.from_url(url, startup_nodes=nodes, **options)

    def _error_of(self, error: Exception) -> StoreError:
        known = self._redis.exceptions
        kind: ErrorKind = "other"
        if isinstance(error, known.OutOfMemoryError):
            kind = "full"
        elif isinstance(
            error,
            known.AuthenticationError | known.NoPermissionError | known.ReadOnlyError,
        ):
            kind = "denied"
        elif isinstance(
            error,
            known.ConnectionError
            | known.TimeoutError
            | OSError
            | UnicodeError
            # Of a cluster that is about to replace a node.
            | known.RedisClusterException
            | known.ClusterError
            | known.AskError
            | known.TryAgainError
            | known.MasterDownError,
        ):
            kind = "unreachable"
        message = self._place.hide(f"{type(error).__name__}: {error}")
        if isinstance(error, known.AskError) and not self._is_cluster:
            message += "; name a cluster by storage=redis+cluster://HOST:PORT"
        if kind != "full":
            # By now its name may stand for another server, as after a failover.
            self._forget_client()
        return StoreError(kind, message)

    def _forget_client(self) -> None:
        """Let go of this thread's client, at most once a second; the next connects."""
        if time.monotonic() < getattr(self._of_thread, "keep_until_s", 0.0):
            return
        self._of_thread.keep_until_s = time.monotonic() + _RECONNECT_S
        client = self._of_thread.__dict__.pop("client", None)
        if client is not None:
            self._clients.discard(client)
            client.close()


class _Packer:
    """Writes commands as the server reads them, large values in their own pieces.

    redis-py's takes a value as a whole: to join the pieces of a block takes longer than
    to send them.
    """

    def pack(self, command: str, *args: Any) -> list[Piece]:
        """Give the pieces of a command; its last argument may be a list of pieces."""
        words = [*command.split(), *args]
        last = words.pop()
        value = last if isinstance(last, list) else [_encoded(last)]
        lines = [b"*%d\r\n" % (len(words) + 1)]
        for word in map(_encoded, words):
            lines.append(b"$%d\r\n%b\r\n" % (len(word), word))
        lines.append(b"$%d\r\n" % sum(map(len, value)))
        pieces: list[Piece] = [b"".join(lines), *value, b"\r\n"]
        return pieces if isinstance(last, list) else [b"".join(pieces)]


def _first_node(url: str) -> str:
    """Return the URL of a cluster with its first node alone, as redis-py has it."""
    parts = urllib.parse.urlsplit(url.replace(_CLUSTER, "", 1))
    user, at, hosts = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}{hosts.partition(',')[0]}").geturl()


def _scan(scan: Callable[..., tuple[int, list[bytes]]]) -> Iterator[list[str]]:
    """Yield the names that a server has, a page at a time."""
    cursor = 0
    while True:
        cursor, names = scan(cursor, count=_PAGE)
        if names:
            yield [name.decode("ascii", "replace") for name in names]
        if cursor == 0:
            return


def _import() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.retry
    except ImportError as error:
        raise ImportError(
            f"Storage in Redis needs redis-py: {pip_install('redis')}"
        ) from error
    return redis


def _encoded(word: bytes | str | int) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _joined(blob: Blob) -> Piece:
    return blob[0] if len(blob) == 1 else b"".join(blob)
