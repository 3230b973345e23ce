"""The compilers' figures for each program."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

from benchmarks.compiled.plan import Kind, Program
from benchmarks.compiled.targets import Backend
from jaxkv.transfer.kernels import Mode


@dataclasses.dataclass(frozen=True)
class Figures:
    """The compiler's figures for one program, on one device."""

    kernel: str  # What moves the rows: ``"xla"`` or ``"dma"``
    leaves: int  # Number of leaves of the pool
    block_bytes: int  # Bytes of a block in all leaves, without padding
    pool_bytes: int  # Bytes of the pool as it lies on the device, padding included
    moved_bytes: int  # Bytes of the moved blocks as they lie there
    # Bytes of an extent of these blocks as it lies on the host, padding included; None
    # if not asked for.
    extent_host_bytes: int | None
    # Bytes that the program reads and writes by XLA's estimate, loops counted once;
    # None if the compiler gives none.
    accessed_bytes: int | None
    # Seconds that it takes by XLA's estimate; None if there is none
    estimated_s: float | None
    # Memory that it takes beside its arguments and results, on device and host
    temp_bytes: int
    alias_bytes: int  # Bytes of arguments that results are written into
    host_bytes: int  # Bytes that it copies between host and device
    kernels: int  # Operations that run on the device, a loop's body once
    host_copies: int  # Copies between host and device, a loop's body once
    loops: int  # The loops
    unknown_loops: int  # Those whose trip count the compiler does not know
    collectives: tuple[str, ...]  # The collectives in it
    whole_leaf: tuple[str, ...]  # Operations on a whole leaf that are not in place
    compile_s: float  # Seconds of CPU time that lowering and compiling took

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes accessed over the least there can be: read once and written once."""
        if self.accessed_bytes is None:
            return None
        return self.accessed_bytes / (2 * self.moved_bytes)

    @property
    def temp_ratio(self) -> float:
        """Temporary memory over what is moved."""
        return self.temp_bytes / self.moved_bytes

    @property
    def alias_ratio(self) -> float:
        """Aliased memory over the pool."""
        return self.alias_bytes / self.pool_bytes

    @property
    def host_ratio(self) -> float:
        """Bytes between host and device over what is moved."""
        return self.host_bytes / self.moved_bytes


Reply: TypeAlias = tuple[Figures | None, str | None]
"""What the compiling process says of a program: figures, or why there are none."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A program and its outcome."""

    program: Program  # The program
    figures: Figures | None  # What the compiler says; None if it did not compile
    error: str | None  # Why it did not compile; None if it did
    broken: tuple[str, ...] = ()  # The bounds that it breaks, a line each
    known: str | None = None  # Why it is known to break them; None if it is not

    @property
    def fails(self) -> bool:
        """Whether it breaks a bound that it is not known to break."""
        return bool(self.broken) and self.known is None


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The cost of a block on a target."""

    target: str  # Name of the target
    pool: str  # Name of the pool
    block_bytes: int  # Bytes of a block in all leaves, without padding, on one device
    device_bytes: float  # Bytes of it as it lies on the device
    host_bytes: float | None  # Bytes of it as it lies on the host; None if unknown
    num_blocks: int  # Blocks moved at once, which the times are of
    # Estimated seconds of the device for a save of them; None if unknown
    save_s: float | None
    load_s: float | None  # The same for a load


def block_costs(results: tuple[Result, ...]) -> tuple[BlockCost, ...]:
    """Sum up what a block costs, for each target and pool that compiled.

    Times are of the smallest move of eight blocks or more, in the last of the modes:
    ``staged`` if it was compiled.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.figures is not None:
            key = (result.program.target.name, result.program.pool.name)
            groups.setdefault(key, []).append(result)
    costs = []
    for (target, pool), group in groups.items():
        moves = [r for r in group if r.program.kind in ("gather", "load")]
        sizes = sorted({r.program.num_blocks for r in moves})
        if not sizes:
            continue
        size = next((n for n in sizes if n >= 8), sizes[-1])
        mode = moves[-1].program.mode
        chosen = {
            r.program.kind: r.figures
            for r in moves
            if r.program.num_blocks == size and r.program.mode == mode
        }
        some = next(iter(chosen.values()), None)
        if some is None:
            continue
        hosts = [
            figures.extent_host_bytes / size
            for figures in chosen.values()
            if figures and figures.extent_host_bytes is not None
        ]
        save, load = chosen.get("gather"), chosen.get("load")
        costs.append(
            BlockCost(
                target,
                pool,
                some.block_bytes,
                some.moved_bytes / size,
                hosts[0] if hosts else None,
                size,
                save.estimated_s if save else None,
                load.estimated_s if load else None,
            )
        )
    return tuple(costs)


@dataclasses.dataclass(frozen=True)
class Row:
    """The worst figures of a program over all numbers of blocks."""

    target: str  # Name of the target
    backend: Backend  # Its compiler
    pool: str  # Name of the pool
    mode: Mode  # The mode of the transfer engine
    kind: Kind  # What the program does
    results: tuple[Result, ...]  # The results, by number of blocks

    @property
    def figures(self) -> tuple[Figures, ...]:
        """The figures of the programs that compiled."""
        return tuple(r.figures for r in self.results if r.figures is not None)

    @property
    def bytes_ratio(self) -> float | None:
        """The worst ratio of bytes, of moves that a bound is on if there are any."""
        pairs = [
            (r.program.num_blocks, r.figures.bytes_ratio)
            for r in self.results
            if r.figures is not None and r.figures.bytes_ratio is not None
        ]
        large = [ratio for blocks, ratio in pairs if blocks >= 8]
        return max(large or [ratio for _, ratio in pairs], default=None)

    @property
    def is_broken(self) -> bool:
        """Whether a bound is broken at any number of blocks, unless that is known."""
        return any(r.fails for r in self.results)

    @property
    def compile_s(self) -> float:
        """Seconds of CPU time that all of them took to compile."""
        return math.fsum(figures.compile_s for figures in self.figures)


def rows_of(results: tuple[Result, ...]) -> tuple[Row, ...]:
    """Group results that differ only in the number of blocks."""
    groups: dict[tuple[str, Backend, str, Mode, Kind], list[Result]] = {}
    for result in results:
        p = result.program
        key = (p.target.name, p.target.backend, p.pool.name, p.mode, p.kind)
        groups.setdefault(key, []).append(result)
    return tuple(Row(*key, tuple(group)) for key, group in groups.items())
