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
import time
import types
from pathlib import Path

import jax
import pytest
import redis

from jaxkv import OffloadConfig
from jaxkv._util.extras import pip_install
from jaxkv.tools import main as cli
from jaxkv.tools.doctor import facts as doctor_facts
from jaxkv.tools.doctor.facts import Backend, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend
from jaxkv.tools.doctor.report import fact_lines
from jaxkv.tools.doctor.store import Store, look_at
from jaxkv.tools.speed import BytesDifferError
from jaxkv.transfer import limits
from jaxkv.transfer.storage import LocalStore, MemoryStore, StoreError
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


def check(facts, *expected, **question):
    """Compare the findings with lines of level, fact and advice; ... is any text."""
    lines = [
        f"{finding.level}: {finding.what} -> {finding.advice}"
        for finding in judge(facts, Question(**question))
    ]
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected, strict=True):
        assert re.fullmatch(re.escape(text).replace(r"\.\.\.", ".*"), line), line


def wrong(facts, **question):
    return [f for f in judge(facts, Question(**question)) if f.level == "wrong"]


# A machine and its GiB, the GiB that are asked about, those that are recommended, and
# what is found, which & separates; ... is any text.
SIZES = """
cpu 64   |           | 56     |
cpu 64   | host 56   | 56     |
cpu 64   | host 65   | 56     | wrong: 65 GiB...does not fit: the machine...-> free...56GiB
cpu 64   | host 60   | 56     | note: 60 GiB...fits, but 56 GiB would be safer...8.00 GiB is kept...
gpu 64   | host 20 device_pool 20 | 56 | wrong: 20 GiB...is no more than...ask for more than 20.00 GiB
gpu 64   | host 21 device_pool 20 | 56 |
gpu 64   | device_pool 50 | 56 |
gpu 64   | device_pool 60 | 56 | wrong: the recommended 56 GiB of host memory is no more...
cpu 64   | device_pool 16 | 42 |
cpu 64   | host 48 device_pool 16 | 42 | note: 48 GiB...fits, but 42 GiB would be safer...
cpu 64   | host 49 device_pool 16 | 42 | wrong: ...minus the device pool, which is in the same...
gpu 512  |           | 56     | note: ...has room for 448 GiB -> ...set LIMIT to 448 or more...
gpu 512  | host 100  | 56     | wrong: ...-> set LIMIT to 100 or more...ask for 56 GiB... & note: ...
gpu 512 LIMIT=512 | host 100 | 448 |
tpu 1    | host 3.5  | 3.5    | note: ...PREMAPPED is not set...for 4 GiB...
tpu 1    | host 4    | 3.5    | note: ...would be safer... & note: ...
tpu 1    | host 5    | 3.5    | wrong: ...-> set PREMAPPED to 5368709120 or more... & note: ...
gpu 64 PREALLOCATE=1 | | 14   | note: ...the machine has room for 72 GiB...
cpu 20   |           | 17     |
cpu 12   |           | 10     |
cpu 6    |           | 4      |
cpu 3    |           | 1.5    |
cpu 0.125 |          | 0.0625 |
cpu 0.0625 |         | 0.03125 | wrong: there is no room for a host tier: ... -> free some memory
cpu 0.0625 | host 1  | 0.03125 | wrong: ...has only 64 MiB left -> free some memory
"""  # noqa: E501
VARIABLES = {"LIMIT": LIMIT, "PREMAPPED": PREMAPPED, "PREALLOCATE": PREALLOCATE}


def test_a_size_is_judged_by_the_memory_that_it_would_take(tmp_path):
    for number, row in enumerate(SIZES.strip().splitlines()):
        for short, name in VARIABLES.items():
            row = row.replace(short, name)
        host, sizes, best_gib, findings = (cell.strip() for cell in row.split("|"))
        platform, gib, *environ = host.split()
        machine = Machine(tmp_path / str(number), int(float(gib) * GIB))
        facts = facts_of(machine, platform, dict(pair.split("=") for pair in environ))
        words = iter(sizes.split())
        question = {f"{name}_bytes": int(float(next(words)) * GIB) for name in words}
        check(facts, *filter(None, findings.split(" & ")), **question)
        best = recommend(facts, Question(**question))
        assert best.num_bytes == float(best_gib) * GIB, row


def test_a_tighter_cgroup_is_a_note_and_sets_the_size(tmp_path):
    for version, path in ((1, V1), (2, "0::/docker/abc\n")):
        machine = Machine(tmp_path / str(version), 64 * GIB, cgroup=path)
        limit = machine.v1 if version == 1 else machine.v2
        limit("docker/abc", 16 * GIB, 2 * GIB)
        facts = facts_of(machine)
        left = (
            "note: the cgroup ...docker/abc (memory... is 16.00 GiB) is the limit, "
            "with 14.00 GiB left"
        )
        check(facts, f"{left}: the machine has 64.00 GiB -> ")
        assert recommend(facts, Question()).num_bytes == 12 * GIB
        advice = (
            "raise the memory limit of the container or service, or ask for 12 GiB..."
        )
        text = "wrong: ...does not fit: the cgroup...has only 14.00 GiB left"
        check(facts, f"{text} -> {advice}", "note: ...", host_bytes=20 * GIB)
    # A limit above the machine's memory is not mentioned.
    machine = Machine(tmp_path / "large", 16 * GIB)
    machine.v2("", 32 * GIB, 1 * GIB)
    check(facts_of(machine))


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
        best = recommend(facts, Question()).num_bytes
        assert not any("not fit" in f.what for f in wrong(facts, host_bytes=best))
        for num_bytes in (best, *(rng.randrange(1, 100 * GIB) for _ in range(4))):
            faults = wrong(facts, host_bytes=num_bytes) if num_bytes else []
            try:
                machine.check(num_bytes, platform, environ)
                fits = True
            except MemoryError:
                fits = False
            assert fits != any("does not fit" in fault.what for fault in faults), case


def test_jax_on_the_wrong_device_is_pointed_out(tmp_path):
    machine = Machine(tmp_path)
    machine.write(machine.proc / "driver/nvidia/version", "NVRM version: 1")
    check(
        facts_of(machine),
        "wrong: jax runs on the CPU, though this machine has an NVIDIA driver -> "
        f"{pip_install('cuda12')}, or set JAX_PLATFORMS...",
    )
    chosen = {"JAX_PLATFORMS": "cpu"}
    text = "note: ...not on the NVIDIA GPU, as JAX_PLATFORMS=cpu says -> ..."
    check(facts_of(machine, environ=chosen), text)
    check(facts_of(machine, "gpu"), host_bytes=GIB)
    # Decisions that run on the device are slow.
    facts = facts_of(machine, "gpu", {"JAX_PLATFORMS": "cuda"})
    check(facts)
    backend = dataclasses.replace(facts.backend, decides_on="gpu")
    check(
        dataclasses.replace(facts, backend=backend),
        "note: JAX_PLATFORMS=cuda leaves out the CPU backend, so... -> "
        "set JAX_PLATFORMS=cuda,cpu",
    )


def test_refusals_of_the_engine_are_wrong(tmp_path, monkeypatch):
    gather = functools.partial(gather_facts, {}, proc_root=tmp_path)
    monkeypatch.setattr(doctor_facts.memory, "HOST_KIND", "pinned_host")
    monkeypatch.setattr(
        "jaxkv.transfer.memory.memory_kinds", lambda device: ("device",)
    )
    (fault,) = wrong(gather())
    assert "has the memories ('device',), not 'pinned_host'" in fault.what
    monkeypatch.undo()
    with jax.disable_jit():
        (fault,) = wrong(gather())
    assert fault.what.startswith("JAX_DISABLE_JIT is set, but transfers are compiled")
    backend = jax.devices()[0].platform
    facts = gather_facts()
    assert facts.mode == ("fused" if backend == "cpu" else "staged")
    assert (facts.backend.platform, facts.refusals) == (backend, ())
    assert facts.backend.num_devices == jax.device_count()
    assert "pinned_host" in facts.backend.memory_kinds


def test_invalid_variables_are_wrong(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    environ = {"JAXKV_HOST_BYTE": "8GiB", "JAXKV_MODE": "eagr"}
    facts = facts_of(machine, environ=environ)
    assert facts.config == OffloadConfig()
    check(
        facts,
        "wrong: unknown variable JAXKV_HOST_BYTE: did you mean JAXKV_HOST_BYTES?...",
        "wrong: JAXKV_MODE='eagr' must be one of eager, lazy: did you mean eager?...",
    )
    # A size is judged next to them.
    environ = {"JAXKV_HOST_BYTES": "8GiB", "JAXKV_MODE": "eagr"}
    assert facts_of(machine, environ=environ).config.host_bytes == 8 * GIB
    environ = {"JAXKV_HOST_BYTES": "8GiB", "JAXKV_NUM_HOST_BLOCKS": "9"}
    facts = facts_of(machine, environ=environ)
    assert facts.config is None
    text = "wrong: ...host_bytes=8589934592 and num_host_blocks=9 exclude one"
    check(facts, f"{text}...(JAXKV_HOST_BYTES, JAXKV_NUM_HOST_BLOCKS in the env...")
    backend = Backend("gpu", "x", 1, "cpu", (), None)
    monkeypatch.setattr(doctor_facts, "_backend_of", lambda devices: backend)
    facts = gather_facts({LIMIT: "64GB"}, proc_root=tmp_path, cgroup_root=tmp_path)
    text = f"wrong: {LIMIT}='64GB' must be a whole number of GiB from 1."
    check(facts, f"{text} -> ...")


def test_a_missing_extra_is_wrong_only_if_it_is_needed(tmp_path):
    machine = Machine(tmp_path)
    missing = {"events": ("pyzmq",), "metrics": (), "demo": ("flax", "rich")}
    facts = facts_of(machine, missing=missing)
    check(facts, needed=["metrics"])
    text = "wrong: the extra events is needed, but pyzmq is not installed"
    check(facts, f"{text} -> {pip_install('events')}", needed=["events", "metrics"])
    # Settings need extras, too.
    missing |= {"metrics": ("prometheus_client",)}
    for name, value, extra in (
        ("JAXKV_EVENTS_ENDPOINT", "tcp://127.0.0.1:5557", "events"),
        ("JAXKV_METRICS_PORT", "0", "metrics"),
    ):
        facts = facts_of(machine, environ={name: value}, missing=missing)
        check(facts, f"wrong: ... -> {pip_install(extra)}")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made_up = Machine(tmp_path / "machine", 64 * GIB)
    roots = {"proc_root": made_up.proc, "cgroup_root": made_up.cgroup}
    monkeypatch.setattr(
        "jaxkv.tools.doctor.command.gather_facts",
        functools.partial(gather_facts, **roots),
    )
    return made_up


@pytest.fixture
def diagnose(machine, capsys):
    """Runs the command; gives its exit code and what it prints."""

    def run(line=""):
        code = cli.main(["doctor", *line.split()])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_command_prints_in_columns(machine, diagnose, monkeypatch):
    line = "--host-bytes 70GiB --need metrics --no-probe"
    code, out, err = diagnose(line)
    assert (code, err) == (1, "")
    rows = dict(
        (line[:13].strip(), line[13:]) for line in out.split("\n\n")[0].splitlines()
    )
    assert list(rows) == [
        *("Machine", "Memory", "Cgroup", "Software", "Device", "Memory kinds"),
        *("Pinned pool", "Mode", "Extras", "Host tier"),
    ]
    assert rows["Memory"] == "95.37 GiB, 64.00 GiB available"
    assert rows["Software"].startswith(f"Python {sys.version.split()[0]}, jaxkv 0.")
    assert rows["Extras"].startswith("events, metrics, demo, storage, redis")
    assert rows["Host tier"].startswith("56 GiB recommended: the machine has 64.00 GiB")
    lines = fact_lines(facts_of(machine, "tpu"), None)
    [line] = [line for line in lines if line.startswith("Host layout")]
    assert "(64: 2.00, 80: 1.60, 96: 1.33, 192: 1.33, 576: 1.11)" in line
    assert out.split("\n\n", 1)[1] == (
        "WRONG  70 GiB of host memory (--host-bytes) does not fit: the machine has "
        "only 64.00 GiB left\n\n"
        "What to do\n"
        "  1. free some memory, or ask for 56 GiB: --host-bytes 56GiB\n\n"
        "1 problem found.\n"
    )
    # A size of the environment is judged unless the command line has one.
    monkeypatch.setenv("JAXKV_HOST_BYTES", "70GiB")
    code, out, _ = diagnose("--no-probe")
    assert code == 1
    assert "Settings     JAXKV_HOST_BYTES=70GiB\n" in out
    assert "WRONG  70 GiB of host memory (JAXKV_HOST_BYTES) does not fit" in out
    assert "or ask for 56 GiB: JAXKV_HOST_BYTES=56GiB\n" in out
    code, out, _ = diagnose("--no-probe --host-bytes 8GiB")
    assert (code, out[-21:]) == (0, "\n\nNo problems found.\n")


def test_an_address_space_without_room_is_wrong_even_without_a_probe(tmp_path):
    # In a process of its own, whose limit leaves less than the doctor allocates.
    result = run_python(
        "import resource, sys, jax\n"
        "jax.devices()\n"
        "from jaxkv.tools.main import main\n"
        "from jaxkv.tools.doctor import command\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (4 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "sys.exit(main(['doctor', '--no-probe']))\n",
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    out = result.stdout.decode()
    assert result.returncode == 1, out + result.stderr.decode()
    assert "WRONG  jax cannot allocate 8 MiB: " in out
    assert "no room for a host tier: the address space of this process (ulimit" in out


def test_a_failing_probe_is_wrong(diagnose, monkeypatch):
    for error, code, message in (
        (BytesDifferError("3 blocks differ"), 1, "WRONG  blocks do not move: 3 bl"),
        (RuntimeError("no stream"), 1, "WRONG  blocks do not move: no stream"),
        (MemoryError("32 MiB"), 0, "note   transfers were not measured: 32 MiB"),
    ):

        def measure(on_progress, mode, error=error):
            raise error

        monkeypatch.setattr("jaxkv.tools.doctor.command.measure_bandwidth", measure)
        ended, out, _ = diagnose()
        assert ended == code
        assert message in out


def test_the_doctor_names_missing_extras_and_runs_without_rich(
    diagnose, monkeypatch, tmp_path
):
    for name in ("zmq", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    figures = tmp_path / "a.json"
    code, out, err = diagnose(f"--need events --json {figures}")
    assert code == 1
    assert (
        "Extras       metrics, storage, redis, events (pyzmq missing), demo (rich "
        "missing)\n"
    ) in out
    assert "WRONG  the extra events is needed, but pyzmq is not installed" in out
    assert f"  1. {pip_install('events')}" in out
    # The probe moves blocks, and shows progress without rich, too.
    for name in ("Store", "Load"):
        assert re.search(rf"^{name} +[\d.]+ / [\d.]+ GB/s; \S+ \d", out, re.M)
    bandwidth = json.loads(figures.read_text())["facts"]["bandwidth"]
    assert bandwidth["save"]["best_gb_per_s"] >= bandwidth["save"]["p50_gb_per_s"] > 0
    assert err.startswith("moving blocks ...")
    assert err.endswith(" 100%\n")


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
        said = "WRONG  2 GiB of host memory (--host-bytes) does not fit: the cgroup "
        assert f"{said}{folder} (" in done.stdout
        assert "raise the memory limit of the container or service" in done.stdout
        assert done.stdout.endswith("made\n"), done.stderr
        assert f"but the cgroup {folder} (" in done.stderr
    assert json.loads(figures.read_text())["recommended_host_bytes"] >= 64 << 20
    assert json.loads(figures.read_text())["recommended_host_bytes"] <= GIB // 2


STORE = Store("kv", 4 * GIB, is_sealed=False)
OPEN = "jaxkv.tools.doctor.store.open_store"
UNUSABLE = "wrong: the store kv (--storage) cannot be used: "


def look(tmp_path, url, *expected, store=STORE, missing=None, **options):
    """Check what is found of a store, on a machine without other faults."""
    view = look_at(str(url), store, **options)
    facts = facts_of(Machine(tmp_path / "machine", 64 * GIB), store=view)
    facts = dataclasses.replace(facts, missing=dict(facts.missing) | (missing or {}))
    check(facts, *expected)


def test_a_store_is_tried_and_nothing_stays_there(tmp_path):
    look(tmp_path, tmp_path / "a/b/c")
    look(tmp_path, f"file://{tmp_path}/a/b?mode=660")
    assert not (tmp_path / "a").exists()
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    (there / "file").touch()
    look(tmp_path, there)
    assert [path.name for path in there.iterdir()] == ["file"]
    with redis_server(tmp_path) as (url, _):
        look(tmp_path, url)
        assert redis.Redis.from_url(url).dbsize() == 0


def test_blocks_are_timed_on_their_way_to_the_store_and_back(tmp_path, monkeypatch):
    sealed = dataclasses.replace(STORE, is_sealed=True)
    for store in (STORE, sealed):
        view = look_at(str(tmp_path / "kv"), store)
        assert view.speed.write_mb_per_s > 0
        assert view.speed.read_mb_per_s > 0
    assert not (tmp_path / "kv").exists()

    class Slow(MemoryStore):
        slow = "put"

        def put(self, items):
            self._wait("put", items[0][0])
            return super().put(items)

        def get(self, names, max_bytes):
            self._wait("get", names[0])
            return super().get(names, max_bytes)

        def _wait(self, call, name):
            if call == self.slow and "/" in name:  # A block, not the small object
                time.sleep(0.2)

    def rows(store):
        monkeypatch.setattr(OPEN, lambda url: store)
        monkeypatch.setattr("jaxkv.tools.doctor.store.SPEED_S", 0.1)
        facts = facts_of(Machine(tmp_path / "machine", 64 * GIB))
        view = look_at("memory://kept", STORE)
        lines = fact_lines(dataclasses.replace(facts, store=view), None)
        assert store._blobs == {}
        return lines[-1].strip()

    store = Slow()
    assert rows(store) == "16 blocks of 1 MiB: written at less than 4.19 MB/s"
    store.slow = "get"
    text = r"16 blocks of 1 MiB: written at [\d,.]+ MB/s, read at less than 4.19 MB/s"
    assert re.fullmatch(text, rows(store))


def test_a_store_that_loses_or_changes_blocks_is_wrong(tmp_path, monkeypatch):
    class Faulty(MemoryStore):
        def get(self, names, max_bytes):
            found = super().get(names, max_bytes)
            return [
                self.change(x) if "/" in n else x
                for n, x in zip(names, found, strict=True)
            ]

        def put(self, items):
            if "/" in items[0][0] and self.is_full:
                raise StoreError("full", "no space is left")
            return super().put(items)

    for is_full, change, text in (
        (False, lambda blob: None, "written blocks do not read back -> "),
        (False, lambda blob: bytes(len(blob)), "written blocks do not read back -> "),
        (True, None, "no space is left -> make room there"),
    ):
        store = Faulty()
        store.is_full, store.change = is_full, change
        monkeypatch.setattr(OPEN, lambda url, store=store: store)
        look(tmp_path, "memory://kept", f"{UNUSABLE}{text}")
        assert store._blobs == {}


def test_a_store_that_cannot_be_used_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in ("file", "file/kv"):
        text = f"{UNUSABLE}...name a folder that can be made and read..."
        look(tmp_path, tmp_path / place, text)

    def refuse(self, path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    # The user that runs tests may be one who may write everywhere.
    with monkeypatch.context() as context:
        context.setattr(LocalStore, "_create", refuse)
        advice = "let the user of the server read and write there..."
        text = f"{UNUSABLE}PermissionError... -> {advice}"
        look(tmp_path, tmp_path / "kv", text)
    assert not (tmp_path / "kv").exists()

    class Forgetful(MemoryStore):
        def get(self, names, max_bytes):
            return [blob[:-1] for blob in super().get(names, max_bytes)]

    store = Forgetful()
    monkeypatch.setattr(OPEN, lambda url: store)
    text = f"{UNUSABLE}a written object does not read back -> "
    look(tmp_path, "memory://kept", text)
    assert store._blobs == {}


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    advice = "start the store, or correct its address"
    text = f"{UNUSABLE}ConnectionError: ... -> {advice}"
    look(tmp_path, f"redis://127.0.0.1:{free_port()}", text)
    late = f"{UNUSABLE}it did not answer within 0 s -> {advice}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        look(tmp_path, url, late, deadline_s=0.0)
    released = threading.Event()
    monkeypatch.setattr(OPEN, lambda url: released.wait())
    try:
        look(tmp_path, tmp_path / "kv", late, deadline_s=0.0)
    finally:
        released.set()


def test_a_folder_where_others_can_plant_blocks_is_reported(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    secret = "or set JAXKV_STORAGE_SECRET..."
    chmod, another = f"chmod 700 {folder}, {secret}", f"name a folder in {folder}, "
    for mode, query, level, advice in (
        *((0o700, "", None, ""), (0o755, "", None, ""), (0o775, "", "note", chmod)),
        *((0o770, "?mode=660", None, ""), (0o777, "", "wrong", chmod)),
        (0o777, "?mode=660", "wrong", chmod.replace("700", "770")),
        *((0o777, "?mode=666", None, ""), (0o1777, "", "wrong", another + secret)),
    ):
        folder.chmod(mode)
        url = f"file://{folder}{query}"
        text = f"{level}: ...has the mode {mode:04o}: ... -> {advice}"
        look(tmp_path, url, *[text] * bool(level))
        look(tmp_path, url, store=dataclasses.replace(STORE, is_sealed=True))


def test_blocks_that_do_not_fit_on_the_disk_are_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "kv"
    store = dataclasses.replace(STORE, num_bytes_source="JAXKV_STORAGE_BYTES")
    free = types.SimpleNamespace(f_bavail=3 << 18, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    text = (
        "wrong: 4 GiB of blocks (JAXKV_STORAGE_BYTES) does not fit into the store kv "
        "(--storage), which has 3.00 GiB free and {} of blocks -> "
        "make room there, or ask for less: JAXKV_STORAGE_BYTES={}"
    )
    look(tmp_path, folder, text.format("0 B", "2688MiB"), store=store)
    # What a run before has written there counts, and nothing else does.
    for name, num_bytes in (("else", GIB), ("jaxkv1/a/b/1.0", GIB - 1)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(num_bytes)
        look(tmp_path, folder, text.format("...", "..."), store=store)
    (folder / "jaxkv1/a/b/2.0").write_bytes(b"1")
    look(tmp_path, folder, store=store)


def test_a_store_whose_extra_is_missing_or_cannot_be_loaded_is_wrong(
    tmp_path, monkeypatch
):
    for url, extra, module in (
        ("redis://127.0.0.1:1", "redis", "redis"),
        ("gs://b", "storage", "tensorstore"),
    ):
        text = f"wrong: the extra {extra} is needed, but {module} is not installed"
        with monkeypatch.context() as context:
            context.setitem(sys.modules, module, None)
            missing = {extra: (module,)}
            look(tmp_path, url, f"{text} -> {pip_install(extra)}", missing=missing)

    def fail(url):
        raise ImportError("libibverbs.so.1 is not there")

    monkeypatch.setattr(OPEN, fail)
    monkeypatch.setattr("jaxkv.tools.doctor.store.missing_packages", lambda extra: ())
    text = f"{UNUSABLE}libibverbs.so.1 is not there -> "
    look(tmp_path, "redis://127.0.0.1", text)


def test_the_command_tries_the_store_of_the_settings(diagnose, tmp_path, monkeypatch):
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("JAXKV_STORAGE", str(folder))
    code, out, _ = diagnose("--no-probe")
    assert code == 1
    assert f"WRONG  the store {folder} (JAXKV_STORAGE) has the mode 0777" in out
    assert f"\nStorage tier {folder}, at most 16 GiB of blocks; " in out
    # The command line takes precedence.
    words = "--no-probe --storage memory://doctor --storage-bytes 1MiB"
    code, out, _ = diagnose(words)
    assert code == 0
    assert "\nStorage tier memory://doctor, at most 1 MiB of blocks" in out
    monkeypatch.setenv("JAXKV_STORAGE", "ftp://kv")
    code, out, _ = diagnose("--no-probe")
    assert code == 1
    assert "WRONG  storage='ftp://kv': unknown 'ftp': cho" in out


def test_secrets_are_shown_to_nobody(diagnose, monkeypatch, tmp_path):
    secrets = ("a secret of 16 bytes and more", "password")
    place = f"127.0.0.1:{free_port()}"
    url, figures = f"redis://me:{secrets[1]}@{place}", tmp_path / "a.json"
    for settings, expected in (
        (
            {"JAXKV_STORAGE_SECRET": secrets[0], "JAXKV_STORAGE": url},
            f"JAXKV_STORAGE=redis://{place}, JAXKV_STORAGE_SECRET=...",
        ),
        (
            {"JAXKV_STORAGE_SECRET": "", "JAXKV_STORAGE": str(tmp_path)},
            "WRONG  JAXKV_STORAGE_SECRET is set but empty",
        ),
        # Neither under a misspelt name.
        (
            {"JAXKV_STORAGE_SECRT": secrets[0], "jaxkv_storage": url},
            "unknown variable JAXKV_STORAGE_SECRT: did you mean JAXKV_STORAGE_",
        ),
    ):
        with monkeypatch.context() as context:
            for name, value in settings.items():
                context.setenv(name, value)
            code, out, err = diagnose(f"--no-probe --json {figures}")
        assert code == 1
        assert expected in out
        text = figures.read_text()
        assert not any(secret in out + err + text for secret in secrets), settings
        if settings.get("JAXKV_STORAGE") == url:
            config = json.loads(text)["facts"]["config"]
            assert config["storage"] == f"redis://{place}"
            assert config["storage_secret"] == "..."
