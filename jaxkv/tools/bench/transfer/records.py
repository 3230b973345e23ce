"""The configuration and the results of a transfer measurement."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import get_args

from jaxkv.tools.machine import quartiles
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import Direction

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

ENGINE, PER_BLOCK, NUMPY = "engine", "per-block", "numpy"
DESIGNS = (ENGINE, PER_BLOCK, NUMPY)


class BytesDifferError(Exception):
    """A block has changed on its way."""


@dataclasses.dataclass(frozen=True)
class TransferConfig:
    """What to measure.

    Attributes:
        sizes: Bytes of one transfer, each in turn.
        block_sizes: Bytes of one block over all layers, each in turn.
        num_layers: Leaves of the pool.
        rounds: Number of timed rounds.
        mode: The mode of the engine; None for its default.
        designs: The `DESIGNS` to time beside the limit.
        overlap: Whether to measure how much a running step hides, too.
        working_set_bytes: Bytes of the pool, and of the host memory of each design;
            None for the size of the last-level cache. At least the largest size.
        mean_run: Average number of host blocks that are evicted, and found, together;
            None for 128, or a sixteenth of all if that is less.
    """

    sizes: tuple[int, ...] = (1 << 20, 16 << 20, 64 << 20, 256 << 20)
    block_sizes: tuple[int, ...] = (16 << 10, 64 << 10, 512 << 10, 2 << 20)
    num_layers: int = 8
    rounds: int = 15
    mode: Mode | None = None
    designs: tuple[str, ...] = DESIGNS
    overlap: bool = True
    working_set_bytes: int | None = None
    mean_run: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One transfer: a number of blocks of a size.

    Attributes:
        block_bytes: Bytes of one block over all layers.
        num_blocks: Blocks of the transfer.
    """

    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the transfer."""
        return self.block_bytes * self.num_blocks


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast one design moved bytes in one direction.

    Attributes:
        best_gb_per_s: In the fastest round, in 10^9 bytes a second.
        p50_gb_per_s: In the median round.
        quartiles_s: Lower quartile, median, upper quartile of a round's time.
    """

    best_gb_per_s: float
    p50_gb_per_s: float
    quartiles_s: list[float]


def speed(num_bytes: int, seconds: Sequence[float]) -> Speed:
    """Convert the times of the rounds to speeds."""
    return Speed(
        best_gb_per_s=num_bytes / min(seconds) / 1e9,
        p50_gb_per_s=num_bytes / statistics.median(seconds) / 1e9,
        quartiles_s=quartiles(seconds),
    )


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The speed of one design relative to another; above 1 it is the faster one.

    Attributes:
        best: Ratio of the fastest rounds of both.
        quartiles: Lower quartile, median, upper quartile of the ratios by round.
    """

    best: float
    quartiles: list[float]

    @property
    def p50(self) -> float:
        """The median of the ratios by round."""
        return self.quartiles[1]


def ratio(seconds: Sequence[float], others: Sequence[float]) -> Ratio:
    """Compare the times of the same rounds.

    A busy machine slows down a whole round rather than one design, so the median is
    that of ratios within rounds.

    >>> ratio([1.0, 2.0, 4.0], [0.5, 3.0, 2.0])
    Ratio(best=0.5, quartiles=[0.5, 0.5, 1.5])
    """
    return Ratio(
        best=min(others) / min(seconds),
        quartiles=quartiles([b / a for a, b in zip(seconds, others, strict=True)]),
    )


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Times of steps and transfers, alone and together; all lists are by round.

    Attributes:
        num_steps: Steps timed together, each with a transfer.
        steps_s: The steps without transfers.
        transfers_s: The transfers without steps.
        both_s: Both.
    """

    num_steps: int
    steps_s: list[float]
    transfers_s: list[float]
    both_s: list[float]

    @property
    def hidden(self) -> list[float]:
        """Quartiles of the fraction of the transfers' time that the steps hid.

        1: the steps took no longer. 0: one waited for the other. Below 0: they slowed
        each other down.
        """
        return quartiles(
            [
                hidden_fraction(*times_s)
                for times_s in zip(
                    self.steps_s, self.both_s, self.transfers_s, strict=True
                )
            ]
        )


def hidden_fraction(without_s: float, with_s: float, alone_s: float) -> float:
    """Compute the fraction of the transfers' time that the steps hid.

    Args:
        without_s: The steps without transfers.
        with_s: The steps with transfers.
        alone_s: The transfers without steps.

    >>> hidden_fraction(10.0, 11.0, 4.0)
    0.75
    """
    return 1 - (with_s - without_s) / alone_s


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Attributes:
        case: The case.
        limit_s: Seconds of the limit by direction, one per round.
        designs_s: The same for each design, by name.
        overlap: By direction; empty if not measured.
    """

    case: Case
    limit_s: Mapping[Direction, list[float]]
    designs_s: Mapping[str, Mapping[Direction, list[float]]]
    overlap: Mapping[Direction, Overlap]


@dataclasses.dataclass(frozen=True)
class TransferRecord:
    """The results of a measurement.

    Attributes:
        config: The requested measurement.
        limit: Name of the limit: ``"np.copyto"`` or ``"device_put"``.
        mode: The mode of the engine; None if it was not measured.
        working_set_bytes: Bytes of the pool and of each host memory.
        step_s: Seconds of one step alone; None if none was run.
        left_out: Cases that were left out and why, a line each.
        results: A result per case, smaller blocks first, then smaller sizes.
    """

    config: TransferConfig
    limit: str
    mode: str | None
    working_set_bytes: int
    step_s: float | None
    left_out: tuple[str, ...]
    results: tuple[CaseResult, ...]
