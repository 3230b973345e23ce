"""`cache_policy="auto"`: requests choose the policy, by the shadows of all that may.

It serves with the first of `CANDIDATES`. Once in `CHECK_EVERY` requests it looks what
the shadows of the size that serves have found, and adds up by how much each is ahead of
the policy that serves, from the last time on that it was not (CUSUM: Page, 1954). A
policy takes over once that is worth a change-over, after which the host is for a while
neither what the one nor what the other would have made of it:

- in at least `PATIENCE` looks,
- by as many blocks as `SHARE_OF_HOST` of the host, and `LEAST_SHARE` of what was asked
  for meanwhile,
- and, where shadows see a sample, by twice the standard error of the difference. All
  see the same keys, so that this is less than the error of each.

All that counts requests, none of it the time: processes that see the same requests
choose the same policies, at the same requests.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterator, Sequence

from jaxkv._util import percent_text
from jaxkv._util.settings import ConfigError
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.rules import OffloadRules, RuleSettings
from jaxkv.scheduling.whatif.key_sample import NUM_GROUPS
from jaxkv.scheduling.whatif.shadows import Shadow, Shadows
from jaxkv.search.groups import FullAttention, GroupSpec

CANDIDATES = ("hazard", "lru", "slru")
"""The policies that may serve, first the one that begins, which is best more often than
not. `arc` and `arc_fixed` are none: they have no `Policy.take_over`."""

CHECK_EVERY = 64
"""Requests from one look to the next."""

PATIENCE = 8
"""How many looks a policy must be ahead."""

SHARE_OF_HOST = 0.05
"""By how many blocks, of those of the host, ..."""

LEAST_SHARE = 0.005
"""... and of those that were asked for meanwhile."""

_ASKED = "asked"
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


def rules_of_auto(rules: OffloadRules, groups: Sequence[GroupSpec]) -> OffloadRules:
    """Check that "auto" can serve; return the rules with what it sets.

    Raises:
        ConfigError: The rules exclude it.
        ValueError: Shadows do not see all of the model.
    """
    if faults := list(contradictions(rules)):
        raise ConfigError(faults)
    if len(groups) > 1 or not isinstance(groups[0], FullAttention):
        raise ValueError(
            f"cache_policy={AUTO!r} needs a model with one group of layers, of full "
            f"attention: {groups} read other parts of a prefix, which shadows do not "
            "see. Name a policy."
        )
    return dataclasses.replace(rules, pause_unused_stores=rules.mode == "eager")


def with_candidates(shadows: Sequence[Shadow]) -> tuple[Shadow, ...]:
    """Add the shadows of the candidates that are not among those asked for."""
    return tuple(dict.fromkeys([*shadows, *(Shadow(own, 1.0) for own in CANDIDATES)]))


@dataclasses.dataclass
class _Lead:
    """How far a policy is ahead of the one that serves, since it last was not.

    Attributes:
        num_looks: Looks since then.
        more: By how many blocks of the sample, by its parts.
        asked: What was asked for meanwhile, likewise.
    """

    num_looks: int = 0
    more: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)
    asked: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_GROUPS)

    def plus(self, own: list[int], served: list[int], asked: list[int]) -> _Lead:
        """Add what was found and asked for since the last look."""
        rows = zip(self.more, own, served, strict=True)
        more = [before + one - other for before, one, other in rows]
        if sum(more) <= 0:
            return _Lead()
        asked = list(map(operator.add, self.asked, asked))
        return _Lead(self.num_looks + 1, more, asked)


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
        self._seen = self._counts()
        self._leads = {name: _Lead() for name in CANDIDATES}

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
        seen, self._seen = self._seen, self._counts()
        since = {
            name: list(map(operator.sub, now, seen[name]))
            for name, now in self._seen.items()
        }
        others = since[self.policy], since[_ASKED]
        for name, lead in self._leads.items():
            self._leads[name] = lead.plus(since[name], *others)
        ready = [name for name in CANDIDATES if self._is_worth_it(self._leads[name])]
        if not ready:
            return None
        best = max(ready, key=lambda name: sum(self._leads[name].more))
        lead = self._leads[best]
        _LOG.info(
            "%s in place of %s from now on: of what the last %d requests asked of the "
            "host it would have found %s more",
            best,
            self.policy,
            lead.num_looks * CHECK_EVERY,
            percent_text(sum(lead.more), sum(lead.asked)),
        )
        self.policy = best
        self.num_changes += 1
        self._leads = {name: _Lead() for name in CANDIDATES}
        return best

    def _counts(self) -> dict[str, list[int]]:
        """Give what was found by each, and asked for, so far."""
        shadows = self._shadows
        found = {name: shadows.num_found_of_sample(name) for name in CANDIDATES}
        return found | {_ASKED: shadows.num_asked_of_sample}

    def _is_worth_it(self, lead: _Lead) -> bool:
        """Tell whether a lead is worth a change-over."""
        sample, more = self._shadows.sample, sum(lead.more)
        rate = 1 if sample is None else 1 << sample.bits
        needed = max(
            SHARE_OF_HOST * self._shadows.num_host_blocks,
            LEAST_SHARE * sum(lead.asked) * rate,
        )
        if sample is not None:
            needed = max(needed, _ERRORS * sample.error(lead.more, lead.asked))
        return lead.num_looks >= PATIENCE and more * rate > needed
