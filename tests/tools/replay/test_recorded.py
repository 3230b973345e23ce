"""Recorded traces: what is read of them, and that replaying them is what happened."""

import dataclasses
import gzip
import json
import random

import numpy as np
import pytest

from jaxkv.scheduling.record.record import MIN_MAX_BYTES, TraceRecorder
from jaxkv.tools.replay.admission import Admission, find_admitted
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.run import OPTIMUM, replay, sweep
from jaxkv.tools.replay.traces import TraceError, make_trace, read_trace
from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_request

HEADER = {
    "format": "jaxkv trace 1",
    "block_size": 4,
    "policy": "lru",
    "host_blocks": 8,
    "device_blocks": 5,
    "began_unix_ms": 1000,
    "key_id": "one",
    "part": 0,
}
LINES = [
    {"t": 7.5, "in": 9, "out": 4, "ids": [5, 6], "out_ids": [7], "stop": "end_turn"},
    {"t": 2.25, "in": 4, "device": 0, "host": 4, "ids": [5]},
    {"t": 4, "in": 8, "out": 1, "device": 4, "host": 0, "ids": [5, 6]},
]


def write(path, *lines, header=HEADER, tail="", **changes):
    texts = [json.dumps(line) + "\n" for line in (header | changes, *lines)]
    data = ("".join(texts) + tail).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def test_recorded_requests_are_read_in_the_order_of_their_times(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = write(tmp_path / name, *LINES, {"dropped": 3}, {"dropped": 2})
        trace = read_trace(path)
        assert trace.block_size == 4
        assert trace.time_ms.tolist() == [2.25, 4, 7.5]
        assert trace.ids.tolist() == [0, 0, 1, 0, 1, 2]
        assert trace.offsets.tolist() == [0, 1, 3, 6]
        assert trace.num_asked.tolist() == [1, 2, 2]
        assert trace.num_blocks.tolist() == [1, 2, 3]
        assert trace.num_block_refs == 5
        assert trace.output_tokens.tolist() == [-1, 1, 4]
        run = trace.recording
        assert run.device_tokens.tolist() == [0, 4, -1]
        assert run.host_tokens.tolist() == [4, 0, -1]
        assert (run.num_device_hit_tokens, run.num_host_hit_tokens) == (4, 4)
        assert (run.policy, run.host_blocks, run.device_blocks) == ("lru", 8, 5)
        assert (run.num_lost, run.notes, run.device_kind) == (5, (), None)


def test_files_of_one_secret_are_put_together(tmp_path):
    first = write(tmp_path / "b", *LINES[:1], part=3)
    second = write(tmp_path / "a", *LINES[1:], part=2)
    late = {"t": 1, "in": 4, "ids": [6], "host": 4}
    third = write(tmp_path / "c", late, began_unix_ms=1003, policy="arc")
    trace = read_trace([first, second, third])
    assert trace.name == "b"
    assert trace.time_ms.tolist() == [2.25, 4, 4, 7.5]
    assert trace.ids.tolist() == [0, 0, 1, 1, 0, 1, 2]
    assert trace.recording.num_host_hit_tokens == 8
    assert trace.recording.policy is None
    assert trace.recording.host_blocks == 8
    assert trace.recording.notes == ()
    # A file between two others is missed.
    paths = [
        write(tmp_path / f"{number}", {**LINES[0], "t": number}, part=number)
        for number in (2, 3, 6)
    ]
    (note,) = read_trace(paths).recording.notes
    assert note == "2 of the files between the first and the last one are missing."


def test_a_line_that_was_cut_off_is_left_out_with_a_note(tmp_path):
    packed = gzip.compress(b'{"t": 9, "in": 4, "ids": [1]}\n' * 9, mtime=0)
    line = json.dumps({"t": 9, "in": 4, "ids": [12, 3]}).encode()
    for name, tails in (
        ("a.jsonl", [line[:size] for size in range(1, len(line))]),
        ("a.jsonl.gz", [packed[:size] for size in range(2, len(packed) - 1, 5)]),
    ):
        path = write(tmp_path / name, *LINES)
        whole = path.read_bytes()
        for tail in tails:
            path.write_bytes(whole + tail)
            trace = read_trace(path)
            (note,) = trace.recording.notes
            assert note.startswith(f"{path} ends within a line, which was left out")
            assert trace.num_requests == 3 or name.endswith(".gz")


REFUSED = (
    ({"format": "jaxkv trace 9"}, {}, "this version of jaxkv reads .jaxkv trace 1"),
    ({"block_size": 0}, {}, "recorded in blocks of 0 tokens"),
    ({"block_size": "4"}, {}, "'block_size' must be a number of tokens"),
    ({"device_blocks": {"a": 1}}, {}, "'device_blocks' must be a number of blocks"),
    ({"host_blocks": "8"}, {}, "'host_blocks' must be a number of blocks"),
    ({"policy": ["lru"]}, {}, "'policy' must be a name"),
    ({"device_kind": 7}, {}, "'device_kind' must be a name"),
    ({"part": -1}, {}, "'part' must be a number of files"),
    ({}, {"device": -1}, "'device' must be a number of tokens"),
    ({}, {"host": 1.5}, "'host' must be a number of tokens"),
    ({}, {"out_ids": 3}, "'out_ids' must be a list of ints"),
    ({}, {"out_ids": [1, 2]}, r"'out_ids' has 2 blocks, too many for 9 \+ 4"),
    ({}, {"ids": [1]}, "'out_ids' has 1 blocks, .* of which 'ids' has 1"),
    ({}, {"ids": [1, 2, 3, 4]}, "'ids' has 4 blocks, too many for 9 tokens"),
)


def test_what_a_recorder_never_writes_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    for changes, line, message in REFUSED:
        write(path, LINES[0] | line, **changes)
        with pytest.raises(TraceError, match=message):
            read_trace(path)
    write(path, LINES[0], {"t": 1, "in": 4}, LINES[1])
    with pytest.raises(TraceError, match=r"a.jsonl:3: 'ids' is missing"):
        read_trace(path)
    for text in ("", json.dumps(HEADER) + '\n{"t": 0, "i'):
        path.write_text(text)
        with pytest.raises(TraceError, match="the file has no request"):
            read_trace(path)
    write(path, *LINES)
    assert read_trace(path, 4).block_size == 4
    with pytest.raises(TraceError, match="in blocks of 4 tokens, not of 8"):
        read_trace(path, 8)


def test_files_that_do_not_go_together_are_refused(tmp_path):
    first = write(tmp_path / "a", *LINES)
    for changes, message in (
        ({"key_id": "two"}, "b: has ids of another secret than .*a: replay the files"),
        ({"block_size": 2}, "b: was recorded in blocks of 2 tokens, and .*a in blocks"),
        ({}, "b: is there twice"),
    ):
        second = write(tmp_path / "b", {"t": 1, "in": 4, "ids": []}, **changes)
        with pytest.raises(TraceError, match=message):
            read_trace([first, second])
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"t": 0, "in": 600, "ids": [5]}))
    for paths in ([plain, first], [first, plain], [plain, plain]):
        with pytest.raises(TraceError, match=r"plain.jsonl: was not recorded by jaxkv"):
            read_trace(paths)


def test_the_command_tells_what_the_run_had_found(tmp_path, run_line, plain_output):
    first = write(tmp_path / "a.jsonl.1", *LINES[1:], {"dropped": 3})
    second = write(tmp_path / "a.jsonl", LINES[0], part=1, tail='{"t"')
    out, _, figures = run_line(f"plan {first} {second}")
    assert "4 tokens on the device (19.0%), 4 tokens on the host (19.0%); " in out
    assert "lru, 8 host blocks, 5 device blocks" in out
    assert "3 requests that could not be recorded" in out
    assert "21 tokens, 5 blocks of 4, 3 unique" in out
    # 1/4 to 2 times the recorded host, as far as there are blocks.
    assert {row["capacity_blocks"] for row in figures["rows"]} == {1, 2, 3}
    (note,) = figures["recording"].pop("notes")
    assert note.startswith(f"{second} ends within a line")
    assert note[:40] in out
    assert figures["recording"] == {
        "num_device_hit_tokens": 4,
        "num_host_hit_tokens": 4,
        "policy": "lru",
        "host_blocks": 8,
        "device_blocks": 5,
        "num_lost": 3,
    }


def test_prompt_only_leaves_out_what_outputs_filled(tmp_path, run_line, plain_output):
    lines = [
        {"t": 1, "in": 4, "out": 5, "ids": [1], "out_ids": [2]},
        {"t": 2, "in": 12, "out": 1, "ids": [1, 2, 3]},
    ]
    trace = write(tmp_path / "a.jsonl", *lines, device_blocks=None)
    for option, num_found in (("", 2), ("--prompt-only", 1)):
        line = f"plan {trace} --policy lru --capacity 3 {option}"
        (result,) = run_line(line)[2]["rows"]
        assert result["num_hit_blocks"] == num_found, option


def test_blocks_that_an_output_filled_are_stored_and_not_asked_for():
    # The second turn asks for the block that the first one's output filled.
    turns = [[1, 2, 3], [1, 2, 3, 4], [5], [1, 2, 3, 4]]
    trace = make_trace("turns", turns, num_output_blocks=[1, 0, 1, 0])
    assert trace.num_block_refs == 10
    for policy in ("lru", "arc", "hazard", "optimum"):
        result = replay(policy, trace, 5)
        assert result.hits_by_request.tolist() == [0, 3, 0, 4], policy
        assert result.num_block_refs == 10
    # Without what they say, the same blocks are found later.
    prompts = [turn[:n] for turn, n in zip(turns, trace.num_asked, strict=True)]
    plain = make_trace("turns", prompts)
    assert replay("lru", plain, 5).hits_by_request.tolist() == [0, 2, 0, 4]


def run_random(path, seed, **options):
    """Record random conversations, one request at a time, that a rig serves."""
    rng = random.Random(seed)
    with TraceRecorder(path, max_bytes=MIN_MAX_BYTES) as recorder:
        rig = Rig(recorder=recorder, **options)
        heads = {who: [who] for who in range(6)}
        for number in range(120):
            who = rng.randrange(6)
            num_blocks = len(heads[who]) + rng.randrange(1, 3)
            blocks = [who, *(100 * who + depth for depth in range(1, num_blocks + 2))]
            if len(blocks) > 9:
                blocks = heads[who] = [who]
            request = make_request(str(number), *blocks, extra_tokens=1)
            num_output = rng.randrange(1, min(7, request.num_tokens))
            request.num_prompt_tokens = request.num_tokens - num_output
            serve(rig, request)
            heads[who] = blocks[: rng.randrange(1, len(blocks) + 1)]
    return rig


def serve(rig, request):
    """Run a request token by token, as an engine does that is alone."""
    name, num_tokens = request.request_id, request.num_tokens
    request.num_tokens = request.num_prompt_tokens
    all_keys = request.block_keys_by_group[0]

    def grow():
        num = request.num_tokens // BLOCK_SIZE
        request.block_keys_by_group = [all_keys[:num]]

    grow()
    rig.admit(request)
    if request.loading_tokens:
        rig.step()
        rig.load_arrives()
    rig.step(tokens={name: request.num_tokens})
    while request.num_tokens < num_tokens - 1:
        request.num_tokens += 1
        grow()
        missing = -(-request.num_tokens // BLOCK_SIZE) - len(request.block_ids)
        request.tables[0] += rig.pool.allocate(missing)
        rig.scheduler.update_state_after_alloc(request, request.table, 0)
        rig.step(tokens={name: 1})
    # The last one comes out of the last step, and has no KV.
    request.num_tokens = num_tokens
    grow()
    rig.finish(name)
    rig.settle()


SIZES = ((14, 16), (16, 24), (12, 40))  # Blocks on the device and on the host.


ADMISSIONS = (
    ("lru", Admission()),
    ("arc", Admission()),
    ("lru", Admission(store_threshold=2)),
    ("lru", Admission(store_threshold=3, max_offload_tokens=6 * BLOCK_SIZE - 1)),
    ("arc", Admission(max_unseen_blocks=1)),
    ("lru", Admission(max_unseen_blocks=0, prompt_only=True)),
    ("lru", Admission(prompt_only=True)),
    ("lru", Admission(max_offload_tokens=3 * BLOCK_SIZE + 1)),
    ("arc", Admission(store_threshold=2, prompt_only=True)),
    ("lru", Admission(max_unseen_blocks=2, max_offload_tokens=5 * BLOCK_SIZE)),
)


def test_a_replay_finds_what_the_scheduler_found_request_by_request(tmp_path):
    num_fewer = dict.fromkeys(ADMISSIONS, 0)
    for seed, (device_blocks, host_blocks) in enumerate(SIZES):
        options = {"device_blocks": device_blocks, "host_blocks": host_blocks}
        everything, ruled = tmp_path / f"all{seed}", tmp_path / f"ruled{seed}"
        stats = run_random(everything, seed, **options).scheduler.stats
        trace = read_trace(everything)
        assert trace.num_output_blocks.sum() > 10
        assert np.diff(trace.time_ms).min() > 0
        device, run = find_on_device(trace, device_blocks - 1), trace.recording
        assert (BLOCK_SIZE * device.hits).tolist() == run.device_tokens.tolist()
        assert run.num_device_hit_tokens == stats.num_device_hit_tokens > 0
        assert run.num_host_hit_tokens == stats.num_host_hit_tokens > 0
        assert int(trace.input_tokens.sum()) == stats.num_device_query_tokens
        for case in ADMISSIONS:
            policy, admission = case
            rules = dataclasses.asdict(admission)
            ruled.unlink(missing_ok=True)
            rig = run_random(ruled, seed, policy=policy, **options, **rules)
            admitted = find_admitted(trace, admission, device=device)
            of_device = {"device": device, "admitted": admitted}
            result = replay(policy, trace, host_blocks, **of_device)
            host_hits = result.hits_by_request - device.hits
            expected = read_trace(ruled).recording.host_tokens
            assert (BLOCK_SIZE * host_hits).tolist() == expected.tolist(), case
            num_stored = result.stores_by_request.sum()
            assert num_stored == rig.scheduler.stats.num_stored > 0, case
            without = replay(policy, trace, host_blocks, device=device)
            num_fewer[case] += without.stores_by_request.sum() - num_stored
    for (_, admission), num in num_fewer.items():
        assert (num > 0) == (admission != Admission()), admission
    # A sweep keeps the same blocks out at every capacity, but not from the optimum.
    both = ["arc", OPTIMUM], [20, 40]
    arc = Admission(store_threshold=2, prompt_only=True)
    swept = sweep(trace, *both, admission=arc)
    admitted = find_admitted(trace, arc)
    assert swept[:2] == [replay("arc", trace, n, admitted=admitted) for n in (20, 40)]
    assert swept[2:] == sweep(trace, [OPTIMUM], [20, 40])
