"""A machine that starts no thread for a while, as at the limit of a container."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def refused_threads(
    first: int = 0,
    num: float = float("inf"),
    error: type[Exception] = RuntimeError,
) -> Iterator[list[str]]:
    """Refuse `num` thread starts from the `first` on; yield the refused names."""
    start = threading.Thread.start
    refused: list[str] = []
    num_starts = 0

    def maybe_start(thread: threading.Thread) -> None:
        nonlocal num_starts
        number, num_starts = num_starts, num_starts + 1
        if first <= number < first + num:
            refused.append(thread.name)
            raise error("can't start new thread")
        start(thread)

    threading.Thread.start = maybe_start  # type: ignore[method-assign]
    try:
        yield refused
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
