"""Calls that the library must refuse without changing any state."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, TierReport
from jaxkv.search.groups import alignment
from tests.rigs.engine_watch import Watcher


class Refuser(Watcher):
    """Makes invalid calls."""

    def state(self):
        """The state of the library, to check that it did not change."""
        arrays = jax.tree.leaves((self.pool.state, self.host.executor.state))
        scheduler = self.scheduler
        records = [
            repr(vars(part))
            for load in scheduler._loads.by_request.values()
            for part in [load]
        ]
        progress = scheduler._eager._progress if scheduler._eager else {}
        records += [
            repr((name, own.tables, own.num_offered, own.next_tokens))
            for name, own in progress.items()
        ]
        records += [
            repr((scheduler._stores.waiting, scheduler._stores.in_flight.moves))
        ]
        loads = scheduler._loads
        records += [repr((list(loads._waiting), list(loads._copying)))]
        records += [repr((loads.in_transit, scheduler._known))]
        for storage in scheduler.below:
            moves = [*storage.fetches.moves.values(), *storage._writes.moves.values()]
            records += [repr(vars(move)) for move in moves]
            records += [repr((storage.waits, storage.looked_up, storage._to_write))]
            records += [repr(storage.tier.num_found)]
            arrays += jax.tree.leaves(storage.tier.executor.state)
        return [np.array(jnp.copy(array)).tobytes() for array in arrays], records

    def refuse(self, call, *args):
        before = self.state()
        try:
            call(*args)
        except ValueError:
            assert self.state() == before, "what was refused changed something"
            self.counts["refused"] += 1
        else:
            raise AssertionError(f"{call} {args} was not refused")

    def try_refused(self):
        """Report unknown transfers, and ask the pool for too many blocks."""
        events = list(self.stores)
        due = {
            event: self.rules.world_size - store.num_reports
            for event, store in self.stores.items()
        }
        update = self.scheduler.update_connector_output
        self.refuse(update, ConnectorOutput(completed_store_events=(*events, 10**6)))
        self.refuse(update, ConnectorOutput(("nobody",), (), tuple(events)))
        for event, num in due.items():
            many = (event,) * (num + 1)
            self.refuse(update, ConnectorOutput(failed_store_events=many))
        for name, load in self.loads.items():
            num = self.rules.world_size - load.num_reports + 1
            if load.event == NO_EVENT:
                num = 1
            many = (name,) * num
            self.refuse(update, ConnectorOutput(many, (), tuple(events)))
        self.try_refused_reports()
        self.refuse(self.pool.allocate, self.pool.num_free + 1)
        if self.device_keys:
            block = next(iter(self.device_keys))
            self.refuse(self.pool.cache, [block], [b"?" * 32])
        for request in self.active:
            if request.phase == "loading":
                step = alignment(self.groups)
                take = self.scheduler.update_state_after_alloc
                self.refuse(take, request, request.table, step)

    def try_refused_reports(self):
        """Report moves of the store that nobody asked for, or not like this."""
        update = self.scheduler.update_connector_output

        def refuse(**report):
            reports = (TierReport(found=(b"others".ljust(32),)),)
            reports += (TierReport(**report),)
            self.refuse(update, ConnectorOutput(below=reports))

        refuse(fetched=((10**6, (True,)),))
        refuse(written=((10**6, (True,)),))
        for what, moves in (
            ("fetched", self.storage.fetches),
            ("written", self.storage.writes),
        ):
            for event, move in moves.items():
                oks = (True,) * len(move.keys)
                refuse(**{what: ((event, (*oks, True)),)})
                refuse(**{what: ((event, oks),) * (move.num_unheard + 1)})

    def try_bad_takes(self, request, offer):
        take = self.scheduler.update_state_after_alloc
        step = alignment(self.groups)
        for num in (-step, offer + step, offer + 1, 1 if step > 1 else -1):
            self.refuse(take, request, request.table, num)
        if offer:
            short = [own[: request.num_tokens * 0] for own in request.tables]
            self.refuse(take, request, short if len(short) > 1 else short[0], offer)
