"""Two processes with sharded pools share a store: each has its half of every block."""

import json

import pytest

from tests.transfer.test_processes import run


@pytest.mark.parametrize("seed", ["0", "1"])
def test_two_processes_share_a_store_and_decide_alike(tmp_path, seed):
    folder = tmp_path / "store"
    arguments = seed, "120", str(folder)
    said = run(tmp_path, 2, "tests.scheduling.storage_cases", *arguments, timeout_s=500)
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    assert first["digests"] == second["digests"]
    counts = first["counts"]
    assert counts["block reads compared"] > 0
    assert counts["store: stored"] > 0
    names = {path.stem for path in folder.rglob("*.[01]")}
    assert names, "nothing was written"
    for number in range(2):
        assert {path.stem for path in folder.rglob(f"*.{number}")}
