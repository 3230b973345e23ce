"""An engine with random, overlapping requests, for tests of scheduler listeners."""

import hashlib
import random

from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_request


class Traffic:
    def __init__(self, seed, **options):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.rig = Rig(clock=lambda: self.now_s, **options)
        self.num_made = 0

    def path(self):
        """A prefix that others share, as chats do."""
        rng = self.rng
        head = rng.choices(range(12), weights=range(12, 0, -1))[0]
        return [head, *(rng.randrange(2) for _ in range(rng.randrange(6)))]

    def act(self):
        rng, rig = self.rng, self.rig
        self.now_s += rng.expovariate(1.0)
        action = rng.random()
        running = [r for r in rig.requests.values() if not r.loading_tokens]
        if action < 0.3 and rig.pool.num_free > 7:
            self.num_made += 1
            extra = rng.randrange(1, BLOCK_SIZE)
            request = make_request(f"{self.num_made}", *self.path(), extra_tokens=extra)
            (keys,) = request.block_keys_by_group
            keys[:] = [hashlib.sha256(key).digest() for key in keys]
            rig.admit(request)
        elif action < 0.6:
            tokens = {r.request_id: rng.randrange(1, 13) for r in running}
            rig.step(tokens=tokens)
        elif action < 0.7 and rig.stores:
            rig.store_arrives(ok=rng.random() < 0.9)
        elif action < 0.8 and rig.loads:
            rig.load_arrives(ok=rng.random() < 0.9)
        elif action < 0.95 and rig.requests:
            rig.finish(rng.choice(list(rig.requests)))
        elif action < 0.98 and rig.requests:
            rig.preempt(rng.choice(list(rig.requests)))
        elif action > 0.999:
            rig.scheduler.reset()

    def run(self, num):
        for _ in range(num):
            self.act()
        return self.rig.scheduler
