"""Hits gained by not storing the tails of prompts that were never requested again.

Replays traces with every policy and several `max_unseen_blocks`; without any, made-up
ones: users with conversations that grow, and between them prompts that come once, as
long as a tenth or a fifth of the cache.

    python benchmarks/admission.py [TRACE.jsonl ...] [--capacity 3%] [--unseen 8 32]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from jaxkv import policy_names
from jaxkv.tools.replay.admission import Admission, find_admitted
from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import Trace, make_trace, read_trace

BLOCK_SIZE = 16
NUM_USERS = 40
NUM_TURNS = 25
SYSTEM_BLOCKS = 8
TURN_BLOCKS = 4
SCAN_BLOCKS = 400
GAP_MS = 500


def make_scans(share: float, seed: int = 0) -> Trace:
    """Make conversations, and scans for a share of all requests."""
    rng = np.random.default_rng(seed)
    ids = iter(range(1 << 30))
    system = [next(ids) for _ in range(SYSTEM_BLOCKS)]
    histories = [list(system) for _ in range(NUM_USERS)]

    def requests() -> Iterator[list[int]]:
        left = NUM_USERS * NUM_TURNS
        while left:
            if rng.random() < share:
                yield system + [next(ids) for _ in range(SCAN_BLOCKS)]
                continue
            history = histories[rng.integers(NUM_USERS)]
            history += [next(ids) for _ in range(TURN_BLOCKS)]
            left -= 1
            yield list(history)

    made = list(requests())
    times_ms = GAP_MS * np.arange(len(made))
    return make_trace(f"scans are {share:.0%} of the requests", made, times_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--capacity", type=float, nargs="+", default=[1, 3, 10])
    parser.add_argument("--unseen", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--policies", nargs="+", default=policy_names())
    args = parser.parse_args()
    loads: list[tuple[Trace, list[int]]] = []
    for path in args.traces:
        trace = read_trace(path)
        total = len(np.unique(trace.ids))
        loads.append((trace, [int(total * part / 100) for part in args.capacity]))
    if not loads:
        loads = [(make_scans(share), [2_000, 4_000]) for share in (0.0, 0.1, 0.3)]
    limits = [None, *args.unseen]
    print("blocks found as part of a prefix, %; columns: max_unseen_blocks")
    for trace, capacities in loads:
        print(f"\n{trace.name}: {trace.num_requests} requests")
        print(" " * 22 + "".join(f"{limit or 'all':>8}" for limit in limits))
        admitted = [
            None
            if limit is None
            else find_admitted(trace, Admission(max_unseen_blocks=limit))
            for limit in limits
        ]
        for capacity in capacities:
            for policy in args.policies:
                ratios = [
                    replay(policy, trace, capacity, admitted=admission).block_hit_ratio
                    for admission in admitted
                ]
                shown = "".join(f"{100 * ratio:8.2f}" for ratio in ratios)
                print(f"{capacity:>9,} {policy:<12}{shown}", flush=True)


if __name__ == "__main__":
    main()
