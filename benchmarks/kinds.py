"""Hits of `hazard` when requests name their kind, by how often the kind is right.

A kind is right if it is 1 for a request whose last block is asked for again, and 0 for
others; of kinds by chance, a request has any of them.

    python benchmarks/kinds.py TRACE.jsonl ... [--capacity 1% 3% 10%]
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import Trace, read_trace

RIGHT = (1.0, 0.9, 0.75, 0.6, 0.5)
BY_CHANCE = (4, 16, 100)


def is_used_again(trace: Trace) -> NDArray[np.bool_]:
    """Whether a later request asks for each request's last block: bool[R]."""
    later, used = set[int](), np.zeros(trace.num_requests, np.bool_)
    for request in reversed(range(trace.num_requests)):
        blocks = trace.blocks_of(request).tolist()
        used[request] = bool(blocks) and blocks[-1] in later
        later.update(blocks)
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--capacity", nargs="*", default=["1%", "3%", "10%"])
    args = parser.parse_args()
    for path in args.traces:
        trace = read_trace(path)
        used, size = is_used_again(trace), trace.num_requests
        kinds = {"without": np.full(size, -1)}
        for share in RIGHT:
            is_right = np.random.default_rng(0).random(size) < share
            kinds[f"{share:.0%} right"] = np.where(is_right, used, ~used)
        for num in BY_CHANCE:
            kinds[f"{num} by chance"] = np.random.default_rng(1).integers(0, num, size)
        for capacity in args.capacity:
            percent = float(capacity.removesuffix("%"))
            num_blocks = max(int(trace.num_unique_blocks * percent / 100), 1)
            for name, numbers in kinds.items():
                named = dataclasses.replace(trace, kinds=numbers.astype(np.int16))
                found = replay("hazard", named, num_blocks).token_hit_ratio
                print(f"{trace.name} {capacity}, {name}: {found:.2%}", flush=True)


if __name__ == "__main__":
    main()
