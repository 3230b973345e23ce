"""The transfer engine: issue saves and loads, and learn when they are done."""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.hoststore import HostStore
from jaxkv.transfer.kernels import (
    MODES,
    PROGRAM_SIZES,
    BlockIdsLike,
    Mode,
    Mover,
    block_ids,
    check_distinct,
    chunks,
)
from jaxkv.transfer.memory import PoolLayout
from jaxkv.types import PyTree

Direction: TypeAlias = Literal["store", "load"]

# What a transfer may fail with; anything else is a mistake in the code, and raised.
_TRANSFER_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


class Ticket(NamedTuple):
    """Names one transfer of one engine.

    Attributes:
        direction: ``"store"`` (device to host) or ``"load"`` (host to device).
        number: Counts the engine's transfers in the order of issue, from 0.
    """

    direction: Direction
    number: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """How a transfer ended.

    Attributes:
        ticket: What `save` or `load` returned for it.
        num_blocks: How many blocks it was to move.
        num_bytes: The bytes of these blocks.
        error: Why it failed; None if it did not.
    """

    ticket: Ticket
    num_blocks: int
    num_bytes: int
    error: Exception | None

    @property
    def direction(self) -> Direction:
        """``"store"`` or ``"load"``."""
        return self.ticket.direction


@dataclasses.dataclass(frozen=True, eq=False)
class _InFlight:
    """A transfer that has been issued.

    Attributes:
        ticket: Its name.
        host_ids: i32[n]. The host blocks that it reads or writes.
        watched: Arrays that are ready when it is done. None of them is donated.
        error: What stopped its being issued, if anything did.
    """

    ticket: Ticket
    host_ids: NDArray[np.int32]
    watched: list[jax.Array]
    error: Exception | None

    def is_ready(self) -> bool:
        return all(
            array.is_ready()  # type: ignore[attr-defined]
            for array in self.watched
        )

    def wait(self) -> Exception | None:
        """Wait until it is done, and say why it failed."""
        try:
            # A failed array is ready, too: only waiting for it brings up the error.
            jax.block_until_ready(self.watched)  # type: ignore[no-untyped-call]
        except _TRANSFER_ERRORS as error:
            return self.error or error.with_traceback(None)
        return self.error


class TransferEngine:
    """Moves blocks between a device pool and host memory, in the background.

    A pool is a pytree of arrays with the block axis first. The engine knows its
    layout and owns `num_host_blocks` blocks of pinned host memory; the pool itself
    stays with the caller, who passes it to every call and must go on with the one
    that `load` returns.

    Nothing blocks but `drain`. Data dependencies order the transfers among
    themselves and against the caller's steps: a step that is given the pool after a
    load sees the loaded blocks, and one that overwrites a device block after `save`
    returned does not harm what is saved.

    One thread owns an engine and dispatches all the work on its pool: the order of
    dispatch is what all of this rests on, and there are no locks.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkv.transfer import TransferEngine
        >>> pool = {"k": jnp.ones((8, 16, 4)), "v": jnp.zeros((8, 16, 4))}
        >>> engine = TransferEngine(pool, num_host_blocks=32)
        >>> ticket = engine.save(pool, [5, 2], [30, 7])
        >>> [completion] = engine.drain()
        >>> completion.ticket == ticket, completion.num_bytes, completion.error
        (True, 1024, None)
        >>> pool, ticket = engine.load(pool, [7], [0])
        >>> ticket
        Ticket(direction='load', number=1)
    """

    def __init__(self, pool: PyTree, num_host_blocks: int, *, mode: Mode | None = None):
        """Set up the host memory for blocks of `pool`.

        Args:
            pool: A pool of the layout that all later ones will have; not kept.
            num_host_blocks: How many blocks the host memory holds.
            mode: ``"fused"`` or ``"staged"``, see `Mover`; the results are the same.
                None takes fused on CPU and staged elsewhere.

        Raises:
            ValueError: `pool` cannot be offloaded, or another argument is wrong.
            MemoryError: There is not that much host memory.
        """
        if mode not in (None, *MODES):
            raise ValueError(f"{mode=} must be one of {MODES} or None.")
        if num_host_blocks < 1:
            raise ValueError(f"{num_host_blocks=} must be at least 1.")
        self._layout = PoolLayout.of(pool)
        if mode is None:
            mode = "fused" if self._layout.device.platform == "cpu" else "staged"
        self._mover = Mover(self._layout, mode)
        self._store = HostStore(self._layout, num_host_blocks)
        self._in_flight: dict[Direction, collections.deque[_InFlight]] = {
            "store": collections.deque(),
            "load": collections.deque(),
        }
        self._num_issued = 0

    @property
    def mode(self) -> Mode:
        """``"fused"`` or ``"staged"``."""
        return self._mover.mode

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that the engine owns."""
        return self._store.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all leaves together."""
        return self._layout.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all host blocks."""
        return self.num_host_blocks * self.block_bytes

    @property
    def num_in_flight(self) -> int:
        """Transfers issued and not yet reported by `poll` or `drain`."""
        return sum(len(queue) for queue in self._in_flight.values())

    def warm_up(self) -> None:
        """Compile every program now, so that no later save or load waits for it."""
        for size in PROGRAM_SIZES:
            self._mover.save_program(size)
            self._mover.load_program(size)

    def save(
        self,
        pool: PyTree,
        device_block_ids: BlockIdsLike,
        host_block_ids: BlockIdsLike,
    ) -> Ticket:
        """Copy device blocks to host blocks.

        Returns at once. The device blocks may be overwritten from then on; what the
        host blocks held is gone, and they can be loaded from when the save has been
        reported as completed without an error.

        Args:
            pool: The current pool; only read.
            device_block_ids: int[n]. Blocks of `pool`, distinct.
            host_block_ids: int[n]. Where each goes, distinct.

        Returns:
            The name of the transfer.

        Raises:
            ValueError: The pool has another layout, or the ids are wrong.
            RuntimeError: The pool has been deleted or donated.
        """
        leaves = self._layout.flatten(pool)
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids)
        check_distinct("device_block_ids", device_ids)
        check_distinct("host_block_ids", host_ids)

        ticket = self._next_ticket("store")
        watched: list[jax.Array] = []
        failure = None
        self._store.claim(host_ids, ticket.number)
        try:
            for chunk in chunks(len(host_ids)):
                old = self._store.take(host_ids[chunk])
                blocks, tokens = self._mover.save(leaves, device_ids[chunk], old)
                self._store.put(host_ids[chunk], blocks)
                watched += tokens
        except _TRANSFER_ERRORS as error:
            failure = error.with_traceback(None)  # Whose frames would keep the pool.
        self._issue(_InFlight(ticket, host_ids, watched, failure))
        return ticket

    def load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
    ) -> tuple[PyTree, Ticket]:
        """Copy host blocks to device blocks.

        Returns at once. Where a load fails on its way, the returned pool fails with
        it: its bytes are lost, and the caller has to start over with a new one.

        Args:
            pool: The current pool. Donated, unless there are no blocks to load.
            host_block_ids: int[n]. Blocks that hold bytes; one may come up twice.
            device_block_ids: int[n]. Where each goes in `pool`, distinct.

        Returns:
            The pool with these blocks replaced, and the name of the transfer.

        Raises:
            ValueError: The pool has another layout, the ids are wrong, or a host
                block holds no bytes.
            RuntimeError: The pool has been deleted or donated.
        """
        leaves = self._layout.flatten(pool)
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids)
        check_distinct("device_block_ids", device_ids)
        blocks = self._store.read(host_ids)

        ticket = self._next_ticket("load")
        watched: list[jax.Array] = []
        failure = None
        try:
            for chunk in chunks(len(host_ids)):
                leaves, tokens = self._mover.load(
                    leaves, device_ids[chunk], blocks[chunk]
                )
                watched += tokens
        except _TRANSFER_ERRORS as error:
            failure = error.with_traceback(None)
        self._issue(_InFlight(ticket, host_ids, watched, failure))
        return self._layout.unflatten(leaves), ticket

    def poll(self) -> list[Completion]:
        """Report what has finished since the last report; never wait.

        Returns:
            Completions in the order of issue. A transfer is reported after all
            earlier ones of its direction; failures are reported, not raised.
        """
        return self._report(wait=False)

    def drain(self) -> list[Completion]:
        """Wait for everything in flight and report it, as `poll` does."""
        return self._report(wait=True)

    def _pairs(
        self, device_block_ids: BlockIdsLike, host_block_ids: BlockIdsLike
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        device_ids = block_ids(
            "device_block_ids", device_block_ids, self._layout.num_blocks
        )
        host_ids = block_ids("host_block_ids", host_block_ids, self.num_host_blocks)
        if len(device_ids) != len(host_ids):
            raise ValueError(
                f"{len(device_ids)} device_block_ids and {len(host_ids)} "
                "host_block_ids must be equally many: they go in pairs."
            )
        return device_ids, host_ids

    def _next_ticket(self, direction: Direction) -> Ticket:
        ticket = Ticket(direction, self._num_issued)
        self._num_issued += 1
        return ticket

    def _issue(self, transfer: _InFlight) -> None:
        self._in_flight[transfer.ticket.direction].append(transfer)

    def _report(self, wait: bool) -> list[Completion]:
        done = []
        for queue in self._in_flight.values():
            while queue and (wait or queue[0].is_ready()):
                done.append(self._finish(queue.popleft()))
        return sorted(done, key=lambda completion: completion.ticket.number)

    def _finish(self, transfer: _InFlight) -> Completion:
        ticket, host_ids = transfer.ticket, transfer.host_ids
        error = transfer.wait()
        if ticket.direction == "store":
            self._store.settle(host_ids, ticket.number, ok=error is None)
        num_bytes = len(host_ids) * self.block_bytes
        return Completion(ticket, len(host_ids), num_bytes, error)
