"""How much of a request is still there: one search of both tiers.

vLLM 0.19.1 searches the device first and the host from there on. A block that the
device has given up in the middle of a prefix then ends its reuse unless the host has
all the blocks that follow. Here a block counts wherever it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxkv import device_tier, manager
from jaxkv.batches import Packed, bucket, buckets, pack, pad_keys, unpack
from jaxkv.blocks import NULL_BLOCK, DeviceBlockPool
from jaxkv.device_tier import DeviceTier
from jaxkv.groups import GroupSpec
from jaxkv.hits import find_longest_hit
from jaxkv.host_tier import HostTier
from jaxkv.manager import ManagerState
from jaxkv.request_batch import flatten
from jaxkv.types import KEY_BYTES, NO_BLOCK, BlockKey, Policy, PyTree


class Match(NamedTuple):
    """The longest prefix that can be used, and where its blocks are.

    Attributes:
        num_tokens: Its length.
        device_blocks: i32[n] for each group. The device block of each key that was
            searched for, NO_BLOCK where there is none.
        host_blocks: i32[n] for each group. Likewise the host block, if it can be read.
        needed: bool[n] for each group. Whether the prefix consists of it.
    """

    num_tokens: int
    device_blocks: list[NDArray[np.int32]]
    host_blocks: list[NDArray[np.int32]]
    needed: list[NDArray[np.bool_]]


def find_cached_prefix(
    pool: DeviceBlockPool,
    groups: tuple[GroupSpec, ...],
    keys_by_group: Sequence[Sequence[BlockKey]],
    max_tokens: int,
) -> tuple[int, list[list[int]]]:
    """Find the longest prefix of a request that the device holds by itself.

    Args:
        pool: The device's blocks.
        groups: The groups of the model's layers.
        keys_by_group: Keys of the request's full blocks, for each group.
        max_tokens: Most tokens that the prefix may have.

    Returns:
        Its length in tokens, and for each group its blocks in order, NULL_BLOCK for
        one that the next token does not read. They are not held until `pool.touch`.
    """
    match = search(groups, keys_by_group, max_tokens, pool)
    block_ids = []
    for group, ids, needed in zip(
        groups, match.device_blocks, match.needed, strict=True
    ):
        end = match.num_tokens // group.block_size
        block_ids.append(np.where(needed, ids, NULL_BLOCK)[:end].tolist())
    return match.num_tokens, block_ids


def search(
    groups: tuple[GroupSpec, ...],
    keys_by_group: Sequence[Sequence[BlockKey]],
    max_tokens: int,
    pool: DeviceBlockPool | None,
    host: HostTier | None = None,
    blocks_per_host_block: int = 1,
    max_device_tokens: int | None = None,
) -> Match:
    """Find the longest prefix of a request of which every block is on some tier.

    Args:
        groups: The groups of the model's layers.
        keys_by_group: Keys of the request's full blocks, for each group.
        max_tokens: Most tokens that the prefix may have.
        pool: The device's blocks. None to look at none of them: all blocks of the
            first `max_device_tokens` are then taken to be there, as NULL_BLOCK.
        host: The host's; None to search the device alone.
        blocks_per_host_block: Device blocks in a host block, whose key is the last
            one's.
        max_device_tokens: Tokens whose blocks may be the device's; None for all.

    Returns:
        What was found. Nothing is held or changed.
    """
    keys = []
    for group, all_keys in zip(groups, keys_by_group, strict=True):
        usable = max(max_tokens, 0) // group.block_size
        # The host block that the last of them is in may go further.
        usable += -usable % blocks_per_host_block
        keys.append(flatten([all_keys[:usable]]).keys)
    counts = [len(own) for own in keys]
    covered = [n * group.block_size for n, group in zip(counts, groups, strict=True)]
    most = max(min(max_tokens, *covered), 0)
    on_device = most if max_device_tokens is None else max_device_tokens
    answer: Match = unpack(
        _search(
            groups,
            host and host.policy,
            blocks_per_host_block,
            pool and pool.state,
            host and (host.state.policy, host.state.ref_cnt),
            [pad_keys(own, bucket(len(own))) for own in keys],
            np.array([most, on_device, *counts], np.int32),
        )
    )

    def cut(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
        return [array[:count] for array, count in zip(arrays, counts, strict=True)]

    return Match(
        int(answer.num_tokens),
        cut(answer.device_blocks),
        cut(answer.host_blocks),
        cut(answer.needed),
    )


def warm_up(
    groups: tuple[GroupSpec, ...],
    pool: DeviceBlockPool | None,
    host: HostTier,
    blocks_per_host_block: int,
    max_blocks: int,
) -> None:
    """Compile the search, of both tiers and of the device alone; or of the host alone.

    Args:
        groups: The groups of the model's layers.
        pool: The device's blocks; None if only the host is searched.
        host: The host's.
        blocks_per_host_block: Device blocks in a host block.
        max_blocks: Most blocks that a request will have in a group.
    """
    smallest = min(group.block_size for group in groups)
    for num_blocks in buckets(max_blocks):
        num_tokens = num_blocks * smallest
        keys = [
            [bytes(KEY_BYTES)] * max(num_tokens // group.block_size, 1)
            for group in groups
        ]
        if pool is None:
            search(groups, keys, num_tokens, None, host, blocks_per_host_block, 0)
            continue
        for tier in (None, host):
            search(groups, keys, num_tokens, pool, tier, blocks_per_host_block)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _search(
    groups: tuple[GroupSpec, ...],
    policy: Policy | None,
    blocks_per_host_block: int,
    device: DeviceTier | None,
    host: tuple[PyTree, Array] | None,
    keys: list[Array],
    numbers: Array,
) -> Packed:
    """Search for one request.

    Args:
        groups: The groups.
        policy: The host's; None to search the device alone.
        blocks_per_host_block: Device blocks in a host block.
        device: The device's blocks; None to take those of the first tokens for granted.
        host: The state of the policy, and the reference counts.
        keys: u32[n_g, 8] for each group.
        numbers: i32[2 + G]. Most tokens, most of these that may be on the device, and
            how many keys each group has.

    Returns:
        A `Match`.
    """
    factor = blocks_per_host_block
    device_blocks, host_blocks, masks = [], [], []
    for index, own in enumerate(keys):
        count = numbers[2 + index]
        num_on_device = jnp.minimum(count, numbers[1] // groups[index].block_size)
        if device is None:
            is_there = jnp.arange(own.shape[0], dtype=jnp.int32) < num_on_device
            block_ids = jnp.where(is_there, jnp.int32(NULL_BLOCK), jnp.int32(NO_BLOCK))
        else:
            block_ids = device_tier.find(device, own, num_on_device)
        on_host = jnp.full(own.shape[:1], NO_BLOCK, jnp.int32)
        if policy is not None and host is not None:
            state = ManagerState(*host, pool=None)  # type: ignore[arg-type]
            last_keys = own[factor - 1 :: factor]
            rows = manager.find_readable(policy, state, last_keys, count // factor)
            on_host = on_host.at[: rows.size * factor].set(jnp.repeat(rows, factor))
        device_blocks.append(block_ids)
        host_blocks.append(on_host)
        masks.append((block_ids != NO_BLOCK) | (on_host != NO_BLOCK))
    hit = find_longest_hit(groups, masks, numbers[0])
    return pack(Match(hit.num_tokens, device_blocks, host_blocks, list(hit.needed)))  # type: ignore[arg-type]
