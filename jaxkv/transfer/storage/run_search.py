"""How many blocks of a run a store has, asking it about few of them."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_LATER = 3  # Blocks of a round after the first.


class RunSearch:
    """Finds how many blocks of a run are there, from the first on.

    Blocks that continue one another are written in their order, so that those before
    one that is there are taken to be there too; who reads one that is not finds that
    out. The first round asks for blocks at doubling distances and for the last one;
    each later round cuts what is left to a quarter. Of n blocks it asks for at most
    log2(n) + 2, and, unless all or none are there, for some 3 log4(n) more.

    Args:
        num_blocks: Blocks of the run.

    Attributes:
        num_found: How many are there, as far as it is known.

    Example:
        >>> search = RunSearch(100)
        >>> while indices := search.next_indices():
        ...     print(indices)
        ...     search.note(indices, [index < 37 for index in indices])
        [0, 1, 3, 7, 15, 31, 63, 99]
        [39, 47, 55]
        [33, 35, 37]
        [36]
        >>> search.num_found
        37
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_found = 0
        self._end = num_blocks  # The first block that is known not to be there.
        self._is_begun = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to ask."""
        return self.num_found == self._end

    def next_indices(self) -> list[int]:
        """Choose which blocks to ask for next, in order; none if it is over."""
        num = self._end - self.num_found
        if self._is_begun:
            most = min(_MOST_LATER, num)
            steps = range(1, most + 1)
            return [self.num_found + step * num // (most + 1) for step in steps]
        self._is_begun = True
        doubling = [(1 << n) - 1 for n in range(num.bit_length())]
        return sorted({*doubling, num - 1}) if num else []

    def note(self, indices: Sequence[int], are_there: Sequence[bool]) -> None:
        """Note which of the blocks that were chosen are there."""
        for index, is_there in zip(indices, are_there, strict=True):
            if not is_there:
                self._end = index
                return
            self.num_found = index + 1
