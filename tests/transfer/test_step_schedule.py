"""Compilers overlap the copies of a step that writes its loads with its layers.

Compiled for devices that are not there, in a process that has their compiler; nothing
runs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda12"}
TARGETS = {"v5e": "tpu", "v5p": "tpu", "v6e": "tpu", "tpu7x": "tpu", "h200": "gpu"}


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # Nor is the package that it is a part of.
        return False


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("v5e", "h200") else pytest.mark.long)
        for name in TARGETS
    ],
)
def schedules(request):
    """The order of events, with or without `after`."""
    package = COMPILERS[TARGETS[request.param]]
    if not is_installed(package):
        pytest.skip(f"{package}, which compiles for {request.param}, is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfer.step_schedule", request.param],
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
        },
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
