"""Steps of several ranks, merged for one worker, and its reports, cut for each.

Without vLLM; `test_vllm_ranks` has the real one.
"""

import dataclasses
import random
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.rank_hooks import (
    Backlog,
    count_host_hits,
    sum_of_ranks,
)
from jaxkv.integrations.vllm.ranks import Ranks, RankStep, StepMetadata
from jaxkv.policies import registry
from jaxkv.policies.lru import make_lru
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    NO_REPORTS,
    ConnectorOutput,
    OffloadMetadata,
    TierBatch,
    TierMoves,
    TierProbe,
    TierReport,
)
from jaxkv.types import NO_BLOCK
from tests.integrations.test_vllm import separate_halves, serve_at_random
from tests.rigs import fake_vllm
from tests.rigs.fake_engine import (
    drop_by_runner,
    register_again,
    replace_arrays,
    unregister,
    update_in_place,
)
from tests.rigs.fake_vllm import MambaSpec, Request, make_configs
from tests.rigs.ranked_engine import RankedEngine

NUM_RANKS, NUM_BLOCKS, NUM_ROWS, ROW_BLOCKS = 3, 20, 8, 2
LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9)]


@pytest.fixture
def newest(monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")


def random_plan(rng, events, name):
    """Plan loads of some requests and stores, of rows of two device blocks."""
    if rng.random() < 0.3:
        return NO_MOVES
    sizes = tuple(rng.randrange(1, 3) for _ in range(rng.randrange(3)))
    rows = tuple(rng.sample(range(NUM_ROWS), sum(sizes)))
    stored = tuple(rng.sample(range(NUM_ROWS), rng.randrange(3)))
    blocks = rng.sample(range(1, NUM_BLOCKS), ROW_BLOCKS * (len(rows) + len(stored)))
    if blocks and rng.random() < 0.3:
        blocks[0] = NO_BLOCK
    load_event = next(events) if sizes else NO_EVENT
    names = tuple(f"{name}.{number}" for number in range(len(sizes)))
    return OffloadMetadata(
        load_event,
        tuple(blocks[: ROW_BLOCKS * len(rows)]),
        rows,
        {load_event: names} if sizes else {},
        next(events) if stored else NO_EVENT,
        tuple(blocks[ROW_BLOCKS * len(rows) :]),
        stored,
        need_flush=rng.random() < 0.1,
        load_sizes=sizes,
    )


def store_of(event):
    return OffloadMetadata(NO_EVENT, (), (), {}, event, (1,), (2,), need_flush=False)


def move(plan, device, host):
    for direction in ("store", "load"):
        rows = np.array(getattr(plan, f"{direction}_host_blocks"), int)
        blocks = np.array(getattr(plan, f"{direction}_device_blocks"), int)
        for row, targets in zip(rows, blocks.reshape(-1, ROW_BLOCKS), strict=True):
            meant = targets != NO_BLOCK
            if direction == "store":
                host[row][meant] = device[targets[meant]]
            else:
                device[targets[meant]] = host[row][meant]


def steps_of(plans, num_lost_pools=(0,) * NUM_RANKS, is_idle=False):
    """The ranks' steps, in the order and with the offsets of `DPScheduler`."""
    steps = []
    for rank, (plan, num) in enumerate(zip(plans, num_lost_pools, strict=True)):
        step = RankStep(f"sender {rank}", NUM_BLOCKS, StepMetadata(plan, num, is_idle))
        step.local_block_ids = [rank * NUM_BLOCKS]
        steps.append(step)
    return steps


def test_merged_steps_move_what_each_rank_plans_and_each_gets_its_own_reports():
    """The cache has more blocks than the ranks use."""
    rng = random.Random(5)
    shard = NUM_BLOCKS + 1
    ranks = Ranks(NUM_RANKS, NUM_ROWS)
    device = np.arange(NUM_RANKS * shard)
    host = np.full((NUM_RANKS * NUM_ROWS, ROW_BLOCKS), -1)
    devices, hosts = device.reshape(NUM_RANKS, -1).copy(), np.split(host.copy(), 3)
    events = [iter(range(10**6)) for _ in range(NUM_RANKS)]
    due = [set() for _ in range(NUM_RANKS)]
    seen = [set() for _ in range(NUM_RANKS)]
    in_flight, merged_events = set(), {}
    for step in range(400):
        plans = [random_plan(rng, ids, f"{step}.{r}") for r, ids in enumerate(events)]
        (step_of_all,) = ranks.merge(steps_of(plans), shard)
        assert (step_of_all.num_lost_pools, step_of_all.is_idle) == (0, False)
        merged = step_of_all.transfers
        assert merged.need_flush == any(plan.need_flush for plan in plans)
        move(merged, device, host)
        for rank, plan in enumerate(plans):
            move(plan, devices[rank], hosts[rank])
            due[rank].update(plan.load_event_to_reqs.get(plan.load_event, ()))
            due[rank].update({plan.store_event} - {NO_EVENT})
            merged_events[rank, plan.store_event] = merged.store_event
        in_flight |= {*merged.load_event_to_reqs.get(merged.load_event, ())}
        in_flight |= {merged.store_event} - {NO_EVENT}
        reported = {name for name in in_flight if rng.random() < 0.4}
        in_flight -= reported
        halves = [set(), set()]
        for name in reported:
            halves[rng.random() < 0.5].add(name)
        loads, stores = (
            [tuple(n for n in half if isinstance(n, kind)) for half in halves]
            for kind in (str, int)
        )
        cut = ranks.cut(ConnectorOutput(*loads, *stores))
        for rank in range(NUM_RANKS):
            part = cut.get(f"sender {rank}", NO_REPORTS)
            for name in (*part.finished_recving, *part.failed_recving):
                is_ok = name in part.finished_recving
                assert name in halves[not is_ok]
            for event in (*part.completed_store_events, *part.failed_store_events):
                is_ok = event in part.completed_store_events
                assert merged_events[rank, event] in halves[not is_ok]
            names = [name for group in dataclasses.astuple(part) for name in group]
            assert len(names) == len({*names})
            assert due[rank].issuperset(names)
            assert seen[rank].isdisjoint(names)
            seen[rank].update(names)
    np.testing.assert_array_equal(device.reshape(NUM_RANKS, -1), devices)
    np.testing.assert_array_equal(host, np.concatenate(hosts))
    ranks.cut(
        ConnectorOutput(
            tuple(n for n in in_flight if isinstance(n, str)),
            failed_store_events=tuple(n for n in in_flight if isinstance(n, int)),
        )
    )
    assert not ranks._loads
    assert not ranks._stores
    assert min(map(len, seen)) > 300


FIELDS = {"fetches": "fetched", "writes": "written", "probes": "probed"}


def random_moves(rng, events):
    """Random moves to and from the store, with events of their own kind."""
    moves = {}
    for kind in FIELDS:
        moves[kind] = tuple(
            TierProbe(next(events), (tuple(rng.randbytes(1) for _ in range(2)),), 0.1)
            if kind == "probes"
            else TierBatch(
                next(events),
                keys := tuple(rng.randbytes(1) for _ in range(rng.randrange(1, 3))),
                tuple(rng.sample(range(NUM_ROWS), len(keys))),
                tuple(rng.sample(range(100), len(keys))),
            )
            for _ in range(rng.randrange(3))
        )
    deletes = tuple(rng.randbytes(1) for _ in range(rng.randrange(2)))
    return TierMoves(deletes=deletes, **moves)


def test_each_rank_moves_its_own_blocks_to_the_store_and_gets_its_own_reports():
    rng, ranks = random.Random(7), Ranks(NUM_RANKS, NUM_ROWS)
    events = [iter(range(10**6)) for _ in range(NUM_RANKS)]
    in_flight, num_reported = {}, 0  # By field and merged event: the rank and its move.
    for _ in range(300):
        moves = [random_moves(rng, numbers) for numbers in events]
        plans = [dataclasses.replace(NO_MOVES, below=(move,)) for move in moves]
        (merged,) = ranks.merge(steps_of(plans), NUM_BLOCKS)
        (below,) = merged.transfers.below or (TierMoves(),)
        assert below.deletes == sum((move.deletes for move in moves), ())
        assert not below.is_last
        for kind, field in FIELDS.items():
            owned = [
                (r, m) for r, part in enumerate(moves) for m in getattr(part, kind)
            ]
            for batch, (rank, move) in zip(getattr(below, kind), owned, strict=True):
                expected = dataclasses.replace(move, event=batch.event)
                if kind != "probes":
                    shifted = tuple(rank * NUM_ROWS + row for row in move.upper_blocks)
                    expected = dataclasses.replace(expected, upper_blocks=shifted)
                assert batch == expected
                assert (field, batch.event) not in in_flight
                in_flight[field, batch.event] = rank, move
        ended = rng.sample(sorted(in_flight), rng.randrange(len(in_flight) + 1))
        oks = {end: (rng.random() < 0.5,) * rng.randrange(1, 3) for end in ended}
        fields = {
            name: tuple((event, oks[name, event]) for of, event in ended if of == name)
            for name in FIELDS.values()
        }
        found = TierReport(found=(b"f",) * rng.randrange(2), num_down=rng.randrange(2))
        report = dataclasses.replace(found, **fields)
        cut = ranks.cut(ConnectorOutput(below=(report,)))
        for rank in range(NUM_RANKS):
            own = {
                name: tuple(
                    (in_flight[name, event][1].event, oks[name, event])
                    for of, event in ended
                    if of == name and in_flight[name, event][0] == rank
                )
                for name in FIELDS.values()
            }
            expected = dataclasses.replace(found, **own)
            parts = () if expected == TierReport() else (expected,)
            assert cut.get(f"sender {rank}", NO_REPORTS).below == parts
        for end in ended:
            del in_flight[end]
        num_reported += len(ended)
    assert num_reported > 1000


def test_the_store_is_in_use_until_the_last_rank_has_stopped_to_use_it():
    ranks = Ranks(NUM_RANKS, NUM_ROWS)
    last = dataclasses.replace(NO_MOVES, below=(TierMoves(is_last=True),))
    told = []
    for rank in (1, 0, 2):
        plans = [last if rank == n else NO_MOVES for n in range(NUM_RANKS)]
        (merged,) = ranks.merge(steps_of(plans), NUM_BLOCKS)
        told.append([moves.is_last for moves in merged.transfers.below])
    assert told == [[], [], [True]]


def test_ranks_that_know_of_fewer_lost_pools_start_first():
    ranks = Ranks(NUM_RANKS, NUM_ROWS)
    plans = [store_of(0)] * NUM_RANKS
    merged = ranks.merge(steps_of(plans, (2, -1, 2), is_idle=True), NUM_BLOCKS)
    assert [step.num_lost_pools for step in merged] == [-1, 2]
    assert [len(step.transfers.store_host_blocks) for step in merged] == [1, 2]
    assert all(step.is_idle for step in merged)
    assert merged[0].transfers.store_event != merged[1].transfers.store_event


def test_a_step_without_a_rank_is_refused():
    ranks, steps = Ranks(NUM_RANKS, NUM_ROWS), steps_of([NO_MOVES] * NUM_RANKS)
    for wrong in (steps[:2], [*steps[:2], steps[1]]):
        with pytest.raises(RuntimeError, match="it must have them of 3 ranks, each"):
            ranks.merge(wrong, NUM_BLOCKS)


def configs(num_ranks, num_blocks=24, **options):
    """The configurations that worker and scheduler read, in this order."""
    sharding = SimpleNamespace(total_dp_size=num_ranks)
    for size, is_rank in ((num_blocks, False), (num_blocks // num_ranks, True)):
        pair = make_configs(num_blocks=num_blocks, sharding_config=sharding, **options)
        pair[1].num_blocks = size
        yield ConnectorConfig.of(*pair, is_rank=is_rank)


def test_the_bytes_of_the_host_tier_are_shared_equally_by_the_ranks():
    extra = {"num_cpu_blocks": None, "cpu_bytes_to_use": 10 * 512 + 511}
    for config in configs(4, extra=extra):  # Blocks of 512 bytes.
        assert (config.num_host_blocks, config.rank_host_blocks) == (8, 2)
        assert config.block_bytes == 512
        assert config.planned_bytes == 8 * 512
    for config in configs(2, extra={"num_cpu_blocks": 33}):
        assert (config.num_host_blocks, config.rank_host_blocks) == (32, 16)
    # Device blocks that are no multiple of the ranks: both halves count alike.
    worker, scheduler = configs(2, num_blocks=25)
    assert worker == scheduler


HOSTS = SimpleNamespace(bundle_specs=[{"TPU": 4}, {"TPU": 4}])
REFUSED = [
    ({"num_cpu_blocks": 3}, {}, "num_cpu_blocks=3 must be at least 4: a host block"),
    (
        {"num_cpu_blocks": None, "cpu_bytes_to_use": 2047},
        {},
        "=2047 must be at least 2048: a host block of all layers for each",
    ),
    ({"record": "/r"}, {}, "record='/r' cannot be used with total_dp_size=4: each"),
    ({"policy_state": "/p"}, {}, "policy_state='/p' cannot be used with total_dp_"),
    (
        {},
        {"parallel_config__placement_group": HOSTS},
        "total_dp_size=4 must be 1 on 2 hosts",
    ),
]


@pytest.mark.parametrize(("extra", "options", "message"), REFUSED)
def test_what_ranks_cannot_share_is_refused(extra, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        list(configs(4, extra=extra, **options))


def test_policies_that_need_jax_are_refused_in_forked_processes(monkeypatch):
    monkeypatch.setattr(registry, "_makers", dict(registry._makers))

    def make_pure(*sizes):
        return make_lru(*sizes)._replace(native=None)

    registry.register_policy("pure", make_pure)
    with pytest.raises(ValueError, match="eviction_policy='pure' cannot be used with"):
        list(configs(2, extra={"eviction_policy": "pure"}))
    for name in ("hazard", "arc"):
        assert len(list(configs(2, extra={"eviction_policy": name}))) == 2


def test_models_with_states_are_refused_with_ranks():
    pair = make_configs(sharding_config=SimpleNamespace(total_dp_size=2))
    spec = MambaSpec(block_size=4, mamba_cache_mode="align", page_size_bytes=512)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    pair[1].kv_cache_groups.append(group)
    with pytest.raises(ValueError, match="total_dp_size=2 cannot be used with a model"):
        ConnectorConfig.of(*pair)


SERVED = {
    "plain": {},
    "four ranks": {"num_ranks": 4},
    "asynchronous drafts": {"is_async": True, "num_drafts": 3},
    "windows": {"windows": (None, 6)},
    "larger host blocks": {"extra": {"blocks_per_chunk": 2}},
}


@pytest.mark.parametrize("seed", [0, *LONG])
@pytest.mark.parametrize("name", SERVED)
def test_every_token_read_in_any_rank_equals_the_computed_one(newest, name, seed):
    rng = np.random.default_rng(seed)
    engine = RankedEngine(**SERVED[name])
    engine.make_unreliable(rng)
    prompts = [rng.integers(0, 50, 30).tolist() for _ in range(3)]
    assert serve_at_random(engine, rng, prompts, 90) > 60
    # Of four ranks one may find nothing if transfers are slow.
    assert engine.scheduler.num_external_tokens > 0
    assert engine.scheduler.was_preempted


def ask(engine, rank, name):
    """Serve a request in a rank with an empty device; return the tokens loaded."""
    for rank_scheduler in engine.scheduler.ranks:
        rank_scheduler.pool.overwrite_all()
    before = engine.scheduler.num_external_tokens
    engine.scheduler.add(Request(name, range(18), 1), rank=rank)
    engine.run()
    engine.settle()
    return engine.scheduler.num_external_tokens - before


@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_rank_finds_on_the_host_what_it_has_stored_itself(newest, compression):
    engine = RankedEngine(extra={"compression": compression})
    engine.runner.tolerance = 0.01 if compression else 0.0
    hit_tokens = [ask(engine, rank, f"{n}") for n, rank in enumerate((0, 1, 0, 1))]
    assert hit_tokens == [0, 0, 16, 16]


@pytest.mark.parametrize(
    "route",
    [update_in_place, drop_by_runner, unregister, register_again, replace_arrays],
)
def test_no_rank_is_served_kv_of_other_weights(newest, monkeypatch, route):
    separate_halves(monkeypatch)
    engine = RankedEngine()
    assert [ask(engine, rank, f"old {rank}") for rank in (0, 1)] == [0, 0]
    route(engine)
    engine.runner.weights = 1  # The runner checks all that it reads from now on.
    for rank in (0, 1):
        ask(engine, rank, f"new {rank}")  # What is offered, fails and is computed.
    assert [ask(engine, rank, f"again {rank}") for rank in (0, 1)] == [16, 16]
    engine.check_nothing_leaked()


def test_a_rank_counts_what_its_host_has_only_when_a_request_is_routed(newest):
    engine = RankedEngine(windows=(None, 6), num_blocks=40)
    engine.scheduler.add(Request("first", range(18), 1), rank=1)
    engine.run()
    engine.settle()
    hashes = Request("again", range(18), 1).block_hashes
    for rank, num_tokens in ((0, 0), (1, 16)):
        half = engine.connectors[rank]._scheduler
        pins = half.scheduler.num_host_blocks_held
        coordinator = SimpleNamespace(
            find_longest_cache_hit=lambda hashes, max_length: (["blocks"], 0, "more")
        )
        count_host_hits(SimpleNamespace(coordinator=coordinator), half.count_hit_tokens)

        def _scheduler_worker_process(find=coordinator.find_longest_cache_hit):
            return find(hashes, 17)  # As tpu-inference's function of this name.

        assert _scheduler_worker_process() == (["blocks"], num_tokens, "more")
        # vLLM's own lookups are as before.
        assert coordinator.find_longest_cache_hit(hashes, 17) == (["blocks"], 0, "more")
        assert half.scheduler.num_host_blocks_held == pins
        half._must_reset = True
        assert _scheduler_worker_process() == (["blocks"], 0, "more")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_returning_users_who_wait_together_are_routed_by_what_they_have_to_compute(
    num_ranks,
):
    """In turns, each of all users at once; nothing is evicted."""
    rng, num_users, block = random.Random(7), 100, 16
    backlog = Backlog(num_ranks, num_users)
    lengths = [rng.randrange(100, 500) for _ in range(num_users)]
    stored = [[0] * num_users for _ in range(num_ranks)]
    num_found = num_one = 0
    for turn in range(6):
        ranks = Counter()
        before = [list(of_rank) for of_rank in stored]
        for user in rng.sample(range(num_users), num_users):
            num_tokens = lengths[user]
            usable = (num_tokens - 1) // block * block
            hits = [min(of_rank[user], usable) for of_rank in before]
            rank = backlog.route(f"{turn}.{user}", num_tokens, hits, ranks)
            ranks[rank] += 1
            num_found += hits[rank]
            num_one += max(hits)
            lengths[user] += 20
            stored[rank][user] = lengths[user] // block * block
        assert max(ranks.values()) < 2 * num_users / num_ranks
        names = [f"{turn}.{user}" for user in range(num_users)]
        backlog.record_step(dict.fromkeys(names, 1000), ())
    assert num_found > 0.95 * num_one > 100_000


def test_a_request_is_routed_by_backlogs_and_eight_times_its_hits():
    backlog, ranks = Backlog(2, 3), Counter()

    def route(name, num_tokens, *hits):
        rank = backlog.route(name, num_tokens, hits, ranks)
        ranks[rank] += 1
        return rank

    assert route("first", 100, 0, 0) == 0
    assert route("second", 60, 0, 0) == 1
    assert route("third", 60, 4, 0) == 1  # 100 less 32 against 60.
    backlog.record_step({"first": 90}, ())
    assert route("fourth", 120, 0, 0) == 0  # 10 against 120.
    backlog.record_step({"fourth": 1}, ("first", "third"))
    assert route("fifth", 60, 0, 0) == 1  # 119 against 60.
    # Rank 1 has its three requests, and rank 0 two.
    assert route("sixth", 600, 0, 590) == 0
    assert route("seventh", 600, 0, 590) == 1  # Both are full.
    assert route("eighth", 120, 80, 0) == 0  # 719 less 640 against 130.


def test_requests_of_idle_ranks_are_spread():
    backlog = Backlog(3, 8)
    ranks = []
    for number in range(6):
        ranks.append(backlog.route(f"{number}", 10, (0, 0, 0), Counter()))
        backlog.record_step({f"{number}": 10}, ())
    assert ranks == [0, 1, 2] * 2


def test_counts_of_ranks_are_added_up_and_gauges_stay_until_they_change():
    held, stores = "jaxkv:kv_offload_host_blocks_held", "jaxkv:kv_offload_blocks_stored"
    last = {}

    def report(num_stored, num_held):
        counters, gauges = {stores: {"": num_stored}}, {held: {"": {"": num_held}}}
        return {"counters": counters, "gauges": gauges, "samples": {"delay": [1.0]}}

    both = sum_of_ranks([report(3, 5), report(4, 6)], last)
    assert both.data == {
        "counters": {stores: {"": 7}},
        "gauges": {held: {"": {"0": 5, "1": 6}}},
        "samples": {"delay": [1.0, 1.0]},
    }
    total = sum_of_ranks([None, report(1, 9)], last)
    assert total.data["counters"] == {stores: {"": 1}}
    assert total.data["gauges"] == {held: {"": {"0": 5, "1": 9}}}
    assert total.reduce()["host blocks held"] == 14
    assert sum_of_ranks([None, None], last).is_empty()
