"""Strict parts name the mistake of each wrong engine, and let the right one pass."""

import dataclasses
import random

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
    serve_twice,
    takes_loads_that_failed,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of an engine, and of its prompts."""

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


def test_a_correct_engine_passes_and_gets_its_blocks_back(setup):
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    first, second = serve_twice(engine, prompts, size.num_new)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    # All full blocks except the last token's.
    num_hit = (size.prompt_tokens - 1) // BLOCK * BLOCK
    assert [hit for _, hit in second] == [num_hit] * size.num_prompts
    assert engine.worker.bytes_loaded > 0


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_with_a_pool_of_its_own_passes(seed, monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT", "1")
    monkeypatch.setenv("JAXKV_STRICT_SEED", str(seed))
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "3")
    monkeypatch.setattr(jaxkv, "DeviceBlockPool", OwnPool)
    engine = Right(SMALL.device_blocks, SMALL.host_blocks)
    prompts = SMALL.prompts(seed)
    for answers in serve_twice(engine, prompts, SMALL.num_new):
        assert [tokens for tokens, _ in answers] == [
            answer(prompt, SMALL.num_new) for prompt in prompts
        ]
    assert engine.worker.bytes_loaded > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1


def test_the_right_engine_computes_what_loads_that_fail_were_to_bring(
    setup, monkeypatch
):
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    first, second = serve_twice(engine, prompts, size.num_new)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    stats = engine.scheduler.stats
    assert stats.num_loads_failed >= 1
    assert stats.num_loads >= 1


def test_an_engine_that_goes_on_after_a_failed_load_is_refused(setup, monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "2")
    size, prompts = setup
    engine = Right(size.device_blocks, size.host_blocks)
    takes_loads_that_failed(engine)
    with pytest.raises(
        StrictError, match=r"its load has failed, so it has only \d: up"
    ):
        serve_twice(engine, prompts, size.num_new)


def test_a_correct_hybrid_engine_passes(setup):
    size, prompts = setup
    groups = FullAttention(BLOCK), SlidingWindow(BLOCK, 10)
    engine = Right(2 * size.device_blocks, 2 * size.host_blocks, groups)
    first, second = serve_twice(engine, prompts, size.num_new)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    assert engine.worker.bytes_loaded > 0
