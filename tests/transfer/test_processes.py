"""A pool that is spread over two processes, each of which moves its own shards."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.transfer.process_cases import SPECS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
LONG = pytest.mark.long


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two(folder, module, *arguments):
    """Run two processes of a module; give what each has said."""
    address = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children, logs = [], []
    try:
        for number in range(2):
            logs.append(folder / f"{number}.log")
            command = [sys.executable, "-W", "error", "-m", module, address, "2"]
            with logs[-1].open("w") as log:
                children.append(
                    subprocess.Popen(
                        [*command, str(number), *arguments],
                        cwd=ROOT,
                        env=environ,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        end_s = time.monotonic() + TIMEOUT_S
        while any(child.poll() is None for child in children):
            # One that has failed leaves the other waiting for it.
            failed = any(child.poll() for child in children)
            if failed or time.monotonic() > end_s:
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    said = [log.read_text() for log in logs]
    for child in children:
        assert child.returncode == 0, "\n---\n".join(said)
    return said


def test_two_processes(tmp_path):
    modes = ("fused", "staged")
    for text in run_two(tmp_path, "tests.transfer.process_cases", *modes):
        for mode in modes:
            for name in (*SPECS, "int8"):
                assert f"{mode}, {name}: as it should be\n" in text


@pytest.mark.parametrize("case", ["agree", pytest.param("schedule", marks=LONG)])
def test_processes_that_plan_alike_report_alike(tmp_path, case):
    said = run_two(tmp_path, "tests.transfer.plan_cases", case)
    first, second = (re.findall("^[0-9a-f]{64}$", text, re.MULTILINE) for text in said)
    assert len(first) == 1
    assert first == second


def test_processes_that_plan_differently_say_in_which_step(tmp_path):
    said = run_two(tmp_path, "tests.transfer.plan_cases", "differ")
    for number, text in enumerate(said):
        assert f"in step 5 processes [{1 - number}] planned other transfers" in text
