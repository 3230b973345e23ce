"""The stage `speed`: bandwidth, overlap with compute, and the engine's thread."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._util import size_text
from jaxkv.tools.bench.transfer.designs import CopyLimit, DevicePutLimit
from jaxkv.tools.bench.transfer.paged_pool import make_bits
from jaxkv.tools.bench.transfer.records import DIRECTIONS
from jaxkv.tools.bench.transfer.run import timed
from jaxkv.tools.verify.busy import BusyStep
from jaxkv.tools.verify.oracle import check_successful
from jaxkv.tools.verify.records import Check, Turn, WrongError
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.memory import partition_spec, wait_for
from jaxkv.transfer.tickets import Direction
from jaxkv.types import PyTree

_MIB = 1 << 20
# Bytes of a block, and of an extent on each device; None for the engine's choice.
_SIZES = (
    *((64 << 10, None), (512 << 10, None), (2 * _MIB, None)),
    *((2 * _MIB, 16 * _MIB), (2 * _MIB, 32 * _MIB)),
)
_BATCH_BYTES = 32 * _MIB
_NUM_LEAVES = 8
_NUM_SETS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 6, 30
_STEP_S, _STEPS_PER_BATCH = 0.010, 4
_OK_SHARE, _OK_HIDDEN, _OK_PIECE_US = 0.8, 0.5, 150.0


def list_checks() -> Sequence[Check]:
    """List the checks; on all devices of this process."""
    speeds = [
        Check(
            f"blocks of {size_text(block)}"
            + (f", extents of {size_text(extent)}" if extent else ""),
            functools.partial(_compare_speeds, block, extent),
        )
        for block, extent in _SIZES
    ]
    return [
        *speeds[:3],
        Check("overlap with compute", _measure_overlap),
        Check("the engine's thread", _measure_thread),
        *speeds[3:],
    ]


def _is_cpu() -> bool:
    return bool(jax.devices()[0].platform == "cpu")


def _num_buses() -> int:
    """Return how many devices have a way to the host of their own."""
    return 1 if _is_cpu() else len(jax.local_devices())


class _Bench:
    """A pool over all devices of this process, and an engine.

    A leaf is u16[blocks, tokens, heads, 128], its heads spread over the devices.
    """

    def __init__(
        self, block_bytes: int, moved_bytes: int, extent_bytes: int | None = None
    ) -> None:
        devices = jax.local_devices()
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        self.place = jax.sharding.NamedSharding(mesh, partition_spec(None, None, "x"))
        self.replicated = jax.sharding.NamedSharding(mesh, partition_spec())
        tokens = max(1, block_bytes // _NUM_LEAVES // (256 * len(devices)))
        self.num_moved = max(1, moved_bytes // block_bytes)
        self._shape = (2 * self.num_moved, tokens, len(devices), 128)
        self.pool = self.make_leaves(1)
        self.num_bytes = sum(leaf.nbytes for leaf in self.pool) // 2
        self.engine = TransferEngine(
            self.pool,
            _NUM_SETS * self.num_moved,
            extent_bytes=extent_bytes,
            staging_bytes=max(256 * _MIB, 4 * (extent_bytes or 0)),
        )
        self.engine.warm_up()
        self._rng, self._turn = np.random.default_rng(9), 0

    def make_leaves(self, seed: int) -> list[Any]:
        """Make leaves whose blocks have tags from 2^20 times the seed on."""

        def leaf(number: int) -> Any:
            tags = jnp.arange(self._shape[0], dtype=jnp.uint32) + np.uint32(seed << 20)
            bits = make_bits(jnp, tags, number, math.prod(self._shape[1:]))
            return (bits >> 16).astype(jnp.uint16).reshape(self._shape)

        places = [self.place] * _NUM_LEAVES
        make = jax.jit(lambda: [*map(leaf, range(_NUM_LEAVES))], out_shardings=places)
        return [*make()]

    def choose(self) -> tuple[Any, Any]:
        """Choose the next device and host blocks, as a cache in use has them."""
        self._turn += 1
        device_ids = self._rng.permutation(2 * self.num_moved)[: self.num_moved]
        host_ids = np.arange(self.num_moved) + self._turn % _NUM_SETS * self.num_moved
        self._ids = device_ids.astype(np.int32), host_ids.astype(np.int32)
        return self._ids

    def drain(self) -> None:
        self.pool, done = self.engine.drain(self.pool)
        check_successful(done)
        wait_for(self.pool)

    def copy(self, direction: Direction) -> None:
        """Save the chosen blocks, or load them."""
        device_ids, host_ids = self._ids
        if direction == "save":
            self.engine.save(self.pool, device_ids, host_ids)
        else:
            self.pool, _ = self.engine.load(self.pool, host_ids, device_ids)
        self.drain()

    def check(self) -> None:
        """Load saved blocks into another pool, and compare all bits on the device."""
        device_ids, _ = self.choose()
        self.copy("save")
        before, self.pool = self.pool, self.make_leaves(2)
        self.copy("load")
        differ = jax.jit(
            lambda before, after, ids: jnp.stack(
                [jnp.any(a[ids] != b[ids]) for a, b in zip(before, after, strict=True)]
            )
        )
        if differ(before, self.pool, device_ids).any():
            raise WrongError("blocks are not what was saved")


def _compare_speeds(block_bytes: int, extent_bytes: int | None, turn: Turn) -> Any:
    """Time the engine, `device_put` of as many bytes of the pool's arrays, and the bus.

    The bus is one large array for each device, or on the CPU `np.copyto`.
    """
    # A TPU's runtime maps 4 GiB of host memory by default, for all its devices.
    num_buses = _num_buses()
    extent_bytes = extent_bytes and num_buses * extent_bytes
    bench = _Bench(block_bytes, 64 * _MIB * num_buses, extent_bytes)
    halves = [leaf[: bench.num_moved] for leaf in bench.pool]
    large = jnp.concatenate([half.reshape(-1, *half.shape[2:]) for half in halves])
    bus: CopyLimit | DevicePutLimit = (
        CopyLimit(bench.num_bytes, bench.num_bytes)
        if _is_cpu()
        else DevicePutLimit([large])
    )
    sides: dict[str, Callable[[Direction], None]] = {
        "engine": bench.copy,
        "device_put": DevicePutLimit([halves]).copy,
        "bus": bus.copy,
    }
    seconds: dict[str, dict[Direction, list[float]]] = {
        name: {direction: [] for direction in DIRECTIONS} for name in sides
    }
    for number in turn.rounds(_MIN_ROUNDS, _MAX_ROUNDS):
        bench.choose()
        for name in (*sides, *sides)[number % 3 : number % 3 + 3]:
            for direction, times in seconds[name].items():
                times.append(timed(functools.partial(sides[name], direction)))
    bench.check()
    speeds: dict[str, Any] = {
        name: {
            # The first round only touches the memory.
            f"{direction}_{kind}": bench.num_bytes / 1e9 / choose(times[1:])
            for direction, times in by_direction.items()
            for kind, choose in (("best", min), ("p50", statistics.median))
        }
        for name, by_direction in seconds.items()
    }
    engine, put, limit = speeds.values()
    texts = [
        f"{name} {engine[name + '_best']:.1f} GB/s at best "
        f"({engine[name + '_best'] / limit[name + '_best']:.0%} of the bus, "
        f"{engine[name + '_best'] / put[name + '_best']:.1f} times device_put)"
        for name in ("save", "load")
    ]
    figures: dict[str, Any] = {"num_bytes": bench.num_bytes, "gb_per_s": speeds}
    is_slow = min(engine[n] / limit[n] for n in ("save_best", "load_best")) < _OK_SHARE
    if extent_bytes is None and is_slow and not _is_cpu():
        figures["advice"] = (
            "Blocks move at less than 80% of the bus: set extent_bytes to the fastest "
            "size in the table, and prefer larger blocks"
        )
    return f"{size_text(bench.num_bytes)} over all devices: {', '.join(texts)}", figures


def _measure_overlap(turn: Turn) -> Any:
    """Time steps and batches of 32 MiB, alone and together."""
    bench = _Bench(2 * _MIB, _BATCH_BYTES)
    step = BusyStep(_touch, bench.replicated)
    bench.pool, step_s = step.calibrate(_STEP_S, bench.pool)
    kinds = [
        ("steps", True),
        *((d, s) for d in ("save", "load") for s in (False, True)),
    ]
    seconds: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    for _ in turn.rounds(_MIN_ROUNDS, _MAX_ROUNDS):
        for kind in kinds:
            seconds[kind].append(_time_batch(bench, step, *kind))
    p50 = {kind: statistics.median(times) for kind, times in seconds.items()}
    figures: dict[str, Any] = {"step_s": step_s}
    texts = []
    for name in ("save", "load"):
        alone_s, delay_s = p50[name, False], p50[name, True] - p50["steps", True]
        hidden = 1 - delay_s / alone_s
        figures[name] = {"alone_s": alone_s, "delay_s": delay_s, "hidden": hidden}
        texts.append(
            f"a {name} of {size_text(_BATCH_BYTES)} takes {1e3 * alone_s:.1f} ms alone "
            f"and delays {_STEPS_PER_BATCH} steps by {1e3 * delay_s:.1f} ms"
        )
        if hidden < _OK_HIDDEN and not _is_cpu():
            figures["advice"] = (
                "Transfers delay steps by more than half their time: halve "
                "store_batch_blocks, and lower max_blocks_in_flight"
            )
    note = "; transfers and steps share the cores" * _is_cpu()
    return f"steps of {1e3 * step_s:.1f} ms: {'; '.join(texts)}{note}", figures


def _touch(pool: Any, zero: Any) -> Any:
    """Write to the pool, as a model's step does; the value stays the same."""
    bit = (zero != 0).astype(pool[0].dtype)
    return [pool[0].at[0, 0, :, 0].add(bit), *pool[1:]]


def _time_batch(bench: _Bench, step: BusyStep, name: str, has_steps: bool) -> float:
    """Time a batch of saves or loads, the steps beside it, or steps alone."""
    engine, (device_ids, host_ids) = bench.engine, bench.choose()
    if name == "load":
        engine.save(bench.pool, device_ids, host_ids)
    bench.drain()
    start_s = time.perf_counter()
    if name == "save":
        engine.save(bench.pool, device_ids, host_ids)
    elif name == "load":
        bench.pool, _ = engine.load(bench.pool, host_ids, device_ids)
    for _ in range(_STEPS_PER_BATCH * has_steps):
        bench.pool = engine.advance(bench.pool)
        check_successful(engine.poll())
        bench.pool = step(bench.pool)
    bench.drain()
    return time.perf_counter() - start_s


def _measure_thread(turn: Turn) -> Any:
    """Measure the processor time that calls take of the thread that owns the engine."""
    devices = len(jax.local_devices())
    piece_bytes = 8 * _MIB * _num_buses()
    bench = _Bench(512 << 10, piece_bytes, piece_bytes)
    engine = bench.engine
    taken_us: dict[str, list[float]] = {"save": [], "load": [], "write": [], "idle": []}

    def clock(name: str, call: Callable[..., PyTree], *args: Any) -> Any:
        start_s = time.thread_time()
        answer = call(*args)
        taken_us[name].append(1e6 * (time.thread_time() - start_s))
        return answer

    for _ in turn.rounds(_MIN_ROUNDS, _MAX_ROUNDS):
        device_ids, host_ids = bench.choose()
        clock("save", engine.save, bench.pool, device_ids, host_ids)
        bench.drain()
        bench.pool, ticket = clock(
            "load", engine.load, bench.pool, host_ids, device_ids
        )
        while engine.is_waiting(ticket):  # The mode staged writes what has landed.
            time.sleep(0.001)
            bench.pool = clock("idle", engine.advance, bench.pool)
            if not engine.is_waiting(ticket):
                taken_us["write"].append(taken_us["idle"].pop())
        bench.drain()
        bench.pool = clock("idle", engine.advance, bench.pool)
    p50 = {name: statistics.median(us) for name, us in taken_us.items() if us}
    figures: dict[str, Any] = {"us": p50, "devices": devices}
    slowest = max(p50["save"], p50["load"] + p50.get("write", 0.0))
    if slowest > _OK_PIECE_US * devices and not _is_cpu():
        figures["advice"] = (
            f"A piece takes {slowest:.0f} us of the engine's thread, more than "
            f"{_OK_PIECE_US:.0f} for each device: set a larger extent_bytes"
        )
    texts = (f"{name} {value:,.0f} us" for name, value in p50.items())
    piece = f"a piece of {size_text(piece_bytes)}, {_NUM_LEAVES} leaves"
    note = "; XLA:CPU copies bytes in this thread" * _is_cpu()
    return f"{piece}: {', '.join(texts)}{note}", figures
