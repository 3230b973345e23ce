"""Any paged layout keeps every bit, with any host blocks, layer groups and sizes.

Pools of other engines are in miniature, with the order of their axes.
"""

import jax
import numpy as np
import pytest

from jaxkv._util import parse_bytes
from tests.transfer.shadow import Shadow, exercise, random_array, to_device


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(num_layers, *shape, dtype="bfloat16"):
    return [spec(*shape, dtype=dtype) for _ in range(num_layers)]


# name -> the pool, its block axis, device blocks per host block
LAYOUTS = {
    # [num_blocks, block_size, ceil(2 * kv_heads / packing), packing, head_dim]
    "RPA v3, bfloat16": (layers(3, 12, 4, 2, 2, 8), 0, 1),
    "RPA v3, float8": (layers(3, 12, 4, 1, 4, 8, dtype="float8_e4m3fn"), 0, 1),
    # [kv_heads, num_pages, tokens_per_page, head_dim]
    "MaxText's pages": (
        {"key": layers(2, 2, 12, 4, 8), "value": spec(2, 12, 4, 8)},
        1,
        1,
    ),
    # [L, max_prefill, heads, B, D]: its rows are tokens, a host block is four of them
    "MaxText's prefill cache, scanned": (
        {"key": spec(2, 24, 2, 1, 8), "value": spec(2, 24, 2, 1, 8)},
        1,
        4,
    ),
    "keys and values stacked": (spec(2, 3, 12, 4, 2, 8), 2, 1),
    "int8 with scales": (
        {
            "kv": layers(2, 12, 4, 2, 8, dtype="int8"),
            "scale": layers(2, 2, 12, dtype="float32"),
        },
        {"kv": 0, "scale": -1},
        1,
    ),
    "float8 with scales": (
        [{"kv": spec(2, 12, 4, 8, dtype="float8_e5m2"), "scale": spec(12)}] * 2,
        [{"kv": 1, "scale": 0}, {"kv": -3, "scale": -1}],
        1,
    ),
    "blocks along the last axis": (layers(2, 2, 8, 12, dtype="float16"), -1, 2),
    # Equal leaves apart from each other, and a block that is a scalar.
    "leaves of every kind": (
        (
            {
                "k": layers(2, 24, 3, 4),
                "q": [spec(24, 5, dtype="int8"), spec(24, 3, 4, dtype="float8_e5m2")],
            },
            spec(24, dtype="float32"),
            {"v": [spec(24, 3, 4), spec(24, 2, 2, dtype="bool")]},
        ),
        0,
        3,
    ),
}


@pytest.fixture
def make_layout(make):
    """Make an engine with three spare host blocks, its pool, and their shadow."""

    def make_layout(name, **options):
        specs, block_axis, m = LAYOUTS[name]
        rng = np.random.default_rng(0)
        arrays = jax.tree.map(lambda s: random_array(rng, s.shape, s.dtype), specs)
        shadow = Shadow(arrays, block_axis)
        options = {"block_axis": block_axis, "blocks_per_host_block": m} | options
        m = options["blocks_per_host_block"]
        options = {"num_host_blocks": len(shadow.leaves[0]) // m + 3} | options
        return make(to_device(arrays), **options), shadow, rng

    return make_layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_any_layout_keep_every_bit(make_layout, name):
    m = LAYOUTS[name][2]
    block_bytes = make_layout(name)[0].engine.block_bytes
    # With one extent in flight there are programs for one only.
    sizes = {"extent_bytes": 2 * block_bytes, "staging_bytes": 2 * block_bytes}
    moves, shadow, rng = make_layout(name, **sizes)
    leaf_bytes = [leaf[0].nbytes for leaf in shadow.leaves]
    assert block_bytes == m * sum(leaf_bytes)
    exercise(moves, shadow, rng)


def test_host_bytes_are_not_exceeded(make_layout):
    block_bytes = make_layout("int8 with scales")[0].engine.block_bytes
    for host_bytes in ("10kB", 40_000, "100KiB"):
        options = {"extent_bytes": 4 * block_bytes, "num_host_blocks": None}
        moves, shadow, rng = make_layout(
            "int8 with scales", **options, host_bytes=host_bytes
        )
        host_size, engine = parse_bytes(host_bytes), moves.engine
        num_bytes = engine.num_host_blocks * block_bytes
        assert 0.6 * host_size < num_bytes <= engine.host_bytes <= host_size
        # The same number of blocks, given by number, takes no more.
        options["num_host_blocks"] = engine.num_host_blocks
        same, *_ = make_layout("int8 with scales", **options)
        assert same.engine.host_bytes <= engine.host_bytes
        if host_bytes == "10kB":
            exercise(moves, shadow, rng)
