"""The scheduler's half of `OffloadConnector`: vLLM's requests, as jaxkv reads them."""

from __future__ import annotations

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

from jaxkv import (
    OffloadScheduler,
    Retention,
    SchedulerOutput,
)
from jaxkv._util import gib, shown
from jaxkv.integrations.vllm.adapters import Adapters
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.events import HostEvents
from jaxkv.integrations.vllm.pool import (
    MARK_BYTES,
    PRIVATE_END,
    StatesBlockPool,
    VllmBlockPool,
    is_private,
    key_in_group,
)
from jaxkv.integrations.vllm.ranks import RankStep, RankSteps
from jaxkv.integrations.vllm.stats import OffloadConnectorStats, StatsReader
from jaxkv.integrations.vllm.worker import (
    ALL_LOST,
    LOST_POOLS,
    WORKERS,
    StepMetadata,
    WorkerReport,
)
from jaxkv.keys.mark import KeyMark
from jaxkv.scheduling.protocol import NO_MOVES, NO_REPORTS, ConnectorOutput
from jaxkv.search.tiers import Source, first_tokens, search
from jaxkv.types import BlockKey, Stop

Value = TypeVar("Value")

_LOG = logging.getLogger("jaxkv")
# The steps that the rate of prefill is the median of.
_RATE_STEPS = 15
# States that loads leave free: a request that runs takes one for each step's end, and
# gives the last one back a step later.
_LEAST_FREE_STATES = 4


class _Keys(Sequence[bytes]):
    """The keys of a request in a group: its hashes, each with the same suffix.

    It copies none of them: vLLM rewrites the hashes of a request whose input streams.
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

    Args:
        request: vLLM's `Request`.
        num_groups: Groups of the model's layers.
        events: Gets each block with a hash first; None without events.
        adapter: The mark of its adapter, which follows in its blocks' keys.

    Attributes:
        request: As given.
        adapter: As given.
        has_old_kv: Whether its blocks may have KV of old weights, so that they must not
            be stored.
        has_unknown_weights: Whether it is unknown which weights its adapter has, so
            that nothing of it is stored or loaded.
        num_local_tokens: Tokens that vLLM found on the device when it last asked; None
            since it got blocks.
        num_volatile_tokens: Tokens at the end whose draft KV may be written again while
            the request decodes.
        skips_prefix_cache: Whether all of its prompt must be computed, as for
            log-probabilities of the prompt.
        retention: How long to keep its blocks, by
            ``kv_transfer_params["retention"]`` or else a hint ``kv.retain``; None where
            both are missing or wrong.
        max_load_tokens: How many may be loaded, likewise.
        remote_prefill: Whether another engine computes its prompt and stores it,
            likewise, as ``do_remote_prefill``.
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
        self.has_old_kv = False
        self.has_unknown_weights = False
        self.num_local_tokens: int | None = None
        self.num_volatile_tokens = 0
        self.skips_prefix_cache = _skips_prefix_cache(request)
        self._keys = [
            _Keys(request, key_in_group(b"", group) + adapter)
            for group in range(num_groups)
        ]
        self._keys_of_all = _Keys(request, adapter)
        self._max_offload_tokens: int | None = None
        self.max_load_tokens: int | None = None
        self.retention: Retention | None = None
        self.remote_prefill = False
        if getattr(request, "kv_transfer_params", None):
            self._max_offload_tokens = _asked_for(
                request, "max_offload_tokens", _num_tokens
            )
            self.max_load_tokens = _asked_for(request, "max_load_tokens", _num_tokens)
            self.retention = _asked_for(request, "retention", Retention.of)
            self.remote_prefill = bool(_asked_for(request, "do_remote_prefill", _flag))
        if self.retention is None and getattr(request, "kv_hints", None) is not None:
            self.retention = _hinted(request, "kv.retain", Retention.of)
        self._events = events
        self._recorded = KeyMark()

    @property
    def max_offload_tokens(self) -> int | None:
        """How many of its tokens may be stored; None for all."""
        if self.has_old_kv or self.has_unknown_weights:
            return 0
        return self._max_offload_tokens

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far: their hashes."""
        hashes = self._record_hashes()
        return self._keys_of_all if self.adapter else hashes

    @property
    def block_keys_by_group(self) -> Sequence[Sequence[BlockKey]]:
        """The keys for each group, as vLLM's prefix cache makes them."""
        self._record_hashes()
        return self._keys

    def _record_hashes(self) -> Sequence[BlockKey]:
        """Record for events what is new or rewritten of the hashes; return all."""
        hashes: Sequence[BlockKey] = self.request.block_hashes
        if self._events is not None:
            first = self._recorded.num if self._recorded.is_in(hashes) else 0
            if first < len(hashes):
                self._events.record(self.request, first, self.adapter)
            self._recorded = KeyMark.of(hashes, len(hashes))
        return hashes

    # Asked for in each step: this way no frame of Python's is entered.
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

        An end-of-sequence token ends an answer. Another stop token, or a string, is
        what engines have for calls of tools. A policy learns what either means for the
        traffic that it sees, so nothing is lost where that is not so.
        """
        status = getattr(getattr(self.request, "status", None), "name", None)
        if status != "FINISHED_STOPPED":
            return None
        is_plain = getattr(self.request, "stop_reason", None) is None
        return "end_turn" if is_plain else "tool_use"

    @property
    def num_output_placeholders(self) -> int:
        """How many of these are scheduled ahead, or volatile while it decodes."""
        num_ahead = int(getattr(self.request, "num_output_placeholders", 0))
        if self.num_volatile_tokens:
            num_known = self.num_computed_tokens - num_ahead
            if num_known > self.num_prompt_tokens:
                num_ahead += min(self.num_volatile_tokens, num_known)
        return num_ahead


class PrefillRate:
    """Measures how fast the model computes prompts, by the engine's own steps.

    A step takes until the next one is planned. Of the last steps, the median counts of
    those that computed at least half as many tokens as the largest: other steps compute
    few tokens of prompts. A step that is followed by a pause does not change it.

    Args:
        clock: Seconds since some moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_tokens = 0
        self._start_s = 0.0
        self._most_tokens = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)

    def begin_step(self, num_tokens: int) -> None:
        """Note that a step is planned that computes some tokens."""
        now_s = self._clock()
        if self._num_tokens and 2 * self._num_tokens >= self._most_tokens:
            self._most_tokens = max(self._most_tokens, self._num_tokens)
            self._steps.append((self._num_tokens, now_s - self._start_s))
        self._num_tokens, self._start_s = num_tokens, now_s

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 until a step is over."""
        rates = [
            num_tokens / max(took_s, 1e-9)
            for num_tokens, took_s in self._steps
            if 2 * num_tokens >= self._most_tokens
        ]
        return statistics.median(rates) if rates else 0.0


class SchedulerHalf:
    """Decides what is stored and loaded, beside vLLM's scheduler.

    Args:
        config: Configuration of the connector.
        engine_id: vLLM's id of the engine.

    Raises:
        ValueError: If the cache policy is unknown, or the rules do not fit the model's
            groups.
        OSError: The file to record to cannot be written.

    Attributes:
        scheduler: The scheduler of stores and loads.
    """

    def __init__(self, config: ConnectorConfig, engine_id: str = "") -> None:
        self.scheduler = OffloadScheduler(
            config.groups,
            config.rank_host_blocks,
            config.offload.cache_policy,
            config.enable_events,
            rules=config.make_rules(),
            num_storage_blocks=config.storage.num_blocks if config.storage else 0,
            is_private=is_private,
            recorder=config.offload.make_recorder(),
            policy_state=config.offload.policy_state,
        )
        self._config = config
        # Of a draft model, at the end of what is found or computed.
        self._volatile_tokens = 0
        if config.drops_last_block:
            factor = config.offload.blocks_per_host_block
            self._volatile_tokens = factor * config.groups[0].block_size
        self._adapter_marks = Adapters(has_storage=config.storage is not None)
        # What the worker has loaded, by vLLM's integer id.
        self._loaded_adapters: Mapping[int, bytes] = {}
        # Names of adapters that were logged, and marks of requests with such.
        self._unknown_adapters: set[str] = set()
        self._num_unknown_marks = 0
        # Whether it is not known yet what the store has.
        self._awaits_listing = config.storage is not None
        self._has_left_storage = False
        self._stats = StatsReader(self.scheduler)
        # Only where a load is compared with it.
        asks_rates = config.offload.skip_slow_loads or self.scheduler.shadow_counts
        self._prefill = PrefillRate() if asks_rates else None
        self._events = None
        if config.enable_events:
            is_remote = config.storage is not None and not config.storage.is_folder
            self._events = HostEvents(config.groups, storage_is_remote=is_remote)
        self._engine_id = engine_id
        # Names this half among those of all ranks, each in a process of its own.
        self._sender = f"{os.getpid()}.{id(self)}"
        # Lost pools whose KV the host tier has forgotten, and all that are known of.
        self._num_forgotten_pools = LOST_POOLS.get(engine_id, 0)
        self._num_lost_pools = self._num_forgotten_pools
        self._must_reset = False
        # Whether a load is perhaps of another adapter than its request now has.
        self._must_abandon = False
        self._has_logged = False  # A reset, since the last step.
        self._pool: VllmBlockPool | None = None
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

        Raises:
            ValueError: The model has states, and the pool has none.
        """
        config = self._config
        held = VllmBlockPool(pool, len(config.groups))
        if config.state_groups:
            held = StatesBlockPool(pool, config.state_groups)
        self.scheduler.bind_device_block_pool(held)
        self._pool = held
        if not getattr(config, "keep_on_device_reset", False):
            for vllm_pool in held.pools:
                self._reset_with(vllm_pool)
        _LOG.info(
            "host tier of %d blocks, %s: compiling its decisions, which takes up to "
            "half a minute the first time, and about a second once they are on disk",
            config.rank_host_blocks,
            gib(config.planned_bytes // config.num_ranks),
        )
        began_s = time.monotonic()
        self.scheduler.warm_up()
        _LOG.info("compiled in %.1f s", time.monotonic() - began_s)

    def _reset_with(self, pool: Any) -> None:
        """Have the host tier be reset with a pool of vLLM's, which tells no connector.

        The host is reset first: vLLM's pool refuses to be while blocks are held, and
        what is stored from them must not be published.
        """
        reset = getattr(pool, "reset_prefix_cache", None)
        if reset is None:
            return

        @functools.wraps(reset)
        def reset_both(*args: Any, **named: Any) -> Any:
            if not self._has_logged:
                self._has_logged = True
                _LOG.info(
                    "vLLM's prefix cache is reset: the host tier forgets its blocks, "
                    "too (keep_on_device_reset=true keeps them)"
                )
            self.reset()
            return reset(*args, **named)

        pool.reset_prefix_cache = reset_both

    def query(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens the host has than the device.

        That is 0 for a request that must compute all of its prompt, which older vLLMs
        do not see to themselves, and for one whose adapter has unknown weights.

        It is 0 for a request whose load has failed: it is computed. vLLM 0.32 admits
        a load only beside what it holds back for loads under way, and counts the failed
        one among them: a request that needs more than half of the free blocks, and all
        behind it, would wait forever.
        """
        if self._pool is None:
            raise RuntimeError(
                "bind_gpu_block_pool() was not called: this vLLM does not share its "
                "block pool with connectors."
            )
        is_reset = self._is_reset()
        known = self._request(request)
        known.num_local_tokens = num_computed_tokens
        if not is_reset:
            return 0, False
        if known.skips_prefix_cache or known.has_unknown_weights:
            return 0, False
        if request.request_id in self._must_compute:
            return 0, False
        if request.request_id in self._must_wait:
            # vLLM 0.32 leaves it at the head of the queue of requests that hold blocks,
            # though it holds none: it may wait forever for blocks of those behind it.
            # The answer None moves it to the queue of the others.
            self._must_wait.discard(request.request_id)
            self._must_compute.add(request.request_id)
            return None, False
        if self._awaits_listing:
            return None, False
        answer = self.scheduler.get_num_new_matched_tokens(known, num_computed_tokens)
        if answer[0] and self._volatile_tokens:
            num_tokens = answer[0] - self._volatile_tokens
            answer = max(num_tokens, 0), answer[1] and num_tokens > 0
        if answer[0] and not self._may_load():
            return None, False
        return answer

    def count_hit_tokens(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_local_tokens: int
    ) -> int:
        """Count the tokens that device and host have of a prompt; nothing is held."""
        if self._must_reset:
            return num_local_tokens
        config = self._config
        keys: list[Sequence[BlockKey]] = [block_hashes]
        if len(config.groups) > 1:
            keys = [
                [key_in_group(own, group) for own in block_hashes]
                for group in range(len(config.groups))
            ]
        rows = config.offload.blocks_per_host_block
        # Stores in flight count: they will have arrived.
        host = Source(self.scheduler._manager.find_held, rows)
        sources = [first_tokens(num_local_tokens), host]
        return search(config.groups, keys, max_tokens, sources).num_tokens

    def _may_load(self) -> bool:
        """Whether a load that vLLM admits now keeps no other request from running.

        Beside a load, vLLM 0.32 holds blocks back for all requests whose load has
        failed, which wait behind it: it may not be admitted, and they not be reached.
        And what is held back is of attention: requests that wait for their loads may
        take all states, so that none of them gets the one that it computes in.
        """
        if self._must_wait or self._must_compute:
            return False
        num_states = self._pool.num_states if self._pool is not None else 0
        return not num_states or (
            len(self._loading) < max(num_states - _LEAST_FREE_STATES, 1)
        )

    def note_blocks(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Record all blocks of a request and the tokens to load into them."""
        known = self._request(request)
        numbers = self._numbered(block_ids)
        self._note_age(known, numbers)
        self.scheduler.update_state_after_alloc(known, numbers, num_external_tokens)
        self._allocated.add(known.request_id)
        self._must_wait.discard(known.request_id)
        self._must_compute.discard(known.request_id)
        if num_external_tokens and self._config.state_groups:
            self._loading.add(known.request_id)

    def _note_age(self, known: VllmRequest, tables: Sequence[Sequence[int]]) -> None:
        """Find out whether a request that gets blocks goes on from old KV."""
        num_local, known.num_local_tokens = known.num_local_tokens, None
        pool = self._pool
        if pool is None or not (pool.old or known.adapter):
            known.has_old_kv &= num_local is None
            return
        written = [*chain.from_iterable(tables)]
        if num_local is not None:  # Else it keeps what it has.
            found: list[int] = []
            written = []
            for group, table in zip(self._config.groups, tables, strict=True):
                num_found = num_local // group.block_size
                found += table[:num_found]
                written += table[num_found:]
            known.has_old_kv = pool.has_old(found, known.adapter)
        pool.note_written(written, is_old=known.has_old_kv, mark=known.adapter)

    def build_metadata(self, output: Any) -> StepMetadata | RankSteps:
        """Return the transfers to start in a step, from vLLM's `SchedulerOutput`."""
        step = self._build(output)
        if self._config.num_ranks == 1:
            return step
        assert self._pool is not None
        parts = step.transfers, step.num_lost_pools, step.is_idle
        return RankSteps([RankStep(self._sender, self._pool.num_blocks, *parts)])

    def _build(self, output: Any) -> StepMetadata:
        self._is_reset()
        self._has_logged = False
        if self._loading:
            self._loading.difference_update(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        # The blocks of a request from the queue were recorded on allocation.
        new_block_ids = {}
        for name, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and name not in self._allocated:
                new_block_ids[name] = self._numbered(block_ids)
                if name in self._requests:
                    self._note_age(self._requests[name], new_block_ids[name])
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
        num_lost = self._num_forgotten_pools
        if self._must_reset or self._must_abandon:
            num_lost, self._must_abandon = ALL_LOST, False
        if transfers is NO_MOVES:
            return _no_moves(num_lost, is_idle)
        return StepMetadata(transfers, num_lost, is_idle)

    def part_of(self, report: WorkerReport) -> ConnectorOutput:
        """Return what a report has of this half's own transfers."""
        if self._config.num_ranks == 1:
            return report.output
        return report.by_rank.get(self._sender, NO_REPORTS)

    def note_report(self, report: WorkerReport) -> None:
        """Release the blocks of transfers that the worker reports as over."""
        over = self.scheduler.update_connector_output(self.part_of(report))
        if over.failed_recving:
            self._must_wait.update(over.failed_recving)
            self._loading.difference_update(over.failed_recving)
        if report.num_lost_pools > self._num_lost_pools:
            self._note_lost_pools(report.num_lost_pools)
        if report.adapters is not None:
            self._must_abandon |= self._note_adapters(report.adapters)
        self._awaits_listing &= not report.is_listed
        if self._prefill is not None:
            rate = self._prefill.tokens_per_s
            rates = report.load_bytes_per_s, rate, report.storage_bytes_per_s
            self.scheduler.note_rates(*rates)

    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Finish a request that is done or aborted; return what to answer with it."""
        numbers = self._numbered(block_ids)
        known = self._request(request)
        known.num_volatile_tokens = 0
        self.scheduler.request_finished_all_groups(known, numbers)
        self._requests.pop(request.request_id, None)
        for names in (
            self._allocated,
            self._must_wait,
            self._must_compute,
            self._loading,
        ):
            names.discard(request.request_id)
        if not _asked_for(request, "do_remote_decode", _flag):
            return None
        return {"do_remote_prefill": True, "do_remote_decode": False}

    def _numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks; see `VllmBlockPool`."""
        return block_ids if self._pool is None else self._pool.numbered(block_ids)

    def has_pending_transfers(self) -> bool:
        """Whether vLLM must continue to step though it has no requests.

        Also until it is known what the store has, which the first request finds then.
        """
        pending = self.scheduler
        return (
            self._awaits_listing
            or pending.has_pending_stores()
            or pending.has_pending_loads()
        )

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of vLLM's pool are free as soon as a transfer ends."""
        return self._pool is not None and self._pool.has_only_pinned()

    def hit_tokens_from_storage(self, request: Any, num_external_tokens: int) -> int:
        """Count the tokens of a load that came from the store to the host for it."""
        num = self.scheduler.num_fetched_tokens(request.request_id)
        return min(num, num_external_tokens)

    def take_events(self) -> list[Any]:
        """Return the events of host and store since the last call, as vLLM's."""
        if self._events is None:
            return []
        return list(self._events.to_vllm(self.scheduler.take_events()))

    def take_stats(self) -> OffloadConnectorStats | None:
        """Return what changed, if that is due; see `StatsReader.take`."""
        is_last = not self._requests and not self.has_pending_transfers()
        return self._stats.take(is_last=is_last)

    def reset(self) -> bool:
        """Clear the host tier; return whether that was done.

        If not, as a load is under way or offered, that load fails, and nothing is
        offered until the host is cleared.
        """
        self._begin_reset()
        return self._try_reset()

    def _begin_reset(self) -> None:
        """Have the host tier be cleared as soon as that can be.

        The store is left at once: what is computed until then may be of other weights.
        What the device has now may be old, and is not stored later.
        """
        self._must_reset = True
        self._disable_storage()
        if self._pool is not None:
            self._pool.mark_old()
        for known in self._requests.values():
            known.has_old_kv = True

    def _try_reset(self) -> bool:
        """Clear the host tier if it has to be; return whether it is as it has to be."""
        if self._must_reset and self.scheduler.reset():
            self._must_reset = False
            self._num_forgotten_pools = self._num_lost_pools
            if self._pool is not None:
                self._pool.release()  # What stores in flight read is never published.
        return not self._must_reset

    def _disable_storage(self) -> None:
        """Leave the store, whose namespace has the weights of the start."""
        storage = self._config.storage
        if storage is None or storage.keep_on_reset or self._has_left_storage:
            return
        self.scheduler.disable_storage()
        self._has_left_storage = True
        self._awaits_listing = False
        _LOG.warning(
            "%s is not used any more until the next start: after a reset the weights "
            "may be others. storage_keep_on_reset=true keeps it, where they never are",
            storage.shown_url,
        )

    def _is_reset(self) -> bool:
        """Look for lost pools; do as `_try_reset` does."""
        worker = WORKERS.get(self._engine_id)
        # The process of a rank has a copy of it, which nothing changes any more.
        if worker is not None and self._config.num_ranks == 1:
            worker.look()
            self._must_abandon |= self._note_adapters(worker.adapters)
        num_lost_pools = LOST_POOLS.get(self._engine_id, 0)
        if num_lost_pools > self._num_lost_pools:
            self._note_lost_pools(num_lost_pools)
        return not self._must_reset or self._try_reset()

    def _note_lost_pools(self, num_lost_pools: int) -> None:
        """Note that there are more than were known of."""
        self._num_lost_pools = num_lost_pools
        self._begin_reset()

    def _note_adapters(self, loaded: Mapping[int, bytes]) -> bool:
        """Record what the worker has loaded.

        Returns:
            Whether a request has got other weights than the mark in its keys says.
        """
        before, self._loaded_adapters = self._loaded_adapters, loaded
        changed = dict(loaded.items() - before.items()) if loaded is not before else {}
        is_wrong = False
        for known in self._requests.values() if changed else ():
            lora = getattr(known.request, "lora_request", None)
            mark = changed.get(getattr(lora, "lora_int_id", 0))
            if mark is not None and mark != known.adapter:
                is_wrong |= not known.has_unknown_weights
                known.has_unknown_weights = True
        return is_wrong

    def _mark_of(self, lora: Any) -> bytes | None:
        """Return the mark of an adapter; None if it is unknown which weights it has."""
        mark = self._adapter_marks.mark(lora)
        loaded = self._loaded_adapters.get(getattr(lora, "lora_int_id", 0))
        if loaded in (None, mark) or getattr(lora, "load_inplace", False):
            return mark
        return None  # Its files have changed since they were loaded.

    def _unknown_mark(self, lora: Any) -> bytes:
        """Make a mark that no other request has."""
        name = str(getattr(lora, "lora_name", ""))
        if name not in self._unknown_adapters:
            self._unknown_adapters.add(name)
            _LOG.warning(
                "adapter %s: its files cannot be read, or have changed since they were "
                "loaded: KV of it is neither stored nor loaded until they are loaded "
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
        known = self._requests.get(request.request_id)
        if known is not None and known.request is request:
            return known
        lora = getattr(request, "lora_request", None)
        mark = b"" if lora is None else self._mark_of(lora)
        adapter = self._unknown_mark(lora) if mark is None else mark
        new = VllmRequest(request, len(self._config.groups), self._events, adapter)
        new.has_unknown_weights = mark is None
        new.num_volatile_tokens = self._volatile_tokens
        if known is not None:
            new.has_old_kv = known.has_old_kv
            new.has_unknown_weights |= known.has_unknown_weights
        self._requests[request.request_id] = new
        return new


@functools.cache
def _no_moves(num_lost_pools: int, is_idle: bool) -> StepMetadata:
    """Make the metadata of most steps, once."""
    return StepMetadata(NO_MOVES, num_lost_pools, is_idle)


def _skips_prefix_cache(request: Any) -> bool:
    """Whether vLLM may not read a request's KV from caches."""
    for owner in (request, getattr(request, "sampling_params", None)):
        skips = getattr(owner, "skip_reading_prefix_cache", None)
        if skips is not None:
            return bool(skips)
    params = getattr(request, "sampling_params", None)
    return getattr(params, "prompt_logprobs", None) is not None


def _asked_for(request: Any, name: str, read: Callable[[Any], Value]) -> Value | None:
    """Read what a client asks for in ``kv_transfer_params``."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict) or params.get(name) is None:
        return None
    return _read(request, f"kv_transfer_params[{name!r}]", read, params[name])


def _hinted(request: Any, action: str, read: Callable[[Any], Value]) -> Value | None:
    """Read what a router asks for in vLLM's ``kv_hints``, if it has such an action.

    Actions of other types are for others.
    """
    hints = getattr(request, "kv_hints", None)
    for own in getattr(hints, "actions", None) or ():
        major, _, _ = str(own.action_version).partition(".")
        if own.action_type == action and major == "1":
            return _read(request, f"the hint {action}", read, own.payload)
    return None


def _read(
    request: Any, name: str, read: Callable[[Any], Value], given: Any
) -> Value | None:
    """Read a value; what is wrong is logged, for it must not end the engine."""
    try:
        return read(given)
    except ValueError as error:
        _LOG.warning("request %s: %s is ignored: %s", request.request_id, name, error)
        return None


def _flag(given: Any) -> bool:
    if type(given) is not bool:
        raise ValueError(f"{shown(given)} must be true or false.")
    return given


def _num_tokens(given: Any) -> int:
    if type(given) is not int or given < 0:
        raise ValueError(f"{shown(given)} must be a number of tokens, 0 or more.")
    return given
