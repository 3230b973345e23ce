"""`OffloadScheduler.explain`: what it says, what comes of it, and that it is all."""

import pytest

from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.key_memory import DropReasons
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig

WINDOW = SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


def verdicts(rig, *path, group=0, **more):
    """The verdicts of a new request, folded: {span of blocks: (verdict, reason)}."""
    return of(rig, rig.request("?", *path, **more), group)


def of(rig, request, group=0):
    found = rig.scheduler.explain(request)
    own = [block for block in found.blocks if block.group == group]
    assert [block.index for block in own] == list(range(len(own)))
    for block in own:
        assert block.num_tokens == rig.groups[group].block_size
        assert block.first_token == block.index * block.num_tokens
    return [(block.verdict, block.reason) for block in own]


def known(*path, **rules):
    """An engine that has run a request of a prefix."""
    rig = Rig(remember_drops=100, **rules)
    rig.run(rig.request("first", *path))
    return rig


def start(rig, request, num_blocks):
    """Admit a request and compute so many of its blocks, which are then offered."""
    rig.admit(request)
    rig.step(**{request.request_id: num_blocks})


def test_hits_on_the_device_and_on_the_host():
    rig = known(1, 2, 3)
    assert verdicts(rig, 1, 2, 3) == [("device", None)] * 3
    rig.forget_device()
    assert verdicts(rig, 1, 2, 3) == [("host", None)] * 3
    found = rig.scheduler.explain(rig.request("?", 1, 2, 3))
    assert (found.num_tokens, found.num_computed_tokens) == (13, 0)
    assert (found.num_offered_tokens, found.is_awaited) == (12, True)
    assert found.deferral is None


def test_a_block_that_nobody_knows_and_those_behind_it():
    rig = known(1, 2)
    assert verdicts(rig, 1, 2, 9) == [("device", None)] * 2 + [("missed", "never")]
    assert verdicts(rig, 9, 8) == [("missed", "never")] * 2


def test_a_block_behind_one_that_is_missing():
    rig = Rig()
    first, last = rig.request("?", 1, 2, 3), rig.request("last", 1, 2, 3)
    blocks = rig.pool.allocate(2)
    rig.pool.cache(blocks, [first.block_keys[0], first.block_keys[2]])
    assert of(rig, last) == [("device", None), ("missed", "never"), ("missed", "gap")]


def test_the_block_of_the_last_token():
    rig = known(1, 2)
    expected = [("device", None), ("missed", "last token")]
    assert verdicts(rig, 1, 2, extra_tokens=0) == expected
    assert verdicts(rig, 1, extra_tokens=0) == [("missed", "last token")]


def test_a_store_under_way():
    rig = Rig()
    one = rig.request("one", 1, 2)
    start(rig, one, 2)
    rig.step(one=0)
    assert verdicts(rig, 1, 2) == [("device", None)] * 2
    rig.step(tokens={"one": 1})
    rig.pool.evict(one.block_ids)
    assert verdicts(rig, 1, 2) == [("pending", "storing")] * 2
    rig.store_arrives()
    assert verdicts(rig, 1, 2) == [("host", None)] * 2


def test_a_load_of_its_own_under_way():
    rig = known(1, 2)
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    rig.step()
    rig.preempt("two")
    found = rig.scheduler.explain(request)
    assert (found.num_offered_tokens, found.is_awaited) == (None, False)
    assert found.deferral == "loading"
    assert of(rig, request) == [("pending", "loading")] * 2 + [("missed", "never")]
    assert rig.offer(request) == (None, False)
    # It is nothing to others, who may load the same blocks.
    assert verdicts(rig, 1, 2) == [("host", None)] * 2


def test_a_load_of_its_own_that_differs_between_groups():
    rig = known(1, 2, 3, 4, groups=[WINDOW, FullAttention(BLOCK_SIZE)])
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4)
    rig.admit(request)
    rig.step()
    rig.preempt("two")
    in_load = [
        [block == ("pending", "loading") for block in of(rig, request, group)]
        for group in (0, 1)
    ]
    assert in_load == [[False, False, True, True], [True] * 4]


def test_a_load_of_another_that_it_is_to_wait_for():
    rig = known(1, 2, delay_shared_loads=True)
    rig.run(rig.request("more", 1, 2, 3))
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2))
    request = rig.request("three", 1, 2, 3)
    assert of(rig, request) == [("pending", "loading")] * 2 + [("host", None)]
    found = rig.scheduler.explain(request)
    assert (found.num_offered_tokens, found.deferral) == (None, "shared")
    assert rig.offer(request) == (None, False)


def test_an_eviction():
    rig = known(1, 2)
    rig.fill_host(NUM_BLOCKS)
    assert verdicts(rig, 1, 2, 3) == [("missed", "evicted")] * 2 + [("missed", "never")]
    rig.run(rig.request("again", 1, 2))
    rig.forget_device()
    assert verdicts(rig, 1, 2) == [("host", None)] * 2


@pytest.mark.parametrize(("remembered", "reasons"), [(0, []), (1, [0]), (2, [0, 1])])
def test_only_the_last_losses_are_remembered(remembered, reasons):
    rig = Rig(remember_drops=remembered)
    rig.run(rig.request("first", 1, 2))
    rig.fill_host(NUM_BLOCKS)
    # The tail was evicted first, and is forgotten first.
    expected = ["evicted" if block in reasons else "never" for block in range(2)]
    assert [reason for _, reason in verdicts(rig, 1, 2)] == expected


def test_no_room_on_the_host():
    rig = known(1, 2, 3, 4, host_blocks=4)
    rig.forget_device()
    rig.admit(rig.request("holder", 1, 2, 3, 4))  # Holds all of the host.
    rig.run(rig.request("two", 8, 9))
    assert rig.scheduler.stats.num_dropped_full == 2
    assert verdicts(rig, 8, 9) == [("device", None)] * 2
    rig.pool.free(rig.pool.allocate(rig.pool.num_free))
    assert verdicts(rig, 8, 9) == [("missed", "full")] * 2


def test_too_much_on_its_way():
    rig = Rig(remember_drops=100, max_blocks_in_flight=1)
    start(rig, rig.request("one", 1, 2, 3), 3)
    rig.step(tokens={"one": 1})
    start(rig, rig.request("two", 8, 9), 2)
    rig.finish("two")
    rig.finish("one")
    rig.settle()
    rig.forget_device()
    assert verdicts(rig, 8, 9) == [("missed", "slow")] * 2


def test_a_store_that_failed():
    rig = Rig(remember_drops=100)
    start(rig, rig.request("one", 1, 2), 2)
    rig.step(tokens={"one": 1})
    rig.store_arrives(ok=False)
    request = rig.requests.pop("one")
    rig.free(request)
    rig.forget_device()
    assert verdicts(rig, 1, 2) == [("missed", "store failed")] * 2


def test_a_load_that_failed():
    rig = known(1, 2)
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2))
    rig.step()
    rig.load_arrives(ok=False)
    assert verdicts(rig, 1, 2) == [("missed", "load failed")] * 2


def test_what_too_few_have_asked_for():
    rig = known(1, 2, store_threshold=2)
    rig.forget_device()
    assert verdicts(rig, 1, 2) == [("missed", "rare")] * 2
    # To explain is not to ask.
    assert verdicts(rig, 1, 2) == [("missed", "rare")] * 2
    rig.run(rig.request("second", 1, 2))
    rig.forget_device()
    assert verdicts(rig, 1, 2) == [("host", None)] * 2


def test_what_is_not_to_be_stored():
    rig = known(1, 2, 3, max_offload_tokens=2 * BLOCK_SIZE)
    rig.forget_device()
    left_out = [("host", None)] * 2 + [("missed", "left out")]
    assert verdicts(rig, 1, 2, 3) == left_out
    rig = Rig(prompt_only=True)
    request = rig.request("one", 1, 2, 3)
    request.num_prompt_tokens = 2 * BLOCK_SIZE + 1
    rig.run(request)
    rig.forget_device()
    assert of(rig, request) == left_out


def test_a_block_whose_host_block_would_not_be_full():
    rig = known(1, 2, 3, blocks_per_host_block=2)
    assert verdicts(rig, 1, 2, 3) == [("device", None)] * 3
    rig.forget_device()
    assert verdicts(rig, 1, 2, 3) == [("host", None)] * 2 + [("missed", "part")]
    rig.fill_host(2 * NUM_BLOCKS)
    assert verdicts(rig, 1, 2, 3) == [("missed", "evicted")] * 2 + [("missed", "part")]


def test_what_is_outside_the_window():
    rig = known(1, 2, 3, 4, groups=[WINDOW])
    expected = [("unneeded", "window")] * 2 + [("device", None)] * 2
    assert verdicts(rig, 1, 2, 3, 4) == expected


def test_groups_that_have_no_prefix_in_common():
    rig = Rig(groups=[FullAttention(BLOCK_SIZE), WINDOW])
    request = rig.request("?", 1, 2, 3)
    full, window = request.block_keys_by_group
    blocks = rig.pool.allocate(5)
    rig.pool.cache(blocks, [*full, window[0], window[1]])
    assert of(rig, request) == [("device", None)] * 2 + [("missed", "other group")]
    assert of(rig, request, group=1) == [("device", None)] * 2 + [("missed", "never")]
    rig.pool.evict(blocks[3:4])
    # Now the window's second block alone is no prefix, nor are the first two.
    assert of(rig, request) == [("missed", "other group")] * 3
    assert of(rig, request, group=1) == [
        ("missed", "never"),
        ("missed", "gap"),
        ("missed", "never"),
    ]


def lose_the_head(**rules):
    """The host has the first block of a request, the device the two that follow."""
    rig = known(1, 2, 3, max_offload_tokens=BLOCK_SIZE, **rules)
    request = rig.request("?", 1, 2, 3)
    rig.pool.evict(rig.pool.find(request.block_keys[:1]))
    return rig, request


def test_a_copy_that_there_is_no_room_for():
    rig, request = lose_the_head()
    assert of(rig, request) == [("host", None)] + [("device", None)] * 2
    rig.pool.allocate(rig.pool.num_free - 5)  # Two of them are those to be copied.
    assert of(rig, request) == [("host", None)] + [("missed", "no room")] * 2
    assert rig.offer(request) == (BLOCK_SIZE, True)


def test_a_copy_that_is_not_to_be_made():
    rig, request = lose_the_head(copy_on_device=False)
    assert of(rig, request) == [("host", None)] + [("missed", "no copy")] * 2
    assert rig.offer(request) == (BLOCK_SIZE, True)


def test_a_load_that_takes_longer_than_to_compute():
    rig = known(1, 2, skip_slow_loads=True, block_bytes=1)
    rig.forget_device()
    rig.scheduler.note_rates(load_bytes_per_s=1e-3, prefill_tokens_per_s=1e3)
    request = rig.request("?", 1, 2)
    answers = []
    for _ in range(40):
        found = rig.scheduler.explain(request)
        assert found == rig.scheduler.explain(request)
        answers.append(rig.offer(request))
        assert (found.num_offered_tokens, found.is_awaited) == answers[-1]
        assert found.deferral == (None if answers[-1][0] else "gate")
        assert of(rig, request) == [("host", None)] * 2
    assert set(answers) == {(0, False), (8, True)}  # One in 32 passes.


def test_after_a_reset_nothing_is_known():
    rig = known(1, 2)
    rig.fill_host(NUM_BLOCKS)
    rig.scheduler.reset()
    assert verdicts(rig, 1, 2) == [("missed", "never")] * 2


@pytest.mark.parametrize("num_pinned", [15, 16])
def test_what_the_host_has_no_room_for_is_not_said_to_be_fetched(num_pinned):
    rig = Rig(num_storage_blocks=8, device_blocks=32)
    rig.fill_host(16)
    rig.scheduler._manager.pin(range(num_pinned))
    request = rig.request("r", 1, 2)
    found = TierReport(found=tuple(request.block_keys))
    rig.scheduler.update_connector_output(ConnectorOutput(below=(found,)))
    told = rig.scheduler.explain(request)
    assert told.deferral == ("storage" if num_pinned == 15 else None)
    assert rig.offer(request) == (told.num_offered_tokens, told.is_awaited)


def test_as_text_it_is_a_table_with_runs_folded():
    rig = known(1, 2, 3, max_offload_tokens=2 * BLOCK_SIZE)
    rig.forget_device()
    text = str(rig.scheduler.explain(rig.request("r7", 1, 2, 3, 4)))
    assert text == (
        "Request r7: 17 tokens, 0 at hand, 8 more offered.\n"
        "group  blocks  tokens  verdict\n"
        "0      0-1     0-7     hit on the host\n"
        "0      2-3     8-15    missed: not to be stored (prompt_only, "
        "max_offload_tokens)"
    )
    short = rig.scheduler.explain(rig.request("r8"))
    assert str(short) == "Request r8: 1 tokens, 0 at hand, 0 more offered."
    rig.admit(rig.request("r9", 1, 2))
    rig.step()
    rig.preempt("r9")
    text = str(rig.scheduler.explain(rig.request("r9", 1, 2)))
    assert text.splitlines() == [
        "Request r9: 9 tokens, 0 at hand, 0 more offered.",
        "It has a load under way, and has to ask again.",
        "group  blocks  tokens  verdict",
        "0      0-1     0-7     pending: being loaded",
    ]


def test_foreign_keys_are_remembered_by_what_they_stand_for():
    losses = DropReasons(2)
    losses.note([b"short", b"x" * 40], "evicted")
    losses.note([b"short"], "slow")
    losses.note([b"third"], "full")
    assert losses.reason_of(b"x" * 40) is None
    assert (losses.reason_of(b"short"), losses.reason_of(b"third")) == ("slow", "full")
