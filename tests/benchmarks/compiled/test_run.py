"""Programs are compiled in processes of their own: for this CPU, and where libtpu or
the CUDA plugin is installed, for accelerators that are not here."""

import pytest

from benchmarks.compiled import run
from benchmarks.compiled.plan import CompileConfig
from benchmarks.compiled.pools import PoolShape
from benchmarks.compiled.targets import THIS_CPU, missing_group, parse_target

SMALL = PoolShape("small", (64, 4, 2, 16), 2, dtype="float32")


def compile_all(target, *pools, blocks=(4,)):
    config = CompileConfig((target,), pools, examples=(), blocks=blocks)
    return run.run_compile(config, lambda *_: None)


def figures_of(record):
    return {(r.program.pool.name, r.program.kind): r.figures for r in record.results}


def test_programs_are_compiled_for_this_cpu():
    seen = []
    heads = PoolShape("heads", (64, 4, 8, 8), 2, sharded_axis=2)
    blocks = PoolShape("blocks", (64, 4, 8, 8), 2, sharded_axis=0)
    # A pool of exactly the moved blocks: its leaves look like the moved data.
    whole = PoolShape("whole", (4, 4, 2, 16), 2, dtype="float32")
    pools = [SMALL, heads, blocks, whole]
    scales = {"blocks_per_host_block": 4, "scales": ((64, 2),) * 3}
    pools.append(PoolShape("together", (64, 4, 16), 2, **scales))
    config = CompileConfig((THIS_CPU,), pools, (), blocks=(4,))
    record = run.run_compile(config, lambda *args: seen.append(args))
    num = len(record.results)
    assert seen[0] == ("this machine's CPU", 0, num)
    assert seen[-1] == ("this machine's CPU", num, num)
    assert record.broken == ()
    figures = figures_of(record)
    kinds = [kind for pool, kind in figures if pool == "small"]
    assert kinds == ["gather", "merge", "load"]
    small = figures["small", "load"]
    assert (small.leaves, small.kernel) == (2, "xla")
    assert small.block_bytes == 2 * 4 * 2 * 16 * 4
    assert small.moved_bytes == 4 * small.block_bytes
    assert small.pool_bytes == 64 * small.block_bytes
    assert small.alias_bytes >= small.pool_bytes
    assert small.accessed_bytes >= 2 * small.moved_bytes
    assert small.kernels > 0
    assert small.compile_s > 0
    # Of a sharded pool the figures are one device's.
    assert figures["heads", "gather"].pool_bytes == 64 * 4 * 8 * 8 * 2 * 2 // 4
    assert figures["blocks", "gather"].moved_bytes == 4 * 4 * 8 * 8 * 2 * 2
    # Blocks that move together, and their scales, are counted.
    block_bytes = 4 * (2 * 4 * 16 * 2 + 3 * 2 * 4)
    for kind in ("gather", "merge", "load"):
        assert figures["together", kind].leaves == 5
        assert figures["together", kind].block_bytes == block_bytes
        assert figures["together", kind].pool_bytes == 16 * block_bytes
        assert figures["together", kind].moved_bytes == 4 * block_bytes


def test_a_process_compiles_all_programs_and_one_that_ends_costs_one(monkeypatch):
    started, popen = [], run.subprocess.Popen
    monkeypatch.setattr(
        run.subprocess,
        "Popen",
        lambda *args, **kwargs: started.append(args) or popen(*args, **kwargs),
    )
    monkeypatch.setattr(run, "_WORKER", "tests.rigs.dying_compiler")
    record = compile_all(THIS_CPU, SMALL)
    died = "the process ended with 3: F0000 compiler.cc:1] Check failed: no merges"
    errors = {result.program.kind: result.error for result in record.results}
    refused = {kind: f"refused {kind}" for kind in ("gather", "load")}
    assert errors == refused | {"merge": died}
    assert all(r.broken == (f"did not compile: {r.error}",) for r in record.results)
    assert len(started) == 2  # Another one for what is left.


def need(name):
    target = parse_target(name)
    extra = missing_group(target)
    if extra is not None:
        pytest.skip(f"no compiler for {name} (the group {extra} has it)")
    return target


def test_programs_are_compiled_for_a_tpu():
    target = need("v5e")
    pool = PoolShape("one layer", (256, 16, 8, 2, 128), 1)
    heads = PoolShape("heads", (256, 16, 8, 2, 128), 1, sharded_axis=2)
    narrow = PoolShape("narrow", (256, 16, 8, 2, 64), 1)
    record = compile_all(target, pool, heads, narrow, blocks=(8,))
    assert [r.error for r in record.results] == [None] * 9
    figures = figures_of(record)
    block = 16 * 8 * 2 * 128 * 2
    save, load = figures["one layer", "gather"], figures["one layer", "load"]
    assert save.moved_bytes == load.moved_bytes == 8 * block
    assert save.extent_host_bytes == 8 * block
    assert load.alias_bytes >= load.pool_bytes >= 256 * block
    for figure in (save, load):
        assert figure.accessed_bytes >= 2 * figure.moved_bytes
        assert figure.kernels >= 1
        assert figure.collectives == ()
    assert load.estimated_s > 0
    assert figures["heads", "gather"].moved_bytes == 8 * block // 4
    assert figures["heads", "load"].collectives == ()
    # Half of the lanes stay empty on the host.
    assert figures["narrow", "gather"].extent_host_bytes == 2 * 8 * block // 2


def test_a_topology_that_libtpu_does_not_know_is_an_error_of_the_program():
    target = need("v5e:77x77")
    record = compile_all(target, SMALL)
    assert all("77x77" in r.broken[0] for r in record.results)


def test_programs_are_compiled_for_a_gpu():
    target = need("h200")
    pool = PoolShape("one layer", (256, 16, 8, 2, 128), 2)
    heads = PoolShape("heads", (256, 16, 8, 2, 128), 2, sharded_axis=2)
    record = compile_all(target, pool, heads, blocks=(8,))
    assert [r.error for r in record.results] == [None] * 6
    figures = figures_of(record)
    load = figures["one layer", "load"]
    assert load.alias_bytes >= load.pool_bytes == 2 * 256 * 16 * 8 * 2 * 128 * 2
    assert (load.temp_bytes, load.collectives, load.whole_leaf) == (0, (), ())
    assert 1 <= load.kernels <= load.leaves + 2
    # The compiler reports no costs.
    assert (load.accessed_bytes, load.estimated_s) == (None, None)
    assert 4 * figures["heads", "load"].pool_bytes == load.pool_bytes
