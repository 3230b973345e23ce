"""The packages of the extras in pyproject.toml, and the command that installs them.

Messages name the packages, not ``jaxkv[EXTRA]``: no package index has jaxkv yet.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "events": {"zmq": "pyzmq>=26", "msgspec": "msgspec>=0.18"},
    "metrics": {"prometheus_client": "prometheus_client>=0.20"},
    "demo": {"flax": "flax>=0.12", "rich": "rich>=13"},
    "storage": {"tensorstore": "tensorstore>=0.1.86"},
    "redis": {"redis": "redis>=5.1"},
}
"""For each extra of a feature, its modules and the requirement of each module."""

PLATFORMS: Mapping[str, Mapping[str, str]] = {  # The same of each accelerator
    "cuda12": {"jax_cuda12_plugin": "jax[cuda12]>=0.10"},
    "cuda13": {"jax_cuda13_plugin": "jax[cuda13]>=0.10"},
    "tpu": {"libtpu": "jax[tpu]>=0.10"},
}

_ALL = {**EXTRAS, **PLATFORMS}


def missing_packages(extra: str) -> tuple[str, ...]:
    """Return the names of an extra's packages that are not installed."""
    return tuple(
        re.split(r"[\[>]", requirement)[0]
        for module, requirement in _ALL[extra].items()
        if importlib.util.find_spec(module) is None
    )


def pip_install(extra: str) -> str:
    """Return the command that installs an extra's packages.

    >>> pip_install("events")
    'pip install "pyzmq>=26" "msgspec>=0.18"'
    """
    packages = (f'"{package}"' for package in _ALL[extra].values())
    return " ".join(["pip install", *packages])
