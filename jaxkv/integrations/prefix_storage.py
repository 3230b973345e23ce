"""A store behind a prefix store's host blocks: a folder, a bucket or a Redis.

What a prompt finds only there is fetched to the host before it is loaded, and what is
worth keeping is written behind the host's back, by the parts that do it for a
scheduler: `Boundary` decides, and `StorageWorker` moves bytes, on the copier's thread.
"""

from __future__ import annotations

import dataclasses
import functools
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

# How long the thread sleeps between two looks: while something moves, while nothing
# answers, and while nothing is under way.
_LEAST_PAUSE_S, _MOST_PAUSE_S, _IDLE_S = 1e-3, 0.05, 0.25
_MOST_WAIT_S = threading.TIMEOUT_MAX / 2  # What a lock can be asked to wait.


class StorageKeys(TypedDict, total=False):
    """Keys of `OffloadConfig` about the store, as docs/configuration.md has them."""

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
    given: Mapping[str, Any], model: str, weights_epoch: str
) -> OffloadConfig | None:
    """Check the keys of a store, before anything is set aside for it.

    Args:
        given: What was passed beyond the named arguments.
        model: What names the model.
        weights_epoch: What names its weights.

    Returns:
        A configuration with them; None if no store is wanted.

    Raises:
        TypeError: A name is no key of a store.
        ConfigError: A value is wrong, or the model or its weights have no name.
        ValueError: Several processes serve one model.
    """
    for name in given:
        if name not in StorageKeys.__annotations__:
            near = hint(name, list(StorageKeys.__annotations__))
            raise TypeError(f"got an unexpected keyword argument {name!r}{near}")
    config = OffloadConfig.from_dict(given)
    if config.storage is None:
        return None
    for name, value in (("model", model), ("weights_epoch", weights_epoch)):
        if not value:
            raise ConfigError(
                [
                    f"storage needs a {name}, which is {value!r}: what is there "
                    "outlives the process, and must not be taken for that of other "
                    "weights."
                ]
            )
    if jax.process_count() > 1:
        raise ValueError(
            f"storage needs a model that one process serves, not {jax.process_count()}:"
            " prefix stores of several processes do not agree on what they find."
        )
    return config


def check_weights_epoch(weights_epoch: str | None) -> None:
    """Refuse to forget what is in a store without a name for the weights to come.

    Raises:
        ValueError: There is no name.
    """
    if not weights_epoch:
        raise ValueError(
            f"{weights_epoch=} must name the weights from now on, as the storage keeps "
            "the KV of those before; the same name, if they are the same."
        )


def storage_namespace(namespace: Namespace, layout: PrefixLayout) -> bytes:
    """Name what the bytes of all blocks depend on, but for the weights.

    Those are in the keys alone: so blocks of older weights are found by listings, and
    deleted when the store is full.
    """
    return json.dumps(
        [
            "jaxkv prefix store 1",
            namespace.model,
            namespace.kv_dtype,
            namespace.layout,
            namespace.block_size,
            [(leaf.name, leaf.axis) for leaf in layout.leaves],
        ]
    ).encode()


class PrefixStorage:
    """Fetches blocks for the loads of a prefix store, and writes what it has.

    Methods need the prefix store's lock, unless they say otherwise. A thread of its
    own looks after what is under way; `lock` is notified when some of it is over.

    Args:
        config: The keys of the store.
        namespace: What the bytes of all blocks depend on.
        block_size: Tokens per block.
        copier: Has the engine, and the thread that owns it.
        manager: The host tier.
        lock: The prefix store's, which guards the host tier too.
        note_fault: Called with an unexpected exception, without the lock.

    Attributes:
        tier: Which blocks the store has, as far as known.
        worker: Moves their bytes; used by a thread of this.

    Raises:
        ValueError: An argument is wrong.
        ImportError: The store needs an extra that is missing.
        StoreError: The store cannot be used.
    """

    def __init__(
        self,
        config: OffloadConfig,
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
        self._deadline_s = min(config.storage_deadline_s, _MOST_WAIT_S)
        rules = dataclasses.replace(
            config.make_rules(),
            skip_slow_loads=True,  # Once `note_prefill_rate` was called.
            block_bytes=copier.engine.block_bytes,
        )
        self._stats = OffloadStats()
        self._gate = Gate(rules, self._stats)
        open_storage = functools.partial(
            config.open_storage, copier.engine, namespace=namespace
        )
        self.worker = cast(StorageWorker, copier.run(open_storage).result())
        try:
            num_blocks = self.worker.num_blocks(cast(int, config.storage_bytes))
            self.tier = StorageTier(block_size, num_blocks)
        except BaseException:
            self.worker.close()
            raise
        below = TierBelow(
            self.tier,
            rules.storage_write,
            rules.max_storage_blocks,
            rules.storage_probe_s or 0.0,
            has_other_writers=True,
        )
        self._storage = Boundary(self._groups, manager, below, rules)
        self._num_asked = 0
        # Prefixes to fetch when it is known what the store has of them.
        self._prefetches: dict[str, list[BlockKey]] = {}
        self._num_waiting = 0
        self._is_listed = False
        self._num_lost = 0  # As of the last `wait`.
        self._is_closed = False
        self._pause_s = _LEAST_PAUSE_S
        self._wake = threading.Event()
        try:
            # The thread must not keep this, and gigabytes, from being collected.
            self._thread = start_thread(
                "jaxkv prefix storage",
                *(_look_after, weakref.ref(self), self._wake, self.worker.closer),
            )
        except BaseException:
            self.worker.close()
            raise

    @property
    def stats(self) -> OffloadStats:
        """Counts so far, those of `num_storage_...` and `num_fetches_declined`."""
        return self._stats.with_storage(self._storage.counts, self.tier.num_evicted)

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Set how fast prefills are, for the gate; 0 for no gate."""
        self._gate.note_rates(0.0, tokens_per_s)

    def note_stored(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks have got to the host."""
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
        """Fetch what only the store has of a prefix; waits until it is on the host.

        The lock is released while it waits, and held from then on, so that nothing of
        it is evicted before its caller holds it. It waits for the deadline at most.

        Args:
            keys: The prefix.
            min_tokens: Fetch nothing if fewer tokens are found on the host and there.
            is_wanted: Whether the caller still wants it, asked with the lock.
            is_expected: Whether another engine computes it and writes it to the store.
        """
        self._storage.note_asked(keys)
        self._wake.set()
        until_s = time.monotonic() + self._deadline_s
        name = self._next_name()
        # As much as there is room for at a time.
        while self._begin(name, keys, min_tokens, is_expected):
            self._num_waiting += 1
            is_there = self._lock.wait_for(
                lambda: (
                    not self._storage.is_awaited(name)
                    or self._is_closed
                    or not is_wanted()
                ),
                max(0.0, until_s - time.monotonic()),
            )
            self._num_waiting -= 1
            self._storage.release(name)
            if not is_there or self._is_closed or not is_wanted():
                break
        self._storage.forget(name)

    def prefetch(self, keys: list[BlockKey]) -> None:
        """Begin to fetch what only the store has of a prefix; waits for nothing."""
        self._go_on_with(self._next_name(), keys)

    def reset(self) -> None:
        """Forget what the store has, and what is under way; the host was cleared."""
        self._storage.reset()
        self._prefetches.clear()
        # Before any save is given the host blocks of what is fetched.
        self._copier.run(self._end_fetches)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the store was listed, and all writes have arrived there.

        Args:
            timeout_s: Seconds to wait at most; None for the deadline.

        Returns:
            Whether that is so: not if a listing or a write has failed since the last
            call.
        """
        timeout_s = self._deadline_s if timeout_s is None else timeout_s
        timeout_s = min(timeout_s, _MOST_WAIT_S)
        self._wake.set()
        self._lock.wait_for(lambda: self._is_idle or self._is_closed, timeout_s)
        failed = self.worker.storage_io.stats.failed
        num_lost = self._storage.num_lost
        num_lost += sum(failed[what] for what in failed if what.startswith("list "))
        has_lost, self._num_lost = num_lost > self._num_lost, num_lost
        return self._is_idle and not has_lost

    def close(self) -> None:
        """Give writes the deadline's time, and end the threads; without the lock."""
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

    def _next_name(self) -> str:
        self._num_asked += 1
        return str(self._num_asked)

    def _go_on_with(self, name: str, keys: list[BlockKey]) -> None:
        """Prefetch a prefix, at once or when the store has said what it has of it."""
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
        """Begin to fetch a part of a prefix, or to ask for it; return whether to wait.

        Args:
            name: Who asks; it has been asked for once at most.
            keys: The prefix.
            min_tokens: As of `bring`.
            is_expected: Likewise.
        """
        if self._is_closed:
            return False
        own, gate = self._storage, self._gate
        own.bytes_per_s = self.worker.read_bytes_per_s
        max_tokens = len(keys) * self._groups[0].block_size
        look = PrefixQuery(own, [first_tokens(0)], [keys], max_tokens)
        is_to_ask = not is_expected and may_probe(own, own.probing.get(name))
        if is_to_ask and max_tokens >= min_tokens:
            probe, speed = find_probe(gate, look, name)
            gate.count(None, speed)
            if probe is not None:
                own.probe(name, *probe)
                self._wake.set()
                return True
        if not (self.tier.num_held_blocks or is_expected):
            return False
        fetch = find_fetch(look, name if is_expected else None)
        if fetch is None or fetch.num_tokens < min_tokens:
            return False
        num, speed = size_fetch(gate, own, fetch)
        gate.count(None, speed)
        if not num or not own.fetch(name, fetch, num):
            return False
        self._wake.set()
        return True

    # What follows runs in threads, without the lock.

    def _end_fetches(self) -> None:
        self._guarded(self.worker.end_fetches)

    def _step(self) -> bool:
        """Move on what is under way; return whether anything has changed."""
        with self._lock:
            moves = None if self._is_closed else self._storage.issue()
        self.worker.start(moves)
        reports = self.worker.take_reports()
        with self._lock:
            self._storage.report(reports)
            for name in list(self._prefetches):
                if not self._storage.is_probing(name):
                    self._go_on_with(name, self._prefetches.pop(name))
            is_news = bool(moves or reports) or self._is_listed < self.worker.is_listed
            self._is_listed = self._is_listed or self.worker.is_listed
            if is_news:
                self._lock.notify_all()
        return is_news

    def _guarded(self, task: Callable[[], Any]) -> Any:
        try:
            return task()
        except BaseException as error:
            self._note_fault(error)
            return None

    def look(self) -> float:
        """Look at what is under way; for the thread.

        Returns:
            For how long to sleep; 0 if this was the last time.
        """
        try:
            looking = self._copier.run(functools.partial(self._guarded, self._step))
        except RuntimeError:  # The interpreter ends, and this was not closed.
            return 0.0
        is_news = looking.result()
        with self._lock:
            if is_news is None or self._is_closed:
                return 0.0
            is_busy = self.worker.num_in_flight or not self._is_idle
            most_s = _LEAST_PAUSE_S if self._num_waiting else _MOST_PAUSE_S
        if is_news:
            self._pause_s = _LEAST_PAUSE_S
        elif is_busy:
            self._pause_s = min(2 * self._pause_s, most_s)
        else:
            self._pause_s = _IDLE_S
        return self._pause_s


def _look_after(
    storage_ref: weakref.ReferenceType[PrefixStorage],
    wake: threading.Event,
    close: Callable[[], None],
) -> None:
    """Look at what is under way until it is closed or gone; the work of a thread."""
    pause_s = _LEAST_PAUSE_S
    while pause_s:
        wake.wait(pause_s)
        wake.clear()
        storage = storage_ref()
        if storage is None:
            close()  # There is no owner left to do it.
            return
        pause_s = storage.look()
        del storage
