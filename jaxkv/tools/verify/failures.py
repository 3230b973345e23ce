"""The stage `failures`: what fails is reported, and its bytes are never served."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.tools.speed import DIRECTIONS
from jaxkv.tools.verify.blocks import Way, ways_here
from jaxkv.tools.verify.engine import SMALL, converse
from jaxkv.tools.verify.oracle import Oracle, random_array, run_to_end, to_device
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.transfer.memory import array_spec, wait_for
from jaxkv.transfer.tickets import Direction
from jaxkv.types import PyTree

if TYPE_CHECKING:
    from jaxkv.tools.demo.engine import Engine

_ALONE = "a failing program, jax alone"
_NOT_INJECTED = (
    "this runtime does not survive a program that fails, jaxkv or not, so that no "
    "failure can be injected; failures of single transfers are injected below"
)
_FAULT = "a fault that jaxkv verify injected"
_NUM_BLOCKS = 16
_SHARE_FAILING = 0.3
_MAX_PRODUCTS = 1 << 22


def list_checks() -> Sequence[Check]:
    return [
        Check(_ALONE, _fail_alone, excuse=_NOT_INJECTED),
        *(
            Check(
                f"{direction}s of a failed step ({way})",
                functools.partial(_fail_one, way, direction),
            )
            for way in ways_here()
            for direction in DIRECTIONS
        ),
        Check("more host memory than there is", _ask_for_too_much),
        Check("saves and loads that fail under an engine", _fail_transfers, 4),
        Check("damaged objects in a store", _damage_a_store, 4),
    ]


@jax.jit
def _late(number: Any) -> Any:
    matrix = jnp.full((64, 64), 1 / 64, jnp.float32)
    return jax.lax.fori_loop(0, number, lambda _, x: x @ matrix, matrix)[0, 0]


def _fail_late(pool: PyTree) -> PyTree:
    """Return a copy of a pool that fails while it is computed, as a step may."""

    def fail(_: Any) -> Any:
        raise RuntimeError(_FAULT)

    def run(pool: PyTree, late: jax.Array) -> PyTree:
        zero = jax.pure_callback(fail, array_spec((), np.dtype(np.float32)), late)
        return jax.tree.map(lambda leaf: jnp.where(zero == 0, leaf, 0), pool)

    program, number = jax.jit(run), 20_000
    while number < _MAX_PRODUCTS:
        try:
            return program(pool, _late(number))
        except jax.errors.JaxRuntimeError:
            number *= 4  # XLA:CPU ran it in this thread, as its argument was ready.
    raise UnsupportedError(f"the program fails before it returns. {_NOT_INJECTED}")


def _pool_of(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [random_array(rng, (_NUM_BLOCKS, 8, 4, 128), "int32") for _ in range(2)]


def _fail_alone(turn: Turn) -> Any:
    failed = _fail_late(to_device(_pool_of(0)))
    try:
        wait_for(failed)
    except jax.errors.JaxRuntimeError as error:
        return f"jax raises {type(error).__name__}", {}
    raise UnsupportedError(f"jax raises no error. {_NOT_INJECTED}")


def _fail_one(way: Way, direction: Direction, turn: Turn) -> Any:
    """Save blocks, let a transfer of a failed pool fail, and load the saved blocks."""
    alone = {result.name: result.verdict for result in turn.log.read().results}
    if alone.get(_ALONE, "PASS") != "PASS":
        raise UnsupportedError(_NOT_INJECTED)
    arrays = _pool_of(1)
    oracle, pool = Oracle(arrays), to_device(arrays)
    engine = TransferEngine(pool, 24, mode=way.mode, kernel=way.kernel)
    engine.warm_up()
    saved, hosts = np.arange(8, dtype=np.int32), np.arange(10, 16, dtype=np.int32)
    engine.save(pool, saved, saved)
    pool = run_to_end(engine, pool)
    oracle.save(saved, saved)
    failed = _fail_late(pool)
    if direction == "save":
        ticket = engine.save(failed, hosts - 10, hosts)
    else:
        failed, ticket = engine.load(failed, saved, saved)
    _, (done,) = engine.drain(failed)
    if done.ticket != ticket or done.error is None:
        raise WrongError(f"{ticket} of a failed pool was reported as {done}")
    for host in hosts.tolist():
        try:
            engine.check_load(pool, [host], [0])
        except ValueError:
            continue
        raise WrongError(f"host block {host} can be loaded without a successful save")
    pool, _ = engine.load(pool, saved, saved + 8)
    pool = run_to_end(engine, pool)
    oracle.load(saved, saved + 8)
    oracle.check(pool, "after a failure")
    return f"reported as failed; {len(saved)} older host blocks are intact", {}


def _ask_for_too_much(turn: Turn) -> Any:
    try:
        TransferEngine(to_device(_pool_of(0)), host_bytes="1024TiB")
    except MemoryError as error:
        return str(error), {}
    raise WrongError("an engine was made with 1,024 TiB of host memory")


class _FailingTransfers:
    """Makes some transfers move wrong blocks, and reports them as failed."""

    def __init__(self, engine: Engine) -> None:
        transfer: Any = engine.transfer
        self._rng = np.random.default_rng(8)
        self._failing: set[Ticket] = set()
        self.num_reported = 0
        self._real = transfer.save, transfer.load_each, transfer.poll, transfer.drain
        transfer.save, transfer.load_each = self._save, self._load_each
        transfer.poll, transfer.drain = self._poll, self._drain

    def _save(self, pool: PyTree, device_ids: Any, host_ids: Any) -> Ticket:
        device_ids, fails = self._choose(device_ids)
        ticket: Ticket = self._real[0](pool, device_ids, host_ids)
        self._failing |= {ticket} if fails else set()
        return ticket

    def _load_each(self, pool: PyTree, host_ids: Any, *args: Any, **named: Any) -> Any:
        host_ids, fails = self._choose(host_ids)
        pool, tickets = self._real[1](pool, host_ids, *args, **named)
        self._failing |= set(tickets) if fails else set()
        return pool, tickets

    def _poll(self) -> list[Completion]:
        return [*map(self._report, self._real[2]())]

    def _drain(self, pool: PyTree) -> tuple[PyTree, list[Completion]]:
        pool, done = self._real[3](pool)
        return pool, [*map(self._report, done)]

    def _choose(self, ids: Any) -> tuple[Any, bool]:
        """Decide whether a transfer fails; if it does, its ids are mixed up."""
        fails = self._rng.random() < _SHARE_FAILING
        return (np.roll(np.asarray(ids), 1, axis=0) if fails else ids), fails

    def _report(self, completion: Completion) -> Completion:
        if completion.ticket not in self._failing:
            return completion
        self.num_reported += 1
        return dataclasses.replace(completion, error=RuntimeError(_FAULT))


def _fail_transfers(turn: Turn) -> Any:
    made: list[_FailingTransfers] = []
    record = converse(
        SMALL, turn, lambda engine: made.append(_FailingTransfers(engine))
    )
    failed, loaded = made[0].num_reported, record.on.blocks_loaded
    if not (failed and loaded):
        raise WrongError(f"{failed} transfers failed and {loaded} blocks were loaded")
    text = f"{failed} transfers failed, {loaded} blocks were loaded"
    return f"{text}, all tokens are the same", {"failed": failed, "loaded": loaded}


def _damage_a_store(turn: Turn) -> Any:
    """Flip a bit of every second object of a store, and go on with it."""
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(SMALL, storage=folder)
        converse(config, turn)
        objects = sorted(path for path in Path(folder).rglob("*.0") if path.is_file())
        for path in objects[::2]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0x10
            path.write_bytes(content)
        fetched = converse(config, turn).on.blocks_fetched
    if not (objects and fetched):
        raise WrongError(f"{len(objects)} blocks were written, {fetched} were read")
    text = f"a bit flipped in {len(objects[::2])} of {len(objects)} objects, {fetched}"
    return f"{text} blocks were read, all tokens are the same", {"fetched": fetched}
