"""Requests that queue for the device, with prefixes that only the store has."""

import random

import pytest

from tests.rigs.offload_rig import BLOCK_SIZE, FULL, HYBRID, StoreRig

NUM_REQUESTS, PREFIX_BLOCKS = 50, 4
RUN_STEPS = 4
_MAX_STEPS = 2000


class QueueRig(StoreRig):
    """An engine whose requests wait until the device has room for them.

    Args:
        order: Which request is asked about first: "first come", "last come", "random".
        after_none: Whether the next one is asked about when one has to ask again.
        after_offer: What happens to an offer that the device has no room for: it is
            declined, kept, or dropped by `request_preempted`; and whether the next
            request is asked about then.
        fetch_steps: After how many steps a fetch arrives.
    """

    def __init__(self, order, after_none, after_offer, *, fetch_steps=2, **options):
        named = {"num_storage_blocks": 1024, "device_blocks": 17, "host_blocks": 32}
        super().__init__(**named | options)
        self.order, self.after_none, self.after_offer = order, after_none, after_offer
        self.rng, self.fetch_steps = random.Random(3), fetch_steps
        self.number, self.waiting, self.due, self.ages = 0, [], [], {}
        self.num_prefix_blocks = self.num_read = self.num_used = self.max_held = 0

    def submit(self, *requests):
        for request in requests:
            keys = [key for group in request.block_keys_by_group for key in group]
            self.has(*keys)
            self.num_prefix_blocks += len(keys)
        self.waiting += requests

    def run_all(self):
        while self.waiting or self.requests:
            self.run_step()
            assert self.number < _MAX_STEPS, f"{len(self.waiting)} still wait"

    def run_step(self):
        self.number += 1
        while self.loads:
            self.load_arrives()
        while self.stores:
            self.store_arrives()
        self.due += [(self.number + self.fetch_steps, m) for m in self.unanswered]
        for moves in self.unanswered:
            self.num_read += sum(len(batch.keys) for batch in moves.fetches)
        self.unanswered = [moves for due, moves in self.due if due <= self.number]
        self.due = [(due, moves) for due, moves in self.due if due > self.number]
        self.answer()
        self.admit_some()
        is_ready = {
            n: not request.loading_tokens for n, request in self.requests.items()
        }
        ready = [name for name, ready in is_ready.items() if ready]
        tokens = {name: self.requests[name].num_tokens for name in ready}
        self.num_used += len(self.step(tokens=tokens).load_host_blocks)
        boundary = self.scheduler.below[0]
        held = {row for rows in boundary.holds.values() for row in rows}
        num_held = len(held) + boundary.fetches.num_blocks
        self.max_held = max(self.max_held, num_held)
        for name in ready:
            self.ages[name] = self.ages.get(name, 0) + 1
            if self.ages[name] == RUN_STEPS:
                self.finish(name)

    def admit_some(self):
        candidates = list(self.waiting)
        if self.order == "last come":
            candidates.reverse()
        elif self.order == "random":
            self.rng.shuffle(candidates)
        for request in candidates:
            self.has_room = True
            if self.admit(request) is not None:
                self.waiting.remove(request)
            elif (self.after_none if self.has_room else self.after_offer[1]) == "stop":
                return

    def give_up(self, request):
        self.has_room = False
        if self.after_offer[0] == "decline":
            self.take(request, [], 0)
        elif self.after_offer[0] == "preempted":
            self.scheduler.request_preempted(request)


ENGINES = {
    "vLLM": ("first come", "next", ("keep", "stop")),
    "first only": ("first come", "stop", ("decline", "stop")),
    "asks all": ("first come", "next", ("decline", "next")),
    "asks all, keeps offers": ("first come", "next", ("keep", "next")),
    "demo": ("first come", "next", ("preempted", "stop")),
    "last come": ("last come", "stop", ("decline", "stop")),
    "random": ("random", "next", ("decline", "stop")),
    "random, asks all": ("random", "next", ("decline", "next")),
    "random, one at a time": ("random", "stop", ("decline", "stop")),
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
ASKS_ALL = ENGINES["asks all"]


def paths(num=NUM_REQUESTS, *, num_blocks=PREFIX_BLOCKS, num_shared=0):
    num_unique = num_blocks - num_shared
    return [
        (*range(num_shared), *range(1000 * n, 1000 * n + num_unique))
        for n in range(1, num + 1)
    ]


def queued(rig, all_paths):
    requests = [rig.request(f"r{n}", *path) for n, path in enumerate(all_paths)]
    rig.submit(*requests)
    return requests


def check_each_block_is_read_once(rig):
    queued(rig, paths(20))
    rig.run_all()
    assert rig.num_used <= rig.num_read <= 1.1 * rig.num_used
    if rig.groups == FULL:
        assert rig.num_used == rig.num_prefix_blocks
    rig.settle()
    rig.check_nothing_leaked()


@engines
def test_requests_that_queue_read_each_block_once(engine):
    check_each_block_is_read_once(QueueRig(*engine, host_blocks=12))


@pytest.mark.parametrize("engine", ["vLLM", "asks all", "random"])
@pytest.mark.parametrize(
    "options",
    [
        {"groups": HYBRID, "device_blocks": 33},
        {"max_storage_blocks": 4, "fetch_steps": 20, "mode": "lazy"},
        {"device_blocks": 65, "host_blocks": 40},
    ],
    ids=["windows", "slow store", "large device"],
)
def test_requests_that_queue_read_each_block_once_whatever_the_rules(engine, options):
    check_each_block_is_read_once(QueueRig(*ENGINES[engine], **options))


def test_fifty_requests_that_queue_read_each_block_once():
    """The host holds a sixth of the blocks they need, the device a tenth."""
    rig = QueueRig(*ASKS_ALL)
    queued(rig, paths())
    rig.run_all()
    assert rig.num_read == rig.num_used == rig.num_prefix_blocks == 200
    assert rig.max_held <= 16, "half of the host"


def test_a_prefix_that_requests_share_is_fetched_and_held_once():
    rig = QueueRig(*ASKS_ALL)
    queued(rig, paths(8, num_shared=2))
    rig.run_all()
    assert rig.num_read == 2 + 8 * 2
    assert not rig.scheduler.below[0].holds


def fill(rig, num_requests=4):
    """Hold what four requests have fetched, which is half of the host; ask again."""
    requests = queued(rig, paths(num_requests))
    rig.pool.allocate(rig.pool.num_free)
    for _ in range(4):
        rig.run_step()
    assert len(rig.scheduler.below[0].holds) == 4
    return requests


def offers(rig, request, num_asks):
    return [rig.offer(request)[0] for _ in range(num_asks)]


def late(rig):
    late = rig.request("late", 7, 8, 9)
    rig.has(*late.block_keys)
    return late


def test_a_request_waits_for_room_that_others_hold_and_explain_says_so():
    rig = QueueRig(*ASKS_ALL)
    requests, request = fill(rig), late(rig)
    assert offers(rig, request, 3) == [None] * 3
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.deferral) == (None, "queued")
    assert "once other requests have used their fetched blocks" in str(explained)
    rig.scheduler.request_finished(requests[0])  # It was aborted.
    assert offers(rig, request, 1) == [None]
    assert rig.step().below[0].fetches


def test_the_room_of_requests_that_ask_no_more_is_taken_after_a_while():
    rig = QueueRig(*ASKS_ALL)
    requests, request = fill(rig), late(rig)
    assert offers(rig, request, 9) == [None] * 9
    assert rig.step().below[0].fetches
    for holder in requests:  # They have lost what was held, and nothing else.
        rig.scheduler.request_finished(holder)


def test_a_request_goes_on_without_a_fetch_if_holders_ask_and_never_begin():
    """Else an engine that admits strictly in order would wait forever."""
    rig = QueueRig(*ASKS_ALL)
    requests, request = fill(rig), late(rig)
    answers = []
    for _ in range(10):
        answers += offers(rig, request, 1)
        for holder in requests:
            rig.offer(holder)
    assert answers == [None] * 8 + [0] * 2
    rig.scheduler.request_finished(requests[0])
    assert offers(rig, request, 1) == [None]
    assert rig.step().below[0].fetches


def test_a_large_prefix_is_fetched_while_small_ones_go_on_arriving():
    rig = QueueRig(*ASKS_ALL)
    queued(rig, paths(8, num_blocks=2))
    rig.run_step()
    large = rig.request("large", *range(12))
    rig.submit(large)
    for number in range(120):
        small = rig.request(f"small {number}", 500 + number, 7)
        rig.submit(small)
        rig.run_step()
        if "large" in rig.scheduler.below[0].holds:
            break
    assert number < 90
    assert len(rig.waiting) > 4, "they go on after it"


def test_requests_that_queue_compute_when_the_store_brings_nothing():
    """Else each few of them would wait for the store's deadline, one after another."""
    rig = QueueRig(*ASKS_ALL)
    requests = queued(rig, paths(6))
    assert [rig.offer(request)[0] for request in requests] == [None] * 6
    assert len(rig.step().below[0].fetches) == 4
    rig.answer(ok=False)
    assert [rig.offer(request)[0] for request in requests] == [0] * 6
    assert offers(rig, late(rig), 1) == [None], "it has not waited yet"
    assert rig.step().below[0].fetches
    rig.answer()
    assert offers(rig, requests[5], 1) == [None]
    assert rig.step().below[0].fetches


def test_fetched_blocks_leave_half_of_the_host_to_stores():
    rig = QueueRig(*ASKS_ALL, device_blocks=33)
    fill(rig)
    rig.pool.free(range(1, 33))
    for n in range(4):
        rig.run(rig.request(f"run {n}", *range(50 + 9 * n, 54 + 9 * n)))
    assert rig.scheduler.stats.num_stored == rig.scheduler.stats.num_offered == 16


def fetched(rig, request):
    """Return what a request is offered in the end, and the sizes of its fetches."""
    sizes = []
    while (offer := rig.offer(request)[0]) is None:
        assert rig.scheduler.explain(request).num_offered_tokens is None
        sizes.append([len(batch.keys) for batch in rig.fetches()])
        assert sum(sizes[-1]) + len(rig.unanswered) <= 5
        rig.answer()
    return offer // BLOCK_SIZE, sizes


def test_all_of_a_long_prompt_is_fetched_in_windows():
    rig = StoreRig(
        num_storage_blocks=64, host_blocks=64, device_blocks=65, max_storage_blocks=4
    )
    request = rig.request("a", *range(30))
    rig.has(*request.block_keys)
    num, sizes = fetched(rig, request)
    assert (num, sizes) == (30, [[1] * 4] * 7 + [[1] * 2])
    assert rig.scheduler.num_fetched_tokens("a") == 30 * BLOCK_SIZE
    rig.scheduler.request_finished(request)
    rig.check_nothing_leaked()


@pytest.mark.parametrize("group", [0, 1], ids=["full", "window"])
def test_a_missing_block_of_one_group_costs_only_what_depends_on_it(group):
    """The store lacks a block of one group; both groups have a shorter prefix."""
    rig = StoreRig(
        groups=HYBRID,
        num_storage_blocks=64,
        host_blocks=64,
        device_blocks=65,
        max_storage_blocks=4,
    )
    request = rig.request("a", *range(12))
    rig.has(*(key for keys in request.block_keys_by_group for key in keys))
    lost = request.block_keys_by_group[group][10]
    while (offer := rig.offer(request)[0]) is None:
        for batch in rig.fetches():
            oks = [key != lost for key in batch.keys]
            rig.report_below(fetched=((batch.event, tuple(oks)),))
    assert offer == 10 * BLOCK_SIZE
    rig.unanswered.clear()
    rig.scheduler.request_finished(request)
    rig.check_nothing_leaked()


def test_a_request_takes_what_has_arrived_when_the_rest_is_slower_than_computing():
    rig = StoreRig(
        num_storage_blocks=64,
        host_blocks=64,
        device_blocks=65,
        max_storage_blocks=4,
        skip_slow_loads=True,
        block_bytes=1000,
    )
    request = rig.request("a", *range(30))
    rig.has(*request.block_keys)
    assert rig.offer(request)[0] is None
    rig.step()
    rig.answer()
    assert rig.offer(request)[0] is None
    rig.scheduler.set_rates(1e9, 1e6, 1.0)
    assert rig.offer(request)[0] == 4 * BLOCK_SIZE
    assert rig.scheduler.stats.num_fetches_declined == 1


def test_a_short_prefix_does_not_wait_for_all_windows_of_a_long_one():
    rig = StoreRig(
        num_storage_blocks=64, host_blocks=96, device_blocks=65, max_storage_blocks=4
    )
    long, short = rig.request("a", *range(30)), rig.request("b", 99)
    rig.has(*long.block_keys, *short.block_keys)
    for num in range(6):
        if rig.offer(short)[0] is not None and num:
            break
        assert rig.offer(long)[0] is None
        rig.step()
        rig.answer()
    assert num < 5
    assert rig.offer(long)[0] is None


def test_a_prefix_longer_than_the_host_is_fetched_in_part_and_not_queued_for():
    rig = QueueRig(*ASKS_ALL, host_blocks=8)
    (request,) = queued(rig, paths(1, num_blocks=9))
    while rig.offer(request)[0] is None:
        rig.step()
        rig.answer()
    assert offers(rig, request, 3) == [8 * BLOCK_SIZE] * 3
    rig.take(request, [], 0)
    assert offers(rig, request, 1) == [8 * BLOCK_SIZE], "it holds what it has"
    rig.scheduler.request_finished(request)
    rig.check_nothing_leaked()


def test_a_hybrid_prefix_longer_than_the_host_is_fetched_as_far_as_it_fits():
    rig = StoreRig(
        groups=HYBRID, num_storage_blocks=64, host_blocks=8, device_blocks=65
    )
    request = rig.request("a", *range(12))
    rig.has(*(key for keys in request.block_keys_by_group for key in keys))
    while (offer := rig.offer(request)[0]) is None:
        rig.step()
        rig.answer()
    assert offer == 6 * BLOCK_SIZE, "6 blocks of full attention, 2 of the window"
