"""Waiting for what goes on in other threads."""

import time

WAIT_S = 60  # A passing test never waits this long.


def wait_for(condition, *arguments):
    """Call a condition until it holds; return what it gave."""
    until_s = time.monotonic() + WAIT_S
    while not (found := condition(*arguments)):
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.002)
    return found
