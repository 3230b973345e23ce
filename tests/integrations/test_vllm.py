"""vLLM's connector, driven as vLLM drives it; see `fake_vllm` and `fake_engine`."""

import itertools
import json
import logging
import pickle
import random
import re
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest

from jaxkv import OffloadMetadata, OffloadScheduler, Retention, TransferEngine
from jaxkv.integrations.vllm import tokens
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.events import HostEvents
from jaxkv.integrations.vllm.ranks import StepMetadata
from jaxkv.integrations.vllm.scheduler import (
    PrefillRate,
    VllmRequest,
)
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.scheduling.protocol import NO_REPORTS, ConnectorOutput
from jaxkv.scheduling.worker.worker import PlanMismatchError
from jaxkv.search.groups import FullAttention
from jaxkv.tools.replay.traces import read_trace
from jaxkv.transfer import limits
from tests.rigs import fake_vllm
from tests.rigs.fake_engine import (
    CHANGES,
    LOSSES,
    Engine,
    drop_by_runner,
    reference,
    register_again,
    replace_arrays,
    reset_connector,
    reset_device,
    unregister,
    update_in_place,
    write_arrays,
)
from tests.rigs.fake_vllm import (
    BLOCK_SIZE,
    BlockRemoved,
    BlockStored,
    KVConnectorRole,
    Request,
    create_connector,
    make_configs,
)


@pytest.fixture(params=["0.19", "0.32"])
def generation(request, monkeypatch):
    fake_vllm.install(monkeypatch, request.param)
    return request.param


@pytest.fixture
def newest(monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")


TOKENS = 4 * BLOCK_SIZE  # In full blocks of `range(18)`.
NUMBERS = itertools.count()


def ask(engine, prompt=range(18), num_output=3, **options):
    """Serve a request; return the tokens that the host supplied."""
    before = engine.scheduler.num_external_tokens
    request = Request(f"asked {next(NUMBERS)}", prompt, num_output, **options)
    engine.run(request)
    assert request.tokens == reference(prompt, num_output)
    return engine.scheduler.num_external_tokens - before


def forget_device(engine):
    engine.scheduler.pool.overwrite_all()
    engine.runner.kv_caches = [cache * 0 for cache in engine.runner.kv_caches]


def make_warm_engine(**options):
    """An engine that has range(18) on the host only."""
    engine = Engine(**options)
    ask(engine, num_output=1)
    forget_device(engine)
    return engine


def test_a_compressed_prompt_comes_back_nearly_as_it_was(newest):
    engine = make_warm_engine(extra={"compression": "int8"}, windows=(None, 6))
    engine.runner.tolerance = 0.01
    assert ask(engine) == TOKENS
    engine.runner.tolerance = 0.0
    forget_device(engine)
    with pytest.raises(AssertionError, match=r"asked \d+, token"):
        ask(engine)


def test_a_worker_refuses_runners_that_it_cannot_serve(newest, monkeypatch):
    """It cannot restore dropped tokens, or its heads have no scales."""
    monkeypatch.setattr(tokens, "missing_from_vllm", lambda: [])
    is_async = {"scheduler_config__async_scheduling": True}
    for options, message in [
        (is_async, r"SimpleNamespace\._pre_async_results is missing"),
        ({"extra": {"compression": "int8"}}, r"axes .* and one is \[24, 2, 8, 4\]"),
    ]:
        config, cache_config = make_configs(**options)
        worker = create_connector(config, KVConnectorRole.WORKER, cache_config)
        caches = [np.zeros((24, 2, 8, BLOCK_SIZE), np.float16)]
        runner = SimpleNamespace(kv_caches=caches)
        with pytest.raises(ValueError, match=message):
            worker.register_runner(runner)
        assert vars(runner) == {"kv_caches": caches}


def test_an_engine_that_cannot_be_served_does_not_start(newest, tmp_path):
    path = tmp_path / "nowhere" / "requests.jsonl"
    with pytest.raises(FileNotFoundError, match=r"record to .*nowhere/requests"):
        Engine(extra={"record": str(path)})


@pytest.mark.parametrize("windows", [(None,), (6, None)], ids=["full", "hybrid"])
def test_requests_are_recorded(newest, tmp_path, windows):
    path = tmp_path / "requests.jsonl"
    engine = make_warm_engine(windows=windows, extra={"record": str(path)})
    ask(engine, num_output=7)
    engine.scheduler.connector.shutdown()
    trace = read_trace(path)
    assert trace.block_size == BLOCK_SIZE
    assert trace.input_tokens.tolist() == [18, 18]
    assert trace.output_tokens.tolist() == [1, 7]
    assert trace.num_asked.tolist() == [4, 4]
    assert trace.num_blocks.tolist() == [4, 6]  # The last token has no KV.
    assert trace.ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    run = trace.recording
    assert run.device_tokens.tolist() == [0, 0]
    assert run.host_tokens.tolist() == [0, 16]
    assert (run.policy, run.host_blocks, run.device_blocks) == ("lru", 32, 23)


SERVED = {
    "0.19": dict(generation="0.19"),
    "0.32": dict(generation="0.32"),
    "asynchronous": dict(generation="0.32", is_async=True),
    "drafts": dict(generation="0.32", num_drafts=3),
    "asynchronous drafts": dict(generation="0.32", is_async=True, num_drafts=3),
    "draft model": dict(generation="0.32", num_drafts=3, drafts="eagle3"),
    "hybrid": dict(generation="0.32", windows=(None, 6)),
    "stored together": dict(generation="0.32", extra={"store_batch_blocks": 6}),
    "larger host blocks": dict(generation="0.32", extra={"blocks_per_chunk": 2}),
}


LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9)]


def serve_at_random(engine, rng, prompts, num_requests, run=Engine.run):
    """Serve requests, some preempted or aborted; return how many were answered."""
    served = []
    for number in range(num_requests):
        head = prompts[rng.integers(len(prompts))][: rng.integers(1, 31)]
        prompt = head + rng.integers(0, 50, rng.integers(0, 5)).tolist()
        request = Request(f"r{number}", prompt, int(rng.integers(1, 12)))
        served.append((request, prompt))
        engine.scheduler.add(request)
        for _ in range(rng.integers(0, 6)):
            engine.step()
        if rng.random() < 0.1:
            engine.scheduler.reset_running()
        if rng.random() < 0.1:
            alive = engine.scheduler.requests.values()
            alive = [request for request in alive if request.status != "ABORTED"]
            if alive:
                engine.scheduler.abort(alive[rng.integers(len(alive))].request_id)
    run(engine)
    engine.check_nothing_leaked()
    done = [(r, prompt) for r, prompt in served if r.status != "ABORTED"]
    for request, prompt in done:
        assert request.tokens == reference(prompt, request.max_tokens - len(prompt))
    return len(done)


@pytest.mark.parametrize("seed", [0, *LONG])
@pytest.mark.parametrize("name", SERVED)
def test_every_token_read_equals_the_computed_one(name, seed, monkeypatch):
    options = SERVED[name]
    fake_vllm.install(monkeypatch, options["generation"])
    rng = np.random.default_rng(seed)
    engine = Engine(**options)
    engine.make_unreliable(rng)
    prompts = [rng.integers(0, 50, 30).tolist() for _ in range(3)]
    assert serve_at_random(engine, rng, prompts, 60) > 40
    assert engine.scheduler.num_external_tokens > 0
    assert engine.scheduler.was_preempted
    assert not engine.runner.connector._worker._targets


@pytest.mark.parametrize("factor", [1, 2])
def test_with_a_draft_model_the_last_block_that_is_found_is_computed(newest, factor):
    extra = {"blocks_per_chunk": factor}
    engine = make_warm_engine(num_drafts=2, drafts="eagle3", extra=extra)
    assert ask(engine, num_output=9) == TOKENS - factor * BLOCK_SIZE
    forget_device(engine)
    # At its end, all full blocks of the answer are stored.
    answered = reference(range(18), 9)
    full = (len(answered) - 1) // (factor * BLOCK_SIZE) - 1
    assert ask(engine, [*answered, 1, 1]) == full * factor * BLOCK_SIZE
    forget_device(engine)
    assert ask(engine, range(factor * BLOCK_SIZE + 1)) == 0


def test_with_a_draft_model_the_last_full_block_is_not_stored_while_it_decodes(newest):
    engine = Engine(num_drafts=2, drafts="eagle3")
    request = Request("decodes", range(18), 12)
    engine.scheduler.add(request)
    num_held = []
    while engine.scheduler.has_requests():
        engine.step()
        num_full = request.num_computed_tokens // BLOCK_SIZE
        stats = engine.offload_scheduler.stats
        num_held.append((num_full, stats.num_stored))
    assert any(full > 4 for full, _ in num_held)
    assert all(stored < full for full, stored in num_held[:-1] if full > 4)
    engine.run()
    assert engine.offload_scheduler.stats.num_stored == 29 // BLOCK_SIZE


def fail_loads(engine):
    """Make all loads fail and write garbage."""

    class Never:
        def random(self):
            return 0.9  # late once, then always failed

    half = engine.runner.connector._worker
    engine.make_unreliable(Never())
    half._worker._failure_rate = 1.0


def test_the_blocks_of_a_failed_load_are_reported_and_computed_again(generation):
    engine = make_warm_engine(generation=generation)
    fail_loads(engine)
    reported = []
    take = engine.runner.connector.get_block_ids_with_load_errors
    engine.runner.connector.get_block_ids_with_load_errors = lambda: (
        reported.append(take()) or reported[-1]
    )
    request = Request("again", range(18), 3)
    engine.scheduler.add(request)
    engine.step()
    (table,) = engine.scheduler.tables["again"]
    loading = {block.block_id for block in table}
    engine.run()
    assert loading in reported
    assert request.tokens == reference(range(18), 3)
    engine.check_nothing_leaked()
    # The blocks that could not be loaded are no hits until they are stored again.
    assert engine.scheduler.num_external_tokens == TOKENS


def test_a_failed_load_gives_up_its_place_and_other_loads_wait_for_it(newest):
    """vLLM 0.32 could wait indefinitely for blocks of requests further back.

    It holds blocks back for a load next to a failed one, and may reach neither.
    """
    engine = make_warm_engine()
    ask(engine, range(20, 38))
    forget_device(engine)
    fail_loads(engine)
    connector, offload = engine.scheduler.connector, engine.offload_scheduler
    answers, looked_up = [], []
    match, find = (half.get_num_new_matched_tokens for half in (connector, offload))

    def match_another_too(*arguments):
        answer, second = match(*arguments), Request("other", range(20, 38), 3)
        answers.append((answer, match(second, 0)))
        connector.request_finished_all_groups(second, ([],))
        return answer

    connector.get_num_new_matched_tokens = match_another_too
    offload.get_num_new_matched_tokens = lambda request, num_computed_tokens: (
        looked_up.append(request.request_id) or find(request, num_computed_tokens)
    )
    engine.run(Request("again", range(18), 3))
    offer, later, nothing = (TOKENS, True), (None, False), (0, False)
    assert answers == [(offer, offer), (later, later), (nothing, later)]
    assert looked_up.count("again") == 1, "it is offered no second load"
    assert match(Request("other", range(20, 38), 3), 0) == offer


def test_a_remote_decode_is_answered_with_the_parameters_to_forward(newest):
    connector = Engine().scheduler.connector
    for params, response in [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False}, None),
        (
            {"do_remote_decode": True, "do_remote_prefill": False},
            {"do_remote_prefill": True, "do_remote_decode": False},
        ),
    ]:
        request = Request("one", range(9), 1)
        request.kv_transfer_params = params
        assert connector.request_finished(request, []) == (False, response), params


def test_a_response_reports_what_its_request_found(newest):
    engine = make_warm_engine(extra={"report_requests": True})
    for device, host in ((0, TOKENS), (TOKENS, 0)):
        before = set(engine.scheduler.response_params)
        ask(engine, num_output=1)
        (name,) = engine.scheduler.response_params.keys() - before
        report = engine.scheduler.response_params[name]["jaxkv"]
        assert report.pop("waited_s") >= 0
        assert report == {
            **{"tokens": 18, "device": device, "host": host},
            "computed": 18 - TOKENS,
        }
    plain = Engine()
    ask(plain)
    assert set(plain.scheduler.response_params.values()) == {None}


def test_a_response_explains_what_its_request_was_offered(newest):
    engine = make_warm_engine(extra={"report_requests": True})

    def answer(prompt=range(18), **attributes):
        request = Request(f"asked {next(NUMBERS)}", prompt, 1)
        vars(request).update(attributes)
        engine.run(request)
        return engine.scheduler.response_params[request.request_id]["jaxkv"]

    hit = answer(kv_transfer_params={"explain": True})
    head, _, *rows = hit.pop("explain").splitlines()
    assert head.endswith(f"18 tokens, 0 computed, {TOKENS} more offered.")
    assert rows == [f"0      0-{TOKENS // 4 - 1}     0-{TOKENS - 1}    host"]
    assert hit["host"] == TOKENS
    missed = answer(range(50, 68), kv_transfer_params={"explain": True})["explain"]
    assert "0 more offered." in missed
    assert missed.endswith("none")
    whole = {"kv_transfer_params": {"explain": True}, "skip_reading_prefix_cache": True}
    assert answer(**whole)["explain"] == "It must compute its whole prompt."
    assert "explain" not in answer(kv_transfer_params={"explain": False})


def test_hybrid_models_are_refused_on_vllm_019(monkeypatch):
    fake_vllm.install(monkeypatch, "0.19")
    with pytest.raises(ValueError, match="2 KV cache groups need a vLLM that calls"):
        Engine(generation="0.19", windows=(None, 6))


def test_a_policy_gets_the_reason_why_a_request_stopped():
    for status, stop_reason, stop in [
        ("FINISHED_STOPPED", None, "end_turn"),
        ("FINISHED_STOPPED", 128008, "tool_use"),
        ("FINISHED_STOPPED", "</call>", "tool_use"),
        ("FINISHED_LENGTH_CAPPED", None, None),
        ("FINISHED_ABORTED", None, None),
    ]:
        status = SimpleNamespace(name=status)
        request = SimpleNamespace(status=status, stop_reason=stop_reason)
        assert VllmRequest(request, 1).stop == stop, (status, stop_reason)


RIGHT = {"retention": {"priority": 80, "half_life_s": 600}}
KEPT = Retention(80, half_life_s=600)
LIMITS = ("max_offload_tokens", "max_load_tokens")
# A client's parameters, the field and value read, and the logged warning.
WISHES = [
    (RIGHT, "retention", KEPT, None),
    ({"retention": {"priority": 100, "ttl_s": 1}}, "retention", None, "from 0"),
    ({"retention": {"prio": 1}}, "retention", None, "did you mean priority"),
    ({"retention": 80}, "retention", None, "80 must be a mapping, of"),
    ({"retention": None}, "retention", None, None),
    ({}, "retention", None, None),
    (None, "retention", None, None),
    ("unlike what vLLM passes", "retention", None, None),
    *[({name: num}, name, num, None) for name in LIMITS for num in (0, 16, None)],
    *[
        ({name: value}, name, None, f"['{name}'] is ignored")
        for name in LIMITS
        for value in (-1, True, "16", 1.5)
    ],
    *[({"kind": num}, "kind", num, None) for num in (0, 255, None)],
    *[({"kind": x}, "kind", None, "from 0 to 255") for x in (-1, 256, True, "1")],
    ({"do_remote_prefill": True}, "remote_prefill", True, None),
    ({"do_remote_prefill": False}, "remote_prefill", False, None),
    ({"do_remote_prefill": None}, "remote_prefill", False, None),
    ({"do_remote_prefill": 1}, "remote_prefill", False, "1 must be true or false"),
]


def test_a_client_sets_limits_retention_kind_and_remote_prefill(caplog):
    """A client's mistake is logged, and does not end the engine."""
    for params, name, value, warning in WISHES:
        request = SimpleNamespace(request_id="r0", kv_transfer_params=params)
        caplog.clear()
        assert getattr(VllmRequest(request, 1), name) == value, params
        assert (warning or "") in caplog.text, params
        assert bool(caplog.records) == (warning is not None), params


def test_a_routers_hint_sets_the_retention(caplog):
    """A client's own parameters have priority over hints."""

    def retention(*actions, **fields):
        names = "action_type", "action_version", "payload"
        named = [SimpleNamespace(**dict(zip(names, a, strict=True))) for a in actions]
        hints = SimpleNamespace(actions=named)
        request = SimpleNamespace(request_id="r0", kv_hints=hints, **fields)
        return VllmRequest(request, 1).retention

    kept = ("kv.retain", "1.2", {"ttl_s": 9})
    assert retention(("kv.fetch", "1.0", {}), kept) == Retention(ttl_s=9)
    assert retention(kept, kv_transfer_params=RIGHT) == KEPT
    assert retention(("kv.retain", "2.0", {"ttl_s": 9})) is None
    assert retention() is None
    assert not caplog.records
    assert retention(("kv.retain", "1.0", {"seconds": 9})) is None
    assert "the hint kv.retain is ignored: 'seconds' must be one" in caplog.text


def test_blocks_that_a_store_is_about_to_free_are_waited_for(newest):
    engine = Engine(num_blocks=11, extra={"num_cpu_blocks": 32})
    half = engine.runner.connector._worker
    poll, half.poll = half.poll, lambda: NO_REPORTS
    engine.scheduler.add(Request("first", range(18), 1))
    while engine.scheduler.requests:
        engine.step()
    second = Request("other", range(100, 118), 16)  # At last it has 9 blocks of the 10.
    engine.scheduler.add(second)
    for _ in range(20):
        engine.step()
    assert engine.scheduler.running == [second]
    assert second.num_tokens < second.max_tokens
    assert engine.scheduler.num_waits > 5
    half.poll = poll
    engine.run()
    assert second.tokens == reference(range(100, 118), 16)
    assert not engine.scheduler.was_preempted
    assert not engine.scheduler.connector.has_pending_block_frees()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_reset_of_the_host_removes_its_blocks_and_no_others(newest, windows):
    """A reader of vLLM's events takes `AllBlocksCleared` for all tiers."""
    engine = Engine(windows=windows, extra={"num_cpu_blocks": 32})
    engine.run(*(Request(f"r{n}", range(n, n + 30), 1) for n in range(3)))
    connector, on_host = engine.scheduler.connector, Counter()

    def learn_copies(events):
        for event in events:
            assert event.medium == "CPU"
            copies = [(event.group_idx, block) for block in event.block_hashes]
            (on_host.update if type(event) is BlockStored else on_host.subtract)(copies)

    learn_copies([*engine.events, *connector.take_events()])
    num_held = connector._scheduler.scheduler.num_host_blocks_held
    assert sum((+on_host).values()) == num_held > 0
    assert connector.reset_cache()
    learn_copies(connector.take_events())
    assert not any(on_host.values())
    assert engine.runner.connector.reset_cache() is None


def learn(picture, events):
    """Update a router's record of each block: parent, tokens, adapter, extra keys."""
    for event in events:
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        assert len(event.extra_keys) == len(event.block_hashes)
        parent = event.parent_block_hash
        for n, key in enumerate(event.block_hashes):
            start, size = n * event.block_size, event.block_size
            tokens = event.token_ids[start : start + size]
            lora = event.lora_id, event.lora_name
            picture[event.group_idx, key] = parent, tokens, lora, event.extra_keys[n]
            parent = key


BLOCK_LAYOUTS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"windows": (None, 6)},
        {"extra": {"blocks_per_chunk": 2, "num_cpu_blocks": 16}},
    ],
)


@BLOCK_LAYOUTS
def test_a_router_can_place_the_host_events_by_tokens_parents_and_groups(
    newest, options
):
    engine = Engine(**options)
    num_blocks = options.get("extra", {}).get("blocks_per_chunk", 1)
    lora = SimpleNamespace(adapter_id=7, name="my-adapter")
    requests = [
        Request("one", range(19), 14),  # Its answer fills blocks, too.
        Request("longer", range(33), 1),
        Request("adapted", range(18), 1, lora=lora, salt="tenant"),
    ]
    for request in requests:
        engine.run(request)
    picture, num_groups = {}, len(options.get("windows", (None,)))
    stored = [event for event in engine.events if isinstance(event, BlockStored)]
    learn(picture, stored)
    assert {(e.medium, e.locality, e.block_size) for e in stored} == {
        ("CPU", "LOCAL", num_blocks * BLOCK_SIZE)
    }
    assert {group for group, _ in picture} == set(range(num_groups))
    expected = {}
    for request in requests:
        # A host block is found by the hash of its last device block only.
        hashes = request.block_hashes[num_blocks - 1 :: num_blocks]
        is_adapted, size = request.lora_request is not None, num_blocks * BLOCK_SIZE
        for n, key in enumerate(hashes):
            expected[key] = (
                hashes[n - 1] if n else None,
                request.tokens[n * size : (n + 1) * size],
                (7, "my-adapter") if is_adapted else (None, None),
                ("my-adapter", "tenant")[: 1 if n else 2] if is_adapted else None,
            )
    assert all(seen == expected[key] for (_, key), seen in picture.items())
    found = requests[1].block_hashes[num_blocks - 1 : 8 : num_blocks]
    assert {key for _, key in picture} >= set(found)
    assert {(e.group_idx, e.kv_cache_spec_kind) for e in stored} == {
        (0, "full_attention"),
        (1, "sliding_window"),
    } - ({(1, "sliding_window")} if num_groups == 1 else set())
    # Removals name the same blocks, with the group.
    prompts = range(100, 130), range(200, 230), range(300, 330), range(400, 430)
    engine.run(*(Request(f"r{n}", prompt, 1) for n, prompt in enumerate(prompts)))
    stored = [event for event in engine.events if isinstance(event, BlockStored)]
    learn(picture, stored)
    removed = [event for event in engine.events if isinstance(event, BlockRemoved)]
    assert removed
    for event in removed:
        assert all((event.group_idx, key) in picture for key in event.block_hashes)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("adapter", [b"", bytes(32)])
def test_keys_and_events_follow_hashes_that_vllm_rewrites(newest, num_groups, adapter):
    """Keys of a dropped history must not be looked up."""
    rng = random.Random(7)
    groups = [FullAttention(BLOCK_SIZE)] * num_groups
    events = HostEvents(groups)
    request = Request("streams", range(6), 9)
    tracked = VllmRequest(request, num_groups, events, adapter)
    num_shorter = 0
    for _ in range(200):
        num_tokens, num_keys = request.num_tokens, len(tracked.block_keys)
        if rng.random() < 0.5:
            request.append(rng.randrange(3))
        else:
            request.num_computed_tokens = rng.randint(num_tokens // 2, num_tokens)
            request.stream(rng.choices(range(3), k=rng.randrange(8)), 9)
        num_shorter += len(request.block_hashes) < num_keys
        fresh = VllmRequest(request, num_groups, None, adapter)
        assert list(tracked.block_keys) == list(fresh.block_keys)
        assert len(tracked.block_keys) == len(request.block_hashes)
        by_group = list(map(list, tracked.block_keys_by_group))
        assert by_group == list(map(list, fresh.block_keys_by_group))
        for keys in by_group if num_groups > 1 else [tracked.block_keys]:
            for n, key in enumerate(keys):
                block = events._catalog.find(key)
                start = n * BLOCK_SIZE
                tokens = request.tokens[start : start + BLOCK_SIZE]
                assert np.frombuffer(block.tokens, "<u4").tolist() == tokens
                assert block.parent == (keys[n - 1] if n else None)
    assert num_shorter > 20


@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=["full", "hybrid"])
def test_a_request_whose_input_streams_loads_its_own_kv(newest, windows):
    """It must not load KV of the token that vLLM drops when input follows."""
    # Blocks are stored in batches, and their keys are read then.
    engine = Engine(windows=windows, extra={"store_batch_blocks": 8})
    prompt, streamed = range(7), [50, 51, 52]
    request = Request("streams", prompt, 1)
    request.inputs.append((streamed, 20))
    engine.scheduler.add(request)
    while request.inputs:
        before = request.tokens[:8]  # With the token that is dropped.
        engine.step()
    assert request.tokens[:10] == [*prompt, *streamed]
    second = Request("other", [*before, 1], 1)
    engine.scheduler.add(second)
    while second.request_id in engine.scheduler.requests or (
        engine.offload_scheduler.has_pending_stores()
    ):
        engine.step()
    assert request.status == "RUNNING"
    engine.scheduler.reset_running()
    forget_device(engine)
    engine.run()  # The runner has compared all it read with the computed values.
    assert engine.scheduler.num_external_tokens > 0
    assert request.tokens == reference([*prompt, *streamed], 20)
    engine.check_nothing_leaked()


def test_a_worker_with_other_settings_than_its_scheduler_is_refused(newest):
    engine = Engine()
    engine.runner.connector._worker._worker.settings["compression"] = "int8"
    text = "compression is int8 in this worker, and None in its scheduler"
    with pytest.raises(PlanMismatchError, match=text):
        engine.run(Request("first", range(18), 1))


def test_without_events_nothing_is_kept_for_them(newest):
    events = SimpleNamespace(enable_kv_cache_events=False)
    config, cache_config = make_configs(kv_events_config=events)
    connector = create_connector(config, KVConnectorRole.SCHEDULER, cache_config)
    assert connector._scheduler._events is None
    assert connector.take_events() == []


def test_a_block_takes_a_few_bytes_of_metadata():
    """Its two block ids, pickled."""

    def size(num):
        ids = tuple(range(1000, 1000 + num))
        meta = OffloadMetadata(
            *(1, ids, ids, {1: ("request",)}, 1, ids, ids, False), load_sizes=(num,)
        )
        return len(pickle.dumps(StepMetadata(meta, 0)))

    assert size(0) < 400
    assert (size(3000) - size(1000)) / (2 * 2000) < 8


def refill_by_runner(engine):
    """Make new KV caches after other code has deleted the arrays."""
    engine.runner.kv_caches.clear()
    engine.runner.kv_cache_manager.reinitialize_kv_cache()


ROUTES = [*LOSSES, refill_by_runner, replace_arrays, write_arrays]


def separate_halves(monkeypatch):
    """Hide the worker from the scheduler's half, as in a process of its own."""
    import jaxkv.integrations.vllm.scheduler as scheduler

    monkeypatch.setattr(scheduler, "LOST_POOLS", {})
    monkeypatch.setattr(scheduler, "WORKERS", {})


@pytest.fixture(params=["one process", "two processes"])
def apart(request, monkeypatch, newest):
    """Return whether only worker reports inform the scheduler of a lost pool."""
    if request.param == "two processes":
        separate_halves(monkeypatch)
    return request.param == "two processes"


@pytest.mark.parametrize("route", ROUTES)
def test_the_kv_of_other_weights_is_never_served(apart, route):
    windows = [(None,), (None, 6)][ROUTES.index(route) % 2]
    engine = make_warm_engine(windows=windows, num_blocks=40)
    engine.scheduler.pool.overwrite_all()  # reset_prefix_cache()
    route(engine)
    engine.runner.weights = 1  # The runner checks all that it reads from now on.
    num_found = ask(engine)
    if not apart:
        assert num_found == 0, "it was not even offered"
    forget_device(engine)
    assert ask(engine) == TOKENS  # Of the new weights.
    engine.check_nothing_leaked()


def drop_unreported(engine):
    """Delete the arrays without a call of vLLM's, with loads in flight."""
    for cache in engine.runner.kv_caches:
        cache.delete()
    refill_by_runner(engine)


@pytest.mark.parametrize(
    "route",
    [*CHANGES, drop_by_runner, unregister, register_again, drop_unreported],
)
def test_a_load_in_flight_when_weights_change_is_not_served(apart, route):
    engine = make_warm_engine(num_blocks=40)
    release = hold_reports(engine)
    loading = Request("loading", range(18), 3)
    engine.scheduler.add(loading)
    engine.step()
    assert engine.runner.connector._worker._worker.num_in_flight
    engine.scheduler.pool.overwrite_all()
    route(engine)
    engine.runner.weights = 1
    release()
    engine.run()
    assert loading.tokens == reference(range(18), 3)
    engine.check_nothing_leaked()


@pytest.mark.parametrize("route", [reset_connector, reset_device])
def test_a_load_that_delays_a_reset_fails_and_is_computed(newest, route):
    engine = make_warm_engine()
    release = hold_reports(engine)
    request = Request("again", range(18), 3)
    engine.scheduler.add(request)
    engine.step()
    connector = engine.scheduler.connector
    with pytest.raises(AssertionError):
        route(engine)
    assert connector.get_num_new_matched_tokens(Request("b", range(18), 1), 0)[0] == 0
    release()
    engine.runner.weights = 1
    engine.run()
    assert request.tokens == reference(range(18), 3)
    removed = [event for event in engine.events if isinstance(event, BlockRemoved)]
    assert len(removed[-1].block_hashes) == 4
    assert not connector._scheduler._must_reset


def hold_reports(engine):
    """Hold back all reports of transfers; return a call that releases them."""
    worker = engine.runner.connector._worker._worker
    worker.poll = ConnectorOutput
    return partial(delattr, worker, "poll")


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_device_reset_succeeds_while_stores_are_in_flight(newest, windows):
    """Right after an answer, no further step completes them."""
    engine = Engine(windows=windows, num_blocks=40)
    release = hold_reports(engine)
    engine.scheduler.add(Request("first", range(18), 1))
    while engine.scheduler.requests:
        engine.step()
    assert engine.offload_scheduler.has_pending_stores()
    reset_device(engine)
    engine.runner.weights = 1
    second = Request("other", range(100, 118), 3)  # In the blocks that are read.
    engine.scheduler.add(second)
    engine.step()
    release()
    assert ask(engine) == 0
    engine.check_nothing_leaked()
    forget_device(engine)
    assert ask(engine) + ask(engine, range(100, 118)) == 2 * TOKENS
    engine.check_nothing_leaked()


def test_a_shutdown_waits_for_the_stores_in_flight(newest):
    engine = Engine()
    hold_reports(engine)
    engine.scheduler.add(Request("first", range(18), 1))
    while engine.scheduler.requests:
        engine.step()
    worker = engine.runner.connector._worker._worker
    assert worker.num_in_flight
    engine.runner.connector.shutdown()
    assert not worker.num_in_flight


def test_after_a_refused_device_reset_no_old_kv_is_stored_or_loaded(newest):
    engine = make_warm_engine(num_blocks=40)
    running = Request("running", range(20, 38), 12)
    engine.scheduler.add(running)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.pool.reset_prefix_cache() is False
    engine.run()
    # Its blocks are still on the device, and requests that extend them are as old.
    longer = [*running.tokens, *range(5)]
    ask(engine, longer)
    engine.scheduler.pool.overwrite_all()
    engine.runner.weights = 1
    num_found = []
    for prompt in (range(18), running.tokens, longer):
        num_found.append(ask(engine, prompt, 1))
        forget_device(engine)
    # The last two share only this prefix, which the new weights computed.
    assert num_found == [0, 0, len(running.tokens) // BLOCK_SIZE * BLOCK_SIZE]
    engine.check_nothing_leaked()


def test_blocks_that_a_request_with_old_kv_gets_later_are_old_too(newest):
    engine = Engine(num_blocks=40)
    running = Request("running", range(18), 12)
    engine.scheduler.add(running)
    while len(running.tokens) < 20:
        engine.step()
    pool = engine.scheduler.pool
    assert pool.reset_prefix_cache() is False
    engine.run()
    for block in list(pool.free_queue):
        if block.block_hash and block.block_hash[:32] in running.block_hashes[:5]:
            pool.forget(block)
    # The first blocks are recomputed, the tail is not.
    assert ask(engine, running.tokens[:21], 1) == ask(engine, running.tokens, 1) == 0
    forget_device(engine)
    assert ask(engine, running.tokens, 1) == 5 * BLOCK_SIZE


def test_old_kv_of_a_device_that_is_not_reset_does_not_come_back_to_the_host(apart):
    """Requests that extend it are as old, until they are preempted and recomputed."""
    engine = make_warm_engine(num_blocks=40)
    ask(engine)
    update_in_place(engine)
    assert ask(engine, range(30), 1) == 0
    forget_device(engine)
    engine.runner.weights = 1
    assert ask(engine, range(30), 1) == 0
    forget_device(engine)
    assert ask(engine, range(30), 1) == 7 * BLOCK_SIZE


def test_unchanged_weights_keep_the_host_blocks(newest):
    def load_adapter(engine):
        state = engine.runner.state
        engine.runner.state = state | {"q.lora_a_stacked": np.ones(4)}

    for extra, route in (
        ({"keep_on_device_reset": True}, reset_device),
        ({}, load_adapter),
    ):
        engine = make_warm_engine(extra=extra)
        route(engine)
        assert ask(engine) == TOKENS, route


def test_changed_weights_are_logged_once(newest, caplog):
    caplog.set_level(logging.INFO, "jaxkv")
    for route, reason in {
        reset_device: "vLLM's prefix cache is reset",
        replace_arrays: "arrays of the weights were replaced",
        update_in_place: r"start_weight_update() was called",
        drop_by_runner: "the KV caches were dropped",
    }.items():
        engine = make_warm_engine()
        caplog.clear()
        reset_connector(engine)
        route(engine)
        ask(engine)
        (line,) = re.findall(".*: the host tier forgets its blocks.*", caplog.text)
        assert reason in line


@pytest.mark.parametrize(
    "attributes",
    [
        {"skip_reading_prefix_cache": True},
        {"sampling_params": SimpleNamespace(skip_reading_prefix_cache=True)},
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
        {"sampling_params": SimpleNamespace(prompt_logprob_token_ids=[[1]])},
    ],
)
def test_a_request_that_must_compute_its_whole_prompt_is_offered_nothing(
    generation, attributes
):
    engine = make_warm_engine(generation=generation)
    request = Request("again", range(18), 1)
    vars(request).update(attributes)
    connector = engine.scheduler.connector
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    vars(request).update(skip_reading_prefix_cache=False)
    connector.request_finished(request, [])
    # A loaded prefix has no log-probabilities, even if the request would accept it.
    params = attributes.get("sampling_params", SimpleNamespace())
    must_compute = vars(params).keys() & {"prompt_logprobs", "prompt_logprob_token_ids"}
    expected = (0, False) if must_compute else (TOKENS, True)
    assert connector.get_num_new_matched_tokens(request, 0) == expected


def test_a_step_without_a_pool_starts_nothing(newest):
    engine = make_warm_engine()
    engine.scheduler.add(Request("again", range(18), 1))
    output = engine.scheduler.schedule()
    engine.runner.kv_cache_manager.delete_kv_cache()
    connector = engine.runner.connector
    connector.bind_connector_metadata(output.kv_connector_metadata)
    connector.start_load_kv(None)
    assert connector.get_transfer_results(set()).finished_recving == {"again"}
    assert connector.get_block_ids_with_load_errors()
    assert connector.build_connector_worker_meta().num_lost_pools == 1
    assert connector.build_connector_worker_meta() is None


def collect(registry):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def prom_metrics(connector, registry):
    """Metrics of a connector as vLLM makes them, for one engine, "0"."""
    names = ("Gauge", "Counter", "Histogram")
    kinds = [getattr(prometheus_client, name) for name in names]
    kinds = {kind: partial(kind, registry=registry) for kind in kinds}
    return type(connector).build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})


@pytest.mark.parametrize("options", [{}, {"extra": {"store_threshold": 2}}])
def test_vllm_serves_what_both_halves_count(newest, options):
    engine = Engine(**options)
    scheduler, worker = engine.scheduler.connector, engine.runner.connector
    registry = prometheus_client.CollectorRegistry()
    served, lines = prom_metrics(scheduler, registry), []

    def report(request):
        engine.scheduler.add(request)
        while engine.scheduler.has_requests():
            engine.step()
            reports = [half.get_kv_connector_stats() for half in (worker, scheduler)]
            reports = [stats for stats in reports if stats is not None]
            if reports:
                total = type(scheduler).build_kv_connector_stats()
                for stats in reports:
                    data = json.loads(json.dumps(stats.to_dict()))  # Plain types only.
                    total = total.aggregate(
                        type(scheduler).build_kv_connector_stats(data)
                    )
                assert not total.is_empty()
                served.observe(total.to_dict(), 0)
                lines.append(total.reduce())

    for number in range(6):
        report(Request(f"r{number}", range(18 + 12 * (number % 3)), 3))
        forget_device(engine)
    assert scheduler.get_kv_connector_stats() is None, "nothing has changed since"
    expected = prometheus_client.CollectorRegistry()
    OffloadMetrics(
        scheduler._scheduler.scheduler, worker._worker._worker, registry=expected
    )
    wanted = {
        key: value
        for key, value in collect(expected).items()
        if "prefix_cache" not in key[0]
    }
    values = collect(registry)
    assert {key: values[key] for key in wanted} == pytest.approx(wanted)
    # Metrics without a source are 0.
    assert not any(value for key, value in values.items() if key not in wanted)
    assert values["vllm:kv_offload_load_bytes_total", ("engine", "0")] > 0
    assert sum(line["blocks loaded"] for line in lines) > 0
    assert {"stored MiB", "loaded MiB", "failed loads"} <= lines[0].keys()
    assert {line["host blocks"] for line in lines if "host blocks" in line} == {32}
    for _ in range(2):  # Another engine of the process may register the same names.
        prom_metrics(scheduler, prometheus_client.REGISTRY)
    for metric in sys.modules[
        "jaxkv.integrations.vllm.stats"
    ].OffloadPromMetrics._registered:
        prometheus_client.REGISTRY.unregister(metric)


@pytest.fixture
def vllm_log():
    """Return the records of vLLM's logger; restore jaxkv's logger after the test."""
    ours, theirs = logging.getLogger("jaxkv"), logging.getLogger("vllm")
    before = ours.handlers[:], ours.level, ours.propagate
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    yield records
    theirs.removeHandler(handler)
    theirs.setLevel(logging.NOTSET)
    theirs.propagate = True
    ours.handlers[:], ours.level, ours.propagate = before


def test_log_lines_reach_vllms_log_before_anything_slow(newest, vllm_log, monkeypatch):
    moments = []
    for half, name in ((OffloadScheduler, "warm_up"), (TransferEngine, "__init__")):
        slow = getattr(half, name)

        def note(self, *args, slow=slow, **named):
            moments.append(len(vllm_log))
            return slow(self, *args, **named)

        monkeypatch.setattr(half, name, note)
    engine = Engine(extra={"num_cpu_blocks": 64})
    assert engine.scheduler.connector is not None
    lines = [record.getMessage() for record in vllm_log]
    assert len(lines) == 4, "once each, though there are two halves"
    assert moments == [1, 3]
    assert lines[0].startswith("host tier of 64 blocks")
    assert lines[3].startswith("offloading to 64 host blocks of ")


def test_transfers_take_no_more_device_memory_than_half_of_what_is_left(
    newest, vllm_log, monkeypatch
):
    left = None
    monkeypatch.setattr(limits, "device_bytes_left", lambda devices: left)
    monkeypatch.setattr(
        ConnectorConfig,
        "flag_that_leaves",
        lambda config, num_bytes, devices: f"--flag={num_bytes >> 20}",
    )
    for left, staging in ((None, 256), (512 << 20, 256), (200 << 20, 100)):
        engine = Engine(extra={"num_cpu_blocks": 64})
        moved = engine.runner.connector._worker._worker._engine
        assert moved._staging_bytes == staging << 20, left
    (warning,) = [r.getMessage() for r in vllm_log if r.levelname == "WARNING"]
    assert "staging_bytes is 100 MiB instead of 256, half of" in warning
    assert "set --flag=312 if transfers wait" in warning
    left = 63 << 20
    with pytest.raises(ValueError, match=r"63 MiB of memory left.*set --flag=1\.$"):
        Engine(extra={"num_cpu_blocks": 64})


def test_a_log_that_is_set_up_already_stays_as_it_is(newest, vllm_log):
    handler = logging.NullHandler()
    logging.getLogger("jaxkv").addHandler(handler)
    Engine()
    assert logging.getLogger("jaxkv").handlers == [handler]
    assert vllm_log == []


def test_the_class_is_created_by_path_under_both_names(newest):
    for name in ("OffloadConnector", "TPUOffloadConnector"):
        config, cache_config = make_configs(kv_transfer_config__kv_connector=name)
        for role in KVConnectorRole:
            connector = create_connector(config, role, cache_config)
            assert connector.role is role
            assert connector.requires_kv_delivery is False


def test_calls_before_the_pool_is_bound_and_of_pytorch_are_refused(newest):
    config, cache_config = make_configs()
    ours, theirs = (create_connector(config, r, cache_config) for r in KVConnectorRole)
    with pytest.raises(RuntimeError, match=r"bind_gpu_block_pool\(\) was not called"):
        ours.get_num_new_matched_tokens(Request("one", range(9), 1), 0)
    with pytest.raises(ValueError, match="use vLLM's OffloadingConnector"):
        theirs.register_kv_caches({"layer": object()})
    theirs.bind_connector_metadata(object())
    with pytest.raises(RuntimeError, match=r"register_runner\(\) was not called"):
        theirs.start_load_kv(None)


def test_without_vllm_the_module_can_be_imported():
    import jaxkv.integrations.vllm as module

    config, cache_config = make_configs()
    connector = module.OffloadConnector(config, KVConnectorRole.WORKER, cache_config)
    assert connector.get_finished(set()) == (None, set())


def test_the_rate_of_prefill_is_that_of_the_large_steps():
    now_s = 0.0
    rate = PrefillRate(clock=lambda: now_s)
    assert rate.tokens_per_s == 0
    for num_tokens, took_s in ((8, 0.5), (64, 1.0), (512, 1.0), (4, 0.1), (256, 0.25)):
        rate.begin_step(num_tokens)
        now_s += took_s
    rate.begin_step(0)
    assert rate.tokens_per_s == (512 + 1024) / 2
    now_s += 100  # Nothing is computed.
    for took_s in (0.5, 0.5, 100.0, 0.5):
        rate.begin_step(512)
        now_s += took_s
    for _ in range(30):  # Answers only.
        rate.begin_step(1)
        now_s += 0.1
    assert rate.tokens_per_s == 1024


def test_loads_that_take_longer_than_to_compute_are_declined(newest):
    engine = make_warm_engine(extra={"skip_slow_loads": True})
    scheduler = engine.scheduler.connector._scheduler
    scheduler._prefill._steps.extend([(1 << 20, 1e-3)] * 15)
    worker = engine.runner.connector._worker._worker
    for bytes_per_s, num_loaded in ((1e15, TOKENS), (1.0, 0)):
        worker.load_bytes_per_s = bytes_per_s
        ask(engine, range(100, 109), 1)  # The worker reports its speed.
        forget_device(engine)
        assert ask(engine) == num_loaded
        forget_device(engine)
    assert scheduler.scheduler.stats.num_loads_declined == 1
    engine.check_nothing_leaked()
