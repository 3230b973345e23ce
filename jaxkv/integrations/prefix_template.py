"""Splits an engine's cache into the KV of the prompt and constant leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.integrations.prefix_blocks import AxisRules, find_sequence_axes
from jaxkv.integrations.prefix_layout import arrays_of
from jaxkv.integrations.prefix_store import PrefixStore
from jaxkv.types import PyTree

_log = logging.getLogger(__name__)


class _Leaf(NamedTuple):
    path: str
    axis: int | None  # The sequence axis; None for a constant leaf.
    aval: jax.core.ShapedArray
    sharding: jax.sharding.Sharding
    constant: jax.Array | None  # The content of a constant leaf; None if all zero.


class PrefixTemplate:
    """The layout of an engine's cache, and a store for its KV.

    Leaves without a sequence axis must be the same in every cache: each saved cache is
    compared on the device with the template's. Leaves that are all zero are not kept.
    """

    def __init__(
        self,
        prefix: PyTree,
        padded_length: int,
        rules: AxisRules | None,
        store_options: Mapping[str, Any],
    ):
        """Read the layout of a cache, which is not kept, and make the store.

        `find_sequence_axes` describes `rules`; without rules, `padded_length` is the
        length of sequence axes. With storage, the layout becomes part of the namespace.
        """
        arrays = arrays_of("the prefix", prefix)
        self._treedef = jax.tree.structure(prefix)
        axes = find_sequence_axes(
            prefix, None if rules is not None else padded_length, rules
        )
        self._leaves = [
            _Leaf(
                *leaf,
                jax.typeof(array),
                array.sharding,
                None
                if leaf.axis is not None or bool(_is_same(array, None))
                else jnp.array(array, copy=True),
            )
            for leaf, array in zip(axes, arrays, strict=True)
        ]
        self._differing: set[str] = set()
        kv = {n: leaf.axis for n, leaf in enumerate(axes) if leaf.axis is not None}
        first, axis = next(iter(kv.items()))
        self.padded_length: int = arrays[first].shape[axis]
        self.num_bytes = sum(array.nbytes for array in arrays)
        options = dict(store_options)
        if options.get("storage") is not None:
            options["namespace"] = dataclasses.replace(
                options["namespace"], layout=self._describe()
            )
        self.store = PrefixStore(
            [arrays[n] for n in kv], sequence_axis=list(kv.values()), **options
        )

    @property
    def shardings(self) -> PyTree:
        """The sharding of each leaf."""
        return jax.tree.unflatten(
            self._treedef, [leaf.sharding for leaf in self._leaves]
        )

    def split(
        self, prefix: PyTree
    ) -> tuple[list[jax.Array], Callable[[], bool] | None]:
        """Split a cache into its KV and the constant leaves.

        Returns the arrays with a sequence axis; and a function that waits for the
        device and returns whether the constant leaves equal the template's, None
        without such leaves. ValueError if the cache has another structure or other
        shapes than the template.
        """
        arrays = arrays_of("the prefix", prefix, self._treedef)
        kv: list[jax.Array] = []
        same: list[tuple[str, jax.Array]] = []
        for leaf, array in zip(self._leaves, arrays, strict=True):
            if leaf.axis is None:
                same.append((leaf.path, _compare(leaf, array)))
            else:
                kv.append(array)
        return kv, (lambda: self._all_same(same)) if same else None

    def rebuild(self, kv: list[jax.Array]) -> PyTree:
        """Make a cache from arrays with a sequence axis; copy the constant leaves."""
        rest = iter(kv)
        arrays = []
        for _, axis, aval, sharding, constant in self._leaves:
            if axis is not None:
                arrays.append(next(rest))
            elif constant is None:
                arrays.append(jnp.zeros(aval.shape, aval.dtype, device=sharding))
            else:
                arrays.append(jnp.array(constant, copy=True))
        return jax.tree.unflatten(self._treedef, arrays)

    def _describe(self) -> str:
        """Encode what caches that are rebuilt from one another's KV have in common.

        That is the paths and axes of the KV, and the constant leaves.
        """
        entries: list[list[object]] = []
        for leaf in self._leaves:
            if leaf.axis is not None:
                entries.append([leaf.path, leaf.axis])
                continue
            digest = None
            if leaf.constant is not None:
                content = np.asarray(leaf.constant).tobytes()
                digest = hashlib.sha256(content).hexdigest()
            shape = list(leaf.aval.shape)
            entries.append([leaf.path, str(leaf.aval.dtype), shape, digest])
        return json.dumps(entries)

    def _all_same(self, same: list[tuple[str, jax.Array]]) -> bool:
        differing = [path for path, is_same in same if not is_same]
        for path in differing:
            if path not in self._differing:
                self._differing.add(path)
                _log.warning(
                    "A prefix is not kept: %r has no sequence axis, but differs from "
                    "the first prefix, so it depends on the prompt. If it has a "
                    "sequence axis, pass it in sequence_axes.",
                    path,
                )
        return not differing


def _compare(leaf: _Leaf, array: jax.Array) -> jax.Array:
    """Return bool[]: whether an array has the bits of a constant leaf."""
    path, _, aval, sharding, constant = leaf
    if array.shape != aval.shape or array.dtype != aval.dtype:
        raise ValueError(
            f"{path!r} must be {aval.dtype}{list(aval.shape)}, as in the first "
            f"prefix, not {array.dtype}{list(array.shape)}."
        )
    if constant is not None and not array.sharding.is_equivalent_to(
        sharding, array.ndim
    ):
        array = jax.device_put(array, sharding)
    is_same: jax.Array = _is_same(array, constant)
    return is_same


@jax.jit
def _is_same(array: jax.Array, content: jax.Array | None) -> jax.Array:
    """Return bool[]: whether two arrays have the same bits; None is all zero bits."""
    bits = _bits(array)
    expected = jnp.zeros_like(bits) if content is None else _bits(content)
    return jnp.all(bits == expected)


def _bits(array: jax.Array) -> jax.Array:
    """Return floats as integers of the same bits, so that a NaN equals itself."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(array, bits)
