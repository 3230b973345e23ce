"""`cache_policy="auto"`: requests choose the policy, by the shadows of all that may.

It serves with the first of `CANDIDATES`. Every `CHECK_EVERY` requests it compares the
hits of the shadows of the serving size, and adds up the lead of each over the policy
that serves, since it was last behind (CUSUM: Page, 1954). A policy takes over once that
is worth a change-over, after which the host fits neither policy for a while:

- in at least `PATIENCE` comparisons,
- by as many blocks as `SHARE_OF_HOST` of the host and `MIN_SHARE` of the blocks asked
  for since,
- and, where shadows see a sample, by twice the standard error of the difference. All
  see the same keys, so that this is less than the error of each.

Only requests count, not the time: processes that see the same requests change their
policies alike.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterator, Sequence

from jaxkv._util import percent_text
from jaxkv._util.settings import ConfigError
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.rules import OffloadRules, RuleSettings, check_seen, unseen_rules
from jaxkv.scheduling.whatif.key_sample import NUM_GROUPS
from jaxkv.scheduling.whatif.shadows import Shadow, Shadows
from jaxkv.search.groups import GroupSpec

CANDIDATES = ("hazard", "lru", "slru")
"""The policies that may serve. The first one begins; it is best more often than not.
`arc` and `arc_fixed` have no `Policy.take_over`."""

CHECK_EVERY = 64
"""Requests from one comparison to the next."""

PATIENCE = 8
"""Comparisons in which a policy must be ahead."""

SHARE_OF_HOST = 0.05
"""By how many blocks it must be ahead, as a part of the host, ..."""

MIN_SHARE = 0.005
"""... and as a part of the blocks asked for since."""

_ASKED = "asked"
_ERRORS = 2.0

_LOG = logging.getLogger("jaxkv")


def contradictions(rules: RuleSettings) -> Iterator[str]:
    """Yield why rules exclude "auto", and what to do instead."""
    for text in unseen_rules(f"cache_policy={AUTO!r}", rules):
        yield f"{text} Name a policy."


def rules_of_auto(rules: OffloadRules, groups: tuple[GroupSpec, ...]) -> OffloadRules:
    """Return the rules that "auto" sets; raise ValueError if they exclude it."""
    if faults := list(contradictions(rules)):
        raise ConfigError(faults)
    check_seen(f"cache_policy={AUTO!r}", groups)
    return dataclasses.replace(rules, pause_unused_stores=rules.mode == "eager")


def with_candidates(shadows: Sequence[Shadow]) -> tuple[Shadow, ...]:
    """Add the shadows of the candidates that are not among those asked for."""
    candidates = (Shadow(policy, 1.0) for policy in CANDIDATES)
    return tuple(dict.fromkeys([*shadows, *candidates]))


@dataclasses.dataclass
class _Lead:
    """The lead of a policy over the serving one since it last was behind, by groups."""

    num_looks: int = 0
    num_ahead: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)
    num_asked: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)

    def plus(self, hits: list[int], served: list[int], num_asked: list[int]) -> _Lead:
        """Add the hits of the policy and of the serving one since the last look."""
        rows = zip(self.num_ahead, hits, served, strict=True)
        num_ahead = [before + num - num_served for before, num, num_served in rows]
        if sum(num_ahead) <= 0:
            return _Lead()
        num_asked = list(map(operator.add, self.num_asked, num_asked))
        return _Lead(self.num_looks + 1, num_ahead, num_asked)


class PolicyChoice:
    """Chooses the serving policy, by the candidates' shadows of the serving size."""

    def __init__(self, shadows: Shadows) -> None:
        self.policy = CANDIDATES[0]
        self.num_changes = 0
        self._shadows = shadows
        self._num_requests = 0
        self._seen = self._counts()
        self._leads = {name: _Lead() for name in CANDIDATES}

    def count_found(self) -> int:
        """Count the tokens that the shadows of all have found so far."""
        return sum(map(self._shadows.num_found_tokens_of, CANDIDATES))

    def choose(self) -> str | None:
        """Choose another policy, None to keep this one; call it after each request."""
        num_requests = self._shadows.num_requests
        if num_requests - self._num_requests < CHECK_EVERY:
            return None
        self._num_requests = num_requests
        seen, self._seen = self._seen, self._counts()
        since = {
            name: list(map(operator.sub, now, seen[name]))
            for name, now in self._seen.items()
        }
        for name, lead in self._leads.items():
            lead = lead.plus(since[name], since[self.policy], since[_ASKED])
            self._leads[name] = lead
        ready = [name for name in CANDIDATES if self._is_worth_it(self._leads[name])]
        if not ready:
            return None
        best = max(ready, key=lambda name: sum(self._leads[name].num_ahead))
        lead = self._leads[best]
        _LOG.info(
            "%s in place of %s from now on: of what the last %d requests asked of the "
            "host it would have found %s more",
            best,
            self.policy,
            lead.num_looks * CHECK_EVERY,
            percent_text(sum(lead.num_ahead), sum(lead.num_asked)),
        )
        self.policy = best
        self.num_changes += 1
        self._leads = {name: _Lead() for name in CANDIDATES}
        return best

    def _counts(self) -> dict[str, list[int]]:
        """Return what each has found, and what was asked for, so far."""
        shadows = self._shadows
        counts = {name: shadows.num_found_of_sample(name) for name in CANDIDATES}
        return counts | {_ASKED: shadows.num_asked_of_sample}

    def _is_worth_it(self, lead: _Lead) -> bool:
        """Whether a lead is worth a change-over."""
        sample, num_ahead = self._shadows.sample, sum(lead.num_ahead)
        rate = 1 if sample is None else 1 << sample.bits
        needed = max(
            SHARE_OF_HOST * self._shadows.num_host_blocks,
            MIN_SHARE * sum(lead.num_asked) * rate,
        )
        if sample is not None:
            needed = max(needed, _ERRORS * sample.error(lead.num_ahead, lead.num_asked))
        return lead.num_looks >= PATIENCE and num_ahead * rate > needed
