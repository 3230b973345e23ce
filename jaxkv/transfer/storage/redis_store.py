"""Redis or Valkey: the memory of another process, or of another machine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxkv._util import hint, one_line, shown
from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage.outage import Outages
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

    A call is one pipeline on a connection of its thread, per node of a cluster. A node
    that fails costs only its values, and is not called until it answers again. redis-py
    follows values that move. ImportError: redis-py is missing. ValueError: redis-py
    refuses an option of the URL.
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
        self._addresses = {(host, port or _PORT): None for host, port in url.nodes}
        self._text = _text_of_node(url.text) if url.is_cluster else url.text
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
        self.nodes = Outages(url.shown, self._wait_for_node)

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
                of_node = [commands[row] for row in rows]
                answers = self._answers(node, of_node, max_bytes)
            except Exception as error:  # From redis-py, sockets or name resolution.
                failure = self._failure_of(node, error)
                answers = [failure] * len(rows)
                states = self.nodes.states().values()
                if not any(states) if node else len(rows) == len(commands):
                    break
            for row, answer in zip(rows, answers, strict=True):
                results[row] = answer
        else:
            return results
        raise failure  # Without the error, which may contain the password.

    def _by_node(self, commands: Sequence[tuple[Any, ...]]) -> dict[Any, list[int]]:
        """Group the rows of commands by their node's name, None if it is unknown."""
        rows: dict[Any, list[int]] = {}
        for row, command in enumerate(commands):
            name, node = command[2 if command[0] == "OBJECT" else 1], None
            if self._store_url.is_cluster:
                with contextlib.suppress(Exception):  # The pipeline raises it again.
                    node = self._client().get_node_from_key(name).name
            rows.setdefault(node, []).append(row)
        return rows

    def _answers(
        self, node: str | None, commands: Sequence[tuple[Any, ...]], max_bytes: int
    ) -> list[Any]:
        """Run a pipeline on a node, or on the server or any nodes if it is None."""
        self._allow(max_bytes)
        client = self._client() if node is None else self._client_of(node)
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        errors = self._redis.exceptions
        moves = errors.MovedError, errors.AskError, errors.TryAgainError
        moved = [row for row, answer in enumerate(answers) if isinstance(answer, moves)]
        if node is not None and moved:
            new = self._answers(None, [commands[row] for row in moved], max_bytes)
            for row, answer in zip(moved, new, strict=True):
                answers[row] = answer
        return answers

    def _client_of(self, name: str) -> Any:
        """Return this thread's client of a node of the cluster."""
        self.nodes.check_up(name)
        client = self._client()
        return client.get_redis_connection(client.get_node(node_name=name))

    def _failure_of(self, node: str | None, error: Exception) -> StoreError:
        """Convert an error; a node that caused it is not called until it answers."""
        failure = self._error_of(error)
        if node is not None and failure.kind == "unreachable":
            self.nodes.begin(node, str(failure))
        return failure

    def _scan_all(self, match: str) -> Iterator[list[str]]:
        client = self._client()
        if not self._store_url.is_cluster:
            yield from self._scan(functools.partial(client.scan, match=match))
            return
        failures, nodes = [], [node.name for node in client.get_primaries()]
        for node in nodes:
            try:
                scan = functools.partial(self._client_of(node).scan, match=match)
                yield from self._scan(scan)
            except Exception as error:  # Once the other nodes have been listed.
                failures.append(self._failure_of(node, error))
        for failure in failures[:1]:  # The store is down only if all nodes are.
            if len(failures) == len(nodes):
                raise failure
            raise StoreError("other", str(failure), was_down=failure.was_down)

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
        sock = _BoundedSocket(connection._sock, self._thread, error)
        connection._sock = sock
        if self._store_url.is_cluster:
            sock.node = f"{connection.host}:{connection.port}"
            if sock.node != getattr(self._thread, "node_to_ask", None):
                self.nodes.check_up(sock.node)
            self.nodes.watch(sock)

    def _wait_for_node(self, name: str) -> None:
        """Wait for an answer of a node, if it is still in the cluster."""
        self._thread.node_to_ask = name
        client = self._client()
        node = client.get_node(node_name=name)
        if node is not None:
            client.get_redis_connection(node).ping()

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
        self.nodes.close()
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
        if self.nodes.down:
            self._forget_client()  # A replica may have taken its place.
        if not hasattr(self._thread, "client"):
            client = self._thread.client = self._connect()
            self._clients.add(client)
            if self._store_url.is_cluster:
                nodes = client.get_nodes()
                self._addresses |= {(node.host, node.port): None for node in nodes}
                self.nodes.names = frozenset(node.name for node in nodes)
        return self._thread.client

    def _connect(self) -> Any:
        """Make a client, of a cluster by any known node."""
        if not self._store_url.is_cluster:
            options = self._options | {"command_packer": _Packer()}
            return self._redis.Redis.from_url(self._text, **options)
        addresses, down = [*self._addresses], self.nodes.down
        up = [it for it in addresses if f"{it[0]}:{it[1]}" not in down] or addresses
        nodes = [self._redis.cluster.ClusterNode(*address) for address in up]
        bound = self._bound

        class Cluster(self._redis.RedisCluster):  # type: ignore[misc, name-defined]
            def on_connect(self, connection: Any) -> None:
                bound(connection)
                super().on_connect(connection)

        self._allow()
        text = _text_of_node(self._store_url.text, *up[0])
        return Cluster.from_url(text, startup_nodes=nodes, **self._options)

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


def _text_of_node(url: str, host: str = "", port: int = _PORT) -> str:
    """Return the URL of a cluster with one node, the first by default, for redis-py."""
    split = urllib.parse.urlsplit(url.replace("+cluster", "", 1))
    user, at, nodes = split.netloc.rpartition("@")
    node = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    netloc = node if host else nodes.partition(",")[0]
    return split._replace(netloc=f"{user}{at}{netloc}").geturl()


class _BoundedSocket:
    """A socket that receives at most what is allowed in a thread."""

    def __init__(self, sock: Any, thread: Any, error: type[Exception]) -> None:
        self._sock, self._thread, self._error = sock, thread, error
        self.node = ""  # Of a cluster.
        self.since_s = math.inf  # When the present call of the socket began.

    def recv(self, num_bytes: int) -> bytes:
        data: bytes = self._timed(self._sock.recv, num_bytes)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        num: int = self._timed(self._sock.recv_into, *args)
        self._count(num)
        return num

    def sendall(self, data: Piece) -> None:
        self._timed(self._sock.sendall, data)

    def end(self) -> None:
        """End the present call, which is in another thread."""
        with contextlib.suppress(OSError):  # TLS would wait for its own farewell.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        self.since_s = time.monotonic()
        try:
            return call(*args)
        finally:
            self.since_s = math.inf

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
