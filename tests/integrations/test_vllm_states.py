"""vLLM's blocks where states have a pool of their own, as tpu-inference makes it."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.integrations.vllm.pool import (
    StatesBlockPool,
    VllmBlockPool,
    key_in_group,
)
from tests.rigs.fake_vllm import BlockPool

NUM_BLOCKS, NUM_STATES = 6, 4
STATE_GROUPS = (0, 2)
# The numbers of an id's blocks in the groups of states.
FIRST, SECOND = NUM_BLOCKS, NUM_BLOCKS + NUM_STATES


def make_pool():
    attention, states = (
        BlockPool(num_blocks, newer=True) for num_blocks in (NUM_BLOCKS, NUM_STATES)
    )

    def by_pool(method):
        def call(blocks):
            for pool in (attention, states):
                getattr(pool, method)([b for b in blocks if b in pool.blocks])

        return call

    dual = SimpleNamespace(
        attention_pool=attention,
        mamba_pool=states,
        blocks=attention.blocks,
        get_num_free_blocks=attention.get_num_free_blocks,
        touch=by_pool("touch"),
        free_blocks=by_pool("free_blocks"),
    )
    return StatesBlockPool(dual, STATE_GROUPS), attention, states


def test_block_numbers_distinguish_both_pools():
    pool, _, _ = make_pool()
    assert pool.num_blocks == NUM_BLOCKS + 2 * NUM_STATES
    numbers = pool.numbered(([0, 0, 3], [1, 2, 3], [0, 0, 3]))
    assert numbers == [[0, 0, FIRST + 3], [1, 2, 3], [0, 0, SECOND + 3]]


def test_states_of_all_groups_have_the_hash_of_the_first():
    pool, attention, states = make_pool()
    attention.cache(attention.blocks[3], b"hash", 1)
    states.cache(states.blocks[3], b"other", 0)
    for number, block_hash, group, is_held in [
        (3, b"hash", 1, True),
        (3, b"other", 0, False),
        (FIRST + 3, b"other", 0, True),
        (SECOND + 3, b"other", 2, True),
        (SECOND + 3, b"other", 1, False),
        (FIRST + 3, b"hash", 0, False),
        (0, b"other", 0, False),
    ]:
        key = key_in_group(block_hash, group)
        assert pool.holds([number], [key]).tolist() == [is_held], (number, key)


def test_a_state_is_free_when_it_is_unpinned_in_all_groups():
    pool, attention, states = make_pool()
    assert pool.num_free == NUM_STATES - 1
    numbers = np.array([0, 3, FIRST + 3, SECOND + 3])
    pool.pin(numbers)
    assert (attention.blocks[3].ref_cnt, states.blocks[3].ref_cnt) == (1, 2)
    assert pool.num_free == NUM_STATES - 2
    pool.unpin(numbers[:3])
    assert attention.get_num_free_blocks() == NUM_BLOCKS - 1
    assert pool.num_free == NUM_STATES - 2
    assert pool.has_only_pinned()
    states.touch([states.blocks[3]])
    assert not pool.has_only_pinned()
    pool.unpin(numbers[3:])
    assert states.blocks[3].ref_cnt == 1


def test_a_pool_without_states_is_refused():
    with pytest.raises(ValueError, match=r"BlockPool is not .* --mamba-cache-mode"):
        StatesBlockPool(BlockPool(4, newer=True), STATE_GROUPS)


def test_states_are_counted_without_the_null_block_and_other_models_have_none():
    pool, attention, _ = make_pool()
    assert pool.num_states == NUM_STATES - 1
    assert VllmBlockPool(attention, 1).num_states == 0
