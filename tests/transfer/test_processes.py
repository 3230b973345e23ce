"""A pool that is spread over processes; each moves its own shards."""

import re
import signal
import time

import pytest

from tests.rigs.children import Child
from tests.rigs.servers import free_port
from tests.rigs.waiting import Patience
from tests.transfer.process_cases import CASES

TIMEOUT_S = 120  # How long the processes wait for one another.
MAX_CPU_S = 300.0
LONG = pytest.mark.long


def run(
    folder,
    num_processes,
    module,
    *arguments,
    lost_processes=(),
    ends=(0,),
    max_cpu_s=MAX_CPU_S,
):
    """Run the processes of a module; return what each has printed.

    The `lost_processes` are not waited for, and may exit in any way; the others exit
    with one of the statuses `ends`, and are waited for as `Patience` says.
    """
    address = f"127.0.0.1:{free_port()}"
    children, logs = [], []
    try:
        for number in range(num_processes):
            logs.append(folder / f"{number}.log")
            words = module, address, num_processes, number, *arguments
            with logs[-1].open("w") as log:
                children.append(Child("-m", *words, stdout=log, stderr=log))
        awaited = [n for n in range(num_processes) if n not in lost_processes]
        failed = []
        patience = Patience([children[n].pid for n in awaited], max_cpu_s)
        while any(children[n].poll() is None for n in awaited):
            # One that has failed leaves the others waiting for it.
            failed = [n for n in awaited if children[n].poll() not in (None, *ends)]
            if failed or patience.is_over:
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    said = [log.read_text() for log in logs]
    # Those that have failed first: a killed one says nothing of why.
    for n in (*failed, *awaited):
        status = children[n].returncode
        assert status in ends, f"process {n} exited with {status}:\n{said[n]}"
    return said


def test_two_processes_round_trip_their_shards(tmp_path):
    for text in run(tmp_path, 2, "tests.transfer.process_cases"):
        for mode, name in CASES:
            assert f"{mode}, {name}: as it should be\n" in text


@pytest.mark.parametrize(
    ("num_processes", "end"),
    [
        (4, "die"),
        (2, "hang"),
        pytest.param(2, "stall", marks=LONG),
        pytest.param(4, "stall", marks=LONG),
        pytest.param(2, "die", marks=LONG),
    ],
)
def test_processes_agree_on_failures_and_end_when_one_is_lost(
    tmp_path, num_processes, end
):
    lost_process = num_processes - 1
    said = run(
        tmp_path,
        num_processes,
        "tests.transfer.outcome_cases",
        *(end, str(TIMEOUT_S)),
        lost_processes={lost_process},
        # Process 0 has the service that the others are connected to: when it has said
        # what is wrong and ends, jax may abort one that is about to end, too.
        ends=(0, -signal.SIGABRT, *([1] if end == "hang" else [])),
    )
    reports = [re.findall("^reported .*$", text, re.MULTILINE) for text in said]
    assert len(reports[0]) > 2
    # The same reports in the same steps, and the same digest at the end.
    assert reports[1:] == reports[:-1]
    assert re.search(r"failed_store_events=\(\d", said[0])
    assert re.search(r"failed_recving=\('r", said[0])
    for number, text in enumerate(said[:lost_process]):
        peers = re.escape(str([0] if number else [*range(1, num_processes)]))
        assert re.search(rf"processes {peers} planned other transfers", text)
        assert "store_host_blocks is 1 (" in text
        values = rf"cache_policy is lru in process {number}, and arc in process "
        assert f"{values}{lost_process}." in text
        assert text.count("a load has brought the right bytes") >= 5
        if end == "hang":
            # It waits for its own store and raises; or, if the runtime does not
            # return from issuing that store, the watchdog ends it.
            raised = "store event 1 of step 2 did not end in process 0 within"
            ended = "OffloadWorker.start in step 2 has not returned in process 0"
            assert re.search(f"^.*AgreementError.*: ({raised}|{ended})", text, re.M)
            continue
        error = re.search(r"^AgreementError after ([\d.]+) s: (.*)$", text, re.M)
        assert error, text
        expected = f"processes [{lost_process}] did not send the outcome of store"
        assert expected in error[2]
        assert float(error[1]) > 3.5  # The timeout, however busy the machine is.
