"""Faults of behaviour made by hand: read from `faults.toml`, and put into a tree."""

import dataclasses
import tomllib
from pathlib import Path

from tests.mutants import drawing

FILE = Path(__file__).with_name("faults.toml")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that a tree could do wrong.

    Attributes:
        name: By which it is asked for.
        what: What goes wrong, in words that do for a tree of another design.
        path: The file to change, from the root of the tree.
        edits: What stands there, exactly once, and what stands there instead.
    """

    name: str
    what: str
    path: str
    edits: tuple[tuple[str, str], ...]

    @property
    def room(self) -> str:
        """The room of the file."""
        return drawing.room_of(self.path)

    def put_into(self, root: Path) -> tuple[str, list[int]]:
        """Give the changed file, and the lines of the old one that are others now.

        Raises:
            ValueError: If a place is not there, or there more than once.
        """
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
    """Read all faults."""
    with FILE.open("rb") as file:
        return [
            Fault(name, of["what"], of["path"], tuple(map(tuple, of["edits"])))
            for name, of in tomllib.load(file).items()
        ]
