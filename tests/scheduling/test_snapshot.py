"""A scheduler's state is one value, and can be put back, also in another scheduler."""

import dataclasses
import random

import pytest

from jaxkv import OffloadRules
from jaxkv.keys import key_from_int
from jaxkv.tiers.index import BlockIndex
from tests.explorer.world import World
from tests.explorer.worlds import WORLDS
from tests.rigs.scheduler_state import restore, snapshot

_CALLS = (
    *("get_num_new_matched_tokens", "explain", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output", "request_finished"),
)
_SERVED = dataclasses.replace(WORLDS["arc"], has_events=False)
SETUPS = {
    **{
        name: WORLDS[name]
        for name in (
            *("lazy", "store", "store, asked", "hybrid", "together", "paused", "rows"),
            *("gate", "arc", "hazard", "kept", "bound"),
        )
    },
    "shadows": dataclasses.replace(
        _SERVED, policy="hazard", rules=OffloadRules(shadow="arc*0.5,2; off")
    ),
}


class Recorded(World):
    def __init__(self, setup):
        super().__init__(setup)
        self.answers = []
        for name in _CALLS:
            setattr(self.scheduler, name, self._recorded(getattr(self.scheduler, name)))

    def _check_end(self):
        """Shadows have lists to the end."""

    def _recorded(self, call):
        def recorded(*args):
            answer = call(*args)
            self.answers.append(repr(answer))
            return answer

        return recorded

    def play(self, actions):
        """Perform actions; return the answers and the digest after each of them."""
        trail = []
        for action in actions:
            self.answers.clear()
            self.do(action)
            trail.append((action, tuple(self.answers), snapshot(self.scheduler).digest))
        return trail


def choices(world, rng, num):
    for _ in range(num):
        yield rng.choice(world.actions())


@pytest.mark.parametrize("name", SETUPS)
def test_a_restored_scheduler_answers_as_it_did_before(name):
    rng, world = random.Random(name), Recorded(SETUPS[name])
    twin = Recorded(SETUPS[name])
    for num in (5, 15):
        world.play(choices(world, rng, num))
        saved, digest = world.save(), snapshot(world.scheduler).digest
        trail = world.play(choices(world, rng, 20))
        actions = [action for action, *_ in trail]
        twin.requests = world.requests  # The state refers to them.
        for restored in (world, world, twin):
            restored.restore(saved)
            assert snapshot(restored.scheduler).digest == digest == saved[0].digest
            assert restored.play(actions) == trail


@pytest.mark.parametrize("name", ["store", "hybrid", "lazy", "hazard"])
def test_the_digest_differs_after_whatever_changes_what_may_follow(name):
    rng, world = random.Random(name), World(SETUPS[name])
    num_changes = 0
    for _ in range(60):
        before, digest = world.canonical()[:3], snapshot(world.scheduler).digest
        world.do(rng.choice(world.actions()))
        if world.canonical()[:3] != before:
            num_changes += 1
            assert snapshot(world.scheduler).digest != digest
    assert num_changes > 5


@pytest.mark.parametrize("executor", ["native", "xla"])
def test_a_tier_goes_back_to_an_earlier_order(executor):
    keys = [key_from_int(number) for number in range(4)]
    index = BlockIndex(16, 2, executor=executor)
    index.publish(index.place(keys[:2]).block_ids, keys[:2])
    saved = snapshot(index, "index")
    for _ in range(2):
        index.touch(keys[:1])
        assert list(index.place(keys[2:3]).evicted_keys) == keys[1:2]
        index.clear()
        assert snapshot(index, "index").digest != saved.digest
        restore(index, saved)
        assert snapshot(index, "index").digest == saved.digest
        assert index.snapshot().policy == {"order": keys[:2]}
