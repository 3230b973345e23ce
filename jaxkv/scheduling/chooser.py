"""The contract of eager and lazy stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxkv.keys.packed import PackedKeys
from jaxkv.scheduling.protocol import Request
from jaxkv.tiers.pools import DevicePool


class Chooser:
    """Chooses which device blocks are offered to the host, and when.

    The scheduler calls every method; each does nothing unless it is overridden.
    """

    @property
    def is_paused(self) -> bool | None:
        """Whether stores are paused; None if they never are."""
        return None

    def begun(
        self,
        request: Request,
        keys: Sequence[PackedKeys],
        tables: list[list[int]],
        num_local: int | None,
        num_external: int,
        limits: tuple[int, int],
    ) -> None:
        """Follow a request, or its new block tables if it is known.

        `num_local` tokens were found on the device, None if nothing was looked up, as
        the request runs already; `num_external` come from the host. The tables are
        kept. `limits` are from `Requests.check_stores`.
        """

    def replace_tables(
        self, request: Request, tables: list[list[int]], limits: tuple[int, int]
    ) -> bool:
        """Keep the block tables of a request, if it is known; return whether it is."""
        return False

    def find_ready(
        self, scheduled: Mapping[str, int], preempted: Sequence[str]
    ) -> Sequence[Any]:
        """Find the requests that have blocks to offer; nothing changes.

        Raises:
            TypeError: An attribute of a ready request has another type.
            ValueError: It is negative.
        """
        return ()

    def note_step(
        self,
        scheduled: Mapping[str, int],
        new_tables: Mapping[str, list[list[int]]],
        preempted: Iterable[str],
    ) -> None:
        """Record which requests a step computes, and which blocks they got and lost."""

    def offer_step(self, pool: DevicePool, ready: Sequence[Any]) -> None:
        """Offer the blocks of a step, once its loads have left, and what is `ready`."""

    def finish(
        self, pool: DevicePool, request: Request, limits: tuple[int, int]
    ) -> None:
        """Offer all blocks of a request that is about to lose them."""

    def recompute(self, request_id: str) -> None:
        """Expect a request to compute the blocks whose load has failed."""

    def clear(self, pool: DevicePool) -> None:
        """Forget which blocks of a pool the host has: it has none."""
