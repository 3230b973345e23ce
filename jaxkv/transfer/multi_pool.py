"""Several device pools over one set of host blocks.

If layers of one kind keep a state instead of keys and values, an engine may give them
another pool, with other block ids and shapes. Here the blocks of all pools share one
range of ids, pool after pool, so that the scheduler sees a single pool.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.engine import DEFAULT_STAGING_BYTES, TransferEngine
from jaxkv.transfer.extent_table import SharedMemory
from jaxkv.transfer.host_bytes import HostRead
from jaxkv.transfer.host_memory import parse_argument
from jaxkv.transfer.ids import (
    BlockIdsLike,
    check_distinct,
    check_sizes,
    host_ids_of,
    transfer_pairs,
)
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.ownership import Owner, owned
from jaxkv.transfer.tickets import Completion, Direction, HostWrite, Ticket
from jaxkv.types import PyTree

_NO_POOL = -1
# At the end of a payload: the number of its pool.
_LABEL_BYTES = 8


@dataclasses.dataclass(eq=False)
class _Joint:
    """A transfer of blocks of several pools."""

    ticket: Ticket
    host_ids: NDArray[np.int32]  # i32[n]
    # The transfers in flight: the number of the pool, and the ticket there.
    tickets: set[tuple[int, Ticket]] = dataclasses.field(default_factory=set)
    num_bytes: int = 0  # Bytes of ended transfers
    error: Exception | None = None  # The first one.


class JointRead:
    """Host blocks of several pools that are held while their bytes are copied out."""

    def __init__(
        self, num_bytes: int, reads: dict[int, tuple[HostRead, list[int]]]
    ) -> None:
        self._num_bytes = num_bytes  # Of a payload.
        self._reads = reads  # By pool: its blocks, and their indices among all.
        self._places = {
            index: (pool, place)
            for pool, (_, indices) in reads.items()
            for place, index in enumerate(indices)
        }
        self.num_blocks = len(self._places)

    def copy(self, index: int, out: NDArray[np.uint8]) -> None:
        """Copy a block to u8[host_payload_bytes]; on any thread, until `close`."""
        if out.nbytes != self._num_bytes:
            raise ValueError(
                f"a payload of {out.nbytes} bytes must have {self._num_bytes}."
            )
        pool, place = self._places[index]
        held, _ = self._reads[pool]
        held.copy(place, out[: held.num_bytes])
        out[held.num_bytes :] = 0
        out[-_LABEL_BYTES] = pool

    def close(self) -> None:
        """Release the blocks; on any thread, as soon as the bytes are copied."""
        for held, _ in self._reads.values():
            held.close()


class JointWrite:
    """Bytes in flight to host blocks of several pools."""

    def __init__(self, writes: list[HostWrite]) -> None:
        self._writes = writes

    @property
    def is_over(self) -> bool:
        """Whether the writes of all pools have ended."""
        return all(write.is_over for write in self._writes)

    @property
    def error(self) -> Exception | None:
        """The first error; None if all blocks can be loaded."""
        return next((write.error for write in self._writes if write.error), None)


class MultiPoolEngine:
    """Moves blocks between several device pools and host memory.

    Each pool has a `TransferEngine`. A host block holds a block of any pool, and can be
    loaded into the pool that it came from. The methods take a sequence of pools, and
    otherwise do the same as in `TransferEngine`: all that `OffloadWorker` and
    `StorageWorker` need, except loads within a step. All pools share
    `num_host_blocks`, their memory and `staging_bytes`.
    """

    mode: Mode = "staged"
    blocks_per_host_block = 1
    num_shards = 1

    def __init__(
        self,
        pools: Sequence[PyTree],
        num_host_blocks: int,
        *,
        staging_bytes: str | SupportsIndex = DEFAULT_STAGING_BYTES,
    ) -> None:
        if not pools:
            raise ValueError("pools is empty; it must have at least one pool.")
        shared = SharedMemory()
        share = parse_argument("staging_bytes", staging_bytes) // len(pools)
        self.engines = [
            TransferEngine(
                pool,
                num_host_blocks,
                mode=self.mode,
                staging_bytes=max(share, 1),
                shared=shared,
            )
            for pool in pools
        ]
        self.owner = Owner()
        for number, engine in enumerate(self.engines):
            engine.owner = self.owner
            if engine.num_shards != 1:
                raise ValueError(
                    f"pools[{number}] has a block axis of {engine.num_shards} shards; "
                    "shard another axis."
                )
        # i64[p + 1]. Pool i's blocks have the ids [first_blocks[i], first_blocks[i+1]).
        sizes = [engine.layout.num_blocks for engine in self.engines]
        self.first_blocks = np.cumsum([0, *sizes])
        self.num_device_blocks = int(self.first_blocks[-1])
        self.num_host_blocks = num_host_blocks
        self.block_bytes = max(engine.block_bytes for engine in self.engines)
        self.host_block_bytes = max(e.host_payload_bytes for e in self.engines)
        # The bytes of a block of the pool with the largest ones, and the pool's number.
        self.host_payload_bytes = self.host_block_bytes + _LABEL_BYTES
        descriptions = [engine.host_bytes_description for engine in self.engines]
        self.host_bytes_description = " | ".join(descriptions)
        self.host_bytes = shared.num_bytes
        # The pool that each host block was last saved from, and the transfer's number.
        self._pool_of = np.full(num_host_blocks, _NO_POOL, np.int64)
        self._saved_by = np.full(num_host_blocks, -1, np.int64)
        # Host blocks that still hold older bytes, as a load was reading them.
        self._stale: list[tuple[int, NDArray[np.int32]]] = []
        self._numbers = itertools.count()
        self._joints: dict[Ticket, _Joint] = {}
        self._joint_of: dict[tuple[int, Ticket], _Joint] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._joints)

    @property
    def bytes_in_flight(self) -> int:
        return sum(engine.bytes_in_flight for engine in self.engines)

    def warm_up(self) -> None:
        for engine in self.engines:
            engine.warm_up()

    def adopt(self) -> None:
        self.owner.adopt()

    @owned
    def save(
        self,
        pools: Sequence[PyTree],
        device_block_ids: BlockIdsLike,
        host_block_ids: BlockIdsLike,
    ) -> Ticket:
        device_ids, host_ids = self.check_save(device_block_ids, host_block_ids)
        self._check_pools(pools)
        joint = self._begin("save", host_ids)
        of_block = self._pools_of(device_ids)
        self._forget_others(host_ids, of_block)
        for number, engine, rows in self._by_pool(of_block):
            ids = device_ids[rows] - self.first_blocks[number]
            self._join(joint, number, engine.save(pools[number], ids, host_ids[rows]))
        self._pool_of[host_ids] = of_block
        self._saved_by[host_ids] = joint.ticket.number
        return joint.ticket

    def check_save(
        self, device_block_ids: BlockIdsLike, host_block_ids: BlockIdsLike
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Refuse ids that `save` would refuse; return them, i32[n] each."""
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, True)
        check_distinct("host_block_ids", host_ids)
        return device_ids, host_ids

    @owned
    def load_each(
        self,
        pools: Sequence[PyTree],
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int],
    ) -> tuple[PyTree, list[Ticket]]:
        ids = host_block_ids, device_block_ids
        host_ids, loads = self.check_load(pools, *ids, sizes)
        ends = np.cumsum(sizes)
        joints = [
            self._begin("load", host_ids[end - size : end])
            for size, end in zip(sizes, ends.tolist(), strict=True)
        ]
        new = list(pools)
        for number, load in loads:
            new[number], tickets = self.engines[number].load_each(new[number], *load)
            for joint, ticket in zip(joints, tickets, strict=True):
                self._join(joint, number, ticket)
        return _like(pools, new), [joint.ticket for joint in joints]

    def check_load(
        self,
        pools: Sequence[PyTree],
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int],
    ) -> tuple[NDArray[np.int32], list[tuple[int, Any]]]:
        """Refuse what `load_each` would refuse; return what each pool's engine loads.

        The host blocks, and the number and arguments of each engine's `load_each`.
        """
        device_ids, host_ids = self._pairs(device_block_ids, host_block_ids, False)
        check_sizes(sizes, len(host_ids))
        of_block = self._pools_of(device_ids)
        wrong = host_ids[self._pool_of[host_ids] != of_block].tolist()
        if wrong:
            raise ValueError(
                f"host blocks {wrong} must go back to the pool that they came from."
            )
        self._check_pools(pools)
        loads = []
        of_load = np.repeat(np.arange(len(sizes)), sizes)
        for number, engine, rows in self._by_pool(of_block):
            ids = device_ids[rows] - self.first_blocks[number]
            counts = np.bincount(of_load[rows], minlength=len(sizes)).tolist()
            load = host_ids[rows], ids, counts
            engine.check_load(pools[number], *load)
            loads.append((number, load))
        return host_ids, loads

    @owned
    def advance(self, pools: Sequence[PyTree]) -> PyTree:
        stale, self._stale = self._stale, []
        for number, host_ids in stale:
            self._forget(host_ids[self._pool_of[host_ids] != number], number)
        pairs = zip(self.engines, pools, strict=True)
        return _like(pools, [engine.advance(pool) for engine, pool in pairs])

    @owned
    def poll(self) -> list[Completion]:
        for number, engine in enumerate(self.engines):
            self._note(number, engine.poll())
        return self._report()

    @owned
    def drain(self, pools: Sequence[PyTree]) -> tuple[PyTree, list[Completion]]:
        new = list(pools)
        for number, engine in enumerate(self.engines):
            new[number], done = engine.drain(new[number])
            self._note(number, done)
        return _like(pools, new), self._report()

    @owned
    def abandon(self, ticket: Ticket) -> None:
        joint = self._joints.pop(ticket, None)
        if joint is None:
            raise ValueError(f"{ticket} is not in flight.")
        for number, pool_ticket in joint.tickets:
            del self._joint_of[number, pool_ticket]
            self.engines[number].abandon(pool_ticket)
        self._drop(joint)

    @owned
    def read_host(self, host_block_ids: BlockIdsLike) -> JointRead:
        host_ids = host_ids_of(host_block_ids, self.num_host_blocks)
        of_block = self._pool_of[host_ids]
        empty = host_ids[of_block == _NO_POOL].tolist()
        if empty:
            raise ValueError(f"host blocks {empty} have no bytes to load.")
        reads: dict[int, tuple[HostRead, list[int]]] = {}
        try:
            for number, engine, rows in self._by_pool(of_block):
                reads[number] = engine.read_host(host_ids[rows]), rows.tolist()
        except ValueError:
            for held, _ in reads.values():
                held.close()
            raise
        return JointRead(self.host_payload_bytes, reads)

    @owned
    def write_host(
        self, host_block_ids: BlockIdsLike, payloads: Sequence[NDArray[np.uint8]]
    ) -> JointWrite:
        host_ids = host_ids_of(host_block_ids, self.num_host_blocks)
        check_distinct("host_block_ids", host_ids)
        num_bytes, num_pools = self.host_payload_bytes, len(self.engines)
        if len(payloads) != len(host_ids) or any(
            payload.nbytes != num_bytes or payload[-_LABEL_BYTES] >= num_pools
            for payload in payloads
        ):
            raise ValueError(
                f"payloads must be {len(host_ids)} of {num_bytes} bytes, as "
                f"read_host() gives them, of {num_pools} pools."
            )
        of_block = np.array([p[-_LABEL_BYTES] for p in payloads], np.int64)
        self._forget_others(host_ids, of_block)
        writes = []
        for _, engine, rows in self._by_pool(of_block):
            size = engine.host_payload_bytes
            cut = [payloads[index][:size] for index in rows.tolist()]
            writes.append(engine.write_host(host_ids[rows], cut))
        self._pool_of[host_ids] = of_block
        self._saved_by[host_ids] = next(self._numbers)
        return JointWrite(writes)

    @owned
    def advance_host(self, run: Callable[[Callable[[], None]], object]) -> None:
        for engine in self.engines:
            engine.advance_host(run)

    def _pairs(
        self, device_ids: BlockIdsLike, host_ids: BlockIdsLike, is_save: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Check the ids of both sides: i32[n] each."""
        sizes = self.num_device_blocks, self.num_host_blocks
        device, host = transfer_pairs(device_ids, host_ids, *sizes, 1, is_save)
        return device[:, 0], host

    def _check_pools(self, pools: Sequence[PyTree]) -> None:
        """Refuse pools that an engine would refuse, before any has begun."""
        for engine, pool in zip(self.engines, pools, strict=True):
            engine.layout.flatten(pool)

    def _pools_of(self, device_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the pool of each device block: i64[n]."""
        after = np.searchsorted(self.first_blocks, device_ids, side="right")
        return after.astype(np.int64) - 1

    def _by_pool(
        self, of_block: NDArray[np.int64]
    ) -> Iterator[tuple[int, TransferEngine, NDArray[np.intp]]]:
        """Yield each pool that has blocks, and their indices; always the first pool."""
        for number, engine in enumerate(self.engines):
            (rows,) = np.nonzero(of_block == number)
            if rows.size or not number:
                yield number, engine, rows

    def _begin(self, direction: Direction, host_ids: NDArray[np.int32]) -> _Joint:
        joint = _Joint(Ticket(direction, next(self._numbers)), host_ids)
        self._joints[joint.ticket] = joint
        return joint

    def _join(self, joint: _Joint, number: int, ticket: Ticket) -> None:
        """Add the transfer of one pool to a joint one."""
        joint.tickets.add((number, ticket))
        self._joint_of[number, ticket] = joint

    def _note(self, number: int, completions: Sequence[Completion]) -> None:
        """Record what a pool's engine has reported."""
        for done in completions:
            joint = self._joint_of.pop((number, done.ticket), None)
            if joint is None:
                continue
            joint.tickets.remove((number, done.ticket))
            joint.error = joint.error or done.error
            if done.error is None:
                joint.num_bytes += done.num_bytes

    def _report(self) -> list[Completion]:
        done = []
        for joint in [joint for joint in self._joints.values() if not joint.tickets]:
            del self._joints[joint.ticket]
            if joint.error is not None:
                self._drop(joint)
            ids = tuple(joint.host_ids.tolist())
            done.append(Completion(joint.ticket, ids, joint.num_bytes, joint.error))
        return done

    def _drop(self, joint: _Joint) -> None:
        """Forget the bytes of a save that has failed or is abandoned."""
        if joint.ticket.direction == "load":
            return
        is_last = self._saved_by[joint.host_ids] == joint.ticket.number
        host_ids = joint.host_ids[is_last]
        of_block = self._pool_of[host_ids]
        self._pool_of[host_ids] = _NO_POOL
        for number in range(len(self.engines)):
            self._forget(host_ids[of_block == number], number)

    def _forget_others(
        self, host_ids: NDArray[np.int32], of_block: NDArray[np.int64]
    ) -> None:
        """Empty the host blocks that are about to hold blocks of another pool."""
        before = self._pool_of[host_ids]
        for number in range(len(self.engines)):
            self._forget(host_ids[(before == number) & (of_block != number)], number)

    def _forget(self, host_ids: NDArray[np.int32], number: int) -> None:
        """Empty host blocks of a pool; later those that are being read now."""
        if host_ids.size:
            held = self.engines[number].forget(host_ids)
            if held.size:
                self._stale.append((number, held))


def _like(pools: Sequence[PyTree], new: list[PyTree]) -> Any:
    """Make a sequence of the same type."""
    return new if isinstance(pools, list) else tuple(new)


AnyEngine: TypeAlias = TransferEngine | MultiPoolEngine
"""What an `OffloadWorker` moves blocks with."""
