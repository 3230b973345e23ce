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


def test_a_process_of_another_layout_finds_nothing_and_leaves_all_in_place(tmp_path):
    folder = tmp_path / "store"
    case = "tests.scheduling.storage_cases", "5", "60", str(folder)
    run(tmp_path, 2, *case, timeout_s=500)

    def files_of(layout):
        return {path: path.read_bytes() for path in layout.rglob("*.[01]")}

    [of_two] = (folder / "jaxkv1").iterdir()
    before = files_of(of_two)
    assert before
    # The same model and the same requests, in one process that has whole blocks.
    [said] = run(tmp_path, 1, *case, timeout_s=500)
    said = json.loads(said.splitlines()[-1])
    assert said["counts"]["block reads compared"] > 0
    assert said["counts"]["store: stored"] > 0
    assert files_of(of_two) == before
    [of_one] = {*(folder / "jaxkv1").iterdir()} - {of_two}
    first, second = said["lives"]
    assert first["held"] == 0
    # Of its own alone it has been told.
    assert 0 < second["held"] <= said["counts"]["store: stored"]
    assert {path.suffix for path in of_one.rglob("*.?")} == {".0"}
