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
    """Make i64[n] of block ids; raise if they are no flat list of ints of 64 bits."""
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
    ids: NDArray[np.integer[Any]], end: int, min_id: int = 0, name: str = "block_id"
) -> None:
    """Raise ValueError if an id is not in [min_id, end)."""
    if ids.size and not (min_id <= int(ids.min()) and int(ids.max()) < end):
        wrong = next(id_ for id_ in ids.tolist() if not min_id <= id_ < end)
        raise ValueError(f"{name}={wrong} must be in [{min_id}, {end}).")


@dataclasses.dataclass(eq=False, slots=True)
class LoadStoreSpec:
    """Host blocks on one side of a transfer.

    Attributes:
        block_ids: i64[n]. In the order of the keys in the call.
    """

    block_ids: NDArray[np.int64]

    @staticmethod
    def medium() -> str:
        """Return the name of the tier with these blocks."""
        return HOST_MEDIUM


class Placement(NamedTuple):
    """Where `BlockIndex.place` has found room."""

    keys: Sequence[BlockKey]  # Absent keys, in the order given.
    rows: NDArray[np.int64] | None
    """i64[n]. Their first rows among the keys given; None for all."""
    block_ids: NDArray[np.int64]  # i64[n]. The block for each of them.
    evicted_keys: Sequence[BlockKey]
    """In the order of eviction. Good until the next call."""


@dataclasses.dataclass(eq=False, slots=True)
class PrepareStoreOutput:
    """The answer of `OffloadingManager.prepare_store`.

    Attributes:
        block_hashes_to_store: Absent keys, in the order given.
        store_spec: The block for each of them.
        block_hashes_evicted: Evicted keys, in the order of eviction.
        rows: i64[n]. The first row of each key to store among the keys given.
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
        load_spec: The blocks of these. They are pinned until the step is completed.
        store: Keys to store and evicted keys; None if there is no room.
        pending: The manager's record of the step, for `complete_step`.
    """

    num_hits: int
    load_spec: LoadStoreSpec
    store: PrepareStoreOutput | None
    pending: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that became findable on a tier, or left it.

    Attributes:
        block_hashes: Their keys, in order; none if all blocks left the tier.
        block_size: Tokens in a block.
        medium: `DEVICE_MEDIUM`, `HOST_MEDIUM` or the medium of a tier below the host.
        removed: True if they left.
    """

    block_hashes: list[BlockKey]
    block_size: int
    medium: str
    removed: bool
