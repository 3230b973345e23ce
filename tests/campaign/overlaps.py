"""The overlaps that docs/lifecycle.md rules out, checked in every step."""

NO_EVENT = -1


class OverlapError(AssertionError):
    """Two things overlapped that may not."""


class Overlaps:
    """The transfers in flight, from the scheduler's plans and the workers' reports."""

    def __init__(self, blocks_per_host_block):
        self._factor = blocks_per_host_block
        self._stores = {}  # event -> (device blocks, host blocks)
        self._loads = {}  # request -> (device blocks, host blocks)

    def start(self, meta, owner_of):
        read = {h for _, hosts in self._loads.values() for h in hosts}
        written = {h for _, hosts in self._stores.values() for h in hosts}
        loaded = {b for blocks, _ in self._loads.values() for b in blocks}
        stores, loads = set(meta.store_host_blocks), set(meta.load_host_blocks)
        busy = {block for block in meta.load_device_blocks if block >= 0} | loaded
        saved = set(meta.store_device_blocks)
        for what, blocks in (
            ("a host block is stored while it is loaded", stores & (read | loads)),
            ("a host block is loaded while it is stored", loads & written),
            ("a block is stored while it is loaded", busy & saved),
            ("a block is loaded twice", loaded & set(meta.load_device_blocks)),
        ):
            if blocks:
                raise OverlapError(f"{what}: {sorted(blocks)}")
        if meta.store_event != NO_EVENT:
            sources = set(meta.store_device_blocks) - {-1}
            self._stores[meta.store_event] = sources, set(meta.store_host_blocks)
        for n, host in enumerate(meta.load_host_blocks):
            ids = meta.load_device_blocks[n * self._factor : (n + 1) * self._factor]
            ids = {block for block in ids if block >= 0}
            name = owner_of[min(ids)]
            blocks, hosts = self._loads.setdefault(name, (set(), set()))
            blocks |= ids
            hosts.add(host)

    def end(self, reports, num_workers, counts):
        """Apply reports; a transfer has ended once every worker has reported it."""
        for events in (reports.completed_store_events, reports.failed_store_events):
            for event in events:
                if self._is_last(("store", event), num_workers, counts):
                    del self._stores[event]
        for names in (reports.finished_recving, reports.failed_recving):
            for name in names:
                if self._is_last(("load", name), num_workers, counts):
                    del self._loads[name]

    def _is_last(self, what, num_workers, counts):
        counts[what] = counts.get(what, 0) + 1
        if counts[what] < num_workers:
            return False
        del counts[what]
        return True

    def check_allocated(self, blocks):
        stored = {b for blocks, _ in self._stores.values() for b in blocks}
        loaded = {b for blocks, _ in self._loads.values() for b in blocks}
        for what, busy in (("stored", stored), ("loaded", loaded)):
            if busy & set(blocks):
                raise OverlapError(
                    f"blocks {sorted(busy & set(blocks))} are handed out while {what}"
                )
