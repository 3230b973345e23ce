"""Blocks that an offer leaves out, as the next token does not read them.

They are never written: the scheduler takes them out of the tables that it returns, and
marks them in the pool, which then does not cache them.
"""

import pytest

from jaxkv.scheduling.protocol import NO_MOVES
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba
from jaxkv.types import NULL_BLOCK
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, Rig

PROMPT = 1, 2, 3, 4
OFFER = len(PROMPT) * BLOCK_SIZE


@pytest.fixture
def rig():
    """An engine whose host has a prompt, and whose device has it no longer."""
    return stored(HYBRID)


def stored(groups):
    rig = Rig(groups=groups, device_blocks=32)
    rig.store(*PROMPT)
    return rig


def take_offer(rig, name):
    """Admit a request with blocks for all tokens; return it and its new tables."""
    request = rig.request(name, *PROMPT, 5)
    assert rig.offer(request) == (OFFER, True)
    request.tables = [rig.pool.allocate(6) for _ in HYBRID]
    return request, rig.take(request, request.tables, OFFER)


def cache_all(rig, request):
    """Cache every block of a request with a key; return the skipped ones."""
    pairs = zip(request.tables, request.block_keys_by_group, strict=True)
    return [rig.pool.cache(table[: len(keys)], keys) for table, keys in pairs]


def test_the_tables_are_returned_without_what_an_offer_leaves_out(rig):
    request, (full, window) = take_offer(rig, "one")
    assert full == request.tables[0]
    assert window == [NULL_BLOCK, NULL_BLOCK, *request.tables[1][2:]]
    assert rig.pool.unwritten == {*request.tables[1][:2]}
    assert rig.step().load_device_blocks == (*full[:4], *window[2:4])
    rig.load_arrives()
    # Who replaces a table later gets it as it was given.
    assert rig.take(request, request.tables, 0) == request.tables
    assert cache_all(rig, request) == [[], request.tables[1][:2]]
    keys = request.block_keys_by_group
    assert rig.pool.find_prefix(keys[0][:4]) == full[:4]
    assert rig.pool.find_prefix(keys[1][:2]) == []
    assert rig.pool.find_prefix(keys[1][2:4]) == window[2:4]


def test_one_group_has_one_table_and_older_states_are_left_out_too():
    rig = stored(HYBRID[1:])
    request = rig.request("one", *PROMPT, 5)
    assert rig.offer(request) == (OFFER, True)
    table = rig.pool.allocate(6)
    (after,) = rig.take(request, table, OFFER)
    assert after == [NULL_BLOCK, NULL_BLOCK, *table[2:]]
    rig = stored((FullAttention(BLOCK_SIZE), Mamba(BLOCK_SIZE)))
    request, (_, states) = take_offer(rig, "one")
    assert states == [NULL_BLOCK] * 3 + request.tables[1][3:]
    assert rig.pool.unwritten == {*request.tables[1][:3]}


def test_an_offer_that_the_next_token_does_not_read_needs_no_load():
    rig = Rig(groups=[ChunkedLocal(BLOCK_SIZE, 2 * BLOCK_SIZE)])
    request = rig.request("one", 1, 2)
    assert rig.query(request) == (2 * BLOCK_SIZE, False)
    table = rig.pool.allocate(3)
    after = rig.take(request, table, 2 * BLOCK_SIZE)
    assert after == [[NULL_BLOCK, NULL_BLOCK, table[2]]]
    assert not rig.scheduler.has_pending_loads()
    assert rig.step() == NO_MOVES
    assert rig.pool.unwritten == {*table[:2]}


def test_a_request_computes_all_of_what_was_not_loaded(rig):
    request, _ = take_offer(rig, "one")
    rig.step()
    rig.load_arrives(ok=False)
    assert rig.pool.unwritten == set()
    assert cache_all(rig, request) == [[], []]


def test_an_abandoned_load_that_fails_leaves_the_marks_of_others(rig):
    request, _ = take_offer(rig, "aborted")
    rig.step()
    rig.scheduler.request_finished(request)
    skipped = request.tables[1][:2]
    rig.free(request)
    second = rig.request("other", *PROMPT, 5)
    assert rig.offer(second) == (OFFER, True)
    second.tables = [rig.pool.allocate(6), []]
    rest = rig.pool.allocate(rig.pool.num_free)
    assert {*skipped} <= {*rest}
    second.tables[1] = skipped + [b for b in rest if b not in skipped][:4]
    rig.take(second, second.tables, OFFER)
    assert rig.pool.unwritten == {*skipped}
    rig.report(failed_recving=("aborted",))
    assert rig.pool.unwritten == {*skipped}


def test_a_repeated_query_marks_other_blocks_as_unwritten(rig):
    request, _ = take_offer(rig, "one")
    assert rig.pool.unwritten
    assert rig.offer(request) == (OFFER, True)
    assert rig.take(request, request.tables, 0) == request.tables
    assert rig.pool.unwritten == set()


def test_a_block_at_a_second_place_is_written_there(rig):
    """An engine may turn a window's blocks round without allocating any."""
    request = rig.request("one", *PROMPT, 5)
    assert rig.offer(request) == (OFFER, True)
    full, window = rig.pool.allocate(6), rig.pool.allocate(4)
    tables = [full, [*window, *window[:2]]]
    assert rig.take(request, tables, OFFER) == tables
    assert rig.pool.unwritten == set()


def test_blocks_in_place_of_null_blocks_are_not_cached():
    """The device's own prefix is not there either, outside the window."""
    rig = Rig(groups=HYBRID, device_blocks=32)
    rig.run(rig.request("before", *PROMPT))
    request = rig.request("one", *PROMPT, 5)
    num_local, request.tables = rig.find(request)
    assert num_local == OFFER
    assert request.tables[1][:2] == [NULL_BLOCK, NULL_BLOCK]
    for table in request.tables:
        rig.pool.touch(table)
    assert rig.offer(request) == (0, False)
    for table in request.tables:
        table += rig.pool.allocate(2)
    request.tables[1][:2] = blocks = rig.pool.allocate(2)
    assert rig.take(request, request.tables, 0) == request.tables
    assert rig.pool.unwritten == {*blocks}
    assert cache_all(rig, request) == [[], blocks]
