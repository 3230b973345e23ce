"""Names as people mistype them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Give the name that a word was probably meant to be; None if it is like none.

    >>> nearest("lur", ["lru", "arc"])
    'lru'
    """
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Say what a word may have been meant to be, or what there is.

    >>> did_you_mean("lur", ["lru", "arc"])
    'did you mean lru?'
    """
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"there is {', '.join(known)}"
