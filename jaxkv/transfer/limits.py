"""How much host memory there may be, asked before it is taken.

A process that pins more than there is may be killed by the kernel without a word, and
XLA's own errors name neither the limit nor how to raise it. So all limits that can be
read are read first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxkv.units import gib

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Pool:
    """A runtime's own pool of pinned memory, and the variable that sets its size.

    Attributes:
        source: What it is, for messages.
        variable: Its name in the environment.
        default: Its value where it is not set.
        unit_bytes: What a value of 1 stands for.
        multiple: What values are multiples of.
        values: What values are, for messages.
    """

    source: str
    variable: str
    default: int
    unit_bytes: int
    multiple: int
    values: str


# As documented: XLA's with GetGpuHostAllocator in xla/pjrt/gpu/gpu_helpers.h, the TPU's
# in the Cloud TPU performance guide.
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

# What cgroup v1 writes for "unlimited" depends on the page size, but is always huge.
_UNLIMITED_BYTES = 1 << 60

MACHINE = "the machine"
"""The source of the limit that is the machine's own."""

PROC = Path("/proc")
"""Where procfs is mounted."""
CGROUP = Path("/sys/fs/cgroup")
"""Where the cgroup file systems are mounted."""


@dataclasses.dataclass(frozen=True)
class HostLimit:
    """A limit on host memory.

    Attributes:
        num_bytes: How much more may be allocated.
        source: What sets the limit, for messages.
        remedy: How to raise it, for messages.
    """

    num_bytes: int
    source: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class PinnedPool:
    """A runtime's own pool of pinned memory, as large as it is set.

    Attributes:
        num_bytes: Its size.
        source: What it is and what sets its size, for messages.
        variable: The variable of the environment that sets its size.
        unit_bytes: Its size is a multiple of these.
        value_bytes: What a value of 1 of the variable stands for.
        is_preallocated: Whether the runtime took all of it as it started, so that it
            is not in what the system has left.
    """

    num_bytes: int
    source: str
    variable: str
    unit_bytes: int
    value_bytes: int
    is_preallocated: bool

    def remedy(self, num_bytes: int) -> str:
        """Say how to make room for so many bytes."""
        units = -(-num_bytes // self.unit_bytes)
        value = units * (self.unit_bytes // self.value_bytes)
        return f"set {self.variable} to {value} or more before jax is imported"


@dataclasses.dataclass(frozen=True)
class _Files:
    """The names that a version of cgroups has for the same figures."""

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
    """List what the machine and each cgroup of this process may still give it.

    Args:
        proc_root: Where procfs is mounted.
        cgroup_root: Where the cgroup file systems are mounted.

    Returns:
        The limit of `MACHINE`, if it is known, then those of the cgroups that have one.
    """
    machine = _machine_limit(proc_root)
    limits = [machine] if machine else []
    limits += _cgroup_limits(proc_root, cgroup_root)
    return limits


def total_host_bytes(proc_root: Path = PROC) -> int | None:
    """Find out how much memory the machine has; None if this system does not say.

    Args:
        proc_root: Where procfs is mounted.
    """
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
    """Find out how much host memory this process may still allocate.

    Args:
        proc_root: Where procfs is mounted.
        cgroup_root: Where the cgroup file systems are mounted.

    Returns:
        The tightest of the machine's available memory and the limits of the cgroups
        that the process is in; None if this system tells neither.
    """
    limits = system_limits(proc_root, cgroup_root)
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def pinned_pool(
    platform: str, environ: Mapping[str, str] = os.environ
) -> PinnedPool | None:
    """Find out how large the runtime's own pool of pinned memory is.

    Args:
        platform: The devices' platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
        environ: The environment that the backend was started in.

    Returns:
        The pool; None on a platform without one.

    Raises:
        ValueError: A variable has a value that the runtime does not understand.
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
        raise ValueError(f"{pool.variable}={text!r} must be {pool.values}.")
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
    """Refuse to allocate more pinned memory than there can be.

    Nothing is set aside: what passes may still fail, if others take memory meanwhile
    or the runtime's pool is fragmented. Then `host_memory_error` explains it.

    Args:
        num_bytes: What is to be allocated.
        platform: The devices' platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
        environ: The environment that the backend was started in.
        proc_root: Where procfs is mounted.
        cgroup_root: Where the cgroup file systems are mounted.

    Raises:
        MemoryError: That is more than one of the limits, which are named, the
            tightest first.
        ValueError: A variable has a value that the runtime does not understand.
    """
    pool = pinned_pool(platform, environ)
    limits = []
    if pool is not None:
        limits.append(HostLimit(pool.num_bytes, pool.source, pool.remedy(num_bytes)))
    # A pool that the runtime took as it started is in use already: counted again, it
    # would seem to be missing.
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
    """Explain a failure to allocate host memory, and what to do about it.

    Args:
        num_bytes: The size of what was to be allocated.
        platform: The devices' platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
    """
    pool = _POOLS.get(platform)
    return MemoryError(
        f"Could not allocate {num_bytes} bytes ({gib(num_bytes)}) of pinned_host "
        "memory for host blocks: lower num_host_blocks or host_bytes"
        + (f", or raise {pool.variable} before jax is imported." if pool else ".")
    )


def _machine_limit(proc_root: Path) -> HostLimit | None:
    remedy = "free some memory"
    # Without it, all memory, not the free part: that would leave out what the system
    # can take back from its caches, and refuse what does fit.
    num_bytes = _meminfo(proc_root, "MemAvailable")
    if num_bytes is None:
        num_bytes = total_host_bytes(proc_root)
    return None if num_bytes is None else HostLimit(num_bytes, MACHINE, remedy)


def _meminfo(proc_root: Path, name: str) -> int | None:
    """Read a figure of the kernel's about memory, in bytes."""
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
        # In a container the path can be the host's. Then its folders are not there,
        # and the mount itself is the container's own cgroup.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            limit = _one_cgroup(mount.joinpath(*parts[:depth]), files)
            if limit:
                yield limit


def _one_cgroup(folder: Path, files: _Files) -> HostLimit | None:
    limit = _read_int(folder / files.limit)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    # Pages of files count as usage, but the kernel gives them up before it refuses.
    # A server that has just read its weights would otherwise seem to be full.
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
    """Read a file of the kernel; nothing if it cannot be read."""
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
    raise ValueError(f"{_GPU_PREALLOCATE}={text!r} must be true or false.")
