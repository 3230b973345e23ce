"""vLLM's calls to the host tier, for many requests in one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv import programs
from jaxkv.host_books import HostBooks
from jaxkv.keys import lanes_to_keys
from jaxkv.request_batch import (
    RequestBatch,
    Requests,
    cut,
    flatten,
    passing,
    rows_of_each,
)
from jaxkv.types import (
    NO_BLOCK,
    BlockKey,
    LoadStoreSpec,
    PrepareStoreOutput,
    RequestStepOutput,
)

_NO_IDS = np.empty(0, np.int32)


class HostTier(HostBooks):
    """Keeps track of which blocks are in host memory, for many requests at a time.

    The methods are those of `OffloadingManager`, of whose `many` attribute this is the
    type, but take a list of requests, each with its keys, and give a list of answers.
    The requests are served in order, with the results of as many single calls, in one
    call of a compiled program. A call that raises changes nothing for any of them.

    Example:
        >>> from jaxkv import OffloadingManager
        >>> many = OffloadingManager(block_size=16, num_blocks=4).many
        >>> steps = many.request_step([[b"a", b"b"], [b"a", b"c"]])
        >>> [step.store.block_hashes_to_store for step in steps]
        [[b'a', b'b'], [b'c']]
        >>> many.complete_step(steps)
        >>> many.lookup([[b"a", b"b", b"d"], [b"d"], [b"c"]])
        [2, 0, 1]
    """

    def lookup(self, requests: Requests) -> list[int]:
        """Count the keys of each request, from its first, that can be read."""
        batch = flatten(requests)
        self.count_lookup(batch.keys)
        if not batch.keys:
            return [0] * (len(batch.offsets) - 1)
        hits: list[int] = self._call(programs.LOOKUP, batch).tolist()
        return hits

    def touch(self, requests: Requests) -> None:
        """Record a use of each key; the first of a request as its most recent."""
        self._touch(programs.TOUCH, requests)

    def reorder(self, requests: Requests) -> None:
        """As `touch`, but no more than the order of eviction changes.

        For the blocks of one use that come in parts: a policy that tells what is used
        once from what is used again (ARC) is not to take them for the latter.
        """
        self._touch(programs.REORDER, requests)

    def _touch(self, program: programs.Program, requests: Requests) -> None:
        batch = flatten(requests)
        most = self.policy.max_batch
        if self._is_too_long(batch):
            # A request in parts, the last first, as keys are touched in that order.
            batch = flatten(
                keys[at : at + most]
                for keys in cut(batch.keys, batch.offsets)
                for at in reversed(range(0, len(keys), most))
            )
        if batch.keys:
            self._call(program, batch)

    def prepare_load(self, requests: Requests) -> list[LoadStoreSpec]:
        """Pin blocks that are about to be read.

        Raises:
            ValueError: If a key is absent or its bytes have not arrived. Then nothing
                is pinned for any of the requests.
        """
        return self._load(
            programs.PREPARE_LOAD,
            programs.COMPLETE_LOAD,
            requests,
            absent="is not on the host; load only what lookup() counted.",
            unfit="is not ready for reading: its store has not completed.",
        )

    def complete_load(self, requests: Requests) -> None:
        """Unpin blocks that were read.

        Raises:
            ValueError: If a key has no load in progress. Then nothing is unpinned.
        """
        self._load(
            programs.COMPLETE_LOAD,
            programs.PREPARE_LOAD,
            requests,
            absent="is not on the host; complete_load() ends a prepare_load().",
            unfit="has fewer loads in progress than complete_load() would end.",
        )

    def prepare_store(self, requests: Requests) -> list[PrepareStoreOutput | None]:
        """Find room for the blocks that are not known yet; None where there is none."""
        batch = flatten(requests)
        if self._reuse is not None:
            passes = self._reuse.passes(batch.keys)
            self.num_skipped += passes.count(False)
            batch = passing(batch, passes)
        if not batch.keys:
            return [_nothing_to_store() for _ in batch.offsets[1:]]
        if self._is_too_long(batch):
            return [self._store_long(n) for n in cut(batch.names, batch.offsets)]
        answer = self._call(programs.PREPARE_STORE, batch)
        return self._stored(batch, answer, answer.block_ids != NO_BLOCK)

    def complete_store(
        self, requests: Requests, success: bool | Sequence[bool] = True
    ) -> None:
        """End stores in progress.

        Args:
            requests: The keys of each request.
            success: Whether the bytes arrived, of all or of each request.

        Raises:
            ValueError: If `success` has another length than `requests`.
        """
        batch = flatten(requests)
        num_requests = len(batch.offsets) - 1
        if np.shape(success) not in ((), (num_requests,)):
            raise ValueError(
                f"{success=} must be one bool, or one for each of the {num_requests} "
                "requests."
            )
        if not batch.keys:
            return
        arrived = np.empty(num_requests, np.bool_)
        arrived[:] = success
        ended = self._call(programs.COMPLETE_STORE, batch, arrived)
        for request, rows in enumerate(rows_of_each(ended, batch.offsets)):
            if arrived[request]:
                self._record([batch.names[row] for row in rows], removed=False)
            else:
                self.num_held_blocks -= len(rows)
                for row in rows:
                    self._names.pop(batch.keys[row], None)

    def request_step(self, requests: Requests) -> list[RequestStepOutput]:
        """Serve whole requests: pin what is on the host, find room for the rest."""
        batch = flatten(requests)
        if self._reuse is not None or self._is_too_long(batch):
            each = cut(batch.names, batch.offsets)
            steps = [self._step_by_step(names) for names in each]
        elif not batch.keys:
            steps = [
                RequestStepOutput(0, _spec(_NO_IDS), _nothing_to_store())
                for _ in batch.offsets[1:]
            ]
        else:
            answer = self._call(programs.REQUEST_STEP, batch)
            hits = answer.num_hits.tolist()
            is_stored = answer.block_ids != NO_BLOCK
            for start, num in zip(batch.offsets, hits, strict=False):
                is_stored[start : start + num] = False
            outputs = self._stored(batch, answer, is_stored)
            ids = cut(answer.block_ids, batch.offsets)
            steps = [
                RequestStepOutput(num, _spec(own[:num]), output)
                for num, own, output in zip(hits, ids, outputs, strict=True)
            ]
        self._unfinished.update((id(step), step) for step in steps)
        return steps

    def complete_step(self, steps: Sequence[RequestStepOutput]) -> None:
        """End the loads and stores of request steps, all of them arrived.

        Raises:
            ValueError: If a step is not one of this tier that is still to be ended, or
                loads or stores of it were ended otherwise. Then nothing changes.
        """
        own = {id(step) for step in steps if self._unfinished.get(id(step)) is step}
        if len(own) < len(steps):
            raise ValueError(
                f"{len(steps)=}: each must be an output of request_step() of this "
                "manager, and be completed once."
            )
        loads = [step.load_spec.block_ids for step in steps]
        stores = [step.store.store_spec.block_ids for step in steps if step.store]
        num_hits = sum(map(len, loads))
        block_ids = np.concatenate([*loads, *stores, _NO_IDS])
        self.state, ok = programs.complete_step(self.state, block_ids, num_hits)
        if not ok:
            raise ValueError(
                f"{len(steps)=}: a load or store of these was ended before; end the "
                "others with complete_load() and complete_store()."
            )
        for step in steps:
            del self._unfinished[id(step)]
            if step.store is not None:
                self._record(step.store.block_hashes_to_store, removed=False)

    def _load(
        self,
        program: programs.Program,
        inverse: programs.Program,
        requests: Requests,
        *,
        absent: str,
        unfit: str,
    ) -> list[LoadStoreSpec]:
        """Run a load program; undo it with its inverse and raise if it refuses."""
        batch = flatten(requests)
        if not batch.keys:
            return [_spec(_NO_IDS) for _ in batch.offsets[1:]]
        answer = self._call(program, batch)
        if answer.bad.any():
            requests_done = [
                keys
                for keys, bad in zip(
                    cut(batch.keys, batch.offsets),
                    cut(answer.bad, batch.offsets),
                    strict=True,
                )
                if not bad.any()
            ]
            if any(requests_done):
                self._call(inverse, flatten(requests_done))
            row = int(np.flatnonzero(answer.bad)[0])
            why = absent if answer.block_ids[row] == NO_BLOCK else unfit
            raise ValueError(f"Block {batch.names[row]!r} {why}")
        return [_spec(ids) for ids in cut(answer.block_ids, batch.offsets)]

    def _stored(
        self, batch: RequestBatch, answer: Any, is_stored: NDArray[np.bool_]
    ) -> list[PrepareStoreOutput | None]:
        """Note what the requests stored and evicted, one after the other; tell it.

        Args:
            batch: The requests.
            answer: A `StoreAnswer` or `StepAnswer` of them all.
            is_stored: bool[n]. The keys whose `block_ids` are to be stored in.
        """
        flags = is_stored.tolist()
        bounds = list(accumulate(flags, initial=0))
        bounds = [bounds[offset] for offset in batch.offsets]
        names = list(compress(batch.names, flags))
        keys = names
        if batch.keys is not batch.names:
            keys = list(compress(batch.keys, flags))
        block_ids = answer.block_ids[is_stored].astype(np.int64)
        outputs: list[PrepareStoreOutput | None] = []
        for ok, (start, stop), evicted in zip(
            answer.ok.tolist(),
            pairwise(bounds),
            _evicted(answer, batch.offsets),
            strict=True,
        ):
            if not ok:
                outputs.append(None)
                continue
            if self._names:
                evicted = [self._names.pop(key, key) for key in evicted]
            if keys is not names:
                for key, name in zip(keys[start:stop], names[start:stop], strict=True):
                    if key != name:
                        self._names[key] = name
            self.num_held_blocks += stop - start - len(evicted)
            self.num_evicted += len(evicted)
            self._record(evicted, removed=True)
            self.losses.note(evicted, "evicted")
            spec = LoadStoreSpec(block_ids[start:stop])
            outputs.append(PrepareStoreOutput(names[start:stop], spec, evicted))
        return outputs

    def _store_long(self, names: list[bytes]) -> PrepareStoreOutput | None:
        """Serve a request that may be too long, less its repetitions."""
        batch = flatten([names])
        distinct = dict(zip(batch.keys, names, strict=True))
        if len(distinct) > self.policy.max_batch:
            return None  # More than there are blocks.
        return self.prepare_store([distinct.values()])[0]

    def _step_by_step(self, names: list[bytes]) -> RequestStepOutput:
        """Serve a request by the calls that a request step stands for."""
        num_hits = self.lookup([names])[0]
        self.touch([names])
        loads = self.prepare_load([names[:num_hits]])[0]
        return RequestStepOutput(num_hits, loads, self.prepare_store([names])[0])

    def _is_too_long(self, batch: RequestBatch) -> bool:
        """Whether a request has more keys than the policy takes at once."""
        lengths = map(int.__sub__, batch.offsets[1:], batch.offsets)
        return max(lengths, default=0) > self.policy.max_batch


def _evicted(answer: Any, offsets: Sequence[int]) -> list[list[BlockKey]]:
    """List the keys that each request evicted."""
    counts = answer.num_evicted.tolist()
    rows = [
        answer.evicted_keys[start : start + count]
        for start, count in zip(offsets, counts, strict=False)
    ]
    keys = lanes_to_keys(np.concatenate(rows))
    return cut(keys, list(accumulate(counts, initial=0)))


def _spec(block_ids: NDArray[Any]) -> LoadStoreSpec:
    return LoadStoreSpec(block_ids.astype(np.int64))


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput([], _spec(_NO_IDS), [])
