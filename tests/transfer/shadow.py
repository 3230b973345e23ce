"""A NumPy model of a pool and its host blocks, which engines must agree with."""

import jax
import jax.numpy as jnp
import numpy as np


def random_array(rng, shape, dtype):
    """Random bits; floats include NaNs and infinities."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
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
    """The expected contents of a pool and its host blocks, bit for bit."""

    def __init__(self, pool, block_axis=0):
        """Start as a copy of `pool`, a tree of NumPy arrays."""
        axes = jax.tree.leaves(jax.tree.broadcast(block_axis, pool))
        self.axes = axes
        self.leaves = [  # The blocks along the first axis of each.
            np.moveaxis(leaf.copy(), axis, 0)
            for leaf, axis in zip(jax.tree.leaves(pool), axes, strict=True)
        ]
        # Host block id -> its device blocks, an array a leaf; None if not saved.
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

    def copy(self, source_ids, target_ids):
        for leaf in self.leaves:
            leaf[target_ids] = leaf[source_ids]

    def check(self, pool):
        leaves = jax.tree.leaves(pool)
        for mine, leaf, axis in zip(self.leaves, leaves, self.axes, strict=True):
            its = np.moveaxis(np.array(leaf), axis, 0)
            assert its.dtype == mine.dtype
            wrong = (bits(its) != bits(mine)).reshape(len(mine), -1).any(axis=1)
            assert not wrong.any(), f"blocks {np.flatnonzero(wrong)} differ"


def exercise(moves, shadow, rng, rounds=4):
    """Save, load elsewhere and copy random blocks; compare every byte each time."""
    engine, m = moves.engine, moves.engine.blocks_per_host_block
    num_rows = engine.num_device_blocks // m

    def random_rows(num):
        ids = rng.permutation(engine.num_device_blocks)[: num * m]
        return ids if m == 1 else ids.reshape(num, m)

    for _ in range(rounds):
        device_ids = random_rows(int(rng.integers(1, num_rows + 1)))
        host_ids = rng.permutation(engine.num_host_blocks)[: len(device_ids)]
        moves.save_now(device_ids, host_ids)
        shadow.save(device_ids, host_ids)
        # Some of these and of the earlier ones, one of them twice.
        host_ids = rng.permutation(sorted(shadow.host))[: num_rows - 1].tolist()
        device_ids = random_rows(len(host_ids) + 1)
        moves.load_now([*host_ids, host_ids[0]], device_ids)
        shadow.load([*host_ids, host_ids[0]], device_ids)
        ids = rng.permutation(engine.num_device_blocks)[[0, 0, 1, 2, 3, 4]]
        moves.pool = engine.copy(moves.pool, ids[:3], ids[3:])
        shadow.copy(ids[:3], ids[3:])
        shadow.check(moves.pool)
