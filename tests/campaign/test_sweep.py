"""Each call to the system fails once, and costs an engine a computation at most."""

import errno
import functools
import itertools
import os
import shutil
import threading
import urllib.parse

import pytest

from jaxkv.scheduling.record import trace_file
from jaxkv.transfer.storage import StoreError, local, storage_io, workers
from tests.campaign.sweep import (
    EventsLife,
    PolicyStateLife,
    RecordLife,
    StoreLife,
    sweep,
)
from tests.rigs.failing_calls import ERRORS, HANGS, NO_THREAD, SHORT, FailingCalls
from tests.rigs.servers import redis_server


@pytest.fixture
def calls(tmp_path):
    with FailingCalls(tmp_path).installed() as calls:
        yield calls
        calls.let_go()


@pytest.fixture
def folders(tmp_path):
    """Paths of folders that are not there yet."""
    return map(tmp_path.joinpath, map(str, itertools.count()))


def check(num_lives, num_failed, complaints):
    assert not complaints, "\n".join(complaints[:5])
    assert num_failed > 0.7 * num_lives
    return num_lives


def live_with_a_folder(calls, folders, begins):
    """Return what lives with an empty folder, or with one that an engine has filled."""
    filled = next(folders)

    def count(folder):
        return len(list(folder.rglob("*.0")))

    def url(folder):
        return f"file://{folder}?mode=660"  # Which takes calls of its own.

    if not begins:
        StoreLife(calls, None, url(filled), lambda: count(filled)).begin()

    def live(fault):
        folder = next(folders)
        if not begins:
            shutil.copytree(filled, folder)
        life = StoreLife(calls, fault, url(folder), lambda: count(folder))
        life.begin() if begins else life.go_on()
        shutil.rmtree(folder)
        return life

    return live


of_folders = pytest.mark.parametrize("begins", [True, False], ids=["empty", "filled"])


@of_folders
@pytest.mark.parametrize(
    ("errors", "all_errors"),
    [
        pytest.param(ERRORS, False, id="once"),
        pytest.param(ERRORS, True, marks=pytest.mark.long, id="in any way"),
        pytest.param(HANGS, False, marks=pytest.mark.long, id="hangs"),
    ],
)
def test_a_call_about_a_folder_that_fails_costs_a_computation_at_most(
    calls, folders, begins, errors, all_errors
):
    live = live_with_a_folder(calls, folders, begins)
    num_lives = check(*sweep(live, errors, all_errors=all_errors))
    assert num_lives > (80 if errors is ERRORS else 0)


def in_folders(folders, kind, *options):
    """Return what lives with the path of a new folder each time."""

    def live(calls, fault):
        life = kind(calls, fault, next(folders), *options)
        life.begin()
        return life

    return live


@pytest.mark.parametrize(
    ("kind", "options", "all_errors", "min_lives"),
    [
        pytest.param(RecordLife, ("requests.jsonl", 3), True, 80, id="recording"),
        pytest.param(
            *(RecordLife, ("requests.jsonl", 1), True, 0),
            marks=pytest.mark.long,
            id="recording in one file",
        ),
        pytest.param(
            *(RecordLife, ("requests.jsonl.gz", 3), True, 0),
            marks=pytest.mark.long,
            id="compressed recording",
        ),
        pytest.param(PolicyStateLife, (), False, 20, id="policy state"),
        pytest.param(
            *(EventsLife, (True,), True, 0), marks=pytest.mark.long, id="publisher"
        ),
        pytest.param(
            *(EventsLife, (False,), True, 0),
            marks=pytest.mark.long,
            id="publisher without replay",
        ),
    ],
)
def test_a_call_that_fails_once_costs_a_request_a_save_or_a_computation_at_most(
    calls, folders, kind, options, all_errors, min_lives
):
    live = functools.partial(in_folders(folders, kind, *options), calls)
    assert check(*sweep(live, all_errors=all_errors)) > min_lives


@pytest.mark.parametrize("num_times", [1, 2])
@of_folders
@pytest.mark.long
def test_a_call_to_redis_that_fails_costs_a_computation_at_most(
    tmp_path, begins, num_times
):
    redis = pytest.importorskip("redis")
    with redis_server(tmp_path) as (url, _):
        client = redis.Redis.from_url(url)

        def count():
            return len(client.keys("*.0"))

        def live(fault):
            client.flushall()
            if not begins:
                StoreLife(calls, None, url, count).begin()
            life = StoreLife(calls, fault, url, count)
            life.begin() if begins else life.go_on()
            num_said.append(len(life.log.warnings))
            return life

        num_said = []
        port = urllib.parse.urlsplit(url).port
        with FailingCalls(tmp_path, port, num_times).installed() as calls:
            check(*sweep(live, all_errors=True))
        assert sum(num_said) > 0.5 * (num_times - 1) * len(num_said)


# What the sweep would find.


def test_it_finds_a_partial_write_that_is_taken_for_a_whole_one(
    calls, folders, monkeypatch
):
    monkeypatch.setattr(local, "write_all", lambda file, blob: os.writev(file, blob))
    live = live_with_a_folder(calls, folders, begins=True)
    _, _, complaints = sweep(live, {"writev": (SHORT,)})
    assert any("invalid objects (torn)" in line for line in complaints)


def test_it_finds_a_thread_that_is_booked_as_started(calls, folders, monkeypatch):
    start = workers.start_thread

    def start_thread(name, *what):
        try:
            return start(name, *what)
        except StoreError:
            return threading.Thread()

    for module in (workers, storage_io):
        monkeypatch.setattr(module, "start_thread", start_thread)
    monkeypatch.setattr("tests.campaign.sweep.MAX_WAIT_S", 0.3)
    live = live_with_a_folder(calls, folders, begins=True)
    _, _, complaints = sweep(live, {"thread": (NO_THREAD,)})
    assert any("StuckError: a listing" in complaint for complaint in complaints)


def test_it_finds_an_error_that_is_taken_for_missing(calls, folders, monkeypatch):
    monkeypatch.setattr(local, "_exists", os.path.exists)
    live = live_with_a_folder(calls, folders, begins=True)
    _, _, complaints = sweep(live, {"stat": (errno.EIO,)})
    assert any("store.attempt" in complaint for complaint in complaints)


def test_it_finds_a_rotation_that_is_booked_as_done(calls, folders, monkeypatch):
    move = trace_file.TraceFile._rotate_existing
    monkeypatch.setattr(
        *(trace_file.TraceFile, "_rotate_existing"),
        lambda file: None if file._num_begun else move(file),
    )
    live = functools.partial(in_folders(folders, RecordLife), calls)
    _, _, complaints = sweep(live, {"replace": (errno.EIO,)})
    assert any("_rotate" in complaint for complaint in complaints)
