"""A recorded demo: the replay finds what the demo counted."""

import dataclasses
import json
import re
import shlex

import pytest

from jaxkv.scheduling.record import TraceRecorder
from jaxkv.tools import main as cli
from jaxkv.tools.demo import run as demo_run
from jaxkv.tools.demo.records import DemoConfig
from jaxkv.tools.demo.run import block_bytes, run_demo
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import read_trace

DEVICE_BLOCKS = 48
HOST_BLOCKS = 112  # The conversations fill about 150.
CONFIG = DemoConfig(
    conversations=6,
    turns=3,
    document_tokens=600,
    answer_tokens=8,
    concurrency=1,
    device_blocks=DEVICE_BLOCKS,
    host_bytes=HOST_BLOCKS * block_bytes(DemoConfig()),
)


def test_a_recorded_demo_is_replayed_with_the_hits_that_it_counted(
    tmp_path, capsys, plain_output
):
    path, counted, found = (tmp_path / name for name in ("trace.gz", "demo", "replay"))
    options = ["--record", str(path), "--json", str(counted)]
    for name in ("conversations", "turns", "document_tokens", "answer_tokens"):
        options += [f"--{name.replace('_', '-')}", str(getattr(CONFIG, name))]
    options += ["--concurrency", "1", "--device-blocks", str(DEVICE_BLOCKS)]
    assert cli.main(["demo", *options, "--host-bytes", str(CONFIG.host_bytes)]) == 0
    out = capsys.readouterr().out
    assert "Recorded 18 requests." in out
    replay_command, plan_command = re.findall(r"^  jaxkv (.+)$", out, re.MULTILINE)

    assert cli.main([*shlex.split(replay_command), "--json", str(found)]) == 0
    figures = json.loads(found.read_text())
    assert figures["device"]["num_blocks"] == DEVICE_BLOCKS - 1
    hits = {}
    for result in figures["results"]:
        own = hits.setdefault(result["capacity_blocks"], {})
        own[result["policy"]] = result["num_host_hit_blocks"]
    unique = figures["trace"]["num_unique_blocks"]
    quarters = [n * HOST_BLOCKS // 4 for n in range(1, 5)]
    assert sorted(hits) == [*quarters, min(2 * HOST_BLOCKS, unique)]
    # The command shows something: policies differ, and more memory finds more.
    assert len(set(hits[HOST_BLOCKS].values())) > 2
    assert hits[HOST_BLOCKS // 4]["lru"] < max(hits[HOST_BLOCKS].values())

    page = tmp_path / "plan.html"
    words = shlex.split(plan_command.replace("plan.html", str(page)))
    assert cli.main([*words, "--policy", "lru"]) == 0
    assert page.read_text().startswith("<!doctype html>")

    options = ["--policy", "lru", "--capacity", str(HOST_BLOCKS), "--no-optimum"]
    command = [*shlex.split(replay_command), *options, "--json", str(found)]
    assert cli.main(command) == 0
    figures = json.loads(found.read_text())
    turns = json.loads(counted.read_text())["on"]["turns"]
    assert figures["trace"]["num_requests"] == len(turns) == 18
    (result,) = figures["results"]
    assert result["input_tokens"] == sum(turn["prompt_tokens"] for turn in turns)
    recording = figures["recording"]
    for tier in ("device", "host"):
        num = sum(turn[f"{tier}_hit_tokens"] for turn in turns)
        assert result[f"{tier}_hit_tokens"] == num > 0
        assert recording[f"num_{tier}_hit_tokens"] == num
    assert (recording["policy"], recording["host_blocks"]) == ("lru", HOST_BLOCKS)
    # What the policy evicts matters here.
    assert result["host_hit_tokens"] < 0.9 * (
        result["input_tokens"] - result["device_hit_tokens"]
    )


@pytest.mark.long
def test_whatever_the_replay_finds_the_trace_has_what_the_demo_counted(
    tmp_path, monkeypatch
):
    policy = "arc"
    monkeypatch.setattr(demo_run, "measure_bandwidth", lambda *arguments: None)
    config = dataclasses.replace(
        CONFIG,
        conversations=4,
        turns=2,
        document_tokens=300,
        cache_policy=policy,
        concurrency=2,
    )
    with TraceRecorder(tmp_path / "trace") as recorder:
        demo = run_demo(config, lambda *progress: None, recorder=recorder)
    trace = read_trace(tmp_path / "trace")
    turns = demo.on.turns
    assert sorted(trace.input_tokens) == sorted(turn.prompt_tokens for turn in turns)
    assert set(trace.output_tokens) == {config.answer_tokens}
    device_tokens = [turn.device_hit_tokens for turn in turns]
    host_tokens = [turn.host_hit_tokens for turn in turns]
    run = trace.recording
    assert sorted(run.device_tokens) == sorted(device_tokens)
    assert sorted(run.host_tokens) == sorted(host_tokens)
    device = find_on_device(trace, DEVICE_BLOCKS - 1)
    result = replay(policy, trace, HOST_BLOCKS, device=device)
    size = config.block_size
    # Requests that run side by side share the device, as the replay's do not.
    assert result.num_block_refs == sum(turn.prompt_tokens // size for turn in turns)
