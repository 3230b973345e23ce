"""A recorded demo: a plan finds what the demo counted."""

import json
import re
import shlex

from jaxkv.tools import main as cli
from jaxkv.tools.demo.records import DemoConfig
from jaxkv.tools.demo.run import block_bytes

DEVICE_BLOCKS = 24
HOST_BLOCKS = 40
CONFIG = DemoConfig(
    conversations=5,
    turns=3,
    document_tokens=200,
    answer_tokens=4,
    concurrency=1,
    device_blocks=DEVICE_BLOCKS,
    host_bytes=HOST_BLOCKS * block_bytes(DemoConfig()),
)


def test_a_recorded_demo_is_replayed_with_the_hits_that_it_counted(
    tmp_path, capsys, plain_output
):
    path, counted, timed, planned = (
        tmp_path / name for name in ("trace.gz", "demo", "timed", "counted")
    )
    options = ["--record", str(path), "--json", str(counted)]
    for name in ("conversations", "turns", "document_tokens", "answer_tokens"):
        options += [f"--{name.replace('_', '-')}", str(getattr(CONFIG, name))]
    options += ["--concurrency", "1", "--device-blocks", str(DEVICE_BLOCKS)]
    assert cli.main(["demo", *options, "--host-bytes", str(CONFIG.host_bytes)]) == 0
    out, err = capsys.readouterr()
    assert "Recorded 15 requests." in out
    assert err == (
        "compiling ...\nserving requests ... 25% 50% 75% 100%\n"
        "moving blocks ... 25% 50% 75% 100%\n"
    )
    plan_command, timed_command = re.findall(r"^  jaxkv (.+)$", out, re.MULTILINE)
    demo = json.loads(counted.read_text())
    check_figures(demo)

    # Without its page, which takes long to draw.
    words = shlex.split(timed_command.replace(" --html plan.html", ""))
    assert cli.main([*words, "--policy", "lru", "--json", str(timed)]) == 0
    assert json.loads(timed.read_text())["rows"]

    words = [*shlex.split(plan_command), "--json", str(planned)]
    assert cli.main(words) == 0
    figures = json.loads(planned.read_text())
    assert figures["device_blocks"] == DEVICE_BLOCKS - 1
    results = {(r["policy"], r["capacity_blocks"]): r for r in figures["rows"]}
    hits = {cell: result["host_tokens"] for cell, result in results.items()}
    unique = figures["trace"]["num_unique_blocks"]
    capacities = [n * HOST_BLOCKS // 4 for n in range(1, 5)]
    capacities.append(min(2 * HOST_BLOCKS, unique))
    assert sorted({capacity for _, capacity in hits}) == capacities
    # The command shows something: policies differ, and more memory finds more.
    at_host = {num for (_, capacity), num in hits.items() if capacity == HOST_BLOCKS}
    assert len(at_host) > 1
    assert hits["lru", HOST_BLOCKS // 4] < max(at_host)

    turns = demo["on"]["turns"]
    assert figures["trace"]["num_requests"] == len(turns) == 15
    result, recording = results["lru", HOST_BLOCKS], figures["recording"]
    assert result["input_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
    num_found = figures["demand"]["device_tokens"], result["host_tokens"]
    for tier, found in zip(("device", "host"), num_found, strict=True):
        num = sum(turn[f"{tier}_hit_tokens"] for turn in turns)
        assert found == num > 0
        assert recording[f"num_{tier}_hit_tokens"] == num
    assert (recording["policy"], recording["host_blocks"]) == ("lru", HOST_BLOCKS)
    # What the policy evicts matters here.
    assert num_found[1] < 0.9 * (result["input_tokens"] - num_found[0])


def check_figures(demo):
    """Check that the figures of a demo are consistent."""
    off, on = demo["off"], demo["on"]
    assert demo["tokens_identical"]
    assert demo["bytes_loaded"] % demo["blocks_loaded"] == 0
    assert demo["bytes_stored"] // demo["blocks_stored"] == block_bytes(CONFIG)
    assert 0 < demo["peak_host_bytes"] <= demo["host_capacity_bytes"]
    hits = sum(turn["host_hit_tokens"] for turn in on["turns"])
    assert hits == demo["blocks_loaded"] * CONFIG.block_size > 0
    for run in (off, on):
        order = [(turn["turn"], turn["conversation"]) for turn in run["turns"]]
        assert order == [(turn, who) for turn in (1, 2, 3) for who in range(5)]
        for turn in run["turns"]:
            num_hits = turn["device_hit_tokens"] + turn["host_hit_tokens"]
            assert turn["prefilled_tokens"] == turn["prompt_tokens"] - num_hits > 0
            assert turn["ttft_s"] > 0
            assert len(turn["generated"]) == CONFIG.answer_tokens
    assert demo["bandwidth"]["block_bytes"] == block_bytes(CONFIG)
    for way in ("save", "load", "limit_save", "limit_load"):
        assert 0 < demo["bandwidth"][way]["p50_gb_per_s"] < 1000
