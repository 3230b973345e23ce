"""Pools that are spread over 4 and 8 devices, in every way a block may be cut.

All cases run in one separate process, which has eight CPU devices; this one has two.
"""

import pytest

from tests.rigs.device_cases import run
from tests.transfer.sharded_cases import CASES


@pytest.fixture(scope="module")
def results():
    """The result of each case: a traceback, or None if it passed."""
    return run("tests.transfer.sharded_cases", timeout_s=600)


@pytest.mark.parametrize("case", CASES)
def test_sharded_case_passes(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
