"""How many host blocks, in how many extents, of how many blocks each."""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex

from jaxkv.units import parse_bytes

# An array costs the same to hand over whatever its size, and a program to start; the
# bytes of an extent have to take several times as long as both.
TARGET_EXTENT_BYTES = 8 << 20
# Of tiny blocks fewer bytes are enough: a load moves the extent for one block of it.
_MAX_EXTENT_BLOCKS = 64


class HostSize(NamedTuple):
    """How large the host tier is.

    Attributes:
        num_blocks: Ids of host blocks.
        extent_blocks: Host blocks per extent and lane.
        num_extents: Extents, the spare ones included.
    """

    num_blocks: int
    extent_blocks: int
    num_extents: int

    @classmethod
    def of(
        cls,
        num_host_blocks: SupportsIndex | None,
        host_bytes: str | SupportsIndex | None,
        extent_bytes: str | SupportsIndex | None,
        lane_row_bytes: int,
        num_lanes: int,
    ) -> HostSize:
        """Work it out from what the caller has said.

        Args:
            num_host_blocks: Host blocks, if that was said.
            host_bytes: All memory, if that was, such as ``"8GiB"``.
            extent_bytes: An extent's, if that was.
            lane_row_bytes: Bytes on the host of one block in each lane.
            num_lanes: Shards of the block axis.

        Raises:
            ValueError: Too little was said, too much, or something too small.
        """
        if (num_host_blocks is None) == (host_bytes is None):
            raise ValueError(
                f"one of {num_host_blocks=} and {host_bytes=} must be given: the size "
                "of the host tier, in blocks or in bytes."
            )
        target = {}
        if extent_bytes is not None:
            target["target_bytes"] = parse_argument("extent_bytes", extent_bytes)
        if num_host_blocks is not None:
            num_blocks = operator.index(num_host_blocks)
            if num_blocks < 1:
                raise ValueError(f"{num_host_blocks=} must be at least 1.")
            rows = -(-num_blocks // num_lanes)
            per_extent = extent_blocks(lane_row_bytes, rows, **target)
            full = -(-rows // per_extent)
            return cls(num_blocks, per_extent, full + _num_spare(full))
        assert host_bytes is not None
        rows = parse_argument("host_bytes", host_bytes) // lane_row_bytes
        per_extent = extent_blocks(lane_row_bytes, rows, **target)
        num_extents = rows // per_extent
        full = num_extents - _num_spare(num_extents)
        if full < 1:
            raise ValueError(
                f"{host_bytes=} must be at least {2 * lane_row_bytes}: one host block "
                f"takes {lane_row_bytes} bytes, and as many are kept to spare."
            )
        return cls(full * per_extent * num_lanes, per_extent, num_extents)


def parse_argument(name: str, size: str | SupportsIndex) -> int:
    """Read a size in bytes that was given as the argument `name`.

    Raises:
        ValueError: It is not a size, or less than one byte.
    """
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _num_spare(num_extents: int) -> int:
    """Extents to set aside so that saves find room, and find it together."""
    # An eighth: with less, a full tier takes over many blocks for each that is saved,
    # though blocks come and go in runs (`test_runs_of_blocks_are_hardly_taken_over`).
    return max(1, num_extents // 8)


def extent_blocks(
    host_block_bytes: int, num_host_blocks: int, target_bytes: int = TARGET_EXTENT_BYTES
) -> int:
    """Choose how many host blocks an extent holds.

    Args:
        host_block_bytes: Bytes of a host block.
        num_host_blocks: How many there are; a small store has small extents, for it
            must have some to spare.
        target_bytes: Bytes of an extent to aim at.
    """
    enough = -(-target_bytes // host_block_bytes)
    return max(1, min(enough, _MAX_EXTENT_BLOCKS, num_host_blocks // 8))
