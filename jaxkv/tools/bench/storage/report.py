"""The results of a storage measurement as a table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv._util import size_text
from jaxkv.tools.bench.storage.run import (
    CLIENT,
    FILES,
    JAXKV,
    WAYS,
    StorageRecord,
    StorageResult,
    Way,
)
from jaxkv.tools.bench.transfer.records import Ratio, Speed, ratio, speed
from jaxkv.tools.bench.transfer.report import ratio_text, speed_text, units_note
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.machine import machine, versions


def print_results(record: StorageRecord) -> None:
    """Print the speed of each way to store blocks, and what of it jaxkv reaches."""
    sections = [
        (
            f"{result.num_blocks} blocks of {size_text(result.block_bytes)}",
            [
                (f"  {name}", *(speed_text(_speed(result, name, w)) for w in WAYS))
                for name in result.seconds
            ]
            + [
                (
                    f"  {JAXKV} : {name}",
                    *(ratio_text(_share(result, name, w)) for w in WAYS),
                )
                for name in result.limits
            ],
        )
        for result in record.results
    ]
    print_facts([("Store", record.place)], 13)
    columns = "best / p50", *(f"{way}, GB/s" for way in WAYS)
    print_table(columns, sections, _notes(record))


def to_json(record: StorageRecord) -> dict[str, Any]:
    """Convert a record for ``json.dump``."""
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


def _notes(record: StorageRecord) -> list[str]:
    config = record.config
    lines = [
        units_note(config.rounds),
        f"{config.num_in_flight} blocks are in flight at once. All bytes were checked.",
    ]
    if any(FILES in result.seconds for result in record.results):
        lines.append(
            "Plain files are opened, written or read whole, and closed, as many at "
            "once. What was read is handed over in new memory, or in memory that comes "
            "back after use, as by jaxkv; or it is dropped at once, so that the caches "
            "of the CPU keep the memory that it is read into. No file is synced, and "
            "those in the cache of the system are read from there."
        )
    if any(CLIENT in result.seconds for result in record.results):
        lines.append(
            "The client alone calls the store's library, without jaxkv: of Redis for "
            "one block after the other, of Mooncake for as many as are in flight, from "
            "and into memory that it knows."
        )
    return lines


def _speed(result: StorageResult, name: str, way: Way) -> Speed:
    num_bytes = result.num_blocks * result.block_bytes
    return speed(num_bytes, result.seconds[name][way])


def _share(result: StorageResult, name: str, way: Way) -> Ratio:
    return ratio(result.seconds[JAXKV][way], result.seconds[name][way])
