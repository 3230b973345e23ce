"""The device tier: reference counts, free queue and prefix cache of the device's pool.

The rules follow vLLM 0.19.1's `BlockPool`: a free block keeps its contents and its key
until it is allocated again, least recently used first. In addition, blocks may be
pinned: a block that a transfer reads is not allocated, but keeps its place in the free
queue. A block can be allocated if it is neither held nor pinned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, check_whole, shown
from jaxkv.compiling import Bound, EntryPoints, copy_to_numpy
from jaxkv.keys.packed import UnlistedKeys, is_foreign, lay_out, pack, words_to_keys
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
    """The state of the B device blocks, which `device_native` updates."""

    directory: Directory
    """Maps each key to the block that serves it: of the blocks with this key, the first
    one cached. `directory.keys` has the keys of all blocks, serving or not."""
    has_key: NDArray[np.bool_]  # bool[B].
    copies: NDArray[np.int32]
    """i32[B]. A host block with the same contents, NO_BLOCK if none is known."""
    following: NDArray[np.int32]
    """i32[B]. The next block cached with the same key, -1 for none."""
    preceding: NDArray[np.int32]
    """i32[B]. The previous block with the same key. For the serving block: ~id of the
    last block with the key, a number below 0."""
    ref_cnt: NDArray[np.int32]
    """i32[B]. Holders (requests) of each block; always 0 for the null block."""
    pins: NDArray[np.int32]
    """i32[B]. Transfers that keep each block from being allocated."""
    newer: NDArray[np.int32]
    """i32[B]. The next block in the free queue; the null block after the last, -1 for a
    held block."""
    older: NDArray[np.int32]
    """i32[B]. The previous block in the free queue; the null block before the first, -1
    for a held block."""
    num_free: NDArray[np.int32]  # i32[]. Blocks neither held nor pinned.
    num_pending_free: NDArray[np.int32]
    """i32[]. Blocks without holders that transfers pin."""


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
    assert tier.pins.min() >= 0
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
    pins = tier.pins[queue]
    assert int(tier.num_free) == np.count_nonzero(pins == 0)
    assert int(tier.num_pending_free) == np.count_nonzero(pins)

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
    """Free blocks with a key, in order of allocation. Overwritten by the next call."""

    block_ids: NDArray[np.int64]  # i64[n].
    copies: NDArray[np.int64]
    """i64[n]. The host copy of each block, NO_BLOCK if none was recorded."""
    rows: NDArray[np.int64]  # i64[m]. Rows of `block_ids` without a copy.
    keys: Sequence[bytes]  # The m keys of the blocks without a copy.


class DeviceBlockPool:
    """Reference counts and prefix cache of the device's block pool.

    In a list of ids, calls skip the null block, and count an id that is listed n times
    n times. A call that raises changes nothing.

    Args:
        num_blocks: Blocks in the pool, including the null block.
        enable_events: Whether to keep events for `take_events`.
        block_size: Tokens in a block, for events.

    Attributes:
        num_blocks: Blocks in the pool.
        num_changes: Grows when the free queue or the contents of its blocks change, or
            a known host copy is lost. Pins do not change it.
        block_size: Tokens in a block.
        unwritten: Blocks whose tokens were neither computed nor loaded; `cache` skips
            them. `OffloadScheduler` adds blocks, `allocate` removes those it returns.
        state: A pytree of NumPy arrays that calls update in place.
        bound: The state in the form that compiled functions take.

    Raises:
        ValueError: If there are fewer than 2 blocks, or too many.

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
        check_type(bool, "True or False", enable_events=enable_events)
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        # The caller's keys that are not of 32 bytes, by block.
        self._names: dict[int, bytes] = {}
        # Output buffers of `next_victims`, reused by each call.
        self._victims = _NO_IDS, _NO_IDS, _NO_IDS, _empty_words(0)
        self.state = init(num_blocks)
        self.bound = bound = Bound(self.state)
        keys = np.zeros((1, KEY_WORDS), np.uint32)
        input_keys = keys.view()
        input_keys.flags.writeable = False  # Callers' keys are read-only.
        flags, ids = np.empty(1, np.bool_), _NO_IDS
        self._native = EntryPoints(
            native,
            {
                "find_outside": (bound, ids),
                "find": (bound, input_keys, np.empty(1, np.int32)),
                "find_prefix": (bound, input_keys, np.empty(1, np.int32)),
                "holds": (bound, ids, input_keys, flags),
                "next_free": (bound, 1, ids, flags, keys),
                "next_victims": (bound, 1, ids, ids, ids, keys),
                "record_copies": (bound, ids, ids),
                "forget_copies": (bound, keys),
                "allocate": (bound, 1, ids, flags, keys),
                "touch": (bound, ids),
                "free": (bound, ids),
                "pin": (bound, ids),
                "unpin": (bound, ids),
                "cache": (bound, ids, input_keys, flags),
                "evict": (bound, ids, flags, keys),
            },
        )

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could return now."""
        return int(self.state.num_free)

    @property
    def num_pending_free(self) -> int:
        """Blocks that become free once transfers in flight end.

        An engine that preempts until it has enough blocks also counts these.
        """
        return int(self.state.num_pending_free)

    def ref_cnt(self, block_id: int) -> int:
        """Count the holders of a block."""
        return int(self.counts([block_id])[0, 0])

    def counts(self, block_ids: BlockIds) -> NDArray[np.int32]:
        """Return the holders and the pins of each of n blocks: i32[2, n]."""
        ids = as_ids(block_ids)
        self._refuse_outside(ids)
        return np.stack([self.state.ref_cnt[ids], self.state.pins[ids]])

    def are_free(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Whether each of n blocks has no holder, pinned or not: bool[n]."""
        are_free: NDArray[np.bool_] = self.counts(block_ids)[0] == 0
        return are_free

    @property
    def has_cached(self) -> bool:
        """Whether any block has a key."""
        return bool(self.state.has_key.any())

    def find(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Return the block that serves each key: i32[n], NO_BLOCK if there is none.

        Of several blocks with one key, the first one cached serves it. Call `touch` to
        hold the blocks.
        """
        _, words = pack(keys)
        block_ids = np.empty(len(words), np.int32)
        self._native.find(self.bound, words, block_ids)
        return block_ids

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the blocks of the longest cached prefix. Call `touch` to hold them."""
        _, words = pack(keys)
        block_ids = np.empty(len(words), np.int32)
        num_found = self._native.find_prefix(self.bound, words, block_ids)
        prefix: list[int] = block_ids[:num_found].tolist()
        return prefix

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Whether each of n blocks still has its key, serving it or not: bool[n]."""
        ids, _, words, _ = self._pack_pairs(block_ids, keys)
        is_held = np.empty(len(ids), np.bool_)
        if self._native.holds(self.bound, ids, words, is_held) >= 0:
            self._refuse_outside(ids)
        return is_held

    def allocate(self, num: int) -> list[int]:
        """Allocate blocks, each with one holder, and evict their keys.

        Raises:
            ValueError: If fewer are free, or `num` is negative; then nothing changes.
        """
        if type(num) is not int or num < 0:
            check_whole(0, num=num)
        if num > self.num_free:
            raise ValueError(
                f"{num=} blocks requested, but only {self.num_free} of "
                f"{self.num_blocks} are free."
            )
        block_ids, list_keys = self._list_blocks(self._native.allocate, num)
        self.num_changes += 1
        if self._events is not None or self._names or self.unwritten:
            # Not after `evict`: an evicted block's holder may still `cache` it.
            self.unwritten.difference_update(block_ids)
            self._record_evicted(block_ids, list_keys())
        return block_ids

    def next_free(self, num: int) -> tuple[list[int], list[bytes | None]]:
        """Return the next blocks to be allocated, and the keys that they would lose.

        If fewer are free, returns all free blocks. None is for a block without a key.
        """
        num = self._clamp_to_free(num)
        block_ids, list_keys = self._list_blocks(self._native.next_free, num)
        return block_ids, list_keys()

    def next_keys(self, num: int) -> NDArray[np.uint32]:
        """Return the keys of the next `num` blocks to be allocated, or all free blocks.

        u32[n, 8], read-only, without a row for blocks that have no key.
        """
        num = self._clamp_to_free(num)
        _, has_key, words = self._read_blocks(self._native.next_free, num)
        return UnlistedKeys(words[has_key]).words

    def next_victims(
        self, num: int, find: Callable[..., tuple[int, int]] | None = None
    ) -> Victims:
        """Return the blocks with a key among the next `num` blocks to be allocated.

        If fewer are free, among all free blocks. `find` replaces the native function,
        to look up unknown copies.
        """
        num = self._clamp_to_free(num)
        if len(self._victims[0]) < num:
            self._victims = *np.empty((3, num), np.int64), _empty_words(num)
        block_ids, copies, rows, words = self._victims
        num_victims, num_uncopied = (find or self._native.next_victims)(
            self.bound, num, block_ids, copies, rows, words
        )
        block_ids, rows = block_ids[:num_victims], rows[:num_uncopied]
        keys: Sequence[bytes] = UnlistedKeys(words[:num_uncopied])
        if self._names:
            keys = list(map(self._names.get, block_ids[rows].tolist(), keys))
        return Victims(block_ids, copies[:num_victims], rows, keys)

    def record_copies(self, block_ids: BlockIds, copies: BlockIds) -> None:
        """Record the host copy of each block, until the block is evicted.

        NO_BLOCK is for a block without a copy.

        Raises:
            ValueError: If an id is out of range, or the lengths differ.
        """
        ids, host_ids = as_ids(block_ids), as_ids(copies)
        if len(ids) != len(host_ids):
            raise ValueError(
                f"{len(host_ids)} copies must be one for each of {len(ids)}."
            )
        if self._native.record_copies(self.bound, ids, host_ids) >= 0:
            self._refuse_outside(ids)

    def forget_copies(self, words: NDArray[np.uint32] | None = None) -> None:
        """Forget the host copies of some keys (u32[n, 8]), or all if None."""
        if words is None:
            self.state.copies[:] = NO_BLOCK
            self.num_changes += 1
        elif self._native.forget_copies(self.bound, UnlistedKeys(words).words):
            self.num_changes += 1

    def touch(self, block_ids: BlockIds) -> None:
        """Add a holder to blocks, so that they are not allocated."""
        ids = as_ids(block_ids)
        if self._native.touch(self.bound, ids) >= 0:
            self._refuse_outside(ids)
        self.num_changes += 1

    def free(self, block_ids: BlockIds) -> None:
        """Remove a holder from blocks that were allocated or touched.

        The first block to become free is allocated first: pass a prefix's tail first.

        Raises:
            ValueError: If a block has too few holders; then none is released.
        """
        ids = as_ids(block_ids)
        bad_row = self._native.free(self.bound, ids)
        if bad_row >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[bad_row]} is freed more often than it is held."
            )
        self.num_changes += 1

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks that a transfer reads from being allocated.

        A pinned block keeps its place in the free queue: once unpinned, it is allocated
        as early as if there had been no transfer.
        """
        ids = as_ids(block_ids)
        if self._native.pin(self.bound, ids) >= 0:
            self._refuse_outside(ids)

    def unpin(self, block_ids: BlockIds) -> None:
        """Remove pins.

        Raises:
            ValueError: If a block has too few pins; then none is removed.
        """
        ids = as_ids(block_ids)
        bad_row = self._native.unpin(self.bound, ids)
        if bad_row >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[bad_row]} is unpinned more often than it is pinned."
            )

    def cache(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
        """Make full, computed blocks findable by their keys.

        The caller holds the blocks. A block that already has its key is unchanged.
        Blocks that are `unwritten` are skipped and returned.

        Raises:
            ValueError: If a block already has another key, or is listed with two; then
                none is cached.
        """
        ids, names, words, has_foreign = self._pack_pairs(block_ids, keys)
        if self.unwritten:
            skipped = [block for block in ids.tolist() if block in self.unwritten]
            if skipped:
                rows = np.flatnonzero(~np.isin(ids, skipped))
                self.cache(ids[rows], [names[row] for row in rows.tolist()])
                return skipped
        is_added = np.empty(len(ids), np.bool_)
        row = self._native.cache(self.bound, ids, words, is_added)
        if row >= 0:
            self._refuse_outside(ids)
            raise ValueError(
                f"block_id={ids[row]} is cached as "
                f"{shown(self._key_of_row(ids, names, row))}, not {shown(names[row])}."
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
        """Remove the keys of blocks; the requests that hold the blocks keep them."""
        listed_ids = as_ids(block_ids)
        self._refuse_outside(listed_ids)
        ids = list(dict.fromkeys(listed_ids.tolist()))

        def evict(bound: Bound, num: int, *outputs: Any) -> None:
            outputs[0][:] = ids
            self._native.evict(bound, *outputs)

        _, list_keys = self._list_blocks(evict, len(ids))
        self.num_changes += 1
        self._record_evicted(ids, list_keys())

    def reset(self) -> bool:
        """Remove all keys; return False, unchanged, if a block is held or pinned."""
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
        """Return the events since the last call; none if they are not kept.

        Each block that gets or loses a key is listed, even if several blocks have the
        same key. A removal without keys means that all keys were removed.
        """
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def warm_up(self) -> None:
        """Compile or load the native functions, so that no later call waits for them.

        It takes seconds the first time on a machine, later less than one.
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
        scratch.record_copies(blocks, scratch.find(keys))
        scratch.forget_copies(pack(keys)[1])
        scratch.next_victims(1)
        scratch.evict(blocks)

    def check(self) -> None:
        """Raise AssertionError if the state breaks an invariant. For tests."""
        check(self.state)
        assert all(self.state.has_key[list(self._names)])

    def _clamp_to_free(self, num: int) -> int:
        check_whole(None, num=num)
        return max(min(num, self.num_free), 0)

    def _list_blocks(
        self, function: Callable[..., None], num: int
    ) -> tuple[list[int], Callable[[], list[bytes | None]]]:
        """Return `_read_blocks` as lists; the function converts the keys, if needed."""
        block_ids, has_key, words = self._read_blocks(function, num)

        def list_keys() -> list[bytes | None]:
            rows = np.flatnonzero(has_key).tolist()
            keys: list[bytes | None] = [None] * num
            for row, key in zip(rows, words_to_keys(words[rows]), strict=True):
                keys[row] = self._names.get(int(block_ids[row]), key)
            return keys

        return block_ids.tolist(), list_keys

    def _read_blocks(
        self, function: Callable[..., None], num: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.uint32]]:
        """Call a native function that writes block ids, has_key flags, and keys."""
        block_ids = np.empty(num, np.int64)
        has_key = np.empty(num, np.bool_)
        words = _empty_words(num)
        function(self.bound, num, block_ids, has_key, words)
        return block_ids, has_key, words

    def _refuse_outside(self, block_ids: NDArray[Any]) -> None:
        """Raise ValueError if an id is out of range."""
        row = self._native.find_outside(self.bound, block_ids)
        if row >= 0:
            raise ValueError(
                f"block_id={block_ids[row]} must be in [0, {self.num_blocks})."
            )

    def _pack_pairs(
        self, block_ids: BlockIds, keys: Sequence[BlockKey]
    ) -> tuple[NDArray[Any], Sequence[bytes], NDArray[np.uint32], bool]:
        """Return ids, keys, words (u32[n, 8]), and whether any key is hashed."""
        ids = as_ids(block_ids)
        names, words, has_foreign = lay_out(keys)
        if len(names) != len(ids):
            raise ValueError(f"{len(ids)=} blocks must have as many {len(keys)=}.")
        return ids, names, words, has_foreign

    def _key_of_row(
        self, ids: NDArray[Any], keys: Sequence[BlockKey], row: int
    ) -> bytes:
        """Return the key of a row's block, or the first key listed for it in `ids`."""
        block_id = int(ids[row])
        if not self.state.has_key[block_id]:
            return keys[int(np.argmax(ids == block_id))]
        (key,) = words_to_keys(self.state.directory.keys[block_id][None])
        return self._names.get(block_id, key)

    def _record_evicted(self, ids: list[int], keys: Sequence[bytes | None]) -> None:
        if self._names:
            for block_id in ids:
                self._names.pop(block_id, None)
        evicted = [key for key in keys if key is not None]
        if evicted:
            self._record(evicted, removed=True)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if self._events is not None:
            self._events.append(
                OffloadingEvent(block_hashes, self.block_size, DEVICE_MEDIUM, removed)
            )
