"""``jaxkv bench transfer``: how fast blocks move on this machine."""

from __future__ import annotations

import argparse
from functools import partial

from jaxkv.tools.bench.transfer import report
from jaxkv.tools.bench.transfer.plan import Plan, make_plan
from jaxkv.tools.bench.transfer.records import BytesDifferError, TransferConfig
from jaxkv.tools.bench.transfer.run import run_transfer
from jaxkv.tools.machine import available_memory_bytes, last_level_cache_bytes
from jaxkv.tools.options import (
    EXIT_OK,
    CommandError,
    Parser,
    UsageError,
    check_extra,
    check_files,
    check_names,
    packages_for,
    parse_bytes,
    parse_rounds,
    parse_whole_number_from,
    sizes_text,
    write_files,
)
from jaxkv.tools.progress import show_progress
from jaxkv.transfer.kernels import MODES

SUMMARY = "measure how fast blocks move between device and host"
DESCRIPTION = (
    "Time saves (device to host) and loads (host to device) of blocks until they "
    "complete, next to the machine's limit: np.copyto on CPU, one large device_put "
    "elsewhere. Both take turns in every round, and all bytes are checked."
)


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    default = TransferConfig()
    parser.values(
        "--sizes SIZE",
        "bytes per transfer",
        parse_bytes,
        otherwise=sizes_text(default.sizes),
    )
    parser.values(
        "--block-sizes SIZE",
        "bytes per block over all layers",
        parse_bytes,
        otherwise=sizes_text(default.block_sizes),
    )
    parser.value(
        "--layers N",
        "layers of the pool, one array each",
        parse_whole_number_from(1),
        default.num_layers,
    )
    parser.value("--rounds N", "rounds, at least 3", parse_rounds, default.rounds)
    parser.value(
        "--mode NAME", " or ".join(MODES), otherwise="the engine's default here"
    )
    parser.value(
        "--working-set SIZE",
        "bytes of the pool, and of the host memory",
        parse_bytes,
        otherwise="the CPU's largest cache, or the largest size",
    )
    parser.value(
        "--run N",
        "average run of host blocks that are evicted, or found, together",
        parse_whole_number_from(1),
        otherwise="128, or 1/16 of all",
    )
    parser.files("GB/s against the size of a transfer")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    config = config_of(args)
    plan = check_plan(args, config)
    report.print_plan(config, plan)
    try:
        with show_progress() as on_progress:
            record = run_transfer(config, plan, on_progress)
    except MemoryError as error:
        raise UsageError(
            f"ask for smaller --sizes or a smaller --working-set: {error}"
        ) from error
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error
    report.print_results(record)
    draw = partial(report.plot_results, record)
    write_files(args, partial(report.to_json, record), draw)
    return EXIT_OK


def config_of(args: argparse.Namespace) -> TransferConfig:
    """Return the measurement that a command line asks for."""
    if args.mode is not None:
        check_names("--mode", [args.mode], list(MODES))
    default = TransferConfig()
    return TransferConfig(
        sizes=tuple(args.sizes or default.sizes),
        block_sizes=tuple(args.block_sizes or default.block_sizes),
        num_layers=args.layers,
        rounds=args.rounds,
        mode=args.mode,
        working_set_bytes=args.working_set,
        mean_run=args.run,
    )


def check_plan(args: argparse.Namespace, config: TransferConfig) -> Plan:
    """Plan a measurement; refuse one without any case that fits this machine."""
    check_files(args)
    check_extra("bench", packages_for(args))
    try:
        plan = make_plan(config, last_level_cache_bytes(), available_memory_bytes())
    except ValueError as error:
        raise UsageError(f"--block-sizes: {error}") from error
    if not plan.cases:
        raise UsageError(f"nothing can be measured: {'; '.join(plan.left_out)}")
    return plan
