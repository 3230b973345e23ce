"""The state of the host tier as a reader wants it: keys, ids and lists, no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxkv.keys import keys_to_lanes
from jaxkv.manager import ManagerState
from jaxkv.types import KEY_LANES, NO_BLOCK, BlockKey, Policy

_NO_NAMES: Mapping[BlockKey, bytes] = MappingProxyType({})

_find = jax.jit(
    lambda policy, state, keys, count: policy.find(state, keys, count),
    static_argnums=0,
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of the host tier at one moment.

    Attributes:
        policy: What the policy shows of itself (see `Policy.snapshot`), such as
            "order", its keys from the least to the most recently used.
        ref_cnt: Loads that read the block of each key; -1 while it is being stored.
        block_ids: The block of each key.
        free_ids: The ids that no key holds, in the order in which they will be
            handed out.
    """

    policy: dict[str, Any]
    ref_cnt: dict[bytes, int]
    block_ids: dict[bytes, int]
    free_ids: list[int]


def take_snapshot(
    policy: Policy,
    state: ManagerState,
    names: Mapping[BlockKey, bytes] = _NO_NAMES,
) -> Snapshot:
    """Show a state to a reader. For the host, not for jit.

    Args:
        policy: The policy.
        state: The state, on any device.
        names: What to call a key, where it is not itself.

    Returns:
        The state; nothing in it is changed by later calls.
    """
    shown = policy.snapshot(state.policy)
    lists = {name: keys for name, keys in shown.items() if isinstance(keys, list)}
    keys = [key for part in lists.values() for key in part]
    # A power of two, so that few sizes are compiled.
    lanes = np.zeros((1 << len(keys).bit_length(), KEY_LANES), np.uint32)
    lanes[: len(keys)] = keys_to_lanes(keys)
    found = np.asarray(_find(policy, state.policy, lanes, np.int32(len(keys))))
    held = {
        names.get(key, key): block_id
        for key, block_id in zip(keys, found.tolist(), strict=False)
        if block_id != NO_BLOCK
    }
    ref_cnt = np.asarray(state.ref_cnt).tolist()
    num_allocated, num_freed = int(state.pool.num_allocated), int(state.pool.num_freed)
    freed = np.asarray(state.pool.freed)[:num_freed].tolist()
    return Snapshot(
        policy=shown
        | {name: [names.get(key, key) for key in part] for name, part in lists.items()},
        ref_cnt={key: ref_cnt[block_id] for key, block_id in held.items()},
        block_ids=held,
        free_ids=[*range(num_allocated, len(ref_cnt)), *reversed(freed)],
    )
