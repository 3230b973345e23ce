"""The values that an engine, the offload scheduler and the worker exchange.

They are named as in vLLM's connectors.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxkv._util import shown, whole
from jaxkv.types import BlockKey

NO_EVENT = -1

BlockTable: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Device block ids of a request, in the order of its tokens: one list, or, where the
model has several groups of layers, one list for each. A list may be an array of ints,
NumPy's or JAX's."""


class Request(Protocol):
    """The attributes of an engine's request that the scheduler reads.

    It reads eight more if the request has them:

    * ``block_keys_by_group``, where the model has several groups of layers: for each
      of them what `block_keys` is for the only one.
    * ``num_output_placeholders``, with asynchronous scheduling: how many of
      `num_computed_tokens` are not computed for certain yet.
    * ``num_prompt_tokens``, if only prompts are stored, or the cache policy learns from
      how much requests generate.
    * ``stop``, once it has finished: one of `jaxkv.types.STOPS`, for such a policy.
    * ``retention``, with `OffloadRules.retention`: how long to keep its blocks,
      a `jaxkv.Retention`. It counts from the request's beginning, and from its end.
    * ``max_offload_tokens``, with eager stores: how many of its tokens may be stored,
      from the first on; None for all.
    * ``max_load_tokens``: how many tokens it may be offered beyond those that it has on
      the device; None for all.
    * ``remote_prefill``, with a store: whether another engine computes its prompt and
      writes it there. It waits for what is not there yet.
    """

    @property
    def request_id(self) -> str:
        """Unique among the requests that are alive or have a load in flight."""

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far; none if nothing is shared.

        All of them when the request is new. Later the last ones may be missing. Each
        stands for all tokens up to the end of its block. The engine may shorten the
        list and rewrite keys.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens, of these, whose KV is in the device pool."""


def tables_by_group(table: BlockTable, num_groups: int) -> list[list[int]]:
    """Return a block table as one list for each group of layers; [] for no blocks.

    Raises TypeError if it is not a list or an array, and ValueError if it does not have
    a list for each group.
    """
    items = _items_of(table)
    if not items:
        return [[] for _ in range(num_groups)]
    # An array without axes has no length, though it has the method.
    is_flat = not hasattr(items[0], "__len__") or not getattr(items[0], "ndim", True)
    if num_groups == 1 and is_flat:
        return [items]
    if len(items) != num_groups or is_flat:
        wanted = f"have a list for each of the {num_groups} groups"
        if num_groups == 1:
            wanted = "be a list of block ids: the model has one group"
        raise ValueError(f"the block table of {len(items)} items must {wanted}.")
    return list(map(_items_of, items))


def _items_of(table: Any) -> list[Any]:
    """List block ids, or tables of several groups; ids of an array as Python's ints."""
    if type(table) is list:
        return list(table)
    if hasattr(table, "dtype") and getattr(table, "ndim", False):
        ids = np.asarray(table)
        # An empty list becomes an array of floats.
        if (ids.dtype.kind in "iu" or not ids.size) and not np.ma.is_masked(table):
            items: list[Any] = ids.tolist()
            return items
    elif isinstance(table, Sequence) and not isinstance(table, str | bytes | bytearray):
        return list(table)
    raise TypeError(
        f"the block table {shown(table)} must be a list, or an array of ints, of block "
        "ids; of several groups a list of these."
    )


def checked_tables(
    request_id: str, table: BlockTable, num_groups: int, num_blocks: int
) -> list[list[int]]:
    """Return `tables_by_group`; raise ValueError for an id that no device block has."""
    tables = tables_by_group(table, num_groups)
    return [_checked_ids(request_id, ids, num_blocks) for ids in tables]


def _checked_ids(request_id: str, values: list[Any], num_blocks: int) -> list[int]:
    if len(values) == 1 and type(values[0]) is int and 0 <= values[0] < num_blocks:
        # What a running request gets: two thirds less time where caches are cold.
        return values
    if not values:
        return values
    try:
        ids = array("Q", values)  # Of nothing but ints from 0 on.
        if max(ids) < num_blocks and type(values[0]) is not bool:
            return ids.tolist()
    except (TypeError, OverflowError):
        pass
    numbers = zip(values, map(whole, values), strict=True)
    wrong = next(v for v, n in numbers if n is None or not 0 <= n < num_blocks)
    raise ValueError(
        f"{shown(wrong)} in the block table of request {shown(request_id)} must be a "
        f"block id, an int in [0, {num_blocks})."
    )


@dataclasses.dataclass(slots=True)  # Made in each step: frozen ones take twice as long.
class SchedulerOutput:
    """The requests and tokens that the engine is about to compute in a step.

    Attributes:
        num_scheduled_tokens: Tokens to compute, by request id.
        new_block_ids: Device blocks allocated since the last step, by request id,
            other than those given to `update_state_after_alloc`.
        preempted_req_ids: Requests whose blocks were taken away since the last step.
            Without a call of `OffloadScheduler.request_preempted`, a request must not
            be admitted again before this step. With one, it needs another call if it is
            preempted once more before the step.
    """

    num_scheduled_tokens: Mapping[str, int]
    new_block_ids: Mapping[str, BlockTable] = dataclasses.field(default_factory=dict)
    preempted_req_ids: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class TierBatch:
    """Blocks that move together between a tier and the next one down."""

    event: int  # Numbered by direction.
    keys: tuple[BlockKey, ...]  # Of 32 bytes.
    upper_blocks: tuple[int, ...]  # The block of each in the upper tier.
    lower_blocks: tuple[int, ...]
    is_awaited: bool = False  # Whether another engine may still be writing them.


@dataclasses.dataclass(frozen=True)
class TierProbe:
    """A question to a tier below the host, whether it has some blocks."""

    event: int  # Numbered among probes.
    # Keys of blocks that continue one another, for each group of layers.
    runs: tuple[tuple[BlockKey, ...], ...]
    wait_s: float  # When blocks without an answer are reported as missing.


@dataclasses.dataclass(frozen=True)
class TierMoves:
    """The moves that a step asks of a tier below the host."""

    fetches: tuple[TierBatch, ...] = ()  # To the tier above it.
    writes: tuple[TierBatch, ...] = ()
    deletes: tuple[BlockKey, ...] = ()
    is_last: bool = False  # Whether nothing will be asked of it any more.
    tier: int = 0  # 0 for the first below the host.
    probes: tuple[TierProbe, ...] = ()


@dataclasses.dataclass(frozen=True)
class TierReport:
    """The moves of a tier that have ended on one worker, and what else it has."""

    # Events of fetches that have ended, and which of their blocks are in the upper
    # tier.
    fetched: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    # Events of writes that have ended, and which of their blocks are in the tier.
    written: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    # Keys of blocks that a listing has found, or a probe after its time.
    found: tuple[BlockKey, ...] = ()
    # Whether the tier is listed: with these, a listing has found all (True), has
    # failed, or takes longer than a caller waits for it (False). None for nothing new.
    listed: bool | None = None
    # The most blocks of the tier, and how many the listing has; None if unknown.
    bound: tuple[int, int] | None = None
    # Keys of blocks that the listing has deleted, as they were too many.
    gone: tuple[BlockKey, ...] = ()
    tier: int = 0  # 0 for the first below the host.
    # Events of probes that have ended, and which of their blocks are in the tier, one
    # run after the other.
    probed: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    num_full: int = 0  # Blocks that were not written, as the medium has no room.


class Mover(Protocol):
    """Moves blocks between a tier and the next one down, on the worker's thread."""

    @property
    def num_in_flight(self) -> int:
        """Fetches, writes and probes that were started and are not over."""

    def start(self, moves: TierMoves | None) -> None:
        """Start what a step asks for, None for nothing; returns at once."""

    def advance(self) -> None:
        """Go on with what is under way; returns at once."""

    def take_reports(self, max_found_keys: int = ...) -> tuple[TierReport, ...]:
        """Return what has ended, with at most `max_found_keys` keys of a listing."""

    def wait(self) -> None:
        """Wait until all fetches, writes and probes are over, or late."""


@dataclasses.dataclass(frozen=True)
class OffloadMetadata:
    """The transfers of a step. Block ids of the two tiers go in pairs.

    Where a host block holds several device blocks, the device blocks of each host block
    stand in a row, NO_BLOCK for one that is not meant.

    Attributes:
        load_event: Number of this step's loads, NO_EVENT if there are none.
        load_device_blocks: Where the loads write.
        load_host_blocks: What they read.
        load_event_to_reqs: The requests that this step's load event serves.
        store_event: Number of this step's stores, NO_EVENT if there are none.
        store_device_blocks: What the stores read.
        store_host_blocks: Where they write.
        need_flush: Whether the worker must wait for all that is in flight first.
        copy_from_blocks: Device blocks to copy on the device, after the
            stores and before the loads, ...
        copy_to_blocks: ... and where to.
        load_sizes: How many of `load_host_blocks` are for each of the load event's
            requests, in their order, so that each is reported as soon as its own are
            there. Empty to report all of them together.
        load_in_step: Whether the step's own program writes the loads.
        below: What is asked of tiers below the host, of those that are asked for
            something.
    """

    load_event: int
    load_device_blocks: tuple[int, ...]
    load_host_blocks: tuple[int, ...]
    load_event_to_reqs: Mapping[int, tuple[str, ...]]
    store_event: int
    store_device_blocks: tuple[int, ...]
    store_host_blocks: tuple[int, ...]
    need_flush: bool
    copy_from_blocks: tuple[int, ...] = ()
    copy_to_blocks: tuple[int, ...] = ()
    load_sizes: tuple[int, ...] = ()
    load_in_step: bool = False
    below: tuple[TierMoves, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether nothing moves, here or in the process that planned it."""
        return self is NO_MOVES or self == NO_MOVES

    def digest(self, before: bytes = b"") -> bytes:
        """Make a digest of this plan and those before it.

        Processes that serve one model together must plan alike: equal digests say
        that they did.

        Args:
            before: The digest of the step before.

        Returns:
            32 bytes.
        """
        hasher = hashlib.sha256(before)
        requests = self.load_event_to_reqs.get(self.load_event, ())
        for ids in (
            (self.load_event, self.store_event, len(requests)),
            (self.need_flush, self.load_in_step),
            self.load_device_blocks,
            self.load_host_blocks,
            self.store_device_blocks,
            self.store_host_blocks,
            self.copy_from_blocks,
            self.copy_to_blocks,
            self.load_sizes,
        ):
            hasher.update(len(ids).to_bytes(8, "little"))
            hasher.update(np.array(ids, "<i8").tobytes())
        for request_id in requests:
            name = request_id.encode("utf-8", "surrogatepass")
            hasher.update(len(name).to_bytes(8, "little") + name)
        if self.below:
            hasher.update(repr(self.below).encode())
        return hasher.digest()


NO_MOVES = OffloadMetadata(NO_EVENT, (), (), {}, NO_EVENT, (), (), need_flush=False)
"""Nothing moves: what a scheduler plans for most steps, so it is made once."""


@dataclasses.dataclass(frozen=True)
class ConnectorOutput:
    """The moves that workers saw complete, one worker after the other.

    Attributes:
        finished_recving: Requests whose load arrived.
        failed_recving: Requests whose load failed; they compute those tokens instead.
        completed_store_events: Store events that arrived.
        failed_store_events: Store events that did not.
        below: How moves to and from tiers below the host have ended.
    """

    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    completed_store_events: tuple[int, ...] = ()
    failed_store_events: tuple[int, ...] = ()
    below: tuple[TierReport, ...] = ()

    @staticmethod
    def aggregate(outputs: Sequence[ConnectorOutput]) -> ConnectorOutput:
        """Combine what several workers saw in a step.

        Example:
            >>> one = ConnectorOutput(completed_store_events=(3,))
            >>> ConnectorOutput.aggregate([one, one]).completed_store_events
            (3, 3)
        """
        outputs = [output for output in outputs if output is not NO_REPORTS]
        if len(outputs) < 2:
            return outputs[0] if outputs else NO_REPORTS
        names = [field.name for field in dataclasses.fields(ConnectorOutput)]
        values: Any = (map(attrgetter(name), outputs) for name in names)
        return ConnectorOutput(*map(tuple, map(chain.from_iterable, values)))


NO_REPORTS = ConnectorOutput()
"""Nothing was seen. What a worker returns in most steps, so it is made once."""
