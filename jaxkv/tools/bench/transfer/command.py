"""``jaxkv bench transfer``: how fast blocks move on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxkv.tools.bench.transfer import report
from jaxkv.tools.bench.transfer.plan import Plan, make_plan
from jaxkv.tools.bench.transfer.records import BytesDifferError, TransferConfig
from jaxkv.tools.bench.transfer.run import run_transfer
from jaxkv.tools.files import (
    JSON_OPTION,
    PLOT_OPTION,
    check_extra,
    check_files,
    write_files,
)
from jaxkv.tools.machine import available_memory_bytes, last_level_cache_bytes
from jaxkv.tools.progress import show_progress
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

SUMMARY = "measure how fast blocks move between device and host"

OPTIONS = f"""
transfers:
  --sizes SIZE,...  bytes per transfer
  --block-sizes SIZE,...  bytes per block, over all layers
  --layers N  layers of the pool, one array each
  --rounds N  timed rounds, at least 3
  --mode NAME  {" or ".join(MODES)} (default: the engine's default on this device)

memory:
  --working-set SIZE  size of the pool, and of the host memory (default: the CPU's
      largest cache, or the largest of --sizes)
  --run N  mean number of adjacent host blocks in a transfer (default: 128, or 1/16
      of all blocks)

output:
{PLOT_OPTION.format("GB/s by transfer size")}
{JSON_OPTION}
"""
PARSERS: dict[str, Callable[[str], Any]] = {
    "--rounds": whole_number_from(3),  # Fewer have no useful quartiles.
    "--mode": one_of(MODES),
}
DEFAULTS = {
    "layers": TransferConfig.num_layers,
    "rounds": TransferConfig.rounds,
    "sizes": TransferConfig.sizes,
    "block_sizes": TransferConfig.block_sizes,
}
USAGE = Usage(
    "jaxkv bench transfer",
    "Time block saves (device to host) and loads (host to device) until completion, "
    "next to the machine's limit: np.copyto on CPU, one large device_put elsewhere. "
    "Both alternate in every round, and all bytes are checked.",
    OPTIONS,
    PARSERS,
    DEFAULTS,
)


def run(args: Args) -> int:
    config = config_of(args)
    plan = check_plan(args, config)
    report.print_plan(config, plan)
    try:
        with show_progress() as on_progress:
            record = run_transfer(config, plan, on_progress)
    except MemoryError as error:
        raise UsageError(
            f"use smaller --sizes or a smaller --working-set: {error}"
        ) from error
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error
    report.print_results(record)
    draw = partial(report.draw_results, record)
    write_files(args, partial(report.to_json, record), draw)
    return EXIT_OK


def config_of(args: Args) -> TransferConfig:
    return TransferConfig(
        sizes=tuple(args.sizes),
        block_sizes=tuple(args.block_sizes),
        num_layers=args.layers,
        rounds=args.rounds,
        mode=args.mode,
        working_set_bytes=args.working_set,
        mean_run=args.run,
    )


def check_plan(args: Args, config: TransferConfig) -> Plan:
    """Plan a measurement; refuse one without any case that fits this machine."""
    check_files(args)
    check_extra("bench")
    try:
        plan = make_plan(config, last_level_cache_bytes(), available_memory_bytes())
    except ValueError as error:
        raise UsageError(f"--block-sizes: {error}") from error
    if not plan.cases:
        raise UsageError(f"nothing can be measured: {'; '.join(plan.left_out)}")
    return plan
