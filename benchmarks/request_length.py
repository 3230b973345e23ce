"""Cost of a step that fills a block, against the length of the request.

Two requests decode, one ten times as long as the other, each in an engine of its own,
and take turns block by block. It prints the processor time of `build_connector_meta` in
the step that stores the block: medians, and the ratio of the longer request's to the
shorter one's with its quartiles, for

- one group of layers, two, and three with vLLM's keys of 36 bytes;
- vLLM's adapter, of one group with an adapter's keys and of two;
- settings that each have their own code in such a step.

    python benchmarks/request_length.py [--tokens N] [--blocks N] [--json FILE]
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from common import (
    make_parser,
    old_garbage_left_alone,
    quartiles,
    random_keys,
    show_machine,
    spread,
    write_figures,
)
from jaxkv import (
    ConnectorOutput,
    DeviceBlockPool,
    FullAttention,
    OffloadRules,
    OffloadScheduler,
    Retention,
    SchedulerOutput,
    SlidingWindow,
)
from jaxkv.integrations.vllm.scheduler import VllmRequest
from jaxkv.scheduling.record.record import TraceRecorder

BLOCK_SIZE = 16
FULL, WINDOW = FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 1024)
_WARM_BLOCKS = 6
_RATIO = 10

CASES: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups": {"groups": (FULL, WINDOW)},
    "three groups, 36 bytes": {"groups": (FULL, WINDOW, WINDOW), "suffix": bytes(4)},
    "vLLM, an adapter": {"is_vllm": True, "suffix": bytes(32)},
    "vLLM, two groups": {"is_vllm": True, "groups": (FULL, WINDOW)},
    "chunks of 4": {"rules": {"blocks_per_host_block": 4}},
    "a store": {"num_storage_blocks": 4096},
    "a store, two groups": {"num_storage_blocks": 4096, "groups": (FULL, WINDOW)},
    "lazy": {"rules": {"mode": "lazy", "max_num_batched_tokens": 256}},
    "shadows": {"rules": {"shadow": "lru*1;arc*0.5"}},
    "shadows, stored if reused": {
        "rules": {"shadow": "lru*1", "store_threshold": 2},
    },
    "hazard": {"policy": "hazard"},
    "retention": {"rules": {"retention": True}},
    "stored if reused": {"rules": {"store_threshold": 2}},
    "recorded": {"is_recorded": True},
    "a small host": {"num_host_blocks": 512},
    "a small host, shadows": {"num_host_blocks": 512, "rules": {"shadow": "lru*2"}},
}


class LongRequest:
    """An engine with a request that decodes."""

    def __init__(
        self,
        num_tokens: int,
        num_more: int,
        num_host_blocks: int,
        *,
        groups: tuple[Any, ...] = (FULL,),
        suffix: bytes = b"",
        is_vllm: bool = False,
        policy: str = "lru",
        rules: dict[str, Any] | None = None,
        recorder: TraceRecorder | None = None,
        **options: Any,
    ) -> None:
        num = num_tokens // BLOCK_SIZE
        hashes = random_keys(np.random.default_rng(0), num + num_more)
        if is_vllm:
            self._source = SimpleNamespace(block_hashes=hashes[:num])
            self.request: Any = VllmRequest(self._source, len(groups), adapter=suffix)
        else:
            self._source = self.request = SimpleNamespace()
            self._source.block_keys_by_group = [
                [key[:-1] + bytes([group]) + suffix for key in hashes[:num]]
                for group in range(len(groups))
            ]
            self._source.block_keys = self._source.block_keys_by_group[0]
        if rules and "retention" in rules:
            self._source.retention = Retention(priority=80, ttl_s=600)
        self._source.request_id = "r"
        self._source.num_tokens = self._source.num_prompt_tokens = num * BLOCK_SIZE
        self._source.num_computed_tokens = 0
        self._is_vllm, self._suffix = is_vllm, suffix
        self._blocks_per_step = (rules or {}).get("blocks_per_host_block", 1)
        self._hashes, self._num = hashes, num
        size = len(groups) * (num + num_more) + 600
        self.pool = DeviceBlockPool(size)
        self.scheduler = OffloadScheduler(
            groups,
            num_host_blocks,
            policy,
            rules=OffloadRules(store_batch_blocks=0, **rules or {}),
            recorder=recorder,
            **options,
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.scheduler.warm_up()
        self.scheduler.get_num_new_matched_tokens(self.request, 0)
        tables = [self.pool.allocate(num + num_more) for _ in groups]
        self.tables = tables
        table = tables if len(groups) > 1 else tables[0]
        self.scheduler.update_state_after_alloc(self.request, table, 0)
        self.step(num * BLOCK_SIZE)
        self._source.num_computed_tokens = num * BLOCK_SIZE
        self._cache(0, num)
        num_before = -1
        while num_before < self.scheduler.stats.num_stored:  # A small host takes parts.
            num_before = self.scheduler.stats.num_stored
            self.step(1)

    def _keys(self, group: int) -> Any:
        if len(self.tables) > 1 or not self._is_vllm:
            return self.request.block_keys_by_group[group]
        return self.request.block_keys

    def _cache(self, first: int, last: int) -> None:
        for group, table in enumerate(self.tables):
            self.pool.cache(table[first:last], list(self._keys(group)[first:last]))

    def fill_blocks(self) -> None:
        """Compute one more host block, without a call of the scheduler."""
        for _ in range(self._blocks_per_step):
            self._fill_block()

    def _fill_block(self) -> None:
        num = self._num
        key = self._hashes[num]
        if self._is_vllm:
            self._source.block_hashes.append(key)
        else:
            for group, keys in enumerate(self._source.block_keys_by_group):
                keys.append(key[:-1] + bytes([group]) + self._suffix)
        self._source.num_tokens += BLOCK_SIZE
        self._source.num_computed_tokens += BLOCK_SIZE
        self._num += 1
        self._cache(num, num + 1)

    def step(self, num_tokens: int = BLOCK_SIZE) -> float:
        """Schedule a step, whose moves arrive at once; return its processor seconds."""
        output = SchedulerOutput({"r": num_tokens})
        start_s = time.thread_time()
        meta = self.scheduler.build_connector_meta(output)
        spent_s = time.thread_time() - start_s
        if meta.store_event >= 0:
            done = ConnectorOutput(completed_store_events=(meta.store_event,))
            self.scheduler.update_connector_output(done)
        return spent_s


@contextlib.contextmanager
def made(
    case: str, num_tokens: int, num_more: int, num_host_blocks: int
) -> Iterator[LongRequest]:
    """Make the request of a case, if nothing else is said with room on the host."""
    options = {"num_host_blocks": num_host_blocks, **CASES[case]}
    with contextlib.ExitStack() as stack:
        if options.pop("is_recorded", False):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = pathlib.Path(folder, "trace.jsonl")
            options["recorder"] = stack.enter_context(TraceRecorder(path))
        yield LongRequest(num_tokens, num_more, **options)


def measure(case: str, num_tokens: int, num_blocks: int) -> dict[str, Any]:
    """Time the blocks of both requests by turns, in us."""
    num_steps = num_blocks + _WARM_BLOCKS
    num_more = 4 * num_steps
    num_host_blocks = 3 * (num_tokens // BLOCK_SIZE + num_more)
    times_us: tuple[list[float], list[float]] = [], []
    with (
        made(case, num_tokens // _RATIO, num_more, num_host_blocks) as short,
        made(case, num_tokens, num_more, num_host_blocks) as long,
        old_garbage_left_alone(),
    ):
        for number in range(num_steps):
            for request, times in zip((short, long), times_us, strict=True):
                request.fill_blocks()
                spent_s = request.step()
                if number >= _WARM_BLOCKS:
                    times.append(1e6 * spent_s)
    ratios = [b / a for a, b in zip(*times_us, strict=True)]
    return {
        "short_us": quartiles(times_us[0]),
        "long_us": quartiles(times_us[1]),
        "long_over_short": quartiles(ratios),
        "of_medians": statistics.median(times_us[1]) / statistics.median(times_us[0]),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--blocks", type=int, default=200, metavar="N")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE")
    args = parser.parse_args()
    where = show_machine(tokens=args.tokens)
    rows = {}
    print(f"{'':26} {'short':>8} {'long us':>8}  long / short")
    for case in args.cases:
        rows[case] = row = measure(case, args.tokens, args.blocks)
        short_us, long_us = row["short_us"][1], row["long_us"][1]
        print(
            f"{case:26} {short_us:8.1f} {long_us:8.1f}  "
            f"{spread(row['long_over_short'])}, of medians {row['of_medians']:.2f}",
            flush=True,
        )
    write_figures(args.json, {"machine": where, "cases": rows})


if __name__ == "__main__":
    main()
