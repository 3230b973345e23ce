"""Pools that are spread over 4 and 8 devices, in every way a block may be cut.

All cases run in one process of their own, which has eight CPU devices; the others of
this suite have two.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transfer.sharded_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results():
    """What became of each case: a traceback, or None if all was well."""
    command = [sys.executable, "-W", "error", "-m", "tests.transfer.sharded_cases"]
    # The floor is the repository: the working folder comes first on the path.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_sharded(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
