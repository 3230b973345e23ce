"""Tracks which LoRA adapter JetStream's driver has applied, for the keys of KV."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxkv import Extras
from jaxkv.keys.hashing import NO_EXTRAS

_log = logging.getLogger(__name__)


class AdapterWatch:
    """Tracks the adapter that is applied in the calling thread.

    The driver passes a prefix cache the tokens of a prompt, not its adapter. But the
    thread that prefills gets the adapter's weights from the adapter store by name, and
    the engine applies them and removes them afterwards. Pass the driver the wrapped
    stores and prefill engines that `store` and `engine` return, and pass the cache the
    watch::

        watch = AdapterWatch()
        Driver(
            prefill_engines=[watch.engine(engine)],
            prefill_adapterstore=[watch.store(adapters)],
            prefix_cache_inst=PrefixCache(..., extras_of=watch),
            ...
        )

    An adapter that is registered, loaded or unloaded again counts as another one. If
    that happens while its weights are fetched, KV computed with them is never hit. Once
    the weights of the engine are unknown, as after a failed removal of an adapter,
    nothing is cached for its thread.

    `version_of` returns the version of an adapter's weights by its name, such as the
    revision or a digest of its checkpoint. With it, an adapter that is registered again
    is the same while its version is, also in other processes. A cache with `storage`
    needs it.
    """

    def __init__(self, version_of: Callable[[str], str] | None = None) -> None:
        self.version_of = version_of
        self._process = os.urandom(16).hex()
        self._thread = threading.local()
        self._lock = threading.Lock()  # Guards the counters.
        self._replaced: collections.Counter[str] = collections.Counter()
        self._replacing: collections.Counter[str] = collections.Counter()

    def __call__(self, key: object = ()) -> Extras | None:
        """Return what KV computed in this thread depends on; None if unknown."""
        extras: Extras | None = getattr(self._thread, "extras", NO_EXTRAS)
        return extras

    def store(self, adapters: Any) -> Any:
        """Wrap an adapter store: JetStream's ``AdapterTensorStore``."""
        return _WatchedStore(self, adapters)

    def engine(self, engine: Any) -> Any:
        """Wrap an engine that prefills."""
        return _WatchedEngine(self, engine)

    def _name(self, adapter_id: str) -> str | None:
        """Return a name of an adapter's weights; None while they are replaced."""
        with self._lock:
            if self._replacing[adapter_id]:
                return None
            # The number of replacements, then the name: unambiguous in this order.
            name = f"{self._replaced[adapter_id]} {adapter_id}"
        if self.version_of is not None:
            try:
                name = json.dumps([str(self.version_of(adapter_id)), adapter_id])
            except Exception:  # It must not reach the driver, whose threads end.
                _log.exception("version_of failed: no other process finds this KV.")
                name = f"{self._process} {name}"
        return name

    @contextlib.contextmanager
    def _fetching(self, adapter_id: str) -> Iterator[None]:
        """Name the weights that this thread fetches in the context, to apply them."""
        self._thread.fetched = None
        name = self._name(adapter_id)
        yield
        if name is None or name != self._name(adapter_id):
            # The weights may be old or new: use a unique name.
            name = f"{os.urandom(16).hex()} {adapter_id}"
        self._thread.fetched = name

    @contextlib.contextmanager
    def _replace(self, adapter_id: str) -> Iterator[None]:
        with self._lock:
            self._replaced[adapter_id] += 1
            self._replacing[adapter_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._replacing[adapter_id] -= 1

    def _extras_of_fetched(self) -> Extras | None:
        """Return what KV depends on once the fetched adapter is applied."""
        name = getattr(self._thread, "fetched", None)
        # The result of two adapters, or of unknown weights, is unknown.
        return Extras(lora_name=name) if name and self() == NO_EXTRAS else None

    @contextlib.contextmanager
    def _changing(self, extras: Extras | None) -> Iterator[None]:
        """Set the extras from now on; they stay unknown if the change fails."""
        if self() is None:
            extras = None
        self._thread.extras = None
        yield
        self._thread.extras = extras


class _Watched:
    """Forwards all other attributes."""

    def __init__(self, watch: AdapterWatch, inner: Any):
        self._watch = watch
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WatchedStore(_Watched):
    async def get_lora_weights(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        with self._watch._fetching(adapter_id):
            return await self._inner.get_lora_weights(adapter_id, *args, **named)

    async def register_adapter(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        with self._watch._replace(adapter_id):
            return await self._inner.register_adapter(adapter_id, *args, **named)

    async def load_adapter(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        with self._watch._replace(adapter_id):
            return await self._inner.load_adapter(adapter_id, *args, **named)

    async def unload_adapter(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        with self._watch._replace(adapter_id):
            return await self._inner.unload_adapter(adapter_id, *args, **named)


class _WatchedEngine(_Watched):
    def apply_adapter(self, *args: Any, **named: Any) -> Any:
        with self._watch._changing(self._watch._extras_of_fetched()):
            return self._inner.apply_adapter(*args, **named)

    def unapply_adapter(self, *args: Any, **named: Any) -> Any:
        with self._watch._changing(NO_EXTRAS):
            return self._inner.unapply_adapter(*args, **named)
