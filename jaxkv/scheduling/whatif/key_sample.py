"""A sample of keys that stands for all: by their bits, with the hottest keys apart.

A key is in the sample by its own bits, so that all its uses are, or none; a tier with
as small a share of the blocks then finds about the same share of the sampled keys
(spatial sampling: SHARDS, Waldspurger et al., FAST '15). Prefixes fit that: of blocks
that are found only with all those before them, as many of the sampled ones are found.

A key also stands for its whole prefix. So of each `_STRATUM` blocks in a row one can be
taken, by the bits of the first of them: then the sample has as much of each prompt, and
is asked for as large a share of all as it has of the blocks. Where many prompts have
that first block in common, each key goes by its own bits.

What a few keys get of all uses, such as the blocks that all prompts begin with, no such
sample can tell: it has them or not. Keys that are asked for `_OFTEN` times while the
smallest tier could be filled once are taken out of it. They are there whatever the
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
_LEAST_COUNT = 16
# Fillings of the smallest tier, and keys, after which counts are halved.
_MOST_COUNTED, _MOST_KEYS = 64, 1 << 16
_STRATUM = 32
_SAMPLE, _GROUP, _OFFSET = 7, 6, 5  # Words of a key that directories do not go by.


class KeySample:
    """Chooses keys.

    Args:
        bits: One key in ``2**bits`` is chosen.
        least_blocks: Blocks of the smallest tier that the sample is for.

    Attributes:
        bits: As given.
    """

    def __init__(self, bits: int, least_blocks: int) -> None:
        self.bits = bits
        self._mask = np.uint32((1 << bits) - 1)
        # Each stratum of this many consecutive keys offers one key; where the rate is
        # lower than that, the bits of the offered key decide whether it is sampled.
        self._stratum = min(1 << bits, _STRATUM)
        self._rest = (1 << bits) // self._stratum - 1
        self._least_blocks = least_blocks
        # How many requests began with the prefix up to a key. Each adds a key at most,
        # behind those that are known (as LZ78 does).
        self._counts: dict[BlockKey, int] = {}
        self._num_blocks = 0

    def choose(self, words: Words) -> list[int]:
        """List the rows of u32[n, 8] that are in the sample by their own bits."""
        rows: list[int] = (words[:, _SAMPLE] & self._mask == 0).nonzero()[0].tolist()
        return rows

    def choose_of_prefix(self, words: Words, num_hot: int, first: int = 0) -> list[int]:
        """List the rows of the keys of a prefix that are in the sample.

        Args:
            words: u32[n, 8]. All keys of the prefix.
            num_hot: How many keys, the first ones, are the hottest: these are not.
            first: The first key to choose from; which one is chosen of a stratum does
                not depend on it.
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
        """Tell up to which key of a prefix each goes by its own bits."""
        return -(-num_hot // self._stratum) * self._stratum

    def note_request(self, keys: Sequence[BlockKey]) -> int:
        """Count what a request asks for; tell how many keys, the first, are hottest."""
        counts, num = self._counts, len(keys)
        self._num_blocks += num
        least = max(_LEAST_COUNT, _OFTEN * self._num_blocks // self._least_blocks)
        num_hot = 0
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                break
            # No key is asked for more often than the one before it.
            num_hot += count >= least
        is_old = self._num_blocks > _MOST_COUNTED * self._least_blocks
        if is_old or len(counts) > _MOST_KEYS:
            self._num_blocks //= 2
            halves = {key: count // 2 for key, count in counts.items()}
            self._counts = {key: count for key, count in halves.items() if count}
        return num_hot

    def groups(self, words: Words) -> list[int]:
        """Tell in which part of the sample each key of u32[n, 8] is."""
        groups: list[int] = (words[:, _GROUP] % NUM_GROUPS).tolist()
        return groups

    def error(self, found: Sequence[float], asked: Sequence[float]) -> float:
        """Estimate the standard error of how many blocks were found.

        The parts are samples, too, whose shares differ by chance as that of the whole
        does (Cochran, Sampling Techniques, 6.3).

        Args:
            found: How many keys of each part were found.
            asked: How many were asked for.
        """
        share = sum(found) / max(sum(asked), 1)
        offs = (own - share * num for own, num in zip(found, asked, strict=True))
        spread = sum(off**2 for off in offs) * len(found) / (len(found) - 1)
        scale = 1 << self.bits
        return float(np.sqrt(spread * scale * (scale - 1)))
