"""Public calls with random numbers, most of which are wrong, in a process of its own.

`python -m tests.rigs.random_calls SEED NUM` makes NUM calls and prints how many were
refused. What is refused must raise ValueError; a crash ends the process.
"""

import random
import sys

import numpy as np

from jaxkv import DeviceBlockPool, OffloadingManager
from jaxkv.keys import key_from_int
from jaxkv.search.groups import ChunkedLocal, FullAttention, SlidingWindow
from jaxkv.search.hits import find_longest_hit
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.retention import Retention

NUM_BLOCKS = 24
KEYS = [key_from_int(number) for number in range(60)]
GROUPS = (FullAttention(16), SlidingWindow(16, 40), ChunkedLocal(16, 32))
STOPS = (None, "end_turn")


class Caller:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.hosts = [
            OffloadingManager(16, NUM_BLOCKS),
            OffloadingManager(16, NUM_BLOCKS, "hazard", retention=True),
            OffloadingManager(16, NUM_BLOCKS, "arc"),
        ]
        self.pool = DeviceBlockPool(NUM_BLOCKS)
        pool, steps = self.pool, []

        def of_host(name, *makers):
            return lambda: getattr(rng.choice(self.hosts), name)(*[m() for m in makers])

        def of_pool(name, *makers):
            return lambda: getattr(pool, name)(*[m() for m in makers])

        def begin_step():
            host = rng.choice(self.hosts)
            steps.append((host, host.request_step(self.keys())))

        def end_step():
            if steps:
                host, step = steps.pop(rng.randrange(len(steps)))
                if rng.random() < 0.3:
                    step.num_hits = self.number()
                ids = step.load_spec.block_ids
                if len(ids) and rng.random() < 0.3:
                    ids[rng.randrange(len(ids))] = self.number(wide=False)
                host.complete_step(step)

        number, ids, keys, positions = self.number, self.ids, self.keys, self.positions

        def search():
            prefixes = [KEYS[:8]] * len(GROUPS)
            find_cached_prefix(pool, GROUPS, prefixes, number())

        def judge():
            masks = [np.ones(8, np.bool_)] * len(GROUPS)
            find_longest_hit(GROUPS, masks, number())

        def make_group():
            rng.choice((SlidingWindow, ChunkedLocal))(16, number())

        self.calls = [
            *[of_host(name, ids) for name in ("pin", "unpin")] * 3,
            of_host("publish", ids, keys),
            of_host("begin_request", keys, number, number, positions),
            lambda: of_host(
                "finish_request", keys, number, number, number, self.stop, positions
            )(),
            lambda: self.hosts[1].retain(keys(), Retention(9, ttl_s=9), number()),
            lambda: self.hosts[0].next_victims(number()),
            *[of_host(name, keys) for name in ("prepare_store", "complete_store")],
            *[of_host(name, keys) for name in ("prepare_load", "complete_load")],
            *[of_host(name, keys) for name in ("lookup", "touch", "discard", "find")],
            of_host("find_prefix", keys),
            begin_step,
            end_step,
            *[of_pool(name, ids) for name in ("touch", "free", "pin", "unpin")] * 3,
            *[of_pool(name, ids) for name in ("evict", "counts")],
            *[of_pool(name, ids, keys) for name in ("holds", "cache")],
            *[of_pool(name, keys) for name in ("find", "find_prefix")],
            *[of_pool(name, number) for name in ("allocate", "ref_cnt")],
            *[of_pool(name, number) for name in ("next_free", "next_victims")],
            search,
            judge,
            make_group,
        ]

    def number(self, wide=True):
        """A number, as likely as not a good one; if `wide`, perhaps of 65 bits."""
        rng = self.rng
        kind = rng.randrange(6)
        if kind <= 2:
            return rng.randrange(NUM_BLOCKS)
        if kind == 3:
            return rng.randrange(-3, NUM_BLOCKS + 3)
        if kind == 4:
            value = rng.choice((-1, 1)) * (1 << rng.randrange(64)) + rng.randint(-1, 1)
        else:
            value = rng.randrange(-(1 << 63), (1 << 63) + 1)
        low, high = -(1 << 63), 1 << 63
        return max(low, min(value, high if wide else high - 1))

    def ids(self):
        wanted = self.rng.randrange(5)
        if self.rng.random() < 0.5:
            good = [self.rng.randrange(NUM_BLOCKS) for _ in range(wanted)]
            return np.array(good, np.int64) if self.rng.random() < 0.5 else good
        return [self.number() for _ in range(wanted)]

    def positions(self):
        if self.rng.random() < 0.5:
            return None
        return [self.number() for _ in range(self.rng.randrange(5))]

    def keys(self):
        return self.rng.choices(KEYS, k=self.rng.randrange(5))

    def stop(self):
        return self.rng.choice(STOPS)

    def run(self, num_calls):
        """Make calls; return how many were refused."""
        num_refused = 0
        for _ in range(num_calls):
            try:
                self.rng.choice(self.calls)()
            except ValueError:
                num_refused += 1
        return num_refused


if __name__ == "__main__":
    caller = Caller(int(sys.argv[1]))
    num_refused = caller.run(int(sys.argv[2]))
    caller.pool.check()
    for host in caller.hosts:
        counts = np.asarray(host.executor.state.ref_cnt)
        assert counts.min() >= -1
    print(num_refused)
