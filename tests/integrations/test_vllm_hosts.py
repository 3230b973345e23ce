"""Two hosts of one real vLLM engine, on the CPU: processes of one mesh, over gloo.

The executor is tpu-inference's for several processes, with a worker on each host as
Ray's has, or Ray's own; scheduling is asynchronous. Expected answers come from one
process without a connector.
"""

import concurrent.futures
import itertools
import json
import re
import time

import pytest

from tests.integrations.vllm_cpu.comparison import check_same_answers, tokens_of

OPTIONS = {"model": "llama-float32", "num_blocks": 48}
# The fault of each host.
HEALTHY, UNEVEN, CONTROL = ["", ""], ["slow", "failures"], ["", "zeros"]
# Ray's threads do not survive a fork.
RAY = {"TPU_MULTIHOST_BACKEND": "ray", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
MAX_ENDING_S = 120


def engine(**options):
    return {"engine": {"max_num_seqs": 8, "async_scheduling": False, **options}}


def options_of_hosts(rounds, users, extra, variables):
    """Return the options of two hosts with a chip each."""
    options = {"rounds": rounds, "users": users, "extra": extra, "variables": variables}
    return OPTIONS | options | engine(tensor_parallel_size=2, async_scheduling=True)


def run_both(lab, rounds, *, users=20, variables=None, **extra):
    """Run two hosts, and at once one process without a connector."""
    extra = {"store_batch_blocks": 6} | extra
    hosts = options_of_hosts(rounds, users, extra, variables or {})
    _, seeds = rounds[0]
    single = OPTIONS | {"rounds": [[[""], seeds]], "users": users} | engine()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        actual = pool.submit(lab.run, "spoilt_pressure", num_hosts=2, **hosts)
        return lab.run("spoilt_pressure", **single), actual.result()


def check(rounds, expected, actual):
    """Check that each round but the control answers as without a connector."""
    answers = iter(actual["answers"])
    _, all_seeds = rounds[0]
    num = len(expected["answers"]) // len(all_seeds)
    for faults, seeds in rounds:
        for seed in seeds:
            round_answers = {"answers": list(itertools.islice(answers, num))}
            same = {"answers": expected["answers"][num * seed : num * (seed + 1)]}
            if faults == CONTROL:
                assert tokens_of(round_answers) != tokens_of(same)
            else:
                check_same_answers(round_answers, same)
    assert not list(answers)
    assert min(actual["preemptions"]) > 0, actual["preemptions"]
    assert min(actual["restored"]) > 0, actual["restored"]
    hits = actual["observed"]["hits"]
    assert len(hits) == len(rounds)
    assert min(hits) > 1000, hits


def test_two_hosts_answer_as_without_a_connector(lab):
    """One is slow, and each second load of the other fails; zeros are noticed."""
    rounds = [[UNEVEN, [0]], [CONTROL, [0]]]
    expected, actual = run_both(lab, rounds, users=12)
    check(rounds, expected, actual)
    assert actual["log"].count("that 2 hosts share") == 2


@pytest.mark.long
def test_twenty_runs_answer_as_without_a_connector_and_none_hangs(lab):
    """Each is from empty tiers, the first of 300 requests."""
    runs = [[HEALTHY, [number % 5]] for number in range(19)]
    rounds = [[UNEVEN, list(range(5))], *runs, [CONTROL, [0]]]
    expected, actual = run_both(lab, rounds)
    assert len(tokens_of(expected)) == 300
    check(rounds, expected, actual)


@pytest.mark.long
def test_two_nodes_of_ray_answer_as_without_a_connector(lab):
    pytest.importorskip("ray", reason="Ray is not installed")
    rounds = [[UNEVEN, [0]], [CONTROL, [0]]]
    expected, actual = run_both(lab, rounds, users=12, variables=RAY)
    check(rounds, expected, actual)
    assert "Force using RayDistributedExecutorV2" in actual["log"]
    # The worker knows the number of hosts from Ray's bundles.
    assert "that 2 hosts share" in actual["log"]


@pytest.mark.long
def test_two_hosts_are_warm_after_a_restart_from_a_store_with_their_shards(
    lab, tmp_path
):
    storage = {"storage": f"file://{tmp_path}", "storage_write": "through"}
    storage |= {"storage_deadline_s": 60, "num_cpu_blocks": 100}
    rounds = [[HEALTHY, [0]]]
    first_turns = []
    for policy in (
        {"eviction_policy": "hazard", "retention": True},
        {"eviction_policy": "hazard"},
    ):
        expected, actual = run_both(lab, rounds, **storage | policy)
        check(rounds, expected, actual)
        assert "blocks from storage=0" not in actual["log"].rpartition("KV Transfer")[2]
        first_turns.append(sum(answer["cached"] for answer in actual["answers"][:20]))
    cold, warm = first_turns
    assert cold == 0
    assert warm > 2000


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "VllmWorker-1 died unexpectedly"),
        # The engine's node, whose rank is the first, is the second host.
        (RAY, "RayWorkerProc rank=[0] died unexpectedly"),
    ],
)
def test_a_killed_host_ends_the_engine_which_names_it(lab, variables, name):
    """Its output ends only when all processes have ended."""
    if variables == RAY:
        pytest.importorskip("ray", reason="Ray is not installed")
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | variables
    options = options_of_hosts([[["", "death"], [0]]], 12, {}, variables)
    done = lab.complete(
        ["spoilt_pressure"], json.dumps(options), num_processes=2, num_hosts=2
    )
    ended_s = time.time()
    assert done.returncode
    (died_s,) = map(float, re.findall(r"DEATH (\S+)", done.stdout))
    assert ended_s - died_s < MAX_ENDING_S
    assert name in done.stdout
    assert "EngineDeadError" in done.stdout
