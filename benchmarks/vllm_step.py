"""Cost of the connector in a step of the real vLLM, without any hit.

A small random Llama on the CPU, under vLLM and tpu-inference. A round has 40 new random
prompts of 200 tokens and answers of 48, eight requests at a time: 2.3 blocks are stored
in a step and none is loaded. Each case is a process of its own, and the cases take
turns:

- alone: no connector;
- copying: no connector, and beside it a thread that copies as many bytes in each step
  as the connector would store. Two cores have to copy and to compute: what the bytes
  themselves cost shows here;
- connector: jaxkv with its defaults;
- NAME: jaxkv with other keys, of ``--keys NAME=JSON``;
- peer: tpu-inference's own connector for host memory, if ``--peer`` asks for it, with
  its worker; it stores all as ours does, and nothing is loaded;
- beside: another version of jaxkv with its defaults, of ``--beside CHECKOUT``.

It prints the tokens generated per second, and the processor time of the connector's
calls in the engine's thread: in all steps, and in steps without moves,
where no transfer begins, is under way or is reported.

Run it where `.ci/vllm` has installed vLLM::

    python benchmarks/vllm_step.py [--rounds R] [--keys NAME=JSON ...] [--peer]
        [--beside CHECKOUT] [--json FILE]
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
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

sys.path.insert(0, str(ROOT / "tests/integrations"))
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 40, 200, 48
NUM_BLOCKS = 200
COPIED_BLOCKS = 400
PEER = "tpu_inference.offload.tpu_offload_connector"
# Variables of the peer: a tier of the size of ours, which takes what is generated, too.
PEER_ENVIRONMENT = {
    "TPU_OFFLOAD_NUM_CPU_CHUNKS": str(COPIED_BLOCKS),
    "TPU_OFFLOAD_DECODE_SAVE": "1",
}
CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "get_external_cache_hit_sources",
    "take_events",
)
"""What vLLM calls of a connector while it serves."""


class Watch:
    """Adds up what the calls of a connector take, step by step."""

    def __init__(self, connector: type) -> None:
        self.clear()
        self._depth = 0
        for name in CALLS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def clear(self) -> None:
        # For each step the processor seconds of the engine's thread, by method, and
        # whether anything moved.
        self.steps: list[tuple[collections.Counter[str], bool]] = []
        self.step: collections.Counter[str] = collections.Counter()

    def end_step(self, is_moving: bool) -> None:
        self.steps.append((self.step, is_moving))
        self.step = collections.Counter()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            if self._depth:  # A method that calls another.
                return call(*args, **named)
            self._depth += 1
            start_s = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                took_s = time.thread_time() - start_s
                self.step[name] += took_s
                self._depth -= 1

        return timed


def mean_us(steps: list[collections.Counter[str]]) -> dict[str, float]:
    """Average what steps take, by method and in all."""
    total = sum(steps, collections.Counter())
    times = {name: 1e6 * us / len(steps) for name, us in total.most_common()}
    return {"all": sum(times.values())} | times


class Ours:
    """The moves of jaxkv in a step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def is_moving(self) -> bool:
        return bool(self._scheduler.has_pending_stores())

    def counts(self) -> dict[str, int]:
        """Return the numbers of blocks stored and dropped."""
        stats = self._scheduler.stats
        dropped = stats.num_dropped_slow + stats.num_dropped_full
        return {"num_stored": stats.num_stored, "num_dropped": dropped}


class Peer:
    """The moves of tpu-inference's connector in a step."""

    def __init__(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._worker = get_kv_transfer_group().connector_worker
        self._num_stored, self._has_work = 0, False
        self._build = connector.build_connector_meta
        connector.build_connector_meta = self._noted

    def _noted(self, *args: Any) -> Any:
        """Build the metadata; note what they ask for."""
        metadata = self._build(*args)
        saves = [
            request.save_spec for request in metadata.requests_meta if request.save_spec
        ]
        self._has_work = any(not save.skip_save for save in saves)
        self._num_stored += sum(len(save.dst_chunks) for save in saves)
        return metadata

    def is_moving(self) -> bool:
        """Return whether a save was requested in this step, or is in flight."""
        has_work, self._has_work = self._has_work, False
        return has_work or bool(self._worker._pending_save_futures)

    def counts(self) -> dict[str, int]:
        """Return the number of blocks stored; it drops none."""
        return {"num_stored": self._num_stored, "num_dropped": 0}


class CopyingThread:
    """Copies bytes beside the engine."""

    def __init__(self, block_bytes: int) -> None:
        import numpy as np

        self._source = np.ones((COPIED_BLOCKS, block_bytes), np.uint8)
        self._target = self._source.copy()
        self._copy = np.copyto
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._next = 0
        self._num_tokens = 0
        threading.Thread(target=self._run, daemon=True).start()

    def copy(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        while self._num_tokens >= 16:
            self._num_tokens -= 16
            self._wanted.put(self._next)
            self._next = (self._next + 1) % COPIED_BLOCKS

    def _run(self) -> None:
        while True:
            row = self._wanted.get()
            self._copy(self._target[row], self._source[row])


def serve(folder: pathlib.Path, case: dict[str, Any]) -> None:
    """Measure one case: a round for each question."""
    sys.path.insert(0, case["checkout"])
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm_cpu.run import engine_arguments

    options = {
        "model": "llama-float32",
        "num_blocks": NUM_BLOCKS,
        "extra": case["keys"],
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 128},
    }
    arguments = engine_arguments(folder, options)
    watch: Watch | None = None
    if case["peer"]:
        load_general_plugins()  # Before it imports what the plugin replaces.
        watch = Watch(importlib.import_module(PEER).TPUOffloadConnector)
        arguments["kv_transfer_config"] = {
            "kv_connector": "TPUOffloadConnector",
            "kv_connector_module_path": PEER,
            "kv_role": "kv_both",
        }
    elif case["keys"] is not None:
        import jaxkv
        from jaxkv.integrations.vllm.connector import OffloadConnector

        assert pathlib.Path(case["checkout"]) in pathlib.Path(jaxkv.__file__).parents
        watch = Watch(OffloadConnector)
    llm = LLM(**arguments)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    block_bytes = sum(cache.nbytes for cache in runner.kv_caches) // NUM_BLOCKS
    copying = CopyingThread(block_bytes) if case["copies"] else None
    step_fn = core.step_fn
    moves: Any = None
    if case["peer"]:
        moves = Peer(core.scheduler.connector)
    elif watch is not None:
        moves = Ours(core.scheduler.connector._scheduler.scheduler)

    def step() -> Any:
        if watch is None:
            return step_fn()
        was_moving = moves.is_moving()
        output = step_fn()
        is_moving = moves.is_moving()
        watch.end_step(was_moving or is_moving)
        return output

    schedule = core.scheduler.schedule

    def counting(*args: Any, **named: Any) -> Any:
        output = schedule(*args, **named)
        if copying is not None:
            copying.copy(output.total_num_scheduled_tokens)
        return output

    core.scheduler.schedule = counting
    core.step_fn = step
    rng = np.random.default_rng(7)
    params = SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, detokenize=False
    )
    for _ in questions():
        prompts = [
            {"prompt_token_ids": rng.integers(0, 256, PROMPT_TOKENS).tolist()}
            for _ in range(NUM_PROMPTS)
        ]
        if watch is not None:
            watch.clear()
        start_s = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.monotonic() - start_s
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        figures: dict[str, Any] = {
            "tokens_per_s": NUM_PROMPTS * ANSWER_TOKENS / took_s,
            "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        }
        if watch is not None:
            steps = watch.steps
            figures["num_steps"] = len(steps)
            figures["step_ms"] = 1e3 * took_s / len(steps)
            still = [calls for calls, is_moving in steps if not is_moving]
            figures["us"] = mean_us([calls for calls, _ in steps])
            figures["num_still"] = len(still)
            figures["still_us"] = mean_us(still)
            figures |= moves.counts()
        answer(figures)
    os._exit(0)  # What vLLM would end slowly, or not at all.


def start_case(
    folder: pathlib.Path, name: str, case: dict[str, Any]
) -> subprocess.Popen[str]:
    """Start the process of a case; what it logs goes to a file of its name."""
    from vllm_cpu import lab

    environment = lab.environ(folder)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    paths[paths.index(str(ROOT))] = case["checkout"]
    env = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if case["peer"]:
        env |= PEER_ENVIRONMENT
    log = folder / f"{name}.log"
    return start(__file__, str(folder), json.dumps(case), env=env, log=log)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, beside=True)
    parser.add_argument("--keys", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    if args.serve:
        serve(pathlib.Path(args.serve[0]), json.loads(args.serve[1]))
        return
    base_case = {"checkout": str(ROOT), "copies": False, "peer": False}
    cases: dict[str, dict[str, Any]] = {
        "alone": base_case | {"keys": None},
        "copying": base_case | {"keys": None, "copies": True},
        "connector": base_case | {"keys": {}},
    }
    for text in args.keys:
        name, _, text = text.partition("=")
        cases[name] = base_case | {"keys": json.loads(text)}
    if args.peer:
        cases["peer"] = base_case | {"keys": None, "peer": True}
    if args.beside:
        beside = base_case | {"keys": {}, "checkout": str(args.beside.resolve())}
        cases["beside"] = beside
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as name:
        from vllm_cpu import lab

        folder = pathlib.Path(name)
        lab.make_lab(folder)
        processes = {
            name: start_case(folder, name, case) for name, case in cases.items()
        }
        try:
            for process in processes.values():
                ask(process)  # Compiles.
            for number in range(args.rounds):
                for name, process in processes.items():
                    rounds[name].append(ask(process))
                digests = {figures[number]["digest"] for figures in rounds.values()}
                print(f"round {number}: tokens identical: {len(digests) == 1}")
        except RuntimeError:
            for log in folder.glob("*.log"):
                print(log.name, *log.read_text().splitlines()[-12:], sep="\n")
            raise
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    report(rounds)
    if args.json:
        figures = {"machine": show_machine(), "rounds": rounds}
        write_figures(args.json, figures)


def report(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians, with the least and the most."""

    def spread(values: list[float]) -> str:
        middle = statistics.median(values)
        return f"{middle:.4g} [{min(values):.4g}, {max(values):.4g}]"

    base = [figures["tokens_per_s"] for figures in rounds["copying"]]
    for name, by_round in rounds.items():
        rates = [figures["tokens_per_s"] for figures in by_round]
        ratios = [rate / base_rate for rate, base_rate in zip(rates, base, strict=True)]
        print(
            f"{name:12} {spread(rates)} tokens/s, of copying's {spread(ratios)}",
            flush=True,
        )
        if "us" not in by_round[0]:
            continue
        last = by_round[-1]
        print(
            f"{'':12} a step takes {spread([row['step_ms'] for row in by_round])} ms; "
            f"{last['num_stored']} blocks stored, {last['num_dropped']} dropped; "
            f"nothing moves in {last['num_still']} of {last['num_steps']} steps"
        )
        print(f"{'':12} us of the engine's thread a step, and where nothing moves")
        for call in last["us"]:
            us, still_us = (
                spread([figures[key].get(call, 0.0) for figures in by_round])
                for key in ("us", "still_us")
            )
            print(f"{'':14}{call:32}{us:28}{still_us}")


if __name__ == "__main__":
    main()
