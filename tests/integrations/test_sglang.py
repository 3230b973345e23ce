"""sglang-jax's real scheduler on the CPU, with jaxkv's host tier and without.

Tokens are compared with those of a plain engine. .ci/sglang makes the environment, and
runs this there.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("sgl_jax", reason="no sglang-jax (.ci/sglang has an environment)")

from sgl_jax.srt.managers import scheduler as scheduler_module

from jaxkv import OffloadConfig
from jaxkv.integrations import sglang
from tests.integrations.sglang_cpu import rig, scenes
from tests.rigs.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
SMALL, LARGE, PAGE = 512, 4096, rig.PAGE
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model; meanwhile, JAX has the defaults that sglang-jax was written for."""
    names = ("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, ("allow", "standard"), strict=True):
        jax.config.update(name, value)  # Of all threads.
    rig.make_model(folder := tmp_path_factory.mktemp("sglang") / "model")
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def expected(model):
    """Return the answers of a plain engine to waves of requests."""
    engine, known = rig.Engine(model, pool_tokens=LARGE), {}

    def answers(waves):
        for start, requests in enumerate(waves):
            new = [r for r in requests if repr(r[1:]) not in known]
            for at in range(0, len(new), rig.RUNNING):
                some = [
                    (f"{start}-{at}-{n}", *r[1:])
                    for n, r in enumerate(new[at : at + rig.RUNNING])
                ]
                found = engine.run(engine.wave(some))
                known.update({repr(r[1:]): found[r[0]].tokens for r in some})
        return {r[0]: known[repr(r[1:])] for requests in waves for r in requests}

    return answers


def make(model, *, overlap=False, pool_tokens=SMALL, zero=False, server=None, **config):
    """Make an engine with a host tier; `zero` spoils what it loads."""
    config = {"num_host_blocks": 256} | config
    engine = rig.Engine(
        model, pool_tokens=pool_tokens, overlap=overlap, config=config, **server or {}
    )
    if zero:
        offload, collect = engine.offload, engine.offload._collect

        def spoil(output):
            loads = [r for r in offload._waiting.values() if r.slots is not None]
            kv = offload._kv
            for request in loads:
                pages = np.array(offload._pages(request.slots[request.num_found :]))
                kv.kv_buffer = [
                    a.at[pages].set(0, out_sharding=a.sharding) for a in kv.kv_buffer
                ]
            collect(output)

        offload._collect = spoil
    return engine


def check_nothing_is_left(engine):
    """Check that every page and block is free, and that no request is tracked."""
    offload, host = engine.offload, engine.offload.hooks.scheduler
    assert not offload.parked.holds
    assert not offload.parked.parked
    assert not offload._waiting
    assert not offload.hooks._tracked
    assert not host.has_pending_loads()
    assert not host.has_pending_stores()
    tree, allocator = offload._tree, offload._allocator
    assert tree.evictable_size() + allocator.available_size() == allocator.size
    assert tree.protected_size() == 0


def check_same(answers, wanted):
    """Check that finished answers are the plain engine's, and others begin alike."""
    for name, answer in answers.items():
        tokens = wanted[name]
        assert answer.tokens == (
            tokens if answer.finished else tokens[: len(answer.tokens)]
        ), name


def loadable(waves):
    """Prompt tokens that the host can have when users come back: whole pages."""
    last, count = {}, 0
    for name, tokens, _ in itertools.chain.from_iterable(waves):
        user = name.rpartition("-")[2]
        count += last.get(user, 0) // PAGE * PAGE
        last[user] = len(tokens)
    return count


@BOTH
def test_returning_users_find_all_tokens_on_the_host(model, expected, overlap):
    engine = make(model, overlap=overlap)
    for name, at_once in (("one by one", False), ("at once", True)):
        waves = scenes.conversations(at_once, name, users=5, turns=2, at_once=at_once)
        answers = engine.run(engine.waves(waves))
        check_same(answers, expected(waves))
        num_cached = sum(answer.num_cached for answer in answers.values())
        # At once, requests are retracted and find more.
        assert num_cached == loadable(waves) or at_once
        assert num_cached >= loadable(waves)
    assert engine.offload.worker.blocks_loaded > 40
    check_nothing_is_left(engine)


def test_zeroed_loads_change_tokens(model, expected):
    engine = make(model, zero=True)
    waves = scenes.conversations(0, "zero", users=4, turns=2, at_once=False)
    answers, wanted = engine.run(engine.waves(waves)), expected(waves)
    assert engine.offload.worker.blocks_loaded
    wrong = [name for name in answers if answers[name].tokens != wanted[name]]
    assert wrong
    assert all("zero-1-" in name for name in wrong)


def attack(model, expected, seed, count, monkeypatch, **options):
    """Run random requests with retractions, aborts, pauses and flushes."""
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 17)
    requests, aborted = scenes.random_requests(seed, count), set()
    engine = make(model, **options)
    answers = engine.run(scenes.random_script(engine, requests, seed, aborted))
    assert answers.keys() == {name for name, *_ in requests}
    assert {name for name in answers if not answers[name].finished} <= aborted
    check_same(answers, expected([requests]))
    check_nothing_is_left(engine)
    assert engine.offload.worker.blocks_loaded
    return engine


@BOTH
def test_retractions_aborts_pauses_and_flushes_change_no_token(
    model, expected, overlap, monkeypatch
):
    attack(model, expected, 1, 40, monkeypatch, overlap=overlap, pool_tokens=400)


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_a_thousand_requests_in_ten_configurations(
    model, expected, number, monkeypatch
):
    config = [
        {},
        {"num_host_blocks": 60, "cache_policy": "arc"},
        {"store_batch_blocks": 0},
        {"compression": None, "blocks_per_host_block": 2},
        {"max_blocks_in_flight": 4, "cache_policy": "hazard"},
    ][number % 5]
    # sglang-jax gives a request no more tokens than the pool has.
    options = {"overlap": number >= 5, "pool_tokens": (352, 512)[number % 2]} | config
    attack(model, expected, 100 + number, 100, monkeypatch, **options)


@BOTH
def test_new_weights_are_never_served_the_kv_of_old_ones(
    model, expected, overlap, tmp_path, caplog
):
    rig.make_model(tmp_path / "new", seed=1)
    plain = rig.Engine(tmp_path / "new", pool_tokens=LARGE)
    engine = make(model, overlap=overlap, keep_on_flush=True)
    offload, runner = engine.offload, engine.scheduler.tp_worker.get_model_runner()
    waves = scenes.conversations(3, "old", users=2, turns=1, at_once=False)
    check_same(engine.run(engine.waves(waves)), expected(waves))
    stored = offload.worker.blocks_stored
    assert stored
    new = plain.scheduler.tp_worker.get_model_runner().model_state_leaves
    runner.model_state_leaves = list(new)
    # Until the flush, the radix tree itself serves old KV: nothing of it is stored.
    engine.run(engine.waves(waves))
    assert "the weights were replaced" in caplog.text
    assert offload.worker.blocks_stored == stored
    assert offload.worker.blocks_loaded == 0

    def flush():
        yield [rig.flush()]
        yield from scenes.idle(3)

    engine.run(flush())
    assert engine.sent[-1].success
    wanted = plain.run(plain.waves(waves))
    answers = engine.run(engine.waves(waves))
    assert {n: a.tokens for n, a in answers.items()} == {
        n: a.tokens for n, a in wanted.items()
    }
    assert sum(answer.num_cached for answer in answers.values()) == 0
    # They are stored under new keys, which survive a flush, as the settings ask for.
    engine.run(flush())
    answers = engine.run(engine.waves(waves))
    assert {n: a.tokens for n, a in answers.items()} == {
        n: a.tokens for n, a in wanted.items()
    }
    assert sum(answer.num_cached for answer in answers.values()) > 0
    check_nothing_is_left(engine)


def test_salts_adapters_and_log_probabilities_are_in_what_is_loaded(model, expected):
    engine = make(model, keep_on_flush=True)
    prompt = scenes.tokens(np.random.default_rng(5), 100)

    def script(*requests):
        for options in requests:
            yield [engine.request("request", prompt, 4, **options)]
            while engine.open:
                yield []
            yield from scenes.idle(30)
            yield [rig.flush()]
            yield []

    def num_cached(**options):
        return engine.run(script(options))["request"].num_cached

    assert num_cached() == 0
    assert num_cached() == 96
    assert num_cached(extra_key="salt") == 0
    assert num_cached(extra_key="salt") == 96
    logprobs = {"return_logprob": True, "logprob_start_len": 40}
    logprobs |= {"token_ids_logprob": None}
    assert num_cached(**logprobs) == 32
    check_nothing_is_left(engine)
    # sglang-jax joins both names: "salt" + "a" and "sal" + "ta" are one to its tree.
    reqs = [
        scheduler_module.Req("r", "", [1], None, extra_key=salt, lora_id=adapter)
        for salt, adapter in (("salt", "a"), ("sal", "ta"), ("salta", None))
    ]
    requests = [sglang._Request(req, engine.offload) for req in reqs]
    names = {engine.offload.hooks._extras_of(request) for request in requests}
    assert {req.extra_key for req in reqs} == {"salta"}
    assert len(names) == 3


def test_a_new_engine_finds_what_another_has_written_to_the_store(
    model, expected, tmp_path
):
    store = {"storage": str(tmp_path / "store"), "storage_write": "through"}
    waves = scenes.conversations(6, "store", users=2, turns=1, at_once=False)
    found = []
    for weights in ("weights", "weights", "other weights"):
        engine = make(model, weights=weights, **store)
        answers = engine.run(engine.waves(waves, steps_between=200))
        check_same(answers, expected(waves))
        found.append(sum(answer.num_cached for answer in answers.values()))
    assert found == [0, 256, 0]
    # The model was written after this process began.
    with pytest.raises(ValueError, match="has changed since this process began"):
        make(model, **store)


def test_what_is_not_served_is_refused_and_nothing_changes(model):
    engine = rig.Engine(model, pool_tokens=SMALL)
    scheduler, config = engine.scheduler, OffloadConfig(num_host_blocks=4)
    before = dict(vars(scheduler)), dict(vars(scheduler.tree_cache))
    args = scheduler.server_args
    for name, value in (
        *(("hicache_storage", "none"), ("dp_size", 2), ("nnodes", 2)),
        *(("speculative_algorithm", "EAGLE"), ("disaggregation_mode", "decode")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(args, name, value)
            with pytest.raises(ValueError, match=f"{name}={value!r} must be "):
                sglang.attach(scheduler, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "tree_cache", object())
        with pytest.raises(ValueError, match="object must be RadixCache"):
            sglang.attach(scheduler, config)
    with pytest.raises(ValueError, match="host_bytes and num_host_blocks are both"):
        sglang.attach(scheduler, OffloadConfig())
    scheduler.waiting_queue.append(None)
    with pytest.raises(ValueError, match="the scheduler must be new"):
        sglang.attach(scheduler, config)
    scheduler.waiting_queue.clear()
    assert (vars(scheduler), vars(scheduler.tree_cache)) == before
    sglang.attach(scheduler, config)
    with pytest.raises(ValueError, match="the scheduler must be new"):
        sglang.attach(scheduler, config)


def test_the_server_of_the_example_serves_returning_users_from_the_host(model):
    port, metrics_port = free_port(), free_port()
    arguments = f"""
        --model-path {model} --port {port} --skip-tokenizer-init --skip-server-warmup
        --device cpu --dtype float32 --page-size {PAGE} --max-total-tokens {SMALL}
        --max-running-requests 4 --chunked-prefill-size 64 --context-length 2048
        --precompile-token-paddings 64 --precompile-bs-paddings 4 --grammar-backend none
        --disable-overlap-schedule
    """
    environ = {"JAXKV_NUM_HOST_BLOCKS": "64", "JAXKV_METRICS_PORT": str(metrics_port)}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def get(path, data=None, port=port):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    def ask(first):
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        ids = list(range(first, first + 120))
        data = {"input_ids": ids, "sampling_params": sampling}
        answer = json.loads(get("generate", data))
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    server = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/sglang_server.py"), *arguments.split()],
        env=os.environ | environ,
        start_new_session=True,
    )
    try:
        while True:
            assert server.poll() is None
            try:
                get("health")
                break
            except OSError:
                time.sleep(0.5)
        tokens, num_cached = ask(5)
        assert num_cached == 0
        for first in (200, 350, 500, 650):
            ask(first)
        assert ask(5) == (tokens, 112)
        assert "kv_offload_blocks_loaded_total" in get("metrics", port=metrics_port)
        assert "Cache flushed" in get("flush_cache", {})
        assert ask(5) == (tokens, 0)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
