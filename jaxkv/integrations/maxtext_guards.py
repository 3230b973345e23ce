"""Fixes for some versions of MaxText that cannot resume a prefill without them.

Each guard fixes the versions that it names, and leaves other versions alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

import jax

ASSERTION_VERSIONS = frozenset({"0.2.0", "0.2.1", "0.2.2", "0.2.3", "0.2.4", "0.2.5"})
"""Versions of MaxText whose chunked prefill fails an assertion; later ones may too."""


def guard_chunked_prefill() -> bool:
    """Fix an assertion in MaxText that stops chunked prefill; return whether it did.

    In `ASSERTION_VERSIONS` an attention layer creates its cache for keys of one token,
    and chunked prefill asserts that they are as long as the chunk. The guard sets the
    true length during the call. ImportError without MaxText.
    """
    if _version() not in ASSERTION_VERSIONS:
        return False
    cache_class = _import("maxtext.inference.kvcache").KVCache
    update = cache_class.kv_cache_chunked_prefill
    if getattr(update, "is_jaxkv_guard", False):
        return True

    @functools.wraps(update)
    def guarded(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = self.key_seq_len, self.value_seq_len
        self.key_seq_len, self.value_seq_len = key.shape[1], value.shape[1]
        try:
            return update(self, key, value, *args, **kwargs)
        finally:
            self.key_seq_len, self.value_seq_len = lengths

    guarded.is_jaxkv_guard = True  # type: ignore[attr-defined]
    cache_class.kv_cache_chunked_prefill = guarded
    return True


def guard_stub_results() -> bool:
    """Make the stub of `ResultTokens` a pytree; return whether MaxText has the stub.

    Without JetStream's class MaxText uses a stub that is not a pytree, so every prefill
    raises a TypeError. ImportError without MaxText.
    """
    engine_api = _import("maxtext.inference.maxengine.maxengine").engine_api
    if not getattr(engine_api, "_IS_STUB", False):
        return False
    results = engine_api.ResultTokens
    if jax.tree.leaves(results(data=0)) != [0]:  # It is not a pytree yet.
        jax.tree_util.register_dataclass(
            results,
            ["data", "log_prob"],
            ["tokens_idx", "valid_idx", "length_idx", "samples_per_slot"],
        )
    return True


def find_prefix_class() -> Any:
    """Return the class that `MaxEngine.prefill` takes as `existing_prefix`."""
    return _import("maxtext.inference.maxengine.maxengine").ExistingPrefix


def _version() -> str:
    try:
        return importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "MaxText is not installed: pip install maxtext, on Python 3.12 or newer."
        ) from error


def _import(module: str) -> Any:
    _version()
    return importlib.import_module(module)
