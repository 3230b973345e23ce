"""Restoring what tpu-inference drops, over stand-ins for its runner."""

import dataclasses
import logging
import sys
from types import SimpleNamespace

import pytest

from jaxkv.integrations.vllm.tokens import TokenRestorer


@dataclasses.dataclass
class CachedRequestState:
    req_id: str
    prompt_token_ids: list
    output_token_ids: list


@dataclasses.dataclass
class AsyncPreResults:
    request_seq_lens: list
    placeholder_req_id_to_index: dict


class Manager:
    """Records the tokens of each request when `update_states` of tpu-inference runs."""

    def __init__(self, states, in_batch):
        self.requests = {state.req_id: state for state in states}
        self.input_batch = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(in_batch)}
        )
        self.seen = []

    def update_states(self, scheduler_output, get_positions):
        self.seen.append(
            {name: list(r.output_token_ids) for name, r in self.requests.items()}
        )
        return get_positions()


class Runner:
    """One whose module has no name that is known."""

    def __init__(self, manager):
        self.persistent_batch_manager = manager
        self._pre_async_results = None


def make_runner(*states, in_batch=()):
    return Runner(Manager(states, in_batch))


def make_step(num_outputs, ids, resumed=(), new=()):
    cached = SimpleNamespace(
        req_ids=list(num_outputs),
        num_output_tokens=list(num_outputs.values()),
        all_token_ids=ids,
        resumed_req_ids=set(resumed),
    )
    new = [SimpleNamespace(req_id=name) for name in new]
    return SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=new)


def update(runner, step):
    return runner.persistent_batch_manager.update_states(step, lambda: "changed")


def test_a_request_that_is_added_again_has_the_tokens_of_the_scheduler():
    left_out = CachedRequestState("left out", [1, 2], [3, 0])
    preempted = CachedRequestState("preempted", [1], [7, 8, 0])
    unanswered = CachedRequestState("unanswered", [1, 2, 3], [])
    running = CachedRequestState("running", [1], [5, 0])
    runner = make_runner(left_out, preempted, unanswered, running, in_batch=["running"])
    restorer = TokenRestorer.install(runner)
    shared = left_out.output_token_ids
    ids = {"left out": [1, 2, 3, 4], "preempted": [1, 7, 8], "unanswered": [1, 2, 3]}
    num_outputs = {"left out": 2, "preempted": 2, "unanswered": 0, "running": 2}
    assert update(runner, make_step(num_outputs, ids, ["preempted"])) == "changed"
    # A request of the last step keeps its placeholder: the device has its token.
    assert runner.persistent_batch_manager.seen == [
        {"left out": [3, 4], "preempted": [7, 8], "unanswered": [], "running": [5, 0]}
    ]
    assert left_out.output_token_ids is shared
    assert restorer.num_restored == 1


def test_ids_that_stop_coming_end_the_step_before_anything_changes():
    for ids, num in (({}, 0), ({"b": [1, 2, 3]}, 3)):
        runner = make_runner(
            CachedRequestState("a", [1], [0]), CachedRequestState("b", [1, 2], [3, 0])
        )
        restorer = TokenRestorer.install(runner)
        said = f"sent {num} token ids instead of those of its 2 prompt and 2 output"
        with pytest.raises(RuntimeError, match=said) as caught:
            update(runner, make_step({"a": 1, "b": 2}, {"a": [1, 9], **ids}))
        assert "request 'b'" in str(caught.value)
        assert "--no-async-scheduling" in str(caught.value)
        manager = runner.persistent_batch_manager
        assert manager.seen == []
        assert manager.requests["a"].output_token_ids == [0]
        assert restorer.num_restored == 0


@pytest.mark.parametrize(
    ("step", "left"),
    [
        # vLLM drops the results; tpu-inference would overwrite a valid token.
        (
            make_step({"again": 2, "other": 2}, {"again": [1, 2, 3]}, ["again"]),
            [2, 3],
        ),
        # After more streamed input, the last token is no longer in the history.
        (make_step({"other": 2}, {}, new=["again", "unknown"]), [2, 3, 0]),
    ],
    ids=["forced preemption", "streamed input"],
)
def test_results_of_a_request_that_begins_again_are_withdrawn(step, left):
    first, second = (
        CachedRequestState("again", [1], [2, 3, 0]),
        CachedRequestState("other", [1], [4, 0]),
    )
    runner = make_runner(first, second, in_batch=["again", "other"])
    results = [(0, first, 4), (1, second, 3)]
    runner._pre_async_results = AsyncPreResults(results, {"again": 0, "other": 1})
    TokenRestorer.install(runner)
    update(runner, step)
    assert first.output_token_ids == left
    assert runner._pre_async_results == AsyncPreResults([(1, second, 3)], {"other": 1})


def test_installing_twice_wraps_once_and_is_logged_once(caplog):
    runner = make_runner()
    with caplog.at_level(logging.INFO, "jaxkv"):
        restorer = TokenRestorer.install(runner)
        assert TokenRestorer.install(runner) is restorer
    assert runner.persistent_batch_manager.update_states is restorer
    (record,) = caplog.records
    assert "restore_tokens=false" in record.getMessage()


def test_a_runner_without_the_needed_attributes_is_refused(monkeypatch):
    def check(runner, name):
        with pytest.raises(ValueError, match=rf"{name}[\w.]* is missing") as caught:
            TokenRestorer.install(runner)
        assert "Add --no-async-scheduling" in str(caught.value)
        manager = getattr(runner, "persistent_batch_manager", None)
        assert not isinstance(getattr(manager, "update_states", None), TokenRestorer)

    manager = "persistent_batch_manager"
    for path in (
        "_pre_async_results",
        manager,
        f"{manager}.requests",
        f"{manager}.input_batch.req_id_to_index",
    ):
        runner = holder = make_runner()
        *owner, name = path.split(".")
        for part in owner:
            holder = getattr(holder, part)
        delattr(holder, name)
        check(runner, name)

    @dataclasses.dataclass
    class Renamed:
        prompt_token_ids: list
        request_seq_lens: list

    runner, module = make_runner(), sys.modules[__name__]
    for name, field in (
        ("CachedRequestState", "output_token_ids"),
        ("AsyncPreResults", "placeholder_req_id_to_index"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Renamed)
            check(runner, f"Renamed: {field}")
            patch.delattr(module, name)
            check(runner, rf"test_vllm_tokens\.{name}")
    runner.persistent_batch_manager.update_states = lambda output, positions: None
    check(runner, "<lambda>: scheduler_output")
