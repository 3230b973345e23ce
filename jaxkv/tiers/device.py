"""The device tier: who holds which block of the device, and what it caches.

The rules follow vLLM 0.19.1's `BlockPool`: a free block keeps its contents and its key
until it is needed for another use, the longest unused first. Pins are jaxkv's addition:
a transfer that reads a block keeps it from being allocated, but the block keeps its
place in the queue of free blocks. A block can be allocated if it is neither held nor
pinned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_whole, shown
from jaxkv.compiling import Bound, EntryPoints, copy_to_numpy
from jaxkv.keys.packed import (
    UnlistedKeys,
    is_foreign,
    lay_out,
    pack,
    words_to_keys,
)
from jaxkv.policies import directory as directory_lib
from jaxkv.policies.directory import Directory
from jaxkv.tiers import device_native as native
from jaxkv.tiers.base import DEVICE_MEDIUM, BlockIds, OffloadingEvent, as_ids
from jaxkv.tiers.device_native import NO_LINK
from jaxkv.types import KEY_BYTES, KEY_WORDS, NO_BLOCK, NULL_BLOCK, BlockKey

_NO_IDS = np.empty(0, np.int64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceTier:
    """The state of the blocks of the device, which `device_native` updates."""

    directory: Directory
    """The block that serves each key. An entry is a block id. Its `keys` also has the
    keys of blocks that hold a key and do not serve it."""
    has_key: NDArray[np.bool_]  # bool[B]. Whether the block has a key.
    copies: NDArray[np.int32]
    """i32[B]. The host block that is known to have the same contents, NO_BLOCK for
    none."""
    following: NDArray[np.int32]
    """i32[B]. The block with the same key that came next, -1 for none."""
    preceding: NDArray[np.int32]
    """i32[B]. The one that came before. The serving block has the complement of the
    last one here, a number below 0."""
    ref_cnt: NDArray[np.int32]
    """i32[B]. Holders of each block; always 0 for the null block."""
    pins: NDArray[np.int32]
    """i32[B]. Transfers and offers that keep each block from being allocated."""
    offers: NDArray[np.int32]
    """i32[B]. The pins of offers without an answer, included in `pins`."""
    newer: NDArray[np.int32]
    """i32[B]. The next free block after this one; the null block after the last, -1 for
    a block that is held."""
    older: NDArray[np.int32]
    """i32[B]. The free block before this one; the null block before the first, -1 for a
    block that is held."""
    num_free: NDArray[np.int32]  # i32[]. Blocks neither held nor pinned.
    num_pending_free: NDArray[np.int32]
    """i32[]. Blocks not held, and pinned by transfers alone."""


def init(num_blocks: int) -> DeviceTier:
    """Make the state of a tier of `num_blocks`, all free except the null block."""
    blocks = np.arange(num_blocks, dtype=np.int32)
    return DeviceTier(
        directory=copy_to_numpy(directory_lib.init(num_blocks)),
        has_key=np.zeros(num_blocks, np.bool_),
        copies=np.full(num_blocks, NO_BLOCK, np.int32),
        following=np.full(num_blocks, NO_LINK, np.int32),
        preceding=np.full(num_blocks, NO_LINK, np.int32),
        ref_cnt=np.zeros(num_blocks, np.int32),
        pins=np.zeros(num_blocks, np.int32),
        offers=np.zeros(num_blocks, np.int32),
        # The null block closes the ring.
        newer=np.roll(blocks, -1),
        older=np.roll(blocks, 1),
        num_free=np.array(num_blocks - 1, np.int32),
        num_pending_free=np.array(0, np.int32),
    )


def check(tier: DeviceTier) -> None:
    """Raise AssertionError if the state breaks an invariant."""
    num_blocks = len(tier.ref_cnt)
    assert tier.ref_cnt.min() >= 0
    assert tier.offers.min() >= 0
    assert (tier.pins >= tier.offers).all()
    assert tier.ref_cnt[NULL_BLOCK] == tier.pins[NULL_BLOCK] == 0
    assert not tier.has_key[NULL_BLOCK]
    assert (tier.copies[~tier.has_key] == NO_BLOCK).all()

    queue, block = [], int(tier.newer[NULL_BLOCK])
    while block != NULL_BLOCK:
        assert tier.older[tier.newer[block]] == block
        queue.append(block)
        assert len(queue) < num_blocks, "the queue has no end"
        block = int(tier.newer[block])
    unheld = np.flatnonzero(tier.ref_cnt == 0)[1:].tolist()
    assert sorted(queue) == unheld
    pins, offers = tier.pins[queue], tier.offers[queue]
    assert int(tier.num_free) == np.count_nonzero(pins == 0)
    assert int(tier.num_pending_free) == np.count_nonzero((pins > 0) & (offers == 0))

    directory = tier.directory
    used = np.flatnonzero(directory.entries < num_blocks)
    serving = np.asarray(directory.entries)[used].tolist()
    assert (np.asarray(directory.slots)[serving] == used).all()
    is_tagged = np.asarray(directory.tags).reshape(-1) != 0
    assert (is_tagged == (np.asarray(directory.entries) < num_blocks)).all()
    keys = [directory.keys[block].tobytes() for block in serving]
    assert len(set(keys)) == len(keys), "a key is served twice"
    seen = []
    for first, key in zip(serving, keys, strict=True):
        chain = [first]
        while (block := int(tier.following[chain[-1]])) != NO_LINK:
            assert int(tier.preceding[block]) == chain[-1]
            assert directory.keys[block].tobytes() == key
            chain.append(block)
            assert len(chain) <= num_blocks, "a chain has no end"
        assert int(tier.preceding[first]) == ~chain[-1]
        seen += chain
    assert sorted(seen) == np.flatnonzero(tier.has_key).tolist()


def _empty_words(num: int) -> NDArray[np.uint32]:
    return np.empty((num, KEY_WORDS), np.uint32)


class Victims(NamedTuple):
    """Blocks that hold a key, in the order of allocation. Good until the next call."""

    block_ids: NDArray[np.int64]  # i64[n].
    copies: NDArray[np.int64]
    """i64[n]. The host block of each, NO_BLOCK where none was noted."""
    rows: NDArray[np.int64]  # i64[m]. The rows without a copy.
    keys: Sequence[bytes]  # The keys of these.


class DeviceBlockPool:
    """Reference counts and prefix cache of the device's block pool.

    The null block may stand in any list of ids; it is passed over. A list may have an
    id more than once, which then counts as often. A call that raises changes nothing.

    Args:
        num_blocks: Blocks in the pool, the null block among them.
        enable_events: Keep events, for `take_events`.
        block_size: Tokens in a block; only repeated in events.

    Attributes:
        num_blocks: Blocks in the pool.
        num_changes: Grows with each change of the next block to allocate, of its
            contents, or of a known copy's loss; not with pins.
        block_size: Tokens in a block.
        unwritten: Blocks whose tokens were neither computed nor loaded; `cache` skips
            them. `OffloadScheduler` adds them, `allocate` removes the blocks it takes.
        state: The whole state, as a pytree of NumPy arrays that calls change.
        bound: The state as compiled functions take it.

    Raises:
        ValueError: If there is no block besides the null block, or there are too many.

    Example:
        >>> pool = DeviceBlockPool(num_blocks=3)
        >>> pool.allocate(2)
        [1, 2]
        >>> pool.cache([1, 2], [b"head", b"tail"])
        []
        >>> pool.free([2, 1])
        >>> pool.find_prefix([b"head", b"tail", b"other"])
        [1, 2]
        >>> pool.allocate(1)  # freed first, so allocated first
        [2]
        >>> pool.find_prefix([b"head", b"tail"])
        [1]
    """

    medium = DEVICE_MEDIUM
    _NOT_STATE = "bound", "_native", "_victims"

    def __init__(
        self, num_blocks: int, *, enable_events: bool = False, block_size: int = 0
    ) -> None:
        check_whole(0, num_blocks=num_blocks, block_size=block_size)
        if num_blocks < 2:
            raise ValueError(
                f"{num_blocks=} must be at least 2: the null block and one to use."
            )
        if num_blocks >= 1 << 31:
            raise ValueError(f"{num_blocks=} must be below 2**31: ids have 32 bits.")
        self.num_blocks = num_blocks
        self.num_changes = 0
        self.block_size = block_size
        self.unwritten: set[int] = set()
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        # Keys that are not of 32 bytes, as the caller knows them, by block.
        self._names: dict[int, bytes] = {}
        # Room for an answer of `next_victims`, kept from call to call.
        self._victims = _NO_IDS, _NO_IDS, _NO_IDS, _empty_words(0)
        self.state = init(num_blocks)
        self.bound = bound = Bound(self.state)
        keys = np.zeros((1, KEY_WORDS), np.uint32)
        some_keys = keys.view()
        some_keys.flags.writeable = False  # As callers' keys are.
        flags, ids = np.empty(1, np.bool_), _NO_IDS
        self._native = EntryPoints(
            native,
            {
                "find_outside": (bound, ids),
                "find": (bound, some_keys, np.empty(1, np.int32)),
                "find_prefix": (bound, some_keys, np.empty(1, np.int32)),
                "holds": (bound, ids, some_keys, flags),
                "next_free": (bound, 1, ids, flags, keys),
                "next_victims": (bound, 1, ids, ids, ids, keys),
                "note_copies": (bound, ids, ids),
                "forget_copies": (bound, keys),
                "allocate": (bound, 1, ids, flags, keys),
                "touch": (bound, ids),
                "free": (bound, ids),
                "pin": (bound, ids, False),
                "unpin": (bound, ids, False),
                "cache": (bound, ids, some_keys, flags),
                "evict": (bound, ids, flags, keys),
            },
        )

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return int(self.state.num_free)

    @property
    def num_pending_free(self) -> int:
        """Blocks that are no longer held, and that are free once transfers end.

        An engine that preempts until it has enough blocks counts these, too. Blocks
        that an offer without an answer would copy are not among them.
        """
        return int(self.state.num_pending_free)

    def ref_cnt(self, block_id: int) -> int:
        """Count the holders of a block."""
        return int(self.counts([block_id])[0, 0])

    def counts(self, block_ids: BlockIds) -> NDArray[np.int32]:
        """Read how many hold each of n blocks, and how many pin it: i32[2, n]."""
        ids = as_ids(block_ids)
        self._refuse_outside(ids)
        return np.stack([self.state.ref_cnt[ids], self.state.pins[ids]])

    def are_free(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Whether nobody holds each of n blocks, pins aside: bool[n]."""
        are_free: NDArray[np.bool_] = self.counts(block_ids)[0] == 0
        return are_free

    @property
    def has_cached(self) -> bool:
        """Whether a block has a key."""
        return bool(self.state.has_key.any())

    def find(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Find the block that serves each key: i32[n], NO_BLOCK where there is none.

        Of several blocks with the key it is the one cached first. They are not held
        until `touch` is called.
        """
        _, words = pack(keys)
        block_ids = np.empty(len(words), np.int32)
        self._native.find(self.bound, words, block_ids)
        return block_ids

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """List the blocks of the longest run of cached keys, from the first on.

        They are not held until `touch` is called.
        """
        _, words = pack(keys)
        block_ids = np.empty(len(words), np.int32)
        num_found = self._native.find_prefix(self.bound, words, block_ids)
        prefix: list[int] = block_ids[:num_found].tolist()
        return prefix

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Whether each of n blocks still holds its key, serving it or not: bool[n]."""
        ids, _, words, _ = self._pairs(block_ids, keys)
        is_held = np.empty(len(ids), np.bool_)
        if self._native.holds(self.bound, ids, words, is_held) >= 0:
            self._refuse_outside(ids)
        return is_held

    def allocate(self, num: int) -> list[int]:
        """Take blocks, evicting what they cached; each is held once.

        Raises:
            ValueError: If fewer are free, or `num` is negative; then nothing changes.
        """
        if type(num) is not int or num < 0:
            check_whole(0, num=num)
        if num > self.num_free:
            raise ValueError(
                f"{num=} blocks wanted, but only {self.num_free} of "
                f"{self.num_blocks} are free."
            )
        block_ids, evicted = self._take(self._native.allocate, num)
        self.num_changes += 1
        if self._events is not None or self._names or self.unwritten:
            # `evict` keeps them: the block's holder may still cache it.
            self.unwritten.difference_update(block_ids)
            self._note_evicted(block_ids, evicted())
        return block_ids

    def next_free(self, num: int) -> tuple[list[int], list[bytes | None]]:
        """Return the next blocks that `allocate` would take, and the keys lost then.

        If fewer than `num` are free, these; None for a block without a key.
        """
        block_ids, keys = self._take(self._native.next_free, self._cut_to_free(num))
        return block_ids, keys()

    def next_keys(self, num: int) -> NDArray[np.uint32]:
        """Return the keys that the blocks `allocate` would take next would lose.

        If fewer than `num` are free, of these: u32[n, 8], read-only. Blocks without a
        key are left out.
        """
        num = self._cut_to_free(num)
        _, has_key, words = self._shown(self._native.next_free, num)
        return UnlistedKeys(words[has_key]).words

    def next_victims(
        self, num: int, find: Callable[..., tuple[int, int]] | None = None
    ) -> Victims:
        """Return which of the `num` blocks that `allocate` would take next hold a key.

        If fewer are free, of these. `find` is a native function that does the same and
        may know of more copies.
        """
        num = self._cut_to_free(num)
        if len(self._victims[0]) < num:
            self._victims = *np.empty((3, num), np.int64), _empty_words(num)
        block_ids, copies, rows, words = self._victims
        num_found, num_bare = (find or self._native.next_victims)(
            self.bound, num, block_ids, copies, rows, words
        )
        block_ids, rows = block_ids[:num_found], rows[:num_bare]
        keys: Sequence[bytes] = UnlistedKeys(words[:num_bare])
        if self._names:
            keys = list(map(self._names.get, block_ids[rows].tolist(), keys))
        return Victims(block_ids, copies[:num_found], rows, keys)

    def note_copies(self, block_ids: BlockIds, copies: BlockIds) -> None:
        """Record the host block with a block's contents, NO_BLOCK for none.

        It is forgotten with the contents.

        Raises:
            ValueError: If an id is no block's, or there is not a copy for each.
        """
        ids, host_ids = as_ids(block_ids), as_ids(copies)
        if len(ids) != len(host_ids):
            raise ValueError(
                f"{len(host_ids)} copies must be one for each of {len(ids)}."
            )
        if self._native.note_copies(self.bound, ids, host_ids) >= 0:
            self._refuse_outside(ids)

    def forget_copies(self, words: NDArray[np.uint32] | None = None) -> None:
        """Forget which host blocks have some keys (u32[n, 8]); None for all."""
        if words is None:
            self.state.copies[:] = NO_BLOCK
            self.num_changes += 1
        elif self._native.forget_copies(self.bound, UnlistedKeys(words).words):
            self.num_changes += 1

    def touch(self, block_ids: BlockIds) -> None:
        """Hold blocks once more, so that they are not allocated."""
        ids = as_ids(block_ids)
        if self._native.touch(self.bound, ids) >= 0:
            self._refuse_outside(ids)
        self.num_changes += 1

    def free(self, block_ids: BlockIds) -> None:
        """Release blocks that were allocated or touched.

        Of those that become free, the first is allocated first: pass a prefix tail
        first.

        Raises:
            ValueError: If a block is not held as often; then none is released.
        """
        ids = as_ids(block_ids)
        bad = self._native.free(self.bound, ids)
        if bad >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[bad]} is freed more often than it is held."
            )
        self.num_changes += 1

    def pin(self, block_ids: BlockIds, *, is_offer: bool = False) -> None:
        """Keep blocks from being allocated, but at their place among the free ones.

        For transfers that read them: a block that is freed, or was free already, is
        allocated as early as if there had been no transfer, but not during it.
        `is_offer` is for an offer, which may be left without an answer:
        `num_pending_free` does not count the blocks then.
        """
        ids = as_ids(block_ids)
        if self._native.pin(self.bound, ids, is_offer) >= 0:
            self._refuse_outside(ids)

    def unpin(self, block_ids: BlockIds, *, is_offer: bool = False) -> None:
        """Remove pins, which were for an offer or not.

        Raises:
            ValueError: If a block is not pinned as often; then none is removed.
        """
        ids = as_ids(block_ids)
        bad = self._native.unpin(self.bound, ids, is_offer)
        if bad >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[bad]} is unpinned more often than it is pinned."
            )

    def cache(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
        """Make full, computed blocks findable by their keys.

        The blocks are held. A block that has its key is left alone. Returned are the
        blocks that were skipped, as they are `unwritten`.

        Raises:
            ValueError: If a block is known under another key, or is given two; then
                none is cached.
        """
        ids, names, words, has_foreign = self._pairs(block_ids, keys)
        if self.unwritten:
            skipped = [block for block in ids.tolist() if block in self.unwritten]
            if skipped:
                rows = np.flatnonzero(~np.isin(ids, skipped))
                self.cache(ids[rows], [names[row] for row in rows.tolist()])
                return skipped
        is_added = np.empty(len(ids), np.bool_)
        bad = self._native.cache(self.bound, ids, words, is_added)
        if bad >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[bad]} is cached as "
                f"{shown(self._known_as(ids, names, bad))}, not {shown(names[bad])}."
            )
        if has_foreign:
            self._names.update(
                (int(ids[row]), name)
                for row, name in enumerate(names)
                if is_foreign(name) and is_added[row]
            )
        if self._events is not None and is_added.any():
            self._record(list(compress(names, is_added.tolist())), removed=False)
        return []

    def evict(self, block_ids: BlockIds) -> None:
        """Forget the contents of blocks; they stay with their requests."""
        repeated = as_ids(block_ids)
        self._refuse_outside(repeated)
        ids = list(dict.fromkeys(repeated.tolist()))

        def evict(bound: Bound, num: int, *answer: Any) -> None:
            answer[0][:] = ids
            self._native.evict(bound, *answer)

        _, evicted = self._take(evict, len(ids))
        self.num_changes += 1
        self._note_evicted(ids, evicted())

    def reset(self) -> bool:
        """Forget the contents of all blocks; False if one is held or pinned."""
        if self.num_free < self.num_blocks - 1:
            return False
        empty = init(self.num_blocks)
        for old, new in zip(
            jax.tree.leaves(self.state.directory),
            jax.tree.leaves(empty.directory),
            strict=True,
        ):
            old[...] = new
        for links in (self.state.following, self.state.preceding):
            links[:] = NO_LINK
        self.forget_copies()
        self.state.has_key[:] = False
        self._names.clear()
        self.num_changes += 1
        self._record([], removed=True)
        return True

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last time; none if they are not kept.

        Every block that gets a key or loses it counts, so that a key that several
        blocks hold is there as often. A removal of no keys means that all were removed.
        """
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def warm_up(self) -> None:
        """Load, or compile, what the methods run, so that no later call waits for it.

        It takes seconds where the machine has not run them before, else part of one.
        """
        scratch = DeviceBlockPool(2)
        blocks, keys = scratch.allocate(1), [bytes(KEY_BYTES)]
        scratch.cache(blocks, keys)
        scratch.find(keys)
        scratch.find_prefix(keys)
        scratch.holds(blocks, keys)
        scratch.pin(blocks)
        scratch.unpin(blocks)
        scratch.touch(blocks)
        scratch.free(blocks * 2)
        scratch.next_free(1)
        scratch.note_copies(blocks, scratch.find(keys))
        scratch.forget_copies(pack(keys)[1])
        scratch.next_victims(1)
        scratch.evict(blocks)

    def check(self) -> None:
        """Raise AssertionError if the state breaks an invariant. For tests."""
        check(self.state)
        assert all(self.state.has_key[list(self._names)])

    def _cut_to_free(self, num: int) -> int:
        """Cut a number of blocks to those that are free."""
        check_whole(None, num=num)
        return max(min(num, self.num_free), 0)

    def _take(
        self, function: Callable[..., None], num: int
    ) -> tuple[list[int], Callable[[], list[bytes | None]]]:
        """Call a function that writes blocks and keys; the keys are listed later."""
        block_ids, has_key, words = self._shown(function, num)

        def keys() -> list[bytes | None]:
            rows = np.flatnonzero(has_key).tolist()
            listed: list[bytes | None] = [None] * num
            for row, key in zip(rows, words_to_keys(words[rows]), strict=True):
                listed[row] = self._names.get(int(block_ids[row]), key)
            return listed

        return block_ids.tolist(), keys

    def _shown(
        self, function: Callable[..., None], num: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.uint32]]:
        """Call a function that writes blocks, whether each has a key, and the keys."""
        block_ids = np.empty(num, np.int64)
        has_key = np.empty(num, np.bool_)
        words = _empty_words(num)
        function(self.bound, num, block_ids, has_key, words)
        return block_ids, has_key, words

    def _refuse_outside(self, block_ids: NDArray[Any]) -> None:
        """Raise ValueError if an id is no block's."""
        wrong = self._native.find_outside(self.bound, block_ids)
        if wrong >= 0:
            raise ValueError(
                f"block_id={block_ids[wrong]} must be in [0, {self.num_blocks})."
            )

    def _pairs(
        self, block_ids: BlockIds, keys: Sequence[BlockKey]
    ) -> tuple[NDArray[Any], Sequence[bytes], NDArray[np.uint32], bool]:
        """Return ids, names, words (u32[n, 8]), and whether any key is foreign."""
        ids = as_ids(block_ids)
        names, words, has_foreign = lay_out(keys)
        if len(names) != len(ids):
            raise ValueError(f"{len(ids)=} blocks must have as many {len(keys)=}.")
        return ids, names, words, has_foreign

    def _known_as(self, ids: NDArray[Any], keys: Sequence[BlockKey], row: int) -> bytes:
        """Return the key of a row's block; without one, the key of its first row."""
        block_id = int(ids[row])
        if not self.state.has_key[block_id]:
            return keys[int(np.argmax(ids == block_id))]
        (key,) = words_to_keys(self.state.directory.keys[block_id][None])
        return self._names.get(block_id, key)

    def _note_evicted(self, block_ids: list[int], keys: Sequence[bytes | None]) -> None:
        if self._names:
            for block_id in block_ids:
                self._names.pop(block_id, None)
        evicted = [key for key in keys if key is not None]
        if evicted:
            self._record(evicted, removed=True)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if self._events is not None:
            self._events.append(
                OffloadingEvent(block_hashes, self.block_size, DEVICE_MEDIUM, removed)
            )
