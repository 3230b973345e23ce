"""Time of the host tier's decisions, next to the Python that they replace.

Three tables, each against `ordered_dict_twin.py`, served the same requests by turns in
the same process; the answers are compared as they go. Tiers are full, and half of a
request's blocks are known, half new.

- calls: `OffloadingManager`'s operations and a whole request (look up, touch, pin the
  hits, find room for the rest, complete both), keys as bytes in, lists out; and
  "packed", the same request with keys laid out before and block ids as a NumPy array
  out, as a caller has it that asks about the same keys again and again.
- scan: a whole trace of requests in one `lax.scan` of `host_state.request_step`.
- arc: ARC's store with eviction, against a twin that looks for every victim from the
  front of its list, as vLLM 0.19.1 does, and one that goes on where it was.
- policies: a whole request by each policy, against LRU in place of a twin, with keys as
  bytes and "packed"; a policy that listens is notified of begin and end.
- retention: a whole request with priorities around a policy, given to no block, to one
  in a hundred and to all that are there first; against the policy alone.

    python benchmarks/policy.py [--tables NAME ...] [--capacities N ...]
                                [--batches N ...] [--executor xla] [--json FILE]
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from common import (
    compared,
    compared_text,
    make_parser,
    random_keys,
    show_machine,
    write_figures,
)
from jaxkv import OffloadingManager, Retention, make_lru, policy_names
from jaxkv.keys import PackedKeys, keys_to_words
from jaxkv.policies.facts import BEGIN, FINISH, begun, finished
from jaxkv.tiers import host_state
from ordered_dict_twin import ARC, Manager, RescanningARC

ROUNDS = 60
_WARM_ROUNDS = 2
_FILL_BATCH = 4096
_TRACE_BLOCKS = 1 << 16

Keys = list[bytes]
Side = Callable[[Any], Any]
Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # By operation


class Tier:
    """jaxkv's side."""

    executor: Any = "native"

    def __init__(
        self, capacity: int, policy: str = "lru", retention: bool = False
    ) -> None:
        self.manager = OffloadingManager(
            16, capacity, policy, retention=retention, executor=self.executor
        )
        self.now_ms = 0

    def lookup(self, keys: Keys) -> int:
        return self.manager.lookup(keys)

    def touch(self, keys: Keys) -> None:
        self.manager.touch(keys)
        self._wait()

    def prepare_load(self, keys: Keys) -> list[int]:
        block_ids: list[int] = self.manager.prepare_load(keys).block_ids.tolist()
        return block_ids

    def complete_load(self, keys: Keys) -> None:
        self.manager.complete_load(keys)
        self._wait()

    def store(self, keys: Keys) -> list[int]:
        output = self.manager.prepare_store(keys)
        assert output is not None
        self.manager.complete_store(keys)
        self._wait()
        return output.store_spec.block_ids.tolist()

    def request(self, keys: Keys) -> list[int]:
        step = self.manager.request_step(keys)
        self.manager.complete_step(step)
        self._wait()
        return [*step.load_spec.block_ids.tolist(), *_stored(step.store)]

    def told(self, keys: Keys) -> int:
        manager = self.manager
        if not manager.listens:
            self.request(keys)
            return len(keys)
        self.now_ms += 500
        mark = manager.begin_request(keys, 16 * len(keys), self.now_ms)
        self.request(keys)  # A policy may decline some.
        manager.finish_request(keys, mark, self.now_ms, num_output_tokens=100)
        self._wait()
        return len(keys)

    def told_packed(self, keys: PackedKeys) -> int:
        manager, executor = self.manager, self.manager.executor
        if not manager.listens:
            self.packed(keys)
            return len(keys)
        self.now_ms += 500
        where, words = np.arange(len(keys), dtype=np.int32), keys.words
        about = begun(self.now_ms, 16 * len(keys))
        mark = executor.note(words, BEGIN, where, about)
        self.packed(keys)
        executor.note(words, FINISH, where, finished(self.now_ms, 100, 0, mark))
        self._wait()
        return len(keys)

    def packed(self, keys: PackedKeys) -> Any:
        step = self.manager.executor.request_step(keys.words)
        assert self.manager.executor.complete_step(step.block_ids, step.num_hits)
        self._wait()
        return step.block_ids

    def _wait(self) -> None:
        """Wait for XLA; one array of the state is there when all are."""
        if self.executor == "xla":
            jax.tree.leaves(self.manager.executor.state)[0].block_until_ready()


def _stored(output: Any) -> list[int]:
    assert output is not None
    ids: list[int] = output.store_spec.block_ids.tolist()
    return ids


class Twin(Manager):
    """The other side, with the same calls."""

    def store(self, keys: Keys) -> list[int]:
        answer = self.prepare_store(keys)
        assert answer is not None
        self.complete_store(keys)
        return answer[1].tolist()

    def serve(self, keys: Keys) -> tuple[int, list[int]]:
        hits = self.lookup(keys)
        self.touch(keys)
        loaded = self.prepare_load(keys[:hits])
        answer = self.prepare_store(keys[hits:])
        assert answer is not None
        self.complete_store(keys[hits:])
        self.complete_load(keys[:hits])
        return hits, [*loaded.tolist(), *answer[1].tolist()]

    def request(self, keys: Keys) -> list[int]:
        return self.serve(keys)[1]

    def packed(self, keys: Keys) -> list[int]:
        return self.request(keys)


class Workload:
    """Keys for requests with half of their blocks known. Random, but repeatable."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def new(self, num: int) -> Keys:
        return random_keys(self.rng, num)

    def fill(self, capacity: int, *sides: Any) -> Keys:
        """Store as many blocks as there are, and give their keys."""
        stored: Keys = []
        for _ in range(-(-capacity // _FILL_BATCH)):
            keys = self.new(min(_FILL_BATCH, capacity))
            for side in sides:
                side.store(keys)
            stored += keys
        return stored

    def requests(self, batch: int) -> Iterator[Keys]:
        """Yield requests that begin as the one before did and end otherwise."""
        known_keys = self.new(batch // 2)
        while True:
            yield known_keys + self.new(batch - len(known_keys))


def compare(ours: Side, theirs: Side, argument: Callable[[], Any]) -> Row:
    """Time both sides on the same arguments by turns.

    Returns the quartiles of both sides' times, in us, and of the ratios of the twin's
    time to jaxkv's, round by round.
    """
    times_us: tuple[list[float], list[float]] = ([], [])
    for round_number in range(ROUNDS + _WARM_ROUNDS):
        value, answers = argument(), []
        for side, spent in zip((ours, theirs), times_us, strict=True):
            start_s = time.perf_counter()
            answers.append(side(value))
            if round_number >= _WARM_ROUNDS:
                spent.append(1e6 * (time.perf_counter() - start_s))
        ours_says, theirs_says = (
            [int(i) for i in answer] if np.ndim(answer) else answer
            for answer in answers
        )
        assert ours_says == theirs_says
    return compared(*times_us)


def time_calls(capacity: int, batch: int) -> Rows:
    """Time every operation of `OffloadingManager`, and a whole request."""
    work, tier, twin = Workload(), Tier(capacity), Twin(capacity)
    work.fill(capacity, tier, twin)
    known_keys = work.new(batch)
    requests = work.requests(batch)
    for side in (tier, twin):
        side.store(known_keys)
    arguments: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(
            ("lookup", "touch", "prepare_load", "complete_load"), lambda: known_keys
        ),
        "request": lambda: next(requests),
        "packed": lambda: _pack(next(requests)),
        "store": lambda: work.new(batch),
    }
    for name, argument in arguments.items():
        yield name, compare(getattr(tier, name), getattr(twin, name), argument)


def _pack(keys: Keys) -> PackedKeys:
    return PackedKeys(keys, keys_to_words(keys))


def time_scan(capacity: int, batch: int) -> Rows:
    """Time a whole trace in one program; the keys are on the device already."""
    policy = make_lru(capacity)

    def serve(state: Any, keys: Any) -> Any:
        count = np.int32(batch)
        state, answer = host_state.request_step(policy, state, keys, count)
        state, _ = host_state.complete_step(state, answer.block_ids, answer.num_hits)
        return state, answer.num_hits

    scan = jax.jit(lambda state, trace: lax.scan(serve, state, trace), donate_argnums=0)
    work, twin = Workload(), Twin(capacity)
    state = host_state.init(policy)
    requests = work.requests(batch)
    num = max(16, min(_TRACE_BLOCKS, 4096 * batch) // batch)

    def ours(pair: Any) -> list[int]:
        nonlocal state
        state, hits = scan(state, pair[1])
        return hits.tolist()

    def theirs(pair: Any) -> list[int]:
        return [twin.serve(keys)[0] for keys in pair[0]]

    def argument() -> Any:
        trace = [next(requests) for _ in range(num)]
        words = np.stack([keys_to_words(keys) for keys in trace])
        return trace, jax.device_put(words)

    yield f"{num} requests", compare(ours, theirs, argument)


def time_arc(capacity: int, batch: int) -> Rows:
    """Time ARC's store with eviction."""
    for name, make_policy in (("rescanning", RescanningARC), ("linear", ARC)):
        work, tier = Workload(), Tier(capacity, "arc")
        twin = Twin(capacity, make_policy)
        work.fill(capacity, tier, twin)
        row = compare(tier.store, twin.store, lambda work=work: work.new(batch))
        yield f"store, {name} twin", row


def time_policies(capacity: int, batch: int) -> Rows:
    """Time a whole request by each policy; the other side is LRU."""
    for name in policy_names():
        work, tier, lru = Workload(), Tier(capacity, name), Tier(capacity)
        work.fill(capacity, tier, lru)
        requests = work.requests(batch)
        row = compare(tier.told, lru.told, lambda r=requests: next(r))
        yield f"request, {name}", row
        row = compare(
            tier.told_packed, lru.told_packed, lambda r=requests: _pack(next(r))
        )
        yield f"packed, {name}", row


def time_retention(capacity: int, batch: int) -> Rows:
    """Time a whole request with priorities; the other side is the policy alone."""
    keep = Retention(ttl_s=1_000_000)
    for name, share in itertools.product(("lru", "hazard"), (0, 0.01, 1)):
        work, tier = Workload(), Tier(capacity, name, retention=True)
        alone = Tier(capacity, name)
        stored = work.fill(capacity, tier, alone)
        tier.manager.retain(stored[: int(share * len(stored))], keep, now_ms=0)
        requests = work.requests(batch)
        row = compare(tier.told, alone.told, lambda r=requests: next(r))
        yield f"{name}, {share:.0%} retained", row


# With the smallest and the largest batch; half of the capacity limits it, too.
TABLES = {
    "calls": (time_calls, 1, math.inf),
    "scan": (time_scan, 16, math.inf),
    "arc": (time_arc, 16, 1024),
    "policies": (time_policies, 1, math.inf),
    "retention": (time_retention, 1, math.inf),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=[1 << 14, 1 << 18],
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096]
    )
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--executor", choices=["native", "xla"], default="native")
    args = parser.parse_args()
    Tier.executor = args.executor
    where = show_machine(executor=args.executor)
    print(f"median us of {ROUNDS} rounds, jaxkv / twin, and the ratio [quartiles]")
    tables: dict[str, list[Row]] = {}
    for table in args.tables:
        print(f"\n{table}")
        rows = tables[table] = []
        time_table, min_batch, max_batch = TABLES[table]
        for capacity, batch in itertools.product(args.capacities, args.batches):
            if not min_batch <= batch <= min(max_batch, capacity // 2):
                continue
            size = {"capacity": capacity, "batch": batch}
            for operation, row in time_table(capacity, batch):
                rows.append({**size, "operation": operation, **row})
                print(
                    f"capacity {capacity:8}  batch {batch:5}  "
                    f"{operation:24}{compared_text(row)}",
                    flush=True,
                )
    write_figures(args.json, {"machine": where, "tables": tables})


if __name__ == "__main__":
    main()
