"""Random conversations, without and with offloading: the same tokens in both.

In a workload several users ask questions in several turns. They share documents, some
of their requests are aborted, and the device pool is so small that requests are
preempted. `pytest -m long` runs twelve workloads for each model, mode and policy, with
loads that requests wait for and with loads in the step itself, with a store behind the
host and without one.
"""

import itertools
import random

import pytest

from jaxkv.scheduling.whatif.auto import PolicyChoice
from jaxkv.tools.demo.request import Phase
from tests.rigs.traffic import change_in_turn
from tests.tools.demo.small_engine import MODELS, make_engine

POLICIES = ("lru", "arc", "arc_fixed", "slru", "hazard")
CASES = [
    *itertools.product(MODELS, ("eager", "lazy"), POLICIES),
    *itertools.product(["full"], ("eager", "lazy"), ["auto"]),
]


def converse(engine, seed):
    """Run a workload; return the tokens of finished requests by user and turn."""
    rng = random.Random(seed)

    def tokens(minimum, maximum):
        return rng.choices(range(256), k=rng.randint(minimum, maximum))

    documents = [tokens(12, 40) for _ in range(2)]
    transcripts = {user: list(rng.choice(documents)) for user in range(5)}
    answers = {}
    for turn in range(3):
        users = sorted(transcripts, key=lambda _: rng.random())
        # The requests to abort, and after how many tokens.
        aborts = {user: rng.randint(0, 4) for user in users if rng.random() < 0.2}
        requests = {}
        for user in users:
            transcripts[user] += tokens(1, 7)
            requests[user] = engine.submit(transcripts[user], rng.randint(1, 6))
        for _ in range(3000):
            for user, num in list(aborts.items()):
                if len(requests[user].generated) >= num:
                    engine.abort(requests[user])
                    del aborts[user]
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work, "the engine does not come to an end"
        for user, request in requests.items():
            if request.phase is Phase.FINISHED:
                answers[user, turn] = request.generated
                transcripts[user] += request.generated
    engine.drain()
    assert engine.blocks.num_free == engine.config.device_blocks - 1
    return answers


@pytest.mark.parametrize(
    ("name", "mode", "policy", "seeds", "load_in_step", "with_storage"),
    [
        ("full", "eager", "auto", range(1), True, True),
        ("hybrid", "lazy", "hazard", range(1), False, False),
        *(
            pytest.param(
                *case, range(12 * i, 12 * i + 12), *ways, marks=pytest.mark.long
            )
            for ways in itertools.product((False, True), repeat=2)
            for i, case in enumerate(CASES)
        ),
    ],
)
def test_conversations_get_the_same_tokens_with_offloading(
    monkeypatch,
    tmp_path,
    name,
    mode,
    policy,
    seeds,
    load_in_step,
    with_storage,
):
    monkeypatch.setattr(PolicyChoice, "choose", change_in_turn)
    alone = make_engine(name, 5)
    offloading = make_engine(
        name,
        5,
        num_host_blocks=60,
        mode=mode,
        cache_policy=policy,
        load_in_step=load_in_step,
        storage=str(tmp_path) if with_storage else None,
        storage_write="through",
    )
    num_answers = 0
    for seed in seeds:
        print(f"seed {seed}")
        expected = converse(alone, seed)
        assert converse(offloading, seed) == expected
        num_answers += len(expected)
    assert num_answers > 8 * len(seeds)
    assert alone.num_preemptions + offloading.num_preemptions > 0
    assert offloading.worker.blocks_loaded > 0
    assert offloading.worker.num_in_flight == 0
    if policy == "auto":
        assert offloading.offload.num_policy_changes > 8
    offloading.close()
