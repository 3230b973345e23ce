"""What each finished request asked for, found and waited for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jaxkv.scheduling.boundary import Boundary
from jaxkv.scheduling.listening import End, Listener, Start
from jaxkv.scheduling.protocol import Request

_LOG = logging.getLogger("jaxkv.requests")
Summary: TypeAlias = dict[str, Any]


def log_summary(summary: Summary) -> None:
    """Log a finished request as one line of JSON."""
    _LOG.info(json.dumps(summary))


class RequestSummaries(Listener):
    """Passes on what each request asked for, what each tier had, and its wait."""

    def __init__(
        self,
        below: Sequence[Boundary],
        clock: Callable[[], float],
        sinks: Sequence[Callable[[Summary], None]],
    ) -> None:
        self._below, self._clock, self._sinks = below, clock, sinks
        # Of each request: the time of its first lookup; whether it waits for the load
        # of its last one; its summary, once it has begun.
        self._asked_s: dict[str, float] = {}
        self._is_awaited: dict[str, bool] = {}
        self._summaries: dict[str, Summary] = {}
        self._loading: set[str] = set()  # Requests in their first load.

    def looked_up(
        self,
        request: Request,
        num_computed_tokens: int,
        num_tokens: int | None,
        is_awaited: bool,
        start_s: float,
    ) -> None:
        """Keep the time of a request's first lookup."""
        self._asked_s.setdefault(request.request_id, start_s)
        self._is_awaited[request.request_id] = is_awaited

    def begun(self, start: Start) -> None:
        """Count the tokens that each tier had, and the wait so far."""
        name, num_tokens = start.request.request_id, start.request.num_tokens
        num_local, num_external = start.num_local or 0, start.num_external
        # Tokens from a tier have passed through all tiers above it.
        nums = [num_external]
        for boundary in self._below:
            nums.append(min(nums[-1], boundary.num_fetched_tokens.get(name, 0)))
        tiers = ("host", *(boundary.name for boundary in self._below))
        hits = {
            tier: num - num_lower
            for tier, num, num_lower in zip(tiers, nums, [*nums[1:], 0], strict=True)
        }
        self._summaries[name] = {
            "request": name,
            "tokens": num_tokens,
            "device": num_local,
            **hits,
            "computed": num_tokens - num_local - num_external,
            "waited_s": self._waited_s(name),
        }
        if start.has_load:
            self._loading.add(name)

    def loaded(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Count the wait for a request's first load, and its tokens if that failed."""
        for name in self._loading.intersection((*finished, *failed)):
            self._loading.remove(name)
            summary = self._summaries[name]
            if self._is_awaited.get(name):
                summary["waited_s"] = self._waited_s(name)
            if name in failed:
                summary["computed"] = summary["tokens"] - summary["device"]
                summary["load_failed"] = True

    def finished(self, end: End) -> None:
        """Pass on the summary of a request that has got blocks."""
        name = end.request.request_id
        self._asked_s.pop(name, None)
        self._is_awaited.pop(name, None)
        self._loading.discard(name)
        if (summary := self._summaries.pop(name, None)) is not None:
            for sink in self._sinks:
                sink(dict(summary))

    def _waited_s(self, name: str) -> float:
        now_s = self._clock()
        return round(now_s - self._asked_s.get(name, now_s), 6)
