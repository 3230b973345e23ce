"""The events of host and store as vLLM's own: with tokens, parents and groups.

A tier's events have only keys. The inputs of the keys are read from vLLM's requests
when their blocks get hashes, and kept while the host has the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from jaxkv import Extras, OffloadingEvent
from jaxkv.integrations.vllm.pool import key_in_group, plain_key, split_key
from jaxkv.keys.hashing import KeyedBlock
from jaxkv.observe.catalog import BlockCatalog, join_extra_keys
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.base import HOST_MEDIUM
from jaxkv.tiers.storage import STORAGE_MEDIUM
from jaxkv.types import KEY_BYTES, BlockKey


class VllmBlock(NamedTuple):
    """A `KeyedBlock` of a request of vLLM, with more fields of vLLM's events."""

    # vLLM's hash, with the group if there are several, and perhaps an adapter's mark.
    key: BlockKey
    parent: BlockKey | None  # None for a request's first block.
    tokens: bytes  # u32 each, little-endian.
    group: int  # Index of the group of layers.
    extras: Extras  # Only the adapter's name.
    extra_keys: tuple[Any, ...] | None  # What the hash covers besides tokens.
    lora_id: int | None


_EXTRA_KEYS = attrgetter("extra_keys")


class HostEvents:
    """Makes vLLM's events from the events of host and store.

    A store that is a service (`storage_is_remote`) is remote; a folder may be of this
    machine or not.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], *, storage_is_remote: bool = False
    ) -> None:
        self._groups = groups
        # The known places of tiers, seen from this engine.
        self._localities = {HOST_MEDIUM: "LOCAL"}
        if storage_is_remote:
            self._localities[STORAGE_MEDIUM] = "REMOTE"
        self._catalog = BlockCatalog()

    def record(self, request: Any, first: int, adapter: bytes = b"") -> None:
        """Keep the inputs of a request's keys, which end with `adapter`'s mark."""
        extra_keys_of = _reader_of_extra_keys(request)
        lora = getattr(request, "lora_request", None)
        extras = Extras(lora_name=lora.name if lora else None)
        hashes = request.block_hashes
        size = self._groups[0].block_size  # All groups have the same.
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
                    extras,
                    extra_keys,
                    lora.adapter_id if lora else None,
                )
                self._catalog.record(cast(KeyedBlock, block))

    def to_vllm(self, events: Iterable[OffloadingEvent]) -> Iterator[Any]:
        """Convert events to vLLM's ``BlockStored`` and ``BlockRemoved``, in order.

        Blocks that a listing has found of a model with several groups have no events:
        the store has digests of their keys, which name neither hash nor group. A
        cleared tier has its blocks removed, since vLLM's ``AllBlocksCleared`` is about
        all tiers, including vLLM's device.
        """
        # A late import, as it needs msgspec, which vLLM has.
        from jaxkv.observe.describe import describe

        for event in events:
            if event.removed:
                keys = event.block_hashes or self._catalog.copies(event.medium)
                yield from self._removed(event.medium, keys)
            else:
                for stored in describe(event, self._catalog, self._groups):
                    yield from self._stored(stored, event)
            self._catalog.note(event)

    def _stored(self, stored: Any, event: OffloadingEvent) -> Iterator[Any]:
        fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
        if not stored.token_ids:  # Unknown blocks, perhaps of several groups.
            for block_hash, group in self._split_all(stored.block_hashes):
                fields |= {"block_hashes": [_external(block_hash)], "group_idx": group}
                yield self._make("BlockStored", fields)
            return
        keys = cast(list[BlockKey], stored.block_hashes)
        rows = [self._catalog.blocks_of(key, event) for key in keys]
        parent = stored.parent_block_hash
        fields |= {
            "block_hashes": [_external(self._split(key)[0]) for key in keys],
            "parent_block_hash": parent and _external(self._split(parent)[0]),
            "lora_id": cast(VllmBlock, rows[0][0]).lora_id,
            "extra_keys": [join_extra_keys(row, _EXTRA_KEYS) for row in rows],
        }
        yield self._make("BlockStored", fields)

    def _removed(self, medium: str, keys: Iterable[BlockKey]) -> Iterator[Any]:
        for group, run in groupby(self._split_all(keys), key=itemgetter(1)):
            hashes = [_external(block_hash) for block_hash, _ in run]
            fields = {"block_hashes": hashes, "medium": medium, "group_idx": group}
            yield self._make("BlockRemoved", fields)

    def _key(self, block_hash: bytes, group: int) -> BlockKey:
        return key_in_group(block_hash, group) if len(self._groups) > 1 else block_hash

    def _split(self, key: BlockKey) -> tuple[bytes, int]:
        key = plain_key(key)
        return split_key(key) if len(self._groups) > 1 else (key, 0)

    def _split_all(self, keys: Iterable[BlockKey]) -> Iterator[tuple[bytes, int]]:
        """Return hashes and groups; skip digests, which name neither."""
        for key in keys:
            if len(self._groups) == 1 or len(key) != KEY_BYTES:
                yield self._split(key)

    def _make(self, name: str, fields: dict[str, Any]) -> Any:
        """Make an event of this vLLM, with the fields that it has."""
        from vllm.distributed import kv_events

        cls = getattr(kv_events, name)
        fields["locality"] = self._localities.get(fields["medium"])
        return cls(**{key: fields[key] for key in cls.__annotations__ if key in fields})


def _external(block_hash: bytes) -> Any:
    """Return a hash as in vLLM's events: bytes, or a number."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)


def _reader_of_extra_keys(
    request: Any,
) -> Callable[[int, int], tuple[Any, ...] | None]:
    """Return a function that reads what vLLM hashes of a block besides its tokens."""
    from vllm.v1.core import kv_cache_utils

    if (
        not getattr(request, "mm_features", None)
        and not getattr(request, "cache_salt", None)
        and getattr(request, "lora_request", None) is None
        and getattr(request, "prompt_embeds", None) is None
    ):
        return lambda start, end: None
    as_event = getattr(kv_cache_utils, "to_event_extra_keys", None)

    def read(start: int, end: int) -> tuple[Any, ...] | None:
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        if keys is None or as_event is None:
            return cast(tuple[Any, ...] | None, keys)
        return cast(tuple[Any, ...], as_event([keys])[0])

    return read
