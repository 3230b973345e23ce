"""The registry of cache policies by name, built-in and custom."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from jaxkv._util import hint, shown
from jaxkv.policies.arc import make_arc
from jaxkv.policies.base import Policy
from jaxkv.policies.hazard import make_hazard
from jaxkv.policies.lru import make_lru

PolicyMaker: TypeAlias = Callable[[int, int], Policy]
"""Makes a policy: ``(num_blocks, max_batch) -> Policy``."""

_makers: dict[str, PolicyMaker] = {}

POLICIES: Mapping[str, PolicyMaker] = MappingProxyType(_makers)
"""Read-only view of the makers by name; `register_policy` adds to them."""


def register_policy(name: str, make: PolicyMaker) -> None:
    """Register a policy under a name, for this process.

    Args:
        name: A lower-case identifier that no policy has yet.
        make: ``(num_blocks, max_batch) -> Policy``. Equal arguments should give the
            same object (`functools.cache`), so that caches share compiled functions.

    Raises:
        ValueError: If the name is taken or not a lower-case identifier.
        TypeError: If `make` cannot be called.

    Example:
        >>> register_policy("my_lru", make_lru)
        >>> get_policy_maker("my_lru")(4, 64) is make_lru(4, 64)
        True
    """
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"name={shown(name)} must be a lower-case letter, then lower-case "
            "letters, digits or '_'."
        )
    if name in _makers:
        raise ValueError(
            f"name={shown(name)} is taken: it must not be in {policy_names()}."
        )
    if not callable(make):
        raise TypeError(f"{make=} must be callable: (num_blocks, max_batch) -> Policy.")
    _makers[name] = make


def policy_names() -> list[str]:
    """List the names of all policies in the order of registration."""
    return list(_makers)


def get_policy_maker(name: str) -> PolicyMaker:
    """Return the maker of a policy by its name.

    Args:
        name: One of `policy_names()`.

    Raises:
        ValueError: If there is no such policy.

    Example:
        >>> get_policy_maker("lru") is make_lru
        True
    """
    if name not in _makers:
        names = policy_names()
        suggestion = hint(str(name).lower(), names)
        raise ValueError(
            f"Unknown cache policy: {shown(name)}. Supported: {names}{suggestion}"
        )
    return _makers[name]


register_policy("lru", make_lru)
register_policy("arc", make_arc)
register_policy("hazard", make_hazard)
