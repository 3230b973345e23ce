"""Ghosts in their table, against a search through all ways of a set."""

import numpy as np
import pytest

from jaxkv.policies import ghosts
from jaxkv.policies.ghosts import LABEL_MASK, WAYS, Ghosts

NUM_SETS = 8
TAG_BITS = np.uint32(0xFFFFFFFF - LABEL_MASK)


@pytest.mark.parametrize("seed", range(3))
def test_a_tag_gets_the_slot_of_its_ghost_an_empty_one_or_the_oldest(seed):
    rng = np.random.default_rng(seed)
    # Times of all 32 bits: ages of more than 25 days, too.
    table = rng.integers(0, 1 << 32, (NUM_SETS, 2 * WAYS), np.uint32)
    table[rng.random(table.shape) < 0.2] = 0
    now_ms = int(rng.integers(0, 1 << 32))
    sets = rng.integers(0, NUM_SETS, 200)
    stored = table[sets, rng.integers(0, WAYS, 200)] & TAG_BITS
    foreign = rng.integers(0, 1 << 32, 200, np.uint32) & TAG_BITS
    tags = np.where(rng.random(200) < 0.5, stored, foreign)
    tags[:20] = 0  # As an empty slot has.
    tags |= sets.astype(np.uint32)
    kinds = []
    for tag, number in zip(tags, sets.tolist(), strict=True):
        words, times = table[number, :WAYS].tolist(), table[number, WAYS:].tolist()
        same = [w for w in range(WAYS) if words[w] and not (words[w] ^ tag) & TAG_BITS]
        empty = [way for way in range(WAYS) if not words[way]]
        ages = [(now_ms - time_ms) % (1 << 32) for time_ms in times]
        chosen = (same or empty or [ages.index(max(ages))])[0]
        found = WAYS * number + same[0] if same else ghosts.NO_SLOT
        assert ghosts.native_find.py_func(Ghosts(table), tag) == found
        choose = ghosts.native_choose.py_func
        assert choose(Ghosts(table), tag, now_ms) == WAYS * number + chosen
        kinds.append(1 if same else 2 if empty else 3)
    assert min(kinds.count(kind) for kind in (1, 2, 3)) > 20
