"""Files that are read or written whole, and summed along the way.

What was just read is still in the caches of the CPU: to sum it there takes a third of
the time that it takes later. And as a file is one call without the lock of the
interpreter, threads that do this rarely wait for one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from jaxkv.native.compiling import compiled_without_lock
from jaxkv.native.xxh3 import (
    LEAST_BYTES,
    NUM_LANES,
    add_blocks,
    begin,
    finish,
)

# Of 128 KiB to 16 MiB what was fastest: most fits into the second cache of the CPU.
_CHUNK_BYTES = 256 << 10

# As POSIX has them, where an offset has 64 bits.
_MOVE = types.int64(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _MOVE)
_pwrite = types.ExternalFunction("pwrite", _MOVE)


def read_summed(
    file: int, data: NDArray[np.uint8], start: int
) -> tuple[int, int | None]:
    """Read a file from its beginning; other threads may run meanwhile.

    Args:
        file: A descriptor.
        data: u8[n]. Written.
        start: Where what is summed begins.

    Returns:
        Bytes that were read, fewer where the file ends or at an error, which a further
        attempt tells; and the XXH3-64 of those from `start` on, None if they are less
        than `LEAST_BYTES`.
    """
    num_bytes, total = _read(file, data, start)
    return num_bytes, total if num_bytes - start >= LEAST_BYTES else None


def write_summed(
    file: int, data: NDArray[np.uint8], offset: int
) -> tuple[int, int | None]:
    """Write to a file; other threads may run meanwhile.

    Args:
        file: A descriptor.
        data: u8[n]. Contiguous.
        offset: Where in the file it goes.

    Returns:
        Bytes that were written, fewer at an error, which a further attempt tells; and
        the XXH3-64 of `data`, None if not all was written, or less than `LEAST_BYTES`.
    """
    view = data.view()
    view.flags.writeable = False  # Else it would be compiled for both.
    num_bytes, total = _write(file, view, offset)
    is_summed = num_bytes == len(data) >= LEAST_BYTES
    return num_bytes, total if is_summed else None


def prepare() -> None:
    """Compile all of it, which may take a second, unless it was kept on disk."""
    nothing = np.empty(0, np.uint8)
    read_summed(-1, nothing, 0)
    write_summed(-1, nothing, 0)


@compiled_without_lock
def _read(file: int, data: Any, start: int) -> Any:
    lanes = np.empty(NUM_LANES, np.uint64)
    begin(lanes)
    num_added = done = 0
    while done < len(data):
        most = min(len(data) - done, _CHUNK_BYTES)
        num_bytes = _pread(file, data.ctypes.data + done, most, done)
        if num_bytes <= 0:
            break
        done += num_bytes
        num_added = add_blocks(lanes, data, start, done, num_added)
    total = np.uint64(0)
    if done - start >= LEAST_BYTES:
        total = finish(lanes, data, start, done, num_added)
    return done, total


@compiled_without_lock
def _write(file: int, data: Any, offset: int) -> Any:
    lanes = np.empty(NUM_LANES, np.uint64)
    begin(lanes)
    num_added = done = 0
    while done < len(data):
        # So that no page of the file but the first one is written in two parts.
        most = min(len(data) - done, _CHUNK_BYTES - (offset + done) % _CHUNK_BYTES)
        num_bytes = _pwrite(file, data.ctypes.data + done, most, offset + done)
        if num_bytes <= 0:
            break
        done += num_bytes
        num_added = add_blocks(lanes, data, 0, done, num_added)
    total = np.uint64(0)
    if done >= LEAST_BYTES:
        total = finish(lanes, data, 0, done, num_added)
    return done, total
