"""A transfer engine whose transfers may fail or take many steps.

It stands around a real `TransferEngine` and uses its public methods alone. Which
transfers fail, and when each is reported, is chosen by a random generator and by no
clock, so that a run can be repeated.
"""

import dataclasses
import time

import jax

from tests.campaign.model import scribble

NEVER = 1 << 60


@dataclasses.dataclass(eq=False)
class _Flight:
    due: int
    fails: bool
    device_ids: list
    done: object = None


class UnreliableEngine:
    """A real engine with faults.

    A save that fails has mostly stored garbage; a load that fails leaves garbage in its
    device blocks. A stuck one is never reported, so the worker must abandon it.
    """

    def __init__(self, engine, rng, garbage, failures, stuck, max_steps, counts):
        self._engine = engine
        self._rng = rng
        self._garbage = garbage
        self._failures, self._stuck, self._max_steps = failures, stuck, max_steps
        self._counts = counts
        self._now = 0
        self._last_due = {"save": 0, "load": 0}
        self._flights = {}
        self.is_calm = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def save(self, pool, device_block_ids, host_block_ids):
        fails, is_stuck = self._choose()
        # Saves that wait would read the garbage, too.
        is_garbage = fails and not self._engine.num_waiting
        source = self._garbage if is_garbage else pool
        ticket = self._engine.save(source, device_block_ids, host_block_ids)
        self._note(ticket, fails, is_stuck, [])
        return ticket

    def load(self, pool, host_block_ids, device_block_ids):
        fails, is_stuck = self._choose()
        rows = jax.tree.leaves(jax.tree.map(int, _listed(device_block_ids)))
        pool, ticket = self._engine.load(pool, host_block_ids, device_block_ids)
        self._note(ticket, fails, is_stuck, [block for block in rows if block >= 0])
        return pool, ticket

    def load_each(self, pool, host_block_ids, device_block_ids, sizes):
        chosen = [self._choose() for _ in sizes]
        pool, tickets = self._engine.load_each(
            pool, host_block_ids, device_block_ids, sizes
        )
        rows = iter(_listed(device_block_ids))
        for ticket, size, (fails, is_stuck) in zip(tickets, sizes, chosen, strict=True):
            targets = jax.tree.leaves([next(rows) for _ in range(size)])
            blocks = [int(block) for block in targets if block >= 0]
            self._note(ticket, fails, is_stuck, blocks)
        return pool, tickets

    def advance(self, pool):
        pool = self._engine.advance(pool)
        return self._collect(pool, self._engine.poll())

    def settle(self, pool):
        """Begin a step: wait until every transfer due in it has arrived."""
        self._now += 1
        while any(
            flight.done is None and flight.due <= self._now
            for flight in self._flights.values()
        ):
            pool = self.advance(pool)
            time.sleep(0.0002)
        return pool

    def poll(self):
        completions = []
        blocked = set()
        for ticket in sorted(self._flights, key=lambda ticket: ticket.number):
            flight = self._flights[ticket]
            is_due = self._max_steps is None or flight.due <= self._now
            if flight.done is None or not is_due:
                blocked.add(ticket.direction)  # Nor are later ones reported.
            elif ticket.direction not in blocked:
                completions.append(self._end(ticket))
        return completions

    def drain(self, pool):
        pool, completions = self._engine.drain(pool)
        pool = self._collect(pool, completions)
        order = sorted(self._flights, key=lambda ticket: ticket.number)
        return pool, [self._end(ticket) for ticket in order]

    def abandon(self, ticket):
        flight = self._flights.pop(ticket)
        if flight.done is None:
            self._engine.abandon(ticket)

    def _choose(self):
        if self.is_calm:
            return False, False
        chance = self._rng.random()
        is_stuck = chance < self._stuck
        return is_stuck or chance < self._stuck + self._failures, is_stuck

    def _note(self, ticket, fails, is_stuck, device_ids):
        direction = ticket.direction
        self._counts[f"{direction}s"] += 1
        self._counts[f"{direction}s failed"] += fails and not is_stuck
        self._counts[f"{direction}s stuck"] += is_stuck
        steps = 1 if self.is_calm else self._rng.randint(1, self._max_steps or 1)
        due = max(self._now + steps, self._last_due[direction])
        if is_stuck:
            due = NEVER
        else:
            self._last_due[direction] = due
        self._flights[ticket] = _Flight(due, fails, device_ids)

    def _collect(self, pool, completions):
        for done in completions:
            flight = self._flights.get(done.ticket)
            if flight is None:
                continue  # It was abandoned here before.
            if flight.fails:
                error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: by design")
                done = dataclasses.replace(done, error=error)
                if flight.device_ids:
                    pool = scribble(pool, flight.device_ids, done.ticket.number)
            flight.done = done
        return pool

    def _end(self, ticket):
        return self._flights.pop(ticket).done


def _listed(block_ids):
    return block_ids.tolist() if hasattr(block_ids, "tolist") else list(block_ids)
