"""The configuration and the results of a transfer measurement."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import Direction

ENGINE = "engine"
"""The name of the transfer engine among designs."""


@dataclasses.dataclass(frozen=True)
class TransferConfig:
    """The requested measurement."""

    sizes: tuple[int, ...] = (1 << 20, 16 << 20, 64 << 20, 256 << 20)  # of a transfer
    block_sizes: tuple[int, ...] = (16 << 10, 64 << 10, 512 << 10, 2 << 20)
    num_layers: int = 8
    rounds: int = 15
    mode: Mode | None = None  # None for the engine's default
    designs: tuple[str, ...] = (ENGINE,)
    working_set_bytes: int | None = None  # None for the size of the last-level cache
    mean_run: int | None = None  # None for 128, or a sixteenth of all if that is less


@dataclasses.dataclass(frozen=True)
class Case:
    """One transfer: some blocks of one size (bytes over all layers)."""

    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The speed of one side relative to another; above 1 it is the faster one."""

    best: float  # of the fastest rounds of both
    quartiles: list[float]  # of the ratios by round

    @property
    def text(self) -> str:
        """Both figures, ``best / p50``."""
        return f"{self.best:.2f} / {self.quartiles[1]:.2f}"


def ratio(seconds: Sequence[float], baseline_s: Sequence[float]) -> Ratio:
    """Compare the times of the same rounds.

    A busy machine slows down a whole round rather than one side, so the median is
    taken over ratios within rounds.

    >>> ratio([1.0, 2.0, 4.0], [0.5, 3.0, 2.0])
    Ratio(best=0.5, quartiles=[0.5, 0.5, 1.5])
    """
    return Ratio(
        best=min(baseline_s) / min(seconds),
        quartiles=statistics.quantiles(
            [b / a for a, b in zip(seconds, baseline_s, strict=True)], n=4
        ),
    )


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """Seconds of each round of one case."""

    case: Case
    limit_s: Mapping[Direction, list[float]]
    designs_s: Mapping[str, Mapping[Direction, list[float]]]


@dataclasses.dataclass(frozen=True)
class TransferRecord:
    """The results of a measurement."""

    config: TransferConfig
    limit: str  # "np.copyto" or "device_put"
    mode: str | None  # of the engine; None if it was not measured
    working_set_bytes: int
    left_out: tuple[str, ...]
    results: tuple[CaseResult, ...]  # smaller blocks first, then smaller sizes
