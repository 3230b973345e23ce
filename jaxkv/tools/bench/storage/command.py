"""``jaxkv bench storage``: how fast blocks reach a store and come back."""

from __future__ import annotations

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
from jaxkv.tools.files import JSON_OPTION, check_extra, check_files, write_files
from jaxkv.tools.progress import show_progress
from jaxkv.tools.usage import (
    EXIT_OK,
    Args,
    CommandError,
    Usage,
    UsageError,
    check_absent,
    sizes_text,
    whole_number_from,
)

_MAX_SHOWN = 300
SUMMARY = "measure how fast a store (folder, S3, Redis, Mooncake) moves blocks"

_DEFAULT = StorageConfig("")
_QUICK = StorageConfig("", (512 << 10,), 16 << 20, 3)
OPTIONS = f"""
store:
  URL  a folder, s3://BUCKET/PREFIX, gs://, redis://HOST:PORT,
      unix:///SOCKET or mooncake://HOST:PORT
  --sealed  authenticate blocks with a secret, as storage_secret does
      (default: a checksum)

blocks:
  --block-sizes SIZE,...  bytes per block (default:
      {sizes_text(_DEFAULT.block_sizes)})
  --per-round SIZE  bytes written, then read, per round (default:
      {sizes_text([_DEFAULT.num_bytes])})
  --rounds N  timed rounds, at least 3 (default: {_DEFAULT.rounds})
  --in-flight N  concurrent writes, or reads
  --quick  run 3 rounds of 16 MiB in blocks of 512 KiB

output:
{JSON_OPTION}
"""
PARSERS = {"--rounds": whole_number_from(3)}
DEFAULTS = {"in_flight": _DEFAULT.num_in_flight}
USAGE = Usage(
    "jaxkv bench storage",
    "Time block writes to a store and reads from it: through jaxkv's storage tier "
    "(queue, checksum, store), and through the store alone. Both alternate in every "
    "round, all bytes are checked, and everything written is deleted.",
    OPTIONS,
    PARSERS,
    DEFAULTS,
)


def run(args: Args) -> int:
    record = measure(args, StorageBench)
    report.print_results(record)
    write_files(args, partial(report.to_json, record))
    return EXIT_OK


def measure(
    args: Args, make_bench: Callable[[StorageConfig], StorageBench]
) -> StorageRecord:
    check_files(args)
    check_extra("bench")
    config = _config_of(args)
    try:
        bench = make_bench(config)
    except (ValueError, ImportError, StorageFailedError) as error:
        raise UsageError(f"URL: {one_line(str(error))}") from error
    try:
        # A signal ends the process without leaving this block.
        with bench, process.at_end(bench.close), show_progress() as on_progress:
            return bench.run(on_progress)
    except StorageFailedError as error:
        raise CommandError(one_line(str(error))[:_MAX_SHOWN]) from error
    except BytesDifferError as error:
        raise CommandError(f"bytes differ: {error}") from error


def _config_of(args: Args) -> StorageConfig:
    default = _DEFAULT
    if args.quick:
        chosen = "block_sizes", "per_round", "rounds"
        check_absent(args, chosen, "--quick: it cannot be combined with {}")
        default = _QUICK
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
