"""The stage `speed`: bandwidth, overlap with compute, and the engine's thread."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxkv._util import size_text
from jaxkv.tools.speed import DevicePutLimit, SpeedBench, is_cpu
from jaxkv.tools.verify.busy import BusyStep
from jaxkv.tools.verify.oracle import check_successful
from jaxkv.tools.verify.records import Check, Turn
from jaxkv.types import PyTree

_MIB = 1 << 20
# Bytes of a block, and of an extent on each device; None for the engine's choice.
_SIZES = (
    *((64 << 10, None), (512 << 10, None), (2 * _MIB, None)),
    *((2 * _MIB, 16 * _MIB), (2 * _MIB, 32 * _MIB)),
)
_BATCH_BYTES = 32 * _MIB
_MIN_ROUNDS, _MAX_ROUNDS = 6, 30
_STEP_S, _STEPS_PER_BATCH = 0.010, 4
_OK_SHARE, _OK_HIDDEN, _OK_PIECE_US = 0.8, 0.5, 150.0


def list_checks() -> Sequence[Check]:
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


def _num_buses() -> int:
    """Return how many devices have a way to the host of their own."""
    return 1 if is_cpu() else len(jax.local_devices())


def _compare_speeds(block_bytes: int, extent_bytes: int | None, turn: Turn) -> Any:
    """Time the engine, `device_put` of as many bytes of the pool's arrays, and the bus.

    The bus is one large array for each device, or on the CPU `np.copyto`.
    """
    # A TPU's runtime maps 4 GiB of host memory by default, for all its devices.
    extent_bytes = extent_bytes and _num_buses() * extent_bytes
    moved_bytes = 64 * _MIB * _num_buses()
    bench = SpeedBench(block_bytes, moved_bytes, extent_bytes=extent_bytes)
    halves = [leaf[: bench.num_moved] for leaf in bench.pool]
    sides = {
        "engine": bench.copy,
        "device_put": DevicePutLimit([halves]).copy,
        "bus": bench.make_limit().copy,
    }
    seconds = bench.compare(sides, turn.rounds(_MIN_ROUNDS, _MAX_ROUNDS))
    bench.check()
    speeds: dict[str, Any] = {
        name: {
            f"{direction}_{kind}": bench.num_bytes / 1e9 / choose(times)
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
    if extent_bytes is None and is_slow and not is_cpu():
        figures["advice"] = (
            "Blocks move at less than 80% of the bus: set extent_bytes to the fastest "
            "size in the table, and prefer larger blocks"
        )
    return f"{size_text(bench.num_bytes)} over all devices: {', '.join(texts)}", figures


def _measure_overlap(turn: Turn) -> Any:
    """Time steps and batches of 32 MiB, alone and together."""
    bench = SpeedBench(2 * _MIB, _BATCH_BYTES)
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
        if hidden < _OK_HIDDEN and not is_cpu():
            figures["advice"] = (
                "Transfers delay steps by more than half their time: halve "
                "store_batch_blocks, and lower max_blocks_in_flight"
            )
    note = "; transfers and steps share the cores" * is_cpu()
    return f"steps of {1e3 * step_s:.1f} ms: {'; '.join(texts)}{note}", figures


def _touch(pool: Any, zero: Any) -> Any:
    """Write to the pool, as a model's step does; the value stays the same."""
    bit = (zero != 0).astype(pool[0].dtype)
    return [pool[0].at[0, 0, :, 0].add(bit), *pool[1:]]


def _time_batch(bench: SpeedBench, step: BusyStep, name: str, has_steps: bool) -> float:
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
    bench = SpeedBench(512 << 10, piece_bytes, extent_bytes=piece_bytes)
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
    if slowest > _OK_PIECE_US * devices and not is_cpu():
        figures["advice"] = (
            f"A piece takes {slowest:.0f} us of the engine's thread, more than "
            f"{_OK_PIECE_US:.0f} for each device: set a larger extent_bytes"
        )
    texts = (f"{name} {value:,.0f} us" for name, value in p50.items())
    piece = f"a piece of {size_text(piece_bytes)}, {len(bench.pool)} leaves"
    note = "; XLA:CPU copies bytes in this thread" * is_cpu()
    return f"{piece}: {', '.join(texts)}{note}", figures
