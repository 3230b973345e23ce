"""Transfers: tickets, the pieces they are issued in, and how they complete."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extent_table import Placement
from jaxkv.transfer.extents import Extent
from jaxkv.transfer.plans import SavePlan

Direction: TypeAlias = Literal["save", "load"]

# Errors that end a transfer; any other is a bug, and raised.
TRANSFER_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


class Ticket(NamedTuple):
    """Names one transfer of one engine.

    Attributes:
        direction: ``"save"`` (device to host) or ``"load"`` (host to device).
        number: Counts the engine's transfers in the order of the calls, from 0.
    """

    direction: Direction
    number: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """How a transfer ended.

    Attributes:
        ticket: What `save` or `load` returned.
        host_block_ids: The host blocks to write or to read.
        num_bytes: The bytes of these blocks on the device.
        error: Why it failed; None if it succeeded.
    """

    ticket: Ticket
    host_block_ids: tuple[int, ...]
    num_bytes: int
    error: Exception | None

    @property
    def direction(self) -> Direction:
        """``"save"`` or ``"load"``."""
        return self.ticket.direction

    @property
    def num_blocks(self) -> int:
        """Number of host blocks to move."""
        return len(self.host_block_ids)


@dataclasses.dataclass(eq=False)
class Call:
    """One call of the engine, whose transfers wait for others together.

    Attributes:
        number: Number of its first transfer.
        after: Number of the last call in the other direction that shares a device block
            with this one, and must go first; -1 for none.
        num_left: Transfers that are not over.
        over: Those that are over and not reported, in the order in which they ended.
    """

    number: int
    after: int
    num_left: int = 0
    over: list[Transfer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Transfer:
    """What one ticket names, until it is reported.

    Attributes:
        ticket: Its name.
        call: The call that began it.
        host_ids: i32[n]. The host blocks that it reads or writes.
        device_ids: i32[n, m]. The device blocks.
        todo: int[...]. Indices of a save's blocks that have no place yet.
        unwritten: Pieces of a load that have not been written into the pool, as the
            keys of a dict, which keeps their order.
        num_unissued: Pieces of a load that have not been issued.
        num_pieces: Pieces that have not finished.
        error: The error of the first piece that failed.
        abandoned: Whether `report` leaves it out.
        is_noted: Whether its call knows that it is over.
    """

    ticket: Ticket
    call: Call
    host_ids: NDArray[np.int32]
    device_ids: NDArray[np.int32]
    todo: NDArray[np.intp]
    unwritten: dict[LoadPiece, None] = dataclasses.field(default_factory=dict)
    num_unissued: int = 0
    num_pieces: int = 0
    error: Exception | None = None
    abandoned: bool = False
    is_noted: bool = False

    @property
    def number(self) -> int:
        """The ticket's."""
        return self.ticket.number

    @property
    def is_over(self) -> bool:
        """Whether no piece is in flight or still to be issued."""
        return not self.num_pieces and not self.todo.size

    def fail(self, error: Exception) -> None:
        """Record an error, if it is the first."""
        # Without the traceback, whose frames would keep the pool alive.
        self.error = self.error or error.with_traceback(None)


@dataclasses.dataclass(eq=False)
class Piece:
    """What one program moves: the blocks of a call that share an extent.

    Attributes:
        transfers: The transfers that it is a part of. A save's piece has one; a load's
            may have several, and none once all of them have failed or been abandoned.
        num_bytes: Bytes that it counts as in flight.
        watched: Arrays that are ready when it is done; none of them is donated.
        error: What kept it from being issued, if anything did.
    """

    transfers: list[Transfer]
    num_bytes: int
    watched: list[jax.Array] = dataclasses.field(default_factory=list, kw_only=True)
    error: Exception | None = dataclasses.field(default=None, kw_only=True)

    def is_ready(self) -> bool:
        """Whether it has finished or failed; never waits."""
        return all(
            array.is_ready()  # type: ignore[attr-defined]
            for array in self.watched
        )

    def wait(self) -> Exception | None:
        """Wait until it is over; return the error if it failed."""
        try:
            # A failed array is ready too: only waiting for it raises its error.
            for array in self.watched:
                array.block_until_ready()
        except TRANSFER_ERRORS as error:
            return self.error or error
        return self.error


@dataclasses.dataclass(eq=False)
class SavePiece(Piece):
    """A piece of a save that has been issued.

    Attributes:
        placement: Where its blocks go.
        plan: The placement, row by row.
    """

    placement: Placement
    plan: SavePlan


@dataclasses.dataclass(eq=False)
class LoadPiece(Piece):
    """A piece of a load.

    Attributes:
        call: The call that it is a part of.
        extent: The extent that holds its blocks.
        targets: i32[shards, rows]. Where each row of the extent goes.
        layer_group: Which of the pool's leaves it writes.
        is_issued: Whether it has been issued.
        arrays: The extent's arrays of this group, until they are scattered: on the
            device, once a staged copy has been issued, or on the host.
    """

    call: Call
    extent: int
    targets: NDArray[np.int32]
    layer_group: int
    is_issued: bool = False
    arrays: Extent | None = None
