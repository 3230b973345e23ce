"""The two executors of a host tier give equal answers and equal states, to the bit.

`test_manager_machine.py` compares the native one with twins in plain Python.
"""

import os
import random
from functools import partial

import jax
import numpy as np
import pytest

from jaxkv.policies import get_policy_maker, hazard, make_retained
from jaxkv.tiers.executors import NativeExecutor, XlaExecutor
from jaxkv.tiers.host import OffloadingManager
from jaxkv.tiers.retention import Retention
from jaxkv.types import STOPS

SEED = int(os.environ.get("JAXKV_TEST_SEED", "20261120"))
NAMES = ("lru", "arc", "arc_fixed", "slru", "hazard", "hazard_flops")
POLICIES = (*NAMES, *(f"retained_{name}" for name in NAMES[:-1]))
# With so few ghosts that many of a batch want the same slot.
FEW_GHOSTS = {
    "hazard": partial(hazard.make_hazard, num_ghosts=64),
    "hazard_flops": partial(hazard.make_hazard, num_ghosts=64, objective="flops"),
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


def make_policy(name, num_blocks):
    """Make the policy of a name of `POLICIES`."""
    inner = name.removeprefix("retained_")
    make = FEW_GHOSTS.get(inner) or get_policy_maker(inner)
    policy = make(num_blocks, max(4096, 2 * num_blocks))
    return policy if inner == name else make_retained(policy)


class Pair:
    """A manager with each executor, given the same calls.

    Answers and events are compared after each.
    """

    def __init__(self, policy, num_blocks, batch_sizes, rng, **options):
        self.managers = self.native, self.xla = [
            OffloadingManager(16, num_blocks, policy, True, executor=name, **options)
            for name in ("native", "xla")
        ]
        self.batch_sizes = batch_sizes
        self.rng = rng
        self.universe = [make_key(n) for n in range(4 * num_blocks + 4)]
        self.loading = []
        self.running = []  # Requests that a policy that listens was told of.
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
            keys = self.rng.choices(self.universe, k=size)  # With repetitions.
        if self.rng.random() < 0.3:
            is_held = self.native.contains(keys)
            held = [key for key, held in zip(keys, is_held, strict=True) if held]
            # As long as the others, so that no more sizes are compiled.
            keys = (held * size)[:size]
        return keys

    def both(self, name, *args):
        """Call `name` on both; return the answer, or None if both have refused."""
        answers, shown = [], []
        for manager in self.managers:
            try:
                answers.append(getattr(manager, name)(*args))
                shown.append(as_lists(answers[-1]))
            except ValueError as error:
                if not str(error).startswith(("Block b'", 'Block b"')):
                    raise
                answers.append(None)
                shown.append(str(error))
            events = [(e.block_hashes, e.removed) for e in manager.take_events()]
            shown[-1] = shown[-1], events
        assert shown[0] == shown[1], name
        return answers[0]

    def tell(self):
        """Begin a request, or finish one, at a time that goes on, now and then back."""
        self.now_ms += int(10 ** (7 * self.rng.random() ** 2)) - 2
        if self.running and self.rng.random() < 0.5:
            index = self.rng.randrange(len(self.running))
            keys, positions, mark = self.running.pop(index)
            more = self.some_keys()[: len(keys)]  # What it generated.
            keys, positions = keys + more, [*positions, *range(1, 1 + len(more))]
            output = self.rng.choice((None, 0, 63, 64, 1000, 10**6))
            ended = self.now_ms, output, self.rng.choice(STOPS), positions
            self.both("finish_request", keys, mark, *ended)
            return
        keys = self.some_keys()
        positions = [*range(len(keys))]
        if self.rng.random() < 0.2:  # Of two groups of layers.
            half = len(keys) // 2
            positions = [*range(half), *range(len(keys) - half)]
        request = keys, 16 * len(keys) + 5, self.now_ms, positions
        mark = self.both("begin_request", *request)
        self.running.append((keys, positions, mark))

    def retain(self):
        """Give some keys a priority, or take it from them."""
        self.now_ms += int(10 ** (4 * self.rng.random()))
        retention = None
        if self.rng.random() < 0.9:
            times = [self.rng.choice((None, 0.05, 2, 60)) for _ in range(2)]
            if times == [None, None]:
                times[0] = 7
            priority = self.rng.choice((0, 1, 2, 50, 98, 99))
            retention = Retention(priority, *times)
        self.both("retain", self.some_keys(), retention, self.now_ms)

    def step(self, *, is_told=True):
        rng = self.rng
        if self.native.retains and rng.random() < 0.25:
            self.retain()
        if self.native.listens and is_told and rng.random() < 0.3:
            self.tell()
        keys = self.some_keys()
        match rng.choices(range(6), weights=(3, 3, 4, 4, 2, 2))[0]:
            case 0:
                self.both("lookup", keys)
            case 1:
                self.both("touch", keys)
            case 2:
                self.both("prepare_store", keys)
            case 3:
                self.both("complete_store", keys, rng.random() < 0.8)
            case 4:
                if self.both("prepare_load", keys) is not None:
                    self.loading.append(keys)
            case _ if self.loading and rng.random() < 0.9:
                index = rng.randrange(len(self.loading))
                self.both("complete_load", self.loading.pop(index))
            case _:
                before = self.native.executor.state.ref_cnt.copy()
                self.both("complete_load", keys)
                if (before != self.native.executor.state.ref_cnt).any():
                    self.both("prepare_load", keys)  # Loads of `self.loading` go on.

    def compare_states(self):
        native, xla = (manager.executor.state for manager in self.managers)
        for (path, leaf), xla_leaf in zip(
            jax.tree_util.tree_leaves_with_path(native),
            jax.tree.leaves(xla),
            strict=True,
        ):
            xla_leaf = np.asarray(xla_leaf)
            # `assert_array_equal` takes ten times as long.
            if leaf.dtype != xla_leaf.dtype or not np.array_equal(leaf, xla_leaf):
                where = jax.tree_util.keystr(path)
                assert leaf.dtype == xla_leaf.dtype, where
                np.testing.assert_array_equal(leaf, xla_leaf, err_msg=where)

    def exchange_states(self):
        """Have each executor go on with the state of the other."""
        native, xla = self.managers
        states = native.executor.state, xla.executor.state
        native.executor = NativeExecutor(native.policy, states[1])
        xla.executor = XlaExecutor(xla.policy, states[0])


def as_lists(answer):
    """Return an answer of a manager as a value that can be compared."""
    if hasattr(answer, "block_hashes_to_store"):
        stored, spec = answer.block_hashes_to_store, answer.store_spec
        return [*stored], spec.block_ids.tolist(), [*answer.block_hashes_evicted]
    return answer.block_ids.tolist() if hasattr(answer, "block_ids") else answer


def run(name, num_blocks, batch_sizes, num_operations):
    print(f"seed {SEED}; JAXKV_TEST_SEED sets another")
    rng = random.Random(SEED + num_blocks)
    pair = Pair(make_policy(name, num_blocks), num_blocks, batch_sizes, rng)
    every = 8 * (16 + num_blocks // 4)
    for number in range(num_operations):
        # A policy may serve long without being told of a request.
        pair.step(is_told=number >= 100)
        # Each of the first, in which everything happens for the first time.
        if number < 300 or number % 8 == 0:
            pair.compare_states()
        if number % every == 0:
            pair.exchange_states()
    pair.compare_states()


# To compile for XLA takes longer than the calls, so there is one padded size per
# capacity. `lru`, `slru` and `hazard` are also compared in `test_change_over.py`, and
# the searches of large directories with the policies that compile fastest.
@pytest.mark.parametrize(
    ("name", "num_blocks", "batch_sizes", "num_operations"),
    [
        ("lru", 900, (257, 1024), 200),
        ("arc", 1, (1, 4), 500),
        ("arc", 300, (65, 256), 500),
        ("arc_fixed", 7, (1, 16), 500),
        ("hazard", 1, (1, 4), 500),
        ("hazard_flops", 50, (17, 64), 500),
        ("retained_arc", 5, (1, 16), 500),
        # More blocks than are counted together.
        ("retained_hazard", 70, (1, 16), 500),
    ],
)
def test_executors_agree_to_the_bit_on_random_operations(
    name, num_blocks, batch_sizes, num_operations
):
    run(name, num_blocks, batch_sizes, num_operations)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 7, 61, 500, 4096])
def test_executors_agree_on_a_million_random_operations(name, num_blocks):
    run(name, num_blocks, (1, 4096), 200_000)
    # As `few_programs` does after a file: each case compiles hundreds of programs.
    jax.clear_caches()
