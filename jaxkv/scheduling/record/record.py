"""Records the requests of an engine as a trace that `jaxkv plan` reads.

A file has one JSON object per line: a header, then one object per request:

    {"format": "jaxkv trace 1", "block_size": 16, ...}
    {"t": 12.345, "in": 100, "out": 30, "device": 32, "host": 16, "stop": "end_turn",
     "ids": [4711, 815, ...], "out_ids": [42, 99]}

Neither tokens nor keys are written: an id is a hash of a block's key with a random
secret that is not kept (`jaxkv.scheduling.record.keyed`). docs/sizing.md describes the
fields, and what a file reveals. A step only queues requests and never waits. A thread
writes them about twice a second, and drops and counts requests that it cannot write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import jax

from jaxkv._util import Resource, check_type, check_whole, parse_bytes, shown
from jaxkv._util.files import read_file, replace_file
from jaxkv._util.outage import OutageLog
from jaxkv.keys.packed import pack
from jaxkv.policies.facts import check_kind
from jaxkv.scheduling.record.keyed import SECRET_BYTES, hash_keys
from jaxkv.scheduling.record.trace_file import TraceFile
from jaxkv.types import STOPS, BlockKey, Stop

FORMAT = "jaxkv trace 1"
"""The `format` in a file's header."""

DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_MAX_FILES = 4
MIN_MAX_BYTES = 1 << 20
"""Enough for a request of 800,000 tokens in blocks of 16."""

MIN_KEY_BYTES = 16
"""The minimum length of a secret, so that it cannot be guessed."""

_WRITE_EVERY_S = 0.5
_MAX_QUEUED_BLOCKS = 1 << 18
_MAX_QUEUED_REQUESTS = 1 << 14
_WRITE_BYTES = 1 << 18
_IDS_PER_CALL = 1024  # Formatted while holding the GIL, for about 0.1 ms.
_CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger("jaxkv")
_Field = TypeVar("_Field")


class RecordStats(NamedTuple):
    """Counts of a recorder's requests."""

    num_written: int = 0  # Including files that were rotated and deleted.
    num_dropped: int = 0  # Not written because the disk was full or too slow.


class _Request(NamedTuple):
    """A request to write."""

    time_us: int  # When it began, since the recorder was made.
    keys: Sequence[BlockKey]  # The keys of prompt and output.
    input_tokens: int
    device_tokens: int | None  # Device hits; None if unknown.
    host_tokens: int | None  # Host hits in addition; None if unknown.
    kind: int | None = None
    output_tokens: int | None = None
    num_computed: int | None = None  # Tokens with KV, of prompt and output.
    stop: Stop | None = None


class TraceRecorder(Resource):
    """Writes the requests that an engine serves to a file, in a separate thread.

    A recorder serves one engine: pass it to `OffloadScheduler`, `PrefixStore` or an
    adapter. If several processes serve one model together, one of them records. When a
    recorder is closed, or the interpreter exits, requests that are still running are
    written with the fields known so far. A forked process records nothing.

    Args:
        path: The file; compressed if its name ends in ".gz". An existing file is kept
            as FILE.1. Only its owner can read it.
        max_bytes: Maximum bytes of a file, such as ``"256MiB"``.
        max_files: How many files to keep: FILE, FILE.1 and so on.
        key_file: A file with the secret of the hash, so that files of several engines
            can be replayed together; created if missing. None for a random secret that
            is not kept.
        clock: Returns seconds.

    Raises:
        OSError: A file cannot be written or read, or another process records to it.
        ValueError: A number is too small, or the secret too short.

    Attributes:
        path: The file.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "requests.jsonl")
        >>> with TraceRecorder(path, clock=lambda: 0.0) as recorder:
        ...     recorder.describe(block_size=4)
        ...     recorder.begin("one", [b"k" * 32], input_tokens=6)
        ...     recorder.finish("one", [b"k" * 32, b"l" * 32], 9, 8)
        >>> recorder.stats
        RecordStats(num_written=1, num_dropped=0)
        >>> path.read_text().splitlines()[1][:40]
        '{"t": 0.001, "in": 6, "out": 3, "ids": ['
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: str | SupportsIndex = DEFAULT_MAX_BYTES,
        max_files: int = DEFAULT_MAX_FILES,
        key_file: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_bytes = parse_bytes(max_bytes)
        if max_bytes < MIN_MAX_BYTES:
            raise ValueError(f"{max_bytes=} must be at least {MIN_MAX_BYTES}.")
        check_whole(1, max_files=max_files)
        check_type(Callable, "a function", clock=clock)
        self.path = os.fspath(path)
        secret = _read_secret(os.fspath(key_file)) if key_file is not None else None
        self._clock, self._start_s = clock, clock()
        self._last_us = 0
        self._open: dict[str, _Request] = {}
        self._writer = _Writer(
            self.path, max_bytes, max_files, secret or secrets.token_bytes(SECRET_BYTES)
        )
        self._finalizer = weakref.finalize(self, self._writer.close, self._open)

    @property
    def stats(self) -> RecordStats:
        """Counts of requests so far; any thread may read them."""
        return RecordStats(self._writer.num_written, self._writer.num_dropped)

    def describe(
        self, block_size: int, *, keys_per_id: int = 1, **facts: str | int | None
    ) -> None:
        """Describe the engine; call it once, before the first request.

        Args:
            block_size: Tokens per id.
            keys_per_id: Keys per id; the last of them is hashed.
            facts: More fields of each file's header.

        Raises:
            ValueError: The recorder already serves an engine.
        """
        if self._writer.facts:
            raise ValueError(
                f"the recorder of {shown(self.path)} already serves an engine: make "
                "another recorder with another file."
            )
        self._writer.keys_per_id = keys_per_id
        facts = {**facts, "device_kind": _device_kind()}
        self._writer.facts = {"block_size": block_size, **_without_none(facts)}
        # Now, so that the first request's step need not wait for the start.
        self._writer.start_thread()

    def begin(
        self,
        name: str,
        keys: Sequence[BlockKey],
        input_tokens: int,
        device_tokens: int | None = None,
        host_tokens: int | None = None,
        kind: int | None = None,
    ) -> None:
        """Record that a request begins.

        Args:
            name: The request's name, which is not written.
            keys: The keys of its blocks. The list is read later: it may only grow.
            input_tokens: Tokens of its prompt.
            device_tokens: Device hits in tokens; None without a lookup.
            host_tokens: Host hits in addition; None without a lookup.
            kind: Its kind, from 0 to 255, if it has one.
        """
        now_us = int(1e6 * (self._clock() - self._start_s))
        # Unique, so that times give the order of requests.
        self._last_us = max(now_us, self._last_us + 1)
        self._open[name] = _Request(
            self._last_us, keys, input_tokens, device_tokens, host_tokens, kind
        )

    def finish(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        num_tokens: int | None = None,
        num_computed: int | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Record that a request has finished or was aborted.

        Args:
            name: The request's name; nothing happens if it has not begun.
            keys: The keys of all its blocks, a list that may only grow; None if `begin`
                got it.
            num_tokens: Its tokens, prompt and generated; None if unknown.
            num_computed: The tokens that had KV; None if unknown.
            stop: Why it stopped, if known.
        """
        request = self._open.pop(name, None)
        if request is None:
            return
        if num_tokens is not None:
            num_tokens = max(num_tokens - request.input_tokens, 0)
        keys = request.keys if keys is None else keys
        ended: Any = {"output_tokens": num_tokens, "num_computed": num_computed}
        self._writer.put(request._replace(keys=keys, stop=stop, **ended))

    def flush(self) -> None:
        """Wait until all finished requests have been written or dropped."""
        self._writer.flush()

    def close(self) -> None:
        """Write all requests and close the file. Later requests are ignored.

        Waits for the disk for 10 s at most.
        """
        self._finalizer()


class _Writer:
    """The thread and its queue. They must not refer to the recorder, to let it end."""

    def __init__(
        self, path: str, max_bytes: int, max_files: int, secret: bytes
    ) -> None:
        # Fields about the engine in each file's header; empty before `describe`.
        self.facts: dict[str, str | int] = {}
        self.keys_per_id = 1
        self.num_written = self.num_dropped = 0
        self._path, self._secret = path, secret
        self._begun_unix_ms = int(1000 * time.time())
        self._file = TraceFile(path, max_bytes, max_files, self._header)
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        # Guards the attributes below; never held for long. Reentrant, as the garbage
        # collector may close a recorder at any time.
        self._changed = threading.Condition(threading.RLock())
        self._queue: list[_Request] = []
        self._num_blocks = 0
        self._num_refused = 0
        self._num_put = self._num_done = 0
        self._is_urgent = False
        self._is_closed = False
        # Dropped requests that the file does not mention yet; only for the thread.
        self._num_uncounted = 0
        fails = f"requests are not recorded to {path}"
        self._outage = OutageLog(_log, fails, f"requests are recorded to {path}")

    def start_thread(self) -> bool:
        """Start the thread unless it runs; return whether it runs. May be repeated."""
        with self._changed:
            if self._thread is None and self.facts:
                thread = threading.Thread(
                    target=self._run, name="jaxkv record", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # Such as at the limit of a container.
                    self._outage.begin(error)
                else:
                    self._thread = thread
            return self._thread is not None

    def put(self, request: _Request, *, is_last: bool = False) -> None:
        """Queue a request; drop it if the queue is full, except the last ones."""
        if os.getpid() != self._pid:
            return
        num_blocks = len(request.keys)
        with self._changed:
            if self._is_closed:
                return
            has_room = (
                self._num_blocks + num_blocks <= _MAX_QUEUED_BLOCKS
                and len(self._queue) < _MAX_QUEUED_REQUESTS
            )
            if has_room or is_last or not self._queue:
                self._queue.append(request)
                self._num_blocks += num_blocks
                self._num_put += 1
            else:
                self._num_refused += 1
            self._is_urgent |= 2 * self._num_blocks > _MAX_QUEUED_BLOCKS
            if self._is_urgent or len(self._queue) == 1:
                self._changed.notify_all()
        self.start_thread()

    def flush(self) -> None:
        """Wait until all queued requests have been written or dropped."""
        if os.getpid() != self._pid or not self.start_thread():
            return
        with self._changed:
            num_put = self._num_put
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_done >= num_put)

    def close(self, unfinished: dict[str, _Request]) -> None:
        """Write all queued and unfinished requests, and close the file."""
        for request in unfinished.values():
            self.put(request, is_last=True)
        unfinished.clear()
        if os.getpid() != self._pid:
            return  # The file belongs to the parent process.
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("%s is not closed: the disk is too slow.", self._path)

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                self._changed.wait_for(
                    lambda: self._is_urgent or self._is_closed, _WRITE_EVERY_S
                )
                self._is_urgent = False
            self._write_queue()
        self._end()

    def _end(self) -> None:
        """Write all queued requests, and close the file."""
        if self.facts:
            self._write_queue()
        try:
            self._file.close()
        except OSError as error:
            self._outage.begin(error.strerror)

    def _write_queue(self) -> None:
        """Write the queued requests."""
        with self._changed:
            queue, self._queue = self._queue, []
            num_refused, self._num_refused = self._num_refused, 0
        if num_refused:
            self._drop(num_refused, "the disk is too slow")
        requests: list[_Request] = []
        lines: list[bytes] = []
        for request in queue:
            requests.append(request)
            try:
                lines.append(self._line_of(request))
            except Exception as error:  # An invalid request must not stop an engine.
                self._drop(1, repr(error))
            if request is not queue[-1] and sum(map(len, lines)) < _WRITE_BYTES:
                continue
            if lines:
                self._write(lines)
            with self._changed:
                self._num_blocks -= sum(len(request.keys) for request in requests)
                self._num_done += len(requests)
                self._changed.notify_all()
            requests, lines = [], []

    def _write(self, lines: Sequence[bytes]) -> None:
        num = self._num_uncounted
        dropped = [_line({"dropped": num})] if num else []
        try:
            self._file.append(b"".join([*dropped, *lines]))
        except OSError as error:
            self._drop(len(lines), error.strerror or str(error))
        else:
            self.num_written += len(lines)
            self._num_uncounted = 0
            self._outage.end()

    def _drop(self, num: int, why: str) -> None:
        self.num_dropped += num
        self._num_uncounted += num
        self._outage.begin(why)

    def _header(self, num_before: int) -> bytes:
        key = hashlib.blake2b(b"jaxkv trace key", key=self._secret, digest_size=8)
        fields = {
            "format": FORMAT,
            **self.facts,
            "times": "ms",
            "lengths": "tokens",
            "began_unix_ms": self._begun_unix_ms,
            "key_id": key.hexdigest(),
            "part": num_before,
        }
        return _line(fields)

    def _line_of(self, request: _Request) -> bytes:
        # One invalid line would make the whole file unreadable.
        check_whole(0, input_tokens=request.input_tokens)
        check_kind(request.kind)
        if request.stop not in STOPS:
            raise ValueError(f"stop={shown(request.stop)} must be one of {STOPS}.")
        _, words = pack(request.keys)
        block_size = int(self.facts["block_size"])
        ids = hash_keys(words[self.keys_per_id - 1 :: self.keys_per_id], self._secret)
        num_prompt = request.input_tokens // block_size
        fields = {
            "t": request.time_us / 1000,
            "in": request.input_tokens,
            "out": request.output_tokens,
            "device": request.device_tokens,
            "host": request.host_tokens,
            "stop": request.stop,
            "kind": request.kind,
        }
        texts = [json.dumps(_without_none(fields), default=int)[:-1], ', "ids": ']
        texts += _as_list(ids[:num_prompt])
        if request.num_computed is not None:
            out_ids = ids[num_prompt : request.num_computed // block_size]
            if out_ids.size:
                texts += [', "out_ids": ', *_as_list(out_ids)]
        return "".join([*texts, "}\n"]).encode()


def _as_list(ids: Any) -> Iterator[str]:
    """Format numbers as a JSON list; let other threads run in between."""
    yield "["
    for start in range(0, len(ids), _IDS_PER_CALL):
        if start:
            yield ", "
        time.sleep(0)
        yield str(ids[start : start + _IDS_PER_CALL].tolist())[1:-1]
    yield "]"


def _device_kind() -> str | None:
    """Return what JAX calls this process's device; None if it has not started any."""
    # jax has no public name for this. To start a device here could take it from the
    # process that serves.
    from jax._src import xla_bridge

    started = xla_bridge.backends_are_initialized()
    return jax.devices()[0].device_kind if started else None


def _without_none(fields: Mapping[str, _Field | None]) -> dict[str, _Field]:
    return {name: field for name, field in fields.items() if field is not None}


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _read_secret(path: str) -> bytes:
    """Read the secret from a file; create the file if missing."""
    try:
        if not os.path.exists(path):
            # Another process may have made it meanwhile.
            secret = secrets.token_hex(32) + "\n"
            replace_file(path, secret.encode(), overwrite=False)
        content = read_file(path, 1 << 16, is_trusted=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a file name"
        raise OSError(
            getattr(error, "errno", None) or 0,
            f"cannot read the key for recorded ids from {shown(path)} ({why})",
        ) from None
    text = content.strip()
    if len(text) < MIN_KEY_BYTES:
        raise ValueError(
            f"the key file {shown(path)} has {len(text)} bytes and must have at least "
            f"{MIN_KEY_BYTES} that cannot be guessed: delete it to create a new one."
        )
    return hashlib.blake2b(text, digest_size=SECRET_BYTES).digest()
