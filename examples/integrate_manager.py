"""Option 2 of docs/integrate.md: a paged pool and a prefix cache of your own.

`OffloadingManager` maps keys to host blocks, `TransferEngine` moves the
bytes, and the engine makes each call itself. toy_model.py stands for your model.
"""

import itertools

from toy_model import BLOCK, answer, new_pool, run_paged

from jaxkv import KeyChain, Namespace, OffloadingManager, TransferEngine

NAMESPACE = Namespace("toy", "v1", "float32", "block, features", BLOCK)


class Engine:
    """Serves one request at a time.

    Attributes:
        cached: The engine's own prefix cache: device blocks by key, oldest first.
        saving: Keys and device blocks of the saves in flight, by ticket.
        loaded: How the loads ended that were reported: None or an error, by ticket.
    """

    def __init__(self, device_blocks, host_blocks):
        self.pool = new_pool(device_blocks)
        self.free = list(range(1, device_blocks))  # block 0 fills up short tables
        self.manager = OffloadingManager(BLOCK, host_blocks)
        self.transfers = TransferEngine(self.pool, host_blocks)
        self.cached, self.saving, self.loaded = {}, {}, {}

    def step(self):
        """Advance transfers once per step, before the model; never wait."""
        self.pool = self.transfers.advance(self.pool)
        for done in self.transfers.poll():
            if done.direction == "load":
                self.loaded[done.ticket] = done.error
            else:  # from here on, others find the keys
                keys, _ = self.saving.pop(done.ticket)
                self.manager.complete_store(keys, success=done.error is None)

    def allocate(self, num):
        """Return device blocks: free ones, then the oldest of the prefix cache."""
        while len(self.free) < num:
            key, block = next(iter(self.cached.items()))
            if any(block in blocks for _, blocks in self.saving.values()):
                self.step()  # a block may be overwritten once its save is reported
            else:
                self.free.append(self.cached.pop(key))
        return [self.free.pop() for _ in range(num)]

    def load(self, keys):
        """Load the prefix of `keys` that the host has; return its device blocks."""
        keys = keys[: self.manager.lookup(keys)]
        if not keys:
            return []
        self.manager.touch(keys)  # for the order of eviction
        host_ids = self.manager.prepare_load(keys).block_ids  # pinned on the host
        blocks = self.allocate(len(keys))
        self.pool, ticket = self.transfers.load(self.pool, host_ids, blocks)
        while ticket not in self.loaded:
            self.step()  # other requests would run here
        self.manager.complete_load(keys)
        if self.loaded.pop(ticket) is not None:
            self.manager.discard(keys)  # what cannot be loaded is computed
            self.free += blocks
            return []
        return blocks

    def save(self, keys, table):
        """Save what the host does not have yet; returns at once."""
        room = self.manager.prepare_store(keys)
        if room is None or not room.block_hashes_to_store:
            return  # no room: all host blocks are in use; or nothing is new
        place = dict(zip(keys, table, strict=True))
        blocks = [place[key] for key in room.block_hashes_to_store]
        ticket = self.transfers.save(self.pool, blocks, room.store_spec.block_ids)
        self.saving[ticket] = room.block_hashes_to_store, blocks

    def serve(self, prompt, num_new):
        """Return the new tokens, and how many tokens came from the host."""
        chain, tokens = KeyChain(NAMESPACE), list(prompt)
        keys = chain.extend(prompt[:-1])  # the last token is computed, for its logits
        held = list(itertools.takewhile(self.cached.__contains__, keys))
        table = [self.cached.pop(key) for key in held]
        loaded = self.load(keys[len(held) :])
        table += loaded
        position = len(table) * BLOCK
        while len(tokens) < len(prompt) + num_new:
            self.step()
            if position == len(table) * BLOCK:
                table += self.allocate(1)
            run = self.pool, [table], position, tokens[position]
            self.pool, new = run_paged(*run)
            position += 1
            if position == len(tokens):
                tokens.append(new)
        keys += chain.extend(tokens[len(prompt) - 1 : position])
        full = table[: len(keys)]
        self.save(keys, full)
        self.free += table[len(keys) :]
        self.cached |= dict(zip(keys[::-1], full[::-1], strict=True))  # tail goes first
        return tokens[len(prompt) :], len(loaded) * BLOCK


if __name__ == "__main__":
    engine, all_same = Engine(device_blocks=12, host_blocks=64), True
    for turn in range(6):  # three users take turns on a pool that holds one of them
        prompt = [7 * i + i * (turn % 3) % 5 for i in range(30)]
        tokens, num_loaded = engine.serve(prompt, 6)
        all_same &= tokens == answer(prompt, 6)
        print(f"turn {turn}: {num_loaded} of 30 tokens from the host")
    while engine.saving:
        engine.step()  # at the end, let the last saves arrive
    print(f"tokens are identical: {all_same}")
