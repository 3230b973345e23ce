"""Transfer speed of the engine next to other designs.

The options of ``jaxkv bench transfer``, and --designs. The designs:

- engine: `TransferEngine`;
- per-block: one pinned host array per block, all layers in it;
- numpy: one NumPy array of host blocks.

All have the same pool and ids, compiled programs, and on CPU the compiler options
without which a scatter into a bfloat16 pool costs as much as a copy of the pool.
`docs/internals/benchmarks.md` describes the method.

    python -m benchmarks.transfer [--sizes SIZE,...] [--designs NAME,...]
        [--plot FILE.svg] [--json FILE] ...
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import run_command
from jaxkv.tools.bench.transfer import command, report
from jaxkv.tools.bench.transfer.designs import EngineDesign, Ids
from jaxkv.tools.bench.transfer.paged_pool import Pool
from jaxkv.tools.bench.transfer.records import (
    DIRECTIONS,
    ENGINE,
    CaseResult,
    TransferConfig,
    TransferRecord,
    ratio,
)
from jaxkv.tools.bench.transfer.run import run_transfer
from jaxkv.tools.files import write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import EXIT_OK, Args, Usage, check_names
from jaxkv.transfer import PoolLayout, memory

PER_BLOCK, NUMPY = "per-block", "numpy"

# The most blocks of one program of the per-block design, which cuts a transfer into
# powers of two, as sglang-jax and tpu-inference do. With 16 it is about as fast for
# blocks of 16 and 64 KiB (16 MiB, two CPU cores); with 256 it is faster for some and
# slower for others, and compiles for a minute.
_LARGEST_BUCKET = 64


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
        rows = np.asarray(self._gather(pool, device_ids))
        self._rows[host_ids] = rows.view(np.uint16)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        rows = self._rows[host_ids].view(self._dtype)
        staged = jax.device_put(rows, self._device)
        pool = self._scatter(pool, device_ids, staged)
        memory.wait_for(pool)
        return pool


def buckets(num_blocks: int) -> Iterator[slice]:
    """Cut a transfer into powers of two, the largest first."""
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


def rivals(result: CaseResult) -> list[str]:
    """List the designs that the engine is compared with."""
    return [name for name in result.designs_s if name != ENGINE] * (
        ENGINE in result.designs_s
    )


def print_results(record: TransferRecord) -> None:
    """Print the speed of each design, and the engine's next to theirs."""

    def rows(result: CaseResult) -> Iterator[list[str]]:
        seconds = result.designs_s
        for name in rivals(result):
            engine_s, rival_s = seconds[ENGINE], seconds[name]
            yield report.make_row(
                f"{ENGINE} : {name}",
                lambda d, a=engine_s, b=rival_s: report.ratio_text(ratio(a[d], b[d])),
            )

    report.print_results(record, rows)


def to_json(record: TransferRecord) -> dict[str, Any]:
    figures = report.to_json(record)
    for row, result in zip(figures["results"], record.results, strict=True):
        seconds = result.designs_s
        row["engine_over"] = {
            name: {
                d: dataclasses.asdict(ratio(seconds[ENGINE][d], seconds[name][d]))
                for d in DIRECTIONS
            }
            for name in rivals(result)
        }
    return figures


USAGE = Usage(
    "python -m benchmarks.transfer",
    str(__doc__).partition("\n")[0],
    f"""{command.OPTIONS}
designs:
  --designs NAME,...  designs to measure (default: {", ".join(DESIGNS)})
""",
    command.PARSERS,
    command.DEFAULTS,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(USAGE, _run, argv)


def _run(args: Args) -> int:
    names = check_names("--designs", args.designs or list(DESIGNS), list(DESIGNS))
    config: TransferConfig = dataclasses.replace(
        command.config_of(args), designs=tuple(names)
    )
    plan = command.check_plan(args, config)
    report.print_plan(config, plan)
    with show_progress() as on_progress:
        record = run_transfer(config, plan, on_progress, DESIGNS)
    print_results(record)
    draw = partial(report.draw_results, record)
    write_files(args, partial(to_json, record), draw)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
