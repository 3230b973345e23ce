"""The stage `engine`: the demo's engine with offloading off and on, token by token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.tools.demo.records import DemoConfig, DemoRecord, EngineConfig
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError

if TYPE_CHECKING:
    from jaxkv.tools.demo.engine import Engine

# The pool holds some of the conversations, so that most returning prompts are loaded.
SMALL = DemoConfig(
    conversations=4,
    turns=3,
    document_tokens=512,
    question_tokens=64,
    answer_tokens=8,
    device_blocks=48,
    host_bytes=32 << 20,
)
_VARIANTS = {
    "full attention, eager stores": SMALL,
    "windows beside full attention, lazy stores": dataclasses.replace(
        SMALL, layers="hybrid", window_tokens=128, mode="lazy", device_blocks=96
    ),
}
_MAX_ROUNDS = 3


def list_checks() -> Sequence[Check]:
    return [
        Check(name, functools.partial(_check, config))
        for name, config in _VARIANTS.items()
    ]


def _check(config: DemoConfig, turn: Turn) -> Any:
    tokens = loaded = 0
    for seed in turn.rounds(1, _MAX_ROUNDS):
        record = converse(dataclasses.replace(config, seed=seed), turn)
        tokens += sum(len(answer.generated) for answer in record.on.turns)
        loaded += record.on.blocks_loaded
    if not loaded:
        raise WrongError("no block was loaded, so that the tokens prove nothing")
    figures = {"tokens": tokens, "blocks_loaded": loaded}
    return f"{tokens:,} tokens are the same, {loaded:,} blocks were loaded", figures


def converse(
    config: DemoConfig, turn: Turn, on_engine: Callable[[Engine], Any] | None = None
) -> DemoRecord:
    from jaxkv.tools.demo.report import first_difference
    from jaxkv.tools.demo.run import run_demo

    record = run_demo(config, turn.beat, on_engine)
    difference = first_difference(record)
    if difference is None:
        return record
    if _cut_differently(config) != [answer.generated for answer in record.off.turns]:
        raise UnsupportedError(
            "even without jaxkv, the demo's model gives other tokens on this device if "
            "its prompts are cut differently; `blocks` and `races` compare all bytes"
        )
    raise WrongError(
        f"seed {config.seed}, conversation {difference.conversation}, turn "
        f"{difference.turn}: other tokens from {difference.position} on. Without "
        "jaxkv, prompts that are cut differently give the same tokens"
    )


def _cut_differently(config: DemoConfig) -> list[tuple[int, ...]]:
    """Hold the conversations without offloading, with prefill steps of other sizes."""
    from jaxkv.tools.demo import engine, run
    from jaxkv.tools.demo.steps import make_steps
    from jaxkv.tools.demo.workload import make_conversations

    sizes = EngineConfig(
        block_size=config.block_size,
        device_blocks=config.device_blocks,
        concurrency=config.concurrency,
        max_seq_tokens=run.max_seq_tokens(config),
        weights_epoch="",
        chunk_sizes=(32, 96),
    )
    made = engine.Engine(make_steps(run.model_config(config), config.seed), sizes)
    session = run.Session(made, make_conversations(config), config.answer_tokens)
    for _ in range(config.turns):
        session.ask(lambda: None)
    return [answer.generated for answer in session.record().turns]
