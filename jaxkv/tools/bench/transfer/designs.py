"""The transfer engine, and the machine's limit that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.bench.transfer.paged_pool import Pool
from jaxkv.transfer import TransferEngine, memory
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import Direction
from jaxkv.types import PyTree

Ids: TypeAlias = NDArray[np.int32]


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
    """On an accelerator: `device_put` of arrays between the two memories, in turn."""

    name = "device_put"

    def __init__(self, on_device: Sequence[PyTree]):
        self._device = jax.tree.map(lambda leaf: leaf.sharding, on_device[0])
        self._host = jax.tree.map(
            lambda place: place.with_memory_kind(memory.HOST_KIND), self._device
        )
        self._next = 0
        self._on_device: list[PyTree] = [*on_device]
        self._on_host = [jax.device_put(piece, self._host) for piece in on_device]
        memory.wait_for(self._on_host)

    def copy(self, direction: Direction) -> None:
        """Copy the next of the arrays."""
        index = self._next
        self._next = (self._next + 1) % len(self._on_device)
        source, target, place = (
            (self._on_device, self._on_host, self._host)
            if direction == "save"
            else (self._on_host, self._on_device, self._device)
        )
        target[index] = None  # So that its warm memory is reused.
        target[index] = jax.device_put(source[index], place)
        memory.wait_for(target[index])


def make_limit(working_set_bytes: int, num_bytes: int) -> CopyLimit | DevicePutLimit:
    """Make the limit of this machine for transfers of `num_bytes`."""
    if jax.devices()[0].platform == "cpu":
        return CopyLimit(working_set_bytes, num_bytes)
    zeros = jax.jit(lambda: jnp.zeros(num_bytes // 2, jnp.uint16))
    return DevicePutLimit([zeros() for _ in range(-(-working_set_bytes // num_bytes))])
