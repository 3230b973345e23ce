"""A request to the demo's engine, from its arrival to its last token."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from jaxkv.hashing import KeyChain
from jaxkv.types import BlockKey


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclasses.dataclass(eq=False)
class EngineRequest:
    """A prompt and what has become of it.

    Attributes:
        request_id: Its name.
        prompt: Its tokens.
        max_new_tokens: How many to generate.
        arrival_s: When it came, by the engine's clock.
        chain: Keys of its full blocks.
        tokens: Prompt and generated tokens so far.
        block_ids: Its device blocks.
        num_computed_tokens: Tokens whose KV is in the device pool.
        num_cached_blocks: Blocks that were made findable on the device.
        device_hit_tokens: Prompt tokens whose KV was found on the device.
        host_hit_tokens: Prompt tokens whose KV was brought back from the host.
        first_token_s: When its first token was there.
        phase: Where it is in its life.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float
    chain: KeyChain
    tokens: list[int]
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    first_token_s: float = 0.0
    phase: Phase = Phase.WAITING

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far."""
        return self.chain.keys

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        return len(self.tokens)

    @property
    def generated(self) -> tuple[int, ...]:
        """The answer so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def ttft_s(self) -> float:
        """Time from the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token remains to be computed."""
        return self.num_tokens - self.num_computed_tokens > 1 or not self.generated
