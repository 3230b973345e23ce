"""`OffloadingManager` with each policy, against its plain-Python twin, in any order.

Hypothesis chooses the calls, and shrinks failures to the fewest. The executor is the
native one; `test_host_differential.py` compares the two executors to the bit.
"""

import itertools
import random
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxkv import OffloadingManager, Retention
from jaxkv.keys import key_from_foreign, key_from_int
from jaxkv.policies import get_policy_maker, hazard, make_retained
from jaxkv.types import NO_BLOCK, STOPS
from tests.reference.arc import ReferenceARC, ReferenceARCFixed
from tests.reference.hazard import ReferenceHazard
from tests.reference.offloading_manager import ReferenceLRU, ReferenceManager, Refused
from tests.reference.retained import ReferenceRetained
from tests.reference.slru import ReferenceSLRU

MAX_BATCH = 16  # So that the logs of use are often compacted.
TWINS = {
    "lru": ReferenceLRU,
    "arc": ReferenceARC,
    "arc_fixed": ReferenceARCFixed,
    "slru": ReferenceSLRU,
    "hazard": partial(ReferenceHazard, num_ghosts=64),
    "hazard_flops": partial(ReferenceHazard, num_ghosts=64, by_flops=True),
}
# Alike but for a byte, and foreign ones.
KEYS = [
    key_from_int(number) if number % 3 else b"foreign-%d" % number
    for number in range(14)
]
FILLERS = [key_from_int(number) for number in range(100, 200)]
starts, sizes = st.integers(0, len(KEYS) - 1), st.integers(0, 6)
PREFIXES = st.builds(lambda start, num: (KEYS * 2)[start : start + num], starts, sizes)
BATCHES = PREFIXES | st.lists(st.sampled_from(KEYS), max_size=8)
RETENTIONS = st.none() | st.builds(
    Retention,
    st.sampled_from((0, 1, 2, 50, 98, 99)),
    st.sampled_from((None, 0.05, 2, 60)),
    st.sampled_from((0.05, 2, 60)),
)


def make_policy(name, num_blocks):
    """Make a policy whose ghosts are so few that many want the same slot."""
    if name.startswith("hazard"):
        objective = "flops" if name == "hazard_flops" else "hits"
        ghosts = {"num_ghosts": 64, "objective": objective}
        return hazard.make_hazard(num_blocks, max(MAX_BATCH, num_blocks), **ghosts)
    return get_policy_maker(name)(num_blocks, max(MAX_BATCH, num_blocks))


class ManagerMachine(RuleBasedStateMachine):
    """A manager and its twin, given the same calls."""

    num_blocks = 7

    @initialize(data=st.data(), is_retained=st.booleans())
    def make(self, data, is_retained):
        self.start(data.draw(st.sampled_from([*TWINS])), is_retained)

    def start(self, name, is_retained):
        policy, twin = make_policy(name, self.num_blocks), TWINS[name]
        if is_retained:
            policy = make_retained(policy)
            twin = partial(ReferenceRetained, inner=twin, may_refuse=name == "arc")
        self.manager = OffloadingManager(16, self.num_blocks, policy, True)
        num_told = policy.max_batch
        self.twin = ReferenceManager(self.num_blocks, twin, most_told=num_told)
        self.keys = KEYS + FILLERS[: max(0, self.num_blocks - 7)]
        for start in range(len(KEYS), len(self.keys), 8):
            self.prepare_and_complete(self.keys[start : start + 8])
        self.loading, self.running = [], []
        self.now_ms = 5_000

    def prepare_and_complete(self, keys):
        self.both("prepare_store", keys)
        self.both("complete_store", keys, True)

    def both(self, name, *arguments):
        """Make a call on both; give the two answers, or None if both have refused."""
        try:
            expected = getattr(self.twin, name)(*arguments)
        except Refused:
            with pytest.raises(ValueError, match=r"^Block b['\"]"):
                getattr(self.manager, name)(*arguments)
            return None
        return getattr(self.manager, name)(*arguments), expected

    @rule(keys=BATCHES)
    def lookup(self, keys):
        num_hits, expected = self.both("lookup", keys)
        assert num_hits == expected

    @rule(keys=BATCHES)
    def touch(self, keys):
        self.both("touch", keys)

    @rule(keys=BATCHES)
    def prepare_store(self, keys):
        output, expected = self.both("prepare_store", keys)
        assert (output is None) == (expected is None)
        if output is not None:
            assert output.block_hashes_to_store == expected.keys
            assert output.store_spec.block_ids.tolist() == expected.block_ids
            assert output.block_hashes_evicted == expected.evicted

    @rule(keys=BATCHES, is_ok=st.integers(0, 4).map(bool))
    def complete_store(self, keys, is_ok):
        self.both("complete_store", keys, is_ok)

    @rule(keys=BATCHES, is_held=st.booleans())
    def prepare_load(self, keys, is_held):
        if is_held:
            keys = [key for key in keys if self.twin.lookup([key])]
        if (answers := self.both("prepare_load", keys)) is not None:
            spec, expected = answers
            assert spec.block_ids.tolist() == expected
            self.loading.append(keys)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def complete_load(self, data):
        index = data.draw(st.integers(0, len(self.loading) - 1))
        assert self.both("complete_load", self.loading.pop(index)) is not None

    @rule(keys=BATCHES, is_reading=st.booleans())
    def complete_loads_that_were_not_begun(self, keys, is_reading):
        reading = [key for keys in self.loading for key in keys]
        if is_reading:  # A key, once more than it is read.
            keys = reading[:1] + [key for key in reading if key == reading[0]]
        if any(keys.count(key) > reading.count(key) for key in keys):
            assert self.both("complete_load", keys) is None

    @rule(keys=BATCHES)
    def pin_and_unpin(self, keys):
        keys = [key for key in keys if self.twin.lookup([key])]
        rows = self.manager.find(keys)
        self.manager.pin(rows)
        for key in keys:
            self.twin.blocks[key].ref_cnt += 1
        self.both_are_alike()
        self.manager.unpin(rows)
        for key in keys:
            self.twin.blocks[key].ref_cnt -= 1

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def discard(self, keys):
        blocks = self.twin.blocks
        keys = [key for key in keys if key in blocks and blocks[key].ref_cnt == 0]
        self.manager.discard(keys)
        self.twin.freed += [blocks[key].block_id for key in keys]
        for key in keys:
            self.twin.policy.remove(key)
        if keys:
            self.twin.events.append((keys, True))

    @rule(keys=PREFIXES)
    def request_step(self, keys):
        """A step does what its parts do, and is completed once."""
        num_hits = self.twin.lookup(keys)
        self.twin.touch(keys)
        hits = self.twin.prepare_load(keys[:num_hits])
        stored = self.twin.prepare_store(keys)
        step = self.manager.request_step(keys)
        assert step.num_hits == num_hits
        assert step.load_spec.block_ids.tolist() == hits
        assert (step.store is None) == (stored is None)
        if stored is not None:
            assert step.store.store_spec.block_ids.tolist() == stored.block_ids
            assert step.store.block_hashes_evicted == stored.evicted
            self.twin.complete_store(stored.keys)
        self.twin.complete_load(keys[:num_hits])
        self.manager.complete_step(step)
        with pytest.raises(ValueError, match="be completed only once"):
            self.manager.complete_step(step)

    @precondition(lambda self: self.manager.listens)
    @rule(keys=PREFIXES, passed_ms=st.integers(-2, 10**7))
    def begin(self, keys, passed_ms):
        self.now_ms = max(self.now_ms + passed_ms, 0)
        positions = list(range(len(keys)))
        mark, expected = self.both(
            "begin_request", keys, 16 * len(keys) + 5, self.now_ms, positions
        )
        assert mark == expected
        self.running.append((keys, mark))

    @precondition(lambda self: self.running)
    @rule(
        more=PREFIXES,
        passed_ms=st.integers(0, 10**5),
        num_output=st.sampled_from((None, 0, 63, 64, 1000, 10**6)),
        stop=st.sampled_from(STOPS),
    )
    def finish(self, more, passed_ms, num_output, stop):
        keys, mark = self.running.pop()
        keys = keys + more
        self.now_ms += passed_ms
        positions = list(range(len(keys)))
        arguments = keys, mark, self.now_ms, num_output, stop, positions
        self.both("finish_request", *arguments)

    @precondition(lambda self: self.manager.retains)
    @rule(keys=BATCHES, retention=RETENTIONS, passed_ms=st.integers(0, 10**4))
    def retain(self, keys, retention, passed_ms):
        self.now_ms += passed_ms
        self.both("retain", keys, retention, self.now_ms)

    @invariant()
    def both_are_alike(self):
        if not hasattr(self, "twin"):
            return
        events = [(e.block_hashes, e.removed) for e in self.manager.take_events()]
        assert events == self.twin.take_events()
        shown, blocks = self.manager.snapshot(), self.twin.blocks
        assert shown.ref_cnt == {key: block.ref_cnt for key, block in blocks.items()}
        ids = {key: block.block_id for key, block in blocks.items()}
        assert shown.block_ids == ids
        all_ids = sorted([*shown.block_ids.values(), *shown.free_ids])
        assert all_ids == list(range(self.num_blocks))
        ready = [key in blocks and blocks[key].ref_cnt >= 0 for key in self.keys]
        assert (self.manager.find(self.keys) != NO_BLOCK).tolist() == ready
        assert self.manager.num_held_blocks == len(blocks)
        # A ghost of a foreign key is shown by the key on arrays.
        assert as_on_arrays(shown.policy) == as_on_arrays(self.twin.policy.snapshot())


def as_on_arrays(shown):
    """Replace foreign keys in the lists of a policy's snapshot."""
    return {
        name: [key if len(key) == 32 else key_from_foreign(key) for key in value]
        if isinstance(value, list)
        else value
        for name, value in shown.items()
    }


class ManagerOfOneBlockMachine(ManagerMachine):
    num_blocks = 1


class LargeManagerMachine(ManagerMachine):
    """A manager of more blocks than are counted together, full at the start."""

    num_blocks = 70


def test_a_manager_equals_its_twin_on_a_long_walk():
    """Hypothesis makes few calls per policy; these are many, as requests make them."""
    for name, is_retained in itertools.product(TWINS, (False, True)):
        rng = random.Random(0)
        machine = ManagerMachine()
        machine.start(name, is_retained)
        # Hazard learns anew once in 64 requests.
        for number in range(1200 if machine.manager.listens else 400):
            start = rng.randrange(len(KEYS))
            keys = (KEYS * 2)[start : start + rng.randrange(7)]
            if is_retained and rng.random() < 0.25:
                times = rng.choice((None, 0.05, 2, 60)), rng.choice((0.05, 2, 60))
                retention = Retention(rng.choice((0, 1, 2, 50, 98, 99)), *times)
                machine.retain(keys, retention, int(10 ** (4 * rng.random())))
            match rng.randrange(6 if machine.manager.listens else 5):
                case 0:
                    machine.touch(keys)
                case 1:
                    machine.prepare_store(keys)
                case 2:
                    machine.complete_store(keys, rng.random() < 0.9)
                case 3:
                    machine.prepare_load(keys, True)
                case 4 if machine.loading:
                    machine.both("complete_load", machine.loading.pop())
                case 5 if machine.running and rng.random() < 0.5:
                    output = rng.choice((None, 0, 63, 1000))
                    machine.finish(
                        keys, rng.randrange(10**5), output, rng.choice(STOPS)
                    )
                case 5:
                    machine.begin(keys, int(10 ** (7 * rng.random())))
            if number % 8 == 0:
                machine.both_are_alike()


TestManagerMachine = ManagerMachine.TestCase
TestManagerOfOneBlock = ManagerOfOneBlockMachine.TestCase
TestLargeManager = LargeManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=30)
TestManagerOfOneBlock.settings = settings(max_examples=8, stateful_step_count=30)
TestLargeManager.settings = settings(max_examples=12, stateful_step_count=30)
