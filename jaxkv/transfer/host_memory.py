"""The memory of the host tier: its size, and its extents in pinned memory."""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex

import jax

from jaxkv._util import check_whole, parse_bytes, shown
from jaxkv.transfer import memory
from jaxkv.transfer.extents import Extent
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.limits import host_memory_error

_ALLOCATION_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)
# Passing an array to a program and starting the program cost the same for any size;
# moving the bytes of an extent should take several times as long as both. This is for
# each device, which has a bus of its own.
TARGET_EXTENT_BYTES = 8 << 20
# With several devices, as many extents as this can be in flight, so that one is copied
# while the next is gathered.
_MIN_IN_FLIGHT = 4
# A small tier needs more and smaller extents: where a save replaces half of an extent,
# the other half has to be carried over, row by row.
_MIN_EXTENT_BYTES = 1 << 20
_MIN_EXTENTS = 16
# With tiny blocks an extent is smaller: loading one block moves the whole extent.
MAX_EXTENT_BLOCKS = 64


class HostSize(NamedTuple):
    """The size of the host tier."""

    num_blocks: int  # Host blocks.
    extent_blocks: int  # Host blocks per extent and shard.
    num_extents: int  # Spare ones included.

    @classmethod
    def of(
        cls,
        num_host_blocks: SupportsIndex | None,
        host_bytes: str | SupportsIndex | None,
        extent_bytes: str | SupportsIndex | None,
        row_bytes: int,  # Bytes on the host of one host block in every shard.
        num_shards: int,
        num_devices: int = 1,  # Of this process, which an extent is spread over.
        staging_bytes: int = 0,  # Bytes that may be in flight.
        max_blocks: int = MAX_EXTENT_BLOCKS,  # Per extent and shard.
    ) -> HostSize:
        """Compute the size from the engine's arguments; ValueError if it is wrong."""
        num_blocks, num_bytes, target = parse_size(
            num_host_blocks, host_bytes, extent_bytes
        )
        best = max(
            TARGET_EXTENT_BYTES,
            min(TARGET_EXTENT_BYTES * num_devices, staging_bytes // _MIN_IN_FLIGHT),
        )
        if num_blocks is not None:
            rows = -(-num_blocks // num_shards)
            per_extent = _extent_blocks(row_bytes, rows, target, best, max_blocks)
            full = -(-rows // per_extent)
            return cls(num_blocks, per_extent, full + _num_spare(full))
        assert num_bytes is not None
        rows = num_bytes // row_bytes
        per_extent = _extent_blocks(row_bytes, rows, target, best, max_blocks)
        num_extents = rows // per_extent
        full = num_extents - _num_spare(num_extents)
        if full < 1:
            raise ValueError(
                f"{host_bytes=} must be at least {2 * row_bytes}: one host block "
                f"takes {row_bytes} bytes, and as many are kept spare."
            )
        return cls(full * per_extent * num_shards, per_extent, num_extents)


def parse_size(
    num_host_blocks: SupportsIndex | None,
    host_bytes: str | SupportsIndex | None,
    extent_bytes: str | SupportsIndex | None,
) -> tuple[int | None, int | None, int | None]:
    """Parse an engine's arguments for its size; see `TransferEngine`."""
    if (num_host_blocks is None) == (host_bytes is None):
        raise ValueError(
            f"one of num_host_blocks={shown(num_host_blocks)} and "
            f"host_bytes={shown(host_bytes)} must be given: the size of "
            "the host tier, in blocks or in bytes."
        )
    if num_host_blocks is not None:
        check_whole(1, (1 << 31) - 1, num_host_blocks=num_host_blocks)
    return (
        None if num_host_blocks is None else operator.index(num_host_blocks),
        None if host_bytes is None else parse_argument("host_bytes", host_bytes),
        None if extent_bytes is None else parse_argument("extent_bytes", extent_bytes),
    )


def parse_argument(name: str, size: str | SupportsIndex) -> int:
    """Parse a size of at least one byte, given as the argument `name`."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _num_spare(num_extents: int) -> int:
    """Spare extents, so that a save finds room for its blocks together."""
    # An eighth: with less, a full tier carries over many blocks for each saved one,
    # even where blocks come and go in runs (`test_runs_of_blocks_are_rarely_carried`).
    return max(1, num_extents // 8)


def _extent_blocks(
    host_block_bytes: int,
    num_host_blocks: int,
    target_bytes: int | None,
    best_bytes: int,
    max_blocks: int,
) -> int:
    """Choose how many host blocks an extent holds, fewer in a small tier."""
    if target_bytes is None:
        share = host_block_bytes * num_host_blocks // _MIN_EXTENTS
        target_bytes = min(best_bytes, max(_MIN_EXTENT_BYTES, share))
    enough = -(-target_bytes // host_block_bytes)
    return max(1, min(enough, max_blocks, num_host_blocks // 8))


class HostMemory:
    """A fixed number of extents.

    All are allocated and touched at construction and then recycled, since fresh pages
    are the slowest part of a copy. In the mode ``"fused"`` a program writes into the
    memory of a free extent; in the mode ``"staged"`` that memory returns to XLA's
    allocator, which reuses it for the next extent of the same size.
    """

    def __init__(self, copier: Copier, num_extents: int):
        """Allocate extents; MemoryError if there is not that much pinned memory."""
        self._new_extent = copier.new_extent()
        self._extent_bytes = copier.extents.host_bytes
        self._platform = copier.extents.pool.platform
        self._recycles = copier.mode == "fused"
        self._extents: list[Extent | None] = [None] * num_extents
        try:
            for index in range(num_extents):
                self._extents[index] = self._new_extent()
            # Ready means written, so that no save pays for the first page faults.
            memory.wait_for(self._extents)
        except _ALLOCATION_ERRORS as error:
            self._explain(error, num_extents)
            raise
        if not self._recycles:
            self._extents = [None] * num_extents

    def get(self, index: int) -> Extent:
        """Return an extent to read."""
        extent = self._extents[index]
        assert extent is not None, f"extent {index} has no memory"
        return extent

    def take(self, index: int) -> Extent | None:
        """Remove and return the memory of an extent; `put` must set its replacement.

        None in the mode ``"staged"``. MemoryError if a failed save lost the memory and
        it cannot be replaced.
        """
        extent, self._extents[index] = self._extents[index], None
        if not self._recycles:
            return None
        if extent is None:
            try:
                extent = self._new_extent()
            except _ALLOCATION_ERRORS as error:
                self._explain(error, 1)
                raise
        return extent

    def put(self, index: int, extent: Extent | None) -> None:
        """Replace an extent; None if the save failed."""
        self._extents[index] = extent

    def _explain(self, error: Exception, num_extents: int) -> None:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise host_memory_error(
                num_extents * self._extent_bytes, self._platform
            ) from error
