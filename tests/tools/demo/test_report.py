"""The report on fake records, with figures computed by hand."""

import dataclasses
import json
from xml.etree import ElementTree

from rich.console import Console

from jaxkv.tools.demo import report
from jaxkv.tools.demo.records import DemoConfig, DemoRecord, RunRecord, TurnRecord
from jaxkv.tools.demo.report import Difference
from jaxkv.tools.speed import Bandwidth, Speed


def make_turn(conversation, turn, device, host, ttft_s, generated=(7, 8, 9)):
    hits = device, host, 1000 - device - host
    return TurnRecord(conversation, turn, 1000, *hits, ttft_s, generated)


OFF = RunRecord(
    (
        make_turn(0, 1, 0, 0, 1.0),
        make_turn(1, 1, 100, 0, 2.0),
        make_turn(0, 2, 100, 0, 2.0),
        make_turn(1, 2, 100, 0, 3.0),
    ),
    *(10.0, 0, 0, 0, 0, 0),
)
ON = RunRecord(
    (
        make_turn(0, 1, 0, 0, 1.0),
        make_turn(1, 1, 200, 0, 1.5),
        make_turn(0, 2, 100, 700, 0.25),
        make_turn(1, 2, 100, 800, 0.75),
    ),
    *(6.0, 50, 1500, 50 << 16, 1500 << 16, 3 << 20),
)
SAVE, LOAD, LIMIT = (Speed(9.0, p50, []) for p50 in (2.0, 3.0, 8.0))
RECORD = DemoRecord(
    config=DemoConfig(conversations=2, turns=2),
    off=OFF,
    on=ON,
    bandwidth=Bandwidth(1 << 20, 1 << 16, SAVE, LOAD, "np.copyto", LIMIT, LIMIT),
    host_capacity_bytes=8 << 20,
)


def with_answer(record, index, generated):
    turns = list(record.on.turns)
    turns[index] = dataclasses.replace(turns[index], generated=generated)
    on = dataclasses.replace(record.on, turns=tuple(turns))
    return dataclasses.replace(record, on=on)


def first_turns(record):
    off, on = (
        dataclasses.replace(run, turns=run.turns[:2]) for run in (record.off, record.on)
    )
    config = dataclasses.replace(record.config, turns=1)
    return dataclasses.replace(record, config=config, off=off, on=on)


def printed(record, colour=False):
    console = Console(
        width=80,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
    )
    with console.capture() as capture:
        report.print_report(record, console)
    return capture.get()


def test_json_has_the_figures_that_matter():
    got = json.loads(json.dumps(report.to_json(RECORD), allow_nan=False))
    on = {
        "blocks_stored": 50,
        "blocks_loaded": 1500,
        "bytes_stored": 50 << 16,
        "bytes_loaded": 1500 << 16,
        "peak_host_bytes": 3 << 20,
    }
    want = on | {
        "tokens_identical": True,
        "returning_turn_ttft_speedup": 2.5 / 0.5,
        "host_capacity_bytes": 8 << 20,
        "wall_s": 16.0,
    }
    assert {key: got[key] for key in want} == want
    assert got["off"]["ttft_p50_s_by_turn"] == {"1": 1.5, "2": 2.5}
    assert got["on"]["ttft_p50_s_by_turn"] == {"1": 1.25, "2": 0.5}
    assert got["on"]["prefilled_tokens"] == 4000 - 400 - 1500
    assert got["on"]["turns"][2]["host_hit_tokens"] == 700
    assert got["config"]["device_blocks"] == DemoConfig().device_blocks
    assert got["versions"]["jax"]
    assert got["machine"]["num_cpus"] >= 1


TABLE = """
  all turns               | 2.000 / 2.850 s 0.875 / 1.425 s
  turn 1                  | 1.500 / 1.950 s 1.250 / 1.475 s
  turns 2 and later       | 2.500 / 2.950 s 0.500 / 0.725 s
Prompt tokens             | 4,000 4,000
  hit on the device       | 300 400
  loaded from the host    | 0 1,500
  prefilled               | 3,700 2,100
Blocks stored             | - 50
Blocks loaded             | - 1,500
Store bandwidth when idle, GB/s | - 2.00
Load bandwidth when idle, GB/s | - 3.00
Peak host memory          | - 3 MiB
Wall time                 | 10.0 s 6.0 s
"""


def test_the_table_and_the_verdict_have_the_figures():
    text = printed(RECORD)
    assert max(len(line) for line in text.splitlines()) <= 80
    for row in TABLE.strip("\n").splitlines():
        label, cells = (part.rstrip() for part in row.split("|"))
        (line,) = (x for x in text.splitlines() if x.startswith(f"{label}  "))
        assert line.removeprefix(label).split() == cells.split(), label
    assert "From turn 2 on, the first token comes 5.0 times as fast (p50)." in text
    assert "All 12 generated tokens are identical with offloading off and on." in text
    assert "\x1b[32m" in printed(RECORD, colour=True)


def test_without_a_returning_turn_there_is_no_speedup():
    record = first_turns(RECORD)
    assert report.to_json(record)["returning_turn_ttft_speedup"] is None
    assert "From turn 2" not in printed(record)
    (line,) = (x for x in printed(record).splitlines() if "turns 2 and" in x)
    assert line.split() == ["turns", "2", "and", "later", "-", "-"]


def test_the_picture_has_the_medians_and_every_request():
    for record, tips in (
        (RECORD, ["on, 1: 1.250 s", "on, 2: 0.500 s", "off, 1: 1.500 s"]),
        (first_turns(RECORD), ["on, 1: 1.250 s", "off, 1: 1.500 s"]),
    ):
        root = ElementTree.fromstring(report.draw_ttft(record))
        texts = [element.text for element in root.iter()]
        assert {f"offloading {tip}" for tip in tips} <= set(texts)
        dots = [e for e in root.iter() if e.get("class") == "dot"]
        assert len(dots) == len(record.off.turns) + len(record.on.turns)


def test_the_verdict_names_the_first_difference():
    for index, generated, difference in (
        *((3, (7, 0, 9), Difference(1, 2, 1)), (0, (7, 8), Difference(0, 1, 2))),
        *((2, (), Difference(0, 2, 0)), (2, (7, 8, 9, 9), Difference(0, 2, 3))),
    ):
        record = with_answer(RECORD, index, generated)
        assert report.first_difference(record) == difference
        assert not report.to_json(record)["tokens_identical"]
        text = " ".join(printed(record).split())
        assert (
            f"The answers differ: conversation {difference.conversation}, turn "
            f"{difference.turn}, first at token {difference.position} of the answer."
        ) in text
        assert "\x1b[31m" in printed(record, colour=True)
    # A turn that only one run has is a difference.
    shorter = dataclasses.replace(RECORD.off, turns=RECORD.off.turns[:3])
    for name in ("off", "on"):
        record = dataclasses.replace(RECORD, **{name: shorter})
        assert report.first_difference(record) == Difference(1, 2, 0)
