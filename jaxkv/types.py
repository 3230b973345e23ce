"""The vocabulary of jaxkv: dimension letters, sentinels, contracts and values.

Letters used in shape descriptions, everywhere:

    K   keys or block ids in one call, padded to a bucket
    B   blocks of one tier (device or host)
    E   entries that a policy knows (at least B; more where ghosts are kept)
    L   positions in a recency log

An array entry in a docstring begins with its ``dtype[shape]``; quantities carry
their unit in the name (``host_bytes``, ``wall_s``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

BlockKey: TypeAlias = bytes
"""Names a block by its content. `jaxkv.hashing` makes keys of `KEY_BYTES`."""

PyTree: TypeAlias = Any
"""A nest of containers with arrays at the leaves, as JAX understands it."""

KEY_BYTES = 32
KEY_LANES = 8
"""A key on the array side is uint32[KEY_LANES], compared in full."""

NO_BLOCK = -1
"""The block id that stands for "none"; never an index."""

HOST_MEDIUM = "CPU"
"""The medium in events of the host tier, spelled as vLLM spells it."""

DEVICE_MEDIUM = "GPU"
"""The medium in events of the device tier, whatever the device, as in vLLM."""


class EvictResult(NamedTuple):
    """What a policy gave up.

    Attributes:
        state: The policy's state afterwards; bit for bit as it was if not `ok`.
        block_ids: i32[K]. Victims in the order of eviction, then NO_BLOCK.
        keys: u32[K, 8]. The victims' keys, then zeros.
        ok: bool[]. Whether all the blocks asked for were found.
    """

    state: PyTree
    block_ids: jax.Array
    keys: jax.Array
    ok: jax.Array


class InsertResult(NamedTuple):
    """What became of a batch of new keys.

    Attributes:
        state: The policy's state afterwards.
        inserted: bool[K]. Whether the key was added. One that was to be and was not
            found no room in the key directory and must be treated as not stored.
    """

    state: PyTree
    inserted: jax.Array


class Policy(NamedTuple):
    """A cache policy: which block to give up when the host tier is full.

    A policy maps keys to host block ids and keeps an order among them. It knows
    nothing of bytes, and the manager shows it the reference counts where it has to
    look at them. Every function but `snapshot` is pure and may be traced; none raises,
    none looks at anything but its arguments. Batches are `keys: u32[K, 8]` of which
    the first `count: i32[]` are meant; the rest is padding.

    Attributes:
        num_blocks: Blocks of the tier that the policy was made for, B.
        max_batch: Most keys that one `touch` or `insert` may mean.
        init: ``() -> state``. An empty cache.
        find: ``(state, keys, count) -> i32[K]``. The block of each key, NO_BLOCK
            where the key is absent or padding. Changes no order.
        touch: ``(state, keys, count, ready) -> state``. Record a use of each key; the
            first key ends as the most recent. Unknown keys are ignored. Where `ready`
            (bool[K]) is false, the key's block, if any, is still being stored.
        insert: ``(state, keys, block_ids) -> InsertResult``. Add a key wherever
            `block_ids` (i32[K]) is not NO_BLOCK; these keys are absent and distinct.
        remove: ``(state, keys, block_ids) -> state``. Forget a key wherever
            `block_ids` is not NO_BLOCK; these are the keys' blocks, each once.
        evict: ``(state, num, ref_cnt, width) -> EvictResult``. Give up `num` (i32[])
            blocks whose `ref_cnt` (i32[B]) is 0, all or none. `width` is static: the
            K of the answer, at least `num`.
        snapshot: ``(state) -> dict``. Show a state to a reader, on the host and not
            under jit. A list in the dict is a list of keys, `bytes`; every key that
            has a block is in one of the lists, and no key is in two. What else is
            in the dict, such as a number, is the policy's own.
    """

    num_blocks: int
    max_batch: int
    init: Callable[[], PyTree]
    find: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
    touch: Callable[[PyTree, jax.Array, jax.Array, jax.Array], PyTree]
    insert: Callable[[PyTree, jax.Array, jax.Array], InsertResult]
    remove: Callable[[PyTree, jax.Array, jax.Array], PyTree]
    evict: Callable[[PyTree, jax.Array, jax.Array, int], EvictResult]
    snapshot: Callable[[PyTree], dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
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


@dataclasses.dataclass(frozen=True, eq=False)
class PrepareStoreOutput:
    """The answer of `OffloadingManager.prepare_store`.

    Attributes:
        block_hashes_to_store: Keys that were absent, in the order given.
        store_spec: Where each of them goes.
        block_hashes_evicted: Keys that had to leave, in the order of eviction.
    """

    block_hashes_to_store: list[BlockKey]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[BlockKey]


@dataclasses.dataclass(frozen=True, eq=False)
class RequestStepOutput:
    """The answer of `OffloadingManager.request_step`.

    Attributes:
        num_hits: Keys, from the first on, whose blocks are on the host.
        load_spec: Where these are. They are pinned until the step is completed.
        store: What to store where, and what had to leave; None if there is no room.
    """

    num_hits: int
    load_spec: LoadStoreSpec
    store: PrepareStoreOutput | None


@dataclasses.dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that became findable on a tier, or left it.

    Attributes:
        block_hashes: Their keys, in the order in which it happened; none if all that
            the tier had left it.
        block_size: Tokens in a block.
        medium: `HOST_MEDIUM` or `DEVICE_MEDIUM`.
        removed: True if they left.
    """

    block_hashes: list[BlockKey]
    block_size: int
    medium: str
    removed: bool
