"""A store behind the host as a model has it: what is there, what is known, what moves.

The scheduler's moves are carried out on the contents of `offload_sim.SimWorker`, each
worker in its own time; others write to the store, and delete from it.
"""

import dataclasses

from jaxkv.keys.packed import key_from_foreign
from jaxkv.scheduling.protocol import TierReport
from jaxkv.search.groups import alignment
from tests.rigs.offload_sim import first_read, longest_prefix


@dataclasses.dataclass(eq=False)
class SimMove:
    """Blocks on their way: a fetch, which has a place on the host, or a write.

    Attributes:
        keys: As the requests have them.
        host_blocks: One for each.
        open: Workers that have not reported it.
        num_unheard: Reports that the scheduler has not heard.
        oks: Which blocks all workers so far have reported as arrived.
        contents: What each worker writes; nothing for a fetch.
        waiters: Requests that wait for it.
        is_sent: Whether a worker has been told of it.
        is_stale: Whether the tiers have forgotten it.
    """

    keys: list
    host_blocks: list
    open: list
    num_unheard: int
    oks: list
    contents: list = dataclasses.field(default_factory=list)
    waiters: set = dataclasses.field(default_factory=set)
    is_sent: bool = False
    is_stale: bool = False


@dataclasses.dataclass(eq=False)
class SimWait:
    """What a request waits for, and the host blocks that it holds, with repetitions."""

    events: set
    rows: list


class SimStorage:
    """The store, and all that the scheduler has to know of it.

    Attributes:
        objects: What the store has of each worker: contents by key.
        known: Keys that the scheduler knows to be there.
        added: Those that it has come to know with the last reports.
        fetches: By event, those that are not over; so `writes`.
        waits: By request.
        counts: As the scheduler's own, in host blocks.
    """

    def __init__(self, watcher):
        self.watcher = watcher
        setup = watcher.setup
        self.num_blocks = setup.num_storage_blocks
        self.objects = [{} for _ in watcher.workers]
        self.archive = {}  # All that was ever there.
        self.names = {}  # As requests have keys, by what workers are told.
        self.known, self.added = set(), set()
        self.fetches, self.writes = {}, {}
        self.waits = {}
        self.looked_up = {}
        self.num_found = 0
        self.counts = dict.fromkeys(("stored", "loaded", "failed"), 0)
        most = watcher.rules.max_storage_blocks
        self.most_written = min(most, max(1, setup.num_host_blocks // 8))
        self.most_fetched = min(most, max(1, setup.num_host_blocks // 2))
        self._reports = [{} for _ in watcher.workers]
        self._num_others = 0

    @property
    def real(self):
        return next(iter(self.watcher.scheduler.below), None)

    @property
    def fetching(self):
        """Keys on their way to the host."""
        return {key for move in self.fetches.values() for key in move.keys}

    @property
    def writing(self):
        """Keys on their way to the store, as the index has them."""
        live = [move for move in self.writes.values() if not move.is_stale]
        return {key for move in live for key in move.keys}

    @property
    def is_held_up(self):
        """Whether a fetch is not over, or a request holds what came of one."""
        return bool(self.fetches or self.waits)

    def count_host_blocks(self, ref_cnt):
        """Add what is held of the host, and what is being written to it."""
        for wait in self.waits.values():
            ref_cnt.update(wait.rows)
        for move in self.writes.values():
            if not move.is_stale:
                ref_cnt.update(move.host_blocks)
        for move in self.fetches.values():
            for block in move.host_blocks:
                assert block not in ref_cnt, f"host block {block} is fetched and used"
                ref_cnt[block] = -1

    # What the scheduler is asked and what it does.

    def lack(self, request, local):
        """What a request needs that only the store has, and what the host has of it."""
        own = self.watcher
        keys, factor = request.block_keys_by_group, own.factor

        def row_key(g, i):
            last = i // factor * factor + factor - 1
            return keys[g][last] if last < len(keys[g]) else None

        def has(g, i):
            if keys[g][i] in own.serving:
                return True
            return row_key(g, i) in own.ready or row_key(g, i) in self.known

        total = longest_prefix(
            own.groups,
            [len(each) for each in keys],
            has,
            request.num_tokens - 1,
            alignment(own.groups),
        )
        host_rows, rows = {}, {}
        for g, spec in enumerate(own.groups):
            size = spec.block_size
            for i in range(max(first_read(spec, total), local // size), total // size):
                key = row_key(g, i)
                if keys[g][i] in own.serving:
                    continue
                if key in own.ready:
                    host_rows[key] = own.ready[key]
                else:
                    rows[key] = (i // factor + 1) * factor * size
        ends = sorted(rows, key=rows.get)  # Groups in their order where they are equal.
        return (ends, list(host_rows.values())) if total > local else ([], [])

    def before_query(self, request, local):
        """Tell whether a request has to wait: True, False, or None if it may."""
        name = request.request_id
        if name in self.waits:
            return bool(self.waits[name].events)
        if self.looked_up.get(name) == self.num_found or not self.known | self.writing:
            return False
        self.looked_up[name] = self.num_found
        keys, host_rows = self.lack(request, local)
        if not keys:
            return False
        own = self.watcher
        if own.rules.skip_slow_loads:
            return None
        # Of a prefix that is read in part only, all or nothing is fetched.
        first = keys[:1] if own.only_full else keys
        on_their_way = own.keys_on_host() - set(own.ready)
        if set(keys) <= on_their_way - self.fetching:
            return False  # From the device.
        if own.only_full and keys[0] in on_their_way - self.fetching:
            return None
        num_new = len(set(first) - self.fetching)
        if num_new > self.most_fetched - sum(
            len(m.keys) for m in self.fetches.values()
        ):
            return False
        held = {h for load in own.loads.values() for h in load.hosts.values()}
        held.update(row for wait in self.waits.values() for row in wait.rows)
        held.update(host_rows)
        for move in self.writes.values():
            held.update(move.host_blocks if not move.is_stale else ())
        room = own.setup.num_host_blocks - len(own.keys_on_host())
        room += len(set(own.ready.values()) - held)
        num_new -= len(on_their_way.intersection(first) - self.fetching)
        if num_new > room:
            return False
        if num_new and not own.host.policy.always_evicts:
            return None
        return True

    def after_query(self, request, wanted, is_waiting):
        """Take note of a fetch that has begun; `wanted` is what `lack` said before."""
        name = request.request_id
        if not is_waiting or name in self.waits:
            return
        keys, host_rows = wanted
        assert keys, f"{name} waits for the store, and lacks nothing"
        real = self.real
        events = set(real.waits[name].events)
        for event in events - set(self.fetches):
            batch = real.fetches.moves[event]
            blocks = batch.targets.tolist()
            workers = range(len(self.objects))
            move = SimMove(
                list(batch.keys),
                blocks,
                list(workers),
                len(workers),
                [True] * len(blocks),
            )
            assert set(move.keys) <= set(keys) - self.fetching
            assert set(move.keys) <= self.known, "what the store has not is fetched"
            self.fetches[event] = move
        num = sum(len(move.keys) for move in self.fetches.values())
        assert num <= self.most_fetched
        awaited = {key for event in events for key in self.fetches[event].keys}
        there = awaited | self.watcher.keys_on_host()
        covered = next((n for n, k in enumerate(keys) if k not in there), len(keys))
        assert covered >= (1 if self.watcher.only_full else len(keys))
        for event in events:
            assert awaited & set(keys)
            self.fetches[event].waiters.add(name)
        self.waits[name] = SimWait(events, list(host_rows))
        self.watcher.counts["waited for the store"] += 1

    def release(self, name):
        """Note that a request holds nothing of a fetch any more."""
        wait = self.waits.pop(name, None)
        for event in wait.events if wait else ():
            self.fetches[event].waiters.discard(name)

    def forget(self, name):
        """Note that a request is over, or has its blocks."""
        self.release(name)
        self.looked_up.pop(name, None)

    def reset(self):
        """Note that the scheduler has forgotten all."""
        self.known.clear()
        self.looked_up.clear()
        for move in self.writes.values():
            move.is_stale = True

    def note_event(self, event):
        """Record what the index has lost; nothing that is being read."""
        keys = {self.names.get(key, key) for key in event.block_hashes}
        if event.removed:
            assert keys.isdisjoint(self.fetching), "what is being fetched is evicted"
            self.known -= keys
        else:
            # What was lost and found again in one report is there.
            assert keys <= self.added
            self.known |= keys

    def note_moves(self, moves):
        """Record and start what a step asks of the store."""
        unsent = {e for e, move in self.fetches.items() if not move.is_sent}
        own = self.watcher
        assert unsent == {batch.event for batch in (moves.fetches if moves else ())}
        if moves is None:
            return
        for batch in moves.fetches:
            move = self.fetches[batch.event]
            assert self._own(batch.keys) == move.keys
            assert list(batch.upper_blocks) == move.host_blocks
            move.is_sent = True
            for worker in own.workers:
                worker.give(move.host_blocks, move)
        for batch in moves.writes:
            keys, blocks = self._own(batch.keys), list(batch.upper_blocks)
            assert blocks == [own.ready[key] for key in keys]
            assert set(keys).isdisjoint(self.known | self.writing)
            workers = range(len(self.objects))
            contents = [[w.host[block] for block in blocks] for w in own.workers]
            self.writes[batch.event] = SimMove(
                keys, blocks, list(workers), len(workers), [True] * len(keys), contents
            )
        assert sum(len(m.keys) for m in self.writes.values()) <= self.most_written
        gone = self._own(moves.deletes)
        assert set(gone).isdisjoint(self.known | self.writing)
        for key in gone:
            for objects in self.objects:
                if own.rng.random() < 0.9:
                    objects.pop(key, None)

    # What workers and others do.

    def act(self):
        """End some moves, each on each worker, and have others do what they may."""
        if not self.num_blocks:
            return
        rng, calm = self.watcher.rng, self.watcher.is_calm
        for number in range(len(self.objects)):
            for what, moves in (("fetched", self.fetches), ("written", self.writes)):
                for event, move in list(moves.items()):
                    if not (move.contents or move.is_sent) or number not in move.open:
                        continue
                    if calm or rng.random() < 0.35:
                        end = self._end_fetch if what == "fetched" else self._end_write
                        oks = end(number, move)
                        move.open.remove(number)
                        own = self._reports[number].setdefault(what, [])
                        own.append((event, tuple(oks)))
        if calm:
            return
        if rng.random() < 0.05:
            for objects in self.objects:
                for key in list(objects):
                    if rng.random() < 0.3:
                        del objects[key]
        if self.archive and rng.random() < 0.1:  # Another engine writes them again.
            for key in rng.sample(list(self.archive), min(len(self.archive), 4)):
                for objects, content in zip(
                    self.objects, self.archive[key], strict=True
                ):
                    if content is not None:
                        objects[key] = content
        if rng.random() < 0.08:
            found = [key_from_foreign(key) for key in self.objects[0]]
            found = rng.sample(found, rng.randint(0, len(found)))
            if rng.random() < 0.1:  # Nobody here has asked for it.
                self._num_others += 1
                found.append(b"others %25d" % self._num_others)
            if found:
                self._reports[0].setdefault("found", []).extend(found)

    def take_report(self, number):
        """What a worker reports of the store."""
        report, self._reports[number] = self._reports[number], {}
        if not report:
            return ()
        return (TierReport(**{name: tuple(own) for name, own in report.items()}),)

    def hear(self, reports):
        """Do as the scheduler has to do when it hears reports."""
        own = self.watcher
        self.added = set()
        for report in reports:
            for event, oks in report.fetched:
                move = self._count(self.fetches, event, oks)
                if move.num_unheard:
                    continue
                del self.fetches[event]
                arrived = []
                for key, block, ok in zip(
                    move.keys, move.host_blocks, move.oks, strict=True
                ):
                    if ok:
                        own.ready[key] = block
                        arrived.append(block)
                    else:
                        self.known.discard(key)
                for name in move.waiters:
                    self.waits[name].events.discard(event)
                    self.waits[name].rows += arrived
                self.counts["loaded"] += len(arrived)
                self.counts["failed"] += len(move.keys) - len(arrived)
            for event, oks in report.written:
                move = self._count(self.writes, event, oks)
                if move.num_unheard:
                    continue
                del self.writes[event]
                if not move.is_stale:
                    stored = {
                        k for k, ok in zip(move.keys, move.oks, strict=True) if ok
                    }
                    self.known |= stored
                    self.added |= stored
                    self.counts["stored"] += len(stored)
            found = dict.fromkeys(self._own(report.found))
            new = [key for key in found if key not in self.known | self.writing]
            room = self.num_blocks - len(self.known) - len(self.writing)
            new = new[: max(room, 0)]
            self.known.update(new)
            self.added.update(new)
            self.num_found += len(new)

    def check(self, deeply):
        """Compare all that there is with the scheduler's own."""
        scheduler = self.watcher.scheduler
        if self.real is None:
            assert not [*self.known, *self.fetches, *self.writes, *self.waits]
            return
        num = len(self.known) + len(self.writing)
        assert scheduler.num_storage_blocks_held == num <= self.num_blocks
        stats, factor = scheduler.stats, self.watcher.factor
        for name, count in self.counts.items():
            assert getattr(stats, f"num_storage_{name}") == count * factor, name
        if deeply:
            expected = dict.fromkeys(self.known, 0) | dict.fromkeys(self.writing, -1)
            expected |= dict.fromkeys(self.fetching, 1)
            counts = self.real.tier.snapshot().ref_cnt
            assert {self.names.get(k, k): n for k, n in counts.items()} == expected

    def check_at_rest(self):
        """Check that nobody waits for anything, and nothing is held."""
        if self.real is None:
            return
        assert not [*self.fetches, *self.waits, *self.writes, *self.looked_up]
        assert not self.real.has_fetches
        assert not self.real.has_writes
        assert not self.real.looked_up
        assert not self.real.fetch_of
        assert not self.real.fetches.num_blocks
        assert not self.real._writes.num_blocks

    def _own(self, keys):
        return [self.names.get(key, key) for key in keys]

    def _count(self, moves, event, oks):
        move = moves[event]
        move.num_unheard -= 1
        move.oks = [old and ok for old, ok in zip(move.oks, oks, strict=True)]
        return move

    def _fails(self):
        return not self.watcher.is_calm and (
            self.watcher.rng.random() < self.watcher.setup.failures
        )

    def _end_fetch(self, number, move):
        worker, oks = self.watcher.workers[number], []
        for key, block in zip(move.keys, move.host_blocks, strict=True):
            content = None if self._fails() else self.objects[number].get(key)
            oks.append(content is not None)
            if content is not None:
                worker.fill(block, move, content)
        return oks

    def _end_write(self, number, move):
        worker, oks = self.watcher.workers[number], []
        prefixes, length = self.watcher.prefixes, self.watcher.setup.key_length
        for key, block, content in zip(
            move.keys, move.host_blocks, move.contents[number], strict=True
        ):
            if not move.is_stale:
                assert worker.host[block] == content, "what is being written changed"
            assert prefixes.key(content[-1], length) == key, "wrong bytes are written"
            fails = self._fails()
            # What comes late has come all the same.
            if not fails or self.watcher.rng.random() < 0.5:
                self.objects[number][key] = content
                shares = self.archive.setdefault(key, [None] * len(self.objects))
                shares[number] = content
            oks.append(not fails)
        return oks
