"""Recording where processes are killed, disks are full and files are shared."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.tools.replay.traces import read_trace
from tests.rigs import children, recording_engine
from tests.rigs.children import PIPE, ROOT, Child

RIG = ("-m", "tests.rigs.recording_engine")


def run(path, mode, *arguments):
    done = children.run(*RIG, path, mode, *arguments)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def endless(path, mode="endless"):
    """Run an engine that records indefinitely, and has written some requests."""
    with Child(*RIG, path, mode, stdout=PIPE) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def numbers_of(trace):
    """The numbers of the requests, which their lengths say."""
    return [int(tokens) - 50 for tokens in trace.input_tokens]


def check_whole(trace):
    numbers = numbers_of(trace)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert trace.recording.num_lost == 0


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.gz"])
def test_who_is_killed_leaves_what_was_written(tmp_path, name):
    path = tmp_path / name
    with endless(path) as process:
        for _ in range(3):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    trace = read_trace(path)
    check_whole(trace)
    assert numbers_of(trace)[-1] >= last
    # Another recorder can continue the file.
    TraceRecorder(path).close()


def check_interpreter(path, mode, lengths, words=()):
    command = [*words, sys.executable, *RIG, path, mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["in"] for line in lines] == lengths


def test_the_end_of_the_interpreter_writes_pending_requests(tmp_path):
    check_interpreter(tmp_path / "requests.jsonl", "exit at once", [9])


def test_a_process_without_standard_input_records_all(tmp_path):
    """The file has the number 0 then."""
    words = ("sh", "-c", 'exec "$@" <&-', "sh")
    check_interpreter(tmp_path / "requests.jsonl", "exit", [51, 9], words)


def test_garbage_collection_closes_files(tmp_path, capsys):
    recording_engine.main(tmp_path / "requests.jsonl", "garbage")
    assert capsys.readouterr().out == "3\n"


def test_a_process_that_was_forked_writes_nothing(tmp_path):
    path = tmp_path / "requests.jsonl"
    command = [sys.executable, *RIG, path, "fork"]
    # Python 3.12 warns of threads.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, b"")
    assert numbers_of(read_trace(path)) == [1, 3]


def check_requests_are_dropped(path, mode, reason, *arguments):
    """Record 40 requests where not all have room; the rest is readable."""
    code, out, err = run(path, mode, *arguments)
    num_written, num_dropped = map(int, out.split())
    assert (code, num_written + num_dropped) == (0, 40)
    assert num_written > 0
    assert num_dropped > 0
    (warning,) = err.splitlines()
    assert f"requests are not recorded to {path} ({reason})" in warning
    trace = read_trace(path)
    assert numbers_of(trace) == list(range(num_written))
    assert not trace.recording.notes


def test_a_limit_on_files_costs_requests_and_no_more(tmp_path):
    path = tmp_path / "requests.jsonl"
    check_requests_are_dropped(path, "small files", "File too large", "20000")


@contextmanager
def disk(folder, options):
    """A disk of its own, where this user may have one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("this user may mount nothing")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.fixture
def small_disk(tmp_path):
    with disk(tmp_path / "disk", "size=64k") as folder:
        yield folder


@pytest.fixture
def others_folder(tmp_path):
    if os.getuid():
        tmp_path.chmod(0o500)
        yield tmp_path
    else:
        with disk(tmp_path / "disk", "ro") as folder:
            yield folder


def test_a_full_disk_costs_requests_and_no_more(small_disk):
    (small_disk / "others").write_bytes(bytes(40 << 10))
    path = small_disk / "requests.jsonl"
    check_requests_are_dropped(path, "full disk", "No space left on device")


def test_a_folder_that_only_others_write_is_refused_at_the_start(others_folder):
    path = others_folder / "requests.jsonl"
    message = (
        rf"\[Errno \d+\] cannot record to '{path}' "
        r"\((Permission denied|Read-only file system)\); name a file in a folder that "
        "exists and that you may write to, and one that nobody else writes"
    )
    with pytest.raises(OSError, match=message):
        TraceRecorder(path)


def test_two_processes_do_not_record_to_one_file(tmp_path):
    path = tmp_path / "requests.jsonl"
    message = "another engine or process records to it"
    with endless(path), pytest.raises(OSError, match=message):
        TraceRecorder(path)
    check_whole(read_trace(path))


def test_files_can_be_read_while_they_are_rotated(tmp_path):
    path = tmp_path / "requests.jsonl"
    with endless(path, "rotating") as process:
        while not (tmp_path / "requests.jsonl.2").exists():
            process.stdout.readline()
        for _ in range(20):
            trace = read_trace(path)
            check_whole(trace)
            try:
                trace = read_trace([tmp_path / "requests.jsonl.1", path])
            except ValueError as error:
                # One was rotated away between the two.
                assert "is there twice" in str(error)  # noqa: PT017
                continue
            if not any("missing" in note for note in trace.recording.notes):
                check_whole(trace)
