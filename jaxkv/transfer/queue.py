"""The queue of transfers: what is in flight, and what is issued next."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extent_table import NO_EXTENT, ExtentTable
from jaxkv.transfer.host_memory import HostMemory
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.plans import NOTHING, Plans
from jaxkv.transfer.step_loads import StepLoads
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


class TransferQueue:
    """Issues the pieces of transfers in a safe order, within a byte budget.

    A transfer is cut into one piece for each extent that it touches. Pieces that would
    exceed the budget wait: loads go before saves, and each direction in the order of
    the calls. No transfer overtakes an older one that reads a device block which it
    writes, or writes one that it reads.

    In the mode ``"staged"`` a load has two steps: its bytes are copied to the device,
    and once they have landed, `advance` scatters them into the pool. So no program
    waits for the bus, and a failed copy leaves the pool as it was.

    A load may be left to the caller's own program instead (`take_step_loads`): it is
    written there whole, whatever the budget, and is over when that program is.

    Methods that take the pool's leaves as a list may replace leaves in it.
    """

    def __init__(
        self,
        copier: Copier,
        plans: Plans,
        table: ExtentTable,
        memory: HostMemory,
        budget_bytes: int,
    ):
        self.table = table
        self._copier = copier
        pool = copier.extents.pool
        self._block_bytes = pool.block_bytes * plans.blocks_per_host_block
        self._plans = plans
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._bytes_in_flight = 0
        self._num_issued = 0
        self._reported: dict[Direction, collections.deque[Transfer]] = {
            "save": collections.deque(),
            "load": collections.deque(),
        }
        # A save waits until all its pieces have been issued. A load's pieces wait, land
        # (if staged) and are then scattered.
        self._waiting_saves: collections.deque[Transfer] = collections.deque()
        self._saving: collections.deque[SavePiece] = collections.deque()
        self._waiting_loads: collections.deque[LoadPiece] = collections.deque()
        self._landing: collections.deque[LoadPiece] = collections.deque()
        self._loading: collections.deque[LoadPiece] = collections.deque()
        # What the caller's next program is to write, the pieces of an extent together;
        # and what it was given and has not started with.
        self._for_step: list[list[LoadPiece]] = []
        self._in_step: list[LoadPiece] = []
        # The last save that reads each device block, the last load that writes it.
        self._last_reader = np.full(pool.num_blocks, -1, np.int64)
        self._last_writer = np.full(pool.num_blocks, -1, np.int64)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the pieces that were issued and are not known to be done."""
        return self._bytes_in_flight

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not been reported."""
        return sum(len(queue) for queue in self._reported.values())

    @property
    def num_waiting(self) -> int:
        """Transfers that have not been issued completely."""
        loads = {piece.transfer.number for piece in self._unissued_loads()}
        return len(self._waiting_saves) + len(loads)

    @property
    def step_is_due(self) -> bool:
        """Whether the caller took loads for a program and has not started it."""
        return bool(self._in_step)

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a transfer still has to read or write the pool in a later call."""
        loads = [*self._landing, *self._unissued_loads(), *self._in_step]
        return any(
            transfer.ticket == ticket
            for transfer in (*self._waiting_saves, *[p.transfer for p in loads])
        )

    def save(
        self,
        leaves: list[jax.Array],
        device_ids: NDArray[np.int32],
        host_ids: NDArray[np.int32],
    ) -> Ticket:
        """Begin a save of ids that have been checked."""
        touched = device_ids[device_ids != NOTHING]
        after = int(self._last_writer[touched].max(initial=-1))
        transfer = self._begin("save", host_ids, device_ids, after)
        transfer.todo = np.arange(len(host_ids))
        self._last_reader[touched] = transfer.number
        self.table.claim(host_ids, transfer.number, device_ids != NOTHING)
        self._waiting_saves.append(transfer)
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
        in_step: bool,
    ) -> Ticket:
        """Begin a load of the blocks at `places` of `extents`, checked before.

        If `in_step`, `take_step_loads` is to hand it out.
        """
        touched = device_ids[device_ids != NOTHING]
        after = int(self._last_reader[touched].max(initial=-1))
        transfer = self._begin("load", host_ids, device_ids, after)
        self._last_writer[touched] = transfer.number
        layout = self._copier.extents
        targets = {}
        for extent in dict.fromkeys(extents.tolist()):
            (own,) = np.nonzero(extents == extent)
            targets[extent] = self._plans.load(device_ids[own], places[own])
        groups = range(self._copier.num_layer_groups)
        pieces = [
            [
                LoadPiece(transfer, layout.group_bytes[group], extent, rows, group)
                for group in groups
            ]
            for extent, rounds in targets.items()
            for rows in rounds
        ]
        for of_extent in pieces:
            for piece in of_extent:
                self.table.pin(piece.extent)
                transfer.num_pieces += 1
        if in_step:
            self._for_step += pieces
        else:
            for group in groups:  # All of the first layers before any of the next.
                self._waiting_loads += [of_extent[group] for of_extent in pieces]
            self.advance(leaves)
        return transfer.ticket

    def take_step_loads(self, leaves: list[jax.Array], num_extents: int) -> StepLoads:
        """Hand out loads that the caller's next program is to write.

        What does not fit, the engine's own programs write now. Where an older save has
        still to read what a load writes, this waits for it.
        """
        while not all(self._may_write(pieces[0]) for pieces in self._for_step):
            (self._saving or self._loading or self._landing)[0].wait()
            self.advance(leaves)
        # The first are written before the step, so that the order is kept.
        num_now = max(len(self._for_step) - num_extents, 0)
        now, given = self._for_step[:num_now], self._for_step[num_now:]
        self._for_step = []
        for group in range(self._copier.num_layer_groups):
            for of_extent in now:
                self._load_now(leaves, of_extent[group])
        for of_extent in given:
            self._in_step += of_extent
            self._bytes_in_flight += sum(piece.num_bytes for piece in of_extent)
        firsts = [of_extent[0] for of_extent in given]
        extents = [self._memory.get(piece.extent) for piece in firsts]
        targets = [piece.targets for piece in firsts]
        if firsts:  # As many each time, so that the program is traced once.
            num_spare = num_extents - len(firsts)
            extents += extents[:1] * num_spare
            targets += [np.full_like(targets[0], NOTHING)] * num_spare
        placed = tuple(map(self._copier.step_targets, targets))
        return StepLoads(tuple(extents), placed, self._copier)

    def start_step(self, token: jax.Array) -> None:
        """Note that the program which was given loads runs; `token` is a result."""
        for piece in self._in_step:
            piece.watched = [token]
            self._loading.append(piece)
        self._in_step = []

    def advance(self, leaves: list[jax.Array]) -> None:
        """Scatter what has landed, and issue what may go next."""
        self._collect()
        self._scatter_landed(leaves)
        self._issue(leaves)

    def abandon(self, ticket: Ticket) -> bool:
        """Abandon a transfer: its other pieces are not issued, and it is not reported.

        Returns:
            Whether such a transfer was in flight.
        """
        for transfer in self._reported[ticket.direction]:
            if transfer.ticket == ticket and not transfer.abandoned:
                transfer.abandoned = True
                self._drop_unissued(transfer)
                return True
        return False

    def report(self) -> list[Completion]:
        """Return what has finished since the last call, each direction in order."""
        self._collect()
        done = []
        for queue in self._reported.values():
            while queue and queue[0].is_over:
                transfer = queue.popleft()
                if transfer.ticket.direction == "save":
                    ok = transfer.error is None and not transfer.abandoned
                    self.table.finish(transfer.host_ids, transfer.number, ok)
                if not transfer.abandoned:
                    done.append(self._completion(transfer))
        return sorted(done, key=lambda completion: completion.ticket.number)

    def drain(self, leaves: list[jax.Array]) -> None:
        """Issue everything and wait for it."""
        if self._for_step:
            self.take_step_loads(leaves, 0)
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
        """Issue waiting pieces as far as the budget and the order allow."""
        while True:
            if self._waiting_loads:
                piece = self._waiting_loads[0]
                if self._may_write(piece):
                    if not self._has_room(piece.num_bytes):
                        return
                    self._issue_load(leaves, self._waiting_loads.popleft())
                    continue
            if not self._waiting_saves:
                return
            transfer = self._waiting_saves[0]
            if transfer.todo.size and not self._issue_save(leaves, transfer):
                return
            if not transfer.todo.size and transfer in self._waiting_saves:
                self._waiting_saves.remove(transfer)

    def _may_write(self, piece: LoadPiece) -> bool:
        """Whether no older save still has to read what a load writes."""
        waiting = self._waiting_saves
        return not waiting or waiting[0].number > piece.transfer.after

    def _unissued_loads(self) -> list[LoadPiece]:
        return [*self._waiting_loads, *itertools.chain(*self._for_step)]

    def _may_read(self, transfer: Transfer) -> bool:
        """Whether no older load still has to write what a save reads."""
        # The oldest of each: those that are left to the caller are in no order with
        # the others.
        pending = [*self._landing, *self._waiting_loads][:1]
        pending += [pieces[0] for pieces in self._for_step[:1]]
        return all(piece.transfer.number > transfer.after for piece in pending)

    def _has_room(self, num_bytes: int) -> bool:
        in_flight = self._bytes_in_flight
        return not in_flight or in_flight + num_bytes <= self._budget_bytes

    def _issue_save(self, leaves: list[jax.Array], transfer: Transfer) -> bool:
        """Issue the next piece of a save; return whether that was possible."""
        num_bytes = self._copier.extents.num_bytes
        if not self._may_read(transfer) or not self._has_room(num_bytes):
            return False
        ids = transfer.host_ids[transfer.todo]
        shards = self._plans.shards(transfer.device_ids[transfer.todo])
        placement = self.table.place(ids, shards)
        if placement is None:
            if self._saving or self._landing or self._loading:
                return False
            transfer.fail(
                MemoryError(
                    f"no room for host blocks {ids.tolist()}: the extents of the "
                    f"shards {sorted(set(shards.tolist()))} are full; make the host "
                    "tier larger, or spread blocks over the shards evenly."
                )
            )
            self._drop_unissued(transfer)
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
            extent, piece.watched = self._copier.save(leaves, plan, carry, spare)
            self._memory.put(placement.extent, extent)
        return True

    def _issue_load(self, leaves: list[jax.Array], piece: LoadPiece) -> None:
        """Issue a piece of a load."""
        if self._copier.mode == "fused":
            self._load_now(leaves, piece)
            return
        self._landing.append(piece)
        self._stage(piece)

    def _load_now(self, leaves: list[jax.Array], piece: LoadPiece) -> None:
        """Have whatever runs next on the pool find a piece there, in either mode."""
        if self._copier.mode == "staged":
            self._stage(piece)
            if piece.error is not None:
                self._loading.append(piece)
                return
        else:
            self._bytes_in_flight += piece.num_bytes
            extent = self._memory.get(piece.extent)
            piece.arrays = extent[self._copier.extents.arrays_of(piece.layer_group)]
        self._scatter(leaves, piece)

    def _stage(self, piece: LoadPiece) -> None:
        """Start to copy a piece to the device."""
        self._bytes_in_flight += piece.num_bytes
        extent = self._memory.get(piece.extent)
        with _ended_by_errors(piece):
            piece.arrays = self._copier.stage(extent, piece.layer_group)
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
            self._scatter(leaves, piece)

    def _scatter(self, leaves: list[jax.Array], piece: LoadPiece) -> None:
        """Write a piece into the pool."""
        arrays, piece.arrays = piece.arrays, None
        assert arrays is not None
        self._loading.append(piece)
        group = piece.layer_group
        with _ended_by_errors(piece):
            piece.watched = [self._copier.load(leaves, piece.targets, arrays, group)]

    def _collect(self) -> None:
        """Record the pieces that have finished."""
        for pieces in (self._saving, self._loading):
            while pieces and pieces[0].is_ready():
                self._end(pieces.popleft())

    def _end(self, piece: Piece) -> None:
        error = piece.wait()
        transfer = piece.transfer
        transfer.num_pieces -= 1
        self._bytes_in_flight -= piece.num_bytes
        if isinstance(piece, SavePiece):
            if error:
                self._memory.put(piece.placement.extent, None)
            self.table.settle(piece.placement, ok=error is None)
            if not error:
                self._follow(piece)
        elif isinstance(piece, LoadPiece):
            self.table.unpin(piece.extent)
        if error:
            transfer.fail(error)
            self._drop_unissued(transfer)

    def _follow(self, saved: SavePiece) -> None:
        """Point waiting loads at the extent that their blocks were carried over to.

        Otherwise their pins would keep the old extent from being free, and a save that
        such a load waits for could find no room.
        """
        for piece in self._unissued_loads():
            rows_wanted = piece.targets != NOTHING
            if piece.extent == saved.placement.carry and not np.any(
                rows_wanted & ~saved.plan.carried
            ):
                self.table.unpin(piece.extent)
                piece.extent = saved.placement.extent
                self.table.pin(piece.extent)

    def _drop_unissued(self, transfer: Transfer) -> None:
        """Drop the pieces of a transfer that have not been issued."""
        transfer.todo = transfer.todo[:0]
        if transfer in self._waiting_saves:
            self._waiting_saves.remove(transfer)
            self._forget_reader(transfer)
        for piece in self._unissued_loads():
            if piece.transfer is transfer:
                self.table.unpin(piece.extent)
                transfer.num_pieces -= 1
        self._waiting_loads = collections.deque(
            piece for piece in self._waiting_loads if piece.transfer is not transfer
        )
        self._for_step = [
            pieces for pieces in self._for_step if pieces[0].transfer is not transfer
        ]

    def _forget_reader(self, save: Transfer) -> None:
        """Keep later loads from waiting for a save that reads no more."""
        blocks = save.device_ids[save.device_ids != NOTHING]
        blocks = blocks[self._last_reader[blocks] == save.number]
        self._last_reader[blocks] = -1
        for other in self._waiting_saves:
            shared = np.intersect1d(blocks, other.device_ids)
            self._last_reader[shared] = other.number

    def _completion(self, transfer: Transfer) -> Completion:
        ids = tuple(transfer.host_ids.tolist())
        num_bytes = len(ids) * self._block_bytes
        return Completion(transfer.ticket, ids, num_bytes, transfer.error)


@contextlib.contextmanager
def _ended_by_errors(piece: Piece) -> Iterator[None]:
    """Record any error in the piece, so that it never counts as arrived.

    `TRANSFER_ERRORS` stop here; others, such as an interrupt, are raised again.
    """
    try:
        yield
    except TRANSFER_ERRORS as error:
        piece.error = error
    except BaseException as error:
        piece.error = RuntimeError(f"stopped by {error!r} before it was issued")
        raise
