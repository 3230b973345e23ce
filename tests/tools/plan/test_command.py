"""`jaxkv plan`: what it prints, draws and writes, and how it refuses."""

import html
import importlib.util
import json
import os
import pathlib
import re
import resource
import signal
import types

import jax
import pytest

from jaxkv._util.extras import pip_install
from jaxkv.config import OffloadConfig
from jaxkv.policies import policy_names
from jaxkv.tools import main as cli
from jaxkv.tools.plan.accelerators import ACCELERATORS, measure_flops_per_s
from jaxkv.tools.replay.admission import Admission, find_admitted
from jaxkv.tools.replay.device import fit_device
from jaxkv.tools.replay.fleet import Fleet
from jaxkv.tools.replay.run import OPTIMUM, replay
from jaxkv.tools.replay.synthetic import make_synthetic_trace

pytestmark = pytest.mark.usefixtures("plain_output")

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMAND = "jaxkv.tools.plan.command"
SERVER = "jaxkv.tools.plan.server"
MODEL = "llama-3.1-8b --accelerator h100 --device-blocks 0"
BLOCK = 512 * 128 << 10
REST = f"--model {MODEL} --host-bytes 1GiB --policy lru"
SMALL = f"synthetic:60 {REST}"


def made_up_trace(tmp_path, requests, every_ms=1000, name="made-up"):
    """Write a trace of requests in whole blocks, and of some tokens more."""
    path = tmp_path / f"{name}.jsonl"
    lines = [
        {"t": every_ms * i, "in": 512 * len(ids) + 100, "out": 5, "ids": list(ids)}
        for i, ids in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def plan(run_line):
    """Runs a plan; gives its figures and output, which must agree."""

    def run(line):
        out, _, figures = run_line(f"plan {line}")
        choice = figures["recommendation"]
        assert choice["pays"] == (choice["reason"] == "pays")
        assert choice["sentence"] in out
        for row in figures["rows"]:
            num_hits, num_refs = row["num_hit_blocks"], row["num_block_refs"]
            assert row["block_hit_ratio"] == num_hits / num_refs
            assert row["found_share"] == row["host_tokens"] / row["input_tokens"]
            assert row["saved_mean_s"] == row["saved_s"] / row["num_requests"]
        settings = choice["settings"]
        if choice["pays"]:
            config = OffloadConfig.from_env(environ=settings)
            assert config.cache_policy == choice["policy"]
            sizes = choice["host_bytes"], settings["JAXKV_HOST_BYTES"]
            assert config.to_dict()["host_bytes"] in sizes
            assert " ".join(f"{k}={v}" for k, v in settings.items()) in out
        else:
            assert choice["sentence"].startswith("Offloading does not pay here: ")
            assert settings == {}
            assert "JAXKV_HOST_BYTES" not in out
        return figures, out

    return run


def test_it_prints_draws_and_writes(plan, tmp_path):
    picture, report = tmp_path / "a.svg", tmp_path / "a.html"
    line = f"synthetic:200 --model {MODEL} --policy lru,hazard --host-bytes 2GiB,512MiB"
    figures, out = plan(f"{line} --plot {picture} --html {report}")
    assert picture.read_text().count('class="ring"') == 2  # A chart each.
    assert re.search(
        r">2 GiB with \w+ \(ringed\) saves [\d.]+ m?s", picture.read_text()
    )
    page = report.read_text()
    # The recommendation, what to set, what it rests on; then the figures.
    sentence = html.escape(figures["recommendation"]["sentence"])
    texts = (sentence, "JAXKV_HOST_BYTES=", "<dt>Load</dt>", 'id="saved-f"', "--html")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    # The recommended cell of each section.
    assert page.count("<strong>recommended</strong>") == out.count("*") == 5
    assert f"jaxkv plan {line} " in page
    assert max(len(line) for line in out.splitlines() if "  " in line) <= 80
    for words in (
        "llama-3.1-8b: 128 KiB of KV a token (bfloat16), 64 MiB a block",
        "h100, each device with 80 GB of HBM at 3,350 GB/s",
        "51.2 GB/s (80% of the peak of h100) after 1 ms (assumed)",
        "396 TFLOP/s (h100's 990, at 40%, assumed)",
    ):
        assert words in out
    load = {"value": 0.8 * 64e9, "source": "80% of the peak of h100"}
    assert figures["speeds"]["load_bytes_per_s"] == load
    assert figures["speeds"]["prefill_flops_per_s"]["value"] == 990e12 * 0.4
    rows = {(r["policy"], r["host_bytes"]): r for r in figures["rows"]}
    sizes = 512 << 20, 2 << 30
    assert list(rows) == [(policy, s) for policy in ("lru", "hazard") for s in sizes]
    assert [rows["lru", size]["capacity_blocks"] for size in sizes] == [8, 32]
    chart = out.split("\nTokens found")[1]
    for policy in ("lru", "hazard"):
        (line, *_) = (li for li in chart.splitlines() if li.startswith(f"  {policy} "))
        shares = [100 * rows[policy, size]["found_share"] for size in sizes]
        cells = [cell.rstrip("*") for cell in line.split()[1:]]
        assert cells == [f"{share:.1f}%" for share in shares]


WITHOUT_A_MODEL = "synthetic:60 --policy lru --capacity 20%,100%"


def test_without_a_model_it_counts_what_is_found(run_line, tmp_path):
    picture, page = tmp_path / "a.svg", tmp_path / "a.html"
    line = f"plan {WITHOUT_A_MODEL} --policy hazard,{OPTIMUM} --plot {picture}"
    out, err, figures = run_line(f"{line} --html {page}")
    assert err == "replaying, 6 runs ... 25% 50% 75% 100%\n"
    unique, trace = figures["trace"]["num_unique_blocks"], make_synthetic_trace(60)
    rows = {(r["policy"], r["capacity_blocks"]): r for r in figures["rows"]}
    sizes = unique // 5, unique
    assert list(rows) == [
        (p, size) for p in ("lru", "hazard", OPTIMUM) for size in sizes
    ]
    for (policy, size), row in rows.items():
        result = replay(policy, trace, size)
        for name in ("num_hit_blocks", "hit_tokens", "num_refused", "block_hit_ratio"):
            assert row[name] == getattr(result, name)
        assert row["host_tokens"] == row["hit_tokens"]
    assert {"speeds", "model", "rule"}.isdisjoint(figures)
    assert not [name for name in row if name.endswith(("_s", "bytes"))]
    for label, policy in (("lru", "lru"), ("optimum (ceiling)", OPTIMUM)):
        (text,) = (li for li in out.splitlines() if li.startswith(f"  {label} "))
        shares = [100 * rows[policy, size]["found_share"] for size in sizes]
        cells = [cell.rstrip("*") for cell in text.split()[-2:]]
        assert cells == [f"{share:.1f}%" for share in shares]
    # Equal at the largest size, where nothing is evicted: neither is marked.
    assert page.read_text().count("<strong>best</strong>") == out.count("*") == 1
    assert "Stores refused" not in out
    sentence = figures["recommendation"]["sentence"]
    assert sentence.startswith(f"Of the prompt tokens, {sizes[0]} blocks with ")
    assert sentence in out
    assert sentence in html.unescape(page.read_text())
    assert re.search(r">\w+ finds most at 1 of 2 sizes<", picture.read_text())
    out, _, figures = run_line(f"{line} --device-blocks 80 --store-threshold 2")
    device = figures["demand"]["device_tokens"]
    assert f"The device finds {100 * device / trace.input_tokens.sum():.1f}%" in out
    assert "optimum (ceiling)" in out
    assert (
        figures["rows"][0]["hit_tokens"] - figures["rows"][0]["host_tokens"] == device
    )


def test_policies_and_capacities_may_be_chosen(run_line):
    out, _, figures = run_line("plan synthetic:60")
    assert re.search(r"sizes below \d+ blocks hold only part of the largest req", out)
    names = list(dict.fromkeys(row["policy"] for row in figures["rows"]))
    assert names == policy_names()
    line = "plan synthetic:60 --capacity 30 --capacity 20,30"
    out, _, figures = run_line(f"{line} --policy hazard,all")
    assert out.split("Host memory, blocks")[1].split()[:2] == ["20", "30"]
    names = list(dict.fromkeys(row["policy"] for row in figures["rows"]))
    assert names == ["hazard", *(name for name in policy_names() if name != "hazard")]
    # With a model, too, and in bytes.
    line = f"plan synthetic:60 --policy lru --model {MODEL}"
    for size in ("--capacity 20,30", "--host-bytes 1280MiB,1920MiB"):
        rows = run_line(f"{line} {size}")[2]["rows"]
        assert [(r["capacity_blocks"], r["host_bytes"] / BLOCK) for r in rows] == [
            *((20, 20), (30, 30))
        ]


def test_options_that_change_nothing_are_not_named(run_line):
    plain = run_line(f"plan {WITHOUT_A_MODEL}")
    for options in (
        *("--engines 1", "--engines 1 --route prefix"),
        *("--store-threshold 0", "--store-threshold 1"),
    ):
        assert run_line(f"plan {WITHOUT_A_MODEL} {options}") == plain, options


def test_what_cannot_be_written_whole_is_not_written(run_line, tmp_path):
    path, line = tmp_path / "a.svg", f"plan {WITHOUT_A_MODEL}"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    on_limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # No file of this process may grow beyond, as if the disk were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        for option in ("--html", "--json", "--plot"):
            for before in ([], [b"what was there"]):
                for data in before:
                    path.write_bytes(data)
                _, err, _ = run_line(f"{line} {option} {path}", 2, has_figures=False)
                assert f"{option}: cannot write '{path}' (File too large)" in err
                assert [file.read_bytes() for file in tmp_path.iterdir()] == before
            path.unlink()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, on_limit)
    for option in ("--html", "--json"):
        _, err, _ = run_line(f"{line} {option} /dev/full", 2, has_figures=False)
        assert f"{option}: cannot write '/dev/full' (No space left on device)" in err
    assert cli.main(f"{line} --json /dev/null --html /dev/null".split()) == 0


def test_a_file_is_replaced_and_a_link_is_followed(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert cli.main(f"plan {WITHOUT_A_MODEL} --json {link}".split()) == 0
    assert link.is_symlink()
    assert json.loads(path.read_text())["trace"]["num_requests"] == 60
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


def test_without_the_extra_the_error_names_it(refused, monkeypatch):
    find_spec, missing = importlib.util.find_spec, {"rich"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in missing else find_spec(name),
    )
    assert refused(f"plan {WITHOUT_A_MODEL} --plot a.svg", 1) == (
        f"jaxkv plan: error: plan needs rich: {pip_install('demo')}\n"
    )
    missing |= {"flax"}
    assert refused("demo", 1) == (
        f"jaxkv demo: error: the demo needs flax, rich: {pip_install('demo')}\n"
    )


def test_it_says_what_a_store_would_add_to_engines(plan, tmp_path):
    report, route = tmp_path / "a.html", "prefix"
    options = f"--host-bytes 4GiB,2GiB --policy lru --model {MODEL} --device-blocks 60"
    fleet = f"--engines 3 --route {route} --storage-bytes 40GiB,10GiB --html {report}"
    figures, out = plan(f"synthetic:200 {options} {fleet}")
    demand, rows, stores = (figures[n] for n in ("demand", "rows", "stores"))
    trace = make_synthetic_trace(200)
    assert demand["num_engines"] == 3
    assert figures["engines"] == {"num_engines": 3, "route": route}
    device = fit_device(trace, 60)
    for row in rows:
        blocks, fleet = row["capacity_blocks"], Fleet(3, route)
        result = replay("lru", trace, blocks, device=device, fleet=fleet)
        assert row["host_tokens"] == result.hit_tokens - demand["device_tokens"]
    base = stores[0]["base"]
    (row,) = (row for row in rows if row["host_bytes"] == base["size"])
    assert [store["size"] >> 30 for store in stores] == [10, 40]
    for store in stores:
        fleet = Fleet(3, route, store["storage_blocks"])
        blocks = row["capacity_blocks"]
        result = replay("lru", trace, blocks, device=device, fleet=fleet)
        added = result.hit_tokens - demand["device_tokens"] - row["host_tokens"]
        assert store["added_tokens"] == added > 0
        assert store["fetch_bytes"] == BLOCK * result.fetches_by_request.sum()
        assert store["least_bytes_per_s"] == store["fetch_bytes"] / store["added_s"]
    text = figures["store_sentence"]
    assert text.startswith("A store of 40 GiB that the 3 engines share would find ")
    assert text in out
    assert text in html.unescape(report.read_text())
    # Nothing is said of a store where none is given.
    figures, out = plan(f"synthetic:200 {options} --engines 3")
    assert "stores" not in figures
    assert "store of" not in out


def test_without_a_model_a_store_is_measured_in_blocks(run_line):
    line = f"plan {WITHOUT_A_MODEL} --engines 3 --route sticky --storage-blocks 60%"
    out, _, figures = run_line(line)
    assert {sum(row["requests_by_engine"]) for row in figures["rows"]} == {60}
    (store,), unique = figures["stores"], figures["trace"]["num_unique_blocks"]
    fleet, trace = Fleet(3, "sticky", unique * 60 // 100), make_synthetic_trace(60)
    result = replay("lru", trace, unique, fleet=fleet)
    alone = replay("lru", trace, unique, fleet=Fleet(3, "sticky"))
    assert store["storage_blocks"] == fleet.storage_blocks
    assert store["added_tokens"] == result.hit_tokens - alone.hit_tokens > 0
    assert store["num_fetched_blocks"] == result.fetches_by_request.sum() > 0
    assert "Least rate" not in out
    assert figures["store_sentence"] in out
    assert figures["store_sentence"].startswith(
        f"A store of {fleet.storage_blocks} blocks that the 3 engines share would find"
    )


def test_a_store_behind_one_engine_is_not_compared_with_the_optimum(run_line):
    line = f"plan synthetic:60 --policy lru,{OPTIMUM} --capacity 5%"
    _, _, figures = run_line(f"{line} --engines 1 --storage-blocks 50%")
    (store,) = figures["stores"]
    assert store["base"]["policy"] == "lru"
    assert store["added_tokens"] > 0


def test_a_store_that_adds_nothing_is_not_praised(plan, tmp_path):
    trace = made_up_trace(tmp_path, [[i] for i in range(20)])
    line = f"{trace} --model {MODEL} --host-bytes 1GiB --engines 1"
    figures, out = plan(f"{line} --storage-bytes 512MiB")
    assert figures["store_sentence"] in out
    assert figures["store_sentence"] == (
        "A store that the engine has to itself would add little here: 512 MiB would "
        "find 0.0% more of the prompt tokens than a host of 1 GiB with lru alone."
    )
    assert re.search("Least rate of reads that pays.*\n  lru, 1 GiB  +none", out)


def test_what_is_given_counts(plan):
    options = "--load-gb-per-s 10 --store-gb-per-s 5 --load-latency-ms 0 --mfu 0.5"
    rates = "--flops-per-s 2e14 --tensor-parallel 4"
    figures, out = plan(f"{SMALL} {options} {rates}")
    assert {name: speed["value"] for name, speed in figures["speeds"].items()} == {
        "load_bytes_per_s": 10e9,
        "store_bytes_per_s": 5e9,
        "load_latency_s": 0.0,
        "prefill_flops_per_s": 4 * 2e14 * 0.5,
    }
    assert "assumed" not in out
    assert "4 devices share it" in out
    assert "400 TFLOP/s (4 x 200, given, at 50%, given)" in out
    stored_blocks = figures["rows"][0]["store_bytes"] / (BLOCK / 4)
    assert stored_blocks == int(stored_blocks) > 0
    # The bytes of a token's KV will do.
    line = "synthetic:60 --kv-bytes-per-token 128KiB --host-bytes 1GiB"
    figures, out = plan(f"{line} --prefill-tokens-per-s 20000")
    assert "20,000 tokens/s (given)" in out
    assert figures["model"]["block_bytes"] == BLOCK
    row = figures["rows"][0]
    assert row["prefill_s"] == pytest.approx(row["input_tokens"] / 20000)


def test_speeds_are_measured_if_asked(plan, refused, monkeypatch):
    def measure(on_progress):
        on_progress("measuring", 1, 1)
        speeds = {"load": 6.0, "save": 3.0}
        return types.SimpleNamespace(
            **{n: types.SimpleNamespace(p50_gb_per_s=v) for n, v in speeds.items()}
        )

    monkeypatch.setattr(f"{SERVER}.measure_bandwidth", measure)
    figures, out = plan(f"{SMALL} --measure")
    assert figures["speeds"]["load_bytes_per_s"]["value"] == 6e9
    assert figures["speeds"]["store_bytes_per_s"]["value"] == 3e9
    assert "6 GB/s (measured here, on " in out

    def fail(on_progress):
        raise MemoryError("too little")

    monkeypatch.setattr(f"{SERVER}.measure_bandwidth", fail)
    err = refused(f"plan {SMALL} --measure")
    assert err == "jaxkv plan: error: --measure: too little\n"


def recorded_trace(tmp_path, **facts):
    header = {"format": "jaxkv trace 1", "block_size": 512, **facts}
    lines = [{"t": i, "in": 1100, "out": 5, "ids": [1, 2]} for i in range(9)]
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (header, *lines)))
    return path


def test_the_speeds_are_those_of_the_recordings_device_or_else_of_this_machine(
    plan, refused, tmp_path, monkeypatch
):
    rest = "--model llama-3.1-8b --host-bytes 1GiB --policy lru"

    def speeds_of(options="", **facts):
        figures, _ = plan(f"{recorded_trace(tmp_path, **facts)} {rest} {options}")
        speeds = figures["speeds"]
        has_note = any("assumed to be this CPU" in note for note in figures["notes"])
        assert has_note == (jax.devices()[0].platform == "cpu")
        names = "load_bytes_per_s", "prefill_flops_per_s"
        return [(speeds[name]["value"], speeds[name]["source"]) for name in names]

    def run_on(kind):
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**kind)])

    run_on({"device_kind": "TPU v5", "platform": "tpu"})
    recorded = speeds_of(device_kind="TPU v6 lite")
    peak = "v6e's 918, at 40%, assumed"
    assert recorded == [(0.8 * 32e9, "80% of the peak of v6e"), (0.4 * 918e12, peak)]
    ((link, _), (flops, _)) = speeds_of()
    assert (link, flops) == (0.8 * 15e9, 0.4 * 459e12)
    ((link, _), (flops, _)) = speeds_of("--accelerator h200", device_kind="TPU v2")
    assert (link, flops) == (0.8 * 64e9, 0.4 * 990e12)
    # No source describes this CPU, so it is measured.
    run_on({"device_kind": "cpu", "platform": "cpu"})
    monkeypatch.setattr(f"{SERVER}.measure_flops_per_s", lambda: 1e11)
    speed = types.SimpleNamespace(p50_gb_per_s=3.0)
    measured = types.SimpleNamespace(load=speed, save=speed)
    monkeypatch.setattr(f"{SERVER}.measure_bandwidth", lambda *_: measured)
    source = "measured here, on cpu"
    peak = f"0.1, {source}, at 40%, assumed"
    assert speeds_of() == [(3e9, source), (0.4 * 1e11, peak)]
    for options, facts, message in (
        ("", {"device_kind": "TPU v2"}, "the recording's device is 'TPU v2', whose sp"),
        ("--accelerator tpu7x", {}, "no source gives the link to the host of tpu7x"),
        ("--accelerator v4", {}, "unknown 'v4': choose from v5e, v5p, v6e, tpu7x, h1"),
        (
            "--accelerator v5e --device-bytes 15GiB",
            {},
            "16.1 GB of weights + 16.1 GB of KV + 1.6 GB of reserve are 33.8 GB, more",
        ),
    ):
        err = refused(f"plan {recorded_trace(tmp_path, **facts)} {rest} {options}")
        assert message in err


def test_weights_and_kv_that_exceed_hbm_are_refused_with_the_sum(refused):
    line = "plan synthetic:20 --model llama-3.1-70b --accelerator h100"
    for options, message in (
        ("", "--model: 141.1 GB of weights + 8.0 GB of reserve are 149.1 GB, more"),
        ("--tensor-parallel 2 --device-blocks 999", "--device-blocks: 70.6 GB of weig"),
    ):
        err = refused(f"{line} {options}")
        assert message in err
        assert "more than the 80.0 GB of HBM of each of" in err


def test_the_device_holds_what_weights_and_a_reserve_leave(plan):
    line = "synthetic:60 --model llama-3.1-8b --accelerator h100 --host-bytes 1GiB"
    figures, _ = plan(f"{line} --policy lru")
    # 80 GB, less a tenth, less 8.03e9 parameters of 2 bytes.
    assert figures["device_blocks"] == int((72e9 - 2 * 8029995008) / BLOCK)
    figures, _ = plan(f"{line} --policy lru --device-blocks 0")
    assert figures["demand"]["device_tokens"] == figures["device_blocks"] == 0


def test_prices_say_what_a_month_saves_and_the_memory_costs(plan):
    prices = "--price-per-hour 10 --price-per-gib-month 3"
    figures, out = plan(f"{SMALL} {prices}")
    (row,), choice = figures["rows"], figures["recommendation"]
    saved, memory = choice["saved_and_memory_per_month"]
    assert saved == pytest.approx(row["saved_s_per_hour"] / 3600 * 730 * 10)
    assert memory == 3 * figures["demand"]["num_servers"]
    assert f"worth {saved:,.0f} of server time, and the host memory costs" in out


def test_the_page_has_the_speeds_of_every_accelerator():
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    rows = {}
    for line in re.findall(r"^\| `(\w+)`(?: \(SXM\))? \| (.*) \|$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line[1]).replace(",", "")
        rows[line[0]] = [float(number) for number in re.findall(r"\d+", words)]
    for name, accelerator in ACCELERATORS.items():
        units = 1e12, 1e9, 1e9, 1e9
        peaks = [
            round(peak / unit)
            for peak, unit in zip(accelerator[2:], units, strict=True)
            if peak is not None
        ]
        assert rows[name] == peaks, name


def test_flops_are_measured():
    assert 1e6 < measure_flops_per_s() < 1e16


def test_sizes_go_up_to_what_the_trace_needs_or_the_machine_has(
    plan, refused, tmp_path, monkeypatch
):
    trace = made_up_trace(tmp_path, [range(20)] * 5)
    line = f"{trace} --model {MODEL} --policy lru"

    def limit_memory(num_bytes):
        limit = types.SimpleNamespace(num_bytes=num_bytes) if num_bytes else None
        monkeypatch.setattr(f"{COMMAND}.available_host_bytes", lambda: limit)

    # 20 blocks of 64 MiB are 1,280 MiB.
    for memory_mib, sizes_mib in (
        *((0, [128, 256, 512, 1024, 2048]), (64 << 10, [128, 256, 512, 1024, 2048])),
        *((1500, [64, 128, 256, 512, 1024]), (100, [64])),
    ):
        limit_memory(memory_mib << 20)
        figures, out = plan(line)
        assert [row["host_bytes"] >> 20 for row in figures["rows"]] == sizes_mib
        is_limited = sizes_mib[0] == 64
        notes = " ".join(figures["notes"])
        for text in (notes, out):
            assert ("up to this machine's memory" in text) == is_limited
    limit_memory(1000)
    assert "not even a block fits this machine's memory" in refused(f"plan {line}")


# The requests and the options.
REASONS = {
    "nothing returns": ([range(9 * i, 9 * i + 9) for i in range(30)], ""),
    "device suffices": ([range(9)] * 30, "--device-blocks 20"),
    "too small": ([range(9 * i, 9 * i + 9) for i in range(30)] * 2, ""),
    # The first block of long prompts, whose attention takes most of the time.
    "cheap prefill": ([[0, *range(99 * i + 1, 99 * i + 90)] for i in range(30)], ""),
    "slow loads": ([range(9)] * 30, "--load-gb-per-s 0.1"),
    "slow stores": (
        [[0, 1, 2, 3, *range(6 * i + 9, 6 * i + 15)] for i in range(30)],
        "--store-gb-per-s 0.1",
    ),
    "pays": ([range(9)] * 30, ""),
}


def test_a_made_up_trace_gets_the_reason_that_its_table_supports(plan, tmp_path):
    sentences = set()
    for reason, (requests, options) in REASONS.items():
        trace = made_up_trace(tmp_path, requests)
        line = f"--model {MODEL} --host-bytes 1GiB,4GiB --policy lru,hazard {options}"
        choice = plan(f"{trace} {line}")[0]["recommendation"]
        assert choice["reason"] == reason
        sentences.add(choice["sentence"])
    assert len(sentences) == 7
    assert any("Take 1 GiB with lru: it finds 94.6%" in text for text in sentences)


def test_an_admission_is_planned_with_and_recommended(plan, refused, tmp_path):
    # A trace that stores too much for its link, though little of it returns.
    requests, options = REASONS["slow stores"]
    line = f"{made_up_trace(tmp_path, requests)} {REST} {options}"
    without, out = plan(line)
    assert without["admission"] is None
    # 184 blocks of 67.1 MB in 29 s.
    words = "the link is too slow; stores alone take 4.3 times as long as the trace"
    assert f"{words} (try --store-threshold 2, to store" in out
    line += " --store-threshold 2"
    figures, out = plan(line)
    assert "Rules     store_threshold=2\n" in out
    assert figures["admission"]["store_threshold"] == 2
    (before,), (after,) = without["rows"], figures["rows"]
    # The four shared blocks, when they are asked for again; found from then on.
    assert after["store_bytes"] == 4 * BLOCK < before["store_bytes"]
    assert after["host_tokens"] == 28 * 4 * 512
    assert before["host_tokens"] == 29 * 4 * 512
    settings = figures["recommendation"]["settings"]
    assert settings["JAXKV_STORE_THRESHOLD"] == "2"
    assert OffloadConfig.from_env(environ=settings).store_threshold == 2
    err = refused(f"plan {line} --prompt-only")
    assert "--prompt-only: no output of the trace" in err
    # Every option of admission has its effect.
    words = "--store-threshold 2 --max-unseen-blocks 4 --max-offload-tokens 20000"
    figures, _ = plan(f"synthetic:300 {REST} {words}")
    admission = Admission(2, 4, False, 20_000)
    assert Admission(**figures["admission"]) == admission
    made_up = make_synthetic_trace(300)
    admitted = find_admitted(made_up, admission)
    expected = replay("lru", made_up, 16, admitted=admitted)
    assert figures["rows"][0]["num_hit_blocks"] == expected.num_hit_blocks


def test_the_device_in_front_is_counted_in_bytes_too(plan, tmp_path):
    small, rest = (text.replace(" --device-blocks 0", "") for text in (SMALL, REST))
    of_bytes, out = plan(f"{small} --device-bytes 2500MiB")
    of_blocks, _ = plan(f"{small} --device-blocks 39")
    assert of_bytes["rows"] == of_blocks["rows"]
    assert of_bytes["demand"]["device_tokens"] > 0
    assert "keeps 39 blocks (2.44 GiB)" in out
    assert "Tokens found beyond the device" in out
    # It may be larger than the trace.
    trace = made_up_trace(tmp_path, [range(9), range(9)], name="[red]a:smile:")
    figures, out = plan(f"{trace} {rest} --device-bytes 50GiB")
    assert figures["recommendation"]["reason"] == "device suffices"
    assert "Trace     [red]a:smile:: 2 requests in 1 s" in out


def test_figures_per_second_need_times(plan, tmp_path):
    # Of 30 requests, 29 find 9 blocks: 4,608 tokens, the last of which is not needed.
    options = "--prefill-tokens-per-s 4608 --load-gb-per-s 1 --load-latency-ms 0"
    line = f"{made_up_trace(tmp_path, [range(9)] * 30)} {REST} {options}"
    saved_s = 29 * (1 - 9 * BLOCK / 1e9)
    (row,) = plan(line)[0]["rows"]
    assert row["saved_s_per_hour"] == pytest.approx(saved_s / (29 / 3600))
    made_up_trace(tmp_path, [range(9)] * 30, every_ms=0)
    figures, out = plan(line)
    assert "The trace has no times" in out
    assert "Link busy" not in out
    (row,) = figures["rows"]
    assert row["store_use"] is row["saved_s_per_hour"] is None


def test_many_sizes_are_shown_below_one_another(plan):
    sizes = ",".join(f"{1024 * n + 13}MiB" for n in range(1, 9))
    options = f"--model {MODEL} --policy hazard --host-bytes {sizes}"
    figures, out = plan(f"synthetic:60 {options}")
    assert out.count("Host memory") == 2
    assert len(figures["rows"]) == 8
    assert max(len(line) for line in out.splitlines() if "  " in line) <= 80


def test_more_memory_is_spoken_of_only_where_there_is_more_to_find(plan, tmp_path):
    rounds = [range(9 * i, 9 * i + 9) for i in range(20)]
    trace = made_up_trace(tmp_path, [range(9), *rounds] * 2 + [range(9)] * 10)
    for sizes, chosen_gib, words, is_hinted in (
        ("1GiB,2GiB", 1, "2 GiB would save no more", True),
        ("2GiB,16GiB", 16, "", False),
        ("2GiB", 2, "", True),
    ):
        line = f"{trace} --model {MODEL} --policy lru --host-bytes {sizes}"
        choice = plan(line)[0]["recommendation"]
        assert choice["host_bytes"] == chosen_gib << 30
        assert words in choice["sentence"]
        hint = "more memory than was planned for may save more"
        assert (hint in choice["sentence"]) == is_hinted


def test_slow_loads_are_to_be_skipped(plan, tmp_path):
    # Short prefixes take longer to load, for the latency; long ones do not.
    trace = made_up_trace(tmp_path, [[0]] * 10 + [range(30)] * 10)
    options = f"--model {MODEL} --host-bytes 4GiB --policy lru --load-latency-ms 100"
    figures, _ = plan(f"{trace} {options}")
    assert figures["rows"][0]["num_declined"] == 10
    assert figures["recommendation"]["settings"] == {
        "JAXKV_HOST_BYTES": "4GiB",
        "JAXKV_CACHE_POLICY": "lru",
        "JAXKV_SKIP_SLOW_LOADS": "true",
    }
