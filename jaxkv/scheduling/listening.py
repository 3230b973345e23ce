"""Watchers of a scheduler: they are called after the fact and change no decision.

A listener overrides the methods of `Listener` that it needs; the scheduler calls no
others, listener by listener. A method must not raise, wait or call the scheduler,
except that `bound` may refuse the pool by a ValueError.
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
"""bool[n]: which of n blocks may be stored; None for all."""


class Start(NamedTuple):
    """A request that uses its blocks for the first time."""

    request: Request
    keys: Sequence[Keys]  # For each group of layers.
    num_local: int | None  # Tokens found on the device; None if nothing was looked up.
    num_external: int  # Tokens that come from the host.
    has_load: bool
    now_ms: Callable[[], int]  # Reads the clock of policies.


class Offer(NamedTuple):
    """Blocks [first, end) of a request of one group that the host was offered."""

    request_id: str
    keys: Keys
    first: int
    end: int
    placed: Container[BlockKey]  # Those that the host found room for.
    passes: Callable[[int], Passes]  # Returns `Passes` of the blocks [argument, end).
    is_end: bool  # Whether the request is about to lose its device blocks.
    can_store: bool  # Whether the host may store anything at the end.


class End(NamedTuple):
    """A request that has finished."""

    request: Request
    keys: Sequence[Keys]
    stop: Stop | None
    has_begun: bool  # False if it never got blocks; then `keys` is empty.
    has_load: bool
    now_ms: Callable[[], int]  # Reads the clock of policies.


class Listener:
    """The moments that can be watched. Each does nothing unless it is overridden."""

    def bound(self, pool: Any) -> None:
        """Notify of the pool of device blocks."""

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
        """Notify of an offer of lazy stores: u32[n, 8], the next victim first."""

    def stored(self, keys: Keys, ok: bool) -> None:
        """Notify of a store that every worker has reported."""

    def released(self, request_ids: Sequence[str], unloaded: Sequence[Keys]) -> None:
        """Notify of requests whose loads hold no blocks now, and of failed keys."""

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
    """For each moment, the methods that override it: an attribute of its name."""

    _NOT_STATE = MOMENTS

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
