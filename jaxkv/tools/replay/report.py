"""The results of a replay as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.console import print_charts, print_facts
from jaxkv.tools.machine import system, versions
from jaxkv.tools.pictures import (
    LIMIT,
    Chart,
    Line,
    Look,
    Places,
    Scale,
    draw_picture,
    look_of,
)
from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.fleet import ONE_ENGINE
from jaxkv.tools.replay.measures import (
    BASELINE,
    Cell,
    Comparison,
    Measure,
    format_flops,
    format_percent,
    format_share,
)
from jaxkv.tools.replay.run import OPTIMUM, STORE_ALONE, ReplayResult
from jaxkv.tools.replay.traces import Recording, Trace

_PERCENT = Scale("{:g}%".format, "{:.1f}%".format, "{:.2f}%".format)


def _signed(digits: int, points: float) -> str:
    """Write percentage points with their sign; none for 0."""
    text = f"{points:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


_COUNT = Scale("{:,.0f}".format, "{:,.0f}".format, "{:,.0f}".format)
_POINTS = Scale(
    lambda value: f"{value:+g}" if value else "0",
    partial(_signed, 1),
    partial(_signed, 2),
    has_zero=True,
)


def print_trace(trace: Trace) -> None:
    """Print a summary of the trace."""
    facts = facts_of(trace)
    print_facts(facts, _width_of(facts))


def _width_of(facts: Sequence[tuple[str, str]]) -> int:
    return max(len(name) for name, _ in facts) + 2


def facts_of(trace: Trace) -> list[tuple[str, str]]:
    """List what a trace is, each with a name."""
    span_s = (trace.time_ms[-1] - trace.time_ms[0]) / 1000
    facts = [
        ("Trace", trace.name),
        ("Requests", f"{trace.num_requests:,} in {span_s:,.0f} s"),
        (
            "Blocks",
            f"{trace.num_block_refs:,} asked for, {trace.num_unique_blocks:,} unique",
        ),
        (
            "Input tokens",
            f"{trace.input_tokens.sum():,} in blocks of {trace.block_size}",
        ),
    ]
    if trace.recording is not None:
        facts += _facts_of_run(trace, trace.recording)
    return facts


def _facts_of_run(trace: Trace, run: Recording) -> Iterator[tuple[str, str]]:
    """Yield the hits of the recorded run, and what is missing from the trace."""
    whole = int(trace.input_tokens.sum())
    hits = [
        f"{num:,} tokens on the {tier} ({format_percent(num / whole)})"
        for tier, num, tokens in (
            ("device", run.num_device_hit_tokens, run.device_tokens),
            ("host", run.num_host_hit_tokens, run.host_tokens),
        )
        if (tokens >= 0).any()
    ]
    ran = [] if run.policy is None else [run.policy]
    for tier, num in (("host", run.host_blocks), ("device", run.device_blocks)):
        if num is not None:
            ran.append(f"{num:,} {tier} blocks")
    if hits:
        texts = f"found {', '.join(hits)}", ", ".join(ran)
        yield "Recorded run", "; ".join(filter(None, texts))
    if run.num_lost:
        yield "Missing", f"{run.num_lost:,} requests that could not be recorded"
    for note in run.notes:
        yield "Note", note


def parts_of(comparison: Comparison) -> list[tuple[str, str]]:
    """List what a comparison has of a model, a device and an admission, with names."""
    facts = []
    if comparison.admission is not None:
        facts.append(("Admission", comparison.admission.text))
    if comparison.model is not None:
        model = comparison.model
        notes = "".join(f"; {note}" for note in model.notes)
        text = f"{model.name}, {model.num_parameters / 1e9:,.1f} billion parameters"
        flops = format_flops(comparison.prefill_flops or 0.0)
        text += f"; {flops} to prefill all prompts"
        facts.append(("Model", text + notes))
    facts += _parts_of_fleet(comparison)
    device = comparison.results[0].device
    if device is not None:
        shares = [
            f"{format_percent(measure.device)} of {what}"
            for measure in comparison.measures
            if measure.device is not None
            for what in [_DEVICE_SHARES[measure.key]]
        ]
        text = f"{device.num_blocks:,} blocks, LRU"
        if comparison.fleet.num_engines > 1:
            text += " in each engine"
        if shares:
            text += f"; alone {', '.join(shares)}"
        num_cut = device.num_cut(comparison.trace)
        if num_cut:
            text += f"; {num_cut:,} requests do not fit, and are cut to its size"
        facts.append(("Device", text))
    largest = int(comparison.trace.num_blocks.max(initial=0))
    small = [f"{c:,}" for c in comparison.capacities if c < largest]
    if small:
        text = f"smaller than the largest request ({largest:,} blocks)"
        facts.append(("Warning", f"capacity {', '.join(small)}: {text}"))
    return facts


def _parts_of_fleet(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the engines, how they share the requests, and the store."""
    fleet, trace = comparison.fleet, comparison.trace
    if fleet.num_engines > 1:
        shares = [
            int(np.bincount(result.engines).max()) / trace.num_requests
            for result in comparison.results
            if result.engines is not None and result.policy != STORE_ALONE
        ]
        ends = dict.fromkeys(map(format_percent, (min(shares), max(shares))))
        yield (
            "Engines",
            f"{fleet.num_engines:,}, {fleet.route}, each with a host; the busiest "
            f"serves {' to '.join(ends)} of the requests",
        )
    if fleet.storage_blocks:
        yield (
            "Store",
            f"{fleet.storage_blocks:,} blocks "
            f"({format_share(fleet.storage_blocks, trace)} of the unique), LRU, "
            "written through",
        )


_DEVICE_SHARES = {
    "blocks_both": "the blocks",
    "tokens_both": "the tokens",
    "flops_both": "prefill",
}


def print_results(comparison: Comparison) -> None:
    """Print how much each policy found at each capacity."""
    facts = parts_of(comparison)
    if facts:
        print_facts(facts, _width_of(facts_of(comparison.trace)))
    # With a device, the totals, which stand above, would not fit the column.
    is_alone = comparison.device_blocks is None
    charts = [_rows_of(comparison, measure) for measure in comparison.measures]
    charts = [
        chart if is_alone else chart._replace(title=chart.what) for chart in charts
    ]
    optimum = f"  {label_of(OPTIMUM, comparison.admission)}"
    print_charts(
        charts + refused_of(comparison),
        "of the unique blocks",
        style_of=lambda label: "dim" if label == optimum else None,
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Convert results for ``json.dump``."""
    trace, model = comparison.trace, comparison.model
    figures: dict[str, Any] = {
        "trace": figures_of_trace(trace),
        "results": [_figures_of(comparison, result) for result in comparison.results],
        "machine": system(),
        "versions": versions(),
    }
    if trace.recording is not None:
        figures["recording"] = _fields(
            trace.recording,
            *("num_device_hit_tokens", "num_host_hit_tokens", "policy"),
            *("host_blocks", "device_blocks", "num_lost", "notes"),
        )
    if model is not None:
        figures["model"] = {
            **_fields(model, "name", "num_parameters", "num_prefill_parameters"),
            "prefill_flops": comparison.prefill_flops,
            "notes": model.notes,
        }
    if comparison.admission is not None:
        figures["admission"] = dataclasses.asdict(comparison.admission)
    device = comparison.results[0].device
    if device is not None:
        figures["device"] = {
            "num_blocks": device.num_blocks,
            "num_requests_cut": device.num_cut(trace),
        }
        # Else it differs from result to result, where it stands too.
        if comparison.measures[0].device is not None:
            figures["device"] |= _amounts(comparison, device.hits, "")
    return figures


def figures_of_trace(trace: Trace) -> dict[str, Any]:
    """Return what a trace is, for ``json.dump``."""
    names = "name", "num_requests", "num_block_refs", "num_unique_blocks", "block_size"
    return _fields(trace, *names)


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _figures_of(comparison: Comparison, result: ReplayResult) -> dict[str, Any]:
    """Return the figures of a result."""
    figures = _fields(
        result,
        *("policy", "capacity_blocks", "num_requests", "num_block_refs"),
        *("num_hit_blocks", "input_tokens", "hit_tokens", "num_refused"),
        *("compile_s", "wall_s", "block_hit_ratio", "token_hit_ratio"),
    )
    if comparison.fleet != ONE_ENGINE:
        figures |= dataclasses.asdict(result.fleet)
        if result.engines is not None:
            num = result.fleet.num_engines
            counts = np.bincount(result.engines, minlength=num)
            figures["requests_by_engine"] = counts.tolist()
        if result.fleet.storage_blocks and result.policy != STORE_ALONE:
            figures["num_fetched_blocks"] = int(result.fetches_by_request.sum())
    saved = comparison.flops_of(result.hits_by_request)
    if saved is not None:
        figures["saved_prefill_flops"] = saved
        figures["saved_prefill_ratio"] = saved / (comparison.prefill_flops or 1.0)
    if result.device is not None:
        figures |= _amounts(comparison, result.device.hits, "device_")
        both = _amounts(comparison, result.hits_by_request, "host_")
        local = _amounts(comparison, result.device.hits, "host_")
        figures |= {name: both[name] - local[name] for name in both}
    return figures


def _amounts(
    comparison: Comparison, hits: NDArray[np.int64], where: str
) -> dict[str, Any]:
    """Return what blocks found (i64[R]) come to."""
    amounts: dict[str, Any] = {
        f"num_{where}hit_blocks": int(hits.sum()),
        f"{where}hit_tokens": int(comparison.trace.tokens_of(hits).sum()),
    }
    flops = comparison.flops_of(hits)
    if flops is not None:
        amounts[f"{where}saved_prefill_flops"] = flops
    return amounts


def draw_results(comparison: Comparison) -> str:
    """Draw what is found against the capacity, a line for each policy.

    Beside it stands by how much each differs from LRU, if that is among them; below,
    the saved prefill if there is a model.
    """
    trace, grid = comparison.trace, []
    for measure in comparison.main_measures:
        gain = [gain_of(comparison, measure)] if comparison.rivals else []
        grid.append([chart_of(comparison, measure), *gain])
    rules = f"; {comparison.admission.text}" if comparison.admission else ""
    facts = (
        f"{trace.name}: {trace.num_requests:,} requests for {trace.num_block_refs:,} "
        f"blocks{rules}"
        + "".join(f"; {n.lower()}: {text}" for n, text in _parts_of_fleet(comparison))
    )
    below = "capacity: blocks, and share of the unique blocks"
    return draw_picture(_headline(comparison), facts, grid, below)


def _headline(comparison: Comparison) -> str:
    """Return the title of the picture."""
    measure = comparison.main_measures[0]
    what, num = measure.key.partition("_")[0], len(comparison.capacities)
    if len(comparison.real_policies) < 2:
        return f"{measure.what}, against the capacity"
    first, wins = wins_of(comparison, measure)
    if not wins:
        return f"All policies find the same {what}"
    where = "every capacity" if wins == num else f"{wins} of {num} capacities"
    return f"{first} finds the most {what} at {where}"


def wins_of(comparison: Comparison, measure: Measure) -> tuple[str, int]:
    """Return the policy that is best most often, and at how many capacities it is."""
    wins = {
        name: sum(name in measure.best(c) for c in comparison.capacities)
        for name in comparison.real_policies
    }
    first = max(wins, key=lambda name: wins[name])
    return first, wins[first]


def _places_of(comparison: Comparison) -> Places:
    """Return the capacities of a comparison."""
    capacities = comparison.capacities
    return Places(
        "Capacity, blocks",
        capacities,
        [f"{capacity:,}" for capacity in capacities],
        [format_share(capacity, comparison.trace) for capacity in capacities],
    )


def chart_of(comparison: Comparison, measure: Measure) -> Chart:
    """Show what each policy finds, in percent, beside what the device does alone."""
    chart = _rows_of(comparison, measure)
    if measure in comparison.main_measures:
        chart = chart._replace(about=_describe(comparison, measure))
    if measure.device is None:
        return chart
    alone = [100 * measure.device] * len(comparison.capacities)
    return chart._replace(lines=[Line("device alone", alone), *chart.lines])


def _rows_of(comparison: Comparison, measure: Measure) -> Chart:
    """Show what each policy finds, in percent, and which is best."""
    capacities, best = comparison.capacities, _best_of(comparison, measure)
    lines = [
        Line(
            label_of(policy, comparison.admission),
            [100 * measure.ratios[Cell(policy, c)] for c in capacities],
            _look_of(comparison, policy),
            best[policy],
        )
        for policy in comparison.policies
    ]
    caption, places = f"{measure.title}, in percent", _places_of(comparison)
    return Chart(
        measure.key, measure.what, measure.title, caption, places, lines, _PERCENT
    )


def gain_of(comparison: Comparison, measure: Measure) -> Chart:
    """Show by how many percentage points each policy differs from the baseline."""
    ratios, best = measure.ratios, _best_of(comparison, measure)
    lines = [
        Line(
            policy,
            [
                100 * (ratios[Cell(policy, c)] - ratios[Cell(BASELINE, c)])
                for c in comparison.capacities
            ],
            _look_of(comparison, policy),
            best[policy],
        )
        for policy in comparison.rivals
    ]
    what = f"Percentage points more than {BASELINE}"
    title = f"{measure.what}: percentage points more (+) or less than {BASELINE}"
    about = f"Above the line at 0, a policy finds more than {BASELINE}."
    places = _places_of(comparison)
    return Chart("gain", what, title, title, places, lines, _POINTS, about)


def refused_of(comparison: Comparison) -> list[Chart]:
    """Show how many stores were refused, if any were."""
    by_cell, capacities = comparison.by_cell, comparison.capacities
    lines = [
        Line(
            label_of(policy, comparison.admission),
            [by_cell[Cell(policy, c)].num_refused for c in capacities],
        )
        for policy in comparison.policies
    ]
    lines = [line for line in lines if any(line.values)]
    title = f"Stores refused, of {comparison.trace.num_requests:,} requests"
    places = _places_of(comparison)
    chart = Chart("refused", title, title, title, places, lines, _COUNT)
    return [chart] if lines else []


def _best_of(comparison: Comparison, measure: Measure) -> dict[str, list[int]]:
    """Return the places where each policy is best."""
    best = [measure.best(capacity) for capacity in comparison.capacities]
    return {
        policy: [place for place, names in enumerate(best) if policy in names]
        for policy in comparison.policies
    }


def _describe(comparison: Comparison, measure: Measure) -> str:
    """Describe the ends of a chart in words."""
    facts = []
    capacities = comparison.capacities
    for capacity in dict.fromkeys((capacities[0], capacities[-1])):
        best = measure.best(capacity)
        if best:
            ratio = format_percent(measure.ratios[Cell(best[0], capacity)])
            facts.append(f"{', '.join(best)} at {capacity:,} blocks, with {ratio}")
    if not facts:
        return f"{measure.what}, against the capacity."
    return f"Best: {'; '.join(facts)}."


def _look_of(comparison: Comparison, policy: str) -> Look:
    if policy == OPTIMUM:
        return LIMIT
    return look_of(comparison.real_policies.index(policy))


def label_of(policy: str, admission: Admission | None = None) -> str:
    """Name a policy for a reader."""
    if policy != OPTIMUM:
        return policy
    # To leave blocks out can be better than to store all of them.
    return f"{OPTIMUM} ({'ceiling' if admission is None else 'stores all'})"
