"""The cost of a step or a look-up does not grow with queued or in-flight work.

It is counted in lines of Python, or in bytes that are allocated. For the times see
benchmarks/in_flight.py and benchmarks/request_length.py.
"""

import importlib
import pathlib
import sys
import tracemalloc

import pytest

from jaxkv.scheduling.eager import EagerStores
from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_request

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
FEW, MANY = 100, 1000  # Both more than may be in flight at a time.


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def in_flight():
    yield from imported("in_flight")


@pytest.fixture(scope="module")
def request_length():
    yield from imported("request_length")


def num_lines(run):
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def check_flat(crowds):
    few, many = (crowd.actions() for crowd in crowds)
    for what in few:
        for action in (few[what], many[what]):
            action()()  # Whatever is done once.
        lines = [num_lines(action) for action in (few[what], many[what])]
        assert lines[1] <= 1.1 * lines[0] + 20, f"{what}: {lines} lines"


@pytest.mark.parametrize(
    "state",
    ["waiting", "running", "preempted", "loading", "held up", "storing", "queued"],
)
def test_cost_grows_with_requests_in_flight(in_flight, state):
    """A step took 14 ms, and the counts for dashboards 19 ms, with 10,000 loads."""
    assert state in in_flight.STATES
    check_flat([in_flight.Crowd(state, num, MANY) for num in (FEW, MANY)])


@pytest.mark.parametrize("state", ["loads", "saves"])
def test_cost_grows_with_transfers_that_do_not_land(in_flight, state):
    """A step of the worker took 1 ms with 10,000 transfers, an agreement 8 ms."""
    fleets = [in_flight.Fleet(state, num, MANY) for num in (FEW, MANY)]
    with in_flight.never():
        check_flat(fleets)


def cost_of_block(long_request):
    """Lines of Python and bytes of memory for a step that stores a new block."""
    costs = []
    for number in range(7):
        long_request.fill_blocks()
        if number % 2:
            costs[-1].append(num_lines(long_request.step))
            continue
        tracemalloc.start()
        long_request.step()
        costs.append([tracemalloc.get_traced_memory()[1]])
        tracemalloc.stop()
    return [min(values) for values in zip(*costs[:3], strict=True)]


CASES = (
    *("one group", "two groups", "three groups, 36 bytes", "chunks of 4"),
    *("vLLM, an adapter", "vLLM, two groups", "a store, two groups", "recorded"),
    *("shadows", "shadows, stored if reused", "stored if reused", "a small host"),
)


@pytest.mark.parametrize("case", CASES)
def test_cost_of_a_block_does_not_grow_with_its_request(request_length, case):
    """Every step once copied all keys: 8 ms at 160,000 tokens in two vLLM groups."""
    costs = []
    for num_blocks in (200, 3000):
        num_tokens = request_length.BLOCK_SIZE * num_blocks
        with request_length.made(case, num_tokens, 40, 10_000) as long_request:
            costs.append(cost_of_block(long_request))
    (few_bytes, few_lines), (many_bytes, many_lines) = costs
    assert many_lines <= few_lines + 20
    assert many_bytes <= few_bytes + 4096


def test_a_step_that_fills_no_block_offers_nothing(monkeypatch):
    num_offers = 0

    def offer(self, *args):
        nonlocal num_offers
        num_offers += 1
        plain(self, *args)

    plain = EagerStores._offer
    monkeypatch.setattr(EagerStores, "_offer", offer)
    rig = Rig()
    rig.admit(make_request("one", 1, 2, 3))
    for _ in range(3 * BLOCK_SIZE):
        rig.step(tokens={"one": 1})
    # What a step computes is offered in the next one.
    assert num_offers == 2
    rig.step(tokens={"one": 1})
    assert num_offers == 3


def test_an_error_about_a_report_lists_all_loads_in_flight(in_flight):
    crowd = in_flight.Crowd("loading", 100, 100)
    report = in_flight.ConnectorOutput(finished_recving=("nobody",))
    with pytest.raises(ValueError, match=r"'nobody'.* and 92 more\.$") as caught:
        crowd.scheduler.update_connector_output(report)
    assert len(str(caught.value)) < 300
