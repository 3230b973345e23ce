"""Compilers overlap the copies of a step that writes its loads with its layers.

Compiled for devices that are not there, in a process that has their compiler; nothing
runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled.targets import TARGETS, environment, missing_group

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("v5e", "h200")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(target, marks=() if target.name in SHORT else pytest.mark.long)
        for target in TARGETS
    ],
    ids=lambda target: target.name,
)
def schedules(request):
    """The order of events, with or without `after`."""
    target = request.param
    if group := missing_group(target):
        pytest.skip(f"no compiler for {target.name} (the group {group} has it)")
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfer.step_schedule", target.name],
        cwd=ROOT,
        env=os.environ | environment(target.backend),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def num_layers_before(events, wanted):
    """Count the layers that have run before each event of a kind, by its group."""
    counts, num_layers = {}, 0
    for kind, group in events:
        if kind == "layer":
            num_layers += 1
        elif kind == wanted:
            counts.setdefault(group, []).append(num_layers)
    return counts


def test_bytes_of_a_group_arrive_while_the_layers_before_it_run(schedules):
    events = schedules["staged"]["events"]
    starts = num_layers_before(events, "start")
    ends = num_layers_before(events, "done")
    groups = sorted(starts)
    assert len(groups) == schedules["staged"]["num_groups"]
    assert starts.keys() == ends.keys()
    for group in groups[1:]:
        # Started before the layers in front of the group are done, and waited for not
        # much earlier: compilers look a layer or two ahead.
        assert max(starts[group]) < group
        assert max(ends[group]) >= group - 2


def test_the_pool_is_written_in_place(schedules):
    facts = schedules["staged"]
    assert facts["alias_bytes"] == facts["pool_bytes"]
    assert facts["num_whole_leaf_copies"] == 0


def test_without_the_dependency_all_bytes_are_waited_for_first(schedules):
    """Otherwise the tests above would prove nothing."""
    ends = num_layers_before(schedules["no after"]["events"], "done")
    assert max(max(counts) for counts in ends.values()) == 0
