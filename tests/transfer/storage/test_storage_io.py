"""Reads and writes in the background."""

import pytest

from jaxkv.transfer.storage import LocalStore, MemoryStore, ObjectFormat, StorageIO

FOREVER = float("inf")


def key(n):
    return n.to_bytes(32, "big")


def payload(n, size=100):
    return bytes([n % 251]) * size


def wait_all(storage, num):
    done = []
    while len(done) < num:
        more = storage.wait(60)
        assert more, f"{len(done)} of {num} completed"
        done += more
    return done


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path))


def test_blocks_come_back_as_they_went(store):
    with StorageIO(store, ObjectFormat(b"n", "u8[100]", 100)) as storage:
        tickets = storage.submit_writes((key(n), [payload(n)]) for n in range(200))
        assert None not in tickets
        done = wait_all(storage, 200)
        assert {each.ticket for each in done} == set(tickets)
        assert {(each.kind, each.outcome) for each in done} == {("write", "done")}
        tickets = storage.submit_reads(map(key, range(201)), FOREVER)
        done = {each.ticket: each for each in wait_all(storage, 201)}
        for n, ticket in enumerate(tickets[:200]):
            assert done[ticket].outcome == "done"
            assert bytes(done[ticket].payload) == payload(n)
        assert done[tickets[200]].outcome == "missing"
        storage.list_all()
        keys, ended = [], False
        while not ended:
            pages, ended = storage.take_pages()
            keys += [each for page in pages for each in page.keys]
        assert sorted(keys) == [key(n) for n in range(200)]
        storage.submit_probes([key(5), key(500)], FOREVER)
        assert sorted(each.outcome for each in wait_all(storage, 2)) == [
            "done",
            "missing",
        ]
        assert storage.stats.open_read_bytes == 0
        assert storage.stats.queued_write_bytes == 0
