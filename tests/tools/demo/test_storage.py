"""The engine with a store behind the host: the next run finds what one run wrote.

Whatever the store does, an engine without one generates the same tokens, and nothing
waits, is held or is in flight at the end.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import random
import signal
import tempfile
import time

import numpy as np
import pytest

from jaxkv.scheduling.worker import storage_worker
from jaxkv.tools.demo.engine import Engine
from jaxkv.transfer.storage import open_store
from tests.rigs.children import PIPE, Child
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.scraping import read
from tests.rigs.servers import free_port, mooncake_master, redis_server
from tests.rigs.waiting import Patience, wait_for
from tests.tools.demo.small_engine import CONFIG, check_at_rest, config_of, steps_of

MAX_STEPS = 20_000


@pytest.fixture(scope="module")
def expected():
    """Return a function from a seed to the answers of an engine without a host tier."""

    @functools.cache
    def of(seed, model="full"):
        return converse(Engine(steps_of(model), plain(num_host_blocks=0)), seed)

    return of


def plain(**changes):
    sizes = {"device_blocks": 64, "num_host_blocks": 64, "concurrency": 3}
    return config_of(**sizes | changes)


def make_engine(model="full", **changes):
    engine = Engine(steps_of(model), plain(**changes))
    engine.list_storage()
    return engine


def settle(engine):
    """Step until nothing is in flight, and check that nothing is held."""
    for _ in range(MAX_STEPS):
        offload = engine.offload
        if not (
            engine.has_work
            or offload.has_pending_stores()
            or offload.has_pending_loads()
        ):
            break
        engine.step()
    else:
        raise AssertionError("the engine does not come to rest")
    engine.drain()
    check_at_rest(engine)


def converse(engine, seed, num_turns=3):
    """Run conversations; return the answers in the order of the questions."""
    rng = random.Random(seed)
    shared = rng.choices(range(256), k=30)
    transcripts = [shared + rng.choices(range(256), k=20) for _ in range(5)]
    answers = []
    for _ in range(num_turns):
        requests = []
        for transcript in transcripts:
            transcript += rng.choices(range(256), k=6)
            requests.append(engine.submit(transcript, 5))
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work, "the engine does not come to an end"
        for transcript, request in zip(transcripts, requests, strict=True):
            transcript += request.generated
            answers.append(tuple(request.generated))
    return answers


def run(seed, model="full", **changes):
    """Run conversations in a new engine; return the answers and the stats."""
    engine = make_engine(model, **changes)
    answers = converse(engine, seed)
    settle(engine)
    stats = engine.offload.stats
    engine.close()
    return answers, stats


@pytest.mark.parametrize(
    ("model", "mode", "storage_write", "few"),
    [
        ("full", "eager", "on_reuse", ()),
        ("full", "eager", "on_evict", ()),
        ("hybrid", "lazy", "on_reuse", ()),
        ("full", "eager", "through", (2, 1)),
    ],
)
def test_a_new_engine_finds_what_the_last_one_wrote(
    expected, tmp_path, model, mode, storage_write, few
):
    config = {
        "storage": str(tmp_path),
        "storage_write": storage_write,
        "mode": mode,
    }
    lives = [{}, {}] if not few else [{"num_host_blocks": 400}]
    # A host of few blocks is no obstacle.
    lives += [{"num_host_blocks": number} for number in few]
    for number, changes in enumerate(lives):
        answers, stats = run(1, model, **config | changes)
        assert answers == expected(1, model)
        if number:
            assert stats.num_storage_loaded > 0
            assert stats.num_storage_failed == 0
        else:
            assert stats.num_storage_stored > 0


FAULTS = {
    "torn": Faults(tear=0.3),
    "damaged": Faults(cut=0.1, flip=0.1, longer=0.1, junk=0.1),
    "errors": Faults(error=0.2, raising=0.05),
    "swapped": Faults(swap=0.3),
    "lost": Faults(lose=0.2),
    "late": Faults(late=0.1, late_s=0.1),
    "hanging": Faults(hang=0.2),
}


def test_a_store_that_goes_wrong_changes_no_token(expected, tmp_path, monkeypatch):
    stores = []

    def open_faulty(url):
        faults = dataclasses.replace(FAULTS[kind], hang=0.0)  # A listing is waited for.
        stores.append(FaultyStore(open_store(url), len(stores), faults))
        return stores[-1]

    monkeypatch.setattr(storage_worker, "open_store", open_faulty)
    config = {
        "storage": str(tmp_path),
        "storage_write": "through",
        "num_host_blocks": 20,
    }
    for kind in FAULTS:
        if kind in ("late", "hanging"):
            config["storage_deadline_s"] = 0.03
        # Whether an engine meets a fault depends on how quickly the store answers. Each
        # engine begins with the objects that the last one wrote.
        for _ in range(20):
            engine = make_engine(**config)
            stores[-1].faults = FAULTS[kind]
            assert converse(engine, 1) == expected(1), kind
            settle(engine)
            stores[-1].let_go()
            engine.close()
            if any(stores[-1].num_faults.values()):
                break
        else:
            raise AssertionError(f"no engine met a fault: {kind}")


@contextlib.contextmanager
def server(kind, tmp_path, port):
    """Run a store's server; yield its URL and its process."""
    if kind == "redis":
        pytest.importorskip("redis")
        with redis_server(tmp_path, port=port) as running:
            yield running
        return
    with mooncake_master(port) as running:
        yield running


@pytest.mark.parametrize(
    "kind", ["redis", pytest.param("mooncake", marks=pytest.mark.long)]
)
def test_a_server_killed_and_revived_under_load_is_logged_twice_and_harms_no_token(
    expected, tmp_path, caplog, kind
):
    port = free_port()

    def is_up():
        return read(worker=engine.worker)["jaxkv:kv_offload_storage_up"]

    def logged():
        return [
            record.levelname
            for record in caplog.records
            if f"the store {kind}://127.0.0.1" in record.getMessage()
        ]

    with contextlib.ExitStack() as stack, caplog.at_level(logging.INFO, "jaxkv"):
        url, process = stack.enter_context(server(kind, tmp_path, port))
        if kind == "mooncake":
            url += "?segment=64MiB"
        config = {"storage_write": "through", "num_host_blocks": 20}
        engine = make_engine(storage=url, **config)
        assert converse(engine, 0) == expected(0)
        settle(engine)
        assert (is_up(), logged()) == (1.0, [])
        plain_step, num_steps = engine.step, 0

        def step():
            nonlocal num_steps
            num_steps += 1
            if num_steps == 10:  # Within a conversation.
                process.kill()
            return plain_step()

        engine.step = step
        assert converse(engine, 1) == expected(1)
        assert converse(engine, 2) == expected(2)
        # Mooncake's client takes seconds to see it.
        wait_for(lambda: engine.step() or not engine.offload.has_pending_stores())
        settle(engine)
        assert (is_up(), logged()) == (0.0, ["WARNING"])
        stats = engine.offload.stats
        assert stats.num_storage_dropped_failed > 0
        assert engine.worker.storage.storage_io.stats.errors["write unreachable"] > 0
        stack.enter_context(server(kind, tmp_path, port))
        until_s = time.monotonic() + 60
        for seed in range(3, 1000):
            assert converse(engine, seed) == expected(seed)
            if len(logged()) > 1 or time.monotonic() > until_s:
                break
        assert (is_up(), logged()) == (1.0, ["WARNING", "INFO"])
        settle(engine)
        engine.close()


@pytest.fixture
def shared_memory(tmp_path):
    """Yield a folder that outlives processes, in memory if the system has such."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield pathlib.Path(folder)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
def test_a_process_killed_while_it_writes_leaves_no_wrong_block(
    expected, tmp_path, shared_memory, kills
):
    rng = random.Random(kills)
    folder = shared_memory / "store"
    for number in range(kills):
        log = tmp_path / f"{number}.log"
        command = "-m", "tests.tools.demo.storage_child", "write", folder, 7
        with log.open("w") as out:
            child = Child(*command, stdout=out, stderr=out)
        patience = Patience([child.pid], max_cpu_s=120.0)
        try:
            # It is killed at any moment after its first few objects.
            wanted = num_objects(folder) + 8
            while num_objects(folder) < wanted and "stored" not in log.read_text():
                assert child.poll() is None, log.read_text()
                assert not patience.is_over, "it writes nothing"
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
        finally:
            child.kill()
            child.wait()
        assert "WRONG" not in log.read_text()
    for seed in (7, 8):
        answers, stats = run(seed, storage=str(folder))
        assert answers == expected(seed)
        if seed == 7:
            assert stats.num_storage_loaded > 0


def test_one_process_computes_prompts_for_another_and_its_death_costs_computing(
    tmp_path,
):
    rng = random.Random(11)
    prompts = [rng.choices(range(256), k=30 + 3 * n) for n in range(14)]
    folder = str(tmp_path / "store")
    command = "-m", "tests.tools.demo.storage_child", "prefill", folder
    child = Child(*command, stdin=PIPE, stdout=PIPE)

    def serve(engine, prompts, remote_prefill=True, during_step=lambda: None):
        """Return the answers, and the number of computed tokens of each prompt."""
        requests = [
            engine.submit(prompt, 5, remote_prefill=remote_prefill)
            for prompt in prompts
        ]
        while engine.has_work:
            engine.step()
            during_step()
        assert not engine.num_preemptions
        return [request.generated for request in requests], [
            len(r.prompt) - r.device_hit_tokens - r.host_hit_tokens for r in requests
        ]

    def send(prompts):
        child.stdin.write(json.dumps(prompts) + "\n")
        child.stdin.flush()

    def kill():
        if engine.offload.stats.num_storage_loaded:
            child.kill()

    try:
        alone = Engine(steps_of("full"), plain(num_host_blocks=0))
        expected, _ = serve(alone, prompts, remote_prefill=False)
        wait_s = {"storage_deadline_s": 240.0, "storage_await_s": 240.0}
        engine = make_engine(storage=folder, num_host_blocks=400, **wait_s)
        assert child.stdout.readline() == "ready\n"
        send(prompts[:7])
        generated, nums_computed = serve(engine, prompts[:7])
        assert generated == expected[:7]
        assert max(nums_computed) <= CONFIG.block_size
        settle(engine)
        engine.close()
        engine = make_engine(storage=folder, num_host_blocks=400)
        send(prompts[7:13])
        generated, nums_computed = serve(engine, prompts[7:], during_step=kill)
        assert child.wait() == -signal.SIGKILL
        assert generated == expected[7:]
        assert nums_computed[-1] == len(prompts[-1])  # It was never sent.
        settle(engine)
        engine.close()
    finally:
        with child:
            child.kill()


def test_a_drain_waits_no_longer_than_the_deadline(tmp_path, monkeypatch):
    faults = Faults()

    def open_hanging(url):
        return FaultyStore(open_store(url), 0, faults)

    monkeypatch.setattr(storage_worker, "open_store", open_hanging)
    config = {"storage": str(tmp_path), "storage_write": "through"}
    config |= {"storage_deadline_s": 0.2, "storage_probe_s": 0.0}
    engine = Engine(steps_of("full"), plain(**config))
    engine.list_storage()
    # A clock that stands still: the deadline is one of real time.
    engine.worker.storage._clock = lambda: 0.0
    faults.hang = 1.0
    engine.submit(list(range(50)), 5)
    while engine.has_work or not engine.worker.storage.num_in_flight:
        engine.step()
    engine.drain()
    assert engine.worker.storage.num_in_flight == 0
    assert engine.offload.stats.num_storage_stored == 0
    assert not np.asarray(engine.offload._manager.executor.state.ref_cnt).any()


def num_objects(folder):
    return sum(1 for _ in folder.rglob("*.0"))
