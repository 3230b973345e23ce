"""The offload scheduler and the device pool against a model of all that they know.

`tests/rigs/engine_sim.py` plays the engine, `tests/rigs/offload_sim.py` the workers;
every random choice comes of one seed.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv.policies import policy_names
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from tests.rigs.engine_sim import Engine
from tests.rigs.sim_requests import Setup

ROOT = Path(__file__).resolve().parents[2]
FULL = FullAttention(4)
GROUPS = {
    "full": (FULL,),
    "window": (SlidingWindow(4, 10),),
    "full+window": (FULL, SlidingWindow(4, 10)),
    "full+mamba": (FULL, Mamba(4)),
    "full+chunked": (FULL, ChunkedLocal(4, 8)),
    "two sizes": (FULL, SlidingWindow(8, 12)),
}
POLICIES = policy_names()
LAZY = OffloadRules(mode="lazy", max_num_batched_tokens=16)


# A store behind the host, which has much of what the host has no room for.
TOGETHER = OffloadRules(store_batch_blocks=6, store_max_wait_steps=3)
THROUGH = OffloadRules(storage_write="through")
STORAGE_SETUPS = (
    Setup(GROUPS["full"], THROUGH, num_storage_blocks=200, num_host_blocks=16),
    Setup(GROUPS["full"], num_storage_blocks=30, num_host_blocks=16, max_drafts=3),
    Setup(
        GROUPS["full"],
        replace(THROUGH, world_size=2, max_storage_blocks=3, delay_shared_loads=True),
        num_storage_blocks=12,
        num_host_blocks=24,
        failures=0.4,
    ),
    Setup(
        GROUPS["full"],
        replace(THROUGH, blocks_per_host_block=3),
        num_storage_blocks=40,
        num_host_blocks=12,
    ),
    Setup(
        GROUPS["full+window"],
        replace(LAZY, storage_write="through"),
        num_storage_blocks=200,
        num_host_blocks=30,
    ),
    Setup(
        GROUPS["two sizes"],
        THROUGH,
        num_storage_blocks=60,
        num_host_blocks=30,
        key_length=20,
    ),
)


def run(setup, seed, num_steps):
    """Run an engine; compare all that there is now and then, and at the end."""
    print(f"seed {seed}, {setup}")
    engine = Engine(setup, random.Random(seed))
    for number in range(num_steps):
        engine.step()
        if number % 40 == 0:
            engine.check(deeply=True)
    engine.settle()
    print(dict(engine.counts))
    return engine


def make_rules(rng, groups):
    """Choose rules that go together."""
    lazy = rng.random() < 0.3
    rules = OffloadRules(
        world_size=rng.randint(1, 3),
        store_threshold=rng.choice((0, 0, 0, 1, 2)),
        max_unseen_blocks=rng.choice((None, None, None, 0, 1, 3)),
        retention=rng.random() < 0.3,
        delay_shared_loads=rng.random() < 0.3,
        max_blocks_in_flight=rng.choice((None, None, 1, 4, 12)),
        flush_on_preemption=rng.random() < 0.2,
    )
    if rng.random() < 0.15:
        rules = replace(rules, skip_slow_loads=True, block_bytes=1)
    if lazy:
        tokens = rng.choice((8, 16, 32))
        return replace(rules, mode="lazy", max_num_batched_tokens=tokens)
    rules = replace(
        rules,
        prompt_only=rng.random() < 0.2,
        max_offload_tokens=rng.choice((None, None, 18)),
    )
    if groups == GROUPS["full"]:
        rules = replace(rules, blocks_per_host_block=rng.choice((1, 2, 3)))
    return rules


def make_setup(rng, groups, policy):
    rules, num_storage_blocks = make_rules(rng, groups), rng.choice((0, 12, 60, 400))
    if num_storage_blocks:
        is_told = policy == "lru" and not rules.retention
        rules = replace(
            rules,
            storage_write=rng.choice(("through", "on_reuse", *["on_evict"] * is_told)),
            max_storage_blocks=rng.choice((1, 4, 128)),
        )
    return Setup(
        groups,
        rules,
        policy,
        num_host_blocks=rng.choice((8, 40)),
        max_drafts=rng.choice((0, 3)),
        key_length=rng.choice((32, 32, 20)),
        failures=rng.choice((0, 0.1, 0.4)),
        num_storage_blocks=num_storage_blocks,
    )


@pytest.mark.parametrize(
    "setup",
    [
        Setup(GROUPS["full"], max_drafts=3),
        Setup(GROUPS["full"], OffloadRules(world_size=3), failures=0.4),
        Setup(GROUPS["full"], OffloadRules(delay_shared_loads=True)),
        Setup(GROUPS["full"], OffloadRules(max_blocks_in_flight=4, world_size=2)),
        Setup(GROUPS["full"], OffloadRules(blocks_per_host_block=3), max_drafts=3),
        Setup(GROUPS["full"], LAZY),
        Setup(GROUPS["two sizes"], max_drafts=3),
        Setup(
            GROUPS["two sizes"], replace(LAZY, world_size=2, max_blocks_in_flight=12)
        ),
        Setup(GROUPS["full+mamba"], OffloadRules(store_threshold=2, prompt_only=True)),
        Setup(GROUPS["full+window"], OffloadRules(retention=True)),
        Setup(GROUPS["full"], OffloadRules(max_unseen_blocks=2)),
        Setup(GROUPS["full"], TOGETHER, num_host_blocks=40, max_drafts=3),
        Setup(GROUPS["full+mamba"], replace(TOGETHER, world_size=2)),
        *STORAGE_SETUPS,
    ],
)
def test_a_random_engine_finds_all_as_its_model_has_it(setup):
    for seed in range(3):
        policy = random.Random(f"{seed} {setup}").choice(POLICIES)
        engine = run(replace(setup, policy=policy), seed, num_steps=300)
        assert engine.counts["waits"] > 10 or not setup.rules.store_batch_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_engine_runs_with_every_policy(policy):
    engine = run(Setup(GROUPS["full+window"], policy=policy), seed=7, num_steps=200)
    assert engine.counts["finished"] > 10
    assert engine.counts["loaded"] > 0


@pytest.mark.parametrize("storage_write", ["on_reuse", "on_evict", "through"])
def test_a_random_engine_fetches_what_only_its_store_has(storage_write):
    rules = OffloadRules(storage_write=storage_write)
    setup = Setup(GROUPS["full"], rules, num_storage_blocks=200, num_host_blocks=16)
    engine = run(setup, seed=3, num_steps=400)
    assert engine.counts["waited for the store"] > 5
    for name, num in engine.storage.counts.items():
        assert num > 5 or name == "failed", name


PLAN = """
from tests.scheduling.test_model import GROUPS, OffloadRules, Setup, run
engine = run(Setup(GROUPS["full"], OffloadRules(world_size=3)), seed=5, num_steps=200)
print(engine.digest.hex(), sorted(engine.counts.items()))
"""


def test_equal_inputs_give_equal_plans_in_processes_that_hash_otherwise():
    said = [
        subprocess.run(
            [sys.executable, "-c", PLAN],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_random_engine_runs_for_200_000_steps_in_all(groups, policy):
    for seed in range(12):
        setup = make_setup(random.Random(seed), groups, policy)
        run(setup, seed, num_steps=200_000 // (6 * len(POLICIES) * 12))
