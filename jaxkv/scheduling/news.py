"""What a cache policy is told about requests, if it listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxkv.scheduling.prefix import host_keys
from jaxkv.scheduling.protocol import Request
from jaxkv.tiers.host import OffloadingManager
from jaxkv.types import STOPS, BlockKey, Stop


class RequestNews:
    """Tells the host tier when requests begin and finish.

    Nothing is kept, and the clock is not asked, where the policy does not listen.

    Args:
        host: The host tier.
        blocks_per_host_block: Device blocks in a host block, whose key is the last's.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        host: OffloadingManager,
        blocks_per_host_block: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._factor = blocks_per_host_block
        self._clock = clock
        self._marks: dict[str, int] = {}

    def begin(self, request: Request, keys: Sequence[Sequence[BlockKey]]) -> None:
        """Tell that a request begins.

        Args:
            request: The request.
            keys: Its keys, for each group of layers.
        """
        if self._host.listens:
            told, positions = host_keys(keys, self._factor)
            self._marks[request.request_id] = self._host.begin_request(
                told, request.num_tokens, self._now_ms(), positions
            )

    def finish(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], stop: Stop | None
    ) -> None:
        """Tell that a request has finished, if it was said to begin."""
        mark = self._marks.pop(request.request_id, None)
        if mark is not None:
            told, positions = host_keys(keys, self._factor)
            num_prompt: int | None = getattr(request, "num_prompt_tokens", None)
            num_output = None
            if num_prompt is not None:
                num_output = max(request.num_tokens - num_prompt, 0)
            self._host.finish_request(
                told, mark, self._now_ms(), num_output, stop, positions
            )

    def _now_ms(self) -> int:
        return int(1000 * self._clock())


def stop_of(request: Request) -> Stop | None:
    """Read why a request stopped, if that is known.

    Raises:
        ValueError: If it is none of `jaxkv.types.STOPS`.
    """
    stop: Stop | None = getattr(request, "stop", None)
    if stop not in STOPS:
        raise ValueError(
            f"{stop=} of request {request.request_id!r} must be one of {STOPS}."
        )
    return stop
