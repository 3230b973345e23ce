"""Waiting for other threads and processes."""

import contextlib
import os
import time
from pathlib import Path

_PROC = Path("/proc")
WAIT_S = 60  # A passing test never waits this long.


def wait_for(condition, *arguments):
    """Call a condition until it holds; return its value."""
    until_s = time.monotonic() + WAIT_S
    while not (result := condition(*arguments)):
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.002)
    return result


class Patience:
    """A limit for processes, by the processor time that they use.

    A busy machine makes them slow, and uses none of their limit. Processes that hang
    use next to nothing for a while; processes that spin reach the limit.
    """

    IDLE_S, MIN_CPU_S = 60.0, 0.5

    def __init__(self, pids, max_cpu_s):
        self._cpu_s = dict.fromkeys(pids, 0.0)
        self._max_cpu_s = max_cpu_s
        self._begun_s = self._busy_s = time.monotonic()
        self._busy_cpu_s = 0.0

    @property
    def is_over(self):
        """Whether the processes hang, or have used their time together."""
        now_s = time.monotonic()
        for pid in self._cpu_s:
            with contextlib.suppress(FileNotFoundError):  # It has ended.
                self._cpu_s[pid] = _cpu_s(pid)
        cpu_s = sum(self._cpu_s.values())
        if not _PROC.exists():
            cpu_s = now_s - self._begun_s
        if cpu_s >= self._busy_cpu_s + self.MIN_CPU_S:
            self._busy_s, self._busy_cpu_s = now_s, cpu_s
        return cpu_s >= self._max_cpu_s or now_s >= self._busy_s + self.IDLE_S


def _cpu_s(pid):
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
