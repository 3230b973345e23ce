"""`jaxkv replay`: what it prints, draws and writes, and how it refuses."""

import importlib.util
import json

import numpy as np
import pytest

from jaxkv.cli import main as cli
from jaxkv.policies import policy_names
from jaxkv.tools.replay.run import ReplayResult

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = "replay synthetic:60 --policy lru --capacity 20%,100%"


def test_it_prints_draws_and_writes(capsys, tmp_path):
    picture, figures = tmp_path / "a.png", tmp_path / "a.json"
    assert cli.main(f"{SMALL} --plot {picture} --json {figures}".split()) == 0
    out, err = capsys.readouterr()
    written = json.loads(figures.read_text())
    asked, unique = (
        written["trace"][n] for n in ("num_block_refs", "num_unique_blocks")
    )
    assert f"Blocks        {asked:,} asked for, {unique:,} different" in out
    assert f"Prefix blocks found, of {asked:,}" in out
    assert "Stores refused" not in out
    results = {(r["policy"], r["capacity_blocks"]): r for r in written["results"]}
    few = unique // 5
    assert list(results) == [
        ("lru", few),
        ("lru", unique),
        ("optimum", few),
        ("optimum", unique),
    ]
    for row, policy in (("lru", "lru"), ("optimum (ceiling)", "optimum")):
        cells = [
            f"{100 * results[policy, c]['block_hit_ratio']:.2f}%" for c in (few, unique)
        ]
        (line, *_) = (li for li in out.splitlines() if li.startswith(f"  {row} "))
        assert line.split()[-2:] == cells
    assert results["lru", unique]["num_hit_blocks"] == asked - unique
    assert "hits_by_request" not in results["lru", unique]
    assert err.splitlines() == [f"{p}, {c:,} blocks ..." for p, c in results]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def fake(monkeypatch):
    """Replace the replay by a fake one in which ARC refuses 7 stores."""

    def sweep(trace, policies, capacities, on_progress):
        return [
            ReplayResult(
                policy=policy,
                capacity_blocks=capacity,
                num_requests=trace.num_requests,
                num_block_refs=1000,
                num_hit_blocks=123,
                input_tokens=None,
                hit_tokens=None,
                num_refused=7 * (policy == "arc"),
                compile_s=1.0,
                wall_s=1.0,
                hits_by_request=np.zeros(trace.num_requests, np.int64),
            )
            for policy in policies
            for capacity in capacities
        ]

    monkeypatch.setattr("jaxkv.cli.replay.sweep", sweep)


def test_options_may_be_repeated_and_the_optimum_left_out(fake, capsys):
    line = (
        "replay synthetic:60 --capacity 30 --capacity 20,30 --policy lru --no-optimum"
    )
    assert cli.main(line.split()) == 0
    out, _ = capsys.readouterr()
    assert out.split("Capacity, blocks")[1].split()[:2] == ["20", "30"]
    assert out.split("of 1,000")[1].split() == ["lru", "12.30%", "12.30%"]


def test_by_default_every_policy_runs_at_three_capacities(fake, capsys):
    assert cli.main(["replay", "synthetic:60"]) == 0
    out, _ = capsys.readouterr()
    shown, _, refused = out.partition("Stores refused, of 60 requests")
    rows = [line.split() for line in shown.split("of 1,000")[1].splitlines() if line]
    assert [row[0] for row in rows if row] == [*policy_names(), "optimum"]
    assert {len(row) for row in rows if row and row[0] != "optimum"} == {4}
    assert refused.split() == ["arc", "7", "7", "7"]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich see a terminal
    assert cli.main(SMALL.split()) == 0
    err = capsys.readouterr().err
    assert "━" in err
    assert "..." not in err


def test_a_malformed_line_is_named(capsys, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": 0, "in": 512, "out": 1, "ids": [1]}\n{"t": 0, "in": 512}\n')
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"jaxkv replay: error: {path}:2: 'ids' is missing\n"


def test_without_the_extra_the_error_names_it(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    gone = {"matplotlib"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in gone else find_spec(name),
    )
    assert cli.main(f"{SMALL} --plot a.png".split()) == 2
    assert capsys.readouterr().err == (
        'jaxkv replay: error: replay needs matplotlib: pip install "jaxkv[demo]"\n'
    )
    gone |= {"rich"}
    assert cli.main(SMALL.split()) == 2
    assert "replay needs rich: pip" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_exit_130(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxkv.cli.replay.sweep", interrupted)
    assert cli.main(SMALL.split()) == 130
    assert capsys.readouterr().err == "jaxkv replay: interrupted\n"


def test_help_explains_each_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["replay", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, default in [
        ("--policy NAME,...", "all, which are lru"),
        ("--capacity N,...", "1%,3%,10%)"),
        ("--block-size N", "512)"),
        ("--no-optimum", "it is the last row)"),
        ("--plot FILE.png", "no picture)"),
        ("--json FILE", "no file)"),
    ]:
        explanation = text.split(f"{name} ")[-1]
        assert f"(default: {default}" in explanation.split(" --")[0], name
