"""Decides which blocks each step moves, and the requests that they serve.

`OffloadScheduler` runs next to an engine's scheduler and has the hooks of vLLM's
`SimpleCPUOffloadScheduler`, which must be called in this order:

    once            bind_device_block_pool
    per request     get_num_new_matched_tokens -> the engine allocates its blocks
                    -> update_state_after_alloc
    per step        build_connector_meta -> `OffloadWorker` moves the blocks
                    -> the model runs -> update_connector_output
    on preemption   request_preempted, before the request's blocks are freed
    at its end      request_finished, for an aborted request as well

No hook blocks or touches an array on the model's device. docs/lifecycle.md shows a step
call by call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, strict_class
from jaxkv.policies.base import Policy
from jaxkv.scheduling.boundary import TierBelow, check_reports, make_boundaries
from jaxkv.scheduling.checks import (
    check_arguments,
    check_bound,
    check_count,
    check_has_shared_clock,
    check_report,
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
from jaxkv.scheduling.request_log import RequestSummaries, Summary, log_summary
from jaxkv.scheduling.requests import Requests, kind_of, retention_of, stop_of
from jaxkv.scheduling.rules import OffloadRules, check_groups, settings_of
from jaxkv.scheduling.stats import Delays, OffloadStats
from jaxkv.scheduling.stores import NO_STORES, Stores, StoreSteps
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
from jaxkv.types import NO_BLOCK, BlockKey

_LIST_POLL_S = 1e-3
_MAX_COUNTED_ROWS = 64


class OffloadScheduler(Reporting):
    """Decides which blocks are stored to the host and which are loaded back.

    Args:
        groups: The groups of the model's layers (see `jaxkv.search.groups`), or the
            block size in tokens for a model with only full attention. Blocks of all
            groups share one pool and have the same size in bytes.
        num_host_blocks: Blocks of the host tier; see `jaxkv.num_host_blocks`.
        cache_policy: Which host blocks to evict if the tier is full: a name or a
            `Policy`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        executor: The implementation of the host tier's index; see `BlockIndex`.
        num_storage_blocks: Host blocks that the worker's store below the host may
            hold; 0 for no store.
        is_private: Returns True for a key whose block must never be written to the
            store, such as KV of a LoRA adapter that the key does not identify; None to
            write any.
        clock: Returns seconds, for `delays`; no decision depends on it.
        policy_clock: Returns seconds, for a cache policy that uses the times when
            requests begin and finish, such as "hazard"; None for `clock`. If several
            processes serve one model, their n-th calls must return the same, such as
            the number of steps divided by the usual steps per second.
        tiers_below: Tiers between the host and the store, the nearest first, or
            instead of a store; see docs/write-a-tier.md.
        policy_state: A file for the statistics of "hazard"; None for no file. If the
            file exists, "hazard" starts with it.
        num_device_blocks: Blocks of the transfer engine's arrays, as many as the bound
            pool must have; None if unknown.
        on_request_finished: Called with what `log_requests` logs of a request.
        recorder: Records the requests, once a pool is bound; None for no recording. It
            records the blocks of the first group with full attention, or else of the
            first group. The caller closes it.

    Raises:
        ValueError: A number is too small, the policy is unknown or was made for other
            sizes, the rules do not fit the groups, several processes have no
            `policy_clock` for a policy that needs times, or `policy_state` is from
            another policy or size.
        OSError: `policy_state` cannot be read.
        TypeError: The policy is neither a name nor a `Policy`.

    Attributes:
        groups: The groups.
        rules: The rules.
        num_host_blocks: Blocks of the host tier.
        num_storage_blocks: Host blocks that the store may hold; 0 if there is none.
        below: The moves between the host and each tier below it, the nearest first.
        recorder: Records the requests; None for no recording.
        delays: The durations of lookups, and of loads from the lookup to the arrival.
    """

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Make a strict scheduler if `JAXKV_STRICT` is set."""
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
        on_request_finished: Callable[[Summary], None] | None = None,
    ) -> None:
        self.groups = groups = as_groups(groups)
        check_type(OffloadRules | None, "OffloadRules or None", rules=rules)
        check_arguments(num_storage_blocks, num_device_blocks, policy_state)
        check_type(Callable, "a function", clock=clock)
        check_type(
            *(Callable | None, "a function or None"),
            policy_clock=policy_clock,
            is_private=is_private,
            on_request_finished=on_request_finished,
        )
        self.rules = rules = OffloadRules() if rules is None else rules
        check_groups(rules, groups)
        self.num_host_blocks = num_host_blocks
        self.num_storage_blocks = num_storage_blocks
        self._num_device_blocks = num_device_blocks
        self._manager = host = BlockIndex(
            groups[0].block_size * rules.blocks_per_host_block,
            num_host_blocks,
            cache_policy,
            enable_events,
            store_threshold=rules.store_threshold,
            max_unseen_blocks=rules.max_unseen_blocks,
            retention=rules.retention,
            executor=executor,
        )
        if host.listens and policy_clock is None:
            setting = "retention=True" if rules.retention else f"{cache_policy=}"
            check_has_shared_clock(setting)
        self._stats = OffloadStats()
        self._gate = Gate(rules, self._stats)
        self._book = Requests(groups, rules, host, policy_clock or clock)
        lower = tiers_below, num_storage_blocks, is_private, enable_events, executor
        self.below = make_boundaries(groups, host, rules, *lower)
        self._storage = self.below[len(tiers_below) :]

        self.delays, self.recorder = Delays(clock), recorder
        policy = cache_policy if isinstance(cache_policy, str) else None
        # Empty once the first plan has carried them.
        self._settings = settings_of(rules, num_host_blocks, num_storage_blocks) | {
            "groups": str(groups),
            "cache_policy": policy or type(cache_policy).__name__,
            "executor": executor,
            "tiers_below": str(len(self.below)),
        }
        self._whatif = WhatIf(host, policy)
        if rules.shadow is not None:
            observed = self._stats, self._gate, self._book
            self._whatif = Shadowed(
                host, policy, rules, *observed, executor, is_alone=not self.below
            )
            weakref.finalize(self, self._whatif.close)
        listeners: list[Listener] = [self.delays]
        if recorder is not None:
            listeners.append(
                Recording(recorder, groups, rules, num_host_blocks, policy)
            )
        idle_warning = IdleWarning(groups, rules, self._stats, host, self._book)
        listeners += self._whatif, idle_warning
        log = log_summary if rules.log_requests else None
        sinks = [sink for sink in (log, on_request_finished) if sink is not None]
        if sinks:
            listeners.append(RequestSummaries(self.below, clock, sinks))
        if policy_state is not None:
            self._policy_state = open_policy_state(policy_state, host)
            weakref.finalize(self, self._policy_state.close)
            listeners.append(self._policy_state)
        self._listeners = Listeners(listeners)
        idle_warning.listeners = weakref.proxy(self._listeners)

        observers = self._stats, self._listeners
        self._loads = Loads(groups, host, rules, self._book, *observers)
        on_arrival = self.below[0].record_stored if self.below else None
        self._stores = Stores(host, rules, *observers, on_arrival)
        self._store_steps = StoreSteps(groups, rules)
        self._chooser = self._make_chooser()
        # Requests of `request_preempted` calls since the last step.
        self._preempted: set[str] = set()
        # Whether the next token reads all blocks of a prefix, in all groups.
        self._is_all_read = all(isinstance(spec, FullAttention) for spec in groups)
        self._pool = cast(DevicePool, _Unbound())
        self._view = cast(View, self._pool)

    def _make_chooser(self) -> Chooser:
        deps = self.groups, self._manager, self.rules, self._stores, self._listeners
        if self.rules.mode == "lazy":
            return LazyStores(*deps)
        return EagerStores(*deps, self._book)

    def bind_device_block_pool(self, pool: DevicePool) -> None:
        """Bind the engine's pool of device blocks, which are held during transfers.

        Raises:
            TypeError: `pool` is not a `DevicePool`.
            ValueError: Stores are lazy and `pool` is not a `DeviceBlockPool`; its block
                size or number of blocks is wrong; or the recorder already serves an
                engine. Then nothing changes.
        """
        check_pool(pool, self.groups)
        check_bound(pool, self.rules.mode, self._num_device_blocks)
        for notify in self._listeners.bound:  # The recorder may raise.
            notify(pool)
        factor, self._pool = self.rules.blocks_per_host_block, pool
        for boundary in self.below:
            boundary.limit_held(pool.num_blocks // factor)
        is_plain = len(self.groups) == factor == 1 and self._is_all_read
        tiers = self._manager, self._loads, self.below
        self._view = View(
            self.groups, self.rules, self._book, self._gate, *tiers, is_plain
        )
        self._chooser.bind(pool)
        self._chooser.clear(pool)

    def warm_up(self) -> None:
        """Load or compile the code of all decisions, so that no request waits for it.

        This includes the bound pool and `find_cached_prefix`. It takes seconds the
        first time on a machine, and less than one afterwards.
        """
        self._manager.warm_up()
        for boundary in self.below:
            boundary.tier.warm_up()
        self._pool.warm_up()
        for notify in self._listeners.warm_up:
            notify()
        if isinstance(self._pool, DeviceBlockPool):
            is_lazy = self.rules.mode == "lazy"
            self._manager.warm_up_with_device(self._pool, is_lazy=is_lazy)
        no_blocks = [np.zeros(0, np.bool_)] * len(self.groups)
        find_longest_hit(self.groups, no_blocks, 0)

    def set_rates(
        self,
        load_bytes_per_s: float,
        prefill_tokens_per_s: float,
        storage_bytes_per_s: float | Sequence[float] = 0.0,
    ) -> None:
        """Set the rates of loads, fetches and prefill, for `skip_slow_loads`.

        Processes that serve one model together must set the same rates.

        Args:
            load_bytes_per_s: Such as `OffloadWorker.load_bytes_per_s`; 0 if unknown.
            prefill_tokens_per_s: Measured by the engine; 0 if unknown.
            storage_bytes_per_s: The rate of reads from the last tier below the host,
                such as `OffloadWorker.storage_bytes_per_s`; or one rate for each of
                these tiers, the nearest first, such as
                `OffloadWorker.tier_bytes_per_s`. 0 if unknown.

        Raises:
            ValueError: A rate is not a number >= 0, or the number of rates is not the
                number of tiers. Then nothing changes.
        """
        rates = checked_rates(storage_bytes_per_s, len(self.below))
        self._gate.set_rates(load_bytes_per_s, prefill_tokens_per_s)
        for boundary, rate in zip(self.below, rates, strict=True):
            boundary.bytes_per_s = rate

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the device's own prefix can be loaded.

        Both tiers are searched together: if the device lacks a block in the middle of a
        prefix and the host has it, the blocks after it count as well. The offer is held
        until it is loaded, or the request finishes or asks again. The last token is
        never offered, because its logits are needed.

        Args:
            request: A request that is about to be scheduled.
            num_computed_tokens: Tokens found on the device, in whole blocks.

        Returns:
            The number of tokens offered, or None if the request must ask again in a
            later step; and whether the request must wait for the load: False if the
            next token reads none of the offered blocks.

        Raises:
            ValueError: `num_computed_tokens` is not whole blocks, or the keys do not
                fit the groups or the number of full blocks. Then nothing changes.
            TypeError: An attribute of the request is missing or has the wrong type.
                Then nothing changes. All calls that take a request raise this.
        """
        start_s, view = self.delays.clock(), self._view
        while True:
            planned = plan(view, request, num_computed_tokens)
            name = request.request_id  # `plan` has checked that it exists.
            if self.below and self._book.record_lookup(request):
                for boundary in self.below:
                    boundary.forget(name)  # It waited for blocks of its old keys.
                continue
            if planned.load_speed or planned.fetch_speeds:
                self._gate.count(planned.load_speed, *planned.fetch_speeds)
            if not self.below or self._start_below(name, planned):
                break
            # The tier above has no room for the fetch.
            view = view._replace(below=planned.nearer)
        had_offer = name in self._loads.by_request and planned.deferral != "loading"
        if had_offer or planned.load is not None:
            self._loads.offer(self._pool, name, planned.load)
        if planned.num_tokens is not None:
            # The device may have no room for the request: keep its fetched blocks.
            for boundary in self.below:
                boundary.hold(name)
        self._book.num_local[name] = num_computed_tokens
        answer = planned.num_tokens, planned.is_awaited
        for notify in self._listeners.looked_up:
            notify(request, num_computed_tokens, *answer, start_s)
        return answer

    def _start_below(self, name: str, planned: Plan) -> bool:
        """Start a plan's probe or fetch; return False if a fetch finds no room."""
        if planned.queue is not None:
            planned.queue.queue(name)
        for boundary in planned.searched:
            boundary.looked_up[name] = boundary.tier.num_found
        if planned.probe is not None:
            boundary, runs, wait_s = planned.probe
            boundary.probe(name, runs, wait_s)
        if planned.fetch is not None:
            boundary, fetch = planned.fetch
            if not boundary.fetch(name, fetch):
                return False
            for nearer in planned.nearer:  # These tiers will have more blocks.
                nearer.looked_up.pop(name, None)
        return True

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Record the device blocks of a request and load the offer into them.

        To replace the block table of a known request, call it again with 0 tokens.

        Args:
            request: The request.
            block_ids: All its device blocks, those found on the device first.
            num_external_tokens: Tokens of the offer that the engine takes.

        Returns:
            The block table after the load, a list for each group: `block_ids`, with
            NULL_BLOCK in place of blocks that are not loaded because the next token
            does not read them. The engine may free those blocks after the load;
            `DeviceBlockPool.cache` skips them. If the load fails, the engine keeps
            `block_ids` and computes all blocks.

        Raises:
            ValueError: `num_external_tokens` is not whole blocks, exceeds the offer, or
                is less than the offer although not all groups have full attention; the
                request's keys were rewritten since the offer; `block_ids` has an
                invalid id, or the same block twice where blocks are loaded; or
                `kind` or `retention` is invalid. Then nothing changes.
            TypeError: `block_ids` is not a list or an array of ints.
        """
        requests, pool = self._book, self._pool
        limits = requests.check_stores(request)
        kind_of(request)  # Raises for other values.
        if self._manager.retains:
            retention_of(request)  # Raises for other types.
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
        # A request that declines and has no blocks stays in the engine's queue.
        begins = bool(num_external) or any(map(len, tables))
        for boundary in self.below:
            (boundary.forget if begins else boundary.decline)(name)
        hits = requests.end_lookup(name), num_external
        if hits[0] is not None:
            requests.caps.pop(name, None)
        if load is not None and load.num_blocks:
            requests.caps[name] = load.num_computed_tokens
        if num_external:
            self._store_steps.record_tokens(num_external)
        self._chooser.begun(pool, request, keys, tables, *hits, limits)
        if begins and name not in requests.begun:
            self._begin(request, keys, *hits)
        if self._is_all_read:
            return [table.tolist() for table in tables]
        return mark_skipped(self.groups, pool, keys, tables, *hits, load)

    def _begin(
        self,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_local: int | None,
        num_external: int,
    ) -> None:
        """Count one use of a request's blocks, however many lookups it made."""
        host, requests = self._manager, self._book
        self._stats.count_request(request, num_local, num_external)
        requests.begin(request, keys)
        used = requests.row_keys(keys)
        if num_local is not None and len(self.groups) == 1 and self._is_all_read:
            first = (num_local + num_external) // host.block_size
            after = host.find(used[first : first + _MAX_COUNTED_ROWS]) != NO_BLOCK
            if not after.all():  # None is found past the first that the host lacks.
                self._stats.num_headless += int(after[after.argmin() :].sum())
        for boundary in self.below:
            boundary.record_asked(used)
        host.count_lookup(used)
        host.touch(used)
        if self._listeners.begun:
            has_load = request.request_id in self._loads.by_request
            hits = num_local, num_external, has_load
            start = Start(request, keys, *hits, kind_of(request), requests.now_ms)
            for notify in self._listeners.begun:
                notify(start)

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """Return the transfers to start in this step.

        Args:
            output: The step that the engine is about to compute. The requests'
                `num_computed_tokens` must not include its tokens yet.

        Raises:
            TypeError: `output`, or a request that has filled a block, has a value of
                the wrong type. Then nothing changes.
            ValueError: `SchedulerOutput.new_block_ids` has an invalid id, or a number
                of tokens is negative. Then nothing changes.
        """
        pool, loads, stores = self._pool, self._loads, self._stores
        scheduled, num_tokens = checked_step(output)
        tables = {}
        for name, table in output.new_block_ids.items():
            tables[name] = self._tables(name, table)
        need_flush, preempted = False, []
        if output.preempted_req_ids:
            need_flush = self.rules.flush_on_preemption
            # After a call of `request_preempted`, a request may be admitted already.
            reported = self._preempted
            preempted = [n for n in output.preempted_req_ids if n not in reported]
        is_due = True
        if self._store_steps.batch_blocks:
            must_store = need_flush or not num_tokens or bool(stores.waiting.keys)
            is_due = self._store_steps.is_due(pool, must_store=must_store)
        # The last call that may raise: it reads attributes of ready requests.
        ready = self._chooser.find_ready(scheduled, preempted, is_due=is_due)

        for name in preempted:
            loads.drop(pool, name)
            self._book.caps.pop(name, None)
        self._preempted.clear()
        if self._store_steps.batch_blocks:
            self._store_steps.begin(num_tokens, is_due=is_due)
        self._chooser.record_step(pool, scheduled, tables, preempted)
        budget, loading, storing = None, NO_LOADS, NO_STORES
        if loads.by_request and loads.has_waiting:
            budget = self._budget()
            loading = loads.issue(budget)
        self._chooser.offer_step(pool, ready, is_due=is_due)
        if stores.waiting.keys:
            storing = stores.issue(budget or self._budget())
        below: tuple[TierMoves, ...] = ()
        for boundary in self.below:
            if (move := boundary.issue()) is not None:
                below += (move,)
        has_more = need_flush or below or self._settings
        if loading is NO_LOADS and storing is NO_STORES and not has_more:
            return NO_MOVES  # The case in most steps.
        more: Any = {"need_flush": need_flush, "below": below}
        if self._settings:
            more["settings"], self._settings = self._settings, {}
        return OffloadMetadata(**loading, **storing, **more)

    def _budget(self) -> Budget:
        in_flight = self._loads.in_flight.num_blocks + self._stores.in_flight.num_blocks
        return Budget(self.rules.max_blocks_in_flight, in_flight)

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release the blocks of transfers that every worker has completed.

        Args:
            output: The transfers that workers have completed since the last call.

        Returns:
            The transfers that all workers have completed.

        Raises:
            TypeError: A field of `output` has the wrong type. Then nothing changes.
            ValueError: `output` reports a transfer that is not in flight. Then nothing
                changes.
        """
        if output is NO_REPORTS:
            return output
        check_report(output)
        has_loads = output.finished_recving or output.failed_recving
        has_stores = output.completed_store_events or output.failed_store_events
        if not (has_loads or has_stores or output.below):
            return output  # The case in most steps.
        pool = self._pool
        finished: tuple[str, ...] = ()
        failed: tuple[str, ...] = ()
        stores = reports_of(output.completed_store_events, output.failed_store_events)
        self._stores.in_flight.check(stores)
        check_reports(self.below, output.below)
        if has_loads:
            loads = reports_of(output.finished_recving, output.failed_recving)
            finished, failed = map(tuple, self._loads.report(pool, loads))
            self._stores.num_changes += bool(finished or failed)
            for request_id in failed:
                self._chooser.recompute(request_id)
        stored, unstored = map(tuple, self._stores.report(pool, stores))
        if output.below:
            for boundary in self.below:
                boundary.report(output.below)
            # Ended moves may make room on the host.
            self._stores.num_changes += 1
        return ConnectorOutput(finished, failed, stored, unstored, output.below)

    def request_preempted(self, request: Request) -> None:
        """Record that a request is preempted: it is about to lose its blocks.

        Blocks that it has computed but not stored are stored with the next step. The
        call is optional: a request that is only named in
        `SchedulerOutput.preempted_req_ids` loses these blocks, and must not be admitted
        again before that step.

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
        """Record that a request has finished or was aborted.

        Its last full blocks, and blocks that the host has evicted meanwhile, are stored
        with the next step. The engine may free the request's blocks at once: blocks in
        flight stay pinned until they have arrived.

        Args:
            request: The request, with its final `num_computed_tokens`.
            block_ids: All its device blocks; None to use those passed so far.

        Returns:
            False, because the engine need not keep the blocks, and None, as in vLLM.

        Raises:
            ValueError: `stop` is not one of `STOPS`, `retention` is not a `Retention`,
                or `block_ids` has an invalid id. Then nothing changes.
        """
        requests = self._book
        limits, stop = requests.check_stores(request), stop_of(request)
        if self._manager.retains:
            retention_of(request)  # Raises for other types.
        name = request.request_id
        tables = None if block_ids is None else self._tables(name, block_ids)
        requests.check_known_keys(request)
        if tables is not None:
            self._chooser.replace_tables(
                self._pool, request, tables, limits, is_end=True
            )
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
        """Call `request_finished`; vLLM's name of it for several groups of layers."""
        return self.request_finished(request, block_ids)

    def _leave(self, request: Request, limits: tuple[int, int]) -> None:
        """Drop a request's load, and offer its blocks before it loses them."""
        name = request.request_id
        if name in self._loads.by_request:
            self._loads.drop(self._pool, name)
        for notify in self._listeners.left:
            notify(name)
        self._book.end_lookup(name)
        self._chooser.finish(self._pool, request, limits)
        self._book.caps.pop(name, None)

    def wait_for_storage(
        self, worker: OffloadWorker, timeout_s: float | None = None
    ) -> bool:
        """Wait until the store is listed, so that requests find all its blocks.

        Call it when an engine starts, after binding a pool and between steps. Without
        it, requests hit only blocks listed so far. Processes that serve one model must
        call it together, and all return the same.

        Args:
            worker: The worker of this process, as `OffloadConfig.connect` returns it.
            timeout_s: The longest wait in seconds, by the clock of the first process;
                None for the storage's deadline. The listing continues after a timeout.

        Returns:
            Whether the store is listed: False after a timeout or if the store fails,
            True at once without a store.

        Raises:
            RuntimeError: The scheduler has a store, but the worker has none.
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
        """Forget the blocks of the host and the tiers below, such as for new weights.

        A cache policy keeps its statistics. Blocks of stores in flight never become
        hits. Reset the device's pool as well, and change the keys'
        `Namespace.weights_epoch`.

        Returns:
            Whether the tiers were reset: False while a load is in flight or offered,
            because its request would continue with old blocks.
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
        """Stop using the store for the rest of the process.

        Call it after a change of weights if the store's namespace cannot change: right
        after `reset` (even if that returned False) and before the next lookup. The
        store keeps its blocks.
        """
        for boundary in self._storage:
            boundary.disable()

    def _tables(self, request_id: str, table: BlockTable) -> list[NDArray[np.int64]]:
        """Check a block table; return it as one list per group."""
        num_blocks = self._pool.num_blocks
        return checked_tables(request_id, table, len(self.groups), num_blocks)


class _Unbound:
    """A placeholder for the pool and the view until a pool is bound."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("Call bind_device_block_pool() before scheduling.")
