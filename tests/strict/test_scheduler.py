"""The strict scheduler detects blocks that a request lost without a call."""

import pytest

from jaxkv import FullAttention, SchedulerOutput, SlidingWindow
from jaxkv.strict import StrictError, StrictOffloadScheduler
from jaxkv.strict.worker import MAX_SILENT_STEPS
from tests.rigs.offload_rig import BLOCK_SIZE, Rig


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT", "1")

    def make(**options):
        rig = Rig(**options)
        assert isinstance(rig.scheduler, StrictOffloadScheduler)
        rig.admit(rig.request("one", *range(4)))
        rig.step(one=2)
        return rig

    return make


def test_a_request_that_is_named_as_preempted_may_have_lost_its_blocks(make):
    rig = make()
    request = rig.requests["one"]
    rig.preempt("one", silently=True)
    with pytest.raises(StrictError, match=r"'one' are free, although it has not ended"):
        rig.step()
    rig.step(["one"])
    rig.step()
    rig.scheduler.request_finished(request)
    rig.settle()
    rig.check_nothing_leaked()


def test_a_preempted_request_that_was_admitted_again_may_still_be_named(make):
    """The call has already named it; the name must not end its new admission."""
    rig = make()
    rig.finish("one")
    rig.settle()
    rig.forget_device()
    request = rig.request("two", *range(4))
    rig.admit(request)
    assert request.loading_tokens
    rig.preempt("two")
    rig.admit(request)
    assert request.loading_tokens
    rig.step(["two"])
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.check_nothing_leaked()


def test_blocks_that_came_later_are_not_freed_before_the_end_either(make):
    rig = make()
    later = rig.pool.allocate(1)
    output = SchedulerOutput({}, {"one": later})
    rig.scheduler.build_connector_meta(output)
    rig.pool.free(later)
    with pytest.raises(StrictError, match=rf"blocks \[{later[0]}\] of request 'one'"):
        rig.step()


def test_blocks_behind_a_window_may_be_freed(make):
    rig = make(groups=(FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2)))
    first = rig.requests["one"].tables[1][0]
    rig.pool.free([first])
    rig.step()
    rig.pool.touch([first])
    rig.finish("one")
    rig.check_nothing_leaked()


def test_stores_and_loads_in_flight_without_a_report_are_counted(make):
    rig = make()
    rig.finish("one")
    rig.settle()
    rig.forget_device()
    rig.admit(rig.request("loading", *range(4)))
    rig.admit(rig.request("storing", *range(4, 8)))
    rig.step(storing=2)
    rig.step(tokens={"storing": 1})
    in_transit = rig.scheduler.in_transit
    assert in_transit.stores_in_flight == in_transit.loads_in_flight > 0
    for _ in range(MAX_SILENT_STEPS - 2):
        rig.step()
    with pytest.raises(StrictError, match="with 2 moves in flight"):
        rig.step()


def test_negative_blocks_are_refused_as_without_strict_mode(make):
    rig = make()
    request = rig.request("two", *range(4, 8))
    rig.offer(request)
    with pytest.raises(ValueError, match="-1 in the block table of request 'two'"):
        rig.scheduler.update_state_after_alloc(request, [-1, 2], 0)
