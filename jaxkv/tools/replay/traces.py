"""Request traces: the blocks of each request's prompt, in order of arrival.

Two formats are read, plain or gzip-compressed, one JSON object per line; the first line
decides which:

    Mooncake     {"timestamp": 0, "input_length": 6758, "output_length": 500,
                  "hash_ids": [0, 1, 2]}
    normalised   {"t": 0, "in": 6758, "out": 500, "ids": [0, 1, 2]}

Times are in milliseconds, lengths in tokens. The output's may be left out, and there
may be a "stop", "tool_use" or "end_turn", which says why the request stopped. Equal ids
are equal blocks after equal prefixes; the numbers have no other meaning. In shapes, R
is the number of requests.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv._util import shown_name
from jaxkv.types import KEY_WORDS, STOPS, Stop

BLOCK_SIZE = 512
"""Tokens per block in the traces that Mooncake published."""

_FACTORS = np.arange(1, 2 * KEY_WORDS, 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
"""u32[8]. Odd, so that different ids differ in every word of their keys."""

_STOP = "stop"
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be read, with the file, the line and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace.

    Attributes:
        name: For display.
        ids: i32[num_block_refs]. The blocks of all requests, one request after another,
            numbered from 0 by first appearance.
        offsets: i64[R + 1]. Request r has ``ids[offsets[r]:offsets[r + 1]]``.
        time_ms: f64[R]. Arrival of each request.
        input_tokens: i64[R]. Length of each prompt, or None if unknown.
        block_size: Tokens per block, or None if unknown.
        num_unique_blocks: Number of different blocks.
        output_tokens: i64[R]. Tokens that each generated, -1 where that is unknown.
        stops: i8[R]. Why each stopped, as an index of `jaxkv.types.STOPS`.
    """

    name: str
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    time_ms: NDArray[np.float64]
    input_tokens: NDArray[np.int64] | None
    block_size: int | None
    num_unique_blocks: int
    output_tokens: NDArray[np.int64]
    stops: NDArray[np.int8]

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.offsets) - 1

    @property
    def num_block_refs(self) -> int:
        """Number of blocks of all requests, with repetitions."""
        return len(self.ids)

    @property
    def num_blocks(self) -> NDArray[np.int64]:
        """Blocks of each request: i64[R]."""
        return np.diff(self.offsets)


def keys_of(ids: NDArray[Any]) -> NDArray[np.uint32]:
    """Make keys of a trace's blocks.

    Args:
        ids: int[n]. The blocks.

    Returns:
        u32[n, 8]. Read-only, like all keys, so that one function is compiled.
    """
    keys = ids.astype(np.uint32)[:, None] * _FACTORS
    keys.flags.writeable = False
    return keys


def make_trace(
    name: str,
    requests: Iterable[Sequence[int]],
    time_ms: ArrayLike | None = None,
    input_tokens: ArrayLike | None = None,
    block_size: int | None = None,
    output_tokens: ArrayLike | None = None,
    stops: Iterable[Stop | None] | None = None,
) -> Trace:
    """Make a trace from requests with arbitrary block ids.

    Args:
        name: For display.
        requests: The block ids of each request.
        time_ms: f64[R]. Arrival of each; all at once if None.
        input_tokens: i64[R]. Length of each prompt, if known.
        block_size: Tokens per block, if known.
        output_tokens: i64[R]. Tokens that each generated, -1 where that is unknown;
            None if none is known.
        stops: Why each stopped; None if that is not known of any.

    Raises:
        ValueError: If there is no request with a block.

    Example:
        >>> trace = make_trace("two", [[70, 80], [70, 90, 60]])
        >>> trace.ids.tolist(), trace.offsets.tolist()
        ([0, 1, 0, 2, 3], [0, 2, 5])
        >>> trace.num_requests, trace.num_unique_blocks, trace.num_block_refs
        (2, 4, 5)
    """
    numbers: dict[int, int] = {}
    ids: list[int] = []
    offsets = [0]
    for request in requests:
        ids += [numbers.setdefault(block, len(numbers)) for block in request]
        offsets.append(len(ids))
    if not ids:
        raise ValueError(f"The trace {name!r} must have a request with a full block.")
    num_requests = len(offsets) - 1
    if output_tokens is None:
        output_tokens = np.full(num_requests, -1)
    if stops is None:
        stops = itertools.repeat(None, num_requests)
    return Trace(
        name=name,
        ids=np.asarray(ids, np.int32),
        offsets=np.asarray(offsets, np.int64),
        time_ms=np.zeros(len(offsets) - 1)
        if time_ms is None
        else np.asarray(time_ms, np.float64),
        input_tokens=None
        if input_tokens is None
        else np.asarray(input_tokens, np.int64),
        block_size=block_size,
        num_unique_blocks=len(numbers),
        output_tokens=np.asarray(output_tokens, np.int64),
        stops=np.array([STOPS.index(stop) for stop in stops], np.int8),
    )


def read_trace(path: str | pathlib.Path, block_size: int = BLOCK_SIZE) -> Trace:
    """Read a trace from a file, in either format.

    Only full blocks count: the id of a partial last block, as in Mooncake's files, is
    left out.

    Args:
        path: The file.
        block_size: Tokens per block, which the formats do not contain.

    Returns:
        The requests in the order of the file.

    Raises:
        TraceError: If the file or a line is malformed.
        OSError: If the file cannot be opened.
    """
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1.")
    path = pathlib.Path(path)
    read = list(_read_requests(path, block_size))
    requests = [request.ids for request in read]
    if not requests:
        raise TraceError(f"{shown_name(str(path))}: the file has no request")
    if not any(requests):
        raise TraceError(
            f"{shown_name(str(path))}: no request has a full block of "
            f"{block_size} tokens"
        )
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return make_trace(
        name,
        requests,
        [request.time_ms for request in read],
        [request.input_tokens for request in read],
        block_size,
        [request.output_tokens for request in read],
        [request.stop for request in read],
    )


class _Request(NamedTuple):
    time_ms: float
    input_tokens: int
    output_tokens: int
    ids: list[int]
    stop: Stop | None


class _Format(NamedTuple):
    """Names of the fields of a line."""

    time_ms: str
    input_tokens: str
    output_tokens: str
    ids: str


_FORMATS = (
    _Format("timestamp", "input_length", "output_length", "hash_ids"),
    _Format("t", "in", "out", "ids"),
)


class _BadLineError(Exception):
    """Why a line is not a request."""


def _read_requests(path: pathlib.Path, block_size: int) -> Iterator[_Request]:
    form: _Format | None = None
    number = 0
    try:
        for line in _open_lines(path):
            number += 1
            if "\0" in line:
                raise _BadLineError("is not UTF-8 text, but perhaps UTF-16")
            if line.isspace():
                continue
            fields = _parse_json(line)
            form = form or _detect_format(fields)
            yield _parse_request(fields, form, block_size)
    except _BadLineError as error:
        raise TraceError(f"{shown_name(str(path))}:{number}: {error}") from None
    except UnicodeDecodeError:
        raise TraceError(
            f"{shown_name(str(path))}:{number + 1}: is not UTF-8 text"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{shown_name(str(path))}:{number + 1}: broken gzip data ({error})"
        ) from None


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
            yield from text


def _parse_json(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise _BadLineError(f"is not JSON ({why})") from None
    if not isinstance(fields, dict):
        raise _BadLineError(f"must be a JSON object, not {_show(fields)}")
    return fields


def _detect_format(fields: dict[str, Any]) -> _Format:
    """Return the format with the most of these fields."""
    form = max(_FORMATS, key=lambda form: len(fields.keys() & set(form)))
    if not fields.keys() & set(form):
        known = " or ".join(", ".join(form) for form in _FORMATS)
        raise _BadLineError(f"no known format: the fields must be {known}")
    return form


def _parse_request(fields: dict[str, Any], form: _Format, block_size: int) -> _Request:
    may_lack = {form.output_tokens}
    missing = [name for name in form if name not in fields.keys() | may_lack]
    if missing:
        raise _BadLineError(f"{missing[0]!r} is missing")
    time_ms = fields[form.time_ms]
    # Larger ones would not be exact, nor could an int of any size be kept.
    if type(time_ms) not in (int, float) or not 0 <= time_ms < 1 << 53:
        raise _BadLineError(
            f"{form.time_ms!r} must be a number of milliseconds from 0 on, "
            f"not {_show(time_ms)}"
        )
    for name in (form.input_tokens, form.output_tokens):
        if name not in fields:
            continue
        if type(fields[name]) is not int or not 0 <= fields[name] < 1 << 53:
            raise _BadLineError(
                f"{name!r} must be a number of tokens from 0 on, "
                f"not {_show(fields[name])}"
            )
    ids = fields[form.ids]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _BadLineError(f"{form.ids!r} must be a list of ints, not {_show(ids)}")
    input_tokens = fields[form.input_tokens]
    num_full, rest = divmod(input_tokens, block_size)
    if len(ids) > num_full + (rest > 0):
        raise _BadLineError(
            f"{form.ids!r} has {len(ids)} blocks, too many for {input_tokens} tokens "
            f"in blocks of {block_size}; is the block size right?"
        )
    stop = fields.get(_STOP)
    if stop not in STOPS:
        raise _BadLineError(
            f"{_STOP!r} must be 'tool_use' or 'end_turn', not {_show(stop)}"
        )
    output_tokens = fields.get(form.output_tokens, -1)
    return _Request(float(time_ms), input_tokens, output_tokens, ids[:num_full], stop)


def _show(value: Any) -> str:
    """Format the beginning of a value as JSON."""
    text = "".join(itertools.islice(json.JSONEncoder().iterencode(value), 20))
    return text if len(text) <= 40 else f"{text[:40]}..."
