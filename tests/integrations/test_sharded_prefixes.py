"""Prefixes whose heads and layers are spread over four devices keep their shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Namespace
from jaxkv.integrations.prefix_store import PrefixStore
from tests.rigs.known_kv import (
    SEQUENCE_AXIS,
    check_hit,
    known_kv,
    to_device,
)

P = jax.sharding.PartitionSpec
NAMESPACE = Namespace("model", "0", "mixed", "NHD", 4)
LENGTH = 18
SPECS = {"key": P(None, "heads", "layers"), "layers": [P(), P("layers", "heads")]}


def spread(specs, axis_type="Auto"):
    """Shardings over four devices."""
    types = (getattr(jax.sharding.AxisType, axis_type),) * 2
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("layers", "heads"), axis_types=types)
    return jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)


def check_places(arrays, places):
    for leaf, place in zip(*map(jax.tree.leaves, (arrays, places)), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), leaf.sharding


types = pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])


@types
@pytest.mark.parametrize(
    ("mode", "is_spread"), [("fused", True), ("staged", True), ("fused", False)]
)
def test_kv_comes_back_where_its_template_is(axis_type, mode, is_spread):
    places, prompt = spread(SPECS, axis_type), list(range(LENGTH))
    kv = to_device(known_kv(prompt, LENGTH))
    like = jax.device_put(kv, places)
    if is_spread:
        kv = like
    else:
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like
        )
    how = {"namespace": NAMESPACE, "sequence_axis": SEQUENCE_AXIS, "mode": mode}
    with PrefixStore(like, num_host_blocks=16, **how) as store:
        assert store.save(prompt, kv) == 16
        store.flush()
        hit = store.load(prompt)
        assert hit.num_tokens == 16
        check_hit(hit, prompt)
        check_places(hit.kv, places)


def test_sharded_tokens_are_refused():
    kv = jax.device_put(jnp.zeros((2, 16)), spread(P(None, "heads")))
    with pytest.raises(ValueError, match="tokens of 'kv', axis 1, are sharded over"):
        PrefixStore(kv, namespace=NAMESPACE, num_host_blocks=4, sequence_axis=1)
