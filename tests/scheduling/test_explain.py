"""`OffloadScheduler.explain`: the offer, which later steps confirm, and each tier."""

from pathlib import Path

import pytest

from jaxkv.search.groups import FullAttention, SlidingWindow
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig, StoreRig

WINDOW = SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


def verdicts(rig, *path, group=0, **options):
    """Return the tier of each block of a new request."""
    return of(rig, rig.request("?", *path, **options), group)


def of(rig, request, group=0):
    blocks = rig.scheduler.explain(request).blocks
    blocks = [block for block in blocks if block.group == group]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for block in blocks:
        assert block.num_tokens == rig.groups[group].block_size
        assert block.first_token == block.index * block.num_tokens
    return [block.verdict for block in blocks]


def known(*path, **rules):
    rig = Rig(**rules)
    rig.run(rig.request("first", *path))
    return rig


def stored(*path, **rules):
    """An engine whose host has a prefix, and whose device has it no longer."""
    rig = known(*path, **rules)
    rig.forget_device()
    return rig


def test_each_block_is_in_the_nearest_tier_that_has_it():
    rig = known(1, 2, 3)
    assert verdicts(rig, 1, 2, 9) == ["device", "device", "none"]
    assert verdicts(rig, 1, 2, extra_tokens=0) == ["device"] * 2
    rig.pool.evict(rig.pool.find(rig.request("?", 1).block_keys))
    assert verdicts(rig, 1, 2, 3) == ["host", "device", "device"]
    rig.host_tier.discard(rig.request("?", 1, 2, 3).block_keys)
    assert verdicts(rig, 1, 2, 3) == ["none", "device", "device"]
    rig = stored(1, 2, 3)
    assert verdicts(rig, 1, 2, 3) == ["host"] * 3
    explained = rig.scheduler.explain(rig.request("?", 1, 2, 3))
    assert (explained.num_tokens, explained.num_computed_tokens) == (13, 0)
    assert (explained.num_offered_tokens, explained.is_awaited) == (12, True)
    assert explained.deferral is None
    rig.fill_host(NUM_BLOCKS)
    assert verdicts(rig, 1, 2, 3) == ["none"] * 3
    # Groups differ, and a host block may hold several device blocks.
    rig = Rig(groups=[FullAttention(BLOCK_SIZE), WINDOW])
    request = rig.request("?", 1, 2, 3)
    full, window = request.block_keys_by_group
    rig.pool.cache(rig.pool.allocate(4), [*full, window[0]])
    assert of(rig, request) == ["device"] * 3
    assert of(rig, request, group=1) == ["device", "none", "none"]
    rig = stored(1, 2, 3, blocks_per_host_block=2)
    assert verdicts(rig, 1, 2, 3) == ["host", "host", "none"]


def test_blocks_being_stored_are_in_no_tier_yet():
    rig = Rig()
    request = rig.request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    rig.step(tokens={"one": 1})
    assert verdicts(rig, 1, 2) == ["device"] * 2
    rig.pool.evict(request.block_ids)
    assert verdicts(rig, 1, 2) == ["none"] * 2
    rig.store_arrives()
    assert verdicts(rig, 1, 2) == ["host"] * 2


def test_a_requests_load_in_flight_is_explained():
    rig = stored(1, 2)
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    rig.step()
    rig.preempt("two")
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.is_awaited) == (None, False)
    assert explained.deferral == "loading"
    assert of(rig, request) == ["host", "host", "none"]
    assert rig.offer(request) == (None, False)


def test_a_shared_load_in_flight_is_explained():
    rig = known(1, 2, delay_shared_loads=True)
    rig.store(1, 2, 3)
    rig.admit(rig.request("two", 1, 2))
    request = rig.request("three", 1, 2, 3)
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.deferral) == (None, "shared")
    assert rig.offer(request) == (None, False)


def test_blocks_of_the_device_behind_a_gap_are_loaded_if_the_host_has_them():
    """They were copied on the device."""
    rig = known(1, 2, 3)
    request = rig.request("?", 1, 2, 3)
    rig.pool.evict(rig.pool.find(request.block_keys[:1]))
    assert of(rig, request) == ["host", "device", "device"]
    assert rig.offer(request) == (3 * BLOCK_SIZE, True)
    rig = known(1, 2, 3, max_offload_tokens=BLOCK_SIZE)
    request = rig.request("?", 1, 2, 3)
    rig.pool.evict(rig.pool.find(request.block_keys[:1]))
    assert of(rig, request) == ["host", "device", "device"]
    assert rig.offer(request) == (BLOCK_SIZE, True)


@pytest.mark.parametrize("num_pinned", [15, 16])
def test_a_fetch_without_room_on_the_host_is_not_announced(num_pinned):
    rig = StoreRig(num_storage_blocks=8, device_blocks=32, storage_write="on_reuse")
    rig.fill_host(16)
    rig.host_tier.pin(range(num_pinned))
    request = rig.request("r", 1, 2)
    rig.has(*request.block_keys)
    explained = rig.scheduler.explain(request)
    assert explained.deferral == ("storage" if num_pinned == 15 else None)
    assert [block.verdict for block in explained.blocks] == ["storage"] * 2
    assert rig.offer(request) == (explained.num_offered_tokens, explained.is_awaited)


def test_the_page_shows_what_is_printed():
    rig, path = stored(1, 2, 3, 4, 5, 6, host_blocks=6), (1, 2, 3, 4, 5, 6)
    rig.run(rig.request("second", *path[:2]))
    keys = rig.request("?", *path).block_keys
    rig.host_tier.touch(keys[:4])
    rig.host_tier.touch(keys[5:])
    rig.run(rig.request("third", 9))  # It evicts the fifth block.
    text = str(rig.scheduler.explain(rig.request("r7", *path)))
    page = Path(__file__).parents[2] / "docs" / "lifecycle.md"
    shown = f"```\n>>> print(scheduler.explain(request))\n{text}\n```\n"
    assert shown in page.read_text(encoding="utf-8")


def test_text_says_why_a_request_must_ask_again():
    rig = stored(1, 2)
    short = rig.scheduler.explain(rig.request("r8"))
    assert str(short) == "Request r8: 1 tokens, 0 computed, 0 more offered."
    rig.admit(rig.request("r9", 1, 2))
    rig.step()
    rig.preempt("r9")
    text = str(rig.scheduler.explain(rig.request("r9", 1, 2)))
    assert text.splitlines() == [
        "Request r9: 9 tokens, 0 computed, 0 more offered.",
        "It has a load in flight and must ask again later.",
        "group  blocks  tokens  tier",
        "0      0-1     0-7     host",
    ]
