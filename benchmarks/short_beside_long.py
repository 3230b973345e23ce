"""How long does a short load wait beside a long one that leaves in the same step?

One request loads 4 blocks of 64 KiB, another 1,024. "together" reports both when both
are there, as one ticket for a step does; "by request" reports each when its own blocks
are there. Timed are the short load and the long one, from the start of their step to
the report, in steps that do nothing else; both ways by turns in every round.

Then 16 requests load 64 blocks each, of which each extent has some of four requests:
what they share of an extent moves once, so that both ways take the same time.

    python benchmarks/short_beside_long.py [--rounds R] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import make_parser, show_machine, write_figures
from jaxkv.scheduling.protocol import NO_EVENT, OffloadMetadata
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.kernels import Mode

BLOCK_SHAPE = (16, 8, 128)  # Of float32: 64 KiB.
NUM_HOST_BLOCKS = 1028
LONG, SHORT = 1024, 4
NUM_SHARING, SHARING = 16, 64
WAYS = ("together", "by request")


class Case:
    """A worker with a host tier full of blocks.

    Args:
        mode: The mode of its engine.
    """

    def __init__(self, mode: Mode) -> None:
        self.pool = [jnp.zeros((2 * NUM_HOST_BLOCKS, *BLOCK_SHAPE))]
        engine = TransferEngine(
            self.pool, NUM_HOST_BLOCKS, mode=mode, staging_bytes=16 << 20
        )
        engine.warm_up()
        self.worker = OffloadWorker(engine)
        meta = _plan(store=range(NUM_HOST_BLOCKS))
        self.pool = self.worker.start(meta, self.pool)
        self.pool, _ = self.worker.drain(self.pool)

    def time(self, loads: Sequence[np.ndarray], way: str) -> list[float]:
        """Load; give the ms until each request is reported, in their order."""
        meta = _plan(loads=loads, way=way)
        jax.block_until_ready(self.pool)
        start_s = time.perf_counter()
        self.pool = self.worker.start(meta, self.pool)
        took_ms: dict[str, float] = {}
        while len(took_ms) < len(loads):
            self.pool = self.worker.start(_plan(), self.pool)
            for name in self.worker.poll().finished_recving:
                took_ms[name] = 1e3 * (time.perf_counter() - start_s)
        return [took_ms[str(number)] for number in range(len(loads))]


def _plan(
    store: Sequence[int] = (), loads: Sequence[np.ndarray] = (), way: str = WAYS[0]
) -> OffloadMetadata:
    hosts = [int(host) for load in loads for host in load]
    return OffloadMetadata(
        load_event=0 if loads else NO_EVENT,
        load_device_blocks=tuple(range(NUM_HOST_BLOCKS, NUM_HOST_BLOCKS + len(hosts))),
        load_host_blocks=tuple(hosts),
        load_event_to_reqs={0: tuple(map(str, range(len(loads))))} if loads else {},
        store_event=0 if store else NO_EVENT,
        store_device_blocks=tuple(store),
        store_host_blocks=tuple(store),
        need_flush=False,
        load_sizes=tuple(map(len, loads)) if way == "by request" else (),
    )


def measure(mode: Mode, rounds: int) -> dict[str, Any]:
    """Time both ways by turns; give medians in ms."""
    case = Case(mode)
    beside = [np.arange(LONG), np.arange(LONG, LONG + SHORT)]
    # The blocks of four requests alternate.
    sharing = [
        256 * (number // 4) + number % 4 + 4 * np.arange(SHARING)
        for number in range(NUM_SHARING)
    ]
    took: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in WAYS} for what in ("short", "long", "sharing")
    }
    for number in range(rounds + 2):
        for way in WAYS:
            long_ms, short_ms = case.time(beside, way)
            all_ms = max(case.time(sharing, way))
            if number >= 2:
                for what, ms in zip(took, (short_ms, long_ms, all_ms), strict=True):
                    took[what][way].append(ms)
    return {
        what: {way: statistics.median(times_ms) for way, times_ms in ways.items()}
        for what, ways in took.items()
    }


def main() -> None:
    """Measure, print the figures and write them if asked to."""
    parser = make_parser(__doc__, rounds=15)
    args = parser.parse_args()
    where = show_machine()
    modes: tuple[Mode, ...] = ("fused", "staged")
    results = {mode: measure(mode, args.rounds) for mode in modes}
    for mode, rows in results.items():
        for what, ways in rows.items():
            print(
                f"{mode:7} {what:8} "
                + ", ".join(f"{way} {ms:7.2f} ms" for way, ms in ways.items())
            )
    write_figures(args.json, {"machine": where, "rounds": args.rounds, "ms": results})


if __name__ == "__main__":
    main()
