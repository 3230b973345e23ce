"""The speed of transfers on this machine, next to its fastest possible copies."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.console import OnProgress
from jaxkv.transfer import TransferEngine, memory
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import Direction
from jaxkv.types import PyTree

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Copy: TypeAlias = Callable[[Direction], None]
"""Copies the same number of bytes to or from the host, and returns when it is done."""

_MIB = 1 << 20
_BLOCK_BYTES, _MOVED_BYTES, _ROUNDS = _MIB, 32 * _MIB, 8
_NUM_LEAVES, _NUM_SETS = 8, 2
_ROW_BYTES = 256  # u16[128], of a token and a head
_STAGING_BYTES = 256 * _MIB


class BytesDifferError(Exception):
    """A block has other bytes than were saved."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """A speed in 10^9 bytes per second."""

    best_gb_per_s: float
    p50_gb_per_s: float
    quartiles_s: list[float]  # of a round's time

    @property
    def text(self) -> str:
        return f"{self.best_gb_per_s:.2f} / {self.p50_gb_per_s:.2f}"


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The speed of the transfer engine on one device, next to the machine's limit."""

    size_bytes: int  # Bytes of a transfer
    block_bytes: int
    save: Speed  # Speed from the device to the host
    load: Speed  # Speed from the host to the device
    limit: str  # Name of the limit: ``"np.copyto"`` or ``"device_put"``
    limit_save: Speed  # Its speed from the device to the host
    limit_load: Speed  # Its speed from the host to the device


def measure_bandwidth(
    on_progress: OnProgress, mode: Mode | None = None, block_bytes: int = _BLOCK_BYTES
) -> Bandwidth:
    """Save and load blocks for some seconds on one device, and check all bytes.

    Raises BytesDifferError, MemoryError, or the error of a transfer.
    """

    def rounds() -> Iterable[int]:
        for number in range(_ROUNDS):
            on_progress("moving blocks", number, _ROUNDS)
            yield number

    on_progress("moving blocks", 0, 0)
    devices = jax.local_devices()[:1]
    bench = SpeedBench(block_bytes, _MOVED_BYTES, mode=mode, devices=devices)
    limit = bench.make_limit()
    times = bench.compare({"engine": bench.copy, "limit": limit.copy}, rounds())
    bench.check()
    on_progress("moving blocks", _ROUNDS, _ROUNDS)
    save, load, limit_save, limit_load = (
        speed(bench.num_bytes, of_side[direction])
        for of_side in times.values()
        for direction in DIRECTIONS
    )
    sizes = bench.num_bytes, bench.block_bytes
    return Bandwidth(*sizes, save, load, limit.name, limit_save, limit_load)


def speed(num_bytes: int, seconds: Sequence[float]) -> Speed:
    return Speed(
        best_gb_per_s=num_bytes / min(seconds) / 1e9,
        p50_gb_per_s=num_bytes / statistics.median(seconds) / 1e9,
        quartiles_s=statistics.quantiles(seconds, n=4),
    )


def timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def is_cpu() -> bool:
    return bool(jax.devices()[0].platform == "cpu")


class SpeedBench:
    """A pool over some devices of this process (default: all), and an engine.

    A leaf is u16[blocks, tokens, heads, 128], its heads spread over the devices.
    """

    def __init__(
        self,
        block_bytes: int,
        moved_bytes: int,
        *,
        extent_bytes: int | None = None,
        mode: Mode | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        devices = jax.local_devices() if devices is None else devices
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        place = functools.partial(jax.sharding.NamedSharding, mesh)
        self.replicated = place(memory.partition_spec())
        self._by_head = place(memory.partition_spec(None, None, "x"))
        self._by_element = place(memory.partition_spec("x"))
        token_bytes = _NUM_LEAVES * _ROW_BYTES * len(devices)
        num_tokens = max(1, block_bytes // token_bytes)
        self.block_bytes = num_tokens * token_bytes
        self.num_moved = max(1, moved_bytes // self.block_bytes)
        self.num_bytes = self.num_moved * self.block_bytes
        self._shape = (2 * self.num_moved, num_tokens, len(devices), _ROW_BYTES // 2)
        self.pool = self.make_leaves(1)
        self.engine = TransferEngine(
            self.pool,
            _NUM_SETS * self.num_moved,
            mode=mode,
            extent_bytes=extent_bytes,
            staging_bytes=max(_STAGING_BYTES, 4 * (extent_bytes or 0)),
        )
        self.engine.warm_up()
        self._rng, self._turn = np.random.default_rng(9), 0
        self._device_ids, self._host_ids = self.choose()

    def make_leaves(self, seed: int) -> list[Any]:
        """Make leaves whose blocks have tags from 2^20 times the seed on."""

        def leaf(number: int) -> Any:
            tags = jnp.arange(self._shape[0], dtype=jnp.uint32) + np.uint32(seed << 20)
            bits = make_bits(jnp, tags, number, math.prod(self._shape[1:]))
            return (bits >> 16).astype(jnp.uint16).reshape(self._shape)

        places = [self._by_head] * _NUM_LEAVES
        make = jax.jit(lambda: [*map(leaf, range(_NUM_LEAVES))], out_shardings=places)
        return [*make()]

    def make_limit(self) -> CopyLimit | DevicePutLimit:
        return make_limit(self.num_bytes, 2 * self.num_bytes, self._by_element)

    def choose(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Choose the next device and host blocks, as a cache in use has them."""
        self._turn += 1
        device_ids = self._rng.permutation(2 * self.num_moved)[: self.num_moved]
        host_ids = np.arange(self.num_moved) + self._turn % _NUM_SETS * self.num_moved
        self._device_ids = device_ids.astype(np.int32)
        self._host_ids = host_ids.astype(np.int32)
        return self._device_ids, self._host_ids

    def copy(self, direction: Direction) -> None:
        if direction == "save":
            self.engine.save(self.pool, self._device_ids, self._host_ids)
        else:
            ids = self._host_ids, self._device_ids
            self.pool, _ = self.engine.load(self.pool, *ids)
        self.drain()

    def drain(self) -> None:
        self.pool, completions = self.engine.drain(self.pool)
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        memory.wait_for(self.pool)

    def compare(
        self, sides: Mapping[str, Copy], rounds: Iterable[int]
    ) -> dict[str, dict[Direction, list[float]]]:
        """Time all sides in every round but the first, in rotating order.

        The first round touches the memory.
        """
        seconds: dict[str, dict[Direction, list[float]]] = {
            name: {direction: [] for direction in DIRECTIONS} for name in sides
        }
        names = list(sides)
        for number in rounds:
            self.choose()
            first = number % len(names)
            for name in names[first:] + names[:first]:
                for direction, times in seconds[name].items():
                    took_s = timed(functools.partial(sides[name], direction))
                    times += [took_s] * (number > 0)
        return seconds

    def check(self) -> None:
        """Load saved blocks into another pool; compare all bits on the device."""
        device_ids, _ = self.choose()
        self.copy("save")
        before, self.pool = self.pool, self.make_leaves(2)
        self.copy("load")

        @jax.jit
        def differ(before: Any, after: Any) -> Any:
            pairs = zip(before, after, strict=True)
            return jnp.stack(
                [jnp.any(a[device_ids] != b[device_ids]) for a, b in pairs]
            )

        if differ(before, self.pool).any():
            raise BytesDifferError("blocks are not what was saved")


class CopyLimit:
    """On CPU: `numpy.copyto` between two buffers that have been written before.

    Each call copies the next contiguous piece, around the buffer.
    """

    name = "np.copyto"

    def __init__(self, num_bytes: int, working_set_bytes: int) -> None:
        shape = -(-working_set_bytes // num_bytes), num_bytes
        self._source = np.full(shape, 1, np.uint8)
        self._target = np.full_like(self._source, 2)
        self._next = 0

    def copy(self, direction: Direction) -> None:
        del direction
        np.copyto(self._target[self._next], self._source[self._next])
        self._next = (self._next + 1) % len(self._source)


class DevicePutLimit:
    """`device_put` of arrays between the two memories, in turn."""

    name = "device_put"

    def __init__(self, on_device: Sequence[PyTree]) -> None:
        self._device = jax.tree.map(lambda leaf: leaf.sharding, on_device[0])
        self._host = jax.tree.map(
            lambda place: place.with_memory_kind(memory.HOST_KIND), self._device
        )
        self._next = 0
        self._on_device: list[PyTree] = [*on_device]
        self._on_host = [jax.device_put(piece, self._host) for piece in on_device]
        memory.wait_for(self._on_host)

    def copy(self, direction: Direction) -> None:
        index = self._next
        self._next = (self._next + 1) % len(self._on_device)
        source, target, place = (
            (self._on_device, self._on_host, self._host)
            if direction == "save"
            else (self._on_host, self._on_device, self._device)
        )
        target[index] = None  # So that its warm memory is reused.
        target[index] = jax.device_put(source[index], place)
        memory.wait_for(target[index])


def make_limit(
    num_bytes: int, working_set_bytes: int, place: jax.sharding.Sharding | None = None
) -> CopyLimit | DevicePutLimit:
    if is_cpu():
        return CopyLimit(num_bytes, working_set_bytes)
    zeros = jax.jit(lambda: jnp.zeros(num_bytes // 2, jnp.uint16), out_shardings=place)
    return DevicePutLimit([zeros() for _ in range(-(-working_set_bytes // num_bytes))])


def make_bits(xp: Any, tags: Any, leaf: int, num_elements: int) -> Any:
    """Make the bits of a leaf's blocks, u32[n, num_elements], from their tags, u32[n].

    `xp` is NumPy or `jax.numpy`.
    """
    element = xp.arange(num_elements, dtype=xp.uint32)
    # Odd factors near 2^32 times a golden ratio spread even neighbouring tags.
    start = tags * np.uint32(2654435761) + np.uint32(leaf * 2246822519 % 2**32)
    return start[:, None] + (element * np.uint32(3266489917))[None, :]
