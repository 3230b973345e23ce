"""Each bound is reported where it is broken, and only there."""

import dataclasses

import pytest

from jaxkv.tools.bench.compiled.bounds import KNOWN_BREAKS, bounds_of, broken_bounds
from jaxkv.tools.bench.compiled.pools import default_pools
from jaxkv.tools.bench.compiled.run import judge
from jaxkv.tools.bench.compiled.targets import TARGETS
from tests.tools.bench.compiled.examples import GOOD, MIB, program
from tests.tools.bench.compiled.examples import POOL as POOL_SHAPE

MOVED = GOOD.moved_bytes
POOL = GOOD.pool_bytes


def broken(changes, **of):
    return list(broken_bounds(program(**of), dataclasses.replace(GOOD, **changes)))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", ["gather", "write", "merge", "load", "copy"])
def test_good_figures_break_nothing(target, kind):
    kernel = "dma" if target.backend == "tpu" else "xla"
    assert broken({"kernel": kernel}, target=target.name, kind=kind) == []


@pytest.mark.parametrize(
    ("of", "within", "beyond", "line"),
    [
        pytest.param(
            {},
            {"accessed_bytes": 3 * MOVED},
            {"accessed_bytes": 4 * MOVED},
            "bytes 2.00x of the ideal, at most 1.5x",
            id="bytes, asynchronous copies",
        ),
        pytest.param(
            {},
            {"kernel": "xla", "accessed_bytes": 8 * MOVED},
            {"kernel": "xla", "accessed_bytes": 10 * MOVED},
            "bytes 5.00x of the ideal, at most 4x",
            id="bytes, XLA",
        ),
        pytest.param(
            {},
            {"temp_bytes": int(1.09 * MOVED)},
            {"temp_bytes": 2 * MOVED},
            "temp 2.00x of what is moved, at most 1.1x",
            id="temp",
        ),
        pytest.param(
            {"kind": "merge"},
            {"temp_bytes": int(1.29 * MOVED)},
            {"temp_bytes": int(1.5 * MOVED)},
            "temp 1.50x of what is moved, at most 1.3x",
            id="temp of a merge",
        ),
        pytest.param(
            {"kind": "merge", "mode": "fused"},
            {"temp_bytes": int(2.09 * MOVED)},
            {"temp_bytes": int(2.5 * MOVED)},
            "temp 2.50x of what is moved, at most 2.1x",
            id="temp of a fused merge",
        ),
        pytest.param(
            {"kind": "load", "mode": "fused"},
            {"kernel": "xla", "accessed_bytes": 10 * MOVED},
            {"kernel": "xla", "accessed_bytes": 12 * MOVED},
            "bytes 6.00x of the ideal, at most 5x",
            id="bytes of a fused load",
        ),
        pytest.param(
            {"kind": "load"},
            # The figure of the pool has the plan in it.
            {"alias_bytes": POOL - 512},
            {"alias_bytes": POOL // 2},
            "alias 0.50 of the pool, not all of it",
            id="alias",
        ),
        pytest.param(
            {},
            {"kernels": 4},
            {"kernels": 5},
            "5 kernels, at most 4",
            id="kernels",
        ),
        pytest.param(
            {"target": "h200"},
            {"kernel": "xla", "kernels": 6},
            {"kernel": "xla", "kernels": 7},
            "7 kernels, at most 6",
            id="kernels, GPU: leaves + 2",
        ),
        pytest.param(
            {},
            {"collectives": ()},
            {"collectives": ("all-gather", "all-gather")},
            "collectives: 2 x all-gather",
            id="collectives",
        ),
        pytest.param(
            {},
            {"whole_leaf": ()},
            {"whole_leaf": ("copy", "prefetch")},
            "not in place on a whole leaf: copy, prefetch",
            id="whole leaf",
        ),
        pytest.param(
            {"target": "h200"},
            {"kernel": "xla", "loops": 2},
            {"kernel": "xla", "loops": 2, "unknown_loops": 1},
            "loops without a known trip count: 1",
            id="trip counts, GPU",
        ),
    ],
)
def test_a_broken_bound_is_reported(of, within, beyond, line):
    assert broken(within, **of) == []
    assert broken(beyond, **of) == [line]


def test_several_broken_bounds_are_all_reported():
    lines = broken({"accessed_bytes": 100 * MOVED, "temp_bytes": POOL, "kernels": 99})
    assert [line.split()[0] for line in lines] == ["bytes", "temp", "99"]


def test_few_blocks_are_not_held_to_the_bytes_of_the_plan():
    wasteful = {"accessed_bytes": 10 * MOVED}
    assert broken(wasteful, num_blocks=7) == []
    assert broken(wasteful, num_blocks=8) != []


def test_a_mebibyte_of_temp_is_free():
    """What a compiler sets aside for semaphores and the plan, however little moves."""
    small = {"moved_bytes": 4096, "accessed_bytes": None}
    assert broken({**small, "temp_bytes": MIB + 4096}) == []
    assert len(broken({**small, "temp_bytes": MIB + 2 * 4096})) == 1


def test_the_plan_and_the_token_are_free():
    exactly = 3 * MOVED
    assert broken({"accessed_bytes": exactly + (64 << 10)}) == []
    assert len(broken({"accessed_bytes": exactly + (64 << 10) + 2})) == 1


def test_a_compiler_that_tells_no_bytes_is_not_held_to_them():
    assert broken({"kernel": "xla", "accessed_bytes": None}, target="h200") == []


def test_saves_need_not_write_into_the_pool():
    assert broken({"alias_bytes": 0}) == []
    assert not bounds_of("tpu", "dma", "staged", "gather").alias_whole_pool


def test_pools_for_comparison_have_no_bounds():
    bad = dataclasses.replace(GOOD, kernels=99)
    assert judge(program(), bad, None).broken == ("99 kernels, at most 4",)
    assert judge(program(example=True), bad, None).broken == ()


def test_a_known_break_fails_no_run():
    bad = dataclasses.replace(GOOD, kernels=99)
    [known, *_] = KNOWN_BREAKS
    for num_blocks, name, fails in (
        (known.from_blocks, known.pools[0], False),
        (known.from_blocks - 1, known.pools[0], True),
        (known.from_blocks, "another", True),
    ):
        pool = dataclasses.replace(POOL_SHAPE, name=name)
        made = dataclasses.replace(program(num_blocks=num_blocks), pool=pool)
        result = judge(made, bad, None)
        assert (result.fails, result.known) == (fails, None if fails else known.reason)
        assert judge(made, None, "ValueError: no").fails
        assert judge(made, GOOD, None).known is None
    assert {name for each in KNOWN_BREAKS for name in each.pools} <= {
        pool.name for pool in default_pools()
    }


def test_what_does_not_compile_breaks_a_bound():
    result = judge(program(), None, "ValueError: no")
    assert result.broken == ("did not compile: ValueError: no",)
