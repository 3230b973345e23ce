"""The engine of examples/integrate_scheduler.py, and others with one mistake each."""

import dataclasses
import sys
from pathlib import Path

from jaxkv import ConnectorOutput, FullAttention

# The examples are files to be run, not a package.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import integrate_scheduler as example
import toy_model

BLOCK = toy_model.BLOCK
answer = toy_model.answer


class Right(example.Engine):
    def serve(self, request_id, prompt, num_new):
        """Serve one request; return its new tokens and the number of hit tokens."""
        request = example.Request(request_id, prompt, len(self.groups))
        while not self.admit(request):
            self.step([])
        awaited = sum(num_tokens for _, num_tokens, _ in self.loading.values())
        num_hits = request.num_computed_tokens + awaited
        while request.num_tokens < len(prompt) + num_new:
            self.step([request])
        self.finish(request)
        return request.tokens[len(prompt) :], num_hits

    def blocks_being_stored(self):
        stores = self.scheduler._stores
        moves = stores.waiting, *stores.in_flight.moves.values()
        return [block for move in moves for block in move.sources]

    def let_stores_arrive(self):
        while self.scheduler.has_pending_stores():
            self.step([])


# Wrong engines by name: a maker, and the error.
WRONG = {}


def wrong(message):
    """Register a class of wrong engines, or a function that makes a right one wrong."""

    def register(mistake):
        def make(*sizes):
            engine = Right(*sizes)
            mistake(engine)
            return engine

        is_class = isinstance(mistake, type)
        WRONG[mistake.__name__] = mistake if is_class else make, message
        return mistake

    return register


@wrong("wait until update_connector_output")
class DoesNotWait(Right):
    def admit(self, request):
        is_admitted = super().admit(request)
        for request_id in list(self.loading):
            self.take_offer(request_id)
        return is_admitted


@wrong("cache.. was called for blocks")
class CachesEarly(Right):
    def admit(self, request):
        is_admitted = super().admit(request)
        for _, num_tokens, _ in self.loading.values():
            num = (request.num_computed_tokens + num_tokens) // BLOCK
            self.blocks.cache(request.tables[0][:num], request.block_keys[:num])
        return is_admitted


@wrong("update_state_after_alloc.. was not called")
def never_tells_of_blocks(engine):
    engine.scheduler.update_state_after_alloc = lambda request, tables, num: tables


@wrong("update_state_after_alloc.. was given no blocks for it")
def declines_without_blocks(engine):
    tell = engine.scheduler.update_state_after_alloc

    def decline(request, tables, num):
        tell(request, [], 0)
        return tables

    engine.scheduler.update_state_after_alloc = decline


@wrong("update_state_after_alloc.. was called .* before get_num_new_matched_tokens")
def tells_of_blocks_first(engine):
    ask = engine.scheduler.get_num_new_matched_tokens

    def tell_and_ask(request, local):
        engine.grow(request)
        engine.scheduler.update_state_after_alloc(request, request.tables, 0)
        return ask(request, local)

    engine.scheduler.get_num_new_matched_tokens = tell_and_ask


@wrong("Pool.cache.. was never called")
def never_caches(engine):
    engine.blocks.cache = lambda *pairs: []


@wrong("OffloadWorker.poll.. was not called")
def never_polls(engine):
    engine.worker.poll = ConnectorOutput


@wrong("update_connector_output.. was not called")
def never_passes_reports_on(engine):
    engine.scheduler.update_connector_output = lambda output: output


def takes_loads_that_failed(engine):
    report = engine.scheduler.update_connector_output

    def report_all_as_there(output):
        reported = report(output)
        ended = reported.finished_recving + reported.failed_recving
        return dataclasses.replace(reported, finished_recving=ended, failed_recving=())

    engine.scheduler.update_connector_output = report_all_as_there


@wrong("Continue with the pool that OffloadWorker.start")
def keeps_the_old_pool(engine):
    start = engine.worker.start
    engine.worker.start = lambda meta, pool: (start(meta, pool), pool)[1]


@wrong("update_state_after_alloc.. was given a table of 1 blocks")
def passes_short_tables(engine):
    tell = engine.scheduler.update_state_after_alloc

    def tell_of_one(request, tables, num):
        tell(request, [table[:1] for table in tables], num)
        return tables

    engine.scheduler.update_state_after_alloc = tell_of_one


@wrong("cache.. was given 1 blocks")
class CachesByAShortTable(Right):
    def grow(self, request):
        super().grow(request)
        request.tables = [table[:1] for table in request.tables]


@wrong("request_finished.. was given a table")
class ForgetsBlocksAtTheEnd(Right):
    def finish(self, request):
        tables = [table[:-1] for table in request.tables]
        self.scheduler.request_finished(request, tables)
        for table in request.tables:
            self.blocks.free(table[::-1])


@wrong("which are free: allocate or touch them")
def never_allocates(engine):
    engine.blocks.allocate = lambda num: list(range(1, num + 1))


@wrong("'who' is in SchedulerOutput.num_scheduled_tokens, but is not known")
def schedules_the_unknown(engine):
    plan = engine.scheduler.build_connector_meta

    def plan_for_others(output):
        return plan(dataclasses.replace(output, num_scheduled_tokens={"who": 1}))

    engine.scheduler.build_connector_meta = plan_for_others


class TakesBlocksForLarger(Right):
    def __init__(self, *sizes):
        super().__init__(*sizes, groups=(FullAttention(2 * BLOCK),))


@wrong("was written while a load .* were allocated for the request")
class WritesWhatIsLoaded(Right):
    def step(self, running):
        super().step(running)
        for request, num_tokens, _ in self.loading.values():
            last = (request.num_computed_tokens + num_tokens) // BLOCK - 1
            block = request.tables[0][last]
            self.pool = {"kv": self.pool["kv"].at[block].set(1.0)}


@wrong("was written while its store .* were allocated for a running")
class WritesWhatIsStored(Right):
    def step(self, running):
        super().step(running)
        for block in self.blocks_being_stored():
            self.pool = {"kv": self.pool["kv"].at[block].set(1.0)}


@wrong("before you free them, call request_finished")
class NeverFinishes(Right):
    def finish(self, request):
        for table in request.tables:
            self.blocks.free(table[::-1])


@wrong("has not ended: call request_finished")
class ReusesIds(Right):
    def finish(self, request):
        tokens = request.tokens[::-1]
        self.admit(example.Request(request.request_id, tokens, len(self.groups)))


def serve_twice(engine, prompts, num_new):
    rounds = [], []
    for answers in rounds:
        for number, prompt in enumerate(prompts):
            answers.append(engine.serve(f"r{number}", prompt, num_new))
            engine.let_stores_arrive()  # The example expects its pool to be free.
    return rounds
