"""A prefix cache for JetStream's `Driver`, in blocks that prompts share.

For ``Driver(..., prefix_cache_inst=PrefixCache(...))`` of JetStream 0.3. This module
does not import JetStream: it has the methods that the driver calls, and returns the
attributes that it reads.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, Unpack

import jax
import jax.numpy as jnp

from jaxkv import Extras, Namespace
from jaxkv._util import Resource, check_whole, shown
from jaxkv.integrations.prefix_layout import describe, leaf_paths
from jaxkv.integrations.prefix_store import PrefixStore, StoreKeys
from jaxkv.types import PyTree

T = TypeVar("T")

Key: TypeAlias = tuple[int, ...]
"""The tokens of a prompt, from the first on."""

AxisRules: TypeAlias = Mapping[str, int | None]
"""Patterns of leaf paths, ``"*/cached_key"``, to sequence axes; None for no axis."""

MAXTEXT_AXES: AxisRules = {
    "*cache_prefill_segment_id": -1,
    "*cached_prefill_*": -4,
    "*": None,
}
"""MaxText's prefill cache, with its default order of axes."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrefixValue:
    """A loaded prefix, with the attributes of JetStream's ``prefix_cache.Value``."""

    prefix: PyTree  # The engine's cache, in new arrays; zero after the tokens.
    tokens: Key
    true_length: int
    padded_length: int  # Tokens that it has room for.
    prefix_size_bytes: int
    device: PyTree  # The placement of each leaf.


class PrefixCache(Resource):
    """Replaces JetStream's ``PrefixCache``, and keeps each block of KV once.

    The engine's cache, any pytree, is cut into blocks along its sequence axes. Full
    blocks are kept on the host; prompts with a common prefix share them. `load`
    rebuilds the longest prefix on the host.

    Leaves without a sequence axis, such as buffers for generated tokens, must be zero:
    `load` returns zeros, and a cache where one is not zero is not kept, since it would
    depend on the prompt.

    JetStream's threads end the server's process on any exception. So `save`, `load` and
    `contains` raise none: an error is logged once per cause, counted in `errors`, and
    treated as a miss.

    Any thread may call.

    Attributes:
        store: The blocks, their counters, `flush` and `clear`. The driver passes no
            epoch: after ``store.clear()``, it finds and keeps nothing.
    """

    def __init__(
        self,
        cache_like: PyTree,
        *,
        block_size: int,
        extras: Extras,
        sequence_axes: AxisRules = MAXTEXT_AXES,
        **store: Unpack[StoreKeys],
    ):
        """Allocate the host memory and compile.

        Args:
            cache_like: The engine's cache of a prompt at its greatest length, or its
                shapes (`jax.ShapeDtypeStruct`); not kept.
            block_size: Tokens per block. It should divide the engine's
                ``prefill_chunk_size``, since JetStream reuses whole chunks.
            extras: The adapter and salt of all prompts, ``Extras()`` for none. The
                driver passes only tokens, so a driver with an adapter store must have
                no prefix cache: KV of one adapter would be served under another.
            sequence_axes: The sequence axis of each leaf, by patterns of its path; the
                first match counts, ``{"*/key": 1, "*": None}``.
            store: As for `PrefixStore`: its size, ``num_host_blocks`` or
                ``host_bytes``, and perhaps ``cache_policy`` and others.

        Raises:
            ValueError: An argument is wrong, or a leaf has no rule.
            TypeError: An argument has a wrong type.
            MemoryError: There is not enough host memory.
        """
        if not isinstance(extras, Extras):
            raise TypeError(f"extras={shown(extras)} must be a jaxkv.Extras.")
        self._extras = extras
        described = describe(cache_like)
        self._treedef = jax.tree.structure(described)
        self._leaves = dict(leaf_paths(described))
        if len(self._leaves) != len(jax.tree.leaves(described)):
            raise ValueError("two leaves of the cache have the same path; rename one.")
        if not isinstance(sequence_axes, Mapping):
            raise TypeError(f"sequence_axes={shown(sequence_axes)} {_RULES}.")
        axes = {
            path: _find_axis(path, leaf, sequence_axes)
            for path, leaf in self._leaves.items()
        }
        self._axes = {path: axis for path, axis in axes.items() if axis is not None}
        if not self._axes:
            raise ValueError(
                f"no leaf of {shown(list(self._leaves))} has a sequence axis; pass "
                "sequence_axes."
            )
        self._nonzero: set[str] = set()
        self._lock = threading.Lock()  # Guards the counters.
        self._errors: collections.Counter[str] = collections.Counter()
        self._causes: set[tuple[object, ...]] = set()
        self.store = PrefixStore(
            {path: self._leaves[path] for path in self._axes},
            namespace=Namespace("", "", "", "", block_size),
            sequence_axis=self._axes,
            **store,
        )
        self.store.warm_up()

    @property
    def errors(self) -> Mapping[str, int]:
        """Calls that ended in an error, by the name of the method."""
        with self._lock:
            return dict(self._errors)

    def contains(self, key: Key) -> bool:
        """Whether all full blocks of a prompt, at least one, are on the host."""
        contains = functools.partial(self.store.contains, key, self._extras)
        return self._attempt("contains", contains) or False

    def load(
        self,
        key: Key,
        min_common_prefix_key_length: int | None = None,
        *,
        epoch: int | None = None,
    ) -> PrefixValue | None:
        """Load the longest prefix of whole blocks into a new cache.

        Args:
            key: The prompt.
            min_common_prefix_key_length: Load nothing if fewer tokens are found.
            epoch: See `PrefixStore.load`.

        Returns:
            The prefix; None if nothing was found or the load failed.
        """
        min_tokens = min_common_prefix_key_length
        min_tokens = 0 if min_tokens is None else min_tokens
        load = functools.partial(self._load, key, min_tokens, epoch)
        return self._attempt("load", load)

    def save(self, key: Key, value: Any, *, epoch: int | None = None) -> bool:
        """Save the full blocks of a prompt.

        Returns before the bytes have left the device; the arrays may be donated.

        Args:
            key: The prompt.
            value: The engine's cache of it: JetStream's ``prefix_cache.Value``, or a
                `PrefixValue`.
            epoch: See `PrefixStore.save`.

        Returns:
            Whether all its full blocks, at least one, are held or in flight. False if
            the cache has other tokens, or another layout than the first, or if
            `PrefixStore.clear` was called since the prompt was computed.
        """
        save = functools.partial(self._save, key, value, epoch)
        return self._attempt("save", save) or False

    def close(self) -> None:
        """Wait for transfers in flight and end the thread; no calls after this."""
        self.store.close()

    def _load(self, key: Key, min_tokens: int, epoch: int | None) -> PrefixValue | None:
        hit = self.store.load(key, self._extras, min_tokens=min_tokens, epoch=epoch)
        if hit is None:
            return None
        leaves = [
            hit.kv[path]
            if path in self._axes
            else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for path, leaf in self._leaves.items()
        ]
        places = [leaf.sharding for leaf in self._leaves.values()]
        return PrefixValue(
            prefix=jax.tree.unflatten(self._treedef, leaves),
            tokens=tuple(key[: hit.num_tokens]),
            true_length=hit.num_tokens,
            padded_length=self.store.max_tokens,
            prefix_size_bytes=sum(leaf.nbytes for leaf in leaves),
            device=jax.tree.unflatten(self._treedef, places),
        )

    def _save(self, key: Key, value: Any, epoch: int | None) -> bool:
        if tuple(value.tokens[: len(key)]) != tuple(key):
            raise ValueError(
                f"the value has the tokens {shown(value.tokens)}, which do not begin "
                f"with the key, {shown(key)}."
            )
        check_whole(0, true_length=value.true_length)
        arrays: list[Any]
        arrays, treedef = jax.tree.flatten(value.prefix)
        if treedef != self._treedef:  # type: ignore[operator]
            raise ValueError(
                f"the prefix must have the structure {self._treedef}, not {treedef}."
            )
        kv: dict[str, jax.Array] = {}
        flags: list[tuple[str, jax.Array]] = []
        for (path, leaf), array in zip(self._leaves.items(), arrays, strict=True):
            if path in self._axes:
                kv[path] = array
            elif (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"{path!r} must be {leaf.dtype}{list(leaf.shape)}, not "
                    f"{array.dtype}{list(array.shape)}."
                )
            else:
                flags.append((path, _is_zero(array)))
        num_tokens: int = min(len(key), value.true_length)
        held = self.store.save(
            key,
            kv,
            num_tokens,
            self._extras,
            only_if=lambda: self._are_zero(flags),
            epoch=epoch,
        )
        block_size = self.store.block_size
        return 0 < held == num_tokens // block_size * block_size

    def _are_zero(self, flags: list[tuple[str, jax.Array]]) -> bool:
        """Whether the leaves without an axis are zero. Waits for the device."""
        nonzero = [path for path, is_zero in flags if not is_zero]
        for path in nonzero:
            if path not in self._nonzero:
                self._nonzero.add(path)
                _log.warning(
                    "A prefix is not kept: %r has no sequence axis, but is not zero, "
                    "so it depends on the prompt. If it has a sequence axis, pass it "
                    "in sequence_axes.",
                    path,
                )
        return not nonzero

    def _attempt(self, name: str, call: Callable[[], T]) -> T | None:
        """Call a method; if it fails, count the error, and log it the first time."""
        try:
            return call()
        except Exception as error:
            # By the line that raised it: its message may have users' text.
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            cause = name, type(error), frame.f_code, line
            with self._lock:
                self._errors[name] += 1
                is_new = cause not in self._causes
                self._causes.add(cause)
            if is_new:
                _log.exception(
                    "%s() of the prefix cache failed, which counts as a miss: %s: %s "
                    "(logged once; `errors` counts all)",
                    name,
                    type(error).__name__,
                    error,
                )
            return None


_RULES = 'must be patterns of paths and their axes, such as {"*/key": 1, "*": None}'


def _find_axis(path: str, leaf: Any, rules: AxisRules) -> int | None:
    """Return the sequence axis of a leaf by the first rule that matches its path."""
    ndim = len(leaf.shape)
    for pattern, axis in rules.items():
        if not isinstance(pattern, str) or not isinstance(axis, int | None):
            raise TypeError(f"{shown({pattern: axis})} in sequence_axes {_RULES}.")
        if path != pattern and not fnmatch.fnmatchcase(path, pattern):
            continue
        if axis is not None and not -ndim <= axis < ndim:
            raise ValueError(
                f"axis {axis} of {pattern!r} in sequence_axes must be in "
                f"[{-ndim}, {ndim}): {path!r} is {list(leaf.shape)}."
            )
        return axis
    raise ValueError(
        f"no pattern of sequence_axes matches {path!r}, {list(leaf.shape)}; add its "
        "axis, or None if it does not depend on the prompt."
    )


@jax.jit
def _is_zero(array: jax.Array) -> jax.Array:
    """Return bool[]: whether all bits are zero; minus zero is not."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        array = jax.lax.bitcast_convert_type(array, bits)
    return jnp.all(array == jnp.zeros_like(array))
