"""Cases that need more devices than the suite has, in a separate process.

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

ROOT = Path(__file__).resolve().parents[2]


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
