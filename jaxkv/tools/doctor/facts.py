"""Facts about a machine, without judging them."""

from __future__ import annotations

import dataclasses
import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from jaxkv._util import rounded_size
from jaxkv._util.extras import EXTRAS, missing_packages
from jaxkv.config import (
    KEYS,
    ConfigError,
    OffloadConfig,
    blank_secret_faults,
    read_environment,
    variable_of,
    variables_of,
    with_variables,
)
from jaxkv.tiers.executors import cpu_device
from jaxkv.tools.doctor.store import Store
from jaxkv.tools.machine import cpu_model, num_cpus, versions
from jaxkv.tools.speed import Bandwidth
from jaxkv.transfer import limits, memory
from jaxkv.transfer.kernels import Mode, choose_mode
from jaxkv.transfer.limits import HostLimit, PinnedPool

_T = TypeVar("_T")

_ALLOCATED_BYTES = 8 << 20
_ADDRESS_SPACE = "the address space of this process (ulimit -v)"

HIDDEN = "..."
"""What stands for a secret."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The backend of jax."""

    platform: str  # ``"cpu"``, ``"gpu"``, ``"tpu"``
    kind: str  # Kind of the first device
    num_devices: int  # Devices of all processes
    decides_on: str  # The platform that the scheduler's decisions run on
    memory_kinds: tuple[str, ...]  # Memory kinds of the first device, its default first
    # Memory of the first device; None if the runtime does not report it
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts."""

    system: str  # The operating system and the CPU
    versions: Mapping[str, str]  # Versions of Python and of the packages that matter
    total_bytes: int | None  # Memory of the machine; None if unknown
    limits: tuple[HostLimit, ...]  # Memory limits of the machine and of each cgroup
    has_nvidia_driver: bool  # Whether the machine has an NVIDIA driver
    chosen_platforms: str  # Platforms that the environment allows jax; empty for all
    backend: Backend | None  # The backend of jax; None if it fails to start
    pool: PinnedPool | None  # The runtime's pool of pinned memory, if it has one
    # The mode that a transfer engine would use; None if there is none
    mode: Mode | None
    # Why jax does not start, or a transfer engine cannot be made
    refusals: tuple[str, ...]
    missing: Mapping[str, tuple[str, ...]]  # The missing packages of each extra
    # The environment variables that configure jaxkv, without secrets
    variables: Mapping[str, str]
    # The configuration from the valid ones; None if they contradict one another
    config: OffloadConfig | None
    config_faults: tuple[str, ...]  # The faults of the others
    # Measured speeds; None if they were not measured
    bandwidth: Bandwidth | None = None
    probe_fault: str = ""  # Why the measurement failed; empty if it did not
    probe_left_out: str = ""  # Why it was left out; empty if it was not
    # What was found of the store; None if there is none to look at
    store: Store | None = None

    @property
    def machine_limit(self) -> HostLimit | None:
        machine = (limit for limit in self.limits if limit.source == limits.MACHINE)
        return next(machine, None)

    @property
    def cgroup_limits(self) -> tuple[HostLimit, ...]:
        sources = limits.MACHINE, _ADDRESS_SPACE
        return tuple(limit for limit in self.limits if limit.source not in sources)


def gather_facts(
    environ: Mapping[str, str] = os.environ,
    *,
    proc_root: Path = limits.PROC,
    cgroup_root: Path = limits.CGROUP,
) -> Facts:
    """Gather the facts. Starts jax's backend."""
    platforms = environ.get("JAX_PLATFORMS", "")
    refusals = []
    config = None
    values, config_faults = read_environment(environ)
    if values.get("storage") is not None:
        config_faults += blank_secret_faults(environ)
    try:
        config = OffloadConfig(**values)
    except ConfigError as error:
        config_faults += [
            with_variables(fault, values.keys()) for fault in error.faults
        ]
    chosen_mode = None if config is None else config.transfer_mode
    backend, pool, mode = None, None, None

    def attempt(call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except ValueError as error:
            refusals.append(_in_one_line(error))
            return None

    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:
        # The message is empty if JAX_PLATFORMS names a plugin that is not installed.
        why = _in_one_line(error) or f"it has no backend for JAX_PLATFORMS={platforms}"
        refusals.append(f"jax does not start: {why}")
    else:
        backend = _backend_of(device)
        name = backend.platform
        attempt(lambda: memory.host_sharding(device))
        attempt(lambda: _allocate(device))
        attempt(lambda: memory.check_client(name, environ))
        attempt(memory.check_jit)
        pool = attempt(lambda: limits.pinned_pool(name, environ))
        mode = attempt(lambda: choose_mode(chosen_mode, name))
    return Facts(
        system=_system(),
        versions=versions(),
        total_bytes=limits.total_host_bytes(proc_root),
        limits=(
            *limits.system_limits(proc_root, cgroup_root),
            *_address_space_limits(proc_root),
        ),
        has_nvidia_driver=(proc_root / "driver/nvidia/version").exists(),
        chosen_platforms=platforms,
        backend=backend,
        pool=pool,
        mode=mode,
        refusals=tuple(refusals),
        missing={name: missing_packages(name) for name in EXTRAS},
        variables=_shown_variables(environ),
        config=config,
        config_faults=tuple(config_faults),
    )


def _allocate(device: jax.Device) -> None:
    """Put a block of some size there; ValueError if it does not fit."""
    try:
        data = np.zeros(_ALLOCATED_BYTES, np.uint8)
        jax.device_put(data, device).block_until_ready()
    except (MemoryError, RuntimeError) as error:
        size = rounded_size(_ALLOCATED_BYTES)
        raise ValueError(f"jax cannot allocate {size}: {error}") from error


def _address_space_limits(proc_root: Path) -> Iterator[HostLimit]:
    """Yield what `ulimit -v` leaves this process, whose mapped libraries count."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return
    try:
        text = (proc_root / "self" / "statm").read_text(encoding="ascii")
    except OSError:
        return
    used_bytes = int(text.split()[0]) * resource.getpagesize()
    left_bytes = max(0, soft - used_bytes)
    yield HostLimit(left_bytes, _ADDRESS_SPACE, "raise ulimit -v")


def _shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    variables = variables_of(environ)
    # A misspelt name may have a secret.
    shown = dict.fromkeys(variables, HIDDEN)
    for name, key in KEYS.items():
        variable = variable_of(name)
        if variable in variables and not key.is_secret:
            shown[variable] = key.show(variables[variable].strip())
    return shown


def _backend_of(device: jax.Device) -> Backend:
    stats = device.memory_stats() or {}  # None on CPU.
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
