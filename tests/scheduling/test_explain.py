"""`OffloadScheduler.explain`: the verdict on every block; later steps agree."""

from pathlib import Path

import pytest

from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.key_memory import DropReasons
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig, StoreRig

WINDOW = SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


def verdicts(rig, *path, group=0, **options):
    """Return the reason, or else the verdict, for each block of a new request."""
    return of(rig, rig.request("?", *path, **options), group)


def of(rig, request, group=0):
    blocks = rig.scheduler.explain(request).blocks
    blocks = [block for block in blocks if block.group == group]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for block in blocks:
        assert block.num_tokens == rig.groups[group].block_size
        assert block.first_token == block.index * block.num_tokens
        assert (block.reason is None) == (block.verdict in ("device", "host"))
    return [block.reason or block.verdict for block in blocks]


def known(*path, **rules):
    rig = Rig(remember_drops=100, **rules)
    rig.run(rig.request("first", *path))
    return rig


def stored(*path, **rules):
    """An engine whose host has a prefix, and whose device has it no longer."""
    rig = known(*path, **rules)
    rig.forget_device()
    return rig


def start(rig, name, *path):
    """Admit a request and compute its blocks, which are then offered."""
    request = rig.request(name, *path)
    rig.admit(request)
    rig.step(**{name: len(path)})
    return request


def test_hits_on_either_tier_and_what_follows_them():
    rig = known(1, 2, 3)
    assert verdicts(rig, 1, 2, 9) == ["device", "device", "never"]
    assert verdicts(rig, 9, 8) == ["never", "never"]
    assert verdicts(rig, 1, 2, extra_tokens=0) == ["device", "last token"]
    assert verdicts(rig, 1, extra_tokens=0) == ["last token"]
    rig.pool.evict(rig.pool.find(rig.request("?", 1).block_keys))
    rig.host_tier.discard(rig.request("?", 1, 2, 3).block_keys)
    assert verdicts(rig, 1, 2, 3) == ["load failed", "gap", "gap"]
    rig = stored(1, 2, 3)
    assert verdicts(rig, 1, 2, 3) == ["host"] * 3
    explained = rig.scheduler.explain(rig.request("?", 1, 2, 3))
    assert (explained.num_tokens, explained.num_computed_tokens) == (13, 0)
    assert (explained.num_offered_tokens, explained.is_awaited) == (12, True)
    assert explained.deferral is None
    rig.fill_host(NUM_BLOCKS)
    assert verdicts(rig, 1, 2, 8) == ["evicted", "evicted", "never"]
    rig.store(1, 2)
    assert verdicts(rig, 1, 2) == ["host"] * 2
    rig.fill_host(NUM_BLOCKS)
    rig.scheduler.reset()
    assert verdicts(rig, 1, 2) == ["never"] * 2


def test_blocks_being_stored_are_explained():
    rig = Rig()
    request = start(rig, "one", 1, 2)
    rig.step(one=0)
    assert verdicts(rig, 1, 2) == ["device"] * 2
    rig.step(tokens={"one": 1})
    rig.pool.evict(request.block_ids)
    assert verdicts(rig, 1, 2) == ["storing"] * 2
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
    assert of(rig, request) == ["loading"] * 2 + ["never"]
    assert rig.offer(request) == (None, False)
    # It is nothing to others, who may load the same blocks.
    assert verdicts(rig, 1, 2) == ["host"] * 2
    # It may differ between groups.
    rig = stored(1, 2, 3, 4, groups=[WINDOW, FullAttention(BLOCK_SIZE)])
    request = rig.request("two", 1, 2, 3, 4)
    rig.admit(request)
    rig.step()
    rig.preempt("two")
    assert of(rig, request, 0)[2:] == ["loading"] * 2
    assert "loading" not in of(rig, request, 0)[:2]
    assert of(rig, request, 1) == ["loading"] * 4


def test_a_shared_load_in_flight_is_explained():
    rig = known(1, 2, delay_shared_loads=True)
    rig.store(1, 2, 3)
    rig.admit(rig.request("two", 1, 2))
    request = rig.request("three", 1, 2, 3)
    assert of(rig, request) == ["loading", "loading", "host"]
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.deferral) == (None, "shared")
    assert rig.offer(request) == (None, False)


def test_only_the_latest_drop_reasons_are_kept():
    # The tail was evicted first, and is forgotten first.
    for remembered, expected in enumerate(
        (["never", "never"], ["evicted", "never"], ["evicted", "evicted"])
    ):
        rig = Rig(remember_drops=remembered)
        rig.run(rig.request("first", 1, 2))
        rig.fill_host(NUM_BLOCKS)
        assert verdicts(rig, 1, 2) == expected
    losses = DropReasons(2)
    losses.note([b"short", b"x" * 40], "evicted")
    losses.note([b"short"], "slow")
    losses.note([b"third"], "full")
    names = b"x" * 40, b"short", b"third"
    assert [losses.reason_of(name) for name in names] == [None, "slow", "full"]


def test_reasons_for_blocks_missing_on_the_host():
    rig = stored(1, 2, 3, 4, host_blocks=4)
    rig.admit(rig.request("holder", 1, 2, 3, 4))  # Holds all of the host.
    rig.run(rig.request("two", 8, 9))
    assert rig.scheduler.stats.num_dropped_full == 2
    assert verdicts(rig, 8, 9) == ["device"] * 2
    rig.forget_device()
    assert verdicts(rig, 8, 9) == ["full"] * 2

    rig = Rig(remember_drops=100, max_blocks_in_flight=1)
    start(rig, "one", 1, 2, 3)
    rig.step(tokens={"one": 1})
    start(rig, "two", 8, 9)
    rig.finish("two")
    rig.end()
    rig.forget_device()
    assert verdicts(rig, 8, 9) == ["slow"] * 2

    rig = Rig(remember_drops=100)
    start(rig, "one", 1, 2)
    rig.step(tokens={"one": 1})
    rig.store_arrives(ok=False)
    rig.free(rig.requests.pop("one"))
    rig.forget_device()
    assert verdicts(rig, 1, 2) == ["store failed"] * 2

    rig = stored(1, 2)
    rig.load(rig.request("two", 1, 2), ok=False)
    assert verdicts(rig, 1, 2) == ["load failed"] * 2

    rig = stored(1, 2, store_threshold=2)
    for _ in range(2):  # To explain is not to ask.
        assert verdicts(rig, 1, 2) == ["rare"] * 2
    rig.store(1, 2)
    assert verdicts(rig, 1, 2) == ["host"] * 2


def test_blocks_excluded_by_rules_are_explained():
    rig = stored(1, 2, 3, max_offload_tokens=2 * BLOCK_SIZE)
    assert verdicts(rig, 1, 2, 3) == ["host", "host", "left out"]
    rig = Rig(prompt_only=True)
    request = rig.request("one", 1, 2, 3)
    request.num_prompt_tokens = 2 * BLOCK_SIZE + 1
    rig.run(request)
    rig.forget_device()
    assert of(rig, request) == ["host", "host", "left out"]
    # One whose host block would not be full.
    rig = known(1, 2, 3, blocks_per_host_block=2)
    assert verdicts(rig, 1, 2, 3) == ["device"] * 3
    rig.forget_device()
    assert verdicts(rig, 1, 2, 3) == ["host", "host", "part"]
    rig.fill_host(2 * NUM_BLOCKS)
    assert verdicts(rig, 1, 2, 3) == ["evicted", "evicted", "part"]


def test_windows_and_groups_without_a_common_prefix_are_explained():
    rig = known(1, 2, 3, 4, groups=[WINDOW])
    assert verdicts(rig, 1, 2, 3, 4) == ["window"] * 2 + ["device"] * 2
    rig = Rig(groups=[FullAttention(BLOCK_SIZE), WINDOW])
    request = rig.request("?", 1, 2, 3)
    full, window = request.block_keys_by_group
    blocks = rig.pool.allocate(5)
    rig.pool.cache(blocks, [*full, window[0], window[1]])
    assert of(rig, request) == ["device", "device", "other group"]
    assert of(rig, request, group=1) == ["device", "device", "never"]
    rig.pool.evict(blocks[3:4])
    # Now the window's second block alone is no prefix, nor are the first two.
    assert of(rig, request) == ["other group"] * 3
    assert of(rig, request, group=1) == ["never", "gap", "never"]


def test_blocks_of_the_device_behind_a_gap_are_explained():
    """The host has the first block of a request, the device the two that follow."""
    rig = known(1, 2, 3, max_offload_tokens=BLOCK_SIZE)
    request = rig.request("?", 1, 2, 3)
    rig.pool.evict(rig.pool.find(request.block_keys[:1]))
    assert of(rig, request) == ["host", "no copy", "no copy"]
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


def test_text_is_a_table_with_runs_folded():
    rig = stored(1, 2, 3, max_offload_tokens=2 * BLOCK_SIZE)
    text = str(rig.scheduler.explain(rig.request("r7", 1, 2, 3, 4)))
    assert text == (
        "Request r7: 17 tokens, 0 computed, 8 more offered.\n"
        "group  blocks  tokens  verdict\n"
        "0      0-1     0-7     hit on the host\n"
        "0      2-3     8-15    missed: excluded from stores (prompt_only, "
        "max_offload_tokens)"
    )
    short = rig.scheduler.explain(rig.request("r8"))
    assert str(short) == "Request r8: 1 tokens, 0 computed, 0 more offered."
    rig.admit(rig.request("r9", 1, 2))
    rig.step()
    rig.preempt("r9")
    text = str(rig.scheduler.explain(rig.request("r9", 1, 2)))
    assert text.splitlines() == [
        "Request r9: 9 tokens, 0 computed, 0 more offered.",
        "It has a load in flight and must ask again later.",
        "group  blocks  tokens  verdict",
        "0      0-1     0-7     pending: being loaded",
    ]
