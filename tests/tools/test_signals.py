"""SIGINT and SIGTERM at any moment: the exit code, one line, no child left."""

import ast
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

import jaxkv
from jaxkv.tools import COMMANDS
from tests.rigs import children
from tests.rigs.command_line import LAUNCHER, ROOT, run_command, run_python
from tests.rigs.waiting import wait_for

BENCH = ["bench", "transfer", "--sizes", "1MiB,8MiB", "--rounds", "50"]
DEMO = ["demo", "--conversations", "1"]
REPLAY = ["replay", "synthetic:20000", "--policy", "arc"]
PLAN = ["plan", "synthetic:20000", "--kv-bytes-per-token", "128KiB"]
PLAN += ["--prefill-tokens-per-s", "20000", "--policy", "arc"]
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
TIMEOUT_S = 30.0

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="there is no /proc here"
)


def start(args):
    process = subprocess.Popen(
        [*LAUNCHER, *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    # The interpreter before is not ours; it has no handler for SIGTERM.
    status = pathlib.Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = status.read_text(encoding="ascii").partition("SigCgt:")[2].split()[0]
        if int(caught, 16) & 1 << signal.SIGTERM - 1:
            break
        time.sleep(0.001)
    return process


def check(args, number, delay_s):
    """Send a signal after a while; tell whether that was before the end."""
    process = start(args)
    time.sleep(delay_s)
    start_s = time.monotonic()
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    about = f"{args} {number.name} after {delay_s:.4f} s: {err.decode()}"
    if process.returncode == 0:
        return False
    assert process.returncode == 128 + number, about
    lines = [line for line in err.decode().splitlines() if not line.endswith(" ...")]
    assert lines == [f"jaxkv {args[0]}: {WORDS[number]}"], about
    assert time.monotonic() - start_s < TIMEOUT_S / 2, about
    return True


def campaign(num, most_s, number, commands, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_ended = 0
    for _ in range(num):
        # As many in the first tenth of a second as later: imports begin there.
        most = rng.choice([0.1, most_s])
        num_ended += check(rng.choice(commands), number, rng.uniform(0, most))
    # Some commands are over before a late signal comes.
    assert num_ended >= num // 2


def test_a_benchmark_ends_on_a_signal_while_it_imports():
    campaign(2, 1.0, signal.SIGTERM, [BENCH], seed=15)


@pytest.mark.long
def test_a_signal_at_a_random_moment_is_one_line_for_every_command():
    seed = random.SystemRandom().randrange(1 << 32)
    commands = [BENCH, DEMO, REPLAY, PLAN, ["doctor"]]
    campaign(60, 8.0, signal.SIGINT, commands, seed)
    campaign(30, 8.0, signal.SIGTERM, commands, seed + 1)


def test_a_signal_ends_children_and_a_main_thread_that_never_returns():
    """Such as in a wait for a device: no handler of Python runs there."""
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
        # Whoever adopts it may be slow to take note of its end.
        return (
            not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        )

    wait_for(has_ended)


def test_what_is_public_is_imported_when_it_is_used():
    source = pathlib.Path(jaxkv.__file__).read_text(encoding="utf-8")
    modules = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
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
    assert COMMANDS == ("demo", "replay", "plan", "bench", "doctor")


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
    replay = "replay synthetic:9 --policy lru --capacity 10"
    reader, writer = os.pipe()
    os.close(reader)
    done = run_command("--help", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    close_reader = "r, w = os.pipe(); os.close(r); sys.stdout = open(w, 'w')"
    done = fork_command(close_reader, replay)
    assert (done.returncode, done.stderr) == (141, "")
    code = "import os, sys\nfor fd in {}: os.close(fd)\n"
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    for line, closed in (("--version", (1,)), ("replay nowhere", (2,))):
        done = run_python(code.format(closed), *LAUNCHER, *line.split())
        assert done.returncode == (2 if "nowhere" in line else 0)
        assert b"Traceback" not in done.stdout + done.stderr
    # A new interpreter whose streams are closed has no objects for them.
    close_all = "sys.stdin = sys.stdout = sys.stderr = None; os.closerange(0, 3)"
    done = fork_command(close_all, replay)
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
