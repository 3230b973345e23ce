"""Time until an engine finds its blocks again on the same host after `kill -9`.

The engine of `jaxkv demo` writes all blocks through to a folder in /dev/shm. It is
killed after its last answer. A new process then answers the same prompts. Both share a
cache of compiled programs (`JAX_COMPILATION_CACHE_DIR`), as servers do. Printed are
the seconds from the kill until the new process runs, has compiled, has listed the store
and has answered its first prompt, the tokens that it found, and the memory that the
store takes. Both processes must generate the same tokens. `engine_step.py` measures
what the store adds to a step of the engine's thread, there if TMPDIR is /dev/shm.

    python benchmarks/crash.py [--folder DIR] [--prompts N] [--tokens N] [--rounds R]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

from common import (
    answer,
    ask,
    make_parser,
    questions,
    show_machine,
    start,
    write_figures,
)

BLOCK_TOKENS, NEW_TOKENS = 32, 4
STAGES = {
    "running_s": "the process runs",
    "compiled_s": "all is compiled",
    "listed_s": "the store is listed",
    "first_answer_s": "the first prompt is answered",
}


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--folder", default="/dev/shm", help="where the store is made")
    parser.add_argument("--prompts", type=int, default=16, metavar="N")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    where = show_machine(prompts=args.prompts, tokens=args.tokens)
    lives = [measure(args) for _ in range(args.rounds)]
    for name, text in STAGES.items():
        print(f"{statistics.median(life[name] for life in lives):6.2f} s  {text}")
    life = lives[-1]
    print(
        f"{life['hit_tokens']} of {life['full_block_tokens']} tokens in full blocks "
        f"found; first answer in {1e3 * life['ttft_s']:.0f} ms, "
        f"{1e3 * life['cold_ttft_s']:.0f} ms before; {life['held_bytes'] >> 10} KiB of "
        f"memory for {life['kv_bytes'] >> 10} KiB of KV"
    )
    write_figures(args.json, {"machine": where, "rounds": lives})


def measure(args: Any) -> dict[str, Any]:
    """Kill an engine after its last answer, and measure the next one."""
    rng = random.Random(0)
    prompts = [rng.choices(range(256), k=args.tokens) for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        words = [__file__, f"{folder}/kv", str(args.tokens + NEW_TOKENS)]
        env = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with start(*words, env=env) as engine:
            cold = ask(engine, *prompts)
            engine.kill()
        killed_s = time.time()
        with start(*words, env=env) as engine:
            warm = ask(engine, *prompts)
            engine.kill()
        if warm["generated"] != cold["generated"]:
            raise SystemExit("the new process generated other tokens")
        files = [path.stat() for path in pathlib.Path(folder).rglob("*.0")]
    return {name: warm[name] - killed_s for name in STAGES} | {
        "hit_tokens": warm["hit_tokens"],
        # The engine computes at least the last token of a prompt.
        "full_block_tokens": args.prompts
        * ((args.tokens - 1) // BLOCK_TOKENS)
        * BLOCK_TOKENS,
        "ttft_s": warm["ttft_s"],
        "cold_ttft_s": cold["ttft_s"],
        "kv_bytes": len(files) * warm["block_bytes"],
        "held_bytes": sum(512 * file.st_blocks for file in files),
    }


def serve(folder: str, max_tokens: str) -> None:
    """Answer prompts as an engine that writes all its blocks through."""
    running_s = time.time()
    from jaxkv import OffloadConfig
    from jaxkv.tools.demo.engine import Engine
    from jaxkv.tools.demo.model import ModelConfig
    from jaxkv.tools.demo.records import EngineConfig
    from jaxkv.tools.demo.steps import make_steps

    blocks_each = -(-int(max_tokens) // BLOCK_TOKENS)
    for prompts in questions():
        engine = Engine(
            make_steps(ModelConfig(), seed=0),
            EngineConfig(
                block_size=BLOCK_TOKENS,
                device_blocks=4 * blocks_each + 8,
                concurrency=4,
                max_seq_tokens=int(max_tokens),
                weights_epoch="0",
                offload=OffloadConfig(
                    num_host_blocks=blocks_each * (len(prompts) + 4),
                    storage=folder,
                    storage_write="through",
                ),
            ),
        )
        engine.warm_up()
        compiled_s = time.time()
        engine.list_storage()
        listed_s = time.time()
        first = engine.submit(prompts[0], NEW_TOKENS)
        while engine.has_work:
            engine.step()
        first_answer_s = time.time()
        requests = [engine.submit(prompt, NEW_TOKENS) for prompt in prompts[1:]]
        while engine.has_work:
            engine.step()
        assert engine.transfer is not None
        requests.insert(0, first)
        answer(
            {
                "running_s": running_s,
                "compiled_s": compiled_s,
                "listed_s": listed_s,
                "first_answer_s": first_answer_s,
                "ttft_s": first.first_token_s - first.arrival_s,
                "hit_tokens": sum(request.host_hit_tokens for request in requests),
                "block_bytes": engine.transfer.block_bytes,
                "generated": [request.generated for request in requests],
            }
        )


if __name__ == "__main__":
    main()
