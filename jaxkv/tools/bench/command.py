"""``jaxkv bench``: how fast blocks move on this machine."""

from __future__ import annotations

import importlib

from jaxkv.tools import BENCHMARKS

SUMMARY = "measure how fast blocks move on this machine"
DESCRIPTION = "Measure how fast blocks move to host memory, or to a store, and back."
COMMANDS = {
    name: importlib.import_module(f"jaxkv.tools.bench.{name}.command")
    for name in BENCHMARKS
}
