"""A prefix cache for JetStream's `Driver`, in blocks that prompts share.

For ``Driver(..., prefix_cache_inst=PrefixCache(...))`` of JetStream 0.3. This module
does not import JetStream: it has the methods that the driver calls, and returns the
attributes that it reads.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Unpack

import jax
from jax.experimental.layout import Format

from jaxkv import Extras, Namespace, Policy, get_policy_maker
from jaxkv._util import Resource, check_whole, shown
from jaxkv.integrations.prefix_blocks import AxisRules
from jaxkv.integrations.prefix_epochs import BegunPrompts
from jaxkv.integrations.prefix_storage import (
    StorageKeys,
    check_weights_epoch,
    storage_config,
)
from jaxkv.integrations.prefix_store import PrefixStore, StoreKeys
from jaxkv.integrations.prefix_template import PrefixTemplate
from jaxkv.keys.hashing import NO_EXTRAS
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.transfer.host_memory import parse_size
from jaxkv.transfer.kernels import MODES
from jaxkv.transfer.storage import StoreError
from jaxkv.types import PyTree

Key: TypeAlias = tuple[int, ...]
"""The tokens of a prompt, from the first on."""

ExtrasOf: TypeAlias = Callable[[Key], Extras | None]
"""Returns what the KV of a prompt depends on besides tokens; None to not cache it."""

_RECENT_LOADS = 100

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrefixValue:
    """A loaded prefix, with the attributes of JetStream's ``prefix_cache.Value``."""

    prefix: PyTree  # The engine's cache, in new arrays; zero after the tokens.
    tokens: Key
    true_length: int
    padded_length: int  # Tokens that it has room for.
    prefix_size_bytes: int
    device: PyTree  # The placement of each leaf when it was saved.


class PrefixCache(Resource):
    """Replaces JetStream's ``PrefixCache``, and keeps each block of KV once.

    The engine's cache, any pytree, is cut into blocks along its sequence axes. Full
    blocks are kept on the host under keys of their tokens, all tokens before, the
    adapter and the salt; prompts with a common prefix share them. `load` rebuilds the
    longest prefix on the host, placed as it was.

    The cache learns the layout from `learn` or from the first cache saved. `load`
    returns leaves without a sequence axis, such as buffers for generated tokens, as
    they were in that cache. If they differ in a later cache, it is not kept, since they
    would depend on the prompt.

    `save` keeps KV only of the weights and adapter that were current when its thread
    called `load` for the prompt, as the driver does: nothing is kept if `clear` was
    called since, or if `extras_of` returns another value.

    JetStream's threads end the server's process on any exception. So `save`, `load` and
    `contains` raise none: an error is logged once per cause, counted in `errors`, and
    treated as a miss.

    Any thread may call.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = PrefixCache(block_size=4, num_host_blocks=64, extras_of=None)
        >>> engine_cache = {"key": jnp.ones((1, 16, 2)), "index": jnp.zeros((1,))}
        >>> tokens = (5, 6, 7, 8, 9, 10, 11, 12)
        >>> value = PrefixValue(engine_cache, tokens, 8, 16, 136, None)
        >>> cache.save(tokens, value), cache.flush()
        (True, None)
        >>> found = cache.load((5, 6, 7, 8, 0, 0), min_common_prefix_key_length=4)
        >>> found.tokens, float(found.prefix["key"].sum())
        ((5, 6, 7, 8), 8.0)
        >>> cache.close()
    """

    def __init__(
        self,
        *,
        block_size: int,
        extras_of: ExtrasOf | None,
        sequence_axes: AxisRules | None = None,
        model: str = "",
        weights_epoch: str = "",
        **store: Unpack[StoreKeys],
    ):
        """Set the size of the cache; `learn` allocates its memory.

        Args:
            block_size: Tokens per block. It should divide the engine's
                ``prefill_chunk_size``, since JetStream reuses whole chunks.
            extras_of: What KV depends on besides the tokens: an `AdapterWatch`, or a
                function of the tokens, since the driver passes no more. None without
                adapters and salts; it has no default, because with adapters None would
                serve the KV of one adapter under another.
            sequence_axes: The sequence axis of each leaf, by patterns of its path,
                ``{"*/key": 1, "*": None}``; see also `compare_shapes`. Not needed if
                only that axis is as long as the cache, or for MaxText's names.
            model: Name of the model, with its revision; needed with `storage`.
            weights_epoch: Version of its weights; needed with `storage`.
            store: As for `PrefixStore`: its size, ``num_host_blocks`` or
                ``host_bytes``, and perhaps ``cache_policy``, ``storage`` and others.
                With ``storage``, call `learn` at the start, so that the first prompts
                find stored blocks.

        Raises:
            ValueError: An argument is wrong, or missing.
            TypeError: An argument has a wrong type.
        """
        _check_store(store, model, weights_epoch)
        version_of = getattr(extras_of, "version_of", "known")
        if store.get("storage") is not None and version_of is None:
            raise ValueError(
                "storage needs an AdapterWatch(version_of=...): without it, adapters "
                "are distinguished only within this process."
            )
        if extras_of is not None and not callable(extras_of):
            raise TypeError(
                f"extras_of={shown(extras_of)} must be an AdapterWatch, a function of "
                "the tokens, or None."
            )
        if sequence_axes is not None:
            _check_rules(sequence_axes)
        namespace = Namespace(model, weights_epoch, "", "", block_size)
        options = {"namespace": namespace, **store}
        self._extras_of = extras_of or (lambda key: NO_EXTRAS)
        self._adapter: Extras | None = None  # The fixed one of a view.
        self._shared = _Shared(options, sequence_axes)

    def for_adapter(
        self, lora_name: str | None, salt: str | None = None
    ) -> PrefixCache:
        """Return a view of the cache for prompts of one adapter and salt.

        For a driver or tenant with a fixed one. Memory and statistics are shared.
        """
        view = copy.copy(self)
        extras = Extras(salt, lora_name)
        view._extras_of, view._adapter = lambda key: extras, extras
        return view

    @property
    def store(self) -> PrefixStore | None:
        """The store of the blocks; None until the engine's cache is known."""
        template = self._shared.template
        return None if template is None else template.store

    @property
    def stats(self) -> OffloadStats:
        """Counts so far; see `PrefixStore.stats`."""
        return OffloadStats() if self.store is None else self.store.stats

    @property
    def errors(self) -> Mapping[str, int]:
        """Calls that ended in an error, by the name of the method."""
        return self._shared.errors()

    @property
    def held_bytes(self) -> int:
        """Bytes of the held blocks."""
        return 0 if self.store is None else self.store.held_bytes

    def learn(self, prefix: PyTree, padded_length: int) -> None:
        """Learn the layout of the engine's cache, allocate memory and compile.

        It has no effect if the layout is known. Without this call, the first `save`
        learns the layout; on an error, it logs the error and keeps nothing.

        Args:
            prefix: A cache of the engine, of the greatest length; not kept.
            padded_length: Tokens that it has room for.

        Raises:
            ValueError: It cannot be cut, or its sequence axes are not clear.
            MemoryError: There is not enough host memory.
            ImportError: The storage needs an extra that is missing.
            StoreError: The storage cannot be used.
            RuntimeError: The cache was closed.
        """
        if self.store is None:
            self._shared.learn(prefix, padded_length).store.warm_up()

    def contains(self, key: Key) -> bool:
        """Whether all full blocks of a prompt, at least one, are on the host."""
        try:
            extras, store = self._extras_of(key), self.store
            if extras is None or store is None:
                return False
            return store.contains(key, extras)
        except Exception as error:
            self._shared.record_error("contains", error)
            return False

    def load(
        self,
        key: Key,
        min_common_prefix_key_length: int | None = None,
        device: Any = None,
    ) -> PrefixValue | None:
        """Load the longest prefix of whole blocks into a new cache.

        Args:
            key: The prompt.
            min_common_prefix_key_length: Load nothing if fewer tokens are found.
            device: Where to put it, as for `jax.device_put`; None for where it was.

        Returns:
            The prefix; None if nothing was found or the load failed.
        """
        try:
            return self._load(key, min_common_prefix_key_length, device)
        except Exception as error:
            self._shared.record_error("load", error)
            return None

    def _load(
        self, key: Key, min_common_prefix_key_length: int | None, device: Any
    ) -> PrefixValue | None:
        extras, template = self._extras_of(key), self._shared.template
        state, hit = (self._shared.num_early_clears, extras), None
        min_tokens = min_common_prefix_key_length
        min_tokens = 0 if min_tokens is None else min_tokens
        check_whole(0, min_common_prefix_key_length=min_tokens)
        if device is not None:
            _check_device(device)
        if extras is not None and template is not None:
            hit = template.store.load(key, extras, min_tokens=min_tokens)
        self._shared.begun.record(self._adapter, key, state)
        num_tokens = 0 if hit is None else hit.num_tokens
        self._shared.record_load(len(key), num_tokens)
        if hit is None:
            return None
        assert template is not None
        prefix = template.rebuild(hit.kv)
        if device is not None:
            prefix = jax.device_put(prefix, device)
        return PrefixValue(
            prefix=prefix,
            tokens=tuple(key[:num_tokens]),
            true_length=num_tokens,
            padded_length=template.padded_length,
            prefix_size_bytes=template.num_bytes,
            device=template.shardings,
        )

    def save(self, key: Key, value: Any) -> bool:
        """Save the full blocks of a prompt.

        Returns before the bytes have left the device; the arrays may be donated.

        Args:
            key: The prompt.
            value: The engine's cache of it: JetStream's ``prefix_cache.Value``, or a
                `PrefixValue`.

        Returns:
            Whether all its full blocks, at least one, are held or in flight. False if
            the cache has other tokens, or another layout than the first, or if weights
            or adapter have changed since this thread called `load` for the prompt.
        """
        try:
            return self._save(key, value)
        except Exception as error:
            self._shared.record_error("save", error)
            return False

    def _save(self, key: Key, value: Any) -> bool:
        if tuple(value.tokens[: len(key)]) != tuple(key):
            raise ValueError(
                f"the value has the tokens {shown(value.tokens)}, which do not begin "
                f"with the key, {shown(key)}."
            )
        extras = self._extras_of(key)
        if extras is None:
            return False
        state = self._shared.begun.find(self._adapter, key) or (0, extras)
        check_whole(0, true_length=value.true_length)
        template = self._shared.learn(value.prefix, value.padded_length, again=False)
        num_tokens: int = min(len(key), value.true_length)
        kv, only_if = template.split(value.prefix)
        if state != (self._shared.num_early_clears, extras):
            return False  # Other weights or another adapter computed it.
        held = template.store.save(key, kv, num_tokens, extras, only_if=only_if)
        block_size = template.store.block_size
        return 0 < held == num_tokens // block_size * block_size

    def flush(self) -> None:
        """Wait until all saves have arrived."""
        if self.store is not None:
            self.store.flush()

    def clear(self, weights_epoch: str | None = None) -> None:
        """Forget all prompts, as after a change of weights.

        Args:
            weights_epoch: Version of the weights from now on, needed with `storage`;
                see `PrefixStore.clear`.

        Raises:
            ValueError: There is `storage`, but no name. Then nothing changes.
        """
        self._shared.clear(weights_epoch)

    def gen_statistic_str(self) -> str:
        """Describe the recent hits and the held blocks."""
        num_queries, num_hits = self._shared.recent_tokens()
        lines = [
            f"Prefix cache: {num_hits} of {num_queries} tokens hit "
            f"({num_hits / (num_queries or 1):.4f}) in the last {_RECENT_LOADS} loads"
        ]
        if self.store is not None:
            stats = self.store.stats
            lines += [
                f"  held: {self.store.held_bytes} bytes, room for "
                f"{self.store.num_host_blocks * self.store.block_bytes}",
                f"  blocks of {self.store.block_size} tokens: {stats.num_stored} "
                f"stored, {stats.num_evicted} evicted; dropped: "
                f"{stats.num_dropped_full} without room, {stats.num_dropped_failed} "
                f"failed, {stats.num_dropped_reset} of older weights",
                f"  loads: {stats.num_loads}, {stats.num_loads_failed} failed",
            ]
            if self.store.num_storage_blocks:
                lines.append(
                    f"  storage: {self.store.num_storage_blocks_held} blocks held, "
                    f"{stats.num_storage_stored} written, "
                    f"{stats.num_storage_loaded} fetched, "
                    f"{stats.num_storage_failed} missed, "
                    f"{stats.num_storage_dropped} dropped"
                )
        if errors := self.errors:
            counts = ", ".join(f"{num} in {name}" for name, num in errors.items())
            lines.append(f"  errors, see the log: {counts}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Wait for transfers in flight and end the threads; no calls after this."""
        self._shared.close()


class _Shared:
    """The state that a cache shares with its views for adapters."""

    def __init__(self, options: dict[str, Any], rules: AxisRules | None):
        self.template: PrefixTemplate | None = None
        # Clears before the store was made; the store counts later ones.
        self.num_early_clears = 0
        # The number of early clears, and the extras, when a prompt was loaded.
        self.begun = BegunPrompts[tuple[int, Extras | None]]()
        self.recent: collections.deque[tuple[int, int]] = collections.deque(
            maxlen=_RECENT_LOADS
        )
        self._options = options
        self._rules = rules
        # Held while the layout is learnt, which may take long. `_lock` guards the
        # counters, so that reading them never waits for it.
        self._learning = threading.Lock()
        self._is_closed = False
        self._lock = threading.Lock()
        self._learn_error: Exception | None = None  # Memory or a store was missing.
        self._errors: collections.Counter[str] = collections.Counter()
        self._causes: set[tuple[object, ...]] = set()

    def learn(
        self, prefix: PyTree, padded_length: int, *, again: bool = True
    ) -> PrefixTemplate:
        """Return the template, which is made from the first cache.

        If memory or the store was missing before, it is only made `again` on request:
        it takes long, and a prompt would wait for it.
        """
        check_whole(1, padded_length=padded_length)
        with self._learning:
            if self._is_closed:
                raise RuntimeError("the prefix cache was closed.")
            if self._learn_error is not None and not again:
                name = type(self._learn_error).__name__
                raise MemoryError(f"{name} before, and only learn() tries again.")
            if self.template is None:
                try:
                    self.template = PrefixTemplate(
                        prefix, padded_length, self._rules, self._options
                    )
                except (MemoryError, StoreError, ImportError) as error:
                    self._learn_error = error
                    raise
                self._learn_error = None
            return self.template

    def clear(self, weights_epoch: str | None) -> None:
        """Forget all prompts; the weights have another name from now on."""
        with self._learning:
            if self._options.get("storage") is not None:
                check_weights_epoch(weights_epoch)
            if self.template is not None:
                self.template.store.clear(weights_epoch)
            else:
                if weights_epoch is not None:
                    self._options["namespace"] = dataclasses.replace(
                        self._options["namespace"], weights_epoch=weights_epoch
                    )
                self.num_early_clears += 1
            with self._lock:
                self.recent.clear()

    def close(self) -> None:
        """Close the store, if there is one, and never make another."""
        with self._learning:
            self._is_closed = True
            if self.template is not None:
                self.template.store.close()

    def record_load(self, num_tokens: int, num_hits: int) -> None:
        with self._lock:
            self.recent.append((num_tokens, num_hits))

    def recent_tokens(self) -> tuple[int, int]:
        with self._lock:
            return sum(n for n, _ in self.recent), sum(n for _, n in self.recent)

    def record_error(self, name: str, error: Exception) -> None:
        """Count an error of a method, and log it the first time."""
        cause = (name, type(error), *_place(error))
        with self._lock:
            self._errors[name] += 1
            if cause in self._causes:
                return
            self._causes.add(cause)
        _log.error(
            "%s() of the prefix cache failed, which counts as a miss: %s: %s (logged "
            "once; `errors` counts all)",
            name,
            type(error).__name__,
            error,
            exc_info=error,
        )

    def errors(self) -> dict[str, int]:
        with self._lock:
            return dict(self._errors)


def _check_store(keys: StoreKeys, model: str, weights_epoch: str) -> None:
    """Check the arguments of a store.

    The store is made once the engine's cache is known, when a wrong argument would only
    be a line in the log.
    """
    parse_size(
        keys.get("num_host_blocks"), keys.get("host_bytes"), keys.get("extent_bytes")
    )
    policy = keys.get("cache_policy", "lru")
    if isinstance(policy, str):
        get_policy_maker(policy)
    elif not isinstance(policy, Policy):
        raise TypeError(
            f"cache_policy={shown(policy)} must be, or name, a jaxkv.Policy."
        )
    mode = keys.get("mode")
    if mode is not None and mode not in MODES:
        raise ValueError(f"{mode=} must be one of {MODES} or None.")
    check_whole(1, max_pending_saves=keys.get("max_pending_saves", 1))
    no_storage = StoreKeys.__annotations__.keys() - StorageKeys.__annotations__.keys()
    storage = {name: value for name, value in keys.items() if name not in no_storage}
    storage_config(storage, model, weights_epoch)


def _check_rules(rules: object) -> None:
    expected = (
        'must be patterns of paths and their axes, such as {"*/key": 1, "*": None}'
    )
    if not isinstance(rules, Mapping):
        raise TypeError(f"sequence_axes={shown(rules)} {expected}.")
    for pattern, axis in rules.items():
        if not isinstance(pattern, str) or not isinstance(axis, int | None):
            raise TypeError(f"{shown({pattern: axis})} in sequence_axes {expected}.")


def _check_device(device: Any) -> None:
    """Refuse what `jax.device_put` would refuse, before anything is loaded."""
    places = jax.tree.leaves(device)
    kinds = jax.Device, jax.sharding.Sharding, Format
    if not places or not all(isinstance(place, kinds) for place in places):
        raise TypeError(
            f"device={shown(device)} must be a device, a sharding, or a tree of them."
        )


def _place(error: Exception) -> tuple[object, ...]:
    """Return the line that raised an error; messages may contain users' text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return () if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)
