"""The stage `races`: transfers beside steps that overwrite the blocks they may.

A block's bits are a function of its tag. NumPy arrays keep the expected tags of device
and host blocks. Steps write new tags while transfers are in flight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.speed import make_bits
from jaxkv.tools.verify.blocks import Way, ways_here
from jaxkv.tools.verify.busy import BusyStep
from jaxkv.tools.verify.oracle import Ids, Oracle, check_successful, to_device
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.transfer.memory import partition_spec

_NUM_BLOCKS, _NUM_HOST_BLOCKS, _NUM_LEAVES = 96, 144, 4
_BLOCK = (8, 8, 128)  # i32: 32 KiB a leaf
_MAX_MOVED, _NUM_WRITTEN = 12, 8
_MAX_IN_FLIGHT = 6
_STEP_S = 0.003
_MIN_STEPS, _MAX_STEPS, _STEPS_PER_CHECK = 48, 4000, 16

_ALL = "several devices"
_SETUPS: Mapping[str, Mapping[str, Any]] = {
    "one device": {},
    "one device, one extent in flight": {
        "staging_bytes": "512KiB",
        "extent_bytes": "512KiB",
    },
    _ALL: {},
}


def list_checks() -> Sequence[Check]:
    return [
        Check(f"{name} ({way})", functools.partial(_race, way, options, name))
        for way in ways_here()
        for name, options in _SETUPS.items()
    ]


def make_blocks(xp: Any, tags: Any, leaf: int) -> Any:
    """Make the blocks of a leaf from their tags, i32[n, *_BLOCK], in NumPy or jax."""
    bits = make_bits(xp, tags.astype(xp.uint32), leaf, math.prod(_BLOCK))
    return bits.astype(xp.int32).reshape(-1, *_BLOCK)


class _Race:
    """A pool, its engine, and the expected tags of all blocks."""

    def __init__(self, way: Way, options: Mapping[str, Any], num_devices: int) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:num_devices]), ("x",))
        spec = partition_spec(None, None, "x")
        place = jax.sharding.NamedSharding(mesh, spec)
        self.rng = np.random.default_rng(7)
        self.tags = np.arange(_NUM_BLOCKS, dtype=np.uint32)
        self.host_tags: dict[int, int] = {}  # Expected tags of loadable host blocks
        self.num_moved = 0
        leaves = [make_blocks(np, self.tags, leaf) for leaf in range(_NUM_LEAVES)]
        self.pool = to_device(leaves, [place] * _NUM_LEAVES)
        self.engine = TransferEngine(
            self.pool, _NUM_HOST_BLOCKS, mode=way.mode, kernel=way.kernel, **options
        )
        self.engine.warm_up()
        replicated = jax.sharding.NamedSharding(mesh, partition_spec())
        self._step = BusyStep(_write, replicated)
        self._count_wrong = jax.jit(_count_wrong)
        self._counts: list[tuple[Ticket, jax.Array]] = []
        # Transfers in flight: device blocks, host blocks and, for saves, tags.
        self._saves: dict[Ticket, tuple[Ids, Ids, NDArray[np.uint32]]] = {}
        self._loads: dict[Ticket, tuple[Ids, Ids]] = {}

    def calibrate(self) -> float:
        nothing = np.full(_NUM_WRITTEN, _NUM_BLOCKS, np.int32)
        tags = np.zeros(_NUM_WRITTEN, np.uint32)
        self.pool, took_s = self._step.calibrate(_STEP_S, self.pool, nothing, tags)
        return took_s

    def run_step(self) -> None:
        self.pool = self.engine.advance(self.pool)
        self._note(self.engine.poll())
        if self.engine.num_in_flight < _MAX_IN_FLIGHT:
            if self.host_tags and self.rng.random() < 0.7:
                self._load()
            if self.rng.random() < 0.7:
                self._save()
        # A step may not overwrite blocks of a load in flight or of a waiting save.
        waiting = [
            blocks
            for ticket, (blocks, *_) in self._saves.items()
            if self.engine.is_waiting(ticket)
        ]
        held = _union(waiting) | _union(blocks for blocks, _ in self._loads.values())
        blocks = self._pick(set(range(_NUM_BLOCKS)) - held, _NUM_WRITTEN)
        self.tags[blocks] = self.rng.integers(1 << 32, size=len(blocks))
        ids = np.full(_NUM_WRITTEN, _NUM_BLOCKS, np.int32)  # Out of range: dropped
        ids[: len(blocks)] = blocks
        new = np.resize(self.tags[blocks], _NUM_WRITTEN)
        self.pool = self._step(self.pool, ids, new)

    def check(self) -> None:
        for ticket, count in self._counts:
            if int(count):
                raise WrongError(
                    f"{ticket}: some blocks differed from the saved ones when the load "
                    "was reported"
                )
        self._counts.clear()

    def finish(self) -> None:
        """Wait for all transfers, and compare all blocks with the expected ones."""
        self.pool, done = self.engine.drain(self.pool)
        self._note(done)
        self.check()
        if unreported := [*self._saves, *self._loads]:
            raise WrongError(f"{unreported} were never reported")
        leaves = [make_blocks(np, self.tags, leaf) for leaf in range(_NUM_LEAVES)]
        Oracle(leaves).check(self.pool, "at the end")

    def _note(self, completions: Sequence[Completion]) -> None:
        """Make saved blocks loadable, and start to compare loaded blocks."""
        check_successful(completions)
        for ticket in (completion.ticket for completion in completions):
            if ticket in self._saves:
                _, hosts, tags = self._saves.pop(ticket)
                self.host_tags |= zip(hosts.tolist(), tags.tolist(), strict=True)
            else:
                blocks, _ = self._loads.pop(ticket)
                ids = np.resize(blocks, _MAX_MOVED)
                count = self._count_wrong(self.pool, ids, self.tags[ids])
                self._counts.append((ticket, count))

    def _save(self) -> None:
        saving = _union(hosts for _, hosts, _ in self._saves.values())
        busy = saving | _union(hosts for _, hosts in self._loads.values())
        hosts = self._pick(set(range(_NUM_HOST_BLOCKS)) - busy, self._number())
        # Half of the saves read blocks that a load in flight writes.
        loading = _union(blocks for blocks, _ in self._loads.values())
        is_after = loading and self.rng.random() < 0.5
        blocks = self._pick(loading if is_after else range(_NUM_BLOCKS), len(hosts))
        hosts = hosts[: len(blocks)]
        for host in hosts.tolist():
            self.host_tags.pop(host, None)
        ticket = self.engine.save(self.pool, blocks, hosts)
        # A save after a load of the same device block reads the loaded bytes.
        self._saves[ticket] = blocks, hosts, self.tags[blocks]
        self.num_moved += len(blocks)

    def _load(self) -> None:
        loading = _union(blocks for blocks, _ in self._loads.values())
        blocks = self._pick(set(range(_NUM_BLOCKS)) - loading, self._number())
        hosts = self._pick(self.host_tags, len(blocks))
        if not len(hosts):
            return  # All blocks are being loaded already.
        blocks = blocks[: len(hosts)]
        self.pool, ticket = self.engine.load(self.pool, hosts, blocks)
        self._loads[ticket] = blocks, hosts
        self.tags[blocks] = [self.host_tags[host] for host in hosts.tolist()]
        self.num_moved += len(blocks)

    def _number(self) -> int:
        return int(self.rng.integers(1, _MAX_MOVED + 1))

    def _pick(self, ids: Iterable[int], max_ids: int) -> Ids:
        return self.rng.permutation(sorted(ids))[:max_ids].astype(np.int32)


def _union(ids: Iterable[Ids]) -> set[int]:
    return {number for array in ids for number in array.tolist()}


def _write(pool: Any, zero: Any, ids: Any, tags: Any) -> Any:
    tags = jnp.where(zero == 0, tags, 0)
    return [
        array.at[ids].set(make_blocks(jnp, tags, leaf), mode="drop")
        for leaf, array in enumerate(pool)
    ]


def _count_wrong(pool: Any, ids: Any, tags: Any) -> jax.Array:
    wrong = jnp.zeros(len(ids), bool)
    for leaf, array in enumerate(pool):
        differs = array[ids] != make_blocks(jnp, tags, leaf)
        wrong |= jnp.any(differs, axis=range(1, differs.ndim))
    return jnp.sum(wrong)


def _race(way: Way, options: Mapping[str, Any], name: str, turn: Turn) -> Any:
    num_devices = math.gcd(len(jax.local_devices()), _BLOCK[1]) if name == _ALL else 1
    if name == _ALL and num_devices < 2:
        raise UnsupportedError("there is only one device")
    race = _Race(way, options, num_devices)
    step_s = race.calibrate()
    num_steps = 0
    for number in turn.rounds(_MIN_STEPS, _MAX_STEPS):
        race.run_step()
        if number % _STEPS_PER_CHECK == _STEPS_PER_CHECK - 1:
            race.check()
        num_steps += 1
    race.finish()
    figures = {"steps": num_steps, "blocks_moved": race.num_moved, "step_s": step_s}
    text = f"{race.num_moved:,} blocks moved beside {num_steps:,} steps"
    return f"{text} of {1e3 * step_s:.1f} ms that overwrite blocks", figures
