"""Prefixes whose heads and layers are spread over four devices come back so.

All cases run in one process of their own, which has four CPU devices.
"""

import pytest

from tests.device_cases import run
from tests.integrations.sharded_prefixes import CASES


@pytest.fixture(scope="module")
def results():
    """What became of each case: a traceback, or None if all was well."""
    return run("tests.integrations.sharded_prefixes", timeout_s=300)


@pytest.mark.parametrize("case", CASES)
def test_sharded(results, case):
    assert results[case] is None, results[case]


def test_every_case_was_run(results):
    assert list(results) == list(CASES)
