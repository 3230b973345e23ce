"""The paged steps against the dense forward pass of the same model."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.demo.model import (
    ModelConfig,
    init_pool,
    paged_hidden,
    reference_forward,
)
from jaxkv.demo.steps import Steps, make_steps

BLOCK_SIZE = 4
NUM_BLOCKS = 40
CHUNK = 8
SMALL = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48
)
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def steps():
    return make_steps(SMALL, seed=3)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 256, 50, dtype=np.int32)


@pytest.fixture(scope="module")
def expected(steps, tokens):
    return np.asarray(nnx.jit(reference_forward)(steps.model, jnp.asarray(tokens)))


def make_table(rng, num_tokens, size):
    """Shuffle a block table; entries past `num_tokens` are wild."""
    blocks = rng.permutation(NUM_BLOCKS).astype(np.int32)
    used = -(-num_tokens // BLOCK_SIZE)
    wild = rng.choice([-1, 10**6, NUM_BLOCKS, 0], size - used).astype(np.int32)
    return np.concatenate([blocks[:used], wild])


def prefill(steps: Steps, pool, tokens, table, cuts=()):
    """Prefill all of `tokens`, with the chunks ending at `cuts` at the latest."""
    start = 0
    while start < len(tokens):
        end = min([start + CHUNK, len(tokens), *(c for c in cuts if c > start)])
        chunk = np.full(CHUNK, 77, np.int32)
        chunk[: end - start] = tokens[start:end]
        result = steps.prefill_chunk(
            pool, chunk, np.int32(start), np.int32(end - start), table
        )
        pool, start = result.pool, end
    return result


def poisoned(steps):
    pool = init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pool)


@pytest.mark.parametrize("trial", range(6))
def test_chunked_prefill_is_the_dense_forward_pass(steps, tokens, expected, trial):
    rng = np.random.default_rng(trial)
    length = int(rng.integers(1, len(tokens) + 1))
    cuts = rng.integers(1, len(tokens), rng.integers(0, 6))
    table = make_table(rng, length, size=(13, 20)[trial % 2])

    result = prefill(steps, poisoned(steps), tokens[:length], table, cuts)

    np.testing.assert_allclose(result.logits, expected[length - 1], **CLOSE)
    assert result.logits.shape == (256,)
    assert result.next_token.dtype == jnp.int32
    assert int(result.next_token) == int(np.argmax(expected[length - 1]))


def test_decode_goes_on_where_prefill_ended(steps, tokens, expected):
    rng = np.random.default_rng(1)
    blocks = rng.permutation(NUM_BLOCKS)[:26].astype(np.int32)
    tables = [blocks[:13], blocks[13:]]
    starts = [17, 30]
    pool = poisoned(steps)
    for table, start in zip(tables, starts, strict=True):
        pool = prefill(steps, pool, tokens[:start], table).pool
    rows = np.stack([tables[0], np.full(13, -1, np.int32), tables[1]])

    for i in range(15):
        positions = np.array([starts[0] + i, -1, starts[1] + i], np.int32)
        result = steps.decode(pool, tokens[positions], positions, rows)
        pool = result.pool
        for row in (0, 2):
            want = expected[positions[row]]
            np.testing.assert_allclose(result.logits[row], want, **CLOSE)
            assert int(result.next_token[row]) == int(np.argmax(want))
    # And prefill goes on where decode ended.
    rest = tokens[:CHUNK]
    both = np.concatenate([tokens[:32], rest])
    want = nnx.jit(reference_forward)(steps.model, jnp.asarray(both))[-1]
    last = steps.prefill_chunk(pool, rest, np.int32(32), np.int32(CHUNK), tables[0])
    np.testing.assert_allclose(last.logits, want, **CLOSE)


def test_tied_embeddings(tokens):
    config = ModelConfig(
        num_layers=1,
        d_model=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        d_ff=16,
        tie_embeddings=True,
    )
    steps = make_steps(config, seed=0)
    want = reference_forward(steps.model, jnp.asarray(tokens[:11]))[-1]
    table = np.arange(3, dtype=np.int32)
    pool = init_pool(config, NUM_BLOCKS, BLOCK_SIZE)
    result = prefill(steps, pool, tokens[:11], table)
    np.testing.assert_allclose(result.logits, want, **CLOSE)


def test_only_the_meant_tokens_are_written(steps, tokens):
    table = np.array([5, 9, 2], np.int32)
    pool = prefill(steps, poisoned(steps), tokens[:6], table).pool
    for leaf in jax.tree.leaves(pool):
        written = np.isfinite(np.asarray(leaf)).all(axis=(2, 3))
        want = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
        want[5], want[9, :2] = True, True
        np.testing.assert_array_equal(written, want)


def test_rows_of_padding_write_nothing(steps):
    pool = init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    rows = np.zeros((3, 2), np.int32)
    positions = np.array([-1, -1, -5], np.int32)
    result = steps.decode(pool, np.ones(3, np.int32), positions, rows)
    chex.assert_trees_all_equal(
        result.pool, init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    )
    assert np.isfinite(result.logits).all()


def test_one_wrong_block_changes_the_answer():
    """Else equal answers would not show that the KV is right."""
    steps = make_steps(ModelConfig(), seed=0)
    text = np.random.default_rng(0).integers(32, 127, 200, dtype=np.int32)
    table = np.arange(1, 15, dtype=np.int32)
    pool = init_pool(steps.config, 16, 16)
    pool = prefill(steps, pool, text[:192], table).pool
    for wrong in (0, 5, 11):
        answers = []
        for block in (table[wrong], 15):
            swapped = table.copy()
            swapped[wrong] = block
            result = prefill_at(steps, pool, text, swapped, start=192)
            pool = result.pool
            answers.append(np.asarray(result.logits))
        assert np.abs(answers[0] - answers[1]).max() > 0.1


def prefill_at(steps, pool, tokens, table, start):
    count = len(tokens) - start
    return steps.prefill_chunk(
        pool, tokens[start:], np.int32(start), np.int32(count), table
    )


def test_one_compilation_for_each_shape(tokens):
    steps = make_steps(SMALL, seed=0)
    pool = init_pool(SMALL, NUM_BLOCKS, BLOCK_SIZE)
    for size in (4, 8, 4, 8):
        for start in (0, 3):
            for count in (1, CHUNK):
                table = np.arange(size, dtype=np.int32)
                pool = steps.prefill_chunk(
                    pool, tokens[:CHUNK], np.int32(start), np.int32(count), table
                ).pool
        for position in (-1, 2, 9):
            pool = steps.decode(
                pool, tokens[:2], np.full(2, position, np.int32), np.stack([table] * 2)
            ).pool
    assert steps.prefill_chunk.func._cache_size() == 2
    assert steps.decode.func._cache_size() == 2


@pytest.mark.parametrize("kind", ["prefill_chunk", "decode"])
def test_the_pool_is_updated_in_place(steps, kind):
    pool = init_pool(SMALL, NUM_BLOCKS, BLOCK_SIZE)
    scalar, row = np.int32(1), np.zeros(2, np.int32)
    arguments = {
        "prefill_chunk": (np.zeros(CHUNK, np.int32), scalar, scalar, row),
        "decode": (row, row, np.zeros((2, 2), np.int32)),
    }[kind]
    step = getattr(steps, kind)

    compiled = step.func.lower(*step.args, pool, *arguments).compile()
    shape = f"f32[{NUM_BLOCKS},{BLOCK_SIZE},2,8]"
    assert shape in compiled.as_text()
    assert not re.search(re.escape(shape) + r"\S* copy\(", compiled.as_text())

    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    after = step(pool, *arguments).pool
    assert before == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pool))


def test_the_seed_decides_the_weights():
    first, again, other = (
        jax.tree.leaves(nnx.state(make_steps(SMALL, seed).model)) for seed in (1, 1, 2)
    )
    chex.assert_trees_all_equal(first, again)
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_pool_layout():
    pool = init_pool(SMALL, 3, 5)
    assert len(pool) == SMALL.num_layers
    chex.assert_trees_all_equal(
        pool[0], {name: jnp.zeros((3, 5, 2, 8), jnp.float32) for name in "kv"}
    )
    assert pool[0]["k"].committed
    assert pool[0]["k"].devices() == {jax.devices()[0]}
    per_token = sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) // 15
    assert per_token == SMALL.kv_bytes_per_token
    assert ModelConfig().kv_bytes_per_token == 2048


def test_padding_stays_finite(steps):
    tables = np.zeros((1, 2), np.int32)
    _, hidden = paged_hidden(
        steps.model,
        poisoned(steps),
        jnp.zeros((1, 3), jnp.int32),
        jnp.full((1, 3), -1),
        jnp.asarray(tables),
    )
    assert np.isfinite(hidden).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 must be a multiple"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be 'float32'"),
    ],
)
def test_config_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**arguments)
