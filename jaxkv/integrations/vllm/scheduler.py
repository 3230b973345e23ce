"""The scheduler's half of `OffloadConnector`: vLLM's requests, as jaxkv reads them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar, overload

from jaxkv import OffloadScheduler, Retention, SchedulerOutput
from jaxkv._util import gib, shown
from jaxkv.integrations.vllm.adapters import Adapters
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.events import HostEvents
from jaxkv.integrations.vllm.installed import find_name
from jaxkv.integrations.vllm.pool import (
    MARK_BYTES,
    PRIVATE_END,
    StatesBlockPool,
    VllmBlockPool,
    is_private,
    key_in_group,
)
from jaxkv.integrations.vllm.ranks import (
    ALL_LOST,
    Adapter,
    RankStep,
    RankSteps,
    StepMetadata,
)
from jaxkv.integrations.vllm.stats import OffloadConnectorStats, StatsReader
from jaxkv.integrations.vllm.worker import (
    LOST_POOLS,
    WORKERS,
    WorkerReport,
    call_before,
)
from jaxkv.keys.mark import KeyMark
from jaxkv.policies.facts import check_kind
from jaxkv.scheduling.protocol import NO_MOVES, NO_REPORTS, ConnectorOutput
from jaxkv.search.tiers import Source, first_tokens, search
from jaxkv.types import BlockKey, Stop

Value = TypeVar("Value")

_LOG = logging.getLogger("jaxkv")
_OUTPUT = find_name("vllm.v1.outputs", "KVConnectorOutput")
# The steps that the rate of prefill is the median of.
_RATE_STEPS = 15
# States that loads leave free: a running request takes one for each step's end, and
# releases the last one a step later.
_MIN_FREE_STATES = 4


class _Keys(Sequence[bytes]):
    """The keys of a request in a group: its hashes, each with the same suffix.

    It copies no hash: vLLM rewrites the hashes of a request whose input streams.
    """

    def __init__(self, request: Any, suffix: bytes) -> None:
        self._request, self._suffix = request, suffix

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockKey]: ...
    def __getitem__(self, index: int | slice) -> BlockKey | list[BlockKey]:
        hashes, suffix = self._request.block_hashes[index], self._suffix
        if isinstance(index, slice):
            return [block_hash + suffix for block_hash in hashes]
        key: BlockKey = hashes + suffix
        return key


class VllmRequest:
    """A request of vLLM with the attributes that `OffloadScheduler` reads.

    `events`, if any, gets each block with a hash. `adapter` is the mark of the
    request's adapter at the end of its blocks' keys.
    """

    def __init__(
        self,
        request: Any,
        num_groups: int,
        events: HostEvents | None = None,
        adapter: bytes = b"",
    ) -> None:
        self.request = request
        self.adapter = adapter
        # Whether its blocks may have KV of old weights, and must not be stored.
        self.has_old_kv = False
        # Whether its adapter's weights are unknown: it stores and loads nothing.
        self.has_unknown_weights = False
        # Tokens that vLLM found on the device at its last query; None once the request
        # has blocks.
        self.num_local_tokens: int | None = None
        # Last tokens, whose draft KV may be rewritten while the request decodes.
        self.num_volatile_tokens = 0
        # Whether its whole prompt must be computed, as for prompt_logprobs.
        self.skips_prefix_cache = _skips_prefix_cache(request)
        self._keys = [
            _Keys(request, key_in_group(b"", group) + adapter)
            for group in range(num_groups)
        ]
        self._keys_of_all = _Keys(request, adapter)
        # Set by ``kv_transfer_params``; `retention` also by the hint ``kv.retain``.
        self._max_offload_tokens: int | None = None
        self.max_load_tokens: int | None = None
        self.retention: Retention | None = None
        self.kind: int | None = None
        self.remote_prefill = False  # Another engine computes and stores its prompt.
        self.is_explained = False  # Whether its response explains its last offer, ...
        self.explanation: str | None = None  # ... with this text.
        if getattr(request, "kv_transfer_params", None):
            limits = "max_offload_tokens", "max_load_tokens"
            self._max_offload_tokens, self.max_load_tokens = (
                _param(request, name, _num_tokens) for name in limits
            )
            self.retention = _param(request, "retention", Retention.of)
            self.kind = _param(request, "kind", check_kind)
            self.remote_prefill = bool(_param(request, "do_remote_prefill", _flag))
            self.is_explained = bool(_param(request, "explain", _flag))
        if self.retention is None and getattr(request, "kv_hints", None) is not None:
            self.retention = _hint(request, "kv.retain", Retention.of)
        self._events = events
        self._recorded = KeyMark()

    @property
    def max_offload_tokens(self) -> int | None:
        """Maximum of its tokens to store; None for all."""
        if self.has_old_kv or self.has_unknown_weights:
            return 0
        return self._max_offload_tokens

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far."""
        hashes = self._record_hashes()
        return self._keys_of_all if self.adapter else hashes

    @property
    def block_keys_by_group(self) -> Sequence[Sequence[BlockKey]]:
        """The keys for each group, as vLLM's prefix cache makes them."""
        self._record_hashes()
        return self._keys

    def _record_hashes(self) -> Sequence[BlockKey]:
        """Record new and rewritten hashes for events; return all hashes."""
        hashes: Sequence[BlockKey] = self.request.block_hashes
        if self._events is not None:
            first = self._recorded.num if self._recorded.is_in(hashes) else 0
            if first < len(hashes):
                self._events.record(self.request, first, self.adapter)
            self._recorded = KeyMark.of(hashes, len(hashes))
        return hashes

    # Read in each step: these properties enter no Python frame.
    request_id = property(attrgetter("request.request_id"), doc="The request's id.")
    num_tokens = property(
        attrgetter("request.num_tokens"), doc="Tokens so far, prompt and generated."
    )
    num_prompt_tokens = property(
        attrgetter("request.num_prompt_tokens"), doc="Tokens of the prompt."
    )
    num_computed_tokens = property(
        attrgetter("request.num_computed_tokens"), doc="Those with KV on the device."
    )

    @property
    def stop(self) -> Stop | None:
        """Why it stopped, as far as vLLM knows; None for lengths, aborts and errors.

        An end-of-sequence token ends an answer. Engines use other stop tokens, or
        strings, for tool calls. A policy learns what either means for its traffic, so
        an engine that differs loses nothing.
        """
        status = getattr(getattr(self.request, "status", None), "name", None)
        if status != "FINISHED_STOPPED":
            return None
        is_plain = getattr(self.request, "stop_reason", None) is None
        return "end_turn" if is_plain else "tool_use"

    @property
    def num_output_placeholders(self) -> int:
        """Computed tokens that are scheduled ahead, or volatile while it decodes."""
        num_ahead = int(getattr(self.request, "num_output_placeholders", 0))
        if self.num_volatile_tokens:
            num_known = self.num_computed_tokens - num_ahead
            if num_known > self.num_prompt_tokens:
                num_ahead += min(self.num_volatile_tokens, num_known)
        return num_ahead


class PrefillRate:
    """Measures how fast the model computes prompts, by the engine's own steps.

    A step lasts until the next one is planned. The rate is the median of the last steps
    that computed at least half as many tokens as the largest step: other steps compute
    few prompt tokens. A pause after a step does not change the median.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_tokens = 0
        self._start_s = 0.0
        self._max_tokens = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)

    def begin_step(self, num_tokens: int) -> None:
        """Record that a step that computes some tokens is planned."""
        now_s = self._clock()
        if self._num_tokens and 2 * self._num_tokens >= self._max_tokens:
            self._max_tokens = max(self._max_tokens, self._num_tokens)
            self._steps.append((self._num_tokens, now_s - self._start_s))
        self._num_tokens, self._start_s = num_tokens, now_s

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 until a step has ended."""
        rates = [
            num_tokens / max(took_s, 1e-9)
            for num_tokens, took_s in self._steps
            if 2 * num_tokens >= self._max_tokens
        ]
        return statistics.median(rates) if rates else 0.0


class SchedulerHalf:
    """Decides what is stored and loaded, next to vLLM's scheduler.

    ValueError if the rules do not fit the model's groups of layers; OSError if the file
    of requests cannot be written.
    """

    def __init__(self, config: ConnectorConfig, engine_id: str = "") -> None:
        # What the last finished request found, for its response.
        self._summary: dict[str, Any] | None = None
        notice = self._record_summary if config.vllm.report_requests else None
        self.scheduler = OffloadScheduler(
            *(config.groups, config.rank_host_blocks),
            *(config.offload.cache_policy, config.enable_events),
            rules=config.make_rules(),
            num_storage_blocks=config.storage.num_blocks if config.storage else 0,
            is_private=is_private,
            recorder=config.offload.make_recorder(),
            policy_state=config.offload.policy_state,
            on_request_finished=notice,
        )
        self._config = config
        # A draft model's last tokens of a hit, or of computed ones.
        self._volatile_tokens = 0
        if config.drops_last_block:
            factor = config.offload.blocks_per_host_block
            self._volatile_tokens = factor * config.groups[0].block_size
        self._adapter_marks = Adapters(has_storage=config.storage is not None)
        # Marks of the adapters that the worker has loaded, by vLLM's integer id.
        self._loaded_adapters: Mapping[int, bytes] = {}
        # Logged names of adapters with unknown weights, and the marks made for them.
        self._unknown_adapters: set[str] = set()
        self._num_unknown_marks = 0
        # Whether the store's first listing is still under way.
        self._awaits_listing = config.storage is not None
        self._is_storage_disabled = False
        self._stats = StatsReader(self.scheduler)
        # Only if a load is compared with it.
        needs_rate = config.offload.skip_slow_loads or self.scheduler.shadow_counts
        self._prefill = PrefillRate() if needs_rate else None
        self._events = None
        if config.enable_events:
            is_remote = config.storage is not None and not config.storage.is_folder
            self._events = HostEvents(config.groups, storage_is_remote=is_remote)
        self._engine_id = engine_id
        # Identifies this half among the ranks, each in a separate process.
        self._sender = f"{os.getpid()}.{id(self)}"
        # Lost pools whose KV the host tier has forgotten, and all known ones.
        self._num_forgotten_pools = LOST_POOLS.get(engine_id, 0)
        self._num_lost_pools = self._num_forgotten_pools
        self._must_reset = False
        self._has_adapters = False  # Whether any request had one.
        # Misfits that workers have reported, by host; and those that precede no store
        # that waits.
        self._num_misfits: dict[int, int] = {}
        self._num_settled: tuple[tuple[int, int], ...] = ()
        self._has_logged_reset = False  # Since the last step.
        self._pool: VllmBlockPool | None = None
        self._num_reports = 0  # The number of the last report.
        self._requests: dict[str, VllmRequest] = {}
        # Requests that got blocks since the metadata of the last step.
        self._allocated: set[str] = set()
        # Requests whose load has failed, until vLLM asks for them again,
        self._must_wait: set[str] = set()
        # and from then on until they get blocks to compute it in.
        self._must_compute: set[str] = set()
        # Requests with blocks that are, or were, loaded, until they are scheduled.
        self._loading: set[str] = set()

    def bind_block_pool(self, pool: Any) -> None:
        """Bind the pool whose blocks are held, and compile all decisions.

        ValueError if the model has states, but the pool has none.
        """
        config = self._config
        bound = VllmBlockPool(pool, len(config.groups))
        if config.state_groups:
            bound = StatesBlockPool(pool, config.state_groups)
        self.scheduler.bind_device_block_pool(bound)
        self._pool = bound
        if not config.vllm.keep_on_device_reset:
            for vllm_pool in bound.pools:
                self._reset_with(vllm_pool)
        _LOG.info(
            "host tier of %d blocks, %s: compiling its decisions, which takes up to "
            "half a minute the first time, and about a second once they are on disk",
            config.rank_host_blocks,
            gib(config.planned_bytes // config.num_ranks),
        )
        start_s = time.monotonic()
        self.scheduler.warm_up()
        _LOG.info("compiled in %.1f s", time.monotonic() - start_s)

    def _reset_with(self, pool: Any) -> None:
        """Reset the host tier whenever vLLM resets a pool; vLLM notifies no connector.

        The host is reset first: vLLM's pool refuses a reset while blocks are held, and
        stores from held blocks must not be published.
        """

        def notice() -> None:
            if not self._has_logged_reset:
                self._has_logged_reset = True
                _LOG.info(
                    "vLLM's prefix cache is reset: the host tier forgets its blocks "
                    "(keep_on_device_reset=true keeps them)"
                )
            self.reset()

        call_before(pool, "reset_prefix_cache", notice)

    def end_transfers(self, scheduler: Any) -> None:
        """End all transfers, so that vLLM's scheduler can free all blocks.

        A request that waits for its load loses its blocks: vLLM admits it again.
        """
        worker, pool = WORKERS.get(self._engine_id), self._pool
        if worker is None or pool is None:
            return
        earlier, new = worker.end_transfers()
        for report in earlier:  # vLLM still delivers those that are new here.
            if report.number > self._num_reports:
                self.record_report(report)
        if new is not None:
            ended = {*new.output.finished_recving, *new.output.failed_recving}
            scheduler._update_from_kv_xfer_finished(
                _OUTPUT(finished_recving=ended, kv_connector_worker_meta=new)
            )
        for request in scheduler.requests.values():
            if request.status.name == "RUNNING":
                continue  # vLLM preempts it.
            if request.num_computed_tokens and not request.is_finished():
                # It waits for its load, or for more blocks after it.
                request.num_computed_tokens = 0  # It stores nothing.
                self.scheduler.request_preempted(self._request(request))
                self._must_wait.add(request.request_id)
            scheduler.kv_cache_manager.free(request)
        stores = self.scheduler._stores
        stores.void(pool, stores.waiting.sources)

    def query(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens the host has than the device.

        The number is 0 for a request that must compute its whole prompt, which older
        vLLMs do not check, and for a request whose adapter has unknown weights.

        It is 0 for a request whose load has failed, so that it recomputes. vLLM 0.32
        holds blocks back for loads in flight, and counts the failed load among them: a
        request that needs more than half of the free blocks would wait indefinitely,
        and so would all behind it.
        """
        if self._pool is None:
            raise RuntimeError(
                "bind_gpu_block_pool() was not called: this vLLM does not share its "
                "block pool with connectors."
            )
        is_reset = self._is_reset()
        tracked = self._request(request)
        tracked.num_local_tokens = num_computed_tokens
        refusal = self._refusal(tracked, is_reset)
        if tracked.is_explained:
            offer = refusal or self.scheduler.explain(tracked, num_computed_tokens)
            tracked.explanation = str(offer)
        if refusal is not None:
            return 0, False
        if request.request_id in self._must_wait:
            # vLLM 0.32 leaves it at the head of the queue of requests that hold blocks,
            # though it holds none: it may wait indefinitely for the blocks of requests
            # behind it. The answer None moves it to the other queue.
            self._must_wait.discard(request.request_id)
            self._must_compute.add(request.request_id)
            return None, False
        if self._awaits_listing:
            return None, False
        answer = self.scheduler.get_num_new_matched_tokens(tracked, num_computed_tokens)
        if answer[0] and self._volatile_tokens:
            num_tokens = answer[0] - self._volatile_tokens
            answer = max(num_tokens, 0), answer[1] and num_tokens > 0
        if answer[0] and not self._may_load():
            return None, False
        return answer

    def _refusal(self, tracked: VllmRequest, is_reset: bool) -> str | None:
        """Return why a request is offered nothing, whatever the host has."""
        if not is_reset:
            return "The host is being reset."
        if tracked.skips_prefix_cache:
            return "It must compute its whole prompt."
        if tracked.has_unknown_weights:
            return "Its adapter has unknown weights."
        if tracked.request_id in self._must_compute:
            return "Its load has failed."
        return None

    def count_hit_tokens(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_local_tokens: int
    ) -> int:
        """Count the tokens of a prompt on device and host, and hold no block."""
        if self._must_reset:
            return num_local_tokens
        config = self._config
        keys: list[Sequence[BlockKey]] = [block_hashes]
        if len(config.groups) > 1:
            keys = [
                [key_in_group(block_hash, group) for block_hash in block_hashes]
                for group in range(len(config.groups))
            ]
        rows = config.offload.blocks_per_host_block
        # Stores in flight count, as they arrive before the request runs.
        host = Source(self.scheduler._manager.find_held, rows)
        sources = [first_tokens(num_local_tokens), host]
        return search(config.groups, keys, max_tokens, sources).num_tokens

    def _may_load(self) -> bool:
        """Whether a load that vLLM admits now blocks no other request.

        Besides a load, vLLM 0.32 holds blocks back for all requests with a failed load,
        which wait behind it: it may not be admitted, and they may not be reached. It
        holds back only attention blocks: requests that wait for their loads may take
        all states, so that none gets the state that it computes in.
        """
        if self._must_wait or self._must_compute:
            return False
        num_states = self._pool.num_states if self._pool is not None else 0
        return not num_states or (
            len(self._loading) < max(num_states - _MIN_FREE_STATES, 1)
        )

    def record_blocks(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Record all blocks of a request and the tokens to load into them."""
        tracked = self._request(request)
        name, numbers = tracked.request_id, self._numbered(block_ids)
        self._check_age(tracked, numbers)
        self.scheduler.update_state_after_alloc(tracked, numbers, num_external_tokens)
        self._allocated.add(name)
        self._must_wait.discard(name)
        self._must_compute.discard(name)
        if num_external_tokens and self._config.state_groups:
            self._loading.add(name)

    def _check_age(self, tracked: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """Check whether a request that gets blocks continues from old KV."""
        num_local, tracked.num_local_tokens = tracked.num_local_tokens, None
        pool = self._pool
        if pool is None or not (pool.old or tracked.adapter):
            tracked.has_old_kv &= num_local is None
            return
        written = [*chain.from_iterable(tables)]
        if num_local is not None:  # Else it keeps its earlier blocks.
            hits: list[int] = []
            written = []
            for group, table in zip(self._config.groups, tables, strict=True):
                num_hits = num_local // group.block_size
                hits += table[:num_hits]
                written += table[num_hits:]
            tracked.has_old_kv = pool.has_old(hits, tracked.adapter)
        is_old = tracked.has_old_kv or tracked.has_unknown_weights
        pool.record_written(written, is_old=is_old, mark=tracked.adapter)

    def build_metadata(self, output: Any) -> StepMetadata | RankSteps:
        """Return the transfers to start in a step, from vLLM's `SchedulerOutput`."""
        step = self._build(output)
        if self._config.num_ranks == 1:
            return step
        assert self._pool is not None
        return RankSteps([RankStep(self._sender, self._pool.num_blocks, step)])

    def _build(self, output: Any) -> StepMetadata:
        self._is_reset()
        self._has_logged_reset = False
        if self._loading:
            self._loading.difference_update(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        # The blocks of a request from the queue were recorded on allocation.
        new_block_ids = {}
        for name, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and name not in self._allocated:
                new_block_ids[name] = self._numbered(block_ids)
                if name in self._requests:
                    self._check_age(self._requests[name], new_block_ids[name])
        # vLLM also preempts between steps. A request that was resumed before this step
        # does not count as preempted: its recorded blocks are the new ones.
        preempted = output.preempted_req_ids or ()
        if preempted:
            preempted = sorted(set(preempted) - self._allocated)
        self._allocated.clear()
        transfers = self.scheduler.build_connector_meta(
            SchedulerOutput(output.num_scheduled_tokens, new_block_ids, preempted)
        )
        if self._prefill is not None:
            self._prefill.begin_step(sum(output.num_scheduled_tokens.values()))
        is_idle = not output.num_scheduled_tokens
        num_lost = ALL_LOST if self._must_reset else self._num_forgotten_pools
        if self._has_adapters:
            step = StepMetadata(transfers, num_lost, is_idle)
            return self._with_adapters(step, output)
        if transfers.settings:  # The first plan, which workers compare.
            settings = {**transfers.settings, **self._config.settings}
            transfers = dataclasses.replace(transfers, settings=settings)
        if transfers is NO_MOVES:
            return _no_moves(num_lost, is_idle)
        return StepMetadata(transfers, num_lost, is_idle)

    def _with_adapters(self, step: StepMetadata, output: Any) -> StepMetadata:
        """Add the adapters of a step's requests, for the worker to compare."""
        num_misfits = self._num_settled
        if not self.scheduler.in_transit.stores_waiting:
            self._num_settled = tuple(sorted(self._num_misfits.items()))
        transfers = step.transfers
        loading = transfers.load_event_to_reqs.get(transfers.load_event, ())
        computed, loaded = (
            frozenset(
                (getattr(lora, "lora_int_id", 0), tracked.adapter)
                for tracked in map(self._requests.get, names)
                if tracked is not None and tracked.adapter
                if not tracked.has_unknown_weights
                for lora in (tracked.request.lora_request,)
                # A load in place may still have to come.
                if names is not loading or not getattr(lora, "load_inplace", False)
            )
            for names in (output.num_scheduled_tokens, loading)
        )
        return dataclasses.replace(
            step, adapters=computed, loaded_adapters=loaded, num_misfits=num_misfits
        )

    def record_report(self, report: WorkerReport) -> ConnectorOutput:
        """Release blocks of ended transfers; return this half's part of a report."""
        part = report.output
        if report.number:
            if report.number <= self._num_reports:
                return part  # `end_transfers` has processed it.
            self._num_reports = report.number
        if self._config.num_ranks > 1:
            part = report.by_rank.get(self._sender, NO_REPORTS)
        ended = self.scheduler.update_connector_output(part)
        if ended.failed_recving:
            self._must_wait.update(ended.failed_recving)
            self._loading.difference_update(ended.failed_recving)
        if report.num_lost_pools > self._num_lost_pools:
            self._record_lost_pools(report.num_lost_pools)
        if report.adapters is not None:
            self._record_adapters(report.adapters)
        if report.misfits:
            self._num_misfits |= report.num_misfits
            self._record_misfits(report.misfits.__contains__, has_computed=True)
        self._awaits_listing &= not report.is_listed
        if self._prefill is not None:
            rate = self._prefill.tokens_per_s
            rates = report.load_bytes_per_s, rate, report.storage_bytes_per_s
            self.scheduler.set_rates(*rates)
        return part

    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Finish a request; return the ``kv_transfer_params`` of its response."""
        numbers = self._numbered(block_ids)
        tracked = self._request(request)
        tracked.num_volatile_tokens = 0
        self.scheduler.request_finished_all_groups(tracked, numbers)
        self._requests.pop(request.request_id, None)
        waiting = self._must_wait, self._must_compute
        for names in (self._allocated, *waiting, self._loading):
            names.discard(request.request_id)
        params: dict[str, Any] = {}
        if _param(request, "do_remote_decode", _flag):
            params = {"do_remote_prefill": True, "do_remote_decode": False}
        if self._summary is not None:
            params["jaxkv"] = self._summary
            self._summary = None
        if tracked.explanation is not None:
            params.setdefault("jaxkv", {})["explain"] = tracked.explanation
        return params or None

    def _record_summary(self, summary: dict[str, Any]) -> None:
        del summary["request"]  # The response has it.
        self._summary = summary

    def _numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks; see `VllmBlockPool`."""
        return block_ids if self._pool is None else self._pool.numbered(block_ids)

    def has_pending_transfers(self) -> bool:
        """Whether vLLM must step without requests, also until the store is listed."""
        pending = self.scheduler
        return (
            self._awaits_listing
            or pending.has_pending_stores()
            or pending.has_pending_loads()
        )

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of vLLM's pool are free as soon as a transfer ends."""
        return self._pool is not None and self._pool.has_only_pinned()

    def take_events(self) -> list[Any]:
        """Return vLLM's events of host and store since the last call."""
        if self._events is None:
            return []
        return list(self._events.to_vllm(self.scheduler.take_events()))

    def take_stats(self) -> OffloadConnectorStats | None:
        """Return changed metrics; see `StatsReader.take`."""
        is_last = not self._requests and not self.has_pending_transfers()
        return self._stats.take(is_last=is_last)

    def reset(self) -> bool:
        """Clear the host tier; return whether it was cleared, else it soon will be."""
        self._begin_reset()
        return self._try_reset()

    def _begin_reset(self) -> None:
        """Clear the host tier as soon as possible.

        The store is disabled at once: blocks computed until then may be of other
        weights. The device's blocks may be old, and are not stored later.
        """
        self._must_reset = True
        self._disable_storage()
        if self._pool is not None:
            self._pool.mark_old()
        for tracked in self._requests.values():
            tracked.has_old_kv = True

    def _try_reset(self) -> bool:
        """Clear the host tier if it must be; return whether no reset is pending."""
        if self._must_reset and self.scheduler.reset():
            self._must_reset = False
            self._num_forgotten_pools = self._num_lost_pools
            if self._pool is not None:
                self._pool.release()  # Stores in flight are never published.
        return not self._must_reset

    def _disable_storage(self) -> None:
        """Stop using the store, whose namespace has the initial weights."""
        storage, is_kept = self._config.storage, self._config.vllm.storage_keep_on_reset
        if storage is None or is_kept or self._is_storage_disabled:
            return
        self.scheduler.disable_storage()
        self._is_storage_disabled = True
        self._awaits_listing = False
        _LOG.warning(
            "%s is not used until the next start, because a reset may bring new "
            "weights. If they never change, set storage_keep_on_reset=true",
            storage.shown_url,
        )

    def _is_reset(self) -> bool:
        """Check for lost pools, then clear the host tier as `_try_reset` does."""
        worker = WORKERS.get(self._engine_id)
        # The process of a rank has a copy of the worker, which never changes.
        if worker is not None and self._config.num_ranks == 1:
            worker.look()
            self._record_adapters(worker.adapters)
        num_lost_pools = LOST_POOLS.get(self._engine_id, 0)
        if num_lost_pools > self._num_lost_pools:
            self._record_lost_pools(num_lost_pools)
        return not self._must_reset or self._try_reset()

    def _record_lost_pools(self, num_lost_pools: int) -> None:
        """Record lost pools, and begin a reset."""
        self._num_lost_pools = num_lost_pools
        self._begin_reset()

    def _record_adapters(self, loaded: Mapping[int, bytes]) -> None:
        """Record the adapters that the worker has loaded."""
        before, self._loaded_adapters = self._loaded_adapters, loaded
        changed = dict(loaded.items() - before.items()) if loaded is not before else {}
        if changed:
            self._record_misfits(lambda key: changed.get(key[0], key[1]) != key[1])

    def _record_misfits(
        self, is_misfit: Callable[[Adapter], bool], *, has_computed: bool = False
    ) -> None:
        """Store no more blocks of requests whose adapters do not fit their keys.

        The device's blocks then count as old, because some may have other weights' KV.
        `has_computed` says that they have, perhaps of a request that has ended.
        """
        for tracked in self._requests.values():
            lora = getattr(tracked.request, "lora_request", None)
            if lora is not None and is_misfit(
                (getattr(lora, "lora_int_id", 0), tracked.adapter)
            ):
                has_computed |= not tracked.has_unknown_weights
                tracked.has_unknown_weights = True
        if has_computed and self._pool is not None:
            self._pool.mark_old()

    def _mark_of(self, lora: Any) -> bytes | None:
        """Return the mark of an adapter; None if its weights are unknown."""
        mark = self._adapter_marks.mark(lora)
        loaded = self._loaded_adapters.get(getattr(lora, "lora_int_id", 0))
        if loaded in (None, mark) or getattr(lora, "load_inplace", False):
            return mark
        return None  # Its files have changed since they were loaded.

    def _unknown_mark(self, lora: Any) -> bytes:
        """Make a unique mark for one request."""
        name = str(getattr(lora, "lora_name", ""))
        if name not in self._unknown_adapters:
            self._unknown_adapters.add(name)
            _LOG.warning(
                "adapter %s: its files cannot be read, or have changed since they were "
                "loaded. Its KV is neither stored nor loaded until they are loaded "
                "again",
                shown(name),
            )
        self._num_unknown_marks += 1
        number = self._num_unknown_marks
        return number.to_bytes(MARK_BYTES - len(PRIVATE_END), "big") + PRIVATE_END

    def shut_down(self) -> None:
        """Close the file that requests are recorded in."""
        if self.scheduler.recorder is not None:
            self.scheduler.recorder.close()

    def _request(self, request: Any) -> VllmRequest:
        earlier = self._requests.get(request.request_id)
        if earlier is not None and earlier.request is request:
            return earlier
        lora = getattr(request, "lora_request", None)
        self._has_adapters |= lora is not None
        mark = b"" if lora is None else self._mark_of(lora)
        adapter = self._unknown_mark(lora) if mark is None else mark
        new = VllmRequest(request, len(self._config.groups), self._events, adapter)
        new.has_unknown_weights = mark is None
        new.num_volatile_tokens = self._volatile_tokens
        if earlier is not None:
            new.has_old_kv = earlier.has_old_kv
            new.has_unknown_weights |= earlier.has_unknown_weights
        self._requests[request.request_id] = new
        return new


def end_before_resets() -> None:
    """Let vLLM preempt all requests, and reset its pool, while transfers are in flight.

    vLLM raises an error if blocks are still held. With asynchronous scheduling it keeps
    those that a step in flight may write from connectors; jaxkv's transfers are ordered
    after that step. ImportError if vLLM has no such scheduler.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    reset = Scheduler.reset_prefix_cache
    if hasattr(reset, "__wrapped__"):
        return  # For an earlier engine in this process.

    @functools.wraps(reset)
    def end_and_reset(
        scheduler: Any, reset_running_requests: bool = False, *args: Any, **named: Any
    ) -> Any:
        half = getattr(scheduler.connector, "_scheduler", None)
        if not (reset_running_requests and isinstance(half, SchedulerHalf)):
            return reset(scheduler, reset_running_requests, *args, **named)
        half.end_transfers(scheduler)
        deferred = getattr(scheduler, "deferred_frees", ())
        while deferred:
            scheduler.kv_cache_manager.block_pool.free_blocks(
                deferred.popleft()[1][::-1]
            )
        defers = getattr(scheduler, "defer_block_free", False)
        scheduler.defer_block_free = False
        try:
            return reset(scheduler, reset_running_requests, *args, **named)
        finally:
            scheduler.defer_block_free = defers

    Scheduler.reset_prefix_cache = end_and_reset


@functools.cache
def _no_moves(num_lost_pools: int, is_idle: bool) -> StepMetadata:
    """Make the metadata of steps without transfers, once."""
    return StepMetadata(NO_MOVES, num_lost_pools, is_idle)


def _skips_prefix_cache(request: Any) -> bool:
    """Whether vLLM may not read a request's KV from caches."""
    params = getattr(request, "sampling_params", None)
    # A loaded prefix has no log-probabilities, even if the request accepts caches.
    names = "prompt_logprobs", "prompt_logprob_token_ids"
    if any(getattr(params, name, None) is not None for name in names):
        return True
    for owner in (request, params):
        skips = getattr(owner, "skip_reading_prefix_cache", None)
        if skips is not None:
            return bool(skips)
    return False


def _param(request: Any, name: str, read: Callable[[Any], Value]) -> Value | None:
    """Read one of a client's ``kv_transfer_params``."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict) or params.get(name) is None:
        return None
    return _read(request, f"kv_transfer_params[{name!r}]", read, params[name])


def _hint(request: Any, name: str, read: Callable[[Any], Value]) -> Value | None:
    """Read a router's action of a type in vLLM's ``kv_hints``, if it has one."""
    hints = getattr(request, "kv_hints", None)
    for action in getattr(hints, "actions", None) or ():
        major, _, _ = str(action.action_version).partition(".")
        if action.action_type == name and major == "1":
            return _read(request, f"the hint {name}", read, action.payload)
    return None


def _read(
    request: Any, name: str, read: Callable[[Any], Value], value: Any
) -> Value | None:
    """Read a value; a wrong value is logged, as it must not end the engine."""
    try:
        return read(value)
    except ValueError as error:
        _LOG.warning("request %s: %s is ignored: %s", request.request_id, name, error)
        return None


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{shown(value)} must be true or false.")
    return value


def _num_tokens(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} must be a number of tokens, 0 or more.")
    return value
