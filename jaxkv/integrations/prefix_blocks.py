"""Cut the KV of one prompt into blocks, and join blocks into KV.

An engine with a contiguous cache holds the KV of a prompt as a pytree of arrays, padded
along their sequence axes. If it is cut along that axis, an array is a pool of blocks.
Other leaves, such as counters or buffers for generated tokens, are constant.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxkv.types import PyTree

AxisRules: TypeAlias = Mapping[str, int | None]
"""Patterns of leaf paths, ``"*/cached_key"``, to sequence axes; None for no axis."""

MAXTEXT_RULES: AxisRules = {
    "*cache_prefill_segment_id": -1,
    "*cached_prefill_*": -4,
    "*": None,
}
"""MaxText's prefill cache, with its default order of axes."""


class LeafAxis(NamedTuple):
    """The sequence axis of a leaf."""

    path: str  # Such as ``"layers/0/key"``.
    axis: int | None  # Not negative; None for a leaf without a sequence axis.


def path_text(path: Sequence[Any]) -> str:
    """Return a path in a pytree, joined by slashes."""
    text: str = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return text


def leaf_paths(prefix: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths."""
    pairs = jax.tree.leaves_with_path(prefix)
    return [(path_text(path), leaf) for path, leaf in pairs]


def find_sequence_axes(
    prefix: PyTree, padded_length: int | None = None, rules: AxisRules | None = None
) -> list[LeafAxis]:
    """Return the sequence axis of each leaf, of arrays or their shapes.

    Rules are axes by path or pattern of paths; the first match counts. Without rules,
    `MAXTEXT_RULES` apply to a cache with MaxText's names; in other caches the sequence
    axis is the one of length `padded_length`. ValueError if an axis is ambiguous,
    missing, or of the wrong length.

    >>> cache = {"key": jnp.zeros((2, 8, 4)), "step": jnp.zeros(())}
    >>> find_sequence_axes(cache, 8)
    [LeafAxis(path='key', axis=1), LeafAxis(path='step', axis=None)]
    """
    leaves = leaf_paths(prefix)
    if not leaves:
        raise ValueError("the prefix has no leaves; it must have at least one array.")
    if rules is None and any("cached_prefill_" in path for path, _ in leaves):
        rules = MAXTEXT_RULES
    if rules is not None:
        axes = [_by_rules(path, leaf, rules) for path, leaf in leaves]
    elif padded_length is not None:
        axes = [_by_length(path, leaf, padded_length) for path, leaf in leaves]
    else:
        raise ValueError(
            "padded_length=None and no known names: pass sequence_axes, such as "
            f"{{{leaves[0][0]!r}: 1}}."
        )
    lengths = {
        path: leaf.shape[axis.axis]
        for (path, leaf), axis in zip(leaves, axes, strict=True)
        if axis.axis is not None
    }
    if not lengths:
        raise ValueError(
            f"no leaf of {[path for path, _ in leaves]} has a sequence axis"
            + (f" of {padded_length=}" if rules is None else "")
            + "; pass sequence_axes."
        )
    expected = padded_length or next(iter(lengths.values()))
    for path, length in lengths.items():
        if length != expected:
            raise ValueError(
                f"{path!r} has {length} along its sequence axis, not {expected}: it is "
                "not a cache of tokens (a recurrent state cannot be cut into blocks), "
                "or the axis in sequence_axes is wrong."
            )
    return axes


def compare_shapes(shorter: PyTree, longer: PyTree) -> dict[str, int | None]:
    """Return rules for `find_sequence_axes` from two caches of different lengths.

    Pass caches of one model, or their shapes (`jax.eval_shape`). ValueError if they
    differ in structure, in the number of axes, in several axes of a leaf, or not at
    all.

    >>> short, long = jnp.zeros((2, 8, 8)), jnp.zeros((2, 8, 16))
    >>> compare_shapes([short], [long])
    {'0': 2}
    """
    pairs = leaf_paths(shorter), leaf_paths(longer)
    if [path for path, _ in pairs[0]] != [path for path, _ in pairs[1]]:
        raise ValueError("the two caches must have the same structure.")
    rules: dict[str, int | None] = {}
    for (path, a), (_, b) in zip(*pairs, strict=True):
        if len(a.shape) != len(b.shape):
            raise ValueError(
                f"{path!r} is {a.shape} and {b.shape}; it must have the same axes."
            )
        sizes = zip(a.shape, b.shape, strict=True)
        differing = [axis for axis, (x, y) in enumerate(sizes) if x != y]
        if len(differing) > 1:
            raise ValueError(
                f"{path!r} is {a.shape} and {b.shape}: the axes {differing} differ, so "
                "the sequence axis is not clear; pass sequence_axes."
            )
        rules[path] = differing[0] if differing else None
    if all(axis is None for axis in rules.values()):
        raise ValueError("the two caches have the same shapes; lengths must differ.")
    return rules


def cut(array: jax.Array, axis: int, block_size: int, num_blocks: int) -> jax.Array:
    """Cut ``[..., tokens, ...]`` into ``[..., num_blocks, block_size, ...]``.

    Tokens beyond these blocks are dropped; missing tokens are zero. May be traced.

    >>> cut(jnp.arange(5), 0, 2, 3).tolist()
    [[0, 1], [2, 3], [4, 0]]
    """
    array = _resize(array, axis, num_blocks * block_size)
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    return array.reshape(*before, num_blocks, block_size, *after)


def join(blocks: jax.Array, axis: int, length: int) -> jax.Array:
    """Join ``[..., num_blocks, block_size, ...]`` into ``[..., length, ...]``.

    Missing tokens are zero. May be traced.

    >>> join(jnp.array([[0, 1], [2, 3]]), 0, 5).tolist()
    [0, 1, 2, 3, 0]
    """
    before, after = blocks.shape[:axis], blocks.shape[axis + 2 :]
    num_tokens = blocks.shape[axis] * blocks.shape[axis + 1]
    return _resize(blocks.reshape(*before, num_tokens, *after), axis, length)


def _resize(array: jax.Array, axis: int, length: int) -> jax.Array:
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = 0, length - array.shape[axis], 0  # Negative to drop tokens.
    return jax.lax.pad(array, jnp.zeros((), array.dtype), padding)


def _by_rules(path: str, leaf: Any, rules: AxisRules) -> LeafAxis:
    ndim = len(leaf.shape)
    for pattern, axis in rules.items():
        if path != pattern and not fnmatch.fnmatchcase(path, pattern):
            continue
        if axis is None:
            return LeafAxis(path, None)
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"axis {axis} of {pattern!r} in sequence_axes must be in "
                f"[{-ndim}, {ndim}): {path!r} is {list(leaf.shape)}."
            )
        return LeafAxis(path, axis % ndim)
    raise ValueError(
        f"no pattern of sequence_axes matches {path!r}, {list(leaf.shape)}; add its "
        "axis, or None if it does not depend on the prompt."
    )


def _by_length(path: str, leaf: Any, length: int) -> LeafAxis:
    axes = [axis for axis, size in enumerate(leaf.shape) if size == length]
    if len(axes) > 1:
        raise ValueError(
            f"the axes {axes} of {path!r}, {list(leaf.shape)}, are all {length} long, "
            "so the sequence axis is not clear; pass sequence_axes, such as "
            f"{{{path!r}: {axes[0]}}}."
        )
    return LeafAxis(path, axes[0] if axes else None)
