"""Cache policies: pure functions over pytrees, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxkv.policies.lru import LRUState as LRUState
from jaxkv.policies.lru import make_lru as make_lru
from jaxkv.types import Policy

POLICIES: Mapping[str, Callable[[int, int], Policy]] = MappingProxyType(
    {"lru": make_lru}
)
"""Makers of the built-in policies, ``(num_blocks, max_batch) -> Policy``, by name."""
