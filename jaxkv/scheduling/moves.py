"""The ledger: blocks that move from one tier to another, until all workers report."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.scheduling.rules import NO_LIMIT
from jaxkv.types import BlockKey

Ids = TypeVar("Ids", bound=list[int] | NDArray[np.integer[Any]])
AnyMove = TypeVar("AnyMove", bound="Move[Any]")
Report: TypeAlias = tuple[Hashable, bool | Sequence[bool]]
"""A worker's report of a move: its name, and whether all of it, or which of its
blocks, have arrived."""

# How many moves an error lists.
_MOST_NAMES = 8


@dataclasses.dataclass(eq=False)
class Move(Generic[Ids]):
    """Blocks that move together from one tier to another. n rows, each a host block.

    Attributes:
        keys: Key of each row.
        sources: Where the blocks are, as ids of the source tier.
        targets: Where they go, as ids of the target tier.
        event: The event that it left with; NO_EVENT before.
        waiters: Requests that wait for it, as keys of a dict, which keeps their order.
        num_reports: Workers that have reported it.
        ok: Whether all of it, or which rows, arrived on each of these.
        is_stale: Whether the tiers, or the request, have forgotten it.
    """

    keys: list[BlockKey]
    sources: Ids
    targets: Ids
    event: int = NO_EVENT
    waiters: dict[str, None] = dataclasses.field(default_factory=dict)
    num_reports: int = 0
    ok: bool | NDArray[np.bool_] = True
    is_stale: bool = False

    @property
    def name(self) -> Hashable:
        """What workers call it."""
        return self.event

    @property
    def num_blocks(self) -> int:
        """How many blocks are in flight with it."""
        return len(self.sources)


class Ledger(Generic[AnyMove]):
    """Moves between two tiers that have left, and that some worker has not reported.

    Args:
        what: What an error calls one of them.
        num_workers: Workers, each of which reports each move.

    Attributes:
        moves: The moves by name, the oldest first.
        num_blocks: Blocks in flight with them.
    """

    def __init__(self, what: str, num_workers: int) -> None:
        self.moves: dict[Hashable, AnyMove] = {}
        self.num_blocks = 0
        self._what = what
        self._num_workers = num_workers
        self._next_event = 0

    def issue(self, moves: Iterable[AnyMove]) -> int:
        """Send moves out together; return their event, NO_EVENT if there are none."""
        event = NO_EVENT
        for move in moves:
            move.event = event = self._next_event
            self.moves[move.name] = move
            self.num_blocks += move.num_blocks
        self._next_event += event != NO_EVENT
        return event

    def check(self, reports: Sequence[Report]) -> None:
        """Raise ValueError if one of some reports is not due; nothing changes."""
        counts: dict[Hashable, int] = {}
        for name, ok in reports:
            counts[name] = counts.get(name, 0) + 1
            move = self.moves.get(name)
            due = self._num_workers - move.num_reports if move else 0
            if move is None or counts[name] > due:
                count = [each for each, _ in reports].count(name)
                raise ValueError(
                    f"{count} reports of {self._what} {shown(name)}, of which {due} "
                    f"are due; in flight are {self._names()}."
                )
            if not isinstance(ok, bool) and len(ok) != len(move.keys):
                raise ValueError(
                    f"a report of {len(ok)} blocks of {self._what} {shown(name)}, "
                    f"which has {len(move.keys)}."
                )

    def report(self, reports: Sequence[Report]) -> list[AnyMove]:
        """Note reports that `check` has let pass; return the moves that are over."""
        over = []
        for name, ok in reports:
            move = self.moves[name]
            move.num_reports += 1
            move.ok &= ok if isinstance(ok, bool) else np.array(ok, np.bool_)
            if move.num_reports == self._num_workers:
                over.append(move)
                self.remove(move)
        return over

    def remove(self, move: AnyMove) -> None:
        """Take out a move of which no report is expected any more."""
        del self.moves[move.name]
        self.num_blocks -= move.num_blocks

    def _names(self) -> str:
        """List the moves in flight; not all of many."""
        more = len(self.moves) - _MOST_NAMES
        names = f"{list(self.moves)[:_MOST_NAMES]}"
        return f"{names} and {more} more" if more > 0 else names


class Budget:
    """How many device blocks may still leave in a step, and how many are in flight."""

    __slots__ = "in_flight", "num_left"

    def __init__(self, max_in_flight: int | None, in_flight: int) -> None:
        max_in_flight = NO_LIMIT if max_in_flight is None else max_in_flight
        self.num_left = max(max_in_flight - in_flight, 0)
        self.in_flight = in_flight

    def take(self, num_blocks: int) -> None:
        """Let blocks leave."""
        self.num_left = max(self.num_left - num_blocks, 0)
        self.in_flight += num_blocks


def reports_of(
    completed: Sequence[Hashable], failed: Sequence[Hashable]
) -> Sequence[Report]:
    """List reports of moves that arrived as a whole or not at all."""
    return [*zip(completed, repeat(True)), *zip(failed, repeat(False))]
