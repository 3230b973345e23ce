"""Which LoRA adapter JetStream's driver has applied, for the keys of its cache."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jaxkv import Extras
from jaxkv.hashing import NO_EXTRAS


class AdapterWatch:
    """Knows which adapter is applied in the thread that asks.

    The driver tells a prefix cache the tokens of a prompt, not its adapter. But in the
    thread that prefills it asks the adapter store for the adapter's weights by name,
    then has the engine apply them, and take them away afterwards. Give the driver the
    stores and prefill engines that `store` and `engine` return, which note this and
    pass everything on, and the cache the watch::

        watch = AdapterWatch()
        Driver(
            prefill_engines=[watch.engine(engine)],
            prefill_adapterstore=[watch.store(adapters)],
            prefix_cache_inst=PrefixCache(..., extras_of=watch),
            ...
        )

    Adapters that are registered anew under an old name count as others. Once it cannot
    be told which weights the engine has, as after an adapter that could not be taken
    away, nothing is cached any more for this thread.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._registered: collections.Counter[str] = collections.Counter()

    def __call__(self, key: object = ()) -> Extras | None:
        """Say what KV that this thread computes now depends on; None if unknown."""
        extras: Extras | None = getattr(self._thread, "extras", NO_EXTRAS)
        return extras

    def store(self, adapters: Any) -> Any:
        """Watch an adapter store: JetStream's ``AdapterTensorStore``."""
        return _WatchedStore(self, adapters)

    def engine(self, engine: Any) -> Any:
        """Watch an engine that prefills."""
        return _WatchedEngine(self, engine)

    def _ask(self, adapter_id: str) -> None:
        # A name, and how often it was registered, framed by their order.
        self._thread.asked = f"{self._registered[adapter_id]} {adapter_id}"

    def _asked(self) -> Extras | None:
        """Say what KV depends on once the adapter that was asked for is applied."""
        name = getattr(self._thread, "asked", None)
        # On top of an adapter that is still there, or of one unknown, it is nobody's.
        return Extras(lora_name=name) if name and self() == NO_EXTRAS else None

    @contextlib.contextmanager
    def _changing(self, extras: Extras | None) -> Iterator[None]:
        """Note what holds from now on; nothing is known if it fails, ever after."""
        if self() is None:
            extras = None
        self._thread.extras = None
        yield
        self._thread.extras = extras


class _Watched:
    """Passes on what it does not note."""

    def __init__(self, watch: AdapterWatch, inner: Any):
        self._watch = watch
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WatchedStore(_Watched):
    async def get_lora_weights(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        self._watch._ask(adapter_id)
        return await self._inner.get_lora_weights(adapter_id, *args, **named)

    async def register_adapter(self, adapter_id: str, *args: Any, **named: Any) -> Any:
        self._watch._registered[adapter_id] += 1
        return await self._inner.register_adapter(adapter_id, *args, **named)


class _WatchedEngine(_Watched):
    def apply_adapter(self, *args: Any, **named: Any) -> Any:
        with self._watch._changing(self._watch._asked()):
            return self._inner.apply_adapter(*args, **named)

    def unapply_adapter(self, *args: Any, **named: Any) -> Any:
        with self._watch._changing(NO_EXTRAS):
            return self._inner.unapply_adapter(*args, **named)
