"""The report: verdicts, advice, and the command line around it."""

import contextlib
import json
import os

import pytest

from jaxkv.scheduling.record import trace_file
from jaxkv.tools import main as cli
from jaxkv.tools.machine import versions
from jaxkv.tools.verify import command, supervise
from jaxkv.tools.verify.records import NO_TIME, STAGES, Result, StageLog
from jaxkv.tools.verify.report import Report, last_lines, reason_of

DEVICE = {
    "name": "8 x tpu TPU v6 lite",
    "runtime": "a <runtime>",
    "machine": {"cpu": "AMD EPYC", "num_cpus": 180},
}
RESULTS = {
    "devices": [
        Result("device", "PASS", "8 x tpu", 0.1, DEVICE),
        Result("transfers", "PASS", "mode staged"),
    ],
    "blocks": [
        Result("bfloat16 (staged)", "PASS", "312 blocks"),
        Result("int4 (staged)", "SKIP", "not supported: <less> than a byte"),
    ],
    "speed": [
        Result(
            "blocks of 2 MiB",
            "PASS",
            "save 20 GB/s",
            1.0,
            {
                "advice": "Extents of 32 MiB are faster",
                "gb_per_s": {"engine": {"save_best": 12.3456, "load_best": 8.0}},
            },
        )
    ],
}
NOT_RUN = ["races", "failures", "engine"]


def report_of(**changes):
    results = RESULTS | changes
    stages = {stage: results[stage.name] for stage in STAGES if stage.name in results}
    return Report(stages, 600.0, 300.0, "2026-11-26")


def test_a_report_names_the_machine_the_counts_and_what_was_not_checked():
    report = report_of()
    assert (report.verdict, report.unchecked) == ("PARTIAL", NOT_RUN)
    assert report.advice == ["Extents of 32 MiB are faster"]
    late = report_of(blocks=[Result("x", "PASS", ""), Result("y", "SKIP", NO_TIME)])
    assert ", 1 out of time" in late.row
    assert late.summary[0] == f"Not checked: y (blocks); {'; '.join(NOT_RUN)}."
    assert "Not shown: several hosts" in late.summary[-1]
    on_cpu = Result("device", "PASS", "", 0.1, DEVICE | {"name": "8 x cpu"})
    on_cpu = report_of(devices=[on_cpu])
    assert "Not shown: an accelerator, several hosts" in on_cpu.summary[-1]
    assert report.row.startswith("| 8 x tpu TPU v6 lite, 180 cores of AMD EPYC | jax")
    assert report.row.endswith("| 2026-11-26 | PARTIAL: 4 passed, 1 not supported |")


def test_pass_means_that_no_check_was_left_out_and_only_pass_has_a_row():
    passed = [Result("x", "PASS", ""), Result("y", "SKIP", "not supported: a TPU")]
    every = dict.fromkeys([stage.name for stage in STAGES], passed)
    late = [Result("x", "PASS", ""), Result("y", "SKIP", NO_TIME)]
    for changes, verdict in (({}, "PASS"), ({"blocks": late}, "PARTIAL")):
        report = report_of(**every | changes)
        assert report.verdict == verdict
        assert (report.row in last_lines(report, "x")) == (verdict == "PASS")
    assert report_of(blocks=passed).verdict == "PARTIAL"  # Stages are missing.
    out_of_time = [Result("transfers", "SKIP", NO_TIME)]
    assert report_of(devices=out_of_time).verdict == "PARTIAL"


def test_one_failure_is_the_verdict_and_a_device_without_transfers_is_none():
    assert report_of(blocks=[Result("x", "FAIL", "wrong")]).verdict == "FAIL"
    refused = [Result("transfers", "SKIP", "not supported: no pinned_host. No block")]
    report = report_of(devices=refused)
    assert report.verdict == "SKIP"
    assert reason_of(refused) == "no block can move here; `transfers` says why"


def test_the_command_writes_the_figures_and_ends_with_the_verdict(
    tmp_path, monkeypatch, run_line
):
    def run_stages(stages, folder, budget_s, stall_s, on_progress, on_stage):
        assert [stage.name for stage in stages] == ["devices", "blocks"]
        assert (budget_s, stall_s) == (90.0, 60.0)
        for stage in stages:
            on_stage(stage, tuple(RESULTS[stage.name]))

    monkeypatch.setattr(command, "run_stages", run_stages)
    monkeypatch.chdir(tmp_path)
    line = "verify --only blocks --budget 90s --stall 1m"
    out, _, figures = run_line(line, 3)
    assert out.startswith("2 of 6 stages, at most 90 s\n")
    assert "SKIP  int4 (staged): not supported" in out
    assert "PARTIAL: 3 passed, 1 not supported, in " in out
    assert "| jaxkv " not in out
    assert [*figures] == [
        *("verdict", "counts", "unchecked", "advice", "machine", "versions", "date"),
        *("command", "budget_s", "seconds", "stages"),
    ]
    run_line(f"{line} --resume", 3)
    path = tmp_path / "jaxkv-verify" / "run.json"
    for text in (json.dumps({"versions": 1}), "{}", "[]", ""):
        path.write_text(text)
        assert cli.main([*line.split(), "--resume"]) == 2
    monkeypatch.setitem(RESULTS, "blocks", [Result("x", "FAIL", "wrong")])
    run_line(line, 1)


@pytest.mark.skipif(trace_file.fcntl is None, reason="there are no file locks")
def test_a_folder_that_another_run_uses_is_refused_and_keeps_its_results(
    tmp_path, capsys
):
    run, log = tmp_path / "run.json", tmp_path / "devices.jsonl"
    run.write_text(json.dumps({"versions": versions("flax", "libtpu")}))
    log.write_text("results")
    with run.open("a") as file:
        trace_file.lock(file.fileno())
        for words in ((), ("--resume",)):
            assert cli.main(["verify", "--folder", str(tmp_path), *words]) == 2
            assert "another jaxkv verify runs in it" in capsys.readouterr().err
    assert log.read_text() == "results"


@pytest.mark.parametrize("words", [(), ("--resume",)])
@pytest.mark.parametrize("name", ["run.json", "devices.jsonl", "devices.log"])
def test_no_file_behind_a_link_in_the_folder_is_written_or_truncated(
    tmp_path, monkeypatch, name, words
):
    before = json.dumps({"versions": versions("flax", "libtpu")})
    precious, folder = tmp_path / "precious", tmp_path / "results"
    folder.mkdir()
    for path in (precious, folder / "run.json"):
        path.write_text(before)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)

    def run_stages(stages, folder, *_):
        log = StageLog(folder / "devices.jsonl")
        log.append(end=True)
        with contextlib.suppress(OSError):
            supervise._run_process("devices", log, 1, 1, 1, print)

    monkeypatch.setattr(command, "run_stages", run_stages)
    monkeypatch.setattr("sys.executable", "/bin/true")
    cli.main(["verify", "--folder", str(folder), "--only", "devices", *words])
    assert precious.read_text() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_others_may_write_is_refused(tmp_path, capsys):
    for change, why in (
        (lambda: tmp_path.chmod(0o777), "other users may write to it"),
        (lambda: os.chown(tmp_path, 65534, -1), "it belongs to user 65534"),
    ):
        change()
        assert cli.main(["verify", "--folder", str(tmp_path)]) == 2
        assert why in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
