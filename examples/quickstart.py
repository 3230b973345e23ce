"""Store KV blocks on the host and load them again: the smallest use of jaxkv."""

import jax.numpy as jnp

from jaxkv import KeyChain, Namespace, OffloadingManager, TransferEngine

# A paged KV pool: any pytree of arrays with the block axis first.
pool = {"k": jnp.ones((8, 16, 2, 64)), "v": jnp.full((8, 16, 2, 64), 2.0)}
engine = TransferEngine(pool, num_host_blocks=32)
manager = OffloadingManager(block_size=16, num_blocks=32)
keys = KeyChain(Namespace("my-model", "v1", "float32", "NHD", 16)).extend(range(40))

# The model has computed the prompt's two full blocks in device blocks 5 and 2.
engine.save(pool, [5, 2], manager.prepare_store(keys).store_spec.block_ids)
pool, _ = engine.drain(pool)  # a serving loop calls advance() and poll(): no waiting
manager.complete_store(keys)

# The device reuses them, and the prompt returns.
pool = {name: leaf.at[:].set(0) for name, leaf in pool.items()}
hits = manager.lookup(keys)
pool, _ = engine.load(pool, manager.prepare_load(keys[:hits]).block_ids, [0, 1])
pool, _ = engine.drain(pool)
manager.complete_load(keys[:hits])
print(f"{hits} blocks back: k = {pool['k'][1, 0, 0, 0]}, v = {pool['v'][1, 0, 0, 0]}")
