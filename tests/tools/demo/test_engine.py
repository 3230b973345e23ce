"""The engine end to end: with and without offloading, the tokens of the dense model.

`pytest -m long` runs each model with each size of the host, mode and policy, with loads
that requests wait for and with loads in the step itself, with a store behind the host
and without one.
"""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.policies import policy_names
from jaxkv.scheduling.protocol import ConnectorOutput
from jaxkv.strict import StrictOffloadWorker
from jaxkv.tools.demo import engine as demo_engine
from jaxkv.tools.demo.engine import Phase
from tests.reference.transformer import reference_forward
from tests.rigs.own_pool import OwnPool
from tests.tools.demo.small_engine import (
    CONFIG,
    MODELS,
    check_at_rest,
    make_engine,
    steps_of,
)

HOST_BLOCKS = 40


def finish(engine, *requests):
    """Run until these requests are over; others may remain."""
    for _ in range(5000):
        if all(r.phase in (Phase.FINISHED, Phase.ABORTED) for r in requests):
            engine.drain()
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def random_tokens(seed, num):
    return random.Random(seed).choices(range(256), k=num)


def check_tokens(model, request):
    """Generated tokens are the best of the dense model, or tied with it."""
    tokens = np.zeros(CONFIG.max_seq_tokens, np.int32)  # one length, one compilation
    tokens[: request.num_tokens] = request.tokens
    logits = np.asarray(jitted_forward(steps_of(model).model, jnp.asarray(tokens)))
    first = len(request.prompt) - 1
    rows = logits[first : first + len(request.generated)]
    chosen = rows[np.arange(len(rows)), list(request.generated)]
    np.testing.assert_allclose(chosen, rows.max(axis=1), rtol=0, atol=1e-3)


jitted_forward = nnx.jit(reference_forward)


def test_wrong_blocks_from_the_host_change_the_tokens(monkeypatch):
    """The control: equal tokens prove that the right blocks were loaded."""
    prompt = random_tokens(3, 80)
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    first = engine.submit(prompt, 8)
    finish(engine, first)
    flush_device(engine)
    load = engine.transfer.load_each

    # Not only in another order, which attention would not notice.
    def load_one_block_everywhere(pool, host_ids, *args, **options):
        return load(pool, [host_ids[0]] * len(host_ids), *args, **options)

    monkeypatch.setattr(engine.transfer, "load_each", load_one_block_everywhere)
    again = engine.submit(prompt, 8)
    finish(engine, again)
    assert again.host_hit_tokens == 76
    assert again.generated != first.generated


def flush_device(engine):
    """Evict all cached blocks from the device tier."""
    engine.blocks.free(engine.blocks.allocate(engine.blocks.num_free))


def serve_random(engine, seed):
    """Serve requests with common prefixes, and abort some; return all."""
    rng = random.Random(seed)
    documents = [random_tokens(i, 70) for i in range(3)]
    unborn, requests = 16, []
    for _ in range(5000):
        while unborn and rng.random() < 0.5:
            unborn -= 1
            prompt = rng.choice(documents)[: rng.randrange(1, 71)]
            prompt += random_tokens(unborn, rng.randrange(8))
            requests.append(engine.submit(prompt, rng.randrange(1, 19)))
        if requests and rng.random() < 0.05:
            engine.abort(rng.choice(requests[1:] or requests))
        # Later requests may continue those that finished.
        documents += [request.tokens for request in engine.step()]
        if not unborn and not engine.has_work:
            break
    assert not engine.has_work, "the engine does not come to an end"
    engine.drain()
    engine.close()
    return requests


STORED = {"storage": "", "storage_write": "through"}


def cases():
    """Yield a model, the size of its host, options of the offloading, and a seed."""
    yield "window", 0, {}, 2
    yield "hybrid", HOST_BLOCKS, {}, 3
    yield "hybrid", HOST_BLOCKS, {"mode": "lazy", "cache_policy": "hazard"}, 5
    yield "full", HOST_BLOCKS, {"cache_policy": "hazard", **STORED}, 4
    long = [(variant, 0, {}) for variant in MODELS]
    for variant, mode in itertools.product(MODELS, ("eager", "lazy")):
        long.append((variant, 3, {"mode": mode}))
        for policy, stored in itertools.product(policy_names(), ({}, STORED)):
            options = {"mode": mode, "cache_policy": policy} | stored
            long.append((variant, HOST_BLOCKS, options))
    for case, seed in itertools.product(long, range(8)):
        yield pytest.param(*case, seed, marks=pytest.mark.long)


@pytest.mark.parametrize(("variant", "host_blocks", "options", "seed"), [*cases()])
def test_preempted_requests_generate_the_right_tokens(
    variant, host_blocks, options, seed, tmp_path
):
    if "storage" in options:
        options = options | {"storage": str(tmp_path)}
    engine = make_engine(variant, num_host_blocks=host_blocks, **options)
    requests = serve_random(engine, seed)
    check_at_rest(engine)
    phases = [request.phase for request in requests]
    assert set(phases) <= {Phase.FINISHED, Phase.ABORTED}
    assert phases.count(Phase.FINISHED) > 5
    assert engine.num_preemptions == sum(r.num_preemptions for r in requests) > 0
    assert requests[0].num_preemptions == 0  # no request is older
    assert bool(host_blocks) == (engine.offload is not None)
    assert host_blocks < HOST_BLOCKS or engine.worker.blocks_loaded > 0
    for request in requests:
        if request.phase is Phase.FINISHED:
            assert len(request.generated) == request.max_new_tokens
        check_tokens(variant, request)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["plain", "strict", "failing loads"])
def test_an_engine_with_a_pool_of_its_own_generates_the_right_tokens(
    mode, seed, monkeypatch
):
    if mode != "plain":
        monkeypatch.setenv("JAXKV_STRICT", "1")
        monkeypatch.setenv("JAXKV_STRICT_SEED", str(seed))
    if mode == "failing loads":
        monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    monkeypatch.setattr(demo_engine, "DeviceBlockPool", OwnPool)
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    assert isinstance(engine.worker, StrictOffloadWorker) == (mode != "plain")
    requests = serve_random(engine, seed)
    check_at_rest(engine)
    assert engine.num_preemptions > 0
    assert engine.worker.blocks_loaded > 0
    failed = engine.offload.stats.num_loads_failed
    assert bool(failed) == (mode == "failing loads")
    for request in requests:
        check_tokens("full", request)


# Usable blocks of an engine, and the fewest that one request leaves free.
BOUNDS = {"full": (24, 0), "window": (14, 1), "hybrid": (24 + 11, 7)}


def test_a_request_never_holds_more_than_max_blocks_held(monkeypatch):
    for variant, (usable, min_free) in BOUNDS.items():
        engine = make_engine(variant)
        assert engine.blocks.num_free == usable
        allocate, num_free = engine.blocks.allocate, []

        def allocate_and_look(
            num, allocate=allocate, num_free=num_free, blocks=engine.blocks
        ):
            block_ids = allocate(num)
            num_free.append(blocks.num_free)
            return block_ids

        monkeypatch.setattr(engine.blocks, "allocate", allocate_and_look)
        request = engine.submit(random_tokens(0, 70), 26)
        while engine.has_work:
            engine.step()
        check_tokens(variant, request)
        check_at_rest(engine)
        # The bound is close; when the window's table is longest, the other is short.
        assert min(num_free) == min_free, variant
        small = make_engine(variant, device_blocks=usable)
        with pytest.raises(ValueError, match=f"needs {usable} blocks .* {usable - 1}"):
            small.submit([1] * 90, 6)


def test_what_is_waited_for_delays_no_other_request(monkeypatch):
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    ask = engine.offload.get_num_new_matched_tokens
    slow = engine.submit(random_tokens(0, 50), 4)
    answers = iter(range(6))

    def ask_slowly(request, num_computed_tokens):
        if request is slow and next(answers, None) is not None:
            return None, False
        return ask(request, num_computed_tokens)

    monkeypatch.setattr(engine.offload, "get_num_new_matched_tokens", ask_slowly)
    quick = engine.submit(random_tokens(1, 10), 2)
    while quick.phase is not Phase.FINISHED:
        assert slow.phase is Phase.WAITING
        engine.step()
    finish(engine, slow)
    # Blocks that stores hold are waited for; here no store arrives.
    with monkeypatch.context() as context:
        context.setattr(engine.worker, "poll", ConnectorOutput)
        first = engine.submit(random_tokens(2, 90), 5)
        while first.phase is not Phase.FINISHED:
            engine.step()
        second = engine.submit(random_tokens(3, 90), 5)
        for _ in range(20):
            engine.step()
        assert second.phase is not Phase.FINISHED
    finish(engine, second)
    for request in (slow, second):
        check_tokens("full", request)
    check_at_rest(engine)


def test_a_synchronous_load_is_used_in_the_same_step(monkeypatch):
    """The load may only copy blocks on the device."""
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    prompt = random_tokens(0, 60)
    first = engine.submit(prompt, 4)
    finish(engine, first)
    flush_device(engine)
    ask = engine.offload.get_num_new_matched_tokens
    monkeypatch.setattr(
        engine.offload,
        "get_num_new_matched_tokens",
        lambda *arguments: (ask(*arguments)[0], False),
    )
    start, reports = engine.worker.start, []

    def start_and_wait(meta, pool):
        pool, output = engine.worker.drain(start(meta, pool))
        reports.append(output)
        return pool

    monkeypatch.setattr(engine.worker, "start", start_and_wait)
    monkeypatch.setattr(
        engine.worker, "poll", lambda: reports.pop() if reports else ConnectorOutput()
    )
    again = engine.submit(prompt, 4)
    engine.step()
    assert again.host_hit_tokens == 56
    assert len(again.generated) == 1
    finish(engine, again)
    assert again.generated == first.generated
    check_at_rest(engine)


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing():
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    prompt = random_tokens(0, 60)
    finish(engine, engine.submit(prompt, 2))
    flush_device(engine)
    request = engine.submit(prompt, 2)
    while request.phase is Phase.WAITING:
        engine.step()
    assert request.phase is Phase.LOADING
    engine.abort(request)
    engine.drain()
    check_at_rest(engine)


def test_invalid_requests_are_refused():
    engine = make_engine()
    for prompt_tokens, new_tokens, match in (
        (0, 4, r"len\(prompt\)=0 and max_new_tokens=4 must both be at least 1"),
        (5, 0, "max_new_tokens=0 must both"),
        (100, 1, "101 tokens is longer than max_seq_tokens=96"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.submit([1] * prompt_tokens, new_tokens)
        assert not engine.has_work


def test_each_step_is_compiled_once_and_a_prefix_stored_once_for_its_weights():
    engine = make_engine(num_host_blocks=HOST_BLOCKS)
    engine.warm_up()
    programs = steps_of("full").prefill_chunk, steps_of("full").decode
    sizes = [program.func._cache_size() for program in programs]
    prefix = random_tokens(4, 64)
    for tail in range(4):
        request = engine.submit(prefix + random_tokens(tail, 8), 2)
        finish(engine, request)
    assert engine.worker.blocks_stored == 64 // 4 + 4 * (8 // 4)
    assert request.device_hit_tokens == 64
    assert [program.func._cache_size() for program in programs] == sizes
    retrained = make_engine(weights_epoch="2").submit(prefix, 2)
    assert retrained.chains[0].keys[0] != request.chains[0].keys[0]
