"""The tool: the mutants it draws, the faults it places, the tests it selects."""

import ast
import gzip
import json
from pathlib import Path

import pytest

from tests.mutants import choosing, drawing, faults, tables

SOURCE = '''\
"""A room of 2 floors."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    NUMBER = 1


def check(number: int | None = 7, *, least: int = 2) -> int | None:
    """Give 3 of them."""
    if number is None or number < least:
        raise ValueError(f"{number + 4} must be at least {5}.")
    return number - 6
'''


ROOMS = ("keys", "tools", "config")


def tree_of(root, source=SOURCE):
    for name in ("keys/file.py", "tools/plan/file.py", "config.py", "types.py"):
        path = root / "jaxkv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_mutants_change_code_that_runs(tmp_path):
    pytest.importorskip("cosmic_ray")
    mutants = drawing.draw(tree_of(tmp_path), "seed", 45, ROOMS)
    assert len({(mutant.path, mutant.source) for mutant in mutants}) > 20
    for mutant in mutants:
        ast.parse(mutant.source)
        assert mutant.about["line"] in (8, 10, 12)
        for text in ("of 2 floors", "NUMBER = 1", "number: int | None", "+ 4", "{5}"):
            assert text in mutant.source


def test_a_seed_draws_the_same_again(tmp_path):
    pytest.importorskip("cosmic_ray")
    tree = tree_of(tmp_path)
    first, again, differing = (drawing.draw(tree, seed, 30, ROOMS) for seed in "aab")
    assert first == again != differing


def test_each_beginning_of_what_is_drawn_is_of_all_rooms(tmp_path):
    pytest.importorskip("cosmic_ray")
    mutants = drawing.draw(tree_of(tmp_path), "seed", 30, ROOMS)
    assert {mutant.room for mutant in mutants[: len(ROOMS)]} == set(ROOMS)


def test_every_file_is_of_a_room_except_what_only_names_things():
    package = Path(__file__).resolve().parents[2] / "jaxkv"
    rooms = {path.stem for path in package.iterdir() if path.suffix in ("", ".py")}
    assert rooms - {"__pycache__"} == {*drawing.ROOMS, "__init__", "__main__", "types"}


def test_each_fault_made_by_hand_finds_its_place():
    root = Path(__file__).resolve().parents[2]
    for fault in faults.read():
        source, lines = fault.put_into(root)
        compile(source, fault.path, "exec")
        assert lines


@pytest.mark.parametrize("text", ["", "least\nleast\n"])
def test_a_fault_whose_place_is_not_there_once_is_refused(tmp_path, text):
    (tmp_path / "file.py").write_text(text)
    fault = faults.Fault("fault", "...", "file.py", (("least", "most"),))
    with pytest.raises(ValueError, match=f"'fault'.*{text.count('least')} times"):
        fault.put_into(tmp_path)


def test_a_fault_returns_its_changed_lines(tmp_path):
    (tmp_path / "file.py").write_text("one\ntwo\nthree\nfour\n")
    edits = ("two\nthree\n", ""), ("four", "five")
    fault = faults.Fault("fault", "...", "file.py", edits)
    assert fault.put_into(tmp_path) == ("one\nfive\n", [2, 3, 4])


def reach_of(folder, lines, calls=None, with_children=(), **seconds):
    """A map of one room; `seconds` are the durations of its tests."""
    part = {"tests": list(seconds.items()), "lines": lines, "calls": calls or {}}
    part["with_children"] = with_children
    with gzip.open(folder / "map.json.gz", "wt") as file:
        json.dump(part, file)
    return choosing.Reach(folder, folder)


def test_tests_are_those_that_reach_a_line_or_else_the_file(tmp_path):
    lines = {"jaxkv/keys/file.py": {"1": [], "2": [0], "3": [0, 1]}}
    reach = reach_of(tmp_path, lines, a=1.0, b=2.0, c=3.0)
    assert reach.tests("jaxkv/keys/file.py", [2]) == {"a"}
    assert reach.tests("jaxkv/keys/file.py", [2, 3]) == {"a", "b"}
    assert reach.tests("jaxkv/keys/file.py", [1]) == {"a", "b"}


def test_a_compiled_function_is_reached_through_those_that_call_it(tmp_path):
    host = "def find():\n look()\ndef lookup():\n find()\ndef pin():\n ...\n"
    files = {
        "jaxkv/tiers/host_native.py": host.replace("def", "@compiled\ndef"),
        "jaxkv/policies/lru.py": "@inlined\ndef look():\n ...\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    calls = {
        "jaxkv.tiers.host_native.lookup": [0, 1],
        "jaxkv.tiers.host_native.pin": [2],
        "state jaxkv.policies.lru": [1, 2],
    }
    reach = reach_of(tmp_path, {}, calls, a=1.0, b=2.0, c=3.0)
    assert reach.tests("jaxkv/tiers/host_native.py", [3]) == {"a", "b"}
    assert reach.tests("jaxkv/tiers/host_native.py", [9]) == {"c"}
    assert reach.tests("jaxkv/policies/lru.py", [3]) == {"b"}  # For its state alone.


def test_tests_with_child_processes_are_known_by_room(tmp_path):
    starting = [
        "tests/tools/test_x.py::a",
        "tests/test_util.py::b",
        "tests/keys/y.py::c",
    ]
    reach = reach_of(tmp_path, {}, with_children=starting)
    assert reach.with_children("tools") == {starting[0]}
    assert reach.with_children("_util") == {starting[1]}


def test_the_cheapest_come_first_and_files_stay_together(tmp_path):
    seconds = {
        "tests/keys/test_x.py::slow": 5.0,
        "tests/keys/test_x.py::quick": 1.0,
        "tests/keys/test_y.py::quick": 2.0,
        "tests/tiers/test_z.py::quick": 1.0,
        "tests/keys/test_y.py::too_slow": 90.0,
    }
    reach = reach_of(tmp_path, {}, **seconds)
    kept, num_left_out = choosing.order(reach, set(seconds), "keys", 60.0)
    assert kept == [
        "tests/keys/test_y.py::quick",
        "tests/tiers/test_z.py::quick",
        "tests/keys/test_x.py::quick",
        "tests/keys/test_x.py::slow",
    ]
    assert num_left_out == 1


def test_the_share_is_of_those_that_are_not_equivalent():
    entry = {"room": "keys", "path": "x.py", "line": 1, "operator": "O", "diff": ""}
    entries = {
        name: entry | {"killed": name == "a", "by": "tests/x.py::y"} for name in "abcd"
    }
    looked_at = {
        "b": {"equivalent": "it only costs time."},
        "d": {"elsewhere": "a GPU."},
    }
    assert tables.share(entries, looked_at) == "50.0%"
    page = tables.page({"draws": [], "mutants": entries, "faults": {}}, looked_at)
    assert "| keys | 4 | 1 | 1 | 1 | 1 | 50.0% |" in page
    assert "Equivalent: it only costs time." in page
    assert "Elsewhere: a GPU." in page
    assert "Not looked at yet." in page
