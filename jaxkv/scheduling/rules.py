"""What an engine may choose about offloading, and which choices do not go together."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

from jaxkv._util import check_whole, shown
from jaxkv.scheduling.protocol import Request
from jaxkv.search.groups import FullAttention, GroupSpec

StorageWrite: TypeAlias = Literal["on_reuse", "on_evict", "through"]
"""When blocks are written to a store behind the host."""

NO_LIMIT = 1 << 62
"""More tokens than a request has."""


@dataclasses.dataclass(frozen=True)
class OffloadRules:
    """How `OffloadScheduler` stores and loads.

    Attributes:
        mode: "eager" stores blocks when they are computed; "lazy" when the device is
            about to give them up.
        max_num_batched_tokens: Most tokens of a step. In lazy mode, twice the blocks
            that these take are kept ready to be evicted (vLLM's watermark).
        world_size: Workers that each report every transfer; it is complete when all
            of them have.
        blocks_per_host_block: Device blocks that a host block holds. Larger transfers,
            but blocks come and go only together.
        store_threshold: Store only what at least this number of requests have asked
            for, a request that is preempted being one; 0 or 1 to store whatever is
            computed.
        max_unseen_blocks: Of the host blocks of a prompt that no request has asked
            for before, store no more than this number, the head of the prefix first;
            the others once they are asked for again. None for all. What a request
            generates does not count.
        prompt_only: Whether generated tokens are left out.
        max_offload_tokens: Tokens of a request, from its first, that may be stored;
            None for all.
        delay_shared_loads: Whether a request waits for another that is loading one of
            its blocks, to find it on the device then. Fewer bytes move, but the
            request stands still. Without it both load, each for itself.
        max_blocks_in_flight: How many device blocks may be on their way at a time, in
            either direction; loads come first. None for no bound.
        block_bytes: Bytes of a device block, for `skip_slow_loads` alone.
        skip_slow_loads: Whether a load is declined that would take longer than to
            compute the tokens again, once `OffloadScheduler.note_rates` has said how
            fast both are.
        copy_on_device: Whether a block of a prefix that the device holds after a gap
            is copied there, rather than loaded. Its source is held from the query on.
            An engine that leaves offers unanswered while others need blocks says no.
        load_in_step: Whether the step that first runs a request writes its loads itself
            (`OffloadWorker.take_step_loads`). Then no request waits for a load, and
            what is offered counts as there in that step; `max_blocks_in_flight` does
            not hold such loads up.
        flush_on_preemption: Whether a step that preempts first waits for the transfers
            in flight. They hold on to their blocks in any case.
        storage_write: Which blocks are written to the store: "on_reuse" those that are
            asked for a second time; "on_evict" those that the host is about to evict,
            which the policy "lru" tells; "through" all that reach the host.
        max_storage_blocks: How many host blocks may be on their way to the store, or
            from it, at a time. A host of few blocks has fewer.
        retention: Whether requests may say how long their blocks are to be kept
            (`Request.retention`).
        remember_drops: How many of the last host blocks that were evicted or not
            stored are remembered, with the reason, for `OffloadScheduler.explain`; 0
            for none.

    Raises:
        ValueError: If a value is out of range, unknown, or of another type.
    """

    mode: Literal["eager", "lazy"] = "eager"
    max_num_batched_tokens: int = 8192
    world_size: int = 1
    blocks_per_host_block: int = 1
    store_threshold: int = 0
    max_unseen_blocks: int | None = None
    prompt_only: bool = False
    max_offload_tokens: int | None = None
    delay_shared_loads: bool = False
    max_blocks_in_flight: int | None = None
    block_bytes: int = 0
    skip_slow_loads: bool = False
    copy_on_device: bool = True
    load_in_step: bool = False
    flush_on_preemption: bool = False
    storage_write: StorageWrite = "on_reuse"
    max_storage_blocks: int = 128
    retention: bool = False
    remember_drops: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("eager", "lazy"):
            raise ValueError(f"mode={shown(self.mode)} must be 'eager' or 'lazy'.")
        if self.storage_write not in get_args(StorageWrite):
            raise ValueError(
                f"storage_write={shown(self.storage_write)} must be one of "
                f"{', '.join(get_args(StorageWrite))}."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # A text such as "no" would count as true.
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{field.name}={shown(value)} must be a bool.")
        for name, least in (
            ("max_num_batched_tokens", 1),
            ("world_size", 1),
            ("blocks_per_host_block", 1),
            ("store_threshold", 0),
            ("max_unseen_blocks", 0),
            ("max_offload_tokens", 1),
            ("max_blocks_in_flight", 1),
            ("block_bytes", 0),
            ("max_storage_blocks", 1),
            ("remember_drops", 0),
        ):
            value = getattr(self, name)
            if not (value is None and getattr(OffloadRules, name) is None):
                check_whole(least, **{name: value})
        if self.skip_slow_loads and not self.block_bytes:
            raise ValueError(
                "skip_slow_loads=True needs block_bytes, a device block's bytes."
            )


def most_stored_tokens(rules: OffloadRules, request: Request) -> int:
    """Tell how many tokens of a request may be stored, from its first."""
    limit = rules.max_offload_tokens or NO_LIMIT
    if rules.prompt_only:
        num_prompt_tokens: int = request.num_prompt_tokens  # type: ignore[attr-defined]
        limit = min(limit, num_prompt_tokens)
    return limit


def check_rules(rules: OffloadRules, groups: tuple[GroupSpec, ...]) -> None:
    """Refuse what does not go together, and what nobody has tried together.

    Raises:
        ValueError: With the reason.
    """
    if rules.blocks_per_host_block > 1:
        factor = f"blocks_per_host_block={rules.blocks_per_host_block}"
        if groups != (FullAttention(groups[0].block_size),):
            raise ValueError(
                f"{factor} needs a model with one group, of full attention: blocks of "
                f"{groups} do not come and go in such rows."
            )
        if rules.mode == "lazy":
            raise ValueError(
                f"{factor} and mode='lazy' exclude one another: the device evicts "
                "single blocks, and a host block takes several in a row."
            )
    if rules.mode == "lazy":
        for name in ("prompt_only", "max_offload_tokens"):
            if getattr(rules, name):
                raise ValueError(
                    f"{name}={getattr(rules, name)} and mode='lazy' exclude one "
                    "another: a block that the device evicts belongs to no request."
                )
