"""A small serving engine: continuous batching and chunked prefill over a paged pool.

It takes the place of vLLM, sglang-jax or MaxText, to show and test jaxkv in one. A
step computes one chunk of one prompt, and one token of every request that is past its
prompt, while the transfers of the offload scheduler are in flight.

Requests get blocks as they need them, in order of arrival. If the pool is short, and
stays so when the transfers in flight have ended, the running request that arrived last
is preempted, as in vLLM. It starts again later, with what is still cached on the device
or the host.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import NamedTuple, TypeAlias, cast

from jaxkv.keys.hashing import KeyChain, Namespace
from jaxkv.scheduling.protocol import ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import GroupSpec, SlidingWindow
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.demo.model import ModelConfig, init_pool
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import Runner, Steps
from jaxkv.transfer import TransferEngine
from jaxkv.types import NULL_BLOCK, BlockKey

_IDLE_S = 50e-6
# The timeout at the end for pending deletions in the store.
_CLOSE_S = 5.0

Tables: TypeAlias = list[list[int]]
"""Block ids for each group of layers; the null block where no later token attends."""


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclasses.dataclass(eq=False)
class EngineRequest:
    """A prompt and its generated tokens, with their state."""

    number: int  # Number of requests before it
    prompt: tuple[int, ...]
    max_new_tokens: int  # Tokens to generate
    arrival_s: float  # Time of its arrival, by `time.perf_counter`
    chains: tuple[KeyChain, ...]  # Keys of its full blocks, for each group of layers
    tokens: list[int]  # Prompt and generated tokens so far
    block_ids_by_group: Tables = dataclasses.field(default_factory=list)
    # Whether another engine computes the prompt; see `Request`
    remote_prefill: bool = False
    num_computed_tokens: int = 0  # Tokens whose KV is in the device pool
    num_loading_tokens: int = 0  # Tokens whose KV is being loaded from the host
    num_cached_blocks: int = 0  # Of each group, in the device's prefix cache
    device_hit_tokens: int = 0  # Prompt tokens found on the device on arrival
    host_hit_tokens: int = 0  # Prompt tokens then loaded from the host
    num_preemptions: int = 0
    load_failed: bool = False  # If so, offers are declined.
    first_token_s: float = 0.0  # Time of its first token
    phase: Phase = Phase.WAITING

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        return self.chains[0].keys

    @property
    def block_keys_by_group(self) -> Sequence[Sequence[BlockKey]]:
        return [chain.keys for chain in self.chains]

    @property
    def num_present_tokens(self) -> int:
        """Tokens whose KV is or will be there when the next one is computed."""
        return self.num_computed_tokens + self.num_loading_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def is_prefilling(self) -> bool:
        return self.num_tokens - self.num_computed_tokens > 1 or not self.generated

    def append(self, token: int) -> None:
        self.tokens.append(token)
        for chain in self.chains:
            chain.extend([token])


class Batch(NamedTuple):
    """The work of a step."""

    prefill: list[EngineRequest]  # The request whose next chunk is computed, or none
    decode: list[EngineRequest]  # The requests whose newest token is computed
    output: SchedulerOutput  # The same, for the offload scheduler


class Batcher:
    """Chooses the requests of each step, and allocates their device blocks."""

    def __init__(
        self,
        config: EngineConfig,
        groups: tuple[GroupSpec, ...],
        blocks: DeviceBlockPool,
        offload: OffloadScheduler | None,
    ) -> None:
        self.num_preemptions = 0
        self._config, self._groups = config, groups
        self._blocks, self._offload = blocks, offload
        # Both in order of arrival
        self._waiting: list[EngineRequest] = []
        self._active: list[EngineRequest] = []
        self._preempted_ids: list[str] = []  # Not yet reported to the offload scheduler

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    def end(self, request: EngineRequest, phase: Phase) -> None:
        """Free a request's blocks and notify the offload scheduler."""
        if request.phase in (Phase.FINISHED, Phase.ABORTED):
            return
        is_waiting = request.phase is Phase.WAITING
        (self._waiting if is_waiting else self._active).remove(request)
        request.phase = phase
        if self._offload is not None:
            self._offload.request_finished(request)
        self._free_all(request)

    def end_transfers(self, output: ConnectorOutput) -> None:
        """Resume the requests whose loads are over; others may have been aborted."""
        loading = {r.request_id: r for r in self._active if r.phase is Phase.LOADING}
        for request_id in output.finished_recving:
            if request := loading.get(request_id):
                self._end_load(request)
                request.phase = Phase.RUNNING
                self.cache_computed([request])
        for request_id in output.failed_recving:
            if request := loading.get(request_id):
                request.load_failed = True
                self._send_back(request)

    def schedule(self) -> Batch:
        """Choose the requests of the next step, and allocate their blocks."""
        planned, is_short = self._plan_running()
        batch = list(planned)
        # No request is admitted while another one waits for blocks.
        admitted = {} if is_short or self._preempted_ids else self._admit(planned)
        # Last, as a new block may take the place of one that is cached.
        added = {r: self._extend(r, end) for r, end in (planned | admitted).items()}
        for request in admitted:
            if self._offload is not None:
                self._offload.update_state_after_alloc(
                    request,
                    _flat_if_single(request.block_ids_by_group),
                    request.num_loading_tokens,
                )
            if request.phase is Phase.RUNNING:
                self._end_load(request)  # It arrives before the model runs.
                if not (request.is_prefilling and any(r.is_prefilling for r in batch)):
                    batch.append(request)
        preempted, self._preempted_ids = self._preempted_ids, []
        output = SchedulerOutput(
            {r.request_id: self._next_end(r) - r.num_computed_tokens for r in batch},
            {
                request.request_id: _flat_if_single(added[request])
                for request in planned
                if any(block != NULL_BLOCK for new in added[request] for block in new)
            },
            preempted,
        )
        prefill = [request for request in batch if request.is_prefilling]
        decode = [request for request in batch if not request.is_prefilling]
        return Batch(prefill, decode, output)

    def release_unneeded(self, requests: Iterable[EngineRequest]) -> None:
        """Free the blocks that no later token attends to."""
        unneeded: list[int] = []
        for request in requests:
            for group, table in zip(
                self._groups, request.block_ids_by_group, strict=True
            ):
                # Backwards from the window, to where an earlier call stopped.
                index = min(first_needed(group, request.num_present_tokens), len(table))
                while index and table[index - 1] != NULL_BLOCK:
                    index -= 1
                    unneeded.append(table[index])
                    table[index] = NULL_BLOCK
        if unneeded:
            self._blocks.free(unneeded)

    def cache_computed(self, requests: Sequence[EngineRequest]) -> None:
        """Make newly computed full blocks findable on the device."""
        cached: list[tuple[int, BlockKey]] = []
        for request in requests:
            first = request.num_cached_blocks
            last = request.num_computed_tokens // self._config.block_size
            tables = request.block_ids_by_group
            for table, keys in zip(tables, request.block_keys_by_group, strict=True):
                cached += zip(table[first:last], keys[first:last], strict=True)
            request.num_cached_blocks = max(first, last)
        if cached:
            block_ids, keys = zip(*cached, strict=True)
            self._blocks.cache(block_ids, keys)

    def _plan_running(self) -> tuple[dict[EngineRequest, int], bool]:
        """Choose the running requests of the next step, the oldest first.

        Returns the tokens that each needs blocks for, and whether a request has to wait
        until transfers, or requests that load, free blocks.
        """
        planned: dict[EngineRequest, int] = {}
        num_planned, has_prefill = 0, False
        running = deque(r for r in self._active if r.phase is Phase.RUNNING)
        while running:
            request = running.popleft()
            if request.is_prefilling and has_prefill:
                continue
            end = self._next_end(request)
            num_planned += self._num_missing(request, end)
            # Blocks that transfers alone hold are awaited, not taken from others.
            while num_planned > self._num_free_soon and running:
                self._send_back(running.pop(), is_preempted=True)
            if num_planned > self._blocks.num_free:
                return planned, True
            planned[request] = end
            has_prefill |= request.is_prefilling
        return planned, False

    @property
    def _num_free_soon(self) -> int:
        return self._blocks.num_free + self._blocks.num_pending_free

    def _admit(self, planned: dict[EngineRequest, int]) -> dict[EngineRequest, int]:
        """Admit waiting requests in order of arrival, while their first tokens fit.

        Returns the tokens that each needs blocks for.
        """
        admitted: dict[EngineRequest, int] = {}
        for request in tuple(self._waiting):
            if len(self._active) == self._config.concurrency:
                break
            self._take_cached_prefix(request)
            if not self._fits(request, planned | admitted):
                self._release(request)
                break
            if not self._query_host(request):
                self._release(request)
                continue
            if not self._fits(request, planned | admitted):
                self._release(request)
                if self._active or self._has_stores:
                    break
                # No other request will free blocks: an offer may hold device blocks to
                # copy from, and leave too few to copy to. Compute the tokens instead.
                self._take_cached_prefix(request)
            admitted[request] = self._first_end(request)
            if not request.num_preemptions:
                request.device_hit_tokens = request.num_computed_tokens
                request.host_hit_tokens = request.num_loading_tokens
            if request.phase is Phase.WAITING:
                request.phase = Phase.RUNNING
            self._waiting.remove(request)
            bisect.insort(self._active, request, key=attrgetter("number"))
        return admitted

    @property
    def _has_stores(self) -> bool:
        return self._offload is not None and self._offload.has_pending_stores()

    def _query_host(self, request: EngineRequest) -> bool:
        """Query the host for a request's prefix; return False to ask again later."""
        if self._offload is None:
            return True
        num_external, is_async = self._offload.get_num_new_matched_tokens(
            request, request.num_computed_tokens
        )
        if num_external is None:
            return False
        request.num_loading_tokens = 0 if request.load_failed else num_external
        if request.num_loading_tokens and is_async:
            request.phase = Phase.LOADING
        self.release_unneeded([request])
        return True

    def _fits(self, request: EngineRequest, planned: dict[EngineRequest, int]) -> bool:
        wanted = planned | {request: self._first_end(request)}
        num_blocks = sum(self._num_missing(r, end) for r, end in wanted.items())
        return num_blocks <= self._blocks.num_free

    def _first_end(self, request: EngineRequest) -> int:
        """Return for how many tokens a request needs blocks to be admitted."""
        is_loading = request.phase is Phase.LOADING
        return request.num_present_tokens if is_loading else self._next_end(request)

    def _next_end(self, request: EngineRequest) -> int:
        """Return how many tokens are computed after a request's next step."""
        max_chunk = self._config.chunk_sizes[-1]
        return min(request.num_present_tokens + max_chunk, request.num_tokens)

    def _take_cached_prefix(self, request: EngineRequest) -> None:
        """Hold the blocks of a request's prefix on the device."""
        # The last token is always computed: its logits are needed.
        keys, max_tokens = request.block_keys_by_group, request.num_tokens - 1
        request.num_computed_tokens, request.block_ids_by_group = find_cached_prefix(
            self._blocks, self._groups, keys, max_tokens
        )
        num_cached = request.num_computed_tokens // self._config.block_size
        request.num_cached_blocks = num_cached
        self._blocks.touch([b for ids in request.block_ids_by_group for b in ids])

    def _missing(self, request: EngineRequest, end: int) -> list[tuple[int, int]]:
        """Count the entries to add for `end` tokens: null and fresh ones, by group.

        The null ones come first.
        """
        missing = []
        for group, table in zip(self._groups, request.block_ids_by_group, strict=True):
            have, needed = len(table), -(-end // group.block_size)
            first = max(have, first_needed(group, request.num_present_tokens))
            missing.append((first - have, max(needed - first, 0)))
        return missing

    def _num_missing(self, request: EngineRequest, end: int) -> int:
        return sum(num_fresh for _, num_fresh in self._missing(request, end))

    def _extend(self, request: EngineRequest, end: int) -> Tables:
        """Allocate a request's blocks for `end` tokens; return the new entries."""
        missing = self._missing(request, end)
        fresh = iter(self._blocks.allocate(sum(num_fresh for _, num_fresh in missing)))
        entries = [
            [NULL_BLOCK] * num_null + [next(fresh) for _ in range(num_fresh)]
            for num_null, num_fresh in missing
        ]
        for table, new in zip(request.block_ids_by_group, entries, strict=True):
            table += new
        return entries

    def _end_load(self, request: EngineRequest) -> None:
        request.num_computed_tokens += request.num_loading_tokens
        request.num_loading_tokens = 0

    def _send_back(self, request: EngineRequest, is_preempted: bool = False) -> None:
        """Return a request to the queue, before later arrivals."""
        self._release(request)
        request.num_preemptions += is_preempted
        self.num_preemptions += is_preempted
        self._preempted_ids.append(request.request_id)
        self._active.remove(request)
        bisect.insort(self._waiting, request, key=attrgetter("number"))

    def _release(self, request: EngineRequest) -> None:
        if self._offload is not None:
            self._offload.request_preempted(request)
        self._free_all(request)
        request.num_computed_tokens = request.num_loading_tokens = 0
        request.phase = Phase.WAITING

    def _free_all(self, request: EngineRequest) -> None:
        """Free a request's blocks, tail first, so that its head is evicted last."""
        tables = request.block_ids_by_group
        longest = max(map(len, tables))
        indices = reversed(range(longest))
        self._blocks.free([t[i] for i in indices for t in tables if i < len(t)])
        for table in tables:
            table.clear()


class Engine:
    """Generates greedily for many requests at a time, on one thread."""

    def __init__(
        self, steps: Steps, config: EngineConfig, recorder: TraceRecorder | None = None
    ) -> None:
        self.config = config
        self.blocks = DeviceBlockPool(config.device_blocks)  # The device tier
        # The KV pool
        self.pool = init_pool(steps.config, config.device_blocks, config.block_size)
        # All None without a host tier
        self.offload: OffloadScheduler | None = None
        self.transfer: TransferEngine | None = None
        self.worker: OffloadWorker | None = None
        self._groups = steps.config.groups(config.block_size)
        self._namespace = _namespace(steps.config, config)
        if config.offload is not None:
            offload = dataclasses.replace(
                config.offload,
                max_num_batched_tokens=config.chunk_sizes[-1] + config.concurrency,
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
        return self._batcher.has_work

    @property
    def num_preemptions(self) -> int:
        return self._batcher.num_preemptions

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        remote_prefill: bool = False,
    ) -> EngineRequest:
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
        if self.offload is not None and self.worker is not None:
            output = self.offload.update_connector_output(self.worker.poll())
            self._batcher.end_transfers(output)
        batch = self._batcher.schedule()
        self._start_transfers(batch.output)
        computed = batch.prefill + batch.decode
        # The step's stores are planned; windows have moved on.
        self._batcher.release_unneeded(computed)
        for request in batch.prefill:
            self._prefill(request)
        if batch.decode:
            self._decode(batch.decode)
        if not computed:
            time.sleep(_IDLE_S)  # All requests wait for transfers.
        self._batcher.cache_computed(computed)
        finished = [r for r in computed if len(r.generated) == r.max_new_tokens]
        for request in finished:
            self._batcher.end(request, Phase.FINISHED)
        return finished

    def drain(self) -> None:
        if self.offload is None or self.worker is None:
            return
        self._start_transfers(SchedulerOutput({}))
        self.pool, output = self.worker.drain(self.pool)
        self._batcher.end_transfers(self.offload.update_connector_output(output))

    @property
    def has_storage(self) -> bool:
        return self.worker is not None and self.worker.storage is not None

    def list_storage(self) -> None:
        """Wait until the store has been listed, so that what it has can be found."""
        if self.worker is not None and self.offload is not None and self.has_storage:
            self.offload.wait_for_storage(self.worker, math.inf)

    def close(self) -> None:
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
        with ThreadPoolExecutor(max_workers=1) as beside:
            model = beside.submit(self._runner.warm_up, self.pool)
            if self.offload is not None and self.transfer is not None:
                self.offload.warm_up()
                self.transfer.warm_up()
            else:
                self.blocks.warm_up()
                no_keys: list[list[bytes]] = [[] for _ in self._groups]
                find_cached_prefix(self.blocks, self._groups, no_keys, 0)
            self.pool = model.result()

    def _start_transfers(self, output: SchedulerOutput) -> None:
        """Start the stores and loads of this step, before the model runs."""
        if self.offload is None or self.worker is None:
            return
        meta = self.offload.build_connector_meta(output)
        held = self.offload.num_host_blocks_held
        self.peak_host_blocks = max(self.peak_host_blocks, held)
        self.pool = self.worker.start(meta, self.pool)

    def _prefill(self, request: EngineRequest) -> None:
        start = request.num_computed_tokens
        chunk = request.tokens[start : start + self.config.chunk_sizes[-1]]
        tables = request.block_ids_by_group
        result = self._runner.prefill(self.pool, chunk, start, tables)
        self.pool = result.pool
        # Always waits, so that the time of a chunk is counted in its step.
        token = int(result.next_token)
        request.num_computed_tokens += len(chunk)
        if request.num_computed_tokens == request.num_tokens:
            if not request.generated:
                request.first_token_s = time.perf_counter()
            request.append(token)

    def _decode(self, requests: Sequence[EngineRequest]) -> None:
        self.pool, tokens = self._runner.decode(
            self.pool,
            [request.tokens[-1] for request in requests],
            [request.num_computed_tokens for request in requests],
            [request.block_ids_by_group for request in requests],
        )
        for request, token in zip(requests, tokens, strict=True):
            request.num_computed_tokens += 1
            request.append(token)


def first_needed(group: GroupSpec, num_present: int) -> int:
    """Return the first block of a group that the token after `num_present` needs."""
    if not isinstance(group, SlidingWindow):
        return 0
    # A window of one token needs no block, but hits need one, see `jaxkv.search.hits`.
    window = max(group.window, 2)
    return max(num_present - window + 1, 0) // group.block_size


def max_blocks_held(groups: Sequence[GroupSpec], num_tokens: int, chunk: int) -> int:
    """Bound the blocks that a request holds, which grows by `chunk` to `num_tokens`."""
    total = 0
    for group in groups:
        num_blocks = -(-num_tokens // group.block_size)
        if isinstance(group, SlidingWindow):
            # The tokens of two steps, since blocks are freed one step later, and the
            # window before them, at any offset in a block.
            span = max(group.window, 2) - 2 + 2 * chunk
            num_blocks = min(num_blocks, -(-span // group.block_size) + 1)
        total += num_blocks
    return total


def _namespace(model: ModelConfig, config: EngineConfig) -> Namespace:
    """Return what the bytes of a KV block depend on, besides its tokens."""
    return Namespace(
        model=f"jaxkv-demo {model}",
        weights_epoch=config.weights_epoch,
        kv_dtype="float32",
        layout="per layer: k, v of [block, head, dim]",
        block_size=config.block_size,
    )


def _flat_if_single(tables: Tables) -> list[int] | Tables:
    """Return block tables as the offload scheduler takes them: flat for one group."""
    return tables[0] if len(tables) == 1 else tables
