"""The queue of transfers: budget, order, abandoned transfers, threads."""

import threading

import numpy as np
import pytest

from tests.transfer.numbered import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    check_at_rest,
    load_numbers,
    make_engine,
    modes,
    numbers_in,
    save_and_wait,
)


def issued_by(engine, monkeypatch):
    """The tickets of the pieces that `engine` issues from here on."""
    queue, issued = engine._queue, []
    issue_loads, start_saves = queue._issue_loads, queue._start_saves

    def spied(issue):
        def spy(leaves, pieces):
            issued.extend(piece.transfers[0].ticket for piece in pieces)
            issue(leaves, pieces)

        return spy

    monkeypatch.setattr(queue, "_issue_loads", spied(issue_loads))
    monkeypatch.setattr(queue, "_start_saves", spied(start_saves))
    return issued


@modes
@pytest.mark.parametrize("extents", [1, 2, 5])
@pytest.mark.parametrize("layer_groups", [1, 2])
def test_no_more_is_in_flight_than_allowed(mode, extents, layer_groups, monkeypatch):
    engine, pool = make_engine(
        mode, staging_bytes=extents * EXTENT_BYTES, layer_groups=layer_groups
    )
    seen = []

    def spy_on(name):
        real = getattr(engine._copier, name)

        def spy(*args):
            seen.append(engine.bytes_in_flight)
            return real(*args)

        monkeypatch.setattr(engine._copier, name, spy)

    for name in ("save", "stage", "load"):
        spy_on(name)
    rng = np.random.default_rng(extents)
    save_and_wait(engine, pool, range(24), range(24))
    for _ in range(12):
        ids = rng.permutation(24)[:20]
        if rng.integers(2):
            engine.save(pool, ids[:8], range(24, 32))
        else:
            pool, _ = engine.load(pool, ids, ids)
        seen.append(engine.bytes_in_flight)
        pool = engine.advance(pool)
        engine.poll()
    pool, _ = engine.drain(pool)
    assert max(seen) == extents * EXTENT_BYTES
    check_at_rest(engine)


@modes
def test_pieces_beyond_the_budget_wait(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=2 * EXTENT_BYTES)
    gate.shut = True
    ticket = engine.save(pool, range(9), range(9))  # Three extents.
    later = engine.save(pool, [20], [20])
    assert engine.bytes_in_flight == 2 * EXTENT_BYTES
    pool = engine.advance(pool)
    assert engine.is_waiting(ticket)
    assert engine.is_waiting(later)
    assert engine.num_waiting == engine.num_in_flight == 2
    assert engine.poll() == []
    gate.shut = False
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [ticket, later]
    assert not engine.is_waiting(ticket)
    check_at_rest(engine)
    assert load_numbers(engine, pool, [*range(9), 20])[0] == [*range(9), 20]


@modes
def test_loads_go_before_saves_and_each_in_the_order_of_the_calls(
    mode, gate, monkeypatch
):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(8), range(8))
    issued = issued_by(engine, monkeypatch)
    gate.shut = True
    saves = [engine.save(pool, [10 + n], [10 + n]) for n in range(3)]
    loads = []
    for n in range(3):
        pool, ticket = engine.load(pool, [n, n + 4], [n, n + 4])
        loads.append(ticket)
        saves.append(engine.save(pool, [13 + n], [13 + n]))
    assert issued == saves[:1]
    gate.shut = False
    pool, done = engine.drain(pool)
    pieces = [ticket for ticket in loads for _ in range(2)]  # Each of two extents.
    assert issued == [saves[0], *pieces, *saves[1:]]
    assert [each.ticket for each in done] == sorted(
        saves + loads, key=lambda ticket: ticket.number
    )
    assert {each.error for each in done} == {None}
    check_at_rest(engine)


@modes
def test_completions_wait_for_earlier_ones_of_their_direction_only(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=2 * EXTENT_BYTES)
    pool = save_and_wait(engine, pool, [0], [0])
    gate.shut = True
    first = engine.save(pool, [1], [1])
    second = engine.save(pool, [2], [2])
    pool, loaded = engine.load(pool, [0], [5])
    pieces = list(engine._queue._saving)
    for piece in pieces:
        piece.wait()
    gate.shut = False
    pieces[0].is_ready = lambda: False  # The second is over, the first is not.
    pool = engine.advance(pool)
    assert second not in [each.ticket for each in engine.poll()]
    del pieces[0].is_ready
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done][:2] == [first, second]
    assert loaded not in [first, second]
    check_at_rest(engine)


@modes
def test_a_waiting_save_keeps_what_a_later_load_overwrites(mode, gate, monkeypatch):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, [7], [1])
    issued = issued_by(engine, monkeypatch)
    gate.shut = True
    first = engine.save(pool, [20], [9])
    waiting = engine.save(pool, [3], [2])
    pool, loaded = engine.load(pool, [1], [3])
    assert engine.is_waiting(waiting)
    assert engine.is_waiting(loaded)
    gate.shut = False
    pool, _ = engine.drain(pool)
    assert issued == [first, waiting, loaded]
    assert numbers_in(pool)[3] == 7
    assert load_numbers(engine, pool, [2])[0] == [3]


@modes
@pytest.mark.parametrize("full", [False, True], ids=["room", "no room"])
def test_a_save_after_a_load_of_its_block_saves_what_was_loaded(mode, full, gate):
    engine, pool = make_engine(mode, staging_bytes=2 * EXTENT_BYTES)
    pool = save_and_wait(engine, pool, [7], [1])
    gate.shut = True
    if full:
        engine.save(pool, range(10, 18), range(10, 18))
    pool, loaded = engine.load(pool, [1], [3])
    saved = engine.save(pool, [3], [2])
    assert engine.is_waiting(saved) == (full or mode == "staged")
    gate.shut = False
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done][-2:] == [loaded, saved]
    assert load_numbers(engine, pool, [2])[0] == [7]


@modes
def test_the_last_of_several_loads_of_a_block_wins(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(12), range(12))
    gate.shut = True
    for host_id in (3, 11, 6):  # In three extents.
        pool, _ = engine.load(pool, [host_id], [20])
    gate.shut = False
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[20] == 6


@modes
def test_a_load_reads_the_bytes_of_the_time_of_its_call(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(4), range(4))
    gate.shut = True
    engine.save(pool, [20], [9])  # Takes all the budget.
    pool, _ = engine.load(pool, [0, 1, 2, 3], [10, 11, 12, 13])
    for _ in range(3):  # Extents enough to use the memory of the first again.
        engine.save(pool, [14, 15, 16, 17], [0, 1, 2, 3])
    gate.shut = False
    pool, done = engine.drain(pool)
    assert {each.error for each in done} == {None}
    assert numbers_in(pool)[10:14] == [0, 1, 2, 3]
    assert load_numbers(engine, pool, [0, 1, 2, 3])[0] == [14, 15, 16, 17]


@modes
def test_drain_issues_what_waits(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(12), range(12))
    gate.shut = True
    engine.save(pool, range(12, 24), range(12, 24))
    for start in (0, 4, 8):
        pool, _ = engine.load(pool, range(start, start + 4), range(start, start + 4))
        engine.save(pool, range(start, start + 4), range(24, 28))
    assert engine.num_waiting == engine.num_in_flight == 7
    gate.shut = False
    pool, done = engine.drain(pool)
    assert [each.ticket.number for each in done] == list(range(1, 8))
    assert {each.error for each in done} == {None}
    check_at_rest(engine)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    assert load_numbers(engine, pool, range(24, 28))[0] == [8, 9, 10, 11]


@modes
def test_a_waiting_save_that_is_abandoned_never_happens(mode, gate, monkeypatch):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, [1, 2], [1, 2])
    issued = issued_by(engine, monkeypatch)
    gate.shut = True
    first = engine.save(pool, [5], [5])
    abandoned = engine.save(pool, [6, 7], [6, 1])
    last = engine.save(pool, [8], [8])
    engine.abandon(abandoned)
    assert not engine.is_waiting(abandoned)
    gate.shut = False
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == issued == [first, last]
    check_at_rest(engine)
    for host_id in (6, 1):  # The block that it would have overwritten is empty too.
        with pytest.raises(ValueError, match="have no bytes"):
            engine.load(pool, [host_id], [0])
    assert load_numbers(engine, pool, [2, 5, 8])[0] == [2, 5, 8]


@modes
def test_a_waiting_load_that_is_abandoned_never_happens(mode, gate, monkeypatch):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(8), range(8))
    issued = issued_by(engine, monkeypatch)
    gate.shut = True
    first = engine.save(pool, [20], [20])
    pool, abandoned = engine.load(pool, [1, 6], [10, 11])
    pool, last = engine.load(pool, [2], [12])
    assert engine._queue.table.num_pins == 3
    engine.abandon(abandoned)
    assert engine._queue.table.num_pins == 1
    gate.shut = False
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == issued == [first, last]
    assert numbers_in(pool)[10:13] == [10, 11, 2]
    check_at_rest(engine)


@modes
@pytest.mark.parametrize("direction", ["save", "load"])
def test_a_transfer_abandoned_in_flight_is_not_reported(mode, direction, gate):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, range(8), range(8))
    gate.shut = True
    if direction == "save":
        ticket = engine.save(pool, [10, 11], [1, 20])
    else:
        pool, ticket = engine.load(pool, [1, 6], [10, 11])
    engine.abandon(ticket)
    assert engine.bytes_in_flight > 0  # A copy cannot be cancelled.
    with pytest.raises(ValueError, match="is not in flight"):
        engine.abandon(ticket)
    assert engine.poll() == []
    gate.shut = False
    pool, done = engine.drain(pool)
    assert done == []
    check_at_rest(engine)
    if direction == "save":
        for host_id in (1, 20):
            with pytest.raises(ValueError, match="have no bytes"):
                engine.load(pool, [host_id], [0])
    if mode == "staged":  # Pieces that land later are not written.
        assert numbers_in(pool) == list(range(NUM_BLOCKS))
    others = [n for n in range(NUM_BLOCKS) if n not in (10, 11)]
    assert [numbers_in(pool)[n] for n in others] == others
    assert load_numbers(engine, pool, [0, 2, 3])[0] == [0, 2, 3]


@modes
def test_a_reported_transfer_cannot_be_abandoned(mode):
    engine, pool = make_engine(mode)
    ticket = engine.save(pool, [1], [1])
    pool, _ = engine.drain(pool)
    pool, loaded = engine.load(pool, [1], [0])
    pool, _ = engine.drain(pool)
    for each in (ticket, loaded, ticket._replace(number=99)):
        with pytest.raises(ValueError, match=r"Ticket\(.*\) is not in flight"):
            engine.abandon(each)
    assert load_numbers(engine, pool, [1])[0] == [1]


@modes
def test_another_thread_is_refused_and_changes_nothing(mode, gate):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [1], [1])
    gate.shut = True
    ticket = engine.save(pool, [2], [2])
    gate.shut = False
    calls = [
        lambda: engine.save(pool, [3], [1]),
        lambda: engine.load(pool, [1], [0]),
        lambda: engine.advance(pool),
        lambda: engine.poll(),
        lambda: engine.drain(pool),
        lambda: engine.abandon(ticket),
    ]
    errors = []

    def call_all():
        for call in calls:
            with pytest.raises(RuntimeError, match="one thread must dispatch") as info:
                call()
            errors.append(info.value)

    thread = threading.Thread(target=call_all)
    thread.start()
    thread.join()
    assert len(errors) == len(calls)
    assert (engine.num_in_flight, engine.bytes_in_flight) == (1, EXTENT_BYTES)
    pool, [done] = engine.drain(pool)
    assert (done.ticket, done.num_bytes, done.error) == (ticket, BLOCK_BYTES, None)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    assert load_numbers(engine, pool, [1, 2])[0] == [1, 2]


@modes
def test_saves_that_wait_for_the_same_host_block_leave_nothing_behind(mode, gate):
    # The later one has claimed the block before the earlier one gets its place.
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    gate.shut = True
    for number in range(12):
        engine.save(pool, [number, 20], [1, 2 + number])
    gate.shut = False
    pool, done = engine.drain(pool)
    assert {each.error for each in done} == {None}
    check_at_rest(engine)
    assert load_numbers(engine, pool, [1, *range(2, 14)])[0] == [11, *[20] * 12]


@modes
def test_a_save_finds_room_beside_loads_that_wait_for_it(mode, gate):
    # They read extents that it has to free, and write blocks that it has to read.
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    for start in (0, 16):
        pool = save_and_wait(engine, pool, range(16), range(start, start + 16))
    gate.shut = True
    engine.save(pool, [20], [31])
    first = range(0, NUM_HOST_BLOCKS - 4, 4)  # One of each extent but the last.
    for host_id in first:
        engine.save(pool, [23], [host_id])
    pool, loaded = engine.load(pool, [host_id + 1 for host_id in first], range(17, 24))
    for host_id in first:  # The blocks to load have been claimed by a save.
        engine.save(pool, [0], [host_id + 1])
    assert engine.is_waiting(loaded)
    gate.shut = False
    pool, done = engine.drain(pool)
    assert {each.error for each in done} == {None}
    assert numbers_in(pool)[17:] == [(host_id + 1) % 16 for host_id in first]
    check_at_rest(engine)
    assert load_numbers(engine, pool, [0, 4, 24, 1, 25])[0] == [23, 23, 23, 0, 0]
