"""Option 3 of docs/integrate.md: the offload scheduler beside the engine's own."""

# A toy in place of your model.
from toy_model import BLOCK, MAX_TOKENS, answer, new_pool, run_paged

import jaxkv

NAMESPACE = jaxkv.Namespace("toy", "v1", "float32", "block, features", BLOCK)
FULL = (jaxkv.FullAttention(BLOCK),)  # one group of layers, which see all tokens


class Request:
    """A request as `OffloadScheduler` reads it, and its block table by group."""

    def __init__(self, request_id, prompt, num_groups):
        self.request_id, self.tokens, self.num_computed_tokens = request_id, [], 0
        self.chains = [jaxkv.KeyChain(NAMESPACE, group=n) for n in range(num_groups)]
        self.append(prompt)

    def append(self, tokens):
        """Add tokens, and the keys of the blocks that they fill."""
        self.tokens += tokens
        self.num_tokens = len(self.tokens)
        for chain in self.chains:
            chain.extend(tokens)
        self.block_keys = self.chains[0].keys
        self.block_keys_by_group = [chain.keys for chain in self.chains]


class Engine:
    """A paged pool, and a loop: each step computes one token of each request."""

    def __init__(self, device_blocks, host_blocks, groups=FULL):
        self.groups, self.loading = groups, {}
        self.windows = tuple(getattr(group, "window", MAX_TOKENS) for group in groups)
        self.pool = new_pool(device_blocks)
        self.blocks = jaxkv.DeviceBlockPool(device_blocks)
        self.worker = jaxkv.OffloadWorker(jaxkv.TransferEngine(self.pool, host_blocks))
        self.scheduler = jaxkv.OffloadScheduler(groups, host_blocks)
        self.scheduler.bind_device_block_pool(self.blocks)

    def admit(self, request):
        """Allocate a request's blocks and plan its loads from both tiers."""
        search = self.groups, request.block_keys_by_group, request.num_tokens - 1
        local, request.tables = jaxkv.find_cached_prefix(self.blocks, *search)
        num_host, takes_time = self.scheduler.get_num_new_matched_tokens(request, local)
        if num_host is None:
            return False  # its blocks are on the way to the host: ask in a later step
        request.num_computed_tokens = local
        for table in request.tables:
            self.blocks.touch(table)
        self.grow(request)
        new = self.scheduler.update_state_after_alloc(request, request.tables, num_host)
        self.loading[request.request_id] = request, num_host, new
        if not takes_time:
            self.take_offer(request.request_id)
        return True

    def grow(self, request):
        """Allocate blocks for all tokens of a request."""
        for table in request.tables:
            table += self.blocks.allocate(-(-request.num_tokens // BLOCK) - len(table))

    def take_offer(self, request_id):
        """Go on after the offered tokens, which are in the pool now."""
        request, num_tokens, new = self.loading.pop(request_id)
        request.num_computed_tokens += num_tokens
        for table, after in zip(request.tables, new, strict=True):
            # A window leaves out what the next token does not read.
            self.blocks.free([block for block in table if block not in after])
        request.tables = new

    def step(self, running):
        """Process completed transfers, start new ones, and run the model."""
        done = self.scheduler.update_connector_output(self.worker.poll())
        for request_id in done.finished_recving:
            self.take_offer(request_id)
        for request_id in done.failed_recving:
            self.loading.pop(request_id)  # its tokens are computed, in its own tables
        running = [r for r in running if r.request_id not in self.loading]
        output = jaxkv.SchedulerOutput({r.request_id: 1 for r in running})
        meta = self.scheduler.build_connector_meta(output)
        self.pool = self.worker.start(meta, self.pool)  # the old pool is donated
        for request in running:
            self.compute(request)

    def compute(self, request):
        """Compute a token, and make the blocks that are full findable."""
        at, tables = request.num_computed_tokens, request.tables
        model = self.pool, tables, at, request.tokens[at], self.windows
        self.pool, new = run_paged(*model)
        request.num_computed_tokens += 1
        full = request.num_computed_tokens // BLOCK
        for table, chain in zip(tables, request.chains, strict=True):
            self.blocks.cache(table[:full], chain.keys[:full])
        if request.num_computed_tokens == request.num_tokens:
            request.append([new])
            self.grow(request)

    def finish(self, request):
        """End a request, also one that is aborted."""
        self.loading.pop(request.request_id, None)
        self.scheduler.request_finished(request, request.tables)
        for table in request.tables:
            self.blocks.free(table[::-1])  # the tail of a prefix is evicted first


if __name__ == "__main__":
    engine, all_same = Engine(device_blocks=12, host_blocks=64), True
    for turn in range(6):  # three users take turns; the pool holds one of them
        prompt = [7 * i + i * (turn % 3) % 5 for i in range(30)]
        request = Request(f"turn {turn}", prompt, len(FULL))
        while not engine.admit(request):
            engine.step([])
        while request.num_tokens < 36:
            engine.step([request])
        engine.finish(request)
        all_same &= request.tokens[30:] == answer(prompt, 6)
    print(f"{engine.scheduler.stats.num_loaded} blocks came from the host")
    print(f"tokens are identical: {all_same}")
