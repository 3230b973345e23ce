"""Every order of events in small worlds, and that what is wrong is found."""

import dataclasses
import functools
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from jaxkv.scheduling.boundary import Boundary
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.device import DeviceBlockPool
from tests.explorer import branches, search
from tests.explorer.world import Setup, World, WrongError, pack, unpack
from tests.explorer.worlds import WORLDS
from tests.rigs.scheduler_state import snapshot

ROOT = Path(__file__).resolve().parents[2]
# The deadlock of asynchronous loads in vLLM 0.25 (#57841).
HOLDING = Setup(
    (("aab", 3), ("ccd", 3), ("aabe", 4), ("ccde", 4)),
    num_device_blocks=6,
    num_host_blocks=6,
    acts=("preempt",),
    served=(0, 1),
    holds_waiting=True,
)
KEEPING = Setup(
    (("aaab", 4), ("aaab", 4)),
    (FullAttention(1), SlidingWindow(1, 2)),
    num_device_blocks=8,
    num_host_blocks=8,
    acts=("forget",),
    served=(0,),
    keeps_tables=True,
)


def explore(setup, **limits):
    result = search.explore(setup, **limits)
    print(result)
    print(dict(result.seen))
    assert result.error is None, (result.error, result.actions)
    return result


@pytest.mark.parametrize("name", ["tiny", "pair"])
def test_nothing_goes_wrong_in_any_order_of_events(name):
    result = explore(WORLDS[name], refuse_every=5)
    assert result.is_exhausted
    assert result.num_live == result.num_states


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_goes_wrong_within_some_events(name):
    explore(WORLDS[name], max_states=40)


def walk(setup, num_actions, seed=7):
    seen, error, actions = branches.walk(setup, random.Random(seed), num_actions)
    assert error is None, (error, actions)
    return seen


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_goes_wrong_on_a_random_walk(name):
    """A walk ends as a calm engine ends it: all is served, and nothing is left."""
    seen = walk(WORLDS[name], 950)
    assert seen["ends"] > 5
    if "store" in name:
        assert seen["fetch lands"] > 0
        assert seen["write lands"] > 0


@pytest.mark.parametrize("name", ["store, in windows", "hybrid, in windows"])
def test_a_prefix_is_fetched_in_windows_to_its_end(name):
    world = World(WORLDS[name])
    world.do(("list",))
    search.go_on_calmly(world)
    lands = {"store, in windows": 4, "hybrid, in windows": 5}
    assert world.seen["fetch lands"] == lands[name]


class Planned(World):
    """A world that digests all plans and states."""

    digest_of_plans: bytes

    def _start(self, meta):
        digest = Planned.digest_of_plans + snapshot(self.scheduler).digest.encode()
        Planned.digest_of_plans = meta.digest(digest)
        super()._start(meta)


def print_plans():
    Planned.digest_of_plans = b""
    with mock.patch.object(branches, "World", Planned):
        for name in ("two workers, store", "hybrid", "kept"):
            seen, _, _ = branches.walk(WORLDS[name], random.Random(5), 250)
            print(Planned.digest_of_plans.hex(), sorted(seen.items()))


def test_equal_inputs_give_equal_plans_in_processes_that_hash_otherwise(capsys):
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    said = subprocess.run(
        [
            *(sys.executable, "-c"),
            "from tests.explorer import test_explorer; test_explorer.print_plans()",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    print_plans()
    assert capsys.readouterr().out == said
    assert said


@pytest.mark.long
def test_nothing_goes_wrong_in_two_minutes_of_many_worlds():
    num_states, seen = 0, set()
    for setup in WORLDS.values():
        result = explore(setup, minutes=2 / len(WORLDS), refuse_every=20, live_s=1)
        num_states += result.num_states
        seen |= set(result.seen)
    print(num_states, "states")
    assert seen >= {"preempt", "load fails", "fetch lands", "write lands", "reset done"}


def test_branches_that_no_walk_takes_are_named():
    files, wrong = branches.measure({"tiny": WORLDS["tiny"]}, 20, seed=7, say=print)
    assert wrong is None
    by_name = {file.name: file for file in files}
    # There is no store in this world, nor anything to load from the host.
    assert by_name["boundary.py"].num_taken == 0 < by_name["boundary.py"].num
    lines = list(branches.show(files))
    start, end = by_name["plan.py"].missed[0]
    assert any(f"line {start}: not to {end}" in line for line in lines)
    sums = sum(file.num_taken for file in files), sum(file.num for file in files)
    assert "{} of {} branches".format(*sums) in lines[-1]


@pytest.mark.long
def test_walks_take_at_least_95_of_100_branches_of_the_files_that_decide():
    files, wrong = branches.measure(WORLDS, 1200, seed=7)
    assert wrong is None
    print(*branches.show(files), sep="\n")
    num = sum(file.num for file in files)
    assert sum(file.num_taken for file in files) >= 0.95 * num


def test_a_block_that_others_store_is_void_once_its_request_overwrites_it():
    actions = [
        *(("admit", "r0"), ("step", "r0"), ("admit", "r1"), ("step", "r1")),
        *(("preempt", "r1"), ("back", "r0"), ("step", "r0"), ("land", 0)),
    ]
    assert search.what_goes_wrong(WORLDS["overwritten"], actions) == (None, 8)


def test_explain_looks_past_a_window_whose_blocks_are_being_stored():
    actions = [
        *(("list",), ("admit", "r1"), ("admit", "r0"), ("step",), ("land", 1)),
        *(("land", 0), ("admit", "r1"), ("step",), ("fail", 0), ("admit", "r0")),
        *(("step", "r1"), ("land", 0), ("step", "r1"), ("fail", 0), ("finish", "r1")),
        *(("admit", "r0"), ("gap",), ("preempt", "r0"), ("admit", "r0")),
    ]
    assert search.what_goes_wrong(WORLDS["hybrid, asked"], actions) == (None, 19)


def test_a_probe_that_ends_after_the_store_was_left_is_ignored():
    """It takes three rare actions in a row, which the walks above do not."""
    actions = ("admit", "r0"), ("step",), ("leave",), ("land", 0)
    assert search.what_goes_wrong(WORLDS["store, asked"], actions) == (None, 4)


@pytest.mark.parametrize(
    "name", ["pair, store", "hybrid", "hazard", "bound", "together", "paused"]
)
def test_worlds_of_one_digest_have_one_future(name):
    assert search.compare_futures(WORLDS[name], 200) > 20


def test_a_world_is_come_back_to_as_it_was():
    world = World(WORLDS["store"])
    world.do(("admit", "r0"))
    before, digest = pack(world.save()), world.digest()
    state = snapshot(world.scheduler).digest
    world.do(("step", "r0"))
    assert world.digest() != digest
    world.restore(unpack(before))
    assert snapshot(world.scheduler).digest == state
    assert world.digest() == digest


def found(setup, **limits):
    """Return the fault found and its shortest path, after a round trip through text."""
    result = search.explore(setup, refuse_every=100, **limits)
    assert result.error is not None, str(result)
    actions, error = search.shrink(setup, result.actions)
    assert error is not None
    assert search.what_goes_wrong(setup, actions)[0] == error
    return actions, error


def test_a_store_that_is_asked_although_it_is_down_is_found(monkeypatch):
    monkeypatch.setattr(Boundary, "is_down", False)
    actions, error = found(WORLDS["down"], max_states=2000)
    assert "a store that is down is asked" in error
    assert ("down",) in actions


def test_the_deadlock_of_requests_that_wait_with_what_they_have_loaded_is_found():
    actions, error = found(HOLDING, max_states=20_000)
    assert "r2, r3 can never end" in error
    assert sorted(actions) == [("admit", "r2"), ("admit", "r3")]
    # An engine that takes all blocks at once has no such state.
    right = dataclasses.replace(HOLDING, holds_waiting=False)
    explore(right, max_states=300)


def test_an_eviction_that_takes_marks_away_is_found(monkeypatch):
    """A fault that the campaign found: unwritten blocks were cached."""
    assert explore(KEEPING).is_exhausted
    evict = DeviceBlockPool.evict

    @functools.wraps(evict)
    def forgetful(self, block_ids):
        evict(self, block_ids)
        self.unwritten.difference_update(block_ids)

    monkeypatch.setattr(DeviceBlockPool, "evict", forgetful)
    actions, error = found(KEEPING, max_states=20_000)
    assert "is found in the GPU tier" in error
    assert ("forget",) in actions


def test_a_step_that_drops_what_was_taken_after_a_preemption_is_found(monkeypatch):
    """The explorer found it."""

    def leave(self, request):
        self._leave(request, self._book.check_stores(request))

    monkeypatch.setattr(OffloadScheduler, "request_preempted", leave)
    setup = Setup((("ab", 2), ("ab", 2)), num_device_blocks=3, served=(0,))
    actions, error = found(dataclasses.replace(setup, acts=("preempt",)))
    assert "blocks are pinned [0, 0, 0, 0] times, and used [0, 1, 0, 0]" in error
    assert [action[0] for action in actions] == ["admit", "preempt", "admit"]


def test_a_conversation_that_evicts_its_own_head_is_found():
    """As in vLLM, its tail takes the place of its head unless heads are kept."""
    world = WORLDS["heads kept, one story"]
    right = dataclasses.replace(world, requests=world.requests[-1:], acts=("preempt",))
    explore(right, max_states=400)
    rules = dataclasses.replace(right.rules, keep_heads=False)
    _, error = found(dataclasses.replace(right, rules=rules), max_states=400)
    assert "blocks [False, " in error


def test_what_is_read_back_goes_wrong_as_it_did(tmp_path, monkeypatch):
    check = World.check

    def no_stores(self):
        check(self)
        if self.seen["store lands"]:
            raise WrongError("a store has landed")

    monkeypatch.setattr(World, "check", no_stores)
    _, error, actions = branches.walk(WORLDS["tiny"], random.Random(7), 1000)
    assert search.what_goes_wrong(WORLDS["tiny"], actions)[0] == error
    actions, error = found(WORLDS["tiny"])
    path = tmp_path / "wrong.json"
    search.write_counterexample(path, "tiny", actions, error)
    name, again = search.read_counterexample(path)
    assert (name, again) == ("tiny", actions)
    assert search.what_goes_wrong(WORLDS[name], again) == (error, len(actions))
