"""Workers that agree on how transfers ended, as threads that share a store of keys."""

import collections
import contextlib
import dataclasses
import gc
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.exchange import Exchange, open_exchanges
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    OffloadMetadata,
    TierReport,
)
from jaxkv.scheduling.storage_worker import StorageWorker
from jaxkv.scheduling.tier_agreement import KEYS_PER_STEP, TierAgreement
from jaxkv.scheduling.watchdog import Watchdog
from jaxkv.scheduling.worker import AgreementError, PlanMismatchError
from jaxkv.transfer import kernels
from jaxkv.transfer.storage import MemoryStore, ObjectFormat, StorageIO
from tests.rigs.refused_threads import refused_threads

NUM_BLOCKS = 8
# Longer than any wait for what does come, however slow the machine is.
TIMEOUT_S = 60.0


class KeyValues:
    """jax's coordination service, as far as it is used."""

    def __init__(self):
        self.values = {}
        self.most_keys = 0
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.most_keys = max(self.most_keys, len(self.values))
            self._changed.notify_all()

    def key_value_dir_get(self, key):
        with self._changed:
            own = [name for name in self.values if name.startswith(f"{key}/")]
            return [(name, self.values[name]) for name in own]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self.values, timeout_in_ms / 1e3
            ):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self._changed:
            del self.values[key]


def run_all(num_processes, body):
    """Run `body(process)` in a thread for each; give what each returns or raises."""
    results = [None] * num_processes

    def run(process):
        try:
            results[process] = body(process)
        except Exception as error:
            results[process] = error

    threads = [threading.Thread(target=run, args=(p,)) for p in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(autouse=True)
def own_programs(monkeypatch):
    """Let each process, a thread here, have programs of its own: some of them fail."""
    monkeypatch.setattr("jaxkv.transfer.engine.copier_of", kernels.CopierSpec.make)


@pytest.fixture
def store():
    return KeyValues()


@pytest.fixture
def connect(monkeypatch, store):
    """Make the worker of a process, and the pool that it serves."""
    local = threading.local()

    def open_some(timeout_s, topics):
        process, num_processes = local.process
        return [
            Exchange(store, process, num_processes, topic, timeout_s)
            for topic in topics
        ]

    monkeypatch.setattr("jaxkv.scheduling.worker.open_exchanges", open_some)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def make(process, num_processes=2, **arguments):
        local.process = process, num_processes
        pool = jnp.arange(NUM_BLOCKS * 4, dtype=jnp.float32).reshape(NUM_BLOCKS, 4)
        engine = TransferEngine(pool, NUM_BLOCKS)
        arguments = {
            "report_after_steps": 2,
            "agreement_timeout_s": TIMEOUT_S,
            **arguments,
        }
        return OffloadWorker(engine, **arguments), engine, pool

    return make


def plan(*, store=None, load=None, event=0, flush=False):
    """Store and load one block each, (device block, host block)."""
    return OffloadMetadata(
        load_event=NO_EVENT if load is None else event,
        load_device_blocks=() if load is None else load[:1],
        load_host_blocks=() if load is None else load[1:],
        load_event_to_reqs={} if load is None else {event: (f"r{event}",)},
        store_event=NO_EVENT if store is None else event,
        store_device_blocks=() if store is None else store[:1],
        store_host_blocks=() if store is None else store[1:],
        need_flush=flush,
    )


def fail(engine, direction):
    """Let what the engine moves in a direction fail from now on."""

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")

    setattr(engine._copier, f"{direction}_program", refuse)


def get_stuck(engine):
    """Let nothing end any more, as far as the engine knows."""
    engine._queue.report = lambda: []


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_store_that_fails_in_one_process_fails_in_all(connect, num_processes, after):
    def body(process):
        worker, engine, pool = connect(
            process, num_processes, report_after_steps=after, check_plans=True
        )
        outputs = []
        for number in range(6):
            save_program = engine._copier.save_program
            if number == 1 and process == 1:
                fail(engine, "save")
            pool = worker.start(plan(store=(number, number), event=number), pool)
            engine._copier.save_program = save_program
            outputs.append(worker.poll())
        pool, last = worker.drain(pool)
        assert worker.num_in_flight == 0
        return [*outputs, last], worker.plan_digest, worker.blocks_stored

    results = run_all(num_processes, body)
    outputs, digest, blocks_stored = results[0]
    assert results[1:] == results[:-1]
    assert len(digest) == 32
    assert blocks_stored == 5
    for number in range(6):
        due = min(number + after, 6)
        told = outputs[due]
        assert (number in told.failed_store_events) == (number == 1), number
        assert (number in told.completed_store_events) == (number != 1), number


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_load_that_fails_in_one_process_fails_in_all(connect, num_processes):
    def body(process):
        worker, engine, pool = connect(process, num_processes)
        pool = worker.start(plan(store=(1, 0)), pool)
        pool, first = worker.drain(pool)
        load_program = engine._copier.load_program
        if process == 0:
            fail(engine, "load")
        pool = worker.start(plan(load=(5, 0), event=1), pool)
        engine._copier.load_program = load_program
        pool = worker.start(plan(load=(6, 0), event=2), pool)
        pool, second = worker.drain(pool)
        assert worker.blocks_loaded == 1
        np.testing.assert_array_equal(pool[6], pool[1])
        return first, second

    for result in run_all(num_processes, body):
        assert result == (
            ConnectorOutput(completed_store_events=(0,)),
            ConnectorOutput(finished_recving=("r2",), failed_recving=("r1",)),
        )


def test_the_digest_covers_what_was_agreed(connect, store):
    def digests(failing):
        store.values.clear()

        def body(process):
            worker, engine, pool = connect(process, check_plans=True)
            if failing and process == 1:
                fail(engine, "save")
            pool = worker.start(plan(store=(1, 0)), pool)
            before = worker.plan_digest
            worker.drain(pool)
            return before, worker.plan_digest

        return run_all(2, body)

    (before, good), (before_too, good_too) = digests(failing=False)
    (same, bad), _ = digests(failing=True)
    assert before == before_too == same
    assert good == good_too
    assert len({before, good, bad}) == 3


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_transfer_that_is_stuck_in_one_process_fails_in_all(connect, num_processes):
    def body(process):
        worker, engine, pool = connect(process, num_processes, deadline_s=0.2)
        if process == 1:
            get_stuck(engine)
        pool = worker.start(plan(store=(1, 0), event=4), pool)
        assert worker.poll() == ConnectorOutput()
        pool = worker.start(plan(), pool)
        pool = worker.start(plan(), pool)
        output = worker.poll()
        assert worker.num_in_flight == 0
        return output

    expected = ConnectorOutput(failed_store_events=(4,))
    assert run_all(num_processes, body) == [expected] * num_processes


def test_a_deadline_is_not_missed_while_nobody_waits(connect):
    def body(process):
        worker, _, pool = connect(process, deadline_s=1.0)
        pool = worker.start(plan(store=(1, 0), event=4), pool)
        time.sleep(1.5)  # As if it compiled.
        return worker.drain(pool)[1]

    expected = ConnectorOutput(completed_store_events=(4,))
    assert run_all(2, body) == [expected, expected]


@pytest.mark.parametrize("call", ["start", "drain", "flush"])
def test_a_transfer_that_is_stuck_ends_the_run_where_no_deadline_is_sooner(
    connect, call
):
    def body(process):
        worker, engine, pool = connect(
            process, deadline_s=None, agreement_timeout_s=0.5
        )
        if process == 1:
            get_stuck(engine)
        pool = worker.start(plan(store=(1, 0), event=4), pool)
        start_s = time.monotonic()
        try:
            if call == "start":
                pool = worker.start(plan(), pool)
                worker.start(plan(), pool)
            elif call == "flush":
                pool = worker.start(plan(flush=True), pool)
                worker.start(plan(), pool)
            else:
                worker.drain(pool)
        finally:
            assert time.monotonic() - start_s < 10
            # There is no going on afterwards.
            with pytest.raises(AgreementError):
                worker.drain(pool)
        return None

    healthy, stuck = run_all(2, body)
    assert isinstance(stuck, AgreementError)
    assert "store event 4 of step 1: not over in process 1 within" in str(stuck)
    assert (stuck.step, stuck.processes) == (1, (1,))
    assert isinstance(healthy, AgreementError)
    assert "processes [1] have not said how store event 4 of step 1" in str(healthy)
    assert (healthy.step, healthy.processes) == (1, (1,))


@pytest.mark.parametrize("call", ["start", "drain"])
def test_processes_that_have_stalled_are_named(connect, call):
    have_compiled = threading.Barrier(4)

    def body(process):
        worker, _, pool = connect(process, 4, agreement_timeout_s=1.0)
        pool = worker.start(plan(store=(1, 0), event=4), pool)
        have_compiled.wait(TIMEOUT_S)
        if process in (1, 3):
            return None
        if call == "drain":
            worker.drain(pool)
        for _ in range(2):
            pool = worker.start(plan(), pool)

    results = run_all(4, body)
    assert results[1] is results[3] is None
    for error in (results[0], results[2]):
        assert isinstance(error, AgreementError)
        assert error.processes == (1, 3)
        assert re.search(r"agreement_timeout_s=1: they have stalled", str(error))


def test_plans_are_waited_for_no_longer_either(connect):
    are_ready = threading.Barrier(2)

    def body(process):
        worker, engine, pool = connect(
            process, check_plans=True, agreement_timeout_s=1.0
        )
        are_ready.wait(TIMEOUT_S)
        pool = worker.start(plan(), pool)
        if process == 1:
            return None
        try:
            worker.start(plan(store=(1, 0)), pool)
        finally:
            assert engine.num_in_flight == worker.num_in_flight == 0

    error, _ = run_all(2, body)
    assert isinstance(error, AgreementError)
    assert (error.step, error.processes) == (2, (1,))
    assert "have not said what they plan in step 2" in str(error)


def test_other_transfers_are_not_taken_for_the_same(connect):
    def body(process):
        worker, _, pool = connect(process)
        pool = worker.start(plan(store=(1, 0), event=4 + process), pool)
        with pytest.raises(PlanMismatchError) as first:
            worker.drain(pool)
        with pytest.raises(PlanMismatchError):
            worker.drain(pool)
        return str(first.value)

    for process, text in enumerate(run_all(2, body)):
        assert f"in step 1 processes [{1 - process}] started other transfers" in text


def test_other_plans_are_refused_before_anything_is_started(connect):
    def body(process):
        worker, engine, pool = connect(process, check_plans=True)
        pool = worker.start(plan(), pool)
        try:
            worker.start(plan(store=(1, process)), pool)
        finally:
            assert engine.num_in_flight == worker.num_in_flight == 0

    for process, error in enumerate(run_all(2, body)):
        assert isinstance(error, PlanMismatchError)
        assert f"in step 2 processes [{1 - process}] planned other" in str(error)


def test_old_keys_are_deleted(connect, store):
    def body(process):
        worker, _, pool = connect(process, 3, report_after_steps=1, check_plans=True)
        for number in range(40):
            pool = worker.start(plan(store=(1, 0), event=number), pool)
            worker.poll()
        worker.drain(pool)

    assert run_all(3, body) == [None] * 3
    # Two exchanges, in each of which a process has its last key and the one before.
    assert 0 < store.most_keys <= 2 * 3 * 2


def test_steps_without_transfers_say_nothing(connect, store):
    def body(process):
        worker, _, pool = connect(process)
        for _ in range(5):
            pool = worker.start(plan(), pool)
            assert worker.poll() == ConnectorOutput()
        assert worker.drain(pool)[1] == ConnectorOutput()

    assert run_all(2, body) == [None, None]
    assert store.most_keys == 0


def test_what_is_known_is_said_before_it_is_due(connect, store):
    """So that nobody waits for it in the step in which it is."""
    said, heard = threading.Event(), threading.Event()

    def body(process):
        worker, _, pool = connect(process, report_after_steps=3)
        pool = worker.start(plan(store=(1, 0)), pool)
        while worker._agreement._unsent:
            worker.poll()
            time.sleep(0.001)
        if process == 1:
            said.set()
            assert heard.wait(TIMEOUT_S)
            return
        assert said.wait(TIMEOUT_S)
        store.blocking_key_value_get("outcomes/0/1", 10_000)
        for _ in range(3):
            pool = worker.start(plan(), pool)  # The other is still in the first.
        heard.set()
        assert worker.poll() == ConnectorOutput(completed_store_events=(0,))

    assert run_all(2, body) == [None, None]


def test_a_service_that_fails_ends_the_run(connect, store, monkeypatch):
    def refuse(key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the leader has gone")

    monkeypatch.setattr(store, "key_value_dir_get", refuse)

    def body(process):
        worker, _, pool = connect(process)
        pool = worker.start(plan(store=(1, 0)), pool)
        worker.drain(pool)

    for error in run_all(2, body):
        assert isinstance(error, AgreementError)
        assert "UNAVAILABLE: the leader has gone" in str(error)
        assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
        assert error.processes == ()


def test_a_service_that_does_not_answer_is_not_waited_for(connect, store, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(store, "key_value_set", lambda *_: answer.wait())

    def body(process):
        worker, _, pool = connect(process, agreement_timeout_s=0.3)
        pool = worker.start(plan(store=(1, 0)), pool)
        worker.drain(pool)

    try:
        for error in run_all(2, body):
            assert isinstance(error, AgreementError)
            assert error.processes == (0, 1)
    finally:
        answer.set()


def test_a_worker_that_is_forgotten_leaves_no_thread(connect):
    def threads():
        return [each for each in threading.enumerate() if each not in before]

    before = threading.enumerate()

    def body(process):
        # A thread may be in a call to the service for as long.
        worker, _, pool = connect(process, agreement_timeout_s=TIMEOUT_S / 3)
        pool = worker.start(plan(store=(1, 0)), pool)
        worker.drain(pool)
        assert len(threads()) >= 2

    assert run_all(2, body) == [None, None]
    gc.collect()
    end_s = time.monotonic() + TIMEOUT_S
    while threads() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threads() == []


def test_closing_waits_for_the_thread_that_talks_to_the_service(store):
    exchange = Exchange(store, 0, 2, "topic", TIMEOUT_S)
    exchange.send("hello", 1)  # The thread waits for the answer of process 1.
    exchange.close()
    assert not exchange._thread.is_alive()


def test_rounds_without_a_thread_wait_until_one_can_be_started(store):
    exchanges = [Exchange(store, n, 2, "topic", TIMEOUT_S) for n in range(2)]
    with refused_threads() as refused:
        for exchange in exchanges:
            exchange.send("hello", 1)
        exchanges[0].send("and again", 2)
    assert len(refused) == 3
    exchanges[1].send("and again", 2)
    for text in ("hello", "and again"):
        for exchange in exchanges:
            assert exchange.receive("it") == [text, text]
    for exchange in exchanges:
        exchange.close()


def test_a_store_that_is_full_for_one_process_is_full_for_all(store):
    exchanges = [Exchange(store, n, 2, "topic", TIMEOUT_S) for n in range(2)]
    agreements = [TierAgreement(exchange, 2) for exchange in exchanges]
    for agreement, num_full in zip(agreements, (3, 5), strict=True):
        agreement.send([TierReport(num_full=num_full)], 1)
        agreement.send([], 2)
    for agreement in agreements:
        assert agreement.receive(1) == (TierReport(num_full=5),)
        assert agreement.receive(2) == ()
    for exchange in exchanges:
        exchange.close()


def test_one_process_asks_nobody(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr("jaxkv.scheduling.worker.open_exchanges", refuse)
    pool = jnp.zeros((NUM_BLOCKS, 4))
    worker = OffloadWorker(
        TransferEngine(pool, NUM_BLOCKS), report_after_steps=1, check_plans=True
    )
    num_threads = threading.active_count()
    pool = worker.start(plan(store=(1, 0)), pool)
    pool = worker.start(plan(), pool)
    assert worker.poll() == ConnectorOutput(completed_store_events=(0,))
    assert threading.active_count() == num_threads


def test_processes_that_cannot_reach_one_another_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"call jax\.distributed\.initialize"):
        open_exchanges(1.0, ("outcomes",))
    engine = TransferEngine(jnp.zeros((NUM_BLOCKS, 4)), NUM_BLOCKS)
    with pytest.raises(ValueError, match="2 processes cannot agree on transfers"):
        OffloadWorker(engine, report_after_steps=2)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(timeout_s):
    engine = TransferEngine(jnp.zeros((NUM_BLOCKS, 4)), NUM_BLOCKS)
    with pytest.raises(ValueError, match=f"agreement_timeout_s={timeout_s} must be"):
        OffloadWorker(engine, agreement_timeout_s=timeout_s)


def test_a_call_that_does_not_return_ends_the_process(monkeypatch):
    monkeypatch.setattr("jaxkv.scheduling.watchdog._LEAST_LIMIT_S", 1.0)
    said, ended = [], threading.Event()

    def end(message):
        said.append(message)
        ended.set()

    monkeypatch.setattr("jaxkv.scheduling.watchdog._MARGIN_S", 0.0)
    watchdog = Watchdog(0.1, end)
    with watchdog.watch(lambda: "a call that goes on"):
        for _ in range(5):
            time.sleep(0.3)
            watchdog.beat()
    time.sleep(1.3)  # Between calls nobody is stuck.
    assert said == []
    with watchdog.watch(lambda: "a long call"):
        assert ended.wait(TIMEOUT_S)
    assert said == ["a long call"]


def test_a_call_that_nothing_can_watch_is_made_and_the_next_one_is_watched():
    watchdog, started = Watchdog(0.1), []
    with refused_threads() as refused, watchdog.watch(str):
        started.append(threading.active_count())
    assert len(refused) == 1
    with watchdog.watch(str):
        started.append(threading.active_count())
    assert started == [started[0], started[0] + 1]


def test_a_call_may_take_the_time_of_a_compilation_however_short_the_timeout_is():
    assert Watchdog(0.1).limit_s == 30
    assert Watchdog(60).limit_s == 65


def test_a_load_that_fails_in_one_process_fails_in_all_and_alone(connect):
    """Of several that left in one step: they are agreed on request by request."""

    def body(process):
        worker, engine, pool = connect(process, check_plans=True)
        for number in range(NUM_BLOCKS // 2):
            pool = worker.start(plan(store=(number, number), event=number), pool)
        pool, _ = worker.drain(pool)
        last = NUM_BLOCKS // 2 - 1
        meta = dataclasses.replace(
            plan(load=(NUM_BLOCKS - 1, 0), event=1),
            load_device_blocks=(NUM_BLOCKS - 1, NUM_BLOCKS - 2, NUM_BLOCKS - 3),
            load_host_blocks=(0, last, 0),
            load_event_to_reqs={1: ("one", "other", "third")},
            load_sizes=(1, 1, 1),
        )
        load, issue = engine._copier.load, []

        def refuse_one(leaves, targets, arrays, group):
            issue.append(targets)
            if process == 1 and any(NUM_BLOCKS - 2 in each for each in targets):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
            return load(leaves, targets, arrays, group)

        engine._copier.load = refuse_one
        pool = worker.start(meta, pool)
        assert len(issue) > 1
        pool = worker.start(plan(), pool)
        pool = worker.start(plan(), pool)
        output = worker.poll()
        assert worker.num_in_flight == engine.num_in_flight == 0
        return output, worker.plan_digest

    (output, digest), same = run_all(2, body)
    assert same == (output, digest)
    together = set(output.finished_recving)
    assert "other" in output.failed_recving
    assert "third" in together
    assert {*output.failed_recving, *together} == {"one", "other", "third"}


def test_a_listing_goes_no_faster_than_the_others_are_told(connect, monkeypatch):
    """Else what is found again and again would pile up where steps are slow."""
    pool = jnp.zeros((NUM_BLOCKS, 4))
    engine = TransferEngine(pool, NUM_BLOCKS)
    objects = ObjectFormat(
        b"model",
        engine.host_bytes_description,
        engine.host_payload_bytes,
        shard=0,
        num_shards=2,
    )
    keys = {number.to_bytes(32, "little") for number in range(5000)}
    blobs = MemoryStore()
    for future in blobs.put(
        [(name, [b""]) for key in keys for name in objects.all_names(key)]
    ):
        future.result()
    with contextlib.closing(
        StorageWorker(engine, StorageIO(blobs, objects), list_every_s=1e-9)
    ) as storage:
        worker, _, pool = connect(0, 1, storage=storage)
        handed_out, counts = 0, collections.Counter()
        take_reports = storage.take_reports

        def count_reports(*args):
            nonlocal handed_out
            reports = take_reports(*args)
            handed_out += sum(len(report.found) for report in reports)
            return reports

        monkeypatch.setattr(storage, "take_reports", count_reports)
        until_s = time.monotonic() + TIMEOUT_S
        while min(map(counts.__getitem__, keys)) < 4 and time.monotonic() < until_s:
            pool = worker.start(plan(), pool)
            told = [key for each in worker.poll().below for key in each.found]
            assert len(told) <= KEYS_PER_STEP
            counts.update(told)
            # What was said in the last two steps is not heard yet.
            assert handed_out - counts.total() <= 2 * KEYS_PER_STEP
        assert min(map(counts.__getitem__, keys)) >= 4
