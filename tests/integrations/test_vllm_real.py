"""The connector with vLLM's scheduler, where vLLM is installed.

`fake_engine`'s runner knows the contents of its KV caches.
"""

import inspect
import time
from pathlib import Path

import numpy as np
import pytest

from jaxkv import ConnectorOutput
from jaxkv.integrations.vllm.config import ConnectorConfig
from tests.rigs.fake_engine import Unreliable, reference
from tests.rigs.real_vllm import (
    BLOCK_SIZE,
    CONNECTOR,
    NEEDS_VLLM,
    NUM_STATES,
    engine_maker,
)

pytestmark = NEEDS_VLLM
DOCS = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    return engine_maker(tmp_path, monkeypatch)


def test_the_platform_admits_the_connector_by_the_name_in_the_docs(make_engine):
    assert f'"kv_connector": "{CONNECTOR}"' in DOCS.read_text(encoding="utf-8")
    connector = make_engine().scheduler.connector
    assert type(connector).__module__ == "jaxkv.integrations.vllm.connector"


# A reset of the device's prefix cache then shows what the host has.
KEEP = {"keep_on_device_reset": True}


def serve(engine, *peers):
    """Serve all requests of an engine; step its peers until it has loaded something."""
    end_s = time.monotonic() + 60
    while engine.scheduler.has_requests():
        assert time.monotonic() < end_s
        engine.step()
        if engine.num_external_tokens == 0:
            for peer in peers:
                peer.step()


def close(*engines):
    for engine in engines:
        engine.scheduler.connector.shutdown()
        engine.runner.connector.shutdown()


STORED = {
    "storage_bytes": "1MiB",
    "storage_write": "through",
    "storage_deadline_s": 60,
    "storage_namespace": "the runner's",  # There are no files of weights.
}


@pytest.mark.parametrize(
    "layers", [{}, {"windows": (None, 6)}, {"num_state_groups": 2}]
)
def test_a_device_reset_right_after_an_answer_resets_the_host_in_vllm(
    make_engine, layers
):
    """With one pool, and with several that are reset one by one."""
    if layers and refuses_windows():
        pytest.skip("this vLLM has no windows beside a connector")
    engine = make_engine(num_blocks=40, **layers)
    worker = engine.runner.connector._worker._worker
    worker.poll = ConnectorOutput  # No store is reported.
    for weights in range(3):
        request = engine.add(f"r{weights}", range(18), 3)
        while engine.scheduler.has_unfinished_requests():
            engine.step()
        assert list(request.all_token_ids) == reference(range(18), 3)
        assert engine.scheduler.connector.has_pending_push_work()
        assert engine.scheduler.reset_prefix_cache()
        # The runner compares all that it reads with these weights'.
        engine.runner.weights = weights + 1
    assert engine.num_external_tokens == 0
    del worker.poll
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def refuses_windows():
    """Return whether vLLM takes failed loads only as block ids, like 0.25."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    return not hasattr(KVConnectorBase_V1, "get_transfer_results")


def loses_drafts_in_resets():
    """Return whether a reset of running requests drops results one by one, like 0.25.

    Results of several tokens are then wrong, with or without a connector.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    update = AsyncScheduler._update_request_with_output
    return "is_stale" not in inspect.signature(update).parameters


@pytest.mark.parametrize(
    "layers", [{}, {"windows": (None, 6)}, {"num_state_groups": 2}]
)
def test_a_prompt_comes_back_from_a_store_in_vllm(make_engine, tmp_path, layers):
    if layers and refuses_windows():
        pytest.skip("this vLLM has no windows with connectors")
    extra = STORED | {"storage": str(tmp_path / "store")}
    hit_tokens = []
    for name in ("one", "two"):
        engine = make_engine(extra=extra, num_blocks=64, **layers)
        request = engine.add(name, range(18), 3)
        serve(engine)
        assert list(request.all_token_ids) == reference(range(18), 3)
        hit_tokens.append(engine.num_external_tokens)
        close(engine)
    assert hit_tokens == [0, 4 * BLOCK_SIZE]


def test_a_prompt_that_another_vllm_computes_is_loaded_as_it_is_written(
    make_engine, tmp_path
):
    extra = STORED | {"storage_list_s": 0, "storage_await_s": 60}
    extra["storage"] = str(tmp_path / "store")
    producer, consumer = make_engine(extra=extra), make_engine(extra=extra)
    first = producer.add("one", range(18), 1)
    first.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    second = consumer.add("two", range(18), 5)
    second.kv_transfer_params = {"do_remote_prefill": True, "do_remote_decode": False}
    serve(consumer, producer)
    assert list(second.all_token_ids) == reference(range(18), 5)
    assert consumer.num_external_tokens == 4 * BLOCK_SIZE
    close(producer, consumer)


def test_what_a_request_found_reaches_its_output_in_vllm(make_engine):
    engine = make_engine(extra={"report_requests": True} | KEEP)
    update, params = engine.scheduler.update_from_output, {}

    def collect(*args):
        outputs = update(*args)
        for client in outputs.values():
            for output in client.outputs:
                params[output.request_id] = output.kv_transfer_params
        return outputs

    engine.scheduler.update_from_output = collect
    for name in ("one", "two"):
        engine.add(name, range(18), 3)
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    for name, num_host in (("one", 0), ("two", 4 * BLOCK_SIZE)):
        report = params[name]["jaxkv"]
        assert (report["tokens"], report["device"]) == (18, 0)
        assert (report["host"], report["computed"]) == (num_host, 18 - num_host)


def test_requests_that_wait_for_loads_leave_states_to_compute_in(make_engine):
    """vLLM counts blocks of attention alone before it admits a load."""
    engine = make_engine(
        num_state_groups=2, num_blocks=400, extra={"num_cpu_blocks": 400} | KEEP
    )
    prompts = [[number, *range(11)] for number in range(20)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            engine.add(f"turn{turn}.{number}", prompt, 2)
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    # There are more prompts than states, and all hit.
    assert len(prompts) > NUM_STATES
    assert engine.num_external_tokens == len(prompts) * 2 * BLOCK_SIZE


SERVED = {
    "synchronous": {},
    "asynchronous": {"is_async": True},
    "drafts": {"num_drafts": 3},
    "asynchronous drafts": {"is_async": True, "num_drafts": 3},
    "hybrid": {"windows": (None, 6)},
    "windows, asynchronous": {"windows": (None, 6), "is_async": True},
    "states": {"num_state_groups": 2},
    "states, asynchronous": {"num_state_groups": 2, "is_async": True},
    "many states": {"num_state_groups": 3, "windows": (None, 6), "retention_tokens": 4},
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("seed", range(3))
def test_every_token_read_in_vllm_equals_the_computed_one(make_engine, seed, name):
    from vllm.v1.request import RequestStatus

    rng = np.random.default_rng(seed)
    if "windows" in SERVED[name] and refuses_windows():
        with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
            make_engine(**SERVED[name])
        return
    engine = make_engine(extra=KEEP, **SERVED[name])
    half = engine.runner.connector._worker
    half._worker = Unreliable(half, engine.runner, rng)
    is_reset = name != "asynchronous drafts" or not loses_drafts_in_resets()
    prompts = [rng.integers(0, 50, 30).tolist() for _ in range(3)]
    served = []
    for number in range(60):
        head = prompts[rng.integers(3)][: rng.integers(1, 31)]
        prompt = head + rng.integers(0, 50, rng.integers(0, 5)).tolist()
        num_output = int(rng.integers(1, 12))
        request = engine.add(f"r{number}", prompt, num_output)
        served.append((request, prompt, num_output))
        for _ in range(rng.integers(0, 6)):
            engine.step()
        if rng.random() < 0.1 and is_reset:
            # It raises if blocks are still held.
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rng.random() < 0.1:
            alive = list(engine.scheduler.requests)
            if alive:
                victim = alive[rng.integers(len(alive))]
                engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
    engine.run()
    capped = RequestStatus.FINISHED_LENGTH_CAPPED
    done = [entry for entry in served if entry[0].status == capped]
    assert len(done) > 40
    for request, prompt, num_output in done:
        assert list(request.all_token_ids) == reference(prompt, num_output)
    # Something is on the host now, whatever was in flight.
    assert engine.scheduler.reset_prefix_cache()
    for number, prompt in enumerate(prompts):
        request = engine.add(f"last{number}", prompt, 2)
        engine.run()
        assert list(request.all_token_ids) == reference(prompt, 2)
    assert engine.num_external_tokens > 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_what_cannot_be_served_is_refused_by_vllms_own_names(make_engine):
    """The rest of vllm.md's table is in `test_vllm_config`, with stand-ins."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    engine = make_engine(num_drafts=3)
    caches = engine.scheduler.kv_cache_config
    ConnectorConfig.of(engine.config, caches)
    for method in ("eagle", "draft_model"):
        engine.config.speculative_config.method = method
        with pytest.raises(ValueError, match=f"method='{method}' must be one of ngram"):
            ConnectorConfig.of(engine.config, caches)
    for method in ("eagle3", "dflash", "mtp"):
        engine.config.speculative_config.method = method
        assert ConnectorConfig.of(engine.config, caches).drops_last_block
    engine.config.speculative_config = None
    states = MambaSpec(BLOCK_SIZE, shapes=((2, 16),), dtypes=(torch.bfloat16,))
    caches.kv_cache_groups.append(KVCacheGroupSpec(["states"], states))
    with pytest.raises(ValueError, match="mamba_cache_mode=none must be 'align'"):
        ConnectorConfig.of(engine.config, caches)


def test_executors_without_a_number_of_hosts_are_refused(make_engine):
    executors = pytest.importorskip("tpu_inference.executors.ray_distributed_executor")
    engine = make_engine()
    caches = engine.scheduler.kv_cache_config
    parallel = engine.config.parallel_config
    for executor in (executors.RayDistributedExecutor, "mp", "external_launcher"):
        parallel.distributed_executor_backend = executor
        with pytest.raises(ValueError, match="must be 'uni', which TPU_MULTIHOST"):
            ConnectorConfig.of(engine.config, caches)
