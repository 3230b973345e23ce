"""The table of docs/internals/reliability.md names tests that there are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def promises():
    """The rows of the table: the promise, and the tests that are named for it."""
    text = (ROOT / "docs/internals/reliability.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("## What is promised")
    table, _, _ = rest.partition("\n## ")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line[:1] == "|"]
    return {row[0].strip(): TEST.findall(row[1]) for row in rows[2:]}


def test_every_promise_has_a_test_that_is_there():
    rows = promises()
    assert len(rows) >= 10
    for promise, tests in rows.items():
        assert tests, f"no test is named for: {promise}"
        for path, name in tests:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names = {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            }
            assert not name or name in names, f"{path} has no {name}"
