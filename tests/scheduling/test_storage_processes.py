"""Two processes with sharded pools share a store: each has its half of every block."""

import json

import pytest

from tests.transfer.test_processes import run


@pytest.mark.parametrize("seed", ["1", "5"])
def test_two_processes_start_again_on_their_store_and_decide_alike(tmp_path, seed):
    folder = tmp_path / "store"
    arguments = seed, "120", str(folder)
    said = run(tmp_path, 2, "tests.scheduling.storage_cases", *arguments, timeout_s=500)
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    # What they decided, and what they knew of the store and fetched from it.
    assert first["lives"] == second["lives"]
    cold, warm = first["lives"]
    assert cold["held"] == 0 < warm["held"]
    assert warm["fetched"] > 0
    counts = first["counts"]
    assert counts["block reads compared"] > 0
    assert counts["store: stored"] > 0
    # Its own shard of each of them, in both; the engines have compared their bytes.
    for said in (first, second):
        assert said["lives"][1]["read here"] > 0
    names = {path.stem for path in folder.rglob("*.[01]")}
    assert names, "nothing was written"
    for number in range(2):
        assert {path.stem for path in folder.rglob(f"*.{number}")}
