"""Engines in both modes, pools that are ready late, and pools that fail."""

import types

import pytest

from jaxkv.transfer import kernels, tickets
from tests.rigs.device_cases import ON_CPU
from tests.transfer import faults
from tests.transfer.numbered import Moves, check_at_rest, numbered_pool


@pytest.fixture(params=("fused", "staged"))
def mode(request):
    """Each mode that works here."""
    if request.param == "fused" and not ON_CPU:
        pytest.skip("the mode 'fused' is for pools on CPU")
    return request.param


@pytest.fixture
def make(mode):
    """Make engines with their pools; in the end none may have left anything behind."""
    made = []

    def make(*pool, **options):
        made.append(Moves(mode, *pool, **options))
        return made[-1]

    yield make
    for moves in made:
        moves.drain()
        check_at_rest(moves.engine)


@pytest.fixture
def fresh_programs():
    """Share no programs between a test that patches traced code and other tests."""
    kernels.shared_copier.cache_clear()
    yield
    kernels.shared_copier.cache_clear()


@pytest.fixture
def held():
    """Make pools that are not ready before `release`."""
    yield types.SimpleNamespace(pool=faults.held, release=faults.release)
    faults.release()


@pytest.fixture
def broken():
    """Make pools whose arrays fail some time later."""
    if not ON_CPU:
        pytest.skip("a program that fails in flight needs the CPU backend")
    yield faults.broken
    faults.recover(numbered_pool())


@pytest.fixture
def gate(monkeypatch):
    """While it is shut no piece is ready, however fast the machine is."""
    is_ready = tickets.Piece.is_ready
    gate = types.SimpleNamespace(shut=False)
    monkeypatch.setattr(
        tickets.Piece, "is_ready", lambda piece: not gate.shut and is_ready(piece)
    )
    yield gate
    gate.shut = False  # A test that failed may have left it shut.
