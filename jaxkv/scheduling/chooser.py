"""The interface of eager and lazy stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys
from jaxkv.scheduling.protocol import Request
from jaxkv.tiers.pools import DevicePool


class Chooser:
    """Chooses which device blocks are offered to the host, and when.

    The scheduler calls all methods; each does nothing unless it is overridden.
    """

    @property
    def is_paused(self) -> bool | None:
        """Whether stores are paused; None if they never are."""
        return None

    def bind(self, pool: DevicePool) -> None:
        """Serve the requests of a pool."""

    def begun(
        self,
        pool: DevicePool,
        request: Request,
        keys: Sequence[PackedKeys],
        tables: list[NDArray[np.int64]],
        num_local: int | None,
        num_external: int,
        limits: tuple[int, int],
    ) -> None:
        """Track a request; if it already runs, replace its block tables.

        The device had `num_local` tokens of its prefix, and `num_external` are loaded.
        `num_local` is None if it runs: it made no lookup. `tables` are kept, not
        copied. `limits` are from `Requests.check_stores`.
        """

    def replace_tables(
        self,
        pool: DevicePool,
        request: Request,
        tables: list[NDArray[np.int64]],
        limits: tuple[int, int],
        *,
        is_end: bool = False,
    ) -> bool:
        """Replace the block tables of a known request; return whether it is known.

        With `is_end`, the request overwrites none of its blocks any more.
        """
        return False

    def find_ready(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], *, is_due: bool
    ) -> Sequence[Any]:
        """Find the requests to look at in the step that begins; nothing changes."""
        return ()

    def record_step(
        self,
        pool: DevicePool,
        scheduled: Mapping[str, int],
        new_tables: Mapping[str, list[NDArray[np.int64]]],
        preempted: Iterable[str],
    ) -> None:
        """Record which requests a step computes, their new blocks, and preemptions."""

    def offer_step(
        self, pool: DevicePool, ready: Sequence[Any], *, is_due: bool
    ) -> None:
        """Look at ready requests once loads are issued; offer blocks if it `is_due`."""

    def finish(
        self, pool: DevicePool, request: Request, limits: tuple[int, int]
    ) -> None:
        """Offer all blocks of a request that is about to lose them."""

    def recompute(self, request_id: str) -> None:
        """Expect a request to recompute the blocks whose load has failed."""

    def clear(self, pool: DevicePool) -> None:
        """Record that the host has no block of the pool any more."""
