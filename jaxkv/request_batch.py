"""The keys of many requests in a row, as one call takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys import join_keys, keys_from_foreign
from jaxkv.types import BlockKey

Requests = Iterable[Iterable[bytes]]


class RequestBatch(NamedTuple):
    """The keys of all requests in a row. R requests, n keys.

    Attributes:
        names: The n keys as they were given.
        keys: The same, brought to 32 bytes; the same list if all had them.
        offsets: R + 1. Request i has those from ``offsets[i]`` up to
            ``offsets[i + 1]``.
    """

    names: list[bytes]
    keys: list[BlockKey]
    offsets: list[int]


def flatten(requests: Requests) -> RequestBatch:
    """Put the keys of all requests in a row.

    Example:
        >>> flatten([[b"x" * 32, b"y" * 32], [], [b"x" * 32]]).offsets
        [0, 2, 2, 3]
    """
    each = [keys if isinstance(keys, list) else list(keys) for keys in requests]
    names = join_keys(each)
    offsets = list(accumulate(map(len, each), initial=0))
    return RequestBatch(names, keys_from_foreign(names), offsets)


def passing(batch: RequestBatch, passes: Sequence[bool]) -> RequestBatch:
    """Leave out the keys that do not pass."""
    before = list(accumulate(passes, initial=0))
    return RequestBatch(
        list(compress(batch.names, passes)),
        list(compress(batch.keys, passes)),
        [before[offset] for offset in batch.offsets],
    )


def cut(items: Any, offsets: Sequence[int]) -> list[Any]:
    """Cut a row of items into what belongs to each request."""
    return [items[start:stop] for start, stop in pairwise(offsets)]


def rows_of_each(flags: NDArray[np.bool_], offsets: Sequence[int]) -> list[list[int]]:
    """List the rows of each request whose flag is set."""
    rows = np.flatnonzero(flags)
    return cut(rows.tolist(), np.searchsorted(rows, offsets).tolist())
