"""Servers and listings that lie: what they send is bounded before it is kept."""

import contextlib
import itertools
import socketserver
import threading

import pytest

from jaxkv.tools.store import namespaces
from jaxkv.transfer.storage import StoreError, open_store, store
from jaxkv.transfer.storage.store import MemoryStore, listed_names

BLOCK_BYTES = 4096
MIB = 1 << 20


@contextlib.contextmanager
def serving(server):
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class FalseRedis(socketserver.ThreadingTCPServer):
    """Answers each GETRANGE and SCAN with the same pieces, anything else with OK."""

    daemon_threads = block_on_close = True

    def __init__(self, pieces):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pieces, self.num_sent = pieces, 0


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError, ValueError):
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:-2])
                is_asked = words[0] in (b"GETRANGE", b"SCAN")
                pieces = self.server.pieces if is_asked else [b"+OK\r\n"]
                for piece in pieces() if callable(pieces) else pieces:
                    self.wfile.write(piece)
                    self.server.num_sent += is_asked * len(piece)


def endless(start, piece):
    return lambda: itertools.chain([start], itertools.repeat(piece, 400 * MIB))


ANSWERS = {
    "value_of_400_MB": endless(b"$400000000\r\n", bytes(1 << 16)),
    "line_without_end": endless(b"+", b"x" * (1 << 16)),
    "array_without_end": endless(b"*1000000000\r\n", b":1\r\n" * (1 << 14)),
    "arrays_in_arrays": endless(b"", b"*1\r\n" * (1 << 14)),
    "value_longer_than_asked": [b"$8192\r\n", bytes(8192), b"\r\n"],
    "number": [b":5\r\n"],
    "length_that_is_no_number": [b"$x\r\n"],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_redis_that_lies_about_a_values_length_costs_little(name):
    server = FalseRedis(ANSWERS[name])
    with serving(server) as port:
        store = open_store(f"redis://127.0.0.1:{port}/0?protocol=2")
        try:
            [answer] = store.get(["ab/1.0"], BLOCK_BYTES)
        except StoreError as error:
            answer = error
        store.close()
    assert isinstance(answer, StoreError) or answer is None
    # What the sockets of both sides keep is sent, too.
    assert server.num_sent < 32 * MIB


def test_a_scan_of_redis_without_an_end_comes_to_an_end(monkeypatch):
    monkeypatch.setattr(store, "_MAX_NAMES", 1000)
    for names in (b"*1\r\n$6\r\nab/1.0\r\n", b"*0\r\n"):
        with serving(FalseRedis([b"*2\r\n$1\r\n7\r\n" + names])) as port:
            redis = open_store(f"redis://127.0.0.1:{port}/0?protocol=2")
            with pytest.raises(StoreError, match="listing has over 1,000 names"):
                list(listed_names(redis, "ab"))
            redis.close()


class Endless(MemoryStore):
    """Lists namespaces without an end, and names that are none."""

    def list(self, folder):
        for n in itertools.count():
            yield [f"{folder}/{n:032x}/order", "\x1b[2J", "x" * 5000]


def test_namespaces_without_an_end_are_an_error(monkeypatch):
    monkeypatch.setattr(namespaces, "_MAX_NAMESPACES", 100)
    with pytest.raises(StoreError, match="over 100 namespaces"):
        namespaces.read_namespaces(Endless(), lambda *_: None)
    monkeypatch.setattr(store, "_MAX_NAMES", 100)
    pages = listed_names(Endless(), "ab")
    assert next(pages) == [f"ab/{0:032x}/order"]
    with pytest.raises(StoreError, match="its listing has over 100 names"):
        list(pages)
