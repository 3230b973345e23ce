"""`DeviceBlockPool` against vLLM's block pool in plain Python, and what it refuses."""

import random

import jax
import numpy as np
import pytest

from jaxkv.keys import PackedKeys, key_from_int, keys_to_words
from jaxkv.policies import directory
from jaxkv.tiers.base import DEVICE_MEDIUM, OffloadingEvent
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.block_pool import BlockPool

NUM_BLOCKS = 24
KEYS = [b"key %d" % number for number in range(9)] + [bytes([7] * 32)]


class PinnablePool(BlockPool):
    """The oracle, with pins: a pinned block is passed over, and keeps its place."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, enable_events=True)
        self.pins = [0] * num_blocks
        self.offers = [0] * num_blocks  # Those of the pins.

    @property
    def num_pending_free(self):
        ids = [block.block_id for block in self.free_queue]
        return sum(self.pins[b] > 0 and not self.offers[b] for b in ids)

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
        """Free blocks of which some may be repeated; the first place counts."""
        once = dict.fromkeys(ids)
        repeats = list(ids)
        for block_id in once:
            repeats.remove(block_id)
        self.free_blocks([self.blocks[b] for b in repeats])
        self.free_blocks([self.blocks[b] for b in once])


class Both:
    """The pool and the oracle, side by side."""

    def __init__(self, seed):
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.pool = DeviceBlockPool(NUM_BLOCKS, enable_events=True, block_size=16)
        self.twin = PinnablePool(NUM_BLOCKS)

    def some(self, ids, most=9):
        return self.rng.choices(ids, k=self.rng.randint(1, most)) if ids else []

    def releases(self, counts):
        """Choose what to let go of, no more often than it is held or pinned."""
        all_held = [b for b, count in enumerate(counts) for _ in range(count)]
        self.rng.shuffle(all_held)
        return all_held[: self.rng.randint(0, len(all_held))]

    @property
    def ref_cnt(self):
        return [block.ref_cnt for block in self.twin.blocks]

    def allocate(self):
        num = self.rng.randint(0, min(9, self.twin.num_free))
        expected = [block.block_id for block in self.twin.get_new_blocks(num)]
        assert self.pool.allocate(num) == expected

    def touch(self):
        ids = self.some(range(1, NUM_BLOCKS))
        self.pool.touch(np.array(ids))
        self.twin.touch(self.twin.blocks[b] for b in ids)

    def free(self):
        ids = self.releases(self.ref_cnt)
        self.pool.free(ids)
        self.twin.free(ids)

    def pin(self):
        ids = self.some(range(1, NUM_BLOCKS), most=4)
        self.pool.pin(ids)
        for block_id in ids:
            self.twin.pins[block_id] += 1

    def unpin(self):
        pairs = zip(self.twin.pins, self.twin.offers, strict=True)
        ids = self.releases([pins - offers for pins, offers in pairs])
        self.pool.unpin(ids)
        for block_id in ids:
            self.twin.pins[block_id] -= 1

    def pin_offer(self):
        ids = self.some(range(1, NUM_BLOCKS), most=4)
        self.pool.pin(ids, is_offer=True)
        for block_id in ids:
            self.twin.pins[block_id] += 1
            self.twin.offers[block_id] += 1

    def unpin_offer(self):
        ids = self.releases(self.twin.offers)
        self.pool.unpin(ids, is_offer=True)
        for block_id in ids:
            self.twin.pins[block_id] -= 1
            self.twin.offers[block_id] -= 1

    def cache(self):
        ids = self.some(range(1, NUM_BLOCKS))
        # Few keys, so that most are duplicates, and some blocks are repeated.
        keys = {b: self.twin.blocks[b].key or self.rng.choice(KEYS) for b in ids}
        self.pool.cache(ids, [keys[b] for b in ids])
        for block_id, key in keys.items():
            if self.twin.blocks[block_id].key is None:
                self.twin.cache_block(self.twin.blocks[block_id], key)

    def evict(self):
        ids = self.some(range(NUM_BLOCKS))
        self.pool.evict(ids)
        self.twin.evict_blocks(ids)

    def reset(self):
        assert self.pool.reset() == self.twin.reset_prefix_cache()

    def release_all(self):
        while any(self.twin.offers):
            self.unpin_offer()
        pins = [b for b, count in enumerate(self.twin.pins) for _ in range(count)]
        held = [b for b, count in enumerate(self.ref_cnt) for _ in range(count)]
        self.pool.unpin(pins)
        self.twin.pins = [0] * NUM_BLOCKS
        self.pool.free(held)
        self.twin.free(held)

    def compare(self):
        assert self.pool.num_free == self.twin.num_free
        assert self.pool.num_pending_free == self.twin.num_pending_free
        blocks = map(self.twin.get_cached_block, KEYS)
        expected = [block.block_id if block else NO_BLOCK for block in blocks]
        assert self.pool.find(KEYS).tolist() == expected
        waiting = [(block.block_id, block.key) for block in self.twin.waiting]
        assert list(zip(*self.pool.next_free(99), strict=True)) == waiting
        all_blocks = self.twin.blocks[1:]
        ids = [block.block_id for block in all_blocks]
        key = self.rng.choice(KEYS)
        held = [block.key == key for block in all_blocks]
        assert self.pool.holds(ids, [key] * len(ids)).tolist() == held
        assert [self.pool.ref_cnt(b) for b in ids[:2]] == self.ref_cnt[1:3]
        self.pool.check()

    def compare_events(self):
        expected = [
            (key, event.removed)
            for event in self.twin.take_events()
            for key in event.keys or (None,)
        ]
        events = self.pool.take_events()
        assert {(e.block_size, e.medium) for e in events} <= {(16, DEVICE_MEDIUM)}
        assert [
            (key, event.removed)
            for event in events
            for key in event.block_hashes or (None,)
        ] == expected


@pytest.mark.parametrize("seed", range(8))
def test_does_what_the_plain_pool_does(seed):
    both = Both(seed)
    actions = {
        both.allocate: 6,
        both.touch: 2,
        both.free: 6,
        both.pin: 2,
        both.unpin: 4,
        both.pin_offer: 1,
        both.unpin_offer: 2,
        both.cache: 8,
        both.evict: 1,
        both.reset: 1,
        both.release_all: 1,
    }
    for _ in range(1000):
        (action,) = both.rng.choices(list(actions), list(actions.values()))
        action()
        both.compare()
        both.compare_events()
    both.release_all()
    both.reset()
    both.compare()
    both.compare_events()


def state_of(pool):
    """Everything that a pool knows, bit for bit."""
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


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda p: p.allocate(21), "num=21 blocks wanted, but only 20 of 24 are free"),
        (lambda p: p.allocate(-1), "num=-1 must be at least 0"),
        (lambda p: p.free([1, 2, 3, 0, 2]), "block_id=2 is freed more often"),
        (lambda p: p.free([4]), "block_id=4 is freed more often than it is held"),
        (lambda p: p.unpin([3, 3]), "block_id=3 is unpinned more often than"),
        (lambda p: p.unpin([3, 0, 0, 0, 1]), "block_id=1 is unpinned more often"),
        (lambda p: p.unpin([3], is_offer=True), "block_id=3 is unpinned more often"),
        (lambda p: p.touch([1, 24]), r"block_id=24 must be in \[0, 24\)"),
        (lambda p: p.pin([1, 2, 3, 4, -1]), r"block_id=-1 must be in \[0, 24\)"),
        (
            lambda p: p.cache([9, 8, 7, 6, 5, 1], [b"b", b"x", b"y", b"z", b"b", b"c"]),
            "block_id=1 is cached as b'a', not b'c'",
        ),
        (
            lambda p: p.cache([9, 1, 2, 3, 9], [b"u", b"a", b"b", b"c", b"v"]),
            "block_id=9 is cached as b'u', not b'v'",
        ),
        (lambda p: p.cache([1], []), r"len\(ids\)=1 .* len\(keys\)=0"),
        (lambda p: p.holds([1, 2], [b"a"]), r"len\(ids\)=2 .* len\(keys\)=1"),
    ],
)
def test_what_is_refused_changes_nothing(pool, refused, message):
    before = state_of(pool)
    found = pool.find([b"a", b"b", b"c", b"d", b"x"]).tolist()
    with pytest.raises(ValueError, match=message):
        refused(pool)
    pool.check()
    assert pool.find([b"a", b"b", b"c", b"d", b"x"]).tolist() == found
    assert state_of(pool) == before


def test_what_is_no_list_of_ids_is_refused(pool):
    for ids in ([1.0], [[1]], ["1"]):
        with pytest.raises(TypeError, match="must be a flat list of ints"):
            pool.touch(ids)
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        DeviceBlockPool(1)


def test_a_pinned_block_keeps_its_place_but_is_not_taken(pool):
    pool.free([3, 2, 1])
    pool.touch([4])
    assert pool.num_free == 21
    assert pool.allocate(18) == list(range(6, 24))
    assert pool.next_free(9) == ([5, 2, 1], [b"b", b"b", b"a"])
    pool.unpin([3])
    assert pool.next_free(9) == ([5, 3, 2, 1], [b"b", b"c", b"b", b"a"])
    pool.pin([3, 3, 2])
    assert pool.allocate(2) == [5, 1]
    pool.unpin([3])
    assert pool.num_free == 0
    pool.unpin([2, 3])
    assert pool.allocate(2) == [3, 2]


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


def test_unwritten_blocks_are_not_cached(pool):
    pool.unwritten.update([10, 11, 12])
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


def test_blocks_are_no_longer_unwritten_once_they_are_something_else(pool):
    pool.free([3, 2, 1])
    pool.unwritten.update(range(1, 24))
    new = pool.allocate(2)
    assert pool.unwritten == {*range(1, 24)} - {*new}
    assert pool.cache(new, [b"x", b"y"]) == []


def test_an_eviction_does_not_write_what_was_unwritten(pool):
    """Whoever holds the blocks would cache them, as the mark was gone."""
    pool.unwritten.update([10, 11])
    pool.evict(range(pool.num_blocks))
    assert pool.unwritten == {10, 11}
    assert pool.cache([10, 9, 11], [b"u", b"v", b"w"]) == [10, 11]
    assert pool.find([b"u", b"v", b"w"]).tolist() == [NO_BLOCK, 9, NO_BLOCK]


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


def test_duplicates_of_one_batch_serve_in_its_order():
    pool = DeviceBlockPool(NUM_BLOCKS, enable_events=True)
    ids = pool.allocate(12)
    order = ids[::-1]
    pool.cache(order, [b"same"] * 12)
    pool.evict([*order[:3], order[5], order[4], order[11]])
    served = []
    while found := pool.find_prefix([b"same"]):
        served += found
        pool.evict(found)
        pool.check()
    assert served == [order[row] for row in (3, 6, 7, 8, 9, 10)]


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


def test_what_finds_no_room_in_the_directory_is_not_cached(monkeypatch):
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


def test_a_cache_call_that_contradicts_itself_late_changes_nothing(pool):
    before = state_of(pool)
    keys = [bytes([number] * 32) for number in range(5)]
    with pytest.raises(ValueError, match=r"block_id=7 is cached as .* not "):
        pool.cache([6, 7, 8, 6, 7], [*keys[:3], keys[0], keys[4]])
    assert state_of(pool) == before


def test_a_reset_leaves_the_order_of_the_free_blocks(pool):
    pool.unpin([3])
    pool.free([3, 1, 2])
    order, _ = pool.next_free(99)
    assert pool.reset()
    assert pool.next_free(99) == (order, [None] * len(order))
    assert pool.find([b"a", b"b"]).tolist() == [NO_BLOCK] * 2
    pool.check()


def test_ids_that_are_no_blocks_are_refused_and_change_nothing():
    pool = DeviceBlockPool(4)
    pool.allocate(2)
    pool.cache([1], [b"a"])
    before = jax.tree.map(np.array, pool.state)
    calls = {
        "touch": lambda ids: pool.touch(ids),
        "free": lambda ids: pool.free(ids),
        "pin": lambda ids: pool.pin(ids),
        "unpin": lambda ids: pool.unpin(ids),
        "cache": lambda ids: pool.cache(ids, [b"k"] * len(ids)),
        "holds": lambda ids: pool.holds(ids, [b"k"] * len(ids)),
        "evict": lambda ids: pool.evict(ids),
        "counts": lambda ids: pool.counts(ids),
    }
    for call in calls.values():
        for wrong, why in ((4, "must be in"), (-1, "must be in"), (2**70, "64 bits")):
            with pytest.raises(ValueError, match=f"block_id={wrong} .*{why}"):
                call([1, wrong])
            jax.tree.map(np.testing.assert_array_equal, before, pool.state)
        with pytest.raises(TypeError, match="flat list of ints"):
            call([1, "x"])


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
    held, _, _, found = plain.next_victims(2)
    assert (held.tolist(), list(found)) == (blocks[1:], keys[1:])
    assert (len(found), found[0], list(found[1:])) == (2, keys[1], keys[2:])


def test_copies_are_forgotten_with_contents_and_for_all_blocks_of_a_key():
    pool = DeviceBlockPool(6)
    blocks = pool.allocate(4)
    keys = [key_from_int(n) for n in (1, 2, 1, 3)]
    pool.cache(blocks, keys)
    pool.free(blocks)
    with pytest.raises(ValueError, match="3 copies must be one for each of 4"):
        pool.note_copies(blocks, [0, 1, 2])
    pool.note_copies(blocks, np.arange(4, dtype=np.int32))
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
