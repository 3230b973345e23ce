"""The calls of `OffloadScheduler` for engines in the shape of vLLM v1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from jaxkv import BorrowedPool, Extras, FullAttention, KeyChain, Namespace
from jaxkv._util import shown
from jaxkv.keys.hashing import NO_EXTRAS, KeyedBlock, TokenIds
from jaxkv.scheduling import ConnectorOutput, OffloadMetadata, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.types import BlockKey

Slots = TypeVar("Slots")


class EngineHooks:
    """Turns the hooks of an engine in the shape of vLLM v1 into the scheduler's calls.

    The engine keeps its block pool, prefix cache and queues. Its adapter makes these
    calls, on the thread that dispatches the model:

    * in ``schedule``: `collect`, first of all
    * in ``get_computed_blocks``: `query`, with the number of tokens that it returns
    * for ``allocate_slots``: `allocate`, which calls it
    * in ``update_after_schedule``: `plan`, before the step's tokens count as computed
    * in ``execute_model``: `OffloadWorker.start` with the plan, before the model runs
    * in ``free``: `free`, before a request loses its blocks

    The engine must step while `has_pending_transfers`. Its requests have `request_id`,
    `num_tokens`, `num_computed_tokens`, and with asynchronous scheduling
    `num_output_placeholders`. All layers must have full attention. The hooks, not the
    adapter, call `request_preempted` and `request_finished`. After a change of weights,
    call `change_namespace`. If the engine may step on another thread than before, call
    `OffloadWorker.adopt` first in each step: it is cheap.

    A load may end in the engine's prefix cache, instead of in its request's blocks: let
    `allocate_slots` allocate only the tokens of the offer, put them into the cache once
    `collect` returns the request, and `query` it again when it can run.

    Args:
        scheduler: The scheduler; `pool` gets bound to it.
        pool: The engine's pool.
        namespace: The namespace of the blocks.
        tokens_of: Returns a request's tokens so far, prompt and generated.
        table_of: Returns a request's device blocks in order.
        extras_of: Returns what a request's blocks depend on in addition to the tokens;
            None for requests that share all blocks.
        record: Called with each new `KeyedBlock`, for events; see `KeyChain`.

    Raises:
        ValueError: The scheduler has several groups, other attention, or another block
            size than `namespace`.
    """

    def __init__(
        self,
        scheduler: OffloadScheduler,
        pool: BorrowedPool,
        namespace: Namespace,
        *,
        tokens_of: Callable[[Any], TokenIds],
        table_of: Callable[[Any], Sequence[int]],
        extras_of: Callable[[Any], Extras] | None = None,
        record: Callable[[KeyedBlock], object] | None = None,
    ) -> None:
        expected = FullAttention(namespace.block_size)
        if scheduler.groups != (expected,):
            raise ValueError(
                f"groups={scheduler.groups} must be ({expected},), the one group that "
                "EngineHooks serves: for others call OffloadScheduler yourself."
            )
        scheduler.bind_device_block_pool(pool)
        self.scheduler, self._pool, self._namespace = scheduler, pool, namespace
        self._tokens_of, self._table_of, self._record = tokens_of, table_of, record
        self._extras_of = extras_of or (lambda request: NO_EXTRAS)
        self._tracked: dict[str, _Tracked] = {}
        # By request: the offer, None to ask again, and the tokens found by the engine.
        self._offers: dict[str, tuple[int | None, int]] = {}
        # By request: its computed tokens once its load has arrived.
        self._loading: dict[str, int] = {}
        self._loaded: dict[str, int] = {}  # Not planned since; in order of arrival.
        self._preempted: list[str] = []  # Since the last plan.

    @property
    def has_pending_transfers(self) -> bool:
        """Whether the engine must step, even if no request waits or runs."""
        scheduler = self.scheduler
        return scheduler.has_pending_stores() or scheduler.has_pending_loads()

    def collect(self, output: ConnectorOutput) -> list[tuple[Any, int]]:
        """Process the transfers that have ended.

        A loaded request is returned in each step until it is planned: a preempted
        request may be ahead of it in the queue, and wait for the blocks that it holds.

        Args:
            output: What `OffloadWorker.poll` returned.

        Returns:
            Requests to move to the head of the engine's queue one by one, each with its
            number of computed tokens: with some, it keeps its blocks and needs no
            `query`. It is 0 after a failed load: then first free the request's blocks
            as if it was preempted.
        """
        ended = self.scheduler.update_connector_output(output)
        for name in ended.finished_recving:
            self._loaded[name] = self._loading.pop(name)
        failed = [(name, 0) for name in ended.failed_recving]
        for name, _ in failed:
            del self._loading[name]
        for name in [n for n in self._loaded if self._tracked[n].is_old]:
            del self._loaded[name]
            failed.append((name, 0))
        # The request that loaded first is put there last, and so comes first.
        ready = [*failed, *reversed(self._loaded.items())]
        return [(self._tracked[name].request, num) for name, num in ready]

    def query(self, request: Any, num_computed_tokens: int) -> int | None:
        """Match a new or preempted request, before it gets blocks.

        Args:
            request: The request.
            num_computed_tokens: Tokens that the engine's prefix cache has of it, in
                whole blocks.

        Returns:
            The number of tokens offered beyond these; None to ask in a later step.
        """
        tracked = self._request(request)
        self._loaded.pop(request.request_id, None)
        if tracked.is_old:
            tracked.chain, tracked.is_old = self._new_chain(request), False
        tracked.chain.follow(self._tokens_of(request))
        num_offered, _ = self.scheduler.get_num_new_matched_tokens(
            tracked, num_computed_tokens
        )
        tracked.num_followed = num_computed_tokens // self._namespace.block_size
        self._offers[request.request_id] = num_offered, num_computed_tokens
        return num_offered

    def allocate(
        self, request: Any, num_tokens: int, allocate_slots: Callable[..., Slots | None]
    ) -> Slots | None:
        """Allocate blocks for a request's next tokens, or for its load.

        A request that loads gets all blocks of its tokens at once, so that none waits
        for another's when it has loaded.

        Args:
            request: The request.
            num_tokens: Tokens that the engine is about to compute.
            allocate_slots: Called as ``allocate_slots(n, delay_cache_blocks=flag)``: it
                gives `request` the blocks that the engine found, and new ones for `n`
                more tokens. If the flag is True, the prefix cache must not have these
                yet, as they are loaded. Returns None if too few blocks are free.

        Returns:
            What `allocate_slots` returned; None if the request does not run in this
            step. If it `is_loading`, take it out of the queue; others may go on.
        """
        name = request.request_id
        if name not in self._tracked:
            raise ValueError(
                f"allocate() was called for request {shown(name)} before query(): call "
                "it for each new request, with 0 if the prefix cache has nothing."
            )
        if name not in self._offers:
            return allocate_slots(num_tokens, delay_cache_blocks=False)
        num_offered, num_found = self._offers[name]
        if num_offered is None:
            return None
        del self._offers[name]
        if num_offered:
            num_tokens = request.num_tokens - num_found
        slots = allocate_slots(num_tokens, delay_cache_blocks=num_offered > 0)
        tracked = self._tracked[name]
        if slots is None:
            self.scheduler.update_state_after_alloc(tracked, [], 0)
            return None
        table = list(self._table_of(request))
        self.scheduler.update_state_after_alloc(tracked, table, num_offered)
        tracked.num_listed = len(table)
        if not num_offered:
            return slots
        self._loading[name] = num_found + num_offered
        return None

    def is_loading(self, request: Any) -> bool:
        """Whether a request waits for its load, so that it must not be in the queue."""
        return request.request_id in self._loading

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> OffloadMetadata:
        """Return the transfers to start before the step's model.

        Call it in every step, even if no request is scheduled.

        Args:
            num_scheduled_tokens: Tokens to compute, by request id. The requests'
                `num_computed_tokens` must not count them yet.
        """
        new_block_ids, size = {}, self._namespace.block_size
        for name, num_tokens in num_scheduled_tokens.items():
            self._loaded.pop(name, None)
            tracked = self._tracked[name]
            self._follow(tracked)
            if tracked.num_computed_tokens + num_tokens > tracked.num_listed * size:
                new = list(self._table_of(tracked.request)[tracked.num_listed :])
                tracked.num_listed += len(new)
                new_block_ids[name] = new
        preempted, self._preempted = self._preempted, []
        return self.scheduler.build_connector_meta(
            SchedulerOutput(dict(num_scheduled_tokens), new_block_ids, preempted)
        )

    def change_table(self, request: Any) -> None:
        """Record, before the next `plan`, that equal blocks replaced a request's."""
        tracked = self._tracked[request.request_id]
        table = list(self._table_of(request))
        self.scheduler.update_state_after_alloc(tracked, table, 0)
        tracked.num_listed = len(table)

    def free(self, request: Any, *, has_ended: bool) -> None:
        """Record that a request is about to lose its blocks.

        Args:
            request: The request, with its old `num_computed_tokens`.
            has_ended: Whether it has finished or was aborted, also while it waits or
                loads: an offer is held until then. False if it is preempted.
        """
        name, tracked = request.request_id, self._request(request)
        self._follow(tracked)
        for state in (self._offers, self._loading, self._loaded):
            state.pop(name, None)
        if has_ended:
            self.scheduler.request_finished(tracked, list(self._table_of(request)))
            del self._tracked[name]
            return
        self.scheduler.request_preempted(tracked)
        self._preempted.append(name)
        tracked.num_followed = 0

    def change_namespace(self, namespace: Namespace) -> None:
        """Use other keys from now on, such as for new weights.

        Call it between steps, right after the weights have changed, and reset the
        engine's prefix cache. Blocks computed before stay findable under their old
        keys. A request that has blocks now is not stored until it is preempted and
        queried again; if it loads, `collect` returns it as if its load had failed.

        Args:
            namespace: The new namespace, of the same block size.

        Raises:
            ValueError: The block size differs. Then nothing changes.
        """
        size = self._namespace.block_size
        if namespace.block_size != size:
            raise ValueError(
                f"namespace.block_size={namespace.block_size} must be {size}, the "
                "block size of the pool."
            )
        self._namespace = namespace
        for tracked in self._tracked.values():
            tracked.is_old = True
        for name, (_, num_found) in self._offers.items():
            self._offers[name] = None, num_found  # Of the old namespace: ask again.

    def _request(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, self._new_chain(request))
            self._tracked[request.request_id] = tracked
        return tracked

    def _new_chain(self, request: Any) -> KeyChain:
        extras = self._extras_of(request)
        return KeyChain(self._namespace, extras, record=self._record)

    def _follow(self, tracked: _Tracked) -> None:
        """Compute the keys of computed blocks from the tokens that they have now.

        A token may have been replaced after its block got a key, and before it was
        computed: the keys of blocks that have filled are compared again.
        """
        num_ahead = getattr(tracked.request, "num_output_placeholders", 0)
        num_computed = tracked.num_computed_tokens - num_ahead
        num_full = num_computed // self._namespace.block_size
        if num_full > tracked.num_followed:
            tracked.chain.follow(self._tokens_of(tracked.request))
        tracked.num_followed = num_full


class _Tracked:
    """A request as `OffloadScheduler` reads it."""

    def __init__(self, request: Any, chain: KeyChain) -> None:
        self.request, self.chain = request, chain
        self.is_old = False  # Whether it has computed with an earlier namespace.
        self.num_listed = 0  # Blocks of its table that the scheduler has.
        self.num_followed = 0  # Computed blocks whose keys have been compared.

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        return self.chain.keys

    @property
    def max_offload_tokens(self) -> int | None:
        return 0 if self.is_old else getattr(self.request, "max_offload_tokens", None)

    request_id = property(attrgetter("request.request_id"))
    num_tokens = property(attrgetter("request.num_tokens"))
    num_computed_tokens = property(attrgetter("request.num_computed_tokens"))

    def __getattr__(self, name: str) -> Any:
        """Return what else the scheduler reads if the engine's request has it."""
        return getattr(self.request, name)


class ParkedFrees:
    """Holds blocks of a pool that counts no references: their frees wait.

    For `BorrowedPool`: ``hold=parked.hold, release=parked.release,
    content_of=parked.version``. The engine must free all blocks by `free`, which frees
    a list of blocks by the function passed here. A parked block is not free yet: to
    allocate, the engine must evict others in its place, or wait.
    """

    def __init__(self, free: Callable[[list[int]], object]) -> None:
        self._free, self._versions = free, Counter[int]()
        self.holds: Counter[int] = Counter()  # Held blocks, and how often.
        self.parked: set[int] = set()  # Of these, those that the engine has freed.

    def free(self, block_ids: Collection[int]) -> None:
        """Free blocks that nothing holds, and park the others."""
        held = self.holds.keys() & block_ids
        self.parked |= held
        self._end([block_id for block_id in block_ids if block_id not in held])

    def hold(self, block_ids: list[int]) -> None:
        """Hold blocks once more."""
        self.holds.update(block_ids)

    def release(self, block_ids: list[int]) -> None:
        """Hold blocks once less; free those that were parked."""
        self.holds.subtract(block_ids)
        self.holds = +self.holds
        ended = [b for b in block_ids if b in self.parked and b not in self.holds]
        self.parked.difference_update(ended)
        self._end(ended)

    def version(self, block_id: int) -> int:
        """Return how often a block has been freed: its content ends with its free."""
        return self._versions[block_id]

    def park_held(self) -> list[int]:
        """Park all held blocks, and return them, after the engine has freed all."""
        self.parked = set(self.holds)
        return list(self.holds)

    def _end(self, block_ids: list[int]) -> None:
        if block_ids:
            self._versions.update(block_ids)
            self._free(block_ids)
