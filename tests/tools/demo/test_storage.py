"""The engine with a store behind the host: what one run wrote, the next one finds.

Whatever the store does, the tokens are those of an engine without one, and nothing
waits, is held or is in flight at the end.
"""

import contextlib
import dataclasses
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from jaxkv.scheduling.worker import storage_worker
from jaxkv.tools.demo.engine import Engine, EngineConfig
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.steps import make_steps
from jaxkv.transfer.storage import open_store
from tests.rigs.children import PIPE, Child
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.scraping import read
from tests.rigs.servers import free_port, mooncake_master, redis_server
from tests.rigs.waiting import Patience, wait_for

FULL = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128
)
HYBRID = dataclasses.replace(FULL, num_layers=4, layers="hybrid", window_tokens=10)
CONFIG = EngineConfig(
    block_size=4,
    device_blocks=64,
    host_blocks=64,
    concurrency=3,
    max_seq_tokens=96,
    weights_epoch="test",
    chunk_sizes=(16,),
)
MOST_STEPS = 20_000


@pytest.fixture(scope="module")
def models():
    return {"full": make_steps(FULL, seed=0), "hybrid": make_steps(HYBRID, seed=0)}


def plain(**changes):
    return dataclasses.replace(CONFIG, **changes)


def make_engine(steps, **changes):
    engine = Engine(steps, dataclasses.replace(CONFIG, **changes))
    engine.list_storage()
    return engine


def settle(engine):
    """Step until nothing is on its way, and check that nothing is held."""
    for _ in range(MOST_STEPS):
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
    assert engine.worker.num_in_flight == 0
    assert engine.worker.storage.num_in_flight == 0
    assert engine.blocks.num_free == engine.config.device_blocks - 1
    for tier in (offload._manager, offload.below[0].tier):
        assert not np.asarray(tier.executor.state.ref_cnt).any()
    assert engine.transfer._table.num_pins == 0
    engine.transfer._table.check()


def converse(engine, seed, num_turns=3):
    """Run conversations; give what was generated, in the order of the questions."""
    rng = random.Random(seed)
    shared = rng.choices(range(256), k=30)
    transcripts = [shared + rng.choices(range(256), k=20) for _ in range(5)]
    answers = []
    for _ in range(num_turns):
        requests = []
        for transcript in transcripts:
            transcript += rng.choices(range(256), k=6)
            requests.append(engine.submit(transcript, 5))
        for _ in range(MOST_STEPS):
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work, "the engine does not come to an end"
        for transcript, request in zip(transcripts, requests, strict=True):
            transcript += request.generated
            answers.append(tuple(request.generated))
    return answers


def run(steps, seed, **changes):
    """Run conversations in a new engine; give the answers and the counts."""
    engine = make_engine(steps, **changes)
    answers = converse(engine, seed)
    settle(engine)
    stats = engine.offload.stats
    engine.close()
    return answers, stats


@pytest.mark.parametrize(
    ("model", "mode", "storage_write"),
    [
        ("full", "eager", "on_reuse"),
        ("full", "lazy", "through"),
        ("full", "eager", "on_evict"),
        ("hybrid", "eager", "through"),
        ("hybrid", "lazy", "on_reuse"),
    ],
)
def test_a_new_engine_finds_what_the_last_one_wrote(
    models, tmp_path, model, mode, storage_write
):
    steps = models[model]
    alone = Engine(steps, dataclasses.replace(CONFIG, host_blocks=0))
    expected = converse(alone, seed=1)
    config = {
        "storage": str(tmp_path / "store"),
        "storage_write": storage_write,
        "offload_mode": mode,
    }
    cold_answers, cold = run(steps, 1, **config)
    warm_answers, warm = run(steps, 1, **config)
    assert cold_answers == expected
    assert warm_answers == expected
    assert cold.num_storage_stored > 0
    assert warm.num_storage_loaded > 0
    assert warm.num_storage_failed == 0


def test_a_host_of_few_blocks_is_no_obstacle(models, tmp_path):
    steps = models["full"]
    alone = Engine(steps, dataclasses.replace(CONFIG, host_blocks=0))
    expected = converse(alone, seed=2)
    config = {
        "storage": str(tmp_path),
        "storage_write": "through",
        "load_in_step": True,
    }
    for host_blocks in (400, 12, 2, 1):
        answers, stats = run(steps, 2, host_blocks=host_blocks, **config)
        assert answers == expected
        assert (stats.num_storage_loaded > 0) == (host_blocks < 400)


def test_other_weights_find_nothing_in_the_same_folder(models, tmp_path):
    config = {"storage": str(tmp_path), "storage_write": "through"}
    _, first = run(models["full"], 3, **config)
    _, other = run(models["full"], 3, weights_epoch="other", host_blocks=400, **config)
    assert first.num_storage_stored > 0
    assert other.num_storage_loaded == 0


def test_two_engines_share_a_folder(models, tmp_path):
    steps = models["full"]
    config = {"storage": str(tmp_path), "storage_write": "through"}
    first, second = (make_engine(steps, **config) for _ in range(2))
    expected = converse(first, seed=5)
    settle(first)
    # What the first one wrote, the second one finds when it lists the store again.
    second.worker.storage._next_list_s = 0.0
    second.offload.below[0].tier._is_listed = False
    second.list_storage()
    assert converse(second, seed=5) == expected
    settle(second)
    assert second.offload.stats.num_storage_loaded > 0
    for engine in (first, second):
        engine.close()


def test_requests_that_end_while_they_wait_leave_nothing_behind(models, tmp_path):
    steps = models["full"]
    config = {"storage": str(tmp_path), "storage_write": "through"}
    run(steps, 6, **config)
    rng = random.Random(6)
    shared = rng.choices(range(256), k=30)
    prompts = [shared + rng.choices(range(256), k=20) for _ in range(5)]
    engine = make_engine(steps, **config)
    requests = [engine.submit(prompt, 5) for prompt in prompts]
    was_waiting = False
    for step in range(200):
        engine.step()
        was_waiting |= any(
            engine.offload.below[0].is_awaited(r.request_id) for r in requests
        )
        if step < len(requests):
            engine.abort(requests[step])
    assert was_waiting
    settle(engine)
    assert engine.offload.reset()
    assert engine.offload.num_storage_blocks_held == 0
    engine.close()


FAULTS = {
    "errors": Faults(error=0.2, raising=0.05),
    "late": Faults(late=0.3, late_s=0.3),
    "hanging": Faults(hang=0.2),
    "damaged": Faults(cut=0.1, flip=0.1, longer=0.1, junk=0.1),
    "swapped": Faults(swap=0.3),
    "lost": Faults(lose=0.2),
    "torn": Faults(tear=0.3),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_store_that_goes_wrong_changes_no_token(models, tmp_path, monkeypatch, kind):
    steps = models["full"]
    alone = Engine(steps, dataclasses.replace(CONFIG, host_blocks=0))
    stores = []

    def open_faulty(url):
        stores.append(FaultyStore(open_store(url), len(stores), FAULTS[kind]))
        return stores[-1]

    monkeypatch.setattr(storage_worker, "open_store", open_faulty)
    config = {"storage": str(tmp_path), "storage_write": "through", "host_blocks": 20}
    if kind in ("late", "hanging"):
        config["storage_deadline_s"] = 0.03
    expected = converse(alone, seed=1)
    num_lives = 0
    # How often a store is called depends on how quickly it answers, and with that
    # whether two lives meet a fault.
    while num_lives < 2 or not any(any(store.num_faults.values()) for store in stores):
        assert num_lives < 20, "no life has met a fault"
        engine = make_engine(steps, **config)
        assert converse(engine, 1) == expected
        settle(engine)
        engine.close()
        num_lives += 1


@pytest.mark.parametrize("kind", ["not a folder", "emptied", "unreadable"])
def test_a_folder_that_cannot_be_used_any_more_changes_no_token(models, tmp_path, kind):
    steps = models["full"]
    folder = tmp_path / "store"
    config = {"storage": str(folder), "storage_write": "through"}
    expected, stats = run(steps, 1, **config)
    assert stats.num_storage_stored > 0
    engine = make_engine(steps, **config)
    files = [path for path in folder.rglob("*.0") if path.is_file()]
    if kind == "emptied":
        shutil.rmtree(folder)
    elif kind == "unreadable":
        for path in files:  # Also for root, unlike a mode.
            path.unlink()
            path.mkdir()
    else:
        # Writes fail for root as well, unlike those of a mode.
        shutil.rmtree(folder)
        folder.write_text("in the place of a folder")
    assert converse(engine, 1) == expected
    settle(engine)
    assert engine.offload.stats.num_storage_failed > 0
    engine.close()


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """Mount a file system of so many bytes on a folder, or skip the test."""
    folder.mkdir()
    options = f"size={num_bytes},mode=700"
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_changes_no_token_and_serves_what_it_has(models, tmp_path):
    steps = models["full"]
    expected = converse(Engine(steps, plain(host_blocks=0)), seed=9)
    folder = tmp_path / "disk"
    config = {"storage": str(folder), "storage_write": "through"}
    elsewhere = make_engine(steps, **config | {"storage": str(tmp_path / "elsewhere")})
    object_bytes = elsewhere.worker.storage.object_bytes
    page = os.sysconf("SC_PAGESIZE")
    per_object = -(-object_bytes // page) * page
    elsewhere.close()
    with small_disk(folder, 12 * per_object):
        for life in range(2):
            engine = make_engine(steps, **config)
            if life:  # What was used last is there.
                ask_about_numbers(engine)
                assert engine.offload.stats.num_storage_loaded > 0
            assert converse(engine, 9) == expected
            ask_about_numbers(engine)
            stats, own = engine.offload.stats, engine.worker.storage.storage_io.stats
            assert own.failed["write full"] > 0
            assert "No space left on device" in own.last_error
            assert stats.num_storage_dropped >= own.failed["write full"]
            assert not any(own.refused.values()), "a torn object was read"
            assert stats.num_storage_failed == 0
            engine.close()
            sizes = [p.stat().st_size for p in folder.rglob("*.0") if p.is_file()]
            assert 0 < len(sizes) <= 12
            assert set(sizes) == {object_bytes}
            assert not [p for p in folder.rglob(".*") if p.is_file()], "left behind"


def ask_about_numbers(engine):
    """Serve short prompts that are no conversation's, and wait until they are stored.

    A write that a full disk refuses is dropped; it makes room for the next ones.
    """
    for first in range(0, 200, 40):
        engine.submit(range(first, first + 9), 1)
        settle(engine)


@contextlib.contextmanager
def server(kind, tmp_path, port):
    """Run a store's server; its URL and its process."""
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
def test_a_server_killed_and_revived_under_load_is_told_twice_and_harms_no_token(
    models, tmp_path, caplog, kind
):
    steps, port = models["full"], free_port()
    alone = Engine(steps, plain(host_blocks=0))

    def is_up():
        return read(worker=engine.worker)["jaxkv:kv_offload_storage_up"]

    def told():
        return [
            record.levelname
            for record in caplog.records
            if f"the store {kind}://127.0.0.1" in record.getMessage()
        ]

    with contextlib.ExitStack() as stack, caplog.at_level(logging.INFO, "jaxkv"):
        url, process = stack.enter_context(server(kind, tmp_path, port))
        if kind == "mooncake":
            url += "?segment=64MiB"
        config = {"storage_write": "through", "host_blocks": 20}
        engine = make_engine(steps, storage=url, **config)
        assert converse(engine, 0) == converse(alone, 0)
        settle(engine)
        assert (is_up(), told()) == (1.0, [])
        plain_step, num_steps = engine.step, 0

        def step():
            nonlocal num_steps
            num_steps += 1
            if num_steps == 10:  # Within a conversation.
                process.kill()
            return plain_step()

        engine.step = step
        assert converse(engine, 1) == converse(alone, 1)
        assert converse(engine, 2) == converse(alone, 2)
        # Mooncake's client takes seconds to see it.
        wait_for(lambda: engine.step() or not engine.offload.has_pending_stores())
        settle(engine)
        assert (is_up(), told()) == (0.0, ["WARNING"])
        stats = engine.offload.stats
        assert stats.num_storage_dropped_failed > 0
        assert engine.worker.storage.storage_io.stats.errors["write unreachable"] > 0
        stack.enter_context(server(kind, tmp_path, port))
        until_s = time.monotonic() + 60
        for seed in range(3, 1000):
            assert converse(engine, seed) == converse(alone, seed)
            if len(told()) > 1 or time.monotonic() > until_s:
                break
        assert (is_up(), told()) == (1.0, ["WARNING", "INFO"])
        settle(engine)
        engine.close()
        alone.close()


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
def test_a_process_killed_while_it_writes_leaves_no_wrong_block(
    models, tmp_path, kills
):
    rng = random.Random(kills)
    folder = tmp_path / "store"
    for number in range(kills):
        log = tmp_path / f"{number}.log"
        command = "-m", "tests.tools.demo.storage_child", folder, 7
        with log.open("w") as out:
            child = Child(*command, stdout=out, stderr=out)
        patience = Patience([child.pid], max_cpu_s=120.0)
        try:
            # From the first few objects of its own on, at any moment.
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
    alone = Engine(models["full"], plain(host_blocks=0))
    for seed in (7, 8):
        answers, stats = run(models["full"], seed, storage=str(folder))
        assert answers == converse(alone, seed)
        if seed == 7:
            assert stats.num_storage_loaded > 0


def test_one_process_computes_prompts_for_another_and_its_death_costs_computing(
    models, tmp_path
):
    rng = random.Random(11)
    prompts = [rng.choices(range(256), k=30 + 3 * n) for n in range(14)]
    folder = str(tmp_path / "store")
    command = "-m", "tests.tools.demo.prefill_child", folder
    child = Child(*command, stdin=PIPE, stdout=PIPE)

    def serve(engine, prompts, remote_prefill=True, during_step=lambda: None):
        """Give what is generated, and how many tokens of each prompt are computed."""
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
        alone = Engine(models["full"], plain(host_blocks=0))
        expected, _ = serve(alone, prompts, remote_prefill=False)
        wait_s = {"storage_deadline_s": 240.0, "storage_await_s": 240.0}
        engine = make_engine(models["full"], storage=folder, host_blocks=400, **wait_s)
        assert child.stdout.readline() == "ready\n"
        send(prompts[:7])
        generated, nums_computed = serve(engine, prompts[:7])
        assert generated == expected[:7]
        assert max(nums_computed) <= CONFIG.block_size
        settle(engine)
        engine.close()
        engine = make_engine(models["full"], storage=folder, host_blocks=400)
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


def test_a_drain_waits_no_longer_than_the_deadline(models, tmp_path, monkeypatch):
    faults = Faults(hang=1.0)

    def open_hanging(url):
        return FaultyStore(open_store(url), 0, faults)

    monkeypatch.setattr(storage_worker, "open_store", open_hanging)
    config = {"storage": str(tmp_path), "storage_write": "through"}
    engine = Engine(models["full"], plain(storage_deadline_s=0.2, **config))
    # A clock that stands still: the deadline is one of real time.
    engine.worker.storage._clock = lambda: 0.0
    engine.submit(list(range(50)), 5)
    while engine.has_work or not engine.worker.storage.num_in_flight:
        engine.step()
    engine.drain()
    assert engine.worker.storage.num_in_flight == 0
    assert engine.offload.stats.num_storage_stored == 0
    assert not np.asarray(engine.offload._manager.executor.state.ref_cnt).any()


def num_objects(folder):
    return sum(1 for _ in folder.rglob("*.0"))
