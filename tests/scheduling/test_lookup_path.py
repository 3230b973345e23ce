"""The shape of a lookup: it plans, and then it acts. These bounds only go down."""

from tests.scheduling.lookup_path import num_climbs, paths

MAX_FILES = {"load": 6, "load above a store": 8, "fetch": 8}
MAX_ENTRIES = {"load": 6, "load above a store": 10, "fetch": 10}


def test_a_lookup_enters_few_files_and_climbs_once():
    traces = paths()
    assert traces.keys() == MAX_FILES.keys()
    for name, entered in traces.items():
        assert len(set(entered)) <= MAX_FILES[name], entered
        assert len(entered) <= MAX_ENTRIES[name], entered
        assert num_climbs(entered) <= 1, entered
