"""A small world: the scheduler and the pool as they are, an engine, and its transfers.

Whatever can happen next is an action, and nothing happens by itself. The content of a
block is the prefix of tokens that it holds; what is being written, or was lost, has
none. A world can be left and come back to (`save`, `restore`). In its digest blocks,
events and counters have canonical names: worlds with equal digests have equal futures.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import marshal
import pickle
from collections import Counter
from itertools import compress
from types import SimpleNamespace
from unittest import mock

import numpy as np

from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.policies import get_policy_maker, make_hazard
from jaxkv.policies.lru import LRUState
from jaxkv.scheduling import scheduler as scheduler_lib
from jaxkv.scheduling.loads import NO_IDS
from jaxkv.scheduling.plan import _PROBE_INTERVAL
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    SchedulerOutput,
    TierReport,
)
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, alignment
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers import index as index_lib
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import make_executor
from jaxkv.tiers.retention import Retention
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.longest import first_read, longest_prefix

GARBAGE = ""
WAITING, LOADING, RUNNING, DONE = "waiting", "loading", "running", "done"
# Long enough for the batches here; the longer a log, the more there is to copy.
_LEAST_MAX_BATCH = 8
_NUM_GHOSTS = 16


class WrongError(Exception):
    """Something does not hold."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a world consists of.

    Attributes:
        requests: For each its tokens, a letter each, and how many of them are its
            prompt; the others are generated.
        groups: The groups of the model's layers.
        rules: Rules for stores and loads.
        num_device_blocks: Blocks of the device, beside the null block.
        num_host_blocks: Blocks of the host.
        num_storage_blocks: Blocks of the store; 0 for none.
        chunk: Most tokens that a request computes in a step.
        acts: What may happen beside what has to: see `World.actions`.
        listed: Requests of which the store has all blocks, and lists them at some time.
        rates: What `note_rates` may be told, the first in the beginning. The gate is
            about to let a probe pass then.
        policy: Which blocks the host evicts.
        policies: The policies that take turns ("change"), `policy` first; empty if it
            stays.
        retentions: How long the first requests want their blocks to be kept.
        awaiting: Requests whose prompts another engine computes, and stores perhaps.
        private: Blocks with this letter are never written to the store.
        bound: How many blocks a listing says that the store may hold.
        is_ahead: Whether the last token that a request generated is uncertain until
            the next one, as with asynchronous scheduling.
        has_events: Whether the events have to add up to what the tiers hold.
        holds_waiting: Whether requests that wait for more room than their loads take
            keep what was loaded, and are not preempted (the fault of vLLM's #57841).
        keeps_tables: Whether the engine goes on with its own tables rather than those
            that `update_state_after_alloc` returns.
        served: Requests that have been served before all begins; the device has
            forgotten them.
    """

    requests: tuple = (("aabb", 4), ("aabb", 4), ("aacc", 4))
    groups: tuple = (FullAttention(1),)
    rules: OffloadRules = dataclasses.field(default_factory=OffloadRules)
    num_device_blocks: int = 5
    num_host_blocks: int = 4
    num_storage_blocks: int = 0
    chunk: int = 4
    acts: tuple = ("fail", "preempt", "abort", "reset")
    listed: tuple = ()
    rates: tuple = ()
    policy: str = "lru"
    policies: tuple[str, ...] = ()
    retentions: tuple[Retention, ...] = ()
    awaiting: tuple = ()
    private: str = ""
    bound: int | None = None
    is_ahead: bool = False
    has_events: bool = False
    holds_waiting: bool = False
    keeps_tables: bool = False
    served: tuple = ()


@functools.cache
def content(group, text, end):
    """The content of a block that holds a prefix up to a token."""
    return f"{group}{text[:end]}"


@functools.cache
def make_keys(group, text, size, num_tokens):
    """Keys of the full blocks of some tokens."""
    ends = range(size, num_tokens + 1, size)
    return [hashlib.sha256(content(group, text, n).encode()).digest() for n in ends]


@functools.cache
def packed_keys(keys):
    """Keys as `RequestKeys` gives them."""
    names, words, _ = lay_out(list(keys))
    return PackedKeys(names, words)


class Request:
    """A request, as the scheduler sees it and as the engine does."""

    def __init__(self, name, text, num_prompt, groups):
        self.request_id = name
        self.retention = None
        self.remote_prefill = False
        self.text = text
        self.num_prompt_tokens = num_prompt
        self.num_tokens = num_prompt
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.groups = groups
        self.phase = WAITING
        self.tables = [[] for _ in groups]
        self.offer = 0  # What is being loaded, ...
        self.after = None  # ... and its tables once it is there.
        self.needs = 0  # Blocks that it lacks, with `holds_waiting`.

    @property
    def block_keys_by_group(self):
        return [
            make_keys(g, self.text, spec.block_size, self.num_tokens)
            for g, spec in enumerate(self.groups)
        ]

    @property
    def block_keys(self):
        return self.block_keys_by_group[0]

    @property
    def table(self):
        return self.tables if len(self.tables) > 1 else self.tables[0]


@dataclasses.dataclass
class Transfer:
    """What moves.

    Attributes:
        kind: "store", "load", "fetch", "write" or "probe".
        name: Its event, or the request of a load.
        pairs: For each block where it comes from and where it goes: the id of a device
            block and that of a host block, or a key and a host block.
        contents: What was there when it began.
        oks: Which of them arrived on all workers that have reported it, ...
        num_reports: ... and how many have.
        is_owner: Whether the places of the host are still its own.
        is_flushed: Whether a flush has waited for it.
        is_written: Whether the step that began it has written its blocks.
    """

    kind: str
    name: object
    pairs: list
    contents: list
    oks: list
    num_reports: int = 0
    is_owner: bool = True
    is_flushed: bool = False
    is_written: bool = False


def _small_policy_maker(name):
    """Give the maker of a policy whose ghosts are few, as all has to be copied."""
    if name == "hazard":
        return functools.partial(make_hazard, num_ghosts=_NUM_GHOSTS)
    return get_policy_maker(name)


def _reduce_keys(keys):
    return packed_keys, (tuple(keys),)


class World:
    """Everything there is, and what may happen to it.

    Args:
        setup: What it consists of.

    Attributes:
        seen: How often what has happened.
    """

    def __init__(self, setup):
        self.setup = setup
        self.seen = Counter()
        self.groups = setup.groups
        self.pool = DeviceBlockPool(setup.num_device_blocks + 1)

        def make_index(*args, **others):
            others["alternatives"] = setup.policies
            return index_lib.BlockIndex(*args, **others)

        with (
            mock.patch.object(index_lib, "_LEAST_MAX_BATCH", _LEAST_MAX_BATCH),
            mock.patch.object(index_lib, "get_policy_maker", _small_policy_maker),
            mock.patch.object(scheduler_lib, "BlockIndex", make_index),
        ):
            self.scheduler = OffloadScheduler(
                setup.groups,
                setup.num_host_blocks,
                setup.policy,
                setup.has_events,
                rules=setup.rules,
                num_storage_blocks=setup.num_storage_blocks,
                is_private=self._is_private if setup.private else None,
                clock=lambda: 0.0,
            )
        own = self.scheduler
        own.bind_device_block_pool(self.pool)
        self.rates = 0
        if setup.rates:
            own.note_rates(*setup.rates[0])
            own._gate._num_slow = own._gate._num_slow_fetches = _PROBE_INTERVAL - 2
        self.requests = [
            Request(f"r{n}", text, num_prompt, setup.groups)
            for n, (text, num_prompt) in enumerate(setup.requests)
        ]
        for r, retention in zip(self.requests, setup.retentions, strict=False):
            r.retention = retention
        for n in setup.awaiting:
            self.requests[n].remote_prefill = True
        self.device = [GARBAGE] * self.pool.num_blocks
        self.host = [GARBAGE] * setup.num_host_blocks
        self.objects = {}
        self.transfers = []
        self.preempted = []
        self.lost = []  # Of these, the ones that only the next step tells of.
        self.is_listed = not setup.listed
        self.is_left = False
        self.serving = setup.policy
        self.is_to_reset = False  # Before anything is asked for again.
        self._contents = {
            key: content(g, text, (n + 1) * spec.block_size)
            for text, _ in setup.requests
            for g, spec in enumerate(setup.groups)
            for n, key in enumerate(make_keys(g, text, spec.block_size, len(text)))
        }
        self._all_keys = packed_keys(tuple(self._contents))
        self._key_ids = {key: n for n, key in enumerate(self._contents)}
        self._listed_keys = tuple(
            dict.fromkeys(
                key
                for n in setup.listed
                for g, spec in enumerate(setup.groups)
                for key in make_keys(
                    g, setup.requests[n][0], spec.block_size, len(setup.requests[n][0])
                )
            )
        )
        self.objects = {key: self._contents[key] for key in self._listed_keys}
        self._tiers = [own._manager, *[boundary.tier for boundary in own.below]]
        # What events say that the tiers hold.
        self.told = {tier.medium: {} for tier in self._tiers}
        self._parts = list(self._mutable_parts())
        self._find_arrays()
        self._growing = {}
        for name in (f"r{n}" for n in setup.served):
            self.do(("admit", name))
            while not self._is_served(self._named(name)):
                self.do(("step", name))
            self.do(("finish", name))
            self.do(("step",))
            while self.transfers:
                self.do(("land", 0))
        if setup.served:
            self.do(("forget",))
            self.seen.clear()

    # Leaving a world, and coming back to it.

    def _mutable_parts(self):
        """Objects and those of their attributes that change, but for arrays."""
        own = self.scheduler
        yield (
            self,
            "requests device host objects transfers preempted lost is_listed is_left "
            "is_to_reset rates serving told",
        )
        yield self.pool, "num_changes unwritten"
        yield own, "_num_local _asked _known _preempted"
        yield own.delays, "_deferred_s _offered_s"
        yield own._stats, " ".join(vars(own._stats))
        yield own._gate, " ".join(vars(own._gate).keys() - {"_stats"})
        yield own._notifier, "_marks"
        yield own._loads, "by_request _waiting _copying _num_blocks_waiting"
        yield own._loads.in_flight, "moves num_blocks _next_event"
        yield own._stores, "num_changes waiting _num_known_in_flight"
        yield own._store_steps, "_num_tokens _steps_left"
        yield own._stores.in_flight, "moves num_blocks _next_event"
        if own._eager is not None:
            yield own._eager, "_progress _scheduled"
            yield own._eager.pause, "is_on _num_offered _num_found"
        if own._lazy is not None:
            yield own._lazy, "_seen _is_refused"
        for tier in self._tiers:
            yield tier, "num_held_blocks num_evicted num_skipped _now_ms _is_told"
            yield tier, "num_lost lost"
            yield tier.drops, "_reasons"
            yield tier._notes, "_notes"
            if tier._reuse is not None:
                yield tier._reuse, "_held_back _counts"
        for boundary in own.below:
            yield boundary.tier, "num_found num_left_out bound _is_listed"
            yield (
                boundary,
                "num_fetched_tokens num_lost _is_disabled _must_send_last fetch_of "
                "waits holds _num_holders _num_asks _last_ask _queued _num_released "
                "_num_vain_asks _overdue "
                "_is_bringing looked_up _to_write _to_fetch _to_delete _seen "
                "bytes_per_s probing _probe_of _to_probe _absent probe_s "
                "has_other_writers _awaited",
            )
            yield boundary.counts, " ".join(vars(boundary.counts))
            for ledger in (boundary.fetches, boundary._writes, boundary.probes):
                yield ledger, "moves num_blocks _next_event"
            if boundary._asked is not None:
                yield boundary._asked, "_held_back _counts"

    def _find_arrays(self):
        """Find the memory of all arrays that change."""

        arrays = [*_leaves(self.pool.state), self.scheduler._loads._num_readers]
        host = self._tiers[0]
        # With each policy of the host, the executor that has its arrays.
        self._policies = {
            name: (host._alternatives[name], make_executor(host._alternatives[name]))
            for name in self.setup.policies[1:]
        }
        self._policies[self.serving] = host.policy, host.executor
        executors = [own for _, own in self._policies.values()]
        executors += [tier.executor for tier in self._tiers[1:]]
        self._blanks = {}
        for executor in executors:
            own = _leaves(executor.state)
            self._blanks[executor] = [(a, a.copy()) for a in own]
            arrays += own
        self._memory, start = [], 0
        for array in arrays:
            end = start + array.nbytes
            self._memory.append((memoryview(array.reshape(-1)).cast("B"), start, end))
            start = end
        self._parts = [(part, names.split()) for part, names in self._parts]

    def save(self):
        """Write down all that may change."""
        arrays = b"".join([memory for memory, _, _ in self._memory])
        values = [[getattr(o, name) for name in names] for o, names in self._parts]
        values.append(list(self.scheduler._keys.by_request))
        out = io.BytesIO()
        pickler = pickle.Pickler(out, 5)
        pickler.dispatch_table = {PackedKeys: _reduce_keys}
        pickler.dump(values)
        return arrays, out.getvalue()

    def restore(self, saved):
        """Come back to what was written down."""
        arrays, rest = saved
        for memory, start, end in self._memory:
            memory[:] = arrays[start:end]
        values = pickle.loads(rest)
        names = values.pop()
        for (part, attributes), own in zip(self._parts, values, strict=True):
            for attribute, value in zip(attributes, own, strict=True):
                setattr(part, attribute, value)
        packed = self.scheduler._keys.by_request
        self._growing.update(packed)
        packed.clear()
        # What is kept of keys depends on the request's alone, and is made up to date
        # when it is asked for.
        packed.update((name, self._growing[name]) for name in names)
        self._serve()

    def _serve(self):
        """Have the host go by the policy that serves, in the arrays that are saved."""
        host = self._tiers[0]
        host.policy, host.executor = self._policies[self.serving]
        host._tells_keys = host.policy.listens

    @contextlib.contextmanager
    def _same_executors(self):
        """Have tiers that are emptied keep their arrays, which others know."""
        blank, executors = object(), [tier.executor for tier in self._tiers]
        with mock.patch.object(index_lib, "emptied", return_value=blank):
            yield
        for tier, executor in zip(self._tiers, executors, strict=True):
            if tier.executor is blank:
                tier.executor = executor
                for array, content in self._blanks[executor]:
                    array[...] = content

    # What may happen.

    def actions(self):
        """List what may happen next.

        Always: a request asks and takes what it gets ("admit") and declines what it
        cannot take ("decline"); a step with all that can run, with one of them, or with
        none; a request ends; a transfer lands. With the setup's leave ("acts"):
        a transfer fails ("fail"), or a part of it ("part"); several land at once
        ("together"); a request takes a part of an offer ("less"), is preempted
        ("preempt", and "lose" where only the next step says so), is aborted ("abort"),
        asks as if the device had nothing ("blind"), gets its blocks without asking
        ("unasked") or names them again ("again"); the host is reset ("reset"), the
        device's cache forgotten ("forget") or only its first block ("gap"), the store
        left ("leave"), listed once more ("relist") or in vain ("unlist"); the host's
        policy changes ("change"). A store is listed ("list"); rates are measured
        ("rates").
        """
        acts, actions = self.setup.acts, []
        for n in range(len(self.transfers)):
            actions.append(("land", n))
            if self.transfers[n].is_flushed or self.transfers[n].is_written:
                continue
            if "fail" in acts:
                actions.append(("fail", n))
            is_stored = self.transfers[n].kind in ("fetch", "write")
            if "part" in acts and is_stored and len(self.transfers[n].pairs) > 1:
                actions.append(("part", n))
        if "together" in acts and len(self.transfers) > 1:
            actions.append(("together",))
        running = [r.request_id for r in self.requests if self._can_run(r)]
        actions.append(("step", *running))
        if len(running) > 1:
            actions += [("step", name) for name in running]
        if running:
            actions.append(("step",))
        loads = self.scheduler._loads.by_request
        for r in self.requests:
            name = r.request_id
            if r.phase == DONE:
                continue
            if r.phase == WAITING and name not in self.lost:
                if not self.is_to_reset:
                    hows = [how for how in ("less", "blind") if how in acts]
                    actions += [(how, name) for how in ("admit", *hows)]
                if "unasked" in acts and name not in self.scheduler._num_local:
                    actions.append(("unasked", name))
                load = loads.get(name)
                if load is not None and not load.is_taken:
                    actions.append(("decline", name))
            elif r.phase == RUNNING and self._is_served(r):
                actions.append(("finish", name))
                continue
            elif not r.needs:
                if "preempt" in acts:
                    actions.append(("preempt", name))
                # Who was preempted by a call since the last step is so again.
                if "lose" in acts and name not in self.preempted:
                    actions.append(("lose", name))
            if "again" in acts and r.phase != WAITING:
                actions.append(("again", name))
            if "abort" in acts:
                actions.append(("abort", name))
        if "reset" in acts or self.is_to_reset:
            actions.append(("reset",))
        if "forget" in acts:
            actions.append(("forget",))
        if "gap" in acts:
            actions.append(("gap",))
        if "leave" in acts and not self.is_left:
            actions.append(("leave",))
        if not self.is_listed or "relist" in acts:
            actions.append(("list",))
        if "unlist" in acts:
            actions.append(("unlist",))
        if self.setup.policies:
            actions.append(("change",))
        rates = range(len(self.setup.rates))
        actions += [("rates", n) for n in rates if n != self.rates]
        return actions

    def calm(self):
        """Choose what brings all requests to their end; None if all is over.

        Transfers land, what runs goes on, who waits is admitted as it came, and the
        last one makes room if it must.
        """
        if self.transfers:
            return ("land", 0)
        for r in self.requests:
            if r.phase == RUNNING and self._is_served(r):
                return ("finish", r.request_id)
        running = tuple(r.request_id for r in self.requests if self._can_run(r))
        own = self.scheduler
        if running or self.preempted or self._is_to_leave():
            return ("step", *running)
        waiting = [r for r in self.requests if r.phase == WAITING]
        asked = [r for r in waiting if r.request_id in own._loads.by_request]
        if self.is_to_reset:
            return ("decline", asked[-1].request_id) if asked else ("reset",)
        for r in waiting:
            others = [o for o in asked if o is not r]
            if self._fits(r) or not others:
                if self._fits(r):
                    return ("admit", r.request_id)
            else:
                return ("decline", others[-1].request_id)
        held = [r for r in self.requests if r.phase == RUNNING and not r.needs]
        if held and len(held) + len(waiting) > 1:
            return ("preempt", held[-1].request_id)
        if own.has_pending_stores() or own.has_pending_loads():
            return ("step",)
        return None

    def _is_to_leave(self):
        """Whether a step would send something out."""
        own = self.scheduler
        if own._loads.has_waiting or own._stores.waiting.keys:
            return True
        return any(
            boundary._to_fetch
            or boundary._to_delete
            or boundary._must_send_last
            or boundary._to_probe
            or (boundary._to_write and not boundary._writes.moves)
            for boundary in own.below
        )

    def _fits(self, r):
        """Whether there is room for a request that finds nothing on the device."""
        load = self.scheduler._loads.by_request.get(r.request_id)
        own = len(load.copy_sources) if load is not None else 0
        return self._num_needed(r) <= self.pool.num_free + own

    def _num_needed(self, r):
        return sum(-(-r.num_tokens // spec.block_size) for spec in self.groups)

    def _is_served(self, r):
        return r.num_computed_tokens == len(r.text)

    def _num_lacking(self, r):
        """Blocks that a request lacks for its next tokens, in each group."""
        end = min(r.num_computed_tokens + self.setup.chunk, r.num_tokens)
        return [
            max(-(-end // spec.block_size) - len(table), 0)
            for spec, table in zip(self.groups, r.tables, strict=True)
        ]

    def _can_run(self, r):
        if r.phase != RUNNING or self._is_served(r):
            return False
        return sum(self._num_lacking(r)) <= self.pool.num_free

    def do(self, action):
        """Let something happen, and look whether all is right.

        Raises:
            WrongError: It is not.
        """
        kind, *rest = action
        self.seen[kind] += 1
        try:
            getattr(self, f"_do_{kind}")(*rest)
        except WrongError:
            raise
        except Exception as error:
            raise WrongError(f"{type(error).__name__}: {error}") from error
        self.check()

    def _named(self, name):
        return self.requests[int(name[1:])]

    def _do_admit(self, name, less=0, is_blind=False):
        r, pool, own = self._named(name), self.pool, self.scheduler
        most = 0 if is_blind else r.num_tokens - 1
        keys = r.block_keys_by_group
        local, tables = find_cached_prefix(pool, self.groups, keys, most)
        for table in tables:
            pool.touch(table)
        told = own.explain(r, local)
        offers = self._offers(r, local, is_blind)
        self._check_verdicts(r, told)
        offer = own.get_num_new_matched_tokens(r, local)
        expect(
            offer == (told.num_offered_tokens, told.is_awaited),
            lambda: f"explain says {told}, and the query {offer}",
        )
        num, is_awaited = offer
        expect(
            num is None or num in offers,
            lambda: f"{num} tokens are offered, and there are {offers} to offer",
        )
        needed = [
            -(-r.num_tokens // spec.block_size) - len(table)
            for spec, table in zip(self.groups, tables, strict=True)
        ]
        if self.setup.holds_waiting and num:
            # As many as the load takes; the others when it is there.
            needed = [local + num - len(table) for table in tables]
        if num is None or sum(needed) > pool.num_free:
            self.seen["asks again" if num is None else "no room"] += 1
            for table in tables:
                pool.free(table[::-1])
            return
        taken = max(num - less, 0)
        for table, lacking in zip(tables, needed, strict=True):
            table += pool.allocate(lacking)
        r.tables, r.num_computed_tokens = tables, local
        after = own.update_state_after_alloc(r, r.table, taken)
        if taken and is_awaited:
            r.phase, r.offer, r.after = LOADING, taken, after
            self.seen["loads"] += 1
            return
        r.phase = RUNNING
        self._take(r, taken, after)

    def _where(self, r):
        """Where the blocks of a request are: on the device, and with their row on the
        host.
        """
        factor = self.setup.rules.blocks_per_host_block
        for g, keys in enumerate(r.block_keys_by_group):
            on_device, on_host = (
                (tier.find(keys) != NO_BLOCK).tolist()
                for tier in (self.pool, self._tiers[0])
            )
            for i in range(len(keys)):
                row = i // factor * factor + factor - 1
                yield (g, i), on_device[i], row < len(keys) and on_host[row]

    def _offers(self, r, local, is_blind):
        """How many tokens may be offered beyond those that the device has.

        All that both tiers have, or, where blocks of the device are not copied, without
        those behind a gap.
        """
        places = {at: (device, host) for at, device, host in self._where(r)}

        def longest(has):
            return longest_prefix(
                self.groups,
                [len(keys) for keys in r.block_keys_by_group],
                has,
                r.num_tokens - 1,
                alignment(self.groups),
            )

        own = longest(lambda g, i: places[g, i][0])
        expect(is_blind or local == own, lambda: f"the device has {own}, not {local}")
        offers = {
            max(longest(lambda g, i: any(places[g, i])) - local, 0),
            max(
                longest(
                    lambda g, i: (
                        places[g, i][1]
                        or (i < local // self.groups[g].block_size and places[g, i][0])
                    )
                )
                - local,
                0,
            ),
        }
        return offers | {0} if self.setup.rules.skip_slow_loads else offers

    def _check_verdicts(self, r, told):
        """Look whether blocks are where they are said to be, and nowhere else."""
        said = {(block.group, block.index): block for block in told.blocks}
        places = list(self._where(r))
        expect(list(said) == [at for at, *_ in places], lambda: f"{told} is not all")
        for at, on_device, on_host in places:
            block = said[at]
            is_past = block.first_token + block.num_tokens >= r.num_tokens
            is_right = (block.reason == "last token") == is_past
            if block.verdict == "device":
                is_right &= on_device
            elif block.verdict == "host":
                is_right &= on_host
            elif block.reason in ("gap", "other group", "no room", "no copy"):
                is_right &= on_device or on_host
            elif block.reason not in ("last token", "window", "loading"):
                is_right &= not (on_device or on_host)
            expect(is_right, lambda block=block: f"{block} of {r.request_id} is wrong")

    def _do_less(self, name):
        self._do_admit(name, alignment(self.groups))

    def _do_blind(self, name):
        self._do_admit(name, is_blind=True)

    def _do_unasked(self, name):
        r = self._named(name)
        lacking = [-(-r.num_tokens // spec.block_size) for spec in self.groups]
        if sum(lacking) > self.pool.num_free:
            return
        r.tables = [self.pool.allocate(num) for num in lacking]
        r.phase = RUNNING
        self._do_again(name)

    def _do_again(self, name):
        r = self._named(name)
        tables = self.scheduler.update_state_after_alloc(r, r.table, 0)
        expect(tables == r.tables, lambda: f"{tables} instead of {r.tables}")

    def _take(self, r, num, after):
        """Go on after what was offered."""
        if not self.setup.keeps_tables:
            for table, new in zip(r.tables, after, strict=True):
                self.pool.free([block for block in table if block not in new])
            r.tables = after
        r.num_computed_tokens += num
        r.offer, r.after = 0, None
        if self.setup.holds_waiting:
            r.needs = sum(self._num_lacking(r))

    def _do_decline(self, name):
        self.scheduler.update_state_after_alloc(self._named(name), [], 0)

    def _do_step(self, *names):
        pool, scheduled, new_blocks = self.pool, {}, {}
        for r in map(self._named, names):
            lacking = self._num_lacking(r)
            if sum(lacking) > pool.num_free:
                continue
            new = [pool.allocate(num) for num in lacking]
            for table, blocks in zip(r.tables, new, strict=True):
                table += blocks
            if any(new):
                new_blocks[r.request_id] = new if len(new) > 1 else new[0]
            r.needs = 0
            left = r.num_tokens - r.num_computed_tokens
            scheduled[r.request_id] = min(left, self.setup.chunk)
        preempted, self.preempted, self.lost = self.preempted, [], []
        output = SchedulerOutput(scheduled, new_blocks, preempted)
        meta = self.scheduler.build_connector_meta(output)
        self._start(meta)
        for name, num in scheduled.items():
            self._compute(self._named(name), num)
        for name in scheduled:
            self._cache(self._named(name))
        self._report([])

    def _compute(self, r, num):
        start, end = r.num_computed_tokens, r.num_computed_tokens + num
        for g, (spec, table) in enumerate(zip(self.groups, r.tables, strict=True)):
            size = spec.block_size
            for i in range(first_read(spec, start), -(-start // size)):
                found = self._read(table[i])
                right = content(g, r.text, min((i + 1) * size, start))
                expect(
                    found == right,
                    lambda i=i, found=found, right=right: (
                        f"{r.request_id} reads {found!r} in block {i}, not {right!r}"
                    ),
                )
            for i in range(start // size, -(-end // size)):
                self._write(table[i], content(g, r.text, min((i + 1) * size, end)))
        r.num_computed_tokens, is_ahead = end, self.setup.is_ahead
        is_growing = end == r.num_tokens < len(r.text)
        r.num_tokens += is_growing
        is_uncertain = is_ahead and is_growing and end > r.num_prompt_tokens
        r.num_output_placeholders = int(is_uncertain)

    def _cache(self, r):
        """Make full blocks findable."""
        for spec, table, keys in zip(
            self.groups, r.tables, r.block_keys_by_group, strict=True
        ):
            num_certain = r.num_computed_tokens - r.num_output_placeholders
            full = num_certain // spec.block_size
            self.pool.cache(table[:full], keys[:full])

    def _read(self, block):
        expect(
            all(block != to for t in self._loading() for _, to in t.pairs),
            lambda: f"block {block} is read while it is loaded",
        )
        return self.device[block]

    def _write(self, block, what):
        expect(block != NULL_BLOCK, lambda: "the null block is written")
        busy = [
            t.kind
            for t in self.transfers
            for source, target in t.pairs
            if (t.kind == "store" and source == block)
            or (t.kind == "load" and target == block and not t.is_written)
        ]
        expect(not busy, lambda: f"block {block} is written during a {busy[0]}")
        self.device[block] = what

    def _loading(self):
        return [t for t in self.transfers if t.kind == "load" and not t.is_written]

    def _start(self, meta):
        """Start the transfers of a step, as a worker does."""
        if meta.need_flush:
            for transfer in self.transfers:
                transfer.is_flushed = True
        factor = self.setup.rules.blocks_per_host_block
        if meta.store_event != NO_EVENT:
            blocks = meta.store_device_blocks
            hosts = [host for host in meta.store_host_blocks for _ in range(factor)]
            pairs = list(zip(blocks, hosts, strict=True))
            self._give(meta.store_host_blocks, "store")
            contents = [self._read(block) for block in blocks]
            self._begin("store", meta.store_event, pairs, contents)
        for source, target in zip(
            meta.copy_from_blocks, meta.copy_to_blocks, strict=True
        ):
            self._write(target, self._read(source))
            self.seen["copies"] += 1
        if meta.load_event != NO_EVENT:
            start, names = 0, meta.load_event_to_reqs[meta.load_event]
            for name, size in zip(names, meta.load_sizes, strict=True):
                hosts = meta.load_host_blocks[start : start + size]
                targets = meta.load_device_blocks[start * factor :][: size * factor]
                pairs = [
                    (hosts[n // factor], target)
                    for n, target in enumerate(targets)
                    if target != NO_BLOCK
                ]
                contents = [
                    self._held(host, n % factor)
                    for n, host in enumerate(
                        host for host in hosts for _ in range(factor)
                    )
                ]
                contents = [
                    c for c, t in zip(contents, targets, strict=True) if t != NO_BLOCK
                ]
                start += size
                for (_, target), what in zip(pairs, contents, strict=True):
                    self._write(target, what if meta.load_in_step else GARBAGE)
                self._begin("load", name, pairs, contents)
                # The step's own program writes them, or fails with all of it.
                self.transfers[-1].is_written = meta.load_in_step
        for moves in meta.below:
            self._start_below(moves)

    def _start_below(self, moves):
        """Start what a step asks of the store."""
        asks = moves.fetches or moves.writes or moves.deletes or moves.probes
        expect(not (self.is_left and asks), lambda: "a store that was left is used")
        for key in moves.deletes:
            self.objects.pop(key, None)
        for probe in moves.probes:
            pairs = [(key, NO_BLOCK) for run in probe.runs for key in run]
            self._begin("probe", probe.event, pairs, [GARBAGE] * len(pairs))
        for kind, batches in (("fetch", moves.fetches), ("write", moves.writes)):
            for batch in batches:
                pairs = list(zip(batch.keys, batch.upper_blocks, strict=True))
                if kind == "fetch":
                    self._give(batch.upper_blocks, "fetch")
                    contents = [self.objects.get(key, GARBAGE) for key in batch.keys]
                else:
                    contents = [self.host[host] for host in batch.upper_blocks]
                self._begin(kind, batch.event, pairs, contents)

    def _held(self, host, part):
        """What a part of a host block has."""
        return self.host[host].split("|")[part] if self.host[host] else GARBAGE

    def _begin(self, kind, name, pairs, contents):
        self.transfers.append(
            Transfer(kind, name, pairs, contents, [True] * len(pairs))
        )
        self.seen[f"{kind} begins"] += 1

    def _give(self, hosts, kind):
        """Give host blocks to what is to write them; their bytes are gone."""
        for transfer in self.transfers:
            own = {host for _, host in transfer.pairs}
            own = {h for h, _ in transfer.pairs} if transfer.kind == "load" else own
            if own & set(hosts):
                # What a reset has made the tiers forget may still be under way.
                expect(
                    self._is_forgotten(transfer),
                    lambda t=transfer: f"a {kind} is given a block of a {t.kind}",
                )
                transfer.is_owner = False
        for host in hosts:
            self.host[host] = GARBAGE

    def _is_forgotten(self, transfer):
        own = self.scheduler
        if transfer.kind == "store":
            return own._stores.in_flight.moves[transfer.name].is_stale
        if transfer.kind == "write":
            return own.below[0]._writes.moves[transfer.name].is_stale
        return False

    def _do_land(self, n):
        self._report([self._end(n, True)])

    def _do_fail(self, n):
        self._report([self._end(n, False)])

    def _do_part(self, n):
        self._report([self._end(n, True, is_part=True)])

    def _do_together(self):
        outputs = []
        while self.transfers:
            outputs.append(self._end(0, True))
        self._report(outputs)

    def _do_list(self):
        """List what is there; too much of it is deleted, the oldest first."""
        self.is_listed, bound, gone = True, None, ()
        found = tuple(self.objects)
        if self.setup.bound is not None:
            gone = found[: max(len(found) - self.setup.bound, 0)]
            for key in gone:
                del self.objects[key]
            bound = self.setup.bound, len(self.objects)
        # A page may have been read before its blocks were deleted.
        listed = TierReport(found=found, listed=True, bound=bound, gone=gone)
        self._report([ConnectorOutput(below=(listed,))])

    def _do_unlist(self):
        self._report([ConnectorOutput(below=(TierReport(listed=False),))])

    def _do_rates(self, n):
        self.rates = n
        self.scheduler.note_rates(*self.setup.rates[n])

    def _is_private(self, key):
        return self.setup.private in self._contents[key]

    def _end(self, n, ok, is_part=False):
        """End a transfer on one of the workers; give the report.

        Where it is the last one, that is what the tiers see.
        """
        t = self.transfers[n]
        self.seen[f"{t.kind} {'lands' if ok else 'fails'}"] += 1
        oks = [ok] * len(t.pairs)
        if is_part:
            oks[-1] = False
        if t.kind == "fetch":
            oks = [
                ok and bool(what) and t.is_owner
                for ok, what in zip(oks, t.contents, strict=True)
            ]
        if t.kind == "probe":
            oks = [ok and key in self.objects for key, _ in t.pairs]
        self._check_sources(t)
        t.num_reports += 1
        t.oks = [before and now for before, now in zip(t.oks, oks, strict=True)]
        if t.num_reports == self.setup.rules.world_size:
            del self.transfers[n]
            self._arrive(t)
        if t.kind == "store":
            if ok:
                return ConnectorOutput(completed_store_events=(t.name,))
            return ConnectorOutput(failed_store_events=(t.name,))
        if t.kind == "load":
            if ok:
                return ConnectorOutput(finished_recving=(t.name,))
            return ConnectorOutput(failed_recving=(t.name,))
        ended = ((t.name, tuple(oks)),)
        if t.kind == "fetch":
            return ConnectorOutput(below=(TierReport(fetched=ended),))
        if t.kind == "probe":
            return ConnectorOutput(below=(TierReport(probed=ended),))
        return ConnectorOutput(below=(TierReport(written=ended),))

    def _check_sources(self, t):
        """Look whether what is read is still what it was."""
        for (source, target), what in zip(t.pairs, t.contents, strict=True):
            if t.kind == "store":
                expect(
                    self.device[source] == what,
                    lambda source=source: f"block {source} was written while stored",
                )
            elif t.kind == "load":
                expect(
                    what in self.host[source].split("|") and what,
                    lambda what=what, host=source: (
                        f"host block {host} had {what!r}, has {self.host[host]!r}"
                    ),
                )
            elif t.kind == "write":
                expect(
                    self.host[target] == what or not t.is_owner,
                    lambda host=target: f"host block {host} changed while written",
                )

    def _arrive(self, t):
        """Have what all workers have moved be where it goes."""
        if t.kind == "store":
            rows = {}
            for (_, host), what in zip(t.pairs, t.contents, strict=True):
                rows.setdefault(host, []).append(what)
            for host, parts in rows.items():
                if t.is_owner:
                    self.host[host] = "|".join(parts) if all(t.oks) else GARBAGE
            return
        for (source, target), what, ok in zip(t.pairs, t.contents, t.oks, strict=True):
            if t.kind == "load" and not t.is_written:
                self.device[target] = what if ok else GARBAGE
            elif t.kind == "fetch" and t.is_owner:
                self.host[target] = what if ok else GARBAGE
            elif t.kind == "write" and ok:
                self.objects[source] = what

    def _report(self, outputs):
        answer = self.scheduler.update_connector_output(
            ConnectorOutput.aggregate(outputs)
        )
        for name in answer.finished_recving:
            if name in self.lost:  # The scheduler does not know that yet.
                continue
            r = self._named(name)
            expect(r.phase == LOADING, lambda r=r: f"{r.request_id} waits for none")
            r.phase = RUNNING
            self._take(r, r.offer, r.after)
            self._cache(r)
        for name in answer.failed_recving:
            if name in self.lost:  # The scheduler does not know that yet.
                continue
            r = self._named(name)
            expect(r.phase == LOADING, lambda r=r: f"{r.request_id} waits for none")
            r.phase, r.offer, r.after = RUNNING, 0, None
            if self.setup.holds_waiting:
                r.needs = sum(self._num_lacking(r))

    def _leave(self, r, phase):
        for table in r.tables:
            self.pool.free(table[::-1])
        r.tables = [[] for _ in self.groups]
        r.phase, r.offer, r.after, r.needs = phase, 0, None, 0
        r.num_output_placeholders = 0

    def _do_preempt(self, name, is_told=True):
        r = self._named(name)
        if is_told:
            self.scheduler.request_preempted(r)
        else:
            self.lost = sorted({*self.lost, name})
        self._leave(r, WAITING)
        r.num_computed_tokens = 0
        self.preempted = sorted({*self.preempted, name})

    def _do_lose(self, name):
        self._do_preempt(name, is_told=False)

    def _do_finish(self, name):
        r = self._named(name)
        self.scheduler.request_finished(r, r.table)
        self._leave(r, DONE)

    def _do_abort(self, name):
        r = self._named(name)
        self.scheduler.request_finished(r)
        self._leave(r, DONE)
        if name in self.preempted:
            self.preempted.remove(name)
        if name in self.lost:
            self.lost.remove(name)

    def _do_reset(self):
        is_held = self.scheduler.has_pending_loads()
        with self._same_executors():
            is_done = self.scheduler.reset()
        expect(is_done != is_held, lambda: "a reset under a load")
        self.seen["reset done"] += is_done
        self.is_to_reset &= not is_done

    def _do_leave(self):
        # If it cannot be done now, it is before anything is asked for again.
        self.is_to_reset = True
        self._do_reset()
        with self._same_executors():
            self.scheduler.disable_storage()
        self.is_left = True

    def _do_forget(self):
        self.pool.evict(range(1, self.pool.num_blocks))

    def _do_gap(self):
        blocks = self.pool.find(self._all_keys[:1])
        self.pool.evict(blocks[blocks != NO_BLOCK])

    def _do_change(self):
        """Have the next policy take over, as `auto` does; every block stays."""
        names, host = self.setup.policies, self._tiers[0]
        before = self._kept(host)
        self.serving = names[(names.index(self.serving) + 1) % len(names)]
        host.change_policy(self.serving)
        changed = _leaves(host.executor.state)
        self._serve()
        for array, new in zip(_leaves(host.executor.state), changed, strict=True):
            array[...] = new
        expect(
            self._kept(host) == before,
            lambda: f"{before} became {self._kept(host)} with another policy",
        )

    def _kept(self, tier):
        """What no policy may change: which block has a key, its uses, the free ones."""
        shot = tier.snapshot()
        return shot.block_ids, shot.ref_cnt, shot.free_ids

    # What has to hold.

    def check(self):
        """Look whether all is right.

        Raises:
            WrongError: It is not.
        """
        keys, contents = self._all_keys, self._contents
        for tier, cells in ((self.pool, self.device), (self._tiers[0], self.host)):
            found = tier.find(keys).tolist()
            for key, block in zip(keys, found, strict=True):
                if block == NO_BLOCK:
                    continue
                what = cells[block]
                if tier is not self.pool:
                    what = what.split("|")[-1]
                expect(
                    what == contents[key],
                    lambda what=what, key=key, tier=tier: (
                        f"{contents[key]!r} is found in the {tier.medium} tier, where "
                        f"{what!r} is"
                    ),
                )
        self._check_holds()
        own = self.scheduler
        for event in own.take_events():
            told = self.told[event.medium]
            if event.removed:
                gone = event.block_hashes or list(told)
                for key in gone:
                    del told[key]
            else:
                told.update(dict.fromkeys(event.block_hashes))
        for tier in self._tiers * self.setup.has_events:
            found = set(compress(keys, (tier.find(keys) != NO_BLOCK).tolist()))
            told = self.told[tier.medium]
            expect(
                told.keys() == found,
                lambda tier=tier, told=told, found=found: (
                    f"events say that the {tier.medium} tier has {len(told)} blocks, "
                    f"and it has {len(found)}"
                ),
            )
        is_public = not (
            self.setup.private and any(map(self._is_private, self.objects))
        )
        expect(is_public, lambda: "a private block is in the store")
        stats = own._stats
        dropped = stats.num_dropped_full + stats.num_dropped_slow
        dropped += stats.num_dropped_failed + stats.num_dropped_reset
        transit = own.in_transit
        moving = transit.stores_waiting + transit.stores_in_flight
        expect(
            stats.num_offered == stats.num_stored + dropped + moving,
            lambda: f"{stats} and {transit} do not add up",
        )
        if all(r.phase == DONE for r in self.requests) and not self.transfers:
            self._check_end()

    def _check_holds(self):
        """Look whether each block is held as often as it is used, and no more."""
        own, is_live = self.scheduler, lambda move: not move.is_stale
        stores = own._stores.in_flight.moves.values()
        used = [block for r in self.requests for table in r.tables for block in table]
        moved = [own._stores.waiting.sources, *(store.sources for store in stores)]
        read, offered = [NO_IDS], [NO_IDS]
        for load in own._loads.by_request.values():
            moved += [load.written_blocks, load.copy_targets]
            moved += [load.copy_sources] * (load.event == NO_EVENT)
            offered += [load.copy_sources] * (not load.is_taken)
            read.append(load.sources)
        written = [own._stores.waiting.targets]
        written += [store.targets for store in filter(is_live, stores)]
        for boundary in own.below:
            read += [wait.rows for wait in boundary.waits.values()]
            read += boundary.holds.values()
            writes = filter(is_live, boundary._writes.moves.values())
            read += [write.sources for write in writes]
            written += [move.targets for move in boundary.fetches.moves.values()]

        def count(ids, num):
            return np.bincount(np.concatenate(ids).astype(int), minlength=num)

        held = count([used], self.pool.num_blocks)
        held[NULL_BLOCK] = 0
        pinned = count(moved, self.pool.num_blocks)
        rows = count(read, self._tiers[0].num_blocks)
        rows[np.concatenate(written).astype(int)] = -1
        state = self.pool.state
        for what, found, right in (
            ("held", state.ref_cnt, held),
            ("pinned", state.pins, pinned),
            ("offered", state.offers, count(offered, self.pool.num_blocks)),
            ("held on the host", self._tiers[0].executor.state.ref_cnt, rows),
        ):
            if what == "held on the host" and self.is_left:
                continue  # A store that was left still holds what it moves.
            expect(
                np.array_equal(found, right),
                lambda what=what, found=found, right=right: (
                    f"blocks are {what} {found} times, and used {right} times"
                ),
            )

    def _check_end(self):
        own = self.scheduler
        if own.has_pending_loads() or own.has_pending_stores() or self.is_to_reset:
            return
        self.seen["ends"] += 1
        num_free, num = self.pool.num_free, self.pool.num_blocks - 1
        expect(num_free == num, lambda: f"{num_free} of {num} device blocks are free")
        self.pool.check()
        for tier in self._tiers:
            pins = np.asarray(tier.executor.state.ref_cnt)
            expect(not pins.any(), lambda pins=pins: f"pinned at the end: {pins}")
        kept = {
            "known": own._known,
            "num_local": own._num_local,
            "keys": own._keys.by_request,
            "fetched": [
                r for r in self.requests if own.num_fetched_tokens(r.request_id)
            ],
            "offered": own.delays._offered_s,
            "deferred": own.delays._deferred_s,
            "in transit": any(own.in_transit),
        }
        if own._eager is not None:
            kept["progress"] = own._eager._progress
        for boundary in own.below:
            kept["looked up"] = boundary.looked_up
            kept["probing"] = boundary.probing
            kept["held"] = boundary.holds | boundary._num_holders
            kept["queued"] = boundary._queued | boundary._last_ask
        left = {name: value for name, value in kept.items() if value}
        expect(not left, lambda: f"left at the end: {left}")

    def try_refused(self):
        """Call what is refused; nothing may change.

        Raises:
            WrongError: Something was not refused, or changed something.
        """
        before, own, pool = self.save(), self.scheduler, self.pool
        r = self.requests[0]
        size = r.groups[0].block_size
        event = own._stores.in_flight._next_event
        nobody = Request("nobody", r.text, r.num_prompt_tokens, r.groups)
        far = [[pool.num_blocks]] * len(self.groups)
        far = far if len(far) > 1 else far[0]
        report, output = own.update_connector_output, ConnectorOutput
        stopped = Request("nobody", r.text, r.num_prompt_tokens, r.groups)
        stopped.stop = "tired"
        bare = SimpleNamespace(request_id="nobody")
        keyless = SimpleNamespace(
            **vars(bare), block_keys=(), num_tokens=1, num_computed_tokens=0
        )
        refused = [
            lambda: own.get_num_new_matched_tokens(bare, 0),
            lambda: own.request_finished(stopped),
            lambda: own.request_finished(nobody, [[1]] * (1 + len(self.groups))),
            lambda: own.note_rates(-1.0, 1.0),
            lambda: own.get_num_new_matched_tokens(nobody, -1),
            lambda: own.update_state_after_alloc(nobody, [], size),
            lambda: own.update_state_after_alloc(nobody, far, 0),
            lambda: own.build_connector_meta(SchedulerOutput({}, {"r0": far})),
            lambda: own.request_finished(nobody, far),
            lambda: report(output(finished_recving=("nobody",))),
            lambda: report(output(completed_store_events=(event,))),
            lambda: report(output(below=(TierReport(fetched=((10**6, (True,)),)),))),
            lambda: report(output(below=(TierReport(probed=((10**6, (True,)),)),))),
            lambda: pool.allocate(pool.num_free + 1),
            lambda: pool.free([pool.num_blocks]),
            lambda: pool.unpin([pool.num_blocks]),
        ]
        if len(self.groups) > 1:
            refused.append(lambda: own.get_num_new_matched_tokens(keyless, 0))
        if not own.below:
            refused.append(lambda: report(output(below=(TierReport(),))))
        if own._manager.retains:
            stopped.stop, stopped.retention = None, "long"
            refused.append(lambda: own.update_state_after_alloc(stopped, [], 0))
        allocated = own.update_state_after_alloc
        for other in self.requests:
            load = own._loads.by_request.get(other.request_id)
            if load is None:
                continue
            if load.is_taken:
                if other.phase != WAITING:
                    refused.append(lambda o=other: allocated(o, o.table, size))
                continue
            num = -(-(load.num_computed_tokens + load.num_tokens) // size)
            tables = [[], [NULL_BLOCK] * num]
            if len(load.sources) + len(load.copy_sources) > 1:
                tables.append([1] * num)
            if len(self.groups) > 1:
                tables = [[own] * len(self.groups) for own in tables]
            refused += [
                lambda o=other, n=load.num_tokens, table=table: allocated(o, table, n)
                for table in tables
            ]
            refused.append(
                lambda o=other, n=load.num_tokens: allocated(o, [], n + size)
            )
        for t in self.transfers:
            events = (t.name,) * (1 + self.setup.rules.world_size - t.num_reports)
            what = "completed_store_events" if t.kind == "store" else "failed_recving"
            if t.kind in ("store", "load"):
                refused.append(lambda w=what, e=events: report(output(**{w: e})))
        for number, call in enumerate(refused):
            try:
                call()
            except (ValueError, TypeError):
                continue
            raise WrongError(f"call {number} of `try_refused` was not refused")
        for other in self.requests:
            if other.phase == WAITING:
                own.explain(other)
        expect(
            self.save() == before,
            lambda: "a refused call, or explain, has changed something",
        )

    # Canonical names.

    def digest(self):
        """Name this world so that worlds with equal names have equal futures."""
        return hashlib.blake2b(
            marshal.dumps(self.canonical(), 2), digest_size=16
        ).digest()

    def canonical(self):
        """Say all that the future depends on, in canonical names."""
        own, state = self.scheduler, self.pool.state
        newer = state.newer.tolist()
        order, block = [], newer[NULL_BLOCK]
        while block != NULL_BLOCK:
            order.append(block)
            block = newer[block]
        seen = {NULL_BLOCK, *order}
        num_queued = len(order)
        for r in self.requests:
            for table in r.tables:
                for block in table:
                    if block not in seen:
                        seen.add(block)
                        order.append(block)
        order += [b for b in range(self.pool.num_blocks) if b not in seen]
        dev = {NULL_BLOCK: 0, NO_BLOCK: -1}
        for n, block in enumerate(order):
            dev[block] = n + 1
        has_key, refs = state.has_key.tolist(), state.ref_cnt.tolist()
        pins = state.pins.tolist()
        following, preceding = state.following.tolist(), state.preceding.tolist()
        raw, key_ids = state.directory.keys.tobytes(), self._key_ids
        device = []
        for b in order:
            chain = ()
            if has_key[b]:
                link = preceding[b]
                link = dev[link] if link >= 0 else -1 - dev[~link]
                chain = key_ids[raw[32 * b : 32 * b + 32]], dev[following[b]], link
            device.append(
                (chain, refs[b], pins[b], self.device[b], b in self.pool.unwritten)
            )
        hosts, host = self._canonical_tier(self._tiers[0])
        copies = tuple([hosts[b] for b in state.copies[order].tolist()])
        lost = b"".join(words.tobytes() for words in self._tiers[0].lost or ())
        gone = tuple([key_ids[lost[n : n + 32]] for n in range(0, len(lost), 32)])
        host = (
            host,
            copies,
            gone,
            tuple(self.host[b] for b in hosts if b >= 0),
            tuple(own._loads._num_readers[[b for b in hosts if b >= 0]].tolist()),
        )

        def rows(ids):
            return tuple([hosts[b] for b in _listed(ids)])

        def blocks(ids):
            return tuple([dev[b] for b in _listed(ids)])

        def keys(names):
            return tuple([key_ids[key] for key in names])

        loads = tuple(
            (
                name,
                load.num_computed_tokens,
                load.num_tokens,
                rows(load.sources),
                tuple(load.row_groups.tolist()),
                tuple(load.row_indices.ravel().tolist()),
                blocks(load.copy_sources),
                tuple(load.copy_groups.tolist()),
                tuple(load.copy_indices.tolist()),
                load.is_awaited,
                load.is_taken,
                blocks(load.targets.ravel()),
                blocks(load.copy_targets),
                load.event != NO_EVENT,
                load.num_reports,
                load.ok,
                load.is_stale,
                blocks(load.skipped),
                blocks(load.written_blocks),
            )
            for name, load in sorted(own._loads.by_request.items())
        )
        all_loads = own._loads
        queue = tuple(all_loads._waiting), tuple(all_loads._copying)

        def batch(sent):
            return (
                keys(sent.keys),
                blocks(sent.sources),
                rows(sent.targets),
                sent.num_reports,
                sent.ok,
                sent.is_stale,
            )

        stores = own._stores
        moving = (
            batch(stores.waiting),
            own._store_steps._num_tokens,
            own._store_steps._steps_left,
            tuple(batch(sent) for _, sent in sorted(stores.in_flight.moves.items())),
            stores.in_flight.num_blocks,
            stores._num_known_in_flight,
            all_loads.in_flight.num_blocks,
        )
        chosen = ()
        if own._eager is not None:
            chosen = tuple(
                (
                    name,
                    tuple(map(blocks, p.tables)),
                    tuple(p.num_offered),
                    p.next_tokens,
                    p.refused_at == stores.num_changes,
                    p.is_ordered,
                    p.num_lost == self._tiers[0].num_lost,
                    p.is_left_out,
                )
                for name, p in sorted(own._eager._progress.items())
            )
            chosen += tuple(own._eager._scheduled)
            pause, stats = own._eager.pause, own._stats
            if own.rules.pause_unused_stores:
                num_unused = stats.num_offered - pause._num_offered
                has_found = stats.num_host_hit_tokens != pause._num_found
                chosen += pause.is_on, min(num_unused, pause._most_unused), has_found
        elif own._lazy._seen is not None:
            changes, free, refused_at = own._lazy._seen
            _, free_now, refused_now = own._lazy._look(self.pool)
            is_same = (changes, refused_at) == (self.pool.num_changes, refused_now)
            chosen = (free - free_now, own._lazy._is_refused) if is_same else ()
        gate = own._gate
        told = (
            tuple(sorted(own._num_local.items())),
            tuple(sorted(own._known)),
            tuple(sorted(own._preempted)),
            gate._num_slow % _PROBE_INTERVAL,
            gate._num_slow_fetches % _PROBE_INTERVAL,
            self._canonical_reuse(self._tiers[0]._reuse),
        )
        engine = (
            tuple(
                (
                    r.phase,
                    r.num_tokens,
                    r.num_computed_tokens,
                    r.num_output_placeholders,
                    tuple(map(blocks, r.tables)),
                    r.offer,
                    None if r.after is None else tuple(map(blocks, r.after)),
                    r.needs,
                )
                for r in self.requests
            ),
            tuple(self.preempted),
            tuple(self.lost),
            self.is_listed,
            self.is_left,
            self.is_to_reset,
            self.rates,
            self.serving,
        )
        transfers = []
        for t in self.transfers:
            sources, targets = zip(*t.pairs, strict=True)
            if t.kind == "load":
                ids = rows(sources), blocks(targets)
            else:
                named = blocks if t.kind == "store" else keys
                ids = named(sources), rows(targets)
            name = t.name if t.kind == "load" else ""
            transfers.append(
                (
                    t.kind,
                    name,
                    ids,
                    tuple(t.contents),
                    tuple(t.oks),
                    t.num_reports,
                    t.is_owner,
                    t.is_flushed,
                    t.is_written,
                )
            )
        return (
            num_queued,
            tuple(device),
            host,
            loads,
            queue,
            moving,
            chosen,
            told,
            engine,
            tuple(transfers),
            self._canonical_storage(rows, keys),
        )

    def _canonical_tier(self, tier):
        """Name a tier's blocks in the order in which they go; say what they hold."""
        state, key_ids = tier.executor.state, self._key_ids
        memory = tuple((key_ids[key], why) for key, why in tier.drops._reasons.items())
        notes = self.scheduler._notifier._marks, tier._notes._notes
        memory += (repr(notes),) * tier.listens
        num_fresh = tier.num_blocks - int(state.pool.num_allocated)
        memory += num_fresh, tier.num_held_blocks
        if not isinstance(state.policy, LRUState):
            shot = tier.snapshot()
            named = sorted(shot.block_ids.items())
            order = [block for _, block in named] + shot.free_ids
            names = {block: n for n, block in enumerate(order)}
            names[NO_BLOCK] = -1
            return names, (repr((shot.policy, shot.ref_cnt)), memory)
        places = state.policy.order.places.tolist()
        held = sorted((place, b) for b, place in enumerate(places) if place >= 0)
        pool = state.pool
        order = [b for _, b in held]
        order += range(int(pool.num_allocated), tier.num_blocks)
        order += pool.freed[: int(pool.num_freed)].tolist()[::-1]
        names = {b: n for n, b in enumerate(order)}
        names[NO_BLOCK] = -1
        refs = state.ref_cnt.tolist()
        raw = state.policy.directory.keys.tobytes()
        what = tuple((key_ids[raw[32 * b : 32 * b + 32]], refs[b]) for _, b in held)
        return names, (what, memory)

    def _canonical_reuse(self, reuse):
        if reuse is None:
            return ()
        counts = sorted(
            (self._key_ids[key], min(num, max(reuse.threshold, 1)))
            for key, num in reuse._counts.items()
        )
        held = sorted(self._key_ids[key] for key in reuse._held_back)
        return tuple(counts), tuple(held)

    def _canonical_storage(self, rows, keys):
        if not self.scheduler.below:
            return ()
        (storage,) = self.scheduler.below
        places, tier = self._canonical_tier(storage.tier)
        fetches = sorted(storage.fetches.moves)
        ranks = {event: n for n, event in enumerate(fetches)}
        probes = sorted(storage.probes.moves)

        def batch(own, host_blocks, of_store):
            return (
                keys(own.keys),
                rows(host_blocks.tolist()),
                tuple([places[b] for b in of_store.tolist()]),
                tuple(own.ok.tolist()) if own.num_reports else (),
                own.num_reports,
                tuple(own.waiters),
                own.is_stale,
            )

        look = storage._seen
        if look is not None:
            evicted, *others = look
            is_now = evicted == self._tiers[0].num_evicted
            look = tuple(others) if is_now else None
        num_found, bound = storage.tier.num_found, storage.tier.bound
        return (
            tier,
            (-1, -1) if bound is None else (bound, storage.tier.num_left_out),
            tuple(sorted((keys([k])[0], what) for k, what in self.objects.items())),
            tuple(
                batch(own, own.targets, own.sources)
                for _, own in sorted(storage.fetches.moves.items())
            ),
            tuple(
                batch(own, own.sources, own.targets)
                for _, own in sorted(storage._writes.moves.items())
            ),
            tuple(
                (
                    name,
                    tuple(sorted(ranks[event] for event in wait.events)),
                    rows(wait.rows),
                    tuple(sorted((keys([k])[0], n) for k, n in wait.ends.items())),
                    tuple(sorted(wait.arrived_ends)),
                )
                for name, wait in sorted(storage.waits.items())
            ),
            tuple((name, rows(ids)) for name, ids in sorted(storage.holds.items())),
            tuple(
                (
                    name,
                    own.num_asks,
                    tuple(
                        sorted(
                            other
                            for other in {*storage.holds, *storage.waits}
                            if storage._last_ask[other] < own.first_ask
                        )
                    ),
                )
                for name, own in sorted(storage._queued.items())
                if own.num_released == storage._num_released
            ),
            tuple(sorted(storage._num_vain_asks.items())),
            tuple(storage._overdue),
            storage._is_bringing,
            tuple(
                (
                    name,
                    tuple(sorted(probes.index(event) for event in own.events)),
                    own.num,
                    keys(sorted(own.absent)),
                )
                for name, own in sorted(storage.probing.items())
            ),
            tuple(
                batch(own, own.targets, own.sources)
                for _, own in sorted(storage.probes.moves.items())
            ),
            tuple(probes.index(own.event) for own in storage._to_probe),
            keys(sorted(storage._absent)),
            tuple(sorted(n for n, at in storage.looked_up.items() if at == num_found)),
            keys(storage._to_write),
            tuple(ranks[own.event] for own in storage._to_fetch),
            keys(storage._to_delete),
            tuple(sorted(ranks[event] for event in storage._awaited)),
            storage.fetches.num_blocks,
            storage._writes.num_blocks,
            storage._is_disabled,
            storage.tier.is_listed,
            storage._must_send_last,
            look,
            self._canonical_reuse(storage._asked),
        )


def _leaves(state):
    """List the arrays of a state."""
    if not dataclasses.is_dataclass(state):
        return [state]
    fields = dataclasses.fields(state)
    return [a for f in fields for a in _leaves(getattr(state, f.name))]


def _listed(ids):
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def expect(is_right, say):
    """Raise unless something holds."""
    if not is_right:
        raise WrongError(say())
