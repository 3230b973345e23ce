"""Which branches of `jaxkv/scheduling` random walks through the worlds take.

An exploration sees every order of the nearest events. A walk goes farther, one way, and
ends as a calm engine ends it. Both hold the same to be true.
"""

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import jaxkv.scheduling
from tests.explorer import search
from tests.explorer.world import World, WrongError

# Functions that no order of events reaches, by the reason.
OUTSIDE = {
    "it refuses calls or settings, or checks what an engine says": (
        "boundary.py check_reports",
        *("eager.py EagerStores._check_all", "scheduler.py OffloadScheduler.__init__"),
        *("requests.py keys_by_group", "requests.py Requests.check"),
        *("requests.py Requests.check_lookup", "requests.py Requests.check_stores"),
        *("requests.py Requests.checked", "requests.py Requests._missing_error"),
        *("requests.py Requests._check_lists", "requests.py Requests._check_number"),
        *("rules.py _checked_shadow", "rules.py RuleSettings._contradictions"),
        "rules.py parse_shadows",
        *("rules.py OffloadRules._contradictions", "rules.py check_groups"),
        *("rules.py _check_one_group", "rules.py check_lists_victims"),
    ),
    "it notifies listeners, which change nothing": (
        *("eager.py EagerStores._notify", "eager.py EagerStores._passes"),
        "listening.py Listeners.remove",
    ),
    "a request of a world keeps its history": (
        *("eager.py EagerStores._check_keys", "requests.py _Growing.updated"),
    ),
    "it runs before any event": (
        *("boundary.py make_boundaries", "eager.py EagerStores.bind"),
        "scheduler.py OffloadScheduler.bind_device_block_pool",
        "scheduler.py OffloadScheduler.warm_up",
        "scheduler.py OffloadScheduler.wait_for_storage",
    ),
    "it is text, or a record for a reader of logs, metrics or files": (
        *("explain.py Explanation.__str__", "explain.py Explanation._rows"),
        *("stats.py Histogram.keep_samples", "stats.py Histogram.take_samples"),
        "stats.py Histogram.add",
    ),
    "it is about several processes, or several tiers": (
        *("protocol.py OffloadMetadata.digest", "protocol.py OffloadMetadata.facts"),
        "protocol.py _items_of",
        "plan.py checked_rates",
    ),
}
# Files without a decision: one refuses calls, the others write lines of the log.
_UNDECIDED = ("checks.py", "idle_warning.py", "request_log.py")

# How likely an action is, 1 for others: what ends or forgets much comes less often.
_WEIGHTS = {
    "abort": 0.05,
    "finish": 0.3,
    "forget": 0.2,
    "gap": 0.3,
    "leave": 0.1,
    "preempt": 0.3,
    "reset": 0.05,
}
_MAX_ACTIONS = 120
_REST_ENDS = 0.3  # How likely a walk ends before an action if all requests have ended.
_REFUSE_EVERY = 20


class Taken(NamedTuple):
    """The branches of a file without its functions outside."""

    name: str
    num_taken: int
    num: int
    missed: list[tuple[int, int]]  # Line numbers: from, to.


def walk(setup, rng, num_actions):
    """Walk at random; return counts of events, the error or None, and its actions."""
    world = World(setup)
    start, num_left, actions = world.save(), num_actions, []
    try:
        while num_left > 0:
            world.restore(start)
            actions = []
            for n in range(min(rng.randrange(1, _MAX_ACTIONS), num_left)):
                num_left -= 1
                if world.is_at_rest and rng.random() < _REST_ENDS:
                    break
                if n % _REFUSE_EVERY == _REFUSE_EVERY // 2:
                    world.try_refused()
                choices = world.actions()
                weights = [_WEIGHTS.get(kind, 1.0) for kind, *_ in choices]
                actions += rng.choices(choices, weights)
                world.do(actions[-1])
            search.go_on_calmly(world)
    except WrongError as error:
        return world.seen, str(error), actions
    return world.seen, None, []


def measure(worlds, num_actions, seed, say=print):
    """Return the branches of each file that random walks take, and a fault or None."""
    import coverage

    folder = Path(jaxkv.scheduling.__file__).parent
    measured = coverage.Coverage(
        data_file=None, config_file=False, branch=True, include=[f"{folder}/*"]
    )
    # Listeners change nothing; a world has none. Its pool is the scheduler's own
    # (tests/campaign/borrowed.py has others), and its requests keep their history.
    measured.exclude(r"for notify in |if (self\._)?listeners")
    measured.exclude(r"isinstance\(pool, BorrowedPool\)|record_lookup\(request\)")
    for name, setup in worlds.items():
        with measured.collect():
            rng = random.Random(f"{seed} {name}")
            seen, error, actions = walk(setup, rng, num_actions)
        say(f"{name}: {dict(sorted(seen.items()))}")
        if error is not None:
            return [], (name, error, actions)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "branches.json")
        deciding = (f for f in folder.glob("*.py") if f.name not in _UNDECIDED)
        measured.json_report(morfs=list(map(str, deciding)), outfile=str(path))
        report = json.loads(path.read_text(encoding="utf-8"))
    outside = {name for names in OUTSIDE.values() for name in names}
    files = []
    for path, in_file in sorted(report["files"].items()):
        inside, file = [], Path(path).name
        for name, function in in_file["functions"].items():
            if (where := f"{file} {name}") in outside:
                outside.remove(where)
            else:
                inside.append(function)
        num_taken, num = (
            sum(function["summary"][count] for function in inside)
            for count in ("covered_branches", "num_branches")
        )
        missed = [tuple(b) for file in inside for b in file["missing_branches"]]
        if num:
            files.append(Taken(file, num_taken, num, sorted(missed)))
    if outside:
        raise LookupError(f"{outside} are outside, and do not exist")
    return files, None


def show(files):
    """Yield the lines of a report; the sum is the last one."""
    for file in files:
        yield f"{file.name}: {file.num_taken} of {file.num}"
        for start, branches in itertools.groupby(file.missed, lambda branch: branch[0]):
            ends = ["the end" if end < 0 else str(end) for _, end in branches]
            yield f"    line {start}: not to {', '.join(ends)}"
    yield "Outside, because no order of events reaches them:"
    for reason, names in OUTSIDE.items():
        yield from (f"    {name}: {reason}" for name in names)
    num_taken, num = sum(f.num_taken for f in files), sum(f.num for f in files)
    yield f"In all: {num_taken} of {num} branches, {num_taken / num:.1%}"
