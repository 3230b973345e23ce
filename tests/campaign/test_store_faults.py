"""Each fault of a store by itself: a few steps by default, 10,000 with -m long."""

import gc
import os
import pathlib
import random
import signal
import time

import pytest

from jaxkv.transfer.storage.objects import HEADER_BYTES, ObjectFormat
from tests.campaign import campaign, storage_child, store_faults
from tests.campaign.model import WrongBytesError
from tests.rigs.children import FORKS
from tests.rigs.servers import (
    leaves_sockets,
    mooncake_lending_process,
    mooncake_master,
    redis_cluster,
)
from tests.rigs.waiting import wait_for

STEPS = int(os.environ.get("JAXKV_TEST_FAULT_STEPS", "10000"))
EVERY = pytest.mark.parametrize("fault", store_faults.FAULTS)
STEPS_OF_A_LIFE = 200
MAX_SILENT_S = 300  # Without a line of a process, on a machine that is busy.


def run(fault, total_steps, steps, seed=7):
    counts, failure = campaign.run(
        seed, total_steps=total_steps, steps=steps, fault=fault
    )
    gc.collect()  # Connections to nodes that are gone (`leaves_sockets`).
    assert failure is None, failure.report
    return counts


@leaves_sockets
@pytest.mark.parametrize("fault", ["exchanged", "full", "cluster", "mooncake"])
def test_a_little_of_a_fault_changes_no_byte(fault):
    for seed in range(7, 17):
        counts = run(fault, total_steps=1, steps=150, seed=seed)
        assert counts["block reads compared"] > 100
        # On a busy machine a cluster may be down for all of a short run.
        if counts["store: stored"]:
            break
    assert counts["store: stored"] > 0


def test_a_failure_says_how_to_repeat_its_fault(monkeypatch):
    def fail(rng, counts, note, steps, fault):
        raise ValueError(fault)

    monkeypatch.setattr(campaign, "run_storage", fail)
    _, failure = campaign.run(7, engines=1, steps=9, fault="late", say=lambda line: 0)
    assert str(failure.error) == "late"
    command = "python -m tests.campaign --seed 7 --only 0 --steps 9 --fault late"
    assert command in failure.report


@leaves_sockets
@pytest.mark.long
@EVERY
def test_10_000_steps_with_a_fault_change_no_byte(fault):
    counts = run(fault, total_steps=STEPS, steps=2500)
    assert counts["steps"] >= STEPS
    assert counts[f"store: {store_faults.FAULTS[fault].sign}"] > 0
    assert counts["store: loaded"] > 0
    assert counts["requests served"] > STEPS / 20


@pytest.mark.long
@pytest.mark.parametrize("fault", ["flipped", "exchanged"])
def test_a_store_whose_objects_are_not_checked_is_noticed(fault, monkeypatch):
    """The negative control: objects are not checked."""

    def believe(objects, key, data):
        payload = memoryview(data)[HEADER_BYTES:]
        whole = bytes(payload) + bytes(objects.payload_bytes - len(payload))
        return memoryview(whole)

    monkeypatch.setattr(ObjectFormat, "decode", believe)
    _, failure = campaign.run(7, total_steps=STEPS, steps=2500, fault=fault)
    assert failure is not None
    assert isinstance(failure.error, WrongBytesError)


def numbers_of(log):
    """The last numbers of a life: steps, reads compared, blocks stored and loaded."""
    if not log.exists():
        return [0] * 4
    lines = [line.split() for line in log.read_text().splitlines(keepends=True)]
    lines = [words for words in lines if len(words) == 4 and words[0].isdigit()]
    return [int(word) for word in lines[-1]] if lines else [0] * 4


def is_writing(log):
    """Return whether a life has recorded the begin of a write and not its end."""
    writes = pathlib.Path(f"{log}.writes").read_bytes()
    return writes.count(storage_child.BEGUN) > writes.count(storage_child.ENDED)


@pytest.fixture(params=["folder", "cluster", "mooncake"])
def urls(request, tmp_path):
    """The store's URLs: for the engine that stays, and for the others."""
    if request.param == "folder":
        yield (str(tmp_path / "store"),) * 2
    elif request.param == "cluster":
        with redis_cluster(tmp_path) as (url, _):
            yield url, url
    else:
        # What an engine lends to the pool dies with it.
        with mooncake_master() as (url, _), mooncake_lending_process(url):
            yield url, f"{url}?segment=16MiB"


@pytest.mark.long
def test_engines_that_are_killed_while_they_write_harm_no_other(tmp_path, urls):
    rng, (url, url_of_others) = random.Random(7), urls

    def start(url, life, log, *num_steps):
        arguments = url, tmp_path / "cache", log, 5, life, *num_steps
        child = FORKS.Process(target=storage_child.live, args=arguments)
        child.start()
        return child

    def has_written(child, log):
        assert child.is_alive(), log.read_text()
        num_steps, _, num_stored, _ = numbers_of(log)
        return num_steps >= STEPS_OF_A_LIFE and num_stored

    log, num_lives, num_torn = tmp_path / "stays.log", 0, 0
    stays = start(url, 0, log, STEPS)
    try:
        while stays.is_alive():
            num_lives += 1
            log_path = tmp_path / f"{num_lives}.log"
            log_path.touch()
            child = start(url_of_others, num_lives, log_path)
            try:
                while not has_written(child, log_path):
                    silent_s = time.time() - log_path.stat().st_mtime
                    assert silent_s < MAX_SILENT_S, f"no end: {log_path.read_text()}"
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.2))
                wait_for(is_writing, log_path)
            finally:
                child.kill()
                child.join()
            assert child.exitcode == -signal.SIGKILL, log_path.read_text()
            num_torn += is_writing(log_path)
    finally:
        stays.kill()
        stays.join()
    assert stays.exitcode == 0, log.read_text()
    names = "steps", "block reads compared", "blocks stored", "blocks loaded"
    totals = numbers_of(log)
    print(f"{num_lives} others, {num_torn} killed in a write", end="")
    print("".join(f", {num:,} {name}" for num, name in zip(totals, names, strict=True)))
    assert totals[0] >= STEPS
    assert totals[3] > 0, "it has loaded nothing from the store"
    assert num_torn > 0, "no kill has come while something was written"
