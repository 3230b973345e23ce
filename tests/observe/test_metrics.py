"""Metrics of real engine runs, scraped over HTTP during and after them."""

import itertools
import threading

import pytest
from prometheus_client import CollectorRegistry

from jaxkv import OffloadRules, OffloadScheduler, OffloadWorker, TransferEngine
from jaxkv.config import OffloadConfig
from jaxkv.observe.families import Readings
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import make_steps
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig
from tests.rigs.scraping import read, scrape
from tests.scheduling.test_worker import Clock, make_pool, metadata


@pytest.fixture(scope="module")
def served():
    """An engine that serves prompts while it is scraped, and its counts."""
    config = EngineConfig(
        **{"block_size": 32, "device_blocks": 24, "concurrency": 2},
        **{"max_seq_tokens": 640, "weights_epoch": "0"},
        offload=OffloadConfig(num_host_blocks=40),
    )
    engine = Engine(make_steps(ModelConfig(num_layers=1), seed=0), config)
    moved = {"save": [], "load": []}

    def watch(name):
        call = getattr(engine.transfer, name)

        def watched(pool, first, second, *sizes, **how):
            hosts = second if name == "save" else first
            recorded = moved["save" if name == "save" else "load"]
            recorded.append(len(hosts) * engine.transfer.block_bytes)
            return call(pool, first, second, *sizes, **how)

        setattr(engine.transfer, name, watched)

    watch("save")
    watch("load_each")
    metrics = OffloadMetrics(
        engine.offload, engine.worker, engine.blocks, CollectorRegistry()
    )
    port = metrics.serve(0)
    between_steps, at_any_time, is_over = [], [], threading.Event()

    def keep_scraping():
        while not is_over.wait(0.05):  # Leave the interpreter to the engine.
            at_any_time.append(scrape(port))

    scraper = threading.Thread(target=keep_scraping)
    scraper.start()
    prompts = [[(7 * who + i * i) % 256 for i in range(600)] for who in range(3)]
    try:
        requests = []
        for who in (0, 1, 0, 2, 1, 0):
            requests.append(engine.submit(prompts[who], max_new_tokens=3))
            while engine.has_work:
                engine.step()
                between_steps.append(scrape(port))
        engine.drain()
    finally:
        is_over.set()
        scraper.join()
    scrapes = [between_steps, at_any_time]
    yield engine, requests, moved, scrapes, scrape(port), metrics
    metrics.close()


def test_a_scrape_has_the_engines_counts(served):
    engine, requests, moved, _, page, metrics = served
    num_tokens = sum(len(request.prompt) for request in requests)
    on_device = sum(request.device_hit_tokens for request in requests)
    on_host = sum(request.host_hit_tokens for request in requests)
    assert on_host > 0
    assert page["vllm:prefix_cache_queries_total"] == num_tokens
    assert page["vllm:prefix_cache_hits_total"] == on_device
    assert page["vllm:external_prefix_cache_queries_total"] == num_tokens - on_device
    assert page["vllm:external_prefix_cache_hits_total"] == on_host
    for direction, sizes in (("store", moved["save"]), ("load", moved["load"])):
        name = f"vllm:kv_offload_{direction}_"
        assert page[f"{name}bytes_total"] == sum(sizes) == page[f"{name}size_sum"] > 0
        assert page[f"{name}size_count"] == len(sizes)
        assert page[f"{name}size_bucket", "1e+06"] == sum(n <= 1e6 for n in sizes)
        assert page[f"{name}time_total"] > 0
        past = {"store": "stored", "load": "loaded"}[direction]
        blocks = page[f"jaxkv:kv_offload_blocks_{past}_total"]
        assert blocks * engine.transfer.block_bytes == sum(sizes)
    held = page["jaxkv:kv_offload_host_blocks_held"]
    stored = page["jaxkv:kv_offload_blocks_stored_total"]
    assert 0 < held <= 40
    assert page["jaxkv:kv_offload_host_blocks_evicted_total"] == stored - held > 0
    assert page["jaxkv:kv_offload_host_blocks"] == 40
    assert page["jaxkv:kv_offload_host_bytes"] == engine.transfer.host_bytes
    num_loads = sum(request.host_hit_tokens > 0 for request in requests)
    assert page["jaxkv:kv_offload_loads_total"] == num_loads
    assert page["jaxkv:kv_offload_load_delay_seconds_count"] == num_loads
    assert page["vllm:kv_offload_lookup_sync_delay_seconds_count"] >= len(requests)
    assert page["vllm:kv_cache_usage_perc"] == 0
    # At the end nothing is in flight.
    assert page["jaxkv:kv_offload_bytes_in_flight"] == 0
    assert page["vllm:kv_offload_cpu_cache_usage_perc"] == 0
    for direction in ("load", "store"):
        for what in ("blocks", "transfers"):
            assert page[f"jaxkv:kv_offload_{what}_in_flight", direction] == 0
    mib = page["vllm:kv_offload_store_bytes_total"] / 2**20
    assert metrics.format_line().startswith(f"KV offload: stored {mib:.1f} MiB, ")
    assert f"host hits {on_host} of {num_tokens - on_device} tokens" in (
        metrics.format_line()
    )


def test_counters_never_shrink_during_a_run(served):
    *_, scrapes, last, _ = served
    first = dict.fromkeys(last, 0.0)
    for before, page in itertools.chain(
        *(itertools.pairwise([first, *pages, last]) for pages in scrapes)
    ):
        assert page.keys() == last.keys()
        for kind in ("prefix_cache", "external_prefix_cache"):
            hits = page[f"vllm:{kind}_hits_total"]
            assert hits <= page[f"vllm:{kind}_queries_total"]
        stored = page["jaxkv:kv_offload_blocks_stored_total"]
        assert stored <= page["jaxkv:kv_offload_blocks_offered_total"]
        for key, value in page.items():
            name = key if isinstance(key, str) else key[0]
            if name.endswith(("_total", "_count", "_sum", "_bucket")):
                assert value >= before[key], key
    seen = {key for page in scrapes[0] for key, value in page.items() if value}
    assert ("jaxkv:kv_offload_transfers_in_flight", "store") in seen
    assert ("jaxkv:kv_offload_blocks_in_flight", "load") in seen
    assert "vllm:kv_offload_cpu_cache_write_usage_perc" in seen
    assert "vllm:kv_cache_usage_perc" in seen


def test_offered_blocks_are_stored_dropped_waiting_or_in_flight():
    rig = Rig(max_blocks_in_flight=2)
    for name, *path in (("one", 1, 2, 3), ("two", 4, 5), ("late", 8)):
        rig.admit(rig.request(name, *path))
        rig.step(**{name: len(path)})
        rig.finish(name)
    # Three of "one" have host blocks, two of them in flight; the blocks of
    # "two" wait. The block of "late" exceeded the bound.
    page = check_identity(rig.scheduler)
    assert page["jaxkv:kv_offload_blocks_in_flight", "store"] == 2
    assert page["jaxkv:kv_offload_blocks_waiting", "store"] == 3
    assert page["vllm:kv_offload_cpu_cache_write_usage_perc"] == 5 / NUM_BLOCKS
    assert page["vllm:kv_offload_cpu_cache_usage_perc"] == 5 / NUM_BLOCKS
    rig.store_arrives(ok=False)
    rig.step()
    rig.store_arrives()
    rig.step()
    assert check_identity(rig.scheduler)["jaxkv:kv_offload_blocks_stored_total"] == 2
    rig.admit(rig.request("three", 6, 7))
    rig.step(three=2)
    rig.finish("three")
    assert rig.scheduler.reset()
    page = check_identity(rig.scheduler)
    assert page["jaxkv:kv_offload_blocks_in_flight", "store"] == 0
    dropped = "jaxkv:kv_offload_blocks_dropped_total"
    assert (page[dropped, "failed"], page[dropped, "reset"]) == (2, 3)
    assert (page[dropped, "slow"], page[dropped, "full"]) == (1, 0)
    rig.settle()
    after = check_identity(rig.scheduler)
    assert after["jaxkv:kv_offload_blocks_stored_total"] == 2
    rig.check_nothing_leaked()


def check_identity(scheduler):
    page = read(scheduler)
    counts = [page["jaxkv:kv_offload_blocks_stored_total"]]
    for reason in ("failed", "full", "reset", "slow"):
        counts.append(page["jaxkv:kv_offload_blocks_dropped_total", reason])
    for where in ("in_flight", "waiting"):
        counts.append(page[f"jaxkv:kv_offload_blocks_{where}", "store"])
    assert page["jaxkv:kv_offload_blocks_offered_total"] == sum(counts)
    return page


def test_lookup_and_load_delays_are_measured():
    rig, clock = Rig(delay_shared_loads=True), Clock()
    rig.run(rig.request("first", 1, 2))
    rig.forget_device()
    rig.scheduler.delays.clock = clock
    assert rig.admit(rig.request("one", 1, 2, 3)) == 2 * BLOCK_SIZE
    assert rig.admit(rig.request("two", 1, 2, 4)) is None
    page = read(rig.scheduler)
    # Two host blocks are held for one load, which has not been issued.
    assert page["vllm:kv_offload_cpu_cache_read_usage_perc"] == 2 / NUM_BLOCKS
    assert page["vllm:kv_offload_cpu_cache_usage_perc"] == 2 / NUM_BLOCKS
    clock.now_s += 0.03
    assert rig.admit(rig.request("two", 1, 2, 4)) is None
    rig.step()
    page = read(rig.scheduler)
    assert page["jaxkv:kv_offload_blocks_in_flight", "load"] == 2
    clock.now_s += 0.03
    rig.load_arrives()
    clock.now_s += 2
    assert rig.admit(rig.request("two", 1, 2, 4)) == 0  # It has arrived on the device.
    page = read(rig.scheduler)
    name = "jaxkv:kv_offload_load_delay_seconds"
    assert page[f"{name}_sum"] == pytest.approx(0.06)
    buckets = [page[f"{name}_bucket", le] for le in ("0.05", "0.1", "+Inf")]
    assert buckets == [0, 1, 1]
    name = "vllm:kv_offload_lookup_async_delay_seconds"
    assert page[f"{name}_sum"] == pytest.approx(2.06)
    assert page[f"{name}_bucket", "1.0"] == 0
    assert page[f"{name}_bucket", "5.0"] == 1 == page[f"{name}_count"]
    assert page["jaxkv:kv_offload_blocks_loaded_total"] == 2
    # A deferred request that ends has waited too.
    rig.forget_device()
    rig.admit(rig.request("three", 1, 2, 3, 5))
    rig.scheduler.request_finished(rig.request("four", 1, 2, 3, 5))
    assert read(rig.scheduler)[f"{name}_count"] == 1
    for request in ("one", "two", "three"):
        rig.finish(request)
    rig.check_nothing_leaked()
    # A lookup takes what the clock says; a load is from the start of its lookup.
    rig, ticks = Rig(), itertools.count(0.0, 0.25)
    rig.run(rig.request("first", 1, 2))
    rig.forget_device()
    before = read(rig.scheduler)
    rig.scheduler.delays.clock = lambda: next(ticks)
    rig.admit(rig.request("one", 1, 2, 3))
    rig.step()
    rig.load_arrives()
    grown = {key: value - before[key] for key, value in read(rig.scheduler).items()}
    name = "vllm:kv_offload_lookup_sync_delay_seconds"
    assert (grown[f"{name}_count"], grown[f"{name}_sum"]) == (1, 0.25)
    assert (grown[f"{name}_bucket", "0.1"], grown[f"{name}_bucket", "0.5"]) == (0, 1)
    assert grown["jaxkv:kv_offload_load_delay_seconds_sum"] == 0.5
    # A load that fails is counted as such, and its tokens once.
    rig.finish("one")
    rig.settle()
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2, 4))
    rig.step()
    rig.load_arrives(ok=False)
    page = read(rig.scheduler)
    loads = "jaxkv:kv_offload_loads_total", "jaxkv:kv_offload_load_failures_total"
    assert [page[name] for name in loads] == [1, 1]
    assert page["vllm:external_prefix_cache_hits_total"] == 4 * BLOCK_SIZE


def test_skipped_and_paused_stores_and_declined_loads_are_counted():
    rig = Rig(skip_slow_loads=True, block_bytes=1000, store_threshold=2)
    rig.run(rig.request("one", 1, 2))
    assert read(rig.scheduler)["vllm:kv_offload_stores_skipped_total"] >= 2
    rig.run(rig.request("two", 1, 2))
    rig.forget_device()
    rig.scheduler.set_rates(1.0, 1e9)
    assert rig.offer(rig.request("three", 1, 2)) == (0, False)
    page = read(rig.scheduler)
    assert page["jaxkv:kv_offload_loads_declined_total"] == 1
    assert page["vllm:kv_offload_allocation_failure_total"] == 0
    # The tail of an unseen prompt counts as skipped.
    rig = Rig(max_unseen_blocks=1)
    rig.run(rig.request("one", 1, 2, 3))
    assert len(rig.host) == 1
    assert read(rig.scheduler)["vllm:kv_offload_stores_skipped_total"] >= 2
    rig = Rig(pause_unused_stores=True, host_blocks=2)
    names = "jaxkv:kv_offload_stores_paused", "jaxkv:kv_offload_blocks_paused_total"
    assert [read(rig.scheduler)[name] for name in names] == [0, 0]
    for number in range(40):
        rig.run(rig.request(f"r{number}", number))
        rig.forget_device()
    page = read(rig.scheduler)
    assert page[names[0]] == 1
    assert page[names[1]] == rig.scheduler.stats.num_paused > 10
    plain = read(Rig().scheduler)
    assert not any("pause" in name or "skipped" in name for name in plain)


def test_transfer_times_and_sizes_are_the_workers():
    pool, clock = make_pool(), Clock()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine, clock=clock)
    pool = worker.start(metadata(store=[(4, 2), (1, 0)]), pool)
    page = read(worker=worker)
    assert page["jaxkv:kv_offload_transfers_in_flight", "store"] == 1
    assert page["jaxkv:kv_offload_transfers_in_flight", "load"] == 0
    assert page["vllm:kv_offload_store_bytes_total"] == 0
    clock.now_s += 2
    pool, _ = worker.drain(pool)
    pool = worker.start(metadata(load=[(0, 2)]), pool)
    clock.now_s += 0.5
    worker.drain(pool)
    page = read(worker=worker)
    assert page["vllm:kv_offload_store_time_total"] == 2
    assert page["vllm:kv_offload_load_time_total"] == 0.5
    assert page["vllm:kv_offload_store_bytes_total"] == 2 * engine.block_bytes
    assert page["vllm:kv_offload_load_size_sum"] == engine.block_bytes
    assert page["jaxkv:kv_offload_transfers_in_flight", "store"] == 0
    assert not any("prefix_cache" in name for name in page)


def test_the_size_of_the_host_tier_stands_in_vllms_labels():
    large = OffloadRules(blocks_per_host_block=2, block_bytes=1000)
    hybrid = [FullAttention(16), SlidingWindow(16, 64)]
    for groups, rules, facts in (
        (16, large, "40 2 2000 1280"),
        (16, OffloadRules(), "40 1 None 640"),
        (hybrid, OffloadRules(), "40 1 None None"),
    ):
        scheduler = OffloadScheduler(groups, 40, rules=rules)
        assert Readings(scheduler).host_size == {facts: 1.0}


def test_a_metric_without_a_source_is_left_out():
    eager = read(OffloadScheduler(4, 8))
    for name in ("loads_declined_total", "blocks_waiting", "stores_skipped_total"):
        assert not any(name in str(key) for key in eager)
    dropped = "jaxkv:kv_offload_blocks_dropped_total"
    assert (dropped, "full") in eager
    assert (dropped, "slow") not in eager
    lazy = read(OffloadScheduler(4, 8, rules=OffloadRules(mode="lazy")))
    assert (dropped, "full") not in lazy
    assert "vllm:kv_cache_usage_perc" not in lazy
