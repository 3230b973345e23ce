"""The bytes of the host tier: extents in pinned memory, allocated once."""

from __future__ import annotations

import jax

from jaxkv.transfer import memory
from jaxkv.transfer.extents import Extent
from jaxkv.transfer.kernels import Mover
from jaxkv.transfer.limits import host_memory_error

_ALLOCATION_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


class HostMemory:
    """A fixed number of extents.

    All are allocated and touched at construction and then recycled, since fresh pages
    are the slowest part of a copy: in the mode ``"fused"`` a program writes into the
    memory of an extent that is free, in the mode ``"staged"`` that memory goes back to
    XLA's allocator, which hands it out again for the next extent, all being alike.
    """

    def __init__(self, mover: Mover, num_extents: int):
        """Allocate `num_extents` extents.

        Raises:
            MemoryError: There is not that much pinned memory.
        """
        self._new_extent = mover.new_extent()
        self._extent_bytes = mover.extents.num_bytes
        self._platform = mover.extents.pool.device.platform
        self._recycles = mover.mode == "fused"
        self._extents: list[Extent | None] = [None] * num_extents
        try:
            for index in range(num_extents):
                self._extents[index] = self._new_extent()
            # Ready means written to, so that no save pays for the first page faults.
            memory.wait_for(self._extents)
        except _ALLOCATION_ERRORS as error:
            self._explain(error, num_extents)
            raise
        if not self._recycles:
            self._extents = [None] * num_extents

    def get(self, index: int) -> Extent:
        """Give an extent to read."""
        extent = self._extents[index]
        assert extent is not None, f"extent {index} has no memory"
        return extent

    def take(self, index: int) -> Extent | None:
        """Give away the memory of an extent; `put` must bring its replacement.

        Returns:
            The memory to write to; None in the mode ``"staged"``.

        Raises:
            MemoryError: Memory was lost to a failed save and cannot be replaced.
        """
        extent, self._extents[index] = self._extents[index], None
        if not self._recycles:
            return None
        if extent is None:
            try:
                extent = self._new_extent()
            except _ALLOCATION_ERRORS as error:
                self._explain(error, 1)
                raise
        return extent

    def put(self, index: int, extent: Extent | None) -> None:
        """Replace an extent: its bytes may be on their way; None if they failed."""
        self._extents[index] = extent

    def _explain(self, error: Exception, num_extents: int) -> None:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise host_memory_error(
                num_extents * self._extent_bytes, self._platform
            ) from error
