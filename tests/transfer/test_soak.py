"""Long random runs of transfers, steps and failures, compared with a NumPy model."""

import collections
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rigs.device_cases import ON_CPU
from tests.transfer import faults
from tests.transfer.numbered import Moves, check_at_rest
from tests.transfer.shadow import bits, random_array, to_device

NUM_BLOCKS = 24
NUM_HOST_BLOCKS = 40
BLOCK_AXIS = {"k": 0, "v": 1}
BLOCK_BYTES = 4 * 4 + 2 * 2 * 3


@dataclasses.dataclass(eq=False)
class Cell:
    """The contents of a block, now or once a transfer is over."""

    value: list[np.ndarray]  # An array for each leaf.
    source: "Cell | None" = None  # The cell it was loaded from.
    ok: bool = True  # False once a load into it has failed or was abandoned.

    def is_known(self):
        return self.ok and (self.source is None or self.source.is_known())


ANYTHING = Cell([], ok=False)
NOT_SAVED = Cell([], ok=False)  # A device block that the save of a host block left out.


@dataclasses.dataclass(eq=False)
class Flight:
    """A transfer in flight."""

    device_ids: set[int]  # That it touches.
    cells: dict[int, list[Cell]]  # By host block of a save, device block of a load.
    may_fail: bool = False  # A failure was injected while it was in flight.


@jax.jit
def _overwrite(pool, ids, k, v, num_products):
    mean = jnp.full((64, 64), 1 / 64, jnp.float32)
    mean = jax.lax.fori_loop(0, num_products, lambda _, x: x @ mean, mean)
    late = ids + (mean[0, 0] * 0).astype(jnp.int32)
    return {
        "k": pool["k"].at[late].set(k, mode="drop"),
        "v": pool["v"].at[:, late].set(v, mode="drop"),
    }


overwrite = jax.jit(_overwrite, donate_argnums=0)


class Soak:
    """An engine, its pool, and the contents that both must have."""

    def __init__(self, mode, seed, monkeypatch):
        self.rng = np.random.default_rng(seed)
        self.m = (1, 2)[seed % 2]
        self.num_host_blocks = NUM_HOST_BLOCKS // self.m
        extent_bytes = int(self.rng.integers(1, 5)) * self.m * BLOCK_BYTES
        self.budget_bytes = int(self.rng.integers(1, 4)) * extent_bytes
        self.moves = Moves(
            mode,
            self._new_pool(),
            self.num_host_blocks,
            block_axis=BLOCK_AXIS,
            blocks_per_host_block=self.m,
            extent_bytes=extent_bytes,
            staging_bytes=self.budget_bytes,
        )
        self.engine = self.moves.engine
        self.engine.warm_up()
        self.host = {}  # Readable host block -> its cells.
        self.writer = {}  # Host block -> ticket of the last save into it.
        self.flights = {}  # Ticket -> flight.
        self.doomed = set()  # Tickets that must fail.
        self.counts = collections.Counter()
        # Like a correct caller: leaves blocks alone that a waiting save has to read.
        self.is_careful = not seed // 4 % 2
        self.failing = True
        self._inject_failures(monkeypatch)

    # The operations of a caller.

    def save(self, pool=None):
        device_ids = self._rows(self.rng.integers(1, NUM_BLOCKS // self.m // 2))
        host_ids = self.rng.permutation(self.num_host_blocks)[: len(device_ids)]
        cells = {}
        for host_id, row in zip(host_ids.tolist(), device_ids, strict=True):
            cells[host_id] = [self.device[d] if d >= 0 else NOT_SAVED for d in row]
        self._hits = 0 if pool is None else 1
        pool = self.moves.pool if pool is None else pool
        ticket = self.engine.save(pool, self._flat(device_ids), host_ids)
        touched = set(device_ids[device_ids >= 0].tolist())
        self.flights[ticket] = Flight(touched, cells, self._hits > 0)
        for host_id in cells:
            self.host.pop(host_id, None)
            self.writer[host_id] = ticket

    def load(self):
        if not self.host:
            return
        busy = self._busy() if self.is_careful else self._loading()
        device_ids = self._rows(self.rng.integers(1, NUM_BLOCKS // self.m + 1), busy)
        host_ids = self.rng.choice(list(self.host), len(device_ids))
        host_ids, device_ids = self._that_were_saved(host_ids, device_ids)
        cells = {}
        for host_id, row in zip(host_ids.tolist(), device_ids, strict=True):
            for source, device_id in zip(self.host[host_id], row, strict=True):
                if device_id >= 0:
                    cells[int(device_id)] = [Cell(source.value, source)]
        self._hits = 0
        ticket = self.moves.load(host_ids, self._flat(device_ids))
        self.flights[ticket] = Flight(set(cells), cells, self._hits > 0)
        for device_id, [cell] in cells.items():
            self.device[device_id] = cell

    def load_what_is_not_there(self):
        missing = sorted(set(range(self.num_host_blocks)) - set(self.host))
        if missing:
            in_flight = self.engine.num_in_flight
            with pytest.raises(ValueError, match=r"have no bytes to load"):
                self.moves.load(missing[:1], self._flat(np.arange(self.m)[None]))
            assert self.engine.num_in_flight == in_flight

    def step(self):
        """Overwrite blocks that no transfer needs, donating the pool."""
        busy = self._busy()
        free = [d for d in range(NUM_BLOCKS) if d not in busy]
        ids = self.rng.permutation(free)[: self.rng.integers(0, 9)].astype(np.int32)
        padded = NUM_BLOCKS + np.arange(8, dtype=np.int32)
        padded[: len(ids)] = ids
        k, v = self._random_values(8)
        late = int(self.rng.choice([0, 50, 500]))
        self.moves.pool = overwrite(self.moves.pool, padded, k, v, late)
        for n, device_id in enumerate(ids.tolist()):
            self.device[device_id] = Cell([k[n], v[:, n]])

    def advance(self):
        self._hits = 0
        self._take(self.moves.advance())

    def drain(self):
        self._hits = 0
        self._take(self.moves.drain())
        assert not self.flights
        check_at_rest(self.engine)

    def abandon(self):
        if not self.flights:
            return
        ticket = list(self.flights)[self.rng.integers(len(self.flights))]
        self._forget(ticket, self.flights.pop(ticket))
        self.engine.abandon(ticket)
        with pytest.raises(ValueError, match=r"is not in flight"):
            self.engine.abandon(ticket)

    def check(self):
        """Compare the device blocks that no load in flight writes."""
        busy, pool = self._loading(), self.moves.pool
        k, v = np.array(pool["k"]), np.array(pool["v"])
        for device_id, cell in enumerate(self.device):
            if device_id not in busy and cell.is_known():
                assert (bits(k[device_id]) == bits(cell.value[0])).all(), device_id
                assert (bits(v[:, device_id]) == bits(cell.value[1])).all(), device_id
                self.counts["blocks compared"] += 1

    # Failures.

    def lose_a_save(self):
        self._everything_may_fail()
        self.save(faults.broken(self.moves.pool))

    def lose_the_pool(self):
        """Continue with a pool that fails later, then start over."""
        older = set(self.flights)
        self.moves.pool = faults.broken(self.moves.pool)
        for action in (self.save, self.load, self.advance):
            action()
        self.doomed |= self.flights.keys() - older
        self._everything_may_fail()
        self.device = [ANYTHING] * NUM_BLOCKS
        self.drain()
        with pytest.raises(jax.errors.JaxRuntimeError, match=faults.FAULT):
            self.moves.pool["k"].block_until_ready()
        self.moves.pool = self._new_pool()

    def run(self, num_steps):
        actions = {
            self.step: 6,
            self.save: 4,
            self.load: 4,
            self.advance: 6,
            self.load_what_is_not_there: 1,
            self.check: 0.5,
            self.drain: 0.2,
            self.abandon: 0.5,
        }
        if ON_CPU:
            actions |= {self.lose_a_save: 0.1, self.lose_the_pool: 0.1}
        weights = np.array(list(actions.values()))
        for n in self.rng.choice(len(actions), num_steps, p=weights / weights.sum()):
            list(actions)[n]()
            assert self.engine.bytes_in_flight <= self.budget_bytes
        self.finish()

    def finish(self):
        self.failing = False
        self.drain()
        self.check()
        rows, readable = NUM_BLOCKS // self.m, sorted(self.host)
        for start in range(0, len(readable), rows):
            host_ids = readable[start : start + rows]
            device_ids = np.arange(len(host_ids) * self.m).reshape(-1, self.m)
            host_ids, device_ids = self._that_were_saved(host_ids, device_ids)
            self.moves.load_now(host_ids, self._flat(device_ids))
            for host_id, row in zip(host_ids, device_ids, strict=True):
                for cell, device_id in zip(self.host[host_id], row, strict=True):
                    if device_id >= 0:
                        self.device[device_id] = cell
            self.check()
        self.moves.check_empty({*range(self.num_host_blocks)} - {*readable})
        check_at_rest(self.engine)
        if ON_CPU:
            faults.recover(self.moves.pool)

    # Helpers.

    def _loading(self):
        flights = self.flights.items()
        return set().union(*(f.device_ids for t, f in flights if t.direction == "load"))

    def _busy(self):
        """These, and the device blocks that saves still have to read."""
        flights = self.flights.items()
        waiting = (f.device_ids for t, f in flights if self.engine.is_waiting(t))
        return self._loading().union(*waiting)

    def _take(self, done):
        assert done == sorted(done, key=lambda completion: completion.ticket.number)
        for completion in done:
            flight = self.flights.pop(completion.ticket)
            assert not any(
                older.direction == completion.direction and older < completion.ticket
                for older in self.flights
            )
            self.counts[f"{completion.direction}s"] += 1
            if completion.error is not None:
                assert flight.may_fail, completion
                self.counts[f"failed {completion.direction}s"] += 1
                self._forget(completion.ticket, flight)
                continue
            assert completion.ticket not in self.doomed or not completion.num_blocks
            if completion.direction == "save":
                for host_id, cells in flight.cells.items():
                    if self.writer[host_id] == completion.ticket:
                        self.host[host_id] = cells

    def _forget(self, ticket, flight):
        if ticket.direction == "load":
            for [cell] in flight.cells.values():
                cell.ok = False

    def _everything_may_fail(self):
        for flight in self.flights.values():
            flight.may_fail = True

    def _inject_failures(self, monkeypatch):
        copier, memory = self.engine._copier, self.engine._queue._memory
        rng = np.random.default_rng(self.rng.integers(1 << 32))

        def hit(what):
            self.counts[what] += 1
            self._hits += 1
            self._everything_may_fail()

        def refusing(owner, name, rate, poison_rate=0.0):
            real = getattr(owner, name)

            def refuse(*args):
                if self.failing and rng.random() < rate:
                    hit(f"{name} refused")
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: by design")
                result = real(*args)
                if self.failing and ON_CPU and rng.random() < poison_rate:
                    hit(f"{name} poisoned")
                    result = faults.broken(result)
                return result

            monkeypatch.setattr(owner, name, refuse)

        refusing(copier, "save", 0.005)
        refusing(copier, "load", 0.005)
        refusing(copier, "stage", 0.005, poison_rate=0.002)
        refusing(memory, "_new_extent", 0.2)

    def _random_values(self, n):
        k = random_array(self.rng, (n, 4), "int32")
        return k, random_array(self.rng, (2, n, 3), "uint16")

    def _new_pool(self):
        k, v = self._random_values(NUM_BLOCKS)
        self.device = [Cell([k[n], v[:, n]]) for n in range(NUM_BLOCKS)]
        return to_device({"k": k, "v": v})

    def _rows(self, num_rows, busy=()):
        """Distinct device blocks i32[n, m], as many as there are; -1 in some places."""
        free = [d for d in range(NUM_BLOCKS) if d not in busy]
        num_rows = min(int(num_rows), len(free) // self.m)
        rows = self.rng.permutation(free)[: num_rows * self.m].reshape(-1, self.m)
        if self.m > 1:
            rows[self.rng.random(num_rows) < 0.2, self.rng.integers(self.m)] = -1
        return rows.astype(np.int32)

    def _that_were_saved(self, host_ids, device_ids):
        """Remove the device blocks that the saves left out from a load."""
        device_ids = np.array(device_ids)
        for host_id, row in zip(host_ids, device_ids, strict=True):
            row[[cell is NOT_SAVED for cell in self.host[host_id]]] = -1
        some = (device_ids >= 0).any(axis=1)
        return np.array(host_ids)[some], device_ids[some]

    def _flat(self, rows):
        return rows[:, 0] if self.m == 1 else rows


def soak(mode, seed, num_steps, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)  # At least one of every injected fault.
    run = Soak(mode, seed, monkeypatch)
    run.run(num_steps)
    print(f"{mode=} {seed=} {dict(run.counts)}")


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_random_transfers_with_failures_agree_with_numpy(
    mode, seed, monkeypatch, caplog
):
    soak(mode, seed, 300, monkeypatch, caplog)


@pytest.mark.long
@pytest.mark.parametrize("seed", [10, 11, 12, 13])
def test_10_000_random_steps_with_failures_agree_with_numpy(
    mode, seed, monkeypatch, caplog
):
    soak(mode, seed, 10_000, monkeypatch, caplog)
