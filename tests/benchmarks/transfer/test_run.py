"""The measurement of transfers: arithmetic, plan, ids and checks."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from benchmarks.transfer import designs, records, run
from benchmarks.transfer.paged_pool import PagedPool
from benchmarks.transfer.plan import (
    Cycle,
    available_memory_bytes,
    device_cycle,
    host_cycle,
    make_plan,
    memory_needed_bytes,
)
from benchmarks.transfer.records import Case, TransferConfig
from jaxkv.tools import machine
from jaxkv.tools.speed import DIRECTIONS, BytesDifferError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALL = TransferConfig(
    sizes=(8 * KIB, 16 * KIB),
    block_sizes=(2 * KIB,),
    num_layers=2,
    rounds=3,
    working_set_bytes=32 * KIB,
)
NO_LIMITS = {"cache_bytes": None, "memory_bytes": None}


def test_a_ratio_pairs_the_rounds_so_that_a_slow_one_cancels_out():
    limit = np.array([1.0, 10.0, 1.0, 3.0, 1.0])
    ratio = records.ratio(2 * limit, limit)
    assert ratio.best == 0.5
    assert ratio.quartiles == [0.5, 0.5, 0.5]
    # Unpaired, the medians of these would be equal.
    assert records.ratio([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]).quartiles[1] == 2 / 3


def test_sizes_are_taken_in_order_and_cut_into_whole_blocks():
    config = dataclasses.replace(
        TransferConfig(), sizes=(5 * MIB, MIB, MIB), block_sizes=(2 * MIB, 64 * KIB)
    )
    plan = make_plan(config, **NO_LIMITS)
    assert plan.cases == (
        Case(64 * KIB, 16),
        Case(64 * KIB, 80),
        Case(2 * MIB, 2),
    )
    assert plan.cases[2].num_bytes == 4 * MIB
    assert plan.left_out == ("1 MiB in blocks of 2 MiB: less than one block",)
    config = dataclasses.replace(TransferConfig(), block_sizes=(6 * KIB,))
    with pytest.raises(ValueError, match="6 KiB must be a multiple of 4 KiB: 8 layers"):
        make_plan(config, **NO_LIMITS)


def test_the_working_set_is_the_cache_or_the_largest_size():
    def working_set(cache_bytes, **changes):
        config = dataclasses.replace(TransferConfig(), **changes)
        return make_plan(config, cache_bytes, None).working_set_bytes

    assert working_set(480 * MIB) == 480 * MIB
    assert working_set(32 * MIB) == 256 * MIB
    assert working_set(32 * MIB, sizes=(MIB,)) == 32 * MIB
    assert working_set(None, sizes=(MIB,)) == 256 * MIB
    assert working_set(480 * MIB, sizes=(MIB,), working_set_bytes=MIB) == MIB
    assert working_set(480 * MIB, working_set_bytes=MIB) == 256 * MIB


def test_sizes_that_memory_cannot_hold_are_left_out_with_the_reason():
    config = dataclasses.replace(TransferConfig(), sizes=(MIB, GIB))
    enough = memory_needed_bytes(config, GIB, GIB) / 0.8 + 1
    assert make_plan(config, MIB, int(enough)).left_out == (
        "1 MiB in blocks of 2 MiB: less than one block",
    )
    plan = make_plan(config, MIB, 8 * GIB)
    assert plan.left_out[0] == (
        "1 GiB: needs 10.5 GiB of memory, but 8.0 GiB are available"
    )
    assert {case.num_bytes for case in plan.cases} == {MIB}
    assert plan.working_set_bytes == MIB
    assert make_plan(config, MIB, MIB).cases == ()


def test_ids_repeat_only_after_all_others_and_are_the_same_in_every_process():
    for mean_run in (1, 16):
        cycle, again = (Cycle(60, mean_run, seed=3) for _ in range(2))
        for _ in range(3):
            rounds = [cycle.next(20).tolist() for _ in range(3)]
            assert sorted(itertools.chain(*rounds)) == list(range(60))
            assert rounds == [again.next(20).tolist() for _ in range(3)]
    # 10 are left after three rounds, and not mixed with the next order's.
    cycle = Cycle(100, 4, seed=1)
    rounds = {tuple(cycle.next(30).tolist()) for _ in range(9)}
    assert len(rounds) == 9
    assert all(len(set(ids)) == 30 for ids in rounds)


def test_the_memory_of_this_machine_is_known_or_none():
    cache, memory = machine.last_level_cache_bytes(), available_memory_bytes()
    assert cache is None or cache >= 64 * KIB
    assert memory is None or memory > 0


def runs(ids):
    """Cut ids into consecutive runs."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    return {tuple(run) for run in np.split(ids, cuts)}


def test_host_ids_come_in_runs_and_device_ids_do_not():
    assert 60 < len(runs(host_cycle(10_000, None, seed=0).next(10_000))) < 100
    assert 14 < len(runs(host_cycle(240, None, seed=0).next(240))) < 35
    assert len(runs(device_cycle(10_000, seed=0).next(10_000))) > 9_900
    assert len(runs(host_cycle(10_000, 1, seed=0).next(10_000))) > 9_900
    assert host_cycle(1, None, seed=0).next(1).tolist() == [0]
    # Loads have the runs of saves; some runs are adjacent by chance.
    saves, loads = (runs(host_cycle(9_000, None, seed).next(9_000)) for seed in (1, 2))
    assert len(saves & loads) > 0.8 * len(saves)


def test_a_pool_counts_blocks_that_differ_from_their_tags():
    paged = PagedPool(num_blocks=12, block_bytes=2 * KIB, num_layers=2)
    assert [leaf.shape for leaf in paged.leaves] == [(12, 2, 2, 128)] * 2
    assert paged.check() == 0
    bits = np.array(paged.leaves[1]).view(np.uint16)
    assert len(np.unique(bits.reshape(12, -1), axis=0)) == 12
    bits[5, 1, 0, 7] ^= 1
    paged.leaves[1] = jax.device_put(bits.view(paged.leaves[1].dtype))
    assert paged.check() == 1
    assert paged.check(np.array([4, 6], np.int32)) == 0
    paged.tags[[2, 3]] = paged.tags[[3, 2]]
    assert paged.check() == 3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_engine_that_moves_wrong_bytes_is_detected(direction):
    config = dataclasses.replace(SMALL, sizes=(8 * KIB,))

    def make_broken(*args):
        design = designs.EngineDesign(*args)
        call, calls = getattr(design, direction), itertools.count()

        def broken(pool, *ids):
            # Right at first; then the first two blocks are swapped.
            if next(calls) >= 3:
                ids = (ids[0], ids[1][[1, 0, *range(2, len(ids[1]))]])
            return call(pool, *ids)

        setattr(design, direction, broken)
        return design

    plan = make_plan(config, **NO_LIMITS)
    with pytest.raises(BytesDifferError, match="blocks differ from what was sav"):
        run.run_transfer(config, plan, lambda *_: None, {records.ENGINE: make_broken})
