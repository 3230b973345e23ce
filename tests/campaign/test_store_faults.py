"""Each fault of a store by itself: a few steps by default, 10,000 with -m long."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from jaxkv.transfer.storage.objects import HEADER_BYTES, ObjectFormat
from tests.campaign import campaign, storage_child, store_faults
from tests.campaign.model import WrongBytesError

STEPS = int(os.environ.get("JAXKV_TEST_FAULT_STEPS", "10000"))
EVERY = pytest.mark.parametrize("fault", store_faults.FAULTS)
LIVES = int(os.environ.get("JAXKV_TEST_LIVES", "50"))
STEPS_OF_A_LIFE = 200
MOST_S = 300  # Until a process has made some steps, on a machine that is busy.


def run(fault, total_steps, steps, seed=7):
    try:
        counts, failure = campaign.run(
            seed, total_steps=total_steps, steps=steps, fault=fault
        )
    except store_faults.NoDiskError as error:
        pytest.skip(str(error))
    assert failure is None, failure.report
    return counts


@pytest.mark.parametrize("fault", ["exchanged", "full"])
def test_a_little_of_a_fault_changes_no_byte(fault):
    counts = run(fault, total_steps=1, steps=150)
    assert counts["block reads compared"] > 100
    assert counts["store: stored"] > 0


def test_a_failure_says_how_to_repeat_its_fault(monkeypatch):
    def fail(rng, counts, note, steps, fault):
        raise ValueError(fault)

    monkeypatch.setattr(campaign, "run_storage", fail)
    _, failure = campaign.run(7, engines=1, steps=9, fault="late", say=lambda line: 0)
    assert str(failure.error) == "late"
    command = "python -m tests.campaign --seed 7 --only 0 --steps 9 --fault late"
    assert command in failure.report


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
def test_a_store_that_is_believed_is_noticed(fault, monkeypatch):
    """The negative control: objects are not checked."""

    def believe(objects, key, data):
        payload = memoryview(data)[HEADER_BYTES:]
        whole = bytes(payload) + bytes(objects.payload_bytes - len(payload))
        return memoryview(whole)

    monkeypatch.setattr(ObjectFormat, "decode", believe)
    _, failure = campaign.run(7, total_steps=STEPS, steps=2500, fault=fault)
    assert failure is not None
    assert isinstance(failure.error, WrongBytesError)


@pytest.fixture(scope="module")
def forks():
    """Makes processes from one that has imported all, and has started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaign.storage_child"])
    return context


def numbers_of(log):
    """The last numbers of a life: steps, reads compared, blocks stored and loaded."""
    if not log.exists():
        return [0] * 4
    lines = [line.split() for line in log.read_text().splitlines(keepends=True)]
    lines = [words for words in lines if len(words) == 4 and words[0].isdigit()]
    return [int(word) for word in lines[-1]] if lines else [0] * 4


def remove_unfinished(folder):
    """Remove what was left half written, and count it; a store does after an hour."""
    files = [path for path in folder.rglob(".*") if path.is_file()]
    for path in files:
        path.unlink()
    return len(files)


@pytest.mark.long
def test_engines_that_are_killed_while_they_write_leave_no_wrong_byte(forks, tmp_path):
    rng, folder = random.Random(7), tmp_path / "store"

    def start(life, log, *num_steps):
        arguments = folder, tmp_path / "cache", log, 5, life, *num_steps
        child = forks.Process(target=storage_child.live, args=arguments)
        child.start()
        return child

    totals, num_torn = [0] * 4, 0
    for life in range(LIVES):
        log = tmp_path / f"{life}.log"
        child, end_s = start(life, log), time.monotonic() + MOST_S
        try:
            while numbers_of(log)[0] < STEPS_OF_A_LIFE or not numbers_of(log)[2]:
                assert child.is_alive(), log.read_text()
                assert time.monotonic() < end_s, f"no end: {log.read_text()}"
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
        finally:
            child.kill()
            child.join()
        assert child.exitcode == -signal.SIGKILL, log.read_text()
        num_torn += remove_unfinished(folder)
        own = numbers_of(log)
        totals = [a + b for a, b in zip(totals, own, strict=True)]
    log = tmp_path / "last.log"
    child = start(LIVES, log, STEPS_OF_A_LIFE)
    child.join(MOST_S)
    assert child.exitcode == 0, log.read_text()
    assert numbers_of(log)[3] > 0, "it has loaded nothing of those before"
    names = "steps", "block reads compared", "blocks stored", "blocks loaded"
    print(f"{LIVES} lives, {num_torn} files left half written", end="")
    print("".join(f", {num:,} {name}" for num, name in zip(totals, names, strict=True)))
    assert totals[0] >= LIVES * STEPS_OF_A_LIFE
    assert num_torn > 0, "no kill has come while something was written"
