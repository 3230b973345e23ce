"""The index of a tier: which blocks it has, and where; bytes in, Python values out."""

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
from jaxkv.policies.facts import BEGIN, FINISH, RETAIN, begun, finished, retained
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

_MIN_MAX_BATCH = 4096
NO_IDS = np.empty(0, np.int64)
_NO_POSITIONS = np.empty(0, np.int32)
_TIMES = 1 << 32  # Times on the array side have 32 bits.
_MAX_COUNT = (1 << 31) - 1


class BlockIndex:
    """Keeps track of which blocks a tier has, and where.

    A block has a place from `place` on, and can be found from `publish` on. Misuse
    raises a ValueError, and a call that raises changes nothing.

    Keys are any `bytes`. Keys of 32 bytes, such as `jaxkv.keys` makes, are used as they
    are; others cost one SHA-256 each.

    Args:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks of the tier.
        cache_policy: Chooses the blocks to evict when the tier is full: a registered
            name, such as "lru" and "hazard" (`jaxkv.policy_names`), or a `Policy` made
            for `num_blocks` and for batches of at least as many keys.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only keys with at least this many look-ups, as vLLM's
            `FilterReusedOffloadingManager` does; 0 or 1 to store whatever is offered.
        max_unseen_blocks: Of the keys of a look-up that were never looked up before,
            store at most this number, the first ones; the others when they are looked
            up again. None for all.
        max_tracker_size: Keys whose look-ups are counted for these, and whose priority
            is remembered until they are stored: the latest ones.
        retention: Whether blocks can be given priorities (`retain`), whatever the
            policy; see `jaxkv.make_retained`.
        remember_drops: Keys for which `drops` remembers why they are absent.
        executor: "native" for compiled functions that update NumPy arrays, where the
            policy has them; "xla" for the pure functions as XLA programs.
        medium: The name of the tier in events.
        alternatives: Policies, by their names, that `change_policy` may put in place of
            the first one.

    Raises:
        ValueError: If a number is too small, or a policy is not known, was made for
            other sizes, or cannot take the place of another.
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
        remember_drops: int = 0,
        executor: ExecutorName = "native",
        medium: str = HOST_MEDIUM,
        alternatives: Sequence[str] = (),
    ) -> None:
        for name, value, min_value in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("store_threshold", store_threshold, 0),
            ("max_unseen_blocks", max_unseen_blocks, 0),
            ("max_tracker_size", max_tracker_size, 1),
            ("remember_drops", remember_drops, 0),
        ):
            if not (value is None and name == "max_unseen_blocks"):
                check_whole(min_value, **{name: value})
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
        # Whether this policy or an alternative uses facts about requests.
        self.listens = any(policy.listens for policy in self._policies)
        self.retains = self.policy.retains
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.drops = DropReasons(remember_drops)
        self.num_held_blocks = 0  # Stores in progress included.
        self.num_evicted = 0  # So far, as the following.
        self.num_lost = 0  # Evicted or not.
        # Keys of lost blocks, u32[n, 8] each, except those of `clear`; the reader
        # empties it. None if they are not kept.
        self.lost: list[Words] | None = None
        self.num_found = 0  # Added by listings and probes.
        # Known blocks of the medium that this index has no room for.
        self.num_left_out = 0
        # Not stored: too few look-ups, or in the tail of an unseen prompt.
        self.num_skipped = 0
        self._executor_name: ExecutorName = executor
        self.executor: Executor = make_executor(self.policy, executor)
        # The caller's names of keys that are not of 32 bytes, by their stand-ins.
        self._names: dict[BlockKey, bytes] = {}
        self._reuse = None
        if store_threshold > 1 or max_unseen_blocks is not None:
            self._reuse = ReuseFilter(
                store_threshold, max_tracker_size, max_unseen_blocks
            )
        self._notes = RetentionNotes(max_tracker_size if self.retains else 0)
        self._now_ms = 0  # Of the last notification, ...
        self._has_time = False  # ... if there was one.

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Record a use of each key of a prefix, the first as the most recent."""
        _, words = pack(block_hashes)
        if 0 < len(words) <= self.policy.max_batch:
            self.executor.touch(words, True)
        else:
            self._touch_in_batches(words, True)

    def reorder(self, block_hashes: Iterable[bytes]) -> None:
        """Reorder keys as `touch` does, without a use.

        The blocks of one use may come in parts. A policy that distinguishes one use
        from two (ARC) must not count them as several.
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
        """Set how long to keep blocks; None makes them ordinary again.

        All keys get the priority, whatever its `num_tokens`. Of two priorities of a
        block, the one that is higher at the time of the second counts; if they are
        equal, the second. Absent keys get theirs when they are stored, if it has not
        ended by then. `now_ms` is of the clock of `begin_request`.

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
        """Notify a policy that listens of a new request, before its blocks are used.

        The keys are of all full blocks of its prompt, on the host or not. `now_ms` is
        the time since any moment. If the keys are of several prefixes, as of groups of
        layers, `positions` counts the blocks before each in its prefix. The answer is
        the mark that `finish_request` takes.

        Example:
            >>> index = BlockIndex(16, num_blocks=2, cache_policy="hazard")
            >>> mark = index.begin_request([b"a", b"b"], num_tokens=40, now_ms=0)
            >>> index.publish(index.place([b"a", b"b"]).block_ids, [b"a", b"b"])
            >>> index.finish_request([b"a", b"b"], mark, 1000, 200, "end_turn")
        """
        check_whole(0, _MAX_COUNT, num_tokens=num_tokens)
        check_whole(None, now_ms=now_ms)
        rows = self._rows_for_policy(block_hashes, positions)
        if rows is None:
            return 0
        self._pass_time(int(now_ms))
        words, where = rows
        about = begun(self._now_ms % _TIMES, int(num_tokens))
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
        """Notify a policy that listens of a request's end, with all its full blocks.

        `num_output_tokens` and `stop` are None if unknown.
        """
        check_whole(-_MAX_COUNT - 1, _MAX_COUNT, mark=mark)
        check_whole(None, now_ms=now_ms)
        if num_output_tokens is not None:
            check_whole(0, _MAX_COUNT, num_output_tokens=num_output_tokens)
        if not isinstance(stop, str | None) or stop not in STOPS:
            raise ValueError(f"stop={shown(stop)} must be one of {STOPS}.")
        rows = self._rows_for_policy(block_hashes, positions)
        if rows is not None:
            self._pass_time(int(now_ms))
            words, where = rows
            output = -1 if num_output_tokens is None else int(num_output_tokens)
            end = output, STOPS.index(stop), int(mark)
            about = finished(self._now_ms % _TIMES, *end)
            self.executor.note(words, FINISH, where, about)

    def has_room(self, block_hashes: Iterable[bytes], pinned: BlockIds = ()) -> bool:
        """Whether `place`, not filtered, would find room with more blocks pinned.

        None of these is being stored. Nothing changes, but it may copy the tier's
        arrays.
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
        """`place` keys, but evict none of the `kept` blocks (i64[n])."""
        if len(keys) <= self.num_blocks - self.num_held_blocks:
            return self.place(keys)
        if not self.executor.pin(kept):
            # A block that is being stored is not evicted anyhow.
            kept = kept[np.asarray(self.executor.state.ref_cnt)[kept] >= 0]
            self.executor.pin(kept)
        placement = self.place(keys)
        self.executor.complete_step(kept, len(kept))
        return placement

    def place(
        self, keys: Iterable[bytes], *, filtered: bool = True
    ) -> Placement | None:
        """Find room for the blocks that are not known yet; None if there is none.

        Blocks that are being loaded or stored are not evicted, nor are those whose keys
        are given. If `filtered`, keys with too few look-ups (`store_threshold`) count
        as not given.
        """
        names, words = pack(keys)
        rows: list[int] | None = None  # The keys that are left; None for all.
        if self._reuse is not None and filtered:
            passes = self._reuse.passes(names)
            self.num_skipped += passes.count(False)
            rows = list(compress(range(len(names)), passes))
            names, words = pack(list(compress(names, passes)))
        if len(names) > self.policy.max_batch:
            before = range(len(names)) if rows is None else rows
            listed = list(names)
            first = dict(zip(reversed(listed), reversed(before), strict=True))
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
        """Call `holds`, `place`, `pin` for what is placed, and `reorder` in one.

        `sources` are the device blocks of the keys. Only keys that begin a prefix
        (`is_head`) are reordered. The answer is None also if a block does not hold its
        key, or this tier does not simply store absent keys; then nothing has changed.
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
        """Return the device's next victims, and which of them have no copy here.

        Copies are recorded in the device's tier (`DeviceBlockPool.note_copies`), so
        that a block is looked up once. `num` is how many blocks to look at; if fewer
        are free, these.
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
        is_over = self.executor.complete_store(words, success)
        ended = list(compress(names, is_over.tolist()))
        if success:
            self._record(ended, removed=False)
        else:
            self._forget(ended)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events since the last time, oldest first; then forget them."""
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
        """Find a prefix whose blocks are on the device or readable here.

        The answer is i32[n] and i32[n] for its n keys: their blocks on the device, and
        here; NO_BLOCK for none, but not in both.
        """
        names, words = pack(keys)
        if not names:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        num, on_device, on_host = self.executor.find_beside(pool.bound, words)
        return on_device[:num], on_host[:num]

    def contains(self, keys: Iterable[bytes]) -> NDArray[np.bool_]:
        """Whether each key has a block, stores in progress included: bool[n]."""
        is_known: NDArray[np.bool_] = self.find_held(keys) != NO_BLOCK
        return is_known

    def find_held(self, keys: Iterable[bytes]) -> NDArray[np.int32]:
        """`find`, stores in progress included."""
        names, words = pack(keys)
        return self.executor.find(words) if len(names) else np.empty(0, np.int32)

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key was looked up often enough to be stored."""
        if self._reuse is None:
            return [True] * len(keys)
        check_are_bytes(keys)
        return self._reuse.passes(keys)

    def passes_of(self, keys: Sequence[BlockKey] | Words) -> NDArray[np.bool_] | None:
        """`passes` as bool[n]; None where all pass in any case."""
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
        """Protect blocks that a search has just found while they are read.

        If a block is being stored, or an id is no block's, it raises and pins none.
        """
        if not self.executor.pin(as_ids(block_ids)):
            raise ValueError(f"one of block_ids={shown(block_ids)} is being stored.")

    def unpin(self, block_ids: BlockIds) -> None:
        """Remove pins, one for each time a block is given.

        If a block has no load in progress, or an id is no block's, it raises and unpins
        none.
        """
        ids = as_ids(block_ids)
        if not self.executor.complete_step(ids, len(ids), 0):
            raise ValueError(
                f"one of block_ids={shown(block_ids)} has no load in progress."
            )

    def publish(self, block_ids: BlockIds, keys: list[bytes]) -> None:
        """Make blocks findable: the bytes of their stores have arrived.

        If a block is not being stored, an id is no block's, or there is not one for
        each key, it raises and changes nothing.
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
        """Forget blocks with bad bytes; blocks in flight stay."""
        names, words = pack(keys)
        if not names:
            return
        discarded = list(compress(names, self.executor.discard(words).tolist()))
        self._forget(discarded)
        self._record(discarded, removed=True)
        self.drops.note(discarded, "load failed")

    def clear(self) -> None:
        """Forget all blocks at once, loads and stores in progress included.

        What a policy such as "hazard" has learned of requests stays.
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
        """Change to an alternative policy; every block stays where it is.

        Loads and stores in progress go on. `learned` is a tier of the new policy, of
        any size, that was shown the same requests; each of its keys stands for `scale`
        keys.

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
        """Continue a policy that learns, "hazard", with an earlier table."""
        name = self._executor_name
        self.executor = resume(self.executor, self.policy, name, learned)

    @property
    def is_listed(self) -> bool:
        """Whether all blocks of the tier are known, except later writes by others."""
        return True

    def note_listing(
        self,
        present: Sequence[BlockKey],
        absent: Sequence[BlockKey],
        listed: bool | None,
        bound: tuple[int, int] | None,
    ) -> list[BlockKey]:
        """Apply a listing of the medium (`TierReport`); return what to delete.

        A medium that nothing else writes to is not listed.
        """
        return []

    def note_there(self, keys: Sequence[BlockKey]) -> None:
        """Record blocks that the medium has, as it answered."""

    def note_full(self, num: int) -> list[BlockKey]:
        """Record that blocks found no room in the medium; return what to delete."""
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
        """Return the keys that would be evicted next, the next one first.

        There may be fewer than `num`; none as long as there is room for as many without
        an eviction. It raises unless `tells_victims`.
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
        """Return the state for a reader, for tests and for debugging.

        Keys are as they were given, except foreign ones that have left and that the
        policy still remembers: these have 32 bytes.

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
        """The policies that this tier may have."""
        alternatives = self._alternatives.values()
        return [self.policy, *(p for p in alternatives if p is not self.policy)]

    def _warm_up(self, policy: Policy) -> None:
        scratch = make_executor(policy, self._executor_name)
        _, words = pack([bytes(KEY_BYTES)])
        ids, where = np.zeros(1, np.int64), np.zeros(1, np.int32)
        for read in (scratch.find, scratch.find_readable):
            read(words)
        for counts_as_use in (True, False):
            scratch.touch(words, counts_as_use)
        if self.listens:
            scratch.note(words, BEGIN, where, begun(0, 1))
            scratch.note(words, FINISH, where, finished(0, -1, 0, 0))
        if self.retains:
            scratch.note(words, RETAIN, where, retained(0, RELEASE, 0, 0))
        scratch.prepare_store(words)
        scratch.complete_store(words, True)
        scratch.pin(ids)
        scratch.complete_step(ids, 1)
        scratch.discard(words)

    def warm_up_beside(self, pool: DeviceBlockPool, *, is_lazy: bool) -> None:
        """Warm up the verbs that take the device's blocks, too.

        If `is_lazy`, `victims_of` will be called, else `place_from`.
        """
        for policy in self._policies:
            scratch = make_executor(policy, self._executor_name)
            _, words = pack([bytes(KEY_BYTES)])
            scratch.find_beside(pool.bound, words)
            if is_lazy:
                pool.next_victims(0, scratch.next_victims)
            elif isinstance(scratch, NativeExecutor):
                scratch.place_from(pool.bound, words, np.zeros(1, np.int64), True)

    def _rows_for_policy(
        self, block_hashes: Iterable[bytes], positions: Sequence[int] | None
    ) -> tuple[Words, Positions] | None:
        """Lay out keys and positions for a policy; None for no keys or no listener.

        Keys beyond one batch are left out: the cache has fewer blocks. Without keys not
        even the time is passed on.
        """
        if not self.listens:
            return None
        if not self._tells_keys:  # Priorities need the time alone.
            block_hashes, positions = list(islice(block_hashes, 1)), None
        names, words = pack(block_hashes)
        where = NO_IDS if positions is None else as_ids(positions, "position")
        refuse_outside(where, _MAX_COUNT, name="position")
        if positions is not None and len(where) != len(names):
            raise ValueError(
                f"{len(where)} positions must be {len(names)}, one for each key."
            )
        if not names:
            return None
        words = words[: self.policy.max_batch]
        if positions is None:
            return words, np.arange(len(words), dtype=np.int32)
        return words, where[: len(words)].astype(np.int32)

    def _pass_time(self, now_ms: int) -> None:
        """Record the time that the policy is about to get.

        The policy has 32 bits of it, so that a time more than 2**31 ms later looks like
        an earlier one: it gets one in between first.
        """
        ahead = now_ms - self._now_ms
        if self._has_time and ahead > 0 and ahead % _TIMES >= _TIMES // 2:
            between = (self._now_ms + ahead % _TIMES // 2) % _TIMES
            _, no_keys = pack([])
            self.executor.note(
                no_keys, FINISH, _NO_POSITIONS, finished(between, -1, 0, 0)
            )
        self._now_ms, self._has_time = now_ms, True

    def _give(
        self, names: Sequence[bytes], retention: Retention | None, given_ms: int
    ) -> None:
        """Set the priority of blocks that are here, or remove it, a batch at a time."""
        _, words = pack(names)
        terms = RELEASE, 0, 0
        if retention is not None:
            terms = retention.priority, retention.half_life_ms, retention.ttl_ms
        about = retained(given_ms % _TIMES, *terms)
        for start in range(0, len(words), self.policy.max_batch):
            batch = words[start : start + self.policy.max_batch]
            self.executor.note(batch, RETAIN, _NO_POSITIONS, about)

    def _touch_in_batches(self, words: Words, counts_as_use: bool) -> None:
        size = self.policy.max_batch
        # From the last batch to the first, as keys are touched in one batch.
        for start in reversed(range(0, len(words), size)):
            self.executor.touch(words[start : start + size], counts_as_use)

    def _placed(
        self,
        names: Sequence[bytes],
        words: Words,
        num_stored: int,
        block_ids: Ids,
        evicted_keys: Words,
    ) -> Placement:
        """Record where keys go (NO_BLOCK: nowhere) and which were evicted."""
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
            groups = self._notes.groups(to_store, self._now_ms)
            for (retention, given_ms), keys in groups:
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
        """Record that blocks with these names have left."""
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


def _as_policy(cache_policy: Any, num_blocks: int) -> Policy:
    """Make the policy of a name; check that it fits a tier of `num_blocks`."""
    policy = cache_policy
    if isinstance(policy, str):
        # Twice the tier, so that more different keys than this cannot fit at all.
        max_batch = max(_MIN_MAX_BATCH, 2 * num_blocks)
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
