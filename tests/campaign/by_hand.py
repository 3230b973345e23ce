"""A random user of `OffloadingManager` and `TransferEngine`, without the scheduler.

It heeds what docs/integrate.md asks of such a user, and nothing else.
"""

import dataclasses

from jaxkv import FullAttention, OffloadingManager, TransferEngine
from tests.campaign import truth
from tests.campaign.model import BLOCK_AXIS, BLOCK_BYTES, Model, new_pool
from tests.campaign.setups import POLICIES
from tests.campaign.unreliable import UnreliableEngine
from tests.campaign.users import User, random_prompt

NUM_BLOCKS = 40
SPEC = FullAttention(4)


@dataclasses.dataclass
class Flight:
    keys: list
    blocks: list
    contents: list


class ByHand:
    """Stores and loads blocks of random prompts in a pool of its own."""

    def __init__(self, rng, counts, note):
        self.rng, self.counts, self.note = rng, counts, note
        num_host_blocks = rng.choice((6, 20, 60))
        policy = rng.choice(POLICIES)
        is_xla = policy != "hazard" and rng.random() < 0.1
        executor = "xla" if is_xla else "native"
        mode = rng.choice(("fused", "staged"))
        note(f"{num_host_blocks=} {executor=} {policy=} {mode=}")
        self.manager = OffloadingManager(4, num_host_blocks, policy, executor=executor)
        self.pool = new_pool(NUM_BLOCKS, 1)
        engine = TransferEngine(
            self.pool,
            num_host_blocks,
            mode=mode,
            block_axis=BLOCK_AXIS,
            extent_bytes=rng.choice((None, 2 * BLOCK_BYTES)),
        )
        self.mover = UnreliableEngine(
            engine, rng, new_pool(NUM_BLOCKS, 77), 0.1, 0.0, rng.choice((1, 4)), counts
        )
        self.model = Model()
        self.free = list(range(1, NUM_BLOCKS))
        self.flights, self.stories = {}, []

    def run(self, num_steps):
        for number in range(num_steps):
            self.counts["steps"] += 1
            self.step()
            if number % 16 == 15:
                self.model.check()
        while self.flights:
            self.pool, done = self.mover.drain(self.pool)
            self.take(done)
        self.model.check()
        assert self.mover.num_in_flight == self.mover.bytes_in_flight == 0
        assert sorted(self.free) == list(range(1, NUM_BLOCKS))

    def step(self):
        self.pool = self.mover.settle(self.pool)
        self.take(self.mover.poll())
        self.pool = self.mover.advance(self.pool)
        if self.rng.random() < 0.3:
            self.store()
        else:
            self.load()

    def user(self):
        tokens, extras = random_prompt(self.rng, self.stories, 48)
        return User("r", (SPEC,), tokens, extras, 48, 0, "v0")

    def store(self):
        """Compute the blocks of a prompt, and store the missing ones."""
        user = self.user()
        num = len(user.block_keys)
        if not num or num > len(self.free):
            return
        self.stories = [*self.stories[-8:], (user.tokens, user.extras)]
        blocks = [self.free.pop() for _ in range(num)]
        writes = [(b, *self.part(user, n)) for n, b in enumerate(blocks)]
        self.pool = self.model.run(self.pool, [], writes, self.rng.choice((0, 100)))
        place = {key: n for n, key in enumerate(user.block_keys)}
        room = self.manager.prepare_store(user.block_keys)
        if room is not None and room.block_hashes_to_store:
            keys = room.block_hashes_to_store
            chosen = [blocks[place[key]] for key in keys]
            ticket = self.mover.save(self.pool, chosen, room.store_spec.block_ids)
            self.note(f"{ticket}: {chosen} -> {room.store_spec.block_ids}")
            if self.mover.is_waiting(ticket):
                # They may not be overwritten until it is reported.
                self.flights[ticket] = Flight(keys, chosen, [])
                blocks = [block for block in blocks if block not in chosen]
            else:
                self.flights[ticket] = Flight(keys, [], [])
        self.free = blocks + self.free

    def load(self):
        user = self.user()
        keys = user.block_keys[: self.manager.lookup(user.block_keys)]
        if not keys or len(keys) > len(self.free):
            return
        self.manager.touch(keys)
        hosts = self.manager.prepare_load(keys).block_ids
        blocks = [self.free.pop() for _ in keys]
        self.pool, ticket = self.mover.load(self.pool, hosts, blocks)
        self.note(f"{ticket}: {hosts} -> {blocks}")
        contents = [self.part(user, n) for n in range(len(keys))]
        self.flights[ticket] = Flight(list(keys), blocks, contents)

    def take(self, completions):
        reads = []
        for done in completions:
            flight = self.flights.pop(done.ticket)
            if done.direction == "save":
                self.manager.complete_store(flight.keys, success=done.error is None)
            else:
                self.manager.complete_load(flight.keys)
                if done.error is not None:
                    self.manager.discard(flight.keys)
                else:
                    names = [f"{done.ticket}, device block {b}" for b in flight.blocks]
                    rows = zip(flight.blocks, flight.contents, names, strict=True)
                    reads += [(block, *part, name) for block, part, name in rows]
            self.free = flight.blocks + self.free
        if reads:
            self.counts["block reads compared"] += len(reads)
            self.pool = self.model.run(self.pool, reads, [], 0)

    def part(self, user, place):
        first = place * SPEC.block_size
        end = first + SPEC.block_size
        return truth.part(SPEC, 0, user.digests, place, first, end)
