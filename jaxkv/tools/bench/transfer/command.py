"""``jaxkv bench transfer``: how fast blocks move on this machine."""

from __future__ import annotations

import argparse
from functools import partial

from jaxkv.tools.bench.transfer import report
from jaxkv.tools.bench.transfer.plan import make_plan
from jaxkv.tools.bench.transfer.records import DESIGNS, BytesDifferError, TransferConfig
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

SUMMARY = "measure how fast blocks move between device and host, beside other designs"
DESCRIPTION = (
    "Time saves (device to host) and loads (host to device) of blocks, up to their "
    "completion: with the transfer engine, with one pinned array per block, with a "
    "single NumPy array, and at the machine's limit, which is np.copyto on CPU and one "
    "large device_put elsewhere. All take turns in every round, and all bytes are "
    "checked."
)


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    default = TransferConfig()
    parser.values(
        "--sizes SIZE",
        "bytes of one transfer",
        parse_bytes,
        otherwise=sizes_text(default.sizes),
    )
    parser.values(
        "--block-sizes SIZE",
        "bytes of one block over all layers",
        parse_bytes,
        otherwise=sizes_text(default.block_sizes),
    )
    parser.value(
        "--layers N",
        "layers of the pool, an array each",
        parse_whole_number_from(1),
        default.num_layers,
    )
    parser.value(
        "--rounds N",
        "rounds of measurement, at least 3",
        parse_rounds,
        default.rounds,
    )
    modes = " or ".join(MODES)
    parser.value(
        "--mode NAME", f"mode of the engine, {modes}", otherwise="the engine's own"
    )
    parser.values(
        "--designs NAME",
        "designs to measure beside the limit",
        otherwise=f"all, which are {', '.join(DESIGNS)}",
    )
    parser.value(
        "--working-set SIZE",
        "bytes of the pool, and of the host memory of each design",
        parse_bytes,
        otherwise="as much as the largest cache of the CPU, or the largest size, if "
        "that is more",
    )
    parser.value(
        "--run N",
        "host blocks that a full cache evicts, and finds, together on average",
        parse_whole_number_from(1),
        otherwise="128, or a sixteenth of them all if that is less",
    )
    parser.flag(
        "--no-overlap",
        "leave out how much of a transfer a running step hides",
        "it is measured",
    )
    parser.files("GB/s against the size of a transfer")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if args.mode is not None:
        check_names("--mode", [args.mode], list(MODES))
    designs = check_names("--designs", args.designs or list(DESIGNS), list(DESIGNS))
    check_files(args)
    check_extra("bench", packages_for(args))
    default = TransferConfig()
    config = TransferConfig(
        sizes=tuple(args.sizes or default.sizes),
        block_sizes=tuple(args.block_sizes or default.block_sizes),
        num_layers=args.layers,
        rounds=args.rounds,
        mode=args.mode,
        designs=tuple(designs),
        overlap=not args.no_overlap,
        working_set_bytes=args.working_set,
        mean_run=args.run,
    )
    try:
        plan = make_plan(config, last_level_cache_bytes(), available_memory_bytes())
    except ValueError as error:
        raise UsageError(f"--block-sizes: {error}") from error
    if not plan.cases:
        raise UsageError(f"nothing can be measured: {'; '.join(plan.left_out)}")
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
