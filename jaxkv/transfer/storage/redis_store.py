"""Redis or Valkey: the memory of another process, or of another machine."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxkv._util import hint, one_line, shown
from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage.store import (
    Blob,
    ErrorKind,
    Lanes,
    Piece,
    StoreError,
    answers_of,
    check_name,
)
from jaxkv.transfer.storage.store_url import StoreUrl

_PORT = 6379
_PAGE = 4096
_CONNECT_S = 5.0
_ANSWER_S = 30.0
_MAX_ANSWER_BYTES = 4 << 20  # Of a call, in addition to the values that it asks for.
_RECONNECT_S = 1.0  # Between two connections of a thread that a server refuses.


class RedisStore:
    """A store in Redis or Valkey, one server or a cluster: a value per object.

    A call is one pipeline on a connection of its thread, per node of a cluster: a node
    that fails costs only its values. redis-py follows values that move. ImportError:
    redis-py is missing. ValueError: redis-py refuses an option of the URL.
    """

    lanes = Lanes(readers=4, writers=2, call_bytes=4 << 20)

    def __init__(self, url: StoreUrl) -> None:
        self._redis = _import()
        self._store_url = url
        # A connection may have been closed while idle, and a node of a cluster may
        # have handed on its values.
        tries = 3 if url.is_cluster else 1
        self._options: dict[str, Any] = {
            "socket_connect_timeout": _CONNECT_S,
            "socket_timeout": _ANSWER_S,
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), tries),
        }
        if not url.is_cluster:
            self._options["redis_connect_func"] = self._on_connect
        self._nodes = {(host, port or _PORT): None for host, port in url.nodes[1:]}
        self._text = _first_node(url.text) if url.is_cluster else url.text
        fault = ""
        try:
            # This checks the options without connecting.
            pool = self._redis.ConnectionPool.from_url(self._text, **self._options)
            pool.make_connection()
        except TypeError:
            # Its message names an option, which may be the end of a password.
            fault = "an option is unknown to redis-py"
            names = _option_names(pool.connection_class)
            hints = [hint(name, names) for name in url.options if name not in names]
            fault += next(filter(None, hints), "")
        except (ValueError, self._redis.RedisError) as error:
            fault = url.hide(one_line(str(error))).rstrip(".")
        if fault:  # Without the error, which may contain a part of the password.
            raise ValueError(f"storage={shown(url.shown)}: {fault}.".replace("?.", "?"))
        self._thread = threading.local()
        # Weak, so that clients of ended threads, such as listers, are closed.
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def url(self) -> str:
        return self._store_url.shown

    def get(
        self, names: Sequence[str], max_bytes: int
    ) -> list[Piece | StoreError | None]:
        """Read values; an empty one counts as absent: the server's answer is equal."""
        commands = [("GETRANGE", check_name(name), 0, max_bytes - 1) for name in names]

        def convert(value: Any) -> Piece | StoreError | None:
            if isinstance(value, bytes) and len(value) <= max_bytes:
                return value or None
            return StoreError("other", "the server's answer is no part of a value")

        return self._run(commands, convert, len(names) * max_bytes)

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[StoreError | None]:
        # A cluster's client does not take a packer.
        value_of = _joined if self._store_url.is_cluster else list
        commands = [("SET", check_name(name), value_of(blob)) for name, blob in items]
        return self._run(commands, lambda _: None)

    def exists(self, names: Sequence[str]) -> list[bool | StoreError]:
        return self._run([("EXISTS", check_name(name)) for name in names], bool)

    def delete(self, names: Sequence[str]) -> list[StoreError | None]:
        """Delete values; the server frees their memory in the background."""
        commands = [("UNLINK", check_name(name)) for name in names]
        return self._run(commands, lambda _: None)

    def _run(
        self,
        commands: Sequence[tuple[Any, ...]],
        convert: Callable[[Any], Any],
        max_bytes: int = 0,
    ) -> list[Any]:
        """Run commands; convert their results, or errors to a StoreError."""
        return [
            self._error_of(result) if isinstance(result, Exception) else convert(result)
            for result in self._results(commands, max_bytes)
        ]

    def _results(
        self, commands: Sequence[tuple[Any, ...]], max_bytes: int = 0
    ) -> list[Any]:
        """Run a pipeline per node; the error of a command or its node is its result."""
        results: list[Any] = [None] * len(commands)
        for node, rows in self._by_node(commands).items():
            try:
                self._allow(max_bytes)
                pipeline = self._client().pipeline(transaction=False)
                for row in rows:
                    pipeline.execute_command(*commands[row])
                answers = pipeline.execute(raise_on_error=False)
            except Exception as error:  # From redis-py, sockets or name resolution.
                answers = [self._error_of(error)] * len(rows)
                if node is None:
                    break
            for row, answer in zip(rows, answers, strict=True):
                results[row] = answer
        else:
            return results
        raise answers[0]  # Without the error, which may contain the password.

    def _by_node(self, commands: Sequence[tuple[Any, ...]]) -> dict[Any, list[int]]:
        """Group the rows of commands by node; all are None's if the node is unknown."""
        if not self._store_url.is_cluster:
            return {None: [*range(len(commands))]}
        rows: dict[Any, list[int]] = {}
        for row, command in enumerate(commands):
            name = command[2 if command[0] == "OBJECT" else 1]
            try:
                node = self._client().get_node_from_key(name).name
            except Exception:  # The pipeline raises it again.
                return {None: [*range(len(commands))]}
            rows.setdefault(node, []).append(row)
        return rows

    def _scan_all(self, match: str) -> Iterator[list[str]]:
        client = self._client()
        if not self._store_url.is_cluster:
            yield from self._scan(functools.partial(client.scan, match=match))
            return
        failures, nodes = [], client.get_primaries()
        for node in nodes:

            def scan(cursor: int, count: int, node: Any = node) -> Any:
                cursors, names = client.scan(
                    cursor, match=match, count=count, target_nodes=node
                )
                return cursors[node.name], names

            try:
                yield from self._scan(scan)
            except Exception as error:  # Once the other nodes have been listed.
                failures.append(self._error_of(error))
        if failures:  # The store is down only if all nodes are.
            is_down = len(failures) == len(nodes)
            raise failures[0] if is_down else StoreError("other", str(failures[0]))

    def _scan(
        self, scan: Callable[..., tuple[int, list[bytes]]]
    ) -> Iterator[list[str]]:
        """Yield the names that a server has, a page at a time."""
        cursor = 0
        while True:
            self._allow()
            cursor, names = scan(cursor, count=_PAGE)
            yield [name.decode("ascii", "replace") for name in names]
            if cursor == 0:
                return

    def _allow(self, max_bytes: int = 0) -> None:
        """Limit the bytes of the answers to this thread's next call."""
        self._thread.num_left = max_bytes + _MAX_ANSWER_BYTES

    def _on_connect(self, connection: Any) -> None:
        self._bound(connection)
        connection.on_connect()

    def _bound(self, connection: Any) -> None:
        """Make a connection refuse answers that are longer than allowed."""
        error = self._redis.exceptions.InvalidResponse
        connection._sock = _BoundedSocket(connection._sock, self._thread, error)

    def list(self, folder: str) -> Iterator[list[str]]:
        """List values, in a cluster one node after the other."""
        match = f"{check_name(folder)}/*"  # A name has no characters that match others.
        try:
            yield from self._scan_all(match)
        except Exception as error:
            failure = self._error_of(error)
        else:
            return
        raise failure  # Without the error, which may contain the password.

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Return when values were last used, to the second; None from an LFU server."""
        commands = [("OBJECT", "IDLETIME", check_name(name)) for name in names]
        idle = self._results(commands)
        for answer in idle:
            if isinstance(answer, StoreError):
                raise answer
            if isinstance(answer, Exception):
                return None
        now_s = int(time.time())
        return [0 if age_s is None else (now_s - age_s) * 1_000_000 for age_s in idle]

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the memory that values take in the server."""
        commands = [("MEMORY USAGE", check_name(name)) for name in names]
        return answers_of(self._run(commands, lambda num_bytes: num_bytes))

    def close(self) -> None:
        for client in list(self._clients):
            self._disconnect(client)

    def _disconnect(self, client: Any) -> None:
        if self._store_url.is_cluster:
            # Its `close` leaves the connections to the garbage collector.
            client.disconnect_connection_pools()
        client.close()

    def _client(self) -> Any:
        """Return this thread's client.

        A cluster's client that finds new nodes closes connections that other threads
        would be using.
        """
        if not hasattr(self._thread, "client"):
            client = self._thread.client = self._connect()
            self._clients.add(client)
            if self._store_url.is_cluster:
                self._nodes |= {
                    (node.host, node.port): None for node in client.get_nodes()
                }
        return self._thread.client

    def _connect(self) -> Any:
        """Make a client, of a cluster by any known node."""
        if not self._store_url.is_cluster:
            options = self._options | {"command_packer": _Packer()}
            return self._redis.Redis.from_url(self._text, **options)
        nodes = [self._redis.cluster.ClusterNode(*node) for node in self._nodes]
        bound = self._bound

        class Cluster(self._redis.RedisCluster):  # type: ignore[misc, name-defined]
            def on_connect(self, connection: Any) -> None:
                bound(connection)
                super().on_connect(connection)

        self._allow()
        return Cluster.from_url(self._text, startup_nodes=nodes, **self._options)

    def _error_of(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        errors = self._redis.exceptions
        kind: ErrorKind = "other"
        if isinstance(error, errors.OutOfMemoryError):
            kind = "full"
        elif isinstance(
            error,
            errors.AuthenticationError
            | errors.NoPermissionError
            | errors.ReadOnlyError,
        ):
            kind = "denied"
        elif isinstance(
            error,
            errors.ConnectionError
            | errors.TimeoutError
            | OSError
            | UnicodeError
            # From a cluster that is about to replace a node.
            | errors.RedisClusterException
            | errors.ClusterError
            | errors.AskError
            | errors.TryAgainError
            | errors.MasterDownError,
        ):
            kind = "unreachable"
        message = self._store_url.hide(f"{type(error).__name__}: {error}")
        if isinstance(error, errors.AskError) and not self._store_url.is_cluster:
            message += "; name a cluster by storage=redis+cluster://HOST:PORT"
        if kind != "full":
            # The name may lead to another server by now, as after a failover.
            self._forget_client()
        return StoreError(kind, message)

    def _forget_client(self) -> None:
        """Drop this thread's client, at most once a second, to connect again."""
        if time.monotonic() < getattr(self._thread, "keep_until_s", 0.0):
            return
        self._thread.keep_until_s = time.monotonic() + _RECONNECT_S
        client = self._thread.__dict__.pop("client", None)
        if client is not None:
            self._clients.discard(client)
            self._disconnect(client)


class _Packer:
    """Packs commands and leaves large values in pieces.

    redis-py's packer takes a value as a whole; joining the pieces of a block takes
    longer than sending them.
    """

    def pack(self, command: str, *args: Any) -> list[Piece]:
        """Return the pieces of a command; its last argument may be a list of pieces."""
        words = [*command.split(), *args]
        last = words.pop()
        value = last if isinstance(last, list) else [_encoded(last)]
        lines = [b"*%d\r\n" % (len(words) + 1)]
        for word in map(_encoded, words):
            lines.append(b"$%d\r\n%b\r\n" % (len(word), word))
        lines.append(b"$%d\r\n" % sum(map(len, value)))
        pieces: list[Piece] = [b"".join(lines), *value, b"\r\n"]
        return pieces if isinstance(last, list) else [b"".join(pieces)]


def _option_names(connection: type) -> list[str]:
    """Return the parameters of a class of connections."""
    inits = [kind.__init__ for kind in connection.__mro__]  # type: ignore[misc]
    return sorted({name for i in inits for name in inspect.signature(i).parameters})


def _first_node(url: str) -> str:
    """Return the URL of a cluster with its first node alone, as redis-py reads it."""
    split = urllib.parse.urlsplit(url.replace("+cluster", "", 1))
    user, at, nodes = split.netloc.rpartition("@")
    return split._replace(netloc=f"{user}{at}{nodes.partition(',')[0]}").geturl()


class _BoundedSocket:
    """A socket that receives at most what is allowed in a thread."""

    def __init__(self, sock: Any, thread: Any, error: type[Exception]) -> None:
        self._sock, self._thread, self._error = sock, thread, error

    def recv(self, num_bytes: int) -> bytes:
        data: bytes = self._sock.recv(num_bytes)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        num: int = self._sock.recv_into(*args)
        self._count(num)
        return num

    def _count(self, num: int) -> None:
        self._thread.num_left = getattr(self._thread, "num_left", 0) - num
        if self._thread.num_left < 0:
            raise self._error("the server's answer is longer than what was asked for")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


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
