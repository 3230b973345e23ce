"""Which blocks a tier has, and where: bytes in, Python values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_whole, shown
from jaxkv.keys.packed import (
    PackedKeys,
    UnlistedKeys,
    check_are_bytes,
    has_foreign,
    is_foreign,
    key_from_foreign,
    pack,
    words_to_keys,
)
from jaxkv.policies import get_policy_maker, make_retained
from jaxkv.policies.base import Policy
from jaxkv.policies.facts import BEGIN, FINISH, RETAIN, facts
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
from jaxkv.tiers.change_over import can_change, change_over, emptied, resume
from jaxkv.tiers.device import DeviceBlockPool, Victims
from jaxkv.tiers.executors import (
    Executor,
    ExecutorName,
    Ids,
    NativeExecutor,
    Positions,
    Words,
    make_executor,
)
from jaxkv.tiers.key_memory import (
    MAX_TRACKED,
    DropReasons,
    RetentionNotes,
    ReuseFilter,
)
from jaxkv.tiers.retention import Retention, check_retention
from jaxkv.tiers.snapshot import Snapshot, take_snapshot
from jaxkv.types import KEY_BYTES, NO_BLOCK, STOPS, BlockKey, Stop

_LEAST_MAX_BATCH = 4096
NO_IDS = np.empty(0, np.int64)
_NO_POSITIONS = np.empty(0, np.int32)
_TIMES = 1 << 32  # Times on the array side have 32 bits.
_MOST_COUNT = (1 << 31) - 1


class BlockIndex:
    """Keeps track of which blocks a tier has, and where.

    A block has a place from `place` on, and can be found from `publish` on. Misuse
    raises a ValueError, and a call that raises changes nothing.

    Keys are any `bytes`. Keys of 32 bytes, such as `jaxkv.keys` makes, are used as they
    are; others cost one SHA-256 each.

    Args:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks of the tier.
        cache_policy: Which blocks to evict when it is full: a registered name, such as
            "lru" and "hazard" (`jaxkv.policy_names`), or a `Policy` made for
            `num_blocks` and for batches of at least as many keys.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only what was looked up at least so often, as vLLM's
            `FilterReusedOffloadingManager` does; 0 or 1 to store whatever is offered.
        max_unseen_blocks: Of the keys of a look-up that were never looked up before,
            store no more than this number, the first ones; the others when they are
            looked up again. None for all.
        max_tracker_size: Keys whose look-ups are counted for these, and whose priority
            is remembered until they are stored: the latest ones.
        retention: Whether blocks can be given priorities (`retain`), whatever the
            policy; see `jaxkv.make_retained`.
        remember_drops: Keys for which `drops` remembers why they are not here.
        executor: "native" for compiled functions that update NumPy arrays, where the
            policy has them; "xla" for the pure functions as XLA programs.
        medium: The name of the tier in events.
        alternatives: Policies, by their names, that `change_policy` may put in place of
            the first one.

    Raises:
        ValueError: If a number is too small, or a policy is not known, was made for
            other sizes, or cannot take the place of another.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        medium: As given.
        block_size: As given.
        num_blocks: As given.
        policy: The cache policy, with priorities around it if there are any.
        listens: Whether it, or an alternative, wants to know of requests; if not, it
            need not be told.
        retains: Whether blocks can be given priorities.
        executor: Has the state, as a pytree of arrays, and changes it.
        events: What happened since `take_events`; None if that is not kept.
        drops: Why blocks are not here, as far as that is remembered.
        num_held_blocks: Blocks that hold a key, stores in progress included.
        num_evicted: Blocks that were evicted so far.
        num_lost: Blocks that have left so far, evicted or not.
        lost: Their keys since it was last emptied, u32[n, 8] each, but for `clear`;
            None if they are not kept.
        num_found: Blocks that listings and probes have added.
        num_left_out: Blocks of the medium that this index has no room for, as far as
            known.
        num_skipped: Times so far that a block was not to be stored, as too few had
            asked for it, or because it was in the tail of an unseen prompt.

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
        remember_drops: int = 0,
        executor: ExecutorName = "native",
        medium: str = HOST_MEDIUM,
        alternatives: Sequence[str] = (),
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("store_threshold", store_threshold, 0),
            ("max_unseen_blocks", max_unseen_blocks, 0),
            ("max_tracker_size", max_tracker_size, 1),
            ("remember_drops", remember_drops, 0),
        ):
            if not (value is None and name == "max_unseen_blocks"):
                check_whole(least, **{name: value})
        if num_blocks >= 1 << 31:
            raise ValueError(f"{num_blocks=} must be below 2**31: ids have 32 bits.")
        self.medium = medium
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.policy = _as_policy(cache_policy, num_blocks)
        self._tells_keys = self.policy.listens
        if retention and not self.policy.retains:
            self.policy = make_retained(self.policy)
        self._alternatives = {
            name: _as_policy(name, num_blocks) for name in alternatives
        }
        if self._alternatives and not all(map(can_change, self._policies)):
            raise ValueError(
                f"one of {cache_policy=} and {alternatives=}, or retention, keeps what "
                "no other policy can take over."
            )
        self.listens = any(policy.listens for policy in self._policies)
        self.retains = self.policy.retains
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.drops = DropReasons(remember_drops)
        self.num_held_blocks = 0
        self.num_evicted = 0
        self.num_lost = 0
        self.lost: list[Words] | None = None
        self.num_found = 0
        self.num_left_out = 0
        self.num_skipped = 0
        self._executor_name: ExecutorName = executor
        self.executor: Executor = make_executor(self.policy, executor)
        # What keys that are not of 32 bytes were given as, by what stands for them.
        self._names: dict[BlockKey, bytes] = {}
        self._reuse = None
        if store_threshold > 1 or max_unseen_blocks is not None:
            self._reuse = ReuseFilter(
                store_threshold, max_tracker_size, max_unseen_blocks
            )
        self._notes = RetentionNotes(max_tracker_size if self.retains else 0)
        self._now_ms = 0  # As it was told last, ...
        self._is_told = False  # ... if it was.

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Record a use of each key; the first ends as the most recent.

        Args:
            block_hashes: Keys of a prefix, in its order. Unknown ones are ignored.
        """
        names, words = pack(block_hashes)
        if 0 < len(names) <= self.policy.max_batch:
            self.executor.touch(words, True)
        else:
            self._touch_in_parts(words, counts_as_use=True)

    def reorder(self, block_hashes: Iterable[bytes]) -> None:
        """As `touch`, but no more than the order of eviction changes.

        For the blocks of one use that come in parts: a policy that tells what is used
        once from what is used again (ARC) is not to take them for the latter.
        """
        names, words = pack(block_hashes)
        if 0 < len(names) <= self.policy.max_batch:
            self.executor.touch(words, False)
        else:
            self._touch_in_parts(words, counts_as_use=False)

    def retain(
        self,
        block_hashes: Iterable[bytes],
        retention: Retention | None,
        now_ms: int,
    ) -> None:
        """Say how long to keep blocks.

        Of two priorities that a block is given, the one counts that is higher at that
        time; the second, if they are equal. Keys that are not here get theirs when they
        are stored, if that is before it is over.

        Args:
            block_hashes: Keys, here or not.
            retention: Their priority, all of them whatever its `num_tokens`; None to
                have them be ordinary again.
            now_ms: The time in milliseconds, by the clock of `begin_request`.

        Raises:
            ValueError: If blocks have no priorities here. Then nothing changes.
            TypeError: If `retention` is no `Retention`. Then nothing changes.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, retention=True)
            >>> index.retain([b"a"], Retention(priority=80, half_life_s=60), now_ms=0)
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.place([b"c"]).evicted_keys
            [b'b']
        """
        if not self.retains:
            raise ValueError(
                "blocks have no priorities here: make the manager with retention=True."
            )
        check_retention(retention)
        check_whole(None, now_ms=now_ms)
        names, _ = pack(block_hashes)
        if not names:
            return
        self._pass_time(int(now_ms))
        if retention is None:
            self._notes.forget(names)
        else:
            self._notes.note(names, retention, self._now_ms)
        self._give(names, retention, self._now_ms)

    def begin_request(
        self,
        block_hashes: Iterable[bytes],
        num_tokens: int,
        now_ms: int,
        positions: Sequence[int] | None = None,
    ) -> int:
        """Tell a policy that listens that a request begins; before its blocks are used.

        Args:
            block_hashes: Keys of all full blocks of its prompt, on the host or not.
            num_tokens: Tokens of the prompt.
            now_ms: The time in milliseconds since any moment.
            positions: How many blocks come before each in its prefix, where the keys
                are of several prefixes, as of groups of layers; each begins with 0.

        Returns:
            What `finish_request` takes.

        Raises:
            ValueError: If there is not one position for each key, or a number is
                negative or above 2**31 - 1. Then nothing changes.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, cache_policy="hazard")
            >>> mark = index.begin_request([b"a", b"b"], num_tokens=40, now_ms=0)
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.finish_request([b"a", b"b"], mark, 1000, 200, "end_turn")
        """
        check_whole(0, _MOST_COUNT, num_tokens=num_tokens)
        check_whole(None, now_ms=now_ms)
        told = self._rows_told(block_hashes, positions)
        if told is None:
            return 0
        self._pass_time(int(now_ms))
        words, where = told
        about = facts(self._now_ms % _TIMES, num_tokens=int(num_tokens))
        return self.executor.note(words, BEGIN, where, about)

    def finish_request(
        self,
        block_hashes: Iterable[bytes],
        mark: int,
        now_ms: int,
        num_output_tokens: int | None = None,
        stop: Stop | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Tell a policy that listens that a request has finished.

        Args:
            block_hashes: Keys of all its full blocks.
            mark: What `begin_request` returned.
            now_ms: The time, by the same clock.
            num_output_tokens: Tokens that it generated, if that is known.
            stop: Why it stopped, if that is known.
            positions: As in `begin_request`.

        Raises:
            ValueError: If the reason is none of `jaxkv.types.STOPS`, there is not one
                position for each key, or a number has more than 32 bits or, but for
                the mark, is negative. Then nothing changes.
        """
        check_whole(-_MOST_COUNT - 1, _MOST_COUNT, mark=mark)
        check_whole(None, now_ms=now_ms)
        if num_output_tokens is not None:
            check_whole(0, _MOST_COUNT, num_output_tokens=num_output_tokens)
        if not isinstance(stop, str | None) or stop not in STOPS:
            raise ValueError(f"stop={shown(stop)} must be one of {STOPS}.")
        told = self._rows_told(block_hashes, positions)
        if told is not None:
            self._pass_time(int(now_ms))
            words, where = told
            about = facts(
                self._now_ms % _TIMES,
                num_output=-1 if num_output_tokens is None else int(num_output_tokens),
                stop=STOPS.index(stop),
                mark=int(mark),
            )
            self.executor.note(words, FINISH, where, about)

    def has_room(self, block_hashes: Iterable[bytes], pinned: BlockIds = ()) -> bool:
        """Tell whether `place`, not filtered, would find room; nothing changes.

        It may copy the tier's arrays to find out.

        Args:
            block_hashes: Keys of blocks that could be stored.
            pinned: Blocks that would be pinned besides; none of them is being stored.
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
        return scratch.prepare_store(words) is not None

    def place_beside(
        self, keys: Sequence[bytes], kept: NDArray[np.int64]
    ) -> Placement | None:
        """Do as `place` does, and evict none of some blocks that hold a key.

        Args:
            keys: Keys of blocks that could be stored.
            kept: i64[n]. The blocks.
        """
        if len(keys) <= self.num_blocks - self.num_held_blocks:
            return self.place(keys)
        if not self.executor.pin(kept):
            # What is being stored is not evicted anyhow.
            kept = kept[np.asarray(self.executor.state.ref_cnt)[kept] >= 0]
            self.executor.pin(kept)
        placement = self.place(keys)
        self.executor.complete_step(kept, len(kept))
        return placement

    def place(
        self, keys: Iterable[bytes] | UnlistedKeys, *, filtered: bool = True
    ) -> Placement | None:
        """Find room for the blocks that are not known yet.

        Blocks that are being loaded or stored are not evicted, nor are those whose
        keys are given here. With a `store_threshold`, keys that were not looked up
        often enough count as not given.

        Args:
            keys: Keys of blocks that could be stored.
            filtered: Whether a `store_threshold` counts.

        Returns:
            What to store where, and what had to leave; None if there is no room, and
            then nothing has changed.
        """
        names, words = _laid_out(keys)
        rows: list[int] | None = None  # What is left of the keys; None for all.
        if self._reuse is not None and filtered:
            passes = self._reuse.passes(names)
            self.num_skipped += passes.count(False)
            rows = list(compress(range(len(names)), passes))
            names, words = pack(list(compress(names, passes)))
        if len(names) > self.policy.max_batch:
            given = range(len(names)) if rows is None else rows
            listed = list(names)
            first = dict(zip(reversed(listed), reversed(given), strict=True))
            names, words = pack(list(dict.fromkeys(listed)))
            rows = [first[name] for name in names]
        if not len(names):
            return Placement((), NO_IDS, NO_IDS, ())
        if len(names) > self.policy.max_batch:
            return None  # More than there are blocks.
        answer = self.executor.prepare_store(words)
        if answer is None:
            return None
        placement = self._placed(names, words, *answer)
        if rows is not None:
            of_all = np.array(rows, np.int64)
            of_placed = slice(None) if placement.rows is None else placement.rows
            placement = placement._replace(rows=of_all[of_placed])
        return placement

    def place_from(
        self,
        pool: DeviceBlockPool,
        keys: PackedKeys,
        sources: BlockIds,
        is_head: bool,
    ) -> Placement | None:
        """Do `holds`, `place`, `pin` of what is placed, and `reorder` in one call.

        Args:
            pool: The device's blocks.
            keys: Keys of blocks that could be stored.
            sources: n blocks that are said to hold them.
            is_head: Whether the first one begins a prefix: `reorder` is for that alone.

        Returns:
            As `place`; None also if a block does not hold its key, or this tier has
            other rules than to store what it lacks. Then nothing has changed.

        Raises:
            ValueError: If there is not a block for each key. Then nothing changes.
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
        answer = executor.place_from(pool.bound, keys.words, ids, is_head)
        return None if answer is None else self._placed(keys, keys.words, *answer)

    def victims_of(self, pool: DeviceBlockPool, num: int) -> Victims:
        """Tell what a device evicts next, and which of that is not here.

        What is here is noted in the device's tier (`DeviceBlockPool.note_copies`), so
        that it is looked up once.

        Args:
            pool: The device's blocks.
            num: How many blocks to look at; if fewer are free, these.
        """
        return pool.next_victims(num, self.executor.next_victims)

    def complete_store(
        self, block_hashes: Iterable[bytes], success: bool = True
    ) -> None:
        """End stores in progress.

        Args:
            block_hashes: Keys that `place` listed. Absent and ready ones are
                ignored.
            success: Whether the bytes arrived. If not, the blocks are freed.
        """
        names, words = pack(block_hashes)
        if not names:
            return
        is_over = self.executor.complete_store(words, success)
        ended = list(compress(names, is_over.tolist()))
        if success:
            self._record(ended, removed=False)
        else:
            self._forget(ended)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the events since the last time, then forget them.

        Yields:
            The events, oldest first. They are forgotten when the last was taken.
        """
        if self.events is not None:
            yield from self.events
            self.events.clear()

    def find(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Find the block of each key that can be read: i32[n], NO_BLOCK if none."""
        names, words = pack(keys)
        if not names:
            return np.empty(0, np.int32)
        return self.executor.find_readable(words)

    def find_beside(
        self, pool: DeviceBlockPool, keys: Iterable[BlockKey]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Find a prefix of which each block is on the device, or can be read here.

        Args:
            pool: The device's blocks.
            keys: Keys of a prefix, in its order.

        Returns:
            i32[n] and i32[n], for the first n keys: their blocks on the device, and
            here; NO_BLOCK for none, but not in both.
        """
        names, words = pack(keys)
        if not names:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        num, on_device, on_host = self.executor.find_beside(pool.bound, words)
        return on_device[:num], on_host[:num]

    def contains(self, keys: Iterable[bytes]) -> NDArray[np.bool_]:
        """Tell which keys have a block, stores in progress included: bool[n]."""
        is_known: NDArray[np.bool_] = self.find_held(keys) != NO_BLOCK
        return is_known

    def find_held(self, keys: Iterable[bytes] | UnlistedKeys) -> NDArray[np.int32]:
        """As `find`, stores in progress included."""
        names, words = _laid_out(keys)
        return self.executor.find(words) if len(names) else np.empty(0, np.int32)

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell for each key whether it was looked up often enough to be stored."""
        if self._reuse is None:
            return [True] * len(keys)
        check_are_bytes(keys)
        return self._reuse.passes(keys)

    def passes_of(self, keys: Sequence[BlockKey] | Words) -> NDArray[np.bool_] | None:
        """Do as `passes` does, as bool[n]; None where all pass in any case."""
        if self._reuse is None:
            return None
        names = words_to_keys(keys) if isinstance(keys, np.ndarray) else keys
        return np.array(self._reuse.passes(names), np.bool_)

    def count_lookup(self, keys: Sequence[BlockKey]) -> None:
        """Count keys as looked up."""
        if self._reuse is not None:
            check_are_bytes(keys)
            self._reuse.count(keys)

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks that a search has just found while they are read.

        Raises:
            ValueError: If a block is being stored, or an id is no block's. Then nothing
                is pinned.
        """
        if not self.executor.pin(as_ids(block_ids)):
            raise ValueError(f"one of block_ids={shown(block_ids)} is being stored.")

    def unpin(self, block_ids: BlockIds) -> None:
        """Take pins back, once for each time.

        Raises:
            ValueError: If a block has no load in progress, or an id is no block's. Then
                nothing is unpinned.
        """
        ids = as_ids(block_ids)
        if not self.executor.complete_step(ids, len(ids), 0):
            raise ValueError(
                f"one of block_ids={shown(block_ids)} has no load in progress."
            )

    def publish(self, block_ids: BlockIds, keys: list[bytes]) -> None:
        """Have blocks be found, as their bytes have arrived.

        Args:
            block_ids: Blocks that are being stored.
            keys: Their keys.

        Raises:
            ValueError: If a block is not being stored, an id is no block's, or there
                is not one for each key. Then nothing changes.
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
            self._record(keys, removed=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget blocks whose bytes are no good; those in flight stay."""
        names, words = pack(keys)
        if not names:
            return
        gone = list(compress(names, self.executor.discard(words).tolist()))
        self._forget(gone)
        self._record(gone, removed=True)
        self.drops.note(gone, "load failed")

    def clear(self) -> None:
        """Forget all blocks at once, loads and stores in progress included.

        What a policy has learned of requests stays, such as "hazard".
        """
        self.executor = emptied(self.executor, self.policy, self._executor_name)
        self.num_lost += self.num_held_blocks
        if self.lost is not None:
            self.lost.clear()
        self.num_held_blocks = 0
        self._names.clear()
        self.drops.clear()
        self._notes.clear()
        if self.events is not None:
            self.events.append(OffloadingEvent([], self.block_size, self.medium, True))

    def change_policy(
        self, name: str, learned: Executor | None = None, scale: int = 1
    ) -> None:
        """Have another policy choose what to evict; every block stays where it is.

        Loads and stores in progress go on.

        Args:
            name: One of the alternatives.
            learned: A tier of that policy, of any size, that was shown the same
                requests; None for none.
            scale: How many keys each of that tier's stands for.

        Raises:
            ValueError: If it is no alternative. Then nothing changes.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, alternatives=["lru", "slru"])
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.touch([b"a"])
            >>> index.change_policy("slru")
            >>> index.place([b"c"]).evicted_keys
            [b'b']
        """
        if not isinstance(name, str) or name not in self._alternatives:
            names = sorted(self._alternatives)
            raise ValueError(
                f"name={shown(name)} must be one of the alternatives, {names}."
            )
        policy = self._alternatives[name]
        self.executor = change_over(
            self.executor, self.policy, policy, self._executor_name, learned, scale
        )
        self.policy = policy
        self._tells_keys = policy.listens

    def resume(self, learned: ReuseTable) -> None:
        """Have a policy that learns, "hazard", go on with what was learned before."""
        name = self._executor_name
        self.executor = resume(self.executor, self.policy, name, learned)

    @property
    def is_listed(self) -> bool:
        """Whether all is known that the tier has, but for what others write since."""
        return True

    def note_listing(
        self,
        found: Sequence[BlockKey],
        gone: Sequence[BlockKey],
        listed: bool | None,
        bound: tuple[int, int] | None,
    ) -> list[BlockKey]:
        """Take note of a listing of the medium (`TierReport`); return what to delete.

        A medium that nothing else writes to is not listed.
        """
        return []

    def note_there(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks that the medium has, as it said when asked."""

    def note_full(self, num: int) -> list[BlockKey]:
        """Note that blocks found no room in the medium; return what to delete."""
        return []

    def room_for(self, evicted: Sequence[BlockKey]) -> list[BlockKey]:
        """Choose what to delete in the medium after `place` has made room here."""
        return list(evicted)

    @property
    def tells_victims(self) -> bool:
        """Whether `next_victims` knows: "lru" in native functions, no retention."""
        state = self.executor.state.policy
        return isinstance(state, LRUState) and isinstance(self.executor, NativeExecutor)

    def next_victims(self, num: int) -> list[BlockKey]:
        """Look which blocks would be evicted next, before they go.

        Args:
            num: How many to look for.

        Returns:
            Their keys, the next one first; perhaps less than `num`. None as long as
            there is room for as many without an eviction.

        Raises:
            ValueError: If the policy does not tell (`tells_victims`).
        """
        if not self.tells_victims:
            raise ValueError(
                "next_victims needs cache_policy='lru' and executor='native', without "
                "retention: another policy does not tell what it would evict."
            )
        num -= self.num_blocks - self.num_held_blocks
        if num <= 0:
            return []
        state = self.executor.state
        blocks = next_victims(state.policy, state.ref_cnt, num)
        keys = words_to_keys(np.asarray(state.policy.directory.keys)[blocks])
        return [self._names.get(key, key) for key in keys] if self._names else keys

    def snapshot(self) -> Snapshot:
        """Show the state to a reader, for tests and for debugging.

        Returns:
            The state, on the host. Keys are as they were given, but for foreign ones
            that have left and that the policy still remembers: these have 32 bytes.

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
        """Load, or compile, what the methods run, so that no later call waits for it.

        It takes seconds where the machine has not run them before, else part of one.
        """
        for policy in self._policies:
            self._warm_up(policy)

    @property
    def _policies(self) -> list[Policy]:
        """All policies that this tier may have."""
        others = self._alternatives.values()
        return [self.policy, *(own for own in others if own is not self.policy)]

    def _warm_up(self, policy: Policy) -> None:
        scratch = make_executor(policy, self._executor_name)
        _, words = pack([bytes(KEY_BYTES)])
        ids, where = np.zeros(1, np.int64), np.zeros(1, np.int32)
        for read in (scratch.find, scratch.find_readable):
            read(words)
        for counts_as_use in (True, False):
            scratch.touch(words, counts_as_use)
        if self.listens:
            scratch.note(words, BEGIN, where, facts(0))
            scratch.note(words, FINISH, where, facts(0))
        if self.retains:
            scratch.note(words, RETAIN, where, facts(0))
        scratch.prepare_store(words)
        scratch.complete_store(words, True)
        scratch.pin(ids)
        scratch.complete_step(ids, 1)
        scratch.discard(words)

    def warm_up_beside(self, pool: DeviceBlockPool, *, is_lazy: bool) -> None:
        """Do the same for what takes the device's blocks, too.

        Args:
            pool: The device's blocks.
            is_lazy: Whether `victims_of` will be called, or `place_from`.
        """
        for policy in self._policies:
            scratch = make_executor(policy, self._executor_name)
            _, words = pack([bytes(KEY_BYTES)])
            scratch.find_beside(pool.bound, words)
            if is_lazy:
                pool.next_victims(0, scratch.next_victims)
            elif isinstance(scratch, NativeExecutor):
                scratch.place_from(pool.bound, words, np.zeros(1, np.int64), True)

    def _rows_told(
        self, block_hashes: Iterable[bytes], positions: Sequence[int] | None
    ) -> tuple[Words, Positions] | None:
        """Lay out what a policy is told of; None if nothing, or if it does not listen.

        What is more than one call may have is left out: the cache has fewer blocks.
        Without keys not even the time is told.
        """
        if not self.listens:
            return None
        if not self._tells_keys:  # The time is all that priorities want to know.
            block_hashes, positions = list(islice(block_hashes, 1)), None
        names, words = pack(block_hashes)
        told = NO_IDS if positions is None else as_ids(positions, "position")
        refuse_outside(told, _MOST_COUNT, name="position")
        if positions is not None and len(told) != len(names):
            raise ValueError(
                f"{len(told)} positions must be {len(names)}, one for each key."
            )
        if not names:
            return None
        most = self.policy.max_batch
        if positions is None:
            return words[:most], np.arange(min(len(names), most), dtype=np.int32)
        return words[:most], told[:most].astype(np.int32)

    def _pass_time(self, now_ms: int) -> None:
        """Note the time that the policy is about to be told.

        To the policy, which has 32 bits of it, a time that is more than 2**31 ms later
        looks like one before: it is told one between them first.
        """
        ahead = now_ms - self._now_ms
        if self._is_told and ahead > 0 and ahead % _TIMES >= _TIMES // 2:
            between = (self._now_ms + ahead % _TIMES // 2) % _TIMES
            _, no_keys = pack([])
            self.executor.note(no_keys, FINISH, _NO_POSITIONS, facts(between))
        self._now_ms, self._is_told = now_ms, True

    def _give(
        self, names: list[bytes], retention: Retention | None, given_ms: int
    ) -> None:
        """Give blocks that are here a priority, or none, a batch at a time."""
        _, words = pack(names)
        about = facts(given_ms % _TIMES, priority=RELEASE)
        if retention is not None:
            about = facts(
                given_ms % _TIMES,
                priority=retention.priority,
                half_life_ms=retention.half_life_ms,
                ttl_ms=retention.ttl_ms,
            )
        for start in range(0, len(words), self.policy.max_batch):
            batch = words[start : start + self.policy.max_batch]
            self.executor.note(batch, RETAIN, _NO_POSITIONS, about)

    def _touch_in_parts(self, words: Words, *, counts_as_use: bool) -> None:
        most = self.policy.max_batch
        # Keys are touched from the last to the first, and so are parts of them.
        for start in reversed(range(0, len(words), most)):
            self.executor.touch(words[start : start + most], counts_as_use)

    def _placed(
        self,
        names: Sequence[bytes],
        words: Words,
        num_stored: int,
        block_ids: Ids,
        evicted_keys: Words,
    ) -> Placement:
        """Note where keys go (NO_BLOCK: nowhere) and which had to leave; tell it."""
        some_foreign = has_foreign(names)
        to_store, rows = names, None
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
        if some_foreign:
            self._names.update(
                (key_from_foreign(name), name) for name in to_store if is_foreign(name)
            )
        if self.retains and self._notes:
            noted = self._notes.groups(to_store, self._now_ms)
            for (retention, given_ms), keys in noted:
                self._give(keys, retention, given_ms)
        self.num_held_blocks += num_stored - num_evicted
        self.num_evicted += num_evicted
        self.num_lost += num_evicted
        if self.lost is not None and num_evicted:
            self.lost.append(evicted_keys.copy())
        if self.events is not None or self.drops.is_kept:
            evicted = list(evicted)
            self._record(evicted, removed=True)
            self.drops.note(evicted, "evicted")
        return Placement(to_store, rows, block_ids, evicted)

    def _forget(self, names: list[bytes]) -> None:
        """Note that blocks with these names are gone."""
        self.num_held_blocks -= len(names)
        self.num_lost += len(names)
        if self.lost is not None:
            self.lost.append(pack(names)[1])
        if self._names:
            for name in names:
                self._names.pop(key_from_foreign(name), None)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if block_hashes and self.events is not None:
            self.events.append(
                OffloadingEvent(block_hashes, self.block_size, self.medium, removed)
            )


def _laid_out(
    keys: Iterable[bytes] | UnlistedKeys,
) -> tuple[Sequence[bytes], Words]:
    """Do as `pack` does, and list no keys that are not listed."""
    # Its exact type: to look for subclasses of an abstract one takes longer.
    return (keys, keys.words) if type(keys) is UnlistedKeys else pack(keys)


def _as_policy(cache_policy: Any, num_blocks: int) -> Policy:
    """Make the policy of a name; check that it fits a tier of `num_blocks`."""
    policy = cache_policy
    if isinstance(policy, str):
        # Twice the tier, so that more different keys than this cannot fit at all.
        max_batch = max(_LEAST_MAX_BATCH, 2 * num_blocks)
        policy = get_policy_maker(policy)(num_blocks, max_batch)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"cache_policy={shown(cache_policy)} must be, or name, a jaxkv.Policy."
        )
    if policy.num_blocks != num_blocks or policy.max_batch < num_blocks:
        raise ValueError(
            f"{policy.num_blocks=}, {policy.max_batch=} of the cache policy must be "
            f"{num_blocks} and at least {num_blocks}, as {num_blocks=}."
        )
    return policy
