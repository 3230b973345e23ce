"""Deficit of `hazard` against LRU in each tenth of a trace, while it learns.

Tokens found by both, hazard's less LRU's in the worst tenth of the requests, and the
blocks that hazard stores for each that LRU stores: of each trace, and of thirds of two
traces by turns: the traffic changes twice.

    python benchmarks/tenths.py [--traces FILE FILE] [--shares PERCENT ...]
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common import add_trace_options, make_parser
from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import Trace, make_trace, read_trace

PARTS = 10


def part_of(trace: Trace, start: int, end: int) -> Trace:
    """Return the requests from `start` to `end`, with the trace's own block numbers."""
    first, last = trace.offsets[[start, end]]
    rows = slice(start, end)
    return dataclasses.replace(
        trace,
        ids=trace.ids[first:last],
        offsets=trace.offsets[start : end + 1] - first,
        time_ms=trace.time_ms[rows] - trace.time_ms[start],
        input_tokens=trace.input_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        stops=trace.stops[rows],
        num_output_blocks=trace.num_output_blocks[rows],
        kinds=trace.kinds[rows],
    )


def by_turns(one: Trace, other: Trace) -> Trace:
    """Join a third of a trace, a third of another one, and the first one's next."""
    third, others = one.num_requests // 3, other.num_requests // 3
    head, middle = part_of(one, 0, third), part_of(other, 0, others)
    tail = part_of(one, third, 2 * third)
    requests, times_ms, start_ms = [], [], 0.0
    for part, first_id in ((head, 0), (middle, one.num_unique_blocks), (tail, 0)):
        for number in range(part.num_requests):
            requests.append((part.blocks_of(number) + first_id).tolist())
        times_ms.append(part.time_ms + start_ms)
        start_ms = times_ms[-1][-1] + 1000.0

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in (head, middle, tail)])

    trace = make_trace(
        f"thirds of {one.name}, {other.name}, {one.name}",
        requests,
        np.concatenate(times_ms),
        joined("input_tokens"),
        one.block_size,
        joined("output_tokens"),
        num_output_blocks=joined("num_output_blocks"),
    )
    return dataclasses.replace(trace, stops=joined("stops"))


def main() -> None:
    parser = make_parser(__doc__)
    add_trace_options(parser)
    args = parser.parse_args()
    traces = list(map(read_trace, args.traces))
    if len(traces) == 2:
        traces += by_turns(*traces), by_turns(*traces[::-1])
    for trace in traces:
        asked = np.array_split(trace.input_tokens, PARTS)
        for share in args.shares:
            capacity = max(round(trace.num_unique_blocks * share / 100), 1)
            found, tenths, stored = [], [], []
            for policy in ("lru", "hazard"):
                result = replay(policy, trace, capacity)
                tokens = trace.tokens_of(result.hits_by_request)
                parts = zip(np.array_split(tokens, PARTS), asked, strict=True)
                tenths.append([100 * hits.sum() / of.sum() for hits, of in parts])
                found.append(100 * result.token_hit_ratio)
                stored.append(result.stores_by_request.sum())
            worst = min(np.subtract(tenths[1], tenths[0]))
            print(
                f"{trace.name} {share:g}%: lru {found[0]:.2f}, hazard {found[1]:.2f}; "
                f"in the worst tenth {worst:+.2f}; stores {stored[1] / stored[0]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
