"""`OffloadingManager`, by either executor, against its plain-Python twin."""

import os
import random
from functools import partial

import jax
import numpy as np
import pytest

from jaxkv.keys import key_from_foreign
from jaxkv.policies import arc, get_policy_maker, hazard, lru, make_retained
from jaxkv.tiers.executors import NativeExecutor, XlaExecutor
from jaxkv.tiers.host import OffloadingManager
from jaxkv.tiers.retention import Retention
from jaxkv.types import NO_BLOCK, STOPS
from tests.reference.arc import ReferenceARC
from tests.reference.hazard import ReferenceHazard
from tests.reference.offloading_manager import ReferenceLRU, ReferenceManager, Refused
from tests.reference.retained import ReferenceRetained

SEED = int(os.environ.get("JAXKV_TEST_SEED", "20261120"))
POLICIES = {
    "lru": (ReferenceLRU, lru.snapshot),
    "arc": (ReferenceARC, arc.snapshot),
    "hazard": (partial(ReferenceHazard, num_ghosts=64), hazard.snapshot),
    "hazard_flops": (
        partial(ReferenceHazard, num_ghosts=64, by_flops=True),
        hazard.snapshot,
    ),
}
PLAIN = tuple(POLICIES)
PURE = "lru", "arc"
for inner in PLAIN:
    twin, _ = POLICIES[inner]
    POLICIES[f"retained_{inner}"] = (
        partial(ReferenceRetained, inner=twin),
        None,  # the policy's default
    )
# So few ghosts that many of a batch collide in one slot.
FEW_GHOSTS = {
    "hazard": partial(hazard.make_hazard, num_ghosts=64),
    "hazard_flops": partial(hazard.make_hazard, num_ghosts=64, objective="flops"),
}


def make_key(number):
    """Mostly keys of 32 bytes, some that differ in one byte, some foreign."""
    match number % 3:
        case 0:
            return number.to_bytes(32, "big")
        case 1:
            return random.Random(number).randbytes(32)
        case _:
            return b"foreign-%d" % number


def make_policy(name, num_blocks, max_batch):
    inner = name.removeprefix("retained_")
    make = FEW_GHOSTS.get(inner) or get_policy_maker(inner)
    policy = make(num_blocks, max_batch)
    return policy if inner == name else make_retained(policy)


BOTH = ("native", "xla")
NATIVE = ("native",)
OPERATIONS = ("lookup", "touch", "store", "end_store", "load", "end_load")
OPERATIONS += ("pin", "discard", "request_step")  # Of the native executor alone.


class Trio:
    """A manager with each executor and their twin, given the same calls.

    Answers are compared after each, and the executors' states, to the bit. Now and then
    each executor goes on with the state that the other one has made.
    """

    def __init__(self, policy, num_blocks, batch_sizes, rng, executors):
        twin, self.snapshot = POLICIES[policy]
        # XLA compiles for large batches; small ones often compact the logs of use.
        max_batch = max(num_blocks, batch_sizes[1] if executors == NATIVE else 4096)
        policy = make_policy(policy, num_blocks, max_batch)
        self.snapshot = self.snapshot or policy.snapshot
        self.real = [
            OffloadingManager(16, num_blocks, policy, True, executor=executor)
            for executor in executors
        ]
        self.twin = ReferenceManager(num_blocks, twin, max_keys=policy.max_batch)
        self.num_blocks, self.batch_sizes = num_blocks, batch_sizes
        self.rng = rng
        self.universe = [make_key(n) for n in range(4 * num_blocks + 4)]
        self.on_array_side = {
            key: key if len(key) == 32 else key_from_foreign(key)
            for key in self.universe
        }
        self.loading = []
        self.running = []  # requests that a listening policy was notified of
        self.now_ms = rng.randrange(2**32)

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

    def all(self, name, *args):
        """Call `name` on all; return the results, or None if all refused."""
        try:
            expected = getattr(self.twin, name)(*args)
        except Refused:
            for real in self.real:
                with pytest.raises(ValueError, match=r"^Block b['\"]"):
                    getattr(real, name)(*args)
            return None
        return [getattr(real, name)(*args) for real in self.real], expected

    def notify(self):
        """Begin or finish a request, at a time that sometimes goes back."""
        self.now_ms += int(10 ** (7 * self.rng.random() ** 2)) - 2
        if self.running and self.rng.random() < 0.5:
            index = self.rng.randrange(len(self.running))
            keys, positions, mark = self.running.pop(index)
            new = self.some_keys()[: len(keys)]  # what it generated
            keys, positions = keys + new, [*positions, *range(1, 1 + len(new))]
            output = self.rng.choice((None, 0, 63, 64, 1000, 10**6))
            stop = self.rng.choice(STOPS)
            self.all("finish_request", keys, mark, self.now_ms, output, stop, positions)
            return
        keys = self.some_keys()
        positions = [*range(len(keys))]
        if self.rng.random() < 0.2:  # of two groups of layers
            half = len(keys) // 2
            positions = [*range(half), *range(len(keys) - half)]
        kind = self.rng.choice((None, None, 0, 7, 255))
        marks, expected = self.all(
            "begin_request", keys, 16 * len(keys) + 5, self.now_ms, positions, kind
        )
        assert marks == [expected] * len(self.real)
        self.running.append((keys, positions, expected))

    def retain(self):
        self.now_ms += int(10 ** (4 * self.rng.random()))
        retention = None
        if self.rng.random() < 0.9:
            times = [self.rng.choice((None, 0.05, 2, 60)) for _ in range(2)]
            if times == [None, None]:
                times[0] = 7
            priority = self.rng.choice((0, 1, 2, 50, 98, 99))
            retention = Retention(priority, *times)
        self.all("retain", self.some_keys(), retention, self.now_ms)

    def step(self):
        if self.real[0].retains and self.rng.random() < 0.25:
            self.retain()
        if self.real[0].listens and self.is_notified and self.rng.random() < 0.3:
            self.notify()
        weights = (3, 3, 4, 4, 2, 2, *(1, 1, 2) * (len(self.real) == 1))
        operation = self.rng.choices(OPERATIONS[: len(weights)], weights)[0]
        keys = self.some_keys()
        if operation in ("pin", "discard", "request_step"):
            getattr(self, operation)(*self.real, keys)
        elif operation == "lookup":
            actual, expected = self.all("lookup", keys)
            assert actual == [expected] * len(self.real)
        elif operation == "touch":
            self.all("touch", keys)
        elif operation == "store":
            outputs, expected = self.all("prepare_store", keys)
            for output in outputs:
                assert (output is None) == (expected is None)
                if output is not None:
                    assert output.block_hashes_to_store == expected.keys
                    assert output.store_spec.block_ids.tolist() == expected.block_ids
                    assert output.block_hashes_evicted == expected.evicted
        elif operation == "end_store":
            self.all("complete_store", keys, self.rng.random() < 0.8)
        elif operation == "load":
            answer = self.all("prepare_load", keys)
            if answer is not None:
                specs, expected = answer
                assert [spec.block_ids.tolist() for spec in specs] == [expected] * len(
                    self.real
                )
                self.loading.append(keys)
        elif self.loading and self.rng.random() < 0.9:
            index = self.rng.randrange(len(self.loading))
            self.all("complete_load", self.loading.pop(index))
        else:
            if self.loading and self.rng.random() < 0.5:
                keys = self.loading[0][:1] * len(keys)  # More often than it is read.
            before = [block.ref_cnt for block in self.twin.blocks.values()]
            self.all("complete_load", keys)
            after = [block.ref_cnt for block in self.twin.blocks.values()]
            if before != after:  # it ended loads that this test thinks are its own
                self.all("prepare_load", keys)

        expected = self.twin.take_events()
        for real in self.real:
            events = list(real.take_events())
            assert {(e.block_size, e.medium) for e in events} <= {(16, "CPU")}
            assert [(e.block_hashes, e.removed) for e in events] == expected

    def pin(self, real, keys):
        keys = [key for key in keys if self.twin.lookup([key])]
        rows = real.find(keys)
        for pin, num in ((real.pin, 1), (real.unpin, -1)):
            pin(rows)
            for key in keys:
                self.twin.blocks[key].ref_cnt += num
            self.compare_blocks()

    def discard(self, real, keys):
        real.discard(keys)
        blocks = self.twin.blocks
        idle = [key for key in dict.fromkeys(keys) if key in blocks]
        idle = [key for key in idle if blocks[key].ref_cnt == 0]
        self.twin.freed += [blocks[key].block_id for key in idle]
        for key in idle:
            self.twin.policy.remove(key)
        if idle:
            self.twin.events.append((idle, True))

    def request_step(self, real, keys):
        keys, twin = [*dict.fromkeys(keys)], self.twin
        num_hits = twin.lookup(keys)
        twin.touch(keys)
        hits, stored = twin.prepare_load(keys[:num_hits]), twin.prepare_store(keys)
        step = real.request_step(keys)
        assert (step.num_hits, step.load_spec.block_ids.tolist()) == (num_hits, hits)
        assert (step.store is None) == (stored is None)
        if stored is not None:
            assert step.store.store_spec.block_ids.tolist() == stored.block_ids
            assert step.store.block_hashes_evicted == stored.evicted
            twin.complete_store(stored.keys)
        twin.complete_load(keys[:num_hits])
        real.complete_step(step)

    def compare_states(self):
        """Compare the executors' states with one another, to the bit."""
        if len(self.real) == 1:
            return
        native, xla = (real.executor.state for real in self.real)
        for (path, actual), wanted in zip(
            jax.tree_util.tree_leaves_with_path(native),
            jax.tree.leaves(xla),
            strict=True,
        ):
            wanted = np.asarray(wanted)
            # The message that shows where they differ takes ten times as long.
            if actual.dtype != wanted.dtype or not np.array_equal(actual, wanted):
                where = jax.tree_util.keystr(path)
                assert actual.dtype == wanted.dtype, where
                np.testing.assert_array_equal(actual, wanted, err_msg=where)

    def exchange_states(self):
        if len(self.real) == 1:
            return
        native, xla = self.real
        states = native.executor.state, xla.executor.state
        native.executor = NativeExecutor(native.policy, states[1])
        xla.executor = XlaExecutor(xla.policy, states[0])

    def compare_policies(self):
        """Compare the orders, and for ARC the target to its last bit."""
        expected = self.on_arrays(self.twin.policy.snapshot())
        for real in self.real:
            assert self.snapshot(real.executor.state.policy) == expected
            assert self.on_arrays(real.snapshot().policy) == expected
        self.compare_blocks()
        if self.real[0].retains and self.twin.policy.now_ms is not None:
            self.compare_priorities()

    def compare_priorities(self):
        for real in self.real:
            state = real.executor.state.policy
            priorities, terms = np.asarray(state.priorities), np.asarray(state.terms)
            for key, block in self.twin.blocks.items():
                start, half_life, ttl = terms[block.block_id].tolist()
                retention = int(priorities[block.block_id]), half_life, ttl, start
                expected = self.twin.policy.priority(key)
                assert self.twin.policy.left_of(retention) == expected, key

    def on_arrays(self, shown):
        return {
            name: [self.on_array_side.get(key, key) for key in value]
            if isinstance(value, list)
            else value
            for name, value in shown.items()
        }

    def compare_blocks(self):
        blocks = self.twin.blocks
        for real in self.real:
            shown = real.snapshot()
            assert shown.ref_cnt == {key: b.ref_cnt for key, b in blocks.items()}
            assert shown.block_ids == {key: b.block_id for key, b in blocks.items()}
            # Free ids are listed as they will be handed out.
            unused = range(self.twin.num_allocated, self.num_blocks)
            assert shown.free_ids == [*unused, *reversed(self.twin.freed)]
            assert real.num_held_blocks == len(blocks)
        ready = [key in blocks and blocks[key].ref_cnt >= 0 for key in self.universe]
        assert (self.real[0].find(self.universe) != NO_BLOCK).tolist() == ready


def run(policy, num_blocks, batch_sizes, num_operations, executors, is_notified=True):
    print(f"seed {SEED}; JAXKV_TEST_SEED sets another")
    rng = random.Random(SEED + num_blocks)
    trio = Trio(policy, num_blocks, batch_sizes, rng, executors)
    trio.is_notified = is_notified
    every = 16 + num_blocks // 4
    for number in range(num_operations):
        trio.step()
        # Compare after each of the first steps, where every action is new.
        if number < 200 or number % 8 == 0:
            trio.compare_states()
        if number % every == 0:
            trio.compare_policies()
        if number % (8 * every) == 0:
            trio.exchange_states()
    trio.compare_states()
    trio.compare_policies()


# Compiling for XLA takes longer than the calls. So there is one padded size per
# capacity, and what all policies share, such as how directories are searched, is tried
# with the quickest of them.
@pytest.mark.parametrize(
    ("policy", "num_blocks", "batch_sizes", "num_operations"),
    [
        *[(policy, 7, (1, 16), 600) for policy in PURE],
        ("arc", 1, (1, 4), 600),
        ("lru", 900, (257, 1024), 200),
        ("arc", 300, (65, 256), 600),
    ],
)
def test_executors_equal_their_twin_on_random_operations(
    policy, num_blocks, batch_sizes, num_operations
):
    run(policy, num_blocks, batch_sizes, num_operations, BOTH)


@pytest.mark.parametrize(
    ("policy", "num_blocks", "batch_sizes"),
    [
        *[(policy, 7, (1, 16)) for policy in POLICIES],
        *[(policy, 1, (1, 4)) for policy in POLICIES],
        *[(policy, 50, (17, 64)) for policy in ("lru", "hazard", "hazard_flops")],
        *[(policy, 70, (1, 70)) for policy in ("arc", "retained_lru")],
        # More blocks than are counted together.
        ("retained_hazard", 70, (1, 16)),
        ("retained_arc", 5, (1, 16)),
    ],
)
def test_native_executor_equals_its_twin_on_random_operations(
    policy, num_blocks, batch_sizes
):
    run(policy, num_blocks, batch_sizes, 600, NATIVE)


def test_a_policy_without_notifications_equals_its_twin():
    run("hazard", 7, (1, 16), 500, NATIVE, is_notified=False)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 7, 61, 500, 4096])
def test_executors_equal_their_twin_on_a_million_random_operations(policy, num_blocks):
    run(policy, num_blocks, (1, 4096), 200_000, BOTH if policy in PURE else NATIVE)
    # As `few_programs` does after a file: each part compiles hundreds of programs.
    jax.clear_caches()
