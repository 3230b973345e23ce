"""A small serving engine: continuous batching and chunked prefill over a paged pool.

It plays the part that vLLM, MaxText or JetStream plays in production, so that jaxkv is
seen, and tested, where it works. A step computes one chunk of one prompt, and one
token of every request that is past its prompt; what the offload scheduler wants moved
is on its way meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.blocks import NULL_BLOCK, DeviceBlockPool
from jaxkv.connector import SchedulerOutput
from jaxkv.demo.model import ModelConfig, init_pool
from jaxkv.demo.request import EngineRequest, Phase
from jaxkv.demo.steps import Steps
from jaxkv.hashing import KeyChain, Namespace
from jaxkv.scheduler import OffloadScheduler
from jaxkv.transfer import TransferEngine
from jaxkv.worker import OffloadWorker

CHUNK_SIZES = (128, 256)
"""Tokens that a prefill step computes: the smallest that is enough, or the largest."""

_IDLE_S = 50e-6


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The size of an engine.

    Attributes:
        block_size: Tokens in a KV block.
        device_blocks: KV blocks in the device pool, the null block among them.
        host_blocks: KV blocks in the host tier; 0 for an engine without one.
        concurrency: Requests that hold blocks at a time.
        max_seq_tokens: Longest request, prompt and answer.
        weights_epoch: Which weights the model has; part of every block's key.
        cache_policy: Which host blocks to give up when the host tier is full.
    """

    block_size: int
    device_blocks: int
    host_blocks: int
    concurrency: int
    max_seq_tokens: int
    weights_epoch: str
    cache_policy: str = "lru"


class Engine:
    """Generates greedily for many requests at a time, on one thread.

    Args:
        steps: The model.
        config: The size of the engine.
        clock: Seconds since some moment; only for `EngineRequest`'s times.

    Attributes:
        offload: Decides what moves between the tiers; None without a host tier.
        transfer: Moves the bytes; None without a host tier.
        worker: Tells the former what the latter did; None without a host tier.
        blocks: The device tier.
        pool: The KV itself.
        peak_host_blocks: Most host blocks that held something at a time.
    """

    def __init__(
        self,
        steps: Steps,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.blocks = DeviceBlockPool(config.device_blocks)
        self.pool = init_pool(steps.config, config.device_blocks, config.block_size)
        self.offload: OffloadScheduler | None = None
        self.transfer: TransferEngine | None = None
        self.worker: OffloadWorker | None = None
        if config.host_blocks:
            self.offload = OffloadScheduler(
                config.block_size, config.host_blocks, config.cache_policy
            )
            self.offload.bind_device_block_pool(self.blocks)
            self.transfer = TransferEngine(self.pool, config.host_blocks)
            self.worker = OffloadWorker(self.transfer)
        self.peak_host_blocks = 0
        self._steps = steps
        self._clock = clock
        self._namespace = _namespace(steps.config, config)
        self._waiting: deque[EngineRequest] = deque()
        self._active: dict[str, EngineRequest] = {}
        self._num_submitted = 0
        self._table_sizes = _table_sizes(config)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._active)

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> EngineRequest:
        """Add a request to the queue.

        Args:
            prompt: Its tokens, at least one.
            max_new_tokens: How many to generate, at least one.

        Returns:
            The request, which changes as it goes on.

        Raises:
            ValueError: If it is empty or could never fit; then it is not added.
        """
        num_tokens = len(prompt) + max_new_tokens
        if not prompt or max_new_tokens < 1:
            raise ValueError(
                f"{len(prompt)=} and {max_new_tokens=} must both be at least 1."
            )
        if num_tokens > self.config.max_seq_tokens:
            raise ValueError(
                f"A request of {num_tokens} tokens is longer than "
                f"max_seq_tokens={self.config.max_seq_tokens}."
            )
        needed, usable = self._num_blocks(num_tokens), self.config.device_blocks - 1
        if needed > usable:
            raise ValueError(
                f"A request of {num_tokens} tokens needs {needed} blocks of the device "
                f"pool, which has {usable}."
            )
        chain = KeyChain(self._namespace)
        chain.extend(prompt)
        request = EngineRequest(
            f"request-{self._num_submitted}",
            tuple(prompt),
            max_new_tokens,
            self._clock(),
            chain,
            list(prompt),
        )
        self._num_submitted += 1
        self._waiting.append(request)
        return request

    def abort(self, request: EngineRequest) -> None:
        """Stop a request, wherever it is. One that is over already stays as it is."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.phase = Phase.ABORTED
        elif request.request_id in self._active:
            self._retire(request, Phase.ABORTED)

    def step(self) -> list[EngineRequest]:
        """Go on by one step.

        Returns:
            The requests that finished in it.
        """
        self._collect_transfers()
        self._admit()
        running = [r for r in self._active.values() if r.phase is Phase.RUNNING]
        prefill = next((r for r in running if r.is_prefilling), None)
        decode = [r for r in running if not r.is_prefilling]
        self._start_transfers(prefill, decode)

        chunk: list[EngineRequest] = []
        if prefill is not None and self._prefill(prefill):
            chunk = [prefill]
        if decode:
            self._decode(decode)
        elif prefill is None:
            time.sleep(_IDLE_S)  # all that is active waits for a load
        finished = [
            r for r in (*chunk, *decode) if len(r.generated) == r.max_new_tokens
        ]
        for request in finished:
            self._retire(request, Phase.FINISHED)
        return finished

    def drain(self) -> None:
        """Let the transfers in flight arrive; for the end of a run."""
        if self.offload is None or self.worker is None:
            return
        self._start_transfers(None, [])
        self.pool, output = self.worker.drain(self.pool)
        self.offload.update_connector_output(output)

    def warm_up(self) -> None:
        """Compile all that a run needs. Touches no block but the null block."""
        if self.offload is not None and self.transfer is not None:
            self.offload.warm_up(self._num_blocks(self.config.max_seq_tokens))
            self.transfer.warm_up()
        rows = self.config.concurrency
        for size in self._table_sizes:
            tables = np.full((1, rows, size), NULL_BLOCK, np.int32)
            for num_tokens in CHUNK_SIZES:
                tokens = np.zeros(num_tokens, np.int32)
                self.pool = self._steps.prefill_chunk(
                    self.pool, tokens, np.int32(0), np.int32(1), tables[:, 0]
                ).pool
            self.pool = self._steps.decode(
                self.pool,
                np.zeros(rows, np.int32),
                np.full(rows, -1, np.int32),
                tables,
            ).pool

    def _collect_transfers(self) -> None:
        """Take note of the loads and stores that arrived."""
        if self.offload is None or self.worker is None:
            return
        output = self.worker.poll()
        self.offload.update_connector_output(output)
        for request_id in output.finished_recving:
            request = self._active.get(request_id)
            if request is not None:  # else it was aborted meanwhile
                request.num_computed_tokens += request.host_hit_tokens
                request.phase = Phase.RUNNING
                self._cache(request)
        for request_id in output.failed_recving:
            request = self._active.get(request_id)
            if request is not None:
                request.host_hit_tokens = 0  # computed instead
                request.phase = Phase.RUNNING

    def _admit(self) -> None:
        """Give blocks to waiting requests, in the order of arrival, while they fit."""
        while self._waiting and len(self._active) < self.config.concurrency:
            request = self._waiting[0]
            # The last token is computed in any case: its logits are needed.
            num_reusable = (request.num_tokens - 1) // self.config.block_size
            local = self.blocks.find_prefix(request.block_keys[:num_reusable])
            self.blocks.touch(local)
            total = self._num_blocks(len(request.prompt) + request.max_new_tokens)
            if total - len(local) > self.blocks.num_free:
                self.blocks.free(local[::-1])
                return
            self._waiting.popleft()
            self._active[request.request_id] = request
            num_local = len(local) * self.config.block_size
            num_external = 0
            if self.offload is not None:
                num_external, _ = self.offload.get_num_new_matched_tokens(
                    request, num_local
                )
            request.block_ids = local + self.blocks.allocate(total - len(local))
            request.num_computed_tokens = request.device_hit_tokens = num_local
            request.num_cached_blocks = len(local)
            request.host_hit_tokens = num_external
            request.phase = Phase.LOADING if num_external else Phase.RUNNING
            if self.offload is not None:
                self.offload.update_state_after_alloc(
                    request, request.block_ids, num_external
                )

    def _start_transfers(
        self, prefill: EngineRequest | None, decode: list[EngineRequest]
    ) -> None:
        """Send out the stores and loads of this step, before the model runs."""
        if self.offload is None or self.worker is None:
            return
        num_scheduled = {request.request_id: 1 for request in decode}
        if prefill is not None:
            num_scheduled[prefill.request_id] = len(_next_chunk(prefill))
        meta = self.offload.build_connector_meta(SchedulerOutput(num_scheduled))
        held = self.offload.num_host_blocks_held
        self.peak_host_blocks = max(self.peak_host_blocks, held)
        self.pool = self.worker.start(meta, self.pool)

    def _prefill(self, request: EngineRequest) -> bool:
        """Compute one chunk of a prompt; tell whether it was the last."""
        start = request.num_computed_tokens
        chunk = _next_chunk(request)
        size = next(size for size in CHUNK_SIZES if size >= len(chunk))
        tokens = np.zeros(size, np.int32)
        tokens[: len(chunk)] = chunk
        result = self._steps.prefill_chunk(
            self.pool,
            tokens,
            np.int32(start),
            np.int32(len(chunk)),
            self._tables([request], start + len(chunk), rows=1)[:, 0],
        )
        self.pool = result.pool
        is_last = start + len(chunk) == request.num_tokens
        # Waited for in any case, so that a chunk's time is counted where it is spent.
        token = int(result.next_token)
        request.num_computed_tokens += len(chunk)
        if is_last:
            request.first_token_s = self._clock()
            self._append(request, token)
        self._cache(request)
        return is_last

    def _decode(self, requests: list[EngineRequest]) -> None:
        """Compute the newest token of each request and add the next one."""
        rows = self.config.concurrency
        tokens = np.zeros(rows, np.int32)
        positions = np.full(rows, -1, np.int32)
        for row, request in enumerate(requests):
            tokens[row] = request.tokens[-1]
            positions[row] = request.num_computed_tokens
        tables = self._tables(requests, int(positions.max()) + 1, rows)
        result = self._steps.decode(self.pool, tokens, positions, tables)
        self.pool = result.pool
        next_tokens = np.asarray(result.next_token).tolist()
        for request, token in zip(requests, next_tokens, strict=False):
            request.num_computed_tokens += 1
            self._append(request, token)
            self._cache(request)

    def _append(self, request: EngineRequest, token: int) -> None:
        request.tokens.append(token)
        request.chain.extend([token])

    def _cache(self, request: EngineRequest) -> None:
        """Make a request's newly computed full blocks findable on the device."""
        first = request.num_cached_blocks
        last = request.num_computed_tokens // self.config.block_size
        self.blocks.cache(request.block_ids[first:last], request.block_keys[first:last])
        request.num_cached_blocks = max(first, last)

    def _retire(self, request: EngineRequest, phase: Phase) -> None:
        """Take a request's blocks away and let the offload scheduler know."""
        del self._active[request.request_id]
        request.phase = phase
        if self.offload is not None:
            self.offload.request_finished(request)
        # Tail first, so that the head of a prefix is given up last.
        self.blocks.free(request.block_ids[::-1])

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _tables(
        self, requests: Sequence[EngineRequest], num_tokens: int, rows: int
    ) -> NDArray[np.int32]:
        """Lay block tables out as i32[1, rows, M], with M enough for `num_tokens`."""
        needed = self._num_blocks(num_tokens)
        size = next(size for size in self._table_sizes if size >= needed)
        tables = np.full((1, rows, size), NULL_BLOCK, np.int32)
        for row, request in enumerate(requests):
            block_ids = request.block_ids[:size]
            tables[0, row, : len(block_ids)] = block_ids
        return tables


def _table_sizes(config: EngineConfig) -> list[int]:
    """List block table sizes: few, as each is compiled, yet not one for all."""
    largest = -(-config.max_seq_tokens // config.block_size)
    return sorted({-(-largest // 2), largest})


def _next_chunk(request: EngineRequest) -> list[int]:
    """Cut the tokens of a request's next prefill step."""
    start = request.num_computed_tokens
    return request.tokens[start : start + CHUNK_SIZES[-1]]


def _namespace(model: ModelConfig, config: EngineConfig) -> Namespace:
    """Name all that the bytes of a KV block depend on, besides its tokens."""
    return Namespace(
        model=f"jaxkv-demo {model}",
        weights_epoch=config.weights_epoch,
        kv_dtype="float32",
        layout="per layer: k, v of [block, head, dim]",
        block_size=config.block_size,
    )
