"""How many extents carry blocks over when they are written?

In the mode ``"staged"`` a program that carries blocks over waits for the old extent to
cross the bus, and holds the accelerator's core meanwhile. So what counts is how many of
the extents that a full tier writes are such. Requests are stored in the order in which
they come, four extents at a time, and evicted by LRU.

    python benchmarks/merges.py [--json FILE]
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from common import make_parser, random_keys, show_machine, write_figures
from jaxkv import OffloadingManager
from jaxkv.transfer import TransferEngine, kernels

NUM_BLOCKS = 8192
NUM_REQUESTS = 1400
SETTLED = 600
"""Requests that fill the tier and are not counted."""

LENGTHS = "60", "1 to 200"
MOVED_BLOCKS = 512


class Counting:
    """Counts the extents that are written, by whether they carry blocks over."""

    def __init__(self) -> None:
        self.num = {False: 0, True: 0}
        self._save = kernels.Copier.save
        counted = self._counted
        kernels.Copier.save = lambda *args: counted(*args)  # type: ignore[method-assign]

    def _counted(
        self, copier: kernels.Copier, leaves: Any, plans: Any, carry: Any, spare: Any
    ) -> Any:
        self.num[carry is not None] += len(plans)
        return self._save(copier, leaves, plans, carry, spare)


def count(counting: Counting, rows: int, length: str, share: float) -> dict[str, float]:
    """Store requests; tell how many extents were written, and carry blocks over.

    Args:
        counting: What counts them.
        rows: Blocks of an extent.
        length: How many blocks a request has, of `LENGTHS`.
        share: How many of the requests go on with one of the last sixty.
    """
    rng = np.random.default_rng(0)
    pool = [jnp.zeros((MOVED_BLOCKS, 8, 2), jnp.bfloat16)]
    engine = TransferEngine(pool, NUM_BLOCKS, mode="staged", extent_bytes=32 * rows)
    host = OffloadingManager(16, NUM_BLOCKS, "lru")
    last: list[list[bytes]] = []
    stored: list[list[bytes]] = []
    waiting: list[int] = []
    for number in range(NUM_REQUESTS):
        num_new, head = 60, []
        if length != LENGTHS[0]:
            num_new = int(np.clip(rng.lognormal(3.2, 1), 1, 200))
        if last and rng.random() < share:
            head = last[rng.integers(len(last))]
            host.touch(head)
            num_new = max(1, num_new // 4)
        keys = head + random_keys(rng, num_new)
        last = [*last[-59:], keys]
        placed = host.prepare_store(keys)
        assert placed is not None
        waiting += placed.store_spec.block_ids.tolist()
        stored.append(keys)
        if len(waiting) >= 4 * rows:
            for start in range(0, len(waiting), MOVED_BLOCKS):
                ids = waiting[start : start + MOVED_BLOCKS]
                engine.save(pool, list(range(len(ids))), ids)
            pool, _ = engine.drain(pool)
            for own in stored:
                host.complete_store(own)
            waiting, stored = [], []
        if number == SETTLED:
            counting.num = {False: 0, True: 0}
    total = sum(counting.num.values())
    return {"extents": total, "share_carrying": counting.num[True] / total}


def main() -> None:
    """Count, print the figures and write them if asked to."""
    parser = make_parser(__doc__)
    args = parser.parse_args()
    rows, counting = [], Counting()
    for case in itertools.product((4, 64), LENGTHS, (0.0, 0.5)):
        row: dict[str, Any] = dict(zip(("rows", "length", "share"), case, strict=True))
        row |= count(counting, *case)
        rows.append(row)
        print(
            f"extents of {case[0]:2} blocks, requests of {case[1]} blocks, of which "
            f"{case[2]:.0%} go on with another: {row['share_carrying']:.0%} of "
            f"{row['extents']} extents carry blocks over",
            flush=True,
        )
    if args.json:
        write_figures(args.json, {"machine": show_machine(), "rows": rows})


if __name__ == "__main__":
    main()
