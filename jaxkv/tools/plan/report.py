"""A plan as a table, as a page of HTML, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

import numpy as np

from jaxkv._util import percent_text, rounded_size, size_text, three_digits, time_text
from jaxkv.config import variable_of
from jaxkv.tools import page
from jaxkv.tools.console import print_charts, print_facts, print_lines
from jaxkv.tools.machine import num_cpus, versions
from jaxkv.tools.page import Section
from jaxkv.tools.pictures import (
    LIMIT,
    Chart,
    Line,
    Places,
    Scale,
    draw_picture,
    look_of,
)
from jaxkv.tools.plan import plan as planning
from jaxkv.tools.plan.plan import (
    Demand,
    Plan,
    PlanRow,
    Reason,
    Setting,
    StoreRow,
    Timing,
)
from jaxkv.tools.replay.run import OPTIMUM
from jaxkv.tools.replay.traces import Recording

_COUNT = Scale("{:,.0f}".format, "{:,.0f}".format, "{:,.0f}".format)
_PERCENT = Scale("{:g}%".format, "{:.1f}%".format, "{:.1f}%".format)


def _signed_time(seconds: float) -> str:
    return time_text(seconds) if seconds >= 0 else f"-{time_text(-seconds)}"


def _rate_text(bytes_per_s: float | None) -> str:
    if bytes_per_s is None or bytes_per_s == math.inf:
        return "none"
    return f"{three_digits(bytes_per_s / 1e9)} GB/s"


_SECONDS = Scale(_signed_time, _signed_time, _signed_time)
_RATE = Scale(_rate_text, _rate_text, _rate_text)

_FIGURES = (
    ("found", "Tokens found", "found_share", _PERCENT),
    ("saved", "Time saved per request, mean", "saved_mean_s", _SECONDS),
    ("p95", "Time saved, 95th percentile", "saved_p95_s", _SECONDS),
    ("prefill", "Prefill time saved", "saved_share", _PERCENT),
    ("link", "Link busy with stores", "store_use", _PERCENT),
    ("refused", "Stores refused", "num_refused", _COUNT),
)
"""What is shown of each size and policy: key, title, name in JSON, and scale."""

_HOURS_PER_MONTH = 730
_OF_TOKENS = "found", "refused"
_DRAWN = "found", "saved"


def print_setting(setting: Setting) -> None:
    print_facts(_facts_of(setting), 10)


def _facts_of(setting: Setting) -> list[tuple[str, str]]:
    """List what a plan is made with, each with a name; without one if it goes on."""
    trace, timing, fleet = setting.trace, setting.timing, setting.fleet
    span_s = (trace.time_ms.max() - trace.time_ms.min()) / 1000
    when = f" in {span_s:,.0f} s" if span_s else ""
    prompts = (
        f"{trace.input_tokens.sum():,} tokens, {trace.num_block_refs:,} blocks of "
        f"{trace.block_size}, {trace.num_unique_blocks:,} unique"
    )
    facts = [
        ("Trace", f"{trace.name}: {trace.num_requests:,} requests{when}"),
        ("Prompts", prompts),
    ]
    if trace.recording is not None:
        facts += _facts_of_run(trace.recording, int(trace.input_tokens.sum()))
    if fleet.num_engines > 1:
        text = f"{fleet.num_engines:,}, {fleet.route}; each has the host and the device"
        facts.append(("Engines", text))
    device = "keeps no prefixes (--device-blocks, --device-bytes)"
    if setting.device_blocks:
        device = f"keeps {setting.device_blocks:,} blocks"
        if timing is not None:
            device += f" ({rounded_size(setting.device_blocks * setting.block_size)})"
    facts.append(("Device", device))
    if setting.admission is not None:
        facts.append(("Rules", setting.admission.text))
    notes = setting.notes
    if timing is not None:
        facts += _facts_of_timing(setting, timing)
        notes += timing.model.notes
    return [*facts, *(("Note", note) for note in notes)]


def _facts_of_run(run: Recording, num_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield the hits of the recorded run, and what is missing from the trace."""
    hits = [
        f"{num:,} tokens on the {tier} ({percent_text(num, num_tokens)})"
        for tier, num, tokens in (
            ("device", run.num_device_hit_tokens, run.device_tokens),
            ("host", run.num_host_hit_tokens, run.host_tokens),
        )
        if (tokens >= 0).any()
    ]
    ran = [] if run.policy is None else [run.policy]
    for tier, blocks in (("host", run.host_blocks), ("device", run.device_blocks)):
        if blocks is not None:
            ran.append(f"{blocks:,} {tier} blocks")
    if hits:
        texts = f"found {', '.join(hits)}", ", ".join(ran)
        yield "Recorded", "; ".join(filter(None, texts))
    if run.num_lost:
        yield "Missing", f"{run.num_lost:,} requests that could not be recorded"
    for note in run.notes:
        yield "Note", note


def _facts_of_timing(setting: Setting, timing: Timing) -> Iterator[tuple[str, str]]:
    model, speeds, sources = timing.model, timing.speeds, timing.sources
    kv = f"{rounded_size(model.kv_bytes_per_token)} of KV a token"
    dtype = f" ({model.kv_dtype})" if model.kv_dtype else ""
    yield (
        "Model",
        f"{model.name}: {kv}{dtype}, {rounded_size(setting.block_size)} a block",
    )
    if timing.num_devices > 1:
        yield "", f"{timing.num_devices} devices share it"
    if timing.machine is not None:
        yield "Machine", timing.machine.text
    load, store = speeds.load_bytes_per_s / 1e9, speeds.store_bytes_per_s / 1e9
    latency = f"{three_digits(1e3 * speeds.load_latency_s)} ms"
    text = f"{three_digits(load)} GB/s ({sources['load_bytes_per_s']}) after {latency}"
    yield "Load", f"{text} ({sources['load_latency_s']})"
    yield "Store", f"{three_digits(store)} GB/s ({sources['store_bytes_per_s']})"
    if speeds.prefill_flops_per_s is None:
        source = sources["prefill_tokens_per_s"]
        yield "Prefill", f"{speeds.prefill_tokens_per_s:,.0f} tokens/s ({source})"
        return
    rate = f"{three_digits(speeds.prefill_flops_per_s / 1e12)} TFLOP/s"
    yield "Prefill", f"{rate} ({sources['prefill_flops_per_s']})"
    at = np.array([0, 32 << 10])
    near, far = 1024 / speeds.prefill_s(model, at, at + 1024)
    yield "", f"{near:,.0f} tokens/s at the beginning of a prompt, {far:,.0f} after 32k"


def _size_text(setting: Setting, size: int) -> str:
    return f"{size:,} blocks" if setting.timing is None else rounded_size(size)


def _places_of(setting: Setting, title: str, sizes: list[int]) -> Places:
    if setting.timing is not None:
        notes = [f"{size // setting.block_size:,} blocks" for size in sizes]
        return Places(title, sizes, [rounded_size(size) for size in sizes], notes)
    shares = [100 * size / setting.trace.num_unique_blocks for size in sizes]
    notes = [f"{round(share, 1 if share >= 0.1 else 4):g}%" for share in shares]
    return Places(f"{title}, blocks", sizes, [f"{size:,}" for size in sizes], notes)


def _head_of(setting: Setting) -> str:
    return "of the unique blocks" if setting.timing is None else "blocks"


def _label_of(policy: str) -> str:
    return f"{OPTIMUM} (ceiling)" if policy == OPTIMUM else policy


def _by_policy(plan: Plan) -> dict[str, list[PlanRow]]:
    by_policy: dict[str, list[PlanRow]] = {row.policy: [] for row in plan.rows}
    for row in sorted(plan.rows, key=lambda row: row.size):
        by_policy[row.policy].append(row)
    return by_policy


def _marked(plan: Plan) -> list[PlanRow]:
    """Return the recommended row, or without a timing the best ones of each size."""
    if plan.recommendation is not None:
        return [plan.recommendation.row] if plan.recommendation.row else []
    marked = []
    for size in {row.size for row in plan.rows}:
        rows = [r for r in plan.rows if r.size == size and r.policy != OPTIMUM]
        max_tokens = max(row.host_tokens for row in rows)
        best = [row for row in rows if row.host_tokens == max_tokens]
        marked += best if len(best) < len(rows) else []
    return marked


def _charts_of(setting: Setting, plan: Plan) -> list[Chart]:
    demand, marked = plan.demand, _marked(plan)
    sizes = sorted({row.size for row in plan.rows})
    places = _places_of(setting, "Host memory", sizes)
    charts = []
    for key, title, name, scale in _FIGURES:
        if (setting.timing is None) == (key not in _OF_TOKENS) and key != "found":
            continue
        if key == "found" and demand.device_tokens:
            title += " beyond the device"
        factor = 100 if scale == _PERCENT else 1
        lines = []
        for number, (policy, rows) in enumerate(_by_policy(plan).items()):
            figures = [_row_figures(setting, row, demand)[name] for row in rows]
            if policy == OPTIMUM and key in ("link", "refused"):
                continue
            lines.append(
                Line(
                    _label_of(policy),
                    [factor * (figure or 0.0) for figure in figures],
                    LIMIT if policy == OPTIMUM else look_of(number),
                    [place for place, row in enumerate(rows) if row in marked],
                )
            )
        if key == "refused":
            lines = [line._replace(marked=()) for line in lines if any(line.values)]
        about = f"{title}, for each policy and size." if key in _DRAWN else ""
        if lines and (key != "link" or demand.span_s is not None):
            charts.append(Chart(key, title, places, lines, scale, about))
    return charts


def print_plan(setting: Setting, plan: Plan) -> None:
    optimum, head = f"  {_label_of(OPTIMUM)}", _head_of(setting)
    print_charts(
        _charts_of(setting, plan),
        head,
        mark="*",
        style_of=lambda label: "dim" if label == optimum else None,
    )
    print_lines(["", *_context(setting, plan), "", sentence(setting, plan)])
    settings = _settings_text(setting, plan)
    if settings:
        print_lines(["", settings], is_code=True)
    if plan.stores:
        print_charts(_store_charts_of(setting, plan), head)
        print_lines(["", store_sentence(setting, plan)])


def _store_charts_of(setting: Setting, plan: Plan) -> list[Chart]:
    stores, demand, base = plan.stores, plan.demand, plan.base
    places = _places_of(setting, "Shared store", [row.size for row in stores])
    name = f"{base.policy}, {_size_text(setting, base.size)}"
    found = [100 * row.added_tokens / demand.input_tokens for row in stores]
    saved = [row.added_s / demand.num_requests for row in stores]
    rates = [row.least_bytes_per_s or math.inf for row in stores]
    figures = [
        ("store_found", "Tokens found beyond hosts alone", found, _PERCENT),
        ("store_saved", "Time saved per request beyond that, mean", saved, _SECONDS),
        ("store_rate", "Least rate of reads that pays", rates, _RATE),
    ]
    return [
        Chart(key, title, places, [Line(name, values)], scale)
        for key, title, values, scale in figures[: 1 if setting.timing is None else 3]
    ]


def store_sentence(setting: Setting, plan: Plan) -> str:
    demand, base, num = plan.demand, plan.base, setting.fleet.num_engines
    whose = f"the {num:,} engines share" if num > 1 else "the engine has to itself"
    hosts = f"{'hosts' if num > 1 else 'a host'} of {_size_text(setting, base.size)}"

    def found(row: StoreRow) -> str:
        return (
            f"{percent_text(max(row.added_tokens, 0), demand.input_tokens)} more of "
            f"the prompt tokens than {hosts} with {base.policy} alone"
        )

    def gain(row: StoreRow) -> float:
        return row.added_tokens if setting.timing is None else row.added_s

    best = max(plan.stores, key=gain)
    whole = demand.input_tokens if setting.timing is None else demand.prefill_s
    if gain(best) < planning.WORTH * whole or not gain(best):
        return (
            f"A store that {whose} would add little here: "
            f"{_size_text(setting, best.size)} would find {found(best)}."
        )
    enough = planning.ENOUGH * gain(best)
    row = next(row for row in plan.stores if gain(row) >= enough)
    text = f"A store of {_size_text(setting, row.size)} that {whose} would find "
    if setting.timing is None:
        return f"{text}{found(row)}."
    return (
        f"{text}{found(row)}, and save {time_text(row.added_s / demand.num_requests)} "
        f"more a request, {percent_text(row.added_s, demand.prefill_s)} of the prefill "
        "time, less the time to read from it: reads below "
        f"{_rate_text(row.least_bytes_per_s)} take longer than they save."
    )


def render_page(setting: Setting, plan: Plan, command: str) -> str:
    """Write a plan as a page of HTML: the recommendation first, then why."""
    settings = _settings_text(setting, plan)
    finding = page.paragraphs([sentence(setting, plan)], "finding")
    finding += page.code("The settings", settings) if settings else ""
    facts: list[tuple[str, str]] = []
    for name, what in _facts_of(setting):
        if not name:
            name, before = facts.pop()
            what = f"{before}; {what}"
        facts.append((name, what))
    charts = sorted(_charts_of(setting, plan), key=lambda chart: chart.key != "saved")
    mark = "best" if plan.recommendation is None else "recommended"
    sections = [
        Section("why", "Why", page.paragraphs(_context(setting, plan))),
        *(page.section(chart, mark) for chart in charts),
    ]
    if plan.stores:
        text = page.paragraphs([store_sentence(setting, plan)])
        sections += [
            Section("store", "A shared store", text),
            *(page.section(chart, "") for chart in _store_charts_of(setting, plan)),
        ]
    notes = _READING if plan.recommendation is None else (*_READING, *_RULE)
    sections.append(Section("reading", "How to read this", page.bullets(notes)))
    title = f"Host memory for {setting.trace.name}"
    return page.render_page(title, finding, facts, sections, command)


def _context(setting: Setting, plan: Plan) -> list[str]:
    demand, choice = plan.demand, plan.recommendation
    device = ""
    if setting.device_blocks:
        share = percent_text(demand.device_tokens, demand.input_tokens)
        who = "The devices find" if demand.num_engines > 1 else "The device finds"
        device = f"{who} {share} of the prompt tokens. "
    share = percent_text(demand.returning_tokens, demand.input_tokens)
    tier = "host tier" if demand.num_engines == 1 else "store"
    lines = [f"{device}An unlimited {tier} would find {share}{' more' * bool(device)}."]
    if demand.span_s is None and choice is not None:
        lines.append(
            "The trace has no times, so how busy the link would be is unknown."
        )
    elif demand.num_servers > demand.num_engines:
        times = demand.prefill_s / (demand.span_s or 1.0)
        lines.append(
            f"Without offloading, prefill takes {times:,.1f} times as long as the "
            f"trace: this traffic needs {demand.num_servers:,} servers."
        )
    row = None if choice is None else choice.row
    if row is not None and (row.peak_store_use or 0.0) > 1:
        lines.append(
            f"In the busiest minute, stores need {row.peak_store_use:.1f} minutes; "
            "the engine will drop some blocks as too slow."
        )
    money = saved_per_month(setting, plan)
    if money is not None:
        saved, memory = money
        lines.append(
            f"Over a month of this traffic, the prefill saved is worth {saved:,.0f} of "
            f"server time, and the host memory costs {memory:,.0f}."
        )
    return lines


def saved_per_month(setting: Setting, plan: Plan) -> tuple[float, float] | None:
    """Return the price of the server time saved, and of the memory; None if unknown."""
    demand, price = plan.demand, setting.price_per_hour
    row = None if plan.recommendation is None else plan.recommendation.row
    if price is None or row is None or demand.span_s is None:
        return None
    gib = row.size / (1 << 30) * demand.num_servers
    saved = row.saved_s / demand.span_s * _HOURS_PER_MONTH * price
    return saved, gib * setting.price_per_gib_month


def sentence(setting: Setting, plan: Plan) -> str:
    choice, demand = plan.recommendation, plan.demand
    if choice is None:
        return _finding(setting, plan)
    row = choice.row
    if row is None:
        return (
            f"Offloading does not pay here: {_why_not(setting, plan, choice.reason)}."
        )
    where = " in each engine" if demand.num_engines > 1 else ""
    text = (
        f"Take {rounded_size(row.size)}{where} with {row.policy}: it finds "
        f"{percent_text(row.host_tokens, demand.input_tokens)} of the prompt tokens"
        f"{_beyond(demand)} and saves {time_text(row.saved_s / demand.num_requests)} a "
        f"request, {percent_text(row.saved_s, demand.prefill_s)} of the prefill time"
    )
    # The first policy that could have been recommended at this size.
    first = next(r for r in plan.rows if r.size == row.size and r.is_eligible)
    if first != row:
        text += f"; with {first.policy} it would save {_change(first, row)}"
    neighbour = choice.larger or choice.smaller
    if neighbour is not None:
        size = rounded_size(neighbour.size)
        text += f"; {size} would save {_change(neighbour, row)}"
    max_tokens = max(r.host_tokens for r in plan.rows if r.policy != OPTIMUM)
    if max_tokens < planning.ENOUGH * demand.returning_tokens:
        text += "; more memory than was planned for may save more"
    return f"{text}."


def _finding(setting: Setting, plan: Plan) -> str:
    best: dict[int, PlanRow] = {}
    for row in plan.rows:
        before = best.setdefault(row.size, row)
        if row.policy != OPTIMUM and row.host_tokens > before.host_tokens:
            best[row.size] = row
    places = ", ".join(
        f"{_size_text(setting, row.size)} with {row.policy} find "
        + percent_text(row.host_tokens, plan.demand.input_tokens)
        for row in best.values()
    )
    return f"Of the prompt tokens{_beyond(plan.demand)}, {places}."


def _beyond(demand: Demand) -> str:
    return " beyond what the device holds" if demand.device_tokens else ""


def settings_of(setting: Setting, plan: Plan) -> dict[str, str]:
    row = plan.recommendation.row if plan.recommendation else None
    if row is None:
        return {}
    size = size_text(row.size, "").removesuffix(" bytes")
    settings = {"host_bytes": size, "cache_policy": row.policy}
    changed = setting.admission.changed if setting.admission else {}
    settings |= {name: str(value).lower() for name, value in changed.items()}
    if row.num_declined:
        settings["skip_slow_loads"] = "true"
    return {variable_of(name): value for name, value in settings.items()}


def _settings_text(setting: Setting, plan: Plan) -> str:
    return " ".join(f"{n}={text}" for n, text in settings_of(setting, plan).items())


def _why_not(setting: Setting, plan: Plan, reason: Reason) -> str:
    demand, timing, admission = plan.demand, setting.timing, setting.admission
    rows = [row for row in plan.rows if row.policy != OPTIMUM]
    returning = percent_text(demand.returning_tokens, demand.input_tokens)
    top = max(rows, key=lambda row: row.host_tokens)
    match reason:
        case "nothing returns":
            text = "nothing comes back; even an unlimited host tier would find only "
            return f"{text}{returning} of the prompt tokens"
        case "device suffices":
            share = percent_text(demand.device_tokens, demand.input_tokens)
            text = f"the device already holds what comes back; it finds {share} of the "
            text += "prompt tokens, and an unlimited host tier only "
            return f"{text}{returning} more"
        case "too small":
            share = percent_text(top.host_tokens, demand.input_tokens)
            text = "reuse distances exceed these sizes; "
            text += f"{rounded_size(top.size)} finds {share} of the prompt tokens, of "
            text += f"the {returning} that an unlimited host tier would find"
            text += f" without {admission.text}" if admission else ""
            return f"{text}; more memory than was planned for may find more"
        case "cheap prefill":
            share = percent_text(max(row.found_s for row in rows), demand.prefill_s)
            text = "prefill of what comes back is cheap; loads with unlimited bandwidth"
            return f"{text} would save only {share} of the prefill time"
        case "slow stores":
            use = min(row.store_use or 0.0 for row in rows)
            text = f"the link is too slow; stores alone take {use:.1f} times as long as"
            hint = "to store only what was asked for twice"
            hint = "" if admission else f" (try --store-threshold 2, {hint})"
            return f"{text} the trace{hint}"
    assert timing is not None
    best = max(rows, key=lambda row: (row.saved_s, row.host_tokens))
    num_tokens = setting.trace.block_size
    begin, end = np.array(0), np.array(num_tokens)
    load_bytes = timing.model.load_bytes(begin, end, timing.num_devices)
    load_s = float(timing.speeds.load_s(load_bytes))
    prefill_s = float(timing.speeds.prefill_s(timing.model, begin, end))
    text = (
        f"loading is too slow; {best.num_declined:,} of "
        f"{best.num_loads + best.num_declined:,} prefixes found take longer to load "
        f"than to compute (a block of {num_tokens} tokens {time_text(load_s)} beside "
        f"{time_text(prefill_s)})"
    )
    if best.num_loads:
        saved = percent_text(best.saved_s, demand.prefill_s)
        text += f", and the others save {saved} of the prefill time"
    return text


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def to_json(setting: Setting, plan: Plan) -> dict[str, Any]:
    trace, demand, fleet = setting.trace, plan.demand, setting.fleet
    names = "name", "num_requests", "num_block_refs", "num_unique_blocks", "block_size"
    figures: dict[str, Any] = {"trace": _fields(trace, *names)}
    if trace.recording is not None:
        figures["recording"] = _fields(
            trace.recording,
            *("num_device_hit_tokens", "num_host_hit_tokens", "policy"),
            *("host_blocks", "device_blocks", "num_lost", "notes"),
        )
    timing, demanded = setting.timing, dataclasses.asdict(demand)
    if timing is None:
        del demanded["prefill_s"]
    else:
        demanded["num_servers"] = demand.num_servers
        figures["model"] = dataclasses.asdict(timing.model) | {
            "kv_bytes_per_token": timing.model.kv_bytes_per_token,
            "block_bytes": setting.block_size,
            "num_devices": timing.num_devices,
        }
        figures["speeds"] = {
            name: {"value": value, "source": timing.sources.get(name)}
            for name, value in dataclasses.asdict(timing.speeds).items()
            if value is not None
        }
    figures |= {
        "device_blocks": setting.device_blocks,
        "admission": setting.admission and dataclasses.asdict(setting.admission),
        "notes": [*setting.notes, *(timing.model.notes if timing else ())],
        "demand": demanded,
        "rows": [_row_figures(setting, row, demand) for row in plan.rows],
        "machine": {"num_cpus": num_cpus(), **versions()},
    }
    if plan.stores or fleet.num_engines > 1:
        figures["engines"] = _fields(fleet, "num_engines", "route")
    if plan.stores:
        figures["stores"] = [
            {
                **dataclasses.asdict(row),
                "base": {"size": row.base.size, "policy": row.base.policy},
                "least_bytes_per_s": row.least_bytes_per_s,
            }
            for row in plan.stores
        ]
        figures["store_sentence"] = store_sentence(setting, plan)
    choice, text = plan.recommendation, sentence(setting, plan)
    figures["recommendation"] = {"sentence": text}
    if choice is not None:
        figures["rule"] = {"worth": planning.WORTH, "enough": planning.ENOUGH}
        figures["recommendation"] |= {
            "pays": choice.pays,
            "reason": choice.reason,
            "host_bytes": choice.row and choice.row.size,
            "policy": choice.row and choice.row.policy,
            "settings": settings_of(setting, plan),
            "saved_and_memory_per_month": saved_per_month(setting, plan),
        }
    return figures


def _row_figures(setting: Setting, row: PlanRow, demand: Demand) -> dict[str, Any]:
    """Return a row's figures, with the totals that its shares refer to."""
    figures = dataclasses.asdict(row)
    size, trace = figures.pop("size"), setting.trace
    figures |= {
        "num_requests": demand.num_requests,
        "num_block_refs": trace.num_block_refs,
        "input_tokens": demand.input_tokens,
        "found_share": row.host_tokens / demand.input_tokens,
        "block_hit_ratio": row.num_hit_blocks / trace.num_block_refs,
        "token_hit_ratio": row.hit_tokens / demand.input_tokens,
    }
    if demand.num_engines == 1:
        del figures["requests_by_engine"]
    if setting.timing is None:
        fields = dataclasses.fields(row)
        times = {field.name for field in fields if field.default is not MISSING}
        return {n: value for n, value in figures.items() if n not in times}
    hours = None if demand.span_s is None else demand.span_s / 3600
    return figures | {
        "host_bytes": size,
        "prefill_s": demand.prefill_s,
        "saved_mean_s": row.saved_s / demand.num_requests,
        "saved_share": row.saved_s / demand.prefill_s if demand.prefill_s else 0.0,
        "saved_s_per_hour": None if hours is None else row.saved_s / hours,
    }


def draw_plan(setting: Setting, plan: Plan) -> str:
    drawn = [chart for chart in _charts_of(setting, plan) if chart.about]
    names = [setting.trace.name]
    names += [] if setting.timing is None else [setting.timing.model.name]
    rules = f"; {setting.admission.text}" if setting.admission else ""
    facts, title = ", ".join(names) + rules, _headline(plan)
    has_rings = setting.timing is not None
    return draw_picture(title, facts, drawn, "host memory", has_rings=has_rings)


def _headline(plan: Plan) -> str:
    choice, demand = plan.recommendation, plan.demand
    if choice is None:
        wins = Counter(row.policy for row in _marked(plan))
        if not wins:
            return "Tokens found, against the size"
        ((policy, num),) = wins.most_common(1)
        num_sizes = len({row.size for row in plan.rows})
        return f"{policy} finds most at {num} of {num_sizes} sizes"
    if choice.row is None:
        return f"Offloading does not pay: {choice.reason}"
    return (
        f"{rounded_size(choice.row.size)} with {choice.row.policy} (ringed) saves "
        f"{time_text(choice.row.saved_s / demand.num_requests)} a request"
    )


def _change(candidate: PlanRow, row: PlanRow) -> str:
    """Return how much more or less another row saves, in percent."""
    percent = 100 * (candidate.saved_s / row.saved_s - 1)
    if abs(percent) < 0.5:
        return "no more"
    return f"{abs(percent):.0f}% {'more' if percent > 0 else 'less'}"


_READING = (
    "<strong>Found</strong>: the block is in the cache, and so are all blocks before "
    "it in the prompt. A cached block after a missing one cannot be used.",
    "<strong>The device</strong>, if it keeps prefixes, keeps the most recently used "
    "blocks and is searched first. The host is searched for the blocks that continue "
    "the prefix found there.",
    "<strong>The optimum</strong> knows the future requests: no cache finds more.",
)
_RULE = (
    "Sizes whose stores take longer than the trace lasts are left out.",
    f"Offloading pays if some size saves at least {100 * planning.WORTH:g}% of the "
    "prefill time.",
    "The recommended size is the smallest that saves at least "
    f"{100 * planning.ENOUGH:g}% of what the best size saves.",
    "The policy that saves most at that size is recommended; among equals, the one "
    "that falls least behind the best at smaller sizes.",
    "A request saves the time to compute the tokens found on the host, less the time "
    "to load them; it saves nothing where loading takes longer.",
)
