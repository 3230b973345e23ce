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

Bytes: TypeAlias = NDArray[np.uint8]

# Errors that end a transfer; any other is a bug, and raised.
TRANSFER_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


class Ticket(NamedTuple):
    """The name of one transfer of one engine."""

    direction: Direction  # "save" (device to host) or "load" (host to device)
    number: int  # Counts the engine's transfers in the order of the calls, from 0.


@dataclasses.dataclass(frozen=True)
class Completion:
    """The outcome of a transfer.

    Attributes:
        ticket: The ticket that `save` or `load` returned.
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
    """One call of the engine, whose transfers wait for other calls together."""

    number: int  # The number of its first transfer.
    # The last call of the other direction that shares a device block with this one, and
    # goes first; -1 for none.
    after: int
    num_left: int = 0  # Transfers that have not ended.
    # Transfers that have ended and are not reported; the first to end comes first.
    ended: list[Transfer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer, from its call until it is reported."""

    ticket: Ticket
    call: Call
    host_ids: NDArray[np.int32]  # i32[n]. The host blocks that it reads or writes.
    device_ids: NDArray[np.int32]  # i32[n, m]. The device blocks.
    todo: NDArray[np.intp]  # int[...]. Indices of a save's blocks without a place.
    # Pieces of a load that have not been written into the pool, as the keys of a dict,
    # which keeps their order.
    unwritten: dict[LoadPiece, None] = dataclasses.field(default_factory=dict)
    num_unissued: int = 0  # Pieces of a load that have not been issued.
    num_pieces: int = 0  # Pieces that have not finished.
    error: Exception | None = None  # The error of the first piece that failed.
    abandoned: bool = False  # Whether it is left out of reports.
    is_noted: bool = False  # Whether its end has been recorded.

    @property
    def number(self) -> int:
        """The number of its ticket."""
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
class HostWrite(Transfer):
    """A save whose bytes come from the host, to be loaded into the shard of its blocks.

    It has no report: if `is_over`, they can be loaded, unless there is an `error`.
    """

    payloads: dict[int, Bytes] = dataclasses.field(default_factory=dict)  # By block.


@dataclasses.dataclass(eq=False)
class Piece:
    """The blocks of a call that share an extent; they move together."""

    # The transfers that it is a part of: one of a save; of a load several, or none once
    # all have failed or been abandoned.
    transfers: list[Transfer]
    num_bytes: int  # Bytes that it counts as in flight.
    # Arrays that are ready when it is done; none of them is donated.
    watched: list[jax.Array] = dataclasses.field(default_factory=list, kw_only=True)
    # What kept it from being issued, if anything did.
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
    """A piece of a save that has been issued."""

    placement: Placement  # Where its blocks go.
    plan: SavePlan  # The placement, row by row.
    extent: Extent | None = None  # The new extent, which may be in flight.


@dataclasses.dataclass(eq=False)
class WritePiece(SavePiece):
    """A piece of a `HostWrite`, which another thread copies."""

    payloads: list[Bytes] = dataclasses.field(default_factory=list)  # u8[...] a block.
    spare: Extent | None = None  # The memory to write to; None to allocate some.
    carry: Extent | None = None  # The extent to carry rows over from; None for none.
    has_ended: bool = False  # Set last, by the thread that copies.

    def is_ready(self) -> bool:
        """Whether the copy has ended or failed; never waits."""
        return self.has_ended


@dataclasses.dataclass(eq=False)
class LoadPiece(Piece):
    """A piece of a load."""

    call: Call
    extent: int  # The extent that holds its blocks.
    targets: NDArray[np.int32]  # i32[shards, rows]. The device block of each row.
    is_issued: bool = False
    # The extent's arrays until they are scattered: on the device once a staged copy has
    # been issued, or on the host.
    arrays: Extent | None = None
