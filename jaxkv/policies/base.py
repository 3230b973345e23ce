"""The contract of a cache policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxkv.policies.native import NativePolicy
from jaxkv.types import PyTree


class EvictResult(NamedTuple):
    """The result of an eviction.

    Attributes:
        state: The policy's state afterwards; if not `ok`, the state before, unchanged.
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
        inserted: bool[K]. Whether the key was added. If a key that has a block was not
            added, the key directory is full: treat the block as not stored.
    """

    state: PyTree
    inserted: jax.Array


def _absent(*_: Any) -> Any:
    raise TypeError("this policy has no pure functions: call its `native` ones.")


class Policy(NamedTuple):
    """A cache policy: which block to evict when the host tier is full.

    A policy maps keys to host block ids and keeps them in an order. It does not see
    bytes; `evict` gets the reference counts. It has pure functions, `native` ones that
    update the state in place, or both with the same results. The pure ones are `find`,
    `touch`, `insert`, `remove` and `evict`, all or none, and perhaps `note`: they may
    be traced, none raises, and each depends only on its arguments. A batch is
    `keys: u32[K, 8]`, of which the first `count: i32[]` are valid and the others are
    padding.

    Attributes:
        num_blocks: Blocks of the tier that the policy was made for, B.
        max_batch: Maximum valid keys in one `touch` or `insert`.
        init: ``() -> state``. An empty cache.
        find: ``(state, keys, count) -> i32[K]``. The block of each key, NO_BLOCK
            where the key is absent or padding. Changes no order.
        touch: ``(state, keys, count, ready) -> state``. Record a use of each key; the
            first key ends as the most recent. Unknown keys are ignored. `ready`
            (bool[K]) is false where the store of the key's block is still in flight.
        insert: ``(state, keys, block_ids) -> InsertResult``. Add each key whose
            `block_ids` (i32[K]) is not NO_BLOCK. These keys are absent and unique.
        remove: ``(state, keys, block_ids) -> state``. Forget each key whose `block_ids`
            (i32[K]), the block that holds it, is not NO_BLOCK. These keys are unique.
        evict: ``(state, num, ref_cnt, width) -> EvictResult``. Evict `num` (i32[])
            blocks whose `ref_cnt` (i32[B]) is 0, or none if fewer hold a key. `width`,
            static and at least `num`, is the K of the result.
        snapshot: ``(state) -> dict``. Describe a state, on the host and not under jit.
            Each list in the dict has keys (`bytes`). No key is in two lists, and every
            key with a block is in one. Other values are up to the policy.
        note: ``(state, kind, keys, count, positions, facts) -> (state, mark)``. Learn
            from an event of a request with these keys. `jaxkv.policies.facts` lists the
            events (`kind`, static) and their facts (i32[9]). `positions` (i32[K]) count
            the blocks before each key in its prefix; 0 begins another prefix. `FINISH`
            gets the `mark` (i32[]) that `BEGIN` returned, as a fact. None if the policy
            ignores events, which then cost nothing.
        admit: ``(state, keys, wanted, num_free, ref_cnt) -> bool[K]``. Which of the
            `wanted` keys (bool[K]) are to be stored, given `num_free` (i32[]) blocks
            without eviction; the others are declined, and count as not stored. Facts
            about them come by `note`. None if all are to be stored.
        native: In-place functions, for callers in Python, who run the pure ones if it
            is None.
        retains: Whether `note` handles `RETAIN`, which gives blocks a priority;
            `jaxkv.policies.make_retained` makes such a policy.
    """

    num_blocks: int
    max_batch: int
    init: Callable[[], PyTree]
    snapshot: Callable[[PyTree], dict[str, Any]]
    find: Callable[[PyTree, jax.Array, jax.Array], jax.Array] = _absent
    touch: Callable[[PyTree, jax.Array, jax.Array, jax.Array], PyTree] = _absent
    insert: Callable[[PyTree, jax.Array, jax.Array], InsertResult] = _absent
    remove: Callable[[PyTree, jax.Array, jax.Array], PyTree] = _absent
    evict: Callable[[PyTree, jax.Array, jax.Array, int], EvictResult] = _absent
    native: NativePolicy | None = None
    note: Callable[..., tuple[PyTree, jax.Array]] | None = None
    admit: Callable[..., jax.Array] | None = None
    retains: bool = False

    @property
    def listens(self) -> bool:
        """Whether the policy uses events of requests."""
        has_native = self.native is not None and self.native.note is not None
        return has_native or self.note is not None

    @property
    def is_pure(self) -> bool:
        """Whether the policy has pure functions, and can be traced."""
        return self.find is not _absent
