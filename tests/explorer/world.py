"""A small world: the scheduler and the pool as they are, an engine, and its transfers.

Whatever can happen next is an action, and nothing happens by itself. The content of a
block is the prefix of tokens that it holds; what is being written, or was lost, has
none. A world can be left and come back to (`save`, `restore`). In its digest blocks,
events and counters have canonical names: worlds with equal digests have equal futures.
"""

import dataclasses
import functools
import hashlib
import io
import marshal
import pickle
import zlib
from collections import Counter
from itertools import compress
from types import SimpleNamespace
from unittest import mock

import numpy as np

from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.policies import Policy, get_policy_maker, make_hazard
from jaxkv.scheduling import scheduler as scheduler_lib
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
from jaxkv.tiers.retention import Retention
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.longest import first_read, longest_prefix
from tests.rigs.scheduler_state import Ref, restore, snapshot

GARBAGE = ""
TORN = "torn"  # What a store reads of a block that is overwritten meanwhile.
WAITING, LOADING, RUNNING, DONE = "waiting", "loading", "running", "done"
# Long enough for the batches here; the longer a log, the more there is to copy.
_MIN_MAX_BATCH = 8
_NUM_GHOSTS = 16
# Actions that do another one in a certain way.
_VARIANTS = {
    "up": ("down", {"num": -1}),
    "less": ("admit", {"is_less": True}),
    "blind": ("admit", {"is_blind": True}),
    "fail": ("land", {"ok": False}),
    "part": ("land", {"is_part": True}),
    "lose": ("preempt", {"is_told": False}),
}
# Actions after which an ended world is as ended as before.
_OUTSIDE = {"forget", "gap", "list", "unlist", "rates"}
# After this many refused queries, a request may take the room of stopped ones.
_MAX_VAIN_ASKS = 8


class WrongError(Exception):
    """Something does not hold."""


@dataclasses.dataclass(frozen=True)
class Setup:
    # For each its tokens, a letter each, and how many of them are its prompt.
    requests: tuple = (("aabb", 4), ("aabb", 4), ("aacc", 4))
    groups: tuple = (FullAttention(1),)
    rules: OffloadRules = dataclasses.field(default_factory=OffloadRules)
    num_device_blocks: int = 5  # Besides the null block.
    num_host_blocks: int = 4
    num_storage_blocks: int = 0  # 0 for no store.
    chunk: int = 4  # Max tokens that a request computes in a step.
    # Optional actions: see `World.actions`.
    acts: tuple = ("fail", "preempt", "abort", "reset")
    listed: tuple = ()  # Requests whose blocks the store has, and lists at some time.
    # Arguments of `set_rates`, the first at the start, when a probe is nearly due.
    rates: tuple = ()
    policy: str = "lru"
    retentions: tuple[Retention, ...] = ()  # Of the first requests.
    awaiting: tuple = ()  # Requests whose prompts another engine may compute and store.
    private: str = ""  # Blocks with this letter are never written to the store.
    bound: int | None = None  # Blocks that the store may hold, as a listing says.
    # As with asynchronous scheduling: the last generated token is uncertain.
    is_ahead: bool = False
    has_events: bool = False  # Events must add up to the tiers' contents.
    # Requests that wait for more room than their loads take keep what was loaded, and
    # are not preempted (the fault of vLLM's #57841).
    holds_waiting: bool = False
    # The engine ignores the tables that `update_state_after_alloc` returns.
    keeps_tables: bool = False
    served: tuple = ()  # Requests served before the start; the device forgot them.
    # All requests are of one conversation: at the end the host has no tail alone.
    is_story: bool = False


@functools.cache
def content(group, text, end):
    return f"{group}{text[:end]}"


@functools.cache
def make_keys(group, text, size, num_tokens):
    ends = range(size, num_tokens + 1, size)
    return [hashlib.sha256(content(group, text, n).encode()).digest() for n in ends]


@functools.cache
def packed_keys(keys):
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
        self.needs = 0  # Missing blocks, with `holds_waiting`.
        self.num_written = (
            0  # Tokens; those taken back stay until they are computed again.
        )

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
    kind: str  # "store", "load", "fetch", "write" or "probe".
    name: object  # Its event, or the request of a load.
    # Source and target of each block: a device block and a host block, or a key and a
    # host block.
    pairs: list
    contents: list  # Of the sources when it began.
    oks: list  # Which blocks have arrived on all workers that have reported it.
    num_reports: int = 0
    is_owner: bool = True  # Its host blocks were not given to another transfer.
    is_flushed: bool = False  # A flush has waited for it.
    is_forgotten: bool = False  # A reset has made the tiers forget it.


@dataclasses.dataclass
class Hold:
    """The blocks held for a request: its offer, the part taken, and its loads."""

    rows: dict  # Host blocks, by the place of their first part in the request.
    places: dict  # The loaded places of each of these host blocks.
    num_tokens: int  # Of the offer.
    targets: list | None = None  # Device blocks to write, once the offer is accepted.
    has_left: bool = False  # A step has begun it.


def _small_policy_maker(name):
    """Return the maker of a policy whose ghosts are few, as all has to be copied."""
    if name == "hazard":
        return functools.partial(make_hazard, num_ghosts=_NUM_GHOSTS)
    return get_policy_maker(name)


_LIVE: list = []  # Objects that states refer to, by number, ...
_NUMBERS: dict = {}  # ... and their numbers by id.


def _by_reference(thing):
    """Pickle an object as a number."""
    number = _NUMBERS.setdefault(id(thing), len(_LIVE))
    if number == len(_LIVE):
        _LIVE.append(thing)
    return _live, (number,)


def _live(number):
    return _LIVE[number]


class _Pickler(pickle.Pickler):
    dispatch_table = {Request: _by_reference, Policy: _by_reference}  # noqa: RUF012


def dump(saved):
    out = io.BytesIO()
    _Pickler(out, 5).dump(saved)
    return out.getvalue()


def pack(saved):
    return zlib.compress(dump(saved), 1)


def unpack(packed):
    return pickle.loads(zlib.decompress(packed))


# What changes of a request, and of the engine around the scheduler.
_OF_REQUEST = (
    *("phase", "num_tokens", "num_computed_tokens", "num_output_placeholders"),
    *("tables", "offer", "after", "needs", "num_written"),
)
_OF_ENGINE = (
    *("device", "host", "objects", "transfers", "preempted", "silent", "is_listed"),
    *(
        "is_left",
        "is_down",
        "is_to_reset",
        "rates",
        "event_keys",
        "holds",
        "querying",
    ),
    *("begun", "num_asked_tokens", "fetched", "num_vain", "marks", "starts"),
)


class World:
    """An engine, its tiers and its store, and the actions that are possible."""

    def __init__(self, setup):
        self.setup = setup
        self.seen = Counter()  # How often each thing has happened.
        self._state = None
        self.is_at_rest = False  # All has ended, and was checked.
        self.groups = setup.groups
        self.pool = DeviceBlockPool(setup.num_device_blocks + 1)

        def make_index(*args, **options):
            self.host_tier = index_lib.BlockIndex(*args, **options)
            return self.host_tier

        with (
            mock.patch.object(index_lib, "_MIN_MAX_BATCH", _MIN_MAX_BATCH),
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
        scheduler = self.scheduler
        scheduler.bind_device_block_pool(self.pool)
        # The first plan carries the settings, and moves nothing.
        assert scheduler.build_connector_meta(SchedulerOutput({})).is_nothing
        self.rates = 0
        if setup.rates:
            scheduler.set_rates(*setup.rates[0])
            scheduler._gate._num_slow = _PROBE_INTERVAL - 2
            scheduler._gate._num_slow_fetches = _PROBE_INTERVAL - 2
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
        self.transfers = []
        self.preempted = []
        self.silent = []  # Of these, the ones that only the next step reports.
        self.is_listed, self.is_down = not setup.listed, False
        self.is_left = False
        self.is_to_reset = False  # Before anything is asked for again.
        self.holds = {}  # What is held for each request, by its name.
        self.querying = []  # Who has asked since it had blocks.
        self.begun = []  # Who has had blocks.
        self.num_asked_tokens = 0  # Tokens of these.
        self.failed = []  # Keys and host blocks of loads that have just failed.
        self.fetched = {}  # Host blocks that were fetched for requests in the queue.
        self.num_vain = {}  # Refused queries of each request in a row.
        self.marks = {}  # `_num_not_stored` when each got its blocks, ...
        self.starts = {}  # ... and the tokens that it had then.
        self._contents = {
            key: content(g, text, (n + 1) * spec.block_size)
            for text, _ in setup.requests
            for g, spec in enumerate(setup.groups)
            for n, key in enumerate(make_keys(g, text, spec.block_size, len(text)))
        }
        self._all_keys = packed_keys(tuple(self._contents))
        self.objects = {
            key: self._contents[key]
            for text in (setup.requests[n][0] for n in setup.listed)
            for g, spec in enumerate(setup.groups)
            for key in make_keys(g, text, spec.block_size, len(text))
        }
        self._tiers = [self.host_tier, *[boundary.tier for boundary in scheduler.below]]
        # What events say that the tiers hold.
        self.event_keys = {tier.medium: {} for tier in self._tiers}
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

    def save(self):
        requests = [[getattr(r, name) for name in _OF_REQUEST] for r in self.requests]
        engine = [getattr(self, name) for name in _OF_ENGINE]
        return self._snapshot(), pickle.dumps((requests, engine), 5)

    def _snapshot(self):
        """Return the scheduler's state, computed once between two actions."""
        if self._state is None:
            self._state = snapshot(self.scheduler)
        return self._state

    def restore(self, saved):
        state, rest = saved
        if self._state is state:
            return  # Nothing has happened since.
        self.is_at_rest = False
        restore(self.scheduler, state)
        self._state = state
        requests, engine = pickle.loads(rest)
        for r, values in zip(self.requests, requests, strict=True):
            for name, value in zip(_OF_REQUEST, values, strict=True):
                setattr(r, name, value)
        for name, value in zip(_OF_ENGINE, engine, strict=True):
            setattr(self, name, value)

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
        ("unasked"), names them again ("again") or takes back its last token, to compute
        it again ("back"); the host is reset ("reset"), the device's cache forgotten
        ("forget") or only its first block ("gap"), the store left ("leave"), listed
        once more ("relist"), not listable ("unlist") or not reachable for a while
        ("down"). A store is listed ("list");
        rates are measured ("rates").
        """
        acts, actions = self.setup.acts, []
        for n in range(len(self.transfers)):
            actions.append(("land", n))
            if self.transfers[n].is_flushed:
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
        for r in self.requests:
            name = r.request_id
            if r.phase == DONE:
                continue
            is_new = r.num_computed_tokens > self.starts.get(name, 0)
            if "back" in acts and r.phase == RUNNING and is_new and self._is_alone(r):
                actions.append(("back", name))
            if r.phase == WAITING and name not in self.silent:
                if not self.is_to_reset:
                    hows = [how for how in ("less", "blind") if how in acts]
                    actions += [(how, name) for how in ("admit", *hows)]
                if "unasked" in acts and name not in self.querying:
                    actions.append(("unasked", name))
                hold = self.holds.get(name)
                if hold is not None and hold.targets is None:
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
        for kind, is_possible in (
            ("reset", "reset" in acts or self.is_to_reset),
            ("forget", "forget" in acts),
            ("gap", "gap" in acts),
            ("leave", "leave" in acts and not self.is_left),
            ("list", "relist" in acts or not self.is_listed),
            ("unlist", "unlist" in acts),
            ("down", "down" in acts and not self.is_down),
            ("up", self.is_down),
        ):
            if is_possible:
                actions.append((kind,))
        rates = range(len(self.setup.rates))
        actions += [("rates", n) for n in rates if n != self.rates]
        return actions

    def calm(self):
        """Choose the action that brings requests to their end; None if none is left.

        Transfers land, what runs goes on, who waits is admitted as it came, and the
        last one makes room if it must.
        """
        if self.transfers:
            return ("land", 0)
        for r in self.requests:
            if r.phase == RUNNING and self._is_served(r):
                return ("finish", r.request_id)
        running = tuple(r.request_id for r in self.requests if self._can_run(r))
        scheduler = self.scheduler
        if running or self.preempted or self._is_to_leave():
            return ("step", *running)
        waiting = [r for r in self.requests if r.phase == WAITING]
        offered = [r for r in waiting if r.request_id in self.holds]
        if self.is_to_reset:
            return ("decline", offered[-1].request_id) if offered else ("reset",)
        for r in waiting:
            rivals = [o for o in offered if o is not r]
            if self._fits(r) or not rivals:
                if self._fits(r):
                    return ("admit", r.request_id)
            else:
                return ("decline", rivals[-1].request_id)
        held = [r for r in self.requests if r.phase == RUNNING and not r.needs]
        if held and len(held) + len(waiting) > 1:
            return ("preempt", held[-1].request_id)
        if scheduler.has_pending_stores() or scheduler.has_pending_loads():
            return ("step",)
        return None

    def _is_to_leave(self):
        """Whether a step would send something out, where nothing is in flight."""
        scheduler = self.scheduler
        holds = self.holds.values()
        if any(hold.targets is not None and not hold.has_left for hold in holds):
            return True
        return scheduler.in_transit.stores_waiting or any(
            boundary.fetches.moves or boundary.probes.moves or boundary.has_writes
            for boundary in scheduler.below
        )

    def _fits(self, r):
        """Whether there is room for a request that finds nothing on the device."""
        return sum(self._num_blocks(r)) <= self.pool.num_free

    def _num_blocks(self, r):
        return [-(-r.num_tokens // spec.block_size) for spec in self.groups]

    def _is_served(self, r):
        return r.num_computed_tokens == len(r.text)

    def _num_lacking(self, r):
        """Count the blocks a request still needs for its next tokens, per group."""
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
        """Perform an action, and check the world: WrongError if it is wrong."""
        kind, *rest = action
        self.seen[kind] += 1
        self._state = None
        name, options = _VARIANTS.get(kind, (kind, {}))
        try:
            getattr(self, f"_do_{name}")(*rest, **options)
        except WrongError:
            raise
        except Exception as error:
            raise WrongError(f"{type(error).__name__}: {error}") from error
        self.check()
        has_ended = all(r.phase == DONE for r in self.requests) and not self.transfers
        if not has_ended:
            self.is_at_rest = False
        elif kind not in _OUTSIDE and not (kind == "step" and self.is_at_rest):
            self.is_at_rest = self._check_end()

    def _num_asked_below(self):
        below = self.scheduler.below
        return sum(len(b.fetches.moves) + len(b.probes.moves) for b in below)

    def _named(self, name):
        return self.requests[int(name[1:])]

    def _do_admit(self, name, *, is_less=False, is_blind=False):
        r, pool, scheduler = self._named(name), self.pool, self.scheduler
        max_hit = 0 if is_blind else r.num_tokens - 1
        keys = r.block_keys_by_group
        local, tables = find_cached_prefix(pool, self.groups, keys, max_hit)
        for table in tables:
            pool.touch(table)
        r.tables = tables
        explained = scheduler.explain(r, local)
        offers = self._offers(r, local, is_blind)
        self._check_verdicts(r, explained)
        num_asked = self._num_asked_below()
        offer = scheduler.get_num_new_matched_tokens(r, local)
        if self.is_down and self._num_asked_below() > num_asked:
            raise WrongError("a store that is down is asked for blocks")
        self.querying = sorted({*self.querying, name})
        if offer != (explained.num_offered_tokens, explained.is_awaited):
            raise WrongError(f"explain says {explained}, and the query {offer}")
        num, is_awaited = offer
        if num is not None and num not in offers:
            raise WrongError(f"{num} tokens are offered, not one of {offers}")
        hold = self.holds.get(name)
        if hold is None or not hold.has_left:
            self.holds.pop(name, None)
            if num:
                self.holds[name] = self._offered(r, local, num)
        self.num_vain[name] = self.num_vain.get(name, 0) + 1 if num is None else 0
        if self.num_vain[name] >= _MAX_VAIN_ASKS:
            # The room of those that have stopped asking may be taken.
            self.fetched = {}
        self._check_holds()
        needed = [
            num_blocks - len(table)
            for num_blocks, table in zip(self._num_blocks(r), tables, strict=True)
        ]
        if self.setup.holds_waiting and num:
            # As many as the load takes; the others when it is there.
            needed = [local + num - len(table) for table in tables]
        if num is None or sum(needed) > pool.num_free:
            self.seen["asks again" if num is None else "no room"] += 1
            self._leave(r, WAITING)
            return
        num_taken = max(num - alignment(self.groups) * is_less, 0)
        for table, lacking in zip(tables, needed, strict=True):
            table += pool.allocate(lacking)
        r.num_computed_tokens = local
        after = scheduler.update_state_after_alloc(r, r.table, num_taken)
        self.querying.remove(name)
        self._begin_request(r, has_asked=True)
        if num_taken:
            self._take_hold(r, local + num_taken)
        elif num:
            del self.holds[name]
        if num_taken and is_awaited:
            r.phase, r.offer, r.after = LOADING, num_taken, after
            self.seen["loads"] += 1
            return
        r.phase = RUNNING
        self._take(r, num_taken, after)

    def _where(self, r):
        """Find the device block and the host block of each block of a request."""
        factor, where = self.setup.rules.blocks_per_host_block, {}
        for g, keys in enumerate(r.block_keys_by_group):
            device, host = (
                tier.find(keys).tolist() for tier in (self.pool, self.host_tier)
            )
            for i in range(len(keys)):
                last = i // factor * factor + factor - 1
                row = host[last] if last < len(keys) else NO_BLOCK
                where[g, i] = device[i], row
        return where

    def _offered(self, r, local, num):
        """Return which blocks an offer must hold."""
        factor, end = self.setup.rules.blocks_per_host_block, local + num
        where, hold = self._where(r), Hold({}, {}, num)
        for g, spec in enumerate(self.groups):
            start = max(first_read(spec, end), local // spec.block_size)
            for i in range(start, end // spec.block_size):
                hold.rows[g, i // factor] = where[g, i][1]
                hold.places.setdefault((g, i // factor), []).append(i)
        return hold

    def _row_key(self, name, at):
        group, row = at
        factor, spec = self.setup.rules.blocks_per_host_block, self.groups[group]
        text = self._named(name).text
        return make_keys(group, text, spec.block_size, len(text))[
            row * factor + factor - 1
        ]

    def _begin_request(self, r, has_asked):
        """Record that a request uses its blocks, for the first time or again."""
        name = r.request_id
        self.fetched.pop(name, None)
        self.num_vain.pop(name, None)
        self.marks[name] = self._num_not_stored()
        self.starts[name] = r.num_computed_tokens
        if name not in self.begun:
            self.begun = sorted([*self.begun, name])
            self.num_asked_tokens += r.num_tokens if has_asked else 0

    def _take_hold(self, r, end):
        """Record which blocks a request has taken of its offer."""
        hold = self.holds[r.request_id]
        ends = [end // spec.block_size for spec in self.groups]
        loaded_places = {
            at: [i for i in places if i < ends[at[0]]]
            for at, places in hold.places.items()
        }
        hold.places = {at: places for at, places in loaded_places.items() if places}
        hold.rows = {at: hold.rows[at] for at in hold.places}
        loaded = [(g, i) for (g, _), places in hold.places.items() for i in places]
        hold.targets = [r.tables[g][i] for g, i in loaded]

    def _drop_hold(self, name, *, is_put_back=False):
        """Record that a request abandons its offer and the loads not begun."""
        hold = self.holds.get(name)
        if hold is not None and not hold.has_left:
            del self.holds[name]
        if name in self.querying:
            self.querying.remove(name)
        if not is_put_back:
            self.fetched.pop(name, None)
            self.num_vain.pop(name, None)

    def _offers(self, r, local, is_blind):
        """Return how many tokens may be offered: the host's beyond the device's."""
        where = self._where(r)

        def longest(has):
            return longest_prefix(
                self.groups,
                [len(keys) for keys in r.block_keys_by_group],
                has,
                r.num_tokens - 1,
                alignment(self.groups),
            )

        num_local = longest(lambda g, i: where[g, i][0] != NO_BLOCK)
        if not is_blind and local != num_local:
            raise WrongError(f"the device has {num_local}, not {local}")
        end = longest(
            lambda g, i: (
                where[g, i][1] != NO_BLOCK
                or (
                    where[g, i][0] != NO_BLOCK
                    and i < local // self.groups[g].block_size
                )
            )
        )
        offers = {max(end - local, 0)}
        return offers | {0} if self.setup.rules.skip_slow_loads else offers

    def _check_verdicts(self, r, explained):
        """Check that blocks are where they are said to be, and nowhere else."""
        said = {(block.group, block.index): block for block in explained.blocks}
        where = self._where(r)
        if list(said) != list(where):
            raise WrongError(f"{explained} is not all")
        for at, (device, host) in where.items():
            block, right = said[at], {"none", *(b.name for b in self.scheduler.below)}
            if device != NO_BLOCK:
                right = {"device"}
            elif host != NO_BLOCK:
                right = {"host"}
            if block.verdict not in right:
                raise WrongError(f"{block} of {r.request_id} is wrong")

    def _do_unasked(self, name):
        r = self._named(name)
        lacking = self._num_blocks(r)
        if sum(lacking) > self.pool.num_free:
            return
        r.tables = [self.pool.allocate(num) for num in lacking]
        r.phase = RUNNING
        self._do_again(name)

    def _do_back(self, name):
        r = self._named(name)
        # Nobody else may find what the request is about to overwrite.
        self.pool.evict(self._last_blocks(r))
        r.num_computed_tokens -= 1

    def _last_blocks(self, r):
        """Return the blocks of a request's last computed token, one a group."""
        last = max(r.num_computed_tokens - 1, 0)
        pairs = zip(self.groups, r.tables, strict=True)
        return [table[last // spec.block_size] for spec, table in pairs]

    def _is_alone(self, r):
        refs = self.pool.state.ref_cnt
        return all(refs[block] == 1 for block in self._last_blocks(r))

    def _do_again(self, name):
        r = self._named(name)
        tables = self.scheduler.update_state_after_alloc(r, r.table, 0)
        self._begin_request(r, has_asked=False)
        hold = self.holds.get(name)
        if hold is not None and hold.targets is None:
            del self.holds[name]
        if tables != r.tables:
            raise WrongError(f"{tables} instead of {r.tables}")

    def _take(self, r, num, after):
        """Continue a request after its offer."""
        if not self.setup.keeps_tables:
            for table, new in zip(r.tables, after, strict=True):
                self.pool.free([block for block in table if block not in new])
            r.tables = after
        r.num_computed_tokens += num
        self.starts[r.request_id] = r.num_computed_tokens
        r.offer, r.after = 0, None
        if self.setup.holds_waiting:
            r.needs = sum(self._num_lacking(r))

    def _do_decline(self, name):
        self.scheduler.update_state_after_alloc(self._named(name), [], 0)
        self._drop_hold(name, is_put_back=True)

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
        preempted, self.preempted = self.preempted, []
        for name in self.silent:
            self._drop_hold(name)
        self.silent = []
        output = SchedulerOutput(scheduled, new_blocks, preempted)
        meta = self.scheduler.build_connector_meta(output)
        self._start(meta)
        for name in scheduled:
            if self.marks.get(name) == self._num_not_stored():
                r = self._named(name)
                self._check_stored(name, self._rows_to_store(r, self.starts[name]))
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
                contents = self._read(table[i])
                right = content(g, r.text, min((i + 1) * size, start))
                if contents != right:
                    raise WrongError(
                        f"{r.request_id} reads {contents!r} in block {i}, not {right!r}"
                    )
            for i in range(start // size, -(-end // size)):
                what = content(g, r.text, min((i + 1) * size, end))
                self._write(table[i], what, is_again=i * size < r.num_written)
        r.num_computed_tokens, is_ahead = end, self.setup.is_ahead
        r.num_written = max(r.num_written, end)
        is_growing = end == r.num_tokens < len(r.text)
        r.num_tokens += is_growing
        is_uncertain = is_ahead and is_growing and end > r.num_prompt_tokens
        r.num_output_placeholders = int(is_uncertain)

    def _cache(self, r):
        for spec, table, keys in zip(
            self.groups, r.tables, r.block_keys_by_group, strict=True
        ):
            num_certain = r.num_computed_tokens - r.num_output_placeholders
            full = num_certain // spec.block_size
            self.pool.cache(table[:full], keys[:full])

    def _read(self, block):
        if not all(block != to for t in self._loading() for _, to in t.pairs):
            raise WrongError(f"block {block} is read while it is loaded")
        return self.device[block]

    def _write(self, block, what, *, is_again=False):
        if block == NULL_BLOCK:
            raise WrongError("the null block is written")
        for t in self.transfers * is_again:
            if t.kind == "store":
                for n, (source, _) in enumerate(t.pairs):
                    if source == block:
                        t.contents[n] = TORN
        busy = [
            t.kind
            for t in self.transfers
            for source, target in t.pairs
            if (t.kind == "store" and source == block and not is_again)
            or (t.kind == "load" and target == block)
        ]
        if busy:
            raise WrongError(f"block {block} is written during a {busy[0]}")
        self.device[block] = what

    def _loading(self):
        return [t for t in self.transfers if t.kind == "load"]

    def _start(self, meta):
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
        if meta.load_event != NO_EVENT:
            start, names = 0, meta.load_event_to_reqs[meta.load_event]
            for name in names:
                self.holds[name].has_left = True
            for name, size in zip(names, meta.load_sizes, strict=True):
                hosts = meta.load_host_blocks[start : start + size]
                targets = meta.load_device_blocks[start * factor :][: size * factor]
                written = [n for n, to in enumerate(targets) if to != NO_BLOCK]
                pairs = [(hosts[n // factor], targets[n]) for n in written]
                contents = [self._held(hosts[n // factor], n % factor) for n in written]
                start += size
                for _, target in pairs:
                    self._write(target, GARBAGE)
                self._begin("load", name, pairs, contents)
        for moves in meta.below:
            self._start_below(moves)

    def _start_below(self, moves):
        asks = moves.fetches or moves.writes or moves.deletes or moves.probes
        if self.is_left and asks:
            raise WrongError("a store that was left is used")
        for key in moves.deletes:
            self.objects.pop(key, None)
        for probe in moves.probes:
            fetching = {
                key for t in self.transfers if t.kind == "probe" for key, _ in t.pairs
            }
            new = {key for run in probe.runs for key in run}
            if not (new.isdisjoint(fetching) or self.seen["reset done"]):
                raise WrongError("the store is asked for what it is asked for already")
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
        return self.host[host].split("|")[part] if self.host[host] else GARBAGE

    def _begin(self, kind, name, pairs, contents):
        self.transfers.append(
            Transfer(kind, name, pairs, contents, [True] * len(pairs))
        )
        self.seen[f"{kind} begins"] += 1

    def _give(self, hosts, kind):
        """Hand host blocks to a transfer that writes them; their bytes are lost."""
        for transfer in self.transfers:
            is_load = transfer.kind == "load"
            if any(pair[0 if is_load else 1] in hosts for pair in transfer.pairs):
                # What a reset has made the tiers forget may still be under way.
                if not transfer.is_forgotten or transfer.kind == "fetch":
                    raise WrongError(f"a {kind} is given a block of a {transfer.kind}")
                transfer.is_owner = False
        for host in hosts:
            self.host[host] = GARBAGE

    def _do_land(self, n, **how):
        self._report([self._end(n, **how)])

    def _do_together(self):
        outputs = []
        while self.transfers:
            outputs.append(self._end(0))
        self._report(outputs)

    def _do_list(self):
        """List the store; blocks beyond the bound are deleted, the oldest first."""
        self.is_listed, bound, deleted = True, None, ()
        keys = tuple(self.objects)
        if self.setup.bound is not None:
            deleted = keys[: max(len(keys) - self.setup.bound, 0)]
            for key in deleted:
                del self.objects[key]
            bound = self.setup.bound, len(self.objects)
        # A page may have been read before its blocks were deleted.
        listed = TierReport(found=keys, listed=True, bound=bound, gone=deleted)
        self._report([ConnectorOutput(below=(listed,))])

    def _do_unlist(self):
        self._report([ConnectorOutput(below=(TierReport(listed=False),))])

    def _do_down(self, num=1):
        self.is_down = num > 0
        self._report([ConnectorOutput(below=(TierReport(num_down=num),))])

    def _do_rates(self, n):
        self.rates = n
        self.scheduler.set_rates(*self.setup.rates[n])

    def _is_private(self, key):
        return self.setup.private in self._contents[key]

    def _end(self, n, ok=True, is_part=False):
        """End a transfer on one worker; return the report, final for the last one."""
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
            if t.kind == "load":
                hold = self.holds.pop(t.name)
                if not all(t.oks):
                    self.failed += [
                        (self._row_key(t.name, at), row)
                        for at, row in hold.rows.items()
                    ]
        field = _REPORTED[t.kind]
        if t.kind in ("store", "load"):
            return ConnectorOutput(**{field[ok]: (t.name,)})
        report = TierReport(**{field: ((t.name, tuple(oks)),)})
        return ConnectorOutput(below=(report,))

    def _check_sources(self, t):
        for (source, target), what in zip(t.pairs, t.contents, strict=True):
            if t.kind == "store":
                if what not in (self.device[source], TORN):
                    raise WrongError(f"block {source} was written while stored")
            elif t.kind == "load":
                if what not in self.host[source].split("|") or not what:
                    raise WrongError(
                        f"host block {source} had {what!r}, has {self.host[source]!r}"
                    )
            elif t.kind == "write" and t.is_owner and self.host[target] != what:
                raise WrongError(f"host block {target} changed while written")

    def _arrive(self, t):
        """Apply a transfer that every worker has completed."""
        if t.kind == "store":
            rows = {}
            for (_, host), what in zip(t.pairs, t.contents, strict=True):
                rows.setdefault(host, []).append(what)
            for host, contents in rows.items():
                if t.is_owner:
                    self.host[host] = "|".join(contents) if all(t.oks) else GARBAGE
            return
        for (source, target), what, ok in zip(t.pairs, t.contents, t.oks, strict=True):
            if t.kind == "load":
                self.device[target] = what if ok else GARBAGE
            elif t.kind == "fetch" and t.is_owner:
                self.host[target] = what if ok else GARBAGE
                if ok and not t.is_forgotten:
                    self._record_fetched(t.name, source, target)
            elif t.kind == "write" and ok:
                self.objects[source] = what

    def _record_fetched(self, event, key, row):
        """Record that a block has come for those that wait for this fetch."""
        for r in self.requests:
            keys = [key for group in r.block_keys_by_group for key in group]
            wait = self.scheduler.below[0].waits.get(r.request_id)
            if wait is not None and event in wait.events and key in keys:
                self.fetched.setdefault(r.request_id, []).append(row)

    def _report(self, outputs):
        answer = self.scheduler.update_connector_output(
            ConnectorOutput.aggregate(outputs)
        )
        failed, self.failed = self.failed, []
        refs = self.host_tier.executor.state.ref_cnt
        for key, row in failed:
            # Others may still read the block, whose bytes may be right for them.
            is_found = self.host_tier.find([key])[0] == row
            if refs[row] <= 0 and is_found:
                raise WrongError(f"host block {row} is found after its load failed")
        for name in (*answer.finished_recving, *answer.failed_recving):
            if name in self.silent:  # The scheduler does not know that yet.
                continue
            r = self._named(name)
            if r.phase != LOADING:
                raise WrongError(f"{r.request_id} waits for none")
            r.phase = RUNNING
            if name in answer.finished_recving:
                self._take(r, r.offer, r.after)
                self._cache(r)
            else:
                self._take(r, 0, r.tables)

    def _leave(self, r, phase):
        for table in r.tables:
            self.pool.free(table[::-1])
        r.tables = [[] for _ in self.groups]
        r.phase, r.offer, r.after, r.needs = phase, 0, None, 0
        r.num_output_placeholders = r.num_written = 0

    def _do_preempt(self, name, is_told=True):
        r = self._named(name)
        if is_told:
            self.scheduler.request_preempted(r)
            self._drop_hold(name)
        else:
            self.silent = sorted({*self.silent, name})
        self._leave(r, WAITING)
        r.num_computed_tokens = 0
        self.preempted = sorted({*self.preempted, name})

    def _do_finish(self, name):
        r = self._named(name)
        rows, num_dropped = self._rows_to_store(r), self._num_dropped()
        self.scheduler.request_finished(r, r.table)
        if num_dropped == self._num_dropped():
            self._check_stored(name, rows)
        self._drop_hold(name)
        self._leave(r, DONE)

    def _rows_to_store(self, r, start=0):
        """List the keys of the host blocks that a request must leave behind."""
        rules = self.setup.rules
        if rules != OffloadRules(
            world_size=rules.world_size,
            blocks_per_host_block=rules.blocks_per_host_block,
            storage_write=rules.storage_write,
            flush_on_preemption=rules.flush_on_preemption,
            delay_shared_loads=rules.delay_shared_loads,
        ):
            return []  # Others store less, or later.
        if self._num_rows() > self.setup.num_host_blocks:
            return []  # The host may have no room, or evict one for another.
        factor, rows = rules.blocks_per_host_block, []
        num_tokens = r.num_computed_tokens - r.num_output_placeholders
        groups = zip(self.groups, r.block_keys_by_group, r.tables, strict=True)
        for spec, keys, table in groups:
            num = num_tokens // spec.block_size // factor * factor
            first = -(-start // spec.block_size // factor) * factor
            is_held = self.pool.holds(table[first:num], keys[first:num])
            held_rows = is_held.reshape(-1, factor).all(axis=1)
            rows += compress(keys[first + factor - 1 : num : factor], held_rows)
        return rows

    def _num_rows(self):
        factor = self.setup.rules.blocks_per_host_block
        return len(
            {
                key
                for r in self.requests
                for keys in r.block_keys_by_group
                for key in keys[factor - 1 :: factor]
            }
        )

    def _check_stored(self, name, rows):
        if rows and not self.host_tier.contains(rows).all():
            raise WrongError(f"a block that {name} computed is not stored, nor will be")

    def _num_not_stored(self):
        """Count whatever has kept blocks from the host, or taken them from it."""
        stats = self.scheduler.stats
        return (
            *(stats.num_store_refusals, stats.num_evicted, self._num_dropped()),
            *(stats.num_dropped_failed, stats.num_dropped_reset),
            *(self.seen[kind] for kind in ("reset", "forget", "gap", "back")),
        )

    def _num_dropped(self):
        stats = self.scheduler.stats
        return stats.num_dropped_full + stats.num_dropped_slow

    def _do_abort(self, name):
        r = self._named(name)
        self.scheduler.request_finished(r)
        self._drop_hold(name)
        self._leave(r, DONE)
        if name in self.preempted:
            self.preempted.remove(name)
        if name in self.silent:
            self.silent.remove(name)

    def _do_reset(self):
        is_held = self.scheduler.has_pending_loads()
        is_done = self.scheduler.reset()
        if is_done == is_held:
            raise WrongError("a reset under a load")
        self.seen["reset done"] += is_done
        self.is_to_reset &= not is_done
        if is_done:
            self._forget_transfers("store", "fetch", "write")
            self.fetched = {}

    def _do_leave(self):
        # If it cannot be done now, it is before anything is asked for again.
        self.is_to_reset = True
        self._do_reset()
        self.scheduler.disable_storage()
        self.is_left = True
        self._forget_transfers("fetch", "write")
        self.fetched = {}

    def _forget_transfers(self, *kinds):
        for transfer in self.transfers:
            transfer.is_forgotten |= transfer.kind in kinds

    def _do_forget(self):
        self.pool.evict(range(1, self.pool.num_blocks))

    def _do_gap(self):
        blocks = self.pool.find(self._all_keys[:1])
        self.pool.evict(blocks[blocks != NO_BLOCK])

    # What has to hold.

    def check(self):
        keys, contents = self._all_keys, self._contents
        for tier, cells in ((self.pool, self.device), (self._tiers[0], self.host)):
            resident = tier.find(keys).tolist()
            for key, block in zip(keys, resident, strict=True):
                if block == NO_BLOCK:
                    continue
                what = cells[block]
                if tier is not self.pool:
                    what = what.split("|")[-1]
                if what != contents[key]:
                    raise WrongError(
                        f"{contents[key]!r} is found in the {tier.medium} tier, where "
                        f"{what!r} is"
                    )
        self._check_holds()
        scheduler = self.scheduler
        for event in scheduler.take_events():
            reported = self.event_keys[event.medium]
            if event.removed:
                removed = event.block_hashes or list(reported)
                for key in removed:
                    del reported[key]
            else:
                reported.update(dict.fromkeys(event.block_hashes))
        for tier in self._tiers * self.setup.has_events:
            resident = set(compress(keys, (tier.find(keys) != NO_BLOCK).tolist()))
            reported = self.event_keys[tier.medium]
            if reported.keys() != resident:
                raise WrongError(
                    f"events say: the {tier.medium} tier has {len(reported)} blocks, "
                    f"and it has {len(resident)}"
                )
        if self.setup.private and any(map(self._is_private, self.objects)):
            raise WrongError("a private block is in the store")
        stats = scheduler.stats
        if stats.num_device_query_tokens != self.num_asked_tokens:
            raise WrongError(
                f"{stats} counts a request again, of {self.num_asked_tokens} tokens"
            )
        if scheduler.below:
            (storage,) = scheduler.below
            resident = compress(keys, storage.tier.contains(keys).tolist())
            moving = {key for t in self.transfers for key, _ in t.pairs}
            absent = {*resident} - self.objects.keys() - moving
            absent -= storage.fetch_of.keys()
            if absent:
                raise WrongError("the store is said to have what nobody wrote")
        dropped = self._num_dropped()
        dropped += stats.num_dropped_failed + stats.num_dropped_reset
        transit = scheduler.in_transit
        moving = transit.stores_waiting + transit.stores_in_flight
        if stats.num_offered != stats.num_stored + dropped + moving:
            raise WrongError(f"{stats} and {transit} do not add up")

    def _check_heads(self):
        """Check that each block on the host can be found, after those before it."""
        longest = max((text for text, _ in self.setup.requests), key=len)
        keys = make_keys(0, longest, 1, len(longest))
        held = (self.host_tier.find(packed_keys(tuple(keys))) != NO_BLOCK).tolist()
        num_headless = self.scheduler.stats.num_headless
        if held != sorted(held, reverse=True) or num_headless:
            raise WrongError(f"blocks {held} are held, {num_headless} without heads")

    def _check_holds(self):
        """Check that each block is held exactly as often as it is used."""
        device, host = self.pool.state, self.host_tier.executor.state
        used, pinned = [0] * self.pool.num_blocks, [0] * self.pool.num_blocks
        read = [0] * self.host_tier.num_blocks
        for r in self.requests:
            for table in r.tables:
                for block in table:
                    used[block] += block != NULL_BLOCK
        for hold in self.holds.values():
            for block in hold.targets or ():
                pinned[block] += 1
            for row in hold.rows.values():
                read[row] += 1
        written = set()
        for t in self.transfers:
            for source, target in t.pairs:
                if t.kind == "store":
                    pinned[source] += 1
                if t.is_forgotten:
                    continue
                if t.kind in ("store", "fetch"):
                    written.add(target)
                elif t.kind == "write":
                    read[target] += 1
        for boundary in self.scheduler.below:
            of_requests = [*(wait.rows for wait in boundary.waits.values())]
            for rows in (*of_requests, *boundary.holds.values()):
                for row in rows:
                    read[row] += 1
        transit = self.scheduler.in_transit
        # Blocks that wait for their store; only the scheduler knows them.
        counts = device.pins.tolist()
        waiting = [num - right for num, right in zip(counts, pinned, strict=True)]
        if min(waiting) < 0 or sum(waiting) != transit.stores_waiting:
            raise WrongError(
                f"blocks are pinned {counts} times, and used {pinned} times beside the "
                f"{transit.stores_waiting} that wait to be stored"
            )
        refs, num_waiting = host.ref_cnt.tolist(), 0
        for name, rows in self.fetched.items():
            if not all(refs[row] > 0 for row in rows):
                raise WrongError(
                    f"host blocks {rows} were fetched for {name} and are held {refs}"
                )
        for row, ref in enumerate(refs):
            if row in written:
                read[row] = -1
            elif ref == -1 and not read[row] and not self.is_left:
                num_waiting += 1
                read[row] = -1
        factor = self.setup.rules.blocks_per_host_block
        fetching = [m for b in self.scheduler.below for m in b.fetches.moves.values()]
        num_unsent = sum(len(move.targets) for move in fetching) - sum(
            len(t.pairs) for t in self.transfers if t.kind == "fetch"
        )
        unheld = [
            pinned[block] + waiting[block] > 0
            for block in range(1, self.pool.num_blocks)
            if not used[block]
        ]
        checks = [
            ("pending", self.pool.num_pending_free, sum(unheld)),
            ("free", self.pool.num_free, len(unheld) - sum(unheld)),
            ("held", device.ref_cnt.tolist(), used),
        ]
        if not self.is_left:  # A store that was left still holds what it moves.
            checks += [
                ("held on the host", refs, read),
                (
                    "waiting on the host",
                    num_waiting,
                    transit.stores_waiting // factor + num_unsent,
                ),
            ]
        for what, counts, right in checks:
            if counts != right:
                raise WrongError(
                    f"blocks are {what} {counts} times, and used {right} times"
                )

    def _check_end(self):
        """Check that nothing is left; return False while something is pending."""
        scheduler = self.scheduler
        is_busy = scheduler.has_pending_loads() or scheduler.has_pending_stores()
        if is_busy or self.is_to_reset:
            return False
        self.seen["ends"] += 1
        num_free, num = self.pool.num_free, self.pool.num_blocks - 1
        if num_free != num:
            raise WrongError(f"{num_free} of {num} device blocks are free")
        self.pool.check()
        if self.setup.is_story:
            self._check_heads()
        for tier in self._tiers:
            pins = np.asarray(tier.executor.state.ref_cnt)
            if pins.any():
                raise WrongError(f"pinned at the end: {pins}")
        left = {
            f"{name}.{field}": value
            for name, (_, fields) in self._snapshot().entries.items()
            for field, value in fields.items()
            if field not in _REMEMBERED
            and isinstance(value, dict | list | set)
            and value
        }
        if left:
            raise WrongError(f"left at the end: {left}")
        if any(scheduler.in_transit):
            raise WrongError(f"in transit: {scheduler.in_transit}")
        if self.holds:
            raise WrongError(f"held at the end: {self.holds}")
        return True

    def try_refused(self):
        """Make calls that must be refused and change nothing."""
        scheduler, pool = self.scheduler, self.pool
        before = self._snapshot().digest
        r = self.requests[0]
        size = r.groups[0].block_size
        event = 10**6
        nobody = Request("nobody", r.text, r.num_prompt_tokens, r.groups)
        far = [[pool.num_blocks]] * len(self.groups)
        far = far if len(far) > 1 else far[0]
        report, output = scheduler.update_connector_output, ConnectorOutput
        stopped = Request("nobody", r.text, r.num_prompt_tokens, r.groups)
        stopped.stop = "tired"
        bare = SimpleNamespace(request_id="nobody")
        keyless = SimpleNamespace(
            **vars(bare), block_keys=(), num_tokens=1, num_computed_tokens=0
        )
        refused = [
            lambda: scheduler.get_num_new_matched_tokens(bare, 0),
            lambda: scheduler.request_finished(stopped),
            lambda: scheduler.request_finished(nobody, [[1]] * (1 + len(self.groups))),
            lambda: scheduler.set_rates(-1.0, 1.0),
            lambda: scheduler.get_num_new_matched_tokens(nobody, -1),
            lambda: scheduler.update_state_after_alloc(nobody, [], size),
            lambda: scheduler.update_state_after_alloc(nobody, far, 0),
            lambda: scheduler.build_connector_meta(SchedulerOutput({}, {"r0": far})),
            lambda: scheduler.request_finished(nobody, far),
            lambda: report(output(finished_recving=("nobody",))),
            lambda: report(output(completed_store_events=(event,))),
            lambda: report(output(below=(TierReport(fetched=((10**6, (True,)),)),))),
            lambda: report(output(below=(TierReport(probed=((10**6, (True,)),)),))),
            lambda: pool.allocate(pool.num_free + 1),
            lambda: pool.free([pool.num_blocks]),
            lambda: pool.unpin([pool.num_blocks]),
        ]
        if len(self.groups) > 1:
            refused.append(lambda: scheduler.get_num_new_matched_tokens(keyless, 0))
        if not scheduler.below:
            refused.append(lambda: report(output(below=(TierReport(),))))
        if self.host_tier.retains:
            stopped.stop, stopped.retention = None, "long"
            refused.append(lambda: scheduler.update_state_after_alloc(stopped, [], 0))
        allocated = scheduler.update_state_after_alloc
        for request in self.requests:
            hold = self.holds.get(request.request_id)
            if hold is None:
                continue
            if hold.targets is not None:
                if request.phase != WAITING:
                    refused.append(lambda o=request: allocated(o, o.table, size))
                continue
            num = request.num_tokens // size
            tables = [[], [NULL_BLOCK] * num]
            if len(hold.rows) > 1:
                tables.append([1] * num)
            if len(self.groups) > 1:
                tables = [[column] * len(self.groups) for column in tables]
            refused += [
                lambda o=request, n=hold.num_tokens, table=table: allocated(o, table, n)
                for table in tables
            ]
            refused.append(
                lambda o=request, n=hold.num_tokens: allocated(o, [], n + size)
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
        for request in self.requests:
            if request.phase == WAITING:
                scheduler.explain(request)
        if snapshot(scheduler).digest != before:
            raise WrongError("a refused call, or explain, has changed something")

    # Canonical names.

    def digest(self):
        """Name this world so that worlds with equal names have equal futures."""
        return hashlib.blake2b(
            marshal.dumps(self.canonical(), 2), digest_size=16
        ).digest()

    def canonical(self):
        """Return all that the future depends on, in canonical names."""
        self._entries = entries = self._snapshot().entries
        names = {None: {}, "device": self._device_names()}
        tiers = [self._canonical_tier(tier) for tier in self._tiers]
        for of_tier, (tier_names, _) in zip(("host", "store"), tiers, strict=False):
            names[of_tier] = tier_names
        for ledger in ("fetches", "probes"):
            moves = self._fields(f"below[0].{ledger}").get("moves", ())
            names[ledger] = {event: n for n, event in enumerate(sorted(moves))}
        self._names = names
        of_parts = [
            self._canonical_entry(name)
            for name, entry in entries.items()
            if entry.kind.__name__ in _SHOWN
        ]
        hosts = [block for block in names["host"] if block >= 0]
        engine = [
            [
                (
                    *(r.phase, r.num_tokens, r.num_computed_tokens, r.offer, r.needs),
                    *(r.num_output_placeholders, r.num_written),
                    self._show(r.tables, "device"),
                    self._show(r.after, "device"),
                )
                for r in self.requests
            ],
            *(self.preempted, self.silent, self.is_listed, self.is_left),
            *(self.is_to_reset, self.rates, self.querying),
            [self.host[block] for block in hosts],
            sorted(self.objects.items()),
        ]
        transfers = []
        for t in self.transfers:
            sources, targets = zip(*t.pairs, strict=True)
            of_sources, of_targets = _ENDS[t.kind]
            transfers.append(
                (
                    *(t.kind, t.name if t.kind == "load" else "", t.num_reports),
                    self._show(sources, of_sources),
                    self._show(targets, of_targets),
                    *(t.contents, t.oks, t.is_owner, t.is_flushed),
                )
            )
        readers = self._fields("_loads")["_num_readers"][hosts].tolist()
        device = self._canonical_device()
        return device, [what for _, what in tiers], of_parts, engine, transfers, readers

    def _fields(self, name):
        entry = self._entries.get(f"scheduler.{name}")
        return {} if entry is None else entry.fields

    def _device_names(self):
        """Name device blocks by eviction order and by the order of the tables."""
        newer = self.pool.state.newer.tolist()
        order, block = {NULL_BLOCK: 0}, newer[NULL_BLOCK]
        while block != NULL_BLOCK:
            order[block] = len(order)
            block = newer[block]
        for r in self.requests:
            for table in r.tables:
                for block in table:
                    order.setdefault(block, len(order))
        for block in range(self.pool.num_blocks):
            order.setdefault(block, len(order))
        return order

    def _canonical_device(self):
        """Return each device block's contents and holders."""
        state, names = self.pool.state, self._names["device"]
        hosts, keys = self._names["host"], state.directory.keys.tobytes()
        refs, pins, copies = (
            ids.tolist() for ids in (state.ref_cnt, state.pins, state.copies)
        )
        has_key = state.has_key.tolist()
        following, preceding = state.following.tolist(), state.preceding.tolist()
        blocks = []
        for block in names:
            chain = ()
            if has_key[block]:
                link = preceding[block]
                link = names[link] if link >= 0 else -1 - names[~link]
                after = following[block]
                after = names[after] if after >= 0 else -1
                chain = keys[32 * block : 32 * block + 32], after, link
            is_unwritten = block in self.pool.unwritten
            held = refs[block], pins[block], hosts[copies[block]]
            blocks.append((chain, held, self.device[block], is_unwritten))
        return sum(ref == 0 for ref in refs), blocks

    def _canonical_tier(self, tier):
        """Name a tier's blocks; return their contents and their eviction order."""
        shot = tier.snapshot()
        order = [block for _, block in sorted(shot.block_ids.items())] + shot.free_ids
        names = {block: n for n, block in enumerate(order)}
        names[NO_BLOCK] = -1
        num_fresh = tier.num_blocks - int(tier.executor.state.pool.num_allocated)
        removed = [words.tobytes() for words in tier.removed_keys or ()]
        # Unindexed blocks count once a listing has reported the bound.
        bound = getattr(tier, "bound", None)
        bounds = tier.is_listed, bound, bound is not None and tier.num_unindexed
        held = repr((shot.policy, shot.ref_cnt)), num_fresh, tier.num_held_blocks
        return names, (held, removed, bounds)

    def _canonical_entry(self, name):
        """Return an object of the scheduler without counters and constants."""
        kind, fields = self._entries[name]
        owner = kind.__name__
        if owner == "Move" or owner == "Load":
            ledger = name.partition("below[0].")[2].partition(".")[0]
            of_sources, of_targets = _ENDS[
                "load" if owner == "Load" else _LEDGERS.get(ledger, "store")
            ]
        shown = []
        for field, value in fields.items():
            if field in _IGNORED or (owner, field) in _IGNORED:
                continue
            if (relative := _RELATIVE.get((owner, field))) is not None:
                shown.append(relative(self, value, fields))
            elif field in ("sources", "targets") and owner in ("Move", "Load"):
                of_tier = of_sources if field == "sources" else of_targets
                shown.append(self._show(value, of_tier))
            else:
                shown.append(self._show(value, _IDS.get(field), field in _ORDERED))
        return shown

    def _show(self, value, of_tier=None, is_ordered=False):
        """Return a value whose numbers are ids of a tier, or of a ledger."""
        kind = type(value)
        if kind is int and of_tier is not None and value != NO_BLOCK:
            return self._names[of_tier][value]
        if kind in (int, bool, str, bytes, float, type(None)):
            return value
        if kind is Ref:
            is_held = "[" in value.name.removeprefix("scheduler.below[0]")
            return self._canonical_entry(value.name) if is_held else None
        if isinstance(value, np.ndarray):
            return self._show(value.tolist(), of_tier)
        if isinstance(value, dict):
            items = [(key, self._show(item, of_tier)) for key, item in value.items()]
            return items if is_ordered else sorted(items)
        if isinstance(value, set | frozenset):
            return sorted(self._show(item, of_tier) for item in value)
        if isinstance(value, list | tuple):
            return [self._show(item, of_tier) for item in value]
        return None  # Rules, groups, requests.


# The parts of the scheduler whose state affects decisions.
_SHOWN = frozenset(
    (
        *("OffloadScheduler", "Gate", "Loads", "Stores", "StoreSteps", "EagerStores"),
        *("StorePause", "LazyStores", "Requests", "Boundary", "ReuseFilter"),
        *("RetentionNotes", "Ledger"),
    )
)
# The fields of reports: of failures and successes, or of all.
_REPORTED = {
    "store": ("failed_store_events", "completed_store_events"),
    "load": ("failed_recving", "finished_recving"),
    "fetch": "fetched",
    "write": "written",
    "probe": "probed",
}
# The tiers of the source ids and of the target ids of each transfer.
_ENDS = {
    "store": ("device", "host"),
    "load": ("host", "device"),
    "fetch": (None, "host"),
    "write": (None, "host"),
    "probe": (None, None),
    "fetches": ("store", "host"),
    "writes": ("host", "store"),
}
_LEDGERS = {"fetches": "fetches", "_writes": "writes", "probes": "probe"}
# What is remembered when all requests have ended, and constants.
_REMEMBERED = {
    *("_counts", "_held_back", "_notes", "unwritten"),
    *("_alternatives", "removed_keys", "_preempted", "_scheduled"),
}
# Fields of ids, and of whose.
_IDS = {
    **dict.fromkeys(("tables", "skipped", "written_blocks"), "device"),
    **dict.fromkeys(("rows", "holds"), "host"),
    "_awaited": "fetches",
}
_ORDERED = {"_overdue", "waiters", "_to_write"}
# What no decision depends on, or what follows from the rest.
_IGNORED = {
    *("request", "limits", "marks", "fetch_of", "_probe_of", "_lookup_marks"),
    *("_asked", "_next_event", "num_fetched_tokens", "_num_holders", "_last_ask"),
    *("_num_asks", "_num_released", "_num_readers", "num_changes", "_num_hit_tokens"),
    *("bytes_per_s", "load_bytes_per_s", "prefill_tokens_per_s", "_is_refused"),
    *(
        ("Boundary", "_reuse_filter"),
        ("Load", "keys"),
        ("Requests", "by_request"),
        ("Table", "times"),
    ),
}


def _queued(world, queued, fields):
    """Return who waits for room, how often it has asked, and who has asked before.

    The last two count from when a hold has ended.
    """
    asks, entries = fields["_last_ask"], world._entries
    rivals = {*fields["holds"], *fields["waits"]}
    rows = []
    for name, ref in sorted(queued.items()):
        entry = entries[ref.name].fields
        row = name, entry["num_vain"]
        if entry["num_released"] == fields["_num_released"]:
            before = sorted(o for o in rivals if asks[o] < entry["first_ask"])
            row += entry["num_asks"], before
        rows.append(row)
    return rows


def _lazy_look(world, seen, fields):
    """Return the blocks freed since the last look, if nothing else has changed."""
    stores = world._fields("_stores")
    changes = world.pool.num_changes
    if seen is None or seen[0] != changes:
        return None
    refused_at = stores["num_changes"] if fields["_is_refused"] else -1
    if seen[2] != refused_at:
        return None
    num_free = world.pool.num_free + world._fields("_stores.in_flight")["num_blocks"]
    num_free += len(world._fields("_stores.waiting")["sources"])
    return seen[1] - num_free, fields["_is_refused"]


def _pause(world, num_offered, fields):
    """Return how much was stored without a hit, and whether a hit came since."""
    if not world.setup.rules.pause_unused_stores:
        return None
    stats = world.scheduler.stats
    num_unused = min(stats.num_offered - num_offered, fields["_max_unused"])
    return num_unused, stats.num_host_hit_tokens != fields["_num_hit_tokens"]


def _boundary_look(world, seen, _):
    is_now = seen is not None and seen[0] == world.host_tier.num_evicted
    return seen[1:] if is_now else None


def _moves(world, moves, fields):
    """Return what is in flight; loads are said with their requests."""
    refs = [ref for _, ref in sorted(moves.items())]
    return [
        world._canonical_entry(ref.name)
        for ref in refs
        if world._entries[ref.name].kind.__name__ != "Load"
    ]


def _counts(world, counts, fields):
    max_count = max(fields["threshold"], 1)
    return sorted((key, min(num, max_count)) for key, num in counts.items())


def _ranks(ledger):
    return lambda world, events, _: sorted(map(world._names[ledger].get, events))


def _events(ledger):
    """Return the events of moves that have not left."""

    def show(world, moves, _):
        entries = world._entries
        events = [
            entries[move.name].fields["event"] if type(move) is Ref else move.event
            for move in moves
        ]
        return [world._names[ledger][event] for event in events]

    return show


def _places(world, ids, fields):
    """Return the entries of a table in use, and which of them are void."""
    ids, times = ids[: fields["num"]], fields["times"][: fields["num"]]
    given = world.scheduler._chooser._places._last_given
    return world._show(ids, "device"), (given[ids] > times).tolist()


def _probes_in(world, num, _):
    return num % _PROBE_INTERVAL


# Counters and events as the future depends on them.
_RELATIVE = {
    ("_Progress", "refused_at"): lambda world, at, _: (
        at == world._fields("_stores")["num_changes"]
    ),
    ("Table", "ids"): _places,
    ("_Progress", "whole_at"): lambda world, num, _: num == world.host_tier.num_removed,
    ("Gate", "_num_slow"): _probes_in,
    ("Gate", "_num_slow_fetches"): _probes_in,
    ("LazyStores", "_seen"): _lazy_look,
    ("StorePause", "_num_offered"): _pause,
    ("Stores", "waiting"): lambda world, ref, _: world._canonical_entry(ref.name),
    ("EagerStores", "_scheduled"): lambda world, names, _: list(names),
    ("Loads", "_waiting"): lambda world, names, _: list(names),
    ("Load", "event"): lambda world, event, _: event != NO_EVENT,
    ("Move", "event"): lambda world, event, _: None,
    ("Ledger", "moves"): _moves,
    ("_Wait", "events"): _ranks("fetches"),
    ("Probing", "events"): _ranks("probes"),
    ("Boundary", "_to_fetch"): _events("fetches"),
    ("Boundary", "_to_probe"): _events("probes"),
    ("Boundary", "looked_up"): lambda world, looks, _: sorted(
        name for name, at in looks.items() if at == world._tiers[1].num_found
    ),
    ("Boundary", "_queued"): _queued,
    ("Boundary", "_seen"): _boundary_look,
    ("ReuseFilter", "_counts"): _counts,
    ("RetentionNotes", "_notes"): lambda world, notes, _: repr(notes),
}
