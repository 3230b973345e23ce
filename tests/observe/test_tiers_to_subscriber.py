"""A subscriber reconstructs the contents of both tiers of a real scheduler."""

from collections import Counter

import numpy as np
import pytest

from jaxkv.keys import words_to_keys
from jaxkv.keys.hashing import Extras, KeyChain, Namespace
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.publisher import EventPublisher
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.base import DEVICE_MEDIUM, HOST_MEDIUM
from jaxkv.tiers.device import DeviceBlockPool
from tests.rigs.listening import DECODER, Listener, Picture
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, FakeRequest, Rig

ANY = "tcp://127.0.0.1:*"


class PublishingRig(Rig):
    """An engine with real keys that publishes the events of both tiers."""

    def __init__(self, publisher, **how):
        super().__init__(**how)
        self.publisher = publisher
        self.pool = DeviceBlockPool(
            NUM_BLOCKS, enable_events=True, block_size=BLOCK_SIZE
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.fed = {}  # key -> the tokens up to the block's end, adapter, group

    def ask(self, name, tokens, lora=None):
        keys = []
        for group, spec in enumerate(self.groups):
            space = Namespace("model", "weights", "f4", "NHD", spec.block_size)
            extras, record = Extras(lora_name=lora), self.publisher.catalog.record
            keys.append(KeyChain(space, extras, group, record=record).extend(tokens))
            for n, key in enumerate(keys[-1], start=1):
                self.fed[key] = tokens[: n * spec.block_size], lora, group
        return FakeRequest(name, keys, len(tokens), len(tokens))

    def publish(self):
        self.publisher.publish(
            [*self.scheduler.take_events(), *self.pool.take_events()]
        )

    def held(self, medium):
        if medium == DEVICE_MEDIUM:
            state = self.pool.state
            return Counter(words_to_keys(state.directory.keys[state.has_key]))
        ref_cnt = self.scheduler._manager.snapshot().ref_cnt
        rows = self.rules.blocks_per_host_block
        ready = [key for key, count in ref_cnt.items() if count >= 0]
        return Counter(part for key in ready for part in self.before(key, rows))

    def before(self, key, num):
        """The last blocks of a prefix, up to this one."""
        while num and key is not None:
            yield key
            block = self.publisher.catalog.find(key)
            num, key = num - 1, block.parent


HYBRID = FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"groups": HYBRID},
        {"blocks_per_host_block": 2},
        {"mode": "lazy", "max_num_batched_tokens": 2 * BLOCK_SIZE},
    ],
    ids=["eager", "hybrid", "large host blocks", "lazy"],
)
def test_a_subscriber_that_loses_messages_ends_with_the_tiers_contents(how):
    rng = np.random.default_rng(0)
    catalog = BlockCatalog(max_spare=40)
    groups = how.get("groups", BLOCK_SIZE)
    with EventPublisher(
        ANY, ANY, "kv@pod@model", catalog=catalog, groups=groups, clock=lambda: 7.5
    ) as publisher:
        rig = PublishingRig(publisher, **how)

        def serve(n):
            tokens = rng.integers(2, size=4 * BLOCK_SIZE + 1)
            tokens = np.repeat(tokens, [BLOCK_SIZE] * 4 + [1] * (len(tokens) - 4))
            tokens = tokens[: rng.integers(1, 6) * BLOCK_SIZE + 1].tolist()
            rig.run(rig.ask(f"r{n}", tokens, lora=rng.choice([None, "adapter"])))
            if n < 35 and rng.integers(6) == 0:
                rig.pool.reset() if rng.integers(2) else rig.scheduler.reset()
            rig.publish()

        picture, next_seq, num_lost = Picture(), 0, 0
        for n in range(6):  # before anybody listens
            serve(n)
        with Listener(
            publisher.endpoint, publisher.replay_endpoint, b"kv@"
        ) as listener:
            for n in range(6, 40):
                serve(n)
                if not listener.sub.poll(20):
                    continue
                topic, number, payload = listener.hear()
                seq = int.from_bytes(number, "big")
                assert (topic, len(number)) == (b"kv@pod@model", 8)
                if rng.integers(3) == 0:
                    num_lost += 1
                    continue
                if seq > next_seq:
                    for old, batch in listener.ask(next_seq):
                        if old < seq:
                            picture.learn(batch)
                batch = DECODER.decode(payload)
                assert (batch.ts, batch.data_parallel_rank) == (7.5, 0)
                picture.learn(batch)
                next_seq = seq + 1
            for _, batch in listener.ask(next_seq):
                picture.learn(batch)
        assert num_lost
        assert next_seq > 10
        assert publisher.stats.num_unknown_blocks == 0
        assert publisher.stats.num_dropped_full == 0
    for medium in (HOST_MEDIUM, DEVICE_MEDIUM):
        assert picture.held(medium) == rig.held(medium)
        assert picture.held(medium)
    for key, (_, _, lora, group) in picture.tokens.items():
        tokens, *rest = rig.fed[key]
        assert (list(tokens), *rest) == (picture.prompt(key), lora, group)
    assert len(catalog) <= 40 + 2 * NUM_BLOCKS
