"""The transfer engine, and other ways to keep blocks in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.paged_pool import Pool
from benchmarks.transfer.records import ENGINE
from jaxkv.transfer import PoolLayout, TransferEngine, memory
from jaxkv.transfer.kernels import Mode

Ids: TypeAlias = NDArray[np.int32]

PER_BLOCK, NUMPY = "per-block", "numpy"

# The most blocks of one program of the per-block design, which cuts a transfer into
# powers of two, as sglang-jax and tpu-inference do. With 16 it is about as fast for
# blocks of 16 and 64 KiB (16 MiB, two CPU cores); with 256 it is faster for some and
# slower for others, and compiles for a minute.
_LARGEST_BUCKET = 64


class Design(Protocol):
    """A way to keep blocks in host memory. Both calls return when the copy is done."""

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        """Copy blocks to the host. `pool` is only read."""

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        """Copy blocks to the device. `pool` is donated; the new one is returned."""


MakeDesign: TypeAlias = Callable[[Pool, int, Mode | None], Design]
"""Makes a design for pools of this layout, with so many host blocks."""


class EngineDesign:
    """`TransferEngine`."""

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Mode | None):
        self.engine = TransferEngine(pool, num_host_blocks, mode=mode)
        self.engine.warm_up()

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        self.engine.save(pool, device_ids, host_ids)
        self.drain(pool)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        pool, _ = self.engine.load(pool, host_ids, device_ids)
        return self.drain(pool)

    def drain(self, pool: Pool) -> Pool:
        """Wait for all transfers; return the pool, or raise the error of one."""
        pool, completions = self.engine.drain(pool)
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        return pool


class PerBlockDesign:
    """One pinned host array per block, all layers in it.

    Save: programs make one device array per block, one batched `device_put` copies the
    list. Load: one batched `device_put` of the list, then donated scatters.
    """

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Any = None):
        device = PoolLayout.of(pool, 0).device
        options = memory.compiler_options(device.platform)
        self._blocks: list[jax.Array | None] = [None] * num_host_blocks
        self._device = jax.sharding.SingleDeviceSharding(device)
        self._host = memory.host_sharding(device)
        self._gather = jax.jit(_gather_each, compiler_options=options)
        self._scatter = jax.jit(
            _scatter_each, donate_argnums=0, compiler_options=options
        )

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        gathered: list[jax.Array] = []
        for chunk in buckets(len(device_ids)):
            gathered += self._gather(pool, device_ids[chunk])
        # Release the old memory first, so that the allocator can reuse it.
        for index in host_ids.tolist():
            self._blocks[index] = None
        blocks = jax.device_put(gathered, self._host)
        for index, block in zip(host_ids.tolist(), blocks, strict=True):
            self._blocks[index] = block
        memory.wait_for(blocks)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        blocks = [self._blocks[index] for index in host_ids.tolist()]
        staged = jax.device_put(blocks, self._device)
        for chunk in buckets(len(device_ids)):
            pool = self._scatter(pool, device_ids[chunk], staged[chunk])
        memory.wait_for(pool)
        return pool


class NumpyDesign:
    """One NumPy array ``[host blocks, layers, *block]``.

    Save: a gather on the device, `numpy.asarray`, a copy of the rows. Load: a copy of
    the rows, `device_put`, a donated scatter. Each number of blocks compiles a program,
    which only a benchmark with few numbers can afford.
    """

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Any = None):
        device = PoolLayout.of(pool, 0).device
        options = memory.compiler_options(device.platform)
        self._device = jax.sharding.SingleDeviceSharding(device)
        shape = (num_host_blocks, len(pool), *pool[0].shape[1:])
        # NumPy copies rows of integers faster than rows of a dtype it does not know.
        # Filled, so that no save pays for the first page faults.
        self._rows = np.full(shape, 1, np.uint16)
        self._dtype = pool[0].dtype
        self._gather = jax.jit(_gather_stacked, compiler_options=options)
        self._scatter = jax.jit(
            _scatter_stacked, donate_argnums=0, compiler_options=options
        )

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        rows = np.asarray(self._gather(pool, device_ids))
        self._rows[host_ids] = rows.view(np.uint16)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        rows = self._rows[host_ids].view(self._dtype)
        staged = jax.device_put(rows, self._device)
        pool = self._scatter(pool, device_ids, staged)
        memory.wait_for(pool)
        return pool


def buckets(num_blocks: int) -> Iterator[slice]:
    """Cut a transfer into powers of two, the largest first."""
    start, size = 0, _LARGEST_BUCKET
    while start < num_blocks:
        while size > num_blocks - start:
            size //= 2
        yield slice(start, start + size)
        start += size


def _gather_each(pool: Pool, ids: jax.Array) -> list[jax.Array]:
    rows = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return [jnp.stack([rows(leaf, ids[n]) for leaf in pool]) for n in range(len(ids))]


def _scatter_each(pool: Pool, ids: jax.Array, blocks: list[jax.Array]) -> Pool:
    return _scatter_stacked(pool, ids, jnp.stack(blocks))


def _gather_stacked(pool: Pool, ids: jax.Array) -> jax.Array:
    rows = [leaf.at[ids].get(mode="promise_in_bounds") for leaf in pool]
    return jnp.stack(rows, axis=1)


def _scatter_stacked(pool: Pool, ids: jax.Array, rows: jax.Array) -> Pool:
    return [
        leaf.at[ids].set(rows[:, layer], mode="drop", unique_indices=True)
        for layer, leaf in enumerate(pool)
    ]


DESIGNS: dict[str, MakeDesign] = {
    ENGINE: EngineDesign,
    PER_BLOCK: PerBlockDesign,
    NUMPY: NumpyDesign,
}
