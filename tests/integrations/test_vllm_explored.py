"""Every order of events in a small world, with vLLM's own scheduler and our connector.

The world has a few device and host blocks and two requests that begin alike. In each
step a request may come, be aborted or preempted, the caches may be reset, and each
transfer in flight may land, fail or stay. In a plain run both requests come, transfers
land at once, and nothing else happens. The tests try all runs that differ from it by at
most a given number of choices, as delay-bounded schedulers do (Emmi et al.,
"Delay-bounded scheduling", POPL 2011): no state of vLLM's has to be copied or compared.
"""

import copy
import dataclasses
import functools
import logging
from collections import Counter
from types import SimpleNamespace

import pytest

from jaxkv import ConnectorOutput
from jaxkv.integrations.vllm.worker import WorkerReport
from jaxkv.scheduling.protocol import NO_EVENT
from tests.rigs.fake_engine import next_token, reference
from tests.rigs.real_vllm import BLOCK_SIZE, NEEDS_VLLM, RealRunner, engine_maker

pytestmark = NEEDS_VLLM
# The first block is shared, the second is not. Together they need more blocks than
# there are, on the device and on the host.
PROMPTS = {
    "a": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "b": [1, 2, 3, 4, 9, 8, 7, 6, 5],
    "later": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
}
NUM_OUTPUT = 4
WORLD = {"num_blocks": 6, "extra": {"num_cpu_blocks": 3}}
NUM_STEPS = 12
KINDS, ENDINGS = ("save", "load"), ("lands", "fails", "stays")
GARBAGE = ["garbage"] * BLOCK_SIZE


class Choices:
    """The choices of one run: option 0, the plain one, or that in `numbers`."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.num_options = []

    def __call__(self, options):
        number = self.numbers.get(len(self.num_options), 0)
        self.num_options.append(len(options))
        return options[number]

    def variants(self):
        """Yield the numbers of all runs with one more choice, a later one."""
        first = max(self.numbers, default=-1) + 1
        for place in range(first, len(self.num_options)):
            for number in range(1, self.num_options[place]):
                yield {**self.numbers, place: number}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A save of an event, or a load for a request, in flight."""

    name: object
    is_load: bool
    device_blocks: tuple
    host_blocks: tuple
    contents: tuple = ()


class StubHalf:
    """A `WorkerHalf` whose transfers end when, and as, it is chosen."""

    def __init__(self, runner):
        self.runner = runner
        self.host = {}
        self.in_flight = []
        self.failed_blocks = set()
        self.report = ConnectorOutput()

    def start(self, step):
        meta = step.transfers
        assert not meta.need_flush
        cells = self.runner.cells
        if meta.store_event != NO_EVENT:
            blocks = meta.store_device_blocks
            contents = tuple(list(cells[block]) for block in blocks)
            for block in meta.store_host_blocks:
                self.host[block] = GARBAGE
            places = meta.store_host_blocks
            self.in_flight.append(
                Transfer(meta.store_event, False, blocks, places, contents)
            )
        if meta.load_event != NO_EVENT:
            start = 0
            names = meta.load_event_to_reqs[meta.load_event]
            for name, size in zip(names, meta.load_sizes, strict=True):
                part = slice(start, start := start + size)
                blocks = meta.load_device_blocks[part]
                for block in blocks:
                    cells[block] = list(GARBAGE)
                places = meta.load_host_blocks[part]
                self.in_flight.append(Transfer(name, True, blocks, places))

    def poll(self):
        """End what is chosen to end, and report it."""
        left, new = [], ConnectorOutput()
        for transfer in self.in_flight:
            ending = self.runner.choose(ENDINGS)
            self.runner.seen[
                f"a {'load' if transfer.is_load else 'save'} {ending}"
            ] += 1
            if ending == "stays":
                left.append(transfer)
            else:
                ended = self.end(transfer, ending == "lands")
                new = ConnectorOutput.aggregate([new, ended])
        self.in_flight = left
        self.report = ConnectorOutput.aggregate([self.report, new])
        return new

    def end(self, transfer, is_right):
        """Write what has arrived; what failed stays garbage."""
        if transfer.is_load:
            names = (transfer.name,)
            if not is_right:
                self.failed_blocks.update(transfer.device_blocks)
                return ConnectorOutput(failed_recving=names)
            for device, host in zip(
                transfer.device_blocks, transfer.host_blocks, strict=True
            ):
                self.runner.cells[device] = list(self.host[host])
            return ConnectorOutput(finished_recving=names)
        events = (transfer.name,)
        if not is_right:
            return ConnectorOutput(failed_store_events=events)
        self.host.update(zip(transfer.host_blocks, transfer.contents, strict=True))
        return ConnectorOutput(completed_store_events=events)

    def take_failed_blocks(self):
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_report(self):
        report, self.report = self.report, ConnectorOutput()
        return None if report == ConnectorOutput() else WorkerReport(report)

    def take_stats(self):
        return None


class StubRunner(RealRunner):
    """A runner without arrays: the content of a token's cell is all tokens up to it."""

    def __init__(self, connector, num_blocks, windows, *, newer):
        self.connector = connector
        self.tokens, self.tables = {}, {}
        self.cells = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.choose, self.seen = None, None
        connector._worker = StubHalf(self)

    def forward(self, step):
        def cells_of(table, num):
            for place in range(num):
                block, offset = divmod(place, BLOCK_SIZE)
                yield self.cells[table[block]], offset

        for name, (start, num, (table,)) in step.work.items():
            tokens = self.tokens[name]
            for place, (cell, offset) in enumerate(cells_of(table, start + num)):
                if place >= start:
                    cell[offset] = tuple(tokens[: place + 1])
        sampled = {}
        for name, (start, num, (table,)) in step.work.items():
            tokens = self.tokens[name]
            for place, (cell, offset) in enumerate(cells_of(table, start + num)):
                assert cell[offset] == tuple(tokens[: place + 1]), (
                    f"request {name} reads {cell[offset]} as its token {place}"
                )
            if start + num == len(tokens):
                sampled[name] = [next_token(tokens)]
                tokens += sampled[name]
        return sampled


class StubHosts:
    """A runner on each of two hosts, whose outputs vLLM joins."""

    def __init__(self, connector, num_blocks, windows, *, newer):
        self.connector = connector
        second = copy.copy(connector)
        second._failed_requests = set()
        self.hosts = [
            StubRunner(host_connector, num_blocks, windows, newer=newer)
            for host_connector in (connector, second)
        ]
        self.aggregator = None

    choose = property(None, lambda self, choose: self.set("choose", choose))
    seen = property(None, lambda self, seen: self.set("seen", seen))

    def set(self, name, value):
        for host in self.hosts:
            setattr(host, name, value)

    def execute_model(self, output):
        from vllm.distributed.kv_transfer import kv_transfer_state

        outputs = []
        for host in self.hosts:
            kv_transfer_state._KV_CONNECTOR_AGENT = host.connector
            outputs.append(host.execute_model(output))
        first, second = (output.sampled_token_ids for output in outputs)
        assert first == second
        return self.aggregator.aggregate(outputs)


def make_hosts(make_engine, **options):
    """Make an engine of two hosts, whose executor would count its chips."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    engine = make_engine(num_hosts=2, **options | {"make_runner": StubHosts})
    engine.runner.aggregator = KVOutputAggregator.from_connector(
        engine.scheduler.connector, world_size=8
    )
    return engine


class World:
    """An engine, and what may happen to it."""

    def __init__(self, engine, choices, seen):
        self.engine, self.choices, self.seen = engine, choices, seen
        engine.runner.choose, engine.runner.seen = choices, seen
        self.left = list(PROMPTS)
        self.requests = {}

    def run(self):
        """Step by choice; then serve the remaining requests and check for leaks."""
        for _ in range(NUM_STEPS):
            self.meddle()
            self.engine.step()
        self.engine.runner.choose = lambda options: options[0]
        while self.left:
            self.add()
        self.engine.run(max_steps=80)
        self.check_end()

    def meddle(self):
        from vllm.v1.request import RequestStatus

        scheduler = self.engine.scheduler
        alive = list(scheduler.requests)
        options = ["a step"]
        if len(self.left) > 1:
            options = ["comes", "a step"]
        elif self.left:
            # In a plain run the last one comes when all is over, and the device has
            # nothing any more.
            options = ["a step", "comes", "comes after evictions"]
            if not alive:
                options.reverse()
        if alive:
            options += ["device reset", "both reset", *alive]
        if scheduler.running:
            options.append("preempted")
        event = self.choices(options)
        self.seen["aborted" if event in alive else event] += 1
        if event == "device reset":
            scheduler.reset_prefix_cache()
        elif event == "comes after evictions":
            pool = scheduler.kv_cache_manager.block_pool
            type(pool).reset_prefix_cache(pool)  # The host gets no call.
        elif event == "both reset":
            scheduler.reset_prefix_cache(reset_connector=True)
        elif event == "preempted":
            # It raises if blocks are still held.
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        elif event in alive:
            scheduler.finish_requests(event, RequestStatus.FINISHED_ABORTED)
        if event.startswith("comes"):
            self.add()

    def add(self):
        name = self.left.pop(0)
        self.requests[name] = self.engine.add(name, PROMPTS[name], NUM_OUTPUT)

    def check_end(self):
        from vllm.v1.request import RequestStatus

        scheduler = self.engine.scheduler
        for name, request in self.requests.items():
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                self.seen["served"] += 1
                right = reference(PROMPTS[name], NUM_OUTPUT)
                assert list(request.all_token_ids) == right
            else:
                assert request.status == RequestStatus.FINISHED_ABORTED
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert scheduler.connector.reset_cache(), "a host block is still held"
        offload = scheduler.connector._scheduler.scheduler
        assert not offload.has_pending_loads()
        assert not offload.has_pending_stores()
        self.seen["preemptions"] += sum(
            request.num_preemptions for request in self.requests.values()
        )
        self.seen["evictions"] += offload.stats.num_evicted


def explore(make_engine, max_choices):
    """Try all runs with at most `max_choices` choices other than the plain ones."""
    seen, ahead = Counter(), [{}]
    while ahead:
        numbers = ahead.pop()
        choices = Choices(numbers)
        world = World(make_engine(make_runner=StubRunner, **WORLD), choices, seen)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"wrong with the choices {numbers}") from error
        seen["runs"] += 1
        if len(numbers) < max_choices:
            ahead += choices.variants()
    return seen


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    from jaxkv.scheduling.scheduler import OffloadScheduler

    # It changes nothing, and would take half of the time.
    monkeypatch.setattr(OffloadScheduler, "warm_up", lambda self: None)
    logging.disable(logging.WARNING)
    yield engine_maker(tmp_path, monkeypatch)
    logging.disable(logging.NOTSET)


def test_one_choice_at_any_place_breaks_nothing(make_engine):
    seen = explore(make_engine, 1)
    print(dict(seen))
    transfers = {f"a {kind} {end}" for kind in KINDS for end in ENDINGS}
    events = {"aborted", "preempted", "device reset", "both reset", "evictions"}
    assert not (transfers | events) - {event for event, num in seen.items() if num}


@pytest.mark.long
def test_two_choices_at_any_places_break_nothing(make_engine):
    print(dict(explore(make_engine, 2)))


def test_one_choice_on_one_of_two_hosts_breaks_nothing(make_engine):
    seen = explore(functools.partial(make_hosts, make_engine), 1)
    print(dict(seen))
    transfers = {f"a {kind} {end}" for kind in KINDS for end in ENDINGS}
    assert not transfers - {event for event, num in seen.items() if num}


@pytest.mark.long
def test_two_choices_on_two_hosts_break_nothing(make_engine):
    print(dict(explore(functools.partial(make_hosts, make_engine), 2)))


def test_a_load_that_failed_on_the_second_host_alone_is_noticed(make_engine):
    """The control: vLLM gets the output of the first host only."""

    def make_deaf(**options):
        engine = make_engine(**options | {"make_runner": StubHosts})
        engine.runner.aggregator = SimpleNamespace(aggregate=lambda outputs: outputs[0])
        return engine

    with pytest.raises(AssertionError, match="wrong with the choices") as caught:
        explore(make_deaf, 1)
    assert "reads" in str(caught.value.__cause__)


def test_a_failed_load_that_is_reported_as_done_is_noticed(make_engine, monkeypatch):
    right = StubHalf.end

    def end(self, transfer, is_right):
        if transfer.is_load and not is_right:
            return ConnectorOutput(finished_recving=(transfer.name,))
        return right(self, transfer, is_right)

    monkeypatch.setattr(StubHalf, "end", end)
    with pytest.raises(AssertionError, match="wrong with the choices") as caught:
        explore(make_engine, 1)
    assert "reads" in str(caught.value.__cause__)
