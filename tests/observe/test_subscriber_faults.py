"""Whatever arrives at a subscriber, over real sockets: it is counted, never raised."""

import random
import threading
from functools import partial

import msgspec
import pytest
import zmq

from jaxkv.observe import subscriber as subscriber_module
from jaxkv.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    KVEventBatch,
    encode_batch,
)
from jaxkv.observe.publisher import END_OF_REPLAY, EventPublisher
from jaxkv.observe.subscriber import EventSubscriber
from tests.rigs.waiting import WAIT_S, wait_for

GOOD = encode_batch(KVEventBatch(0.5, [AllBlocksCleared()]))
# msgpack: an array in an array, and so on; a text that is no UTF-8; a huge length.
DEEP = b"\x91" * 5000 + b"\x00"
NO_UTF_8 = [
    encode_batch(
        KVEventBatch(0.5, [BlockRemoved([7], "CPU")]), array_like=array_like
    ).replace(b"CPU", b"\xff\xfeU")
    for array_like in (False, True)
]
HUGE = b"\xdd\xff\xff\xff\xff"
# A number for a batch, and an array for the name of an event.
NO_ARRAYS = [msgspec.msgpack.encode(batch) for batch in (7, [0.5, [[[]]]])]
BAD_PAYLOADS = [b"", b"nonsense", DEEP, *NO_UTF_8, HUGE, GOOD[:-1], *NO_ARRAYS]


def number(seq):
    return seq.to_bytes(8, "big")


class Publisher:
    """Sends messages of a test, and answers requests for replays with others."""

    def __init__(self, answers=()):
        self.answers = list(answers)
        self.num_requests = 0
        self._context = zmq.Context()
        self.pub = self._context.socket(zmq.PUB)
        self.pub.linger = 0
        self.pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self.pub.last_endpoint.decode()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = 0
        self._router.bind("tcp://127.0.0.1:*")
        self.replay_endpoint = self._router.last_endpoint.decode()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self):
        while not self._is_over.is_set():
            if self._router.poll(10):
                client, *_ = self._router.recv_multipart()
                self.num_requests += 1
                for frames in self.answers:
                    self._router.send_multipart([client, *frames])

    def send(self, *frames):
        self.pub.send_multipart(list(frames))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        self._context.destroy(linger=0)


def connect(publisher, payload=GOOD, **options):
    """Connect, and wait until what is published arrives; the next number is 1."""
    defaults = {
        "replay_endpoint": publisher.replay_endpoint,
        "replay_timeout_s": WAIT_S,
    }
    subscriber = EventSubscriber(publisher.endpoint, **(defaults | options))

    def is_subscribed():
        publisher.send(b"", number(0), payload)
        return subscriber.receive(timeout_s=0.02)

    wait_for(is_subscribed)
    while subscriber.receive(timeout_s=0.1):
        pass
    subscriber.stats = subscriber_module.SubscriberStats()
    return subscriber


END = [b"", END_OF_REPLAY, b""]


@pytest.mark.parametrize("array_like", [False, True])
def test_malformed_payloads_are_counted(array_like):
    good = encode_batch(KVEventBatch(0.5, [AllBlocksCleared()]), array_like=array_like)
    options = {"array_like": array_like, "replay_endpoint": None}
    with Publisher() as publisher, connect(publisher, good, **options) as subscriber:
        for seq, payload in zip(range(2, 99, 2), BAD_PAYLOADS, strict=False):
            publisher.send(b"", number(seq - 1), payload)
            publisher.send(b"", number(1 << 62), payload)
            publisher.send(b"", number(seq), good)
            assert wait_for(subscriber.receive, 0.05).seq == seq
            assert subscriber.stats.num_malformed == seq
        assert subscriber.stats.num_lost == 0
        assert subscriber.stats.num_batches == len(BAD_PAYLOADS)


def test_answers_of_a_replay_with_other_frames_are_malformed():
    good = [b"", number(1), GOOD]
    for frames in (
        [b""],
        [b"", number(2)],
        [b"", number(2), GOOD, b"more"],
        [b"not empty", number(2), GOOD],
        [b"", b"", GOOD],
        [b"", b"\x01" * 200, GOOD],  # These had been taken for a number.
        [b"", number(2)[1:], GOOD],
    ):
        with (
            Publisher([frames, good, frames, END]) as publisher,
            connect(publisher) as subscriber,
        ):
            publisher.send(b"", number(3), GOOD)
            seqs = [subscriber.receive(timeout_s=WAIT_S).seq for _ in range(2)]
            assert seqs == [1, 3], frames
            stats = subscriber.stats
            assert (stats.num_malformed, stats.num_replayed) == (2, 1), frames
            assert stats.num_lost == 1  # Number 2.
            assert subscriber.catch_up() == 0


def test_numbers_of_replays_are_checked():
    answers = [
        [b"", number(0), GOOD],  # Before what was asked for.
        [b"", number(2), GOOD],
        [b"", number(2), GOOD],  # Once more,
        [b"", number(1), GOOD],  # or back.
        [b"", number(1 << 62), b"nonsense"],  # It cannot be trusted.
        [b"", number(3), GOOD],
        END,
    ]
    with Publisher(answers) as publisher, connect(publisher) as subscriber:
        assert subscriber.catch_up() == 2
        stats = subscriber.stats
        assert (stats.num_malformed, stats.num_replayed) == (4, 2)
        assert stats.num_lost == 1
        assert [subscriber.receive(0).seq for _ in range(2)] == [2, 3]


def test_numbers_that_begin_again_are_those_of_another_publisher():
    with Publisher([END]) as publisher, connect(publisher) as subscriber:
        for seq in (1, 2, 0):
            publisher.send(b"", number(seq), GOOD)
            assert subscriber.receive(timeout_s=10).seq == seq
        assert (subscriber.stats.num_restarts, subscriber.stats.num_lost) == (1, 0)


def test_a_replay_of_nonsense_without_an_end_comes_to_an_end():
    answers = [[b"", b"few"]] * 100_000
    with Publisher(answers) as publisher, connect(publisher) as subscriber:
        assert subscriber.catch_up() == 0
        assert subscriber.stats.num_malformed == 100


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_that_arrives_is_raised(seed):
    rng, array_like = random.Random(seed), seed == 1
    good = encode_batch(KVEventBatch(0.5, [AllBlocksCleared()]), array_like=array_like)
    values = [None, 1, -1, 1 << 63, 1.5, "text", b"bytes", [], {}, [[]], True]

    def payload():
        changed = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return rng.choice(
            [
                *(good, good, bytes(changed), rng.choice(BAD_PAYLOADS)),
                *(rng.randbytes(rng.randrange(64)), b"\x81" * rng.randrange(3000)),
                msgspec.msgpack.encode([rng.choice(values) for _ in range(3)]),
            ]
        )

    def frames(seq):
        """Frames as they should be, one in two; else more, fewer or other ones."""
        near = [seq, seq + 1, max(seq - 1, 0), 0, rng.randrange(1000)]
        far = [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2]
        named = number(rng.choice(far if rng.random() < 0.05 else near))
        if rng.random() < 0.5:
            return [b"", named, payload()]
        choices = [b"", named, payload(), END_OF_REPLAY]
        return [rng.choice(choices) for _ in range(rng.randrange(1, 6))]

    options = {"replay_timeout_s": 0.05, "array_like": array_like}
    with Publisher() as publisher, connect(publisher, good, **options) as subscriber:
        num_received = 0
        for seq in range(1, 300):
            answers = [frames(rng.randrange(seq + 2)) for _ in range(rng.randrange(4))]
            publisher.answers = answers + [END] * (rng.random() < 0.9)
            publisher.send(*frames(seq))
            while subscriber.receive(timeout_s=0.01):
                num_received += 1
            if rng.random() < 0.02:
                num_received += subscriber.catch_up()
        stats = subscriber.stats
        assert stats.num_malformed > 20
        # Only a valid batch is trusted, and its sequence number may be any.
        assert 0 <= stats.num_lost < 1 << 73
        assert stats.num_batches >= num_received // 2


WRONG_TIMES = [-1, -0.001, float("nan"), float("inf"), 3e6, "1", None]


def test_arguments_that_cannot_be_used_are_refused_before_anything_is_received():
    for topic in ("\ud800", "kv@\udfff", None, 7):
        for make in (EventSubscriber, EventPublisher):
            with pytest.raises(ValueError, match=r"topic=.* must be a text of valid U"):
                make("tcp://127.0.0.1:5557", topic=topic)
    for timeout_s in WRONG_TIMES:
        with pytest.raises(ValueError, match=r"replay_timeout_s=.* from 0 to 2000000"):
            EventSubscriber(replay_timeout_s=timeout_s)
    with Publisher() as publisher, connect(publisher) as subscriber:
        for timeout_s in WRONG_TIMES:
            with pytest.raises(
                ValueError, match=r"^timeout_s=.* must be a number of s"
            ):
                subscriber.receive(timeout_s)
        publisher.send(b"", number(1), GOOD)
        assert subscriber.receive(timeout_s=WAIT_S).seq == 1


def test_calls_after_close_say_that_it_is_closed():
    for replay_endpoint in (None, "tcp://127.0.0.1:5657"):
        subscriber = EventSubscriber("tcp://127.0.0.1:5557", replay_endpoint)
        subscriber.close()
        subscriber.close()
        for call in (subscriber.catch_up, partial(subscriber.receive, timeout_s=0)):
            with pytest.raises(RuntimeError, match="The subscriber is closed"):
                call()
