"""A small serving engine: continuous batching and chunked prefill over a paged pool.

It takes the place of vLLM, MaxText or JetStream, to show and test jaxkv in an engine. A
step computes one chunk of one prompt, and one token of every request that is past its
prompt, while the transfers of the offload scheduler are in flight.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from jaxkv.keys.hashing import KeyChain, Namespace
from jaxkv.scheduling.protocol import SchedulerOutput
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.demo.allocation import max_blocks_held
from jaxkv.tools.demo.batcher import Batcher
from jaxkv.tools.demo.model import ModelConfig, init_pool
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.request import EngineRequest, Phase
from jaxkv.tools.demo.steps import Runner, Steps
from jaxkv.transfer import StepLoads, TransferEngine

_IDLE_S = 50e-6
# The timeout at the end for pending deletions in the store.
_CLOSE_S = 5.0
# Of a prefill that writes its loads itself: each more is more to compile, and the
# engine writes those that are left over.
_STEP_EXTENTS = 4


class Engine:
    """Generates greedily for many requests at a time, on one thread."""

    def __init__(
        self,
        steps: Steps,
        config: EngineConfig,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.config = config
        self.blocks = DeviceBlockPool(config.device_blocks)  # The device tier
        # The KV pool
        self.pool = init_pool(steps.config, config.device_blocks, config.block_size)
        # The offload scheduler; None without a host tier
        self.offload: OffloadScheduler | None = None
        # The transfer engine; None without a host tier
        self.transfer: TransferEngine | None = None
        # Runs the scheduler's transfers on the engine; None without a host tier
        self.worker: OffloadWorker | None = None
        self._groups = steps.config.groups(config.block_size)
        self._namespace = _namespace(steps.config, config)
        self._loads_in_step = False
        if config.offload is not None:
            self._loads_in_step = config.offload.load_in_step
            offload = dataclasses.replace(
                config.offload,
                max_num_batched_tokens=config.chunk_sizes[-1] + config.concurrency,
                layer_groups=len(self.pool) if self._loads_in_step else 1,
            )
            self.transfer = offload.make_engine(self.pool)
            self.worker = offload.make_worker(
                self.transfer, storage_namespace=repr(self._namespace).encode()
            )
            num_storage = 0
            if self.worker.storage is not None:
                num_bytes = cast(int, offload.storage_bytes)
                num_storage = self.worker.storage.num_blocks(num_bytes)
            self.offload = OffloadScheduler(
                self._groups,
                self.transfer.num_host_blocks,
                offload.cache_policy,
                rules=offload.make_rules(self.transfer.block_bytes),
                num_storage_blocks=num_storage,
                recorder=recorder,
            )
            self.offload.bind_device_block_pool(self.blocks)
        self.peak_host_blocks = 0  # Maximum number of host blocks in use
        self._runner = Runner(steps, config)
        self._batcher = Batcher(config, self._groups, self.blocks, self.offload)
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._batcher.has_work

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions."""
        return self._batcher.num_preemptions

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        remote_prefill: bool = False,
    ) -> EngineRequest:
        """Add a request to the queue.

        Returns the request, which is updated as it runs.
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
        needed = max_blocks_held(self._groups, num_tokens, self.config.chunk_sizes[-1])
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
            time.perf_counter(),
            chains,
            list(prompt),
            [[] for _ in self._groups],
            remote_prefill=remote_prefill,
        )
        self._num_submitted += 1
        self._batcher.add(request)
        return request

    def abort(self, request: EngineRequest) -> None:
        """Abort a request in any phase. One that is already over stays as it is."""
        self._batcher.end(request, Phase.ABORTED)

    def step(self) -> list[EngineRequest]:
        """Run one step.

        Returns the requests that finished.
        """
        self._collect_transfers()
        batch = self._batcher.schedule()
        self._start_transfers(batch.output)
        self._batcher.release_unneeded(batch)
        for request in batch.prefill:
            self._prefill(request)
        if not batch.prefill:
            self._take_loads(0)
        if batch.decode:
            self._decode(batch.decode)
        computed = batch.prefill + batch.decode
        if not computed:
            time.sleep(_IDLE_S)  # all requests wait for transfers
        self._batcher.cache_computed(computed)
        finished = [r for r in computed if len(r.generated) == r.max_new_tokens]
        for request in finished:
            self._batcher.end(request, Phase.FINISHED)
        return finished

    def drain(self) -> None:
        """Wait for the transfers in flight; for the end of a run."""
        if self.offload is None or self.worker is None:
            return
        self._start_transfers(SchedulerOutput({}))
        self.pool, output = self.worker.drain(self.pool)
        self._batcher.end_transfers(self.offload.update_connector_output(output))

    @property
    def has_storage(self) -> bool:
        """Whether there is a store behind the host tier."""
        return self.worker is not None and self.worker.storage is not None

    def list_storage(self) -> None:
        """Wait until the store has been listed, so that what it has can be found."""
        if self.worker is not None and self.offload is not None and self.has_storage:
            self.offload.wait_for_storage(self.worker, math.inf)

    def close(self) -> None:
        """Finish what is being written to the store, if there is one; let go of it."""
        if self.worker is None or self.worker.storage is None:
            return
        assert self.offload is not None
        while self.offload.has_pending_stores():
            self.step()
        self.worker.storage.close(_CLOSE_S)

    def warm_up(self) -> None:
        """Compile everything that a run needs. Writes only the null block.

        XLA compiles the model in a thread of its own, beside what Numba compiles.
        """
        loads: list[StepLoads | None] = [None]
        if self.transfer is not None and self._loads_in_step:
            loads = [self.transfer.idle_step_loads(num) for num in (0, _STEP_EXTENTS)]
        with ThreadPoolExecutor(max_workers=1) as beside:
            model = beside.submit(self._runner.warm_up, self.pool, loads)
            if self.offload is not None and self.transfer is not None:
                self.offload.warm_up()
                self.transfer.warm_up()
            else:
                self.blocks.warm_up()
                no_keys: list[list[bytes]] = [[] for _ in self._groups]
                find_cached_prefix(self.blocks, self._groups, no_keys, 0)
            self.pool = model.result()

    def _collect_transfers(self) -> None:
        """Process the loads and stores that completed."""
        if self.offload is not None and self.worker is not None:
            output = self.worker.poll()
            self._batcher.end_transfers(self.offload.update_connector_output(output))

    def _start_transfers(self, output: SchedulerOutput) -> None:
        """Start the stores and loads of this step, before the model runs."""
        if self.offload is None or self.worker is None:
            return
        meta = self.offload.build_connector_meta(output)
        held = self.offload.num_host_blocks_held
        self.peak_host_blocks = max(self.peak_host_blocks, held)
        self.pool = self.worker.start(meta, self.pool)

    def _take_loads(self, num_extents: int) -> StepLoads | None:
        """Return the loads that the next program on the pool writes, if any."""
        if self.worker is None or not self._loads_in_step:
            return None
        self.pool, loads = self.worker.take_step_loads(self.pool, num_extents)
        return loads

    def _prefill(self, request: EngineRequest) -> None:
        """Compute one chunk of a prompt, and the next token if it is the last."""
        num_tokens = len(self._runner.next_chunk(request))
        loads = self._take_loads(_STEP_EXTENTS)
        result = self._runner.prefill(self.pool, request, loads)
        self.pool = result.pool
        if loads is not None and self.worker is not None:
            self.worker.step_started(result.next_token)
        # Always waits, so that the time of a chunk is counted in its step.
        token = int(result.next_token)
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            if not request.generated:
                request.first_token_s = time.perf_counter()
            request.append(token)

    def _decode(self, requests: Sequence[EngineRequest]) -> None:
        """Compute the newest token of each request and add the next one."""
        self.pool, tokens = self._runner.decode(self.pool, requests)
        for request, token in zip(requests, tokens, strict=True):
            request.num_computed_tokens += 1
            request.append(token)


def _namespace(model: ModelConfig, config: EngineConfig) -> Namespace:
    """Return what the bytes of a KV block depend on, besides its tokens."""
    return Namespace(
        model=f"jaxkv-demo {model}",
        weights_epoch=config.weights_epoch,
        kv_dtype="float32",
        layout="per layer: k, v of [block, head, dim]",
        block_size=config.block_size,
    )
