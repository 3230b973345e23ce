"""Workers that agree on how transfers ended, as threads that share a store of keys."""

import collections
import contextlib
import dataclasses
import gc
import itertools
import random
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxkv import DeviceBlockPool, OffloadScheduler, OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    ConnectorOutput,
    OffloadMetadata,
    SchedulerOutput,
    TierReport,
)
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.worker.exchange import Exchange, open_exchanges
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.scheduling.worker.tier_agreement import KEYS_PER_STEP, TierAgreement
from jaxkv.scheduling.worker.watchdog import Watchdog
from jaxkv.scheduling.worker.worker import AgreementError, PlanMismatchError
from jaxkv.transfer import kernels
from jaxkv.transfer.storage import MemoryStore, ObjectFormat, StorageIO
from tests.rigs.refused_threads import refused_threads
from tests.rigs.waiting import wait_for

NUM_BLOCKS = 8
# Longer than any wait that ends, however slow the machine is.
TIMEOUT_S = 60.0


class KeyValues:
    """jax's coordination service, as far as it is used."""

    def __init__(self):
        self.values = {}
        self.max_keys = 0
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.max_keys = max(self.max_keys, len(self.values))
            self._changed.notify_all()

    def key_value_dir_get(self, key):
        with self._changed:
            items = self.values.items()
            return [item for item in items if item[0].startswith(f"{key}/")]

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


class Process:
    """A worker, its engine and its pool, in a thread that stands for a process."""

    def __init__(self, number, **options):
        self.number = number
        self.pool = jnp.arange(NUM_BLOCKS * 4.0).reshape(NUM_BLOCKS, 4)
        self.engine = TransferEngine(self.pool, NUM_BLOCKS)
        named = {"report_after_steps": 2, "agreement_timeout_s": TIMEOUT_S}
        self.worker = OffloadWorker(self.engine, **named | options)

    def step(self, **how):
        self.start(**how)
        return self.worker.poll()

    def start(self, *, save_fails=False, meta=None, **moves):
        copier = self.engine._copier
        save_program = copier.save_program

        def refuse(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")

        if save_fails:
            copier.save_program = refuse
        self.pool = self.worker.start(meta or plan(**moves), self.pool)
        copier.save_program = save_program

    def drain(self):
        self.pool, output = self.worker.drain(self.pool)
        return output

    def get_stuck(self):
        self.engine._queue.report = lambda: []


@pytest.fixture
def store():
    return KeyValues()


@pytest.fixture
def run(monkeypatch, store):
    """Run `body(process)` for each process; return their results or errors."""
    # Each process has programs of its own: some of them fail.
    monkeypatch.setattr("jaxkv.transfer.engine.copier_of", kernels.CopierSpec.make)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    local, num_runs = threading.local(), 0

    def open_some(timeout_s, topics):
        place = local.number, local.num_processes
        run = f"run {num_runs}"
        return [Exchange(store, *place, f"{run} {t}", timeout_s) for t in topics]

    monkeypatch.setattr("jaxkv.scheduling.worker.worker.open_exchanges", open_some)

    def run(body, num_processes=2, **options):
        nonlocal num_runs
        num_runs += 1
        results = [None] * num_processes

        def run_one(number):
            local.number, local.num_processes = number, num_processes
            try:
                results[number] = body(Process(number, **options))
            except Exception as error:
                results[number] = error

        threads = [
            threading.Thread(target=run_one, args=(number,))
            for number in range(num_processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_store_that_fails_in_one_process_fails_in_all(run, num_processes, after):
    def body(process):
        outputs = []
        for number in range(6):
            save_fails = (number, process.number) == (1, 1)
            moves = {"store": (number, number), "event": number}
            outputs.append(process.step(save_fails=save_fails, **moves))
        outputs.append(process.drain())
        assert process.worker.num_in_flight == 0
        return outputs, process.worker.plan_digest, process.worker.blocks_stored

    options = {"report_after_steps": after, "check_plans": True}
    results = run(body, num_processes, **options)
    outputs, digest, blocks_stored = results[0]
    assert results[1:] == results[:-1]
    assert len(digest) == 32
    assert blocks_stored == 5
    for number in range(6):
        output = outputs[min(number + after, 6)]
        assert (number in output.failed_store_events) == (number == 1), number
        assert (number in output.completed_store_events) == (number != 1), number


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_load_that_fails_in_one_process_fails_in_all(run, num_processes):
    """The processes agree on the loads of one step request by request."""
    last = NUM_BLOCKS // 2 - 1
    meta = dataclasses.replace(
        plan(load=(NUM_BLOCKS - 1, 0), event=1),
        load_device_blocks=(NUM_BLOCKS - 1, NUM_BLOCKS - 2, NUM_BLOCKS - 3),
        load_host_blocks=(0, last, 0),
        load_event_to_reqs={1: ("one", "other", "third")},
        load_sizes=(1, 1, 1),
    )

    def body(process):
        for number in range(NUM_BLOCKS // 2):
            process.step(store=(number, number), event=number)
        process.drain()
        copier, issued = process.engine._copier, []
        load = copier.load

        def refuse_one(leaves, targets, arrays):
            issued.append(targets)
            if process.number == 1 and any(NUM_BLOCKS - 2 in ids for ids in targets):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
            return load(leaves, targets, arrays)

        copier.load = refuse_one
        process.step(meta=meta)
        assert len(issued) > 1
        process.step()
        output = process.step()
        assert process.worker.num_in_flight == process.engine.num_in_flight == 0
        assert process.worker.blocks_loaded == len(output.finished_recving)
        return output, process.worker.plan_digest

    results = run(body, num_processes, check_plans=True)
    assert results[1:] == results[:-1]
    output, _ = results[0]
    together = set(output.finished_recving)
    assert "other" in output.failed_recving
    assert "third" in together
    assert {*output.failed_recving, *together} == {"one", "other", "third"}


def test_the_digest_covers_what_was_agreed(run, store):
    def digests(failing):
        store.values.clear()

        def body(process):
            process.step(store=(1, 0), save_fails=failing(process))
            before = process.worker.plan_digest
            process.drain()
            return before, process.worker.plan_digest

        return run(body, check_plans=True)

    (before, good), (before_too, good_too) = digests(lambda process: False)
    (same, bad), _ = digests(lambda process: process.number == 1)
    assert before == before_too == same
    assert good == good_too
    assert len({before, good, bad}) == 3


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_transfer_that_is_stuck_in_one_process_fails_in_all(run, num_processes):
    def body(process):
        if process.number == 1:
            process.get_stuck()
        assert process.step(store=(1, 0), event=4) == ConnectorOutput()
        process.step()
        output = process.step()
        assert process.worker.num_in_flight == 0
        return output

    expected = ConnectorOutput(failed_store_events=(4,))
    options = {"deadline_s": 5.0, "clock": itertools.count().__next__}
    assert run(body, num_processes, **options) == [expected] * num_processes


def test_a_deadline_does_not_pass_while_no_process_waits(run):
    now_s = [0.0]
    # As if both compiled.
    have_stored = threading.Barrier(2, lambda: now_s.append(100.0))

    def body(process):
        process.step(store=(1, 0), event=4)
        have_stored.wait(TIMEOUT_S)
        return process.drain()

    expected = ConnectorOutput(completed_store_events=(4,))
    options = {"deadline_s": 1.0, "clock": lambda: now_s[-1]}
    assert run(body, **options) == [expected, expected]


def check_ends(result, step, processes, *texts):
    assert isinstance(result, AgreementError)
    assert (result.step, result.processes) == (step, processes)
    for text in texts:
        assert text in str(result)


@pytest.mark.parametrize("call", ["start", "drain", "flush"])
def test_a_stuck_transfer_without_an_earlier_deadline_ends_the_run(run, call):
    def body(process):
        if process.number == 1:
            process.get_stuck()
        process.step(store=(1, 0), event=4)
        try:
            if call == "drain":
                process.drain()
            process.step(flush=call == "flush")
            process.step()
        finally:
            # There is no going on afterwards.
            with pytest.raises(AgreementError):
                process.drain()

    healthy, stuck = run(body, deadline_s=None, agreement_timeout_s=1.0)
    check_ends(stuck, 1, (1,), "store event 4 of step 1 did not end in process 1")
    what = "processes [1] did not send the outcome of store event 4 of step 1"
    check_ends(healthy, 1, (1,), what)


@pytest.mark.parametrize("call", ["start", "drain"])
def test_processes_that_have_stalled_are_named(run, call):
    have_compiled = threading.Barrier(4)

    def body(process):
        process.start(store=(1, 0), event=4)
        have_compiled.wait(TIMEOUT_S)
        if process.number in (1, 3):
            return
        if call == "drain":
            process.drain()
        process.step()
        process.step()

    results = run(body, 4, agreement_timeout_s=1.0)
    assert results[1] is results[3] is None
    for error in results[::2]:
        check_ends(error, 1, (1, 3), "agreement_timeout_s=1: they have stalled")


def test_a_missing_plan_ends_the_run_at_the_timeout(run):
    are_ready = threading.Barrier(2)

    def body(process):
        are_ready.wait(TIMEOUT_S)
        process.step()
        if process.number == 0:
            try:
                process.step(store=(1, 0))
            finally:
                assert process.engine.num_in_flight == process.worker.num_in_flight == 0

    error, _ = run(body, check_plans=True, agreement_timeout_s=1.0)
    check_ends(error, 2, (1,), "did not send the plan of step 2")


def test_processes_that_start_other_transfers_are_named(run):
    def body(process):
        process.step(store=(1, 0), event=4 + process.number)
        for _ in range(2):
            with pytest.raises(PlanMismatchError) as raised:
                process.drain()
        return str(raised.value)

    for number, text in enumerate(run(body)):
        assert f"in step 1 processes [{1 - number}] started other transfers" in text
        values = f"is {4 + number} in process {number}, and {5 - number} in process"
        assert f"store_event {values} {1 - number}" in text


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_plan_that_differs_in_one_block_is_noticed_when_it_is_due(
    run, direction, place
):
    def body(process):
        process.step(store=(1, 0), event=1)
        process.drain()
        blocks = {"device": (2 + process.number, 0), "host": (2, 7 * process.number)}
        if direction == "load" and place == "host":  # Both have been stored.
            process.step(store=(3, 7), event=2)
            process.drain()
        process.step(**{direction: blocks[place]}, event=3)
        with pytest.raises(PlanMismatchError, match=f"{direction}_{place}_blocks"):
            process.drain()

    assert run(body) == [None, None]


def test_a_move_below_the_host_that_differs_in_one_block_is_noticed(store):
    with exchanging(store) as ends:
        agreements = [TierAgreement(end, 2) for end in ends]
        for number, agreement in enumerate(agreements):
            agreement.send([], 1, {"below": f"1 (digest {number})"})
        for agreement in agreements:
            with pytest.raises(PlanMismatchError, match="below is 1"):
                agreement.receive(1)


# Another value of each setting, and what it needs.
RULES = {
    "mode": "lazy",
    "max_num_batched_tokens": 128,
    "world_size": 2,
    "blocks_per_host_block": 2,
    "store_threshold": 2,
    "max_unseen_blocks": 9,
    "prompt_only": True,
    "max_offload_tokens": 64,
    "delay_shared_loads": True,
    "max_blocks_in_flight": 4,
    "store_batch_blocks": 3,
    "store_max_wait_steps": 2,
    "pause_unused_stores": True,
    "skip_slow_loads": True,
    "keep_heads": True,
    "flush_on_preemption": True,
    "storage_write": "through",
    "max_storage_blocks": 64,
    "storage_probe_s": 0.5,
    "retention": True,
    "block_bytes": 128,
}
SCHEDULER = {
    "groups": 2,
    "num_host_blocks": NUM_BLOCKS - 1,
    "num_storage_blocks": 16,
    "cache_policy": "arc",
    "executor": "xla",
}
WORKER = {"report_after_steps": 3, "check_plans": True}
PLAIN = {"groups": 4, "num_host_blocks": NUM_BLOCKS}


def test_all_rules_that_change_decisions_are_settings():
    rules = {field.name for field in dataclasses.fields(OffloadRules)}
    assert {*RULES} == rules - {"shadow", "log_requests"}


def plan_of_scheduler(*, rules=None, **options):
    """The first plan of a scheduler, which moves nothing."""
    rules = OffloadRules(**{"block_bytes": 64} | (rules or {}))
    scheduler = OffloadScheduler(**PLAIN | options, rules=rules)
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    output = SchedulerOutput({})
    meta = scheduler.build_connector_meta(output)
    assert scheduler.build_connector_meta(output) is NO_MOVES
    return meta


@pytest.mark.parametrize("checks", [False, True], ids=["due", "check_plans"])
def test_processes_that_differ_in_one_setting_are_told_which_and_both_values(
    run, checks
):
    """Even if their plans are equal, or one has no transfer at all."""
    plain = plan_of_scheduler()
    plans = {name: plan_of_scheduler(rules={name: RULES[name]}) for name in RULES}
    plans |= {name: plan_of_scheduler(**{name: SCHEDULER[name]}) for name in SCHEDULER}
    newer = {**plain.settings, "version": "9.0"}
    plans["version"] = dataclasses.replace(plain, settings=newer)
    for name, meta in plans.items():
        assert meta.settings[name] != plain.settings[name]
        differing = {
            key for key in meta.settings if meta.settings[key] != plain.settings[key]
        }
        assert differing - {"tiers_below"} == {name}
    rng = random.Random(3)
    names = ["num_device_blocks", "storage", "host block", *WORKER, *plans]
    for name in names:
        other, lonely = rng.randrange(3), rng.randrange(3)

        def body(process, name=name, other=other, lonely=lonely):
            meta, is_other = plain, process.number == other
            if is_other and name in plans:
                # The worker has the same value as its scheduler.
                for key in (name, "tiers_below"):
                    process.worker.settings[key] = plans[name].settings[key]
                meta = plans[name]
            elif is_other:
                process.worker.settings[name] = "another"
            process.step(meta=meta)
            if process.number == lonely:
                process.step(store=(1, 0), event=0)
            end_s = time.monotonic() + 60  # The others may be slow.
            while time.monotonic() < end_s:
                process.step()
                time.sleep(0.001)

        own = plans[name].settings[name] if name in plans else "another"
        errors = run(body, 3, check_plans=checks)
        for number, error in enumerate(errors):
            assert isinstance(error, PlanMismatchError), (name, error)
            assert f"{name} is " in str(error)
            assert f"{own} in process {other}" in str(error), (name, number)


def test_a_scheduler_of_other_sizes_than_its_worker_is_refused(run, monkeypatch):
    engine = TransferEngine(jnp.zeros((NUM_BLOCKS, 4)), NUM_BLOCKS)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    worker, pool = OffloadWorker(engine), jnp.zeros((NUM_BLOCKS, 4))
    for name, meta, value in (
        ("num_host_blocks", plan_of_scheduler(num_host_blocks=7), 7),
        (
            "blocks_per_host_block",
            plan_of_scheduler(rules={"blocks_per_host_block": 2}),
            2,
        ),
        ("tiers_below", plan_of_scheduler(num_storage_blocks=16), 1),
    ):
        own = worker.settings[name]
        text = f"{name} is {own} in this worker, and {value} in its scheduler"
        with pytest.raises(PlanMismatchError, match=text):
            worker.start(meta, pool)
    worker.start(plan_of_scheduler(), pool)


def test_differing_plans_are_refused_before_anything_is_started(run):
    def body(process):
        process.step()
        try:
            process.step(store=(1, process.number))
        finally:
            assert process.engine.num_in_flight == process.worker.num_in_flight == 0

    for number, error in enumerate(run(body, check_plans=True)):
        assert isinstance(error, PlanMismatchError)
        assert f"in step 2 processes [{1 - number}] planned other" in str(error)


def test_old_keys_are_deleted_and_steps_without_transfers_send_only_settings(
    run, store
):
    def body(process):
        for number in range(num_steps):
            process.step(**{"store": (1, 0), "event": number} if moves else {})
        assert process.drain() == ConnectorOutput() or moves

    num_steps, moves = 5, False
    assert run(body) == [None, None]
    assert store.max_keys == 2
    store.values.clear()
    num_steps, moves = 40, True
    assert run(body, 3, report_after_steps=1, check_plans=True) == [None] * 3
    # Per exchange (two) and process (three), the last key and the one before.
    assert 0 < store.max_keys <= 2 * 3 * 2


def test_outcomes_are_sent_before_they_are_due(run, store):
    """So no process waits for outcomes in the step that needs them."""
    said, heard = threading.Event(), threading.Event()

    def is_sent(process):
        process.worker.poll()
        return not process.worker._agreement._unsent

    def body(process):
        process.step(store=(1, 0))
        wait_for(is_sent, process)
        if process.number == 1:
            said.set()
            assert heard.wait(TIMEOUT_S)
            return
        assert said.wait(TIMEOUT_S)
        store.blocking_key_value_get("run 1 outcomes/1/1", 10_000)
        # The other is still in the first step.
        outputs = [process.step() for _ in range(3)]
        heard.set()
        assert outputs[-1] == ConnectorOutput(completed_store_events=(0,))

    assert run(body, report_after_steps=3) == [None, None]


def test_a_service_that_fails_or_does_not_answer_ends_the_run(run, store, monkeypatch):
    def refuse(key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the leader has gone")

    def body(process):
        process.step(store=(1, 0))
        process.drain()

    with monkeypatch.context() as patch:
        patch.setattr(store, "key_value_dir_get", refuse)
        for error in run(body):
            assert isinstance(error, AgreementError)
            assert "UNAVAILABLE: the leader has gone" in str(error)
            assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
            assert error.processes == ()
    answer = threading.Event()
    monkeypatch.setattr(store, "key_value_set", lambda *_: answer.wait())
    try:
        for error in run(body, agreement_timeout_s=1.0):
            assert isinstance(error, AgreementError)
            assert error.processes == (0, 1)
    finally:
        answer.set()


def test_a_collected_worker_leaves_no_thread(run):
    before = {*threading.enumerate()}

    def threads():
        return {*threading.enumerate()} - before

    def body(process):
        process.step(store=(1, 0))
        process.drain()
        assert len(threads()) >= 2

    # A thread may be in a call to the service for as long.
    assert run(body, agreement_timeout_s=TIMEOUT_S / 3) == [None, None]
    gc.collect()
    wait_for(lambda: not threads())


@contextlib.contextmanager
def exchanging(store):
    ends = [Exchange(store, n, 2, "topic", TIMEOUT_S) for n in range(2)]
    yield ends
    for end in ends:
        end.close()


def test_closing_waits_for_the_thread_that_talks_to_the_service(store):
    before = {*threading.enumerate()}
    with contextlib.closing(Exchange(store, 0, 2, "topic", TIMEOUT_S)) as exchange:
        exchange.send("hello", 1)  # The thread waits for the answer of process 1.
        assert {*threading.enumerate()} - before
    assert not {*threading.enumerate()} - before


def test_rounds_without_a_thread_wait_until_one_can_be_started(store):
    with exchanging(store) as ends:
        with refused_threads() as refused:
            for end in ends:
                end.send("hello", 1)
            ends[0].send("and again", 2)
        assert len(refused) == 3
        ends[1].send("and again", 2)
        for text in ("hello", "and again"):
            for end in ends:
                assert end.receive("it") == [text, text]


def test_a_store_that_is_full_or_slow_for_one_process_is_for_all(store):
    with exchanging(store) as ends:
        agreements = [TierAgreement(end, 2) for end in ends]
        reports = TierReport(num_full=3, latencies_s=(0.1, 0.2)), TierReport(num_full=5)
        for agreement, report in zip(agreements, reports, strict=True):
            agreement.send([report], 1, {})
            agreement.send([], 2, {})
        for agreement in agreements:
            assert agreement.receive(1) == (
                TierReport(num_full=5, latencies_s=(0.1, 0.2)),
            )
            assert agreement.receive(2) == ()


def test_one_process_exchanges_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr("jaxkv.scheduling.worker.worker.open_exchanges", refuse)
    pool = jnp.zeros((NUM_BLOCKS, 4))
    worker = OffloadWorker(
        TransferEngine(pool, NUM_BLOCKS), report_after_steps=1, check_plans=True
    )
    before = set(threading.enumerate())
    pool = worker.start(plan(store=(1, 0)), pool)
    pool = worker.start(plan(), pool)
    assert worker.poll() == ConnectorOutput(completed_store_events=(0,))
    assert set(threading.enumerate()) <= before


def test_settings_that_prevent_agreement_are_refused(monkeypatch):
    engine = TransferEngine(jnp.zeros((NUM_BLOCKS, 4)), NUM_BLOCKS)
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        what = f"agreement_timeout_s={timeout_s} must be"
        with pytest.raises(ValueError, match=what):
            OffloadWorker(engine, agreement_timeout_s=timeout_s)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"call jax\.distributed\.initialize"):
        open_exchanges(1.0, ("outcomes",))
    with pytest.raises(ValueError, match="2 processes cannot agree on transfers"):
        OffloadWorker(engine, report_after_steps=2)


class Looks(threading.Event):
    """Counts how often a watchdog looks, and has it look again soon."""

    num = 0

    def wait(self, timeout):
        self.num += 1
        return super().wait(min(timeout, 0.001))


def test_a_call_that_does_not_return_ends_the_process(monkeypatch):
    # However short the timeout is, a call may take the time of a compilation.
    assert (Watchdog(1).limit_s, Watchdog(60).limit_s) == (30, 65)
    now_s, messages, looks = [0.0], [], Looks()
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("jaxkv.scheduling.worker.watchdog.time", clock)
    watchdog = Watchdog(1, messages.append)
    watchdog._watch.is_ending = looks

    def pass_time(seconds):
        now_s[0] += seconds
        until = looks.num + 3
        wait_for(lambda: looks.num >= until or messages)

    with watchdog.watch(lambda: "a call that goes on"):
        for _ in range(5):
            pass_time(20)
            watchdog.beat()
    pass_time(100)  # Time between calls does not count.
    assert messages == []
    with watchdog.watch(lambda: "a long call"):
        pass_time(20)
        assert messages == []
        pass_time(20)
    assert messages == ["a long call"]


def test_a_call_without_a_watching_thread_runs_and_the_next_is_watched():
    watchdog, before = Watchdog(0.1), set(threading.enumerate())
    with refused_threads() as refused, watchdog.watch(str):
        assert set(threading.enumerate()) <= before
    assert len(refused) == 1
    with watchdog.watch(str):
        assert len(set(threading.enumerate()) - before) == 1


def test_a_listing_is_no_faster_than_its_keys_are_sent(run):
    """Else what is found again and again would pile up where steps are slow."""
    keys = {number.to_bytes(32, "little") for number in range(5000)}
    handed_out, counts = [], collections.Counter()

    class Counting(StorageWorker):
        def take_reports(self, *args):
            reports = super().take_reports(*args)
            handed_out.extend(key for report in reports for key in report.found)
            return reports

    def step(process):
        keys_sent = [key for tier in process.step().below for key in tier.found]
        assert len(keys_sent) <= KEYS_PER_STEP
        counts.update(keys_sent)
        # Keys sent in the last two steps have not arrived yet.
        assert len(handed_out) - counts.total() <= 2 * KEYS_PER_STEP
        return min(map(counts.__getitem__, keys)) >= 4

    def body(process):
        engine, blobs = process.engine, MemoryStore()
        payload = engine.host_bytes_description, engine.host_payload_bytes
        objects = ObjectFormat(b"model", *payload, shard=0, num_shards=2)
        names = [name for key in keys for name in objects.all_names(key)]
        blobs.put([(name, [b""]) for name in names])
        storage = Counting(engine, StorageIO(blobs, objects), list_every_s=1e-9)
        options = {"report_after_steps": 2, "agreement_timeout_s": TIMEOUT_S}
        with contextlib.closing(storage):
            process.worker = OffloadWorker(engine, storage=storage, **options)
            wait_for(step, process)

    assert run(body, 1) == [None]
