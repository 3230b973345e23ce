"""Whether a store answers, and the few lines that a log gets about it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

_EVERY_S = 60.0  # Between two lines of a kind, however often a store flaps.
# A disk that stays full is tried again after each listing.
_FULL_EVERY_S = 3600.0
# Calls that were under way when a store came back may still fail.
_SETTLED_S = 1.0
# Any answer disproves it; what else fails may be the fault of one kind of call.
_UNREACHABLE = "unreachable"

_log = logging.getLogger(__name__)


class _Failure(NamedTuple):
    reason: str
    message: str


class StoreHealth:
    """Keeps whether the calls of a store fail, and makes the lines of a log of it.

    A kind of call fails from its first failure until one of its kind is answered, or
    any, if the store could not be reached. An outage lasts from the first failure until
    no kind fails. It has one warning, at its first failure, and one line when it is
    over, either at most once a minute, and at most once an hour for a full store.

    Args:
        url: The store, without secrets.

    Attributes:
        has_news: Whether `next_line` may have one.

    Example:
        >>> health = StoreHealth("redis://kv")
        >>> health.note_failure("write", "unreachable", "Connection refused", 5.0)
        >>> health.is_up, health.next_line(5.0)[1].partition(".")[0]
        (False, 'the store redis://kv fails: write unreachable (Connection refused)')
        >>> health.note_answer("read")
        >>> health.is_up, health.next_line(5.5)
        (True, None)
        >>> health.next_line(8.0)[1]
        'the store redis://kv recovered after 3 s (1 failed write)'
    """

    def __init__(self, url: str) -> None:
        self.has_news = False
        self._url = url
        self._failing: dict[str, _Failure] = {}
        self._num_failed: Counter[str] = Counter()  # In this outage.
        self._refused: dict[str, bool] = {}  # Whether it was said.
        self._first_s = 0.0  # When this outage began,
        self._failed_s = 0.0  # and when a call last failed.
        # When the next line of a kind may be made.
        self._warn_s = self._warn_full_s = self._inform_s = float("-inf")
        self._warning: str | None = None  # The next line.
        self._has_warned = False  # Of this outage.

    @property
    def is_up(self) -> bool:
        """Whether no kind of call fails."""
        return not self._failing

    def note_failure(self, what: str, reason: str, message: str, now_s: float) -> None:
        """Note that a call of a kind has failed, or was not answered in time."""
        if not (self._failing or self._has_warned):
            self._first_s = now_s
            self._num_failed.clear()
        self._failing[what] = _Failure(reason, message)
        self._num_failed[what] += 1
        self._failed_s = now_s
        self.has_news = True
        self._warn(now_s)  # Now, as the call may have an answer before anybody looks.

    def note_answer(self, what: str) -> None:
        """Note that a call of a kind was answered."""
        if self._failing:
            self._failing.pop(what, None)
            for other, failure in list(self._failing.items()):
                if failure.reason == _UNREACHABLE:
                    del self._failing[other]

    def note_refusal(self, reason: str) -> None:
        """Note that an object was not right; the store has answered all the same."""
        if reason not in self._refused:
            self._refused[reason] = False
            self.has_news = True

    def next_line(self, now_s: float) -> tuple[int, str] | None:
        """Return the next line for a log, with its level; None if there is none yet."""
        for reason, is_said in self._refused.items():
            if not is_said:
                self._refused[reason] = True
                return logging.WARNING, (
                    f"the store {self._url} has objects that are not right ({reason}): "
                    "they are computed instead. For this reason it is not said again"
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
            return logging.INFO, (
                f"the store {self._url} recovered after {now_s - self._first_s:.0f} s "
                f"({self._counts()})"
            )
        return None

    def _warn(self, now_s: float) -> None:
        """Make the warning of this outage, unless it was made or is not due."""
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

    def _counts(self) -> str:
        return ", ".join(
            f"{num} failed {what}{'s' if num > 1 else ''}"
            for what, num in sorted(self._num_failed.items())
        )


def log_line(line: tuple[int, str] | None) -> None:
    """Log what `StoreHealth.next_line` returns."""
    if line is not None:
        level, text = line
        _log.log(level, "%s.", text)
