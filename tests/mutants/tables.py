"""The page about mutants and faults, made of the results."""

import collections
from typing import Any

from tests.mutants import drawing

HEAD = """\
# Mutants, and faults made by hand

Made by `python -m tests.mutants table` of `benchmarks/results/mutants.json` and
`survivors.toml`; not to be edited.
[Mutants](../../docs/internals/reliability.md#mutants) says what was done.
"""


def page(results: dict[str, Any], looked_at: dict[str, dict[str, str]]) -> str:
    mutants, by_hand = results["mutants"], results["faults"]
    blocks = [
        HEAD,
        f"{len(mutants)} mutants and {len(by_hand)} faults were tried.\n",
        *(
            f"* Seed `{draw['seed']}`: {draw['number']} mutants of "
            f"{', '.join(draw['rooms'])} in the tree `{draw['tree']}`."
            for draw in results["draws"]
        ),
        "\nElsewhere: survivors on lines that only the environment of a real engine, "
        "or a GPU, reaches.\n",
        "## By room\n",
        *_table("room", drawing.ROOMS, mutants, looked_at, lambda e: e["room"]),
        "\nThe faults made by hand:\n",
        *_table("room", drawing.ROOMS, by_hand, looked_at, lambda e: e["room"]),
        "\n## By operator\n",
        *_table(
            "operator",
            sorted({_operator(entry) for entry in mutants.values()}),
            mutants,
            looked_at,
            _operator,
        ),
        "\n## What noticed\n",
        *_killers({**mutants, **by_hand}),
        "\n## Survivors\n",
        *_survivors({**mutants, **by_hand}, looked_at),
    ]
    return "\n".join(blocks) + "\n"


def share(entries: dict[str, Any], looked_at: dict[str, dict[str, str]]) -> str:
    killed, _, _, survived = _counts(entries, looked_at)
    return f"{killed / max(killed + survived, 1):.1%}"


def _counts(
    entries: dict[str, Any], looked_at: dict[str, dict[str, str]]
) -> tuple[int, int, int, int]:
    """Return how many were killed, are equivalent, are elsewhere, and survived."""
    counts: collections.Counter[str] = collections.Counter()
    for name, entry in entries.items():
        verdict = looked_at.get(name, {})
        reasons = (word for word in ("equivalent", "elsewhere") if word in verdict)
        counts["killed" if entry["killed"] else next(reasons, "survived")] += 1
    killed, equivalent, elsewhere, survived = (
        counts[word] for word in ("killed", "equivalent", "elsewhere", "survived")
    )
    return killed, equivalent, elsewhere, survived


def _table(
    what: str,
    names: Any,
    entries: dict[str, Any],
    looked_at: dict[str, dict[str, str]],
    name_of: Any,
) -> list[str]:
    lines = [
        f"| {what} | tried | killed | equivalent | elsewhere | survived "
        "| killed of the others |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (*names, "all"):
        some = {
            key: entry
            for key, entry in entries.items()
            if name in ("all", name_of(entry))
        }
        if some:
            cells = name, len(some), *_counts(some, looked_at), share(some, looked_at)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _operator(entry: dict[str, Any]) -> str:
    name: str = entry["operator"]
    return name.split("_")[0].removeprefix("Replace")


def _killers(entries: dict[str, Any]) -> list[str]:
    counts: collections.Counter[str] = collections.Counter(
        entry["by"].split("::")[0] for entry in entries.values() if entry["killed"]
    )
    lines = ["| first noticed by | times |", "|---|---|"]
    return lines + [f"| `{by}` | {times} |" for by, times in counts.most_common()]


def _survivors(
    entries: dict[str, Any], looked_at: dict[str, dict[str, str]]
) -> list[str]:
    lines = []
    for name, entry in sorted(entries.items()):
        verdict = looked_at.get(name, {})
        if entry["killed"] and "test" not in verdict:
            continue
        lines.append(f"### {name}\n\n`{entry['path']}:{entry['line']}`\n")
        if "diff" in entry:
            lines.append(f"```diff\n{entry['diff']}\n```\n")
        else:
            lines.append(entry["what"] + "\n")
        if "test" in verdict:
            lines.append(f"Survived at first; `{verdict['test']}` notices it.\n")
        elif "equivalent" in verdict:
            lines.append(f"Equivalent: {verdict['equivalent']}\n")
        elif "elsewhere" in verdict:
            lines.append(f"Elsewhere: {verdict['elsewhere']}\n")
        else:
            lines.append(verdict.get("reason", "Not looked at yet.") + "\n")
    return lines or ["None."]
