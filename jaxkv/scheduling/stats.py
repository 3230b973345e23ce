"""What came of stores and loads, in numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OffloadStats:
    """What came of stores and loads so far.

    Attributes:
        num_store_refusals: Times that the host had no room for all that was offered.
        num_dropped_full: Blocks that did not get to the host, as it had no room until
            their request was over.
        num_dropped_slow: Likewise, as too much was on its way already.
        num_dropped_failed: Blocks whose transfer to the host failed.
        num_loads_declined: Loads that would have taken longer than to compute.
    """

    num_store_refusals: int
    num_dropped_full: int
    num_dropped_slow: int
    num_dropped_failed: int
    num_loads_declined: int
