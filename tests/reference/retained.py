"""A plain-Python twin of retention by priority, for the twin of the manager."""

from tests.reference.offloading_manager import idle_keys

HALF_TIME = 2**31


class ReferenceRetained:
    """Priorities around the twin of another policy."""

    def __init__(self, num_blocks, inner):
        self.inner = inner(num_blocks)
        self.retentions = {}  # key -> (priority, half-life, time to live, when)
        self.now_ms = None

    @property
    def blocks(self):
        return self.inner.blocks

    def snapshot(self):
        num = sum(self.priority(key) > 0 for key in self.blocks)
        return self.inner.snapshot() | {"num_retained": num}

    def get(self, key):
        return self.inner.get(key)

    def touch(self, keys):
        self.inner.touch(keys)

    def insert_all(self, keys, new):
        if hasattr(self.inner, "insert_all"):
            self.inner.insert_all(keys, new)
        else:
            for key, block in new.items():
                self.inner.insert(key, block)

    def remove(self, key):
        self.inner.remove(key)
        self.retentions.pop(key, None)

    # --- notifications ---

    def tell_time(self, now_ms):
        if self.now_ms is None or (now_ms - self.now_ms) % 2**32 < HALF_TIME:
            self.now_ms = now_ms % 2**32

    def begin(self, keys, num_tokens, now_ms, positions, kind):
        self.tell_time(now_ms)
        if hasattr(self.inner, "begin"):
            return self.inner.begin(keys, num_tokens, now_ms, positions, kind)
        return 0

    def finish(self, keys, mark, now_ms, num_output_tokens, stop, positions):
        self.tell_time(now_ms)
        if hasattr(self.inner, "finish"):
            output = num_output_tokens
            self.inner.finish(keys, mark, now_ms, output, stop, positions)

    def retain(self, keys, priority, half_life_ms, ttl_ms, given_ms):
        self.tell_time(given_ms)
        new = priority, half_life_ms, ttl_ms, given_ms
        for key in set(keys) & set(self.blocks):
            if self.left_of(new) >= max(self.priority(key), 1):
                self.retentions[key] = new

    def release(self, keys, now_ms):
        self.tell_time(now_ms)
        for key in keys:
            self.retentions.pop(key, None)

    # --- what it decides ---

    def left_of(self, retention):
        priority, half_life_ms, ttl_ms, given_ms = retention
        age = (self.now_ms - given_ms) % 2**32
        if ttl_ms and age >= ttl_ms:
            return 0
        while half_life_ms and age >= half_life_ms and priority:
            age, priority = age - half_life_ms, priority // 2
        return priority

    def priority(self, key):
        return self.left_of(self.retentions[key]) if key in self.retentions else 0

    def evict(self, num, protected):
        priorities = {key: self.priority(key) for key in self.blocks}
        idle = idle_keys(self.blocks, protected)
        if len(idle) < num:
            return None
        highest = sorted(priorities[key] for key in idle)[num - 1]
        lower = [key for key in idle if priorities[key] < highest]
        above = {key for key in priorities if priorities[key] > highest}
        victims = []
        if lower:
            rest = protected | (set(priorities) - set(lower))
            victims = self.inner.evict(len(lower), rest)
        victims += self.inner.evict(num - len(lower), protected | above)
        for key, _ in victims:
            self.retentions.pop(key, None)
        for key in [key for key in self.retentions if not self.priority(key)]:
            del self.retentions[key]
        return victims
