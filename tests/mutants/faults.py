"""Faults of behaviour made by hand: read from `faults.toml`, and put into a tree."""

import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.mutants import drawing

FILE = Path(__file__).with_name("faults.toml")


class Fault(NamedTuple):
    """Something that a tree could do wrong."""

    name: str
    what: str  # What goes wrong, in words that suit a tree of another design, too.
    path: str  # Of the file to change, from the root of the tree.
    # What stands there, exactly once, and what must stand there instead.
    edits: tuple[tuple[str, str], ...]

    @property
    def room(self) -> str:
        return drawing.room_of(self.path)

    def put_into(self, root: Path) -> tuple[str, list[int]]:
        """Return the changed file and the changed lines of the old one."""
        file = root / self.path
        before = after = file.read_text(encoding="utf-8") if file.is_file() else ""
        lines: list[int] = []
        for find, replace in self.edits:
            if (count := before.count(find)) != 1:
                raise ValueError(
                    f"Fault {self.name!r}: {find!r} is {count} times in {self.path}, "
                    "and must be there once. Find the place that does the same now."
                )
            first = before[: before.index(find)].count("\n") + 1
            lines += range(first, first + find.rstrip("\n").count("\n") + 1)
            after = after.replace(find, replace)
        return after, lines


def read() -> list[Fault]:
    with FILE.open("rb") as file:
        return [
            Fault(name, of["what"], of["path"], tuple(map(tuple, of["edits"])))
            for name, of in tomllib.load(file).items()
        ]
