"""Runs the demo: the same conversations without and with a host tier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxkv.config import OffloadConfig
from jaxkv.scheduling.record.record import TraceRecorder
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tools.console import OnProgress
from jaxkv.tools.demo.engine import Engine, EngineRequest, max_blocks_held
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import (
    DemoConfig,
    DemoRecord,
    EngineConfig,
    RunRecord,
    TurnRecord,
)
from jaxkv.tools.demo.steps import make_steps
from jaxkv.tools.demo.workload import Conversation, arrival_order, make_conversations
from jaxkv.tools.speed import measure_bandwidth

OnEngine: TypeAlias = Callable[[Engine], None]
"""Gets the engine with a host tier, compiled, before it has answered anything."""


def check_config(config: DemoConfig) -> None:
    """Raise ValueError, saying what would be right, if `config` cannot be run."""
    model = model_config(config)
    limit = model.max_seq_tokens
    longest = max_seq_tokens(config)
    if longest > limit:
        raise ValueError(
            f"the last turn would have {longest} tokens, but the model takes {limit}: "
            "use fewer turns, a shorter document or shorter answers"
        )
    groups = model.groups(config.block_size)
    needed = max_blocks_held(groups, longest, EngineConfig.chunk_sizes[-1]) + 1
    if config.device_blocks < needed:
        raise ValueError(
            f"{config.device_blocks} device blocks cannot hold one conversation of "
            f"{longest} tokens: at least {needed} are needed"
        )
    if config.host_bytes < block_bytes(config):
        raise ValueError(
            f"{config.host_bytes} bytes of host memory cannot hold one KV block of "
            f"{block_bytes(config)} bytes"
        )


def model_config(config: DemoConfig) -> ModelConfig:
    return ModelConfig(layers=config.layers, window_tokens=config.window_tokens)


def block_bytes(config: DemoConfig) -> int:
    return config.block_size * model_config(config).kv_bytes_per_token


def max_seq_tokens(config: DemoConfig) -> int:
    return config.document_tokens + config.turns * (
        config.question_tokens + config.answer_tokens
    )


def run_demo(
    config: DemoConfig,
    on_progress: OnProgress,
    on_engine: OnEngine | None = None,
    recorder: TraceRecorder | None = None,
) -> DemoRecord:
    """Run all conversations with offloading off and on, and measure the transfers.

    Returns the record of both runs.
    """
    check_config(config)
    steps = make_steps(model_config(config), config.seed)
    conversations = make_conversations(config)
    host_blocks = config.host_bytes // block_bytes(config)

    on_progress("compiling", 0, 0)
    sessions = []
    offload = OffloadConfig(
        num_host_blocks=host_blocks,
        cache_policy=config.cache_policy,
        mode=config.mode,
        storage=config.storage,
        storage_bytes=config.storage_bytes,
    )
    for offload_or_none in (None, offload):
        engine = Engine(
            steps,
            EngineConfig(
                block_size=config.block_size,
                device_blocks=config.device_blocks,
                concurrency=config.concurrency,
                max_seq_tokens=max_seq_tokens(config),
                weights_epoch=f"random from seed {config.seed}",
                offload=offload_or_none,
            ),
            recorder=recorder if offload_or_none else None,
        )
        engine.warm_up()
        if engine.has_storage:
            on_progress("listing the store", 0, 0)
            engine.list_storage()
        sessions.append(Session(engine, conversations, config.answer_tokens))
    if on_engine is not None:
        on_engine(engine)

    # Turn by turn, since the speed of a machine varies over time.
    done, total = 0, 2 * config.turns * config.conversations

    def count() -> None:
        nonlocal done
        done += 1
        on_progress("serving requests", done, total)

    on_progress("serving requests", done, total)
    for _ in range(config.turns):
        for session in sessions:
            session.ask(count)
    for session in sessions:
        session.close()
    off, on = (session.record() for session in sessions)
    return DemoRecord(
        config=config,
        off=off,
        on=on,
        bandwidth=measure_bandwidth(on_progress, block_bytes=block_bytes(config)),
        host_capacity_bytes=host_blocks * block_bytes(config),
    )


class Session:
    """Conversations with one engine: all first questions, then all second ones, ...

    As many requests as the engine runs at a time are outstanding; the next arrives when
    one finishes. Each turn has an order of its own (`arrival_order`).
    """

    def __init__(
        self, engine: Engine, conversations: Sequence[Conversation], answer_tokens: int
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._answer_tokens = answer_tokens
        self._transcripts = [list(c.document) for c in conversations]
        self._turn = 0
        self._turns: list[TurnRecord] = []
        self._wall_s = 0.0
        self._num_found = (
            engine.offload.num_storage_blocks_held if engine.offload else 0
        )

    def ask(self, on_answer: Callable[[], None]) -> None:
        start_s = time.perf_counter()
        engine = self._engine
        pending = deque(arrival_order(len(self._conversations), self._turn))
        outstanding: dict[EngineRequest, int] = {}
        while pending or outstanding:
            while pending and len(outstanding) < engine.config.concurrency:
                who = pending.popleft()
                transcript = self._transcripts[who]
                transcript += self._conversations[who].questions[self._turn]
                outstanding[engine.submit(transcript, self._answer_tokens)] = who
            for request in engine.step():
                who = outstanding.pop(request)
                self._transcripts[who] += request.generated
                self._turns.append(_turn_record(who, self._turn + 1, request))
                on_answer()
        engine.drain()
        self._turn += 1
        self._wall_s += time.perf_counter() - start_s

    def close(self) -> None:
        self._engine.close()

    def record(self) -> RunRecord:
        worker, transfer = self._engine.worker, self._engine.transfer
        bytes_each = transfer.block_bytes if transfer else 0
        stats = self._engine.offload.stats if self._engine.offload else OffloadStats()
        storage = worker.storage if worker else None
        return RunRecord(
            turns=tuple(sorted(self._turns, key=lambda r: (r.turn, r.conversation))),
            wall_s=self._wall_s,
            blocks_stored=worker.blocks_stored if worker else 0,
            blocks_loaded=worker.blocks_loaded if worker else 0,
            bytes_stored=worker.bytes_stored if worker else 0,
            bytes_loaded=worker.bytes_loaded if worker else 0,
            peak_host_bytes=self._engine.peak_host_blocks * bytes_each,
            num_preemptions=self._engine.num_preemptions,
            blocks_written=stats.num_storage_stored,
            blocks_fetched=stats.num_storage_loaded,
            blocks_found=self._num_found,
            storage_bytes_per_block=storage.object_bytes if storage else 0,
        )


def _turn_record(conversation: int, turn: int, request: EngineRequest) -> TurnRecord:
    hits = request.device_hit_tokens + request.host_hit_tokens
    return TurnRecord(
        conversation=conversation,
        turn=turn,
        prompt_tokens=len(request.prompt),
        device_hit_tokens=request.device_hit_tokens,
        host_hit_tokens=request.host_hit_tokens,
        prefilled_tokens=len(request.prompt) - hits,
        ttft_s=request.ttft_s,
        generated=request.generated,
    )
