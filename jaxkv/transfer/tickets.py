"""Transfers on their way: what names them, what they consist of, how they end."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import memory
from jaxkv.transfer.extents import Extent
from jaxkv.transfer.hoststore import Placement
from jaxkv.transfer.plans import SavePlan

Direction: TypeAlias = Literal["store", "load"]

# What a transfer may fail with; anything else is a mistake in the code, and raised.
TRANSFER_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


class Ticket(NamedTuple):
    """Names one transfer of one engine.

    Attributes:
        direction: ``"store"`` (device to host) or ``"load"`` (host to device).
        number: Counts the engine's transfers in the order of their calls, from 0.
    """

    direction: Direction
    number: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """How a transfer ended.

    Attributes:
        ticket: What `save` or `load` returned for it.
        host_block_ids: The host blocks that it was to write or to read.
        num_bytes: The bytes of these blocks, on the device.
        error: Why it failed; None if it did not.
    """

    ticket: Ticket
    host_block_ids: tuple[int, ...]
    num_bytes: int
    error: Exception | None

    @property
    def direction(self) -> Direction:
        """``"store"`` or ``"load"``."""
        return self.ticket.direction

    @property
    def num_blocks(self) -> int:
        """How many host blocks it was to move."""
        return len(self.host_block_ids)


@dataclasses.dataclass(eq=False)
class Transfer:
    """One call of `save` or `load`, until it is reported.

    Attributes:
        ticket: Its name.
        host_ids: i32[n]. The host blocks that it reads or writes.
        device_ids: i32[n, m]. The device blocks.
        after: Number of the last transfer of the other direction that touches a
            device block of this one and may not be overtaken; -1 for none.
        todo: int[...]. Which blocks of a store have no place yet.
        num_pieces: Pieces that are not over yet.
        error: What the first piece to fail failed with.
        abandoned: Whether nobody wants to hear of it.
    """

    ticket: Ticket
    host_ids: NDArray[np.int32]
    device_ids: NDArray[np.int32]
    after: int
    todo: NDArray[np.intp]
    num_pieces: int = 0
    error: Exception | None = None
    abandoned: bool = False

    @property
    def number(self) -> int:
        """The ticket's."""
        return self.ticket.number

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is to be done or on its way."""
        return not self.num_pieces and not self.todo.size

    def fail(self, error: Exception) -> None:
        """Note an error, if it is the first."""
        # Without the traceback, whose frames would keep the pool alive.
        self.error = self.error or error.with_traceback(None)


@dataclasses.dataclass(eq=False)
class Piece:
    """What one program moves: some blocks of a transfer, all of one extent.

    Attributes:
        transfer: What it is a part of.
        num_bytes: Bytes in flight while it is.
        watched: Arrays that are ready when it is done. None of them is donated.
        error: What stopped its being issued, if anything did.
    """

    transfer: Transfer
    num_bytes: int
    watched: list[jax.Array] = dataclasses.field(default_factory=list, kw_only=True)
    error: Exception | None = dataclasses.field(default=None, kw_only=True)

    def is_ready(self) -> bool:
        """Whether it is over, one way or the other; never waits."""
        return all(
            array.is_ready()  # type: ignore[attr-defined]
            for array in self.watched
        )

    def wait(self) -> Exception | None:
        """Wait until it is over, and say why it failed."""
        try:
            # A failed array is ready, too: only waiting for it brings up the error.
            memory.wait_for(self.watched)
        except TRANSFER_ERRORS as error:
            return self.error or error
        return self.error


@dataclasses.dataclass(eq=False)
class SavePiece(Piece):
    """A piece of a store, which has been issued.

    Attributes:
        placement: Where its blocks go.
        plan: The same, row by row.
    """

    placement: Placement
    plan: SavePlan


@dataclasses.dataclass(eq=False)
class LoadPiece(Piece):
    """A piece of a load.

    Attributes:
        extent: Where its blocks lie.
        targets: i32[lanes, rows]. Where each row of the extent goes.
        layer_group: Which of the pool's leaves.
        arrays: The extent's arrays of this group, on the device, once they are on
            their way there by themselves.
    """

    extent: int
    targets: NDArray[np.int32]
    layer_group: int
    arrays: Extent | None = None
