"""The index of a tier, from block keys to block ids; bytes in, Python values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, check_whole, shown
from jaxkv.keys.packed import (
    PackedKeys,
    UnlistedKeys,
    check_are_bytes,
    is_foreign,
    key_from_foreign,
    lay_out,
    pack,
    words_to_keys,
)
from jaxkv.policies import get_policy_maker, make_retained
from jaxkv.policies.base import Policy
from jaxkv.policies.facts import (
    BEGIN,
    FINISH,
    RETAIN,
    begun,
    check_kind,
    finished,
    retained,
)
from jaxkv.policies.lru import LRUState, next_victims
from jaxkv.policies.retained import RELEASE
from jaxkv.policies.reuse import ReuseTable
from jaxkv.tiers.base import (
    HOST_MEDIUM,
    BlockIds,
    OffloadingEvent,
    Placement,
    as_ids,
    refuse_outside,
)
from jaxkv.tiers.device import DeviceBlockPool, Victims
from jaxkv.tiers.executors import (
    Executor,
    ExecutorName,
    NativeExecutor,
    Positions,
    Store,
    Words,
    make_executor,
)
from jaxkv.tiers.key_memory import (
    MAX_TRACKED,
    RetentionNotes,
    ReuseFilter,
)
from jaxkv.tiers.learned import make_emptied, resume
from jaxkv.tiers.retention import Retention, check_retention
from jaxkv.tiers.snapshot import Snapshot, take_snapshot
from jaxkv.types import KEY_BYTES, NO_BLOCK, STOPS, BlockKey, Stop

_MIN_MAX_BATCH = 4096
NO_IDS = np.empty(0, np.int64)
_NO_POSITIONS = np.empty(0, np.int32)
_TIMES = 1 << 32  # Policies have times as 32-bit milliseconds.
_MAX_COUNT = (1 << 31) - 1


class BlockIndex:
    """Maps the keys of a tier's blocks to block ids, and evicts by a cache policy.

    `place` allocates a block for a key, `publish` makes it readable, and `find` returns
    it. Misuse raises a ValueError, and a call that raises changes nothing.

    Keys are any `bytes`. Keys of 32 bytes, such as keys of `jaxkv.keys`, are used
    directly; others are hashed with SHA-256 first.

    Args:
        block_size: Tokens in a block, for events.
        num_blocks: Blocks in the tier.
        cache_policy: Chooses the blocks to evict when the tier is full: a registered
            name, such as "lru" or "hazard" (`jaxkv.policy_names`), or a `Policy` made
            for `num_blocks` and for batches of at least `num_blocks` keys.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only keys with at least this many look-ups, as vLLM's
            `FilterReusedOffloadingManager` does; 0 or 1 to store every offered key.
        max_unseen_blocks: If a look-up has more never-seen keys than this, store only
            the first ones; the others once they are looked up again. None: no limit.
        max_tracker_size: Max keys that the two look-up filters track, and max absent
            keys whose priority is kept until they are stored. The oldest are forgotten.
        retention: Whether `retain` can set priorities, with any policy; see
            `jaxkv.make_retained`.
        executor: "native" for compiled functions that update NumPy arrays, if the
            policy has them; "xla" for the pure functions as XLA programs.
        medium: The tier's name in events.

    Raises:
        ValueError: If a number is too small, or the policy is unknown or was made for
            other sizes.
        TypeError: If the policy is neither a name nor a `Policy`.

    Example:
        >>> index = BlockIndex(block_size=16, num_blocks=2)
        >>> blocks = index.place([b"a", b"b"]).block_ids
        >>> index.publish(blocks, [b"a", b"b"])
        >>> index.find([b"a", b"b", b"c"]).tolist()
        [0, 1, -1]
        >>> index.place([b"c"]).evicted_keys
        [b'a']
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        cache_policy: str | Policy = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
        max_unseen_blocks: int | None = None,
        max_tracker_size: int = MAX_TRACKED,
        retention: bool = False,
        executor: ExecutorName = "native",
        medium: str = HOST_MEDIUM,
    ) -> None:
        for name, value, min_value in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("store_threshold", store_threshold, 0),
            ("max_unseen_blocks", max_unseen_blocks, 0),
            ("max_tracker_size", max_tracker_size, 1),
        ):
            if not (value is None and name == "max_unseen_blocks"):
                check_whole(min_value, **{name: value})
        if num_blocks >= 1 << 31:
            raise ValueError(f"{num_blocks=} must be below 2**31: ids have 32 bits.")
        self.medium = medium
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.policy = _as_policy(cache_policy, num_blocks)
        self._policy_uses_keys = self.policy.listens
        if retention and not self.policy.retains:
            self.policy = make_retained(self.policy)
        self.listens = self.policy.listens  # Whether it uses events of requests.
        self.retains = self.policy.retains
        check_type(bool, "True or False", enable_events=enable_events)
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.num_held_blocks = 0  # Including stores in progress.
        self.num_evicted = 0
        self.num_removed = 0  # Evicted, discarded, cleared, or failed to store.
        # u32[n, 8] each. Keys of blocks removed other than by `clear`; a reader takes
        # and deletes them. None if there is no reader.
        self.removed_keys: list[Words] | None = None
        self.num_found = 0  # Added by listings and probes.
        self.num_unindexed = 0  # In the medium, but without room in this index.
        # Keys that a look-up filter, or the policy, kept from being stored.
        self.num_skipped = self.num_declined = 0
        self._executor_name: ExecutorName = executor
        self.executor: Executor = make_executor(self.policy, executor)
        # Callers' keys of other lengths than 32 bytes, by their hash.
        self._names: dict[BlockKey, bytes] = {}
        self._reuse = None
        if store_threshold > 1 or max_unseen_blocks is not None:
            self._reuse = ReuseFilter(
                store_threshold, max_tracker_size, max_unseen_blocks
            )
        self._notes = RetentionNotes(max_tracker_size if self.retains else 0)
        self._now_ms = 0  # The time of the last notification.
        self._has_time = False  # Whether there was a notification.

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Record a use of each key of a prefix; the first key becomes most recent."""
        _, words = pack(block_hashes)
        if 0 < len(words) <= self.policy.max_batch:
            self.executor.touch(words, True)
        else:
            self._touch_in_batches(words, True)

    def reorder(self, block_hashes: Iterable[bytes]) -> None:
        """Reorder keys as `touch` does, without counting a use.

        A prefix that is used once may be stored in several batches. A policy that
        distinguishes one use from two (ARC) must count it once.
        """
        _, words = pack(block_hashes)
        if 0 < len(words) <= self.policy.max_batch:
            self.executor.touch(words, False)
        else:
            self._touch_in_batches(words, False)

    def retain(
        self,
        block_hashes: Iterable[bytes],
        retention: Retention | None,
        now_ms: int,
    ) -> None:
        """Set the priority of blocks and how long it lasts; None removes it.

        All keys get the priority; its `num_tokens` is ignored. If a block already has
        a priority that is now higher than the new one, it keeps the old one. Absent
        keys get the priority when they are stored, unless it has ended by then.
        `now_ms` is on the clock of `begin_request`.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, retention=True)
            >>> index.retain([b"a"], Retention(priority=80, half_life_s=60), now_ms=0)
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.place([b"c"]).evicted_keys
            [b'b']
        """
        if not self.retains:
            raise ValueError(
                "retain() needs priorities: make the manager with retention=True."
            )
        check_retention(retention)
        check_whole(None, now_ms=now_ms)
        names, _ = pack(block_hashes)
        if not names:
            return
        self._advance_time(int(now_ms))
        if retention is None:
            self._notes.forget(names)
        else:
            self._notes.note(names, retention, self._now_ms)
        self._set_priority(names, retention, self._now_ms)

    def begin_request(
        self,
        block_hashes: Iterable[bytes],
        num_tokens: int,
        now_ms: int,
        positions: Sequence[int] | None = None,
        kind: int | None = None,
    ) -> int:
        """Notify a listening policy of a new request, before its blocks are used.

        Pass the keys of all full blocks of the prompt, resident or not. `now_ms` counts
        from any fixed moment. If the keys form several prefixes, such as one per layer
        group, `positions` has the index of each block in its prefix. `kind` is a number
        from 0 to 255 of the caller's choice, the same for requests whose prefixes are
        used again alike, such as those of a route. Returns the mark that
        `finish_request` takes.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, cache_policy="hazard")
            >>> mark = index.begin_request([b"a", b"b"], num_tokens=40, now_ms=0)
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.finish_request([b"a", b"b"], mark, 1000, 200, "end_turn")
        """
        check_whole(0, _MAX_COUNT, num_tokens=num_tokens)
        check_whole(None, now_ms=now_ms)
        check_kind(kind)
        rows = self._rows_for_policy(block_hashes, positions)
        if rows is None:
            return 0
        self._advance_time(int(now_ms))
        words, block_positions = rows
        facts = begun(self._now_ms % _TIMES, int(num_tokens), kind)
        return self.executor.note(words, BEGIN, block_positions, facts)

    def finish_request(
        self,
        block_hashes: Iterable[bytes],
        mark: int,
        now_ms: int,
        num_output_tokens: int | None = None,
        stop: Stop | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Notify a listening policy that a request ended, with all its full blocks.

        `num_output_tokens` and `stop` are None if unknown.
        """
        check_whole(-_MAX_COUNT - 1, _MAX_COUNT, mark=mark)
        check_whole(None, now_ms=now_ms)
        if num_output_tokens is not None:
            check_whole(0, _MAX_COUNT, num_output_tokens=num_output_tokens)
        if stop is not None and (not isinstance(stop, str) or stop not in STOPS):
            raise ValueError(f"stop={shown(stop)} must be one of {STOPS}.")
        rows = self._rows_for_policy(block_hashes, positions)
        if rows is not None:
            self._advance_time(int(now_ms))
            words, block_positions = rows
            output = -1 if num_output_tokens is None else int(num_output_tokens)
            end = output, STOPS.index(stop), int(mark)
            facts = finished(self._now_ms % _TIMES, *end)
            self.executor.note(words, FINISH, block_positions, facts)

    def has_room(self, block_hashes: Iterable[bytes], pinned: BlockIds = ()) -> bool:
        """Whether `place` without filters would find room if `pinned` were pinned.

        No store of a `pinned` block may be in progress. Nothing changes, but this may
        take the time to copy the tier's arrays.
        """
        listed, words = pack(block_hashes)
        names = dict.fromkeys(listed)
        if len(names) < len(listed):
            _, words = pack(names)
        ids = as_ids(pinned)
        refuse_outside(ids, self.num_blocks)
        if len(names) <= self.num_blocks - self.num_held_blocks:
            return True
        if len(names) > self.policy.max_batch:
            return False
        scratch = make_executor(self.policy, self._executor_name, self.executor.state)
        scratch.pin(ids)
        return scratch.prepare_store(words, False) is not None

    def place_keeping(
        self, keys: Sequence[bytes], kept: NDArray[np.int64]
    ) -> Placement | None:
        """`place` keys without evicting any of the `kept` blocks (i64[n])."""
        if len(keys) <= self.num_blocks - self.num_held_blocks:
            return self.place(keys)
        if not self.executor.pin(kept):
            # A block whose store is in progress is never evicted and cannot be pinned.
            kept = kept[np.asarray(self.executor.state.ref_cnt)[kept] >= 0]
            self.executor.pin(kept)
        placement = self.place(keys)
        self.executor.complete_step(kept, len(kept))
        return placement

    def place(
        self, keys: Iterable[bytes], *, filtered: bool = True
    ) -> Placement | None:
        """Allocate blocks for the absent keys, evicting others; None without room.

        Blocks in flight and the blocks of `keys` are not evicted. If `filtered`, keys
        that the look-up filters reject (`store_threshold`, `max_unseen_blocks`) are
        skipped, and the policy may decline others.
        """
        names, words, any_foreign = lay_out(keys)
        rows: list[int] | None = None  # The rows of `names` in `keys`; None for all.
        if self._reuse is not None and filtered:
            passes = self._reuse.passes(names)
            self.num_skipped += passes.count(False)
            rows = list(compress(range(len(names)), passes))
            names, words, any_foreign = lay_out(list(compress(names, passes)))
        if len(names) > self.policy.max_batch:
            all_rows = range(len(names)) if rows is None else rows
            listed = list(names)
            first_row = dict(zip(reversed(listed), reversed(all_rows), strict=True))
            names, words, any_foreign = lay_out(list(dict.fromkeys(listed)))
            rows = [first_row[name] for name in names]
        if not len(names):
            return Placement((), NO_IDS, NO_IDS, ())
        if len(names) > self.policy.max_batch:
            return None  # More unique keys than blocks.
        store = self.executor.prepare_store(words, filtered)
        if store is None:
            return None
        placement = self._record_placement(names, words, any_foreign, store)
        if rows is not None:
            placed = slice(None) if placement.rows is None else placement.rows
            placement = placement._replace(rows=np.array(rows, np.int64)[placed])
        return placement

    def place_from(
        self,
        pool: DeviceBlockPool,
        keys: PackedKeys,
        sources: BlockIds,
        is_head: bool,
    ) -> Placement | None:
        """Run `place`, and pin the placed keys' device blocks, in one native call.

        `sources` has each key's device block. If the keys begin a prefix (`is_head`),
        they are reordered. Returns None and changes nothing if there is no room, a
        block does not have its key, this index has a look-up filter or no native
        executor, or the keys are not 1 to `max_batch`.
        """
        if len(sources) != len(keys):
            raise ValueError(f"{len(sources)=} blocks must have as many {len(keys)=}.")
        executor = self.executor
        if (
            self._reuse is not None
            or not isinstance(executor, NativeExecutor)
            or not 0 < len(keys) <= self.policy.max_batch
        ):
            return None
        ids = as_ids(sources)
        store = executor.place_from(pool.bound, keys.words, ids, is_head)
        if store is None:
            return None
        return self._record_placement(keys, keys.words, keys.has_foreign, store)

    def next_device_victims(self, pool: DeviceBlockPool, num: int) -> Victims:
        """Return `DeviceBlockPool.next_victims`, with their copies in this tier.

        Copies found here are recorded in `pool`, so that later calls need no look-up.
        """
        return pool.next_victims(num, self.executor.next_victims)

    def complete_store(
        self, block_hashes: Iterable[bytes], success: bool = True
    ) -> None:
        """End stores in progress; if they failed, the blocks are freed.

        Keys that are absent or ready are ignored.
        """
        names, words = pack(block_hashes)
        if not names:
            return
        has_ended = self.executor.complete_store(words, success)
        ended = list(compress(names, has_ended.tolist()))
        if success:
            self._add_event(ended, removed=False)
        else:
            self._record_removal(ended)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, oldest first, then delete them."""
        if self.events is not None:
            yield from self.events
            self.events.clear()

    def find(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Return the readable block of each key: i32[n], NO_BLOCK if it has none."""
        names, words = pack(keys)
        if not names:
            return np.empty(0, np.int32)
        return self.executor.find_readable(words)

    def find_prefix(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Return the readable blocks of the first n keys that all have one: i32[n]."""
        _, words = pack(keys)
        num = self.executor.lookup(words) if len(words) else 0
        if not num:
            return np.empty(0, np.int32)
        return self.executor.find_readable(words[:num])

    def contains(self, keys: Iterable[bytes]) -> NDArray[np.bool_]:
        """Whether each key has a block, stores in progress included: bool[n]."""
        is_known: NDArray[np.bool_] = self.find_held(keys) != NO_BLOCK
        return is_known

    def find_held(self, keys: Iterable[bytes]) -> NDArray[np.int32]:
        """Return the block of each key, stores in progress included: i32[n]."""
        names, words = pack(keys)
        return self.executor.find(words) if len(names) else np.empty(0, np.int32)

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the look-up filters let each key be stored."""
        if self._reuse is None:
            return [True] * len(keys)
        check_are_bytes(keys)
        return self._reuse.passes(keys)

    def pass_mask(self, keys: Sequence[BlockKey] | Words) -> NDArray[np.bool_] | None:
        """Return `passes` as bool[n]; None if there is no filter."""
        if self._reuse is None:
            return None
        names = words_to_keys(keys) if isinstance(keys, np.ndarray) else keys
        return np.array(self._reuse.passes(names), np.bool_)

    def count_lookup(self, keys: Sequence[BlockKey]) -> None:
        """Count a look-up of each key."""
        if self._reuse is not None:
            check_are_bytes(keys)
            self._reuse.count(keys)

    def pin(self, block_ids: BlockIds) -> None:
        """Pin blocks that `find` has just returned: none is evicted until `unpin`.

        Raises, and pins none, if a block is being stored or an id is out of range.
        """
        if not self.executor.pin(as_ids(block_ids)):
            raise ValueError(f"one of block_ids={shown(block_ids)} is being stored.")

    def unpin(self, block_ids: BlockIds) -> None:
        """Remove one pin for each time that a block is listed.

        Raises, and unpins none, if a block has no load in progress or an id is out of
        range.
        """
        ids = as_ids(block_ids)
        if not self.executor.complete_step(ids, len(ids), 0):
            raise ValueError(
                f"one of block_ids={shown(block_ids)} has no load in progress."
            )

    def publish(self, block_ids: BlockIds, keys: list[bytes]) -> None:
        """Make blocks readable after the bytes of their stores have arrived.

        Raises, and changes nothing, if a block is not being stored, an id is out of
        range, or the lengths differ.
        """
        ids = as_ids(block_ids)
        if len(ids) != len(keys):
            raise ValueError(f"{len(ids)=} blocks must have as many {len(keys)=}.")
        if not keys:
            return
        if not self.executor.complete_step(ids, 0, 0):
            raise ValueError(
                f"one of block_ids={shown(block_ids)} is not being stored."
            )
        if self.events is not None:
            self._add_event(keys, removed=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove blocks with bad bytes, except blocks in flight."""
        names, words = pack(keys)
        if not names:
            return
        discarded = list(compress(names, self.executor.discard(words).tolist()))
        self._record_removal(discarded)
        self._add_event(discarded, removed=True)

    def clear(self) -> None:
        """Remove all blocks at once, including those in flight.

        A policy such as "hazard" keeps what it has learned from requests.
        """
        self.executor = make_emptied(self.executor, self.policy, self._executor_name)
        self.num_removed += self.num_held_blocks
        if self.removed_keys is not None:
            self.removed_keys.clear()
        self.num_held_blocks = 0
        self._names.clear()
        self._notes.clear()
        if self.events is not None:
            self.events.append(OffloadingEvent([], self.block_size, self.medium, True))

    def resume(self, learned: ReuseTable) -> None:
        """Continue with the reuse table that "hazard" learned in an earlier run."""
        name = self._executor_name
        self.executor = resume(self.executor, self.policy, name, learned)

    @property
    def is_listed(self) -> bool:
        """Whether the index has all of the medium, except later writes by others."""
        return True

    def record_listing(
        self,
        present: Sequence[BlockKey],
        absent: Sequence[BlockKey],
        listed: bool | None,
        bound: tuple[int, int] | None,
    ) -> list[BlockKey]:
        """Apply a listing of the medium (`TierReport`); return the keys to delete.

        A medium without other writers is not listed.
        """
        return []

    def record_resident(self, keys: Sequence[BlockKey]) -> None:
        """Record blocks that the medium is known to have."""

    def record_full(self, num: int) -> list[BlockKey]:
        """Record that `num` blocks had no room in the medium; return keys to delete."""
        return []

    def choose_deletions(self, evicted: Sequence[BlockKey]) -> list[BlockKey]:
        """Choose the keys to delete from the medium after `place` evicted some."""
        return list(evicted)

    @property
    def can_list_victims(self) -> bool:
        """Whether `next_victims` works: native "lru" without retention."""
        state = self.executor.state.policy
        return isinstance(state, LRUState) and isinstance(self.executor, NativeExecutor)

    def next_victims(self, num: int) -> list[BlockKey]:
        """Return the keys that storing `num` more blocks would evict, in order.

        Free blocks are used first, so the list may be empty. Raises a ValueError unless
        `can_list_victims`.
        """
        if not self.can_list_victims:
            raise ValueError(
                "next_victims needs cache_policy='lru' and executor='native', without "
                "retention: other policies cannot list their next victims."
            )
        num -= self.num_blocks - self.num_held_blocks
        if num <= 0:
            return []
        state = self.executor.state
        blocks = next_victims(state.policy, state.ref_cnt, num)
        keys = words_to_keys(np.asarray(state.policy.directory.keys)[blocks])
        return [self._names.get(key, key) for key in keys] if self._names else keys

    def snapshot(self) -> Snapshot:
        """Return a readable form of the state, for tests and debugging.

        Keys are the caller's. Only a key that does not have 32 bytes appears as its
        hash, if its block was removed and the policy still remembers it.

        Example:
            >>> index = BlockIndex(block_size=16, num_blocks=3)
            >>> _ = index.place([b"a", b"b"])
            >>> index.publish([0], [b"a"])
            >>> index.snapshot()  # doctest: +NORMALIZE_WHITESPACE
            Snapshot(policy={'order': [b'a', b'b']}, ref_cnt={b'a': 0, b'b': -1},
                     block_ids={b'a': 0, b'b': 1}, free_ids=[2])
        """
        return take_snapshot(self.policy, self.executor, self._names)

    def warm_up(self) -> None:
        """Compile or load the native functions, so that no later call waits for them.

        It takes seconds the first time on a machine, later less than one.
        """
        scratch = make_executor(self.policy, self._executor_name)
        _, words = pack([bytes(KEY_BYTES)])
        ids, positions = np.zeros(1, np.int64), np.zeros(1, np.int32)
        for read in (scratch.find, scratch.find_readable):
            read(words)
        for counts_as_use in (True, False):
            scratch.touch(words, counts_as_use)
        if self.listens:
            scratch.note(words, BEGIN, positions, begun(0, 1))
            scratch.note(words, FINISH, positions, finished(0, -1, 0, 0))
        if self.retains:
            scratch.note(words, RETAIN, positions, retained(0, RELEASE, 0, 0))
        scratch.prepare_store(words, True)
        scratch.complete_store(words, True)
        scratch.pin(ids)
        scratch.complete_step(ids, 1)
        scratch.discard(words)

    def warm_up_with_device(self, pool: DeviceBlockPool, *, is_lazy: bool) -> None:
        """Warm up the calls that take the device pool, for lazy or for eager stores."""
        scratch = make_executor(self.policy, self._executor_name)
        _, words = pack([bytes(KEY_BYTES)])
        if is_lazy:
            pool.next_victims(0, scratch.next_victims)
        elif isinstance(scratch, NativeExecutor):
            scratch.place_from(pool.bound, words, np.zeros(1, np.int64), True)

    def _rows_for_policy(
        self, block_hashes: Iterable[bytes], positions: Sequence[int] | None
    ) -> tuple[Words, Positions] | None:
        """Convert keys and positions for a policy; None if there is nothing to notify.

        Keys beyond one batch are cut off, as the tier has fewer blocks. Without keys,
        the policy does not get the time either.
        """
        if not self.listens:
            return None
        if not self._policy_uses_keys:  # It may only need the time, for priorities.
            block_hashes, positions = list(islice(block_hashes, 1)), None
        names, words = pack(block_hashes)
        indices = NO_IDS if positions is None else as_ids(positions, "position")
        refuse_outside(indices, _MAX_COUNT, name="position")
        if positions is not None and len(indices) != len(names):
            raise ValueError(
                f"{len(indices)} positions must be {len(names)}, one for each key."
            )
        if not names:
            return None
        words = words[: self.policy.max_batch]
        if positions is None:
            return words, np.arange(len(words), dtype=np.int32)
        return words, indices[: len(words)].astype(np.int32)

    def _advance_time(self, now_ms: int) -> None:
        """Set the time, before a notification passes it to the policy.

        The policy keeps 32 bits, so a step of more than 2**31 ms would look like a step
        back in time. Such a step is split: the policy first gets a time in between.
        """
        ahead = now_ms - self._now_ms
        if self._has_time and ahead > 0 and ahead % _TIMES >= _TIMES // 2:
            between = (self._now_ms + ahead % _TIMES // 2) % _TIMES
            _, no_keys = pack([])
            self.executor.note(
                no_keys, FINISH, _NO_POSITIONS, finished(between, -1, 0, 0)
            )
        self._now_ms, self._has_time = now_ms, True

    def _set_priority(
        self, names: Sequence[bytes], retention: Retention | None, given_ms: int
    ) -> None:
        """Set or remove the priority of the resident blocks, batch by batch."""
        _, words = pack(names)
        terms = RELEASE, 0, 0
        if retention is not None:
            terms = retention.priority, retention.half_life_ms, retention.ttl_ms
        facts = retained(given_ms % _TIMES, *terms)
        for start in range(0, len(words), self.policy.max_batch):
            batch = words[start : start + self.policy.max_batch]
            self.executor.note(batch, RETAIN, _NO_POSITIONS, facts)

    def _touch_in_batches(self, words: Words, counts_as_use: bool) -> None:
        size = self.policy.max_batch
        # The last batch first, because the first key must become the most recent.
        for start in reversed(range(0, len(words), size)):
            self.executor.touch(words[start : start + size], counts_as_use)

    def _record_placement(
        self,
        names: Sequence[bytes],
        words: Words,
        any_foreign: bool,
        store: Store,
    ) -> Placement:
        """Record a store; `block_ids` has NO_BLOCK for each key that is not stored."""
        num_stored, block_ids, evicted_keys, num_declined = store
        to_store, rows = names, None
        self.num_declined += num_declined
        if num_stored < len(names):
            rows = np.flatnonzero(block_ids != NO_BLOCK)
            if isinstance(names, UnlistedKeys):
                to_store = words_to_keys(words[rows])
            else:
                to_store = [names[row] for row in rows.tolist()]
            block_ids = block_ids[rows]
        num_evicted = len(evicted_keys)
        evicted: Sequence[bytes] = UnlistedKeys(evicted_keys) if num_evicted else ()
        if self._names:
            evicted = [self._names.pop(key, key) for key in evicted]
        if any_foreign:
            self._names.update(
                (key_from_foreign(name), name) for name in to_store if is_foreign(name)
            )
        if self.retains and self._notes:
            groups = self._notes.groups(to_store, self._now_ms)
            for (retention, given_ms), keys in groups:
                self._set_priority(keys, retention, given_ms)
        self.num_held_blocks += num_stored - num_evicted
        self.num_evicted += num_evicted
        self.num_removed += num_evicted
        if self.removed_keys is not None and num_evicted:
            self.removed_keys.append(evicted_keys.copy())
        if self.events is not None:
            evicted = list(evicted)
            self._add_event(evicted, removed=True)
        return Placement(to_store, rows, block_ids, evicted)

    def _record_removal(self, names: list[bytes]) -> None:
        self.num_held_blocks -= len(names)
        self.num_removed += len(names)
        if self.removed_keys is not None:
            self.removed_keys.append(pack(names)[1])
        if self._names:
            for name in names:
                self._names.pop(key_from_foreign(name), None)

    def _add_event(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if block_hashes and self.events is not None:
            self.events.append(
                OffloadingEvent(block_hashes, self.block_size, self.medium, removed)
            )


def _as_policy(cache_policy: Any, num_blocks: int) -> Policy:
    """Make a policy from its name, and check that it fits a tier of `num_blocks`."""
    policy = cache_policy
    if isinstance(policy, str):
        # A tier can never have room for more unique keys than one batch holds.
        max_batch = max(_MIN_MAX_BATCH, 2 * num_blocks)
        policy = get_policy_maker(policy)(num_blocks, max_batch)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"cache_policy={shown(cache_policy)} must be a jaxkv.Policy or its name."
        )
    if policy.num_blocks != num_blocks or policy.max_batch < num_blocks:
        raise ValueError(
            f"{policy.num_blocks=} and {policy.max_batch=} must be {num_blocks} and at "
            f"least {num_blocks}, because the tier has {num_blocks=}."
        )
    return policy
