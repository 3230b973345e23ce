"""Limits on host memory, checked before it is allocated; free memory of devices.

The kernel may kill a process that pins too much without a message, and XLA's errors
name neither the limit nor how to raise it. So each limit that can be read is read
first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from jaxkv._util import gib, shown

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A runtime's pool of pinned memory, and the variable that sets its size."""

    source: str  # Description of the pool, for messages.
    variable: str  # Name of the environment variable.
    default: int  # Its value if it is not set.
    unit_bytes: int  # Bytes that a value of 1 stands for.
    multiple: int  # Values must be multiples of this.
    values: str  # Description of valid values, for messages.


# Documented for GPU with GetGpuHostAllocator in xla/pjrt/gpu/gpu_helpers.h, for TPU in
# the Cloud TPU performance guide.
_POOLS = {
    "gpu": _Pool(
        "XLA's pool of pinned memory",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
        64,
        _GIB,
        1,
        "a whole number of GiB from 1",
    ),
    "tpu": _Pool(
        "the premapped memory of the TPU runtime",
        "TPU_PREMAPPED_BUFFER_SIZE",
        4 * _GIB,
        1,
        4096,
        "a number of bytes, a multiple of 4096",
    ),
}
_GPU_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_GPU_POOL_PREALLOCATED_GIB = 16

# The value that cgroup v1 has for "unlimited" depends on the page size, but is huge.
_UNLIMITED_BYTES = 1 << 60

MACHINE = "the machine"
"""The source of the limit of the machine itself."""

PROC = Path("/proc")
"""Where procfs is mounted."""
CGROUP = Path("/sys/fs/cgroup")
"""Where the cgroup file systems are mounted."""


@dataclasses.dataclass(frozen=True)
class HostLimit:
    """A limit on host memory."""

    num_bytes: int  # Bytes that may still be allocated.
    source: str  # What sets the limit, for messages.
    remedy: str  # How to raise it, for messages.


@dataclasses.dataclass(frozen=True)
class PinnedPool:
    """A runtime's pool of pinned memory, with its configured size."""

    num_bytes: int
    source: str  # What it is and what sets its size, for messages.
    variable: str  # The environment variable that sets its size.
    unit_bytes: int  # Its size must be a multiple of this.
    value_bytes: int  # Bytes that a value of 1 of the variable stands for.
    # Whether the runtime allocated all of it at start, so that the system's available
    # memory no longer includes it.
    is_preallocated: bool

    def remedy(self, num_bytes: int) -> str:
        """Return how to make the pool hold `num_bytes`."""
        units = -(-num_bytes // self.unit_bytes)
        value = units * (self.unit_bytes // self.value_bytes)
        return f"set {self.variable} to {value} or more before jax is imported"


@dataclasses.dataclass(frozen=True)
class _Files:
    """Names of the files and fields in a version of cgroups."""

    limit: str
    usage: str
    file_pages: tuple[str, str]


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def system_limits(
    proc_root: Path = PROC, cgroup_root: Path = CGROUP
) -> list[HostLimit]:
    """List the limits that are known: of `MACHINE`, then of the process's cgroups."""
    # Without MemAvailable, all memory: the free memory does not include caches that the
    # system can reclaim, and would refuse sizes that fit.
    num_bytes = _meminfo(proc_root, "MemAvailable")
    if num_bytes is None:
        num_bytes = total_host_bytes(proc_root)
    limits = list(_cgroup_limits(proc_root, cgroup_root))
    if num_bytes is not None:
        limits.insert(0, HostLimit(num_bytes, MACHINE, "free some memory"))
    return limits


def total_host_bytes(proc_root: Path = PROC) -> int | None:
    """Return the memory of the machine in bytes; None if it is unknown."""
    total = _meminfo(proc_root, "MemTotal")
    if total is not None:
        return total
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    if pages < 1 or page_bytes < 1:  # -1 stands for "not known"
        return None
    return pages * page_bytes


def available_host_bytes(
    proc_root: Path = PROC, cgroup_root: Path = CGROUP
) -> HostLimit | None:
    """Return the tightest of `system_limits`; None if none is known."""
    limits = system_limits(proc_root, cgroup_root)
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def device_bytes_left(devices: Iterable[jax.Device]) -> int | None:
    """Return the free bytes of the fullest of some devices; None if unknown."""
    left = [
        stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        for device in devices
        if "bytes_limit" in (stats := device.memory_stats() or {})
    ]
    return max(0, min(left)) if left else None


def pinned_pool(
    platform: str, environ: Mapping[str, str] = os.environ
) -> PinnedPool | None:
    """Return the runtime's pool of pinned memory; None on a platform without one.

    `environ` started the backend. ValueError if a variable has an invalid value.
    """
    pool = _POOLS.get(platform)
    if pool is None:
        return None
    default = pool.default
    is_preallocated = _pool_is_preallocated(platform, environ)
    if platform == "gpu" and is_preallocated:
        default = _GPU_POOL_PREALLOCATED_GIB
    text = environ.get(pool.variable, str(default))
    size = int(text) if re.fullmatch(r"\s*\+?[0-9]{1,18}\s*", text) else 0
    if size < 1 or size % pool.multiple:
        raise ValueError(f"{pool.variable}={shown(text)} must be {pool.values}.")
    verb = "is" if pool.variable in environ else "is not set, which means"
    return PinnedPool(
        size * pool.unit_bytes,
        f"{pool.source} ({pool.variable} {verb} {size})",
        pool.variable,
        pool.unit_bytes * pool.multiple,
        pool.unit_bytes,
        is_preallocated,
    )


def check_host_bytes(
    num_bytes: int,
    platform: str,
    environ: Mapping[str, str] = os.environ,
    *,
    proc_root: Path = PROC,
    cgroup_root: Path = CGROUP,
) -> None:
    """Refuse to allocate more pinned memory than the limits allow.

    Nothing is reserved: the allocation may still fail if other processes take memory or
    the runtime's pool is fragmented. `host_memory_error` then explains it.

    MemoryError names the exceeded limits, the tightest first. ValueError if a variable
    has an invalid value.
    """
    pool = pinned_pool(platform, environ)
    limits = []
    if pool is not None:
        limits.append(HostLimit(pool.num_bytes, pool.source, pool.remedy(num_bytes)))
    # The system already counts a preallocated pool as used.
    if pool is None or not pool.is_preallocated:
        limits += system_limits(proc_root, cgroup_root)
    exceeded = sorted(
        (limit for limit in limits if num_bytes > limit.num_bytes),
        key=lambda limit: limit.num_bytes,
    )
    if exceeded:
        reasons = "; and ".join(
            f"{limit.source} has only {gib(limit.num_bytes)}: {limit.remedy}"
            for limit in exceeded
        )
        raise MemoryError(
            f"{gib(num_bytes)} of pinned host memory were asked for, but {reasons}, or "
            "ask for fewer host blocks."
        )


def host_memory_error(num_bytes: int, platform: str) -> MemoryError:
    """Make an error that explains a failed allocation of `num_bytes` on the host."""
    pool = _POOLS.get(platform)
    return MemoryError(
        f"Could not allocate {num_bytes} bytes ({gib(num_bytes)}) of pinned_host "
        "memory for host blocks: lower num_host_blocks or host_bytes"
        + (f", or raise {pool.variable} before jax is imported." if pool else ".")
    )


def _meminfo(proc_root: Path, name: str) -> int | None:
    """Read a field of meminfo, in bytes."""
    meminfo = _read(proc_root / "meminfo")
    match = re.search(rf"^{name}:\s+([0-9]+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_limits(proc_root: Path, cgroup_root: Path) -> Iterator[HostLimit]:
    """Yield the limit of every cgroup that the process is in and that has one."""
    for line in _read(proc_root / "self/cgroup").splitlines():
        # hierarchy:controllers:path, where v2 has no controllers.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount, files = cgroup_root, _V2
        elif "memory" in controllers.split(","):
            mount, files = cgroup_root / "memory", _V1
        else:
            continue
        # In a container the path can be the host's. Then its folders do not exist, and
        # the mount itself is the container's cgroup.
        folders = [name for name in path.split("/") if name not in ("", ".", "..")]
        for depth in range(len(folders), -1, -1):
            limit = _cgroup_limit(mount.joinpath(*folders[:depth]), files)
            if limit:
                yield limit


def _cgroup_limit(folder: Path, files: _Files) -> HostLimit | None:
    limit = _read_int(folder / files.limit)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    # File pages count as usage, but the kernel reclaims them before it refuses. A
    # server that has just read its weights would otherwise seem to be full.
    file_bytes = sum(
        int(value)
        for name, value in re.findall(
            r"^(\w+) ([0-9]+)$", _read(folder / "memory.stat"), re.MULTILINE
        )
        if name in files.file_pages
    )
    used = max(0, (_read_int(folder / files.usage) or 0) - file_bytes)
    return HostLimit(
        max(0, limit - used),
        f"the cgroup {folder} ({files.limit} is {gib(limit)})",
        "raise the memory limit of the container or service",
    )


def _read(path: Path) -> str:
    """Read a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if re.fullmatch("[0-9]{1,30}", text) else None


def _pool_is_preallocated(platform: str, environ: Mapping[str, str]) -> bool:
    if platform != "gpu":
        return platform == "tpu"
    text = environ.get(_GPU_PREALLOCATE, "false")
    if text.lower() in ("0", "false"):
        return False
    if text.lower() in ("1", "true"):
        return True
    raise ValueError(f"{_GPU_PREALLOCATE}={shown(text)} must be true or false.")
