"""Conversations about text that every machine has: Python's standard library."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import random
import re
import sys
import sysconfig
from collections.abc import Iterator

from jaxkv.tools.demo.records import DemoConfig

PREAMBLE = (
    b"You answer questions about the text below. Quote it where that helps, and say "
    b"so when it has no answer.\n\n"
)
"""The system prompt, at the start of every document."""

# Modules in plain Python, not frozen into the interpreter, in all versions from 3.11.
MODULES = """
    argparse ast bdb calendar cmd configparser contextlib copy csv dataclasses difflib
    dis doctest enum filecmp fractions ftplib functools gettext heapq imaplib inspect
    ipaddress locale mailbox mimetypes optparse pdb pickle pickletools platform plistlib
    poplib pprint pydoc random selectors shlex shutil smtplib socket socketserver ssl
    statistics subprocess tarfile tempfile textwrap threading timeit tokenize trace
    traceback typing uuid weakref
"""

FUNCTION_TEMPLATES = (
    "what does the function `{name}` in {source} do?",
    "which arguments does `{name}` in {source} take?",
    "when does `{name}` in {source} raise an error?",
    "what does `{name}` in {source} return?",
    "who would call `{name}` from {source}, and why?",
)
WORD_TEMPLATES = (
    "what does {source} say about `{name}`?",
    "why does {source} mention `{name}`?",
    "where in {source} does `{name}` first appear?",
)

_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A document and the questions about it."""

    title: str  # The source of the document
    document: tuple[int, ...]  # The preamble, then the text; one token per byte
    # One per turn, each with the cue for its answer
    questions: tuple[tuple[int, ...], ...]


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


def read_sources() -> dict[str, bytes]:
    """Read the texts of the documents.

    Returns text by name, in a fixed order. Modules without source are left out.
    """
    licence = pathlib.Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if licence.is_file():
        sources = {"the licence of Python": licence.read_bytes()}
    else:
        sources = {"the licence of Python": sys.copyright.encode()}
    for module in MODULES.split():
        spec = importlib.util.find_spec(module)
        # The loader instead of a path: the library may be in a zip archive.
        get_source = getattr(spec and spec.loader, "get_source", None)
        text = get_source(module) if get_source else None
        if text:
            sources[module] = text.encode()
    return sources


def _excerpt(
    sources: list[tuple[str, bytes]], first: int, size: int, rng: random.Random
) -> list[tuple[str, bytes]]:
    """Cut `size` bytes from a random line of a source, continuing in the next."""
    text = sources[first][1]
    start = text.find(b"\n", rng.randrange(max(1, len(text) - size))) + 1
    if len(text) - start < size:
        start = 0
    pieces = []
    for source, text in sources[first:] + sources[:first]:
        pieces.append((source, text[start : start + size]))
        size -= len(pieces[-1][1])
        start = 0
        if not size:
            break
    return pieces


def _subjects(pieces: list[tuple[str, bytes]]) -> Iterator[tuple[str, str, str]]:
    """Yield (template, name, source) of the possible questions about an excerpt."""
    for pattern, templates in (
        (rb"(?m)^ *(?:async )?def (\w+)\(", FUNCTION_TEMPLATES),
        (rb"\b([A-Za-z_]{5,})\b", WORD_TEMPLATES),
    ):
        names = {
            (match.decode(errors="ignore"), source): None
            for source, text in pieces
            for match in re.findall(pattern, text)
        }
        for i in range(len(templates)):
            for j, (name, source) in enumerate(names):
                yield templates[(i + j) % len(templates)], name, source


def _question(template: str, name: str, source: str) -> tuple[int, ...]:
    text = template.format(name=name, source=source)
    return tuple(f"\n\nQuestion: {text}\nAnswer:".encode())


def make_conversations(config: DemoConfig) -> tuple[Conversation, ...]:
    """Make the conversations of a demo run.

    They are the same for the same `config` and Python version. All documents begin
    with the same preamble; no two are equal.
    """
    size = config.document_tokens - len(PREAMBLE)
    if size < 1:
        raise ValueError(
            f"document_tokens={config.document_tokens} must be more than the "
            f"{len(PREAMBLE)} tokens of the preamble"
        )
    rng = random.Random(config.seed)
    sources = list(read_sources().items())
    rng.shuffle(sources)
    seen: set[bytes] = set()
    conversations = []
    for i in range(config.conversations):
        for _ in range(_ATTEMPTS):
            pieces = _excerpt(sources, i % len(sources), size, rng)
            text = b"".join(part for _, part in pieces)
            if len(text) == size and text not in seen:
                break
        else:
            raise ValueError(
                f"document_tokens={config.document_tokens} does not give "
                f"conversations={config.conversations} unique documents out of "
                f"Python's standard library; ask for fewer, or for another length"
            )
        seen.add(text)
        title = pieces[0][0]
        subjects = list(_subjects(pieces)) or [(WORD_TEMPLATES[0], "it", title)]
        conversations.append(
            Conversation(
                title=title,
                document=tuple(PREAMBLE + text),
                questions=tuple(
                    _question(*subjects[turn % len(subjects)])[: config.question_tokens]
                    for turn in range(config.turns)
                ),
            )
        )
    return tuple(conversations)
