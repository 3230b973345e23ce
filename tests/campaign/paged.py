"""A random engine with a paged pool: the loop of docs/lifecycle.md, and what may happen
in it.

It knows the public names and what the documentation says of them, and nothing else. It
checks that every block that it reads has the bytes that its tokens have, whatever
failed; that what may not overlap does not; and, at its end, that everybody was served
and nothing is left behind.
"""

import collections
import time

import numpy as np

from jaxkv import (
    ConnectorOutput,
    DeviceBlockPool,
    FullAttention,
    SchedulerOutput,
    find_cached_prefix,
)
from jaxkv.types import NULL_BLOCK
from tests.campaign import truth
from tests.campaign.model import BLOCK_AXIS, BLOCK_BYTES, Model, new_pool
from tests.campaign.overlaps import Overlaps
from tests.campaign.setups import GROUPS
from tests.campaign.unreliable import UnreliableEngine
from tests.campaign.users import ALPHABET, User, random_prompt
from tests.transfer import faults

MAX_ACTIVE, MAX_WAITING = 6, 4


class StuckError(AssertionError):
    """Requests were never served, or something was left behind."""


class PagedEngine:
    """An engine, its requests and its pools, one for each worker."""

    def __init__(self, setup, rng, counts, note, mesh=None, local_rng=None):
        self.setup, self.rng, self.counts, self.note = setup, rng, counts, note
        self.groups = GROUPS[setup.groups]
        self.habits = setup.habits
        self.mesh = mesh
        config = setup.config
        self.now_s = 0.0
        self.blocks = DeviceBlockPool(setup.num_device_blocks)
        self.pools, self.movers, self.workers = [], [], []
        self.models = [Model() for _ in range(config.world_size)]
        for number in range(config.world_size):
            pool = self._new_pool(number)
            mover = UnreliableEngine(
                config.make_engine(pool, block_axis=BLOCK_AXIS),
                rng if local_rng is None else local_rng,
                self._new_pool(77),
                setup.failures,
                setup.stuck,
                setup.max_steps if local_rng is None else None,
                counts,
            )
            clock = {} if mesh is not None else {"clock": lambda: self.now_s}
            self.pools.append(pool)
            self.movers.append(mover)
            self.workers.append(config.make_worker(mover, **clock))
        self.storage = self.workers[0].storage
        num_storage_blocks = 0
        if self.storage is not None:
            num_storage_blocks = self.storage.num_blocks(config.storage_bytes)
        self.scheduler = config.make_scheduler(
            self.groups,
            block_bytes=BLOCK_BYTES,
            num_storage_blocks=num_storage_blocks,
            policy_clock=lambda: self.now_s,  # The same in all processes.
        )
        self.scheduler.bind_device_block_pool(self.blocks)
        self.overlaps = Overlaps(config.blocks_per_host_block)
        self._num_reports = {}
        self.users = {}  # alive, by id
        self.waiting, self.active = [], []
        self.preempted = []
        self.stories = []
        self.weights = self.epoch = 0
        self.wants_new_weights = False
        self.is_calm = False
        self._num_users = 0
        self.digest = b""
        # Keys that events say are there, by the tier's medium.
        self.event_keys = collections.defaultdict(set)

    def follow(self, last):
        self.weights, self.epoch = last.weights, last.epoch
        self.stories = list(last.stories)

    def run(self, num_steps):
        """Run some steps, then serve the remaining users, and look for leaks."""
        for number in range(num_steps):
            self.step()
            if number % 16 == 15:
                self.check()
        self.settle()

    def check(self):
        for model in self.models:
            model.check()

    def step(self):
        self.counts["steps"] += 1
        self.now_s += 1.0
        self.hear()
        if not self.is_calm:
            self.act_at_random()
        if self.wants_new_weights:
            self.change_weights()
        else:
            self.admit_some()
        scheduled = self.schedule()
        self.start(scheduled)
        self.compute(scheduled)
        self.apply_events()
        return bool(scheduled)

    # What happens between steps.

    def hear(self):
        reports = []
        for number, (mover, worker) in enumerate(
            zip(self.movers, self.workers, strict=True)
        ):
            if self.mesh is None:
                self.pools[number] = mover.settle(self.pools[number])
            reports.append(worker.poll())
        self.take(ConnectorOutput.aggregate(reports))

    def take(self, report):
        self.overlaps.end(report, len(self.workers), self._num_reports)
        done = self.scheduler.update_connector_output(report)
        for name in done.finished_recving:
            user = self.users[name]
            self.note(f"{name}: {user.num_loading} tokens are there")
            user.phase = "running"
            self.take_offer(user)
        for name in done.failed_recving:
            self.compute_instead(self.users[name])

    def apply_events(self):
        """Apply events to a list of the blocks in each tier, as a router does."""
        for event in self.scheduler.take_events():
            keys = self.event_keys[event.medium]
            if not event.removed:
                keys.update(event.block_hashes)
            elif event.block_hashes:
                keys.difference_update(event.block_hashes)
            else:
                keys.clear()

    def take_offer(self, user):
        """Continue a request after its offer."""
        if self.habits.takes_answers:
            for old, new in zip(user.tables, user.after, strict=True):
                left = [block for block in old if block not in new]
                self.blocks.free(left[::-1])
            user.tables = user.after
        user.num_computed_tokens += user.num_loading
        user.num_loading, user.after = 0, None
        self.cache(user)

    def compute_instead(self, user):
        """Compute the blocks that failed to load, into the request's own tables."""
        self.note(f"{user.request_id}: the load failed")
        user.phase, user.num_loading, user.after = "running", 0, None
        holes = [
            (group, place)
            for group, spec in enumerate(self.groups)
            for place, block in enumerate(user.tables[group])
            if block == NULL_BLOCK
            and place >= user.num_computed_tokens // spec.block_size
        ]
        if len(holes) > self.blocks.num_free:
            self.preempt(user)
        elif holes:
            new = self.allocate(len(holes))
            for (group, place), block in zip(holes, new, strict=True):
                user.tables[group][place] = block
            self.scheduler.update_state_after_alloc(user, user.table, 0)

    def act_at_random(self):
        """Perform actions that may come at any time."""
        rng = self.rng
        if rng.random() < 0.35 and len(self.waiting) < MAX_WAITING:
            self.submit(*random_prompt(rng, self.stories, self.setup.max_tokens))
        if self.users and rng.random() < 0.05:
            self.end(self.users[rng.choice(list(self.users))])
            self.counts["aborts"] += 1
        if self.active and rng.random() < 0.05:
            self.preempt(rng.choice(self.active))
        if self.users and rng.random() < 0.03:
            self.rewrite(self.users[rng.choice(list(self.users))])
        if rng.random() < 0.01:
            self.reset_host()
        if rng.random() < 0.006:
            self.wants_new_weights = True
        if self.mesh is None and rng.random() < 0.001:
            self.lose_a_pool()
        if rng.random() < 0.1:  # Others pass through the pool.
            passing = self.allocate(rng.randint(0, self.blocks.num_free))
            self.blocks.free(passing)
        if rng.random() < 0.04:
            self.blocks.evict(range(1, self.blocks.num_blocks))
            self.note("the device forgets all")
        if self.setup.config.skip_slow_loads and rng.random() < 0.1:
            rates = rng.choice((0, 1e3, 1e9)), rng.choice((0, 9, 1e6))
            self.scheduler.set_rates(*rates)

    def submit(self, tokens, extras):
        name = f"r{self._num_users}"
        self._num_users += 1
        max_tokens = self.rng.randint(len(tokens) + 1, self.setup.max_tokens)
        epoch = f"v{self.epoch}"
        user = User(name, self.groups, tokens, extras, max_tokens, self.weights, epoch)
        self.users[name] = user
        self.waiting.append(user)
        self.note(f"{name}: submitted, {len(tokens)} tokens, {extras}")

    def rewrite(self, user):
        """Rewrite a request's history, as a session does that branches."""
        rng = self.rng
        min_kept = 0
        if user.phase == "loading":
            min_kept = user.num_computed_tokens
        elif user.phase == "running":
            if rng.random() < 0.3:
                self.preempt(user)
            elif not all(isinstance(spec, FullAttention) for spec in self.groups):
                min_kept = user.num_computed_tokens
        max_kept = min(user.num_tokens, user.max_tokens - 2)
        if min_kept > max_kept:
            return
        num_kept = rng.randint(min_kept, max_kept)
        max_new = min(user.max_tokens - 1 - num_kept, 12)
        tokens = [rng.randrange(ALPHABET) for _ in range(rng.randint(1, max_new))]
        if user.phase == "running" and num_kept < user.num_computed_tokens:
            self.rewind(user, num_kept)
        user.rewrite(num_kept, tokens)
        self.counts["histories rewritten"] += 1
        self.note(f"{user.request_id}: {num_kept} tokens kept, then {tokens}")

    def rewind(self, user, num_kept):
        size = max(spec.block_size for spec in self.groups)
        user.num_computed_tokens = num_kept // size * size
        for group, spec in enumerate(self.groups):
            first = user.num_computed_tokens // spec.block_size
            table = user.tables[group]
            self.blocks.free(table[first:][::-1])
            user.tables[group] = table[:first]
            user.num_cached[group] = min(user.num_cached[group], first)
        self.scheduler.update_state_after_alloc(user, user.table, 0)

    def reset_host(self):
        """Forget the host tier, which is refused while loads are under way."""
        is_free = not self.scheduler.has_pending_loads()
        assert self.scheduler.reset() == is_free, "reset() and loads under way"
        self.counts["resets"] += is_free
        self.note(f"reset: {is_free}")

    def change_weights(self):
        """Replace the model's weights as soon as both tiers can be reset.

        Requests begin anew, under other names, as their keys change.
        """
        for user in list(self.users.values()):
            if user.phase != "waiting":
                self.end(user)
            elif user.has_offer:
                self.decline(user)
        if self.habits.renames_weights:
            self.epoch += 1
        elif not self.scheduler.reset():
            return  # In a later step: loads are under way.
        else:
            # Not `reset`, which waits for stores in flight.
            self.blocks.evict(range(self.blocks.num_blocks))
        self.wants_new_weights = False
        self.weights += 1
        self.stories = self.stories[-8:]
        self.counts["weights changed"] += 1
        self.note(f"weights {self.weights}")
        for user in list(self.users.values()):
            self.end(user)
            self.submit(user.tokens[: user.num_prompt_tokens], user.extras)

    def lose_a_pool(self):
        self.check()
        number = self.rng.randrange(len(self.pools))
        self.pools[number] = faults.broken(self.pools[number])
        self.note(f"pool {number} is lost")
        self.counts["pools lost"] += 1
        self.start({})  # The loss is not noticed yet.
        users = list(self.users.values())
        for user in users:
            self.end(user)
        reports = []
        for worker_number, worker in enumerate(self.workers):
            pool = self.pools[worker_number]
            self.pools[worker_number], report = worker.drain(pool)
            reports.append(report)
        self.take(ConnectorOutput.aggregate(reports))
        self.pools[number] = self._new_pool(number)
        faults.recover(self._new_pool(0))
        assert self.scheduler.reset(), "nothing is under way, and reset() refuses"
        assert self.blocks.reset(), "nothing is held, and the pool's reset() refuses"
        for user in users:
            self.submit(user.tokens[: user.num_prompt_tokens], user.extras)

    def allocate(self, num):
        blocks = self.blocks.allocate(num)
        self.overlaps.check_allocated(blocks)
        return blocks

    # Requests come and go.

    def admit_some(self):
        barred = set(self.preempted)
        for user in list(self.waiting):
            if len(self.active) >= MAX_ACTIVE or user.request_id in barred:
                break
            if not self.admit(user):
                break

    def admit(self, user):
        rng, max_hit = self.rng, user.num_tokens - 1
        keys = user.block_keys_by_group
        local, tables = find_cached_prefix(self.blocks, self.groups, keys, max_hit)
        for table in tables:
            self.blocks.touch(table)
        held = [block for table in tables for block in reversed(table)]
        foretold = self.explain_offer(user, local)
        offer, takes_time = self.scheduler.get_num_new_matched_tokens(user, local)
        user.is_rewritten = False
        if self.storage is not None and foretold == (None, False):
            foretold = None  # The host may have no room for the fetch.
        if foretold is not None and foretold != (offer, takes_time):
            raise AssertionError(
                f"explain() foretold {foretold}, and the offer is {offer, takes_time}"
            )
        if offer is None:
            self.blocks.free(held)
            return True
        num_new = self.choose_part(offer)
        total = local + num_new
        takes_time = takes_time and num_new > 0
        ahead = total if takes_time else rng.randint(total + 1, user.num_tokens)
        holes = []
        for group, spec in enumerate(self.groups):
            first = truth.first_block_read(spec, total)
            for place in range(len(tables[group]), -(-ahead // spec.block_size)):
                tables[group].append(NULL_BLOCK)
                if place >= first or not self.habits.leaves_holes:
                    holes.append((group, place))
        if len(holes) > self.blocks.num_free:
            user.has_offer = bool(offer)
            if offer and not self.habits.keeps_offers:
                self.decline(user)
            self.blocks.free(held)
            return False
        user.has_offer = False
        for (group, place), block in zip(holes, self.allocate(len(holes)), strict=True):
            tables[group][place] = block
        user.tables = tables
        user.after = self.scheduler.update_state_after_alloc(user, user.table, num_new)
        self.note(
            f"{user.request_id}: {local} tokens at hand, took {num_new} of {offer}, "
            f"tables {tables}, then {user.after}"
        )
        user.num_computed_tokens, user.num_loading = local, num_new
        self.waiting.remove(user)
        self.active.append(user)
        user.phase = "loading" if takes_time else "running"
        if not takes_time:
            self.take_offer(user)
        return True

    def explain_offer(self, user, local):
        """Sometimes ask `explain` for the offer."""
        if self.rng.random() > 0.3:
            return None
        if self.storage is not None and user.is_rewritten:
            return None  # What it waits for will be dropped first.
        explained = self.scheduler.explain(user, local)
        self.counts["explanations compared"] += 1
        return explained.num_offered_tokens, explained.is_awaited

    def decline(self, user):
        """Decline an offer, so that it holds no blocks."""
        self.scheduler.update_state_after_alloc(user, [], 0)
        user.has_offer = False

    def choose_part(self, offer):
        """Return how much of an offer to take; less only where the docs allow it."""
        is_plain = len(self.groups) == 1 and self.setup.groups.startswith("full")
        if not offer or self.rng.random() < 0.75:
            return offer
        if is_plain:
            return self.rng.randrange(0, offer + 1, self.groups[0].block_size)
        return self.rng.choice((0, offer))

    def preempt(self, user):
        if self.habits.says_preempted:
            self.scheduler.request_preempted(user)
        self.leave(user)
        user.phase = "waiting"
        self.waiting.insert(0, user)
        self.preempted.append(user.request_id)
        self.counts["preemptions"] += 1
        self.note(f"{user.request_id}: preempted")

    def end(self, user):
        if user.phase == "waiting":
            self.waiting.remove(user)
        if self.rng.random() < 0.2:
            self.scheduler.request_finished_all_groups(user, user.tables)
        elif self.habits.gives_tables_at_end:
            self.scheduler.request_finished(user, user.table)
        else:
            self.scheduler.request_finished(user)
        if user in self.active:
            self.leave(user)
        del self.users[user.request_id]
        self.note(f"{user.request_id}: over in phase {user.phase}")

    def leave(self, user):
        """Free a request's blocks, the tail of each table first."""
        self.active.remove(user)
        for table in user.tables:
            self.blocks.free(table[::-1])
        user.lose_blocks()

    # The step.

    def schedule(self):
        """Choose how many tokens of each request to compute; allocate their blocks."""
        rng, scheduled = self.rng, {}
        for user in list(self.active):
            if user.phase != "running":
                continue
            left = user.num_tokens - user.num_computed_tokens
            num = left if rng.random() < 0.5 else rng.randint(1, left)
            if not self.is_calm and rng.random() < 0.1:
                continue
            end = user.num_computed_tokens + num
            wanted = [
                max(-(-end // spec.block_size) - len(table), 0)
                for spec, table in zip(self.groups, user.tables, strict=True)
            ]
            while sum(wanted) > self.blocks.num_free + self.blocks.num_pending_free:
                victims = [u for u in self.active if u.request_id not in scheduled]
                if victims[-1] is user:
                    break
                self.preempt(victims[-1])
            if sum(wanted) > self.blocks.num_free:
                continue
            new = self.allocate(sum(wanted))
            for group, num_added in enumerate(wanted):
                added, new = new[:num_added], new[num_added:]
                user.tables[group] += added
                user.new_blocks[group] += added
            scheduled[user.request_id] = num
        return scheduled

    def start(self, scheduled):
        """Plan the transfers of the step, and start them."""
        new_blocks = {}
        if self.habits.names_new_blocks:
            for user in self.active:
                added = user.new_blocks
                if any(added):
                    new_blocks[user.request_id] = added if len(added) > 1 else added[0]
        for user in self.active:
            user.new_blocks = [[] for _ in self.groups]
        output = SchedulerOutput(scheduled, new_blocks, tuple(self.preempted))
        self.preempted = []
        meta = self.scheduler.build_connector_meta(output)
        self.digest = meta.digest(self.digest)
        owner_of = {
            block: user.request_id
            for user in self.active
            if user.phase == "loading"
            for table in user.tables
            for block in table
        }
        self.overlaps.start(meta, owner_of)
        if meta.store_host_blocks or meta.load_host_blocks:
            self.note(
                f"step {int(self.now_s)}: "
                f"store {meta.store_device_blocks}->{meta.store_host_blocks}, "
                f"load {meta.load_host_blocks}->{meta.load_device_blocks}"
            )
        for number, worker in enumerate(self.workers):
            self.pools[number] = worker.start(meta, self.pools[number])

    def compute(self, scheduled):
        """Run the model, then cache the full blocks."""
        reads, writes = [], []
        for name, num in scheduled.items():
            user = self.users[name]
            reads += self.reads_of(user)
            writes += self.writes_of(user, user.num_computed_tokens + num)
            user.num_computed_tokens += num
        late = self.rng.choice((0, 0, 0, 50, 400))
        if reads or writes:
            self.counts["block reads compared"] += len(reads) * len(self.models)
            for number, model in enumerate(self.models):
                self.pools[number] = model.run(self.pools[number], reads, writes, late)
        for name in scheduled:
            user = self.users[name]
            self.cache(user)
            if user.num_computed_tokens == user.num_tokens:
                user.append(self.rng.randrange(3))
            if user.num_tokens >= user.max_tokens:
                self.stories = [*self.stories[-8:], (user.tokens, user.extras)]
                self.counts["requests served"] += 1
                self.end(user)
            elif self.habits.trims:
                self.trim(user)

    def reads_of(self, user):
        computed, reads = user.num_computed_tokens, []
        for group, spec in enumerate(self.groups):
            size = spec.block_size
            first = truth.first_token_read(spec, computed)
            for place in range(first // size, -(-computed // size)):
                begin, end = max(first, place * size), min(computed, (place + 1) * size)
                part = truth.part(spec, group, user.digests, place, begin, end)
                block = user.tables[group][place]
                name = (
                    f"step {int(self.now_s)}, {user.request_id}, group {group}, its "
                    f"block {place}, device block {block}, tokens {begin}-{end - 1}"
                )
                if block == NULL_BLOCK:
                    raise AssertionError(f"the null block is read: {name}")
                reads.append((block, *part, name))
        return reads

    def writes_of(self, user, end):
        start, writes = user.num_computed_tokens, []
        for group, spec in enumerate(self.groups):
            size = spec.block_size
            for place in range(start // size, -(-end // size)):
                first, last = max(start, place * size), min(end, (place + 1) * size)
                part = truth.part(spec, group, user.digests, place, first, last)
                writes.append((user.tables[group][place], *part))
        return writes

    def cache(self, user):
        for group, spec in enumerate(self.groups):
            first = user.num_cached[group]
            full = user.num_computed_tokens // spec.block_size
            keys = user.block_keys_by_group[group][first:full]
            self.blocks.cache(user.tables[group][first:full], keys)
            user.num_cached[group] = max(first, full)

    def trim(self, user):
        for spec, table in zip(self.groups, user.tables, strict=True):
            first = truth.first_block_read(spec, user.num_computed_tokens)
            freed = [block for block in table[:first] if block != NULL_BLOCK]
            table[:first] = [NULL_BLOCK] * min(first, len(table))
            self.blocks.free(freed[::-1])

    def settle(self):
        """Serve everybody, wait for the last transfer, and look for leaks."""
        self.is_calm = True
        for mover in self.movers:
            mover.is_calm = True
        total = sum(user.max_tokens for user in self.users.values())
        max_steps = 200 + 4 * total
        for _ in range(max_steps):
            if not self.users:
                break
            if not self.step() and self.storage is not None:
                time.sleep(0.002)  # Its threads keep their own time.
        if self.users:
            raise StuckError(f"never served in {max_steps} steps: {sorted(self.users)}")
        for _ in range(200 + self.setup.config.num_host_blocks):
            scheduler = self.scheduler
            if not (scheduler.has_pending_stores() or scheduler.has_pending_loads()):
                break
            self.step()
            if self.storage is not None:
                time.sleep(0.005)  # Its threads keep their own time.
        self.check()
        self.check_nothing_left()

    def check_nothing_left(self):
        reports = []
        for number, worker in enumerate(self.workers):
            self.pools[number], report = worker.drain(self.pools[number])
            reports.append(report)
        self.take(ConnectorOutput.aggregate(reports))
        scheduler, stats = self.scheduler, self.scheduler.stats
        dropped = stats.num_dropped_full + stats.num_dropped_slow
        dropped += stats.num_dropped_failed + stats.num_dropped_reset
        counts = self.blocks.counts(range(self.blocks.num_blocks))
        left = {
            "device blocks held or pinned": int(np.count_nonzero(counts)),
            "device blocks not free": self.blocks.num_blocks - 1 - self.blocks.num_free,
            "in transit": sum(scheduler.in_transit),
            "pending stores": scheduler.has_pending_stores(),
            "pending loads": scheduler.has_pending_loads(),
            "offered, but neither stored nor dropped": (
                stats.num_offered - stats.num_stored - dropped
            ),
        }
        for number, worker in enumerate(self.workers):
            left[f"transfers of worker {number}"] = worker.num_in_flight
            left[f"bytes of worker {number}"] = worker.bytes_in_flight
        self.apply_events()
        if self.setup.config.enable_events:
            num_more = len(self.event_keys["CPU"]) - scheduler.num_host_blocks_held
            left["blocks in events, less held"] = num_more
            for boundary in scheduler.below:
                num_more = len(self.event_keys[boundary.tier.medium])
                num_more -= boundary.tier.num_held_blocks
                left[f"the same of {boundary.name}"] = num_more
        if self.storage is not None:
            left["moves of the store"] = self.storage.num_in_flight
        left = {name: num for name, num in left.items() if num}
        if left:
            raise StuckError(f"left behind: {left}")

    def count_storage(self):
        """Count the outcomes of stores to and fetches from the tiers below."""
        stats = self.scheduler.stats
        for name in ("stored", "found", "loaded", "failed", "dropped", "evicted"):
            self.counts[f"store: {name}"] += getattr(stats, f"num_storage_{name}")

    def _new_pool(self, number):
        return new_pool(self.setup.num_device_blocks, number, self.mesh)


def no_notes(line):
    """Keep no history."""


def new_history():
    return collections.deque(maxlen=60)
