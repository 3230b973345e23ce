"""Both ARC policies: small scenarios worked out by hand, and twins under pressure."""

import functools
import random
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.keys import words_to_keys
from jaxkv.policies.arc import make_arc, make_arc_fixed, snapshot
from tests.reference.arc import ReferenceARC, ReferenceARCFixed

MAKERS = {"arc": make_arc, "arc_fixed": make_arc_fixed}
TWINS = {"arc": ReferenceARC, "arc_fixed": ReferenceARCFixed}
WIDTH = 8
# So many that a request may move the target by 2.
ENOUGH = {"arc": 8, "arc_fixed": 32}


@functools.cache
def jitted(name, num_blocks):
    policy = MAKERS[name](num_blocks, WIDTH)
    evict = jax.jit(policy.evict, static_argnums=3)
    names = ("find", "touch", "insert", "remove")
    compiled = {name: jax.jit(getattr(policy, name)) for name in names}
    return policy._replace(evict=evict, **compiled)


class Cache:
    """A policy whose keys are letters, for reading; ids are given from 0 on."""

    def __init__(self, name, num_blocks):
        self.policy = jitted(name, num_blocks)
        self.state = self.policy.init()
        self.ref_cnt = np.zeros(num_blocks, np.int32)
        self.ids = {}

    def batch(self, letters):
        keys = np.zeros((WIDTH, 8), np.uint32)
        keys[: len(letters), 0] = [ord(letter) for letter in letters]
        return jnp.asarray(keys), jnp.int32(len(letters))

    def block_ids(self, letters):
        ids = [self.ids[letter] for letter in letters]
        return jnp.array(ids + [-1] * (WIDTH - len(ids)), jnp.int32)

    def insert(self, letters):
        free = sorted(set(range(len(self.ref_cnt))) - set(self.ids.values()))
        self.ids |= dict(zip(letters, free, strict=False))
        keys, _ = self.batch(letters)
        self.state = self.policy.insert(self.state, keys, self.block_ids(letters)).state

    def touch(self, letters):
        ids = jnp.array([self.ids.get(letter, -1) for letter in letters], jnp.int32)
        ready = jnp.zeros(WIDTH, bool).at[: len(letters)].set(self.ref_cnt[ids] >= 0)
        self.state = self.policy.touch(self.state, *self.batch(letters), ready)

    def remove(self, letters):
        keys, _ = self.batch(letters)
        self.state = self.policy.remove(self.state, keys, self.block_ids(letters))
        for letter in letters:
            del self.ids[letter]

    def evict(self, num):
        """Evict; give the victims, or None if refused, which must change nothing."""
        out = self.policy.evict(self.state, jnp.int32(num), self.ref_cnt, WIDTH)
        if not out.ok:
            chex.assert_trees_all_equal(out.state, self.state)
            return None
        victims = "".join(chr(key[0]) for key in out.keys[:num].tolist())
        assert out.block_ids.tolist() == self.block_ids(victims).tolist()
        self.state = out.state
        for letter in victims:
            del self.ids[letter]
        return victims

    def lists(self):
        """Show "T1 T2 B1 B2" with "-" for an empty list, and the target."""
        shown = snapshot(self.state)
        names = ("t1", "t2", "b1", "b2")
        lists = ["".join(chr(key[0]) for key in shown[name]) or "-" for name in names]
        return " ".join(lists), shown["target"]

    def pin(self, letters, ref_cnt=1):
        for letter in letters:
            self.ref_cnt[self.ids[letter]] = ref_cnt


@pytest.fixture(params=sorted(MAKERS))
def name(request):
    return request.param


def test_a_second_use_promotes_and_the_first_key_ends_as_the_newest(name):
    cache = Cache(name, 8)
    cache.insert("abcd")
    assert cache.lists() == ("abcd - - -", 0.0)
    cache.touch("bcx")
    assert cache.lists() == ("ad cb - -", 0.0)
    cache.touch("ca")
    assert cache.lists() == ("d bac - -", 0.0)
    cache.touch("dd")  # the second time it is in T2 already
    assert cache.lists() == ("- bacd - -", 0.0)


def test_a_store_in_progress_is_no_second_use(name):
    cache = Cache(name, 8)
    cache.insert("abc")
    cache.pin("a", -1)
    cache.touch("ab")
    assert cache.lists() == ("ca b - -", 0.0)


def test_removal_leaves_no_ghost_and_room_for_others(name):
    cache = Cache(name, 4)
    for _ in range(20):  # more keys than there are entries
        cache.insert("abcd")
        cache.touch("bd")
        assert cache.lists() == ("ac db - -", 0.0)
        cache.remove("abcd")
        assert cache.lists() == ("- - - -", 0.0)


def test_evicts_from_t1_down_to_the_target_then_from_t2(name):
    cache = Cache(name, 8)
    cache.insert("abcdef")
    cache.touch("fed")  # T2: d e f
    assert cache.evict(5) == "abcde"  # T1 is never below 0, so it gives all it has
    assert cache.lists() == ("- f abc de", 0.0)


def test_a_ghost_of_b1_raises_the_target_by_a_fraction(name):
    cache = Cache(name, ENOUGH[name])
    cache.insert("abcdefg")
    cache.touch("gfe")  # T1: a b c d, T2: e f g
    assert cache.evict(2) == "ab"
    cache.remove("cd")
    assert cache.evict(3) == "efg"
    assert cache.lists() == ("- - ab efg", 0.0)
    cache.touch("a")
    assert cache.lists() == ("- - ba efg", 1.5)  # 3 / 2
    cache.touch("f")
    assert cache.lists() == ("- - ba egf", 0.5)  # max(1, 2 / 3) less
    cache.touch("g")
    assert cache.lists() == ("- - ba efg", 0.0)  # never below


def test_target_is_cut_to_a_whole_number_and_t1_may_sink_just_below(name):
    cache = Cache(name, ENOUGH[name])
    cache.insert("abcdefg")
    cache.touch("gfe")
    cache.evict(2)
    cache.remove("cd")
    cache.evict(3)
    cache.touch("a")  # the target is 1.5
    cache.insert("uvwxyz")
    cache.touch("zyx")
    assert cache.lists() == ("uvw xyz ba efg", 1.5)
    # While |T1| >= 1: 3, 2, 1. With 1.5 not cut down, w would stay.
    assert cache.evict(4) == "uvwx"


def with_target_of_three(name):
    """A cache of 4 blocks with abcd in T1, nothing in T2, and a target of 3."""
    cache = Cache(name, 4)
    cache.insert("wxyz")
    assert cache.evict(3) == "wxy"
    for letter in "wxy" * (1 if name == "arc" else 4):
        cache.touch(letter)
    cache.remove("z")
    cache.insert("abcd")
    assert cache.lists() == ("abcd - wxy -", 3.0)
    return cache


def test_arc_refuses_though_t1_has_blocks_to_give():
    cache = with_target_of_three("arc")
    assert cache.evict(3) is None  # 4, 3, and at 2 only T2 is asked
    assert cache.evict(2) == "ab"
    assert cache.evict(1) is None


def test_arc_fixed_falls_back_on_t1():
    cache = with_target_of_three("arc_fixed")
    assert cache.evict(3) == "abc"
    assert cache.lists() == ("d - yabc -", 3.0)  # w and x made room
    cache.pin("d")
    assert cache.evict(1) is None


def test_arc_fixed_takes_t1_then_t2_then_the_rest_of_t1():
    cache = with_target_of_three("arc_fixed")
    cache.touch("b")
    assert cache.lists() == ("acd b wxy -", 3.0)
    assert cache.evict(4) == "abcd"
    assert cache.lists() == ("- - yacd b", 3.0)


def test_pinned_blocks_count_for_t1_but_are_not_taken(name):
    cache = Cache(name, 8)
    cache.insert("abcdef")
    cache.touch("fed")
    cache.pin("ac")
    cache.pin("d", -1)
    assert cache.evict(3) == "bef"
    assert cache.evict(1) is None
    assert cache.lists() == ("ac d b ef", 0.0)


def test_ghosts_in_excess_of_the_blocks_are_forgotten_oldest_first(name):
    cache = Cache(name, 4)
    cache.insert("abcd")
    cache.evict(4)
    cache.insert("efgh")
    cache.evict(3)
    assert cache.lists() == ("h - defg -", 0.0)
    cache.touch("a")  # forgotten: nothing happens
    assert cache.lists() == ("h - defg -", 0.0)
    cache.touch("d")
    assert cache.lists() == ("h - efgd -", 1.0 if name == "arc" else 0.25)


@pytest.mark.parametrize(
    ("name", "lists"), [("arc", "xbca - d -"), ("arc_fixed", "x acb d -")]
)
def test_where_a_ghost_comes_back(name, lists):
    cache = Cache(name, 4)
    cache.insert("abcd")
    cache.evict(4)
    cache.insert("x")
    cache.insert("bca" if name == "arc" else "acb")
    assert cache.lists() == (lists, 0.0)


@pytest.mark.parametrize(("name", "targets"), [("arc", (3, 2)), ("arc_fixed", (2, 1))])
def test_how_far_one_request_moves_the_target(name, targets):
    cache = Cache(name, ENOUGH[name])
    cache.insert("abcdef")
    cache.touch("def")
    cache.evict(6)
    assert cache.lists() == ("- - abc fed", 0.0)
    cache.touch("abc")  # arc_fixed: a sixteenth of the blocks
    assert cache.lists() == ("- - cba fed", targets[0])
    cache.touch("f")
    assert cache.lists()[1] == targets[1]


@pytest.mark.parametrize(("name", "target"), [("arc", 2.0), ("arc_fixed", 1.0)])
def test_order_of_moves_within_a_request(name, target):
    cache = Cache(name, ENOUGH[name])
    cache.insert("abcdef")
    cache.touch("def")
    cache.evict(6)
    # One by one from the last key on: down to 0, up twice. All at once: 2 - 1.
    cache.touch("abd")
    assert cache.lists()[1] == target


def test_target_never_exceeds_the_blocks(name):
    cache = Cache(name, 4)
    cache.insert("ab")
    cache.evict(2)
    for _ in range(18):
        cache.touch("ab")
    assert cache.lists()[1] == 4.0


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_equals_its_twin_through_compactions(name, num_blocks):
    rng = random.Random(num_blocks)
    policy, twin = jitted(name, num_blocks), TWINS[name](num_blocks)
    state, free = policy.init(), set(range(num_blocks))
    ref_cnt = np.zeros(num_blocks, np.int32)
    universe = np.arange(8 * 4 * (num_blocks + 1), dtype=np.uint32).reshape(-1, 8)
    numbers = {key: number for number, key in enumerate(words_to_keys(universe))}
    num_compactions = 0

    def batch(numbers):
        keys = np.zeros((WIDTH, 8), np.uint32)
        keys[: len(numbers)] = universe[numbers]
        return keys

    for _ in range(500):
        ref_cnt[:] = rng.choices((-1, 0, 0, 0, 1), k=num_blocks)
        for block in twin.blocks.values():
            block.ref_cnt = ref_cnt[block.block_id]
        some = rng.choices(range(len(universe)), k=rng.randint(1, WIDTH))
        action = rng.choice(("touch", "touch", "insert", "insert", "evict", "remove"))
        tail = int(state.order.tail)
        if action == "touch":
            ids = policy.find(state, batch(some), np.int32(len(some)))
            ready = (ids >= 0) & (ref_cnt[ids] >= 0)
            state = policy.touch(state, batch(some), np.int32(len(some)), ready)
            twin.touch(some)
        elif action == "evict":
            num = rng.randint(0, min(WIDTH, num_blocks))
            victims = twin.evict(num, protected=())
            out = policy.evict(state, np.int32(num), ref_cnt, WIDTH)
            assert bool(out.ok) == (victims is not None)
            expected = [block.block_id for _, block in victims or []]
            assert out.block_ids.tolist() == (expected + [-1] * WIDTH)[:WIDTH]
            free.update(expected)
            state = out.state
        else:
            known = action == "remove"
            some = [
                n for n in dict.fromkeys(some) if (twin.get(n) is not None) == known
            ]
            block_ids = [twin.get(n).block_id for n in some] if known else sorted(free)
            some = some[: len(block_ids)]
            block_ids = block_ids[: len(some)]
            padded = np.array((block_ids + [-1] * WIDTH)[:WIDTH], np.int32)
            if known:
                state = policy.remove(state, batch(some), padded)
                free.update(block_ids)
            else:
                state = policy.insert(state, batch(some), padded).state
                free.difference_update(block_ids)
            for number, block_id in zip(some, block_ids, strict=True):
                if known:
                    twin.remove(number)
                else:
                    ref = ref_cnt[block_id]
                    twin.insert(number, SimpleNamespace(block_id=block_id, ref_cnt=ref))
        num_compactions += int(state.order.tail) < tail
        shown = {
            key: [numbers[k] for k in value] if isinstance(value, list) else value
            for key, value in snapshot(state).items()
        }
        assert shown == twin.snapshot()
        sizes = [len(shown[key]) for key in ("b1", "b2", "t1", "t2")]
        assert state.sizes.tolist() == sizes
    assert num_compactions > 2
