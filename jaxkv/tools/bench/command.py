"""``jaxkv bench``: how fast blocks move on this machine."""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxkv.tools.bench.storage import command as bench_storage
from jaxkv.tools.bench.transfer import command as bench_transfer

SUMMARY = "measure how fast blocks move on this machine"
DESCRIPTION = (
    "Measure how fast blocks move between device and host (transfer), or to a store "
    "and back (storage)."
)
COMMANDS: Mapping[str, types.ModuleType] = {
    "transfer": bench_transfer,
    "storage": bench_storage,
}
METAVAR = "BENCHMARK"
QUESTION = "what to measure"
