"""vLLM's connector over a KV cache as tpu-inference lays it out, without vLLM.

A few lines replace the objects of vLLM's scheduler and runner; the calls are theirs, in
their order. One prompt is computed and stored, its blocks are overwritten, and it is
loaded again.
"""

import pickle
from types import SimpleNamespace as Object

import jax.numpy as jnp

from jaxkv import KeyChain, Namespace
from jaxkv.integrations.vllm import OffloadConnector

BLOCK, NUM_BLOCKS, LAYERS = 16, 8, 2


class FullAttentionSpec(Object):
    """vLLM's name for layers that attend to all earlier tokens."""


class BlockPool:
    """vLLM's block pool: reference counts and hashes of blocks."""

    def __init__(self):
        self.blocks = [
            Object(block_id=n, block_hash=None, is_null=n == 0, ref_cnt=0)
            for n in range(NUM_BLOCKS)
        ]

    def touch(self, blocks):
        """Add a reference to blocks."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        """Remove a reference from blocks."""
        for block in blocks:
            block.ref_cnt -= 1

    def get_num_free_blocks(self):
        """Count the blocks that could be allocated."""
        return sum(not block.ref_cnt for block in self.blocks)


spec = FullAttentionSpec(block_size=BLOCK)
kv_cache_config = Object(
    num_blocks=NUM_BLOCKS,
    kv_cache_tensors=[Object(size=NUM_BLOCKS * BLOCK * 2 * 2 * 128 * 2)] * LAYERS,
    kv_cache_groups=[Object(kv_cache_spec=spec)],
)
vllm_config = Object(
    parallel_config=Object(pipeline_parallel_size=1, data_parallel_size=1),
    cache_config=Object(enable_prefix_caching=True),
    model_config=Object(max_model_len=NUM_BLOCKS * BLOCK),
    scheduler_config=Object(max_num_batched_tokens=64),
    kv_transfer_config=Object(
        kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": "1MiB"}
    ),
)
shape = (NUM_BLOCKS, BLOCK, 2, 2, 128)  # 2 heads, K and V packed in pairs of bf16
runner = Object(kv_caches=[jnp.zeros(shape, jnp.bfloat16) for _ in range(LAYERS)])
pool = BlockPool()
scheduler = OffloadConnector(vllm_config, Object(name="SCHEDULER"), kv_cache_config)
worker = OffloadConnector(vllm_config, Object(name="WORKER"), kv_cache_config)
scheduler.bind_gpu_block_pool(pool)
worker.register_runner(runner)


def step(**num_scheduled_tokens):
    """Run a step as vLLM does, without the model."""
    output = Object(
        scheduled_cached_reqs=Object(req_ids=[], new_block_ids=[]),
        num_scheduled_tokens=num_scheduled_tokens,
        preempted_req_ids=set(),
    )
    meta = scheduler.build_connector_meta(output)
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
    worker.start_load_kv(None)
    _, received = worker.get_finished(set())
    report = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
    worker.clear_connector_metadata()
    scheduler.update_connector_output(Object(kv_connector_worker_meta=report))
    return received


def make_request(name):
    """Make a prompt of 40 tokens, which fill two blocks."""
    keys = KeyChain(Namespace("m", "v1", "bfloat16", "NHD", BLOCK)).extend(range(40))
    return Object(
        request_id=name,
        block_hashes=keys,
        num_tokens=40,
        num_prompt_tokens=40,
        num_computed_tokens=0,
    )


def allocate(request, block_ids, num_external_tokens):
    """Allocate a request's blocks."""
    pool.touch(pool.blocks[n] for n in block_ids)
    blocks = Object(get_block_ids=lambda: (block_ids,))
    scheduler.update_state_after_alloc(request, blocks, num_external_tokens)


first = make_request("first")
assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
allocate(first, [5, 2, 3], 0)
step(first=40)
runner.kv_caches = [cache.at[5].set(1).at[2].set(2) for cache in runner.kv_caches]
for block, key in zip((5, 2), first.block_hashes, strict=True):
    pool.blocks[block].block_hash = key + bytes(4)  # vLLM adds the group's number
first.num_computed_tokens = 40
scheduler.request_finished_all_groups(first, ([5, 2, 3],))
pool.free_blocks(pool.blocks[n] for n in (5, 2, 3))
while scheduler.has_pending_push_work():
    step()

runner.kv_caches = [cache * 0 for cache in runner.kv_caches]
second = make_request("second")
num_tokens, is_async = scheduler.get_num_new_matched_tokens(second, 0)
allocate(second, [1, 4, 6], num_tokens)
while "second" not in step():
    pass
values = [[int(cache[n].max()) for n in (1, 4)] for cache in runner.kv_caches]
print(f"{num_tokens} of 40 tokens from the host: {values} in blocks 1 and 4 by layer")
