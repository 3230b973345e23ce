"""The log lines of a failing store: one when an outage begins, one when it ends."""

import logging
import random

import numpy as np

from jaxkv.transfer.storage import MemoryStore, ObjectFormat, StorageIO
from jaxkv.transfer.storage.health import StoreHealth
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.waiting import wait_for

KEY = b"k" * 32


def lines_of(health, now_s):
    lines = []
    while (line := health.next_line(now_s)) is not None:
        lines.append(line)
    return lines


def test_a_store_that_flaps_is_told_at_most_once_a_minute_of_each():
    health, rng = StoreHealth("redis://kv"), random.Random(0)
    logged = []
    for tenth in range(36_000):  # An hour.
        now_s = tenth / 10
        if rng.random() < 0.05:
            health.record_failure("read", "unreachable", "Connection refused", now_s)
        elif rng.random() < 0.3:
            health.record_answer("read")
        logged += [(now_s, level) for level, _ in lines_of(health, now_s)]
    times = {
        level: [now_s for now_s, logged_level in logged if logged_level == level]
        for level in (logging.WARNING, logging.INFO)
    }
    for times_s in times.values():
        assert 20 < len(times_s) <= 60
        assert min(np.diff(times_s)) >= 60
    assert [level for _, level in logged] == ([30, 20] * len(logged))[: len(logged)]


def test_calls_that_fail_after_a_store_has_come_back_are_no_second_failure():
    health = StoreHealth("redis://kv")
    health.record_failure("write", "unreachable", "Connection refused", 0.0)
    assert [level for level, _ in lines_of(health, 0.0)] == [logging.WARNING]
    health.record_answer("read")
    assert health.is_up, "it can be reached"
    health.record_failure("write", "unreachable", "Connection reset", 90.0)
    health.record_answer("write")
    assert lines_of(health, 90.5) == []
    [(level, text)] = lines_of(health, 91.0)
    assert level == logging.INFO
    assert "recovered after 91 s (2 failed writes)" in text
    assert not health.has_news


def test_a_full_store_is_down_until_a_write_gets_there_whatever_it_reads():
    health = StoreHealth("/kv")
    health.record_failure("write", "full", "No space left on device", 0.0)
    for what in ("read", "list", "delete"):
        health.record_answer(what)
        assert not health.is_up
    [(_, text)] = lines_of(health, 0.0)
    assert "fails: write full (No space left on device)" in text
    health.record_answer("write")
    assert health.is_up


def test_a_failure_that_has_passed_before_anybody_looked_is_logged():
    health = StoreHealth("/kv")
    health.record_failure("read", "other", "once", 0.0)
    health.record_answer("read")
    [(first, text), (second, end)] = lines_of(health, 3.0)
    assert (first, second) == (logging.WARNING, logging.INFO)
    assert text.startswith("the store /kv fails: read other (once).")
    assert end == "the store /kv recovered after 3 s (1 failed read)"
    assert not health.has_news


def test_an_outage_is_counted_from_its_first_failure_however_late_its_warning():
    health = StoreHealth("/kv")
    for now_s in (0.0, 20.0):
        health.record_failure("write", "denied", "once", now_s)
        health.record_answer("write")
        lines_of(health, now_s + 5.0)
    # It began within a minute of the last warning, and goes on.
    health.record_failure("read", "denied", "Permission denied", 30.0)
    health.record_failure("write", "denied", "Permission denied", 40.0)
    assert lines_of(health, 59.0) == []
    [(level, text)] = lines_of(health, 61.0)
    assert level == logging.WARNING
    assert "read denied (Permission denied)" in text
    health.record_failure("write", "denied", "Permission denied", 80.0)
    health.record_answer("read")
    assert lines_of(health, 90.0) == []
    health.record_answer("write")
    [(level, text)] = lines_of(health, 130.0)
    assert level == logging.INFO
    assert text.endswith(" recovered after 100 s (1 failed read, 2 failed writes)")


def test_a_disk_that_stays_full_is_logged_once_an_hour_and_what_else_fails_at_once():
    health = StoreHealth("/kv")
    logged = []
    for minute in range(121):  # Each listing has it tried again.
        now_s = 60.0 * minute
        health.record_failure("write", "full", "No space left on device", now_s)
        health.record_answer("write")
        logged += [(minute, level) for level, _ in lines_of(health, now_s + 2.0)]
    assert logged == [
        (minute, level)
        for minute in (0, 60, 120)
        for level in (logging.WARNING, logging.INFO)
    ]
    health.record_failure("write", "full", "No space left on device", 7300.0)
    assert lines_of(health, 7300.0) == []
    health.record_failure("read", "unreachable", "Stale file handle", 7301.0)
    [(_, text)] = lines_of(health, 7301.0)
    assert "read unreachable (Stale file handle)" in text


def test_invalid_objects_are_logged_once_for_each_reason():
    health = StoreHealth("/kv")
    for reason in ("torn", "checksum", "torn"):
        health.record_refusal(reason)
        health.record_refusal(reason)
    texts = [text for _, text in lines_of(health, 0.0)]
    assert ["invalid objects (torn)" in text for text in texts] == [True, False]
    health.record_refusal("torn")
    assert lines_of(health, 1000.0) == []
    assert health.is_up


def test_a_store_that_answers_nothing_is_down_and_up_when_it_does(caplog):
    now_s = 0.0
    faulty = FaultyStore(MemoryStore(), 0, Faults(hang=1.0))
    blocks = ObjectFormat(b"model", "u8[4]", 4)
    with StorageIO(faulty, blocks, clock=lambda: now_s) as storage:
        storage.submit_reads([KEY], deadline_s=5.0)
        written = storage.submit_writes([(KEY, [b"body"])])
        wait_for(lambda: faulty.num_faults["hang"] == 2)  # The store has both.
        storage.log_health()
        assert storage.is_up
        now_s = 6.0
        ended = [(c.kind, c.outcome, c.reason) for c in storage.poll()]
        assert ended == [("read", "late", None), ("write", "failed", "down")]
        assert written[0] is not None
        assert not storage.is_up
        assert storage.stats.errors == {"read late": 1}
        storage.log_health()
        faulty.faults.hang = 0.0
        faulty.let_go()
        wait_for(lambda: storage.is_up)
        now_s = 8.0
        storage.log_health()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no answer in time" in caplog.text
    assert "Until it answers, requests do not wait for it." in caplog.text


def test_the_time_of_each_answer_is_handed_out_once():
    with StorageIO(MemoryStore(), ObjectFormat(b"model", "u8[4]", 4)) as storage:
        storage.submit_writes([(KEY, [b"body"])])
        storage.wait()
        storage.submit_reads([KEY, b"n" * 32] * 10, deadline_s=float("inf"))
        storage.wait(min_ended=20)
        taken = storage.take_latencies().items()
        assert {kind: len(durations_s) for kind, durations_s in taken} == {
            "read": 20,
            "write": 1,
        }
        assert storage.take_latencies() == {}
