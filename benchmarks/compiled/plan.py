"""The programs of the mode ``"staged"`` to compile, in order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from benchmarks.compiled.pools import PoolShape, costly_pools, default_pools
from benchmarks.compiled.targets import TARGETS, Target
from jaxkv.transfer.kernels import SAVE_KINDS, SaveKind

Kind: TypeAlias = SaveKind | Literal["load"]

BLOCKS = (1, 8, 64, 512)
"""Blocks moved by one program, each in turn."""

_FEW_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """The targets, pools and programs to compile."""

    targets: tuple[Target, ...] = TARGETS
    # Bounds apply to their programs.
    pools: tuple[PoolShape, ...] = dataclasses.field(default_factory=default_pools)
    # Pools that are compiled for comparison, without bounds
    examples: tuple[PoolShape, ...] = dataclasses.field(default_factory=costly_pools)
    blocks: tuple[int, ...] = BLOCKS  # Blocks moved by one program, each in turn
    # Whether a program is compiled for every second TPU, the next one for the others.
    in_turn: bool = False


def quick_config(targets: tuple[Target, ...]) -> CompileConfig:
    """Return the part of the whole check that takes a minute and a half.

    It has every layout, program and target, with few layers, one number of blocks, and
    each program for every second TPU.
    """
    return CompileConfig(
        targets, default_pools(_FEW_LAYERS), examples=(), blocks=(8,), in_turn=True
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile."""

    target: Target
    pool: PoolShape  # The pool that it works on
    kind: Kind  # What it does
    num_blocks: int  # Blocks that it moves, on each shard
    is_example: bool = False  # Whether no bounds apply


def programs(config: CompileConfig) -> Iterator[Program]:
    """Yield the programs of a configuration: target by target, pool by pool."""
    tpus = [target for target in config.targets if target.backend == "tpu"]
    for target in config.targets:
        for i, pool in enumerate(config.pools):
            chosen = _programs(target, pool, config.blocks)
            for j, program in enumerate(chosen):
                every = not config.in_turn or target not in tpus
                if every or (tpus.index(target) + i + j) % 2 == 0:
                    yield program
        if target in tpus:
            # The least that shows it: what they cost hardly depends on the program.
            for pool in config.examples:
                few = [n for n in config.blocks if n >= 8][:1] or config.blocks[:1]
                for program in _programs(target, pool, few):
                    if program.kind in ("gather", "load"):
                        yield dataclasses.replace(program, is_example=True)


def _programs(
    target: Target, pool: PoolShape, blocks: Sequence[int]
) -> Iterator[Program]:
    # A pool with fewer blocks is moved as a whole.
    sizes = list(dict.fromkeys(min(n, pool.shard_blocks) for n in blocks))
    kinds: tuple[Kind, ...] = (*SAVE_KINDS["staged"], "load")
    for size, kind in itertools.product(sizes, kinds):
        yield Program(target, pool, kind, size)
