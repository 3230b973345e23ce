"""The configuration of a demo, and its records: per turn, per run, of the whole."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxkv.config import OffloadConfig
from jaxkv.tools.speed import Bandwidth


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Configuration of a demo."""

    conversations: int = 6
    turns: int = 4  # Questions in each conversation
    document_tokens: int = 3072  # Length of the document of a conversation
    # Maximum length of a question; shorter ones are not padded
    question_tokens: int = 96
    answer_tokens: int = 16  # Tokens generated for each question
    concurrency: int = 2  # Requests in the engine at a time
    block_size: int = 32  # Tokens per KV block
    device_blocks: int = 256  # KV blocks in the device pool
    host_bytes: int = 256 << 20  # Size of the host tier in bytes
    cache_policy: str = "lru"  # Policy that chooses the host blocks to evict
    # When blocks are stored: "eager" or "lazy"; see `OffloadRules.mode`
    mode: Literal["eager", "lazy"] = "eager"
    # Attention of the layers: "full", "window" or "hybrid"; see `ModelConfig.layers`
    layers: Literal["full", "window", "hybrid"] = "full"
    window_tokens: int = 512  # Window of the layers with a sliding window
    # Folder or URL of a store behind the host tier; None for none
    storage: str | None = dataclasses.field(default=None, repr=False)
    storage_bytes: int = 4 << 30  # Bytes that it may hold
    seed: int = 0  # Seed of the weights and documents


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The size of an engine."""

    block_size: int  # Tokens per KV block
    device_blocks: int  # KV blocks in the device pool, the null block included
    concurrency: int  # Maximum requests that hold blocks
    max_seq_tokens: int  # Maximum tokens of a request, prompt and answer
    weights_epoch: str  # Version of the model's weights; part of every block's key
    # The host tier; None for an engine without one
    offload: OffloadConfig | None = None
    # Tokens of a prefill step, in ascending order: the smallest size that is enough, or
    # the largest.
    chunk_sizes: tuple[int, ...] = (128, 256)


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One question and its answer."""

    conversation: int  # Index of the conversation, from 0
    turn: int  # Number of the turn, from 1
    prompt_tokens: int  # Length of the prompt: document, earlier turns, question
    device_hit_tokens: int  # Prompt tokens whose KV was found on the device
    host_hit_tokens: int  # Prompt tokens whose KV was loaded from the host
    prefilled_tokens: int  # Prompt tokens that the model computed
    ttft_s: float  # Seconds from the request's arrival to its first token
    generated: tuple[int, ...]  # The tokens of the answer


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run of all conversations, with offloading on or off."""

    turns: tuple[TurnRecord, ...]  # In the order of (turn, conversation)
    wall_s: float  # Seconds of the whole run, without compilation
    blocks_stored: int  # Blocks whose store to the host completed
    blocks_loaded: int  # Blocks whose load from the host completed
    bytes_stored: int  # Bytes of the stored blocks
    bytes_loaded: int  # Bytes of the loaded blocks
    peak_host_bytes: int  # Maximum bytes of the host tier in use
    num_preemptions: int = 0
    blocks_written: int = 0  # Blocks that got to the store
    blocks_fetched: int = 0  # Blocks that came from the store to the host
    blocks_found: int = 0  # Blocks that the store had at the start
    storage_bytes_per_block: int = 0  # Bytes of a block in the store; 0 without one


@dataclasses.dataclass(frozen=True)
class DemoRecord:
    """The same conversations with offloading off and on."""

    config: DemoConfig
    off: RunRecord  # The run without a host tier
    on: RunRecord  # The run with a host tier
    bandwidth: Bandwidth  # Transfer speed on this machine, in this process
    host_capacity_bytes: int  # Size of the host tier of `on`

    @property
    def tokens_identical(self) -> bool:
        return [(t.conversation, t.turn, t.generated) for t in self.off.turns] == [
            (t.conversation, t.turn, t.generated) for t in self.on.turns
        ]
