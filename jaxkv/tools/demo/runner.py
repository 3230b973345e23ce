"""Runs the model's steps on the engine's requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.demo.model import Pool
from jaxkv.tools.demo.request import EngineRequest
from jaxkv.tools.demo.steps import StepResult, Steps
from jaxkv.transfer import StepLoads
from jaxkv.types import NULL_BLOCK


class Runner:
    """Runs the model on requests, in few shapes. Does not allocate blocks."""

    def __init__(
        self,
        steps: Steps,
        block_size: int,
        concurrency: int,
        max_seq_tokens: int,
        chunk_sizes: Sequence[int],
    ) -> None:
        self._steps = steps
        self._block_size = block_size
        self._concurrency = concurrency
        self._chunk_sizes = chunk_sizes
        # Two sizes: each is compiled, but one for all would waste work.
        largest = -(-max_seq_tokens // block_size)
        self._table_sizes = sorted({-(-largest // 2), largest})

    def next_chunk(self, request: EngineRequest) -> list[int]:
        """Return the tokens that a request computes next: one after its prompt."""
        start = request.num_computed_tokens
        return request.tokens[start : start + self._chunk_sizes[-1]]

    def prefill(
        self, pool: Pool, request: EngineRequest, loads: StepLoads | None
    ) -> StepResult:
        """Compute the next chunk of a prompt; returns before that is done."""
        start = request.num_computed_tokens
        chunk = self.next_chunk(request)
        size = next(size for size in self._chunk_sizes if size >= len(chunk))
        tokens = np.zeros(size, np.int32)
        tokens[: len(chunk)] = chunk
        return self._steps.prefill_chunk(
            pool,
            tokens,
            np.int32(start),
            np.int32(len(chunk)),
            self._tables([request], start + len(chunk), rows=1)[:, 0],
            loads,
        )

    def decode(
        self, pool: Pool, requests: Sequence[EngineRequest]
    ) -> tuple[Pool, list[int]]:
        """Compute the newest token of each request, and wait for them."""
        rows = self._concurrency
        tokens = np.zeros(rows, np.int32)
        positions = np.full(rows, -1, np.int32)
        for row, request in enumerate(requests):
            tokens[row] = request.tokens[-1]
            positions[row] = request.num_computed_tokens
        tables = self._tables(requests, int(positions.max()) + 1, rows)
        result = self._steps.decode(pool, tokens, positions, tables)
        return result.pool, np.asarray(result.next_token).tolist()[: len(requests)]

    def warm_up(self, pool: Pool, loads: Sequence[StepLoads | None]) -> Pool:
        """Compile everything that a run needs. Writes only the null block."""
        rows = self._concurrency
        for size in self._table_sizes:
            tables = np.full((self._num_groups, rows, size), NULL_BLOCK, np.int32)
            for num_tokens, step_loads in itertools.product(self._chunk_sizes, loads):
                tokens = np.zeros(num_tokens, np.int32)
                pool = self._steps.prefill_chunk(
                    pool, tokens, np.int32(0), np.int32(1), tables[:, 0], step_loads
                ).pool
            pool = self._steps.decode(
                pool, np.zeros(rows, np.int32), np.full(rows, -1, np.int32), tables
            ).pool
        return pool

    @property
    def _num_groups(self) -> int:
        return len(self._steps.config.windows)

    def _tables(
        self, requests: Sequence[EngineRequest], num_tokens: int, rows: int
    ) -> NDArray[np.int32]:
        """Make block tables i32[C, rows, M], with M enough for `num_tokens`."""
        needed = -(-num_tokens // self._block_size)
        size = next(size for size in self._table_sizes if size >= needed)
        tables = np.full((self._num_groups, rows, size), NULL_BLOCK, np.int32)
        for row, request in enumerate(requests):
            for group, block_ids in enumerate(request.block_ids_by_group):
                block_ids = block_ids[:size]
                tables[group, row, : len(block_ids)] = block_ids
        return tables
