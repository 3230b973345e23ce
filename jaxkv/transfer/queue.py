"""The queue of transfers: what is in flight, and what is issued next."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extent_table import NO_EXTENT, ExtentTable, Placement
from jaxkv.transfer.host_bytes import HostBytes
from jaxkv.transfer.host_memory import HostMemory
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.plans import NOTHING, Plans, SavePlan, cut_load, shortest_first
from jaxkv.transfer.tickets import (
    TRANSFER_ERRORS,
    Bytes,
    Call,
    Completion,
    Direction,
    HostWrite,
    LoadPiece,
    Piece,
    SavePiece,
    Ticket,
    Transfer,
    WritePiece,
)

_P = TypeVar("_P", bound=Piece)

# How long to wait between two looks at copies of other threads.
_PAUSE_S = 1e-4


class TransferQueue:
    """Issues the pieces of transfers in a safe order, within a byte budget.

    A call is cut into one piece for each extent that it touches. Pieces that would
    exceed the budget wait: loads go before saves, and each direction in the order of
    the calls. No call overtakes an older one that reads a device block which it writes,
    or writes one that it reads.

    A call may load for several transfers. They share the pieces of the extents that
    several of them touch, so that no extent moves twice. Transfers with the fewest
    pieces go first, and each ends when its own pieces have ended.

    In the mode ``"staged"`` a load has two steps: its bytes are copied to the device,
    and once they have landed, `advance` scatters them into the pool. So no program
    waits for the bus, and a failed copy leaves the pool as it was.

    A host write is a save whose bytes come from the host. Another thread copies them,
    and they do not count in the budget. It waits only for room, and is not reported.

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
        self.host_bytes = HostBytes(copier, plans, table, memory)
        self._copier = copier
        pool = copier.extents.pool
        self._block_bytes = pool.block_bytes * plans.blocks_per_host_block
        self._plans = plans
        self._memory = memory
        self._budget_bytes = budget_bytes
        self.bytes_in_flight = 0
        """Bytes of the pieces that were issued and are not known to be done."""
        self._num_issued = 0
        self._transfers: dict[Ticket, Transfer] = {}
        self._calls: dict[Direction, collections.deque[Call]] = {
            "save": collections.deque(),
            "load": collections.deque(),
        }
        # A save waits until all its pieces have been issued. A load's pieces wait, land
        # (if staged) and are then scattered.
        self._waiting_saves: collections.deque[Transfer] = collections.deque()
        self._saving: collections.deque[SavePiece] = collections.deque()
        self._writes: list[HostWrite] = []
        self._writing: list[WritePiece] = []
        self._waiting_loads: collections.deque[LoadPiece] = collections.deque()
        self._landing: collections.deque[LoadPiece] = collections.deque()
        self._loading: collections.deque[LoadPiece] = collections.deque()
        # `ExtentTable.num_freed` when a save found no room.
        self._no_room_at = -1
        # Loads with a piece that waits, and these pieces by extent, as keys of dicts.
        self._num_waiting_loads = 0
        self._waiting_of_extent: dict[int, dict[LoadPiece, None]] = {}
        # The last save that reads each device block, the last load that writes it.
        self._last_reader = np.full(pool.num_blocks, -1, np.int64)
        self._last_writer = np.full(pool.num_blocks, -1, np.int64)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not been reported."""
        return len(self._transfers)

    @property
    def num_waiting(self) -> int:
        """Transfers that have not been issued completely."""
        return len(self._waiting_saves) + self._num_waiting_loads

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a transfer still has to read or write the pool in a later call."""
        transfer = self._transfers.get(ticket)
        return transfer is not None and bool(transfer.todo.size or transfer.unwritten)

    def save(
        self,
        leaves: list[jax.Array],
        device_ids: NDArray[np.int32],
        host_ids: NDArray[np.int32],
    ) -> Ticket:
        """Begin a save of ids that have been checked."""
        touched = self._touched(device_ids)
        after = -1  # What older loads write is in the pool.
        if self._waiting_loads or self._landing:
            after = int(self._last_writer[touched].max(initial=-1))
        call = Call(self._num_issued, after)
        transfer = self._begin("save", call, host_ids, device_ids)
        transfer.todo = np.arange(len(host_ids))
        self._last_reader[touched] = transfer.number
        self.table.claim(host_ids, transfer.number, device_ids != NOTHING)
        self._waiting_saves.append(transfer)
        self._record_if_over(transfer)
        self.collect()
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
        sizes: Sequence[int],
    ) -> list[Ticket]:
        """Begin loads of the checked blocks at `places` of `extents`.

        Each load has as many of them, in their order, as `sizes` says.
        """
        touched = self._touched(device_ids)
        after = -1  # Older saves have read what they need.
        if self._waiting_saves:
            after = int(self._last_reader[touched].max(initial=-1))
        call = Call(self._num_issued, after)
        ends = np.cumsum(sizes)
        transfers = [
            self._begin(
                "load", call, host_ids[end - n : end], device_ids[end - n : end]
            )
            for n, end in zip(sizes, ends.tolist(), strict=True)
        ]
        self._last_writer[touched] = call.number
        cuts = cut_load(extents, places, np.repeat(np.arange(len(sizes)), sizes))
        num_bytes = self._copier.extents.num_bytes
        for cut in shortest_first(cuts, len(sizes)):
            loads = [transfers[number] for number in cut.transfers]
            targets = self._plans.load(device_ids[cut.rows], places[cut.rows])
            piece = LoadPiece(loads, num_bytes, call, cut.extent, targets)
            self._hold_extent(piece)
            self._waiting_loads.append(piece)
            for transfer in loads:
                transfer.num_pieces += 1
                transfer.num_unissued += 1
                transfer.unwritten[piece] = None
        for transfer in transfers:
            self._num_waiting_loads += bool(transfer.num_unissued)
            self._record_if_over(transfer)
        self.advance(leaves)
        return [transfer.ticket for transfer in transfers]

    def _touched(self, device_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the blocks among i32[n, m]."""
        is_one = device_ids.shape[1] == 1
        touched: NDArray[np.int32] = (
            device_ids[:, 0] if is_one else device_ids[device_ids != NOTHING]
        )
        return touched

    def write(self, host_ids: NDArray[np.int32], payloads: list[Bytes]) -> HostWrite:
        """Begin to write u8[num_bytes] for each block; `advance_writes` continues."""
        number, plans = self.next_number(), self._plans
        # Any device block of the shard that each is for: no bytes leave it.
        shards = host_ids.astype(np.int64) * plans.num_shards // self.table.num_blocks
        device_ids = (shards * plans.shard_blocks).astype(np.int32)
        write = HostWrite(
            Ticket("save", number),
            Call(number, -1),
            host_ids,
            np.repeat(device_ids[:, None], plans.blocks_per_host_block, axis=1),
            np.arange(len(host_ids)),
            payloads=dict(zip(host_ids.tolist(), payloads, strict=True)),
        )
        self.table.claim(host_ids, number)
        self._writes.append(write)
        self._record_if_over(write)
        return write

    def advance_writes(self, run: Callable[[Callable[[], None]], object]) -> None:
        """Record what has finished, and have `run` copy the writes that find room."""
        self.collect()
        for write in list(self._writes):
            while write.todo.size and (placed := self._place(write)):
                self._start_write(write, *placed, run)

    def _start_write(
        self,
        write: HostWrite,
        placement: Placement,
        plan: SavePlan,
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        payloads = [write.payloads[block] for block in placement.ids.tolist()]
        piece = WritePiece([write], 0, placement, plan, payloads=payloads)
        self._writing.append(piece)
        try:
            if placement.carry != NO_EXTENT:
                piece.carry = self._memory.get(placement.carry)
            piece.spare = self._memory.take(placement.extent)
            run(functools.partial(self.host_bytes.fill, piece))
        except Exception as error:  # Such as of a thread that cannot start.
            piece.error, piece.has_ended = error, True

    def next_number(self) -> int:
        """Return the number of a new transfer."""
        self._num_issued += 1
        return self._num_issued - 1

    @property
    def wants_pool(self) -> bool:
        """Whether `advance` has something to read from the pool, or to write there."""
        landing = self._landing
        return bool(
            self._waiting_loads
            or self._waiting_saves
            or (landing and landing[0].is_ready())
        )

    def advance(self, leaves: list[jax.Array]) -> None:
        """Scatter what has landed, and issue what may go next."""
        self.collect()
        self._scatter_landed(leaves)
        self._issue(leaves)

    def abandon(self, ticket: Ticket) -> bool:
        """Abandon a transfer: its other pieces are not issued, and it is not reported.

        False if there is no such transfer in flight.
        """
        transfer = self._transfers.get(ticket)
        if transfer is None or transfer.abandoned:
            return False
        transfer.abandoned = True
        self._drop_unissued(transfer)
        return True

    def report(self) -> list[Completion]:
        """Return what has finished since the last report.

        A call is reported after all earlier calls of its direction have ended.
        """
        self.collect()
        done = []
        for calls in self._calls.values():
            while calls:
                ended, calls[0].ended = calls[0].ended, []
                for transfer in ended:
                    del self._transfers[transfer.ticket]
                    if transfer.ticket.direction == "save":
                        ok = transfer.error is None and not transfer.abandoned
                        self.table.finish(transfer.host_ids, transfer.number, ok)
                    if not transfer.abandoned:
                        ids = tuple(transfer.host_ids.tolist())
                        num_bytes = len(ids) * self._block_bytes
                        done.append(
                            Completion(transfer.ticket, ids, num_bytes, transfer.error)
                        )
                if calls[0].num_left:
                    break
                calls.popleft()
        return sorted(done, key=lambda completion: completion.ticket.number)

    def drain(self, leaves: list[jax.Array]) -> None:
        """Issue everything and wait for it."""
        self.advance(leaves)
        while self._wait():
            self.advance(leaves)

    def _wait(self) -> bool:
        """Wait for a piece that delays waiting transfers; False if there is none."""
        if pieces := self._landing or self._saving or self._loading:
            pieces[0].wait()
        elif self._waiting_saves and self._other_threads_hold_extents:
            time.sleep(_PAUSE_S)  # Its copies take less than a transfer.
            self.advance_writes(lambda copy: copy())
        else:
            return False
        return True

    def _begin(
        self,
        direction: Direction,
        call: Call,
        host_ids: NDArray[np.int32],
        device_ids: NDArray[np.int32],
    ) -> Transfer:
        ticket = Ticket(direction, self._num_issued)
        self._num_issued += 1
        transfer = Transfer(ticket, call, host_ids, device_ids, np.zeros(0, np.intp))
        self._transfers[ticket] = transfer
        if not call.num_left:
            self._calls[direction].append(call)
        call.num_left += 1
        return transfer

    def _record_if_over(self, transfer: Transfer) -> None:
        """Finish a write, or have another transfer reported, if nothing is left."""
        if not transfer.is_over or transfer.is_noted:
            return
        transfer.is_noted = True
        if isinstance(transfer, HostWrite):
            ok = transfer.error is None
            self.table.finish(transfer.host_ids, transfer.number, ok)
            transfer.payloads.clear()
            self._writes.remove(transfer)
            return
        transfer.call.ended.append(transfer)
        transfer.call.num_left -= 1

    def _issue(self, leaves: list[jax.Array]) -> None:
        """Issue waiting pieces as far as the budget and the order allow."""
        while True:
            if self._waiting_loads and self._may_write(self._waiting_loads[0]):
                pieces = self._next_loads()
                if not pieces:
                    return
                self._issue_loads(leaves, pieces)
                continue
            if not self._waiting_saves:
                return
            transfer = self._waiting_saves[0]
            if transfer.todo.size and not self._issue_save(leaves, transfer):
                return
            if not transfer.todo.size and transfer in self._waiting_saves:
                self._waiting_saves.remove(transfer)

    def _next_loads(self) -> list[LoadPiece]:
        """Return the loads that may go next; none without room."""
        waiting, pieces = self._waiting_loads, list[LoadPiece]()
        while (
            waiting
            and len(pieces) < self._copier.extents_per_program[0]
            and self._may_write(waiting[0])
            and self._has_room(waiting[0].num_bytes)
        ):
            piece = waiting.popleft()
            self._record_issued(piece)
            pieces.append(piece)
            self._skip_dropped()
        return pieces

    def _may_write(self, piece: LoadPiece) -> bool:
        """Whether no older save still has to read what a load writes."""
        waiting = self._waiting_saves
        return not waiting or waiting[0].number > piece.call.after

    def _may_read(self, transfer: Transfer) -> bool:
        """Whether no older load still has to write what a save reads."""
        unwritten = self._landing or self._waiting_loads
        return not unwritten or unwritten[0].call.number > transfer.call.after

    def _has_room(self, num_bytes: int) -> bool:
        in_flight = self.bytes_in_flight
        return not in_flight or in_flight + num_bytes <= self._budget_bytes

    def _issue_save(self, leaves: list[jax.Array], transfer: Transfer) -> bool:
        """Issue the next pieces of a save; return whether that was possible."""
        pieces: list[SavePiece] = []
        max_pieces = self._copier.extents_per_program[0]
        with _ended_by_errors(pieces):
            while transfer.todo.size and len(pieces) < max_pieces:
                if pieces and pieces[-1].placement.carry != NO_EXTENT:
                    break  # Pieces that were placed before it go first.
                piece = self._place_save(transfer)
                if piece is None:
                    break
                pieces.append(piece)
            self._start_saves(leaves, pieces)
        return bool(pieces) or not transfer.todo.size

    def _place_save(self, transfer: Transfer) -> SavePiece | None:
        """Find a place for the next piece of a save; None if it must wait or failed."""
        num_bytes = self._copier.extents.num_bytes
        is_busy = bool(self._saving or self._landing or self._loading)
        if is_busy and self._no_room_at == self.table.num_freed:
            return None
        if not self._may_read(transfer) or not self._has_room(num_bytes):
            return None
        placed = self._place(transfer)
        if placed is not None:
            piece = SavePiece([transfer], num_bytes, *placed)
            self.bytes_in_flight += num_bytes
            self._saving.append(piece)
            return piece
        if transfer.todo.size:
            self._no_room_at = self.table.num_freed
            if not is_busy and not self._other_threads_hold_extents:
                self._fail_without_room(transfer)
        return None

    def _place(self, transfer: Transfer) -> tuple[Placement, SavePlan] | None:
        """Find a place for the next piece of a save or write, if there is one."""
        ids, device_ids = transfer.host_ids, transfer.device_ids
        if len(transfer.todo) < len(ids):
            ids, device_ids = ids[transfer.todo], device_ids[transfer.todo]
        if self._num_issued > transfer.number + 1:
            # While it waited, some blocks may have been given to other transfers.
            is_claimed = self.table.is_claimed(ids, transfer.number)
            transfer.todo = transfer.todo[is_claimed]
            ids, device_ids = ids[is_claimed], device_ids[is_claimed]
            if not transfer.todo.size:
                self._record_if_over(transfer)
                return None
        placement = self.table.place(ids, self._plans.shards(device_ids))
        if placement is None:
            return None
        plan = self._plans.save(device_ids[placement.picked], placement)
        if self._plans.num_shards == 1:  # It takes the first ones.
            transfer.todo = transfer.todo[len(placement.picked) :]
        else:
            transfer.todo = np.delete(transfer.todo, placement.picked)
        transfer.num_pieces += 1
        return placement, plan

    def _fail_without_room(self, save: Transfer) -> None:
        shards = self._plans.shards(save.device_ids[save.todo])
        save.fail(
            MemoryError(
                f"no room for host blocks {save.host_ids[save.todo].tolist()}: the "
                f"extents of the shards {sorted(set(shards.tolist()))} are full; make "
                "the host tier larger, or spread blocks over the shards evenly."
            )
        )
        self._drop_unissued(save)

    @property
    def _other_threads_hold_extents(self) -> bool:
        """Whether writes or reads of host bytes hold extents that a save may need."""
        return bool(self._writes or self.host_bytes.num_reads)

    def _start_saves(self, leaves: list[jax.Array], pieces: list[SavePiece]) -> None:
        """Start the programs of pieces; only the last may carry rows over."""
        for some in self._split(pieces):
            last = some[-1].placement
            with _ended_by_errors(some):
                carry = None
                if last.carry != NO_EXTENT:
                    carry = self._memory.get(last.carry)
                for piece in some:
                    spare = self._memory.take(piece.placement.extent)
                plans = [piece.plan for piece in some]
                saved = self._copier.save(leaves, plans, carry, spare)
                for piece, extent, watched in zip(some, *saved, strict=True):
                    piece.extent, piece.watched = extent, watched

    def _issue_loads(self, leaves: list[jax.Array], pieces: list[LoadPiece]) -> None:
        if self._copier.mode == "fused":
            for piece in pieces:
                piece.arrays = self._memory.get(piece.extent)
                self._scatter(leaves, [piece])
            return
        self._landing += pieces
        self._stage(pieces)

    def _record_issued(self, piece: LoadPiece) -> None:
        """Record that a piece of a load no longer waits."""
        self._stop_waiting(piece)
        piece.is_issued = True
        for transfer in piece.transfers:
            transfer.num_unissued -= 1
            self._num_waiting_loads -= not transfer.num_unissued
        self.bytes_in_flight += piece.num_bytes

    def _stage(self, pieces: list[LoadPiece]) -> None:
        """Start to copy pieces to the device."""
        extents = [self._memory.get(piece.extent) for piece in pieces]
        with _ended_by_errors(pieces):
            try:
                staged = self._copier.stage(extents)
            except TRANSFER_ERRORS:
                if len(pieces) == 1:
                    raise
                for piece in pieces:  # One may fail without the others.
                    self._stage([piece])
                return
            for piece, arrays in zip(pieces, staged, strict=True):
                piece.arrays = arrays
                piece.watched = list(arrays)

    def _scatter_landed(self, leaves: list[jax.Array]) -> None:
        landing, max_pieces = self._landing, self._copier.extents_per_program[0]
        while landing and landing[0].is_ready():
            landed: list[LoadPiece] = []
            while landing and len(landed) < max_pieces and landing[0].is_ready():
                piece = landing.popleft()
                error = piece.wait()
                if error or not piece.transfers:
                    piece.error = error
                    self._end(piece)
                else:
                    landed.append(piece)
            if landed:
                self._scatter(leaves, landed)

    def _scatter(self, leaves: list[jax.Array], pieces: list[LoadPiece]) -> None:
        """Write pieces into the pool."""
        for piece in pieces:
            for transfer in piece.transfers:
                del transfer.unwritten[piece]
        self._loading += pieces
        with _ended_by_errors(pieces):
            for some in self._split(pieces):
                self._write(leaves, some)

    def _write(self, leaves: list[jax.Array], pieces: list[LoadPiece]) -> None:
        """Run the program that writes some pieces, as many as one program takes."""
        targets = [piece.targets for piece in pieces]
        arrays = [piece.arrays for piece in pieces if piece.arrays is not None]
        with _ended_by_errors(pieces):
            try:
                token = self._copier.load(leaves, targets, arrays)
            except TRANSFER_ERRORS:
                if len(pieces) == 1:
                    raise
                for piece in pieces:  # One may fail without the others.
                    self._write(leaves, [piece])
                return
            finally:
                for piece in pieces:
                    piece.arrays = None
            for piece in pieces:
                piece.watched = [token]

    def _split(self, pieces: list[_P]) -> Iterator[list[_P]]:
        """Split pieces into groups, each for one program; one that carries is alone."""
        left = collections.deque(pieces)
        while left:
            is_last = isinstance(pieces[-1], SavePiece) and (
                pieces[-1].placement.carry != NO_EXTENT
            )
            free = max(1, len(left) - is_last)
            number = next(n for n in self._copier.extents_per_program if n <= free)
            yield [left.popleft() for _ in range(number)]

    def collect(self) -> None:
        """Record the pieces that have finished."""
        if self.host_bytes.num_reads:
            self.host_bytes.release_closed()
        for piece in self._writing[:]:
            if piece.is_ready():
                self._writing.remove(piece)
                self._end(piece)
        for pieces in (self._saving, self._loading):
            while pieces and pieces[0].is_ready():
                self._end(pieces.popleft())

    def _end(self, piece: Piece) -> None:
        error = piece.wait()
        self.bytes_in_flight -= piece.num_bytes
        if isinstance(piece, SavePiece):
            if error is None and piece.extent is None:
                error = RuntimeError("interrupted before it was issued")
            extent = None if error else piece.extent
            self._memory.put(piece.placement.extent, extent)
            self.table.settle(piece.placement, ok=error is None)
            if not error and piece.placement.carry != NO_EXTENT:
                self._follow(piece.placement, piece.plan.carried)
        elif isinstance(piece, LoadPiece):
            self.table.unpin(piece.extent)
        for transfer in piece.transfers:
            transfer.num_pieces -= 1
            if isinstance(piece, LoadPiece):
                transfer.unwritten.pop(piece, None)
            if error:
                transfer.fail(error)
                self._drop_unissued(transfer)
            self._record_if_over(transfer)

    def _follow(self, placement: Placement, carried: NDArray[np.bool_]) -> None:
        """Point waiting loads at the extent that their blocks were carried over to.

        Otherwise their pins would keep the old extent from being free, and a save that
        such a load waits for could find no room.
        """
        for piece in list(self._waiting_of_extent.get(placement.carry, ())):
            if not np.any((piece.targets != NOTHING) & ~carried):
                self._forget_extent(piece)
                piece.extent = placement.extent
                self._hold_extent(piece)

    def _hold_extent(self, piece: LoadPiece) -> None:
        """Keep the extent of a piece that waits."""
        self.table.pin(piece.extent)
        self._waiting_of_extent.setdefault(piece.extent, {})[piece] = None

    def _forget_extent(self, piece: LoadPiece) -> None:
        """Undo `_hold_extent`."""
        self._stop_waiting(piece)
        self.table.unpin(piece.extent)

    def _stop_waiting(self, piece: LoadPiece) -> None:
        waiting = self._waiting_of_extent[piece.extent]
        del waiting[piece]
        if not waiting:
            del self._waiting_of_extent[piece.extent]

    def _drop_unissued(self, transfer: Transfer) -> None:
        """Issue no more of a transfer, and write no more of it into the pool."""
        transfer.todo = transfer.todo[:0]
        if transfer in self._waiting_saves:
            self._waiting_saves.remove(transfer)
            self._forget_reader(transfer)
        for piece in transfer.unwritten:
            piece.transfers.remove(transfer)
            transfer.num_pieces -= 1
            if piece.transfers:
                self._plans.leave_out(piece.targets, transfer.device_ids)
            elif not piece.is_issued:
                self._forget_extent(piece)
        transfer.unwritten.clear()
        self._num_waiting_loads -= bool(transfer.num_unissued)
        transfer.num_unissued = 0
        self._skip_dropped()
        self._record_if_over(transfer)

    def _skip_dropped(self) -> None:
        """Remove the first waiting loads that were dropped."""
        while self._waiting_loads and not self._waiting_loads[0].transfers:
            self._waiting_loads.popleft()

    def _forget_reader(self, save: Transfer) -> None:
        """Keep later loads from waiting for a save that was dropped."""
        blocks = save.device_ids[save.device_ids != NOTHING]
        blocks = blocks[self._last_reader[blocks] == save.number]
        self._last_reader[blocks] = -1
        for waiting in self._waiting_saves:
            shared = np.intersect1d(blocks, waiting.device_ids)
            self._last_reader[shared] = waiting.number


class _ended_by_errors:  # noqa: N801, as a function of contextlib would be named
    """Records any error in some pieces, so that they never count as arrived.

    `TRANSFER_ERRORS` stop here; others, such as an interrupt, are raised again. It is a
    class, as a generator takes a few microseconds more.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None:
            return False
        if isinstance(error, TRANSFER_ERRORS):
            for piece in self._pieces:
                piece.error = piece.error or error
            return True
        for piece in self._pieces:
            if not piece.watched:
                piece.error = RuntimeError(f"stopped by {error!r} before it was issued")
        return False
