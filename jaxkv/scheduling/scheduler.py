"""Which blocks move when, and for whom.

`OffloadScheduler` stands beside an engine's own scheduler and has the hooks of vLLM's
`SimpleCPUOffloadScheduler`, to be called in this order:

    once         bind_device_block_pool
    a request    get_num_new_matched_tokens -> the engine allocates its blocks
                 -> update_state_after_alloc
    a step       build_connector_meta -> `jaxkv.scheduling.worker` moves the blocks
                 -> the model runs -> update_connector_output
    preempted    request_preempted, before its blocks are freed
    at its end   request_finished, for an aborted request too

No hook blocks, and none touches an array of the model's device. docs/lifecycle.md shows
a step call by call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxkv._util import shown
from jaxkv.policies.base import Policy
from jaxkv.scheduling.eager import EagerStores
from jaxkv.scheduling.explain import Explanation, explain
from jaxkv.scheduling.gate import Gate
from jaxkv.scheduling.lazy import LazyStores
from jaxkv.scheduling.loads import Loads, flat_ids, mark_skipped
from jaxkv.scheduling.news import RequestNews, stop_of
from jaxkv.scheduling.prefix import row_keys
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    StorageReport,
    checked_tables,
)
from jaxkv.scheduling.record import TraceRecorder
from jaxkv.scheduling.request_keys import RequestKeys
from jaxkv.scheduling.rules import OffloadRules, check_rules
from jaxkv.scheduling.stats import Delays, InTransit, OffloadStats
from jaxkv.scheduling.storage import Storage
from jaxkv.scheduling.stores import Stores
from jaxkv.search.groups import FullAttention, GroupSpec, as_groups
from jaxkv.search.hits import find_longest_hit
from jaxkv.tiers.base import OffloadingEvent
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.host import OffloadingManager
from jaxkv.tiers.storage import StorageTier
from jaxkv.types import BlockKey, Stop

_NOTHING = OffloadMetadata(NO_EVENT, (), (), {}, NO_EVENT, (), (), need_flush=False)
_NO_REPORTS = ConnectorOutput()


class OffloadScheduler:
    """Decides what is stored to the host and what is loaded back.

    Args:
        groups: The groups of the model's layers (see `jaxkv.search.groups`); an int
            for a model with one group, of full attention: the tokens of a block.
            Blocks of all groups share one pool, and are of the same number of bytes.
        num_host_blocks: Blocks of the host tier; see `jaxkv.num_host_blocks`.
        cache_policy: Which of them to evict when it is full; a name or a `Policy`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        executor: Who runs the decisions about the host; see `OffloadingManager`.
        num_storage_blocks: Host blocks that a store behind the host may hold, which the
            worker has; 0 for none.
        is_private: Tells the keys of blocks that are never written to the store, such
            as those of an adapter of which the key says too little; None for none.
        clock: Seconds since some moment, for `delays`; no decision depends on it.
        policy_clock: Seconds for a cache policy that wants to be told when requests
            begin and finish, such as "hazard"; None for `clock`. Processes that serve
            one model together need one that says the same in all of them in the same
            call, such as the number of steps over their usual rate.
        recorder: Records the requests, once a pool is bound; None not to. Of several
            groups of layers it records the blocks of the first with full attention,
            or of the first if there is none. It is closed by whoever made it.

    Raises:
        ValueError: If a number is too small, the policy is not known or was made for
            other sizes, or the rules and the groups do not go together; if several
            processes would tell such a policy their own times.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        groups: The groups.
        rules: The rules.
        num_host_blocks: Blocks of the host tier.
        num_storage_blocks: Host blocks that the store may hold; 0 if there is none.
        recorder: Records the requests; None if nobody does.
        delays: How long look-ups took, and loads from the look-up to their arrival.
    """

    def __init__(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec],
        num_host_blocks: int,
        cache_policy: str | Policy = "lru",
        enable_events: bool = False,
        *,
        rules: OffloadRules | None = None,
        executor: ExecutorName = "native",
        num_storage_blocks: int = 0,
        is_private: Callable[[BlockKey], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        policy_clock: Callable[[], float] | None = None,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.groups = as_groups(groups)
        self.rules = rules = rules or OffloadRules()
        self.num_host_blocks = num_host_blocks
        self.num_storage_blocks = num_storage_blocks
        check_rules(rules, self.groups)
        self._manager = OffloadingManager(
            self.groups[0].block_size * rules.blocks_per_host_block,
            num_host_blocks,
            cache_policy,
            enable_events,
            store_threshold=rules.store_threshold,
            max_unseen_blocks=rules.max_unseen_blocks,
            retention=rules.retention,
            remember_drops=rules.remember_drops,
            executor=executor,
        )
        host = self._manager
        self.delays = Delays(clock)
        self._stats = OffloadStats()
        self._gate = Gate(rules, self._stats)
        self._keys = RequestKeys(len(self.groups))
        parts = self.groups, host, rules
        self._loads = Loads(*parts, self._gate, self._keys, self._stats)
        self._storage: Storage | None = None
        if num_storage_blocks:
            if rules.storage_write == "on_evict" and not host.tells_victims:
                raise ValueError(
                    f"storage_write='on_evict' needs cache_policy='lru', "
                    f"executor='native' and retention=False, not {cache_policy!r}, "
                    f"{executor!r} and {rules.retention}: others do not tell what they "
                    "would evict."
                )
            tier = StorageTier(
                host.block_size, num_storage_blocks, enable_events, executor=executor
            )
            told = self._gate, self._keys, self._stats, is_private
            self._storage = Storage(self.groups, host, tier, rules, *told)
        self._stores = Stores(
            host,
            rules,
            self._stats,
            None if self._storage is None else self._storage.note_stored,
        )
        self._eager: EagerStores | None = None
        self._lazy: LazyStores | None = None
        if rules.mode == "eager":
            self._eager = EagerStores(*parts, self._stores, self._keys)
        else:
            self._lazy = LazyStores(self.groups, rules, self._stores)
        # Tokens that requests had found on the device when they asked.
        self._num_local: dict[str, int] = {}
        # Requests that count as having used their blocks.
        self._known: set[str] = set()
        if host.listens and policy_clock is None and _serves_with_others():
            chosen = "retention=True" if rules.retention else f"{cache_policy=}"
            raise ValueError(
                f"{chosen} decides by the time, and each process has its own: "
                "their tiers would evict other blocks. Pass a policy_clock that says "
                "the same in all of them, or choose what asks for no time."
            )
        self._news = RequestNews(
            host,
            [spec.block_size for spec in self.groups],
            rules.blocks_per_host_block,
            policy_clock or clock,
        )
        self.recorder = recorder
        self._policy_name = cache_policy if isinstance(cache_policy, str) else None
        # The group of layers whose blocks are recorded.
        self._recorded = next(
            (n for n, own in enumerate(self.groups) if isinstance(own, FullAttention)),
            0,
        )
        self._bound_pool: DeviceBlockPool | None = None

    def bind_device_block_pool(self, pool: DeviceBlockPool) -> None:
        """Take the pool whose blocks are to be held during transfers.

        Raises:
            ValueError: The recorder serves another engine already.
        """
        if self.recorder is not None and self._bound_pool is None:
            factor = self.rules.blocks_per_host_block
            self.recorder.describe(
                self.groups[self._recorded].block_size * factor,
                keys_per_id=factor,
                policy=self._policy_name,
                host_blocks=self.num_host_blocks,
                device_blocks=(pool.num_blocks - 1) // factor,
                groups=len(self.groups),
            )
        self._bound_pool = pool

    @property
    def num_host_blocks_held(self) -> int:
        """Blocks of the host tier that hold something, stores in flight included."""
        return self._manager.num_held_blocks

    @property
    def num_storage_blocks_held(self) -> int:
        """Host blocks that the store holds, as far as known, writes included."""
        return self._storage.tier.num_held_blocks if self._storage else 0

    @property
    def stats(self) -> OffloadStats:
        """How stores and loads ended so far."""
        host = self._manager
        return dataclasses.replace(
            self._stats,
            num_evicted=host.num_evicted,
            num_skipped=host.num_skipped,
            num_storage_evicted=self._storage.tier.num_evicted if self._storage else 0,
        )

    @property
    def in_transit(self) -> InTransit:
        """What is on its way now; any thread may ask, as for `stats`."""
        return InTransit(*self._stores.in_transit, *self._loads.in_transit)

    def has_pending_stores(self) -> bool:
        """Tell whether blocks are on their way to the host, or on to the store.

        An engine without requests goes on stepping while there are.
        """
        if self._storage is not None and self._storage.has_writes:
            return True
        return len(self._stores) > 0

    def has_pending_loads(self) -> bool:
        """Tell whether blocks are on their way back, for whomever."""
        if self._storage is not None and self._storage.has_fetches:
            return True
        return len(self._loads) > 0

    def warm_up(self) -> None:
        """Load, or compile, all decisions now, so that no request waits for that.

        Those of the device's pool, too, and of `find_cached_prefix` over it. It takes
        seconds where the machine has not run them before, else part of one.
        """
        self._manager.warm_up(step_by_step=False)
        if self._storage is not None:
            self._storage.tier.warm_up(step_by_step=False)
        self._pool.warm_up()
        self._loads.warm_up(self._pool)
        no_blocks = [np.zeros(0, np.bool_)] * len(self.groups)
        find_longest_hit(self.groups, no_blocks, 0)

    def note_rates(
        self,
        load_bytes_per_s: float,
        prefill_tokens_per_s: float,
        storage_bytes_per_s: float = 0.0,
    ) -> None:
        """Tell how fast loads and the model are, for `skip_slow_loads`.

        Processes that serve one model together must be told the same.

        Args:
            load_bytes_per_s: Such as `OffloadWorker.load_bytes_per_s`; 0 if unknown.
            prefill_tokens_per_s: As the engine measured it; 0 if unknown.
            storage_bytes_per_s: Such as `OffloadWorker.storage_bytes_per_s`; 0 if
                unknown.
        """
        rates = load_bytes_per_s, prefill_tokens_per_s, storage_bytes_per_s
        self._gate.note_rates(*rates)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask how much more of a request can be had than the device's own prefix.

        Both tiers are searched together: where the device has lost a block in the
        middle of a prefix, and the host has that one, what follows counts as well.
        Whatever is offered is held until it is loaded, until the request finishes, or
        until it asks again. The last token is never offered: its logits are needed.

        Args:
            request: A request that is about to be scheduled.
            num_computed_tokens: Tokens found on the device, whole blocks.

        Returns:
            How many tokens more can be had; None if the request is to ask again in a
            later step. And whether they take time, while the request waits; if not,
            they are there when the model of this step runs.

        Raises:
            ValueError: If `num_computed_tokens` is no number of whole blocks, or the
                request has no keys for each group. Then nothing changes.
        """
        start_s = self.delays.clock()
        self._check_num_computed(request, num_computed_tokens)
        offer: tuple[int | None, bool]
        if self._storage is not None and self._waits_for_storage(
            request, num_computed_tokens
        ):
            offer = None, False
        else:
            offer = self._loads.query(self._pool, request, num_computed_tokens)
            if self._storage is not None and offer[0] is not None:
                # What was fetched for it is held by the offer from now on.
                self._storage.release(request.request_id)
        self._num_local[request.request_id] = num_computed_tokens
        self.delays.note_lookup(request.request_id, start_s, *offer)
        return offer

    def num_fetched_tokens(self, request_id: str) -> int:
        """Count the tokens that came from the store because a request waited for them.

        Those of its last fetch, until it finishes.
        """
        if self._storage is None:
            return 0
        return self._storage.num_fetched_tokens.get(request_id, 0)

    def explain(
        self, request: Request, num_computed_tokens: int | None = None
    ) -> Explanation:
        """Say of each block of a request where it is or why not; nothing changes.

        Args:
            request: A request, whether it is known or not.
            num_computed_tokens: Tokens found on the device, whole blocks; None to look
                for the device's own prefix.

        Raises:
            ValueError: If that is no number of whole blocks.
        """
        if num_computed_tokens is not None:
            self._check_num_computed(request, num_computed_tokens)
        tiers = self._pool, self._manager, self._loads
        what = request, num_computed_tokens, self._storage
        return explain(self.groups, self.rules, *tiers, *what)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Note the device blocks of a request and what is to be loaded into them.

        May be called again for a request that is known, with 0 tokens, to replace
        its block table.

        Args:
            request: The request.
            block_ids: All its device blocks, those found on the device first.
            num_external_tokens: How much of the offer the engine takes; 0 for nothing.

        Returns:
            The table once the offer is there, a list for each group: `block_ids`, but
            NULL_BLOCK for what the offer leaves out, as the next token does not read
            it. The engine may free those blocks then; `DeviceBlockPool.cache` skips
            them. If the load fails, it goes on with `block_ids` and computes them.

        Raises:
            ValueError: If that is no whole number of blocks, or more than
                `get_num_new_matched_tokens` offered; if there are several groups, or
                one that is not of full attention, less; if something in `block_ids`
                is no block's id, or a block is there twice where one is loaded; if
                the request has a `retention` that is none. Then nothing changes.
        """
        self._news.check(request)
        pool, name = self._pool, request.request_id
        tables, keys = self._tables(name, block_ids), self._keys.of(request)
        load = self._loads.take(pool, request, tables, num_external_tokens)
        if self._storage is not None:
            self._storage.forget(name)
        num_local = self._num_local.pop(name, None)
        if self._eager is not None:
            self._eager.register(request, tables, num_local, num_external_tokens)
        if name not in self._known:
            self._known.add(name)
            self._stats.count_request(request, num_local, num_external_tokens)
            self._news.begin(request, keys)
            if self.recorder is not None:
                self._record(request, keys, num_local, num_external_tokens)
            # Once, however often it asked: a request uses its blocks once.
            used = row_keys(self.groups, keys, self.rules.blocks_per_host_block)
            if self._storage is not None:
                self._storage.note_asked(used)
            self._manager.count_lookup(used)
            self._manager.touch(used)
        prefix = keys, tables, num_local, num_external_tokens
        return mark_skipped(self.groups, pool, *prefix, load)

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step.

        Args:
            output: What the engine is about to compute. The requests'
                `num_computed_tokens` do not count it yet.

        Returns:
            The transfers.

        Raises:
            ValueError: If something in `SchedulerOutput.new_block_ids` is no block's
                id. Then nothing changes.
        """
        pool = self._pool
        new_tables = {
            request_id: self._tables(request_id, table)
            for request_id, table in output.new_block_ids.items()
        }
        for request_id in output.preempted_req_ids:
            self._loads.drop(pool, request_id)
        if self._eager is not None:
            self._eager.offer_step(pool, output, new_tables)
        in_flight = self._loads.num_blocks_in_flight + self._stores.num_blocks_in_flight
        most = self.rules.max_blocks_in_flight
        if most is not None:
            most = max(most - in_flight, 0)
        # A load that the step itself writes cannot be put off: the request runs in it.
        most_loaded = None if self.rules.load_in_step else most
        load_event, loads, copies = self._loads.issue(pool, most_loaded, in_flight)
        num_leaving = sum(len(load.written_blocks) for load in loads)
        if most is not None:
            # A load that is held up waits for room: stores may not take it.
            most = 0 if self._loads.is_held_up else max(most - num_leaving, 0)
        if self._lazy is not None:
            # After the loads, which let go of the free blocks that they copy.
            self._lazy.offer_step(pool)
        store_event, stores = self._stores.issue(most, in_flight + num_leaving)
        need_flush = self.rules.flush_on_preemption and bool(output.preempted_req_ids)
        moves = None if self._storage is None else self._storage.issue()
        if not (loads or copies or stores.keys or need_flush or moves):
            return _NOTHING
        names = tuple(load.request_id for load in loads)
        return OffloadMetadata(
            load_event=load_event,
            load_device_blocks=flat_ids(load.targets for load in loads),
            load_host_blocks=flat_ids(load.host_blocks for load in loads),
            load_event_to_reqs={load_event: names} if loads else {},
            store_event=store_event,
            store_device_blocks=tuple(stores.device_blocks),
            store_host_blocks=tuple(stores.host_blocks),
            need_flush=need_flush,
            copy_from_blocks=flat_ids(load.sources for load in copies),
            copy_to_blocks=flat_ids(load.copy_targets for load in copies),
            load_sizes=tuple(len(load.host_blocks) for load in loads),
            load_in_step=self.rules.load_in_step and bool(loads),
            storage=moves,
        )

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release what no worker reads or writes any more.

        Args:
            output: What workers saw complete since the last time.

        Returns:
            What is over on all of them, less the loads that nobody waits for.

        Raises:
            ValueError: If it tells of something that is not in flight. Then nothing
                changes.
        """
        if output == _NO_REPORTS:
            return output
        pool = self._pool
        stores = output.completed_store_events, output.failed_store_events
        self._stores.check_reports(*stores)
        if output.storage:
            self._check_storage(output.storage)
        finished, failed = self._loads.report(
            pool, output.finished_recving, output.failed_recving
        )
        self.delays.note_loads(finished, failed)
        if finished or failed:
            self._stores.num_changes += 1
        if self._eager is not None:
            for request_id in failed:
                self._eager.recompute(request_id)
        completed, lost = self._stores.report(pool, *stores)
        if output.storage and self._storage is not None:
            self._storage.report(output.storage)
            # What has ended may make room on the host.
            self._stores.num_changes += 1
        return ConnectorOutput(
            tuple(finished),
            tuple(failed),
            tuple(completed),
            tuple(lost),
            output.storage,
        )

    def request_preempted(self, request: Request) -> None:
        """Note that a request is about to lose its blocks, and will come back.

        What it has computed and not stored is stored with the next step. Optional: a
        request that is only named in `SchedulerOutput.preempted_req_ids` loses that.

        Args:
            request: The request, its `num_computed_tokens` those of before.
        """
        self._part_with(request)

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Note that a request is over, by itself or by abort.

        Its last full blocks are stored with the next step, and those that the host
        evicted meanwhile. The engine may free its blocks at once: what is in flight is
        held here until it has arrived.

        Args:
            request: The request, its `num_computed_tokens` final.
            block_ids: All its device blocks, if they are at hand.

        Returns:
            Whether the engine has to keep the blocks, never; and nothing else.

        Raises:
            ValueError: If it says why it stopped, and that is no such reason, or has a
                `retention` that is none; if something in `block_ids` is no block's id.
                Then nothing changes.
        """
        stop = stop_of(request)
        self._news.check(request)
        if block_ids is not None:
            tables = self._tables(request.request_id, block_ids)
            if self._eager is not None:
                self._eager.replace_tables(request, tables)
        self._part_with(request)
        is_told = self._manager.listens or self.recorder is not None
        if is_told and request.request_id in self._known:
            keys = self._keys.of(request)
            self._news.finish(request, keys, stop)
            if self.recorder is not None:
                self._record_end(request, keys, stop)
        if self._storage is not None:
            self._storage.forget(request.request_id)
            self._storage.num_fetched_tokens.pop(request.request_id, None)
        self._known.discard(request.request_id)
        self._keys.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, None]:
        """Do as `request_finished` does, for an engine whose tables have groups."""
        return self.request_finished(request, block_ids)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the events of the host tier, and of the store's, since last time."""
        yield from self._manager.take_events()
        if self._storage is not None:
            yield from self._storage.tier.take_events()

    def reset(self) -> bool:
        """Forget all that the host tier holds, as after a change of weights.

        Stores in flight end without a trace. Reset the device's pool as well, and
        change the keys' `Namespace.weights_epoch`.

        Returns:
            Whether it was done; not while a load is under way or offered, as its
            request would go on with old blocks.
        """
        if self.has_pending_loads():
            return False
        self._stores.forget(self._pool)
        self._manager.clear()
        if self._storage is not None:
            self._storage.reset()
        if self._eager is not None:
            self._eager.clear()
        if self._lazy is not None:
            self._lazy.clear()
        return True

    def leave_storage(self) -> None:
        """Read and write nothing of the store any more, for good.

        For weights that have changed where the namespace of the store cannot change
        with them. What is there stays. Call it when `reset` was done, or could not be
        done yet: nothing is written from now on. It is to be done before anything is
        asked for again.
        """
        if self._storage is not None:
            self._storage.leave()

    @property
    def _pool(self) -> DeviceBlockPool:
        if self._bound_pool is None:
            raise RuntimeError("Call bind_device_block_pool() before scheduling.")
        return self._bound_pool

    def _tables(self, request_id: str, table: BlockTable) -> list[list[int]]:
        """Give a block table as a list for each group, after a look at its ids."""
        num_blocks = self._pool.num_blocks
        return checked_tables(request_id, table, len(self.groups), num_blocks)

    def _check_num_computed(self, request: Request, num_tokens: int) -> None:
        """Refuse a number of computed tokens that is not one of whole blocks."""
        for spec in self.groups:
            if num_tokens < 0 or num_tokens % spec.block_size:
                raise ValueError(
                    f"num_computed_tokens={shown(num_tokens)} of request "
                    f"{shown(request.request_id)} must be of whole blocks: a multiple "
                    f"of {spec.block_size}."
                )

    def _record(
        self,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_local: int | None,
        num_external: int,
    ) -> None:
        """Record that a request begins."""
        assert self.recorder is not None
        num_prompt = getattr(request, "num_prompt_tokens", request.num_tokens)
        found = (None, None) if num_local is None else (num_local, num_external)
        self.recorder.begin(
            request.request_id, keys[self._recorded], num_prompt, *found
        )

    def _record_end(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], stop: Stop | None
    ) -> None:
        """Record that a request is over, and what it leaves to be stored."""
        assert self.recorder is not None
        num_computed = 0
        if not self.rules.prompt_only:
            num_ahead = getattr(request, "num_output_placeholders", 0)
            num_computed = request.num_computed_tokens - num_ahead
        self.recorder.finish(
            request.request_id,
            keys[self._recorded],
            request.num_tokens,
            num_computed,
            stop,
        )

    def _waits_for_storage(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether a request waits for the store; begins a fetch for it if need be."""
        assert self._storage is not None
        pool, name = self._pool, request.request_id
        if self._loads.is_under_way(name):
            return False
        if not self._storage.hold_up(pool, request, num_computed_tokens):
            return False
        self._loads.drop(pool, name)
        return True

    def _check_storage(self, reports: Sequence[StorageReport]) -> None:
        """Refuse reports of a store that are not due."""
        if self._storage is None:
            raise ValueError(
                f"{len(reports)} reports of a store came, and the scheduler has none: "
                "give it num_storage_blocks."
            )
        self._storage.check_reports(reports)

    def _part_with(self, request: Request) -> None:
        """Let go of a request's load, and store what it leaves behind."""
        self._loads.drop(self._pool, request.request_id)
        self.delays.forget(request.request_id)
        self._num_local.pop(request.request_id, None)
        if self._eager is not None:
            self._eager.finish(self._pool, request.request_id)


def _serves_with_others() -> bool:
    """Whether several processes run one program; starts no backend to find out."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
