"""Strict mode names the mistakes of random engines, and lets right ones pass."""

import pytest

from jaxkv import ConnectorOutput, FullAttention, SlidingWindow
from jaxkv.strict import StrictError
from tests.rigs.random_engine import BLOCK, RandomEngine

WINDOW = SlidingWindow(BLOCK, 10)
RIGHT = {
    "eager": ("device", {}),
    "lazy": ("device", {"mode": "lazy", "max_num_batched_tokens": 16}),
    "windows": ("device", {"groups": (WINDOW,)}),
    "hybrid": ("device", {"groups": (FullAttention(BLOCK), WINDOW)}),
    "failing loads": ("device", {"strict_fail_loads": 2}),
    "several blocks per host block": ("device", {"blocks_per_host_block": 2}),
    "own pool": ("own", {}),
    "own pool, failing loads": ("own", {"strict_fail_loads": 2}),
    "hooks": ("hooks", {}),
    "hooks, failing loads": ("hooks", {"strict_fail_loads": 2}),
}
SEEDS = [
    *range(2),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 90)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RIGHT)
def test_right_engines_pass(name, seed):
    kind, options = RIGHT[name]
    engine = RandomEngine(seed, kind, **options)
    engine.run(60)
    assert engine.num_read > 0 < engine.worker.blocks_loaded


# Wrong engines: the kinds of pools, and the message; None where it does no harm.
WRONG = []


def wrong(message, kinds=("device", "own", "hooks"), **options):
    def register(cls):
        WRONG.extend(
            pytest.param(cls, kind, message, options, id=f"{cls.__name__}-{kind}")
            for kind in kinds
        )
        return cls

    return register


@wrong("while its load is in flight|into which a load is in flight")
class RunsBeforeItsLoad(RandomEngine):
    def schedule(self):
        shares = super().schedule()
        for request in self.running:
            end = request.num_computed_tokens + request.num_loading
            if request.num_loading and end < request.num_tokens:
                request.num_computed_tokens, request.num_loading = end, 0
                shares.append((request.request_id, 1))
        return shares


@wrong(None, kinds=["device"])
class CachesBeforeTheModel(RandomEngine):
    def cache_allocated(self, request, end):
        for table, chain in zip(request.tables, request.chains, strict=True):
            self.pool.cache(table[: end // BLOCK], chain.keys[: end // BLOCK])


@wrong("as computed, but nothing wrote it|is stored, but nothing")
class CountsBeforeThePlan(RandomEngine):
    def plan(self, num_scheduled):
        for name, num in num_scheduled.items():
            self.requests[name].num_computed_tokens += num
            if self.kind != "hooks":
                self.cache(self.requests[name])
        meta = super().plan(num_scheduled)
        for name, num in num_scheduled.items():
            self.requests[name].num_computed_tokens -= num
        return meta


@wrong("but nothing wrote it", strict_fail_loads=2)
class TakesFailedLoadsForDone(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        report = self.scheduler.update_connector_output

        def report_all_as_done(output):
            ended = report(output)
            names = ended.finished_recving + ended.failed_recving
            return ConnectorOutput(names, (), ended.completed_store_events)

        self.scheduler.update_connector_output = report_all_as_done


@wrong("but nothing wrote it", strict_fail_loads=2)
class ServesFailedLoadsToOthers(TakesFailedLoadsForDone):
    """The request itself is preempted before it runs; its blocks are found."""

    def step(self, *, is_calm=False):
        self.is_calm = is_calm
        super().step(is_calm=is_calm)

    def collect(self, output):
        super().collect(output)
        if not self.is_calm:
            for request in self.running[:]:
                if request.num_computed_tokens and not request.num_loading:
                    self.cache(request)
                    self.preempt(request)


@wrong("the pool is outdated|the pool is not the one that")
class KeepsTheOldPool(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        start = self.worker.start
        self.worker.start = lambda meta, pool: (start(meta, pool), pool)[1]


@wrong("which are free", kinds=["device", "own"])
class FreesBeforeItFinishes(RandomEngine):
    def end(self, request):
        if request in self.running:
            tables = request.tables
            self.leave(request)
            self.running.append(request)
            request.tables = tables
        super().end(request)


@wrong("which has its blocks|are free, although", kinds=["device", "own"])
class SaysNothingOfPreemption(RandomEngine):
    def preempt(self, request):
        self.leave(request)
        self.waiting.insert(0, request)


@wrong("in the order of tokens|counted it as computed|nothing wrote it|while its store")
class PassesTablesInAnotherOrder(RandomEngine):
    def read(self, request, kv):
        """Do not end before strict mode sees the next step."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        tell = self.scheduler.update_state_after_alloc

        def tell_reversed(request, tables, num_tokens):
            if self.kind == "hooks" and tables:
                tables = [tables]
            tell(request, [table[::-1] for table in tables], num_tokens)
            return tables

        self.scheduler.update_state_after_alloc = tell_reversed


@wrong(
    "was written while its store|while a load into it|are free, although",
    ["own", "hooks"],
)
class PinsNothing(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.pool._hold = self.pool._release = lambda block_ids: None


@wrong(None, ["own", "hooks"])
class SaysNothingOfContents(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.pool.has_contents = False
        self.pool._content_of = lambda block_id: True


@wrong("poll.. reported the (load|store).* steps ago")
class LosesReports(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        poll = self.worker.poll

        def lose():
            output = poll()
            return ConnectorOutput() if self.rng.random() < 0.15 else output

        self.worker.poll = lose


@wrong("1 reports, but 0 are due")
class ReportsTwice(RandomEngine):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        report = self.scheduler.update_connector_output

        def report_twice(output):
            answer = report(output)
            if output.completed_store_events or output.finished_recving:
                report(output)
            return answer

        self.scheduler.update_connector_output = report_twice


@wrong(
    "into which a load is in flight|a prefix cache have only blocks that are",
    ["own", "hooks"],
)
class CachesWhatLoads(RandomEngine):
    def admit(self, request):
        is_admitted = super().admit(request)
        if is_admitted and request.num_loading:
            end = request.num_computed_tokens + request.num_loading
            self.cache_allocated(request, end)
        return is_admitted


@wrong("was written after request 'r[0-9]+' counted it as computed|while its store")
class WritesOnAfterPreemption(RandomEngine):
    def preempt(self, request):
        blocks = [
            table[0] for table in request.tables if request.num_computed_tokens >= BLOCK
        ]
        super().preempt(request)
        for block in blocks:
            self.kv = self.kv.at[block, BLOCK - 1].set(-5.0)


@wrong(None, kinds=["device", "own"])
class ForgetsOffers(RandomEngine):
    def end(self, request):
        if request in self.waiting:
            del self.requests[request.request_id]
            self.waiting.remove(request)
        else:
            super().end(request)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("cls", "kind", "message", "options"), WRONG)
def test_wrong_engines_are_named(cls, kind, message, options, seed):
    engine = cls(seed, kind, **options)
    if message is None:
        engine.run(80)
        return
    error = StrictError if cls is not ReportsTwice else ValueError
    with pytest.raises(error, match=message):
        engine.run(200)
