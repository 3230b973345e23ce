"""A toy engine for the examples, in place of yours, in the shape of vLLM v1.

It has a block pool and a prefix cache of its own, and schedules a step while the last
one runs. Its loop runs on a thread that ends with each pause.
"""

import collections
import queue
import threading
import time
from concurrent.futures import Future

from toy_model import BLOCK, new_pool, run_paged


class Pool:
    """Blocks: free list, reference counts and prefix cache."""

    def __init__(self, num_blocks):
        self.counts = [0] * num_blocks
        self.free_blocks = collections.OrderedDict.fromkeys(range(1, num_blocks))
        self.hashes, self.by_hash = {}, {}

    def allocate(self, num):
        """Allocate free blocks, whose content is forgotten."""
        blocks = [self.free_blocks.popitem(last=False)[0] for _ in range(num)]
        for block in blocks:
            self.counts[block] = 1
            block_hash = self.hashes.pop(block, None)
            if self.by_hash.get(block_hash) == block:
                del self.by_hash[block_hash]
        return blocks

    def touch(self, blocks):
        """Hold blocks once more."""
        for block in blocks:
            self.free_blocks.pop(block, None)
            self.counts[block] += 1

    def release(self, blocks):
        """Hold blocks once less."""
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free_blocks[block] = None

    def cache(self, blocks, hashes):
        """Make full blocks findable."""
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.hashes[block] = block_hash
            self.by_hash.setdefault(block_hash, block)

    def reset(self):
        """Forget the content of all blocks."""
        self.hashes.clear()
        self.by_hash.clear()


class Request:
    """A prompt, its answer so far, and its blocks."""

    def __init__(self, request_id, prompt, num_new):
        self.request_id, self.tokens = request_id, list(prompt)
        self.num_prompt_tokens, self.max_tokens = len(prompt), len(prompt) + num_new
        self.num_computed_tokens = 0  # The tokens of a running step count.
        self.num_output_placeholders = 0  # Tokens that running steps will add.
        self.num_preemptions, self.has_ended = 0, False
        self.blocks, self.future = [], Future()

    @property
    def num_tokens(self):
        """Tokens so far, prompt and answer."""
        return len(self.tokens)

    @property
    def num_missing_tokens(self):
        """Tokens to compute, including placeholders, but never the last one."""
        num_tokens = self.num_tokens + self.num_output_placeholders
        return min(num_tokens, self.max_tokens - 1) - self.num_computed_tokens

    @property
    def block_hashes(self):
        """The content of each full block: all tokens up to its end."""
        ends = range(BLOCK, self.num_tokens + 1, BLOCK)
        return [tuple(self.tokens[:end]) for end in ends]


# A request's share of a step. `age` is its number of preemptions.
Share = collections.namedtuple("Share", "request start num_tokens is_sampled age")


class Output:
    """A step."""

    def __init__(self):
        self.shares, self.num_scheduled_tokens, self.sampled = [], {}, {}

    def add(self, request, num_tokens):
        """Compute some tokens of a request."""
        is_sampled = num_tokens == request.num_missing_tokens
        start, age = request.num_computed_tokens, request.num_preemptions
        self.shares.append(Share(request, start, num_tokens, is_sampled, age))
        self.num_scheduled_tokens[request.request_id] = num_tokens


class Engine:
    """A loop on its own thread, which schedules a step while the last one runs."""

    def __init__(self, num_blocks, step_tokens=16, max_running=4):
        self.pool, self.kv = Pool(num_blocks), new_pool(num_blocks)
        self.step_tokens, self.max_running = step_tokens, max_running
        self.requests, self.waiting, self.running = {}, collections.deque(), []
        self.newest = {}  # The newest token by request; a real one is on the device.
        self.calls, self.thread = queue.SimpleQueue(), None

    # For all threads.

    def submit(self, request_id, prompt, num_new):
        """Add a request; its future gets the answer."""
        request = Request(request_id, prompt, num_new)
        self.requests[request_id] = request
        self.calls.put(lambda: self.waiting.append(request))
        return request

    def abort(self, request):
        """End a request."""
        self.calls.put(lambda: self.end(request))

    def resume(self):
        """Start the loop, on a new thread."""
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def pause(self):
        """End the loop after its step; requests stay as they are."""
        self.calls.put(None)
        self.thread.join()

    # For the loop's thread.

    def loop(self):
        """Run steps until paused."""
        try:
            last = Output()
            while True:
                while not (self.calls.empty() and (self.has_work() or last.shares)):
                    call = self.calls.get()
                    if call is None:
                        return self.update_from_output(last)
                    call()
                output = self.schedule()
                self.execute(output)
                self.update_from_output(last)
                last = output
        except Exception as error:
            for request in self.requests.values():
                request.future.set_exception(error)

    def has_work(self):
        """Whether to run steps."""
        return bool(self.waiting or self.running)

    def schedule(self):
        """Choose a step's tokens, and allocate their blocks."""
        output, num_left = Output(), self.step_tokens
        is_full = False
        for request in list(self.running):
            num_tokens = min(request.num_missing_tokens, num_left)
            if request not in self.running or not num_tokens:
                continue
            while self.allocate_slots(request, num_tokens) is None:
                is_full = True
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            else:
                output.add(request, num_tokens)
                num_left -= num_tokens
        while self.waiting and num_left and not is_full:
            request, hits = self.waiting[0], []
            if len(self.running) == self.max_running:
                break
            if not request.num_computed_tokens:
                hits = self.get_computed_blocks(request)
            num_hit_tokens = len(hits) * BLOCK
            num_tokens = min(request.num_missing_tokens - num_hit_tokens, num_left)
            if self.allocate_slots(request, num_tokens, hits=hits) is None:
                break
            self.running.append(self.waiting.popleft())
            request.num_computed_tokens += num_hit_tokens
            output.add(request, num_tokens)
            num_left -= num_tokens
        self.update_after_schedule(output)
        return output

    def get_computed_blocks(self, request):
        """Find a request's prefix, without its last token."""
        blocks = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if block_hash not in self.pool.by_hash:
                break
            blocks.append(self.pool.by_hash[block_hash])
        return blocks

    def allocate_slots(self, request, num_tokens, *, hits=(), delay_cache_blocks=False):
        """Allocate blocks for more tokens; None if too few are free."""
        pool, end = self.pool, request.num_computed_tokens + num_tokens
        end += len(hits) * BLOCK
        num_new = max(-(-end // BLOCK) - len(request.blocks) - len(hits), 0)
        num_idle = sum(pool.counts[block] == 0 for block in hits)
        if num_new + num_idle > len(pool.free_blocks):
            return None
        pool.touch(hits)
        new = pool.allocate(num_new)
        request.blocks += [*hits, *new]
        if not delay_cache_blocks:  # This step computes them, before others read them.
            hashes = request.block_hashes[: end // BLOCK]
            pool.cache(request.blocks, hashes)
        return new

    def update_after_schedule(self, output):
        """Count the step's tokens as computed; it will be dispatched in this order."""
        for share in output.shares:
            share.request.num_computed_tokens += share.num_tokens
            share.request.num_output_placeholders += share.is_sampled

    def execute(self, output):
        """Run the model."""
        for request, start, num_tokens, *_ in output.shares:
            for at in range(start, start + num_tokens):
                is_known = at < request.num_tokens
                token = request.tokens[at] if is_known else self.newest[request]
                self.kv, new = run_paged(self.kv, [request.blocks], at, token)
            self.newest[request] = output.sampled[request] = new
        if not output.shares:
            time.sleep(1e-4)

    def update_from_output(self, output):
        """Add the tokens of a step that has run."""
        for request, _, _, is_sampled, age in output.shares:
            if not is_sampled or request.has_ended or request.num_preemptions != age:
                continue
            request.num_output_placeholders -= 1
            request.tokens.append(output.sampled[request])
            if request.num_tokens == request.max_tokens:
                self.end(request)

    def preempt(self, request):
        """Preempt a request, which starts again later."""
        self.free(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.num_preemptions += 1

    def end(self, request):
        """End a request that has finished or is aborted."""
        if request.has_ended:
            return
        request.has_ended = True
        for requests in self.waiting, self.running:
            if request in requests:
                requests.remove(request)
        self.free(request)
        self.newest.pop(request, None)
        del self.requests[request.request_id]
        request.future.set_result(request.tokens[request.num_prompt_tokens :])

    def free(self, request):
        """Release a request's blocks, the head last, to be evicted last."""
        self.pool.release(request.blocks[::-1])
        request.blocks = []
