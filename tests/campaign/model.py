"""A paged pool, and a model that compares its reads and writes its results.

The comparison runs on the device, in the order of the steps: looking at the pool from
outside would wait for every transfer, and hide whatever goes wrong in flight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.campaign.truth import BLOCK_ROWS, ROW_BYTES

NUM_LAYERS, NUM_HEADS = 2, 4
BLOCK_AXIS = [{"k": 0, "v": 1}] * NUM_LAYERS
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES
READS, WRITES = 48, 24  # of a call; more take several calls


class WrongBytesError(AssertionError):
    """A block that was read had other bytes than its key says."""


def _split(raw):
    """uint8[n, BLOCK_ROWS, ROW_BYTES] as the leaves of n blocks."""
    layers = []
    for part in jnp.split(raw, NUM_LAYERS, axis=-1):
        num = len(raw)
        k = part[..., :8].reshape(num, BLOCK_ROWS, NUM_HEADS, 2)
        v = part[..., 8:].reshape(num, BLOCK_ROWS, 2, NUM_HEADS, 2)
        v = jax.lax.bitcast_convert_type(v, jnp.uint16)
        layers.append({"k": k, "v": v.transpose(2, 0, 1, 3)})
    return layers


def _run(pool, read_ids, read_rows, expected, write_ids, write_rows, values, late):
    mean = jnp.full((64, 64), 1 / 64, jnp.float32)
    mean = jax.lax.fori_loop(0, late, lambda _, x: x @ mean, mean)
    delay = (mean[0, 0] * 0).astype(jnp.int32)  # XLA does not know that it is 0.
    read_ids, write_ids = read_ids + delay, write_ids + delay
    wrong = jnp.zeros(len(read_ids), bool)
    after = []
    for leaves, should, new in zip(pool, _split(expected), _split(values), strict=True):
        k, v = leaves["k"], leaves["v"]
        differs = (k[read_ids] != should["k"]).any((2, 3))
        differs |= (v[:, read_ids] != should["v"]).any((0, 3))
        wrong |= (differs & read_rows).any(1)
        new_k = jnp.where(write_rows[..., None, None], new["k"], k[write_ids])
        new_v = jnp.where(write_rows[None, ..., None], new["v"], v[:, write_ids])
        k = k.at[write_ids].set(new_k, mode="drop")
        v = v.at[:, write_ids].set(new_v, mode="drop")
        after.append({"k": k, "v": v})
    return after, wrong


_run = jax.jit(_run, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def _scribble(leaves, ids, number):
    """Write numbers over blocks of the leaves of one device."""
    return [
        {
            "k": layer["k"].at[ids].set(number.astype(jnp.uint8), mode="drop"),
            "v": layer["v"].at[:, ids].set(number.astype(jnp.uint16), mode="drop"),
        }
        for layer in leaves
    ]


def scribble(pool, block_ids, number):
    """Write garbage over blocks, in this process alone; the pool is donated."""
    ids = np.full(-(-len(block_ids) // 16) * 16, 1 << 30, np.int32)
    ids[: len(block_ids)] = block_ids
    leaves, treedef = jax.tree.flatten(pool)
    by_device = zip(*(leaf.addressable_shards for leaf in leaves), strict=True)
    device_leaves = []
    for shards in by_device:
        local = jax.tree.unflatten(treedef, [shard.data for shard in shards])
        local = _scribble(local, ids, np.uint32(number))
        device_leaves.append(jax.tree.leaves(local))
    whole = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(row))
        for leaf, row in zip(leaves, zip(*device_leaves, strict=True), strict=True)
    ]
    return jax.tree.unflatten(treedef, whole)


def new_pool(num_blocks, number, mesh=None):
    """A pool of garbage, its heads spread over the devices of a mesh."""
    shapes = {"k": (num_blocks, BLOCK_ROWS, NUM_HEADS, 2)}
    shapes["v"] = (2, num_blocks, BLOCK_ROWS, NUM_HEADS)
    heads = {"k": 2, "v": 3}

    def make(name, dtype):
        array = np.full(shapes[name], number % 251, dtype)
        if mesh is None:
            return jnp.array(array)
        axes = ["heads" if axis == heads[name] else None for axis in range(4)]
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.make_array_from_callback(
            array.shape, place, lambda index: jnp.array(array[index])
        )

    return [
        {"k": make("k", np.uint8), "v": make("v", np.uint16)} for _ in range(NUM_LAYERS)
    ]


class Model:
    """Runs steps, and keeps what they found until `check`."""

    def __init__(self):
        self.num_reads = 0
        self._unchecked = []

    def run(self, pool, reads, writes, late):
        """Compare blocks, then write blocks; returns before that is done."""
        self.num_reads += len(reads)
        while True:
            now, reads = reads[:READS], reads[READS:]
            # All is read before anything is written.
            new = [] if reads else writes[:WRITES]
            writes = writes[len(new) :]
            inputs = *_pad(now, READS, 0), *_pad(new, WRITES, 1 << 30)
            pool, wrong = _run(pool, *inputs, np.int32(late))
            if now:
                self._unchecked.append((wrong, [read[3] for read in now]))
            if not (reads or writes):
                return pool

    def check(self):
        unchecked, self._unchecked = self._unchecked, []
        for wrong, names in unchecked:
            flags = np.asarray(wrong.addressable_data(0))[: len(names)]
            bad = [name for name, is_bad in zip(names, flags, strict=True) if is_bad]
            if bad:
                raise WrongBytesError("wrong bytes: " + "; ".join(bad))


def _pad(blocks, num, filler):
    """Lay blocks out as arrays of a fixed length: ids, rows, bytes."""
    ids = np.full(num, filler, np.int32)
    is_meant = np.zeros((num, BLOCK_ROWS), bool)
    values = np.zeros((num, BLOCK_ROWS, ROW_BYTES), np.uint8)
    for place, (block, rows, content, *_) in enumerate(blocks):
        ids[place], is_meant[place], values[place] = block, rows, content
    return ids, is_meant, values
