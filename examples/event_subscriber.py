"""A subscriber to copy into a router: it detects missing batches, and requests them.

Needs the extra "events".
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from jaxkv._util import Resource
from jaxkv.observe.kv_events import KVEventBatch, decode_batch
from jaxkv.observe.publisher import END_OF_REPLAY, SEQ_BYTES
from jaxkv.observe.sockets import bind, connect, offset_endpoint, topic_bytes, zmq

_END = 1 << 63  # Sequence numbers are signed and have 8 bytes; -1 ends a replay.
_MAX_MESSAGE_BYTES, _MAX_REPLAY_BYTES = 64 << 20, 1 << 30
_MAX_MALFORMED = 100  # Malformed answers of one replay.


class ReceivedBatch(NamedTuple):
    """A batch and its sequence number."""

    seq: int
    batch: KVEventBatch


@dataclasses.dataclass(frozen=True)
class SubscriberStats:
    """Counts of received batches so far."""

    num_batches: int = 0  # Including replayed batches.
    num_replayed: int = 0
    num_lost: int = 0  # Batches missing in the sequence that no replay returned.
    # How often the sequence started again: the publisher is a new process, with other
    # tiers.
    num_restarts: int = 0
    num_malformed: int = 0  # Messages that were not a batch, answers to replays too.


class EventSubscriber(Resource):
    """Receives the events of one publisher, jaxkv's or vLLM's, in order.

    Use it from one thread.

    Args:
        endpoint: The publisher's address.
        replay_endpoint: Its address for replay requests; None to request none.
        topic: Prefix of the topics to receive.
        start_seq: The first sequence number wanted; batches published before the
            subscription are then requested. None to start with the first to arrive.
        hwm: Messages that may wait here; more are lost, and requested again.
        replay_timeout_s: Seconds to wait for each message of a replay.
        bind: Bind, for publishers that connect.
        array_like: Events are arrays, as in vLLM before June 2026.

    Attributes:
        endpoint: Its address, with the port that it got.
        stats: Counts of received batches.

    Raises:
        ValueError: If an address is malformed.
        OSError: If an address cannot be bound.

    Example:
        >>> with EventSubscriber("tcp://127.0.0.1:5557") as subscriber:
        ...     print(subscriber.receive(timeout_s=0))
        None
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        start_seq: int | None = None,
        hwm: int = 100_000,
        replay_timeout_s: float = 5.0,
        bind: bool = False,
        array_like: bool = False,
    ) -> None:
        self._replay_timeout_ms = round(1000 * replay_timeout_s)
        self.endpoint = offset_endpoint("endpoint", endpoint, 0)
        self._replay_endpoint = replay_endpoint and offset_endpoint(
            "replay_endpoint", replay_endpoint, 0
        )
        self.stats = SubscriberStats()
        self._next_seq = start_seq  # None before the first
        self._last_live = -1  # of publications, without replays
        self._array_like = array_like
        self._ready: deque[ReceivedBatch] = deque()
        self._context = zmq.Context()
        try:
            self._open(topic, hwm, bind)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def receive(self, timeout_s: float) -> ReceivedBatch | None:
        """Return the next batch; missing ones come first.

        Args:
            timeout_s: Seconds to wait for a publication.

        Returns:
            The batch; None on timeout. Whatever else arrives is counted in
            `SubscriberStats.num_malformed`.
        """
        if not self._ready and self._sub.poll(round(1000 * timeout_s)):
            self._accept(self._sub.recv_multipart())
        return self._ready.popleft() if self._ready else None

    def catch_up(self) -> int:
        """Request all published batches that were not received.

        Returns:
            The number of batches that came; `receive` returns them.
        """
        num_before = len(self._ready)
        self._replay_from(self._next_seq or 0)
        return len(self._ready) - num_before

    def close(self) -> None:
        """Close the connections; no calls after this."""
        self._context.destroy(linger=0)

    def _open(self, topic: str, hwm: int, binds: bool) -> None:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.maxmsgsize = _MAX_MESSAGE_BYTES
        self._sub.set_hwm(hwm)
        self._sub.subscribe(topic_bytes(topic))
        if binds:
            self.endpoint = bind(self._sub, "endpoint", self.endpoint)
        else:
            connect(self._sub, "endpoint", self.endpoint)

    def _accept(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQ_BYTES or frames[1][0] > 127:
            self._count(num_malformed=1)
            return
        _, number, payload = frames
        seq = int.from_bytes(number, "big")
        batch = self._decode(payload)
        if batch is None and seq != self._next_seq:
            return  # Its number cannot be trusted either.
        if seq <= self._last_live:  # One publisher's numbers only rise.
            self._count(num_restarts=1)
            self._next_seq = 0
        self._last_live = seq
        if self._next_seq is None:
            self._next_seq = seq
        if seq < self._next_seq:
            return  # Already replayed.
        if seq > self._next_seq:
            self._replay_from(self._next_seq, seq)
        self._skip_to(seq)
        if batch is None:
            self._next_seq = seq + 1
        else:
            self._take(seq, batch, is_replayed=False)

    def _skip_to(self, seq: int) -> None:
        """Count the batches before `seq` as lost."""
        if self._next_seq is not None:
            self._count(num_lost=seq - self._next_seq)
        self._next_seq = seq

    def _take(self, seq: int, batch: KVEventBatch, *, is_replayed: bool) -> None:
        self._next_seq = seq + 1
        self._count(num_batches=1, num_replayed=int(is_replayed))
        self._ready.append(ReceivedBatch(seq, batch))

    def _decode(self, payload: bytes) -> KVEventBatch | None:
        """Decode a batch, or count it as malformed."""
        try:
            return decode_batch(payload, array_like=self._array_like)
        except msgspec.DecodeError:
            self._count(num_malformed=1)
            return None

    def _replay_from(self, start: int, end: int = _END) -> None:
        """Request a replay of the batches [start, end) and receive them."""
        min_seq = start
        for seq, payload in self._ask(start):
            if seq >= end:
                return  # It was published meanwhile, and arrives by itself.
            if seq < min_seq:  # They rise, too, from the requested one on.
                self._count(num_malformed=1)
                continue
            batch = self._decode(payload)
            if batch is not None:
                min_seq = seq + 1
                self._skip_to(seq)
                self._take(seq, batch, is_replayed=True)

    def _ask(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Request a replay; the caller detects one that ends early.

        It ends after too many malformed answers.
        """
        max_malformed = self.stats.num_malformed + _MAX_MALFORMED
        if not self._replay_endpoint:
            return
        # One socket per request, so that no answer to an earlier one arrives.
        num_left = _MAX_REPLAY_BYTES
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.maxmsgsize = _MAX_MESSAGE_BYTES
            replay.rcvhwm = 0  # A whole replay has to fit, however slow we are.
            connect(replay, "replay_endpoint", self._replay_endpoint)
            replay.send_multipart((b"", start.to_bytes(SEQ_BYTES, "big")))
            while replay.poll(self._replay_timeout_ms):
                frames = replay.recv_multipart()
                num_left -= sum(map(len, frames))
                if len(frames) != 3 or frames[0] or len(frames[1]) != SEQ_BYTES:
                    self._count(num_malformed=1)
                elif frames[1] == END_OF_REPLAY:
                    return
                else:
                    yield int.from_bytes(frames[1], "big"), frames[2]
                if self.stats.num_malformed >= max_malformed or num_left < 0:
                    return

    def _count(self, **nums: int) -> None:
        counts = {name: getattr(self.stats, name) + num for name, num in nums.items()}
        self.stats = dataclasses.replace(self.stats, **counts)
