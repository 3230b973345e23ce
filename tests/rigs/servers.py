"""Servers of others on this machine, for as long as a test runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_STARTED_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def redis_program() -> str:
    """Find a server, or skip the test."""
    for name in ("valkey-server", "redis-server"):
        if program := shutil.which(name):
            return program
    pytest.skip("neither valkey-server nor redis-server is installed")


@contextlib.contextmanager
def redis_server(
    folder: Path, *options: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run Redis, or Valkey, at a socket in `folder` and at a port: a free one."""
    port = port or free_port()
    path = folder / "redis.sock"
    words = [
        redis_program(),
        *("--port", str(port)),
        *("--bind", "127.0.0.1"),
        *("--unixsocket", str(path)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--dir", str(folder)),
        *options,
    ]
    with _running(words, port) as process:
        yield f"redis://127.0.0.1:{port}/0", process


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run moto's S3 with an empty bucket, at a free port."""
    for name in ("moto", "flask", "tensorstore"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(words, port) as process:
        url = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{url}/{bucket}", method="PUT")
        with urllib.request.urlopen(request):
            pass
        yield url, process


@contextlib.contextmanager
def _running(words: list[str], port: int) -> Iterator[subprocess.Popen]:
    environ = {
        name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ
    }
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
    ) as process:
        try:
            _wait_for(port, process)
            yield process
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen) -> None:
    end_s = time.monotonic() + _STARTED_S
    while time.monotonic() < end_s:
        assert process.poll() is None, f"{process.args} ended: {process.returncode}"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.02)
    raise TimeoutError(f"{process.args} does not answer.")
