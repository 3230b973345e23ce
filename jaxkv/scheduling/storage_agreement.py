"""How the processes that serve one model agree on what became of a store's blocks."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json

from jaxkv.scheduling.exchange import Exchange
from jaxkv.scheduling.protocol import StorageReport
from jaxkv.types import KEY_BYTES, BlockKey

# How many keys of a listing are told in a step, which all go through jax's coordination
# service.
KEYS_PER_STEP = 1024


@dataclasses.dataclass(eq=False)
class _Outcome:
    """What the processes have said of a fetch or a write.

    Attributes:
        num_said: How many have said that it is over.
        oks: Which blocks have arrived in all of these.
    """

    num_said: int
    oks: list[bool]


class StorageAgreement:
    """Makes a fetch or a write be over in all processes in the same step.

    In each step every process says what has ended there since the last; some steps
    later all hear what all have said. A block has arrived when it has in all. What a
    listing finds is told by the process that lists.

    Args:
        exchange: How the processes talk; it is this object's alone.
        num_processes: How many there are.
    """

    def __init__(self, exchange: Exchange, num_processes: int) -> None:
        self._exchange = exchange
        self._num_processes = num_processes
        self._steps: collections.deque[int] = collections.deque()
        self._open: dict[tuple[str, int], _Outcome] = {}

    def say(self, reports: tuple[StorageReport, ...], step: int) -> None:
        """Tell the others what has ended here; never waits.

        Args:
            reports: It, with `KEYS_PER_STEP` keys of a listing at most.
            step: The step.
        """
        found = b"".join(key for report in reports for key in report.found)
        ended = [
            [kind, event, "".join(map(str, map(int, oks)))]
            for report in reports
            for kind, outcomes in (("f", report.fetched), ("w", report.written))
            for event, oks in outcomes
        ]
        text = json.dumps([ended, base64.b64encode(found).decode()])
        self._exchange.say(text, step)
        self._steps.append(step)

    def hear(self, last: int) -> tuple[StorageReport, ...]:
        """Wait for what all have said up to a step; give what is over in all.

        Raises:
            AgreementError: Not all have said it in time.
        """
        fetched: list[tuple[int, tuple[bool, ...]]] = []
        written: list[tuple[int, tuple[bool, ...]]] = []
        found: list[BlockKey] = []
        while self._steps and self._steps[0] <= last:
            step = self._steps.popleft()
            about = f"what has come from the store and got there by step {step}"
            for text in self._exchange.hear(about):
                ended, keys = json.loads(text)
                raw = base64.b64decode(keys)
                found += [
                    raw[start : start + KEY_BYTES]
                    for start in range(0, len(raw), KEY_BYTES)
                ]
                for kind, event, oks in ended:
                    over = self._count(kind, event, [ok == "1" for ok in oks])
                    if over is not None:
                        (fetched if kind == "f" else written).append((event, over))
        if not (fetched or written or found):
            return ()
        return (StorageReport(tuple(fetched), tuple(written), tuple(found)),)

    def _count(self, kind: str, event: int, oks: list[bool]) -> tuple[bool, ...] | None:
        """Count what a process says; give the outcome if it was the last one."""
        outcome = self._open.setdefault((kind, event), _Outcome(0, oks))
        outcome.oks = [a and b for a, b in zip(outcome.oks, oks, strict=True)]
        outcome.num_said += 1
        if outcome.num_said < self._num_processes:
            return None
        del self._open[kind, event]
        return tuple(outcome.oks)
