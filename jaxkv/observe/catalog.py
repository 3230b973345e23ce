"""What is behind each key, for those outside who do not have it.

A tier knows keys. A router that is to find a prompt's blocks needs their tokens, and
which block each follows. The catalogue keeps both for as long as a tier has the block,
and for some blocks more: one that left every tier is soon computed again, and one that
was just named is not there yet.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from jaxkv.hashing import TOKEN_BYTES, KeyedBlock
from jaxkv.types import HOST_MEDIUM, BlockKey, OffloadingEvent


class BlockCatalog:
    """Remembers what keys were made of, and which tier has which block.

    It belongs to the thread that schedules, as the tiers do. Give `record` to every
    `KeyChain`; whoever publishes events calls `note`.

    Args:
        max_spare: Most blocks that are remembered though no tier has them; the oldest
            are forgotten first. Those that a tier has are remembered in any case, so
            that all together the catalogue knows no more than so many blocks besides
            the tiers' own.

    Raises:
        ValueError: If `max_spare` is too small.

    Example:
        >>> from jaxkv import KeyChain, Namespace, OffloadingEvent
        >>> catalog = BlockCatalog()
        >>> namespace = Namespace("m", "0", "int8", "flat", block_size=2)
        >>> keys = KeyChain(namespace, record=catalog.record).extend([7, 8, 9, 10])
        >>> catalog.find(keys[1]).parent == keys[0]
        True
        >>> catalog.note(OffloadingEvent(keys, 2, "CPU", removed=False))
        >>> catalog.num_held("CPU"), catalog.num_held("GPU")
        (2, 0)
    """

    def __init__(self, max_spare: int = 65_536) -> None:
        if max_spare < 0:
            raise ValueError(f"{max_spare=} must be at least 0.")
        self.max_spare = max_spare
        self._known: dict[BlockKey, KeyedBlock] = {}
        # Known, on no tier; oldest first. A dict is slow to find its first item again.
        self._spare: OrderedDict[BlockKey, None] = OrderedDict()
        self._tiers: dict[str, dict[BlockKey, int]] = {}  # copies of each block
        self._block_sizes: dict[str, int] = {}
        self._num_tiers: dict[BlockKey, int] = {}  # how many tiers have it
        # Host blocks of several. They are to leave as what they came as, whatever was
        # learnt since.
        self._parts: dict[BlockKey, tuple[BlockKey, ...]] = {}

    def __len__(self) -> int:
        """Count the blocks that are known."""
        return len(self._known)

    def record(self, block: KeyedBlock) -> None:
        """Remember a block. One that is known already counts as new again."""
        key = block.key
        self._known[key] = block
        if key not in self._num_tiers:
            self._spare[key] = None
            self._spare.move_to_end(key)
            self._drop_oldest()

    def find(self, key: BlockKey) -> KeyedBlock | None:
        """Tell what a key was made of; None if that is not known."""
        return self._known.get(key)

    def num_held(self, medium: str) -> int:
        """Count the blocks that a tier has, copies of one block once."""
        return len(self._tiers.get(medium, ()))

    def held(self, medium: str) -> Mapping[BlockKey, int]:
        """Tell which blocks a tier has, and how many copies of each."""
        return self._tiers.get(medium, {})

    def media(self) -> Iterator[str]:
        """Name the tiers that have something, the first to be heard of first."""
        return (medium for medium, copies in self._tiers.items() if copies)

    def block_size(self, medium: str) -> int:
        """Tell how many tokens a tier's blocks have by its own last event."""
        return self._block_sizes.get(medium, 0)

    def parts(self, event: OffloadingEvent) -> list[BlockKey]:
        """List the blocks of an event, host blocks of several taken apart.

        Such a host block (`OffloadRules.blocks_per_host_block`) has the key of the last
        device block in it, and its event tells how many tokens are in all of them.

        Args:
            event: One that `note` has not seen yet.

        Returns:
            Keys of device blocks, those of one host block in a row; the key of a host
            block whose parts are not known.
        """
        return list(itertools.chain.from_iterable(self._parts_of_each(event)))

    def note(self, event: OffloadingEvent) -> None:
        """Take note of what a tier got or lost."""
        copies = self._tiers.setdefault(event.medium, {})
        self._block_sizes[event.medium] = event.block_size
        if not event.block_hashes:
            for part in list(copies):
                copies[part] = 1
                self._take(copies, part)
            if event.medium == HOST_MEDIUM:
                self._parts.clear()
        each = self._parts_of_each(event)
        for key, parts in zip(event.block_hashes, each, strict=True):
            for part in parts:
                (self._take if event.removed else self._add)(copies, part)
            if event.removed and event.medium == HOST_MEDIUM:
                self._parts.pop(key, None)
            elif len(parts) > 1:
                self._parts[key] = parts

    def _parts_of_each(self, event: OffloadingEvent) -> list[tuple[BlockKey, ...]]:
        keys = event.block_hashes
        if event.medium != HOST_MEDIUM:
            return [(key,) for key in keys]
        if event.removed:
            return [self._parts.get(key, (key,)) for key in keys]
        return [self._take_apart(key, event.block_size) for key in keys]

    def _take_apart(self, key: BlockKey, block_size: int) -> tuple[BlockKey, ...]:
        """Go back from a host block's key to those of all blocks in it."""
        block = self._known.get(key)
        if block is None or block.group:  # A model of several groups has no such rows.
            return (key,)
        num, rest = divmod(block_size * TOKEN_BYTES, len(block.tokens))
        parts = [key]
        while block and block.parent is not None and len(parts) < num:
            parts.append(block.parent)
            block = self._known.get(block.parent)
        if block is None or len(parts) < num or rest:
            return (key,)
        return tuple(reversed(parts))

    def _add(self, copies: dict[BlockKey, int], key: BlockKey) -> None:
        if key not in copies:
            self._num_tiers[key] = self._num_tiers.get(key, 0) + 1
            self._spare.pop(key, None)
        copies[key] = copies.get(key, 0) + 1

    def _take(self, copies: dict[BlockKey, int], key: BlockKey) -> None:
        """Take one copy away; of what a tier does not have, none."""
        left = copies.pop(key, 0) - 1
        if left > 0:
            copies[key] = left
        elif left == 0:
            self._num_tiers[key] -= 1
            if not self._num_tiers[key]:
                del self._num_tiers[key]
                if key in self._known:
                    self._spare[key] = None
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._spare) > self.max_spare:
            oldest, _ = self._spare.popitem(last=False)
            del self._known[oldest]
