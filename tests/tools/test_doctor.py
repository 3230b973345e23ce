"""`jaxkv doctor`: the diagnosis as text, as JSON and as the exit code."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import re
import socket
import sys
import threading
import types
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest
import redis

from jaxkv import OffloadConfig
from jaxkv._util.extras import pip_install
from jaxkv.tools import main as cli
from jaxkv.tools.bench.transfer.records import BytesDifferError
from jaxkv.tools.doctor import facts as doctor_facts
from jaxkv.tools.doctor.facts import Backend, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend
from jaxkv.tools.doctor.report import fact_lines
from jaxkv.tools.doctor.store import Store, look_at
from jaxkv.transfer import limits
from jaxkv.transfer.storage import LocalStore, MemoryStore
from tests.rigs import children
from tests.rigs.command_line import run_python
from tests.rigs.servers import free_port, redis_server
from tests.transfer.test_limits import LIMIT, PREALLOCATE, PREMAPPED, V1, Machine

GIB = 1 << 30

pytestmark = pytest.mark.usefixtures("plain_output")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("JAXKV_") and not name.startswith("JAXKV_TEST_"):
            monkeypatch.delenv(name)


def facts_of(machine, platform="cpu", environ=None, **changes):
    """Return the facts of a fake machine with devices of a platform."""
    environ = environ or {}
    facts = gather_facts(environ, proc_root=machine.proc, cgroup_root=machine.cgroup)
    backend = Backend(platform, "x", 1, "cpu", ("device", "pinned_host"), 80 * GIB)
    pool = limits.pinned_pool(platform, environ)
    return dataclasses.replace(facts, backend=backend, pool=pool, **changes)


def wrong(facts, **question):
    return [f for f in judge(facts, Question(**question)) if f.level == "wrong"]


def notes(facts, **question):
    return [f for f in judge(facts, Question(**question)) if f.level == "note"]


def size(facts, **question):
    return recommend(facts, Question(**question)).num_bytes


def test_a_machine_without_faults_has_no_findings(tmp_path):
    facts = facts_of(Machine(tmp_path, 64 * GIB))
    assert judge(facts, Question()) == []
    assert size(facts) == 56 * GIB
    assert judge(facts, Question(host_bytes=56 * GIB, needed=["events"])) == []


def test_a_host_size_above_the_limits_is_wrong(tmp_path):
    (fault,) = wrong(facts_of(Machine(tmp_path, 64 * GIB)), host_bytes=65 * GIB)
    assert fault.what == (
        "65 GiB of host memory (--host-bytes) do not fit: the machine has only "
        "64.00 GiB left"
    )
    assert fault.advice == "free some memory, or ask for 56 GiB: JAXKV_HOST_BYTES=56GiB"


def test_a_size_within_the_reserve_is_a_note(tmp_path):
    facts = facts_of(Machine(tmp_path, 64 * GIB))
    (note,) = judge(facts, Question(host_bytes=60 * GIB, source="JAXKV_HOST_BYTES"))
    assert note.level == "note"
    assert note.what.startswith(
        "60 GiB of host memory (JAXKV_HOST_BYTES) fit, but 56 GiB would be safer: the "
        "machine has 64.00 GiB, of which 8.00 GiB stay for the rest"
    )


def test_a_host_tier_no_larger_than_the_device_pool_is_wrong(tmp_path):
    facts = facts_of(Machine(tmp_path, 64 * GIB), "gpu")
    (fault,) = wrong(facts, host_bytes=20 * GIB, device_pool_bytes=20 * GIB)
    assert "20 GiB of host memory (--host-bytes) are no more than the 20.00" in (
        fault.what
    )
    assert fault.advice == "ask for more than 20.00 GiB"
    assert wrong(facts, host_bytes=21 * GIB, device_pool_bytes=20 * GIB) == []
    assert wrong(facts, device_pool_bytes=50 * GIB) == []
    (fault,) = wrong(facts, device_pool_bytes=60 * GIB)
    assert fault.what.startswith("the recommended 56 GiB of host memory are no more")


def test_on_cpu_the_device_pool_is_subtracted(tmp_path):
    facts = facts_of(Machine(tmp_path, 64 * GIB))
    assert size(facts, device_pool_bytes=16 * GIB) == 42 * GIB
    question = {"device_pool_bytes": 16 * GIB}
    assert wrong(facts, host_bytes=48 * GIB, **question) == []
    (fault,) = wrong(facts, host_bytes=49 * GIB, **question)
    assert "the machine, less the device pool, which is in the same memory," in (
        fault.what
    )
    on_gpu = facts_of(Machine(tmp_path, 64 * GIB), "gpu")
    assert size(on_gpu, device_pool_bytes=16 * GIB) == 56 * GIB


def test_the_pinned_pool_of_a_gpu_limits_the_size(tmp_path):
    facts = facts_of(Machine(tmp_path, 512 * GIB), "gpu")
    assert size(facts) == 56 * GIB
    (note,) = judge(facts, Question())
    assert "XLA's pool of pinned memory" in note.what
    assert note.what.endswith("the machine has room for 448 GiB")
    assert note.advice == (
        f"for a larger host tier, set {LIMIT} to 448 or more before jax is imported"
    )
    (fault,) = wrong(facts, host_bytes=100 * GIB)
    assert fault.advice.startswith(f"set {LIMIT} to 100 or more before jax is impor")
    assert fault.advice.endswith("or ask for 56 GiB: JAXKV_HOST_BYTES=56GiB")
    raised = facts_of(Machine(tmp_path, 512 * GIB), "gpu", {LIMIT: "512"})
    assert judge(raised, Question(host_bytes=100 * GIB)) == []


def test_only_a_preallocated_pool_limits_the_size(tmp_path):
    machine = Machine(tmp_path, 1 * GIB)
    facts = facts_of(machine, "tpu")
    assert size(facts) == 3584 << 20
    assert wrong(facts, host_bytes=4 * GIB) == []
    (fault,) = wrong(facts, host_bytes=5 * GIB)
    assert fault.advice.startswith(f"set {PREMAPPED} to {5 * GIB} or more before jax")
    facts = facts_of(Machine(tmp_path, 64 * GIB), "gpu", {PREALLOCATE: "1"})
    assert size(facts) == 14 * GIB
    (note,) = notes(facts)
    assert note.what.endswith("the machine has room for 72 GiB")


def test_a_tighter_cgroup_is_a_note_and_sets_the_size(tmp_path):
    for version, path in ((1, V1), (2, "0::/docker/abc\n")):
        machine = Machine(tmp_path / str(version), 64 * GIB, cgroup=path)
        limit = machine.v1 if version == 1 else machine.v2
        limit("docker/abc", 16 * GIB, 2 * GIB)
        facts = facts_of(machine)
        assert size(facts) == 12 * GIB
        assert wrong(facts) == []
        (note,) = notes(facts)
        assert re.fullmatch(
            r"the cgroup .*docker/abc \(memory\S+ is 16\.00 GiB\) has 14\.00 GiB left, "
            r"which counts: the machine has 64\.00 GiB",
            note.what,
        )
        (fault,) = wrong(facts, host_bytes=20 * GIB)
        assert "do not fit: the cgroup" in fault.what
        assert "has only 14.00 GiB left" in fault.what
        assert fault.advice == (
            "raise the memory limit of the container or service, or ask for 12 GiB: "
            "JAXKV_HOST_BYTES=12GiB"
        )
    # A limit above the machine's memory is not mentioned.
    machine = Machine(tmp_path / "large", 16 * GIB)
    machine.v2("", 32 * GIB, 1 * GIB)
    assert judge(facts_of(machine), Question()) == []


def test_the_reserve_is_an_eighth_and_at_least_2_gib_or_half(tmp_path):
    for mib, best_mib in (
        *((64 << 10, 56 << 10), (20 << 10, 17 << 10), (12 << 10, 10 << 10)),
        *((6 << 10, 4 << 10), (3 << 10, 1536), (100, 50)),
    ):
        facts = facts_of(Machine(tmp_path / str(mib), mib << 20))
        assert size(facts) == best_mib << 20, mib
    (fault,) = wrong(facts)
    assert fault.what.startswith("there is no room for a host tier: the machine has")
    assert fault.advice == "free some memory"
    # A size that is too small for a tier is not recommended.
    assert wrong(facts, host_bytes=GIB)[0].advice == "free some memory"


def test_a_size_fits_exactly_if_the_engine_accepts_it(tmp_path):
    rng = random.Random(0)
    for case in range(200):
        available = rng.randrange(1, 200) * GIB // 2
        machine = Machine(tmp_path / str(case), available, cgroup="0::/a/b\n")
        for path in ("a/b", "a", ""):
            if rng.random() < 0.4:
                limit = rng.randrange(1, 200) * GIB // 2
                machine.v2(path, limit, rng.randrange(limit))
        platform = rng.choice(["cpu", "gpu", "tpu"])
        environ = {}
        if rng.random() < 0.5:
            environ[LIMIT] = str(rng.randrange(1, 100))
            environ[PREMAPPED] = str(rng.randrange(1, 25) * GIB)
        if rng.random() < 0.5:
            environ[PREALLOCATE] = rng.choice(["true", "0"])
        facts = facts_of(machine, platform, environ)
        best = size(facts)
        assert not any("not fit" in f.what for f in wrong(facts, host_bytes=best))
        for num_bytes in (best, *(rng.randrange(1, 100 * GIB) for _ in range(4))):
            faults = wrong(facts, host_bytes=num_bytes) if num_bytes else []
            try:
                machine.check(num_bytes, platform, environ)
                fits = True
            except MemoryError:
                fits = False
            assert fits != any("do not fit" in fault.what for fault in faults), case


def test_jax_on_the_cpu_beside_a_gpu_is_wrong_unless_chosen(tmp_path):
    machine = Machine(tmp_path)
    machine.write(machine.proc / "driver/nvidia/version", "NVRM version: 1")
    (fault,) = wrong(facts_of(machine))
    assert fault.what == "jax runs on the CPU, though this machine has an NVIDIA driver"
    assert fault.advice.startswith(f"{pip_install('cuda12')}, or set JAX_PLATFORMS")
    chosen = facts_of(machine, environ={"JAX_PLATFORMS": "cpu"})
    assert wrong(chosen) == []
    (note,) = notes(chosen)
    assert note.what.endswith("not on the NVIDIA GPU, as JAX_PLATFORMS=cpu says")
    assert judge(facts_of(machine, "gpu"), Question(host_bytes=GIB)) == []


def test_decisions_that_run_on_the_device_are_a_note(tmp_path):
    facts = facts_of(Machine(tmp_path), "gpu", {"JAX_PLATFORMS": "cuda"})
    assert judge(facts, Question()) == []
    backend = dataclasses.replace(facts.backend, decides_on="gpu")
    (note,) = judge(dataclasses.replace(facts, backend=backend), Question())
    assert note.level == "note"
    assert note.what.startswith("JAX_PLATFORMS=cuda leaves out the CPU backend, so")
    assert note.advice == "set JAX_PLATFORMS=cuda,cpu"


def test_refusals_of_the_engine_are_wrong(tmp_path, monkeypatch):
    backend = jax.devices()[0].platform
    found = functools.partial(gather_facts, {}, proc_root=tmp_path)
    monkeypatch.setattr(doctor_facts.memory, "HOST_KIND", "pinned_host")
    monkeypatch.setattr(
        "jaxkv.transfer.memory.memory_kinds", lambda device: ("device",)
    )
    (fault,) = wrong(found())
    assert "has the memories ('device',), not 'pinned_host'" in fault.what
    monkeypatch.undo()
    with jax.disable_jit():
        (fault,) = wrong(found())
    assert fault.what.startswith("JAX_DISABLE_JIT is set, but transfers are compiled")
    assert found().mode == ("fused" if backend == "cpu" else "staged")


def test_invalid_variables_are_wrong(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    environ = {"JAXKV_HOST_BYTE": "8GiB", "JAXKV_MODE": "eagr"}
    facts = facts_of(machine, environ=environ)
    assert facts.config == OffloadConfig()
    assert [fault.what for fault in wrong(facts)] == [
        "unknown variable JAXKV_HOST_BYTE: did you mean JAXKV_HOST_BYTES?",
        "JAXKV_MODE='eagr' must be one of eager, lazy: did you mean eager?",
    ]
    # A size is judged next to them.
    environ = {"JAXKV_HOST_BYTES": "8GiB", "JAXKV_MODE": "eagr"}
    assert facts_of(machine, environ=environ).config.host_bytes == 8 * GIB
    environ = {"JAXKV_HOST_BYTES": "8GiB", "JAXKV_NUM_HOST_BLOCKS": "9"}
    facts = facts_of(machine, environ=environ)
    assert facts.config is None
    (fault,) = wrong(facts)
    assert "host_bytes=8589934592 and num_host_blocks=9 exclude one" in fault.what
    assert fault.what.endswith(
        "(JAXKV_HOST_BYTES, JAXKV_NUM_HOST_BLOCKS in the environment)"
    )
    backend = Backend("gpu", "x", 1, "cpu", (), None)
    monkeypatch.setattr(doctor_facts, "_backend_of", lambda devices: backend)
    facts = gather_facts({LIMIT: "64GB"}, proc_root=tmp_path, cgroup_root=tmp_path)
    (fault,) = wrong(facts)
    assert fault.what == f"{LIMIT}='64GB' must be a whole number of GiB from 1."


def test_a_missing_extra_is_wrong_only_if_it_is_needed(tmp_path):
    machine = Machine(tmp_path)
    missing = {"events": ("pyzmq",), "metrics": (), "demo": ("flax", "rich")}
    facts = facts_of(machine, missing=missing)
    assert judge(facts, Question(needed=["metrics"])) == []
    (fault,) = wrong(facts, needed=["events", "metrics"])
    assert fault.what == "the extra events is needed, and pyzmq not installed"
    assert fault.advice == pip_install("events")
    # Settings need extras, too.
    missing |= {"metrics": ("prometheus_client",)}
    for name, value, extra in (
        ("JAXKV_EVENTS_ENDPOINT", "tcp://127.0.0.1:5557", "events"),
        ("JAXKV_METRICS_PORT", "0", "metrics"),
    ):
        facts = facts_of(machine, environ={name: value}, missing=missing)
        (fault,) = wrong(facts)
        assert fault.advice == pip_install(extra)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A fake machine for the command."""
    made_up = Machine(tmp_path / "machine", 64 * GIB)
    roots = {"proc_root": made_up.proc, "cgroup_root": made_up.cgroup}
    monkeypatch.setattr(
        "jaxkv.tools.doctor.command.gather_facts",
        functools.partial(gather_facts, **roots),
    )
    return made_up


def test_the_command_prints_in_columns_and_writes_json(machine, capsys, tmp_path):
    figures = tmp_path / "a.json"
    line = f"doctor --host-bytes 70GiB --need metrics --no-probe --json {figures}"
    assert cli.main(line.split()) == 1
    out, err = capsys.readouterr()
    assert err == ""
    rows = dict(
        (line[:13].strip(), line[13:]) for line in out.split("\n\n")[0].splitlines()
    )
    assert list(rows) == [
        *("Machine", "Memory", "Cgroup", "Software", "Device", "Memory kinds"),
        *("Pinned pool", "Mode", "Extras", "Host tier"),
    ]
    assert rows["Memory"] == "95.37 GiB, 64.00 GiB available"
    assert rows["Cgroup"] == "no limit"
    assert rows["Software"].startswith(f"Python {sys.version.split()[0]}, jaxkv 0.")
    assert rows["Extras"].startswith("events, metrics, demo, storage, redis")
    assert rows["Host tier"].startswith("56 GiB recommended: the machine has 64.00 GiB")
    assert out.split("\n\n", 1)[1] == (
        "WRONG  70 GiB of host memory (--host-bytes) do not fit: the machine has only "
        "64.00 GiB left\n\n"
        "What to do\n"
        "  1. free some memory, or ask for 56 GiB: JAXKV_HOST_BYTES=56GiB\n\n"
        "1 thing is wrong.\n"
    )
    written = json.loads(figures.read_text())
    assert written["ok"] is False
    assert written["recommended_host_bytes"] == 56 * GIB
    assert [finding["level"] for finding in written["findings"]] == ["wrong"]
    assert written["facts"]["limits"][0]["num_bytes"] == 64 * GIB
    assert written["facts"]["config"]["host_bytes"] is None
    assert written["facts"]["bandwidth"] is None


def test_a_size_from_the_environment_is_judged(machine, capsys, monkeypatch):
    monkeypatch.setenv("JAXKV_HOST_BYTES", "70GiB")
    assert cli.main(["doctor", "--no-probe"]) == 1
    out = capsys.readouterr().out
    assert "Settings     JAXKV_HOST_BYTES=70GiB\n" in out
    assert "WRONG  70 GiB of host memory (JAXKV_HOST_BYTES) do not fit" in out
    # The command line takes precedence.
    assert cli.main(["doctor", "--no-probe", "--host-bytes", "8GiB"]) == 0
    assert capsys.readouterr().out.endswith("\n\nAll is well.\n")


def test_a_failing_probe_is_wrong(machine, capsys, monkeypatch):
    for error, code, message in (
        (BytesDifferError("3 blocks differ"), 1, "WRONG  blocks do not move: 3 bl"),
        (RuntimeError("no stream"), 1, "WRONG  blocks do not move: no stream"),
        (MemoryError("32 MiB"), 0, "note   transfers were not measured: 32 MiB"),
    ):

        def measure(mode, on_progress, error=error):
            raise error

        monkeypatch.setattr("jaxkv.tools.doctor.command.measure_bandwidth", measure)
        assert cli.main(["doctor"]) == code
        assert message in capsys.readouterr().out


def test_the_doctor_names_missing_extras_and_runs_without_rich(
    machine, capsys, monkeypatch, tmp_path
):
    for name in ("zmq", "rich", "mooncake"):
        monkeypatch.setitem(sys.modules, name, None)
    figures = tmp_path / "a.json"
    line = f"doctor --need events --json {figures}"
    assert cli.main(line.split()) == 1
    out, err = capsys.readouterr()
    assert (
        "Extras       metrics, storage, redis, events (pyzmq missing), demo (rich "
        "missing), mooncake (mooncake-transfer-engine-non-cuda missing)\n"
    ) in out
    assert "WRONG  the extra events is needed, and pyzmq not installed" in out
    assert f"  1. {pip_install('events')}" in out
    # The probe moves blocks, and shows progress without rich, too.
    for name in ("Store", "Load"):
        assert re.search(rf"^{name} +\d+\.\d+ / \d+\.\d+ GB/s; \S+ \d", out, re.M)
    bandwidth = json.loads(figures.read_text())["facts"]["bandwidth"]
    assert bandwidth["save"]["best_gb_per_s"] >= bandwidth["save"]["p50_gb_per_s"] > 0
    assert err.splitlines() == [
        "1 MiB blocks: filling host memory ...",
        "1 MiB blocks, 32 MiB ...",
    ]


def test_a_backend_that_does_not_start_is_wrong(monkeypatch, tmp_path):
    # A forked process has read the variable before it was set.
    text = "import jax\njax.config.update('jax_platforms', 'nonsense')\n"
    text += "from jaxkv.tools import main\nmain.main()"
    environ = os.environ | {"JAX_PLATFORMS": "nonsense"}
    done = children.run("-c", text, "doctor", env=environ)
    assert done.returncode == 1, done.stderr
    assert "Device       none: jax does not start" in done.stdout
    assert re.search(r"WRONG  jax does not start: .*nonsense", done.stdout)
    assert pip_install("cuda12") in done.stdout
    assert "Traceback" not in done.stderr

    def devices():
        raise AssertionError  # As jax 0.10.2 does if a plugin is missing.

    monkeypatch.setattr(jax, "devices", devices)
    facts = gather_facts({"JAX_PLATFORMS": "cuda"}, proc_root=tmp_path)
    assert [fault.what for fault in wrong(facts)] == [
        "jax does not start: it has no backend for JAX_PLATFORMS=cuda"
    ]


@contextlib.contextmanager
def real_cgroup(num_bytes):
    """Make a cgroup with a limit below this process's; skip without permission."""
    membership = Path("/proc/self/cgroup")
    if not membership.exists():
        pytest.skip("this system has no cgroups")
    lines = dict(
        (controllers, path)
        for _, controllers, path in (
            line.split(":", 2) for line in membership.read_text().splitlines()
        )
    )
    root, name, path = Path("/sys/fs/cgroup"), "memory.max", lines.get("", "/")
    if "memory" in lines:
        root, name, path = root / "memory", "memory.limit_in_bytes", lines["memory"]
    folder = root / path.strip("/") / f"jaxkv-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup may be made here ({error})")
    try:
        (folder / name).write_text(str(num_bytes))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"no cgroup may be limited here ({error})")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.long
def test_a_real_cgroup_limits_the_recommendation(tmp_path):
    figures = tmp_path / "a.json"
    words = ["doctor", "--no-probe", "--host-bytes", "2GiB", "--json", str(figures)]
    # In one process: the doctor, the size that it recommends, and one above the limit.
    make = (
        "import json, sys, os\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from jaxkv.tools import main as cli\n"
        "assert cli.main(sys.argv[3:]) == 1\n"
        "import jax.numpy as jnp\nfrom jaxkv import OffloadConfig\n"
        "best = json.load(open(sys.argv[2]))['recommended_host_bytes']\n"
        "pool = jnp.zeros((8, 1 << 18))\n"
        "OffloadConfig(host_bytes=best).make_engine(pool)\nprint('made')\n"
        "OffloadConfig(host_bytes='2GiB').make_engine(pool)"
    )
    with real_cgroup(1 * GIB) as folder:
        done = run_python(
            make, str(folder / "cgroup.procs"), str(figures), *words, text=True
        )
        said = "WRONG  2 GiB of host memory (--host-bytes) do not fit: the cgroup "
        assert f"{said}{folder} (" in done.stdout
        assert "raise the memory limit of the container or service" in done.stdout
        assert done.stdout.endswith("made\n"), done.stderr
        assert f"but the cgroup {folder} (" in done.stderr
    assert json.loads(figures.read_text())["recommended_host_bytes"] >= 64 << 20
    assert json.loads(figures.read_text())["recommended_host_bytes"] <= GIB // 2


STORE = Store("kv", 4 * GIB, is_sealed=False)


def look(tmp_path, url, store=STORE, missing=None, **options):
    """Return what the doctor finds of a store, on a machine without other faults."""
    view = look_at(str(url), store, **options)
    facts = facts_of(Machine(tmp_path / "machine", 64 * GIB), store=view)
    facts = dataclasses.replace(facts, missing=dict(facts.missing) | (missing or {}))
    return judge(facts, Question())


def test_a_folder_for_blocks_is_tried_and_nothing_stays_there(tmp_path):
    assert look(tmp_path, tmp_path / "a/b/c") == []
    assert look(tmp_path, f"file://{tmp_path}/a/b?mode=660") == []
    assert not (tmp_path / "a").exists()
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    (there / "file").touch()
    assert look(tmp_path, there) == []
    assert [path.name for path in there.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_or_written_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in ("file", "file/kv"):
        (fault,) = look(tmp_path, tmp_path / place)
        assert fault.level == "wrong"
        assert fault.what.startswith("the store kv (--storage) cannot be used: ")
        assert "name a folder that can be made and read" in fault.what

    def refuse(self, path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    # The user that runs tests may be one who may write everywhere.
    monkeypatch.setattr(LocalStore, "_create", refuse)
    (fault,) = look(tmp_path, tmp_path / "kv")
    assert "cannot be used: PermissionError" in fault.what
    assert fault.advice.startswith("let the user of the server read and write there")
    assert not (tmp_path / "kv").exists()


def test_a_folder_where_others_could_plant_blocks_is_told(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    secret = "or set JAXKV_STORAGE_SECRET"
    chmod, another = (
        f"chmod 755 {folder}, {secret}",
        f"name a folder in {folder}, {secret}",
    )
    for mode, query, level, advice in (
        *((0o700, "", None, ""), (0o755, "", None, ""), (0o775, "", "note", chmod)),
        *((0o770, "?mode=660", None, ""), (0o777, "", "wrong", chmod)),
        (0o777, "?mode=660", "wrong", chmod.replace("755", "775")),
        *((0o777, "?mode=666", None, ""), (0o1777, "", "wrong", another)),
    ):
        folder.chmod(mode)
        url = f"file://{folder}{query}"
        findings = look(tmp_path, url)
        assert [finding.level for finding in findings] == [level] * bool(level), url
        for finding in findings:
            assert f"has the mode {mode:04o}: " in finding.what
            assert finding.advice.startswith(advice)
        assert look(tmp_path, url, dataclasses.replace(STORE, is_sealed=True)) == []


def test_blocks_that_do_not_fit_on_the_disk_are_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "kv"
    store = dataclasses.replace(STORE, num_bytes_source="JAXKV_STORAGE_BYTES")
    free = types.SimpleNamespace(f_bavail=3 << 18, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    (fault,) = look(tmp_path, folder, store)
    assert (fault.level, fault.what) == (
        "wrong",
        "4 GiB of blocks (JAXKV_STORAGE_BYTES) do not fit into the store kv "
        "(--storage), which has 3.00 GiB left and 0.00 GiB of blocks",
    )
    assert fault.advice == (
        "make room there, or ask for less: JAXKV_STORAGE_BYTES=2688MiB"
    )
    # What a run before has written there counts, and nothing else does.
    for name, num_bytes in (("else", GIB), ("jaxkv1/a/b/1.0", GIB - 1)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(num_bytes)
        (fault,) = look(tmp_path, folder, store)
        assert "do not fit" in fault.what
    (folder / "jaxkv1/a/b/2.0").write_bytes(b"1")
    assert look(tmp_path, folder, store) == []


def test_a_store_whose_extra_is_missing_or_cannot_be_loaded_is_wrong(
    tmp_path, monkeypatch
):
    for url, extra, module in (
        ("redis://127.0.0.1:1", "redis", "redis"),
        ("gs://b", "storage", "tensorstore"),
    ):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, module, None)
            (fault,) = look(tmp_path, url, missing={extra: (module,)})
        missing = f"the extra {extra} is needed, and {module} not installed"
        assert (fault.what, fault.advice) == (missing, pip_install(extra))

    def fail(url):
        raise ImportError("libibverbs.so.1 is not there")

    monkeypatch.setattr("jaxkv.tools.doctor.store.open_store", fail)
    monkeypatch.setattr("jaxkv.tools.doctor.store.missing_packages", lambda extra: ())
    (fault,) = look(tmp_path, "mooncake://127.0.0.1")
    assert fault.what.endswith("cannot be used: libibverbs.so.1 is not there")


def test_a_store_that_does_not_answer_is_wrong_and_not_waited_for(
    tmp_path, monkeypatch
):
    (fault,) = look(tmp_path, f"redis://127.0.0.1:{free_port()}")
    assert "cannot be used: ConnectionError: " in fault.what
    assert fault.advice == "start the store, or correct its address"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        (fault,) = look(tmp_path, url, deadline_s=0.0)
    assert fault.what.endswith("cannot be used: it did not answer within 0 s")
    assert fault.advice == "start the store, or correct its address"
    released = threading.Event()
    monkeypatch.setattr(
        "jaxkv.tools.doctor.store.open_store", lambda url: released.wait()
    )
    try:
        (fault,) = look(tmp_path, tmp_path / "kv", deadline_s=0.0)
    finally:
        released.set()
    assert fault.what.endswith("cannot be used: it did not answer within 0 s")


def test_a_store_that_changes_bytes_is_wrong(tmp_path, monkeypatch):
    class Forgetful(MemoryStore):
        def get(self, names, max_bytes):
            [answer] = super().get(names, max_bytes)
            changed = Future()
            changed.set_result(bytes(answer.result()[:-1]))
            return [changed]

    store = Forgetful()
    monkeypatch.setattr("jaxkv.tools.doctor.store.open_store", lambda url: store)
    (fault,) = look(tmp_path, "memory://kept")
    assert fault.what.endswith("what was written there does not come back")
    assert store._blobs == {}


def test_a_real_server_is_tried_and_nothing_stays_there(tmp_path):
    with redis_server(tmp_path) as (url, _):
        assert look(tmp_path, url) == []
        assert redis.Redis.from_url(url).dbsize() == 0


def test_the_command_tries_the_store_of_the_settings(machine, capsys, monkeypatch):
    folder = machine.proc.parent / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("JAXKV_STORAGE", str(folder))
    assert cli.main(["doctor", "--no-probe"]) == 1
    out = capsys.readouterr().out
    assert f"WRONG  the store {folder} (JAXKV_STORAGE) has the mode 0777" in out
    assert f"\nStorage tier {folder}, 16 GiB of blocks at most; " in out
    # The command line takes precedence.
    words = ["--storage", "memory://doctor", "--storage-bytes", "1MiB"]
    assert cli.main(["doctor", "--no-probe", *words]) == 0
    assert "\nStorage tier memory://doctor, 1 MiB of blocks" in capsys.readouterr().out
    monkeypatch.setenv("JAXKV_STORAGE", "ftp://kv")
    assert cli.main(["doctor", "--no-probe"]) == 1
    assert "WRONG  storage='ftp://kv': unknown 'ftp': cho" in capsys.readouterr().out


def test_secrets_are_shown_to_nobody(machine, capsys, monkeypatch, tmp_path):
    secrets = ("a secret of 16 bytes and more", "password")
    port = free_port()
    monkeypatch.setenv("JAXKV_STORAGE_SECRET", secrets[0])
    url = f"redis://me:{secrets[1]}@127.0.0.1:{port}"
    monkeypatch.setenv("JAXKV_STORAGE", url)
    figures = tmp_path / "a.json"
    assert cli.main(["doctor", "--no-probe", "--json", str(figures)]) == 1
    out, err = capsys.readouterr()
    everything = out + err + figures.read_text()
    assert not any(secret in everything for secret in secrets)
    assert f"JAXKV_STORAGE=redis://127.0.0.1:{port}, JAXKV_STORAGE_SECRET=..." in out
    config = json.loads(figures.read_text())["facts"]["config"]
    assert config["storage"] == f"redis://127.0.0.1:{port}"
    assert config["storage_secret"] == "..."
    monkeypatch.setenv("JAXKV_STORAGE", str(tmp_path))
    monkeypatch.setenv("JAXKV_STORAGE_SECRET", "")
    assert cli.main(["doctor", "--no-probe"]) == 1
    out = capsys.readouterr().out
    assert "WRONG  JAXKV_STORAGE_SECRET is set but has no secret" in out
    # Neither under a misspelt name.
    monkeypatch.setenv("JAXKV_STORAGE_SECRT", secrets[0])
    monkeypatch.setenv("jaxkv_storage", url)
    assert cli.main(["doctor", "--no-probe"]) == 1
    out, err = capsys.readouterr()
    assert not any(secret in out + err for secret in secrets)
    assert "unknown variable JAXKV_STORAGE_SECRT: did you mean JAXKV_STORAGE_" in out


def test_the_padding_of_host_rows_is_told_on_tpu(tmp_path):
    lines = fact_lines(facts_of(Machine(tmp_path), "tpu"), None)
    [line] = [line for line in lines if line.startswith("Host layout")]
    assert "(64: 2.00, 80: 1.60, 96: 1.33, 192: 1.33, 576: 1.11)" in line
    for platform in ("cpu", "gpu"):
        lines = fact_lines(facts_of(Machine(tmp_path), platform), None)
        assert not any(line.startswith("Host layout") for line in lines)
    facts = gather_facts()
    assert facts.backend.platform == jax.devices()[0].platform
    assert facts.backend.num_devices == jax.device_count()
    assert "pinned_host" in facts.backend.memory_kinds
    assert facts.refusals == ()
