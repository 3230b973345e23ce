"""Pools that are spread over 4 and 8 devices, in every way a block may be cut.

All cases run in one process of their own, which has eight CPU devices; the others of
this suite have two.
"""

import pytest

from tests.device_cases import run
from tests.transfer.sharded_cases import CASES


@pytest.fixture(scope="module")
def results():
    """What became of each case: a traceback, or None if all was well."""
    return run("tests.transfer.sharded_cases", timeout_s=600)


@pytest.mark.parametrize("case", CASES)
def test_sharded(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
