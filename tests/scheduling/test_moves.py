"""The ledger of what is on its way between two tiers."""

import pytest

from jaxkv.scheduling.moves import Ledger, Move


def make_ledger(*sizes):
    """A ledger of two workers, with a move of each number of blocks."""
    ledger = Ledger("move", num_workers=2)
    moves = [Move([b"key"] * n, list(range(n)), list(range(n))) for n in sizes]
    for move in moves:
        ledger.issue([move])
    return ledger, moves


def test_a_move_ends_when_every_worker_has_reported_it():
    ledger, (first, second) = make_ledger(1, 2)
    assert ledger.report([(1, (True, False)), (0, True)]) == []
    assert ledger.num_blocks == 3
    assert ledger.report([(1, (True, True))]) == [second]
    assert (second.ok.tolist(), ledger.num_blocks) == ([True, False], 1)
    assert ledger.report([(0, False)]) == [first]
    assert (first.ok, list(ledger.moves)) == (False, [])


def test_a_report_that_is_not_due_is_refused():
    ledger, moves = make_ledger(1, 2)
    for reports, error in (
        ([(7, True)], "move 7 has 1 reports, but 0 are due; in flight are .0, 1"),
        ([(1, True)] * 3, "move 1 has 3 reports, but 2 are due"),
        ([(0, True), (1, (True,))], "move 1 has flags of 1 blocks, but must have 2"),
    ):
        with pytest.raises(ValueError, match=error):
            ledger.check(reports)
        assert [move.num_reports for move in moves] == [0, 0]
    # Eight moves in flight are named, and the others counted.
    for num, end in ((8, "6, 7]."), (9, "6, 7] and 1 more.")):
        ledger, _ = make_ledger(*[1] * num)
        with pytest.raises(ValueError, match="in flight are") as raised:
            ledger.check([(99, True)])
        assert str(raised.value).endswith(end)
