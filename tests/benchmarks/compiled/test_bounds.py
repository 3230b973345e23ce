"""Each bound is reported where it is broken, and only there."""

import dataclasses

from benchmarks.compiled.bounds import KNOWN_BREAKS, bounds_of, broken_bounds
from benchmarks.compiled.pools import default_pools
from benchmarks.compiled.run import judge
from benchmarks.compiled.targets import TARGETS
from tests.benchmarks.compiled.examples import GOOD, MIB, program
from tests.benchmarks.compiled.examples import POOL as POOL_SHAPE

MOVED = GOOD.moved_bytes
POOL = GOOD.pool_bytes


def broken(changes, **of):
    return list(broken_bounds(program(**of), dataclasses.replace(GOOD, **changes)))


def test_good_figures_break_nothing():
    for target in TARGETS:
        kernel = "dma" if target.backend == "tpu" else "xla"
        for kind in ("gather", "write", "merge", "load"):
            case = {"target": target.name, "kind": kind}
            assert broken({"kernel": kernel}, **case) == [], case


XLA = {"kernel": "xla"}
GPU = {"target": "h200"}
MERGE, LOAD = {"kind": "merge"}, {"kind": "load"}
BYTES, TEMP = "accessed_bytes", "temp_bytes"  # As shares of what is moved.
# A program, its figures, the name of one, values of it that keep and break the bound.
BOUNDS = [
    ({}, {}, BYTES, 3, 4, "bytes 2.00x of the ideal, at most 1.5x"),
    ({}, XLA, BYTES, 8, 10, "bytes 5.00x of the ideal, at most 4x"),
    ({}, {}, TEMP, 1.09, 2, "temp 2.00x of what is moved, at most 1.1x"),
    (MERGE, {}, TEMP, 1.29, 1.5, "temp 1.50x of what is moved, at most 1.3x"),
    # The figure of the pool has the plan in it.
    (
        LOAD,
        {},
        "alias_bytes",
        POOL - 512,
        POOL // 2,
        "alias 0.50 of the pool, not all of it",
    ),
    ({}, {}, "kernels", 4, 5, "5 kernels, at most 4"),
    (GPU, XLA, "kernels", 6, 7, "7 kernels, at most 6"),
    ({}, {}, "collectives", (), ("all-gather",) * 2, "collectives: 2 x all-gather"),
    ({}, {}, "whole_leaf", (), ("copy",), "not in place on a whole leaf: copy"),
    (GPU, XLA, "unknown_loops", 0, 1, "loops without a known trip count: 1"),
]


def test_a_broken_bound_is_reported():
    for case, figures, name, within, beyond, line in BOUNDS:
        if name in (BYTES, TEMP):
            within, beyond = int(within * MOVED), int(beyond * MOVED)
        assert broken(figures | {name: within}, **case) == [], line
        assert broken(figures | {name: beyond}, **case) == [line]


def test_what_does_not_grow_with_the_blocks_is_free():
    # A mebibyte of temp, for semaphores and the plan.
    small = {"moved_bytes": 4096, "accessed_bytes": None}
    assert broken({**small, "temp_bytes": MIB + 4096}) == []
    assert len(broken({**small, "temp_bytes": MIB + 2 * 4096})) == 1
    # The bytes of the plan and the token.
    assert broken({"accessed_bytes": 3 * MOVED + (64 << 10)}) == []
    assert len(broken({"accessed_bytes": 3 * MOVED + (64 << 10) + 2})) == 1
    wasteful = {"accessed_bytes": 10 * MOVED}
    assert broken(wasteful, num_blocks=7) == []
    assert broken(wasteful, num_blocks=8) != []
    # A GPU's compiler reports no bytes, and a save need not write into the pool.
    assert broken({"kernel": "xla", "accessed_bytes": None}, target="h200") == []
    assert broken({"alias_bytes": 0}) == []
    assert not bounds_of("tpu", "dma", "gather").alias_whole_pool


def test_pools_for_comparison_have_no_bounds():
    bad = dataclasses.replace(GOOD, kernels=99)
    assert judge(program(), bad, None).broken == ("99 kernels, at most 4",)
    assert judge(program(example=True), bad, None).broken == ()
    result = judge(program(), None, "ValueError: no")
    assert result.broken == ("did not compile: ValueError: no",)


def test_a_known_break_fails_no_run():
    bad = dataclasses.replace(GOOD, kernels=99)
    [broken, *_] = KNOWN_BREAKS
    for num_blocks, name, fails in (
        (broken.from_blocks, broken.pools[0], False),
        (broken.from_blocks - 1, broken.pools[0], True),
        (broken.from_blocks, "another", True),
    ):
        pool = dataclasses.replace(POOL_SHAPE, name=name)
        made = dataclasses.replace(program(num_blocks=num_blocks), pool=pool)
        result = judge(made, bad, None)
        assert (result.fails, result.known) == (fails, None if fails else broken.reason)
        assert judge(made, None, "ValueError: no").fails
        assert judge(made, GOOD, None).known is None
    assert {name for broken in KNOWN_BREAKS for name in broken.pools} <= {
        pool.name for pool in default_pools()
    }
