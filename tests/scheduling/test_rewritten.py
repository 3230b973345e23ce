"""An engine shortens and rewrites the history of a running request."""

import itertools
import random

import pytest

from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys, key_from_foreign, keys_to_words
from jaxkv.scheduling.requests import Requests
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.tiers.index import BlockIndex
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    FULL,
    HYBRID,
    Rig,
    StoreRig,
    check_refused,
    make_keys,
    make_request,
    on_host,
)


def rewrite(request, num_kept, *path, extra_tokens=1):
    """Keep the first blocks of a request, as vLLM does where input streams."""
    groups = HYBRID if len(request.block_keys_by_group) > 1 else FULL
    new = make_request("?", *path, groups=groups, extra_tokens=extra_tokens)
    for keys, new_keys in zip(
        request.block_keys_by_group, new.block_keys_by_group, strict=True
    ):
        assert keys[:num_kept] == new_keys[:num_kept]
        del keys[num_kept:]
        keys += new_keys[num_kept:]
    request.num_tokens = request.num_prompt_tokens = new.num_tokens
    kept = min(request.num_computed_tokens, num_kept * BLOCK_SIZE)
    request.num_computed_tokens = kept


def replace_blocks(rig, request, num_kept):
    num = -(-request.num_tokens // BLOCK_SIZE)
    for table in request.tables:
        rig.pool.free(table[num_kept:][::-1])
        table[num_kept:] = rig.pool.allocate(num - num_kept)
    rig.take(request, request.table, 0)


# Copies of keys.


def test_a_mark_is_in_lists_that_begin_with_its_keys():
    keys = make_keys(1, 2, 3)
    mark = KeyMark.of(keys, 2)
    assert mark == (2, keys[1])
    assert KeyMark.of(keys, 7) == (3, keys[2]), "there are no more"
    assert mark.is_in(keys[:2])
    assert mark.is_in(make_keys(1, 2, 9, 9))
    assert not mark.is_in(keys[:1])
    assert not mark.is_in(make_keys(1, 7, 3))
    assert not mark.is_in(make_keys(7, 2, 3)), "its keys stand for all before them"
    assert KeyMark.of(keys, 0) == KeyMark.of([], 7) == KeyMark()
    assert KeyMark().is_in([])


def test_packed_keys_are_those_of_a_request_after_any_rewriting():
    for suffix, num_groups in itertools.product((b"", b"....", bytes(32)), (1, 2)):
        rng = random.Random(7)
        groups = (FULL * 2)[:num_groups]
        request = make_request("r", groups=groups)
        requests = Requests(groups, OffloadRules(), BlockIndex(1, 1))
        path, seen = [], []
        for _ in range(150):
            if rng.random() < 0.3:
                del path[rng.randrange(len(path) + 1) :]
            path += rng.choices(range(3), k=rng.randrange(3))
            now = [
                [key + suffix for key in keys]
                for keys in make_request("r", *path, groups=groups).block_keys_by_group
            ]
            if rng.random() < 0.5:
                request.block_keys_by_group = now
            else:
                for keys, new in zip(request.block_keys_by_group, now, strict=True):
                    keys[:] = new
            before, packed = seen[-1:], requests.of(request)
            assert packed == now
            for keys in packed:
                words = keys_to_words([key_from_foreign(key) for key in keys])
                assert keys.words.tolist() == words.tolist()
                assert not keys.words.flags.writeable
                assert type(keys[1:]) is PackedKeys
            # Who holds a list from before sees it grow, and nothing else.
            for lists, copies in before:
                for keys, copy, new in zip(lists, copies, packed, strict=True):
                    assert keys[: len(copy)] == copy
                    assert (keys is new) == (new[: len(copy)] == copy)
            seen.append((packed, [list(keys) for keys in packed]))
        assert len({id(lists[0]) for lists, _ in seen}) > 15


# Stores.


def serve_and_rewrite(rig, num_kept, *path):
    """Store a request of blocks 1 to 4, rewrite its history, and store that too."""
    request = rig.request("r", 1, 2, 3, 4)
    rig.admit(request)
    rig.step(r=4)
    rig.step(tokens={"r": 1})
    rewrite(request, num_kept, *path)
    replace_blocks(rig, request, num_kept)
    rig.step(r=len(path) - num_kept)
    rig.step(tokens={"r": 1})
    rig.finish("r")
    rig.settle()


@pytest.mark.parametrize("options", [{}, {"groups": HYBRID}, {"shadow": "lru*1"}])
def test_a_rewritten_history_is_stored_under_its_keys(options):
    """The stored count once was of the old history: the new blocks were skipped."""
    for num_more in range(3):
        rig = Rig(device_blocks=32, host_blocks=32, **options)
        path = 1, 2, 8, 9, *range(10, 10 + num_more)
        serve_and_rewrite(rig, 2, *path)
        keys = rig.request("?", *path).block_keys_by_group
        assert set(itertools.chain(*keys)) <= on_host(rig)
        rig.forget_device()
        assert rig.hit(*path) == len(path)
        assert rig.hit(1, 2, 3, 4) == 4
        rig.end()


def test_shadows_are_offered_a_rewritten_history():
    """One of the same length was taken for the one before."""
    rig = Rig(device_blocks=32, host_blocks=32, shadow="lru*1")
    serve_and_rewrite(rig, 2, 1, 2, 8, 9)
    for path in ((1, 2, 8, 9), (1, 2, 3, 4)):
        rig.forget_device()
        rig.run(rig.request("again", *path))
    (shadow,) = rig.scheduler.shadow_counts
    assert shadow.num_found_tokens == 8 * BLOCK_SIZE
    assert rig.scheduler.stats.num_host_hit_tokens == 8 * BLOCK_SIZE


def test_a_shortened_history_stores_no_block_behind_its_end():
    rig = Rig()
    request = rig.request("r", 1, 2, 3, 4)
    rig.admit(request)
    rig.step(r=3)
    rewrite(request, 2, 1, 2, extra_tokens=2)
    replace_blocks(rig, request, 2)
    rig.finish("r")
    rig.settle()
    assert on_host(rig) == set(make_keys(1, 2))
    rig.end()


def test_a_store_under_way_keeps_the_key_of_its_bytes():
    """It waits for room, while its request is rewritten and gets other blocks."""
    rig = Rig(max_blocks_in_flight=3)
    request = rig.request("r", 1, 2, 3, 4)
    rig.admit(request)
    rig.step(r=4)
    rig.step(tokens={"r": 1})
    rewrite(request, 1, 1, 7, 8)
    replace_blocks(rig, request, 1)
    rig.step(r=2)
    while rig.stores:
        rig.store_arrives()
        rig.step(tokens={"r": 1})
    rig.finish("r")
    rig.forget_device()
    # The host has the bytes of each key; a request that loads them compares them.
    for name, path in (("old", (1, 2, 3, 4)), ("new", (1, 7, 8))):
        assert rig.hit(*path) == len(path)
        rig.run(rig.request(name, *path))


def test_a_prompt_that_grows_is_stored_as_a_prompt():
    """With prompt_only, what was appended to the prompt was never stored."""
    rig = Rig(prompt_only=True, device_blocks=32)
    serve_and_rewrite(rig, 4, *range(1, 7))
    assert on_host(rig) == set(make_keys(*range(1, 7)))


# Loads.


def test_an_offer_is_taken_only_by_a_history_rewritten_behind_it():
    rig = Rig()
    rig.store(1, 2, 3, 4)
    request = rig.request("r", 1, 2, 3, 4)
    assert rig.offer(request) == (4 * BLOCK_SIZE, True)
    rewrite(request, 2, 1, 2, 8, 9)
    table = rig.pool.allocate(5)
    match = r"num_external_tokens=16 of request 'r' cannot be loaded: its block keys we"
    check_refused(rig, match, rig.take, request, table, 4 * BLOCK_SIZE)
    rig.pool.free(table)
    assert rig.offer(request) == (2 * BLOCK_SIZE, True)
    rewrite(request, 2, 1, 2, 7)
    rig.take(request, rig.pool.allocate(4), 2 * BLOCK_SIZE)
    assert rig.step().load_event_to_reqs


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("num_kept", [1, 3])
def test_a_load_fails_if_its_history_is_rewritten_meanwhile(groups, num_kept):
    """The bytes that arrive are of the history before."""
    rig = Rig(groups=groups, device_blocks=32, host_blocks=32)
    rig.store(1, 2, 3)
    request = rig.request("r", 1, 2, 3, 4)
    rig.admit(request)
    rig.step()
    rewrite(request, num_kept, *[1, 2, 3][:num_kept], 8, 9)
    names, _ = rig.loads.popleft()
    report = rig.report(finished_recving=tuple(names))
    is_kept = num_kept == 3
    assert report.finished_recving == ("r",) * is_kept
    assert report.failed_recving == ("r",) * (not is_kept)
    assert rig.scheduler.stats.num_loads == 1
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 3, "the host's blocks are right"


def test_a_rewritten_request_asks_the_tiers_below_anew():
    """Its lookup and its fetches there were of the old history."""
    rig = StoreRig()
    rig.has(*make_keys(1, 2, 3), *make_keys(1, 8))
    request = make_request("r", 1, 2, 3)
    assert rig.offer(request) == (None, False)
    rig.step()
    rewrite(request, 1, 1, 8)
    assert rig.offer(request) == (None, False)
    rig.step()
    rig.answer()
    assert rig.offer(request) == (2 * BLOCK_SIZE, True)
    rig.scheduler.request_finished(request)
    rig.settle()
    rig.end()
