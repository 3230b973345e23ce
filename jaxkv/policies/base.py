"""The contract of a cache policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.policies.directory import Directory
from jaxkv.policies.native import NativePolicy
from jaxkv.types import PyTree


class EvictResult(NamedTuple):
    """The result of an eviction.

    Attributes:
        state: The policy's state afterwards; bit for bit as it was if not `ok`.
        block_ids: i32[K]. Victims in the order of eviction, then NO_BLOCK.
        keys: u32[K, 8]. The victims' keys, then zeros.
        ok: bool[]. Whether the requested number of blocks was evicted.
    """

    state: PyTree
    block_ids: jax.Array
    keys: jax.Array
    ok: jax.Array


class InsertResult(NamedTuple):
    """The keys of a batch that were added.

    Attributes:
        state: The policy's state afterwards.
        inserted: bool[K]. Whether the key was added. If a key with a block was not, the
            key directory had no room for it: treat the block as not stored.
    """

    state: PyTree
    inserted: jax.Array


class Held(NamedTuple):
    """The n resident blocks that one policy hands over to another."""

    directory: Directory  # The block that holds a key; an entry is a block id.
    blocks: NDArray[np.int32]
    """i32[n]. The blocks that hold a key, the last used at the end."""


class Learned(NamedTuple):
    """The state of a shadow: the same policy in a tier that saw the same requests."""

    state: PyTree  # The shadow's policy state.
    blocks: NDArray[np.int32]
    """i32[n]. For each of `Held.blocks`, the shadow's block with its key; if there is
    none, that of the nearest block in the order of use that has one."""
    scale: int  # Keys of the tier for each key of the shadow.


class Policy(NamedTuple):
    """A cache policy: which block to evict when the host tier is full.

    A policy maps keys to host block ids and keeps them in an order. It does not see
    bytes; `evict` gets the reference counts. Every function except `snapshot`,
    `hand_over` and `take_over` is pure and may be traced; none raises, and none depends
    on anything except its arguments. A batch is `keys: u32[K, 8]`; its first
    `count: i32[]` keys are valid, the others padding.

    Attributes:
        num_blocks: Blocks of the tier that the policy was made for, B.
        max_batch: Maximum valid keys in one `touch` or `insert`.
        init: ``() -> state``. An empty cache.
        find: ``(state, keys, count) -> i32[K]``. The block of each key, NO_BLOCK
            where the key is absent or padding. Changes no order.
        touch: ``(state, keys, count, ready) -> state``. Record a use of each key; the
            first key ends as the most recent. Unknown keys are ignored. Where `ready`
            (bool[K]) is false, the store of the key's block, if any, is in flight.
        insert: ``(state, keys, block_ids) -> InsertResult``. Add each key whose
            `block_ids` (i32[K]) is not NO_BLOCK; these keys are absent and unique.
        remove: ``(state, keys, block_ids) -> state``. Forget each key whose `block_ids`
            is not NO_BLOCK; `block_ids` has the keys' blocks, each once.
        evict: ``(state, num, ref_cnt, width) -> EvictResult``. Evict `num` (i32[])
            blocks whose `ref_cnt` (i32[B]) is 0, all or none. `width`, static and at
            least `num`, is the K of the result.
        snapshot: ``(state) -> dict``. Describe a state, on the host and not under jit.
            Each list in the dict has keys (`bytes`); every key with a block is in one
            of the lists, and no key is in two. Other values are up to the policy.
        note: ``(state, kind, keys, count, positions, facts) -> (state, mark)``. Learn
            from an event of a request with these keys. `jaxkv.policies.facts` lists the
            events (`kind`, static) and their facts (i32[8]). `positions` (i32[K]) count
            the blocks before each key in its prefix; 0 begins another prefix. `mark`
            (i32[]) of `BEGIN` is a fact of `FINISH`. None if the policy ignores events:
            then they cost nothing.
        native: The same transitions in place, for callers in Python; None if there are
            none: then these callers run the pure functions.
        retains: Whether `note` handles `RETAIN`, which gives blocks a priority;
            `jaxkv.policies.make_retained` makes such a policy.
        always_evicts: Whether `evict` always succeeds if `num` blocks hold a key and
            have a `ref_cnt` of 0.
        hand_over: ``(state) -> Held``. Return the blocks for another policy, on the
            host; None if the policy cannot be replaced.
        take_over: ``(held, learned) -> state``. Make a state that takes over blocks in
            place, on the host; `learned` (`Learned`) may be None. None if the policy
            cannot replace another.
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
    native: NativePolicy | None = None
    note: Callable[..., tuple[PyTree, jax.Array]] | None = None
    retains: bool = False
    always_evicts: bool = False
    hand_over: Callable[[PyTree], Held] | None = None
    take_over: Callable[[Held, Learned | None], PyTree] | None = None

    @property
    def listens(self) -> bool:
        """Whether the policy uses events of requests."""
        return self.note is not None
