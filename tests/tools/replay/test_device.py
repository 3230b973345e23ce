"""A replay with a device in front finds what an engine with the real scheduler does."""

import random
from fractions import Fraction

import numpy as np
import pytest

from jaxkv.keys.packed import words_to_keys
from jaxkv.policies import policy_names
from jaxkv.scheduling.protocol import TierReport
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.run import OPTIMUM, replay, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import keys_of, make_trace
from jaxkv.types import STOPS
from tests.rigs.offload_rig import FakeRequest, Rig

SIZE = 16


def _all_ok(moves):
    return tuple((move.event, (True,) * len(move.keys)) for move in moves)


class Engine(Rig):
    """Serves a trace's requests one after the other, in eager mode.

    A prompt is computed in one step, and its first token in a second one, which stores
    the prompt's blocks. Transfers have ended by the next step.
    """

    def __init__(self, trace, policy, capacity, device_blocks, tiers_below=()):
        self.trace, self.now_s = trace, Fraction(0)
        super().__init__(
            groups=SIZE,
            device_blocks=device_blocks + 1,
            host_blocks=capacity,
            policy=policy,
            clock=lambda: self.now_s,
            tiers_below=tiers_below,
        )

    def end_transfers(self, meta):
        below = []
        for plan in meta.below:
            for batch in plan.fetches:
                rows = zip(batch.upper_blocks, batch.keys, strict=True)
                self.host |= {row: [key] for row, key in rows}
            ended = (_all_ok(moves) for moves in (plan.fetches, plan.writes))
            below.append(TierReport(*ended))
        self.report(below=tuple(below))
        while self.stores:
            self.store_arrives()
        while self.loads:
            self.load_arrives()

    def serve(self, number):
        """Serve a request: the blocks found on the device and on the host."""
        trace, name = self.trace, str(number)
        self.now_s = Fraction(int(trace.time_ms[number]), 1000)
        max_tokens = (self.pool.num_blocks - 1) * SIZE
        num_tokens = min(int(trace.input_tokens[number]), max_tokens)
        ids = trace.blocks_of(number)[: num_tokens // SIZE]
        keys = words_to_keys(keys_of(ids))
        request = FakeRequest(name, [keys], num_tokens, num_tokens)
        request.stop = STOPS[trace.stops[number]]
        while (num_found := self.admit(request)) is None:
            self.end_transfers(self.step())
        num_local = request.num_computed_tokens
        self.end_transfers(self.step())  # The load, which the request waits for.
        num_left = num_tokens - request.num_computed_tokens
        self.end_transfers(self.step(tokens={name: num_left}))
        # The first token that is generated, and the end.
        meta = self.step(tokens={name: 1})
        request.num_tokens += max(int(trace.output_tokens[number]), 0)
        self.finish(name)
        self.end_transfers(meta)
        while self.scheduler.has_pending_stores():
            self.end_transfers(self.step())
        return num_local // SIZE, num_found // SIZE


def make_mixed_trace(seed):
    """Conversations, with prompts of whole blocks, of no block, and huge ones."""
    rng = random.Random(seed)
    made = make_synthetic_trace(
        150, seed=seed, turn_blocks=3, max_open=20, block_size=SIZE
    )
    requests = [part.tolist() for part in np.split(made.ids, made.offsets[1:-1])]
    tokens = [len(keys) * SIZE + rng.choice((0, 1, SIZE - 1)) for keys in requests]
    for at in (40, 90):
        requests[at : at + 1] = [[], list(range(10_000 + at, 10_060 + at))]
        tokens[at : at + 1] = [
            rng.choice((1, SIZE - 1)),
            60 * SIZE + rng.choice((0, 1)),
        ]
    num = len(requests)
    return make_trace(
        f"mixed {seed}",
        requests,
        np.cumsum([rng.randrange(1, 5000) for _ in range(num)]),
        tokens,
        SIZE,
        [rng.choice((1, 30, 200, 2000)) for _ in range(num)],
        [rng.choice((None, "tool_use", "end_turn")) for _ in range(num)],
    )


@pytest.mark.parametrize("policy", policy_names())
def test_every_request_finds_what_it_finds_in_a_real_engine(policy):
    totals = np.zeros(3, np.int64)
    for seed, (device_blocks, capacity) in enumerate([(64, 400), (25, 60), (90, 30)]):
        trace = make_mixed_trace(seed)
        engine = Engine(trace, policy, capacity, device_blocks)
        served, num_refused = [], 0
        for number in range(trace.num_requests):
            before = engine.scheduler.stats.num_store_refusals
            served.append(engine.serve(number))
            num_refused += engine.scheduler.stats.num_store_refusals > before
        local, host = np.array(served).T
        device = find_on_device(trace, device_blocks)
        assert device.hits.tolist() == local.tolist()
        result = replay(policy, trace, capacity, device=device)
        assert (result.hits_by_request - device.hits).tolist() == host.tolist()
        assert result.num_refused == num_refused
        assert result.stores_by_request.sum() == engine.scheduler.stats.num_stored
        totals += (local.sum(), host.sum(), num_refused)
    assert totals.all(), "each kind must have come up"


def test_the_device_keeps_what_was_used_last_and_of_that_the_head():
    trace = make_trace("t", [[1, 2, 3], [4], [1, 2, 3]], block_size=SIZE)
    # Without lengths, each prompt goes on into one more block, which goes first.
    assert find_on_device(trace, 4).hits.tolist() == [0, 0, 2]
    assert find_on_device(trace, 5).hits.tolist() == [0, 0, 3]
    # A request larger than the device takes part as far as it fits.
    trace = make_trace("t", [[1, 2, 3, 4]] * 2, None, [4 * SIZE + 3] * 2, SIZE)
    device = find_on_device(trace, 3)
    assert (device.hits.tolist(), device.usable.tolist()) == ([0, 2], [3, 3])
    for call in (
        lambda: find_on_device(trace, 0),
        lambda: sweep(trace, [], [], device_blocks=0),
    ):
        with pytest.raises(ValueError, match="num_blocks=0 must be at least 1"):
            call()


def test_a_sweep_counts_the_device_once_and_tells_of_it():
    trace = make_mixed_trace(5)
    labels = []
    results = sweep(
        trace,
        ["lru", OPTIMUM],
        [30, 60],
        lambda label, done, total: labels.append(label),
        device_blocks=50,
    )
    assert "device, 50 blocks" in labels
    assert len({id(result.device) for result in results}) == 1
    assert results[0] == replay("lru", trace, 30, device=find_on_device(trace, 50))
    for lru, optimum in zip(results[:2], results[2:], strict=True):
        assert (lru.hits_by_request <= trace.num_blocks).all()
        assert lru.num_hit_blocks < optimum.num_hit_blocks
