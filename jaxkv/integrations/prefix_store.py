"""The KV of prompts on the host, in blocks that prompts with a common prefix share.

For engines that hold the KV of each prompt in separate arrays, not in a paged pool.
"""

from __future__ import annotations

import _thread
import collections
import dataclasses
import functools
import logging
import operator
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, SupportsIndex, TypedDict, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv import Extras, KeyChain, Namespace, Policy, TraceRecorder, TransferEngine
from jaxkv._util import Resource, check_whole, shown
from jaxkv.integrations.prefix_layout import PrefixLayout
from jaxkv.keys.hashing import NO_EXTRAS, TokenIds
from jaxkv.observe.start import log_start
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tiers.base import Placement
from jaxkv.tiers.index import NO_IDS, BlockIndex
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import TRANSFER_ERRORS
from jaxkv.types import NO_BLOCK, BlockKey, PyTree

T = TypeVar("T")

_log = logging.getLogger(__name__)


class StoreKeys(TypedDict, total=False):
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


def epoch_of(epoch: int | None, current: int) -> int:
    """Return the epoch of a call; ValueError if none is passed after a `clear`."""
    if epoch is None and current:
        raise ValueError(
            "epoch=None must be a number, since clear() was called: pass the store's "
            "`epoch`, read before the weights that compute the prompt."
        )
    epoch = 0 if epoch is None else epoch
    check_whole(0, current, epoch=epoch)
    return operator.index(epoch)


class PrefixStore(Resource):
    """Keeps the KV of prompts on the host, each full block of tokens once.

    `save` takes the arrays of one prompt and returns before its bytes have left the
    device; the arrays may be donated from then on. `load` returns the KV of the longest
    prefix on the host, in new arrays that are placed like the template's. `tokens` is a
    prompt, int[n], and `extras` are the adapter and salt that its KV depends on.

    Any thread may call. The store's thread has the transfer engine, and copies one
    prompt at a time, loads before saves. A block can be hit once its bytes have
    arrived. A wrong token, or an argument of a wrong type, raises ValueError or
    TypeError. After `close`, each call raises RuntimeError.

    Weights have an `epoch`, 0 at first. To change them, put the new weights in place,
    then call `clear`, which begins the next epoch. To compute a prompt, read `epoch`,
    then the weights, and pass this epoch to `load` and `save`. Once `clear` has ended
    it, `load` returns None, and `save` keeps nothing and returns 0. After the first
    `clear`, both raise ValueError without an epoch.
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
        clock: Callable[[], float] = time.monotonic,
        recorder: TraceRecorder | None = None,
    ):
        """Set up the host memory.

        Args:
            kv_like: The KV of one prompt at its greatest length, or its shapes
                (`jax.ShapeDtypeStruct`, with shardings if it is spread over devices);
                not kept. Arrays may be sharded along all axes except the sequence axis.
            namespace: What the KV depends on besides the tokens, with the block size.
            num_host_blocks: Number of host blocks.
            host_bytes: Bytes of host memory instead, such as ``"8GiB"``.
            cache_policy: Which blocks to evict when it is full, as for `BlockIndex`.
            sequence_axis: The axis that counts tokens: an int, or a pytree of ints
                that is a prefix of `kv_like`.
            mode: As for `TransferEngine`.
            extent_bytes: As for `TransferEngine`.
            max_pending_saves: Saves that may be pending, each with a copy of its KV on
                the device; the next one waits.
            clock: Returns seconds, for a cache policy that follows requests: each
                `load` is one.
            recorder: Records each `load` as a request; the store closes it.

        Raises:
            ValueError: An argument is wrong.
            TypeError: The namespace is no `Namespace`, or a leaf is neither an array
                nor its shape.
            MemoryError: There is not enough host memory.
        """
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace={shown(namespace)} must be a jaxkv.Namespace.")
        check_whole(1, max_pending_saves=max_pending_saves)
        self._namespace = namespace
        self._layout = PrefixLayout.of(kv_like, sequence_axis, namespace.block_size)
        self._max_saves = max_pending_saves
        self._clock = clock
        self._num_saves = 0
        self._stats = OffloadStats()
        self._recorder = recorder
        self._num_loads = 0
        self._epoch = 0
        self._fault: BaseException | None = None
        self._closed = False
        # Guards the attributes above. Entered in C, as a condition is not: an exception
        # in a caller's thread never leaves it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # Notified of a save's end.
        # Only the store's thread pops from a queue, so it needs no lock.
        self._loads: collections.deque[Callable[[], None]] = collections.deque()
        self._saves: collections.deque[Callable[[], None]] = collections.deque()
        # Joined when the interpreter ends: no transfer may be in flight then.
        self._executor = ThreadPoolExecutor(1, "jaxkv-prefix-store")
        make = functools.partial(
            TransferEngine,
            self._layout.new_pool(),
            num_host_blocks,
            host_bytes=host_bytes,
            mode=mode,
            block_axis=self._layout.axes,
            extent_bytes=extent_bytes,
        )
        policy = cache_policy if isinstance(cache_policy, str) else None
        try:
            self._engine = self._executor.submit(make).result()
            num_host_blocks = self._engine.num_host_blocks
            self._index = BlockIndex(self.block_size, num_host_blocks, cache_policy)
            if recorder is not None:
                recorder.describe(
                    self.block_size, policy=policy, host_blocks=num_host_blocks
                )
        except BaseException:
            self._executor.shutdown()
            raise
        log_start(self._engine, policy=policy or "of its own")

    @property
    def epoch(self) -> int:
        """The number of calls of `clear` so far; read it before the weights."""
        return self._epoch

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
        return self._index.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all leaves together."""
        return self._engine.block_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the held blocks, those in flight included."""
        with self._lock:
            return self._index.num_held_blocks * self._engine.block_bytes

    @property
    def stats(self) -> OffloadStats:
        """Counts so far.

        A prompt that is loaded is a request without tokens on the device. A save that
        `only_if` refused counts as failed, and a save of older weights as reset.
        """
        with self._lock:
            return dataclasses.replace(self._stats)

    def warm_up(self) -> None:
        """Compile the programs for saves and loads of full length."""
        with self._lock:
            self._check()
            self._index.warm_up()
        pool, length = self._layout.new_pool(), self.max_tokens
        self._layout.cut(jax.tree.leaves(self._layout.join(pool, length)), length)
        self._executor.submit(self._engine.warm_up).result()

    def contains(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> bool:
        """Whether all full blocks of a prompt, at least one, are on the host."""
        _, keys = self._keys(tokens, extras, self._epoch)
        with self._lock:
            self._check()
            return bool(keys) and len(self._readable(keys)) == len(keys)

    def load(
        self,
        tokens: TokenIds,
        extras: Extras = NO_EXTRAS,
        *,
        min_tokens: int = 0,
        length: int | None = None,
        epoch: int | None = None,
    ) -> PrefixHit | None:
        """Load the KV of the longest prefix on the host. Waits for the bytes.

        An exception in the waiting thread, such as KeyboardInterrupt, leaves no block
        held: the load ends without the thread.

        Args:
            tokens: The prompt.
            extras: The adapter and salt that it was saved with.
            min_tokens: Load nothing if fewer tokens are found.
            length: Length of the sequence axes of the new arrays; by default the
                template's length.
            epoch: The epoch of the weights that will compute the rest of the prompt.

        Returns:
            The prefix; None if nothing was found, the load failed, or `clear` has ended
            the epoch.

        Raises:
            ValueError: A number is out of range.
        """
        length = self.max_tokens if length is None else length
        check_whole(0, min_tokens=min_tokens)
        check_whole(1, self.max_tokens, length=length)
        length = operator.index(length)
        epoch, keys = self._keys(tokens, extras, epoch)
        keys = keys[: length // self.block_size]
        num_found, pool = _run_uninterrupted(
            lambda: self._load(epoch, keys, len(tokens), min_tokens)
        )
        if pool is None:
            return None
        return PrefixHit(num_found, self._layout.join(pool, length))

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
            tokens: The prompt.
            kv: Its keys and values, like the template; the sequence axes may be
                shorter, all by the same length.
            num_tokens: Number of tokens in `kv`; by default all.
            extras: The adapter and salt that the KV depends on.
            only_if: Called by the store's thread before the save is issued; if it
                returns False, or raises, nothing is kept, which counts as a failed
                save. It may wait for the device.
            epoch: The epoch of the weights that computed `kv`.

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
        epoch, keys = self._keys(tokens, extras, epoch)
        leaves, length = self._layout.check(kv)
        num_tokens = len(tokens) if num_tokens is None else num_tokens
        check_whole(0, min(length, len(tokens)), num_tokens=num_tokens)
        keys = keys[: operator.index(num_tokens) // self.block_size]
        with self._lock:
            self._check()
            self._changed.wait_for(
                lambda: self._num_saves < self._max_saves or epoch != self._epoch
            )
            self._check()
            # Equal only if no `clear` has run since the keys were computed.
            if epoch != self._epoch:
                self._stats.num_offered += len(keys)
                self._stats.num_dropped_reset += len(keys)
                return 0
            keys, placement = self._find_room(keys)
            if placement.keys:
                self._num_saves += 1
        if placement.keys:
            try:
                # A copy, which is not donated.
                blocks = self._layout.cut(leaves, length)
                save = functools.partial(
                    self._copy_to_host, epoch, keys, placement, blocks, only_if
                )
                self._dispatch(self._saves, save)
            except BaseException:
                self._end_save(epoch, keys, placement, ok=False)
                raise
        return len(keys) * self.block_size

    def flush(self) -> None:
        """Wait until all saves have ended."""
        with self._lock:
            self._changed.wait_for(lambda: not self._num_saves)
            self._check()

    def clear(self, weights_epoch: str | None = None) -> None:
        """Remove all blocks from the host, and begin a new epoch.

        Blocks in flight cannot be hit either, and a prompt of an earlier epoch is not
        kept, even if the weights stay the same. Call it once new weights are in place,
        an adapter's under its old name included: a prompt that begins after `clear` and
        reads older weights would be kept.

        Args:
            weights_epoch: Name of the weights from now on, for the keys of a recorder;
                None for the same as before.
        """
        with self._lock:
            self._check()
            if weights_epoch is not None:
                self._namespace = dataclasses.replace(
                    self._namespace, weights_epoch=weights_epoch
                )
            self._epoch += 1
            self._index.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for transfers in flight and end the thread; no calls after this."""
        with self._lock:
            self._changed.wait_for(lambda: not self._num_saves)
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown()
        if self._recorder is not None:
            self._recorder.close()

    def _keys(
        self, tokens: TokenIds, extras: Extras, epoch: int | None
    ) -> tuple[int, list[BlockKey]]:
        """Return the epoch of a call, and a prompt's keys in the current epoch."""
        with self._lock:
            self._check()
            epoch, namespace = epoch_of(epoch, self._epoch), self._namespace
        return epoch, KeyChain(namespace, extras).extend(tokens)

    def _readable(self, keys: list[BlockKey]) -> NDArray[np.int64]:
        """Return the blocks of the longest prefix on the host. Needs the lock."""
        block_ids = self._index.find(keys).astype(np.int64)
        absent = np.flatnonzero(block_ids == NO_BLOCK)
        return block_ids[: absent[0]] if len(absent) else block_ids

    def _load(
        self, epoch: int, keys: list[BlockKey], num_prompt_tokens: int, min_tokens: int
    ) -> tuple[int, list[jax.Array] | None]:
        """Find, hold and load a prefix, in a thread that nothing interrupts.

        Returns its number of tokens and its blocks; None for a miss.
        """
        with self._lock:
            self._check()
            self._stats.num_host_query_tokens += num_prompt_tokens
            block_ids = self._readable(keys) if epoch == self._epoch else NO_IDS
            num_tokens = len(block_ids) * self.block_size
            self._record(keys, num_prompt_tokens, num_tokens)
            if not num_tokens or num_tokens < min_tokens:
                return 0, None
            keys = keys[: len(block_ids)]
            self._index.touch(keys)
            self._index.pin(block_ids)
            load = functools.partial(self._copy_from_host, epoch, keys, block_ids)
            loading = self._dispatch(self._loads, load)
        return num_tokens, loading.result()

    def _record(self, keys: list[BlockKey], num_tokens: int, num_found: int) -> None:
        """Show a request to a policy that listens and to the recorder. Needs the lock.

        What it generates, and when it ends, is not known here.
        """
        if self._index.listens:
            now_ms = int(1000 * self._clock())
            mark = self._index.begin_request(keys, num_tokens, now_ms)
            self._index.finish_request(keys, mark, now_ms)
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

    def _find_room(self, keys: list[BlockKey]) -> tuple[list[BlockKey], Placement]:
        """Find room for a prefix, or for its beginning. Needs the lock.

        Returns the keys that have room, and where to store which of them.
        """
        fitting, stats = keys[: self.num_host_blocks], self._stats
        while (placement := self._index.place(fitting)) is None:
            fitting = fitting[: len(fitting) // 2]
            stats.num_store_refusals += 1
        num_dropped = len(keys) - len(fitting)
        stats.num_offered += num_dropped + len(placement.keys)
        stats.num_dropped_full += num_dropped
        stats.num_evicted += len(placement.evicted_keys)
        return fitting, placement

    def _dispatch(
        self, tasks: collections.deque[Callable[[], None]], task: Callable[[], T]
    ) -> Future[T]:
        """Run a load or a save in the store's thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        tasks.append(run)
        # Once per task, each time for the most urgent one.
        self._executor.submit(lambda: (self._loads or self._saves).popleft()())
        return future

    def _copy_from_host(
        self, epoch: int, keys: list[BlockKey], block_ids: NDArray[np.int64]
    ) -> list[jax.Array] | None:
        """Load held blocks, in order, into a new pool; None if they did not arrive."""
        rows = range(len(block_ids))
        pool = self._transfer(
            lambda: self._engine.load(self._layout.new_pool(), block_ids, rows)[0]
        )
        with self._lock:
            if epoch != self._epoch:
                return None
            self._index.unpin(block_ids)
            if pool is None:  # They must not be hit again.
                self._index.discard(keys)
                self._stats.num_loads_failed += 1
                return None
            self._stats.num_host_hit_tokens += len(keys) * self.block_size
            self._stats.num_loads += 1
            self._stats.num_loaded += len(keys)
            return pool

    def _copy_to_host(
        self,
        epoch: int,
        keys: list[BlockKey],
        placement: Placement,
        blocks: list[jax.Array],
        only_if: Callable[[], bool] | None,
    ) -> None:
        """Save the placed blocks of a prompt, if `only_if` allows it."""
        rows = range(len(keys)) if placement.rows is None else placement.rows

        def issue() -> list[jax.Array] | None:
            try:
                if only_if is not None and not only_if():
                    return None
            except TRANSFER_ERRORS:
                raise
            except Exception:
                _log.exception("only_if of a save raised an error; nothing is kept.")
                return None
            self._engine.save(blocks, rows, placement.block_ids)
            return blocks

        ok = self._transfer(issue) is not None
        self._end_save(epoch, keys, placement, ok)

    def _transfer(
        self, issue: Callable[[], list[jax.Array] | None]
    ) -> list[jax.Array] | None:
        """Issue a transfer of a pool, and wait for it; None if its bytes do not arrive.

        If its epoch has ended, what it moves is not used.
        """
        try:
            if (pool := issue()) is not None:
                pool, [done] = self._engine.drain(pool)
                return pool if done.error is None else None
        except TRANSFER_ERRORS:
            pass  # The program that computes the KV, or the answer, has failed.
        except BaseException as error:
            self._fault = self._fault or error
        return None

    def _end_save(
        self, epoch: int, keys: list[BlockKey], placement: Placement, ok: bool
    ) -> None:
        stored, stats = placement.keys, self._stats
        with self._lock:
            self._num_saves -= 1
            self._changed.notify_all()
            if epoch != self._epoch:
                stats.num_dropped_reset += len(stored)
                return
            self._index.complete_store(stored, success=ok)
            # Evict the tail of a prefix before its head.
            self._index.reorder(keys)
            if ok:
                stats.num_stored += len(stored)
            else:
                stats.num_dropped_failed += len(stored)


def _run_uninterrupted(task: Callable[[], T]) -> T:
    """Return `task()`, which ends whatever happens to the thread that waits for it.

    A signal handler runs in the main thread and may raise between any two bytecodes, so
    work that must be undone cannot run there. The task runs in a separate thread. The
    caller only calls C functions, which happen or do not; `threading.Thread` starts a
    thread in several steps. If no thread can be started, the caller runs the task.

    >>> _run_uninterrupted(lambda: 6 * 7)
    42
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((task(), None))
        except BaseException as error:
            answers.put((None, error))

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        run()
    result, error = answers.get()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
