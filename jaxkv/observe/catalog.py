"""The catalogue: the tokens and the parent behind each key, for events.

A tier knows only keys. A router that looks for the blocks of a prompt needs their
tokens and parents. The catalogue keeps both while a tier has the block, and for a
limited number of other blocks: new ones are not on a tier yet, and evicted ones are
often computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxkv.keys.hashing import TOKEN_BYTES, KeyedBlock
from jaxkv.tiers.base import DEVICE_MEDIUM, OffloadingEvent
from jaxkv.types import BlockKey


class BlockCatalog:
    """The inputs of keys, and which tier has which block.

    Only the scheduling thread uses it, like the tiers. Pass `record` to every
    `KeyChain`; the publisher of events calls `note`. Blocks on a tier are always kept,
    and at most `max_spare` others: the oldest are dropped first.

        >>> from jaxkv import KeyChain, Namespace, OffloadingEvent
        >>> catalog = BlockCatalog()
        >>> namespace = Namespace("m", "0", "int8", "flat", block_size=2)
        >>> keys = KeyChain(namespace, record=catalog.record).extend([7, 8, 9, 10])
        >>> catalog.find(keys[1]).parent == keys[0]
        True
        >>> catalog.note(OffloadingEvent(keys, 2, "CPU", removed=False))
        >>> len(catalog.held("CPU")), len(catalog.held("GPU"))
        (2, 0)
    """

    def __init__(self, max_spare: int = 65_536) -> None:
        if max_spare < 0:
            raise ValueError(f"{max_spare=} must be at least 0.")
        self.max_spare = max_spare
        self._blocks: dict[BlockKey, KeyedBlock] = {}
        # Blocks on no tier; oldest first. Popping the first item of a dict is slow.
        self._spare: OrderedDict[BlockKey, None] = OrderedDict()
        self._tiers: dict[str, dict[BlockKey, int]] = {}  # Copies of each block.
        self._block_sizes: dict[str, int] = {}
        # By tier: the device blocks of each of its blocks that hold several.
        self._rows: dict[str, dict[BlockKey, tuple[KeyedBlock, ...]]] = {}

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._blocks)

    def record(self, block: KeyedBlock) -> None:
        """Keep a block; a block that is already known becomes the newest."""
        key = block.key
        self._blocks[key] = block
        if not self._is_held(key):
            self._spare[key] = None
            self._spare.move_to_end(key)
            self._drop_oldest()

    def find(self, key: BlockKey) -> KeyedBlock | None:
        """Return the block of a key; None if it is not known."""
        return self._blocks.get(key)

    def held(self, medium: str) -> Mapping[BlockKey, int]:
        """Return the blocks on a tier and the number of copies of each."""
        return self._tiers.get(medium, {})

    def copies(self, medium: str) -> list[BlockKey]:
        """List the blocks on a tier, each as often as it has copies."""
        return [key for key, num in self.held(medium).items() for _ in range(num)]

    def media(self) -> Iterator[str]:
        """Return the tiers that have blocks, in the order of their first event."""
        return (medium for medium, copies in self._tiers.items() if copies)

    def block_size(self, medium: str) -> int:
        """Return the tokens per block of a tier, from its last event."""
        return self._block_sizes.get(medium, 0)

    def blocks_of(
        self, key: BlockKey, event: OffloadingEvent
    ) -> tuple[KeyedBlock, ...]:
        """Return the device blocks in a block of an event, in order; () if unknown.

        A host block of several device blocks (`OffloadRules.blocks_per_host_block`) has
        the key of its last one, and is found by that key only. Its event has the tokens
        of all as its block size.
        """
        row, block = self._rows.get(event.medium, {}).get(key), self._blocks.get(key)
        if row is not None or block is None:
            return row or ()
        num, rest = 1, 0
        # Models of several groups have one device block per host block.
        if event.medium != DEVICE_MEDIUM and not block.group:
            num, rest = divmod(event.block_size * TOKEN_BYTES, len(block.tokens))
        blocks = [block]
        while block and len(blocks) < num:
            block = self._blocks.get(block.parent or b"")
            blocks += [block] if block else []
        return () if rest or len(blocks) < num else tuple(reversed(blocks))

    def note(self, event: OffloadingEvent) -> None:
        """Record the blocks that a tier stored or removed."""
        copies = self._tiers.setdefault(event.medium, {})
        rows = self._rows.setdefault(event.medium, {})
        self._block_sizes[event.medium] = event.block_size
        if not event.block_hashes:
            rows.clear()
            for key in list(copies):
                copies[key] = 1
                self._remove(copies, key)
        for key in event.block_hashes:
            if event.removed:
                self._remove(copies, key)
                if key not in copies:
                    rows.pop(key, None)
                continue
            blocks = self.blocks_of(key, event)
            if len(blocks) > 1:
                rows[key] = blocks
            self._add(copies, key)

    def _add(self, copies: dict[BlockKey, int], key: BlockKey) -> None:
        self._spare.pop(key, None)
        copies[key] = copies.get(key, 0) + 1

    def _remove(self, copies: dict[BlockKey, int], key: BlockKey) -> None:
        """Remove one copy, if the tier has the block."""
        left = copies.pop(key, 0) - 1
        if left > 0:
            copies[key] = left
        elif left == 0 and key in self._blocks and not self._is_held(key):
            self._spare[key] = None
            self._drop_oldest()

    def _is_held(self, key: BlockKey) -> bool:
        return any(key in copies for copies in self._tiers.values())

    def _drop_oldest(self) -> None:
        while len(self._spare) > self.max_spare:
            oldest, _ = self._spare.popitem(last=False)
            del self._blocks[oldest]


def join_extra_keys(
    row: Iterable[Any], extra_keys_of: Callable[[Any], tuple[Any, ...] | None]
) -> tuple[Any, ...] | None:
    """Join the extra keys of device blocks; offsets count from their first token."""
    keys: dict[Any, None] = {}
    start = 0
    for block in row:
        for key in extra_keys_of(block) or ():
            # Items of a prompt have offsets; older vLLMs' other keys are pairs, too.
            has_offset = isinstance(key, tuple) and isinstance(key[1], int)
            keys[(key[0], key[1] + start) if has_offset else key] = None
        start += len(block.tokens) // TOKEN_BYTES
    return tuple(keys) or None
