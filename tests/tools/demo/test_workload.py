"""Conversations have exact lengths, differ, and are deterministic."""

import dataclasses

from jaxkv.tools.demo.records import DemoConfig
from jaxkv.tools.demo.workload import PREAMBLE, make_conversations


def test_documents_are_exact_and_distinct():
    config = DemoConfig(conversations=30, document_tokens=2048)
    made = make_conversations(config)
    # They differ right after the preamble.
    assert len({c.document[: len(PREAMBLE) + 32] for c in made}) == len(made) == 30
    for conversation in made:
        assert len(conversation.document) == 2048
        assert bytes(conversation.document).startswith(PREAMBLE)
        lengths = [len(question) for question in conversation.questions]
        assert len(lengths) == config.turns
        assert min(lengths) >= config.question_tokens // 2
        assert max(lengths) <= config.question_tokens


def test_the_seed_determines_the_conversations():
    config = DemoConfig(conversations=5)
    reseeded = dataclasses.replace(config, seed=1)
    assert make_conversations(config) == make_conversations(config)
    assert make_conversations(config) != make_conversations(reseeded)
