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
@pytest.mark.parametrize("copy_on_device", [True, False])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("num_in_flight", [None, 3])
@pytest.mark.parametrize("stores", ["arrived", "in flight", "of the next step"])
def test_one_preemption_stays_one(mode, copy_on_device, groups, num_in_flight, stores):
    rig = make_rig(
        4,
        groups=groups,
        mode=mode,
        copy_on_device=copy_on_device,
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


@pytest.mark.parametrize("load_in_step", [False, True])
def test_blocks_of_a_preempted_load_are_pending_until_it_ends(load_in_step):
    rig = Rig(host_blocks=32, load_in_step=load_in_step)
    rig.store(1, 2, 3)
    # A load that has not left holds nothing.
    rig.admit(rig.request("a", 1, 2, 3, 4))
    num_free = rig.pool.num_free
    rig.preempt("a")
    assert (rig.pool.num_free, rig.pool.num_pending_free) == (num_free + 5, 0)
    for name, path in (("b", (1, 2, 3, 4)), ("c", (1, 2, 3, 5)), ("d", (1, 2, 3, 6))):
        rig.admit(rig.request(name, *path, extra_tokens=3))
    assert rig.pool.num_free == 0
    rig.step()
    assert rig.loads
    assert preempt_until(rig, 5) == 1
    assert rig.pool.num_pending_free == 3  # The others were not to be loaded.
    while rig.loads:
        rig.load_arrives()
    assert (rig.pool.num_free, rig.pool.num_pending_free) == (5, 0)


def test_blocks_of_an_offer_without_an_answer_are_not_pending():
    """An engine that waited for them might wait forever: nothing frees them."""
    rig = Rig(host_blocks=32)
    rig.run(rig.request("a", 1, 2))
    # The second block alone is left on the device, so that it is to be copied.
    rig.pool.evict(rig.pool.find(rig.request("a", 1, 2).block_keys[:1]))
    queued = rig.request("queued", 1, 2, 3)
    num_free = rig.pool.num_free
    assert rig.offer(queued) == (8, True)
    assert (rig.pool.num_free, rig.pool.num_pending_free) == (num_free - 1, 0)
    rig.admit(queued)
    rig.preempt("queued")
    assert (rig.pool.num_free, rig.pool.num_pending_free) == (num_free, 0)
    rig.admit(queued)
    rig.step()
    rig.preempt("queued")
    assert rig.pool.num_free + rig.pool.num_pending_free == num_free
    rig.settle()
    rig.pool.check()
    assert (rig.pool.num_free, rig.pool.num_pending_free) == (num_free, 0)
