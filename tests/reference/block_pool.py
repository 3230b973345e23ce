"""A plain-Python twin of vLLM 0.19.1's block pool: oracle, and rival in benchmarks.

Written from a description of its behaviour. One object a block, the free ones threaded
on a doubly linked list through themselves, so that a block costs here what it costs
there: any of them leaves or joins the list in constant time. Keys are `bytes` that
include the group. Where vLLM asserts, so does this.
"""

from dataclasses import dataclass

MEDIUM = "GPU"  # Of the CPU tier's events too, as there.


@dataclass(slots=True, eq=False, repr=False)
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
    key: bytes | None = None
    is_null: bool = False
    prev: "KVCacheBlock | None" = None
    next: "KVCacheBlock | None" = None

    def __repr__(self):
        return f"<block {self.block_id}, {self.ref_cnt} refs, {self.key!r}>"


@dataclass(frozen=True)
class PoolEvent:
    """Keys that became findable or, if `removed`, no longer are; none means all."""

    keys: tuple
    medium: str
    removed: bool


class FreeQueue:
    """Blocks between two ends that are no blocks; the one next to `head` goes first."""

    def __init__(self, blocks):
        self.head, self.tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self.head.next, self.tail.prev = self.tail, self.head
        self.num_free = 0
        self.append_n(blocks)

    def __iter__(self):
        block = self.head.next
        while block is not self.tail:
            yield block
            block = block.next

    def popleft_n(self, num):
        blocks, block = [], self.head.next
        for _ in range(num):
            blocks.append(block)
            following = block.next
            block.prev = block.next = None
            block = following
        self.head.next, block.prev = block, self.head
        self.num_free -= num
        return blocks

    def popleft(self):
        return self.popleft_n(1)[0]

    def remove(self, block):
        assert block.next is not None, f"{block} is not free"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free -= 1

    def append_n(self, blocks):
        last = self.tail.prev
        for block in blocks:
            last.next, block.prev = block, last
            last = block
        last.next, self.tail.prev = self.tail, last
        self.num_free += len(blocks)

    def append(self, block):
        self.append_n([block])


class KeyMap:
    """Key to block; to a dict of them by id, oldest first, once there were several."""

    def __init__(self):
        self._of = {}

    def __len__(self):
        return len(self._of)

    def get(self, key):
        entry = self._of.get(key)
        if type(entry) is dict:
            return next(iter(entry.values()))
        return entry

    def insert(self, key, block):
        entry = self._of.get(key)
        if entry is None:
            self._of[key] = block
        elif type(entry) is dict:
            entry[block.block_id] = block
        else:
            self._of[key] = {entry.block_id: entry, block.block_id: block}

    def pop(self, key, block_id):
        """Remove and return this block of the key; None if it is not there."""
        entry = self._of.get(key)
        if type(entry) is dict:
            block = entry.pop(block_id, None)
            if not entry:
                del self._of[key]
            return block
        if entry is None or entry.block_id != block_id:
            return None
        return self._of.pop(key)


class BlockPool:
    def __init__(self, num_blocks, enable_events=False):
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks)
        self.cached = KeyMap()
        self.enable_events = enable_events
        self.events = []
        self.null_block = self.free_queue.popleft()
        self.null_block.is_null = True

    @property
    def num_free(self):
        return self.free_queue.num_free

    def get_cached_block(self, key):
        return self.cached.get(key)

    def get_new_blocks(self, num):
        """Allocate the blocks that were free longest; ValueError if too few."""
        if num > self.num_free:
            raise ValueError(f"{num=} blocks wanted, {self.num_free} are free.")
        blocks = self.free_queue.popleft_n(num)
        for block in blocks:
            self._evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        """Release each; of the blocks free now, the first given is allocated first.

        None may be given twice, nor more often than it is held; this is not checked.
        """
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt -= 1
        self.free_queue.append_n(
            [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        )

    def cache_block(self, block, key):
        assert block.key is None, f"{block} has a key"
        block.key = key
        self.cached.insert(key, block)
        if self.enable_events:
            self.events.append(PoolEvent((key,), MEDIUM, removed=False))

    def evict_blocks(self, block_ids):
        """Forget the contents of these blocks; their holders keep them."""
        for block_id in block_ids:
            self._evict(self.blocks[block_id])

    def reset_prefix_cache(self):
        """Forget all, unless a block other than the null block is held."""
        if self.num_blocks - self.num_free != 1:
            return False
        self.cached = KeyMap()
        for block in self.blocks:
            block.key = None
        if self.enable_events:
            self.events.append(PoolEvent((), MEDIUM, removed=True))
        return True

    def take_events(self):
        events, self.events = self.events, []
        return events

    def _evict(self, block):
        if block.key is None or self.cached.pop(block.key, block.block_id) is None:
            return
        if self.enable_events:
            self.events.append(PoolEvent((block.key,), MEDIUM, removed=True))
        block.key = None
