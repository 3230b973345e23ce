"""Prefixes whose heads and layers are spread over four devices come back so.

All cases run in one process of their own, which has four CPU devices.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.sharded_prefixes import CASES

CASES_MODULE = "tests.integrations.sharded_prefixes"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results():
    """What became of each case: a traceback, or None if all was well."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.integrations.sharded_prefixes",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_sharded(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
