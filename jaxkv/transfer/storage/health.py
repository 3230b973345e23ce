"""Whether a store answers, and the log lines about its outages."""

from __future__ import annotations

import logging
from collections import Counter

_EVERY_S = 60.0  # Between two lines of a kind, even if a store flaps
# A full disk is tried again after each listing.
_FULL_EVERY_S = 3600.0
# Calls that began during the outage may still fail.
_SETTLED_S = 1.0
# Any answer disproves it; other failures may concern one kind of call.
_UNREACHABLE = "unreachable"

_log = logging.getLogger(__name__)


class StoreHealth:
    """Tracks outages of a store, and makes the log lines about them.

    A kind of call fails from its first failure until a call of its kind is answered, or
    any call, if the store could not be reached. An outage lasts while any kind fails.
    It gets a warning at its first failure and a line at its end, each at most once a
    minute, and at most once an hour for a full store. `has_news` says whether
    `next_line` may return one.
    """

    def __init__(self, url: str) -> None:
        self.has_news = False
        self._url = url
        self._failing: dict[str, tuple[str, str]] = {}  # Reason and message
        self._num_failed: Counter[str] = Counter()  # In this outage
        self._refused: dict[str, bool] = {}  # Whether each reason was logged
        self._first_s = 0.0  # Start of this outage
        self._failed_s = 0.0  # Latest failure
        # When the next line of each kind may be made
        self._warn_s = self._warn_full_s = self._inform_s = float("-inf")
        self._warning: str | None = None  # The next line
        self._has_warned = False  # In this outage

    @property
    def is_up(self) -> bool:
        """Whether no kind of call fails."""
        return not self._failing

    def record_failure(self, what: str, reason: str, text: str, now_s: float) -> None:
        """Record a call that failed or was not answered in time."""
        if not (self._failing or self._has_warned):
            self._first_s = now_s
            self._num_failed.clear()
        self._failing[what] = reason, text
        self._num_failed[what] += 1
        self._failed_s = now_s
        self.has_news = True
        self._warn(now_s)  # Before an answer can end the outage.

    def record_answer(self, what: str) -> None:
        """Record an answer to a call of a kind."""
        if self._failing:
            self._failing.pop(what, None)
            for kind, (reason, _) in list(self._failing.items()):
                if reason == _UNREACHABLE:
                    del self._failing[kind]

    def record_down(self) -> None:
        """Record that the store is not called until it answers again."""
        if self._warning is not None:
            self._warning += ". Until it answers, requests do not wait for it"

    def record_up(self) -> None:
        """Record that the store answers again."""
        self._failing.clear()

    def record_refusal(self, reason: str) -> None:
        """Record an object that was not valid, from a store that has answered."""
        if reason not in self._refused:
            self._refused[reason] = False
            self.has_news = True

    def next_line(self, now_s: float) -> tuple[int, str] | None:
        """Return the level and text of the next log line; None if none is due."""
        for reason, is_logged in self._refused.items():
            if not is_logged:
                self._refused[reason] = True
                return logging.WARNING, (
                    f"the store {self._url} has invalid objects ({reason}); their "
                    "blocks are computed instead. This reason is logged once"
                )
        self._warn(now_s)
        if self._warning is not None:
            text, self._warning = self._warning, None
            return logging.WARNING, text
        if self._failing:
            return None
        if not self._has_warned:
            self.has_news = False
        elif now_s >= max(self._failed_s + _SETTLED_S, self._inform_s):
            self._inform_s = now_s + _EVERY_S
            self._has_warned = self.has_news = False
            counts = ", ".join(
                f"{num} failed {what}{'s' if num > 1 else ''}"
                for what, num in sorted(self._num_failed.items())
            )
            after_s = now_s - self._first_s
            line = f"the store {self._url} recovered after {after_s:.0f} s ({counts})"
            return logging.INFO, line
        return None

    def _warn(self, now_s: float) -> None:
        """Make the warning of this outage, once it is due."""
        if self._has_warned or now_s < self._warn_s:
            return
        for what, (reason, message) in self._failing.items():
            is_full = reason == "full"
            if is_full and now_s < self._warn_full_s:
                continue
            self._has_warned = True
            self._warn_s = now_s + _EVERY_S
            text = "Failed reads are recomputed, failed writes dropped"
            if is_full:
                self._warn_full_s = now_s + _FULL_EVERY_S
                text += "; the blocks used least recently are deleted to make room"
            self._warning = (
                f"the store {self._url} fails: {what} {reason} ({message}). {text}"
            )
            return


def log_line(line: tuple[int, str] | None) -> None:
    """Log a line of `StoreHealth.next_line`."""
    if line is not None:
        level, text = line
        _log.log(level, "%s.", text)
