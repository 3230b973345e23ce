"""A sample of keys that stands for all: by their bits, with the hottest keys apart.

A key is in the sample by its own bits, so that all its uses are, or none; a tier with
as small a share of the blocks then finds about the same share of the sampled keys
(spatial sampling: SHARDS, Waldspurger et al., FAST '15). Prefixes fit that: of blocks
that are found only with all those before them, as many of the sampled ones are found.

What a few keys get of all uses, such as the blocks that all prompts begin with, no such
sample can tell: it has them or not. Keys that are asked for `_OFTEN` times while a tier
could be filled once are taken out of it. They are there whatever the policy, and count
once and not as often as a sampled key stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.executors import Words

_NUM_GROUPS = 16
_NUM_COUNTERS = 1 << 14
_OFTEN = 4
_LEAST_COUNT = 16
_COUNT_EVERY = 8  # Requests.
# Words of a key that directories do not go by.
_SAMPLE, _TAG, _COUNTER, _GROUP = 7, 6, 5, 4


class KeySample:
    """Chooses keys.

    Args:
        bits: One key in ``2**bits`` is chosen.
        least_blocks: Blocks of the smallest tier that the sample is for.

    Attributes:
        num_groups: Parts of the sample, by which its error is estimated.
    """

    num_groups = _NUM_GROUPS

    def __init__(self, bits: int, least_blocks: int) -> None:
        self._bits = bits
        self._mask = np.uint32((1 << bits) - 1)
        self._least_blocks = least_blocks
        # The key that has most of the uses of those that share a counter has its tag
        # (the majority vote of Boyer and Moore).
        self._tags = np.zeros(_NUM_COUNTERS, np.uint32)
        self._counts = np.zeros(_NUM_COUNTERS, np.int32)
        self._num_requests = 0
        self._num_blocks = 0
        self._least_count = _LEAST_COUNT
        self._some_hot = False

    def choose(self, words: Words) -> Words:
        """Choose from u32[n, 8] the keys of the sample, the hottest among them."""
        chosen: Words = words[words[:, _SAMPLE] & self._mask == 0]
        chosen.flags.writeable = False  # As all keys are.
        return chosen

    def rows(self, words: Words, hot: Sequence[int]) -> list[int]:
        """List the rows of u32[n, 8] that are in the sample, without some."""
        rows: list[int] = np.flatnonzero(words[:, _SAMPLE] & self._mask == 0).tolist()
        return [row for row in rows if row not in hot] if hot else rows

    def note_request(self, words: Words) -> list[int]:
        """Count what a request asks for; list its hottest keys by their rows."""
        self._num_requests += 1
        is_counted = self._num_requests % _COUNT_EVERY == 0
        if not (is_counted or self._some_hot) or not len(words):
            return []
        index = words[:, _COUNTER] & np.uint32(_NUM_COUNTERS - 1)
        tags = words[:, _TAG]
        is_same = self._tags[index] == tags
        counts = self._counts[index]
        if is_counted:
            self._count(index, tags, counts + np.where(is_same, 1, -1))
        if not self._some_hot:
            return []
        is_hot = is_same & (counts >= self._least_count)
        hot: list[int] = is_hot.nonzero()[0].tolist()
        return hot

    def count(self, groups: list[int], words: Words) -> None:
        """Count keys that were found by their groups."""
        for group in (words[:, _GROUP] % _NUM_GROUPS).tolist():
            groups[group] += 1

    def error(self, groups: Sequence[int]) -> float:
        """Estimate the standard error of how many blocks were found, all in all.

        Groups are samples, too, and differ by chance as the whole does.

        Args:
            groups: How many sampled keys of each group were found.
        """
        num, mean = len(groups), sum(groups) / len(groups)
        spread = sum((own - mean) ** 2 for own in groups) * num / (num - 1)
        scale = 1 << self._bits
        return float(np.sqrt(spread * scale * (scale - 1)))

    def _count(
        self, index: NDArray[Any], tags: NDArray[Any], counts: NDArray[Any]
    ) -> None:
        is_new = counts < 0
        self._tags[index[is_new]] = tags[is_new]
        self._counts[index] = np.where(is_new, 1, counts)
        self._num_blocks += len(tags)
        if self._num_blocks > 64 * self._least_blocks:  # The traffic may change.
            self._counts //= 2
            self._num_blocks //= 2
        often = _OFTEN * self._num_blocks / self._least_blocks
        self._least_count = max(_LEAST_COUNT, int(often))
        self._some_hot = bool((counts >= self._least_count).any()) or self._some_hot
