"""Records of a demo: one per turn, one per run, one for the whole."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Configuration of a demo.

    Attributes:
        conversations: Number of conversations.
        turns: Questions in each conversation.
        document_tokens: Length of the document of a conversation.
        question_tokens: Maximum length of a question; shorter ones are not padded.
        answer_tokens: Tokens generated for each question.
        concurrency: Requests in the engine at a time.
        block_size: Tokens per KV block.
        device_blocks: KV blocks in the device pool.
        host_bytes: Size of the host tier in bytes.
        cache_policy: Policy that chooses the host blocks to evict.
        mode: When blocks are stored: "eager" or "lazy"; see `OffloadRules.mode`.
        load_in_step: Whether prefill steps write what is loaded themselves.
        layers: Attention of the layers: "full", "window" or "hybrid"; see
            `ModelConfig.layers`.
        window_tokens: Window of the layers with a sliding window.
        storage: Folder or URL of a store behind the host tier; None for none.
        storage_bytes: Bytes that it may hold.
        seed: Seed of the weights and of the choice of documents.
    """

    conversations: int = 6
    turns: int = 4
    document_tokens: int = 3072
    question_tokens: int = 96
    answer_tokens: int = 16
    concurrency: int = 2
    block_size: int = 32
    device_blocks: int = 256
    host_bytes: int = 256 << 20
    cache_policy: str = "lru"
    mode: Literal["eager", "lazy"] = "eager"
    load_in_step: bool = False
    layers: Literal["full", "window", "hybrid"] = "full"
    window_tokens: int = 512
    storage: str | None = dataclasses.field(default=None, repr=False)
    storage_bytes: int = 4 << 30
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One question and its answer.

    Attributes:
        conversation: Index of the conversation, from 0.
        turn: Number of the turn, from 1.
        prompt_tokens: Length of the prompt: document, earlier turns, question.
        device_hit_tokens: Prompt tokens whose KV was found on the device.
        host_hit_tokens: Prompt tokens whose KV was loaded from the host.
        prefilled_tokens: Prompt tokens that the model computed.
        ttft_s: Seconds from the request's arrival to its first token.
        generated: The tokens of the answer.
    """

    conversation: int
    turn: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    prefilled_tokens: int
    ttft_s: float
    generated: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run of all conversations, with offloading on or off.

    Attributes:
        turns: In the order of (turn, conversation).
        wall_s: Seconds of the whole run, without compilation.
        blocks_stored: Blocks whose store to the host completed.
        blocks_loaded: Blocks whose load from the host completed.
        bytes_stored: Bytes of the stored blocks.
        bytes_loaded: Bytes of the loaded blocks.
        peak_host_bytes: Maximum bytes of the host tier in use.
        num_preemptions: Number of preemptions.
        blocks_written: Blocks that got to the store.
        blocks_fetched: Blocks that came from the store to the host.
        blocks_found: Blocks that the store had at the start.
        storage_bytes_per_block: Bytes of a block in the store; 0 without one.
    """

    turns: tuple[TurnRecord, ...]
    wall_s: float
    blocks_stored: int
    blocks_loaded: int
    bytes_stored: int
    bytes_loaded: int
    peak_host_bytes: int
    num_preemptions: int = 0
    blocks_written: int = 0
    blocks_fetched: int = 0
    blocks_found: int = 0
    storage_bytes_per_block: int = 0


@dataclasses.dataclass(frozen=True)
class BandwidthRecord:
    """Speed of transfers when nothing else runs; medians of interleaved trials.

    Attributes:
        store_gb_per_s: Device pool to host memory, up to completion.
        load_gb_per_s: Host memory to device pool, up to completion.
        copyto_gb_per_s: `np.copyto` of the same bytes between two warm buffers.
        num_bytes: Bytes moved in a trial.
    """

    store_gb_per_s: float
    load_gb_per_s: float
    copyto_gb_per_s: float
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class DemoRecord:
    """The same conversations with offloading off and on.

    Attributes:
        config: The configuration.
        off: The run without a host tier.
        on: The run with a host tier.
        bandwidth: Transfer speed on this machine, in this process.
        host_capacity_bytes: Size of the host tier of `on`.
    """

    config: DemoConfig
    off: RunRecord
    on: RunRecord
    bandwidth: BandwidthRecord
    host_capacity_bytes: int

    @property
    def tokens_identical(self) -> bool:
        """Whether every answer is the same, token by token, in both runs."""
        return [(t.conversation, t.turn, t.generated) for t in self.off.turns] == [
            (t.conversation, t.turn, t.generated) for t in self.on.turns
        ]
