"""Which of the requested cases fit this machine, and the block ids of transfers."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import size_text
from jaxkv.tools.bench.transfer.records import Case, TransferConfig

BLOCK_ROW_BYTES = 512
"""Keys and values of one token in one layer: bfloat16[2, 128]."""

_DEFAULT_WORKING_SET_BYTES = 256 << 20
_MEMORY_SHARE = 0.8  # Of the available memory; the rest is a reserve.
# A prompt of 2,048 tokens in blocks of 16. Runs are shorter if 16 would not fit.
_MEAN_RUN = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cases to measure.

    Attributes:
        cases: Smaller blocks first, then smaller sizes.
        working_set_bytes: Bytes of the pool, and of the host memory of each design.
        left_out: Cases that are left out and why, a line each.
    """

    cases: tuple[Case, ...]
    working_set_bytes: int
    left_out: tuple[str, ...]


def make_plan(
    config: TransferConfig, cache_bytes: int | None, memory_bytes: int | None
) -> Plan:
    """Choose the cases that can be measured.

    Args:
        config: The requested measurement.
        cache_bytes: Size of the last-level cache; None if unknown.
        memory_bytes: Available memory; None if unknown.

    Returns:
        The plan; without cases if nothing can be measured.

    Raises:
        ValueError: A block size cannot be divided into the pool's layers.
    """
    unit = config.num_layers * BLOCK_ROW_BYTES
    for block_bytes in config.block_sizes:
        if block_bytes % unit:
            raise ValueError(
                f"a block of {size_text(block_bytes)} must be a multiple of "
                f"{size_text(unit)}: {config.num_layers} layers of "
                f"{BLOCK_ROW_BYTES} bytes per token"
            )
    least = config.working_set_bytes or cache_bytes or _DEFAULT_WORKING_SET_BYTES
    left_out, sizes = [], []
    for size in sorted(set(config.sizes)):
        needed = memory_needed_bytes(config, max(least, size), size)
        if memory_bytes is not None and needed > _MEMORY_SHARE * memory_bytes:
            left_out.append(
                f"{size_text(size)}: it takes {needed / 2**30:.1f} GiB of memory, and "
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
    working_set = max([least, *sizes])
    return Plan(tuple(dict.fromkeys(cases)), working_set, tuple(left_out))


def memory_needed_bytes(
    config: TransferConfig, working_set_bytes: int, size_bytes: int
) -> int:
    """Estimate the memory that a measurement takes at its peak."""
    # The pool, each design's host memory and the two sides of the limit; buffers of the
    # other designs (found by measuring); programs.
    num_sets = 3 + len(config.designs)
    return num_sets * working_set_bytes + 6 * size_bytes + (1 << 29)


class Cycle:
    """Yields block ids in random order, all of them before any is repeated.

    So the blocks of a transfer are not in the CPU cache if all blocks together do not
    fit. Each cycle has another random order, the same in every process.

    Args:
        num_blocks: Ids are in [0, num_blocks).
        mean_run: Average length of ascending runs of ids. Cycles with equal
            `num_blocks` and `mean_run` have the same runs in different orders.
        seed: Seed of the order.
    """

    def __init__(self, num_blocks: int, mean_run: int, seed: int):
        self._rng = np.random.default_rng(seed)
        lengths = np.random.default_rng(0).integers(1, 2 * mean_run, num_blocks)
        ends = np.cumsum(lengths)
        cuts = ends[ends < num_blocks]
        self._runs = np.split(np.arange(num_blocks, dtype=np.int32), cuts)
        self._left = np.zeros(0, np.int32)

    def next(self, num: int) -> NDArray[np.int32]:
        """Return the next ids.

        Args:
            num: Number of ids, at most `num_blocks`.

        Returns:
            i32[num]. Distinct.
        """
        if len(self._left) < num:
            order = self._rng.permutation(len(self._runs))
            self._left = np.concatenate([self._runs[i] for i in order])
        taken, self._left = self._left[:num], self._left[num:]
        return taken


def device_cycle(num_blocks: int, seed: int) -> Cycle:
    """Make device ids as from a pool that has served for a while: without runs."""
    return Cycle(num_blocks, 1, seed)


def host_cycle(num_blocks: int, mean_run: int | None, seed: int) -> Cycle:
    """Make host ids as from a full cache, for saves or for loads.

    A cache evicts and finds blocks that were saved together: those of a request. So
    saves and loads have the same runs, in different orders.

    Args:
        num_blocks: Ids are in [0, num_blocks).
        mean_run: Average blocks of a run; None for the default.
        seed: Seed of the order.
    """
    if mean_run is None:
        mean_run = max(1, min(_MEAN_RUN, num_blocks // 16))
    return Cycle(num_blocks, mean_run, seed)
