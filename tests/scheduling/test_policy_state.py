"""`hazard` restores its learned counts from a file; a foreign file is refused."""

import gc
import json
import logging
import os
import stat
from functools import partial

import jax
import numpy as np
import pytest

from jaxkv import OffloadConfig
from jaxkv.policies.hazard import NUM_CLASSES
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.whatif import policy_state
from jaxkv.scheduling.whatif.policy_state import PolicyStateFile
from tests.rigs.traffic import Traffic


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "learned.json")


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
    if policy == "auto":
        scheduler._manager.change_policy("lru")
    scheduler._policy_state.save()
    return scheduler


@pytest.mark.parametrize("executor", ["native", "xla"])
def test_an_engine_restores_learned_counts(path, executor):
    before = learned(served(path))
    after = make(path, executor=executor)
    assert before.touches.sum() > 1000
    restored = learned(after)
    for name in ("touches", "reuses"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(before, name))
    # The policy rebuilds the index from the counts once in 64 requests.
    assert (restored.index != learned(make(None)).index).any()
    with open(path) as file:
        assert set(json.load(file)) - {"touches", "reuses"} == {
            "format",
            "policy",
            "host_blocks",
            "block_size",
            "unit",
        }


def test_with_auto_its_shadow_learns_while_another_serves_and_goes_on_too(path):
    shadows = served(path, "auto")._whatif.shadows
    executor, _ = shadows.learned_by("hazard")
    after = make(path, "auto")
    tiers = after._manager.executor, after._whatif.shadows.learned_by("hazard")[0]
    for tier in tiers:
        np.testing.assert_array_equal(
            tier.state.policy.reuse.touches, executor.state.policy.reuse.touches
        )


@pytest.mark.parametrize(
    ("rules", "has_file"),
    [
        ({"policy": "hazard"}, True),
        ({"policy": "hazard", "retention": True}, False),
        ({"policy": "hazard", "shadow": "hazard*2"}, True),
        ({"policy": "auto"}, True),
        ({"policy": "auto"}, False),
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
    monkeypatch.setattr(PolicyStateFile, "save", lambda _: saved.append(1))
    traffic = Traffic(1, policy="hazard", policy_state=path)
    traffic.run(500)
    assert 3 < len(saved) < 12
    num_saved = len(saved)
    del traffic
    gc.collect()
    assert len(saved) == num_saved + 1


def test_only_its_owner_may_read_it_and_no_draft_is_left(path, tmp_path):
    make(path)._policy_state.save()
    assert stat.S_IMODE((tmp_path / "learned.json").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["learned.json"]


def test_a_disk_outage_is_two_log_lines(tmp_path, caplog):
    folder = tmp_path / "folder"
    scheduler = make(str(folder / "file"))
    with caplog.at_level(logging.INFO, "jaxkv"):
        for is_there in (False, False, True, True):
            if is_there:
                folder.mkdir(exist_ok=True)
            scheduler._policy_state.save()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cannot be written" in caplog.messages[0]
    assert "file' is written again after 0 s." in caplog.messages[1]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"policy_state='/.*' cannot be read \(Not a dir"):
        make(str(tmp_path / "file" / "state"))


def test_a_file_of_another_policy_size_or_version_is_refused(path):
    make(path)._policy_state.save()
    with open(path) as file:
        text = file.read()
    fields = json.loads(text)
    not_whole = "is incomplete or not a policy state"
    for change, match in (
        ({"host_blocks": 21}, "has .*'host_blocks': 21.* must have .*: 20"),
        ({"policy": "lru"}, "has .*'policy': 'lru'"),
        ({"format": "jaxkv policy state 2"}, "policy state 2"),
        ({"touches": [1] * (NUM_CLASSES - 1)}, not_whole),
        *[
            ({"touches": [number] * NUM_CLASSES}, not_whole)
            for number in (-1, 1 << 40, 0.5, 1 << 70, float("nan"))
        ],
        ({"reuses": "none"}, not_whole),
        ({"touches": [(1 << 62) + 7] * 4 + [0] * (NUM_CLASSES - 4)}, not_whole),
        ({"touches": [True] + [1] * (NUM_CLASSES - 1)}, not_whole),
        ({"another": 1}, not_whole),
        # One that is there twice.
        (text.replace('"policy"', '"policy": "lru", "policy"').encode(), not_whole),
        *[(text, not_whole) for text in (b"", b"[]", b"\xff", b"[" * 100_000, b"{}")],
    ):
        content = change
        if isinstance(change, dict):
            content = json.dumps(fields | change).encode()
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(ValueError, match=f"policy_state=.*{match}"):
            make(path)


def test_a_special_file_is_refused_without_waiting(path):
    for number, place in enumerate(
        (os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero"))
    ):
        name = f"{path}.{number}"
        place(name)
        with pytest.raises(ValueError, match="is not a plain file: remove it, or name"):
            make(name)


def test_policies_that_learn_nothing_and_several_processes_are_refused(
    path, monkeypatch
):
    for policy in ("lru", "arc"):
        config = OffloadConfig(
            policy_state=path, cache_policy=policy, num_host_blocks=8
        )
        for call in (partial(make, path, policy), partial(config.make_scheduler, 4)):
            with pytest.raises(ValueError, match="needs cache_policy='hazard' or"):
                call()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="is for one process"):
        make(path, policy_clock=lambda: 1.0)
