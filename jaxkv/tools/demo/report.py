"""The results of a demo as JSON, as a table and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console

from jaxkv._util import rounded_size
from jaxkv.tools.console import print_table
from jaxkv.tools.demo.records import DemoRecord, RunRecord, TurnRecord
from jaxkv.tools.machine import machine, versions
from jaxkv.tools.pictures import Chart, Line, Places, Scale, draw_picture, look_of
from jaxkv.transfer.storage.store_url import shown_url

NONE = "-"  # The text of a cell without a value


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token that differs between the answers of two runs."""

    conversation: int  # Index of the conversation, from 0
    turn: int  # Number of the turn, from 1
    position: int  # Index of the token in the answer, from 0


def first_difference(record: DemoRecord) -> Difference | None:
    """Find the first token that differs between both runs; None if none does."""
    on = {(t.conversation, t.turn): t.generated for t in record.on.turns}
    for turn in record.off.turns:
        answer = on.pop((turn.conversation, turn.turn), ())
        if turn.generated != answer:
            same = [a == b for a, b in zip(turn.generated, answer, strict=False)]
            position = same.index(False) if False in same else len(same)
            return Difference(turn.conversation, turn.turn, position)
    for conversation, number in on:
        return Difference(conversation, number, 0)
    return None


def ttft_percentile_s(turns: Iterable[TurnRecord], percentile: float) -> float | None:
    """Return a percentile of the time to first token in seconds; None without turns."""
    seconds = [t.ttft_s for t in turns]
    return float(np.percentile(seconds, percentile)) if seconds else None


def returning_turn_ttft_speedup(record: DemoRecord) -> float | None:
    """Return the ratio off : on of the median time to first token from turn 2 on."""
    off, on = (
        ttft_percentile_s((t for t in run.turns if t.turn > 1), 50)
        for run in (record.off, record.on)
    )
    return off / on if off and on else None


def to_json(record: DemoRecord) -> dict[str, Any]:
    """Convert a record for ``json.dump``.

    Returns the most important figures at the top, of the run with offloading unless
    stated otherwise; the figures of each run under "off" and "on".
    """
    config, on = record.config, record.on
    return {
        "tokens_identical": record.tokens_identical,
        "returning_turn_ttft_speedup": returning_turn_ttft_speedup(record),
        "blocks_stored": on.blocks_stored,
        "blocks_loaded": on.blocks_loaded,
        "bytes_stored": on.bytes_stored,
        "bytes_loaded": on.bytes_loaded,
        "peak_host_bytes": on.peak_host_bytes,
        "host_capacity_bytes": record.host_capacity_bytes,
        "storage": {
            "blocks_found": on.blocks_found,
            "blocks_written": on.blocks_written,
            "blocks_fetched": on.blocks_fetched,
            "block_bytes": on.storage_bytes_per_block,
        },
        "wall_s": record.off.wall_s + on.wall_s,
        "off": _run_json(record.off),
        "on": _run_json(on),
        "bandwidth": dataclasses.asdict(record.bandwidth),
        "config": dataclasses.asdict(config)
        | {"storage": config.storage and shown_url(config.storage)},
        "machine": machine(),
        "versions": versions("flax"),
    }


def _run_json(run: RunRecord) -> dict[str, Any]:
    return {
        "wall_s": run.wall_s,
        "prompt_tokens": sum(t.prompt_tokens for t in run.turns),
        "prefilled_tokens": sum(t.prefilled_tokens for t in run.turns),
        "ttft_p50_s": ttft_percentile_s(run.turns, 50),
        "ttft_p95_s": ttft_percentile_s(run.turns, 95),
        "ttft_p50_s_by_turn": {
            str(turn): ttft_percentile_s((t for t in run.turns if t.turn == turn), 50)
            for turn in _turn_numbers(run)
        },
        "turns": [dataclasses.asdict(t) for t in run.turns],
    }


def _turn_numbers(run: RunRecord) -> list[int]:
    return sorted({t.turn for t in run.turns})


def print_report(record: DemoRecord, console: Console) -> None:
    sections = [(None, rows(record)) for rows in (_ttft_rows, _token_rows, _rows)]
    print_table(("KV offloading", "off", "on"), sections, console=console)
    console.print()
    _print_verdict(record, console)


Rows: TypeAlias = list[tuple[str, str, str]]


def _ttft_rows(record: DemoRecord) -> Rows:
    def cell(run: RunRecord, turns: range) -> str:
        chosen = [t for t in run.turns if t.turn in turns]
        p50, p95 = ttft_percentile_s(chosen, 50), ttft_percentile_s(chosen, 95)
        return NONE if p50 is None else f"{p50:.3f} / {p95:.3f} s"

    end = record.config.turns + 1
    spans = {
        "  all turns": range(1, end),
        "  turn 1": range(1, 2),
        "  turns 2 and later": range(2, end),
    }
    return [("Time to first token", "p50 / p95", "p50 / p95")] + [
        (label, cell(record.off, turns), cell(record.on, turns))
        for label, turns in spans.items()
    ]


def _token_rows(record: DemoRecord) -> Rows:
    def total(run: RunRecord, field: str) -> str:
        return f"{sum(getattr(t, field) for t in run.turns):,}"

    fields = {
        "Prompt tokens": "prompt_tokens",
        "  hit on the device": "device_hit_tokens",
        "  loaded from the host": "host_hit_tokens",
        "  prefilled": "prefilled_tokens",
    }
    return [
        (label, total(record.off, name), total(record.on, name))
        for label, name in fields.items()
    ]


def _rows(record: DemoRecord) -> Rows:
    off, on, speed = record.off, record.on, record.bandwidth
    stored = {
        "Blocks in the store at start": on.blocks_found,
        "Blocks written to the store": on.blocks_written,
        "Blocks fetched from the store": on.blocks_fetched,
    }
    blocks = {"Blocks stored": on.blocks_stored, "Blocks loaded": on.blocks_loaded}
    if record.config.storage is not None:
        blocks |= stored
    return [
        *((label, NONE, f"{number:,}") for label, number in blocks.items()),
        ("Store bandwidth when idle, GB/s", NONE, f"{speed.save.p50_gb_per_s:.2f}"),
        ("Load bandwidth when idle, GB/s", NONE, f"{speed.load.p50_gb_per_s:.2f}"),
        ("Peak host memory", NONE, rounded_size(on.peak_host_bytes)),
        ("Preemptions", f"{off.num_preemptions:,}", f"{on.num_preemptions:,}"),
        ("Wall time", f"{off.wall_s:.1f} s", f"{on.wall_s:.1f} s"),
    ]


def _speedup_text(speedup: float) -> str:
    times = f"{speedup:.0f}" if speedup >= 10 else f"{speedup:.1f}"
    return f"From turn 2 on, the first token comes {times} times as fast"


def _print_verdict(record: DemoRecord, console: Console) -> None:
    speedup = returning_turn_ttft_speedup(record)
    if speedup is not None:
        console.print(f"{_speedup_text(speedup)} (p50).", highlight=False)
    difference = first_difference(record)
    if difference is None:
        num_tokens = sum(len(t.generated) for t in record.off.turns)
        text, style = (
            f"All {num_tokens:,} generated tokens are identical with offloading off "
            "and on.",
            "green",
        )
    else:
        text, style = (
            f"The answers differ: conversation {difference.conversation}, turn "
            f"{difference.turn}, first at token {difference.position} of the answer.",
            "red",
        )
    console.print(text, style=style, highlight=False)


def draw_ttft(record: DemoRecord) -> str:
    """Draw the time to first token, turn by turn, with and without offloading."""
    config = record.config
    turns = _turn_numbers(record.on)
    lines = []
    for name, run, look in (
        ("offloading on", record.on, look_of(0)),
        ("offloading off", record.off, look_of(1)),
    ):
        seconds = [[t.ttft_s for t in run.turns if t.turn == turn] for turn in turns]
        medians = [float(np.median(of_turn)) for of_turn in seconds]
        lines.append(Line(name, medians, look, dots=seconds))
    places = Places("Turn", turns, [f"{turn}" for turn in turns], is_even=True)
    what = "Time to first token: the median, and every request"
    chart = Chart("ttft", what, places, lines, _SECONDS)
    speedup = returning_turn_ttft_speedup(record)
    title = "Time to first token, with and without offloading"
    if speedup is not None:
        title = _speedup_text(speedup)
    facts = (
        f"{config.conversations} conversations about documents of "
        f"{config.document_tokens:,} tokens; {config.device_blocks} KV blocks of "
        f"{config.block_size} tokens on the device"
    )
    return draw_picture(title, facts, [chart], "turn of the conversation")


_SECONDS = Scale("{:g} s".format, "{:.2f} s".format, "{:.3f} s".format)
