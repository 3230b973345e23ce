"""vLLM's connector with a store behind the host; see `fake_vllm` and `fake_engine`."""

import dataclasses
import logging
import os
import time
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest

from jaxkv import FullAttention, OffloadingEvent
from jaxkv.integrations import weights
from jaxkv.integrations.vllm import adapters
from jaxkv.integrations.vllm.events import HostEvents
from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from tests.integrations.test_vllm import (
    BLOCK_LAYOUTS,
    LONG,
    TOKENS,
    prom_metrics,
    separate_halves,
    serve_at_random,
)
from tests.rigs import fake_vllm
from tests.rigs.fake_engine import LOSSES, Engine, reference, reset_connector
from tests.rigs.fake_vllm import BlockRemoved, BlockStored, Request
from tests.rigs.ranked_engine import RankedEngine

WAIT_S = 120
PROMPT = range(18)


@pytest.fixture
def newest(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fake_vllm.install(monkeypatch, "0.32")


@pytest.fixture
def model(tmp_path):
    """A checkpoint; only its bytes matter."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "config.json").write_text("{}")
    age(folder)
    return folder


def age(folder):
    """Wait until files are older than this process looks to be; see `late_process`."""
    for file in folder.iterdir():
        os.utime(file, ns=(10**18, 10**18))


@pytest.fixture(autouse=True)
def late_process(monkeypatch):
    """Make this process look started after the tests wrote their files."""
    monkeypatch.setattr(weights, "process_started_s", lambda: time.time() + 3600)


@pytest.fixture
def make(tmp_path, model):
    """Make engines that share a store; all are closed at the end."""
    engines = []

    def make_one(extra=None, **options):
        keys = {
            "storage": f"file://{tmp_path}/store",
            "storage_bytes": "1MiB",
            "storage_write": "through",
            "storage_deadline_s": WAIT_S,
        }
        options = {"num_blocks": 40, "model": model} | options
        kind = RankedEngine if "num_ranks" in options else Engine
        engines.append(kind(extra=keys | (extra or {}), **options))
        return engines[-1]

    yield make_one
    for engine in engines:
        close(engine)


def close(engine):
    for half in (*engine.connectors, engine.runner.connector):
        half.shutdown()


def serve(engine, *requests):
    """Serve requests until all work is done, however long the store takes."""
    for request in requests:
        engine.scheduler.add(request)
    until(engine, lambda: not engine.scheduler.has_requests())


def until(engine, holds):
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        engine.step()
        time.sleep(1e-3)


def ask(engine, name, prompt=PROMPT, num_output=3, **options):
    """Serve a request; return the tokens that host and store supplied."""
    before = engine.scheduler.num_external_tokens
    request = Request(name, prompt, num_output, **options)
    serve(engine, request)
    # The runner has compared all it read with the computed values.
    assert request.tokens == reference(prompt, num_output)
    return engine.scheduler.num_external_tokens - before


def knows(engine):
    """Return whether an engine knows that all of `PROMPT` is in the store."""
    tier = engine.offload_scheduler.below[0].tier
    return tier.contains(Request("same", PROMPT, 3).block_hashes[:4]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"generation": "0.19"},
        {"windows": (None, 6), "is_apart": True},
        {"extra": {"blocks_per_chunk": 2}},
        {"is_async": True},
        {"extra": {"storage_write": "on_reuse"}},
    ],
    ids=str,
)
def test_an_engine_that_is_started_anew_is_warm(monkeypatch, make, options):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # Which 0.19 needs.
    fake_vllm.install(monkeypatch, options.get("generation", "0.32"))
    options = dict(options)
    if options.pop("is_apart", False):
        separate_halves(monkeypatch)
    first = make(**options)
    for number in range(2):
        assert ask(first, f"first{number}") == number * TOKENS
        first.scheduler.pool.overwrite_all()
    first.check_nothing_leaked()
    close(first)
    again = make(**options)
    assert ask(again, "again") == TOKENS
    again.check_nothing_leaked()
    stats = again.offload_scheduler.stats
    assert stats.num_storage_loaded > 0
    assert stats.num_storage_failed == 0


def test_blocks_are_found_by_the_same_weights_or_by_the_name_of_weights(
    newest, make, model
):
    ask(make(), "first")
    moved = model.rename(model.parent / "moved")
    assert ask(make(model=moved), "again") == TOKENS, "the path does not matter"
    (moved / "model.safetensors").write_bytes(bytes(256 * 64))
    age(moved)  # As where all files have one time.
    retrained = make(model=moved)
    retrained.runner.weights = 1  # The runner would notice.
    assert ask(retrained, "other") == 0
    named = {"storage_namespace": "tuned on Monday"}
    ask(make(named, model="of/nothing/that/is/known"), "first")
    assert ask(make(named, model="elsewhere"), "again") == TOKENS
    renamed = {"storage_namespace": "tuned on Tuesday"}
    assert ask(make(renamed, model="elsewhere"), "other") == 0


def test_a_request_waits_for_the_store_and_others_run_meanwhile(newest, make):
    first = make()
    ask(first, "first")
    close(first)
    engine = make({"storage_probe_s": 0.0})
    ask(engine, "warm-up", range(100, 109), 1)  # The store is listed now.
    storage = engine.runner.connector._worker._worker.storage
    advance, storage.advance = storage.advance, lambda: None
    waiting = Request("waiting", PROMPT, 3)
    engine.scheduler.add(waiting)
    engine.step()
    assert waiting.status == "WAITING"
    engine.scheduler.add(Request("other", range(200, 209), 3))
    for _ in range(20):
        engine.step()
    assert "other" not in engine.scheduler.requests
    assert waiting.status == "WAITING"
    assert engine.offload_scheduler.has_pending_loads()
    storage.advance = advance
    serve(engine)
    assert waiting.tokens == reference(PROMPT, 3)
    assert engine.scheduler.num_external_tokens == TOKENS
    engine.check_nothing_leaked()


@pytest.mark.parametrize("seed", [0, *LONG])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("ranks", [{}, {"num_ranks": 2}])
def test_every_token_read_equals_the_computed_one(newest, make, ranks, windows, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 50, 30).tolist() for _ in range(6)]
    num_done = num_fetched = 0
    extra = {"num_cpu_blocks": 12 * ranks.get("num_ranks", 1), "storage_list_s": 0.01}
    for _ in range(3):
        engine = make(extra, windows=windows, **ranks)
        engine.make_unreliable(rng)
        num_done += serve_at_random(engine, rng, prompts, 30, serve)
        stats = [scheduler.stats for scheduler in engine.offload_schedulers]
        num_fetched += sum(stat.num_storage_loaded for stat in stats)
        close(engine)
    assert num_done > 60
    assert num_fetched > 0


def test_a_rank_finds_in_the_store_what_another_rank_has_written(newest, make):
    hits = []
    for ranks in ((1,), (0, 1)):
        engine = make(num_ranks=2)
        for rank in ranks:
            before = engine.scheduler.num_external_tokens
            request = Request(f"in {rank}", PROMPT, 3)
            engine.scheduler.add(request, rank=rank)
            until(engine, lambda request=request: len(request.tokens) == 21)
            engine.settle()
            hits.append(engine.scheduler.num_external_tokens - before)
        engine.check_nothing_leaked()
        close(engine)
    assert hits == [0, 16, 16]


@pytest.mark.parametrize("route", LOSSES)
def test_new_weights_are_never_served_what_the_store_has_of_old_ones(
    newest, make, route, caplog, tmp_path
):
    engine = make({"storage_list_s": 0.01})
    ask(engine, "first")
    engine.scheduler.pool.overwrite_all()  # reset_prefix_cache()
    with caplog.at_level(logging.WARNING, "jaxkv"):
        route(engine)
        engine.runner.weights = 1  # The runner checks all that it reads from now on.
        assert ask(engine, "again") == 0
    assert "is not used until the next start" in caplog.text
    files = sorted((tmp_path / "store").rglob("*.0"))
    assert ask(engine, "others", range(100, 118)) == 0
    engine.check_nothing_leaked()
    close(engine)  # It waits for what is being written.
    # The store has the old ones still, which the old weights find, and no new one.
    assert sorted((tmp_path / "store").rglob("*.0")) == files
    assert ask(make(), "old weights") == TOKENS


@pytest.mark.parametrize("route", LOSSES)
def test_where_weights_never_change_the_store_is_used_after_a_reset(
    newest, make, route, caplog
):
    engine = make({"storage_list_s": 0.01, "storage_keep_on_reset": True})
    ask(engine, "first")
    engine.scheduler.pool.overwrite_all()
    with caplog.at_level(logging.WARNING, "jaxkv"):
        route(engine)
        ask(engine, "between", range(100, 109), 1)
        until(engine, lambda: knows(engine))
    assert ask(engine, "again") == TOKENS
    assert "is not used any more" not in caplog.text
    engine.check_nothing_leaked()


@pytest.mark.parametrize("route", LOSSES)
def test_a_fetch_under_way_when_weights_change_is_not_served(newest, make, route):
    ask(make(), "first")
    engine = make()
    ask(engine, "warm-up", range(100, 109), 1)
    worker = engine.runner.connector._worker._worker
    poll, worker.poll = worker.poll, ConnectorOutput
    waiting = Request("waiting", PROMPT, 3)
    engine.scheduler.add(waiting)
    engine.step()
    assert engine.offload_scheduler.has_pending_loads()
    if route is reset_connector:
        assert engine.scheduler.connector.reset_cache() is False
    else:
        route(engine)
    worker.poll = poll
    engine.runner.weights = 1
    serve(engine)
    assert waiting.tokens == reference(PROMPT, 3)
    engine.check_nothing_leaked()


def test_nothing_is_written_by_new_weights_while_a_fetch_delays_a_reset(
    newest, make, tmp_path
):
    ask(make(), "first")
    files = sorted((tmp_path / "store").rglob("*.0"))
    engine = make()
    ask(engine, "warm-up", range(100, 101), 1)
    worker = engine.runner.connector._worker._worker
    poll = worker.poll
    held = []

    def poll_without_fetches():
        output = poll()
        held.extend(event for report in output.below for event in report.fetched)
        below = (dataclasses.replace(report, fetched=()) for report in output.below)
        return dataclasses.replace(output, below=tuple(below))

    worker.poll = poll_without_fetches
    waiting = Request("waiting", PROMPT, 3)
    engine.scheduler.add(waiting)
    engine.step()
    assert engine.offload_scheduler.has_pending_loads()
    assert engine.scheduler.connector.reset_cache() is False
    engine.runner.weights = 1
    for number in range(4):
        engine.scheduler.add(Request(f"{number}", range(200, 218 + number), 3))
        for _ in range(20):
            engine.step()
            time.sleep(0.002)
    assert engine.offload_scheduler.has_pending_loads(), "the reset was delayed"
    assert sorted((tmp_path / "store").rglob("*.0")) == files
    worker.poll = lambda: dataclasses.replace(
        poll(), below=(TierReport(fetched=tuple(held)),)
    )
    engine.step()
    worker.poll = poll
    until(engine, lambda: not engine.scheduler.connector._scheduler._must_reset)
    serve(engine)
    assert waiting.tokens == reference(PROMPT, 3)
    engine.check_nothing_leaked()
    close(engine)
    assert sorted((tmp_path / "store").rglob("*.0")) == files
    assert ask(make(), "old weights") == TOKENS


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(100)))
    (folder / "adapter_config.json").write_text("{}")
    age(folder)
    return SimpleNamespace(
        adapter_id=1, name="mine", lora_name="mine", lora_path=str(folder)
    )


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_an_adapter_finds_what_its_own_weights_have_computed(
    newest, make, adapter, windows
):
    engine = make(windows=windows)
    assert ask(engine, "first", lora=adapter) == 0
    engine.scheduler.pool.overwrite_all()
    assert ask(engine, "from the host", lora=adapter) == TOKENS
    stored = [event for event in engine.events if isinstance(event, BlockStored)]
    hashes = Request("same", PROMPT, 3, lora=adapter).block_hashes
    assert {event.lora_name for event in stored} == {"mine"}
    assert set(hashes[:4]) <= {key for event in stored for key in event.block_hashes}
    close(engine)
    assert ask(make(windows=windows), "again", lora=adapter) == TOKENS
    folder = adapter.lora_path
    with open(f"{folder}/adapter_model.safetensors", "ab") as file:
        file.write(b"trained again")
    assert ask(make(windows=windows), "trained", lora=adapter) == 0


def test_blocks_of_an_adapter_that_is_not_known_stay_out_of_the_store(
    newest, make, adapter, tmp_path, monkeypatch, caplog
):
    of_adapters = {**vars(weights), "process_started_s": lambda: 0.0}
    monkeypatch.setattr(adapters, "weights", SimpleNamespace(**of_adapters))
    engine = make({"num_cpu_blocks": 8})
    for number in range(3):
        ask(engine, f"r{number}", lora=adapter)
        engine.scheduler.pool.overwrite_all()
    assert engine.scheduler.num_external_tokens == 2 * TOKENS, "the host has them"
    ask(engine, "others", range(100, 133), 1, lora=adapter)
    assert list((tmp_path / "store").rglob("*.0")) == []
    assert caplog.text.count("are not stored until the next start") == 1
    engine.check_nothing_leaked()


def test_hits_are_reported_by_source(newest, make):
    sources = fake_vllm.CacheHitSource
    ask(make(), "first")
    engine = make()
    reported = []
    connector = engine.scheduler.connector
    update = connector.update_state_after_alloc

    def take(request, blocks, num):
        update(request, blocks, num)
        if num:
            reported.append(connector.get_external_cache_hit_sources(request, num))

    connector.update_state_after_alloc = take
    ask(engine, "again")
    engine.scheduler.pool.overwrite_all()
    ask(engine, "once more")
    assert reported == [{sources.DISK: TOKENS}, {sources.HOST: TOKENS}]
    assert engine.offload_scheduler.below[0].num_fetched_tokens == {}
    memory = make({"storage": "memory://hits"})
    memory.offload_scheduler.below[0].num_fetched_tokens["r"] = 8
    unspecified = memory.scheduler.connector.get_external_cache_hit_sources(
        SimpleNamespace(request_id="r"), 20
    )
    assert unspecified == {sources.EXTERNAL_UNSPECIFIED: 8, sources.HOST: 12}
    request = SimpleNamespace(request_id="r")
    assert connector.get_external_cache_hit_sources(request, 0) == {}


@BLOCK_LAYOUTS
def test_events_report_the_same_blocks_for_store_and_host(
    newest, make, tmp_path, options
):
    engine = make(**options)
    extra = options.get("extra", {})
    ask(engine, "first")
    stored = [event for event in engine.events if isinstance(event, BlockStored)]
    assert all(event.token_ids for event in stored)
    on_host, in_storage = (
        {
            (event.group_idx, key)
            for event in stored
            if event.medium == medium
            for key in event.block_hashes
        }
        for medium in ("CPU", "STORAGE")
    )
    assert on_host == in_storage != set()
    close(engine)
    object_bytes = next(
        path.stat().st_size for path in (tmp_path / "store").rglob("*.0")
    )
    small = make(
        extra | {"storage_bytes": 6 * object_bytes},
        **{name: value for name, value in options.items() if name != "extra"},
    )
    for number in range(4):
        ask(small, f"r{number}", range(100 * number, 100 * number + 18), 1)
    removed = [event for event in small.events if isinstance(event, BlockRemoved)]
    assert {event.medium for event in removed} >= {"STORAGE"}


def test_events_say_where_a_tier_is_as_far_as_that_is_known(newest):
    for medium, is_remote, locality in (
        ("CPU", True, "LOCAL"),
        ("STORAGE", True, "REMOTE"),
        ("STORAGE", False, None),
    ):
        events = HostEvents([FullAttention(4)], storage_is_remote=is_remote)
        moves = [OffloadingEvent([b"k" * 32], 4, medium, removed) for removed in (0, 1)]
        assert [event.locality for event in events.to_vllm(moves)] == [locality] * 2


def values_of(connector):
    """Return a function that reads a connector's metrics in vLLM by name."""
    registry = prometheus_client.CollectorRegistry()
    served = prom_metrics(connector, registry)
    served.observe(connector.get_kv_connector_stats().to_dict(), 0)
    return lambda name, **labels: registry.get_sample_value(
        name, {"engine": "0", **labels}
    )


def test_metrics_of_a_store_are_served_only_where_there_is_one(newest, make):
    ask(make(), "first")
    engine, without = make(), Engine(num_blocks=40)
    for run in (engine, without):
        ask(run, "again")
        ask(run, "more", range(100, 118))
    value = values_of(engine.runner.connector)
    assert value("jaxkv:kv_offload_storage_up") == 1.0
    errors = "jaxkv:kv_offload_storage_errors_total"
    assert value(errors, operation="write", reason="full") == 0.0
    assert value("jaxkv:kv_offload_storage_write_seconds_count") > 0
    value = values_of(without.runner.connector)
    assert value("jaxkv:kv_offload_storage_up") is None
    assert value("vllm:kv_offload_load_bytes_total") == 0.0
    stats, stats_without = (
        run.scheduler.connector.get_kv_connector_stats() for run in (engine, without)
    )
    counters, gauges = stats.data["counters"], stats.data["gauges"]
    assert counters["jaxkv:kv_offload_storage_blocks_fetched"] == {"": 4}
    assert gauges["jaxkv:kv_offload_storage_blocks_held"][""][""] >= 4
    assert stats.reduce()["blocks from storage"] == 4
    assert not any("storage" in title for title in stats_without.reduce())
