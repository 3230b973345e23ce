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


def test_without_cgroups_the_machine_sets_the_limit(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    assert machine.available().num_bytes == 3 * GIB
    assert machine.available().source == "the machine"
    (machine.proc / "self/cgroup").unlink()
    assert machine.available().num_bytes == 3 * GIB


def test_a_tighter_parent_cgroup_sets_the_limit(tmp_path):
    machine = Machine(tmp_path, cgroup="0::/pod/server\n")
    machine.v2("pod/server", 16 * GIB, 2 * GIB)
    machine.v2("pod", 8 * GIB, 3 * GIB)
    found = machine.available()
    assert found.num_bytes == 5 * GIB
    assert str(machine.cgroup / "pod") + " (memory.max is 8.00 GiB)" in found.source


def test_a_cgroup_tighter_than_its_parent_sets_the_limit(tmp_path):
    machine = Machine(tmp_path, cgroup="0::/pod/server\n")
    machine.v2("pod/server", 4 * GIB, 1 * GIB)
    machine.v2("pod", 32 * GIB, 20 * GIB)
    assert machine.available().num_bytes == 3 * GIB


def test_a_cgroup_without_a_limit_is_ignored(tmp_path):
    machine = Machine(tmp_path, 3 * GIB, cgroup="0::/pod/server\n")
    machine.v2("pod/server", "max", 2 * GIB)
    machine.v2("pod", "max", 2 * GIB)
    assert machine.available().source == "the machine"


def test_a_cgroup_above_the_machines_memory_is_ignored(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    machine.v2("", 32 * GIB, 2 * GIB)
    assert machine.available().source == "the machine"


def test_file_pages_do_not_count_as_usage(tmp_path):
    machine = Machine(tmp_path)
    stat = f"anon {GIB}\nfile {9 * GIB}\nactive_file {2 * GIB}\ninactive_file {5 * GIB}"
    machine.v2("", 10 * GIB, 10 * GIB, stat)
    assert machine.available().num_bytes == 7 * GIB


def test_more_file_pages_than_usage_add_nothing(tmp_path):
    machine = Machine(tmp_path)
    machine.v2("", 10 * GIB, 1 * GIB, f"inactive_file {5 * GIB}\n")
    assert machine.available().num_bytes == 10 * GIB


def test_a_cgroup_over_its_limit_has_nothing_left(tmp_path):
    machine = Machine(tmp_path)
    machine.v2("", 1 * GIB, 2 * GIB)
    assert machine.available().num_bytes == 0


V1 = "11:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/x\n"


def test_cgroups_of_version_1_set_the_limit(tmp_path):
    machine = Machine(tmp_path, cgroup=V1)
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\n"
    machine.v1("docker/abc", 8 * GIB, 4 * GIB, stat)
    machine.v1("docker", 2**63 - 4096, 4 * GIB)
    found = machine.available()
    assert found.num_bytes == 5 * GIB
    assert "docker/abc (memory.limit_in_bytes is 8.00 GiB)" in found.source


def test_cgroups_of_version_1_without_a_limit_are_ignored(tmp_path):
    machine = Machine(tmp_path, 3 * GIB, cgroup=V1)
    machine.v1("docker/abc", 2**63 - 4096, 4 * GIB)
    assert machine.available().source == "the machine"


@pytest.mark.parametrize("path", ["/docker/abc", "/../../kubepods/pod7"])
def test_a_container_reads_its_own_cgroup(tmp_path, path):
    machine = Machine(tmp_path, cgroup=f"4:memory:{path}\n")
    machine.v1("", 8 * GIB, 6 * GIB)
    assert machine.available().num_bytes == 2 * GIB


@pytest.mark.parametrize("text", ["", "0", "::", "nonsense\n0:\n", "\xff\x00:a\n"])
def test_malformed_cgroup_membership_is_ignored(tmp_path, text):
    machine = Machine(tmp_path, 3 * GIB, cgroup=text)
    assert machine.available().num_bytes == 3 * GIB


@pytest.mark.parametrize("limit", ["", "lots", "-1", "1e9", "9" * 99, "٣"])
def test_a_malformed_limit_is_ignored(tmp_path, limit):
    machine = Machine(tmp_path, 3 * GIB)
    machine.v2("", limit, 0)
    assert machine.available().source == "the machine"


def test_a_malformed_usage_counts_as_none(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    machine.v2("", 2 * GIB, "much", "inactive_file\nx y z\ninactive_file many\n")
    assert machine.available().num_bytes == 2 * GIB


def test_unreadable_files_are_ignored(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    (machine.cgroup / "memory.max").mkdir(parents=True)  # cannot be read, even by root
    assert machine.available().num_bytes == 3 * GIB
    (machine.proc / "self/cgroup").write_bytes(b"\xff\xfe")
    assert machine.available().num_bytes == 3 * GIB


def test_without_meminfo_sysconf_gives_the_memory(tmp_path, monkeypatch):
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    machine = Machine(tmp_path, available=None)
    assert machine.available().num_bytes == 4 * GIB


def test_an_unknown_memory_size_sets_no_limit(tmp_path, monkeypatch):
    def sysconf(name):
        raise ValueError("unrecognized configuration name")

    machine = Machine(tmp_path, available=None)
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert machine.available() is None
    machine.check(1 << 50)
    monkeypatch.setattr(os, "sysconf", lambda name: -1)
    machine.check(1 << 50)
    monkeypatch.delattr(os, "sysconf")
    machine.check(1 << 50)


def test_this_machine_has_some_memory():
    if sys.platform == "linux":
        assert limits.available_host_bytes().num_bytes > 0
    limits.check_host_bytes(1, "cpu")
    with pytest.raises(MemoryError, match=r"1048576\.00 GiB of pinned host memory"):
        limits.check_host_bytes(1 << 50, "cpu")


def test_more_than_the_machine_has_is_refused(tmp_path):
    machine = Machine(tmp_path, 3 * GIB)
    machine.check(3 * GIB)
    message = r"^3\.50 GiB .* but the machine has only 3\.00 GiB: free some memory, or "
    with pytest.raises(MemoryError, match=message + "ask for fewer host blocks"):
        machine.check(7 * GIB // 2)


def test_more_than_the_cgroup_allows_is_refused(tmp_path):
    machine = Machine(tmp_path)
    machine.v2("", 8 * GIB, 5 * GIB)
    machine.check(3 * GIB)
    message = r"memory.max is 8\.00 GiB\) has only 3\.00 GiB: raise the memory limit"
    with pytest.raises(MemoryError, match=message):
        machine.check(3 * GIB + 1)


def test_all_limits_are_named_the_tightest_first(tmp_path):
    machine = Machine(tmp_path, 70 * GIB)
    machine.v2("", 66 * GIB, 0)
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


@pytest.mark.parametrize(
    ("platform", "environ", "num_gib", "message"),
    [
        ("gpu", {}, 64, f"{LIMIT} is not set, which means 64.* set {LIMIT} to 65 or"),
        ("gpu", {LIMIT: " 200 "}, 200, f"{LIMIT} is 200.* set {LIMIT} to 201 or"),
        ("gpu", {LIMIT: "+2"}, 2, f"{LIMIT} is 2"),
        ("gpu", {PREALLOCATE: "0"}, 64, f"{LIMIT} is not set, which means 64"),
        ("gpu", {PREALLOCATE: "True"}, 16, f"{LIMIT} is not set, which means 16"),
        ("gpu", {PREALLOCATE: "1", LIMIT: "8"}, 8, f"{LIMIT} is 8"),
        ("tpu", {}, 4, f"{PREMAPPED} is not set, which means 4294967296"),
        ("tpu", {PREMAPPED: str(GIB)}, 1, f"set {PREMAPPED} to 1073745920 or more"),
    ],
)
def test_the_runtimes_pool_has_its_configured_size(
    tmp_path, platform, environ, num_gib, message
):
    machine = Machine(tmp_path, 1 << 50)
    machine.check(num_gib * GIB, platform, environ)
    with pytest.raises(MemoryError, match=message):
        machine.check(num_gib * GIB + 1, platform, environ)


def test_the_cpu_has_no_pool(tmp_path):
    Machine(tmp_path, 1 << 50).check(1 << 49, "cpu", {LIMIT: "x", PREMAPPED: "x"})


@pytest.mark.parametrize(
    ("platform", "environ"), [("gpu", {PREALLOCATE: "true"}), ("tpu", {})]
)
def test_a_preallocated_pool_is_not_counted_twice(tmp_path, platform, environ):
    machine = Machine(tmp_path, 1 * GIB)
    machine.v2("", 20 * GIB, 20 * GIB)
    machine.check(4 * GIB, platform, environ)


@pytest.mark.parametrize(
    ("platform", "environ", "message"),
    [
        ("gpu", {LIMIT: "64GiB"}, f"{LIMIT}='64GiB' must be a whole number of GiB"),
        ("gpu", {LIMIT: ""}, f"{LIMIT}='' must be a whole number of GiB from 1"),
        ("gpu", {LIMIT: "0"}, f"{LIMIT}='0' must be"),
        ("gpu", {LIMIT: "-4"}, f"{LIMIT}='-4' must be"),
        ("gpu", {LIMIT: "9" * 99}, "must be a whole number"),
        ("gpu", {PREALLOCATE: "yes"}, f"{PREALLOCATE}='yes' must be true or false"),
        ("tpu", {PREMAPPED: "4GiB"}, f"{PREMAPPED}='4GiB' must be a number of bytes"),
        ("tpu", {PREMAPPED: "5000"}, f"{PREMAPPED}='5000' .* a multiple of 4096"),
        ("tpu", {PREMAPPED: "0"}, f"{PREMAPPED}='0' must be a number of bytes"),
    ],
)
def test_a_malformed_variable_is_refused(tmp_path, platform, environ, message):
    with pytest.raises(ValueError, match=message):
        Machine(tmp_path).check(1, platform, environ)


@pytest.mark.parametrize(
    ("platform", "remedy"),
    [
        (
            "gpu",
            f"num_host_blocks or host_bytes, or raise {LIMIT} before jax is imported.",
        ),
        ("tpu", f"or host_bytes, or raise {PREMAPPED} before jax is imported."),
        ("cpu", "lower num_host_blocks or host_bytes."),
    ],
)
def test_a_failed_allocation_says_what_to_change(platform, remedy):
    error = limits.host_memory_error(3 << 30, platform)
    assert isinstance(error, MemoryError)
    assert "3221225472 bytes (3.00 GiB) of pinned_host memory for host" in str(error)
    assert str(error).endswith(remedy)


def test_the_fullest_device_tells_what_is_left():
    def device(**stats):
        return SimpleNamespace(memory_stats=lambda: stats or None)

    full, empty = device(bytes_limit=9, bytes_in_use=7), device(bytes_limit=9)
    assert limits.device_bytes_left([empty, full]) == 2
    assert limits.device_bytes_left([device(bytes_limit=9, bytes_in_use=10)]) == 0
    assert limits.device_bytes_left([device()]) is None
