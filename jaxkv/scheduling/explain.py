"""Explanations: for each block of a request, where it is or why it is missing."""

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
"""The outcome for a block of a request: a hit on a tier ("device", "host"); only in a
tier below the host (`Boundary.name`); in flight ("pending"); not read by the next token
("unneeded"); or recomputed ("missed")."""

Reason: TypeAlias = (
    DropReason
    | Literal["storing", "loading", "fetching", "window", "last token", "gap"]
    | Literal["other group", "no room", "no copy", "capped", "rare", "left out"]
    | Literal["part", "absent", "never"]
)
"""Why a block has its verdict; `_REASON_TEXTS` spells it out."""

_REASON_TEXTS: dict[Reason | None, str] = {
    None: "",
    "storing": "being stored",
    "loading": "being loaded",
    "fetching": "being fetched from a lower tier",
    "window": "the next token does not read it",
    "last token": "has the last token, which is always computed for its logits",
    "gap": "resident, but a block before it is missing",
    "other group": "resident, but some group of layers lacks a prefix this long",
    "no room": "resident, but the device has no room for copies",
    "no copy": "resident, but no block is copied on the device (copy_on_device)",
    "capped": "resident, but the request may load no more (max_load_tokens)",
    "rare": "not stored: looked up too rarely (store_threshold, max_unseen_blocks)",
    "left out": "excluded from stores (prompt_only, max_offload_tokens)",
    "part": "not stored: too few blocks to fill a host block (blocks_per_host_block)",
    "absent": "not in the store when last probed",
    "never": "never stored, or dropped for an unknown reason (remember_drops)",
    "evicted": "evicted from the host",
    "full": "not stored: the host had no room",
    "slow": "not stored: too many stores were in flight",
    "paused": "not stored: no stored block was used (pause_unused_stores)",
    "store failed": "not stored: its store failed",
    "load failed": "dropped from the host: its load failed",
}
_VERDICTS: dict[Verdict, str] = {
    "device": "hit on the device",
    "host": "hit on the host",
    "pending": "pending",
    "unneeded": "not needed",
    "missed": "missed",
}
_DEFERRALS: dict[Deferral, str] = {
    "loading": "It has a load in flight and must ask again later.",
    "shared": "It must ask again later: another request is loading some of its blocks.",
    "asked": "It must ask again once a lower tier has answered a probe for blocks.",
    "queued": "It must ask again once other requests have used their fetched blocks.",
    "gate": "It must recompute: a load would take longer (skip_slow_loads).",
}


# Reasons to recompute a block although the device or the host may have it.
_MAY_BE_RESIDENT = ("last token", "gap", "other group", "no room", "no copy", "capped")


@dataclasses.dataclass(frozen=True)
class BlockVerdict:
    """Whether and how a request can use one of its blocks, or why it cannot."""

    group: int
    index: int  # Among the request's blocks of this group.
    first_token: int
    num_tokens: int
    verdict: Verdict
    reason: Reason | None = None  # None if a tier has the block and can serve it.


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which blocks of a request the tiers hold; `str` returns a table."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int  # As passed to `explain`, or the device's prefix.
    # Tokens that `OffloadScheduler.get_num_new_matched_tokens` would offer in addition;
    # None if the request must ask again later.
    num_offered_tokens: int | None
    is_awaited: bool  # Whether the request would have to wait for the offer.
    deferral: Deferral | None  # Why less is offered than the tiers hold.
    blocks: tuple[BlockVerdict, ...]  # All full blocks, group by group.
    # Whether all stores have been listed; True without a store.
    is_store_listed: bool = True

    def __str__(self) -> str:
        """Return a table; consecutive blocks with the same verdict share a line."""
        offer = self.num_offered_tokens or 0
        lines = [
            f"Request {self.request_id}: {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {offer} more offered."
        ]
        if self.deferral is not None:
            fetching = f"It must ask again once blocks from {self.deferral} arrive."
            lines.append(_DEFERRALS.get(self.deferral, fetching))
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
            text = _VERDICTS.get(verdict, f"in {verdict}")
            text += f": {_REASON_TEXTS[reason]}" if reason else ""
            yield (
                str(group),
                _span(first.index, last.index),
                _span(first.first_token, last.first_token + last.num_tokens - 1),
                text,
            )


def explain(
    view: View, pool: DevicePool, request: Request, num_computed_tokens: int | None
) -> Explanation:
    """Return which blocks of a request the tiers hold; change nothing.

    If `num_computed_tokens` is None, the prefix on the device counts as computed.
    """
    groups, below = view.groups, view.below
    # A new `Requests`: the scheduler's would keep the keys until the request finishes.
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
    offer = host_plan = plan(view._replace(below=()), request, num_computed_tokens)
    match, _ = find_load(view, request, keys, num_computed_tokens)
    while below:
        offer = plan(view._replace(below=below), request, num_computed_tokens)
        if offer.fetch is None:
            break
        boundary, fetch = offer.fetch
        if boundary.would_fetch(fetch):
            break
        # This fetch would not start: plan without its tier, as the scheduler does.
        below, offer = offer.nearer, host_plan
    factor = view.rules.blocks_per_host_block
    # All resident blocks, also those past the prefix that every group has.
    device = first_tokens(num_computed_tokens)
    if isinstance(pool, DeviceBlockPool):
        device = source_of(pool)
    sources = device, source_of(view.host, factor)
    resident = search(groups, keys, max_tokens, sources)
    blocks: list[BlockVerdict] = []
    for group in range(len(groups)):
        verdicts = _verdicts(
            view, request, keys, resident, match, host_plan, group, num_computed_tokens
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
    resident: Match,
    match: Match,
    host_plan: Plan,
    group: int,
    num_computed_tokens: int,
) -> Iterator[tuple[Verdict, Reason | None]]:
    """Yield the verdicts of a group's blocks, ignoring tiers below the host."""
    spec, keys = view.groups[group], all_keys[group]
    max_tokens = max_hit_tokens(request, num_computed_tokens)
    device_blocks, host_blocks = (ids[group] for ids in resident.block_ids)
    num_usable = min(max(request.num_tokens - 1, 0) // spec.block_size, len(keys))
    on_tier = ((device_blocks != NO_BLOCK) | (host_blocks != NO_BLOCK))[:num_usable]
    alone = find_longest_hit((spec,), (on_tier,), on_tier.size * spec.block_size)
    match_end, resident_end, alone_end = (
        hit.num_tokens // spec.block_size for hit in (match, resident, alone)
    )
    _, max_stored = view.requests.check_stores(request)
    factor, host = view.rules.blocks_per_host_block, view.host
    rows = list(keys[factor - 1 :: factor])
    has_entry, passes_filter = host.contains(rows), host.passes(rows)

    def why_absent(index: int) -> Reason:
        row = index // factor
        if row >= len(rows):
            return "part"
        if has_entry[row]:
            return "storing"
        drop_reason = host.drops.reason_of(rows[row])
        if drop_reason is not None:
            return drop_reason
        if not passes_filter[row]:
            return "rare"
        is_excluded = (row + 1) * factor * spec.block_size > max_stored
        return "left out" if is_excluded else "never"

    in_load = _indices_in(host_plan.current, group)
    for index in range(len(keys)):
        if index >= num_usable:
            yield "missed", "last token"
        elif index in in_load or host_blocks[index] in host_plan.shared:
            yield "pending", "loading"
        elif index < match_end and not match.needed[group][index]:
            yield "unneeded", "window"
        elif index < match_end:
            is_on_device = match.block_ids[0][group][index] != NO_BLOCK
            yield ("device" if is_on_device else "host"), None
        elif not on_tier[index]:
            reason = why_absent(index)
            yield ("pending" if reason == "storing" else "missed"), reason
        elif (index + 1) * spec.block_size > max_tokens:
            yield "missed", "capped"
        elif index < resident_end:
            yield "missed", "no copy" if view.device is None else "no room"
        else:
            yield "missed", "other group" if index < alone_end else "gap"


def _with_below(
    verdicts: Iterable[tuple[Verdict, Reason | None]],
    boundary: Boundary,
    keys: Sequence[BlockKey],
    blocks_per_row: int,
) -> Iterator[tuple[Verdict, Reason | None]]:
    """Yield verdicts, after a look-up of missing blocks in a lower tier."""
    rows = list(keys[blocks_per_row - 1 :: blocks_per_row])
    in_tier = boundary.tier.find(rows) != NO_BLOCK
    for index, (verdict, reason) in enumerate(verdicts):
        row = index // blocks_per_row
        # A block being fetched has a host block already, as if it were being stored.
        is_absent = reason == "storing" or (
            verdict == "missed" and reason not in _MAY_BE_RESIDENT
        )
        if row < len(rows) and is_absent and rows[row] in boundary.fetch_of:
            yield "pending", "fetching"
        elif row < len(rows) and verdict == "missed" and is_absent and in_tier[row]:
            yield boundary.name, None
        elif row < len(rows) and reason == "never" and boundary.was_absent(rows[row]):
            yield verdict, "absent"
        else:
            yield verdict, reason


def _indices_in(load: Load | None, group: int) -> set[int]:
    """Return the indices of a group's blocks that a load fills."""
    if load is None:
        return set()
    indices = load.row_indices[load.row_groups == group].reshape(-1).tolist()
    copied = load.copy_indices[load.copy_groups == group].tolist()
    return {*indices, *copied} - {NO_BLOCK}


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
