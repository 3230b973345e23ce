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
        ok: bool[]. Whether all the blocks asked for were found.
    """

    state: PyTree
    block_ids: jax.Array
    keys: jax.Array
    ok: jax.Array


class InsertResult(NamedTuple):
    """The keys of a batch that were added.

    Attributes:
        state: The policy's state afterwards.
        inserted: bool[K]. Whether the key was added. A key with a block that was not
            added found no room in the key directory and must be treated as not stored.
    """

    state: PyTree
    inserted: jax.Array


class Held(NamedTuple):
    """The blocks that a policy hands over to another: n blocks of the tier."""

    directory: Directory  # The block that holds a key; an entry is a block id.
    blocks: NDArray[np.int32]
    """i32[n]. The blocks that hold a key, the last used at the end."""


class Learned(NamedTuple):
    """The lessons of a policy in another tier that was shown the same requests."""

    state: PyTree  # Its state there.
    blocks: NDArray[np.int32]
    """i32[n]. The block there with the key of each of `Held.blocks`, or else of the
    nearest of them, in the order of use, that has one."""
    scale: int  # How many keys each key of the other tier stands for.


class Policy(NamedTuple):
    """A cache policy: which block to evict when the host tier is full.

    A policy maps keys to host block ids and keeps an order among them. It knows
    nothing of bytes, and the manager shows it the reference counts where it has to
    look at them. Every function but `snapshot` is pure and may be traced; none raises,
    none looks at anything but its arguments. A batch is `keys: u32[K, 8]`; its first
    `count: i32[]` keys are meant, the rest is padding.

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
        evict: ``(state, num, ref_cnt, width) -> EvictResult``. Evict `num` (i32[])
            blocks whose `ref_cnt` (i32[B]) is 0, all or none. `width` is static: the
            K of the answer, at least `num`.
        snapshot: ``(state) -> dict``. Show a state to a reader, on the host and not
            under jit. A list in the dict is a list of keys, `bytes`; every key that
            has a block is in one of the lists, and no key is in two. What else is
            in the dict, such as a number, is the policy's own.
        note: ``(state, kind, keys, count, positions, facts) -> (state, mark)``. Use
            facts (i32[8]) about a request with these keys. `jaxkv.policies.facts`
            lists each `kind`, which is static, and the facts. `positions`
            (i32[K]) count the blocks before each key in its prefix; 0 begins another
            prefix. `mark` (i32[]) of `BEGIN` is a fact of `FINISH`. None where the
            policy uses no such facts: then it is never called, and costs nothing.
        native: The same transitions in place, for callers in Python; None where there
            are none, and then these callers run the pure functions.
        retains: Whether `note` gives blocks the priority of `RETAIN`;
            `jaxkv.policies.make_retained` makes a policy that does.
        always_evicts: Whether `evict` finds `num` blocks wherever as many hold a key
            and have a `ref_cnt` of 0, whatever happened before.
        hand_over: ``(state) -> Held``. Say what another policy needs to take over, on
            the host; None where it cannot.
        take_over: ``(held, learned) -> state``. Make the state of a policy that takes
            over blocks as they are, on the host; `learned` (`Learned`) may be None.
            None where it cannot.
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
        """Whether the policy uses facts about requests."""
        return self.note is not None
