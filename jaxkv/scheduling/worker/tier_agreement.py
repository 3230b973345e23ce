"""Agreement between the processes that serve one model on blocks below the host."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxkv.scheduling.protocol import TierReport
from jaxkv.scheduling.worker.exchange import Exchange
from jaxkv.types import KEY_BYTES, BlockKey

# Keys of a listing per step and tier: all of them pass jax's coordination service.
KEYS_PER_STEP = 1024
# The fields of a report that name moves which have ended.
_KINDS = "fetched", "written", "probed"


class TierAgreement:
    """Makes a fetch, a write or a probe end in all processes in the same step.

    In each step every process sends what has ended there since the last; some steps
    later all processes receive it. A block has arrived, or is present, if it has in all
    processes. One process alone lists the store and sends what it finds.
    """

    def __init__(self, exchange: Exchange, num_processes: int) -> None:
        self._exchange = exchange
        self._num_processes = num_processes
        self._steps: collections.deque[int] = collections.deque()
        # The outcomes of each move in the processes that have reported it.
        self._open: dict[tuple[int, str, int], list[str]] = {}

    def send(self, reports: Sequence[TierReport], step: int) -> None:
        """Send what has ended here, with `KEYS_PER_STEP` keys at most; never waits."""
        rows = []
        for report in reports:
            ended = [
                [kind, event, "".join("01"[int(ok)] for ok in oks)]
                for kind in _KINDS
                for event, oks in getattr(report, kind)
            ]
            keys = [
                base64.b64encode(b"".join(listed)).decode()
                for listed in (report.found, report.gone)
            ]
            listing = *keys, report.listed, report.bound
            rows.append([report.tier, ended, *listing, report.num_full])
        self._exchange.send(json.dumps(rows), step)
        self._steps.append(step)

    def receive(self, last: int) -> tuple[TierReport, ...]:
        """Wait for all reports up to a step; return the moves that ended everywhere."""
        merged: dict[int, TierReport] = {}
        while self._steps and self._steps[0] <= last:
            step = self._steps.popleft()
            subject = f"what tiers below the host have sent and got by step {step}"
            for text in self._exchange.receive(subject):
                rows = json.loads(text)
                for tier, ended, keys, deleted, listed, bound, num_full in rows:
                    report = merged.get(tier, TierReport(tier=tier))
                    for kind, event, oks in ended:
                        outcome = self._count((tier, kind, event), oks)
                        if outcome is not None:
                            outcomes: Any = *getattr(report, kind), (event, outcome)
                            report = dataclasses.replace(report, **{kind: outcomes})
                    merged[tier] = dataclasses.replace(
                        report,
                        found=report.found + _keys_of(keys),
                        gone=report.gone + _keys_of(deleted),
                        listed=report.listed if listed is None else listed,
                        bound=report.bound if bound is None else tuple(bound),
                        num_full=max(report.num_full, num_full),
                    )
        reports = (merged[tier] for tier in sorted(merged))
        return tuple(r for r in reports if r != TierReport(tier=r.tier))

    def _count(self, name: tuple[int, str, int], oks: str) -> tuple[bool, ...] | None:
        """Add a process's outcome; return the joint one after the last process."""
        outcomes = self._open.setdefault(name, [])
        outcomes.append(oks)
        if len(outcomes) < self._num_processes:
            return None
        del self._open[name]
        return tuple("0" not in column for column in zip(*outcomes, strict=True))


def _keys_of(text: str) -> tuple[BlockKey, ...]:
    raw = base64.b64decode(text)
    starts = range(0, len(raw), KEY_BYTES)
    return tuple([raw[start : start + KEY_BYTES] for start in starts])
