"""Plans beside plain Python, and where offloading pays or does not."""

import dataclasses
import math
import random
import re

import numpy as np
import pytest

from jaxkv.scheduling.whatif.speeds import Speeds
from jaxkv.tools.plan.model_costs import make_model_costs, plain_costs
from jaxkv.tools.plan.plan import (
    Demand,
    Plan,
    PlanRow,
    Setting,
    Timing,
    find_returning,
    make_plan,
    recommend,
)
from jaxkv.tools.plan.report import sentence
from jaxkv.tools.replay.run import OPTIMUM, replay, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import make_trace
from tests.tools.plan.test_model_costs import config

SIZE = 16
GQA = make_model_costs(
    config("qwen2", (4, 64, 8, 2, 128, 100))
    | {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}
)


def conversations(num_requests=120, seed=1):
    return make_synthetic_trace(num_requests, seed, turn_blocks=4, block_size=SIZE)


def plan_of(
    trace, model, speeds, blocks, policies=("lru",), device_blocks=None, num_devices=1
):
    setting = Setting(trace, Timing(model, speeds, {}, num_devices))
    sizes = [num * setting.block_size for num in blocks]
    capacities = sorted(set(setting.capacities_of(sizes)))
    results = sweep(trace, policies, capacities, device_blocks=device_blocks)
    return make_plan(setting, sizes, results), results


def nearest_rank(values, percent):
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1]


def twin_row(trace, speeds, result, num_devices):
    """Compute a row of the model above, request by request."""
    saved, loads, declined, load_bytes, host_tokens, total_s = [], 0, 0, 0, 0, 0.0

    def prefill_s(first, last):
        if speeds.prefill_flops_per_s is None:
            return (last - first) / speeds.prefill_tokens_per_s
        return int(GQA.prefill_flops(first, last)) / speeds.prefill_flops_per_s

    for number in range(trace.num_requests):
        prompt = int(trace.input_tokens[number])
        local = 0 if result.device is None else int(result.device.hits[number]) * SIZE
        local = min(local, prompt)
        hit_tokens = max(min(int(result.hits_by_request[number]) * SIZE, prompt), local)
        host_tokens += hit_tokens - local
        last = max(min(hit_tokens, prompt - 1), local)
        num_bytes = int(GQA.load_bytes(local, last, num_devices))
        compute_s = prefill_s(local, last)
        total_s += prefill_s(local, prompt)
        load_s = speeds.load_latency_s + num_bytes / speeds.load_bytes_per_s
        if last == local:
            saved.append(0.0)
        elif load_s > compute_s:
            declined += 1
            saved.append(0.0)
        else:
            loads += 1
            load_bytes += num_bytes
            saved.append(compute_s - load_s)
    span_s = (max(trace.time_ms) - min(trace.time_ms)) / 1000
    # There are 4 layers; a device has one of 2 heads, and a head has 2 * 8 numbers.
    stored_block = SIZE * 4 * 2 * max(1, 2 // num_devices) * 8 * 2
    store_bytes = [int(n) * stored_block for n in result.stores_by_request]
    minutes = {}
    for time_ms, stored in zip(trace.time_ms, store_bytes, strict=True):
        minute = int((time_ms - min(trace.time_ms)) / 1000 // min(60, span_s))
        minutes[minute] = minutes.get(minute, 0) + stored
    busy_bytes_per_s = max(minutes.values()) / min(60, span_s)
    # What this trace takes on its own is more than one server computes.
    servers = max(1, math.ceil(total_s / span_s))
    return {
        "capacity_blocks": result.capacity_blocks,
        "host_tokens": host_tokens,
        "num_loads": loads,
        "num_declined": declined,
        "load_bytes": load_bytes,
        "store_bytes": sum(store_bytes),
        "saved_s": sum(saved),
        "saved_p50_s": nearest_rank(saved, 50),
        "saved_p95_s": nearest_rank(saved, 95),
        "saved_max_s": max(saved),
        "load_use": load_bytes / speeds.load_bytes_per_s / span_s / servers,
        "store_use": sum(store_bytes) / speeds.store_bytes_per_s / span_s / servers,
        "peak_store_use": busy_bytes_per_s / speeds.store_bytes_per_s / servers,
    }


@pytest.mark.parametrize(
    ("by_flops", "device_blocks", "num_devices"),
    [(True, None, 4), (True, 60, 1), (False, 60, 4)],
)
def test_rows_are_those_of_plain_python(by_flops, device_blocks, num_devices):
    trace = conversations()
    # A load of a block takes about as long as to compute it.
    speeds = Speeds(
        load_bytes_per_s=3e5,
        store_bytes_per_s=1e6,
        load_latency_s=0.02,
        prefill_tokens_per_s=None if by_flops else 1500.0,
        prefill_flops_per_s=5e8 if by_flops else None,
    )
    sizes, policies = (20, 70, 5000), ("lru", "hazard")
    plan, results = plan_of(
        trace, GQA, speeds, sizes, policies, device_blocks, num_devices
    )
    assert [(row.policy, row.size) for row in plan.rows] == [
        (policy, blocks * SIZE * GQA.kv_bytes_per_token)
        for policy in policies
        for blocks in sizes
    ]
    assert plan.rows[2].capacity_blocks == trace.num_unique_blocks
    for row, result in zip(plan.rows, results, strict=True):
        figures = dataclasses.asdict(row)
        expected = twin_row(trace, speeds, result, num_devices)
        assert {name: figures[name] for name in expected} == pytest.approx(expected)
    # What is asked for is counted once.
    demand, device = plan.demand, results[0].device
    hits = 0 if device is None else device.hits
    endless = replay("lru", trace, trace.num_unique_blocks).hits_by_request
    assert demand.returning_tokens == SIZE * np.maximum(endless - hits, 0).sum()
    assert demand.device_tokens == SIZE * np.sum(hits)
    assert demand.input_tokens == trace.input_tokens.sum()
    assert demand.span_s == (trace.time_ms[-1] - trace.time_ms[0]) / 1000
    if not by_flops:
        computed = demand.input_tokens - demand.device_tokens
        assert demand.prefill_s == pytest.approx(computed / 1500)
    assert any(row.num_declined for row in plan.rows)
    assert any(row.num_loads for row in plan.rows)


def test_what_returns_is_what_a_set_of_all_blocks_has():
    rng = random.Random(7)
    for _ in range(50):
        requests, outputs, seen, expected = [], [], set(), []
        for _ in range(rng.randrange(1, 30)):
            request = [rng.randrange(12) for _ in range(rng.randrange(6))]
            # What an output fills is there for others, but was not asked for.
            outputs.append(rng.randrange(len(request) + 1))
            prompt = request[: len(request) - outputs[-1]]
            hits = 0
            while hits < len(prompt) and prompt[hits] in seen:
                hits += 1
            expected.append(hits)
            seen |= set(request)
            requests.append(request)
        if any(requests):
            trace = make_trace("random", requests, num_output_blocks=outputs)
            assert find_returning(trace).tolist() == expected


def choose_plainly(demand, rows):
    """The rule of docs/sizing.md in other words: the reason, the size, the policy."""
    policies = [r for r in rows if r.policy != OPTIMUM]
    kept = [r for r in policies if r.store_use is None or r.store_use <= 1]
    if kept:
        best = max(r.saved_s for r in kept)
        if best > 0 and best / demand.prefill_s >= 0.01:
            columns = {
                size: {r.policy: r.saved_s for r in kept if r.size == size}
                for size in sorted({r.size for r in kept})
            }
            at = min(s for s, c in columns.items() if max(c.values()) >= 0.9 * best)
            left = list(columns[at])
            # As long as several are equal, the next smaller size decides.
            for size in sorted((s for s in columns if s <= at), reverse=True):
                saved = {name: columns[size].get(name, 0.0) for name in left}
                left = [name for name in left if saved[name] == max(saved.values())]
            return "pays", at, left[0]
    share = max(r.host_tokens for r in policies) / demand.input_tokens
    device = demand.device_tokens / demand.input_tokens
    returning = demand.returning_tokens / demand.input_tokens
    if device + returning < 0.01:
        return "nothing returns", None, None
    if returning < 0.01:
        return "device suffices", None, None
    if share < 0.01:
        return "too small", None, None
    if max(r.found_s for r in policies) / demand.prefill_s < 0.01:
        return "cheap prefill", None, None
    if max(r.saved_s for r in policies) / demand.prefill_s >= 0.01:
        return "slow stores", None, None
    return "slow loads", None, None


EMPTY = PlanRow(*[0] * len(dataclasses.fields(PlanRow)))
USES = "load_use", "store_use", "peak_store_use"


def random_case(rng):
    """Make up a demand and rows, often with ties and at the rule's borders."""
    demand = Demand(
        num_requests=10,
        input_tokens=1000,
        device_tokens=rng.choice((0, 5, 600)),
        returning_tokens=rng.choice((0, 9, 300)),
        prefill_s=rng.choice((40.0, 50.0, 100.0)),
        span_s=rng.choice((None, 100.0)),
    )
    rows = []
    is_cheap = rng.random() < 0.3
    for policy in ("lru", "arc", "hazard", OPTIMUM)[: rng.randrange(1, 5)]:
        for size in (1 << 30, 2 << 30, 4 << 30):
            uses = [None] * 3
            if demand.span_s:
                uses = [rng.choice((0.1, 0.9, 1.0, 1.2)) for _ in range(3)]
            figures = dict(zip(USES, uses, strict=True))
            figures["host_tokens"] = rng.choice((0, 9, 10, 200))
            figures["found_s"] = 0.39 if is_cheap else rng.choice((1.0, 12.0))
            figures["saved_s"] = rng.choice((0.0, 0.4, 0.5, 9.0, 9.8, 10.0, 11.0))
            row = dataclasses.replace(EMPTY, policy=policy, size=size, **figures)
            rows.append(row)
    return demand, rows


def test_the_choice_is_the_rules_on_random_rows():
    rng = random.Random(3)
    seen = set()
    for _ in range(3000):
        demand, rows = random_case(rng)
        choice = recommend(demand, rows)
        row = choice.row
        found = choice.reason, row and row.size, row and row.policy
        assert found == choose_plainly(demand, rows)
        seen.add(choice.reason)
    assert len(seen) == 7


def test_no_row_of_the_recommended_size_or_a_smaller_one_saves_more():
    rng, num_paid = random.Random(4), 0
    for _ in range(1000):
        demand, rows = random_case(rng)
        row = recommend(demand, rows).row
        if row is not None:
            num_paid += 1
            for other in rows:
                if other.size <= row.size and other.is_eligible:
                    assert other.saved_s <= row.saved_s
            text = sentence(None, Plan(demand, tuple(rows), recommend(demand, rows)))
            assert not re.search(r"with \w+ it would save \d+% more", text)
    assert num_paid > 100


FAST = Speeds(1e9, 1e9, prefill_tokens_per_s=1000.0)
PLAIN = plain_costs(1000)


def timed(requests, every_ms=10_000):
    """A trace of full blocks, and half a block of tokens after them."""
    return make_trace(
        "made up",
        requests,
        every_ms * np.arange(len(requests)),
        [len(request) * SIZE + SIZE // 2 for request in requests],
        SIZE,
    )


def test_the_traffic_of_several_servers_is_shared_by_their_links():
    requests = [[0, 1, *range(10 * i + 10, 10 * i + 18)] for i in range(40)]
    trace = timed(requests, every_ms=100)
    slow = dataclasses.replace(FAST, store_bytes_per_s=1e6, prefill_tokens_per_s=2000.0)
    plan, _ = plan_of(trace, PLAIN, slow, (20, 100))
    assert plan.demand.num_servers == 1
    assert plan.recommendation.reason == "slow stores"
    # 8 blocks of 16,000 bytes each 0.1 s.
    assert plan.rows[0].store_use == pytest.approx(1.28, rel=0.05)
    several = dataclasses.replace(slow, prefill_tokens_per_s=1000.0)
    plan, _ = plan_of(trace, PLAIN, several, (20, 100))
    assert plan.demand.num_servers == 2  # Whole ones, of 1.68.
    assert plan.rows[0].store_use == pytest.approx(1.28 / 2, rel=0.05)
    assert plan.recommendation.pays


def test_the_last_token_is_computed_in_any_case():
    trace = make_trace("whole", [[1, 2]] * 2, [0, 1000], [2 * SIZE] * 2, SIZE)
    speeds = Speeds(1e12, 1e12, prefill_tokens_per_s=1.0)
    (row,) = plan_of(trace, PLAIN, speeds, (2,))[0].rows
    assert row.host_tokens == 2 * SIZE
    assert row.saved_s == pytest.approx(2 * SIZE - 1)


def test_speeds_that_make_no_sense_are_refused():
    for changes, message in (
        ({"load_bytes_per_s": 0.0}, "load_bytes_per_s=0.0 must be a number above 0"),
        ({"load_latency_s": -1.0}, "load_latency_s=-1.0 must be"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s=nan must be"),
        ({"store_bytes_per_s": float("inf")}, "store_bytes_per_s=inf must be"),
        ({"prefill_flops_per_s": 1.0}, "Give one of prefill_tokens_per_s and prefill"),
        ({"prefill_tokens_per_s": None}, "Give one of prefill_tokens_per_s and pref"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(FAST, **changes)
