"""Time for a prompt to arrive from a store, in windows and by one call.

python benchmarks/storage_prompts.py [BLOCKS ...]

A prompt's blocks of 64 KiB are in a folder. Two new schedulers fetch them, one with 128
blocks in flight and one with all of them; the engine does nothing else. Prints the
share that arrives and the ratio of the fastest rounds, by turns: on a busy machine most
rounds of few blocks are disturbed. At 128 blocks both fetch alike, as a control.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time

import jax.numpy as jnp

from jaxkv import DeviceBlockPool, OffloadConfig, SchedulerOutput

BLOCK_SIZE = 16
MAX_IN_FLIGHT, MIN_ROUNDS = 128, 3
ROUND_BLOCKS = 4096  # Fetched in each way, at least: few blocks take milliseconds.


@dataclasses.dataclass
class Prompt:
    """A request of full blocks."""

    request_id: str
    block_keys: list[bytes]
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.block_keys) * BLOCK_SIZE + 1


def connect(folder: str, num_blocks: int, max_in_flight: int):
    pool = [jnp.zeros((4, BLOCK_SIZE, 1, 1024), jnp.float32)]
    config = OffloadConfig(
        num_host_blocks=num_blocks + 8,
        storage=folder,
        storage_bytes="8GiB",
        storage_probe_s=0.0,
        max_storage_blocks=max_in_flight,
        storage_deadline_s=60.0,
    )
    _, scheduler, worker = config.connect(
        pool, groups=BLOCK_SIZE, storage_namespace=b"benchmark"
    )
    scheduler.bind_device_block_pool(DeviceBlockPool(4))
    return pool, scheduler, worker


def write(folder: str, keys: list[bytes]) -> None:
    _, _, worker = connect(folder, 1, 1)
    storage = worker.storage.storage_io
    for key in keys:
        storage.submit_writes([(key, [bytes(storage.objects.payload_bytes)])])
        storage.wait()
    worker.storage.close(10.0)


def fetch(folder: str, keys: list[bytes], max_in_flight: int) -> tuple[float, float]:
    """Return the seconds until the offer, and the share of the blocks that it has."""
    pool, scheduler, worker = connect(folder, 2 * len(keys), max_in_flight)
    scheduler.wait_for_storage(worker, 60.0)
    prompt, start_s = Prompt("prompt", keys), time.perf_counter()
    while (offer := scheduler.get_num_new_matched_tokens(prompt, 0)[0]) is None:
        pool = worker.start(scheduler.build_connector_meta(SchedulerOutput({})), pool)
        scheduler.update_connector_output(worker.poll())
        time.sleep(1e-3)
    wall_s = time.perf_counter() - start_s
    scheduler.request_finished(prompt)
    worker.storage.close()
    return wall_s, offer / (len(keys) * BLOCK_SIZE)


def main() -> None:
    for num_blocks in map(int, sys.argv[1:] or (128, 512, 2048, 8192)):
        keys = [number.to_bytes(32, "big") for number in range(1, num_blocks + 1)]
        with tempfile.TemporaryDirectory() as folder:
            write(folder, keys)
            fetch(folder, keys, num_blocks)
            rounds = [
                [fetch(folder, keys, size) for size in (MAX_IN_FLIGHT, num_blocks)]
                for _ in range(max(MIN_ROUNDS, ROUND_BLOCKS // num_blocks))
            ]
        windows_s, whole_s = (min(times[n][0] for times in rounds) for n in (0, 1))
        share = min(times[0][1] for times in rounds)
        print(
            f"{num_blocks} blocks: {share:.0%} arrives in {windows_s:.3f} s, by one "
            f"call in {whole_s:.3f} s: {windows_s / whole_s:.2f} times"
        )


if __name__ == "__main__":
    main()
