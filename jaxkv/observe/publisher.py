"""Publishes the events of the tiers as vLLM does: ZeroMQ, msgpack, with replay."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jaxkv._util import Resource, check_whole, shown
from jaxkv._util.outage import OutageLog
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.describe import count_unknown, describe, describe_all
from jaxkv.observe.kv_events import KVEvent, KVEventBatch, encode_batch
from jaxkv.observe.sockets import bind, connect, offset_endpoint, topic_bytes, zmq
from jaxkv.search.groups import GroupSpec, as_groups
from jaxkv.tiers.base import OffloadingEvent

SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""The sequence number of the message that ends a replay; its payload is empty."""

# Larger than any replay request, which is a number.
_MAX_REQUEST_BYTES = 1024
_MAX_NUMBER = (1 << 31) - 1
_MAX_WAIT_MS = 1000  # Until the thread looks by itself, should no bell have rung.
_RETRY_S = 0.1

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class PublisherStats:
    """Counts of batches and requests so far."""

    num_published: int = 0  # Batches passed to the subscribers' connections.
    num_queued: int = 0  # Batches that wait in the queue.
    num_dropped_full: int = 0  # Batches dropped because the queue was full.
    num_retold: int = 0  # Batches that listed all blocks on the tiers, after a drop.
    num_unknown_blocks: int = 0  # Stored blocks without tokens, not in the catalogue.
    num_replays: int = 0  # Answered replay requests.
    num_bad_requests: int = 0  # Malformed replay requests.


class EventPublisher(Resource):
    """Publishes events to subscribers, from a separate thread.

    A message is (topic, sequence number, payload): the number is 8 bytes, big-endian;
    the payload is a batch of `jaxkv.observe.kv_events`. On the replay address, a
    request is a sequence number, and the answer is (sequence number, payload) for each
    kept batch with at least this number, then `END_OF_REPLAY` with an empty payload.

    `publish` never waits. If the queue is full, its batch is dropped and counted; it
    uses up a sequence number, so that subscribers see the gap. The next batch that fits
    then begins with `AllBlocksCleared` and lists all blocks on the tiers, which puts
    subscribers right again.

    Close it, or use it as a context: `close` sends the queued batches. A subscriber
    gets only what its connection has accepted by then.

    Args:
        endpoint: Address to publish on, ``tcp://HOST:PORT`` or ``ipc://PATH``. Messages
            contain text of users: "tcp://*:5557" shows it to the whole network.
        replay_endpoint: Address that answers replay requests; None for none.
        topic: Topic that subscribers filter by. llm-d expects ``kv@POD@MODEL``.
        buffer_steps: Batches kept for replays.
        hwm: Messages that may wait for a slow subscriber; more are lost to it.
        max_queue_size: Batches that may wait for the thread.
        data_parallel_rank: Index of this engine among several. It is added to the
            ports, so that one configuration serves all.
        catalog: The known blocks; pass its `record` to the `KeyChain`s. None for a new
            one.
        groups: The groups of the model's layers, as `OffloadScheduler` takes them, to
            name their kinds in events; None to leave the kinds out.
        connect: Connect to a subscriber that binds, instead of binding.
        int_block_hashes: Use 64-bit numbers for keys, as vLLM does by default. They are
            smaller, and old subscribers accept nothing else; but two blocks may have
            the same number.
        array_like: Encode events as arrays, for subscribers from before June 2026.
        clock: Returns seconds since 1970, for the time of batches.

    Attributes:
        endpoint: The address it publishes on, with the port that it got.
        replay_endpoint: The address that answers replay requests.
        catalog: The known blocks.

    Raises:
        ValueError: If an address is malformed, or a number is too small.
        OSError: If an address cannot be bound, for example because it is in use.

    Example:
        >>> events = [OffloadingEvent([b"k" * 32], 16, "CPU", removed=False)]
        >>> with EventPublisher("tcp://127.0.0.1:*") as publisher:
        ...     publisher.publish(events)
        >>> publisher.stats.num_published, publisher.stats.num_unknown_blocks
        (1, 1)
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        data_parallel_rank: int = 0,
        *,
        catalog: BlockCatalog | None = None,
        groups: int | GroupSpec | Sequence[GroupSpec] | None = None,
        connect: bool = False,
        int_block_hashes: bool = False,
        array_like: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_whole(0, _MAX_NUMBER, buffer_steps=buffer_steps)
        check_whole(1, _MAX_NUMBER, hwm=hwm, max_queue_size=max_queue_size)
        self.endpoint = offset_endpoint("endpoint", endpoint, data_parallel_rank)
        self.replay_endpoint = replay_endpoint and offset_endpoint(
            "replay_endpoint", replay_endpoint, data_parallel_rank
        )
        self.catalog = BlockCatalog() if catalog is None else catalog
        self._topic = topic_bytes(topic)
        self._rank = data_parallel_rank
        self._groups = () if groups is None else as_groups(groups)
        self._int_block_hashes = int_block_hashes
        self._array_like = array_like
        self._clock = clock
        self._max_queue_size = max_queue_size
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()
        self._next_seq = 0
        self._is_short = False  # A batch was dropped.
        self._is_closed = self._is_ringing = False
        self._stats = PublisherStats()

        # A separate context: destroying it closes only these sockets.
        self._context = zmq.Context()
        self._thread = threading.Thread(
            target=self._run, name="jaxkv-events", daemon=True
        )
        try:
            self._open(hwm, buffer_steps, connect)
            self._outage = OutageLog(
                _log,
                f"events are not published to {self.endpoint}",
                f"events are published to {self.endpoint}",
            )
            self._thread.start()
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, zmq.ZMQError | RuntimeError):
                raise OSError(
                    getattr(error, "errno", errno.EAGAIN),
                    f"endpoint={shown(self.endpoint)} cannot be opened ({error}); free "
                    "files or threads, or raise their limits",
                ) from error
            raise

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue the events of `take_events`, from one or more tiers, as one batch.

        Without events there is no batch, unless one was dropped before. Call it from
        the scheduling thread.

        Raises:
            RuntimeError: If the publisher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The publisher is closed.")
            kv_events = self._describe(events)
            is_full = len(self._queue) >= self._max_queue_size
            if not kv_events and (is_full or not self._is_short):
                return
            seq = self._next_seq
            self._next_seq += 1
            if is_full:
                self._stats.num_dropped_full += 1
                self._is_short = True
                return
            if self._is_short:
                kv_events = describe_all(
                    self.catalog,
                    self._groups,
                    int_block_hashes=self._int_block_hashes,
                )
                self._stats.num_retold += 1
                self._is_short = False
            self._queue.append(
                (seq, KVEventBatch(float(self._clock()), kv_events, self._rank))
            )
            self._ring()

    @property
    def stats(self) -> PublisherStats:
        """Counts of batches and requests so far."""
        return dataclasses.replace(self._stats, num_queued=len(self._queue))

    def close(self) -> None:
        """Send the queued batches, end the thread, and release the addresses."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._ring()
        self._thread.join()
        self._context.destroy(linger=0)

    def _open(self, hwm: int, buffer_steps: int, connects: bool) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(hwm)
        if connects:
            connect(self._pub, "endpoint", self.endpoint)
        else:
            self.endpoint = bind(self._pub, "endpoint", self.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if self.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            # A ROUTER drops messages beyond it. A whole replay has to fit, while ZeroMQ
            # may count up to half of this as waiting that has been sent.
            self._replay.sndhwm = 2 * (buffer_steps + 1)
            self._replay.maxmsgsize = _MAX_REQUEST_BYTES
            self.replay_endpoint = bind(
                self._replay, "replay_endpoint", self.replay_endpoint
            )
        # Wakes the thread, which also waits for requests.
        self._bell = self._context.socket(zmq.PAIR)
        self._heard = self._context.socket(zmq.PAIR)
        self._heard.bind("inproc://bell")
        self._bell.connect("inproc://bell")

    def _describe(self, events: Iterable[OffloadingEvent]) -> list[KVEvent]:
        kv_events: list[KVEvent] = []
        for event in events:
            kv_events += describe(
                event,
                self.catalog,
                self._groups,
                int_block_hashes=self._int_block_hashes,
            )
            self.catalog.note(event)
        self._stats.num_unknown_blocks += count_unknown(kv_events)
        return kv_events

    def _ring(self) -> None:
        """Wake the thread, unless it is about to check; with the lock held."""
        if not self._is_ringing:
            try:
                self._bell.send(b"")
            except zmq.ZMQError as error:
                self._outage.begin(error)
            else:
                self._is_ringing = True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._heard, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_last = False
        while not is_last:
            try:
                is_last = self._serve(dict(poller.poll(_MAX_WAIT_MS)))
            except zmq.ZMQError as error:
                self._outage.begin(error)
                time.sleep(_RETRY_S)

    def _serve(self, ready: dict[object, int]) -> bool:
        """Send what is queued, and answer a request; return whether that was all."""
        if self._heard in ready:
            self._heard.recv()
        with self._lock:
            self._is_ringing &= self._heard not in ready
            num_queued, is_last = len(self._queue), self._is_closed
        # Always, so that a replay has every batch queued before its request.
        for _ in range(num_queued):
            self._send(*self._queue.popleft())
        if self._replay is not None and self._replay in ready and not is_last:
            self._answer(self._replay)
        return is_last

    def _send(self, seq: int, batch: KVEventBatch) -> None:
        number = seq.to_bytes(SEQ_BYTES, "big")
        payload = encode_batch(batch, array_like=self._array_like)
        self._buffer.append((number, payload))
        try:
            self._pub.send_multipart((self._topic, number, payload))
        except zmq.ZMQError as error:
            self._outage.begin(error)
            with self._lock:
                self._is_short = True
        else:
            self._stats.num_published += 1
            self._outage.end()

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a replay request: ``(client, b"", sequence number)``."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1]:
            self._stats.num_bad_requests += 1
            return
        client, _, start = frames
        for number, payload in self._buffer:
            if int.from_bytes(number, "big") >= int.from_bytes(start, "big"):
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))
        self._stats.num_replays += 1
