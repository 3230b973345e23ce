"""The command line: one-line errors and exit codes."""

import dataclasses
import importlib.util
import json
import socket

import pytest

from jaxkv._util.extras import pip_install
from jaxkv.tools import main as cli
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


def test_help_of_every_command_names_its_options_and_its_parts(capsys):
    for words, expected in (
        ("", "demo "),
        ("--version", "jaxkv 0."),
        ("--help", "doctor"),
        ("bench --help", "compile"),
        *(
            (f"{name} --help", "--json")
            for name in ("demo", "replay", "plan", "doctor")
        ),
        *((f"bench {name} --help", "--json") for name in ("transfer", "storage")),
        ("bench compile --help", "--markdown"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(words.split())
        assert exit_info.value.code == 0
        assert expected in capsys.readouterr().out, words


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
            **{"conversations": 3, "turns": 2, "document_tokens": 500},
            **{"answer_tokens": 4, "device_blocks": 40, "host_bytes": 3 << 19},
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
    assert cli.main(["demo"]) == 0
    assert fake == [DemoConfig()]
    capsys.readouterr()
    assert cli.main(["demo", "--conversations", "1"]) == 0
    assert "enough for all of it" in capsys.readouterr().out


def test_different_tokens_are_exit_1_with_the_report(monkeypatch, capsys):
    monkeypatch.setattr(run, "run_demo", lambda c, p, *_: fake_run(c, p, (1, 9, 3)))
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "Time to first token" in out
    assert "The answers differ: conversation 0, turn 1, from token 1" in out


def test_an_error_of_the_run_is_one_line_and_a_bug_keeps_its_traceback(
    monkeypatch, capsys
):
    errors = []

    def run_demo(*_):
        raise errors.pop()

    monkeypatch.setattr(run, "run_demo", run_demo)
    full = "9.00 GiB of pinned host memory were asked for"
    for error, code, message in (
        (KeyboardInterrupt(), 130, "jaxkv demo: interrupted\n"),
        (
            MemoryError(full),
            2,
            f"ask for fewer --device-blocks or --host-bytes: {full}",
        ),
    ):
        errors.append(error)
        assert cli.main(["demo"]) == code
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    errors.append(ValueError("a fault of ours"))
    with pytest.raises(ValueError, match="a fault of ours"):
        cli.main(["demo"])


def test_a_terminal_gets_a_bar(fake, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich see a terminal
    assert cli.main(["demo"]) == 0
    err = capsys.readouterr().err
    assert "measuring transfers" in err
    assert "━" in err
    assert "..." not in err
