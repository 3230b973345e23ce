"""A transfer engine that is as slow as the contract allows, and checks bytes."""

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
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.transfer.ids import BlockIdsLike
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.ownership import owned
from jaxkv.transfer.tickets import HostWrite
from jaxkv.types import PyTree

MAX_STEPS = 4
"""The maximum delay of a transfer in steps, calls of `advance`."""

MAX_POLLS = 16
"""After this many calls of `poll` in a step, each further one counts as a step."""


@dataclasses.dataclass(eq=False)
class _Flight:
    """A transfer that has not been reported yet."""

    call: int  # Number of the call that began it.
    due: int  # The first step that may report it.
    device_ids: NDArray[np.int64]  # i64[n, m]. The m device blocks of each host block.
    host_ids: NDArray[np.int64]  # i64[n]
    # By device block of a deferred load: checksums of its garbage and of its old bytes.
    sums: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    issued: Ticket | None = None  # The engine's ticket; None for a deferred load.
    done: Completion | None = None  # None while it is in flight.
    must_fail: bool = False  # Whether strict mode must fail this load.

    @property
    def blocks(self) -> list[int]:
        """The device blocks, flattened."""
        ids: list[int] = self.device_ids.ravel().tolist()
        return ids

    @property
    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """Each host block with its device blocks."""
        return zip(self.host_ids.tolist(), self.device_ids.tolist(), strict=True)


def _number_from(variable: str) -> int:
    """Return a number from the environment; 0 if the variable is not set."""
    text = os.environ.get(variable, "0")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{variable}={text!r} must be a whole number of at least 0.")
    return int(text)


class StrictTransferEngine(TransferEngine):
    """Moves blocks with the worst timing of an accelerator, and checks the bytes.

    The mode ``"staged"`` replaces ``"fused"``. Each transfer is reported after a random
    delay of up to `MAX_STEPS` calls of `advance`. Until then the blocks of a load hold
    garbage, NaN if possible. The caller's pool is not donated, so that the use of an
    outdated pool is detected. The bytes of a load are compared with the bytes saved.

    `strict_seed` is the seed of the delays. One load in `strict_fail_loads` fails with
    an error; 0 for none. Its blocks then count as not written. Loads that the engine's
    step writes do not fail. An argument of None is read from the environment.

    Raises:
        StrictError: By `advance`, `save`, `load` and `drain`: something wrote to a
            block whose load is in flight, or the pool is outdated.
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
            strict_seed = _number_from("JAXKV_STRICT_SEED")
        if strict_fail_loads is None:
            strict_fail_loads = _number_from("JAXKV_STRICT_FAIL_LOADS")
        self._fail_loads = strict_fail_loads
        self._num_loads = 0
        self._rng = random.Random(strict_seed)
        self._blocks = PoolBlocks(self.layout)
        self._is_exact = named.get("compression") is None
        self._now = 0
        self._num_polls = 0  # Since the last call of `advance`.
        self._num_calls = 0
        self._last_due = {"save": 0, "load": 0}
        self._flights: dict[Ticket, _Flight] = {}
        # By block of a failed or abandoned load: a checksum of its garbage.
        self._garbage: dict[int, int] = {}
        # By host block: the number of its save's ticket, and the checksum of each of
        # its device blocks, None for a block that is not saved.
        self._saved: dict[int, tuple[int, list[int | None]]] = {}

    @property
    def num_in_flight(self) -> int:
        """Transfers not yet reported, or abandoned with garbage in their blocks."""
        return len(self._flights) + bool(self._garbage)

    @property
    def num_waiting(self) -> int:
        """Transfers that wait for other transfers, or for their step."""
        return super().num_waiting + len(self._deferred())

    def is_waiting(self, ticket: Ticket) -> bool:
        """Return whether a later call must read or write the pool for a transfer."""
        flight = self._flights.get(ticket)
        if flight is None:
            return False
        return flight.issued is None or super().is_waiting(flight.issued)

    @owned
    def save(
        self,
        pool: PyTree,
        device_block_ids: BlockIdsLike,
        host_block_ids: BlockIdsLike,
    ) -> Ticket:
        """Copy device blocks to host blocks; see `TransferEngine.save`."""
        ticket = super().save(pool, device_block_ids, host_block_ids)
        flight = self._begin(ticket, device_block_ids, host_block_ids)
        flight.issued = ticket
        sums = self._blocks.sums(pool, flight.blocks)
        for host, row in flight.rows:
            self._saved.pop(host, None)
            if sums is not None and self._is_exact:
                self._saved[host] = ticket.number, [sums.get(block) for block in row]
        self._num_calls += 1
        return ticket

    def _load(
        self,
        pool: PyTree,
        host_block_ids: BlockIdsLike,
        device_block_ids: BlockIdsLike,
        sizes: Sequence[int] | None,
    ) -> tuple[PyTree, list[Ticket]]:
        checked = self._checked_load(pool, host_block_ids, device_block_ids, sizes)
        tickets = [Ticket("load", self._queue.next_number()) for _ in checked.sizes]
        host = np.asarray(host_block_ids, np.int64)
        device = np.asarray(device_block_ids, np.int64).reshape(len(host), -1)
        first = 0
        for ticket, size in zip(tickets, checked.sizes, strict=True):
            rows = slice(first, first + size)
            first += size
            flight = self._begin(ticket, device[rows], host[rows])
            if self._fail_loads:
                self._num_loads += 1
                flight.must_fail = self._num_loads % self._fail_loads == 0
        self._num_calls += 1
        pool = self._without_garbage(pool)
        flights = [self._flights[ticket] for ticket in tickets]
        blocks = [block for flight in flights for block in flight.blocks]
        before = self._blocks.sums(pool, blocks) or {}
        pool = self._blocks.spoiled(pool, blocks)
        sums = self._blocks.sums(pool, blocks) or {}
        for flight in flights:
            both = sums.keys() & before.keys() & set(flight.blocks)
            flight.sums = {block: (sums[block], before[block]) for block in both}
        return pool, tickets

    @owned
    def advance(self, pool: PyTree) -> PyTree:
        """Execute the transfers that are due; see `TransferEngine.advance`."""
        self._check(pool)
        self._now += 1
        self._num_polls = 0
        pool = self._issue(pool)
        # Wait, so that the seed alone determines the delay of a transfer. Do not wait
        # if there are several processes, which agree on the delay: a lost process would
        # block the others here.
        flights = self._flights.values()
        is_due = any(
            flight.due <= self._now and flight.done is None for flight in flights
        )
        if is_due and jax.process_count() == 1:
            pool, completions = super().drain(pool)
        else:
            pool = super().advance(pool)
            completions = super().poll()
        self._collect(pool, completions)
        return self._without_garbage(pool)

    @owned
    def poll(self) -> list[Completion]:
        """Report the transfers that have ended and are due."""
        self._num_polls += 1
        if self._num_polls > MAX_POLLS:
            # An engine that only waits for saves need not call `advance`.
            self._now += 1
            self._collect(None, super().poll())
        return self._pop_due()

    @owned
    def drain(self, pool: PyTree) -> tuple[PyTree, list[Completion]]:
        """Finish all transfers; see `TransferEngine.drain`."""
        self._check(pool)
        for flight in self._flights.values():
            flight.due = min(flight.due, self._now)
        pool = self._issue(pool)
        pool, completions = super().drain(pool)
        self._collect(pool, completions)
        return self._without_garbage(pool), self._pop_due()

    @owned
    def abandon(self, ticket: Ticket) -> None:
        """Abandon a transfer; see `TransferEngine.abandon`."""
        flight = self._flights.get(ticket)
        if flight is None or (flight.done is None and flight.issued is not None):
            super().abandon(ticket if flight is None else flight.issued or ticket)
        if flight is not None:
            del self._flights[ticket]
            self._forget(ticket, flight)

    @owned
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
        """Add a transfer, and choose when it is due."""
        host = np.asarray(host_ids, np.int64)
        device = np.asarray(device_ids, np.int64).reshape(len(host), -1)
        due = self._now + self._rng.randint(1, MAX_STEPS)
        due = max(due, self._last_due[ticket.direction])  # Not before earlier ones.
        self._last_due[ticket.direction] = due
        flight = _Flight(self._num_calls, due, device, host)
        self._flights[ticket] = flight
        return flight

    def _deferred(self) -> list[Ticket]:
        """List the loads that wait for their step."""
        return [t for t, flight in self._flights.items() if flight.issued is None]

    def _check(self, pool: PyTree) -> None:
        """Refuse a pool if a block whose load is in flight has changed."""
        flights = [self._flights[ticket] for ticket in self._deferred()]
        expected = dict(pair for flight in flights for pair in flight.sums.items())
        sums = self._blocks.sums(pool, list(expected))
        if sums is None:  # The pool is lost; there is nothing to compare.
            for flight in flights:
                flight.sums.clear()
            return
        for block, now in sums.items():
            garbage, before = expected[block]
            if now == before != garbage:
                raise StrictError(
                    f"device block {block} still has its content from before its load: "
                    "the pool is outdated. Continue with the pool that "
                    "OffloadWorker.start() or drain() returned."
                )
            if now != garbage:
                raise StrictError(
                    f"device block {block} was written while a load into it is in "
                    "flight, or the pool is not the one that OffloadWorker.start() "
                    "returned. Write only to blocks that were allocated for the "
                    "request, and after update_connector_output() reported its load."
                )

    def _issue(self, pool: PyTree) -> PyTree:
        """Begin the loads that are due, and fail the loads that must fail."""
        flights = []
        for ticket in self._deferred():
            flight = self._flights[ticket]
            if flight.due > self._now:
                continue
            if flight.must_fail:
                error = RuntimeError(f"strict_fail_loads={self._fail_loads}")
                ids = tuple(flight.host_ids.tolist())
                flight.issued, flight.done = ticket, Completion(ticket, ids, 0, error)
                self._forget(ticket, flight)
            else:
                flights.append(flight)
        if flights or self._queue.num_in_flight:
            pool = self._blocks.copied(pool)
        if not flights:
            return pool
        device = np.concatenate([flight.device_ids for flight in flights])
        device = device[:, 0] if device.shape[1] == 1 else device
        host = np.concatenate([flight.host_ids for flight in flights])
        sizes = [len(flight.host_ids) for flight in flights]
        pool, tickets = super()._load(pool, host, device, sizes)
        for flight, ticket in zip(flights, tickets, strict=True):
            flight.issued = ticket
        return pool

    def _collect(self, pool: PyTree | None, completions: Sequence[Completion]) -> None:
        """Record completions; compare the bytes of loads with the bytes saved."""
        tickets = {flight.issued: ticket for ticket, flight in self._flights.items()}
        for completion in completions:
            ticket = tickets[completion.ticket]
            flight = self._flights[ticket]
            flight.done = dataclasses.replace(completion, ticket=ticket)
            if completion.error is not None:
                self._forget(ticket, flight)
            elif ticket.direction == "load" and pool is not None:
                self._compare(pool, flight)

    def _compare(self, pool: PyTree, flight: _Flight) -> None:
        """Compare the blocks of a completed load with the blocks saved."""
        sums = self._blocks.sums(pool, flight.blocks) or {}
        for host, row in flight.rows:
            _, saved = self._saved.get(host, (0, [None] * len(row)))
            for block, expected in zip(row, saved, strict=True):
                now = sums.get(block, expected)
                if expected is not None and now != expected:
                    raise StrictError(
                        f"device block {block} has other bytes (checksum {now:08x}) "
                        f"than were saved (checksum {expected:08x}) as host block "
                        f"{host}: something wrote to the block before "
                        "OffloadWorker.poll() reported its load, or to the saved "
                        "block before poll() reported its store."
                    )

    def _without_garbage(self, pool: PyTree) -> PyTree:
        """Replace the garbage that failed or abandoned loads left in their blocks."""
        garbage, self._garbage = self._garbage, {}
        sums = self._blocks.sums(pool, list(garbage)) or {}
        unwritten = [block for block, now in sums.items() if now == garbage[block]]
        return self._blocks.unwritten(pool, unwritten) if unwritten else pool

    def _forget(self, ticket: Ticket, flight: _Flight) -> None:
        """Forget a save, or note a load's garbage, that failed or was abandoned."""
        self._garbage |= {block: sums[0] for block, sums in flight.sums.items()}
        for host in flight.host_ids.tolist():
            if self._saved.get(host, (-1,))[0] == ticket.number:
                del self._saved[host]

    def _pop_due(self) -> list[Completion]:
        """Pop the transfers that are due, in each direction in the order of calls."""
        completions: list[Completion] = []
        unfinished: dict[str, int] = {}
        for ticket in sorted(self._flights, key=lambda ticket: ticket.number):
            flight, direction = self._flights[ticket], ticket.direction
            if unfinished.get(direction, flight.call) != flight.call:
                continue
            if flight.done is None or flight.due > self._now:
                unfinished[direction] = flight.call
                continue
            completions.append(flight.done)
            del self._flights[ticket]
        return completions
