"""``jaxkv bench storage``: how fast blocks reach a store and come back."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from jaxkv._util import one_line, size_text
from jaxkv.tools import process
from jaxkv.tools.bench.storage import report
from jaxkv.tools.bench.storage.run import (
    StorageBench,
    StorageConfig,
    StorageFailedError,
    StorageRecord,
)
from jaxkv.tools.bench.transfer.records import BytesDifferError
from jaxkv.tools.options import (
    EXIT_OK,
    CommandError,
    Parser,
    UsageError,
    check_absent,
    check_extra,
    check_files,
    packages_for,
    parse_bytes,
    parse_rounds,
    parse_whole_number_from,
    sizes_text,
    write_files,
)
from jaxkv.tools.progress import show_progress

_MAX_SHOWN = 300
SUMMARY = "measure how fast a store (folder, S3, Redis, Mooncake) moves blocks"
DESCRIPTION = (
    "Time blocks on their way to a store and back, through the storage tier's queue, "
    "format with checksum, and store; and through the store alone. Both take turns in "
    "every round, all bytes are checked, and all that was written is deleted."
)


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    default = StorageConfig("")
    parser.add_argument(
        "url",
        metavar="URL",
        help="a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, redis://HOST:PORT, "
        "unix:///SOCKET or mooncake://HOST:PORT",
    )
    parser.values(
        "--block-sizes SIZE",
        "bytes per block",
        parse_bytes,
        otherwise=sizes_text(default.block_sizes),
    )
    parser.value(
        "--per-round SIZE",
        "bytes written, and read, per round",
        parse_bytes,
        otherwise=sizes_text([default.num_bytes]),
    )
    parser.value(
        "--rounds N", "rounds, at least 3", parse_rounds, otherwise=f"{default.rounds}"
    )
    parser.value(
        "--in-flight N",
        "blocks written, or read, at once",
        parse_whole_number_from(1),
        default.num_in_flight,
    )
    parser.flag(
        "--sealed", "seal blocks with a secret, as storage_secret does", "a checksum"
    )
    parser.flag("--quick", "3 rounds of 16 MiB in blocks of 512 KiB", "as above")
    parser.files()


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    record = measure(args, StorageBench)
    report.print_results(record)
    write_files(args, partial(report.to_json, record))
    return EXIT_OK


def measure(
    args: argparse.Namespace, make_bench: Callable[[StorageConfig], StorageBench]
) -> StorageRecord:
    """Measure what a command line asks for."""
    check_files(args)
    check_extra("bench", packages_for(args))
    config = _config_of(args)
    try:
        bench = make_bench(config)
    except (ValueError, ImportError, StorageFailedError) as error:
        raise UsageError(f"URL: {one_line(str(error))}") from error
    try:
        # A signal ends the process without leaving this block.
        with (
            bench,
            process.at_end(bench.close),
            show_progress() as on_progress,
        ):
            return bench.run(on_progress)
    except StorageFailedError as error:
        raise CommandError(one_line(str(error))[:_MAX_SHOWN]) from error
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error


def _config_of(args: argparse.Namespace) -> StorageConfig:
    default = StorageConfig("")
    if args.quick:
        chosen = "block_sizes", "per_round", "rounds"
        check_absent(args, chosen, "--quick: it chooses for itself, without {}")
        default = StorageConfig("", (512 << 10,), 16 << 20, 3)
    config = StorageConfig(
        url=args.url,
        block_sizes=tuple(args.block_sizes or default.block_sizes),
        num_bytes=args.per_round or default.num_bytes,
        rounds=args.rounds or default.rounds,
        num_in_flight=args.in_flight,
        is_sealed=args.sealed,
    )
    if max(config.block_sizes) > config.num_bytes:
        raise UsageError(
            f"--per-round: {size_text(config.num_bytes)} is less than a block of "
            f"{size_text(max(config.block_sizes))}"
        )
    return config
