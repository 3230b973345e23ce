"""Which devices a test runs on.

`JAXKV_TEST_PLATFORM` chooses the platform of all tests, the CPU by default.
"""

import os

import jax
import pytest

ON_CPU = os.environ.get("JAXKV_TEST_PLATFORM", "cpu") == "cpu"
only_on_cpu = pytest.mark.skipif(not ON_CPU, reason="it is about the CPU backend")


def devices(num=1):
    """List the first devices of the platform; skip the test if there are fewer."""
    available = jax.devices()
    if len(available) < num:
        pytest.skip(f"needs {num} devices and finds {len(available)}")
    return available[:num]


def mesh_of(num_devices, axis="x", axis_type=jax.sharding.AxisType.Auto):
    return jax.make_mesh(
        (num_devices,), (axis,), (axis_type,), devices=devices(num_devices)
    )


def spread(pool, num_devices, *spec, **options):
    """Spread a pool over a mesh whose axis is "x"."""
    mesh = mesh_of(num_devices, **options)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(pool, place)
