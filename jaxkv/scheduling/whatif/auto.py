"""`cache_policy="auto"`: shadows of the candidate policies choose the serving one.

The first of `CANDIDATES` serves first. Every `CHECK_EVERY` requests, the hits of the
candidates' shadows of the serving size are compared. A candidate's lead over the
serving policy is summed since the candidate was last behind (CUSUM: Page, 1954). A
change-over costs hits for a while, so a candidate takes over only once it has led:

- in at least `PATIENCE` comparisons,
- by more blocks than `SHARE_OF_HOST` of the host, and than `MIN_SHARE` of the blocks
  looked up since,
- and, if shadows see a sample, by twice the standard error of the difference. All see
  the same keys, so this error is less than each shadow's.

Decisions depend on requests alone, not on time: processes that see the same requests
change their policies alike.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterator, Sequence

from jaxkv._util import percent_text
from jaxkv._util.settings import ConfigError, Fault
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.rules import (
    OffloadRules,
    RuleSettings,
    check_shadows,
    shadow_conflicts,
)
from jaxkv.scheduling.whatif.key_sample import NUM_GROUPS
from jaxkv.scheduling.whatif.shadows import Shadow, Shadows
from jaxkv.search.groups import GroupSpec

CANDIDATES = ("hazard", "lru", "slru")
"""The policies that may serve. The first one begins, as it is the best in most traces.
`arc` and `arc_fixed` are excluded: they have no `Policy.take_over`."""

CHECK_EVERY = 64
"""Requests between comparisons."""

PATIENCE = 8
"""Comparisons in which a policy must be ahead."""

SHARE_OF_HOST = 0.05
"""The minimum lead, as a share of the host's blocks."""

MIN_SHARE = 0.005
"""The minimum lead, as a share of the blocks looked up since the lead began."""

_ASKED = "asked"  # The key of looked-up blocks in `_counts`, next to the policies.

_LOG = logging.getLogger("jaxkv")


def contradictions(rules: RuleSettings) -> Iterator[Fault]:
    """Yield why rules exclude "auto", and the remedy."""
    return shadow_conflicts("cache_policy", AUTO, rules, " Name a policy.")


def rules_of_auto(rules: OffloadRules, groups: tuple[GroupSpec, ...]) -> OffloadRules:
    """Return the rules that "auto" sets; raise ValueError if they exclude it."""
    if faults := list(contradictions(rules)):
        raise ConfigError(faults)
    check_shadows("cache_policy", AUTO, groups)
    return dataclasses.replace(rules, pause_unused_stores=rules.mode == "eager")


def with_candidates(shadows: Sequence[Shadow]) -> tuple[Shadow, ...]:
    """Return the configured shadows, and shadows of candidates missing there."""
    candidates = (Shadow(policy, 1.0) for policy in CANDIDATES)
    return tuple(dict.fromkeys([*shadows, *candidates]))


@dataclasses.dataclass
class _Lead:
    """A policy's lead over the serving one since it was last behind, by key group."""

    num_comparisons: int = 0
    num_ahead: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)
    num_asked: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)

    def plus(self, hits: list[int], served: list[int], num_asked: list[int]) -> _Lead:
        """Add the hits of both policies, and lookups, since the last comparison."""
        groups = zip(self.num_ahead, hits, served, strict=True)
        num_ahead = [ahead + num - num_served for ahead, num, num_served in groups]
        if sum(num_ahead) <= 0:
            return _Lead()
        num_asked = list(map(operator.add, self.num_asked, num_asked))
        return _Lead(self.num_comparisons + 1, num_ahead, num_asked)


class PolicyChoice:
    """Chooses the serving policy, by the candidates' shadows of the serving size."""

    def __init__(self, shadows: Shadows) -> None:
        self.policy = CANDIDATES[0]
        self.num_changes = 0
        self._shadows = shadows
        self._num_requests = 0
        self._last_counts = self._counts()
        self._leads = {name: _Lead() for name in CANDIDATES}

    def count_found(self) -> int:
        """Return the tokens that all candidates' shadows have found so far, summed."""
        return sum(map(self._shadows.num_found_tokens_of, CANDIDATES))

    def choose(self) -> str | None:
        """Return the policy to change to, or None; call it after each request."""
        num_requests = self._shadows.num_requests
        if num_requests - self._num_requests < CHECK_EVERY:
            return None
        self._num_requests = num_requests
        last_counts, self._last_counts = self._last_counts, self._counts()
        since = {
            name: list(map(operator.sub, now, last_counts[name]))
            for name, now in self._last_counts.items()
        }
        for name, lead in self._leads.items():
            lead = lead.plus(since[name], since[self.policy], since[_ASKED])
            self._leads[name] = lead
        ready = [name for name in CANDIDATES if self._is_enough(self._leads[name])]
        if not ready:
            return None
        best = max(ready, key=lambda name: sum(self._leads[name].num_ahead))
        lead = self._leads[best]
        _LOG.info(
            "%s replaces %s: of the blocks that the last %d requests looked up on the "
            "host, it would have found %s more",
            best,
            self.policy,
            lead.num_comparisons * CHECK_EVERY,
            percent_text(sum(lead.num_ahead), sum(lead.num_asked)),
        )
        self.policy = best
        self.num_changes += 1
        self._leads = {name: _Lead() for name in CANDIDATES}
        return best

    def _counts(self) -> dict[str, list[int]]:
        """Return each candidate's hits and the looked-up blocks, by key group."""
        shadows = self._shadows
        counts = {name: shadows.num_found_of_sample(name) for name in CANDIDATES}
        return counts | {_ASKED: shadows.num_asked_of_sample}

    def _is_enough(self, lead: _Lead) -> bool:
        """Whether a lead is worth a change-over."""
        sample, num_ahead = self._shadows.sample, sum(lead.num_ahead)
        rate = 1 if sample is None else 1 << sample.bits
        needed = max(
            SHARE_OF_HOST * self._shadows.num_host_blocks,
            MIN_SHARE * sum(lead.num_asked) * rate,
        )
        if sample is not None:
            needed = max(needed, 2.0 * sample.error(lead.num_ahead, lead.num_asked))
        return lead.num_comparisons >= PATIENCE and num_ahead * rate > needed
