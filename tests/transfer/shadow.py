"""A NumPy model of a pool and its host blocks, which engines must agree with."""

import jax
import jax.numpy as jnp
import numpy as np


def random_array(rng, shape, dtype):
    """Random bits; floats include NaNs and infinities."""
    dtype = jnp.dtype(dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return raw.view(dtype)


def bits(array):
    """Copy the bytes of an array, since a view would stop its donation."""
    array = np.ascontiguousarray(np.array(array))
    return array.view(np.uint8)


def to_device(arrays):
    """A pool in its own memory: NumPy's could not be donated."""
    return jax.tree.map(lambda array: jax.device_put(jnp.array(array)), arrays)


class Shadow:
    """What a pool and its host blocks must hold, bit for bit.

    Attributes:
        leaves: The pool's leaves. Each has its blocks along its first axis here.
        host: Host block id -> its device blocks, each one array a leaf. A device
            block that was not saved (-1) is None: it may hold anything.
    """

    def __init__(self, pool, block_axis=0):
        """Start as a copy of `pool`, a tree of NumPy arrays."""
        axes = jax.tree.leaves(jax.tree.broadcast(block_axis, pool))
        self.axes = axes
        self.leaves = [
            np.moveaxis(leaf.copy(), axis, 0)
            for leaf, axis in zip(jax.tree.leaves(pool), axes, strict=True)
        ]
        self.host = {}

    def blocks(self, device_id):
        return [leaf[device_id].copy() for leaf in self.leaves]

    def save(self, device_ids, host_ids):
        for row, host_id in zip(device_ids, host_ids, strict=True):
            ids = np.atleast_1d(row)
            self.host[int(host_id)] = [None if d < 0 else self.blocks(d) for d in ids]

    def load(self, host_ids, device_ids):
        for host_id, row in zip(host_ids, device_ids, strict=True):
            held = self.host[int(host_id)]
            for device_id, blocks in zip(np.atleast_1d(row), held, strict=True):
                if device_id < 0:
                    continue
                assert blocks is not None, f"no bytes in a part of {host_id}"
                for leaf, block in zip(self.leaves, blocks, strict=True):
                    leaf[device_id] = block

    def check(self, pool, unknown=()):
        """Compare all blocks but the `unknown` with those of `pool`."""
        known = np.setdiff1d(np.arange(len(self.leaves[0])), list(unknown))
        found = jax.tree.leaves(pool)
        for mine, leaf, axis in zip(self.leaves, found, self.axes, strict=True):
            its = np.moveaxis(np.array(leaf), axis, 0)
            assert its.dtype == mine.dtype
            wrong = (bits(its[known]) != bits(mine[known])).reshape(len(known), -1)
            assert not wrong.any(), f"blocks {known[wrong.any(axis=1)]} differ"
