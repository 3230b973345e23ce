"""`jaxkv verify` fails, and names the stage, with each fault in the transfer engine."""

import json
import os
import subprocess
import sys

import pytest

from jaxkv.tools.verify.records import StageLog
from tests.tools.verify.faults import EIGHT, FOUND_BY, ROOT

ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests" / "tools" / "verify" / "child"), str(ROOT)]
    ),
    # Its first check is of every bit pattern, which needs XLA as users have it.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "JAX_PLATFORMS": "cpu",
}


def verify(folder, fault, *words, code=1, **environ):
    """Run the command with a fault; return its figures."""
    result = subprocess.run(
        [sys.executable, "-m", "jaxkv.tools.main", "verify", *words],
        cwd=folder,
        env=ENVIRON | {"JAXKV_TEST_FAULT": fault} | environ,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return json.loads((folder / words[words.index("--json") + 1]).read_text())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if number else ())
        for number, fault in enumerate(FOUND_BY)
    ],
)
def test_each_fault_of_the_engine_fails_its_stage(fault, tmp_path):
    stage = FOUND_BY[fault]
    # The first check shows a wrong row; `blocks` takes no longer than it needs.
    seconds = "0" if fault == "a wrong row" else "600" if stage == "blocks" else "60"
    environ = {"XLA_FLAGS": EIGHT} if fault == "a dropped shard" else {}
    subprocess.run(
        [sys.executable, "-m", "jaxkv.tools.verify", stage, tmp_path, seconds],
        env=ENVIRON | {"JAXKV_TEST_FAULT": fault} | environ,
        timeout=1200,
        check=False,
    )
    results = StageLog(tmp_path / f"{stage}.jsonl").read().results
    assert "FAIL" in {result.verdict for result in results}


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", EIGHT])
def test_all_stages_pass_without_a_fault(flags, tmp_path):
    figures = verify(tmp_path, "", "--json", "a.json", code=0, XLA_FLAGS=flags)
    assert figures["verdict"] == "PASS"
    assert not {*figures["unchecked"]} & {stage["name"] for stage in figures["stages"]}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_a_runtime_that_crashes_or_hangs_fails_the_checks_and_the_rest_runs(
    fault, tmp_path
):
    words = ("--only", "blocks", "--budget", "30m", "--stall", "40s")
    _, blocks = verify(tmp_path, fault, *words, "--json", "a.json")["stages"]
    expected = "the process crashed (SIGABRT)" if fault == "crash" else "it hangs: no"
    for result in blocks["results"]:
        has_dtype = result["name"].startswith(("float8_e5m2", "mixed leaves"))
        assert (result["verdict"] == "FAIL") == has_dtype
        assert result["detail"].startswith(expected) == has_dtype
