"""Mutants of jaxkv, and faults made by hand: how many does the suite notice?

docs/internals/reliability.md says how to run it.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutants import choosing, drawing, faults, tables, trying

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.json"
LOOKED_AT = Path(__file__).with_name("survivors.toml")
SEED, NUMBER = "jaxkv", 300


@dataclasses.dataclass(frozen=True)
class Job:
    """A changed tree to try."""

    kind: str  # "mutants" or "faults"
    name: str
    room: str
    path: str
    lines: list[int]
    source: str
    about: dict[str, Any]


def jobs(seed: str, number: int, rooms: Sequence[str], folder: Path) -> Iterator[Job]:
    """Give every change: one of the faults after each few mutants."""
    mutants = [
        Job(
            "mutants",
            mutant.name,
            mutant.room,
            mutant.path,
            list(range(mutant.line, mutant.last_line + 1)),
            mutant.source,
            {"operator": mutant.operator, "line": mutant.line, "diff": mutant.diff},
        )
        for mutant in drawing.draw_once(ROOT, seed, number, rooms, folder)
    ]
    by_hand = []
    for fault in faults.read():
        if fault.room not in rooms:
            continue
        source, lines = fault.put_into(ROOT)
        about = {"what": fault.what, "line": lines[0]}
        by_hand.append(
            Job("faults", fault.name, fault.room, fault.path, lines, source, about)
        )
    yield from _mixed(mutants, by_hand)


def _mixed(one: list[Job], other: list[Job]) -> list[Job]:
    """Mix two lists evenly, so that every beginning has its share of both."""
    places = [
        ((place + 0.5) / len(some), job)
        for some in (one, other)
        for place, job in enumerate(some)
    ]
    return [job for _, job in sorted(places, key=lambda pair: pair[0])]


def run(args: argparse.Namespace) -> None:
    """Try what has no result yet, and keep each result at once."""
    folder = args.folder.absolute()
    trying.prepare(folder)
    reach = choosing.Reach(args.map, ROOT)
    results = read_results(args.results)
    draw = {"seed": args.seed, "number": args.number, "rooms": list(args.rooms)}
    draws = [known for known in results["draws"] if not draw.items() <= known.items()]
    results["draws"] = [*draws, draw | {"tree": _tree()}]
    looked_at = read_looked_at()
    workshop = trying.Workshop(ROOT, folder)
    ends_s = time.monotonic() + args.minutes * 60
    for job in jobs(args.seed, args.number, args.rooms, folder):
        known = results[job.kind].get(job.name)
        if args.only:
            if job.name not in args.only:
                continue
        elif args.survivors:
            if known is None or known["killed"]:
                continue
        elif known is not None:
            continue
        if time.monotonic() > ends_s:
            break
        entry = try_job(job, workshop, reach, looked_at.get(job.name, {}), args)
        results[job.kind][job.name] = entry
        write_results(args.results, results)
        word = f"killed by {entry['by']}" if entry["killed"] else "SURVIVED"
        print(f"{entry['seconds']:6.1f} s  {job.name}  {word}", flush=True)


def try_job(
    job: Job,
    workshop: trying.Workshop,
    reach: choosing.Reach,
    looked_at: dict[str, str],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Give a changed tree to the tests that reach its line, and then to the killers."""
    native = reach.is_compiled(job.path)
    log = args.folder.absolute() / "logs" / f"{job.name}.txt"
    tests, num_left_out = choosing.order(
        reach, reach.tests(job.path, job.lines), job.room, args.seconds
    )
    in_children, more_left_out = choosing.order(
        reach, reach.with_children(job.room) - set(tests), job.room, args.seconds
    )
    tests += in_children
    num_left_out += more_left_out
    if "test" in looked_at:  # It was written for this change.
        tests = [looked_at["test"], *(t for t in tests if t != looked_at["test"])]
    expected_s = sum(reach.seconds.get(test, 1.0) for test in tests)
    workshop.make_tree(job.path, job.source)
    timeout_s = 60.0 + args.patience * expected_s
    if native:  # All is compiled anew.
        timeout_s += 120.0
    outcome = trying.Outcome(False, "", "", 0.0)
    if tests:
        outcome = workshop.run_tests(tests, timeout_s, native=native, log=log)
    tried = []
    if not outcome.is_killed and args.killers:
        for killer in trying.KILLERS:
            if killer.rooms and job.room not in killer.rooms:
                continue
            ended = workshop.run_killer(
                killer, native=native, log=log.with_suffix(f".{killer.name}.txt")
            )
            if ended is None:
                continue
            tried.append(killer.name)
            outcome = dataclasses.replace(
                ended, seconds=outcome.seconds + ended.seconds
            )
            if outcome.is_killed:
                break
    return {
        "room": job.room,
        "path": job.path,
        **job.about,
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
    """Read what was found so far."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {"draws": [], "mutants": {}, "faults": {}}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Keep what was found, whenever this process ends."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def read_looked_at() -> dict[str, dict[str, str]]:
    """Read what is known of survivors."""
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
            print(mutant.name, f"{mutant.path}:{mutant.line}", mutant.operator)
            print(mutant.diff)
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
