"""A sample of keys that stands for all: by their bits, with the hottest keys apart.

The bits of a key decide whether all its uses are in the sample, or none. A tier scaled
down by the same factor then has about the same hit ratio for the sampled keys (spatial
sampling: SHARDS, Waldspurger et al., FAST '15). This also holds for prefixes, whose
blocks are hits only with all blocks before them.

A key identifies its whole prefix. So one of each `_STRATUM` blocks in a row can be
chosen by the bits of the first of them: then each prompt has the same share in the
sample. Where many prompts share that first block, each key goes by its own bits.

A sample cannot measure the hits of a few hot keys, such as the first blocks of all
prompts: it has all of their uses or none. So keys that are looked up `_OFTEN` times
while the smallest tier is filled once are not sampled. They are assumed to be resident
with every policy, and their hits are not scaled up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv.tiers.executors import Words
from jaxkv.types import BlockKey

NUM_GROUPS = 16
"""Groups of sampled keys, whose differences give the error of the sample."""

_OFTEN = 4
_MIN_COUNT = 16
# Halve the counts after this many fillings of the smallest tier, or for more keys.
_MAX_FILLINGS, _MAX_KEYS = 64, 1 << 16
_STRATUM = 32
_SAMPLE, _GROUP, _OFFSET = 7, 6, 5  # Words of a key that no index hashes.


class KeySample:
    """Chooses one key in ``2**bits``, for tiers of at least `min_blocks` blocks."""

    def __init__(self, bits: int, min_blocks: int) -> None:
        self.bits = bits
        self._mask = np.uint32((1 << bits) - 1)
        # One of this many consecutive keys (a stratum) is a candidate. If the sampling
        # rate is lower than that, the candidate's bits decide whether it is sampled.
        self._stratum = min(1 << bits, _STRATUM)
        self._stratum_mask = (1 << bits) // self._stratum - 1
        self._min_blocks = min_blocks
        # How many requests began with the prefix up to each key. A request adds at most
        # one key, the first unknown one (as in LZ78).
        self._counts: dict[BlockKey, int] = {}
        self._num_blocks = 0  # Blocks of all requests so far; halved with the counts.

    def choose(self, words: Words) -> list[int]:
        """List the rows of u32[n, 8] that are in the sample by their own bits."""
        rows: list[int] = (words[:, _SAMPLE] & self._mask == 0).nonzero()[0].tolist()
        return rows

    def choose_of_prefix(self, words: Words, num_hot: int, first: int = 0) -> list[int]:
        """List the rows of a prefix, u32[n, 8], that are in the sample.

        The first `num_hot` keys are not in it; keys before `first` are omitted. `first`
        does not change which key of a stratum is chosen.
        """
        rows: list[int] = []
        start = self.end_of_stratum(num_hot)
        if first < start:
            rows = [num_hot + row for row in self.choose(words[num_hot:start])]
        start += max(first - start, 0) // self._stratum * self._stratum
        num = len(words)
        for offset in words[start :: self._stratum, _OFFSET].tolist():
            row = start + offset % self._stratum
            if row < num and not words.item(row, _SAMPLE) & self._stratum_mask:
                rows.append(row)
            start += self._stratum
        return [row for row in rows if row >= first] if first else rows

    def end_of_stratum(self, num_hot: int) -> int:
        """Return the first row after hot keys that begins a whole stratum."""
        return -(-num_hot // self._stratum) * self._stratum

    def record_request(self, keys: Sequence[BlockKey]) -> int:
        """Count the keys of a request; return how many of its first keys are hot."""
        counts, num = self._counts, len(keys)
        self._num_blocks += num
        min_count = max(_MIN_COUNT, _OFTEN * self._num_blocks // self._min_blocks)
        num_hot = 0
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                break
            # No key is looked up more often than the key before it.
            num_hot += count >= min_count
        is_old = self._num_blocks > _MAX_FILLINGS * self._min_blocks
        if is_old or len(counts) > _MAX_KEYS:
            self._num_blocks //= 2
            halves = {key: count // 2 for key, count in counts.items()}
            self._counts = {key: count for key, count in halves.items() if count}
        return num_hot

    def groups(self, words: Words) -> list[int]:
        """Return the sample group of each key of u32[n, 8]."""
        groups: list[int] = (words[:, _GROUP] % NUM_GROUPS).tolist()
        return groups

    def error(self, num_found: Sequence[float], num_asked: Sequence[float]) -> float:
        """Estimate the standard error of the scaled hits, in blocks.

        `num_found` and `num_asked` are the hits and lookups of each group. The groups
        are samples as well: the spread of their hit ratios gives the error of the whole
        (Cochran, Sampling Techniques, 6.3).
        """
        share = sum(num_found) / max(sum(num_asked), 1)
        groups = zip(num_found, num_asked, strict=True)
        spread = sum((num - share * num_all) ** 2 for num, num_all in groups)
        spread *= len(num_found) / (len(num_found) - 1)
        scale = 1 << self.bits
        return float(np.sqrt(spread * scale * (scale - 1)))
