"""Which of the requested cases fit this machine, and the block ids of transfers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.records import Case, TransferConfig
from jaxkv._util import size_text
from jaxkv.transfer import available_host_bytes

BLOCK_ROW_BYTES = 512
"""Keys and values of one token in one layer: bfloat16[2, 128]."""

_DEFAULT_WORKING_SET_BYTES = 256 << 20
_MEMORY_SHARE = 0.8  # The rest of the available memory is a reserve.
# A prompt of 2,048 tokens in blocks of 16. Runs are shorter if 16 would not fit.
_MEAN_RUN = 128


class Plan(NamedTuple):
    """The cases to measure, smaller blocks first, then smaller sizes."""

    cases: tuple[Case, ...]
    working_set_bytes: int  # of the pool, and of each design's host memory
    left_out: tuple[str, ...]  # a line for each case that cannot be measured


def make_plan(
    config: TransferConfig, cache_bytes: int | None, memory_bytes: int | None
) -> Plan:
    """Choose the cases that fit the last-level cache and the available memory.

    Raises ValueError if a block size cannot be divided into the pool's layers.
    """
    unit = config.num_layers * BLOCK_ROW_BYTES
    for block_bytes in config.block_sizes:
        if block_bytes % unit:
            raise ValueError(
                f"a block of {size_text(block_bytes)} must be a multiple of "
                f"{size_text(unit)}: {config.num_layers} layers of "
                f"{BLOCK_ROW_BYTES} bytes per token"
            )
    min_bytes = config.working_set_bytes or cache_bytes or _DEFAULT_WORKING_SET_BYTES
    left_out, sizes = [], []
    for size in sorted(set(config.sizes)):
        needed = memory_needed_bytes(config, max(min_bytes, size), size)
        if memory_bytes is not None and needed > _MEMORY_SHARE * memory_bytes:
            left_out.append(
                f"{size_text(size)}: needs {needed / 2**30:.1f} GiB of memory, but "
                f"{memory_bytes / 2**30:.1f} GiB are available"
            )
        else:
            sizes.append(size)
    cases = []
    for block_bytes in sorted(set(config.block_sizes)):
        for size in sizes:
            if size < block_bytes:
                left_out.append(
                    f"{size_text(size)} in blocks of {size_text(block_bytes)}: "
                    "less than one block"
                )
            else:
                cases.append(Case(block_bytes, size // block_bytes))
    working_set = max([min_bytes, *sizes])
    return Plan(tuple(dict.fromkeys(cases)), working_set, tuple(left_out))


def available_memory_bytes() -> int | None:
    """Return the available memory of host or device, the smaller; None if unknown."""
    host = available_host_bytes()
    limits = [] if host is None else [host.num_bytes]
    device = jax.devices()[0].memory_stats() or {}  # None on CPU.
    if "bytes_limit" in device:
        limits.append(device["bytes_limit"] - device.get("bytes_in_use", 0))
    return min(limits, default=None)


def memory_needed_bytes(
    config: TransferConfig, working_set_bytes: int, size_bytes: int
) -> int:
    """Estimate the peak memory of a measurement."""
    # The pool, each design's host memory and the two sides of the limit; buffers of the
    # designs (measured); programs.
    num_sets = 3 + len(config.designs)
    return num_sets * working_set_bytes + 6 * size_bytes + (1 << 29)


class Cycle:
    """Yields block ids in random order, all of them before any is repeated.

    So the blocks of a transfer are not in the CPU cache if all blocks together do not
    fit. Ids come in ascending runs of `mean_run` on average: cycles with equal
    `num_blocks` and `mean_run` have the same runs, in an order that depends on `seed`.
    """

    def __init__(self, num_blocks: int, mean_run: int, seed: int):
        self._rng = np.random.default_rng(seed)
        lengths = np.random.default_rng(0).integers(1, 2 * mean_run, num_blocks)
        ends = np.cumsum(lengths)
        cuts = ends[ends < num_blocks]
        self._runs = np.split(np.arange(num_blocks, dtype=np.int32), cuts)
        self._rest = np.zeros(0, np.int32)

    def next(self, num: int) -> NDArray[np.int32]:
        """Return the next ids, i32[num], all distinct; at most `num_blocks`."""
        if len(self._rest) < num:
            order = self._rng.permutation(len(self._runs))
            self._rest = np.concatenate([self._runs[i] for i in order])
        ids, self._rest = self._rest[:num], self._rest[num:]
        return ids


def device_cycle(num_blocks: int, seed: int) -> Cycle:
    """Make device ids as a pool allocates them after a while: without runs."""
    return Cycle(num_blocks, 1, seed)


def host_cycle(num_blocks: int, mean_run: int | None, seed: int) -> Cycle:
    """Make host ids like those that a full cache evicts, and finds.

    It evicts and finds the blocks of a request, which were saved together. So saves
    and loads have the same runs, in different orders.
    """
    if mean_run is None:
        mean_run = max(1, min(_MEAN_RUN, num_blocks // 16))
    return Cycle(num_blocks, mean_run, seed)
