"""Changes the policy of a tier that serves: every block stays, and none is copied.

A tier's directory of keys and block ids, its reference counts and its free ids belong
to no policy. Only the order of eviction is the policy's, and is made anew, in the order
of use.
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
    """Whether a policy can take over from another, and the other way round."""
    return policy.hand_over is not None and policy.take_over is not None


def change_over(
    executor: Executor,
    old: Policy,
    new: Policy,
    name: ExecutorName = "native",
    learned: Executor | None = None,
    scale: int = 1,
) -> Executor:
    """Make an executor that continues with the blocks of another, by another policy.

    The old executor is not changed. `learned` is a tier of the new policy, of any size,
    that was shown the same requests; each of its keys stands for `scale` keys.
    """
    assert old.hand_over is not None
    assert new.take_over is not None
    state = executor.state
    held = old.hand_over(state.policy)
    lesson = None
    if learned is not None:
        blocks = _nearest(_find(learned, held))
        if blocks is not None:
            lesson = Learned(learned.state.policy, blocks, scale)
    policy = new.take_over(held, lesson)
    return make_executor(new, name, dataclasses.replace(state, policy=policy))


def resume(
    executor: Executor, policy: Policy, name: ExecutorName, learned: ReuseTable
) -> Executor:
    """Make an executor that continues with another's blocks, and with an earlier table.

    The policy is one that learns (`jaxkv.policies.hazard`).
    """
    state = executor.state
    resumed = state.policy
    if isinstance(resumed, RetainedState):
        inner = dataclasses.replace(resumed.inner, reuse=learned)
        resumed = dataclasses.replace(resumed, inner=inner)
    else:
        resumed = dataclasses.replace(resumed, reuse=learned)
    return make_executor(policy, name, dataclasses.replace(state, policy=resumed))


def emptied(executor: Executor, policy: Policy, name: ExecutorName) -> Executor:
    """Make an executor without blocks that keeps what its policy has learned."""
    before = executor.state.policy
    if isinstance(before, RetainedState):
        before = before.inner
    empty = make_executor(policy, name)
    if not isinstance(before, HazardState):
        return empty
    return resume(empty, policy, name, before.reuse)


def _find(learned: Executor, held: Held) -> NDArray[np.int32]:
    """Find the block elsewhere of each held key: i32[n]."""
    keys = np.asarray(held.directory.keys)[held.blocks]
    keys.flags.writeable = False  # As all keys are.
    return learned.find(keys) if len(keys) else np.empty(0, np.int32)


def _nearest(blocks: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Replace each NO_BLOCK by the nearest other block; None if there is none.

    Neighbours in an order of use are mostly of one request.
    """
    present = np.flatnonzero(blocks != NO_BLOCK)
    if not present.size:
        return None
    # From half way between two of them on, the later one is the nearer.
    middles = (present[:-1] + present[1:] + 1) // 2
    rows = np.searchsorted(middles, np.arange(blocks.size), side="right")
    nearest: NDArray[np.int32] = blocks[present[rows]]
    return nearest
