"""Servers of others on this machine, for as long as a test runs."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from jaxkv.transfer.storage import open_store
from tests.rigs.waiting import wait_for

_STARTED_S = 60.0
# A replica takes over soon, however old its last contact with the primary is.
OF_CLUSTER = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "1000"),
    *("--cluster-replica-validity-factor", "0"),
    *("--repl-diskless-sync-delay", "0"),
)

# redis-py leaves it to the collector to close connections to nodes that are gone.
leaves_sockets = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def http_server(answer: Callable[[], tuple[int, str]], port: int = 0) -> Iterator[int]:
    """Answer any request with the status and the text of `answer`; give the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            status, text = answer()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def redis_program() -> str:
    for name in ("valkey-server", "redis-server"):
        if program := shutil.which(name):
            return program
    pytest.skip("neither valkey-server nor redis-server is installed")


def redis_client() -> str:
    program = redis_program().replace("-server", "-cli")
    if not Path(program).exists():
        pytest.skip(f"{program} is not installed")
    return program


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
def redis_cluster(
    folder: Path, num_replicas: int = 0, *, has_tls: bool = False
) -> Iterator[tuple[str, dict[int, subprocess.Popen]]]:
    """Run a cluster of three primaries, each with replicas: its URL, nodes by port.

    The primaries are the first nodes; the URL has the very first. Each node has a
    folder in `folder`, by its number.
    """
    client, scheme, options, query = [redis_client()], "redis", OF_CLUSTER, ""
    if has_tls:
        _make_certificate(folder)
        client += ["--tls", "--cacert", f"{folder}/certificate"]
        scheme, query = "rediss", f"?ssl_ca_certs={folder}/certificate"
        options += ("--tls-cluster", "yes", "--tls-auth-clients", "no")
        options += ("--tls-cert-file", f"{folder}/certificate")
        options += ("--tls-ca-cert-file", f"{folder}/certificate")
        options += ("--tls-key-file", f"{folder}/key")
    with contextlib.ExitStack() as stack:
        nodes = {}
        for number in range(3 * (1 + num_replicas)):
            # The nodes talk to one another at a port that is 10,000 higher.
            port = next(port for port in iter(free_port, None) if port < 50_000)
            (folder / str(number)).mkdir()
            ports = ("--port", "0", "--tls-port", str(port)) if has_tls else ()
            server = redis_server(folder / str(number), *options, *ports, port=port)
            _, nodes[port] = stack.enter_context(server)
        words = [*client, "--cluster", "create", "--cluster-yes"]
        words += [f"127.0.0.1:{port}" for port in nodes]
        words += ["--cluster-replicas", str(num_replicas)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        for port in nodes:
            wait_for(_is_whole, client, port)
        yield f"{scheme}+cluster://127.0.0.1:{next(iter(nodes))}{query}", nodes


def _make_certificate(folder: Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    words = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-out", f"{folder}/certificate", "-keyout", f"{folder}/key"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def _is_whole(client: list[str], port: int) -> bool:
    """Return whether a cluster node knows the owner of each slot."""
    words = [*client, "-p", str(port), "cluster", "info"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return "cluster_state:ok" in done.stdout


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


def mooncake_program() -> str:
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        pytest.skip(
            "a client of Mooncake listens on all interfaces: .ci/mooncake runs this "
            "where there is none but loopback"
        )
    try:
        open_store("mooncake://127.0.0.1:1").close()
    except (ImportError, ValueError) as error:  # Not registered
        pytest.skip(f"examples/mooncake is not installed: {error}")
    package = importlib.util.find_spec("mooncake")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).with_name("mooncake_master"))


@contextlib.contextmanager
def mooncake_master(port: int | None = None) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a Mooncake master at a free port; its pool has what its clients lend."""
    program, port = mooncake_program(), port or free_port()
    os.chmod(program, 0o755)  # As its own launcher does.
    words = [program, f"-rpc_port={port}", "-rpc_address=127.0.0.1"]
    words += [f"-metrics_port={free_port()}", "-metrics_host=127.0.0.1"]
    # What a client that is gone had lent is forgotten soon.
    words += ["-client_ttl=2", "-default_kv_lease_ttl=1000"]
    libraries = {"LD_LIBRARY_PATH": str(Path(program).parent)}
    with _running(words, port, libraries) as process:
        yield f"mooncake://127.0.0.1:{port}", process


@contextlib.contextmanager
def mooncake_lender(url: str, num_bytes: int = 64 << 20) -> Iterator[Any]:
    """Run a client of a master that lends memory to its pool."""
    mooncake_program()
    from mooncake.store import MooncakeDistributedStore

    client, place = MooncakeDistributedStore(), url.removeprefix("mooncake://")
    words = "127.0.0.1", "P2PHANDSHAKE", num_bytes, 0, "tcp", "", place
    assert client.setup(*words) == 0
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def mooncake_lending_process(url: str) -> Iterator[subprocess.Popen]:
    """Run a process that lends memory to a master's pool."""
    mooncake_program()
    code = (
        "import sys; from tests.rigs.servers import mooncake_lender as lender\n"
        f"with lender({url!r}): print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _running(
    words: list[str], port: int, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen]:
    environ = {
        name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ
    } | environment
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
