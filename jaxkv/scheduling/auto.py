"""`cache_policy="auto"`: requests choose the policy, by the shadows of all that may.

It serves with the first of `CANDIDATES`. Once in `CHECK_EVERY` requests it looks what
each shadow of the size that serves has found lately; one that has been ahead of the
policy that serves `PATIENCE` times in a row takes its place. It is ahead if it has
found more by at least `LEAST_SHARE` of what was asked for, and by twice the standard
error of the difference, where shadows see a sample. Sampled shadows see the same keys,
so that the error of their difference is less than that of each.

All that counts requests, none of it the time: processes that see the same requests
choose the same policies, at the same requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from jaxkv._util import percent_text
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.rules import RuleSettings
from jaxkv.scheduling.shadows import Shadow, Shadows
from jaxkv.search.groups import FullAttention, GroupSpec

CANDIDATES = ("hazard", "lru", "slru")
"""The policies that may serve, the one that begins first. `arc` and `arc_fixed` are not
among them: what their samples say is further off than its error."""

CHECK_EVERY = 64
"""Requests from one look to the next."""

PATIENCE = 8
"""How many looks in a row a policy must be ahead."""

LEAST_SHARE = 0.005
"""Of what was asked for, how much more it must have found."""

_KEPT = 15 / 16  # Of the counts, from one look to the next.
_ERRORS = 2.0

_LOG = logging.getLogger("jaxkv")


def contradictions(rules: RuleSettings) -> Iterator[str]:
    """Say which rules exclude `auto`, and what to do instead."""
    for word, serves in (
        ("retention", not rules.retention),
        ("blocks_per_host_block", rules.blocks_per_host_block == 1),
    ):
        if not serves:
            yield (
                f"cache_policy={AUTO!r} and {word}={getattr(rules, word)} exclude one "
                "another: shadows, by which it chooses, know neither priorities nor "
                "rows of blocks. Name a policy."
            )


def check_auto_groups(groups: Sequence[GroupSpec]) -> None:
    """Refuse models of which shadows do not see all.

    Raises:
        ValueError: With what to do instead.
    """
    if len(groups) > 1 or not isinstance(groups[0], FullAttention):
        raise ValueError(
            f"cache_policy={AUTO!r} needs a model with one group of layers, of full "
            f"attention: {groups} read other parts of a prefix, which shadows do not "
            "see. Name a policy."
        )


def with_candidates(shadows: Sequence[Shadow]) -> tuple[Shadow, ...]:
    """Add the shadows of the candidates that are not among those asked for."""
    return tuple(dict.fromkeys([*shadows, *(Shadow(own, 1.0) for own in CANDIDATES)]))


class PolicyChoice:
    """Chooses the policy that serves.

    Args:
        shadows: Among them those of the candidates, of the size that serves.

    Attributes:
        policy: The policy that serves.
        num_changes: How often another has taken its place.
    """

    def __init__(self, shadows: Shadows) -> None:
        self.policy = CANDIDATES[0]
        self.num_changes = 0
        self._shadows = shadows
        self._num_requests = 0
        # What was found and asked for lately, by the parts of the sample.
        self._seen = {name: self._found(name) for name in CANDIDATES}
        self._seen_asked = shadows.num_asked_of_sample
        self._recent = {name: [0.0] * len(own) for name, own in self._seen.items()}
        self._asked = [0.0] * len(self._seen_asked)
        self._num_ahead = dict.fromkeys(CANDIDATES, 0)

    def count_found(self) -> int:
        """Count the tokens that the shadows of all have found so far."""
        return sum(map(self._shadows.num_found_tokens_of, CANDIDATES))

    def choose(self) -> str | None:
        """Choose the policy that serves from now on; None for the same.

        To be called after each request.
        """
        num_requests = self._shadows.num_requests
        if num_requests - self._num_requests < CHECK_EVERY:
            return None
        self._num_requests = num_requests
        asked = self._shadows.num_asked_of_sample
        self._asked = _decayed(self._asked, self._seen_asked, asked)
        self._seen_asked = asked
        for name in CANDIDATES:
            found = self._found(name)
            own = _decayed(self._recent[name], self._seen[name], found)
            self._recent[name], self._seen[name] = own, found
        leads = {name: self._lead(name) for name in CANDIDATES if name != self.policy}
        for name, lead in leads.items():
            self._num_ahead[name] = self._num_ahead[name] + 1 if lead > 0.0 else 0
        ready = [name for name in leads if self._num_ahead[name] >= PATIENCE]
        if not ready:
            return None
        best = max(ready, key=leads.__getitem__)
        total = sum(self._asked)
        _LOG.info(
            "%s in place of %s from now on: of what was asked of the host lately it "
            "would have found %s in place of %s",
            best,
            self.policy,
            percent_text(sum(self._recent[best]), total),
            percent_text(sum(self._recent[self.policy]), total),
        )
        self.policy = best
        self.num_changes += 1
        self._num_ahead = dict.fromkeys(CANDIDATES, 0)
        return best

    def _found(self, name: str) -> list[int]:
        return self._shadows.num_found_of_sample(name)

    def _lead(self, name: str) -> float:
        """Give the keys by which a policy is ahead of what is needed; 0.0 if not."""
        own, served = self._recent[name], self._recent[self.policy]
        more = [one - other for one, other in zip(own, served, strict=True)]
        needed = LEAST_SHARE * sum(self._asked)
        if self._shadows.sample is not None:
            error = self._shadows.sample.error(more, self._asked)
            needed = max(needed, _ERRORS * error / (1 << self._shadows.sample.bits))
        return max(sum(more) - needed, 0.0)


def _decayed(
    recent: Sequence[float], seen: Sequence[int], now: Sequence[int]
) -> list[float]:
    """Let counts fade, and add what has come since the last look."""
    rows = zip(recent, seen, now, strict=True)
    return [_KEPT * own + new - old for own, old, new in rows]
