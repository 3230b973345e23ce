"""Turns the events of tiers, which have only keys, into vLLM's KV events.

A KV event also has what the keys were computed from: tokens, parent, adapter, salt,
group (requested in vLLM's issue 43468).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxkv.keys.hashing import KeyedBlock
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from jaxkv.search.groups import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Mamba,
    SlidingWindow,
)
from jaxkv.tiers.base import OffloadingEvent
from jaxkv.types import BlockKey

_MakeHash: TypeAlias = Callable[[BlockKey], BlockHash]


def describe(
    event: OffloadingEvent,
    catalog: BlockCatalog,
    groups: Sequence[GroupSpec] = (),
    *,
    int_block_hashes: bool = False,
) -> list[KVEvent]:
    """Return the KV events of a tier's event that `catalog` has not noted yet.

    They are one `BlockStored` for each run of consecutive blocks, or one `BlockRemoved`
    for each run of blocks of one group. Blocks that the catalogue does not know have no
    tokens and no parent. If a tier was cleared, each of its blocks is reported as
    removed, unless the other tiers are empty too: vLLM's `AllBlocksCleared` is about
    all tiers. Without `groups`, the kinds of groups are left out. With
    `int_block_hashes`, keys are 64-bit numbers, vLLM's default.
    """
    make_hash: _MakeHash = _hash_as_int if int_block_hashes else bytes
    if event.block_hashes:
        keys = catalog.device_keys(event)
        if not event.removed:
            return _describe_stored(event, keys, catalog, groups, make_hash)
    elif any(medium != event.medium for medium in catalog.media()):
        keys = catalog.copies(event.medium)
    else:
        return [AllBlocksCleared()]
    blocks = ((key, catalog.find(key)) for key in keys)
    runs = itertools.groupby(blocks, lambda pair: pair[1] and pair[1].group)
    return [
        BlockRemoved([make_hash(key) for key, _ in run], event.medium, group)
        for group, run in runs
    ]


def describe_all(
    catalog: BlockCatalog,
    groups: Sequence[GroupSpec] = (),
    *,
    int_block_hashes: bool = False,
) -> list[KVEvent]:
    """Return `AllBlocksCleared` and KV events of all blocks on the tiers."""
    make_hash: _MakeHash = _hash_as_int if int_block_hashes else bytes
    events: list[KVEvent] = [AllBlocksCleared()]
    for medium in catalog.media():
        copies = catalog.copies(medium)
        event = OffloadingEvent(copies, catalog.block_size(medium), medium, False)
        events += _describe_stored(event, copies, catalog, groups, make_hash)
    return events


def count_unknown(events: Iterable[KVEvent]) -> int:
    """Count the stored blocks without tokens."""
    return sum(
        len(event.block_hashes)
        for event in events
        if isinstance(event, BlockStored) and not event.token_ids
    )


def _describe_stored(
    event: OffloadingEvent,
    device_keys: Iterable[BlockKey],
    catalog: BlockCatalog,
    groups: Sequence[GroupSpec],
    make_hash: _MakeHash,
) -> list[KVEvent]:
    stored: list[KVEvent] = []
    for keys, blocks in _runs(device_keys, catalog):
        hashes = [make_hash(key) for key in keys]
        if not blocks:
            size = event.block_size
            stored.append(BlockStored(hashes, None, [], size, None, event.medium, None))
            continue
        first = blocks[0]
        parent = None if first.parent is None else make_hash(first.parent)
        tokens = np.frombuffer(b"".join(block.tokens for block in blocks), "<u4")
        extra_keys = [_extra_keys(block) for block in blocks]
        kind, window = kind_of(groups, first.group)
        stored.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tokens.tolist(),
                block_size=len(tokens) // len(blocks),
                lora_id=None,
                medium=event.medium,
                lora_name=_text(first.extras.lora_name),
                extra_keys=extra_keys if any(extra_keys) else None,
                group_idx=first.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
        )
    return stored


def _runs(
    keys: Iterable[BlockKey], catalog: BlockCatalog
) -> Iterator[tuple[list[BlockKey], list[KeyedBlock]]]:
    """Split keys into consecutive runs; a run of unknown keys has no blocks."""
    run: list[BlockKey] = []
    blocks: list[KeyedBlock] = []
    for key in keys:
        block = catalog.find(key)
        if run and not _follows(block, blocks[-1] if blocks else None):
            yield run, blocks
            run, blocks = [], []
        run.append(key)
        if block:
            blocks.append(block)
    if run:
        yield run, blocks


def _follows(block: KeyedBlock | None, last: KeyedBlock | None) -> bool:
    """Whether two blocks can be in one event, whose lists run in parallel."""
    if block is None or last is None:
        return block is last
    return (
        block.parent == last.key
        and block.group == last.group
        and block.extras.lora_name == last.extras.lora_name
        and len(block.tokens) == len(last.tokens)
    )


def _extra_keys(block: KeyedBlock) -> tuple[Any, ...] | None:
    """List what a block's key covers besides tokens, in vLLM's order."""
    extras = block.extras
    keys: list[Any] = []
    if extras.lora_name is not None:
        keys.append(_text(extras.lora_name))
    keys += [(item.content_hash.hex(), item.offset) for item in extras.multimodal]
    if extras.cache_salt is not None and block.parent is None:
        keys.append(_text(extras.cache_salt))
    return tuple(keys) or None


def _text(text: str | None) -> str | None:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return (
        None
        if text is None
        else text.encode("utf-8", "backslashreplace").decode("utf-8")
    )


def kind_of(groups: Sequence[GroupSpec], group: int) -> tuple[str | None, int | None]:
    """Return vLLM's name for a group's kind of attention, and its window."""
    if group >= len(groups):
        return None, None
    match groups[group]:
        case FullAttention():
            return "full_attention", None
        case SlidingWindow(_, window):
            return "sliding_window", window
        case ChunkedLocal():
            return "chunked_local_attention", None
        case Mamba():
            return "mamba", None


def _hash_as_int(key: BlockKey) -> BlockHash:
    return int.from_bytes(key[-8:], "big")
