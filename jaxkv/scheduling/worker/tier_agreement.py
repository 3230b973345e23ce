"""How the processes that serve one model agree on blocks of tiers below the host."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
from collections.abc import Sequence

from jaxkv.scheduling.protocol import TierReport
from jaxkv.scheduling.worker.exchange import Exchange
from jaxkv.types import KEY_BYTES, BlockKey

# How many keys of a listing are sent in a step, which all go through jax's coordination
# service.
KEYS_PER_STEP = 1024


@dataclasses.dataclass(eq=False)
class _Outcome:
    """What the processes have reported of a fetch, a write or a probe.

    Attributes:
        num_reports: How many have reported that it is over.
        oks: Which blocks have arrived in all of these.
    """

    num_reports: int
    oks: list[bool]


class TierAgreement:
    """Makes a fetch, a write or a probe be over in all processes in the same step.

    In each step every process sends what has ended there since the last; some steps
    later all receive what all have sent. A block has arrived, or is there, when it has,
    or is, in all. What a listing finds is sent by the process that lists.

    Args:
        exchange: How the processes talk; it is this object's alone.
        num_processes: How many there are.
    """

    def __init__(self, exchange: Exchange, num_processes: int) -> None:
        self._exchange = exchange
        self._num_processes = num_processes
        self._steps: collections.deque[int] = collections.deque()
        self._open: dict[tuple[int, str, int], _Outcome] = {}

    def send(self, reports: Sequence[TierReport], step: int) -> None:
        """Tell the others what has ended here; never waits.

        Args:
            reports: It, with `KEYS_PER_STEP` keys of a listing at most for each tier.
            step: The step.
        """
        told = []
        for report in reports:
            ended = [
                [kind, event, "".join(map(str, map(int, oks)))]
                for kind, outcomes in (
                    ("f", report.fetched),
                    ("w", report.written),
                    ("p", report.probed),
                )
                for event, oks in outcomes
            ]
            keys = [
                base64.b64encode(b"".join(each)).decode()
                for each in (report.found, report.gone)
            ]
            listing = *keys, report.listed, report.bound
            told.append([report.tier, ended, *listing, report.num_full])
        self._exchange.send(json.dumps(told), step)
        self._steps.append(step)

    def receive(self, last: int) -> tuple[TierReport, ...]:
        """Wait for what all have sent up to a step; return what is over in all.

        Raises:
            AgreementError: Not all have sent it in time.
        """
        heard: dict[int, TierReport] = {}
        while self._steps and self._steps[0] <= last:
            step = self._steps.popleft()
            about = f"what tiers below the host have sent and got by step {step}"
            for text in self._exchange.receive(about):
                for tier, ended, *listing, num_full in json.loads(text):
                    found, gone, listed, bound = listing
                    own = heard.get(tier, TierReport(tier=tier))
                    over: dict[str, list[tuple[int, tuple[bool, ...]]]]
                    over = {"f": [*own.fetched], "w": [*own.written]}
                    over["p"] = [*own.probed]
                    for kind, event, oks in ended:
                        name = tier, kind, event
                        outcome = self._count(name, [ok == "1" for ok in oks])
                        if outcome is not None:
                            over[kind].append((event, outcome))
                    heard[tier] = TierReport(
                        tuple(over["f"]),
                        tuple(over["w"]),
                        own.found + _keys_of(found),
                        own.listed if listed is None else listed,
                        own.bound if bound is None else tuple(bound),
                        own.gone + _keys_of(gone),
                        tier,
                        tuple(over["p"]),
                        max(own.num_full, num_full),
                    )
        reports = [heard[tier] for tier in sorted(heard)]
        return tuple(each for each in reports if each != TierReport(tier=each.tier))

    def _count(
        self, name: tuple[int, str, int], oks: list[bool]
    ) -> tuple[bool, ...] | None:
        """Count the report of a process; return the outcome if it was the last one."""
        outcome = self._open.setdefault(name, _Outcome(0, oks))
        outcome.oks = [a and b for a, b in zip(outcome.oks, oks, strict=True)]
        outcome.num_reports += 1
        if outcome.num_reports < self._num_processes:
            return None
        del self._open[name]
        return tuple(outcome.oks)


def _keys_of(text: str) -> tuple[BlockKey, ...]:
    raw = base64.b64decode(text)
    starts = range(0, len(raw), KEY_BYTES)
    return tuple([raw[start : start + KEY_BYTES] for start in starts])
