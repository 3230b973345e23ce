"""What a look-up comes to: one plan over all tiers, which holds and changes nothing.

`OffloadScheduler` applies a plan, `explain` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, SupportsFloat, TypeAlias

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
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.types import NO_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
Deferral: TypeAlias = str
"""Why a request gets less than the tiers hold: it has a load under way ("loading");
another loads one of its blocks ("shared"); computing is faster ("gate"); a tier is
asked for blocks that may be there ("asked"); what is fetched for others has to be used
first ("queued"); or the name of a tier from which blocks come first
(`Boundary.name`)."""

Speed: TypeAlias = Literal["probe", "slow"] | None
"""How the `Gate` judges a load: slower than to compute, but made, to measure; slower;
None if it is not slower, as far as is known."""

_PROBE_INTERVAL = 32
# Of the time that it would take to compute what a tier is asked for, the part that a
# request may wait for the answer.
_SHARE_WAITED = 0.1
# Blocks of each group that it is asked for at a time, or as many as can be fetched, if
# that is more: a request gets no more of it.
_MOST_PROBED = 256
_MOST_PROBES = 64  # That are not over.


class Gate:
    """Judges whether loads would take longer than to compute the tokens again.

    It knows rates only from `note_rates`, and lets everything pass until then. Of the
    loads that it would decline one in `_PROBE_INTERVAL` passes, so that the rate of
    loads goes on being measured.

    Args:
        rules: What the engine chose.
        stats: Where declined loads are counted.

    Attributes:
        load_bytes_per_s: As it was noted last; 0 if unknown.
        prefill_tokens_per_s: Likewise.
    """

    def __init__(self, rules: OffloadRules, stats: OffloadStats) -> None:
        self._stats = stats
        self._is_on = rules.skip_slow_loads
        self._block_bytes = rules.block_bytes
        self.load_bytes_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._num_slow = 0
        self._num_slow_fetches = 0

    def note_rates(self, load_bytes_per_s: float, prefill_tokens_per_s: float) -> None:
        """Take note of what was measured; see `OffloadScheduler.note_rates`."""
        check_rates(
            load_bytes_per_s=load_bytes_per_s, prefill_tokens_per_s=prefill_tokens_per_s
        )
        self.load_bytes_per_s = load_bytes_per_s
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def judge_load(self, num_tokens: int, num_blocks: int, num_ahead: int) -> Speed:
        """Judge a load from the host; nothing is counted.

        Args:
            num_tokens: Tokens that it saves computing.
            num_blocks: Device blocks that it moves.
            num_ahead: Those in flight before it.
        """
        if not self.load_bytes_per_s:
            return None
        num_bytes = (num_ahead + num_blocks) * self._block_bytes
        load_s = num_bytes / self.load_bytes_per_s
        return self._judge(load_s, num_tokens, self._num_slow)

    def judge_fetch(
        self, num_tokens: int, num_blocks: int, num_ahead: int, bytes_per_s: float
    ) -> Speed:
        """Judge a fetch to the host, which a load follows; nothing is counted."""
        if not bytes_per_s:
            return None
        num_bytes = num_blocks * self._block_bytes
        num_bytes_ahead = num_ahead * self._block_bytes
        fetch_s = (num_bytes_ahead + num_bytes) / bytes_per_s
        if self.load_bytes_per_s:
            fetch_s += num_bytes / self.load_bytes_per_s
        return self._judge(fetch_s, num_tokens, self._num_slow_fetches)

    def probe_s(self, least_s: float, num_tokens: int) -> float:
        """Say how long a request may wait while a tier is asked for some tokens.

        Args:
            least_s: How long in any case.
            num_tokens: Tokens that it would compute otherwise.
        """
        if not (self._is_on and self.prefill_tokens_per_s):
            return least_s
        return max(least_s, _SHARE_WAITED * num_tokens / self.prefill_tokens_per_s)

    def _judge(self, load_s: float, num_tokens: int, num_slow: int) -> Speed:
        if not (self._is_on and self.prefill_tokens_per_s):
            return None
        if load_s <= num_tokens / self.prefill_tokens_per_s:
            return None
        return "probe" if (num_slow + 1) % _PROBE_INTERVAL == 0 else "slow"

    def count(self, load: Speed = None, *fetches: Speed) -> None:
        """Count what was judged, once it is applied."""
        self._num_slow += load is not None
        self._stats.num_loads_declined += load == "slow"
        for fetch in fetches:
            self._num_slow_fetches += fetch is not None
            self._stats.num_fetches_declined += fetch == "slow"


def check_rates(**rates: float) -> None:
    """Raise ValueError if a rate, given by its name, is no number of at least 0."""
    for name, rate in rates.items():
        # NumPy's numbers have the methods of Python's.
        is_number = isinstance(rate, SupportsFloat) and not isinstance(rate, np.ndarray)
        if not (is_number and 0 <= float(rate) < float("inf")):
            raise ValueError(f"{name}={shown(rate)} must be a number of at least 0.")


class View(NamedTuple):
    """What a plan reads, and does not change.

    Attributes:
        groups: The groups of the model's layers.
        rules: What the engine chose.
        requests: The requests.
        gate: Judges whether a load is worth its time.
        pool: The device's blocks.
        host: The host tier.
        loads: The loads of all requests.
        below: What moves between the host and each tier below it, the nearest first.
        is_plain: Whether `_find_plain_load` serves: as for most models and settings.
    """

    groups: tuple[GroupSpec, ...]
    rules: OffloadRules
    requests: Requests
    gate: Gate
    pool: DeviceBlockPool
    host: BlockIndex
    loads: Loads
    below: tuple[Boundary, ...]
    is_plain: bool


class Plan(NamedTuple):
    """What a look-up comes to.

    Attributes:
        num_tokens: What is offered; None if the request asks again later.
        is_awaited: Whether the request has to wait for it.
        deferral: Why it is less than the tiers hold; None if it is not.
        load: What is offered, to be held.
        fetch: What has to come up a tier first, if there is room for it: from where,
            what, and how many blocks of it at most, from the first on.
        probe: A probe to send first: the tier, the runs of keys, and how long the
            request waits for the answer.
        nearer: The tiers above the one that is fetched from, the nearest first.
        queue: The tier below the host in front of which the request waits for room, as
            others hold it.
        searched: The tiers of which this is what they have of the request for now.
        load_speed: How the gate judges the load.
        fetch_speeds: How the gate judges fetches.
        own: The load that the request has under way.
        shared: Host blocks that others are loading, for which the request waits.
    """

    num_tokens: int | None
    is_awaited: bool = False
    deferral: Deferral | None = None
    load: Load | None = None
    fetch: tuple[Boundary, Fetch, int] | None = None
    probe: tuple[Boundary, list[list[BlockKey]], float] | None = None
    nearer: tuple[Boundary, ...] = ()
    queue: Boundary | None = None
    searched: tuple[Boundary, ...] = ()
    load_speed: Speed = None
    fetch_speeds: tuple[Speed, ...] = ()
    own: Load | None = None
    shared: frozenset[int] = frozenset()


_NOTHING = Plan(0)


def plan(view: View, request: Request, num_computed_tokens: int) -> Plan:
    """Plan what continues a request's prefix.

    What the request was offered before counts as let go of.

    Args:
        view: The tiers, and what moves between them.
        request: The request.
        num_computed_tokens: What it has of the prefix.

    Raises:
        ValueError: If `num_computed_tokens` is no number of whole blocks, or as
            `Requests.checked`.
        TypeError: As `Requests.checked`.
    """
    view.requests.check_lookup(request)
    num: int | None = num_computed_tokens
    if type(num) is not int:
        num = whole(num)
    for spec in view.groups:
        if num is None or num < 0 or num % spec.block_size:
            raise ValueError(
                f"num_computed_tokens={shown(num_computed_tokens)} of request "
                f"{shown(request.request_id)} must be of whole blocks: a multiple of "
                f"{spec.block_size}."
            )
    keys = view.requests.checked(request)
    own = view.loads.by_request.get(request.request_id)
    if own is not None and own.event != NO_EVENT:
        # From before a preemption; its end will be reported.
        return Plan(None, deferral="loading", own=own)
    searched: tuple[Boundary, ...] = ()
    speeds: tuple[Speed, ...] = ()
    for boundary in reversed(view.below):
        first = _plan_fetch(view, boundary, request, keys, num_computed_tokens)
        searched += first.searched
        speeds += first.fetch_speeds
        if first.deferral is not None:
            return first._replace(searched=searched, fetch_speeds=speeds)
    answer = _plan_load(view, request, keys, num_computed_tokens, own)
    if not searched:
        return answer
    return answer._replace(searched=searched, fetch_speeds=speeds)


def _plan_fetch(
    view: View,
    own: Boundary,
    request: Request,
    keys: Sequence[Sequence[BlockKey]],
    num_computed_tokens: int,
) -> Plan:
    """Plan what comes up to a tier first, or is asked for; deferred if there is any."""
    name, tier = request.request_id, own.tier
    wait = own.waits.get(name)
    if wait is not None:
        return Plan(None, deferral=own.name) if wait.events else _NOTHING
    asked = own.probing.get(name)
    if asked is not None and asked.events:
        return Plan(None, deferral="asked")
    is_expected = own.has_other_writers and is_prefilled_elsewhere(request)
    is_to_ask = not is_expected and may_probe(own, asked)
    is_searched = own.looked_up.get(name) == tier.num_found
    if is_searched or not (tier.num_held_blocks or is_to_ask or is_expected):
        return _NOTHING
    device = first_tokens(num_computed_tokens)
    if view.rules.copy_on_device:  # Without it the pool may have no `find`.
        device = source_of(view.pool)
    above = view.below[: own.number]
    nearer = device, *[source_of(b.upper, own.factor) for b in above]
    max_tokens = most_found_tokens(request, num_computed_tokens)
    prefix = keys, max_tokens, num_computed_tokens
    speeds: tuple[Speed, ...] = ()
    if is_to_ask:
        probe, speed = find_probe(view.gate, own, name, nearer, *prefix)
        if probe is not None:
            return Plan(None, deferral="asked", probe=(own, *probe))
        speeds = () if speed is None else (speed,)
    fetch = find_fetch(own, nearer, *prefix, name if is_expected else None)
    if fetch is None:
        return Plan(0, searched=(own,), fetch_speeds=speeds)
    if not own.has_room(name, fetch):
        if own.may_queue(name):
            return Plan(None, deferral="queued", queue=own)
        return Plan(0, fetch_speeds=speeds)
    num, speed = size_fetch(view.gate, own, fetch)
    speeds += () if speed is None else (speed,)
    if not num:
        return Plan(0, searched=(own,), fetch_speeds=speeds)
    return Plan(
        None,
        deferral=own.name,
        fetch=(own, fetch, num),
        nearer=above,
        searched=(own,),
        fetch_speeds=speeds,
    )


def find_fetch(
    own: Boundary,
    nearer: Sequence[Source],
    keys: Sequence[Sequence[BlockKey]],
    max_tokens: int,
    num_computed_tokens: int = 0,
    expected_by: str | None = None,
) -> Fetch | None:
    """Find what only the lower tier has of a request's longest prefix.

    Args:
        own: The upper tier and the lower one.
        nearer: What the device has, and the tiers between it and the upper one.
        keys: The request's keys, for each group.
        max_tokens: Most tokens that the prefix may have.
        num_computed_tokens: What the request has of it.
        expected_by: The request, if it waits for what others write to the lower tier:
            that is taken to have what it did not say that it lacks.

    Returns:
        What has to be fetched; None if nothing, or if the tier has nothing of it.
    """
    groups, factor = own.groups, own.factor
    sources = *nearer, source_of(own.upper, factor), source_of(own.tier, factor)
    if expected_by is not None:
        sources = *sources, Source(partial(own.may_have, expected_by), factor)
    match = search(groups, keys, max_tokens, sources)
    if match.num_tokens <= num_computed_tokens:
        return None
    upper_rows: list[int] = []
    rows: list[tuple[int, BlockKey]] = []
    each = _lacking(groups, match, len(nearer), num_computed_tokens)
    for group, missing in enumerate(each):
        spec, in_upper = groups[group], match.block_ids[len(nearer)][group]
        is_in_upper = in_upper[missing] != NO_BLOCK
        upper_rows += np.unique(in_upper[missing[is_in_upper]]).tolist()
        for row in np.unique(missing[~is_in_upper] // factor).tolist():
            end = (row + 1) * factor
            rows.append((end * spec.block_size, keys[group][end - 1]))
    if not rows:
        return None
    rows.sort(key=lambda row: row[0])
    ends, row_keys = [end for end, _ in rows], [key for _, key in rows]
    row_tokens = factor * groups[0].block_size
    is_awaited = expected_by is not None
    return Fetch(match.num_tokens, upper_rows, row_keys, ends, row_tokens, is_awaited)


def may_probe(own: Boundary, asked: Probing | None) -> bool:
    """Tell whether the lower tier may be asked for what a request lacks.

    Args:
        own: The upper tier and the lower one.
        asked: What it was asked for so far, for this request.
    """
    if not own.probe_s or len(own.probes.moves) >= _MOST_PROBES:
        return False
    return asked is None or asked.num < own.most_probes


def find_probe(
    gate: Gate,
    own: Boundary,
    request_id: str,
    nearer: Sequence[Source],
    keys: Sequence[Sequence[BlockKey]],
    max_tokens: int,
    num_computed_tokens: int = 0,
) -> tuple[tuple[list[list[BlockKey]], float] | None, Speed]:
    """Choose the keys of a probe: blocks that no tier is known to have.

    They are what the longest possible prefix would read, if the lower tier had all that
    it is not known to lack.

    Args:
        gate: Judges whether a fetch would be worth its time.
        own: The upper tier and the lower one, which it `may_probe`.
        request_id: The request.
        nearer: As of `find_fetch`, and so are the others.
        keys: The request's keys, for each group.
        max_tokens: Most tokens that the prefix may have.
        num_computed_tokens: What the request has of it.

    Returns:
        The runs of keys, and how long the request waits for the answer, None if there
        is nothing to ask for; and how the gate judges the fetch of all of it, if it is
        not worth its time.
    """
    groups, factor = own.groups, own.factor

    sources = *nearer, source_of(own.upper, factor), source_of(own.tier, factor)
    perhaps = Source(partial(own.may_have, request_id), factor)
    match = search(groups, keys, max_tokens, (*sources, perhaps))
    runs: list[list[BlockKey]] = []
    starts, num_rows = [], 0
    most = max(_MOST_PROBED, own.most_fetched)
    each = _lacking(groups, match, len(sources), num_computed_tokens)
    for spec, of_group, missing in zip(groups, keys, each, strict=True):
        rows = np.unique(missing // factor)[:most].tolist()
        if rows:
            num_rows += len(rows)
            starts.append(rows[0] * factor * spec.block_size)
            runs.append([of_group[(row + 1) * factor - 1] for row in rows])
    if not runs:
        return None, None
    num_tokens = match.num_tokens - max(min(starts), num_computed_tokens)
    ahead = own.fetches.num_blocks * factor
    speed = gate.judge_fetch(num_tokens, num_rows * factor, ahead, own.bytes_per_s)
    if speed == "slow":
        return None, speed
    return (runs, gate.probe_s(own.probe_s, num_tokens)), None


def _lacking(
    groups: tuple[GroupSpec, ...],
    match: Match,
    num_sources: int,
    num_computed_tokens: int,
) -> Iterator[Ids]:
    """Give for each group the blocks that a prefix reads and the first sources lack."""
    found = match.block_ids[:num_sources]
    for spec, needed, *block_ids in zip(groups, match.needed, *found, strict=True):
        start = num_computed_tokens // spec.block_size
        missing = (np.flatnonzero(needed[start:]) + start).astype(np.int32)
        for ids in block_ids:
            missing = missing[ids[missing] == NO_BLOCK]
        yield missing


def size_fetch(gate: Gate, own: Boundary, fetch: Fetch) -> tuple[int, Speed]:
    """Say how many blocks may be fetched now, from the first on, and how fast that is.

    Args:
        gate: Judges whether a fetch is worth its time.
        own: What is being fetched.
        fetch: What has to be fetched.

    Returns:
        The number, 0 if it is not worth its time; and how the gate judges it.
    """
    room = own.most_fetched - own.fetches.num_blocks
    num = len(fetch.keys)
    for index, key in enumerate(fetch.keys):
        room -= key not in own.fetch_of
        if room < 0:
            num = index if own.may_cut else 0
            break
    if not num:
        return 0, None
    end = fetch.num_tokens
    if num < len(fetch.keys):
        end = fetch.end_tokens[num] - fetch.row_tokens
    num_tokens = max(end - (fetch.end_tokens[0] - fetch.row_tokens), 0)
    factor = own.factor
    ahead = own.fetches.num_blocks * factor
    speed = gate.judge_fetch(num_tokens, num * factor, ahead, own.bytes_per_s)
    return (0 if speed == "slow" else num), speed


def _plan_load(
    view: View,
    request: Request,
    keys: Sequence[list[BlockKey]],
    num_computed_tokens: int,
    own: Load | None,
) -> Plan:
    """Plan what comes from the host, and from elsewhere on the device."""
    load, is_found = None, False
    if view.is_plain:
        load, is_found = _find_plain_load(view, request, keys, num_computed_tokens)
    if not is_found:
        _, load = find_load(view, request, keys, num_computed_tokens)
    if load is None:
        return _NOTHING
    rows = load.sources
    if view.rules.delay_shared_loads:
        shared = _rows_loading(view.loads, rows, own)
        if shared:
            return Plan(None, deferral="shared", shared=frozenset(shared))
    if not rows.size:
        return Plan(load.num_tokens, load=load)
    num_blocks = rows.size * view.rules.blocks_per_host_block
    ahead = view.loads.in_flight.num_blocks
    speed = view.gate.judge_load(load.num_tokens, num_blocks, ahead)
    if speed == "slow":
        return Plan(0, deferral="gate", load_speed=speed)
    # Copies are done when the step's model runs; a transfer takes its time, unless
    # the model itself waits for it.
    is_awaited = not view.rules.load_in_step
    return Plan(load.num_tokens, is_awaited, load=load, load_speed=speed)


def _rows_loading(loads: Loads, rows: Ids, beside: Load | None) -> set[int]:
    """List those of some host blocks that loads will read, beside one.

    What is only offered is not counted: its request may get no room, and stand behind
    one that would wait for it.
    """
    taken: set[int] = set()
    for load in loads.by_request.values():
        if load is not beside and load.is_taken:
            taken.update(load.sources.tolist())
    return taken.intersection(rows.tolist())


def most_found_tokens(request: Request, num_computed_tokens: int) -> int:
    """Tell how many tokens of a request may be found: not the last, for its logits.

    Args:
        request: The request.
        num_computed_tokens: What the device has of its prefix.
    """
    most = request.num_tokens - 1
    own: int | None = getattr(request, "max_load_tokens", None)
    return most if own is None else min(most, num_computed_tokens + own)


def is_prefilled_elsewhere(request: Request) -> bool:
    """Tell whether another engine computes a request's prompt and stores it."""
    return bool(getattr(request, "remote_prefill", False))


def find_load(
    view: View,
    request: Request,
    keys: Sequence[Sequence[BlockKey]],
    num_computed_tokens: int,
) -> tuple[Match, Load | None]:
    """Find what the device and the host have of a request's prefix.

    Args:
        view: The tiers, and what moves between them.
        request: The request.
        keys: Its keys, for each group.
        num_computed_tokens: What the request has of it.

    Returns:
        The longest prefix that may be used, and what the request lacks of it; None if
        that is nothing.
    """
    groups, factor = view.groups, view.rules.blocks_per_host_block

    def look(device: Source) -> tuple[Match, Load | None]:
        sources = device, source_of(view.host, factor)
        most = most_found_tokens(request, num_computed_tokens)
        match = search(groups, keys, most, sources)
        if match.num_tokens <= num_computed_tokens:
            return match, None
        name = request.request_id
        return match, _load_of(groups, name, keys, match, num_computed_tokens, factor)

    if not view.rules.copy_on_device:
        return look(first_tokens(num_computed_tokens))
    match, load = look(source_of(view.pool))
    if load is not None and load.copy_sources.size:
        # Beside the blocks that it is to copy a request must find its own, else it
        # would hold them and ask for ever, if no other request ends.
        each = (-(-request.num_tokens // spec.block_size) for spec in groups)
        if _num_free_beside(view, request.request_id, load.copy_sources) < sum(each):
            return look(source_of(view.pool)._replace(max_tokens=num_computed_tokens))
    return match, load


def _num_free_beside(view: View, request_id: str, sources: Ids) -> int:
    """Count the free device blocks if some are held, and what a request has is not."""
    own, dropped = view.loads.by_request.get(request_id), NO_IDS
    if own is not None and own.event == NO_EVENT:
        parts = own.copy_sources, own.written_blocks, own.copy_targets
        dropped = np.concatenate(parts)
    blocks = np.union1d(sources, dropped)
    held, pins = view.pool.counts(blocks)
    pins_then = pins - (blocks[:, None] == dropped).sum(axis=1)
    is_free_then = (held == 0) & (pins_then == 0) & ~np.isin(blocks, sources)
    num_free_now = int(((held == 0) & (pins == 0)).sum())
    return view.pool.num_free + int(is_free_then.sum()) - num_free_now


def _find_plain_load(
    view: View,
    request: Request,
    keys: Sequence[list[BlockKey]],
    num_computed_tokens: int,
) -> tuple[Load | None, bool]:
    """Do as `find_load` does, for one group, of full attention, and rows of one block.

    Most models are like that, and most loads without a copy. One call searches both
    tiers, or the host behind what the request has, where nothing is copied.

    Returns:
        What the request lacks, None if that is nothing; and whether this is so: not if
        there is something to be copied, which is left to `find_load`.
    """
    (spec,), (own_keys,) = view.groups, keys
    most = most_found_tokens(request, num_computed_tokens)
    usable = max(most, 0) // spec.block_size
    if usable < len(own_keys):
        own_keys = own_keys[:usable]
    start = num_computed_tokens // spec.block_size
    if view.rules.copy_on_device:
        on_device, on_host = view.host.find_beside(view.pool, own_keys)
        rows = on_host[start:]
    else:
        rows = view.host.find(own_keys[start:])
        absent = (rows == NO_BLOCK).nonzero()[0]
        if absent.size:
            rows = rows[: absent[0]]
    if not rows.size:
        return None, True
    if view.rules.copy_on_device and (on_device[start:] != NO_BLOCK).any():
        return None, False
    num = start + rows.size
    num_tokens = rows.size * spec.block_size
    load = Load(
        own_keys[start:num],
        rows,
        NO_IDS,
        request_id=request.request_id,
        num_computed_tokens=num_computed_tokens,
        num_tokens=num_tokens,
        marks=[KeyMark(num, own_keys[num - 1])],
        row_groups=np.zeros(rows.size, np.int32),
        row_indices=np.arange(start, num, dtype=np.int32)[:, None],
        copy_sources=NO_IDS,
        copy_groups=NO_IDS,
        copy_indices=NO_IDS,
    )
    return load, True


def _load_of(
    groups: tuple[GroupSpec, ...],
    request_id: str,
    keys: Sequence[Sequence[BlockKey]],
    match: Match,
    num_computed_tokens: int,
    blocks_per_host_block: int,
) -> Load:
    """List what a request lacks of its longest prefix, as a load.

    Args:
        groups: The groups of the model's layers.
        request_id: The request.
        keys: Its keys, for each group.
        match: The longest prefix.
        num_computed_tokens: What the request has of it.
        blocks_per_host_block: Device blocks in a host block.
    """
    factor = blocks_per_host_block
    rows, row_indices, sources, copies = [], [], [], []
    row_keys: list[BlockKey] = []
    for spec, own, needed, on_device, on_host in zip(
        groups, keys, match.needed, *match.block_ids, strict=True
    ):
        start = num_computed_tokens // spec.block_size
        missing = needed[start:].nonzero()[0].astype(np.int32) + np.int32(start)
        # A copy on the device costs next to nothing beside a transfer.
        nearby = on_device[missing]
        is_copied = nearby != NO_BLOCK
        if is_copied.any():
            copies.append(missing[is_copied])
            sources.append(nearby[is_copied])
            missing = missing[~is_copied]
        else:
            copies.append(NO_IDS)
            sources.append(NO_IDS)
        parts = missing[:, None]
        if factor > 1:
            is_missing = np.zeros(-(-needed.size // factor) * factor, np.bool_)
            is_missing[missing] = True
            missing = np.unique(missing // factor) * factor
            parts = missing[:, None] + np.arange(factor, dtype=np.int32)
            parts = np.where(is_missing[parts], parts, np.int32(NO_BLOCK))
        row_keys += [own[index + factor - 1] for index in missing.tolist()]
        rows.append(on_host[missing])
        row_indices.append(parts)
    return Load(
        row_keys,
        joined(rows),
        NO_IDS,
        request_id=request_id,
        num_computed_tokens=num_computed_tokens,
        num_tokens=match.num_tokens - num_computed_tokens,
        marks=[
            KeyMark.of(own, match.num_tokens // spec.block_size)
            for spec, own in zip(groups, keys, strict=True)
        ],
        row_groups=_number(rows),
        row_indices=joined(row_indices),
        copy_sources=joined(sources),
        copy_groups=_number(copies),
        copy_indices=joined(copies),
    )


def _number(each: Sequence[Ids]) -> Ids:
    """Tell of each item of arrays in a row which array it is from."""
    if len(each) == 1:
        return np.zeros(len(each[0]), np.int32)
    numbers = np.arange(len(each), dtype=np.int32)
    return np.repeat(numbers, [len(own) for own in each])
