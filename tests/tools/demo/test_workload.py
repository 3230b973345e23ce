"""Conversations are real text, of exact lengths, and deterministic."""

import dataclasses
import importlib.util
import re
import sys
import types

import pytest

from jaxkv.tools.demo import workload
from jaxkv.tools.demo.records import DemoConfig
from jaxkv.tools.demo.workload import PREAMBLE, make_conversations, read_sources


def test_documents_are_exact_and_distinct():
    for conversations, document_tokens in ((12, 2048), (150, 200), (2, 300_000)):
        config = DemoConfig(
            conversations=conversations, document_tokens=document_tokens
        )
        made = make_conversations(config)
        assert len(made) == len({c.document for c in made}) == conversations
        for conversation in made:
            assert len(conversation.document) == document_tokens
            assert bytes(conversation.document).startswith(PREAMBLE)
            lengths = [len(question) for question in conversation.questions]
            assert len(lengths) == config.turns
            assert 0 < min(lengths) <= max(lengths) <= config.question_tokens
    # They differ right after the preamble.
    made = make_conversations(DemoConfig(conversations=30))
    assert len({c.document[: len(PREAMBLE) + 96] for c in made}) == len(made)
    made = make_conversations(DemoConfig(question_tokens=20))
    assert {len(q) for c in made for q in c.questions} == {20}


def test_text_and_names_are_from_the_library():
    texts = read_sources()
    everything = b"".join(texts.values())
    for conversation in make_conversations(DemoConfig()):
        text = bytes(conversation.document)[len(PREAMBLE) :]
        assert text[:500] in everything
        assert conversation.title in texts
        for question in conversation.questions:
            words = bytes(question).decode()
            assert words.startswith("\n\nQuestion: ")
            (name,) = re.findall("`(.+?)`", words)
            assert name.encode() in text
        assert len(set(conversation.questions)) == len(conversation.questions)
    questions = [q for c in make_conversations(DemoConfig()) for q in c.questions]
    assert any(b"the function `" in bytes(question) for question in questions)


def test_the_seed_determines_the_conversations():
    config = DemoConfig(conversations=5)
    reseeded = dataclasses.replace(config, seed=1)
    assert make_conversations(config) == make_conversations(config)
    assert make_conversations(config) != make_conversations(reseeded)


def test_many_sources_are_read_without_importing_them():
    before = set(sys.modules)
    texts = read_sources()
    assert len(texts) > 40
    assert all(texts.values())
    assert not {"turtle", "poplib"} & (set(sys.modules) - before)


def test_without_licence_file_or_sources_the_copyright_is_used(monkeypatch, tmp_path):
    """A frozen application has only the copyright."""
    monkeypatch.setattr(workload.sysconfig, "get_path", lambda name: str(tmp_path))
    loaders = iter([None, types.SimpleNamespace(get_source=lambda name: None)] * 99)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: types.SimpleNamespace(loader=next(loaders)),
    )
    assert read_sources() == {"the licence of Python": sys.copyright.encode()}
    (conversation,) = make_conversations(
        DemoConfig(conversations=1, document_tokens=200)
    )
    assert bytes(conversation.document[len(PREAMBLE) :]) in sys.copyright.encode()
    with pytest.raises(ValueError, match="document_tokens=9999 does not give"):
        make_conversations(DemoConfig(conversations=1, document_tokens=9999))


def test_a_text_without_words_has_a_question(monkeypatch):
    monkeypatch.setattr(workload, "read_sources", lambda: {"numbers": b"1 2 3\n" * 9})
    (conversation,) = make_conversations(
        DemoConfig(conversations=1, document_tokens=len(PREAMBLE) + 12)
    )
    assert b"what does numbers say about `it`?" in bytes(conversation.questions[0])
