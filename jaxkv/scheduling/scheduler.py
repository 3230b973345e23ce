"""Which blocks move when, and for whom.

`OffloadScheduler` stands beside an engine's own scheduler and has the hooks of vLLM's
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

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, cast

import jax
import numpy as np

from jaxkv._util import shown, strict_class
from jaxkv._util.settings import ConfigError
from jaxkv._util.state import State, restore, snapshot
from jaxkv.keys.mark import KeyMark
from jaxkv.policies.base import Policy
from jaxkv.policies.hazard import HazardState
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.boundary import Boundary, TierBelow
from jaxkv.scheduling.checks import check_count, check_report, checked_step
from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.eager import EagerStores
from jaxkv.scheduling.explain import Explanation, explain
from jaxkv.scheduling.idle_warning import IdleWarning
from jaxkv.scheduling.lazy import LazyStores
from jaxkv.scheduling.listening import End, Listener, Listeners, Lookup, Start
from jaxkv.scheduling.loads import NO_LOADS, Loads, mark_skipped
from jaxkv.scheduling.moves import Report, reports_of
from jaxkv.scheduling.notifier import RequestNotifier, stop_of
from jaxkv.scheduling.plan import (
    Gate,
    View,
    check_rates,
    plan,
)
from jaxkv.scheduling.prefix import row_keys
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    NO_REPORTS,
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    TierMoves,
    TierReport,
    checked_tables,
)
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.record.recording import Recording
from jaxkv.scheduling.request_keys import RequestKeys
from jaxkv.scheduling.rules import OffloadRules, check_groups
from jaxkv.scheduling.stats import Delays, InTransit, OffloadStats
from jaxkv.scheduling.stores import Stores, StoreSteps
from jaxkv.scheduling.whatif.auto import (
    CANDIDATES,
    check_auto_groups,
    contradictions,
)
from jaxkv.scheduling.whatif.outlook import Outlook
from jaxkv.scheduling.whatif.policy_state import PolicyStateFile
from jaxkv.scheduling.whatif.shadows import ShadowCount
from jaxkv.scheduling.whatif.what_if import Shadowed, WhatIf
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import FullAttention, GroupSpec, as_groups
from jaxkv.search.hits import find_longest_hit
from jaxkv.search.tiers import check_pool
from jaxkv.tiers.base import OffloadingEvent
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.storage import StorageTier
from jaxkv.types import BlockKey

_PAUSE_S = 1e-3  # Between two looks at a store that is being listed.


class OffloadScheduler:
    """Decides what is stored to the host and what is loaded back.

    Args:
        groups: The groups of the model's layers (see `jaxkv.search.groups`); an int
            for a model with one group, of full attention: the tokens of a block.
            Blocks of all groups share one pool, and are of the same number of bytes.
        num_host_blocks: Blocks of the host tier; see `jaxkv.num_host_blocks`.
        cache_policy: Which of them to evict when it is full; a name or a `Policy`; or
            "auto", with which the requests choose (`jaxkv.scheduling.whatif.auto`).
            With eager stores that sets `pause_unused_stores`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        executor: Who runs the decisions about the host; see `BlockIndex`.
        num_storage_blocks: Host blocks that a store behind the host may hold, which the
            worker has; 0 for none.
        is_private: Tells the keys of blocks that are never written to the store, such
            as those of an adapter of which the key says too little; None for none.
        clock: Seconds since some moment, for `delays`; no decision depends on it.
        policy_clock: Seconds for a cache policy that wants to know when requests
            begin and finish, such as "hazard"; None for `clock`. Processes that serve
            one model together need one that says the same in all of them in the same
            call, such as the number of steps over their usual rate.
        tiers_below: Tiers between the host and the store, the nearest first, or in
            place of a store; see docs/write-a-tier.md.
        policy_state: A file in which what "hazard" has learned is kept, by itself or
            with "auto"; None for none. What is there is taken up.
        num_device_blocks: Blocks of the transfer engine's pool, which the bound pool
            must have; None if that is not known.
        recorder: Records the requests, once a pool is bound; None not to. Of several
            groups of layers it records the blocks of the first with full attention,
            or of the first if there is none. Its maker closes it.

    Raises:
        ValueError: If a number is too small, the policy is not known or was made for
            other sizes, or the rules and the groups do not go together; if several
            processes would give such a policy their own times; if `policy_state` is
            not of this policy and size.
        OSError: If `policy_state` cannot be read.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        groups: The groups.
        rules: The rules.
        num_host_blocks: Blocks of the host tier.
        num_storage_blocks: Host blocks that the store may hold; 0 if there is none.
        below: What moves between the host and each tier below it, the nearest first.
        recorder: Records the requests; None if there is none.
        delays: How long look-ups took, and loads from the look-up to their arrival.
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
        self.groups = as_groups(groups)
        rules = rules or OffloadRules()
        is_auto = cache_policy == AUTO
        if is_auto:
            if faults := list(contradictions(rules)):
                raise ConfigError(faults)
            check_auto_groups(self.groups)
            pauses = rules.mode == "eager"
            rules = dataclasses.replace(rules, pause_unused_stores=pauses)
        self.rules = rules
        self._num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.num_storage_blocks = num_storage_blocks
        check_groups(rules, self.groups)
        self._manager = BlockIndex(
            self.groups[0].block_size * rules.blocks_per_host_block,
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
        host = self._manager
        self.delays = Delays(clock)
        self._stats = OffloadStats()
        self._gate = Gate(rules, self._stats)
        self._keys = RequestKeys(self.groups, rules)
        parts = self.groups, host, rules
        self.recorder = recorder
        policy_name = cache_policy if isinstance(cache_policy, str) else None
        self._whatif = WhatIf(host, policy_name)
        if rules.shadow is not None or is_auto:
            self._whatif = Shadowed(
                self.groups,
                host,
                policy_name,
                rules,
                self._stats,
                self._gate,
                self._keys,
                executor,
                is_auto=is_auto,
                has_tiers_below=bool(tiers_below or num_storage_blocks),
            )
            self._whatif.close_with(self)
        listeners: list[Listener] = [self.delays]
        if recorder is not None:
            facts = self.groups, rules, num_host_blocks, policy_name
            listeners.append(Recording(recorder, *facts))
        listeners += self._whatif, IdleWarning(self.groups, rules, self._stats, host)
        if policy_state is not None:
            self._policy_state = self._resume(policy_state)
            weakref.finalize(self, self._policy_state.save)
            listeners.append(self._policy_state)
        self._listeners = Listeners(listeners)
        self._loads = Loads(*parts, self._stats, self._keys, self._listeners)
        tiers = list(tiers_below)
        if num_storage_blocks:
            tier = StorageTier(
                host.block_size, num_storage_blocks, enable_events, executor=executor
            )
            most, probe_s = rules.max_storage_blocks, rules.storage_probe_s or 0.0
            store = TierBelow(
                tier, rules.storage_write, most, probe_s, has_other_writers=True
            )
            tiers.append(store)
        uppers = [host, *[below.tier for below in tiers]]
        on_arrival: Callable[[Sequence[BlockKey]], None] | None = None
        boundaries: list[Boundary] = []
        for number, below in reversed(list(enumerate(tiers))):
            own = Boundary(
                self.groups,
                uppers[number],
                below,
                rules,
                is_private=is_private,
                on_arrival=on_arrival,
                number=number,
            )
            boundaries.insert(0, own)
            on_arrival = own.note_stored
        self.below = tuple(boundaries)
        # The store's alone, if there is one.
        self._storage = self.below[len(tiers_below) :]
        self._stores = Stores(host, rules, self._stats, self._listeners, on_arrival)
        self._store_steps = StoreSteps(self.groups, rules)
        self._chooser: Chooser
        if rules.mode == "eager":
            self._chooser = EagerStores(
                *parts,
                self._stores,
                self._keys,
                self._listeners,
                self._whatif.num_found_tokens,
            )
        else:
            self._chooser = LazyStores(*parts, self._stores, self._listeners)
        # Tokens that requests had found on the device when they asked; and the keys
        # that they asked for, where there are tiers below the host.
        self._num_local: dict[str, int] = {}
        self._asked: dict[str, list[KeyMark]] = {}
        # Requests that count as having used their blocks.
        self._known: set[str] = set()
        # Requests that `request_preempted` was called for since the last step.
        self._preempted: set[str] = set()
        if host.listens and policy_clock is None and _serves_with_others():
            chosen = "retention=True" if rules.retention else f"{cache_policy=}"
            raise ValueError(
                f"{chosen} decides by the time, and each process has its own: "
                "their tiers would evict other blocks. Pass a policy_clock that says "
                "the same in all of them, or choose what asks for no time."
            )
        self._notifier = RequestNotifier(
            host,
            [spec.block_size for spec in self.groups],
            rules.blocks_per_host_block,
            policy_clock or clock,
        )
        # Whether the next token reads all of a prefix; tokens of the smallest row.
        self._is_all_read = all(isinstance(own, FullAttention) for own in self.groups)
        self._pool: DeviceBlockPool = cast(DeviceBlockPool, _Unbound())
        self._view = cast(View, self._pool)

    def bind_device_block_pool(self, pool: DeviceBlockPool) -> None:
        """Take the pool whose blocks are held during transfers.

        Raises:
            ValueError: The pool is known to have blocks of another size than the
                groups, or is not of `num_device_blocks`; or the recorder serves another
                engine already. Then nothing changes.
        """
        check_pool(pool, self.groups)
        expected = self._num_device_blocks
        if expected is not None and pool.num_blocks != expected:
            raise ValueError(
                f"num_blocks={pool.num_blocks} of the DeviceBlockPool must be "
                f"{expected}, as the arrays have along their block axis: other blocks "
                "than those meant would move. Make it for as many, or name by "
                "block_axis the axis that counts them."
            )
        for notify in self._listeners.bound:  # The recorder may refuse.
            notify(pool)
        self._pool = pool
        for own in self.below:
            own.limit_held(pool.num_blocks // self.rules.blocks_per_host_block)
        parts = pool, self._manager, self._loads, self.below
        is_plain = len(self.groups) == self.rules.blocks_per_host_block == 1
        is_plain &= self._is_all_read
        self._view = View(
            self.groups, self.rules, self._keys, self._gate, *parts, is_plain
        )
        self._chooser.clear(pool)

    @property
    def num_host_blocks_held(self) -> int:
        """Blocks of the host tier that hold something, stores in flight included."""
        return self._manager.num_held_blocks

    @property
    def num_storage_blocks_held(self) -> int:
        """Host blocks that the store holds, as far as known, writes included."""
        return sum(own.tier.num_held_blocks for own in self._storage)

    @property
    def num_storage_blocks_left_out(self) -> int:
        """Host blocks that the store holds beyond those, which the index leaves out."""
        return sum(own.tier.num_left_out for own in self._storage)

    @property
    def stats(self) -> OffloadStats:
        """How stores and loads ended so far."""
        host = self._manager
        stats = dataclasses.replace(
            self._stats, num_evicted=host.num_evicted, num_skipped=host.num_skipped
        )
        for own in self._storage:
            stats = stats.with_storage(own.counts, own.tier.num_evicted)
        return stats

    @property
    def shadow_counts(self) -> tuple[ShadowCount, ...]:
        """What each of the `shadow` tiers has come to; any thread may ask."""
        return self._whatif.counts

    def outlook(self) -> Outlook:
        """Say what other memory or another policy would give, by the shadows so far.

        Any thread may ask. With `Outlook.since` an earlier one is left out.

        Raises:
            ValueError: If there are no shadows.

        Example:
            >>> scheduler = OffloadScheduler(16, 64, rules=OffloadRules(shadow="lru*2"))
            >>> print(scheduler.outlook())
            policy        host  found  error  saved a request
            lru     128 blocks   0.0%    0.0                ?
            <BLANKLINE>
            No request has looked for its prefix yet.
        """
        return self._whatif.outlook()

    @property
    def serving_policy(self) -> str | None:
        """The name of the policy that serves now; None for one without a name."""
        return self._whatif.policy

    @property
    def num_policy_changes(self) -> int | None:
        """How often "auto" has changed the policy; None with another."""
        return self._whatif.num_changes

    @property
    def is_storing_paused(self) -> bool | None:
        """Whether stores are paused; None without `pause_unused_stores`."""
        return self._chooser.is_paused

    @property
    def in_transit(self) -> InTransit:
        """What is on its way now; any thread may ask, as for `stats`."""
        return InTransit(*self._stores.in_transit, *self._loads.in_transit)

    def has_pending_stores(self) -> bool:
        """Tell whether blocks are on their way to the host, or on to tiers below it.

        An engine without requests goes on stepping while there are.
        """
        for own in self.below:
            if own.has_writes:
                return True
        return len(self._stores) > 0

    def has_pending_loads(self) -> bool:
        """Tell whether blocks are on their way back, for any request."""
        for own in self.below:
            if own.has_fetches:
                return True
        return len(self._loads) > 0

    def warm_up(self) -> None:
        """Load, or compile, all decisions now, so that no request waits for that.

        Those of the device's pool, too, and of `find_cached_prefix` over it. It takes
        seconds where the machine has not run them before, else part of one.
        """
        self._manager.warm_up()
        for own in self.below:
            own.tier.warm_up()
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

        Processes that serve one model together must note the same.

        Args:
            load_bytes_per_s: Such as `OffloadWorker.load_bytes_per_s`; 0 if unknown.
            prefill_tokens_per_s: As the engine measured it; 0 if unknown.
            storage_bytes_per_s: Reads from the last tier below the host, such as
                `OffloadWorker.storage_bytes_per_s`; or from each of these tiers, the
                nearest first, such as `OffloadWorker.tier_bytes_per_s`. 0 if unknown.

        Raises:
            ValueError: If a rate is no number of at least 0, or there is not one for
                each tier. Then nothing changes.
        """
        rates = storage_bytes_per_s
        if not isinstance(rates, Sequence):
            check_rates(storage_bytes_per_s=rates)
            rates = [*[0.0] * (len(self.below) - 1), rates][: len(self.below)]
        if len(rates) != len(self.below):
            raise ValueError(
                f"{storage_bytes_per_s=} has {len(rates)} rates, and there are "
                f"{len(self.below)} tiers below the host: give one for each."
            )
        for rate in rates:
            check_rates(storage_bytes_per_s=rate)
        self._gate.note_rates(load_bytes_per_s, prefill_tokens_per_s)
        for boundary, rate in zip(self.below, rates, strict=True):
            boundary.bytes_per_s = rate

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
            How many tokens more can be had; None if the request has to ask again in a
            later step. And whether they take time, while the request waits; if not,
            they are there when the model of this step runs.

        Raises:
            ValueError: If `num_computed_tokens` is no number of whole blocks, or the
                request has no keys for each group, or not as many as its full blocks.
                Then nothing changes.
            TypeError: If the request lacks an attribute, or one has another type. Then
                nothing changes. All calls that take a request do so.
        """
        start_s = self.delays.clock()
        view = self._view
        while True:
            found = plan(view, request, num_computed_tokens)
            name = request.request_id  # Only now known to be there.
            if self.below and self._is_rewritten(request):
                self._forget_below(name)  # It waits for what it wanted before.
                continue
            if found.queue is not None:
                found.queue.queue(name)
            if found.load_speed or found.fetch_speeds:
                self._gate.count(found.load_speed, *found.fetch_speeds)
            for own in found.searched:
                own.looked_up[name] = own.tier.num_found
            if found.probe is not None:
                own, runs, wait_s = found.probe
                own.probe(name, runs, wait_s)
            if found.fetch is None:
                break
            own, fetch, num = found.fetch
            nearer = view.below[: own.number]
            if own.fetch(name, fetch, num):
                for each in nearer:  # There will be more to find.
                    each.looked_up.pop(name, None)
                break
            # The tier above has no room for it.
            view = view._replace(below=nearer)
        is_known = name in self._loads.by_request and found.deferral != "loading"
        if is_known or found.load is not None:
            self._loads.offer(self._pool, name, found.load, found.is_awaited)
        if found.num_tokens is not None:
            # It may find no room on the device: what was fetched for it stays.
            for own in self.below:
                own.hold(name)
        self._num_local[name] = num_computed_tokens
        answer = found.num_tokens, found.is_awaited
        lookup = Lookup(request, num_computed_tokens, *answer, start_s)
        for notify in self._listeners.looked_up:
            notify(lookup)
        return answer

    def num_fetched_tokens(self, request_id: str) -> int:
        """Count the tokens that came from the store because a request waited for them.

        Those of its last fetch, until it finishes.
        """
        return max(
            (own.num_fetched_tokens.get(request_id, 0) for own in self.below), default=0
        )

    def explain(
        self, request: Request, num_computed_tokens: int | None = None
    ) -> Explanation:
        """Say of each block of a request where it is or why not; nothing changes.

        If keys were rewritten since the request last asked, its next look-up first
        drops what it waits for below the host. The explanation does not foresee that.

        Args:
            request: A request, whether it is known or not.
            num_computed_tokens: Tokens found on the device, whole blocks; None to look
                for the device's own prefix.

        Raises:
            ValueError: If that is no number of whole blocks.
        """
        return explain(self._view, request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Note the device blocks of a request and what will be loaded into them.

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
                one that is not of full attention, less; if the request's keys were
                rewritten since the offer; if something in `block_ids`
                is no block's id, or a block is there twice where one is loaded; if
                the request has a `retention` that is none. Then nothing changes.
            TypeError: If `block_ids` is not a list or an array of ints, or as above.
        """
        host = self._manager
        limits = self._keys.check_stores(request)
        if host.retains:
            self._notifier.check(request)
        pool, name = self._pool, request.request_id
        num_external_tokens = check_count(
            "num_external_tokens", num_external_tokens, name
        )
        tables = self._tables(name, block_ids)
        is_new = name not in self._keys.by_request
        keys = self._keys.checked(request)
        try:
            load = self._loads.take(pool, request, keys, tables, num_external_tokens)
        except ValueError:
            if is_new:  # Nobody might ever say that it is over.
                self._keys.forget(name)
            raise
        # One that declines and has no blocks stays in the queue: it is yet to begin.
        begins = bool(num_external_tokens) or any(tables)
        for own in self.below:
            (own.forget if begins else own.decline)(name)
        num_local = self._num_local.pop(name, None)
        self._asked.pop(name, None)
        if num_external_tokens:
            self._store_steps.note_tokens(num_external_tokens)
        found = num_local, num_external_tokens
        self._chooser.begun(request, keys, tables, *found, limits)
        if begins and name not in self._known:
            self._known.add(name)
            self._stats.count_request(request, num_local, num_external_tokens)
            if host.listens:
                self._notifier.begin(request, keys)
            # Once, however often it asked: a request uses its blocks once.
            used = row_keys(self.groups, keys, self.rules.blocks_per_host_block)
            for own in self.below:
                own.note_asked(used)
            host.count_lookup(used)
            host.touch(used)
            if self._listeners.begun:
                start = Start(
                    request,
                    keys,
                    num_local,
                    num_external_tokens,
                    name in self._loads.by_request,
                    self._notifier.now_ms,
                )
                for notify in self._listeners.begun:
                    notify(start)
        if self._is_all_read:
            return [list(table) for table in tables]
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
            TypeError: If `output`, or a request that has filled a block, has a value of
                another type. Then nothing changes.
            ValueError: If something in `SchedulerOutput.new_block_ids` is no block's
                id, or a number of tokens is negative. Then nothing changes.
        """
        pool = self._pool
        rules, loads, stores = self.rules, self._loads, self._stores
        scheduled, num_tokens = checked_step(output)
        new_tables: dict[str, list[list[int]]] = {}
        for name, table in output.new_block_ids.items():
            new_tables[name] = self._tables(name, table)
        need_flush, preempted = False, []
        if output.preempted_req_ids:
            need_flush = rules.flush_on_preemption
            # Who was preempted by a call may have been admitted again since, and loads.
            gone = self._preempted
            preempted = [own for own in output.preempted_req_ids if own not in gone]
        is_due = True
        if self._store_steps.batch_blocks:
            must_store = need_flush or not num_tokens or bool(stores.waiting.keys)
            is_due = self._store_steps.is_due(pool, must_store=must_store)
        # The last that can be refused: it reads what requests say of themselves.
        ready = self._chooser.find_ready(scheduled, preempted) if is_due else ()
        for name in preempted:
            loads.drop(pool, name)
        self._preempted.clear()
        if self._store_steps.batch_blocks:
            self._store_steps.begin(num_tokens, is_due=is_due)
        self._chooser.note_step(scheduled, new_tables, preempted)
        in_flight = loads.in_flight.num_blocks + stores.in_flight.num_blocks
        most = rules.max_blocks_in_flight
        if most is not None:
            most = max(most - in_flight, 0)
        loading = NO_LOADS
        if loads.has_waiting:
            # What the step itself writes cannot be put off: the request runs in it.
            most_loaded = None if rules.load_in_step else most
            leaving, loading = loads.issue(pool, most_loaded, in_flight)
            in_flight += leaving
            if most is not None:
                # A load that is held up waits for room: stores may not take it.
                most = 0 if loads.has_waiting else max(most - leaving, 0)
        if is_due:
            # After the loads, which let go of the free blocks that they copy.
            self._chooser.offer_step(pool, ready)
        store = stores.issue(most, in_flight) if stores.waiting.keys else None
        moves: list[TierMoves] = []
        for own in self.below:
            move = own.issue()
            if move is not None:
                moves.append(move)
        if not (loading is not NO_LOADS or store or need_flush or moves):
            return NO_MOVES
        sources, targets = (store.sources, store.targets) if store else ((), ())
        return OffloadMetadata(
            **loading,
            store_event=store.event if store else NO_EVENT,
            store_device_blocks=tuple(sources),
            store_host_blocks=tuple(targets),
            need_flush=need_flush,
            below=tuple(moves),
        )

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release what no worker reads or writes any more.

        Args:
            output: What workers saw complete since the last time.

        Returns:
            What is over on all of them, less the loads that no request waits for.

        Raises:
            TypeError: If a field of it has another type. Then nothing changes.
            ValueError: If it tells of something that is not in flight. Then nothing
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
        stores: Sequence[Report] = ()
        if has_stores:
            stores = reports_of(
                output.completed_store_events, output.failed_store_events
            )
            self._stores.in_flight.check(stores)
        if output.below:
            self._check_below(output.below)
        finished: list[str] = []
        failed: list[str] = []
        if has_loads:
            loads = reports_of(output.finished_recving, output.failed_recving)
            finished, failed = self._loads.report(pool, loads)
            for notify in self._listeners.loaded:
                notify(finished, failed)
            if finished or failed:
                self._stores.num_changes += 1
            for request_id in failed:
                self._chooser.recompute(request_id)
        stored, lost = self._stores.report(pool, stores) if stores else ((), ())
        if output.below:
            for own in self.below:
                own.report([each for each in output.below if each.tier == own.number])
            # What has ended may make room on the host.
            self._stores.num_changes += 1
        return ConnectorOutput(
            tuple(finished), tuple(failed), tuple(stored), tuple(lost), output.below
        )

    def request_preempted(self, request: Request) -> None:
        """Note that a request is about to lose its blocks, and will come back.

        What it has computed and not stored is stored with the next step. Optional: a
        request that is only named in `SchedulerOutput.preempted_req_ids` loses that,
        and may not be admitted again before that step.

        Args:
            request: The request, its `num_computed_tokens` those of before.
        """
        limits = self._keys.check_stores(request)
        self._check_kept_keys(request)
        self._part_with(request, limits)
        self._preempted.add(request.request_id)

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Note that a request is over, by itself or by abort.

        Its last full blocks are stored with the next step, with what others have until
        then, and those that the host evicted meanwhile. The engine may free its
        blocks at once: what is in flight is held here until it has arrived.

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
        limits = self._keys.check_stores(request)
        stop = stop_of(request)
        if self._manager.retains:
            self._notifier.check(request)
        tables = None
        if block_ids is not None:
            tables = self._tables(request.request_id, block_ids)
        self._check_kept_keys(request)
        if tables is not None:
            self._chooser.replace_tables(request, tables, limits)
        self._part_with(request, limits)
        name = request.request_id
        has_begun = name in self._known
        keys: Sequence[Sequence[BlockKey]] = ()
        if has_begun:
            keys = self._keys.of(request)
            if self._manager.listens:
                self._notifier.finish(request, keys, stop)
        has_load = name in self._loads.by_request
        end = End(request, keys, stop, has_begun, has_load, self._notifier.now_ms)
        for notify in self._listeners.finished:
            notify(end)
        for own in self.below:
            own.forget(request.request_id)
            own.num_fetched_tokens.pop(request.request_id, None)
        self._known.discard(request.request_id)
        self._keys.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, None]:
        """Do as `request_finished` does, for an engine whose tables have groups."""
        return self.request_finished(request, block_ids)

    def snapshot(self) -> State:
        """Copy all that decisions depend on, also of the tiers and the device's pool.

        Returns:
            The state, as plain values. It refers to the engine's requests.

        Example:
            >>> scheduler = OffloadScheduler(16, num_host_blocks=4)
            >>> scheduler.bind_device_block_pool(DeviceBlockPool(8))
            >>> before = scheduler.snapshot()
            >>> before.entries["scheduler._loads.in_flight"].fields["moves"]
            {}
            >>> _ = scheduler.reset()
            >>> scheduler.restore(before)
            >>> scheduler.digest() == before.digest
            True
        """
        return snapshot(self, "scheduler")

    def digest(self) -> str:
        """Return a digest of `snapshot`; equal in all processes that decide alike."""
        return self.snapshot().digest

    def restore(self, state: State) -> None:
        """Go back to a state of this scheduler, or of one of the same configuration.

        The bound pool is put back, too. Files, recordings and measured times are not.

        Args:
            state: What `snapshot` returned. It refers to the engine's requests, which
                the engine must put back.

        Raises:
            ValueError: The state is of another configuration, or there is another pool
                than a `DeviceBlockPool`. Then nothing changes.
        """
        entry, pool = state.entries["scheduler"], self._pool
        names = "groups", "rules", "num_host_blocks", "num_storage_blocks"
        facts = {name: (entry.fields[name], getattr(self, name)) for name in names}
        if isinstance(pool, DeviceBlockPool):
            saved_pool = state.entries[entry.fields["_pool"].name]
            num = saved_pool.fields.get("num_blocks")
            facts["num_blocks of the bound DeviceBlockPool"] = num, pool.num_blocks
        else:
            facts["class of the bound pool"] = type(pool), DeviceBlockPool
        for name, (saved_value, value) in facts.items():
            if saved_value != value:
                raise ValueError(
                    f"the {name} must be as in the state, {shown(saved_value)}, to "
                    f"restore it, and is {shown(value)}."
                )
        restore(self, state)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the events of the host tier, and of those below, since last time."""
        yield from self._manager.take_events()
        for own in self.below:
            yield from own.tier.take_events()

    @property
    def is_storage_listed(self) -> bool:
        """Whether all is known that the store has, but for what others write since."""
        return all(own.tier.is_listed for own in self._storage)

    def wait_for_storage(
        self, worker: OffloadWorker, timeout_s: float | None = None
    ) -> bool:
        """Wait until the store is listed, so that the first request finds all it has.

        For an engine that starts; without it requests find what the listing has found
        so far. Between steps, once a pool is bound. Processes that serve one model call
        it together, and all return the same.

        Args:
            worker: The worker of this process, as `OffloadConfig.connect` returns it.
            timeout_s: Seconds to wait at most, of several processes those of the first
                one; None for the storage's deadline. The listing goes on after that.

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
            time.sleep(_PAUSE_S)
        return True

    def reset(self) -> bool:
        """Forget all that the host tier holds, as after a change of weights.

        What a cache policy has learned of requests stays. Stores in flight end
        without a trace. Reset the device's pool as well, and change the keys'
        `Namespace.weights_epoch`.

        Returns:
            Whether it was done; not while a load is under way or offered, as its
            request would go on with old blocks.
        """
        if self.has_pending_loads():
            return False
        self._stores.forget(self._pool)
        self._manager.clear()
        for own in self.below:
            own.reset()
        self._chooser.clear(self._pool)
        for notify in self._listeners.reset:
            notify()
        return True

    def disable_storage(self) -> None:
        """Read and write nothing of the store any more, for good.

        For weights that have changed where the namespace of the store cannot change
        with them. What is there stays. Call it when `reset` was done, or could not be
        done yet: nothing is written from now on. Call it before anything is
        asked for again.
        """
        for own in self._storage:
            own.disable()

    def _tables(self, request_id: str, table: BlockTable) -> list[list[int]]:
        """Give a block table as a list for each group, after a look at its ids."""
        num_blocks = self._pool.num_blocks
        return checked_tables(request_id, table, len(self.groups), num_blocks)

    def _is_rewritten(self, request: Request) -> bool:
        """Note what a request asks for; return whether it is no more what it was."""
        keys = self._keys.by_request[request.request_id]  # The plan has read them.
        before = self._asked.get(request.request_id)
        self._asked[request.request_id] = [KeyMark.of(own, len(own)) for own in keys]
        return before is not None and not all(map(KeyMark.is_in, before, keys))

    def _forget_below(self, name: str) -> None:
        for own in self.below:
            own.forget(name)

    def _check_below(self, reports: Sequence[TierReport]) -> None:
        """Refuse reports of tiers below the host that are not due."""
        for report in reports:
            if not 0 <= report.tier < len(self.below):
                raise ValueError(
                    f"a report of tier {report.tier} below the host came, and the "
                    f"scheduler has {len(self.below)} such tiers: give it "
                    "num_storage_blocks, or tiers_below."
                )
        for own in self.below:
            own.check([each for each in reports if each.tier == own.number])

    def _check_kept_keys(self, request: Request) -> None:
        """Refuse wrong keys of a request that is known: they are about to be read."""
        if request.request_id in self._keys.by_request:
            self._keys.checked(request, is_admission=False)

    def _part_with(self, request: Request, limits: tuple[int, int]) -> None:
        """Let go of a request's load, and store what it leaves behind."""
        name = request.request_id
        if name in self._loads.by_request:
            self._loads.drop(self._pool, name)
        for notify in self._listeners.left:
            notify(name)
        self._num_local.pop(name, None)
        self._asked.pop(name, None)
        self._chooser.finish(self._pool, request, limits)

    def _resume(self, path: str) -> PolicyStateFile:
        """Go on with what was learned before, if that is known."""
        host = self._manager
        if not isinstance(host.executor.state.policy, HazardState):
            raise ValueError(
                f"policy_state={shown(path)} needs cache_policy='hazard' or {AUTO!r}, "
                "without retention: no other policy learns what a file could keep."
            )
        if _serves_with_others():
            raise ValueError(
                f"policy_state={shown(path)} is for one process: each of several would "
                "begin with what its own file has, and their tiers evict other blocks."
            )
        learned = self._whatif.learned
        file = PolicyStateFile(path, host.num_blocks, host.block_size, learned)
        before = file.read()
        if before is not None:
            self._whatif.resume(before)
        return file


class _Unbound:
    """Stands for the pool, and for what a plan reads, until a pool is bound."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("Call bind_device_block_pool() before scheduling.")


def _serves_with_others() -> bool:
    """Whether several processes run one program; starts no backend to find out."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
