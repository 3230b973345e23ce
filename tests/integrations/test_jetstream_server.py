"""JetStream's gRPC server and its own tests with jaxkv's prefix cache.

JetStream 0.3 is on no package index: .ci/jetstream takes a checkout, makes an
environment for it, and runs this there. The server has a real MaxEngine, tiny, with
random weights, on the CPU.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.jetstream_double import common_length

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 900
CHUNK = 8  # Tokens of the engine's chunks, and of the cache's blocks.

pytestmark = [
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None for name in ("jetstream", "maxtext")
        ),
        reason="no JetStream with MaxText here (.ci/jetstream runs these tests)",
    ),
    pytest.mark.filterwarnings("ignore"),  # Of its generated code.
]


class Server:
    """A server process, and a client."""

    def __init__(self, which, folder):
        self._log = (folder / "log").open("w+")
        # One device, as MaxText's batch is counted per device.
        environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integrations.jetstream_server"),
                *(which, str(folder)),
            ],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.port = int(self._line("PORT"))

    def _line(self, begin):
        for line in self._process.stdout:
            if line.startswith(begin + " "):
                return line.removeprefix(begin + " ")
        raise AssertionError(f"the server has ended: {self.log()[-4000:]}")

    def log(self):
        return Path(self._log.name).read_text(errors="replace")

    def tell(self, word):
        """Send a command; return the state that the server reports."""
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return json.loads(self._line("STATE"))

    def answer(self, prompt, num_tokens=3):
        """Return the tokens that the server decodes over gRPC."""
        import grpc
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        credentials = grpc.local_channel_credentials()
        with grpc.secure_channel(f"127.0.0.1:{self.port}", credentials) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt)
            request = jetstream_pb2.DecodeRequest(
                token_content=content, max_tokens=num_tokens, has_bos=True
            )
            return [
                token
                for response in stub.Decode(request, timeout=WAIT_S)
                for sample in response.stream_content.samples
                for token in sample.token_ids
            ]

    def is_live(self):
        import grpc
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        credentials = grpc.local_channel_credentials()
        with grpc.secure_channel(f"127.0.0.1:{self.port}", credentials) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            request = jetstream_pb2.HealthCheckRequest()
            return stub.HealthCheck(request, timeout=WAIT_S).is_live

    def close(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Start a server of a kind, once."""
    servers = {}

    def serve(which):
        if which not in servers:
            servers[which] = Server(which, tmp_path_factory.mktemp(which))
        return servers[which]

    yield serve
    for server in servers.values():
        server.close()


def prompts():
    """Two conversations over a system prompt of three chunks, asked again; turns."""
    system = [(7 * n * n + 3) % 251 for n in range(3 * CHUNK)]
    first = [*system, *((11 * n) % 251 for n in range(12))]
    second = [*system, *((5 * n + 1) % 251 for n in range(12))]
    return [first, second, first, [*first, 3, 1, 4, 1, 5], second]


def answers(server):
    """Answer the prompts in order, so that each hits the blocks of earlier ones."""
    tokens = []
    for prompt in prompts():
        tokens.append(server.answer(prompt))
        server.tell("flush")
    return tokens


@pytest.fixture(scope="module")
def expected(serve):
    server = serve("none")
    tokens = answers(server)
    assert len(set(map(tuple, tokens))) >= 3, "answers that are alike show nothing"
    # All chunks of each prompt.
    num_chunks = sum(-(-len(prompt) // CHUNK) for prompt in prompts())
    assert server.tell("state")["prefills"] == num_chunks
    return tokens


def test_the_server_answers_the_same_with_fewer_prefills(serve, expected):
    server = serve("jaxkv")
    assert answers(server) == expected
    state = server.tell("state")
    assert state["errors"] == {}
    # Each prompt computes all but the whole chunks that an earlier one had.
    lengths, seen = [], [[]]
    for prompt in prompts():
        common = max(common_length(prompt, earlier) for earlier in seen)
        lengths.append(len(prompt) - common // CHUNK * CHUNK)
        seen.append(prompt[: len(prompt) // CHUNK * CHUNK])
    assert state["prefills"] == sum(-(-length // CHUNK) for length in lengths)
    assert state["hit_tokens"] == sum(map(len, prompts())) - sum(lengths)


def test_errors_in_the_cache_do_not_end_the_server(serve, expected):
    server = serve("jaxkv")
    before = server.tell("break")
    assert answers(server) == expected
    assert server.is_live()
    errors = server.tell("state")["errors"]
    # One load, one question and one save for each prompt.
    num_prompts = len(prompts())
    assert errors == dict.fromkeys(("load", "contains", "save"), num_prompts)
    assert before["errors"] == {}
    assert "broken for a test" in server.log()


def test_jetstreams_own_tests_of_its_orchestrator_pass_with_the_cache():
    from jetstream.core import orchestrator

    tests = Path(orchestrator.__file__).parents[1] / "tests" / "core"
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.rigs.jetstream_plugin", "-k", "chunked_prefill"),
            str(tests / "test_orchestrator.py"),
        ],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_NUM_CPU_DEVICES": "1",
        },
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    assert "6 passed" in said
    # Those with a prefix cache had this one.
    assert "2 caches of jaxkv, 2 blocks stored, 0 errors" in said
