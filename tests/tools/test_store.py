"""`jaxkv store`: the namespaces of a store, and removing one."""

import io
import os
import re
import time
from contextlib import closing

import pytest

from jaxkv.tools import main as cli
from jaxkv.tools.store import namespaces
from jaxkv.transfer.storage import MemoryStore, ObjectFormat, StoreError, open_store
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.objects import HEADER_BYTES
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.servers import redis_server

pytestmark = pytest.mark.usefixtures("plain_output")

PAYLOAD_BYTES = 1000
OLD = ObjectFormat(b"old model", "u8", PAYLOAD_BYTES, num_shards=2)
NEW = ObjectFormat(b"new model", "u8", PAYLOAD_BYTES, secret="a secret of 16 bytes")
NUM_OLD, NUM_NEW = 30, 5
DAY_S = 86_400
LABEL = "llama, bfloat16, 16 tokens a block"


class Bucket(FaultyStore):
    """A store without sizes and times."""

    def times(self, names):
        return None


def fill(url):
    """Write two namespaces, one of them with a limit and an owner's limit."""
    with closing(open_store(url)) as store:
        for objects, num in ((OLD, NUM_OLD), (NEW, NUM_NEW)):
            for number in range(num):
                key = number.to_bytes(32, "little")
                blob = objects.encode(key, [bytes(PAYLOAD_BYTES)])
                store.put([(name, blob) for name in objects.all_names(key)])
        for bound in (Bound(40), Bound(20, True)):
            store.put([(OLD.bound_name(bound), [b"jaxkv\n"])])
        names = OLD.order_name, f"{OLD.folder}/readme", OLD.label_name(LABEL)
        store.put([(name, [b"x"]) for name in names])


def make_old(folder, age_s=3 * DAY_S):
    for path in (folder / OLD.folder).rglob("*"):
        os.utime(path, (time.time() - age_s,) * 2)


@pytest.fixture(params=["folder", "redis", "bucket"])
def url(request, tmp_path, monkeypatch):
    if request.param == "redis":
        with redis_server(tmp_path) as (url, _):
            fill(url)
            yield url
        return
    url = str(tmp_path / "kv")
    fill(url)
    if request.param == "bucket":
        monkeypatch.setattr(
            namespaces, "open_store", lambda text: Bucket(open_store(text), 0)
        )
    yield url


def test_namespaces_are_listed_with_blocks_bytes_use_and_limit(url, run_line):
    out, err, figures = run_line(f"store ls {url}")
    rows = {row.pop("namespace"): row for row in figures["namespaces"]}
    old, new = (rows[blocks.folder] for blocks in (OLD, NEW))
    assert (old["blocks"], old["objects"], old["shards"]) == (30, 60, 2)
    assert (new["blocks"], new["objects"], new["shards"]) == (5, 5, 1)
    assert (old["limit_blocks"], old["limit_is_owners"]) == (20, True)
    assert new["limit_blocks"] is None
    object_bytes = HEADER_BYTES + PAYLOAD_BYTES
    if url.startswith("redis"):  # It counts its own memory, too.
        assert 60 * object_bytes <= old["bytes"] <= 60 * 2 * object_bytes
    else:
        assert (old["bytes"], new["bytes"]) == (60 * object_bytes, 5 * object_bytes)
    ages = [row["last_used_s_ago"] for row in (old, new)]
    has_times = namespaces.open_store is open_store
    assert old["bytes_are_estimated"] is not has_times
    assert [age is not None and age < 60 for age in ages] == [has_times] * 2
    row = rf"^{OLD.folder} +30 .* 20 \(owner\)\n  {LABEL}$"
    assert re.search(row, out, re.M)
    assert (old["label"], new["label"]) == (LABEL, "")
    assert err == f"listing {figures['url']} ...\n"
    out, _, figures = run_line(f"store size {url}")
    assert (figures["namespaces"], figures["blocks"]) == (2, 35)
    assert figures["bytes"] == old["bytes"] + new["bytes"]
    assert "35 blocks of 2 namespaces" in out


def test_a_namespace_in_use_is_removed_only_by_force(url, run_line, capsys):
    words = ["store", "rm", url, "--namespace", NEW.folder, "--yes"]
    if namespaces.open_store is open_store:
        assert cli.main(words) == 1
        assert "s ago and may be in use: stop its engines" in capsys.readouterr().err
    # Listing a store does not use its blocks.
    _, _, before = run_line(f"store ls {url}")
    out, _, figures = run_line(" ".join([*words, "--force"]))
    assert out.startswith(f"Removed {NEW.folder}: 5 objects, ")
    assert figures["removed_objects"] == 5
    _, _, after = run_line(f"store ls {url}")
    kept = [row for row in before["namespaces"] if row["blocks"] == NUM_OLD]
    ages = [row.pop("last_used_s_ago") for row in (*kept, *after["namespaces"])]
    assert after["namespaces"] == kept
    assert (ages[0] is None) == (ages[1] is None)


def test_an_old_namespace_is_removed_once_confirmed(
    tmp_path, monkeypatch, run_line, capsys
):
    fill(str(tmp_path))
    make_old(tmp_path)
    out, *_ = run_line(f"store ls {tmp_path}")
    assert re.search(rf"^{OLD.folder} .* 3 d ago", out, re.M)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    line = f"store rm {tmp_path} --namespace {OLD.folder}"
    monkeypatch.setattr("sys.stdin", Terminal("\nyes\n"))
    assert cli.main(line.split()) == 1
    err = capsys.readouterr().err
    assert f"30 blocks, 69.8 KiB, last used 3 d ago.\n{LABEL}. Remove it? [y/N] " in err
    assert err.endswith("not confirmed: nothing was removed\n")
    out, *_ = run_line(line)
    assert f"Removed {OLD.folder}: 64 objects, 69.8 KiB.\n" in out
    # Files that are not jaxkv's stay.
    assert [path.name for path in (tmp_path / OLD.folder).rglob("*")] == ["readme"]
    run_line(f"store rm {tmp_path} --namespace {NEW.folder} --yes --force")
    assert not (tmp_path / NEW.folder).exists()
    assert (
        run_line(f"store ls {tmp_path}")[0] == f"No namespaces in file://{tmp_path}.\n"
    )


def test_a_namespace_is_in_use_for_five_minutes(tmp_path, capsys):
    fill(str(tmp_path))
    words = ["store", "rm", str(tmp_path), "--namespace", OLD.folder, "--yes"]
    for age_s, code in ((270, 1), (330, 0)):
        make_old(tmp_path, age_s)
        assert cli.main(words) == code
    assert not list((tmp_path / OLD.folder).rglob("*.0"))


def test_blocks_in_a_folder_that_cannot_be_read_are_reported_and_rm_says_what_is_left(
    tmp_path, monkeypatch, run_line, capsys
):
    fill(str(tmp_path))
    locked = next((tmp_path / NEW.folder).iterdir())
    scandir = os.scandir

    def refuse(path):
        if str(path) == str(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    name = f"{NEW.folder}/{locked.name}"
    for command in ("ls", "size"):
        _, err, figures = run_line(f"store {command} {tmp_path}", 1)
        assert figures["unread_folders"] == [name]
        assert f"1 folder cannot be read, such as {name}: their blocks are" in err
    line = f"store rm {tmp_path} --namespace {NEW.folder} --yes --force"
    out, _, figures = run_line(line, 1)
    assert f"LEFT: {name}, which cannot be read" in out
    assert figures["unread_folders"] == [name]
    assert figures["removed_objects"] == NUM_NEW - 1
    monkeypatch.undo()
    out, *_ = run_line(line)
    assert out.startswith(f"Removed {NEW.folder}: 1 objects")
    assert not (tmp_path / NEW.folder).exists()


def test_an_object_that_is_not_deleted_is_counted_as_left(
    tmp_path, monkeypatch, run_line
):
    fill(str(tmp_path))
    store = open_store(str(tmp_path))
    delete = store.delete

    def delete_but_one(names):
        return [StoreError("denied", "read-only"), *delete(names[1:])]

    store.delete = delete_but_one
    monkeypatch.setattr(namespaces, "open_store", lambda text: store)
    line = f"store rm {tmp_path} --namespace {NEW.folder} --yes --force"
    out, _, figures = run_line(line, 1)
    num_left = len(list((tmp_path / NEW.folder).rglob("*.0")))
    assert figures["left_objects"] == num_left > 0
    assert f"LEFT: {num_left} objects that can be listed (read-only)" in out


def test_size_counts_the_bytes_of_cut_objects_and_rm_removes_half_written_ones(
    tmp_path, run_line
):
    fill(str(tmp_path))
    first, second, *_ = sorted((tmp_path / NEW.folder).rglob("*.0"))
    os.truncate(first, 10)
    *_, figures = run_line(f"store ls {tmp_path}")
    (new,) = (row for row in figures["namespaces"] if row["blocks"] == NUM_NEW)
    assert new["bytes"] == 10 + 4 * (HEADER_BYTES + PAYLOAD_BYTES)
    (second.parent / ".0123456789abcdef-7").write_bytes(b"a prompt")
    run_line(f"store rm {tmp_path} --namespace {NEW.folder} --yes --force")
    assert not (tmp_path / NEW.folder).exists()


def test_the_url_may_come_from_the_environment(tmp_path, monkeypatch, run_line):
    fill(str(tmp_path))
    monkeypatch.setenv("JAXKV_STORAGE", str(tmp_path))
    assert run_line("store size")[2]["blocks"] == NUM_OLD + NUM_NEW


def test_a_store_that_cannot_list_or_fails_is_a_one_line_error(
    refused, monkeypatch, capsys
):
    class NoList(FaultyStore):
        can_list = False

    memory = MemoryStore()
    monkeypatch.setattr(namespaces, "open_store", lambda text: NoList(memory, 0))
    expected = "URL: 'faulty+memory://' cannot list its objects"
    assert expected in refused("store ls .")
    memory.put([(OLD.order_name, [b"x"])])
    store = FaultyStore(memory, 0, Faults(error=1.0))
    monkeypatch.setattr(namespaces, "open_store", lambda text: store)
    assert cli.main(["store", "size", "."]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "URL: 'faulty+memory://' fails (other): injected" in err
