"""Which devices a test runs on; and cases that need more, in a separate process.

`JAXKV_TEST_PLATFORM` chooses the platform of all tests, the CPU by default.

A module of cases ends with ``main(CASES, num_devices)``; its test calls `run` with the
module's name.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = os.environ.get("JAXKV_TEST_PLATFORM", "cpu") == "cpu"
only_on_cpu = pytest.mark.skipif(not ON_CPU, reason="it is about the CPU backend")


def devices(num=1):
    """List the first devices of the platform; skip the test if there are fewer."""
    found = jax.devices()
    if len(found) < num:
        pytest.skip(f"needs {num} devices and finds {len(found)}")
    return found[:num]


def mesh_of(num_devices, axis="x", axis_type=jax.sharding.AxisType.Auto):
    """Make a mesh of one axis."""
    return jax.make_mesh(
        (num_devices,), (axis,), (axis_type,), devices=devices(num_devices)
    )


def spread(pool, num_devices, *spec, **options):
    """Spread a pool over a mesh whose axis is "x"."""
    mesh = mesh_of(num_devices, **options)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(pool, place)


def run(module, timeout_s):
    """Run all cases of a module: for each a traceback, or None if it passed."""
    # Run in the repository: the working folder comes first on the path.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def main(cases, num_devices):
    """Run the cases on the command line, or all, and print the results."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    results = {}
    for name in sys.argv[1:] or cases:
        try:
            cases[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
    sys.stdout.flush()
