"""``jaxkv demo`` in a process of its own, stopped, interrupted and terminated.

Whatever the moment, it leaves one line, the right exit code, and nothing else: no
child, no shared memory, no file.
"""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT_S = 300
OPTIONS = ["--conversations", "4", "--turns", "2", "--json", "figures.json"]
SHORT = ["--document-tokens", "300", "--answer-tokens", "4"]
PROGRESS = re.compile(r"[\w ,:/()%.-]+ \.\.\.")


def cases(num):
    """Yield random moments, each with what happens then; two by default."""
    rng = random.Random(0)
    ends = (signal.SIGINT, signal.SIGTERM, None)
    for number in range(num):
        end = ends[number % len(ends)]
        # Some early, while modules are imported.
        max_s = 2.0 if number % 4 == 3 else 12.0 if end and number > 1 else 6.0
        moment_s = round(rng.uniform(0, max_s), 2)
        is_stopped = end is None or rng.random() < 0.5
        marks = () if number < 2 else pytest.mark.long
        yield pytest.param(end, moment_s, is_stopped, id=f"case {number}", marks=marks)


def command(options):
    """The command that pip makes of pyproject.toml's script."""
    text = (ROOT / "pyproject.toml").read_text()
    module, name = tomllib.loads(text)["project"]["scripts"]["jaxkv"].split(":")
    script = f"import sys\nfrom {module} import {name}\nsys.exit({name}())"
    return [sys.executable, "-c", script, "demo", *options]


def processes_of(session):
    """The processes of a session that have not ended."""
    pids = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(") ")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def files_mapped_by(pid):
    """The files that a process has mapped."""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return set(re.findall(r" (/\S+)$", maps, re.MULTILINE))


def wait_for_first_import(child):
    """Wait until jaxkv is being imported; before that Python itself is starting."""
    while child.poll() is None:
        if any("numpy" in name for name in files_mapped_by(child.pid)):
            return
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
@pytest.mark.parametrize(("end", "moment_s", "is_stopped"), list(cases(30)))
def test_the_demo_under_signals(tmp_path, end, moment_s, is_stopped):
    folders = {name: tmp_path / name for name in ("cwd", "tmp")}
    for folder in folders.values():
        folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folders["tmp"])}
    log = tmp_path / "log"
    with log.open("w") as output:
        child = subprocess.Popen(
            command(OPTIONS if end else OPTIONS + SHORT),
            cwd=folders["cwd"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    shared = set()
    try:
        wait_for_first_import(child)
        time.sleep(moment_s)
        mapped = files_mapped_by(child.pid)
        shared = {name for name in mapped if name.startswith("/dev/shm/")}
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            child.send_signal(signal.SIGCONT)
        is_over = child.poll() is not None
        is_over |= (folders["cwd"] / "figures.json").exists()
        if end is not None:
            child.send_signal(end)
        sent_s = time.monotonic()
        code = child.wait(TIMEOUT_S)
        took_s = time.monotonic() - sent_s
        left = processes_of(child.pid)
    finally:
        for pid in processes_of(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
    lines = log.read_text().splitlines()
    said = "\n".join(lines)
    assert not left, f"children are left: {left}"
    others = [line for line in lines if not PROGRESS.fullmatch(line)]
    files = sorted(path.name for path in folders["cwd"].iterdir())
    # What comes as it ends may be too late to be noticed, but else is not ignored.
    is_late = is_over or (code == 0 and took_s < 2)
    if end is None or (is_late and code == 0):
        assert code == 0, said
        assert others == [], said
        assert files == ["figures.json"]
    elif end == signal.SIGINT:
        assert others == ["jaxkv demo: interrupted"], said
        assert code == 130, said
        assert files == [] or is_late
    else:
        # The signal ends it: a shell says 143.
        assert others in ([], ["jaxkv demo: terminated"]), said
        assert code in (-signal.SIGTERM, 143), said
        assert files == [] or is_late
    if end is not None:
        assert took_s < 60, f"it took {took_s:.0f} s to end"
    assert not [name for name in shared if pathlib.Path(name).exists()]
    assert sorted(path.name for path in folders["tmp"].rglob("*")) == []
