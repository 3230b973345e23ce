"""Whatever arrives at a subscriber, over real sockets: it is counted, never raised."""

import threading

import pytest
import zmq

from examples import event_subscriber as subscriber_module
from examples.event_subscriber import EventSubscriber
from jaxkv.observe.kv_events import AllBlocksCleared, KVEventBatch, encode_batch
from jaxkv.observe.publisher import END_OF_REPLAY, EventPublisher
from tests.rigs.waiting import WAIT_S, wait_for

GOOD = encode_batch(KVEventBatch(0.5, [AllBlocksCleared()]))


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


WRONG_FRAMES = [
    [b""],
    [b"", number(2)],
    [b"", number(2), GOOD, b"more"],
    [b"", b"", GOOD],
    [b"", b"\x01" * 200, GOOD],
    [b"", number(2)[1:], GOOD],
]


@pytest.mark.parametrize("array_like", [False, True])
def test_malformed_messages_are_counted(array_like):
    good = encode_batch(KVEventBatch(0.5, [AllBlocksCleared()]), array_like=array_like)
    options = {"array_like": array_like, "replay_endpoint": None}
    with Publisher() as publisher, connect(publisher, good, **options) as subscriber:
        for frames in [*WRONG_FRAMES, [b"", END_OF_REPLAY, good]]:
            publisher.send(*frames)
        publisher.send(b"", number(1), b"nonsense")
        publisher.send(b"", number(1 << 62), b"nonsense")
        publisher.send(b"", number(2), good)
        assert wait_for(subscriber.receive, 0.05).seq == 2
        assert subscriber.stats.num_malformed == len(WRONG_FRAMES) + 3
        assert (subscriber.stats.num_lost, subscriber.stats.num_batches) == (0, 1)


def test_answers_of_a_replay_with_other_frames_are_malformed():
    good = [b"", number(1), GOOD]
    for frames in [*WRONG_FRAMES, [b"not empty", number(2), GOOD]]:
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


def test_a_replay_of_batches_without_an_end_comes_to_an_end(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_MAX_REPLAY_BYTES", 100 * len(GOOD))
    answers = [[b"", number(seq), GOOD] for seq in range(1, 10_000)]
    with Publisher(answers) as publisher, connect(publisher) as subscriber:
        assert 0 < subscriber.catch_up() <= 100


def test_a_message_of_any_size_is_not_kept(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_MAX_MESSAGE_BYTES", 1 << 16)
    with Publisher() as publisher, connect(publisher) as subscriber:
        publisher.send(b"", number(0), GOOD)
        assert subscriber.receive(timeout_s=10).seq == 0
        publisher.send(b"", number(1), bytes(1 << 20))
        assert subscriber.receive(timeout_s=0.3) is None
        assert subscriber.stats.num_malformed == 0


def test_topics_that_cannot_be_used_are_refused():
    for topic in ("\ud800", "kv@\udfff", None, 7):
        for make in (EventSubscriber, EventPublisher):
            with pytest.raises(ValueError, match=r"topic=.* must be a text of valid U"):
                make("tcp://127.0.0.1:5557", topic=topic)
