"""What tiers have in common: their names, what they can do, and what they answer."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.types import BlockKey

HOST_MEDIUM = "CPU"
"""The medium in events of the host tier, spelled as vLLM spells it."""

DEVICE_MEDIUM = "GPU"
"""The medium in events of the device tier, whatever the device, as in vLLM."""

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | jax.Array
"""Ids of blocks of one tier."""


def as_ids(block_ids: BlockIds, name: str = "block_id") -> NDArray[Any]:
    """Make i64[n] of block ids.

    Raises:
        TypeError: If they are no flat list of ints.
        ValueError: If one needs more than 64 bits.
    """
    flat = "must be a flat list of ints"
    if isinstance(block_ids, jax.Array):
        block_ids = np.asarray(block_ids)
    if isinstance(block_ids, np.ndarray):
        if block_ids.dtype.kind not in "iu" or block_ids.ndim != 1:
            raise TypeError(f"{name}s={shown(block_ids)} {flat}.")
        if type(block_ids) is not np.ndarray and np.ma.is_masked(block_ids):
            raise TypeError(f"{name}s={shown(block_ids)} must not be masked.")
        if block_ids.dtype == np.uint64 and block_ids.size:
            refuse_outside(
                block_ids, 1 << 63, name=name
            )  # Else they would become negative.
        return np.ascontiguousarray(block_ids, np.int64)
    if isinstance(block_ids, str | bytes | bytearray):  # Which `array` would unpack.
        raise TypeError(f"{name}s={shown(block_ids)} {flat}.")
    try:
        # Takes a third of the time that NumPy takes for a list.
        return np.frombuffer(array("q", block_ids), np.int64)
    except TypeError:
        raise TypeError(f"{name}s={shown(block_ids)} {flat}.") from None
    except OverflowError:
        wrong = max(block_ids, key=abs)
        raise ValueError(f"{name}={shown(wrong)} has more than 64 bits.") from None


def refuse_outside(
    ids: NDArray[np.integer[Any]], end: int, least: int = 0, name: str = "block_id"
) -> None:
    """Raise ValueError if an id is not in [least, end)."""
    if ids.size and not (least <= int(ids.min()) and int(ids.max()) < end):
        wrong = next(each for each in ids.tolist() if not least <= each < end)
        raise ValueError(f"{name}={wrong} must be in [{least}, {end}).")


@dataclasses.dataclass(eq=False, slots=True)
class LoadStoreSpec:
    """Host blocks on one side of a transfer.

    Attributes:
        block_ids: i64[n]. In the order of the keys that were asked about.
    """

    block_ids: NDArray[np.int64]

    @staticmethod
    def medium() -> str:
        """Name the tier that the ids belong to."""
        return HOST_MEDIUM


class Placement(NamedTuple):
    """Where `BlockIndex.place` has found room, and for what.

    Attributes:
        keys: Keys that were absent, in the order given.
        rows: Which of the keys given these were, by their first place: i64[n]; None
            for all.
        block_ids: i64[n]. Where each of them goes.
        evicted_keys: Keys that had to leave, in the order of eviction. Good until the
            next call.
    """

    keys: Sequence[BlockKey]
    rows: NDArray[np.int64] | None
    block_ids: NDArray[np.int64]
    evicted_keys: Sequence[BlockKey]


@dataclasses.dataclass(eq=False, slots=True)
class PrepareStoreOutput:
    """The answer of `OffloadingManager.prepare_store`.

    Attributes:
        block_hashes_to_store: Keys that were absent, in the order given.
        store_spec: Where each of them goes.
        block_hashes_evicted: Keys that had to leave, in the order of eviction.
        rows: Which of the keys given those to store were, by their first place: i64[n].
    """

    block_hashes_to_store: list[BlockKey]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[BlockKey]
    rows: NDArray[np.int64]


@dataclasses.dataclass(eq=False, slots=True)
class RequestStepOutput:
    """The answer of `OffloadingManager.request_step`.

    Attributes:
        num_hits: Keys, from the first on, whose blocks are on the host.
        load_spec: Where these are. They are pinned until the step is completed.
        store: What to store where, and what had to leave; None if there is no room.
        pending: The manager's note of what `complete_step` is to end.
    """

    num_hits: int
    load_spec: LoadStoreSpec
    store: PrepareStoreOutput | None
    pending: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that became findable on a tier, or left it.

    Attributes:
        block_hashes: Their keys, in the order in which it happened; none if all that
            the tier had left it.
        block_size: Tokens in a block.
        medium: `DEVICE_MEDIUM`, `HOST_MEDIUM` or that of a tier below the host.
        removed: True if they left.
    """

    block_hashes: list[BlockKey]
    block_size: int
    medium: str
    removed: bool
