"""Names of the installed vLLM, which depend on its version."""

from __future__ import annotations

import importlib
from typing import Any


def find_name(module: str, name: str) -> Any:
    """Return a name of a module; None without vLLM, or if this version has none."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
