"""The results of a replay as a page of HTML."""

from __future__ import annotations

from jaxkv.tools import page
from jaxkv.tools.page import Section
from jaxkv.tools.replay.measures import (
    BASELINE,
    Cell,
    Comparison,
    Measure,
    format_percent,
    format_share,
)
from jaxkv.tools.replay.report import (
    chart_of,
    facts_of,
    gain_of,
    parts_of,
    refused_of,
    wins_of,
)
from jaxkv.tools.replay.run import OPTIMUM


def render_page(comparison: Comparison, command: str) -> str:
    """Write a page of HTML about a comparison, made by a command line."""
    lead = comparison.main_measures[0]
    measures = [
        lead,
        *(measure for measure in comparison.measures if measure is not lead),
    ]
    charts = [chart_of(comparison, measure) for measure in measures]
    sections = [page.section(chart, "best") for chart in charts]
    if comparison.rivals:
        gain = gain_of(comparison, lead)
        sections.insert(1, page.section(gain, "best", f"Gain over {BASELINE}"))
    sections += [page.section(chart, "") for chart in refused_of(comparison)]
    return page.render_page(
        f"Cache policies on {comparison.trace.name}",
        page.paragraphs([_finding(comparison, lead)], "finding"),
        [*facts_of(comparison.trace), *parts_of(comparison)],
        [*sections, _reading(comparison)],
        command,
    )


def _finding(comparison: Comparison, measure: Measure) -> str:
    """Return one or two sentences on the policy that finds most."""
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
        f"percentage points, at {at:,} blocks ({share} of the unique ones): "
        f"{format_percent(ours)} against {format_percent(theirs)}."
    )


def _reading(comparison: Comparison) -> Section:
    """Explain what the page says."""
    items = [
        "<strong>Found</strong>: the block is in the cache, and so are all blocks "
        "before it in the prompt. A cached block after a missing one cannot be used.",
        "<strong>Capacity</strong>: the size of the host tier, in blocks, and as a "
        "share of the unique blocks in the trace.",
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
    fleet = comparison.fleet
    if fleet.num_engines > 1:
        items.append(
            f"<strong>{fleet.num_engines:,} engines</strong> have a host of this "
            f"capacity each; the route, {fleet.route}, says who serves a request."
        )
    if fleet.storage_blocks:
        items.append(
            "<strong>+ store</strong>: what has got to a host is in the store behind "
            "all of them, too, and found there. <strong>Store alone</strong>: there "
            "are no hosts."
        )
    return Section("reading", "How to read this", page.bullets(items))
