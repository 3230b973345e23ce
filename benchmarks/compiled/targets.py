"""The devices to compile for, and what has to be installed for each."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal, TypeAlias

from jaxkv._util import did_you_mean

Backend: TypeAlias = Literal["tpu", "gpu", "cpu"]

NUM_DEVICES = 4
"""Devices that a sharded pool is spread over."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device to compile for."""

    name: str  # What users call it, such as ``"v5e"``
    device: str  # What it is, for people
    backend: Backend  # Which compiler makes its programs
    # The topology to describe; empty where there is nothing to choose
    topology: str = ""


TARGETS = (
    Target("v5e", "TPU v5e", "tpu", "v5e:2x2"),
    Target("v5p", "TPU v5p", "tpu", "v5p:2x2x1"),
    Target("v6e", "TPU v6e (Trillium)", "tpu", "v6e:2x2"),
    Target("tpu7x", "TPU7x (Ironwood)", "tpu", "tpu7x:2x2x1"),
    Target("h200", "NVIDIA H200 141GB HBM3e", "gpu"),
)
"""Accelerators, all of which are compiled for unless the user chooses."""

THIS_CPU = Target("cpu", "this machine's CPU", "cpu")
"""Needs nothing to be installed; nobody's accelerator."""

# By compiler: its module, and the dependency group in pyproject.toml.
_COMPILERS: dict[Backend, tuple[str, str]] = {
    "tpu": ("libtpu", "aot-tpu"),
    "gpu": ("jax_cuda12_plugin", "aot-gpu"),
}

_ENVIRONMENT: dict[Backend, dict[str, str]] = {
    # libtpu would look for a TPU, and for the server that describes its machine.
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    # The devices of a described GPU have no memory kinds; the CPU's stand in.
    "gpu": {"JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)},
    "cpu": {"JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)},
}


def parse_target(text: str) -> Target:
    """Find a target by its name, or by a topology of a TPU, such as ``"v6e:4x4"``."""
    name, colon, _ = text.partition(":")
    by_name = {target.name: target for target in (*TARGETS, THIS_CPU)}
    if name not in by_name:
        raise ValueError(f"unknown {name!r}: {did_you_mean(name, list(by_name))}")
    target = by_name[name]
    if not colon:
        return target
    if target.backend != "tpu":
        raise ValueError(f"{text!r} names a topology, which only a TPU has")
    if text == target.topology:
        return target
    return dataclasses.replace(target, name=text, topology=text)


def missing_group(target: Target) -> str | None:
    """Return the dependency group to install for a target; None if it is installed."""
    module, group = _COMPILERS.get(target.backend, ("", None))
    return group if module and importlib.util.find_spec(module) is None else None


def pip_install(group: str) -> str:
    """Return the command that installs a dependency group of this checkout."""
    return f"pip install -e . --group {group}"


def environment(backend: Backend) -> dict[str, str]:
    """Return what the environment of a compiling process must have, on any machine.

    It finds no device but the CPU, so that neither an accelerator nor what is wrong
    with one is in the way, and compiles everything, so that seconds are comparable.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **_ENVIRONMENT[backend],
    }
