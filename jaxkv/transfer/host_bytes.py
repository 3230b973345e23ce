"""Host blocks as plain bytes, to write them elsewhere and to bring them back.

The bytes of a host block are the bytes of its rows in the arrays of its extent, array
after array, as this process has them. Only an engine of the same layout can read them
(`HostBytes.description`).

An extent is written only while it is empty, so its rows can be read while transfers
run, as long as it is pinned. New blocks go into an empty extent, as in a save. A thread
of the caller's makes the copies; the thread that owns the engine does all else.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import memory
from jaxkv.transfer.extent_table import ExtentTable
from jaxkv.transfer.extents import Extent
from jaxkv.transfer.host_memory import HostMemory
from jaxkv.transfer.host_rows import (
    ADDRESS,
    NUM_PIECES,
    PIECE_BYTES,
    STRIDE_BYTES,
    copy_in,
    copy_out,
)
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.plans import Plans
from jaxkv.transfer.tickets import Bytes, WritePiece

# Where pinned host memory is read and written at its address. Elsewhere jax copies it,
# a whole extent at a time: it is untested whether the address is one of this process.
_ADDRESSED_PLATFORMS = ("cpu",)


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A host block's rows in one shard of one array of an extent."""

    array: int  # The index of the array.
    shard: int  # Its index among the array's distinct shards in this process.
    devices: tuple[jax.Device, ...]  # The devices of this process that have the shard.
    is_whole: bool  # Whether no other device has any of the array.
    axis: int  # The axis of the rows.
    shape: tuple[int, ...]  # The shard's; the last axis is a value's bytes.
    num_rows: int  # Rows of a host block.
    first_row: int  # The shard's first row in the array.

    @property
    def num_pieces(self) -> int:
        """In how many pieces the rows of a host block lie."""
        return math.prod(self.shape[: self.axis])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one piece."""
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of a host block."""
        return self.num_pieces * self.num_rows * self.row_bytes


class _RowTable(NamedTuple):
    """The memory of an extent."""

    table: NDArray[np.int64]  # i64[segments, 4], for `jaxkv.transfer.host_rows`.
    owners: list[Any]  # What keeps it alive.


class HostRead:
    """Host blocks that are held while their bytes are copied out."""

    def __init__(
        self,
        owner: HostBytes,
        extents: list[int],
        arrays: list[Extent],
        places: list[int],
    ):
        self.num_blocks = len(places)
        self.num_bytes = owner.num_bytes  # Of each block.
        self._owner = owner
        self._extents = extents
        self._arrays: list[Extent] | None = arrays
        self._places = places
        # To find an extent's memory takes longer than to copy a small block.
        self._rows: dict[int, _RowTable] = {}

    def copy(self, index: int, out: Bytes) -> None:
        """Copy the bytes of block `index` of the read to `out`, u8[num_bytes].

        On any thread, until `close`. ValueError if `out` cannot be written, or has
        another size.
        """
        assert self._arrays is not None, "the read was closed"
        number = self._extents[index]
        rows = self._rows.get(number)
        if rows is None:
            rows = self._rows[number] = self._owner.rows(self._arrays[index])
        copy_out(*self._owner.row_of(rows, self._places[index]), out)

    def close(self) -> None:
        """Release the blocks; on any thread, as soon as the bytes are copied."""
        if self._arrays is not None:
            self._arrays = None
            self._rows.clear()
            self._owner.closed.append(self._extents)


class HostBytes:
    """Reads the bytes of host blocks, and fills extents with bytes."""

    def __init__(
        self, copier: Copier, plans: Plans, table: ExtentTable, host_memory: HostMemory
    ):
        self._extents = copier.extents
        self._num_rows = plans.blocks_per_host_block
        self._table = table
        self._memory = host_memory
        self._specs = copier.extents.specs(memory.HOST_KIND)
        self._is_addressed = copier.extents.pool.platform in _ADDRESSED_PLATFORMS
        self._segments = list(self._make_segments())
        self._extent_blocks = plans.extent_blocks
        rows = np.array([segment.first_row for segment in self._segments])
        # By shard of the block axis: the segments that have the rows of its blocks.
        starts = range(0, plans.num_shards * plans.num_rows, plans.num_rows)
        self._parts = [np.flatnonzero(rows == start) for start in starts]
        first = [segment for segment in self._segments if segment.first_row == rows[0]]
        self.num_bytes = sum(segment.num_bytes for segment in first)
        """Bytes of a host block in this process."""
        self._row_table = np.zeros((len(self._segments), 4), np.int64)
        for segment, row in zip(self._segments, self._row_table, strict=True):
            row[NUM_PIECES] = segment.num_pieces
            row[STRIDE_BYTES] = segment.shape[segment.axis] * segment.row_bytes
            row[PIECE_BYTES] = segment.num_rows * segment.row_bytes
        self.description = "; ".join(map(self._describe, first))
        """The layout of the bytes: engines with equal ones can exchange them."""
        if any(len(spec.sharding.device_set) > 1 for spec in self._specs):
            self.description += f" of processes {list(map(_holders, self._specs))}"
        self.closed: collections.deque[list[int]] = collections.deque()
        """The extents of each read that was closed; any thread may add to it."""
        self.num_reads = 0

    def read(self, host_ids: NDArray[np.int32]) -> HostRead:
        """Hold blocks while their bytes are copied; ValueError if one has no bytes."""
        extents, places = self._table.find(host_ids)
        numbers = extents.tolist()
        for number in numbers:
            self._table.pin(number)
        self.num_reads += 1
        arrays = {number: self._memory.get(number) for number in set(numbers)}
        return HostRead(self, numbers, [arrays[n] for n in numbers], places.tolist())

    def release_closed(self) -> None:
        """Unpin the extents of reads that were closed."""
        while self.closed:
            for extent in self.closed.popleft():
                self._table.unpin(extent)
            self.num_reads -= 1

    def rows(self, extent: Extent) -> _RowTable:
        """Return the memory of an extent's arrays, or of copies of them."""
        owners = [self._owner_of(extent[s.array], s) for s in self._segments]
        return self._rows_at(list(map(_address_of, owners)), owners)

    def row_of(self, rows: _RowTable, place: int) -> tuple[NDArray[np.int64], int]:
        """Return the part of an extent's memory with a place, and the row there."""
        shard, row = divmod(place, self._extent_blocks)
        table = rows.table
        return table if len(self._parts) == 1 else table[self._parts[shard]], row

    def fill(self, piece: WritePiece) -> None:
        """Copy the bytes of a piece into its extent; on any thread."""
        try:
            piece.extent = self._filled(piece)
        except Exception as error:
            piece.error = error
        piece.has_ended = True

    def _rows_at(self, addresses: list[int], owners: list[Any]) -> _RowTable:
        table = self._row_table.copy()
        table[:, ADDRESS] = addresses
        return _RowTable(table, owners)

    def _owner_of(self, array: jax.Array, segment: _Segment) -> jax.Array | Bytes:
        """Return an array with a segment's memory, or a copy if it has no address."""
        if not (segment.is_whole and self._is_addressed):
            # Not of `array` itself: jax would keep the copy that it makes.
            shards = [
                array.addressable_data(number)
                for number in range(len(array.addressable_shards))
            ]
            device = segment.devices[0]
            array = next(shard for shard in shards if shard.device == device)
        if self._is_addressed:
            return array
        return np.ascontiguousarray(np.asarray(array))

    def _make_segments(self) -> Iterable[_Segment]:
        for index, (spec, bundle) in enumerate(
            zip(self._specs, self._extents.bundles, strict=True)
        ):
            axis = self._extents.axis(bundle)
            shape = (*spec.sharding.shard_shape(spec.shape), spec.dtype.itemsize)
            is_whole = len(spec.sharding.device_set) == 1
            local = spec.sharding.addressable_devices
            shards = [
                (tuple(devices), is_whole, axis, shape, self._num_rows, start[axis])
                for start, holders in _distinct(spec)
                if (devices := [d for d in holders if d in local])
            ]
            for shard, rest in enumerate(shards):
                yield _Segment(index, shard, *rest)

    def _describe(self, segment: _Segment) -> str:
        """Describe a segment, as its codec encodes it, and its leaves."""
        leaves = [
            self._extents.pool.leaves[leaf]
            for leaf in self._extents.bundles[segment.array].leaves
        ]
        names = ",".join(f"{leaf.name}:{leaf.dtype.name}" for leaf in leaves)
        shape = list(segment.shape[:-1])
        shape[segment.axis] = segment.num_rows
        dtype = self._specs[segment.array].dtype.name
        return f"{names} as {dtype}{shape} axis {segment.axis} shard {segment.shard}"

    def _filled(self, piece: WritePiece) -> Extent:
        has_copies = any(len(segment.devices) > 1 for segment in self._segments)
        spare = piece.spare if self._is_addressed and not has_copies else None
        made: list[Bytes] = []
        if spare is not None:
            rows = self.rows(spare)
        else:
            made = [np.zeros(segment.shape, np.uint8) for segment in self._segments]
            rows = self._rows_at(list(map(_address_of, made)), [])
        for place, payload in zip(
            piece.placement.places.tolist(), piece.payloads, strict=True
        ):
            copy_in(*self.row_of(rows, place), np.ascontiguousarray(payload))
        if piece.carry is not None:
            old_rows = self.rows(piece.carry)
            carried = np.empty(self.num_bytes, np.uint8)
            for place in piece.placement.carried_places.tolist():
                copy_out(*self.row_of(old_rows, place), carried)
                copy_in(*self.row_of(rows, place), carried)
        if spare is not None:
            return spare
        return tuple(
            self._as_array(number, spec, made)
            for number, spec in enumerate(self._specs)
        )

    def _as_array(
        self, number: int, spec: jax.ShapeDtypeStruct, made: list[Bytes]
    ) -> jax.Array:
        """Make array `number` of an extent from the bytes of its segments."""
        arrays = []
        for segment, shard in zip(self._segments, made, strict=True):
            if segment.array == number:
                values = shard.reshape(-1).view(spec.dtype).reshape(shard.shape[:-1])
                for device in segment.devices:
                    sharding = memory.host_sharding(device)
                    arrays.append(jax.device_put(values, sharding))
        whole = jax.make_array_from_single_device_arrays(
            spec.shape, spec.sharding, arrays
        )
        memory.wait_for(whole)
        return whole


def _address_of(owner: jax.Array | Bytes) -> int:
    if isinstance(owner, np.ndarray):
        return owner.ctypes.data
    address: int = owner.unsafe_buffer_pointer()
    return address


def _distinct(spec: jax.ShapeDtypeStruct) -> list[tuple[Any, list[jax.Device]]]:
    """List where each shard begins, and the devices that have it."""
    shards: dict[tuple[int, ...], list[jax.Device]] = {}
    for device, index in spec.sharding.devices_indices_map(spec.shape).items():
        start = tuple(axis.start or 0 for axis in index)
        shards.setdefault(start, []).append(device)
    return sorted(shards.items())


def _holders(spec: jax.ShapeDtypeStruct) -> list[list[int]]:
    """List the processes that have each shard, numbered among themselves."""
    shards = [
        {device.process_index for device in devices} for _, devices in _distinct(spec)
    ]
    processes = sorted(set().union(*shards))
    return [sorted(map(processes.index, holders)) for holders in shards]
