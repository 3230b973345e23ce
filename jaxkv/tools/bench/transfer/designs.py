"""The engine, two other designs, and the machine's limit, to be measured together.

The other designs have what the engine has, so that only designs are compared: the same
pool and ids, compiled programs, and on CPU the compiler options without which a scatter
into a bfloat16 pool costs as much as a copy of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.bench.transfer.paged_pool import Pool
from jaxkv.tools.bench.transfer.records import ENGINE, NUMPY, PER_BLOCK
from jaxkv.transfer import Completion, PoolLayout, TransferEngine, memory
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import Direction

Ids = NDArray[np.int32]

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


def make_design(
    name: str, pool: Pool, num_host_blocks: int, mode: Mode | None = None
) -> Design:
    """Make a design with its own host memory, by name.

    Args:
        name: One of `jaxkv.tools.bench.transfer.records.DESIGNS`.
        pool: For the layout; not kept.
        num_host_blocks: The size of its host memory.
        mode: The mode of the engine.
    """
    if name == ENGINE:
        return EngineDesign(pool, num_host_blocks, mode)
    rivals: dict[str, Callable[[Pool, int], Design]] = {
        PER_BLOCK: PerBlockDesign,
        NUMPY: NumpyDesign,
    }
    return rivals[name](pool, num_host_blocks)


class EngineDesign:
    """`TransferEngine`.

    Attributes:
        engine: The engine itself.
    """

    def __init__(self, pool: Pool, num_host_blocks: int, mode: Mode | None):
        self.engine = TransferEngine(pool, num_host_blocks, mode=mode)
        self.engine.warm_up()

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        """Copy blocks to the host."""
        self.engine.save(pool, device_ids, host_ids)
        self.drain(pool)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        """Copy blocks to the device."""
        pool, _ = self.engine.load(pool, host_ids, device_ids)
        return self.drain(pool)

    def drain(self, pool: Pool) -> Pool:
        """Wait for all transfers; raise the error of one that failed.

        Returns:
            The pool to continue with; after saves alone it is the same.
        """
        pool, completions = self.engine.drain(pool)
        raise_errors(completions)
        return pool


def raise_errors(completions: Iterable[Completion]) -> None:
    """Raise the error of a transfer that failed."""
    for completion in completions:
        if completion.error is not None:
            raise completion.error


class PerBlockDesign:
    """One pinned host array per block, all layers in it.

    Save: programs make one device array per block, one batched `device_put` copies the
    list. Load: one batched `device_put` of the list, then donated scatters.
    """

    def __init__(self, pool: Pool, num_host_blocks: int):
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
        """Copy blocks to the host."""
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
        """Copy blocks to the device."""
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

    def __init__(self, pool: Pool, num_host_blocks: int):
        device = PoolLayout.of(pool, 0).device
        options = memory.compiler_options(device.platform)
        self._device = jax.sharding.SingleDeviceSharding(device)
        shape = (num_host_blocks, len(pool), *pool[0].shape[1:])
        # NumPy copies rows of integers faster than those of a dtype it does not know.
        # Filled, so that no save pays for the first page faults.
        self._rows = np.full(shape, 1, np.uint16)
        self._dtype = pool[0].dtype
        self._gather = jax.jit(_gather_stacked, compiler_options=options)
        self._scatter = jax.jit(
            _scatter_stacked, donate_argnums=0, compiler_options=options
        )

    def save(self, pool: Pool, device_ids: Ids, host_ids: Ids) -> None:
        """Copy blocks to the host."""
        rows = np.asarray(self._gather(pool, device_ids))
        self._rows[host_ids] = rows.view(np.uint16)

    def load(self, pool: Pool, host_ids: Ids, device_ids: Ids) -> Pool:
        """Copy blocks to the device."""
        rows = self._rows[host_ids].view(self._dtype)
        staged = jax.device_put(rows, self._device)
        pool = self._scatter(pool, device_ids, staged)
        memory.wait_for(pool)
        return pool


def buckets(num_blocks: int) -> Iterator[slice]:
    """Cut a transfer into powers of two, the largest first.

    >>> [part.stop for part in buckets(70)]
    [64, 68, 70]
    """
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


class CopyLimit:
    """On CPU: `numpy.copyto` between two buffers that have been written before.

    Each call copies the next contiguous piece, around the buffer.
    """

    name = "np.copyto"

    def __init__(self, working_set_bytes: int, num_bytes: int):
        self._num_bytes = num_bytes
        self._num_pieces = -(-working_set_bytes // num_bytes)
        self._next = 0
        self._source = np.full(self._num_pieces * num_bytes, 1, np.uint8)
        self._target = np.full_like(self._source, 2)

    def copy(self, direction: Direction) -> None:
        """Copy the bytes once; both directions are the same here."""
        del direction
        start = self._next * self._num_bytes
        self._next = (self._next + 1) % self._num_pieces
        piece = slice(start, start + self._num_bytes)
        np.copyto(self._target[piece], self._source[piece])


class DevicePutLimit:
    """On an accelerator: `device_put` of one large array between the two memories."""

    name = "device_put"

    def __init__(self, working_set_bytes: int, num_bytes: int):
        device = jax.devices()[0]
        self._device = jax.sharding.SingleDeviceSharding(device)
        self._host = memory.host_sharding(device)
        self._num_pieces = -(-working_set_bytes // num_bytes)
        self._next = 0
        zeros = jax.jit(lambda: jnp.zeros(num_bytes // 2, jnp.uint16))
        self._on_device: list[jax.Array | None] = [
            zeros() for _ in range(self._num_pieces)
        ]
        self._on_host: list[jax.Array | None] = list(
            jax.device_put(self._on_device, self._host)
        )
        memory.wait_for(self._on_host)

    def copy(self, direction: Direction) -> None:
        """Copy the bytes once."""
        index = self._next
        self._next = (self._next + 1) % self._num_pieces
        source, target, sharding = (
            (self._on_device, self._on_host, self._host)
            if direction == "save"
            else (self._on_host, self._on_device, self._device)
        )
        target[index] = None  # So that its warm memory is reused.
        target[index] = jax.device_put(source[index], sharding)
        memory.wait_for(target[index])


def make_limit(working_set_bytes: int, num_bytes: int) -> CopyLimit | DevicePutLimit:
    """Make the limit of this machine for transfers of `num_bytes`."""
    cpu = jax.devices()[0].platform == "cpu"
    return (CopyLimit if cpu else DevicePutLimit)(working_set_bytes, num_bytes)
