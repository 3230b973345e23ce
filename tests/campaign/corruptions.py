"""Faults put in on purpose, which the campaign must notice: its negative control.

Each function breaks one promise in a `PagedEngine` that was just made.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from tests.campaign.users import PLAIN, User


def a_load_flips_a_byte(engine):
    """One byte of one block of every load is flipped before it is reported."""
    mover = engine.movers[0]
    real = mover._collect

    def collect(pool, completions):
        pool = real(pool, completions)
        for done in completions:
            flight = mover._flights.get(done.ticket)
            if flight is not None and flight.device_ids:
                pool = [dict(layer) for layer in pool]
                block = flight.device_ids[-1]
                k = pool[-1]["k"]
                pool[-1]["k"] = k.at[block, -1, -1, -1].set(k[block, -1, -1, -1] ^ 1)
        return pool

    mover._collect = collect


def a_save_mixes_up_its_blocks(engine):
    """A save stores the blocks of its list in the reverse order."""
    mover = engine.movers[0]
    real = mover.save

    def save(pool, device_ids, host_ids):
        return real(pool, np.array(device_ids)[::-1], host_ids)

    mover.save = save


def a_failed_load_is_reported_as_done(engine):
    update = engine.scheduler.update_connector_output

    def lie(report):
        loads = report.finished_recving + report.failed_recving
        return update(replace(report, finished_recving=loads, failed_recving=()))

    engine.scheduler.update_connector_output = lie


def a_failed_save_is_reported_as_done(engine):
    update = engine.scheduler.update_connector_output

    def lie(report):
        saves = report.completed_store_events + report.failed_store_events
        reported = {"completed_store_events": saves, "failed_store_events": ()}
        return update(replace(report, **reported))

    engine.scheduler.update_connector_output = lie


def keys_leave_out_salt_and_adapter(engine):
    """Requests of all tenants and adapters have the keys of one."""
    submit = engine.submit

    def submit_without(tokens, extras):
        submit(tokens, extras)
        user = list(engine.users.values())[-1]
        fields = user.tokens, PLAIN, user.max_tokens, engine.weights, f"v{engine.epoch}"
        user._chains = User(user.request_id, engine.groups, *fields)._chains

    engine.submit = submit_without


def a_reset_keeps_everything(engine):
    """A reset of both tiers keeps their blocks and keys."""
    scheduler = engine.scheduler
    scheduler.reset = lambda: not scheduler.has_pending_loads()
    engine.blocks.evict = lambda block_ids: None
    engine.habits = replace(engine.habits, renames_weights=False)


def what_an_offer_leaves_out_is_cached(engine):
    """The pool does not know which blocks were never written."""
    take = engine.scheduler.update_state_after_alloc

    def forget(*args):
        answer = take(*args)
        engine.blocks.unwritten.clear()
        return answer

    engine.scheduler.update_state_after_alloc = forget
    plain = {"takes_answers": False, "leaves_holes": False, "trims": False}
    engine.habits = replace(engine.habits, **plain)


def a_pin_is_forgotten(engine):
    """Blocks that are being moved can be allocated."""
    engine.blocks.pin = lambda block_ids: None
    engine.blocks.unpin = lambda block_ids: None


def a_block_is_never_freed(engine):
    """The pool keeps a block of every tenth list that is freed."""
    free, calls = engine.blocks.free, []

    def keep(block_ids):
        calls.append(None)
        free(list(block_ids)[1:] if len(calls) % 10 == 0 else block_ids)

    engine.blocks.free = keep


def an_explanation_is_wrong(engine):
    """It says that nothing is offered."""
    engine.scheduler.explain = lambda user, local: SimpleNamespace(
        num_offered_tokens=0, is_awaited=False
    )


def an_offer_is_too_long(engine):
    """The last block of an offer is not loaded."""
    mover = engine.movers[0]
    real = mover.load_each

    def load_each(pool, host_ids, device_ids, sizes, **how):
        host_ids, device_ids = np.array(host_ids), np.array(device_ids)
        fewer = [*sizes[:-1], sizes[-1] - 1]
        return real(pool, host_ids[:-1], device_ids[:-1], fewer, **how)

    mover.load_each = load_each


WRONG = "wrong bytes: "
# What notices each: what the campaign's error says.
NOTICED = {
    a_load_flips_a_byte: WRONG,
    a_save_mixes_up_its_blocks: WRONG,
    a_failed_load_is_reported_as_done: WRONG,
    a_failed_save_is_reported_as_done: WRONG,
    keys_leave_out_salt_and_adapter: WRONG,
    # Or, if a pool is lost first, what such a reset has left behind.
    a_reset_keeps_everything: r"wrong bytes: |the pool's reset\(\) refuses",
    what_an_offer_leaves_out_is_cached: WRONG,
    a_pin_is_forgotten: "are handed out while",
    a_block_is_never_freed: r"left behind|never served|the pool's reset\(\) refuses",
    an_explanation_is_wrong: r"explain\(\) foretold",
    an_offer_is_too_long: WRONG,
}
