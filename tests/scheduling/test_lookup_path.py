"""The shape of a look-up: what it plans, and then what it does."""

from tests.scheduling.lookup_path import num_climbs, paths


def test_a_look_up_goes_down_once_to_plan_and_once_to_act():
    for entered in paths().values():
        assert len(entered) == len(set(entered)) <= 8, entered
        assert num_climbs(entered) <= 1, entered
