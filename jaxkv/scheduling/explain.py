"""Explanations: for each block of a request where it is, or why it is missing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from jaxkv.scheduling.boundary import Boundary
from jaxkv.scheduling.loads import Load
from jaxkv.scheduling.plan import Deferral, Plan, View, find_load, max_hit_tokens, plan
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.requests import Requests
from jaxkv.search.hits import find_longest_hit
from jaxkv.search.tiers import (
    Match,
    find_cached_prefix,
    first_tokens,
    search,
    source_of,
)
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.key_memory import DropReason
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import NO_BLOCK, BlockKey

Verdict: TypeAlias = str
"""The use of a block for a request: a hit on a tier ("device", "host"); in a tier below
the host alone (its `Boundary.name`); in flight ("pending"); not read by the next token
("unneeded"); or computed again ("missed")."""

Reason: TypeAlias = (
    DropReason
    | Literal["storing", "loading", "fetching", "window", "last token", "gap"]
    | Literal["other group", "no room", "no copy", "capped", "rare", "left out"]
    | Literal["part", "absent", "never"]
)
"""Why; see `_WORDS`."""

_WORDS: dict[Reason | None, str] = {
    None: "",
    "storing": "being stored",
    "loading": "being loaded",
    "fetching": "being fetched from a tier below",
    "window": "the next token does not read it",
    "last token": "past the last token that can be a hit: its logits are needed",
    "gap": "it is there, but a block before it is missing",
    "other group": "it is there, but the groups of layers have no prefix this long",
    "no room": "it is there, but beside it there is no room to copy it",
    "no copy": "it is on the device, where nothing is copied (copy_on_device)",
    "capped": "it is there, but the request may load no more (max_load_tokens)",
    "rare": "not asked for often enough to be stored (store_threshold, "
    "max_unseen_blocks)",
    "left out": "not to be stored (prompt_only, max_offload_tokens)",
    "part": "its host block would not be full",
    "absent": "asked of the store, not there",
    "never": "not stored, or why it was dropped is not known (remember_drops)",
    "evicted": "evicted from the host",
    "full": "dropped: the host had no room",
    "slow": "dropped: too much was on its way to the host",
    "paused": "not stored: nothing stored was asked for (pause_unused_stores)",
    "store failed": "dropped: its store failed",
    "load failed": "forgotten: its load failed",
}
_VERDICTS: dict[Verdict, str] = {
    "device": "hit on the device",
    "host": "hit on the host",
    "pending": "pending",
    "unneeded": "not needed",
    "missed": "missed",
}
_DEFERRALS: dict[Deferral, str] = {
    "loading": "It has a load under way, and has to ask again.",
    "shared": "It has to ask again, as another is loading some of it.",
    "asked": "It has to ask again, when the store has said what it has of the rest.",
    "queued": "It has to ask again, when others have used what was fetched for them.",
    "gate": "It has to compute, as a load would take longer (skip_slow_loads).",
}


# Reasons to compute a block that have nothing to do with where it is, or that concern
# one on another tier.
_ELSEWHERE = ("last token", "gap", "other group", "no room", "no copy", "capped")


@dataclasses.dataclass(frozen=True)
class BlockVerdict:
    """Whether a request can use a block, or why not."""

    group: int
    index: int  # Among the request's blocks of this group.
    first_token: int
    num_tokens: int
    verdict: Verdict
    reason: Reason | None = None  # If there is more to say.


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The blocks of a request that the tiers hold. As text it is a table."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int  # What it has, or the device by itself.
    # What `OffloadScheduler.get_num_new_matched_tokens` would offer beyond that; None
    # if the request has to ask again.
    num_offered_tokens: int | None
    is_awaited: bool  # Whether it would have to wait for it.
    deferral: Deferral | None  # Why that is less than the tiers hold.
    blocks: tuple[BlockVerdict, ...]  # All full blocks, group after group.
    # Whether it is known what the store has; True if there is none.
    is_store_listed: bool = True

    def __str__(self) -> str:
        """Return a table; consecutive blocks of one verdict are one line."""
        offer = self.num_offered_tokens or 0
        lines = [
            f"Request {self.request_id}: {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} at hand, {offer} more offered."
        ]
        if self.deferral is not None:
            come = f"It has to ask again, when blocks have come from {self.deferral}."
            lines.append(_DEFERRALS.get(self.deferral, come))
        if not self.is_store_listed:
            lines.append("The store is not listed yet: it may have more.")
        rows = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if self.blocks:
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        yield "group", "blocks", "tokens", "verdict"
        for (group, verdict, reason), run in itertools.groupby(
            self.blocks, lambda block: (block.group, block.verdict, block.reason)
        ):
            blocks = list(run)
            first, last = blocks[0], blocks[-1]
            words = _VERDICTS.get(verdict, f"in {verdict}")
            words += f": {_WORDS[reason]}" if reason else ""
            yield (
                str(group),
                _span(first.index, last.index),
                _span(first.first_token, last.first_token + last.num_tokens - 1),
                words,
            )


def explain(
    view: View, pool: DevicePool, request: Request, num_computed_tokens: int | None
) -> Explanation:
    """Return what the tiers hold of a request; nothing changes.

    `num_computed_tokens` is None for those that the device has by itself.
    """
    groups, below = view.groups, view.below
    # Not the scheduler's, which keep the keys until the request finishes.
    requests = Requests(groups, view.rules, view.host, may_lag=True)
    view = view._replace(requests=requests)
    requests.check_lookup(request)
    requests.check_stores(request)
    keys = requests.checked(request)
    max_tokens = request.num_tokens - 1
    if num_computed_tokens is None:
        if not isinstance(pool, DeviceBlockPool):
            raise ValueError(
                "num_computed_tokens=None must be a number: only a DeviceBlockPool can "
                f"be searched, not a {type(pool).__name__}."
            )
        num_computed_tokens, _ = find_cached_prefix(pool, groups, keys, max_tokens)
    offer = near = plan(view._replace(below=()), request, num_computed_tokens)
    match, _ = find_load(view, request, keys, num_computed_tokens)
    while below:
        offer = plan(view._replace(below=below), request, num_computed_tokens)
        if offer.fetch is None:
            break
        boundary, fetch, num = offer.fetch
        if boundary.would_fetch(fetch, num):
            break
        below, offer = offer.nearer, near
    factor = view.rules.blocks_per_host_block
    # Of the device, too, all that is there: also where another group has less.
    device = first_tokens(num_computed_tokens)
    if isinstance(pool, DeviceBlockPool):
        device = source_of(pool)
    sources = device, source_of(view.host, factor)
    presence = search(groups, keys, max_tokens, sources)
    blocks: list[BlockVerdict] = []
    for group in range(len(groups)):
        verdicts = _verdicts(
            view, request, keys, presence, match, near, group, num_computed_tokens
        )
        for boundary in view.below:
            verdicts = _with_below(verdicts, boundary, keys[group], factor)
        size = groups[group].block_size
        blocks += [
            BlockVerdict(group, index, index * size, size, verdict, reason)
            for index, (verdict, reason) in enumerate(verdicts)
        ]
    return Explanation(
        request.request_id,
        request.num_tokens,
        num_computed_tokens,
        offer.num_tokens,
        offer.is_awaited,
        offer.deferral,
        tuple(blocks),
        all(boundary.tier.is_listed for boundary in view.below),
    )


def _verdicts(
    view: View,
    request: Request,
    all_keys: Sequence[Sequence[BlockKey]],
    presence: Match,
    match: Match,
    near: Plan,
    group: int,
    num_computed_tokens: int,
) -> Iterator[tuple[Verdict, Reason | None]]:
    """Yield the verdict on each block of a group."""
    spec, keys = view.groups[group], all_keys[group]
    max_tokens = max_hit_tokens(request, num_computed_tokens)
    device_blocks, host_blocks = (ids[group] for ids in presence.block_ids)
    usable = min(max(request.num_tokens - 1, 0) // spec.block_size, len(keys))
    is_there = ((device_blocks != NO_BLOCK) | (host_blocks != NO_BLOCK))[:usable]
    alone = find_longest_hit((spec,), (is_there,), is_there.size * spec.block_size)
    end, longest, num_alone = (
        hit.num_tokens // spec.block_size for hit in (match, presence, alone)
    )
    _, max_stored = view.requests.check_stores(request)
    factor, host = view.rules.blocks_per_host_block, view.host
    rows = list(keys[factor - 1 :: factor])
    is_known, passes = host.contains(rows), host.passes(rows)

    def why_absent(index: int) -> Reason:
        row = index // factor
        if row >= len(rows):
            return "part"
        if is_known[row]:
            return "storing"
        loss = host.drops.reason_of(rows[row])
        if loss is not None:
            return loss
        if not passes[row]:
            return "rare"
        is_left_out = (row + 1) * factor * spec.block_size > max_stored
        return "left out" if is_left_out else "never"

    in_load = _indices_in(near.current, group)
    for index in range(len(keys)):
        if index >= usable:
            yield "missed", "last token"
        elif index in in_load or host_blocks[index] in near.shared:
            yield "pending", "loading"
        elif index < end and not match.needed[group][index]:
            yield "unneeded", "window"
        elif index < end:
            is_used = match.block_ids[0][group][index] != NO_BLOCK
            yield ("device" if is_used else "host"), None
        elif not is_there[index]:
            reason = why_absent(index)
            yield ("pending" if reason == "storing" else "missed"), reason
        elif (index + 1) * spec.block_size > max_tokens:
            yield "missed", "capped"
        elif index < longest:
            yield "missed", "no copy" if view.device is None else "no room"
        else:
            yield "missed", "other group" if index < num_alone else "gap"


def _with_below(
    verdicts: Iterable[tuple[Verdict, Reason | None]],
    boundary: Boundary,
    keys: Sequence[BlockKey],
    blocks_per_row: int,
) -> Iterator[tuple[Verdict, Reason | None]]:
    """Yield the verdicts; those on missing blocks also consider a lower tier."""
    rows = list(keys[blocks_per_row - 1 :: blocks_per_row])
    is_there = boundary.tier.find(rows) != NO_BLOCK
    for index, (verdict, reason) in enumerate(verdicts):
        row = index // blocks_per_row
        # What is fetched to the host has a place there, as if it were being stored.
        is_absent = reason == "storing" or (
            verdict == "missed" and reason not in _ELSEWHERE
        )
        if row < len(rows) and is_absent and rows[row] in boundary.fetch_of:
            yield "pending", "fetching"
        elif row < len(rows) and verdict == "missed" and is_absent and is_there[row]:
            yield boundary.name, None
        elif row < len(rows) and reason == "never" and boundary.was_absent(rows[row]):
            yield verdict, "absent"
        else:
            yield verdict, reason


def _indices_in(load: Load | None, group: int) -> set[int]:
    """Return the blocks of a group that a load brings."""
    if load is None:
        return set()
    indices = load.row_indices[load.row_groups == group].reshape(-1).tolist()
    copied = load.copy_indices[load.copy_groups == group].tolist()
    return {*indices, *copied} - {NO_BLOCK}


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
