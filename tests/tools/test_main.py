"""The command line: one-line errors and exit codes."""

import dataclasses
import io
import json
import shlex
import subprocess

import pytest
from rich.console import Console

from jaxkv.tools import commands, console, progress
from jaxkv.tools import main as cli
from jaxkv.tools.demo import command, run
from jaxkv.tools.demo.records import DemoConfig, DemoRecord, RunRecord, TurnRecord
from jaxkv.tools.speed import Bandwidth, Speed
from tests.rigs.command_line import run_python

pytestmark = pytest.mark.usefixtures("plain_output")


def fake_run(config, on_progress, answer=(1, 2, 3)):
    def half(generated):
        turn = TurnRecord(0, 1, 100, 0, 0, 100, 0.5, generated)
        return RunRecord((turn,), 1.0, 0, 0, 0, 0, 0)

    for done in range(3):
        on_progress("offloading off", done, 2)
    on_progress("measuring transfers", 0, 0)
    speed, limit = Speed(1.0, 1.0, []), Speed(2.0, 2.0, [])
    return DemoRecord(
        config,
        half((1, 2, 3)),
        half(answer),
        Bandwidth(1, 1, speed, speed, "np.copyto", limit, limit),
        config.host_bytes,
    )


@pytest.fixture
def fake(monkeypatch):
    """Replace the run by a fake one; return the configurations it gets."""
    configs = []

    def run_demo(config, on_progress, recorder):
        configs.append(config)
        return fake_run(config, on_progress)

    monkeypatch.setattr(run, "run_demo", run_demo)
    return configs


def test_help_lists_the_commands_their_parts_and_their_options(capsys):
    for words, expected in (
        ("", "demo "),
        ("--version", "jaxkv 0."),
        ("-V", "jaxkv 0."),
        ("help store", "size"),
        ("help store ls", "--json"),
        ("--help", "doctor"),
        ("store --help", "size"),
        ("store ls -h", "--json"),
    ):
        assert cli.main(words.split()) == 0
        assert expected in capsys.readouterr().out, words


def test_help_fits_80_columns_and_its_examples_are_command_lines():
    for name, usage in commands.load_usages().items():
        assert max(map(len, usage.help.split("\n"))) <= 80, name
        examples = usage.help.partition("examples:\n")[2].splitlines()
        assert examples, name
        for example in examples:
            words = shlex.split(example)
            assert example.startswith(f"  jaxkv {name}"), example
            usage.parse(words[1 + len(name.split()) :])


def test_a_shell_completes_commands_options_and_names(capsys, tmp_path):
    assert cli.main(["--completion"]) == 0
    script = tmp_path / "jaxkv"
    script.write_text(capsys.readouterr().out)
    complete = '. "$0"; COMP_WORDS=(jaxkv "$@"); COMP_CWORD=$#; _jaxkv; '
    for words, expected in (
        (["d"], "demo doctor"),
        (["store", ""], "ls size rm --help"),
        (["store", "rm", "--n"], "--namespace"),
        (["demo", "--mode", ""], "eager lazy"),
        (["demo", "--json", ""], ""),  # Files
    ):
        echo = f"{complete} echo ${{COMPREPLY[*]}}"
        line = ["bash", "-c", echo, str(script), *words]
        assert subprocess.check_output(line, text=True) == f"{expected}\n", words


def test_options_reach_the_run(fake, run_line, tmp_path):
    picture = tmp_path / "a.svg"
    line = (
        "demo --conversations 3 --turns 2 --document-tokens 500 --answer-tokens 4 "
        f"--device-blocks 40 --host-bytes 1.5MiB --seed 5 --plot {picture}"
    )
    out, err, figures = run_line(line)
    assert fake.pop() == dataclasses.replace(
        DemoConfig(),
        **{"conversations": 3, "turns": 2, "document_tokens": 500},
        **{"answer_tokens": 4, "device_blocks": 40, "host_bytes": 3 << 19},
        seed=5,
    )
    assert "offloading off, 1: " in picture.read_text()
    assert figures["tokens_identical"] is True
    # 3 * (500 + 2 * 100) tokens of 2 KiB in a pool of 40 blocks of 64 KiB.
    assert "Total KV       at most 4.1 MiB" in out
    assert "2.5 MiB, 40 blocks of 32 tokens: 1.6 times too small" in out
    assert "All 3 generated tokens are identical" in out
    assert err == "offloading off ... 50% 100%\nmeasuring transfers ...\n"
    out, *_ = run_line("demo --conversations 1")
    assert fake == [dataclasses.replace(DemoConfig(), conversations=1)]
    assert "holds all of it" in out


def test_different_tokens_are_exit_1_with_the_report(monkeypatch, run_line):
    monkeypatch.setattr(run, "run_demo", lambda c, p, **_: fake_run(c, p, (1, 9, 3)))
    out, *_ = run_line("demo", 1)
    assert "Time to first token" in out
    assert "The answers differ: conversation 0, turn 1, first at token 1" in out


def test_an_error_of_the_run_is_one_line_and_a_bug_keeps_its_traceback(
    monkeypatch, run_line
):
    errors = [KeyboardInterrupt(), MemoryError("9.00 GiB"), ValueError("of ours")]

    def run_demo(*_, recorder):
        raise errors.pop(0)

    monkeypatch.setattr(run, "run_demo", run_demo)
    for code, message in (
        (130, "jaxkv demo: interrupted\n"),
        (2, "use fewer --device-blocks or --host-bytes: 9.00 GiB\n"),
    ):
        _, err, _ = run_line("demo", code, has_figures=False)
        assert err.endswith(message)
        assert err.count("\n") == 1
    with pytest.raises(ValueError, match="of ours"):
        cli.main(["demo"])


@pytest.mark.parametrize("width", [40, 80])
def test_a_phase_leaves_the_progress_when_the_next_one_begins(width, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True)
    monkeypatch.setattr(progress, "make_console", lambda stderr: console)
    with progress.show_progress() as on_progress:
        on_progress("compiling", 0, 0)
        on_progress("serving, 51,269 blocks", 0, 96)
        on_progress("serving, 51,269 blocks", 48, 96)
        console.file = file = io.StringIO()
        on_progress("measuring", 0, 0)
    shown = file.getvalue()
    assert "compiling" not in shown
    assert "measuring" in shown
    assert "51,269 blocks" in shown


def test_the_checks_of_a_stage_share_one_bar_and_brackets_are_shown(monkeypatch):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    monkeypatch.setattr(progress, "make_console", lambda stderr: console)
    with progress.show_progress() as on_progress:
        for done, name in enumerate(["bfloat16", "int8", "[blocks, tokens]"]):
            on_progress(f"blocks: {name}", done, 9)
        console.file = file = io.StringIO()
        on_progress("blocks: [blocks, heads]", 3, 9)
    frame = file.getvalue()
    assert "blocks: [blocks, heads]" in frame
    assert "int8" not in frame
    assert "tokens" not in frame


def test_lines_for_a_file_are_not_drawn_above_the_bar_of_a_terminal(
    monkeypatch, capsys
):
    """`jaxkv verify > FILE` left all results on the screen, and none in the file."""
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr(progress, "make_console", lambda stderr: terminal)
    with progress.show_progress() as on_progress:
        on_progress("moving blocks", 1, 2)
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.file.getvalue()


def test_help_and_a_typing_error_import_neither_jax_nor_numba():
    for words in (["--help"], ["dmeo"], ["store", "rm", "--help"], ["status"]):
        script = (
            "import sys; from jaxkv.tools.main import main; main(sys.argv[1:]); "
            "print({'jax', 'numba', 'numpy'} & set(sys.modules), file=sys.stderr)"
        )
        result = run_python(script, *words)
        assert result.stderr.decode().endswith("set()\n"), words


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r[bold]"


def test_escape_sequences_of_a_recordings_policy_do_not_reach_the_terminal(
    tmp_path, run_line
):
    path = tmp_path / "recorded.jsonl"
    header = {"format": "jaxkv trace 1", "block_size": 4, "host_blocks": 8}
    header |= {"policy": EVIL, "device_kind": EVIL * 1000, "device_blocks": 5}
    header |= {"began_unix_ms": 1000, "key_id": "one", "part": 0}
    lines = [
        {"t": n, "in": 9, "ids": [n % 3, 6], "device": 0, "host": 0} for n in (1, 2)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (header, *lines)))
    out, err, _ = run_line(f"plan {path} --capacity 2", has_figures=False)
    assert "owned" in out
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])
    assert len(out) < 10_000


def test_no_table_line_or_phase_moves_the_cursor(capsys):
    rows = [(f"name {EVIL}", f"1 {EVIL}")]
    console.print_table((EVIL, EVIL), [(EVIL, rows), (None, rows)], [EVIL], head=[EVIL])
    console.print_facts([(EVIL, EVIL)], 9)
    console.print_plain([EVIL, f"a\n{EVIL}"])
    with progress.show_progress() as on_progress:
        on_progress(EVIL, 0, 0)
    texts = capsys.readouterr()
    assert all(line.isprintable() for text in texts for line in text.split("\n"))
    assert texts.out.count("[bold]") >= 8  # It is no markup.


def test_the_command_in_a_report_has_no_password(monkeypatch):
    seen = []
    monkeypatch.setattr(
        command, "run", lambda args: seen.append(args.command_line) or 0
    )
    assert cli.main(["demo", "--storage", "redis://:hunter2@host/0"]) == 0
    assert cli.main(["demo", "--storage=redis://host?password=hunter2"]) == 0
    assert seen == [
        "jaxkv demo --storage redis://host/0",
        "jaxkv demo --storage=redis://host",
    ]
