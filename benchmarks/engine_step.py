"""Cost of all offloading calls of a step in the engine's thread.

Processor time of the calling thread, medians over steps, in an engine of one's own
(pool, scheduler, worker), in one that also writes all blocks through to a folder, and
in vLLM's connector, driven through a stand-in for vLLM. Eight requests run. In a step

- nothing: no block is full, so nothing moves;
- stores: each of them has filled a block, and all are stored;
- both: besides, a prompt of eight blocks comes that is on the host alone, is loaded,
  and ends.

The last two count until all is reported, mostly in the next step. "calls" are Python
function calls of jaxkv, which the load of a machine does not change. Blocks are small,
as XLA:CPU copies bytes in the calling thread. Several devices come from
``--xla_force_host_platform_device_count``. `vllm_step.py` measures the connector, and
others beside it, in the real vLLM.

With `--beside CHECKOUT` another version is measured by turns with this one, each in a
process of its own.

    python benchmarks/engine_step.py [--beside CHECKOUT] [--devices N ...]
        [--leaves N ...] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

from common import (
    ROOT,
    answer,
    ask,
    make_parser,
    questions,
    show_machine,
    start,
    write_figures,
)

NUM_RUNNING, PROMPT_BLOCKS, NUM_BLOCKS = 8, 8, 512
STEPS = 20
CASES = "nothing", "stores", "both"


class Clock:
    """Adds up processor time of this thread, and Python calls of jaxkv."""

    def __init__(self) -> None:
        self.us, self.num_calls = 0.0, 0
        self.counts = False

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.counts:
            sys.setprofile(self._note)
            try:
                return call(*args)
            finally:
                sys.setprofile(None)
        start_s = time.thread_time()
        answer = call(*args)
        self.us += 1e6 * (time.thread_time() - start_s)
        return answer

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/jaxkv/" in frame.f_code.co_filename:
            self.num_calls += 1


class Own:
    """An engine of one's own."""

    block_size = 16

    def __init__(self, caches: list[Any], clock: Clock) -> None:
        from jaxkv import DeviceBlockPool, OffloadScheduler, OffloadWorker
        from jaxkv.transfer import TransferEngine

        engine = TransferEngine(caches, 4 * NUM_BLOCKS)
        engine.warm_up()
        self.caches, self.clock = caches, clock
        storage, rules = self.make_storage(engine)
        self.worker = OffloadWorker(engine, storage=storage)
        self.pool = DeviceBlockPool(NUM_BLOCKS)
        self.scheduler = OffloadScheduler(self.block_size, 4 * NUM_BLOCKS, **rules)
        self.scheduler.bind_device_block_pool(self.pool)
        self.scheduler.warm_up()
        self.allocate, self.cache = self.pool.allocate, self.pool.cache
        self.free, self.forget = self.pool.free, self.pool.evict

    def make_storage(self, engine: Any) -> tuple[Any, dict[str, Any]]:
        """Make the store's worker and what the scheduler must know of it."""
        return None, {}

    def request(self, name: str, keys: list[bytes]) -> Any:
        return SimpleNamespace(
            request_id=name,
            block_keys=keys,
            num_tokens=len(keys) * self.block_size + 1,
            num_computed_tokens=0,
        )

    def take(self, request: Any, blocks: list[int], num_external: int) -> None:
        call = self.scheduler.update_state_after_alloc
        self.clock(call, request, blocks, num_external)

    def step(self, scheduled: dict[str, int], new: dict[str, list[int]]) -> None:
        from jaxkv.scheduling.protocol import SchedulerOutput

        output = SchedulerOutput(scheduled, new)
        meta = self.clock(self.scheduler.build_connector_meta, output)
        self.caches = self.clock(self.worker.start, meta, self.caches)
        time.sleep(0.002)  # The model runs.
        report = self.clock(self.worker.poll)
        self.clock(self.scheduler.update_connector_output, report)

    def is_moving(self) -> bool:
        scheduler = self.scheduler
        return scheduler.has_pending_stores() or scheduler.has_pending_loads()

    def finish(self, request: Any, blocks: list[int]) -> None:
        self.clock(self.scheduler.request_finished, request, blocks)


class Stored(Own):
    """An engine of one's own that writes all blocks through to a folder."""

    def make_storage(self, engine: Any) -> tuple[Any, dict[str, Any]]:
        """Open a store in a temporary folder, which is removed with this object."""
        from jaxkv import OffloadRules
        from jaxkv.scheduling.worker.storage_worker import open_storage
        from jaxkv.transfer.storage.census import Bound

        self._folder = tempfile.TemporaryDirectory()
        storage = open_storage(engine, self._folder.name, namespace=b"benchmark")
        num_blocks = storage.num_blocks(1 << 30)
        storage.bound = Bound(num_blocks)
        rules = OffloadRules(storage_write="through")
        return storage, {"rules": rules, "num_storage_blocks": num_blocks}


class Connector:
    """vLLM's connector, and what vLLM calls of it."""

    block_size = 4  # Of the stand-in.

    def __init__(self, caches: list[Any], clock: Clock) -> None:
        import pytest

        from tests.rigs import fake_vllm

        fake_vllm.install(pytest.MonkeyPatch(), "0.32")
        self.vllm, self.clock = fake_vllm, clock
        extra = {"num_cpu_blocks": 4 * NUM_BLOCKS, "store_batch_blocks": 0}
        configs = fake_vllm.make_configs(
            num_blocks=NUM_BLOCKS, num_layers=len(caches), extra=extra
        )
        configs[0].kv_events_config.enable_kv_cache_events = False
        self.scheduler, self.worker = (
            fake_vllm.create_connector(configs[0], role, configs[1])
            for role in fake_vllm.KVConnectorRole
        )
        self.runner = SimpleNamespace(kv_caches=caches)
        self.worker.register_runner(self.runner)
        self.pool = fake_vllm.BlockPool(NUM_BLOCKS, newer=True)
        self.scheduler.bind_gpu_block_pool(self.pool)

    def allocate(self, num: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num)]

    def cache(self, blocks: list[int], keys: list[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.pool.cache(self.pool.blocks[block], key, 0)

    def free(self, blocks: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.forget(self.pool.blocks[block])

    def request(self, name: str, keys: list[bytes]) -> Any:
        num_tokens = len(keys) * self.block_size + 1
        return SimpleNamespace(
            request_id=name,
            block_hashes=keys,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            num_output_placeholders=0,
            kv_transfer_params=None,
        )

    def take(self, request: Any, blocks: list[int], num_external: int) -> None:
        table = SimpleNamespace(get_block_ids=lambda: (blocks,))
        call = self.scheduler.update_state_after_alloc
        self.clock(call, request, table, num_external)

    def step(self, scheduled: dict[str, int], new: dict[str, list[int]]) -> None:
        tables = [(new[name],) if name in new else None for name in scheduled]
        output = SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled), new_block_ids=tables
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=None,
        )
        clock, scheduler, worker = self.clock, self.scheduler, self.worker
        meta = clock(scheduler.build_connector_meta, output)
        clock(worker.bind_connector_metadata, meta)
        clock(worker.start_load_kv, None)
        time.sleep(0.002)  # The model runs.
        clock(worker.wait_for_save)
        done = clock(worker.get_transfer_results, set())
        clock(worker.get_block_ids_with_load_errors)
        report = clock(worker.build_connector_worker_meta)
        clock(worker.get_kv_connector_stats)
        clock(worker.clear_connector_metadata)
        result = self.vllm.KVConnectorOutput(
            finished_recving=done.finished_recving, kv_connector_worker_meta=report
        )
        clock(scheduler.update_connector_output, result)
        clock(scheduler.get_kv_connector_stats)
        clock(scheduler.take_events)

    def is_moving(self) -> bool:
        moving: bool = self.scheduler.has_pending_push_work()
        return moving

    def finish(self, request: Any, blocks: list[int]) -> None:
        call = self.scheduler.request_finished_all_groups
        self.clock(call, request, (blocks,))


class Engine:
    """Runs eight requests on a side, and lets one come back."""

    def __init__(self, side: Own | Connector) -> None:
        import numpy as np

        self.side, self.rng = side, np.random.default_rng(0)
        self.blocks: dict[str, list[int]] = {}
        self.running = []
        self.visitor_keys = self._keys(PROMPT_BLOCKS)
        for number in range(NUM_RUNNING):
            self.running.append(self._run(f"runs {number}", self._keys(1)))
        visitor = self._run("first", self.visitor_keys)
        for _ in range(3):
            self._step([*self.running, visitor], 0)
        self._end(visitor)
        self.settle()

    def _keys(self, num: int) -> list[bytes]:
        return [self.rng.bytes(32) for _ in range(num)]

    def _look_up(self, request: Any) -> int:
        call = self.side.scheduler.get_num_new_matched_tokens
        num: int = self.side.clock(call, request, 0)[0]
        return num

    def _run(self, name: str, keys: list[bytes]) -> Any:
        """Compute a new prompt, except its last token."""
        request = self.side.request(name, keys)
        self._look_up(request)
        self.blocks[name] = blocks = self.side.allocate(len(keys) + 1)
        self.side.take(request, blocks, 0)
        self.side.step({name: request.num_tokens}, {})
        request.num_computed_tokens = request.num_tokens - 1
        self.side.cache(blocks[:-1], keys)
        return request

    def _step(self, requests: list[Any], num_tokens: int) -> None:
        scheduled, new = {}, {}
        for request in requests:
            name = request.request_id
            scheduled[name] = max(num_tokens, 1)
            if num_tokens:
                new[name] = self.side.allocate(1)
                self.blocks[name] += new[name]
        self.side.step(scheduled, new)

    def _end(self, request: Any) -> None:
        blocks = self.blocks.pop(request.request_id)
        self.side.finish(request, blocks)
        self.side.free(blocks[::-1])
        self.side.forget(blocks)

    def settle(self) -> None:
        """Step until nothing moves."""
        for _ in range(1000):
            if not self.side.is_moving():
                return
            self._step(self.running, 0)
        raise RuntimeError("transfers do not end")

    def fill(self) -> None:
        """Fill a block of each request, as in the last step."""
        size = self.side.block_size
        keys_of = "block_keys" if isinstance(self.side, Own) else "block_hashes"
        for request in self.running:
            blocks, keys = self.blocks[request.request_id], getattr(request, keys_of)
            keys += self._keys(1)
            request.num_computed_tokens += size
            request.num_tokens += size
            self.side.cache(blocks[len(keys) - 1 : len(keys)], keys[-1:])

    def restart(self) -> None:
        """End the requests that run, and begin others, so that blocks never run out."""
        for number, request in enumerate(self.running):
            self._end(request)
            self.running[number] = self._run(f"{request.request_id}'", self._keys(1))
        self.settle()

    def measure(self, case: str) -> None:
        """Make a step of a case, and end what it began."""
        visitor = None
        if case == "both":
            visitor = self.side.request("visitor", self.visitor_keys)
            num = self._look_up(visitor)
            assert num == PROMPT_BLOCKS * self.side.block_size, num
            self.blocks["visitor"] = self.side.allocate(PROMPT_BLOCKS + 1)
            self.side.take(visitor, self.blocks["visitor"], num)
        self._step(self.running, 0 if case == "nothing" else self.side.block_size)
        if case != "nothing":
            self.settle()
        if visitor is not None:
            self._end(visitor)


def serve(checkout: str, num_devices: int, num_leaves: int) -> None:
    """Measure a version: all cases for each question."""
    sys.path.insert(0, checkout)
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    import jaxkv
    from jaxkv.transfer.memory import partition_spec

    assert pathlib.Path(checkout) in pathlib.Path(jaxkv.__file__).parents
    place: Any = jax.devices()[0]
    if num_devices > 1:
        mesh = jax.make_mesh((num_devices,), ("model",))
        place = NamedSharding(mesh, partition_spec(None, "model"))
    clocks, engines = {}, {}
    for side in (Own, Stored, Connector):
        leaf = jnp.zeros((NUM_BLOCKS, 8, 16), jnp.bfloat16)
        caches = [jax.device_put(leaf + 1, place) for _ in range(num_leaves)]
        clocks[side] = Clock()
        engines[side] = Engine(side(caches, clocks[side]))
    for _ in questions():
        figures: dict[str, Any] = {}
        for (side, engine), case in itertools.product(engines.items(), CASES):
            times, clock = [], clocks[side]
            for number in range(STEPS):
                clock.counts = number == STEPS - 1  # The last one, not timed.
                if case != "nothing":
                    engine.fill()
                clock.us, clock.num_calls = 0.0, 0
                engine.measure(case)
                if not clock.counts:
                    times.append(clock.us)
                num_calls, clock.counts = clock.num_calls, False
            engine.restart()
            name = f"{side.__name__.lower()} {case}"
            figures[name] = {"us": statistics.median(times), "calls": num_calls}
        answer(figures)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, beside=True)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--leaves", type=int, nargs="+", default=[4, 32, 80])
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], *map(int, args.serve[1].split("x")))
        return
    versions = {"this": ROOT}
    if args.beside is not None:
        versions["beside"] = args.beside.resolve()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for devices, leaves in itertools.product(args.devices, args.leaves):
            flags = f"--xla_force_host_platform_device_count={devices}"
            env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TMPDIR": folder}
            processes = {
                name: start(__file__, str(path), f"{devices}x{leaves}", env=env)
                for name, path in versions.items()
            }
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in versions}
            try:
                for number in range(args.rounds + 1):  # The first one warms up.
                    for name, process in processes.items():
                        figures = ask(process)
                        rounds[name] += [figures] * (number > 0)
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
            rows += report(rounds, devices, leaves)
    if args.json:
        write_figures(args.json, {"machine": show_machine(), "rows": rows})


def report(
    rounds: dict[str, list[dict[str, Any]]], devices: int, leaves: int
) -> list[dict[str, Any]]:
    """Print and return the figures of all versions and cases."""
    rows = []
    for name, by_round in rounds.items():
        for case, first in by_round[0].items():
            us = sorted(figures[case]["us"] for figures in by_round)
            row = {"version": name, "devices": devices, "leaves": leaves}
            rows.append(row | {"case": case, "us": us, "calls": first["calls"]})
            print(
                f"{name:7} devices {devices}  leaves {leaves:3}  {case:18}"
                f"{statistics.median(us):8.0f} us [{us[0]:.0f}, {us[-1]:.0f}]"
                f"  {first['calls']:5} calls",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
