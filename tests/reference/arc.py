"""A plain-Python twin of ARC, for the twin of the manager.

Written from the description of vLLM's policy: ordered dicts, one key at a time,
Python's floats.
"""

from collections import OrderedDict


class ReferenceARC:
    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        # The oldest first. Keys of T1 and T2 have blocks, keys of B1 and B2 have none.
        self.t1, self.t2 = OrderedDict(), OrderedDict()
        self.b1, self.b2 = OrderedDict(), OrderedDict()
        self.target = 0.0

    @property
    def blocks(self):
        return {**self.t1, **self.t2}

    def snapshot(self):
        lists = {name: list(getattr(self, name)) for name in ("t1", "t2", "b1", "b2")}
        return lists | {"target": self.target}

    def get(self, key):
        return self.t1[key] if key in self.t1 else self.t2.get(key)

    def insert(self, key, block):
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        self.t1[key] = block

    def remove(self, key):
        if self.t1.pop(key, None) is None:
            self.t2.pop(key, None)

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.b1:
                self.raise_target()
            elif key in self.b2:
                self.lower_target()
            self.use(key)

    def use(self, key):
        if key in self.t1 and self.t1[key].ref_cnt >= 0:
            self.t2[key] = self.t1.pop(key)
        for some in (self.t1, self.t2, self.b1, self.b2):
            if key in some:
                some.move_to_end(key)

    def raise_target(self):
        step = max(1, len(self.b2) / len(self.b1))
        self.target = min(self.target + step, self.num_blocks)

    def lower_target(self):
        step = max(1, len(self.b1) / len(self.b2))
        self.target = max(self.target - step, 0)

    def evict(self, num, protected):
        def candidates(blocks):
            for key, block in blocks.items():
                if block.ref_cnt == 0 and key not in protected:
                    yield key

        # What was chosen is not looked at again, so each list is gone through once.
        t1, t2 = candidates(self.t1), candidates(self.t2)
        size, chosen = len(self.t1), []
        while len(chosen) < num:
            key = next(t1, None) if size >= int(self.target) else None
            size -= key is not None
            for blocks in (t2, t1):  # If T1 is below its target, or has none.
                key = next(blocks, None) if key is None else key
            if key is None:
                return None
            chosen.append(key)
        victims = [(key, self.make_ghost(key)) for key in chosen]
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.num_blocks:
                ghosts.popitem(last=False)
        return victims

    def make_ghost(self, key):
        blocks, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
        ghosts[key] = None
        return blocks.pop(key)
