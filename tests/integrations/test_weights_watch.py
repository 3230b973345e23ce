"""Whether arrays of a runner's weights were replaced."""

import weakref
from types import SimpleNamespace

import numpy as np
from flax import nnx

from jaxkv.integrations.weights_watch import WeightsWatch


def arrays(*names):
    return {name: np.zeros(2) for name in names}


def replace_an_array_at_its_address(runner):
    del runner.state["b"]
    runner.state["b"] = np.zeros(2)


CHANGES = {
    "the state": lambda runner: setattr(
        runner, "state", {**runner.state, **arrays("a")}
    ),
    "an array": lambda runner: runner.state.update(arrays("b")),
    "an array at its address": replace_an_array_at_its_address,
    "a nested array": lambda runner: runner.state["layers"][1].update(arrays("a")),
    "an array more": lambda runner: runner.state.update(arrays("c")),
    "the leaves": lambda runner: setattr(runner, "state_leaves", (np.zeros(2),)),
    "the drafter's": lambda runner: setattr(
        runner.drafter, "state_leaves", (np.zeros(2),)
    ),
}


def test_replaced_arrays_are_noticed_once():
    for name, change in CHANGES.items():
        state = arrays("a", "b") | {"layers": [arrays("a"), arrays("a")]}
        runner = SimpleNamespace(state=state, drafter=SimpleNamespace())
        runner.state_leaves = runner.state
        watch = WeightsWatch(runner)
        assert not watch.has_changed()
        change(runner)
        assert watch.has_changed(), name
        assert not watch.has_changed(), name


def test_a_state_of_flax_is_noticed_where_the_model_reads_other_leaves():
    """Written in place it makes no difference until the leaves are refreshed."""
    state = nnx.State({"a": nnx.Param(np.zeros(2))})
    runner = SimpleNamespace(state=state, state_leaves=(state["a"].get_value(),))
    watch, of_older = WeightsWatch(runner), WeightsWatch(SimpleNamespace(state=state))
    assert not of_older.has_changed()
    state["a"].set_value(np.ones(2))
    assert of_older.has_changed(), "an older runner reads the state itself"
    assert not watch.has_changed()
    runner.state_leaves = (state["a"].get_value(),)
    assert watch.has_changed()


def test_arrays_of_adapters_do_not_count():
    runner = SimpleNamespace(state=arrays("a", "q.lora_a_stacked.0"))
    watch = WeightsWatch(runner)
    for _ in range(2):
        runner.state = {**runner.state, "q.lora_a_stacked.0": np.zeros(2)}
        assert not watch.has_changed()
    runner.state = {**runner.state, "a": np.zeros(2)}
    assert watch.has_changed()


def test_old_arrays_are_not_kept():
    runner = SimpleNamespace(state=arrays("a"))
    watch = WeightsWatch(runner)
    old = weakref.ref(runner.state["a"])
    runner.state = {}
    assert old() is None
    assert watch.has_changed()


def test_a_runner_without_weights_never_changes():
    for attributes in ({}, {"state": None}, {"state": 5}):
        assert not WeightsWatch(SimpleNamespace(**attributes)).has_changed()
