"""The shape of a lookup: it plans, and then it acts. These bounds only go down."""

from tests.scheduling.lookup_path import num_climbs, paths

MOST_FILES = {"load": 6, "load above a store": 8, "fetch": 8}
MOST_ENTRIES = {"load": 6, "load above a store": 10, "fetch": 10}


def test_a_lookup_enters_few_files_and_climbs_once():
    found = paths()
    assert found.keys() == MOST_FILES.keys()
    for name, entered in found.items():
        assert len(set(entered)) <= MOST_FILES[name], entered
        assert len(entered) <= MOST_ENTRIES[name], entered
        assert num_climbs(entered) <= 1, entered
