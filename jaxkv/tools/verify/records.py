"""Stages, checks and results, and the files that keep results when a process dies."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxkv._util.files import open_file

Verdict: TypeAlias = Literal["PASS", "FAIL", "SKIP"]

START = "start"
"""The check that covers the start of a stage: jax, its backend, the list of checks."""

NO_TIME = "out of time; use --resume with a larger --budget"
"""The detail of a check that did not run to its end within the budget."""

_BEAT_S = 1.0


class Stage(NamedTuple):
    """Checks that share a process; `jaxkv.tools.verify.<name>` lists them."""

    name: str
    title: str
    share: float  # Of the time budget


STAGES = (
    Stage("devices", "Devices, memory and limits", 0.02),
    Stage("blocks", "Random blocks there and back, every bit compared", 0.32),
    Stage("races", "Transfers against the model's writes", 0.16),
    Stage("failures", "Failures are reported, and nothing wrong is served", 0.17),
    Stage("engine", "A serving engine, every token compared", 0.17),
    Stage("speed", "Bandwidth, overlap with compute, the engine's thread", 0.16),
)


class Result(NamedTuple):
    """A line of the report."""

    name: str  # Of the check, unique in its stage
    verdict: Verdict
    detail: str  # One line
    seconds: float = 0.0
    figures: Mapping[str, Any] = {}


class UnsupportedError(Exception):
    """Why this device does not support a check, and what of jaxkv works without it."""


class WrongError(Exception):
    """Blocks, tokens or reports are not what they must be."""


class Check(NamedTuple):
    """A check of a stage.

    `run` returns a line and figures if it passes, and raises otherwise.
    """

    name: str
    run: Callable[[Turn], tuple[str, Mapping[str, Any]]]
    weight: float = 1.0  # Its share of the stage's time
    excuse: str = ""  # Why a crash says nothing about jaxkv; empty if it is a failure


class State(NamedTuple):
    """The contents of a log."""

    results: tuple[Result, ...]
    current: str | None  # The check that has begun and has no result
    excuse: str  # The excuse of the current check
    begins: Counter[str]  # How often each check has begun
    names: tuple[str, ...]  # Of all checks; empty until they are listed
    has_ended: bool  # Whether all checks have results


class StageLog:
    """The results of a stage in a file of JSON lines.

    The stage's process appends to it, and its parent follows it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, **line: Any) -> None:
        """Append a line; the newline before it closes one that a crash has cut off."""
        with open(self.path, "a", encoding="utf-8", opener=open_file) as file:
            file.write(f"\n{json.dumps(line)}")

    def write(self, *result: Any) -> None:
        self.append(result=Result(*result)._asdict())

    def size(self) -> int:
        """Return the bytes of the file, which grow while the stage makes progress."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> State:
        results: dict[str, Result] = {}
        begins: Counter[str] = Counter()
        current, excuse, names, has_ended = None, "", (), False
        data = self.path.read_bytes() if self.path.exists() else b""
        text = data.decode("utf-8", "replace")  # A crash may leave any bytes.
        for line in filter(None, text.split("\n")):
            try:
                values = json.loads(line)
            except ValueError:
                continue  # A crash has cut it off.
            if "begin" in values:
                current, excuse = values["begin"], values["excuse"]
                begins[values["begin"]] += 1
            if "result" in values:
                result = Result(**values["result"])
                results[result.name] = result
                current = None
            names = tuple(values.get("names", names))
            has_ended = has_ended or "end" in values
            if "resume" in values:  # Now there is time for them.
                late = [name for name in results if results[name].detail == NO_TIME]
                for name in late:
                    del results[name]
                has_ended = has_ended and not late
        done = tuple(results.values())
        return State(done, current, excuse, begins, names, has_ended)


class Turn:
    """The time that a check has."""

    def __init__(self, seconds: float, log: StageLog) -> None:
        self.log = log
        self._end_s = time.monotonic() + seconds
        self._next_beat_s = 0.0

    def beat(self, *_: Any) -> None:
        """Show that the check makes progress; also a progress callback."""
        if time.monotonic() >= self._next_beat_s:
            self.log.append(beat=True)
            self._next_beat_s = time.monotonic() + _BEAT_S

    def rounds(self, minimum: int, maximum: int | None = None) -> Iterator[int]:
        """Count rounds until the time is used up, but at least a minimum."""
        for number in itertools.count():
            is_over = time.monotonic() >= self._end_s
            if number == maximum or (number >= minimum and is_over):
                return
            self.beat()
            yield number
