"""A plain-Python twin of vLLM 0.19.1's `SimpleCPUOffloadScheduler`, with its faults.

Written from a description of its behaviour for one group of full attention, over the
values of `jaxkv.scheduling.protocol` and the twin pool on both tiers. It is jaxkv's
rival in benchmarks: nothing is pinned between query and allocation, a block in flight
is stored again, a request's last blocks are lost at its end, the head of a prefix is
evicted before its tail, and the lazy cursor leaves blocks out.

As in `jaxkv.scheduling.protocol` the table of a new or resumed request comes with
`update_state_after_alloc`.
"""

from collections import Counter
from dataclasses import dataclass, field

from jaxkv.scheduling.protocol import NO_EVENT, OffloadMetadata
from tests.reference.block_pool import BlockPool


@dataclass
class Copy:
    device_blocks: list
    host_blocks: list


@dataclass
class Load:
    copy: Copy
    event: int = NO_EVENT


@dataclass
class Store:
    """A request's blocks, and how many of them were looked at."""

    request: object
    device_blocks: list
    num_seen: int = 0
    events: set = field(default_factory=set)
    is_running: bool = False
    is_finished: bool = False


class ReferenceScheduler:
    def __init__(
        self,
        block_size,
        num_host_blocks,
        *,
        lazy=False,
        max_num_batched_tokens=8192,
        world_size=1,
        enable_events=False,
    ):
        self.block_size = block_size
        self.host_pool = BlockPool(num_host_blocks, enable_events)
        self.device_pool = None
        self.world_size = world_size
        self.lazy = lazy
        self.target_free = 2 * -(-max_num_batched_tokens // block_size)
        self.cursor = None
        self.loads = {}
        self.load_event_to_reqs = {}
        self.num_load_events = 0
        self.stores = {}
        self.copies = {}
        self.store_event_to_reqs = {}
        self.reports = {}
        self.num_store_events = 0

    def bind_device_block_pool(self, pool):
        self.device_pool = pool

    def has_pending_stores(self):
        return bool(self.copies)

    def take_events(self):
        return self.host_pool.take_events()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """Match what follows the device's part, as if nothing came before it."""
        first = num_computed_tokens // self.block_size
        max_length = request.num_tokens - 1 - num_computed_tokens
        max_blocks = max(max_length, 0) // self.block_size
        keys = request.block_keys[first:][:max_blocks]
        length = len(self._find(keys)) * self.block_size
        return length, length > 0

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        if not self.lazy:
            store = self.stores.get(request.request_id)
            if store is None:
                store = self.stores[request.request_id] = Store(request, [])
            if not store.is_running:
                store.device_blocks = list(block_ids)
                store.num_seen = 0
        if num_external_tokens == 0:
            return
        blocks = self.device_pool.blocks
        start = sum(blocks[i].key is not None for i in block_ids)
        end = start + num_external_tokens // self.block_size
        host_blocks = self._find(request.block_keys[start:end])
        assert len(host_blocks) == end - start, (
            f"{end - start} blocks were promised, {len(host_blocks)} are there"
        )
        device_blocks = block_ids[start:end]
        self.host_pool.touch(host_blocks)
        self.device_pool.touch([blocks[i] for i in device_blocks])
        assert request.request_id not in self.loads
        copy = Copy(device_blocks, [block.block_id for block in host_blocks])
        self.loads[request.request_id] = Load(copy)

    def build_connector_meta(self, output):
        if self.lazy:
            stores, request_ids = self._scan_free_queue(), []
        else:
            stores, request_ids = self._scan_requests(output)
        store_event = NO_EVENT
        if stores.device_blocks:
            store_event = self.num_store_events
            self.num_store_events += 1
            self.copies[store_event] = stores
            if request_ids:
                self.store_event_to_reqs[store_event] = request_ids
            for request_id in request_ids:
                self.stores[request_id].events.add(store_event)
        load_event = NO_EVENT
        device_blocks, host_blocks, waiting = [], [], []
        for request_id, load in self.loads.items():
            if load.event == NO_EVENT:
                device_blocks += load.copy.device_blocks
                host_blocks += load.copy.host_blocks
                waiting.append(request_id)
        if waiting:
            load_event = self.num_load_events
            self.num_load_events += 1
            for request_id in waiting:
                self.loads[request_id].event = load_event
            self.load_event_to_reqs[load_event] = waiting
        for request_id in output.preempted_req_ids:
            if request_id in self.stores:
                self.stores[request_id].is_running = False
        return OffloadMetadata(
            load_event=load_event,
            load_device_blocks=device_blocks,
            load_host_blocks=host_blocks,
            load_event_to_reqs=self.load_event_to_reqs,
            store_event=store_event,
            store_device_blocks=stores.device_blocks,
            store_host_blocks=stores.host_blocks,
            need_flush=bool(output.preempted_req_ids),
        )

    def update_connector_output(self, output):
        """A store ends when every worker has reported it, in whichever steps."""
        for request_id in output.finished_recving:
            self._end_load(request_id)
        for event, count in Counter(output.completed_store_events).items():
            count += self.reports.pop(event, 0)
            if count < self.world_size:
                self.reports[event] = count
            else:
                self._end_store(event)

    def request_finished(self, request):
        load = self.loads.get(request.request_id)
        if load is not None and load.event == NO_EVENT:
            self._end_load(request.request_id)
        store = self.stores.get(request.request_id)
        if store is not None:
            store.is_finished = True
            self._forget_if_done(request.request_id)

    def _find(self, keys):
        """Return the host's blocks for a prefix of these keys."""
        blocks = []
        for key in keys:
            block = self.host_pool.get_cached_block(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take_host_blocks(self, device_blocks):
        """Find places for blocks. Their keys are known here but not yet findable."""
        if not device_blocks:
            return []
        host_blocks = self.host_pool.get_new_blocks(len(device_blocks))
        for host_block, block in zip(host_blocks, device_blocks, strict=True):
            host_block.key = block.key
        self.device_pool.touch(device_blocks)
        return [block.block_id for block in host_blocks]

    def _scan_requests(self, output):
        """Collect what the scheduled requests computed up to the last step."""
        merged, request_ids, this_step = Copy([], []), [], set()
        num_free = self.host_pool.num_free
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            store = self.stores.get(request_id)
            if store is None or store.is_finished:
                continue
            store.is_running = True
            store.device_blocks.extend(output.new_block_ids.get(request_id) or ())
            if num_tokens == 0:
                continue
            picked = []
            num_free = self._scan(store, this_step, picked, num_free)
            if picked:
                ids = [block.block_id for block in picked]
                merged.host_blocks += self._take_host_blocks(picked)
                merged.device_blocks += ids
                this_step.update(ids)
                request_ids.append(request_id)
        return merged, request_ids

    def _scan(self, store, this_step, picked, num_free):
        """Go on where the last scan ended; return the room that is left."""
        blocks = self.device_pool.blocks
        is_cached = self.host_pool.get_cached_block
        certain = store.request.num_computed_tokens
        certain -= getattr(store.request, "num_output_placeholders", 0)
        ready = certain // self.block_size
        for block_id in store.device_blocks[store.num_seen : ready]:
            block = blocks[block_id]
            if not block.is_null:
                key = block.key
                if key is None:
                    break
                if block_id not in this_step and is_cached(key) is None:
                    if num_free <= 0:
                        break
                    num_free -= 1
                    picked.append(block)
            store.num_seen += 1
        return num_free

    def _scan_free_queue(self):
        """Collect from the blocks that are evicted next, on from the last visited."""
        if self.device_pool is None:
            return Copy([], [])
        queue = self.device_pool.free_queue
        is_cached = self.host_pool.get_cached_block
        num_free = self.host_pool.num_free
        if self.cursor is not None and self.cursor.ref_cnt > 0:
            self.cursor = None
        last = self.cursor
        node = (last or queue.head).next
        picked, num_visited = [], 0
        while (
            node is not None
            and node is not queue.tail
            and num_visited < self.target_free
            and len(picked) < num_free
        ):
            last = node
            key = node.key
            if key is not None and not node.is_null and is_cached(key) is None:
                picked.append(node)
            num_visited += 1
            node = node.next
        self.cursor = last
        ids = [block.block_id for block in picked]
        return Copy(ids, self._take_host_blocks(picked))

    def _end_store(self, event):
        copy = self.copies.pop(event)
        host_blocks = [self.host_pool.blocks[i] for i in copy.host_blocks]
        for block in host_blocks:
            self.host_pool.cached.insert(block.key, block)
        self.host_pool.free_blocks(host_blocks)
        blocks = self.device_pool.blocks
        self.device_pool.free_blocks(blocks[i] for i in copy.device_blocks)
        for request_id in self.store_event_to_reqs.pop(event, ()):
            store = self.stores.get(request_id)
            if store is not None:
                store.events.discard(event)
                if store.is_finished:
                    self._forget_if_done(request_id)

    def _end_load(self, request_id):
        load = self.loads.pop(request_id, None)
        if load is None:
            return
        names = self.load_event_to_reqs.get(load.event)
        if names is not None:
            names.remove(request_id)
            if not names:
                del self.load_event_to_reqs[load.event]
        host, device = self.host_pool.blocks, self.device_pool.blocks
        self.host_pool.free_blocks(host[i] for i in load.copy.host_blocks)
        self.device_pool.free_blocks(device[i] for i in load.copy.device_blocks)

    def _forget_if_done(self, request_id):
        if not self.stores[request_id].events:
            del self.stores[request_id]
