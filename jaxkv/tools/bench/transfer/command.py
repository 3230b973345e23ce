"""``jaxkv bench transfer``: how fast blocks move on this machine."""

from __future__ import annotations

import argparse
from functools import partial

from jaxkv._util import size_text
from jaxkv.tools.bench.transfer import report
from jaxkv.tools.bench.transfer.plan import make_plan
from jaxkv.tools.bench.transfer.records import DESIGNS, BytesDifferError, TransferConfig
from jaxkv.tools.bench.transfer.run import run_transfer
from jaxkv.tools.machine import available_memory_bytes, last_level_cache_bytes
from jaxkv.tools.options import (
    EXIT_OK,
    CommandError,
    UsageError,
    add_file_options,
    check_extra,
    check_files,
    check_names,
    parse_bytes,
    parse_list_of,
    parse_whole_number_from,
    split_commas,
    write_json,
    write_picture,
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = TransferConfig()
    parser.add_argument(
        "--sizes",
        action="extend",
        type=parse_list_of(parse_bytes),
        metavar="SIZE,...",
        help="bytes of one transfer; may be repeated "
        f"(default: {_sizes_text(default.sizes)})",
    )
    parser.add_argument(
        "--block-sizes",
        action="extend",
        type=parse_list_of(parse_bytes),
        metavar="SIZE,...",
        help="bytes of one block over all layers; may be repeated "
        f"(default: {_sizes_text(default.block_sizes)})",
    )
    parser.add_argument(
        "--layers",
        type=parse_whole_number_from(1),
        default=default.num_layers,
        metavar="N",
        help="layers of the pool, an array each (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        # Fewer rounds have no useful quartiles.
        type=parse_whole_number_from(3),
        default=default.rounds,
        metavar="N",
        help="rounds of measurement, at least 3 (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        metavar="NAME",
        help=f"mode of the engine, {' or '.join(MODES)} (default: the engine's own)",
    )
    parser.add_argument(
        "--designs",
        action="extend",
        type=split_commas,
        metavar="NAME,...",
        help="designs to measure beside the limit; may be repeated (default: all, "
        f"which are {', '.join(DESIGNS)})",
    )
    parser.add_argument(
        "--working-set",
        type=parse_bytes,
        metavar="SIZE",
        help="bytes of the pool, and of the host memory of each design (default: as "
        "much as the largest cache of the CPU, or the largest size, if that is more)",
    )
    parser.add_argument(
        "--run",
        type=parse_whole_number_from(1),
        metavar="N",
        help="host blocks that a full cache evicts, and finds, together on average "
        "(default: 128, or a sixteenth of them all if that is less)",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="leave out how much of a transfer a running step hides (default: it is "
        "measured)",
    )
    add_file_options(parser, "GB/s against the size of a transfer")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if args.mode is not None:
        check_names("--mode", [args.mode], list(MODES))
    designs = check_names("--designs", args.designs or list(DESIGNS), list(DESIGNS))
    check_files(args)
    check_extra("bench", ("rich", "matplotlib") if args.plot else ("rich",))
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
    if args.plot:
        write_picture(args.plot, partial(report.plot_results, record))
    if args.json:
        write_json(args.json, report.to_json(record))
    return EXIT_OK


def _sizes_text(sizes: tuple[int, ...]) -> str:
    return ",".join(size_text(size, "") for size in sizes)
