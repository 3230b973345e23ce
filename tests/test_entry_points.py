"""Arguments of compiled functions are checked before the call."""

import copy
import importlib
import pathlib
import pickle
import re

import jax
import numpy as np
import pytest

from jaxkv import DeviceBlockPool, OffloadingManager
from jaxkv.compiling import Bound
from jaxkv.keys.packed import PackedKeys, UnlistedKeys, keys_to_words
from jaxkv.search.groups import FullAttention
from jaxkv.search.hits import find_longest_hit
from jaxkv.tiers.retention import Retention
from jaxkv.transfer import host_rows
from tests.rigs import children

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_BLOCKS = 8
WRONG_IDS = [-(1 << 63), -1, NUM_BLOCKS, 10**9, 1 << 32, 1 << 40, (1 << 63) - 1]
WRONG_IDS += [1 << 63]
KEY = bytes(32)


def refuse_words(case):
    for words in (np.zeros((1, 7), np.uint32), np.zeros((1, 8), np.int32)):
        with pytest.raises(ValueError, match=r"must be uint32\[1, 8\]"):
            PackedKeys([KEY], words)
        with pytest.raises(ValueError, match=r"must be uint32\[1, 8\]"):
            UnlistedKeys(words)


def refuse_ids(call):
    """A check that a call refuses ids that are no block's."""

    def check(case):
        for wrong in WRONG_IDS:
            with pytest.raises(
                ValueError, match=rf"block_id={wrong} (must be|has more)"
            ):
                call(case, [0, wrong])
        with pytest.raises(ValueError, match=f"block_id={1 << 63} must be in"):
            call(case, np.array([0, 1 << 63], np.uint64))

    return check


def refuse_counts(name, wrong, call):
    """A check that a call refuses numbers under a name."""

    def check(case):
        for number in wrong:
            with pytest.raises(ValueError, match=f"{name}={number} must be"):
                call(case, number)

    return check


def all_of(*checks):
    return lambda case: [check(case) for check in checks]


COUNTS = [-(1 << 63), -1, 1 << 31, 1 << 40, 1 << 63]
PLACES = [-(1 << 63), -1, 3, 10**9, 1 << 40, 1 << 63]


def end_step(case, num_hits=0, block_id=None):
    step = case.manager.request_step([b"new"])
    step.num_hits = num_hits
    if block_id is not None:
        step.pending[1][0] = block_id
    try:
        case.manager.complete_step(step)
    finally:
        case.manager.complete_store([b"new"], success=False)


def end_mutated_step(case):
    for wrong in WRONG_IDS[1:-1]:
        if wrong != -1:  # -1 stands for a block without a store.
            with pytest.raises(ValueError, match=rf"block_id={wrong} must be in \[-1"):
                end_step(case, block_id=wrong)


def copy_row(function):
    memory = np.zeros(12, np.uint8)
    table = np.array([[memory.ctypes.data, 1, 12, 4]], np.int64)

    def check(case):
        for place in PLACES:
            with pytest.raises(ValueError, match=rf"place={place} must be in \[0, 3\)"):
                function(table, place, np.zeros(4, np.uint8))
        with pytest.raises(ValueError, match="a payload of 5 bytes must have 4"):
            function(table, 0, np.zeros(5, np.uint8))

    return check


def refuse_masks(case):
    for masks in ([], [np.ones((2, 2), np.bool_)]):
        with pytest.raises(ValueError, match="must be"):
            find_longest_hit((FullAttention(16),), masks, 16)


def clamps(case):
    """Counts of free blocks are cut to those that there are."""
    for num in COUNTS:
        assert len(case.pool.next_victims(num).block_ids) <= NUM_BLOCKS
        assert len(case.pool.next_free(num)[0]) == (NUM_BLOCKS - 1 if num > 0 else 0)
        assert not len(case.manager.next_device_victims(case.pool, num).block_ids)


def places_nothing(case):
    """Blocks that hold nothing, or are none, find no place."""
    keys = PackedKeys([KEY, KEY], keys_to_words([KEY, KEY]))
    for wrong in (*PLACES[:-1], 0, 1):
        for ids in ([wrong, 1], [1, wrong]):
            blocks = np.array(ids, np.int64)
            assert case.manager.place_from(case.pool, keys, blocks, True) is None
    with pytest.raises(ValueError, match=r"len\(sources\)=1 blocks must"):
        case.manager.place_from(case.pool, keys, [1], True)


def of_pool(name, *args):
    return refuse_ids(lambda case, ids: getattr(case.pool, name)(ids, *args))


INNER = "called by compiled functions and by checks alone"
NOTHING = "takes nothing"

# Every function that other rooms give arguments to: what refuses those that are wrong.
ROWS = {
    **{
        f"host_native.{name}": refuse_words
        for name in (
            *("find", "find_readable", "lookup", "touch", "discard"),
            *("prepare_load", "complete_load", "prepare_store", "complete_store"),
            "request_step",
        )
    },
    "host_native.note": all_of(
        refuse_counts(
            "num_tokens", COUNTS, lambda c, n: c.listening.begin_request([KEY], n, 5)
        ),
        refuse_counts(
            "position",
            COUNTS[:-1],
            lambda c, n: c.listening.begin_request([KEY], 16, 5, [n]),
        ),
        refuse_counts(
            "mark",
            [-(1 << 63), -(1 << 31) - 1, *COUNTS[2:]],
            lambda c, n: c.listening.finish_request([KEY], n, 5),
        ),
        refuse_counts(
            "num_output_tokens",
            COUNTS,
            lambda c, n: c.listening.finish_request([KEY], 0, 5, n),
        ),
        refuse_counts(
            "position",
            COUNTS[:-1],
            lambda c, n: c.listening.finish_request([KEY], 0, 5, positions=[n]),
        ),
        refuse_counts(
            "priority",
            [-1, 100, 1 << 63],
            lambda c, n: c.listening.retain([KEY], Retention(n, ttl_s=1), 5),
        ),
    ),
    "host_native.pin": refuse_ids(lambda case, ids: case.manager.pin(ids)),
    "host_native.complete_step": all_of(
        refuse_ids(lambda case, ids: case.manager.unpin(ids)),
        refuse_ids(lambda case, ids: case.manager.publish(ids, [KEY, KEY])),
        refuse_counts("num_hits", [-(1 << 63), -1, 2, 1 << 40, 1 << 63], end_step),
        end_mutated_step,
    ),
    "host_native.place_from": places_nothing,
    "host_native.next_victims": clamps,
    "host_native.find_outside": INNER,
    "device_native.find": refuse_words,
    "device_native.find_prefix": refuse_words,
    "device_native.find_outside": of_pool("counts"),
    "device_native.holds": of_pool("holds", [KEY, KEY]),
    "device_native.cache": of_pool("cache", [KEY, KEY]),
    **{
        f"device_native.{name}": of_pool(name)
        for name in ("touch", "free", "pin", "unpin", "evict")
    },
    "device_native.add_pins": INNER,
    "device_native.record_copies": of_pool("record_copies", [0, 0]),
    "device_native.forget_copies": refuse_words,
    "device_native.next_free": clamps,
    "device_native.next_victims": clamps,
    "device_native.allocate": refuse_counts(
        "num", [-(1 << 63), -1], lambda case, num: case.pool.allocate(num)
    ),
    "hits.find_longest_hit": refuse_masks,
    "hits.Hit": NOTHING,
    "host_rows.copy_out": copy_row(host_rows.copy_out),
    "host_rows.copy_in": copy_row(host_rows.copy_in),
    "host_rows.prepare": NOTHING,
}


def test_every_entry_point_has_a_row():
    names = set()
    for path in (ROOT / "jaxkv").glob("**/*.py"):
        room, text = path.relative_to(ROOT / "jaxkv").parts[0], path.read_text("utf-8")
        # What compiled functions alone call, and what compiles them.
        has_any = re.search(r"import [(\s]*compiled\b", text)
        if room in ("policies", "compiling.py") or not has_any:
            continue
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        names |= {
            f"{path.stem}.{name}"
            for name, value in vars(importlib.import_module(module)).items()
            if callable(value)
            and not name.startswith("_")
            and getattr(value, "__module__", None) == module
        }
    assert names == set(ROWS)


class Case:
    """A host and a device tier with some blocks, one of each tier being pinned."""

    def __init__(self, executor):
        self.manager = OffloadingManager(16, NUM_BLOCKS, executor=executor)
        self.manager.complete_step(self.manager.request_step([b"a", b"b"]))
        self.manager.prepare_load([b"a"])
        self.pool = DeviceBlockPool(NUM_BLOCKS)
        # Its calls are refused before an executor runs.
        self.listening = OffloadingManager(16, NUM_BLOCKS, "hazard", retention=True)

    def state(self):
        managers = self.manager, self.listening
        states = [manager.executor.state for manager in managers]
        return [np.array(leaf) for leaf in jax.tree.leaves([*states, self.pool.state])]


@pytest.fixture(params=["native", "xla"], scope="module")
def case(request):
    return Case(request.param)


def test_an_entry_point_refuses_what_is_wrong_and_changes_nothing(case):
    for name, check in ROWS.items():
        if not callable(check):
            continue
        before = case.state()
        check(case)
        if name != "host_native.complete_step":  # It begins steps, ends their stores.
            for old, new in zip(before, case.state(), strict=True):
                np.testing.assert_array_equal(old, new, err_msg=name)
        assert case.manager.lookup([b"a", b"b"]) == 2, name


@pytest.mark.parametrize("num", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_no_random_number_crashes_a_public_call(num):
    done = children.run("-m", "tests.rigs.random_calls", "0", num, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert num // 10 < int(done.stdout) < 9 * num // 10


def test_a_bound_state_is_neither_copied_nor_pickled():
    bound = DeviceBlockPool(2).bound
    assert isinstance(bound, Bound)
    message = re.escape("Copy its state with copy_to_numpy(bound.state)")
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=message):
            take(bound)
