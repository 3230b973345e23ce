"""Conversations about random documents: random weights have no use for text."""

from __future__ import annotations

import random
import string
from typing import NamedTuple

from jaxkv.tools.demo.records import DemoConfig

PREAMBLE = (
    b"You answer questions about the text below. Quote it where that helps, and say "
    b"so when it has no answer.\n\n"
)
"""The system prompt, at the start of every document."""

_LETTERS = (string.ascii_lowercase + "  \n").encode()


class Conversation(NamedTuple):
    """A document and the questions about it; one token per byte."""

    document: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]  # One per turn


def arrival_order(num_conversations: int, turn: int) -> list[int]:
    """Return the order of the conversations in a turn, from 0.

    Each half of them is shuffled. So a conversation returns after at least half of the
    others, which a small device does not hold, and not always after all of them: in
    that order no policy would find anything in less memory than all of them take.

    >>> sorted(arrival_order(5, turn=1))
    [0, 1, 2, 3, 4]
    """
    rng = random.Random(turn)
    half = num_conversations // 2
    return [
        *rng.sample(range(half), half),
        *rng.sample(range(half, num_conversations), num_conversations - half),
    ]


def make_conversations(config: DemoConfig) -> tuple[Conversation, ...]:
    """Make the conversations of a demo run. Equal configurations give equal ones."""
    size = config.document_tokens - len(PREAMBLE)
    if size < 1:
        raise ValueError(
            f"document_tokens={config.document_tokens} must be more than the "
            f"{len(PREAMBLE)} tokens of the preamble"
        )
    rng = random.Random(config.seed)

    def text(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(_LETTERS, k=num_tokens))

    longest = config.question_tokens
    return tuple(
        Conversation(
            tuple(PREAMBLE) + text(size),
            tuple(
                text(rng.randint(longest // 2, longest)) for _ in range(config.turns)
            ),
        )
        for _ in range(config.conversations)
    )
