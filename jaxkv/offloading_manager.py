"""vLLM's `OffloadingManager` over the pure functions of `jaxkv.manager`.

Bytes in, Python values out. The state lives on the CPU backend, as the scheduler that
asks needs its answers at once. Batches are padded to a few sizes, so that each
function is compiled once per size and process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv import manager
from jaxkv.keys import key_from_foreign, keys_to_lanes, lanes_to_keys
from jaxkv.policies import get_policy_maker
from jaxkv.reuse import ReuseFilter
from jaxkv.snapshot import Snapshot, take_snapshot
from jaxkv.types import (
    HOST_MEDIUM,
    KEY_BYTES,
    KEY_LANES,
    NO_BLOCK,
    BlockKey,
    LoadStoreSpec,
    OffloadingEvent,
    Policy,
    PrepareStoreOutput,
)

_SMALLEST_BATCH = 16
_BATCH_STEP = 4
_LOG_BATCH = 4096

_lookup = jax.jit(manager.lookup, static_argnums=0)
_touch = jax.jit(manager.touch, static_argnums=0, donate_argnums=1)
_prepare_load = jax.jit(manager.prepare_load, static_argnums=0, donate_argnums=1)
_complete_load = jax.jit(manager.complete_load, static_argnums=0, donate_argnums=1)
_prepare_store = jax.jit(manager.prepare_store, static_argnums=0, donate_argnums=1)
_complete_store = jax.jit(manager.complete_store, static_argnums=0, donate_argnums=1)


class OffloadingManager:
    """Keeps track of which blocks are in host memory, and where.

    The methods, their order of calls and their results are those of vLLM 0.19.1's
    `CPUOffloadingManager`, with three differences, each for the better: misuse raises
    a ValueError that names the key; a call that raises changes nothing; and a key
    that is given twice to `prepare_store` takes one block (vLLM's takes two and never
    finds the first again).

    Keys are any `bytes`. Keys of 32 bytes, such as `jaxkv.hashing` makes, are used as
    they are; others cost one SHA-256 each.

    Args:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks of the host tier.
        cache_policy: Which blocks to give up when it is full: a registered name, such
            as "lru", "arc" and "arc_fixed", or a `Policy` made for `num_blocks` and
            for batches of at least as many keys.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only what was looked up at least so often, as vLLM's
            `FilterReusedOffloadingManager` does; 0 or 1 to store whatever is offered.
        max_tracker_size: Keys whose look-ups are counted for that, the latest ones.
        warmup: Whether to compile every function now rather than at its first use.
        warmup_max_keys: Most keys in one call to compile for; see `warm_up`.

    Raises:
        ValueError: If a number is too small, or the policy is not known or was made
            for other sizes.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        num_held_blocks: Blocks that hold a key, stores in progress included.

    Example:
        >>> m = OffloadingManager(block_size=16, num_blocks=2)
        >>> m.prepare_store([b"a", b"b"]).store_spec.block_ids.tolist()
        [0, 1]
        >>> m.complete_store([b"a", b"b"])
        >>> m.lookup([b"a", b"b", b"c"])
        2
        >>> m.prepare_store([b"c"]).block_hashes_evicted
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
        max_tracker_size: int = 64_000,
        warmup: bool = False,
        warmup_max_keys: int = 1024,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("store_threshold", store_threshold, 0),
            ("max_tracker_size", max_tracker_size, 1),
            ("warmup_max_keys", warmup_max_keys, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        self._policy = _as_policy(cache_policy, num_blocks)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.medium = HOST_MEDIUM
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.num_held_blocks = 0
        self._max_batch = self._policy.max_batch
        self._names: dict[BlockKey, bytes] = {}
        self._reuse: ReuseFilter | None = None
        if store_threshold > 1:
            self._reuse = ReuseFilter(store_threshold, max_tracker_size)
        device = _scheduler_device()
        with jax.default_device(device):
            state = manager.init(self._policy, num_blocks)
        self._state = jax.device_put(state, device)
        if warmup:
            self.warm_up(warmup_max_keys)

    def warm_up(self, max_keys: int) -> None:
        """Compile every function for calls of up to `max_keys` keys, now.

        Args:
            max_keys: Most keys that a call will have.
        """
        size = _SMALLEST_BATCH
        while size <= _bucket(max_keys):
            # A batch of which nothing is meant changes nothing.
            batch = np.zeros((size, KEY_LANES), np.uint32), np.int32(0)
            _lookup(self._policy, self._state, *batch)
            self._state = _touch(self._policy, self._state, *batch)
            for step in (_prepare_load, _complete_load, _prepare_store):
                self._state, _ = step(self._policy, self._state, *batch)
            self._state, _ = _complete_store(
                self._policy, self._state, *batch, np.bool_(True)
            )
            size *= _BATCH_STEP

    def lookup(self, block_hashes: Iterable[bytes]) -> int:
        """Count the keys, from the first on, that are present and ready.

        Args:
            block_hashes: Keys of a prefix, in its order.

        Returns:
            The length of the hit, in blocks.
        """
        keys = _as_keys(block_hashes)
        if self._reuse is not None:
            self._reuse.count(keys)
        if not keys:
            return 0
        return int(_lookup(self._policy, self._state, *_pad(keys)))

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Record a use of each key; the first ends as the most recent.

        Args:
            block_hashes: Keys of a prefix, in its order. Unknown ones are ignored.
        """
        keys = _as_keys(block_hashes)
        # The last part first, as the keys themselves are touched in reversed order.
        for start in reversed(range(0, len(keys), self._max_batch)):
            part = keys[start : start + self._max_batch]
            self._state = _touch(self._policy, self._state, *_pad(part))

    def prepare_load(self, block_hashes: Iterable[bytes]) -> LoadStoreSpec:
        """Pin blocks that are about to be read.

        Args:
            block_hashes: Keys that are present and ready.

        Returns:
            Where they are, in the order given.

        Raises:
            ValueError: If a key is absent or its bytes have not arrived.
        """
        return self._load(
            _prepare_load,
            block_hashes,
            absent="is not on the host; load only what lookup() counted.",
            unfit="is not ready for reading: its store has not completed.",
        )

    def complete_load(self, block_hashes: Iterable[bytes]) -> None:
        """Unpin blocks that were read.

        Args:
            block_hashes: Keys given to `prepare_load` before, once for each time.

        Raises:
            ValueError: If a key has no load in progress.
        """
        self._load(
            _complete_load,
            block_hashes,
            absent="is not on the host; complete_load() ends a prepare_load().",
            unfit="has fewer loads in progress than complete_load() would end.",
        )

    def prepare_store(self, block_hashes: Iterable[bytes]) -> PrepareStoreOutput | None:
        """Find room for the blocks that are not known yet.

        Blocks that are being loaded or stored are not evicted, nor are those whose
        keys are given here. With a `store_threshold`, keys that were not looked up
        often enough count as not given.

        Args:
            block_hashes: Keys of blocks that could be stored.

        Returns:
            What to store where, and what had to leave; None if there is no room, and
            then nothing has changed.
        """
        raw = list(block_hashes)
        keys = _as_keys(raw)
        if self._reuse is not None:
            passes = self._reuse.passes(keys)
            raw, keys = list(compress(raw, passes)), list(compress(keys, passes))
        if len(keys) > self._max_batch:
            names = dict(zip(keys, raw, strict=True))
            keys, raw = list(names), list(names.values())
            if len(keys) > self._max_batch:
                return None
        if not keys:
            return PrepareStoreOutput([], _spec(np.empty(0, np.int64)), [])
        self._state, answer = _prepare_store(self._policy, self._state, *_pad(keys))
        if not answer.ok:
            return None

        evicted_lanes = np.asarray(answer.evicted_keys)[: int(answer.num_evicted)]
        evicted = [self._names.pop(key, key) for key in lanes_to_keys(evicted_lanes)]
        block_ids = np.asarray(answer.block_ids)[: len(keys)]
        stored = np.flatnonzero(block_ids != NO_BLOCK).tolist()
        for row in stored:
            if raw[row] != keys[row]:
                self._names[keys[row]] = raw[row]
        self.num_held_blocks += len(stored) - len(evicted)
        self._record(evicted, removed=True)
        return PrepareStoreOutput(
            [raw[row] for row in stored], _spec(block_ids[stored]), evicted
        )

    def complete_store(
        self, block_hashes: Iterable[bytes], success: bool = True
    ) -> None:
        """End stores in progress.

        Args:
            block_hashes: Keys that `prepare_store` listed. Absent and ready ones are
                ignored.
            success: Whether the bytes arrived. If not, the blocks are given back.
        """
        raw = list(block_hashes)
        keys = _as_keys(raw)
        if not keys:
            return
        self._state, ended = _complete_store(
            self._policy, self._state, *_pad(keys), np.bool_(success)
        )
        rows = np.flatnonzero(np.asarray(ended)).tolist()
        if success:
            self._record([raw[row] for row in rows], removed=False)
        else:
            self.num_held_blocks -= len(rows)
            for row in rows:
                self._names.pop(keys[row], None)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the events since the last time, then forget them.

        Yields:
            The events, oldest first. They are forgotten when the last was taken.
        """
        if self.events is not None:
            yield from self.events
            self.events.clear()

    def snapshot(self) -> Snapshot:
        """Show the state to a reader, for tests and for debugging.

        Returns:
            The state, on the host. Keys are as they were given, but for foreign ones
            that have left and that the policy still remembers: these have 32 bytes.

        Example:
            >>> m = OffloadingManager(block_size=16, num_blocks=3)
            >>> _ = m.prepare_store([b"a", b"b"])
            >>> m.complete_store([b"a"])
            >>> m.snapshot()  # doctest: +NORMALIZE_WHITESPACE
            Snapshot(policy={'order': [b'a', b'b']}, ref_cnt={b'a': 0, b'b': -1},
                     block_ids={b'a': 0, b'b': 1}, free_ids=[2])
        """
        return take_snapshot(self._policy, self._state, self._names)

    def _load(
        self,
        step: Callable[..., tuple[manager.ManagerState, manager.LoadAnswer]],
        block_hashes: Iterable[bytes],
        *,
        absent: str,
        unfit: str,
    ) -> LoadStoreSpec:
        """Run one of the two load functions; raise if it refuses."""
        raw = list(block_hashes)
        keys = _as_keys(raw)
        if not keys:
            return _spec(np.empty(0, np.int64))
        self._state, answer = step(self._policy, self._state, *_pad(keys))
        block_ids = np.asarray(answer.block_ids)[: len(keys)]
        bad = np.flatnonzero(np.asarray(answer.bad))
        if bad.size:
            row = int(bad[0])
            why = absent if block_ids[row] == NO_BLOCK else unfit
            raise ValueError(f"Block {raw[row]!r} {why}")
        return _spec(block_ids)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if block_hashes and self.events is not None:
            self.events.append(
                OffloadingEvent(block_hashes, self.block_size, self.medium, removed)
            )


def _scheduler_device() -> Any:
    """Choose the CPU backend; where it is switched off, whatever there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _as_policy(cache_policy: str | Policy, num_blocks: int) -> Policy:
    """Make the policy of a name; check that it fits a tier of `num_blocks`."""
    policy = cache_policy
    if isinstance(policy, str):
        # Twice the tier, so that more different keys than this cannot fit at all.
        max_batch = _bucket(max(_LOG_BATCH, 2 * num_blocks))
        policy = get_policy_maker(policy)(num_blocks, max_batch)
    if not isinstance(policy, Policy):
        raise TypeError(f"{cache_policy=} must be, or name, a jaxkv.Policy.")
    if policy.num_blocks != num_blocks or policy.max_batch < num_blocks:
        raise ValueError(
            f"{policy.num_blocks=}, {policy.max_batch=} of the cache policy must be "
            f"{num_blocks} and at least {num_blocks}, as {num_blocks=}."
        )
    return policy


def _as_keys(block_hashes: Iterable[bytes]) -> list[BlockKey]:
    """Bring foreign keys to 32 bytes."""
    return [
        key if type(key) is bytes and len(key) == KEY_BYTES else key_from_foreign(key)
        for key in block_hashes
    ]


def _bucket(size: int) -> int:
    """Round up to a batch size that functions are compiled for."""
    bucket = _SMALLEST_BATCH
    while bucket < size:
        bucket *= _BATCH_STEP
    return bucket


def _pad(keys: Sequence[BlockKey]) -> tuple[NDArray[np.uint32], np.int32]:
    """Lay keys out as u32[K, 8], padded to a bucket, and their count."""
    lanes = np.zeros((_bucket(len(keys)), KEY_LANES), np.uint32)
    lanes[: len(keys)] = keys_to_lanes(keys)
    return lanes, np.int32(len(keys))


def _spec(block_ids: NDArray[Any]) -> LoadStoreSpec:
    return LoadStoreSpec(block_ids.astype(np.int64))
