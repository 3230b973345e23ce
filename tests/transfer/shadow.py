"""The NumPy model of `jaxkv verify`, and its random moves, for the tests' engines."""

import jax
import numpy as np

from jaxkv.tools.verify import oracle
from jaxkv.tools.verify.oracle import random_array, to_device

__all__ = ["Shadow", "bits", "exercise", "random_array", "to_device"]


def bits(array):
    """Copy the bytes of an array, since a view would stop its donation."""
    array = np.ascontiguousarray(np.array(array))
    return array.view(np.uint8)


class Shadow(oracle.Oracle):
    """The expected contents of a pool and its host blocks, bit for bit."""

    def check(self, pool, when="now"):
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(pool)]
        assert dtypes == [leaf.dtype for leaf in self.leaves]
        super().check(pool, when)


def exercise(moves, shadow, rng, rounds=4):
    """Save, load elsewhere and copy random blocks; compare every bit each round."""
    moves.pool, *_ = oracle.exercise(
        moves.engine, shadow, moves.pool, rng, range(rounds)
    )
