"""`DeviceBlockPool` against vLLM's block pool in plain Python, and its refusals."""

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxkv.keys import PackedKeys, key_from_int, keys_to_words
from jaxkv.policies import directory
from jaxkv.tiers.base import DEVICE_MEDIUM, OffloadingEvent
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.block_pool import BlockPool

NUM_BLOCKS = 24
KEYS = [b"key %d" % number for number in range(9)] + [bytes([7] * 32)]
BLOCKS = st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=9)


class PinnablePool(BlockPool):
    """The oracle, with pins: a pinned block is passed over, and keeps its place."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, enable_events=True)
        self.pins = [0] * num_blocks

    @property
    def num_pending_free(self):
        ids = [block.block_id for block in self.free_queue]
        return sum(self.pins[b] > 0 for b in ids)

    @property
    def waiting(self):
        return [b for b in self.free_queue if not self.pins[b.block_id]]

    @property
    def num_free(self):
        return len(self.waiting)

    def get_new_blocks(self, num):
        blocks = self.waiting[:num]
        for block in blocks:
            self.free_queue.remove(block)
            self._evict(block)
            block.ref_cnt = 1
        return blocks

    def free(self, ids):
        once = dict.fromkeys(ids)
        repeats = list(ids)
        for block_id in once:
            repeats.remove(block_id)
        self.free_blocks([self.blocks[b] for b in repeats])
        self.free_blocks([self.blocks[b] for b in once])


class PoolMachine(RuleBasedStateMachine):
    """The pool and the oracle, side by side."""

    def __init__(self):
        super().__init__()
        self.pool = DeviceBlockPool(NUM_BLOCKS, enable_events=True, block_size=16)
        self.twin = PinnablePool(NUM_BLOCKS)

    @property
    def ref_cnt(self):
        return [block.ref_cnt for block in self.twin.blocks]

    @rule(num=st.integers(0, 9))
    def allocate(self, num):
        num = min(num, self.twin.num_free)
        expected = [block.block_id for block in self.twin.get_new_blocks(num)]
        assert self.pool.allocate(num) == expected

    @rule(ids=BLOCKS)
    def touch(self, ids):
        self.pool.touch(np.array(ids))
        self.twin.touch(self.twin.blocks[b] for b in ids)

    @rule(data=st.data())
    def free(self, data):
        ids = data.draw(releases(self.ref_cnt))
        self.pool.free(ids)
        self.twin.free(ids)

    @rule(ids=BLOCKS)
    def pin(self, ids):
        self.pool.pin(ids)
        for block_id in ids:
            self.twin.pins[block_id] += 1

    @rule(data=st.data())
    def unpin(self, data):
        ids = data.draw(releases(self.twin.pins))
        self.pool.unpin(ids)
        for block_id in ids:
            self.twin.pins[block_id] -= 1

    @rule(ids=BLOCKS, keys=st.lists(st.sampled_from(KEYS), min_size=9, max_size=9))
    def cache(self, ids, keys):
        # Few keys, so that most are duplicates, and some blocks are repeated.
        pairs = dict(zip(ids, keys, strict=False))
        pairs = {b: self.twin.blocks[b].key or key for b, key in pairs.items()}
        self.pool.cache(ids, [pairs[b] for b in ids])
        for block_id, key in pairs.items():
            if self.twin.blocks[block_id].key is None:
                self.twin.cache_block(self.twin.blocks[block_id], key)

    @rule(ids=BLOCKS)
    def evict(self, ids):
        self.pool.evict(ids)
        self.twin.evict_blocks(ids)

    @rule()
    def reset(self):
        assert self.pool.reset() == self.twin.reset_prefix_cache()

    @rule(keeps=st.booleans())
    def release_all(self, keeps):
        self.pool.unpin(repeated(self.twin.pins))
        self.twin.pins = [0] * NUM_BLOCKS
        held = repeated(self.ref_cnt)
        self.pool.free(held)
        self.twin.free(held)
        if not keeps:
            self.reset()

    @invariant()
    def both_are_alike(self):
        assert self.pool.num_free == self.twin.num_free
        assert self.pool.num_pending_free == self.twin.num_pending_free
        blocks = map(self.twin.get_cached_block, KEYS)
        expected = [block.block_id if block else NO_BLOCK for block in blocks]
        assert self.pool.find(KEYS).tolist() == expected
        waiting = [(block.block_id, block.key) for block in self.twin.waiting]
        assert list(zip(*self.pool.next_free(99), strict=True)) == waiting
        ids = range(1, NUM_BLOCKS)
        of_key = [self.twin.blocks[b].key == KEYS[0] for b in ids]
        assert self.pool.holds(ids, [KEYS[0]] * len(ids)).tolist() == of_key
        assert [self.pool.ref_cnt(b) for b in ids] == self.ref_cnt[1:]
        self.pool.check()
        expected = [
            (key, event.removed)
            for event in self.twin.take_events()
            for key in event.keys or (None,)
        ]
        events = self.pool.take_events()
        assert {(e.block_size, e.medium) for e in events} <= {(16, DEVICE_MEDIUM)}
        assert expected == [
            (key, event.removed)
            for event in events
            for key in event.block_hashes or (None,)
        ]


def repeated(counts):
    return [b for b, count in enumerate(counts) for _ in range(count)]


def releases(counts):
    """Choose blocks to release, at most as often as each is held."""
    blocks = repeated(counts)
    permuted = st.permutations(blocks)
    return st.integers(0, len(blocks)).flatmap(
        lambda num: permuted.map(lambda order: order[:num])
    )


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=60)
TestPoolMachine = PoolMachine.TestCase


def state_of(pool):
    state = [leaf.tolist() for leaf in jax.tree.leaves(pool.state)]
    return state, pool.take_events()


@pytest.fixture
def pool():
    """A pool with blocks 1 to 3 held, 4 and 5 free, 1 to 5 cached and 3 pinned."""
    pool = DeviceBlockPool(NUM_BLOCKS, enable_events=True)
    pool.allocate(5)
    pool.cache([1, 2, 3, 4, 5], [b"a", b"b", b"c", b"d", b"b"])
    pool.free([4, 5])
    pool.pin([3])
    pool.take_events()
    return pool


def test_what_is_refused_changes_nothing(pool):
    keys = [b"a", b"b", b"c", b"d", b"x"]
    resident = pool.find(keys).tolist()
    before = state_of(pool)
    wide = [bytes([number] * 32) for number in range(5)]
    refused = [
        (lambda: pool.allocate(21), "num=21 blocks requested, but only 20 of 24"),
        (lambda: pool.allocate(-1), "num=-1 must be at least 0"),
        (lambda: pool.free([1, 2, 3, 0, 2]), "block_id=2 is freed more often"),
        (lambda: pool.free([4]), "block_id=4 is freed more often than it is held"),
        (lambda: pool.unpin([3, 3]), "block_id=3 is unpinned more often than"),
        (lambda: pool.unpin([3, 0, 0, 0, 1]), "block_id=1 is unpinned more often"),
        (
            lambda: pool.cache([9, 7, 5, 1], [b"b", b"x", b"b", b"c"]),
            "block_id=1 is cached as b'a', not b'c'",
        ),
        (
            lambda: pool.cache([9, 1, 2, 3, 9], [b"u", b"a", b"b", b"c", b"v"]),
            "block_id=9 is cached as b'u', not b'v'",
        ),
        (
            lambda: pool.cache([6, 7, 8, 6, 7], [*wide[:3], wide[0], wide[4]]),
            "block_id=7 is cached as .* not ",
        ),
        (lambda: pool.cache([1], []), r"len\(ids\)=1 .* len\(keys\)=0"),
        (lambda: pool.holds([1, 2], [b"a"]), r"len\(ids\)=2 .* len\(keys\)=1"),
        (lambda: pool.record_copies([1, 2], [0]), "1 copies must be one for each of 2"),
        (lambda: pool.pin([1, "x"]), "flat list of ints"),
        (lambda: pool.pin([1, 2**70]), f"block_id={2**70} has more than 64 bits"),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
        pool.check()
        assert pool.find(keys).tolist() == resident
        assert state_of(pool) == before, message
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        DeviceBlockPool(1)


def test_the_null_block_is_passed_over(pool):
    before = state_of(pool)
    pool.touch([NULL_BLOCK] * 5)
    pool.pin([NULL_BLOCK])
    pool.unpin([NULL_BLOCK])
    pool.free([NULL_BLOCK] * 5)
    pool.cache([NULL_BLOCK], [b"null"])
    pool.evict([NULL_BLOCK])
    assert state_of(pool) == before
    assert pool.find_prefix([b"null"]) == []


def test_changes_of_the_free_queue_are_counted_and_pins_are_not():
    pool = DeviceBlockPool(8)
    for change in (
        lambda: pool.allocate(3),
        lambda: pool.free([1, 3]),
        lambda: pool.touch([3]),
        lambda: pool.evict([1]),
        lambda: pool.free([2, 3]),
        pool.reset,
    ):
        num_changes = pool.num_changes
        change()
        assert pool.num_changes > num_changes
    num_changes = pool.num_changes
    pool.pin([1])
    pool.unpin([1])
    assert pool.num_changes == num_changes


def test_unwritten_blocks_are_not_cached(pool):
    pool.unwritten.update([10, 11, 12])
    # An eviction does not write them: their holders would cache them.
    pool.evict(range(10, pool.num_blocks))
    blocks, keys = [10, 9, NULL_BLOCK, 11], [b"u", b"v", b"null", b"w"]
    assert pool.cache(blocks, keys) == [10, 11]
    assert pool.find([b"u", b"v", b"w"]).tolist() == [NO_BLOCK, 9, NO_BLOCK]
    assert pool.cache([9], [b"v"]) == []
    pool.take_events()
    before = state_of(pool)
    with pytest.raises(ValueError, match="block_id=9 is cached as b'v', not b'x'"):
        pool.cache([10, 9], [b"u", b"x"])
    assert state_of(pool) == before
    assert pool.unwritten == {10, 11, 12}


def test_reallocated_blocks_are_no_longer_unwritten(pool):
    pool.free([3, 2, 1])
    pool.unwritten.update(range(1, 24))
    new = pool.allocate(2)
    assert pool.unwritten == {*range(1, 24)} - {*new}
    assert pool.cache(new, [b"x", b"y"]) == []


def test_a_prefix_ends_at_the_first_hole(pool):
    assert pool.find_prefix([b"a", b"b", b"c", b"d"]) == [1, 2, 3, 4]
    assert pool.find_prefix(iter([b"a", b"b", b"x", b"c"])) == [1, 2]
    assert pool.find_prefix([b"x", b"a"]) == []
    assert pool.find_prefix([]) == []


def test_events_name_keys_as_they_were_given(pool):
    pool.evict([2, 9, 3, 2])
    pool.allocate(20)
    pool.free([1, 2, 3])
    pool.cache([1], [b"a"])
    pool.cache([2, 3], [b"e" * 32, b"f"])
    assert pool.take_events() == [
        OffloadingEvent([b"b", b"c"], 0, DEVICE_MEDIUM, True),
        OffloadingEvent([b"d", b"b"], 0, DEVICE_MEDIUM, True),
        OffloadingEvent([b"e" * 32, b"f"], 0, DEVICE_MEDIUM, False),
    ]
    assert pool.take_events() == []


def test_ids_of_any_kind_and_packed_keys_are_taken():
    pool = DeviceBlockPool(NUM_BLOCKS)
    ids = pool.allocate(4)
    keys = [bytes([block_id] * 32) for block_id in ids]
    pool.cache(np.array(ids, np.uint16), PackedKeys(keys, keys_to_words(keys)))
    pool.touch(tuple(ids))
    pool.pin(np.array(ids, np.int64))
    assert pool.find_prefix(PackedKeys(keys, keys_to_words(keys))) == ids
    assert pool.holds(ids, keys).all()
    pool.unpin(np.repeat(np.array(ids, np.int32), 2)[::2])  # not contiguous
    pool.free(ids * 2)
    pool.check()


def test_a_key_without_room_in_the_directory_is_not_cached(monkeypatch):
    # A directory of one bucket: with the ninth key it is full.
    monkeypatch.setattr(directory, "_MAX_LOAD", 4.0)
    pool = DeviceBlockPool(16, enable_events=True)
    ids = pool.allocate(12)
    keys = [bytes([number] * 32) for number in [*range(1, 10), 9, 1, 2]]
    pool.cache(ids, keys)
    # Neither the ninth key nor its duplicate; but the duplicates of the others are.
    assert pool.holds(ids, keys).tolist() == [True] * 8 + [False] * 2 + [True] * 2
    assert pool.find(keys).tolist() == [*ids[:8], -1, -1, *ids[:2]]
    (event,) = pool.take_events()
    assert event.block_hashes == [*keys[:8], *keys[10:]]
    pool.check()


def test_next_victims_are_the_next_free_blocks_that_hold_a_key():
    pool = DeviceBlockPool(6)
    blocks = pool.allocate(5)
    long_key = b"l" * 32
    pool.cache([blocks[1], blocks[3]], [long_key, b"short"])
    pool.free(blocks)
    held, _, _, keys = pool.next_victims(9)
    assert held.tolist() == [blocks[1], blocks[3]]
    assert list(keys) == [long_key, b"short"]
    held, _, _, keys = pool.next_victims(2)
    assert (held.tolist(), list(keys)) == ([blocks[1]], [long_key])
    assert list(pool.next_victims(0).keys) == []
    pool.pin([blocks[1]])
    assert list(pool.next_victims(9).keys) == [b"short"]
    plain = DeviceBlockPool(4)
    keys = [key_from_int(n) for n in range(3)]
    plain.cache(blocks := plain.allocate(3), keys)
    plain.free(blocks[1:])
    held, _, _, names = plain.next_victims(2)
    assert (held.tolist(), list(names)) == (blocks[1:], keys[1:])
    assert (len(names), names[0], list(names[1:])) == (2, keys[1], keys[2:])


def test_copies_are_forgotten_with_contents_and_for_all_blocks_of_a_key():
    pool = DeviceBlockPool(6)
    blocks = pool.allocate(4)
    keys = [key_from_int(n) for n in (1, 2, 1, 3)]
    pool.cache(blocks, keys)
    pool.free(blocks)
    pool.record_copies(blocks, np.arange(4, dtype=np.int32))
    victims = pool.next_victims(9)
    assert (victims.copies.tolist(), victims.rows.size) == ([0, 1, 2, 3], 0)
    pool.forget_copies(keys_to_words(keys[:1]))
    victims = pool.next_victims(9)
    assert victims.copies.tolist() == [NO_BLOCK, 1, NO_BLOCK, 3]
    assert victims.rows.tolist() == [0, 2]
    assert list(victims.keys) == [keys[0], keys[2]]
    pool.evict(blocks[1:2])
    pool.cache(blocks[1:2], keys[1:2])
    assert pool.next_victims(9).copies.tolist() == [NO_BLOCK] * 3 + [3]
    pool.check()
    assert pool.reset()
    pool.check()
