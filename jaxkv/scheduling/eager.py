"""Eager stores: every full block, in the step after it was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.blocks import DeviceBlockPool
from jaxkv.connector import (
    BlockTable,
    Request,
    SchedulerOutput,
    keys_by_group,
    tables_by_group,
)
from jaxkv.groups import GroupSpec
from jaxkv.host_tier import HostTier
from jaxkv.scheduling.prefix import Rows, rows_of
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stores import Stores

# A request's blocks on the host are put in order again when so large a share of them
# is new: no oftener, as it costs time for each block of the prefix.
_REORDER_SHARE = 16
_NO_LIMIT = 1 << 62


@dataclasses.dataclass
class _Progress:
    """How far a request has been stored.

    Attributes:
        request: The request.
        tables: Its device blocks, for each group.
        num_offered: How many of them were offered and are done.
        next_tokens: Computed tokens from which on there may be more to offer.
        refused_at: `Stores.num_changes` when the host had no room for the rest.
    """

    request: Request
    tables: list[list[int]]
    num_offered: list[int]
    next_tokens: int = 0
    refused_at: int = -1


class EagerStores:
    """Chooses what to store, request by request.

    A block that the host gives up while the request runs is stored again at its end,
    when the device, too, is about to give it up.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        rules: What the engine chose.
        stores: Takes what was chosen.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: HostTier,
        rules: OffloadRules,
        stores: Stores,
    ) -> None:
        self._groups = groups
        self._host = host
        self._rules = rules
        self._stores = stores
        self._progress: dict[str, _Progress] = {}

    def register(self, request: Request, table: BlockTable) -> None:
        """Take note of a request, or of its block table if it is known."""
        if not self.replace_table(request, table):
            self._progress[request.request_id] = _Progress(
                request,
                tables_by_group(table, len(self._groups)),
                [0] * len(self._groups),
            )

    def replace_table(self, request: Request, table: BlockTable) -> bool:
        """Take note of the block table of a request, if it is known."""
        progress = self._progress.get(request.request_id)
        if progress is None:
            return False
        progress.request = request
        progress.tables = tables_by_group(table, len(self._groups))
        return True

    def offer_step(self, pool: DeviceBlockPool, output: SchedulerOutput) -> None:
        """Offer what the requests of a step have computed before it."""
        for request_id in output.preempted_req_ids:
            self._progress.pop(request_id, None)
        for request_id, table in output.new_block_ids.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                for own, new in zip(
                    progress.tables,
                    tables_by_group(table, len(self._groups)),
                    strict=True,
                ):
                    own.extend(new)
        if self._stores.is_congested:
            return
        with_news = []
        num_changes = self._stores.num_changes
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            progress = self._progress.get(request_id)
            if (
                progress is not None
                and num_tokens > 0
                and progress.request.num_computed_tokens >= progress.next_tokens
                and progress.refused_at != num_changes
            ):
                with_news.append(progress)
        if with_news:
            self._offer(pool, with_news)

    def finish(self, pool: DeviceBlockPool, request_id: str) -> None:
        """Offer all of a request that is about to give up its device blocks."""
        progress = self._progress.pop(request_id, None)
        if progress is None:
            return
        num_full = self._num_full(progress)
        if self._stores.is_congested:
            num_lost = sum(num_full) - sum(progress.num_offered)
            self._stores.num_dropped["slow"] += max(num_lost, 0)
            return
        progress.num_offered = [0] * len(self._groups)
        self._offer(pool, [progress])
        self._stores.num_dropped["full"] += sum(num_full) - sum(progress.num_offered)

    def clear(self) -> None:
        """Note that the host has forgotten everything."""
        for progress in self._progress.values():
            progress.num_offered = [0] * len(self._groups)
            progress.next_tokens = 0

    def _num_full(self, progress: _Progress) -> list[int]:
        """Count the blocks that are certain and may be stored, for each group."""
        request = progress.request
        # Some may be scheduled ahead of time, and not computed for certain.
        num_ahead = getattr(request, "num_output_placeholders", 0)
        num_tokens = min(request.num_computed_tokens - num_ahead, self._limit(request))
        factor = self._rules.blocks_per_host_block
        return [
            min(num_tokens // spec.block_size, len(own), len(table)) // factor * factor
            for spec, own, table in zip(
                self._groups,
                keys_by_group(request, len(self._groups)),
                progress.tables,
                strict=True,
            )
        ]

    def _limit(self, request: Request) -> int:
        """Tell how many tokens of a request may be stored."""
        limit = self._rules.max_offload_tokens or _NO_LIMIT
        if self._rules.prompt_only:
            num_prompt_tokens: int = request.num_prompt_tokens  # type: ignore[attr-defined]
            limit = min(limit, num_prompt_tokens)
        return limit

    def _offer(self, pool: DeviceBlockPool, requests: Sequence[_Progress]) -> None:
        """Offer what requests have that was not offered before."""
        factor = self._rules.blocks_per_host_block
        each, to_reorder = [], []
        for progress in requests:
            num_full = self._num_full(progress)
            rows = self._rows(progress, progress.num_offered, num_full)
            each.append(rows)
            if len(rows.keys) * factor * _REORDER_SHARE >= sum(num_full):
                from_head = [0] * len(self._groups)
                prefix = self._rows(progress, from_head, num_full).keys
                to_reorder.append(prefix)
        num_done = self._stores.place(pool, each)
        for progress, rows, num in zip(requests, each, num_done, strict=True):
            progress.refused_at = -1
            if num < len(rows.keys):
                progress.refused_at = self._stores.num_changes
            done = [num]
            if rows.groups is not None:
                of_each = np.bincount(rows.groups[:num], minlength=len(self._groups))
                done = of_each.tolist()
            progress.num_offered = [
                offered + new * factor
                for offered, new in zip(progress.num_offered, done, strict=True)
            ]
            next_tokens = min(
                (offered + factor) * spec.block_size
                for offered, spec in zip(
                    progress.num_offered, self._groups, strict=True
                )
            )
            if next_tokens > self._limit(progress.request):
                next_tokens = _NO_LIMIT
            progress.next_tokens = next_tokens
        # So that the head of a prefix outlives its tail on the host.
        self._host.reorder(to_reorder)

    def _rows(self, progress: _Progress, first: list[int], last: list[int]) -> Rows:
        """List a request's blocks from `first` up to `last`, of each group."""
        return rows_of(
            self._groups,
            keys_by_group(progress.request, len(self._groups)),
            progress.tables,
            first,
            last,
            self._rules.blocks_per_host_block,
        )
