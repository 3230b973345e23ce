"""Copies of a host block between the arrays of its extent and one payload.

A block has a row in every array, often many small ones. One call copies all rows with
the GIL released: releasing and reacquiring the GIL per array costs the step thread more
than the copies.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from jaxkv.compiling import compiled

ADDRESS, NUM_PIECES, STRIDE_BYTES, PIECE_BYTES = range(4)
"""The columns of a table of arrays: an array's address; the number of contiguous
pieces of a block; the distance between pieces; the bytes per piece."""

_MAX_PLACE = (1 << 31) - 1

_memcpy = types.ExternalFunction(
    "memcpy", types.uintp(types.uintp, types.uintp, types.uintp)
)


def copy_out(table: Any, place: int, payload: Any) -> None:
    """Copy row `place` of every array into a payload, with the GIL released.

    `table`, i64[p, 4], describes the arrays. `payload`, u8[n], is contiguous and as
    long as all pieces of the row. ValueError if it is not, or if no such row exists.
    """
    _copy_checked(table, place, payload, True)


def copy_in(table: Any, place: int, payload: Any) -> None:
    """Copy a payload into row `place` of every array; see `copy_out`."""
    _copy_checked(table, place, payload, False)


def prepare() -> None:
    """Compile the copies, or load them from disk."""
    _copy(np.empty((0, 4), np.int64), 0, 0, 0, True)


def _copy_checked(table: Any, place: int, payload: Any, is_out: bool) -> None:
    flags, num_bytes = payload.flags, payload.nbytes
    if not (
        flags.c_contiguous
        and (flags.writeable or not is_out)
        and 0 <= place <= _MAX_PLACE
        and _copy(table, place, payload.ctypes.data, num_bytes, is_out)
    ):
        wanted = int((table[:, NUM_PIECES] * table[:, PIECE_BYTES]).sum())
        end = int((table[:, STRIDE_BYTES] // table[:, PIECE_BYTES]).min())
        raise ValueError(
            f"{place=} must be in [0, {end}), and a payload of {num_bytes} bytes must "
            f"have {wanted}, contiguous{' and writable' if is_out else ''}."
        )


@functools.partial(compiled, nogil=True)
def _copy(table: Any, place: int, address: int, num_bytes: int, is_out: bool) -> Any:
    """Copy all rows and return True; return False, copying none, if a size is wrong."""
    for part in range(table.shape[0]):
        piece_bytes = table[part, PIECE_BYTES]
        num_bytes -= table[part, NUM_PIECES] * piece_bytes
        if (place + 1) * piece_bytes > table[part, STRIDE_BYTES]:
            return False
    if num_bytes != 0:
        return False
    for part in range(table.shape[0]):
        piece_bytes = table[part, PIECE_BYTES]
        row = table[part, ADDRESS] + place * piece_bytes
        for _ in range(table[part, NUM_PIECES]):
            if is_out:
                _memcpy(address, row, piece_bytes)
            else:
                _memcpy(row, address, piece_bytes)
            row += table[part, STRIDE_BYTES]
            address += piece_bytes
    return True
