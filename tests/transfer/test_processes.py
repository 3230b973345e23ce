"""A pool that is spread over two processes, each of which moves its own shards."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.transfer.process_cases import SPECS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes(tmp_path):
    address, modes = f"127.0.0.1:{free_port()}", ("fused", "staged")
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children, logs = [], []
    try:
        for number in range(2):
            logs.append(tmp_path / f"{number}.log")
            command = [sys.executable, "-W", "error", "-m"]
            command += ["tests.transfer.process_cases", address, "2", str(number)]
            with logs[-1].open("w") as log:
                children.append(
                    subprocess.Popen(
                        [*command, *modes],
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
    for child, text in zip(children, said, strict=True):
        assert child.returncode == 0, "\n---\n".join(said)
        for mode in modes:
            for name in (*SPECS, "int8"):
                assert f"{mode}, {name}: as it should be\n" in text
