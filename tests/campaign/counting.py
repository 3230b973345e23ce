"""Counters of what a campaign has tried."""

from collections import Counter

NAMES = (
    "engines",
    "processes",
    "steps",
    "block reads compared",
    "requests served",
    "saves",
    "loads",
    "saves failed",
    "loads failed",
    "saves stuck",
    "loads stuck",
    "pools lost",
    "aborts",
    "preemptions",
    "resets",
    "weights changed",
    "policies changed",
    "refused calls",
    "explanations compared",
    "plans compared",
)


def summary(counts: Counter) -> str:
    """All counters in lines, those of `NAMES` first."""
    others = sorted(set(counts) - set(NAMES))
    return "\n".join(f"{counts[name]:>12,} {name}" for name in (*NAMES, *others))
