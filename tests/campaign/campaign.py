"""Runs random engines, each from its number and the seed of the campaign."""

import collections
import functools
import gc
import random
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

import jax

from tests.campaign.by_hand import ByHand
from tests.campaign.connector import run_connector
from tests.campaign.paged import PagedEngine, new_history
from tests.campaign.prefixes import PrefixUser
from tests.campaign.processes import run_processes
from tests.campaign.setups import random_setup
from tests.campaign.storage import run_storage

STEPS = 600
ENGINES_PER_CLEARING = 12
# Counters that are printed first, and even if they are 0.
COUNTERS = (
    *("engines", "processes", "steps", "block reads compared", "requests served"),
    *("saves", "loads", "saves failed", "loads failed", "saves stuck", "loads stuck"),
    *("pools lost", "aborts", "preemptions", "resets", "weights changed"),
    *("explanations compared", "plans compared"),
)


class Failure(NamedTuple):
    number: int
    error: BaseException
    report: str


def summary(counts):
    unlisted = sorted(set(counts) - set(COUNTERS))
    return "\n".join(f"{counts[name]:>12,} {name}" for name in (*COUNTERS, *unlisted))


def run_paged(rng, counts, note, steps=STEPS):
    setup = random_setup(rng)
    note(str(setup))
    engine = PagedEngine(setup, rng, counts, note)
    engine.run(steps)


KINDS: dict[str, Callable] = {
    "paged": run_paged,
    "storage": run_storage,
    "by hand": lambda *args, steps: ByHand(*args).run(steps),
    "prefixes": lambda *args, steps: PrefixUser(*args).run(steps),
    "connector": run_connector,
    "processes": run_processes,
}
SHARES = 24, 4, 2, 3, 2, 2  # Of the engines.


def run_one(seed, number, counts, *, kinds=tuple(KINDS), steps=STEPS, fault=None):
    """Run the engine of a number, if it is of one of the kinds."""
    rng = random.Random(f"{seed}/{number}")
    [kind] = rng.choices(list(KINDS), SHARES)
    options = ""
    engine = KINDS[kind]
    if fault is not None:
        kind, options = "storage", f" --fault {fault}"
        engine = functools.partial(run_storage, fault=fault)
    elif kind not in kinds:
        return None
    history, head = new_history(), []

    def note(line):
        (history if len(head) > 1 else head).append(line)

    note(f"engine {number}, {kind}")
    counts["engines"] += 1
    counts[f"engines, {kind}"] += 1
    try:
        engine(rng, counts, note, steps=steps)
    except Exception as error:
        lines = [
            f"Engine {number} of seed {seed} has failed. To repeat it:",
            f"  python -m tests.campaign --seed {seed} --only {number} --steps {steps}"
            f"{options}",
            *head,
            *history,
            "".join(traceback.format_exception(error)),
        ]
        return Failure(number, error, "\n".join(lines))
    return None


def run(
    seed,
    *,
    minutes=None,
    engines=None,
    total_steps=None,
    kinds=tuple(KINDS),
    steps=STEPS,
    fault=None,
    say=print,
):
    counts, start_s, number, failure = collections.Counter(), time.monotonic(), 0, None
    while failure is None:
        passed_s = time.monotonic() - start_s
        if minutes is not None and passed_s >= 60 * minutes:
            break
        if engines is not None and counts["engines"] >= engines:
            break
        if total_steps is not None and counts["steps"] >= total_steps:
            break
        num_before = counts["engines"]
        failure = run_one(seed, number, counts, kinds=kinds, steps=steps, fault=fault)
        number += 1
        is_new = counts["engines"] > num_before
        if is_new and counts["engines"] % ENGINES_PER_CLEARING == 0:
            jax.clear_caches()  # Compiled programs map memory, which is bounded.
            gc.collect()
            say(
                f"{passed_s:.0f} s: {counts['engines']} engines, "
                f"{counts['steps']:,} steps, "
                f"{counts['block reads compared']:,} block reads compared"
            )
    only = "" if fault is None else f", the store's fault: {fault}"
    say(f"seed {seed}, {time.monotonic() - start_s:.0f} s{only}")
    say(summary(counts))
    if failure is not None:
        say(failure.report)
    return counts, failure
