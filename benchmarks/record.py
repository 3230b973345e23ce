"""Cost of recording the requests in the engine's steps.

Three schedulers serve the same prompts by turns in one process: two that record
nothing, so that their ratio is what chance does, and one that records. The time of the
scheduler's hooks, per step of 8,192 tokens, and the ratios of a round:

- serve: a new prompt is computed, stored and ended, alone;
- ask: the same prompt comes again, which the device holds, and ends.

Then the thread is given 24 prompts at once. Until it has written them, an engine with
one request makes decode steps; how long they took, beside as many without a thread.

    python benchmarks/record.py [--prompts TOKENS ...] [--json FILE]
"""

from __future__ import annotations

import os
import tempfile
import time
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
from engine_calls import BLOCK_SIZE, CHUNK_TOKENS, Engine, Jaxkv, Prompt
from jaxkv import TraceRecorder

ROUNDS = 60
_WARM_ROUNDS = 5
_BURST = 24

_rng = np.random.default_rng(0)


def new_keys(num_blocks: int) -> list[bytes]:
    return random_keys(_rng, num_blocks)


def time_rounds(num_tokens: int, recorder: TraceRecorder) -> dict[str, Any]:
    """Time the hooks of the three schedulers, in us a step."""
    num_blocks = num_tokens // BLOCK_SIZE
    num_spare = 4 * CHUNK_TOKENS // BLOCK_SIZE
    engines = [
        Engine(
            Jaxkv(
                1 + 3 * num_blocks + num_spare, 2 * num_blocks, False, recorder_or_none
            )
        )
        for recorder_or_none in (None, None, recorder)
    ]
    times_us: dict[str, list[list[float]]] = {"serve": [], "ask": []}
    with old_garbage_left_alone():
        for number in range(_WARM_ROUNDS + ROUNDS):
            keys = new_keys(num_blocks)
            for again, name in enumerate(times_us):
                spent = [0.0] * len(engines)
                # The first engine finds the keys cold: take turns.
                for place in range(len(engines)):
                    which = (place + number) % len(engines)
                    engine = engines[which]
                    engine.start_clock()
                    engine.serve(Prompt(f"{number}.{again}", keys))
                    spent[which] = 1e6 * engine.spent_s["hooks"] / engine.num_steps
                if number >= _WARM_ROUNDS:
                    times_us[name].append(spent)
    return {
        name: {
            "off_us": quartiles([spent[0] for spent in rows]),
            "on_us": quartiles([spent[2] for spent in rows]),
            "on_over_off": quartiles([spent[2] / spent[0] for spent in rows]),
            "off_over_off": quartiles([spent[1] / spent[0] for spent in rows]),
        }
        for name, rows in times_us.items()
    }


def time_burst(num_tokens: int, path: str) -> dict[str, Any]:
    """Time decode steps beside the thread that writes, and without it."""
    num_blocks = num_tokens // BLOCK_SIZE
    engine = Engine(Jaxkv(1 + 2 * num_blocks, 2 * num_blocks, False))
    engine.run(Prompt("runs", new_keys(num_blocks)))
    with TraceRecorder(path, max_bytes="1GiB") as recorder:
        recorder.describe(BLOCK_SIZE)
        prompts = [new_keys(num_blocks) for _ in range(_BURST)]
        put_us = []
        start_s = time.perf_counter()
        for number, keys in enumerate(prompts):
            put_s = time.perf_counter()
            recorder.begin(str(number), keys, num_tokens)
            recorder.finish(str(number), keys, num_tokens, num_tokens)
            put_us.append(1e6 * (time.perf_counter() - put_s))
        beside_us = []
        while sum(recorder.stats) < _BURST:
            beside_us.append(time_step(engine))
        written_s = time.perf_counter() - start_s
        num_bytes = os.path.getsize(path)
        num_written = recorder.stats.num_written
    alone_us = [time_step(engine) for _ in beside_us]
    return {
        "put_us": quartiles(put_us),
        "written_s": written_s,
        "num_written": num_written,
        "bytes_per_block": num_bytes / (_BURST * num_blocks),
        "num_steps": len(beside_us),
        "beside_us": percentiles(beside_us),
        "alone_us": percentiles(alone_us),
    }


def time_step(engine: Engine) -> float:
    start_s = time.perf_counter()
    engine.step()
    return 1e6 * (time.perf_counter() - start_s)


def percentiles(times_us: list[float]) -> list[float]:
    """Return the 50th, the 99th and the 100th."""
    return [float(value) for value in np.percentile(times_us, [50, 99, 100])]


def main() -> None:
    """Measure, print and write the figures if asked to."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1 << 13, 1 << 17])
    args = parser.parse_args()
    where = show_machine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for num_tokens in args.prompts:
            path = os.path.join(folder, f"{num_tokens}.jsonl")
            with TraceRecorder(path, max_bytes="1GiB") as recorder:
                row = time_rounds(num_tokens, recorder)
            row["burst"] = burst = time_burst(num_tokens, f"{path}.burst")
            rows.append({"prompt_tokens": num_tokens, **row})
            for name in ("serve", "ask"):
                times = row[name]
                print(
                    f"prompt {num_tokens:7}  {name:5}  off {times['off_us'][1]:8.1f}"
                    f" us  on {times['on_us'][1]:8.1f} us  on/off "
                    f"{spread(times['on_over_off'], digits=3)}  off/off "
                    f"{spread(times['off_over_off'], digits=3)}",
                    flush=True,
                )
            print(
                f"prompt {num_tokens:7}  burst  {_BURST} prompts handed over in "
                f"{burst['put_us'][1]:.1f} us each, written after "
                f"{burst['written_s']:.2f} s, {burst['bytes_per_block']:.1f} bytes a "
                "block; decode steps p50/p99/max beside "
                "{:.0f}/{:.0f}/{:.0f} us".format(*burst["beside_us"])
                + ", alone {:.0f}/{:.0f}/{:.0f} us".format(*burst["alone_us"]),
                flush=True,
            )
    write_figures(args.json, {"machine": where, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
