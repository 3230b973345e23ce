"""A plain-Python twin of segmented LRU, for the twin of the manager."""

from collections import OrderedDict

from tests.reference.offloading_manager import idle_keys


class ReferenceSLRU:
    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        # The least recently used first.
        self.probation, self.protected = OrderedDict(), OrderedDict()

    @property
    def blocks(self):
        return {**self.probation, **self.protected}

    def snapshot(self):
        return {
            "probation": list(self.probation),
            "protected": list(self.protected),
        }

    def get(self, key):
        return self.probation.get(key) or self.protected.get(key)

    def insert(self, key, block):
        self.probation[key] = block

    def remove(self, key):
        if self.probation.pop(key, None) is None:
            del self.protected[key]

    def touch(self, keys):
        for key in reversed(keys):
            block = self.probation.get(key)
            if block is not None and block.ref_cnt >= 0:
                self.protected[key] = self.probation.pop(key)
            for blocks in (self.probation, self.protected):
                if key in blocks:
                    blocks.move_to_end(key)
        while len(self.protected) > self.num_blocks // 2:
            key, block = self.protected.popitem(last=False)
            self.probation[key] = block

    def evict(self, num, protected):
        evictable = idle_keys(self.blocks, protected)[:num]
        if len(evictable) < num:
            return None
        victims = [(key, self.get(key)) for key in evictable]
        for key in evictable:
            self.remove(key)
        return victims
