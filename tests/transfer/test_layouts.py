"""Any paged layout keeps every bit, with any host blocks, layer groups and sizes.

Pools of other engines are in miniature, with the order of their axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._util import parse_bytes
from jaxkv.tools.demo.model import ModelConfig, init_pool
from jaxkv.transfer import TransferEngine
from tests.transfer.faults import FAULT, broken, recover
from tests.transfer.shadow import Shadow, random_array, to_device

MODES = ("fused", "staged")
NUM_BLOCKS = 12

modes = pytest.mark.parametrize("mode", MODES)


def layer_list(num_layers, shape, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for _ in range(num_layers)]


def spec(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def demo_pool():
    config = ModelConfig(num_layers=2, num_kv_heads=2, head_dim=8)
    pool = init_pool(config, NUM_BLOCKS, block_size=4)
    return jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), pool)


# name -> the pool, its block axis, device blocks per host block
LAYOUTS = {
    "the example engine": (demo_pool(), 0, 1),
    # [num_blocks, block_size, ceil(2 * kv_heads / packing), packing, head_dim]
    "RPA v3, bfloat16": (layer_list(3, (NUM_BLOCKS, 4, 2, 2, 8)), 0, 1),
    "RPA v3, float8": (layer_list(3, (NUM_BLOCKS, 4, 1, 4, 8), "float8_e4m3fn"), 0, 1),
    # [kv_heads, num_pages, tokens_per_page, head_dim]
    "MaxText's pages": (
        {"key": layer_list(2, (2, NUM_BLOCKS, 4, 8)), "value": spec((2, 12, 4, 8))},
        1,
        1,
    ),
    # [L, max_prefill, heads, B, D]: its rows are tokens, a host block is four of them
    "MaxText's prefill cache, scanned": (
        {"key": spec((2, 24, 2, 1, 8)), "value": spec((2, 24, 2, 1, 8))},
        1,
        4,
    ),
    "keys and values stacked": (spec((2, 3, NUM_BLOCKS, 4, 2, 8)), 2, 1),
    "keys and values apart": (
        (layer_list(2, (NUM_BLOCKS, 4, 2, 8)), layer_list(2, (NUM_BLOCKS, 4, 2, 6))),
        0,
        1,
    ),
    "int8 with scales": (
        {
            "kv": layer_list(2, (NUM_BLOCKS, 4, 2, 8), "int8"),
            "scale": layer_list(2, (2, NUM_BLOCKS), "float32"),
        },
        {"kv": 0, "scale": -1},
        1,
    ),
    "float8 with scales": (
        [
            {"kv": spec((2, 12, 4, 8), "float8_e5m2"), "scale": spec((12,), "float32")},
            {"kv": spec((2, 12, 4, 8), "float8_e5m2"), "scale": spec((12,), "float32")},
        ],
        [{"kv": 1, "scale": 0}, {"kv": -3, "scale": -1}],
        1,
    ),
    "blocks along the last axis": (layer_list(2, (2, 8, NUM_BLOCKS), "float16"), -1, 2),
    "token ids beside the blocks": (
        {"kv": spec((NUM_BLOCKS, 4, 8)), "tokens": spec((NUM_BLOCKS, 4), "int32")},
        0,
        3,
    ),
    "a flag a block": (spec((NUM_BLOCKS,), "uint8"), 0, 1),
}


def make(name, mode, seed=0, **options):
    """An engine with three spare host blocks, a pool, and their shadow."""
    specs, block_axis, m = LAYOUTS[name]
    rng = np.random.default_rng(seed)
    arrays = jax.tree.map(lambda s: random_array(rng, s.shape, s.dtype), specs)
    pool, shadow = to_device(arrays), Shadow(arrays, block_axis)
    options = {"block_axis": block_axis, "blocks_per_host_block": m, **options}
    num_host_blocks = len(shadow.leaves[0]) // m + 3
    engine = TransferEngine(pool, num_host_blocks, mode=mode, **options)
    return engine, pool, shadow, rng


def move(engine, pool, shadow, rng, m, rounds=4):
    """Save, scramble the pool, load elsewhere; compare everything each time."""
    num_blocks = len(shadow.leaves[0])
    for _ in range(rounds):
        n = int(rng.integers(1, num_blocks // m + 1))
        device_ids = rng.permutation(num_blocks)[: n * m]
        device_ids = device_ids.reshape(n, m) if m > 1 else device_ids
        host_ids = rng.permutation(engine.num_host_blocks)[:n]
        engine.save(pool, device_ids, host_ids)
        shadow.save(device_ids, host_ids)
        pool, [done] = engine.drain(pool)
        assert done.error is None
        assert done.num_bytes == n * engine.block_bytes
        # Some of these and of the earlier ones, one of them twice, into empty blocks.
        known = rng.permutation(list(shadow.host))[: num_blocks // m - 1].tolist()
        host_ids = [*known, known[0]]
        device_ids = rng.permutation(num_blocks)[: len(host_ids) * m]
        device_ids = device_ids.reshape(-1, m) if m > 1 else device_ids
        pool, _ = engine.load(pool, host_ids, device_ids)
        shadow.load(host_ids, device_ids)
        pool, [done] = engine.drain(pool)
        assert done.error is None
        shadow.check(pool)
    return pool


@modes
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_any_layout_round_trip(name, mode):
    engine, pool, shadow, rng = make(name, mode)
    m = LAYOUTS[name][2]
    block_bytes = [leaf[0].nbytes for leaf in shadow.leaves]
    assert engine.block_bytes == m * sum(block_bytes)
    move(engine, pool, shadow, rng, m)
    assert engine.bytes_in_flight == engine.num_in_flight == 0


@modes
@pytest.mark.parametrize("m", [2, 4])
def test_host_blocks_of_several_device_blocks_round_trip_with_gaps(m, mode):
    name = "MaxText's prefill cache, scanned"
    engine, pool, shadow, rng = make(name, mode, seed=m, blocks_per_host_block=m)
    pool = move(engine, pool, shadow, rng, m)
    engine.save(pool, np.arange(2 * m).reshape(2, m), [0, 1])
    shadow.save(np.arange(2 * m).reshape(2, m), [0, 1])
    pool, _ = engine.drain(pool)
    # vLLM's rule: the first host block leaves out device blocks at its start, as many
    # as the device lacks.
    for num_wanted in range(m + 1, 2 * m):
        skipped = -num_wanted % m
        wanted = rng.permutation(24)[:num_wanted]
        device_ids = np.concatenate([[-1] * skipped, wanted]).reshape(2, m)
        pool, _ = engine.load(pool, [1, 0], device_ids)
        shadow.load([1, 0], device_ids)
        pool, _ = engine.drain(pool)
        shadow.check(pool)


@modes
def test_device_blocks_left_out_of_a_save_keep_others_intact(mode):
    engine, pool, shadow, _ = make("MaxText's prefill cache, scanned", mode)
    device_ids = [[-1, -1, 7, 3], [4, -1, 5, 6], [23, 22, 21, -1]]
    engine.save(pool, device_ids, [2, 0, 1])
    shadow.save(device_ids, [2, 0, 1])
    pool, _ = engine.drain(pool)
    targets = [[-1, -1, 1, 2], [8, -1, 9, 10], [11, -1, 12, -1]]
    pool, _ = engine.load(pool, [2, 0, 1], targets)
    shadow.load([2, 0, 1], targets)
    pool, [done] = engine.drain(pool)
    assert done.num_blocks == 3
    shadow.check(pool)


REFUSALS = {
    "a flat list": ([0, 1, 2, 3], "must be rows of 4 ints"),
    "rows too short": ([[0, 1], [2, 3]], "must be rows of 4 ints"),
    "an empty row": ([[0, 1, 2, 3], [-1] * 4], r"only -1 in the rows \[1\]"),
    "an id twice": ([[0, 1, 2, 3], [4, 5, 4, 6]], r"has \[4\] more than once"),
    "less than none": ([[0, 1, 2, -2]], r"has \[-2\]; ids .* or -1 for none"),
    "out of range": ([[0, 1, 2, 24]], r"has \[24\]; ids must be in \[0, 24\)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_rows_of_device_blocks_are_refused(case):
    engine, pool, shadow, _ = make("MaxText's prefill cache, scanned", "fused")
    engine.save(pool, np.arange(8).reshape(2, 4), [0, 1])
    pool, _ = engine.drain(pool)
    device_ids, message = REFUSALS[case]
    host_ids = range(len(device_ids))
    with pytest.raises(ValueError, match=message):
        engine.save(pool, device_ids, host_ids)
    with pytest.raises(ValueError, match=message):
        engine.load(pool, host_ids, device_ids)
    assert engine.num_in_flight == 0
    shadow.check(pool)


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_rows_may_share_a_head_and_differ_after_it(mode):
    """Two prefixes stored in one step; the second row was refused once."""
    name = "MaxText's prefill cache, scanned"
    engine, pool, shadow, _ = make(name, mode, blocks_per_host_block=4)
    rows = [[0, 1, 2, 3], [0, 1, 4, 5]]
    engine.save(pool, rows, [0, 1])
    shadow.save(rows, [0, 1])
    pool, _ = engine.drain(pool)
    with pytest.raises(ValueError, match=r"has \[0, 1\] more than once"):
        engine.load(pool, [0, 1], rows)  # nothing is written twice
    targets = [[8, 9, 10, 11], [12, 13, 14, 15]]
    pool, _ = engine.load(pool, [0, 1], targets)
    shadow.load([0, 1], targets)
    pool, _ = engine.drain(pool)
    shadow.check(pool)


def test_arguments_that_do_not_fit_the_pool_are_refused():
    pool = {"k": jnp.zeros((4, 6)), "v": jnp.zeros((6, 4))}
    with pytest.raises(ValueError, match=r"pool\['v'\] has 6 blocks and pool\['k'\] 4"):
        TransferEngine(pool, 8)
    assert TransferEngine(pool, 8, block_axis={"k": 0, "v": 1}).block_bytes == 48
    with pytest.raises(ValueError, match=r"block_axis 2 of pool\['k'\] must be an int"):
        TransferEngine(pool, 8, block_axis=2)
    with pytest.raises(ValueError, match="must be an int, or a tree of ints"):
        TransferEngine(pool, 8, block_axis=[0, 1])
    with pytest.raises(ValueError, match="blocks_per_host_block=0 must be at least 1"):
        TransferEngine(pool["k"], 8, blocks_per_host_block=0)
    for layer_groups in (0, 3):
        with pytest.raises(ValueError, match=r"must be in \[1, 2\]: the pool has 2"):
            TransferEngine(
                pool, 8, block_axis={"k": 0, "v": 1}, layer_groups=layer_groups
            )


@modes
@pytest.mark.parametrize("layer_groups", [1, 2, 4])
def test_layer_groups_load_the_same_bytes(layer_groups, mode):
    name = "int8 with scales"
    engine, pool, shadow, rng = make(name, mode, layer_groups=layer_groups)
    assert engine._copier.num_layer_groups == layer_groups
    move(engine, pool, shadow, rng, 1)
    numbers = engine._copier.numbers_together
    compiled = engine._copier.load_program.cache_info().currsize
    assert layer_groups <= compiled <= layer_groups * len(numbers)


@modes
def test_all_of_a_layer_group_is_issued_before_the_next(mode, monkeypatch):
    engine, pool, shadow, _ = make("the example engine", mode, layer_groups=2)
    engine.save(pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    shadow.save(range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, _ = engine.drain(pool)
    assert len(set(engine._table.find(np.arange(NUM_BLOCKS))[0])) > 2
    groups, real = [], engine._copier.load

    def load(leaves, targets, extents, layer_group):
        groups.extend([layer_group] * len(extents))
        return real(leaves, targets, extents, layer_group)

    monkeypatch.setattr(engine._copier, "load", load)
    pool, _ = engine.load(pool, range(NUM_BLOCKS), range(NUM_BLOCKS)[::-1])
    shadow.load(range(NUM_BLOCKS), range(NUM_BLOCKS)[::-1])
    pool, _ = engine.drain(pool)
    assert groups == sorted(groups)
    assert groups.count(0) == groups.count(1) > 2
    shadow.check(pool)


@modes
def test_the_first_layers_can_be_used_before_the_others_arrive(mode):
    pool = [jnp.full((4, 8), 1.0), jnp.full((4, 8), 2.0)]
    engine = TransferEngine(pool, 8, mode=mode, layer_groups=2)
    engine.warm_up()
    engine.save(pool, [0], [5])
    pool, _ = engine.drain(pool)
    # The second layer never arrives, and the first is usable.
    pool, ticket = engine.load([jnp.zeros((4, 8)), broken(pool[1])], [5], [3])
    pool, [done] = engine.drain(pool)
    assert np.array(pool[0]).tolist() == [[0.0] * 8] * 3 + [[1.0] * 8]
    with pytest.raises(jax.errors.JaxRuntimeError, match=FAULT):
        pool[1].block_until_ready()
    assert done.ticket == ticket
    assert FAULT in str(done.error)
    recover(pool[0])


@modes
@pytest.mark.parametrize("host_bytes", ["10kB", 40_000, "100KiB"])
def test_host_bytes_are_not_exceeded(host_bytes, mode):
    engine, pool, shadow, rng = make("int8 with scales", mode)
    block_bytes = engine.block_bytes
    engine = TransferEngine(
        pool,
        host_bytes=host_bytes,
        mode=mode,
        block_axis={"kv": 0, "scale": -1},
        extent_bytes=4 * block_bytes,
    )
    asked = parse_bytes(host_bytes)
    assert 0.6 * asked < engine.num_host_blocks * block_bytes <= engine.host_bytes
    assert engine.host_bytes <= asked
    # The same number of blocks, given by number, takes no more.
    same = TransferEngine(
        pool,
        engine.num_host_blocks,
        mode=mode,
        block_axis={"kv": 0, "scale": -1},
        extent_bytes=4 * block_bytes,
    )
    assert same.host_bytes <= engine.host_bytes
    if host_bytes == "10kB":
        move(engine, pool, shadow, rng, 1)


def test_invalid_host_bytes_are_refused():
    pool = jnp.zeros((4, 64))
    assert TransferEngine(pool, host_bytes=512).num_host_blocks == 1
    with pytest.raises(ValueError, match="host_bytes=511 must be at least 512"):
        TransferEngine(pool, host_bytes=511)
    with pytest.raises(ValueError, match="must be a size such as 64MiB"):
        TransferEngine(pool, host_bytes="plenty")
    with pytest.raises(ValueError, match=r"one of .* must be given"):
        TransferEngine(pool)
    with pytest.raises(ValueError, match=r"one of .* must be given"):
        TransferEngine(pool, 4, host_bytes="1MB")


@pytest.mark.parametrize("mode", MODES)
def test_device_blocks_that_a_save_left_out_cannot_be_loaded(mode):
    pool = [jnp.arange(64, dtype=jnp.float32).reshape(16, 4)]
    engine = TransferEngine(pool, 8, mode=mode, blocks_per_host_block=2)
    engine.save(pool, [[14, 15], [12, 13]], [0, 1])
    pool, _ = engine.drain(pool)
    engine.save(pool, [[4, -1]], [0])
    pool, _ = engine.drain(pool)
    with pytest.raises(ValueError, match=r"host blocks \[0\] lack device blocks"):
        engine.load(pool, [1, 0], [[6, 7], [8, 9]])
    pool, _ = engine.load(pool, [1, 0], [[6, 7], [8, -1]])
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None]
    leaf = np.array(pool[0])
    assert np.array_equal(leaf[[6, 7, 8, 9]], leaf[[12, 13, 4, 9]])
