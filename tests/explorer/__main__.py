"""Try every order of events in a small world.

    python -m tests.explorer --list
    python -m tests.explorer --world store --minutes 10
    python -m tests.explorer --replay counterexample.json
    python -m tests.explorer --branches

A world is a few blocks of the device and of the host, two or three requests that share
prefixes, and perhaps a store. In every state everything that can happen is tried:
requests are admitted, scheduled, preempted and aborted, transfers land and fail, the
host is reset. The nearest states come first; a state that was met before is not tried
again. In each of them no wrong block may be found or read, refused calls and `explain`
may change nothing, `explain` has to say what the query answers, and a calm engine, that
lands everything and serves one request after the other, has to come to an end with
nothing left behind. What goes wrong is shrunk to the fewest actions and written to a
file. With --branches, walks of a fixed seed go through all worlds instead, and the
branches of jaxkv/scheduling that they take are counted. Exit code: 0 if nothing was
found, 1 if something was.
"""

import argparse
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.explorer import branches, search
from tests.explorer.worlds import WORLDS


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.explorer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*WORLDS, "all"]
    parser.add_argument("--world", nargs="+", choices=names, default=["eager"])
    parser.add_argument("--minutes", type=float, help="how long, for each world")
    parser.add_argument("--states", type=int, help="how many states at most")
    parser.add_argument("--depth", type=int, help="how many actions in a row at most")
    parser.add_argument(
        "--refuse-every",
        type=int,
        default=1,
        help="try refused calls in every Nth state only",
    )
    parser.add_argument(
        "--out", default="counterexample.json", help="where to write what goes wrong"
    )
    parser.add_argument("--replay", help="do what such a file says")
    parser.add_argument("--list", action="store_true", help="list the worlds")
    parser.add_argument(
        "--branches",
        nargs="?",
        type=int,
        const=3000,
        metavar="N",
        help="walk N actions at random in each world, and count branches",
    )
    parser.add_argument("--seed", type=int, default=7, help="of the walks")
    args = parser.parse_args()
    if args.list:
        for name, setup in WORLDS.items():
            print(f"{name}: {setup}")
        return 0
    if args.replay:
        name, actions = search.read_counterexample(args.replay)
        error, num = search.what_goes_wrong(WORLDS[name], actions)
        for action in actions[:num]:
            print(*action)
        print(error or "nothing goes wrong")
        return int(error is not None)
    if args.branches:
        files, wrong = branches.measure(WORLDS, args.branches, args.seed)
        if wrong is not None:
            return report(args.out, *wrong)
        print(*branches.show(files), sep="\n")
        return 0
    num_states = 0
    for name in WORLDS if "all" in args.world else args.world:
        result = search.explore(
            WORLDS[name],
            minutes=args.minutes,
            max_states=args.states,
            max_depth=args.depth,
            refuse_every=args.refuse_every,
            say=lambda line, name=name: print(f"{name}: {line}", flush=True),
        )
        print(f"{name}: {result}")
        print(f"{name}: {dict(sorted(result.seen.items()))}", flush=True)
        num_states += result.num_states
        if result.error is not None:
            return report(args.out, name, result.error, result.actions)
    print(f"{num_states:,} states in all")
    return 0


def report(path, name, error, actions):
    """Shrink a counterexample, and write it down; return the exit code."""
    actions, shrunk = search.shrink(WORLDS[name], actions)
    search.write_counterexample(path, name, actions, shrunk or error)
    print(f"{name}: {shrunk or error}\nSee {path}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
