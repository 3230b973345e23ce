"""The transfer engine: issue saves and loads, and learn when they are done."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import limits, memory, probe
from jaxkv.transfer.codecs import Compression
from jaxkv.transfer.extents import ExtentLayout
from jaxkv.transfer.flow import Flow
from jaxkv.transfer.hostmemory import HostMemory
from jaxkv.transfer.hoststore import HostStore
from jaxkv.transfer.ids import (
    BlockIdsLike,
    check_distinct,
    copy_pairs,
    transfer_pairs,
)
from jaxkv.transfer.kernels import Mode, Mover
from jaxkv.transfer.layout import PoolLayout
from jaxkv.transfer.modes import choose_mode
from jaxkv.transfer.plans import NOTHING, Plans
from jaxkv.transfer.sizing import HostSize, parse_argument
from jaxkv.transfer.tickets import Completion, Ticket
from jaxkv.types import PyTree

DEFAULT_STAGING_BYTES = 256 << 20


class TransferEngine:
    """Moves blocks between a device pool and host memory, in the background.

    A pool is a pytree of arrays with a block axis, on one device or sharded over a
    mesh. The engine knows its layout and owns a store of pinned host memory; the pool
    itself stays with the caller, who passes it to every call and must go on with the
    one that `load`, `advance` and `drain` return.

    A step of a serving loop::

        pool = engine.advance(pool)             # what has become possible meanwhile
        ticket = engine.save(pool, ...)         # any number of these
        pool, ticket = engine.load(pool, ...)   # and of these
        pool, output = model(pool, ...)
        for completion in engine.poll(): ...    # what is over

    Nothing blocks but `drain`. A transfer is over when `poll` or `drain` has reported
    it: a load's blocks are in the pool that was last returned by then, a save's can
    be loaded. Until then leave the device blocks of a load alone, and those of a save
    as long as `is_waiting` holds for it: what exceeds `staging_bytes` waits its turn,
    loads before saves. Data dependencies order what has been issued against the
    caller's steps, which may overwrite a saved block from then on.

    A save changes no memory that holds something, so a failed one loses no blocks but
    its own. One thread owns an engine and dispatches all the work on its pool, in one
    order; with several processes, each makes the same calls and moves its own shards.

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

    def __init__(
        self,
        pool: PyTree,
        num_host_blocks: int | None = None,
        *,
        host_bytes: str | SupportsIndex | None = None,
        mode: Mode | None = None,
        block_axis: PyTree = 0,
        blocks_per_host_block: int = 1,
        layer_groups: int = 1,
        staging_bytes: str | SupportsIndex = DEFAULT_STAGING_BYTES,
        extent_bytes: str | SupportsIndex | None = None,
        compression: Compression | None = None,
    ):
        """Set up the host memory for blocks of `pool`.

        Args:
            pool: A pool of the layout that all later ones will have; not kept.
            num_host_blocks: How many blocks the host memory holds; where the block
                axis is sharded, an equal share of them for each shard. Some more memory
                is set aside, so that saves find room; see `host_bytes` of the engine.
            host_bytes: How much host memory to set aside in this process instead,
                such as ``"8GiB"``; `num_host_blocks` follows from it.
            mode: ``"fused"`` or ``"staged"``, see `Mover`; the results are the same.
                None takes fused on CPU and staged elsewhere, where fused is tried out
                in another process before it is used.
            block_axis: The axis that counts the blocks: an int, or a pytree of ints
                that is a prefix of `pool`.
            blocks_per_host_block: How many device blocks a host block holds.
            layer_groups: In how many parts a load arrives, the first leaves first, so
                that a model that runs layer by layer can begin early: once `is_waiting`
                is False for a load, each leaf is ready by itself.
            staging_bytes: How much may be in flight at a time, in whole extents. What
                a save has to take over of an older extent is not counted.
            extent_bytes: How much moves in one piece; by default 8 MiB, or less for
                small blocks and small stores.
            compression: How to make blocks smaller on the host; None keeps every bit.

        Raises:
            ValueError: `pool` cannot be offloaded, or another argument is wrong.
            MemoryError: There is not that much host memory.
        """
        layout = PoolLayout.of(pool, block_axis)
        platform = layout.device.platform
        memory.host_sharding(layout.device)  # Refuses devices without pinned memory.
        probe.check_client(platform)
        probe.check_jit()
        mode = choose_mode(mode, platform)
        blocks_per_host_block = operator.index(blocks_per_host_block)
        if blocks_per_host_block < 1:
            raise ValueError(f"{blocks_per_host_block=} must be at least 1.")

        def extents_of(num_blocks: int) -> ExtentLayout:
            return ExtentLayout.of(
                layout,
                num_blocks * blocks_per_host_block,
                stacked=mode == "staged",
                num_layer_groups=layer_groups,
                compression=compression,
            )

        size = HostSize.of(
            *(num_host_blocks, host_bytes, extent_bytes),
            extents_of(1).num_bytes,
            layout.num_lanes,
        )
        extents = extents_of(size.extent_blocks)
        self._staging_bytes = parse_argument("staging_bytes", staging_bytes)
        if self._staging_bytes < extents.num_bytes:
            raise ValueError(
                f"{staging_bytes=} must be at least the {extents.num_bytes} bytes of "
                "an extent, which is what moves in one piece."
            )
        self._host_bytes = size.num_extents * extents.num_bytes
        limits.check_host_bytes(self._host_bytes, platform)
        self._layout = layout
        self._mover = Mover(extents, mode)
        self._plans = Plans(
            layout.num_lanes,
            layout.lane_blocks,
            size.extent_blocks,
            blocks_per_host_block,
        )
        self._store = HostStore(
            size.num_blocks,
            size.num_extents,
            size.extent_blocks,
            layout.num_lanes,
            blocks_per_host_block,
        )
        self._flow = Flow(
            self._mover,
            self._plans,
            self._store,
            HostMemory(self._mover, size.num_extents),
            self._staging_bytes,
        )
        self._owner = threading.get_ident()

    @property
    def mode(self) -> Mode:
        """``"fused"`` or ``"staged"``."""
        return self._mover.mode

    @property
    def num_host_blocks(self) -> int:
        """Ids of host blocks: they are in [0, num_host_blocks)."""
        return self._store.num_blocks

    @property
    def blocks_per_host_block(self) -> int:
        """Device blocks that a host block holds."""
        return self._plans.blocks_per_host_block

    @property
    def num_lanes(self) -> int:
        """Shards of the block axis. A block returns to the one it was saved from."""
        return self._layout.num_lanes

    @property
    def block_bytes(self) -> int:
        """Bytes of one host block on the device, all leaves together."""
        return self._layout.block_bytes * self._plans.blocks_per_host_block

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory set aside in this process, spare extents included."""
        return self._host_bytes

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet reported by `poll` or `drain`."""
        return self._flow.num_in_flight

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were issued and are not known to have arrived."""
        return self._flow.bytes_in_flight

    @property
    def num_waiting(self) -> int:
        """Transfers that wait for others before they are issued as a whole."""
        return self._flow.num_waiting

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a transfer still has to read or write the pool by a later call."""
        return self._flow.is_waiting(ticket)

    def warm_up(self) -> None:
        """Compile every program now, so that no later save or load waits for it."""
        self._mover.warm_up()

    def save(
        self,
        pool: PyTree,
        device_block_ids: BlockIdsLike,
        host_block_ids: BlockIdsLike,
    ) -> Ticket:
        """Copy device blocks to host blocks.

        Returns at once. What the host blocks held is gone, and they can be loaded
        from when the save has been reported as completed without an error.

        Args:
            pool: The current pool; only read.
            device_block_ids: int[n]. Blocks of `pool`, distinct. With m blocks per
                host block int[n, m], -1 for one that is not to be saved; rows may
                share blocks.
            host_block_ids: int[n]. Where each (row) goes, distinct.

        Returns:
            The name of the transfer.

        Raises:
            ValueError: The pool has another layout, or the ids are wrong.
            RuntimeError: The pool has been deleted or donated, or another thread owns
                the engine.
        """
        leaves = self._leaves(pool)
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, True)
        check_distinct("host_block_ids", host_ids)
        self._plans.lanes(device_ids)
        return self._flow.save(leaves, device_ids, host_ids)

    def load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
    ) -> tuple[PyTree, Ticket]:
        """Copy host blocks to device blocks.

        Returns at once; the blocks are in the pool once the load has been reported.
        Where a load fails on its way in the mode ``"fused"``, the returned pool fails
        with it: its bytes are lost, and the caller has to start over with a new one.
        In the mode ``"staged"`` bytes that fail to arrive leave the pool as it was.

        Args:
            pool: The current pool. Donated, unless nothing is written into it yet.
            host_block_ids: int[n]. Blocks that hold bytes; one may come up twice.
            device_block_ids: int[n]. Where each goes in `pool`, distinct. With m
                blocks per host block int[n, m]; -1 for one that is not wanted.

        Returns:
            The pool to go on with, and the name of the transfer.

        Raises:
            ValueError: The pool has another layout, the ids are wrong, or a host
                block holds no bytes.
            RuntimeError: The pool has been deleted or donated, or another thread owns
                the engine.
        """
        leaves = self._leaves(pool)
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, False)
        extents, places = self._store.find(host_ids, device_ids != NOTHING)
        self._plans.check_lanes(device_ids, places)
        ticket = self._flow.load(leaves, device_ids, host_ids, extents, places)
        return self._layout.unflatten(leaves), ticket

    def copy(
        self,
        pool: PyTree,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> PyTree:
        """Copy device blocks to other device blocks; there when the next program runs.

        Args:
            pool: The current pool. Donated, if something is copied.
            source_block_ids: int[n]. Blocks of `pool`.
            target_block_ids: int[n]. Where each goes; distinct, no source among them.

        Returns:
            The pool to go on with.

        Raises:
            ValueError: The pool has another layout or a sharded block axis, or the ids
                are wrong.
        """
        leaves = self._leaves(pool)
        sources, targets = copy_pairs(
            source_block_ids, target_block_ids, self._layout.num_blocks
        )
        if self.num_lanes > 1:
            raise ValueError("a pool whose block axis is sharded has no copies.")
        if len(sources):
            self._mover.copy(leaves, sources, targets)
        return self._layout.unflatten(leaves)

    def advance(self, pool: PyTree) -> PyTree:
        """Do what has become possible: write what has landed, issue what waits.

        Returns at once. Call it once per step, before the model runs.

        Args:
            pool: The current pool. Donated, if something is written into it.

        Returns:
            The pool to go on with.
        """
        leaves = self._leaves(pool)
        self._flow.advance(leaves)
        return self._layout.unflatten(leaves)

    def poll(self) -> list[Completion]:
        """Report what has finished since the last report; never wait.

        Returns:
            Completions in the order of the calls. A transfer is reported after all
            earlier ones of its direction; failures are reported, not raised.
        """
        self._check_thread()
        return self._flow.report()

    def drain(self, pool: PyTree) -> tuple[PyTree, list[Completion]]:
        """Issue and wait for everything, for the end of a run or a flush.

        Args:
            pool: The current pool. Donated, if something is written into it.

        Returns:
            The pool to go on with, and what `poll` would report.
        """
        leaves = self._leaves(pool)
        self._flow.drain(leaves)
        return self._layout.unflatten(leaves), self._flow.report()

    def abandon(self, ticket: Ticket) -> None:
        """Give up a transfer that nobody waits for any more.

        What has been issued runs to its end, for a copy cannot be called back; the
        rest never is. It is not reported. The host blocks of a save hold nothing, the
        device blocks of a load hold anything.

        Raises:
            ValueError: No such transfer is in flight.
        """
        self._check_thread()
        if not self._flow.abandon(ticket):
            raise ValueError(
                f"{ticket} is not in flight: it was reported or abandoned before, or "
                "another engine gave it."
            )

    def _leaves(self, pool: PyTree) -> list[jax.Array]:
        self._check_thread()
        return self._layout.flatten(pool)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise RuntimeError(
                f"the engine was made by thread {self._owner} and is used by thread "
                f"{threading.get_ident()}: one thread must dispatch all work on a "
                "pool, for its order is what keeps bytes right."
            )

    def _pairs(
        self, device_ids: BlockIdsLike, host_ids: BlockIdsLike, may_share: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        num_blocks = self._layout.num_blocks, self.num_host_blocks
        return transfer_pairs(
            device_ids, host_ids, *num_blocks, self.blocks_per_host_block, may_share
        )
