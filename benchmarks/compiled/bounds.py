"""The bounds that compiled programs must keep."""

from __future__ import annotations

import dataclasses

from benchmarks.compiled.plan import Kind, Program
from benchmarks.compiled.records import Figures
from benchmarks.compiled.targets import Backend

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The upper bounds of a program's figures. None bounds nothing."""

    bytes_ratio: float | None = None  # Bytes accessed over the ideal
    # Bytes accessed that are not counted: the plan, and the token that signals the
    # program's end.
    free_bytes: int = 64 << 10
    # `bytes_ratio` applies from this number of blocks: with fewer, other reads would
    # dominate.
    bytes_from_blocks: int = 8
    temp_ratio: float | None = None  # Temporary memory over what is moved
    # Temporary memory that is not counted. Compilers allocate some for semaphores, the
    # plan, the token and the state of loops, however little is moved.
    temp_free_bytes: int = MIB
    # Whether results must be written into the whole pool
    alias_whole_pool: bool = False
    kernels: int | None = None  # Operations that run on the device
    kernels_per_leaf: int = 0  # How many more kernels there may be for each leaf
    collectives: int | None = 0  # Number of collectives
    whole_leaf: int | None = 0  # Operations on a whole leaf that are not in place
    unknown_loops: int | None = None  # Loops without a known trip count


_TPU = Bounds(bytes_ratio=4.0, temp_ratio=1.1)
_TPU_DMA = dataclasses.replace(_TPU, bytes_ratio=1.5, kernels=4)
_GPU = Bounds(temp_ratio=1.1, unknown_loops=0, kernels=2, kernels_per_leaf=1)
# An emulated accelerator need not be fast: only the general bounds.
_CPU = Bounds()

# By compiler, and by what moves the rows.
_BOUNDS: dict[tuple[Backend, str], Bounds] = {
    ("tpu", "xla"): _TPU,
    ("tpu", "dma"): _TPU_DMA,
    ("gpu", "xla"): _GPU,
    ("cpu", "xla"): _CPU,
}

# What a merge carries over lies on the device beside what it gathers.
_MERGE_TEMP_RATIO = 1.3

# Padding of a pool's bytes that is no part of it: the plan, and its alignment.
_ALIGNMENT_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class KnownBreak:
    """Programs that are known to break bounds."""

    pools: tuple[str, ...]  # The names of their pools
    backend: Backend  # Their compiler
    from_blocks: int  # The least blocks that they move
    reason: str  # Why, and why it does no harm


KNOWN_BREAKS = (
    KnownBreak(
        ("head_dim 64, row-major", "MLA 576, row-major"),
        "tpu",
        128,
        "XLA lays an extent of 128 padded rows or more out along its rows, and turns "
        "it around; the engine's extents have at most 64",
    ),
)
"""The broken bounds that fail no run."""


def known_break(program: Program) -> str | None:
    """Return why a program is known to break bounds; None if it is not."""
    for entry in KNOWN_BREAKS:
        if (
            program.pool.name in entry.pools
            and program.target.backend == entry.backend
            and program.num_blocks >= entry.from_blocks
        ):
            return entry.reason
    return None


def bounds_of(backend: Backend, kernel: str, kind: Kind) -> Bounds:
    bounds = _BOUNDS[backend, kernel]
    if kind == "merge" and bounds.temp_ratio is not None:
        bounds = dataclasses.replace(bounds, temp_ratio=_MERGE_TEMP_RATIO)
    if kind == "load":
        bounds = dataclasses.replace(bounds, alias_whole_pool=True)
    return bounds


def broken_bounds(program: Program, figures: Figures) -> tuple[str, ...]:
    """Return the bounds that a program breaks, a line each."""
    target, kernel = program.target, figures.kernel
    bounds = bounds_of(target.backend, kernel, program.kind)
    lines = []
    if (
        bounds.bytes_ratio is not None
        and figures.accessed_bytes is not None
        and program.num_blocks >= bounds.bytes_from_blocks
        and figures.accessed_bytes - bounds.free_bytes
        > bounds.bytes_ratio * 2 * figures.moved_bytes
    ):
        lines.append(
            f"bytes {figures.bytes_ratio:.2f}x of the ideal, at most "
            f"{bounds.bytes_ratio:g}x"
        )
    if (
        bounds.temp_ratio is not None
        and figures.temp_bytes - bounds.temp_free_bytes
        > bounds.temp_ratio * figures.moved_bytes
    ):
        lines.append(
            f"temp {figures.temp_ratio:.2f}x of what is moved, at most "
            f"{bounds.temp_ratio:g}x"
        )
    missing = figures.pool_bytes - figures.alias_bytes
    if bounds.alias_whole_pool and missing > _ALIGNMENT_BYTES:
        lines.append(f"alias {figures.alias_ratio:.2f} of the pool, not all of it")
    if bounds.kernels is not None:
        allowed = bounds.kernels + bounds.kernels_per_leaf * figures.leaves
        if figures.kernels > allowed:
            lines.append(f"{figures.kernels} kernels, at most {allowed}")
    for name, names, allowed_number in (
        ("collectives", figures.collectives, bounds.collectives),
        ("not in place on a whole leaf", figures.whole_leaf, bounds.whole_leaf),
    ):
        if allowed_number is not None and len(names) > allowed_number:
            lines.append(f"{name}: {_counted(names)}")
    if bounds.unknown_loops is not None and (
        figures.unknown_loops > bounds.unknown_loops
    ):
        lines.append(f"loops without a known trip count: {figures.unknown_loops}")
    return tuple(lines)


def _counted(names: tuple[str, ...]) -> str:
    """Write each name once, with how often it is there."""
    counts = {name: names.count(name) for name in names}
    return ", ".join(
        name if count == 1 else f"{count} x {name}" for name, count in counts.items()
    )
