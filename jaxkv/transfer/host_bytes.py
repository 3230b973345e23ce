"""Host blocks as plain bytes, to write them elsewhere and to bring them back.

The bytes of a host block are those of its rows in the arrays of its extent, array after
array, as this process has them. They mean something only to an engine of the same
layout (`HostBytes.description`).

An extent is written only while it is empty, so that its rows can be read beside
everything else, as long as it is pinned. New blocks go into an empty extent, as those
of a save do. The copies are for a thread of the caller's; all else is for the thread
that owns the engine.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import memory
from jaxkv.transfer.extent_table import NO_EXTENT, ExtentTable, Placement
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

Bytes: TypeAlias = NDArray[np.uint8]

# Where pinned host memory is read and written at its address. Elsewhere jax copies it,
# a whole extent at a time: it is untested whether the address is one of this process.
_ADDRESSED_PLATFORMS = ("cpu",)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one array of an extent has of a host block on one device."""

    array: int  # The index of the array.
    shard: int  # Its index among the array's distinct shards in this process.
    devices: tuple[jax.Device, ...]  # Those of this process that have it.
    is_whole: bool  # Whether no other device has any of it.
    axis: int  # The axis of the rows.
    shape: tuple[int, ...]  # What these devices have; the last axis is a value's bytes.
    num_rows: int  # Rows of a host block.

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


class _Rows(NamedTuple):
    """The memory of an extent."""

    table: NDArray[np.int64]  # i64[parts, 4], for `jaxkv.transfer.host_rows`.
    owners: list[Any]  # What keeps it alive.


class HostRead:
    """Host blocks that are held while their bytes are copied out.

    Attributes:
        num_blocks: How many there are.
        num_bytes: Bytes of each.
    """

    def __init__(
        self,
        owner: HostBytes,
        extents: list[int],
        arrays: list[Extent],
        places: list[int],
    ):
        self.num_blocks = len(places)
        self.num_bytes = owner.num_bytes
        self._owner = owner
        self._extents = extents
        self._arrays: list[Extent] | None = arrays
        self._places = places
        # To look at an extent's memory takes longer than to copy a small block.
        self._rows: dict[int, _Rows] = {}

    def copy(self, index: int, out: Bytes) -> None:
        """Copy a block's bytes; on any thread, until `close`.

        Args:
            index: Which block, in the order given.
            out: u8[`HostBytes.num_bytes`]. Contiguous. Written.

        Raises:
            ValueError: It cannot be written, or is not of this size.
        """
        assert self._arrays is not None, "the read was closed"
        number = self._extents[index]
        rows = self._rows.get(number)
        if rows is None:
            rows = self._rows[number] = self._owner.rows(self._arrays[index])
        self._owner.check_written(out)
        copy_out(rows.table, self._places[index], out)

    def close(self) -> None:
        """Let go of the blocks; on any thread, as soon as the bytes are copied."""
        if self._arrays is not None:
            self._arrays = None
            self._rows.clear()
            self._owner.closed.append(self._extents)


@dataclasses.dataclass(eq=False)
class _Piece:
    """The part of a write that fills one extent.

    Attributes:
        placement: Where its blocks go.
        payloads: u8[...] of each.
        spare: The memory to write to; None to make some.
        carry: The extent to carry rows over from; None for none.
        extent: The extent when it is written.
        error: What went wrong.
        is_over: Whether the copy has ended; set last.
    """

    placement: Placement
    payloads: list[Bytes]
    spare: Extent | None
    carry: Extent | None
    extent: Extent | None = None
    error: Exception | None = None
    is_over: bool = False


class HostWrite:
    """Bytes on their way into host blocks.

    Attributes:
        host_ids: i32[n]. The blocks.
        is_over: Whether all has ended.
        error: What went wrong; None if all blocks can be loaded.
    """

    def __init__(self, number: int, host_ids: NDArray[np.int32], payloads: list[Bytes]):
        self.host_ids = host_ids
        self.is_over = False
        self.error: Exception | None = None
        self.number = number
        self.payloads = payloads
        self.todo = np.arange(len(host_ids))
        self.pieces: list[_Piece] = []


class HostBytes:
    """Gives the bytes of host blocks, and takes them.

    Args:
        copier: Knows the layout of extents.
        plans: Knows the rows of a place.
        table: Knows where blocks are.
        host_memory: Has the extents.
        follow: Told of a placement that carried blocks over, and which rows.

    Attributes:
        num_bytes: Bytes of a host block in this process.
        description: What the bytes are: two engines understand one another's if theirs
            are equal.
        closed: The extents of each read that was closed; any thread may add to it.
    """

    def __init__(
        self,
        copier: Copier,
        plans: Plans,
        table: ExtentTable,
        host_memory: HostMemory,
        follow: Callable[[Placement, NDArray[np.bool_]], None],
    ):
        self._extents = copier.extents
        self._is_fused = copier.mode == "fused"
        self._plans = plans
        self._table = table
        self._memory = host_memory
        self._follow = follow
        self._shardings = copier.extents.shardings(memory.HOST_KIND)
        self._specs = copier.extents.specs(memory.HOST_KIND)
        self._is_addressed = copier.extents.pool.platform in _ADDRESSED_PLATFORMS
        self._parts = list(self._make_parts())
        self.num_bytes = sum(part.num_bytes for part in self._parts)
        self._table_of_rows = np.zeros((len(self._parts), 4), np.int64)
        for part, row in zip(self._parts, self._table_of_rows, strict=True):
            row[NUM_PIECES] = part.num_pieces
            row[STRIDE_BYTES] = part.shape[part.axis] * part.row_bytes
            row[PIECE_BYTES] = part.num_rows * part.row_bytes
        self.description = "; ".join(map(self._describe, self._parts))
        if any(len(spec.sharding.device_set) > 1 for spec in self._specs):
            self.description += f" of processes {list(map(_holders, self._specs))}"
        self._writes: collections.deque[HostWrite] = collections.deque()
        self.closed: collections.deque[list[int]] = collections.deque()
        self._num_reads = 0

    @property
    def is_busy(self) -> bool:
        """Whether extents are held that a save may wait for."""
        return bool(self._num_reads or self._writes)

    def read(self, host_ids: NDArray[np.int32]) -> HostRead:
        """Hold blocks whose bytes will be copied out.

        Args:
            host_ids: i32[n]. Blocks that can be loaded.

        Raises:
            ValueError: A block has no bytes.
        """
        extents, places = self._table.find(host_ids)
        each = extents.tolist()
        for extent in each:
            self._table.pin(extent)
        self._num_reads += 1
        arrays = {extent: self._memory.get(extent) for extent in set(each)}
        return HostRead(self, each, [arrays[e] for e in each], places.tolist())

    def collect(self) -> None:
        """Take back the pins of reads that were closed, and end writes."""
        while self.closed:
            for extent in self.closed.popleft():
                self._table.unpin(extent)
            self._num_reads -= 1
        for write in list(self._writes):
            self._collect(write)
            if not write.pieces and not write.todo.size:
                self._table.finish(write.host_ids, write.number, write.error is None)
                write.payloads = []
                write.is_over = True
                self._writes.remove(write)

    def write(
        self, number: int, host_ids: NDArray[np.int32], payloads: list[Bytes]
    ) -> HostWrite:
        """Begin to write blocks; `advance` goes on with it.

        Args:
            number: Of the engine's transfers, a new one.
            host_ids: i32[n]. Blocks that are not being read, distinct.
            payloads: u8[num_bytes] of each.
        """
        write = HostWrite(number, host_ids, payloads)
        self._table.claim(host_ids, number)
        self._writes.append(write)
        return write

    def advance(self, run: Callable[[Callable[[], None]], object]) -> None:
        """End what has been copied, and find places for what waits.

        Args:
            run: Runs a copy, on another thread or at once; if it raises, the copy has
                failed.
        """
        self.collect()
        for write in self._writes:
            self._place(write, run)

    def rows(self, extent: Extent) -> _Rows:
        """Look at the memory of an extent's arrays, or at copies of them."""
        owners = [self._owner_of(extent[part.array], part) for part in self._parts]
        return self._rows_at(list(map(_address_of, owners)), owners)

    def check_written(self, out: Bytes) -> None:
        """Refuse what the bytes of a block cannot be copied to.

        Raises:
            ValueError: It is not of `num_bytes`, not contiguous, or read-only.
        """
        can_be = out.flags.c_contiguous and out.flags.writeable
        if out.nbytes != self.num_bytes or not can_be:
            raise ValueError(
                f"a payload of {out.nbytes} bytes must have {self.num_bytes}, "
                "contiguous, that can be written."
            )

    def _rows_at(self, addresses: list[int], owners: list[Any]) -> _Rows:
        table = self._table_of_rows.copy()
        table[:, ADDRESS] = addresses
        return _Rows(table, owners)

    def _owner_of(self, array: jax.Array, part: _Part) -> jax.Array | Bytes:
        """Give an array whose memory has a part, or a copy where it has no address."""
        if not (part.is_whole and self._is_addressed):
            # An array of its own: jax keeps the copy that it makes of one.
            shards = [
                array.addressable_data(number)
                for number in range(len(array.addressable_shards))
            ]
            array = next(one for one in shards if one.device == part.devices[0])
        if self._is_addressed:
            return array
        return np.ascontiguousarray(np.asarray(array))

    def _make_parts(self) -> Iterable[_Part]:
        m = self._plans.blocks_per_host_block
        for index, (spec, bundle) in enumerate(
            zip(self._specs, self._extents.bundles, strict=True)
        ):
            axis = self._extents.axis(bundle)
            shape = spec.sharding.shard_shape(spec.shape)
            is_whole = len(spec.sharding.device_set) == 1
            local = spec.sharding.addressable_devices
            shards = ([d for d in devices if d in local] for devices in _distinct(spec))
            for shard, devices in enumerate(filter(None, shards)):
                whole = (*shape, spec.dtype.itemsize)
                yield _Part(index, shard, tuple(devices), is_whole, axis, whole, m)

    def _describe(self, part: _Part) -> str:
        """Say what a part holds, the codec's result, and of which leaves."""
        leaves = [
            self._extents.pool.leaves[leaf]
            for leaf in self._extents.bundles[part.array].leaves
        ]
        names = ",".join(f"{leaf.name}:{leaf.dtype.name}" for leaf in leaves)
        shape = list(part.shape[:-1])
        shape[part.axis] = part.num_rows
        dtype = self._specs[part.array].dtype.name
        return f"{names} as {dtype}{shape} axis {part.axis} shard {part.shard}"

    def _place(
        self, write: HostWrite, run: Callable[[Callable[[], None]], object]
    ) -> None:
        is_own = self._table.is_claimed(write.host_ids[write.todo], write.number)
        write.todo = write.todo[is_own]  # Others have been given to a save since.
        while write.todo.size:
            ids = write.host_ids[write.todo]
            placement = self._table.place(ids, np.zeros(len(ids), np.intp))
            if placement is None:
                return  # Until a save or a copy that is under way has ended.
            picked = write.todo[placement.picked]
            carry = None
            if placement.carry != NO_EXTENT:
                carry = self._memory.get(placement.carry)
            piece = _Piece(
                placement, [write.payloads[row] for row in picked.tolist()], None, carry
            )
            write.todo = np.delete(write.todo, placement.picked)
            write.pieces.append(piece)
            try:
                piece.spare = self._memory.take(placement.extent)
                run(lambda piece=piece: self._fill(piece))  # type: ignore[misc]
            except Exception as error:
                piece.error, piece.is_over = error, True

    def _collect(self, write: HostWrite) -> None:
        for piece in [piece for piece in write.pieces if piece.is_over]:
            write.pieces.remove(piece)
            placement = piece.placement
            self._memory.put(placement.extent, piece.extent)
            self._table.settle(placement, ok=piece.error is None)
            if piece.error is not None:
                write.error = piece.error
            elif placement.carry != NO_EXTENT:
                carried = np.zeros((1, self._plans.num_rows), np.bool_)
                m = self._plans.blocks_per_host_block
                rows = placement.carried_places[:, None] * m + np.arange(m)
                carried[0, rows] = True
                self._follow(placement, carried)

    def _fill(self, piece: _Piece) -> None:
        """Copy the bytes of a piece; on any thread."""
        try:
            piece.extent = self._filled(piece)
        except Exception as error:
            piece.error = error
        piece.is_over = True

    def _filled(self, piece: _Piece) -> Extent:
        has_copies = any(len(part.devices) > 1 for part in self._parts)
        in_place = self._is_addressed and piece.spare is not None and not has_copies
        made: list[Bytes] = []
        if in_place:
            assert piece.spare is not None
            rows = self.rows(piece.spare)
        else:
            made = [np.zeros(part.shape, np.uint8) for part in self._parts]
            rows = self._rows_at(list(map(_address_of, made)), [])
        for place, payload in zip(
            piece.placement.places.tolist(), piece.payloads, strict=True
        ):
            copy_in(rows.table, place, np.ascontiguousarray(payload))
        if piece.carry is not None:
            old_rows = self.rows(piece.carry)
            carried = np.empty(self.num_bytes, np.uint8)
            for place in piece.placement.carried_places.tolist():
                copy_out(old_rows.table, place, carried)
                copy_in(rows.table, place, carried)
        if in_place:
            assert piece.spare is not None
            return piece.spare
        return tuple(
            self._as_array(number, spec, made)
            for number, spec in enumerate(self._specs)
        )

    def _as_array(
        self, number: int, spec: jax.ShapeDtypeStruct, made: list[Bytes]
    ) -> jax.Array:
        """Make an array of an extent of the bytes of its parts."""
        arrays = []
        for part, own in zip(self._parts, made, strict=True):
            if part.array == number:
                values = own.reshape(-1).view(spec.dtype).reshape(own.shape[:-1])
                for device in part.devices:
                    sharding = memory.host_sharding(device)
                    arrays.append(jax.device_put(values, sharding))
        whole = jax.make_array_from_single_device_arrays(
            spec.shape, spec.sharding, arrays
        )
        memory.wait_for(whole)
        return whole


def _address_of(owner: jax.Array | Bytes) -> int:
    """Tell where an array's memory begins."""
    if isinstance(owner, np.ndarray):
        return owner.ctypes.data
    address: int = owner.unsafe_buffer_pointer()
    return address


def _distinct(spec: jax.ShapeDtypeStruct) -> list[list[jax.Device]]:
    """List the devices that have each shard, the shards by where they begin.

    The ids of devices have no meaning for another mesh.
    """
    shards: dict[tuple[int, ...], list[jax.Device]] = {}
    for device, index in spec.sharding.devices_indices_map(spec.shape).items():
        start = tuple(part.start or 0 for part in index)
        shards.setdefault(start, []).append(device)
    return [shards[start] for start in sorted(shards)]


def _holders(spec: jax.ShapeDtypeStruct) -> list[list[int]]:
    """List the processes that have each shard, numbered among themselves."""
    shards = [
        {device.process_index for device in devices} for devices in _distinct(spec)
    ]
    processes = sorted(set().union(*shards))
    return [sorted(map(processes.index, holders)) for holders in shards]
