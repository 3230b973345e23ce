"""The line of JSON per request."""

import json
import logging

from tests.rigs.offload_rig import BLOCK_SIZE, Rig, StoreRig, make_keys, make_request
from tests.scheduling.test_worker import Clock


def lines(caplog):
    logged = [r for r in caplog.records if r.name == "jaxkv.requests"]
    return [json.loads(record.message) for record in logged]


def test_a_request_logs_the_tokens_of_each_tier_and_its_wait(caplog):
    caplog.set_level(logging.INFO, "jaxkv.requests")
    clock = Clock()
    rig = StoreRig(log_requests=True, clock=clock)
    rig.serve("first", 1)
    rig.forget_device()
    rig.has(*make_keys(1, 2, 3))
    request = make_request("second", 1, 2, 3, 4)
    assert rig.admit(request) is None  # Two blocks are only in the store.
    clock.now_s += 0.25
    rig.step()
    rig.answer()
    assert rig.admit(request) == 3 * BLOCK_SIZE
    clock.now_s += 0.5
    rig.step()
    rig.load_arrives()
    rig.run(make_request("third", 1, 2, 3))  # While the device has the blocks.
    clock.now_s += 8  # The model's time is no wait.
    rig.finish("second")
    wait = {"waited_s": 0.0}
    first = {"request": "first", "tokens": 5, "device": 0, "host": 0, "storage": 0}
    third = {"request": "third", "tokens": 13, "device": 12, "host": 0, "storage": 0}
    assert lines(caplog) == [
        first | wait | {"computed": 5},
        third | wait | {"computed": 1},
        {
            **{"request": "second", "tokens": 17, "device": 0, "host": 4},
            **{"storage": 8, "computed": 5, "waited_s": 0.75},
        },
    ]


def test_a_failed_load_is_logged_as_computed_and_a_request_without_blocks_not(caplog):
    caplog.set_level(logging.INFO, "jaxkv.requests")
    rig = Rig(log_requests=True, clock=Clock())
    rig.store(1, 2)
    rig.load(rig.request("one", 1, 2), ok=False)
    rig.finish("one")
    rig.scheduler.request_finished(rig.request("aborted", 1, 2))
    (_, line) = lines(caplog)
    assert line == {
        **{"request": "one", "tokens": 9, "device": 0, "host": 8, "computed": 9},
        **{"waited_s": 0.0, "load_failed": True},
    }
    silent = Rig()
    silent.run(silent.request("two", 1))
    assert len(lines(caplog)) == 2


def test_only_the_first_load_counts_as_a_wait(caplog):
    caplog.set_level(logging.INFO, "jaxkv.requests")
    clock = Clock()
    rig = Rig(log_requests=True, clock=clock)
    rig.store(1, 2)
    request = rig.request("one", 1, 2, 3)
    for wait_s in (0.5, 8.0):
        assert rig.admit(request) == 2 * BLOCK_SIZE
        rig.step()
        clock.now_s += wait_s
        rig.load_arrives()
        if wait_s < 1:
            rig.preempt("one")
            rig.forget_device()
    rig.finish("one")
    (_, line) = lines(caplog)
    assert (line["host"], line["waited_s"]) == (8, 0.5)
