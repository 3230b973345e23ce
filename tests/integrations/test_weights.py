"""Descriptions of weights: equal for the same weights only."""

import itertools
import json
import os
import re
import sys
import time

import pytest

from jaxkv.integrations.weights import (
    UnknownWeightsError,
    describe_weights,
    hub_folder_of,
    process_started_s,
)
from tests.rigs.command_line import run_python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "76543210fedcba9876543210fedcba9876543210"
OLD = 10**18  # ns


def make(folder, **files):
    """Write a checkpoint, all files of one time; names have __ for a dot."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(data)
        os.utime(path, ns=(OLD, OLD))
    return str(folder)


WEIGHTS = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def checkpoint(tmp_path):
    return make(
        tmp_path / "one", model__safetensors=WEIGHTS, config__json=b"{}", notes__txt=b""
    )


def test_files_are_distinguished_by_name_size_time_and_content(tmp_path, checkpoint):
    paths = [
        checkpoint,
        make(tmp_path / "name", model2__safetensors=WEIGHTS, config__json=b"{}"),
        make(tmp_path / "size", model__safetensors=WEIGHTS + b"x", config__json=b"{}"),
        make(tmp_path / "data", model__safetensors=WEIGHTS[::-1], config__json=b"{}"),
        make(tmp_path / "code", model__safetensors=WEIGHTS, config__json=b"{ }"),
        make(tmp_path / "time", model__safetensors=WEIGHTS, config__json=b"{}"),
    ]
    os.utime(tmp_path / "time" / "model.safetensors", ns=(OLD, OLD + 1))
    facts = [describe_weights(path) for path in paths]
    for first, second in itertools.combinations(facts, 2):
        assert first != second
    same = make(tmp_path / "same", model__safetensors=WEIGHTS, config__json=b"{}")
    assert describe_weights(same) == facts[0], "the path and other files do not matter"


def test_any_change_of_a_small_file_is_noticed_whatever_its_time(tmp_path):
    data = bytearray(b"\0" * 10_000)
    facts = set()
    for number, place in enumerate(range(0, 10_000, 499)):
        data[place] ^= 1
        folder = make(tmp_path / str(number), model__bin=bytes(data))
        facts.add(json.dumps(describe_weights(folder)))
    assert len(facts) == 21


def test_large_files_are_sampled_over_all_of_them(tmp_path):
    """If all weights differ, a sample differs."""
    size = 64 << 20
    for number, step in enumerate((8192, 1 << 20)):
        folder = make(tmp_path / str(number), model__bin=b"")
        with open(f"{folder}/model.bin", "wb") as file:
            file.truncate(size)
            before = describe_weights(folder)
            os.utime(f"{folder}/model.bin", ns=(OLD, OLD))
            for place in range(step - 1, size, step):
                file.seek(place)
                file.write(b"x" * (step // 2))
        os.utime(f"{folder}/model.bin", ns=(OLD, OLD))
        assert describe_weights(folder) != before


def test_a_single_file_is_a_model_and_a_folder_without_weights_is_refused(
    tmp_path, checkpoint
):
    path = os.path.join(checkpoint, "model.safetensors")
    (name, size, _, _) = describe_weights(path)["files"][0]
    assert (name, size) == ("model.safetensors", len(WEIGHTS))
    folder = make(tmp_path / "none", config__json=b"{}")
    with pytest.raises(UnknownWeightsError, match="none has no file of weights"):
        describe_weights(folder)


def tick(folder):
    """Return a time later than all files, and earlier than what is written next."""
    probe = folder / "probe"

    def now_s():
        probe.write_text("")
        os.utime(probe)
        return probe.stat().st_ctime

    before_s, start_s = now_s(), now_s()
    while start_s <= before_s:
        start_s = now_s()
    while now_s() <= start_s:
        pass
    return start_s


def test_files_that_change_while_they_may_be_read_are_refused(tmp_path, checkpoint):
    path = f"{checkpoint}/model.safetensors"
    start_s = tick(tmp_path)
    assert describe_weights(checkpoint, read_since_s=start_s)
    # A copy that keeps the time of its source, as by rsync -a.
    os.utime(path, ns=(OLD, OLD))
    with pytest.raises(UnknownWeightsError, match=r"safetensors has changed since"):
        describe_weights(checkpoint, read_since_s=start_s)


@pytest.mark.parametrize("what", ["link", "link to a link", "file", "folder"])
def test_files_that_were_put_in_the_place_of_others_are_refused(tmp_path, what):
    """Old files by themselves, but not those that were there before."""
    for name in "one", "two":
        make(tmp_path / name / "model", model__safetensors=name.encode())
    model, newer = tmp_path / "one" / "model", tmp_path / "two" / "model"
    named = changed = tmp_path / "latest"
    if what == "link":
        named.symlink_to("one/model")
    elif what == "link to a link":
        changed = tmp_path / "production"
        changed.symlink_to(model)
        named.symlink_to("one/../production")
    elif what == "file":
        named.mkdir()
        changed, newer = (folder / "model.safetensors" for folder in (named, newer))
        changed.symlink_to(model / "model.safetensors")
    else:
        named = changed = model
    start_s = tick(tmp_path)
    assert describe_weights(str(named), read_since_s=start_s)
    (tmp_path / "one" / "notes.txt").write_text("does not matter")
    (model / "notes.txt").write_text("does not matter")
    assert describe_weights(str(named), read_since_s=start_s)
    changed.rename(tmp_path / "before")
    if what == "folder":
        newer.rename(changed)
    else:
        changed.symlink_to(newer)
    assert describe_weights(str(named)), "it is there"
    message = re.escape(f"{changed} has changed since this process began")
    with pytest.raises(UnknownWeightsError, match=message):
        describe_weights(str(named), read_since_s=start_s)


def test_a_folder_above_that_is_copied_with_its_time_changes_nothing(tmp_path):
    """An overlay copies an image's folder when something is written below it."""
    model = make(tmp_path / "image" / "model", model__safetensors=b"one")
    status = os.stat(tmp_path / "image")
    start_s = tick(tmp_path)
    (tmp_path / "image" / "logs").mkdir()
    os.utime(tmp_path / "image", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(tmp_path / "image").st_ctime > start_s
    assert describe_weights(model, read_since_s=start_s)


def test_a_snapshot_of_the_hub_is_its_commit_wherever_it_lies(tmp_path):
    paths = [
        tmp_path / place / "models--org--name" / "snapshots" / commit
        for place, commit in (("a", COMMIT), ("b", COMMIT), ("a", OTHER))
    ]
    facts = [describe_weights(make(path, model__bin=b"x")) for path in paths]
    assert facts[0] == facts[1] == {"hub": "org/name", "commit": COMMIT}
    assert facts[2]["commit"] == OTHER
    # vLLM gets the same snapshot by name.
    refs = tmp_path / "a" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    hub = {"hub_folder": tmp_path / "a"}
    assert describe_weights("org/name", **hub) == facts[0]
    assert describe_weights("org/name", OTHER, **hub) == facts[2]
    with pytest.raises(UnknownWeightsError, match=r"revision='v2'.* commit of 40"):
        describe_weights("org/name", "v2", **hub)
    (refs / "main").write_text("f" * 40)  # Not there.
    with pytest.raises(UnknownWeightsError, match="no snapshot of model='org/name'"):
        describe_weights("org/name", **hub)


def test_what_is_neither_here_nor_on_the_hub_is_refused():
    for model in ("s3://bucket/model", "org/name:Q4_K_M", "a/b/c"):
        with pytest.raises(UnknownWeightsError, match="is neither a folder nor a name"):
            describe_weights(model)


def test_the_hubs_folder_is_the_environments():
    assert hub_folder_of({"HF_HUB_CACHE": "/h", "HF_HOME": "/x"}) == "/h"
    assert hub_folder_of({"XDG_CACHE_HOME": "/c"}) == "/c/huggingface/hub"
    assert hub_folder_of({"HF_HOME": "/x"}, "/models") == "/models"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_knows_when_it_began():
    before_s = time.time()
    code = "from jaxkv.integrations.weights import *; print(process_started_s())"
    done = run_python(code, check=True)
    # The kernel counts in hundredths of a second.
    assert before_s - 0.1 < float(done.stdout) < time.time()
    assert process_started_s() < before_s
