"""How long do the host tier's decisions take, beside the Python that they replace?

For every batch size and capacity: each operation of `jaxkv.manager`, and a whole
request (look up, touch, pin hits, find room for the rest, complete), against
`ordered_dict_twin.py`. Both serve the same requests by turns, half of each known and
half new, in a tier that is full, and their answers are compared as they go. Times are
of whole calls: keys as bytes in, block ids as NumPy out.

    python benchmarks/policy.py [--capacities N ...] [--batches N ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from common import machine, quartiles
from jaxkv import manager
from jaxkv.keys import keys_to_lanes
from jaxkv.policies import make_lru
from ordered_dict_twin import Manager

OPERATIONS = (
    "lookup",
    "touch",
    "load",
    "store",
    "request",
)
ROUNDS = 40
_FILL_BATCH = 4096


class Tier:
    """jaxkv's side: a state and the jitted functions that update it."""

    def __init__(self, capacity: int) -> None:
        policy = make_lru(capacity)
        self.state = manager.init(policy, capacity)
        self._lookup = jax.jit(functools.partial(manager.lookup, policy))

        def donating(function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
            return jax.jit(functools.partial(function, *bound), donate_argnums=0)

        self._touch = donating(manager.touch, policy)
        self._prepare_load = donating(manager.prepare_load, policy)
        self._complete_load = donating(manager.complete_load, policy)
        self._prepare_store = donating(manager.prepare_store, policy)
        self._complete_store = donating(manager.complete_store, policy)
        self._request_step = donating(manager.request_step, policy)
        self._complete_step = donating(manager.complete_step)

    def lookup(self, keys: list[bytes]) -> int:
        return int(self._lookup(self.state, *_batch(keys)))

    def touch(self, keys: list[bytes]) -> None:
        self.state = jax.block_until_ready(self._touch(self.state, *_batch(keys)))

    def load(self, keys: list[bytes]) -> list[int]:
        self.state, answer = self._prepare_load(self.state, *_batch(keys))
        block_ids = np.asarray(answer.block_ids)
        self.state, _ = self._complete_load(self.state, *_batch(keys))
        jax.block_until_ready(self.state)
        return block_ids.tolist()

    def store(self, keys: list[bytes]) -> list[int]:
        self.state, answer = self._prepare_store(self.state, *_batch(keys))
        block_ids = np.asarray(answer.block_ids)
        self.state, _ = self._complete_store(self.state, *_batch(keys), np.bool_(True))
        jax.block_until_ready(self.state)
        return block_ids[block_ids >= 0].tolist()

    def request(self, keys: list[bytes]) -> list[int]:
        self.state, answer = self._request_step(self.state, *_batch(keys))
        block_ids = np.asarray(answer.block_ids)
        self.state = self._complete_step(self.state, answer.block_ids, answer.num_hits)
        jax.block_until_ready(self.state)
        return block_ids.tolist()


class Twin(Manager):
    """The other side, with the same calls."""

    def load(self, keys: list[bytes]) -> list[int]:
        block_ids = self.prepare_load(keys)
        self.complete_load(keys)
        return block_ids.tolist()

    def store(self, keys: list[bytes]) -> list[int]:
        answer = self.prepare_store(keys)
        assert answer is not None
        self.complete_store(keys)
        return answer[1].tolist()

    def request(self, keys: list[bytes]) -> list[int]:
        hits = self.lookup(keys)
        self.touch(keys)
        loaded = self.prepare_load(keys[:hits])
        answer = self.prepare_store(keys[hits:])
        assert answer is not None
        self.complete_store(keys[hits:])
        self.complete_load(keys[:hits])
        return [*loaded.tolist(), *answer[1].tolist()]


def _batch(keys: list[bytes]) -> tuple[Any, np.int32]:
    return keys_to_lanes(keys), np.int32(len(keys))


def measure(capacity: int, batch: int) -> dict[str, dict[str, list[float]]]:
    """Time both sides on one batch size and capacity.

    Returns:
        For each operation the quartiles of both sides' times, in us, and of the
        ratios of twin to jaxkv, round by round.
    """
    rng = np.random.default_rng(0)

    def new_keys(num: int) -> list[bytes]:
        data = rng.bytes(32 * num)
        return [data[i : i + 32] for i in range(0, len(data), 32)]

    tier, twin = Tier(capacity), Twin(capacity)
    for _ in range(-(-capacity // _FILL_BATCH)):
        keys = new_keys(_FILL_BATCH if capacity >= _FILL_BATCH else capacity)
        assert tier.store(keys) == twin.store(keys)
    known = keys[:batch]
    times_us: dict[str, tuple[list[float], list[float]]] = {
        operation: ([], []) for operation in OPERATIONS
    }
    for round_number in range(ROUNDS + 2):
        half = batch // 2
        mixed = known[:half] + new_keys(batch - half)
        for operation in OPERATIONS:
            arguments = {"store": new_keys(batch), "request": mixed}
            keys = arguments.get(operation, known)
            answers = []
            for side, spent in zip((tier, twin), times_us[operation], strict=True):
                start_s = time.perf_counter()
                answers.append(getattr(side, operation)(keys))
                if round_number >= 2:
                    spent.append(1e6 * (time.perf_counter() - start_s))
            assert answers[0] == answers[1], operation
            if operation == "request":
                known = mixed
    return {
        operation: {
            "jaxkv_us": quartiles(ours),
            "twin_us": quartiles(theirs),
            "twin_over_jaxkv": quartiles(
                [b / a for a, b in zip(ours, theirs, strict=True)]
            ),
        }
        for operation, (ours, theirs) in times_us.items()
    }


def main() -> None:
    """Measure, print a table and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=[1 << 10, 1 << 14, 1 << 18, 1 << 20],
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    where = machine()
    print(*(f"{key} {value}" for key, value in where.items()), sep=", ")
    print(f"LRU; median us of {ROUNDS} calls, jaxkv / twin, and the ratio [quartiles]")
    rows = []
    for capacity in args.capacities:
        for batch in args.batches:
            if batch > capacity // 2:
                continue
            figures = measure(capacity, batch)
            rows.append({"capacity": capacity, "batch": batch, **figures})
            for operation, row in figures.items():
                low, ratio, high = row["twin_over_jaxkv"]
                print(
                    f"capacity {capacity:8}  batch {batch:5}  {operation:8}"
                    f"{row['jaxkv_us'][1]:9.0f} /{row['twin_us'][1]:9.0f}"
                    f"   {ratio:6.2f} [{low:.2f}, {high:.2f}]",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": where, "policy": "lru", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
