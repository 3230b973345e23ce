"""Ghosts in their table: the native functions find and choose what the pure ones do."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies import ghosts
from jaxkv.policies.ghosts import LABEL_MASK, WAYS, Ghosts

NUM_PLACES = 8
TAG_BITS = np.uint32(0xFFFFFFFF - LABEL_MASK)


@pytest.mark.parametrize("seed", range(3))
def test_native_functions_choose_the_slots_of_the_pure_ones(seed):
    rng = np.random.default_rng(seed)
    # Times of all 32 bits: ages of more than 25 days, too.
    table = rng.integers(0, 1 << 32, (NUM_PLACES, 2 * WAYS), np.uint32)
    table[rng.random(table.shape) < 0.2] = 0
    now_ms = int(rng.integers(0, 1 << 32))
    places = rng.integers(0, NUM_PLACES, 200)
    stored = table[places, rng.integers(0, WAYS, 200)] & TAG_BITS
    foreign = rng.integers(0, 1 << 32, 200, np.uint32) & TAG_BITS
    tags = np.where(rng.random(200) < 0.5, stored, foreign)
    tags[:20] = 0  # As what is empty has.
    tags |= places.astype(np.uint32)

    pure, native = Ghosts(jnp.asarray(table)), Ghosts(table)
    slots = [int(ghosts.native_find.py_func(native, tag)) for tag in tags]
    slots = [pure.num_slots if slot == ghosts.NO_SLOT else slot for slot in slots]
    assert slots == ghosts.find(pure, jnp.asarray(tags)).tolist()
    assert 50 < slots.count(pure.num_slots) < 150
    slots = [int(ghosts.native_choose.py_func(native, tag, now_ms)) for tag in tags]
    chosen = ghosts.choose(pure, jnp.asarray(tags), jnp.uint32(now_ms))
    assert slots == chosen.tolist()
