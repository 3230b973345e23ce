"""KV events in vLLM's wire format.

Field names, order, defaults and tags are as in vLLM's
`vllm/distributed/kv_events.py`, so that readers for vLLM work unchanged. A batch is an
array, ``[ts, events, data_parallel_rank]``. An event in it is a map with its name under
"type", as vLLM writes since June 2026 (pull request 42892), or an array that begins
with its name, as before.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

from jaxkv._util.extras import pip_install

try:
    import msgspec
except ImportError as error:
    raise ImportError(
        f"Events on the wire need msgspec: {pip_install('events')}"
    ) from error

BlockHash: TypeAlias = bytes | int
"""A block's key, or its last 8 bytes as a big-endian number."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks, each the parent of the next, that a tier has stored."""

    block_hashes: list[BlockHash]  # In the order of their tokens.
    # The parent of the first block; None if it has none or the blocks are not known.
    parent_block_hash: BlockHash | None
    token_ids: list[int]  # Of all blocks, in order; empty if they are not known.
    block_size: int  # Tokens per block.
    lora_id: int | None  # Always None; vLLM keeps it for old readers.
    medium: str | None  # The tier.
    lora_name: str | None
    # For each block None, or what its key covers besides tokens: the adapter, then
    # (hash, offset) of each multimodal item that begins in the block, then, in a
    # request's first block, the salt.
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None  # Index of the group of layers.
    kv_cache_spec_kind: str | None = None  # vLLM's name of the group's attention.
    kv_cache_spec_sliding_window: int | None = None  # Tokens in its window, if any.


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that a tier has removed one copy of."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """A notice that all tiers are empty."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of the tiers since the last batch."""

    ts: float  # Seconds since 1970.
    events: list[KVEvent]  # In order.
    data_parallel_rank: int | None = None  # Index of the engine, if there are several.


# Errors that msgspec does not turn into its own: text that is not UTF-8, deep nesting,
# lengths and numbers too large for Python. And a value that should be an array.
_NO_BATCH = ValueError, RecursionError, OverflowError, MemoryError, TypeError


def encode_batch(batch: KVEventBatch, *, array_like: bool = False) -> bytes:
    """Encode a batch as msgpack; `array_like` is for readers from before June 2026.

    >>> batch = KVEventBatch(0.5, [BlockRemoved([7], "CPU")], 0)
    >>> msgspec.msgpack.decode(encode_batch(batch))
    [0.5, [{'type': 'BlockRemoved', 'block_hashes': [7], 'medium': 'CPU'}], 0]
    >>> msgspec.msgpack.decode(encode_batch(batch, array_like=True))
    [0.5, [['BlockRemoved', [7], 'CPU', None]], 0]
    """
    if not array_like:
        return msgspec.msgpack.encode(batch)
    events = [
        [type(event).__name__, *msgspec.structs.astuple(event)]
        for event in batch.events
    ]
    return msgspec.msgpack.encode([batch.ts, events, batch.data_parallel_rank])


def decode_batch(payload: bytes, *, array_like: bool = False) -> KVEventBatch:
    """Decode a batch of `encode_batch` or vLLM, ignoring extra fields of newer writers.

    Raises msgspec.DecodeError if it is not a batch.
    """
    try:
        if not array_like:
            return msgspec.msgpack.decode(payload, type=KVEventBatch)
        ts, events, *rank = msgspec.msgpack.decode(payload)
        fields = {kind.__name__: kind.__struct_fields__ for kind in get_args(KVEvent)}
        as_maps = [
            {"type": name, **dict(zip(fields.get(name, ()), values, strict=False))}
            for name, *values in events
        ]
        return msgspec.convert([ts, as_maps, *rank], KVEventBatch)
    except msgspec.DecodeError:
        raise
    except _NO_BATCH as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None
