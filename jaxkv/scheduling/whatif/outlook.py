"""Outlooks: the hits with other host memory or another policy, by the shadows."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv._util import percent_text, rounded_size, time_text
from jaxkv.scheduling.rules import OFF
from jaxkv.scheduling.whatif.shadows import ShadowCount
from jaxkv.scheduling.whatif.speeds import Speeds

ENOUGH = 0.9
"""Recommend the smallest size with at least this share of the largest gain."""

_LOG = logging.getLogger("jaxkv")
_LOG_EVERY_MS = 3_600_000
_MAX_LOST_POINTS = 1.0  # Percentage points that a smaller host may lose.
_MIN_GAINED_POINTS = 0.1


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The hits of the host tier that serves, and of its shadows."""

    policy: str  # The policy that serves.
    num_blocks: int  # The blocks of the serving host tier.
    block_bytes: int  # Bytes per block; 0 if unknown.
    num_requests: int  # Requests that looked up their prefix.
    num_tokens: int  # All tokens of these requests.
    num_device_tokens: int  # The part found on the device.
    num_host_tokens: int  # The part found on the host in addition.
    # Tokens looked up after the device's hits: whole blocks, without the last token.
    num_asked_tokens: int
    shadows: tuple[ShadowCount, ...]
    speeds: Speeds | None  # The rates of loads and prefill; None if unknown.
    block_size: int  # Tokens per block.
    # Whether there are no tiers below the host, which shadows do not simulate.
    is_alone: bool = True

    def since(self, earlier: Outlook) -> Outlook:
        """Return the difference from an earlier outlook of the same engine."""
        names = "num_requests", "num_tokens", "num_device_tokens", "num_host_tokens"
        changes: Any = _differences(self, earlier, (*names, "num_asked_tokens"))
        shadows = []
        names = "num_asked_tokens", "num_found_tokens", "num_loads", "num_stored"
        for new, old in zip(self.shadows, earlier.shadows, strict=True):
            counts: Any = _differences(new, old, (*names, "num_evicted"))
            variance = max(new.error_tokens**2 - old.error_tokens**2, 0.0)
            shadows.append(new._replace(error_tokens=math.sqrt(variance), **counts))
        return dataclasses.replace(self, shadows=tuple(shadows), **changes)

    def points(self, shadow: ShadowCount) -> float:
        """Return a shadow's host hits as a percentage of all tokens."""
        return 100 * shadow.share * self.num_asked_tokens / max(self.num_tokens, 1)

    def error_points(self, shadow: ShadowCount) -> float:
        """Return the standard error of `points`, in percentage points."""
        share = self.num_asked_tokens / max(self.num_tokens, 1)
        return 100 * shadow.error_tokens / max(shadow.num_asked_tokens, 1) * share

    def saved_s(self, shadow: ShadowCount) -> float | None:
        """Return the seconds of prefill saved per request, None if unknown.

        This assumes that all loads have the same length.
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
        """The counts of the serving tier's own shadow; without one, of the tier."""
        for shadow in self.shadows:
            if (shadow.policy, shadow.num_blocks) == (self.policy, self.num_blocks):
                return shadow
        return ShadowCount(
            self.policy, self.num_blocks, self.num_asked_tokens, self.num_host_tokens
        )

    @property
    def sentence(self) -> str:
        """A sentence about the hits with more memory or another policy."""
        device = percent_text(self.num_device_tokens, self.num_tokens)
        host = percent_text(self.num_host_tokens, self.num_tokens)
        text = (
            f"of {self.num_tokens:,} tokens of {self.num_requests:,} requests the "
            f"device had {device} and the host, {self._size(self.num_blocks)} with "
            f"{self.policy}, {host}"
        )
        if not self.is_alone:
            text += " with the tiers below it. Without those"
        if not self.num_tokens:
            return "no request has looked for its prefix yet"
        serving, phrases = self.serving, []
        num_blocks = serving.num_blocks
        same_policy = [row for row in self.shadows if row.policy == self.policy]
        larger = [row for row in same_policy if self._has_gain(row) and row != serving]
        larger = [row for row in larger if row.num_blocks > num_blocks]
        if larger:
            max_gain = max(map(self._gain, larger))
            enough = [row for row in larger if self._gain(row) >= ENOUGH * max_gain]
            row = min(enough, key=lambda shadow: shadow.num_blocks)
            size = self._size(row.num_blocks - num_blocks)
            phrases.append(f"{size} more would find {self._change(row)}")
        same_size = [row for row in self.shadows if row.num_blocks == num_blocks]
        better = [row for row in same_size if self._has_gain(row)]
        if better:
            row = max(better, key=self._gain)
            phrases.append(
                f"{row.policy} instead of {self.policy} would find {self._change(row)}"
            )
        smaller = [row for row in same_policy if row.num_blocks < num_blocks]
        smaller = [row for row in smaller if self._gain(row) > -_MAX_LOST_POINTS]
        if smaller and not larger:
            row = min(smaller, key=lambda shadow: shadow.num_blocks)
            size = self._size(num_blocks - row.num_blocks)
            phrases.append(f"{size} less would find {self._change(row)}")
        if not phrases:
            phrases.append("no other shadow would find more")
        return f"{text}{'; ' if self.is_alone else ', '}{'; '.join(phrases)}"

    def __str__(self) -> str:
        """Return a table of all shadows, and the sentence under it."""
        rows = [("policy", "host", "found", "error", "saved per request")]
        for shadow in self.shadows:
            size = self._size(shadow.num_blocks) if shadow.num_blocks else "none"
            share, error = self.points(shadow), self.error_points(shadow)
            saved_s = self.saved_s(shadow)
            saved = "?" if saved_s is None else time_text(saved_s)
            rows.append((shadow.policy, size, f"{share:.1f}%", f"{error:.1f}", saved))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for policy, *cells in rows:
            cells = list(map(str.rjust, cells, widths[1:]))
            lines.append("  ".join([policy.ljust(widths[0]), *cells]))
        sentence = self.sentence
        return "\n".join([*lines, "", f"{sentence[0].upper()}{sentence[1:]}."])

    def _gain(self, shadow: ShadowCount) -> float:
        return self.points(shadow) - self.points(self.serving)

    def _has_gain(self, shadow: ShadowCount) -> bool:
        """Whether a shadow has significantly more hits than the serving tier."""
        min_gain = max(_MIN_GAINED_POINTS, 2 * self.error_points(shadow))
        return shadow.policy != OFF and self._gain(shadow) > min_gain

    def _change(self, shadow: ShadowCount) -> str:
        gain, error = self._gain(shadow), self.error_points(shadow)
        direction = "more" if gain >= 0 else "less"
        spread = f" ± {error:.1f}" if error else ""
        text = f"{abs(gain):.1f}{spread} percentage points {direction}"
        saved_s, now_s = self.saved_s(shadow), self.saved_s(self.serving)
        if gain > 0 and saved_s is not None and now_s is not None and saved_s > now_s:
            text += f", saving {time_text(saved_s - now_s)} of prefill per request"
        return text

    def _size(self, num_blocks: int) -> str:
        if self.block_bytes:
            return rounded_size(num_blocks * self.block_bytes)
        return f"{num_blocks:,} blocks"


def _differences(new: object, old: object, names: Sequence[str]) -> dict[str, int]:
    return {name: getattr(new, name) - getattr(old, name) for name in names}


class OutlookLog:
    """Logs the outlook of each hour, and of all requests at the end.

    `get_outlook` must not refer to the scheduler, so that it can be freed.
    """

    def __init__(self, get_outlook: Callable[[], Outlook]) -> None:
        self._get_outlook = get_outlook
        self._last: Outlook | None = None
        self._next_ms: int | None = None

    def note(self, now_ms: int) -> None:
        """Log the outlook of the last hour, if an hour has passed."""
        if self._next_ms is None:
            self._next_ms = now_ms + _LOG_EVERY_MS
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + _LOG_EVERY_MS
        outlook = self._get_outlook()
        hour = outlook if self._last is None else outlook.since(self._last)
        self._last = outlook
        _LOG.info("in the last hour, %s", hour.sentence)

    def close(self) -> None:
        """Log the outlook of all requests."""
        outlook = self._get_outlook()
        if outlook.num_requests:
            _LOG.info("since the start, %s", outlook.sentence)
