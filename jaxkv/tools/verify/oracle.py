"""A NumPy model of a pool and its host blocks, and random traffic to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.verify.records import WrongError
from jaxkv.transfer import Completion, TransferEngine
from jaxkv.types import PyTree

Ids: TypeAlias = NDArray[np.int32]
_MAX_NAMED = 6


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Any:
    """Make an array of random bits, NaNs included.

    An array with room for all patterns of a type of one or two bytes has all.
    """
    kind = jnp.dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    size, bits = int(np.prod(shape)), 8 * kind.itemsize
    if bits <= 16 and size >= 1 << bits:
        patterns = np.arange(size) + int(rng.integers(1 << bits))
        return patterns.astype(f"u{kind.itemsize}").view(kind).reshape(shape)
    raw = rng.integers(0, 256, size * kind.itemsize, np.uint8)
    return raw.view(kind).reshape(shape)


def as_words(array: Any) -> NDArray[Any]:
    """Copy an array as unsigned integers; a view of the pool would stop donation."""
    copied = np.array(array)
    words: NDArray[Any] = copied.view(f"u{copied.dtype.itemsize}")
    return words


def to_device(arrays: PyTree, places: PyTree = None) -> PyTree:
    """Copy NumPy arrays to the device, or spread them; none shares NumPy's memory."""
    if places is None:
        return jax.tree.map(lambda array: jax.device_put(jnp.array(array)), arrays)

    def put(array: Any, place: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(
            array.shape, place, lambda index: jnp.array(array[index])
        )

    return jax.tree.map(put, arrays, places)


class Oracle:
    """The bytes that a pool and its host blocks must have."""

    def __init__(self, pool: PyTree, block_axis: PyTree = 0) -> None:
        named, _ = jax.tree.flatten_with_path(pool)
        self.num_bytes = 0  # Compared so far
        self._names = [f"pool{jax.tree_util.keystr(path)}" for path, _ in named]
        self.axes = jax.tree.leaves(jax.tree.broadcast(block_axis, pool))
        # The blocks of each leaf along its first axis.
        self.leaves = [
            np.moveaxis(np.array(leaf), axis, 0)
            for (_, leaf), axis in zip(named, self.axes, strict=True)
        ]
        # The device blocks that each host block holds, by leaf; None if not saved.
        self.host: dict[int, list[list[NDArray[Any]] | None]] = {}

    def save(self, device_ids: Ids, host_ids: Ids) -> None:
        """Copy device blocks to host blocks; rows of device ids may have -1."""
        for row, host_id in zip(device_ids, host_ids, strict=True):
            self.host[int(host_id)] = [
                None if block < 0 else [leaf[block].copy() for leaf in self.leaves]
                for block in np.atleast_1d(row)
            ]

    def load(self, host_ids: Ids, device_ids: Ids) -> None:
        for host_id, row in zip(host_ids, device_ids, strict=True):
            held = self.host[int(host_id)]
            for block, arrays in zip(np.atleast_1d(row), held, strict=True):
                if block >= 0 and arrays is not None:
                    for leaf, array in zip(self.leaves, arrays, strict=True):
                        leaf[block] = array

    def check(self, pool: PyTree, when: str) -> None:
        """Compare every bit on every device; WrongError names the leaf and the blocks.

        Replicas of a shard are compared one by one.
        """
        arrays = jax.tree.leaves(pool)
        for name, leaf, array, axis in zip(
            self._names, self.leaves, arrays, self.axes, strict=True
        ):
            whole = np.moveaxis(leaf, 0, axis)
            for shard in array.addressable_shards:
                got, right = as_words(shard.data), as_words(whole[shard.index])
                self.num_bytes += got.nbytes
                if not np.array_equal(got, right):
                    start = shard.index[axis].start or 0
                    text = _difference(
                        np.moveaxis(got, axis, 0), np.moveaxis(right, axis, 0), start
                    )
                    where = f" on {shard.device}" * (len(array.addressable_shards) > 1)
                    raise WrongError(f"{name} is wrong{where} {when}: {text}")


def _difference(got: NDArray[Any], right: NDArray[Any], start: int) -> str:
    """Describe which blocks differ, along the first axis, and the first value."""
    wrong = (got != right).reshape(len(got), -1)
    (blocks,) = np.nonzero(wrong.any(axis=1))
    first = blocks[0]
    at = int(np.nonzero(wrong[first])[0][0])
    names = ", ".join(str(start + block) for block in blocks[:_MAX_NAMED])
    rest = f" and {len(blocks) - _MAX_NAMED} more" * (len(blocks) > _MAX_NAMED)
    values = [f"{words[first].ravel()[at]:#x}" for words in (got, right)]
    return (
        f"blocks {names}{rest} of {len(got)}; of the first, {wrong[first].sum()} of "
        f"{wrong[first].size} elements, such as {values[0]} instead of {values[1]}"
    )


def run_to_end(engine: TransferEngine, pool: PyTree) -> PyTree:
    """Wait for one transfer, which must succeed; return the pool."""
    pool, done = engine.drain(pool)
    check_successful(done)
    if len(done) != 1:
        raise WrongError(f"{len(done)} transfers were reported, not 1")
    return pool


def check_successful(completions: Iterable[Completion]) -> None:
    """Refuse a failure, where nothing was made to fail."""
    for completion in completions:
        if completion.error is not None:
            raise WrongError(f"{completion.ticket} failed: {completion.error}")


def exercise(
    engine: TransferEngine,
    oracle: Oracle,
    pool: PyTree,
    rng: np.random.Generator,
    rounds: Iterable[int],
) -> tuple[PyTree, int, int]:
    """Save random blocks, load them elsewhere; compare every bit each round.

    Returns the pool, the number of rounds, and of the blocks that came back.
    """
    m, shards = engine.blocks_per_host_block, engine.num_shards
    device_ids = np.arange(engine.num_device_blocks, dtype=np.int32)
    host_ids = np.arange(engine.num_host_blocks, dtype=np.int32)
    max_rows = len(device_ids) // m
    num_rounds = num_blocks = 0

    def random_rows() -> Ids:
        """Order all device blocks, i32[n] or i32[n, m], each row in one shard."""
        rows = rng.permuted(device_ids.reshape(shards, -1), axis=1).reshape(-1, m)
        return rng.permutation(rows) if m > 1 else rng.permutation(rows)[:, 0]

    def shard_of(row: Any) -> int:
        return int(np.max(row)) * shards // len(device_ids)

    for number in rounds:
        rows = random_rows()[: int(rng.integers(1, max_rows + 1))]
        # Each shard has a part of the host blocks, as many as it can need.
        free = [
            list(ids) for ids in rng.permuted(host_ids.reshape(-1, shards), axis=0).T
        ]
        hosts = np.array([free[shard_of(row)].pop() for row in rows], np.int32)
        if m > 1:
            rows[0, rng.integers(m)] = -1  # A prefix may end within a host block.
        engine.save(pool, rows, hosts)
        pool = run_to_end(engine, pool)
        oracle.save(rows, hosts)
        sources: list[int] = []
        targets: list[Any] = []
        saved = rng.permutation([*oracle.host]).tolist()
        # Some blocks are not loaded, and must stay as they are.
        for row in random_rows()[: int(rng.integers(max_rows // 2, max_rows))]:
            of_shard = [host for host in saved if host % shards == shard_of(row)]
            if of_shard:
                # Blocks of this and of earlier rounds, and some of them twice.
                sources.append(of_shard[len(sources) % len(of_shard)])
                held = [blocks is not None for blocks in oracle.host[sources[-1]]]
                targets.append(np.where(held, row, -1) if m > 1 else row)
        target_ids = np.array(targets, np.int32)
        pool, _ = engine.load(pool, sources, target_ids)
        pool = run_to_end(engine, pool)
        oracle.load(np.array(sources), target_ids)
        oracle.check(pool, f"after round {number + 1}")
        num_rounds += 1
        num_blocks += int((target_ids >= 0).sum())
    return pool, num_rounds, num_blocks
