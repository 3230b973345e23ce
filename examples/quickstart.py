"""Store KV blocks on the host and load them again: the smallest use of jaxkv."""

import jax.numpy as jnp

from jaxkv import KeyChain, Namespace, OffloadingManager, TransferEngine

# A paged KV pool: any pytree of arrays with the block axis first.
pool = {"k": jnp.ones((8, 16, 2, 64)), "v": jnp.full((8, 16, 2, 64), 2.0)}
engine = TransferEngine(pool, num_host_blocks=32)
manager = OffloadingManager(block_size=16, num_blocks=32, cache_policy="lru")

# Name the full blocks of a prompt; the engine has computed them in device blocks 5, 2.
keys = KeyChain(Namespace("my-model", "v1", "float32", "NHD", 16)).extend(range(40))
to_store = manager.prepare_store(keys)
engine.save(pool, [5, 2], to_store.store_spec.block_ids)  # returns at once
pool, _ = engine.drain(pool)  # a serving loop: advance() and poll(), which never wait
manager.complete_store(keys)

# Later the device has reused them, and the same prompt comes back.
pool = {name: leaf.at[:].set(0) for name, leaf in pool.items()}
hits = manager.lookup(keys)
spec = manager.prepare_load(keys[:hits])
pool, _ = engine.load(pool, spec.block_ids, [0, 1])  # donates the pool, returns it
pool, _ = engine.drain(pool)
manager.complete_load(keys[:hits])
print(f"{hits} blocks back: k = {pool['k'][1, 0, 0, 0]}, v = {pool['v'][1, 0, 0, 0]}")
