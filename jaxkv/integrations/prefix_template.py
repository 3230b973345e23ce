"""Splits an engine's cache into the KV of the prompt and constant leaves."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.integrations.prefix_blocks import (
    AxisRules,
    LeafAxis,
    find_sequence_axes,
)
from jaxkv.integrations.prefix_store import PrefixStore
from jaxkv.types import PyTree

_log = logging.getLogger(__name__)


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
        make_store: Callable[
            [list[jax.Array], list[int], Callable[[], str]], PrefixStore
        ],
    ):
        """Read the layout of a cache, which is not kept.

        Args:
            prefix: The cache.
            padded_length: Tokens that it has room for. Not used if there are rules.
            rules: As for `find_sequence_axes`.
            make_store: Makes the store from the arrays with KV, their sequence axes,
                and `describe`.

        Raises:
            ValueError: A sequence axis is not clear, or the cache cannot be stored.
            TypeError: A leaf is not a `jax.Array`.
        """
        arrays, treedef = jax.tree.flatten(prefix)
        self._treedef: jax.tree_util.PyTreeDef = treedef
        for array in arrays:
            _check_array(array)
        self._leaves = find_sequence_axes(
            prefix, None if rules is not None else padded_length, rules
        )
        parts = list(zip(self._leaves, arrays, strict=True))
        self._specs = [jax.typeof(array) for array in arrays]
        self._kept = [
            None
            if leaf.axis is not None or bool(_is_zero(array))
            else jnp.array(array, copy=True)
            for leaf, array in parts
        ]
        self._shardings = [array.sharding for array in arrays]
        self._differing: set[str] = set()
        kv = [array for leaf, array in parts if leaf.axis is not None]
        axes = [leaf.axis for leaf in self._leaves if leaf.axis is not None]
        self.padded_length: int = kv[0].shape[axes[0]]
        self.num_bytes = sum(array.nbytes for array in arrays)
        self.store = make_store(kv, axes, self.describe)

    @property
    def shardings(self) -> PyTree:
        """The sharding of each leaf."""
        return jax.tree.unflatten(self._treedef, self._shardings)

    def describe(self) -> str:
        """Name what caches have in common that can be rebuilt from one another's KV.

        The paths and axes of the KV; and what the other leaves are, as in every cache
        here. It waits for the device.
        """
        leaves: list[list[object]] = []
        for leaf, spec, kept in zip(self._leaves, self._specs, self._kept, strict=True):
            if leaf.axis is not None:
                leaves.append([leaf.path, leaf.axis])
                continue
            digest = None
            if kept is not None:
                digest = hashlib.sha256(np.asarray(kept).tobytes()).hexdigest()
            leaves.append([leaf.path, str(spec.dtype), list(spec.shape), digest])
        return json.dumps(leaves)

    def split(
        self, prefix: PyTree
    ) -> tuple[list[jax.Array], Callable[[], bool] | None]:
        """Split a cache into its KV and the other leaves.

        Returns:
            The arrays with a sequence axis; and a function that waits for the device
            and returns whether the other leaves equal the template's, or None if there
            are no others.

        Raises:
            ValueError: The cache has another structure or other shapes than the
                template.
            TypeError: A leaf is not a `jax.Array`.
        """
        arrays, treedef = jax.tree.flatten(prefix)
        if treedef != self._treedef:
            raise ValueError(
                f"the prefix must have the structure {self._treedef}, as the first one "
                f"had, not {treedef}."
            )
        kv, same = [], []
        for n, (leaf, array) in enumerate(zip(self._leaves, arrays, strict=True)):
            _check_array(array)
            if leaf.axis is None:
                same.append((leaf, self._compare(n, array)))
            else:
                kv.append(array)
        return kv, (lambda: self._all_same(same)) if same else None

    def rebuild(self, kv: list[jax.Array]) -> PyTree:
        """Make a cache from arrays with a sequence axis; copy the other leaves."""
        left = iter(kv)
        arrays = []
        for leaf, spec, kept, place in zip(
            self._leaves, self._specs, self._kept, self._shardings, strict=True
        ):
            if leaf.axis is not None:
                arrays.append(next(left))
            elif kept is None:
                arrays.append(jnp.zeros(spec.shape, spec.dtype, device=place))
            else:
                arrays.append(jnp.array(kept, copy=True))
        return jax.tree.unflatten(self._treedef, arrays)

    def _compare(self, n: int, array: jax.Array) -> jax.Array:
        spec, kept, place = self._specs[n], self._kept[n], self._shardings[n]
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ValueError(
                f"{self._leaves[n].path!r} must be {spec.dtype}{list(spec.shape)}, as "
                f"the first one was, not {array.dtype}{list(array.shape)}."
            )
        if kept is None:
            return _is_zero(array)
        if not array.sharding.is_equivalent_to(place, array.ndim):
            array = jax.device_put(array, place)
        return _is_same(array, kept)

    def _all_same(self, same: list[tuple[LeafAxis, jax.Array]]) -> bool:
        differing = [leaf.path for leaf, is_same in same if not is_same]
        for path in differing:
            if path not in self._differing:
                self._differing.add(path)
                _log.warning(
                    "A prefix is not kept: %r has no sequence axis, but differs from "
                    "that of the first prefix, so it depends on the prompt. If it has "
                    "a sequence axis, pass it in sequence_axes.",
                    path,
                )
        return not differing


def _check_array(array: object) -> None:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"a prefix must be a pytree of jax.Arrays outside jit; a leaf is "
            f"{type(array)}."
        )
    if array.is_deleted():
        raise RuntimeError("an array of the prefix has been deleted or donated.")


def _is_zero(array: jax.Array) -> jax.Array:
    """Return bool[]: whether all bits are zero."""
    zero: jax.Array = _compare_bits(array, None)
    return zero


def _is_same(array: jax.Array, other: jax.Array) -> jax.Array:
    """Return bool[]: whether all bits are equal."""
    same: jax.Array = _compare_bits(array, other)
    return same


@jax.jit
def _compare_bits(array: jax.Array, other: jax.Array | None) -> jax.Array:
    bits = _bits(array)
    return jnp.all(bits == (jnp.zeros_like(bits) if other is None else _bits(other)))


def _bits(array: jax.Array) -> jax.Array:
    """Return floats as integers of the same bits, so that a NaN equals itself."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(array, bits)
