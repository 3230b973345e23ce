"""Strict parts name the mistake of each wrong engine, and let the right one pass."""

import dataclasses
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import DeviceBlockPool, FullAttention, SlidingWindow
from jaxkv.strict import StrictError
from tests.rigs.own_pool import OwnPool
from tests.rigs.wrong_engines import (
    BLOCK,
    WRONG,
    Right,
    TakesBlocksForLarger,
    answer,
    example,
    serve_twice,
    takes_loads_that_failed,
    toy_model,
)


@dataclasses.dataclass(frozen=True)
class Size:
    device_blocks: int
    host_blocks: int
    num_prompts: int
    prompt_tokens: int
    num_new: int

    def prompts(self, seed):
        rng = random.Random(seed)
        count = range(self.num_prompts)
        return [[rng.randrange(90) for _ in range(self.prompt_tokens)] for _ in count]


SMALL, LARGER = Size(12, 64, 3, 30, 6), Size(14, 40, 2, 35, 13)
# By their pools: the library's, and one that the engine has of its own.
SETUPS = {
    "small": (3, SMALL, DeviceBlockPool),
    "larger": (8, LARGER, DeviceBlockPool),
    "own pool": (3, SMALL, OwnPool),
    "larger own pool": (8, LARGER, OwnPool),
}


@pytest.fixture(params=SETUPS.values(), ids=SETUPS)
def setup(request, monkeypatch):
    seed, size, pool = request.param
    monkeypatch.setattr(jaxkv, "DeviceBlockPool", pool)
    monkeypatch.setenv("JAXKV_STRICT", "1")
    monkeypatch.setenv("JAXKV_STRICT_SEED", str(seed))
    return size, size.prompts(seed)


@pytest.mark.parametrize(
    "setup", [SETUPS["small"], SETUPS["own pool"]], ids=["ours", "own"], indirect=True
)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_ends_with_an_error_that_names_the_call(setup, name):
    if name == "never_caches" and jaxkv.DeviceBlockPool is OwnPool:
        pytest.skip("An engine's own prefix cache may have the blocks already.")
    size, prompts = setup
    make, message = WRONG[name]
    engine = make(size.device_blocks, size.host_blocks)
    with pytest.raises(StrictError, match=message):
        serve_twice(engine, prompts, size.num_new)


def test_an_engine_with_larger_groups_than_blocks_is_refused_without_strict_parts(
    setup, monkeypatch
):
    monkeypatch.delenv("JAXKV_STRICT")
    size, prompts = setup
    engine = TakesBlocksForLarger(size.device_blocks, size.host_blocks)
    with pytest.raises(ValueError, match=r"keys of blocks of 4 tokens.*has 8"):
        serve_twice(engine, prompts, size.num_new)


def check_serves(engine, size, prompts):
    """Serve the prompts twice, and compare all tokens; return the second hits."""
    expected = [answer(prompt, size.num_new, engine.windows) for prompt in prompts]
    rounds = serve_twice(engine, prompts, size.num_new)
    for answers in rounds:
        assert [tokens for tokens, _ in answers] == expected
    assert engine.worker.bytes_loaded > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1
    return [num_hits for _, num_hits in rounds[1]]


def test_a_correct_engine_passes_and_gets_its_blocks_back(setup):
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    # All full blocks except the last token's.
    num_hit = (size.prompt_tokens - 1) // BLOCK * BLOCK
    assert check_serves(engine, size, prompts) == [num_hit] * size.num_prompts


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_with_a_pool_of_its_own_passes(seed, monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT", "1")
    monkeypatch.setenv("JAXKV_STRICT_SEED", str(seed))
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "3")
    monkeypatch.setattr(jaxkv, "DeviceBlockPool", OwnPool)
    engine = Right(SMALL.device_blocks, SMALL.host_blocks)
    check_serves(engine, SMALL, SMALL.prompts(seed))


def test_a_correct_engine_may_take_each_step_on_another_thread(setup):
    size, prompts = setup
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = itertools.cycle([first, second])

        class StepsOnTwoThreads(Right):
            def step(self, running):
                thread = next(threads)
                thread.submit(self.worker.adopt).result()
                thread.submit(super().step, running).result()

        engine = StepsOnTwoThreads(size.device_blocks, size.host_blocks)
        check_serves(engine, size, prompts)


def test_the_right_engine_computes_what_loads_that_fail_were_to_bring(
    setup, monkeypatch
):
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    check_serves(engine, size, prompts)
    assert engine.scheduler.stats.num_loads_failed >= 1


def test_failed_loads_leave_no_garbage_for_an_engine_that_masks_by_multiplying(
    setup, monkeypatch
):
    """It reads all of a block before it has written all of it, and 0 * NaN is NaN."""
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "3")

    def multiply(mask, values, _):
        # Otherwise XLA makes a select of a product with a mask.
        return jax.lax.optimization_barrier(mask.astype(float)) * values

    masking = vars(jnp) | {"where": multiply}
    monkeypatch.setattr(toy_model, "jnp", SimpleNamespace(**masking))
    run = toy_model._run.__wrapped__
    program = jax.jit(lambda *args: run(*args), donate_argnums=0, static_argnums=4)
    monkeypatch.setattr(toy_model, "_run", program)
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    num_aborted = 0
    for turn in range(12):
        prompt = prompts[turn % size.num_prompts]
        request = example.Request(f"turn {turn}", prompt, num_groups=1)
        while not engine.admit(request):
            engine.step([])
        while request.request_id in engine.loading:
            engine.step([])
        if engine.scheduler.stats.num_loads_failed > num_aborted:
            num_aborted += 1
        else:
            while request.num_tokens < len(prompt) + size.num_new:
                engine.step([request])
            assert request.tokens[len(prompt) :] == answer(prompt, size.num_new)
        engine.finish(request)
        engine.let_stores_arrive()
    assert num_aborted > 0


def test_an_engine_may_preempt_a_request_whose_load_failed(setup, monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    scheduler, preempted = engine.scheduler, []
    report, plan = scheduler.update_connector_output, scheduler.build_connector_meta

    def preempt_failed(output):
        answer = report(output)
        for request_id in answer.failed_recving:
            request, _, _ = engine.loading.pop(request_id)
            scheduler.request_preempted(request)
            for table in request.tables:
                engine.blocks.free(table[::-1])
            preempted.append(request_id)
            request.num_computed_tokens = 0
            assert engine.admit(request)
        return dataclasses.replace(answer, failed_recving=())

    def name_preempted(output):
        names = preempted[:]
        preempted.clear()
        return plan(dataclasses.replace(output, preempted_req_ids=names))

    monkeypatch.setattr(scheduler, "update_connector_output", preempt_failed)
    monkeypatch.setattr(scheduler, "build_connector_meta", name_preempted)
    check_serves(engine, size, prompts)
    assert scheduler.stats.num_loads_failed > 0


def test_an_engine_that_goes_on_after_a_failed_load_is_refused(setup, monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    takes_loads_that_failed(engine)
    with pytest.raises(StrictError, match=r"nothing wrote it .* a failed load"):
        serve_twice(engine, prompts, size.num_new)


def test_a_correct_hybrid_engine_passes(setup):
    size, prompts = setup
    groups = FullAttention(BLOCK), SlidingWindow(BLOCK, 10)
    engine = Right(2 * size.device_blocks, 2 * size.host_blocks, groups)
    check_serves(engine, size, prompts)
