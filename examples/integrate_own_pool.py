"""Option 3 of docs/integrate.md, for an engine in the shape of vLLM v1."""

import functools

# Toys in place of your engine and your model.
from toy_engine import Engine
from toy_model import BLOCK, answer

import jaxkv
from jaxkv.integrations.engine_hooks import EngineHooks

NAMESPACE = jaxkv.Namespace("toy", "v1", "float32", "block, features", BLOCK)


class OffloadingEngine(Engine):
    """The engine, which keeps its pool, with a host tier."""

    def __init__(self, num_blocks, host_blocks):
        super().__init__(num_blocks)
        self.hooks = EngineHooks(
            jaxkv.OffloadScheduler(BLOCK, host_blocks),
            jaxkv.BorrowedPool(
                num_blocks,  # Block 0 is the null block.
                num_free=lambda: len(self.pool.free_blocks),
                hold=self.pool.touch,
                release=self.pool.release,
                count_of=self.pool.counts.__getitem__,
            ),
            NAMESPACE,
            tokens_of=lambda request: request.tokens,
            table_of=lambda request: request.blocks,
        )
        self.worker = jaxkv.OffloadWorker(jaxkv.TransferEngine(self.kv, host_blocks))

    def loop(self):
        """Own the transfers on the thread that a resume has started."""
        self.worker.adopt()
        super().loop()

    def has_work(self):
        """Keep stepping until all transfers have ended."""
        return super().has_work() or self.hooks.has_pending_transfers

    def schedule(self):
        """Continue requests whose load has ended."""
        for request, num_tokens in self.hooks.collect(self.worker.poll()):
            if not num_tokens:  # The load failed: compute these tokens.
                self.free(request)
            request.num_computed_tokens = num_tokens
            if request in self.waiting:
                self.waiting.remove(request)
            self.waiting.appendleft(request)
        return super().schedule()

    def get_computed_blocks(self, request):
        """Query the host for the tokens behind these blocks."""
        blocks = super().get_computed_blocks(request)
        self.hooks.query(request, len(blocks) * BLOCK)
        return blocks

    def allocate_slots(self, request, num_tokens, **options):
        """Allocate for the load first, if the host has something."""
        allocate = functools.partial(super().allocate_slots, request, **options)
        new = self.hooks.allocate(request, num_tokens, allocate)
        if self.hooks.is_loading(request):
            self.waiting.remove(request)
        return new

    def update_after_schedule(self, output):
        """Plan the step's transfers."""
        output.transfers = self.hooks.plan(output.num_scheduled_tokens)
        super().update_after_schedule(output)

    def execute(self, output):
        """Start them before the model."""
        self.kv = self.worker.start(output.transfers, self.kv)
        super().execute(output)

    def free(self, request):
        """Store what the request has."""
        self.hooks.free(request, has_ended=request.has_ended)
        super().free(request)


if __name__ == "__main__":
    engine, all_same = OffloadingEngine(num_blocks=20, host_blocks=64), True
    for turn in range(4):  # three users, of whom the pool holds two
        engine.resume()
        prompts = [[7 * i + i * user % 5 for i in range(30)] for user in range(3)]
        names = [f"turn {turn}, user {user}" for user in range(3)]
        requests = [engine.submit(*new, 6) for new in zip(names, prompts, strict=True)]
        for request, prompt in zip(requests, prompts, strict=True):
            all_same &= request.future.result(60) == answer(prompt, 6)
        engine.pause()
    print(f"blocks came from the host: {engine.worker.blocks_loaded > 0}")
    print(f"tokens are identical: {all_same}")
