"""The KV of prompts on the host, in blocks that prompts with a common prefix share.

For engines that hold the KV of each prompt in separate arrays, not in a paged pool.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
import operator
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, SupportsIndex, Unpack

import jax

from jaxkv import (
    Extras,
    KeyChain,
    Namespace,
    OffloadingManager,
    Policy,
    Retention,
    TraceRecorder,
)
from jaxkv._util import Resource, check_whole, shown
from jaxkv.integrations.prefix_copier import PrefixCopier, run_uninterrupted
from jaxkv.integrations.prefix_epochs import BegunPrompts
from jaxkv.integrations.prefix_layout import PrefixLayout
from jaxkv.integrations.prefix_storage import (
    PrefixStorage,
    StorageKeys,
    check_weights_epoch,
    storage_config,
    storage_namespace,
)
from jaxkv.keys.hashing import NO_EXTRAS, TokenIds
from jaxkv.observe.start import log_start
from jaxkv.scheduling.plan import check_rates
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tiers.base import PrepareStoreOutput
from jaxkv.tiers.retention import check_retention
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.storage import StorageIOStats
from jaxkv.transfer.tickets import TRANSFER_ERRORS
from jaxkv.types import BlockKey, PyTree

_log = logging.getLogger(__name__)


class StoreKeys(StorageKeys, total=False):
    """Arguments of `PrefixStore` that adapters pass on."""

    num_host_blocks: int | None
    host_bytes: str | SupportsIndex | None
    cache_policy: str | Policy
    mode: Mode | None
    extent_bytes: str | SupportsIndex | None
    max_pending_saves: int
    recorder: TraceRecorder | None


class PrefixHit(NamedTuple):
    """A loaded prefix of a prompt."""

    num_tokens: int  # Tokens of whole blocks, from the first on.
    kv: PyTree  # Their keys and values, like the saved arrays; zero beyond.


class PrefixStore(Resource):
    """Keeps the KV of prompts on the host, each full block of tokens once.

    `save` takes the arrays of one prompt and returns before its bytes have left the
    device; the arrays may be donated from then on. `load` returns the KV of the longest
    prefix on the host, in new arrays that are placed like the template's. `tokens` is a
    prompt, int[n], and `extras` are the adapter and salt that its KV depends on.

    Any thread may call. The store's thread dispatches the transfers one at a time,
    loads before saves. A block can be hit once its bytes have arrived. A wrong token,
    or an argument of a wrong type, raises ValueError or TypeError. After `close`, each
    call raises RuntimeError.

    `clear` begins a new epoch. KV belongs to the epoch when its prompt was loaded, and
    `save` keeps it only while that epoch lasts. `begin` returns the epoch, to pass to
    `load` and `save`. Without it, `save` takes the epoch when the calling thread last
    loaded the prompt, or else the longest prompt that the tokens begin with. A prompt
    that the thread has not loaded counts as begun before the first `clear`. So pass the
    epoch if one thread loads and another saves, or if a thread computes one prompt
    several times at once. The store remembers 1024 prompts per thread, in 0.3 MiB.

    With `storage`, a folder or a URL, blocks that are requested again are written there
    too. The next process finds them, like others that share the store
    (docs/storage.md).

    Example:
        >>> import jax.numpy as jnp
        >>> namespace = Namespace("my-model", "v1", "float32", "NHD", block_size=4)
        >>> kv = {"k": jnp.ones((16, 2, 8)), "v": jnp.ones((16, 2, 8))}
        >>> with PrefixStore(kv, namespace=namespace, num_host_blocks=64) as store:
        ...     saved = store.save(range(10), kv)
        ...     store.flush()
        ...     hit = store.load([0, 1, 2, 3, 9, 9, 9, 9])
        >>> saved, hit.num_tokens, float(hit.kv["k"].sum())
        (8, 4, 64.0)
    """

    def __init__(
        self,
        kv_like: PyTree,
        *,
        namespace: Namespace,
        num_host_blocks: int | None = None,
        host_bytes: str | SupportsIndex | None = None,
        cache_policy: str | Policy = "lru",
        sequence_axis: PyTree = 0,
        mode: Mode | None = None,
        extent_bytes: str | SupportsIndex | None = None,
        max_pending_saves: int = 8,
        retention: bool = False,
        clock: Callable[[], float] = time.monotonic,
        recorder: TraceRecorder | None = None,
        **storage: Unpack[StorageKeys],
    ):
        """Set up the host memory.

        Args:
            kv_like: The KV of one prompt at its greatest length, or its shapes
                (`jax.ShapeDtypeStruct`, with shardings if it is spread over devices);
                not kept. Arrays may be sharded along all axes except the sequence axis.
            namespace: What the KV depends on besides the tokens, with the block size.
            num_host_blocks: Number of host blocks.
            host_bytes: Bytes of host memory instead, such as ``"8GiB"``.
            cache_policy: Which blocks to evict when it is full, as for
                `OffloadingManager`.
            sequence_axis: The axis that counts tokens: an int, or a pytree of ints
                that is a prefix of `kv_like`.
            mode: As for `TransferEngine`.
            extent_bytes: As for `TransferEngine`.
            max_pending_saves: Saves that may be pending, each with a copy of its KV on
                the device; the next one waits.
            retention: Whether prompts can be kept longer than others (`retain`).
            clock: Returns seconds, for `retain`, and for a cache policy that follows
                requests: each `load` is one.
            recorder: Records each `load` as a request; the store closes it.
            storage: A store that outlives the process: ``storage``, ``storage_bytes``
                and the other keys of `OffloadConfig` for it. The namespace then needs
                a model and a weights epoch.

        Raises:
            ValueError: An argument is wrong.
            TypeError: The namespace is no `Namespace`, or a leaf is neither an array
                nor its shape.
            MemoryError: There is not enough host memory.
            ImportError: The storage needs an extra that is missing.
            StoreError: The storage cannot be used.
        """
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace={shown(namespace)} must be a jaxkv.Namespace.")
        config = storage_config(storage, namespace.model, namespace.weights_epoch)
        if max_pending_saves < 1:
            raise ValueError(f"{max_pending_saves=} must be at least 1.")
        self._namespace = namespace
        self._layout = PrefixLayout.of(kv_like, sequence_axis, namespace.block_size)
        self._max_saves = max_pending_saves
        self._clock = clock
        self._num_saves = 0
        self._stats = OffloadStats()
        self._recorder = recorder
        self._num_loads = 0
        self._epoch = 0  # Incremented by `clear`: older calls do not count.
        self._begun = BegunPrompts[int]()
        self._has_warned = False
        self._fault: BaseException | None = None
        self._closed = False
        # Guards the attributes above. Entered in C, as a condition is not: an exception
        # in a caller's thread never leaves it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # Notified of a save's end.
        self._copier = PrefixCopier(
            self._layout, num_host_blocks, host_bytes, mode, extent_bytes
        )
        self._storage: PrefixStorage | None = None
        try:
            self._manager = OffloadingManager(
                namespace.block_size,
                self._copier.engine.num_host_blocks,
                cache_policy,
                retention=retention,
            )
            if config is not None:
                self._storage = PrefixStorage(
                    config,
                    self._stats,
                    storage_namespace(namespace, self._layout),
                    namespace.block_size,
                    self._copier,
                    self._manager,
                    self._changed,
                    self._note_fault,
                )
            if recorder is not None:
                recorder.describe(
                    namespace.block_size,
                    policy=cache_policy if isinstance(cache_policy, str) else None,
                    host_blocks=self._manager.num_blocks,
                )
        except BaseException:
            if self._storage is not None:
                self._storage.close()
            self._copier.close()
            raise
        log_start(
            self._copier.engine,
            policy=cache_policy if isinstance(cache_policy, str) else "of its own",
            storage=None if self._storage is None else self._storage.worker,
            num_storage_blocks=self.num_storage_blocks,
            storage_write=config.storage_write if config is not None else "",
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._namespace.block_size

    @property
    def max_tokens(self) -> int:
        """Tokens that the arrays of the template have room for."""
        return self._layout.max_tokens

    @property
    def num_host_blocks(self) -> int:
        """Number of host blocks."""
        return self._manager.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all leaves together."""
        return self._copier.engine.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of allocated host memory."""
        return self._copier.engine.host_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the held blocks, those in flight included."""
        with self._lock:
            return self._manager.num_held_blocks * self._copier.engine.block_bytes

    @property
    def stats(self) -> OffloadStats:
        """Counts so far.

        A prompt that is loaded is a request without tokens on the device. A save that
        `only_if` refused counts as failed, and a save of older weights as reset.
        """
        with self._lock:
            if self._storage is None:
                return dataclasses.replace(self._stats)
            return self._storage.stats

    @property
    def storage_stats(self) -> StorageIOStats | None:
        """The store's answers, failures by kind; None without `storage`."""
        return None if self._storage is None else self._storage.worker.storage_io.stats

    @property
    def num_storage_blocks(self) -> int:
        """Number of blocks that the store may hold; 0 without `storage`."""
        return 0 if self._storage is None else self._storage.tier.num_blocks

    @property
    def num_storage_blocks_held(self) -> int:
        """Blocks that the store is known to hold, or that are being written."""
        with self._lock:
            return 0 if self._storage is None else self._storage.tier.num_held_blocks

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Set the rate of prefills, so that no `load` waits for a slower fetch.

        From then on, `load` fetches only blocks that arrive sooner than they could be
        recomputed, by the rate of the last reads. It has no effect without `storage`.

        Args:
            tokens_per_s: Tokens computed per second; 0 to fetch all blocks.

        Raises:
            ValueError: It is negative, or not a number.
        """
        check_rates(tokens_per_s=tokens_per_s)
        with self._lock:
            if self._storage is not None:
                self._storage.note_prefill_rate(tokens_per_s)

    def wait_for_storage(self, timeout_s: float | None = None) -> bool:
        """Wait until the store has been listed, and all pending writes have ended.

        Without this call, both go on in the background: a process that has just started
        finds more and more blocks.

        Args:
            timeout_s: Maximum seconds to wait; None for `storage_deadline_s`.

        Returns:
            False after a timeout, or if a listing or a write has failed since the last
            call. True without `storage`.

        Raises:
            ValueError: `timeout_s` is not a number.
        """
        is_number = isinstance(timeout_s, numbers.Real) and timeout_s == timeout_s
        if timeout_s is not None and (not is_number or isinstance(timeout_s, bool)):
            raise ValueError(
                f"timeout_s={shown(timeout_s)} must be a number of seconds, or None."
            )
        with self._lock:
            self._check()
            return self._storage is None or self._storage.wait(timeout_s)

    def prefetch(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> None:
        """Begin to fetch blocks of a prompt that only the store has.

        Call it for a prompt that waits in a queue. It returns at once, and does nothing
        without `storage`.
        """
        epoch, keys = self._keys(tokens, extras)
        if self._storage is not None:
            run_uninterrupted(lambda: self._prefetch(epoch, keys))

    def warm_up(self) -> None:
        """Compile the programs for saves and loads of full length."""
        with self._lock:
            self._check()
            self._manager.warm_up()
            if self._storage is not None:
                self._storage.tier.warm_up()
        self._copier.warm_up()

    def contains(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> bool:
        """Whether all full blocks of a prompt, at least one, are on the host."""
        _, keys = self._keys(tokens, extras)
        with self._lock:
            self._check()
            return bool(keys) and self._manager.lookup(keys) == len(keys)

    def begin(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> int:
        """Return the epoch of a prompt that is computed from now on.

        Call it before the weights are read, and pass the epoch to `load` and `save`. It
        is the number of calls of `clear` so far.

        Example:
            >>> import jax.numpy as jnp
            >>> namespace = Namespace("my-model", "v1", "float32", "NHD", block_size=4)
            >>> kv = {"k": jnp.ones((16, 2, 8))}
            >>> with PrefixStore(kv, namespace=namespace, num_host_blocks=8) as store:
            ...     epoch = store.begin(range(8))
            ...     store.clear("v2")  # By another thread, during the prefill.
            ...     store.save(range(8), kv, epoch=epoch)
            0
        """
        epoch, _ = self._begin(tokens, extras, None)
        return epoch

    def load(
        self,
        tokens: TokenIds,
        extras: Extras = NO_EXTRAS,
        *,
        min_tokens: int = 0,
        length: int | None = None,
        remote_prefill: bool = False,
        epoch: int | None = None,
    ) -> PrefixHit | None:
        """Load the KV of the longest prefix on the host, and in the store behind it.

        Waits until the bytes have arrived, at most `storage_deadline_s` for a store.
        Blocks that have not arrived by then are not part of the prefix. An exception in
        the waiting thread, such as KeyboardInterrupt, leaves no block held: the load
        ends without the thread.

        Args:
            tokens: int[n]. The prompt.
            extras: The adapter and salt that it was saved with.
            min_tokens: Load nothing if fewer tokens are found.
            length: Length of the sequence axes of the new arrays; by default the
                template's length.
            remote_prefill: Whether another engine computes the prompt and writes it to
                the store. The load then waits `storage_await_s` for each next block.
            epoch: The epoch from `begin`; by default the current one. If `clear` has
                ended it, the load is a miss.

        Returns:
            The prefix; None if nothing was found, the load failed, or `clear` was
            called before it ended.

        Raises:
            ValueError: A number or a token is out of range.
        """
        length = self.max_tokens if length is None else length
        check_whole(0, min_tokens=min_tokens)
        check_whole(1, self.max_tokens, length=length)
        length = operator.index(length)
        if not isinstance(remote_prefill, bool):
            raise TypeError(
                f"remote_prefill={shown(remote_prefill)} must be True or False."
            )
        epoch, keys = self._begin(tokens, extras, epoch)
        keys = keys[: length // self.block_size]
        loaded = run_uninterrupted(
            lambda: self._load(epoch, keys, len(tokens), min_tokens, remote_prefill)
        )
        if loaded is None:
            return None
        num_tokens, pool = loaded
        return PrefixHit(num_tokens, self._layout.join(pool, length))

    def save(
        self,
        tokens: TokenIds,
        kv: PyTree,
        num_tokens: int | None = None,
        extras: Extras = NO_EXTRAS,
        *,
        only_if: Callable[[], bool] | None = None,
        epoch: int | None = None,
    ) -> int:
        """Save the full blocks of a prompt that are not on the host yet.

        Returns before the bytes have left the device, unless `max_pending_saves` are
        pending. `kv` is only read, by a program that has been dispatched by then, so it
        may be donated.

        Args:
            tokens: int[n]. The prompt.
            kv: Its keys and values, like the template; the sequence axes may be
                shorter, all by the same length.
            num_tokens: Number of tokens in `kv`; by default all.
            extras: The adapter and salt that the KV depends on.
            only_if: Called by the store's thread before the save is issued; if it
                returns False, or raises, nothing is kept, which counts as a failed
                save. It may wait for the device.
            epoch: The epoch from `begin`, called before `kv` was computed; by default
                the epoch when this thread loaded the prompt.

        Returns:
            The number of tokens, from the first on, that are held or in flight: all
            full blocks, unless there is no room. 0 if `clear` has ended the epoch.

        Raises:
            ValueError: `kv` is not like the template, or a number is out of range.
            TypeError: A leaf is not a `jax.Array`, or another argument of a wrong type.
            RuntimeError: `kv` has been deleted or donated, or the store was closed.
        """
        if only_if is not None and not callable(only_if):
            raise TypeError(f"only_if={shown(only_if)} must be a function, or None.")
        current, keys = self._keys(tokens, extras)
        leaves, length = self._layout.check(kv)
        max_tokens = min(length, len(tokens))
        num_tokens = len(tokens) if num_tokens is None else num_tokens
        check_whole(0, max_tokens, num_tokens=num_tokens)
        if epoch is None:
            epoch = self._epoch_of(tokens, extras, current)
        check_whole(0, current, epoch=epoch)
        keys = keys[: operator.index(num_tokens) // self.block_size]
        with self._lock:
            self._check()
            self._changed.wait_for(
                lambda: self._num_saves < self._max_saves or epoch != self._epoch
            )
            self._check()
            if epoch != self._epoch:
                self._stats.num_offered += len(keys)
                self._stats.num_dropped_reset += len(keys)
                return 0
            keys, output = self._find_room(keys)
            if not output.block_hashes_to_store:
                return len(keys) * self.block_size
            self._num_saves += 1
        stored = output.block_hashes_to_store
        end = functools.partial(self._end_save, epoch, keys, stored)
        place = {key: n for n, key in enumerate(keys)}
        try:
            self._copier.save(
                leaves,
                length,
                [place[key] for key in stored],
                output.store_spec.block_ids,
                lambda: epoch == self._epoch and _answer(only_if),
                end,
            )
        except BaseException:
            end(False, None)
            raise
        return len(keys) * self.block_size

    def retain(
        self,
        tokens: TokenIds,
        retention: Retention | None,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        """Set how long the blocks of a prompt are kept, saved already or later.

        Args:
            tokens: int[n]. The prompt.
            retention: The priority of the blocks of its first `num_tokens` tokens; None
                for ordinary blocks.
            extras: The adapter and salt that it is saved with.

        Raises:
            ValueError: The store was made without `retention=True`.
            TypeError: `retention` is not a `Retention`.

        Example:
            >>> import jax.numpy as jnp
            >>> namespace = Namespace("my-model", "v1", "float32", "NHD", block_size=4)
            >>> kv = {"k": jnp.ones((16, 2, 8))}
            >>> sizes = dict(namespace=namespace, num_host_blocks=2)
            >>> with PrefixStore(kv, retention=True, **sizes) as store:
            ...     store.retain([1, 2, 3, 4], Retention(priority=80, ttl_s=600))
            ...     for first in (1, 5, 9):
            ...         prompt = list(range(first, first + 4))
            ...         saved = store.save(prompt, kv)
            ...         store.flush()
            ...     store.contains([1, 2, 3, 4]), store.contains([5, 6, 7, 8])
            (True, False)
        """
        check_retention(retention)
        if retention is not None and retention.num_tokens is not None:
            tokens = tokens[: retention.num_tokens]
        _, keys = self._keys(tokens, extras)
        with self._lock:
            self._check()
            self._manager.retain(keys, retention, int(1000 * self._clock()))

    def flush(self) -> None:
        """Wait until all saves have ended."""
        with self._lock:
            self._changed.wait_for(lambda: not self._num_saves)
            self._check()

    def clear(self, weights_epoch: str | None = None) -> None:
        """Remove all blocks from the host, and begin a new epoch.

        Blocks in flight cannot be hit either, and a prompt whose `load` or `begin` came
        before is not kept, even if the weights stay the same. Call it once the new
        weights are in place: a prompt that begins after `clear` and reads older weights
        would be kept.

        A store behind the host keeps its blocks. Only weights with another name do not
        find them, so `storage` requires a name.

        Args:
            weights_epoch: Version of the weights from now on; None for the same as
                before. With `storage`, pass the old name if the weights are the same:
                a later listing then finds the store's blocks again.

        Raises:
            ValueError: There is `storage`, but no name. Then nothing changes.
        """
        with self._lock:
            self._check()
            if self._storage is not None:
                check_weights_epoch(weights_epoch)
            if weights_epoch is not None:
                self._namespace = dataclasses.replace(
                    self._namespace, weights_epoch=weights_epoch
                )
            self._epoch += 1
            self._manager.clear()
            if self._storage is not None:
                self._storage.reset()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for transfers in flight and end the threads; no calls after this.

        Pending writes to a store get `storage_deadline_s` to end.
        """
        with self._lock:
            self._changed.wait_for(lambda: not self._num_saves)
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        if self._storage is not None and not was_closed:
            self._storage.close()
        self._copier.close()
        if self._recorder is not None:
            self._recorder.close()

    def _keys(self, tokens: TokenIds, extras: Extras) -> tuple[int, list[BlockKey]]:
        """Return the current epoch, and the keys of a prompt in it."""
        with self._lock:
            self._check()
            current, namespace = self._epoch, self._namespace
        return current, KeyChain(namespace, extras).extend(tokens)

    def _begin(
        self, tokens: TokenIds, extras: Extras, epoch: int | None
    ) -> tuple[int, list[BlockKey]]:
        """Return the epoch of a prompt, and its keys; remember it for `save`."""
        current, keys = self._keys(tokens, extras)
        epoch = current if epoch is None else epoch
        check_whole(0, current, epoch=epoch)
        self._begun.record(extras, tokens, epoch)
        return epoch, keys

    def _epoch_of(self, tokens: TokenIds, extras: Extras, current: int) -> int:
        """Return the epoch when this thread loaded a prompt, or the first one."""
        if not current:
            return 0
        epoch = self._begun.find(extras, tokens)
        if epoch is None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "save() kept nothing of a prompt that this thread has not loaded since "
                "clear(): its KV may be of older weights. Call begin() before the "
                "prompt is computed, and pass save(epoch=). (Logged once.)"
            )
        return epoch or 0

    def _load(
        self,
        epoch: int,
        keys: list[BlockKey],
        num_prompt_tokens: int,
        min_tokens: int,
        is_expected: bool,
    ) -> tuple[int, list[jax.Array]] | None:
        """Find, hold and load a prefix, in a thread that nothing interrupts.

        Returns its number of tokens and its blocks; None for a miss.
        """
        with self._lock:
            self._check()
            self._stats.num_host_query_tokens += num_prompt_tokens
            self._notify_policy(keys, num_prompt_tokens)
            if self._storage is not None and keys and self._is_wanted(epoch):
                self._storage.bring(
                    keys,
                    min_tokens,
                    lambda: self._is_wanted(epoch),
                    is_expected=is_expected,
                )
                self._check()
            num_hits = self._manager.lookup(keys)
            if epoch != self._epoch:
                num_hits = 0  # They would be of other weights.
            num_tokens = num_hits * self.block_size
            self._record(keys, num_prompt_tokens, num_tokens)
            if not num_hits or num_tokens < min_tokens:
                return None
            keys = keys[:num_hits]
            self._manager.touch(keys)
            host_ids = self._manager.prepare_load(keys).block_ids
            loading = self._copier.load(
                host_ids,
                lambda: epoch == self._epoch,
                functools.partial(self._end_load, epoch, keys),
            )
        pool = loading.result()
        if pool is None:
            return None
        with self._lock:
            if epoch != self._epoch:
                return None
            self._stats.num_host_hit_tokens += num_tokens
            self._stats.num_loads += 1
            self._stats.num_loaded += num_hits
        return num_tokens, pool

    def _prefetch(self, epoch: int, keys: list[BlockKey]) -> None:
        with self._lock:
            self._check()
            if self._storage is not None and epoch == self._epoch:
                self._storage.prefetch(keys[: self._layout.num_blocks])

    def _is_wanted(self, epoch: int) -> bool:
        """Whether a call that has begun may go on. Needs the lock."""
        is_open = not self._closed and self._fault is None
        return is_open and epoch == self._epoch

    def _note_fault(self, fault: BaseException) -> None:
        with self._lock:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def _notify_policy(self, keys: list[BlockKey], num_tokens: int) -> None:
        """Notify a policy that listens of a request. Needs the lock.

        What it generates, and when it ends, is not known here.
        """
        if self._manager.listens:
            now_ms = int(1000 * self._clock())
            mark = self._manager.begin_request(keys, num_tokens, now_ms)
            self._manager.finish_request(keys, mark, now_ms)

    def _record(self, keys: list[BlockKey], num_tokens: int, num_found: int) -> None:
        """Record a request, if there is a recorder. Needs the lock."""
        if self._recorder is not None:
            name = str(self._num_loads)
            self._num_loads += 1
            self._recorder.begin(name, keys, num_tokens, host_tokens=num_found)
            self._recorder.finish(name)

    def _check(self) -> None:
        """Raise if the store was closed or its thread failed. Needs the lock."""
        if self._closed:
            raise RuntimeError("the prefix store was closed.")
        if self._fault is not None:
            raise RuntimeError("the prefix store's thread failed.") from self._fault

    def _find_room(
        self, keys: list[BlockKey]
    ) -> tuple[list[BlockKey], PrepareStoreOutput]:
        """Find room for a prefix, or for its beginning. Needs the lock.

        Returns the keys that have room, and which of them to store.
        """
        fitting, stats = keys[: self.num_host_blocks], self._stats
        while (output := self._manager.prepare_store(fitting)) is None:
            fitting = fitting[: len(fitting) // 2]
            stats.num_store_refusals += 1
        num_dropped = len(keys) - len(fitting)
        stats.num_offered += num_dropped + len(output.block_hashes_to_store)
        stats.num_dropped_full += num_dropped
        stats.num_evicted += len(output.block_hashes_evicted)
        return fitting, output

    def _end_save(
        self,
        epoch: int,
        keys: list[BlockKey],
        stored: list[BlockKey],
        ok: bool,
        fault: BaseException | None,
    ) -> None:
        with self._lock:
            self._num_saves -= 1
            self._changed.notify_all()
            self._fault = self._fault or fault
            if epoch == self._epoch:
                self._manager.complete_store(stored, success=ok)
                # Evict the tail of a prefix before its head.
                self._manager.reorder(keys)
                if ok and self._storage is not None:
                    self._storage.note_stored(stored)
                if ok:
                    self._stats.num_stored += len(stored)
                else:
                    self._stats.num_dropped_failed += len(stored)
            else:
                self._stats.num_dropped_reset += len(stored)

    def _end_load(self, epoch: int, keys: list[BlockKey], ok: bool) -> None:
        with self._lock:
            if epoch == self._epoch:
                self._manager.complete_load(keys)
                if not ok:  # They must not be hit again.
                    self._manager.discard(keys)
                    self._stats.num_loads_failed += 1


def _answer(only_if: Callable[[], bool] | None) -> bool:
    """Whether a save may go on; False if the caller's function fails.

    An error of the device passes, as for a transfer.
    """
    try:
        return only_if is None or bool(only_if())
    except TRANSFER_ERRORS:
        raise
    except Exception:
        _log.exception("only_if of a save raised an error; nothing is kept of it.")
        return False
