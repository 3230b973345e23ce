"""Transfer speed of the engine next to other designs.

- engine: `TransferEngine`;
- per-block: one pinned host array per block, all layers in it;
- numpy: one NumPy array of host blocks.

All have the same pool and ids, compiled programs, and on CPU the compiler options
without which a scatter into a bfloat16 pool costs as much as a copy of the pool.
`docs/internals/benchmarks.md` describes the method.

    python -m benchmarks.transfer [--sizes SIZE,...] [--designs NAME,...]
        [--json FILE] ...
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from benchmarks.common import run_command
from benchmarks.transfer.designs import DESIGNS
from benchmarks.transfer.plan import Plan, available_memory_bytes, make_plan
from benchmarks.transfer.records import (
    ENGINE,
    CaseResult,
    TransferConfig,
    TransferRecord,
    ratio,
)
from benchmarks.transfer.run import run_transfer
from jaxkv._util import size_text
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.files import OUTPUT_OPTIONS, check_extra, check_files, write_files
from jaxkv.tools.machine import last_level_cache_bytes, machine
from jaxkv.tools.progress import show_progress
from jaxkv.tools.speed import DIRECTIONS, BytesDifferError, speed
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    CommandError,
    Usage,
    UsageError,
    one_of,
    whole_number_from,
)
from jaxkv.transfer.kernels import MODES

Row: TypeAlias = list[str]

USAGE = Usage(
    "python -m benchmarks.transfer",
    "Time block saves (device to host) and loads (host to device) until completion, "
    "next to the machine's limit: np.copyto on CPU, one large device_put elsewhere. "
    "All alternate in every round, and all bytes are checked.",
    f"""
transfers:
  --sizes SIZE,...  bytes per transfer
  --block-sizes SIZE,...  bytes per block, over all layers
  --layers N  layers of the pool, one array each
  --rounds N  timed rounds, at least 3
  --designs NAME,...  designs to measure
  --mode NAME  {" or ".join(MODES)} (default: the engine's default on this device)

memory:
  --working-set SIZE  size of the pool, and of the host memory (default: the CPU's
      largest cache, or the largest of --sizes)
  --run N  mean number of adjacent host blocks in a transfer (default: 128, or 1/16
      of all blocks)

output:
{OUTPUT_OPTIONS}
""",
    {
        "--rounds": whole_number_from(3),  # Fewer have no useful quartiles.
        "--designs": one_of(list(DESIGNS)),
        "--mode": one_of(MODES),
    },
    {
        "layers": TransferConfig.num_layers,
        "rounds": TransferConfig.rounds,
        "sizes": TransferConfig.sizes,
        "block_sizes": TransferConfig.block_sizes,
        "designs": tuple(DESIGNS),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(USAGE, _run, argv)


def _run(args: Args) -> int:
    config = TransferConfig(
        sizes=tuple(args.sizes),
        block_sizes=tuple(args.block_sizes),
        num_layers=args.layers,
        rounds=args.rounds,
        mode=args.mode,
        designs=tuple(dict.fromkeys(args.designs)),
        working_set_bytes=args.working_set,
        mean_run=args.run,
    )
    check_files(args)
    check_extra("the benchmark")
    try:
        plan = make_plan(config, last_level_cache_bytes(), available_memory_bytes())
    except ValueError as error:
        raise UsageError(f"--block-sizes: {error}") from error
    if not plan.cases:
        raise UsageError(f"nothing can be measured: {'; '.join(plan.left_out)}")
    print_plan(config, plan)
    try:
        with show_progress() as on_progress:
            record = run_transfer(config, plan, on_progress)
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error
    print_results(record)
    write_files(args, partial(to_json, record))
    return EXIT_OK


def print_plan(config: TransferConfig, plan: Plan) -> None:
    where = machine()
    cache_bytes = where["last_level_cache_bytes"]
    cache = size_text(cache_bytes) if isinstance(cache_bytes, int) else "unknown"
    pool = (
        f"{config.num_layers} layers of bfloat16, {size_text(plan.working_set_bytes)}; "
        "as much host memory per design"
    )
    facts = [
        ("Device", f"{where['device']}, {where['num_cpus']} CPUs ({where['cpu']})"),
        ("Pool", pool),
        ("Cache", cache),
        *(("Left out", line) for line in plan.left_out),
    ]
    print_facts(facts, 13)


def print_results(record: TransferRecord) -> None:
    """Print the speed of each design next to the limit, and the engine's to theirs."""
    columns = ["best / p50"]
    for direction in DIRECTIONS:
        columns += [f"{direction}, GB/s", f"of {record.limit}"]
    sections = []
    for result in record.results:
        case = result.case
        title = f"{size_text(case.num_bytes)} in {size_text(case.block_bytes)}"
        sections.append((title, list(_rows(record.limit, result))))
    print_table(columns, sections, [units_note(record.config.rounds)])


def _rows(limit: str, result: CaseResult) -> Iterator[Row]:
    limit_s, designs_s = result.limit_s, result.designs_s
    for name, seconds in {limit: limit_s, **designs_s}.items():
        row = [f"  {name}"]
        for d in DIRECTIONS:
            share = ratio(seconds[d], limit_s[d]).text if name != limit else ""
            row += [speed(result.case.num_bytes, seconds[d]).text, share]
        yield row
    for name in rivals(result):
        row = [f"  {ENGINE} : {name}"]
        for d in DIRECTIONS:
            row += [ratio(designs_s[ENGINE][d], designs_s[name][d]).text, ""]
        yield row


def rivals(result: CaseResult) -> list[str]:
    """List the designs that the engine is compared with."""
    return [name for name in result.designs_s if name != ENGINE] * (
        ENGINE in result.designs_s
    )


def units_note(rounds: int) -> str:
    return (
        "GB are 10^9 bytes. best: the fastest round; p50: the median of "
        f"{rounds} rounds, of ratios too."
    )


def to_json(record: TransferRecord) -> dict[str, Any]:
    return {
        "machine": machine(),
        "config": dataclasses.asdict(record.config),
        "limit": record.limit,
        "mode": record.mode,
        "working_set_bytes": record.working_set_bytes,
        "left_out": list(record.left_out),
        "results": [_result_json(result) for result in record.results],
    }


def _result_json(result: CaseResult) -> dict[str, Any]:
    case, limit_s, designs_s = result.case, result.limit_s, result.designs_s

    def speeds(seconds: Any) -> dict[str, dict[str, Any]]:
        return {
            d: dataclasses.asdict(speed(case.num_bytes, seconds[d])) for d in DIRECTIONS
        }

    def ratios(seconds: Any, baseline_s: Any) -> dict[str, dict[str, Any]]:
        return {
            d: dataclasses.asdict(ratio(seconds[d], baseline_s[d])) for d in DIRECTIONS
        }

    def design(seconds: Any) -> dict[str, Any]:
        of_limit = ratios(seconds, limit_s)
        return {
            d: figures | {"of_limit": of_limit[d]}
            for d, figures in speeds(seconds).items()
        }

    return {
        "size_bytes": case.num_bytes,
        "block_bytes": case.block_bytes,
        "num_blocks": case.num_blocks,
        "limit": speeds(limit_s),
        "designs": {name: design(seconds) for name, seconds in designs_s.items()},
        "engine_over": {
            name: ratios(designs_s[ENGINE], designs_s[name]) for name in rivals(result)
        },
    }


if __name__ == "__main__":
    sys.exit(main())
