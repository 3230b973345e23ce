"""Notifies the cache policy of requests that begin and finish, and of what they ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxkv._util import shown
from jaxkv.scheduling.prefix import host_keys
from jaxkv.scheduling.protocol import Request
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.retention import Retention
from jaxkv.types import STOPS, BlockKey, Stop


class RequestNotifier:
    """Notifies the host tier when requests begin and finish.

    Not to be asked to where the policy does not listen (`BlockIndex.listens`), nor to
    check where blocks have no priorities (`retains`).

    Args:
        host: The host tier.
        block_sizes: Tokens in a device block, for each group of layers.
        blocks_per_host_block: Device blocks in a host block, whose key is the last's.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        host: BlockIndex,
        block_sizes: Sequence[int],
        blocks_per_host_block: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._block_sizes = block_sizes
        self._factor = blocks_per_host_block
        self._clock = clock
        self._marks: dict[str, int] = {}

    def check(self, request: Request) -> None:
        """Raise ValueError if a request has a `retention` that is none."""
        _retention_of(request)

    def begin(self, request: Request, keys: Sequence[Sequence[BlockKey]]) -> None:
        """Note that a request begins.

        Args:
            request: The request.
            keys: Its keys, for each group of layers.
        """
        rows, positions = host_keys(keys, self._factor)
        now_ms = self.now_ms()
        self._marks[request.request_id] = self._host.begin_request(
            rows, request.num_tokens, now_ms, positions
        )
        self._retain(request, keys, now_ms)

    def finish(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], stop: Stop | None
    ) -> None:
        """Note that a request has finished, which has begun."""
        if self._host.listens:
            mark = self._marks.pop(request.request_id)
            rows, positions = host_keys(keys, self._factor)
            num_output = output_tokens_of(request)
            now_ms = self.now_ms()
            self._host.finish_request(rows, mark, now_ms, num_output, stop, positions)
            self._retain(request, keys, now_ms)

    def _retain(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], now_ms: int
    ) -> None:
        """Give a request's blocks the priority that it wants, if it wants any."""
        retention = _retention_of(request) if self._host.retains else None
        if retention is not None:
            if retention.num_tokens is not None:
                keys = [
                    own[: retention.num_tokens // size]
                    for own, size in zip(keys, self._block_sizes, strict=True)
                ]
            rows, _ = host_keys(keys, self._factor)
            self._host.retain(rows, retention, now_ms)

    def now_ms(self) -> int:
        """Tell the time, by the policy's clock."""
        return int(1000 * self._clock())


def output_tokens_of(request: Request) -> int | None:
    """Count what a request has generated, if that is known."""
    num_prompt: int | None = getattr(request, "num_prompt_tokens", None)
    return None if num_prompt is None else max(request.num_tokens - num_prompt, 0)


def stop_of(request: Request) -> Stop | None:
    """Read why a request stopped, if that is known.

    Raises:
        ValueError: If it is none of `jaxkv.types.STOPS`.
    """
    stop: Stop | None = getattr(request, "stop", None)
    if not isinstance(stop, str | None) or stop not in STOPS:
        raise ValueError(
            f"stop={shown(stop)} of request {shown(request.request_id)} must be one of "
            f"{STOPS}."
        )
    return stop


def _retention_of(request: Request) -> Retention | None:
    """Read how long to keep a request's blocks, if it says so.

    Raises:
        ValueError: If it says so by something else than a `Retention`.
    """
    retention: Retention | None = getattr(request, "retention", None)
    if retention is not None and not isinstance(retention, Retention):
        raise ValueError(
            f"retention={shown(retention)} of request {request.request_id!r} must be a "
            "jaxkv.Retention, or None."
        )
    return retention
