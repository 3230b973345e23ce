"""Hits of `cache_policy="auto"`, and the time of a change-over.

found: tokens of prompts that are found as part of a prefix, in percent, for each policy
    that `auto` chooses from and for `auto`: on each trace, and on the traces one after
    another; by the host's share of the trace's blocks. Beside it, how far `auto` falls
    behind the best of them, and behind LRU in the worst tenth of the requests.
restart: tokens that `hazard` finds in the second half of each trace if its host is
    emptied half way: while it remembers all else; with the content of a `policy_state`
    file; with nothing.
change: processor time of this thread for a change-over of a full host, with a
    shadow's state, by the blocks of the host and the policies.

    python benchmarks/auto.py [--traces FILE ...] [--shares PERCENT ...]
        [--blocks N ...] [--device-blocks N] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import (
    add_trace_options,
    make_parser,
    quartiles,
    random_keys,
    show_machine,
    write_figures,
)
from jaxkv.keys.packed import PackedKeys, keys_to_words
from jaxkv.policies import get_policy_maker, make_hazard
from jaxkv.policies.facts import BEGIN, FINISH, begun, finished
from jaxkv.policies.registry import AUTO
from jaxkv.scheduling.whatif.auto import CANDIDATES, with_candidates
from jaxkv.scheduling.whatif.shadows import Shadows
from jaxkv.tiers.change_over import change_over, resume
from jaxkv.tiers.executors import make_executor
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.run import ReplayResult, replay
from jaxkv.tools.replay.traces import Trace, keys_of, read_trace
from shadows import BLOCKS_A_REQUEST, serve

PARTS = 10
ROUNDS = 15


def one_after_another(traces: Sequence[Trace]) -> Trace:
    """Join traces whose blocks have nothing in common."""
    first, *rest = traces
    for following in rest:
        start_ms = first.time_ms[-1] + 1000.0
        first = dataclasses.replace(
            first,
            name=f"{first.name}, then {following.name}",
            ids=np.concatenate([first.ids, following.ids + first.num_unique_blocks]),
            offsets=np.concatenate(
                [first.offsets, following.offsets[1:] + first.offsets[-1]]
            ),
            time_ms=np.concatenate([first.time_ms, following.time_ms + start_ms]),
            input_tokens=np.concatenate([first.input_tokens, following.input_tokens]),
            num_unique_blocks=first.num_unique_blocks + following.num_unique_blocks,
            output_tokens=np.concatenate(
                [first.output_tokens, following.output_tokens]
            ),
            stops=np.concatenate([first.stops, following.stops]),
            num_output_blocks=np.concatenate(
                [first.num_output_blocks, following.num_output_blocks]
            ),
        )
    return first


def percent_by_part(trace: Trace, result: ReplayResult) -> list[float]:
    """Return the share of tokens found in each tenth of the requests, in percent."""
    tokens = trace.tokens_of(result.hits_by_request)
    tokens_found = np.array_split(tokens, PARTS)
    tokens_asked = np.array_split(trace.input_tokens, PARTS)
    rows = zip(tokens_found, tokens_asked, strict=True)
    return [100 * float(hits.sum() / of.sum()) for hits, of in rows]


def compare(
    trace: Trace, shares: list[float], device_blocks: int
) -> Iterator[dict[str, Any]]:
    """Replay a trace with each policy and with `auto`, for each size."""
    device = find_on_device(trace, device_blocks) if device_blocks else None
    for share in shares:
        capacity = max(round(trace.num_unique_blocks * share / 100), 1)
        percent, tenths = {}, {}
        for policy in (*CANDIDATES, AUTO):
            result = replay(policy, trace, capacity, device=device)
            percent[policy] = 100 * result.token_hit_ratio
            tenths[policy] = percent_by_part(trace, result)
        best = max(percent[policy] for policy in CANDIDATES)
        rows = zip(tenths[AUTO], tenths["lru"], strict=True)
        yield {
            "trace": trace.name,
            "share": share,
            "blocks": capacity,
            "device_blocks": device_blocks,
            "found": percent,
            "off_best": percent[AUTO] - best,
            "worst_tenth_off_lru": min(ours - lru for ours, lru in rows),
            "parts": tenths,
        }


def restart(trace: Trace, capacity: int, kept: str) -> NDArray[np.int64]:
    """Replay a trace, and empty the host half way; count the blocks found, i64[R]."""
    policy = make_hazard(capacity, max(int(trace.num_blocks.max()), 2))
    host = make_executor(policy)
    num_hits = np.zeros(trace.num_requests, np.int64)
    for request in range(trace.num_requests):
        if request == trace.num_requests // 2:
            old, host = host.state.policy, make_executor(policy)
            if kept == "the file":
                host = resume(host, policy, "native", old.reuse)
            elif kept == "all else":
                names = "ghosts", "reuse", "now_ms", "has_time", "num_begun", "current"
                fields = {name: getattr(old, name) for name in names}
                new_policy = dataclasses.replace(host.state.policy, **fields)
                state = dataclasses.replace(host.state, policy=new_policy)
                host = make_executor(policy, state=state)
        first = trace.offsets[request]
        keys = keys_of(trace.ids[first : trace.offsets[request + 1]][:capacity])
        positions = np.arange(len(keys), dtype=np.int32)
        if not len(keys):
            continue
        time_ms = int(trace.time_ms[request])
        about = begun(time_ms, int(trace.input_tokens[request]))
        mark = host.note(keys, BEGIN, positions, about)
        step = host.request_step(keys)
        host.touch(keys, True)
        host.complete_step(step.block_ids, step.num_hits)
        output, stop = int(trace.output_tokens[request]), int(trace.stops[request])
        about = finished(time_ms, output, stop, mark)
        host.note(keys, FINISH, positions, about)
        num_hits[request] = step.num_hits
    return num_hits


def compare_restarts(trace: Trace, shares: list[float]) -> Iterator[dict[str, Any]]:
    """Compare what is found after a restart, in all and in the first tenth."""
    half = trace.num_requests // 2
    tokens_asked = trace.input_tokens[half:]
    for share in shares:
        capacity = max(round(trace.num_unique_blocks * share / 100), 1)
        percent, first = {}, {}
        for kept in ("all else", "the file", "nothing"):
            num_hits = restart(trace, capacity, kept)[half:]
            tokens = np.minimum(num_hits * trace.block_size, tokens_asked)
            end = len(tokens) // PARTS
            percent[kept] = 100 * float(tokens.sum() / tokens_asked.sum())
            first[kept] = 100 * float(tokens[:end].sum() / tokens_asked[:end].sum())
        yield {
            "trace": trace.name,
            "share": share,
            "found": percent,
            "found_in_first_tenth": first,
        }


def time_change_overs(num_blocks: int) -> Iterator[dict[str, Any]]:
    """Time the change-over of a full host, for each pair of policies."""
    rng = np.random.default_rng(0)
    shadows = Shadows(with_candidates(()), num_blocks, 16)
    policies = {
        name: get_policy_maker(name)(num_blocks, max(4096, 2 * num_blocks))
        for name in CANDIDATES
    }
    hosts = {name: make_executor(policy) for name, policy in policies.items()}
    for number in range(num_blocks // BLOCKS_A_REQUEST + 1):
        keys = random_keys(rng, BLOCKS_A_REQUEST)
        packed = PackedKeys(keys, keys_to_words(keys))
        serve(shadows, f"{number}", packed, 1000 * number)
        for host in hosts.values():
            step = host.request_step(packed.words)
            host.complete_step(step.block_ids, step.num_hits)
    for old, new in itertools.permutations(CANDIDATES, 2):
        spent_ms = []
        for _ in range(ROUNDS):
            start_s = time.thread_time()
            learned, scale = shadows.learned_by(new)
            change_over(
                hosts[old], policies[old], policies[new], learned=learned, scale=scale
            )
            spent_ms.append(1e3 * (time.thread_time() - start_s))
        yield {
            "blocks": num_blocks,
            "from": old,
            "to": new,
            "ms": quartiles(spent_ms),
            "most_ms": max(spent_ms[1:]),
        }


def main() -> None:
    parser = make_parser(__doc__)
    add_trace_options(parser)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1 << 16, 1 << 20])
    parser.add_argument("--device-blocks", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": show_machine()}
    figures |= {"change": [], "restart": [], "found": []}
    for num_blocks in args.blocks:
        for row in time_change_overs(num_blocks):
            figures["change"].append(row)
            print(
                f"{num_blocks:9,} blocks, {row['from']:6} to {row['to']:6}: quartiles "
                f"{' '.join(f'{ms:.1f}' for ms in row['ms'])} ms, at most "
                f"{row['most_ms']:.1f}",
                flush=True,
            )
    traces = list(map(read_trace, args.traces))
    for trace in traces:
        for row in compare_restarts(trace, args.shares):
            figures["restart"].append(row)
            first = row["found_in_first_tenth"]
            text = ", ".join(
                f"{percent:.2f} ({first[kept]:.2f} in the first tenth) with {kept}"
                for kept, percent in row["found"].items()
            )
            print(f"{row['trace']:22} {row['share']:4g} %: {text}", flush=True)
    if len(traces) > 1:
        traces.append(one_after_another(traces))
    for trace in traces:
        for row in compare(trace, args.shares, args.device_blocks):
            figures["found"].append(row)
            text = "  ".join(
                f"{name} {percent:.2f}" for name, percent in row["found"].items()
            )
            print(
                f"{row['trace']:22} {row['share']:4g} %: {text}; auto is "
                f"{row['off_best']:+.2f} from the best, and in the worst tenth "
                f"{row['worst_tenth_off_lru']:+.2f} from lru",
                flush=True,
            )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
