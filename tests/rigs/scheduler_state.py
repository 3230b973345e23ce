"""Snapshots of an object and everything that it holds, as plain values.

A snapshot walks over attributes, so a new attribute needs no code here. Objects of
jaxkv become `Entry` records, which refer to one another by name. Arrays and containers
are copied. Callables and the attributes in `_NOT_STATE` (caches, scratch memory) are
skipped. Objects of other packages, such as engines' requests, are kept by reference.
Objects whose class defines `__reduce__` are rebuilt. The digest excludes the classes in
`_NOT_DIGESTED` and objects of other packages.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv import DeviceBlockPool, OffloadScheduler
from jaxkv.scheduling.listening import MOMENTS, Listeners
from jaxkv.scheduling.requests import Requests, _Growing
from jaxkv.scheduling.stats import Delays
from jaxkv.scheduling.whatif.what_if import Shadowed

_NOT_STATE: dict[type, tuple[str, ...]] = {
    Requests: ("_has_keys",),
    Delays: ("lookups", "deferrals", "loads"),
    Shadowed: ("_log",),
    Listeners: MOMENTS,
    OffloadScheduler: ("recorder", "_view", "_policy_state"),
    DeviceBlockPool: ("bound", "_native", "_victims"),
}
# Any read of a request may append keys, and times differ between processes.
_NOT_DIGESTED = _Growing, Delays


class Ref(NamedTuple):
    """A reference to an entry of the snapshot, by its name."""

    name: str


class Rebuilt(NamedTuple):
    """An object that is rebuilt by a call with copied arguments."""

    make: Callable[..., Any]
    args: tuple[Any, ...]


class Entry(NamedTuple):
    """The state of one object: its class and its copied attributes."""

    kind: type
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The state of an object and of everything that it holds."""

    entries: Mapping[str, Entry]  # By the path to each object; the first is the root.

    @property
    def digest(self) -> str:
        """A digest of the state, equal in every process if the states are equal."""
        chunks: list[bytes] = []
        for name, (kind, fields) in self.entries.items():
            if kind not in _NOT_DIGESTED:
                _encode((name, kind.__name__), chunks)
                for pair in sorted(fields.items()):
                    _encode(pair, chunks)
        return hashlib.blake2b(b"".join(chunks), digest_size=16).hexdigest()


def snapshot(root: object, name: str = "scheduler") -> State:
    """Copy the state of an object; `name` is the name of its entry."""
    entries: dict[str, Entry] = {}
    refs: dict[int, Ref] = {}

    def read(value: Any, name: str) -> Any:
        if _form(value) == "object":
            return refs.get(id(value)) or read_object(value, name)
        return _copied(value, lambda item, key: read(item, f"{name}[{key!r}]"))

    def read_object(value: Any, name: str) -> Ref:
        ref = refs[id(value)] = Ref(name)
        fields: dict[str, Any] = {}
        kind: Any = type(value)
        entries[name] = Entry(kind, fields)
        slots, skipped = _attributes(kind)
        for attribute in (*getattr(value, "__dict__", ()), *slots):
            if attribute in skipped:
                continue
            field = getattr(value, attribute)
            if type(field) in _PLAIN:
                fields[attribute] = field
            elif type(field) is np.ndarray:
                fields[attribute] = field.copy()
            elif not callable(field):
                fields[attribute] = read(field, f"{name}.{attribute}")
        return ref

    read(root, name)
    return State(entries)


def restore(root: object, state: State) -> None:
    """Restore an object from a state of the same configuration.

    Objects in attributes, or in tuples in attributes, are changed in place if they have
    the same class. Objects in lists and dicts are new.
    """
    entries = state.entries
    objects = {next(iter(entries)): root}
    matched = {id(root)}

    def match(held: Any, saved: Any) -> None:
        """Pair live objects with the entries that will overwrite them."""
        if type(saved) is Ref:
            is_unmatched = saved.name not in objects and id(held) not in matched
            if is_unmatched and type(held) is entries[saved.name].kind:
                objects[saved.name] = held
                matched.add(id(held))
        elif type(saved) is type(held) is tuple:
            for held_item, saved_item in zip(held, saved, strict=False):
                match(held_item, saved_item)

    for name, (kind, fields) in entries.items():
        if name not in objects:
            objects[name] = object.__new__(kind)
            continue
        for attribute, saved in fields.items():
            if type(saved) is Ref or type(saved) is tuple:
                match(getattr(objects[name], attribute, None), saved)

    def write(saved: Any, _key: object = None) -> Any:
        if type(saved) is Ref:
            return objects[saved.name]
        copied = _copied(saved, write)
        return copied.make(*copied.args) if type(copied) is Rebuilt else copied

    for name, (_, fields) in entries.items():
        target = objects[name]
        for attribute, saved in fields.items():
            if type(saved) in _PLAIN:
                setattr(target, attribute, saved)
            elif not _overwrite(getattr(target, attribute, None), saved):
                setattr(target, attribute, write(saved))


def _overwrite(held: Any, saved: Any) -> bool:
    """Overwrite arrays in place; return False if a shape differs."""
    if isinstance(saved, np.ndarray):
        fits = isinstance(held, np.ndarray) and held.shape == saved.shape
        if fits := fits and held.flags.writeable:
            held[...] = saved
        return fits
    if type(saved) is Rebuilt and _form(held) == "rebuilt":
        make, args = held.__reduce__()
        pairs = zip(args, saved.args, strict=True) if make is saved.make else ()
        return bool(pairs) and all(
            old is new or (type(old) is str and old == new) or _overwrite(old, new)
            for old, new in pairs
        )
    if type(held) is not type(saved) or _form(saved) != "pytree":
        return False
    kind: Any = type(saved)
    return all(
        _overwrite(getattr(held, name), getattr(saved, name))
        for name in _field_names(kind)
    )


# Values that need no copy.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, type})


def _copied(value: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """Copy a value; `visit` copies a container's items, given their index or key."""
    kind: Any = type(value)
    form = _form(value)
    if form == "plain":
        return value
    if form == "array":
        return np.array(value)
    if form == "mapping":
        if _PLAIN.issuperset(map(type, value.values())):
            return value.copy()
        return kind([(key, visit(item, key)) for key, item in value.items()])
    if form in ("sequence", "deque") and _PLAIN.issuperset(map(type, value)):
        return copy.copy(value)
    names: Iterable[Any] = itertools.count()
    items: Iterable[Any] = value
    if form == "pytree":
        names = _field_names(kind)
        items = [getattr(value, name) for name in names]
    elif form == "rebuilt":
        make, items = value.__reduce__()
    copied = [
        item
        if type(item) in _PLAIN
        # Most items are arrays, and copying them here is faster than `visit`.
        else item.copy()
        if type(item) is np.ndarray
        else visit(item, name)
        for name, item in zip(names, items, strict=False)
    ]
    if form == "rebuilt":
        return Rebuilt(make, tuple(copied))
    if form == "deque":
        return deque(copied, value.maxlen)
    return kind(copied) if form == "sequence" else kind(*copied)


_FORMS: dict[type, str] = {}


def _form(value: Any) -> str:
    """Choose how to copy a value, by its class."""
    kind = type(value)
    if kind not in _FORMS:
        _FORMS[kind] = _choose_form(kind, value)
    return _FORMS[kind]


def _choose_form(kind: Any, value: Any) -> str:
    if kind in _PLAIN:
        return "plain"
    bases = [base for base in kind.__mro__ if base.__module__.startswith("jaxkv.")]
    if any("__reduce__" in vars(base) for base in bases):
        return "rebuilt"
    if kind in (list, tuple, set, frozenset):
        return "sequence"
    if callable(value):
        return "plain"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return "plain" if any(map(callable, value)) else "named tuple"
    if isinstance(value, np.ndarray | jax.Array):
        return "array"
    if isinstance(value, dict):
        return "mapping"
    if isinstance(value, deque):
        return "deque"
    if not bases:
        return "plain"
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return "object"
    # A frozen object never changes, but the arrays of a pytree are overwritten.
    return "plain" if jax.tree_util.all_leaves([value]) else "pytree"


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple([field.name for field in dataclasses.fields(kind)])


@functools.cache
def _attributes(kind: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """List the slots of a class, and the attributes that are not state."""
    slots: list[str] = []
    skipped: set[str] = set()
    for base in kind.__mro__:
        slots += vars(base).get("__slots__", ())
        skipped.update(_NOT_STATE.get(base, ()))
    return tuple(slots), frozenset(skipped)


def _encode(value: Any, chunks: list[bytes]) -> None:
    """Append an injective encoding of a value."""
    kind: Any = type(value)
    if isinstance(value, np.ndarray):
        chunks.append(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif kind in (set, frozenset):
        items = []
        for item in value:
            encoded: list[bytes] = []
            _encode(item, encoded)
            items.append(b"".join(encoded))
        chunks += (f"set{len(items)}(".encode(), *sorted(items))
    elif kind in (list, tuple) and _PLAIN.issuperset(map(type, value)):
        chunks.append(f"{value!r};".encode())
    elif isinstance(value, dict):
        _encode([item for pair in value.items() for item in pair], chunks)
    elif kind is Rebuilt and value.make in _NOT_DIGESTED:
        chunks.append(b"cache;")
    elif isinstance(value, list | tuple | deque):
        chunks.append(f"{kind.__name__}{len(value)}(".encode())
        for item in value:
            _encode(item, chunks)
    elif _form(value) == "pytree":
        _encode([getattr(value, name) for name in _field_names(kind)], chunks)
    elif (
        kind in _PLAIN
        or dataclasses.is_dataclass(kind)
        or isinstance(value, np.generic)
    ):
        chunks.append(f"{kind.__name__} {value!r};".encode())
    else:
        chunks.append(b"other;")  # An object of another package, or a function.
