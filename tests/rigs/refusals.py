"""Calls with every wrong value of every argument, and values that are long to show."""

import numpy as np
import pytest

WRONG = (
    *(None, True, -1, 1.5, float("nan"), 10**30, "x", b"x"),
    *([None], [1.5], ["a"], {}, object(), len, np.ones(3), np.ones((2, 2), int)),
)
LONG = "x" * 100_000
SURROGATE = "\ud800"
# Messages must show each of them in one short printable line.
AWKWARD = [
    *(LONG, SURROGATE, "two\nlines", "\x00", "\x1b[31m", ""),
    *(10**400, -(10**5000), float("nan"), float("inf")),
    *(None, True, b"\xff" * 100_000, [[[]]], {}, np.ma.masked, object()),
    *(np.zeros((300, 300)), np.arange(2000.0), [LONG] * 3, [1.5] * 100_000),
]


def is_short_line(text):
    """Whether a text is one line, not long, that any stream can print."""
    return text.isprintable() and len(text) < 1000


def wrong_calls(arguments):
    """Yield calls with one wrong argument; name -> (right value, other right ones)."""
    right = {name: values[0] for name, values in arguments.items()}
    for name, (_, *allowed) in arguments.items():
        for wrong in WRONG:
            if repr(wrong) not in map(repr, allowed):
                yield name, right | {name: wrong}


def check_refusals(call, arguments, state):
    """Check that wrong values are refused by name, and change no state."""
    before = state()
    for name, wrong in wrong_calls(arguments):
        with pytest.raises((TypeError, ValueError), match=name) as raised:
            call(**wrong)
        assert state() == before, (name, wrong[name])
        assert "\n" not in str(raised.value)
