"""`OffloadingManager` against its plain-Python twin on random operations."""

import os
import random

import jax
import pytest

from jaxkv.keys import key_from_foreign
from jaxkv.offloading_manager import OffloadingManager
from jaxkv.policies import arc, lru
from tests.reference.arc import ReferenceARC, ReferenceARCFixed
from tests.reference.offloading_manager import ReferenceLRU, ReferenceManager, Refused

SEED = int(os.environ.get("JAXKV_TEST_SEED", "20261120"))
POLICIES = {
    "lru": (ReferenceLRU, lru.snapshot),
    "arc": (ReferenceARC, arc.snapshot),
    "arc_fixed": (ReferenceARCFixed, arc.snapshot),
}


def make_key(number):
    """Mostly keys of 32 bytes, some that are alike but for a byte, some foreign."""
    match number % 3:
        case 0:
            return number.to_bytes(32, "big")
        case 1:
            return random.Random(number).randbytes(32)
        case _:
            return b"foreign-%d" % number


class Pair:
    """The manager and its twin, given the same calls and compared after each."""

    def __init__(self, policy, num_blocks, batch_sizes, rng):
        twin, self.snapshot = POLICIES[policy]
        self.real = OffloadingManager(16, num_blocks, policy, enable_events=True)
        self.twin = ReferenceManager(num_blocks, twin)
        self.batch_sizes = batch_sizes
        self.rng = rng
        self.universe = [make_key(n) for n in range(4 * num_blocks + 4)]
        self.on_array_side = {
            key: key if len(key) == 32 else key_from_foreign(key)
            for key in self.universe
        }
        self.loading = []

    def some_keys(self):
        """Pick a run of the universe (a prefix as requests have it) or a mixture."""
        shortest, longest = self.batch_sizes
        # From the shortest to the longest, and short ones most of the time.
        size = int(shortest * (longest / shortest) ** self.rng.random() ** 3 + 0.5)
        start = self.rng.randrange(len(self.universe))
        if self.rng.random() < 0.5:
            keys = (self.universe[start:] + self.universe[:start])[:size]
        else:
            keys = self.rng.choices(self.universe, k=size)  # with repetitions
        if self.rng.random() < 0.3:
            held = [key for key in keys if self.twin.policy.get(key) is not None]
            # As long as the others, so that no more sizes are compiled.
            keys = (held * size)[:size]
        return keys

    def both(self, name, *args):
        """Call `name` on both; give the results, or None twice if both refused."""
        try:
            expected = getattr(self.twin, name)(*args)
        except Refused:
            with pytest.raises(ValueError, match=r"^Block b['\"]"):
                getattr(self.real, name)(*args)
            return None, None
        return getattr(self.real, name)(*args), expected

    def step(self):
        operation = self.rng.choices(
            ("lookup", "touch", "store", "end_store", "load", "end_load"),
            weights=(3, 3, 4, 4, 2, 2),
        )[0]
        keys = self.some_keys()
        if operation == "lookup":
            real, expected = self.both("lookup", keys)
            assert real == expected
        elif operation == "touch":
            self.both("touch", keys)
        elif operation == "store":
            real, expected = self.both("prepare_store", keys)
            assert (real is None) == (expected is None)
            if real is not None:
                assert real.block_hashes_to_store == expected.keys
                assert real.store_spec.block_ids.tolist() == expected.block_ids
                assert real.block_hashes_evicted == expected.evicted
        elif operation == "end_store":
            self.both("complete_store", keys, self.rng.random() < 0.8)
        elif operation == "load":
            real, expected = self.both("prepare_load", keys)
            if real is not None:
                assert real.block_ids.tolist() == expected
                self.loading.append(keys)
        elif self.loading and self.rng.random() < 0.9:
            index = self.rng.randrange(len(self.loading))
            self.both("complete_load", self.loading.pop(index))
        else:
            before = [block.ref_cnt for block in self.twin.blocks.values()]
            self.both("complete_load", keys)
            after = [block.ref_cnt for block in self.twin.blocks.values()]
            if before != after:  # it ended loads that this test thinks are its own
                self.both("prepare_load", keys)

        events = [(e.block_hashes, e.removed) for e in self.real.take_events()]
        assert events == self.twin.take_events()

    def compare_policies(self):
        """Compare the orders, and for ARC the target to its last bit."""
        expected = {
            name: [self.on_array_side[key] for key in value]
            if isinstance(value, list)
            else value
            for name, value in self.twin.policy.snapshot().items()
        }
        assert self.snapshot(self.real.many.state.policy) == expected


def run(policy, num_blocks, batch_sizes, num_operations):
    print(f"seed {SEED}; JAXKV_TEST_SEED sets another")
    pair = Pair(policy, num_blocks, batch_sizes, random.Random(SEED + num_blocks))
    every = 1 + num_blocks // 32
    for number in range(num_operations):
        pair.step()
        if number % every == 0:
            pair.compare_policies()
    pair.compare_policies()


# One padded size per capacity: compiling takes longer than the calls.
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("num_blocks", "batch_sizes"),
    [(1, (1, 4)), (7, (1, 16)), (50, (17, 64)), (300, (65, 256))],
)
def test_equals_twin_on_random_operations(policy, num_blocks, batch_sizes):
    # LRU 100,000 in all; what the others share with it is tested by that.
    num_operations = 25_000 if policy == "lru" else 4_000
    run(policy, num_blocks, batch_sizes, num_operations)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 7, 61, 500, 4096])
def test_equals_twin_on_a_million_random_operations(policy, num_blocks):
    run(policy, num_blocks, (1, 4096), num_operations=200_000)
    # As `few_programs` does after a file: each part compiles hundreds of programs.
    jax.clear_caches()
