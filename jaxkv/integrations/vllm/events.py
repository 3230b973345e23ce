"""The events of host and store as vLLM's own: with tokens, parents and groups.

A tier tells keys alone. What they were computed from is read from vLLM's requests as
their blocks get hashes, and kept while the host has the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np

from jaxkv import OffloadingEvent
from jaxkv.integrations.vllm.pool import key_in_group, plain_key, split_key
from jaxkv.keys.hashing import KeyedBlock
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.base import HOST_MEDIUM
from jaxkv.tiers.storage import STORAGE_MEDIUM
from jaxkv.types import KEY_BYTES, BlockKey


class VllmBlock(NamedTuple):
    """A block of a request of vLLM.

    The first four are those of a `KeyedBlock`, which a `BlockCatalog` reads.

    Attributes:
        key: The block's key: vLLM's hash, with the group if there are several, and
            perhaps an adapter.
        parent: The key of the block before; None for a request's first.
        tokens: The block's tokens, u32 each, little-endian.
        group: Index of the group of layers.
        extra_keys: What the hash covers besides tokens, as vLLM's events have it.
        lora_id: vLLM's number of the adapter.
        lora_name: The adapter.
    """

    key: BlockKey
    parent: BlockKey | None
    tokens: bytes
    group: int
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None


class HostEvents:
    """Makes vLLM's events of the host tier's.

    Args:
        groups: The groups of the model's layers.
        storage_is_remote: Whether the store is a service; a folder may be of this
            machine or not.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], *, storage_is_remote: bool = False
    ) -> None:
        self._groups = groups
        # Where a tier is, seen from this engine, as far as that is known.
        self._localities = {HOST_MEDIUM: "LOCAL"}
        if storage_is_remote:
            self._localities[STORAGE_MEDIUM] = "REMOTE"
        self._catalog = BlockCatalog()

    def record(self, request: Any, first: int, adapter: bytes = b"") -> None:
        """Keep what the hashes of a request's blocks were computed from.

        Args:
            request: vLLM's `Request`.
            first: The first block to keep; those before were kept already.
            adapter: What follows in its blocks' keys.
        """
        extra_keys_of = _reader_of_extra_keys(request)
        lora = getattr(request, "lora_request", None)
        hashes = request.block_hashes
        size = self._groups[0].block_size  # That of all groups.
        for n in range(first, len(hashes)):
            start, end = n * size, (n + 1) * size
            tokens = np.array(request.all_token_ids[start:end], "<u4").tobytes()
            extra_keys = extra_keys_of(start, end)
            for group in range(len(self._groups)):
                block = VllmBlock(
                    self._key(hashes[n], group) + adapter,
                    self._key(hashes[n - 1], group) + adapter if n else None,
                    tokens,
                    group,
                    extra_keys,
                    lora.adapter_id if lora else None,
                    lora.name if lora else None,
                )
                self._catalog.record(cast(KeyedBlock, block))

    def to_vllm(self, events: Iterable[OffloadingEvent]) -> Iterator[Any]:
        """Convert jaxkv's events.

        What a listing has found of a model with several groups is not told: the store
        has digests of its keys, which name neither hash nor group. A tier that was
        cleared has its blocks removed: vLLM's ``AllBlocksCleared`` is about all tiers,
        and its device has others.

        Args:
            events: The events, in order.

        Yields:
            ``BlockStored`` and ``BlockRemoved`` of this vLLM, with the fields that it
            has.
        """
        for event in events:
            keys = self._catalog.device_keys(event)
            if not event.block_hashes:
                keys = self._catalog.copies(event.medium)
            parts = [key for key in keys if self._is_told(key)]
            if event.removed:
                yield from self._removed(event, parts)
            else:
                yield from self._stored(event, parts)
            self._catalog.note(event)

    def _stored(self, event: OffloadingEvent, parts: list[BlockKey]) -> Iterator[Any]:
        for run in self._runs(parts):
            first = run[0]
            if isinstance(first, bytes):  # Not known: it has no tokens.
                block_hash, group = self._split(first)
                yield _make(
                    "BlockStored",
                    block_hashes=[_external(block_hash)],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=event.block_size,
                    lora_id=None,
                    medium=event.medium,
                    lora_name=None,
                    group_idx=group,
                    locality=self._localities.get(event.medium),
                )
                continue
            blocks = cast(list[VllmBlock], run)
            kind, window = self._kind(first.group)
            extra_keys = [block.extra_keys for block in blocks]
            tokens = np.frombuffer(b"".join(block.tokens for block in blocks), "<u4")
            yield _make(
                "BlockStored",
                block_hashes=[_external(self._split(block.key)[0]) for block in blocks],
                parent_block_hash=None
                if first.parent is None
                else _external(self._split(first.parent)[0]),
                token_ids=tokens.tolist(),
                block_size=len(tokens) // len(blocks),
                lora_id=first.lora_id,
                medium=event.medium,
                lora_name=first.lora_name,
                extra_keys=extra_keys,
                group_idx=first.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality=self._localities.get(event.medium),
            )

    def _removed(self, event: OffloadingEvent, parts: list[BlockKey]) -> Iterator[Any]:
        for group, run in groupby(map(self._split, parts), key=lambda pair: pair[1]):
            yield _make(
                "BlockRemoved",
                block_hashes=[_external(block_hash) for block_hash, _ in run],
                medium=event.medium,
                group_idx=group,
                locality=self._localities.get(event.medium),
            )

    def _runs(self, keys: Iterable[BlockKey]) -> Iterator[list[VllmBlock | BlockKey]]:
        """Split keys into runs of blocks that follow one another."""
        run: list[VllmBlock | BlockKey] = []
        for key in keys:
            block = cast(VllmBlock | None, self._catalog.find(key))
            last = run[-1] if run else None
            follows = (
                isinstance(last, VllmBlock)
                and block is not None
                and block.parent == last.key
                and (block.lora_id, block.lora_name) == (last.lora_id, last.lora_name)
            )
            if run and not follows:
                yield run
                run = []
            run.append(key if block is None else block)
        if run:
            yield run

    def _key(self, block_hash: bytes, group: int) -> BlockKey:
        return key_in_group(block_hash, group) if len(self._groups) > 1 else block_hash

    def _split(self, key: BlockKey) -> tuple[bytes, int]:
        key = plain_key(key)
        return split_key(key) if len(self._groups) > 1 else (key, 0)

    def _is_told(self, key: BlockKey) -> bool:
        """Whether a key has the hash and the group; those of others have only bytes."""
        return len(self._groups) == 1 or len(key) != KEY_BYTES

    def _kind(self, group: int) -> tuple[str | None, int | None]:
        # Here, as it needs msgspec, which vLLM has.
        from jaxkv.observe.describe import kind_of

        return kind_of(self._groups, group)


def _make(name: str, **fields: Any) -> Any:
    """Make an event of this vLLM, with those of the fields that it has."""
    from vllm.distributed import kv_events  # type: ignore[import-not-found]

    cls = getattr(kv_events, name)
    return cls(**{key: fields[key] for key in cls.__annotations__ if key in fields})


def _external(block_hash: bytes) -> Any:
    """Return a hash as vLLM's events have it: bytes, or a number."""
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
        maybe_convert_block_hash,
    )

    return maybe_convert_block_hash(block_hash)


def _reader_of_extra_keys(
    request: Any,
) -> Callable[[int, int], tuple[Any, ...] | None]:
    """Return a function that reads what vLLM hashes of a block besides its tokens."""
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]

    if (
        not getattr(request, "mm_features", None)
        and not getattr(request, "cache_salt", None)
        and getattr(request, "lora_request", None) is None
        and getattr(request, "prompt_embeds", None) is None
    ):
        return lambda start, end: None
    as_event = getattr(kv_cache_utils, "to_event_extra_keys", None)

    def read(start: int, end: int) -> tuple[Any, ...] | None:
        found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        if found is None or as_event is None:
            return cast(tuple[Any, ...] | None, found)
        return cast(tuple[Any, ...], as_event([found])[0])

    return read
