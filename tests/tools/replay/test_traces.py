"""Traces in all formats, and errors with file, line and reason."""

import gzip
import itertools
import json
import tracemalloc

import numpy as np
import pytest

from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import TraceError, _open_lines, make_trace, read_trace
from jaxkv.types import STOPS

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [7, -8]},
    {"timestamp": 9, "input_length": 1024, "output_length": 1, "hash_ids": [7, 2**64]},
]
JAXKV = [
    {"t": 0, "in": 1100, "out": 5, "ids": [0, 1]},
    {"t": 9, "in": 600, "out": 1, "ids": [0], "stop": "end_turn"},
    {"t": 9.0, "in": 1024, "out": 1, "ids": [0, 2]},
]


def write(path, lines):
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def test_both_formats_are_read(tmp_path):
    for lines, name in itertools.product(
        (MOONCAKE, JAXKV), ("a.jsonl", "a.jsonl.gz", "a")
    ):
        path = write(tmp_path / name, lines)
        if name == "a":  # Gzip is recognised by content, not by name.
            path.write_bytes((tmp_path / "a.jsonl.gz").read_bytes())
        trace = read_trace(path)
        assert trace.name == "a"
        # Partial last blocks are left out, the others are renumbered.
        assert trace.ids.tolist() == [0, 1, 0, 0, 2]
        assert trace.ids.dtype == np.int32
        assert trace.offsets.tolist() == [0, 2, 3, 5]
        assert trace.time_ms.tolist() == [0, 9, 9]
        assert trace.input_tokens.tolist() == [1100, 600, 1024]
        assert trace.block_size == 512
        assert trace.num_requests == trace.num_unique_blocks == 3
        assert trace.num_block_refs == 5


def test_fields_lines_and_requests_may_be_left_out_or_empty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '\n{"t": 0, "in": 9, "out": 1, "ids": []}\n\n'
        '{"t": 0, "in": 512, "ids": [3]}\n'
        '{"t": 1, "in": 512, "out": 7, "ids": [3], "stop": "tool_use", "kind": 255}\n'
        '{"t": 2, "in": 512, "out": 0, "ids": [3], "stop": "end_turn"}\n'
    )
    trace = read_trace(path)
    assert trace.num_blocks.tolist() == [0, 1, 1, 1]
    assert trace.output_tokens.tolist() == [1, -1, 7, 0]
    stops = [STOPS[stop] for stop in trace.stops]
    assert stops == [None, None, "tool_use", "end_turn"]
    assert trace.kinds.tolist() == [-1, -1, 255, -1]
    line = '{"t": 0, "in": 50, "out": 1, "ids": [1, 2, 3]}\n'
    path.write_text(line, encoding="utf-8-sig")  # A byte order mark is fine.
    assert read_trace(path, block_size=16).num_block_refs == 3
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        read_trace(path, block_size=0)


def test_seconds_of_other_mooncake_formats_are_not_taken_for_milliseconds(tmp_path):
    """Qwen-Bailian's hour of traffic was read as 4 s, in blocks of 512 tokens."""
    ids = [5, 6, 7]
    bailian = [
        {"chat_id": n, "parent_chat_id": -1, "timestamp": 1.5 * n, "turn": 1}
        | {"input_length": 40, "output_length": 3, "type": "text", "hash_ids": ids}
        for n in range(3)
    ]
    lmcache = [
        {"timestamp": 1711929600 + 1.5 * n, "request_id": "r", "model_name": "m"}
        | {"chunk_size": 16, "seq_len": 40, "dtypes": ["float8_e4m3fn"]}
        | {"chunk_hashes": [f"0x{'ab' * 32}{n:02x}" for n in range(2)]}
        for n in range(3)
    ]
    for lines, num_output in ((bailian, 3), (lmcache, -1)):
        trace = read_trace(write(tmp_path / "a.jsonl", lines))
        assert trace.block_size == 16
        assert trace.time_ms.tolist() == [0, 1500, 3000]
        assert trace.num_blocks.tolist() == [2, 2, 2]
        assert trace.num_unique_blocks == 2
        assert trace.output_tokens.tolist() == [num_output] * 3


def test_files_that_lack_times_or_blocks_are_refused_by_what_they_lack(tmp_path):
    message = {"role": "user", "content": "hello"}
    for line, reason in (
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "Azure's LLM inference trace",
        ),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            "this trace has lengths",
        ),
        (
            {"session_id": "a", "turns": [{"text": "hello"}]},
            "sessions (AIPerf, inf",
        ),
        (
            {"session_id": "a", "delay": 5, "input_length": 9, "hash_ids": [1]},
            "a session without timestamps (AIPerf) does not say when a turn comes",
        ),
        (
            {"timestamp": 0, "requests": [{"prompt": "a"}]},
            "an AIBrix workload",
        ),
        (
            {"model": "m", "messages": [message]},
            "an OpenAI request log",
        ),
        (
            {"custom_id": "1", "body": {"messages": [message]}},
            "an OpenAI request log",
        ),
        ({"timestamp": 0, "text_input": "hello"}, "this file has texts and no blocks"),
    ):
        path = tmp_path / "a.jsonl"
        path.write_text(line if isinstance(line, str) else json.dumps(line))
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}:1: ")
        assert reason in str(caught.value)


# Fields to replace in a good line, or a whole line, and the fault.
LONG, DEEP = "x" * 100_000, "[" * 100_000
BAD_LINES = (
    ({"t": 10**400}, "'t' must be"),
    ('{"t": ' + "7" * 5000 + "}", "is not JSON ("),
    ({"t": float("inf")}, "not Infinity"),
    ({"in": 10**400}, "'in' must be a number of tokens"),
    ('{"t": 0, "in": 9, "ids": ' + DEEP + "}", "is not JSON ("),
    ({"t": LONG}, "'t' must be"),
    ({"t": "\ud800"}, "'t' must be"),
    (json.dumps({LONG: 0}), ""),
    ('{"\x1b[31m": 0}', ""),
    ({"ids": LONG}, "'ids' must be a list of ints"),
    ("null", "must be a JSON object, not null"),
    ("[" * 100_000, "is not JSON (maximum recursion"),
    ('{"t": 1, "out": 9, "ids": []}', "'in' is missing"),
    ({"stop": "eos"}, "'stop' must be 'tool_use' or 'end_turn', not \"eos\""),
    ({"kind": 256}, "'kind' must be at most 255, not 256"),
    ({"kind": "a"}, "'kind' must be a number of kinds from 0"),
    ({"t": -1}, "from 0 to 9007199254740991, not -1"),
    ({"in": 9.5}, "from 0 to 1073741824, not 9.5"),
    ({"in": True}, "from 0 to 1073741824, not true"),
    ({"in": 1073741825}, "'in' must be a number of tokens from 0 to 1073741824, not 1"),
    ({"out": 9007199254740991}, "'out' must be a number of tokens from 0 to 107374182"),
    ({"ids": 7}, "'ids' must be a list of ints, not 7"),
    ({"ids": [1.0]}, "list of ints, not [1.0]"),
    (
        {"in": 1000, "ids": [1, 2, 3]},
        "'ids' has 3 blocks, too many for 1000 tokens in blocks of 512; is the",
    ),
)


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    good = {"t": 0, "in": 512, "out": 1, "ids": [3]}
    for line, reason in BAD_LINES:
        if isinstance(line, dict):
            line = json.dumps({"t": 1, "in": 9, "out": 1, "ids": []} | line)
        path.write_text(f"{json.dumps(good)}\n\n{line}\n{json.dumps(good)}\n")
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        message = str(caught.value)
        assert message.startswith(f"{path}:3: ")
        assert reason in message
        assert message.isprintable()
        assert len(message) < len(str(path)) + 200


def test_a_line_without_end_in_a_small_gzip_file_is_not_read_as_a_whole(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    member = gzip.compress(b" " * (1 << 20), mtime=0)
    path.write_bytes(gzip.compress(b'{"t": 0\n') + 600 * member)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"gz:2: has more than 67108864 char"):
            list(_open_lines(path))
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_a_bad_file_is_named(tmp_path):
    no_block = b'{"t": 0, "in": 9, "out": 1, "ids": []}'
    utf_16 = (no_block + b"\n").decode().encode("utf-16")
    for name, data, reason in (
        ("a.jsonl", b"", ": the file has no request"),
        ("a.jsonl.gz", b"", ": the file has no request"),
        ("a.jsonl", b"\n\n", ": the file has no request"),
        ("a.jsonl", no_block, ": no request has a full block of 512 tokens"),
        (
            "a.jsonl",
            b'{"a": 1}',
            ":1: no known format, whose fields are (Moonc",
        ),
        (
            *("a.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [1]}).encode()),
            ":1: 'hash_ids' has 1 blocks, too few for 1100 tokens in blocks of 512; is",
        ),
        ("a.jsonl", b"\xff\xfe\n", ":1: is not UTF-8 text"),
        ("a.jsonl", utf_16, ":1: is not UTF-8 text"),
        ("a.gz", gzip.compress(utf_16, mtime=0), ":1: is not UTF-8 text"),
        ("a.gz", b"{}\n", ": is not gzip data, though its name ends in .gz"),
        ("a.gz", gzip.compress(b"{}" * 999, mtime=0)[:20], ":1: broken gzip data ("),
        ("a.gz", b"\x1f\x8bxxxxxxxxxxxxxxxxxx", ":1: broken gzip data ("),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}{reason}")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none")


def test_synthetic_traces_are_deterministic_and_conversations():
    trace, same, other_seed = (make_synthetic_trace(300, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(trace.ids, same.ids)
    np.testing.assert_array_equal(trace.time_ms, same.time_ms)
    assert trace.ids.tolist() != other_seed.ids.tolist()
    requests = np.split(trace.ids, trace.offsets[1:-1])
    before = {}
    for request in requests:  # a block has the same predecessor wherever it appears
        for previous, block in zip([-1, *request], request, strict=False):
            assert before.setdefault(block, previous) == previous
    assert np.all(np.diff(trace.time_ms) >= 0)
    np.testing.assert_array_equal(trace.input_tokens // 512, trace.num_blocks)
    with pytest.raises(ValueError, match="'empty' must have a request with a full"):
        make_trace("empty", [[], []])
