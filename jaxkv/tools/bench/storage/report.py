"""The results of a storage measurement as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._util import size_text
from jaxkv.tools.bench.storage.run import JAXKV, WAYS, StorageRecord, StorageResult, Way
from jaxkv.tools.bench.transfer.records import Ratio, Speed, ratio, speed
from jaxkv.tools.bench.transfer.report import ratio_text, speed_text, units_note
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.machine import machine, versions


def print_results(record: StorageRecord, more_notes: Sequence[str] = ()) -> None:
    """Print the speed of each side, and jaxkv's share of the others' speed."""

    def rows(result: StorageResult) -> list[tuple[str, ...]]:
        return [
            (f"  {name}", *(speed_text(_speed(result, name, way)) for way in WAYS))
            for name in result.seconds
        ] + [
            (
                f"  {JAXKV} : {name}",
                *(ratio_text(_share(result, name, way)) for way in WAYS),
            )
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
