"""Does moving N blocks cost the same whatever the size of the pool they lie in?

Times a store and a load of N blocks with a pool of P blocks and with one of 16 P, with
and without the compiler options of `jaxkv.transfer.memory`. All cases are timed in
turn in every round of one process, so that a busy machine slows down all alike. A ratio
near 1 means that the cost does not grow with the pool; one near 16 or beyond (a large
pool leaves the caches, too), that it is all pool.

    python benchmarks/store_cost_vs_pool_size.py [--rounds R] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from common import make_parser, quartiles, show_machine, spread, write_figures
from jaxkv.transfer import TransferEngine, memory

NUM_LEAVES = 4
BLOCK_SHAPE = (16, 8, 64)
DTYPES = ("bfloat16", "float8_e5m2")
NUM_MOVED = 16
SMALL_POOL_BLOCKS = 64
FACTOR = 16


@dataclasses.dataclass
class Case:
    """A pool, its engine and what was timed on them.

    Attributes:
        dtype: The dtype of the pool's leaves.
        options: Whether the transfer programs had their compiler options.
        num_blocks: The size of the pool.
        seconds: Wall times by direction, one per round.
    """

    dtype: str
    options: bool
    num_blocks: int
    seconds: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"store": [], "load": []}
    )

    def __post_init__(self) -> None:
        """Make the pool, compile everything and make the host blocks readable."""
        shape = (self.num_blocks, *BLOCK_SHAPE)
        self.pool = [jnp.ones(shape, self.dtype) for _ in range(NUM_LEAVES)]
        rng = np.random.default_rng(0)
        self.device_ids = rng.permutation(self.num_blocks)[:NUM_MOVED]
        self.host_ids = np.arange(NUM_MOVED)
        given = memory.compiler_options if self.options else lambda platform: None
        with mock.patch.object(memory, "compiler_options", given):
            self.engine = TransferEngine(self.pool, NUM_MOVED)
            self.engine.warm_up()
        self._move()

    def run_round(self) -> None:
        """Time one store and one load of the same blocks, up to their completion."""
        self._move()  # Untimed: the case before has left its traces in the caches.
        for direction, seconds in zip(self.seconds, self._move(), strict=True):
            self.seconds[direction].append(seconds)

    def _move(self) -> tuple[float, float]:
        jax.block_until_ready(self.pool)
        start_s = time.perf_counter()
        self.engine.save(self.pool, self.device_ids, self.host_ids)
        self._drain()
        middle_s = time.perf_counter()
        self.pool, _ = self.engine.load(self.pool, self.host_ids, self.device_ids)
        self._drain()
        end_s = time.perf_counter()
        return middle_s - start_s, end_s - middle_s

    def _drain(self) -> None:
        self.pool, completions = self.engine.drain(self.pool)
        for done in completions:
            if done.error is not None:
                raise done.error


def measure(num_rounds: int) -> list[dict[str, object]]:
    """Time all cases in turn and compare the two pool sizes of each."""
    kinds = [(dtype, options) for dtype in DTYPES for options in (True, False)]
    sizes = (SMALL_POOL_BLOCKS, SMALL_POOL_BLOCKS * FACTOR)
    cases = {kind: [Case(*kind, size) for size in sizes] for kind in kinds}
    for _ in range(num_rounds):
        for pair in cases.values():
            for case in pair:
                case.run_round()
    rows: list[dict[str, object]] = []
    for (dtype, options), (small, large) in cases.items():
        for direction in ("store", "load"):
            times_s = [case.seconds[direction] for case in (small, large)]
            ratios = [b / a for a, b in zip(*times_s, strict=True)]
            rows.append(
                {
                    "dtype": dtype,
                    "compiler_options": options,
                    "direction": direction,
                    "small_pool_s": quartiles(times_s[0]),
                    "large_pool_s": quartiles(times_s[1]),
                    "large_over_small": quartiles(ratios),
                }
            )
    return rows


def main() -> None:
    """Measure, print a table and write the figures if asked to."""
    parser = make_parser(__doc__, rounds=25)
    args = parser.parse_args()
    rows = measure(args.rounds)
    where = show_machine()
    print(
        f"{NUM_MOVED} blocks moved; pools of {SMALL_POOL_BLOCKS} and "
        f"{SMALL_POOL_BLOCKS * FACTOR} blocks; median [quartiles] of {args.rounds} "
        "rounds, ms"
    )
    for row in rows:
        small, large = (
            spread([1e3 * value for value in row[key]], 8, 3)
            for key in ("small_pool_s", "large_pool_s")
        )
        ratio = spread(row["large_over_small"], 6)
        options = "with options" if row["compiler_options"] else "without"
        print(
            f"{row['dtype']:12} {options:12} {row['direction']:5} "
            f"{small:26} {large:28} ratio {ratio}"
        )
    settings = {
        "num_moved": NUM_MOVED,
        "num_leaves": NUM_LEAVES,
        "block_shape": BLOCK_SHAPE,
        "pool_blocks": [SMALL_POOL_BLOCKS, SMALL_POOL_BLOCKS * FACTOR],
        "rounds": args.rounds,
    }
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
