"""Cost of the transfer engine in the thread that owns it.

Processor time of the calling thread, not the time until the bytes are there:

- save, load: the calls that begin to move a piece, 8 MiB of all leaves together;
- write: the `advance` that writes a landed load into the pool (staged alone);
- report: the `poll` that reports it;
- advance, poll: with nothing in flight;
- jax_save, jax_load: what begins to move a piece by calls to jax alone, in the mode
  staged: a program that gathers all leaves, and the copy that `jax.device_put` ends in;
- saves, loads: 128 MiB in one call and `drain`, per GiB, with extents of the size that
  the engine takes for a tier of 1 GiB.

XLA:CPU copies some bytes in the calling thread, which accelerators do not. So all is
measured with blocks of a 128th of the size, too ("small"), which move next to nothing
in as many pieces: what full ones take above that is their bytes. Several
devices come from ``--xla_force_host_platform_device_count``.

With `--beside CHECKOUT` another version is measured by turns with this one, each in a
process of its own.

    python benchmarks/engine_thread.py [--beside CHECKOUT] [--devices N ...]
        [--leaves N ...] [--modes MODE ...] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import (
    ROOT,
    answer,
    ask,
    make_parser,
    quartiles,
    questions,
    show_machine,
    start,
    write_figures,
)

PIECE_BYTES = 8 << 20
PIECE_BLOCKS = 16
MOVED_BLOCKS = 256
TIER_BLOCKS = 2048
SMALLER = {"full": 1, "small": 128}
CALLS = 10


def clocked(times_us: list[float], call: Callable[..., Any], *args: Any) -> Any:
    """Call, note the processor time of this thread, and return the answer."""
    start_s = time.thread_time()
    answer = call(*args)
    times_us.append(1e6 * (time.thread_time() - start_s))
    return answer


class Case:
    """A pool and two engines, of pieces of 8 MiB and of the engine's choice."""

    def __init__(
        self,
        num_devices: int,
        num_leaves: int,
        mode: Any,
        size: str,
        full: Case | None,
    ) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding

        from jaxkv.transfer import TransferEngine
        from jaxkv.transfer.jax_internals import Carrier
        from jaxkv.transfer.memory import partition_spec

        place: Any = jax.devices()[0]
        if num_devices > 1:
            mesh = jax.make_mesh((num_devices,), ("model",))
            place = NamedSharding(mesh, partition_spec(None, "model"))
        row_bytes = PIECE_BYTES // PIECE_BLOCKS // num_leaves // SMALLER[size]
        leaf = jnp.ones((MOVED_BLOCKS, 8, max(1, row_bytes // 16)), jnp.bfloat16)
        self.pool = [jax.device_put(leaf + 1, place) for _ in range(num_leaves)]
        block_bytes = num_leaves * leaf.nbytes // MOVED_BLOCKS
        self.piece = TransferEngine(
            self.pool,
            8 * PIECE_BLOCKS,
            mode=mode,
            extent_bytes=PIECE_BLOCKS * block_bytes,
        )
        self.piece.warm_up()
        extent_bytes = None
        if size == "small":
            assert full is not None
            extent_bytes = full.extent_bytes // SMALLER[size]
        self.large = TransferEngine(
            self.pool, TIER_BLOCKS, mode=mode, extent_bytes=extent_bytes
        )
        self.large.warm_up()
        self.large.save(self.pool, [0], [0])
        # Of an extent of the engine's choice
        self.extent_bytes: int = self.large.bytes_in_flight
        self.pool, _ = self.large.drain(self.pool)
        self.carriers = [
            Carrier([leaf.sharding.with_memory_kind(kind) for leaf in self.pool])
            for kind in ("pinned_host", "device")
        ]
        self.rows = np.arange(PIECE_BLOCKS, dtype=np.int32)
        gather = jax.jit(lambda leaves, rows: [leaf[rows] for leaf in leaves])
        self.gather = gather.lower(self.pool, self.rows).compile()
        self.gib = MOVED_BLOCKS * block_bytes * SMALLER[size] / (1 << 30)
        self.turn = 0

    def time_pieces(self) -> dict[str, float]:
        """Move pieces; give the medians in us."""
        engine = self.piece
        names = "save", "load", "write", "report", "advance", "poll"
        times: dict[str, list[float]] = {name: [] for name in names}
        device_ids = list(range(PIECE_BLOCKS))
        for _ in range(CALLS):
            self.turn += 1
            host_ids = [PIECE_BLOCKS * (self.turn % 8) + n for n in device_ids]
            clocked(times["save"], engine.save, self.pool, device_ids, host_ids)
            self._wait(times["report"])
            self.pool, ticket = clocked(
                times["load"], engine.load, self.pool, host_ids, device_ids
            )
            writes_us = [0.0]
            while engine.is_waiting(ticket):
                time.sleep(0.002)
                self.pool = clocked(writes_us, engine.advance, self.pool)
            times["write"].append(writes_us[-1])
            self._wait(times["report"])
            self.pool = clocked(times["advance"], engine.advance, self.pool)
            clocked(times["poll"], engine.poll)
        return {name: statistics.median(times_us) for name, times_us in times.items()}

    def time_jax(self) -> dict[str, float]:
        """Move a piece by calls to jax alone; give the medians in us."""
        gathers_us, saves_us, loads_us = [], [], []
        to_host, to_device = self.carriers
        for _ in range(CALLS):
            rows = clocked(gathers_us, self.gather, self.pool, self.rows)
            on_host = clocked(saves_us, to_host.copy, tuple(rows))
            time.sleep(0.004)
            arrived = clocked(loads_us, to_device.copy, on_host)
            time.sleep(0.004)  # As long as the engine's calls are apart.
            del rows, on_host, arrived
        save_us = map(sum, zip(gathers_us, saves_us, strict=True))
        return {
            "jax_save": statistics.median(save_us),
            "jax_load": statistics.median(loads_us),
        }

    def _wait(self, report_us: list[float]) -> None:
        polls_us: list[float] = []
        done: list[Any] = []
        while not done:
            time.sleep(0.002)
            done = clocked(polls_us, self.piece.poll)
        report_us.append(polls_us[-1])

    def time_many(self) -> dict[str, float]:
        """Move many blocks; give the ms for each GiB (of full blocks)."""
        engine = self.large
        device_ids = list(range(MOVED_BLOCKS))
        start = MOVED_BLOCKS * (self.turn % (TIER_BLOCKS // MOVED_BLOCKS))
        host_ids = list(range(start, start + MOVED_BLOCKS))
        self.turn += 1
        saves_us: list[float] = []
        loads_us: list[float] = []
        clocked(saves_us, engine.save, self.pool, device_ids, host_ids)
        self.pool, _ = clocked(saves_us, engine.drain, self.pool)
        self.pool, _ = clocked(loads_us, engine.load, self.pool, host_ids, device_ids)
        self.pool, _ = clocked(loads_us, engine.drain, self.pool)
        return {
            "saves": sum(saves_us) / 1e3 / self.gib,
            "loads": sum(loads_us) / 1e3 / self.gib,
        }


def serve(checkout: str, num_devices: int) -> None:
    """Measure one version: a case for each question."""
    sys.path.insert(0, checkout)
    import jaxkv

    assert pathlib.Path(checkout) in pathlib.Path(str(jaxkv.__file__)).parents
    case: Case | None = None
    now = None
    for question in questions():
        if question != now:
            case = Case(num_devices, *question, case)
            case.time_pieces()
            case.time_many()
            now = question
        assert case is not None
        answer(case.time_pieces() | case.time_jax() | case.time_many())


def main() -> None:
    parser = make_parser(__doc__, rounds=7, beside=True)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--leaves", type=int, nargs="+", default=[4, 32, 80])
    parser.add_argument("--modes", nargs="+", default=["staged", "fused"])
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]))
        return
    checkouts = {"here": ROOT}
    if args.beside:
        checkouts["beside"] = args.beside.resolve()
    rows: list[dict[str, Any]] = []
    print("us a call (saves, loads: ms a GiB), medians; quartiles of save and load")
    for devices in args.devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        env = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        versions = {
            name: start(__file__, str(path), str(devices), env=env)
            for name, path in checkouts.items()
        }
        for leaves, mode, size in itertools.product(args.leaves, args.modes, SMALLER):
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
            for _ in range(args.rounds):
                for name, process in versions.items():
                    rounds[name].append(ask(process, leaves, mode, size))
            for name, answers in rounds.items():
                figures = {
                    what: quartiles([times[what] for times in answers])
                    for what in answers[0]
                }
                row = {"version": name, "devices": devices, "leaves": leaves}
                rows.append({**row, "mode": mode, "size": size, "quartiles": figures})
                print(
                    f"{devices} devices {leaves:2} leaves {mode:6} {size:5} {name:6} ",
                    *(f"{what} {of[1]:.1f}" for what, of in figures.items()),
                    *(
                        f"[{of[0]:.0f}, {of[2]:.0f}]"
                        for what, of in figures.items()
                        if what in ("save", "load")
                    ),
                    flush=True,
                )
        for process in versions.values():
            assert process.stdin
            process.stdin.close()
            process.wait()
    if args.json:
        where = show_machine()
        figures = {"machine": where, "rounds": args.rounds, "rows": rows}
        write_figures(args.json, figures)


if __name__ == "__main__":
    main()
