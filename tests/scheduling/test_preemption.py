"""An engine that preempts until enough blocks are free, or will be."""

import pytest

from tests.rigs.offload_rig import FULL, HYBRID, Rig, modes


def make_rig(num_requests, *, groups=FULL, num_blocks=4, **rules):
    """A full device: `num_requests` run, and have computed `num_blocks` each."""
    num_taken = num_requests * (num_blocks + 1) * len(groups)
    rig = Rig(groups=groups, device_blocks=num_taken + 1, host_blocks=64, **rules)
    for n in range(num_requests):
        path = [100 * n + block for block in range(num_blocks)]
        request = rig.request(f"r{n}", *path, extra_tokens=2)
        rig.admit(request)
        rig.step(tokens={f"r{n}": num_blocks * groups[0].block_size})
    assert rig.pool.num_free == 0
    return rig


def preempt_until(rig, num_wanted):
    """Preempt the newest request until blocks are free, or will be; count them."""
    pool, num = rig.pool, 0
    while rig.requests and pool.num_free + pool.num_pending_free < num_wanted:
        rig.preempt(list(rig.requests)[-1])
        num += 1
    return num


@modes
@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("num_in_flight", [None, 3])
@pytest.mark.parametrize("stores", ["arrived", "in flight", "of the next step"])
def test_one_preemption_stays_one(mode, groups, num_in_flight, stores):
    rig = make_rig(
        4,
        groups=groups,
        mode=mode,
        max_blocks_in_flight=num_in_flight,
    )
    if stores == "arrived":
        rig.settle()
    elif stores == "in flight":
        rig.step()
    assert preempt_until(rig, 1) == 1
    assert preempt_until(rig, 5) == 0
    per_request = 5 * len(groups)
    assert preempt_until(rig, per_request + 1) == 1
    rig.settle()
    assert rig.pool.num_pending_free == 0
    assert rig.pool.num_free == 2 * per_request
