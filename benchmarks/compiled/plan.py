"""The programs to compile, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from benchmarks.compiled.pools import PoolShape, costly_pools, default_pools
from benchmarks.compiled.targets import TARGETS, Target
from jaxkv.transfer.kernels import MODES, SAVE_KINDS, Mode, SaveKind

Kind: TypeAlias = SaveKind | Literal["load", "copy"]

BLOCKS = (1, 8, 64, 512)
"""Blocks moved by one program, each in turn."""

_FEW_LAYERS = 4

_COPY_SIZES = (16, 64, 256, 1024)
"""Blocks of a program that copies on the device: it is padded to one of these."""


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """The targets, pools and programs to compile."""

    targets: tuple[Target, ...] = TARGETS
    # Bounds apply to their programs.
    pools: tuple[PoolShape, ...] = dataclasses.field(default_factory=default_pools)
    # Pools that are compiled for comparison, without bounds
    examples: tuple[PoolShape, ...] = dataclasses.field(default_factory=costly_pools)
    blocks: tuple[int, ...] = BLOCKS  # Blocks moved by one program, each in turn
    modes: tuple[Mode, ...] = MODES  # The modes of the transfer engine, each in turn
    # Whether a program is compiled for one of the TPUs only, the next program for the
    # next.
    in_turn: bool = False


def quick_config(targets: tuple[Target, ...]) -> CompileConfig:
    """Return the part of the whole check that takes a minute and a half.

    It has every layout, program and target, with few layers, one
    number of blocks, and each program for one of the TPUs.
    """
    return CompileConfig(
        targets, default_pools(_FEW_LAYERS), examples=(), blocks=(8,), in_turn=True
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile."""

    target: Target
    pool: PoolShape  # The pool that it works on
    mode: Mode  # The mode of the transfer engine. Copies are the same in all.
    kind: Kind  # What it does
    num_blocks: int  # Blocks that it moves, on each shard
    is_example: bool = False  # Whether no bounds apply

    @property
    def label(self) -> str:
        """The program in one line, for people."""
        name = "copy" if self.kind == "copy" else f"{self.mode} {self.kind}"
        return f"{self.target.name}, {self.pool.name}, {name} of {self.num_blocks}"


def programs(config: CompileConfig) -> Iterator[Program]:
    """Yield the programs of a configuration: target by target, pool by pool."""
    tpus = [target for target in config.targets if target.backend == "tpu"]
    for target in config.targets:
        for i, pool in enumerate(config.pools):
            chosen = _programs(target, pool, config.modes, config.blocks)
            for j, program in enumerate(chosen):
                mine = not config.in_turn or target not in tpus
                if mine or tpus[(i + j) % len(tpus)] == target:
                    yield program
        if target in tpus:
            # The least that shows it: what they cost hardly depends on the program.
            for pool in config.examples:
                few = [n for n in config.blocks if n >= 8][:1] or config.blocks[:1]
                for program in _programs(target, pool, config.modes[-1:], few):
                    if program.kind in ("gather", "load"):
                        yield dataclasses.replace(program, is_example=True)


def _programs(
    target: Target, pool: PoolShape, modes: Sequence[Mode], blocks: Sequence[int]
) -> Iterator[Program]:
    # A pool with fewer blocks is moved as a whole.
    sizes = list(dict.fromkeys(min(n, pool.shard_blocks) for n in blocks))
    for mode in modes:
        for size in sizes:
            kinds: tuple[Kind, ...] = (*SAVE_KINDS[mode], "load")
            for kind in kinds:
                yield Program(target, pool, mode, kind, size)
    if pool.num_shards == pool.blocks_per_host_block == 1:
        for size in _copy_sizes(sizes, pool.shard_blocks):
            yield Program(target, pool, modes[0], "copy", size)


def _copy_sizes(sizes: Sequence[int], shard_blocks: int) -> list[int]:
    """Return the sizes of the programs that copy a number of blocks within a pool."""
    fitting = [n for n in _COPY_SIZES if n <= shard_blocks] or [_COPY_SIZES[0]]
    chosen = [next((n for n in fitting if n >= size), fitting[-1]) for size in sizes]
    return list(dict.fromkeys(chosen))
