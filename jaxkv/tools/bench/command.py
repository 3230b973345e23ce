"""``jaxkv bench``: what moving blocks costs, measured here or told by compilers."""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxkv.tools.bench.compiled import command as bench_compile
from jaxkv.tools.bench.storage import command as bench_storage
from jaxkv.tools.bench.transfer import command as bench_transfer

SUMMARY = "measure how fast blocks move here, or compile transfers for TPUs and GPUs"
DESCRIPTION = (
    "Measure how fast blocks move between device and host on this machine (transfer), "
    "or to a store and back (storage), or compile the programs that move them for TPUs "
    "and GPUs that this machine does not have (compile)."
)
COMMANDS: Mapping[str, types.ModuleType] = {
    "transfer": bench_transfer,
    "storage": bench_storage,
    "compile": bench_compile,
}
METAVAR = "BENCHMARK"
QUESTION = "what to measure"
