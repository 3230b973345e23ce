"""What all benchmarks say of themselves: where they ran, and how times spread."""

from __future__ import annotations

import os
import platform
import statistics

import jax
import jaxlib
import numpy as np


def quartiles(values: list[float]) -> list[float]:
    """Give the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4)


def machine() -> dict[str, object]:
    """Say where the figures come from."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "num_cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }
