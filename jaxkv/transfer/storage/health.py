"""Whether a store answers, and the few lines that a log gets about it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

_EVERY_S = 60.0  # Between two lines of a kind, however often a store flaps.
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
    any, if the store could not be reached. There is one warning when the first kind
    begins to fail, and one line when all are well again, either at most once a minute.

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
        'the store redis://kv is well again after 3 s; failed were 1 write'
    """

    def __init__(self, url: str) -> None:
        self.has_news = False
        self._url = url
        self._failing: dict[str, _Failure] = {}
        self._num_failed: Counter[str] = Counter()  # Since the last line of either.
        self._refused: dict[str, bool] = {}  # Whether it was said.
        self._failed_s = self._warned_s = self._informed_s = float("-inf")
        self._is_said_to_fail = False

    @property
    def is_up(self) -> bool:
        """Whether no kind of call fails."""
        return not self._failing

    def note_failure(self, what: str, reason: str, message: str, now_s: float) -> None:
        """Note that a call of a kind has failed, or was not answered in time."""
        self._failing[what] = _Failure(reason, message)
        self._num_failed[what] += 1
        self._failed_s = now_s
        self.has_news = True

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
        """Give the next line for a log, with its level; None if there is none yet."""
        for reason, is_said in self._refused.items():
            if not is_said:
                self._refused[reason] = True
                return logging.WARNING, (
                    f"the store {self._url} has objects that are not right ({reason}): "
                    "they are computed instead. For this reason it is not said again"
                )
        if self._failing and not self._is_said_to_fail:
            if now_s >= self._warned_s + _EVERY_S:
                self._warned_s = now_s
                self._is_said_to_fail = True
                what, (reason, message) = next(iter(self._failing.items()))
                return logging.WARNING, (
                    f"the store {self._url} fails: {what} {reason} ({message}). What "
                    "it does not bring is computed, what it does not take is dropped. "
                    "This is said at most once a minute"
                )
        elif self._is_said_to_fail and not self._failing:
            since_s = max(self._failed_s + _SETTLED_S, self._informed_s + _EVERY_S)
            if now_s >= since_s:
                self._informed_s = now_s
                self._is_said_to_fail = self.has_news = False
                return logging.INFO, (
                    f"the store {self._url} is well again after "
                    f"{now_s - self._warned_s:.0f} s; failed were {self._take_counts()}"
                )
        elif not self._failing:
            self.has_news = False
            self._num_failed.clear()
        return None

    def _take_counts(self) -> str:
        counts, self._num_failed = self._num_failed, Counter()
        return ", ".join(
            f"{num} {what}{'s' if num > 1 else ''}"
            for what, num in sorted(counts.items())
        )


def log_line(line: tuple[int, str] | None) -> None:
    """Log what `StoreHealth.next_line` gives."""
    if line is not None:
        level, text = line
        _log.log(level, "%s.", text)
