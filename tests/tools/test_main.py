"""The command line: one-line errors and exit codes."""

import argparse
import dataclasses
import importlib.util
import json
import socket

import pytest

from jaxkv._util.extras import pip_install
from jaxkv.tools import main as cli
from jaxkv.tools import options
from jaxkv.tools.demo import run
from jaxkv.tools.demo.records import (
    BandwidthRecord,
    DemoConfig,
    DemoRecord,
    RunRecord,
    TurnRecord,
)


def fake_run(config, on_progress, answer=(1, 2, 3)):
    def half(generated):
        turn = TurnRecord(0, 1, 100, 0, 0, 100, 0.5, generated)
        return RunRecord((turn,), 1.0, 0, 0, 0, 0, 0)

    for done in range(3):
        on_progress("offloading off", done, 2)
    on_progress("measuring transfers", 0, 0)
    return DemoRecord(
        config,
        half((1, 2, 3)),
        half(answer),
        BandwidthRecord(1.0, 1.0, 2.0, 1),
        config.host_bytes,
    )


@pytest.fixture(autouse=True)
def plain_output(monkeypatch):
    """Ignore colours and widths of the environment."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake(monkeypatch):
    """Replace the run by a fake one; return the configurations it gets."""
    asked = []

    def run_demo(config, on_progress, on_engine, recorder):
        asked.append(config)
        return fake_run(config, on_progress)

    monkeypatch.setattr(run, "run_demo", run_demo)
    return asked


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dmeo", "jaxkv: error: unknown command 'dmeo': did you mean demo?"),
        ("xyz", "jaxkv: error: unknown command 'xyz': choose from demo, replay"),
        ("--versoin", "unknown option '--versoin': did you mean --version?"),
        ("demo --turn 3", "unknown option '--turn': did you mean --turns?"),
        ("demo --jso=x", "unknown option '--jso': did you mean --json?"),
        ("demo --zzz", "unknown option '--zzz': choose from -h, --help, --conv"),
        ("demo 7", "unexpected argument '7'"),
        ("demo --turns", "--turns: expected one argument"),
        ("demo --turns 0", "--turns: '0' must be a whole number from 1 to"),
        ("demo --turns 1.5", "--turns: '1.5' must be a whole number from 1 to"),
        ("demo --policy lur", "--policy: unknown 'lur': did you mean lru?"),
        ("demo --mode lazily", "--mode: unknown 'lazily': did you mean lazy?"),
        ("demo --layers mamba", "--layers: unknown 'mamba': choose from full, window"),
        ("demo --seed -1", "--seed: '-1' must be a whole number from 0 to"),
        ("demo --seed 1234567890", "must be a whole number from 0 to 999999999"),
        ("demo --host-bytes 5XB", "'5XB' must be a size such as 64MiB, 1GiB or"),
        ("demo --host-bytes 0", "'0' must be a size such as 64MiB"),
        ("demo --host-bytes 9", "9 bytes of host memory cannot hold one KV block"),
        ("demo --host-bytes 9999TiB", "ask for fewer --device-blocks or --host-bytes"),
        ("demo --device-blocks 99999999", "--device-blocks or --host-bytes"),
        ("demo --device-blocks 9", "at least 79 are needed"),
        ("demo --document-tokens 5000", "but the model takes 4096"),
        ("demo --document-tokens 9", "document_tokens=9 must be more than the 105"),
        ("demo --plot a.pdf", "--plot: 'a.pdf' must end in .png"),
        ("demo --plot no/a.png", "--plot: cannot write 'no/a.png' (No such file"),
        ("demo --record no/a", "--record: cannot record to 'no/a' (No such file or"),
        ("demo --record .", "--record: cannot record to '.' (Is a directory); name a"),
        ("demo --concurrency 0", "--concurrency: '0' must be a whole number from 1"),
        ("demo --json .", "--json: cannot write '.' (Is a directory); name a file"),
        ("demo --serve-metrics 65536", "'65536' must be a port, from 0 (any that is"),
        ("demo --serve-metrics x", "'x' must be a port, from 0 (any that is free) to"),
        ("demo --seconds 9", "--seconds: it belongs to --serve-metrics"),
        ("demo --serve-metrics 0 --seconds 0", "'0' must be a whole number from 1"),
        ("replay", "the following arguments are required: TRACE"),
        ("replay none.jsonl", "TRACE: cannot read 'none.jsonl' (No such file or dir"),
        ("replay no.1 no", "TRACE: cannot read 'no.1' (No such file or directory)"),
        ("replay .", "TRACE: cannot read '.' (Is a directory)"),
        ("replay synthetic:0", "TRACE: 'synthetic:0' must be synthetic:REQUESTS, such"),
        ("replay synthetic:x", "TRACE: 'synthetic:x' must be synthetic:REQUESTS"),
        ("replay synthetic --policy lur", "unknown 'lur': did you mean lru?"),
        ("replay synthetic --policy zzz", "--policy: unknown 'zzz': choose from lru, "),
        ("replay synthetic --policy lru,", "--policy: unknown '': choose from lru, "),
        ("replay synthetic --capacity x", "--capacity: 'x' must be a number of blocks"),
        ("replay synthetic --capacity 1.5", "'1.5' must be a number of blocks, such"),
        ("replay synthetic --capacity 5,0%", "--capacity: '0%' must be more than 0"),
        ("replay synthetic --capacity -3", "--capacity: '-3' must be a number of"),
        ("replay synthetic --capacity 101%", "'101%' is more than the"),
        ("replay synthetic --capacity 99999999", "different blocks of the trace"),
        ("replay synthetic --block-size 0", "'0' must be a whole number from 1 to"),
        ("replay synthetic --plot a.pdf", "--plot: 'a.pdf' must end in .png"),
        ("replay synthetic --polcy lru", "'--polcy': did you mean --policy?"),
    ],
)
def test_a_refusal_is_a_one_line_error(
    line, message, capsys, fake, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    word = line.split()[0]
    command = f"jaxkv {word}" if word in ("demo", "replay") else "jaxkv"
    assert err.startswith(f"{command}: error: ")
    assert fake == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_a_one_line_error(capsys, fake, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("flax", "rich") else find_spec(name),
    )
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        f"jaxkv demo: error: the demo needs flax, rich: {pip_install('demo')}\n"
    )


def test_a_port_that_is_taken_is_a_one_line_error_before_the_run(capsys, fake):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--serve-metrics", str(port)]) == 2
    out, err = capsys.readouterr()
    assert (out, fake) == ("", [])
    assert err == (
        f"jaxkv demo: error: --serve-metrics: cannot listen at 127.0.0.1:{port} "
        "(Address already in use); give another port, or 0 for any that is free\n"
    )


def test_without_a_command_it_prints_help(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 0
    assert "demo " in capsys.readouterr().out


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("jaxkv 0.")


def test_help_explains_each_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, default in [
        ("--conversations N", 12),
        ("--turns N", 4),
        ("--document-tokens N", 2048),
        ("--answer-tokens N", 16),
        ("--device-blocks N", 256),
        ("--seed N", 0),
        ("--host-bytes SIZE", "256MiB"),
        ("--plot FILE.png", "no picture"),
        ("--json FILE", "no file"),
        ("--serve-metrics PORT", "do not serve them"),
        ("--seconds N", "end with the comparison"),
    ]:
        explanation = text.split(f"{name} ")[-1]
        assert f"(default: {default})" in explanation.split(" --")[0], name


def test_defaults_are_those_of_the_config(fake):
    assert cli.main(["demo"]) == 0
    assert fake == [DemoConfig()]


def test_options_reach_the_run(fake, capsys, tmp_path):
    picture, figures = tmp_path / "a.png", tmp_path / "a.json"
    line = (
        "demo --conversations 3 --turns 2 --document-tokens 500 --answer-tokens 4 "
        f"--device-blocks 40 --host-bytes 1.5MiB --seed 5 --plot {picture} "
        f"--json {figures}"
    )
    assert cli.main(line.split()) == 0
    assert fake == [
        dataclasses.replace(
            DemoConfig(),
            conversations=3,
            turns=2,
            document_tokens=500,
            answer_tokens=4,
            device_blocks=40,
            host_bytes=3 << 19,
            seed=5,
        )
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(figures.read_text())["tokens_identical"] is True
    out, err = capsys.readouterr()
    # 3 * (500 + 2 * 100) tokens of 2 KiB in a pool of 40 blocks of 64 KiB.
    assert "KV of them all 4.1 MiB at most" in out
    assert "2.5 MiB, 40 blocks of 32 tokens: 1.6 times too small" in out
    assert "All 3 generated tokens are identical" in out
    assert err == "offloading off ...\nmeasuring transfers ...\n"


def test_a_pool_that_holds_everything_is_pointed_out(fake, capsys):
    assert cli.main(["demo", "--conversations", "1"]) == 0
    assert "enough for all of it" in capsys.readouterr().out


def test_different_tokens_are_exit_1_with_the_report(monkeypatch, capsys):
    monkeypatch.setattr(run, "run_demo", lambda c, p, *_: fake_run(c, p, (1, 9, 3)))
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "Time to first token" in out
    assert "The answers differ: conversation 0, turn 1, from token 1" in out


def test_an_interrupt_is_one_line_and_exit_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "jaxkv demo: interrupted\n"


def test_a_bug_in_the_run_keeps_its_traceback(monkeypatch):
    def broken(*_):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(run, "run_demo", broken)
    with pytest.raises(ValueError, match="a fault of ours"):
        cli.main(["demo"])


def test_existing_files_are_kept_until_the_end(monkeypatch, tmp_path):
    figures = tmp_path / "a.json"
    figures.write_text("of last time")

    def check(config, on_progress, on_engine, recorder):
        assert figures.read_text() == "of last time"
        return fake_run(config, on_progress)

    monkeypatch.setattr(run, "run_demo", check)
    assert cli.main(["demo", "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())


def test_a_terminal_gets_a_bar(fake, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich see a terminal
    assert cli.main(["demo"]) == 0
    err = capsys.readouterr().err
    assert "measuring transfers" in err
    assert "━" in err
    assert "..." not in err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1gib", 1 << 30),
        ("1.5 KiB", 1536),
        ("2GB", 2 * 10**9),
        ("3TB", 3 * 10**12),
        ("7B", 7),
    ],
)
def test_sizes_are_parsed(text, num_bytes):
    assert options.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "0.5", "1 M", "nan", "9" * 400]
)
def test_malformed_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size such as"):
        options.parse_bytes(text)


def test_too_little_host_memory_for_the_demo_is_a_one_line_error(monkeypatch, capsys):
    def too_much(*_):
        raise MemoryError("9.00 GiB of pinned host memory were asked for")

    monkeypatch.setattr(run, "run_demo", too_much)
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "ask for fewer --device-blocks or --host-bytes: 9.00 GiB of" in error
    assert "Traceback" not in error
