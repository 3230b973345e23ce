"""What the shadows of a tier say: what other memory or another policy would give."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from jaxkv._util import percent_text, rounded_size, time_text
from jaxkv.scheduling.whatif.shadows import OFF, ShadowCount
from jaxkv.scheduling.whatif.speeds import Speeds

ENOUGH = 0.9
"""The share of what the best size gives from which a smaller one is recommended."""

_LOG = logging.getLogger("jaxkv")
_LOG_EVERY_MS = 3_600_000
_FEW_POINTS = 1.0  # What less memory may cost.
_LEAST_POINTS = 0.1


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What a host tier found, and what others would have found of the same traffic.

    Attributes:
        policy: The policy that serves.
        num_blocks: Its host blocks.
        block_bytes: Bytes of one; 0 if that is not known.
        num_requests: Requests.
        num_tokens: Tokens of all these.
        num_device_tokens: Those that the device had.
        num_host_tokens: Those that the host had beyond that.
        num_asked_tokens: Those that could have been found beyond the device's, in whole
            blocks, and without the last token.
        shadows: What each shadow counted.
        speeds: Those of loads and prefill; None if they are not known.
        block_size: Tokens in a block.
        is_alone: Whether nothing came from tiers below the host: shadows have none.
        num_changes: How often "auto" has changed the policy; None if it is fixed.
    """

    policy: str
    num_blocks: int
    block_bytes: int
    num_requests: int
    num_tokens: int
    num_device_tokens: int
    num_host_tokens: int
    num_asked_tokens: int
    shadows: tuple[ShadowCount, ...]
    speeds: Speeds | None
    block_size: int
    is_alone: bool = True
    num_changes: int | None = None

    def since(self, earlier: Outlook) -> Outlook:
        """Leave out what an earlier outlook of the same engine has."""
        return dataclasses.replace(
            self,
            num_requests=self.num_requests - earlier.num_requests,
            num_tokens=self.num_tokens - earlier.num_tokens,
            num_device_tokens=self.num_device_tokens - earlier.num_device_tokens,
            num_host_tokens=self.num_host_tokens - earlier.num_host_tokens,
            num_asked_tokens=self.num_asked_tokens - earlier.num_asked_tokens,
            num_changes=None
            if self.num_changes is None
            else self.num_changes - (earlier.num_changes or 0),
            shadows=tuple(
                own._replace(
                    num_asked_tokens=own.num_asked_tokens - old.num_asked_tokens,
                    num_found_tokens=own.num_found_tokens - old.num_found_tokens,
                    num_loads=own.num_loads - old.num_loads,
                    num_stored=own.num_stored - old.num_stored,
                    num_evicted=own.num_evicted - old.num_evicted,
                    error_tokens=math.sqrt(
                        max(own.error_tokens**2 - old.error_tokens**2, 0.0)
                    ),
                )
                for own, old in zip(self.shadows, earlier.shadows, strict=True)
            ),
        )

    def points(self, shadow: ShadowCount) -> float:
        """Give the percentage of all tokens that a shadow found on the host."""
        return 100 * shadow.share * self.num_asked_tokens / max(self.num_tokens, 1)

    def error_points(self, shadow: ShadowCount) -> float:
        """Give the standard error of that, in points."""
        asked = max(shadow.num_asked_tokens, 1)
        share = self.num_asked_tokens / max(self.num_tokens, 1)
        return 100 * shadow.error_tokens / asked * share

    def saved_s(self, shadow: ShadowCount) -> float | None:
        """Give the seconds of prefill that it saves a request; None if not known.

        Loads are taken to be of the same length.
        """
        if self.speeds is None or not self.block_bytes:
            return None
        if not shadow.num_loads or not self.num_requests:
            return 0.0
        num_tokens = shadow.num_found_tokens / shadow.num_loads
        num_bytes = num_tokens / self.block_size * self.block_bytes
        prefill_s = self.speeds.prefill_s(None, 0, num_tokens)
        scale = self.num_asked_tokens / max(shadow.num_asked_tokens, 1)
        saved_s = float(self.speeds.saved_s(prefill_s, num_bytes))
        return scale * shadow.num_loads * saved_s / self.num_requests

    @property
    def serving(self) -> ShadowCount:
        """What serves, as its own shadow counts it if there is one."""
        for shadow in self.shadows:
            if (shadow.policy, shadow.num_blocks) == (self.policy, self.num_blocks):
                return shadow
        return ShadowCount(
            self.policy, self.num_blocks, self.num_asked_tokens, self.num_host_tokens
        )

    @property
    def sentence(self) -> str:
        """Say in a sentence what more memory or another policy would give."""
        device = percent_text(self.num_device_tokens, self.num_tokens)
        host = percent_text(self.num_host_tokens, self.num_tokens)
        text = (
            f"of {self.num_tokens:,} tokens of {self.num_requests:,} requests the "
            f"device had {device} and the host, {self._size(self.num_blocks)} with "
            f"{self.policy}{self._chosen}, {host}"
        )
        if not self.is_alone:
            text += " with the tiers below it. Without those"
        if not self.num_tokens:
            return "no request has looked for its prefix yet"
        own, found = self.serving, []
        alike = [each for each in self.shadows if each.policy == self.policy]
        larger = [each for each in alike if self._gains(each) and each != own]
        larger = [each for each in larger if each.num_blocks > own.num_blocks]
        if larger:
            most = max(map(self._gain, larger))
            enough = [each for each in larger if self._gain(each) >= ENOUGH * most]
            row = min(enough, key=lambda each: each.num_blocks)
            more = self._size(row.num_blocks - own.num_blocks)
            found.append(f"{more} more would find {self._change(row)}")
        others = [
            each
            for each in self.shadows
            if each.num_blocks == own.num_blocks and self._gains(each)
        ]
        if others:
            row = max(others, key=self._gain)
            found.append(f"{row.policy} in place of {self.policy} {self._change(row)}")
        smaller = [
            each
            for each in alike
            if each.num_blocks < own.num_blocks and self._gain(each) > -_FEW_POINTS
        ]
        if smaller and not larger:
            row = min(smaller, key=lambda each: each.num_blocks)
            less = self._size(own.num_blocks - row.num_blocks)
            found.append(f"{less} less would find {self._change(row)}")
        if not found:
            found.append("no other that is shadowed would find more")
        return f"{text}{'; ' if self.is_alone else ', '}{'; '.join(found)}"

    def __str__(self) -> str:
        """Show all shadows as a table, and the sentence under it."""
        rows = [("policy", "host", "found", "error", "saved a request")]
        for own in self.shadows:
            saved_s = self.saved_s(own)
            rows.append(
                (
                    own.policy,
                    self._size(own.num_blocks) if own.num_blocks else "none",
                    f"{self.points(own):.1f}%",
                    f"{self.error_points(own):.1f}",
                    "?" if saved_s is None else time_text(saved_s),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place < 1 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(
            [*lines, "", f"{self.sentence[0].upper()}{self.sentence[1:]}."]
        )

    @property
    def _chosen(self) -> str:
        """Say if the requests have chosen the policy, and how often."""
        if self.num_changes is None:
            return ""
        times = "change" if self.num_changes == 1 else "changes"
        return f" (auto, {self.num_changes} {times})"

    def _gain(self, shadow: ShadowCount) -> float:
        return self.points(shadow) - self.points(self.serving)

    def _gains(self, shadow: ShadowCount) -> bool:
        """Whether a shadow finds more, by more than chance."""
        least = max(_LEAST_POINTS, 2 * self.error_points(shadow))
        return shadow.policy != OFF and self._gain(shadow) > least

    def _change(self, shadow: ShadowCount) -> str:
        gain, error = self._gain(shadow), self.error_points(shadow)
        way = "more" if gain >= 0 else "less"
        text = f"{abs(gain):.1f}"
        text += f" ± {error:.1f} points {way}" if error else f" points {way}"
        saved_s, own_s = self.saved_s(shadow), self.saved_s(self.serving)
        if gain > 0 and saved_s is not None and own_s is not None and saved_s > own_s:
            text += f", saving {time_text(saved_s - own_s)} of prefill a request"
        return text

    def _size(self, num_blocks: int) -> str:
        if self.block_bytes:
            return rounded_size(num_blocks * self.block_bytes)
        return f"{num_blocks:,} blocks"


class OutlookLog:
    """Logs an outlook once an hour, of that hour, and one of all at the end.

    Args:
        look: Returns the current outlook. It must not hold a reference to the
            scheduler, which could not be freed then.
    """

    def __init__(self, look: Callable[[], Outlook]) -> None:
        self._look = look
        self._before: Outlook | None = None
        self._next_ms: int | None = None

    def note(self, now_ms: int) -> None:
        """Take note of the time; log what is due."""
        if self._next_ms is None:
            self._next_ms = now_ms + _LOG_EVERY_MS
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + _LOG_EVERY_MS
        now = self._look()
        since = now if self._before is None else now.since(self._before)
        self._before = now
        _LOG.info("in the last hour, %s", since.sentence)

    def close(self) -> None:
        """Log what there is to say in the end."""
        now = self._look()
        if now.num_requests:
            _LOG.info("all in all, %s", now.sentence)
