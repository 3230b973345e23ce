"""Listeners of a scheduler: they are notified of its events and change no decision.

A listener overrides the methods of `Listener` that it needs; the scheduler calls only
these, in the order of the listeners. A method must not raise, wait or call the
scheduler, except that `bound` may raise a ValueError to refuse the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.scheduling.protocol import Request
from jaxkv.types import BlockKey, Stop

Keys: TypeAlias = Sequence[BlockKey]
Passes: TypeAlias = NDArray[np.bool_] | None
"""Which of n blocks may be stored, bool[n]; None for all."""


class Start(NamedTuple):
    """A request that uses its blocks for the first time."""

    request: Request
    keys: Sequence[Keys]  # For each group of layers.
    num_local: int | None  # Device hits in tokens; None without a lookup.
    num_external: int  # Tokens that are loaded.
    has_load: bool  # Whether it has a load that has not ended.
    kind: int | None  # What the policy is notified of; see `facts`.
    now_ms: Callable[[], int]  # Reads the clock of policies.


class Offer(NamedTuple):
    """Blocks [first, end) of a request's first group, offered to the host."""

    request_id: str
    keys: Keys  # Of all blocks.
    first: int
    end: int
    placed: Container[BlockKey]  # Keys of the blocks that got a place on the host.
    passes: Callable[[int], Passes]  # `passes(start)` is about the blocks [start, end).
    is_end: bool  # Whether the request is about to lose its device blocks.
    can_store: bool  # With `is_end`, False if too many stores were waiting.


class End(NamedTuple):
    """A request that has finished."""

    request: Request
    keys: Sequence[Keys]
    stop: Stop | None
    has_begun: bool  # False if it never got blocks; then `keys` is empty.
    has_load: bool
    now_ms: Callable[[], int]  # Reads the clock of policies.


class Listener:
    """A method per event of the scheduler; each does nothing unless overridden."""

    def bound(self, pool: Any) -> None:
        """Notify that the pool of device blocks was bound."""

    def warm_up(self) -> None:
        """Load or compile what later calls run."""

    def looked_up(
        self,
        request: Request,
        num_computed_tokens: int,
        num_tokens: int | None,
        is_awaited: bool,
        start_s: float,
    ) -> None:
        """Notify of a lookup that offered `num_tokens`; None if it was deferred."""

    def begun(self, start: Start) -> None:
        """Notify of a request that begins."""

    def offered(self, offer: Offer) -> None:
        """Notify of an offer of eager stores."""

    def victims_offered(
        self, words: Any, placed: Container[BlockKey], passes: Passes
    ) -> None:
        """Notify of an offer of lazy stores: keys u32[n, 8], the next victim first."""

    def stored(self, keys: Keys, ok: bool) -> None:
        """Notify of a store that every worker has reported."""

    def released(self, request_ids: Sequence[str], unloaded: Sequence[Keys]) -> None:
        """Notify of requests whose loads were released, and of keys of failed loads."""

    def loaded(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Notify of the requests whose loads every worker has reported."""

    def left(self, request_id: str) -> None:
        """Notify of a request that was preempted or has finished."""

    def finished(self, end: End) -> None:
        """Notify of a request that has finished."""

    def reset(self) -> None:
        """Notify of a reset of the host."""


MOMENTS = tuple(name for name in vars(Listener) if not name.startswith("_"))


class Listeners:
    """For each method name of `Listener`, the overriding methods of all listeners."""

    bound: tuple[Callable[[Any], None], ...]
    warm_up: tuple[Callable[[], None], ...]
    looked_up: tuple[Callable[[Request, int, int | None, bool, float], None], ...]
    begun: tuple[Callable[[Start], None], ...]
    offered: tuple[Callable[[Offer], None], ...]
    victims_offered: tuple[Callable[[Any, Container[BlockKey], Passes], None], ...]
    stored: tuple[Callable[[Keys, bool], None], ...]
    released: tuple[Callable[[Sequence[str], Sequence[Keys]], None], ...]
    loaded: tuple[Callable[[Sequence[str], Sequence[str]], None], ...]
    left: tuple[Callable[[str], None], ...]
    finished: tuple[Callable[[End], None], ...]
    reset: tuple[Callable[[], None], ...]

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        listeners = list(listeners)
        for moment in MOMENTS:
            methods = (
                getattr(listener, moment)
                for listener in listeners
                if getattr(type(listener), moment) is not getattr(Listener, moment)
            )
            setattr(self, moment, tuple(methods))

    def remove(self, listener: Listener) -> None:
        """Stop notifying a listener."""
        for moment in MOMENTS:
            methods = getattr(self, moment)
            kept = [method for method in methods if method.__self__ is not listener]
            setattr(self, moment, tuple(kept))
