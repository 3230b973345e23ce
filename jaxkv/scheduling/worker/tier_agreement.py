"""Agreement between the processes that serve one model on moves below the host."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.scheduling.protocol import TierReport
from jaxkv.scheduling.worker.agreement import check_same_plans
from jaxkv.scheduling.worker.exchange import Exchange
from jaxkv.types import KEY_BYTES, BlockKey

# Max listed keys per step and tier: jax's coordination service must pass them all on.
KEYS_PER_STEP = 1024
# The fields of a report with the outcomes of ended moves.
_KINDS = "fetched", "written", "probed"


class TierAgreement:
    """Makes each fetch, write and probe end in the same step in all processes.

    In each step every process sends its moves that ended since the previous step; all
    processes receive them in the same later step. A move succeeds for a block only if
    it did in all processes. Only one process lists the store; it sends the keys.
    """

    def __init__(self, exchange: Exchange, num_processes: int) -> None:
        self._exchange = exchange
        self._num_processes = num_processes
        self._steps: collections.deque[int] = collections.deque()
        # By tier, kind and event of a move: the outcome in each process that sent one.
        self._outcomes: dict[tuple[int, str, int], list[str]] = {}

    def send(
        self, reports: Sequence[TierReport], step: int, plan: Mapping[str, str]
    ) -> None:
        """Send this process's reports of a step, and facts of its plan; never wait."""
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
            nums = report.num_full, report.num_down, report.latencies_s
            rows.append([report.tier, ended, *listing, *nums])
        self._exchange.send(json.dumps([plan, rows]), step)
        self._steps.append(step)

    def receive(self, last: int) -> tuple[TierReport, ...]:
        """Wait for reports up to step `last`; return moves that all have reported."""
        merged: dict[int, TierReport] = {}
        while self._steps and self._steps[0] <= last:
            step = self._steps.popleft()
            subject = f"the moves below the host that ended by step {step}"
            texts = map(json.loads, self._exchange.receive(subject))
            plans, all_rows = zip(*texts, strict=True)
            check_same_plans(step, "planned", plans, self._exchange.process)
            for rows in all_rows:
                for tier, ended, keys, deleted, listed, bound, *nums in rows:
                    num_full, num_down, latencies_s = nums
                    report = merged.get(tier, TierReport(tier=tier))
                    for kind, event, oks in ended:
                        outcome = self._join((tier, kind, event), oks)
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
                        num_down=report.num_down + num_down,
                        latencies_s=tuple(latencies_s or ()) or report.latencies_s,
                    )
        reports = (merged[tier] for tier in sorted(merged))
        return tuple(r for r in reports if r != TierReport(tier=r.tier))

    def _join(self, move: tuple[int, str, int], oks: str) -> tuple[bool, ...] | None:
        """Add a process's outcome; with the last one, return each block's outcome."""
        outcomes = self._outcomes.setdefault(move, [])
        outcomes.append(oks)
        if len(outcomes) < self._num_processes:
            return None
        del self._outcomes[move]
        return tuple("0" not in column for column in zip(*outcomes, strict=True))


def _keys_of(text: str) -> tuple[BlockKey, ...]:
    raw = base64.b64decode(text)
    starts = range(0, len(raw), KEY_BYTES)
    return tuple([raw[start : start + KEY_BYTES] for start in starts])
