"""The stage `devices`: what this machine is, and whether blocks can move at all."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._util import gib
from jaxkv.tools.doctor.facts import Facts, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend
from jaxkv.tools.doctor.report import to_json
from jaxkv.tools.machine import machine
from jaxkv.tools.verify.oracle import run_to_end
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError
from jaxkv.transfer import TransferEngine

DEVICE = "device"
TRANSFERS = "transfers"
"""The check without which no later stage can run."""

# Settings of the runtime that change how blocks move.
_SETTINGS = re.compile(
    r"(XLA_(FLAGS|PJRT|PYTHON_CLIENT)|JAX_(PLATFORMS|ENABLE|DISABLE)|LIBTPU|TPU_|"
    r"CUDA_VISIBLE|MEGASCALE)"
)
_MAX_CHARS = 300


def list_checks() -> Sequence[Check]:
    facts = gather_facts()
    checks = {
        DEVICE: _look_at_device,
        "jaxkv doctor": _ask_doctor,
        TRANSFERS: _try_transfers,
    }
    return [Check(name, functools.partial(run, facts)) for name, run in checks.items()]


def _look_at_device(facts: Facts, turn: Turn) -> Any:
    if facts.backend is None:
        raise WrongError("; ".join(facts.refusals))
    devices = jax.devices()
    runtime = " ".join(devices[0].client.platform_version.split())[:_MAX_CHARS]
    name = " ".join(dict.fromkeys((facts.backend.platform, facts.backend.kind)))
    figures = {
        "name": f"{len(devices)} x {name}",
        "num_processes": jax.process_count(),
        "runtime": runtime,
        # The coordinates on TPU.
        "devices": [str(getattr(device, "coords", device.id)) for device in devices],
        "machine": machine(),
    }
    text = f"{figures['name']} in {jax.process_count()} process; {facts.system}"
    return f"{text}; runtime {runtime}", figures


def _ask_doctor(facts: Facts, turn: Turn) -> Any:
    """Judge memory, limits and settings as `jaxkv doctor` does."""
    best, findings = recommend(facts, Question()), judge(facts, Question())
    wrong = [f.what for f in findings if f.level == "wrong"]
    wrong = [what for what in wrong if what not in facts.refusals]
    if wrong:
        raise WrongError("; ".join(wrong))
    chosen = {
        name: value for name, value in os.environ.items() if _SETTINGS.match(name)
    }
    text = ", ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
    figures = to_json(facts, best, findings) | {"runtime_settings": chosen}
    size = "no host tier" if best is None else f"host tier {gib(best.num_bytes)}"
    return f"{size}; runtime settings {text[:_MAX_CHARS] or 'all defaults'}", figures


def _try_transfers(facts: Facts, turn: Turn) -> Any:
    if facts.refusals or facts.mode is None:
        raise UnsupportedError(
            f"{'; '.join(facts.refusals).rstrip('.')}. No block can move. What decides "
            "works: OffloadingManager, OffloadScheduler and jaxkv plan"
        )
    pool = [jnp.zeros((8, 16, 8, 128), jnp.bfloat16)]
    engine = TransferEngine(pool, 8)
    engine.warm_up()
    engine.save(pool, [1], [2])
    run_to_end(engine, pool)
    return f"default mode {engine.mode}, rows copied by {engine.kernel}", {}
