"""Scheduling time per step, next to the Python that it replaces.

Five tables, each against the twin of vLLM 0.19.1's `SimpleCPUOffloadScheduler` in
`tests/reference`. Two engines make the same calls by turns in the same process, one to
jaxkv's pool and scheduler, one to the twin's; what is loaded and stored is compared as
it goes. Transfers complete in the step that starts them. Some requests run, with
prompts of the same length, whose blocks were stored; beside them

- decode: nothing happens;
- arrival: a prompt comes that is on the host but not on the device, and is loaded;
- loaded: that prompt is scheduled, now that it is there;
- prefill: an unknown prompt comes, and is computed and stored in chunks of
  8,192 tokens, in a host tier that is full;
- lazy: the same, but blocks are stored only when the device is about to evict them.
  Not compared, as the twin leaves blocks out; the blocks stored by each are printed.

"hooks" are the calls to the offload scheduler, "pool" what the engine itself asks of
the device's pool. Where several steps make a round, it is their mean.

The garbage collector leaves what was made before the rounds alone.

    python benchmarks/scheduler.py [--tables NAME ...] [--requests N ...]
                                   [--prompts TOKENS ...] [--max-blocks N] [--json FILE]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from common import (
    compared,
    compared_text,
    make_parser,
    old_garbage_left_alone,
    random_keys,
    show_machine,
    write_figures,
)
from engine_calls import BLOCK_SIZE, CHUNK_TOKENS, Engine, Jaxkv, Prompt, Twin

ROUNDS = 20
_WARM_ROUNDS = 3

Row = dict[str, Any]


class Workload:
    """Two engines with the same requests running, and prompts for more."""

    def __init__(self, num_requests: int, num_tokens: int, lazy: bool = False) -> None:
        self.num_blocks = num_tokens // BLOCK_SIZE
        self._rng = np.random.default_rng(0)
        self._names = map(str, itertools.count())
        num_held = num_requests * (self.num_blocks + 1)
        num_spare = 2 * self.num_blocks + 4 * CHUNK_TOKENS // BLOCK_SIZE
        self.engines = [
            Engine(
                make(
                    num_device_blocks=1 + num_held + num_spare,
                    # In lazy mode, also room for blocks that wait on the device.
                    num_host_blocks=(num_requests + 2) * self.num_blocks
                    + lazy * 2 * num_spare,
                    lazy=lazy,
                )
            )
            for make in (Jaxkv, Twin)
        ]
        for _ in range(num_requests):
            for engine, prompt in zip(self.engines, self.new_prompts(), strict=True):
                # Alone, so that their number does not slow this down.
                running, engine.running = engine.running, []
                engine.run(prompt)
                engine.running = [*running, prompt]
        if lazy:  # Let there be something in whatever the device evicts.
            for _ in range(num_spare // self.num_blocks + 1):
                prompts = self.new_prompts()
                for engine, prompt in zip(self.engines, prompts, strict=True):
                    running, engine.running = engine.running, []
                    engine.serve(prompt)
                    engine.running = running

    def new_prompts(self) -> list[Prompt]:
        """Make an unknown prompt for each engine."""
        keys = random_keys(self._rng, self.num_blocks)
        name = next(self._names)
        return [Prompt(name, keys) for _ in self.engines]


def compare(work: Workload, prompts: Callable[[], Any], run: Any, check: bool) -> Row:
    """Time a round of both engines by turns.

    Returns the quartiles of both sides' times a step, in us, and of the ratios of the
    twin's to jaxkv's, for the hooks and for the pool; and blocks stored a round.
    """
    times_us: dict[str, tuple[list[float], list[float]]] = {
        "hooks": ([], []),
        "pool": ([], []),
    }
    stored: tuple[list[int], list[int]] = ([], [])
    with old_garbage_left_alone():
        for round_number in range(_WARM_ROUNDS + ROUNDS):
            for number, (engine, prompt) in enumerate(
                zip(work.engines, prompts(), strict=True)
            ):
                engine.start_clock()
                clean_up = run(engine, prompt)
                if round_number >= _WARM_ROUNDS:
                    for what, spent_s in engine.spent_s.items():
                        times_us[what][number].append(1e6 * spent_s / engine.num_steps)
                    steps = [move for move in engine.moved if isinstance(move, tuple)]
                    stored[number].append(sum(len(move[1]) for move in steps))
                if clean_up is not None:
                    clean_up()
            if check:
                assert work.engines[0].moved == work.engines[1].moved
    row: Row = {"blocks_stored": [sum(num) / ROUNDS for num in stored]}
    for what, (ours, theirs) in times_us.items():
        if any(theirs):
            row[what] = compared(ours, theirs)
    return row


def time_decode(num_requests: int, num_tokens: int) -> Row:
    """Time a step without anything new."""
    work = Workload(num_requests, num_tokens)

    def run(engine: Engine, _: None) -> None:
        engine.step()

    return compare(work, lambda: [None, None], run, check=True)


def time_arrival(num_requests: int, num_tokens: int, then: bool = False) -> Row:
    """Time a step with a prompt that is on the host but not on the device."""
    work = Workload(num_requests, num_tokens)
    prompts = work.new_prompts()
    for engine, prompt in zip(work.engines, prompts, strict=True):
        engine.serve(prompt)
        engine.side.forget(prompt.block_ids)

    def run(engine: Engine, prompt: Prompt) -> Callable[[], None]:
        engine.admit(prompt)
        assert prompt.num_computed_tokens == num_tokens
        engine.step()
        if then:
            engine.start_clock()
            engine.resume(prompt)

        def clean_up() -> None:
            engine.finish(prompt)
            engine.side.forget(prompt.block_ids)

        return clean_up

    return compare(work, lambda: prompts, run, check=True)


def time_loaded(num_requests: int, num_tokens: int) -> Row:
    """Time the step after `time_arrival`."""
    return time_arrival(num_requests, num_tokens, then=True)


def time_prefill(num_requests: int, num_tokens: int) -> Row:
    """Time the steps of a new prompt, all of which is stored."""
    return compare(
        work := Workload(num_requests, num_tokens),
        work.new_prompts,
        lambda engine, prompt: engine.serve(prompt),
        check=True,
    )


def time_lazy(num_requests: int, num_tokens: int) -> Row:
    """Time the steps of a new prompt that pushes others out of the device."""
    return compare(
        work := Workload(num_requests, num_tokens, lazy=True),
        work.new_prompts,
        lambda engine, prompt: engine.serve(prompt),
        check=False,
    )


TABLES = {
    "decode": time_decode,
    "arrival": time_arrival,
    "loaded": time_loaded,
    "prefill": time_prefill,
    "lazy": time_lazy,
}


def measure(
    tables: list[str], requests: list[int], prompts: list[int], max_blocks: int
) -> Iterator[Row]:
    """Measure all tables, except rows that would take too much memory."""
    for num_requests, num_tokens in itertools.product(requests, prompts):
        if num_requests * num_tokens > max_blocks * BLOCK_SIZE:
            continue
        for table in tables:
            row = TABLES[table](num_requests, num_tokens)
            yield {
                "table": table,
                "requests": num_requests,
                "prompt_tokens": num_tokens,
                **row,
            }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1 << 10, 1 << 13, 1 << 15, 1 << 17]
    )
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument(
        "--max-blocks",
        type=int,
        default=1 << 18,
        help="leave out what would keep more device blocks for running requests",
    )
    args = parser.parse_args()
    where = show_machine()
    print(f"median us a step of {ROUNDS} rounds, jaxkv / twin, and the ratio")
    rows = []
    for row in measure(args.tables, args.requests, args.prompts, args.max_blocks):
        rows.append(row)
        for what in row:
            if isinstance(row[what], dict):
                print(
                    f"requests {row['requests']:4}  prompt {row['prompt_tokens']:7}  "
                    f"{row['table']:8} {what:12}{compared_text(row[what])}",
                    flush=True,
                )
        if row["table"] == "lazy":
            print(
                "blocks stored a round: {:.0f} / {:.0f}".format(*row["blocks_stored"])
            )
    settings = {
        "block_size": BLOCK_SIZE,
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": ROUNDS,
    }
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
