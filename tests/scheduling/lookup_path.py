"""Which files a look-up enters, in the order of its calls.

    python -m tests.scheduling.lookup_path

It prints the path of a look-up that begins a fetch from a store, and of one that is
offered a load. The rooms that plan are followed, `scheduling` and `search`; the tiers
answer, and are not. Calls from one file into another are one entry as long as no third
file is entered between them. An entry is a climb if the file is higher than the one
entered before: in a higher room, or in the same one with more files beneath it.
"""

import functools
import itertools
import sys

from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from tests.rigs.offload_rig import Rig, make_keys, make_request
from tests.test_layering import imports, read_sources

ROOMS = ("jaxkv.search.", "jaxkv.scheduling.")  # The lower first.


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
        if event == "call" and frame.f_globals["__name__"].startswith(ROOMS):
            file = file_of(frame)
            if file != file_of(frame.f_back) and [file] != entered[-1:]:
                entered.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def num_climbs(entered):
    """Count the entries into a file that is higher than the one before."""
    sources = read_sources()

    @functools.cache
    def height(file):
        room = next(room for room in ROOMS if file.startswith(room))
        below = {name for name, _ in imports(sources, file) if name.startswith(room)}
        depth = 1 + max((height(name)[1] for name in below & set(sources)), default=0)
        return ROOMS.index(room), depth

    return sum(height(a) < height(b) for a, b in itertools.pairwise(entered))


def paths():
    """Trace a look-up that begins a fetch, and one that is offered a load."""
    found = {}
    for name, num_loaded in (("fetch", 0), ("load", 3)):
        rig = Rig(num_storage_blocks=16)
        if num_loaded:
            rig.run(make_request("before", *range(num_loaded)))
            for _ in range(3):
                rig.step()
            rig.forget_device()
        # Of the second look-up's prefix the store has nothing more.
        keys = tuple(make_keys(*range(4 - num_loaded)))
        report = ConnectorOutput(below=(TierReport(found=keys),))
        rig.scheduler.update_connector_output(report)
        request = make_request(name, *range(5))
        answers = []
        found[name] = files_entered(
            lambda rig=rig, request=request, answers=answers: answers.append(
                rig.scheduler.get_num_new_matched_tokens(request, 0)
            )
        )
        assert (answers[0][0] is None) == (name == "fetch"), answers
    return found


def main():
    for name, entered in paths().items():
        files, climbs = len(set(entered)), num_climbs(entered)
        print(f"{name}: {len(entered)} entries, {files} files, {climbs} climbs")
        print("\n".join(f"    {file}" for file in entered))


if __name__ == "__main__":
    main()
