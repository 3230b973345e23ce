"""Calls that have to be refused, or that may not change anything."""

from jaxkv import ConnectorOutput


class Contract:
    """The part of an engine that tries what is refused, and compares explanations."""

    def state(self):
        """All that can be seen from outside of the pool and the scheduler."""
        blocks, scheduler = self.blocks, self.scheduler
        return (
            blocks.num_free,
            blocks.counts(range(blocks.num_blocks)).tolist(),
            blocks.next_free(blocks.num_blocks),
            sorted(blocks.unwritten),
            str(scheduler.stats),
            scheduler.in_transit,
            scheduler.num_host_blocks_held,
            scheduler.has_pending_stores(),
            scheduler.has_pending_loads(),
            [worker.num_in_flight for worker in self.workers],
        )

    def refuse(self, call, *args):
        before = self.state()
        try:
            call(*args)
        except ValueError:
            pass
        else:
            raise AssertionError(f"{call.__qualname__}{args} was not refused")
        assert self.state() == before, f"refused, {call.__qualname__} changed something"
        self.counts["refused calls"] += 1

    def try_refused_calls(self):
        """Make calls that are wrong at any time."""
        update = self.scheduler.update_connector_output
        self.refuse(update, ConnectorOutput(completed_store_events=(10**6,)))
        self.refuse(update, ConnectorOutput(failed_store_events=(10**6,)))
        self.refuse(update, ConnectorOutput(finished_recving=("nobody",)))
        self.refuse(update, ConnectorOutput(failed_recving=("nobody",)))
        self.refuse(self.blocks.allocate, self.blocks.num_free + 1)
        self.refuse(self.blocks.allocate, -1)
        self.refuse(self.blocks.touch, [self.blocks.num_blocks])
        free, _ = self.blocks.next_free(1)
        if free:
            self.refuse(self.blocks.free, free)
        for user in self.active:
            full = user.num_computed_tokens // self.groups[0].block_size
            if full and user.phase == "running":
                block = user.tables[0][full - 1]
                held = [block] if block in self.cached_as(user, full) else []
                if held:
                    self.refuse(self.blocks.cache, held, [b"?" * 32])
                break

    def cached_as(self, user, full):
        keys = user.block_keys_by_group[0][:full]
        return self.blocks.find(keys).tolist() if keys else []

    def try_refused_offers(self, user, offer):
        """Take what was not offered."""
        take = self.scheduler.update_state_after_alloc
        size = max(spec.block_size for spec in self.groups)
        self.refuse(take, user, user.table, offer + 8 * size)
        self.refuse(take, user, user.table, -size)
        if offer:
            self.refuse(take, user, user.table, 1)

    def foretell(self, user, local):
        """Ask, sometimes, what will be offered; that may not change anything."""
        if self.rng.random() > 0.3:
            return None
        if self.storage is not None and user.is_rewritten:
            return None  # What it waits for will be dropped first.
        before = self.state()
        said = self.scheduler.explain(user, local)
        assert self.state() == before, "explain() changed something"
        self.counts["explanations compared"] += 1
        return said.num_offered_tokens, said.is_awaited
