"""Plans: what a lookup offers from all tiers. Planning changes no state.

`OffloadScheduler` applies a plan, `explain` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsFloat, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown, whole
from jaxkv.keys.mark import KeyMark
from jaxkv.scheduling.boundary import Boundary, Fetch, Probing
from jaxkv.scheduling.loads import NO_IDS, Load, Loads, joined
from jaxkv.scheduling.protocol import NO_EVENT, Request
from jaxkv.scheduling.requests import Requests
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import GroupSpec
from jaxkv.search.tiers import Match, Source, first_tokens, search, source_of
from jaxkv.tiers.index import BlockIndex
from jaxkv.types import NO_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
Keys: TypeAlias = Sequence[Sequence[BlockKey]]
"""A request's keys, for each group of layers."""

Deferral: TypeAlias = str
"""Why a request gets less than the tiers hold: it has a load in flight ("loading");
another request loads one of its blocks ("shared"); recomputing is faster ("gate"); a
tier is being probed for its blocks ("asked"); it waits for room that other requests'
fetches hold ("queued"); or its blocks are fetched from a tier (`Boundary.name`)."""

Speed: TypeAlias = Literal["probe", "slow"] | None
"""The `Gate`'s judgement: "slow" (slower than recomputing, declined), "probe" (slower,
but admitted to measure the rate), or None (not known to be slower)."""

_PROBE_INTERVAL = 32  # Admit one slow load in this many, to measure the rate.
# Maximum wait for a probe of a tier, as a share of the time to recompute its blocks.
_MAX_WAIT_SHARE = 0.1
# Maximum blocks of each group in one probe: a request can get no more unindexed blocks.
_MAX_PROBED_BLOCKS = 1 << 16
_MAX_PROBES = 64  # Probes of one tier in flight.


class Gate:
    """Declines loads and fetches that would take longer than recomputing their tokens.

    All pass until `set_rates` sets the rates. One slow load in `_PROBE_INTERVAL`
    passes as well, so that the rate is still measured.
    """

    def __init__(self, rules: OffloadRules, stats: OffloadStats) -> None:
        self._stats = stats
        self._is_on = rules.skip_slow_loads
        self._block_bytes = rules.block_bytes
        self.load_bytes_per_s = 0.0  # 0 if unknown.
        self.prefill_tokens_per_s = 0.0  # 0 if unknown.
        self._num_slow = 0
        self._num_slow_fetches = 0

    def set_rates(self, load_bytes_per_s: float, prefill_tokens_per_s: float) -> None:
        """Set the measured rates; see `OffloadScheduler.set_rates`."""
        check_rates(
            load_bytes_per_s=load_bytes_per_s, prefill_tokens_per_s=prefill_tokens_per_s
        )
        self.load_bytes_per_s = load_bytes_per_s
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def judge_load(self, num_tokens: int, num_blocks: int, num_ahead: int) -> Speed:
        """Judge a load of `num_blocks` device blocks, after `num_ahead` in flight."""
        if not self.load_bytes_per_s:
            return None
        num_bytes = (num_ahead + num_blocks) * self._block_bytes
        load_s = num_bytes / self.load_bytes_per_s
        return self._judge(load_s, num_tokens, self._num_slow)

    def judge_fetch(
        self, boundary: Boundary, num_tokens: int, num_rows: int, min_s: float | None
    ) -> Speed:
        """Judge a fetch of at least `min_s`, None for a fetch's rest, and the load."""
        row_bytes, fetch_s = boundary.factor * self._block_bytes, min_s or 0.0
        num_bytes = num_rows * row_bytes
        if boundary.bytes_per_s:
            num_ahead = 0 if min_s is None else boundary.fetches.num_blocks
            all_bytes = num_bytes + num_ahead * row_bytes
            fetch_s = max(fetch_s, all_bytes / boundary.bytes_per_s)
        if fetch_s and self.load_bytes_per_s:
            fetch_s += num_bytes / self.load_bytes_per_s
        return self._judge(fetch_s, num_tokens, self._num_slow_fetches)

    def probe_s(self, min_s: float, num_tokens: int) -> float:
        """Return the seconds to wait for a probe of the blocks of `num_tokens`."""
        if not (self._is_on and self.prefill_tokens_per_s):
            return min_s
        return max(min_s, _MAX_WAIT_SHARE * num_tokens / self.prefill_tokens_per_s)

    def _judge(self, load_s: float, num_tokens: int, num_slow: int) -> Speed:
        if not (self._is_on and self.prefill_tokens_per_s):
            return None
        if load_s <= num_tokens / self.prefill_tokens_per_s:
            return None
        return "probe" if (num_slow + 1) % _PROBE_INTERVAL == 0 else "slow"

    def count(self, load: Speed = None, *fetches: Speed) -> None:
        """Count the judgements of an applied plan."""
        self._num_slow += load is not None
        self._stats.num_loads_declined += load == "slow"
        for fetch in fetches:
            self._num_slow_fetches += fetch is not None
            self._stats.num_fetches_declined += fetch == "slow"


def check_rates(**rates: float) -> None:
    """Raise ValueError for a rate (passed by its name) that is not a number >= 0."""
    for name, rate in rates.items():
        # NumPy's numbers have the methods of Python's.
        is_number = isinstance(rate, SupportsFloat) and not isinstance(rate, np.ndarray)
        if not (is_number and 0 <= float(rate) < float("inf")):
            raise ValueError(f"{name}={shown(rate)} must be a number of at least 0.")


def checked_rates(rates: float | Sequence[float], num_tiers: int) -> Sequence[float]:
    """Return a rate for each tier below the host; a single rate is the last tier's."""
    storage_bytes_per_s = rates
    if not isinstance(rates, Sequence):
        check_rates(storage_bytes_per_s=rates)
        rates = [*[0.0] * (num_tiers - 1), rates][:num_tiers]
    if len(rates) != num_tiers:
        raise ValueError(
            f"{storage_bytes_per_s=} has {len(rates)} rates for {num_tiers} tiers "
            "below the host: pass one rate per tier."
        )
    for rate in rates:
        check_rates(storage_bytes_per_s=rate)
    return rates


class View(NamedTuple):
    """The state that a plan reads and does not change."""

    groups: tuple[GroupSpec, ...]
    rules: OffloadRules
    requests: Requests
    gate: Gate
    host: BlockIndex
    loads: Loads
    below: tuple[Boundary, ...]  # From the host downwards.
    is_plain: bool  # Whether `_find_plain_load` may be used, as for most models.


class Plan(NamedTuple):
    """The result of a lookup, not yet applied."""

    num_tokens: int | None  # Offered; None if the request asks again later.
    is_awaited: bool = False  # Whether the request must wait for the load.
    deferral: Deferral | None = None  # Why the tiers hold more than the offer.
    load: Load | None = None  # The offer, which must be held.
    # The fetch to start before the offer, if the upper tier has room.
    fetch: tuple[Boundary, Fetch] | None = None
    nearer: tuple[Boundary, ...] = ()  # The boundaries above the fetch's boundary.
    # The probe to send before a fetch: its boundary, runs of keys, and wait in seconds.
    probe: tuple[Boundary, list[list[BlockKey]], float] | None = None
    queue: Boundary | None = None  # The boundary where the request queues for room.
    searched: tuple[Boundary, ...] = ()  # Not searched again until new blocks come.
    load_speed: Speed = None
    fetch_speeds: tuple[Speed, ...] = ()


_NOTHING = Plan(0)


def plan(view: View, request: Request, num_computed_tokens: int) -> Plan:
    """Plan the offer that continues a request's prefix of `num_computed_tokens`.

    The request's previous offer counts as released. In addition to the errors of
    `Requests.checked`, raises ValueError if `num_computed_tokens` is not whole blocks.
    """
    view.requests.check_lookup(request)
    num: int | None = num_computed_tokens
    if type(num) is not int:
        num = whole(num)
    for spec in view.groups:
        if num is None or num < 0 or num % spec.block_size:
            raise ValueError(
                f"num_computed_tokens={shown(num_computed_tokens)} of request "
                f"{shown(request.request_id)} must be whole blocks: a multiple of "
                f"{spec.block_size}."
            )
    keys = view.requests.checked(request)
    current = view.loads.by_request.get(request.request_id)
    if current is not None and current.event != NO_EVENT:
        # The request was preempted during this load, which is still in flight.
        return Plan(None, deferral="loading")
    searched: tuple[Boundary, ...] = ()
    speeds: tuple[Speed, ...] = ()
    for boundary in reversed(view.below):
        fetch_plan = _plan_fetch(view, boundary, request, keys, num_computed_tokens)
        searched += fetch_plan.searched
        speeds += fetch_plan.fetch_speeds
        if fetch_plan.deferral is not None:
            return fetch_plan._replace(searched=searched, fetch_speeds=speeds)
    load_plan = _plan_load(view, request, keys, num_computed_tokens, current)
    if not (searched or speeds):
        return load_plan
    return load_plan._replace(searched=searched, fetch_speeds=speeds)


def _plan_fetch(
    view: View,
    boundary: Boundary,
    request: Request,
    keys: Keys,
    num_computed_tokens: int,
) -> Plan:
    """Plan a fetch or probe; with a deferral if the request must wait for it."""
    name, tier = request.request_id, boundary.tier
    wait = boundary.waits.get(name)
    if wait is not None and wait.is_open:
        if judge_rest(view.gate, boundary, name) != "slow":
            return Plan(None, deferral=boundary.name)
        return Plan(0, fetch_speeds=("slow",))
    if boundary.is_down or (wait is not None and not boundary.may_search_again(name)):
        return _NOTHING
    probing = boundary.probing.get(name)
    if probing is not None and probing.events:
        return Plan(None, deferral="asked")
    is_expected = boundary.has_other_writers and is_prefilled_elsewhere(request)
    can_probe = not is_expected and wait is None and may_probe(boundary, probing)
    is_searched = wait is None and boundary.looked_up.get(name) == tier.num_found
    if is_searched or not (tier.num_held_blocks or can_probe or is_expected):
        return _NOTHING
    device = first_tokens(num_computed_tokens)
    above = view.below[: boundary.number]
    nearer = device, *[source_of(tier.upper, tier.factor) for tier in above]
    max_tokens = max_hit_tokens(request, num_computed_tokens)
    query = PrefixQuery(boundary, nearer, keys, max_tokens, num_computed_tokens)
    speeds: tuple[Speed, ...] = ()
    if can_probe:
        probe, speed = find_probe(view.gate, query, name)
        if probe is not None:
            return Plan(None, deferral="asked", probe=(boundary, *probe))
        speeds = () if speed is None else (speed,)
    fetch = find_fetch(query, name if is_expected else None)
    searched = Plan(0, searched=(boundary,), fetch_speeds=speeds)
    if fetch is None:
        return searched
    if wait is None and not boundary.has_room(name, fetch):
        if boundary.may_queue(name):
            return Plan(None, deferral="queued", queue=boundary)
        return Plan(0, fetch_speeds=speeds)
    speed = judge_fetch(view.gate, boundary, fetch)
    speeds += () if speed is None else (speed,)
    searched = searched._replace(fetch_speeds=speeds)
    if speed == "slow":
        return searched
    deferred = searched._replace(num_tokens=None, deferral=boundary.name)
    return deferred._replace(fetch=(boundary, fetch), nearer=above)


class PrefixQuery(NamedTuple):
    """A search of a request's prefix, down to the lower tier of a boundary."""

    boundary: Boundary
    nearer: Sequence[Source]  # The device, and the tiers above the upper tier.
    keys: Keys
    max_tokens: int  # The maximum length of the prefix.
    num_computed_tokens: int = 0  # The request has this part of the prefix already.


class _Missing(NamedTuple):
    """The blocks of the longest prefix that the nearer tiers lack."""

    num_tokens: int  # The length of the prefix.
    upper_rows: list[int]  # Ids in the upper tier of those that it has.
    rows: list[list[int]]  # For each group, row indices of those that it lacks.
    unknown: list[list[int]]  # The part of `rows` that the lower tier's index lacks.


def _find_missing(query: PrefixQuery, expected_by: str | None) -> _Missing:
    """Search all tiers; for `expected_by`, assume the lower one has unknown blocks."""
    boundary, factor = query.boundary, query.boundary.factor
    upper, lower = boundary.upper, boundary.tier
    sources = *query.nearer, source_of(upper, factor), source_of(lower, factor)
    if expected_by is not None:
        sources = *sources, Source(partial(boundary.may_have, expected_by), factor)
    match = search(boundary.groups, query.keys, query.max_tokens, sources)
    result, num_nearer = _Missing(match.num_tokens, [], [], []), len(query.nearer)
    for spec, needed, *ids_of in zip(
        boundary.groups, match.needed, *match.block_ids, strict=True
    ):
        start = query.num_computed_tokens // spec.block_size
        missing = (np.flatnonzero(needed[start:]) + start).astype(np.int32)
        for ids in ids_of[:num_nearer]:
            missing = missing[ids[missing] == NO_BLOCK]
        in_upper, in_lower = ids_of[num_nearer], ids_of[num_nearer + 1]
        upper_rows = in_upper[missing]
        result.upper_rows.extend(np.unique(upper_rows[upper_rows != NO_BLOCK]).tolist())
        missing = missing[upper_rows == NO_BLOCK]
        result.rows.append(np.unique(missing // factor).tolist())
        unknown = missing[in_lower[missing] == NO_BLOCK]
        result.unknown.append(np.unique(unknown // factor).tolist())
    return result


def find_fetch(query: PrefixQuery, expected_by: str | None = None) -> Fetch | None:
    """Find the blocks of the longest prefix that only the lower tier has, if any.

    `expected_by` names a request whose blocks another engine writes to the lower tier,
    which then counts as having all blocks except those that it reported missing. If the
    prefix does not fit into the upper tier, a shorter one is fetched.
    """
    fetch, num_blocks = _find_fetch(query, expected_by), query.boundary.upper.num_blocks
    if fetch is None or len(fetch.keys) + len(fetch.upper_rows) <= num_blocks:
        return fetch
    if query.boundary.can_truncate:
        if (num := num_blocks - len(fetch.upper_rows)) <= 0:
            return None
        keys, end_tokens = fetch.keys[:num], fetch.end_tokens[:num]
        return fetch._replace(
            num_tokens=end_tokens[-1], keys=keys, end_tokens=end_tokens
        )
    # Without full attention, a shorter prefix needs other blocks.
    low, high, found = query.num_computed_tokens, fetch.num_tokens, None
    while (max_tokens := (low + high) // 2) > low:
        fetch = _find_fetch(query._replace(max_tokens=max_tokens), expected_by)
        if fetch and len(fetch.keys) + len(fetch.upper_rows) > num_blocks:
            high = max_tokens
        else:
            low, found = max_tokens, fetch or found
    return found


def _find_fetch(query: PrefixQuery, expected_by: str | None) -> Fetch | None:
    groups, factor = query.boundary.groups, query.boundary.factor
    missing = _find_missing(query, expected_by)
    if missing.num_tokens <= query.num_computed_tokens:
        return None
    ends = [
        ((row + 1) * factor * spec.block_size, keys[(row + 1) * factor - 1])
        for spec, keys, rows in zip(groups, query.keys, missing.rows, strict=True)
        for row in rows
    ]
    if not ends:
        return None
    ends.sort(key=lambda end: end[0])
    return Fetch(
        missing.num_tokens,
        missing.upper_rows,
        [key for _, key in ends],
        [end for end, _ in ends],
        factor * groups[0].block_size,
        expected_by is not None,
    )


def may_probe(boundary: Boundary, probing: Probing | None) -> bool:
    """Whether the lower tier may be probed for blocks of a request."""
    if not boundary.probe_s or len(boundary.probes.moves) >= _MAX_PROBES:
        return False
    return probing is None or probing.num < boundary.max_probes


def find_probe(
    gate: Gate, query: PrefixQuery, request_id: str
) -> tuple[tuple[list[list[BlockKey]], float] | None, Speed]:
    """Choose the keys of a probe: blocks that no tier is known to have.

    They belong to the longest prefix that the tiers would have if the lower tier had
    all blocks except those that it reported missing. Return the runs of keys and the
    wait in seconds, or None; and the gate's judgement if it declines their fetch.
    """
    boundary, factor = query.boundary, query.boundary.factor
    missing = _find_missing(query, request_id)
    runs: list[list[BlockKey]] = []
    starts, num_rows = [], 0
    for spec, keys, unknown in zip(
        boundary.groups, query.keys, missing.unknown, strict=True
    ):
        if rows := unknown[:_MAX_PROBED_BLOCKS]:
            num_rows += len(rows)
            starts.append(rows[0] * factor * spec.block_size)
            runs.append([keys[(row + 1) * factor - 1] for row in rows])
    if not runs:
        return None, None
    num_tokens = missing.num_tokens - max(min(starts), query.num_computed_tokens)
    speed = gate.judge_fetch(boundary, num_tokens, num_rows, sum(boundary.latencies_s))
    if speed == "slow":
        return None, speed
    return (runs, gate.probe_s(boundary.probe_s, num_tokens)), None


def judge_fetch(gate: Gate, boundary: Boundary, fetch: Fetch) -> Speed:
    """Judge the fetch of a whole prefix, after the blocks in flight."""
    num_tokens = fetch.num_tokens - max(fetch.end_tokens[0] - fetch.row_tokens, 0)
    latency_s, _ = boundary.latencies_s
    return gate.judge_fetch(boundary, num_tokens, len(fetch.keys), latency_s)


def judge_rest(gate: Gate, boundary: Boundary, request_id: str) -> Speed:
    """Judge the part of a fetch that has not arrived."""
    num_blocks, num_tokens = boundary.num_left(request_id)
    return gate.judge_fetch(boundary, num_tokens, num_blocks, None)


def _plan_load(
    view: View,
    request: Request,
    keys: Sequence[list[BlockKey]],
    num_computed_tokens: int,
    current: Load | None,
) -> Plan:
    """Plan the load from the host of the blocks that continue the device's prefix."""
    if view.is_plain:
        load = _find_plain_load(view, request, keys, num_computed_tokens)
    else:
        load = _find_load(view, request, keys, num_computed_tokens)
    if load is None:
        return _NOTHING
    rows = load.sources
    is_shared = view.rules.delay_shared_loads and _are_loaded_by_others(
        view.loads, rows, current
    )
    if is_shared:
        return Plan(None, deferral="shared")
    if not rows.size:
        return Plan(load.num_tokens, load=load)
    num_blocks = rows.size * view.rules.blocks_per_host_block
    ahead = view.loads.in_flight.num_blocks
    speed = view.gate.judge_load(load.num_tokens, num_blocks, ahead)
    if speed == "slow":
        return Plan(0, deferral="gate", load_speed=speed)
    return Plan(load.num_tokens, is_awaited=True, load=load, load_speed=speed)


def _are_loaded_by_others(loads: Loads, rows: Ids, current: Load | None) -> bool:
    """Whether loads of other requests will read some of `rows`.

    Offers do not count: a request with an offer may get no device blocks, and queue
    behind the request that would wait for it.
    """
    loaded: set[int] = set()
    for load in loads.by_request.values():
        if load is not current and load.is_taken:
            loaded.update(load.sources.tolist())
    return not loaded.isdisjoint(rows.tolist())


def max_hit_tokens(request: Request, num_computed_tokens: int) -> int:
    """Return how many tokens may be hits: not the last, whose logits are needed."""
    max_tokens = request.num_tokens - 1
    max_load: int | None = getattr(request, "max_load_tokens", None)
    if max_load is None:
        return max_tokens
    return min(max_tokens, num_computed_tokens + max_load)


def is_prefilled_elsewhere(request: Request) -> bool:
    """Whether another engine computes a request's prompt and stores it."""
    return bool(getattr(request, "remote_prefill", False))


def _find_load(
    view: View, request: Request, keys: Keys, num_computed_tokens: int
) -> Load | None:
    """Return the load that the longest prefix of device and host needs, if any."""
    groups, factor = view.groups, view.rules.blocks_per_host_block
    sources = first_tokens(num_computed_tokens), source_of(view.host, factor)
    max_tokens = max_hit_tokens(request, num_computed_tokens)
    match = search(groups, keys, max_tokens, sources)
    if match.num_tokens <= num_computed_tokens:
        return None
    name = request.request_id
    return _load_of(groups, name, keys, match, num_computed_tokens, factor)


def _find_plain_load(
    view: View,
    request: Request,
    keys: Sequence[list[BlockKey]],
    num_computed_tokens: int,
) -> Load | None:
    """Fast `_find_load` for one full-attention group, one block per row."""
    (spec,), (group_keys,) = view.groups, keys
    usable = max(max_hit_tokens(request, num_computed_tokens), 0) // spec.block_size
    start = num_computed_tokens // spec.block_size
    rows = view.host.find_prefix(group_keys[start:usable])
    if not rows.size:
        return None
    num = start + rows.size
    num_tokens = rows.size * spec.block_size
    return Load(
        group_keys[start:num],
        rows,
        NO_IDS,
        request_id=request.request_id,
        num_computed_tokens=num_computed_tokens,
        num_tokens=num_tokens,
        marks=[KeyMark(num, group_keys[num - 1])],
        row_groups=np.zeros(rows.size, np.int32),
        row_indices=np.arange(start, num, dtype=np.int32)[:, None],
    )


def _load_of(
    groups: tuple[GroupSpec, ...],
    request_id: str,
    keys: Keys,
    match: Match,
    num_computed_tokens: int,
    factor: int,
) -> Load:
    """Return the load of the blocks that a request needs for its longest prefix."""
    rows: list[Ids] = []
    row_indices: list[Ids] = []
    row_keys: list[BlockKey] = []
    for spec, group_keys, needed, on_host in zip(
        groups, keys, match.needed, match.block_ids[-1], strict=True
    ):
        start = num_computed_tokens // spec.block_size
        missing: NDArray[Any] = needed[start:].nonzero()[0].astype(np.int32) + np.int32(
            start
        )
        indices = missing[:, None]
        if factor > 1:
            is_missing = np.zeros(-(-needed.size // factor) * factor, np.bool_)
            is_missing[missing] = True
            missing = np.unique(missing // factor) * factor
            indices = missing[:, None] + np.arange(factor, dtype=np.int32)
            indices = np.where(is_missing[indices], indices, np.int32(NO_BLOCK))
        row_keys += [group_keys[index + factor - 1] for index in missing.tolist()]
        rows.append(on_host[missing])
        row_indices.append(indices)
    return Load(
        row_keys,
        joined(rows),
        NO_IDS,
        request_id=request_id,
        num_computed_tokens=num_computed_tokens,
        num_tokens=match.num_tokens - num_computed_tokens,
        marks=[
            KeyMark.of(group_keys, match.num_tokens // spec.block_size)
            for spec, group_keys in zip(groups, keys, strict=True)
        ],
        row_groups=_array_numbers(rows),
        row_indices=joined(row_indices),
    )


def _array_numbers(arrays: Sequence[Ids]) -> Ids:
    """Return the array number of each item of the concatenated arrays: i32[n]."""
    if len(arrays) == 1:
        return np.zeros(len(arrays[0]), np.int32)
    numbers = np.arange(len(arrays), dtype=np.int32)
    return np.repeat(numbers, list(map(len, arrays)))
