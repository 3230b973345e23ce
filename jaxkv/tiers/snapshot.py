"""The state of the host tier in readable form: keys, ids and lists, no arrays."""

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
        policy: The policy's own snapshot (see `Policy.snapshot`), such as "order", its
            keys from the least to the most recently used.
        ref_cnt: Loads that read the block of each key; -1 while it is being stored.
        block_ids: The block of each key.
        free_ids: The ids that no key holds, the next one first.
    """

    policy: dict[str, Any]
    ref_cnt: dict[bytes, int]
    block_ids: dict[bytes, int]
    free_ids: list[int]


def take_snapshot(
    policy: Policy, executor: Executor, names: Mapping[BlockKey, bytes]
) -> Snapshot:
    """Read the state of an executor; `names` has the callers' names of foreign keys."""
    described = policy.snapshot(executor.state.policy)
    lists = {name: keys for name, keys in described.items() if isinstance(keys, list)}
    keys = [key for keys in lists.values() for key in keys]
    blocks = executor.find(keys_to_words(keys)).tolist() if keys else []
    held = {
        names.get(key, key): block_id
        for key, block_id in zip(keys, blocks, strict=True)
        if block_id != NO_BLOCK
    }
    state = executor.state  # Read it again, because `find` may have replaced it.
    ref_cnt = np.asarray(state.ref_cnt).tolist()
    num_allocated, num_freed = int(state.pool.num_allocated), int(state.pool.num_freed)
    freed = np.asarray(state.pool.freed)[:num_freed].tolist()
    return Snapshot(
        policy=described
        | {name: [names.get(key, key) for key in keys] for name, keys in lists.items()},
        ref_cnt={key: ref_cnt[block_id] for key, block_id in held.items()},
        block_ids=held,
        free_ids=[*range(num_allocated, len(ref_cnt)), *reversed(freed)],
    )
