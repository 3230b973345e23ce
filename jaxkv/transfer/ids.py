"""Check and copy the block ids that callers pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown, whole
from jaxkv.transfer.plans import NOTHING

# So few ids are checked faster as Python's ints.
_FEW = 64

BlockIdsLike: TypeAlias = (
    Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer[Any]]
)


def host_ids_of(ids: BlockIdsLike, num_blocks: int) -> NDArray[np.int32]:
    """Check the ids of host blocks: a flat sequence of ints in [0, num_blocks)."""
    array = _copy("host_block_ids", ids)
    if array.ndim != 1:
        raise ValueError(
            "host_block_ids must be a flat sequence of ints, not "
            f"{array.dtype}{list(array.shape)}."
        )
    return _in_range("host_block_ids", array, num_blocks, 0)


def device_block_ids(
    ids: BlockIdsLike, num_blocks: int, blocks_per_host_block: int, may_share: bool
) -> NDArray[np.int32]:
    """Check the ids of device blocks, which must be distinct; return i32[n, m].

    int[n], or int[n, m] where a host block holds m device blocks: there NOTHING stands
    for a device block that does not move, and rows may share blocks if `may_share`.
    """
    array, m = _copy("device_block_ids", ids), blocks_per_host_block
    if array.size == 0:
        return np.zeros((0, m), np.int32)
    wanted = "a flat sequence of ints" if m == 1 else f"rows of {m} ints"
    if array.ndim == 1 and m == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != m:
        raise ValueError(
            f"device_block_ids must be {wanted}, not "
            f"{array.dtype}{list(array.shape)}: a host block holds {m} of them."
        )
    lowest = 0 if m == 1 else NOTHING
    if m == 1:
        flat = _in_range("device_block_ids", array[:, 0], num_blocks, lowest)
        check_distinct("device_block_ids", flat)
        return flat[:, None]
    array = _in_range("device_block_ids", array, num_blocks, lowest)
    empty = np.flatnonzero((array == NOTHING).all(axis=1))
    if empty.size:
        raise ValueError(
            f"device_block_ids has only {NOTHING} in the rows {empty.tolist()}; each "
            "row must name at least one device block."
        )
    for part in array if may_share else [array]:
        check_distinct("device_block_ids", part[part != NOTHING])
    return array


def transfer_pairs(
    device_ids: BlockIdsLike,
    host_ids: BlockIdsLike,
    num_device_blocks: int,
    num_host_blocks: int,
    blocks_per_host_block: int,
    may_share: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Check the ids of both sides of a transfer; return i32[n, m] and i32[n]."""
    device = device_block_ids(
        device_ids, num_device_blocks, blocks_per_host_block, may_share
    )
    host = host_ids_of(host_ids, num_host_blocks)
    if len(device) != len(host):
        raise ValueError(
            f"{len(device)} device_block_ids and {len(host)} host_block_ids must "
            "be equally many: they go in pairs."
        )
    return device, host


def check_sizes(sizes: Sequence[int], num_host_blocks: int) -> None:
    """Check the numbers of host blocks of several loads, and their sum."""
    is_listed = isinstance(sizes, Sequence | np.ndarray) and not isinstance(sizes, str)
    numbers = list(map(whole, sizes)) if is_listed else [None]
    counts = [number for number in numbers if number is not None and number >= 0]
    if len(counts) < len(numbers) or sum(counts) != num_host_blocks:
        raise ValueError(
            f"sizes={shown(sizes)} must be numbers of blocks, and the "
            f"{num_host_blocks} of host_block_ids in all."
        )


def check_distinct(name: str, ids: NDArray[np.int32]) -> None:
    """Refuse repeated ids."""
    if len(set(ids.tolist())) == len(ids):
        return
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(
            f"{name} has {sorted(set(twice.tolist()))} more than once; they must be "
            "distinct."
        )


def _copy(name: str, ids: BlockIdsLike) -> NDArray[np.integer[Any]]:
    # A copy: XLA may read NumPy memory in place and late, so a caller that changes its
    # array after the call would otherwise redirect the transfer.
    if isinstance(ids, np.ma.MaskedArray) and np.ma.is_masked(ids):
        raise ValueError(f"{name} must not be masked: leave out what is not to move.")
    array = np.array(ids)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a flat sequence of ints, not "
            f"{array.dtype}{list(array.shape)}."
        )
    return array


def _in_range(
    name: str, array: NDArray[np.integer[Any]], num_blocks: int, lowest: int
) -> NDArray[np.int32]:
    if array.ndim == 1 and 0 < array.size <= _FEW:
        values = array.tolist()
        if min(values) >= lowest and max(values) < num_blocks:
            return array.astype(np.int32)
    is_outside = (array < lowest) | (array >= num_blocks)
    if is_outside.any():
        outside = array[is_outside]
        raise ValueError(
            f"{name} has {outside.tolist()}; ids must be in [0, {num_blocks})"
            + (f", or {lowest} for none." if lowest else ".")
        )
    return array.astype(np.int32)
