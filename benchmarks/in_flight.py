"""Cost of a step against the number of requests that wait, run, load or are preempted.

N requests of two blocks are brought into one state, and what then happens to others is
timed. Each state has 10, 1,000 and 10,000 requests:

- waiting: their offers are held, and they have no device blocks;
- running: they have blocks and are stored; 10 of them are scheduled in a step;
- preempted: they ran, and lost their blocks;
- loading: their loads are in flight, each since a step of its own;
- held up: their loads wait for room (`max_blocks_in_flight`);
- storing: their stores are in flight, each since a step of its own;
- queued: their stores wait for room.

Timed with `OffloadScheduler` are

- step: a step without anything new, and the report of a step without any end;
- look-up: a request of 8 blocks asks, and is offered what is on the host;
- load: such a request takes the offer, leaves with the next step, is reported, and ends
  (not where loads are held up);
- refused: a request that has a load under way asks again;
- end: one of the N ends, whatever state it is in; another takes its place;
- leave: what is in flight is reported, and some that waited for room leave;
- explain, in_transit: what `explain` says of such a request, and the counts for a
  dashboard.

The host tier has the same size whatever N is.

With `OffloadWorker` and a real `TransferEngine`, N transfers are in flight which never
land: "step" starts nothing and polls; "agreement" is what several processes do in
between, with no peer.

Times are medians. All sizes are timed by turns, so that a busy machine slows down all
alike; a ratio is the median at 10,000 over the median at 10.

    python benchmarks/in_flight.py [--requests N ...] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp

from common import make_parser, old_garbage_left_alone, show_machine, write_figures
from engine_calls import BLOCK_SIZE, Prompt
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    OffloadMetadata,
    SchedulerOutput,
)
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.worker.agreement import Agreement
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.transfer import TransferEngine
from jaxkv.transfer.tickets import Piece

BLOCKS = 2
PROBE_BLOCKS = 8
NUM_SCHEDULED = 10
STATES = ("waiting", "running", "preempted", "loading", "held up", "storing", "queued")

Action = Callable[[], Callable[[], None]]


def key(*path: Any) -> bytes:
    return repr(path).encode().ljust(32, b".")[-32:]


class Crowd:
    """A scheduler with N requests in one state."""

    def __init__(self, state: str, num: int, max_requests: int) -> None:
        self.state = state
        self.pool = DeviceBlockPool(num * BLOCKS + 4 * PROBE_BLOCKS + 1)
        has_bound = state in ("held up", "queued")
        self.scheduler = OffloadScheduler(
            BLOCK_SIZE,
            # So that nothing is evicted, not even by what is stored anew.
            4 * (max_requests * BLOCKS + 4 * PROBE_BLOCKS + 1),
            rules=OffloadRules(
                max_blocks_in_flight=PROBE_BLOCKS if has_bound else None
            ),
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.scheduler.warm_up()
        self._names = itertools.count()
        self._probe_keys = [key("probe", n) for n in range(PROBE_BLOCKS)]
        self._keep(self._probe_keys)
        if state in ("waiting", "loading", "held up"):
            for number in range(num + 1):
                self._keep([key(number, n) for n in range(BLOCKS)])
        self.in_flight: OffloadMetadata | None = None
        if state == "held up":
            # As large as the room for transfers.
            self.take(self.probe())
            self.in_flight = self.step()
        self.crowd: list[Prompt] = []
        for number in range(num):
            self.crowd.append(self.enter(number))
        self.scheduled = {}
        if state == "running":
            self.scheduled = {
                prompt.request_id: 1 for prompt in self.crowd[:NUM_SCHEDULED]
            }
        if state == "queued":
            names = [prompt.request_id for prompt in self.crowd]
            self.in_flight = self.schedule(dict.fromkeys(names, 1))
        else:
            self.step()

    def _keep(self, keys: list[bytes]) -> None:
        """Store keys by way of a request that comes and goes."""
        name = f"storing {next(self._names)}"
        prompt = Prompt(name, keys)
        self.scheduler.get_num_new_matched_tokens(prompt, 0)
        self._run(prompt)
        self._leave(prompt)
        self.step()
        self.pool.evict(prompt.block_ids)

    def _run(self, prompt: Prompt) -> None:
        """Allocate a request's blocks, as if the model had computed them."""
        prompt.block_ids = self.pool.allocate(len(prompt.block_keys))
        self.scheduler.update_state_after_alloc(prompt, prompt.block_ids, 0)
        prompt.num_computed_tokens = prompt.num_tokens - 1
        self.pool.cache(prompt.block_ids, prompt.block_keys)

    def _leave(self, prompt: Prompt) -> None:
        self.scheduler.request_finished(prompt)
        self.pool.free(prompt.block_ids[::-1])

    def probe(self) -> Prompt:
        """Make a request whose blocks are on the host."""
        return Prompt(f"probe {next(self._names)}", self._probe_keys)

    def ask(self, prompt: Prompt) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(prompt, 0)[0]

    def take(self, prompt: Prompt) -> None:
        """Query the scheduler for a request, and accept the offer."""
        offer = self.ask(prompt)
        assert offer == len(prompt.block_keys) * BLOCK_SIZE, offer
        prompt.block_ids = self.pool.allocate(len(prompt.block_keys))
        self.scheduler.update_state_after_alloc(prompt, prompt.block_ids, offer)

    def step(self, scheduled: dict[str, int] | None = None) -> OffloadMetadata:
        """Schedule a step; its stores arrive at once."""
        meta = self.schedule(scheduled or {})
        if meta.store_event != NO_EVENT:
            done = ConnectorOutput(completed_store_events=(meta.store_event,))
            self.scheduler.update_connector_output(done)
        return meta

    def schedule(self, scheduled: dict[str, int]) -> OffloadMetadata:
        return self.scheduler.build_connector_meta(SchedulerOutput(scheduled))

    def enter(self, number: int) -> Prompt:
        name = f"{next(self._names)}"
        prompt = Prompt(name, [key(number, n) for n in range(BLOCKS)])
        if self.state == "waiting":
            assert self.ask(prompt) == BLOCKS * BLOCK_SIZE
        elif self.state in ("loading", "held up"):
            self.take(prompt)
            if self.state == "loading":
                self.step()
        else:
            prompt.block_keys = [key(name, n) for n in range(BLOCKS)]
            self.ask(prompt)
            self._run(prompt)
            if self.state == "running":
                self.step({name: 1})
            elif self.state == "preempted":
                self.scheduler.request_preempted(prompt)
                self.pool.free(prompt.block_ids[::-1])
                self.step()
            elif self.state == "storing":
                self.schedule({name: 1})
        return prompt

    def idle(self) -> Callable[[], None]:
        """Run a step without anything new."""
        self.schedule(self.scheduled)
        self.scheduler.update_connector_output(ConnectorOutput())
        return _nothing

    def look_up(self) -> Callable[[], None]:
        prompt = self.probe()
        assert self.ask(prompt) == PROBE_BLOCKS * BLOCK_SIZE
        return lambda: self.scheduler.request_finished(prompt) and None

    def load(self) -> Callable[[], None]:
        """Load a request's blocks, from the look-up to its end."""
        prompt = self.probe()
        self.take(prompt)
        meta = self.schedule(self.scheduled)
        assert len(meta.load_host_blocks) == PROBE_BLOCKS
        done = ConnectorOutput(finished_recving=(prompt.request_id,))
        self.scheduler.update_connector_output(done)
        self._leave(prompt)
        return _nothing

    def refused(self) -> Callable[[], None]:
        """Query the scheduler for a request that is already loading."""
        assert self.ask(self.crowd[0]) is None
        return _nothing

    def end(self) -> Callable[[], None]:
        number = next(self._names) % len(self.crowd)
        prompt = self.crowd[number]
        self.scheduler.request_finished(prompt)
        if self.state == "loading":
            done = ConnectorOutput(finished_recving=(prompt.request_id,))
            self.scheduler.update_connector_output(done)

        def clean_up() -> None:
            if self.state not in ("waiting", "preempted"):
                self.pool.free(prompt.block_ids[::-1])
            self.crowd[number] = self.enter(number)

        return clean_up

    def leave(self) -> Callable[[], None]:
        """Report transfers in flight, so that some waiting ones start."""
        before = self.in_flight
        assert before is not None
        stores = () if before.store_event == NO_EVENT else (before.store_event,)
        loads = before.load_event_to_reqs.get(before.load_event, ())
        done = ConnectorOutput(loads, completed_store_events=stores)
        self.scheduler.update_connector_output(done)
        self.in_flight = meta = self.schedule({})
        moved = meta.load_device_blocks + meta.store_device_blocks
        assert len(moved) == PROBE_BLOCKS

        def clean_up() -> None:
            # Those that left end, and as many others come.
            blocks, entered = set(moved), []
            for number, prompt in enumerate(self.crowd):
                if blocks.intersection(prompt.block_ids):
                    self._leave(prompt)
                    blocks.difference_update(prompt.block_ids)
                    self.crowd[number] = self.enter(number)
                    entered.append(self.crowd[number].request_id)
                if not blocks:
                    break
            if self.state == "queued":
                self.schedule(dict.fromkeys(entered, 1))

        return clean_up

    def explain(self) -> Callable[[], None]:
        self.scheduler.explain(self.probe(), 0)
        return _nothing

    def in_transit(self) -> Callable[[], None]:
        """Read the counts that dashboards show."""
        _ = self.scheduler.in_transit, self.scheduler.stats
        return _nothing

    def actions(self) -> dict[str, Action]:
        actions = {
            "step": self.idle,
            "look-up": self.look_up,
            "explain": self.explain,
            "in_transit": self.in_transit,
        }
        if self.state in ("waiting", "preempted", "loading"):
            actions["end"] = self.end
        if self.state in ("held up", "queued"):
            actions["leave"] = self.leave
        else:
            actions["load"] = self.load
        if self.state == "loading":
            actions["refused"] = self.refused
        return actions


class Silence:
    """Stands in for the exchange between processes; never asked for an answer."""

    timeout_s = 60.0
    process = 0

    def send(self, text: str, step: int) -> None:
        """Send something to no process."""


class Fleet:
    """A worker and its engine, with N transfers that never land."""

    def __init__(self, state: str, num: int, max_requests: int) -> None:
        self.pool = [jnp.zeros((max_requests + 64, 2))]
        self.engine = TransferEngine(
            self.pool, 64, mode="staged", staging_bytes=1 << 12, extent_bytes=256
        )
        self.worker = OffloadWorker(self.engine, deadline_s=1e9)
        hosts = [number % 32 for number in range(num)]
        self.pool = self.worker.start(_meta(store=range(32)), self.pool)
        self.pool, _ = self.worker.drain(self.pool)
        self.agreement = Agreement(Silence(), self.engine, None, time.monotonic)
        with never():
            for step, host in enumerate(hosts):
                if state == "loads":
                    meta = _meta(step, load=(step + 1, host))
                else:
                    meta = _meta(step, store=(32 + host,))
                self.pool = self.worker.start(meta, self.pool)
        for transfer in self.worker._pending.values():
            self.agreement.begin(transfer)

    def idle(self) -> Callable[[], None]:
        """Run a step without completions."""
        self.pool = self.worker.start(_meta(), self.pool)
        self.worker.poll()
        return _nothing

    def agree(self) -> Callable[[], None]:
        """Run what several processes do in a step without any completion."""
        self.agreement.send()
        self.pool, _ = self.agreement.settle(self.pool, -1, wait_for_all=False)
        return _nothing

    def gauges(self) -> Callable[[], None]:
        """Read the counts that dashboards show."""
        _ = self.worker.num_in_flight_by_direction, self.engine.num_waiting
        return _nothing

    def actions(self) -> dict[str, Action]:
        return {"step": self.idle, "agreement": self.agree, "gauges": self.gauges}


def _meta(event: int = 0, *, store: Any = (), load: Any = ()) -> OffloadMetadata:
    """Make a plan that stores blocks, or loads one."""
    return OffloadMetadata(
        load_event=event if load else NO_EVENT,
        load_device_blocks=tuple(load[:1]),
        load_host_blocks=tuple(load[1:]),
        load_event_to_reqs={event: (f"r{event}",)} if load else {},
        store_event=event if store else NO_EVENT,
        store_device_blocks=tuple(range(1, 1 + len(store))),
        store_host_blocks=tuple(store),
        need_flush=False,
    )


def never() -> Any:
    """Keep all transfers in flight within this context."""
    return mock.patch.object(Piece, "is_ready", return_value=False)


def _nothing() -> None:
    pass


def measure(numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    makers: list[tuple[str, str, Callable[[str, int, int], Any]]] = [
        *(("scheduler", state, Crowd) for state in STATES),
        *(("worker", state, Fleet) for state in ("loads", "saves")),
    ]
    for side, state, make in makers:
        crowds = [make(state, num, max(numbers)) for num in numbers]
        with old_garbage_left_alone(), never():
            for what in crowds[0].actions():
                spent_us: list[list[float]] = [[] for _ in numbers]
                for number in range(rounds + 3):
                    for crowd, times_us in zip(crowds, spent_us, strict=True):
                        run = crowd.actions()[what]
                        start_s = time.perf_counter()
                        clean_up = run()
                        if number >= 3:
                            times_us.append(1e6 * (time.perf_counter() - start_s))
                        clean_up()
                medians = [statistics.median(times_us) for times_us in spent_us]
                rows.append(
                    {
                        "side": side,
                        "state": state,
                        "what": what,
                        "us": dict(zip(map(str, numbers), medians, strict=True)),
                        "most_over_least": medians[-1] / medians[0],
                    }
                )
                print(
                    f"{side:9} {state:9} {what:11}"
                    + "".join(f"{median:11.1f}" for median in medians)
                    + f"   {medians[-1] / medians[0]:8.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = make_parser(__doc__, rounds=101)
    parser.add_argument("--requests", type=int, nargs="+", default=[10, 1000, 10_000])
    args = parser.parse_args()
    where = show_machine()
    print(f"median us of {args.rounds}, with {args.requests} requests, and the ratio")
    rows = measure(args.requests, args.rounds)
    settings = {
        "block_size": BLOCK_SIZE,
        "blocks": BLOCKS,
        "probe_blocks": PROBE_BLOCKS,
        "scheduled": NUM_SCHEDULED,
        "rounds": args.rounds,
    }
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
