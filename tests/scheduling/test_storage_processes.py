"""Two processes with sharded pools share a store: each has its half of every block."""

import json

import pytest

from tests.transfer.test_processes import run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def run_case(folder, num_processes, store, seed, num_steps, num_lives=3):
    """Run engines in turn on a store; return the report of each process."""
    arguments = str(seed), str(num_steps), str(store), str(num_lives)
    case = "tests.scheduling.storage_cases"
    said = run(folder, num_processes, case, *arguments, max_cpu_s=1000.0)
    return [json.loads(text.splitlines()[-1]) for text in said]


def check_alike(said, store):
    """Check what two processes report of an engine and of the one after it."""
    first, second = said
    # What they decided, and what they knew of the store and fetched from it.
    assert first["lives"] == second["lives"]
    cold, warm, asking = first["lives"]
    assert cold["held"] == asking["held"] == 0 < warm["held"]
    assert cold["found"] == warm["found"] == 0 < asking["found"]
    assert warm["fetched"] > 0 < asking["fetched"], first["lives"]
    counts = first["counts"]
    assert counts["block reads compared"] > 0
    assert counts["store: stored"] > 0
    # Its own shard of each of them, in both; the engines have compared their bytes.
    for said_by_one in said:
        assert said_by_one["lives"][1]["read here"] > 0
    names = {path.stem for path in store.rglob("*.[01]")}
    assert names, "nothing was written"
    for number in range(2):
        assert {path.stem for path in store.rglob(f"*.{number}")}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory, store):
    return run_case(tmp_path_factory.mktemp("logs"), 2, store, seed=6, num_steps=24)


def test_two_processes_list_their_store_or_ask_it_and_decide_alike(of_two, store):
    check_alike(of_two, store)


@pytest.mark.long
def test_two_processes_decide_alike_for_longer(tmp_path):
    store = tmp_path / "store"
    check_alike(run_case(tmp_path, 2, store, seed=1, num_steps=120), store)


@pytest.mark.usefixtures("of_two")
def test_a_process_of_another_layout_finds_nothing_and_leaves_all_in_place(
    tmp_path, store
):
    def files_of(layout):
        return {path: path.read_bytes() for path in layout.rglob("*.[01]")}

    [of_two] = (store / "jaxkv1").iterdir()
    before = files_of(of_two)
    assert before
    # The same model and the same requests, in one process that has whole blocks.
    [said] = run_case(tmp_path, 1, store, seed=6, num_steps=24, num_lives=2)
    assert said["counts"]["block reads compared"] > 0
    assert said["counts"]["store: stored"] > 0
    assert files_of(of_two) == before
    [of_one] = {*(store / "jaxkv1").iterdir()} - {of_two}
    first, second = said["lives"]
    assert first["held"] == 0
    # It knows its own blocks alone.
    assert 0 < second["held"] <= said["counts"]["store: stored"]
    assert {path.suffix for path in of_one.rglob("*.?")} == {".0"}
