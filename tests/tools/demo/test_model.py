"""The paged steps against the dense forward pass of the same model."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tools.demo.model import ModelConfig, init_pool
from jaxkv.tools.demo.steps import Steps, make_steps
from tests.reference.transformer import reference_forward

BLOCK_SIZE = 4
NUM_BLOCKS = 60
CHUNK = 8
SMALL = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48
)

VARIANTS = {
    "full": SMALL,
    "window": dataclasses.replace(SMALL, layers="window", window_tokens=6),
    "hybrid": dataclasses.replace(
        SMALL, num_layers=4, layers="hybrid", window_tokens=9
    ),
}
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def all_steps():
    return {name: make_steps(config, seed=3) for name, config in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def steps(request, all_steps):
    return all_steps[request.param]


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 256, 50, dtype=np.int32)


@pytest.fixture(scope="module")
def all_expected(all_steps, tokens):
    return {name: dense(steps, tokens) for name, steps in all_steps.items()}


@pytest.fixture
def expected(request, all_expected, steps):
    return all_expected[request.node.callspec.params["steps"]]


def dense(steps, tokens):
    return np.asarray(jitted_forward(steps.model, jnp.asarray(tokens)))


jitted_forward = nnx.jit(reference_forward)


def make_tables(rng, config, num_tokens, size):
    """Shuffled block tables i32[C, size]; entries past `num_tokens` are random."""
    num_groups, used = len(config.windows), -(-num_tokens // BLOCK_SIZE)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS, dtype=np.int32))
    wild = rng.choice([-1, 10**6, NUM_BLOCKS, 0], (num_groups, size - used))
    return np.concatenate(
        [blocks[: num_groups * used].reshape(num_groups, used), wild], axis=1
    ).astype(np.int32)


def in_window(config, pool, tables, start):
    """Remove blocks that no token from `start` on attends to, and fill them with NaN.

    Returns:
        The pool, and the tables with the null block instead.
    """
    num_blocks, block_size = pool[0]["k"].shape[:2]
    is_unneeded = np.zeros(tables.shape, bool)
    for row, window in zip(is_unneeded, config.windows, strict=True):
        if window is not None:
            row[: max(start - window + 1, 0) // block_size] = True
    unneeded = np.where(is_unneeded, tables, num_blocks)
    return fill_with_nan(pool, unneeded), np.where(is_unneeded, 0, tables).astype(
        np.int32
    )


@jax.jit
def fill_with_nan(pool, block_ids):
    return jax.tree.map(lambda leaf: leaf.at[block_ids].set(jnp.nan, mode="drop"), pool)


def prefill(steps: Steps, pool, tokens, tables, cuts=()):
    """Prefill all of `tokens`, in chunks that end at `cuts` or before."""
    start = 0
    while start < len(tokens):
        end = min([start + CHUNK, len(tokens), *(c for c in cuts if c > start)])
        chunk = np.full(CHUNK, 77, np.int32)
        chunk[: end - start] = tokens[start:end]
        pool, now = in_window(steps.config, pool, tables, start)
        result = steps.prefill_chunk(
            pool, chunk, np.int32(start), np.int32(end - start), now
        )
        pool, start = result.pool, end
    return result


def poisoned(steps):
    pool = init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pool)


def test_chunked_prefill_is_the_dense_forward_pass(steps, tokens, expected):
    for trial in range(5):
        rng = np.random.default_rng(trial)
        length = int(rng.integers(1, len(tokens) + 1))
        cuts = rng.integers(1, len(tokens), rng.integers(0, 6))
        tables = make_tables(rng, steps.config, length, size=24)
        result = prefill(steps, poisoned(steps), tokens[:length], tables, cuts)
        logits = expected[length - 1]
        np.testing.assert_allclose(result.logits, logits, **CLOSE, err_msg=str(trial))
        assert result.logits.shape == (256,)
        assert result.next_token.dtype == jnp.int32
        assert int(result.next_token) == int(np.argmax(logits))


def test_decode_continues_where_prefill_ended(steps, tokens, expected):
    config = steps.config
    both = make_tables(np.random.default_rng(1), config, 96, size=24)
    # Tables have one length in all tests, so that programs are compiled once.
    padding = np.zeros_like(both[:, :12])
    tables = [np.concatenate([half, padding], 1) for half in np.split(both, 2, axis=1)]
    starts = [17, 30]
    pool = poisoned(steps)
    for table, start in zip(tables, starts, strict=True):
        pool = prefill(steps, pool, tokens[:start], table).pool

    for i in range(15):
        rows = []
        for table, start in zip(tables, starts, strict=True):
            pool, now = in_window(config, pool, table, start + i)
            rows.append(now)
        rows.insert(1, np.full_like(now, -1))
        positions = np.array([starts[0] + i, -1, starts[1] + i], np.int32)
        result = steps.decode(pool, tokens[positions], positions, np.stack(rows, 1))
        pool = result.pool
        for row in (0, 2):
            want = expected[positions[row]]
            np.testing.assert_allclose(result.logits[row], want, **CLOSE)
            assert int(result.next_token[row]) == int(np.argmax(want))
    # Prefill continues where decode ended.
    rest = tokens[:CHUNK]
    want = dense(steps, np.concatenate([tokens[:32], rest]))[-1]
    last = steps.prefill_chunk(pool, rest, np.int32(32), np.int32(CHUNK), rows[0])
    np.testing.assert_allclose(last.logits, want, **CLOSE)


def test_a_window_layer_attends_to_its_window_only(tokens):
    """The dense model itself: the paged one is compared with it."""

    def answers_to(config, changed_tokens):
        steps = make_steps(config, seed=0)
        for changed in changed_tokens:
            altered = tokens.copy()
            altered[changed] = (altered[changed] + 1) % 256
            yield dense(steps, altered)[20]

    config = dataclasses.replace(SMALL, num_layers=1, layers="window", window_tokens=6)
    # A token after it and one before the window do not matter; one in the window does.
    late, before, within = answers_to(config, (30, 14, 15))
    np.testing.assert_array_equal(before, late)
    assert np.abs(within - late).max() > 1e-3
    # The first layer of a hybrid is full.
    config = dataclasses.replace(SMALL, num_layers=2, layers="hybrid", window_tokens=1)
    late, first = answers_to(config, (30, 0))
    assert np.abs(first - late).max() > 1e-3


def test_only_the_first_num_tokens_are_written(steps, tokens):
    tables = np.zeros((2, 24), np.int32)
    tables[:, :3] = [[5, 9, 2], [7, 8, 3]]
    tables = tables[: len(steps.config.windows)]
    pool = prefill(steps, poisoned(steps), tokens[:6], tables).pool
    for leaf in jax.tree.leaves(pool):
        written = np.isfinite(np.asarray(leaf)).all(axis=(2, 3))
        want = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
        want[tables[:, 0]], want[tables[:, 1], :2] = True, True
        np.testing.assert_array_equal(written, want)


def test_rows_of_padding_write_nothing(steps):
    pool = init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    rows = np.zeros((len(steps.config.windows), 3, 2), np.int32)
    positions = np.array([-1, -1, -5], np.int32)
    result = steps.decode(pool, np.ones(3, np.int32), positions, rows)
    chex.assert_trees_all_equal(
        result.pool, init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    )
    assert np.isfinite(result.logits).all()


@pytest.mark.parametrize("kind", ["prefill_chunk", "decode"])
def test_the_pool_is_updated_in_place(steps, kind):
    pool = init_pool(steps.config, NUM_BLOCKS, BLOCK_SIZE)
    scalar, row = np.int32(1), np.zeros(2, np.int32)
    tables = np.zeros((len(steps.config.windows), 2, 2), np.int32)
    arguments = {
        "prefill_chunk": (np.zeros(CHUNK, np.int32), scalar, scalar, tables[:, 0]),
        "decode": (row, row, tables),
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


def test_the_pool_has_a_slot_per_layer_of_a_group():
    groups = {
        "full": (FullAttention(16),),
        "window": (SlidingWindow(16, 6),),
        "hybrid": (FullAttention(16), SlidingWindow(16, 9)),
    }
    for name, config in VARIANTS.items():
        assert config.groups(16) == groups[name]
        pool = init_pool(config, 3, 5)
        assert len(pool) == config.layers_per_group == 2
        chex.assert_trees_all_equal(
            pool[0], {name: jnp.zeros((3, 5, 2, 8), jnp.float32) for name in "kv"}
        )
        assert pool[0]["k"].committed
        assert pool[0]["k"].devices() == {jax.devices()[0]}
        per_token = sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) // 15
        assert per_token == config.kv_bytes_per_token
    assert ModelConfig().kv_bytes_per_token == 2048
