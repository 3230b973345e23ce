"""Engines that own their pool: a little of the driver, and its negative controls."""

import collections
import random

import pytest

from jaxkv.integrations.engine_hooks import EngineHooks
from jaxkv.scheduling.eager import EagerStores
from jaxkv.scheduling.places import Places
from jaxkv.scheduling.requests import Requests
from jaxkv.scheduling.stores import Stores
from tests.campaign.borrowed import run_borrowed
from tests.campaign.model import WrongBytesError
from tests.campaign.paged import no_notes

STEPS, MAX_READS = 120, 10_000


def drive(name, max_reads, **options):
    counts, number = collections.Counter(), 0
    while counts["block reads compared"] < max_reads:
        rng = random.Random(f"{name}/{number}")
        try:
            run_borrowed(rng, counts, no_notes, STEPS, **options)
        except AssertionError as error:
            reads = counts["block reads compared"]
            error.add_note(f"engine {name}/{number}, after {reads} block reads")
            raise
        number += 1
    return counts


def test_an_engine_that_owns_its_pool_reads_no_wrong_byte():
    counts = drive("smoke", 2000, has_process=False)
    assert min(counts[name] for name in ("blocks loaded", "rewrites", "aborts")) > 5


def test_an_engine_whose_worker_is_another_process_reads_no_wrong_byte():
    assert drive("process", 100, has_process=True)["blocks loaded"]


@pytest.mark.long
def test_100_000_reads_of_engines_that_own_their_pools_are_right():
    assert drive("long", 100_000)["loads failed"] > 100


class TrustingCaps(dict):
    """Trusts the engine's number of computed tokens, whatever is in flight."""

    def __setitem__(self, name, num_tokens):
        super().__setitem__(name, 1 << 62)


def table_entries_stay_valid(patch):
    patch.setattr(Places, "read", lambda _, table, first, end: table.ids[first:end])


def hits_are_offered_at_once(patch):
    begun = EagerStores.begun

    def begin(stores, *args):
        begun(stores, *args)
        stores._new.clear()

    patch.setattr(EagerStores, "begun", begin)


def tokens_count_while_they_load(patch):
    create = Requests.__init__

    def trust(requests, *args, **named):
        create(requests, *args, **named)
        requests.caps = TrustingCaps()

    patch.setattr(Requests, "__init__", trust)


def keys_are_followed_by_their_number(patch):
    def follow(hooks, tracked):
        size = hooks._namespace.block_size
        if tracked.num_tokens // size != len(tracked.block_keys):
            tracked.chain.follow(hooks._tokens_of(tracked.request))

    patch.setattr(EngineHooks, "_follow", follow)


def stores_survive_a_rewind(patch):
    patch.setattr(Stores, "void", lambda *_: None)


def new_weights_change_no_request(patch):
    def change(hooks, namespace):
        hooks._namespace = namespace

    patch.setattr(EngineHooks, "change_namespace", change)


@pytest.mark.long
@pytest.mark.parametrize(
    "put_back",
    [
        table_entries_stay_valid,
        hits_are_offered_at_once,
        tokens_count_while_they_load,
        keys_are_followed_by_their_number,
        stores_survive_a_rewind,
        new_weights_change_no_request,
    ],
)
def test_old_behaviour_is_noticed_within_10_000_reads(monkeypatch, put_back):
    put_back(monkeypatch)
    with pytest.raises(WrongBytesError):
        drive("control", MAX_READS, has_process=False)
