"""A plain-Python twin of `jaxkv.OffloadingManager`: the oracle of its tests.

Written from the description of vLLM 0.19.1's behaviour, with dicts and lists and no
thought of speed. It differs from vLLM where jaxkv does: misuse raises before anything
changes, and a key given twice to one `prepare_store` is stored once. The policy is a
twin too; LRU's is here.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass


class Refused(Exception):
    """A call that must raise and change nothing."""


@dataclass
class Block:
    block_id: int
    ref_cnt: int = -1


@dataclass
class Stored:
    keys: list
    block_ids: list
    evicted: list


def idle_keys(blocks, protected):
    """List the keys whose blocks may be evicted, in the order of `blocks`."""
    return [k for k, b in blocks.items() if b.ref_cnt == 0 and k not in protected]


class ReferenceLRU:
    def __init__(self, num_blocks):
        self.blocks = OrderedDict()  # the least recently used first

    def snapshot(self):
        return {"order": list(self.blocks)}

    def get(self, key):
        return self.blocks.get(key)

    def insert(self, key, block):
        self.blocks[key] = block

    def remove(self, key):
        del self.blocks[key]

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(self, num, protected):
        evictable = idle_keys(self.blocks, protected)
        if len(evictable) < num:
            return None
        return [(key, self.blocks.pop(key)) for key in evictable[:num]]


class ReferenceManager:
    """The manager's twin; its policy sees at most `max_keys` keys per request."""

    def __init__(self, num_blocks, policy=ReferenceLRU, max_keys=None):
        self.num_blocks = num_blocks
        self.max_keys = max_keys
        self.num_allocated = 0
        self.freed = []
        self.policy = policy(num_blocks)
        self.events = []
        self.notes = {}  # key -> (its retention, when it was set)
        self.now_ms = 0

    @property
    def blocks(self):
        return self.policy.blocks

    def num_free(self):
        return len(self.freed) + self.num_blocks - self.num_allocated

    def lookup(self, keys):
        hits = 0
        for key in keys:
            block = self.policy.get(key)
            if block is None or block.ref_cnt < 0:
                break
            hits += 1
        return hits

    def touch(self, keys):
        self.policy.touch(keys)

    def begin_request(self, keys, num_tokens, now_ms, positions, kind=None):
        if not keys:
            return 0
        self.now_ms = now_ms
        keys, positions = keys[: self.max_keys], positions[: self.max_keys]
        return self.policy.begin(keys, num_tokens, now_ms, positions, kind)

    def finish_request(self, keys, mark, now_ms, num_output_tokens, stop, positions):
        if keys:
            self.now_ms = now_ms
            facts = num_output_tokens, stop, positions[: self.max_keys]
            self.policy.finish(keys[: self.max_keys], mark, now_ms, *facts)

    def retain(self, keys, retention, now_ms):
        if not keys:
            return
        self.now_ms = now_ms
        if retention is None:
            self.policy.release(keys, now_ms)
            for key in keys:
                self.notes.pop(key, None)
            return
        self.notes |= dict.fromkeys(keys, (retention, now_ms))
        self.give(keys)

    def give(self, keys):
        for key in keys:
            if key in self.notes:
                retention, given_ms = self.notes[key]
                if self.now_ms - given_ms >= retention.lifetime_ms:
                    continue  # Policies distinguish times for 49 days only.
                half_life_ms = 1000 * (retention.half_life_s or 0)
                times = half_life_ms, 1000 * (retention.ttl_s or 0)
                self.policy.retain([key], retention.priority, *times, given_ms)

    def prepare_load(self, keys):
        if self.lookup(keys) < len(keys):
            raise Refused
        for key in keys:
            self.policy.get(key).ref_cnt += 1
        return [self.policy.get(key).block_id for key in keys]

    def complete_load(self, keys):
        for key, times in Counter(keys).items():
            block = self.policy.get(key)
            if block is None or block.ref_cnt < times:
                raise Refused
        for key in keys:
            self.policy.get(key).ref_cnt -= 1

    def prepare_store(self, keys):
        missing = [k for k in dict.fromkeys(keys) if self.policy.get(k) is None]
        num_short = len(missing) - self.num_free()
        evicted = []
        if num_short > 0 and hasattr(self.policy, "admit"):
            missing = self.policy.admit(missing, self.num_free(), set(keys))
            num_short = len(missing) - self.num_free()
        if num_short > 0:
            victims = self.policy.evict(num_short, protected=set(keys))
            if victims is None:
                return None
            evicted = [key for key, _ in victims]
            self.freed += [block.block_id for _, block in victims]
            self.events.append((evicted, True))
        new = {}
        for key in missing:
            if self.num_allocated < self.num_blocks:
                block_id, self.num_allocated = (
                    self.num_allocated,
                    self.num_allocated + 1,
                )
            else:
                block_id = self.freed.pop()
            new[key] = Block(block_id)
        insert_all = getattr(self.policy, "insert_all", None)
        if insert_all is not None:  # for a policy that uses the place in the batch
            insert_all(keys, new)
        else:
            for key, block in new.items():
                self.policy.insert(key, block)
        self.give(missing)
        ids = [self.policy.get(key).block_id for key in missing]
        return Stored(missing, ids, evicted)

    def complete_store(self, keys, success=True):
        ended = []
        for key in keys:
            block = self.policy.get(key)
            if block is None or block.ref_cnt >= 0:
                continue
            ended.append(key)
            if success:
                block.ref_cnt = 0
            else:
                self.policy.remove(key)
                self.freed.append(block.block_id)
        if success and ended:
            self.events.append((ended, False))

    def take_events(self):
        events, self.events = self.events, []
        return events
