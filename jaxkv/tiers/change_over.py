"""Changes the policy of a tier that serves: every block stays, and none is copied.

What a tier holds is a directory of keys and block ids, which the policies share, and
the reference counts and free ids, which are none of theirs. Only the order of eviction
is a policy's own, and is made anew, in the order of use.
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
    """Tell whether a policy can take over from another, and the other way round."""
    return policy.hand_over is not None and policy.take_over is not None


def change_over(
    executor: Executor,
    old: Policy,
    new: Policy,
    name: ExecutorName = "native",
    learned: Executor | None = None,
    scale: int = 1,
) -> Executor:
    """Make an executor that goes on with the blocks of another, by another policy.

    Args:
        executor: Has the state; it is not changed.
        old: Its policy.
        new: The other, of as many blocks.
        name: As of `make_executor`.
        learned: A tier of the new policy, of any size, that was shown the same
            requests; None for none.
        scale: How many keys each of that tier's stands for.
    """
    assert old.hand_over is not None
    assert new.take_over is not None
    state = executor.state
    held = old.hand_over(state.policy)
    own = None
    if learned is not None:
        blocks = _nearest(_find(learned, held))
        if blocks is not None:
            own = Learned(learned.state.policy, blocks, scale)
    taken = new.take_over(held, own)
    return make_executor(new, name, dataclasses.replace(state, policy=taken))


def resume(
    executor: Executor, policy: Policy, name: ExecutorName, learned: ReuseTable
) -> Executor:
    """Make an executor that goes on with another's blocks, and with what was learned.

    Args:
        executor: Has the state; it is not changed.
        policy: Its policy, one that learns (`jaxkv.policies.hazard`).
        name: As of `make_executor`.
        learned: What was learned before.
    """
    state = executor.state
    own = state.policy
    if isinstance(own, RetainedState):
        inner = dataclasses.replace(own.inner, reuse=learned)
        own = dataclasses.replace(own, inner=inner)
    else:
        own = dataclasses.replace(own, reuse=learned)
    return make_executor(policy, name, dataclasses.replace(state, policy=own))


def emptied(executor: Executor, policy: Policy, name: ExecutorName) -> Executor:
    """Make an executor without blocks that keeps what its policy has learned.

    Args:
        executor: Has the state; it is not changed.
        policy: Its policy.
        name: As of `make_executor`.
    """
    own = executor.state.policy
    if isinstance(own, RetainedState):
        own = own.inner
    empty = make_executor(policy, name)
    if not isinstance(own, HazardState):
        return empty
    return resume(empty, policy, name, own.reuse)


def _find(learned: Executor, held: Held) -> NDArray[np.int32]:
    """Find the block elsewhere of each key that is held: i32[n]."""
    keys = np.asarray(held.directory.keys)[held.blocks]
    keys.flags.writeable = False  # As all keys are.
    return learned.find(keys) if len(keys) else np.empty(0, np.int32)


def _nearest(blocks: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Put the nearest of the others in place of each NO_BLOCK; None if there is none.

    What lies side by side in an order of use is mostly of one request.
    """
    known = np.flatnonzero(blocks != NO_BLOCK)
    if not known.size:
        return None
    # Half way between two of them the later one begins to be the nearer.
    middles = (known[:-1] + known[1:] + 1) // 2
    rows = np.searchsorted(middles, np.arange(blocks.size), side="right")
    nearest: NDArray[np.int32] = blocks[known[rows]]
    return nearest
