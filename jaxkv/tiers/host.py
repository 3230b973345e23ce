"""`OffloadingManager`, with the methods of vLLM's; bytes in, Python values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.packed import check_are_bytes, lay_out, pack
from jaxkv.tiers.base import (
    BlockIds,
    LoadStoreSpec,
    Placement,
    PrepareStoreOutput,
    RequestStepOutput,
)
from jaxkv.tiers.executors import Store, make_executor
from jaxkv.tiers.index import NO_IDS, BlockIndex
from jaxkv.types import KEY_BYTES, NO_BLOCK


class OffloadingManager(BlockIndex):
    """A `BlockIndex` of the host, with the methods of vLLM's `OffloadingManager`.

    Methods, order of calls and results are the same as in vLLM 0.19.1's
    `CPUOffloadingManager`, with three differences: misuse raises a ValueError that
    names the key; a call that raises changes nothing; and a key that `prepare_store`
    gets twice takes one block (in vLLM two, and the first is never found again).

    `BlockIndex` documents arguments, errors and attributes.

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

    def lookup(self, block_hashes: Iterable[bytes]) -> int:
        """Return the length of the longest prefix whose blocks are readable."""
        names, words = pack(block_hashes)
        if self._reuse is not None:
            self._reuse.count(names)
        return self.executor.lookup(words) if names else 0

    def prepare_load(self, block_hashes: Iterable[bytes]) -> LoadStoreSpec:
        """Pin blocks before they are read, and return them in the order of the keys.

        Raises:
            ValueError: If a key is absent or its store has not completed. Then nothing
                is pinned.
        """
        names, words = pack(block_hashes)
        if not names:
            return LoadStoreSpec(NO_IDS)
        bad_row, block_ids = self.executor.prepare_load(words)
        if bad_row >= 0:
            problem = "is not ready for reading: its store has not completed."
            if block_ids[bad_row] == NO_BLOCK:
                problem = "is not on the host; load only what lookup() counted."
            raise ValueError(f"Block {shown(names[bad_row])} {problem}")
        return LoadStoreSpec(block_ids)

    def complete_load(self, block_hashes: Iterable[bytes]) -> None:
        """Unpin blocks that were read, once for each `prepare_load`.

        Raises:
            ValueError: If a key has no load in progress. Then nothing is unpinned.
        """
        names, words = pack(block_hashes)
        if not names:
            return
        bad_row, block_ids = self.executor.complete_load(words)
        if bad_row >= 0:
            problem = "has fewer loads in progress than complete_load() would end."
            if block_ids[bad_row] == NO_BLOCK:
                problem = "is not on the host; complete_load() ends a prepare_load()."
            raise ValueError(f"Block {shown(names[bad_row])} {problem}")

    def prepare_store(
        self, block_hashes: Iterable[bytes], *, filtered: bool = True
    ) -> PrepareStoreOutput | None:
        """Allocate blocks for the absent keys; return these, and the keys evicted.

        If `filtered`, the look-up filters apply (`store_threshold`), and the policy may
        decline keys. If there is no room, returns None and changes nothing.
        """
        placement = self.place(block_hashes, filtered=filtered)
        return None if placement is None else _as_output(placement)

    def request_step(self, block_hashes: Iterable[bytes]) -> RequestStepOutput:
        """Serve a request: pin its hits, and allocate blocks for the other keys.

        Equals `lookup`, `touch`, `prepare_load` of the hits and `prepare_store` of all
        keys, in one call with one search. End it with `complete_step` or, if a transfer
        failed, with `complete_load` and `complete_store`.

        Example:
            >>> m = OffloadingManager(block_size=16, num_blocks=2)
            >>> m.complete_step(m.request_step([b"a"]))
            >>> step = m.request_step([b"a", b"b"])
            >>> step.num_hits, step.store.block_hashes_to_store
            (1, [b'b'])
        """
        names, words, any_foreign = lay_out(block_hashes)
        if self._reuse is not None or not 0 < len(names) <= self.policy.max_batch:
            return self._step_by_step(names)
        step = self.executor.request_step(words)
        num_hits, block_ids = step.num_hits, step.block_ids
        store = None
        if step.evicted_keys is not None:
            misses = list(islice(names, num_hits, None)), words[num_hits:], any_foreign
            placed = Store(
                step.num_stored,
                block_ids[num_hits:],
                step.evicted_keys,
                step.num_declined,
            )
            store = _as_output(self._record_placement(*misses, placed))
            store.rows += num_hits
        loads = LoadStoreSpec(block_ids[:num_hits])
        return RequestStepOutput(num_hits, loads, store, (self.executor, block_ids))

    def publish(self, block_ids: BlockIds, keys: list[bytes]) -> None:
        """Make blocks readable after their bytes have arrived; see `BlockIndex`."""
        check_are_bytes(keys)
        super().publish(block_ids, keys)

    def complete_step(self, step: RequestStepOutput) -> None:
        """End the loads and stores of a `request_step` after all of them succeeded.

        Raises:
            ValueError: If the step is another manager's, or it, or one of its loads or
                stores, has already ended. Then nothing changes.
        """
        pending = step.pending if isinstance(step, RequestStepOutput) else None
        executor, block_ids = pending or (None, NO_IDS)
        if executor is not self.executor:  # `clear` replaces the executor.
            raise ValueError(
                f"step={shown(step)} must be an output of request_step() of this "
                "manager, and be completed only once."
            )
        if not self.executor.complete_step(block_ids, step.num_hits):
            raise ValueError(
                f"{step=}: one of its loads or stores was ended before; end the others "
                "with complete_load() and complete_store()."
            )
        step.pending = None
        if step.store is not None:
            self._add_event(step.store.block_hashes_to_store, removed=False)

    def warm_up(self, *, step_by_step: bool = True) -> None:
        """Compile or load the native functions, so that no later call waits for them.

        It takes seconds the first time on a machine, later less than one.
        `step_by_step` includes the functions of `lookup`, `prepare_load`,
        `complete_load` and `request_step`.
        """
        super().warm_up()
        if step_by_step:
            scratch = make_executor(self.policy, self._executor_name)
            _, words = pack([bytes(KEY_BYTES)])
            scratch.lookup(words)
            scratch.prepare_load(words)
            scratch.complete_load(words)
            scratch.request_step(words)

    def _step_by_step(self, names: Sequence[bytes]) -> RequestStepOutput:
        """Run `request_step` by separate calls."""
        num_hits = self.lookup(names)
        self.touch(names)
        loads = self.prepare_load(names[:num_hits])
        store = self.prepare_store(names)
        block_ids = loads.block_ids
        if store is not None:
            block_ids = np.concatenate([block_ids, store.store_spec.block_ids])
        return RequestStepOutput(num_hits, loads, store, (self.executor, block_ids))


def _as_output(placement: Placement) -> PrepareStoreOutput:
    keys, rows, block_ids, evicted = placement
    if rows is None:
        rows = np.arange(len(keys))
    return PrepareStoreOutput(list(keys), LoadStoreSpec(block_ids), list(evicted), rows)
