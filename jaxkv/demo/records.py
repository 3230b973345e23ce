"""What a demo run writes down: one record a turn, one a run, one for the whole."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """What to run.

    Attributes:
        conversations: How many conversations there are.
        turns: Questions in each conversation.
        document_tokens: Length of the document that a conversation is about.
        question_tokens: Longest question; shorter ones are not padded.
        answer_tokens: Tokens generated for each question.
        concurrency: Requests in the engine at a time.
        block_size: Tokens in a KV block.
        device_blocks: KV blocks in the device pool.
        host_bytes: Size of the host tier.
        cache_policy: Which host blocks to give up when the host tier is full.
        mode: When blocks are stored: "eager" or "lazy"; see `OffloadRules.mode`.
        layers: What the model's layers attend to: "full", "window" or "hybrid"; see
            `ModelConfig.layers`.
        window_tokens: How far back the layers with a window look.
        seed: Seed of the weights and of the choice of documents.
    """

    conversations: int = 12
    turns: int = 4
    document_tokens: int = 2048
    question_tokens: int = 96
    answer_tokens: int = 16
    concurrency: int = 2
    block_size: int = 32
    device_blocks: int = 256
    host_bytes: int = 256 << 20
    cache_policy: str = "lru"
    mode: Literal["eager", "lazy"] = "eager"
    layers: Literal["full", "window", "hybrid"] = "full"
    window_tokens: int = 512
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One question and its answer.

    Attributes:
        conversation: Which conversation, from 0.
        turn: Which turn of it, from 1.
        prompt_tokens: Length of the prompt: document, earlier turns, question.
        device_hit_tokens: Prompt tokens whose KV was still on the device.
        host_hit_tokens: Prompt tokens whose KV came back from the host.
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
    """All conversations, once through, with offloading on or off.

    Attributes:
        turns: In the order of (turn, conversation).
        wall_s: Seconds for the whole run, compilation excluded.
        blocks_stored: Blocks whose store to the host completed.
        blocks_loaded: Blocks whose load from the host completed.
        bytes_stored: Bytes of the former.
        bytes_loaded: Bytes of the latter.
        peak_host_bytes: Most bytes of the host tier that held blocks at a time.
        num_preemptions: Times that a request lost its device blocks to an older one.
    """

    turns: tuple[TurnRecord, ...]
    wall_s: float
    blocks_stored: int
    blocks_loaded: int
    bytes_stored: int
    bytes_loaded: int
    peak_host_bytes: int
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True)
class BandwidthRecord:
    """How fast blocks move when nothing else runs; medians of interleaved trials.

    Attributes:
        store_gb_per_s: Device pool to host store, completion included.
        load_gb_per_s: Host store to device pool, completion included.
        copyto_gb_per_s: `np.copyto` of as many bytes between two warm buffers.
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
        config: What was run.
        off: The run without a host tier.
        on: The run with it.
        bandwidth: Transfer speed on this machine, in this process.
        host_capacity_bytes: Size of the host store that `on` had.
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
