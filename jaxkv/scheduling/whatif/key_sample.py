"""A sample of keys that stands for all: by their bits, with the hottest keys apart.

The bits of a key decide whether all its uses are in the sample, or none. A tier with as
small a share of the blocks then finds about the same share of the sampled keys (spatial
sampling: SHARDS, Waldspurger et al., FAST '15), also of prefixes, whose blocks are
found only with all blocks before them.

As a key stands for its whole prefix, one of each `_STRATUM` blocks in a row can be
chosen, by the bits of the first of them: then the sample has as much of each prompt.
Where many prompts have that first block in common, each key goes by its own bits.

No such sample can measure the uses of a few hot keys, such as the blocks that all
prompts begin with: it has them or not. Keys that are asked for `_OFTEN` times while the
smallest tier could be filled once are left out of it. They are resident whatever the
policy, and each counts once, not as often as a sampled key stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv.tiers.executors import Words
from jaxkv.types import BlockKey

NUM_GROUPS = 16
"""Parts of the sample, by which its error is estimated."""

_OFTEN = 4
_MIN_COUNT = 16
# Fillings of the smallest tier, and keys, beyond which counts are halved.
_MAX_FILLINGS, _MAX_KEYS = 64, 1 << 16
_STRATUM = 32
_SAMPLE, _GROUP, _OFFSET = 7, 6, 5  # Words of a key that directories do not go by.


class KeySample:
    """Chooses one key in ``2**bits``, for tiers of at least `min_blocks` blocks."""

    def __init__(self, bits: int, min_blocks: int) -> None:
        self.bits = bits
        self._mask = np.uint32((1 << bits) - 1)
        # Each stratum of this many consecutive keys offers one key; where the rate is
        # lower than that, the bits of the offered key decide whether it is sampled.
        self._stratum = min(1 << bits, _STRATUM)
        self._rest = (1 << bits) // self._stratum - 1
        self._min_blocks = min_blocks
        # How many requests began with the prefix up to a key. Each adds a key at most,
        # behind those that are known (as LZ78 does).
        self._counts: dict[BlockKey, int] = {}
        self._num_blocks = 0

    def choose(self, words: Words) -> list[int]:
        """List the rows of u32[n, 8] that are in the sample by their own bits."""
        rows: list[int] = (words[:, _SAMPLE] & self._mask == 0).nonzero()[0].tolist()
        return rows

    def choose_of_prefix(self, words: Words, num_hot: int, first: int = 0) -> list[int]:
        """List the rows of a prefix, u32[n, 8], that are in the sample.

        Its first `num_hot` keys, the hottest, are not, nor those before `first`; which
        key of a stratum is chosen does not depend on `first`.
        """
        rows: list[int] = []
        start = self.end_of_stratum(num_hot)
        if first < start:
            rows = [num_hot + row for row in self.choose(words[num_hot:start])]
        start += max(first - start, 0) // self._stratum * self._stratum
        num = len(words)
        for offset in words[start :: self._stratum, _OFFSET].tolist():
            row = start + offset % self._stratum
            if row < num and not words.item(row, _SAMPLE) & self._rest:
                rows.append(row)
            start += self._stratum
        return [row for row in rows if row >= first] if first else rows

    def end_of_stratum(self, num_hot: int) -> int:
        """Return the first key of a prefix that does not go by its own bits."""
        return -(-num_hot // self._stratum) * self._stratum

    def note_request(self, keys: Sequence[BlockKey]) -> int:
        """Count the keys of a request; return how many of the first are hottest."""
        counts, num = self._counts, len(keys)
        self._num_blocks += num
        min_count = max(_MIN_COUNT, _OFTEN * self._num_blocks // self._min_blocks)
        num_hot = 0
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                break
            # No key is asked for more often than the one before it.
            num_hot += count >= min_count
        is_old = self._num_blocks > _MAX_FILLINGS * self._min_blocks
        if is_old or len(counts) > _MAX_KEYS:
            self._num_blocks //= 2
            halves = {key: count // 2 for key, count in counts.items()}
            self._counts = {key: count for key, count in halves.items() if count}
        return num_hot

    def groups(self, words: Words) -> list[int]:
        """Return the part of the sample that each key of u32[n, 8] is in."""
        groups: list[int] = (words[:, _GROUP] % NUM_GROUPS).tolist()
        return groups

    def error(self, num_found: Sequence[float], num_asked: Sequence[float]) -> float:
        """Estimate the standard error of how many blocks were found.

        The parts, whose keys `num_found` and `num_asked` count, are samples, too. Their
        shares differ by chance as the share of the whole does (Cochran, Sampling
        Techniques, 6.3).
        """
        share = sum(num_found) / max(sum(num_asked), 1)
        groups = zip(num_found, num_asked, strict=True)
        spread = sum((num - share * num_all) ** 2 for num, num_all in groups)
        spread *= len(num_found) / (len(num_found) - 1)
        scale = 1 << self.bits
        return float(np.sqrt(spread * scale * (scale - 1)))
