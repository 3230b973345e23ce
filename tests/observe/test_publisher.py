"""Publishers and subscribers over real sockets."""

import contextlib
import errno
import itertools
import logging
import socket
import struct
import threading
from collections import Counter

import pytest
import zmq

from examples.event_subscriber import EventSubscriber
from jaxkv.keys.hashing import KeyChain, Namespace
from jaxkv.observe import publisher as publisher_module
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.publisher import EventPublisher
from jaxkv.observe.sockets import offset_endpoint
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.base import DEVICE_MEDIUM, HOST_MEDIUM
from tests.rigs.command_line import run_python
from tests.rigs.listening import DECODER, WAIT_MS, Listener, Picture, removed, stored
from tests.rigs.refused_threads import refused_threads
from tests.rigs.servers import free_port
from tests.rigs.waiting import wait_for

ANY = "tcp://127.0.0.1:*"
SPACE = Namespace("model", "weights", "float32", "NHD", 2)


def numbered(n):
    return stored(n.to_bytes(32, "little"))


def publish_until_heard(publisher, subscriber, events=()):
    """Publish until the subscription is there: earlier batches are lost."""
    for _ in range(1200):
        publisher.publish(events or [numbered(0)])
        if got := subscriber.receive(timeout_s=0.05):
            return got
    raise AssertionError("nothing came")


# Sequence numbers, gaps, replays.


def test_the_subscriber_requests_what_it_missed():
    with EventPublisher(ANY, ANY) as publisher:
        for n in range(5):
            publisher.publish([numbered(n)])
        with EventSubscriber(
            publisher.endpoint, publisher.replay_endpoint, start_seq=2
        ) as subscriber:
            assert subscriber.catch_up() == 3
            received = [subscriber.receive(timeout_s=0) for _ in range(3)]
            for n in range(5, 405):
                publisher.publish([numbered(n)])
                while batch := subscriber.receive(timeout_s=0.05):
                    received.append(batch)
                if len(received) >= 12:
                    break
    assert [seq for seq, _ in received] == list(range(2, 2 + len(received)))
    for seq, batch in received:
        (event,) = batch.events
        assert event.block_hashes == numbered(seq).block_hashes
    stats = subscriber.stats
    assert (stats.num_batches, stats.num_lost) == (len(received), 0)
    assert stats.num_replayed >= 3


def test_batches_that_cannot_be_replayed_are_counted_as_lost():
    with EventPublisher(ANY, ANY, buffer_steps=3) as publisher:
        for n in range(10):
            publisher.publish([numbered(n)])
        addresses = publisher.endpoint, publisher.replay_endpoint
        with EventSubscriber(*addresses, start_seq=0) as subscriber:
            assert subscriber.catch_up() == 3  # All queued batches are there.
            assert [subscriber.receive(0).seq for _ in range(3)] == [7, 8, 9]
            assert subscriber.stats.num_lost == 7
            assert subscriber.catch_up() == 0
        with EventSubscriber(publisher.endpoint, start_seq=1) as subscriber:
            got = publish_until_heard(publisher, subscriber)
            assert subscriber.stats.num_lost == got.seq - 1 >= 9


def test_a_req_socket_gets_the_first_batch_and_malformed_requests_nothing():
    """A REQ socket adds the empty frame itself; vLLM's example uses one."""
    clock = itertools.count().__next__  # ints, which readers of floats may not accept
    with EventPublisher(ANY, ANY, clock=clock) as publisher, zmq.Context() as context:
        for n in range(3):
            publisher.publish([numbered(n)])
        with context.socket(zmq.DEALER) as nonsense:
            nonsense.linger = 0
            nonsense.connect(publisher.replay_endpoint)
            nonsense.send_multipart([b"no empty frame"])
            nonsense.send_multipart([b"", b"1", b"2"])
            wait_for(lambda: publisher.stats.num_bad_requests == 2)
            assert not nonsense.poll(0)
        with context.socket(zmq.REQ) as request:
            request.linger = 0
            request.connect(publisher.replay_endpoint)
            request.send((1).to_bytes(8, "big"))
            assert request.poll(WAIT_MS)
            number, payload = request.recv_multipart()
    assert int.from_bytes(number, "big") == 1
    assert payload[:10] == b"\x93\xcb" + struct.pack(">d", 1.0)
    (event,) = DECODER.decode(payload).events
    assert event.block_hashes == numbered(1).block_hashes


def test_every_batch_of_a_burst_arrives():
    """A lost wake-up would leave batches waiting for the next one."""
    with EventPublisher(ANY) as publisher, Listener(publisher.endpoint) as listener:
        listener.await_subscription(lambda: publisher.publish([removed()]))
        first = publisher.stats.num_published
        for burst in range(100):
            for n in range(burst % 7):
                publisher.publish([numbered(n)])
            for _ in range(burst % 7):
                _, number, _ = listener.hear()
                assert int.from_bytes(number, "big") == first
                first += 1


# Too many at a time.


def test_a_subscriber_that_does_not_read_does_not_block_the_engine():
    batch = [stored(*(n.to_bytes(32, "little") for n in range(200)))]
    with (
        EventPublisher(ANY, ANY, hwm=1) as publisher,
        Listener(publisher.endpoint, publisher.replay_endpoint, hwm=1) as listener,
    ):
        for _ in range(3000):
            publisher.publish(batch)
        assert [seq for seq, _ in listener.ask(0)] == list(range(3000))
    assert publisher.stats.num_dropped_full == 0


def test_after_a_drop_the_next_batch_lists_all_blocks(monkeypatch):
    """The test stops the thread in its encoding, as long as it needs."""
    go_on, stands = threading.Event(), threading.Event()
    encode = publisher_module.encode_batch

    def encode_in_time(batch, **how):
        stands.set()
        assert go_on.wait(WAIT_MS / 1000)
        return encode(batch, **how)

    with EventPublisher(ANY, ANY, max_queue_size=2) as publisher:
        record = publisher.catalog.record
        keys = KeyChain(SPACE, record=record).extend(range(20))
        monkeypatch.setattr(publisher_module, "encode_batch", encode_in_time)
        publisher.publish([stored(keys[0])])
        assert stands.wait(WAIT_MS / 1000)
        publisher.publish([stored(keys[1])])
        publisher.publish([stored(keys[2], keys[3])])
        publisher.publish([removed(keys[0])])  # no room from here on
        publisher.publish([stored(keys[4], keys[4], medium=DEVICE_MEDIUM)])
        publisher.publish([])
        stats = publisher.stats
        assert (stats.num_queued, stats.num_dropped_full) == (2, 2)
        go_on.set()
        wait_for(lambda: publisher.stats.num_queued == 0)
        publisher.publish([])
        assert publisher.stats.num_retold == 1
        publisher.publish([removed(keys[2])])
        publisher.publish([])
        with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
            replayed = listener.ask(0)
    assert [seq for seq, _ in replayed] == [0, 1, 2, 5, 6]
    picture = Picture()
    for _, batch in replayed[2:]:  # Earlier batches do not matter.
        picture.learn(batch)
    assert picture.held(HOST_MEDIUM) == Counter([keys[1], keys[3]])
    assert picture.held(DEVICE_MEDIUM) == {keys[4]: 2}
    assert picture.tokens[keys[4]] == (keys[3], [8, 9], None, 0)
    assert publisher.stats.num_dropped_full == 2


# Addresses, start and close.


@pytest.mark.parametrize("name", ["send_multipart", "send", "recv", "poll"])
def test_a_call_of_the_thread_that_fails_once_costs_no_event(monkeypatch, caplog, name):
    owner = zmq.Poller if name == "poll" else zmq.Socket
    call, failing = getattr(owner, name), []

    def fail_once(*args, **named):
        if failing:
            raise zmq.ZMQError(failing.pop())
        return call(*args, **named)

    with (
        caplog.at_level(logging.INFO, "jaxkv"),
        EventPublisher(ANY) as publisher,
        Listener(publisher.endpoint) as listener,
    ):
        listener.await_subscription(lambda: publisher.publish([removed()]))
        monkeypatch.setattr(owner, name, fail_once)
        chain = KeyChain(SPACE, record=publisher.catalog.record)
        keys = chain.extend([1, 2, 3, 4])
        failing.append(errno.ENOMEM)
        publisher.publish([stored(keys[0])])
        wait_for(lambda: not failing)
        publisher.publish([stored(keys[1])])
        picture = Picture()
        while picture.held("CPU") != Counter(keys):
            picture.learn(DECODER.decode(listener.hear()[2]))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]


def test_a_publisher_without_a_thread_is_refused_and_leaves_nothing_open():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    message = r"endpoint=.* \(can't start new thread\)"
    with refused_threads(), pytest.raises(OSError, match=message):
        EventPublisher(endpoint)
    EventPublisher(endpoint).close()


def test_ranks_have_different_ports_and_send_their_rank():
    with EventPublisher(ANY) as second:
        port = int(second.endpoint.rpartition(":")[2])
    with EventPublisher(f"tcp://127.0.0.1:{port - 3}", data_parallel_rank=3) as made:
        assert made.endpoint == f"tcp://127.0.0.1:{port}"
        with EventSubscriber(made.endpoint) as subscriber:
            got = publish_until_heard(made, subscriber)
    assert got.batch.data_parallel_rank == 3
    assert offset_endpoint("it", "tcp://[::1]:80", 2) == "tcp://[::1]:82"
    assert offset_endpoint("it", "tcp://*:80", 0) == "tcp://*:80"


def test_a_publisher_can_connect_to_a_subscriber_that_binds(tmp_path):
    how = {"array_like": True}
    for endpoint in (ANY, f"ipc://{tmp_path}/events"):
        catalog, groups = BlockCatalog(), (FullAttention(2), SlidingWindow(2, 5))
        keys = KeyChain(SPACE, group=1, record=catalog.record).extend(range(4))
        options = how | {"groups": groups, "int_block_hashes": True}
        with (
            EventSubscriber(endpoint, bind=True, **how) as subscriber,
            EventPublisher(
                subscriber.endpoint, connect=True, catalog=catalog, **options
            ) as publisher,
        ):
            got = publish_until_heard(publisher, subscriber, [stored(*keys)])
        (event,) = got.batch.events
        assert event.block_hashes == [int.from_bytes(key[24:], "big") for key in keys]
        assert event.kv_cache_spec_kind == "sliding_window"
        assert event.kv_cache_spec_sliding_window == 5


def test_close_sends_the_queue_and_frees_thread_and_address():
    before = set(threading.enumerate())
    publisher = EventPublisher(ANY, ANY)
    for n in range(100):
        publisher.publish([numbered(n)])
    publisher.close()
    publisher.close()
    assert set(threading.enumerate()) == before
    assert publisher.stats.num_published == 100
    with pytest.raises(RuntimeError, match="The publisher is closed"):
        publisher.publish([numbered(0)])
    again = {"endpoint": publisher.endpoint}
    with EventPublisher(**again, replay_endpoint=publisher.replay_endpoint):
        pass


def test_an_ipc_address_is_taken_over_from_the_dead_alone(tmp_path):
    path = tmp_path / "events"
    endpoint, in_use = f"ipc://{path}", r"endpoint=.* is in use"
    start, publishers = threading.Barrier(4), []

    def publish():
        start.wait()
        with contextlib.suppress(OSError):
            publishers.append(EventPublisher(endpoint))

    # Of many that start at once, one has it.
    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (publisher,) = publishers
    with publisher, pytest.raises(OSError, match=in_use):
        EventPublisher(endpoint)
    path.unlink(missing_ok=True)
    with (
        socket.socket(socket.AF_UNIX) as owner,
        socket.socket(socket.AF_UNIX) as second,
    ):
        owner.bind(str(path))
        owner.listen(0)
        second.connect(str(path))  # The queue of the owner is full then.
        with pytest.raises(OSError, match=in_use):
            EventPublisher(endpoint)
    assert path.is_socket(), "its process has ended, and left it"
    with EventPublisher(endpoint):
        pass
    path.unlink(missing_ok=True)
    path.write_text("of others")
    with pytest.raises(OSError, match="cannot be bound: a file that is no socket is"):
        EventPublisher(endpoint)
    assert path.read_text() == "of others"


def test_an_address_in_use_is_named_and_nothing_stays_open():
    before = set(threading.enumerate())
    with EventPublisher(ANY) as first:
        with pytest.raises(OSError, match=f"endpoint='{first.endpoint}' is in use"):
            EventPublisher(first.endpoint)
        with pytest.raises(OSError, match=r"replay_endpoint='tcp.*' is in use") as got:
            EventPublisher(ANY, first.endpoint)
        assert got.value.errno is not None
        with pytest.raises(OSError, match=r"endpoint='tcp.*' is in use"):
            EventSubscriber(first.endpoint, bind=True)
    with pytest.raises(OSError, match=r"endpoint='tcp://nobody\.invalid:1' cannot be"):
        EventPublisher("tcp://nobody.invalid:1")
    assert set(threading.enumerate()) == before


REFUSED = (
    (EventPublisher, ["tcp://127.0.0.1"], {}, "such as 'tcp://127.0.0.1:5557'"),
    (EventPublisher, ["inproc://cache"], {}, "endpoint='inproc://cache' must"),
    (EventPublisher, [5557], {}, "endpoint=5557 must be tcp"),
    (EventPublisher, [ANY, "tcp://*"], {}, "replay_endpoint='tcp://.*' must be"),
    (
        *(EventPublisher, ["tcp://*:65535"], {"data_parallel_rank": 1}),
        r"with data_parallel_rank=1 added\) must be",
    ),
    (EventPublisher, [ANY], {"data_parallel_rank": -1}, "rank=-1 must be at lea"),
    (EventPublisher, [ANY], {"buffer_steps": -1}, "buffer_steps=-1 must be at"),
    (EventPublisher, [ANY], {"hwm": 0}, "hwm=0 must be at least 1"),
    (EventPublisher, [ANY], {"max_queue_size": 0}, "max_queue_size=0 must be at"),
    (EventSubscriber, ["tcp://*"], {}, "endpoint='tcp://.*' must be"),
    (EventSubscriber, [ANY], {}, r"endpoint='tcp://127.0.0.1:\*' cannot be"),
)


def test_bad_arguments_are_named():
    for make, args, options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make(*args, **options)


def test_an_unclosed_publisher_does_not_block_the_exit():
    program = (
        "from jaxkv.observe.publisher import EventPublisher\n"
        f"publisher = EventPublisher({ANY!r}, {ANY!r})\n"
        "print('made')"
    )
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, b"made\n"), done.stderr
