"""Speed of a store, next to plain files or the store's own client.

A folder is compared with plain files: opened, written or read whole, and closed. Redis
and Mooncake are compared with their client libraries as well, called without jaxkv.

    python -m benchmarks.storage URL [--block-sizes SIZE,...] [--json FILE] ...
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.common import run_command
from benchmarks.storage.rivals import NOTES, RivalBench
from benchmarks.storage.run import (
    JAXKV,
    WAYS,
    StorageConfig,
    StorageFailedError,
    StorageRecord,
    StorageResult,
    Way,
)
from benchmarks.transfer.__main__ import units_note
from benchmarks.transfer.records import Ratio, ratio
from jaxkv._util import one_line, size_text
from jaxkv.tools import process
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.files import OUTPUT_OPTIONS, check_extra, check_files, write_files
from jaxkv.tools.machine import machine, versions
from jaxkv.tools.progress import show_progress
from jaxkv.tools.speed import BytesDifferError, Speed, speed
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    CommandError,
    Usage,
    UsageError,
    whole_number_from,
)

_DEFAULT = StorageConfig("")
USAGE = Usage(
    "python -m benchmarks.storage",
    "Time block writes to a store and reads from it: through jaxkv's storage tier "
    "(queue, checksum, store), through the store alone, and through plain files or the "
    "store's client. All alternate in every round, all bytes are checked, and "
    "everything written is deleted.",
    f"""
store:
  URL  a folder, s3://BUCKET/PREFIX, gs://, redis://HOST:PORT,
      unix:///SOCKET or mooncake://HOST:PORT (examples/mooncake)
  --sealed  authenticate blocks with a secret, as storage_secret does
      (default: a checksum)

blocks:
  --block-sizes SIZE,...  bytes per block
  --per-round SIZE  bytes written, then read, per round
  --rounds N  timed rounds, at least 3
  --in-flight N  concurrent writes, or reads

output:
{OUTPUT_OPTIONS}
""",
    {"--rounds": whole_number_from(3)},
    {
        "block_sizes": _DEFAULT.block_sizes,
        "per_round": _DEFAULT.num_bytes,
        "rounds": _DEFAULT.rounds,
        "in_flight": _DEFAULT.num_in_flight,
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(USAGE, _run, argv)


def _run(args: Args) -> int:
    check_files(args)
    check_extra("the benchmark")
    config = StorageConfig(
        url=args.url,
        block_sizes=tuple(args.block_sizes),
        num_bytes=args.per_round,
        rounds=args.rounds,
        num_in_flight=args.in_flight,
        is_sealed=args.sealed,
    )
    try:
        bench = RivalBench(config)
    except (ValueError, ImportError, StorageFailedError) as error:
        raise UsageError(f"URL: {one_line(str(error))}") from error
    try:
        # A signal ends the process without leaving this block.
        with bench, process.at_end(bench.close), show_progress() as on_progress:
            record = bench.run(on_progress)
    except StorageFailedError as error:
        raise CommandError(one_line(str(error))) from error
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error
    used = record.results[0].seconds
    print_results(record, [NOTES[name] for name in NOTES if name in used])
    write_files(args, partial(to_json, record))
    return EXIT_OK


def print_results(record: StorageRecord, more_notes: Sequence[str]) -> None:
    """Print the speed of each side, and jaxkv's share of the others' speed."""

    def rows(result: StorageResult) -> list[tuple[str, ...]]:
        return [
            (f"  {name}", *(_speed(result, name, way).text for way in WAYS))
            for name in result.seconds
        ] + [
            (f"  {JAXKV} : {name}", *(_share(result, name, way).text for way in WAYS))
            for name in result.limits
        ]

    sections = [
        (f"{result.num_blocks} blocks of {size_text(result.block_bytes)}", rows(result))
        for result in record.results
    ]
    config = record.config
    notes = [
        units_note(config.rounds),
        f"{config.num_in_flight} blocks are in flight at once. All bytes were checked.",
    ]
    print_facts([("Store", record.place)], 13)
    columns = "best / p50", *(f"{way}, GB/s" for way in WAYS)
    print_table(columns, sections, [*notes, *more_notes])


def to_json(record: StorageRecord) -> dict[str, Any]:
    return {
        "machine": {
            **machine(),
            **versions(
                "tensorstore", "redis", "mooncake-transfer-engine-non-cuda", "xxhash"
            ),
        },
        "config": dataclasses.asdict(record.config) | {"url": record.place},
        "results": [_result_json(result) for result in record.results],
    }


def _result_json(result: StorageResult) -> dict[str, Any]:
    return {
        "block_bytes": result.block_bytes,
        "num_blocks": result.num_blocks,
        "ways": {
            name: {way: dataclasses.asdict(_speed(result, name, way)) for way in WAYS}
            for name in result.seconds
        },
        "jaxkv_over": {
            name: {way: dataclasses.asdict(_share(result, name, way)) for way in WAYS}
            for name in result.limits
        },
    }


def _speed(result: StorageResult, name: str, way: Way) -> Speed:
    num_bytes = result.num_blocks * result.block_bytes
    return speed(num_bytes, result.seconds[name][way])


def _share(result: StorageResult, name: str, way: Way) -> Ratio:
    return ratio(result.seconds[JAXKV][way], result.seconds[name][way])


if __name__ == "__main__":
    sys.exit(main())
