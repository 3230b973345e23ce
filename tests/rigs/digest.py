"""A digest of all that an object holds, to find out whether a call has changed it."""

import dataclasses
import functools
import hashlib
import threading
import types
import weakref
from collections import deque
from collections.abc import Mapping, Set

import jax
import numpy as np

# What is no state, or may change though nothing has happened.
_SKIPPED = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    functools.partial,
    weakref.ref,
    weakref.finalize,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
)


def digest(*roots, skip=()):
    """Make a digest of objects and all that they refer to.

    Args:
        roots: The objects.
        skip: Names of attributes that are left out, such as caches.
    """
    hasher = hashlib.sha256()
    seen = {}
    kept = []  # Else ids would be given again.
    stack = list(reversed(roots))
    while stack:
        value = stack.pop()
        if value is None or isinstance(value, bool | int | float | str | bytes):
            hasher.update(f"{type(value).__name__} {value!r};".encode())
            continue
        if isinstance(value, _SKIPPED) or callable(value):
            hasher.update(b"skipped;")
            continue
        if id(value) in seen:
            hasher.update(f"again {seen[id(value)]};".encode())
            continue
        seen[id(value)] = len(seen)
        kept.append(value)
        if isinstance(value, jax.Array):
            value = np.asarray(value)
        if isinstance(value, np.ndarray | np.generic):
            hasher.update(f"{value.dtype} {value.shape};".encode() + value.tobytes())
            continue
        hasher.update(f"{type(value).__name__} ".encode())
        parts = []
        if isinstance(value, Mapping):
            parts += [part for item in value.items() for part in item]
        elif isinstance(value, Set):
            parts += sorted(value, key=repr)
        elif isinstance(value, list | tuple | deque):
            parts += value
        parts += [
            part
            for name, part in _attributes(value)
            if name not in skip and not name.startswith("__")
        ]
        hasher.update(f"{len(parts)};".encode())
        stack += reversed(parts)
    return hasher.hexdigest()


def _attributes(value):
    """List the names and values of an object's attributes."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names]
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return sorted(found.items())
