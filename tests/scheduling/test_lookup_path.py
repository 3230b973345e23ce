"""The shape of a lookup: it plans, and then it acts. These bounds only go down.

The rooms that plan are followed, `scheduling` and `search`; the tiers answer, and are
not. Calls from one file into another are one entry as long as no third file is entered
between them.
"""

import itertools
import sys

from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from tests.rigs.offload_rig import Rig, make_keys, make_request

ROOMS = ("jaxkv.search.", "jaxkv.scheduling.")  # The lower first.
MAX_FILES = {"load": 6, "load above a store": 8, "fetch": 8}
# The sources of a search are made below before a boundary adds its own.
MAX_CLIMBS = {"load": 1, "load above a store": 2, "fetch": 2}
MAX_ENTRIES = {"load": 6, "load above a store": 12, "fetch": 12}


def files_entered(call):
    """List the files that a call enters, such as "jaxkv.scheduling.plan"."""
    entered = []

    def file_of(frame):
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.startswith(ROOMS):
                return name
            frame = frame.f_back
        return None

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        is_entry = event == "call" and name.startswith(ROOMS)
        if is_entry and name not in (file_of(frame.f_back), *entered[-1:]):
            entered.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def num_climbs(entered):
    """Count the entries into a file of a higher room than the one before."""
    low = [file.startswith(ROOMS[0]) for file in entered]
    return sum(a and not b for a, b in itertools.pairwise(low))


def paths():
    """Trace a lookup that is offered a load, with and without a store, or fetches."""
    traces = {}
    for name, num_storage_blocks, num_on_host in (
        ("load", 0, 3),
        ("load above a store", 16, 3),
        ("fetch", 16, 0),
    ):
        rig = Rig(num_storage_blocks=num_storage_blocks)
        if num_on_host:
            rig.run(make_request("before", *range(num_on_host)))
            for _ in range(3):
                rig.step()
            rig.forget_device()
        if num_storage_blocks:  # If the host has blocks, the store has no others.
            keys = tuple(make_keys(*range(4 - num_on_host)))
            report = ConnectorOutput(below=(TierReport(found=keys),))
            rig.scheduler.update_connector_output(report)
        request = make_request(name, *range(5))
        answers = []
        traces[name] = files_entered(
            lambda rig=rig, request=request, answers=answers: answers.append(
                rig.scheduler.get_num_new_matched_tokens(request, 0)
            )
        )
        assert (answers[0][0] is None) == (name == "fetch"), answers
    return traces


def test_a_lookup_enters_few_files_and_climbs_seldom():
    traces = paths()
    assert traces.keys() == MAX_FILES.keys()
    for name, entered in traces.items():
        assert len(set(entered)) <= MAX_FILES[name], entered
        assert len(entered) <= MAX_ENTRIES[name], entered
        assert num_climbs(entered) <= MAX_CLIMBS[name], entered
