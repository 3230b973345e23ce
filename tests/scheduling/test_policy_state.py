"""`hazard` restores its learned counts from a file; a foreign file is refused."""

import contextlib
import gc
import io
import logging
import os
import stat
import threading
import zipfile
from functools import partial

import jax
import numpy as np
import pytest

from jaxkv import OffloadConfig
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.whatif import policy_state
from jaxkv.scheduling.whatif.policy_state import PolicyStateFile
from tests.rigs.refused_threads import refused_threads
from tests.rigs.traffic import Traffic


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "learned.npz")


def make(path, policy="hazard", num_host_blocks=20, **options):
    return OffloadScheduler(4, num_host_blocks, policy, policy_state=path, **options)


def learned(scheduler):
    return jax.tree.map(np.array, scheduler._manager.executor.state.policy.reuse)


def served(path, policy="hazard"):
    """Run an engine and save what it has learned; return its scheduler."""
    traffic = Traffic(
        1, policy=policy, device_blocks=28, host_blocks=20, policy_state=path
    )
    scheduler = traffic.run(1000)
    save(scheduler)
    return scheduler


def save(scheduler):
    file = scheduler._policy_state
    file.save()
    assert file.has_written.wait(60)


def test_an_engine_restores_learned_counts(path):
    before = learned(served(path))
    after = make(path)
    assert before.touches.sum() > 60
    restored = learned(after)
    for name in ("touches", "reuses"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(before, name))
    # The policy rebuilds the index from the counts once in 64 requests.
    assert (restored.index != learned(make(None)).index).any()
    with np.load(path, allow_pickle=False) as file:
        facts = {name: int(file[name]) for name in file if file[name].ndim == 0}
    num_rows = facts.pop("num_rows")
    assert facts == {"format": 5, "host_blocks": 20, "block_size": 4}
    assert num_rows == restored.num_rows > 10


@pytest.mark.parametrize(
    ("rules", "has_file"),
    [
        ({"policy": "hazard"}, True),
        ({"policy": "hazard", "retention": True}, False),
        ({"policy": "hazard", "shadow": "hazard*2"}, True),
        ({"policy": "lru", "shadow": "hazard*1"}, False),
    ],
    ids=str,
)
def test_a_reset_forgets_blocks_and_not_what_was_learned(path, rules, has_file):
    traffic = Traffic(1, policy_state=path if has_file else None, **rules)
    scheduler = traffic.run(300)
    traffic.rig.settle()
    before = tables_of(scheduler)
    assert before
    assert all(table.touches.any() for table in before)
    assert scheduler.reset()
    assert scheduler.num_host_blocks_held == 0
    for old, new in zip(before, tables_of(scheduler), strict=True):
        jax.tree.map(np.testing.assert_array_equal, old, new)


def tables_of(scheduler):
    """Return the learned counts of each policy that learns."""
    shadows = getattr(scheduler._whatif, "shadows", None)
    tiers = [] if shadows is None else shadows._tiers
    states = [tier.executor.state.policy for tier in (scheduler._manager, *tiers)]
    states = [getattr(state, "inner", state) for state in states]
    learned = [state.reuse for state in states if hasattr(state, "reuse")]
    return jax.tree.map(np.array, learned)


def test_the_file_is_saved_periodically_and_at_the_end(path, monkeypatch):
    monkeypatch.setattr(policy_state, "SAVE_EVERY_MS", 60_000)
    saved = []
    submit = PolicyStateFile._submit

    def record(file, **named):
        if file._path == path:  # Not of a scheduler that another test has left.
            saved.append(named)
        submit(file, **named)

    monkeypatch.setattr(PolicyStateFile, "_submit", record)
    written = PolicyStateFile.finished
    monkeypatch.setattr(
        PolicyStateFile,
        "finished",
        lambda file, end: (written(file, end), file.has_written.wait(60)),
    )
    traffic = Traffic(1, policy="hazard", policy_state=path)
    traffic.run(500)
    assert 3 < len(saved) < 12
    num_saved = len(saved)
    del traffic
    gc.collect()
    assert saved[num_saved:] == [{"is_last": True}]


def test_only_its_owner_may_read_it_and_no_draft_is_left(path, tmp_path):
    save(make(path))
    assert stat.S_IMODE((tmp_path / "learned.npz").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["learned.npz"]


def test_a_disk_outage_is_two_log_lines(tmp_path, caplog):
    folder = tmp_path / "folder"
    scheduler = make(str(folder / "file"))
    with caplog.at_level(logging.INFO, "jaxkv"):
        for is_there in (False, False, True, True):
            if is_there:
                folder.mkdir(exist_ok=True)
            save(scheduler)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cannot be written" in caplog.messages[0]
    assert "file' is written again after 0 s." in caplog.messages[1]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"policy_state='/.*' cannot be read \(Not a dir"):
        make(str(tmp_path / "file" / "state"))


def npz(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(members, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def refuse(path, content, match):
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises((ValueError, OSError), match=f"policy_state=.*{match}"):
        make(path)


def test_a_file_of_another_size_or_format_is_refused(path):
    save(make(path))
    with np.load(path) as file:
        arrays = dict(file)
    not_whole = "is incomplete or not a policy state"
    two, ones = np.array(2, np.int32), np.ones_like(arrays["codes"])
    for change, match in (
        ({"host_blocks": np.int64(21)}, "has host_blocks=21, but must have 20"),
        ({"format": np.int64(4)}, "has format=4, but must have 5"),
        ({"touches": arrays["touches"][1:]}, not_whole),
        ({"touches": arrays["touches"] - 1}, not_whole),
        ({"touches": arrays["touches"] + np.inf}, not_whole),
        ({"num_rows": np.array(2049, np.int32)}, not_whole),
        ({"num_rows": np.array(0, np.int32)}, not_whole),
        ({"num_rows": np.array(3, np.int32)}, not_whole),  # Rows without a code.
        ({"parents": arrays["parents"] + 9, "num_rows": two, "codes": ones}, not_whole),
        ({"begins": arrays["begins"] + 9, "num_rows": two, "codes": ones}, not_whole),
        ({"num_rows": np.array(3, np.int32), "codes": ones}, not_whole),  # One twice.
        ({"touches": arrays["touches"].astype(object)}, not_whole),
        ({"reuses": np.array("none")}, not_whole),
    ):
        refuse(path, npz(arrays | change), match)
    del arrays["block_size"]
    refuse(path, npz(arrays), not_whole)
    old = b'{"format": "jaxkv policy state 1", "policy": "hazard", "host_blocks": 20}'
    refuse(path, old, "has format=1, but must have 5: remove it, or name another file")
    for content in (b"", b"{}", b"\xff", b"PK\x03\x04", bytes(1000)):
        refuse(path, content, not_whole)
    refuse(path, bytes(1 << 20), "cannot be read .it has more than 524288 bytes")


def test_no_number_in_a_file_decides_how_much_memory_is_allocated(path, monkeypatch):
    save(make(path))
    with zipfile.ZipFile(path) as archive:
        members = {name[:-4]: archive.read(name) for name in archive.namelist()}
    huge = io.BytesIO()
    header = {"descr": "<i4", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(huge, header)
    bomb = zipped(members | {"touches": bytes(1 << 25)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 16
    sizes, real = [], zipfile.ZipExtFile.read
    monkeypatch.setattr(
        zipfile.ZipExtFile,
        "read",
        lambda file, n=-1: (sizes.append(n), real(file, n))[1],
    )
    not_whole = "is incomplete or not a policy state"
    for content in (
        zipped(members | {"touches": huge.getvalue()}),
        huge.getvalue(),
        bomb,
    ):
        refuse(path, content, not_whole)
    assert sizes
    assert 0 < min(sizes) <= max(sizes) < 1 << 19


def test_a_hook_does_not_wait_for_a_slow_file_system(path, monkeypatch):
    """The file has the counts of the moment of the hook, though it is written later."""
    monkeypatch.setattr(policy_state, "SAVE_EVERY_MS", 60_000)
    begun, goes_on, replace = threading.Event(), threading.Event(), os.replace

    def replace_late(*args, **named):
        begun.set()
        assert goes_on.wait(60)
        replace(*args, **named)

    monkeypatch.setattr(os, "replace", replace_late)
    kept, submit = [], PolicyStateFile._submit

    def record(file, **named):
        kept.append(np.array(file.learned().touches))
        submit(file, **named)

    monkeypatch.setattr(PolicyStateFile, "_submit", record)
    traffic = Traffic(1, policy="hazard", host_blocks=20, policy_state=path)
    scheduler = traffic.run(500)  # Every hook returns.
    assert begun.wait(60)
    assert len(kept) == 1  # The thread still writes the first ones.
    assert (np.array(scheduler._policy_state.learned().touches) != kept[0]).any()
    goes_on.set()
    assert scheduler._policy_state.has_written.wait(60)
    with np.load(path) as file:
        np.testing.assert_array_equal(file["touches"], kept[0])


def test_without_a_thread_the_last_counts_are_saved_by_the_caller(path, caplog):
    scheduler = make(path)
    with refused_threads(), caplog.at_level(logging.INFO, "jaxkv"):
        save(scheduler)
        assert not os.path.exists(path)
        scheduler._policy_state.close()
    assert os.path.exists(path)
    assert "no thread can be started" in caplog.messages[0]


def test_a_special_file_is_refused_without_waiting(path):
    for place, why in (
        (os.mkfifo, "it is not a plain file"),
        (os.mkdir, "Is a directory"),
        (partial(os.symlink, "/dev/zero"), "it is not a plain file"),
    ):
        name = f"{path}.{why}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        place(name)
        with pytest.raises(OSError, match=rf"{why}\); name another file"):
            make(name)


def test_policies_that_learn_nothing_and_several_processes_are_refused(
    path, monkeypatch
):
    for policy in ("lru", "arc"):
        config = OffloadConfig(
            policy_state=path, cache_policy=policy, num_host_blocks=8
        )
        for call in (partial(make, path, policy), partial(config.make_scheduler, 4)):
            with pytest.raises(ValueError, match="needs cache_policy='hazard',"):
                call()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="is for one process"):
        make(path, policy_clock=lambda: 1.0)
