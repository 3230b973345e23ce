"""Events of a tier, and a subscriber written from vLLM's schema alone.

What it reads, any reader of vLLM's events can read.
"""

from collections import Counter
from typing import Any

import msgspec
import zmq

from jaxkv.tiers.base import HOST_MEDIUM, OffloadingEvent
from tests.rigs.waiting import WAIT_S

WAIT_MS = 1000 * WAIT_S  # for expected messages


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


def stored(*keys, medium=HOST_MEDIUM, block_size=2):
    return OffloadingEvent(list(keys), block_size, medium, removed=False)


def removed(*keys, medium=HOST_MEDIUM):
    return OffloadingEvent(list(keys), 2, medium, removed=True)


class Picture:
    """The tiers as a router sees them: counts repeats, ignores unknown blocks."""

    def __init__(self):
        self.tiers = {"CPU": Counter(), "GPU": Counter()}
        self.tokens = {}  # of a block and all before it, if they were published

    def learn(self, batch):
        for event in batch.events:
            match event:
                case BlockStored():
                    self.tiers[event.medium].update(event.block_hashes)
                    self.learn_tokens(event)
                case BlockRemoved():
                    copies = self.tiers[event.medium]
                    copies.subtract(key for key in event.block_hashes if copies[key])
                case AllBlocksCleared():
                    for copies in self.tiers.values():
                        copies.clear()

    def learn_tokens(self, event):
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for n, key in enumerate(event.block_hashes):
            tokens = event.token_ids[n * size : (n + 1) * size]
            self.tokens[key] = (parent, tokens, event.lora_name, event.group_idx)
            parent = key

    def prompt(self, key):
        parent, tokens, *_ = self.tokens[key]
        return tokens if parent is None else self.prompt(parent) + tokens

    def held(self, medium):
        return +self.tiers[medium]


class Listener:
    """Two sockets, and messages as they come."""

    def __init__(self, endpoint, replay_endpoint=None, topic=b"", hwm=0):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.rcvhwm = hwm
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if replay_endpoint:
            self.replay.connect(replay_endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def await_subscription(self, publish):
        """Publish until it is received: earlier messages are lost."""
        for _ in range(1200):
            publish()
            if self.sub.poll(50):
                break
        while self.sub.poll(50):
            self.sub.recv_multipart()

    def hear(self):
        assert self.sub.poll(WAIT_MS), "nothing came"
        return self.sub.recv_multipart()

    def ask(self, start):
        self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        answer = []
        while True:
            assert self.replay.poll(WAIT_MS), "the replay did not end"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return answer
            answer.append((int.from_bytes(number, "big"), DECODER.decode(payload)))
