"""Turns the events of tiers, which have only keys, into vLLM's KV events.

A KV event also has what the keys were computed from: tokens, parent, adapter, salt,
group (requested in vLLM's issue 43468).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxkv.keys.hashing import TOKEN_BYTES, KeyedBlock
from jaxkv.observe.catalog import BlockCatalog, join_extra_keys
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
_Row: TypeAlias = tuple[KeyedBlock, ...]  # The device blocks in a block of a tier.


def describe(
    event: OffloadingEvent,
    catalog: BlockCatalog,
    groups: Sequence[GroupSpec] = (),
    *,
    int_block_hashes: bool = False,
) -> list[KVEvent]:
    """Return the KV events of a tier's event that `catalog` has not noted yet.

    They are one `BlockStored` for each run of consecutive blocks, or one `BlockRemoved`
    for each run of blocks of one group. Each hash is that of a block that can be found
    alone: a host block of several device blocks has one hash, and their tokens. Blocks
    that the catalogue does not know have no tokens and no parent. If a tier was
    cleared, each of its blocks is reported as removed, unless the other tiers are empty
    too: vLLM's `AllBlocksCleared` is about all tiers. Without `groups`, the kinds of
    groups are left out. With `int_block_hashes`, keys are 64-bit numbers, vLLM's
    default.
    """
    make_hash: _MakeHash = _hash_as_int if int_block_hashes else bytes
    if event.block_hashes and not event.removed:
        return _describe_stored(event, catalog, groups, make_hash)
    if event.block_hashes:
        keys = event.block_hashes
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
        events += _describe_stored(event, catalog, groups, make_hash)
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
    catalog: BlockCatalog,
    groups: Sequence[GroupSpec],
    make_hash: _MakeHash,
) -> list[KVEvent]:
    stored: list[KVEvent] = []
    for keys, rows in _runs(event, catalog):
        hashes = [make_hash(key) for key in keys]
        if not rows:
            size = event.block_size
            stored.append(BlockStored(hashes, None, [], size, None, event.medium, None))
            continue
        first = rows[0][0]
        parent = None if first.parent is None else make_hash(first.parent)
        data = b"".join(block.tokens for row in rows for block in row)
        extra_keys = [join_extra_keys(row, _extra_keys) for row in rows]
        kind, window = kind_of(groups, first.group)
        stored.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=np.frombuffer(data, "<u4").tolist(),
                block_size=len(data) // TOKEN_BYTES // len(rows),
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
    event: OffloadingEvent, catalog: BlockCatalog
) -> Iterator[tuple[list[BlockKey], list[_Row]]]:
    """Split keys into consecutive runs; a run of unknown keys has no rows."""
    run: list[BlockKey] = []
    rows: list[_Row] = []
    for key in event.block_hashes:
        row = catalog.blocks_of(key, event)
        if run and not _follows(row, rows[-1] if rows else ()):
            yield run, rows
            run, rows = [], []
        run.append(key)
        rows += [row] if row else []
    if run:
        yield run, rows


def _follows(row: _Row, last: _Row) -> bool:
    """Whether two blocks can be in one event, whose lists run in parallel."""
    if not row or not last:
        return not row and not last
    return (
        row[0].parent == last[-1].key
        and row[0].group == last[0].group
        and row[0].extras.lora_name == last[0].extras.lora_name
        and len(row) * len(row[0].tokens) == len(last) * len(last[0].tokens)
    )


def _extra_keys(block: KeyedBlock) -> tuple[Any, ...]:
    """List what a block's key covers besides tokens, in vLLM's order."""
    extras = block.extras
    keys: list[Any] = []
    if extras.lora_name is not None:
        keys.append(_text(extras.lora_name))
    keys += [(item.content_hash.hex(), item.offset) for item in extras.multimodal]
    if extras.cache_salt is not None and block.parent is None:
        keys.append(_text(extras.cache_salt))
    return tuple(keys)


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
