"""Change the policy of a tier while it serves; every block keeps its place.

A tier's directory, reference counts and free ids do not depend on the policy. Only the
order of eviction does: the new policy builds it from the order of use.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies.base import Held, Learned, Policy
from jaxkv.policies.hazard import HazardState
from jaxkv.policies.retained import RetainedState
from jaxkv.policies.reuse import ReuseTable
from jaxkv.tiers.executors import Executor, ExecutorName, make_executor
from jaxkv.types import NO_BLOCK


def can_change(policy: Policy) -> bool:
    """Whether a policy can be exchanged for another, in both directions."""
    return policy.hand_over is not None and policy.take_over is not None


def change_over(
    executor: Executor,
    old: Policy,
    new: Policy,
    name: ExecutorName = "native",
    learned: Executor | None = None,
    scale: int = 1,
) -> Executor:
    """Make an executor with the same blocks and the new policy.

    The old executor is unchanged. `learned` is a shadow: a tier of any size that has
    served the same requests with the new policy, for 1 of `scale` keys.
    """
    assert old.hand_over is not None
    assert new.take_over is not None
    state = executor.state
    held = old.hand_over(state.policy)
    learned_state = None
    if learned is not None:
        blocks = _fill_from_nearest(_find(learned, held))
        if blocks is not None:
            learned_state = Learned(learned.state.policy, blocks, scale)
    policy = new.take_over(held, learned_state)
    return make_executor(new, name, dataclasses.replace(state, policy=policy))


def resume(
    executor: Executor, policy: Policy, name: ExecutorName, learned: ReuseTable
) -> Executor:
    """Make an executor with the same blocks and an earlier reuse table.

    The policy must have a reuse table (`jaxkv.policies.hazard`).
    """
    state = executor.state
    policy_state = state.policy
    if isinstance(policy_state, RetainedState):
        inner = dataclasses.replace(policy_state.inner, reuse=learned)
        policy_state = dataclasses.replace(policy_state, inner=inner)
    else:
        policy_state = dataclasses.replace(policy_state, reuse=learned)
    return make_executor(policy, name, dataclasses.replace(state, policy=policy_state))


def make_emptied(executor: Executor, policy: Policy, name: ExecutorName) -> Executor:
    """Make an executor without blocks that keeps the policy's learned state."""
    policy_state = executor.state.policy
    if isinstance(policy_state, RetainedState):
        policy_state = policy_state.inner
    empty = make_executor(policy, name)
    if not isinstance(policy_state, HazardState):
        return empty
    return resume(empty, policy, name, policy_state.reuse)


def _find(learned: Executor, held: Held) -> NDArray[np.int32]:
    """Return the block of each held key in another tier: i32[n]."""
    keys = np.asarray(held.directory.keys)[held.blocks]
    keys.flags.writeable = False  # Executors take read-only keys.
    return learned.find(keys) if len(keys) else np.empty(0, np.int32)


def _fill_from_nearest(blocks: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Replace each NO_BLOCK by the block of the nearest row; None if all are NO_BLOCK.

    Neighbours in the order of use mostly belong to the same request.
    """
    present = np.flatnonzero(blocks != NO_BLOCK)
    if not present.size:
        return None
    # A row is nearest to the later of two present rows from halfway on.
    middles = (present[:-1] + present[1:] + 1) // 2
    rows = np.searchsorted(middles, np.arange(blocks.size), side="right")
    nearest: NDArray[np.int32] = blocks[present[rows]]
    return nearest
