"""Publishes what happens on the tiers, as vLLM does: ZeroMQ, msgpack, with replay."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jaxkv.closing import Closing
from jaxkv.groups import GroupSpec, as_groups
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.describe import count_unknown, describe, describe_all
from jaxkv.observe.kv_events import KVEvent, KVEventBatch, encode_batch
from jaxkv.observe.sockets import bind, connect, offset_endpoint, zmq
from jaxkv.types import OffloadingEvent

SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""The sequence number that ends a replay, with an empty payload."""

# Larger than any request for a replay, which is a number.
_MAX_REQUEST_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class PublisherStats:
    """What came of the batches so far.

    Attributes:
        num_published: Batches handed to the subscribers' connections.
        num_queued: Batches that wait for their turn.
        num_dropped_full: Batches dropped, as too many were waiting.
        num_retold: Times that all the tiers have was told anew, after a drop.
        num_unknown_blocks: Stored blocks told without tokens, as the catalogue did not
            know them.
        num_replays: Requests for a replay that were answered.
        num_bad_requests: Requests for a replay that were none.
    """

    num_published: int
    num_queued: int
    num_dropped_full: int
    num_retold: int
    num_unknown_blocks: int
    num_replays: int
    num_bad_requests: int


class EventPublisher(Closing):
    """Publishes events to whoever subscribes, from a thread of its own.

    A message is (topic, sequence number, payload): the number has 8 bytes, the first
    the most significant; the payload is what `jaxkv.observe.kv_events` writes. On the
    replay address, a request is a sequence number, and the answer all batches from it
    on that are still kept, (sequence number, payload) each, then `END_OF_REPLAY` with
    an empty payload.

    `publish` never waits. When too much waits already, its batch is dropped and
    counted; the sequence number is used up, so that subscribers see the gap. The next
    batch that finds room then begins with `AllBlocksCleared` and tells all that the
    tiers have, so that from it on subscribers are right again.

    Close it, or use it as a context: `close` sends what is queued. A subscriber gets
    no more than its connection has taken by then.

    Args:
        endpoint: Where to publish, ``tcp://HOST:PORT`` or ``ipc://PATH``. The messages
            contain what users wrote: "tcp://*:5557" shows it to the whole network.
        replay_endpoint: Where to answer requests for a replay; None for nowhere.
        topic: What subscribers filter by. llm-d wants ``kv@POD@MODEL``.
        buffer_steps: Batches kept for replays.
        hwm: Messages that may wait for one slow subscriber; it loses what is beyond.
        max_queue_size: Batches that may wait for the thread.
        data_parallel_rank: Which of several engines this is. It is added to the ports,
            so that one configuration serves all.
        catalog: What is known of the blocks; its `record` is for the `KeyChain`s. None
            for a new one.
        groups: The groups of the model's layers, as `OffloadScheduler` takes them, to
            name their kinds in events; None to leave that out.
        connect: Connect to a subscriber that binds, rather than bind.
        int_block_hashes: Give 64-bit numbers for keys, as vLLM does unless told not to.
            Fewer bytes, and old subscribers take nothing else; but two blocks may have
            one number.
        array_like: Write events as arrays, for subscribers of before June 2026.
        clock: Seconds since 1970, for the batches' time.

    Attributes:
        endpoint: Where it publishes, with the port that was free if any was asked for.
        replay_endpoint: Where it answers.
        catalog: What is known of the blocks.

    Raises:
        ValueError: If an address is none, or a number is too small.
        OSError: If an address cannot be had, such as one in use.

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
        for name, value, least in (
            ("buffer_steps", buffer_steps, 0),
            ("hwm", hwm, 1),
            ("max_queue_size", max_queue_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value!r} must be at least {least}.")
        self.endpoint = offset_endpoint("endpoint", endpoint, data_parallel_rank)
        self.replay_endpoint = replay_endpoint and offset_endpoint(
            "replay_endpoint", replay_endpoint, data_parallel_rank
        )
        self.catalog = BlockCatalog() if catalog is None else catalog
        self._topic = topic.encode("utf-8")
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
        self._is_short = False  # Subscribers lack what was dropped.
        self._is_closed = self._is_ringing = False
        self._num_published = self._num_dropped = self._num_retold = 0
        self._num_unknown = self._num_replays = self._num_bad_requests = 0

        # Of its own: nobody else's sockets are in the way when it ends.
        self._context = zmq.Context()
        try:
            self._open(hwm, buffer_steps, connect)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, name="jaxkv-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: Iterable[OffloadingEvent]) -> None:
        """Queue what `take_events` gave, of one tier or several, as one batch.

        Without events there is no batch, unless one was dropped before. Call it from
        the thread that schedules.

        Raises:
            RuntimeError: If the publisher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The publisher is closed.")
            told = self._tell(events)
            is_full = len(self._queue) >= self._max_queue_size
            if not told and (is_full or not self._is_short):
                return
            seq = self._next_seq
            self._next_seq += 1
            if is_full:
                self._num_dropped += 1
                self._is_short = True
                return
            if self._is_short:
                told = describe_all(
                    self.catalog,
                    self._groups,
                    int_block_hashes=self._int_block_hashes,
                )
                self._num_retold += 1
                self._is_short = False
            self._queue.append(
                (seq, KVEventBatch(float(self._clock()), told, self._rank))
            )
            self._ring()

    @property
    def stats(self) -> PublisherStats:
        """What came of the batches so far."""
        return PublisherStats(
            num_published=self._num_published,
            num_queued=len(self._queue),
            num_dropped_full=self._num_dropped,
            num_retold=self._num_retold,
            num_unknown_blocks=self._num_unknown,
            num_replays=self._num_replays,
            num_bad_requests=self._num_bad_requests,
        )

    def close(self) -> None:
        """Send what is queued, end the thread, and give up the addresses."""
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
            connect(self._pub, self.endpoint)
        else:
            self.endpoint = bind(self._pub, "endpoint", self.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if self.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            # A ROUTER drops what is beyond. A whole replay has to fit, even while
            # ZeroMQ still counts up to half of this as waiting that is gone.
            self._replay.sndhwm = 2 * (buffer_steps + 1)
            self._replay.maxmsgsize = _MAX_REQUEST_BYTES
            self.replay_endpoint = bind(
                self._replay, "replay_endpoint", self.replay_endpoint
            )
        # Wakes the thread, which waits for requests too.
        self._bell = self._context.socket(zmq.PAIR)
        self._heard = self._context.socket(zmq.PAIR)
        self._heard.bind("inproc://bell")
        self._bell.connect("inproc://bell")

    def _tell(self, events: Iterable[OffloadingEvent]) -> list[KVEvent]:
        told: list[KVEvent] = []
        for event in events:
            told += describe(
                event,
                self.catalog,
                self._groups,
                int_block_hashes=self._int_block_hashes,
            )
            self.catalog.note(event)
        self._num_unknown += count_unknown(told)
        return told

    def _ring(self) -> None:
        """Wake the thread, unless it is about to look; with the lock held."""
        if not self._is_ringing:
            self._is_ringing = True
            self._bell.send(b"")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._heard, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._heard in ready:
                self._heard.recv()
            with self._lock:
                self._is_ringing &= self._heard not in ready
                num_queued, is_last = len(self._queue), self._is_closed
            # In any case, so that a replay has all that was queued before its request.
            for _ in range(num_queued):
                self._send(*self._queue.popleft())
            if is_last:
                return
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send(self, seq: int, batch: KVEventBatch) -> None:
        number = seq.to_bytes(SEQ_BYTES, "big")
        payload = encode_batch(batch, array_like=self._array_like)
        self._pub.send_multipart((self._topic, number, payload))
        self._buffer.append((number, payload))
        self._num_published += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one request: ``(client, b"", sequence number)``."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1]:
            self._num_bad_requests += 1
            return
        client, _, start = frames
        for number, payload in self._buffer:
            if int.from_bytes(number, "big") >= int.from_bytes(start, "big"):
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))
        self._num_replays += 1
