"""A change of policy keeps every block, reference count and free id, and the order."""

import itertools
import random

import numpy as np
import pytest

from jaxkv.policies import get_policy_maker
from jaxkv.scheduling.whatif.auto import CANDIDATES
from jaxkv.tiers.change_over import _fill_from_nearest
from jaxkv.tiers.executors import make_executor
from jaxkv.tiers.host import OffloadingManager

NUM_BLOCKS = 24
KEYS = [random.Random(n).randbytes(32) for n in range(4 * NUM_BLOCKS)]
PAIRS = list(itertools.permutations(CANDIDATES, 2))


class Pair:
    """A host beside what must be in it."""

    def __init__(self, policy, seed):
        self.rng = random.Random(seed)
        self.hosts = [
            OffloadingManager(16, NUM_BLOCKS, policy, alternatives=CANDIDATES)
        ]
        self.blocks = {}  # of each key
        self.storing, self.loading = [], []
        self.now_ms = 0
        self.marks = []

    def all(self, name, *args):
        answers = [getattr(host, name)(*args) for host in self.hosts]
        return answers[0]

    def some_keys(self):
        start = self.rng.randrange(len(KEYS))
        return (KEYS[start:] + KEYS[:start])[: self.rng.randrange(1, 7)]

    def act(self):
        rng, keys = self.rng, self.some_keys()
        match rng.randrange(6):
            case 0:
                placement = self.all("place", keys)
                if placement is not None:
                    for key in placement.evicted_keys:
                        del self.blocks[key]
                    ids = placement.block_ids.tolist()
                    self.blocks |= zip(placement.keys, ids, strict=True)
                    self.storing += placement.keys
            case 1 if self.storing:
                ended = self.storing[:4]
                del self.storing[:4]
                is_ok = rng.random() < 0.8
                self.all("complete_store", ended, is_ok)
                if not is_ok:
                    for key in ended:
                        del self.blocks[key]
            case 2:
                hit = keys[: self.all("lookup", keys)]
                self.all("prepare_load", hit)
                self.loading += hit
            case 3 if self.loading:
                self.all("complete_load", [self.loading.pop()])
            case 4:
                self.all("touch", keys)
            case _:
                self.now_ms += rng.randrange(10_000)
                if self.marks and rng.random() < 0.5:
                    self.all("finish_request", *self.marks.pop(), self.now_ms, 100)
                else:
                    request = keys, 16 * len(keys), self.now_ms
                    self.marks.append((keys, self.all("begin_request", *request)))

    def check(self):
        for host in self.hosts:
            now = host.snapshot()
            assert now.block_ids == self.blocks
            counts = {key: self.loading.count(key) for key in self.blocks}
            assert now.ref_cnt == counts | dict.fromkeys(self.storing, -1)
            ids = [*now.block_ids.values(), *now.free_ids]
            assert sorted(ids) == list(range(NUM_BLOCKS))
            assert host.num_held_blocks == len(self.blocks)


def test_every_block_stays_through_any_changes():
    pair = Pair("hazard", 0)
    learned = {
        name: make_executor(get_policy_maker(name)(NUM_BLOCKS, 4096))
        for name in CANDIDATES
    }
    for number, (_, policy) in enumerate(pair.rng.sample(PAIRS * 4, 24)):
        for _ in range(30):
            pair.act()
        # As a shadow: not all of its keys are the host's.
        shown = np.frombuffer(b"".join(pair.some_keys()), np.uint32).reshape(-1, 8)
        shown.flags.writeable = False
        for shadow in learned.values():
            store = shadow.prepare_store(shown)
            shadow.complete_step(store.block_ids, 0)
            shadow.touch(shown, True)
        pair.check()
        pair.all("change_policy", policy, learned[policy] if number % 3 else None)
        pair.check()
    assert pair.hosts[0].num_evicted > 60


def filled(policy):
    """A host whose blocks were stored, then some used again, in this order of use."""
    host = OffloadingManager(16, 6, policy, alternatives=CANDIDATES)
    mark = host.begin_request(KEYS[:6], 96, 0)
    host.publish(host.place(KEYS[:6]).block_ids, KEYS[:6])
    host.reorder(KEYS[:6])
    host.finish_request(KEYS[:6], mark, 0)
    for time_ms, key in ((60_000, KEYS[3]), (120_000, KEYS[1])):
        mark = host.begin_request([key], 16, time_ms)
        host.touch([key])
        host.finish_request([key], mark, time_ms)
    return host


def test_the_order_of_use_is_taken_over():
    expected = [KEYS[n] for n in (5, 4, 2, 0, 3, 1)]
    for before, after in PAIRS:
        host = filled(before)
        host.change_policy(after)
        evicted = [host.place([key]).evicted_keys[0] for key in KEYS[10:16]]
        assert evicted == expected, (before, after)


def test_a_block_in_flight_is_not_evicted_after_a_change_either():
    host = filled("hazard")
    host.prepare_load([KEYS[5], KEYS[4]])
    host.change_policy("lru")
    assert [*host.place([KEYS[10]]).evicted_keys] == [KEYS[2]]
    host.complete_load([KEYS[4]])
    assert [*host.place([KEYS[11]]).evicted_keys] == [KEYS[4]]


def test_the_shadows_learned_state_is_taken_over():
    host, shadow = filled("lru"), filled("slru")
    # Where both know a key, it is protected here as there; others go by their nearest.
    shadow.discard([KEYS[2]])
    shadow.touch([KEYS[5]])
    host.change_policy("slru", shadow.executor)
    assert host.snapshot().policy["protected"] == [KEYS[5], KEYS[3], KEYS[1]]
    host.change_policy("hazard", filled("hazard").executor)
    assert host.snapshot().policy["touches"]
    assert host.snapshot().policy["now_ms"] == 120_000


def test_the_nearest_key_stands_for_one_that_is_not_known():
    blocks = np.array([-1, 7, -1, -1, -1, -1, 4, -1], np.int32)
    assert _fill_from_nearest(blocks).tolist() == [7, 7, 7, 7, 4, 4, 4, 4]
    assert _fill_from_nearest(blocks[:1]) is None


def test_what_cannot_be_taken_over_is_refused():
    for options, match in (
        ({"cache_policy": "arc"}, "'arc'.* no other policy can take over"),
        ({"retention": True}, "or retention, has state that no other policy"),
        ({"alternatives": ("arc",)}, r"alternatives=\('arc',\)"),
    ):
        with pytest.raises(ValueError, match=match):
            OffloadingManager(16, 6, **({"alternatives": CANDIDATES} | options))
    host = filled("lru")
    before = host.snapshot()
    with pytest.raises(ValueError, match="name='arc' must be one of the alternatives"):
        host.change_policy("arc")
    assert host.snapshot() == before
