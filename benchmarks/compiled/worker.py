"""The process that compiles: reads programs from stdin, writes figures to stdout.

It is a process of its own, as the environment must be right before jax starts, and as
a compiler that cannot go on ends the process. Both streams hold Python objects,
pickled: in come a list of programs, out goes a `Reply` for each.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from benchmarks.compiled import cuda, hlo
from benchmarks.compiled.plan import Program
from benchmarks.compiled.pools import PoolShape
from benchmarks.compiled.records import Figures, Reply
from benchmarks.compiled.targets import NUM_DEVICES, Target
from jaxkv.transfer import memory
from jaxkv.transfer.extents import ExtentLayout
from jaxkv.transfer.kernels import Copier
from jaxkv.transfer.layout import PoolLayout


def main() -> None:
    """Compile the programs that stdin names."""
    # Show other output to stdout instead of reading it as a reply.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pool: PoolShape | None = None
    for program in pickle.load(sys.stdin.buffer):
        if program.pool != pool:
            # What JAX keeps of the programs before would add up to gigabytes.
            pool = program.pool
            _make_copier.cache_clear()
            jax.clear_caches()  # type: ignore[no-untyped-call]
        pickle.dump(_compile(program), replies)
        replies.flush()


def _compile(program: Program) -> Reply:
    try:
        return measure(program), None
    # Of any kind: compilers, JAX and jaxkv each have their own types, and the next
    # program must be compiled in any case.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return None, text[:600]


def measure(program: Program) -> Figures:
    """Compile a program; return what the compiler says."""
    with _compiler(program.target, program.pool):
        rows = program.num_blocks * program.pool.blocks_per_host_block
        copier = _make_copier(program.target, program.pool, rows)
        started = time.process_time()
        compiled = _compiled(copier, program)
        compile_s = time.process_time() - started
        layout = copier.extents.pool
        stats: Any = compiled.memory_analysis()
        costs = _costs(compiled)
        leaves = [_shard_bytes(spec) for spec in layout.pool_specs()]
        extent_dims = [_shard_shape(spec) for spec in copier.extents.specs(None)]
        pool_bytes = _pool_bytes(program.target, program.pool)
        num_blocks = program.pool.shard_blocks
        # Blocks that are all there are make an array as large as a leaf.
        leaf_bytes = set(leaves) if program.num_blocks < num_blocks else set()
        census = hlo.take_census(str(compiled.as_text()), leaf_bytes, extent_dims)
        accessed, seconds = costs.get("bytes accessed"), costs.get("optimal_seconds")
        return Figures(
            kernel=str(getattr(copier, "kernel", "xla")),
            leaves=len(leaves),
            block_bytes=sum(leaves) // num_blocks,
            pool_bytes=pool_bytes,
            moved_bytes=pool_bytes * program.num_blocks // num_blocks,
            extent_host_bytes=_extent_host_bytes(program),
            accessed_bytes=None if accessed is None else int(accessed),
            # Where XLA does not know an operation's time, the sum is below 0.
            estimated_s=seconds if seconds is not None and seconds > 0 else None,
            temp_bytes=stats.temp_size_in_bytes + stats.host_temp_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            compile_s=compile_s,
            **vars(census),
        )


def describe(target: Target, pool: PoolShape) -> PoolLayout:
    """Lay out a pool on devices of a target, which need not be there."""
    devices = _devices(target)
    sharding: jax.sharding.Sharding
    if pool.sharded_axis is None:
        sharding = jax.sharding.SingleDeviceSharding(devices[0])
    else:
        mesh = jax.sharding.Mesh(np.array(devices[:NUM_DEVICES]), ("x",))
        axes = [None] * pool.sharded_axis
        spec = memory.partition_spec(*axes, "x")
        sharding = jax.sharding.NamedSharding(mesh, spec)
    leaf = _leaf(target, pool, pool.shape, pool.dtype, sharding)
    scales = [_leaf(target, pool, shape, "float32", sharding) for shape in pool.scales]
    return PoolLayout.of(
        [leaf] * pool.num_leaves + scales,
        pool.block_axis,
        # The CPU's devices stand in for a GPU's.
        compiled_for="gpu" if target.backend == "gpu" else None,
    )


@functools.lru_cache(maxsize=8)
def _leaf(
    target: Target,
    pool: PoolShape,
    shape: tuple[int, ...],
    dtype: str,
    sharding: jax.sharding.Sharding,
) -> jax.ShapeDtypeStruct:
    """Describe a leaf; on TPU with an explicit layout, as real arrays have one."""

    def spec(place: jax.sharding.Sharding | Format) -> jax.ShapeDtypeStruct:
        return memory.array_spec(shape, jnp.dtype(dtype), place)

    if target.backend != "tpu":
        return spec(sharding)
    order = Layout(tuple(range(len(shape))))
    return spec(_tiled(spec(Format(order, sharding) if pool.row_major else sharding)))


def _tiled(spec: jax.ShapeDtypeStruct) -> Format:
    """Return the format of an array whose order of axes is chosen, tiles included."""
    program: Any = jax.jit(lambda array: (), keep_unused=True).lower(spec).compile()
    (array_format,), _ = program.input_formats
    return Format(array_format.layout, spec.sharding)


@functools.cache
def _devices(target: Target) -> list[jax.Device]:
    if target.backend != "tpu":
        return list(jax.devices("cpu"))
    devices: list[jax.Device] = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology
    ).devices
    if len(devices) < NUM_DEVICES:
        raise ValueError(
            f"{target.topology} has {len(devices)} devices; it must have {NUM_DEVICES}."
        )
    return devices


def _compiler(
    target: Target, pool: PoolShape
) -> contextlib.AbstractContextManager[None]:
    if target.backend != "gpu":
        return contextlib.nullcontext()
    num_devices = 1 if pool.sharded_axis is None else NUM_DEVICES
    return cuda.compile_for_cuda(target.device, num_devices)


@functools.lru_cache(maxsize=1)
def _make_copier(target: Target, pool: PoolShape, rows: int) -> Copier:
    layout = describe(target, pool)
    # As `TransferEngine` has them.
    return Copier(ExtentLayout.of(layout, rows, stacked=True), "staged")


def _compiled(copier: Copier, program: Program) -> jax.stages.Compiled:
    if program.kind == "load":
        return copier.load_program()
    return copier.save_program(program.kind)


@functools.cache
def _pool_bytes(target: Target, pool: PoolShape) -> int:
    """Return the bytes of a pool on one device, padding included."""
    # A program that does nothing takes the pool as its arguments and no more.
    layout = describe(target, pool)
    specs = layout.pool_specs()
    num_bytes = 0
    with _compiler(target, pool):
        for alike in dict.fromkeys((spec.shape, spec.dtype) for spec in specs):
            same_specs = [spec for spec in specs if (spec.shape, spec.dtype) == alike]
            nothing = jax.jit(lambda leaves: (), keep_unused=True).lower(same_specs[:1])
            stats: Any = nothing.compile().memory_analysis()
            num_bytes += int(stats.argument_size_in_bytes) * len(same_specs)
    return num_bytes


def _extent_host_bytes(program: Program) -> int | None:
    """Return the bytes of an extent on the host of one device, padding included."""
    if program.kind not in ("gather", "load"):
        return None
    # A load's extent is the one that the save of as many blocks has made.
    rows = program.num_blocks * program.pool.blocks_per_host_block
    return _host_bytes(program.target, program.pool, rows)


@functools.lru_cache(maxsize=16)
def _host_bytes(target: Target, pool: PoolShape, rows: int) -> int | None:
    copier = _make_copier(target, pool, rows)
    specs = copier.extents.specs(memory.HOST_KIND)
    with _compiler(target, pool):
        nothing = jax.jit(lambda arrays: (), keep_unused=True).lower(specs)
        stats: Any = nothing.compile().memory_analysis()
    return int(stats.host_argument_size_in_bytes) or None


def _costs(compiled: jax.stages.Compiled) -> dict[str, float]:
    costs: Any = compiled.cost_analysis()
    return dict(costs[0] if isinstance(costs, list) else costs or {})


def _shard_shape(spec: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return tuple(spec.sharding.shard_shape(spec.shape))


def _shard_bytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(_shard_shape(spec)) * int(spec.dtype.itemsize)


if __name__ == "__main__":
    main()
