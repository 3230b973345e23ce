"""Types that all tiers share: mediums, block ids, and the answers of calls."""

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
"""The host tier's medium in events, spelled as in vLLM."""

DEVICE_MEDIUM = "GPU"
"""The device tier's medium in events, for any kind of device, as in vLLM."""

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | jax.Array
"""Ids of blocks of one tier."""


def as_ids(block_ids: BlockIds, name: str = "block_id") -> NDArray[Any]:
    """Convert block ids to i64[n]; raise unless they are a flat list of 64-bit ints."""
    requirement = "must be a flat list of ints"
    # The exact type first: `isinstance` is slow for the other types.
    cls = type(block_ids)
    if cls is not list and cls is not np.ndarray and isinstance(block_ids, jax.Array):
        block_ids = np.asarray(block_ids)
    if isinstance(block_ids, np.ndarray):
        if block_ids.dtype.kind not in "iu" or block_ids.ndim != 1:
            raise TypeError(f"{name}s={shown(block_ids)} {requirement}.")
        if cls is not np.ndarray and np.ma.is_masked(block_ids):
            raise TypeError(f"{name}s={shown(block_ids)} must not be masked.")
        if block_ids.dtype.kind == "u" and block_ids.size:
            # As i64, ids of 64 bits would be negative.
            refuse_outside(block_ids, 1 << 63, name=name)
        return np.ascontiguousarray(block_ids, np.int64)
    if cls is not list and isinstance(block_ids, str | bytes | bytearray):
        # `array` would read the bytes.
        raise TypeError(f"{name}s={shown(block_ids)} {requirement}.")
    try:
        # Three times as fast as NumPy for a list.
        return np.frombuffer(array("q", block_ids), np.int64)
    except TypeError:
        raise TypeError(f"{name}s={shown(block_ids)} {requirement}.") from None
    except OverflowError:
        largest = max(block_ids, key=abs)
        raise ValueError(f"{name}={shown(largest)} has more than 64 bits.") from None


def refuse_outside(
    ids: NDArray[np.integer[Any]], end: int, min_id: int = 0, name: str = "block_id"
) -> None:
    """Raise ValueError if an id is not in [min_id, end)."""
    if ids.size and not (min_id <= int(ids.min()) and int(ids.max()) < end):
        bad_id = next(id_ for id_ in ids.tolist() if not min_id <= id_ < end)
        raise ValueError(f"{name}={bad_id} must be in [{min_id}, {end}).")


@dataclasses.dataclass(eq=False, slots=True)
class LoadStoreSpec:
    """The host blocks of a transfer.

    Attributes:
        block_ids: i64[n]. The block of each key, in the order of the call.
    """

    block_ids: NDArray[np.int64]

    @staticmethod
    def medium() -> str:
        """Return the medium of the tier with these blocks."""
        return HOST_MEDIUM


class Placement(NamedTuple):
    """The answer of `BlockIndex.place`."""

    keys: Sequence[BlockKey]  # The absent keys, in the order of the call.
    rows: NDArray[np.int64] | None
    """i64[n]. The first row of each of `keys` in the call; None if all rows are."""
    block_ids: NDArray[np.int64]  # i64[n]. The block allocated for each key.
    evicted_keys: Sequence[BlockKey]
    """In the order of eviction. Overwritten by the next call."""


@dataclasses.dataclass(eq=False, slots=True)
class PrepareStoreOutput:
    """The answer of `OffloadingManager.prepare_store`.

    Attributes:
        block_hashes_to_store: Absent keys, in the order of the call.
        store_spec: The block allocated for each of these keys.
        block_hashes_evicted: Evicted keys, in the order of eviction.
        rows: i64[n]. The first row of each key to store in the call.
    """

    block_hashes_to_store: list[BlockKey]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[BlockKey]
    rows: NDArray[np.int64]


@dataclasses.dataclass(eq=False, slots=True)
class RequestStepOutput:
    """The answer of `OffloadingManager.request_step`.

    Attributes:
        num_hits: Length of the prefix whose blocks are on the host.
        load_spec: The blocks of the hits, pinned until the step is completed.
        store: Keys to store and evicted keys; None if there is no room.
        pending: The manager's record of the step, for `complete_step`.
    """

    num_hits: int
    load_spec: LoadStoreSpec
    store: PrepareStoreOutput | None
    pending: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that became findable on a tier, or were removed from it.

    Attributes:
        block_hashes: The keys, in order; empty if all blocks were removed.
        block_size: Tokens in a block.
        medium: `DEVICE_MEDIUM`, `HOST_MEDIUM` or the medium of a tier below the host.
        removed: Whether the blocks were removed.
    """

    block_hashes: list[BlockKey]
    block_size: int
    medium: str
    removed: bool
