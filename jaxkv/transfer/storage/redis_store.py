"""Redis or Valkey: the memory of another process, or of another machine."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from jaxkv._util import one_line, shown
from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage.store import (
    Blob,
    ErrorKind,
    Piece,
    StoreError,
    check_name,
    shown_url,
)
from jaxkv.transfer.storage.workers import Workers

_READ_CONNECTIONS = 4
_WRITE_CONNECTIONS = 2
_BATCH_BYTES = 4 << 20  # Of one pipeline, so that several connections share a call.
_MOST_AT_ONCE = 256
_PAGE = 4096
_CONNECT_S = 5.0
_ANSWER_S = 30.0


class RedisStore:
    """A store in Redis or Valkey: a value an object.

    Several calls go in one pipeline, and several pipelines over connections of their
    own, writes apart from reads.

    Args:
        url: As redis-py has it: ``redis://HOST:PORT/DB``, ``rediss://`` with TLS,
            ``unix://PATH``.

    Raises:
        ImportError: redis-py is missing.
        ValueError: The URL is malformed.
    """

    def __init__(self, url: str) -> None:
        self._redis = _import()
        self._url = shown_url(url)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "unix":
            if not parts.path:
                raise ValueError(
                    f"storage={shown(self._url)} must be unix:///PATH of a socket."
                )
        elif not re.fullmatch("/?[0-9]*/?", parts.path):
            # redis-py would take database 0.
            raise ValueError(
                f"storage={shown(self._url)} must be {parts.scheme}://HOST:PORT/DB, "
                "the DB a number."
            )
        try:
            self._client = self._redis.Redis.from_url(
                url,
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_ANSWER_S,
                # A connection may have been closed while it was not used.
                retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 1),
            )
            # It does not connect, but it looks at what the URL asks for.
            self._client.connection_pool.make_connection()
        except (ValueError, TypeError, self._redis.RedisError) as error:
            # The message may quote a part of the password.
            why = "cannot be read" if "@" in url else one_line(str(error)).rstrip(".")
            raise ValueError(f"storage={shown(self._url)}: {why}.") from None
        self._readers = Workers("jaxkv storage reader", _READ_CONNECTIONS)
        self._writers = Workers("jaxkv storage writer", _WRITE_CONNECTIONS)

    @property
    def url(self) -> str:
        """The place, without user and password."""
        return self._url

    def get(self, names: Sequence[str], max_bytes: int) -> list[Future[Piece | None]]:
        """Read values; an empty one is taken for none, as the server answers alike."""
        commands = [("GETRANGE", check_name(name), 0, max_bytes - 1) for name in names]
        at_once = max(1, _BATCH_BYTES // max_bytes)
        return self._run(self._readers, commands, at_once, lambda value: value or None)

    def put(self, items: Sequence[tuple[str, Blob]]) -> list[Future[None]]:
        """Write values."""
        commands = [("SET", check_name(name), _joined(blob)) for name, blob in items]
        largest = max((len(value) for *_, value in commands), default=1)
        at_once = max(1, _BATCH_BYTES // max(1, largest))
        return self._run(self._writers, commands, at_once, lambda _: None)

    def exists(self, names: Sequence[str]) -> list[Future[bool]]:
        """Tell which values there are."""
        commands = [("EXISTS", check_name(name)) for name in names]
        return self._run(self._readers, commands, _MOST_AT_ONCE, bool)

    def delete(self, names: Sequence[str]) -> list[Future[None]]:
        """Delete values; the server frees their memory in the background."""
        commands = [("UNLINK", check_name(name)) for name in names]
        return self._run(self._writers, commands, _MOST_AT_ONCE, lambda _: None)

    def _run(
        self,
        workers: Workers,
        commands: Sequence[tuple[Any, ...]],
        at_once: int,
        convert: Callable[[Any], Any],
    ) -> list[Future[Any]]:
        """Run commands, a pipeline for each `at_once` of them."""
        futures: list[Future[Any]] = [Future() for _ in commands]

        def run(first: int) -> None:
            part = slice(first, first + at_once)
            try:
                pipeline = self._client.pipeline(transaction=False)
                for command in commands[part]:
                    pipeline.execute_command(*command)
                results = pipeline.execute(raise_on_error=False)
            except Exception as error:
                results = [error] * len(futures[part])
            for future, result in zip(futures[part], results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(self._error_of(result))
                else:
                    future.set_result(convert(result))

        for first in range(0, len(commands), at_once):
            workers.submit(run, first)
        return futures

    def list(self, folder: str) -> Iterator[list[str]]:
        """List values."""
        match = f"{check_name(folder)}/*"  # A name has no characters that match others.
        cursor = 0
        try:
            while True:
                cursor, names = self._client.scan(cursor, match=match, count=_PAGE)
                if names:
                    yield [name.decode("ascii", "replace") for name in names]
                if cursor == 0:
                    return
        except Exception as error:  # Of redis-py, of sockets, of names of hosts.
            raise self._error_of(error) from error

    def times(self, names: Sequence[str]) -> Sequence[int] | None:
        """Tell when values were last used, to the second; a server by LFU does not."""
        try:
            pipeline = self._client.pipeline(transaction=False)
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
        """Let the threads end; they close their connections."""
        self._readers.close()
        self._writers.close()
        self._client.close()

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
            error, known.ConnectionError | known.TimeoutError | OSError | UnicodeError
        ):
            kind = "unreachable"
        return StoreError(kind, f"{type(error).__name__}: {error}")


def _import() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ImportError as error:
        raise ImportError(
            f"Storage in Redis needs redis-py: {pip_install('redis')}"
        ) from error
    return redis


def _joined(blob: Blob) -> Piece:
    return blob[0] if len(blob) == 1 else b"".join(blob)
