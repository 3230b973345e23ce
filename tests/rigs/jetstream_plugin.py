"""A plugin of pytest: JetStream's own tests with jaxkv's prefix cache for theirs.

pytest -p tests.rigs.jetstream_plugin jetstream/tests/core/test_orchestrator.py
"""

import jax
import jax.numpy as jnp

from jaxkv import Extras
from jaxkv.integrations.jetstream import PrefixCache

CHUNK, LENGTH = 4, 32  # Of the engines in these tests.
_caches = []


def pytest_configure(config):
    """Replace JetStream's cache, as docs/jetstream.md has it."""
    # The driver first, which builds a type of the class.
    from jetstream.core import orchestrator, prefix_cache  # noqa: F401

    def make(hbm_bytes, dram_bytes):
        cache = PrefixCache(
            jax.ShapeDtypeStruct((1, LENGTH), jnp.float32),
            block_size=CHUNK,
            host_bytes=dram_bytes,
            extras=Extras(),
            sequence_axes={"": 1},
        )
        _caches.append(cache)
        return cache

    prefix_cache.PrefixCache = make


def pytest_terminal_summary(terminalreporter):
    for cache in _caches:
        cache.store.flush()
    stored = sum(cache.store.stats.num_stored for cache in _caches)
    errors = sum(sum(cache.errors.values()) for cache in _caches)
    terminalreporter.write_line(
        f"{len(_caches)} caches of jaxkv, {stored} blocks stored, {errors} errors"
    )
    for cache in _caches:
        cache.close()
