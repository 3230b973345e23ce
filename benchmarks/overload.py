"""Step time and memory under sustained overload.

Many requests wait at any time for a device pool that holds a few of them, over a host
tier that is full: whatever is stored evicts something. Each time a request is over,
another one is submitted, until the time is up; then all that wait are served. Prompts
are of documents whose KV is several times what the host holds, so that some of their
beginning is there.

The model writes a number from its key into each block that it computes, and compares
all blocks of a request, loaded or found, at its end.

For each of the windows of the run: the time of a step, by the clock and as processor
time of the engine's thread, which other programs on the machine do not lengthen;
resident memory; JAX's live arrays; memory maps of the process. What was made before
the first window is left alone by the garbage collector, as in a server.

    python benchmarks/overload.py [--minutes M] [--requests N] [--json FILE]
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import make_parser, show_machine, write_figures
from jaxkv import (
    DeviceBlockPool,
    KeyChain,
    Namespace,
    OffloadConfig,
    SchedulerOutput,
    find_cached_prefix,
)

BLOCK, WIDTH = 16, 64  # tokens in a block; numbers in one, 4 bytes each
DEVICE_BLOCKS, HOST_BLOCKS = 2048, 8192
DOCUMENTS, DOCUMENT_BLOCKS = 1000, 32
RUNNING, CHUNK_BLOCKS, NEW_TOKENS = 48, 8, 4
ROWS = 512  # blocks that a call of the model writes or compares
WINDOWS = 20
_FLAT = (
    *("step_p50_ms", "step_p99_ms", "step_cpu_p50_ms", "step_cpu_p99_ms"),
    *("rss_bytes", "live_arrays", "maps"),
)


class Request:
    """A prompt on a document, with the attributes that the scheduler reads."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id = name
        self.num_prompt_tokens = len(tokens)
        self.num_tokens = len(tokens)
        self.num_computed_tokens = self.num_loading = self.num_cached = 0
        self.chain = KeyChain(Namespace("overload", "v1", "int32", "flat", BLOCK))
        self.chain.extend(tokens)
        self.table: list[int] = []
        self.submitted_s = time.monotonic()

    @property
    def block_keys(self) -> Any:
        """Keys of the full blocks."""
        return self.chain.keys

    def append(self, token: int) -> None:
        self.num_tokens += 1
        self.chain.extend([token])


@jax.jit
def _compare(pool: Any, blocks: Any, numbers: Any) -> Any:
    return jnp.sum(jnp.any(pool[blocks] != numbers[:, None], 1) & (blocks > 0))


def _write(pool: Any, blocks: Any, numbers: Any) -> Any:
    return pool.at[blocks].set(numbers[:, None], mode="drop")


_write = jax.jit(_write, donate_argnums=0)


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:4], "little", signed=True)


class Engine:
    """Serves requests first come, first served."""

    def __init__(self) -> None:
        self.pool = jnp.zeros((DEVICE_BLOCKS, WIDTH), jnp.int32)
        config = OffloadConfig(num_host_blocks=HOST_BLOCKS)
        self.engine, self.scheduler, self.worker = config.connect(
            self.pool, groups=BLOCK
        )
        self.blocks = DeviceBlockPool(DEVICE_BLOCKS)
        self.scheduler.bind_device_block_pool(self.blocks)
        self.scheduler.warm_up()
        self.engine.warm_up()
        self.rng = np.random.default_rng(0)
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[str, Request] = {}
        self.loading: dict[str, Request] = {}
        self.wrong: list[Any] = []
        self.num_served = self.num_compared = self.num_wrong = 0
        self.longest_wait_s = 0.0
        self._names = itertools.count()

    def submit(self) -> None:
        """Submit a question about a document, from its first token on."""
        document = int(self.rng.integers(DOCUMENTS))
        num = int(self.rng.integers(BLOCK, DOCUMENT_BLOCKS * BLOCK))
        tokens = [(document * 7919 + place) % 50_000 for place in range(num)]
        tokens += self.rng.integers(50_000, size=20).tolist()
        self.waiting.append(Request(f"r{next(self._names)}", tokens))

    def step(self) -> None:
        """Make one step, as docs/lifecycle.md has it."""
        done = self.scheduler.update_connector_output(self.worker.poll())
        assert not done.failed_recving
        for name in done.finished_recving:
            request = self.loading.pop(name)
            request.num_computed_tokens += request.num_loading
            self.cache(request)
            self.running[name] = request
        while self.waiting and len(self.running) + len(self.loading) < RUNNING:
            if not self.admit(self.waiting[0]):
                break
            self.waiting.popleft()
        scheduled = {
            name: min(
                CHUNK_BLOCKS * BLOCK, request.num_tokens - request.num_computed_tokens
            )
            for name, request in self.running.items()
        }
        meta = self.scheduler.build_connector_meta(SchedulerOutput(scheduled))
        self.pool = self.worker.start(meta, self.pool)
        self.compute(scheduled)

    def admit(self, request: Request) -> bool:
        """Allocate all blocks of a request, if there are enough."""
        max_tokens = request.num_tokens - 1
        local, [table] = find_cached_prefix(
            self.blocks, self.scheduler.groups, [request.block_keys], max_tokens
        )
        self.blocks.touch(table)
        needed = -(-(request.num_tokens + NEW_TOKENS) // BLOCK) - len(table)
        if needed > self.blocks.num_free:
            self.blocks.free(table[::-1])
            return False
        num_external, takes_time = self.scheduler.get_num_new_matched_tokens(
            request, local
        )
        # An offer holds blocks, too.
        if num_external is None or needed > self.blocks.num_free:
            if num_external:
                self.scheduler.update_state_after_alloc(request, [], 0)
            self.blocks.free(table[::-1])
            return False
        request.table = table + self.blocks.allocate(needed)
        self.scheduler.update_state_after_alloc(request, request.table, num_external)
        request.num_computed_tokens = local
        if takes_time:
            request.num_loading = num_external
            self.loading[request.request_id] = request
        else:
            request.num_computed_tokens += num_external
            self.running[request.request_id] = request
        return True

    def compute(self, scheduled: dict[str, int]) -> None:
        """Write the blocks that become full; end the requests that are over."""
        blocks: list[int] = []
        numbers: list[int] = []
        ended = []
        for name, num in scheduled.items():
            request = self.running[name]
            first = request.num_computed_tokens // BLOCK
            request.num_computed_tokens += num
            full = request.num_computed_tokens // BLOCK
            blocks += request.table[first:full]
            numbers += map(number_of, request.block_keys[first:full])
            if request.num_computed_tokens == request.num_tokens:
                new = request.num_tokens - request.num_prompt_tokens
                if new == NEW_TOKENS:
                    ended.append(request)
                else:
                    request.append(new)
        for rows, values in _parts(blocks, numbers, DEVICE_BLOCKS):
            self.pool = _write(self.pool, rows, values)
        for name in scheduled:
            self.cache(self.running[name])
        self.end(ended)

    def end(self, ended: list[Request]) -> None:
        """Compare the blocks of requests, then free them."""
        blocks: list[int] = []
        numbers: list[int] = []
        for request in ended:
            full = request.num_computed_tokens // BLOCK
            blocks += request.table[:full]
            numbers += map(number_of, request.block_keys[:full])
        self.num_compared += len(blocks)
        for rows, values in _parts(blocks, numbers, 0):
            self.wrong.append(_compare(self.pool, rows, values))
        for request in ended:
            del self.running[request.request_id]
            self.scheduler.request_finished(request, request.table)
            self.blocks.free(request.table[::-1])
            self.num_served += 1
            wait_s = time.monotonic() - request.submitted_s
            self.longest_wait_s = max(self.longest_wait_s, wait_s)
        if len(self.wrong) > 20:
            self.check()

    def check(self) -> None:
        """Count what was wrong so far."""
        self.num_wrong += sum(int(num) for num in self.wrong)
        self.wrong = []

    def cache(self, request: Request) -> None:
        """Make full blocks findable on the device."""
        full = request.num_computed_tokens // BLOCK
        span = slice(request.num_cached, full)
        self.blocks.cache(request.table[span], request.block_keys[span])
        request.num_cached = max(full, request.num_cached)


def _parts(blocks: list[int], numbers: list[int], filler: int) -> Any:
    """Cut lists into arrays of one length."""
    for start in range(0, len(blocks), ROWS):
        span = np.full(ROWS, filler, np.int32)
        values = np.zeros(ROWS, np.int32)
        part = blocks[start : start + ROWS]
        span[: len(part)], values[: len(part)] = part, numbers[start : start + ROWS]
        yield span, values


def memory() -> dict[str, int]:
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    [rss_kb] = [line.split()[1] for line in status if line.startswith("VmRSS:")]
    maps = pathlib.Path("/proc/self/maps").read_text().count("\n")
    arrays = len(jax.live_arrays())
    return {"rss_bytes": int(rss_kb) * 1024, "live_arrays": arrays, "maps": maps}


def run_window(engine: Engine, window_s: float, num_waiting: int) -> dict[str, Any]:
    """Run for some time, and measure it."""
    stats, before = engine.scheduler.stats, engine.num_served
    steps_s: list[float] = []
    cpu_s: list[float] = []
    end_s = time.monotonic() + window_s
    while time.monotonic() < end_s:
        start_s, cpu_start_s = time.perf_counter(), time.thread_time()
        engine.step()
        steps_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.thread_time() - cpu_start_s)
        while len(engine.waiting) < num_waiting:
            engine.submit()
    now = engine.scheduler.stats
    p50, p99 = np.quantile(steps_s, [0.5, 0.99]).tolist()
    cpu_p50, cpu_p99 = np.quantile(cpu_s, [0.5, 0.99]).tolist()
    return {
        "steps": len(steps_s),
        "step_p50_ms": 1e3 * p50,
        "step_p99_ms": 1e3 * p99,
        "step_most_ms": 1e3 * max(steps_s),
        "step_cpu_p50_ms": 1e3 * cpu_p50,
        "step_cpu_p99_ms": 1e3 * cpu_p99,
        "requests_served": engine.num_served - before,
        "blocks_stored": now.num_stored - stats.num_stored,
        "blocks_loaded": now.num_loaded - stats.num_loaded,
        "blocks_evicted": now.num_evicted - stats.num_evicted,
        **memory(),
    }


def run(minutes: float, num_waiting: int) -> dict[str, Any]:
    """Fill the host tier, measure the windows, serve all who are left."""
    engine = Engine()
    while engine.scheduler.stats.num_evicted < HOST_BLOCKS:
        while len(engine.waiting) < 2 * RUNNING:
            engine.submit()
        engine.step()
    while len(engine.waiting) < num_waiting:
        engine.submit()
    gc.collect()
    gc.freeze()
    rows = []
    for number in range(WINDOWS):
        rows.append(run_window(engine, 60 * minutes / WINDOWS, num_waiting))
        print(number, {key: round(value, 3) for key, value in rows[-1].items()})
    left_s = time.monotonic()
    num_left = len(engine.waiting) + len(engine.running) + len(engine.loading)
    while engine.waiting or engine.running or engine.loading:
        engine.step()
    while engine.scheduler.has_pending_stores():
        engine.step()
    engine.check()
    assert engine.num_wrong == 0, f"{engine.num_wrong} blocks had wrong bytes"
    assert engine.blocks.num_free == DEVICE_BLOCKS - 1
    return {
        "windows": rows,
        "left_at_the_end": num_left,
        "left_served_in_s": time.monotonic() - left_s,
        "requests_served": engine.num_served,
        "longest_wait_s": engine.longest_wait_s,
        "blocks_compared": engine.num_compared,
        "blocks_wrong": engine.num_wrong,
        "last_over_first": {key: _last_over_first(rows, key) for key in _FLAT},
    }


def _last_over_first(rows: list[dict[str, Any]], key: str) -> float:
    """Compare the last quarter of the windows with the first."""
    quarter, values = len(rows) // 4, [row[key] for row in rows]
    return float(np.mean(values[-quarter:]) / np.mean(values[:quarter]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10_000, help="that wait")
    args = parser.parse_args()
    where = show_machine()
    result = run(args.minutes, args.requests)
    print(json.dumps({k: v for k, v in result.items() if k != "windows"}, indent=1))
    settings = {
        "minutes": args.minutes,
        "requests_waiting": args.requests,
        "requests_running": RUNNING,
        "device_blocks": DEVICE_BLOCKS,
        "host_blocks": HOST_BLOCKS,
        "document_blocks": DOCUMENTS * DOCUMENT_BLOCKS,
    }
    write_figures(args.json, {"machine": where, "settings": settings, **result})


if __name__ == "__main__":
    main()
