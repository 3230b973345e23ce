"""Facts about the machine of a measurement."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re

import jax
import numpy as np

from jaxkv import __version__


def machine() -> dict[str, object]:
    """Describe the machine and the versions of the figures."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "cpu": cpu_model(),
        "num_cpus": num_cpus(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions(),
    }


def versions(*packages: str) -> dict[str, str]:
    installed = {
        "python": platform.python_version(),
        "jaxkv": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
    }
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def num_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_model() -> str | None:
    match = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else None


def last_level_cache_bytes() -> int | None:
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", _read(path).strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


def _read(path: str | pathlib.Path) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
