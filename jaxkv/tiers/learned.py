"""Keep what "hazard" has learned in a tier that starts empty."""

from __future__ import annotations

import dataclasses

from jaxkv.policies.base import Policy
from jaxkv.policies.hazard import HazardState
from jaxkv.policies.retained import RetainedState
from jaxkv.policies.reuse import ReuseTable
from jaxkv.tiers.executors import Executor, ExecutorName, make_executor


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
