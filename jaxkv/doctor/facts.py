"""What can be found out about a machine, without a word on what is right."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxkv.batches import cpu_device
from jaxkv.bench.machine import cpu_model, num_cpus, versions
from jaxkv.config import OffloadConfig
from jaxkv.config_keys import (
    ConfigError,
    read_environment,
    variables_of,
    with_variables,
)
from jaxkv.doctor.bandwidth import Bandwidth
from jaxkv.transfer import limits, memory, probe
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.limits import HostLimit, PinnedPool
from jaxkv.transfer.modes import choose_mode

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "events": {"zmq": "pyzmq", "msgspec": "msgspec"},
    "metrics": {"prometheus_client": "prometheus_client"},
    "demo": {"flax": "flax", "rich": "rich", "matplotlib": "matplotlib"},
}
"""The extras, and what each installs: the module, and the package it is from."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """What jax runs on.

    Attributes:
        platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
        kind: What the first device is.
        num_devices: Devices of all processes.
        decides_on: The platform that the scheduler's decisions run on.
        memory_kinds: The memories that the first can address, its own first.
        memory_bytes: Its own memory; None where the runtime does not say.
    """

    platform: str
    kind: str
    num_devices: int
    decides_on: str
    memory_kinds: tuple[str, ...]
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was found.

    Attributes:
        system: The operating system and the CPU.
        versions: Of Python and of the packages that matter.
        total_bytes: Memory of the machine; None if the system does not say.
        limits: What the machine and each cgroup may still give.
        has_nvidia_driver: Whether the machine could run an NVIDIA GPU.
        chosen_platforms: What the environment allows jax to run on; empty for all.
        backend: What jax runs on; None if it fails to start.
        pool: The runtime's own pool of pinned memory, where it has one.
        mode: The mode that a transfer engine would use; None if there is none.
        refusals: Why a transfer engine would refuse to be made, or jax to start.
        missing: The packages that are missing, of each extra.
        variables: The variables of the environment that configure jaxkv.
        config: What those of them that are right come to; None if these contradict
            one another.
        config_faults: What is wrong with them.
        bandwidth: How fast blocks moved; None if that was not measured.
        probe_fault: Why that failed; empty if it did not.
        probe_left_out: Why it was not tried; empty if it was.
    """

    system: str
    versions: Mapping[str, str]
    total_bytes: int | None
    limits: tuple[HostLimit, ...]
    has_nvidia_driver: bool
    chosen_platforms: str
    backend: Backend | None
    pool: PinnedPool | None
    mode: Mode | None
    refusals: tuple[str, ...]
    missing: Mapping[str, tuple[str, ...]]
    variables: Mapping[str, str]
    config: OffloadConfig | None
    config_faults: tuple[str, ...]
    bandwidth: Bandwidth | None = None
    probe_fault: str = ""
    probe_left_out: str = ""

    @property
    def machine_limit(self) -> HostLimit | None:
        """What the machine may still give, if it is known."""
        own = (limit for limit in self.limits if limit.source == limits.MACHINE)
        return next(own, None)

    @property
    def cgroup_limits(self) -> tuple[HostLimit, ...]:
        """What each cgroup may still give."""
        return tuple(one for one in self.limits if one.source != limits.MACHINE)


def gather_facts(
    environ: Mapping[str, str] = os.environ,
    *,
    proc_root: Path = limits.PROC,
    cgroup_root: Path = limits.CGROUP,
) -> Facts:
    """Find out what there is. Starts jax's backend.

    Args:
        environ: The environment.
        proc_root: Where procfs is mounted.
        cgroup_root: Where the cgroup file systems are mounted.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    refusals = []
    config = None
    values, config_faults = read_environment(environ)
    try:
        config = OffloadConfig(**values)
    except ConfigError as error:
        config_faults += [with_variables(one, values.keys()) for one in error.faults]
    chosen_mode = None if config is None else config.transfer_mode
    backend, pool, mode = None, None, None
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:
        # Without a word where JAX_PLATFORMS names a plugin that is not installed.
        why = _in_one_line(error) or f"it has no backend for JAX_PLATFORMS={platforms}"
        refusals.append(f"jax does not start: {why}")
    else:
        backend = _backend_of(device)
        for check in (
            lambda: memory.host_sharding(device),
            lambda: probe.check_client(backend.platform, environ),
            probe.check_jit,
        ):
            try:
                check()
            except ValueError as error:
                refusals.append(_in_one_line(error))
        try:
            pool = limits.pinned_pool(backend.platform, environ)
        except ValueError as error:
            refusals.append(_in_one_line(error))
        try:
            mode = choose_mode(chosen_mode, backend.platform)
        except ValueError as error:
            refusals.append(_in_one_line(error))
    return Facts(
        system=_system(),
        versions=versions(),
        total_bytes=limits.total_host_bytes(proc_root),
        limits=tuple(limits.system_limits(proc_root, cgroup_root)),
        has_nvidia_driver=(proc_root / "driver/nvidia/version").exists(),
        chosen_platforms=platforms,
        backend=backend,
        pool=pool,
        mode=mode,
        refusals=tuple(refusals),
        missing={name: missing_packages(name) for name in EXTRAS},
        variables=variables_of(environ),
        config=config,
        config_faults=tuple(config_faults),
    )


def missing_packages(extra: str) -> tuple[str, ...]:
    """Name the packages of an extra that are not installed."""
    return tuple(
        package
        for module, package in EXTRAS[extra].items()
        if importlib.util.find_spec(module) is None
    )


def _backend_of(device: jax.Device) -> Backend:
    stats = device.memory_stats() or {}  # None of a CPU.
    return Backend(
        device.platform,
        device.device_kind,
        jax.device_count(),
        cpu_device().platform,
        memory.memory_kinds(device),
        stats.get("bytes_limit"),
    )


def _system() -> str:
    cpu = cpu_model()
    return f"{platform.system()} {platform.machine()}, {num_cpus()} CPUs" + (
        f" ({cpu})" if cpu else ""
    )


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
