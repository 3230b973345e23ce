"""SIGINT and SIGTERM at any moment, and streams that are closed or full.

A command that is stopped, interrupted or terminated leaves one line, the right exit
code, and nothing else: no child, no shared memory, no file.
"""

import ast
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest

import jaxkv
from jaxkv.tools import COMMANDS
from tests.rigs import children
from tests.rigs.command_line import LAUNCHER, ROOT, run_command, run_python
from tests.rigs.waiting import wait_for

PLAN = "--kv-bytes-per-token 128KiB --prefill-tokens-per-s 20000 --policy arc"
LINES = {
    "demo": "demo --conversations 4 --turns 2",
    "plan": f"plan synthetic:20000 {PLAN}",
    "doctor": "doctor",
}
SHORT = "demo --conversations 4 --turns 2 --document-tokens 300 --answer-tokens 4"
ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", None: ""}
PROGRESS = re.compile(r"[\w ,:/()%.-]+ \.\.\.( \d+%)*")
TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="there is no /proc here"
)


def cases(num):
    """Yield a command and a random moment, and what happens then; two by default."""
    rng = random.Random(0)
    for number in range(num):
        end = [*ENDS][number % len(ENDS)]
        # As many in the first moments as later: imports begin there.
        moment_s = round(rng.uniform(0, rng.choice([0.1, 2.0, 8.0])), 3)
        command = rng.choice([*LINES]) if number > 1 else ("demo", "doctor")[number]
        is_stopped = end is None or rng.random() < 0.5
        marks = () if number < 2 else pytest.mark.long
        case = command, end, moment_s, is_stopped
        yield pytest.param(*case, id=f"case {number}", marks=marks)


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


def shared_memory_of(pid):
    """The shared memory that a process has mapped."""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))


def wait_for_mask(child):
    """Wait until SIGTERM is blocked: before, the interpreter itself ends."""
    status = pathlib.Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        blocked = status.read_text(encoding="ascii").partition("SigBlk:")[2].split()[0]
        if int(blocked, 16) & 1 << signal.SIGTERM - 1:
            break
        time.sleep(0.001)


@pytest.mark.parametrize(("command", "end", "moment_s", "is_stopped"), list(cases(60)))
def test_a_command_under_signals(tmp_path, command, end, moment_s, is_stopped):
    cwd, tmp, log = (tmp_path / name for name in ("cwd", "tmp", "log"))
    cwd.mkdir()
    tmp.mkdir()
    line = LINES[command] if end else SHORT
    command = line.split()[0]
    with log.open("w") as output:
        child = subprocess.Popen(
            [*LAUNCHER, *line.split(), "--json", "figures.json"],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for_mask(child)
        time.sleep(moment_s)
        shared = shared_memory_of(child.pid)
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            child.send_signal(signal.SIGCONT)
        is_over = child.poll() is not None or (cwd / "figures.json").exists()
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
    messages = [x for x in log.read_text().splitlines() if not PROGRESS.fullmatch(x)]
    files = sorted(path.name for path in cwd.iterdir())
    assert not left, f"children are left: {left}"
    # What comes as it ends may be too late to be noticed, but else is not ignored.
    is_late = is_over or (code == 0 and took_s < 2)
    if end is None or (is_late and code == 0):
        assert (code, messages, files) == (0, [], ["figures.json"])
    else:
        assert (code, messages) == (128 + end, [f"jaxkv {command}: {ENDS[end]}"])
        assert files == [] or is_late
    if end is not None:
        assert took_s < 60, f"it took {took_s:.0f} s to end"
    assert not [name for name in shared if pathlib.Path(name).exists()]
    assert list(tmp.rglob("*")) == []


def test_a_signal_ends_children_and_a_main_thread_that_never_returns():
    """No Python handler runs while the main thread waits, such as for a device."""
    text = (
        "import os, signal, subprocess, sys, threading\n"
        "from jaxkv.tools.process import end_on_signals\n"
        "end_on_signals('jaxkv test')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "import ctypes\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "ctypes.CDLL(None).sleep(60); ctypes.CDLL(None).sleep(60)\n"
        "ctypes.CDLL(None).sleep(60)\n"
    )
    done = run_python(text, timeout=30)
    assert done.returncode == 143
    assert done.stderr == b"jaxkv test: terminated\n"
    stat = pathlib.Path(f"/proc/{int(done.stdout)}/stat")

    def has_ended():
        # The process that adopts it may be slow to reap it.
        return (
            not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        )

    wait_for(has_ended)


def test_what_is_public_is_imported_when_it_is_used():
    source = pathlib.Path(jaxkv.__file__).read_text(encoding="utf-8")
    (for_types,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    modules = {a.name: node.module for node in for_types.body for a in node.names}
    assert modules == jaxkv._MODULES
    for name in modules:
        assert getattr(jaxkv, name).__name__ == name if name != "Policy" else True
        assert name in dir(jaxkv)
    text = (
        "import sys\nimport jaxkv.tools.main\n"
        "print([name for name in ('jax', 'numpy', 'numba') if name in sys.modules])\n"
        "import jaxkv\nprint(jaxkv.tiers.host.OffloadingManager.__name__)\n"
        "from jaxkv import *\nprint(KeyChain.__name__, num_host_blocks.__name__)"
    )
    printed = b"[]\nOffloadingManager\nKeyChain num_host_blocks\n"
    assert run_python(text).stdout == printed
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        _ = jaxkv.nothing_of_this_name
    assert tuple(COMMANDS)[-3:] == ("status", "store", "verify")


def fork_command(prelude, line):
    """Run a statement and then a command in a forked process."""
    text = f"import os, sys\n{prelude}\n{LAUNCHER[2]}"
    return children.run("-c", text, *line.split())


def test_output_to_a_full_disk_is_one_line():
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    message = "error: cannot write the output (No space left on device)\n"
    with open("/dev/full", "wb") as full:
        done = run_command("--version", stdout=full)
    assert (done.returncode, done.stderr.decode()) == (1, f"jaxkv: {message}")
    redirect = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    done = fork_command(redirect, "doctor --no-probe")
    assert (done.returncode, done.stderr) == (1, f"jaxkv doctor: {message}")


def test_output_that_is_or_was_closed_is_no_error():
    plan = "plan synthetic:9 --policy lru --capacity 10"
    reader, writer = os.pipe()
    os.close(reader)
    done = run_command("--help", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    close_reader = "r, w = os.pipe(); os.close(r); sys.stdout = open(w, 'w')"
    done = fork_command(close_reader, plan)
    assert (done.returncode, done.stderr) == (141, "")
    code = "import os, sys\nfor fd in {}: os.close(fd)\n"
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    for line, closed in (("--version", (1,)), ("plan nowhere", (2,))):
        done = run_python(code.format(closed), *LAUNCHER, *line.split())
        assert done.returncode == (2 if "nowhere" in line else 0)
        assert b"Traceback" not in done.stdout + done.stderr
    # A new interpreter whose streams are closed has no objects for them.
    close_all = "sys.stdin = sys.stdout = sys.stderr = None; os.closerange(0, 3)"
    done = fork_command(close_all, plan)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bug_keeps_its_traceback_and_is_exit_1():
    text = (
        "import sys\nfrom jaxkv.tools import main, commands\n"
        "def broken(argv): raise ValueError('a fault of ours')\n"
        "commands.run = broken\nsys.argv = ['jaxkv', 'doctor']\nmain.main()"
    )
    done = run_python(text)
    assert done.returncode == 1
    assert done.stderr.decode().endswith("ValueError: a fault of ours\n")
