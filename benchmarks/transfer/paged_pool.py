"""A device pool whose blocks carry tags, so that copies can be checked.

The bits of a block follow from its tag. `PagedPool` keeps the expected tag of each
block; callers that copy blocks copy their tags too, and `check` compares the pool's
bits with the tags.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.plan import BLOCK_ROW_BYTES
from jaxkv.tools.speed import make_bits
from jaxkv.transfer.memory import compiler_options

Pool = list[jax.Array]
"""A leaf per layer, keys and values together: bfloat16[blocks, 2, tokens, 128]."""

_CHECK_BYTES = 32 << 20


class PagedPool:
    """The pool that all designs use in turn."""

    def __init__(self, num_blocks: int, block_bytes: int, num_layers: int):
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.block_shape = (2, block_bytes // num_layers // BLOCK_ROW_BYTES, 128)
        self.tags: NDArray[np.uint32] = np.arange(num_blocks, dtype=np.uint32)
        options = compiler_options(jax.devices()[0].platform)

        def fill(tags: jax.Array) -> Pool:
            return [self._pattern(tags, layer) for layer in range(num_layers)]

        def count(pool: Pool, ids: jax.Array, tags: jax.Array) -> jax.Array:
            wrong = jnp.zeros(ids.shape, jnp.bool_)
            for layer, leaf in enumerate(pool):
                rows = leaf.at[ids].get(mode="promise_in_bounds")
                same = _bits(rows) == _bits(self._pattern(tags, layer))
                wrong |= ~jnp.all(same, axis=(1, 2, 3))
            return jnp.sum(wrong, dtype=jnp.int32)

        self.leaves: Pool = jax.jit(fill, compiler_options=options)(self.tags)
        self._count_wrong = jax.jit(count, compiler_options=options)

    def check(self, ids: NDArray[np.int32] | None = None) -> int:
        """Count the blocks whose bits differ from their tags.

        Shapes: ids: i32[n].
        """
        if ids is None:
            ids = np.arange(self.num_blocks, dtype=np.int32)
        # In pieces of one size, to compile once and use little memory; the last one is
        # padded with blocks that are checked anyway.
        piece = max(1, min(len(ids), _CHECK_BYTES // self.block_bytes))
        padded = np.resize(ids, (-(-len(ids) // piece), piece))
        counts = [
            int(self._count_wrong(self.leaves, row, self.tags[row])) for row in padded
        ]
        return sum(counts)

    def _pattern(self, tags: jax.Array, layer: int) -> jax.Array:
        """Make blocks, bf16[n, *block_shape], from their tags, u32[n]."""
        bits = make_bits(jnp, tags, layer, int(np.prod(self.block_shape)))
        high = (bits >> 16).astype(jnp.uint16).reshape(-1, *self.block_shape)
        return jax.lax.bitcast_convert_type(high, jnp.bfloat16)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16)
