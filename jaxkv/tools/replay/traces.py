"""Request traces: the blocks of each request's prompt, in order of arrival.

Files have one JSON object per line, plain or gzip-compressed. What the first line holds
decides the format; `_FORMATS` lists those that are read, and `_REFUSED` those that are
known to lack something. Lengths are in tokens. The output's may be left out, and there
may be a "stop", "tool_use" or "end_turn", and a "kind", from 0 to 255. Equal ids are
equal blocks after equal prefixes.

`TraceRecorder` writes jaxkv's format, with a first line about the file, and fields for
the blocks that a request's output filled and for its hits when it ran. In shapes, R is
the number of requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import pathlib
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv._util import shown, shown_name
from jaxkv.policies.facts import MAX_KIND
from jaxkv.scheduling.record.record import FORMAT
from jaxkv.types import KEY_WORDS, STOPS, Stop

BLOCK_SIZE = 512
"""Tokens per block in the traces that Mooncake published."""

_FACTORS = np.arange(1, 2 * KEY_WORDS, 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
"""u32[8]. Odd, so that different ids differ in every word of their keys."""

_STOP, _KIND = "stop", "kind"
# Fields that recorded lines have besides.
_OUT_IDS, _DEVICE, _HOST = "out_ids", "device", "host"
_GZIP_MAGIC = b"\x1f\x8b"


OnCount: TypeAlias = Callable[[int, int], None]
"""Called with the number of requests that are done, and of all."""

_REQUESTS_PER_REPORT = 256
_MAX_TOKENS = 1 << 30  # Of a request; sums of pairs of more would not fit int64.
_MAX_LETTERS = 1 << 26  # Of a line; ten million tokens need a fifth.
_MAX_HASH_DIGITS = 130  # Of a hash of 512 bits.
_MAX_NUMBER = (1 << 53) - 1  # Of other things, so that a float is exact.


class TraceError(ValueError):
    """A trace that cannot be read, with the file, the line and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The recorded run that a trace comes from; None for what is not known of it."""

    # i64[R]. Tokens that each request found on the device, -1 where unknown.
    device_tokens: NDArray[np.int64]
    # i64[R]. Tokens loaded from the host, -1 where unknown.
    host_tokens: NDArray[np.int64]
    num_lost: int = 0  # Requests missing from the files
    notes: tuple[str, ...] = ()  # What else is not as it should be, each in a sentence
    policy: str | None = None  # Its cache policy, if there was one
    host_blocks: int | None = None
    device_blocks: int | None = None
    device_kind: str | None = None  # What JAX calls its device

    @property
    def num_device_hit_tokens(self) -> int:
        return int(np.maximum(self.device_tokens, 0).sum())

    @property
    def num_host_hit_tokens(self) -> int:
        return int(np.maximum(self.host_tokens, 0).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace."""

    name: str  # For display
    # i32[n]. The blocks of all requests, one request after another, numbered from 0 by
    # first appearance.
    ids: NDArray[np.int32]
    # i64[R + 1]. Request r has ``ids[offsets[r]:offsets[r + 1]]``.
    offsets: NDArray[np.int64]
    time_ms: NDArray[np.float64]  # f64[R]. Arrival of each request.
    input_tokens: NDArray[np.int64]  # i64[R]. Length of each prompt.
    block_size: int  # Tokens per block
    num_unique_blocks: int  # Number of different blocks
    # i64[R]. Tokens that each generated, -1 where that is unknown.
    output_tokens: NDArray[np.int64]
    # i8[R]. Why each stopped, as an index of `jaxkv.types.STOPS`.
    stops: NDArray[np.int8]
    # i64[R]. How many of each request's blocks, the last ones, it did not ask for, as
    # its output filled them.
    num_output_blocks: NDArray[np.int64]
    kinds: NDArray[np.int16]  # i16[R]. The kind of each, -1 for none.
    # What a recorded trace says of its run; None for others
    recording: Recording | None = None

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_block_refs(self) -> int:
        return int(self.num_asked.sum())

    @property
    def num_blocks(self) -> NDArray[np.int64]:
        """Blocks of each request, those that its output filled among them: i64[R]."""
        return np.diff(self.offsets)

    @property
    def num_asked(self) -> NDArray[np.int64]:
        """Blocks that each request asks for, the first ones of its blocks: i64[R]."""
        return self.num_blocks - self.num_output_blocks

    def blocks_of(self, request: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    def tokens_of(self, hits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn blocks found per request (i64[R]) into tokens."""
        return np.minimum(hits * self.block_size, self.input_tokens)

    def requests(
        self, on_progress: OnCount = lambda done, total: None
    ) -> Iterator[int]:
        """Yield the number of each request; report progress on the way."""
        for number in range(self.num_requests):
            yield number
            if number % _REQUESTS_PER_REPORT == 0:
                on_progress(number, self.num_requests)
        on_progress(self.num_requests, self.num_requests)


def keys_of(ids: NDArray[Any]) -> NDArray[np.uint32]:
    """Make keys of a trace's blocks.

    Returns u32[n, 8]. Read-only, like all keys, so that one function is compiled.
    Shapes: ids: int[n].
    """
    keys = ids.astype(np.uint32)[:, None] * _FACTORS
    keys.flags.writeable = False
    return keys


def make_trace(
    name: str,
    requests: Iterable[Sequence[int]],
    time_ms: ArrayLike | None = None,
    input_tokens: ArrayLike | None = None,
    block_size: int = BLOCK_SIZE,
    output_tokens: ArrayLike | None = None,
    stops: Iterable[Stop | None] | None = None,
    num_output_blocks: ArrayLike | None = None,
    recording: Recording | None = None,
    kinds: ArrayLike | None = None,
) -> Trace:
    """Make a trace from requests with arbitrary block ids.

    Without `input_tokens`, a prompt has one token after its blocks.

    Shapes: time_ms: f64[R]; input_tokens: i64[R]; output_tokens: i64[R];
    num_output_blocks: i64[R]; kinds: i16[R], -1 for none.

    >>> trace = make_trace("two", [[70, 80], [70, 90, 60]])
    >>> trace.ids.tolist(), trace.offsets.tolist()
    ([0, 1, 0, 2, 3], [0, 2, 5])
    >>> trace.num_requests, trace.num_unique_blocks, trace.num_block_refs
    (2, 4, 5)
    """
    packed = [_packed(request) for request in requests]
    offsets = np.cumsum([0, *map(len, packed)])
    ids, num_unique = _number(packed)
    if not num_unique:
        raise ValueError(f"The trace {name!r} must have a request with a full block.")

    def filled(values: ArrayLike | None, default: ArrayLike) -> NDArray[np.int64]:
        array = np.empty(len(packed), np.int64)
        array[:] = default if values is None else values
        return array

    output_blocks = filled(num_output_blocks, 0)
    num_asked = np.diff(offsets) - output_blocks
    return Trace(
        name=name,
        ids=ids,
        offsets=offsets,
        time_ms=np.asarray(
            np.zeros(len(packed)) if time_ms is None else time_ms, float
        ),
        input_tokens=filled(input_tokens, num_asked * block_size + (num_asked > 0)),
        block_size=block_size,
        num_unique_blocks=num_unique,
        output_tokens=filled(output_tokens, -1),
        stops=np.array(
            [STOPS.index(stop) for stop in stops or [None] * len(packed)], np.int8
        ),
        num_output_blocks=output_blocks,
        kinds=filled(kinds, -1).astype(np.int16),
        recording=recording,
    )


def _packed(ids: Sequence[int]) -> Sequence[int]:
    """Keep ids in 8 bytes each, if they are so small; a list takes five times that."""
    try:
        return array("q", ids)
    except OverflowError:
        return ids


def _number(requests: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], int]:
    """Number the blocks of requests by first appearance.

    Returns i32[n]. The blocks of all requests in a row; and how many different ones.
    """
    is_packed = all(isinstance(request, array) for request in requests)
    dtype = np.dtype(np.int64 if is_packed else object)
    arrays = [np.asarray(request, dtype) for request in requests]
    flat = np.concatenate([np.zeros(0, dtype), *arrays])
    _, firsts, ids = np.unique(flat, return_index=True, return_inverse=True)
    ranks = np.empty(len(firsts), np.int32)
    ranks[np.argsort(firsts)] = np.arange(len(firsts), dtype=np.int32)
    return ranks[ids], len(firsts)


def read_trace(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    block_size: int | None = None,
) -> Trace:
    """Read a trace from a file, in either format, or from several recorded ones.

    Only full blocks count. Requests are in the order of the file, or recorded ones by
    their times.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1.")
    many = [path] if isinstance(path, str | os.PathLike) else list(path)
    paths = [pathlib.Path(path) for path in many]
    files = [_read_part(path, block_size) for path in paths]
    shown_paths = shown_name(", ".join(map(str, paths)))
    recording = None
    requests = files[0].requests
    if len(files) > 1 or files[0].header is not None:
        requests, recording = _join(paths, files)
    size = files[0].block_size
    if not requests:
        raise TraceError(f"{shown_paths}: the file has no request")
    if not any(request.ids for request in requests):
        raise TraceError(f"{shown_paths}: no request has a full block of {size} tokens")
    return make_trace(
        paths[0].name.removesuffix(".gz").removesuffix(".jsonl"),
        ([*request.ids, *request.out_ids] for request in requests),
        [request.time_ms for request in requests],
        [request.input_tokens for request in requests],
        size,
        [request.output_tokens for request in requests],
        [request.stop for request in requests],
        [len(request.out_ids) for request in requests],
        recording,
        [request.kind for request in requests],
    )


class _Header(NamedTuple):
    """The first line of a recorded file."""

    block_size: int  # Tokens per block
    began_unix_ms: int  # The moment that times count from
    key_id: str  # Which secret the ids are from
    part: int  # How many files of the run came before
    facts: dict[str, Any]  # What else there is


@dataclasses.dataclass
class _Part:
    """A file as it was read."""

    block_size: int  # Tokens per block
    header: _Header | None = None  # What it says of itself; None if it was not recorded
    requests: list[_Request] = dataclasses.field(default_factory=list)
    num_lost: int = 0  # Requests missing from it
    is_torn: bool = False  # Whether its last line is not whole


def _join(
    paths: Sequence[pathlib.Path], files: Sequence[_Part]
) -> tuple[list[_Request], Recording]:
    """Merge the requests of recorded files in the order of their times."""
    first, headers = files[0].header, []
    for path, part in zip(paths, files, strict=True):
        name, header = shown_name(str(path)), part.header
        if header is None or first is None:
            plain = name if header is None else shown_name(str(paths[0]))
            raise TraceError(
                f"{plain}: was not recorded by jaxkv, and only files that were can be "
                "replayed together"
            )
        if header.block_size != first.block_size:
            raise TraceError(
                f"{name}: was recorded in blocks of {header.block_size} tokens, and "
                f"{shown_name(str(paths[0]))} in blocks of {first.block_size}"
            )
        if header.key_id != first.key_id:
            raise TraceError(
                f"{name}: has ids of another secret than {shown_name(str(paths[0]))}: "
                "replay the files of each run by themselves, and record with "
                "record_key_file what is to be replayed together"
            )
        if header in headers:
            raise TraceError(f"{name}: is there twice")
        headers.append(header)
    start_ms = min(header.began_unix_ms for header in headers)
    requests = [
        request._replace(time_ms=request.time_ms + (header.began_unix_ms - start_ms))
        for header, part in zip(headers, files, strict=True)
        for request in part.requests
    ]
    requests.sort(key=lambda request: request.time_ms)
    facts = {
        name: headers[0].facts.get(name)
        for name in ("policy", "host_blocks", "device_blocks", "device_kind")
        if len({header.facts.get(name) for header in headers}) == 1
    }
    return requests, Recording(
        np.array([request.device_tokens for request in requests], np.int64),
        np.array([request.host_tokens for request in requests], np.int64),
        sum(part.num_lost for part in files),
        tuple(_notes(paths, files, headers)),
        **facts,
    )


def _notes(
    paths: Sequence[pathlib.Path], files: Sequence[_Part], headers: Sequence[_Header]
) -> Iterator[str]:
    """Yield notes on incomplete recordings."""
    for path, part in zip(paths, files, strict=True):
        if part.is_torn:
            yield (
                f"{shown_name(str(path))} ends within a line, which was left out: it "
                "is still being written, or its engine was killed."
            )
    runs: dict[int, set[int]] = {}
    for header in headers:
        runs.setdefault(header.began_unix_ms, set()).add(header.part)
    for numbers in runs.values():
        num_absent = max(numbers) - min(numbers) + 1 - len(numbers)
        if num_absent:
            yield (
                f"{num_absent} of the files between the first and the last one "
                f"{'is' if num_absent == 1 else 'are'} missing."
            )


class _Request(NamedTuple):
    time_ms: float
    input_tokens: int
    output_tokens: int
    ids: Sequence[int]
    stop: Stop | None
    kind: int = -1
    out_ids: Sequence[int] = ()
    device_tokens: int = -1
    host_tokens: int = -1


class _Format(NamedTuple):
    """The names of a format's fields, and what is not the same in all formats."""

    name: str
    time: str
    input_tokens: str
    output_tokens: str
    ids: str
    block_size: int | str = BLOCK_SIZE  # Tokens per block, or the field that says it.
    time_unit: str = "milliseconds"
    marks: tuple[str, ...] = ()  # Some field that tells it from formats before it.

    @property
    def needed(self) -> tuple[str, str, str]:
        """The fields without which a line is not of this format."""
        return self.time, self.input_tokens, self.ids


_JAXKV = _Format("jaxkv", "t", "in", "out", "ids")
_LENGTHS = "input_length", "output_length", "hash_ids"
_FORMATS = (
    _Format("Mooncake", "timestamp", *_LENGTHS),
    _JAXKV,
    _Format(
        *("Qwen-Bailian", "timestamp", *_LENGTHS, 16, "seconds"),
        marks=("chat_id", "parent_chat_id", "turn"),
    ),
    _Format(
        *("LMCache's lookup log", "timestamp", "seq_len", "output_length"),
        *("chunk_hashes", "chunk_size", "seconds"),
        marks=("chunk_hashes",),
    ),
)
_TEXTS = (
    "has texts and no blocks, which depend on the tokenizer; docs/sizing.md#prompts-as-"
    "texts shows how to make a trace of them"
)
_NO_BLOCKS = "has lengths and no blocks: which prompts share a prefix is not known"
# By a field of the first line: what is known of such a file.
_REFUSED = {
    "ContextTokens": f"Azure's LLM inference trace {_NO_BLOCKS}",
    "num_prefill_tokens": f"this trace {_NO_BLOCKS}",
    "turns": f"a file of sessions (AIPerf, inference-perf) {_TEXTS}",
    "delay": "a session without timestamps (AIPerf) does not say when a turn comes: "
    "that depends on the answers before it",
    "requests": f"an AIBrix workload {_TEXTS}",
    **dict.fromkeys(("messages", "body", "request"), f"an OpenAI request log {_TEXTS}"),
    **dict.fromkeys(("prompt", "text_input", "text"), f"this file {_TEXTS}"),
}


class _BadLineError(Exception):
    """Why a line is not a request."""


def _read_part(path: pathlib.Path, block_size: int | None) -> _Part:
    part = _Part(block_size or BLOCK_SIZE)
    form: _Format | None = None
    start_ms: float | None = None
    name, number, line = shown_name(str(path)), 0, ""
    try:
        for line in _open_lines(path):
            number += 1
            if "\0" in line:
                raise _BadLineError("is not UTF-8 text, but perhaps UTF-16")
            if line.isspace():
                continue
            fields = _parse_json(line, is_first=form is None)
            if form is None and "format" in fields:
                part.header = _parse_header(fields, block_size)
                part.block_size = part.header.block_size
                form = _JAXKV
                continue
            if part.header is not None and "dropped" in fields:
                part.num_lost += _parse_count(fields, "dropped", "requests")
                continue
            if form is None:
                form = _detect_format(fields)
                part.block_size = block_size or _own_block_size(fields, form)
            request = _parse_request(fields, form, part.block_size)
            if form.time_unit == "seconds":  # Perhaps since 1970.
                start_ms = request.time_ms if start_ms is None else start_ms
                request = request._replace(time_ms=request.time_ms - start_ms)
            part.requests.append(request)
    except _BadLineError as error:
        if part.header is None or line.endswith("\n"):
            raise TraceError(f"{name}:{number}: {error}") from None
        part.is_torn = True
    except UnicodeDecodeError:
        raise TraceError(f"{name}:{number + 1}: is not UTF-8 text") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if part.header is None or not isinstance(error, EOFError):
            raise TraceError(
                f"{name}:{number + 1}: broken gzip data ({error})"
            ) from None
        part.is_torn = True
    return part


def _open_lines(path: pathlib.Path) -> Iterator[str]:
    with path.open("rb") as file:
        magic = file.read(len(_GZIP_MAGIC))
        file.seek(0)
        if path.suffix == ".gz" and magic not in (_GZIP_MAGIC, b""):
            raise TraceError(
                f"{shown_name(str(path))}: is not gzip data, though its name ends in "
                ".gz"
            )
        data = gzip.GzipFile(fileobj=file) if magic == _GZIP_MAGIC else file
        with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
            # A few bytes of gzip data can be a line of any length.
            for number in itertools.count(1):
                line = text.readline(_MAX_LETTERS)
                if len(line) == _MAX_LETTERS and not line.endswith("\n"):
                    raise TraceError(
                        f"{shown_name(str(path))}:{number}: has more than "
                        f"{_MAX_LETTERS} characters"
                    )
                if not line:
                    return
                yield line


def _parse_json(line: str, *, is_first: bool) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        for name, reason in _REFUSED.items() if is_first else ():
            if name in line.split(","):  # The header of a table.
                raise _BadLineError(reason) from None
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise _BadLineError(f"is not JSON ({why})") from None
    if not isinstance(fields, dict):
        raise _BadLineError(f"must be a JSON object, not {_show(fields)}")
    return fields


def _detect_format(fields: dict[str, Any]) -> _Format:
    """Return the format of which a line has most fields, and a mark if it has marks."""
    names = fields.keys()
    fitting = [form for form in _FORMATS if not form.marks or names & set(form.marks)]
    form = max(reversed(fitting), key=lambda form: len(names & set(form.needed)))
    if names >= set(form.needed):
        return form
    for name, reason in _REFUSED.items():
        if name in fields:
            raise _BadLineError(reason)
    if names & set(form.needed):
        return form  # The parser names the missing field.
    formats = "; ".join(f"{form.name}: {', '.join(form.needed)}" for form in _FORMATS)
    raise _BadLineError(f"no known format, whose fields are ({formats})")


def _own_block_size(fields: dict[str, Any], form: _Format) -> int:
    if isinstance(form.block_size, int):
        return form.block_size
    return max(_parse_count(fields, form.block_size, "tokens"), 1)


def _parse_request(fields: dict[str, Any], form: _Format, block_size: int) -> _Request:
    if missing := [name for name in form.needed if name not in fields]:
        raise _BadLineError(f"{missing[0]!r} is missing")
    time = fields[form.time]
    # Larger ones would not be exact, nor could an int of any size be kept.
    if type(time) not in (int, float) or not 0 <= time <= _MAX_NUMBER:
        raise _BadLineError(
            f"{form.time!r} must be a number of {form.time_unit} from 0 to "
            f"{_MAX_NUMBER}, not {_show(time)}"
        )
    input_tokens = _parse_count(fields, form.input_tokens, "tokens")
    output_tokens = _parse_count(fields, form.output_tokens, "tokens", -1)
    ids = _parse_ids(fields, form.ids)
    num_full, rest = divmod(input_tokens, block_size)
    # A recorded request may have blocks that nobody can share, at its end.
    too = "many" if len(ids) > num_full + (rest > 0) else ""
    if len(ids) < num_full and form is not _JAXKV:
        too = "few"
    if too:
        raise _BadLineError(
            f"{form.ids!r} has {len(ids)} blocks, too {too} for {input_tokens} tokens "
            f"in blocks of {block_size}; is the block size right?"
        )
    stop = fields.get(_STOP)
    if stop not in STOPS:
        raise _BadLineError(
            f"{_STOP!r} must be 'tool_use' or 'end_turn', not {_show(stop)}"
        )
    time_ms = float(time) * (1000 if form.time_unit == "seconds" else 1)
    kind = _parse_count(fields, _KIND, "kinds", -1)
    if kind > MAX_KIND:
        raise _BadLineError(f"{_KIND!r} must be at most {MAX_KIND}, not {kind}")
    request = _Request(
        time_ms, input_tokens, output_tokens, _packed(ids[:num_full]), stop, kind
    )
    if form is not _JAXKV:
        return request
    out_ids = _parse_ids(fields, _OUT_IDS) if _OUT_IDS in fields else []
    num_more = (input_tokens + max(output_tokens, 0)) // block_size - num_full
    if len(out_ids) > num_more or (out_ids and len(ids) < num_full):
        raise _BadLineError(
            f"{_OUT_IDS!r} has {len(out_ids)} blocks, too many for {input_tokens} + "
            f"{max(output_tokens, 0)} tokens in blocks of {block_size}, of which "
            f"{form.ids!r} has {len(ids)}"
        )
    return request._replace(
        out_ids=_packed(out_ids),
        device_tokens=_parse_count(fields, _DEVICE, "tokens", -1),
        host_tokens=_parse_count(fields, _HOST, "tokens", -1),
    )


def _parse_ids(fields: dict[str, Any], name: str) -> list[int]:
    ids = fields[name]
    if isinstance(ids, list) and set(map(type, ids)) == {str}:
        with contextlib.suppress(ValueError):  # Hashes in hexadecimal digits.
            return [int(text[:_MAX_HASH_DIGITS], 16) for text in ids]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _BadLineError(f"{name!r} must be a list of ints, not {_show(ids)}")
    return ids


def _parse_count(
    fields: dict[str, Any], name: str, unit: str, default: int | None = None
) -> int:
    """Read a number of tokens, or of other things; the default if it is absent."""
    if default is not None and name not in fields:
        return default
    count = fields.get(name)
    max_count = _MAX_TOKENS if unit == "tokens" else _MAX_NUMBER
    if type(count) is not int or not 0 <= count <= max_count:
        raise _BadLineError(
            f"{name!r} must be a number of {unit} from 0 to {max_count}, not "
            f"{_show(count)}"
        )
    return count


def _parse_header(fields: dict[str, Any], block_size: int | None) -> _Header:
    if fields["format"] != FORMAT:
        raise _BadLineError(
            f"'format' is {_show(fields['format'])}; this version of jaxkv reads "
            f"{_show(FORMAT)}"
        )
    own_size = _parse_count(fields, "block_size", "tokens")
    if not own_size or block_size not in (None, own_size):
        raise _BadLineError(
            f"was recorded in blocks of {own_size} tokens, not of {shown(block_size)}"
        )
    for name in ("host_blocks", "device_blocks"):
        if fields.get(name) is not None:
            _parse_count(fields, name, "blocks")
    for name in ("policy", "device_kind"):
        if not isinstance(value := fields.get(name), str | None):
            raise _BadLineError(f"{name!r} must be a name, not {_show(value)}")
        fields[name] = value and shown_name(value)
    return _Header(
        own_size,
        _parse_count(fields, "began_unix_ms", "milliseconds", 0),
        str(fields.get("key_id")),
        _parse_count(fields, "part", "files", 0),
        fields,
    )


def _show(value: Any) -> str:
    """Format the beginning of a value as JSON."""
    text = "".join(itertools.islice(json.JSONEncoder().iterencode(value), 20))
    return text if len(text) <= 40 else f"{text[:40]}..."
