"""Figures of a program that keeps every bound, and its parts."""

from benchmarks.compiled.plan import Program
from benchmarks.compiled.pools import PoolShape
from benchmarks.compiled.records import Figures
from benchmarks.compiled.targets import TARGETS

MIB = 1 << 20
BY_NAME = {target.name: target for target in TARGETS}
POOL = PoolShape("example", (2048, 16, 8, 2, 128), 4)
BLOCK_BYTES = 4 * 64 << 10

GOOD = Figures(
    kernel="dma",
    leaves=4,
    block_bytes=BLOCK_BYTES,
    pool_bytes=2048 * BLOCK_BYTES,
    moved_bytes=64 * BLOCK_BYTES,
    extent_host_bytes=128 * BLOCK_BYTES,
    accessed_bytes=2 * 64 * BLOCK_BYTES,
    estimated_s=182e-6,
    temp_bytes=0,
    alias_bytes=2048 * BLOCK_BYTES,
    host_bytes=0,
    kernels=4,
    host_copies=0,
    loops=0,
    unknown_loops=0,
    collectives=(),
    whole_leaf=(),
    compile_s=0.25,
)


def program(target="v5e", kind="gather", num_blocks=64, example=False):
    return Program(BY_NAME[target], POOL, kind, num_blocks, example)
