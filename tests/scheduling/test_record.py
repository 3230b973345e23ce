"""The recording of requests: its fields, ids and files."""

import contextlib
import gzip
import itertools
import json
import logging
import os
import random
import stat
import threading

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from jaxkv import OffloadConfig, TraceRecorder
from jaxkv.keys.packed import pack
from jaxkv.scheduling.record import record as record_module
from jaxkv.scheduling.record.keyed import ID_BITS, hash_keys
from jaxkv.scheduling.record.record import MIN_MAX_BYTES as MIN_BYTES
from jaxkv.scheduling.record.record import RecordStats
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tools.replay.traces import read_trace
from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_keys, make_request


def lines_of(path):
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().splitlines()]


def requests_of(path):
    header, *rest = lines_of(path)
    assert header["format"] == "jaxkv trace 1"
    return rest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def serve(recorder, *names, num_blocks=0, rng=None):
    """Record requests whose lengths are their numbers, and flush after each."""
    for name in names:
        keys = [rng.randbytes(32) for _ in range(num_blocks)] if rng else []
        recorder.begin(str(name), keys, num_blocks or int(name))
        recorder.finish(str(name))
        recorder.flush()


def described(path, block_size=1, **arguments):
    recorder = TraceRecorder(path, **arguments)
    recorder.describe(block_size)
    return recorder


@pytest.fixture
def secret(monkeypatch):
    """The secret of recorders without a key file."""
    monkeypatch.setattr(record_module.secrets, "token_bytes", lambda num: bytes(num))

    def ids(keys):
        return hash_keys(pack(keys)[1], bytes(16)).tolist()

    return ids


def test_a_request_is_a_line_with_what_it_found_and_what_its_output_filled(
    path, secret
):
    now_s = [100.0]
    with TraceRecorder(path, clock=lambda: now_s[0]) as recorder:
        rig = Rig(recorder=recorder)
        rig.store(1, 2, 3)
        rig.run(make_request("second", 1))
        now_s[0] += 1.5
        request = make_request("third", 1, 2, 3, 4, 5, 6)
        request.num_prompt_tokens = 3 * BLOCK_SIZE + 2
        request.stop, request.kind = "tool_use", 7
        rig.run(request)
    assert recorder.stats == RecordStats(3, 0)
    first, _, third = requests_of(path)
    keys = make_keys(1, 2, 3, 4, 5, 6)
    fields = {"in": 13, "out": 0, "device": 0, "host": 0}
    assert first == {"t": 0.001, "ids": secret(keys[:3])} | fields
    # The second has brought the first block to the device.
    fields = {
        "in": 14,
        "out": 11,
        "device": 4,
        "host": 8,
        "stop": "tool_use",
        "kind": 7,
    }
    ids = {"ids": secret(keys[:3]), "out_ids": secret(keys[3:])}
    assert third == {"t": 1500.0} | fields | ids


def test_the_header_describes_the_engine(path):
    device_kind = jax.devices()[0].device_kind
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder, policy="arc", host_blocks=32)
        rig.run(make_request("a", 1))
    header = lines_of(path)[0]
    assert header.pop("began_unix_ms") > 1.7e12
    assert len(bytes.fromhex(header.pop("key_id"))) == 8
    assert header == {
        "format": "jaxkv trace 1",
        "block_size": BLOCK_SIZE,
        "policy": "arc",
        "host_blocks": 32,
        "device_blocks": 15,
        "groups": 1,
        "device_kind": device_kind,
        "times": "ms",
        "lengths": "tokens",
        "part": 0,
    }


def test_a_process_that_started_no_device_starts_none_to_record(path, monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax, "devices", None)
    with described(path) as recorder:
        recorder.begin("one", make_keys(1), 4)
        recorder.finish("one")
    assert "device_kind" not in lines_of(path)[0]


def test_only_its_owner_reads_a_file(path, tmp_path):
    os.umask(os.umask(0o022))
    key_file = tmp_path / "key"
    described(path, key_file=key_file).close()
    for file in (path, key_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_neither_keys_nor_names_are_written(path):
    secret = "the-secret-name-of-a-user"
    with TraceRecorder(path) as recorder:
        Rig(recorder=recorder).run(make_request(secret, 1, 2))
    text = path.read_text()
    assert secret not in text
    for key in make_keys(1, 2):
        assert key.hex() not in text
        for size, order in itertools.product((4, 7, 8), ("little", "big")):
            assert str(int.from_bytes(key[:size], order)) not in text


def test_another_recorder_has_other_ids_unless_both_have_one_key_file(tmp_path):
    def ids(name, **arguments):
        with TraceRecorder(tmp_path / name, **arguments) as recorder:
            Rig(recorder=recorder).run(make_request("a", 1, 2, 3))
        header, request = lines_of(tmp_path / name)
        return request["ids"], header["key_id"]

    key_file = tmp_path / "key"
    a_ids, b_ids = ids("a.jsonl"), ids("b.jsonl")
    assert not set(a_ids[0]) & set(b_ids[0])
    assert a_ids[1] != b_ids[1]
    joined = ids("c.jsonl", key_file=key_file)
    assert joined == ids("d.jsonl", key_file=key_file)
    assert joined[1] not in (a_ids[1], b_ids[1])
    assert len(key_file.read_text()) == 65
    assert sorted(os.listdir(tmp_path)) == [*(f"{n}.jsonl" for n in "abcd"), "key"]


def test_settings_that_a_recorder_cannot_use_are_refused(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_text("0123456789abcde\n")
    for name, value, error, match in (
        ("max_bytes", "1000KB", ValueError, "=1000000 must be at least 1048576"),
        ("max_bytes", "much", ValueError, "'much' must be a size such as 64MiB"),
        ("max_files", 0, ValueError, "=0 must be at least 1"),
        ("max_files", 1.5, ValueError, "=1.5 must be a whole number from 1 on"),
        ("key_file", "pipe", OSError, "recorded ids from .*it is not a plain file"),
        ("key_file", "short", ValueError, "short' has 15 bytes and must have at l"),
        ("key_file", "nowhere/key", OSError, "cannot read the key .*No such file"),
    ):
        value = tmp_path / value if name == "key_file" else value
        with pytest.raises(error, match=match):
            TraceRecorder(path, **{name: value})
        assert not path.exists()


def test_a_link_that_others_planted_beside_a_key_file_is_not_followed(
    path, tmp_path, monkeypatch
):
    key_file, victim = tmp_path / "key", tmp_path / "victim"
    victim.write_text("mine")
    for suffix in (str(os.getpid()), "ab" * 16):
        (tmp_path / f"key.{suffix}").symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda num_bytes: "ab" * 16)
    with contextlib.suppress(OSError):
        TraceRecorder(path, key_file=key_file).close()
    assert victim.read_text() == "mine"


def test_long_prompts_are_recorded_in_full(path, secret):
    rng = random.Random(3)
    keys = [rng.randbytes(32) for _ in range(8200)]
    with described(path, 16) as recorder:
        recorder.begin("long", keys[:8192], 16 * 8192 + 3)
        recorder.finish("long", keys, 16 * 8200 + 3, 16 * 8200 + 2)
    (line,) = requests_of(path)
    ids = line["ids"]
    assert ids == secret(keys[:8192])
    assert line["out_ids"] == secret(keys[8192:])
    assert 0 <= min(ids) <= max(ids) < 1 << ID_BITS
    # Every reader of JSON can take them.
    assert np.array(ids, np.float64).astype(np.int64).tolist() == ids


def test_blocks_without_stored_kv_have_no_output_ids(path):
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder, prompt_only=True)
        request = make_request("prompt only", 1, 2, 3)
        request.num_prompt_tokens = 5
        rig.run(request)
    (line,) = requests_of(path)
    assert len(line["ids"]) == 1
    assert "out_ids" not in line
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder)
        request = make_request("a", 1, 2, 3, extra_tokens=0)
        request.num_prompt_tokens = 5
        rig.admit(request)
        rig.step(tokens={"a": 11})  # The last token that is generated has no KV.
        rig.finish("a")
    (line,) = requests_of(path)
    assert (line["in"], len(line["out_ids"])) == (5, 1)


def test_ids_stand_for_host_blocks_of_the_group_with_full_attention(path, secret):
    keys, rows = make_keys(1, 2, 3, 4), {"blocks_per_host_block": 2}
    groups = SlidingWindow(BLOCK_SIZE, 8), FullAttention(BLOCK_SIZE)
    of_any_length = [b"short", b"longer than thirty-two bytes" * 2]
    for options, request_keys, recorded, header in (
        ({}, [of_any_length], of_any_length, (BLOCK_SIZE, 15, 1)),
        (rows, [keys], [keys[1], keys[3]], (2 * BLOCK_SIZE, 7, 1)),
        ({"groups": groups}, [keys, keys[::-1]], keys[::-1], (BLOCK_SIZE, 15, 2)),
    ):
        with TraceRecorder(path) as recorder:
            rig = Rig(recorder=recorder, **options)
            request = rig.request("a", *range(len(request_keys[0])))
            request.block_keys_by_group = request_keys
            rig.run(request)
        first, line = lines_of(path)
        assert line["ids"] == secret(recorded), options
        names = "block_size", "device_blocks", "groups"
        assert tuple(map(first.get, names)) == header, options


def test_a_preempted_request_is_one_line_with_what_it_found_first(path):
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder)
        request = make_request("a", 1, 2, 3)
        rig.admit(request)
        rig.step(a=2)
        rig.preempt("a")
        rig.run(request)
    (line,) = requests_of(path)
    assert (line["device"], line["host"]) == (0, 0)
    assert rig.scheduler.stats.num_device_query_tokens == line["in"]


def test_what_is_recorded_adds_up_to_what_the_scheduler_counts(path):
    rng = random.Random(5)
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder, host_blocks=32)
        for number in range(40):
            blocks = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
            rig.run(make_request(str(number), *blocks))
    lines = requests_of(path)
    stats = rig.scheduler.stats
    assert sum(line["device"] for line in lines) == stats.num_device_hit_tokens > 0
    assert sum(line["host"] for line in lines) == stats.num_host_hit_tokens > 0
    assert sum(line["in"] for line in lines) == stats.num_device_query_tokens


def test_a_request_that_never_got_blocks_is_not_recorded(path):
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder)
        request = make_request("a", 1)
        rig.offer(request)
        rig.scheduler.request_finished(request)
    assert path.read_bytes() == b""


def test_running_requests_are_written_at_the_end(path):
    recorder = TraceRecorder(path)
    rig = Rig(recorder=recorder)
    rig.admit(make_request("a", 1, 2))
    rig.step(a=1)
    recorder.close()
    (line,) = requests_of(path)
    assert line["in"] == 9
    assert len(line["ids"]) == 2
    assert "out" not in line
    # Serving goes on undisturbed.
    rig.finish("a")
    rig.run(make_request("b", 1))
    recorder.close()
    assert len(requests_of(path)) == 1


def test_times_never_repeat_and_lines_come_as_requests_end(path):
    with described(path, clock=lambda: 5.0) as recorder:
        for name in "abc":
            recorder.begin(name, [], 1)
        for name in "cab":
            recorder.finish(name)
    assert [line["t"] for line in requests_of(path)] == [0.003, 0.001, 0.002]


@pytest.mark.parametrize(
    ("max_files", "num_requests", "num_blocks", "min_kept"),
    # Of each file but the newest, less than a piece is left free.
    [(3, 150, 2000, 60), (1, 5, 20_000, 0)],
)
def test_files_are_rotated_and_bounded(
    path, max_files, num_requests, num_blocks, min_kept
):
    rng = random.Random(6)
    with described(path, max_bytes=MIN_BYTES, max_files=max_files) as recorder:
        serve(recorder, *range(num_requests), num_blocks=num_blocks, rng=rng)
    assert recorder.stats == RecordStats(num_requests, 0)
    names = [f"requests.jsonl.{number}" for number in range(1, max_files)]
    names = ["requests.jsonl", *names]
    assert sorted(os.listdir(path.parent)) == names
    lines, part_numbers = [], []
    for name in reversed(names):
        file = path.with_name(name)
        assert file.stat().st_size <= MIN_BYTES
        header, *rest = lines_of(file)
        part_numbers.append(header["part"])
        lines += rest
    assert part_numbers == list(range(part_numbers[0], part_numbers[0] + max_files))
    assert part_numbers[0] > 0
    times = [line["t"] for line in lines]
    assert times == sorted(times)
    assert len(lines) > min_kept


def test_a_file_of_an_earlier_run_is_kept_and_a_link_stays_a_link(path, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    path.symlink_to(target / "real.jsonl")
    for _ in range(2):
        with described(path) as recorder:
            recorder.begin("a", [], 1)
    assert path.is_symlink()
    assert sorted(os.listdir(target)) == ["real.jsonl", "real.jsonl.1"]
    first, second = (lines_of(file)[0] for file in target.iterdir())
    assert first["key_id"] != second["key_id"]
    assert len(requests_of(target / "real.jsonl")) == 1


def test_a_request_that_no_file_has_room_for_is_dropped_and_counted(path, caplog):
    rng = random.Random(6)
    with described(path, max_bytes=MIN_BYTES) as recorder:
        for number, num in enumerate([70_000, 10, 70_000, 10]):
            serve(recorder, number, num_blocks=num, rng=rng)
    assert recorder.stats == RecordStats(2, 2)
    assert [line.get("dropped") for line in requests_of(path)] == [1, None, 1, None]
    (warning,) = caplog.messages
    assert "one request is larger than a file may be" in warning
    assert str(path) in warning


def test_what_the_queue_has_no_room_for_is_dropped_and_nobody_waits(
    path, monkeypatch, caplog
):
    monkeypatch.setattr(record_module, "_MAX_QUEUED_BLOCKS", 100)
    is_blocked, goes_on = threading.Event(), threading.Event()
    recorder, write = described(path), os.writev

    def wait_for_the_disk(fd, data):
        is_blocked.set()
        assert goes_on.wait(60)
        return write(fd, data)

    monkeypatch.setattr(os, "writev", wait_for_the_disk)

    def put(name, num):
        recorder.begin(name, [b"k" * 32] * num, num)
        recorder.finish(name)

    put("written", 60)
    assert is_blocked.wait(60)
    put("has room", 40)
    for number in range(3):
        put(f"has none {number}", 1)
    goes_on.set()
    recorder.flush()
    put("has room again", 100)
    recorder.close()
    assert recorder.stats == RecordStats(3, 3)
    lines = requests_of(path)
    assert [line.get("in", line.get("dropped")) for line in lines] == [60, 3, 40, 100]
    assert "the disk is too slow" in caplog.text


def test_a_rotation_that_fails_halfway_loses_no_older_file(path, monkeypatch):
    replace = os.replace

    def fail_once(source, target):
        if source == str(path):
            monkeypatch.undo()
            raise OSError(5, "Input/output error")
        replace(source, target)

    for number in range(3):
        path.with_name(f"{path.name}.{number}" if number else path.name).write_text(
            f"file {number}\n"
        )
    monkeypatch.setattr(os, "replace", fail_once)
    for _ in range(2):
        with contextlib.suppress(OSError):
            TraceRecorder(path, max_files=4).close()
    names = [f"{path.name}.{number}" for number in range(1, 4)]
    texts = [path.with_name(name).read_text() for name in names]
    assert texts == ["file 0\n", "file 1\n", "file 2\n"]


def test_a_line_that_cannot_be_taken_back_is_left_behind(path, monkeypatch):
    def refuse(*_):
        raise OSError(5, "Input/output error")

    with described(path) as recorder:
        serve(recorder, 0)
        for name in ("writev", "ftruncate"):
            monkeypatch.setattr(os, name, refuse)
        serve(recorder, 1)
        monkeypatch.undo()
        serve(recorder, 2)
    assert recorder.stats == RecordStats(2, 1)
    assert [line.get("in") for line in requests_of(path)] == [None, 2]
    assert [line["in"] for line in requests_of(path.with_name(f"{path.name}.1"))] == [0]


def no_thread(thread):
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_once_costs_no_request(
    path, monkeypatch, caplog
):
    with caplog.at_level(logging.INFO, "jaxkv"):
        recorder = TraceRecorder(path)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        rig = Rig(recorder=recorder)  # Nor does the engine fail.
        rig.run(make_request("a", 1))
        recorder.flush()
        assert recorder.stats == RecordStats()
        monkeypatch.undo()
        rig.run(make_request("b", 1, 2))
        recorder.close()
    assert recorder.stats == RecordStats(2, 0)
    assert len(requests_of(path)) == 2
    warning, info = caplog.messages
    assert warning == f"requests are not recorded to {path} (can't start new thread)."
    assert info.startswith(f"requests are recorded to {path} again after ")


def test_without_any_thread_a_recorder_writes_when_it_is_closed(path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with TraceRecorder(path) as recorder:
        Rig(recorder=recorder).run(make_request("a", 1))
    assert recorder.stats == RecordStats(1, 0)
    assert len(requests_of(path)) == 1


def test_invalid_requests_are_dropped_and_the_rest_is_readable(path, caplog):
    wrong = {
        "input_tokens=-7 must be at least 0": (b"k" * 32, -7, None, None),
        "input_tokens=7.5 must be a whole number": (b"k" * 32, 7.5, None, None),
        "stop='length' must be one of": (b"k" * 32, 7, "length", None),
        "kind=256 must be a whole number from 0 to 255": (b"k" * 32, 7, None, 256),
        "must be of type bytes": ("no bytes", 7, None, None),
    }
    for why, (key, num_tokens, stop, kind) in wrong.items():
        with described(path, 4) as recorder:
            recorder.begin("right", [b"k" * 32], 9)
            recorder.finish("right", None, 9, 9)
            recorder.begin("wrong", [key], num_tokens, kind=kind)
            recorder.finish("wrong", None, 9, 9, stop)
        assert recorder.stats == RecordStats(1, 1)
        assert why in caplog.text
        trace = read_trace(path)
        assert (trace.num_requests, trace.recording.num_lost) == (1, 1), why
    with described(path) as recorder:  # A piece that has nothing else.
        recorder.begin("wrong", ["no bytes"], 1)
        recorder.finish("wrong")
        recorder.flush()
        assert recorder.stats == RecordStats(0, 1)


def test_numbers_may_be_of_numpy(path):
    with described(path, 4) as recorder:
        num_tokens, num_hits = np.int64(9), np.int32(4)
        recorder.begin("a", [b"k" * 32], num_tokens, num_hits, num_hits)
        recorder.finish("a", None, num_tokens + 2, num_tokens + 1)
    trace = read_trace(path)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([9], [2])
    assert trace.recording.host_tokens.tolist() == [4]


def test_a_name_with_gz_is_compressed(tmp_path):
    path = tmp_path / "requests.jsonl.gz"
    with described(path) as recorder:
        serve(recorder, 1, 2)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert len(requests_of(path)) == 2


def test_a_recorder_serves_one_engine_and_a_file_one_recorder(path):
    with TraceRecorder(path) as recorder:
        rig = Rig(recorder=recorder)
        rig.scheduler.bind_device_block_pool(rig.pool)  # The same engine, again.
        with pytest.raises(ValueError, match=r".jsonl' already serves an engine"):
            Rig(recorder=recorder)
        with pytest.raises(OSError, match="another engine or process records to it"):
            TraceRecorder(path)
        rig.run(make_request("a", 1))
    assert len(requests_of(path)) == 1
    assert os.listdir(path.parent) == ["requests.jsonl"]


def test_what_cannot_be_recorded_to_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("nowhere/requests.jsonl", "No such file or directory"),
        ("file/requests.jsonl", "Not a directory"),
        ("folder", "Is a directory"),
        ("pipe", "it is not a plain file"),
        ("/dev/null", "it is not a plain file"),
        ("nul\0l", "embedded null"),
    ):
        with pytest.raises((OSError, ValueError), match=reason) as refusal:
            TraceRecorder(os.path.join(tmp_path, name))
        text = str(refusal.value)
        assert "\n" not in text
        assert name.rpartition("/")[2].partition("\0")[0] in text
        assert "name a file in a folder that exists" in text


def test_a_configuration_makes_the_recorder_of_its_scheduler(path):
    config = OffloadConfig(
        num_host_blocks=8, record=str(path), record_max_bytes="2MiB", record_max_files=2
    )
    assert (config.record_max_bytes, config.record_max_files) == (2 << 20, 2)
    with pytest.raises(ValueError, match="blocks"):
        config.make_scheduler(BLOCK_SIZE, num_host_blocks=0)
    scheduler = config.make_scheduler(BLOCK_SIZE)  # The file is not locked.
    assert scheduler.recorder.path == str(path)
    scheduler.recorder.close()
    assert OffloadConfig(num_host_blocks=8).make_scheduler(4).recorder is None
    for wrong, match in (
        ({"record_key_file": str(path)}, "record_key_file must be two files"),
        ({"record_max_bytes": "1KiB"}, "'1KiB' must be a size .*, at least 1048576"),
    ):
        with pytest.raises(ValueError, match=match):
            OffloadConfig(record=str(path), **wrong)
