"""Mixed traffic in a real engine under each cache policy, with a host tier too small.

Chats that return with several turns, coding agents with long common system prompts and
many tool calls, and documents that are asked about once: a trace that `jaxkv plan`
reads. A block's tokens are drawn by its id, and blocks that an answer filled have the
answer's tokens. Each policy has an engine in a process of its own, as has an engine
without offloading. They take turns, with as many requests of the trace each, two at a
time. The policy's clock is the trace's.

It prints whether all tokens are equal, the prompt tokens found, the blocks copied, and
the time to first token: median, mean, and the quartiles of the parts' means, divided by
the first policy's. Times leave out the first parts, as engines compile then.

    python benchmarks/mixed_traffic.py [--engine demo | vllm] [--policies NAME ...]
        [--sessions N] [--trace FILE] [--json FILE]

Run it with `--engine vllm` where `.ci/vllm` has installed vLLM.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from common import (
    ROOT,
    answer,
    ask,
    make_parser,
    quartiles,
    questions,
    show_machine,
    spread,
    start,
    write_figures,
)

sys.path.insert(0, str(ROOT / "tests/integrations"))
BLOCK, CONCURRENCY = 16, 2
PARTS, WARM_PARTS = 20, 5
WITHOUT = "none"


class Size(NamedTuple):
    """The size of an engine."""

    max_tokens: int
    device_blocks: int
    host_blocks: int

    def over(self, divisor: int) -> Size:
        return Size(*(size // divisor for size in self))


SIZE = Size(2560, 360, 600)


class Sort(NamedTuple):
    """A sort of session; lengths are means."""

    share: float  # Of the sessions
    systems: tuple[int, ...]  # Blocks of its system prompts; a session has one of them
    turns: tuple[int, int]  # The fewest and the most
    first_tokens: int  # Of the first turn, after the system prompt
    more_tokens: int  # Of each later turn
    answer_tokens: int
    pause_s: float
    stop: str  # Of all turns but the last


SORTS = (
    Sort(0.45, (4,), (1, 7), 160, 48, 24, 60.0, "end_turn"),
    Sort(0.15, (32, 24), (6, 16), 64, 96, 16, 4.0, "tool_use"),
    Sort(0.40, (4,), (1, 1), 960, 0, 24, 0.0, "end_turn"),
)
SESSION_EVERY_S = 1.5


def make_requests(num_sessions: int, divisor: int) -> list[dict[str, Any]]:
    """Make the lines of a trace, in order of arrival, with lengths over `divisor`."""
    rng, fresh = random.Random(0), itertools.count()
    systems = [
        [list(itertools.islice(fresh, num // divisor)) for num in sort.systems]
        for sort in SORTS
    ]
    requests: list[dict[str, Any]] = []
    start_s = 0.0
    for _ in range(num_sessions):
        start_s += rng.expovariate(1 / SESSION_EVERY_S)
        [number] = rng.choices(range(len(SORTS)), [sort.share for sort in SORTS])
        sort, ids = SORTS[number], list(rng.choice(systems[number]))
        num_tokens, num_answer = BLOCK * len(ids), sort.answer_tokens // divisor
        now_s, num_turns = start_s, rng.randint(*sort.turns)
        for turn in range(num_turns):
            mean = (sort.more_tokens if turn else sort.first_tokens) // divisor
            num_tokens += rng.randint(mean // 2, mean + mean // 2)
            ids += itertools.islice(fresh, num_tokens // BLOCK - len(ids))
            num_after = (num_tokens + num_answer) // BLOCK
            filled = list(itertools.islice(fresh, num_after - len(ids)))
            is_last = turn == num_turns - 1
            requests.append(
                {
                    "t": round(1000 * now_s, 3),
                    "in": num_tokens,
                    "out": num_answer,
                    "stop": "end_turn" if is_last else sort.stop,
                    "ids": list(ids),
                    "out_ids": filled,
                }
            )
            ids += filled
            num_tokens += num_answer
            now_s += 1 + sort.pause_s * rng.expovariate(1)
    return sorted(requests, key=lambda request: request["t"])


def write_trace(path: pathlib.Path, requests: Iterable[dict[str, Any]]) -> None:
    from jaxkv.scheduling.record.record import FORMAT

    lines = {"format": FORMAT, "block_size": BLOCK}, *requests
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class Answer(NamedTuple):
    """An engine's answer to a request."""

    number: int
    tokens: list[int]
    num_found: int  # Prompt tokens found on the device or the host
    ttft_s: float


class Demo:
    """The demo's engine and model."""

    def __init__(self, policy: str, size: Size, folder: pathlib.Path) -> None:
        from jaxkv import OffloadConfig
        from jaxkv.tools.demo.engine import Engine, EngineRequest
        from jaxkv.tools.demo.model import ModelConfig
        from jaxkv.tools.demo.records import EngineConfig
        from jaxkv.tools.demo.steps import make_steps

        offload = None
        if policy != WITHOUT:
            offload = OffloadConfig(
                num_host_blocks=size.host_blocks, cache_policy=policy
            )
        config = EngineConfig(
            block_size=BLOCK,
            device_blocks=size.device_blocks,
            concurrency=CONCURRENCY,
            max_seq_tokens=size.max_tokens,
            weights_epoch="random",
            offload=offload,
        )
        self._engine = Engine(make_steps(ModelConfig(), seed=0), config)
        self._engine.warm_up()
        self.scheduler = self._engine.offload
        self._numbers: dict[EngineRequest, int] = {}

    def submit(self, number: int, prompt: list[int], request: dict[str, Any]) -> None:
        submitted: Any = self._engine.submit(prompt, request["out"])
        submitted.stop = request["stop"]
        self._numbers[submitted] = number

    def step(self) -> list[Answer]:
        return [
            Answer(
                self._numbers.pop(request),
                list(request.generated),
                request.device_hit_tokens + request.host_hit_tokens,
                request.ttft_s,
            )
            for request in self._engine.step()
        ]

    def settle(self) -> None:
        self._engine.drain()


class Vllm:
    """The real vLLM and tpu-inference on the CPU, with a small random Llama."""

    def __init__(self, policy: str, size: Size, folder: pathlib.Path) -> None:
        from vllm import LLM
        from vllm_cpu.run import engine_arguments

        extra = {"num_cpu_blocks": size.host_blocks, "eviction_policy": policy}
        options = {
            "model": "llama-float32",
            "num_blocks": size.device_blocks,
            "extra": None if policy == WITHOUT else extra,
            "engine": {
                "max_num_seqs": CONCURRENCY,
                "max_num_batched_tokens": 64,
                "max_model_len": size.max_tokens,
            },
        }
        self._engine = LLM(**engine_arguments(folder, options)).llm_engine
        self._core = self._engine.engine_core.engine_core.scheduler
        self.scheduler: Any = None
        if policy != WITHOUT:
            self.scheduler = self._core.connector._scheduler.scheduler
        self._submitted_s: dict[str, float] = {}
        self._ttft_s: dict[str, float] = {}

    def submit(self, number: int, prompt: list[int], request: dict[str, Any]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=request["out"], temperature=0, ignore_eos=True, detokenize=False
        )
        self._submitted_s[str(number)] = time.perf_counter()
        inputs = {"prompt_token_ids": prompt}
        self._engine.add_request(str(number), inputs, params)

    def step(self) -> list[Answer]:
        answers = []
        for output in self._engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            if tokens and name in self._submitted_s:
                took_s = time.perf_counter() - self._submitted_s.pop(name)
                self._ttft_s[name] = took_s
            if output.finished:
                ttft_s = self._ttft_s.pop(name)
                answers.append(
                    Answer(int(name), tokens, output.num_cached_tokens, ttft_s)
                )
        return answers

    def settle(self) -> None:
        while self.scheduler is not None and self._core.has_requests():
            self._engine.step()


# What serves, and a divisor of all lengths and sizes: vLLM is slow on the CPU.
ENGINES = {"demo": (Demo, 1), "vllm": (Vllm, 4)}


def serve(folder: pathlib.Path, case: dict[str, Any]) -> None:
    """Serve the parts of the trace that are asked for."""
    requests = json.loads((folder / "requests.json").read_text())
    make_server, divisor = ENGINES[case["engine"]]
    server = make_server(case["policy"], SIZE.over(divisor), folder)
    now_s = 0.0
    if server.scheduler is not None:
        server.scheduler._book._clock = lambda: now_s
    filled: dict[int, list[int]] = {}

    def tokens_of(block: int) -> list[int]:
        return filled.get(block) or random.Random(block).choices(range(256), k=BLOCK)

    for first, last in questions():
        answers: list[Answer] = []
        prompts: dict[int, list[int]] = {}
        pending = collections.deque(range(first, last))
        while pending or prompts:
            awaited = {id for number in prompts for id in requests[number]["out_ids"]}
            while pending and len(prompts) < CONCURRENCY:
                request = requests[pending[0]]
                if not awaited.isdisjoint(request["ids"]):
                    break  # It continues an answer.
                number = pending.popleft()
                prompt = [token for id in request["ids"] for token in tokens_of(id)]
                prompt += tokens_of(-1 - number)[: request["in"] - len(prompt)]
                now_s = request["t"] / 1000
                server.submit(number, prompt, request)
                prompts[number] = prompt
                awaited |= set(request["out_ids"])
            for done in server.step():
                said = prompts.pop(done.number) + done.tokens
                ids = requests[done.number]["ids"] + requests[done.number]["out_ids"]
                for place, id in enumerate(ids):
                    filled[id] = said[BLOCK * place : BLOCK * (place + 1)]
                answers.append(done)
        server.settle()
        stats = server.scheduler.stats if server.scheduler is not None else None
        answer(
            {
                "tokens": {done.number: done.tokens for done in answers},
                "ttft_s": [done.ttft_s for done in answers],
                "found": sum(done.num_found for done in answers),
                "host_found": stats.num_host_hit_tokens if stats else 0,
                "stored": stats.num_stored if stats else 0,
                "loaded": stats.num_loaded if stats else 0,
                "declined": stats.num_declined if stats else 0,
            }
        )
    os._exit(0)  # What vLLM would end slowly, or not at all.


def start_case(folder: pathlib.Path, engine: str, policy: str) -> subprocess.Popen[str]:
    env = {"JAX_PLATFORMS": "cpu"}
    if engine == "vllm":
        from vllm_cpu import lab

        env = lab.environ(folder)
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    case = json.dumps({"engine": engine, "policy": policy})
    return start(__file__, str(folder), case, env=env, log=folder / f"{policy}.log")


def measure(
    engine: str, policies: Sequence[str], requests: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Serve the requests under all policies by turns; return each one's parts."""
    parts: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    bounds = [len(requests) * part // PARTS for part in range(PARTS + 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "requests.json").write_text(json.dumps(requests))
        if engine == "vllm":
            from vllm_cpu import lab

            lab.make_lab(folder)
        processes = {policy: start_case(folder, engine, policy) for policy in policies}
        try:
            for number, span in enumerate(itertools.pairwise(bounds)):
                for policy, process in processes.items():
                    parts[policy].append(ask(process, *span))
                print(f"part {number + 1} of {PARTS}", file=sys.stderr, flush=True)
        except (RuntimeError, OSError):
            for log in folder.glob("*.log"):
                print(log.name, *log.read_text().splitlines()[-12:], sep="\n")
            raise
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    return parts


def summary(
    parts: list[dict[str, Any]], base: list[dict[str, Any]], num_tokens: int
) -> dict[str, Any]:
    """Sum up a policy's parts, and compare them with another policy's."""
    measured = [part["ttft_s"] for part in parts[WARM_PARTS:]]
    times_s = [time_s for part in measured for time_s in part]
    bases = [part["ttft_s"] for part in base[WARM_PARTS:]]
    pairs = zip(measured, bases, strict=True)
    ratios = [statistics.mean(ours) / statistics.mean(theirs) for ours, theirs in pairs]
    return {
        "found_percent": 100 * sum(part["found"] for part in parts) / num_tokens,
        "host_found_percent": 100 * parts[-1]["host_found"] / num_tokens,
        **{name: parts[-1][name] for name in ("stored", "loaded", "declined")},
        "ttft_ms": {
            "median": 1000 * statistics.median(times_s),
            "mean": 1000 * statistics.mean(times_s),
        },
        "ttft_mean_ms_of_parts": [1000 * statistics.mean(part) for part in measured],
        "ttft_ratio": quartiles(ratios),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--serve", nargs=2, help="for the processes that it starts")
    parser.add_argument("--engine", choices=ENGINES, default="demo")
    policies = ["lru", "arc", "hazard", WITHOUT]
    parser.add_argument("--policies", nargs="+", default=policies, metavar="NAME")
    parser.add_argument("--sessions", type=int, default=260)
    parser.add_argument("--trace", type=pathlib.Path, help="also write the trace here")
    args = parser.parse_args()
    if args.serve:
        serve(pathlib.Path(args.serve[0]), json.loads(args.serve[1]))
        return
    _, divisor = ENGINES[args.engine]
    requests = make_requests(args.sessions, divisor)
    if args.trace:
        write_trace(args.trace, requests)
    num_tokens = sum(request["in"] for request in requests)
    settings = {
        "engine": args.engine,
        "requests": len(requests),
        "prompt_tokens": num_tokens,
        "unique_blocks": len({id for row in requests for id in row["ids"]}),
        **SIZE.over(divisor)._asdict(),
    }
    where = show_machine(**settings)
    parts = measure(args.engine, args.policies, requests)
    tokens = [[part["tokens"] for part in parts[policy]] for policy in args.policies]
    is_equal = all(one == tokens[0] for one in tokens)
    print(f"tokens identical: {is_equal}")
    base, rows = parts[args.policies[0]], {}
    for policy in args.policies:
        row = rows[policy] = summary(parts[policy], base, num_tokens)
        print(
            f"{policy:8} found {row['found_percent']:5.1f}% (host "
            f"{row['host_found_percent']:4.1f}%), {row['stored']:6} blocks stored, "
            f"{row['loaded']:6} loaded, {row['declined']:6} declined; TTFT median "
            f"{row['ttft_ms']['median']:.0f} ms, mean {row['ttft_ms']['mean']:.0f}, of "
            f"{args.policies[0]}'s {spread(row['ttft_ratio'])}"
        )
    figures = {"machine": where, "tokens_identical": is_equal, "policies": rows}
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
