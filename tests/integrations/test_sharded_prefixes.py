"""Prefixes whose heads and layers are spread over four devices keep their shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Namespace
from jaxkv.integrations.jetstream import PrefixCache, PrefixValue
from jaxkv.integrations.prefix_store import PrefixStore
from tests.rigs.known_kv import check_equal

P = jax.sharding.PartitionSpec
NAMESPACE = Namespace("model", "0", "mixed", "NHD", 4)
LENGTH, HEADS = 18, 4


def mesh_of(axis_type="Auto", shape=(2, 2)):
    devices = np.array(jax.devices()[:4]).reshape(shape)
    types = (getattr(jax.sharding.AxisType, axis_type),) * 2
    return jax.sharding.Mesh(devices, ("layers", "heads"), axis_types=types)


def values():
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((2, LENGTH, HEADS, 8)).astype(jnp.bfloat16)
    return {"kv": kv, "mask": rng.integers(0, 9, (2, LENGTH), np.int32)}


def shardings(mesh):
    by_both = jax.sharding.NamedSharding(mesh, P("layers", None, "heads"))
    return {"kv": by_both, "mask": jax.sharding.NamedSharding(mesh, P())}


def put(arrays, places):
    return jax.tree.map(lambda a, place: jax.device_put(a, place), arrays, places)


def kept(arrays, num_tokens):
    covered = np.arange(LENGTH) < num_tokens
    return {
        "kv": np.where(
            covered[None, :, None, None], arrays["kv"], np.zeros_like(arrays["kv"])
        ),
        "mask": np.where(covered[None], arrays["mask"], 0),
    }


types = pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])


@types
@pytest.mark.parametrize(
    ("mode", "is_spread"), [("fused", True), ("staged", True), ("fused", False)]
)
def test_kv_comes_back_where_its_template_is(axis_type, mode, is_spread):
    places, arrays = shardings(mesh_of(axis_type)), values()
    like = kv = put(arrays, places)
    prompt = list(range(LENGTH))
    if not is_spread:
        kv = jax.tree.map(jnp.array, arrays)
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like
        )
    with PrefixStore(
        like, namespace=NAMESPACE, num_host_blocks=16, sequence_axis=1, mode=mode
    ) as store:
        assert store.save(prompt, kv) == 16
        store.flush()
        hit = store.load(prompt)
        assert hit.num_tokens == 16
        check_equal(hit.kv, kept(arrays, 16))
        for mine, place in zip(*map(jax.tree.leaves, (hit.kv, places)), strict=True):
            assert mine.sharding.is_equivalent_to(place, mine.ndim), mine.sharding


@types
def test_an_engines_cache_comes_back_where_it_was(axis_type):
    """Leaves with and without a sequence axis, over four devices."""
    mesh = mesh_of(axis_type)
    places = shardings(mesh) | {
        "generated": jax.sharding.NamedSharding(mesh, P(None, "heads")),
        "index": jax.sharding.NamedSharding(mesh, P()),
    }
    fixed = {"generated": np.zeros((5, 4), np.float32), "index": np.full((2,), 7)}
    arrays = values() | {name: leaf.astype("float32") for name, leaf in fixed.items()}
    tokens = tuple(range(16))
    with PrefixCache(block_size=4, num_host_blocks=16, extras_of=None) as cache:
        for n in range(2):  # The second is compared with the first.
            key = (n, *tokens[1:])
            value = PrefixValue(put(arrays, places), key, 16, LENGTH, 0, None)
            assert cache.save(key, value)
        cache.flush()
        assert cache.stats.num_dropped_failed == 0
        hit = cache.load(key)
        check_equal(hit.prefix, arrays | kept(arrays, 16))
        for name, place in places.items():
            leaf = hit.prefix[name]
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim), (name, leaf)
            assert hit.device[name] == place


def test_sharded_tokens_are_refused():
    place = jax.sharding.NamedSharding(mesh_of(), P(None, "heads"))
    kv = jax.device_put(jnp.zeros((2, 16)), place)
    with pytest.raises(ValueError, match="tokens of 'kv', axis 1, are sharded over"):
        PrefixStore(kv, namespace=NAMESPACE, num_host_blocks=4, sequence_axis=1)
