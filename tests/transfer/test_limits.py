"""Limits on host memory, with fake machines, cgroups and environments."""

import os
import sys
from types import SimpleNamespace

import pytest

from jaxkv.transfer import limits

GIB = 1 << 30


class Machine:
    """A fake /proc and /sys/fs/cgroup; without `available` it has no meminfo."""

    def __init__(self, folder, available=64 * GIB, cgroup="0::/\n"):
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.write(self.proc / "self/cgroup", cgroup)
        if available is not None:
            self.write(
                self.proc / "meminfo",
                f"MemTotal:       99999999 kB\nMemFree:         1024 kB\n"
                f"MemAvailable:   {available // 1024} kB\nBuffers:  7 kB\n",
            )

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))

    def v2(self, path, limit, usage, stat=""):
        self.write(self.cgroup / path / "memory.max", f"{limit}\n")
        self.write(self.cgroup / path / "memory.current", f"{usage}\n")
        self.write(self.cgroup / path / "memory.stat", stat)

    def v1(self, path, limit, usage, stat=""):
        folder = self.cgroup / "memory" / path
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{usage}\n")
        self.write(folder / "memory.stat", stat)

    def available(self):
        return limits.available_host_bytes(self.proc, self.cgroup)

    def check(self, num_bytes, platform="cpu", environ=None):
        limits.check_host_bytes(
            num_bytes,
            platform,
            environ or {},
            proc_root=self.proc,
            cgroup_root=self.cgroup,
        )


V1 = "11:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/x\n"
V2 = "0::/pod/server\n"
PAGES = f"anon {GIB}\nfile {9 * GIB}\nactive_file {2 * GIB}\ninactive_file {5 * GIB}"
MACHINE = "the machine"

# The membership, the limits of cgroups, and what is available in GiB and why. The
# machine has 20 GiB.
CGROUPS = {
    "no cgroups": ("0::/\n", {}, 20, MACHINE),
    "a tighter parent": (
        V2,
        {"pod/server": (16 * GIB, 2 * GIB), "pod": (8 * GIB, 3 * GIB)},
        5,
        "cgroup/pod (memory.max is 8.00 GiB)",
    ),
    "a looser parent": (
        V2,
        {"pod/server": (4 * GIB, GIB), "pod": (32 * GIB, 20 * GIB)},
        3,
        "pod/server",
    ),
    "no limit": (
        V2,
        {"pod/server": ("max", 2 * GIB), "pod": ("max", 2 * GIB)},
        20,
        MACHINE,
    ),
    "above the machine": ("0::/\n", {"": (32 * GIB, 2 * GIB)}, 20, MACHINE),
    "file pages": ("0::/\n", {"": (10 * GIB, 10 * GIB, PAGES)}, 7, "memory.max"),
    "more file pages than usage": ("0::/\n", {"": (10 * GIB, GIB, PAGES)}, 10, "max"),
    "over its limit": ("0::/\n", {"": (GIB, 2 * GIB)}, 0, "memory.max"),
    "a malformed usage": (
        "0::/\n",
        {"": (2 * GIB, "much", "inactive_file\nx y z\ninactive_file many\n")},
        2,
        "memory.max",
    ),
    "version 1": (
        V1,
        {
            "docker/abc": (8 * GIB, 4 * GIB, f"total_inactive_file {GIB}\n"),
            "docker": (2**63 - 4096, 4 * GIB),
        },
        5,
        "docker/abc (memory.limit_in_bytes is 8.00 GiB)",
    ),
    "version 1, no limit": (V1, {"docker/abc": (2**63 - 4096, GIB)}, 20, MACHINE),
    # A container sees its own cgroup at the root.
    "a container": ("4:memory:/docker/abc\n", {"": (8 * GIB, 6 * GIB)}, 2, "memory"),
    "kubepods": ("4:memory:/../../pods/7\n", {"": (8 * GIB, 6 * GIB)}, 2, "memory"),
    **{
        f"a membership of {text!r}": (text, {}, 20, MACHINE)
        for text in ("", "0", "::", "nonsense\n0:\n", "\xff\x00:a\n")
    },
    **{
        f"a limit of {limit!r}": ("0::/\n", {"": (limit, 0)}, 20, MACHINE)
        for limit in ("", "lots", "-1", "1e9", "9" * 99, "٣")
    },
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_tightest_of_machine_and_cgroups_sets_the_limit(tmp_path, case):
    membership, cgroups, num_gib, source = CGROUPS[case]
    machine = Machine(tmp_path, 20 * GIB, membership)
    for path, limit in cgroups.items():
        (machine.v1 if ":memory:" in membership else machine.v2)(path, *limit)
    tightest = machine.available()
    assert tightest.num_bytes == num_gib * GIB
    assert source in tightest.source


def test_unreadable_files_are_ignored(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    (machine.cgroup / "memory.max").mkdir(parents=True)  # cannot be read, even by root
    assert machine.available().num_bytes == 3 * GIB
    (machine.proc / "self/cgroup").write_bytes(b"\xff\xfe")
    assert machine.available().num_bytes == 3 * GIB
    (machine.proc / "self/cgroup").unlink()
    assert machine.available().num_bytes == 3 * GIB


def test_without_meminfo_sysconf_gives_the_memory_if_it_knows_it(tmp_path, monkeypatch):
    machine = Machine(tmp_path, available=None)
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert machine.available().num_bytes == 4 * GIB

    def refuse(name):
        raise ValueError("unrecognized configuration name")

    for sysconf in (refuse, lambda name: -1, None):
        monkeypatch.setattr(os, "sysconf", sysconf)
        if sysconf is None:
            monkeypatch.delattr(os, "sysconf")
        assert machine.available() is None
        machine.check(1 << 50)


def test_this_machine_has_some_memory():
    if sys.platform == "linux":
        assert limits.available_host_bytes().num_bytes > 0
    limits.check_host_bytes(1, "cpu")
    with pytest.raises(MemoryError, match=r"1048576\.00 GiB of pinned host memory"):
        limits.check_host_bytes(1 << 50, "cpu")


def test_more_than_the_limits_is_refused_and_the_tightest_is_named_first(tmp_path):
    machine = Machine(tmp_path, 70 * GIB)
    machine.check(70 * GIB)
    message = (
        r"^70\.50 GiB .* but the machine has only 70\.00 GiB: free some memory, or "
    )
    with pytest.raises(MemoryError, match=message + "ask for fewer host blocks"):
        machine.check(141 * GIB // 2)
    machine.v2("", 71 * GIB, 5 * GIB)
    machine.check(66 * GIB)
    message = r"memory.max is 71\.00 GiB\) has only 66\.00 GiB: raise the memory limit"
    with pytest.raises(MemoryError, match=message):
        machine.check(66 * GIB + 1)
    message = "XLA's pool .* has only 64.* the cgroup .* has only 66.* the machine has"
    with pytest.raises(MemoryError, match=message):
        machine.check(80 * GIB, "gpu")
    with pytest.raises(MemoryError, match="XLA's pool") as caught:
        machine.check(65 * GIB, "gpu")
    assert "machine" not in str(caught.value)


LIMIT, PREALLOCATE = (
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE",
)
PREMAPPED = "TPU_PREMAPPED_BUFFER_SIZE"


def test_the_pool_of_the_runtime_has_its_configured_size(tmp_path):
    machine = Machine(tmp_path, 1 << 50)
    for platform, environ, num_gib, message in (
        ("gpu", {}, 64, f"{LIMIT} is not set, which means 64.* set {LIMIT} to 65 or"),
        ("gpu", {LIMIT: " 200 "}, 200, f"{LIMIT} is 200.* set {LIMIT} to 201 or"),
        ("gpu", {LIMIT: "+2"}, 2, f"{LIMIT} is 2"),
        ("gpu", {PREALLOCATE: "0"}, 64, f"{LIMIT} is not set, which means 64"),
        ("gpu", {PREALLOCATE: "True"}, 16, f"{LIMIT} is not set, which means 16"),
        ("gpu", {PREALLOCATE: "1", LIMIT: "8"}, 8, f"{LIMIT} is 8"),
        ("tpu", {}, 4, f"{PREMAPPED} is not set, which means 4294967296"),
        ("tpu", {PREMAPPED: str(GIB)}, 1, f"set {PREMAPPED} to 1073745920 or more"),
    ):
        machine.check(num_gib * GIB, platform, environ)
        with pytest.raises(MemoryError, match=message):
            machine.check(num_gib * GIB + 1, platform, environ)
    machine.check(1 << 49, "cpu", {LIMIT: "x", PREMAPPED: "x"})  # It has none.


def test_a_preallocated_pool_is_not_counted_twice(tmp_path):
    machine = Machine(tmp_path, 1 * GIB)
    machine.v2("", 20 * GIB, 20 * GIB)
    machine.check(4 * GIB, "gpu", {PREALLOCATE: "true"})
    machine.check(4 * GIB, "tpu")


def test_a_malformed_variable_is_refused(tmp_path):
    machine = Machine(tmp_path)
    for platform, name, value, message in (
        ("gpu", LIMIT, "64GiB", "must be a whole number of GiB"),
        ("gpu", LIMIT, "", "must be a whole number of GiB from 1"),
        ("gpu", LIMIT, "0", "must be a whole number"),
        ("gpu", LIMIT, "-4", "must be a whole number"),
        ("gpu", LIMIT, "9" * 99, "must be a whole number"),
        ("gpu", PREALLOCATE, "yes", "must be true or false"),
        ("tpu", PREMAPPED, "4GiB", "must be a number of bytes"),
        ("tpu", PREMAPPED, "5000", ".* a multiple of 4096"),
        ("tpu", PREMAPPED, "0", "must be a number of bytes"),
    ):
        with pytest.raises(ValueError, match=f"{name}='{value[:9]}.*' {message}"):
            machine.check(1, platform, {name: value})


def test_a_failed_allocation_says_what_to_change():
    for platform, remedy in {
        "gpu": f"or host_bytes, or raise {LIMIT} before jax is imported.",
        "tpu": f"or host_bytes, or raise {PREMAPPED} before jax is imported.",
        "cpu": "lower num_host_blocks or host_bytes.",
    }.items():
        error = limits.host_memory_error(3 << 30, platform)
        assert isinstance(error, MemoryError)
        assert "3221225472 bytes (3.00 GiB) of pinned_host memory for" in str(error)
        assert str(error).endswith(remedy)


def test_the_fullest_device_tells_what_is_left():
    def device(**stats):
        return SimpleNamespace(memory_stats=lambda: stats or None)

    full, empty = device(bytes_limit=9, bytes_in_use=7), device(bytes_limit=9)
    assert limits.device_bytes_left([empty, full]) == 2
    assert limits.device_bytes_left([device(bytes_limit=9, bytes_in_use=10)]) == 0
    assert limits.device_bytes_left([device()]) is None
