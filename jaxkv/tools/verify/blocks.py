"""The stage `blocks`: every dtype, layout, mode and kernel that the device takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from jaxkv.tools.verify.oracle import (
    Oracle,
    as_words,
    exercise,
    random_array,
    run_to_end,
    to_device,
)
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError
from jaxkv.transfer import Compression, TransferEngine
from jaxkv.transfer.memory import array_spec, partition_spec, wait_for
from jaxkv.types import PyTree

# What KV caches are made of, each in a pool of its own; the others share one.
_DTYPES = ("bfloat16", "float8_e4m3fn", "int8", "float32", "float16", "float8_e5m2")
_OTHER_DTYPES = (
    *("uint8", "bool", "int16", "uint16", "int32", "uint32", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "complex64"),
)
# 64 blocks of 1,024 elements: each pattern of two bytes once.
_DTYPE_SHAPE = (64, 8, 128)
_NUM_ROUNDS = 6


class Way(NamedTuple):
    """A way to copy rows: arguments of `TransferEngine`."""

    mode: Any
    kernel: Any = None

    def __str__(self) -> str:
        return f"{self.mode}, {self.kernel}" if self.kernel else str(self.mode)


_WAYS = {
    "cpu": (Way("fused"), Way("staged")),
    "tpu": (Way("staged"), Way("staged", "xla")),  # The first is by "dma".
}


class Pool(NamedTuple):
    """A layout of pools: a tree of shapes and dtypes, and the engine's arguments."""

    specs: PyTree
    block_axis: PyTree = 0
    options: Mapping[str, Any] = {}
    order: tuple[int, ...] = ()  # Of the axes in memory; empty for the compiler's


def _leaf(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return array_spec(shape, jnp.dtype(dtype))


def _layers(shape: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    return [_leaf(shape, dtype)] * 2


LAYOUTS = {
    "[blocks, tokens, heads, dim], one leaf per layer": Pool(_layers((24, 16, 8, 128))),
    "tpu-inference, bfloat16": Pool(_layers((24, 16, 8, 2, 128))),
    "tpu-inference, float8": Pool(_layers((24, 16, 4, 4, 128), "float8_e4m3fn")),
    "MaxText pages [heads, pages, tokens, dim]": Pool(_layers((4, 24, 16, 128)), 1),
    "all layers in one array": Pool({"kv": _leaf((4, 2, 24, 16, 2, 128))}, 2),
    "int8 with float32 scales beside": Pool(
        {"kv": _layers((24, 16, 8, 128), "int8"), "scale": _layers((8, 24), "float32")},
        {"kv": 0, "scale": 1},
    ),
    "head_dim 64, row-major": Pool(_layers((24, 16, 8, 2, 64)), order=(0, 1, 2, 3, 4)),
    "MLA, 576 wide": Pool(_layers((24, 16, 1, 576))),
    "token rows, 4 in a host block": Pool(
        _layers((96, 8, 128)), options={"blocks_per_host_block": 4}
    ),
    "mixed leaves": Pool(
        {
            "k": _layers((24, 3, 128)),
            "q": (_leaf((24, 5), "int8"), _leaf((24, 3, 4), "float8_e5m2")),
            "scalar": _leaf((24,), "float32"),
            "flag": _leaf((24, 2, 2), "bool"),
        }
    ),
    "one extent in flight at a time": Pool(
        _layers((24, 16, 8, 128)),
        options={"staging_bytes": "256KiB", "extent_bytes": "256KiB"},
    ),
}
# Mesh axes for blocks and heads, and which of both a leaf [blocks, 2, heads, dim] has.
_SHARDED = {
    "heads sharded": (None, None, "heads"),
    "blocks sharded": ("blocks",),
    "blocks and heads sharded": ("blocks", None, "heads"),
    "replicated": (),
}


def ways_here() -> tuple[Way, ...]:
    return _WAYS.get(jax.devices()[0].platform, (Way("staged"),))


def list_checks() -> Sequence[Check]:
    checks: list[Check] = []

    def add(name: str, way: Way, run: Callable[..., Any], *args: Any) -> None:
        call = functools.partial(run, *args, way)
        checks.append(Check(f"{name} ({way})", call))

    for number, way in enumerate(ways_here()):
        for dtype in _DTYPES:
            add(dtype, way, _check_dtypes, (dtype,))
        add("other dtypes", way, _check_dtypes, _OTHER_DTYPES)
        for name, pool in LAYOUTS.items():
            add(name, way, _check_layout, pool)
        for name, spec in _SHARDED.items():
            add(name, way, _check_sharded, spec)
        if not number:
            add("host blocks as bytes, for stores", way, _check_bytes)
            add("compression to int8", way, _check_compression)
    return checks


def _check_dtypes(dtypes: Sequence[str], way: Way, turn: Turn) -> Any:
    rng, arrays, left_out = np.random.default_rng(1), {}, []
    for dtype in dtypes:
        array = random_array(rng, _DTYPE_SHAPE, dtype)
        try:
            wait_for(jax.jit(lambda x: x)(jax.device_put(jnp.array(array))))
            arrays[dtype] = array
        except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError) as error:
            left_out.append(f"{dtype} ({error})")
    if not arrays:
        why = f"jax alone cannot hold {', '.join(left_out)} on this device"
        raise UnsupportedError(f"{why}; the other dtypes move")
    text, figures = _exercise(arrays, Pool(None), way, turn)
    names = f"; of {', '.join(arrays)}" * (len(dtypes) > 1)
    without = f"; jax alone cannot hold {', '.join(left_out)}" * bool(left_out)
    return f"{text}{names}{without}", figures


def _check_layout(pool: Pool, way: Way, turn: Turn) -> Any:
    rng = np.random.default_rng(2)
    arrays = jax.tree.map(
        lambda spec: random_array(rng, spec.shape, spec.dtype), pool.specs
    )
    return _exercise(arrays, pool, way, turn)


def _check_sharded(spec: tuple[str | None, ...], way: Way, turn: Turn) -> Any:
    devices = np.array(jax.local_devices())
    if len(devices) < 2:
        raise UnsupportedError("there is only one device")
    across = 2 if len(devices) % 2 == 0 else 1
    mesh = jax.sharding.Mesh(devices.reshape(across, -1), ("blocks", "heads"))
    place = jax.sharding.NamedSharding(mesh, partition_spec(*spec))
    rng = np.random.default_rng(3)
    shape = (24, 16, len(devices), 128)
    arrays = [random_array(rng, shape, "bfloat16") for _ in range(2)]
    return _exercise(arrays, Pool(None), way, turn, [place, place])


def _exercise(
    arrays: PyTree, pool: Pool, way: Way, turn: Turn, places: PyTree = None
) -> Any:
    device_pool = to_device(arrays, places)
    if pool.order:
        layout = jax.tree.map(
            lambda leaf: Format(Layout(pool.order), leaf.sharding), device_pool
        )
        device_pool = jax.jit(lambda x: x, out_shardings=layout)(device_pool)
    oracle = Oracle(arrays, pool.block_axis)
    engine = _make_engine(device_pool, pool, way)
    rng, rounds = np.random.default_rng(4), turn.rounds(_NUM_ROUNDS, _NUM_ROUNDS)
    _, num_rounds, num_blocks = exercise(engine, oracle, device_pool, rng, rounds)
    figures = {"rounds": num_rounds, "blocks": num_blocks, "kernel": engine.kernel}
    text = f"{num_blocks:,} blocks in {num_rounds} rounds by {engine.kernel}"
    return f"{text}, {oracle.num_bytes / 1e6:,.1f} MB compared", figures


def _make_engine(
    device_pool: PyTree, pool: Pool, way: Way, host_share: float = 1.25
) -> TransferEngine:
    """Make an engine whose host tier is full soon, so that saves carry blocks over."""
    leaf, axis = jax.tree.leaves(device_pool)[0], jax.tree.leaves(pool.block_axis)[0]
    options: Any = {"mode": way.mode, "kernel": way.kernel, **pool.options}
    num_rows = leaf.shape[axis] // options.get("blocks_per_host_block", 1)
    options["block_axis"] = pool.block_axis
    return TransferEngine(device_pool, int(host_share * num_rows), **options)


def _check_bytes(way: Way, turn: Turn) -> Any:
    """Read host blocks as bytes, write them to other host blocks, and load these."""
    rng = np.random.default_rng(5)
    arrays = [random_array(rng, (24, 16, 8, 128), "bfloat16") for _ in range(2)]
    oracle, pool = Oracle(arrays), to_device(arrays)
    engine = _make_engine(pool, Pool(None), way, 2.0)
    ids = rng.permutation(24).astype(np.int32)
    engine.save(pool, ids, ids)
    pool = run_to_end(engine, pool)
    read = engine.read_host(ids)
    payloads = [np.empty(read.num_bytes, np.uint8) for _ in ids]
    for index, payload in enumerate(payloads):
        read.copy(index, payload)
    read.close()
    write = engine.write_host(24 + ids, payloads)
    while not write.is_over:
        engine.advance_host(lambda copy: copy())
    if write.error is not None:
        raise WrongError(f"the host blocks were not written: {write.error}")
    oracle.save(ids, 24 + ids)
    targets = rng.permutation(ids)
    pool, _ = engine.load(pool, 24 + ids, targets)
    pool = run_to_end(engine, pool)
    oracle.load(24 + ids, targets)
    oracle.check(pool, "after host blocks were written")
    return f"{len(ids)} blocks of {read.num_bytes:,} bytes", {}


def _check_compression(way: Way, turn: Turn) -> Any:
    """Compare what comes back with the codec's bound; a second trip must be exact."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal((24, 16, 8, 128))
    values *= 10.0 ** rng.integers(-3, 4, (24, 1, 8, 1))
    pool = jnp.array(values, jnp.bfloat16)
    options = {"compression": Compression("int8")}
    engine = _make_engine(pool, Pool(None, options=options), way)
    ids = rng.permutation(24).astype(np.int32)

    def trip(array: jax.Array) -> Any:
        engine.save(array, ids, ids)
        run_to_end(engine, array)
        loaded, _ = engine.load(jnp.zeros_like(array), ids, ids)
        return run_to_end(engine, loaded)

    once = trip(pool)
    before, after = np.array(pool, np.float64), np.array(once, np.float64)
    peak = np.abs(before).max((1, 3), keepdims=True)
    # The codec rounds, and then bfloat16 does.
    share = np.abs(after - before) / (peak / 254 * 1.01 + np.abs(before) / 256)
    if (share > 1).any():
        block, _, head, _ = np.unravel_index(share.argmax(), share.shape)
        raise WrongError(
            f"block {block}, head {head}: an error of {share.max():.1f} times the "
            "documented bound"
        )
    if not np.array_equal(as_words(trip(once)), as_words(once)):
        raise WrongError("a second trip changed the values again")
    return f"errors of at most {share.max():.2f} times the documented bound", {}
