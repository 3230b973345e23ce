"""A plan as a table, as a page of HTML, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv._util import (
    percent_text,
    rounded_size,
    size_text,
    three_digits,
    time_text,
)
from jaxkv.config import variable_of
from jaxkv.tools import page
from jaxkv.tools.console import print_charts, print_facts, print_lines
from jaxkv.tools.machine import num_cpus, versions
from jaxkv.tools.page import Section
from jaxkv.tools.pictures import (
    Chart,
    Line,
    Places,
    Scale,
    draw_picture,
    look_of,
)
from jaxkv.tools.plan import plan as planning
from jaxkv.tools.plan.plan import Demand, Plan, PlanRow, Setting, StoreRow
from jaxkv.tools.replay.report import figures_of_trace


def print_setting(setting: Setting) -> None:
    """Print what a plan is made with, and what of it is assumed."""
    print_facts(_facts_of(setting), 9)


def _facts_of(setting: Setting) -> list[tuple[str, str]]:
    """List what a plan is made with, each with a name; without one if it goes on."""
    trace, model, speeds = setting.trace, setting.model, setting.speeds
    span_s = (trace.time_ms.max() - trace.time_ms.min()) / 1000
    when = f" in {span_s:,.0f} s" if span_s else ""
    kv = f"{rounded_size(model.kv_bytes_per_token)} of KV a token"
    dtype = f" ({model.kv_dtype})" if model.kv_dtype else ""
    block = rounded_size(setting.block_bytes)
    sources = setting.sources
    prefill, how = _prefill_text(setting)
    device = "keeps no prefixes (--device-blocks, --device-bytes)"
    if setting.device_blocks is not None:
        size = setting.device_blocks * setting.block_bytes
        device = f"keeps {setting.device_blocks:,} blocks ({rounded_size(size)})"
    fleet = setting.fleet
    engines = f"{fleet.num_engines:,}, {fleet.route}; each has the host and the device"
    return [
        ("Trace", f"{trace.name}: {trace.num_requests:,} requests{when}"),
        (
            "Prompts",
            f"{trace.input_tokens.sum():,} tokens in blocks of {trace.block_size}",
        ),
        ("Model", f"{model.name}: {kv}{dtype}, {block} a block"),
        *[("", f"{setting.num_devices} devices share it")][: setting.num_devices > 1],
        *[("Engines", engines)][: fleet.num_engines > 1],
        *([] if setting.machine is None else [("Machine", setting.machine.text)]),
        ("Device", device),
        *([] if setting.admission is None else [("Rules", setting.admission.text)]),
        (
            "Load",
            f"{three_digits(speeds.load_bytes_per_s / 1e9)} GB/s "
            f"({sources['load_bytes_per_s']}) after "
            f"{three_digits(1e3 * speeds.load_latency_s)} ms "
            f"({sources['load_latency_s']})",
        ),
        (
            "Store",
            f"{three_digits(speeds.store_bytes_per_s / 1e9)} GB/s "
            f"({sources['store_bytes_per_s']})",
        ),
        ("Prefill", prefill),
        *[("", line) for line in how],
        *[("Note", note) for note in setting.notes + model.notes],
    ]


_FIGURES = (
    ("found", "Tokens found", "found_share", "%"),
    ("saved", "Time saved per request, mean", "saved_mean_s", "s"),
    ("p95", "Time saved, 95th percentile", "saved_p95_s", "s"),
    ("prefill", "Prefill time saved", "saved_share", "%"),
    ("link", "Link busy with stores", "store_use", "%"),
)
"""What is shown of each size and policy: key, title, name in JSON, and unit."""

_DRAWN = ("found", "saved")


def _charts_of(setting: Setting, plan: Plan) -> list[Chart]:
    """Show the figures of every size and policy, in the order of the table."""
    demand, chosen = plan.demand, plan.recommendation.row
    sizes = sorted({row.host_bytes for row in plan.rows})
    block_bytes = setting.block_bytes
    places = Places(
        "Host memory",
        sizes,
        [rounded_size(size) for size in sizes],
        [f"{size // block_bytes:,} blocks" for size in sizes],
    )
    by_policy: dict[str, list[PlanRow]] = {row.policy: [] for row in plan.rows}
    for row in sorted(plan.rows, key=lambda row: row.host_bytes):
        by_policy[row.policy].append(row)
    charts = []
    for key, title, name, unit in _FIGURES:
        if key == "found" and demand.device_tokens:
            title += " beyond the device"
        factor, scale = (100, _PERCENT) if unit == "%" else (1, _SECONDS)
        lines = [
            Line(
                policy,
                [factor * (_row_figures(row, demand)[name] or 0.0) for row in rows],
                look_of(number),
                [place for place, row in enumerate(rows) if row == chosen],
            )
            for number, (policy, rows) in enumerate(by_policy.items())
        ]
        about = f"{title}, for each policy and size." if key in _DRAWN else ""
        if key != "link" or demand.span_s is not None:
            charts.append(Chart(key, title, title, title, places, lines, scale, about))
    return charts


def print_plan(setting: Setting, plan: Plan) -> None:
    """Print what every size and policy would do, and the recommendation."""
    print_charts(_charts_of(setting, plan), "blocks", mark="*")
    print_lines(["", *_context(setting, plan), "", sentence(setting, plan)])
    settings = _settings_text(setting, plan)
    if settings:
        print_lines(["", settings], is_code=True)
    if plan.stores:
        print_charts(_store_charts_of(setting, plan), "blocks")
        print_lines(["", store_sentence(setting, plan)])


def _store_charts_of(setting: Setting, plan: Plan) -> list[Chart]:
    """Show what stores of several sizes would add."""
    stores, demand, base = plan.stores, plan.demand, plan.base
    places = Places(
        "Shared store",
        [row.storage_bytes for row in stores],
        [rounded_size(row.storage_bytes) for row in stores],
        [f"{row.storage_blocks:,} blocks" for row in stores],
    )
    rate = Scale(_rate_text, _rate_text, _rate_text)
    figures = (
        (
            "store_found",
            "Tokens found beyond hosts alone",
            [100 * row.added_tokens / demand.input_tokens for row in stores],
            _PERCENT,
        ),
        (
            "store_saved",
            "Time saved per request beyond that, mean",
            [row.added_s / demand.num_requests for row in stores],
            Scale(_signed_time, _signed_time, _signed_time),
        ),
        (
            "store_rate",
            "Least rate of reads that pays",
            [_least_gb_per_s(row) for row in stores],
            rate,
        ),
    )
    name = f"{base.policy}, {rounded_size(base.host_bytes)}"
    return [
        Chart(key, title, title, title, places, [Line(name, values)], scale)
        for key, title, values, scale in figures
    ]


def _least_gb_per_s(row: StoreRow) -> float:
    rate = row.least_bytes_per_s
    return float("inf") if rate is None else rate / 1e9


def _rate_text(gb_per_s: float) -> str:
    return "none" if gb_per_s == float("inf") else f"{three_digits(gb_per_s)} GB/s"


def _signed_time(seconds: float) -> str:
    return time_text(seconds) if seconds >= 0 else f"-{time_text(-seconds)}"


def store_sentence(setting: Setting, plan: Plan) -> str:
    """Return a sentence on the gain from a store."""
    demand, base = plan.demand, plan.base
    best = max(plan.stores, key=lambda row: row.added_s)
    num = setting.fleet.num_engines
    whose = f"the {num:,} engines share" if num > 1 else "the engine has to itself"
    hosts = f"hosts of {rounded_size(base.host_bytes)} with {base.policy}"
    if num == 1:
        hosts = f"a {hosts.replace('hosts', 'host')}"

    def gain(row: StoreRow) -> str:
        return (
            f"{percent_text(max(row.added_tokens, 0), demand.input_tokens)} more of "
            f"the prompt tokens than {hosts} alone"
        )

    if best.added_s < planning.WORTH * demand.prefill_s or not best.added_s:
        return (
            f"A store that {whose} would add little here: "
            f"{rounded_size(best.storage_bytes)} would find {gain(best)}."
        )
    row = next(
        row for row in plan.stores if row.added_s >= planning.ENOUGH * best.added_s
    )
    return (
        f"A store of {rounded_size(row.storage_bytes)} that {whose} would find "
        f"{gain(row)}, and save {time_text(row.added_s / demand.num_requests)} more a "
        f"request, {percent_text(row.added_s, demand.prefill_s)} of the prefill time, "
        "less the time to read from it: reads below "
        f"{_rate_text(_least_gb_per_s(row))} take longer than they save."
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
    sections = [
        Section("why", "Why", page.paragraphs(_context(setting, plan))),
        *(page.section(chart, "recommended") for chart in charts),
        Section("rule", "How the recommendation is made", page.bullets(_RULE)),
    ]
    if plan.stores:
        text = page.paragraphs([store_sentence(setting, plan)])
        sections[-1:-1] = [
            Section("store", "A shared store", text),
            *(page.section(chart, "") for chart in _store_charts_of(setting, plan)),
        ]
    title = f"Host memory for {setting.trace.name}"
    return page.render_page(title, finding, facts, sections, command)


def _context(setting: Setting, plan: Plan) -> list[str]:
    """Return lines on the most that can be found, and on the load of the link."""
    demand = plan.demand
    device = ""
    if setting.device_blocks is not None:
        share = percent_text(demand.device_tokens, demand.input_tokens)
        device = f"The device finds {share} of the prompt tokens. "
        if demand.num_engines > 1:
            device = f"The devices find {share} of the prompt tokens. "
    share = percent_text(demand.returning_tokens, demand.input_tokens)
    tier = "host tier" if demand.num_engines == 1 else "store"
    lines = [f"{device}An unlimited {tier} would find {share}{' more' * bool(device)}."]
    if demand.span_s is None:
        lines.append(
            "The trace has no times, so how busy the link would be is unknown."
        )
    elif demand.num_servers > demand.num_engines:
        digits = 1 if demand.num_servers < 100 else 0
        num_servers = f"{demand.num_servers:,.{digits}f}"
        lines.append(
            f"Without offloading, prefill takes {num_servers} times as long "
            "as the trace: this traffic needs that many servers."
        )
    row = plan.recommendation.row
    if row is not None and (row.peak_store_use or 0.0) > 1:
        lines.append(
            f"In the busiest minute, stores need {row.peak_store_use:.1f} minutes; "
            "the engine will drop some blocks as too slow."
        )
    return lines


def sentence(setting: Setting, plan: Plan) -> str:
    """Return the recommendation and its reason in a sentence."""
    choice, demand = plan.recommendation, plan.demand
    row = choice.row
    if row is None:
        return f"Offloading does not pay here: {_why_not(setting, plan)}."
    beyond = " beyond what the device holds" if demand.device_tokens else ""
    where = " in each engine" if demand.num_engines > 1 else ""
    text = (
        f"Take {rounded_size(row.host_bytes)}{where} with {row.policy}: it finds "
        f"{percent_text(row.host_tokens, demand.input_tokens)} of the prompt tokens"
        f"{beyond} and saves {time_text(row.saved_s / demand.num_requests)} a request, "
        f"{percent_text(row.saved_s, demand.prefill_s)} of the prefill time"
    )
    # The first policy at this size, which would have been preferred.
    first = next(
        candidate for candidate in plan.rows if candidate.host_bytes == row.host_bytes
    )
    if first != row:
        text += f"; with {first.policy} it would save {_change(first, row)}"
    if choice.larger is not None:
        larger = rounded_size(choice.larger.host_bytes)
        text += f"; {larger} would save {_change(choice.larger, row)}"
    elif choice.smaller is not None:
        smaller = rounded_size(choice.smaller.host_bytes)
        text += f"; {smaller} would save {_change(choice.smaller, row)}"
    if choice.ahead is not None:
        text += (
            f"; at {rounded_size(choice.ahead.host_bytes)} it would save "
            f"{100 * (1 - choice.share):.0f}% less than {choice.ahead.policy}"
        )
    max_host_tokens = max(candidate.host_tokens for candidate in plan.rows)
    if max_host_tokens < planning.ENOUGH * demand.returning_tokens:
        text += "; more memory than was planned for may save more"
    return f"{text}."


def _settings_text(setting: Setting, plan: Plan) -> str:
    return " ".join(f"{n}={text}" for n, text in settings_of(setting, plan).items())


def settings_of(setting: Setting, plan: Plan) -> dict[str, str]:
    """Return the variables to set; none if offloading does not pay."""
    row = plan.recommendation.row
    if row is None:
        return {}
    settings = {
        variable_of("host_bytes"): size_text(row.host_bytes, "").removesuffix(" bytes"),
        variable_of("cache_policy"): row.policy,
    }
    if setting.admission is not None:
        for name, value in setting.admission.changed.items():
            settings[variable_of(name)] = str(value).lower()
    if row.num_declined:
        settings[variable_of("skip_slow_loads")] = "true"
    return settings


def _why_not(setting: Setting, plan: Plan) -> str:
    """Return why offloading does not pay."""
    demand, rows, reason = plan.demand, plan.rows, plan.recommendation.reason
    returning = percent_text(demand.returning_tokens, demand.input_tokens)
    best_row = max(rows, key=lambda row: row.host_tokens)
    found_share = percent_text(best_row.host_tokens, demand.input_tokens)
    if reason == "nothing returns":
        return (
            "nothing comes back; even an unlimited host tier would find only "
            f"{returning} of the prompt tokens"
        )
    if reason == "device suffices":
        return (
            "the device already holds what comes back; it finds "
            f"{percent_text(demand.device_tokens, demand.input_tokens)} of the prompt "
            f"tokens, and an unlimited host tier only {returning} more"
        )
    if reason == "too small":
        return (
            f"tokens come back too late for these sizes; "
            f"{rounded_size(best_row.host_bytes)} finds {found_share} of the prompt "
            f"tokens, of the {returning} that an unlimited host tier would find"
            + (f" without {setting.admission.text}" if setting.admission else "")
            + "; more memory than was planned for may find more"
        )
    if reason == "cheap prefill":
        share = percent_text(max(row.found_s for row in rows), demand.prefill_s)
        return (
            "prefill of what comes back is cheap; loads with unlimited bandwidth would "
            f"save only {share} of the prefill time"
        )
    if reason == "slow stores":
        use = min(row.store_use or 0.0 for row in rows)
        text = f"the link is too slow; stores alone take {use:.1f} times as long as the"
        text += " trace"
        if setting.admission is None:
            text += " (try --store-threshold 2, to store only what was asked for twice)"
        return text
    best = max(rows, key=lambda row: (row.saved_s, row.host_tokens))
    load_s, prefill_s = _block_times(setting)
    text = (
        f"loading is too slow; {best.num_declined:,} of "
        f"{best.num_loads + best.num_declined:,} prefixes found take longer to load "
        f"than to compute (a block of {setting.trace.block_size} tokens "
        f"{time_text(load_s)} beside {time_text(prefill_s)})"
    )
    if best.num_loads:
        saved = percent_text(best.saved_s, demand.prefill_s)
        text += f", and the others save {saved} of the prefill time"
    return text


def _block_times(setting: Setting) -> tuple[float, float]:
    """Return the seconds to load a prompt's first block, and to compute it."""
    speeds, model = setting.speeds, setting.model
    begin, end = np.array(0), np.array(setting.trace.block_size)
    load_s = speeds.load_s(model.load_bytes(begin, end, setting.num_devices))
    return float(load_s), float(speeds.prefill_s(model, begin, end))


def to_json(setting: Setting, plan: Plan) -> dict[str, Any]:
    """Convert a plan for ``json.dump``."""
    trace, model, demand = setting.trace, setting.model, plan.demand
    choice = plan.recommendation
    return {
        "trace": figures_of_trace(trace),
        "model": dataclasses.asdict(model)
        | {
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "block_bytes": setting.block_bytes,
            "num_devices": setting.num_devices,
        },
        "speeds": {
            name: {"value": value, "source": setting.sources.get(name)}
            for name, value in dataclasses.asdict(setting.speeds).items()
            if value is not None
        },
        "device_blocks": setting.device_blocks,
        "admission": setting.admission and dataclasses.asdict(setting.admission),
        "notes": [*setting.notes, *model.notes],
        "demand": dataclasses.asdict(demand) | {"num_servers": demand.num_servers},
        "rule": {
            "worth": planning.WORTH,
            "enough": planning.ENOUGH,
            "alike": planning.ALIKE,
        },
        "rows": [_row_figures(row, demand) for row in plan.rows],
        **_figures_of_stores(setting, plan),
        "recommendation": {
            "pays": choice.pays,
            "reason": choice.reason,
            "host_bytes": choice.row and choice.row.host_bytes,
            "policy": choice.row and choice.row.policy,
            "sentence": sentence(setting, plan),
            "settings": settings_of(setting, plan),
        },
        "machine": {"num_cpus": num_cpus(), **versions()},
    }


def _figures_of_stores(setting: Setting, plan: Plan) -> dict[str, Any]:
    """Return what stores would add; nothing if that was not asked for."""
    if not plan.stores:
        return {}
    stores = [
        {
            **dataclasses.asdict(row),
            "base": {"host_bytes": row.base.host_bytes, "policy": row.base.policy},
            "least_bytes_per_s": row.least_bytes_per_s,
        }
        for row in plan.stores
    ]
    text = store_sentence(setting, plan)
    fleet = setting.fleet
    return {
        "engines": {"num_engines": fleet.num_engines, "route": fleet.route},
        "stores": stores,
        "store_sentence": text,
    }


def _row_figures(row: PlanRow, demand: Demand) -> dict[str, Any]:
    """Return a row's figures, with the totals that its shares refer to."""
    hours = None if demand.span_s is None else demand.span_s / 3600
    return dataclasses.asdict(row) | {
        "input_tokens": demand.input_tokens,
        "num_requests": demand.num_requests,
        "prefill_s": demand.prefill_s,
        "found_share": row.host_tokens / demand.input_tokens,
        "saved_mean_s": row.saved_s / demand.num_requests,
        "saved_share": row.saved_s / demand.prefill_s if demand.prefill_s else 0.0,
        "saved_s_per_hour": None if hours is None else row.saved_s / hours,
    }


def draw_plan(setting: Setting, plan: Plan) -> str:
    """Draw tokens found and time saved against the size, a line for each policy."""
    drawn = [chart for chart in _charts_of(setting, plan) if chart.about]
    rules = f"; {setting.admission.text}" if setting.admission else ""
    facts = f"{setting.trace.name}, {setting.model.name}{rules}"
    title = _headline(setting, plan)
    return draw_picture(title, facts, [drawn], "host memory", has_rings=True)


def _headline(setting: Setting, plan: Plan) -> str:
    """Return the title of the picture."""
    row, demand = plan.recommendation.row, plan.demand
    if row is None:
        return f"Offloading does not pay: {plan.recommendation.reason}"
    return (
        f"{rounded_size(row.host_bytes)} with {row.policy} (ringed) saves "
        f"{time_text(row.saved_s / demand.num_requests)} a request"
    )


def _prefill_text(setting: Setting) -> tuple[str, list[str]]:
    """Return the prefill rate, and the tokens per second that follow."""
    speeds, model, sources = setting.speeds, setting.model, setting.sources
    if speeds.prefill_tokens_per_s is not None:
        source = sources["prefill_tokens_per_s"]
        return f"{speeds.prefill_tokens_per_s:,.0f} tokens/s ({source})", []
    assert speeds.prefill_flops_per_s is not None
    rate = f"{three_digits(speeds.prefill_flops_per_s / 1e12)} TFLOP/s"
    at = np.array([0, 32 << 10])
    near, far = 1024 / speeds.prefill_s(model, at, at + 1024)
    return (
        f"{rate} ({sources['prefill_flops_per_s']})",
        [f"{near:,.0f} tokens/s at the beginning of a prompt, {far:,.0f} after 32k"],
    )


def _change(candidate: PlanRow, row: PlanRow) -> str:
    """Return how much more or less another row saves, in percent."""
    percent = 100 * (candidate.saved_s / row.saved_s - 1)
    if abs(percent) < 0.5:
        return "no more"
    return f"{abs(percent):.0f}% {'more' if percent > 0 else 'less'}"


_PERCENT = Scale("{:g}%".format, "{:.1f}%".format, "{:.1f}%".format)
_SECONDS = Scale(time_text, time_text, time_text)
_RULE = (
    "Sizes whose stores take longer than the trace lasts are left out.",
    f"Offloading pays if some size saves at least {100 * planning.WORTH:g}% of the "
    "prefill time.",
    "The recommended size is the smallest that saves at least "
    f"{100 * planning.ENOUGH:g}% of what the best size saves.",
    f"Of the policies that save at least {100 * planning.ALIKE:g}% of the best at that "
    "size, the one that falls least behind the best at smaller sizes is recommended, "
    "the first in the order of the tables among equals.",
    "A request saves the time to compute the tokens found on the host, less the time "
    "to load them; it saves nothing where loading takes longer.",
)
