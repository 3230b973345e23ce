"""Does a store behind the host hold up the steps of an engine?

Four of the demo's engines take the same requests and step by turns: one without a
store, one that writes all that gets to the host to a folder, one whose store never
answers, and one without a store beside which a thread writes as many plain files of the
same size. The last one shows what the machine takes for the writing itself. Every
request is new, so that all of it is computed, stored and written. What is timed is a
whole step, with the model's; the garbage collector is off meanwhile. A turn is some
steps long, and ends when nothing is left to write, so that what an engine has under way
beside its steps delays its own steps and no other engine's.

Beside the time that passes stands the time that the processor spent on the thread that
steps. That one does not depend on what else runs on the machine: it shows the work that
the store adds to a step, and not what waits for other threads.

    python benchmarks/storage_step.py [--turns N] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import gc
import pathlib
import queue
import random
import tempfile
import threading
import time
from typing import Any
from unittest import mock

import numpy as np

from common import make_parser, show_machine, write_figures
from jaxkv.scheduling.worker import storage_worker
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.tools.demo.engine import Engine, EngineConfig
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.steps import make_steps

WARM_TURNS = 4
TURN_STEPS = 50
PROMPT_TOKENS, ANSWER_TOKENS = 500, 20


class Hanging:
    """A store that never answers."""

    url = "hanging://"

    def get(self, names: list[str], max_bytes: int) -> Any:
        threading.Event().wait()

    def put(self, items: list[Any]) -> Any:
        threading.Event().wait()

    exists = delete = put

    def list(self, folder: str) -> Any:
        return iter(())

    def close(self) -> None:
        """Nothing is held."""


class PlainFiles:
    """Writes a file for every block that gets to an engine's host, on a thread.

    Nothing is copied, summed or named by content, and no rename makes a file whole.
    """

    def __init__(self, engine: Engine, folder: str, file_bytes: int) -> None:
        self.num_written = 0
        self._engine = engine
        self._folder = pathlib.Path(folder)
        self._folder.mkdir()
        self._payload = bytes(file_bytes)
        self._tasks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_asked = 0
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def ask(self) -> None:
        """Ask for the files of what was stored since the last time."""
        assert self._engine.offload is not None
        while self._num_asked < self._engine.offload.stats.num_stored:
            self._tasks.put(self._num_asked)
            self._num_asked += 1

    def wait(self) -> None:
        """Wait until all are written."""
        while self.num_written < self._num_asked:
            time.sleep(1e-3)

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (number := self._tasks.get()) is not None:
            (self._folder / f"{number}").write_bytes(self._payload)
            self.num_written += 1


def make_engine(steps: Any, storage: str | None) -> Engine:
    engine = Engine(
        steps,
        EngineConfig(
            block_size=32,
            device_blocks=64,
            host_blocks=512,
            concurrency=2,
            max_seq_tokens=640,
            weights_epoch="bench",
            storage=storage,
            storage_bytes=2 << 30,
            storage_write="through",
        ),
    )
    engine.warm_up()
    return engine


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=40, help="timed, of each")
    parser.add_argument("--folder", help="where the store is; default: a temporary one")
    args = parser.parse_args()
    where = show_machine()
    steps = make_steps(ModelConfig(num_layers=4), seed=0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        engines = {
            "off": make_engine(steps, None),
            "writing": make_engine(steps, folder),
        }
        with mock.patch.object(storage_worker, "open_store", return_value=Hanging()):
            engines["hanging"] = make_engine(steps, f"{folder}/none")
        engines["files"] = make_engine(steps, None)
        files = PlainFiles(
            engines["files"],
            f"{folder}/files",
            storage_of(engines["writing"]).storage_io.objects.object_bytes,
        )
        times = run(engines, files, args.turns)
        rows = [row(name, engines[name], files, times) for name in engines]
        files.close()
        for name in ("writing", "hanging"):
            storage_of(engines[name]).close()
    for each in rows:
        print(
            f"{each['store']:8} step p50 {each['p50_ms']:6.2f} ms = "
            f"{each['p50_ratio']:.3f} of off, p99 {each['p99_ms']:6.2f} ms = "
            f"{each['p99_ratio']:.3f}; processor, mean "
            f"{each['processor_mean_ms']:6.3f} ms = "
            f"{each['processor_mean_ratio']:.3f}; {each['written']} blocks written, "
            f"{each['dropped']} dropped"
        )
    write_figures(args.json, {**where, "rows": rows})


def storage_of(engine: Engine) -> StorageWorker:
    """The worker of an engine that has a store."""
    assert engine.worker is not None
    assert engine.worker.storage is not None
    return engine.worker.storage


def run(
    engines: dict[str, Engine], files: PlainFiles, num_turns: int
) -> dict[str, list[list[float]]]:
    """Step the engines by turns; give the seconds of each step, by both clocks."""
    times: dict[str, list[list[float]]] = {name: [[], []] for name in engines}
    rng = {name: random.Random(0) for name in engines}
    names = list(engines)
    gc.collect()
    gc.disable()
    for number in range(WARM_TURNS + num_turns):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            taken = take_turn(name, engines[name], files, rng[name])
            if number >= WARM_TURNS:
                for own, new in zip(times[name], taken, strict=True):
                    own += new
    gc.enable()
    return times


def take_turn(
    name: str, engine: Engine, files: PlainFiles, rng: random.Random
) -> list[list[float]]:
    """Step an engine some times, and let what is to be written get there."""
    clocks = time.perf_counter, time.thread_time
    times: list[list[float]] = [[], []]
    for _ in range(TURN_STEPS):
        if not engine.has_work:
            for _ in range(2):
                prompt = rng.choices(range(256), k=PROMPT_TOKENS)
                engine.submit(prompt, ANSWER_TOKENS)
        starts = [clock() for clock in clocks]
        engine.step()
        for own, clock, start_s in zip(times, clocks, starts, strict=True):
            own.append(clock() - start_s)
        if name == "files":
            files.ask()
    if name == "files":
        files.wait()
    elif name == "writing":
        storage = storage_of(engine)
        while storage.num_in_flight:
            storage.advance()
            time.sleep(1e-3)
    return times


def row(
    name: str,
    engine: Engine,
    files: PlainFiles,
    times: dict[str, list[list[float]]],
) -> dict[str, Any]:
    """Give the figures of an engine."""
    own, processor = map(np.array, times[name])
    off, off_processor = map(np.array, times["off"])
    assert engine.offload is not None
    stats = engine.offload.stats
    figures: dict[str, Any] = {"store": name}
    for percentile in (50, 99):
        value = float(np.percentile(own, percentile))
        figures[f"p{percentile}_ms"] = 1e3 * value
        figures[f"p{percentile}_ratio"] = value / float(np.percentile(off, percentile))
    # Few steps do most of the store's work, so that the median would not show it.
    mean = float(np.mean(processor))
    figures["processor_mean_ms"] = 1e3 * mean
    figures["processor_mean_ratio"] = mean / float(np.mean(off_processor))
    figures["written"] = (
        files.num_written if name == "files" else stats.num_storage_stored
    )
    figures["dropped"] = stats.num_storage_dropped
    return figures


if __name__ == "__main__":
    main()
