"""`jaxkv replay`: what it prints, draws and writes, and how it refuses."""

import importlib.util
import json
import os
import resource
import signal

import numpy as np
import pytest

from jaxkv._util.extras import pip_install
from jaxkv.policies import policy_names
from jaxkv.tools import main as cli
from jaxkv.tools.replay.admission import Admission, find_admitted
from jaxkv.tools.replay.run import ReplayResult, replay
from jaxkv.tools.replay.synthetic import make_synthetic_trace

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = "replay synthetic:60 --policy lru --capacity 20%,100%"


@pytest.fixture
def fake(monkeypatch):
    """Replace the replay by a fake: its ARC refuses 7 stores."""

    def sweep(trace, policies, capacities, *_):
        num = trace.num_requests
        hits = 143 * np.eye(1, num, dtype=np.int64)[0]
        counts = num, trace.num_block_refs, 143, 1, 1
        arrays = hits, hits, hits
        return [
            ReplayResult(name, size, *counts, 7 * (name == "arc"), 1.0, 1.0, *arrays)
            for name in policies
            for size in capacities
        ]

    monkeypatch.setattr("jaxkv.tools.replay.command.sweep", sweep)


def results_of(written):
    return {(r["policy"], r["capacity_blocks"]): r for r in written["results"]}


def test_it_prints_draws_and_writes(run_line, tmp_path):
    picture = tmp_path / "a.svg"
    out, err, written = run_line(f"{SMALL} --plot {picture}")
    num_refs, unique = (
        written["trace"][n] for n in ("num_block_refs", "num_unique_blocks")
    )
    assert f"Blocks        {num_refs:,} asked for, {unique:,} unique" in out
    assert f"Prefix blocks found, of {num_refs:,}" in out
    assert "Stores refused" not in out
    results, sizes = results_of(written), (unique // 5, unique)
    assert list(results) == [(name, n) for name in ("lru", "optimum") for n in sizes]
    for row, policy in (("lru", "lru"), ("optimum (ceiling)", "optimum")):
        ratios = [results[policy, size]["block_hit_ratio"] for size in sizes]
        (line, *_) = (li for li in out.splitlines() if li.startswith(f"  {row} "))
        assert line.split()[-2:] == [f"{100 * ratio:.2f}%" for ratio in ratios]
    assert results["lru", unique]["num_hit_blocks"] == num_refs - unique
    assert "hits_by_request" not in results["lru", unique]
    assert err == "replaying, 4 runs ... 25% 50% 75% 100%\n"
    assert "Prefix tokens found" in picture.read_text()


def test_a_device_and_a_model_add_their_sections(run_line):
    line = f"{SMALL} --device-blocks 80 --model llama-3.1-8b"
    out, err, written = run_line(line)
    assert err.startswith("device, 80 blocks ... 100%\nreplaying, 4 runs ... 25%")
    device, model = written["device"], written["model"]
    share = device["num_hit_blocks"] / written["trace"]["num_block_refs"]
    assert f"\nDevice        80 blocks, LRU; alone {100 * share:.2f}% of the" in out
    assert "\nModel         llama-3.1-8b, 8.0 billion parameters; " in out
    for result in written["results"]:
        num_hits = [result[f"num_{p}hit_blocks"] for p in ("device_", "host_", "")]
        assert num_hits[0] == device["num_hit_blocks"]
        assert num_hits[0] + num_hits[1] == num_hits[2]
        saved = result["saved_prefill_flops"]
        assert result["saved_prefill_ratio"] == saved / model["prefill_flops"]
    titles = [tuple(li.split()[:3]) for li in out.splitlines() if li[:1] == "P"]
    kinds = ("blocks", "found"), ("tokens", "found"), ("FLOPs", "saved")
    assert [title[1:] for title in titles] == [kind for kind in kinds for _ in range(2)]


def test_engines_are_compared_with_and_without_a_store(run_line, tmp_path):
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    out, _, written = run_line(f"{SMALL} --engines 3 --route prefix")
    share = min(max(r["requests_by_engine"]) for r in written["results"]) / 60
    line = f"3, prefix, each with a host; the busiest serves {100 * share:.2f}%"
    assert line in out
    options = "--device-blocks 30 --storage-blocks 60%"
    line = f"{SMALL} --engines 3 --route sticky {options}"
    out, _, written = run_line(f"{line} --html {page} --plot {picture}")
    results, unique = results_of(written), written["trace"]["num_unique_blocks"]
    for result in results.values():
        assert sum(result["requests_by_engine"]) == 60
        assert (result["num_engines"], result["route"]) == (3, "sticky")
    num_blocks = unique * 60 // 100
    assert f"Store         {num_blocks:,} blocks (59.9% of the unique), LRU" in out
    policies = list(dict.fromkeys(policy for policy, _ in results))
    assert policies == ["lru", "lru + store", "store alone"]
    few = results["lru", unique // 5], results["lru + store", unique // 5]
    assert few[0]["num_hit_blocks"] < few[1]["num_hit_blocks"]
    assert few[1]["num_fetched_blocks"] > 0
    assert "optimum" not in out
    assert "<strong>3 engines</strong> have a host" in page.read_text()
    assert "Prefix tokens found" in picture.read_text()


def test_options_that_change_nothing_are_not_named(fake, run_line):
    plain = run_line(SMALL)
    assert "Admission" not in plain[0]
    assert "admission" not in plain[2]
    for options in (
        *("--engines 1", "--engines 1 --route prefix"),
        *("--store-threshold 0", "--store-threshold 1"),
    ):
        assert run_line(f"{SMALL} {options}") == plain, options


def test_admission_is_applied_and_named(run_line, tmp_path):
    page = tmp_path / "a.html"
    line = "replay synthetic:300 --policy lru --capacity 5%"
    options = "--store-threshold 2 --max-unseen-blocks 4 --max-offload-tokens 20000"
    out, _, written = run_line(f"{line} {options} --html {page}")
    admission = Admission(2, 4, False, 20_000)
    settings = "store_threshold=2, max_unseen_blocks=4, max_offload_tokens=20000"
    assert f"Admission     {settings}\n" in out
    assert "optimum (stores all)" in out
    assert "ceiling" not in out
    assert Admission(**written["admission"]) == admission
    assert f"<dd>{settings}</dd>" in page.read_text()
    assert "It stores all blocks" in page.read_text()
    trace, row = make_synthetic_trace(300), written["results"][0]
    admitted = find_admitted(trace, admission)
    expected = replay("lru", trace, row["capacity_blocks"], admitted=admitted)
    assert row["num_hit_blocks"] == expected.num_hit_blocks


def test_the_page_has_the_command_that_made_it(fake, tmp_path):
    path = tmp_path / "a report.html"
    options = "--policy lru --policy arc --capacity 20,50% --block-size 128"
    words = ["replay", "synthetic:60", *options.split(), "--no-optimum"]
    assert cli.main([*words, "--html", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert f"jaxkv {' '.join(words)} --html &#x27;{path}&#x27;" in text


def test_what_cannot_be_written_whole_is_not_written(fake, run_line, tmp_path):
    path = tmp_path / "a.svg"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    on_limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # No file of this process may grow beyond, as if the disk were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        for option in ("--html", "--json", "--plot"):
            for before in ([], [b"what was there"]):
                for data in before:
                    path.write_bytes(data)
                _, err, _ = run_line(f"{SMALL} {option} {path}", 2, has_figures=False)
                assert f"{option}: cannot write '{path}' (File too large)" in err
                assert [file.read_bytes() for file in tmp_path.iterdir()] == before
            path.unlink()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, on_limit)
    for option in ("--html", "--json"):
        _, err, _ = run_line(f"{SMALL} {option} /dev/full", 2, has_figures=False)
        assert err.count("\n") == 1
        assert f"{option}: cannot write '/dev/full' (No space left on device)" in err
    assert cli.main(f"{SMALL} --json /dev/null --html /dev/null".split()) == 0


def test_a_file_is_replaced_and_a_link_is_followed(fake, tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert cli.main(f"{SMALL} --json {link}".split()) == 0
    assert link.is_symlink()
    assert json.loads(path.read_text())["trace"]["num_requests"] == 60
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


def rows_of(out):
    table = out.split("of 1,430")[1].partition("Prefix")[0].partition("Stores")[0]
    return [line.split() for line in table.splitlines() if line.strip()]


def test_policies_and_capacities_may_be_chosen(fake, run_line):
    out, *_ = run_line("replay synthetic:60")
    assert "Warning       capacity 6, 19" in out
    _, _, refused = out.partition("Stores refused, of 60 requests")
    rows = rows_of(out)
    assert [row[0] for row in rows] == [*policy_names(), "optimum"]
    assert {len(row) for row in rows if row[0] != "optimum"} == {4}
    assert refused.split() == ["arc", "7", "7", "7"]
    line = "replay synthetic:60 --capacity 30 --capacity 20,30 --no-optimum"
    out, *_ = run_line(f"{line} --policy lru")
    assert out.split("Capacity, blocks")[1].split()[:2] == ["20", "30"]
    assert rows_of(out) == [["lru", "10.00%", "10.00%"]]
    out, *_ = run_line(f"{line} --policy slru,all")
    names = [row[0] for row in rows_of(out)]
    assert names == ["slru", *(name for name in policy_names() if name != "slru")]


def test_without_the_extra_the_error_names_it(refused, monkeypatch):
    find_spec, missing = importlib.util.find_spec, {"rich"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in missing else find_spec(name),
    )
    assert refused(f"{SMALL} --plot a.svg") == (
        f"jaxkv replay: error: replay needs rich: {pip_install('demo')}\n"
    )
    missing |= {"flax"}
    assert refused("demo") == (
        f"jaxkv demo: error: the demo needs flax, rich: {pip_install('demo')}\n"
    )
