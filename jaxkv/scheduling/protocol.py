"""The values that an engine, the offload scheduler and the worker exchange.

Their names are from vLLM's connectors.
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
from numpy.typing import NDArray

from jaxkv._util import shown, whole
from jaxkv.types import BlockKey

NO_EVENT = -1

BlockTable: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Device block ids of a request in token order: one list, or one list per group if the
model has several groups of layers. A list may be a NumPy or JAX array of ints."""


class Request(Protocol):
    """The attributes of an engine's request that the scheduler reads.

    It reads nine more if the request has them:

    * ``block_keys_by_group``, if the model has several groups of layers: one list like
      `block_keys` for each group.
    * ``num_output_placeholders``, with asynchronous scheduling: how many of
      `num_computed_tokens` may not be computed yet.
    * ``num_prompt_tokens``, if only prompts are stored, or the cache policy uses the
      lengths of outputs.
    * ``stop``, once it has finished: one of `jaxkv.types.STOPS`, for the same policies.
    * ``kind``, for the same policies: a number from 0 to 255 of your choice, the same
      for requests whose prefixes are used again alike.
    * ``retention``, with `OffloadRules.retention`: a `jaxkv.Retention`, how long to
      keep its blocks after the request begins, and again after it finishes.
    * ``max_offload_tokens``, with eager stores: how many of its first tokens may be
      stored; None for all.
    * ``max_load_tokens``: how many tokens may be loaded in addition to the device's
      hits; None for all.
    * ``remote_prefill``, with a store: whether another engine computes its prompt and
      writes it to the store. The request waits for blocks not written yet.
    """

    @property
    def request_id(self) -> str:
        """A unique id among requests that are alive or have a load in flight."""

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of all full blocks so far; empty to share no blocks.

        A new request must have all keys. Later the last keys may be missing. Each key
        identifies all tokens up to the end of its block. The engine may shorten the
        list and rewrite keys.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the device pool."""


def tables_by_group(table: BlockTable, num_groups: int) -> list[list[int]]:
    """Return a block table as one list for each group; raise if it is none."""
    items = _items_of(table)
    if not items:
        return [[] for _ in range(num_groups)]
    # A 0-d array has the method `__len__`, but no length.
    is_flat = not hasattr(items[0], "__len__") or not getattr(items[0], "ndim", True)
    if num_groups == 1 and is_flat:
        return [items]
    if len(items) != num_groups or is_flat:
        expected = f"have a list for each of the {num_groups} groups"
        if num_groups == 1:
            expected = "be a list of block ids: the model has one group"
        raise ValueError(f"the block table of {len(items)} items must {expected}.")
    return list(map(_items_of, items))


def _items_of(table: Any) -> list[Any]:
    """Return a table's block ids as Python ints, or its tables of several groups."""
    if type(table) is list:
        return table
    if hasattr(table, "dtype") and getattr(table, "ndim", False):
        ids = np.asarray(table)
        # NumPy makes an empty list an array of floats.
        if (ids.dtype.kind in "iu" or not ids.size) and not np.ma.is_masked(table):
            items: list[Any] = ids.tolist()
            return items
    elif isinstance(table, Sequence) and not isinstance(table, str | bytes | bytearray):
        return list(table)
    raise TypeError(
        f"the block table {shown(table)} must be a list or int array of block ids, or, "
        "for several groups, a list of these."
    )


def checked_tables(
    request_id: str, table: BlockTable, num_groups: int, num_blocks: int
) -> list[NDArray[np.int64]]:
    """Return `tables_by_group`; raise ValueError for an id not in [0, num_blocks)."""
    tables = tables_by_group(table, num_groups)
    return [_checked_ids(request_id, ids, num_blocks) for ids in tables]


def _checked_ids(
    request_id: str, values: list[Any], num_blocks: int
) -> NDArray[np.int64]:
    if len(values) == 1 and type(values[0]) is int and 0 <= values[0] < num_blocks:
        return np.array(values)  # Fast path for running requests.
    try:
        # Raises except for ints from 0 on.
        ids = np.frombuffer(array("Q", values), np.uint64)
        if ids.max(initial=0) < num_blocks and bool not in map(type, values[:1]):
            return ids.view(np.int64)
    except (TypeError, OverflowError):
        pass
    numbers = zip(values, map(whole, values), strict=True)
    wrong = next(v for v, n in numbers if n is None or not 0 <= n < num_blocks)
    raise ValueError(
        f"{shown(wrong)} in the block table of request {shown(request_id)} must be a "
        f"block id, an int in [0, {num_blocks})."
    )


@dataclasses.dataclass(slots=True)  # Not frozen: that takes twice as long, per step.
class SchedulerOutput:
    """The requests and tokens that the engine is about to compute in a step.

    Attributes:
        num_scheduled_tokens: Tokens to compute, by request id.
        new_block_ids: Device blocks allocated since the last step, by request id,
            except those passed to `update_state_after_alloc`.
        preempted_req_ids: Requests preempted since the last step. A request may be
            admitted again before this step only after a call of
            `OffloadScheduler.request_preempted`; if it is then preempted again before
            the step, repeat the call.
    """

    num_scheduled_tokens: Mapping[str, int]
    new_block_ids: Mapping[str, BlockTable] = dataclasses.field(default_factory=dict)
    preempted_req_ids: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class TierBatch:
    """Blocks that move together between a tier and the next one down."""

    event: int  # Fetches and writes are numbered separately.
    keys: tuple[BlockKey, ...]  # 32 bytes each.
    upper_blocks: tuple[int, ...]  # Block ids of the keys in the upper tier.
    lower_blocks: tuple[int, ...]  # Block ids of the keys in the lower tier.
    is_awaited: bool = False  # Whether another engine may still write the blocks.


@dataclasses.dataclass(frozen=True)
class TierProbe:
    """A query to a tier below the host: which of these blocks does it have?"""

    event: int  # Probes are numbered separately.
    # Keys of consecutive blocks, for each group of layers.
    runs: tuple[tuple[BlockKey, ...], ...]
    wait_s: float  # After it, blocks without an answer are reported as missing.


@dataclasses.dataclass(frozen=True)
class TierMoves:
    """The moves of a step to and from a tier below the host."""

    fetches: tuple[TierBatch, ...] = ()  # To the tier above it.
    writes: tuple[TierBatch, ...] = ()
    deletes: tuple[BlockKey, ...] = ()
    is_last: bool = False  # Whether the tier is not used after these moves.
    tier: int = 0  # 0 for the first below the host.
    probes: tuple[TierProbe, ...] = ()


@dataclasses.dataclass(frozen=True)
class TierReport:
    """One worker's report on a tier: ended moves, and results of its listing."""

    # Ended fetches: the event, and whether each block is in the upper tier.
    fetched: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    # Ended writes: the event, and whether each block is in the tier.
    written: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    # Keys of blocks found by a listing, or by a probe after its `wait_s`.
    found: tuple[BlockKey, ...] = ()
    # True if `found` completes the listing; False if the listing failed, or exceeded a
    # caller's timeout; None otherwise.
    listed: bool | None = None
    # The maximum number of blocks in the tier, and the number listed; None if unknown.
    bound: tuple[int, int] | None = None
    # Keys of blocks that the listing deleted to stay within the maximum.
    gone: tuple[BlockKey, ...] = ()
    tier: int = 0  # 0 for the first below the host.
    # Ended probes: the event, and whether each block is in the tier, run after run.
    probed: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    num_full: int = 0  # Blocks that were not written because the medium is full.
    # 1 if the worker no longer reaches the medium, -1 if it does again: meanwhile it
    # answers all moves as failed.
    num_down: int = 0
    latencies_s: tuple[float, float] | None = None  # Means of reads and probes.


class Mover(Protocol):
    """Moves blocks between a tier and the next one down, on the worker's thread."""

    @property
    def num_in_flight(self) -> int:
        """The number of fetches, writes and probes in flight."""

    def start(self, moves: TierMoves | None) -> None:
        """Start the moves of a step (None for none), without blocking."""

    def advance(self) -> None:
        """Continue the moves in flight, without blocking."""

    def take_reports(self, max_found_keys: int = ...) -> tuple[TierReport, ...]:
        """Return reports of ended moves, and at most `max_found_keys` listed keys."""

    def wait(self) -> None:
        """Wait until all fetches, writes and probes have ended or timed out."""


@dataclasses.dataclass(frozen=True)
class OffloadMetadata:
    """The transfers of a step, as parallel tuples of device and host block ids.

    If a host block holds several device blocks, their ids are consecutive, with
    NO_BLOCK for device blocks that do not move.

    Attributes:
        load_event: The event number of this step's loads; NO_EVENT without loads.
        load_device_blocks: Device blocks that the loads write.
        load_host_blocks: Host blocks that the loads read.
        load_event_to_reqs: The request ids of `load_event`.
        store_event: The event number of this step's stores; NO_EVENT without stores.
        store_device_blocks: Device blocks that the stores read.
        store_host_blocks: Host blocks that the stores write.
        need_flush: Whether the worker must first wait for all transfers in flight.
        load_sizes: How many of `load_host_blocks` each request of `load_event` loads,
            in order, so that each request is reported as soon as its blocks are
            loaded. Empty to report all requests together.
        below: The moves to and from tiers below the host, one per tier with moves.
        strict: The facts that strict mode checks; None otherwise. Not in `digest`.
        settings: What the scheduler decides by, in its first plan only. The worker
            refuses a plan whose settings differ from its own or another process's.
    """

    load_event: int
    load_device_blocks: tuple[int, ...]
    load_host_blocks: tuple[int, ...]
    load_event_to_reqs: Mapping[int, tuple[str, ...]]
    store_event: int
    store_device_blocks: tuple[int, ...]
    store_host_blocks: tuple[int, ...]
    need_flush: bool
    load_sizes: tuple[int, ...] = ()
    below: tuple[TierMoves, ...] = ()
    strict: Any = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def is_nothing(self) -> bool:
        """Whether nothing moves; also for a copy from another process."""
        return self is NO_MOVES or self == NO_MOVES

    def digest(self, before: bytes = b"") -> bytes:
        """Return a digest of this plan and all plans before it, in 32 bytes.

        Processes that serve one model together must make equal plans, and so equal
        digests.

        Args:
            before: The digest of the previous step.
        """
        return hashlib.sha256(before + repr(self.facts()).encode()).digest()

    def facts(self) -> dict[str, str]:
        """Return each field as text: for blocks and ids, their number and a digest."""
        facts = {}
        for name, value in vars(self).items():
            facts[name] = str(value)
            if isinstance(value, tuple | Mapping) and value:
                is_numbers = isinstance(value, tuple) and name != "below"
                text = str([*map(int, value)]) if is_numbers else repr(value)
                digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
                facts[name] = f"{len(value)} ({digest.hexdigest()[:32]})"
        del facts["strict"], facts["settings"]
        return facts


NO_MOVES = OffloadMetadata(NO_EVENT, (), (), {}, NO_EVENT, (), (), need_flush=False)
"""The plan of steps without transfers, which most are; shared."""


@dataclasses.dataclass(frozen=True)
class ConnectorOutput:
    """The transfers that workers have completed, once for each worker.

    Attributes:
        finished_recving: Requests whose load arrived.
        failed_recving: Requests whose load failed; they recompute its tokens.
        completed_store_events: Store events that arrived.
        failed_store_events: Store events that failed.
        below: Reports of moves to and from tiers below the host.
    """

    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    completed_store_events: tuple[int, ...] = ()
    failed_store_events: tuple[int, ...] = ()
    below: tuple[TierReport, ...] = ()

    @staticmethod
    def aggregate(outputs: Sequence[ConnectorOutput]) -> ConnectorOutput:
        """Combine the outputs of several workers in a step.

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
"""The output of steps without completed transfers, which most are; shared."""
