"""A request to the demo's engine, from its arrival to its last token."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from jaxkv.keys.hashing import KeyChain
from jaxkv.types import BlockKey


class Phase(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclasses.dataclass(eq=False)
class EngineRequest:
    """A prompt and its generated tokens, with their state."""

    number: int  # Number of requests before it
    prompt: tuple[int, ...]  # Its tokens
    max_new_tokens: int  # Tokens to generate
    arrival_s: float  # Time of its arrival, by `time.perf_counter`
    chains: tuple[KeyChain, ...]  # Keys of its full blocks, for each group of layers
    tokens: list[int]  # Prompt and generated tokens so far
    # Its device blocks, for each group of layers; the null block where no later token
    # attends.
    block_ids_by_group: list[list[int]] = dataclasses.field(default_factory=list)
    # Whether another engine computes the prompt; see `Request`
    remote_prefill: bool = False
    num_computed_tokens: int = 0  # Tokens whose KV is in the device pool
    num_loading_tokens: int = 0  # Tokens whose KV is being loaded from the host
    # Blocks of each group that are in the device's prefix cache
    num_cached_blocks: int = 0
    device_hit_tokens: int = 0  # Prompt tokens found on the device on arrival
    host_hit_tokens: int = 0  # Prompt tokens then loaded from the host
    num_preemptions: int = 0
    # Whether a load failed, so that offers are declined
    load_failed: bool = False
    first_token_s: float = 0.0  # Time of its first token
    phase: Phase = Phase.WAITING

    @property
    def request_id(self) -> str:
        """Its id."""
        return f"request-{self.number}"

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far, for the first group."""
        return self.chains[0].keys

    @property
    def block_keys_by_group(self) -> Sequence[Sequence[BlockKey]]:
        """Keys of the full blocks of all tokens so far, for each group of layers."""
        return [chain.keys for chain in self.chains]

    @property
    def num_present_tokens(self) -> int:
        """Tokens whose KV is or will be there when the next one is computed."""
        return self.num_computed_tokens + self.num_loading_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        return len(self.tokens)

    @property
    def generated(self) -> tuple[int, ...]:
        """Generated tokens so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def ttft_s(self) -> float:
        """Time from the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token remains to be computed."""
        return self.num_tokens - self.num_computed_tokens > 1 or not self.generated

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        for chain in self.chains:
            chain.extend([token])
