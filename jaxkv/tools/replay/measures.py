"""The measures of results: blocks, tokens and prefill, by policy and size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.fleet import Fleet
from jaxkv.tools.replay.model_costs import ModelCosts
from jaxkv.tools.replay.run import OPTIMUM, ReplayResult
from jaxkv.tools.replay.traces import Trace

BASELINE = "lru"
"""What the other policies are compared with."""

_FLOP_UNITS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1.0, "FLOP"))


class Cell(NamedTuple):
    """A policy at a capacity."""

    policy: str
    capacity_blocks: int


@dataclasses.dataclass(frozen=True)
class Measure:
    """A share of the demand, for every policy at every capacity."""

    key: str  # For machines: letters, digits and "_"
    what: str  # Such as "Prefix tokens found on the host"
    total: str  # All that there was to find or to save, with its unit
    ratios: Mapping[Cell, float]  # The share, from 0 to 1, by policy and capacity
    # The device's part of each share; None if it has none, or not the same of each
    device: float | None = None

    @property
    def title(self) -> str:
        """The measure and its total."""
        return f"{self.what}, of {self.total}"

    def best(self, capacity_blocks: int) -> list[str]:
        """List the policies, without the optimum, that have the most at a capacity.

        None where there are several and all have the same.
        """
        ratios = {
            cell.policy: ratio
            for cell, ratio in self.ratios.items()
            if cell.capacity_blocks == capacity_blocks and cell.policy != OPTIMUM
        }
        best = max(ratios.values(), default=0.0)
        if len(ratios) > 1 and best == min(ratios.values()):
            return []
        return [policy for policy, ratio in ratios.items() if ratio == best]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Policies side by side."""

    trace: Trace  # The replayed trace
    results: Sequence[ReplayResult]  # Every policy at the same capacities
    model: ModelCosts | None = None  # Counts prefill; None to count none
    # What was kept out of the cache, but not by the optimum; None for nothing
    admission: Admission | None = None

    @property
    def policies(self) -> list[str]:
        """The policies in the order of the results, the optimum among them."""
        return list(dict.fromkeys(result.policy for result in self.results))

    @property
    def real_policies(self) -> list[str]:
        """The policies without the optimum, which no cache can have."""
        return [policy for policy in self.policies if policy != OPTIMUM]

    @property
    def rivals(self) -> list[str]:
        """The policies compared with `BASELINE`; none without it."""
        real = self.real_policies
        return (
            [policy for policy in real if policy != BASELINE]
            if BASELINE in real
            else []
        )

    @property
    def capacities(self) -> list[int]:
        """The capacities in blocks, the smallest first."""
        return sorted({result.capacity_blocks for result in self.results})

    @property
    def device_blocks(self) -> int | None:
        """Blocks of the device in front; None without one."""
        device = self.results[0].device
        return None if device is None else device.num_blocks

    @property
    def fleet(self) -> Fleet:
        """The engines, and the store if there is one."""
        return max((r.fleet for r in self.results), key=lambda f: f.storage_blocks)

    @functools.cached_property
    def by_cell(self) -> Mapping[Cell, ReplayResult]:
        """The results by policy and capacity."""
        return {Cell(r.policy, r.capacity_blocks): r for r in self.results}

    @functools.cached_property
    def prefill_flops(self) -> float | None:
        """FLOPs to compute all prompts; None without a model."""
        return self._flops_of_tokens(self.trace.input_tokens)

    def flops_of(self, hits: NDArray[np.int64]) -> float | None:
        """Count the FLOPs that blocks found (i64[R]) save; None without a model."""
        return self._flops_of_tokens(self.trace.tokens_of(hits))

    def _flops_of_tokens(self, num_tokens: NDArray[np.int64]) -> float | None:
        if self.model is None:
            return None
        return float(self.model.prefill_flops(0, num_tokens).sum())

    @functools.cached_property
    def measures(self) -> list[Measure]:
        """The measures, FLOPs only with a model; behind a device, each twice."""
        trace, flops = self.trace, self.prefill_flops
        num_blocks, num_tokens = trace.num_block_refs, int(trace.input_tokens.sum())
        measures = self._measure(
            *("blocks", "Prefix blocks found", f"{num_blocks:,}", num_blocks),
            lambda hits: float(hits.sum()),
        )
        measures += self._measure(
            *("tokens", "Prefix tokens found", f"{num_tokens:,}", num_tokens),
            lambda hits: float(trace.tokens_of(hits).sum()),
        )
        if flops is not None:
            measures += self._measure(
                *("flops", "Prefill FLOPs saved", format_flops(flops), flops),
                lambda hits: self.flops_of(hits) or 0.0,
            )
        return measures

    @functools.cached_property
    def main_measures(self) -> list[Measure]:
        """The measures for charts.

        Blocks and tokens have the same lines, and so have the host alone and the host
        behind a device.
        """
        names = "tokens", "tokens_both", "flops", "flops_both"
        return [measure for measure in self.measures if measure.key in names]

    def _measure(
        self,
        key: str,
        what: str,
        total: str,
        whole: float,
        amount: Callable[[NDArray[np.int64]], float],
    ) -> list[Measure]:
        """Measure all results; with a device in front, also what the host adds."""
        whole = whole or 1.0
        amounts = {
            cell: amount(result.hits_by_request)
            for cell, result in self.by_cell.items()
        }
        ratios = {cell: num / whole for cell, num in amounts.items()}
        local = {
            cell: amount(result.device.hits)
            for cell, result in self.by_cell.items()
            if result.device is not None
        }
        if not local:
            return [Measure(key, what, total, ratios)]
        verb = "by" if key == "flops" else "on"
        host = {cell: (amounts[cell] - local[cell]) / whole for cell in amounts}
        alone = set(local.values())
        both, behind = f"{what} {verb} device and host", f"{what} {verb} the host"
        if self.fleet.storage_blocks:
            both, behind = f"{what} {verb} any tier", f"{what} beyond the device"
        share = alone.pop() / whole if len(alone) == 1 else None
        return [
            Measure(f"{key}_both", both, total, ratios, share),
            Measure(f"{key}_host", behind, total, host),
        ]


def format_flops(flops: float) -> str:
    """Write FLOPs with a unit.

    >>> format_flops(2.5e15), format_flops(1.2345e19)
    ('2.5 PFLOP', '12.3 EFLOP')
    """
    scale, unit = next((row for row in _FLOP_UNITS if flops >= row[0]), _FLOP_UNITS[-1])
    digits = max(3 - len(f"{flops / scale:.0f}"), 0)
    return f"{round(flops / scale, digits):,} {unit}".replace(".0 ", " ")


def format_percent(ratio: float) -> str:
    """Write a share in percent.

    >>> format_percent(0.12346)
    '12.35%'
    """
    return f"{100 * ratio:.2f}%"


def format_share(capacity_blocks: int, trace: Trace) -> str:
    """Write a capacity as a share of the trace's different blocks."""
    percent = 100 * capacity_blocks / trace.num_unique_blocks
    return f"{round(percent, 1 if percent >= 0.1 else 4):g}%"
