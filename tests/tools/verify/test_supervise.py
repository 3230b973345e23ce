"""Stages in processes of their own: crashes, hangs, resumption and time."""

import itertools
import os
import time
from types import SimpleNamespace

import pytest

from jaxkv.tools.verify import supervise
from jaxkv.tools.verify.__main__ import run_stage
from jaxkv.tools.verify.records import (
    NO_TIME,
    Check,
    Result,
    Stage,
    StageLog,
    Turn,
    UnsupportedError,
    WrongError,
)
from tests.tools.verify.faults import ROOT

STAGE = Stage("fake", "A stage of the test", 1.0)
# A process of the stage imports it by the name of a stage.
MODULE = """
import os, sys, time, types

if "jaxkv.tools.verify" in sys.orig_argv:
    from jaxkv.tools.verify.records import Check

    def passes(turn):
        return "well", {}

    def aborts(turn):
        print("Check failed: pinned memory", flush=True)
        os.abort()

    def hangs(turn):
        while True:
            time.sleep(1)

    checks = [
        Check("first", passes),
        Check("aborts", aborts),
        Check("excused", aborts, excuse="no callbacks here"),
        Check("hangs", hangs),
        Check("last", passes),
    ]
    fake = types.ModuleType("jaxkv.tools.verify.fake")
    fake.list_checks = lambda: checks
    sys.modules[fake.__name__] = fake
"""


@pytest.fixture
def fake_stage(tmp_path, monkeypatch):
    """Run the stage of `MODULE`; the clock runs ahead in the check that hangs."""
    (tmp_path / "sitecustomize.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    log = StageLog(tmp_path / "fake.jsonl")

    hours = itertools.count(1)

    def monotonic():
        is_hanging = log.read().current == "hangs"
        return time.monotonic() + 3600.0 * (next(hours) if is_hanging else 0)

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(supervise, "time", clock)

    found = {}

    def run(stages=(STAGE,), budget_s=1e6):
        supervise.run_stages(
            list(stages),
            tmp_path,
            budget_s,
            3000.0,
            lambda *_: None,
            lambda stage, results: found.update({stage.name: results}) or "",
        )
        return {result.name: result for result in found["fake"]}

    return SimpleNamespace(run=run, log=log)


def test_a_crash_and_a_hang_cost_one_check_each_and_the_rest_runs(fake_stage):
    results = fake_stage.run()
    assert {name: result.verdict for name, result in results.items()} == {
        "first": "PASS",
        "aborts": "FAIL",
        "excused": "SKIP",
        "hangs": "FAIL",
        "last": "PASS",
    }
    crash = results["aborts"].detail
    assert crash == "the process crashed (SIGABRT): Check failed: pinned memory"
    assert results["excused"].detail.startswith("not supported: no callbacks here (")
    assert results["hangs"].detail.startswith("it hangs: no progress for 3000 s")
    assert "in hangs" in fake_stage.log.path.with_suffix(".log").read_text()


def test_resumption_keeps_results_and_gives_up_a_check_that_ended_the_machine_twice(
    fake_stage,
):
    log = fake_stage.log
    for name in ("first", "aborts", "excused"):
        log.append(begin=name, excuse="")
        log.write(name, "PASS", "before")
    log.append(begin="hangs", excuse="")
    log.append(begin="hangs", excuse="")
    with log.path.open("ab") as file:
        # The machine went down as it was written.
        file.write(b'\n{"result": {"name\xff\0')
    results = fake_stage.run()
    assert [result.detail for result in results.values()] == [
        *["before"] * 3,
        "the machine or the command ended in it, twice",
        "well",
    ]


def test_a_stage_that_does_not_start_fails_with_its_last_line(fake_stage, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    (result,) = fake_stage.run().values()
    assert (result.name, result.verdict) == ("start", "FAIL")
    assert "exit code 1: ModuleNotFoundError: No module named" in result.detail


def test_the_budget_is_a_limit_and_the_checks_that_it_ends_are_named(
    fake_stage, tmp_path, monkeypatch
):
    text = MODULE.replace(
        'Check("aborts", aborts),\n        Check("excused"', 'Check("excused"'
    )
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setattr(supervise, "_MAX_LATE_SHARE", 0.0)
    results = fake_stage.run(budget_s=2000.0)
    assert {name: results[name].detail for name in ("hangs", "last")} == {
        "hangs": NO_TIME,
        "last": NO_TIME,
    }
    assert results["first"].verdict == "PASS"
    assert fake_stage.log.read().has_ended
    assert list(fake_stage.run(budget_s=0.0).values()) == [
        Result("start", "SKIP", NO_TIME)
    ]


def run_here(log, checks, end_s):
    run_stage(checks, log, end_s)
    return log.read().results


def test_checks_past_the_time_are_left_out_by_name_and_the_first_always_runs(tmp_path):
    checks = [Check(name, lambda turn: ("well", {})) for name in ("a", "b", "c")]
    results = run_here(StageLog(tmp_path / "a.jsonl"), checks, time.monotonic() - 1)
    assert [(result.name, result.verdict, result.detail) for result in results] == [
        ("a", "PASS", "well"),
        ("b", "SKIP", NO_TIME),
        ("c", "SKIP", NO_TIME),
    ]


def test_resumption_runs_the_checks_that_were_left_out_for_time(tmp_path):
    checks = [Check(name, lambda turn: ("well", {})) for name in ("a", "b")]
    log = StageLog(tmp_path / "a.jsonl")
    run_here(log, checks, time.monotonic() - 1)
    assert log.read().has_ended
    log.append(resume=True)
    assert not log.read().has_ended
    results = run_here(log, checks, time.monotonic() + 1e6)
    assert [result.detail for result in results] == ["well", "well"]
    log.append(resume=True)
    assert log.read().has_ended


def test_what_a_check_raises_is_its_verdict(tmp_path, capsys):
    def raise_(error):
        def run(turn):
            raise error

        return run

    checks = [
        Check("wrong", raise_(WrongError("blocks [3]"))),
        Check("refused", raise_(UnsupportedError("no TPU"))),
        Check("broken", raise_(KeyError("x"))),
    ]
    log = StageLog(tmp_path / "a.jsonl")
    results = run_here(log, checks, time.monotonic() + 1e6)
    assert [(result.verdict, result.detail) for result in results] == [
        ("FAIL", "blocks [3]"),
        ("SKIP", "not supported: no TPU"),
        ("FAIL", "KeyError: 'x'"),
    ]
    assert "KeyError" in capsys.readouterr().err


def test_rounds_end_with_the_time_but_not_before_the_minimum(tmp_path):
    log = StageLog(tmp_path / "a.jsonl")
    assert list(Turn(-1, log).rounds(3)) == [0, 1, 2]
    assert list(Turn(1e6, log).rounds(2, 5)) == [0, 1, 2, 3, 4]
