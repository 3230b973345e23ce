"""A small serving engine: continuous batching and chunked prefill over a paged pool.

It plays the part that vLLM, MaxText or JetStream plays in production, so that jaxkv is
seen, and tested, where it works. A step computes one chunk of one prompt, and one
token of every request that is past its prompt; what the offload scheduler wants moved
is on its way meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal

from jaxkv.batches import buckets
from jaxkv.blocks import DeviceBlockPool
from jaxkv.connector import SchedulerOutput
from jaxkv.demo.allocation import most_blocks
from jaxkv.demo.batcher import Batcher
from jaxkv.demo.model import ModelConfig, init_pool
from jaxkv.demo.request import EngineRequest, Phase
from jaxkv.demo.runner import Runner
from jaxkv.demo.steps import Steps
from jaxkv.hashing import KeyChain, Namespace
from jaxkv.scheduler import OffloadScheduler
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search import find_cached_prefix
from jaxkv.transfer import TransferEngine
from jaxkv.types import KEY_BYTES
from jaxkv.worker import OffloadWorker

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
        offload_mode: When blocks are stored; see `OffloadRules.mode`.
        chunk_sizes: Tokens that a prefill step computes: the smallest that is enough,
            or the largest. In ascending order.
    """

    block_size: int
    device_blocks: int
    host_blocks: int
    concurrency: int
    max_seq_tokens: int
    weights_epoch: str
    cache_policy: str = "lru"
    offload_mode: Literal["eager", "lazy"] = "eager"
    chunk_sizes: tuple[int, ...] = (128, 256)


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
        self._groups = steps.config.groups(config.block_size)
        if config.host_blocks:
            self.offload = OffloadScheduler(
                self._groups,
                config.host_blocks,
                config.cache_policy,
                rules=OffloadRules(
                    config.offload_mode,
                    max_num_batched_tokens=config.chunk_sizes[-1] + config.concurrency,
                ),
            )
            self.offload.bind_device_block_pool(self.blocks)
            self.transfer = TransferEngine(self.pool, config.host_blocks)
            self.worker = OffloadWorker(self.transfer)
        self.peak_host_blocks = 0
        self._clock = clock
        self._namespace = _namespace(steps.config, config)
        self._runner = Runner(
            steps,
            config.block_size,
            config.concurrency,
            config.max_seq_tokens,
            config.chunk_sizes,
        )
        self._batcher = Batcher(
            self.blocks,
            self._groups,
            config.concurrency,
            config.chunk_sizes[-1],
            self.offload,
        )
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._batcher.has_work

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost its blocks to an older one."""
        return self._batcher.num_preemptions

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
        needed = most_blocks(self._groups, num_tokens, self.config.chunk_sizes[-1])
        usable = self.config.device_blocks - 1
        if needed > usable:
            raise ValueError(
                f"A request of {num_tokens} tokens needs {needed} blocks of the device "
                f"pool, which has {usable}."
            )
        chains = tuple(
            KeyChain(self._namespace, group=group) for group in range(len(self._groups))
        )
        for chain in chains:
            chain.extend(prompt)
        request = EngineRequest(
            self._num_submitted,
            tuple(prompt),
            max_new_tokens,
            self._clock(),
            chains,
            list(prompt),
            [[] for _ in self._groups],
        )
        self._num_submitted += 1
        self._batcher.add(request)
        return request

    def abort(self, request: EngineRequest) -> None:
        """Stop a request, wherever it is. One that is over already stays as it is."""
        self._batcher.end(request, Phase.ABORTED)

    def step(self) -> list[EngineRequest]:
        """Go on by one step.

        Returns:
            The requests that finished in it.
        """
        self._collect_transfers()
        batch = self._batcher.schedule()
        self._start_transfers(batch.output)
        self._batcher.release_unneeded(batch)
        for request in batch.prefill:
            self._prefill(request)
        if batch.decode:
            self._decode(batch.decode)
        computed = batch.prefill + batch.decode
        if not computed:
            time.sleep(_IDLE_S)  # all that there is waits for transfers
        self._batcher.cache_computed(computed)
        finished = [r for r in computed if len(r.generated) == r.max_new_tokens]
        for request in finished:
            self._batcher.end(request, Phase.FINISHED)
        return finished

    def drain(self) -> None:
        """Let the transfers in flight arrive; for the end of a run."""
        if self.offload is None or self.worker is None:
            return
        self._start_transfers(SchedulerOutput({}))
        self.pool, output = self.worker.drain(self.pool)
        self._batcher.note_transfers(self.offload.update_connector_output(output))

    def warm_up(self) -> None:
        """Compile all that a run needs. Touches no block but the null block."""
        max_blocks = -(-self.config.max_seq_tokens // self.config.block_size)
        # A step stores what one prompt has gained and a block of each other request; a
        # request gives up the blocks of all groups at once.
        per_step = max_blocks * len(self._groups) + self.config.concurrency
        if self.offload is not None and self.transfer is not None:
            self.offload.warm_up(max_blocks, per_step)
            self.transfer.warm_up()
        else:
            self.blocks.warm_up(per_step)
            for num in buckets(max_blocks):
                keys = [[bytes(KEY_BYTES)] * num for _ in self._groups]
                num_tokens = num * self.config.block_size
                find_cached_prefix(self.blocks, self._groups, keys, num_tokens)
        self.pool = self._runner.warm_up(self.pool)

    def _collect_transfers(self) -> None:
        """Take note of the loads and stores that arrived."""
        if self.offload is not None and self.worker is not None:
            output = self.worker.poll()
            self._batcher.note_transfers(self.offload.update_connector_output(output))

    def _start_transfers(self, output: SchedulerOutput) -> None:
        """Send out the stores and loads of this step, before the model runs."""
        if self.offload is None or self.worker is None:
            return
        meta = self.offload.build_connector_meta(output)
        held = self.offload.num_host_blocks_held
        self.peak_host_blocks = max(self.peak_host_blocks, held)
        self.pool = self.worker.start(meta, self.pool)

    def _prefill(self, request: EngineRequest) -> None:
        """Compute one chunk of a prompt, and the next token if it is the last."""
        num_tokens = len(self._runner.next_chunk(request))
        self.pool, token = self._runner.prefill(self.pool, request)
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            if not request.generated:
                request.first_token_s = self._clock()
            request.append(token)

    def _decode(self, requests: Sequence[EngineRequest]) -> None:
        """Compute the newest token of each request and add the next one."""
        self.pool, tokens = self._runner.decode(self.pool, requests)
        for request, token in zip(requests, tokens, strict=True):
            request.num_computed_tokens += 1
            request.append(token)


def _namespace(model: ModelConfig, config: EngineConfig) -> Namespace:
    """Name all that the bytes of a KV block depend on, besides its tokens."""
    return Namespace(
        model=f"jaxkv-demo {model}",
        weights_epoch=config.weights_epoch,
        kv_dtype="float32",
        layout="per layer: k, v of [block, head, dim]",
        block_size=config.block_size,
    )
