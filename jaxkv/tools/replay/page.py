"""The results of a replay as a page of HTML."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv.tools import page
from jaxkv.tools.page import Section
from jaxkv.tools.pictures import with_minus
from jaxkv.tools.replay.measures import (
    BASELINE,
    Cell,
    Comparison,
    Measure,
    format_percent,
    format_share,
)
from jaxkv.tools.replay.report import (
    PERCENT,
    POINTS,
    facts_of,
    gains_of,
    label_of,
    lines_of,
    parts_of,
    places_of,
    wins_of,
)
from jaxkv.tools.replay.run import OPTIMUM


def render_page(comparison: Comparison, command: str) -> str:
    """Write a page of HTML about a comparison, made by a command line."""
    lead = comparison.main_measures[0]
    measures = [lead, *(each for each in comparison.measures if each is not lead)]
    sections = [_section(comparison, each) for each in measures]
    if comparison.rivals:
        sections.insert(1, _gain_section(comparison, lead))
    return page.render_page(
        f"Cache policies on {comparison.trace.name}",
        page.paragraphs([_finding(comparison, lead)], "finding"),
        [*facts_of(comparison.trace), *parts_of(comparison)],
        [*sections, *_refused_sections(comparison), _reading(comparison)],
        command,
    )


def _finding(comparison: Comparison, measure: Measure) -> str:
    """Say in a sentence or two which policy finds most."""
    names, capacities = comparison.real_policies, comparison.capacities
    if not names:
        return "Only the optimum was replayed, which no real cache can be."
    first, wins = wins_of(comparison, measure)
    what = measure.what[0].lower() + measure.what[1:]
    if len(names) == 1:
        at = capacities[-1]
        ratio = format_percent(measure.ratios[Cell(first, at)])
        return f"{first}: {what} come to {ratio} at {at:,} blocks."
    kind = measure.key.partition("_")[0]
    if not wins:
        return f"All {len(names)} policies find the same {kind}."
    text = f"{first} finds the most {kind} of {len(names)} policies at "
    text += (
        "the only capacity"
        if len(capacities) == 1
        else f"{wins} of {len(capacities)} capacities"
    )
    if BASELINE not in names or first == BASELINE:
        return f"{text}."
    leads = {
        c: measure.ratios[Cell(first, c)] - measure.ratios[Cell(BASELINE, c)]
        for c in capacities
    }
    at = max(leads, key=lambda capacity: leads[capacity])
    share = format_share(at, comparison.trace)
    ours, theirs = (measure.ratios[Cell(name, at)] for name in (first, BASELINE))
    return (
        f"{text}. Its greatest lead over {BASELINE} is {100 * leads[at]:.2f} "
        f"percentage points, at {at:,} blocks ({share} of the different ones): "
        f"{format_percent(ours)} against {format_percent(theirs)}."
    )


def _section(comparison: Comparison, measure: Measure) -> Section:
    """Write a measure's table, and its chart unless another has the same lines."""
    capacities = comparison.capacities
    rows: list[tuple[str, Sequence[tuple[str, str]]]] = []
    if measure.device is not None:
        alone = format_percent(measure.device)
        rows.append(("device alone", [(alone, "")] * len(capacities)))
    for policy in comparison.policies:
        cells = [
            (
                format_percent(measure.ratios[Cell(policy, c)]),
                "best" if policy in measure.best(c) else "",
            )
            for c in capacities
        ]
        rows.append((label_of(policy, comparison.admission), cells))
    key, places = measure.key, places_of(comparison)
    inside = page.table(key, f"{measure.title}, in percent", places, rows)
    if measure in comparison.main_measures:
        about, lines = _describe(comparison, measure), lines_of(comparison, measure)
        drawn = page.chart(key, measure.title, about, places, lines, PERCENT)
        inside = drawn + inside
    return Section(key, measure.title, inside)


def _gain_section(comparison: Comparison, measure: Measure) -> Section:
    """Write by how much each policy is better or worse than the baseline."""
    lines, places = gains_of(comparison, measure), places_of(comparison)
    rows = [
        (
            line.name,
            [
                (
                    with_minus(POINTS.in_full(gain)),
                    "best" if line.name in measure.best(c) else "",
                )
                for gain, c in zip(line.values, comparison.capacities, strict=True)
            ],
        )
        for line in lines
    ]
    unit = f"{measure.what}: percentage points more (+) or less than {BASELINE}"
    about = f"Above the line at 0, a policy finds more than {BASELINE}."
    drawn = page.chart("gain", unit, about, places, lines, POINTS)
    inside = drawn + page.table("gain", unit, places, rows)
    return Section("gain", f"Gain over {BASELINE}", inside)


def _refused_sections(comparison: Comparison) -> list[Section]:
    """Write how many stores were refused, if any were."""
    by_cell, capacities = comparison.by_cell, comparison.capacities
    rows = []
    for policy in comparison.policies:
        counts = [by_cell[Cell(policy, c)].num_refused for c in capacities]
        if any(counts):
            rows.append((policy, [(f"{count:,}", "") for count in counts]))
    if not rows:
        return []
    title = f"Stores refused, of {comparison.trace.num_requests:,} requests"
    inside = page.table("refused", title, places_of(comparison), rows)
    return [Section("refused", title, inside)]


def _describe(comparison: Comparison, measure: Measure) -> str:
    """Say in words what a chart shows at its ends."""
    parts = []
    capacities = comparison.capacities
    for capacity in dict.fromkeys((capacities[0], capacities[-1])):
        best = measure.best(capacity)
        if best:
            ratio = format_percent(measure.ratios[Cell(best[0], capacity)])
            parts.append(f"{', '.join(best)} at {capacity:,} blocks, with {ratio}")
    if not parts:
        return f"{measure.what}, against the capacity."
    return f"Best: {'; '.join(parts)}."


def _reading(comparison: Comparison) -> Section:
    """Explain what the page says."""
    items = [
        "<strong>Found</strong>: the block is in the cache, and so are all blocks "
        "before it in the prompt. A cached block after a missing one cannot be used.",
        "<strong>Capacity</strong>: the size of the host tier, in blocks, and as a "
        "share of the different blocks in the trace.",
        "<strong>Best</strong> marks the policies with the highest value at a "
        "capacity. Where all policies have the same value, none is marked.",
    ]
    if OPTIMUM in comparison.policies:
        bound = (
            "No real policy can find more."
            if comparison.admission is None
            else "It stores all blocks; the policies store only admitted ones."
        )
        items.append(f"<strong>The optimum</strong> knows the future requests. {bound}")
    if comparison.prefill_flops is not None:
        items.append(
            "<strong>Prefill saved</strong>: the FLOPs that the model does not spend. "
            "A token late in a prompt saves more, because it attends to more tokens."
        )
    if comparison.device_blocks is not None:
        items.append(
            "<strong>The device</strong> keeps the most recently used blocks and is "
            "searched first. The host stores what was computed, and is searched for "
            "the blocks that continue the prefix found on the device."
        )
    return Section("reading", "How to read this", page.bullets(items))
