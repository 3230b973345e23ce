"""Detects changed weights of a runner of tpu-inference or sglang-jax."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import call, is_
from typing import Any

import jax

# Methods of tpu-inference's worker. Weights are written in them or between them,
# perhaps into the existing arrays.
PHASES = ("start_weight_update", "update_weights", "finish_weight_update", "raiden_h2d")

# Parts of the names of an adapter's arrays, which are replaced when one is loaded.
_ADAPTER_ARRAYS = ("lora_a_stacked", "lora_b_stacked")

_Refs = list[Callable[[], Any]]


class WeightsWatch:
    """Compares the arrays of a runner's weights by identity with the last ones.

    It keeps no array alive: an old one takes as much device memory as the new one. The
    runner and its `drafter` have `state` and `state_leaves`, or sglang-jax's
    `model_state_leaves`; a missing one is skipped.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._all: _Refs = []
        self._base: _Refs = []
        self._is_flat = True
        self.has_changed()

    def has_changed(self) -> bool:
        """Whether arrays of the base model were replaced since the last call."""
        trees = self._trees()
        values = [tree.values() if type(tree) is dict else tree for tree in trees]
        if self._is_flat and _are_same(self._all, values):
            return False  # 20 us for 800 arrays.
        leaves = list(chain.from_iterable(values))
        self._is_flat = jax.tree_util.all_leaves(leaves)
        if not self._is_flat:
            leaves = list(chain.from_iterable(map(_leaves, trees)))
            if _are_same(self._all, [leaves]):
                return False
        self._all = list(map(_ref, leaves))
        base = list(chain.from_iterable(map(_base_leaves, trees)))
        if _are_same(self._base, [base]):
            return False
        self._base = list(map(_ref, base))
        return True

    def _trees(self) -> list[Any]:
        """Return the trees that models read, and dicts of states, as dicts and tuples.

        A Flax state next to leaves is not read until the leaves are refreshed.
        """
        runner, trees = self._runner, []
        for owner in (runner, getattr(runner, "drafter", None)):
            state = getattr(owner, "state", None)
            leaves = getattr(owner, "model_state_leaves", None)
            leaves = getattr(owner, "state_leaves", leaves)
            if leaves is None:
                leaves = state  # An older runner's model reads the state.
            is_flat = type(leaves) in (dict, tuple, list)
            trees.append(leaves if is_flat else _leaves(leaves))
            if type(state) is dict and state is not leaves:
                trees.append(state)
        return trees


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = jax.tree.leaves(tree)
    return leaves


def _base_leaves(tree: Any) -> list[Any]:
    """Return the arrays, except adapters'."""
    if type(tree) is not dict:
        return _leaves(tree)
    return _leaves(
        {
            name: value
            for name, value in tree.items()
            if not any(part in str(name) for part in _ADAPTER_ARRAYS)
        }
    )


def _are_same(refs: _Refs, trees: Sequence[Collection[Any]]) -> bool:
    if len(refs) != sum(map(len, trees)):
        return False
    leaves = trees[0] if len(trees) == 1 else chain.from_iterable(trees)
    return all(map(is_, map(call, refs), leaves))


def _ref(leaf: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(leaf)
    except TypeError:  # A number, as in a runner without weights.
        return lambda: leaf


def worker_of(runner: Any) -> Any:
    """Find the worker that has a runner on the call stack; None without one."""
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if getattr(owner, "__dict__", {}).get("model_runner") is runner:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
