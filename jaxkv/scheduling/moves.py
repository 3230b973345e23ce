"""Moves: blocks in flight between two tiers, until all workers have reported them."""

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
"""A worker's report of a move: the move's name, and whether all its blocks have
arrived, or a flag for each block."""

_MAX_NAMES = 8  # An error lists at most this many moves in flight.


@dataclasses.dataclass(eq=False)
class Move(Generic[Ids]):
    """Blocks that move together between two tiers: n rows, one per host block."""

    keys: list[BlockKey]  # [n]
    sources: Ids  # Block ids in the source tier.
    targets: Ids  # Block ids in the target tier.
    event: int = NO_EVENT  # The event that issued it; NO_EVENT before.
    # Requests that wait for the move, as keys of a dict, which keeps their order.
    waiters: dict[str, None] = dataclasses.field(default_factory=dict)
    num_reports: int = 0  # Workers that have reported it.
    ok: bool | NDArray[np.bool_] = True  # Whether all, or which, rows arrived.
    is_stale: bool = False  # Whether the tiers, or the request, have forgotten it.
    # Rows whose source was overwritten after their place was chosen.
    void: set[int] = dataclasses.field(default_factory=set)

    @property
    def name(self) -> Hashable:
        """The name of the move in reports."""
        return self.event

    @property
    def num_blocks(self) -> int:
        """The number of blocks that move."""
        return len(self.sources)


class Ledger(Generic[AnyMove]):
    """Moves in flight between two tiers; `kind` names one in errors."""

    def __init__(self, kind: str, num_workers: int) -> None:
        self.moves: dict[Hashable, AnyMove] = {}  # By name, the oldest first.
        self.num_blocks = 0  # In flight.
        self._kind = kind
        self._num_workers = num_workers
        self._next_event = 0

    def issue(self, moves: Iterable[AnyMove]) -> int:
        """Issue moves with one event; return the event, NO_EVENT without moves."""
        event = NO_EVENT
        for move in moves:
            move.event = event = self._next_event
            self.moves[move.name] = move
            self.num_blocks += move.num_blocks
        self._next_event += event != NO_EVENT
        return event

    def check(self, reports: Sequence[Report]) -> None:
        """Raise ValueError if a report is not due or has flags of other blocks."""
        counts: dict[Hashable, int] = {}
        for name, ok in reports:
            counts[name] = counts.get(name, 0) + 1
            move = self.moves.get(name)
            num_due = self._num_workers - move.num_reports if move else 0
            if move is None or counts[name] > num_due:
                count = [reported for reported, _ in reports].count(name)
                raise ValueError(
                    f"{self._kind} {shown(name)} has {count} reports, but {num_due} "
                    f"are due; in flight are {self._names()}."
                )
            if not isinstance(ok, bool) and len(ok) != len(move.keys):
                raise ValueError(
                    f"a report of {self._kind} {shown(name)} has flags of {len(ok)} "
                    f"blocks, but must have {len(move.keys)}."
                )

    def report(self, reports: Sequence[Report]) -> list[AnyMove]:
        """Apply checked reports; return the moves that every worker has reported."""
        ended = []
        for name, ok in reports:
            move = self.moves[name]
            move.num_reports += 1
            move.ok &= ok if isinstance(ok, bool) else np.array(ok, np.bool_)
            if move.num_reports == self._num_workers:
                ended.append(move)
                self.remove(move)
        return ended

    def remove(self, move: AnyMove) -> None:
        """Remove a move that no worker will report any more."""
        del self.moves[move.name]
        self.num_blocks -= move.num_blocks

    def _names(self) -> str:
        num_unlisted = len(self.moves) - _MAX_NAMES
        names = f"{list(self.moves)[:_MAX_NAMES]}"
        return f"{names} and {num_unlisted} more" if num_unlisted > 0 else names


class Budget:
    """The device blocks that a step may still issue, and those in flight."""

    __slots__ = "in_flight", "num_left"

    def __init__(self, max_in_flight: int | None, in_flight: int) -> None:
        max_in_flight = NO_LIMIT if max_in_flight is None else max_in_flight
        self.num_left = max(max_in_flight - in_flight, 0)
        self.in_flight = in_flight

    def take(self, num_blocks: int) -> None:
        """Count issued blocks."""
        self.num_left = max(self.num_left - num_blocks, 0)
        self.in_flight += num_blocks


def reports_of(
    completed: Sequence[Hashable], failed: Sequence[Hashable]
) -> Sequence[Report]:
    """Return reports of moves that arrived completely, or failed completely."""
    return [*zip(completed, repeat(True)), *zip(failed, repeat(False))]
