"""Cost of shadows per request, and the error of sampled shadows.

cost: six shadows (lru at 0.5, 1, 2 and 4 times the host's size, arc and hazard at 1)
    see requests of 64 blocks, half of them repeated: processor time of all calls for
    a request, by the blocks of the host.
accuracy: what a sampled shadow says is found of a trace's prefix blocks, beside the
    exact replay by the same rules, in points, with the standard error that it reports;
    by policy, by the tier's share of the trace's blocks, and by the sample's rate.

    python benchmarks/shadows.py [--blocks N ...] [--traces FILE ...] [--bits N ...]
        [--shares PERCENT ...] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from common import (
    add_trace_options,
    make_parser,
    old_garbage_left_alone,
    quartiles,
    random_keys,
    show_machine,
    write_figures,
)
from jaxkv.keys.packed import (
    PackedKeys,
    key_from_int,
    keys_to_words,
    words_to_keys,
)
from jaxkv.scheduling.whatif.shadows import Shadows, parse_shadows
from jaxkv.tools.replay.device import DeviceHits
from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import Trace, read_trace
from jaxkv.types import STOPS, Stop

SIX = "lru*0.5,1,2,4;arc*1;hazard*1"
POLICIES = "lru", "arc", "hazard"
BLOCKS_A_REQUEST = 64
ROUNDS = 400


def serve(
    shadows: Shadows,
    name: str,
    keys: PackedKeys,
    now_ms: int,
    num_tokens: int = 1024,
    num_output: int | None = None,
    stop: Stop | None = None,
) -> None:
    """Show shadows a lone request from its look-up to its end."""
    num = len(keys)
    shadows.look_up(name, keys, 0, num)
    shadows.begin(name, keys, num_tokens, now_ms, has_lookup=True, has_load=False)
    shadows.offer(name, keys, num, frozenset(), None)
    shadows.offer(name, keys, num, frozenset(), None, is_end=True)
    shadows.finish(name, keys, now_ms, num_output, stop)
    shadows.forget(name)


def time_requests(num_blocks: int) -> dict[str, Any]:
    """Time requests, once all shadows are full, in us of this thread."""
    rng = np.random.default_rng(0)
    shadows = Shadows(parse_shadows(SIX), num_blocks, 16)
    # As many as fill the largest; the second half repeats.
    kept: list[PackedKeys] = []
    number, spent_us = 0, []
    num_fill = 5 * num_blocks // BLOCKS_A_REQUEST

    def next_keys() -> PackedKeys:
        if number % 2 and kept:
            return kept[int(rng.integers(len(kept)))]
        keys = random_keys(rng, BLOCKS_A_REQUEST)
        return PackedKeys(keys, keys_to_words(keys))

    with old_garbage_left_alone():
        for number in range(num_fill + ROUNDS):
            keys = next_keys()
            if len(kept) < num_blocks // BLOCKS_A_REQUEST:
                kept.append(keys)
            start_s = time.thread_time()
            serve(shadows, f"{number}", keys, number)
            spent_us.append(1e6 * (time.thread_time() - start_s))
    timed = spent_us[-ROUNDS:]
    rate = 1 if shadows.sample is None else 2**-shadows.sample.bits
    return {"rate": rate, "mean": statistics.mean(timed), "us": quartiles(timed)}


def all_findable(trace: Trace) -> DeviceHits:
    """Make a device that finds no block, so that the host is asked for all."""
    zeros = np.zeros(trace.num_requests, np.int64)
    blocks, num_asked = trace.num_blocks, trace.num_asked
    return DeviceHits(0, zeros, blocks, blocks, num_asked, num_asked)


def estimate(
    trace: Trace, all_words: Any, policy: str, capacity: int, bits: int
) -> tuple[float, float]:
    """Show a shadow a trace; return its hits and its error, in percent."""
    shadows = Shadows(parse_shadows(f"{policy}*1"), capacity, 1, sample_bits=bits)
    for number in range(trace.num_requests):
        ids = trace.ids[trace.offsets[number] : trace.offsets[number + 1]]
        words = all_words[ids]
        keys = PackedKeys(words_to_keys(words), words)
        output = int(trace.output_tokens[number])
        serve(
            shadows,
            f"{number}",
            keys,
            int(trace.time_ms[number]),
            int(trace.input_tokens[number]),
            None if output < 0 else output,
            STOPS[trace.stops[number]],
        )
    (count,) = shadows.counts
    percent = 100 / count.num_asked_tokens
    return count.num_found_tokens * percent, count.error_tokens * percent


def compare(
    trace: Trace, shares: list[float], rates: list[int]
) -> Iterator[dict[str, Any]]:
    """Compare samples with replays, cell by cell."""
    device = all_findable(trace)
    # As an engine's, which are hashes; the replay's own keys are not.
    all_words = keys_to_words(list(map(key_from_int, range(trace.num_unique_blocks))))
    for share in shares:
        capacity = max(round(trace.num_unique_blocks * share / 100), 1)
        for policy in POLICIES:
            exact = replay(policy, trace, capacity, device=device)
            exact_percent = 100 * exact.num_hit_blocks / trace.num_block_refs
            for bits in rates:
                sampled, error = estimate(trace, all_words, policy, capacity, bits)
                yield {
                    "trace": trace.name,
                    "policy": policy,
                    "share": share,
                    "rate": 2**-bits,
                    "exact": exact_percent,
                    "sampled": sampled,
                    "off": sampled - exact_percent,
                    "error": error,
                }


def main() -> None:
    parser = make_parser(__doc__)
    blocks = [2048, 1 << 16, 1 << 20]
    parser.add_argument("--blocks", type=int, nargs="*", default=blocks)
    add_trace_options(parser)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4, 5])
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": show_machine(), "cost": [], "accuracy": []}
    for num_blocks in args.blocks:
        row = {"blocks": num_blocks, **time_requests(num_blocks)}
        figures["cost"].append(row)
        print(
            f"{num_blocks:8,} blocks, 1 key in {1 / row['rate']:3.0f}: "
            f"{row['mean']:6.1f} us a request of {BLOCKS_A_REQUEST} blocks on average, "
            f"quartiles {' '.join(f'{us:.1f}' for us in row['us'])}",
            flush=True,
        )
    for path in args.traces:
        for row in compare(read_trace(path), args.shares, args.bits):
            figures["accuracy"].append(row)
            print(
                f"{row['trace']:22} {row['policy']:10} {row['share']:4g} %  1 in "
                f"{1 / row['rate']:2.0f}: {row['sampled']:5.2f} % for "
                f"{row['exact']:5.2f}, off {row['off']:+5.2f}, "
                f"error {row['error']:4.2f}",
                flush=True,
            )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
