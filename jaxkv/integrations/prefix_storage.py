"""A store behind a prefix store's host blocks: a folder, a bucket or a Redis.

Blocks that only the store has are fetched to the host before they are loaded, and
blocks worth keeping are written in the background. As for a scheduler, `Boundary`
decides, and `StorageWorker` moves bytes, on the copier's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

import jax

from jaxkv import ConfigError, Namespace, OffloadConfig, OffloadingManager
from jaxkv._util import hint
from jaxkv.integrations.prefix_copier import PrefixCopier
from jaxkv.integrations.prefix_layout import PrefixLayout
from jaxkv.scheduling.boundary import Boundary, TierBelow
from jaxkv.scheduling.plan import (
    Gate,
    PrefixQuery,
    find_fetch,
    find_probe,
    may_probe,
    size_fetch,
)
from jaxkv.scheduling.rules import WriteRule, check_lists_victims
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.search.groups import FullAttention
from jaxkv.search.tiers import first_tokens
from jaxkv.tiers.storage import StorageTier
from jaxkv.transfer.storage.workers import start_thread
from jaxkv.types import BlockKey

# The thread's pause between two steps: while something moves, while nothing answers,
# and while nothing is in flight.
_MIN_PAUSE_S, _MAX_PAUSE_S, _IDLE_S = 1e-3, 0.05, 0.25
_MAX_WAIT_S = threading.TIMEOUT_MAX / 2  # A lock accepts no longer wait.


class StorageKeys(TypedDict, total=False):
    """The keys of `OffloadConfig` for the store."""

    storage: str | None
    storage_bytes: int | str
    storage_owner: bool
    storage_write: WriteRule
    max_storage_blocks: int
    storage_deadline_s: float
    storage_await_s: float
    storage_list_s: float | None
    storage_probe_s: float | None
    storage_secret: str | None


def storage_config(
    keys: Mapping[str, Any], model: str, weights_epoch: str
) -> OffloadConfig | None:
    """Check the keyword arguments for a store; None without a store.

    TypeError if a name is not a key of a store; ValueError for a wrong value, if the
    model or its weights have no name, or if several processes serve the model.
    """
    for name in keys:
        if name not in StorageKeys.__annotations__:
            near = hint(name, list(StorageKeys.__annotations__))
            raise TypeError(f"got an unexpected keyword argument {name!r}{near}")
    config = OffloadConfig.from_dict(keys)
    if config.storage is None:
        return None
    for name, value in (("model", model), ("weights_epoch", weights_epoch)):
        if not value:
            fault = (
                f"storage needs {name} (got {value!r}): stored KV outlives the process "
                "and must not be reused with other weights."
            )
            raise ConfigError([fault])
    if jax.process_count() > 1:
        raise ValueError(
            "storage needs a model that one process serves (got "
            f"{jax.process_count()}): prefix stores of several processes do not agree "
            "on hits."
        )
    return config


def check_weights_epoch(weights_epoch: str | None) -> None:
    """Raise ValueError unless the weights from now on have a name."""
    if not weights_epoch:
        raise ValueError(
            f"{weights_epoch=} must name the weights from now on, because the storage "
            "keeps the KV of the old weights. If the weights are the same, pass the "
            "same name."
        )


def storage_namespace(namespace: Namespace, layout: PrefixLayout) -> bytes:
    """Encode what the bytes of all blocks depend on, except the weights.

    Only the keys have the weights, so that listings find blocks of older weights, and
    they are deleted when the store is full.
    """
    return json.dumps(
        [
            "jaxkv prefix store 1",
            namespace.model,
            namespace.kv_dtype,
            namespace.layout,
            namespace.block_size,
            list(zip(layout.names, layout.axes, strict=True)),
        ]
    ).encode()


class PrefixStorage:
    """Fetches blocks for the loads of a prefix store, and writes its blocks.

    Public methods need the prefix store's `lock`, unless they say otherwise. A separate
    thread advances transfers, and notifies `lock` when one has ended. `note_fault` is
    called with an unexpected exception, without the lock.
    """

    def __init__(
        self,
        config: OffloadConfig,
        stats: OffloadStats,
        namespace: bytes,
        block_size: int,
        copier: PrefixCopier,
        manager: OffloadingManager,
        lock: threading.Condition,
        note_fault: Callable[[BaseException], None],
    ) -> None:
        check_lists_victims(config.storage_write, manager.can_list_victims)
        self._copier = copier
        self._lock = lock
        self._note_fault = note_fault
        self._groups = (FullAttention(block_size),)
        self._deadline_s = min(config.storage_deadline_s, _MAX_WAIT_S)
        rules = dataclasses.replace(
            config.make_rules(),
            skip_slow_loads=True,  # Once `note_prefill_rate` was called.
            block_bytes=copier.engine.block_bytes,
        )
        self._stats = stats
        self._gate = Gate(rules, stats)
        self._names = map(str, itertools.count())  # Of requests.
        open_storage = functools.partial(
            config.open_storage, copier.engine, namespace=namespace
        )
        self.worker = cast(StorageWorker, copier.run(open_storage).result())
        # Prefixes to fetch once the store has answered their probes.
        self._prefetches: dict[str, list[BlockKey]] = {}
        self._num_waiting = 0
        self._is_listed = False
        self._num_lost = 0  # As of the last `wait`.
        self._is_closed = False
        self._pause_s = _MIN_PAUSE_S
        self._wake = threading.Event()
        try:
            num_blocks = self.worker.num_blocks(cast(int, config.storage_bytes))
            self.tier = StorageTier(block_size, num_blocks)
            below = TierBelow(
                self.tier,
                rules.storage_write,
                rules.max_storage_blocks,
                rules.storage_probe_s or 0.0,
                has_other_writers=True,
            )
            self._storage = Boundary(self._groups, manager, below, rules)
            # The thread must not keep this, and gigabytes, from being collected.
            self._thread = start_thread(
                "jaxkv prefix storage",
                *(_advance, weakref.ref(self), self._wake, self.worker.closer),
            )
        except BaseException:
            self.worker.close()
            raise

    @property
    def stats(self) -> OffloadStats:
        """A copy of the counts, including the store's counts."""
        return self._stats.with_storage(self._storage.counts, self.tier.num_evicted)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Set the rate of prefills for the gate; 0 for no gate."""
        self._gate.note_rates(0.0, tokens_per_s)

    def note_stored(self, keys: Sequence[BlockKey]) -> None:
        """Record blocks that have arrived on the host."""
        self._storage.note_stored(keys)
        self._wake.set()

    def bring(
        self,
        keys: list[BlockKey],
        min_tokens: int,
        is_wanted: Callable[[], bool],
        *,
        is_expected: bool = False,
    ) -> None:
        """Fetch the blocks of a prefix that only the store has, and wait for them.

        The wait releases the lock and ends at the deadline, or once `is_wanted` returns
        False. The lock is held from then on, so that no block is evicted before the
        caller holds it. Nothing is fetched if host and store have less than
        `min_tokens`. With `is_expected`, another engine writes the prefix to the store.
        """
        self._storage.note_asked(keys)
        self._wake.set()
        until_s = time.monotonic() + self._deadline_s
        name = next(self._names)
        # Each round fetches as much as there is room for.
        while self._begin(name, keys, min_tokens, is_expected):
            self._num_waiting += 1
            has_arrived = self._lock.wait_for(
                lambda: (
                    not self._storage.is_awaited(name)
                    or self._is_closed
                    or not is_wanted()
                ),
                max(0.0, until_s - time.monotonic()),
            )
            self._num_waiting -= 1
            self._storage.release(name)
            if not has_arrived or self._is_closed or not is_wanted():
                break
        self._storage.forget(name)

    def prefetch(self, keys: list[BlockKey]) -> None:
        """Begin to fetch the blocks of a prefix that only the store has."""
        self._go_on_with(next(self._names), keys)

    def reset(self) -> None:
        """Forget the store's blocks and the blocks in flight; the host was cleared."""
        self._storage.reset()
        self._prefetches.clear()
        # Before a save gets the host blocks of fetches.
        self._copier.run(self._end_fetches)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the store has been listed and all writes have ended.

        Returns False after a timeout, or if a listing or a write has failed since the
        last call.
        """
        timeout_s = self._deadline_s if timeout_s is None else timeout_s
        timeout_s = min(timeout_s, _MAX_WAIT_S)
        self._wake.set()
        self._lock.wait_for(lambda: self._is_idle or self._is_closed, timeout_s)
        failed = self.worker.storage_io.stats.failed
        num_lost = self._storage.num_lost
        num_lost += sum(failed[what] for what in failed if what.startswith("list "))
        has_lost, self._num_lost = num_lost > self._num_lost, num_lost
        return self._is_idle and not has_lost

    def close(self) -> None:
        """Wait for writes until the deadline, and end the threads; without the lock."""
        end_s = time.monotonic() + self._deadline_s
        with self._lock:
            if self._is_closed:
                return
            self._wake.set()
            self._lock.wait_for(lambda: not self._storage.has_writes, self._deadline_s)
            self._is_closed = True
            self._lock.notify_all()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._copier.run(self._end_fetches).result()
        self.worker.close(max(0.0, end_s - time.monotonic()))

    @property
    def _is_idle(self) -> bool:
        return self._is_listed and not self._storage.has_writes

    def _go_on_with(self, name: str, keys: list[BlockKey]) -> None:
        """Prefetch a prefix, at once or when the store has answered a probe."""
        if self._begin(name, keys, 0) and self._storage.is_probing(name):
            self._prefetches[name] = keys
        else:
            self._storage.forget(name)

    def _begin(
        self,
        name: str,
        keys: list[BlockKey],
        min_tokens: int,
        is_expected: bool = False,
    ) -> bool:
        """Begin to fetch or probe a part of a prefix; return whether to wait."""
        if self._is_closed:
            return False
        boundary, gate = self._storage, self._gate
        boundary.bytes_per_s = self.worker.read_bytes_per_s
        max_tokens = len(keys) * self._groups[0].block_size
        query = PrefixQuery(boundary, [first_tokens(0)], [keys], max_tokens)
        may_ask = not is_expected and may_probe(boundary, boundary.probing.get(name))
        if may_ask and max_tokens >= min_tokens:
            probe, speed = find_probe(gate, query, name)
            gate.count(None, speed)
            if probe is not None:
                boundary.probe(name, *probe)
                self._wake.set()
                return True
        if not (self.tier.num_held_blocks or is_expected):
            return False
        fetch = find_fetch(query, name if is_expected else None)
        if fetch is None or fetch.num_tokens < min_tokens:
            return False
        num, speed = size_fetch(gate, boundary, fetch)
        gate.count(None, speed)
        if not num or not boundary.fetch(name, fetch, num):
            return False
        self._wake.set()
        return True

    # The methods below run in threads, without the lock.

    def _end_fetches(self) -> None:
        self._guarded(self.worker.end_fetches)

    def _step(self) -> bool:
        """Advance transfers; return whether anything has changed."""
        with self._lock:
            moves = None if self._is_closed else self._storage.issue()
        self.worker.start(moves)
        reports = self.worker.take_reports()
        with self._lock:
            self._storage.report(reports)
            for name in list(self._prefetches):
                if not self._storage.is_probing(name):
                    self._go_on_with(name, self._prefetches.pop(name))
            was_listed = self._is_listed
            self._is_listed |= self.worker.is_listed
            has_changed = bool(moves or reports) or self._is_listed != was_listed
            if has_changed:
                self._lock.notify_all()
        return has_changed

    def _guarded(self, task: Callable[[], Any]) -> Any:
        try:
            return task()
        except BaseException as error:
            self._note_fault(error)
            return None

    def advance(self) -> float:
        """Advance transfers; return the seconds until the next call, 0 for none."""
        try:
            step = self._copier.run(functools.partial(self._guarded, self._step))
        except RuntimeError:  # The interpreter ends, and this was not closed.
            return 0.0
        has_changed = step.result()
        with self._lock:
            if has_changed is None or self._is_closed:
                return 0.0
            is_busy = self.worker.num_in_flight or not self._is_idle
            max_pause_s = _MIN_PAUSE_S if self._num_waiting else _MAX_PAUSE_S
        if has_changed:
            self._pause_s = _MIN_PAUSE_S
        elif is_busy:
            self._pause_s = min(2 * self._pause_s, max_pause_s)
        else:
            self._pause_s = _IDLE_S
        return self._pause_s


def _advance(
    storage_ref: weakref.ReferenceType[PrefixStorage],
    wake: threading.Event,
    close: Callable[[], None],
) -> None:
    """Advance transfers until the storage is closed or collected; a thread's loop."""
    pause_s = _MIN_PAUSE_S
    while pause_s:
        wake.wait(pause_s)
        wake.clear()
        storage = storage_ref()
        if storage is None:
            close()  # No owner is left to close the worker.
            return
        pause_s = storage.advance()
        del storage
