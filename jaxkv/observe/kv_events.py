"""KV events in vLLM's wire format.

Field names, order, defaults and tags are those of vLLM's
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
    """Consecutive blocks, each the parent of the next, that a tier has stored.

    Attributes:
        block_hashes: The blocks, in the order of their tokens.
        parent_block_hash: The parent of the first block; None if it has none or the
            blocks are not known.
        token_ids: Tokens of all blocks, in order; empty if they are not known.
        block_size: Tokens per block.
        lora_id: Always None; vLLM keeps it for old readers.
        medium: The tier.
        lora_name: The adapter.
        extra_keys: For each block None, or what its key covers besides tokens: the
            adapter, then ``(hash, offset)`` of each multimodal item that begins in the
            block, then, in a request's first block, the salt.
        group_idx: Index of the group of layers.
        kv_cache_spec_kind: The group's kind of attention, by vLLM's name.
        kv_cache_spec_sliding_window: Tokens in its window, if it has one.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of which a tier has removed a copy.

    Attributes:
        block_hashes: The blocks.
        medium: The tier.
        group_idx: Index of the group of layers.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All tiers are empty."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of the tiers since the last batch.

    Attributes:
        ts: Seconds since 1970.
        events: The events, in order.
        data_parallel_rank: Index of the engine, if there are several.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


# What msgspec lets out: text that is not UTF-8, deep nesting, lengths and numbers too
# large for Python. And what is not an array where one is expected.
_NO_BATCH = ValueError, RecursionError, OverflowError, MemoryError, TypeError


def encode_batch(batch: KVEventBatch, *, array_like: bool = False) -> bytes:
    """Encode a batch as msgpack.

    Args:
        batch: The batch.
        array_like: Encode events as arrays, for readers from before June 2026.

    Example:
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
    """Decode a batch, ignoring extra fields of newer writers.

    Args:
        payload: A batch from `encode_batch` or vLLM.
        array_like: As in `encode_batch`.

    Raises:
        msgspec.DecodeError: If it is not a batch.
    """
    try:
        if not array_like:
            return msgspec.msgpack.decode(payload, type=KVEventBatch)
        ts, events, *rank = msgspec.msgpack.decode(payload)
        fields = {each.__name__: each.__struct_fields__ for each in get_args(KVEvent)}
        as_maps = [
            {"type": name, **dict(zip(fields.get(name, ()), values, strict=False))}
            for name, *values in events
        ]
        return msgspec.convert([ts, as_maps, *rank], KVEventBatch)
    except msgspec.DecodeError:
        raise
    except _NO_BATCH as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None
