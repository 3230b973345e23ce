"""Transfer speed next to other designs, and the share of a transfer that a step hides.

The options of ``jaxkv bench transfer``, and --designs and --no-overlap. The designs:

- engine: `TransferEngine`;
- per-block: one pinned host array per block, all layers in it;
- numpy: one NumPy array of host blocks.

All have the same pool and ids, compiled programs, and on CPU the compiler options
without which a scatter into a bfloat16 pool costs as much as a copy of the pool.
`docs/internals/benchmarks.md` describes the method.

    python -m benchmarks.transfer [--sizes SIZE,...] [--designs NAME,...]
        [--no-overlap] [--plot FILE.svg] [--json FILE] ...
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.bench.transfer import command, report
from jaxkv.tools.bench.transfer.designs import EngineDesign, Ids, raise_errors
from jaxkv.tools.bench.transfer.paged_pool import PagedPool, Pool
from jaxkv.tools.bench.transfer.plan import device_cycle, host_cycle
from jaxkv.tools.bench.transfer.records import (
    DIRECTIONS,
    ENGINE,
    Case,
    CaseResult,
    TransferConfig,
    TransferRecord,
    ratio,
)
from jaxkv.tools.bench.transfer.run import Bench, run_transfer
from jaxkv.tools.console import OnProgress
from jaxkv.tools.files import formatted_output, write_files
from jaxkv.tools.machine import quartiles
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import Usage, check_names
from jaxkv.transfer import PoolLayout, memory
from jaxkv.transfer.memory import compiler_options, wait_for
from jaxkv.transfer.tickets import Direction

PER_BLOCK, NUMPY = "per-block", "numpy"

# The most blocks of one program of the per-block design, which cuts a transfer into
# powers of two, as sglang-jax and tpu-inference do. With 16 it is about as fast for
# blocks of 16 and 64 KiB (16 MiB, two CPU cores); with 256 it is faster for some and
# slower for others, and compiles for a minute.
_LARGEST_BUCKET = 64
_STEP_S = 0.010
_MAX_STEPS = 4
_MAX_OVERLAP_ROUNDS = 7


class PerBlockDesign:
    """One pinned host array per block, all layers in it.

    Save: programs make one device array per block, one batched `device_put` copies the
    list. Load: one batched `device_put` of the list, then donated scatters.
    """

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Any = None):
        device = PoolLayout.of(pool, 0).device
        options = memory.compiler_options(device.platform)
        self._blocks: list[jax.Array | None] = [None] * num_host_blocks
        self._device = jax.sharding.SingleDeviceSharding(device)
        self._host = memory.host_sharding(device)
        self._gather = jax.jit(_gather_each, compiler_options=options)
        self._scatter = jax.jit(
            _scatter_each, donate_argnums=0, compiler_options=options
        )

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        """Copy blocks to the host."""
        gathered: list[jax.Array] = []
        for chunk in buckets(len(device_ids)):
            gathered += self._gather(pool, device_ids[chunk])
        # Release the old memory first, so that the allocator can reuse it.
        for index in host_ids.tolist():
            self._blocks[index] = None
        blocks = jax.device_put(gathered, self._host)
        for index, block in zip(host_ids.tolist(), blocks, strict=True):
            self._blocks[index] = block
        memory.wait_for(blocks)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        """Copy blocks to the device."""
        blocks = [self._blocks[index] for index in host_ids.tolist()]
        staged = jax.device_put(blocks, self._device)
        for chunk in buckets(len(device_ids)):
            pool = self._scatter(pool, device_ids[chunk], staged[chunk])
        memory.wait_for(pool)
        return pool


class NumpyDesign:
    """One NumPy array ``[host blocks, layers, *block]``.

    Save: a gather on the device, `numpy.asarray`, a copy of the rows. Load: a copy of
    the rows, `device_put`, a donated scatter. Each number of blocks compiles a program,
    which only a benchmark with few numbers can afford.
    """

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Any = None):
        device = PoolLayout.of(pool, 0).device
        options = memory.compiler_options(device.platform)
        self._device = jax.sharding.SingleDeviceSharding(device)
        shape = (num_host_blocks, len(pool), *pool[0].shape[1:])
        # NumPy copies rows of integers faster than rows of a dtype it does not know.
        # Filled, so that no save pays for the first page faults.
        self._rows = np.full(shape, 1, np.uint16)
        self._dtype = pool[0].dtype
        self._gather = jax.jit(_gather_stacked, compiler_options=options)
        self._scatter = jax.jit(
            _scatter_stacked, donate_argnums=0, compiler_options=options
        )

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        """Copy blocks to the host."""
        rows = np.asarray(self._gather(pool, device_ids))
        self._rows[host_ids] = rows.view(np.uint16)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        """Copy blocks to the device."""
        rows = self._rows[host_ids].view(self._dtype)
        staged = jax.device_put(rows, self._device)
        pool = self._scatter(pool, device_ids, staged)
        memory.wait_for(pool)
        return pool


def buckets(num_blocks: int) -> Iterator[slice]:
    """Cut a transfer into powers of two, the largest first.

    >>> [part.stop for part in buckets(70)]
    [64, 68, 70]
    """
    start, size = 0, _LARGEST_BUCKET
    while start < num_blocks:
        while size > num_blocks - start:
            size //= 2
        yield slice(start, start + size)
        start += size


def _gather_each(pool: Pool, ids: jax.Array) -> list[jax.Array]:
    rows = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return [jnp.stack([rows(leaf, ids[n]) for leaf in pool]) for n in range(len(ids))]


def _scatter_each(pool: Pool, ids: jax.Array, blocks: list[jax.Array]) -> Pool:
    return _scatter_stacked(pool, ids, jnp.stack(blocks))


def _gather_stacked(pool: Pool, ids: jax.Array) -> jax.Array:
    rows = [leaf.at[ids].get(mode="promise_in_bounds") for leaf in pool]
    return jnp.stack(rows, axis=1)


def _scatter_stacked(pool: Pool, ids: jax.Array, rows: jax.Array) -> Pool:
    return [
        leaf.at[ids].set(rows[:, layer], mode="drop", unique_indices=True)
        for layer, leaf in enumerate(pool)
    ]


DESIGNS = {ENGINE: EngineDesign, PER_BLOCK: PerBlockDesign, NUMPY: NumpyDesign}


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Seconds of steps and transfers, alone and together; all lists are by round."""

    num_steps: int  # timed together, each with a transfer
    steps_s: list[float]
    transfers_s: list[float]
    both_s: list[float]

    @property
    def hidden(self) -> list[float]:
        """Quartiles of the fraction of the transfers' time that the steps hid.

        1: the steps took no longer. 0: one waited for the other. Below 0: they slowed
        each other down.
        """
        times = zip(self.steps_s, self.both_s, self.transfers_s, strict=True)
        return quartiles([hidden_fraction(*times_s) for times_s in times])


def hidden_fraction(without_s: float, with_s: float, alone_s: float) -> float:
    """Compute the fraction of the transfers' time that the steps hid.

    >>> hidden_fraction(10.0, 11.0, 4.0)
    0.75
    """
    return 1 - (with_s - without_s) / alone_s


class Step:
    """Simulates a model's step: matrix products, then a write to the pool.

    Like a serving step it takes the pool, donated, and writes to it, so it runs after
    every load issued before it, and before every save issued after it.
    """

    def __init__(self, pool: Pool, scratch_block: int):
        platform = jax.devices()[0].platform
        size = 512 if platform == "cpu" else 4096
        key = jax.random.key(0)
        self._matrix = jax.random.normal(key, (size, size), jnp.float32) / size**0.5
        self._num_products = 1

        def step(pool: Pool, matrix: jax.Array, num_products: int) -> Pool:
            # tanh keeps the numbers in range for any number of products.
            value = jax.lax.fori_loop(
                0, num_products, lambda _, value: jnp.tanh(value @ matrix), matrix
            )
            written = jnp.sum(value).astype(pool[0].dtype)
            return [pool[0].at[scratch_block].set(written), *pool[1:]]

        self._step = jax.jit(
            step, donate_argnums=0, compiler_options=compiler_options(platform)
        )

    def __call__(self, pool: Pool) -> Pool:
        """Start a step and return at once, with the new pool."""
        pool = self._step(pool, self._matrix, self._num_products)
        return pool

    def calibrate(self, pool: Pool) -> tuple[Pool, float]:
        """Make a step take about 10 ms on this machine."""
        pool, _ = self._time(pool)  # compiles
        while True:
            times_s = []
            for _ in range(3):
                pool, duration_s = self._time(pool)
                times_s.append(duration_s)
            step_s = min(times_s)
            if step_s >= 0.8 * _STEP_S:
                return pool, step_s
            factor = min(8.0, _STEP_S / step_s)
            self._num_products = max(
                self._num_products + 1, round(self._num_products * factor)
            )

    def _time(self, pool: Pool) -> tuple[Pool, float]:
        start_s = time.perf_counter()
        pool = self(pool)
        wait_for(pool)
        return pool, time.perf_counter() - start_s


class OverlapTimer:
    """Times steps and the engine's transfers, alone and together.

    Shapes: host_tags: u32[host blocks].
    """

    def __init__(
        self,
        paged: PagedPool,
        design: EngineDesign,
        host_tags: NDArray[np.uint32],
        step: Step,
        num_blocks: int,
        mean_run: int | None = None,
    ):
        self._paged, self._design, self._step = paged, design, step
        self._host_tags = host_tags
        self._num_blocks = num_blocks
        # Transfers in flight together need separate blocks.
        self._num_steps = max(1, min(_MAX_STEPS, paged.num_blocks // num_blocks))
        self._device_ids = device_cycle(paged.num_blocks, seed=10)
        self._host_ids = host_cycle(paged.num_blocks, mean_run, seed=11)

    def measure(self, rounds: int) -> dict[Direction, Overlap]:
        """Time all combinations in turn."""
        kinds: list[tuple[Direction | None, bool]] = [
            (None, True),
            ("save", False),
            ("save", True),
            ("load", False),
            ("load", True),
        ]
        seconds: dict[tuple[Direction | None, bool], list[float]]
        seconds = {kind: [] for kind in kinds}
        for kind in kinds:
            self._time(*kind)
        for number in range(min(rounds, _MAX_OVERLAP_ROUNDS)):
            for place in range(len(kinds)):
                kind = kinds[(number + place) % len(kinds)]
                seconds[kind].append(self._time(*kind))
        return {
            direction: Overlap(
                num_steps=self._num_steps,
                steps_s=seconds[None, True],
                transfers_s=seconds[direction, False],
                both_s=seconds[direction, True],
            )
            for direction in DIRECTIONS
        }

    def _time(self, direction: Direction | None, with_steps: bool) -> float:
        total = self._num_steps * self._num_blocks
        device_ids = self._device_ids.next(total).reshape(self._num_steps, -1)
        host_ids = self._host_ids.next(total).reshape(self._num_steps, -1)
        transfer = self._transfer(direction)
        engine, pool = self._design.engine, self._paged.leaves
        start_s = time.perf_counter()
        for devices, hosts in zip(device_ids, host_ids, strict=True):
            pool = transfer(engine.advance(pool), devices, hosts)
            if with_steps:
                pool = self._step(pool)
            raise_errors(engine.poll())
        pool = self._design.drain(pool)
        wait_for(pool)
        duration_s = time.perf_counter() - start_s
        self._paged.leaves = pool
        if direction == "save":
            self._host_tags[host_ids] = self._paged.tags[device_ids]
        elif direction == "load":
            self._paged.tags[device_ids] = self._host_tags[host_ids]
        return duration_s

    def _transfer(
        self, direction: Direction | None
    ) -> Callable[[Pool, Ids, Ids], Pool]:
        engine = self._design.engine

        def save(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            engine.save(pool, device_ids, host_ids)
            return pool

        def load(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            pool, _ = engine.load(pool, host_ids, device_ids)
            return pool

        def nothing(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            return pool

        return {"save": save, "load": load, None: nothing}[direction]


@dataclasses.dataclass
class Overlaps:
    """Overlaps by case and direction, and the seconds of one step."""

    step_s: float | None = None
    by_case: dict[Case, Mapping[Direction, Overlap]] = dataclasses.field(
        default_factory=dict
    )


class OverlapBench(Bench):
    """Measures designs, then how much of the engine's transfers a step hides."""

    def __init__(self, overlaps: Overlaps, *args: Any) -> None:
        super().__init__(*args, DESIGNS)
        self._overlaps = overlaps
        self._step: Step | None = None
        if self.engine is not None and self.config.overlap:
            self._step = Step(self.paged.leaves, self.paged.scratch_block)
            self.paged.leaves, overlaps.step_s = self._step.calibrate(self.paged.leaves)

    def measure(self, case: Case, title: str, on_progress: OnProgress) -> CaseResult:
        """Time one case."""
        result = super().measure(case, title, on_progress)
        if self.engine is not None and self._step is not None:
            tags, mean_run = self.sides[ENGINE].tags, self.config.mean_run
            timer = OverlapTimer(
                self.paged, self.engine, tags, self._step, case.num_blocks, mean_run
            )
            self._overlaps.by_case[case] = timer.measure(self.config.rounds)
            self.check(f"{title}, beside steps", None)
        return result


def rivals(result: CaseResult) -> list[str]:
    """List the designs that the engine is compared with."""
    return [name for name in result.designs_s if name != ENGINE] * (
        ENGINE in result.designs_s
    )


def print_results(record: TransferRecord, overlaps: Overlaps) -> None:
    """Print the speed of each design, and how much a step hides."""

    def rows(result: CaseResult) -> Iterator[list[str]]:
        seconds = result.designs_s
        for name in rivals(result):
            own_s, rival_s = seconds[ENGINE], seconds[name]
            yield report.make_row(
                f"{ENGINE} : {name}",
                lambda d, a=own_s, b=rival_s: report.ratio_text(ratio(a[d], b[d])),
            )
        if overlap := overlaps.by_case.get(result.case):
            yield report.make_row(
                "hidden by a step",
                lambda d: f"{100 * min(1.0, max(0.0, overlap[d].hidden[1])):.0f}%",
            )

    notes = []
    if overlaps.step_s is not None:
        note = (
            "hidden by a step: the share of a transfer's time that a step of "
            f"{1e3 * overlaps.step_s:.0f} ms hides, p50."
        )
        if record.limit == "np.copyto":
            note += " Here both share the cores, so it says little."
        notes.append(note)
    report.print_results(record, rows, notes)


def to_json(record: TransferRecord, overlaps: Overlaps) -> dict[str, Any]:
    """Convert results for ``json.dump``."""
    figures = report.to_json(record) | {"step_s": overlaps.step_s}
    for row, result in zip(figures["results"], record.results, strict=True):
        seconds = result.designs_s
        row["engine_over"] = {
            name: {
                d: dataclasses.asdict(ratio(seconds[ENGINE][d], seconds[name][d]))
                for d in DIRECTIONS
            }
            for name in rivals(result)
        }
        if overlap := overlaps.by_case.get(result.case):
            row["overlap"] = {
                d: {
                    "hidden_fraction": overlap[d].hidden,
                    "num_steps": overlap[d].num_steps,
                    "steps_s": quartiles(overlap[d].steps_s),
                    "transfers_s": quartiles(overlap[d].transfers_s),
                    "both_s": quartiles(overlap[d].both_s),
                }
                for d in DIRECTIONS
            }
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    designs_text = f"""
designs:
  --designs NAME,...  designs to measure (default: {", ".join(DESIGNS)})
  --no-overlap  do not measure what a running step hides (default: measure)
"""
    args = Usage(
        "python -m benchmarks.transfer",
        str(__doc__).partition("\n")[0],
        command.OPTIONS + designs_text,
        command.PARSERS,
        command.DEFAULTS,
    ).parse(sys.argv[1:] if argv is None else argv)
    config: TransferConfig = dataclasses.replace(
        command.config_of(args),
        designs=tuple(
            check_names("--designs", args.designs or list(DESIGNS), list(DESIGNS))
        ),
        overlap=not args.no_overlap,
    )
    with formatted_output(args):
        plan = command.check_plan(args, config)
        report.print_plan(config, plan)
        overlaps = Overlaps()
        with show_progress() as on_progress:
            make_bench = partial(OverlapBench, overlaps)
            record = run_transfer(config, plan, on_progress, make_bench)
        print_results(record, overlaps)
        draw = partial(report.draw_results, record)
        write_files(args, partial(to_json, record, overlaps), draw)


if __name__ == "__main__":
    main()
