"""The queue of transfers: budget, order, what waits, and what is abandoned."""

import pytest

from tests.transfer.numbered import EXTENT_BYTES, NUM_HOST_BLOCKS


def issued_by(engine, monkeypatch):
    """The tickets of the pieces that `engine` issues from here on."""
    queue, issued = engine._queue, []

    def spied(issue):
        def spy(leaves, pieces):
            issued.extend(piece.transfers[0].ticket for piece in pieces)
            issue(leaves, pieces)

        return spy

    for name in ("_issue_loads", "_start_saves"):
        monkeypatch.setattr(queue, name, spied(getattr(queue, name)))
    return issued


def test_loads_go_before_saves_and_each_in_the_order_of_the_calls(
    make, gate, monkeypatch
):
    moves = make(staging_bytes=EXTENT_BYTES)
    moves.save_now(range(8), range(8))
    issued = issued_by(moves.engine, monkeypatch)
    gate.shut = True
    saves = [moves.save([10 + n], [10 + n]) for n in range(3)]
    loads = []
    for n in range(3):
        loads.append(moves.load([n, n + 4], [n, n + 4]))
        saves.append(moves.save([13 + n], [13 + n]))
    assert issued == saves[:1]
    assert moves.advance() == []
    assert moves.engine.bytes_in_flight == EXTENT_BYTES
    waiting = [ticket for ticket in saves + loads if moves.engine.is_waiting(ticket)]
    assert waiting == saves[1:] + loads
    assert moves.engine.num_waiting == moves.engine.num_in_flight - 1 == 8
    gate.shut = False
    done = moves.drain()
    assert not any(map(moves.engine.is_waiting, waiting))
    pieces = [ticket for ticket in loads for _ in range(2)]  # Each of two extents.
    assert issued == [saves[0], *pieces, *saves[1:]]
    in_order = sorted(saves + loads, key=lambda ticket: ticket.number)
    assert [completion.ticket for completion in done] == in_order
    assert {completion.error for completion in done} == {None}


def test_a_drain_does_not_wait_for_a_host_read_that_delays_nothing(make, monkeypatch):
    # A pause raises an error.
    monkeypatch.setattr("jaxkv.transfer.queue._PAUSE_S", -1)
    moves = make()
    moves.save_now([4], [4])
    read = moves.engine.read_host([4])
    moves.load([4], [8])
    try:
        moves.drain()
    finally:
        read.close()
    assert moves.numbers[8] == 4


@pytest.mark.parametrize("has_room", [True, False])
def test_transfers_of_one_block_take_effect_in_the_order_of_their_calls(
    make, mode, has_room, gate
):
    moves = make(staging_bytes=3 * EXTENT_BYTES)
    moves.save_now([7], [1])
    gate.shut = True
    if not has_room:
        moves.save(range(10, 22), range(10, 22))
    tickets = moves.save([3], [2]), moves.load([1], [3]), moves.save([3], [5])
    before, _, after = tickets
    assert moves.engine.is_waiting(before) == (not has_room)
    assert moves.engine.is_waiting(after) == (not has_room or mode == "staged")
    gate.shut = False
    assert tuple(done.ticket for done in moves.drain()[-3:]) == tickets
    assert moves.numbers[3] == 7
    assert moves.read([2, 5]) == [3, 7]


def test_loads_that_wait_are_written_in_order_with_the_bytes_of_their_calls(make, gate):
    moves = make(staging_bytes=EXTENT_BYTES)
    moves.save_now(range(12), range(12))
    gate.shut = True
    moves.save([23], [20])  # Takes all the budget.
    moves.load([0, 1, 2, 3], [10, 11, 12, 13])
    for host_id in (3, 11, 6):  # In three extents; the last one wins.
        moves.load([host_id], [22])
    for _ in range(3):  # Extents enough to use the memory of the first again.
        moves.save([14, 15, 16, 17], [0, 1, 2, 3])
    gate.shut = False
    assert {completion.error for completion in moves.drain()} == {None}
    assert moves.numbers[10:14] == [0, 1, 2, 3]
    assert moves.numbers[22] == 6
    assert moves.read([0, 1, 2, 3]) == [14, 15, 16, 17]


def test_a_waiting_transfer_that_is_abandoned_never_happens(make, gate, monkeypatch):
    moves = make(staging_bytes=EXTENT_BYTES)
    engine = moves.engine
    moves.save_now(range(8), range(8))
    issued = issued_by(engine, monkeypatch)
    gate.shut = True
    first = moves.save([20], [20])
    abandoned = [moves.save([6, 7], [30, 1]), moves.load([2, 6], [10, 11])]
    kept = [moves.load([3], [12]), moves.save([8], [8])]
    for ticket in abandoned:
        engine.abandon(ticket)
        assert not engine.is_waiting(ticket)
    gate.shut = False
    tickets = [completion.ticket for completion in moves.drain()]
    assert tickets == issued == [first, *kept]
    assert moves.numbers[10:13] == [10, 11, 3]
    moves.check_empty([30, 1])  # Also the block that it would have overwritten.
    assert moves.read([2, 8, 20]) == [2, 8, 20]


def test_no_load_waits_for_an_abandoned_save(make, gate, monkeypatch):
    moves = make()
    engine = moves.engine
    moves.save_now([7, 8], [7, 8])
    gate.shut = True
    moves.save([0], [0])
    with monkeypatch.context() as patch:
        patch.setattr(engine._table, "place", lambda ids, shards: None)
        moves.save([1, 2], [1, 2])  # Waits for room.
        abandoned = moves.save([2, 3], [3, 4])
        engine.abandon(abandoned)
        # Block 3 is free, but 2 still has to be read.
        bytes_before = engine.bytes_in_flight
        moves.load([7], [3])
        assert engine.bytes_in_flight > bytes_before
        bytes_before = engine.bytes_in_flight
        assert engine.is_waiting(moves.load([8], [2]))
        assert engine.bytes_in_flight == bytes_before
    gate.shut = False
    assert [completion.error for completion in moves.drain()] == [None] * 4
    assert moves.numbers[2:4] == [8, 7]
    assert moves.read([2]) == [2]


def test_a_save_finds_room_beside_loads_that_wait_for_it(make, gate):
    # They read extents that it has to free, and write blocks that it has to read.
    moves = make(staging_bytes=EXTENT_BYTES)
    for start in (0, 16):
        moves.save_now(range(16), range(start, start + 16))
    gate.shut = True
    moves.save([20], [31])
    first = range(0, NUM_HOST_BLOCKS - 4, 4)  # One of each extent but the last.
    for host_id in first:
        moves.save([23], [host_id])
    loaded = moves.load([host_id + 1 for host_id in first], range(17, 24))
    for host_id in first:  # The blocks to load have been claimed by a save.
        moves.save([0], [host_id + 1])
    assert moves.engine.is_waiting(loaded)
    gate.shut = False
    assert {completion.error for completion in moves.drain()} == {None}
    assert moves.numbers[17:] == [(host_id + 1) % 16 for host_id in first]
    assert moves.read([0, 4, 24, 1, 25]) == [23, 23, 23, 0, 0]
