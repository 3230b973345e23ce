"""Measures how fast blocks move, next to the machine's limit."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from benchmarks.transfer.designs import DESIGNS, Design, EngineDesign, Ids, MakeDesign
from benchmarks.transfer.paged_pool import PagedPool
from benchmarks.transfer.plan import Plan, device_cycle, host_cycle
from benchmarks.transfer.records import (
    ENGINE,
    Case,
    CaseResult,
    TransferConfig,
    TransferRecord,
)
from jaxkv._util import size_text
from jaxkv.tools.console import OnProgress
from jaxkv.tools.speed import DIRECTIONS, BytesDifferError, make_limit, timed
from jaxkv.transfer.tickets import Direction

_LIMIT = "limit"
_WARM_ROUNDS = 2


class Side:
    """A design, and the ids of its next transfers."""

    def __init__(self, design: Design, num_blocks: int, mean_run: int | None):
        self.design = design
        self.save_ids = host_cycle(num_blocks, mean_run, seed=1)
        self.load_ids = host_cycle(num_blocks, mean_run, seed=2)
        # u32[num_blocks]. The tag of each host block, see `PagedPool`.
        self.tags = np.zeros(num_blocks, np.uint32)


class Bench:
    """Designs over one pool, for all cases of one block size."""

    def __init__(
        self,
        config: TransferConfig,
        cases: list[Case],
        working_set_bytes: int,
        designs: Mapping[str, MakeDesign],
    ):
        self.config, self.cases = config, cases
        self._working_set_bytes = working_set_bytes
        block_bytes = cases[0].block_bytes
        num_blocks = max(case.num_blocks for case in cases)
        num_blocks = max(num_blocks, working_set_bytes // block_bytes)
        self.paged = PagedPool(num_blocks, block_bytes, config.num_layers)
        self._device_ids = device_cycle(num_blocks, seed=0)
        self.sides: dict[str, Side] = {}
        for name in config.designs:
            design = designs[name](self.paged.leaves, num_blocks, config.mode)
            self.sides[name] = Side(design, num_blocks, config.mean_run)
            self._fill(self.sides[name])

    @property
    def mode(self) -> str | None:
        """The mode of the transfer engine; None if it is not measured."""
        design = self.sides[ENGINE].design if ENGINE in self.sides else None
        return design.engine.mode if isinstance(design, EngineDesign) else None

    def measure(self, case: Case, title: str, on_progress: OnProgress) -> CaseResult:
        """Time one case: all designs in every round, in rotating order."""
        on_progress(title, 0, 0)
        limit = make_limit(case.num_bytes, self._working_set_bytes)
        for _ in range(_WARM_ROUNDS):
            for direction in DIRECTIONS:
                limit.copy(direction)
            self._check_round_trips(case, title)
        names = [_LIMIT, *self.sides]
        seconds: dict[str, dict[Direction, list[float]]] = {
            name: {direction: [] for direction in DIRECTIONS} for name in names
        }
        with _no_garbage_collection():
            for number in range(self.config.rounds):
                on_progress(title, number, self.config.rounds)
                for direction, place in itertools.product(
                    DIRECTIONS, range(len(names))
                ):
                    name = names[(number + place) % len(names)]
                    if name == _LIMIT:
                        duration_s = timed(functools.partial(limit.copy, direction))
                    elif direction == "save":
                        duration_s, _ = self._save(self.sides[name], case)
                    else:
                        duration_s, _ = self._load(self.sides[name], case)
                    seconds[name][direction].append(duration_s)
        on_progress(title, self.config.rounds, self.config.rounds)
        self.check(f"{title}, after all rounds", None)
        self._check_round_trips(case, title)
        return CaseResult(case, seconds.pop(_LIMIT), seconds)

    def check(self, what: str, device_ids: Ids | None) -> None:
        """Raise an error if device blocks (None for all) differ from their tags."""
        wrong = self.paged.check(device_ids)
        if wrong:
            raise BytesDifferError(f"{what}: {wrong} blocks differ from what was saved")

    def _fill(self, side: Side) -> None:
        """Save into every host block, in the order of an empty cache."""
        num_blocks = self.paged.num_blocks
        # All transfers have one size, since a design may compile for each.
        piece = self.cases[-1].num_blocks
        for start in range(0, num_blocks, piece):
            start = min(start, num_blocks - piece)
            host_ids = np.arange(start, start + piece, dtype=np.int32)
            device_ids = self._device_ids.next(piece)
            side.design.save(self.paged.leaves, device_ids, host_ids)
            side.tags[host_ids] = self.paged.tags[device_ids]

    def _save(self, side: Side, case: Case) -> tuple[float, Ids]:
        """Save the next blocks; return the seconds and the host blocks."""
        device_ids = self._device_ids.next(case.num_blocks)
        host_ids = side.save_ids.next(case.num_blocks)
        pool = self.paged.leaves
        duration_s = timed(lambda: side.design.save(pool, device_ids, host_ids))
        side.tags[host_ids] = self.paged.tags[device_ids]
        return duration_s, host_ids

    def _load(
        self, side: Side, case: Case, host_ids: Ids | None = None
    ) -> tuple[float, Ids]:
        """Load the next or given blocks; return the seconds and the device blocks."""
        device_ids = self._device_ids.next(case.num_blocks)
        if host_ids is None:
            host_ids = side.load_ids.next(case.num_blocks)
        paged = self.paged

        def load() -> None:
            paged.leaves = side.design.load(paged.leaves, host_ids, device_ids)

        duration_s = timed(load)
        paged.tags[device_ids] = side.tags[host_ids]
        return duration_s, device_ids

    def _check_round_trips(self, case: Case, title: str) -> None:
        """Save blocks with each design, load them again, and check them."""
        for name, side in self.sides.items():
            _, host_ids = self._save(side, case)
            _, device_ids = self._load(side, case, host_ids)
            self.check(f"{name}, {title}", device_ids)


def run_transfer(
    config: TransferConfig,
    plan: Plan,
    on_progress: OnProgress,
    designs: Mapping[str, MakeDesign] = DESIGNS,
) -> TransferRecord:
    """Measure all cases of a plan; raise BytesDifferError if a block changes."""
    results: list[CaseResult] = []
    mode: str | None = None
    by_block = itertools.groupby(plan.cases, key=lambda case: case.block_bytes)
    for block_bytes, cases in by_block:
        label = f"{size_text(block_bytes)} blocks"
        on_progress(f"{label}: filling host memory", 0, 0)
        bench = Bench(config, list(cases), plan.working_set_bytes, designs)
        for case in bench.cases:
            title = f"{label}, {size_text(case.num_bytes)}"
            results.append(bench.measure(case, title, on_progress))
        mode = bench.mode
        # Free it before the next one: two working sets may not fit.
        del bench
        gc.collect()
    return TransferRecord(
        config=config,
        limit=make_limit(1 << 10, 1 << 10).name,
        mode=mode,
        working_set_bytes=plan.working_set_bytes,
        left_out=plan.left_out,
        results=tuple(results),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector out of the timing, as `timeit` does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
