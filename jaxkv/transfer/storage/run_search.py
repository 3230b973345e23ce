"""A search for the number of a run's blocks in a store, by few probes."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_LATER = 3  # Blocks of a round after the first


class RunSearch:
    """Finds how many blocks of a run exist, from the first on.

    The blocks of a run are written in order, so the blocks before an existing one are
    assumed to exist; a read of one that does not finds that out. The first round
    probes blocks at doubling distances and the last one; each later round leaves a
    quarter of the range. Of n blocks it probes at most log2(n) + 2, and about 3 log4(n)
    more unless all or none exist. `num_found` is the number known to exist.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_found = 0
        self._end = num_blocks  # The first block known to be missing
        self._is_begun = False

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self.num_found == self._end

    def next_indices(self) -> list[int]:
        """Return the blocks to probe next, in order; none at the end."""
        num = self._end - self.num_found
        if self._is_begun:
            num_probes = min(_MAX_LATER, num)
            steps = range(1, num_probes + 1)
            return [self.num_found + step * num // (num_probes + 1) for step in steps]
        self._is_begun = True
        doubling = [(1 << n) - 1 for n in range(num.bit_length())]
        return sorted({*doubling, num - 1}) if num else []

    def note(self, indices: Sequence[int], exist: Sequence[bool]) -> None:
        """Record which of the probed blocks exist."""
        for index, exists in zip(indices, exist, strict=True):
            if not exists:
                self._end = index
                return
            self.num_found = index + 1
