"""What is on its way, and what may go next."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extents import Extent
from jaxkv.transfer.hostmemory import HostMemory
from jaxkv.transfer.hoststore import NO_EXTENT, HostStore
from jaxkv.transfer.kernels import Mover
from jaxkv.transfer.plans import NOTHING, Plans
from jaxkv.transfer.tickets import (
    TRANSFER_ERRORS,
    Completion,
    Direction,
    LoadPiece,
    Piece,
    SavePiece,
    Ticket,
    Transfer,
)


class Flow:
    """Issues the pieces of transfers in an order that is right, within a budget.

    A transfer is cut into pieces, one for each extent that it touches. What would put
    more bytes in flight than the budget allows waits, loads before stores, and each
    direction in the order of the calls. No transfer overtakes an older one that reads
    a device block which it writes, or writes one that it reads.

    A load in the mode ``"staged"`` has two steps: its bytes travel to the device by
    themselves, and once they are there, `advance` scatters them into the pool. So no
    program waits for the bus, and bytes that fail to arrive leave the pool alone.

    Methods that take the pool's leaves as a list may replace some in it.
    """

    def __init__(
        self,
        mover: Mover,
        plans: Plans,
        store: HostStore,
        memory: HostMemory,
        budget_bytes: int,
    ):
        self.store = store
        self._mover = mover
        pool = mover.extents.pool
        self._block_bytes = pool.block_bytes * plans.blocks_per_host_block
        self._plans = plans
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._bytes_in_flight = 0
        self._num_issued = 0
        self._reported: dict[Direction, collections.deque[Transfer]] = {
            "store": collections.deque(),
            "load": collections.deque(),
        }
        # A store waits here until it has been issued as a whole, then its pieces are
        # in flight. A load's pieces wait, land (if staged) and are then scattered.
        self._waiting_stores: collections.deque[Transfer] = collections.deque()
        self._saving: collections.deque[SavePiece] = collections.deque()
        self._waiting_loads: collections.deque[LoadPiece] = collections.deque()
        self._landing: collections.deque[LoadPiece] = collections.deque()
        self._loading: collections.deque[LoadPiece] = collections.deque()
        # The last store that reads each device block, the last load that writes it.
        self._last_reader = np.full(pool.num_blocks, -1, np.int64)
        self._last_writer = np.full(pool.num_blocks, -1, np.int64)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the pieces that were issued and are not known to be over."""
        return self._bytes_in_flight

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not been reported."""
        return sum(len(queue) for queue in self._reported.values())

    @property
    def num_waiting(self) -> int:
        """Transfers of which some part has not been issued."""
        loads = {piece.transfer.number for piece in self._waiting_loads}
        return len(self._waiting_stores) + len(loads)

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether some part of a transfer still has to read or write the pool."""
        loads = [*self._landing, *self._waiting_loads]
        return any(
            transfer.ticket == ticket
            for transfer in (*self._waiting_stores, *[p.transfer for p in loads])
        )

    def save(
        self,
        leaves: list[jax.Array],
        device_ids: NDArray[np.int32],
        host_ids: NDArray[np.int32],
    ) -> Ticket:
        """Begin a store; nothing of it may be wrong any more."""
        touched = device_ids[device_ids != NOTHING]
        after = int(self._last_writer[touched].max(initial=-1))
        transfer = self._begin("store", host_ids, device_ids, after)
        transfer.todo = np.arange(len(host_ids))
        self._last_reader[touched] = transfer.number
        self.store.claim(host_ids, transfer.number, device_ids != NOTHING)
        self._waiting_stores.append(transfer)
        self._collect()
        if not self._waiting_loads:
            self._issue(leaves)
        return transfer.ticket

    def load(
        self,
        leaves: list[jax.Array],
        device_ids: NDArray[np.int32],
        host_ids: NDArray[np.int32],
        extents: NDArray[np.int32],
        places: NDArray[np.int32],
    ) -> Ticket:
        """Begin a load of blocks that lie at `places` of `extents`."""
        touched = device_ids[device_ids != NOTHING]
        after = int(self._last_reader[touched].max(initial=-1))
        transfer = self._begin("load", host_ids, device_ids, after)
        self._last_writer[touched] = transfer.number
        layout = self._mover.extents
        targets = {}
        for extent in dict.fromkeys(extents.tolist()):
            (own,) = np.nonzero(extents == extent)
            targets[extent] = self._plans.load(device_ids[own], places[own])
        for group in range(self._mover.num_layer_groups):
            for extent, rounds in targets.items():
                for rows in rounds:
                    num_bytes = layout.group_bytes[group]
                    piece = LoadPiece(transfer, num_bytes, extent, rows, group)
                    self.store.pin(extent)
                    self._waiting_loads.append(piece)
                    transfer.num_pieces += 1
        self.advance(leaves)
        return transfer.ticket

    def advance(self, leaves: list[jax.Array]) -> None:
        """Do what has become possible: scatter what has landed, issue what waits."""
        self._collect()
        self._scatter_landed(leaves)
        self._issue(leaves)

    def abandon(self, ticket: Ticket) -> bool:
        """Forget a transfer; what has not been issued of it never will be.

        Returns:
            Whether there was such a transfer.
        """
        for transfer in self._reported[ticket.direction]:
            if transfer.ticket == ticket and not transfer.abandoned:
                transfer.abandoned = True
                self._give_up(transfer)
                return True
        return False

    def report(self) -> list[Completion]:
        """Say what is over since the last time, each direction in its order."""
        self._collect()
        done = []
        for queue in self._reported.values():
            while queue and queue[0].is_over:
                transfer = queue.popleft()
                if transfer.ticket.direction == "store":
                    ok = transfer.error is None and not transfer.abandoned
                    self.store.finish(transfer.host_ids, transfer.number, ok)
                if not transfer.abandoned:
                    done.append(self._completion(transfer))
        return sorted(done, key=lambda completion: completion.ticket.number)

    def drain(self, leaves: list[jax.Array]) -> None:
        """Issue and wait for everything."""
        self.advance(leaves)
        while pieces := [*self._landing, *self._saving, *self._loading]:
            pieces[0].wait()
            self.advance(leaves)

    def _begin(
        self,
        direction: Direction,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
        after: int,
    ) -> Transfer:
        ticket = Ticket(direction, self._num_issued)
        self._num_issued += 1
        transfer = Transfer(ticket, host_ids, device_ids, after, np.zeros(0, np.intp))
        self._reported[direction].append(transfer)
        return transfer

    def _issue(self, leaves: list[jax.Array]) -> None:
        """Issue what waits, as far as the budget and the order allow."""
        while True:
            if self._waiting_loads:
                piece = self._waiting_loads[0]
                if self._may_write(piece):
                    if not self._has_room(piece.num_bytes):
                        return
                    self._issue_load(leaves, self._waiting_loads.popleft())
                    continue
            if not self._waiting_stores:
                return
            transfer = self._waiting_stores[0]
            if transfer.todo.size and not self._issue_store(leaves, transfer):
                return
            if not transfer.todo.size and transfer in self._waiting_stores:
                self._waiting_stores.remove(transfer)

    def _may_write(self, piece: LoadPiece) -> bool:
        """Whether no older store still has to read what a load writes."""
        waiting = self._waiting_stores
        return not waiting or waiting[0].number > piece.transfer.after

    def _may_read(self, transfer: Transfer) -> bool:
        """Whether no older load still has to write what a store reads."""
        pending = [*self._landing, *self._waiting_loads][:1]
        return not pending or pending[0].transfer.number > transfer.after

    def _has_room(self, num_bytes: int) -> bool:
        in_flight = self._bytes_in_flight
        return not in_flight or in_flight + num_bytes <= self._budget_bytes

    def _issue_store(self, leaves: list[jax.Array], transfer: Transfer) -> bool:
        """Issue one piece of a store; say whether it could be."""
        num_bytes = self._mover.extents.num_bytes
        if not self._may_read(transfer) or not self._has_room(num_bytes):
            return False
        ids = transfer.host_ids[transfer.todo]
        lanes = self._plans.lanes(transfer.device_ids[transfer.todo])
        placement = self.store.place(ids, lanes)
        if placement is None:
            if self._saving or self._landing or self._loading:
                return False
            transfer.fail(
                MemoryError(
                    f"no room for host blocks {ids.tolist()}: the extents of the lanes "
                    f"{sorted(set(lanes.tolist()))} are full; make the host tier "
                    "larger, or spread blocks over the lanes evenly."
                )
            )
            self._give_up(transfer)
            return True
        device_ids = transfer.device_ids[transfer.todo[placement.picked]]
        plan = self._plans.save(device_ids, placement)
        piece = SavePiece(transfer, num_bytes, placement, plan)
        transfer.todo = np.delete(transfer.todo, placement.picked)
        transfer.num_pieces += 1
        self._bytes_in_flight += num_bytes
        self._saving.append(piece)
        with _ended_by_errors(piece):
            carry = None
            if placement.carry != NO_EXTENT:
                carry = self._memory.get(placement.carry)
            spare = self._memory.take(placement.extent)
            extent, piece.watched = self._mover.save(leaves, plan, carry, spare)
            self._memory.put(placement.extent, extent)
        return True

    def _issue_load(self, leaves: list[jax.Array], piece: LoadPiece) -> None:
        """Issue a piece of a load."""
        self._bytes_in_flight += piece.num_bytes
        extent = self._memory.get(piece.extent)
        if self._mover.mode == "fused":
            arrays = extent[self._mover.extents.arrays_of(piece.layer_group)]
            self._scatter(leaves, piece, arrays)
            return
        self._landing.append(piece)
        with _ended_by_errors(piece):
            piece.arrays = self._mover.stage(extent, piece.layer_group)
            piece.watched = list(piece.arrays)

    def _scatter_landed(self, leaves: list[jax.Array]) -> None:
        while self._landing and self._landing[0].is_ready():
            piece = self._landing.popleft()
            error = piece.wait()
            transfer = piece.transfer
            if error or transfer.error or transfer.abandoned:
                piece.error = error
                self._end(piece)
                continue
            assert piece.arrays is not None
            self._scatter(leaves, piece, piece.arrays)

    def _scatter(
        self, leaves: list[jax.Array], piece: LoadPiece, arrays: Extent
    ) -> None:
        """Write a piece into the pool."""
        self._loading.append(piece)
        group = piece.layer_group
        with _ended_by_errors(piece):
            piece.watched = [self._mover.load(leaves, piece.targets, arrays, group)]

    def _collect(self) -> None:
        """Take note of the pieces that are over."""
        for queue in (self._saving, self._loading):
            while queue and queue[0].is_ready():
                self._end(queue.popleft())

    def _end(self, piece: Piece) -> None:
        error = piece.wait()
        transfer = piece.transfer
        transfer.num_pieces -= 1
        self._bytes_in_flight -= piece.num_bytes
        if isinstance(piece, SavePiece):
            if error:
                self._memory.put(piece.placement.extent, None)
            self.store.settle(piece.placement, ok=error is None)
            if not error:
                self._follow(piece)
        elif isinstance(piece, LoadPiece):
            self.store.unpin(piece.extent)
        if error:
            transfer.fail(error)
            self._give_up(transfer)

    def _follow(self, saved: SavePiece) -> None:
        """Have loads that wait read blocks where they have been taken over to.

        Else the extent that was left would not be free, and the store that such a
        load waits for would find no room.
        """
        for piece in self._waiting_loads:
            rows_wanted = piece.targets != NOTHING
            if piece.extent == saved.placement.carry and not np.any(
                rows_wanted & ~saved.plan.carried
            ):
                self.store.unpin(piece.extent)
                piece.extent = saved.placement.extent
                self.store.pin(piece.extent)

    def _give_up(self, transfer: Transfer) -> None:
        """Drop what has not been issued of a transfer."""
        transfer.todo = transfer.todo[:0]
        if transfer in self._waiting_stores:
            self._waiting_stores.remove(transfer)
            self._forget_reader(transfer)
        for piece in [p for p in self._waiting_loads if p.transfer is transfer]:
            self._waiting_loads.remove(piece)
            self.store.unpin(piece.extent)
            transfer.num_pieces -= 1

    def _forget_reader(self, store: Transfer) -> None:
        """Have no later load wait for a store that will not read any more."""
        blocks = store.device_ids[store.device_ids != NOTHING]
        blocks = blocks[self._last_reader[blocks] == store.number]
        self._last_reader[blocks] = -1
        for other in self._waiting_stores:
            shared = np.intersect1d(blocks, other.device_ids)
            self._last_reader[shared] = other.number

    def _completion(self, transfer: Transfer) -> Completion:
        ids = tuple(transfer.host_ids.tolist())
        num_bytes = len(ids) * self._block_bytes
        return Completion(transfer.ticket, ids, num_bytes, transfer.error)


@contextlib.contextmanager
def _ended_by_errors(piece: Piece) -> Iterator[None]:
    """Have any error end a piece, so that it never passes for one that arrived.

    Those that transfers fail with go no further; others, an interrupt among them, do.
    """
    try:
        yield
    except TRANSFER_ERRORS as error:
        piece.error = error
    except BaseException as error:
        piece.error = RuntimeError(f"stopped by {error!r} before it was issued")
        raise
