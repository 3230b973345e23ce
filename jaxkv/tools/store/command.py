"""``jaxkv store``: list the namespaces of a store, or remove one."""

from __future__ import annotations

import importlib

from jaxkv.tools import SUBCOMMANDS

SUMMARY = "list the namespaces of a store, or remove one"
DESCRIPTION = "A namespace has the blocks of one model, layout and secret."
COMMANDS = {
    name: importlib.import_module(f"jaxkv.tools.store.{name}")
    for name in SUBCOMMANDS["store"]
}
