"""Explanations: what a request would be offered, and in which tier its blocks are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from jaxkv.scheduling.plan import Deferral, View, plan
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.requests import Requests
from jaxkv.search.tiers import find_cached_prefix, first_tokens, search, source_of
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import NO_BLOCK

Verdict: TypeAlias = str
"""The nearest tier that has a block: "device", "host", or the name of a tier below the
host, such as "storage"; "none" for a block that no tier has, or that is in flight."""

_DEFERRALS: dict[Deferral, str] = {
    "loading": "It has a load in flight and must ask again later.",
    "shared": "It must ask again later: another request is loading some of its blocks.",
    "asked": "It must ask again once a lower tier has answered a probe for blocks.",
    "queued": "It must ask again once other requests have used their fetched blocks.",
    "gate": "It must recompute: a load would take longer (skip_slow_loads).",
}


@dataclasses.dataclass(frozen=True)
class BlockVerdict:
    """The tier that has one of a request's blocks."""

    group: int
    index: int  # Among the request's blocks of this group.
    first_token: int
    num_tokens: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The offer to a request, and the tier of each block; `str` returns a table."""

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
        """Return a table; consecutive blocks in the same tier share a line."""
        lines = [
            f"Request {self.request_id}: {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.num_offered_tokens or 0} more "
            "offered."
        ]
        if self.deferral is not None:
            fetching = f"It must ask again once blocks from {self.deferral} arrive."
            lines.append(_DEFERRALS.get(self.deferral, fetching))
        if not self.is_store_listed:
            lines.append("The store is not listed yet: it may have more.")
        if self.blocks:
            rows = list(self._rows())
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        yield "group", "blocks", "tokens", "tier"
        for (group, verdict), run in itertools.groupby(
            self.blocks, lambda block: (block.group, block.verdict)
        ):
            blocks = list(run)
            first, last = blocks[0], blocks[-1]
            last_token = last.first_token + last.num_tokens - 1
            spans = (first.index, last.index), (first.first_token, last_token)
            texts = ["-".join(map(str, dict.fromkeys(span))) for span in spans]
            yield str(group), *texts, verdict


def explain(
    view: View, pool: DevicePool, request: Request, num_computed_tokens: int | None
) -> Explanation:
    """Return what `Reporting.explain` describes; change nothing."""
    groups, below = view.groups, view.below
    # A new `Requests`: the scheduler's would keep the keys until the request finishes.
    requests = Requests(groups, view.rules, view.host, may_lag=True)
    view = view._replace(requests=requests)
    requests.check_lookup(request)
    keys = requests.checked(request)
    if num_computed_tokens is None:
        if not isinstance(pool, DeviceBlockPool):
            raise ValueError(
                "num_computed_tokens=None must be a number: only a DeviceBlockPool can "
                f"be searched, not a {type(pool).__name__}."
            )
        max_tokens = request.num_tokens - 1
        num_computed_tokens, _ = find_cached_prefix(pool, groups, keys, max_tokens)
    offer = plan(view, request, num_computed_tokens)
    while offer.fetch is not None:
        boundary, fetch = offer.fetch
        if boundary.would_fetch(fetch):
            break
        # This fetch would not start: plan without its tier, as the scheduler does.
        view = view._replace(below=offer.nearer)
        offer = plan(view, request, num_computed_tokens)
    device = first_tokens(num_computed_tokens)
    if isinstance(pool, DeviceBlockPool):
        device = source_of(pool)
    host = source_of(view.host, view.rules.blocks_per_host_block)
    sources = device, host, *(source_of(b.tier, b.factor) for b in below)
    found = search(groups, keys, request.num_tokens, sources).block_ids
    tiers = "device", "host", *(boundary.name for boundary in below)
    blocks: list[BlockVerdict] = []
    for group, spec in enumerate(groups):
        verdicts = np.full(len(keys[group]), "none", object)
        for tier, ids in reversed([*zip(tiers, found, strict=True)]):
            verdicts[ids[group] != NO_BLOCK] = tier
        size = spec.block_size
        blocks += [
            BlockVerdict(group, index, index * size, size, verdict)
            for index, verdict in enumerate(verdicts.tolist())
        ]
    return Explanation(
        request.request_id,
        request.num_tokens,
        num_computed_tokens,
        offer.num_tokens,
        offer.is_awaited,
        offer.deferral,
        tuple(blocks),
        all(boundary.tier.is_listed for boundary in below),
    )
