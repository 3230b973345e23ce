"""Which programs are compiled."""

import pytest

from benchmarks.compiled.plan import (
    CompileConfig,
    programs,
    quick_config,
)
from benchmarks.compiled.pools import (
    PoolShape,
    check_pool,
    costly_pools,
    default_pools,
)
from benchmarks.compiled.targets import (
    TARGETS,
    THIS_CPU,
    environment,
    parse_target,
)

SAVES_AND_LOADS = {"gather", "merge", "load"}


def test_every_program_is_compiled_for_every_target_and_number_of_blocks():
    plan = list(programs(CompileConfig()))
    assert len(plan) == len(set(plan))
    moves = {(p.target, p.pool, p.num_blocks, p.kind) for p in plan}
    for target in TARGETS:
        for pool in default_pools():
            sizes = (1, 8, 64, 128) if pool.shard_blocks == 128 else (1, 8, 64, 512)
            for size in sizes:
                for move in SAVES_AND_LOADS:
                    assert (target, pool, size, move) in moves
    # The pool in one array is 32 layers deep in any case.
    for layers in (4, 32):
        (pool,) = (p for p in default_pools(layers) if p.name == "one array")
        assert pool.shape == (32, 2, 2048, 16, 8, 128)


def test_costly_pools_are_compiled_for_tpus_for_comparison():
    examples = [p for p in programs(CompileConfig()) if p.is_example]
    assert {p.pool for p in examples} == set(costly_pools())
    assert {p.target.backend for p in examples} == {"tpu"}
    assert {(p.kind, p.num_blocks) for p in examples} == {("gather", 8), ("load", 8)}


def test_the_quick_part_has_every_layout_program_and_target():
    plan = list(programs(quick_config(TARGETS)))
    every = list(programs(CompileConfig()))
    costly = {pool.name for pool in costly_pools()}
    assert {p.pool.name for p in plan} == {p.pool.name for p in every} - costly
    assert {p.target for p in plan} == set(TARGETS)
    assert len(plan) < len(every) / 6
    on_tpus = [p for p in plan if p.target.backend == "tpu"]
    for pool in {p.pool for p in plan}:
        chosen = [p.kind for p in on_tpus if p.pool == pool]
        assert set(chosen) >= SAVES_AND_LOADS
        assert {chosen.count(kind) for kind in chosen} == {2}
        targets = {p.target.name for p in on_tpus if p.pool == pool}
        assert targets == {"v5e", "v5p", "v6e", "tpu7x"}


def test_a_pool_is_described_in_one_line():
    tokens = PoolShape("x", (64, 4), 2, blocks_per_host_block=16, scales=((64, 1),) * 2)
    assert tokens.shard_blocks == 4
    assert tokens.text == ("2 x bfloat16[64,4], 16 together, and 2 x float32[64,1]")
    heads = PoolShape("x", (8, 16, 4), 2, 1, sharded_axis=0, row_major=True)
    assert heads.text == (
        "2 x bfloat16[8,16,4], blocks on axis 1, axis 0 over 4 devices, row-major"
    )


def test_a_pool_that_cannot_be_is_refused():
    for pool in (*default_pools(), *costly_pools()):
        check_pool(pool)
        assert pool.shard_blocks in (128, 2048)
    for pool, message in (
        (PoolShape("x", (), 1), "must have sizes from 1"),
        (PoolShape("x", (4, 0), 1), "must have sizes from 1"),
        (PoolShape("x", (4, 2), 1, 2), "block axis 2 must be from 0 to 1"),
        (PoolShape("x", (4, 2), 1, sharded_axis=2), "sharded axis 2 must be from"),
        (PoolShape("x", (4, 2), 1, sharded_axis=1), "axis 1 has 2, which 4 devices"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pool(pool)


def test_targets_go_by_name_or_topology():
    assert parse_target("v5e") == parse_target("v5e:2x2") == TARGETS[0]
    assert parse_target("v5e:4x4").name == "v5e:4x4"
    assert parse_target("cpu") == THIS_CPU
    with pytest.raises(ValueError, match="unknown 'v5ee': did you mean v5e"):
        parse_target("v5ee:2x2")
    with pytest.raises(ValueError, match="'h200:2' names a topology, which only a TPU"):
        parse_target("h200:2")
    for backend in ("tpu", "gpu", "cpu"):  # A compiling process finds no accelerator.
        assert environment(backend)["JAX_PLATFORMS"] == "cpu"
