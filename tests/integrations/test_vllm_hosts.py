"""Two hosts of one real vLLM engine, on the CPU: processes of one mesh, over gloo.

The executor is tpu-inference's for several processes, with a worker on each host as
Ray's has; scheduling is asynchronous. Only the second host has faults. The answers are
compared with the answers of the same two processes without a connector.
"""

import concurrent.futures
import itertools
import json

import pytest

from tests.integrations.vllm_cpu.comparison import check_same_answers, tokens_of

HOSTS = {"model": "llama-float32", "num_blocks": 48, "num_hosts": 2}
# What the second host does, one after the other, and keeps doing.
FAULTS = ["slow", "failures"]
CONTROL = "zeros"


def engine(is_async):
    options = {"tensor_parallel_size": 2, "max_num_seqs": 8}
    return {"engine": options | {"async_scheduling": is_async}}


def run_both(lab, faults, *, seeds=1, users=20, **extra):
    """Run without a connector, and at once with one and faults; return all answers."""
    common = HOSTS | {"seeds": seeds, "users": users}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.submit(
            lab.run,
            "spoilt_pressure",
            faults=faults,
            extra={"store_batch_blocks": 6} | extra,
            **common | engine(is_async=True),
        )
        options = common | engine(is_async=False)
        expected = lab.run("spoilt_pressure", faults=[""], **options)
        return expected, found.result()


def phases_of(result, faults):
    """Return the answers under each fault."""
    answers = result["answers"]
    num = len(answers) // len(faults)
    return [{"answers": answers[n : n + num]} for n in range(0, len(answers), num)]


def check(found, min_preemptions=1):
    assert min(found["preemptions"]) >= min_preemptions, found["preemptions"]
    assert min(found["restored"]) > 0, found["restored"]
    hits = [0, *found["noted"].values()]
    assert min(after - before for before, after in itertools.pairwise(hits)) > 1000


def test_two_hosts_answer_as_without_a_connector(lab):
    """The second is slow, and then fails each second load; zeros are noticed."""
    faults = [*FAULTS, CONTROL]
    expected, found = run_both(lab, faults, users=12)
    *phases, spoilt = phases_of(found, faults)
    for phase in phases:
        check_same_answers(phase, expected)
    assert tokens_of(spoilt) != tokens_of(expected)
    check(found)
    for rank in (0, 1):
        assert f"(Worker_{rank}" in found["log"] or f"VllmWorker-{rank}" in found["log"]


@pytest.mark.long
def test_a_slow_host_holds_up_nobody_for_ever(lab):
    expected, found = run_both(lab, ["slow"], seeds=20)
    assert len(tokens_of(found)) == 1200
    check_same_answers(found, expected)


@pytest.mark.long
def test_two_hosts_are_warm_after_a_restart_from_a_store_with_their_shards(
    lab, tmp_path
):
    storage = {"storage": f"file://{tmp_path}", "storage_write": "through"}
    storage |= {"storage_deadline_s": 60, "num_cpu_blocks": 100}
    first_turns = []
    for policy in (
        {"eviction_policy": "hazard", "retention": True},
        {"eviction_policy": "auto"},
    ):
        expected, found = run_both(lab, [""], **storage | policy)
        check_same_answers(found, expected)
        check(found)
        assert "blocks from storage=0" not in found["log"].rpartition("KV Transfer")[2]
        first_turns.append(sum(answer["cached"] for answer in found["answers"][:20]))
    cold, warm = first_turns
    assert cold == 0
    assert warm > 2000


@pytest.mark.long
def test_a_killed_host_ends_the_engine_which_names_it(lab):
    options = HOSTS | engine(is_async=True) | {"seeds": 1, "users": 12, "extra": {}}
    del options["num_hosts"]
    options |= {"faults": ["death"]}
    options["variables"] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = lab.complete(
        ["spoilt_pressure"], json.dumps(options), num_processes=2, num_hosts=2
    )
    assert done.returncode
    assert "VllmWorker-1 died unexpectedly" in done.stdout
    assert "EngineDeadError" in done.stdout
