"""The transfer engine: issues saves and loads, and reports when they are done."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, check_whole, shown, strict_class
from jaxkv.transfer import limits, memory
from jaxkv.transfer.codecs import Compression
from jaxkv.transfer.extent_table import ExtentTable, SharedMemory
from jaxkv.transfer.host_bytes import HostRead
from jaxkv.transfer.host_memory import (
    MAX_EXTENT_BLOCKS,
    HostMemory,
    HostSize,
    parse_argument,
)
from jaxkv.transfer.ids import (
    BlockIdsLike,
    check_distinct,
    check_sizes,
    host_ids_of,
    transfer_pairs,
)
from jaxkv.transfer.kernels import (
    MAX_EXTENTS_PER_PROGRAM,
    CopierSpec,
    Kernel,
    Mode,
    choose_mode,
    copier_of,
)
from jaxkv.transfer.layout import PoolLayout
from jaxkv.transfer.ownership import Owner, owned
from jaxkv.transfer.plans import NOTHING, Plans
from jaxkv.transfer.queue import TransferQueue
from jaxkv.transfer.tickets import Completion, HostWrite, Ticket
from jaxkv.transfer.tiling import pads_rows, warn_of_costly_layouts
from jaxkv.types import PyTree

DEFAULT_STAGING_BYTES = 256 << 20


class _CheckedLoad(NamedTuple):
    """The arguments of `TransferQueue.load`."""

    leaves: list[jax.Array]
    device_ids: NDArray[np.int32]
    host_ids: NDArray[np.int32]
    extents: NDArray[np.int32]
    places: NDArray[np.int32]
    sizes: Sequence[int]


class TransferEngine:
    """Moves blocks between a device pool and host memory, in the background.

    A pool is a pytree of arrays with a block axis, on one device or sharded over a
    mesh. The engine knows its layout and owns pinned host memory. The caller owns the
    pool, passes it to every call and must continue with the pool that `load`, `advance`
    and `drain` return.

    A step of a serving loop::

        pool = engine.advance(pool)             # write what landed, issue what waits
        ticket = engine.save(pool, ...)         # any number of saves
        pool, ticket = engine.load(pool, ...)   # and of loads
        pool, output = model(pool, ...)
        for completion in engine.poll(): ...    # finished transfers

    Only `drain` blocks. A transfer is over when `poll` or `drain` has reported it: the
    blocks of a load are in the last returned pool; the blocks of a save can be loaded.
    Until then do not use the device blocks of a load, and do not overwrite the device
    blocks of a save while `is_waiting` is True for it: transfers beyond `staging_bytes`
    wait, loads before saves. Once a save has been issued, data dependencies order it
    before the caller's later steps, which may overwrite its blocks.

    A save never overwrites memory that holds blocks, so a failed save loses only its
    own. The thread that first passes a pool owns the engine, and dispatches all work on
    the pool, in one order; `adopt` hands it over. With several processes, each makes
    the same calls and moves its own shards.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkv.transfer import TransferEngine
        >>> pool = {"k": jnp.ones((8, 16, 4)), "v": jnp.zeros((8, 16, 4))}
        >>> engine = TransferEngine(pool, num_host_blocks=32)
        >>> ticket = engine.save(pool, [5, 2], [30, 7])
        >>> pool, [completion] = engine.drain(pool)
        >>> completion.ticket == ticket, completion.num_bytes, completion.error
        (True, 1024, None)
        >>> pool, ticket = engine.load(pool, [7], [0])
        >>> ticket
        Ticket(direction='load', number=1)
    """

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Make a strict one where `JAXKV_STRICT` asks for it."""
        return super().__new__(strict_class(cls))

    def __init__(
        self,
        pool: PyTree,
        num_host_blocks: int | None = None,
        *,
        host_bytes: str | SupportsIndex | None = None,
        mode: Mode | None = None,
        block_axis: PyTree = 0,
        blocks_per_host_block: int = 1,
        staging_bytes: str | SupportsIndex = DEFAULT_STAGING_BYTES,
        extent_bytes: str | SupportsIndex | None = None,
        compression: Compression | None = None,
        kernel: Kernel | None = None,
        shared: SharedMemory | None = None,
    ):
        """Set up the host memory for blocks of `pool`.

        Args:
            pool: A pool with the layout that all later pools will have; not kept.
            num_host_blocks: Number of blocks that the host memory holds, divided
                equally among the shards of the block axis. The engine allocates some
                spare memory besides, so that saves find room; see its `host_bytes`.
            host_bytes: Bytes of host memory to allocate in this process, such as
                ``"8GiB"``, instead of `num_host_blocks`.
            mode: ``"fused"`` or ``"staged"``, see `Copier`; the results are the same.
                None takes fused on CPU and staged elsewhere, where fused is refused.
            block_axis: The axis that counts the blocks: an int, or a pytree of ints
                that is a prefix of `pool`.
            blocks_per_host_block: Number of device blocks that a host block holds.
            staging_bytes: Bytes that may be in flight at a time; at least one extent.
                Blocks that a save carries over from another extent do not count.
            extent_bytes: Bytes that move in one piece; by default 8 MiB for each device
                of this process, or less for small blocks and small host tiers, and at
                most a quarter of `staging_bytes` with several devices.
            compression: How to compress blocks on the host; None keeps every bit.
            kernel: How the programs of the mode ``"staged"`` copy blocks: ``"dma"``, by
                asynchronous copies of the TPU, or ``"xla"``, by gathers and scatters.
                None takes ``"dma"`` on TPU where its compiler accepts the layout.
            shared: Memory that other engines also have extents in, in the mode
                ``"staged"``; None for memory of its own.

        Raises:
            ValueError: `pool` cannot be offloaded, or another argument is wrong.
            MemoryError: There is not enough host memory.
        """
        layout = PoolLayout.of(pool, block_axis)
        platform = layout.device.platform
        memory.host_sharding(layout.device)  # Refuses devices without pinned memory.
        memory.check_client(platform)
        memory.check_jit()
        check_type(str | None, "a name or None", mode=mode, kernel=kernel)
        mode = choose_mode(mode, platform)
        check_whole(1, blocks_per_host_block=blocks_per_host_block)
        check_type(Compression | None, "a Compression or None", compression=compression)
        check_type(SharedMemory | None, "a SharedMemory or None", shared=shared)
        blocks_per_host_block = operator.index(blocks_per_host_block)
        self._staging_bytes = parse_argument("staging_bytes", staging_bytes)
        # An extent of one host block, to compute the size of the others.
        spec = CopierSpec(*(layout, blocks_per_host_block, compression, mode, kernel))
        max_blocks = MAX_EXTENT_BLOCKS
        if pads_rows(layout):
            max_blocks //= blocks_per_host_block
        size = HostSize.of(
            *(num_host_blocks, host_bytes, extent_bytes),
            spec.extents().host_bytes,
            layout.num_shards,
            len(layout.leaves[0].sharding.addressable_devices),
            self._staging_bytes,
            max_blocks,
        )
        spec = spec._replace(rows=size.extent_blocks * blocks_per_host_block)
        extents = spec.extents()
        if self._staging_bytes < extents.num_bytes:
            raise ValueError(
                f"{staging_bytes=} must be at least the {extents.num_bytes} bytes of "
                "an extent, which moves in one piece."
            )
        self._host_bytes = size.num_extents * extents.host_bytes
        padding = extents.host_bytes / extents.num_bytes
        warn_of_costly_layouts(layout, extents.rows, padding)
        limits.check_host_bytes(self._host_bytes, platform)
        self._layout = layout
        max_extents = self._staging_bytes // extents.num_bytes
        max_extents = min(max_extents, MAX_EXTENTS_PER_PROGRAM)
        self._copier = copier_of(spec._replace(max_extents=max_extents))
        self._plans = Plans(
            layout.num_shards,
            layout.shard_blocks,
            size.extent_blocks,
            blocks_per_host_block,
        )
        self._table = ExtentTable(
            size.num_blocks,
            size.num_extents,
            size.extent_blocks,
            layout.num_shards,
            blocks_per_host_block,
        )
        if shared is not None:
            shared.join(self._table, size.num_extents, extents.host_bytes)
            self._table.shared = shared
        self._queue = TransferQueue(
            self._copier,
            self._plans,
            self._table,
            HostMemory(self._copier, size.num_extents),
            self._staging_bytes,
        )
        self.owner = Owner()

    @property
    def mode(self) -> Mode:
        """``"fused"`` or ``"staged"``."""
        return self._copier.mode

    @property
    def kernel(self) -> Kernel:
        """``"dma"`` if some leaves are copied by it, else ``"xla"``.

        It is known for certain after `warm_up`: the compiler may refuse ``"dma"``.
        """
        return self._copier.kernel

    @property
    def layout(self) -> PoolLayout:
        """Structure, shapes, dtypes and shardings of the pool."""
        return self._layout

    @property
    def num_host_blocks(self) -> int:
        """Number of host blocks; their ids are in [0, num_host_blocks)."""
        return self._table.num_blocks

    @property
    def num_device_blocks(self) -> int:
        """Number of blocks of the pool."""
        return self._layout.num_blocks

    @property
    def blocks_per_host_block(self) -> int:
        """Number of device blocks that a host block holds."""
        return self._plans.blocks_per_host_block

    @property
    def num_shards(self) -> int:
        """Shards of the block axis. A block is loaded into the shard it came from."""
        return self._layout.num_shards

    @property
    def block_bytes(self) -> int:
        """Bytes of one host block on the device, all leaves together."""
        return self._layout.block_bytes * self._plans.blocks_per_host_block

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated in this process.

        They include the spare extents, and what the device's tiles pad on TPU.
        """
        return self._host_bytes

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet reported by `poll` or `drain`."""
        return self._queue.num_in_flight

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were issued and are not known to have arrived."""
        return self._queue.bytes_in_flight

    @property
    def num_waiting(self) -> int:
        """Transfers that wait for others before they can be issued completely."""
        return self._queue.num_waiting

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a transfer still has to read or write the pool in a later call."""
        return self._queue.is_waiting(ticket)

    def warm_up(self) -> None:
        """Compile every program now, so that no save or load waits for it later."""
        self._copier.warm_up()

    def adopt(self) -> None:
        """Make the calling thread the owner, also while transfers are in flight.

        Call it on the thread that continues, such as after a pause. The thread before
        must have dispatched its last program on the pool.

        Raises:
            RuntimeError: Another thread is inside a call.
        """
        self.owner.adopt()

    @owned
    def save(
        self, pool: PyTree, device_block_ids: BlockIdsLike, host_block_ids: BlockIdsLike
    ) -> Ticket:
        """Copy device blocks to host blocks.

        Returns at once. The previous contents of the host blocks are gone; the blocks
        can be loaded once the save has been reported as completed without an error.

        Args:
            pool: The current pool; only read.
            device_block_ids: int[n]. Blocks of `pool`, distinct. With m blocks per host
                block int[n, m], with -1 for blocks not to save; rows may share blocks.
            host_block_ids: int[n]. Where each block or row goes, distinct.

        Returns:
            The ticket of the transfer.

        Raises:
            ValueError: The pool has another layout, or the ids are wrong.
            RuntimeError: The pool has been deleted or donated, or another thread owns
                the engine.
        """
        leaves = self._leaves(pool)
        ids = self.check_save(device_block_ids, host_block_ids)
        return self._queue.save(leaves, *ids)

    def check_save(
        self, device_block_ids: BlockIdsLike, host_block_ids: BlockIdsLike
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Refuse ids that `save` would refuse; return them, i32[n, m] and i32[n]."""
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, True)
        check_distinct("host_block_ids", host_ids)
        self._plans.shards(device_ids)
        return device_ids, host_ids

    @owned
    def load(
        self, pool: PyTree, host_block_ids: BlockIdsLike, device_block_ids: BlockIdsLike
    ) -> tuple[PyTree, Ticket]:
        """Copy host blocks to device blocks.

        Returns at once; the blocks are in the pool once the load has been reported.
        A copy that fails in the mode ``"fused"`` takes the returned pool with it, and
        the caller needs a new one; in ``"staged"`` it leaves the pool as it was.

        Args:
            pool: The current pool. Donated, if something is written into it.
            host_block_ids: int[n]. Blocks that hold bytes; ids may repeat.
            device_block_ids: int[n]. Where each goes in `pool`, distinct. With m blocks
                per host block int[n, m], with -1 for blocks not to load.

        Returns:
            The pool to continue with, and the ticket of the transfer.

        Raises:
            ValueError: The pool has another layout, the ids are wrong, or a host
                block holds no bytes.
            RuntimeError: The pool has been deleted or donated, or another thread owns
                the engine.
        """
        pool, (ticket,) = self._load(pool, host_block_ids, device_block_ids, None)
        return pool, ticket

    @owned
    def load_each(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int],
    ) -> tuple[PyTree, list[Ticket]]:
        """Copy host blocks to device blocks, for several users who wait by themselves.

        The same bytes move as with one `load`, in as many pieces: what several need of
        an extent moves once. But the loads with the fewest pieces go first, and each is
        reported, fails or is abandoned by itself.

        Args:
            pool: As for `load`.
            host_block_ids: int[n]. As for `load`, the blocks of each load in a row.
            device_block_ids: int[n] or int[n, m]. As for `load`; distinct over all.
            sizes: How many of the host blocks each load has; n in all.

        Returns:
            The pool to continue with, and a ticket for each load. It refuses what
            `load` refuses, and sizes that do not add up.
        """
        sizes = () if sizes is None else sizes
        return self._load(pool, host_block_ids, device_block_ids, sizes)

    def _load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int] | None,
    ) -> tuple[PyTree, list[Ticket]]:
        load = self._checked_load(pool, host_block_ids, device_block_ids, sizes)
        tickets = self._queue.load(*load)
        return self._layout.unflatten(load.leaves), tickets

    @owned
    def check_load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Refuse what `load`, or with sizes `load_each`, would refuse."""
        self._checked_load(pool, host_block_ids, device_block_ids, sizes)

    def _checked_load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int] | None,
    ) -> _CheckedLoad:
        """Check the arguments of `load_each` and return the queue's."""
        leaves = self._leaves(pool)
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, False)
        if sizes is None:
            sizes = [len(host_ids)]
        else:
            check_sizes(sizes, len(host_ids))
        extents, places = self._table.find(host_ids, device_ids != NOTHING)
        self._plans.check_shards(device_ids, places)
        return _CheckedLoad(leaves, device_ids, host_ids, extents, places, sizes)

    @owned
    def advance(self, pool: PyTree) -> PyTree:
        """Write loads that have landed into the pool, and issue waiting transfers.

        Returns at once. Call it once per step, before the model runs.

        Args:
            pool: The current pool. Donated, if something is written into it; not looked
                at, if nothing waits for it.

        Returns:
            The pool to continue with.
        """
        if not self._queue.wants_pool:
            self._queue.collect()
            return pool
        leaves = self._leaves(pool)
        self._queue.advance(leaves)
        return self._layout.unflatten(leaves)

    @owned
    def poll(self) -> list[Completion]:
        """Report the transfers that have finished since the last report; never wait.

        Returns:
            Completions in the order of the calls. A transfer is reported after the
            transfers of all earlier calls in its direction. Failures are not raised.
        """
        return self._queue.report()

    @owned
    def drain(self, pool: PyTree) -> tuple[PyTree, list[Completion]]:
        """Issue all transfers and wait for them, as for a flush or the end of a run.

        Args:
            pool: The current pool. Donated, if something is written into it.

        Returns:
            The pool to continue with, and the completions, as `poll` returns them.
        """
        leaves = self._leaves(pool)
        self._queue.drain(leaves)
        return self._layout.unflatten(leaves), self._queue.report()

    @owned
    def abandon(self, ticket: Ticket) -> None:
        """Abandon a transfer, which will not be reported.

        Copies that have been issued finish; the others are never issued. Afterwards the
        host blocks of a save are empty, and the device blocks of a load undefined.

        Raises:
            ValueError: No such transfer is in flight.
        """
        if not (isinstance(ticket, Ticket) and self._queue.abandon(ticket)):
            raise ValueError(
                f"{shown(ticket)} is not in flight: it was reported or abandoned "
                "before, or another engine gave it."
            )

    @owned
    def forget(self, host_block_ids: BlockIdsLike) -> NDArray[np.int32]:
        """Empty host blocks int[n], which cannot be loaded any more.

        No save of them may be in flight. Returns the blocks i32[m] whose memory loads
        in flight still read: forget them again later, or the memory is held until the
        next save of them.
        """
        host_ids = self._host_ids(host_block_ids)
        return self._table.forget(host_ids, self._queue.next_number())

    @property
    def host_bytes_description(self) -> str:
        """The layout of the bytes of `read_host`; equal ones can be exchanged."""
        return self._queue.host_bytes.description

    @property
    def host_payload_bytes(self) -> int:
        """Bytes of a host block in this process, as `read_host` copies them."""
        return self._queue.host_bytes.num_bytes

    host_block_bytes = host_payload_bytes  # Without the label that several pools add.

    @owned
    def read_host(self, host_block_ids: BlockIdsLike) -> HostRead:
        """Hold host blocks int[n], so that another thread can copy their bytes.

        Saves, and so `drain`, may have to wait for their memory until
        `HostRead.close`: close it soon. ValueError if a block holds no bytes.
        """
        return self._queue.host_bytes.read(self._host_ids(host_block_ids))

    @owned
    def write_host(
        self, host_block_ids: BlockIdsLike, payloads: Sequence[NDArray[np.uint8]]
    ) -> HostWrite:
        """Write u8[host_payload_bytes] into each of the distinct host blocks int[n].

        They are bytes of `read_host`, of this or another engine of this layout.
        `advance_host` continues the write; when `HostWrite.is_over`, the blocks can be
        loaded, unless there was an error; those in part i of n of all host blocks into
        shard i of n of the block axis. ValueError if the ids or payloads are wrong.
        """
        host_ids = self._host_ids(host_block_ids)
        check_distinct("host_block_ids", host_ids)
        num_bytes = self.host_payload_bytes
        is_listed = isinstance(payloads, Sequence)
        sizes = [getattr(p, "nbytes", None) for p in payloads] if is_listed else []
        if sizes != [num_bytes] * len(host_ids):
            raise ValueError(
                f"payloads must be {len(host_ids)} of {num_bytes} bytes, and are "
                f"{shown(payloads)}."
            )
        return self._queue.write(host_ids, list(payloads))

    @owned
    def advance_host(self, run: Callable[[Callable[[], None]], object]) -> None:
        """Continue the writes of `write_host`; returns at once.

        `run` gets functions that copy bytes, to run on any thread, in any order.
        """
        self._queue.advance_writes(run)

    def _host_ids(self, host_block_ids: BlockIdsLike) -> NDArray[np.int32]:
        return host_ids_of(host_block_ids, self.num_host_blocks)

    def _leaves(self, pool: PyTree) -> list[jax.Array]:
        leaves = self._layout.flatten(pool)
        self.owner.take()
        return leaves

    def _pairs(
        self, device_ids: BlockIdsLike, host_ids: BlockIdsLike, may_share: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        num_blocks = self._layout.num_blocks, self.num_host_blocks
        return transfer_pairs(
            device_ids, host_ids, *num_blocks, self.blocks_per_host_block, may_share
        )
