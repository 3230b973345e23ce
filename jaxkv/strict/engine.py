"""A transfer engine that is as slow as it may be."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.strict.blocks import PoolBlocks, StrictError
from jaxkv.transfer import Completion, StepLoads, Ticket, TransferEngine
from jaxkv.transfer.host_bytes import HostWrite
from jaxkv.transfer.ids import BlockIdsLike
from jaxkv.transfer.kernels import Mode
from jaxkv.types import PyTree

SEED_VARIABLE = "JAXKV_STRICT_SEED"
FAIL_LOADS_VARIABLE = "JAXKV_STRICT_FAIL_LOADS"
MOST_STEPS = 4
"""The most steps, calls of `advance`, after which a transfer is carried out."""

MOST_POLLS = 16
"""The most calls of `poll` in a step; each further one counts as a step."""


@dataclasses.dataclass(eq=False)
class _Flight:
    """A transfer that was not reported.

    Attributes:
        call: Number of the call that began it.
        due: The step from which on it may be reported.
        device_ids: i64[n, m]. Its device blocks.
        host_ids: i64[n]. Its host blocks.
        sums: Checksums of the blocks of a load that waits, filled with garbage, and
            of what was in them before.
        own: What the engine calls it; None for a load that waits.
        done: How it has ended.
        is_to_fail: Whether it is a load that is never carried out.
    """

    call: int
    due: int
    device_ids: NDArray[np.int64]
    host_ids: NDArray[np.int64]
    sums: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    own: Ticket | None = None
    done: Completion | None = None
    is_to_fail: bool = False

    @property
    def blocks(self) -> list[int]:
        """Its device blocks, in a row."""
        ids: list[int] = self.device_ids.ravel().tolist()
        return ids

    @property
    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Each of its host blocks, and the device blocks of that."""
        return zip(self.host_ids.tolist(), self.device_ids.tolist(), strict=True)


class StrictTransferEngine(TransferEngine):
    """Moves blocks as an accelerator might, at its worst, and looks at the bytes.

    Transfers are those of the mode ``"staged"``. Each is reported up to `MOST_STEPS`
    calls of `advance` later, as chosen at random. The blocks of a load are garbage
    until then, NaN where there is one; the caller's pool is not donated, so that a
    caller who goes on with the wrong one is found out. What a load brings is compared
    with what the save found.

    Args:
        pool: As of `TransferEngine`, and so are the others.
        num_host_blocks: See `pool`.
        mode: ``"fused"`` is taken for ``"staged"``.
        strict_seed: Chooses how late transfers are; None for that of the environment.
        strict_fail_loads: Fail one load in this many: it is reported with an error, and
            its blocks stay garbage. 0 for none; None for that of the environment. Loads
            that a step writes do not fail.
        named: See `pool`.

    Raises:
        StrictError: By `advance`, `save`, `load` and `drain`: something wrote to a
            block that is being loaded, or it is not the pool of the last call.
    """

    def __init__(
        self,
        pool: PyTree,
        num_host_blocks: int | None = None,
        *,
        mode: Mode | None = None,
        strict_seed: int | None = None,
        strict_fail_loads: int | None = None,
        **named: Any,
    ) -> None:
        mode = "staged" if mode in (None, "fused") else mode
        super().__init__(pool, num_host_blocks, mode=mode, **named)
        if strict_seed is None:
            strict_seed = int(os.environ.get(SEED_VARIABLE, "0"))
        if strict_fail_loads is None:
            strict_fail_loads = int(os.environ.get(FAIL_LOADS_VARIABLE, "0"))
        self._fail_loads = strict_fail_loads
        self._num_loads = 0
        self._rng = random.Random(strict_seed)
        self._blocks = PoolBlocks(self.layout)
        self._is_exact = named.get("compression") is None
        self._now = 0
        self._num_polls = 0  # since `advance` was called
        self._num_calls = 0
        self._last_due = {"save": 0, "load": 0}
        self._flights: dict[Ticket, _Flight] = {}
        # What each host block was saved from: the transfer, and a checksum for each of
        # its device blocks, None for one that was left out.
        self._saved: dict[int, tuple[int, list[int | None]]] = {}

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet reported by `poll` or `drain`."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Transfers that wait for others, or for their time."""
        return super().num_waiting + len(self._deferred())

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether a transfer still has to read or write the pool in a later call."""
        flight = self._flights.get(ticket)
        if flight is None:
            return False
        return flight.own is None or super().is_waiting(flight.own)

    def save(
        self,
        pool: PyTree,
        device_block_ids: BlockIdsLike,
        host_block_ids: BlockIdsLike,
    ) -> Ticket:
        """Copy device blocks to host blocks; see `TransferEngine.save`."""
        ticket = super().save(pool, device_block_ids, host_block_ids)
        flight = self._begin(ticket, device_block_ids, host_block_ids)
        flight.own = ticket
        sums = self._blocks.sums(pool, flight.blocks)
        for host, row in flight.rows:
            self._saved.pop(host, None)
            if sums is not None and self._is_exact:
                found = [sums.get(block) for block in row]
                self._saved[host] = ticket.number, found
        self._num_calls += 1
        return ticket

    def _load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int] | None,
        in_step: bool,
    ) -> tuple[PyTree, list[Ticket]]:
        if in_step:
            pool = self._blocks.copied(pool)
            ids = host_block_ids, device_block_ids
            pool, tickets = super()._load(pool, *ids, sizes, in_step)
        else:
            checked = self._checked_load(pool, host_block_ids, device_block_ids, sizes)
            sizes = checked.sizes
            tickets = [Ticket("load", self._queue.next_number()) for _ in sizes]
        host = np.asarray(host_block_ids, np.int64)
        device = np.asarray(device_block_ids, np.int64).reshape(len(host), -1)
        first = 0
        for ticket, size in zip(tickets, sizes or [len(host)], strict=True):
            rows = slice(first, first + size)
            first += size
            flight = self._begin(ticket, device[rows], host[rows])
            if in_step:
                flight.own = ticket
            elif self._fail_loads:
                self._num_loads += 1
                flight.is_to_fail = self._num_loads % self._fail_loads == 0
        self._num_calls += 1
        if not in_step:
            flights = [self._flights[ticket] for ticket in tickets]
            blocks = [block for flight in flights for block in flight.blocks]
            before = self._blocks.sums(pool, blocks) or {}
            pool = self._blocks.spoiled(pool, blocks)
            sums = self._blocks.sums(pool, blocks) or {}
            for flight in flights:
                known = sums.keys() & before.keys() & set(flight.blocks)
                flight.sums = {block: (sums[block], before[block]) for block in known}
        return pool, tickets

    def copy(
        self,
        pool: PyTree,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
    ) -> PyTree:
        """Copy device blocks to other device blocks; see `TransferEngine.copy`."""
        pool = self._blocks.copied(pool)
        return super().copy(pool, source_block_ids, target_block_ids)

    def advance(self, pool: PyTree) -> PyTree:
        """Carry out what is due; see `TransferEngine.advance`."""
        self._check(pool)
        self._now += 1
        self._num_polls = 0
        pool = self._issue(pool)
        # Waits, so that the seed alone says how late it is. Several processes agree on
        # that, and one that is lost must not hold the others up here.
        if self._is_due() and jax.process_count() == 1:
            pool, completions = super().drain(pool)
        else:
            pool = super().advance(pool)
            completions = super().poll()
        self._collect(pool, completions)
        return pool

    def poll(self) -> list[Completion]:
        """Report the transfers that are over and due; see `TransferEngine.poll`."""
        self._check_thread()
        self._num_polls += 1
        if self._num_polls > MOST_POLLS:
            # An engine that waits for saves alone need not call `advance`.
            self._now += 1
            self._collect(None, super().poll())
        return self._take()

    def drain(self, pool: PyTree) -> tuple[PyTree, list[Completion]]:
        """Carry all transfers out; see `TransferEngine.drain`."""
        self._check(pool)
        for flight in self._flights.values():
            flight.due = min(flight.due, self._now)
        pool = self._issue(pool)
        pool, completions = super().drain(pool)
        self._collect(pool, completions)
        return pool, self._take()

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a transfer; see `TransferEngine.abandon`."""
        self._check_thread()
        flight = self._flights.get(ticket)
        if flight is None or (flight.done is None and flight.own is not None):
            super().abandon(ticket if flight is None else flight.own or ticket)
        if flight is not None:
            del self._flights[ticket]
            self._forget(ticket, flight)

    def take_step_loads(
        self, pool: PyTree, num_extents: int
    ) -> tuple[PyTree, StepLoads]:
        """Hand over loads for the next program; see `TransferEngine`."""
        if self.has_step_loads:
            pool = self._blocks.copied(pool)
        return super().take_step_loads(pool, num_extents)

    def write_host(
        self, host_block_ids: BlockIdsLike, payloads: Sequence[NDArray[np.uint8]]
    ) -> HostWrite:
        """Write bytes to host blocks; see `TransferEngine.write_host`."""
        written = super().write_host(host_block_ids, payloads)
        for host in np.asarray(host_block_ids).tolist():
            self._saved.pop(host, None)
        return written

    def _begin(
        self, ticket: Ticket, device_ids: BlockIdsLike, host_ids: BlockIdsLike
    ) -> _Flight:
        """Take note of a transfer, and choose when it is due."""
        host = np.asarray(host_ids, np.int64)
        device = np.asarray(device_ids, np.int64).reshape(len(host), -1)
        due = self._now + self._rng.randint(1, MOST_STEPS)
        # Nor is it reported before earlier ones.
        due = self._last_due[ticket.direction] = max(
            due, self._last_due[ticket.direction]
        )
        flight = _Flight(self._num_calls, due, device, host)
        self._flights[ticket] = flight
        return flight

    def _deferred(self) -> list[Ticket]:
        """List the loads that wait for their time."""
        return [name for name, flight in self._flights.items() if flight.own is None]

    def _check(self, pool: PyTree) -> None:
        """Refuse a pool in which a block has changed that is being loaded."""
        flights = [self._flights[ticket] for ticket in self._deferred()]
        expected = dict(pair for flight in flights for pair in flight.sums.items())
        found = self._blocks.sums(pool, list(expected))
        if found is None:  # The pool is lost; there is nothing to compare.
            for flight in flights:
                flight.sums.clear()
            return
        for block, now in found.items():
            garbage, before = expected[block]
            if now == before != garbage:
                raise StrictError(
                    f"device block {block} is as it was before its load began: this is "
                    "the pool of before the load. Go on with the pool that "
                    "OffloadWorker.start() (or TransferEngine.load(), advance() and "
                    "drain()) returned."
                )
            if now != garbage:
                raise StrictError(
                    f"device block {block} was written while a load into it is in "
                    "flight, or the pool is not the one that OffloadWorker.start() "
                    "returned. Write only to blocks that DeviceBlockPool.allocate() "
                    "gave to the request, and to those of a load only when "
                    "update_connector_output() names its request in finished_recving."
                )

    def _is_due(self) -> bool:
        """Whether something is due that has not ended."""
        return any(
            flight.due <= self._now and flight.done is None
            for flight in self._flights.values()
        )

    def _issue(self, pool: PyTree) -> PyTree:
        """Begin the loads that are due, but for those that are to fail."""
        flights = []
        for name in self._deferred():
            flight = self._flights[name]
            if flight.due > self._now:
                continue
            if flight.is_to_fail:
                error = RuntimeError(f"strict_fail_loads={self._fail_loads}")
                ids = tuple(flight.host_ids.tolist())
                flight.own, flight.done = name, Completion(name, ids, 0, error)
            else:
                flights.append(flight)
        if flights or self._queue.num_in_flight:
            pool = self._blocks.copied(pool)
        if not flights:
            return pool
        device = np.concatenate([flight.device_ids for flight in flights])
        host = np.concatenate([flight.host_ids for flight in flights])
        if device.shape[1] == 1:
            device = device[:, 0]
        sizes = [len(flight.host_ids) for flight in flights]
        pool, tickets = super()._load(pool, host, device, sizes, False)
        for flight, own in zip(flights, tickets, strict=True):
            flight.own = own
        return pool

    def _collect(self, pool: PyTree | None, completions: Sequence[Completion]) -> None:
        """Keep what has ended; compare what loads have brought with what was saved."""
        names = {flight.own: name for name, flight in self._flights.items()}
        for done in completions:
            name = names[done.ticket]
            flight = self._flights[name]
            flight.done = dataclasses.replace(done, ticket=name)
            if done.error is not None:
                self._forget(name, flight)
            elif name.direction == "load" and pool is not None:
                self._compare(pool, flight)

    def _compare(self, pool: PyTree, flight: _Flight) -> None:
        """Compare the blocks of a load that has arrived with what was saved."""
        sums = self._blocks.sums(pool, flight.blocks)
        if sums is None:
            return
        for host, row in flight.rows:
            _, saved = self._saved.get(host, (0, [None] * len(row)))
            for block, expected in zip(row, saved, strict=True):
                now = sums.get(block, expected)
                if expected is not None and now != expected:
                    raise StrictError(
                        f"device block {block} has other bytes (checksum {now:08x}) "
                        f"than were saved (checksum {expected:08x}) as host block "
                        f"{host}: something wrote to the block before "
                        "OffloadWorker.poll() reported its load, or to the one that "
                        "was saved before poll() reported that."
                    )

    def _forget(self, ticket: Ticket, flight: _Flight) -> None:
        """Forget what a failed save should have left on the host."""
        for host in flight.host_ids.tolist():
            if self._saved.get(host, (-1,))[0] == ticket.number:
                del self._saved[host]

    def _take(self) -> list[Completion]:
        """Take what is over and due, but for what earlier calls have to go before."""
        taken: list[Completion] = []
        unfinished: dict[str, int] = {}
        for ticket in sorted(self._flights, key=lambda each: each.number):
            flight, direction = self._flights[ticket], ticket.direction
            if unfinished.get(direction, flight.call) != flight.call:
                continue
            if flight.done is None or flight.due > self._now:
                unfinished[direction] = flight.call
                continue
            taken.append(flight.done)
            del self._flights[ticket]
        return taken
