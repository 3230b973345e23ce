"""The stage `ttft`: the time to first token with and without offloading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.tools.demo.records import DemoConfig
from jaxkv.tools.verify.engine import converse
from jaxkv.tools.verify.records import Check, Turn

# The demo's conversations, a few less.
_CONFIG = DemoConfig(conversations=5, turns=3, device_blocks=220)


def list_checks() -> Sequence[Check]:
    return [Check("returning prompts of 3,000 tokens, the demo's model", _measure)]


def _measure(turn: Turn) -> Any:
    from jaxkv.tools.demo.report import returning_turn_ttft_speedup, ttft_percentile_s

    record = converse(_CONFIG, turn)
    ttft_s = {
        f"{part}_{name}": ttft_percentile_s(
            (turn for turn in run.turns if (turn.turn > 1) == (part == "returning")), 50
        )
        or 0.0
        for part in ("first", "returning")
        for name, run in (("off", record.off), ("on", record.on))
    }
    speedup = returning_turn_ttft_speedup(record) or 0.0
    figures: dict[str, Any] = {"ttft_p50_s": ttft_s, "speedup": speedup}
    if speedup < 1:
        figures["advice"] = (
            "Loads of 3,000 tokens take longer than the prefill of the demo's small "
            "model. If they do with your model, set skip_slow_loads"
        )
    ms = {name: f"{1e3 * seconds:,.0f} ms" for name, seconds in ttft_s.items()}
    return (
        f"p50 {ms['returning_off']} without offloading, {ms['returning_on']} with it "
        f"({speedup:.1f} times as fast); first turns {ms['first_off']} "
        f"without and {ms['first_on']} with it; all tokens are the same",
        figures,
    )
