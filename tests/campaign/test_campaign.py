"""The campaign: a few seconds of it by default, minutes of it with -m long."""

import collections
import os
import random
import re
from types import SimpleNamespace

import pytest

from jaxkv.integrations.vllm.adapters import Adapters
from jaxkv.integrations.vllm.pool import MARK_BYTES
from jaxkv.integrations.weights_watch import WeightsWatch
from jaxkv.keys.mark import KeyMark
from tests.campaign import campaign, corruptions
from tests.campaign.by_hand import ByHand
from tests.campaign.model import WrongBytesError
from tests.campaign.paged import PagedEngine, no_notes
from tests.campaign.prefixes import PrefixUser
from tests.campaign.processes import run_processes
from tests.campaign.setups import random_setup
from tests.rigs import fake_engine

MINUTES = float(os.environ.get("JAXKV_TEST_CAMPAIGN_MINUTES", "5"))
SEED = int(os.environ.get("JAXKV_TEST_CAMPAIGN_SEED", "0"))


def test_a_little_of_the_campaign_finds_nothing():
    counts, failure = campaign.run("smoke", engines=2, kinds=("paged",), steps=80)
    assert failure is None, failure.report
    assert counts["block reads compared"] > 100
    assert counts["requests served"] > 10


def test_a_seed_repeats_a_run():
    def run():
        lines, counts = [], collections.Counter()
        rng = random.Random("again")
        setup = random_setup(rng, executor="native")
        engine = PagedEngine(setup, rng, counts, lines.append)
        engine.run(60)
        return lines, counts, engine.digest

    assert run() == run()


def test_a_failure_says_how_to_repeat_it(monkeypatch):
    def fail(rng, counts, note, steps):
        note("what it is made of")
        note("what it did")
        raise ValueError("on purpose")

    monkeypatch.setitem(campaign.KINDS, "paged", fail)
    said = []
    _, failure = campaign.run(7, engines=1, kinds=("paged",), steps=9, say=said.append)
    assert isinstance(failure.error, ValueError)
    for text in (
        f"python -m tests.campaign --seed 7 --only {failure.number} --steps 9",
        "what it is made of",
        "what it did",
        "ValueError: on purpose",
    ):
        assert text in said[-1]


def catch(corrupt, noticed, max_engines=25, steps=250):
    """Run engines that are broken in one way until the campaign notices.

    Any other error is raised: an engine that crashes has noticed nothing.
    """
    for number in range(max_engines):
        rng = random.Random(f"control/{number}")
        setup = random_setup(rng)
        engine = PagedEngine(setup, rng, collections.Counter(), no_notes)
        corrupt(engine)
        try:
            engine.run(steps)
        except AssertionError as error:
            if re.search(noticed, str(error)):
                return error
            raise
    return None


def crash(engine, error):
    steps, step = iter(range(2)), engine.step

    def step_twice():
        if next(steps, None) is None:
            raise error
        return step()

    engine.step = step_twice


def test_a_wrong_byte_is_noticed_and_a_crash_of_the_engine_is_not():
    """The negative control of all that the campaign compares, and its own."""
    assert catch(corruptions.a_load_flips_a_byte, corruptions.WRONG)
    for error in (KeyError("wrong bytes: "), AssertionError("of something else")):
        with pytest.raises(type(error)) as raised:
            catch(lambda engine, error=error: crash(engine, error), corruptions.WRONG)
        assert raised.value is error


@pytest.mark.long
@pytest.mark.parametrize(
    "corrupt", corruptions.NOTICED, ids=lambda corrupt: corrupt.__name__
)
def test_whatever_is_broken_is_noticed(corrupt):
    assert catch(corrupt, corruptions.NOTICED[corrupt]) is not None


@pytest.mark.long
def test_a_flipped_byte_is_noticed_without_the_scheduler():
    user = ByHand(random.Random("control"), collections.Counter(), no_notes)
    corruptions.a_load_flips_a_byte(SimpleNamespace(movers=[user.mover]))
    with pytest.raises(WrongBytesError):
        user.run(600)


def a_load_of_a_prefix_flips_a_byte(user):
    load = user.cache.load

    def flip(*args):
        hit = load(*args)
        if hit is None:
            return None
        key = hit[1]["key"]
        flipped = key.at[0, 0, 0].set(key[0, 0, 0] ^ 1)
        return hit[0], hit[1] | {"key": flipped}

    user.cache.load = flip


def kv_of_older_weights_is_kept(user):
    """A save has the epoch in which it is made."""
    save = user.cache.save
    user.cache.save = lambda tokens, extras, kv, _: save(
        tokens, extras, kv, user.cache.store.epoch
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "corrupt", [a_load_of_a_prefix_flips_a_byte, kv_of_older_weights_is_kept]
)
def test_whatever_is_broken_in_a_prefix_is_noticed(corrupt):
    user = PrefixUser(random.Random("control"), collections.Counter(), no_notes)
    corrupt(user)
    with pytest.raises(AssertionError, match="wrong bytes in key"):
        user.run(600)


@pytest.mark.long
def test_keys_of_a_history_that_was_rewritten_are_noticed(monkeypatch):
    """Copies of keys only append new ones."""
    monkeypatch.setattr(KeyMark, "is_in", lambda mark, keys: mark.num <= len(keys))
    _, failure = campaign.run("control", engines=30, kinds=("paged",), steps=250)
    assert re.match(r"wrong bytes: |explain\(\) foretold", str(failure.error)), failure


def a_reset_of_the_device_is_not_noticed(patch, connector):
    if connector._scheduler is not None:
        patch.setattr(connector._scheduler, "_reset_with", lambda pool: None)


@pytest.mark.long
@pytest.mark.parametrize(
    "corrupt",
    [
        a_reset_of_the_device_is_not_noticed,
        lambda patch, _: patch.setattr(WeightsWatch, "has_changed", lambda _: False),
        lambda patch, _: patch.setattr("jaxkv.integrations.vllm.worker.PHASES", ()),
        lambda patch, _: patch.setattr(Adapters, "mark", lambda *_: b"m" * MARK_BYTES),
    ],
    ids=["a reset of the device", "replaced weights", "updated weights", "adapters"],
)
def test_old_kv_that_a_connector_serves_is_noticed(monkeypatch, corrupt):
    create = fake_engine.create_connector

    def create_broken(*args):
        connector = create(*args)
        corrupt(monkeypatch, connector)
        return connector

    monkeypatch.setattr(fake_engine, "create_connector", create_broken)
    _, failure = campaign.run("control", engines=60, kinds=("connector",))
    assert isinstance(failure.error, AssertionError), failure
    assert "Arrays are not equal" in str(failure.error)


@pytest.mark.long
def test_a_process_that_takes_failures_for_successes_is_noticed():
    def run():
        for number in range(2, 6):
            rng = random.Random(f"control/{number}")
            run_processes(rng, collections.Counter(), no_notes, 200, "1")

    named = r"WrongBytesError|PlanMismatchError|AgreementError|decided otherwise"
    with pytest.raises(AssertionError, match=named):
        run()


@pytest.mark.long
def test_the_campaign_finds_nothing():
    counts, failure = campaign.run(SEED, minutes=MINUTES)
    assert failure is None, failure.report
    assert counts["block reads compared"] > 1000
