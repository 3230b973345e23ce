"""The state of the host tier as a reader wants it: keys, ids and lists, no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.keys.packed import keys_to_words
from jaxkv.policies.base import Policy
from jaxkv.tiers.executors import Executor
from jaxkv.types import NO_BLOCK, BlockKey


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
    policy: Policy, executor: Executor, names: Mapping[BlockKey, bytes]
) -> Snapshot:
    """Show the state of an executor to a reader.

    Args:
        policy: The policy.
        executor: Has the state.
        names: What to call a key, where it is not itself.

    Returns:
        The state; nothing in it is changed by later calls.
    """
    shown = policy.snapshot(executor.state.policy)
    lists = {name: keys for name, keys in shown.items() if isinstance(keys, list)}
    keys = [key for part in lists.values() for key in part]
    found = executor.find(keys_to_words(keys)).tolist() if keys else []
    held = {
        names.get(key, key): block_id
        for key, block_id in zip(keys, found, strict=True)
        if block_id != NO_BLOCK
    }
    state = executor.state  # Again: a call may have put another in its place.
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
