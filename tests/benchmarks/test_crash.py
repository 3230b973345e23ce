"""`python benchmarks/crash.py`: a killed engine's successor finds its blocks."""

import json
import subprocess
import sys

import pytest

from benchmarks.common import ROOT


@pytest.mark.long
def test_the_successor_of_a_killed_engine_finds_all_and_generates_the_same(tmp_path):
    figures = tmp_path / "figures.json"
    words = ["--prompts", "3", "--tokens", "100", "--rounds", "1", "--folder", tmp_path]
    script = ROOT / "benchmarks" / "crash.py"
    subprocess.run(
        [sys.executable, script, *words, "--json", figures], check=True, timeout=600
    )
    [life] = json.loads(figures.read_text())["rounds"]
    assert life["hit_tokens"] == life["full_block_tokens"] == 3 * 96
    assert life["held_bytes"] > life["kv_bytes"] > 0
