"""Which blocks hold which key, where several may hold the same.

The directory has one block for each key, the one that serves it. Two requests may
compute the same block at the same time, so that there are duplicates: those of a key
form a chain, in the order in which they came, the serving block first. When it goes,
the next one serves. Duplicates are rare: what they cost is in loops of no round where
there are none.

An entry is a block id, and the entry B (one past the last) stands for "none".
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.policies import directory as directory_lib
from jaxkv.policies.directory import Directory
from jaxkv.policies.ordering import after

_END = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """The keys of blocks.

    Attributes:
        directory: The serving block of each key. Its `keys` has the keys of
            duplicates too.
        has_key: bool[B]. Whether the block has a key.
        following: i32[B]. The duplicate that came after a block with a key, -1 after
            the last; stale where there is no key.
        preceding: i32[B]. The one that came before. The serving block, which has none
            before it, has the last of the chain here, as ``~last``, a number below 0.
    """

    directory: Directory
    has_key: Array
    following: Array
    preceding: Array


def init(num_blocks: int) -> PrefixCache:
    """Make a cache in which none of `num_blocks` has a key."""
    return PrefixCache(
        directory=directory_lib.init(num_blocks),
        has_key=jnp.zeros((num_blocks,), jnp.bool_),
        following=jnp.full((num_blocks,), _END, jnp.int32),
        preceding=jnp.full((num_blocks,), _END, jnp.int32),
    )


def find(cache: PrefixCache, keys: Array, valid: Array) -> Array:
    """Find the serving block of each key; as `directory.find`."""
    return directory_lib.find(cache.directory, keys, valid)


def keys_of(cache: PrefixCache, entries: Array) -> tuple[Array, Array]:
    """Read what blocks hold.

    Args:
        cache: The cache.
        entries: i32[K].

    Returns:
        bool[K], whether each has a key, and u32[K, 8], the key; of any content where
        there is none.
    """
    has_key = cache.has_key.at[entries].get(mode="fill", fill_value=False)
    return has_key, cache.directory.keys.at[entries].get(mode="fill", fill_value=0)


def add(cache: PrefixCache, entries: Array, keys: Array) -> tuple[PrefixCache, Array]:
    """Give keys to blocks that have none.

    Args:
        cache: The cache before.
        entries: i32[K]. The blocks, each once; B for padding.
        keys: u32[K, 8]. What they hold. A key may be known, and may be repeated.

    Returns:
        The cache after, and bool[K]: whether the block got the key. It does not only
        if the key is new and finds no room in the directory.
    """
    num_blocks = cache.has_key.shape[0]
    wanted = entries < num_blocks
    unknown = wanted & (find(cache, keys, wanted) == num_blocks)
    is_first = directory_lib.first_occurrence(keys, unknown)
    directory, serves = directory_lib.insert(
        cache.directory, keys, jnp.where(is_first, entries, num_blocks)
    )
    repeats = wanted & ~is_first
    alone = PrefixCache(
        directory=directory,
        has_key=cache.has_key,
        following=cache.following.at[entries].set(_END, mode="drop"),
        preceding=cache.preceding.at[entries].set(~entries, mode="drop"),
    )

    def link(
        carry: tuple[Array, PrefixCache, Array],
    ) -> tuple[Array, PrefixCache, Array]:
        todo, cache, _ = carry
        cache, linked = _link(cache, jnp.where(repeats, entries, num_blocks), keys)
        return ~todo, cache, serves | linked

    # One round at most, rather than a `cond`, which would copy.
    _, cache, added = lax.while_loop(
        lambda carry: carry[0], link, (jnp.any(repeats), alone, serves)
    )
    has_key = cache.has_key.at[jnp.where(added, entries, num_blocks)].set(
        True, mode="drop"
    )
    return dataclasses.replace(cache, has_key=has_key), added


def _link(cache: PrefixCache, entries: Array, keys: Array) -> tuple[PrefixCache, Array]:
    """Put duplicates (i32[K], B for none) at the end of their chains, in their order.

    Returns:
        The cache after, `has_key` apart, and bool[K]: whose key is known.
    """
    num_blocks = cache.has_key.shape[0]
    serving = find(cache, keys, entries < num_blocks)
    # The duplicates of a key side by side, and among them the order of the batch.
    by_chain = jnp.argsort(serving, stable=True)
    chain = serving[by_chain]
    known = chain < num_blocks
    linked = jnp.where(known, entries[by_chain], num_blocks)
    continues = jnp.concatenate([jnp.zeros(1, jnp.bool_), chain[1:] == chain[:-1]])
    last = ~cache.preceding.at[chain].get(mode="fill", fill_value=_END)
    before = jnp.where(continues, jnp.roll(linked, 1), last)
    is_last = jnp.concatenate([~continues[1:], jnp.ones(1, jnp.bool_)])
    # One scatter for both, of places of which none is in both.
    at = jnp.concatenate([linked, jnp.where(is_last, chain, num_blocks)])
    return (
        PrefixCache(
            directory=dataclasses.replace(
                cache.directory,
                keys=cache.directory.keys.at[linked].set(keys[by_chain], mode="drop"),
            ),
            has_key=cache.has_key,
            following=cache.following.at[jnp.where(known, before, num_blocks)].set(
                linked, mode="drop"
            ),
            preceding=cache.preceding.at[at].set(
                jnp.concatenate([before, ~linked]), mode="drop"
            ),
        ),
        serving < num_blocks,
    )


def drop(cache: PrefixCache, entries: Array) -> PrefixCache:
    """Take the keys from blocks.

    Args:
        cache: The cache before.
        entries: i32[K]. Blocks with or without a key, B for none. To repeat one does
            nothing more.

    Returns:
        The cache after.
    """
    num_blocks = cache.has_key.shape[0]
    had_key = cache.has_key.at[entries].get(mode="fill", fill_value=False)
    gone = jnp.where(had_key, entries, num_blocks)
    has_key = cache.has_key.at[gone].set(False, mode="drop")
    following = cache.following.at[gone].get(mode="fill", fill_value=_END)
    preceding = cache.preceding.at[gone].get(mode="fill", fill_value=_END)
    alone = (following == _END) & (preceding == ~gone)
    chained = jnp.where(alone, num_blocks, gone)

    def unlink(
        carry: tuple[Array, PrefixCache, Array],
    ) -> tuple[Array, PrefixCache, Array]:
        todo, cache, _ = carry
        cache, has_heir = _unlink(cache, chained)
        return ~todo, cache, has_heir

    _, cache, has_heir = lax.while_loop(
        lambda carry: carry[0],
        unlink,
        (
            jnp.any(chained < num_blocks),
            dataclasses.replace(cache, has_key=has_key),
            jnp.zeros(entries.shape, jnp.bool_),
        ),
    )
    served = (preceding < 0) & ~has_heir
    directory = directory_lib.remove(
        cache.directory, jnp.where(served, gone, num_blocks)
    )
    return dataclasses.replace(cache, directory=directory)


def _unlink(cache: PrefixCache, entries: Array) -> tuple[PrefixCache, Array]:
    """Take blocks that have duplicates (i32[K], B for none) out of their chains.

    Args:
        cache: The cache, in which these blocks, of their chains, have lost `has_key`.
        entries: i32[K].

    Returns:
        The cache after, in which no directory slot was emptied, and bool[K]: whether
        a duplicate of the block is left.
    """
    num_blocks = cache.has_key.shape[0]
    chained = entries < num_blocks

    def get(links: Array, at: Array) -> Array:
        at = jnp.where(at < 0, num_blocks, at)
        return links.at[at].get(mode="fill", fill_value=_END)

    def is_gone(block: Array) -> Array:
        at = jnp.where(block < 0, num_blocks, block)
        return ~cache.has_key.at[at].get(mode="fill", fill_value=True)

    # Where blocks go that follow one another, each has to find who stays before and
    # after them. Every round doubles how far they see (pointer jumping: Wyllie, 1979).
    def look_farther(
        carry: tuple[Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array]:
        following, preceding, right, left = carry
        right = jnp.where(is_gone(right), get(following, right), right)
        left = jnp.where(is_gone(left), get(preceding, left), left)
        return (
            following.at[entries].set(right, mode="drop"),
            preceding.at[entries].set(left, mode="drop"),
            right,
            left,
        )

    _, keys = keys_of(cache, entries)
    serving = find(cache, keys, chained)
    last = ~get(cache.preceding, serving)
    following, preceding, right, left = lax.while_loop(
        lambda carry: jnp.any(is_gone(carry[2]) | is_gone(carry[3])),
        look_farther,
        (
            cache.following,
            cache.preceding,
            get(cache.following, entries),
            get(cache.preceding, after(entries, last)),
        ),
    )
    heir = jnp.where(is_gone(serving), get(following, serving), serving)
    heir = jnp.where(chained, heir, _END)
    last = jnp.where(is_gone(last), get(preceding, last), last)
    has_heir = heir >= 0
    between = chained & (left >= 0) & (right >= 0)

    def places(where: Array, first: Array, second: Array) -> Array:
        """Put the places of two scatters in one; no place is in both."""
        first = jnp.where(where, first, num_blocks)
        return jnp.concatenate([first, jnp.where(has_heir, second, num_blocks)])

    following = following.at[places(between, left, last)].set(
        jnp.concatenate([right, jnp.full_like(last, _END)]), mode="drop"
    )
    preceding = preceding.at[places(between, right, heir)].set(
        jnp.concatenate([left, ~last]), mode="drop"
    )
    moves = has_heir & (heir != serving)
    directory = directory_lib.pass_on(
        cache.directory,
        jnp.where(moves, serving, num_blocks),
        jnp.where(moves, heir, num_blocks),
    )
    return (
        PrefixCache(directory, cache.has_key, following, preceding),
        has_heir,
    )


def check(cache: PrefixCache) -> None:
    """Raise AssertionError if something is not as it should be. For the host."""
    cache = jax.tree.map(np.array, cache)
    directory = cache.directory
    num_blocks = len(cache.has_key)
    used = np.flatnonzero(directory.entries < num_blocks)
    serving = directory.entries[used].tolist()
    assert (directory.slots[serving] == used).all()
    assert ((directory.tags.reshape(-1) != 0) == (directory.entries < num_blocks)).all()
    keys = [directory.keys[block].tobytes() for block in serving]
    assert len(set(keys)) == len(keys), "a key is served twice"
    seen = []
    for first, key in zip(serving, keys, strict=True):
        chain = [first]
        while (block := int(cache.following[chain[-1]])) != _END:
            assert int(cache.preceding[block]) == chain[-1]
            assert directory.keys[block].tobytes() == key
            chain.append(block)
            assert len(chain) <= num_blocks, "a chain has no end"
        assert int(cache.preceding[first]) == ~chain[-1]
        seen += chain
    assert sorted(seen) == np.flatnonzero(cache.has_key).tolist()
