"""The device tier for Python callers: lists of ids and keys in, Python values out.

`DeviceBlockPool` keeps a `jaxkv.device_tier` state on the CPU backend, as the engine
needs its answers at once. Every call is one compiled program, which updates the state
in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv import device_programs as programs
from jaxkv import device_tier
from jaxkv.batches import bucket, cpu_device
from jaxkv.device_programs import Program
from jaxkv.device_tier import NULL_BLOCK, DeviceTier, Given
from jaxkv.keys import PackedKeys, keys_from_foreign, lanes_to_keys
from jaxkv.types import DEVICE_MEDIUM, NO_BLOCK, BlockKey, OffloadingEvent

__all__ = ["NULL_BLOCK", "BlockIds", "DeviceBlockPool"]

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

_NO_IDS = np.empty(0, np.int32)


class DeviceBlockPool:
    """Reference counts and prefix cache of the device's block pool.

    The null block may stand in any list of ids; it is passed over. A list may have an
    id more than once, which then counts as often. A call that raises changes nothing.

    Args:
        num_blocks: Blocks in the pool, the null block among them.
        enable_events: Keep events, for `take_events`.
        block_size: Tokens in a block; only repeated in events.
        max_batch: Most blocks of one compiled call; what has more is cut into parts.

    Attributes:
        num_blocks: Blocks in the pool.
        num_free: Blocks that `allocate` could hand out now.
        num_changes: Grows with whatever changes what a block contains or which is given
            up next; pins do not.
        block_size: As given.
        unwritten: Blocks whose tokens were neither computed nor loaded; `cache` skips
            them. `OffloadScheduler` adds them, `allocate` and `evict` remove theirs.
        state: All that is known, as a pytree. A program that puts another in its place
            sets `num_free` to that of the state.

    Raises:
        ValueError: If there is no block besides the null block, or `max_batch` is
            less than 2.

    Example:
        >>> pool = DeviceBlockPool(num_blocks=3)
        >>> pool.allocate(2)
        [1, 2]
        >>> pool.cache([1, 2], [b"head", b"tail"])
        []
        >>> pool.free([2, 1])
        >>> pool.find_prefix([b"head", b"tail", b"other"])
        [1, 2]
        >>> pool.allocate(1)  # freed first, so given up first
        [2]
        >>> pool.find_prefix([b"head", b"tail"])
        [1]
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_events: bool = False,
        block_size: int = 0,
        max_batch: int = 8192,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"{num_blocks=} must be at least 2: the null block and one to use."
            )
        if max_batch < 2:
            raise ValueError(f"{max_batch=} must be at least 2.")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_changes = 0
        self.block_size = block_size
        self.unwritten: set[int] = set()
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        allocations = programs.ALLOCATE, programs.ALLOCATE_WITH_KEYS
        self._allocate_program = allocations[enable_events]
        self._max_batch = max_batch
        # Keys that are not of 32 bytes, as the caller knows them, by block.
        self._names: dict[int, bytes] = {}
        device = cpu_device()
        with jax.default_device(device):
            state = device_tier.init(num_blocks, max_batch)
        self.state: DeviceTier = jax.device_put(state, device)

    def ref_cnt(self, block_id: int) -> int:
        """Count the holders of a block."""
        return int(self.counts(self._checked([block_id]))[0][0])

    def find(self, keys: Iterable[BlockKey]) -> NDArray[np.int32]:
        """Find the block that serves each key.

        Args:
            keys: n of them.

        Returns:
            i32[n]. Of several blocks with the key the one cached first, NO_BLOCK where
            there is none. They are not held until `touch` is called.
        """
        parts = self._run(programs.FIND, keys=keys_from_foreign(keys))
        return np.concatenate([_NO_IDS, *(found[:num] for num, found in parts)])

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """List the blocks of the longest run of keys, from the first on, that is here.

        Args:
            keys: Keys of a prefix, in its order.

        Returns:
            Their blocks. They are not held until `touch` is called.
        """
        found: list[int] = self.find(keys).tolist()
        return found[: found.index(NO_BLOCK)] if NO_BLOCK in found else found

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Tell which blocks still hold a key, whether they serve it or not.

        Args:
            block_ids: n blocks.
            keys: n keys, one for each block.

        Returns:
            bool[n].
        """
        ids, _, lanes = self._pairs(block_ids, keys)
        parts = self._run(programs.HOLDS, ids, lanes)
        held = [held[:num] for num, held in parts]
        return np.concatenate([np.zeros(0, np.bool_), *held])

    def allocate(self, num: int) -> list[int]:
        """Take blocks, giving up what they cached.

        Args:
            num: How many.

        Returns:
            Their ids, each held once.

        Raises:
            ValueError: If fewer are free, or `num` is negative; then none is taken.
        """
        if num < 0:
            raise ValueError(f"{num=} must be at least 0.")
        if num > self.num_free:
            raise ValueError(
                f"{num=} blocks wanted, but only {self.num_free} of "
                f"{self.num_blocks} are free."
            )
        block_ids: list[int] = []
        lost: list[bytes] = []
        for size in programs.cut(num, self._max_batch):
            width = programs.padded_size(size, self._max_batch)
            ids, given = self._call(self._allocate_program, np.int32(size), width=width)
            block_ids += ids[:size].tolist()
            lost += self._lost(given, size) if given is not None else []
        self.num_free -= num
        self._note_losses(block_ids, lost)
        return block_ids

    def next_free(self, num: int) -> tuple[list[int], list[bytes | None]]:
        """Tell which blocks `allocate` would take next.

        Args:
            num: How many; if fewer are free, these.

        Returns:
            Their ids in its order, and the key that each would lose, None if none.
        """
        num = min(num, self.num_free)
        if num <= 0:
            return [], []
        given = self._call(programs.NEXT_FREE, np.int32(num), width=bucket(num))
        return given.block_ids[:num].tolist(), self._keys_of(given, num)

    def touch(self, block_ids: BlockIds) -> None:
        """Hold blocks once more, so that they are not given up."""
        for _, num_free in self._run(programs.TOUCH, self._checked(block_ids)):
            self.num_free = int(num_free)

    def free(self, block_ids: BlockIds) -> None:
        """Let go of blocks that were allocated or touched.

        Args:
            block_ids: Which. Of those that nobody holds any more the first is given up
                first, so that a prefix is to be passed tail first.

        Raises:
            ValueError: If a block is not held as often; then none is let go.
        """
        self._release(programs.FREE, block_ids, "is freed more often than it is held.")

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks from being allocated, but at their place among the free ones.

        For transfers that read them: a block that is freed, or was free already, is
        given up as early as if there had been no transfer, but not during it.
        """
        for _, num_free in self._run(programs.PIN, self._checked(block_ids)):
            self.num_free = int(num_free)

    def unpin(self, block_ids: BlockIds) -> None:
        """Take pins back.

        Raises:
            ValueError: If a block is not pinned as often; then none is taken back.
        """
        complaint = "is unpinned more often than it is pinned."
        self._release(programs.UNPIN, block_ids, complaint)

    def cache(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
        """Make full, computed blocks findable.

        Args:
            block_ids: Blocks that somebody holds.
            keys: What each of them contains. A block that has its key is left alone.

        Returns:
            The blocks that were skipped, as they are `unwritten`.

        Raises:
            ValueError: If a block is known under another key, or is given two; then
                none is cached.
        """
        ids, names, lanes = self._pairs(block_ids, keys)
        skipped = [i for i in ids.tolist() if i in self.unwritten]
        if skipped:
            rows = np.flatnonzero(~np.isin(ids, skipped))
            self.cache(ids[rows], [names[row] for row in rows.tolist()])
            return skipped
        added: list[int] = []
        start = 0
        for num, answer in self._run(programs.CACHE, ids, lanes):
            if answer.bad.any():
                row = start + int(answer.bad.argmax())
                list(self._run(programs.EVICT, ids[added]))  # Undo the parts before.
                raise ValueError(
                    f"block_id={ids[row]} is cached as "
                    f"{self._known_as(ids, names, row)!r}, not {names[row]!r}."
                )
            added += (start + np.flatnonzero(answer.added[:num])).tolist()
            start += num
        if lanes is not names:
            self._names.update(
                (int(ids[row]), names[row]) for row in added if names[row] != lanes[row]
            )
        if added and self._events is not None:
            self._record([names[row] for row in added], removed=False)
        return skipped

    def evict(self, block_ids: BlockIds) -> None:
        """Forget what blocks contain; they stay with whoever holds them."""
        ids = list(dict.fromkeys(self._checked(block_ids).tolist()))
        lost: list[bytes] = []
        for num, given in self._run(programs.EVICT, np.array(ids, np.int32)):
            lost += self._lost(given, num)
        self._note_losses(ids, lost)

    def reset(self) -> bool:
        """Forget what all blocks contain, unless one is held or pinned.

        Returns:
            Whether it was done.
        """
        if not self._call(programs.RESET):
            return False
        self._names.clear()
        self._record([], removed=True)
        return True

    def take_events(self) -> list[OffloadingEvent]:
        """Hand out the events since the last time; none if they are not kept.

        Every block that gets a key or loses it counts, so that a key that several
        blocks hold is there as often. A removal of no keys is that of all.
        """
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def warm_up(self, max_blocks: int) -> None:
        """Compile what a step may call, now rather than at its first use.

        That is all but `next_free`, `evict`, `reset` and `ref_cnt`.

        Args:
            max_blocks: Most blocks or keys that one call will have.
        """
        self.state = programs.warm_up(
            self.state, max_blocks, self._max_batch, self._allocate_program
        )

    def check(self) -> None:
        """Raise AssertionError if something is not as it should be. For tests."""
        # A copy, as an array that NumPy looks at cannot be updated in place.
        state = jax.tree.map(jnp.copy, self.state)
        device_tier.check(state)
        assert self.num_free == int(state.num_free)
        assert all(np.array(state.cache.has_key)[list(self._names)])

    def _call(self, program: Program, *batch: Any, width: int | None = None) -> Any:
        self.state, answer = programs.call(program, self.state, *batch, width=width)
        self.num_changes += "queue" in program.changes or "cache" in program.changes
        return answer

    def _run(
        self,
        program: Program,
        ids: NDArray[np.int32] | None = None,
        keys: Sequence[BlockKey] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Run a program in parts; yield their lengths and their padded answers."""
        for num, batch in programs.parts(ids, keys, self._max_batch):
            yield num, self._call(program, *batch)

    def _release(self, program: Program, block_ids: BlockIds, complaint: str) -> None:
        ids = self._checked(block_ids)
        if len(ids) > self._max_batch:
            ids = self._in_first_places(program, ids, complaint)
        for num, (num_free, bad_row) in self._run(program, ids):
            if bad_row < num:
                raise ValueError(f"block_id={ids[bad_row]} {complaint}")
            self.num_free = int(num_free)

    def _in_first_places(
        self, program: Program, ids: NDArray[np.int32], complaint: str
    ) -> NDArray[np.int32]:
        """Refuse a release in parts before the first; move ids to their first place."""
        ids = ids[ids != NULL_BLOCK]
        blocks, first, block_of, times = np.unique(
            ids, return_index=True, return_inverse=True, return_counts=True
        )
        held, pins = self.counts(blocks)
        bad = first[times > (pins if program is programs.UNPIN else held)]
        if len(bad):
            raise ValueError(f"block_id={ids[bad.min()]} {complaint}")
        return ids[np.argsort(first[block_of], kind="stable")]

    def counts(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Read how many hold each of n blocks, and how many pin it: i32[2, n]."""
        parts = self._run(programs.COUNTS, ids)
        each = (np.stack(counts)[:, :num] for num, counts in parts)
        return np.concatenate([_NO_IDS.reshape(2, 0), *each], axis=1)

    def _checked(self, block_ids: BlockIds) -> NDArray[Any]:
        return programs.checked_ids(block_ids, self.num_blocks)

    def _pairs(
        self, block_ids: BlockIds, keys: Sequence[BlockKey]
    ) -> tuple[NDArray[Any], list[bytes], list[BlockKey]]:
        """Check blocks and their keys; the keys as given, and brought to 32 bytes."""
        ids = self._checked(block_ids)
        names = keys if isinstance(keys, PackedKeys) else list(keys)
        if len(names) != len(ids):
            raise ValueError(f"{len(ids)=} blocks must have as many {len(keys)=}.")
        return ids, names, keys_from_foreign(names)

    def _keys_of(self, given: Given, num: int) -> list[bytes | None]:
        """List the keys of the first blocks of an answer, None for no key."""
        keys = lanes_to_keys(given.keys[:num])
        pairs = zip(keys, given.has_key[:num].tolist(), strict=True)
        known: list[bytes | None] = [key if has_key else None for key, has_key in pairs]
        if self._names:
            for row, block_id in enumerate(given.block_ids[:num].tolist()):
                known[row] = self._names.get(block_id, known[row])
        return known

    def _known_as(self, ids: NDArray[Any], keys: Sequence[BlockKey], row: int) -> bytes:
        """Tell the key of a row's block, which an earlier row gave if it has none."""
        block_id = int(ids[row])
        cache = self.state.cache
        if not cache.has_key[block_id]:
            return keys[int(np.argmax(ids == block_id))]
        (key,) = lanes_to_keys(cache.directory.keys[block_id][None])
        return self._names.get(block_id, key)

    def _lost(self, given: Given, num: int) -> list[bytes]:
        return [key for key in self._keys_of(given, num) if key is not None]

    def _note_losses(self, block_ids: list[int], lost: list[bytes]) -> None:
        self.unwritten.difference_update(block_ids)
        if self._names:
            for block_id in block_ids:
                self._names.pop(block_id, None)
        if lost:
            self._record(lost, removed=True)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if self._events is not None:
            self._events.append(
                OffloadingEvent(block_hashes, self.block_size, DEVICE_MEDIUM, removed)
            )
