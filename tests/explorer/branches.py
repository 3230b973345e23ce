"""Which branches of `jaxkv/scheduling` random walks through the worlds take.

An exploration sees every order of the nearest events. A walk goes farther, one way, and
ends as a calm engine ends it. Both hold the same to be true.
"""

import dataclasses
import itertools
import json
import random
import tempfile
from pathlib import Path

import jaxkv.scheduling
from tests.explorer import search
from tests.explorer.world import World, WrongError

# Files that decide nothing that an order of events could change, and why.
FILES_OUTSIDE = {
    "idle_warning.py": "a line of the log",
    "checks.py": "refuses what an engine says wrongly",
}

# Functions of the other files that no order of events reaches, and why.
FUNCTIONS_OUTSIDE = {
    "boundary.py check_reports": "refuses what an engine says wrongly",
    "boundary.py make_boundaries": "before any event",
    "eager.py EagerStores._check_all": "refuses what an engine says wrongly",
    "eager.py EagerStores._follow": "a request of a world keeps its history",
    "eager.py EagerStores._notify": "notifies listeners",
    "eager.py EagerStores._passes": "notifies listeners",
    "explain.py Explanation.__str__": "text",
    "explain.py Explanation._rows": "text",
    "explain.py _span": "text",
    "protocol.py OffloadMetadata.digest": "compared between processes",
    "protocol.py _listed": "takes arrays for lists",
    **{
        f"requests.py {name}": "refuses what an engine says wrongly"
        for name in (
            "keys_by_group",
            "Requests.check",
            "Requests.check_lookup",
            "Requests.check_stores",
            "Requests.checked",
            "Requests._check_lists",
            "Requests._check_number",
            "Requests._lacks",
        )
    },
    "requests.py _Growing.updated": "a request of a world keeps its history",
    "rules.py _check_shadow": "refuses settings",
    "rules.py RuleSettings._contradictions": "refuses settings",
    "rules.py OffloadRules._contradictions": "refuses settings",
    "rules.py check_groups": "refuses settings",
    "rules.py check_seen": "refuses settings",
    "rules.py unseen_rules": "refuses settings",
    "rules.py check_victims": "refuses settings",
    "scheduler.py OffloadScheduler.__init__": "refuses settings",
    "scheduler.py OffloadScheduler.bind_device_block_pool": "before any event",
    "plan.py checked_rates": "takes rates of several tiers",
    "scheduler.py OffloadScheduler.warm_up": "before any event",
    "scheduler.py OffloadScheduler.wait_for_storage": "before any event",
    "stats.py Histogram.keep_samples": "for a reader of metrics",
    "stats.py Histogram.take_samples": "for a reader of metrics",
}

# How likely an action is beside others: what ends or forgets much comes less often.
_WEIGHTS = {
    "abort": 0.05,
    "finish": 0.3,
    "forget": 0.2,
    "gap": 0.3,
    "leave": 0.1,
    "preempt": 0.3,
    "reset": 0.05,
}
_MOST_ACTIONS = 120
_REFUSE_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Taken:
    """Branches of a file.

    Attributes:
        name: The file.
        num_taken: Those that were taken.
        num: All there are, but for those of functions outside.
        num_taken_of_all: Those that were taken, functions outside included.
        num_of_all: All there are.
        missed: Those of `num` that were not: from which line to which.
    """

    name: str
    num_taken: int
    num: int
    num_taken_of_all: int
    num_of_all: int
    missed: tuple[tuple[int, int], ...]


def walk(setup, rng, num_actions):
    """Walk at random, from the start again and again.

    Returns:
        How often what has happened; what is wrong, None for nothing; and the actions
        that lead to it.
    """
    world = World(setup)
    start, num_left, actions = world.save(), num_actions, []
    try:
        while num_left > 0:
            world.restore(start)
            actions = []
            num = min(rng.randrange(1, _MOST_ACTIONS), num_left)
            num_left -= num
            for n in range(num):
                if n % _REFUSE_EVERY == _REFUSE_EVERY // 2:
                    world.try_refused()
                _do(world, rng, actions)
            search.go_on_calmly(world)
    except WrongError as error:
        return world.seen, str(error), actions
    return world.seen, None, []


def _do(world, rng, actions):
    choices = world.actions()
    weights = [_WEIGHTS.get(kind, 1.0) for kind, *_ in choices]
    (action,) = rng.choices(choices, weights)
    actions.append(action)
    world.do(action)


def measure(worlds, num_actions, seed, say=print):
    """Walk through worlds, and count the branches that are taken.

    Args:
        worlds: The worlds by name.
        num_actions: Actions in each of them.
        seed: Of the walks.
        say: Is told of each world.

    Returns:
        The files' branches, by name; a world's name, what is wrong in it, and the
        actions that lead to it, or None.
    """
    import coverage

    folder = Path(jaxkv.scheduling.__file__).parent
    measured = coverage.Coverage(
        data_file=None, config_file=False, branch=True, include=[f"{folder}/*"]
    )
    # Listeners change nothing; a world has none.
    measured.exclude(r"for notify in |if (self\._)?listeners")
    for name, setup in worlds.items():
        with measured.collect():
            seen, error, actions = walk(
                setup, random.Random(f"{seed} {name}"), num_actions
            )
        say(f"{name}: {dict(sorted(seen.items()))}")
        if error is not None:
            return [], (name, error, actions)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "branches.json")
        measured.json_report(
            morfs=[str(path) for path in folder.glob("*.py")], outfile=str(path)
        )
        report = json.loads(path.read_text(encoding="utf-8"))
    files = {Path(name).name: own for name, own in sorted(report["files"].items())}
    functions = {
        f"{name} {function}"
        for name, own in files.items()
        for function in own["functions"]
    }
    stale = FILES_OUTSIDE.keys() - files.keys() | FUNCTIONS_OUTSIDE.keys() - functions
    if stale:
        raise LookupError(f"{stale} are outside, and do not exist")
    return [_taken(name, own) for name, own in files.items()], None


def _taken(name, report):
    of_all = report["summary"]
    outside = [
        own["summary"]
        for function, own in report["functions"].items()
        if f"{name} {function}" in FUNCTIONS_OUTSIDE
    ]
    missed = [
        tuple(branch)
        for function, own in report["functions"].items()
        if f"{name} {function}" not in FUNCTIONS_OUTSIDE
        for branch in own["missing_branches"]
    ]
    return Taken(
        name,
        of_all["covered_branches"] - sum(own["covered_branches"] for own in outside),
        of_all["num_branches"] - sum(own["num_branches"] for own in outside),
        of_all["covered_branches"],
        of_all["num_branches"],
        tuple(sorted(missed)),
    )


def show(files):
    """Say it in lines; the last ones are the sums."""
    lines = []
    inside = [own for own in files if own.num and own.name not in FILES_OUTSIDE]
    for own in inside:
        lines.append(f"{own.name}: {own.num_taken} of {own.num}")
        for start, each in itertools.groupby(own.missed, lambda branch: branch[0]):
            ends = ["the end" if end < 0 else str(end) for _, end in each]
            lines.append(f"    line {start}: not to {', '.join(ends)}")
    lines.append("Outside, as no order of events reaches them:")
    lines += [f"    {name}: {why}" for name, why in FILES_OUTSIDE.items()]
    lines += [f"    {name}: {why}" for name, why in FUNCTIONS_OUTSIDE.items()]
    for what, num_taken, num in (
        (
            "Of the files that decide",
            sum(own.num_taken for own in inside),
            sum(own.num for own in inside),
        ),
        (
            "With their functions that are outside",
            sum(own.num_taken_of_all for own in inside),
            sum(own.num_of_all for own in inside),
        ),
        (
            "Of all files of jaxkv/scheduling",
            sum(own.num_taken_of_all for own in files),
            sum(own.num_of_all for own in files),
        ),
    ):
        lines.append(f"{what}: {num_taken} of {num} branches, {num_taken / num:.1%}")
    return lines
