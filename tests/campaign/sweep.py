"""The life of a small engine with one failing system call.

The engine serves prompts of two blocks, whose bytes are known, with a store behind
the host. It lists the store, is reset, finds its blocks again, evicts others, and is
restarted. One call of its life fails; then all must be as if nothing had.
"""

import contextlib
import errno
import functools
import gc
import gzip
import hashlib
import json
import logging
import threading
import time
import traceback
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import TraceRecorder
from jaxkv.keys.packed import pack
from jaxkv.observe.publisher import END_OF_REPLAY, EventPublisher
from jaxkv.scheduling.record import record
from jaxkv.scheduling.record.keyed import hash_keys
from jaxkv.scheduling.whatif.policy_state import SAVE_EVERY_MS
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.base import DEVICE_MEDIUM, HOST_MEDIUM, OffloadingEvent
from jaxkv.tools.replay.traces import read_trace
from jaxkv.transfer.storage import StoreError
from tests.observe.test_tiers_to_subscriber import PublishingRig
from tests.rigs.failing_calls import ERRORS, HANG, SHORT, faults
from tests.rigs.listening import DECODER, Listener, Picture
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    FULL,
    Rig,
    StoredEngine,
    make_keys,
    make_request,
)

PATH_BLOCKS = 2
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, NUM_STORED_BLOCKS = 8, 16, 4
OBJECT_BYTES = 192 + BLOCK_SIZE * 8
# Longer than the store's deadline, and than a minute between two lines of the log.
LIST_S = 100.0
MAX_HANG_S = 200.0  # On the same clock.
MAX_WAIT_S = 20.0  # Until a life counts as stuck; a passing one never waits so long.


class Clock:
    def __init__(self):
        self.more_s = 0.0

    def __call__(self):
        return time.monotonic() + self.more_s


@functools.partial(jax.jit, donate_argnums=0)
def _write(pool, ids, values):
    return pool.at[ids].set(values)


def content(key):
    raw = hashlib.shake_128(key).digest(BLOCK_SIZE * 8)
    return np.frombuffer(raw, np.uint8).reshape(BLOCK_SIZE, 1, 8).view(np.uint32)


class StuckError(AssertionError):
    """Something never came to an end."""


class SmallEngine(StoredEngine):
    """An engine that serves one request after the other."""

    def __init__(self, calls, clock, storage, **keys):
        self.calls, self.clock = calls, clock
        self.num_requests = 0
        super().__init__(
            storage,
            pool=jnp.zeros((NUM_DEVICE_BLOCKS, BLOCK_SIZE, 1, 2), jnp.uint32),
            clock=clock,
            num_host_blocks=NUM_HOST_BLOCKS,
            deadline_s=1e6,
            storage_bytes=NUM_STORED_BLOCKS * OBJECT_BYTES,
            storage_list_s=LIST_S,
            storage_deadline_s=60.0,
            storage_probe_s=30.0,
            **keys,
        )

    def until(self, condition, what, *, may_hang=False):
        """Step until a condition holds; while a call hangs, time passes quickly."""
        end_s = time.monotonic() + MAX_WAIT_S
        end_hanging_s = self.clock() + MAX_HANG_S
        while not condition():
            if self.calls.is_hanging:
                self.clock.more_s += 1.0
                if may_hang and self.clock() > end_hanging_s:
                    return
            if time.monotonic() > end_s:
                raise StuckError(what)
            self.step()
            time.sleep(1e-5)

    def serve(self, prompt):
        """Serve a prompt of a number; return how many of its blocks were loaded."""
        self.num_requests += 1
        path = [prompt] * PATH_BLOCKS
        request = make_request(f"r{self.num_requests}", *path)
        num_loaded = self._admit(request)
        table, keys = request.block_ids, request.block_keys
        loaded = np.asarray(self.pool[0])[table[:num_loaded]]
        for block, key in zip(loaded, keys, strict=False):
            assert np.array_equal(block, content(key)), "wrong bytes"
        values = np.stack([content(key) for key in keys])
        self.pool[0] = _write(self.pool[0], np.array(table[: len(keys)]), values)
        request.num_computed_tokens = request.num_tokens
        self.blocks.cache(table[: len(keys)], keys)
        self.step(**{request.request_id: request.num_tokens})
        self.scheduler.request_finished(request)
        self.blocks.free(table[::-1])
        self.settle()
        return num_loaded

    def _admit(self, request):
        """Allocate a request's blocks, and load its offered prefix."""
        offer = None

        def is_offered():
            nonlocal offer
            offer, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            return offer is not None

        num_tokens, _ = find_cached_prefix(
            self.blocks, FULL, [request.block_keys], request.num_tokens - 1
        )
        assert num_tokens == 0, "the device was to forget"
        self.until(is_offered, "an offer")
        table = self.blocks.allocate(PATH_BLOCKS + 1)
        request.tables = [table]
        self.scheduler.update_state_after_alloc(request, table, offer)
        if not offer:
            return 0
        end_s = time.monotonic() + MAX_WAIT_S
        while True:
            done = self.step()
            if request.request_id in done.finished_recving:
                return offer // BLOCK_SIZE
            if request.request_id in done.failed_recving:
                return 0
            if time.monotonic() > end_s:
                raise StuckError("a load")

    def settle(self):
        """Step until nothing is under way, and have the device forget."""

        def is_settled():
            storage_io = self.storage.storage_io
            return not (
                self.scheduler.has_pending_stores()
                or self.scheduler.has_pending_loads()
                or self.storage.num_in_flight
                or storage_io._has_deletes
                or storage_io._jobs
                or any(storage_io._open_bytes.values())
            )

        self.until(is_settled, "settling", may_hang=True)
        self.blocks.evict(range(1, NUM_DEVICE_BLOCKS))

    def list(self):
        self.clock.more_s += LIST_S + 1.0
        storage = self.storage
        self.step()
        self.until(
            lambda: not storage._is_listing and storage._next_list_s > self.clock(),
            "a listing",
            may_hang=True,
        )
        self.settle()

    def reset(self):
        assert self.scheduler.reset()

    def close(self):
        self.settle()
        self.storage.close(5.0)
        self.check_at_rest()

    def check_at_rest(self):
        assert self.worker.num_in_flight == 0
        assert self.storage.num_in_flight == 0
        assert self.blocks.num_free == NUM_DEVICE_BLOCKS - 1
        assert not np.asarray(self.scheduler._manager.executor.state.ref_cnt).any()
        stats = self.storage.storage_io.stats
        assert stats.queued_write_bytes == stats.open_read_bytes == 0


class Log(logging.Handler):
    """The lines that jaxkv logs, by level."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.records = []

    def emit(self, record):
        # A line about each engine, and one about an engine of before that is dropped.
        if record.module not in ("start", "outlook"):
            self.records.append(record)

    @property
    def warnings(self):
        return [record.getMessage() for record in self.records if record.levelno > 20]

    @property
    def infos(self):
        return [record.getMessage() for record in self.records if record.levelno == 20]

    @contextlib.contextmanager
    def listening(self):
        logger = logging.getLogger("jaxkv")
        level, logger.level = logger.level, logging.INFO
        is_propagating, logger.propagate = logger.propagate, False
        logger.addHandler(self)
        logging.getLogger().manager._clear_cache()
        try:
            yield self
        finally:
            logger.removeHandler(self)
            logger.level, logger.propagate = level, is_propagating
            logging.getLogger().manager._clear_cache()


class Life:
    """A life with one failing call."""

    def __init__(self, calls, fault):
        self.calls, self.fault = calls, fault
        self.clock, self.log = Clock(), Log()
        self.refusal = None
        calls.begin(fault)

    @property
    def has_failed(self):
        return self.calls.has_failed

    @property
    def must_recover(self):
        """Whether a call has failed after the start."""
        return self.has_failed and self.refusal is None

    def start(self, make):
        """Make a part; one that refuses to start says why, and is made again."""
        try:
            # What hangs keeps an engine from starting, and nothing else.
            is_armed = self.fault is None or self.fault.error != HANG
            with self.calls.armed() if is_armed else contextlib.nullcontext():
                return make()
        except (StoreError, OSError, RuntimeError) as error:
            if not self.has_failed:
                raise
            self.refusal = str(error)
        return make()


class StoreLife(Life):
    def __init__(self, calls, fault, url, count, **keys):
        super().__init__(calls, fault)
        self.count, self.keys = count, {"storage": url, **keys}

    def begin(self):
        """Live with an empty store."""
        with self._engine() as engine, self.calls.armed():
            engine.list()
            for prompt in (1, 2):
                engine.serve(prompt)
            engine.reset()
            engine.list()
            assert engine.serve(1) == PATH_BLOCKS or self.has_failed
            engine.serve(3)
            engine.list()

    def go_on(self):
        with self._engine() as engine, self.calls.armed():
            engine.list()
            num = sum(engine.serve(prompt) for prompt in (3, 1, 2))
            assert num >= NUM_STORED_BLOCKS - 1 or self.has_failed

    @contextlib.contextmanager
    def _engine(self):
        """Start an engine, check it at the end, and close it."""
        with self.log.listening():
            engine = self.start(
                lambda: SmallEngine(self.calls, self.clock, **self.keys)
            )
            yield engine
            self.calls.let_go()
            if self.must_recover:
                self._recover(engine)
            engine.close()

    def _recover(self, engine):
        """List twice, serve in between, and check the engine."""
        engine.list()
        engine.serve(4)
        engine.reset()
        engine.list()
        assert engine.serve(4) == PATH_BLOCKS, "the store does not serve"
        assert engine.storage.storage_io.is_up, "the store counts as down"
        num_known = engine.scheduler.num_storage_blocks_held
        assert num_known == self.count(), "the engine knows other blocks than there are"
        engine.clock.more_s += LIST_S / 2
        engine.step()
        engine.settle()


class RecordLife(Life):
    """The life of an engine whose requests are recorded, in files that rotate."""

    NUM_REQUESTS, NUM_AFTER = 8, 3
    MAX_BYTES = 600

    def __init__(self, calls, fault, folder, name="requests.jsonl", max_files=3):
        super().__init__(calls, fault)
        folder.mkdir()
        self.path, self.key_file = folder / name, folder / "key"
        self.max_files = max_files

    def begin(self):
        # An engine before has left a file.
        self.path.write_text("an older file\n")
        with self.log.listening():
            recorder = self.start(self._recorder)
            with self.calls.armed():
                rig = Rig(recorder=recorder)
                self._serve(rig, range(self.NUM_REQUESTS))
            if self.must_recover:
                self._serve(rig, range(self.NUM_REQUESTS, self.num_requests))
            recorder.close()
        self._check(recorder)

    @property
    def num_requests(self):
        return self.NUM_REQUESTS + self.NUM_AFTER * self.must_recover

    def _recorder(self):
        with mock.patch.object(record, "MIN_MAX_BYTES", 1):
            return TraceRecorder(
                self.path,
                max_bytes=self.MAX_BYTES,
                max_files=self.max_files,
                key_file=self.key_file,
            )

    def _serve(self, rig, numbers):
        for number in numbers:
            rig.run(make_request(f"r{number}", number, extra_tokens=number % 3))
            rig.scheduler.recorder.flush()

    def _check(self, recorder):
        """Check that the files are whole, and have the last requests."""
        stats = recorder.stats
        assert stats.num_written + stats.num_dropped == self.num_requests
        assert bool(stats.num_dropped) <= self.has_failed
        secret = record._read_secret(str(self.key_file))
        keys = [make_keys(number)[0] for number in range(self.num_requests)]
        numbers = {
            hash_keys(pack([key])[1], secret)[0]: n for n, key in enumerate(keys)
        }
        read = []
        for end in ("", ".1"):
            path = self.path.with_name(self.path.name + end)
            if path.exists():
                read_trace(path)  # It is one.
                raw = path.read_bytes()
                if path.name.removesuffix(".1").endswith(".gz"):
                    raw = gzip.decompress(raw)
                # What could not be taken back is in part there.
                lines = map(json.loads, raw[: raw.rindex(b"\n")].splitlines())
                ids = [numbers[id_] for line in lines for id_ in line.get("ids", ())]
                read = ids + read
        assert read == sorted(set(read))
        num_kept = self.NUM_AFTER if self.must_recover and self.max_files > 1 else 1
        assert read[-num_kept:] == [*range(self.num_requests)][-num_kept:]


class PolicyStateLife(Life):
    """The life of an engine that keeps what its policy has learned, and of the next."""

    def __init__(self, calls, fault, folder):
        super().__init__(calls, fault)
        folder.mkdir()
        self.path = folder / "learned.npz"

    def begin(self):
        with self.log.listening():
            rig = self.start(self._rig)
            with self.calls.armed():
                for number in range(3):
                    self._learn(rig, number)
            if self.must_recover:
                self._learn(rig, 3)
            saved = rig.scheduler._policy_state.learned()
            later = self.start(self._rig)
            learned = later.scheduler._policy_state.learned()
            for name in ("touches", "reuses"):
                mine, its = getattr(learned, name), getattr(saved, name)
                np.testing.assert_array_equal(mine, its)

    def _rig(self):
        return Rig(policy="hazard", policy_state=str(self.path), clock=self.clock)

    def _learn(self, rig, number):
        """Serve a prompt twice, and let enough time pass for a save."""
        for name in "ab":
            rig.run(make_request(f"{name}{number}", number, 10))
        self.clock.more_s += SAVE_EVERY_MS / 1e3 + 1
        rig.run(make_request(f"c{number}", number, 10))
        assert rig.scheduler._policy_state.has_written.wait(60)


class EventsLife(Life):
    """The life of an engine whose events a router follows."""

    def __init__(self, calls, fault, folder, has_replay=True):
        super().__init__(calls, fault)
        self.replay = "tcp://127.0.0.1:*" if has_replay else None
        self.has_replay = has_replay
        self.next_seq, self.picture = 0, Picture()

    def begin(self):
        with self.log.listening():
            publisher = self.start(
                lambda: EventPublisher("tcp://127.0.0.1:*", self.replay)
            )
            where = publisher.endpoint, publisher.replay_endpoint
            with publisher, Listener(*where) as listener:
                nothing = OffloadingEvent([bytes(32)], BLOCK_SIZE, HOST_MEDIUM, True)
                listener.await_subscription(lambda: publisher.publish([nothing]))
                self.next_seq = publisher._next_seq
                rig = PublishingRig(publisher)
                with self.calls.armed():
                    for number in range(4):
                        self._serve(rig, number)
                        self._follow(listener, rig, is_last=False)
                    if self.has_replay:
                        self._request_replay(listener, 0)
                if self.must_recover:
                    self._serve(rig, 4)
                self._follow(listener, rig)

    def _serve(self, rig, number):
        tokens = [number] * (2 * BLOCK_SIZE + 1)
        rig.run(rig.ask(f"r{number}", tokens))
        rig.publish()

    def _follow(self, listener, rig, *, is_last=True):
        """Follow the events until the router knows what the tiers have.

        What a failure has lost may take until the next batch.
        """
        end_s = time.monotonic() + MAX_WAIT_S
        while any(
            self.picture.held(medium) != rig.held(medium)
            for medium in (HOST_MEDIUM, DEVICE_MEDIUM)
        ):
            if time.monotonic() > end_s:
                raise StuckError("the router knows other blocks than the tiers have")
            if not listener.sub.poll(20):
                if self.has_failed and not is_last:
                    return
                continue
            _, number, payload = listener.sub.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq > self.next_seq and self.has_replay:
                for old, batch in self._request_replay(listener, self.next_seq):
                    if self.next_seq <= old < seq:
                        self.picture.learn(batch)
            self.picture.learn(DECODER.decode(payload))
            self.next_seq = seq + 1

    def _request_replay(self, listener, start):
        """Request a replay of batches; repeat the request if nothing comes."""
        end_s = time.monotonic() + MAX_WAIT_S
        answer = {}
        while time.monotonic() < end_s:
            listener.replay.send_multipart([b"", start.to_bytes(8, "big")])
            while listener.replay.poll(300):
                _, number, payload = listener.replay.recv_multipart()
                if number == END_OF_REPLAY:
                    return sorted(answer.items())
                answer[int.from_bytes(number, "big")] = DECODER.decode(payload)
        raise StuckError("a replay")


# Calls without which the same comes about.
HARMLESS = {
    ("lstat", "_util.files.places_on"),
    # Another thread does the work, or the caller itself.
    ("thread", "transfer.storage.workers.start_thread"),
    ("stat", "scheduling.record.record._read_secret"),
    ("lstat", "scheduling.record.trace_file.TraceFile._rotate.<locals>.<genexpr>"),
    ("flock", "scheduling.record.trace_file.lock"),  # Some file systems have no locks.
}

# A subfolder that an engine must not read is others'.
SKIPPED = ("transfer.storage.local._pages", errno.EACCES)
RETRIED = ("connect", "send", "recv")  # By redis-py, once.


def complaint(life):
    """Return the log lines that a life has too many or too few; None if it is right."""
    fault, lines = life.fault, (life.log.warnings, life.log.infos)
    wanted = {(1, 1)}
    if not life.has_failed or life.refusal is not None or fault.error == SHORT:
        wanted = {(0, 0)}
    elif (
        fault.error == HANG
        or fault[:2] in HARMLESS
        or fault.call in RETRIED
        or (fault.place, fault.error) == SKIPPED
    ):
        wanted.add((0, 0))
    if tuple(map(len, lines)) in wanted:
        return None
    return f"logged {lines}"


def sweep(live, errors=ERRORS, *, all_errors=False):
    """Run a life for each call of a life, and make that call fail."""
    crashes, complaints = [], []
    num_lives = num_failed = 0
    with mock.patch.object(threading, "excepthook", crashes.append):
        life = live(None)
        assert not life.log.records, life.log.records
        calls = life.calls
        gc.collect()
        gc.freeze()  # What is here by now need not be looked through in each life.
        for fault in list(faults(calls.counts, errors, all_errors=all_errors)):
            # An engine of before that saves as it is collected would take the fault.
            life = None
            gc.collect()
            try:
                life = live(fault)
                wrong = complaint(life)
            except Exception as error:
                wrong = "".join(traceback.format_exception(error))
            finally:
                calls.let_go()
            wrong = wrong or (crashes and f"a thread has died: {crashes}")
            if wrong:
                complaints.append(f"{fault}: {wrong}")
            crashes.clear()
            num_lives += 1
            num_failed += life is not None and life.has_failed
    return num_lives, num_failed, complaints
