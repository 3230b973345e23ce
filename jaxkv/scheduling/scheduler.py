"""Decides which blocks move when, and for whom.

`OffloadScheduler` runs beside an engine's own scheduler and has the hooks of vLLM's
`SimpleCPUOffloadScheduler`, to be called in this order:

    once         bind_device_block_pool
    a request    get_num_new_matched_tokens -> the engine allocates its blocks
                 -> update_state_after_alloc
    a step       build_connector_meta -> `OffloadWorker` moves the blocks
                 -> the model runs -> update_connector_output
    preempted    request_preempted, before its blocks are freed
    at its end   request_finished, for an aborted request too

No hook blocks, and none touches an array of the model's device. docs/lifecycle.md shows
a step call by call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np

from jaxkv._util import strict_class
from jaxkv.policies.base import Policy
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.boundary import TierBelow, check_reports, make_boundaries
from jaxkv.scheduling.checks import (
    check_bound,
    check_count,
    check_report,
    check_times_are_alike,
    checked_step,
)
from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.eager import EagerStores
from jaxkv.scheduling.idle_warning import IdleWarning
from jaxkv.scheduling.lazy import LazyStores
from jaxkv.scheduling.listening import End, Listener, Listeners, Start
from jaxkv.scheduling.loads import NO_LOADS, Loads, mark_skipped
from jaxkv.scheduling.moves import Budget, reports_of
from jaxkv.scheduling.plan import Gate, Plan, View, checked_rates, plan
from jaxkv.scheduling.protocol import (
    NO_MOVES,
    NO_REPORTS,
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    TierMoves,
    checked_tables,
)
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.record.recording import Recording
from jaxkv.scheduling.reporting import Reporting
from jaxkv.scheduling.requests import Requests, retention_of, stop_of
from jaxkv.scheduling.rules import OffloadRules, check_groups
from jaxkv.scheduling.stats import Delays, OffloadStats
from jaxkv.scheduling.stores import NO_STORES, Stores, StoreSteps
from jaxkv.scheduling.whatif.auto import CANDIDATES, rules_of_auto
from jaxkv.scheduling.whatif.policy_state import open_policy_state
from jaxkv.scheduling.whatif.what_if import Shadowed, WhatIf
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import FullAttention, GroupSpec, as_groups
from jaxkv.search.hits import find_longest_hit
from jaxkv.search.tiers import check_pool
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import BlockKey

_LIST_POLL_S = 1e-3


class OffloadScheduler(Reporting):
    """Decides what is stored to the host and what is loaded back.

    Args:
        groups: The groups of the model's layers (see `jaxkv.search.groups`); an int
            for a model with one group, of full attention: the tokens of a block.
            Blocks of all groups share one pool, and are of the same number of bytes.
        num_host_blocks: Blocks of the host tier; see `jaxkv.num_host_blocks`.
        cache_policy: Which of them to evict when it is full; a name or a `Policy`; or
            "auto": the requests choose (`jaxkv.scheduling.whatif.auto`).
            With eager stores that sets `pause_unused_stores`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        executor: Who runs the decisions about the host; see `BlockIndex`.
        num_storage_blocks: Host blocks that the worker's store behind the host may
            hold; 0 for no store.
        is_private: Returns True for a key whose block must never be written to the
            store, such as KV of a LoRA adapter that the key does not identify; None to
            write any.
        clock: Returns seconds, for `delays`; no decision depends on it.
        policy_clock: Returns seconds, for a cache policy that needs to know when
            requests begin and finish, such as "hazard"; None for `clock`. Processes
            that serve one model together need one that returns the same in all of them
            in the same call, such as the number of steps over their usual rate.
        tiers_below: Tiers between the host and the store, the nearest first, or in
            place of a store; see docs/write-a-tier.md.
        policy_state: A file that keeps what "hazard" has learned, by itself or with
            "auto"; None for none. If it exists, "hazard" goes on with it.
        num_device_blocks: Blocks of the transfer engine's pool, which the bound pool
            must have; None if unknown.
        recorder: Records the requests, once a pool is bound; None not to. If there are
            several groups of layers, it records the blocks of the first with full
            attention, else of the first. The caller closes it.

    Raises:
        ValueError: A number is too small, the policy is unknown or was made for other
            sizes, or the rules and the groups do not go together; several processes
            would give such a policy their own times; or `policy_state` is of another
            policy or size.
        OSError: `policy_state` cannot be read.
        TypeError: The policy is neither a name nor a `Policy`.

    Attributes:
        groups: The groups.
        rules: The rules.
        num_host_blocks: Blocks of the host tier.
        num_storage_blocks: Host blocks that the store may hold; 0 if there is none.
        below: What moves between the host and each tier below it, the nearest first.
        recorder: Records the requests; None if there is none.
        delays: How long lookups took, and loads from the lookup to their arrival.
    """

    _NOT_STATE = "recorder", "_view", "_policy_state"

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Make a strict one where `JAXKV_STRICT` asks for it."""
        return super().__new__(strict_class(cls))

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
        tiers_below: Sequence[TierBelow] = (),
        policy_state: str | None = None,
        num_device_blocks: int | None = None,
    ) -> None:
        self.groups = groups = as_groups(groups)
        rules, is_auto = rules or OffloadRules(), cache_policy == AUTO
        self.rules = rules = rules_of_auto(rules, groups) if is_auto else rules
        check_groups(rules, groups)
        self.num_host_blocks = num_host_blocks
        self.num_storage_blocks = num_storage_blocks
        self._num_device_blocks = num_device_blocks
        self._manager = host = BlockIndex(
            groups[0].block_size * rules.blocks_per_host_block,
            num_host_blocks,
            CANDIDATES[0] if is_auto else cache_policy,
            enable_events,
            store_threshold=rules.store_threshold,
            max_unseen_blocks=rules.max_unseen_blocks,
            retention=rules.retention,
            remember_drops=rules.remember_drops,
            executor=executor,
            alternatives=CANDIDATES if is_auto else (),
        )
        if host.listens and policy_clock is None:
            setting = "retention=True" if rules.retention else f"{cache_policy=}"
            check_times_are_alike(setting)
        self._stats = OffloadStats()
        self._gate = Gate(rules, self._stats)
        self._book = Requests(groups, rules, host, policy_clock or clock)
        lower = tiers_below, num_storage_blocks, is_private, enable_events, executor
        self.below = make_boundaries(groups, host, rules, *lower)
        self._storage = self.below[len(tiers_below) :]  # The store's, if there is one.

        self.delays, self.recorder = Delays(clock), recorder
        policy = cache_policy if isinstance(cache_policy, str) else None
        self._whatif = WhatIf(host, policy)
        if is_auto or rules.shadow is not None:
            parts = host, policy, rules, self._stats, self._gate, self._book, executor
            self._whatif = Shadowed(*parts, is_alone=not self.below)
            weakref.finalize(self, self._whatif.close)
        listeners: list[Listener] = [self.delays]
        if recorder is not None:
            facts = groups, rules, num_host_blocks, policy
            listeners.append(Recording(recorder, *facts))
        idle_warning = IdleWarning(groups, rules, self._stats, host)
        listeners += self._whatif, idle_warning
        if policy_state is not None:
            self._policy_state = open_policy_state(policy_state, host, self._whatif)
            weakref.finalize(self, self._policy_state.save)
            listeners.append(self._policy_state)
        self._listeners = Listeners(listeners)
        idle_warning.listeners = weakref.proxy(self._listeners)

        watched = self._stats, self._listeners
        self._loads = Loads(groups, host, rules, self._book, *watched)
        on_arrival = self.below[0].note_stored if self.below else None
        self._stores = Stores(host, rules, *watched, on_arrival)
        self._store_steps = StoreSteps(groups, rules)
        self._chooser = self._make_chooser()
        # Requests that `request_preempted` was called for since the last step.
        self._preempted: set[str] = set()
        # Whether the next token reads all of a prefix.
        self._is_all_read = all(isinstance(spec, FullAttention) for spec in groups)
        self._pool = cast(DevicePool, _Unbound())
        self._view = cast(View, self._pool)

    def _make_chooser(self) -> Chooser:
        parts = self.groups, self._manager, self.rules, self._stores, self._listeners
        if self.rules.mode == "lazy":
            return LazyStores(*parts)
        return EagerStores(*parts, self._book, self._whatif.num_found_tokens)

    def bind_device_block_pool(self, pool: DevicePool) -> None:
        """Bind the pool whose blocks are held during transfers.

        Only with a `DeviceBlockPool` are blocks copied on the device.

        Raises:
            TypeError: It is no `DevicePool`.
            ValueError: It is no `DeviceBlockPool`, and the stores are lazy; it has
                blocks of another size than the groups, or is not of
                `num_device_blocks`; or the recorder serves another engine already. Then
                nothing changes.
        """
        check_pool(pool, self.groups)
        device = pool if isinstance(pool, DeviceBlockPool) else None
        if device is None and self.rules.mode == "lazy":
            raise ValueError(
                "mode='lazy' needs a DeviceBlockPool, which tells what it evicts next, "
                f"not a {type(pool).__name__}: choose mode='eager'."
            )
        check_bound(pool.num_blocks, self._num_device_blocks)
        for notify in self._listeners.bound:  # The recorder may refuse.
            notify(pool)
        factor, self._pool = self.rules.blocks_per_host_block, pool
        for boundary in self.below:
            boundary.limit_held(pool.num_blocks // factor)
        is_plain = len(self.groups) == factor == 1 and self._is_all_read
        copying = device if self.rules.copy_on_device else None
        tiers = copying, self._manager, self._loads, self.below
        self._view = View(
            self.groups, self.rules, self._book, self._gate, *tiers, is_plain
        )
        self._chooser.clear(pool)

    def warm_up(self) -> None:
        """Load or compile all decisions now, so that no request waits for them.

        This covers the device's pool, and `find_cached_prefix` over it. It takes
        seconds where the machine has not run them before, else part of one.
        """
        self._manager.warm_up()
        for boundary in self.below:
            boundary.tier.warm_up()
        self._pool.warm_up()
        for notify in self._listeners.warm_up:
            notify()
        if isinstance(self._pool, DeviceBlockPool):
            is_lazy = self.rules.mode == "lazy"
            self._manager.warm_up_beside(self._pool, is_lazy=is_lazy)
        no_blocks = [np.zeros(0, np.bool_)] * len(self.groups)
        find_longest_hit(self.groups, no_blocks, 0)

    def note_rates(
        self,
        load_bytes_per_s: float,
        prefill_tokens_per_s: float,
        storage_bytes_per_s: float | Sequence[float] = 0.0,
    ) -> None:
        """Set how fast loads, fetches and the model are, for `skip_slow_loads`.

        Processes that serve one model together must set the same.

        Args:
            load_bytes_per_s: Such as `OffloadWorker.load_bytes_per_s`; 0 if unknown.
            prefill_tokens_per_s: As the engine measured it; 0 if unknown.
            storage_bytes_per_s: Reads from the last tier below the host, such as
                `OffloadWorker.storage_bytes_per_s`; or from each of these tiers, the
                nearest first, such as `OffloadWorker.tier_bytes_per_s`. 0 if unknown.

        Raises:
            ValueError: A rate is not a number of at least 0, or there is not one for
                each tier. Then nothing changes.
        """
        rates = checked_rates(storage_bytes_per_s, len(self.below))
        self._gate.note_rates(load_bytes_per_s, prefill_tokens_per_s)
        for boundary, rate in zip(self.below, rates, strict=True):
            boundary.bytes_per_s = rate

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how much more of a request can be had than the device's own prefix.

        Both tiers are searched together: where the device has lost a block in the
        middle of a prefix and the host has it, what follows counts as well. Whatever is
        offered is held until it is loaded, the request finishes, or it asks again. The
        last token is never offered: its logits are needed.

        Args:
            request: A request that is about to be scheduled.
            num_computed_tokens: Tokens found on the device, whole blocks.

        Returns:
            How many tokens more can be had; None if the request has to ask again in a
            later step. And whether they take time, while the request waits; if not,
            they are there when the model of this step runs.

        Raises:
            ValueError: `num_computed_tokens` is no number of whole blocks, or the
                request has no keys for each group, or not as many as its full blocks.
                Then nothing changes.
            TypeError: An attribute of the request is missing or has another type. Then
                nothing changes. All calls that take a request raise this.
        """
        start_s, view = self.delays.clock(), self._view
        while True:
            planned = plan(view, request, num_computed_tokens)
            name = request.request_id  # Only now known to exist.
            if self.below and self._book.record_lookup(request):
                for boundary in self.below:
                    boundary.forget(name)  # It waits for blocks of its old keys.
                continue
            if planned.load_speed or planned.fetch_speeds:
                self._gate.count(planned.load_speed, *planned.fetch_speeds)
            if not self.below or self._ask_below(name, planned):
                break
            # The tier above has no room for the fetch.
            view = view._replace(below=planned.nearer)
        is_known = name in self._loads.by_request and planned.deferral != "loading"
        if is_known or planned.load is not None:
            self._loads.offer(self._pool, name, planned.load, planned.is_awaited)
        if planned.num_tokens is not None:
            # It may find no room on the device: what was fetched for it stays.
            for boundary in self.below:
                boundary.hold(name)
        self._book.num_local[name] = num_computed_tokens
        answer = planned.num_tokens, planned.is_awaited
        for notify in self._listeners.looked_up:
            notify(request, num_computed_tokens, *answer, start_s)
        return answer

    def _ask_below(self, name: str, planned: Plan) -> bool:
        """Send what a plan asks of tiers below the host.

        Returns False if a fetch finds no room in the tier above.
        """
        if planned.queue is not None:
            planned.queue.queue(name)
        for boundary in planned.searched:
            boundary.looked_up[name] = boundary.tier.num_found
        if planned.probe is not None:
            boundary, runs, wait_s = planned.probe
            boundary.probe(name, runs, wait_s)
        if planned.fetch is not None:
            boundary, fetch, num = planned.fetch
            if not boundary.fetch(name, fetch, num):
                return False
            for nearer in planned.nearer:  # There will be more to find.
                nearer.looked_up.pop(name, None)
        return True

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Record the device blocks of a request and what will be loaded into them.

        May be called again for a request that is known, with 0 tokens, to replace
        its block table.

        Args:
            request: The request.
            block_ids: All its device blocks, those found on the device first.
            num_external_tokens: How much of the offer the engine takes; 0 for nothing.

        Returns:
            The table once the offer is there, a list for each group: `block_ids`, with
            NULL_BLOCK for blocks that the offer leaves out, as the next token does not
            read them. The engine may free those blocks then; `DeviceBlockPool.cache`
            skips them. If the load fails, it goes on with `block_ids` and computes all.

        Raises:
            ValueError: That is no whole number of blocks, or more than
                `get_num_new_matched_tokens` offered, or, except with one group of full
                attention, less; the request's keys were rewritten since the offer;
                something in `block_ids` is no block's id, or a block is there twice
                where one is loaded; or `retention` is no `Retention`. Then nothing
                changes.
            TypeError: `block_ids` is not a list or an array of ints.
        """
        requests, pool = self._book, self._pool
        limits = requests.check_stores(request)
        if self._manager.retains:
            retention_of(request)  # Refuses others.
        name = request.request_id
        num_external = check_count("num_external_tokens", num_external_tokens, name)
        tables = self._tables(name, block_ids)
        is_new = name not in requests.by_request
        keys = requests.checked(request)
        try:
            load = self._loads.take(pool, request, keys, tables, num_external)
        except ValueError:
            if is_new:  # The engine may never finish it.
                requests.forget(name)
            raise
        # One that declines and has no blocks stays in the queue: it is yet to begin.
        begins = bool(num_external) or any(tables)
        for boundary in self.below:
            (boundary.forget if begins else boundary.decline)(name)
        hits = requests.end_lookup(name), num_external
        if num_external:
            self._store_steps.note_tokens(num_external)
        self._chooser.begun(request, keys, tables, *hits, limits)
        if begins and name not in requests.begun:
            self._begin(request, keys, *hits)
        if self._is_all_read:
            return [list(table) for table in tables]
        return mark_skipped(self.groups, pool, keys, tables, *hits, load)

    def _begin(
        self,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_local: int | None,
        num_external: int,
    ) -> None:
        """Count one use of a request's blocks, however often it has asked."""
        host, requests = self._manager, self._book
        self._stats.count_request(request, num_local, num_external)
        requests.begin(request, keys)
        used = requests.row_keys(keys)
        for boundary in self.below:
            boundary.note_asked(used)
        host.count_lookup(used)
        host.touch(used)
        if self._listeners.begun:
            has_load = request.request_id in self._loads.by_request
            hits = num_local, num_external, has_load
            start = Start(request, keys, *hits, requests.now_ms)
            for notify in self._listeners.begun:
                notify(start)

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step.

        Args:
            output: What the engine is about to compute. The requests'
                `num_computed_tokens` do not count it yet.

        Returns:
            The transfers.

        Raises:
            TypeError: `output`, or a request that has filled a block, has a value of
                another type. Then nothing changes.
            ValueError: Something in `SchedulerOutput.new_block_ids` is no block's id,
                or a number of tokens is negative. Then nothing changes.
        """
        pool, loads, stores = self._pool, self._loads, self._stores
        scheduled, num_tokens = checked_step(output)
        tables = {}
        for name, table in output.new_block_ids.items():
            tables[name] = self._tables(name, table)
        need_flush, preempted = False, []
        if output.preempted_req_ids:
            need_flush = self.rules.flush_on_preemption
            # Who was preempted by a call may have been admitted again since, and loads.
            called = self._preempted
            preempted = [
                name for name in output.preempted_req_ids if name not in called
            ]
        is_due = True
        if self._store_steps.batch_blocks:
            must_store = need_flush or not num_tokens or bool(stores.waiting.keys)
            is_due = self._store_steps.is_due(pool, must_store=must_store)
        # The last check: it reads attributes of the requests that are ready.
        ready = self._chooser.find_ready(scheduled, preempted) if is_due else ()

        for name in preempted:
            loads.drop(pool, name)
        self._preempted.clear()
        if self._store_steps.batch_blocks:
            self._store_steps.begin(num_tokens, is_due=is_due)
        self._chooser.note_step(scheduled, tables, preempted)
        budget, loading, storing = None, NO_LOADS, NO_STORES
        if loads.by_request and loads.has_waiting:
            budget = self._budget()
            loading = loads.issue(pool, budget)
        if is_due:
            # After the loads, which release the free blocks that they copy.
            self._chooser.offer_step(pool, ready)
        if stores.waiting.keys:
            storing = stores.issue(budget or self._budget())
        below: tuple[TierMoves, ...] = ()
        for boundary in self.below:
            if (move := boundary.issue()) is not None:
                below += (move,)
        if loading is NO_LOADS and storing is NO_STORES and not (need_flush or below):
            return NO_MOVES  # As in most steps.
        return OffloadMetadata(**loading, **storing, need_flush=need_flush, below=below)

    def _budget(self) -> Budget:
        in_flight = self._loads.in_flight.num_blocks + self._stores.in_flight.num_blocks
        return Budget(self.rules.max_blocks_in_flight, in_flight)

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release what no worker reads or writes any more.

        Args:
            output: What workers saw complete since the last time.

        Returns:
            What has ended on all of them, without the loads that no request waits for.

        Raises:
            TypeError: A field of it has another type. Then nothing changes.
            ValueError: It reports something that is not in flight. Then nothing
                changes.
        """
        if output is NO_REPORTS:
            return output
        check_report(output)
        has_loads = output.finished_recving or output.failed_recving
        has_stores = output.completed_store_events or output.failed_store_events
        if not (has_loads or has_stores or output.below):
            return output  # As in most steps.
        pool = self._pool
        finished: tuple[str, ...] = ()
        failed: tuple[str, ...] = ()
        stores = reports_of(output.completed_store_events, output.failed_store_events)
        self._stores.in_flight.check(stores)
        if output.below:
            check_reports(self.below, output.below)
        if has_loads:
            loads = reports_of(output.finished_recving, output.failed_recving)
            finished, failed = map(tuple, self._loads.report(pool, loads))
            for notify in self._listeners.loaded:
                notify(finished, failed)
            self._stores.num_changes += bool(finished or failed)
            for request_id in failed:
                self._chooser.recompute(request_id)
        stored, unstored = map(tuple, self._stores.report(pool, stores))
        if output.below:
            for boundary in self.below:
                boundary.report(output.below)
            # What has ended may make room on the host.
            self._stores.num_changes += 1
        return ConnectorOutput(finished, failed, stored, unstored, output.below)

    def request_preempted(self, request: Request) -> None:
        """Record that a request is about to lose its blocks, and will come back.

        What it has computed and not stored is stored with the next step. Optional: a
        request that is only named in `SchedulerOutput.preempted_req_ids` loses that,
        and may not be admitted again before that step.

        Args:
            request: The request, with its old `num_computed_tokens`.
        """
        limits = self._book.check_stores(request)
        self._book.check_known_keys(request)
        self._leave(request, limits)
        self._preempted.add(request.request_id)

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Record that a request has finished, by itself or by abort.

        Its last full blocks are stored with the next step's, and so are those that the
        host evicted meanwhile. The engine may free its
        blocks at once: what is in flight is held here until it has arrived.

        Args:
            request: The request, its `num_computed_tokens` final.
            block_ids: All its device blocks, if they are at hand.

        Returns:
            Whether the engine has to keep the blocks, never; and nothing else.

        Raises:
            ValueError: `stop` is no reason to stop, `retention` is no `Retention`, or
                something in `block_ids` is no block's id. Then nothing changes.
        """
        requests = self._book
        limits, stop = requests.check_stores(request), stop_of(request)
        if self._manager.retains:
            retention_of(request)  # Refuses others.
        name = request.request_id
        tables = None if block_ids is None else self._tables(name, block_ids)
        requests.check_known_keys(request)
        if tables is not None:
            self._chooser.replace_tables(request, tables, limits)
        self._leave(request, limits)
        has_begun = name in requests.begun
        keys = requests.by_request[name] if has_begun else ()
        if has_begun and self._manager.listens:
            requests.finish(request, keys, stop)
        if self._listeners.finished:
            has_load = name in self._loads.by_request
            end = End(request, keys, stop, has_begun, has_load, requests.now_ms)
            for notify in self._listeners.finished:
                notify(end)
        for boundary in self.below:
            boundary.finish(name)
        requests.forget(name)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, None]:
        """See `request_finished`; for an engine whose tables have groups."""
        return self.request_finished(request, block_ids)

    def _leave(self, request: Request, limits: tuple[int, int]) -> None:
        """Release a request's load, and store what it leaves behind."""
        name = request.request_id
        if name in self._loads.by_request:
            self._loads.drop(self._pool, name)
        for notify in self._listeners.left:
            notify(name)
        self._book.end_lookup(name)
        self._chooser.finish(self._pool, request, limits)

    def wait_for_storage(
        self, worker: OffloadWorker, timeout_s: float | None = None
    ) -> bool:
        """Wait until the store is listed, so that the first request finds all it has.

        For an engine that starts; without it requests find what the listing has found
        so far. Between steps, once a pool is bound. Processes that serve one model call
        it together, and all return the same.

        Args:
            worker: The worker of this process, as `OffloadConfig.connect` returns it.
            timeout_s: Seconds to wait at most, by the clock of the first process if
                there are several; None for the storage's deadline. The listing goes on
                after that.

        Returns:
            Whether the store is listed: not if that takes longer, or the store fails.
            True at once where there is none.

        Raises:
            RuntimeError: The worker has no store, but the scheduler has.
            AgreementError: As `OffloadWorker.start`.
        """
        if timeout_s is None and worker.storage is not None:
            timeout_s = worker.storage.deadline_s
        end_s = time.monotonic() + (timeout_s or 0.0)
        while not self.is_storage_listed:
            is_late = time.monotonic() >= end_s
            output = worker.poll_storage(is_late=is_late)
            self.update_connector_output(output)
            if any(report.listed is False for report in output.below):
                return False
            time.sleep(_LIST_POLL_S)
        return True

    def reset(self) -> bool:
        """Forget all that the host tier holds, as after a change of weights.

        What a cache policy has learned of requests stays. Stores in flight end
        without a trace. Reset the device's pool as well, and change the keys'
        `Namespace.weights_epoch`.

        Returns:
            Whether it was done; not while a load is in flight or offered, as its
            request would go on with old blocks.
        """
        if self.has_pending_loads():
            return False
        self._stores.forget(self._pool)
        self._manager.clear()
        for boundary in self.below:
            boundary.reset()
        self._chooser.clear(self._pool)
        for notify in self._listeners.reset:
            notify()
        return True

    def disable_storage(self) -> None:
        """Stop reading and writing the store, for good.

        For weights that have changed where the namespace of the store cannot change
        with them. What is there stays. Call it when `reset` was done, or could not be
        done yet, and before anything is asked for again.
        """
        for boundary in self._storage:
            boundary.disable()

    def _tables(self, request_id: str, table: BlockTable) -> list[list[int]]:
        """Return a checked block table as a list for each group."""
        num_blocks = self._pool.num_blocks
        return checked_tables(request_id, table, len(self.groups), num_blocks)


class _Unbound:
    """Stands for the pool and for the view until a pool is bound."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("Call bind_device_block_pool() before scheduling.")
