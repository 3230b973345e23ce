"""Prefixes whose heads and layers are spread over four devices keep their shardings.

All cases run in one separate process, which has four CPU devices.
"""

import pytest

from tests.rigs.device_cases import run
from tests.rigs.sharded_prefixes import CASES


@pytest.fixture(scope="module")
def results():
    """The result of each case: a traceback, or None if it passed."""
    return run("tests.rigs.sharded_prefixes", timeout_s=300)


@pytest.mark.parametrize("case", CASES)
def test_sharded_case_passes(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
