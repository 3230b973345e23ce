"""What a measurement of transfers is asked for, and what comes of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from jaxkv.bench.machine import quartiles
from jaxkv.transfer.kernels import Mode

Direction: TypeAlias = Literal["save", "load"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

ENGINE, PER_BLOCK, NUMPY = "engine", "per-block", "numpy"
DESIGNS = (ENGINE, PER_BLOCK, NUMPY)


@dataclasses.dataclass(frozen=True)
class TransferConfig:
    """What to measure.

    Attributes:
        sizes: Bytes of one transfer, each in turn.
        block_sizes: Bytes of one block over all layers, each in turn.
        num_layers: Leaves of the pool.
        rounds: How often everything is timed.
        mode: That of the engine; None takes its own choice.
        designs: Which of `DESIGNS` to time beside the limit.
        overlap: Whether to measure what hides behind a running step, too.
        working_set_bytes: Bytes of the pool, and of the host memory of each design;
            None takes as much as the last-level cache holds. Never less than the
            largest size.
        mean_run: Host blocks that are evicted, and found, together on average; None
            takes 128, or a sixteenth of them all if that is less.
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
    """One transfer: so many bytes in blocks of a size.

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
    """Turn the times of the rounds into speeds."""
    return Speed(
        best_gb_per_s=num_bytes / min(seconds) / 1e9,
        p50_gb_per_s=num_bytes / statistics.median(seconds) / 1e9,
        quartiles_s=quartiles(seconds),
    )


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How fast one thing was beside another; above 1 it was the faster.

    Attributes:
        best: Of the two fastest rounds, whichever they were.
        quartiles: Lower quartile, median, upper quartile of the rounds' own ratios.
    """

    best: float
    quartiles: list[float]

    @property
    def p50(self) -> float:
        """The median of the rounds' own ratios."""
        return self.quartiles[1]


def ratio(seconds: Sequence[float], others: Sequence[float]) -> Ratio:
    """Compare the times of the same rounds.

    A busy machine slows down a whole round rather than one design, so rounds are
    compared one by one before the median is taken.

    >>> ratio([1.0, 2.0, 4.0], [0.5, 3.0, 2.0])
    Ratio(best=0.5, quartiles=[0.5, 0.5, 1.5])
    """
    return Ratio(
        best=min(others) / min(seconds),
        quartiles=quartiles([b / a for a, b in zip(seconds, others, strict=True)]),
    )


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What became of steps while the engine moved bytes; all lists are by round.

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

        1: the steps took no longer for it. 0: one waited for the other. Below 0:
        they got in each other's way.
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
    """Say how much of a transfer's time was hidden behind steps.

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
    """What came of one case.

    Attributes:
        case: What was moved.
        limit_s: Seconds of the limit by direction, one per round.
        designs_s: The same of each design by its name.
        overlap: By direction; empty if not measured.
    """

    case: Case
    limit_s: Mapping[Direction, list[float]]
    designs_s: Mapping[str, Mapping[Direction, list[float]]]
    overlap: Mapping[Direction, Overlap]


@dataclasses.dataclass(frozen=True)
class TransferRecord:
    """What was measured and what came of it.

    Attributes:
        config: What was asked for.
        limit: What the limit is: ``"np.copyto"`` or ``"device_put"``.
        mode: The engine's; None if it was not measured.
        working_set_bytes: Bytes of the pool and of each host memory.
        step_s: Seconds of one step by itself; None if none was run.
        left_out: What was asked for and not measured, and why; a line each.
        results: A result per case, smaller blocks first, then smaller sizes.
    """

    config: TransferConfig
    limit: str
    mode: str | None
    working_set_bytes: int
    step_s: float | None
    left_out: tuple[str, ...]
    results: tuple[CaseResult, ...]
