"""Mutants of jaxkv, and faults made by hand: how many does the suite notice?

docs/internals/reliability.md says how to run it.
"""

import argparse
import json
import os
import subprocess
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants import choosing, drawing, faults, tables, trying
from tests.mutants.drawing import Change

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.json"
LOOKED_AT = Path(__file__).with_name("survivors.toml")
SEED, NUMBER = "jaxkv", 300


def changes(seed: str, number: int, rooms: Sequence[str], folder: Path) -> list[Change]:
    """Return every change, faults spread evenly among the mutants."""
    by_hand = []
    for fault in faults.read():
        if fault.room in rooms:
            source, lines = fault.put_into(ROOT)
            about = {"what": fault.what, "line": lines[0]}
            fields = fault.name, fault.room, fault.path, lines, source, about
            by_hand.append(Change("faults", *fields))
    places = [
        ((place + 0.5) / len(some), change)
        for some in (drawing.draw_once(ROOT, seed, number, rooms, folder), by_hand)
        for place, change in enumerate(some)
    ]
    return [change for _, change in sorted(places, key=lambda pair: pair[0])]


def run(args: argparse.Namespace) -> None:
    """Try changes without a result, and save each result at once."""
    folder = args.folder.absolute()
    trying.prepare(folder)
    reach = choosing.Reach(args.map, ROOT)
    results = read_results(args.results)
    draw = {"seed": args.seed, "number": args.number, "rooms": list(args.rooms)}
    draws = [old for old in results["draws"] if not draw.items() <= old.items()]
    results["draws"] = [*draws, draw | {"tree": _tree()}]
    workshop = trying.Workshop(ROOT, folder)
    ends_s = time.monotonic() + args.minutes * 60
    for change in changes(args.seed, args.number, args.rooms, folder):
        result = results[change.kind].get(change.name)
        if args.only:
            if change.name not in args.only:
                continue
        elif args.survivors:
            if result is None or result["killed"]:
                continue
        elif result is not None:
            continue
        if time.monotonic() > ends_s:
            break
        entry = try_change(change, workshop, reach, args)
        results[change.kind][change.name] = entry
        write_results(args.results, results)
        word = f"killed by {entry['by']}" if entry["killed"] else "SURVIVED"
        print(f"{entry['seconds']:6.1f} s  {change.name}  {word}", flush=True)


def try_change(
    change: Change,
    workshop: trying.Workshop,
    reach: choosing.Reach,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Run the tests that reach a changed line, and then the killers."""
    native = reach.is_compiled(change.path)
    log = args.folder.absolute() / "logs" / f"{change.name}.txt"
    of_lines = reach.tests(change.path, change.lines)
    tests, num_left_out = choosing.order(reach, of_lines, change.room, args.seconds)
    in_children = reach.with_children(change.room) - set(tests)
    added = choosing.order(reach, in_children, change.room, args.seconds)
    tests, num_left_out = tests + added[0], num_left_out + added[1]
    # A test that was written for this change comes first.
    if test := read_looked_at().get(change.name, {}).get("test"):
        tests = [test, *(t for t in tests if t != test)]
    expected_s = sum(reach.seconds.get(test, 1.0) for test in tests)
    workshop.make_tree(change.path, change.source)
    timeout_s = 60.0 + args.patience * expected_s
    if native:  # All is compiled anew.
        timeout_s += 120.0
    outcome = trying.Outcome(False, "", "", 0.0)
    if tests:
        outcome = workshop.run_tests(tests, timeout_s, native=native, log=log)
    tried = []
    if not outcome.is_killed and args.killers:
        for killer in trying.KILLERS:
            if killer.rooms and change.room not in killer.rooms:
                continue
            ended = workshop.run_killer(
                killer, native=native, log=log.with_suffix(f".{killer.name}.txt")
            )
            if ended is None:
                continue
            tried.append(killer.name)
            outcome = ended._replace(seconds=outcome.seconds + ended.seconds)
            if outcome.is_killed:
                break
    return {
        "room": change.room,
        "path": change.path,
        **change.about,
        "tests": len(tests),
        "left_out": num_left_out,
        "killed": outcome.is_killed,
        "by": outcome.by,
        "how": outcome.how.replace(str(args.folder.absolute()), "..."),
        "killers": tried,
        "seconds": round(outcome.seconds, 1),
    }


def try_the_tree(args: argparse.Namespace) -> int:
    """Run all tests of the map on the tree as it is, where all should pass."""
    trying.prepare(args.folder.absolute())
    reach = choosing.Reach(args.map, ROOT)
    workshop = trying.Workshop(ROOT, args.folder.absolute())
    workshop.make_tree()
    tests, num_left_out = choosing.order(reach, set(reach.seconds), "", args.seconds)
    log = args.folder.absolute() / "logs/the-tree-itself.txt"
    outcome = workshop.run_tests(tests, 24 * 3600.0, native=False, log=log)
    print(f"{len(tests)} tests, {num_left_out} left out, {outcome.seconds:.0f} s")
    print(f"{outcome.by}: {outcome.how}" if outcome.is_killed else "All pass.")
    return int(outcome.is_killed)


def read_results(path: Path) -> dict[str, Any]:
    if path.exists():
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return results
    return {"draws": [], "mutants": {}, "faults": {}}


def write_results(path: Path, results: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def read_looked_at() -> dict[str, dict[str, str]]:
    with LOOKED_AT.open("rb") as file:
        return tomllib.load(file)


def _tree() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", choices=["check", "draw", "tree", "run", "table"])
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--number", type=int, default=NUMBER, help="of mutants")
    parser.add_argument("--map", type=Path, default=os.environ.get("JAXKV_MUTANTS_MAP"))
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home() / ".cache/jaxkv-mutants",
        help="where trees are made, and what is compiled is kept",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin none after")
    parser.add_argument("--only", nargs="+", help="names; also if there is a result")
    parser.add_argument(
        "--rooms",
        nargs="+",
        choices=drawing.ROOMS,
        default=drawing.ROOMS,
        help="which share the mutants",
    )
    parser.add_argument(
        "--survivors", action="store_true", help="try again what has survived"
    )
    parser.add_argument(
        "--killers", action="store_true", help="give survivors to the campaign as well"
    )
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="of tests for each, by the map"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=6.0,
        help="how many times longer than by the map is a hang",
    )
    args = parser.parse_args()
    if args.do in ("run", "tree") and args.map is None:
        parser.error("--map is needed: the folder that tests.mutants.reach wrote to")
    if args.do == "check":
        for fault in faults.read():
            fault.put_into(ROOT)
        print(f"{len(faults.read())} faults find their places.")
    elif args.do == "draw":
        for mutant in drawing.draw(ROOT, args.seed, args.number, args.rooms):
            about = mutant.about
            print(mutant.name, f"{mutant.path}:{about['line']}", about["operator"])
            print(about["diff"])
    elif args.do == "tree":
        return try_the_tree(args)
    elif args.do == "run":
        args.map = Path(args.map)
        run(args)
    else:
        path = LOOKED_AT.with_name("survivors.md")
        path.write_text(
            tables.page(read_results(args.results), read_looked_at()), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
