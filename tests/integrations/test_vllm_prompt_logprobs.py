"""Log-probabilities of prompts, over stand-ins for tpu-inference's runner."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.integrations.vllm.prompt_logprobs import guard_prompt_logprobs

PROMPT = [10, 11, 12, 13, 14]
GARBAGE = -7


@dataclasses.dataclass
class State:
    req_id: str
    prompt_token_ids: list
    output_token_ids: list
    sampling_params: SimpleNamespace
    num_computed_tokens: int = 0
    in_progress_prompt_logprobs_cpu: tuple | None = None


@dataclasses.dataclass
class Snap:
    req_id: str
    req_state: State
    start: int
    end: int


@dataclasses.dataclass
class Data:
    req_snaps: list


class Batch:
    """A buffer of uninitialized memory whenever a request enters, as in 0.32."""

    def __init__(self):
        self.req_id_to_index, self.num_prompt_logprobs = {}, {}

    def add_request(self, state):
        self.req_id_to_index[state.req_id] = len(self.req_id_to_index)
        if state.sampling_params.prompt_logprobs is not None:
            self.num_prompt_logprobs[state.req_id] = 1
            size = len(state.prompt_token_ids) - 1
            state.in_progress_prompt_logprobs_cpu = (np.full((size, 1), GARBAGE),)

    def remove(self, name):
        del self.req_id_to_index[name]
        self.num_prompt_logprobs.pop(name, None)


class Manager:
    def __init__(self):
        self.requests, self.input_batch = {}, Batch()

    def update_states(self, output, get_positions):
        batch, cached = self.input_batch, output.scheduled_cached_reqs
        scheduled = set(output.num_scheduled_tokens) - cached.resumed_req_ids
        for name in set(batch.req_id_to_index) - scheduled:
            batch.remove(name)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = copy.copy(new)
            batch.add_request(self.requests[new.req_id])
        for name, num in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.requests[name].num_computed_tokens = num
            if name not in batch.req_id_to_index:
                batch.add_request(self.requests[name])
        return get_positions()


class Runner:
    """Token ids stand for log-probabilities, which results of a step bring late."""

    def __init__(self):
        self.persistent_batch_manager = Manager()
        guard_prompt_logprobs(self)

    def _get_prompt_logprobs_dict(self, data):
        found, batch = {}, self.persistent_batch_manager.input_batch
        for snap in data.req_snaps:
            prompt, state = snap.req_state.prompt_token_ids, snap.req_state
            if snap.start < snap.end:
                (buffer,) = state.in_progress_prompt_logprobs_cpu
                rows = slice(snap.start, min(snap.end, len(prompt) - 1))
                buffer[rows, 0] = prompt[rows.start + 1 : rows.stop + 1]
            if snap.end >= len(prompt):
                for buffer in state.in_progress_prompt_logprobs_cpu or ():
                    rows = SimpleNamespace(logprob_token_ids=buffer.copy())
                    found[snap.req_id] = rows
                batch.num_prompt_logprobs.pop(snap.req_id, None)
                state.in_progress_prompt_logprobs_cpu = None
        return found

    def step(self, work, outputs=(), new=(), resumed=()):
        """Begin a step that computes tokens [start, end) of requests; return a call.

        It returns the log-probabilities of the prompts that are complete.
        """
        manager = self.persistent_batch_manager
        names = [name for name in work if name not in [r.req_id for r in new]]
        cached = SimpleNamespace(
            req_ids=names,
            num_computed_tokens=[work[name][0] for name in names],
            num_output_tokens=[dict(outputs).get(name, 0) for name in names],
            resumed_req_ids=set(resumed),
        )
        output = SimpleNamespace(
            scheduled_cached_reqs=cached,
            scheduled_new_reqs=list(new),
            num_scheduled_tokens=work,
        )
        assert manager.update_states(output, lambda: "changed") == "changed"
        asked = manager.input_batch.num_prompt_logprobs
        data = Data(
            [
                Snap(name, manager.requests[name], *span)
                for name, span in work.items()
                if name in asked
            ]
        )

        def results():
            found = self._get_prompt_logprobs_dict(data)
            return {
                name: rows.logprob_token_ids[:, 0].tolist()
                for name, rows in found.items()
            }

        return results


def new(name="a", start=0, prompt=PROMPT, prompt_logprobs=1):
    params = SimpleNamespace(prompt_logprobs=prompt_logprobs)
    return State(name, list(prompt), [], params, num_computed_tokens=start)


OTHER = {"other": (0, 1)}
RIGHT = {"a": PROMPT[1:]}


@pytest.mark.parametrize("resumed", [(), ("a",)], ids=["left out", "preempted"])
def test_a_step_without_a_prompt_loses_none_of_its_rows(resumed):
    runner = Runner()
    assert runner.step({"a": (0, 2)}, new=[new()])() == {}
    runner.step(OTHER, new=[new("other", prompt_logprobs=None)])()
    start = 0 if resumed else 2
    assert runner.step({"a": (start, 5)}, resumed=resumed)() == RIGHT


@pytest.mark.parametrize("resumed", [(), ("a",)], ids=["left out", "preempted"])
def test_log_probabilities_are_returned_once(resumed):
    runner = Runner()
    assert runner.step({"a": (0, 5)}, new=[new()])() == RIGHT
    runner.step(OTHER, new=[new("other", prompt_logprobs=None)])()
    start = 0 if resumed else 5
    assert runner.step({"a": (start, 6)}, {"a": 1}, resumed=resumed)() == {}
    assert runner.step({"a": (6, 7)}, {"a": 2})() == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prompt_that_begins_again_with_its_results_in_flight_is_complete(is_late):
    """As in a reset: vLLM drops the results of the step before."""
    runner = Runner()
    before = runner.step({"a": (0, 5)}, new=[new()])
    if not is_late:
        before()
    after = runner.step({"a": (0, 3)}, resumed=["a"])
    if is_late:
        before()
    assert after() == {}
    assert runner.step({"a": (3, 5)})() == RIGHT


def test_results_of_an_ended_request_leave_one_with_its_id_alone():
    runner = Runner()
    runner.step({"a": (0, 2)}, new=[new()])()
    before = runner.step({"a": (2, 5)})
    after = runner.step({"a": (0, 2)}, new=[new(prompt=[0, 7, 8])], resumed=["a"])
    assert before() == {}
    assert after() == {}
    assert runner.step({"a": (2, 3)})() == {"a": [7, 8]}


def test_a_prompt_with_a_cached_prefix_has_no_log_probabilities():
    runner = Runner()
    assert runner.step({"a": (2, 5)}, new=[new(start=2)])() == {}
    short = new("short", prompt=[3])
    assert runner.step({"short": (0, 1)}, new=[short])() == {"short": []}


def test_a_runner_without_log_probabilities_is_left_as_it_is():
    runner = SimpleNamespace(persistent_batch_manager=SimpleNamespace())
    guard_prompt_logprobs(runner)
    assert vars(runner) == {"persistent_batch_manager": SimpleNamespace()}
