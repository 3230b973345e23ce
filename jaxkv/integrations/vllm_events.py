"""What happened on the host tier, said in vLLM's own events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from jaxkv import OffloadingEvent
from jaxkv.integrations.vllm_pool import split_key


def to_vllm(events: Iterable[OffloadingEvent], num_groups: int) -> Iterator[Any]:
    """Turn jaxkv's events into those that vLLM publishes.

    Args:
        events: In the order in which they happened.
        num_groups: Groups of the model's layers.

    Yields:
        ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared`` of this vLLM.
    """
    events = list(events)
    if not events:
        return
    from vllm.distributed.kv_events import (  # type: ignore[import-not-found]
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
    )
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
        maybe_convert_block_hash,
    )

    for event in events:
        if not event.block_hashes:
            yield AllBlocksCleared()
            continue
        for group, hashes in _by_group(event.block_hashes, num_groups):
            names = [maybe_convert_block_hash(own) for own in hashes]
            # Versions that know of no groups have no such field.
            of_group = {} if num_groups == 1 else {"group_idx": group}
            if event.removed:
                yield BlockRemoved(block_hashes=names, medium=event.medium, **of_group)
            else:
                yield BlockStored(
                    block_hashes=names,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=event.block_size,
                    lora_id=None,
                    medium=event.medium,
                    lora_name=None,
                    **of_group,
                )


def _by_group(
    keys: Iterable[bytes], num_groups: int
) -> Iterator[tuple[int, list[bytes]]]:
    """Split keys into runs of one group, the hash alone left of each."""
    if num_groups == 1:
        yield 0, list(keys)
        return
    for group, run in groupby(map(split_key, keys), key=lambda pair: pair[1]):
        yield group, [block_hash for block_hash, _ in run]
